"""Traffic and dispatch drawn: figures against the model's numbers and against small tables that are made up here."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from figure_support import assert_says, notes, title, traces
from validation.two_by_two import arm_results, checkpointing_rows, goal_sentences, result_table

from moelab.errors import BadInput
from moelab.judge import throughput as two_by_two
from moelab.micro import exchange
from moelab.notebooks.results import ExperimentFailed, measure_all_to_all
from moelab.planning.measured import ALL_TO_ALL, COMMANDS, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.time import traffic as model
from moelab.planning.time.routing import ExpertPlacement, RoutingModel
from moelab.viz import deepep
from moelab.viz import traffic as viz
from moelab.viz.theme import NARROW

ROOT = Path(__file__).parents[2]
PUBLISHED = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
ONE_NODE = ExpertPlacement(experts=64, top_k=6, ep=8, ranks_per_node=8)
FORCED, RANDOM = RoutingModel(kind="round_robin"), RoutingModel(kind="random_balanced")
LIMITED = RoutingModel(kind="group_limited", groups=8, limited_groups=4)
SIZES: dict[str, Any] = {"tokens": 4096, "hidden": 7168}
REPLAYED = "measured elsewhere, replayed"

# Traffic


def test_a_tokens_way_is_drawn_for_each_method() -> None:
    figure = viz.token_flow(FORCED, PUBLISHED, token=13)
    assert_says(figure, "8 experts on 1 GPU of 1 node", "2 nodes without", "one simulated token")
    ways = [note.rpartition("<br>")[2] for note in notes(figure)]  # the second straight to the rank
    assert ways == ["8 × network, 0 × NVLink", "1 × network, 0 × NVLink", "1 × network, 1 × NVLink"]


def test_the_matrix_is_the_simulations() -> None:
    figure = viz.traffic_matrix(RANDOM, PUBLISHED, tokens=256, hidden=7168)
    counts = [model.simulate_rows(RANDOM, PUBLISHED, method, tokens=256) for method in model.METHODS]
    sent_mb = [(count.nvlink_SR + count.network_SR).sum() * 14336 / 1e6 for count in counts]
    assert [np.nansum(trace.z) for trace in traces(figure, type="heatmap")] == pytest.approx(sent_mb, rel=1e-3)
    assert_says(figure, "simulated routing")


def test_bytes_by_degree_are_the_models() -> None:
    figure = viz.bytes_by_ep([RANDOM, FORCED], PUBLISHED, **SIZES)
    assert_says(figure, "derived, not measured")
    lines = {(trace.name, trace.yaxis): dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert len(lines) == len(figure.data) == 2 * (1 + 2 + 2)  # on both wires; the standard one is alike under both
    sent = model.expected_traffic(RANDOM, PUBLISHED, "deepep_hybrid", **SIZES).total
    network, nvlink = (lines["DeepEP, once per node, balanced random", axis] for axis in ("y", "y2"))
    assert (network["8"], network["32"], nvlink["32"]) == pytest.approx((0, sent.network / 1e9, sent.nvlink / 1e9))
    assert set(network) == {"2", "4", "8", "16", "32", "64"}


def test_the_explorer_bounds_times_by_the_wires_and_begins_where_it_is_told() -> None:
    sent = model.expected_traffic(RANDOM, PUBLISHED, "deepep_direct", **SIZES).total
    least_ms = (28.2, 1e3 * sent.network / 50e9, 12.7)  # by each way: bytes over the bandwidth of the network card
    written = [float(ms) for ms in re.findall(r">(\d+\.\d\d)</td></tr>", viz.TrafficExplorer().words.value)]
    assert written == pytest.approx(least_ms, abs=0.06)
    own = viz.TrafficExplorer(hidden=1234, token=3)
    assert (own.chosen["model"], own.models["yours"]["hidden"]) == ("yours", 1234)
    assert own.figure.data == viz.token_flow(RANDOM, PUBLISHED, token=3, width=NARROW).data
    with pytest.raises(BadInput, match="the explorer has no control 'seed'"):
        viz.TrafficExplorer(seed=1)


# DeepEP: derived, and measured exchanges


def test_passes_over_memory_add_up() -> None:
    paths = model.gather_passes(received=100.0, rows=400.0, experts=4, hidden=64, alignment=32)
    padded, wide, low = 400 + 4 * 15.5, 64 * 2, 64 * (1 + 1 / 32)  # padded by the mean over all remainders
    moved = {
        model.STOCK_STANDARD: 400 * wide + padded * (2 * wide + low),
        model.STOCK_DEEPEP: 2 * 100 * wide + 3 * 400 * wide + padded * (2 * wide + low),
        model.EXPANDING: 100 * wide + padded * (2 * wide + low),
        model.EXPANDING_FP8: 100 * low + padded * low,
    }
    found = {path: sum(one.moved_bytes for one in passes) for path, passes in paths.items()}
    assert found == pytest.approx(moved)


MADE_UP: dict[str, Any] = {
    "date": "2000-01-01",
    "environment": {"gpus": [{"name": "MADE-UP GPU"}] * 4, "packages": {"torch": "0"}},
    "device": "GPUs over NCCL",
    "ranks": 2,
    "copies": {"between_ranks_gb_s": 400.0},
}
"""No measurement: numbers that these tests chose."""


def exchanges(*, packaged: bool = False, **changes: Any) -> Measurement:
    shared = {"size": "made up", "hidden": 64, "top_k": 2, "experts": 4, "tokens": 8, "ranks": 2, "repeats": 3}
    shared |= {"error": None, "us_iqr": 100.0, "precision": "bf16"}
    rows: list[dict[str, Any]] = [
        {**shared, "routing": routing, "arm": arm, "operation": operation, "us_median": us * share}
        for routing, share in (("random_balanced", 1.0), ("round_robin", 0.5))
        for arm, us in (("standard bf16", 4000.0), ("deepep bf16 expanded", 2000.0))
        for operation in deepep.OPERATIONS
    ]
    sweep = {**shared, "routing": "random_balanced", "operation": "dispatch", "us_median": 2.0}
    rows.append({**sweep, "arm": "deepep bf16 expanded", "sms": 8, "sms_chosen_by": "caller"})  # not training's
    rows.append({**shared, "routing": "round_robin", "arm": "deepep mxfp8 expanded", "error": "broke"})
    return Measurement(name=ALL_TO_ALL, content={**MADE_UP, "rows": rows, **changes}, packaged=packaged)


def test_exchanges_are_drawn_by_way_and_routing_and_say_where_they_are_from() -> None:
    figure = deepep.operation_times(exchanges(packaged=True))
    assert_says(figure, REPLAYED, "2 × MADE-UP GPU, torch 0, 2000-01-01")
    assert REPLAYED not in title(deepep.operation_times(exchanges()))
    assert_says(
        deepep.operation_times(exchanges(device="CPU processes over gloo: the method's test")), "no measure of a GPU"
    )
    (standard,) = traces(figure, name="standard, BF16")
    assert list(standard.x) == [4.0] * 4 + [2.0] * 4
    assert standard.error_x.array == (0.05,) * 8
    assert not traces(figure, name="DeepEP expanding, MXFP8 dispatch")  # it failed
    # Every way that the experiment measures can be drawn.
    assert {arm.name for arm in (exchange.STANDARD, *exchange.DEEPEP)} == set(deepep.ARM_LOOKS)
    assert deepep.OPERATIONS == exchange.OPERATIONS


# Measured arms


def passes(
    stock_s: tuple[float, ...] = (1.0, 1.0),
    deepep_s: tuple[float, ...] = (0.8, 0.9),
    *,
    arm: str = "bf16_deepep",
    aside_s: float | None = 0.01,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Stock and an arm in turns: three steps a pass around so many seconds, 100 tokens each; rows without, for None."""
    shared = {"shape": "671B", "activation_checkpoint": "none", "routing": "round_robin", "steps": 3, "tps_iqr": 4.0}
    rows = []
    for order in reversed(range(len(stock_s))):
        for name, second in (("bf16_standard", stock_s[order]), (arm, deepep_s[order])):
            steps = {} if aside_s is None else {"step_s": [second - aside_s, second, second + aside_s]}
            rows.append(shared | {"arm": name, "order": order, "tps_median": 100 / second} | steps | fields)
    return rows


