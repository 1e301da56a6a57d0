"""The traffic of expert parallelism drawn: how far tokens go, from whom to whom, bytes by degree, and savings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.hardware import Node, cluster_of
from moelab.model import Precision
from moelab.projection import (
    KINDS,
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
    expected_traffic,
    layer_bytes,
    move_time_s,
    routing_of,
    simulate_rows,
)
from moelab.viz.draw import in_panel, panels
from moelab.viz.theme import FAR, INK, NEAR, counted, new_figure
from moelab.viz.token_flow import METHOD_LABELS, ROUTING_LABELS, token_flow
from moelab.viz.widget import Explorer, menu

METHOD_LOOKS: dict[Method, tuple[str, str]] = {
    "standard": ("#0072B2", "circle"),
    "deepep_direct": ("#009E73", "square"),
    "deepep_hybrid": ("#E69F00", "diamond"),
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
_TEXT_ABOVE = {"textposition": "outside", "cliponaxis": False}
DRAWN = 4096
"""Tokens that the histogram is of."""

_WIRES = {"network": "the network", "nvlink": "NVLink"}


def destination_histogram(routings: Sequence[RoutingModel], placement: ExpertPlacement, *, seed: int = 0) -> go.Figure:
    """How many ranks and nodes tokens reach, as shares of all tokens, by routing.

    Args:
        routings: to compare.
        placement: where the experts are.
        seed: of the draw.
    """
    means = [expected_destinations(routing, placement) for routing in routings]
    pairs = zip(routings, means, strict=True)
    reached = ", ".join(f"{ROUTING_LABELS[routing.kind]} {mean.ranks:.2f}" for routing, mean in pairs)
    figure = _panels(
        f"Ranks that a token reaches: {reached}",
        ("distinct ranks of a token", "distinct nodes of a token"),
        subtitle=f"Share of {DRAWN:,} drawn tokens for each routing; {_placement_words(placement)}. In the "
        "title: means.",
        note="simulated routing",
    )
    for routing in routings:
        ids_TK = draw_expert_ids(routing, placement, DRAWN, seed=seed)
        color, pattern = ROUTING_LOOKS[routing.kind]
        for column, size in ((1, placement.experts_per_rank), (2, placement.experts_per_node)):
            counts = np.bincount(distinct_destinations(ids_TK, size))[1:]
            most = min(placement.top_k, placement.ep if column == 1 else placement.nodes)
            shares = 100 * np.pad(counts, (0, max(0, most - len(counts)))) / DRAWN
            figure.add_bar(
                x=list(range(1, most + 1)),
                y=shares,
                marker={"color": color, "pattern": {"shape": pattern, "fgcolor": "white", "size": 5}},
                hovertemplate="%{x}: %{y:.1f} %",
                **in_panel(column, ROUTING_LABELS[routing.kind]),
            )
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
    figure = _panels(
        _matrix_finding(placement, network),
        tuple(METHOD_LABELS[m] for m in METHODS),
        subtitle=f"MB of one dispatch, {ROUTING_LABELS[routing.kind]} routing, {tokens:,} tokens a rank, hidden "
        f"{hidden:,}, {precision.upper()}; {_placement_words(placement)}. Lines part nodes; what "
        "stays in a rank is left out.",
        note="simulated routing",
        height=340,
    )
    for column, method in enumerate(METHODS, start=1):
        figure.add_heatmap(
            z=np.round(np.where(np.eye(placement.ep, dtype=bool), np.nan, megabytes[method]), 3),
            coloraxis="coloraxis",
            hovertemplate="rank %{y} → rank %{x}: %{z:.1f} MB<extra></extra>",
            row=1,
            col=column,
        )
        for edge in range(placement.local_ranks, placement.ep, placement.local_ranks):
            line = {"line": {"color": INK, "width": 0.7}, "row": 1, "col": column}
            figure.add_hline(y=edge - 0.5, **line)
            figure.add_vline(x=edge - 0.5, **line)
    figure.update_xaxes(title_text="to rank", showgrid=False, constrain="domain")
    figure.update_yaxes(autorange="reversed", showgrid=False, constrain="domain")
    # Squares stay square, in each panel by its own axis.
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
    fit = {
        ep
        for ep in (2**exponent for exponent in range(1, 10))
        if placement.experts % ep == 0
        and ep <= 2 * placement.ep
        and (ep <= placement.ranks_per_node or ep % placement.ranks_per_node == 0)
    }
    degrees = sorted({*fit, placement.ep})
    places = [replace(placement, ep=ep) for ep in degrees]
    sizes = {"tokens": tokens, "hidden": hidden}
    sent = {
        (routing.kind, m): [
            expected_traffic(routing, p, m, **sizes, dispatch_precision=precision).total for p in places
        ]
        for routing in routings
        for m in METHODS
    }
    figure = _panels(
        _ep_finding(routings[0], degrees, sent, placement),
        ("over the network", "over NVLink"),
        subtitle=f"GB that a rank sends in one MoE layer, dispatch and combine, forward and backward; {tokens:,} "
        f"tokens a rank, hidden {hidden:,}, {precision.upper()} dispatch, nodes of {placement.ranks_per_node}. The "
        "standard all-to-all sends the same under any routing.",
        note=DERIVED,
    )
    for (kind, method), amounts in sent.items():
        color, symbol = METHOD_LOOKS[method]
        first, name = kind == routings[0].kind, METHOD_LABELS[method]
        if method == "standard" and not first:
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
    return figure.update_layout(legend_y=-0.27, margin_b=130, height=figure.layout.height + 50)


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


def saving_by_routing(routings: Sequence[RoutingModel], placement: ExpertPlacement) -> go.Figure:
    """Copies of a token on the slowest wire by routing and method: how much of a saving the routing is.

    Args:
        routings: to compare.
        placement: where the experts are.
    """
    wire = "network" if placement.nodes > 1 else "nvlink"
    rows = {
        (routing.kind, m): getattr(expected_rows(expected_destinations(routing, placement), placement, m), wire)
        for routing in routings
        for m in METHODS
    }
    labels = [ROUTING_LABELS[routing.kind].replace(" ", "<br>", 1) for routing in routings]
    figure = new_figure(
        _saving_finding(routings, rows, wire),
        subtitle=f"Copies of a token that a rank puts on {_WIRES[wire]}, forward dispatch, mean; above the bars: times "
        f"fewer than the standard all-to-all. {_placement_words(placement)}.",
        note=DERIVED,
    )
    for method in METHODS:
        values = [rows[routing.kind, method] for routing in routings]
        against = [rows[routing.kind, "standard"] for routing in routings]
        ratios = [f"÷ {base / value:.1f}" if value else "" for base, value in zip(against, values, strict=True)]
        figure.add_bar(
            x=labels,
            y=values,
            name=METHOD_LABELS[method],
            marker_color=METHOD_LOOKS[method][0],
            text=[f"{value:.2f}" for value in values] if method == "standard" else ratios,
            textfont_size=12,
            **_TEXT_ABOVE,
            hovertemplate="%{y:.2f}",
        )
    figure.update_yaxes(title_text=f"copies a token on {_WIRES[wire]}", range=[0, 1.15 * max(rows.values())])
    figure.update_xaxes(showgrid=False, ticks="")
    return figure.update_layout(barmode="group", bargap=0.25)


def _saving_finding(routings: Sequence[RoutingModel], rows: Mapping[tuple[Kind, Method], float], wire: str) -> str:
    method: Method = "deepep_hybrid" if wire == "network" else "deepep_direct"
    saved = {
        rows[routing.kind, "standard"] / rows[routing.kind, method]: ROUTING_LABELS[routing.kind]
        for routing in routings
        if rows[routing.kind, method]
    }
    if not saved:
        return "With one rank nothing travels"
    least, most = min(saved), max(saved)
    return (
        f"{METHOD_LABELS[method]}: {most:.1f} times fewer copies on {_WIRES[wire]} under {saved[most]} routing, "
        f"{least:.1f} times under {saved[least]}"
    )


def move_times(
    routings: Sequence[RoutingModel],
    placement: ExpertPlacement,
    node: Node,
    *,
    tokens: int,
    hidden: int,
    precision: Precision = "bf16",
) -> go.Figure:
    """Time that each wire needs for one layer's four exchanges at full bandwidth, by routing and method.

    Args:
        routings: a panel each.
        placement: where the experts are.
        node: gives the bandwidths.
        tokens: of each rank.
        hidden: elements of a token.
        precision: of dispatch and of combine's gradient.

    Raises:
        BadInput: if the profile lacks a bandwidth that is needed.
    """
    times = {
        (routing.kind, m): move_time_s(
            expected_traffic(routing, placement, m, tokens=tokens, hidden=hidden, dispatch_precision=precision).total,
            node,
        )
        for routing in routings
        for m in METHODS
    }
    wires = (("NVLink", node.gpu.nvlink_gb_s), ("network", node.nic_gb_s))
    bandwidths = ", ".join(f"{name} {float(value):g} GB/s" for name, value in wires if value is not None)
    figure = _panels(
        _time_finding(routings, times),
        tuple(f"{ROUTING_LABELS[routing.kind]} routing" for routing in routings),
        subtitle=f"Four exchanges of one layer; {bandwidths}; {tokens:,} tokens a rank, hidden {hidden:,}, "
        f"{precision.upper()} dispatch; {_placement_words(placement)}.",
        note=DERIVED,
    )
    labels = [METHOD_LABELS[m].replace(" ", "<br>", 1) for m in METHODS]
    for column, routing in enumerate(routings, start=1):
        for index, (name, color) in enumerate((("NVLink", NEAR), ("network", FAR))):
            values = [1e3 * times[routing.kind, m][index] for m in METHODS]
            figure.add_bar(
                x=labels,
                y=values,
                marker_color=color,
                text=[f"{value:.{3 if value >= 1 else 2}g}" if value else "" for value in values],
                **_TEXT_ABOVE,
                hovertemplate="%{y:.2f} ms",
                **in_panel(column, name),
            )
    highest = 1e3 * max(max(pair) for pair in times.values())
    figure.update_yaxes(range=[0, 1.15 * highest])
    figure.update_yaxes(title_text="ms per layer", col=1)
    figure.update_xaxes(showgrid=False, ticks="", tickangle=0, tickfont_size=12)
    return figure.update_layout(barmode="group", bargap=0.25, legend_y=-0.28)


def _time_finding(routings: Sequence[RoutingModel], times: Mapping[tuple[Kind, Method], tuple[float, float]]) -> str:
    kind = routings[-1].kind
    standard, hybrid = (max(times[kind, m]) * 1e3 for m in ("standard", "deepep_hybrid"))
    if standard == 0:
        return "With one rank nothing travels"
    return (
        f"Under {ROUTING_LABELS[kind]} routing a layer's tokens need at least {standard:.3g} ms by the standard "
        f"all-to-all and {hybrid:.3g} ms by {METHOD_LABELS['deepep_hybrid']}"
    )


def _placement_words(placement: ExpertPlacement) -> str:
    """The placement in a few words."""
    return (
        f"{placement.experts} experts, top-{placement.top_k}, EP {placement.ep} on {counted(placement.nodes, 'node')}"
    )


def _panels(finding: str, titles: Sequence[str], *, subtitle: str, note: str, height: int = 440) -> go.Figure:
    return panels(finding, titles, subtitle=subtitle, note=note, height=height, spacing=0.08, title_size=14)


_POWERS = tuple(2**exponent for exponent in range(11))
_MENUS: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "experts": (256, _POWERS[2:]),
    "top_k": (8, range(1, 17)),
    "ep": (32, _POWERS[:9]),
    "ranks_per_node": (8, _POWERS[:8]),
    "routing": ("random_balanced", tuple(kind for kind in KINDS if kind != "measured")),
    "groups": (8, _POWERS[:7]),
    "limited_groups": (4, _POWERS[:7]),
    "skew": (0.7, (0.3, 0.5, 0.7, 1.0, 1.5)),
    "tokens": (4096, (1024, 2048, 4096, 8192, 16384, 65536)),
    "hidden": (7168, (2048, 4096, 5120, 7168, 8192)),
    "precision": ("bf16", ("bf16", "mxfp8", "fp8")),
    "hardware": ("b200_x256", ("b200_x256",)),
    "token": (13, range(64)),
}
"""The published 671B layout, and other values."""


class TrafficExplorer(Explorer):
    """Experts, group and routing as menus; below them copies, bytes and times, and two figures.

    Args:
        measured: routing of a measured load, to be one of the menu's.
        chosen: values of controls that are to begin elsewhere than at the published 671B layout.

    Raises:
        BadInput: for a control that does not exist.
    """

    def __init__(self, measured: RoutingModel | None = None, **chosen: Any) -> None:
        unknown = sorted(set(chosen) - set(_MENUS))
        if unknown:
            raise BadInput(f"the explorer has no control {unknown[0]!r}; it has {', '.join(_MENUS)}")
        self.measured = measured
        controls = {
            name: menu(
                name,
                [*values, "measured"] if name == "routing" and measured else values,
                chosen.get(name, start),
                label_px=120,
                width_px=260,
            )
            for name, (start, values) in _MENUS.items()
        }
        super().__init__(controls, ("flow", "times"))

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """Numbers of each method, one token's way, and the time on the wires."""
        chosen = self.chosen
        placement = ExpertPlacement(**{name: chosen[name] for name in ("experts", "top_k", "ep", "ranks_per_node")})
        named = {name: chosen[name] for name in ("experts", "groups", "limited_groups", "skew")}
        routing = self.measured if chosen["routing"] == "measured" else routing_of(chosen["routing"], **named)
        assert routing is not None
        node = cluster_of(chosen["hardware"]).node
        compared = list({one.kind: one for one in (RoutingModel(kind="round_robin"), routing)}.values())
        sizes = {"tokens": chosen["tokens"], "hidden": chosen["hidden"], "precision": chosen["precision"]}
        return _numbers(routing, placement, node, **sizes), {
            "flow": token_flow(routing, placement, token=chosen["token"]),
            "times": move_times(compared, placement, node, **sizes),
        }


