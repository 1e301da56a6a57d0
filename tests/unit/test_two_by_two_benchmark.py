"""The benchmark of the two-by-two: what it runs next, what it writes down, and what it makes of two depths."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import pytest
from validation.shapes import arm_of
from validation.two_by_two import DEPTHS, arm_results, finished, layer_gains, layer_rows, result_table

from moelab.data import read_json
from moelab.judge.throughput import CODE, FUSED, STOCK, measured_arms
from moelab.planning import TWO_BY_TWO, load_measured

BEST = "fp8_deepep_dispatch-fp8"
DEEP = "671B, 10 MoE layers"
SLOW, FAST = (0.7, 1.2), (0.6, 1.0)
"""Seconds of a step at the two depths: 0.2 for head, embedding and optimizer, and 0.1 or 0.08 for each layer."""


def rows_of(arm: str, step_s: tuple[float, float], *, checkpointing: str = "full", **more: Any) -> list[dict[str, Any]]:
    """A pass of three steps at each depth."""
    shared = {"campaign": "c", "activation_checkpoint": checkpointing, "arm": arm, "routing": "random_balanced"}
    shared |= {"order": 0, "steps": 3, "tps_iqr": 0.0}
    return [
        shared | {"shape": shape, "step_s": [second] * 3, "tps_median": 8192 / second} | more
        for shape, second in zip(DEPTHS, step_s, strict=True)
    ]


def test_out_of_memory_is_a_row_and_the_arm_is_left_alone() -> None:
    import h100_two_by_two as benchmark  # which loads TorchTitan

    arms = {"shapes": list(DEPTHS), "checkpointing": ["full", "selective", "none"], "arms": ["bf16_standard", BEST]}
    asked = argparse.Namespace(**arms, routings=["random_balanced"], passes=2, steps=10, campaign="c", dry=False)
    content: dict[str, Any] = {"rows": [], "refused": [], "date": "2026-11-28T08:24:25"}
    keys = benchmark.missing_keys(content, asked, 0)
    full = keys[0]
    benchmark.add(content, benchmark.no_memory_rows(full, asked.routings), asked)
    (row,) = content["rows"]
    assert (row["error"], row["step_s"], row["arm"], content["summary"]) == ("out of memory", [], "bf16_standard", [])
    assert [key for key in keys if key not in benchmark.missing_keys(content, asked, 0)] == [full, keys[2]]
    content["refused"].append({**keys[1]._asdict(), "exit_code": 1, "error": []})
    left = benchmark.missing_keys(content, asked, 0)
    assert not {key[:3] for key in left} & {full[:3], keys[1][:3]}
    assert keys[1] in benchmark.missing_keys(content, asked, 1), "a later call asks again"


def test_two_depths_give_the_gain_of_a_layer() -> None:
    rows = rows_of(STOCK[0], SLOW) + rows_of(BEST, FAST)
    (gain,) = layer_gains(rows)
    assert (gain["stock_ms"], gain["arm_ms"], gain["ratio"]) == pytest.approx((100.0, 80.0, 1.25))
    assert (gain["step_5"], gain["step_10"]) == pytest.approx((0.7 / 0.6, 1.2))
    assert [*layer_rows(rows)[0].values()][3:9] == [100.0, 80.0, 1.25, 1.167, 1.2, 1]


@pytest.mark.parametrize(
    "arm",
    [
        rows_of(BEST, FAST, campaign="d"),
        rows_of(BEST, FAST, checkpointing="none"),
        rows_of(BEST, FAST, allocator_retries=42),
        rows_of(BEST, FAST)[:1],
        [rows_of(BEST, FAST)[0], rows_of(BEST, FAST)[1] | {"step_s": [], "error": "out of memory"}],
    ],
    ids=["campaign", "checkpointing", "short of memory", "one depth", "no memory at the other"],
)
def test_depths_that_are_not_alike_or_not_whole_give_none(arm: list[dict[str, Any]]) -> None:
    assert layer_gains(rows_of(STOCK[0], SLOW) + arm) == []
    assert layer_rows(rows_of(STOCK[0], SLOW) + arm) == []


def test_a_ratio_is_over_the_faster_of_torchtitans_own_settings_and_names_it() -> None:
    import h100_two_by_two as benchmark

    (plain, tiles), arm = STOCK, f"{BEST}_flex_tiles"
    rows = [
        row
        for name, step_s in ((plain, SLOW), (tiles, (0.65, 1.1)), (arm, (0.5, 0.8)))
        for row in rows_of(name, step_s, checkpointing="selective", code=CODE)
    ]
    (gain,) = layer_gains(rows)
    assert (gain["stock"], gain["passes"]) == (tiles, 1)
    assert (gain["ratio"], gain["step_10"]) == pytest.approx((1.5, 1.375))
    assert [*layer_rows(rows)[0].values()][-3:] == [1.375, 1, f"stock with flex tiles, {FUSED}"]
    results = {one.arm: one for one in arm_results(rows) if one.shape == DEEP}
    best = results[arm]
    assert (best.stock, best.ratio, best.code) == (tiles, pytest.approx(1.375), CODE)
    assert best.best_ratio is None  # stock under one checkpointing that recomputes: a faster one is not known
    assert results[plain].ratio == pytest.approx(1.1 / 1.2)
    assert result_table([best]).iloc[0, -2:].tolist() == [1.375, f"stock with flex tiles, {FUSED}"]
    later = [row | {"campaign": "d", "steps": 9, "tps_median": 8192 / 1.1} for row in rows]  # no gain, over more steps
    pooled = {(one.shape, one.arm): one.ratio for one in arm_results(rows + later)}
    assert pooled[DEEP, arm] == pytest.approx((3 * 1.375 + 9 * 1.0) / 12)
    summary = {(row["shape"], row["arm"]): row for row in benchmark.summary(rows)}
    assert summary[DEEP, arm]["ratio"] == pytest.approx(1.375)
    assert {row["stock"] for row in summary.values()} == {tiles}


def test_rows_of_another_code_are_another_result() -> None:
    """Its stock is measured again: neither a ratio nor a layer's gain is over that of the other."""
    rows = rows_of(STOCK[0], SLOW) + rows_of(BEST, FAST) + rows_of(BEST, (0.5, 0.8), code=CODE)
    results = {one.code: one for one in arm_results(rows) if (one.arm, one.shape) == (BEST, DEEP)}
    assert results[None].ratio == pytest.approx(1.2)
    assert (results[CODE].ratio, results[CODE].stock) == (None, None)
    assert [gain["code"] for gain in layer_gains(rows)] == [None]


def test_names_are_read_as_the_arms_that_ran() -> None:
    from h100_two_by_two import ARMS

    stock = {"precision": "bf16", "ep_backend": "standard"}
    for arm, settings in ARMS.items():
        ran = {name: value for name, value in settings.items() if name != "mxfp8_kernels"}
        assert {**stock, **arm_of(arm)} == {**stock, **ran}, arm


def test_the_packages_finished_tables_are_those_of_its_measurement() -> None:
    made = json.loads(json.dumps(finished(load_measured(TWO_BY_TWO).rows)))
    assert read_json("two_by_two.json") == made
    assert [asdict(one) | {"passes": list(one.passes)} for one in measured_arms()] == made["results"]