def under(checkpointing: str, stock_s: float, deepep_s: float, **fields: Any) -> list[dict[str, Any]]:
    fields |= {"activation_checkpoint": checkpointing, "campaign": "Monday"}
    return passes((stock_s,) * 2, (deepep_s,) * 2, aside_s=0.0, **fields)


FULL, BOTH = under("full", 1.25, 1.0), under("full", 1.25, 1.0) + under("none", 0.88, 0.8)


def test_arms_are_held_against_stock_over_all_passes() -> None:
    stock, ours = arm_results(passes())
    assert (stock.arm, stock.steps, stock.tps) == ("bf16_standard", 6, pytest.approx(100))
    assert ours.passes == (100 / 0.8, 100 / 0.9)
    rates = sorted(100 / (middle + change) for middle in (0.8, 0.9) for change in (-0.01, 0, 0.01))
    low, middle, high = statistics.quantiles(rates, n=4)
    assert (ours.low, ours.tps, ours.high) == pytest.approx((low, middle, high))
    assert ours.ratio_ends == pytest.approx((low / 100, middle / 100, high / 100))
    without, mean = arm_results(passes(aside_s=None))[1], (100 / 0.8 + 100 / 0.9) / 2
    assert (without.low, without.tps, without.high) == pytest.approx((mean - 2, mean, mean + 2))


