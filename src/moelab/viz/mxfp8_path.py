"""The path of a token's activations through an MXFP8 MoE layer, forward and backward: what is quantised where.

After figure 1 of the article of PyTorch and Nebius (March 2026), drawn anew from what TorchTitan 0.3.0
(``models/common/moe.py``, ``token_dispatcher.py``) and torchao 0.18 (``prototype/moe_training/mxfp8_grouped_mm.py``,
``ep/``) do. Three columns: forward runs down, and backward runs up, its gradients of inputs beside those of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import plotly.graph_objects as go

from moelab.viz.theme import INK, MUTED, new_figure

BF16, FP32, MXFP8, EITHER = "#d3e6f3", "#e6e9ee", "#f6c9ad", "#fbeee6"
_PLAIN = {"color": MUTED, "width": 1}
_EDGES = {
    MXFP8: {"color": "#D55E00", "width": 1.6},
    EITHER: {"color": "#D55E00", "width": 1, "dash": "dash"},
}
"""Edges of boxes by what fills them; of the others they are plain."""
_LEGEND = (
    (4, MXFP8, "both operands MXFP8"),
    (196, BF16, "BF16"),
    (300, EITHER, "BF16, or MXFP8 by torchao's all-to-all"),
    (600, FP32, "FP32"),
)
FORWARD, DGRAD, WGRAD = (0, 252), (266, 518), (532, 740)
"""Left and right edge of each column, px."""
ROW_PX, GAP_PX = 44, 16


@dataclass(frozen=True)
class Box:
    """A step of the path: its column, its first row, its lines and its colour; ``rows`` high."""

    column: tuple[int, int]
    row: int
    fill: str
    text: str
    detail: str
    rows: int = 1

    @property
    def top(self) -> float:
        """Upper edge, px from the top of the drawing."""
        return self.row * (ROW_PX + GAP_PX)

    @property
    def bottom(self) -> float:
        """Lower edge, px from the top of the drawing."""
        return self.top + self.rows * ROW_PX + (self.rows - 1) * GAP_PX

    @property
    def middle(self) -> float:
        """Centre from the left, px."""
        return (self.column[0] + self.column[1]) / 2


PATH = (
    Box(FORWARD, 0, BF16, "token x", "(T, D)"),
    Box(FORWARD, 1, FP32, "router: gate, scores, top-k", "never quantised"),
    Box(FORWARD, 2, EITHER, "dispatch: all-to-all", "to the ranks of its experts"),
    Box(FORWARD, 3, BF16, "routed x", "(M, D), one expert after another"),
    Box(FORWARD, 4, MXFP8, "grouped GEMM w1, w3", "x along D · w along D"),
    Box(FORWARD, 5, BF16, "gate a, up u", "(M, F)"),
    Box(FORWARD, 6, BF16, "SwiGLU: silu(a) · u", "elementwise"),
    Box(FORWARD, 7, BF16, "hidden h", "(M, F)"),
    Box(FORWARD, 8, MXFP8, "grouped GEMM w2", "h along F · w along F"),
    Box(FORWARD, 9, BF16, "expert output y", "(M, D)"),
    Box(FORWARD, 10, BF16, "combine: all-to-all", "scores multiplied in FP32"),
    Box(FORWARD, 11, BF16, "output", "(T, D), with shared experts"),
    Box(DGRAD, 0, BF16, "gradient of x", "(T, D)"),
    Box(DGRAD, 2, BF16, "dispatch backward: all-to-all", "sums over a token's experts"),
    Box(DGRAD, 3, BF16, "gradient of routed x", "(M, D), of w1 plus of w3"),
    Box(DGRAD, 4, MXFP8, "dgrad w1, w3", "gradient along F · w along F"),
    Box(DGRAD, 5, BF16, "gradients of a, u", "(M, F)"),
    Box(DGRAD, 6, BF16, "SwiGLU backward", "elementwise"),
    Box(DGRAD, 7, BF16, "gradient of h", "(M, F)"),
    Box(DGRAD, 8, MXFP8, "dgrad w2", "gradient along D · w along D"),
    Box(DGRAD, 9, BF16, "gradient of y", "(M, D)"),
    Box(DGRAD, 10, EITHER, "combine backward: all-to-all", "scores multiplied in FP32"),
    Box(DGRAD, 11, BF16, "gradient of output", "(T, D)"),
    Box(WGRAD, 4, MXFP8, "wgrad w1, w3", "gradient, x along tokens"),
    Box(WGRAD, 5, FP32, "weights, Adam", "FP32 master, sharded"),
    Box(WGRAD, 8, MXFP8, "wgrad w2", "gradient, h along tokens"),
    Box(WGRAD, 9, FP32, "weights, Adam", "FP32 master, sharded"),
)


def mxfp8_path() -> go.Figure:
    """The path as a figure; hovering over a box is not needed, all is written in it."""
    height = max(box.bottom for box in PATH)
    figure = new_figure(
        "MXFP8 enters at nine products and is gone after each; all between them stays BF16",
        subtitle="T tokens, M routed rows, D model and F expert width. A GEMM casts its operands from BF16 along the "
        "axis it sums over, and returns BF16. TorchTitan 0.3.0, torchao 0.18.",
        height=int(height) + 148,
    )
    for box in PATH:
        _draw(figure, box)
    for column, down in ((FORWARD, True), (DGRAD, False)):
        boxes = sorted((box for box in PATH if box.column == column), key=lambda box: box.row)
        for upper, lower in pairwise(boxes):
            start, end = (upper.bottom, lower.top) if down else (lower.top, upper.bottom)
            _arrow(figure, (upper.middle, start), (upper.middle, end))
    _weight_gradients(figure)
    for column, text in ((FORWARD, "forward ↓"), (DGRAD, "backward ↑"), (WGRAD, "weight gradients")):
        _write(figure, f"<b>{text}</b>", (column[0] + column[1]) / 2, -16)
    y = height + 34
    for x, fill, text in _LEGEND:
        line = {"dash": "solid", **_EDGES.get(fill, _PLAIN), "width": 1}
        figure.add_shape(type="rect", x0=x, x1=x + 18, y0=y - 9, y1=y + 9, fillcolor=fill, line=line)
        _write(figure, text, x + 24, y, anchor="left")
    hidden = {"visible": False, "fixedrange": True}
    figure.update_layout(
        xaxis={**hidden, "range": [-4, 744]}, yaxis={**hidden, "range": [height + 52, -30]}, hovermode=False
    )
    return figure.update_layout(margin={"l": 8, "r": 8, "b": 6}, showlegend=False)


def _draw(figure: go.Figure, box: Box) -> None:
    left, right = box.column
    line, corners = _EDGES.get(box.fill, _PLAIN), {"x0": left, "x1": right, "y0": box.top, "y1": box.bottom}
    figure.add_shape(type="rect", fillcolor=box.fill, line=line, layer="below", **corners)
    text = f"<b>{box.text}</b><br><span style='font-size:12px'>{box.detail}</span>"
    _write(figure, text, box.middle, (box.top + box.bottom) / 2)


def _write(figure: go.Figure, text: str, x: float, y: float, *, anchor: str = "center", color: str = INK) -> None:
    figure.add_annotation(
        text=text, x=x, y=y, xanchor=anchor, showarrow=False, font={"size": 13, "color": color}, align="center"
    )


def _arrow(figure: go.Figure, start: tuple[float, float], end: tuple[float, float]) -> None:
    figure.add_annotation(
        x=end[0],
        y=end[1],
        ax=start[0],
        ay=start[1],
        axref="x",
        ayref="y",
        text="",
        showarrow=True,
        arrowhead=2,
        arrowsize=1,
        arrowwidth=1.6,
        arrowcolor=MUTED,
    )


def _weight_gradients(figure: go.Figure) -> None:
    """Wgrad takes the gradient that comes from below and the activation kept from the forward pass."""
    for row in (4, 8):
        wgrad = next(box for box in PATH if box.column == WGRAD and box.row == row)
        gradient = next(box for box in PATH if box.column == DGRAD and box.row == row + 1)
        start = (gradient.column[1], gradient.top + 10)
        _arrow(figure, start, (wgrad.column[0] + 24, wgrad.bottom))
        _arrow(figure, (wgrad.middle + 20, wgrad.bottom), (wgrad.middle + 20, wgrad.bottom + GAP_PX))
    _write(
        figure,
        "x, h kept from forward;<br>wgrad may stay BF16",
        WGRAD[0] + 104,
        3 * (ROW_PX + GAP_PX) + 26,
        color=MUTED,
    )
