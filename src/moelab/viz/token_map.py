"""One token drawn on its way: nodes as boxes, GPUs as squares, an arrow for every copy that crosses a wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.projection import ExpertPlacement, RoutingModel, draw_expert_ids
from moelab.projection.traffic import Method, require_method
from moelab.viz.mesh import FAR, NEAR, OTHER
from moelab.viz.theme import INK, MUTED

CHOSEN = "#009E73"
"""A GPU that holds an expert of the token."""
NODE_HEIGHT, NODE_GAP = 1.0, 0.9


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Copies of the token that go from one rank to another."""

    sender: int
    receiver: int
    copies: int


def hops(experts: Sequence[int], placement: ExpertPlacement, method: Method, *, sender: int) -> tuple[Hop, ...]:
    """The way of one token.

    Args:
        experts: of the token.
        placement: where they are.
        method: how tokens are sent.
        sender: rank that has the token.

    Returns:
        Hops between different ranks; the network's first where there are two stages.
    """
    require_method(method)
    L = placement.local_ranks
    copies: dict[int, int] = {}
    for expert in experts:
        rank = expert // placement.experts_per_rank
        copies[rank] = copies.get(rank, 0) + 1 if method == "standard" else 1
    if method != "deepep_hybrid":
        return tuple(
            Hop(sender=sender, receiver=rank, copies=n) for rank, n in sorted(copies.items()) if rank != sender
        )
    nodes = sorted({rank // L for rank in copies})
    relays = {node: node * L + sender % L for node in nodes}
    far = [Hop(sender=sender, receiver=relays[node], copies=1) for node in nodes if node != sender // L]
    near = [
        Hop(sender=relays[rank // L], receiver=rank, copies=1) for rank in sorted(copies) if rank != relays[rank // L]
    ]
    return (*far, *near)


@dataclass(frozen=True, kw_only=True)
class TokenMap:
    """Places of nodes and GPUs in one panel; only nodes that the token touches are drawn.

    Attributes:
        placement: gives ranks and nodes.
        nodes: that are drawn, in order.
    """

    placement: ExpertPlacement
    nodes: tuple[int, ...]

    @property
    def height(self) -> float:
        """Of the panel, in squares."""
        return len(self.nodes) * (NODE_HEIGHT + NODE_GAP)

    def center(self, rank: int) -> tuple[float, float]:
        """Middle of a GPU's square; y runs down."""
        node, place = divmod(rank, self.placement.local_ranks)
        return place + 0.5, self.nodes.index(node) * (NODE_HEIGHT + NODE_GAP) + 0.5

    def draw(
        self,
        figure: go.Figure,
        held: dict[int, int],
        drawn: Sequence[Hop],
        *,
        sender: int,
        axes: dict[str, str],
        back: bool = False,
    ) -> None:
        """Squares, the number of the token's experts in each, arrows, and a star where the token is.

        Args:
            figure: to draw into.
            held: experts of the token by rank.
            drawn: arrows.
            sender: rank that has the token.
            axes: names of the panel's axes.
            back: arrows point the other way, as in combine.
        """
        figure.add_trace(self._squares(held).update(axes))
        for hop in drawn:
            figure.add_trace(self._arrow(hop, back=back).update(axes))
        self._draw_node_names(figure, axes, left=sender % self.placement.local_ranks >= self.placement.local_ranks / 2)
        x, y = self.center(sender)
        star = {"symbol": "star", "size": 13, "color": "black", "line": {"color": "white", "width": 1}}
        figure.add_trace(
            go.Scatter(x=[x], y=[y], mode="markers", marker=star, hoverinfo="skip", showlegend=False, **axes)
        )

    def _squares(self, held: dict[int, int]) -> go.Scatter:
        L = self.placement.local_ranks
        ranks = [node * L + place for node in self.nodes for place in range(L)]
        x, y = zip(*(self.center(rank) for rank in ranks), strict=True)
        return go.Scatter(
            x=x,
            y=y,
            mode="markers+text",
            marker={
                "symbol": "square",
                "size": 19 if L <= 8 else 11,
                "color": [CHOSEN if rank in held else OTHER for rank in ranks],
            },
            text=[f"<b>{held[rank]}</b>" if rank in held and L <= 8 else "" for rank in ranks],
            textfont={"color": "white", "size": 12},
            hovertext=[f"rank {rank}: {held.get(rank, 0)} of the token's experts" for rank in ranks],
            hoverinfo="text",
            showlegend=False,
        )

    def _draw_node_names(self, figure: go.Figure, axes: dict[str, str], *, left: bool) -> None:
        """Above each row, at the end that is far from the sender, where few arrows pass."""
        for index, node in enumerate(self.nodes):
            figure.add_annotation(
                text=f"node {node}",
                x=0 if left else self.placement.local_ranks,
                y=index * (NODE_HEIGHT + NODE_GAP) - 0.28,
                xref=axes["xaxis"],
                yref=axes["yaxis"],
                xanchor="left" if left else "right",
                showarrow=False,
                borderpad=1,
                bgcolor="rgba(255,255,255,0.6)",
                font={"size": 11, "color": MUTED},
            )

    def _arrow(self, hop: Hop, *, back: bool) -> go.Scatter:
        ends = np.array([self.center(hop.sender), self.center(hop.receiver)])
        L = self.placement.local_ranks
        far = hop.sender // L != hop.receiver // L
        start, end = ends[::-1] if back else ends
        middle = (start + end) / 2 + (_bow(start, end) if not far else _lean(start, end, L))
        t = np.linspace(0.04, 0.9, 12)[:, None]
        path = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * end
        color, name = (FAR, "network") if far else (NEAR, "NVLink")
        return go.Scatter(
            x=path[:, 0],
            y=path[:, 1],
            mode="lines+markers",
            line={"color": color, "width": 1.5 + 0.5 * min(hop.copies, 8)},
            marker={
                "symbol": "arrow",
                "angleref": "previous",
                "size": [0] * 11 + [9 + hop.copies // 2],
                "color": color,
            },
            hovertext=f"{hop.copies} × over {name}, rank {hop.sender} → {hop.receiver}",
            hoverinfo="text",
            showlegend=False,
        )


def _bow(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Arrows within a node pass below its row of squares."""
    return np.array([0.0, 0.75 + 0.12 * abs(end[0] - start[0])])


def _lean(start: np.ndarray, end: np.ndarray, across: int) -> np.ndarray:
    """Arrows between nodes of the same place go round what lies between them."""
    if abs(end[0] - start[0]) > 0.1:
        return np.zeros(2)
    outwards = -1.0 if start[0] < across / 2 else 1.0
    return np.array([outwards * min(0.6 + 0.25 * abs(end[1] - start[1]), 2.1), 0.0])


def draw_wire_legend(figure: go.Figure) -> None:
    """What the colours mean."""
    looks = (
        ("network", {"mode": "lines", "line": {"color": FAR, "width": 3}}),
        ("NVLink", {"mode": "lines", "line": {"color": NEAR, "width": 3}}),
        ("the token", {"mode": "markers", "marker": {"symbol": "star", "size": 12, "color": "black"}}),
        (
            "GPU with so many of its experts",
            {"mode": "markers", "marker": {"symbol": "square", "size": 13, "color": CHOSEN}},
        ),
    )
    for name, look in looks:
        figure.add_trace(go.Scatter(x=[None], y=[None], name=name, hoverinfo="skip", **look))


def place_panel(figure: go.Figure, index: int, count: int, title: str, width: float, height: float) -> dict[str, str]:
    """Axes of one of ``count`` panels side by side; returns their names for traces.

    Args:
        figure: to draw into.
        index: of the panel.
        count: of panels.
        title: lines above it.
        width: of the panel in squares.
        height: likewise.
    """
    suffix = str(index + 1) if index else ""
    share = 1.0 / count
    domain = [index * share + 0.006, (index + 1) * share - 0.006]
    shared = {"visible": False, "fixedrange": True}
    x = {**shared, "domain": domain, "range": [-0.6, width + 0.6], "anchor": f"y{suffix}"}
    y = {**shared, "range": [height + 0.1, -0.75], "anchor": f"x{suffix}"}
    figure.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
    figure.add_annotation(
        text=title,
        x=domain[0],
        y=1.0,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="bottom",
        align="left",
        showarrow=False,
        font={"size": 13, "color": INK},
    )
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def one_token(
    routing: RoutingModel, placement: ExpertPlacement, *, sender: int, token: int, seed: int
) -> tuple[list[int], dict[int, int], TokenMap]:
    """Draw one token's experts, and map the nodes that it touches.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        sender: rank that has the token.
        token: which of that rank's tokens.
        seed: of the draw.

    Returns:
        Its experts, how many of them each rank has (only ranks with one), and the map.

    Raises:
        BadInput: if there is no such rank, or the routing does not fit.
    """
    if not 0 <= sender < placement.ep:
        raise BadInput(f"sender is {sender}; valid: 0 to {placement.ep - 1}, the ranks of the group")
    experts = draw_expert_ids(routing, placement, token + 1, rank=sender, seed=seed)[token].tolist()
    ranks = [expert // placement.experts_per_rank for expert in experts]
    nodes = sorted({rank // placement.local_ranks for rank in (*ranks, sender)})
    held = {rank: ranks.count(rank) for rank in set(ranks)}
    return experts, held, TokenMap(placement=placement, nodes=tuple(nodes))
