"""Every measured and derived figure that README and docs quote, made again from the file or the model it comes from."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from memory_h100 import table
from memory_h100_case import thin_shape
from validation.node import ROUTINGS, SCALING, node_results
from validation.shapes import ALL_SHAPES, SMALL, arm_of, thin_experiment
from validation.table import full_node_rows, with_errors
from validation.two_by_two import DEPTHS, arm_results, checkpointing_pairs, goal_sentences, layer_gains

from moelab.hardware import cluster_of
from moelab.judge.throughput import CODE, STOCK
from moelab.layout import check
from moelab.planning.measured import FULL_NODE, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.memory import estimate
from moelab.planning.tables import ONE_NODE, error_table, validation_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = " ".join(page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
NUMBER = re.compile(r"(?<![\w.])([+−]?)(\d+(?:,\d{3})*(?:\.\d+)?)(?!\w)")
MEASURED = load_measured(TWO_BY_TWO)
FP8, WGRAD = "fp8_deepep_dispatch-fp8_flex_tiles", "fp8_deepep_wgrad-fp8_dispatch-fp8_flex_tiles"
NO_SYNC = "fp8_deepep_wgrad-fp8_dispatch-fp8_no-host-sync_flex_tiles"
Columns = Mapping[str, Mapping[str, list[Any]]]


def results_of(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def quotes(beginning: str, *numbers: float | list[float], pages: str = PAGES) -> None:
    """The pages have this beginning, and after it these numbers, at the precision in which they stand there."""
    text = " ".join(pages.replace("**", "").split())
    begin = text.index(beginning)
    expected = [one for number in numbers for one in (number if isinstance(number, list) else [number])]
    shown = itertools.islice(NUMBER.finditer(text, begin + len(beginning)), len(expected))
    for number, printed in zip(expected, shown, strict=True):
        sign, digits = printed.groups()
        value = f"{number:{'+' if sign else ''},.{len(digits.partition('.')[2])}f}".replace("-", "−")
        assert sign + digits == value, f"{text[begin : printed.end()]!r} should end with {value}"


def by(rows: Iterable[Mapping[str, Any]], *names: str) -> dict[str, Mapping[str, Any]]:
    """Rows by the words in these columns; the last of several."""
    return {" ".join(str(row[name]) for name in names): row for row in rows}


def both_routings(rows: Iterable[Mapping[str, Any]], *names: str) -> Columns:
    """Columns of the rows with these words, each column with its values under both routings."""
    columns: defaultdict[str, defaultdict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for routing in ROUTINGS:
        for words, row in by((row for row in rows if row["routing"] == routing), *names).items():
            for column, value in row.items():
                columns[words][column].append(value)
    return columns


def results(rows: Iterable[Mapping[str, Any]], checkpointing: str) -> Columns:
    """Results of the two-by-two under one checkpointing, by shape and arm."""
    return both_routings(
        [vars(one) for one in arm_results(rows) if one.activation_checkpoint == checkpointing], "shape", "arm"
    )


def of_campaign(campaign: str) -> list[Mapping[str, Any]]:
    """Its rows of the present code."""
    return [row for row in MEASURED.rows if row.get("code") == CODE and row["campaign"] == f"2026-11-{campaign}"]


def selective(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["activation_checkpoint"] == "selective"]


def percent_longer(some: Iterable[float], others: Iterable[float]) -> list[float]:
    return sorted(100 * (one / other - 1) for one, other in zip(some, others, strict=True))


def test_deepep_in_bf16() -> None:
    full, none = results(MEASURED.rows, "full"), results(MEASURED.rows, "none")
    apart = {}
    for words, shape, arms in (
        ("671B, 10 MoE layers, 16 experts, full", "671B, 10 MoE layers", full),
        ("671B, 5 MoE layers, 16 experts, full", "671B MoE-heavy", full),
        ("671B, 1 dense + 2 MoE layers, 32 experts, no", "671B", none),
        ("16B, 1 dense + 4 MoE layers, 64 experts, no", "16B", none),
    ):
        emulated = arms.get(f"{shape} mxfp8-emulated_deepep", {"ratio": []})
        deepep, stock = arms[f"{shape} bf16_deepep"], arms[f"{shape} bf16_standard"]
        quotes(f"| {words} checkpointing |", stock["tps"], deepep["ratio"], emulated["ratio"])
        passes = [one for name, arm in arms.items() if name.startswith(f"{shape} ") for one in arm["passes"]]
        apart[shape] = max(100 * (max(one) / min(one) - 1) for one in passes)
    quotes("two passes of one arm differ by up to", apart.pop("16B"))
    quotes("passes of the 671B rows agree within", max(apart.values()))
    best = max(none["671B bf16_deepep"]["best_ratio"])
    quotes("without checkpointing it was only measured with the thinnest shape,", best)
    for ratio in results(MEASURED.rows, "full+dispatch")["671B MoE-heavy bf16_standard_full+dispatch"]["ratio"]:
        quotes("Keeping what came over the network (`full+dispatch`) is worth", ratio)
    deepep_goal, best_goal, *_ = goal_sentences(arm_results(MEASURED.rows))
    assert ": missed" in deepep_goal
    assert ": reached" in best_goal
    small = [row for row in MEASURED.rows if row["shape"] == "16B"]
    first, second, *_ = (
        results((row for row in small if row["campaign"] == campaign), "none")["16B bf16_standard"]["tps"]
        for campaign in dict.fromkeys(row["campaign"] for row in small)
    )
    quotes("the baseline of the other campaign (last column) was", percent_longer(second, first))


def test_stock_and_the_best_arm_under_each_checkpointing() -> None:
    rows = of_campaign("29T15:20")
    assert {(row["steps"], row["order"]) for row in rows} == {(8, 0), (8, 1)}
    assert checkpointing_pairs(rows) == checkpointing_pairs(MEASURED.rows)  # the newest of the whole
    records, deepest = [], list(DEPTHS)[1]
    for pairs in checkpointing_pairs(rows):  # of one shape and routing
        best = [max(side, key=lambda one: one.tps) for side in zip(*pairs, strict=True)]
        named = {arm.activation_checkpoint: (stock, arm) for stock, arm in pairs} | {"best": tuple(best)}
        for name, (stock, arm) in named.items():
            kinds = f"{stock.activation_checkpoint} and {arm.activation_checkpoint}"
            speeds = {"stock": stock.tps, "arm": arm.tps, "gain": arm.tps / stock.tps, "short": arm.stock_short}
            records.append({"name": name, "kinds": kinds, "shape": arm.shape, "routing": arm.routing, **speeds})
    steps = both_routings(records, "name", "shape")
    layers = both_routings([one for one in layer_gains(rows) if one["arm"] == WGRAD], "activation_checkpoint")
    assert layers.keys() == {"full", "selective"}
    for kind in ("full", "selective", "none"):
        numbers = [steps[f"{kind} {shape}"][side] for shape in DEPTHS for side in ("stock", "arm", "gain")]
        numbers += [layers[kind][name] for name in ("stock_ms", "arm_ms", "ratio") if kind in layers]
        quotes(f"| {kind} |", *numbers)
    assert [name for name, step in steps.items() if any(step["short"])] == [
        f"{kind} {deepest}" for kind in ("none", "best")
    ]
    assert re.search(r"\n\| none \|[^|]*\|[^|]*×, stock short of memory \| \|\n", PAGES)
    five, ten = (steps[f"best {shape}"] for shape in DEPTHS)
    quotes(f"| best of each side | {five['kinds'][0]}:", five["gain"], ten["gain"])
    full = sorted(one for shape in DEPTHS for one in steps[f"full {shape}"]["gain"])
    none = sorted(steps["none 671B MoE-heavy"]["gain"])
    quotes("at ten MoE layers with both under selective checkpointing,", full[-1], none)
    notebook = (ROOT / "notebooks/04_dispatch_with_deepep.ipynb").read_text()
    quotes("best arm is ", none, full[0], full[-1], pages=notebook)
    gib = by(selective(rows), "arm", "shape")
    arms = results(rows, "selective")
    with_it, without = ([one for name in DEPTHS for one in arms[f"{name} {arm}"]["tps"]] for arm in (WGRAD, NO_SYNC))
    longer = percent_longer(with_it, without)
    reserved = (gib[f"{arm} {deepest}"]["peak_reserved_gib"] for arm in (NO_SYNC, WGRAD))
    quotes("no: the fastest arm takes", longer[0], longer[-1], *reserved)


def predicted_gib(arm: str, shape: str, checkpointing: str) -> float:
    """The fullest rank of one of the two-by-two's arms on two H200s."""
    thin = ALL_SHAPES[shape]
    fields = {**arm_of(arm), "activation_checkpoint": checkpointing, "routing": ROUTINGS[1]}
    fields["shape"] = thin_shape(dense_layers=thin.dense, moe_layers=thin.moe, experts=thin.experts)
    experiment = thin_experiment(thin, fields, hardware="h200_node")
    layout = check(experiment).layout
    assert layout is not None
    return estimate(experiment, layout, cluster_of("h200_node").node.gpu, shape=thin.thin(2)).worst.reserved_gib


