"""Traffic and dispatch drawn: figures against the model's numbers and against small tables that are made up here."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from figure_support import notes, title

from moelab.analysis.two_by_two import CODE, arm_results, checkpointing_table, goal_lines, result_table
from moelab.deepep.benchmark_cases import OPERATIONS as ALL_OPERATIONS
from moelab.deepep.benchmark_cases import ROUTINGS, plan
from moelab.deepep.benchmark_cases import SIZES as MEASURED_SIZES
from moelab.errors import BadInput
from moelab.notebooks.all_to_all import ExperimentFailed, can_use_gpus, measure_all_to_all
from moelab.projection.exchange import QUOTED
from moelab.projection.measured import ALL_TO_ALL, COMMANDS, TWO_BY_TWO, Measurement, load_measured
from moelab.projection.routing import ExpertPlacement, RoutingModel, expected_destinations
from moelab.projection.traffic import (
    EXPANDING,
    EXPANDING_FP8,
    METHODS,
    STOCK_DEEPEP,
    STOCK_STANDARD,
    expected_rows,
    expected_traffic,
    gather_passes,
    padded_rows,
    simulate_rows,
)
from moelab.viz.deepep import (
    ARM_LOOKS,
    OPERATIONS,
    gather_bars,
    operation_times,
    quoted_bandwidths,
    sm_sweep,
    two_by_two_dots,
)
from moelab.viz.traffic import (
    METHOD_LABELS,
    TrafficExplorer,
    bytes_by_ep,
    destination_histogram,
    forwarding,
    saving_by_routing,
    token_flow,
    traffic_matrix,
)

ROOT = Path(__file__).parents[2]
PUBLISHED = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
ONE_NODE = ExpertPlacement(experts=64, top_k=6, ep=8, ranks_per_node=8)
FORCED, RANDOM = RoutingModel(kind="round_robin"), RoutingModel(kind="random_balanced")
LIMITED = RoutingModel(kind="group_limited", groups=8, limited_groups=4)
SIZES: dict[str, Any] = {"tokens": 4096, "hidden": 7168}


def bars(figure: go.Figure, name: str) -> list[go.Bar]:
    return [trace for trace in figure.data if trace.type == "bar" and trace.name == name]


# --- traffic ---------------------------------------------------------------------------------------------------------


def test_a_tokens_way_is_drawn_for_each_method_and_says_that_it_is_simulated() -> None:
    figure = token_flow(FORCED, PUBLISHED, token=13)
    assert "Sent once per node, this token crosses the network 1 time instead of 8" in title(figure)
    assert "8 experts on 1 GPU of 1 node." in title(figure)
    assert "one simulated token" in title(figure)
    assert "2 nodes without its experts not drawn" in title(figure)
    ways = [note.text.rpartition("<br>")[2] for note in figure.layout.annotations]  # the second straight to the rank
    assert ways == ["8 × network, 0 × NVLink", "1 × network, 0 × NVLink", "1 × network, 1 × NVLink"]
    assert "Sent once per GPU, this token crosses NVLink" in title(token_flow(RANDOM, ONE_NODE))
    assert "1 time as it does by each way" in title(token_flow(FORCED, replace(PUBLISHED, top_k=1), token=100))


def test_histogram_shares_are_of_all_tokens_and_have_the_means_of_the_title() -> None:
    figure = destination_histogram([FORCED, LIMITED, RANDOM], PUBLISHED)
    assert "forced round-robin 1.00, group-limited 6.60, balanced random 7.27" in title(figure)
    for routing, label in ((FORCED, "forced round-robin"), (LIMITED, "group-limited"), (RANDOM, "balanced random")):
        by_rank, by_node = bars(figure, label)
        found = expected_destinations(routing, PUBLISHED)
        for bar, mean in ((by_rank, found.ranks), (by_node, found.nodes)):
            assert sum(bar.y) == pytest.approx(100)
            assert np.dot(bar.x, bar.y) / 100 == pytest.approx(mean, abs=0.05)


def test_matrix_holds_the_bytes_of_the_simulation() -> None:
    figure = traffic_matrix(RANDOM, PUBLISHED, tokens=256, hidden=7168)
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    for trace, method in zip(maps, METHODS, strict=True):
        count = simulate_rows(RANDOM, PUBLISHED, method, tokens=256)
        expected_mb = (count.nvlink_SR + count.network_SR) * 14336 / 1e6
        assert np.nansum(trace.z) == pytest.approx(expected_mb.sum(), rel=1e-3)
    assert "simulated routing" in title(figure)
    assert "All ranks share a node" in title(traffic_matrix(RANDOM, ONE_NODE, tokens=64, hidden=2048))


def test_bytes_by_degree_are_the_models() -> None:
    figure = bytes_by_ep([RANDOM, FORCED], PUBLISHED, **SIZES)
    assert "At EP 32 DeepEP sends 2.2 times less over the network" in title(figure)
    assert "derived, not measured" in title(figure)
    lines = {(trace.name, trace.yaxis): dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert len(lines) == len(figure.data) == 2 * (1 + 2 + 2)  # on both wires; the standard one is alike under both
    sent = expected_traffic(RANDOM, PUBLISHED, "deepep_hybrid", **SIZES).total
    name = "DeepEP, once per node, balanced random"
    assert lines[name, "y"]["32"] == pytest.approx(sent.network / 1e9)
    assert lines[name, "y2"]["32"] == pytest.approx(sent.nvlink / 1e9)
    assert lines[name, "y"]["8"] == 0
    assert set(lines[name, "y"]) == {"2", "4", "8", "16", "32", "64"}
    assert "nothing leaves the node" in title(bytes_by_ep([RANDOM], ONE_NODE, tokens=64, hidden=2048))


def test_the_trap_is_stated_with_its_factors() -> None:
    figure = saving_by_routing([FORCED, LIMITED, RANDOM], PUBLISHED)
    assert "8.0 times fewer copies on the network under forced round-robin routing, 2.2 times" in title(figure)
    (hybrid,) = bars(figure, METHOD_LABELS["deepep_hybrid"])
    rows = expected_rows(expected_destinations(RANDOM, PUBLISHED), PUBLISHED, "deepep_hybrid")
    assert (hybrid.y[2], hybrid.text[2]) == (pytest.approx(rows.network), "÷ 2.2")
    assert "copies on NVLink" in title(saving_by_routing([FORCED, RANDOM], ONE_NODE))


# --- DeepEP: ways, quoted and derived --------------------------------------------------------------------------------


def test_forwarding_has_both_stages_and_the_way_back() -> None:
    figure = forwarding(RANDOM, PUBLISHED, sender=3, token=5)
    said = notes(figure)
    far, near = (int(said.split(wire)[0].split()[-1]) for wire in (" × network, to its own", " × NVLink, to the"))
    assert f"sums: {near} × NVLink, {far} × network" in said
    assert f"{far} copies over the network" in title(figure)
    assert "all reached inside the node" in title(forwarding(RANDOM, ONE_NODE))
    with pytest.raises(BadInput, match="sender is 32; valid: 0 to 31"):
        forwarding(RANDOM, PUBLISHED, sender=32)


def test_quoted_bandwidths_stay_below_the_network_card_on_the_wire() -> None:
    figure = quoted_bandwidths(QUOTED)
    assert "quoted from DeepEP" in title(figure)
    (logical,), (wire,) = bars(figure, "logical, quoted"), bars(figure, "on the network, derived")
    assert max(logical.y) == 90
    assert max(wire.y) == pytest.approx(61 * 3 / 4)  # less than a 400 Gb/s card's 50


def test_passes_over_memory_add_up() -> None:
    paths = gather_passes(received=100.0, rows=400.0, experts=4, hidden=64, alignment=32)
    padded = padded_rows(400, 4, 32)
    assert padded == 400 + 4 * 15.5  # the mean over all remainders
    moved = {name: sum(one.moved_bytes for one in passes) for name, passes in paths.items()}
    wide, low = 64 * 2, 64 * (1 + 1 / 32)
    assert moved[STOCK_STANDARD] == pytest.approx(400 * wide + padded * (2 * wide + low))
    assert moved[STOCK_DEEPEP] == pytest.approx(2 * 100 * wide + 3 * 400 * wide + padded * (2 * wide + low))
    assert moved[EXPANDING] == pytest.approx(100 * wide + padded * (2 * wide + low))
    assert moved[EXPANDING_FP8] == pytest.approx(100 * low + padded * low)
    figure = gather_bars(paths, hbm_tb_s=8, words="made up")
    assert sum(sum(trace.x) for trace in figure.data) == pytest.approx(sum(moved.values()) / 1e9)
    assert "derived, not measured" in title(figure)


# --- measured: what is there, and what is not ------------------------------------------------------------------------

MADE_UP: dict[str, Any] = {
    "date": "2000-01-01",
    "environment": {"gpus": [{"name": "MADE-UP GPU"}] * 4, "packages": {"torch": "0"}},
    "device": "GPUs over NCCL",
    "ranks": 2,
    "copies": {"between_ranks_gb_s": 400.0},
}
"""No measurement: numbers that these tests chose."""


def made_up_exchanges() -> dict[str, Any]:
    shared = {"size": "made up", "hidden": 64, "top_k": 2, "experts": 4, "tokens": 8, "ranks": 2, "repeats": 3}
    shared |= {"error": None, "us_iqr": 100.0, "precision": "bf16"}
    times = {"standard bf16": 4000.0, "deepep bf16 expanded": 2000.0}
    rows: list[dict[str, Any]] = [
        {**shared, "routing": routing, "arm": arm, "operation": operation, "us_median": us * share}
        for routing, share in (("random_balanced", 1.0), ("round_robin", 0.5))
        for arm, us in times.items()
        for operation in OPERATIONS
    ]
    sweep = {**shared, "routing": "random_balanced", "layout": "expanded", "operation": "dispatch", "us_median": 1.0}
    rows += [
        {**sweep, "arm": f"deepep {sms} SMs", "sms": sms, "sms_chosen_by": by, "physical_bytes": 1e4 * sms}
        for sms, by in ((8, "caller"), (32, "library"), (16, "caller"))
    ]
    rows.append({**rows[-1], "routing": "round_robin", "sms": 96, "sms_chosen_by": "library"})  # no sweep of these
    rows.append({**shared, "routing": "round_robin", "arm": "deepep mxfp8 expanded", "error": "broke"})
    return {**MADE_UP, "rows": rows}


def made_up_arms(*, with_steps: bool = True) -> list[dict[str, Any]]:
    """Two passes of two arms: stock takes 1 s a step, DeepEP 0.8 s then 0.9 s, with 100 tokens a step."""
    seconds = {"bf16_standard": (1.0, 1.0), "bf16_deepep": (0.8, 0.9)}
    rows = [
        {"shape": "671B", "activation_checkpoint": "none", "arm": arm, "routing": "round_robin", "order": order}
        | {"steps": 3, "tps_iqr": 4.0, "tps_median": 100 / each[order]}
        | ({"step_s": [each[order] - 0.01, each[order], each[order] + 0.01]} if with_steps else {})
        for order in (1, 0)
        for arm, each in seconds.items()
    ]
    return rows


def exchanges_title(**measured: Any) -> str:
    return title(operation_times(Measurement(name=ALL_TO_ALL, content=made_up_exchanges() | measured)))


def test_exchange_times_are_drawn_by_way_and_routing_and_say_where_they_are_from() -> None:
    figure = operation_times(Measurement(name=ALL_TO_ALL, content=made_up_exchanges(), packaged=True))
    assert "DeepEP expanding takes 8.0 ms for a layer's four exchanges" in title(figure)
    assert "all-to-all 16.0 ms (balanced random routing)" in title(figure)
    assert "measured elsewhere, replayed" in title(figure)
    assert "replayed" not in exchanges_title()
    assert "no measure of a GPU" in exchanges_title(device="CPU processes over gloo: the method's test")
    assert "2 × MADE-UP GPU, torch 0, 2000-01-01" in title(figure)
    assert [list(bar.y) for bar in bars(figure, "standard, BF16")] == [[4.0] * 4, [2.0] * 4]
    assert bars(figure, "standard, BF16")[0].error_y.array == (0.05,) * 4
    assert not bars(figure, "DeepEP expanding, MXFP8 dispatch")  # it failed


def test_every_way_that_the_experiment_measures_can_be_drawn() -> None:
    groups = plan(MEASURED_SIZES, ROUTINGS, ("standard", "deepep"), ())
    assert {arm.name for group in groups for arm in group.arms} == set(ARM_LOOKS)
    assert set(OPERATIONS) == set(ALL_OPERATIONS)


def test_sweep_of_multiprocessors_is_in_order_and_under_the_plain_copy() -> None:
    figure = sm_sweep(Measurement(name=ALL_TO_ALL, content=made_up_exchanges(), packaged=True))
    assert "320 GB/s with 32 multiprocessors, 80 % of a plain copy" in title(figure)
    (line,) = figure.data
    assert (list(line.x), list(line.y)) == ([8, 16, 32], [80.0, 160.0, 320.0])
    assert "plain copy 400 GB/s" in notes(figure)


def test_arms_are_held_against_stock_over_all_passes() -> None:
    stock, deepep = arm_results(made_up_arms())
    assert (stock.arm, stock.steps, stock.tps) == ("bf16_standard", 6, pytest.approx(100))
    assert deepep.passes == (100 / 0.8, 100 / 0.9)
    rates = sorted(100 / (middle + change) for middle in (0.8, 0.9) for change in (-0.01, 0, 0.01))
    assert deepep.tps == pytest.approx(statistics.median(rates))
    assert deepep.ratio == pytest.approx(deepep.tps / stock.tps)
    low, _, high = statistics.quantiles(rates, n=4)
    assert (deepep.low, deepep.high) == (pytest.approx(low), pytest.approx(high))
    without = arm_results(made_up_arms(with_steps=False))[1]
    assert without.tps == pytest.approx((100 / 0.8 + 100 / 0.9) / 2)
    assert without.high - without.low == pytest.approx(4.0)


def on_tuesday(deepep_tps: float) -> list[dict[str, Any]]:
    """Another campaign, where stock makes 400 tokens/s."""
    tps = {"bf16_standard": 400.0, "bf16_deepep": deepep_tps}
    return [row | {"campaign": "Tuesday", "tps_median": tps[row["arm"]]} for row in made_up_arms(with_steps=False)]


def in_fp8(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"arm": row["arm"].replace("bf16_deepep", "fp8_deepep")} for row in rows]


def test_an_arm_of_two_campaigns_has_the_mean_of_their_ratios_and_the_rates_of_the_first() -> None:
    """The second host is four times as fast, DeepEP gains 1.2 times there, and it timed half as many steps."""
    monday = [row | {"campaign": "Monday"} for row in made_up_arms()]
    tuesday = [row for row in on_tuesday(480.0) if row["order"] == 0]
    alone = {one.arm: one for one in arm_results(monday)}
    both = {one.arm: one for one in arm_results([*monday, *tuesday])}
    first = alone["bf16_deepep"].ratio
    assert first is not None
    assert both["bf16_deepep"].ratio == pytest.approx((2 * first + 1.2) / 3)
    assert both["bf16_standard"].ratio == pytest.approx(1.0)
    for arm, one in both.items():
        assert (one.tps, one.passes, one.steps) == (alone[arm].tps, alone[arm].passes, alone[arm].steps)


def test_ratios_of_the_packages_two_by_two_are_those_of_its_own_summary() -> None:
    measured = load_measured(TWO_BY_TWO)
    assert measured.content is not None
    summary: dict[tuple[str | None, ...], list[tuple[float, int]]] = {}  # ratio and steps of each campaign
    for row in measured.content["summary"]:
        key = (row["shape"], row["activation_checkpoint"], row["routing"], row["arm"], row.get("code"))
        summary.setdefault(key, []).append((row["ratio"], row["steps"]))
    results = arm_results(measured.rows)
    assert len(results) == len(summary)
    for one in results:
        key = (one.shape, one.activation_checkpoint, one.routing, one.arm, one.code)
        ratios, steps = zip(*summary[key], strict=True)
        assert one.ratio == pytest.approx(np.average(ratios, weights=steps), abs=2e-3)


def test_goals_are_judged_and_missing_ones_said() -> None:
    assert all("reached; under the same" in line for line in goal_lines(arm_results(made_up_arms())))
    slow = [row | {"arm": row["arm"].replace("bf16_deepep", "fp8_standard")} for row in made_up_arms()]
    first, second = goal_lines(arm_results(slow))
    assert first == "BF16 + DeepEP at a 671B shape: goal 1.10 × stock's best; not measured yet"
    assert "(FP8 + standard all-to-all, 671B, no checkpointing, round-robin): reached" in second
    unequal = [row | {"tps_median": 100.0, "step_s": [1.0, 1.0]} for row in made_up_arms()]
    assert all("missed; under the same" in line for line in goal_lines(arm_results(unequal)))
    assert all("not measured yet" in line for line in goal_lines([]))
    assert result_table(arm_results(unequal))["× stock"].tolist() == [1.0, 1.0]
    alone = [row for row in made_up_arms() if row["arm"] == "bf16_deepep"]
    assert result_table(arm_results(alone))["× stock"].isna().all()


def under(checkpointing: str, stock_s: float, deepep_s: float) -> list[dict[str, Any]]:
    """Both arms under one checkpointing in one campaign."""
    seconds = {"bf16_standard": stock_s, "bf16_deepep": deepep_s}
    made = {"activation_checkpoint": checkpointing, "campaign": "Monday"}
    return [
        row | made | {"tps_median": 100 / seconds[row["arm"]], "step_s": [seconds[row["arm"]]] * 3}
        for row in made_up_arms()
    ]


def test_stocks_best_is_its_fastest_checkpointing() -> None:
    """DeepEP gains 1.25 times under full checkpointing, and 1.10 times over stock's best, which has none."""
    alone = arm_results(under("full", 1.25, 1.0))
    assert [one.best_ratio for one in alone] == [None, None]
    assert goal_lines(alone)[0] == (
        "BF16 + DeepEP at a 671B shape: goal 1.10 × stock's best; not measured yet; under the same checkpointing up to "
        "1.250 × (BF16 + DeepEP, 671B, full checkpointing, round-robin)"
    )
    assert checkpointing_table(under("full", 1.25, 1.0)).empty
    rows = under("full", 1.25, 1.0) + under("none", 0.88, 0.8)
    results = arm_results(rows)
    deepep = {one.activation_checkpoint: one for one in results if one.arm == "bf16_deepep"}
    assert {kind: one.ratio for kind, one in deepep.items()} == pytest.approx({"full": 1.25, "none": 1.1})
    assert {kind: one.best_ratio for kind, one in deepep.items()} == pytest.approx({"full": 0.88, "none": 1.1})
    assert "measured 1.100 × (BF16 + DeepEP, 671B, no checkpointing" in goal_lines(results)[0]
    table = checkpointing_table(rows)
    assert dict(zip(table["checkpointing"], table["× stock"], strict=True)) == {
        "full checkpointing": 1.25, "no checkpointing": 1.1, "best of each side: none and none": 1.1,
    }  # fmt: skip
    cut = [row for row in rows if row["activation_checkpoint"] == "none" or row["arm"] == "bf16_standard"]
    assert set(checkpointing_table(cut)["best arm"]) == {"BF16 + DeepEP"}
    assert checkpointing_table([row for row in rows if row["arm"] == "bf16_standard"]).empty
    short = [row | {"allocator_retries": 2 * (row["arm"] == "bf16_standard")} for row in rows]
    assert checkpointing_table(short)["remark"].tolist() == ["stock was short of memory"] * 3
    lines = goal_lines(arm_results(short))
    assert lines[-1].endswith("stock, 671B, full checkpointing, stock, 671B, no checkpointing")
    assert not any("under the same" in line for line in lines)
    assert set(result_table(arm_results(short))["remark"]) == {"stock was short of memory"}
    cramped = [row | {"allocator_retries": int(row["activation_checkpoint"] == "full")} for row in rows]
    figure = two_by_two_dots(arm_results(cramped), Measurement(name="", content={"label": "measured"}))
    assert "1.10 times as fast as stock" in figure.layout.title.text  # not 1.25 times one that was short of memory
    assert [note.text for note in figure.layout.annotations if "×" in note.text] == ["1.25 ×†", "1.10 ×"]


