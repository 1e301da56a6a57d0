"""What-if figures: throughput against the network and the number of GPUs, and what a whole training costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from moelab.analysis.arms import arm_label
from moelab.projection.project import Cost
from moelab.projection.uncertainty import OUTSIDE_FACTOR
from moelab.sweep import Point
from moelab.viz.draw import panels
from moelab.viz.theme import INK, ArmStyle, arm_styles, new_figure, plot_text

NOTE = "derived: the step-time model"
HOLLOW = f"Hollow: outside of what the model was held against, interval {OUTSIDE_FACTOR:g} times as wide."
KINDS: Mapping[str, tuple[str, str, str]] = {
    "H100": ("#009E73", "longdash", "cross"),
    "H200": ("#CC79A7", "dot", "diamond"),
    "B200": ("#0072B2", "solid", "circle"),
    "GB200": ("#D55E00", "dash", "square"),
}


def network_curves(points: Sequence[Point], *, words: str) -> go.Figure:
    """Throughput of the arms against the bandwidth of each GPU's network card.

    Args:
        points: of :func:`moelab.sweep.by_network`.
        words: model and cluster, for the subtitle.
    """
    styles = arm_styles(point.series for point in points)
    first, last = min(point.x for point in points), max(point.x for point in points)
    at = {(point.series, point.x): point.projection.tps for point in points}
    gains = [100 * (at["bf16_deepep", x] / at["bf16_standard", x] - 1) for x in (first, last)]
    figure = new_figure(
        f"DeepEP's gain goes from {gains[0]:+.0f} % at {first:g} GB/s to {gains[1]:+.0f} % at {last:g} GB/s",
        subtitle=f"{words} Bands: 90 % intervals of the outer arms. {HOLLOW}",
        note=NOTE,
    )
    _draw_lines(figure, points, styles, banded=(next(iter(styles)), list(styles)[-1]))
    return figure.update_xaxes(title_text="network of each GPU, each way (GB/s)")


def size_curves(points: Sequence[Point], *, words: str) -> go.Figure:
    """Throughput of each kind of GPU against their number, each size with its fastest layout.

    Args:
        points: of :func:`moelab.sweep.by_gpus`.
        words: model and batch, for the subtitle.
    """
    best = max(points, key=lambda point: point.projection.tps)
    figure = new_figure(
        f"Most for each GPU: {best.x:,.0f} {best.series} with {_degrees(best)}, {best.projection.tps:,.0f} tokens/s",
        subtitle=f"{words} Each size with the fastest layout of those tried; where a line begins the model fits. "
        f"Bands: 90 % intervals. {HOLLOW}",
        note=NOTE,
    )
    kinds = {kind: ArmStyle(label=kind, color=c, dash=d, symbol=s) for kind, (c, d, s) in KINDS.items()}
    shown = {kind: style for kind, style in kinds.items() if any(point.series == kind for point in points)}
    _draw_lines(figure, points, shown, banded=tuple(shown))
    return figure.update_xaxes(title_text="GPUs", ticktext=[f"{x:,.0f}" for x in figure.layout.xaxis.tickvals])


def cost_bars(costs: Mapping[str, Cost], *, tokens: float, words: str) -> go.Figure:
    """GPU-hours, price and energy of a whole training, by arm.

    Args:
        costs: of :func:`moelab.projection.project.cost`, by arm; the first is the one that others are held against.
        tokens: of the training.
        words: cluster, price and watts, for the subtitle.
    """
    arms = list(costs)
    cheapest = min(arms, key=lambda arm: costs[arm].price)
    saved = costs[arms[0]].price - costs[cheapest].price
    figure = panels(
        f"{arm_label(cheapest)} saves {saved / 1e6:,.1f} of {costs[arms[0]].price / 1e6:,.1f} M on "
        f"{tokens / 1e12:g} T tokens",
        list(_COST_PANELS),
        subtitle=f"{words} Without restarts and failures.",
        note=NOTE,
        height=400,
        spacing=0.08,
    )
    for arm, style in arm_styles(arms).items():
        for column, (unit, value) in enumerate(_COST_PANELS.items(), start=1):
            height = value(costs[arm])
            bar = go.Bar(
                x=[""],
                y=[height],
                name=style.label,
                legendgroup=arm,
                showlegend=column == 1,
                marker={"color": style.fill(0.35), "line": {"color": style.color, "width": 2}},
                text=[f"{height:,.1f}"],
                textposition="inside",
                insidetextanchor="end",
                textangle=0,
                textfont={"color": INK, "size": 13},
                hovertemplate=f"{style.label}: %{{y:,.2f}} {plot_text(unit)}<extra></extra>",
            )
            figure.add_trace(bar, row=1, col=column)
    figure.update_xaxes(showgrid=False, ticks="", showticklabels=False)
    return figure.update_layout(barmode="group", bargap=0.15, hovermode="closest", legend_y=-0.06)


_COST_PANELS: Mapping[str, Callable[[Cost], float]] = {
    "million GPU-hours": lambda cost: cost.gpu_hours / 1e6,
    "price, millions": lambda cost: cost.price / 1e6,
    "energy, GWh": lambda cost: cost.energy_mwh / 1e3,
}


def _draw_lines(
    figure: go.Figure, points: Sequence[Point], styles: Mapping[str, ArmStyle], *, banded: Sequence[str]
) -> None:
    for name, style in styles.items():
        line = sorted((point for point in points if point.series == name), key=lambda point: point.x)
        xs = [point.x for point in line]
        if name in banded:
            low, high = zip(*(point.projection.interval for point in line), strict=True)
            band = go.Scatter(x=[*xs, *reversed(xs)], y=[*high, *reversed(low)], fill="toself", mode="lines")
            band.update(fillcolor=style.fill(0.12), line_width=0, hoverinfo="skip", showlegend=False)
            figure.add_trace(band.update(legendgroup=style.label))
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=[point.projection.tps for point in line],
                mode="lines+markers",
                name=style.label,
                legendgroup=style.label,
                line={"color": style.color, "dash": style.dash, "width": 2},
                marker={
                    "symbol": style.symbol,
                    "size": 9,
                    "color": ["white" if point.projection.outside else style.color for point in line],
                    "line": {"color": style.color, "width": 2},
                },
                customdata=[f"{_degrees(point)}; {point.projection.label}" for point in line],
                hovertemplate="%{x:g}: %{y:,.0f} tokens/s (%{customdata})",
            )
        )

    figure.update_xaxes(type="log", tickvals=sorted({point.x for point in points}))
    figure.update_yaxes(title_text="tokens/s per GPU", rangemode="tozero", tickformat=",")
    figure.update_layout(hovermode="closest", legend_y=-0.22)


def _degrees(point: Point) -> str:
    one = point.projection.experiment
    return f"PP {one.pp}, TP {one.tp}, EP {one.ep}"
