"""A layout drawn: its mesh, its pipeline, memory per GPU under the line of what the GPU has, and the layout explorer.

In the mesh every GPU is a square among those of its node, with one small map for each group of the chosen rank. Its
colours are about the wire: peers in the same node are reached over NVLink, peers in another node over the network,
which is an order of magnitude slower. Those of memory say what kind of thing a part is: blue and green for weights and
what the optimizer needs, warm colours for what depends on the batch, grey for what the machinery takes. Hatched parts
are gathered: weights and gradients, whole.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, ShapeChanges
from moelab.hardware import PROFILES, Gpu, gpu_of
from moelab.layout import SCHEDULES, Layout, bubble_fraction, check, facts_of, faults
from moelab.layout.mesh import coordinates, groups_of, nvlink_ranks
from moelab.layout.rules import candidates
from moelab.layout.schedule import Durations, timeline
from moelab.model import SHAPES
from moelab.model.hugging_face import published_models, read_model
from moelab.planning.advice import Recommendation
from moelab.planning.memory import PARTS, MemoryEstimate, estimate
from moelab.planning.plan import layout_words, parameters_text
from moelab.planning.project import extrapolated, project, speed_text
from moelab.viz.draw import (
    STAR,
    Look,
    bar_rows,
    draw_limit,
    inside,
    legend_below,
    legend_entry,
    list_rows,
    name_map,
    nothing_to_draw,
)
from moelab.viz.table import TableView, as_table
from moelab.viz.theme import FAR, INK, MUTED, NARROW, NEAR, NORMAL, OTHER, WARNING, counted, new_figure
from moelab.viz.widget import Explorer, Menu, Number

# The mesh

TITLE_PX = 48
"""Height of a map's title, with the space above it."""
GREENS = ["rgb(206, 232, 222)", "rgb(0, 92, 67)"]
"""Of the first and the last pipeline rank."""