def test_full_dispatch_is_held_against_full() -> None:
    rows = under("full", 1.25, 1.0)
    kept = [row | {"activation_checkpoint": "full+dispatch", "arm": "bf16_deepep_full+dispatch"} for row in rows[1:2]]
    (one,) = [one for one in arm_results([*rows, *kept]) if one.activation_checkpoint == "full+dispatch"]
    assert one.ratio == pytest.approx(1.25)
    assert one.setting == "671B, full checkpointing"


def test_two_by_two_draws_current_arms_with_quartiles_below_their_shapes() -> None:
    fp8 = in_fp8(made_up_arms())
    rows = made_up_arms() + [row | {"shape": "16B", "routing": "random_balanced"} for row in made_up_arms()]
    rows += [row | {"code": "of a trial"} for row in made_up_arms()] + fp8  # these FP8 experts were not FP8
    rows += [row | {"arm": row["arm"].replace("bf16_deepep", "mxfp8-emulated_deepep")} for row in made_up_arms()]
    rows += [row | {"code": CODE, "activation_checkpoint": "full"} for row in fp8]
    measured = Measurement(name=TWO_BY_TWO, content={**MADE_UP, "rows": rows}, packaged=True)
    results = {(one.shape, one.arm, one.code): one for one in arm_results(measured.rows)}
    figure = two_by_two_dots(list(results.values()), measured)
    assert "BF16 + DeepEP is 1.18 times as fast as stock (671B: 1 dense + 2 MoE layers" in title(figure)
    assert "measured elsewhere, replayed" in title(figure)
    lines = list(figure.layout.yaxis.ticktext)
    assert lines == [
        "<b>671B: 1 dense + 2 MoE layers, 32 experts</b>", "BF16 + DeepEP, no checkpointing",
        "Fused FP8 + DeepEP, full checkpointing", "<b>16B: 1 dense + 4 MoE layers, 64 experts</b>",
        "BF16 + DeepEP, no checkpointing",
    ]  # fmt: skip
    random, forced = (trace for trace in figure.data if trace.x[0] is not None)
    assert [lines[round(y)] for y in (*forced.y, *random.y)] == [lines[1], lines[2], lines[4]]
    deepep, stock = (results["671B", arm, None] for arm in ("bf16_deepep", "bf16_standard"))
    assert forced.x[0] == deepep.ratio
    assert forced.error_x.arrayminus[0] == pytest.approx((deepep.tps - deepep.low) / stock.tps)
    assert forced.error_x.array[0] == pytest.approx((deepep.high - deepep.tps) / stock.tps)
    assert notes(figure).count("1.18 ×") == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_measured_says_how_to_measure_it(name: str) -> None:
    nothing = Measurement(name=name, content=None, packaged=True)
    assert not nothing.rows
    for figure in (two_by_two_dots([], nothing), operation_times(nothing), sm_sweep(nothing)):
        assert not figure.data
        assert "not measured yet" in title(figure)
        assert f"benchmarks/results/{name}.json" in title(figure)
    script = nothing.stamp.split("benchmarks/")[1].split()[0]
    described = (ROOT / "benchmarks" / script).read_text()
    assert COMMANDS[name].split(" --output")[0] in described, "the script does not say that it is started so"


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    wrong = {"{": "is not JSON", "[]": "has no list of rows", '{"rows": [1]}': "a row has no shape"}
    wrong['{"rows": [{"shape": "16B"}]}'] = "a row has no activation_checkpoint, arm, routing, order, steps, tps_median"
    for text, said in wrong.items():
        file.write_text(text)
        with pytest.raises(BadInput, match=said):
            load_measured(TWO_BY_TWO, file)
    with pytest.raises(BadInput, match=r"cannot be read: No such file"):
        load_measured(TWO_BY_TWO, tmp_path / "missing.json")
    with pytest.raises(BadInput, match="there is no measurement 'gemm'; valid: all_to_all_h100, h100_two_by_two"):
        load_measured("gemm")


