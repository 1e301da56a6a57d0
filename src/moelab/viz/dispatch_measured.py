"""Measured dispatch drawn: the all-to-all experiment and the two-by-two, or that nothing was measured yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.analysis.two_by_two import BASELINE, GOAL_BEST, GOAL_DEEPEP, ArmResult
from moelab.projection.measured import Measurement, Row
from moelab.viz.theme import INK, MUTED, WARNING, arm_styles, new_figure, plot_text, wrap

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
    "hybridep bf16": ("HybridEP", "#CC79A7"),
}


def not_measured(measured: Measurement, what: str) -> go.Figure:
    """An empty figure that says what is missing and how to measure it."""
    figure = new_figure(f"{what}: not measured yet", subtitle=measured.stamp, height=190)
    return figure.update_layout(xaxis_visible=False, yaxis_visible=False)


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
    figure = _panels(
        _operations_finding(rows, routings[0]),
        [f"{routing.replace('_', ' ')} routing" for routing in routings],
        subtitle=f"{_size_words(rows[0])}. Median of {rows[0]['repeats']} turns, slowest rank; bars of half an "
        f"interquartile range each way. {measured.stamp}.",
        note=_replayed(measured),
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
        note=_replayed(measured),
    )
    keys = dict.fromkeys((row["operation"], row["precision"]) for row in rows)
    for (operation, precision), color in zip(keys, _COLORS * 2, strict=False):
        found = sorted(
            (row for row in rows if (row["operation"], row["precision"]) == (operation, precision)),
            key=lambda row: int(row["sms"]),
        )
        line = go.Scatter(
            x=[row["sms"] for row in found],
            y=[row["physical_gb_s"] for row in found],
            mode="lines+markers",
            name=f"{OPERATIONS[operation].replace('<br>', ' ')}, {precision.upper()}",
            line={"color": color, "dash": "solid" if precision == "bf16" else "dot", "width": 2.5},
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


def two_by_two_bars(results: Sequence[ArmResult], measured: Measurement) -> go.Figure:
    """Every arm's throughput over stock's best, a panel for each shape, against the goals.

    Args:
        results: of :func:`moelab.analysis.two_by_two.arm_results`; those without stock's best at their side are left
            out.
        measured: that they are of, for the stamp.
    """
    drawn = [result for result in results if result.ratio is not None]
    if not drawn:
        return not_measured(measured, "The two-by-two")
    shapes = list(dict.fromkeys(result.shape for result in drawn))
    arms = list(dict.fromkeys(result.arm for result in drawn))
    labels = {result.arm: "<br>".join(wrap(result.label, 26)) for result in drawn}
    figure = _panels(
        _two_by_two_finding(drawn),
        shapes,
        subtitle=f"Tokens/s over BF16 with the standard all-to-all under the same routing, thin models. Bars: median "
        f"of {_steps(drawn)} steps with quartiles; points: passes, arms in turn. Dashed: goals. {measured.stamp}.",
        note=_replayed(measured),
        height=220 + 62 * len(arms),
        shared=True,
    )
    for column, shape in enumerate(shapes, start=1):
        for routing, pattern in (("round_robin", "/"), ("random_balanced", "")):
            found = [result for result in drawn if (result.shape, result.routing) == (shape, routing)]
            if found:
                bar = _ratio_bars(found, labels, routing, pattern).update(showlegend=False)
                figure.add_trace(bar, row=1, col=column)
                figure.add_trace(_pass_points(found, labels, routing), row=1, col=column)
        for goal in (GOAL_DEEPEP, GOAL_BEST):
            figure.add_vline(x=goal, line={"color": WARNING, "dash": "dash", "width": 1.5}, row=1, col=column)
    _draw_routing_legend(figure)
    highest = max(max(result.high, *result.passes) / _stock(result) for result in drawn)
    figure.update_xaxes(range=[0, max(1.12 * highest, 1.3)], dtick=0.5, title_text="× stock's best")
    figure.update_yaxes(categoryorder="array", categoryarray=[labels[arm] for arm in reversed(arms)], ticks="")
    figure.update_yaxes(ticklabelstandoff=6)
    return figure.update_layout(barmode="group", scattermode="group", bargap=0.25, hovermode="closest", legend_y=-0.16)


def _ratio_bars(found: Sequence[ArmResult], labels: dict[str, str], routing: str, pattern: str) -> go.Bar:
    styles = arm_styles(_styled(result) for result in found)
    return go.Bar(
        y=[labels[result.arm] for result in found],
        x=[result.ratio for result in found],
        orientation="h",
        offsetgroup=routing,
        marker={
            "color": [styles[_styled(result)].fill(0.35) for result in found],
            "line": {"color": [styles[_styled(result)].color for result in found], "width": 1.5},
            "pattern": {"shape": pattern, "fgcolor": MUTED, "size": 6, "solidity": 0.25},
        },
        error_x={
            "array": [(result.high - result.tps) / _stock(result) for result in found],
            "arrayminus": [(result.tps - result.low) / _stock(result) for result in found],
            "symmetric": False,
            "color": INK,
            "thickness": 1.2,
            "width": 3,
        },
        text=[f"<b>{result.ratio:.2f}</b>" for result in found],
        textposition="inside",
        insidetextanchor="start",
        textfont={"color": INK},
        customdata=[[result.tps, result.steps] for result in found],
        hovertemplate=f"{routing}: %{{x:.3f}} ×, %{{customdata[0]:,.0f}} tokens/s, %{{customdata[1]}} steps"
        "<extra></extra>",
    )


def _pass_points(found: Sequence[ArmResult], labels: dict[str, str], routing: str) -> go.Scatter:
    points = [(value / _stock(result), labels[result.arm]) for result in found for value in result.passes]
    return go.Scatter(
        x=[value for value, _ in points],
        y=[label for _, label in points],
        mode="markers",
        orientation="h",
        offsetgroup=routing,
        marker={"color": "white", "size": 6, "line": {"color": INK, "width": 1.2}},
        hovertemplate="one pass: %{x:.3f} ×<extra></extra>",
        showlegend=False,
    )


def _draw_routing_legend(figure: go.Figure) -> None:
    for name, pattern in (("forced round-robin", "/"), ("balanced random", "")):
        marker = {
            "color": "#dfe3e8",
            "line": {"color": MUTED, "width": 1},
            "pattern": {"shape": pattern, "fgcolor": MUTED},
        }
        figure.add_trace(go.Bar(x=[None], y=[None], name=name, marker=marker), row=1, col=1)


def _styled(result: ArmResult) -> str:
    """Arm whose look it has: emulated kernels keep the colour of their precision."""
    return result.arm.replace("mxfp8-emulated", "mxfp8")


def _stock(result: ArmResult) -> float:
    assert result.ratio is not None
    return result.tps / result.ratio


def _two_by_two_finding(results: Sequence[ArmResult]) -> str:
    others = [result for result in results if result.arm != BASELINE]
    if not others:
        return "Only stock was measured"
    best = max(others, key=lambda result: result.ratio or 0.0)
    return (
        f"Best arm: {best.label}, {best.ratio:.2f} times stock at the {best.shape} shape, "
        f"{best.routing.replace('_', ' ')} routing"
    )


def _steps(results: Sequence[ArmResult]) -> str:
    counts = sorted({result.steps for result in results})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


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
    here: dict[tuple[str, str], Any] = {
        (row["arm"], row["operation"]): row["us_median"] for row in rows if row["routing"] == routing
    }
    sums = {
        arm: sum(here[arm, operation] for operation in OPERATIONS)
        for arm in ARM_LOOKS
        if all((arm, operation) in here for operation in OPERATIONS)
    }
    if "standard bf16" not in sums or len(sums) == 1:
        return "Time of dispatch and combine, forward and backward"
    best = min((arm for arm in sums if arm != "standard bf16"), key=sums.__getitem__)
    return (
        f"A layer's four exchanges: standard {sums['standard bf16'] / 1e3:.2f} ms, "
        f"{plot_text(ARM_LOOKS[best][0])} {sums[best] / 1e3:.2f} ms under {routing.replace('_', ' ')} routing"
    )


def _replayed(measured: Measurement) -> str:
    """Where the numbers come from, for the title."""
    content = measured.content or {}
    device = str(content.get("device", ""))
    if device.startswith("CPU"):
        return "CPU processes over gloo: no measure of a GPU"
    return "measured elsewhere, replayed" if measured.packaged else ""


def _panels(
    finding: str, titles: Sequence[str], *, subtitle: str, note: str, height: int = 460, shared: bool = False
) -> go.Figure:
    headed = new_figure(finding, subtitle=subtitle, note=note, height=height)
    figure = make_subplots(
        rows=1, cols=len(titles), subplot_titles=list(titles), horizontal_spacing=0.06, shared_yaxes=shared
    )
    figure.update_layout(headed.layout)
    figure.update_annotations(font={"size": 13, "color": MUTED})
    return figure.update_layout(margin_t=headed.layout.margin.t + 24, height=headed.layout.height + 24)
