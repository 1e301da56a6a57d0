"""The traffic of expert parallelism drawn: how far tokens go, from whom to whom, and how many bytes by degree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from moelab.model import Precision
from moelab.projection import (
    METHODS,
    ExpertPlacement,
    Kind,
    Method,
    OnWires,
    RoutingModel,
    distinct_destinations,
    draw_expert_ids,
    expected_destinations,
    expected_rows,
    layer_bytes,
    simulate_rows,
)
from moelab.viz.theme import INK
from moelab.viz.token_flow import token_flow
from moelab.viz.traffic_labels import (
    DERIVED,
    METHOD_LABELS,
    METHOD_LOOKS,
    ROUTING_LABELS,
    ROUTING_LOOKS,
    panels,
    placement_words,
)
from moelab.viz.traffic_savings import move_times, saving_by_routing

__all__ = [
    "METHOD_LABELS",
    "bytes_by_ep",
    "destination_histogram",
    "move_times",
    "saving_by_routing",
    "token_flow",
    "traffic_matrix",
]


def destination_histogram(
    routings: Sequence[RoutingModel], placement: ExpertPlacement, *, tokens: int = 4096, seed: int = 0
) -> go.Figure:
    """How many ranks and nodes tokens reach, as shares of all tokens, by routing.

    Args:
        routings: to compare.
        placement: where the experts are.
        tokens: drawn for each routing.
        seed: of the draw.
    """
    means = [expected_destinations(routing, placement) for routing in routings]
    pairs = zip(routings, means, strict=True)
    said = ", ".join(f"{ROUTING_LABELS[routing.kind]} {mean.ranks:.2f}" for routing, mean in pairs)
    figure = panels(
        f"Ranks that a token reaches: {said}",
        ("distinct ranks of a token", "distinct nodes of a token"),
        subtitle=f"Share of {tokens:,} drawn tokens for each routing; {placement_words(placement)}. In the "
        "title: means.",
        note="simulated routing",
    )
    for routing in routings:
        ids_TK = draw_expert_ids(routing, placement, tokens, seed=seed)
        color, pattern = ROUTING_LOOKS[routing.kind]
        for column, size in ((1, placement.experts_per_rank), (2, placement.experts_per_node)):
            counts = np.bincount(distinct_destinations(ids_TK, size))[1:]
            most = min(placement.top_k, placement.ep if column == 1 else placement.nodes)
            shares = 100 * np.pad(counts, (0, max(0, most - len(counts)))) / tokens
            bar = go.Bar(
                x=list(range(1, most + 1)),
                y=shares,
                name=ROUTING_LABELS[routing.kind],
                legendgroup=routing.kind,
                showlegend=column == 1,
                marker={"color": color, "pattern": {"shape": pattern, "fgcolor": "white", "size": 5}},
                hovertemplate="%{x}: %{y:.1f} %",
            )
            figure.add_trace(bar, row=1, col=column)
    figure.update_xaxes(dtick=1, showgrid=False)
    figure.update_yaxes(title_text="share of tokens (%)", col=1)
    return figure.update_layout(barmode="group", bargap=0.15)


def traffic_matrix(
    routing: RoutingModel,
    placement: ExpertPlacement,
    *,
    tokens: int,
    hidden: int,
    precision: Precision = "bf16",
    seed: int = 0,
) -> go.Figure:
    """Bytes of one dispatch from rank to rank, a heat map for each method.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        tokens: of each rank.
        hidden: elements of a token.
        precision: that tokens travel in.
        seed: of the draw.
    """
    counts = {m: simulate_rows(routing, placement, m, tokens=tokens, seed=seed) for m in METHODS}
    scale = layer_bytes(OnWires(nvlink=0, network=1, local=0), hidden, dispatch_precision=precision).dispatch.network
    megabytes = {m: (count.nvlink_SR + count.network_SR) * scale / 1e6 for m, count in counts.items()}
    network = {m: count.mean.network * scale / 1e6 for m, count in counts.items()}
    figure = panels(
        _matrix_finding(placement, network),
        tuple(METHOD_LABELS[m] for m in METHODS),
        subtitle=f"MB of one dispatch, {ROUTING_LABELS[routing.kind]} routing, {tokens:,} tokens a rank, hidden "
        f"{hidden:,}, {precision.upper()}; {placement_words(placement)}. Lines part nodes; what "
        "stays in a rank is left out.",
        note="simulated routing",
        columns=3,
        height=340,
    )
    for column, method in enumerate(METHODS, start=1):
        trace = go.Heatmap(
            z=np.round(np.where(np.eye(placement.ep, dtype=bool), np.nan, megabytes[method]), 3),
            coloraxis="coloraxis",
            hovertemplate="rank %{y} → rank %{x}: %{z:.1f} MB<extra></extra>",
        )
        figure.add_trace(trace, row=1, col=column)
        for edge in range(placement.local_ranks, placement.ep, placement.local_ranks):
            line = {"line": {"color": INK, "width": 0.7}, "row": 1, "col": column}
            figure.add_hline(y=edge - 0.5, **line)
            figure.add_vline(x=edge - 0.5, **line)
    figure.update_xaxes(title_text="to rank", showgrid=False, constrain="domain")
    figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain")
    for axis, anchor in zip(("yaxis", "yaxis2", "yaxis3"), ("x", "x2", "x3"), strict=True):
        figure.layout[axis].update(scaleanchor=anchor, scaleratio=1)
    figure.update_yaxes(title_text="from rank", col=1)
    scale_bar = {"title": {"text": "MB", "side": "top"}, "thickness": 12, "len": 0.8}
    figure.update_layout(coloraxis={"colorscale": "Blues", "cmin": 0, "colorbar": scale_bar}, hovermode="closest")
    return figure


def _matrix_finding(placement: ExpertPlacement, network: Mapping[Method, float]) -> str:
    if placement.nodes == 1:
        return "All ranks share a node: every pair exchanges tokens over NVLink"
    return (
        f"Over the network a rank sends {network['standard']:,.0f} MB to everyone; with DeepEP, once per node, "
        f"{network['deepep_hybrid']:,.0f} MB, to the GPUs of its own place only"
    )


def bytes_by_ep(
    routings: Sequence[RoutingModel],
    placement: ExpertPlacement,
    *,
    tokens: int,
    hidden: int,
    precision: Precision = "bf16",
) -> go.Figure:
    """Bytes that a rank puts on each wire in one MoE layer, against the expert-parallel degree.

    Args:
        routings: one or two; the first with solid lines, the second with dotted ones.
        placement: experts, top-k and ranks per node; the degree varies up to twice the placement's.
        tokens: of each rank.
        hidden: elements of a token.
        precision: of dispatch and of combine's gradient.
    """
    degrees = _degrees(placement)
    places = [
        ExpertPlacement(
            experts=placement.experts, top_k=placement.top_k, ep=ep, ranks_per_node=placement.ranks_per_node
        )
        for ep in degrees
    ]
    sent = {
        (routing.kind, m): [
            layer_bytes(
                expected_rows(expected_destinations(routing, p), p, m).times(tokens),
                hidden,
                dispatch_precision=precision,
            ).total
            for p in places
        ]
        for routing in routings
        for m in METHODS
    }
    figure = panels(
        _ep_finding(routings[0], degrees, sent, placement),
        ("over the network", "over NVLink"),
        subtitle=f"GB that a rank sends in one MoE layer, dispatch and combine, forward and backward; {tokens:,} "
        f"tokens a rank, hidden {hidden:,}, {precision.upper()} dispatch, nodes of {placement.ranks_per_node}. The "
        "standard all-to-all sends the same under any routing.",
        note=DERIVED,
    )
    for (kind, method), amounts in sent.items():
        color, symbol = METHOD_LOOKS[method]
        first = kind == routings[0].kind
        if method == "standard" and not first:
            continue
        for column, wire in ((1, "network"), (2, "nvlink")):
            line = go.Scatter(
                x=[str(ep) for ep in degrees],
                y=[getattr(amount, wire) / 1e9 for amount in amounts],
                mode="lines+markers",
                name=METHOD_LABELS[method]
                if method == "standard"
                else f"{METHOD_LABELS[method]}, {ROUTING_LABELS[kind]}",
                legendgroup=f"{kind} {method}",
                showlegend=column == 1,
                line={"color": color, "width": 2.5, "dash": "solid" if first else "dot"},
                marker={"symbol": symbol if first else f"{symbol}-open", "size": 8},
                hovertemplate="%{y:.2f} GB",
            )
            figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(title_text="EP degree", type="category")
    figure.update_yaxes(title_text="GB per rank and layer", rangemode="tozero", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    return figure.update_layout(legend_y=-0.27, margin_b=130, height=figure.layout.height + 50)


def _degrees(placement: ExpertPlacement) -> list[int]:
    powers = [2**exponent for exponent in range(1, 10)]
    fit = [
        ep
        for ep in powers
        if placement.experts % ep == 0
        and ep <= 2 * placement.ep
        and (ep <= placement.ranks_per_node or ep % placement.ranks_per_node == 0)
    ]
    return sorted({*fit, placement.ep})


def _ep_finding(
    routing: RoutingModel,
    degrees: Sequence[int],
    sent: Mapping[tuple[Kind, Method], Sequence[OnWires]],
    placement: ExpertPlacement,
) -> str:
    here = degrees.index(placement.ep)
    standard, hybrid = (sent[routing.kind, m][here] for m in ("standard", "deepep_hybrid"))
    if hybrid.network == 0:
        return f"At EP {placement.ep} nothing leaves the node: DeepEP saves NVLink traffic only"
    return (
        f"At EP {placement.ep} DeepEP sends {standard.network / hybrid.network:.1f} times less over the network under "
        f"{ROUTING_LABELS[routing.kind]} routing, and {hybrid.nvlink / standard.nvlink:.1f} times more over NVLink"
    )
