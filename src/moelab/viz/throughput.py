"""Throughput figures: a bar an arm with its interval, seeds as points and its gain; and the published ones, redrawn."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import arm_label, contrast
from moelab.analysis.published import GAINS, SOURCE, THROUGHPUT, THROUGHPUT_SETUP, published_tps
from moelab.analysis.throughput import ArmThroughput, Gain, arm_throughput
from moelab.viz.draw import arm_bar, error_bars, finish_arm_bars
from moelab.viz.theme import INK, MUTED, arm_styles, in_order, new_figure, plot_text, span

TWO_BY_TWO = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
"""``mxfp8_standard`` was not published."""


def throughput_bars(
    table: pd.DataFrame,
    *,
    gains: Sequence[Gain] = (),
    warmup_steps: int = 3,
    note: str = "",
    rank_words: str = "per GPU",
) -> go.Figure:
    """Tokens per second per GPU of every arm, and the gains over a baseline.

    Args:
        table: Metrics table.
        gains: Gains to write above their arms; an arm without one is shown without.
        warmup_steps: Steps discarded at the start of a run.
        note: Condition to state in the title, such as "emulated kernels".
        rank_words: What a throughput is of, "per rank" where ranks are processes on a CPU.

    Raises:
        BadInput: No step with a throughput is left after the warm-up.
    """
    measured = {arm.arm: arm for arm in arm_throughput(table, warmup_steps=warmup_steps)}
    arms = [measured[name] for name in in_order(measured)]
    by_arm = {one.arm: one for one in gains if one.arm in measured}
    figure = new_figure(_finding(arms, by_arm), subtitle=_reading(arms, warmup_steps), note=note)
    # With two seeds an interval may be a hundred times as long as the bars, which must stay readable beside it.
    ceiling = 2.0 * max(max(arm.tps, *arm.tps_by_seed.values()) for arm in arms)
    highest = min(ceiling, max(max(arm.tps, arm.interval.high if arm.interval.exists else 0.0) for arm in arms))
    for position, arm in enumerate(arms):
        _draw_arm(figure, arm, position, by_arm.get(arm.arm), ceiling=ceiling)
    margin = 0.7 if len(arms) > 1 else 1.0
    return finish_arm_bars(figure, [arm.arm for arm in arms], highest, words=rank_words, margin=margin)


def _draw_arm(
    figure: go.Figure, arm: ArmThroughput, position: int, over_baseline: Gain | None, *, ceiling: float
) -> None:
    style, interval, seeds = arm_styles([arm.arm])[arm.arm], arm.interval, arm.tps_by_seed
    reach = error_bars([(interval.low, arm.tps, interval.high)], color=INK, thickness=1.5, width=8)
    error_y = reach if interval.exists else {"visible": False}
    bar = arm_bar(position, arm.tps, style, "%{y:,.0f} tokens/s")
    figure.add_trace(bar.update(name=style.label, error_y=error_y))
    figure.add_scatter(
        x=[position + 0.13 + min(0.02, 0.24 / len(seeds)) * index for index in range(len(seeds))],
        y=list(seeds.values()),
        mode="markers",
        marker={"color": "white", "size": 8, "symbol": style.symbol, "line": {"color": style.color, "width": 2}},
        customdata=list(seeds),
        hovertemplate="seed %{customdata}: %{y:,.0f} tokens/s<extra></extra>",
    )
    if over_baseline is not None:
        height = min(ceiling, max(interval.high if interval.exists else arm.tps, *seeds.values()))
        gained = "no interval"
        if over_baseline.interval.exists:
            low, high = (100.0 * (end - 1.0) for end in (over_baseline.interval.low, over_baseline.interval.high))
            gained = f"{low:+.1f} to {high:+.1f}"
        label = f"<b>{over_baseline.percent:+.1f} %</b><br><span style='font-size:12px'>{gained}</span>"
        place = {"x": position, "y": height, "yanchor": "bottom", "yshift": 6, "bgcolor": "rgba(255,255,255,0.85)"}
        figure.add_annotation(text=label, showarrow=False, **place)


def _finding(arms: Sequence[ArmThroughput], gains: dict[str, Gain]) -> str:
    if not gains:
        return f"{arm_label(arms[0].arm)}: {arms[0].tps:,.0f} tokens/s" if len(arms) == 1 else "Throughput by arm"
    best = max(gains.values(), key=lambda one: one.ratio)
    arm, baseline, shared = contrast(best.arm, best.baseline)
    both = f" (both {shared})" if shared else ""
    if best.interval.exists and not best.resolved:
        return f"{arm} is {best.percent:+.1f} % from {baseline}{both}, within its interval: no difference is shown"
    direction = "faster" if best.ratio > 1.0 else "slower"
    return f"{arm} trains {abs(best.percent):.1f} % {direction} than {baseline}{both}"


def _reading(arms: Sequence[ArmThroughput], warmup_steps: int) -> str:
    counts = [arm.n_seeds for arm in arms]
    if max(counts) == 1:
        return f"Median over steps after {warmup_steps} warm-up steps; one seed an arm, so no interval."
    return (
        f"Geometric mean over seeds of each run's median after {warmup_steps} warm-up steps; points: seeds; "
        f"n = {span(counts)} seeds an arm, {100 * arms[0].interval.level:g} % t intervals, cut where they leave the "
        "axis; gains are paired by seed."
    )


def published_bars() -> go.Figure:
    """Figure 2 of the published study: three arms of the two-by-two with their gains, and the place of the fourth.

    Nothing here was measured by moelab.
    """
    gains = {gain.arm: gain.percent for gain in GAINS if gain.baseline == "bf16_standard"}
    setup = THROUGHPUT_SETUP
    figure = new_figure(
        f"DeepEP gives {gains['bf16_deepep']:+.0f} %, DeepEP with MXFP8 experts {gains['mxfp8_deepep']:+.0f} %; "
        "MXFP8 alone was not published",
        subtitle=f"{setup.model}, {setup.hardware.split(':')[0]}, sequences of {setup.seq_len:,} tokens, "
        f"TP {setup.tp}, PP {setup.pp}, EP {setup.ep}, forced balance. n = 1 run of {setup.steps} steps an arm; no "
        "interval and no rule for discarding steps were published.",
        note=f"quoted: {SOURCE.split(';')[0]}",
        height=430,
    )
    for position, arm in enumerate(TWO_BY_TWO):
        published, style = published_tps(arm), arm_styles([arm])[arm]
        above = {"x": position, "showarrow": False, "yanchor": "bottom"}
        if published is None:
            figure.add_annotation(text="not<br>published", y=0, yshift=8, font_color=MUTED, **above)
            continue
        hover = f"%{{y:,.0f}} tokens/s, {published.label}: {plot_text(published.source)}"
        figure.add_trace(arm_bar(position, published.tps, style, hover))
        text = f"<b>{gains[arm]:+.1f} %</b>" if arm in gains else "baseline"
        figure.add_annotation(text=text, y=published.tps, yshift=6, **above)
    return finish_arm_bars(figure, TWO_BY_TWO, max(row.tps for row in THROUGHPUT))
