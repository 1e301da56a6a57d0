"""Grouped GEMMs drawn: measured speed-ups over rows, the model against what tests it, and a step in its parts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from moelab.mxfp8.break_even import Constants, Part, gain, gemm_parts
from moelab.mxfp8.break_even_fit import GOAL
from moelab.mxfp8.grouped_gemm_cases import Case, Precision
from moelab.mxfp8.grouped_gemm_results import GroupedGemmResult
from moelab.viz.theme import INK, MUTED, new_figure

LABELS: dict[str, str] = {
    "bf16": "BF16",
    "fp8": "Row-wise FP8",
    "mxfp8": "MXFP8",
    "mxfp8_wgrad_bf16": "MXFP8, wgrad in BF16",
}
PART_LOOKS = {
    "gemm": ("GEMM", "#0072B2"),
    "cast rows": ("cast rows", "#D55E00"),
    "cast columns": ("cast columns (wgrad)", "#E69F00"),
    "cast weights": ("cast weights", "#CC79A7"),
    "overhead": ("fixed overhead, scales", "#5f6b7a"),
}
_LINES = (("#0072B2", "circle"), ("#56B4E9", "diamond"), ("#D55E00", "square"), ("#E69F00", "triangle-up"))
_ODD = ("#5f6b7a", "x")


def measured_speedups(result: GroupedGemmResult, precision: Precision, *, replayed: bool) -> go.Figure:
    """Measured speed-up over rows, a line for each weight shape with 8 even groups; other cases as grey marks.

    Args:
        result: of the micro-experiment.
        precision: held against BF16.
        replayed: whether it was read from a file; the title says so.

    Returns:
        The figure.
    """
    table = result.speedups(precision)
    wins = int((table["speedup"] > 1).sum())
    figure = new_figure(
        f"{LABELS[precision]} is faster than BF16 in {wins} of {len(table)} cases",
        subtitle="forward + backward of one grouped product; medians, n = "
        f"{int(result.rows['n_times'].min())} or more; above the line the 8-bit format saves time",
        note=("replayed: " if replayed else "") + result.stamp,
    )
    regular = table[(table["groups"] == 8) & (table["sizes"] == "even")]
    shapes = regular.groupby(["n", "k"], sort=False)
    for ((n, k), cases), (color, symbol) in zip(shapes, _LINES, strict=False):
        _add_line(figure, cases.sort_values("m"), f"N {n}, K {k}", color, symbol)
    odd = table.drop(regular.index)
    if len(odd):
        names = [f"{row.groups} {row.sizes}" for row in odd.itertuples()]
        _add_marks(figure, odd, names)
    figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dash"})
    ticks = sorted(set(table["m"]))
    figure.update_xaxes(
        title_text="rows M of all groups", type="log", tickvals=ticks, ticktext=[f"{m // 1024}k" for m in ticks]
    )
    figure.update_yaxes(title_text="BF16 time / 8-bit time")
    figure.update_layout(hovermode="closest")
    return figure


def _add_line(figure: go.Figure, cases: pd.DataFrame, name: str, color: str, symbol: str) -> None:
    figure.add_scatter(
        x=cases["m"],
        y=cases["speedup"].round(4),
        name=name,
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"symbol": symbol, "size": 10},
        customdata=cases[["bf16_us", "low_us"]].round(1),
        hovertemplate="M %{x}: %{y:.3f}<br>BF16 %{customdata[0]} µs, 8-bit %{customdata[1]} µs",
    )


def _add_marks(figure: go.Figure, cases: pd.DataFrame, names: Sequence[str]) -> None:
    color, symbol = _ODD
    figure.add_scatter(
        x=cases["m"],
        y=cases["speedup"].round(4),
        name="other groups (hover for which)",
        mode="markers",
        marker={"symbol": symbol, "size": 9, "color": color},
        customdata=names,
        hovertemplate="%{customdata} groups, M %{x}: %{y:.3f}",
    )


def predicted_speedups(table: pd.DataFrame) -> go.Figure:
    """Eight rows of torchao: measured beside predicted, with the goal of ±10 % as a bar around the measured value.

    Args:
        table: of :func:`moelab.mxfp8.break_even_fit.leave_one_out`.

    Returns:
        The figure.
    """
    reached = int(table["left_out_within"].sum())
    figure = new_figure(
        f"{reached} of {len(table)} rows are predicted within 10 %: the goal of all rows is "
        f"{'reached' if reached == len(table) else 'missed'}",
        subtitle="grey bars: measured speed-up ± 10 %; each row is predicted by a fit on all other figures (left out), "
        "and by the fit on the rows with 8 groups (split)",
        note="quoted: torchao on one B200, torchao 0.14, torch 2.10; predicted by a model",
        height=480,
    )
    names = [_short(name) for name in table["case"]]
    figure.add_bar(
        y=names,
        x=2 * GOAL * table["measured"],
        base=(1 - GOAL) * table["measured"],
        orientation="h",
        width=0.55,
        name="measured ± 10 %",
        marker={"color": "#d3d8de"},
        hoverinfo="skip",
    )
    looks = {"measured": (INK, "line-ns-open"), "left_out": ("#D55E00", "diamond"), "split": ("#0072B2", "circle-open")}
    for column, (color, symbol) in looks.items():
        marker = {"color": color, "symbol": symbol, "size": 16 if column == "measured" else 11, "line": {"width": 2}}
        figure.add_scatter(
            y=names, x=table[column].round(3), name=column.replace("_", " "), mode="markers", marker=marker
        )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="BF16 time / MXFP8 time")
    figure.update_layout(hovermode="closest", barmode="overlay")
    return figure


def _short(name: str) -> str:
    shape, groups = name.split(", ")
    _, n, k = shape.split("×")
    return f"N {n}, K {k}, {groups.split()[0]} group{'s' if groups.split()[0] != '1' else ''}"


def step_parts(
    case: Case, constants: Constants, *, precisions: Sequence[Precision] = ("bf16", "mxfp8", "mxfp8_wgrad_bf16")
) -> go.Figure:
    """Predicted time of forward and backward in its parts, a bar for each precision.

    Args:
        case: the product.
        constants: of the GPU.
        precisions: the bars, from the top.

    Returns:
        The figure.
    """
    gained = gain(case.m, case.n, case.k, case.groups, constants)
    low = LABELS[constants.low]
    finding = f"{low} {'saves' if gained > 1 else 'loses'} time here: BF16 takes {gained:.2f}× as long"
    figure = new_figure(
        finding,
        subtitle=f"{case.name} on a {constants.gpu}, forward + backward, kernels alone",
        note="predicted by the model, not measured",
        height=400,
    )
    by_precision = {p: gemm_parts(case.m, case.n, case.k, case.groups, p, constants) for p in precisions}
    labels = [LABELS[precision] for precision in precisions]
    for kind, (name, color) in PART_LOOKS.items():
        times_ms = [1e3 * _sum(parts, kind) for parts in by_precision.values()]
        if any(times_ms):
            figure.add_bar(
                y=labels,
                x=[round(time, 4) for time in times_ms],
                name=name,
                orientation="h",
                marker={"color": color},
                hovertemplate="%{x:.3f} ms",
            )
    totals = [1e3 * sum(part.time_s for part in parts) for parts in by_precision.values()]
    for label, total in zip(labels, totals, strict=True):
        figure.add_annotation(
            x=total, y=label, text=f" {total:.3g} ms", showarrow=False, xanchor="left", font_color=MUTED
        )
    figure.update_layout(barmode="stack", hovermode="closest", bargap=0.35, legend_traceorder="normal", legend_y=-0.34)
    figure.update_xaxes(title_text="time (ms)", range=[0, 1.18 * max(totals)])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _sum(parts: Sequence[Part], kind: str) -> float:
    return sum(part.time_s for part in parts if part.kind == kind)
