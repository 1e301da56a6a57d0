"""MXFP8 and NVFP4 drawn: numbers as stored, the choice of a scale, errors of formats, an explorer, a token's path.

torch is imported when something is drawn that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.viz.draw import legend_below, list_rows, panels
from moelab.viz.theme import GRID, INK, MUTED, NARROW, WARNING, WIDE, new_figure
from moelab.viz.widget import Explorer, Menu, Slider

if TYPE_CHECKING:
    from moelab.micro.numerics import ErrorRow, GemmRow, StoredNumbers

_FORMATS = {"MXFP8": "#D55E00", "NVFP4": "#009E73"}
_METHODS = {
    "bf16": ("#0072B2", "circle"),
    "fp8_tensorwise": ("#CC79A7", "triangle-up"),
    "fp8_rowwise": ("#009E73", "square-open"),
    "mxfp8": ("#D55E00", "x-thin-open"),
    "mxfp8_wgrad-bf16": ("#E69F00", "diamond-open"),
    "mxfp8_even": ("#E69F00", "line-ns-open"),
    "mxfp8_floor": ("#56B4E9", "arrow-bar-left-open"),
    "nvfp4": ("#000000", "star-open"),
}
"""Colour and marker of a method; FP8 by rows and MXFP8 often coincide, so one is drawn inside the other."""
_SCALINGS: Mapping[str, Mapping[str, object]] = {
    "ceil": {"color": "rgba(230,159,0,0.5)", "width": 6},
    "even": {"color": "#009E73", "dash": "dot"},
    "floor": {"color": "#0072B2"},
    "rceil": {"color": "#D55E00", "dash": "dash"},
}
"""Lines of the scalings."""


def stored_figure(stored: Sequence[StoredNumbers], *, source: str) -> go.Figure:
    """The same numbers as each format reads them back above, the relative error of each below.

    The shaded bands are the largest rounding error of a normal number of each element type; ``source`` says in the
    subtitle where the numbers are from.
    """
    places = list(range(len(stored[0].values)))
    bands = {one.name: one.number_format.element.rounding_percent for one in stored}
    bounds = ", ".join(f"±{bands[one.name]:.3g} % in {one.number_format.element.name} ({one.name})" for one in stored)
    figure = new_figure(
        f"{len(places)} numbers in {' and '.join(f'{one.name} ({one.stored_bytes} bytes)' for one in stored)}",
        subtitle=f"{source}. SQNR {', '.join(f'{one.name} {one.sqnr_db:.1f} dB' for one in stored)}. Shaded: the most "
        f"that rounding a normal number costs, {bounds}; smaller numbers of a block are subnormal and lose more.",
        height=500,
        width=WIDE,
    ).set_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.6, 0.4])
    figure.add_bar(x=places, y=stored[0].values, name="exact", marker_color="#0072B2", opacity=0.4)
    for one in stored:
        color, band = _FORMATS[one.name], bands[one.name]
        figure.add_scatter(
            x=places,
            y=one.read_back,
            customdata=[f"{code:0{one.code_bits}b}" for code in one.codes],
            name=f"{one.name}, read back",
            mode="markers",
            marker={"symbol": "line-ew", "size": 15, "line": {"width": 3, "color": color}},
            hovertemplate="%{y:.5g}, code %{customdata}",
        )
        errors = {"y": [100 * error for error in one.errors], "name": f"{one.name}, error", "marker_color": color}
        figure.add_bar(x=places, **errors, hovertemplate="%{y:+.2f} %", showlegend=False, row=2, col=1)
        figure.add_hrect(y0=-band, y1=band, fillcolor=color, opacity=0.1, line_width=0, row=2, col=1)
    figure.update_yaxes(title_text="value", row=1).update_yaxes(title_text="error (%)", row=2)
    figure.update_xaxes(dtick=4, range=[-0.7, len(places) - 0.3]).update_xaxes(title_text="place in the row", row=2)
    return legend_below(figure.update_layout(bargap=0.15, hovermode="x unified"))


def largest_number_error(amax: Sequence[float], errors: Mapping[str, Sequence[float]]) -> go.Figure:
    """Relative error of a block's largest number, by scaling, against its multiple of the power of two below."""
    figure = new_figure(
        "FLOOR and EVEN clip a block's largest number, RCEIL and CEIL never do",
        subtitle="A block's largest number by where it lies between two powers of two; E4M3. The saw teeth are "
        "rounding, at most ±5.88 % (1/17); what falls below them is saturation.",
        height=380,
    )
    figure.add_hline(y=0, line={"color": MUTED, "width": 1})
    for name, line in _SCALINGS.items():
        percent = [round(100 * error, 3) for error in errors[name]]
        look = {"width": 2.5, **line}
        figure.add_scatter(x=amax, y=percent, name=name.upper(), line=look, hovertemplate="%{y:.1f} %")
    figure.update_xaxes(title_text="largest magnitude of the block (multiple of the power of two below)")
    return legend_below(figure.update_yaxes(title_text="its error (%)").update_layout(hovermode="x unified"))


