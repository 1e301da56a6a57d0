"""The traffic explorer: experts, group and routing as controls; below them the numbers and two figures that follow.

It shows nothing of its own: the numbers are those of :mod:`moelab.projection`, the figures those of this package.
ipywidgets loads slowly, so it is imported when an explorer is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.hardware import cluster_of
from moelab.projection import (
    KINDS,
    METHODS,
    ExpertPlacement,
    RoutingModel,
    expected_destinations,
    expected_rows,
    layer_bytes,
    move_time_s,
    routing_of,
)
from moelab.viz.traffic import METHOD_LABELS, move_times, token_flow
from moelab.viz.widget import as_output, in_rows, make_panel, refusal

if TYPE_CHECKING:
    import ipywidgets

FIGURES = ("flow", "times")
_POWERS = tuple(2**exponent for exponent in range(11))
_MENUS: Mapping[str, Sequence[Any]] = {
    "experts": _POWERS[2:],
    "top_k": tuple(range(1, 17)),
    "ep": _POWERS[:9],
    "ranks_per_node": _POWERS[:8],
    "routing": KINDS,
    "groups": _POWERS[:7],
    "limited_groups": _POWERS[:7],
    "skew": (0.3, 0.5, 0.7, 1.0, 1.5),
    "tokens": (1024, 2048, 4096, 8192, 16384, 65536),
    "hidden": (2048, 4096, 5120, 7168, 8192),
    "precision": ("bf16", "mxfp8", "fp8"),
    "hardware": ("b200_x256",),
    "token": tuple(range(64)),
}
DEFAULTS: Mapping[str, Any] = {
    "experts": 256,
    "top_k": 8,
    "ep": 32,
    "ranks_per_node": 8,
    "routing": "random_balanced",
    "groups": 8,
    "limited_groups": 4,
    "skew": 0.7,
    "tokens": 4096,
    "hidden": 7168,
    "precision": "bf16",
    "hardware": "b200_x256",
    "token": 13,
}
"""The published 671B layout."""


class TrafficExplorer:
    """Controls, numbers and figures that belong together; show ``panel``.

    Every control is a menu, so the keyboard reaches all of them. What cannot be is said in words, as for a wrong file.

    Args:
        chosen: values of controls that are to begin elsewhere than :data:`DEFAULTS`.

    Raises:
        BadInput: for a control that does not exist.

    Attributes:
        controls: by name.
        summary: copies, bytes and times as HTML.
        figures: by name of ``FIGURES``; empty where a choice cannot be.
        panel: everything, to be displayed.
    """

    def __init__(self, **chosen: Any) -> None:
        import ipywidgets as widgets

        unknown = sorted(set(chosen) - set(DEFAULTS))
        if unknown:
            raise BadInput(f"the explorer has no control {unknown[0]!r}; it has {', '.join(DEFAULTS)}")
        self.controls: dict[str, ipywidgets.Widget] = {
            name: widgets.Dropdown(
                description=name, options=_options(name, value), value=value, style=_STYLE, layout=_WIDTH
            )
            for name, value in {**DEFAULTS, **chosen}.items()
        }
        self.summary = widgets.HTML()
        self.figures = {name: widgets.Output() for name in FIGURES}
        self.panel = make_panel([in_rows(self.controls.values()), self.summary, *self.figures.values()])
        for control in self.controls.values():
            control.observe(self._refresh, names="value")
        self._refresh()

    @property
    def chosen(self) -> dict[str, Any]:
        """Values of all controls."""
        return {name: control.value for name, control in self.controls.items()}

    def _refresh(self, _change: object = None) -> None:
        chosen = self.chosen
        try:
            placement = ExpertPlacement(**{name: chosen[name] for name in _PLACEMENT})
            named = {name: chosen[name] for name in ("experts", "groups", "limited_groups", "skew")}
            routing = routing_of(chosen["routing"], **named)
            self.summary.value = _summary(routing, placement, chosen)
            drawn = _figures(routing, placement, chosen)
        except BadInput as error:
            self.summary.value = refusal("Cannot be", [str(error)])
            drawn = {}
        for name, output in self.figures.items():
            output.outputs = (as_output(drawn[name]),) if name in drawn else ()


_PLACEMENT = ("experts", "top_k", "ep", "ranks_per_node")
_STYLE = {"description_width": "120px"}
_WIDTH = {"width": "260px"}


def _options(name: str, value: Any) -> list[Any]:
    """Values of a menu, the first one among them."""
    options = list(dict.fromkeys([*_MENUS[name], value]))
    return options if isinstance(value, str) else sorted(options)


def _summary(routing: RoutingModel, placement: ExpertPlacement, chosen: Mapping[str, Any]) -> str:
    """The numbers as an HTML table; screen readers are told when it changes."""
    found = expected_destinations(routing, placement)
    node = cluster_of(chosen["hardware"]).node
    lines = []
    for method in METHODS:
        rows = expected_rows(found, placement, method)
        layer = layer_bytes(
            rows.times(chosen["tokens"]), chosen["hidden"], dispatch_precision=chosen["precision"]
        ).total
        nvlink_s, network_s = move_time_s(layer, node)
        cells = (
            f"{rows.network:.2f}",
            f"{rows.nvlink:.2f}",
            f"{layer.network / 1e9:.3f}",
            f"{layer.nvlink / 1e9:.3f}",
            f"{1e3 * max(nvlink_s, network_s):.2f}",
        )
        lines.append(f"<tr><th scope='row' style='text-align:left'>{METHOD_LABELS[method]}</th>{_cells(cells)}</tr>")
    head = (
        "copies a token, network",
        "copies a token, NVLink",
        "GB a layer, network",
        "GB a layer, NVLink",
        "ms a layer, at least",
    )
    titles = "".join(f"<th scope='col' style='padding:0 10px'>{title}</th>" for title in head)
    return (
        f"<div role='status'>A token reaches <b>{found.ranks:.2f} ranks</b> and <b>{found.nodes:.2f} nodes</b> "
        f"({found.label}).<table><tr><th></th>{titles}</tr>{''.join(lines)}</table></div>"
    )


def _cells(values: Sequence[str]) -> str:
    return "".join(f"<td style='text-align:right;padding:0 10px'>{value}</td>" for value in values)


def _figures(routing: RoutingModel, placement: ExpertPlacement, chosen: Mapping[str, Any]) -> dict[str, go.Figure]:
    compared = list({one.kind: one for one in (RoutingModel(kind="round_robin"), routing)}.values())
    sizes = {"tokens": chosen["tokens"], "hidden": chosen["hidden"], "precision": chosen["precision"]}
    return {
        "flow": token_flow(routing, placement, token=chosen["token"]),
        "times": move_times(compared, placement, cluster_of(chosen["hardware"]).node, **sizes),
    }
