"""DeepEP's gain against the degree of expert parallelism inside one node: what was predicted, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from moelab.analysis.two_by_two import ArmResult, checkpointing_words, two_by_two_label
from moelab.projection.measured import EP_DEGREES, ROUTINGS, SCALING, Measurement, Place, hardware_of, node_results
from moelab.viz.draw import panels
from moelab.viz.theme import MUTED, arm_styles, plot_text

ARMS = ("bf16_deepep", "fp8_deepep_dispatch-fp8")
ROUTING_WORDS = {"round_robin": "forced round-robin", "random_balanced": "balanced random"}
ASIDE = 0.07
"""How far apart a prediction and a measurement of the same arm are drawn."""

Predictions = Mapping[Place, Mapping[str, Any]]


def scaling(predicted: Mapping[str, Any], full_node: Measurement, two_by_two: Measurement) -> go.Figure:
    """Gain over stock at the same degree, both under full checkpointing, a panel for each routing.

    Args:
        predicted: content of ``h100_full_node_predicted``.
        full_node: of ``h200_full_node``, if it was measured.
        two_by_two: of ``h100_two_by_two``, for two GPUs.
    """
    newest, rows, found = _both(predicted, full_node, two_by_two)
    checkpointing = checkpointing_words(predicted["shapes"][SCALING]["activation_checkpoint"])
    open_ = [f"EP {ep}" for ep in EP_DEGREES if ep not in {place.ep for place in found}]
    figure = panels(
        _finding(rows, found),
        [f"{ROUTING_WORDS[routing]} routing" for routing in ROUTINGS],
        subtitle=f"{SCALING}, {checkpointing}: tokens/s over stock "
        f"at the same degree. Open: predicted on "
        f"{predicted['date'][:10]} (derived, 90 % interval); filled: median of all steps with quartiles, "
        f"{newest.stamp}.",
        note=f"predicted: {', '.join(open_)} not measured yet" if open_ else "",
        height=420,
        shared=True,
    )
    styles = arm_styles(ARMS)
    for column, routing in enumerate(ROUTINGS, start=1):
        for side, arm in enumerate(ARMS):
            middle = (side - (len(ARMS) - 1) / 2) * 3 * ASIDE
            style, name = styles[arm], plot_text(two_by_two_label(arm))
            lines = _predicted(rows, routing, arm, middle - ASIDE / 2, style, name)
            points = _measured(found, routing, arm, middle + ASIDE / 2, style, name)
            figure.add_traces([lines, points], rows=1, cols=column)
            figure.update_traces(showlegend=column == 1, col=column)
    figure.add_hline(y=1, line={"color": MUTED, "width": 1, "dash": "dot"})
    places = list(range(len(EP_DEGREES)))
    figure.update_xaxes(tickvals=places, ticktext=[f"EP {ep}" for ep in EP_DEGREES], showgrid=False)
    figure.update_xaxes(range=[-0.5, len(EP_DEGREES) - 0.5])
    figure.update_yaxes(title_text="× stock", col=1)
    return figure.update_layout(hovermode="closest", legend_y=-0.14)


def interval_lines(predicted: Mapping[str, Any], full_node: Measurement, two_by_two: Measurement) -> list[str]:
    """A line for each filled mark: the measured gain, and whether it lies in the interval of its prediction."""
    _, rows, found = _both(predicted, full_node, two_by_two)
    lines = []
    for place, one in found.items():
        low, high = rows[place]["gain_interval"]
        inside = "inside" if low <= (one.ratio or 0.0) <= high else "OUTSIDE"
        what = f"EP {place.ep}, {ROUTING_WORDS[place.routing]}, {two_by_two_label(place.arm)}"
        lines.append(f"{what}: measured {one.ratio:.3f} ×, predicted {low:.3f} to {high:.3f} ×: {inside}")
    return lines


def _both(
    predicted: Mapping[str, Any], full_node: Measurement, two_by_two: Measurement
) -> tuple[Measurement, Predictions, dict[Place, ArmResult]]:
    """The newest measurement, the predictions for its GPUs, and what was measured of them."""
    newest = full_node if full_node.rows else two_by_two
    hardware = hardware_of(newest)
    rows = {
        Place(row["shape"], row["ep"], row["routing"], row["arm"]): row
        for row in predicted["rows"]
        if (row["hardware"], row["shape"]) == (hardware, SCALING) and row["arm"] in ARMS
    }
    measured = node_results(full_node, two_by_two)
    return newest, rows, {place: one for place, one in measured.items() if place in rows and one.ratio is not None}


def _predicted(rows: Predictions, routing: str, arm: str, aside: float, style: Any, name: str) -> go.Scatter:
    here = [row for place, row in rows.items() if (place.routing, place.arm) == (routing, arm)]
    return go.Scatter(
        x=[EP_DEGREES.index(row["ep"]) + aside for row in here],
        y=[row["gain"] for row in here],
        error_y=_bars([(row["gain"], *row["gain_interval"]) for row in here], style.color),
        mode="lines+markers",
        name=f"{name}, predicted",
        line={"color": style.color, "dash": "dot", "width": 1.5},
        marker={"symbol": f"{style.symbol}-open", "size": 11, "line_width": 2},
        hovertemplate=f"{name}, predicted: %{{y:.3f}} ×<extra></extra>",
    )


def _measured(
    found: Mapping[Place, ArmResult], routing: str, arm: str, aside: float, style: Any, name: str
) -> go.Scatter:
    here = {place.ep: one for place, one in found.items() if (place.routing, place.arm) == (routing, arm)}
    stock = [one.tps / (one.ratio or 1.0) for one in here.values()]
    ratios = [(one.tps / tps, one.low / tps, one.high / tps) for one, tps in zip(here.values(), stock, strict=True)]
    return go.Scatter(
        x=[EP_DEGREES.index(ep) + aside for ep in here],
        y=[ratio for ratio, _, _ in ratios],
        error_y=_bars(ratios, style.color),
        mode="markers",
        name=f"{name}, measured",
        marker={"color": style.color, "symbol": style.symbol, "size": 11},
        hovertemplate=f"{name}, measured: %{{y:.3f}} ×<extra></extra>",
    )


def _bars(values: Sequence[tuple[float, float, float]], color: str) -> dict[str, Any]:
    return {
        "array": [high - middle for middle, _, high in values],
        "arrayminus": [middle - low for middle, low, _ in values],
        "symmetric": False,
        "color": color,
        "thickness": 1.2,
        "width": 4,
    }


def _finding(rows: Predictions, found: Mapping[Place, ArmResult]) -> str:
    """What both routings say of the first arm at both ends of the degrees measured, or predicted if one alone was."""
    measured = [ep for ep in EP_DEGREES if all(Place(SCALING, ep, routing, ARMS[0]) in found for routing in ROUTINGS)]
    said, eps = ("gains", measured) if len(measured) > 1 else ("is predicted to gain", EP_DEGREES)
    ends = (eps[0], eps[-1])
    words = []
    for routing in ROUTINGS:
        places = [Place(SCALING, ep, routing, ARMS[0]) for ep in ends]
        first, last = (
            float(found[place].ratio or 0.0) if len(measured) > 1 else float(rows[place]["gain"]) for place in places
        )
        words.append(f"{first:.2f} to {last:.2f} × under {ROUTING_WORDS[routing]}")
    return f"{two_by_two_label(ARMS[0])} {said} {words[0]} and {words[1]} routing, from EP {ends[0]} to EP {ends[1]}"
