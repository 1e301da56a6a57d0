"""The validation table drawn: errors of all predictions, with the bands of the goals that were set before."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from moelab.projection.validation import GOALS, Goal, ValidationRow, goals
from moelab.viz.theme import INK, MUTED, WARNING, new_figure, plot_text, wrap

BAND = "rgba(0,158,115,0.16)"
LOOKS = {
    "predicted": ("#0072B2", "circle"),
    "predicted, goal missed": (WARNING, "x"),
    "constant read off it": ("#56B4E9", "diamond-open"),
    "fitted": (MUTED, "circle-open"),
}
STRIP_PX = 62
COLUMNS = 110
"""Width of printed lines; a notebook page of 1280 pixels breaks longer ones inside words."""
GAIN = "% gain"
"""Unit of rows whose error is in percentage points."""


class Strip(NamedTuple):
    """Rows that are drawn in one line; ``limit`` is the goal's, in percent or points."""

    name: str
    rows: Sequence[ValidationRow]
    limit: float | None = None


def goal_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of whole steps, a strip for each goal with its band, and one for rows that no goal is about.

    Args:
        rows: of :func:`moelab.projection.validation.validation_table`.
    """
    whole = [row for row in rows if row.whole]
    strips = []
    for name, source, prefix, limit, _ in GOALS:
        inside = [row for row in whole if row.source == source and row.name.startswith(prefix)]
        strips.append(Strip(name, inside, limit if inside[0].unit == GAIN else 100 * limit))
    covered = {id(row) for strip in strips for row in strip.rows}
    strips.append(Strip("no goal was set", [row for row in whole if id(row) not in covered]))
    judged = goals(rows)
    met = sum(goal.met for goal in judged)
    missed = f", {len(judged) - met} missed" if met < len(judged) else ""
    finding = f"{met} of {len(judged)} goals are met{missed}"
    return _strips(finding, strips, words="Whole steps. Green: the goal.")


def part_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of the parts of a step that were measured alone, a strip for each source.

    Args:
        rows: of :func:`moelab.projection.validation.validation_table`.
    """
    parts = [row for row in rows if not row.whole]
    sources = dict.fromkeys(row.source for row in parts)
    strips = [Strip(source, [row for row in parts if row.source == source]) for source in sources]
    new = sorted(abs(percent_error(row)) for row in parts if row.use == "predicted")
    finding = f"Parts of a step: half of {len(new)} predictions are within {new[len(new) // 2]:.0f} %"
    return _strips(finding, strips, words="Kernels, casts, MoE layers and exchanges alone.")


def percent_error(row: ValidationRow) -> float:
    """Error of a row in percent; of gains, in percentage points."""
    return row.error if row.unit == GAIN else 100 * row.error


def validation_lines(rows: Sequence[ValidationRow]) -> list[str]:
    """Rows as text, one line each: measured, predicted, error, whether a constant had seen the row."""
    lines = [f"{'row':64} {'measured':>10} {'predicted':>10} {'error':>9}  use"]
    for row in rows:
        unit = "pt" if row.unit == GAIN else "%"
        error = f"{percent_error(row):+.1f} {unit}"
        name, use = row.name.replace("two by two", "2×2"), row.use.removeprefix("constant ")
        lines.append(f"{name[:64]:64} {row.measured:10,.1f} {row.predicted:10,.1f} {error:>9}  {use}")
    return lines


def goal_lines(judged: Sequence[Goal]) -> list[str]:
    """Each goal with its answer, and the reason that is known for one that was missed."""
    lines = []
    for goal in judged:
        worst = f"{goal.worst:+.1f} points" if "points" in goal.name else f"{goal.worst:+.1%}"
        answer = "met" if goal.met else "MISSED"
        reason = f": {goal.reason}" if goal.reason and not goal.met else ""
        seen = f" (seen, not judged: {goal.seen})" if goal.seen else ""
        text = f"{answer}: {goal.name}; worst {worst} of {goal.predicted} predictions{seen}, {goal.at}{reason}"
        lines.append("\n  ".join(textwrap.wrap(text, COLUMNS - 2, break_on_hyphens=False)))
    return lines


def _strips(finding: str, strips: Sequence[Strip], *, words: str) -> go.Figure:
    points = [(percent_error(row), place, row) for place, strip in enumerate(strips) for row in strip.rows]
    unseen = sum(row.use == "predicted" for _, _, row in points)
    figure = new_figure(
        finding,
        subtitle=f"{words} Error of every row of the validation table: n = {len(points)} rows, {unseen} of them "
        "predictions that no constant had seen. Named: the worst of a strip.",
        note="derived, against measured and quoted figures",
        height=170 + STRIP_PX * len(strips),
    )
    uses: dict[str, list[tuple[float, int, ValidationRow]]] = {use: [] for use in LOOKS}
    for error, place, row in points:
        limit = strips[place].limit
        missed = row.use == "predicted" and limit is not None and abs(error) > limit
        uses["predicted, goal missed" if missed else row.use].append((error, place, row))
    for use, shown in uses.items():
        color, symbol = LOOKS[use]
        if shown:
            figure.add_scatter(
                x=[error for error, _, _ in shown],
                y=[place for _, place, _ in shown],
                mode="markers",
                name=use,
                marker={"color": color, "symbol": symbol, "size": 9, "opacity": 0.8, "line": {"width": 1.5}},
                customdata=[[plot_text(row.name), row.measured, row.predicted, row.unit] for _, _, row in shown],
                hovertemplate="%{customdata[0]}: measured %{customdata[1]:,.1f}, predicted %{customdata[2]:,.1f} "
                "%{customdata[3]}, error %{x:+.1f}<extra></extra>",
            )
    low, high = min(error for error, _, _ in points), max(error for error, _, _ in points)
    third = (high - low) / 3
    for place, strip in enumerate(strips):
        if strip.limit is not None:
            box = {"x0": -strip.limit, "x1": strip.limit, "y0": place - 0.36, "y1": place + 0.36}
            figure.add_shape(type="rect", fillcolor=BAND, line_width=0, layer="below", **box)
        # The worst row is named above its point, on the side where there is room.
        worst = max(strip.rows, key=lambda row: abs(percent_error(row)))
        error, name = percent_error(worst), plot_text(worst.name.removeprefix("two by two: "))
        side = "left" if error < low + third else "right" if error > high - third else "center"
        font, above = {"size": 11, "color": MUTED}, {"x": error, "y": place, "yshift": 18, "xanchor": side}
        figure.add_annotation(text=f"{error:+.1f}: {name}", showarrow=False, font=font, **above)
    labels = ["<br>".join([*wrap(strip.name, 30), f"n = {len(strip.rows)}"]) for strip in strips]
    figure.update_yaxes(tickvals=list(range(len(strips))), ticktext=labels, ticks="", showgrid=False)
    figure.update_yaxes(range=[len(strips) - 0.4, -0.6])
    figure.update_xaxes(title_text="error of the prediction (%; of gains, points)", zeroline=True)
    figure.update_xaxes(range=[low - 0.06 * (high - low), high + 0.06 * (high - low)], zerolinecolor=INK)
    # The legend stands 66 px under the axis, which plotly counts in heights of the plot.
    return figure.update_layout(hovermode="closest", legend_y=-66 / (40 + STRIP_PX * len(strips)))
