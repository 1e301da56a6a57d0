"""A layout drawn: its mesh, its pipeline, memory per GPU under the line of what the GPU has, and the layout explorer.

In the mesh every GPU is a square in the box of its node, with one small map for each group of the chosen rank. Its
colours are about the wire: peers in the same node are reached over NVLink, peers in another node over the network,
which is an order of magnitude slower. Those of memory say what kind of thing a part is: blue and green for weights and
what the optimizer needs, warm colours for what depends on the batch, grey for what the machinery takes. Hatched parts
are gathered: weights and gradients, whole.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, ShapeChanges
from moelab.hardware import PROFILES, Gpu, gpu_of
from moelab.layout import SCHEDULES, Layout, bubble_fraction, check, facts_of, faults
from moelab.layout.mesh import Group, coordinates, groups_of, nvlink_ranks
from moelab.layout.rules import candidates
from moelab.layout.schedule import Durations, timeline
from moelab.model import SHAPES
from moelab.model.hugging_face import published_models, read_model
from moelab.planning.advice import Recommendation
from moelab.planning.memory import PARTS, MemoryEstimate, estimate
from moelab.planning.plan import layout_words, parameters_text
from moelab.planning.project import extrapolated, project, speed_text
from moelab.viz.draw import STAR, draw_limit, inside, legend_entry, name_map, nothing_to_draw
from moelab.viz.table import TableView, as_table
from moelab.viz.theme import FAR, INK, MUTED, NARROW, NEAR, NORMAL, OTHER, WARNING, new_figure
from moelab.viz.widget import Explorer, labelled_control

# The mesh

TITLE_PX, SPACE_PX = 44, 22
"""Heights of a map's title and of the space under it."""
GAP, LABEL_GAP = 0.7, 1.3
"""Space between boxes across, and above each for its number, in squares."""
LIGHT_GREEN, DARK_GREEN = "rgb(206, 232, 222)", "rgb(0, 92, 67)"
"""Of the first and the last pipeline rank."""


