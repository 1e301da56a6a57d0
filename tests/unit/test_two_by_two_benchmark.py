"""The benchmark of the two-by-two: what it runs next, what it writes down, and what it makes of two depths."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from validation.shapes import arm_of

from moelab.analysis.two_by_two import CODE, DEPTHS, FUSED, STOCK, arm_results, layer_gains, layer_table, result_table

BEST = "fp8_deepep_dispatch-fp8"


def options(**changes: Any) -> argparse.Namespace:
    fields = {"shapes": list(DEPTHS), "checkpointing": ["full", "selective", "none"], "arms": ["bf16_standard", BEST]}
    fields |= {"routings": ["random_balanced"], "passes": 2, "steps": 10, "campaign": "c", "dry": False}
    return argparse.Namespace(**fields | changes)


def nothing() -> dict[str, Any]:
    return {"rows": [], "refused": [], "date": "2026-11-28T08:24:25"}


def test_out_of_memory_is_a_row_and_the_arm_is_left_alone() -> None:
    import h100_two_by_two as benchmark  # which loads TorchTitan

    content, asked = nothing(), options()
    keys = benchmark.missing_keys(content, asked, 0)
    full = keys[0]
    benchmark.add(content, benchmark.no_memory_rows(full, asked.routings), asked)
    (row,) = content["rows"]
    assert (row["error"], row["step_s"], row["arm"]) == ("out of memory", [], "bf16_standard")
    assert content["summary"] == []
    assert [key for key in keys if key not in benchmark.missing_keys(content, asked, 0)] == [full, keys[2]]
    content["refused"].append({**keys[1]._asdict(), "exit_code": 1, "error": []})
    left = benchmark.missing_keys(content, asked, 0)
    assert not {key[:3] for key in left} & {full[:3], keys[1][:3]}
    assert keys[1] in benchmark.missing_keys(content, asked, 1), "a later call asks again"


def depth_rows(campaign: str, checkpointing: str, arm: str, steps: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"campaign": campaign, "shape": shape, "activation_checkpoint": checkpointing, "arm": arm,
         "routing": "random_balanced", "step_s": [second] * 3}
        for shape, second in zip(DEPTHS, steps, strict=True)
    ]  # fmt: skip


def test_two_depths_give_the_gain_of_a_layer() -> None:
    """Head, embedding and optimizer cost 0.2 s here; a layer 0.1 s under stock and 0.08 s under the arm."""
    rows = depth_rows("c", "full", "bf16_standard", (0.7, 1.2)) + depth_rows("c", "full", BEST, (0.6, 1.0))
    (gain,) = layer_gains(rows)
    assert (gain["stock_ms"], gain["arm_ms"], gain["ratio"]) == pytest.approx((100.0, 80.0, 1.25))
    assert (gain["step_5"], gain["step_10"]) == pytest.approx((0.7 / 0.6, 1.2))
    assert layer_table(rows).iloc[0, 3:9].tolist() == [100.0, 80.0, 1.25, 1.167, 1.2, 1]


def test_depths_of_two_campaigns_or_checkpointings_are_not_mixed() -> None:
    stock = depth_rows("c", "full", "bf16_standard", (0.7, 1.2))
    for campaign, checkpointing in (("d", "full"), ("c", "none")):
        assert layer_gains(stock + depth_rows(campaign, checkpointing, BEST, (0.6, 1.0))) == []
    shallow = depth_rows("c", "full", BEST, (0.6, 1.0))[:1]
    short = [row | {"allocator_retries": 42} for row in depth_rows("c", "full", BEST, (0.6, 1.0))]
    assert layer_gains(stock + short) == []
    lost = [row | {"step_s": [], "error": "out of memory"} for row in depth_rows("c", "full", BEST, (0.6, 1.0))[1:]]
    assert layer_table(stock + shallow + lost).empty


def test_a_ratio_is_over_the_faster_of_torchtitans_own_settings_and_names_it() -> None:
    import h100_two_by_two as benchmark

    plain, tiles = STOCK
    rows = [
        row | {"order": 0, "steps": 3, "tps_median": 8192 / row["step_s"][0], "tps_iqr": 0.0, "code": CODE}
        for arm, steps in ((plain, (0.7, 1.2)), (tiles, (0.65, 1.1)), (f"{BEST}_flex_tiles", (0.5, 0.8)))
        for row in depth_rows("c", "selective", arm, steps)
    ]
    (gain,) = layer_gains(rows)
    assert (gain["stock"], gain["passes"]) == (tiles, 1)
    assert (gain["ratio"], gain["step_10"]) == pytest.approx((1.5, 1.375))
    assert layer_table(rows).iloc[0, -3:].tolist() == [1.375, 1, f"stock with flex tiles, {FUSED}"]
    results = {(one.shape, one.arm): one for one in arm_results(rows)}
    best = results["671B, 10 MoE layers", f"{BEST}_flex_tiles"]
    assert (best.stock, best.ratio, best.code) == (tiles, pytest.approx(1.375), CODE)
    assert best.best_ratio is None  # stock under one checkpointing that recomputes: a faster one is not known
    assert results["671B, 10 MoE layers", plain].ratio == pytest.approx(1.1 / 1.2)
    assert result_table([best]).iloc[0, -2:].tolist() == [1.375, f"stock with flex tiles, {FUSED}"]
    later = [row | {"campaign": "d", "steps": 9, "tps_median": 8192 / 1.1} for row in rows]  # no gain, over more steps
    pooled = {(one.shape, one.arm): one.ratio for one in arm_results(rows + later)}
    assert pooled[best.shape, best.arm] == pytest.approx((3 * 1.375 + 9 * 1.0) / 12)
    summary = {(row["shape"], row["arm"]): row for row in benchmark.summary(rows)}
    assert summary["671B, 10 MoE layers", best.arm]["ratio"] == pytest.approx(1.375)
    assert {row["stock"] for row in summary.values()} == {tiles}


def test_rows_of_another_code_are_another_result() -> None:
    """Its stock is measured again: neither a ratio nor a layer's gain is over that of the other."""
    old = depth_rows("c", "full", STOCK[0], (0.7, 1.2)) + depth_rows("c", "full", BEST, (0.6, 1.0))
    new = [row | {"code": CODE} for row in depth_rows("c", "full", BEST, (0.5, 0.8))]
    rows = [{"order": 0, "steps": 3, "tps_median": 8192 / row["step_s"][0], "tps_iqr": 0.0, **row} for row in old + new]
    results = {one.code: one for one in arm_results(rows) if (one.arm, one.shape) == (BEST, "671B, 10 MoE layers")}
    assert results[None].ratio == pytest.approx(1.2)
    assert (results[CODE].ratio, results[CODE].stock) == (None, None)
    assert [gain["code"] for gain in layer_gains(rows)] == [None]


def test_names_are_read_as_the_arms_that_ran() -> None:
    from h100_two_by_two import ARMS

    stock = {"precision": "bf16", "ep_backend": "standard"}
    for arm, settings in ARMS.items():
        if "host_sync" not in settings:  # no field of an experiment
            ran = {name: value for name, value in settings.items() if name != "mxfp8_kernels"}
            assert {**stock, **arm_of(arm)} == {**stock, **ran}, arm
