"""What figures of several subjects share: panels, axes of arms, bars, intervals, levels, curves over steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.judge.arms import arm_label
from moelab.judge.curves import joined_lines, thinned, thinning
from moelab.viz.theme import INK, MUTED, NORMAL, WARNING, ArmStyle, new_figure, wrap


def panels(
    finding: str,
    titles: Sequence[str],
    *,
    subtitle: str,
    note: str = "",
    height: int = 460,
    spacing: float = 0.08,
    shared: bool = False,
    width: int = NORMAL,
    widths: Sequence[float] | None = None,
) -> go.Figure:
    """An empty figure of several panels in a row, with a title as :func:`moelab.viz.theme.new_figure` writes it.

    ``spacing`` is between two panels, as a part of the width; ``shared`` panels have one vertical axis; ``widths`` are
    those of the panels in proportion. Panels may go without titles.
    """
    figure = new_figure(finding, subtitle=subtitle, note=note, height=height, width=width)
    # Not make_subplots, whose figure would have plotly's own template under the theme.
    figure.set_subplots(
        cols=len(titles),
        subplot_titles=list(titles),
        horizontal_spacing=spacing,
        shared_yaxes=shared,
        column_widths=widths and list(widths),
    )
    if not any(titles):
        return figure
    figure.update_annotations(font={"size": 13, "color": MUTED})
    lines = 1 + max(title.count("<br>") for title in titles)
    # plotly gives titles of panels no room of their own: they would lie on the figure's title.
    room = 24 + max(0, lines - 2) * 17
    return figure.update_layout(margin_t=figure.layout.margin.t + room, height=figure.layout.height + room)


def in_panel(column: int, name: str) -> dict[str, object]:
    """Where a trace goes in a figure of :func:`panels`; the legend names it once, and a click there hides it in all."""
    return {"row": 1, "col": column, "name": name, "legendgroup": name, "showlegend": column == 1}


def inside(texts: Sequence[str], *, anchor: str = "middle", **font: object) -> dict[str, object]:
    """Options of bars that have these texts in them, upright."""
    # plotly turns a text that is wider than its bar, and then nobody can read it.
    place = {"textposition": "inside", "insidetextanchor": anchor, "textangle": 0}
    return {"text": list(texts), "textfont": font, **place}


def list_rows(figure: go.Figure, x: str = "", *, names: Sequence[str] = (), **layout: object) -> go.Figure:
    """Make the vertical axis a list, the first row on top; ``x`` is the title of the other, ``layout`` goes to plotly.

    Rows are the categories of the traces, or with ``names`` the places 0, 1, 2 …, where marks can stand beside a row.
    """
    places = {"tickvals": list(range(len(names))), "ticktext": list(names), "range": [len(names) - 0.5, -0.5]}
    axis = {"ticks": "", "ticklabelstandoff": 4, "showgrid": False}  # names stand as far off as with a tick
    figure.update_yaxes(**axis, **(places if names else {"autorange": "reversed"}))
    figure.update_xaxes(title_text=x or None)
    return figure.update_layout(legend_traceorder="normal", **layout)  # of stacked bars plotly lists the last first


def legend_below(figure: go.Figure, px: int) -> go.Figure:
    """Put the legend at the lower edge, with so much room from there to the axis; the figure grows by it.

    In a low figure a legend that is placed from the axis would lie on the axis' title.
    """
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}
    return figure.update_layout(legend=below, margin_b=px, height=figure.layout.height + max(0, px - 60))


def over_steps(figure: go.Figure, y: str, **axis: object) -> go.Figure:
    """Name the axes of curves over steps, all of which show their value at the step that is pointed at."""
    return figure.update_layout(xaxis_title_text="step", yaxis={"title_text": y, **axis}, hovermode="x unified")


def draw_bars(
    figure: go.Figure, rows: Sequence[object], values: Sequence[float], name: str, hover: str, **options: object
) -> None:
    """Horizontal bars of one name, one in each row; ``hover`` is a bar's value in plotly's words."""
    # An empty <extra> takes away plotly's second box, which repeats the name.
    hover = f"{name}: {hover}<extra></extra>"
    figure.add_bar(x=values, y=rows, name=name, orientation="h", hovertemplate=hover, **options)


def draw_arm_axis(figure: go.Figure, arms: Sequence[str], *, margin: float = 0.6) -> None:
    """Name the arms under places 0, 1, 2 …, with so much room beside the first and the last."""
    labels = [wrap(arm_label(arm), 18) for arm in arms]
    # Places are numbers, not names, so that seeds and intervals can stand beside the middle of a bar.
    figure.update_xaxes(tickvals=list(range(len(arms))), ticktext=labels, showgrid=False, ticks="")
    figure.update_xaxes(range=[-margin, len(arms) - 1 + margin])


def running_bars(
    rows: Sequence[str], values: Sequence[float], colors: Sequence[str], shapes: Sequence[str] = (), *, hover: str
) -> go.Bar:
    """Bars below each other, each beginning where the one above ends, and a last one of the whole from zero."""
    marker = {"color": list(colors), "line": {"color": MUTED, "width": 1}}
    marker |= {"pattern": {"shape": list(shapes)}} if shapes else {}
    base = [*accumulate(values[:-2], initial=0.0), 0.0]  # the whole stands on zero, as the first part does
    return go.Bar(y=list(rows), x=list(values), base=base, orientation="h", marker=marker, hovertemplate=hover)


def error_bars(intervals: Sequence[tuple[float, float, float]], **look: object) -> dict[str, object]:
    """Bars from the low to the high end of intervals, each given as low, value and high; ``look`` goes to plotly."""
    return {
        "array": [high - value for _, value, high in intervals],
        "arrayminus": [value - low for low, value, _ in intervals],
        "symmetric": False,
        **look,
    }


def interval_marks(
    places: Sequence[object], ends: Sequence[tuple[float, float, float]], *, along: str, color: str, **options: object
) -> go.Scatter:
    """Values with their low and high ends at places on the other axis; ``along`` is the axis of the values."""
    across = "y" if along == "x" else "x"
    bars = error_bars(ends, color=color, thickness=1.5, width=5)
    marks: dict[str, object] = {along: [value for _, value, _ in ends], across: places, f"error_{along}": bars}
    return go.Scatter(**marks, mode="markers", **options)


def diamonds(x: Sequence[float | None], y: Sequence[object], **options: object) -> go.Scatter:
    """Further values over bars, such as published ones, as white diamonds."""
    marker = {"symbol": "diamond", "size": 11, "color": "white", "line": {"color": INK, "width": 2}}
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, **options)


def write_beside(figure: go.Figure, x: float, y: object, text: str, *, px: int = 0, **font: object) -> None:
    """Write a text to the right of where a bar ends, so many pixels away."""
    place = {"x": x, "y": y, "xanchor": "left", "xshift": px or None}
    figure.add_annotation(text=text, showarrow=False, font=font or None, **place)


def name_map(figure: go.Figure, title: str, x: float, y: float, *, xref: str = "x", size: int = 13) -> None:
    """Write the title of one of a figure's maps above it, from its left edge; ``y`` is a part of the plot's height."""
    corner = {"x": x, "xref": xref, "y": y, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "align": "left"}
    figure.add_annotation(text=title, showarrow=False, font={"size": size, "color": INK}, **corner)


def draw_limit(figure: go.Figure, y: float, text: str, *, color: str, width: float, margin_px: int) -> None:
    """A dashed level across the figure, named in the right margin, where no bar is."""
    figure.add_hline(y=y, line={"color": color, "width": width, "dash": "dash"})
    place = {"x": 1, "xref": "x domain", "xanchor": "left", "xshift": 6, "y": y, "align": "left"}
    figure.add_annotation(text=text, showarrow=False, font={"size": 13, "color": color}, **place)
    figure.update_layout(margin_r=margin_px)


def draw_seeds(figure: go.Figure, curves: pd.DataFrame, style: ArmStyle, *, opacity: float, **options: object) -> None:
    """Draw every seed (a column of ``curves``) thin and unsmoothed, as one trace; ``options`` go to it."""
    x, y = joined_lines(curves)
    trace = {"mode": "lines", "hoverinfo": "skip", "legendgroup": style.label, "showlegend": False}
    figure.add_trace(go.Scatter(x=x, y=y, line={"color": style.fill(opacity), "width": 1}, **(trace | options)))


def draw_mean(figure: go.Figure, mean: pd.Series[float], style: ArmStyle, **options: object) -> None:
    """Draw one bold line in the arm's colour and dash; ``options`` go to the trace."""
    trace: dict[str, object] = {"mode": "lines", "name": style.label, "legendgroup": style.label}
    # Four decimals: losses of arms differ in the third.
    trace |= {"line": style.line(), "hovertemplate": "%{y:.4f}"}
    mean = thinned(mean)
    figure.add_trace(go.Scatter(x=mean.index.to_numpy(), y=mean.to_numpy(), **(trace | options)))


