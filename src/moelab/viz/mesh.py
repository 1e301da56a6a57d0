"""The mesh drawn: every GPU as a square in the box of its node, and whom one rank talks to along every axis.

One small map for each group of the chosen rank. Its colours are about the wire: peers in the same node are reached over
NVLink, peers in another node over the network, which is an order of magnitude slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.layout import Layout
from moelab.layout.mesh import Group, coordinates, groups_of
from moelab.viz.theme import FAR, INK, MUTED, NEAR, OTHER, new_figure

TITLE_PX, SPACE_PX = 30, 22
"""Heights of a map's title and of the space under it."""

GAP, LABEL_GAP = 0.7, 1.3
"""Space between boxes across, and above each for its number, in squares."""


def mesh_map(layout: Layout, *, gpus_per_node: int, rank: int = 0, nvlink_ranks: int = 0) -> go.Figure:
    """Nodes as boxes and GPUs as squares; one map for each group that a rank belongs to.

    Args:
        layout: resolved degrees.
        gpus_per_node: consecutive ranks that share a node.
        rank: whose groups are shown.
        nvlink_ranks: consecutive ranks that NVLink joins, if they are more than a node's: a box then has these.

    Returns:
        The figure. Hovering over a square shows its rank and its place along every axis.

    Raises:
        BadInput: if there is no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise BadInput(f"rank is {rank}; valid: 0 to {layout.world_size - 1}, the ranks of this layout")
    size, box = max(gpus_per_node, nvlink_ranks), "NVLink domain" if nvlink_ranks > gpus_per_node else "node"
    groups = groups_of(layout, rank, gpus_per_node=size)
    grid = ClusterGrid(gpus_per_node=size, nodes=-(-layout.world_size // size))
    everyone, home = range(layout.world_size), rank // size
    maps: dict[str, list[str]] = {}
    for group in groups:
        nodes, peers = f"1 {box}" if len(group.nodes) == 1 else f"{len(group.nodes)} {box}s", set(group.ranks)
        maps[f"<b>{group.name} {group.degree}</b> · {nodes} · {group.carries}"] = [
            OTHER if each not in peers else NEAR if each // size == home else FAR for each in everyone
        ]
    if layout.pp > 1:
        block = layout.world_size // layout.pp
        title = f"<b>pipeline ranks</b> 0 (light) to {layout.pp - 1} (dark) · {block} GPUs each"
        maps[title] = [_shade(each // block / (layout.pp - 1)) for each in everyone]
    rows = -(-len(maps) // 2)
    figure = new_figure(
        _finding(groups, rank, box),
        subtitle=f"Squares are GPUs in rank order, boxes are {box}s; the star is the chosen rank. Hover for each "
        "rank's place on every axis.",
        height=110 + rows * (TITLE_PX + grid.height_px + SPACE_PX),
    )
    texts = [_hover(layout, each, gpus_per_node) for each in everyone]
    x, y = grid.square(rank)
    marker = _STAR if grid.numbered else {**_STAR, "size": 7}
    star = go.Scatter(x=[x], y=[y], mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    for place, (title, colors) in enumerate(maps.items()):
        axes = _place_map(figure, grid, title, place, rows)
        for trace in (grid.squares(colors, texts), grid.boxes(), *([grid.numbers()] if grid.numbered else []), star):
            figure.add_trace(trace.update(axes))
    for name, look in (
        ("chosen rank", _STAR),
        (f"peer in its {box} (NVLink)", {**_SQUARE, "color": NEAR}),
        (f"peer in another {box} (network)", {**_SQUARE, "color": FAR}),
        ("no peer", {**_SQUARE, "color": OTHER}),
    ):
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=look, name=name, hoverinfo="skip"))
    figure.update_layout(legend={"y": 0.0, "yanchor": "top"}, margin={"l": 12, "r": 12, "b": 40})
    return figure.update_layout(hovermode="closest")


_STAR = {"symbol": "star", "size": 11, "color": "black", "line": {"color": "white", "width": 1}}
_SQUARE = {"symbol": "square", "size": 12}


def _shade(part: float) -> str:
    """Green from light to dark."""
    light, dark = (206, 232, 222), (0, 92, 67)
    mixed = (round(low + (high - low) * part) for low, high in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _finding(groups: Sequence[Group], rank: int, box: str) -> str:
    if not groups:
        return f"Rank {rank} talks to no other rank"
    inside = [group.name for group in groups if len(group.nodes) == 1]
    outside = [(len(group.nodes), group.name) for group in groups if len(group.nodes) > 1]
    if not outside:
        return f"Rank {rank} talks inside its {box} only: {', '.join(inside)}"
    reaches = ", ".join(
        f"{count}{'' if place else f' {box}s'} by {name}" for place, (count, name) in enumerate(outside)
    )
    stays = f"; {' and '.join(inside)} stay{'s' if len(inside) == 1 else ''} in its {box}" if inside else ""
    return f"Rank {rank} reaches {reaches}{stays}"


def _hover(layout: Layout, rank: int, gpus_per_node: int) -> str:
    node, local = divmod(rank, gpus_per_node)
    place = coordinates(layout, rank)
    dense = ", ".join(f"{axis} {place[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    experts = f"<br>experts: efsdp {place['efsdp']}, ep {place['ep']}" if "ep" in place else ""
    return f"<b>rank {rank}</b>: node {node}, GPU {local}<br>{dense}{experts}"


def _place_map(figure: go.Figure, grid: ClusterGrid, title: str, place: int, rows: int) -> dict[str, str]:
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
    corner = {"x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    figure.add_annotation(text=title, showarrow=False, font={"size": 13, "color": INK}, **corner)
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


@dataclass(frozen=True, kw_only=True)
class ClusterGrid:
    """Where each GPU's square lies; x runs to the right and y down, in squares.

    Attributes:
        gpus_per_node: squares of a box.
        nodes: boxes.
    """

    gpus_per_node: int
    nodes: int

    @property
    def columns(self) -> int:
        """Boxes side by side."""
        return 8 if self.numbered else 16 if self.nodes <= 256 else 32

    @property
    def numbered(self) -> bool:
        """Whether there is room for the numbers of nodes."""
        return self.nodes <= 64

    @property
    def across(self) -> int:
        """Squares side by side in a box."""
        return min(4, self.gpus_per_node)

    @property
    def down(self) -> int:
        """Rows of squares of a box."""
        return -(-self.gpus_per_node // self.across)

    @property
    def width(self) -> float:
        """Of the map; a small cluster does not fill it, so that squares stay small."""
        return self.columns * (self.across + GAP) - GAP

    @property
    def height(self) -> float:
        """Of the map."""
        return -(-self.nodes // self.columns) * (self.down + LABEL_GAP)

    @property
    def height_px(self) -> int:
        """Height that shows it well."""
        return round(self.height * (15 if self.nodes <= 32 else 11 if self.numbered else 6))

    def corner(self, node: int) -> tuple[float, float]:
        """Upper left corner of a node's box."""
        row, column = divmod(node, self.columns)
        return column * (self.across + GAP), row * (self.down + LABEL_GAP) + LABEL_GAP

    def square(self, rank: int) -> tuple[float, float]:
        """Centre of a GPU's square."""
        node, local = divmod(rank, self.gpus_per_node)
        x, y = self.corner(node)
        return x + local % self.across + 0.5, y + local // self.across + 0.5

    def squares(self, colors: Sequence[str], texts: Sequence[str]) -> go.Heatmap:
        """Squares of all ranks.

        Args:
            colors: of each rank.
            texts: shown when the pointer is on a rank's square.
        """
        ranks = range(len(colors))
        xs = sorted({self.square(rank)[0] for rank in ranks})
        ys = sorted({self.square(rank)[1] for rank in ranks})
        palette = sorted(set(colors))
        # A column or row of nothing between boxes, since a heatmap's cells touch.
        columns, rows = _with_gaps(xs), _with_gaps(ys)
        z: list[list[int | None]] = [[None] * len(columns) for _ in rows]
        text = [[""] * len(columns) for _ in rows]
        for rank in ranks:
            x, y = self.square(rank)
            z[rows.index(y)][columns.index(x)] = palette.index(colors[rank])
            text[rows.index(y)][columns.index(x)] = texts[rank]
        return go.Heatmap(
            x=_edges(columns),
            y=_edges(rows),
            z=z,
            text=text,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorscale=_steps(palette),
            zmin=-0.5,
            zmax=len(palette) - 0.5,
            showscale=False,
            xgap=1 if self.numbered else 0,
            ygap=1 if self.numbered else 0,
        )

    def boxes(self) -> go.Scatter:
        """Outlines of all nodes, as one line with breaks."""
        x: list[float | None] = []
        y: list[float | None] = []
        for node in range(self.nodes):
            left, top = (edge - 0.15 for edge in self.corner(node))
            right, bottom = left + self.across + 0.3, top + self.down + 0.3
            x += [left, right, right, left, left, None]
            y += [top, top, bottom, bottom, top, None]
        return go.Scatter(x=x, y=y, mode="lines", line={"color": MUTED, "width": 1}, hoverinfo="skip", showlegend=False)

    def numbers(self) -> go.Scatter:
        """Number of each node, above its box."""
        corners = [self.corner(node) for node in range(self.nodes)]
        return go.Scatter(
            x=[x for x, _ in corners],
            y=[y - 0.2 for _, y in corners],
            text=[str(node) for node in range(self.nodes)],
            mode="text",
            textposition="top right",
            textfont={"size": 10, "color": MUTED},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
        )


def _with_gaps(centres: Sequence[float]) -> list[float]:
    """Centres of squares, and of the empty cell wherever two are further apart than a square."""
    cells = [centres[0]]
    for before, after in pairwise(centres):
        if after - before > 1.0:
            cells.append((before + after) / 2)
        cells.append(after)
    return cells


def _edges(cells: Sequence[float]) -> list[float]:
    """Edges of the cells: squares are one wide, gaps take what lies between."""
    edges = [cells[0] - 0.5]
    for cell in cells:
        edges.append(edges[-1] + 2 * (cell - edges[-1]))
    return edges


def _steps(palette: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale without blending."""
    count = len(palette)
    return [(edge / count, color) for place, color in enumerate(palette) for edge in (place, place + 1)]
