"""Loss figures: the whole run with an inset, its last part, and the difference of two arms.

Each takes the metrics table and returns a plotly figure whose title is computed from the data. In the difference each
seed is averaged over a trailing window as long as the one behind the verdict's final loss: the last point of the curve,
with its interval, is the verdict itself, and the figure shows how it came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import arm_label, contrast
from moelab.analysis.convergence import FinalLosses, final_losses, first_final_step
from moelab.analysis.curves import (
    arm_curves,
    drawn_seeds,
    finished,
    joined_lines,
    mean_and_interval,
    mean_and_sd,
    seed_curves,
    smooth,
    smoothing_window,
)
from moelab.analysis.verdict import Answer, Verdict
from moelab.errors import BadInput
from moelab.viz.draw import draw_band, draw_marks, draw_mean, draw_seeds_and_means, name_loss_axes
from moelab.viz.theme import INK, MUTED, arm_styles, new_figure, span

INSET_LEFT, INSET_GAP, INSET_MIN_HEIGHT = 0.47, 0.10, 0.42
"""Left edge of the inset, its clearance above the curves, its smallest height; all parts of the plot area."""

TAIL = 0.3
"""Part of the steps that :func:`loss_tail` shows."""


def loss_curves(
    table: pd.DataFrame,
    *,
    final_fraction: float = 0.1,
    final: FinalLosses | None = None,
    note: str = "",
    marks: Sequence[tuple[int, float]] = (),
) -> go.Figure:
    """Loss over all steps: every seed thin, the mean over seeds bold, the last part again in an inset.

    Means of runs of more than 100 logged steps are smoothed over one hundredth of them, as the subtitle states.

    Args:
        table: Metrics table.
        final_fraction: Part of the steps shown in the inset, and that the final losses in the title are means over.
        final: Those final losses, where they are known; None works them out.
        note: Condition to state in the title, such as "emulated kernels".
        marks: Steps, with their loss, whose gradient norm was not finite.

    Raises:
        BadInput: The table has no loss.
    """
    curves, window = arm_curves(table, "loss"), smoothing_window(table)
    inset = f"Inset: the last {100 * final_fraction:g} % of steps."
    subtitle = f"{_seeds_and_means(curves, window)} {inset}"
    finding = _final_finding(final or final_losses(table, final_fraction=final_fraction))
    figure = new_figure(finding, subtitle=subtitle, note=note, height=520)
    last = max(int(arm.index.max()) for arm in curves.values())
    first = first_final_step(last, final_fraction)
    draw_seeds_and_means(figure, curves, window=window)
    draw_seeds_and_means(figure, curves, window=window, shown_from=first, inset=True)
    draw_marks(figure, marks)
    name_loss_axes(figure)
    _place_inset(figure, curves, last)
    return figure


def loss_tail(table: pd.DataFrame, *, note: str = "", marks: Sequence[tuple[int, float]] = ()) -> go.Figure:
    """Loss over the last part of the steps: mean over seeds with a band of one standard deviation over seeds.

    Args:
        table: Metrics table.
        note: Condition to state in the title.
        marks: Steps, with their loss, whose gradient norm was not finite.

    Returns:
        The figure. Seeds that did not reach the last step are not in it.
    """
    window = smoothing_window(table)
    curves = {name: finished(arm) for name, arm in arm_curves(table, "loss").items()}
    first = max(int(arm.index.max()) for arm in curves.values())
    first -= round(TAIL * first) - 1
    tails = {name: smooth(arm, window).loc[first:] for name, arm in curves.items()}
    figure = new_figure(_tail_finding(tails), subtitle=_tail_reading(tails, window), note=note)
    for name, style in arm_styles(tails).items():
        band = mean_and_sd(tails[name])
        draw_band(figure, band["low"], band["high"], style)
        draw_mean(figure, band["mean"], style)
    draw_marks(figure, [mark for mark in marks if mark[0] >= first])
    return name_loss_axes(figure)


def loss_difference(table: pd.DataFrame, verdict: Verdict, *, note: str = "") -> go.Figure:
    """Loss difference at each step, paired by seed: mean with its interval over seeds, zero line, margin band.

    Args:
        table: Metrics table that the verdict was made from.
        verdict: Verdict of ``compare_convergence``.
        note: Condition to state in the title, such as "emulated kernels".

    Returns:
        The figure; without curves where the arms have no finished seed in common.

    Raises:
        BadInput: The verdict is on a held-out loss, which has no curve.
    """
    if verdict.steps is None:
        raise BadInput("this verdict is on a held-out loss, which has no steps: pass one of compare_convergence")
    first, last = verdict.steps
    height = 460 if verdict.seeds else 120
    reading = _difference_reading(verdict, last - first + 1)
    figure = new_figure(_difference_finding(verdict), subtitle=reading, note=note, height=height)
    if not verdict.seeds:
        return figure.update_layout(xaxis_visible=False, yaxis_visible=False)
    seeds = list(verdict.seeds)
    difference = seed_curves(table, verdict.arm)[seeds] - seed_curves(table, verdict.reference)[seeds]
    smoothed = difference.loc[:last].rolling(len(difference.loc[first:last])).mean().dropna(how="all")
    band = mean_and_interval(smoothed, level=verdict.interval.level)
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    if verdict.margin_nats > 0:
        line = {"color": "rgba(0,158,115,0.7)", "width": 1, "dash": "dot"}
        edges = {"y0": -verdict.margin_nats, "y1": verdict.margin_nats}
        figure.add_hrect(**edges, fillcolor="rgba(0,158,115,0.10)", line=line, layer="below")
        label = {"text": "equivalence margin", "font": {"size": 12, "color": MUTED}, "showarrow": False}
        figure.add_annotation(**label, x=0.01, xref="x domain", y=verdict.margin_nats, yanchor="bottom")
    style = arm_styles([verdict.arm])[verdict.arm]
    draw_band(figure, band["low"], band["high"], style)
    x, y = joined_lines(smoothed)
    line = {"color": style.fill(0.45), "width": 1}
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, name="one seed", hoverinfo="skip"))
    draw_mean(figure, band["mean"], style, name="mean over seeds", hovertemplate="%{y:+.4f}")
    figure.data[-1].line.dash = "solid"  # a dash tells arms apart, and here is one
    reach = (verdict.interval.high - verdict.interval.low) / 2.0
    figure.add_scatter(
        x=[last],
        y=[verdict.mean_difference_nats],
        error_y={"array": [reach], "visible": verdict.interval.exists, "color": INK, "thickness": 2, "width": 7},
        mode="markers",
        name="final difference, as judged",
        marker={"color": INK, "size": 10, "symbol": style.symbol},
        hovertemplate="%{y:+.4f}",
    )
    figure.update_xaxes(title_text="step")
    # Without the format, plotly writes the zero of a symmetric axis as a rounding error.
    figure.update_yaxes(title_text="loss difference (nats per token)", tickformat=".6~f")
    # The range is symmetric, and cut where a large early difference would hide what is judged.
    ends = [verdict.mean_difference_nats, verdict.interval.low, verdict.interval.high, verdict.margin_nats]
    judged = float(np.nanmax(np.abs(ends)))
    everything = float(np.nanmax(np.abs(np.concatenate([band.to_numpy(), smoothed.to_numpy()], axis=1))))
    high = 1.15 * max(judged, min(everything, 4.0 * judged)) or 1.0
    return figure.update_yaxes(range=[-high, high])


def _difference_finding(verdict: Verdict) -> str:
    arm, reference, shared = contrast(verdict.arm, verdict.reference)
    both = f" (both {shared})" if shared else ""
    if not verdict.seeds:
        return f"{arm} and {reference}{both} have no finished seed in common"
    judged = "insufficient data to judge" if verdict.answer is Answer.INSUFFICIENT else verdict.answer_words
    return f"{arm} ends {verdict.mean_difference_nats:+.4f} nats from {reference}{both}: {judged}"


def _difference_reading(verdict: Verdict, steps: int) -> str:
    if not verdict.seeds:
        return " ".join([verdict.decided_by, *verdict.findings, verdict.settled_by])
    n = "1 seed, so no interval" if verdict.n_seeds == 1 else f"{verdict.n_seeds} seeds"
    band = f"; band: {100 * verdict.interval.level:g} % t interval of the mean" if verdict.n_seeds > 1 else ""
    margin = f"margin ±{verdict.margin_nats:.4f}" if verdict.margin_nats > 0 else "no margin"
    return " ".join(
        [f"Paired by seed, mean over the trailing {steps} steps{band}; n = {n}; {margin}.", verdict.decided_by]
    )


def _final_finding(final: FinalLosses) -> str:
    ends = {arm: float(np.mean(list(final.of(arm).values()))) for arm in sorted({arm for arm, _ in final.by_run})}
    if not ends:
        return "No run reached its last step with a finite loss"
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    if len(ends) == 1:
        return f"{arm_label(low)} ends at {ends[low]:.3f} nats per token"
    first, second, shared = contrast(low, high)
    both = f" (both {shared})" if shared else ""
    arms = f"{first} and {second}{both}" if len(ends) == 2 else f"the {len(ends)} arms"
    at = f"{first} at {ends[low]:.3f}, {second} at {ends[high]:.3f}"
    return f"After {final.last_step:,} steps {arms} end {ends[high] - ends[low]:.4f} nats apart: {at}"


def _tail_finding(tails: dict[str, pd.DataFrame]) -> str:
    means = pd.DataFrame({name: tail.mean(axis=1) for name, tail in tails.items()})
    if means.shape[1] == 1:
        only = means.to_numpy(dtype=float)
        fall = float(only[0, 0] - only[-1, 0])
        return f"{arm_label(str(means.columns[0]))} falls by {fall:.3f} nats in the last {100 * TAIL:g} % of steps"
    gap = (means.max(axis=1) - means.min(axis=1)).max()
    return f"In the last {100 * TAIL:g} % of steps the mean curves stay within {gap:.4f} nats of each other"


def _tail_reading(tails: dict[str, pd.DataFrame], window: int) -> str:
    smoothing = f"smoothed over {window} logged steps" if window > 1 else "unsmoothed"
    if _largest_count(tails) == 1:
        return f"One seed{' an arm' if len(tails) > 1 else ''}, {smoothing}; no band without a second seed."
    return f"Mean over seeds ± one standard deviation over seeds, {smoothing}; {_count(tails)}."


def _seeds_and_means(curves: dict[str, pd.DataFrame], window: int) -> str:
    smoothing = f", smoothed over {window} logged steps" if window > 1 else ""
    if _largest_count(curves) == 1:
        return f"One seed{' an arm' if len(curves) > 1 else ''}{smoothing}."
    n = _largest_count(curves)
    drawn = f"{len(drawn_seeds(n))} of {n} seeds" if len(drawn_seeds(n)) < n else "seeds"
    return f"Thin: {drawn}; bold: their mean{smoothing}; {_count(curves)}."


def _count(curves: dict[str, pd.DataFrame]) -> str:
    """Seeds that reach the last step."""
    n = span(finished(arm).shape[1] for arm in curves.values())
    return f"n = {n} seeds{' an arm' if len(curves) > 1 else ''}"


def _largest_count(curves: dict[str, pd.DataFrame]) -> int:
    return max(arm.shape[1] for arm in curves.values())


def _place_inset(figure: go.Figure, curves: dict[str, pd.DataFrame], last: int) -> None:
    """Put the inset at the top right, above the highest loss to the right of its left edge."""
    values = np.concatenate([arm.to_numpy(dtype=float).ravel() for arm in curves.values()])
    low, high = np.nanmin(values), np.nanmax(values)
    # The inset's tick labels stand to the left of its edge, so the curves are looked at from a little before it.
    right = [arm.loc[int((INSET_LEFT - 0.08) * last) :].to_numpy(dtype=float).ravel() for arm in curves.values()]
    clear = float(np.nanmax(np.concatenate(right)))
    floor = low - 0.04 * (high - low)
    # Where curves do not fall enough to leave room, the axis is extended upwards until they do.
    top = max(high + 0.04 * (high - low), floor + (clear - floor) / (1.0 - INSET_GAP - INSET_MIN_HEIGHT))
    bottom = (clear - floor) / (top - floor) + INSET_GAP
    frame = {"linecolor": MUTED, "mirror": True, "showline": True, "tickfont": {"size": 12}, "title": None}
    figure.update_layout(
        xaxis={"range": [0, 1.01 * last]},
        yaxis={"range": [floor, top]},
        xaxis2={"domain": [INSET_LEFT, 0.99], "anchor": "y2", "nticks": 5, **frame},
        yaxis2={"domain": [bottom, 0.99], "anchor": "x2", "nticks": 5, **frame},
    )
