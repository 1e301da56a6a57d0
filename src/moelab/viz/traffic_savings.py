"""What DeepEP saves, by routing: copies on the slowest wire, and the time that wires need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moelab.hardware.spec import Node
from moelab.model import Precision
from moelab.projection import (
    METHODS,
    ExpertPlacement,
    Kind,
    Method,
    RoutingModel,
    expected_destinations,
    expected_rows,
    layer_bytes,
    move_time_s,
)
from moelab.viz.mesh import FAR, NEAR
from moelab.viz.theme import new_figure
from moelab.viz.traffic_labels import DERIVED, METHOD_LABELS, METHOD_LOOKS, ROUTING_LABELS, panels, placement_words


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
    labels = ["<br>".join(ROUTING_LABELS[routing.kind].split(" ", 1)) for routing in routings]
    figure = new_figure(
        _saving_finding(routings, rows, wire),
        subtitle=f"Copies of a token that a rank puts on {_WIRES[wire]}, forward dispatch, mean; above the bars: times "
        f"fewer than the standard all-to-all. {placement_words(placement)}.",
        note=DERIVED,
    )
    for method in METHODS:
        values = [rows[routing.kind, method] for routing in routings]
        against = [rows[routing.kind, "standard"] for routing in routings]
        ratios = [f"÷ {base / value:.1f}" if value else "" for base, value in zip(against, values, strict=True)]
        bar = go.Bar(
            x=labels,
            y=values,
            name=METHOD_LABELS[method],
            marker_color=METHOD_LOOKS[method][0],
            text=[f"{value:.2f}" for value in values] if method == "standard" else ratios,
            textposition="outside",
            textfont_size=12,
            cliponaxis=False,
            hovertemplate="%{y:.2f}",
        )
        figure.add_trace(bar)
    figure.update_yaxes(title_text=f"copies a token on {_WIRES[wire]}", range=[0, 1.15 * max(rows.values())])
    figure.update_xaxes(showgrid=False, ticks="")
    return figure.update_layout(barmode="group", bargap=0.25)


_WIRES = {"network": "the network", "nvlink": "NVLink"}


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
            layer_bytes(
                expected_rows(expected_destinations(routing, placement), placement, m).times(tokens),
                hidden,
                dispatch_precision=precision,
            ).total,
            node,
        )
        for routing in routings
        for m in METHODS
    }
    figure = panels(
        _time_finding(routings, times),
        tuple(f"{ROUTING_LABELS[routing.kind]} routing" for routing in routings),
        subtitle=f"Four exchanges of one layer; {_bandwidths(node)}; {tokens:,} tokens a rank, hidden {hidden:,}, "
        f"{precision.upper()} dispatch; {placement_words(placement)}.",
        note=DERIVED,
        columns=len(routings),
    )
    labels = ["<br>".join(METHOD_LABELS[m].split(" ", 1)) for m in METHODS]
    for column, routing in enumerate(routings, start=1):
        for index, (name, color) in enumerate((("NVLink", NEAR), ("network", FAR))):
            values = [1e3 * times[routing.kind, m][index] for m in METHODS]
            bar = go.Bar(
                x=labels,
                y=values,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                marker_color=color,
                text=[f"{value:.{3 if value >= 1 else 2}g}" if value else "" for value in values],
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{y:.2f} ms",
            )
            figure.add_trace(bar, row=1, col=column)
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


def _bandwidths(node: Node) -> str:
    wires = (("NVLink", node.gpu.nvlink_gb_s), ("network", node.nic_gb_s))
    return ", ".join(f"{name} {float(value):g} GB/s" for name, value in wires if value is not None)
