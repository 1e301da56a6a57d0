"""One token on its way: nodes as boxes, GPUs as squares, an arrow for every copy that crosses a wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.projection import METHODS, ExpertPlacement, Method, RoutingModel, draw_expert_ids
from moelab.projection.traffic import require_method
from moelab.viz.draw import STAR, legend_entry, place_map
from moelab.viz.theme import FAR, MUTED, NEAR, OTHER, counted, new_figure

METHOD_LABELS: dict[Method, str] = {
    "standard": "standard all-to-all",
    "deepep_direct": "DeepEP, once per rank",
    "deepep_hybrid": "DeepEP, once per node",
}
ROUTING_LABELS = {
    "round_robin": "forced round-robin",
    "random_balanced": "balanced random",
    "uniform": "uniform random",
    "group_limited": "group-limited",
    "group_by_score": "group-limited by score",
    "skewed": "skewed",
    "measured": "measured-load",
}
CHOSEN = "#009E73"
"""A GPU that holds an expert of the token."""
ROW_HEIGHT = 1.9
"""Of a node's row of squares and the gap under it, in squares."""


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
    held = Counter(expert // placement.experts_per_rank for expert in experts)
    if method != "deepep_hybrid":
        copies = {rank: count if method == "standard" else 1 for rank, count in sorted(held.items())}
        return tuple(Hop(sender=sender, receiver=rank, copies=n) for rank, n in copies.items() if rank != sender)
    relays = {node: node * L + sender % L for node in sorted({rank // L for rank in held})}
    ways = [
        *((sender, relay) for relay in relays.values()),
        *((relays[rank // L], rank) for rank in sorted(held)),
    ]
    return tuple(Hop(sender=start, receiver=end, copies=1) for start, end in ways if start != end)


def token_flow(routing: RoutingModel, placement: ExpertPlacement, *, token: int = 0, seed: int = 0) -> go.Figure:
    """Dispatch of one of rank 0's tokens, drawn for each method side by side.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        token: which of the rank's tokens.
        seed: of the draw.

    Raises:
        BadInput: if the routing does not fit.
    """
    drawn = _one_token(routing, placement, sender=0, token=token, seed=seed)
    panels = []
    for method in METHODS:
        ways = hops(drawn.experts, placement, method, sender=0)
        far = sum(hop.copies for hop in ways if drawn.crosses(hop))
        near = sum(hop.copies for hop in ways) - far
        panels.append((f"<b>{METHOD_LABELS[method]}</b><br>{far} × network, {near} × NVLink", ways, False))
    gpus, nodes = counted(len(drawn.held), "GPU"), counted(len({rank // drawn.across for rank in drawn.held}), "node")
    hidden = placement.nodes - len(drawn.nodes)
    unseen = f" {counted(hidden, 'node')} without its experts not drawn." if hidden else ""
    return drawn.draw(
        panels,
        f"A token's {len(drawn.experts)} experts lie on {gpus} of {nodes}"
        f"{'' if 0 not in drawn.held else ', its own among them'}",
        subtitle=f"Token {token} of rank 0, {ROUTING_LABELS[routing.kind]} routing. A number counts the token's "
        f"experts on a GPU; a thick arrow carries several copies.{unseen}",
    )


def forwarding(routing: RoutingModel, placement: ExpertPlacement, *, sender: int = 0, token: int = 0) -> go.Figure:
    """DeepEP's hierarchical mode step by step: to each node once, on inside the node, and the way back.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        sender: rank that has the token.
        token: which of that rank's tokens.

    Raises:
        BadInput: if there is no such rank, or the routing does not fit.
    """
    drawn = _one_token(routing, placement, sender=sender, token=token, seed=0)
    ways = hops(drawn.experts, placement, "deepep_hybrid", sender=sender)
    far = [hop for hop in ways if drawn.crosses(hop)]
    near = [hop for hop in ways if not drawn.crosses(hop)]
    copies = f"{len(far)} {'copy' if len(far) == 1 else 'copies'} over the network: nodes forward among themselves"
    return drawn.draw(
        (
            (f"<b>1 dispatch</b><br>{len(far)} × network, to its own place", far, False),
            (f"<b>2 forward</b><br>{len(near)} × NVLink, to the experts", near, False),
            (f"<b>3 combine</b><br>sums: {len(near)} × NVLink, {len(far)} × network", ways, True),
        ),
        f"{len(drawn.experts)} experts, {copies if far else 'all reached inside the node'}",
        subtitle=f"Token {token} of rank {sender}. On the way back each node adds up its experts' outputs, so that one "
        "row crosses the network; gradients take the same ways in the other order.",
    )


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A token, and the map of the nodes that it touches; no other is drawn.

    Attributes:
        experts: of the token.
        held: how many of them a rank has; only ranks with one.
        sender: rank that has the token.
        nodes: that are drawn, in order.
        across: ranks of a node.
    """

    experts: list[int]
    held: Mapping[int, int]
    sender: int
    nodes: tuple[int, ...]
    across: int

    def crosses(self, hop: Hop) -> bool:
        """Whether a hop goes over the network."""
        return hop.sender // self.across != hop.receiver // self.across

    def center(self, rank: int) -> tuple[float, float]:
        """Middle of a GPU's square; y runs down."""
        node, place = divmod(rank, self.across)
        return place + 0.5, self.nodes.index(node) * ROW_HEIGHT + 0.5

    def draw(self, panels: Sequence[tuple[str, Sequence[Hop], bool]], finding: str, *, subtitle: str) -> go.Figure:
        """Panels side by side.

        Args:
            panels: title, arrows, and whether these point the other way, as in combine.
            finding: of the figure.
            subtitle: of the figure.
        """
        height = 150 + 56 * max(2, len(self.nodes))
        figure = new_figure(finding, subtitle=subtitle, note="one simulated token", height=height)
        figure.update_layout(margin_t=figure.layout.margin.t + 40, height=figure.layout.height + 40)
        for index, (title, drawn, back) in enumerate(panels):
            share = 1.0 / len(panels)
            axes = place_map(
                figure,
                index,
                title,
                x={"domain": [index * share + 0.006, (index + 1) * share - 0.006], "range": [-0.6, self.across + 0.6]},
                y={"range": [len(self.nodes) * ROW_HEIGHT + 0.1, -0.75]},
            )
            figure.add_trace(self._squares().update(axes))
            for hop in drawn:
                figure.add_trace(self._arrow(hop, back=back).update(axes))
            self._draw_node_names(figure, axes)
            x, y = self.center(self.sender)
            look = {"mode": "markers", "marker": {**STAR, "size": 13}, "hoverinfo": "skip", "showlegend": False}
            figure.add_trace(go.Scatter(x=[x], y=[y], **look, **axes))
        for name, look in _LEGEND.items():
            figure.add_trace(legend_entry(name, **look))
        return figure.update_layout(hovermode="closest", margin={"l": 10, "r": 10, "b": 40}, legend={"y": -0.02})

    def _squares(self) -> go.Scatter:
        """GPUs, with the number of the token's experts in each."""
        ranks = [node * self.across + place for node in self.nodes for place in range(self.across)]
        x, y = zip(*(self.center(rank) for rank in ranks), strict=True)
        wide = self.across > 8
        colors = [CHOSEN if rank in self.held else OTHER for rank in ranks]
        return go.Scatter(
            x=x,
            y=y,
            mode="markers+text",
            marker={"symbol": "square", "size": 11 if wide else 19, "color": colors},
            text=[f"<b>{self.held[rank]}</b>" if rank in self.held and not wide else "" for rank in ranks],
            textfont={"color": "white", "size": 12},
            hovertext=[f"rank {rank}: {self.held.get(rank, 0)} of the token's experts" for rank in ranks],
            hoverinfo="text",
            showlegend=False,
        )

    def _draw_node_names(self, figure: go.Figure, axes: Mapping[str, str]) -> None:
        """Above each row, at the end that is far from the sender, where few arrows pass."""
        left = self.sender % self.across >= self.across / 2
        for index, node in enumerate(self.nodes):
            at = {"x": 0 if left else self.across, "y": index * ROW_HEIGHT - 0.28}
            place = {"xref": axes["xaxis"], "yref": axes["yaxis"], "xanchor": "left" if left else "right"}
            look = {"borderpad": 1, "bgcolor": "rgba(255,255,255,0.6)", "font": {"size": 11, "color": MUTED}}
            figure.add_annotation(text=f"node {node}", showarrow=False, **at, **place, **look)

    def _arrow(self, hop: Hop, *, back: bool) -> go.Scatter:
        ends = np.array([self.center(hop.sender), self.center(hop.receiver)])
        start, end = ends[::-1] if back else ends
        across, down = abs(end - start)
        if not self.crosses(hop):  # below its row of squares
            bend = np.array([0.0, 0.75 + 0.12 * across])
        elif across > 0.1:
            bend = np.zeros(2)
        else:  # between nodes, from a place to the same place: round what lies between
            bend = np.array([(-1.0 if start[0] < self.across / 2 else 1.0) * min(0.6 + 0.25 * down, 2.1), 0.0])
        t = np.linspace(0.04, 0.9, 12)[:, None]
        path = (1 - t) ** 2 * start + 2 * t * (1 - t) * ((start + end) / 2 + bend) + t**2 * end
        color, name = (FAR, "network") if self.crosses(hop) else (NEAR, "NVLink")
        size = [0] * 11 + [9 + hop.copies // 2]  # the marker of the last point alone is seen: the arrow's head
        return go.Scatter(
            x=path[:, 0],
            y=path[:, 1],
            mode="lines+markers",
            line={"color": color, "width": 1.5 + 0.5 * min(hop.copies, 8)},
            marker={"symbol": "arrow", "angleref": "previous", "size": size, "color": color},
            hovertext=f"{hop.copies} × over {name}, rank {hop.sender} → {hop.receiver}",
            hoverinfo="text",
            showlegend=False,
        )


_LEGEND: Mapping[str, dict[str, Any]] = {
    "network": {"mode": "lines", "line": {"color": FAR, "width": 3}},
    "NVLink": {"mode": "lines", "line": {"color": NEAR, "width": 3}},
    "the token": {"mode": "markers", "marker": {"symbol": "star", "size": 12, "color": "black"}},
    "GPU with so many of its experts": {"mode": "markers", "marker": {"symbol": "square", "size": 13, "color": CHOSEN}},
}


def _one_token(routing: RoutingModel, placement: ExpertPlacement, *, sender: int, token: int, seed: int) -> _Token:
    """Draw one token's experts."""
    if not 0 <= sender < placement.ep:
        raise BadInput(f"sender is {sender}; valid: 0 to {placement.ep - 1}, the ranks of the group")
    experts = draw_expert_ids(routing, placement, token + 1, rank=sender, seed=seed)[token].tolist()
    held = Counter(expert // placement.experts_per_rank for expert in experts)
    nodes = sorted({rank // placement.local_ranks for rank in (*held, sender)})
    return _Token(experts=experts, held=held, sender=sender, nodes=tuple(nodes), across=placement.local_ranks)
