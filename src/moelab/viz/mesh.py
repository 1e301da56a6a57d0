"""The mesh drawn: every GPU as a square in the box of its node, and whom one rank talks to along every axis.

One small map for each group of the chosen rank. Its colours are about the wire: peers in the same node are reached over
NVLink, peers in another node over the network, which is an order of magnitude slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.layout import Layout
from moelab.viz.cluster_grid import ClusterGrid
from moelab.viz.rank_groups import Group, coordinates, groups_of
from moelab.viz.theme import INK, new_figure

OTHER, NEAR, FAR = "#dfe3e8", "#56B4E9", "#D55E00"
TITLE_PX, SPACE_PX = 30, 22
"""Heights of a map's title and of the space under it."""


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """One map: its title, and the colour of each rank."""

    title: str
    color: Callable[[int], str]


def mesh_map(layout: Layout, *, gpus_per_node: int, rank: int = 0) -> go.Figure:
    """Nodes as boxes and GPUs as squares; one map for each group that a rank belongs to.

    Args:
        layout: resolved degrees.
        gpus_per_node: consecutive ranks that share a node.
        rank: whose groups are shown.

    Returns:
        The figure. Hovering over a square shows its rank and its place along every axis.

    Raises:
        BadInput: if there is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise BadInput(f"rank is {rank}; valid: 0 to {layout.world_size - 1}, the ranks of this layout")
    groups = groups_of(layout, rank, gpus_per_node=gpus_per_node)
    grid = ClusterGrid(gpus_per_node=gpus_per_node, nodes=-(-layout.world_size // gpus_per_node))
    panels = [_group_panel(group, rank, gpus_per_node) for group in groups]
    if layout.pp > 1:
        panels.append(_stage_panel(layout))
    rows = -(-len(panels) // 2)
    figure = new_figure(
        _finding(groups, rank),
        subtitle="Squares are GPUs in rank order, boxes are nodes; the star is the chosen rank. Hover for each rank's "
        "place on every axis.",
        height=110 + rows * (TITLE_PX + grid.height_px + SPACE_PX),
    )
    texts = [_hover(layout, each, gpus_per_node) for each in range(layout.world_size)]
    for place, panel in enumerate(panels):
        axes = _place_panel(figure, grid, panel.title, place, rows)
        _draw_panel(figure, grid, [panel.color(each) for each in range(layout.world_size)], texts, rank, axes)
    _draw_legend(figure)
    return figure.update_layout(hovermode="closest")


def _group_panel(group: Group, rank: int, gpus_per_node: int) -> _Panel:
    members, home = set(group.ranks), rank // gpus_per_node

    def color(each: int) -> str:
        if each not in members:
            return OTHER
        return NEAR if each // gpus_per_node == home else FAR

    nodes = "1 node" if len(group.nodes) == 1 else f"{len(group.nodes)} nodes"
    return _Panel(title=f"<b>{group.name} {group.degree}</b> · {nodes} · {group.carries}", color=color)


def _stage_panel(layout: Layout) -> _Panel:
    block = layout.world_size // layout.pp
    return _Panel(
        title=f"<b>pipeline ranks</b> 0 (light) to {layout.pp - 1} (dark) · {block} GPUs each",
        color=lambda each: _shade(each // block / (layout.pp - 1)),
    )


def _shade(part: float) -> str:
    """Green from light to dark."""
    light, dark = (206, 232, 222), (0, 92, 67)
    mixed = (round(low + (high - low) * part) for low, high in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _finding(groups: Sequence[Group], rank: int) -> str:
    if not groups:
        return f"Rank {rank} talks to no other rank"
    inside = [group.name for group in groups if len(group.nodes) == 1]
    outside = [(len(group.nodes), group.name) for group in groups if len(group.nodes) > 1]
    if not outside:
        return f"Rank {rank} talks inside its node only: {', '.join(inside)}"
    reaches = ", ".join(f"{count}{'' if place else ' nodes'} by {name}" for place, (count, name) in enumerate(outside))
    stays = f"; {' and '.join(inside)} stay{'s' if len(inside) == 1 else ''} in its node" if inside else ""
    return f"Rank {rank} reaches {reaches}{stays}"


def _hover(layout: Layout, rank: int, gpus_per_node: int) -> str:
    node, local = divmod(rank, gpus_per_node)
    place = coordinates(layout, rank)
    dense = ", ".join(f"{axis} {place[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    experts = f"<br>experts: efsdp {place['efsdp']}, ep {place['ep']}" if "ep" in place else ""
    return f"<b>rank {rank}</b>: node {node}, GPU {local}<br>{dense}{experts}"


def _place_panel(figure: go.Figure, grid: ClusterGrid, title: str, place: int, rows: int) -> dict[str, str]:
    """Axes and title of one map, two maps side by side; returns the names of its axes for traces."""
    row, column = divmod(place, 2)
    suffix = str(place + 1) if place else ""
    left, right = (0.0, 0.48) if column == 0 else (0.52, 1.0)
    pixel = 1.0 / rows / (TITLE_PX + grid.height_px + SPACE_PX)
    top = 1.0 - row / rows - TITLE_PX * pixel
    shared = {"visible": False, "fixedrange": True}
    x = {**shared, "domain": [left, right], "range": [-0.2, grid.width + 0.2], "anchor": f"y{suffix}"}
    y = {**shared, "domain": [top - grid.height_px * pixel, top], "range": [grid.height + 0.2, 0.2]}
    figure.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": {**y, "anchor": f"x{suffix}"}})
    figure.add_annotation(
        text=title,
        x=left,
        y=top,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 13, "color": INK},
    )
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _draw_panel(
    figure: go.Figure, grid: ClusterGrid, colors: Sequence[str], texts: Sequence[str], rank: int, axes: dict[str, str]
) -> None:
    figure.add_trace(grid.squares(colors, texts).update(axes))
    figure.add_trace(grid.boxes().update(axes))
    if grid.numbered:
        figure.add_trace(grid.numbers().update(axes))
    x, y = grid.square(rank)
    marker = _STAR if grid.numbered else {**_STAR, "size": 7}
    star = go.Scatter(x=[x], y=[y], mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    figure.add_trace(star.update(axes))


_STAR = {"symbol": "star", "size": 11, "color": "black", "line": {"color": "white", "width": 1}}


def _draw_legend(figure: go.Figure) -> None:
    square = {"symbol": "square", "size": 12}
    for name, marker in (
        ("chosen rank", _STAR),
        ("peer in its node (NVLink)", {**square, "color": NEAR}),
        ("peer in another node (network)", {**square, "color": FAR}),
        ("no peer", {**square, "color": OTHER}),
    ):
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, hoverinfo="skip"))
    figure.update_layout(legend={"y": 0.0, "yanchor": "top"}, margin={"l": 12, "r": 12, "b": 40})
