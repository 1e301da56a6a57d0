"""MXFP8 and NVFP4 drawn: numbers as stored, the choice of a scale, errors of formats, an explorer, a token's path.

torch is imported when something is drawn that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.viz.draw import legend_below, list_rows, panels
from moelab.viz.theme import MUTED, NARROW, WARNING, WIDE, new_figure
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
"""Colour and marker of a method."""
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


def number_line(numbers: Mapping[str, Sequence[float]]) -> go.Figure:
    """Every positive number of element types, a row each, over the power of two that it lies in."""
    figure = new_figure(
        "The positive numbers of each format",
        subtitle="On a logarithmic axis equal steps are equal relative errors; where the points thin out towards zero, "
        "numbers are subnormal.",
        height=150 + 40 * len(numbers),
    )
    for name, values in numbers.items():
        mark = {"symbol": "line-ns", "size": 18, "line": {"width": 1.5, "color": "#0072B2"}}
        positive = [value for value in values if value > 0]
        figure.add_scatter(x=positive, y=[name] * len(positive), mode="markers", marker=mark, hovertemplate="%{x:g}")
    figure.update_xaxes(type="log", dtick=1, tickformat="~g")
    return list_rows(figure, "value, in units of the scale", showlegend=False)


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
        height=130 + 66 * len({row.data for row in rows}),
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
    return legend_below(list_rows(figure, names=list(dict.fromkeys(row.data for row in rows))), axis_px=40)


def product_errors(rows: Sequence[GemmRow], *, note: str = "") -> go.Figure:
    """SQNR of the products of a layer's weights, each against float64."""
    figure = new_figure(
        "What the products of a layer lose by format",
        subtitle="SQNR of each grouped GEMM against float64 over the same operands; 20 dB is an error of a tenth, "
        "40 dB of a hundredth. BF16 loses only by rounding its result.",
        note=note,
        height=130 + 58 * len({(row.weight, row.product) for row in rows}),
    )
    dots = [(row, f"{row.weight} {row.product}", row.sqnr_db) for row in rows]
    _draw_dots(figure, dots)
    return legend_below(list_rows(figure, "SQNR (dB)", names=list(dict.fromkeys(name for _, name, _ in dots))))


def _draw_dots(figure: go.Figure, rows: Sequence[tuple[ErrorRow | GemmRow, str, float]], **place: Any) -> None:
    """A trace for each method of rows, each with the name of its line and its number; methods lie apart in a line."""
    places = {name: place for place, name in enumerate(dict.fromkeys(name for _, name, _ in rows))}
    present = [method for method in _METHODS if any(row[0].method == method for row in rows)]
    for method, (color, symbol) in _METHODS.items():
        mine = [row for row in rows if row[0].method == method]
        if mine:  # a method without rows would still stand in the legend
            figure.add_scatter(
                x=[number for _, _, number in mine],
                y=[places[name] + 0.115 * (present.index(method) - (len(present) - 1) / 2) for _, name, _ in mine],
                customdata=[name for _, name, _ in mine],
                mode="markers",
                name=mine[0][0].label,
                marker={"color": color, "symbol": symbol, "size": 10, "line": {"width": 2, "color": color}},
                hovertemplate="%{x:.2f}, %{customdata}",
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
