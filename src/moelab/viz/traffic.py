"""The traffic of expert parallelism drawn: one token's way, how far tokens go, from whom to whom, bytes, savings.

On a token's way nodes are rows of squares, GPUs squares, and every copy that crosses a wire an arrow.
"""

from __future__ import annotations

import functools
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
)
from moelab.viz.draw import STAR, in_panel, legend_below, legend_entry, name_map, panels
from moelab.viz.table import as_table
from moelab.viz.theme import FAR, NARROW, NEAR, ON_LIGHT, OTHER, WIDE, counted, new_figure
from moelab.viz.widget import Explorer, Menu

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
_WIRES = {"network": "the network", "nvlink": "NVLink"}
DERIVED = "derived, not measured"
# One token's way

CHOSEN = "#009E73"
"""A GPU that holds an expert of the token."""
ROW_HEIGHT, NAME_WIDTH = 1.9, 4
"""Of a node's row with the gap under it, and of the node's name beside it, in squares."""


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
    experts: list[int] = draw_expert_ids(routing, placement, token + 1)[token].tolist()
    maps = {}
    for method in METHODS:
        ways = hops(experts, placement, method, sender=0)
        far = sum(hop.copies for hop in ways if hop.far)
        near = sum(hop.copies for hop in ways) - far
        maps[f"<b>{METHOD_LABELS[method]}</b><br>{far} × network, {near} × NVLink"] = ways
    held = {expert // placement.experts_per_rank for expert in experts}
    nodes = {rank // placement.local_ranks for rank in held}
    # Node 0 is drawn in any case: it is the sender's.
    hidden = placement.nodes - len({0, *nodes})
    unseen = f" {counted(hidden, 'node')} without its experts not drawn." if hidden else ""
    return _draw_ways(
        "One token's way to its experts",
        maps,
        experts,
        placement,
        subtitle=f"Token {token} of rank 0, {ROUTING_LABELS[routing.kind]} routing: {len(experts)} experts on "
        f"{counted(len(held), 'GPU')} of {counted(len(nodes), 'node')}{', its own among them' if 0 in held else ''}. "
        f"Counts are of copies.{unseen}",
        width=width,
    )


def _draw_ways(
    title: str,
    maps: Mapping[str, Sequence[Hop]],
    experts: Sequence[int],
    placement: ExpertPlacement,
    *,
    subtitle: str,
    sender: int = 0,
    width: int = WIDE,
) -> go.Figure:
    """Maps side by side, each with its title and arrows, of the nodes that a token touches.

    All share one pair of axes, and arrows of one look are one trace, so that another token changes a few arrays and no
    trace.
    """
    held = Counter(expert // placement.experts_per_rank for expert in experts)
    across = placement.local_ranks
    nodes = sorted({rank // across for rank in (*held, sender)})
    starts = [place * (across + NAME_WIDTH) for place in range(len(maps))]
    # Middle of each GPU's square in the first map; y runs down.
    center = {
        node * across + place: np.array([place + 0.5, row * ROW_HEIGHT + 0.5])
        for row, node in enumerate(nodes)
        for place in range(across)
    }
    square_px = int(min(19, 0.85 * (width - 20) / (starts[-1] + across + NAME_WIDTH + 1)))
    height_px = 190 + 56 * max(2, len(nodes))
    figure = new_figure(title, subtitle=subtitle, note="one simulated token", height=height_px, width=width)
    at = [(start + x, y, rank) for start in starts for rank, (x, y) in center.items()]
    colors = [CHOSEN if rank in held else OTHER for _, _, rank in at]
    figure.add_scatter(
        x=[x for x, _, _ in at],
        y=[y for _, y, _ in at],
        mode="markers+text",
        marker={"symbol": "square", "size": square_px, "color": colors},
        # plotly.js 3.7 takes away what draws an empty text, and has nothing to write in when the text is another.
        text=[f"<b>{held[rank]}</b>" if rank in held and square_px > 11 else " " for _, _, rank in at],
        textfont={"color": "white", "size": 12},
        hovertext=[f"rank {rank}: {held[rank]} of the token's experts" for _, _, rank in at],
        hoverinfo="text",
        showlegend=False,
    )
    figure.add_scatter(
        x=[start + across + 0.2 for start in starts for _ in nodes],
        y=[row * ROW_HEIGHT + 0.5 for _ in starts for row in range(len(nodes))],
        text=[f"node {node}" for _ in starts for node in nodes],
        mode="text",
        textposition="middle right",
        textfont={"size": 11},
        hoverinfo="skip",
        showlegend=False,
    )
    for far, color, wire in ((True, FAR, "network"), (False, NEAR, "NVLink")):
        arrows: dict[str, list[Any]] = {"x": [], "y": [], "hovertext": []}
        sizes: list[int] = []
        for start, ways in zip(starts, maps.values(), strict=True):
            for hop in (one for one in ways if one.far is far):
                path = _arrow(center[hop.sender], center[hop.receiver], far=far).round(2)
                arrows["x"] += [*(start + path[:, 0]).round(2).tolist(), None]
                arrows["y"] += [*path[:, 1].tolist(), None]
                words = f"{hop.copies} × over {wire}, rank {hop.sender} → {hop.receiver}"
                arrows["hovertext"] += [*[""] * (len(path) - 1), words, ""]
                sizes += [*[0] * (len(path) - 1), 12, 0]  # the last point's marker alone is seen: the arrow's head
        head = {"symbol": "arrow", "angleref": "previous", "size": sizes, "color": color, "opacity": 1}
        look = {"mode": "lines+markers", "line": {"color": color, "width": 2}, "marker": head}
        figure.add_scatter(**arrows, **look, name=wire, hoverinfo="text")
    star = {"mode": "markers", "marker": {**STAR, "size": 13}, "name": "the token", "hoverinfo": "skip"}
    x, y = center[sender]
    figure.add_scatter(x=[start + x for start in starts], y=[y] * len(starts), **star)
    square = {"symbol": "square", "size": 13, "color": CHOSEN}
    figure.add_trace(legend_entry("GPU with so many of its experts", mode="markers", marker=square))
    for start, words in zip(starts, maps, strict=True):
        name_map(figure, words, start, 1, size=12 if width == NARROW else 13)
    hidden = {"visible": False, "fixedrange": True}
    figure.update_layout(
        xaxis={**hidden, "range": [-1.2, starts[-1] + across + NAME_WIDTH]},
        yaxis={**hidden, "range": [len(nodes) * ROW_HEIGHT + 0.1, -0.75]},
        margin={"l": 10, "r": 10, "t": figure.layout.margin.t + 40},
    )
    return legend_below(figure, axis_px=4)


def _arrow(start: np.ndarray[Any, Any], end: np.ndarray[Any, Any], *, far: bool) -> np.ndarray[Any, Any]:
    """Points (12, 2) from one square to another; a hop inside a node bends below its row."""
    right, down = abs(end - start)
    bend = np.zeros(2)
    if not far:
        bend[1] = 0.75 + 0.12 * right
    elif right < 0.1:  # between nodes, from a place to the same place: round what lies between
        bend[0] = -min(0.6 + 0.25 * down, 2.1)
    # Not from 0 to 1: an arrow begins at the edge of a square and its head stays outside the other.
    t = np.linspace(0.04, 0.9, 12)[:, None]
    points: np.ndarray[Any, Any] = (1 - t) ** 2 * start + 2 * t * (1 - t) * ((start + end) / 2 + bend) + t**2 * end
    return points


# All tokens


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
    # Bytes of one row: what a layer with one row on the network puts there.
    row = layer_bytes(OnWires(nvlink=0, network=1, local=0), hidden, dispatch_precision=precision).dispatch.network
    figure = panels(
        "Bytes of one dispatch from rank to rank",
        tuple(METHOD_LABELS[m] for m in METHODS),
        subtitle=f"MB, {ROUTING_LABELS[routing.kind]} routing, {tokens:,} tokens per rank, hidden {hidden:,}, "
        f"{precision.upper()}; {_placement_words(placement)}. Lines part nodes; what stays in a rank is left out.",
        note="simulated routing",
        height=340,
    )
    for column, method in enumerate(METHODS, start=1):
        at = {"row": 1, "col": column}
        count = simulate_rows(routing, placement, method, tokens=tokens, seed=seed)
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
    return figure.update_layout(coloraxis={"colorscale": "Blues", "cmin": 0, "colorbar": scale_bar})


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
    # Degrees that no real group has would bend the lines: these share the experts out and fill whole nodes.
    powers = [ep for ep in _POWERS[1:10] if not placement.experts % ep and ep <= 2 * placement.ep]
    degrees = sorted({*(ep for ep in powers if ep <= node or not ep % node), placement.ep})
    figure = panels(
        "Bytes of an MoE layer by the degree of expert parallelism",
        ("over the network", "over NVLink"),
        subtitle=f"GB that a rank sends, dispatch and combine, forward and backward; {tokens:,} tokens per rank, "
        f"hidden {hidden:,}, {precision.upper()} dispatch, nodes of {node}. The standard all-to-all sends the same "
        "under any routing.",
        note=DERIVED,
        height=430,
    )
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "dispatch_precision": precision}
    for routing in routings:
        first = routing is routings[0]
        for method in METHODS if first else METHODS[1:]:  # the standard one sends every copy under any routing
            color, symbol = METHOD_LOOKS[method]
            name = METHOD_LABELS[method]
            name += "" if method == "standard" else f", {ROUTING_LABELS[routing.kind]}"
            amounts = [expected_traffic(routing, replace(placement, ep=ep), method, **sizes).total for ep in degrees]
            for column, wire in enumerate(_WIRES, start=1):
                figure.add_scatter(
                    x=[str(ep) for ep in degrees],
                    y=[getattr(amount, wire) / 1e9 for amount in amounts],
                    mode="lines+markers",
                    line={"color": color, "width": 2.5, "dash": "solid" if first else "dot"},
                    marker={"symbol": symbol if first else f"{symbol}-open", "size": 8},
                    hovertemplate="%{y:.2f} GB",
                    **in_panel(column, name),
                )
    figure.update_xaxes(title_text="EP degree", type="category")
    figure.update_yaxes(rangemode="tozero").update_yaxes(title_text="GB per rank and layer", col=1)
    return legend_below(figure.update_layout(hovermode="x unified"))


def _placement_words(placement: ExpertPlacement) -> str:
    nodes = counted(placement.nodes, "node")
    return f"{placement.experts} experts, top-{placement.top_k}, EP {placement.ep} on {nodes}"


# The explorer


def _node_words(cluster: str) -> str:
    node = cluster_of(cluster).node
    return f"{node.gpu.name}, {'no network' if node.nic_gb_s is None else f'{float(node.nic_gb_s):g} GB/s'}"


_POWERS = tuple(2**exponent for exponent in range(11))
_MODEL: Mapping[str, tuple[str, int]] = {
    "experts": ("num_experts", 256),
    "top_k": ("top_k", 8),
    "hidden": ("dim", 7168),
    "groups": ("expert_groups", 8),
    "limited_groups": ("limited_groups", 4),
}
"""What of a model traffic depends on: its name in a shape, and DeepSeek-V3's."""
_ROUTINGS = Menu("routing", {kind: ROUTING_LABELS[kind] for kind in KINDS if kind != "measured"})
_CLUSTERS = ("b200_x256", "b300_x256", "h100_x1024", "h200_x256", "a100_x256")
CONTROLS = {
    "ep": Menu.of("EP: GPUs of a group", _POWERS[:9]),
    "ranks_per_node": Menu.of("of these on a node", _POWERS[:8]),
    "hardware": Menu.of("bandwidths of", _CLUSTERS, _node_words),
    "routing": _ROUTINGS,
    "skew": Menu.of("skew, if skewed", (0.3, 0.5, 0.7, 1.0, 1.5)),
    "tokens": Menu.of("tokens of a GPU", (1024, 2048, 4096, 8192, 16384, 65536), "{:,}".format),
    "precision": Menu.of("sent in", ("bf16", "mxfp8", "fp8"), str.upper),
    "token": Menu.of("token that is drawn", range(64)),
}
STARTS = {"ep": 32, "ranks_per_node": 8, "hardware": "b200_x256", "routing": "random_balanced", "skew": 0.7}
STARTS |= {"tokens": 4096, "precision": "bf16", "token": 13}
"""The published 671B layout."""


@functools.cache
def _published_models() -> Mapping[str, Mapping[str, int]]:
    shapes = {name: read_model(name).dimensions for name in IN_MENUS}
    return {name: {own: getattr(one, field) for own, (field, _) in _MODEL.items()} for name, one in shapes.items()}


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
        if unknown := sorted(set(chosen) - set(CONTROLS) - set(_MODEL)):
            raise BadInput(f"the explorer has no control {unknown[0]!r}; it has {', '.join((*CONTROLS, *_MODEL))}")
        self.measured = measured
        own = {name: chosen.pop(name, value) for name, (_, value) in _MODEL.items()}
        known = _published_models()
        first = next((name for name, one in known.items() if one == own), "yours")
        self.models = {first: own, **known}
        controls = {"model": Menu.of("model", self.models), **CONTROLS}
        if measured:
            controls["routing"] = Menu("routing", {**_ROUTINGS.values, "measured": ROUTING_LABELS["measured"]})
        super().__init__(controls, {"model": first, **STARTS, **chosen})

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        """What a token costs on the wires, in words and as a table of all methods, and one token's way."""
        model, kind = self.models[chosen["model"]], chosen["routing"]
        placement = ExpertPlacement(
            experts=model["experts"], top_k=model["top_k"], ep=chosen["ep"], ranks_per_node=chosen["ranks_per_node"]
        )
        named = {name: model[name] for name in ("experts", "groups", "limited_groups")}
        routing = routing_of(kind, **named, skew=chosen["skew"]) if kind != "measured" else self.measured
        assert routing is not None
        node, reached = cluster_of(chosen["hardware"]).node, expected_destinations(routing, placement)
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
        shown = as_table(pd.DataFrame(table), decimals={name: 3 if "GB" in name else 2 for name in table[0]})
        words = (
            f"{model['experts']} experts, top-{model['top_k']}: a token "
            f"reaches <b>{reached.ranks:.2f} GPUs</b> on <b>{reached.nodes:.2f} nodes</b> ({reached.label})"
            f"{shown._repr_html_()}"
        )
        flow = token_flow(routing, placement, token=chosen["token"], width=NARROW)
        return words, flow.update_layout(height=max(430, min(flow.layout.height, 470)))