def mesh_map(layout: Layout, *, gpus_per_node: int, rank: int = 0, nvlink_ranks: int = 0) -> go.Figure:
    """GPUs as squares, those of a node together; one map for each group that a rank belongs to.

    Where NVLink joins more ranks than a node has, these stand together. Hovering over a square shows its rank and its
    place along every axis.

    Raises:
        BadInput: if there is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise BadInput(f"rank is {rank}; valid: 0 to {layout.world_size - 1}, the ranks of this layout")
    # An NVL72 rack is many nodes in one NVLink domain: what is near ends with the domain.
    size, box = max(gpus_per_node, nvlink_ranks), "NVLink domain" if nvlink_ranks > gpus_per_node else "node"
    everyone, home = range(layout.world_size), rank // size
    maps: dict[str, list[str]] = {}
    for group in groups_of(layout, rank, gpus_per_node=size):
        peers = set(group.ranks)
        maps[f"<b>{group.name} {group.degree}</b> · {counted(len(group.nodes), box)}<br>{group.carries}"] = [
            OTHER if each not in peers else NEAR if each // size == home else FAR for each in everyone
        ]
    if layout.pp > 1:
        # Pipeline ranks are blocks of consecutive global ranks: pp is the mesh's outermost axis.
        block = layout.world_size // layout.pp
        greens = sample_colorscale(GREENS, [place / (layout.pp - 1) for place in range(layout.pp)])
        title = f"<b>pipeline ranks</b> 0 (light) to {layout.pp - 1} (dark)<br>{block} GPUs each"
        maps[title] = [greens[each // block] for each in everyone]
    grid = rank_grid(layout.world_size, size)
    (height, width), boxes = grid.shape, -(-layout.world_size // size)
    square_px = 15 if boxes <= 32 else 11 if boxes <= 64 else 6
    across = max(width, 330 / square_px)  # squares of a small cluster stay square
    down, rows = height + TITLE_PX / square_px, -(-len(maps) // 2)  # two maps beside each other
    figure = new_figure(
        f"Groups of rank {rank}" if maps else f"Rank {rank} talks to no other rank",
        subtitle=f"Squares are GPUs in rank order, those of a {box} together; the star is the chosen rank. Hover for "
        "each rank's place on every axis.",
        height=round(110 + rows * down * square_px),
    )
    texts = []
    for each in everyone:
        (node, local), on = divmod(each, gpus_per_node), coordinates(layout, each)
        dense = ", ".join(f"{axis} {on[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        experts = f"<br>experts: efsdp {on['efsdp']}, ep {on['ep']}" if "ep" in on else ""
        texts.append(f"<b>rank {each}</b>: node {node}, GPU {local}<br>{dense}{experts}")
    hover = np.where(grid >= 0, np.array(texts)[grid], "")
    stars = []
    for place, (title, colors) in enumerate(maps.items()):
        left, top = place % 2 * (across + 1), (place // 2 + 1) * down - height
        palette = sorted(set(colors))  # a heatmap has numbers, so a colour is its place in a scale of steps
        numbers = np.array([palette.index(color) for color in colors])
        edges = np.arange(len(palette) + 1) / len(palette)
        steps = [(edge, color) for one, color in enumerate(palette) for edge in edges[one : one + 2]]
        figure.add_heatmap(
            x0=left + 0.5,
            y0=top + 0.5,
            dx=1,
            dy=1,
            z=np.where(grid >= 0, numbers[grid], np.nan),
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorscale=steps,
            zmin=-0.5,
            zmax=len(palette) - 0.5,
            showscale=False,
            xgap=int(square_px > 6),
            ygap=int(square_px > 6),
        )
        name_map(figure, title, left, top - 2 / square_px, yref="y")
        (y, x), *_ = np.argwhere(grid == rank) + 0.5
        stars.append((left + x, top + y))
    look = {"mode": "markers", "marker": {**STAR, "size": 11 if square_px > 6 else 7}, "hoverinfo": "skip"}
    figure.add_scatter(x=[x for x, _ in stars], y=[y for _, y in stars], name="chosen rank", **look)
    for name, color in (
        (f"peer in its {box} (NVLink)", NEAR),
        (f"peer in another {box} (network)", FAR),
        ("no peer", OTHER),
    ):
        square = {"symbol": "square", "size": 12, "color": color}
        figure.add_trace(legend_entry(name, mode="markers", marker=square))
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(**hidden, range=[-0.2, 2 * across + 1]).update_yaxes(**hidden, range=[rows * down + 0.2, 0])
    return legend_below(figure.update_layout(margin={"l": 12, "r": 12}), axis_px=4)


def rank_grid(world_size: int, size: int) -> np.ndarray[Any, Any]:
    """The rank at each square of a map, -1 for none: boxes of ``size`` ranks in rows, with a square between two."""
    boxes, across = -(-world_size // size), min(4, size)
    columns = min(boxes, 8 if boxes <= 64 else 16 if boxes <= 256 else 32)
    rows, down = -(-boxes // columns), -(-size // across)
    ranks = np.arange(world_size)
    grid = np.full((rows * columns, down * across), -1)
    grid[ranks // size, ranks % size] = ranks
    grid = np.pad(grid.reshape(rows, columns, down, across), ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=-1)
    return grid.transpose(0, 2, 1, 3).reshape(rows * (down + 1), columns * (across + 1))


# The pipeline

MOST_BLOCKS = 8500
"""Bars that a browser draws without a pause; of a longer step the beginning is shown."""
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
        title = "No pipeline: every rank holds all layers"
        return nothing_to_draw(title, subtitle="pp is 1, so no rank waits.", height=120)
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
    waits = bubble_fraction(SCHEDULES[schedule], pp=layout.pp, microbatches=layout.microbatches, turns=turns)
    figure = new_figure(
        f"{schedule}: each pipeline rank waits {waits:.1%} of a step",
        subtitle=f"{'; '.join(reading)}.",
        note="simulated: equal stage times, free communication",
        height=130 + layout.pp * (64 if layout.pp <= 4 else 40 if layout.pp <= 8 else 22),
    )

    def draw(bars: Sequence[tuple[int, float, float]], name: str, hover: str, **look: object) -> None:
        """Bars of one look, each given as rank, start and end."""
        figure.add_bar(
            base=[start for _, start, _ in bars],
            x=[stop - start for _, start, stop in bars],
            y=[rank for rank, _, _ in bars],
            orientation="h",
            width=0.86,
            name=name,
            hovertemplate=f"{hover}<extra>rank %{{y}}</extra>",
            **look,
        )

    for kind, (name, colors, ink) in _KINDS.items():
        for turn in range(turns):
            work = [
                (rank, block)
                for rank, row in enumerate(played)
                for block in row
                if block.start < shown
                and block.action.kind == kind
                and layout.stages_of_rank[rank].index(block.action.stage) == turn
            ]
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
    ranks = [str(rank) if rank % (1 if layout.pp <= 16 else 4) == 0 else "" for rank in range(layout.pp)]
    # Each bar has a base of its own, so they overlay.
    list_rows(figure, "time (units of one forward of one stage)", names=ranks, barmode="overlay")
    figure.update_xaxes(range=[0, shown], showgrid=False).update_yaxes(title_text="pipeline rank")
    return legend_below(figure)


# Memory

SMALLEST_GIB = 0.05
"""A part that is smaller on every rank is left out of the figure, not of the totals."""
_LOOKS: Mapping[str, Look] = {
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
    stages, known = memory.by_stage, gpu.memory_gib is not None
    rank = f"pipeline rank {memory.worst.rank}" if len(stages) > 1 else "each rank"
    # Embedding, norm and head are modules of a stage too, but no layers.
    held = [[name for stage in own for name in layout.stages[stage]] for own in layout.stages_of_rank]
    layers = [sum(name.startswith("layers.") for name in modules) for modules in held]
    parts = {part: [stage.parts[part] for stage in stages] for part in PARTS}
    figure = bar_rows(
        f"{'Fits' if memory.fits else 'Does not fit'}: {rank} needs {memory.worst_gib:.1f} of "
        f"{memory.capacity_gib:.1f} GiB of a {gpu.name}"
        if known
        else f"{rank.capitalize()} needs {memory.worst_gib:.1f} GiB; what a {gpu.name} has is not known",
        [f"rank {place}, {counted(count, 'layer')}" for place, count in enumerate(layers)],
        # Else a dozen parts of some MB fill the legend.
        {part: (values, _LOOKS[part]) for part, values in parts.items() if max(values) >= SMALLEST_GIB},
        "memory per GPU (GiB)",
        unit=":.1f GiB",
        subtitle=f"Fullest moment: {memory.worst.moment}. Largest part: {memory.dominant}.",
        note="predicted, not measured",
        row_px=min(64, max(18, 480 / len(stages))),
        ends=[f"<b>{stage.total_gib:.1f}</b>" for stage in stages],
        limit=memory.capacity_gib if known else None,
        width=width,
    )
    if known:
        text = f"{gpu.name}: {memory.capacity_gib:.1f} GiB"
        draw_limit(figure, memory.capacity_gib, text, along="x", color=INK if memory.fits else WARNING)
    return figure.update_xaxes(range=[0, 1.15 * max(memory.worst_gib, memory.capacity_gib)])


# The explorer

_POWERS = tuple(2**exponent for exponent in range(9))
LABELS: Mapping[str, str] = {
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
"""Fields of an experiment whose menu says what would be illegal; ``dp_shard`` takes the ranks that are left."""
_CLUSTERS = tuple(name for name in PROFILES if name not in ("local", "cpu"))
_FIGURES = Menu("figure", {"memory": "memory of a GPU", "pipeline": "pipeline", "mesh": "who talks to whom"})


class LayoutExplorer(Explorer):
    """Model, hardware and degrees as controls, a line that says *legal · fits · tokens/s*, and one figure at a time.

    A menu says which of its values would be illegal while the other controls stay as they are; they can be chosen, and
    the reason then stands under the control.

    Args:
        experiment: where the controls begin; what has no control stays as it is here.
        name: of its model, where it is no model of moelab's own.
        rank: global rank whose groups the mesh shows first.
    """

    def __init__(self, experiment: Experiment, *, name: str = "", rank: int = 0) -> None:
        # Without a pipeline too the control of the micro-batch says what goes forward at once.
        at_once = {"microbatch": experiment.sequences_at_once, "accumulate_gradients": True}
        self._given, self._own = experiment.model_copy(update={"dp_shard": -1, **at_once}), name or experiment.model
        controls: dict[str, Menu | Number] = {
            "model": Menu.of("model", dict.fromkeys([self._own, *published_models(), *SHAPES])),
            "hardware": Menu.of("hardware", dict.fromkeys([experiment.hardware, *_CLUSTERS])),
            **{field: Menu(label, {}) for field, label in LABELS.items()},
            "figure": _FIGURES,
            "rank": Number("of rank"),
        }
        starts = vars(self._given) | {"model": self._own, "figure": "memory", "rank": rank}
        super().__init__(controls, starts)

    @property
    def experiment(self) -> Experiment:
        """As the controls stand now."""
        chosen = self.chosen
        fields = {field: chosen[field] for field in ("hardware", *LABELS)}
        if chosen["model"] in SHAPES:
            fields |= {"model": chosen["model"], "shape": None}
        elif chosen["model"] != self._own:
            read = read_model(chosen["model"])
            fields |= {"model": read.model, "shape": ShapeChanges(**read.shape) if read.shape else None}
        return self._given.model_copy(update=fields)

    def offered(self) -> Mapping[str, Mapping[Any, str]]:
        """In each menu the values that are illegal beside the other controls say so."""
        x = self.experiment
        facts, menus = facts_of(x), {}
        for field in LABELS:
            allowed = _POWERS if field in ("nodes", "local_batch") else candidates(facts, field)
            menus[field] = {
                value: str(value) if next(faults(facts.vary(**{field: value})), None) is None else f"{value} (illegal)"
                for value in dict.fromkeys([*allowed, getattr(x, field)])
            }
        return menus

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
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
        verdict = f"legal · {'fits' if memory.fits else 'does not fit'} "
        verdict += f"({memory.worst_gib:.0f} of {memory.capacity_gib:.0f} GiB)"
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
        if chosen["figure"] == "memory":
            return words, memory_bars(memory, layout, gpu, width=NARROW)
        if chosen["figure"] == "pipeline":
            return words, pipeline_schedule(layout, x.pp_schedule)
        per_node, rank = x.gpus_per_node, chosen["rank"]
        return words, mesh_map(layout, gpus_per_node=per_node, rank=rank, nvlink_ranks=nvlink_ranks(x))


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
