"""Throughput figure: a bar an arm with its interval, each seed as a point, the gain over the baseline written above."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import arm_label, contrast
from moelab.analysis.interval import Interval
from moelab.analysis.throughput import ArmThroughput, Gain, arm_throughput
from moelab.viz.theme import INK, arm_styles, in_order, new_figure, wrap


def throughput_bars(
    table: pd.DataFrame,
    *,
    gains: Sequence[Gain] = (),
    warmup_steps: int = 3,
    level: float = 0.95,
    note: str = "",
    rank_words: str = "per GPU",
) -> go.Figure:
    """Tokens per second per GPU of every arm, and the gains over a baseline.

    Args:
        table: Metrics table.
        gains: Gains to write above their arms; an arm without one is shown without.
        warmup_steps: Steps discarded at the start of a run.
        level: Coverage of the intervals.
        note: Condition to state in the title, such as "emulated kernels".
        rank_words: What a throughput is of, "per rank" where ranks are processes on a CPU.

    Returns:
        The figure.

    Raises:
        BadInput: No step with a throughput is left after the warm-up.
    """
    found = {arm.arm: arm for arm in arm_throughput(table, warmup_steps=warmup_steps, level=level)}
    arms = [found[name] for name in in_order(found)]
    by_arm = {one.arm: one for one in gains if one.arm in found}
    figure = new_figure(_finding(arms, by_arm), subtitle=_subtitle(arms, warmup_steps, level), note=note)
    # With two seeds an interval may be a hundred times as long as the bars, which must stay readable beside it.
    ceiling = 2.0 * max(max(arm.tps, *arm.tps_by_seed.values()) for arm in arms)
    highest = min(ceiling, max(max(arm.tps, arm.interval.high if arm.interval.exists else 0.0) for arm in arms))
    for position, arm in enumerate(arms):
        _draw_arm(figure, arm, position, by_arm.get(arm.arm), ceiling=ceiling)
    labels = ["<br>".join(wrap(arm_label(arm.arm), 18)) for arm in arms]
    figure.update_xaxes(tickvals=list(range(len(arms))), ticktext=labels, showgrid=False, ticks="")
    figure.update_xaxes(range=[-0.7, len(arms) - 0.3] if len(arms) > 1 else [-1.0, 1.0])
    figure.update_yaxes(title_text=f"tokens/s {rank_words}", range=[0, 1.18 * highest], tickformat=",")
    figure.update_layout(showlegend=False, bargap=0.45, hovermode="closest")
    return figure


def _draw_arm(
    figure: go.Figure, arm: ArmThroughput, position: int, over_baseline: Gain | None, *, ceiling: float
) -> None:
    style = arm_styles([arm.arm])[arm.arm]
    top = arm.interval.high if arm.interval.exists else arm.tps
    figure.add_trace(
        go.Bar(
            x=[position],
            y=[arm.tps],
            name=style.label,
            marker={"color": style.fill(0.35), "line": {"color": style.color, "width": 2}},
            error_y=_error_bar(arm.tps, arm.interval),
            text=[f"<b>{arm.tps:,.0f}</b>"],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": INK, "size": 16},
            hovertemplate=f"{style.label}: %{{y:,.0f}} tokens/s<extra></extra>",
        )
    )
    seeds = arm.tps_by_seed
    figure.add_trace(
        go.Scatter(
            x=[position + 0.13 + 0.02 * index for index in range(len(seeds))],
            y=list(seeds.values()),
            mode="markers",
            marker={"color": "white", "size": 8, "symbol": style.symbol, "line": {"color": style.color, "width": 2}},
            customdata=list(seeds),
            hovertemplate="seed %{customdata}: %{y:,.0f} tokens/s<extra></extra>",
        )
    )
    if over_baseline is not None:
        height = min(ceiling, max(top, *seeds.values()))
        label = f"<b>{over_baseline.percent:+.1f} %</b><br>{_bounds(over_baseline.interval)}"
        place = {"x": position, "y": height, "yanchor": "bottom", "yshift": 6, "bgcolor": "rgba(255,255,255,0.85)"}
        figure.add_annotation(text=label, showarrow=False, **place)


def _error_bar(tps: float, interval: Interval) -> dict[str, object]:
    if not interval.exists:
        return {"visible": False}
    bar = {"array": [interval.high - tps], "arrayminus": [tps - interval.low], "symmetric": False}
    return bar | {"color": INK, "thickness": 1.5, "width": 8}


def _bounds(interval: Interval) -> str:
    """Bounds of a gain in percent, in the size of a remark."""
    if not interval.exists:
        return "<span style='font-size:12px'>no interval</span>"
    low, high = (100.0 * (bound - 1.0) for bound in (interval.low, interval.high))
    return f"<span style='font-size:12px'>{low:+.1f} to {high:+.1f}</span>"


def _finding(arms: Sequence[ArmThroughput], gains: dict[str, Gain]) -> str:
    if not gains:
        return f"{arm_label(arms[0].arm)}: {arms[0].tps:,.0f} tokens/s" if len(arms) == 1 else "Throughput by arm"
    best = max(gains.values(), key=lambda found: found.ratio)
    arm, baseline, shared = contrast(best.arm, best.baseline)
    both = f" (both {shared})" if shared else ""
    if best.interval.exists and not best.resolved:
        return f"{arm} is {best.percent:+.1f} % from {baseline}{both}, within its interval: no difference is shown"
    direction = "faster" if best.ratio > 1.0 else "slower"
    return f"{arm} trains {abs(best.percent):.1f} % {direction} than {baseline}{both}"


def _subtitle(arms: Sequence[ArmThroughput], warmup_steps: int, level: float) -> str:
    counts = sorted({arm.n_seeds for arm in arms})
    n = f"n = {' to '.join(str(count) for count in sorted({counts[0], counts[-1]}))} seeds an arm"
    if counts == [1]:
        return f"Median over steps after {warmup_steps} warm-up steps; one seed an arm, so no interval."
    return (
        f"Geometric mean over seeds of each run's median after {warmup_steps} warm-up steps; points: seeds; "
        f"{n}, {100 * level:g} % t intervals, cut where they leave the axis; gains are paired by seed."
    )
