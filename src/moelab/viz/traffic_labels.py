"""What figures of traffic share: names and looks of methods and routings, panels side by side, sizes in words."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.projection import ExpertPlacement, Method
from moelab.viz.theme import MUTED, new_figure

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
}
ROUTING_LOOKS = {
    "round_robin": ("#D55E00", "/"),
    "random_balanced": ("#0072B2", ""),
    "uniform": ("#56B4E9", "."),
    "group_limited": ("#009E73", "x"),
    "group_by_score": ("#CC79A7", "\\"),
    "skewed": ("#E69F00", "-"),
}
DERIVED = "derived, not measured"


def panels(
    finding: str, titles: tuple[str, ...], *, subtitle: str, note: str, columns: int = 2, height: int = 440
) -> go.Figure:
    """Panels side by side under one title."""
    headed = new_figure(finding, subtitle=subtitle, note=note, height=height)
    figure = make_subplots(rows=1, cols=columns, subplot_titles=titles, horizontal_spacing=0.08)
    figure.update_layout(headed.layout)
    figure.update_annotations(font={"size": 14, "color": MUTED})
    return figure.update_layout(margin_t=headed.layout.margin.t + 24, height=headed.layout.height + 24)


def placement_words(placement: ExpertPlacement) -> str:
    """The placement in a few words."""
    return (
        f"{placement.experts} experts, top-{placement.top_k}, EP {placement.ep} on {counted(placement.nodes, 'node')}"
    )


def counted(number: int, what: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"
