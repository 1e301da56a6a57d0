"""The traffic of expert parallelism drawn: one token's way, how far tokens go, from whom to whom, bytes, savings.

On a token's way nodes are boxes, GPUs squares, and every copy that crosses a wire an arrow.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.hardware import cluster_of
from moelab.model import DispatchPrecision
from moelab.model.hugging_face import IN_MENUS, read_model
from moelab.planning.time.routing import (
    KINDS,
    ExpertPlacement,
    RoutingModel,
    destination_shares,
    draw_expert_ids,
    expected_destinations,
    routing_of,
)
from moelab.planning.time.traffic import (
    METHODS,
    Method,
    OnWires,
    expected_rows,
    expected_traffic,
    layer_bytes,
    move_time_s,
    require_method,
    simulate_rows,
    times_fewer,
)
from moelab.viz.draw import STAR, in_panel, legend_entry, name_map, panels
from moelab.viz.table import as_table
from moelab.viz.theme import FAR, NARROW, NEAR, ON_LIGHT, OTHER, WIDE, counted, new_figure
from moelab.viz.widget import Explorer, menu

METHOD_LABELS: dict[Method, str] = {
    "standard": "standard all-to-all",
    "deepep_direct": "DeepEP, once per rank",
    "deepep_hybrid": "DeepEP, once per node",
}
METHOD_LOOKS: dict[Method, tuple[str, str]] = {
    "standard": ("#0072B2", "circle"),
    "deepep_direct": ("#009E73", "square"),
    "deepep_hybrid": ("#E69F00", "diamond"),
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
ROUTING_LOOKS = {
    "round_robin": ("#D55E00", "/"),
    "random_balanced": ("#0072B2", ""),
    "uniform": ("#56B4E9", "."),
    "group_limited": ("#009E73", "x"),
    "group_by_score": ("#CC79A7", "\\"),
    "skewed": ("#E69F00", "-"),
    "measured": ("#7a4b00", "+"),
}
DERIVED = "derived, not measured"

# One token's way

CHOSEN = "#009E73"
"""A GPU that holds an expert of the token."""
ROW_HEIGHT = 1.9
"""Of a node's row of squares and the gap under it, in squares."""


class Hop(NamedTuple):
    """Copies of the token that go from one rank to another; ``far`` is over the network."""

    sender: int
    receiver: int
    copies: int
    far: bool


