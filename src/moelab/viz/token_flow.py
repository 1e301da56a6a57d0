"""One token's dispatch drawn for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moelab.projection import METHODS, ExpertPlacement, RoutingModel
from moelab.viz.theme import new_figure
from moelab.viz.token_map import Hop, TokenMap, draw_wire_legend, hops, one_token, place_panel
from moelab.viz.traffic_labels import METHOD_LABELS, ROUTING_LABELS, counted


def token_flow(
    routing: RoutingModel, placement: ExpertPlacement, *, sender: int = 0, token: int = 0, seed: int = 0
) -> go.Figure:
    """One token's dispatch, drawn for each method side by side.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        sender: rank that has the token.
        token: which of that rank's tokens.
        seed: of the draw.

    Raises:
        BadInput: if there is no such rank, or the routing does not fit.
    """
    L = placement.local_ranks
    experts, held, touched = one_token(routing, placement, sender=sender, token=token, seed=seed)
    sent = {method: hops(experts, placement, method, sender=sender) for method in METHODS}
    figure = new_figure(
        _flow_finding(experts, held, touched, sender),
        subtitle=f"Token {token} of rank {sender}, {ROUTING_LABELS[routing.kind]} routing. A number counts the token's "
        f"experts on a GPU; a thick arrow carries several copies.{_hidden_nodes(touched)}",
        note="one simulated token",
        height=150 + 56 * max(2, len(touched.nodes)),
    )
    figure.update_layout(margin_t=figure.layout.margin.t + 40, height=figure.layout.height + 40)
    for index, method in enumerate(METHODS):
        title = f"<b>{METHOD_LABELS[method]}</b><br>{_hop_counts(sent[method], L)}"
        axes = place_panel(figure, index, len(METHODS), title, L, touched.height)
        touched.draw(figure, held, sent[method], sender=sender, axes=axes)
    draw_wire_legend(figure)
    return figure.update_layout(hovermode="closest", margin={"l": 10, "r": 10, "b": 40}, legend={"y": -0.02})


def _flow_finding(experts: Sequence[int], held: Mapping[int, int], touched: TokenMap, sender: int) -> str:
    nodes = len({rank // touched.placement.local_ranks for rank in held})
    return (
        f"A token's {len(experts)} experts lie on {counted(len(held), 'GPU')} of {counted(nodes, 'node')}"
        f"{'' if sender not in held else ', its own among them'}"
    )


def _hop_counts(sent: Sequence[Hop], local_ranks: int) -> str:
    far = sum(hop.copies for hop in sent if hop.sender // local_ranks != hop.receiver // local_ranks)
    near = sum(hop.copies for hop in sent) - far
    return f"{far} × network, {near} × NVLink"


def _hidden_nodes(touched: TokenMap) -> str:
    hidden = touched.placement.nodes - len(touched.nodes)
    return f" {counted(hidden, 'node')} without its experts not drawn." if hidden else ""