def draw_band(
    figure: go.Figure, low: pd.Series[float], high: pd.Series[float], style: ArmStyle, *, opacity: float = 0.18
) -> None:
    """Fill between two curves over the same steps; where a bound is missing nothing is drawn."""
    low, high = thinned(low), thinned(high)
    steps = low.index.to_numpy()
    x, y = np.concatenate([steps, steps[::-1]]), np.concatenate([high.to_numpy(), low.to_numpy()[::-1]])
    drawn = np.isfinite(y)  # at a gap plotly would begin another shape
    band = {"fill": "toself", "fillcolor": style.fill(opacity), "mode": "lines", "line_width": 0, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(x=x[drawn], y=y[drawn], legendgroup=style.label, showlegend=False, **band))


def draw_marks(figure: go.Figure, marks: Sequence[tuple[int, float]]) -> None:
    """Mark the steps whose gradient norm was reported as NaN or Inf on the curves of their runs' loss."""
    if not marks:  # the legend does not name them then
        return
    x, y = zip(*marks[:: thinning(len(marks))], strict=True)  # a run may report NaN in every step
    look = {"symbol": "x-thin", "size": 8, "line": {"color": WARNING, "width": 1.5}}
    name = "gradient norm not finite"
    figure.add_trace(go.Scatter(x=x, y=y, mode="markers", marker=look, name=name, showlegend=True, hoverinfo="x+name"))


STAR = {"symbol": "star", "color": "black", "line": {"color": "white", "width": 1}}
"""Marker of the rank that a map is about; the size is the map's."""


def legend_entry(name: str, **look: object) -> go.Scatter:
    """A trace without points, for the legend of a figure whose marks have many looks."""
    return go.Scatter(x=[None], y=[None], name=name, hoverinfo="skip", **look)


def nothing_to_draw(finding: str, *, subtitle: str, height: int, note: str = "") -> go.Figure:
    """A figure that says in words why it is empty; arguments are those of :func:`moelab.viz.theme.new_figure`."""
    figure = new_figure(finding, subtitle=subtitle, note=note, height=height)
    return figure.update_layout(xaxis_visible=False, yaxis_visible=False)
