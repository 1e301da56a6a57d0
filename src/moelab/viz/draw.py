"""Traces that several figures share: seeds as thin lines, a mean as a bold one, a band around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.viz.curves import finished, joined_lines, smooth, thinning
from moelab.viz.theme import WARNING, ArmStyle, arm_styles


def draw_seeds_and_means(
    figure: go.Figure, curves: dict[str, pd.DataFrame], *, window: int, shown_from: int = 0, inset: bool = False
) -> None:
    """Draw every seed of every arm thin and unsmoothed, and over them the arms' means, bold.

    Args:
        figure: Figure to draw into.
        curves: Steps by seeds, by arm.
        window: Logged steps that the mean is smoothed over; seeds are fainter behind a smoothed mean.
        shown_from: First step drawn.
        inset: Draw on the axes ``x2`` and ``y2``, without a second legend.
    """
    axes = {"xaxis": "x2", "yaxis": "y2", "showlegend": False} if inset else {}
    styles = arm_styles(curves)
    for name, style in styles.items():
        x, y = joined_lines(curves[name].loc[shown_from:])
        line = {"color": style.fill(0.35 if window == 1 else 0.15), "width": 1}
        seeds = go.Scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip", legendgroup=style.label, **axes)
        figure.add_trace(seeds.update(showlegend=False))
    for name, style in styles.items():
        mean = smooth(finished(curves[name]), window).mean(axis=1)
        draw_mean(figure, mean.loc[shown_from:], style, **axes)


def draw_mean(figure: go.Figure, mean: pd.Series[float], style: ArmStyle, **options: object) -> None:
    """Draw one bold line in the arm's colour and dash; ``options`` go to the trace."""
    trace = {"mode": "lines", "name": style.label, "legendgroup": style.label, "hovertemplate": "%{y:.4f}"}
    line = {"color": style.color, "width": 2.5, "dash": style.dash}
    figure.add_trace(go.Scatter(x=mean.index.to_numpy(), y=mean.to_numpy(), line=line, **(trace | options)))


def draw_band(figure: go.Figure, low: pd.Series[float], high: pd.Series[float], style: ArmStyle) -> None:
    """Fill between two curves over the same steps; where a bound is missing nothing is drawn."""
    steps = low.index.to_numpy()
    x, y = np.concatenate([steps, steps[::-1]]), np.concatenate([high.to_numpy(), low.to_numpy()[::-1]])
    drawn = np.isfinite(y)
    band = {"fill": "toself", "fillcolor": style.fill(0.18), "mode": "lines", "line_width": 0, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(x=x[drawn], y=y[drawn], legendgroup=style.label, showlegend=False, **band))


def draw_marks(figure: go.Figure, marks: Sequence[tuple[int, float]]) -> None:
    """Mark the steps whose gradient norm was reported as NaN or Inf on the curves of their runs' loss.

    Args:
        figure: to draw into.
        marks: step and loss (nats) of each; where there are none, nothing is drawn and the legend does not name them.
    """
    if not marks:
        return
    x, y = zip(*marks[:: thinning(len(marks))], strict=True)
    look = {"symbol": "x-thin", "size": 8, "line": {"color": WARNING, "width": 1.5}}
    name = "gradient norm not finite"
    figure.add_trace(go.Scatter(x=x, y=y, mode="markers", marker=look, name=name, showlegend=True, hoverinfo="x+name"))
