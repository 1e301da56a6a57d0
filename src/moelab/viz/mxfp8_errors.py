"""Errors of number formats side by side: by data set, and for the nine products of an expert layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from moelab.viz.theme import new_figure

if TYPE_CHECKING:
    from moelab.mxfp8.errors import ErrorRow, GemmRow

LOOKS = {
    "bf16": ("#0072B2", "circle"),
    "fp8_tensorwise": ("#CC79A7", "triangle-up"),
    "fp8_rowwise": ("#009E73", "square-open"),
    "mxfp8": ("#D55E00", "x-thin-open"),
    "mxfp8_wgrad-bf16": ("#E69F00", "diamond-open"),
}
"""Colour and marker of a method; FP8 by rows and MXFP8 often coincide, so one is drawn inside the other."""
_ROW_PX = 40


def method_errors(rows: Sequence[ErrorRow], *, note: str = "") -> go.Figure:
    """SQNR of every data set, that of its worst blocks, and how many values became zero.

    Args:
        rows: from :func:`moelab.mxfp8.errors.compare_methods`; a method that loses nothing of a tensor is
            left out there.
        note: condition that must not be missed.
    """
    names = list(dict.fromkeys(row.data for row in rows))
    figure = new_figure(
        _methods_finding(rows),
        subtitle="Left: SQNR of the whole tensor. Middle: SQNR that the worst 5 % of blocks of 32 stay below. Right: "
        "values that became zero. BF16 is not drawn where the tensor is BF16 already.",
        note=note,
        height=130 + _ROW_PX * len(names),
    )
    panels: tuple[tuple[str, list[float], Callable[[ErrorRow], float], str], ...] = (
        ("", [0.0, 0.36], lambda row: row.sqnr_db, "tensor (dB)"),
        ("2", [0.41, 0.77], lambda row: row.worst_blocks_db, "worst blocks (dB)"),
        ("3", [0.82, 1.0], lambda row: 100 * row.underflow_fraction, "to zero (%)"),
    )
    for suffix, domain, number, title in panels:
        for method in LOOKS:
            mine = [row for row in rows if row.method == method and math.isfinite(number(row))]
            if mine:
                trace = _dots([number(row) for row in mine], [row.data for row in mine], mine[0])
                figure.add_trace(trace.update(xaxis=f"x{suffix}", showlegend=not suffix, legendgroup=method))
        figure.update_layout({f"xaxis{suffix}": {"domain": domain, "title": {"text": title}, "anchor": "y"}})
    return _finish(figure, names)


def product_errors(rows: Sequence[GemmRow], *, note: str = "") -> go.Figure:
    """SQNR of the products of a layer's weights, each against float64.

    Args:
        rows: from :func:`moelab.mxfp8.errors.compare_products`.
        note: condition that must not be missed.
    """
    names = list(dict.fromkeys(f"{row.weight} {row.product}" for row in rows))
    mx = [row for row in rows if row.method == "mxfp8"]
    worst = min(mx, key=lambda row: row.sqnr_db)
    tensorwise = {(row.weight, row.product): row.sqnr_db for row in rows if row.method == "fp8_tensorwise"}
    gain = [row.sqnr_db - tensorwise[row.weight, row.product] for row in mx if row.product != "output"]
    figure = new_figure(
        f"MXFP8's worst product is {worst.weight} {worst.product}, {worst.sqnr_db:.0f} dB; one scale a tensor loses "
        f"{min(gain):.1f} to {max(gain):.1f} dB more where gradients enter",
        subtitle="SQNR of each grouped GEMM against float64 over the same operands; 20 dB is an error of a tenth, "
        "40 dB of a hundredth. BF16 loses only by rounding its result.",
        note=note,
        height=110 + 34 * len(names),
    )
    for method in LOOKS:
        mine = [row for row in rows if row.method == method]
        if mine:
            figure.add_trace(
                _dots([row.sqnr_db for row in mine], [f"{row.weight} {row.product}" for row in mine], mine[0])
            )
    figure.update_xaxes(title_text="SQNR (dB)")
    return _finish(figure, names)


def _methods_finding(rows: Sequence[ErrorRow]) -> str:
    by = {(row.data, row.method): row for row in rows}
    same = [
        name
        for name, method in by
        if method == "mxfp8" and abs(by[name, "fp8_rowwise"].worst_blocks_db - by[name, "mxfp8"].worst_blocks_db) < 0.1
    ]
    hard = max((row for row in rows if row.method == "fp8_tensorwise"), key=lambda row: row.underflow_fraction)
    blocks = by[hard.data, "mxfp8"]
    return (
        f"MXFP8 and FP8 by rows lose the same on {len(same)} of {len({row.data for row in rows})} tensors; blocks "
        f"help where values become zero: {blocks.underflow_fraction:.1%} instead of {hard.underflow_fraction:.0%} "
        f"of {hard.data}"
    )


def _dots(x: list[float], y: list[str], row: ErrorRow | GemmRow) -> go.Scatter:
    color, symbol = LOOKS[row.method]
    marker = {"color": color, "symbol": symbol, "size": 12, "line": {"width": 2.2, "color": color}}
    return go.Scatter(x=x, y=y, mode="markers", name=row.label, marker=marker, hovertemplate="%{x:.2f}, %{y}")


def _finish(figure: go.Figure, names: Sequence[str]) -> go.Figure:
    figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(names)), showgrid=True)
    plot_px = (figure.layout.height or 460) - (figure.layout.margin.t or 0) - 60
    return figure.update_layout(hovermode="closest", legend={"y": -60 / plot_px})