def test_stock_is_short_of_memory_with_expandable_segments_too() -> None:
    rows, deepest = results_of("h200_expandable_segments")["rows"], list(DEPTHS)[1]
    assert {(row["shape"], row["activation_checkpoint"]) for row in rows} == {(deepest, "none")}
    arms, before = results(rows, "none"), results(of_campaign("29T15:20"), "none")
    stock, arm = (arms[f"{deepest} {name}"] for name in (STOCK[1], WGRAD))
    without = before[f"{deepest} {STOCK[1]}"]
    assert max(stock["tps"]) < min(without["tps"])
    (retries,) = {row["allocator_retries"] for row in rows if row["arm"] == STOCK[1]}
    (gib,) = {row["peak_reserved_gib"] for row in rows if row["arm"] == WGRAD}
    quotes("it retries", retries, stock["tps"], without["tps"], arm["tps"], gib)
    quotes("had said, before that run,", *(predicted_gib(name, deepest, "none") for name in (STOCK[1], WGRAD)))


def test_memory_of_one_and_two_h200s() -> None:
    lines = [line.split(" | ") for line in table(RESULTS / "memory_h200.json").splitlines()[2:]]
    errors = {line[0].strip("| "): float(line[3].rstrip("%")) for line in lines}
    expandable = [error for name, error in errors.items() if "fixed segments" not in name]
    quotes("`memory_h200.json`)", len(expandable), min(expandable), max(expandable))
    peaks = {
        row["case"]["name"]: max(step["max_reserved_gib"] for rank in row["ranks"] for step in rank["reported"])
        for gpu in ("h100", "h200")
        for row in results_of(f"memory_{gpu}")["rows"]
    }
    ends = ", fixed segments"
    more = [100 * (peak / peaks[name.removesuffix(ends)] - 1) for name, peak in peaks.items() if name.endswith(ends)]
    quotes("without them five cases reserve", min(more), max(more))
    assert len(more) == 5


