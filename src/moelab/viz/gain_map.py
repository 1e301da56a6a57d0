"""The map of gain: rows against the size of an expert's weight, with the line where MXFP8 begins to save time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from moelab.mxfp8.break_even import gain
from moelab.mxfp8.break_even_fit import ExpertWork, Fit, break_even
from moelab.mxfp8.grouped_gemm_cases import Case
from moelab.viz.theme import INK, new_figure

ROWS_LOG2, WEIGHTS_LOG2 = (10.0, 20.5), (18.0, 27.0)
STEPS_M, STEPS_NK, STEPS_LINE = 64, 46, 46
LEVEL = 0.2
"""Gain between two contour lines."""
_COLORS = [[0.0, "#B2500A"], [0.25, "#E8A87C"], [0.5, "#FFFFFF"], [0.75, "#7FB8DC"], [1.0, "#0072B2"]]
_MARKS = ("star", "diamond", "circle", "square")


def gain_map(
    fitted: Fit,
    works: Sequence[ExpertWork],
    *,
    aspect: float = 2.25,
    groups: int = 8,
    in_step: bool = False,
    resamples: int = 100,
) -> go.Figure:
    """Predicted gain over rows M and weight size N·K, with layouts marked at their own gain.

    Args:
        fitted: constants and their spread.
        works: layouts to mark; each is labelled with the gain of its own N, K and groups.
        aspect: K / N of the map's weights; gain at equal N·K falls as it moves away from 1.
        groups: local experts of the map.
        in_step: kernels as in a step instead of alone.
        resamples: of the interval around the break-even line.

    Returns:
        The figure.
    """
    constants = fitted.constants
    rows = np.logspace(*ROWS_LOG2, STEPS_M, base=2)
    weights = np.logspace(*WEIGHTS_LOG2, STEPS_NK, base=2)
    gains = [[_gain_at(m, nk, aspect, groups, fitted, in_step) for m in rows] for nk in weights]
    figure = new_figure(
        _finding(works, fitted, in_step),
        subtitle=f"gain = BF16 time / {constants.low.upper()} time of forward + backward on a {constants.gpu}, "
        f"{groups} groups, K = {aspect:g} N; dashed: 90 % interval of gain 1; layouts show their own gain",
        note=f"predicted, not measured: {'kernels in a step' if in_step else 'kernels alone'}",
        height=560,
    )
    figure.add_trace(_contours(rows, weights, gains))
    for name, nk, even in _lines(fitted, aspect, groups, in_step, resamples):
        style = {"color": INK, "width": 3 if name == "gain 1" else 1.5, "dash": "solid" if name == "gain 1" else "dash"}
        figure.add_scatter(x=even, y=nk, mode="lines", line=style, name=name, hoverinfo="skip", showlegend=False)
    for work, symbol in zip(works, _MARKS, strict=False):
        _mark(figure, work, symbol, fitted, in_step)
    _label_axes(figure)
    return figure


def _sides(weight: float, aspect: float) -> tuple[int, int]:
    """N and K of a weight of N·K elements with K / N = aspect."""
    return max(1, round(math.sqrt(weight / aspect))), max(1, round(math.sqrt(weight * aspect)))


def _gain_at(m: float, weight: float, aspect: float, groups: int, fitted: Fit, in_step: bool) -> float:
    n, k = _sides(weight, aspect)
    return round(gain(m, n, k, groups, fitted.constants, in_step=in_step), 3)


def _finding(works: Sequence[ExpertWork], fitted: Fit, in_step: bool) -> str:
    gains = [f"{work.name.split(',')[0]} gains {_own_gain(work, fitted, in_step):.2f}×" for work in works[:2]]
    told = f": {', '.join(gains)}" if gains else ""
    return f"{fitted.constants.low.upper()} saves time above the bold line only{told}"


def _own_gain(work: ExpertWork, fitted: Fit, in_step: bool) -> float:
    case = work.case
    return gain(case.m, case.n, case.k, case.groups, fitted.constants, in_step=in_step)


def _contours(rows: np.ndarray, weights: np.ndarray, gains: list[list[float]]) -> go.Contour:
    return go.Contour(
        x=[round(m) for m in rows],
        y=[round(nk) for nk in weights],
        z=gains,
        zmin=0.2,
        zmax=1.8,
        colorscale=_COLORS,
        contours={"start": 0.2, "end": 1.8, "size": LEVEL, "showlabels": True, "labelfont": {"size": 12, "color": INK}},
        line={"width": 0.6, "color": "#5f6b7a"},
        colorbar={"title": {"text": "gain"}, "thickness": 14, "tickvals": [0.2, 0.6, 1.0, 1.4, 1.8]},
        hovertemplate="M %{x}, N·K %{y}: %{z:.2f}<extra></extra>",
    )


def _lines(
    fitted: Fit, aspect: float, groups: int, in_step: bool, resamples: int
) -> list[tuple[str, list[float], list[float | None]]]:
    """Break-even rows over weights: best value, and the ends of its interval."""
    chosen = np.logspace(*WEIGHTS_LOG2, STEPS_LINE, base=2)
    found: dict[str, list[float | None]] = {"low": [], "gain 1": [], "high": []}
    for nk in chosen:
        n, k = _sides(float(nk), aspect)
        even = break_even(Case(m=1, n=n, k=k, groups=groups), fitted, in_step=in_step, resamples=resamples)
        for name, value in (("low", even.low), ("gain 1", even.value), ("high", even.high)):
            inside = value is not None and 2 ** ROWS_LOG2[0] <= value <= 2 ** ROWS_LOG2[1]
            found[name].append(value if inside else None)
    return [(name, [float(nk) for nk in chosen], values) for name, values in found.items()]


def _mark(figure: go.Figure, work: ExpertWork, symbol: str, fitted: Fit, in_step: bool) -> None:
    case = work.case
    inside = min(max(case.m, 2 ** ROWS_LOG2[0]), 2 ** ROWS_LOG2[1])
    gained = _own_gain(work, fitted, in_step)
    right = inside > 2 ** (sum(ROWS_LOG2) / 2 + 2)
    figure.add_scatter(
        x=[inside],
        y=[case.n * case.k],
        mode="markers+text",
        marker={"symbol": symbol, "size": 15, "color": INK, "line": {"color": "white", "width": 1.5}},
        text=[f"<b>{work.name.split(',')[0]}: {gained:.2f}</b>"],
        textposition=f"{'top' if gained > 1 else 'bottom'} {'left' if right else 'center'}",
        name=f"{work.name} ({case.groups} groups)",
        hovertemplate=f"{work.name}: {case.name}<br>{work.layout}<extra></extra>",
    )


def _label_axes(figure: go.Figure) -> None:
    rows = [2**exponent for exponent in range(10, 21, 2)]
    figure.update_xaxes(
        title_text="rows M of all groups (tokens × top-k of a rank and micro-batch)",
        type="log",
        tickvals=rows,
        ticktext=[f"{m // 1024}k" for m in rows],
        range=[math.log10(2**exponent) for exponent in ROWS_LOG2],
        showgrid=False,
    )
    weights = [2**exponent for exponent in range(18, 28, 2)]
    figure.update_yaxes(
        title_text="weights of an expert's matrix, N·K",
        type="log",
        tickvals=weights,
        ticktext=[f"{nk / 2**20:g} Mi" for nk in weights],
        range=[math.log10(2**exponent) for exponent in WEIGHTS_LOG2],
        showgrid=False,
    )
    figure.update_layout(hovermode="closest", legend_y=-0.2)