def method_errors(rows: Sequence[ErrorRow]) -> go.Figure:
    """SQNR of every data set, that of its worst blocks, and how many values became zero, by format and scale."""
    figure = panels(
        "What tensors lose by format",
        ["SQNR of the tensor (dB)", "of its worst blocks (dB)", "to zero (%)"],
        subtitle="6 dB more halves the error. Worst blocks: the SQNR that 5 % of the blocks of 32 stay below. Plain "
        "MXFP8 has RCEIL scales. BF16 is not drawn where the tensor is BF16 already.",
        height=130 + 36 * len({row.data for row in rows}),
        spacing=0.03,
        shared=True,
        width=WIDE,
        widths=(0.4, 0.4, 0.2),
    )
    values: tuple[Callable[[ErrorRow], float], ...] = (
        lambda row: row.sqnr_db,
        lambda row: row.worst_blocks_db,
        lambda row: 100 * row.underflow_fraction,
    )
    for column, value in enumerate(values, start=1):
        known = [(row, row.data, value(row)) for row in rows if math.isfinite(value(row))]
        _draw_dots(figure, known, row=1, col=column, showlegend=column == 1)
    figure.for_each_trace(lambda trace: trace.update(legendgroup=trace.name))  # a click hides a method in all panels
    return legend_below(list_rows(figure).update_yaxes(showgrid=True), axis_px=40)


def product_errors(rows: Sequence[GemmRow], *, note: str = "") -> go.Figure:
    """SQNR of the products of a layer's weights, each against float64."""
    figure = new_figure(
        "What the products of a layer lose by format",
        subtitle="SQNR of each grouped GEMM against float64 over the same operands; 20 dB is an error of a tenth, "
        "40 dB of a hundredth. BF16 loses only by rounding its result.",
        note=note,
        height=130 + 34 * len({(row.weight, row.product) for row in rows}),
    )
    _draw_dots(figure, [(row, f"{row.weight} {row.product}", row.sqnr_db) for row in rows])
    return legend_below(list_rows(figure, "SQNR (dB)").update_yaxes(showgrid=True))


def _draw_dots(figure: go.Figure, rows: Sequence[tuple[ErrorRow | GemmRow, str, float]], **place: Any) -> None:
    """A trace for each method of rows, each with the name of its line and its number."""
    for method, (color, symbol) in _METHODS.items():
        mine = [row for row in rows if row[0].method == method]
        if mine:  # a method without rows would still stand in the legend
            figure.add_scatter(
                x=[number for _, _, number in mine],
                y=[name for _, name, _ in mine],
                mode="markers",
                name=mine[0][0].label,
                marker={"color": color, "symbol": symbol, "size": 12, "line": {"width": 2.2, "color": color}},
                hovertemplate="%{x:.2f}, %{y}",
                **place,
            )


# The explorer