def test_fp8_experts_in_one_pass() -> None:
    rows, day_before = (selective(of_campaign(campaign)) for campaign in ("29T12:47", "28T23:10"))
    assert ({row["order"] for row in rows}, {row["order"] for row in day_before}) == ({0, 1}, {0})
    assert {row["steps"] for row in rows} == {8}
    assert MEASURED.stamp.endswith(", 2026-11-28 to 2026-11-29")
    assert {one.stock for one in arm_results(rows)} == {STOCK[1]}
    arms = results(rows, "selective")
    for name, moe_layers in DEPTHS.items():
        stock, fp8, wgrad = (arms[f"{name} {arm}"] for arm in (STOCK[1], FP8, WGRAD))
        of_fp8 = (fp8["tps"], fp8["ratio"], wgrad["tps"], wgrad["ratio"])
        quotes(f"| 671B, {moe_layers} MoE layers, 16 experts |", stock["tps"], *of_fp8)
    layers, before = (both_routings(layer_gains(one), "arm") for one in (rows, day_before))
    fp8, wgrad = layers[FP8], layers[WGRAD]
    ms_and_gains = (fp8["stock_ms"], fp8["arm_ms"], fp8["ratio"], wgrad["arm_ms"], wgrad["ratio"])
    quotes("× | | a MoE layer |", *ms_and_gains)
    for ratio in arms[f"{name} {WGRAD}"]["ratio"]:  # of ten layers
        quotes("compiled together, on two H200s:", ratio)
    quotes("(its layers were", before[FP8]["ratio"], before[WGRAD]["ratio"])
    quotes("two hours earlier the same arm gave", wgrad["ratio"], fp8["ratio"])
    gib = by(rows, "arm", "shape")
    reserved = [gib[f"{arm} {name}"]["peak_reserved_gib"] for arm in (FP8, WGRAD, STOCK[1]) for name in DEPTHS]
    quotes("Reserved memory was", *reserved)
    predicted = [predicted_gib(arm, name, "selective") for arm in (FP8, STOCK[1]) for name in DEPTHS]
    quotes("The memory model predicts", *predicted)


