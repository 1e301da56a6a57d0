"""The validation table drawn: errors of all predictions, a strip for each source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.judge.arms import arm_label
from moelab.judge.two_by_two import CODE, FUSED
from moelab.planning.tables import GAIN, ValidationRow, coverage, median_error, timed
from moelab.viz.draw import list_rows
from moelab.viz.theme import INK, MUTED, WARNING, WIDE, new_figure, plot_text, wrap
from moelab.viz.traffic import ROUTING_LABELS

LOOKS = {
    "blind": ("#009E73", "diamond"),
    "seen while the model was made": ("#0072B2", "circle"),
    "a constant was fitted on it": (MUTED, "circle-open"),
    "measured outside of the 90 % interval": (WARNING, "x"),
}
STRIP_PX, NAME_CHARACTERS = 58, 44
"""Height of a strip, and letters of a line that fit into half of its width."""


def row_words(name: str) -> str:
    """A row's name with its arm and its routing in words.

    Example:
        >>> row_words("two by two: 671B fp8_deepep_dispatch-fp8, round_robin")
        '671B, FP8 + DeepEP (dispatch FP8), forced round-robin'
    """
    for kind, label in ROUTING_LABELS.items():
        name = name.replace(kind, label)
    name = name.removeprefix("two by two: ").replace("mxfp8 emulated_", "mxfp8-emulated_")
    name = re.sub(r",? (\S+_(?:standard|deepep|hybridep)[^\s,]*)", _arm_words, name)
    words = {"DSv3": "DeepSeek-V3", "deepep": "DeepEP", "bf16": "BF16", "fp8": "FP8", "_": " ", CODE: FUSED}
    for raw, word in words.items():
        name = name.replace(raw, word)
    return name


def _arm_words(arm: re.Match[str]) -> str:
    emulated = " (emulated)" if "-emulated" in arm[1] else ""
    return f", {arm_label(arm[1].replace('-emulated', ''))}{emulated}"


def step_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of whole steps."""
    steps = [row for row in rows if row.of == "step"]
    others = [row for row in timed(steps) if row.public and row.kind != "fitted"]
    finding = (
        f"Steps of others: median error {median_error(others):.0f} %, {coverage(others):.0f} % of {len(others)} in "
        "their 90 % interval"
    )
    return _strips(finding, steps, "Whole steps.")


def part_strips(rows: Sequence[ValidationRow]) -> go.Figure:
    """Errors of the parts of a step that were measured alone, and of memory."""
    parts = [row for row in rows if row.of != "step"]
    seen = [row for row in parts if row.kind != "fitted"]
    finding = f"Parts of a step and memory: half of {len(seen)} predictions are within {median_error(seen):.0f} %"
    return _strips(finding, parts, "Kernels, casts, MoE layers and exchanges alone, and memory of whole steps.")


def _look(row: ValidationRow) -> str:
    if row.interval and not row.inside:
        return "measured outside of the 90 % interval"
    return {"blind": "blind", "seen": "seen while the model was made"}.get(row.kind, "a constant was fitted on it")


def _strips(finding: str, rows: Sequence[ValidationRow], what: str) -> go.Figure:
    strips = list(dict.fromkeys((row.source, row.of == "memory") for row in rows))
    # Errors of memory and of time are of unlike size, so a source may have a strip of each.
    of_strip = [[row for row in rows if (row.source, row.of == "memory") == strip] for strip in strips]
    figure = new_figure(
        finding,
        subtitle=f"{what} Error of every row of the validation table, n = {len(rows)}. Named: the worst of a strip.",
        note="derived, against measured and quoted figures",
        height=170 + STRIP_PX * len(strips),
        width=WIDE,
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
                customdata=[
                    [plot_text(row_words(row.name)), row.measured, row.predicted, row.unit] for _, row in shown
                ],
                hovertemplate="%{customdata[0]}: measured %{customdata[1]:,.1f}, predicted %{customdata[2]:,.1f} "
                "%{customdata[3]}, error %{x:+.1f}<extra></extra>",
            )
    low, high = min(row.error for row in rows), max(row.error for row in rows)
    for place, strip in enumerate(of_strip):
        # The worst row is named above its point, towards the middle of the figure, where there is room.
        worst = max(strip, key=lambda row: abs(row.error))
        side = "left" if worst.error < (low + high) / 2 else "right"
        text = wrap(f"{worst.error:+.1f}: {row_words(worst.name)}", NAME_CHARACTERS)
        above = {"x": worst.error, "y": place, "yshift": 7, "xanchor": side, "yanchor": "bottom", "align": side}
        figure.add_annotation(text=text, showarrow=False, font={"size": 11, "color": MUTED}, **above)
    names = [f"{source}, memory" if memory else source for source, memory in strips]
    labels = [f"{wrap(name, 30)}<br>n = {len(strip)}" for name, strip in zip(names, of_strip, strict=True)]
    unit = "error of the prediction (%; of gains, points)" if any(row.unit == GAIN for row in rows) else "error (%)"
    # The legend stands 66 px under the axis, which plotly counts in heights of the plot.
    list_rows(figure, unit, names=labels, legend_y=-66 / (40 + STRIP_PX * len(strips)))
    figure.update_yaxes(range=[len(strips) - 0.4, -0.6])  # a name stands above its point
    margin = 0.06 * (high - low)
    return figure.update_xaxes(zeroline=True, zerolinecolor=INK, range=[low - margin, high + margin])
