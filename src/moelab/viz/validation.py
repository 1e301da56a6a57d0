"""The validation table drawn: errors of all predictions, a strip for each source."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.projection.validation import GAIN, ValidationRow, coverage, median_error, timed
from moelab.viz.theme import INK, MUTED, WARNING, new_figure, plot_text, wrap

LOOKS = {
    "blind": ("#009E73", "diamond"),
    "seen while the model was made": ("#0072B2", "circle"),
    "a constant was fitted on it": (MUTED, "circle-open"),
    "measured outside of the 90 % interval": (WARNING, "x"),
}
STRIP_PX = 58


def step_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of whole steps.

    Args:
        rows: of :func:`moelab.projection.validation.validation_table`.
    """
    steps = [row for row in rows if row.of == "step"]
    others = [row for row in timed(steps) if row.public and row.kind != "fitted"]
    finding = (
        f"Steps of others: median error {median_error(others):.0f} %, {coverage(others):.0f} % of {len(others)} in "
        "their 90 % interval"
    )
    return _strips(finding, steps, "Whole steps.")


def part_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of the parts of a step that were measured alone, and of memory.

    Args:
        rows: of :func:`moelab.projection.validation.validation_table`.
    """
    parts = [row for row in rows if row.of != "step"]
    seen = [row for row in parts if row.kind != "fitted"]
    finding = f"Parts of a step and memory: half of {len(seen)} predictions are within {median_error(seen):.0f} %"
    return _strips(finding, parts, "Kernels, casts, MoE layers and exchanges alone, and memory of whole steps.")


def _look(row: ValidationRow) -> str:
    if row.interval and not row.inside:
        return "measured outside of the 90 % interval"
    return {"blind": "blind", "seen": "seen while the model was made"}.get(row.kind, "a constant was fitted on it")


def _strips(finding: str, rows: Sequence[ValidationRow], words: str) -> go.Figure:
    strips = list(dict.fromkeys((row.source, row.of == "memory") for row in rows))
    of_strip = [[row for row in rows if (row.source, row.of == "memory") == strip] for strip in strips]
    figure = new_figure(
        finding,
        subtitle=f"{words} Error of every row of the validation table, n = {len(rows)}. Named: the worst of a strip.",
        note="derived, against measured and quoted figures",
        height=170 + STRIP_PX * len(strips),
    )
    for look, (color, symbol) in LOOKS.items():
        shown = [(place, row) for place, strip in enumerate(of_strip) for row in strip if _look(row) == look]
        if shown:
            figure.add_scatter(
                x=[row.error for _, row in shown],
                y=[place for place, _ in shown],
                mode="markers",
                name=look,
                marker={"color": color, "symbol": symbol, "size": 9, "opacity": 0.8, "line": {"width": 1.5}},
                customdata=[[plot_text(row.name), row.measured, row.predicted, row.unit] for _, row in shown],
                hovertemplate="%{customdata[0]}: measured %{customdata[1]:,.1f}, predicted %{customdata[2]:,.1f} "
                "%{customdata[3]}, error %{x:+.1f}<extra></extra>",
            )
    low, high = min(row.error for row in rows), max(row.error for row in rows)
    third = (high - low) / 3
    for place, strip in enumerate(of_strip):
        # The worst row is named above its point, on the side where there is room.
        worst = max(strip, key=lambda row: abs(row.error))
        side = "left" if worst.error < low + third else "right" if worst.error > high - third else "center"
        text = f"{worst.error:+.1f}: {plot_text(worst.name.removeprefix('two by two: '))}"
        font, above = {"size": 11, "color": MUTED}, {"x": worst.error, "y": place, "yshift": 18, "xanchor": side}
        figure.add_annotation(text=text, showarrow=False, font=font, **above)
    names = [f"{source}, memory" if memory else source for source, memory in strips]
    labels = ["<br>".join([*wrap(name, 30), f"n = {len(strip)}"]) for name, strip in zip(names, of_strip, strict=True)]
    figure.update_yaxes(tickvals=list(range(len(strips))), ticktext=labels, ticks="", showgrid=False)
    figure.update_yaxes(range=[len(strips) - 0.4, -0.6])
    unit = "error of the prediction (%; of gains, points)" if any(row.unit == GAIN for row in rows) else "error (%)"
    figure.update_xaxes(title_text=unit, zeroline=True, zerolinecolor=INK)
    figure.update_xaxes(range=[low - 0.06 * (high - low), high + 0.06 * (high - low)])
    # The legend stands 66 px under the axis, which plotly counts in heights of the plot.
    return figure.update_layout(hovermode="closest", legend_y=-66 / (40 + STRIP_PX * len(strips)))