def test_experts_alone() -> None:
    rows = results_of("experts_h200")["rows"]
    layer, day_later = by(rows, "part")["layer"], by(rows, "part")["layer, 29 November"]
    arms = ("bf16", "fp8, code before", "fp8", "fp8, wgrad fp8")
    quotes("On one H200, eight experts alone take", *(layer["ms"][arm] for arm in arms))
    quotes("On another H200 a day later it was", *(day_later["ms"][arm] for arm in arms if arm != "fp8, code before"))
    before, after = (layer["error"][arm] for arm in ("fp8", "fp8, wgrad fp8"))
    quotes("as a share of the norm, is", *(one[weight] for weight in ("w1", "w3", "w2") for one in (after, before)))
    others = sorted(before[name] for name in ("output", "rows", "scores"))
    quotes("every other result of an FP8 layer is off by", others[0], others[-1])
    assert all(row["differing"] == 0 for row in rows if row["part"] == "bits" and row["result"] != "scores")
    causal = [row for row in rows if row["part"] == "attention" and row["mask"] == "causal" and "ms" in row]
    ms = {tiles: row["ms"] for tiles, row in by(causal, "tiles").items()}
    backward = (ms["bwd (32, 128, 128, 32, 8, 3)"]["backward"], ms["default"]["backward"])
    quotes("With its tiles, FlexAttention's backward pass takes", *backward)
    quotes(" ms, and its forward pass", ms["fwd (128, 64, 8, 3)"]["forward"], ms["default"]["forward"])
    log = (RESULTS / "attention_h200.log").read_text()
    (forward, both) = map(float, re.findall(r"^flex_tiles forward ([\d.]+) ms; both ([\d.]+) ms", log, re.M)[0])
    quotes("while the tiles as shipped, in a later run, take", both - forward, forward)
    quotes(
        "(`attention_backend: flex_tiles`) | yes: its backward pass takes", both - forward, ms["default"]["backward"]
    )
    (flash,) = re.findall(r"^128,96 flex_flash forward [\d.]+ ms; both ([\d.]+) ms", log, re.M)
    quotes("beyond the tiles (one pass each): attention alone takes", float(flash), both)
    linears = {row["n"]: row["forward_and_backward_ms"] for row in rows if row["part"] == "linears"}
    quotes("row-wise FP8 linears gain little or lose:", linears[24_576]["rowwise_with_gw_hp"], linears[24_576]["bf16"])
    quotes("with weight gradients in BF16,", linears[1536]["rowwise_with_gw_hp"], linears[1536]["bf16"])
    profiles = by(results_of("h100_two_by_two")["profiles"], "shape", "arm")
    kernels = profiles["671B MoE-heavy fp8_deepep_dispatch-fp8"]["kernels"]
    grouped = [one["calls"] for one in kernels if one["kernel"].startswith("_ZN7cutlass13device_kernelINS_4gemm")]
    quotes("the trace of `fp8_deepep_dispatch-fp8` (in `h100_two_by_two.json`) has", sum(grouped))


def test_four_gpus_beside_their_predictions() -> None:
    measured = node_results(load_measured(FULL_NODE), Measurement(name=TWO_BY_TWO, content=None))
    arms = both_routings(
        [{**place._asdict(), **vars(one)} for place, one in measured.items() if place.ep == 4], "shape", "arm"
    )
    for words, shape in (
        ("671B, 5 MoE layers, full checkpointing", SCALING),
        ("16B, 1 dense + 4 MoE layers, no checkpointing", SMALL),
    ):
        stock, deepep, fp8 = (
            arms[f"{shape} {arm}"] for arm in ("bf16_standard", "bf16_deepep", "fp8_deepep_dispatch-fp8")
        )
        worst = max(abs(row.error) for row in full_node_rows() if row.name.startswith(shape))
        quotes(f"| {words} |", stock["tps"], deepep["ratio"], fp8["ratio"], worst)


