"""The two-by-two on thin models: every arm's throughput over stock TorchTitan's, against the goals.

Stock is BF16 with the standard all-to-all, compiled, in the faster of TorchTitan's own settings that the campaign has
(:data:`STOCK`; it lets a model choose attention's tiles). A ratio is over stock under the *same* activation
checkpointing: full checkpointing pays each exchange of the forward pass twice, so a faster exchange gains most there.
*Stock's best* is its fastest checkpointing, and the goals are about that. An arm runs in several passes, the arms
taking turns, and its figure is over the steps of all its passes. Hosts differ between two campaigns, so nothing is
pooled over them: tokens/s are those of an arm's campaign of most passes, a ratio is formed in each campaign and
averaged, weighted by steps. Rows of another ``code`` are another result: arms of one name were faster in it.

Goals, set before the measurement: BF16 with DeepEP at least 1.10 times stock's best at a 671B shape, and the best arm
at least 1.15 times.

    python -m benchmarks.validation --write    # writes src/moelab/data/two_by_two.json
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from moelab.judge.arms import arm_label
from moelab.judge.throughput import (
    BASELINE,
    CODE,
    FUSED,
    STOCK,
    STOCK_CHECKPOINTING,
    ArmResult,
    checkpointing_words,
    shape_words,
    two_by_two_label,
)

DEEPEP = "bf16_deepep"
GOAL_DEEPEP, GOAL_BEST = 1.10, 1.15
STOCK_SHORT = "stock was short of memory"
DEPTHS = {"671B MoE-heavy": 5, "671B, 10 MoE layers": 10}
"""MoE layers of two shapes that differ in nothing else."""


def arm_results(rows: Iterable[Mapping[str, Any]]) -> list[ArmResult]:
    """Combine the passes of each arm.

    Args:
        rows: of ``h100_two_by_two.json``: shape, activation_checkpoint, arm, routing, order, steps, tps_median,
            tps_iqr, and where the file has them the seconds of each step, ``step_s``, and the ``campaign`` and the
            ``code`` that a row belongs to.

    Returns:
        In the order of the rows. Where there are no steps, the median is that of the passes and the quartiles are half
        the mean interquartile range away.
    """
    groups: dict[tuple[str, str, str, str, str | None], dict[str | None, list[Mapping[str, Any]]]] = {}
    for row in rows:
        key = (row["shape"], row["activation_checkpoint"], row["routing"], row["arm"], row.get("code"))
        groups.setdefault(key, {}).setdefault(row.get("campaign"), []).append(row)
    # Tokens/s, name and retries of stock's faster arm under each checkpointing, by what an arm shares with it.
    stock: dict[tuple[str, str, str | None, str | None], dict[str, tuple[float, str, int]]] = {}
    for (shape, checkpointing, routing, arm, code), campaigns in groups.items():
        for campaign, passes in campaigns.items() if arm in STOCK else ():
            rates = stock.setdefault((shape, routing, code, campaign), {})
            # The faster of stock's two settings, whichever was measured first.
            one = (_quartiles(passes)[1], arm, _retries(passes))
            rates[checkpointing] = max(rates.get(checkpointing, (0.0, "", 0)), one)
    results = []
    for (shape, checkpointing, routing, arm, code), campaigns in groups.items():
        over_alike: list[tuple[float, int]] = []  # each with its steps, the weight
        over_best: list[tuple[float, int]] = []
        faster_stock: list[tuple[str, int]] = []  # with its retries
        for campaign, passes in campaigns.items():
            rates = stock.get((shape, routing, code, campaign), {})
            tps, steps = _quartiles(passes)[1], sum(row["steps"] for row in passes)
            if (alike := STOCK_CHECKPOINTING.get(checkpointing, checkpointing)) in rates:
                over_alike.append((tps / rates[alike][0], steps))
                faster_stock.append(rates[alike][1:])
            # Under one checkpointing alone that recomputes, a faster one is not known.
            if len(rates) > 1 or "none" in rates:
                over_best.append((tps / max(rates.values())[0], steps))
        passes = max(campaigns.values(), key=len)  # tokens/s of two hosts are not averaged
        low, middle, high = _quartiles(passes)
        results.append(
            ArmResult(
                shape=shape,
                activation_checkpoint=checkpointing,
                routing=routing,
                arm=arm,
                tps=middle,
                low=low,
                high=high,
                passes=tuple(row["tps_median"] for row in sorted(passes, key=lambda row: row["order"])),
                steps=sum(row["steps"] for row in passes),
                ratio=_mean(over_alike),
                best_ratio=_mean(over_best),
                stock=faster_stock[0][0] if faster_stock else None,
                code=code,
                retries=_retries(passes),
                stock_short=any(retries for _, retries in faster_stock),
            )
        )
    return results


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    """Of values with their weights; None of none."""
    return statistics.fmean(*map(list, zip(*weighted, strict=True))) if weighted else None


def _retries(passes: Iterable[Mapping[str, Any]]) -> int:
    return sum(row.get("allocator_retries") or 0 for row in passes)


def _quartiles(passes: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of tokens/s; a step's tokens are its pass's median rate times time."""
    rates = [
        row["tps_median"] * statistics.median(row["step_s"]) / second
        for row in passes
        for second in row.get("step_s", ())
    ]
    if len(rates) > 1:  # rows of before step times were kept have none
        low, middle, high = statistics.quantiles(rates, n=4)
        return low, middle, high
    middle = statistics.median(row["tps_median"] for row in passes)
    half = statistics.fmean(row["tps_iqr"] for row in passes) / 2
    return middle - half, middle, middle + half


