"""A cluster as a map: a box for each node, a square for each GPU, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go

from moelab.viz.theme import MUTED

GAP, LABEL_GAP = 0.7, 1.3
"""Space between boxes across, and above each for its number, in squares."""
Color = str


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

    def squares(self, colors: Sequence[Color], texts: Sequence[str]) -> go.Heatmap:
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


def _steps(palette: Sequence[Color]) -> list[tuple[float, Color]]:
    """A colour scale without blending."""
    count = len(palette)
    return [(edge / count, color) for place, color in enumerate(palette) for edge in (place, place + 1)]