def test_exchanges_alone() -> None:
    rows = [row for row in results_of("all_to_all_h200_training")["rows"] if row["routing"] == "random_balanced"]
    training = [row for row in rows if row["size"] == "671B, 32 experts" and row["sms"] in (None, 96)]
    us = {name: row["us_median"] for name, row in by(training, "arm", "operation").items()}
    operations = ("dispatch", "dispatch_backward", "combine", "combine_backward")
    compared = [f"{arm} {operation}" for operation in operations for arm in ("standard bf16", "deepep bf16 expanded")]
    quotes("96 SMs (two H200s, same day and versions): dispatch", *(us[one] / 1e3 for one in compared))
    later = [row for row in results_of("all_to_all_h200_november_29")["rows"] if row["routing"] == "random_balanced"]
    later_us = {name: row["us_median"] for name, row in by(later, "arm", "operation").items()}
    quotes("the day after on another node within", max(abs(100 * (later_us[one] / us[one] - 1)) for one in compared))
    swept = by([row for row in rows if row["arm"].startswith("deepep bf16")], "operation", "sms")
    for operation, words in (("combine", "a DeepEP combine takes"), ("dispatch", "and a dispatch takes")):
        quotes(words, *(swept[f"{operation} {sms}"]["us_median"] / 1e3 for sms in (12, 24, 48, 96)))


def test_one_gpu() -> None:
    found = results_of("one_h200_steps")
    times = {name: row["ratio"] for name, row in by(found["summary"], "campaign", "arm").items()}
    step_s: defaultdict[str, list[float]] = defaultdict(list)
    for row in found["rows"]:
        step_s[f"{row['campaign']} {row['arm']}"] += row["step_s"]

    def gain(clock: str, arm: str) -> float:
        return times[f"2026-11-29T{clock} {arm}_flex_tiles"]

    for clock, *arms in (
        ("02:06", "fp8_standard", "fp8_standard_wgrad-fp8", "fp8_standard_linears", "mxfp8-emulated_standard"),
        ("02:16", "fp8_standard_wgrad-fp8", "fp8_standard_wgrad-fp8_linears"),
        ("12:14", "fp8_standard", "fp8_standard_wgrad-fp8", "mxfp8-emulated_standard"),
    ):
        stock_s = statistics.median(step_s[f"2026-11-29T{clock} {STOCK[1]}"])
        quotes(f"| {clock} |", 8192 / stock_s, *(gain(clock, arm) for arm in arms))
    with_linears = (
        gain("02:16", "fp8_standard_wgrad-fp8_linears") / gain("02:16", "fp8_standard_wgrad-fp8"),
        gain("02:06", "fp8_standard_linears") / gain("02:06", "fp8_standard"),
    )
    quotes("recipe with weight gradients in BF16) save", *(100 * one - 100 for one in with_linears))
    costs = [100 - 100 * gain(clock, "mxfp8-emulated_standard") for clock in ("02:06", "12:14")]
    quotes("emulated MXFP8 costs", costs)
    quotes(
        "`attention_backend: flex_flash` saves another", 100 * times["2026-11-29T02:25 bf16_standard_flex_flash"] - 100
    )


def test_losses_of_the_dispatchers() -> None:
    (found,) = results_of("dispatcher_losses_h200")["results"]
    nats = {frozenset(pair.split(" | ")): value for pair, value in found["largest_difference"].items()}
    assert nats[frozenset({"standard"})] == 0
    pairs = ({"deepep", "standard"}, {"deepep"}, {"deepep_ordered", "standard"}, {"deepep_ordered"})
    quotes("DeepEP's runs differ from them by up to", *(nats[frozenset(pair)] for pair in pairs))
    quotes("in the last place of BF16 moves the standard run by", nats[frozenset({"nudged", "standard"})])
    standard, *others = (
        run["losses"][-1] for run in found["runs"] if run is found["runs"][0] or run["arm"] != "standard"
    )
    quotes("one seed, with which all of them ended", min(others) - standard, max(others) - standard)


