"""How torchao's four ways to choose a block's scale treat its largest number, and what that does to whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from moelab.viz.theme import MUTED, new_figure

if TYPE_CHECKING:
    from moelab.mxfp8.errors import ErrorRow

LOOKS = {
    "floor": ("#0072B2", "solid", "circle"),
    "even": ("#009E73", "dot", "diamond"),
    "ceil": ("#E69F00", "solid", "square-open"),
    "rceil": ("#D55E00", "dash", "x"),
}
"""Colour, dash and marker of a scaling."""
ROUNDING = 1 / 17
"""Largest relative error of rounding to E4M3's three bits: half a step, 2⁻⁴, on a number of 1 + 2⁻⁴."""


def largest_number_error(amax: Sequence[float], errors: Mapping[str, Sequence[float]]) -> go.Figure:
    """Relative error of a block's largest number against where it lies between two powers of two.

    Args:
        amax: largest magnitudes, as multiples of the power of two below.
        errors: by name of the scaling: relative errors at each of them.
    """
    worst = {name: 100 * max(map(abs, found)) for name, found in errors.items()}
    kept = [name.upper() for name, most in worst.items() if most <= 100 * ROUNDING + 1e-3]
    figure = new_figure(
        f"FLOOR cuts a block's largest number by up to {worst['floor']:.1f} %, {' and '.join(kept)} never cut it",
        subtitle="A block's largest number by where it lies between two powers of two; E4M3. The saw teeth are "
        "rounding, at most ±5.88 % (1/17); what falls below them is saturation.",
        height=380,
    )
    for name, found in sorted(errors.items()):
        color, dash, _ = LOOKS[name]
        figure.add_trace(
            go.Scatter(
                x=amax,
                y=[round(100 * error, 3) for error in found],
                name=name.upper(),
                line={"color": color, "dash": dash, "width": 6 if name == "ceil" else 2.5},
                opacity=0.5 if name == "ceil" else 1,
                hovertemplate="%{y:.1f} %",
            )
        )
    figure.update_layout(legend_y=-0.26)
    figure.add_hline(y=0, line={"color": MUTED, "width": 1})
    figure.update_xaxes(title_text="largest magnitude of the block (multiple of the power of two below)")
    return figure.update_yaxes(title_text="its error (%)")


def scaling_errors(rows: Sequence[ErrorRow]) -> go.Figure:
    """SQNR of whole tensors by scaling, and the part of their values that is cut.

    Args:
        rows: from :func:`moelab.mxfp8.errors.compare_scalings`.
    """
    lost = {row.data: -row.sqnr_db for row in rows if row.method == "floor"}
    for row in rows:
        if row.method == "rceil":
            lost[row.data] += row.sqnr_db
    cut = max(rows, key=lambda row: row.saturated_fraction)
    figure = new_figure(
        f"FLOOR costs {min(lost.values()):.1f} to {max(lost.values()):.1f} dB against RCEIL",
        subtitle="MXFP8 (E4M3) of whole tensors; more is better, 6 dB halve the error. "
        f"The largest part of values that is cut: {cut.saturated_fraction:.1%}, {cut.data} with {cut.label}.",
        height=120 + 44 * len(lost),
    )
    for name, (color, _, symbol) in LOOKS.items():
        mine = [row for row in rows if row.method == name]
        figure.add_trace(
            go.Scatter(
                x=[row.sqnr_db for row in mine],
                y=[row.data for row in mine],
                customdata=[[row.saturated_fraction, row.underflow_fraction] for row in mine],
                mode="markers",
                name=name.upper(),
                marker={
                    "color": color,
                    "symbol": symbol,
                    "size": 15 if name == "ceil" else 10,
                    "line": {"width": 1.5, "color": color},
                },
                hovertemplate="%{x:.1f} dB, %{customdata[0]:.2%} cut, %{customdata[1]:.2%} to zero",
            )
        )
    figure.update_layout(hovermode="closest", legend={"y": -90 / (50 + 44 * len(lost))})
    figure.update_yaxes(autorange="reversed", showgrid=True)
    return figure.update_xaxes(title_text="SQNR (dB)")
