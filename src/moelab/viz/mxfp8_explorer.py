"""The quantisation explorer: draw a tensor, choose a block and a scaling, and see what becomes of its numbers.

:func:`quantisation_figure` is the whole of it as a static figure; :class:`QuantisationExplorer` puts controls above
it. torch and ipywidgets are imported when something is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.viz.theme import MUTED, WARNING, new_figure
from moelab.viz.widget import as_output, in_rows, make_panel

if TYPE_CHECKING:
    import ipywidgets
    import torch

    from moelab.mxfp8.errors import TensorErrors
    from moelab.mxfp8.formats import MX, Cast

SHAPE = (128, 512)
BLOCKS = (8, 16, 32, 64, 128, 512)
"""Block sizes to choose from; the last is a whole row."""
MOST_OUTLIER_LOG2 = 20
_BARS = "#D55E00"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is drawn.

    Attributes:
        distribution: of the values.
        outlier_log2: one column of 64 is larger by this power of two.
        block: numbers that share a scale; 32 is MXFP8's, 512 the whole row.
        scaling: how the scale follows from a block's largest magnitude.
        element: type of each number.
    """

    distribution: Literal["gaussian", "student_t"] = "gaussian"
    outlier_log2: int = 0
    block: int = 32
    scaling: Literal["floor", "rceil", "even", "ceil"] = "rceil"
    element: Literal["e4m3", "e5m2"] = "e4m3"


def quantisation_figure(choice: Choice) -> go.Figure:
    """Scales of the blocks, where the numbers lie in the element's range, and the error of each 32 numbers.

    Args:
        choice: tensor and format.

    Raises:
        BadInput: for a block that does not divide a row, or an outlier beyond 2^20.
    """
    if choice.block not in BLOCKS:
        raise BadInput(f"block is {choice.block}; valid: {', '.join(map(str, BLOCKS))}")
    if not 0 <= choice.outlier_log2 <= MOST_OUTLIER_LOG2:
        raise BadInput(f"outlier_log2 is {choice.outlier_log2}; valid: 0 to {MOST_OUTLIER_LOG2}")
    from moelab.mxfp8.errors import block_sqnr_db, measure, synthetic
    from moelab.mxfp8.formats import ELEMENTS, MX

    x = synthetic(choice.distribution, SHAPE, outlier=2.0**choice.outlier_log2)
    number_format = MX(scaling=choice.scaling, element=ELEMENTS[choice.element], block=choice.block)
    cast = number_format.cast(x)
    figure = _titled(choice, measure(x, number_format))
    exponents = np.log2(cast.scale.numpy()[:, :: choice.block]).ravel()
    _histogram(figure, 0, exponents, "scale of a block (log2)", "blocks", width=1.0)
    figure.update_layout(xaxis_dtick=max(1, math.ceil(np.ptp(exponents) / 5)), xaxis_tick0=0)
    _elements(figure, x, cast, number_format)
    errors = block_sqnr_db(x, cast.values).numpy()
    _histogram(figure, 2, errors[np.isfinite(errors)], "SQNR of 32 numbers (dB)", "groups", width=1.0)
    return figure


def _titled(choice: Choice, errors: TensorErrors) -> go.Figure:
    outliers = f", one column of 64 larger by 2^{choice.outlier_log2}" if choice.outlier_log2 else ""
    drawn = {"gaussian": "Gaussian", "student_t": "Student's t (3 degrees of freedom)"}[choice.distribution]
    shared = "one scale a row" if choice.block == SHAPE[1] else f"blocks of {choice.block}"
    figure = new_figure(
        f"SQNR {errors.sqnr_db:.1f} dB; {errors.underflow_fraction:.2%} of the values become zero, "
        f"{errors.saturated_fraction:.2%} are cut",
        subtitle=f"{drawn}{outliers}; {SHAPE[0]} rows of {SHAPE[1]}, {choice.element.upper()}, "
        f"{choice.scaling.upper()}, {shared}. Bars in parts of all.",
        height=380,
    )
    return figure.update_layout(showlegend=False, bargap=0.05, hovermode="closest", margin_b=55)


_DOMAINS = ([0.0, 0.26], [0.36, 0.66], [0.76, 1.0])


