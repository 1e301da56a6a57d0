"""What figures of several subjects share: panels, rows of bars, legends, intervals, levels, curves over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.viz.theme import INK, MUTED, NARROW, NORMAL, WARNING, ArmStyle, new_figure

Curves = TypeVar("Curves", "pd.DataFrame", "pd.Series[float]")
POINTS_DRAWN = 600
"""Of a curve, one for every two pixels of a wide figure; a report holds dozens of curves and goes by mail."""
SEEDS_DRAWN = 100
"""Of an arm, as lines of their own; the mean and the band are of all."""
SEED_POINTS_DRAWN = 4 * POINTS_DRAWN
"""Of all seeds of an arm together."""
Look = tuple[str, str]
"""A colour and plotly's hatch, which is empty for a plain bar."""
STAR = {"symbol": "star", "color": "black", "line": {"color": "white", "width": 1}}
"""Marker of the rank that a map is about; the size is the map's."""
DIAMOND = {"symbol": "diamond", "size": 11, "color": "white", "line": {"color": INK, "width": 2}}
"""Marker of a further value over bars, such as a published one."""


def panels(
    title: str,
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
    figure = new_figure(title, subtitle=subtitle, note=note, height=height, width=width)
    # Not make_subplots, whose figure would have plotly's own template under the theme.
    figure.set_subplots(
        cols=len(titles),
        subplot_titles=list(titles),
        horizontal_spacing=spacing,
        shared_yaxes=shared,
        column_widths=widths and list(widths),
    )
    if any(titles):
        figure.update_annotations(font={"size": 13, "color": MUTED})
        # plotly gives titles of panels no room of their own: they would lie on the figure's title.
        room_px = 24 + 17 * max(0, max(text.count("<br>") for text in titles) - 1)
        figure.update_layout(margin_t=figure.layout.margin.t + room_px, height=figure.layout.height + room_px)
    return figure


def in_panel(column: int, name: str) -> dict[str, object]:
    """Where a trace goes in a figure of :func:`panels`; the legend names it once, and a click there hides it in all."""
    return {"row": 1, "col": column, "name": name, "legendgroup": name, "showlegend": column == 1}


def fill(color: str, hatch: str = "", *, edge: str = MUTED) -> dict[str, object]:
    """Marker of bars in a colour, hatched in it where there is a hatch."""
    return {"color": color, "line": {"color": edge, "width": 1}, "pattern": {"shape": hatch, "size": 5}}


def inside(texts: Sequence[str], *, anchor: str = "middle", **font: object) -> dict[str, object]:
    """Options of bars that have these texts in them, upright."""
    # plotly turns a text that is wider than its bar, and then nobody can read it.
    place = {"textposition": "inside", "insidetextanchor": anchor, "textangle": 0}
    return {"text": list(texts), "textfont": font, **place}


def bar_rows(
    title: str,
    rows: Sequence[object],
    series: Mapping[str, tuple[Sequence[float], Look]],
    axis: str,
    *,
    unit: str,
    subtitle: str,
    note: str = "",
    grouped: bool = False,
    numbers: str = "",
    errors: Mapping[str, Sequence[float]] = MappingProxyType({}),
    row_px: float = 44,
    ends: Sequence[str] = (),
    diamonds: tuple[str, Sequence[float | None]] | None = None,
    limit: float | None = None,
    width: int = NORMAL,
) -> go.Figure:
    """Horizontal bars, a row each, the first on top: stacked or in groups, named in the legend.

    Args:
        title: as of :func:`moelab.viz.theme.new_figure`.
        rows: their names; two lists of names make an axis of two levels.
        series: values of each row, with their look, by name.
        axis: title of the axis of values.
        unit: of a value in the hover, with its format: ``":.1f ms"``.
        subtitle: as of that function.
        note: as of that function.
        grouped: bars of a row below each other, not one after another.
        numbers: format of the values that stand in the bars with room for them; empty for none.
        errors: how far error bars of a series reach each way.
        row_px: height of a row.
        ends: text beside the end of each row's bars.
        diamonds: name and values of further marks, one in each row.
        limit: value of a line across all rows, which no text beside a bar may meet.
        width: of the figure.
    """
    count = max((len(values) for values, _ in series.values()), default=0)
    figure = new_figure(title, subtitle=subtitle, note=note, height=round(130 + row_px * count), width=width)
    form, _, words = unit.partition(" ")
    longest = max((sum(one) for one in zip(*(values for values, _ in series.values()), strict=True)), default=0.0)
    for name, (values, look) in series.items():
        texts = [format(value, numbers) if value > 0.03 * longest else "" for value in values] if numbers else []
        hover = f"{name}: %{{x{form}}} {words}<extra></extra>"
        bar: dict[str, object] = {"x": values, "y": rows, "name": name, "orientation": "h", "hovertemplate": hover}
        bar["error_x"] = {"array": errors[name], "color": INK, "thickness": 1.2} if errors else None
        figure.add_bar(**bar, marker=fill(*look), **(inside(texts, size=13) if numbers else {}))
    if diamonds:
        name, marks = diamonds
        hover = f"{name}: %{{x{form}}} {words}<extra></extra>"
        figure.add_scatter(x=marks, y=rows, name=name, mode="markers", marker=DIAMOND, hovertemplate=hover)
    for place, text in enumerate(ends):
        end = sum(values[place] for values, _ in series.values())
        end = max(end, (diamonds[1][place] or 0.0) if diamonds else 0.0)
        if limit is not None and end < limit < end + 0.2 * longest:
            end = limit
        write_beside(figure, end, rows[place], text, px=9)
    list_rows(figure, axis, barmode="group" if grouped else "stack", bargap=0.3)
    return legend_below(figure)


def list_rows(figure: go.Figure, x: str = "", *, names: Sequence[str] = (), **layout: object) -> go.Figure:
    """Make the vertical axis a list, the first row on top; ``x`` is the title of the other, ``layout`` goes to plotly.

    Rows are the categories of the traces, or with ``names`` the places 0, 1, 2 …, where marks can stand beside a row.
    """
    places = {"tickvals": list(range(len(names))), "ticktext": list(names), "range": [len(names) - 0.5, -0.5]}
    axis = {"ticks": "", "ticklabelstandoff": 4, "showgrid": False}  # names stand as far off as with a tick
    figure.update_yaxes(**axis, **(places if names else {"autorange": "reversed"}))
    figure.update_xaxes(title_text=x or None)
    return figure.update_layout(legend_traceorder="normal", **layout)  # of stacked bars plotly lists the last first


def legend_below(figure: go.Figure, *, axis_px: int = 58) -> go.Figure:
    """Put the legend at the lower edge, below the axis, and let the figure grow by it.

    In a low figure a legend that is placed from the axis would lie on the axis' title, for which ``axis_px`` is room.
    """
    names = dict.fromkeys(one.name for one in figure.data if one.name and one.showlegend is not False)
    lengths = [46 + 7.3 * max(map(len, name.split("<br>"))) for name in names]
    width = figure.layout.template.layout.width
    narrow = {"entrywidth": 140, "font_size": 12} if width == NARROW and max(lengths, default=0) < 205 else {}
    if narrow:
        lengths = [180.0] * len(names)
    # A legend that does not fit into a line has columns as wide as its longest name.
    lines = 1 if sum(lengths) <= width - 90 else math.ceil(len(names) / max(1, (width - 90) // max(lengths)))
    px = axis_px + (16 + 20 * lines if names else 0)
    below = {"yref": "container", "y": 0, "yanchor": "bottom", **narrow}
    return figure.update_layout(legend=below, margin_b=px, height=figure.layout.height + px - 60)


def over_steps(figure: go.Figure, y: str, **axis: object) -> go.Figure:
    """Name the axes of curves over steps, all of which show their value at the step that is pointed at."""
    return figure.update_layout(xaxis_title_text="step", yaxis={"title_text": y, **axis}, hovermode="x unified")


def error_bars(intervals: Sequence[tuple[float, float, float]], **look: object) -> dict[str, object]:
    """Bars from the low to the high end of intervals, each given as low, value and high; ``look`` goes to plotly."""
    return {
        "array": [high - value for _, value, high in intervals],
        "arrayminus": [value - low for low, value, _ in intervals],
        "symmetric": False,
        **look,
    }


def interval_marks(
    rows: Sequence[object], ends: Sequence[tuple[float, float, float]], *, color: str, **options: object
) -> go.Scatter:
    """Values with their low and high ends, one in each row."""
    bars = error_bars(ends, color=color, thickness=1.5, width=5)
    return go.Scatter(x=[value for _, value, _ in ends], y=rows, error_x=bars, mode="markers", **options)


def write_beside(figure: go.Figure, x: float, y: object, text: str, *, px: int = 0, **font: object) -> None:
    """Write a text to the right of where a bar ends, so many pixels away."""
    place = {"x": x, "y": y, "xanchor": "left", "xshift": px or None}
    figure.add_annotation(text=text, showarrow=False, font={"size": 13, **font}, **place)


def name_map(figure: go.Figure, title: str, x: float, y: float, *, yref: str = "paper", size: int = 13) -> None:
    """Write the title of one of a figure's maps above it, from its left edge; ``y`` is a part of the plot's height."""
    corner = {"x": x, "y": y, "yref": yref, "xanchor": "left", "yanchor": "bottom", "align": "left"}
    figure.add_annotation(text=title, showarrow=False, font={"size": size, "color": INK}, **corner)


def draw_limit(
    figure: go.Figure, value: float, text: str, *, along: str = "y", color: str = WARNING, margin_px: int = 90
) -> None:
    """A dashed level across the figure, named where no bar is: in the right margin, or of ``along="x"`` above."""
    line = {"color": color, "width": 1.5, "dash": "dash"}
    name = {"text": text, "showarrow": False, "font": {"size": 13, "color": color}}
    if along == "x":
        figure.add_vline(x=value, line=line)
        figure.add_annotation(**name, x=value, y=1, yref="paper", yanchor="bottom")
        return
    figure.add_hline(y=value, line=line)
    figure.add_annotation(**name, x=1, xref="x domain", xanchor="left", xshift=6, y=value, align="left")
    figure.update_layout(margin_r=margin_px)


def thinned(curves: Curves, points: int = POINTS_DRAWN) -> Curves:
    """Every nth row and the last: at most so many ``points`` and one."""
    every = thinning(len(curves), points)
    # The last row is kept, so that a curve ends where its run did.
    return pd.concat([curves.iloc[:-1:every], curves.iloc[-1:]]) if every > 1 else curves


def thinning(rows: int, points: int = POINTS_DRAWN) -> int:
    """Which of so many rows :func:`thinned` keeps: every nth, 1 for all."""
    return max(1, math.ceil(rows / points))


def drawn_seeds(seeds: int) -> range:
    """Places of the seeds that are drawn as lines of their own: all, or evenly chosen ones."""
    return range(0, seeds, max(1, math.ceil(seeds / SEEDS_DRAWN)))


def joined_lines(curves: pd.DataFrame) -> tuple[list[float], list[float]]:
    """Seeds as one line broken by NaN: one trace an arm, of :data:`SEED_POINTS_DRAWN` and a few at most."""
    x: list[float] = []
    y: list[float] = []
    curves = curves[curves.columns[list(drawn_seeds(curves.shape[1]))]]
    curves = thinned(curves, min(POINTS_DRAWN, SEED_POINTS_DRAWN // max(1, curves.shape[1])))
    for seed in curves.columns:
        values = curves[seed].dropna()
        x += [*values.index.astype(float), np.nan]  # the gap between two seeds
        y += [*values.astype(float), np.nan]
    return x, y


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


def legend_entry(name: str, **look: object) -> go.Scatter:
    """A trace without points, for the legend of a figure whose marks have many looks."""
    return go.Scatter(x=[None], y=[None], name=name, hoverinfo="skip", **look)


def nothing_to_draw(title: str, *, subtitle: str, height: int, note: str = "") -> go.Figure:
    """A figure that says in words why it is empty; arguments are those of :func:`moelab.viz.theme.new_figure`."""
    figure = new_figure(title, subtitle=subtitle, note=note, height=height)
    return figure.update_layout(xaxis_visible=False, yaxis_visible=False)