def hops(experts: Sequence[int], placement: ExpertPlacement, method: Method, *, sender: int) -> tuple[Hop, ...]:
    """The way of a token of these experts from the rank that has it; of two stages, the network's comes first."""
    require_method(method)
    L = placement.local_ranks
    held = sorted(Counter(expert // placement.experts_per_rank for expert in experts).items())
    # DeepEP sends a token once to a rank, and the rank copies it for its experts.
    ways = [(sender, rank, count if method == "standard" else 1) for rank, count in held]  # a copy for each expert
    if method == "deepep_hybrid":
        # Over the network to the GPU of the sender's own place in the node, and from there over NVLink.
        relays = {rank // L: rank // L * L + sender % L for rank, _ in held}
        ways = [(sender, relay, 1) for relay in relays.values()] + [(relays[rank // L], rank, 1) for rank, _ in held]
    return tuple(Hop(start, end, copies, start // L != end // L) for start, end, copies in ways if start != end)


def token_flow(routing: RoutingModel, placement: ExpertPlacement, *, token: int = 0, width: int = WIDE) -> go.Figure:
    """Dispatch of one of rank 0's tokens, drawn for each method side by side.

    Raises:
        BadInput: if the routing does not fit.
    """
    experts = _experts_of_token(routing, placement, sender=0, token=token)
    ways = {method: hops(experts, placement, method, sender=0) for method in METHODS}
    far = {method: sum(hop.copies for hop in each if hop.far) for method, each in ways.items()}
    near = {method: sum(hop.copies for hop in each if not hop.far) for method, each in ways.items()}
    held = {expert // placement.experts_per_rank for expert in experts}
    nodes = {rank // placement.local_ranks for rank in held}
    # Node 0 is drawn in any case: it is the sender's.
    hidden = placement.nodes - len({0, *nodes})
    unseen = f" {counted(hidden, 'node')} without its experts not drawn." if hidden else ""
    # Inside one node there is no network to save: there DeepEP saves a GPU's second and further copies over NVLink.
    once, wire, counts = ("node", "the network", far) if far["standard"] else ("GPU", "NVLink", near)
    fewest = counts["deepep_hybrid" if far["standard"] else "deepep_direct"]
    instead = f"instead of {counts['standard']}" if fewest < counts["standard"] else "as it does by each way"
    finding = f"Sent once per {once}, this token crosses {wire} {counted(fewest, 'time')} {instead}"
    return _draw_ways(
        experts,
        placement,
        0,
        [
            (f"<b>{METHOD_LABELS[method]}</b><br>{far[method]} × network, {near[method]} × NVLink", ways[method], False)
            for method in METHODS
        ],
        finding,
        subtitle=f"Token {token} of rank 0, {ROUTING_LABELS[routing.kind]} routing: {len(experts)} experts on "
        f"{counted(len(held), 'GPU')} of {counted(len(nodes), 'node')}{', its own among them' if 0 in held else ''}. A "
        f"number counts its experts on a GPU; a thick arrow carries several copies.{unseen}",
        width=width,
    )


def forwarding(routing: RoutingModel, placement: ExpertPlacement, *, sender: int = 0, token: int = 0) -> go.Figure:
    """DeepEP's hierarchical mode step by step: to each node once, on inside the node, and the way back.

    Raises:
        BadInput: if there is no such rank, or the routing does not fit.
    """
    experts = _experts_of_token(routing, placement, sender=sender, token=token)
    ways = hops(experts, placement, "deepep_hybrid", sender=sender)
    far, near = ([hop for hop in ways if hop.far is is_far] for is_far in (True, False))
    copies = f"{len(far)} {'copy' if len(far) == 1 else 'copies'} over the network: nodes forward among themselves"
    return _draw_ways(
        experts,
        placement,
        sender,
        (
            (f"<b>1 dispatch</b><br>{len(far)} × network, to its own place", far, False),
            (f"<b>2 forward</b><br>{len(near)} × NVLink, to the experts", near, False),
            (f"<b>3 combine</b><br>sums: {len(near)} × NVLink, {len(far)} × network", ways, True),
        ),
        f"{len(experts)} experts, {copies if far else 'all reached inside the node'}",
        subtitle=f"Token {token} of rank {sender}. On the way back each node adds up its experts' outputs, so that one "
        "row crosses the network; gradients take the same ways in the other order.",
    )


def _experts_of_token(routing: RoutingModel, placement: ExpertPlacement, *, sender: int, token: int) -> list[int]:
    if not 0 <= sender < placement.ep:
        raise BadInput(f"sender is {sender}; valid: 0 to {placement.ep - 1}, the ranks of the group")
    experts: list[int] = draw_expert_ids(routing, placement, token + 1, rank=sender)[token].tolist()
    return experts


def _draw_ways(
    experts: Sequence[int],
    placement: ExpertPlacement,
    sender: int,
    columns: Sequence[tuple[str, Sequence[Hop], bool]],
    finding: str,
    *,
    subtitle: str,
    width: int = WIDE,
) -> go.Figure:
    """Maps side by side of the nodes that a token touches; no other is drawn.

    Each of ``columns`` has a title, arrows, and whether these point the other way, as in combine. All maps share one
    pair of axes, and arrows of one look are one trace, so that another token changes a few arrays and no trace.
    """
    held = Counter(expert // placement.experts_per_rank for expert in experts)
    across = placement.local_ranks
    nodes = sorted({rank // across for rank in (*held, sender)})
    ranks = [node * across + place for node in nodes for place in range(across)]
    # Names of nodes stand beside the rows, at the end that is far from the sender, where no arrow passes.
    left, room = sender % across >= across / 2, max(3.0, 0.25 * across)
    starts = [column * (across + room + 0.5) for column in range(len(columns))]
    ends = [-(room if left else 0.8), starts[-1] + across + (0.8 if left else room)]
    # Middle of each GPU's square in the first map; y runs down.
    center = {rank: (rank % across + 0.5, nodes.index(rank // across) * ROW_HEIGHT + 0.5) for rank in ranks}
    square_px = int(min(19, 0.85 * (width - 20) / (ends[1] - ends[0])))
    written = square_px > 11
    at = [(start + center[rank][0], center[rank][1], rank) for start in starts for rank in ranks]
    height_px = 190 + 56 * max(2, len(nodes))
    figure = new_figure(finding, subtitle=subtitle, note="one simulated token", height=height_px, width=width)
    colors = [CHOSEN if rank in held else OTHER for _, _, rank in at]
    figure.add_scatter(
        x=[x for x, _, _ in at],
        y=[y for _, y, _ in at],
        mode="markers+text",
        marker={"symbol": "square", "size": square_px, "color": colors},
        # plotly.js 3.7 takes away what draws an empty text, and has nothing to write in when the text is another.
        text=[f"<b>{held[rank]}</b>" if rank in held and written else " " for _, _, rank in at],
        textfont={"color": "white", "size": 12},
        hovertext=[f"rank {rank}: {held[rank]} of the token's experts" for _, _, rank in at],
        hoverinfo="text",
        showlegend=False,
    )
    figure.add_scatter(
        x=[start + (-0.2 if left else across + 0.2) for start in starts for _ in nodes],
        y=[row * ROW_HEIGHT + 0.5 for _ in starts for row in range(len(nodes))],
        text=[f"node {node}" for _ in starts for node in nodes],
        mode="text",
        textposition="middle left" if left else "middle right",
        textfont={"size": 11},
        hoverinfo="skip",
        showlegend=False,
    )
    for far, thick in itertools.product((True, False), (False, True)):
        drawn: dict[str, list[Any]] = {"x": [], "y": [], "size": [], "hovertext": []}
        for start, (_, ways, back) in zip(starts, columns, strict=True):
            for hop in ways:
                if (hop.far, hop.copies > 1) != (far, thick):
                    continue
                path = _arrow(center[hop.sender], center[hop.receiver], hop, across)[:: -1 if back else 1].round(2)
                drawn["x"] += [*(start + path[:, 0]).round(2).tolist(), None]
                drawn["y"] += [*path[:, 1].tolist(), None]
                # The marker of the last point alone is seen: the arrow's head.
                blank, wire = len(path) - 1, "network" if far else "NVLink"
                drawn["size"] += [*[0] * blank, 11 + 3 * thick, 0]
                words = f"{hop.copies} × over {wire}, rank {hop.sender} → {hop.receiver}"
                drawn["hovertext"] += [*[""] * blank, words, ""]
        color, sizes = FAR if far else NEAR, drawn.pop("size")
        head = {"symbol": "arrow", "angleref": "previous", "size": sizes, "color": color, "opacity": 1}
        look = {"mode": "lines+markers", "line": {"color": color, "width": 4 if thick else 2}, "marker": head}
        name = {"name": "network" if far else "NVLink", "showlegend": not thick, "hoverinfo": "text"}
        figure.add_scatter(**drawn, **look, **name)
    star = {"mode": "markers", "marker": {**STAR, "size": 13}, "name": "the token", "hoverinfo": "skip"}
    x, y = [start + center[sender][0] for start in starts], [center[sender][1]] * len(starts)
    figure.add_scatter(x=x, y=y, **star)
    square = {"symbol": "square", "size": 13, "color": CHOSEN}
    figure.add_trace(legend_entry("GPU with so many of its experts", mode="markers", marker=square))
    for start, (title, _, _) in zip(starts, columns, strict=True):
        name_map(figure, title, start, 1, size=12 if width == NARROW else 13)
    hidden = {"visible": False, "fixedrange": True}
    return figure.update_layout(
        xaxis={**hidden, "range": ends},
        yaxis={**hidden, "range": [len(nodes) * ROW_HEIGHT + 0.1, -0.75]},
        margin={"l": 10, "r": 10, "b": 40, "t": figure.layout.margin.t + 40},
        legend={"y": -0.02},
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], hop: Hop, across: int) -> np.ndarray[Any, Any]:
    """Points (12, 2) from one square to another; a hop inside a node bends below its row."""
    ends = np.array([start, end])
    right, down = abs(ends[1] - ends[0])
    bend = np.zeros(2)
    if not hop.far:
        bend[1] = 0.75 + 0.12 * right
    elif right < 0.1:  # between nodes, from a place to the same place: round what lies between
        bend[0] = (-1.0 if start[0] < across / 2 else 1.0) * min(0.6 + 0.25 * down, 2.1)
    # Not from 0 to 1: an arrow begins at the edge of a square and its head stays outside the other.
    t = np.linspace(0.04, 0.9, 12)[:, None]
    middle = ends.mean(axis=0) + bend
    points: np.ndarray[Any, Any] = (1 - t) ** 2 * ends[0] + 2 * t * (1 - t) * middle + t**2 * ends[1]
    return points


# All tokens

DRAWN = 4096
"""Tokens that the histogram is of."""
_WIRES = {"network": "the network", "nvlink": "NVLink"}


def destination_histogram(routings: Sequence[RoutingModel], placement: ExpertPlacement, *, seed: int = 0) -> go.Figure:
    """How many ranks and nodes tokens reach, as shares of all tokens, by routing."""
    means = {ROUTING_LABELS[each.kind]: expected_destinations(each, placement).ranks for each in routings}
    figure = panels(
        f"Ranks that a token reaches: {', '.join(f'{name} {mean:.2f}' for name, mean in means.items())}",
        ("distinct ranks of a token", "distinct nodes of a token"),
        subtitle=f"Share of {DRAWN:,} drawn tokens for each routing; {_placement_words(placement)}. In the "
        "title: means.",
        note="simulated routing",
    )
    spread = ((placement.experts_per_rank, placement.ep), (placement.experts_per_node, placement.nodes))
    for routing in routings:
        ids_TK = draw_expert_ids(routing, placement, DRAWN, seed=seed)
        color, shape = ROUTING_LOOKS[routing.kind]
        hatch = {"shape": shape, "fgcolor": "white", "fillmode": "overlay", "size": 5}
        for column, (size, places) in enumerate(spread, start=1):
            most = min(placement.top_k, places)
            figure.add_bar(
                x=list(range(1, most + 1)),
                y=100 * destination_shares(ids_TK, size, most),
                marker={"color": color, "pattern": hatch},
                hovertemplate="%{x}: %{y:.1f} %",
                **in_panel(column, ROUTING_LABELS[routing.kind]),
            )
    figure.update_xaxes(dtick=1, showgrid=False)
    figure.update_yaxes(title_text="share of tokens (%)", col=1)
    return figure.update_layout(barmode="group", bargap=0.15, hovermode="x unified")


def traffic_matrix(
    routing: RoutingModel,
    placement: ExpertPlacement,
    *,
    tokens: int,
    hidden: int,
    precision: DispatchPrecision = "bf16",
    seed: int = 0,
) -> go.Figure:
    """Bytes of one dispatch of each rank's ``tokens`` from rank to rank, a heat map for each method."""
    counts = {m: simulate_rows(routing, placement, m, tokens=tokens, seed=seed) for m in METHODS}
    # Bytes of one row: what a layer with one row on the network puts there.
    row = layer_bytes(OnWires(nvlink=0, network=1, local=0), hidden, dispatch_precision=precision).dispatch.network
    standard, hybrid = (counts[m].mean.network * row / 1e6 for m in ("standard", "deepep_hybrid"))
    finding = "All ranks share a node: every pair exchanges tokens over NVLink"
    if placement.nodes > 1:
        finding = (
            f"Over the network a rank sends {standard:,.0f} MB to everyone; with DeepEP, once per node, "
            f"{hybrid:,.0f} MB, to the GPUs of its own place only"
        )
    figure = panels(
        finding,
        tuple(METHOD_LABELS[m] for m in METHODS),
        subtitle=f"MB of one dispatch, {ROUTING_LABELS[routing.kind]} routing, {tokens:,} tokens per rank, hidden "
        f"{hidden:,}, {precision.upper()}; {_placement_words(placement)}. Lines part nodes; what "
        "stays in a rank is left out.",
        note="simulated routing",
        height=340,
    )
    for column, count in enumerate(counts.values(), start=1):
        at = {"row": 1, "col": column}
        megabytes = (count.nvlink_SR + count.network_SR) * row / 1e6
        # The diagonal stays on the GPU; drawn, it would be the darkest of the map and say nothing of wires.
        cells = np.round(np.where(np.eye(placement.ep, dtype=bool), np.nan, megabytes), 3)
        hover = "rank %{y} → rank %{x}: %{z:.1f} MB<extra></extra>"
        figure.add_heatmap(z=cells, coloraxis="coloraxis", hovertemplate=hover, **at)
        for edge in range(placement.local_ranks, placement.ep, placement.local_ranks):
            figure.add_hline(y=edge - 0.5, line={"color": ON_LIGHT, "width": 0.7}, **at)
            figure.add_vline(x=edge - 0.5, line={"color": ON_LIGHT, "width": 0.7}, **at)
        # Squares stay square, in each panel by its own axis.
        figure.update_yaxes(scaleanchor=f"x{column if column > 1 else ''}", scaleratio=1, **at)
    figure.update_xaxes(title_text="to rank", showgrid=False, constrain="domain")
    figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain")
    figure.update_yaxes(title_text="from rank", col=1)
    scale_bar = {"title": {"text": "MB", "side": "top"}, "thickness": 12, "len": 0.8, "outlinewidth": 0}
    figure.update_layout(coloraxis={"colorscale": "Blues", "cmin": 0, "colorbar": scale_bar})
    return figure


def bytes_by_ep(
    routings: Sequence[RoutingModel],
    placement: ExpertPlacement,
    *,
    tokens: int,
    hidden: int,
    precision: DispatchPrecision = "bf16",
) -> go.Figure:
    """Bytes that a rank puts on each wire in one MoE layer, against the expert-parallel degree.

    Args:
        routings: one or two; the first with solid lines, the second with dotted ones.
        placement: experts, top-k and ranks per node; the degree varies up to twice the placement's.
        tokens: of each rank.
        hidden: elements of a token.
        precision: of dispatch and of combine's gradient; the rest is BF16.
    """
    node = placement.ranks_per_node
    # Degrees that no real group has would bend the lines.
    powers = [2**exponent for exponent in range(1, 10)]  # of these, what shares the experts out and fills whole nodes
    fit = {
        ep for ep in powers if not placement.experts % ep and ep <= 2 * placement.ep and (ep <= node or not ep % node)
    }
    degrees = sorted({*fit, placement.ep})
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "dispatch_precision": precision}
    sent = {
        (routing.kind, m): [expected_traffic(routing, replace(placement, ep=ep), m, **sizes).total for ep in degrees]
        for routing in routings
        for m in METHODS
    }
    here, own = degrees.index(placement.ep), routings[0].kind
    standard, hybrid = (sent[own, m][here] for m in ("standard", "deepep_hybrid"))
    figure = panels(
        f"At EP {placement.ep} DeepEP sends {times_fewer(standard.network, hybrid.network):.1f} times less over the "
        f"network under {ROUTING_LABELS[own]} routing, and {times_fewer(hybrid.nvlink, standard.nvlink):.1f} times "
        "more over NVLink"
        if hybrid.network
        else f"At EP {placement.ep} nothing leaves the node: DeepEP saves NVLink traffic only",
        ("over the network", "over NVLink"),
        subtitle=f"GB that a rank sends in one MoE layer, dispatch and combine, forward and backward; {tokens:,} "
        f"tokens per rank, hidden {hidden:,}, {precision.upper()} dispatch, nodes of {node}. The "
        "standard all-to-all sends the same under any routing.",
        note=DERIVED,
    )
    for (kind, method), amounts in sent.items():
        color, symbol = METHOD_LOOKS[method]
        first, name = kind == own, METHOD_LABELS[method]
        if method == "standard" and not first:  # it sends every copy under any routing
            continue
        for column, wire in ((1, "network"), (2, "nvlink")):
            figure.add_scatter(
                x=[str(ep) for ep in degrees],
                y=[getattr(amount, wire) / 1e9 for amount in amounts],
                mode="lines+markers",
                line={"color": color, "width": 2.5, "dash": "solid" if first else "dot"},
                marker={"symbol": symbol if first else f"{symbol}-open", "size": 8},
                hovertemplate="%{y:.2f} GB",
                **in_panel(column, name if method == "standard" else f"{name}, {ROUTING_LABELS[kind]}"),
            )
    figure.update_xaxes(title_text="EP degree", type="category")
    figure.update_yaxes(title_text="GB per rank and layer", rangemode="tozero", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    height = figure.layout.height + 50
    return figure.update_layout(legend_y=-0.27, margin_b=130, height=height, hovermode="x unified")


def saving_by_routing(routings: Sequence[RoutingModel], placement: ExpertPlacement) -> go.Figure:
    """Copies of a token on the slowest wire by routing and method: how much of a saving the routing is."""
    wire = "network" if placement.nodes > 1 else "nvlink"
    reached = [expected_destinations(routing, placement) for routing in routings]
    rows = {m: [getattr(expected_rows(each, placement, m), wire) for each in reached] for m in METHODS}
    fewer = {m: list(map(times_fewer, rows["standard"], rows[m])) for m in METHODS}
    best: Method = "deepep_hybrid" if wire == "network" else "deepep_direct"
    saved = {times: ROUTING_LABELS[each.kind] for times, each in zip(fewer[best], routings, strict=True) if times}
    figure = new_figure(
        f"{METHOD_LABELS[best]}: {max(saved):.1f} times fewer copies on {_WIRES[wire]} under {saved[max(saved)]} "
        f"routing, {min(saved):.1f} times under {saved[min(saved)]}"
        if saved
        else "With one rank nothing travels",
        subtitle=f"Copies of a token that a rank puts on {_WIRES[wire]}, forward dispatch, mean; above the bars: times "
        f"fewer than the standard all-to-all. {_placement_words(placement)}.",
        note=DERIVED,
    )
    for method, values in rows.items():
        copies = [f"{value:.2f}" for value in values]
        ratios = [f"÷ {times:.1f}" if times else "" for times in fewer[method]]
        figure.add_bar(
            x=[ROUTING_LABELS[routing.kind].replace(" ", "<br>", 1) for routing in routings],
            y=values,
            name=METHOD_LABELS[method],
            marker_color=METHOD_LOOKS[method][0],
            text=copies if method == "standard" else ratios,
            textposition="outside",
            cliponaxis=False,
            textfont_size=12,
            hovertemplate="%{y:.2f}",
        )
    highest = max(max(values) for values in rows.values())
    figure.update_yaxes(title_text=f"copies a token on {_WIRES[wire]}", range=[0, 1.15 * highest])
    figure.update_xaxes(showgrid=False, ticks="")
    return figure.update_layout(barmode="group", bargap=0.25, hovermode="x unified")


def _placement_words(placement: ExpertPlacement) -> str:
    nodes = counted(placement.nodes, "node")
    return f"{placement.experts} experts, top-{placement.top_k}, EP {placement.ep} on {nodes}"


# The explorer

_POWERS = tuple(2**exponent for exponent in range(11))
_MODEL: Mapping[str, int] = {"experts": 256, "top_k": 8, "hidden": 7168, "groups": 8, "limited_groups": 4}
"""What of a model traffic depends on, as DeepSeek-V3 has it."""
_MENUS: Mapping[str, tuple[str, Any, Sequence[Any]]] = {
    "ep": ("EP: GPUs of a group", 32, _POWERS[:9]),
    "ranks_per_node": ("of these on a node", 8, _POWERS[:8]),
    "hardware": ("bandwidths of", "b200_x256", ("b200_x256", "b300_x256", "h100_x1024", "h200_x256", "a100_x256")),
    "routing": ("routing", "random_balanced", tuple(kind for kind in KINDS if kind != "measured")),
    "skew": ("skew, if skewed", 0.7, (0.3, 0.5, 0.7, 1.0, 1.5)),
    "tokens": ("tokens of a GPU", 4096, (1024, 2048, 4096, 8192, 16384, 65536)),
    "precision": ("sent in", "bf16", ("bf16", "mxfp8", "fp8")),
    "token": ("token that is drawn", 13, range(64)),
}
"""Label, value of the published 671B layout, and other values."""


@functools.cache
def _published_models() -> Mapping[str, Mapping[str, int]]:
    of_shape = ("num_experts", "top_k", "dim", "expert_groups", "limited_groups")
    return {
        name: {own: getattr(one, field) for own, field in zip(_MODEL, of_shape, strict=True)}
        for name, one in ((name, read_model(name).dimensions) for name in IN_MENUS)
    }


def _in_words(control: str, value: Any) -> str:
    """A value as the control's menu has it."""
    if control == "hardware":
        node = cluster_of(value).node
        network = "no network" if node.nic_gb_s is None else f"{float(node.nic_gb_s):g} GB/s"
        return f"{node.gpu.name}, {network}"
    named = ROUTING_LABELS | {precision: precision.upper() for precision in ("bf16", "mxfp8", "fp8")}
    return f"{value:,}" if isinstance(value, int) else named.get(value, str(value))


class TrafficExplorer(Explorer):
    """Model, group, hardware and routing as menus; beside them one token's way, and above the numbers of all tokens.

    Args:
        measured: routing of a measured load, to be one of the menu's.
        chosen: values of controls that are to begin elsewhere than at the published 671B layout, and of your own model:
            ``experts``, ``top_k``, ``hidden``, ``groups`` and ``limited_groups``.

    Raises:
        BadInput: for a value that the explorer does not have.
    """

    def __init__(self, measured: RoutingModel | None = None, **chosen: Any) -> None:
        if unknown := sorted(set(chosen) - set(_MENUS) - set(_MODEL)):
            raise BadInput(f"the explorer has no control {unknown[0]!r}; it has {', '.join((*_MENUS, *_MODEL))}")
        self.measured = measured
        own = {name: chosen.pop(name, value) for name, value in _MODEL.items()}
        known = _published_models()
        first = next((name for name, one in known.items() if one == own), "yours")
        self.models = {first: own, **known}
        controls = {"model": menu("model", self.models, first)}
        for name, (label, start, values) in _MENUS.items():
            offered = [*values, *(["measured"] if name == "routing" and measured else [])]
            words = functools.partial(_in_words, name)
            controls[name] = menu(label, offered, chosen.get(name, start), words=words)
        super().__init__(controls, ["flow"])

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """What a token costs on the wires, in words and as a table of all methods, and one token's way."""
        chosen = self.chosen
        model = self.models[chosen["model"]]
        placement = ExpertPlacement(
            experts=model["experts"], top_k=model["top_k"], ep=chosen["ep"], ranks_per_node=chosen["ranks_per_node"]
        )
        named = {name: model[name] for name in ("experts", "groups", "limited_groups")}
        kind = chosen["routing"]
        routing = routing_of(kind, **named, skew=chosen["skew"]) if kind != "measured" else self.measured
        assert routing is not None
        node = cluster_of(chosen["hardware"]).node
        reached = expected_destinations(routing, placement)
        table = []
        for method in METHODS:
            rows = expected_rows(reached, placement, method)
            sent = rows.times(chosen["tokens"])
            layer = layer_bytes(sent, model["hidden"], dispatch_precision=chosen["precision"]).total
            table.append(
                {
                    "way": METHOD_LABELS[method],
                    "copies of a token, network": rows.network,
                    "copies, NVLink": rows.nvlink,
                    "GB a layer, network": layer.network / 1e9,
                    "GB, NVLink": layer.nvlink / 1e9,
                    "ms a layer, at least": 1e3 * max(move_time_s(layer, node)),
                }
            )
        frame = pd.DataFrame(table)
        standard_ms, _, hybrid_ms = frame["ms a layer, at least"]
        shown = as_table(frame, decimals={name: 3 if name.startswith("GB") else 2 for name in table[0]})
        words = (
            f"{model['experts']} experts, top-{model['top_k']}: a token "
            f"reaches <b>{reached.ranks:.2f} GPUs</b> on <b>{reached.nodes:.2f} nodes</b> ({reached.label}) "
            f"· a layer's exchanges take at least <b>{hybrid_ms:.1f} ms</b> with DeepEP, once per node, and "
            f"{standard_ms:.1f} ms with the standard all-to-all{shown._repr_html_()}"
        )
        flow = token_flow(routing, placement, token=chosen["token"], width=NARROW)
        # Kept for the picture, which is wider than the figure beside the controls.
        self._way = (routing, placement, chosen["token"])
        return words, {"flow": flow.update_layout(height=max(430, min(flow.layout.height, 470)))}

    def picture(self) -> go.Figure:
        """One token's way, as wide as a page."""
        routing, placement, token = self._way
        return token_flow(routing, placement, token=token)