def test_an_experiment_that_fails_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.notebooks.all_to_all.PROGRAM", "moelab.no_such_program")
    said = r"(?s)the all-to-all experiment failed:\n.*No module named moelab.no_such_program.*ChildFailedError"
    with pytest.raises(ExperimentFailed, match=said):
        measure_all_to_all(tmp_path / "new" / "results.json")
    monkeypatch.setattr("moelab.notebooks.all_to_all.gpus", lambda: ("one",))
    assert not can_use_gpus()


# --- explorer --------------------------------------------------------------------------------------------------------


def test_explorer_follows_its_controls_and_says_what_cannot_be() -> None:
    explorer = TrafficExplorer()
    assert "<b>7.27 GPUs</b> on <b>3.61 nodes</b> (derived)" in explorer.words.value
    sent = expected_traffic(RANDOM, PUBLISHED, "deepep_direct", **SIZES).total
    least_ms = (28.2, 1e3 * sent.network / 50e9, 12.7)  # by each way: bytes over the bandwidth of the network card
    written = [float(ms) for ms in re.findall(r">(\d+\.\d\d)</td></tr>", explorer.words.value)]
    assert written == pytest.approx(least_ms, abs=0.06)
    explorer.controls["routing"].value = "group_limited"
    assert "<b>6.60 GPUs</b> on <b>2.93 nodes</b>" in explorer.words.value
    explorer.controls["model"].value = "GLM-4.5"
    explorer.controls["ep"].value = 64
    assert "ep is 64 and does not divide 160 experts" in explorer.reasons["ep"].value
    assert not explorer.figures
    explorer.controls["ep"].value = 8
    explorer.controls["routing"].value = "skewed"
    assert "(simulated)" in explorer.words.value


def test_explorer_begins_where_it_is_told_and_refuses_a_control_that_is_none() -> None:
    explorer = TrafficExplorer(hidden=1234, token=3)
    assert (explorer.chosen["model"], explorer.models["yours"]["hidden"]) == ("yours", 1234)
    assert explorer.picture() == token_flow(RANDOM, PUBLISHED, token=3)
    with pytest.raises(BadInput, match="the explorer has no control 'seed'"):
        TrafficExplorer(seed=1)