@pytest.mark.parametrize(
    ("study", "arms"),
    [
        ("dispatcher_losses_one_h200", ("nudged", "fp8", "fp8_wgrad", "fp8_linears", "mxfp8")),
        ("dispatcher_losses_fp8_h200", ("nudged", "deepep", "best_bf16_wgrad", "best")),
    ],
)
def test_losses_of_fp8_arms(study: str, arms: tuple[str, ...]) -> None:
    for result in results_of(study)["results"]:
        losses = {run["arm"]: run["losses"] for run in reversed(result["runs"])}
        assert all(run["losses"] == losses["standard"] for run in result["runs"] if run["arm"] == "standard")
        numbers: list[float] = []
        for arm in arms:
            apart = [one - other for one, other in zip(losses.get(arm, []), losses["standard"], strict=False)]
            numbers += [statistics.mean(apart[-10:]), max(map(abs, apart))] if apart else []
        quotes(f"| seed {result['seed']} |", *numbers, pages=PAGES.partition(f"`{study}.json`")[2])


def test_losses_of_fp8_with_deepep_beside_what_rounding_does() -> None:
    ends: defaultdict[str, list[float]] = defaultdict(list)
    for result in results_of("dispatcher_losses_fp8_h200")["results"]:
        losses = {run["arm"]: run["losses"][-10:] for run in result["runs"]}
        for arm, last in losses.items():
            ends[arm].append(abs(statistics.mean(last) - statistics.mean(losses["standard"])))
    fp8 = max(ends["best_bf16_wgrad"] + ends["best"])
    quotes("FP8 experts with DeepEP (three seeds) lie at most", fp8)
    quotes("by one unit in the last place moves it by up to", max(ends["nudged"]))


def test_losses_on_a_cpu() -> None:
    """Difference, interval and margin in the last steps and on held-out text, with the answer, which is one by both."""
    for study, name, arm in (
        ("convergence_cpu", "MXFP8", "mxfp8_standard"),
        ("convergence_cpu", "NVFP4", "nvfp4_standard"),
        ("convergence_deepep_cpu", "MXFP8 + DeepEP", "mxfp8_deepep"),
        ("convergence_deepep_cpu", "MXFP8 + DeepEP, MXFP8 dispatch", "mxfp8_deepep_wgrad-bf16_dispatch-mxfp8"),
    ):
        verdicts = [one for one in results_of(study)["verdicts"] if one["arm"] == arm]
        numbers = [[one["difference_nats"], *one["interval_nats"], one["margin_nats"]] for one in verdicts]
        quotes(f"| {name} | ", *numbers)
        (answer,) = {one["answer"] for one in verdicts}
        assert re.search(rf"\n\| {re.escape(name)} \|[^\n]*\| {answer} \|\n", PAGES)
        if name == "MXFP8":
            quotes(f"On two CPU processes eight seeds of the small model end *{answer}* too:", numbers[0])
        if answer == "insufficient data":
            quotes("what its interval lacks,", verdicts[0]["seeds_needed"])


def test_emulation() -> None:
    found = results_of("emulation_h100")
    identical = [all(case["ours is torchao"].values()) for case in found["identity"]]
    quotes("on a CPU in `tests/`, on an H100 in", sum(identical), len(identical))
    compiled = [row for row in found["layer"] if row["compiled"]]
    ours, torchao = ([row[f"{name}_over_bf16"]["median"] for row in compiled] for name in ("ours", "torchao"))
    quotes("On an H100, emulated experts take", min(ours), max(ours), min(torchao), max(torchao))


def test_costs_of_moelab_itself() -> None:
    found, watching = results_of("projection"), results_of("follow")["results"]
    quotes("A projection takes", *(found[f"{name}_sizes_us"]["median"] / 1e3 for name in ("known", "new")))
    share = max(watching[name]["share_of_a_core"] for name in ("terminal", "widget"))
    quotes("Watching 256 ranks costs", 100 * share)


def test_errors_by_kind() -> None:
    """Otherwise: ``python -m benchmarks.validation --write``."""
    page, rows = (ROOT / "docs" / "measurements.md").read_text(), validation_table()
    assert with_errors(page, rows) == page
    titan, others = (
        error_table().loc[f"steps of others, {whose}"] for whose in ("TorchTitan, seen", "another stack, seen")
    )
    quotes("`moelab project` is asked for:", *(titan[name] for name in ("n", "median error", "in their interval")))
    quotes("in their 90 % interval (±", titan["median interval"], titan["from"], titan["to"], others["n"])
    quotes("steps of another stack half are within", others["median error"], others["in their interval"])
    quotes(
        "Four H200s of one node were predicted within", max(abs(row.error) for row in rows if row.source == ONE_NODE)
    )
