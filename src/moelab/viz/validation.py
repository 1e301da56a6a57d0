"""The validation table drawn: errors of all predictions, a strip for each source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.judge.arms import arm_label
from moelab.judge.two_by_two import CODE, FUSED
from moelab.planning.tables import GAIN, ValidationRow
from moelab.viz.draw import legend_below, list_rows
from moelab.viz.theme import INK, MUTED, WARNING, WIDE, new_figure, plot_text, wrap
from moelab.viz.traffic import ROUTING_LABELS

_KINDS = {
    "blind": ("blind", "#009E73", "diamond"),
    "seen": ("seen while the model was made", "#0072B2", "circle"),
    "fitted": ("a constant was fitted on it", MUTED, "circle-open"),
    "outside": ("measured outside of the 90 % interval", WARNING, "x"),
}


def row_words(name: str) -> str:
    """A row's name with its arm and its routing in words.

    Example:
        >>> row_words("two by two: 671B fp8_deepep_dispatch-fp8, round_robin")
        '671B, FP8 + DeepEP (dispatch FP8), forced round-robin'
    """

    def in_words(arm: re.Match[str]) -> str:
        emulated = " (emulated)" if "-emulated" in arm[1] else ""
        return f", {arm_label(arm[1].replace('-emulated', ''))}{emulated}"

    for kind, label in ROUTING_LABELS.items():
        name = name.replace(kind, label)
    name = name.removeprefix("two by two: ").replace("mxfp8 emulated_", "mxfp8-emulated_")
    name = re.sub(r",? (\S+_(?:standard|deepep|hybridep)[^\s,]*)", in_words, name)
    words = {"DSv3": "DeepSeek-V3", "deepep": "DeepEP", "bf16": "BF16", "fp8": "FP8", "_": " ", CODE: FUSED}
    for raw, word in words.items():
        name = name.replace(raw, word)
    return name


def error_strips(rows: Sequence[ValidationRow], what: str) -> go.Figure:
    """Errors of rows of the validation table, which are ``what``, by source; the worst of each strip is named."""
    # Errors of memory and of time are of unlike size, so a source may have a strip of each.
    strips: dict[str, list[ValidationRow]] = {}
    for row in rows:
        strips.setdefault(f"{row.source}{', memory' * (row.of == 'memory')}", []).append(row)
    figure = new_figure(
        f"Errors of the predictions: {what}",
        subtitle=f"Every row of the validation table, n = {len(rows)}. Named: the worst of a strip.",
        note="derived, against measured and quoted figures",
        height=120 + 58 * len(strips),
        width=WIDE,
    )
    for kind, (name, color, symbol) in _KINDS.items():
        shown = [
            (place, row)
            for place, strip in enumerate(strips.values())
            for row in strip
            if kind == ("outside" if row.interval and not row.inside else row.kind)
        ]
        figure.add_scatter(
            x=[row.error for _, row in shown],
            y=[place for place, _ in shown],
            mode="markers",
            name=f"{name} ({len(shown)})",
            marker={"color": color, "symbol": symbol, "size": 9, "opacity": 0.8, "line": {"width": 1.5}},
            customdata=[[plot_text(row_words(row.name)), row.measured, row.predicted, row.unit] for _, row in shown],
            hovertemplate="%{customdata[0]}: measured %{customdata[1]:,.1f}, predicted %{customdata[2]:,.1f} "
            "%{customdata[3]}, error %{x:+.1f}<extra></extra>",
        )
    low, high = min(row.error for row in rows), max(row.error for row in rows)
    for place, strip in enumerate(strips.values()):
        # The worst row is named above its point, towards the middle of the figure, where there is room.
        worst = max(strip, key=lambda row: abs(row.error))
        side = "left" if worst.error < (low + high) / 2 else "right"
        text = plot_text(f"{worst.error:+.1f}: {row_words(worst.name)}")
        above = {"x": worst.error, "y": place, "yshift": 7, "xanchor": side, "yanchor": "bottom", "align": side}
        figure.add_annotation(text=text, showarrow=False, font={"size": 11, "color": MUTED}, **above)
    unit = "error of the prediction (%; of gains, points)" if any(row.unit == GAIN for row in rows) else "error (%)"
    list_rows(figure, unit, names=[f"{wrap(name, 30)}<br>n = {len(strip)}" for name, strip in strips.items()])
    figure.update_yaxes(range=[len(strips) - 0.4, -0.6])  # a name stands above its point
    margin = 0.06 * (high - low)
    figure.update_xaxes(zeroline=True, zerolinecolor=INK, range=[low - margin, high + margin])
    return legend_below(figure)
