"""The all-to-all experiment drawn, or that nothing was measured yet."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

from moelab.projection.measured import Measurement, Row
from moelab.viz.dispatch_measured import not_measured, panels, replayed
from moelab.viz.theme import INK, WARNING, new_figure, plot_text

OPERATIONS = {
    "dispatch": "dispatch<br>fwd",
    "combine": "combine<br>fwd",
    "combine_backward": "combine<br>bwd",
    "dispatch_backward": "dispatch<br>bwd",
}
ARM_LOOKS = {
    "standard bf16": ("standard, BF16", "#0072B2"),
    "deepep bf16 dense": ("DeepEP, then gather", "#56B4E9"),
    "deepep bf16 expanded": ("DeepEP expanding", "#009E73"),
    "deepep fp8 dense": ("DeepEP, FP8 dispatch, then gather", "#F0E442"),
    "deepep fp8 expanded": ("DeepEP expanding, FP8 dispatch", "#E69F00"),
    "deepep mxfp8 expanded": ("DeepEP expanding, MXFP8 dispatch", "#D55E00"),
    "hybridep bf16": ("HybridEP", "#CC79A7"),
}


def operation_times(measured: Measurement, *, size: str = "") -> go.Figure:
    """Time of the four operations of a layer by way to move tokens, a panel for each routing.

    Args:
        measured: of the all-to-all experiment.
        size: its name in the file; the first by default.
    """
    rows = [row for row in _of_size(measured, size) if row.get("sms_chosen_by") != "caller" and row["arm"] in ARM_LOOKS]
    if not rows:
        return not_measured(measured, "Dispatch and combine")
    routings = list(dict.fromkeys(row["routing"] for row in rows))
    figure = panels(
        _operations_finding(rows, routings[0]),
        [f"{routing.replace('_', ' ')} routing" for routing in routings],
        subtitle=f"{_size_words(rows[0])}. Median of {rows[0]['repeats']} turns, slowest rank; bars of half an "
        f"interquartile range each way. {measured.stamp}.",
        note=replayed(measured),
        shared=True,
    )
    for column, routing in enumerate(routings, start=1):
        for arm, (label, color) in ARM_LOOKS.items():
            found = {row["operation"]: row for row in rows if (row["routing"], row["arm"]) == (routing, arm)}
            if not found:
                continue
            bar = go.Bar(
                x=[OPERATIONS[operation] for operation in found],
                y=[row["us_median"] / 1e3 for row in found.values()],
                error_y={"array": [row["us_iqr"] / 2e3 for row in found.values()], "color": INK, "thickness": 1.2},
                name=label,
                legendgroup=arm,
                showlegend=routing == next(row["routing"] for row in rows if row["arm"] == arm),
                marker_color=color,
                hovertemplate=f"{label}: %{{y:.2f}} ms<extra></extra>",
            )
            figure.add_trace(bar, row=1, col=column)
    order = [label for name, label in OPERATIONS.items() if any(row["operation"] == name for row in rows)]
    figure.update_xaxes(showgrid=False, ticks="", tickangle=0, tickfont_size=10, categoryarray=order)
    highest = max(row["us_median"] + row["us_iqr"] for row in rows) / 1e3
    figure.update_yaxes(range=[0, 1.1 * highest])
    figure.update_yaxes(title_text="ms", col=1)
    return figure.update_layout(barmode="group", bargap=0.2, legend_y=-0.25, hovermode="closest")


def exchange_lines(measured: Measurement) -> list[str]:
    """A line for each size and routing: a layer's four exchanges, standard and fastest."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in measured.rows:
        if row.get("sms_chosen_by") != "caller":
            groups.setdefault((row["size"], row["routing"]), []).append(row)
    words = {key: _sums(rows) for key, rows in groups.items()}
    return [f"{size}, {routing.replace('_', ' ')}: {said}" for (size, routing), said in words.items() if said]


