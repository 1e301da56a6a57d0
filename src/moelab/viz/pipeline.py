"""The pipeline schedule drawn: time from left to right, a row for each pipeline rank, a bar for each piece of work."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.layout import SCHEDULES, Layout, bubble_fraction
from moelab.layout.schedule import Block, Durations, timeline
from moelab.viz.theme import INK, MUTED, new_figure

MOST_BLOCKS = 8500
"""Bars that a browser draws without a pause; of a longer step the beginning is shown."""
AROUND_PX = 190
"""Height of a one-line title, the axis and the legend."""
DIGIT_PX, NARROW_PX = 9, 640
"""Room that a digit needs, and the width of the axis in a narrow notebook."""
_KINDS = {
    "F": ("forward", "#0072B2", "white"),
    "B": ("backward", "#D55E00", "white"),
    "I": ("backward: dgrad", "#E69F00", INK),
    "W": ("backward: wgrad", "#009E73", "white"),
}
_LIGHTER = {"#0072B2": "#86BCDD", "#D55E00": "#EDA978", "#E69F00": "#F5D590", "#009E73": "#84CDB8"}
"""Of a rank's second stage: halfway to white."""


def pipeline_schedule(layout: Layout, schedule: str) -> go.Figure:
    """Forward, backward and wait of every pipeline rank over one step, as the order of the schedule makes them.

    Every stage takes equally long and communication no time, so this is a picture of the schedule, not of a run. The
    number on a bar is its micro-batch, where it fits.

    Args:
        layout: resolved degrees and micro-batches.
        schedule: a name of ``moelab.layout.SCHEDULES``.

    Returns:
        The figure; without bars where there is no pipeline.
    """
    if layout.pp == 1:
        finding = "No pipeline: every rank holds all layers"
        figure = new_figure(finding, subtitle="pp is 1, so no rank waits.", height=120)
        return figure.update_xaxes(visible=False).update_yaxes(visible=False)
    unit = [Durations(1, 1, 1)] * len(layout.stages)
    played = timeline(schedule, unit, pp=layout.pp, microbatches=layout.microbatches)
    end, count = int(max(row[-1].end for row in played)), sum(map(len, played))
    shown = end if count <= MOST_BLOCKS else end * MOST_BLOCKS // count
    turns = len(layout.stages) // layout.pp
    # Bars are numbered if the longest number fits into the shortest bar.
    numbered = shown * DIGIT_PX * len(str(layout.microbatches - 1)) <= NARROW_PX
    reading = [
        f"pp {layout.pp}, {len(layout.stages)} stages, {layout.microbatches} micro-batches",
        *(["a bar's number is its micro-batch"] if numbered else []),
        *(["lighter: the rank's second stage" + " and later" * (turns > 2)] if turns > 1 else []),
        *([f"the first {shown} of {end} units of time"] if shown < end else []),
    ]
    rows_px = layout.pp * (64 if layout.pp <= 4 else 40 if layout.pp <= 8 else 22)
    waits = bubble_fraction(SCHEDULES[schedule], pp=layout.pp, microbatches=layout.microbatches, turns=turns)
    figure = new_figure(
        f"{schedule}: each pipeline rank waits {waits:.1%} of a step",
        subtitle=f"{'; '.join(reading)}.",
        note="simulated: equal stage times, free communication",
        height=AROUND_PX + rows_px,
    )
    blocks = [(rank, block) for rank, row in enumerate(played) for block in row if block.start < shown]
    for kind in _KINDS:
        for turn in range(turns):
            work = [
                (rank, block)
                for rank, block in blocks
                if (block.action.kind, layout.stages_of_rank[rank].index(block.action.stage)) == (kind, turn)
            ]
            if work:
                figure.add_trace(_work_bars(work, kind, turn, numbered=numbered))
    idle = [
        (rank, start, min(stop, shown))
        for rank, row in enumerate(played)
        for start, stop in _waits(row, end)
        if start < shown
    ]
    figure.add_bar(
        base=[start for _, start, _ in idle],
        x=[stop - start for _, start, stop in idle],
        y=[rank for rank, _, _ in idle],
        orientation="h",
        width=0.86,
        marker={"color": "white", "line_width": 0},
        marker_pattern={"shape": "/", "fgcolor": MUTED, "bgcolor": "#f4f5f7", "size": 6, "solidity": 0.2},
        hovertemplate="waits %{x} units<extra>rank %{y}</extra>",
        name="wait (bubble)",
    )
    every = 1 if layout.pp <= 16 else 4
    figure.update_layout(barmode="overlay", hovermode="closest", legend={"traceorder": "normal", "y": -58 / rows_px})
    figure.update_xaxes(title_text="time (units of one forward of one stage)", range=[0, shown], showgrid=False)
    figure.update_yaxes(title_text="pipeline rank", tickvals=list(range(0, layout.pp, every)), ticklabelstandoff=6)
    return figure.update_yaxes(range=[layout.pp - 0.5, -0.5], showgrid=False, ticks="")


def _waits(row: Sequence[Block], end: int) -> list[tuple[float, float]]:
    """Start and end of every idle stretch of a rank."""
    edges = [0, *(edge for block in row for edge in (block.start, block.end)), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]


def _work_bars(work: Sequence[tuple[int, Block]], kind: str, turn: int, *, numbered: bool) -> go.Bar:
    """Blocks by rank: all of one kind, on one of their ranks' stages."""
    name, color, ink = _KINDS[kind]
    return go.Bar(
        base=[block.start for _, block in work],
        x=[block.end - block.start for _, block in work],
        y=[rank for rank, _ in work],
        orientation="h",
        width=0.86,
        marker={"color": _LIGHTER[color] if turn else color, "line": {"color": "white", "width": 0.5}},
        text=[str(block.action.microbatch) for _, block in work] if numbered else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": INK if turn else ink, "size": 12},
        customdata=[[block.action.stage, block.action.microbatch] for _, block in work],
        hovertemplate=f"{name}, stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}<extra>rank %{{y}}</extra>",
        name=name if turn == 0 else f"{name}, stage {turn + 1} of the rank",
        showlegend=turn == 0,
    )