def goal_sentences(results: Sequence[ArmResult]) -> list[str]:
    """The goals against what was measured, one sentence each, and another where stock was short of memory."""
    large = [result for result in results if result.shape.startswith("671B")]
    deepep = [result for result in large if result.arm == DEEPEP]
    others = [result for result in large if result.arm not in STOCK]
    short = [f"stock, {result.setting}" for result in large if result.retries and result.arm in STOCK]
    lines = [
        _goal_line(f"{arm_label(DEEPEP)} at a 671B shape", deepep, GOAL_DEEPEP),
        _goal_line("the best arm at a 671B shape", others, GOAL_BEST),
    ]
    if short:
        lines.append(f"short of memory, so that ratios over it reflect memory too: {', '.join(dict.fromkeys(short))}")
    return lines


def _goal_line(what: str, results: Sequence[ArmResult], goal: float) -> str:
    line = f"{what}: goal {goal:.2f} × stock's best"
    over_best = [(result.best_ratio, result) for result in results if result.best_ratio is not None]
    alike = [(result.ratio, result) for result in results if result.ratio is not None and not result.stock_short]
    if over_best:
        ratio, best = max(over_best, key=lambda pair: pair[0])
        line += f", measured {ratio:.3f} × ({_words(best)}): {'reached' if ratio >= goal else 'missed'}"
    else:
        line += "; not measured yet"
    if alike:
        ratio, best = max(alike, key=lambda pair: pair[0])
        line += f"; under the same checkpointing up to {ratio:.3f} × ({_words(best)})"
    return line


def _words(result: ArmResult) -> str:
    return f"{result.label}, {result.setting}, {result.routing.replace('_', '-')}"


def checkpointing_pairs(rows: Iterable[Mapping[str, Any]]) -> list[list[tuple[ArmResult, ArmResult]]]:
    """Stock and the fastest arm under each checkpointing, of one campaign.

    Returns:
        For each shape and routing the pairs of the campaign in which stock ran under most kinds of checkpointing, the
        last of several; nothing where none ran under several.
    """
    campaigns: dict[tuple[str, str], dict[str | None, list[Mapping[str, Any]]]] = {}
    for row in rows:
        campaigns.setdefault((row["shape"], row["routing"]), {}).setdefault(row.get("campaign"), []).append(row)
    pairs = []
    # One campaign for each shape and routing: hosts differ, so its rows are not mixed with another's.
    for of_campaign in campaigns.values():
        last_first = map(arm_results, reversed(of_campaign.values()))
        mine = max(last_first, key=lambda results: len(_stock_of(results)))
        stock = _stock_of(mine)
        arms = {kind: [one for one in mine if one.activation_checkpoint == kind] for kind in stock}
        # Of a campaign that was cut short, stock may be all there is under a kind.
        kinds = [kind for kind in stock if any(one.arm not in STOCK for one in arms[kind])]
        if len(stock) > 1 and kinds:
            pairs.append([(stock[kind], _fastest(arms[kind])) for kind in kinds])
    return pairs


def checkpointing_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pairs of :func:`checkpointing_pairs` with each side's best below them, in tokens/s per GPU; empty without any."""
    lines = []
    for pairs in checkpointing_pairs(rows):
        best = (_fastest(stock for stock, _ in pairs), _fastest(arm for _, arm in pairs))
        shown = [(checkpointing_words(stock.activation_checkpoint), stock, arm) for stock, arm in pairs]
        shown.append((f"best of each side: {' and '.join(one.activation_checkpoint for one in best)}", *best))
        lines += [
            {
                "layers": shape_words(stock.shape),
                "routing": stock.routing.replace("_", " "),
                "checkpointing": words,
                "stock tokens/s": round(stock.tps),
                "best arm's tokens/s": round(arm.tps),
                "× stock": round(arm.tps / stock.tps, 3),
                "best arm": arm.label,
                "remark": STOCK_SHORT if stock.retries else "",
            }
            for words, stock, arm in shown
        ]
    return lines