def sm_sweep(measured: Measurement, *, size: str = "") -> go.Figure:
    """What DeepEP moves between ranks against the streaming multiprocessors that it is given.

    Args:
        measured: of the all-to-all experiment.
        size: its name in the file; the first by default.
    """
    rows = [
        row for row in _of_size(measured, size) if row.get("sms_chosen_by") == "caller" and row.get("physical_gb_s")
    ]
    if not rows:
        return not_measured(measured, "Bandwidth against multiprocessors")
    content = measured.content or {}
    copy_gb_s = content["copies"]["between_ranks_gb_s"]
    best = max(rows, key=lambda row: row["physical_gb_s"])
    figure = new_figure(
        f"DeepEP reaches {best['physical_gb_s']:.0f} GB/s with {best['sms']} multiprocessors, "
        f"{100 * best['physical_gb_s'] / copy_gb_s:.0f} % of a plain copy between the GPUs",
        subtitle=f"Payload that crosses, over the time on the wire; {_size_words(rows[0])}, "
        f"{rows[0]['routing'].replace('_', ' ')} routing. {measured.stamp}.",
        note=replayed(measured),
    )
    keys = dict.fromkeys((row["operation"], row["precision"]) for row in rows)
    for operation, precision in keys:
        found = sorted(
            (row for row in rows if (row["operation"], row["precision"]) == (operation, precision)),
            key=lambda row: int(row["sms"]),
        )
        line = go.Scatter(
            x=[row["sms"] for row in found],
            y=[row["physical_gb_s"] for row in found],
            mode="lines+markers",
            name=f"{OPERATIONS[operation].replace('<br>', ' ')}, {precision.upper()}",
            line={
                "color": _COLORS[operation],
                "dash": "solid" if precision == "bf16" else "dot",
                "width": _WIDTHS[operation],
            },
            hovertemplate="%{y:.0f} GB/s",
        )
        figure.add_trace(line)
    figure.add_hline(y=copy_gb_s, line={"color": WARNING, "width": 1.5, "dash": "dash"})
    figure.add_annotation(
        text=f"plain copy {copy_gb_s:.0f} GB/s",
        x=1,
        xref="x domain",
        xanchor="right",
        y=copy_gb_s,
        yanchor="bottom",
        showarrow=False,
        font={"size": 12, "color": WARNING},
    )
    figure.update_xaxes(title_text="streaming multiprocessors", tickvals=sorted({row["sms"] for row in rows}))
    return figure.update_yaxes(title_text="GB/s between ranks", rangemode="tozero")


_WIDTHS = dict(zip(OPERATIONS, (5, 5, 2, 2), strict=True))
"""Ways there are broad and ways back thin: they may lie on each other."""
_COLORS = dict(zip(OPERATIONS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))


def _of_size(measured: Measurement, size: str) -> list[Row]:
    sizes = list(dict.fromkeys(row["size"] for row in measured.rows))
    chosen = size or (sizes[0] if sizes else "")
    return [row for row in measured.rows if row["size"] == chosen]


def _size_words(row: Row) -> str:
    return (
        f"{row['tokens']:,} tokens a rank, hidden {row['hidden']:,}, {row['experts']} experts, top-{row['top_k']}, "
        f"EP {row['ranks']}"
    )


def _operations_finding(rows: Iterable[Row], routing: str) -> str:
    words = _sums(row for row in rows if row["routing"] == routing)
    if not words:
        return "Time of dispatch and combine, forward and backward"
    return f"A layer's four exchanges: {plot_text(words)} under {routing.replace('_', ' ')} routing"


def _sums(rows: Iterable[Row]) -> str:
    """The four exchanges of the standard dispatcher and of the fastest other one; empty where either is missing."""
    here: dict[tuple[str, str], float] = {(row["arm"], row["operation"]): row["us_median"] for row in rows}
    sums_ms = {
        arm: sum(here[arm, operation] for operation in OPERATIONS) / 1e3
        for arm in ARM_LOOKS
        if all((arm, operation) in here for operation in OPERATIONS)
    }
    others = [arm for arm in sums_ms if arm != "standard bf16"]
    if len(sums_ms) == len(others) or not others:
        return ""
    best = min(others, key=sums_ms.__getitem__)
    return f"standard {sums_ms['standard bf16']:.2f} ms, {ARM_LOOKS[best][0]} {sums_ms[best]:.2f} ms"