def mesh_map(layout: Layout, *, gpus_per_node: int, rank: int = 0, nvlink_ranks: int = 0) -> go.Figure:
    """Nodes as boxes and GPUs as squares; one map for each group that a rank belongs to.

    Where NVLink joins more ranks than a node has, a box has these. Hovering over a square shows its rank and its place
    along every axis.

    Raises:
        BadInput: if there is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise BadInput(f"rank is {rank}; valid: 0 to {layout.world_size - 1}, the ranks of this layout")
    # An NVL72 rack is many nodes in one NVLink domain: what is near ends with the domain.
    size, box = max(gpus_per_node, nvlink_ranks), "NVLink domain" if nvlink_ranks > gpus_per_node else "node"
    groups = groups_of(layout, rank, gpus_per_node=size)
    grid = ClusterGrid(gpus_per_node=size, nodes=-(-layout.world_size // size))
    everyone, home = range(layout.world_size), rank // size
    maps: dict[str, list[str]] = {}
    for group in groups:
        nodes, peers = f"1 {box}" if len(group.nodes) == 1 else f"{len(group.nodes)} {box}s", set(group.ranks)
        maps[f"<b>{group.name} {group.degree}</b> · {nodes}<br>{group.carries}"] = [
            OTHER if each not in peers else NEAR if each // size == home else FAR for each in everyone
        ]
    if layout.pp > 1:
        # Pipeline ranks are blocks of consecutive global ranks: pp is the mesh's outermost axis.
        block = layout.world_size // layout.pp
        greens = sample_colorscale([LIGHT_GREEN, DARK_GREEN], [place / (layout.pp - 1) for place in range(layout.pp)])
        title = f"<b>pipeline ranks</b> 0 (light) to {layout.pp - 1} (dark)<br>{block} GPUs each"
        maps[title] = [greens[each // block] for each in everyone]
    rows = -(-len(maps) // 2)  # two maps beside each other
    height_px = TITLE_PX + grid.height_px + SPACE_PX
    figure = new_figure(
        _reach(groups, rank, box),
        subtitle=f"Squares are GPUs in rank order, boxes are {box}s; the star is the chosen rank. Hover for each "
        "rank's place on every axis.",
        height=110 + rows * height_px,
    )
    texts = []
    for each in everyone:
        (node, local), on = divmod(each, gpus_per_node), coordinates(layout, each)
        dense = ", ".join(f"{axis} {on[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        experts = f"<br>experts: efsdp {on['efsdp']}, ep {on['ep']}" if "ep" in on else ""
        texts.append(f"<b>rank {each}</b>: node {node}, GPU {local}<br>{dense}{experts}")
    x, y = grid.square(rank)
    star = {**STAR, "size": 11 if grid.numbered else 7}
    chosen = go.Scatter(x=[x], y=[y], mode="markers", marker=star, hoverinfo="skip", showlegend=False)
    for place, (title, colors) in enumerate(maps.items()):
        row, column = divmod(place, 2)
        left, top = 0.52 * column, 1.0 - row / rows - TITLE_PX / (rows * height_px)
        suffix = str(place + 1) if place else ""
        for axis, other, ends, domain in (
            ("x", "y", [-0.2, grid.width + 0.2], [left, left + 0.48]),
            ("y", "x", [grid.height + 0.2, 0.2], [top - grid.height_px / (rows * height_px), top]),
        ):
            hidden = {"visible": False, "fixedrange": True, "anchor": f"{other}{suffix}"}
            figure.update_layout({f"{axis}axis{suffix}": {**hidden, "range": ends, "domain": domain}})
        name_map(figure, title, left, top, xref="paper")
        for trace in (grid.squares(colors, texts), *grid.boxes(), chosen):
            figure.add_trace(trace.update(xaxis=f"x{suffix}", yaxis=f"y{suffix}"))
    square = {"symbol": "square", "size": 12}
    for name, look in (
        ("chosen rank", {**STAR, "size": 11}),
        (f"peer in its {box} (NVLink)", {**square, "color": NEAR}),
        (f"peer in another {box} (network)", {**square, "color": FAR}),
        ("no peer", {**square, "color": OTHER}),
    ):
        figure.add_trace(legend_entry(name, mode="markers", marker=look))
    return figure.update_layout(legend={"y": 0.0, "yanchor": "top"}, margin={"l": 12, "r": 12, "b": 40})


def _reach(groups: Sequence[Group], rank: int, box: str) -> str:
    if not groups:
        return f"Rank {rank} talks to no other rank"
    near = [group.name for group in groups if len(group.nodes) == 1]
    outside = [f"{len(group.nodes)} by {group.name}" for group in groups if len(group.nodes) > 1]
    if not outside:
        return f"Rank {rank} talks inside its {box} only: {', '.join(near)}"
    reaches = ", ".join(outside).replace(" by", f" {box}s by", 1)
    stays = f"; {' and '.join(near)} stay{'s' if len(near) == 1 else ''} in its {box}" if near else ""
    return f"Rank {rank} reaches {reaches}{stays}"


class ClusterGrid:
    """Where each GPU's square lies; x runs to the right and y down, in squares."""

    def __init__(self, *, gpus_per_node: int, nodes: int) -> None:
        self._gpus_per_node, self._nodes = gpus_per_node, nodes
        self.numbered = nodes <= 64  # of more, there is no room for the numbers
        # A small cluster does not fill the width, so that squares stay small.
        self._columns = 8 if self.numbered else 16 if nodes <= 256 else 32
        self._across = min(4, gpus_per_node)
        self._down = -(-gpus_per_node // self._across)
        self.width = self._columns * (self._across + GAP) - GAP
        self.height = -(-nodes // self._columns) * (self._down + LABEL_GAP)
        self.height_px = round(self.height * (15 if nodes <= 32 else 11 if self.numbered else 6))

    def _corner(self, node: int) -> tuple[float, float]:
        """Upper left corner of a node's box."""
        row, column = divmod(node, self._columns)
        return column * (self._across + GAP), row * (self._down + LABEL_GAP) + LABEL_GAP

    def square(self, rank: int) -> tuple[float, float]:
        """Centre of a GPU's square."""
        node, local = divmod(rank, self._gpus_per_node)
        x, y = self._corner(node)
        return x + local % self._across + 0.5, y + local // self._across + 0.5

    def squares(self, colors: Sequence[str], texts: Sequence[str]) -> go.Heatmap:
        """Squares of all ranks."""
        palette = sorted(set(colors))  # a heatmap has numbers, so a colour is its place in a scale of steps
        columns, rows = min(self._nodes, self._columns), -(-self._nodes // self._columns)
        # A column or row of nothing between boxes, since a heatmap's cells touch.
        x = [self._corner(box)[0] + place for box in range(columns) for place in range(self._across + 1)]
        y = [self._corner(box * self._columns)[1] + place for box in range(rows) for place in range(self._down + 1)]
        z: list[list[int | None]] = [[None] * (len(x) - 1) for _ in y[1:]]
        text = [[""] * (len(x) - 1) for _ in y[1:]]
        for rank, color in enumerate(colors):
            node, local = divmod(rank, self._gpus_per_node)
            row = node // self._columns * (self._down + 1) + local // self._across
            column = node % self._columns * (self._across + 1) + local % self._across
            z[row][column], text[row][column] = palette.index(color), texts[rank]
        count = len(palette)
        steps = [(edge / count, color) for place, color in enumerate(palette) for edge in (place, place + 1)]
        gap = 1 if self.numbered else 0
        look = {"colorscale": steps, "zmin": -0.5, "zmax": count - 0.5, "showscale": False, "xgap": gap, "ygap": gap}
        return go.Heatmap(x=x, y=y, z=z, text=text, hovertemplate="%{text}<extra></extra>", hoverongaps=False, **look)

    def boxes(self) -> list[go.Scatter]:
        """Outlines of all nodes, as one line with breaks, and where there is room their numbers above them."""
        corners = [self._corner(node) for node in range(self._nodes)]
        x: list[float | None] = []
        y: list[float | None] = []
        for left, top in ((x - 0.15, y - 0.15) for x, y in corners):
            right, bottom = left + self._across + 0.3, top + self._down + 0.3
            x += [left, right, right, left, left, None]
            y += [top, top, bottom, bottom, top, None]
        still = {"hoverinfo": "skip", "showlegend": False}
        outlines = go.Scatter(x=x, y=y, mode="lines", line={"color": MUTED, "width": 1}, **still)
        if not self.numbered:
            return [outlines]
        names = {"text": [str(node) for node in range(self._nodes)], "textposition": "top right"}
        look = {"mode": "text", "textfont_size": 10, "cliponaxis": False}
        numbers = go.Scatter(x=[x for x, _ in corners], y=[y - 0.2 for _, y in corners], **names, **look, **still)
        return [outlines, numbers]


# The pipeline

MOST_BLOCKS = 8500
"""Bars that a browser draws without a pause; of a longer step the beginning is shown."""
AROUND_PX = 190
"""Height of a one-line title, the axis and the legend."""
DIGIT_PX, NARROW_PX = 9, 640
"""Room that a digit needs, and the width of the axis in a narrow notebook."""
_KINDS = {
    "F": ("forward", ("#0072B2", "#86BCDD"), "white"),
    "B": ("backward", ("#D55E00", "#EDA978"), "white"),
    "I": ("backward: dgrad", ("#E69F00", "#F5D590"), INK),
    "W": ("backward: wgrad", ("#009E73", "#84CDB8"), "white"),
}
"""Name of what a block does, colour of a rank's first stage and, halfway to white, of the others, ink of the first."""


def pipeline_schedule(layout: Layout, schedule: str) -> go.Figure:
    """Forward, backward and wait of every pipeline rank over one step, as the order of the schedule makes them.

    Every stage takes equally long and communication no time, so this is a picture of the schedule, not of a run. The
    number on a bar is its micro-batch, where it fits.
    """
    if layout.pp == 1:
        finding = "No pipeline: every rank holds all layers"
        return nothing_to_draw(finding, subtitle="pp is 1, so no rank waits.", height=120)
    unit = [Durations(1, 1, 1)] * len(layout.stages)
    played = timeline(schedule, unit, pp=layout.pp, microbatches=layout.microbatches)
    # Units are whole, as every stage takes one.
    end, count = int(max(row[-1].end for row in played)), sum(map(len, played))
    shown = end if count <= MOST_BLOCKS else end * MOST_BLOCKS // count
    turns = layout.stages_per_rank
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

    def draw(bars: Sequence[tuple[int, float, float]], name: str, hover: str, **look: object) -> None:
        """Bars of one look, each given as rank, start and end."""
        ranks, starts, ends = zip(*bars, strict=True) if bars else ((), (), ())
        lengths = [stop - start for start, stop in zip(starts, ends, strict=True)]
        place = {"base": starts, "x": lengths, "y": ranks, "orientation": "h", "width": 0.86}
        figure.add_bar(name=name, hovertemplate=f"{hover}<extra>rank %{{y}}</extra>", **place, **look)

    blocks = [
        (rank, layout.stages_of_rank[rank].index(block.action.stage), block)
        for rank, row in enumerate(played)
        for block in row
        if block.start < shown
    ]
    for kind, (name, colors, ink) in _KINDS.items():
        for turn in range(turns):
            work = [(rank, block) for rank, at, block in blocks if (block.action.kind, at) == (kind, turn)]
            if not work:
                continue
            numbers = [str(block.action.microbatch) for _, block in work]
            draw(
                [(rank, block.start, block.end) for rank, block in work],
                name if turn == 0 else f"{name}, stage {turn + 1} of the rank",
                f"{name}, stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}",
                marker={"color": colors[turn > 0], "line": {"color": "white", "width": 0.5}},
                customdata=[[block.action.stage, block.action.microbatch] for _, block in work],
                showlegend=turn == 0,
                **(inside(numbers, color=INK if turn else ink, size=12) if numbered else {}),
            )
    idle = []
    for rank, row in enumerate(played):
        edges = [0, *(edge for block in row for edge in (block.start, block.end)), end]
        stretches = zip(edges[::2], edges[1::2], strict=True)
        idle += [(rank, start, min(stop, shown)) for start, stop in stretches if start < min(stop, shown)]
    hatch = {"shape": "/", "fgcolor": MUTED, "bgcolor": "#f4f5f7", "size": 6, "solidity": 0.2}
    draw(idle, "wait (bubble)", "waits %{x} units", marker={"color": "white", "line_width": 0, "pattern": hatch})
    every = 1 if layout.pp <= 16 else 4
    # Each bar has a base of its own, so they overlay; the legend stands 58 px under the axis.
    figure.update_layout(barmode="overlay", legend={"traceorder": "normal", "y": -58 / rows_px})
    figure.update_xaxes(title_text="time (units of one forward of one stage)", range=[0, shown], showgrid=False)
    figure.update_yaxes(title_text="pipeline rank", tickvals=list(range(0, layout.pp, every)), ticklabelstandoff=6)
    return figure.update_yaxes(range=[layout.pp - 0.5, -0.5], showgrid=False, ticks="")


# Memory

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
    "communication buffers": ("#56616f", ""),
    "fragmentation": ("#a9b2bd", ""),
    "dispatch buffers": ("#56616f", "x"),
    "CUDA and NCCL": ("#d3d8de", ""),
}


def memory_bars(memory: MemoryEstimate, layout: Layout, gpu: Gpu, *, width: int = NORMAL) -> go.Figure:
    """Predicted memory of one GPU of each pipeline rank, by part, against what the GPU has."""
    rank = f"pipeline rank {memory.worst.rank}" if len(memory.by_stage) > 1 else "each rank"
    finding = (
        f"{rank.capitalize()} needs {memory.worst_gib:.1f} GiB; what a {gpu.name} has is not known"
        if gpu.memory_gib is None
        else f"{'Fits' if memory.fits else 'Does not fit'}: {rank} needs {memory.worst_gib:.1f} of "
        f"{memory.capacity_gib:.1f} GiB of a {gpu.name}"
    )
    reading = f"Fullest moment: {memory.worst.moment}. Largest part: {memory.dominant}."
    figure = new_figure(finding, subtitle=reading, note="predicted, not measured", height=540, width=width)
    stages = memory.by_stage
    for part in PARTS:
        values = [stage.parts[part] for stage in stages]
        # Else a dozen parts of some MB fill the legend.
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
    # Under the bars stand the rank and, where there is room, its layers.
    every = 1 if layout.pp <= 16 else 2
    names = [str(rank) if rank % every == 0 else "" for rank in range(layout.pp)]
    if layout.pp <= 8:
        held = [[name for stage in stages for name in layout.stages[stage]] for stages in layout.stages_of_rank]
        # Embedding, norm and head are modules of a stage too, but no layers.
        counts = [sum(name.startswith("layers.") for name in names) for names in held]
        names = [f"{rank}<br>{count} layers" for rank, count in enumerate(counts)]
    # Beside controls two columns fit only with narrow entries; one column would leave the bars no height.
    legend = {"y": -0.42, "entrywidth": 140, "font_size": 12} if width == NARROW else {"y": -0.22}
    figure.update_layout(barmode="stack", hovermode="x", legend={"traceorder": "normal", **legend})
    figure.update_xaxes(title_text="pipeline rank", tickvals=list(range(len(stages))), ticktext=names)
    figure.update_xaxes(range=[-0.5, len(stages) - 0.5] if len(stages) > 1 else [-1.5, 1.5], showgrid=False, ticks="")
    figure.update_yaxes(title_text="memory per GPU (GiB)", range=[0, 1.12 * max(memory.worst_gib, memory.capacity_gib)])
    return figure


# The explorer

LABELS: Mapping[str, str] = {
    "model": "model",
    "hardware": "hardware",
    "nodes": "nodes",
    "pp": "PP degree",
    "pp_schedule": "PP schedule",
    "tp": "TP degree",
    "cp": "CP degree",
    "dp_replicate": "replicas",
    "ep": "EP degree",
    "local_batch": "sequences a rank",
    "microbatch": "micro-batch",
    "precision": "experts in",
    "ep_backend": "all-to-all",
    "activation_checkpoint": "checkpointing",
}
"""Fields of an experiment that have a control, with its label; ``dp_shard`` takes the ranks that are left."""
FIGURES = {"memory": "memory of a GPU", "pipeline": "pipeline", "mesh": "who talks to whom"}
MOST_PX = {"memory": 520, "pipeline": 520, "mesh": 1200}
"""Heights of the explorer's figures: a bar or a rank can be lower, a map of squares cannot."""
_POWERS = tuple(2**exponent for exponent in range(9))
_CLUSTERS = tuple(name for name in PROFILES if name not in ("local", "cpu"))


class LayoutExplorer(Explorer):
    """Model, hardware and degrees as controls, a line that says *legal · fits · tokens/s*, and one figure at a time.

    A menu says which of its values would be illegal while the other controls stay as they are; they can be chosen, and
    the reason then stands under the control.

    Args:
        experiment: where the controls begin; what has no control stays as it is here.
        name: of its model, where it is no model of moelab's own.
        rank: global rank whose groups the mesh shows first.
    """

    label_px, control_px = 118, 244

    def __init__(self, experiment: Experiment, *, name: str = "", rank: int = 0) -> None:
        # Without a pipeline too the control of the micro-batch says what goes forward at once.
        at_once = {"microbatch": experiment.sequences_at_once, "accumulate_gradients": True}
        self.experiment = experiment.model_copy(update={"dp_shard": -1, **at_once})  # as the controls stand now
        self._given = {name or experiment.model: (experiment.model, experiment.shape)}
        models = list(dict.fromkeys([*self._given, *published_models(), *SHAPES]))
        hardware = [(str(one), one) for one in dict.fromkeys([experiment.hardware, *_CLUSTERS])]
        fixed: dict[str, Any] = {"model": models, "hardware": hardware}
        controls = {
            field: labelled_control("Dropdown", label, options=fixed.get(field, ())) for field, label in LABELS.items()
        }
        figures = [(label, key) for key, label in FIGURES.items()]
        controls["figure"] = labelled_control("Dropdown", "figure", options=figures)
        controls["rank"] = labelled_control("BoundedIntText", "of rank", value=rank, max=experiment.world_size - 1)
        self._mark(controls)
        super().__init__(controls, tuple(FIGURES))

    def refresh(self, change: Any = None) -> None:
        """Show what is chosen, and only then mark what would be illegal beside it: that takes longer."""
        for control in self.controls.values():  # what is set below would call this again
            control.unobserve(self.refresh, names="value")
        if change is not None:
            fields = {field: self.controls[field].value for field in LABELS if field != "model"}
            model, shape = self._model(self.controls["model"].value)
            self.experiment = self.experiment.model_copy(update={**fields, "model": model, "shape": shape})
            self.controls["rank"].max = self.experiment.world_size - 1  # lowers the value too where it is above
        super().refresh(change)
        self._mark(self.controls)
        self._listen()

    def _model(self, name: str) -> tuple[str, ShapeChanges | None]:
        if name in self._given or name in SHAPES:
            return self._given.get(name, (name, None))
        model = read_model(name)
        return model.model, ShapeChanges(**model.shape) if model.shape else None

    def _mark(self, controls: Mapping[str, Any]) -> None:
        """Say in each menu which values are illegal beside the other controls."""
        facts = facts_of(self.experiment)
        for field in list(LABELS)[2:]:
            current, control = getattr(self.experiment, field), controls[field]
            allowed = _POWERS if field in ("nodes", "local_batch") else candidates(facts, field)
            values = list(dict.fromkeys([*allowed, current]))
            options = []
            for value in sorted(values) if isinstance(current, int) else values:
                legal = next(faults(facts.vary(**{field: value})), None) is None
                options.append((str(value) if legal else f"{value} (illegal)", value))
            # Setting equal options too would reset the menu that the reader has open.
            if control.options != tuple(options):
                control.options = options  # which makes the first of them the value
            control.value = current

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """The line, and the figure that is asked for.

        Raises:
            Refused: with the reasons of an illegal layout.
        """
        x = self.experiment
        checked = check(x)
        layout = checked.layout
        if layout is None or not checked.legal:
            raise Refused("\n".join(checked.reasons))
        gpu = gpu_of(x.hardware)
        memory = estimate(x, layout, gpu)
        fits = "fits" if memory.fits else "does not fit"
        verdict = f"legal · {fits} ({memory.worst_gib:.0f} of {memory.capacity_gib:.0f} GiB)"
        if memory.fits:
            try:
                verdict += f" · {speed_text(project(x))}"
            except (BadInput, Refused) as error:
                verdict += f" · speed not predicted: {error}"
        words = (
            f"<b>{html.escape(verdict)}</b><br>"
            f"{parameters_text(x)} · {x.world_size} GPUs · {html.escape(layout_words(x))} · "
            f"{x.global_batch:,} sequences a step"
        )
        wanted, rank = (self.controls[name].value for name in ("figure", "rank"))
        if wanted == "memory":
            figure = memory_bars(memory, layout, gpu, width=NARROW)
        elif wanted == "pipeline":
            figure = pipeline_schedule(layout, x.pp_schedule)
        else:
            figure = mesh_map(layout, gpus_per_node=x.gpus_per_node, rank=rank, nvlink_ranks=nvlink_ranks(x))
        return words, {wanted: figure.update_layout(height=min(figure.layout.height, MOST_PX[wanted]))}


# The answer


def best_layouts(recommended: Recommendation) -> TableView:
    """The layouts of a search, the best first."""
    table = []
    for one in recommended.ranked:
        assert one.projection is not None
        low, high = one.projection.interval
        table.append(
            {
                "tokens/s per GPU": round(one.projection.tps),
                "90 % interval": f"{low:,.0f} to {high:,.0f}",
                "MFU (%)": 100 * one.projection.mfu["computed"],
                "layout": layout_words(one.experiment),
                "free (GiB)": one.headroom_gib,
                "bubble (%)": 100 * one.bubble_fraction,
                "rests on": "; ".join(one.projection.outside) or "what was seen",
            }
        )
    return as_table(pd.DataFrame(table), "Best layouts", decimals={"MFU (%)": 1, "free (GiB)": 1, "bubble (%)": 1})


def technique_gains(recommended: Recommendation) -> TableView:
    """Each technique beside neither, every row at its own best layout."""
    table: list[dict[str, Any]] = []
    for gain in recommended.gains:
        if not table:
            plain = {"experts and all-to-all": "BF16, standard", "tokens/s per GPU": round(gain.without.tps)}
            table.append(plain | {"gain": "–", "best layout": layout_words(gain.without.experiment), "why": ""})
        row: dict[str, Any] = {"experts and all-to-all": gain.name, "tokens/s per GPU": None, "gain": "–"}
        if gain.with_it:
            row["tokens/s per GPU"] = round(gain.with_it.tps)
            row["gain"] = gain.percent_text
        why = [gain.why, *map(extrapolated, gain.outside[:1])]
        layout = layout_words(gain.with_it.experiment) if gain.with_it else ""
        table.append(row | {"best layout": layout, "why": "; ".join(filter(None, why))})
    return as_table(pd.DataFrame(table), "What each technique gains, every row at its own best layout")