def _stock_of(results: Iterable[ArmResult]) -> dict[str, ArmResult]:
    """The faster stock arm under each checkpointing."""
    stock = [one for one in results if one.arm in STOCK]
    kinds = dict.fromkeys(one.activation_checkpoint for one in stock)
    return {kind: _fastest(one for one in stock if one.activation_checkpoint == kind) for kind in kinds}


def _fastest(results: Iterable[ArmResult]) -> ArmResult:
    return max(results, key=lambda one: one.tps)


def layer_gains(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each arm gains on a MoE layer: the step of the deeper shape minus that of the shallower one.

    The difference leaves out the embedding, the head and the optimizer's share of them, which a thin model has with few
    layers and a whole model with many. One campaign has to have both depths of the arm and of stock.

    Args:
        rows: of ``h100_two_by_two.json``, see :func:`arm_results`; those without ``step_s`` count for nothing, nor do
            those whose allocator retried: they were short of memory.

    Returns:
        A record of each arm, campaign, checkpointing and routing. ``stock_ms`` and ``arm_ms`` are
        milliseconds of a MoE layer in a step, ``ratio`` is stock's over the arm's, ``step_5`` and ``step_10`` are the
        ratios of whole steps by MoE layers, and ``stock`` is the faster arm of :data:`STOCK` at the deeper shape.
    """
    rows_of: dict[tuple[str | None, str | None, str, str, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["shape"] in DEPTHS and row.get("step_s") and not row.get("allocator_retries"):
            key = (row.get("campaign"), row.get("code"), row["activation_checkpoint"], row["routing"], row["arm"])
            rows_of.setdefault(key, {}).setdefault(DEPTHS[row["shape"]], []).append(row)
    few, many = DEPTHS.values()
    step_s = {
        key: {moe: statistics.median(second for row in own for second in row["step_s"]) for moe, own in depths.items()}
        for key, depths in rows_of.items()
        if len(depths) == len(DEPTHS)
    }
    gains = []
    for (campaign, code, checkpointing, routing, arm), own in step_s.items():
        alike = (campaign, code, STOCK_CHECKPOINTING.get(checkpointing, checkpointing), routing)
        stocks = {name: step_s[*alike, name] for name in STOCK if (*alike, name) in step_s}
        if arm in STOCK or not stocks:
            continue
        name, stock = min(stocks.items(), key=lambda item: item[1][many])
        stock_ms, arm_ms = ((one[many] - one[few]) / (many - few) * 1e3 for one in (stock, own))
        gains.append(
            {
                "code": code,
                "activation_checkpoint": checkpointing,
                "routing": routing,
                "arm": arm,
                "stock": name,
                "passes": len(rows_of[campaign, code, checkpointing, routing, arm][many]),
                "stock_ms": stock_ms,
                "arm_ms": arm_ms,
                "ratio": stock_ms / arm_ms,
                **{f"step_{moe}": stock[moe] / own[moe] for moe in (few, many)},
            }
        )
    return gains


def layer_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """:func:`layer_gains` of these rows as people read them; empty without any."""
    return [
        {
            "checkpointing": one["activation_checkpoint"],
            "routing": one["routing"].replace("_", " "),
            "arm": two_by_two_label(one["arm"]),
            "stock, ms a layer": round(one["stock_ms"], 1),
            "arm, ms a layer": round(one["arm_ms"], 1),
            "layer × stock": round(one["ratio"], 3),
            **{f"step × stock, {moe} MoE layers": round(one[f"step_{moe}"], 3) for moe in DEPTHS.values()},
            "passes": one["passes"],
            "remark": remarks(one["stock"], one["code"]),
        }
        for one in layer_gains(rows)
    ]


def result_table(results: Sequence[ArmResult]) -> pd.DataFrame:
    """All results, a row an arm; tokens/s per GPU, and × stock where stock was measured beside it."""
    return pd.DataFrame(
        {
            "layers": shape_words(one.shape),
            "checkpointing": one.activation_checkpoint,
            "routing": one.routing.replace("_", " "),
            "arm": one.label,
            "tokens/s": round(one.tps),
            "quartiles": f"{one.low:,.0f} to {one.high:,.0f}",
            "× stock": None if one.ratio is None else round(one.ratio, 3),
            "remark": remarks(one.stock, one.code, stock_short=one.stock_short),
        }
        for one in results
    )


def remarks(stock: str | None, code: str | None, *, stock_short: bool = False) -> str:
    """What is not as in most rows: stock's setting, and the code."""
    tiles = "stock with flex tiles" if stock not in (None, BASELINE) else ""
    return ", ".join(filter(None, (tiles, (code or "").replace(CODE, FUSED), stock_short * STOCK_SHORT)))


def finished(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the package has, from the rows of ``h100_two_by_two.json``."""
    return {
        "program": "benchmarks/validation/two_by_two.py",
        "results": [asdict(one) for one in arm_results(rows)],
    }