def test_ratios_of_the_packages_two_by_two_are_those_of_its_own_summary() -> None:
    measured = load_measured(TWO_BY_TWO)
    assert measured.content is not None
    campaigns: dict[tuple[str | None, ...], list[Any]] = {}
    for row in measured.content["summary"]:
        key = (row["shape"], row["activation_checkpoint"], row["routing"], row["arm"], row.get("code"))
        campaigns.setdefault(key, []).append(row)
    for one in arm_results(measured.rows):
        rows = campaigns.pop((one.shape, one.activation_checkpoint, one.routing, one.arm, one.code))
        mean = np.average([row["ratio"] for row in rows], weights=[row["steps"] for row in rows])
        assert one.ratio == pytest.approx(mean, abs=2e-3)
    assert not campaigns


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        (passes(), ": reached; under the same", ": reached; under the same"),
        (passes(deepep_s=(1.0, 1.0)), ": missed; under the same", ": missed; under the same"),
        ([], "not measured yet", "not measured yet"),
        (
            passes(arm="fp8_standard"),
            "BF16 + DeepEP at a 671B shape: goal 1.10 × stock's best; not measured yet",
            "(FP8 + standard all-to-all, 671B, no checkpointing, round-robin): reached",
        ),
        (
            FULL,
            "not measured yet; under the same checkpointing up to 1.250 × (BF16 + DeepEP, 671B, full checkpointing, "
            "round-robin)",
            "up to 1.250 ×",
        ),
        (BOTH, "measured 1.100 × (BF16 + DeepEP, 671B, no checkpointing", "measured 1.100 ×"),
    ],
)
def test_goals_are_judged_and_missing_ones_said(rows: list[dict[str, Any]], first: str, second: str) -> None:
    of_deepep, of_the_best = goal_sentences(arm_results(rows))
    assert first in of_deepep
    assert second in of_the_best