def _axes(figure: go.Figure, panel: int, x_title: str, y_title: str) -> dict[str, str]:
    suffix = "" if panel == 0 else str(panel + 1)
    x = {"domain": _DOMAINS[panel], "anchor": f"y{suffix}", "title": {"text": x_title, "font": {"size": 13}}}
    y = {"anchor": f"x{suffix}", "title": {"text": y_title, "font": {"size": 13}, "standoff": 4}, "tickformat": ".1~%"}
    figure.update_layout({f"xaxis{suffix}": x, f"yaxis{suffix}": y})
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _histogram(
    figure: go.Figure, panel: int, numbers: np.ndarray[Any, Any], x_title: str, what: str, *, width: float
) -> None:
    """Bars of a given width, whatever the range; binned here, so that the figure stays small."""
    axes = _axes(figure, panel, x_title, f"part of {what}")
    bins, counts = np.unique(np.round(numbers / width), return_counts=True)
    hover = "%{x}: %{y:.2%}<extra></extra>"
    bars = go.Bar(x=bins * width, y=counts / len(numbers), width=width, marker_color=_BARS, hovertemplate=hover)
    figure.add_trace(bars.update(axes))


def _elements(figure: go.Figure, x: torch.Tensor, cast: Cast, number_format: MX) -> None:
    """Magnitudes over their scale, in powers of two, against the range of the element."""
    element = number_format.element
    scaled = (x / cast.scale).abs().numpy().ravel()
    powers = np.floor(np.log2(scaled[scaled > 0]))
    lowest = element.emin - element.mantissa_bits
    floor = max(powers.min(), lowest - 8)
    _histogram(figure, 1, np.maximum(powers, floor), "number over its scale (log2)", "numbers", width=1.0)
    band = {"type": "rect", "y0": 0, "y1": 1, "xref": "x2", "yref": "y2 domain", "opacity": 0.16, "line_width": 0}
    if floor < lowest - 1:
        figure.add_shape(x0=floor - 0.5, x1=lowest - 1.5, fillcolor=WARNING, **band)
    figure.add_shape(x0=max(floor, lowest - 1) - 0.5, x1=element.emin - 0.5, fillcolor=MUTED, **band)
    note = {"showarrow": False, "xref": "x2 domain", "yref": "y2 domain", "font": {"size": 12, "color": MUTED}}
    figure.add_annotation(text="grey: subnormal, red: to zero", x=0.0, y=1.1, xanchor="left", **note)


class QuantisationExplorer:
    """Controls above the figure of :func:`quantisation_figure`, which follows them; show ``panel``.

    Every control is a menu or a slider, so the keyboard reaches all of them.

    Args:
        choice: where the controls begin.

    Attributes:
        choice: as the controls stand now.
        controls: by name of the field of :class:`Choice`.
        output: holds the figure.
        panel: everything, to be displayed.
    """

    def __init__(self, choice: Choice | None = None) -> None:
        import ipywidgets as widgets

        self.choice = choice or Choice()
        self.controls: dict[str, ipywidgets.Widget] = {
            name: widgets.Dropdown(options=options, description=label, style=_STYLE, layout=_WIDTH)
            for name, label, options in _MENUS
        }
        self.controls["outlier_log2"] = widgets.IntSlider(
            max=MOST_OUTLIER_LOG2, description="outliers 2^", style=_STYLE, layout=_WIDTH, continuous_update=False
        )
        for name, control in self.controls.items():
            control.value = getattr(self.choice, name)
            control.observe(self._changed, names="value")
        self.output = widgets.Output()
        self.panel = make_panel([in_rows(self.controls.values()), self.output])
        self._draw()

    def _changed(self, _change: object) -> None:
        self.choice = Choice(**{name: control.value for name, control in self.controls.items()})
        self._draw()

    def _draw(self) -> None:
        self.output.outputs = (as_output(quantisation_figure(self.choice)),)


_STYLE = {"description_width": "90px"}
_WIDTH = {"width": "310px"}
_MENUS = (
    ("distribution", "values", (("Gaussian", "gaussian"), ("Student's t", "student_t"))),
    ("block", "block", tuple((f"{size} (a row)" if size == SHAPE[1] else str(size), size) for size in BLOCKS)),
    ("scaling", "scaling", tuple((name.upper(), name) for name in ("floor", "rceil", "even", "ceil"))),
    ("element", "element", (("E4M3", "e4m3"), ("E5M2", "e5m2"))),
)
