"""Every measured and derived figure that README quotes, made again from the file or the model that it comes from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from memory_h100_case import thin_shape
from validation.shapes import ALL_SHAPES, SMALL, arm_of, thin_experiment
from validation.table import full_node_rows, with_errors

from moelab.analysis.two_by_two import (
    CODE,
    DEPTHS,
    STOCK,
    ArmResult,
    arm_results,
    checkpointing_pairs,
    goal_lines,
    layer_gains,
)
from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.memory import estimate
from moelab.projection.measured import (
    FULL_NODE,
    ROUTINGS,
    SCALING,
    TWO_BY_TWO,
    Measurement,
    Place,
    load_measured,
    node_results,
)
from moelab.projection.validation import ONE_NODE, errors_by_kind, validation_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = " ".join(" ".join(page.read_text() for page in PAGES).replace("**", "").split())
BASELINE, BEST = "bf16_standard", "fp8_deepep_dispatch-fp8"
COLUMNS = ("bf16_deepep", "mxfp8-emulated_deepep")
MODELS = {
    "671B, 10 MoE layers": "671B, 10 MoE layers, 16 experts, full checkpointing",
    "671B MoE-heavy": "671B, 5 MoE layers, 16 experts, full checkpointing",
    "671B": "671B, 1 dense + 2 MoE layers, 32 experts, no checkpointing",
    "16B": "16B, 1 dense + 4 MoE layers, 64 experts, no checkpointing",
}


def results_of(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def says(*sentences: str) -> None:
    for sentence in sentences:
        assert sentence in README, f"README does not say {sentence!r}"


def slashed(values: Iterable[float], form: str = ",.0f") -> str:
    """Such as ``1.04 / 1.06``."""
    return " / ".join(format(value, form) for value in values)


def own_checkpointing(shape: str) -> list[ArmResult]:
    kind = "full" if "full" in MODELS[shape] else "none"
    found = arm_results(load_measured(TWO_BY_TWO).rows)
    return [one for one in found if (one.shape, one.activation_checkpoint) == (shape, kind)]


def both_routings(found: Iterable[ArmResult], arm: str) -> list[ArmResult]:
    return sorted((one for one in found if one.arm == arm), key=lambda one: ROUTINGS.index(one.routing))


def ratios(found: list[ArmResult]) -> str:
    return f"{slashed((one.ratio or 0.0 for one in found), '.2f')} ×" if found else ""


def speeds(found: Iterable[ArmResult]) -> str:
    return slashed(one.tps for one in found)


@pytest.mark.parametrize("shape", MODELS)
def test_the_two_by_twos_rows(shape: str) -> None:
    found = own_checkpointing(shape)
    cells = [MODELS[shape], speeds(both_routings(found, BASELINE))]
    cells += [ratios(both_routings(found, arm)) for arm in COLUMNS]
    says(f"| {' '.join(f'{cell} |' if cell else '|' for cell in cells)}")


def test_stock_and_the_best_arm_under_each_checkpointing() -> None:
    rows = [row for row in load_measured(TWO_BY_TWO).rows if row.get("campaign") == "2026-11-29T15:20"]
    assert {(row["steps"], row["order"]) for row in rows} == {(8, 0), (8, 1)}
    layers: dict[str, dict[str, Any]] = {}
    for gain in (one for one in layer_gains(rows) if "no-host-sync" not in one["arm"]):
        layers.setdefault(gain["activation_checkpoint"], {})[gain["routing"]] = gain
    found: dict[tuple[str, str], list[tuple[ArmResult, ArmResult]]] = {}
    best: dict[str, list[tuple[ArmResult, ArmResult]]] = {}
    assert checkpointing_pairs(rows) == checkpointing_pairs(load_measured(TWO_BY_TWO).rows)  # the newest of the whole
    for pairs in checkpointing_pairs(rows):
        for stock, arm in pairs:
            found.setdefault((stock.activation_checkpoint, stock.shape), []).append((stock, arm))
        sides = [max(side, key=lambda one: one.tps) for side in zip(*pairs, strict=True)]
        best.setdefault(pairs[0][0].shape, []).append((sides[0], sides[1]))
    cells: dict[str, list[str]] = {}
    for (kind, _), pairs in found.items():
        stocks, arms = map(speeds, zip(*pairs, strict=True))
        short = ", stock short of memory" if any(arm.stock_short for _, arm in pairs) else ""
        cells.setdefault(kind, []).append(f"{stocks} → {arms}: {gained(pairs)}{short}")
    for kind, by_routing in layers.items():
        stock_ms, arm_ms, ratio = (
            slashed((by_routing[routing][key] for routing in ROUTINGS), form)
            for key, form in (("stock_ms", ".1f"), ("arm_ms", ".1f"), ("ratio", ".2f"))
        )
        cells[kind].append(f"{stock_ms} → {arm_ms} ms: {ratio} ×")
    assert sorted(cells) == ["full", "none", "selective"]
    cells["best of each side"] = [
        f"{' and '.join(one.activation_checkpoint for one in pairs[0])}: {gained(pairs)}" for pairs in best.values()
    ]
    for kind, texts in cells.items():
        says(f"| {kind} | {' | '.join(texts + [''] * (3 - len(texts)))} |".replace("  ", " "))
    of_kinds = (
        [arm.tps / stock.tps for pairs in found.values() for stock, arm in pairs if fits(arm, kind)]
        for kind in ("none", "full")
    )
    without, under_full = (f"{min(gains):.2f} to {max(gains):.2f}" for gains in of_kinds)
    says(f"selective checkpointing, {under_full.split()[-1]} × under full, and {without} × at five without any")
    notebook = (ROOT / "notebooks/04_dispatch_with_deepep.ipynb").read_text()
    assert f"best arm is {without} times as fast as stock; under full checkpointing {under_full} times" in notebook


def fits(arm: ArmResult, checkpointing: str) -> bool:
    return arm.activation_checkpoint == checkpointing and not arm.stock_short


def gained(pairs: Iterable[tuple[ArmResult, ArmResult]]) -> str:
    return f"{slashed((arm.tps / stock.tps for stock, arm in pairs), '.2f')} ×"


def of_campaign(campaign: str, checkpointing: str = "selective") -> list[dict[str, Any]]:
    rows = [row for row in load_measured(TWO_BY_TWO).rows if row.get("code") == CODE]
    wanted = (f"2026-11-{campaign}", checkpointing)
    return [row for row in rows if (row["campaign"], row["activation_checkpoint"]) == wanted]


def test_fp8_experts_in_one_pass() -> None:
    rows, earlier = of_campaign("29T12:47"), of_campaign("28T23:10")
    assert ({row["order"] for row in rows}, {row["order"] for row in earlier}) == ({0, 1}, {0})
    assert {row["steps"] for row in rows} == {8}
    assert load_measured(TWO_BY_TWO).stamp.endswith(", 2026-11-28 to 2026-11-29")
    arms = [f"{BEST}_flex_tiles", f"{BEST.replace('_dispatch', '_wgrad-fp8_dispatch')}_flex_tiles"]
    results = arm_results(rows)
    assert {one.stock for one in results} == {STOCK[1]}
    whole = {}
    for shape, moe_layers in DEPTHS.items():
        found = [one for one in results if one.shape == shape]
        whole[shape] = [both_routings(found, arm) for arm in arms]
        cells = [speeds(both_routings(found, STOCK[1])), *(f"{speeds(arm)}: {ratios(arm)}" for arm in whole[shape])]
        says(f"| 671B, {moe_layers} MoE layers, 16 experts | {' | '.join(cells)} |")
    (deepest,) = {f"{one.ratio:.2f}" for one in whole["671B, 10 MoE layers"][1]}
    says(f"{deepest} × TorchTitan at ten MoE layers with both under selective checkpointing")
    gains = {(gain["arm"], gain["routing"]): gain for gain in layer_gains(earlier)}
    before = [slashed((gains[arm, routing]["ratio"] for routing in ROUTINGS), ".2f") for arm in arms]
    says(f"its layers were {before[0]} and {before[1]} ×")
    gains = {(gain["arm"], gain["routing"]): gain for gain in layer_gains(rows)}

    def layer(arm: str, key: str, form: str = ".1f") -> str:
        return slashed((gains[arm, routing][key] for routing in ROUTINGS), form)

    cells = [f"{layer(arms[0], 'stock_ms')} ms"]
    cells += [f"{layer(arm, 'arm_ms')} ms: {layer(arm, 'ratio', '.2f')} ×" for arm in arms]
    says(f"| a MoE layer | {' | '.join(cells)} |")
    says(f"the same arm's was {layer(arms[1], 'ratio', '.2f')} × two hours before")
    says(f"With weight gradients in BF16 it was {layer(arms[0], 'ratio', '.2f')} × then")


def test_no_host_sync() -> None:
    rows = of_campaign("29T15:20")
    best = f"{BEST.replace('_dispatch', '_wgrad-fp8_dispatch')}_flex_tiles"
    results = {(one.shape, one.routing, one.arm): one.tps for one in arm_results(rows)}
    without = best.replace("_flex", "_no-host-sync_flex")
    longer = [
        100 * (results[shape, routing, best] / results[shape, routing, without] - 1)
        for shape in DEPTHS
        for routing in ROUTINGS
    ]
    gib = {row["arm"]: row["peak_reserved_gib"] for row in rows if DEPTHS[row["shape"]] == 10}
    says(f"takes {min(longer):.1f} to {max(longer):.1f} % longer without it")
    says(f"reserves {gib[without]:.1f} instead of {gib[best]:.1f} GiB with ten layers")


def test_memory_of_fp8_experts_in_one_pass() -> None:
    rows = of_campaign("29T12:47")
    reserved = {(row["arm"], DEPTHS[row["shape"]]): row["peak_reserved_gib"] for row in rows}
    fp8, wgrad, stock = f"{BEST}_flex_tiles", "fp8_deepep_wgrad-fp8_dispatch-fp8_flex_tiles", STOCK[1]
    gib = {(arm, moe): f"{reserved[arm, moe]:.1f}" for arm, moe in reserved}
    says(
        f"{gib[fp8, 5]} GiB with five layers and {gib[fp8, 10]} with ten",
        f"in FP8 {gib[wgrad, 5]} and {gib[wgrad, 10]}; with stock {gib[stock, 5]} and {gib[stock, 10]}",
    )
    predicted = []
    for arm in (fp8, stock):
        for name in DEPTHS:
            shape = ALL_SHAPES[name]
            thin = {"shape": thin_shape(dense_layers=shape.dense, moe_layers=shape.moe, experts=shape.experts)}
            fields = {**arm_of(arm), **thin, "activation_checkpoint": "selective", "routing": ROUTINGS[1]}
            experiment = thin_experiment(shape, fields, hardware="h200_node")
            layout = check(experiment).layout
            assert layout is not None
            gpu = cluster_of("h200_node").node.gpu
            predicted.append(f"{estimate(experiment, layout, gpu, shape=shape.thin(2)).worst.reserved_gib:.1f}")
    says(f"memory model predicts {predicted[0]} and {predicted[1]}, and for stock {predicted[2]} and {predicted[3]}")


def test_experts_alone() -> None:
    rows = results_of("experts_h200")["rows"]
    (layer,) = (row for row in rows if row["part"] == "layer")
    ms = [f"{layer['ms'][name]:.1f}" for name in ("bf16", "fp8, code before", "fp8", "fp8, wgrad fp8")]
    says(
        f"{ms[0]} ms forward and backward in BF16, {ms[1]} with the earlier FP8 code, {ms[2]} now and {ms[3]} with "
        "weight gradients in FP8"
    )
    (again,) = (row for row in rows if row["part"] == "layer, 29 November")
    ms = [f"{again['ms'][name]:.1f}" for name in ("bf16", "fp8", "fp8, wgrad fp8")]
    says(f"a day later it was {ms[0]}, {ms[1]} and {ms[2]} ms")
    before, after = (layer["error"][name] for name in ("fp8", "fp8, wgrad fp8"))
    words = [f"{after[name]:.3f} instead of {before[name]:.3f} for {name}" for name in ("w1", "w3", "w2")]
    says(f"{words[0]}, {words[1]} and {words[2]}")
    assert {f"{before[name]:.3f}" for name in ("output", "rows", "scores")} == {"0.066", "0.068"}
    assert all(row["differing"] == 0 for row in rows if row["part"] == "bits" and row["result"] != "scores")
    causal = {
        row["tiles"]: row["ms"]
        for row in rows
        if row["part"] == "attention" and row["mask"] == "causal" and "ms" in row
    }
    backward = causal["bwd (32, 128, 128, 32, 8, 3)"]["backward"]
    says(f"backward pass takes {backward:.1f} instead of {causal['default']['backward']:.1f} ms")
    forward = causal["fwd (128, 64, 8, 3)"]["forward"]
    says(f"forward pass {forward:.1f} instead of {causal['default']['forward']:.1f} (causal")
    took = {row["n"]: row["forward_and_backward_ms"] for row in rows if row["part"] == "linears"}
    wide, narrow = (f"{took[n]['rowwise_with_gw_hp']:.2f} instead of {took[n]['bf16']:.2f}" for n in (24_576, 1536))
    says(wide.replace(" instead", " ms instead"), narrow)


def test_how_many_products_were_fp8_before() -> None:
    (profile,) = (
        one
        for one in results_of("h100_two_by_two")["profiles"]
        if (one["shape"], one["arm"]) == ("671B MoE-heavy", BEST)
    )
    kernels = [one for one in profile["kernels"] if one["kernel"].startswith("_ZN7cutlass13device_kernelINS_4gemm")]
    says(f"has {sum(one['calls'] for one in kernels):.0f} grouped FP8 kernels in a step of five layers, six per layer")


def test_what_is_said_of_the_two_by_two() -> None:
    thin = {arm: max(one.best_ratio or 0.0 for one in both_routings(own_checkpointing("671B"), arm)) for arm in COLUMNS}
    says(f"without checkpointing it was only measured with the thinnest shape, {thin['bf16_deepep']:.2f} ×")
    everything = arm_results(load_measured(TWO_BY_TWO).rows)
    kept = [one.ratio for one in everything if one.arm == "bf16_standard_full+dispatch"]
    assert {f"{ratio:.2f}" for ratio in kept} == {"1.05"}
    deepep, best, *_ = goal_lines(everything)
    assert ": missed" in deepep
    assert ": reached" in best
    says("is worth 1.05 × with the standard dispatcher")
    spread = {shape: max(max(one.passes) / min(one.passes) - 1 for one in own_checkpointing(shape)) for shape in MODELS}
    large = max(spread[shape] for shape in MODELS if shape != "16B")
    says(f"differ by up to {spread['16B']:.0%}".replace("%", " %"), f"agree within {large:.0%}".replace("%", " %"))
    faster = []
    for routing in ROUTINGS:
        rows = [row for row in load_measured(TWO_BY_TWO).rows if row["shape"] == "16B" and row["routing"] == routing]
        first, second, *_ = (
            arm_results(row for row in rows if (row["campaign"], row["arm"]) == (campaign, BASELINE))[0].tps
            for campaign in dict.fromkeys(row["campaign"] for row in rows)
        )
        faster.append(100 * (second / first - 1))
    says(f"was {min(faster):.0f} to {max(faster):.0f} % faster")


def test_four_gpus_beside_their_predictions() -> None:
    measured = node_results(load_measured(FULL_NODE), Measurement(name=TWO_BY_TWO, content=None))
    rows = full_node_rows()
    for model, words in (
        (SCALING, "671B, 5 MoE layers, full checkpointing"),
        (SMALL, "16B, 1 dense + 4 MoE layers, no checkpointing"),
    ):
        shown = (BASELINE, "bf16_deepep", BEST)
        arms = {arm: [measured[Place(model, 4, routing, arm)] for routing in ROUTINGS] for arm in shown}
        worst = max(abs(row.error) for row in rows if row.name.startswith(model))
        gains = " | ".join(ratios(arms[arm]) for arm in shown[1:])
        says(f"| {words} | {speeds(arms[BASELINE])} | {gains} | at most {worst:.1f} % |")


def test_exchanges_alone() -> None:
    size, rows = "671B, 32 experts", results_of("all_to_all_h200_training")["rows"]
    ms = {
        (row["arm"], row["operation"]): row["us_median"] / 1e3
        for row in rows
        if (row["size"], row["routing"]) == (size, "random_balanced") and row["sms"] in (None, 96)
    }
    for operation in ("dispatch", "dispatch_backward", "combine", "combine_backward"):
        words = "its gradient" if operation.endswith("backward") else operation
        standard_ms, deepep_ms = (ms[arm, operation] for arm in ("standard bf16", "deepep bf16 expanded"))
        says(f"{words} {standard_ms:.2f} → {deepep_ms:.2f} ms")
    day_after_ms = {
        (row["arm"], row["operation"]): row["us_median"] / 1e3
        for row in results_of("all_to_all_h200_november_29")["rows"]
        if row["routing"] == "random_balanced"
    }
    shown = [one for one in ms if one[0] in ("standard bf16", "deepep bf16 expanded")]
    largest = max(abs(day_after_ms[one] / ms[one] - 1) for one in shown)
    says(f"the day after on another node within {100 * largest:.0f} %")
    swept = {
        (row["operation"], row["sms"]): f"{row['us_median'] / 1e3:.2f}"
        for row in rows
        if row["routing"] == "random_balanced" and row["arm"].startswith("deepep bf16")
    }
    for operation in ("combine", "dispatch"):
        *fewer, most = (swept[operation, sms] for sms in (12, 24, 48, 96))
        says(f"{operation} takes {', '.join(fewer)} and {most} ms")


def test_losses_of_the_dispatchers() -> None:
    (found,) = results_of("dispatcher_losses_h200")["results"]
    differ = {frozenset(pair.split(" | ")): value for pair, value in found["largest_difference"].items()}
    assert differ[frozenset({"standard"})] == 0

    def nats(*pair: str) -> str:
        return f"{differ[frozenset(pair)]:.2f}"

    says(
        f"differ from them by up to {nats('deepep', 'standard')} nats at a step",
        f" nats at a step and from each other by {nats('deepep')}",
        f"with sorted rows by up to {nats('deepep_ordered', 'standard')} and {nats('deepep_ordered')}",
        f"moves the standard run by {nats('nudged', 'standard')}",
    )
    runs = [(run["arm"], run["losses"]) for run in found["runs"]]
    ends = [losses[-1] - runs[0][1][-1] for arm, losses in runs if arm != "standard"]
    says(f"ended {min(ends):.2f} to {max(ends):.2f} nats above")


def test_one_gpu() -> None:
    found = results_of("one_h200_steps")
    ratios = {(row["campaign"][-5:], row["arm"].removesuffix("_flex_tiles")): row["ratio"] for row in found["summary"]}
    steps = {(row["campaign"][-5:], row["arm"]): [] for row in found["rows"]}
    for row in found["rows"]:
        steps[row["campaign"][-5:], row["arm"]] += row["step_s"]
    for campaign, arms in (
        ("02:06", ("fp8_standard", "fp8_standard_wgrad-fp8", "fp8_standard_linears", "", "mxfp8-emulated_standard")),
        ("02:16", ("", "fp8_standard_wgrad-fp8", "", "fp8_standard_wgrad-fp8_linears", "")),
        ("12:14", ("fp8_standard", "fp8_standard_wgrad-fp8", "", "", "mxfp8-emulated_standard")),
    ):
        tps = 8192 / statistics.median(steps[campaign, "bf16_standard_flex_tiles"])
        cells = [f" {ratios[campaign, arm]:.2f} × " if arm else " " for arm in arms]
        says(f"| {campaign} | {tps:,.0f} tokens/s |{'|'.join(cells)}|")
    gains = [
        ratios["02:16", "fp8_standard_wgrad-fp8_linears"] / ratios["02:16", "fp8_standard_wgrad-fp8"],
        ratios["02:06", "fp8_standard_linears"] / ratios["02:06", "fp8_standard"],
    ]
    says(f"save {100 * gains[0] - 100:.1f} to {100 * gains[1] - 100:.1f} % of a whole step")
    costs = [100 - 100 * ratios[campaign, "mxfp8-emulated_standard"] for campaign in ("02:06", "12:14")]
    says(f"costs {costs[0]:.1f} to {costs[1]:.1f} %")
    says(f"saves another {100 * ratios['02:25', 'bf16_standard_flex_flash'] - 100:.1f} % of the step")


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
        cells = []
        for arm in arms:
            apart = [one - other for one, other in zip(losses.get(arm, []), losses["standard"], strict=False)]
            cells.append(f" {statistics.mean(apart[-10:]):+.3f}, {max(map(abs, apart)):.2f} " if apart else " ")
        says(f"| seed {result['seed']} |{'|'.join(cells)}|".replace("-", "−"))


Said = dict[str, tuple[str, ...]]


def judged(study: str) -> tuple[Said, Said]:
    """Difference, interval, margin and answer of each arm, in the last steps and on held-out text."""
    last: Said = {}
    held_out: Said = {}
    for verdict in results_of(study)["verdicts"]:
        numbers = [verdict["difference_nats"], *verdict["interval_nats"]]
        words = [f"{number:+.4f}".replace("-", "−") for number in numbers]
        into = last if verdict["quantity"].startswith("the mean loss") else held_out
        into[verdict["arm"]] = (*words, f"±{verdict['margin_nats']:.4f}", verdict["answer"])
    return last, held_out


def test_losses_on_a_cpu() -> None:
    row = "{}, {} to {} | {} |"
    for study, name, arm in (
        ("convergence_cpu", "MXFP8", "mxfp8_standard"),
        ("convergence_cpu", "NVFP4", "nvfp4_standard"),
        ("convergence_deepep_cpu", "MXFP8 + DeepEP", "mxfp8_deepep"),
        ("convergence_deepep_cpu", "MXFP8 + DeepEP, MXFP8 dispatch", "mxfp8_deepep_wgrad-bf16_dispatch-mxfp8"),
    ):
        last, held_out = judged(study)
        assert last[arm][-1] == held_out[arm][-1]
        says(f"| {name} | {row.format(*last[arm])} {row.format(*held_out[arm])} {held_out[arm][-1]} |")
    difference, low, high, margin, answer = judged("convergence_cpu")[0]["mxfp8_standard"]
    says(f"With eight seeds the same study ends *{answer}*: {difference} nats, {low} to {high}, margin {margin}")
    low, high = results_of("convergence_deepep_cpu")["verdicts"][1]["seeds_needed"]
    says(f"what its interval lacks, {low} to {high} seeds would show")


def test_emulation() -> None:
    found = results_of("emulation_h100")
    identical = [all(case["ours is torchao"].values()) for case in found["identity"]]
    says(f"in {sum(identical)} of {len(identical)} cases")
    layers = [row for row in found["layer"] if row["compiled"]]
    for words, name in (("{} to {} × the time of BF16", "ours_over_bf16"), ("{} to {} × with", "torchao_over_bf16")):
        medians = [row[name]["median"] for row in layers]
        says(words.format(f"{min(medians):.2f}", f"{max(medians):.2f}"))


def test_costs_of_moelab_itself() -> None:
    found = results_of("projection")
    known, new = (found[name]["median"] / 1e3 for name in ("known_sizes_us", "new_sizes_us"))
    says(f"{known:.2f} ms for sizes that it has seen before, and {new:.2f} ms for new ones")
    share = max(
        one["share_of_a_core"] for one in (results_of("follow")["results"][name] for name in ("terminal", "widget"))
    )
    says(f"Watching 256 ranks costs {100 * share:.1f} % of a core")


def test_errors_by_kind() -> None:
    """Otherwise: ``python -m benchmarks.validation --write``."""
    page = (ROOT / "docs" / "measurements.md").read_text()
    assert with_errors(page, validation_table()) == page
    rows = validation_table()
    blind = errors_by_kind(rows).loc["steps of others, blind"]
    worst = max(abs(row.error) for row in rows if row.source == ONE_NODE)
    says(
        f"Half of {blind['n']:g} public steps of others that nothing was tuned on are predicted within "
        f"{blind['median error']:g} %, {blind['in their interval']:g} % of them lie in their 90 % interval, which is "
        f"±{blind['median interval']:g} % wide",
        f"four H200s of one node were predicted within {worst:.1f} % before they ran",
    )
