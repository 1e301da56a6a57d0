"""One block of MXFP8 drawn: 32 numbers, what is read back of each, and its error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.viz.theme import MUTED, new_figure

if TYPE_CHECKING:
    from moelab.mxfp8.errors import OneBlock

EXACT, STORED = "#0072B2", "#D55E00"


def block_figure(block: OneBlock, *, source: str) -> go.Figure:
    """Values and what is read back above, the relative error of each below.

    Args:
        block: the numbers and their cast.
        source: where the numbers are from, for the subtitle.

    Returns:
        The figure. The shaded band is half a step of the element type, the largest error of a normal number.
    """
    element = block.number_format.element
    half_step = 100 * 2.0 ** -(element.mantissa_bits + 1)
    worst = 100 * max(abs(error) for error in block.errors)
    count = len(block.values)
    figure = new_figure(
        f"{count} numbers in {count + 1} bytes: the scale is 2^{block.exponent}, the worst error {worst:.1f} %",
        subtitle=f"{source}. The largest magnitude, {block.amax:.4g}, sets the scale of all; "
        f"SQNR {block.sqnr_db:.1f} dB. Shaded: half a step of {element.name}, ±{half_step:g} %.",
        height=470,
    )
    panels = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.62, 0.38])
    figure.update_layout({name: panels.layout[name] for name in ("xaxis", "xaxis2", "yaxis", "yaxis2")})
    places = list(range(count))
    figure.add_trace(go.Bar(x=places, y=block.values, name="exact", marker_color=EXACT, opacity=0.55))
    figure.add_trace(
        go.Scatter(
            x=places,
            y=block.read_back,
            customdata=[f"{code:08b}" for code in block.codes],
            name=f"read back from {element.name}",
            mode="markers",
            marker={"symbol": "line-ew", "size": 14, "line": {"width": 3, "color": STORED}},
            hovertemplate="%{y:.5g}, code %{customdata}",
        )
    )
    figure.add_trace(
        go.Bar(
            x=places,
            y=[100 * error for error in block.errors],
            yaxis="y2",
            xaxis="x2",
            name="error",
            marker_color=MUTED,
            showlegend=False,
            hovertemplate="%{y:+.2f} %",
        )
    )
    figure.add_shape(
        type="rect",
        x0=0,
        x1=1,
        y0=-half_step,
        y1=half_step,
        xref="x2 domain",
        yref="y2",
        fillcolor=STORED,
        opacity=0.1,
        line_width=0,
    )
    figure.update_yaxes(title_text="value", selector={"anchor": "x"})
    figure.update_layout(yaxis2={"title": {"text": "error (%)"}}, xaxis2={"title": {"text": "place in the block"}})
    figure.update_layout(xaxis2={"dtick": 4, "range": [-0.7, count - 0.3]}, margin_b=50)
    return figure.update_layout(legend={"y": 1.0, "yanchor": "bottom"}, margin_t=figure.layout.margin.t + 22)