def _numbers(
    routing: RoutingModel, placement: ExpertPlacement, node: Node, *, tokens: int, hidden: int, precision: Precision
) -> str:
    """An HTML table; screen readers are told when it changes."""
    reached = expected_destinations(routing, placement)
    lines = []
    for method in METHODS:
        rows = expected_rows(reached, placement, method)
        layer = layer_bytes(rows.times(tokens), hidden, dispatch_precision=precision).total
        cells = {
            "copies a token, network": f"{rows.network:.2f}",
            "copies a token, NVLink": f"{rows.nvlink:.2f}",
            "GB a layer, network": f"{layer.network / 1e9:.3f}",
            "GB a layer, NVLink": f"{layer.nvlink / 1e9:.3f}",
            "ms a layer, at least": f"{1e3 * max(move_time_s(layer, node)):.2f}",
        }
        values = "".join(f"<td style='text-align:right;padding:0 10px'>{value}</td>" for value in cells.values())
        lines.append(f"<tr><th scope='row' style='text-align:left'>{METHOD_LABELS[method]}</th>{values}</tr>")
    titles = "".join(f"<th scope='col' style='padding:0 10px'>{title}</th>" for title in cells)
    return (
        f"<div role='status'>A token reaches <b>{reached.ranks:.2f} ranks</b> and <b>{reached.nodes:.2f} nodes</b> "
        f"({reached.label}).<table><tr><th></th>{titles}</tr>{''.join(lines)}</table></div>"
    )
