"""Memory per GPU drawn: a bar for each pipeline rank, stacked by what holds it, under the line of what the GPU has.

Colours say what kind of thing it is: blue and green for weights and what the optimizer needs, warm colours for what
depends on the batch, grey for what the machinery takes. Hatched parts are gathered: weights and gradients, whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moelab.hardware import Gpu
from moelab.layout import Layout
from moelab.memory import PARTS, MemoryEstimate, StageMemory
from moelab.viz.theme import INK, WARNING, new_figure

SMALLEST_GIB = 0.05
"""A part that is smaller on every rank is left out of the figure, not of the totals."""
_LOOKS = {
    "parameters": ("#0072B2", ""),
    "optimizer states": ("#56B4E9", ""),
    "gradients": ("#009E73", ""),
    "gathered parameters": ("#0072B2", "/"),
    "gathered gradients": ("#009E73", "/"),
    "activations": ("#D55E00", ""),
    "working set": ("#E69F00", ""),
    "quantised copies": ("#CC79A7", ""),
    "loss": ("#F0E442", ""),
    "communication buffers": ("#5f6b7a", ""),
    "fragmentation": ("#a9b2bd", ""),
    "dispatch buffers": ("#5f6b7a", "x"),
    "CUDA and NCCL": ("#d3d8de", ""),
}


def memory_bars(memory: MemoryEstimate, layout: Layout, gpu: Gpu) -> go.Figure:
    """Predicted memory of one GPU of each pipeline rank, by part, against what the GPU has.

    Args:
        memory: prediction for the layout.
        layout: resolved degrees; gives each pipeline rank its layers.
        gpu: the GPU that ``memory`` was predicted for; named at the line.

    Returns:
        The figure.
    """
    figure = new_figure(_finding(memory, gpu), subtitle=_reading(memory), note="predicted, not measured", height=540)
    stages = memory.by_stage
    for part in PARTS:
        values = [stage.parts[part] for stage in stages]
        if max(values) >= SMALLEST_GIB:
            figure.add_trace(_bars(part, values))
    _draw_totals(figure, stages)
    _draw_capacity(figure, memory, gpu)
    figure.update_layout(barmode="stack", hovermode="x", legend={"traceorder": "normal", "y": -0.22})
    figure.update_xaxes(title_text="pipeline rank", tickvals=list(range(len(stages))), ticktext=_names(layout))
    figure.update_xaxes(range=[-0.5, len(stages) - 0.5] if len(stages) > 1 else [-1.5, 1.5], showgrid=False, ticks="")
    figure.update_yaxes(title_text="memory per GPU (GiB)", range=[0, 1.12 * max(memory.worst_gib, memory.capacity_gib)])
    return figure


def _finding(memory: MemoryEstimate, gpu: Gpu) -> str:
    rank = f"pipeline rank {memory.worst.rank}" if len(memory.by_stage) > 1 else "each rank"
    if gpu.memory_gib is None:
        return f"{rank.capitalize()} needs {memory.worst_gib:.1f} GiB; what a {gpu.name} has is not known"
    need = f"needs {memory.worst_gib:.1f} of {memory.capacity_gib:.1f} GiB of a {gpu.name}"
    return f"{'Fits' if memory.fits else 'Does not fit'}: {rank} {need}"


def _reading(memory: MemoryEstimate) -> str:
    return f"Fullest moment: {memory.worst.moment}. Largest part: {memory.dominant}."


def _bars(part: str, values: Sequence[float]) -> go.Bar:
    color, pattern = _LOOKS[part]
    hatch = {"shape": pattern, "fgcolor": color, "bgcolor": "white", "size": 7, "solidity": 0.45}
    return go.Bar(
        x=list(range(len(values))),
        y=list(values),
        width=0.4 if len(values) <= 4 else 0.7,
        name=part,
        marker={"color": color, "line": {"color": "white", "width": 0.5}},
        marker_pattern=hatch if pattern else None,
        hovertemplate=f"{part}: %{{y:.1f}} GiB<extra></extra>",
    )


def _draw_totals(figure: go.Figure, stages: Sequence[StageMemory]) -> None:
    """The sum above each bar, readable on the line of the capacity too; left out where bars are narrow."""
    if len(stages) > 16:
        return
    for place, stage in enumerate(stages):
        figure.add_annotation(
            text=f"<b>{stage.total_gib:.{1 if len(stages) <= 8 else 0}f}</b>",
            x=place,
            y=stage.total_gib,
            yanchor="bottom",
            yshift=2,
            showarrow=False,
            borderpad=1,
            bgcolor="white",
            font={"size": 14 if len(stages) <= 8 else 11},
        )


def _draw_capacity(figure: go.Figure, memory: MemoryEstimate, gpu: Gpu) -> None:
    """The line, named in the margin, where no bar is; none where the capacity is not known."""
    if gpu.memory_gib is None:
        return
    color = INK if memory.fits else WARNING
    figure.add_hline(y=memory.capacity_gib, line={"color": color, "width": 2, "dash": "dash"})
    figure.add_annotation(
        text=f"{gpu.name}<br>{memory.capacity_gib:.1f} GiB",
        x=1,
        xref="x domain",
        xanchor="left",
        xshift=6,
        y=memory.capacity_gib,
        align="left",
        showarrow=False,
        font={"size": 13, "color": color},
    )
    figure.update_layout(margin_r=86)


def _names(layout: Layout) -> list[str]:
    """Names under the bars: the rank and, where there is room, its layers."""
    if layout.pp > 8:
        return [str(rank) if rank % (1 if layout.pp <= 16 else 2) == 0 else "" for rank in range(layout.pp)]
    counts = [
        sum(name.startswith("layers.") for stage in stages for name in layout.stages[stage])
        for stages in layout.stages_of_rank
    ]
    return [f"{rank}<br>{count} layers" for rank, count in enumerate(counts)]