def test_tables_have_each_sides_best_and_say_when_stock_was_short_of_memory() -> None:
    table = pd.DataFrame(checkpointing_rows(BOTH))
    ours = [one for one in arm_results(BOTH) if one.arm != "bf16_standard"]
    assert [(one.ratio, one.best_ratio) for one in ours] == [pytest.approx((1.25, 0.88)), pytest.approx((1.1, 1.1))]
    assert [one.best_ratio for one in arm_results(FULL)] == [None, None]  # another may be faster
    words = ["full checkpointing", "no checkpointing", "best of each side: none and none"]
    assert (table["checkpointing"].tolist(), table["× stock"].tolist()) == (words, [1.25, 1.1, 1.1])
    cut = [row for row in BOTH if row["activation_checkpoint"] == "none" or row["arm"] == "bf16_standard"]
    assert {row["best arm"] for row in checkpointing_rows(cut)} == {"BF16 + DeepEP"}
    assert checkpointing_rows(FULL) == checkpointing_rows(BOTH[::2]) == []  # of the second, stock alone
    assert result_table(arm_results(passes()[1::2]))["× stock"].isna().all()
    short = [row | {"allocator_retries": 2 * (row["arm"] == "bf16_standard")} for row in BOTH]
    lines, results = goal_sentences(arm_results(short)), result_table(arm_results(short))
    assert results["× stock"].tolist() == [1.0, 1.25, 1.0, 1.1]
    assert lines[-1].endswith("stock, 671B, full checkpointing, stock, 671B, no checkpointing")
    assert not any("under the same" in line for line in lines)
    assert {*results["remark"], *(row["remark"] for row in checkpointing_rows(short))} == {"stock was short of memory"}


def test_gains_are_those_of_the_results_with_their_quartiles() -> None:
    results = {
        (one.shape, one.arm): one
        for one in two_by_two.measured_arms()
        if (one.activation_checkpoint, one.routing) == ("full", "random_balanced")
        and (one.code == two_by_two.CODE or one.arm.startswith("bf16"))
    }
    figure = deepep.measured_gains(list(results.values()), load_measured(TWO_BY_TWO))
    assert_says(figure, REPLAYED, "full checkpointing", "2 × NVIDIA H200")
    shapes = ("671B, 10 MoE layers", "671B MoE-heavy")
    for name, (arm, _) in deepep.GAINS.items():
        (bars,) = traces(figure, name=name)
        ends = [results[shape, arm].ratio_ends for shape in shapes]
        assert list(bars.x) == pytest.approx([middle for _, middle, _ in ends])
        assert list(bars.error_x.array) == pytest.approx([(high - low) / 2 for low, _, high in ends])


# What is not there, or no measurement


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_not_measured_says_how_to_measure_it(name: str) -> None:
    nothing = Measurement(name=name, content=None, packaged=True)
    assert not nothing.rows
    for figure in (deepep.measured_gains([], nothing), deepep.operation_times(nothing)):
        assert not figure.data
        assert_says(figure, "not measured yet", f"benchmarks/results/{name}.json")
    script = nothing.stamp.split("benchmarks/")[1].split()[0]
    described = (ROOT / "benchmarks" / script).read_text()
    assert COMMANDS[name].split(" --output")[0] in described, "the script does not say that it is started so"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list of rows"),
        ('{"rows": [1]}', "a row has no shape"),
        ('{"rows": [{"shape": "16B"}]}', "a row has no activation_checkpoint, arm, routing, order, steps, tps_median"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "x.json"
    if text:
        file.write_text(text)
    with pytest.raises(BadInput, match=said):
        load_measured(TWO_BY_TWO, file)
    with pytest.raises(BadInput, match="there is no measurement 'gemm'; valid: all_to_all_h100, h100_two_by_two"):
        load_measured("gemm")


def test_an_experiment_that_fails_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.notebooks.results.PROGRAM", "moelab.no_such_program")
    said = r"(?s)the all-to-all experiment failed:\n.*No module named moelab.no_such_program.*ChildFailedError"
    with pytest.raises(ExperimentFailed, match=said):
        measure_all_to_all(tmp_path / "new" / "results.json")
