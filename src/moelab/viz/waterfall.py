"""From 918 to 3,328 tokens/s on the same GPUs: one change of software after another."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.projection.megatron import Change
from moelab.viz.theme import INK, MUTED, new_figure, wrap

UP, DOWN, WHOLE = "#009E73", "#D55E00", "#dfe3e8"


def waterfall_bars(changes: Sequence[Change], *, quoted_first: float, quoted_last: float) -> go.Figure:
    """What each change adds, in the order in which they are listed.

    Args:
        changes: of :func:`moelab.projection.megatron.waterfall`.
        quoted_first: published tokens/s per GPU of the first.
        quoted_last: published tokens/s per GPU of the last.
    """
    before = [0.0, *(change.tps for change in changes[:-1])]
    steps = [change.tps - start for change, start in zip(changes, before, strict=True)]
    most = max(range(1, len(steps)), key=steps.__getitem__)
    figure = new_figure(
        f"The largest of {len(steps) - 1} steps from {changes[0].tps:,.0f} to {changes[-1].tps:,.0f}: "
        f"{changes[most].name} ({steps[most]:+,.0f})",
        subtitle=f"256 × B200, MXFP8, tokens/s per GPU, one change after another; another order would share the total "
        f"out differently. Diamonds: quoted, {quoted_first:,.0f} (PyTorch and Nebius) and {quoted_last:,.0f} "
        "(Megatron-Bridge 26.04.01).",
        note="derived between two quoted ends",
        height=150 + 44 * (len(changes) + 1),
    )
    labels = ["<br>".join(wrap(change.name, 34)) for change in changes]
    rows = [*labels, "Megatron-Bridge, whole"]
    heights = [*steps, changes[-1].tps]
    figure.add_trace(
        go.Bar(
            y=rows,
            x=heights,
            base=[*before, 0.0],
            orientation="h",
            marker={
                "color": [WHOLE, *(UP if step >= 0 else DOWN for step in steps[1:]), WHOLE],
                "line": {"color": MUTED, "width": 1},
                "pattern": {"shape": ["", *("" if step >= 0 else "/" for step in steps[1:]), ""]},
            },
            hovertemplate="%{y}: %{x:+,.0f}<extra></extra>",
        )
    )
    diamonds = {rows[0]: quoted_first, rows[-1]: quoted_last}  # a label stands beyond its row's
    for row, start, height in zip(rows, [*before, 0.0], heights, strict=True):
        text = f"{height:,.0f}" if row in (rows[0], rows[-1]) else f"{height:+,.0f}"
        end = max(start, start + height, diamonds.get(row, 0.0))
        figure.add_annotation(x=end, y=row, text=text, showarrow=False, xanchor="left", xshift=8, font_size=12)
    figure.add_trace(
        go.Scatter(
            x=list(diamonds.values()),
            y=list(diamonds),
            mode="markers",
            marker={"symbol": "diamond", "size": 11, "color": "white", "line": {"color": INK, "width": 2}},
            hovertemplate="quoted: %{x:,.0f}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False, tickfont_size=12)
    figure.update_xaxes(title_text="tokens/s per GPU", range=[0, 1.12 * max(quoted_last, *(c.tps for c in changes))])
    return figure.update_layout(showlegend=False, bargap=0.3, hovermode="closest")
