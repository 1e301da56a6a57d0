"""Measured arms drawn: the two-by-two against its goals, and what figures of measured dispatch share."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from moelab.analysis.arms import base_arm
from moelab.analysis.two_by_two import (
    BASELINE,
    DEEPEP,
    GOAL_BEST,
    GOAL_DEEPEP,
    ArmResult,
    checkpointing_words,
    two_by_two_label,
)
from moelab.projection.measured import Measurement
from moelab.viz.theme import INK, MUTED, WARNING, ArmStyle, arm_styles, new_figure, wrap


def two_by_two_bars(results: Sequence[ArmResult], measured: Measurement) -> go.Figure:
    """Every arm's throughput over stock under the same checkpointing, a panel for each shape, against the goals.

    Args:
        results: of :func:`moelab.analysis.two_by_two.arm_results`; those without stock at their side are left out, and
            of a shape that ran under several kinds of checkpointing all but the first
            (:func:`moelab.analysis.two_by_two.checkpointing_table` has them all).
        measured: that they are of, for the stamp.
    """
    drawn = [result for result in results if result.ratio is not None]
    if not drawn:
        return not_measured(measured, "The two-by-two")
    settings = {result.shape: result.setting for result in reversed(drawn)}
    drawn = [result for result in drawn if result.setting == settings[result.shape]]
    shapes = list(dict.fromkeys(result.shape for result in drawn))
    arms = list(dict.fromkeys(result.arm for result in drawn))
    labels = {result.arm: "<br>".join(wrap(result.label, 26)) for result in drawn}
    styles = arm_styles(_styled(result) for result in drawn)
    figure = panels(
        _two_by_two_finding(drawn),
        ["<br>".join(wrap(settings[shape], 24)) for shape in shapes],
        subtitle="Tokens/s over BF16 with the standard all-to-all under the same checkpointing and routing, thin "
        f"models. Bars: median of {_steps(drawn)} steps with quartiles; points: passes, arms in turn. Dashed: goals, "
        f"which are about stock's best checkpointing. {measured.stamp}.",
        note=replayed(measured),
        height=220 + 62 * len(arms),
        shared=True,
    )
    for column, shape in enumerate(shapes, start=1):
        for routing, pattern in (("round_robin", "/"), ("random_balanced", "")):
            found = [result for result in drawn if (result.shape, result.routing) == (shape, routing)]
            if found:
                bar = _ratio_bars(found, labels, styles, routing, pattern).update(showlegend=False)
                figure.add_trace(bar, row=1, col=column)
                figure.add_trace(_pass_points(found, labels, routing), row=1, col=column)
        for goal in (GOAL_DEEPEP, GOAL_BEST):
            figure.add_vline(x=goal, line={"color": WARNING, "dash": "dash", "width": 1.5}, row=1, col=column)
    _draw_routing_legend(figure)
    highest = max(max(result.high, *result.passes) / _stock(result) for result in drawn)
    figure.update_xaxes(range=[0, max(1.12 * highest, 1.3)], dtick=0.5, title_text="× stock, same<br>checkpointing")
    figure.update_yaxes(categoryorder="array", categoryarray=[labels[arm] for arm in reversed(arms)], ticks="")
    figure.update_yaxes(ticklabelstandoff=6)
    return figure.update_layout(barmode="group", scattermode="group", bargap=0.25, hovermode="closest", legend_y=-0.16)


def gain_lines(results: Sequence[ArmResult], *, arm: str = DEEPEP) -> list[str]:
    """An arm over stock at each shape and checkpointing of both, smallest to largest of the routings."""
    ratios: dict[str, list[float]] = {}
    for result in results:
        if result.arm == arm and result.ratio is not None:
            ratios.setdefault(result.setting, []).append(result.ratio)
    label = two_by_two_label(arm)
    spans = {name: sorted({f"{ratio:.2f}" for ratio in (min(found), max(found))}) for name, found in ratios.items()}
    return [f"{label}, {setting}: {' to '.join(span)} × stock" for setting, span in spans.items()]


def _ratio_bars(
    found: Sequence[ArmResult], labels: dict[str, str], styles: dict[str, ArmStyle], routing: str, pattern: str
) -> go.Bar:
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
    """Arm whose look it has: variants and emulated kernels have the colour of what they vary."""
    return base_arm(result.arm.replace("mxfp8-emulated", "mxfp8"))[0]


def _stock(result: ArmResult) -> float:
    assert result.ratio is not None
    return result.tps / result.ratio


def _two_by_two_finding(results: Sequence[ArmResult]) -> str:
    others = [result for result in results if result.arm != BASELINE]
    if not others:
        return "Only stock was measured"
    best = max(others, key=lambda result: result.ratio or 0.0)
    return (
        f"Best arm: {best.label}, {best.ratio:.2f} times stock with "
        f"{checkpointing_words(best.activation_checkpoint)} on both sides, {best.shape} shape, "
        f"{best.routing.replace('_', ' ')} routing"
    )


def _steps(results: Sequence[ArmResult]) -> str:
    counts = sorted({result.steps for result in results})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def not_measured(measured: Measurement, what: str) -> go.Figure:
    """An empty figure that says what is missing and how to measure it."""
    figure = new_figure(f"{what}: not measured yet", subtitle=measured.stamp, height=190)
    return figure.update_layout(xaxis_visible=False, yaxis_visible=False)


def replayed(measured: Measurement) -> str:
    """Where the numbers come from, for the title."""
    content = measured.content or {}
    device = str(content.get("device", ""))
    if device.startswith("CPU"):
        return "CPU processes over gloo: no measure of a GPU"
    return "measured elsewhere, replayed" if measured.packaged else ""


def panels(
    finding: str, titles: Sequence[str], *, subtitle: str, note: str, height: int = 460, shared: bool = False
) -> go.Figure:
    """An empty figure of several panels in a row.

    Args:
        finding: as :func:`moelab.viz.theme.new_figure` takes it.
        titles: of the panels.
        subtitle: as there.
        note: as there.
        height: as there, of the panels.
        shared: whether all panels have one vertical axis.
    """
    headed = new_figure(finding, subtitle=subtitle, note=note, height=height)
    figure = make_subplots(
        rows=1, cols=len(titles), subplot_titles=list(titles), horizontal_spacing=0.06, shared_yaxes=shared
    )
    figure.update_layout(headed.layout)
    figure.update_annotations(font={"size": 13, "color": MUTED})
    return figure.update_layout(margin_t=headed.layout.margin.t + 24, height=headed.layout.height + 24)
