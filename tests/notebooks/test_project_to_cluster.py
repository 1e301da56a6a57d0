"""Notebook 08 as authored, and what it tells its reader to see."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from notebook_support import WIDGET, Ran, parameters_of
from validation.published import RUN_TO_RUN, published_job

from moelab.errors import Refused
from moelab.experiment import Routing
from moelab.judge.throughput import THROUGHPUT
from moelab.planning.project import project
from moelab.planning.tables import error_table, projected_two_by_two, validation_table, waterfall
from moelab.planning.time.calibration import CALIBRATION
from moelab.planning.time.step import step_parts_s

NAME = "08_project_to_cluster"


def test_its_defaults_show_what_it_says(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NAME)
    assert len(ran.titles()) == 2
    assert all("derived" in title for title in ran.titles())
    assert len(ran.shown(WIDGET)) == 1
    tables = " ".join(ran.shown("text/plain"))
    for said in ("steps of others, TorchTitan, seen", "PyTorch and Nebius", "M GPU-hours", "layouts checked"):
        assert said in tables


def test_a_cluster_too_small_is_refused_with_the_plans_reason() -> None:
    with pytest.raises(Refused, match=r"does not fit: .* GiB of .* GiB"):
        project(parameters_of(NAME, gpu="H100").to_experiment())


# What the notebook says that its reader should see


def test_the_published_step_is_as_described() -> None:
    answers = projected_two_by_two().parts_s
    parts = {arm: {part: one.value for part, one in each.items()} for arm, each in answers.items()}
    published_s = {row.arm: published_job(row.arm).tokens_per_gpu / row.tps for row in THROUGHPUT}
    for arm, whole_s in published_s.items():
        assert sum(parts[arm].values()) == pytest.approx(whole_s, rel=RUN_TO_RUN + 0.002)
    baseline, exchange = answers["bf16_standard"], answers["bf16_standard"]["all-to-all"]
    assert 80 < exchange.low < exchange.high < 125
    assert exchange.low > max(one.high for part, one in baseline.items() if part != "all-to-all")
    assert 1 < baseline["imbalance and stragglers"].low < baseline["imbalance and stragglers"].high < 50
    products = sum(parts["bf16_standard"][part] for part in ("expert GEMMs", "other GEMMs", "attention"))
    assert 1 / 4 < products / 201 < 1 / 3
    assert parts["bf16_deepep"]["all-to-all"] / exchange.value == pytest.approx(0.5, abs=0.1)
    perfect = 1 / (1 - exchange.value / sum(parts["bf16_standard"].values()))
    assert perfect == pytest.approx(1.93, abs=0.03)
    own_s = sum(step_parts_s(published_job("bf16_standard"), CALIBRATION).values())
    assert own_s / published_s["bf16_standard"] == pytest.approx(1.1, abs=0.03)


def test_errors_by_kind_are_in_the_order_that_it_says() -> None:
    """Steps of this project are easier than those of others, and the smallest exchanges are the worst parts."""
    errors = error_table()["median error"]
    assert errors["steps of this project, seen"] < errors["steps of others, TorchTitan, seen"]
    worst = max((row for row in validation_table() if row.of == "part"), key=lambda row: abs(row.error))
    assert worst.source in ("DeepEP", "H200 exchanges")


def test_the_missing_arm_and_the_routing_are_as_described() -> None:
    forced, random = (projected_two_by_two(one) for one in (Routing.ROUND_ROBIN, Routing.RANDOM_BALANCED))
    missing, gain = forced.tps["mxfp8_standard"], random.gains["bf16_deepep"]
    assert (missing.low, missing.high) == (pytest.approx(655, abs=8), pytest.approx(715, abs=8))
    assert 0.5 < gain.low < 0.77
    assert gain.high == pytest.approx(1.1, abs=0.05)
    assert 0 < forced.interaction.low < 0.015 < forced.interaction.high < 0.03


def test_two_steps_of_the_waterfall_make_most_of_the_way() -> None:
    changes = waterfall()
    steps = {later.name: later.tps - before.tps for before, later in pairwise(changes)}
    first, second = sorted(steps, key=lambda name: steps[name])[-2:]
    assert {first.split(",")[0], second.split(" beside ")[0]} == {"CUDA graphs", "all-to-all"}
    assert steps[first] + steps[second] > 0.6 * (changes[-1].tps - changes[0].tps)
