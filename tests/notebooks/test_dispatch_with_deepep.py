"""Notebook 04 on a CPU, and what it tells its reader to see."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from notebook_support import Ran
from validation.node import SCALING, load_predicted

from moelab.judge.throughput import CODE, STOCK, measured_arms
from moelab.planning.measured import ALL_TO_ALL_H200, load_measured
from moelab.planning.project import project
from moelab.planning.time.calibration import CALIBRATION, with_values
from moelab.planning.time.exchange import QUOTED
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, expected_destinations
from moelab.planning.time.traffic import (
    EXPANDING,
    EXPANDING_FP8,
    METHODS,
    STOCK_DEEPEP,
    expected_rows,
    gather_passes,
    padded_rows,
)
from moelab.titan.arms import named_arms

NAME = "04_dispatch_with_deepep"
PLACEMENT = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)


def test_its_defaults_measure_on_a_cpu(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NAME)
    titles = ran.titles()
    assert len(titles) == 3
    assert "over stock TorchTitan's" in titles[0]
    assert not any("CPU" in title for title in titles), "times over gloo are no finding"
    rows = json.loads((ran.folder / "runs" / NAME / "all_to_all.json").read_text())["rows"]
    (row,) = [row for row in rows if (row["operation"], row["routing"]) == ("dispatch", "random_balanced")]
    assert f"{row['rows_to_others']:,.0f} were counted" in ran.printed
    assert "agrees" in ran.printed


# What the notebook says that its reader should see


def test_gains_are_those_that_are_named() -> None:
    results = [one for one in measured_arms() if one.shape != "16B" and one.ratio]
    deepep = {kind: [one.ratio for one in results if (one.arm, one.activation_checkpoint) == ("bf16_deepep", kind)]
              for kind in ("none", "full")}  # fmt: skip
    assert all(0.025 < ratio - 1 < 0.045 for ratio in deepep["none"] if ratio)
    assert all(0.115 < ratio - 1 < 0.145 for ratio in deepep["full"] if ratio)
    one_pass = [one for one in results if one.code == CODE and one.arm not in STOCK]
    for short, low, high in ((False, 1.22, 1.36), (True, 1.42, 1.43)):
        gains = [one.ratio for one in one_pass if one.stock_short is short]
        assert (min(gains), max(gains)) == (pytest.approx(low, abs=6e-3), pytest.approx(high, abs=6e-3))


def test_exchanges_are_as_described() -> None:
    rows = load_measured(ALL_TO_ALL_H200).rows

    def us(arm: str, *, routing: str = "random_balanced", part: str | None = None) -> dict[str, float]:
        mine = [row for row in rows if (row["arm"], row["routing"]) == (arm, routing)]
        return {row["operation"]: row["parts_us"][part] if part else row["us_median"] for row in mine}

    deepep, standard = "deepep bf16 expanded", "standard bf16"
    gains = [
        sum(us(standard, routing=routing).values()) / sum(us(deepep, routing=routing).values())
        for routing in ("random_balanced", "round_robin")
    ]
    assert [round(gain) for gain in gains] == [5, 7]
    assert sum(us(standard, part="wire").values()) < 0.5 * sum(us(standard).values())
    few, many = us(f"{deepep}, 24 SMs"), us(deepep)
    assert [round(100 * (1 - many[name] / few[name])) for name in ("dispatch", "combine")] == [13, 43]
    assert us("deepep fp8 expanded")["dispatch"] == pytest.approx(many["dispatch"], rel=0.02)


def test_quoted_bandwidths_on_the_wire() -> None:
    two, four = (row for row in QUOTED if (row.version, row.gpu) == ("V2", "SM90"))
    assert two.on_wire_gb_s(two.dispatch_gb_s) == 45
    assert four.on_wire_gb_s(four.dispatch_gb_s) == pytest.approx(46, abs=0.5)


def test_passes_are_as_many_as_described() -> None:
    sizes: dict[str, Any] = {"rows": 4096 * 8, "experts": 8, "alignment": 128}
    paths = gather_passes(received=4096 * 7.27, hidden=7168, **sizes)
    assert [len(paths[name]) for name in (STOCK_DEEPEP, EXPANDING, EXPANDING_FP8)] == [4, 2, 1]
    assert 1.01 < padded_rows(**sizes) / sizes["rows"] < 1.02


def test_two_gpus_to_eight_are_as_described() -> None:
    for ep, ranks in ((2, 2.0), (4, 3.7), (8, 5.4)):
        placement = ExpertPlacement(experts=8 * ep, top_k=8, ep=ep, ranks_per_node=ep)
        random, forced = (
            expected_destinations(RoutingModel(kind=kind), placement) for kind in ("random_balanced", "round_robin")
        )
        assert (round(random.ranks, 1), forced.ranks) == (ranks, 1.0)
    gains = {
        (row["ep"], row["routing"]): row["gain"]
        for row in load_predicted()["rows"]
        if (row["hardware"], row["shape"], row["arm"]) == ("h200_node", SCALING, "bf16_deepep")
    }
    forced_gains = [gains[ep, "round_robin"] for ep in (2, 4, 8)]
    assert forced_gains == sorted(forced_gains)
    assert abs(gains[8, "random_balanced"] - gains[2, "random_balanced"]) < 0.03 < forced_gains[2] - forced_gains[0]


def test_a_node_hardly_moves_the_projection_of_256_gpus() -> None:
    published = named_arms()["dsv3_671b_bf16_deepep"]
    base = project(published).tps
    for name, low, high in (("nvlink", 0, 0.02), ("deepep_s", 0, 0.01), ("deepep_network", 0.06, 0.08)):
        halved = with_values(**{name: getattr(CALIBRATION, name) / 2})
        assert low <= abs(project(published, calibration=halved).tps / base - 1) <= high, name


def test_deepep_saves_as_many_copies_as_its_reader_is_told() -> None:
    found = expected_destinations(RoutingModel(kind="uniform"), PLACEMENT)
    standard, direct, hybrid = (expected_rows(found, PLACEMENT, method) for method in METHODS)
    assert 1 - direct.logical / standard.logical == pytest.approx(0.09, abs=0.005)
    assert 1 - hybrid.network / standard.network == pytest.approx(0.55, abs=0.005)
