"""A layout drawn: memory per GPU by pipeline rank under the line of what the GPU has, and the layout explorer.

Colours say what kind of thing it is: blue and green for weights and what the optimizer needs, warm colours for what
depends on the batch, grey for what the machinery takes. Hatched parts are gathered: weights and gradients, whole.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from moelab.experiment import Experiment
from moelab.hardware import Gpu, gpu_of
from moelab.layout import Layout, check, facts_of
from moelab.layout.mesh import nvlink_ranks
from moelab.layout.rules import candidates
from moelab.memory import PARTS, MemoryEstimate, estimate
from moelab.viz.draw import draw_limit
from moelab.viz.mesh import mesh_map
from moelab.viz.pipeline import pipeline_schedule
from moelab.viz.theme import INK, WARNING, new_figure
from moelab.viz.widget import Explorer, refusal

if TYPE_CHECKING:
    import ipywidgets

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
    """
    reading = f"Fullest moment: {memory.worst.moment}. Largest part: {memory.dominant}."
    figure = new_figure(_finding(memory, gpu), subtitle=reading, note="predicted, not measured", height=540)
    stages = memory.by_stage
    for part in PARTS:
        values = [stage.parts[part] for stage in stages]
        if max(values) < SMALLEST_GIB:
            continue
        color, shape = _LOOKS[part]
        hatch = {"shape": shape, "fgcolor": color, "bgcolor": "white", "size": 7, "solidity": 0.45}
        figure.add_bar(
            x=list(range(len(stages))),
            y=values,
            width=0.4 if len(stages) <= 4 else 0.7,
            name=part,
            marker={"color": color, "line": {"color": "white", "width": 0.5}},
            marker_pattern=hatch if shape else None,
            hovertemplate=f"{part}: %{{y:.1f}} GiB<extra></extra>",
        )
    # The sum above each bar is readable on the line of the capacity too; there is no room for it above narrow bars.
    for place, stage in enumerate(stages if len(stages) <= 16 else ()):
        wide = len(stages) <= 8
        text, font = f"<b>{stage.total_gib:.{1 if wide else 0}f}</b>", {"size": 14 if wide else 11}
        above = {"x": place, "y": stage.total_gib, "yanchor": "bottom", "yshift": 2, "borderpad": 1}
        figure.add_annotation(text=text, font=font, showarrow=False, bgcolor="white", **above)
    if gpu.memory_gib is not None:
        text, color = f"{gpu.name}<br>{memory.capacity_gib:.1f} GiB", INK if memory.fits else WARNING
        draw_limit(figure, memory.capacity_gib, text, color=color, width=2, margin_px=86)
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


def _names(layout: Layout) -> list[str]:
    """Names under the bars: the rank and, where there is room, its layers."""
    if layout.pp > 8:
        return [str(rank) if rank % (1 if layout.pp <= 16 else 2) == 0 else "" for rank in range(layout.pp)]
    counts = [
        sum(name.startswith("layers.") for stage in stages for name in layout.stages[stage])
        for stages in layout.stages_of_rank
    ]
    return [f"{rank}<br>{count} layers" for rank, count in enumerate(counts)]


CHOSEN = (
    "nodes",
    "pp",
    "pp_schedule",
    "local_batch",
    "microbatch",
    "dp_replicate",
    "cp",
    "tp",
    "ep",
    "precision",
    "ep_backend",
    "activation_checkpoint",
)
"""Fields of an experiment that have a control; ``dp_shard`` takes the ranks that are left."""
_POWERS = tuple(2**exponent for exponent in range(9))


class LayoutExplorer(Explorer):
    """Degrees as controls; below them the verdict and three figures, which follow every change.

    A menu says which of its values would be illegal while the other controls stay as they are; they can be chosen, and
    the verdict then says why.

    Args:
        experiment: where the controls begin; what has no control stays as it is here.
        rank: global rank whose groups the mesh shows first.

    Attributes:
        experiment: as the controls stand now.
    """

    def __init__(self, experiment: Experiment, *, rank: int = 0) -> None:
        import ipywidgets as widgets

        self.experiment = experiment.model_copy(update={"dp_shard": -1})
        look = {"style": {"description_width": "154px"}, "layout": {"width": "318px"}}
        controls: dict[str, ipywidgets.Widget] = {
            field: widgets.Dropdown(description=field, **look) for field in CHOSEN
        }
        controls["rank"] = widgets.BoundedIntText(
            value=rank, max=experiment.world_size - 1, description="show rank", **look
        )
        super().__init__(controls, ("memory", "pipeline", "mesh"))

    def refresh(self, change: object = None) -> None:
        """Read all controls, then renew all that depends on them without hearing of it."""
        for control in self.controls.values():
            control.unobserve(self.refresh, names="value")
        if change is not None:
            fields = {field: self.controls[field].value for field in CHOSEN}
            self.experiment = self.experiment.model_copy(update=fields)
        for field in CHOSEN:
            self._renew_menu(field)
        self.controls["rank"].max = self.experiment.world_size - 1  # lowers the value too where it is above
        super().refresh()
        self._listen()

    def _renew_menu(self, field: str) -> None:
        """Say of every value whether it is legal beside the other controls."""
        current, facts = getattr(self.experiment, field), facts_of(self.experiment)
        allowed = _POWERS if field in ("nodes", "local_batch") else candidates(facts, field)
        values = list(dict.fromkeys([*allowed, current]))
        options = []
        for value in sorted(values) if isinstance(current, int) else values:
            legal = check(self.experiment.model_copy(update={field: value})).legal
            options.append((str(value) if legal else f"{value} (illegal)", value))
        control = self.controls[field]
        if control.options != tuple(options):
            control.options = options
        control.value = current

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """The verdict and, of a legal layout, its figures; of an illegal one the mesh, as far as there is one."""
        experiment = self.experiment
        checked = check(experiment)
        layout = checked.layout
        if layout is None:
            return refusal("Illegal", checked.reasons), {}
        mesh = mesh_map(
            layout,
            gpus_per_node=experiment.gpus_per_node,
            rank=self.controls["rank"].value,
            nvlink_ranks=nvlink_ranks(experiment),
        )
        if not checked.legal:
            return refusal("Illegal", checked.reasons), {"mesh": mesh}
        gpu = gpu_of(experiment.hardware)
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        words = (
            f"<div role='status'><b>Legal</b>: {experiment.world_size} GPUs: "
            f"{' · '.join(f'{axis} {getattr(layout, axis)}' for axis in axes)} · ep {layout.ep}, experts sharded by "
            f"{layout.efsdp}; {experiment.local_batch * layout.data_parallel:,} sequences a step"
            f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in checked.notes)}</ul></div>"
        )
        return words, {
            "memory": memory_bars(estimate(experiment, layout, gpu), layout, gpu),
            "pipeline": pipeline_schedule(layout, experiment.pp_schedule),
            "mesh": mesh,
        }