SHAPE = (128, 512)
BLOCKS, MOST_OUTLIER_LOG2 = (8, 16, 32, 64, 128, 512), 20
CONTROLS: Mapping[str, Menu | Slider] = {
    "distribution": Menu("values", {"gaussian": "Gaussian", "student_t": "Student's t"}),
    "block": Menu.of("block", BLOCKS, lambda size: f"{size}{' (a row)' * (size == SHAPE[1])}"),
    "scaling": Menu.of("scaling", ("floor", "rceil", "even", "ceil"), str.upper),
    "element": Menu("element", {"e4m3": "E4M3", "e5m2": "E5M2", "e2m1": "E2M1 (NVFP4)"}),
    "outlier_log2": Slider("outliers 2^", 0, MOST_OUTLIER_LOG2),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is drawn."""

    distribution: Literal["gaussian", "student_t"] = "gaussian"
    outlier_log2: int = 0  # one column of 64 is larger by this power of two
    block: int = 32  # numbers that share a scale; 512 is the whole row
    scaling: Literal["floor", "rceil", "even", "ceil"] = "rceil"
    element: Literal["e4m3", "e5m2", "e2m1"] = "e4m3"
    """``e2m1`` is NVFP4, which has blocks of 16 and two scales whatever else is chosen."""


def quantisation_figure(choice: Choice) -> go.Figure:
    """Scales of the blocks, where the numbers lie in the element's range, and the error of each 32 numbers.

    Raises:
        BadInput: for a block that does not divide a row, or an outlier beyond 2^20.
    """
    if choice.block not in BLOCKS:
        raise BadInput(f"block is {choice.block}; valid: {', '.join(map(str, BLOCKS))}")
    if not 0 <= choice.outlier_log2 <= MOST_OUTLIER_LOG2:
        raise BadInput(f"outlier_log2 is {choice.outlier_log2}; valid: 0 to {MOST_OUTLIER_LOG2}")
    from moelab.micro.numerics import block_sqnr_db, measure, rounded_shares, synthetic
    from moelab.mxfp8.formats import ELEMENTS, MX, NVFP4

    x = synthetic(choice.distribution, SHAPE, outlier=2.0**choice.outlier_log2)
    number_format: MX | NVFP4 = NVFP4()
    shared = "NVFP4: blocks of 16, an E4M3 scale each, an FP32 scale for all"
    if choice.element != "e2m1":
        number_format = MX(scaling=choice.scaling, element=ELEMENTS[choice.element], block=choice.block)
        blocks = "one scale per row" if choice.block == SHAPE[1] else f"blocks of {choice.block}"
        shared = f"{choice.element.upper()}, {choice.scaling.upper()}, {blocks}"
    cast, errors = number_format.cast(x), measure(x, number_format)
    drawn = {"gaussian": "Gaussian", "student_t": "Student's t (3 degrees of freedom)"}[choice.distribution]
    outliers = f", one column of 64 larger by 2^{choice.outlier_log2}" if choice.outlier_log2 else ""
    figure = panels(
        f"SQNR {errors.sqnr_db:.1f} dB; {errors.underflow_fraction:.2%} of the values become zero, "
        f"{errors.saturated_fraction:.2%} are clipped",
        ("all blocks", "all numbers<br>grey: subnormal, red: to zero", "all groups of 32"),
        subtitle=f"{drawn}{outliers}; {SHAPE[0]} rows of {SHAPE[1]}; {shared}.",
        height=380,
        width=NARROW,
        spacing=0.11,
        widths=(0.26, 0.28, 0.24),
    )
    element = number_format.element
    lowest = element.emin - element.mantissa_bits
    exponents = np.log2(cast.scale.numpy()[:, :: number_format.block]).ravel()  # each number has its block's scale
    scaled = (x / cast.scale).abs().numpy().ravel()
    powers = np.floor(np.log2(scaled[scaled > 0]))  # zeros have no power of two; the title has their share
    floor = max(powers.min(), lowest - 8)
    sqnr_db = block_sqnr_db(x, cast.values).numpy()
    numbers = {
        "scale (log2)": exponents,
        "number / scale (log2)": np.maximum(powers, floor),
        "SQNR of 32 (dB)": sqnr_db[np.isfinite(sqnr_db)],
    }
    for column, (title, counted) in enumerate(numbers.items(), start=1):
        # Bars are one wide, whatever the range, and binned here, so that the figure stays small.
        bins, shares = rounded_shares(counted)
        bars = {"marker_color": _FORMATS["MXFP8"], "hovertemplate": "%{x}: %{y:.2%}<extra></extra>"}
        figure.add_bar(x=bins, y=shares, width=1.0, row=1, col=column, **bars)
        figure.update_xaxes(title={"text": title, "font": {"size": 13}}, tickangle=0, nticks=4, col=column)
    band = {"opacity": 0.16, "line_width": 0, "row": 1, "col": 2}
    if floor < lowest - 1:
        figure.add_vrect(x0=floor - 0.5, x1=lowest - 1.5, fillcolor=WARNING, **band)
    figure.add_vrect(x0=max(floor, lowest - 1) - 0.5, x1=element.emin - 0.5, fillcolor=MUTED, **band)
    figure.update_yaxes(tickformat=".1~%")
    figure.update_layout(xaxis_dtick=max(1, math.ceil(np.ptp(exponents) / 5)), xaxis_tick0=0)
    return figure.update_layout(showlegend=False, bargap=0.05, margin_b=55)


class QuantisationExplorer(Explorer):
    """Draw a tensor, choose a block and a scaling, and see what becomes of its numbers."""

    def __init__(self, choice: Choice | None = None) -> None:
        super().__init__(CONTROLS, vars(choice or Choice()))

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        """The figure of the choice; NVFP4 has its own blocks and scales."""
        for name in ("block", "scaling"):
            self.controls[name].disabled = chosen["element"] == "e2m1"
        return "", quantisation_figure(Choice(**chosen))


# The path of a token through a layer: after figure 1 of the article of PyTorch and Nebius (March 2026), drawn anew from
# what TorchTitan 0.3.0 (``models/common/moe.py``, ``token_dispatcher.py``) and torchao 0.18
# (``prototype/moe_training/mxfp8_grouped_mm.py``, ``ep/``) do. Three columns: forward runs down, and backward runs up,
# its gradients of inputs beside those of weights.

BF16, FP32, MXFP8, EITHER = "#d3e6f3", GRID, "#f6c9ad", "#fbeee6"
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


class Box(NamedTuple):
    """A step of the path: its column, its row from the top, its colour and its lines."""

    column: tuple[int, int]
    row: int
    fill: str
    text: str
    detail: str


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
    """What is quantised where on the way of a token's activations through an MXFP8 MoE layer, forward and backward."""
    height = max(_top(box.row) for box in PATH) + ROW_PX
    figure = new_figure(
        "MXFP8 enters at nine products and is gone after each; all between them stays BF16",
        subtitle="T tokens, M routed rows, D model and F expert width. A GEMM casts its operands from BF16 along the "
        "axis it sums over, and returns BF16. TorchTitan 0.3.0, torchao 0.18.",
        height=height + 148,
    )

    def write(text: str, x: float, y: float, *, anchor: str = "center", color: str = INK) -> None:
        font = {"size": 13, "color": color}
        figure.add_annotation(text=text, x=x, y=y, xanchor=anchor, showarrow=False, font=font, align="center")

    def draw_arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        ends = {"x": end[0], "y": end[1], "ax": start[0], "ay": start[1], "axref": "x", "ayref": "y"}
        look = {"arrowhead": 2, "arrowsize": 1, "arrowwidth": 1.6, "arrowcolor": MUTED}
        figure.add_annotation(text="", showarrow=True, **ends, **look)

    for box in PATH:
        (left, right), top = box.column, _top(box.row)
        edges = {"x0": left, "x1": right, "y0": top, "y1": top + ROW_PX, "layer": "below"}
        figure.add_shape(type="rect", fillcolor=box.fill, line=_EDGES.get(box.fill, _PLAIN), **edges)
        text = f"<b>{box.text}</b><br><span style='font-size:12px'>{box.detail}</span>"
        write(text, (left + right) / 2, top + ROW_PX / 2)
    for column, down in ((FORWARD, True), (DGRAD, False)):
        x = sum(column) / 2
        for upper, lower in pairwise(_top(box.row) for box in PATH if box.column == column):
            ends = [(x, upper + ROW_PX), (x, lower)]
            draw_arrow(*(ends if down else ends[::-1]))
    # Wgrad takes the gradient that comes from below and the activation kept from the forward pass.
    for row in (4, 8):
        x, bottom = sum(WGRAD) / 2 + 20, _top(row) + ROW_PX
        draw_arrow((DGRAD[1], _top(row + 1) + 10), (WGRAD[0] + 24, bottom))
        draw_arrow((x, bottom), (x, bottom + GAP_PX))
    write("x, h kept from forward;<br>wgrad may stay BF16", WGRAD[0] + 104, _top(3) + 26, color=MUTED)
    for column, text in ((FORWARD, "forward ↓"), (DGRAD, "backward ↑"), (WGRAD, "weight gradients")):
        write(f"<b>{text}</b>", sum(column) / 2, -16)
    y = height + 34
    for x, filled, text in _LEGEND:
        line = {"dash": "solid", **_EDGES.get(filled, _PLAIN), "width": 1}
        figure.add_shape(type="rect", x0=x, x1=x + 18, y0=y - 9, y1=y + 9, fillcolor=filled, line=line)
        write(text, x + 24, y, anchor="left")
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(**hidden, range=[-4, 744]).update_yaxes(**hidden, range=[height + 52, -30])
    return figure.update_layout(margin={"l": 8, "r": 8, "b": 6}, showlegend=False, hovermode=False)


def _top(row: int) -> int:
    """Upper edge of a row of boxes, px from the top of the drawing."""
    return row * (ROW_PX + GAP_PX)
