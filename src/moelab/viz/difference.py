"""The difference figure: loss of an arm minus the reference's over steps, against the equivalence margin.

Each seed's difference is averaged over a trailing window as long as the one behind the verdict's final loss. The last
point of the curve, with its interval, is therefore the verdict itself, and the figure shows how it came about.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import contrast
from moelab.analysis.verdict import Answer, Verdict
from moelab.errors import BadInput
from moelab.viz.curves import joined_lines, mean_and_interval, seed_curves
from moelab.viz.draw import draw_band, draw_mean
from moelab.viz.theme import INK, MUTED, arm_styles, new_figure


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
    figure = new_figure(_finding(verdict), subtitle=_reading(verdict, last - first + 1), note=note, height=height)
    if not verdict.seeds:
        return figure.update_xaxes(visible=False).update_yaxes(visible=False)
    seeds = list(verdict.seeds)
    difference = seed_curves(table, verdict.arm)[seeds] - seed_curves(table, verdict.reference)[seeds]
    window = len(difference.loc[first:last])
    smoothed = difference.loc[:last].rolling(window).mean().dropna(how="all")
    band = mean_and_interval(smoothed, level=verdict.interval.level)
    _draw_margin(figure, verdict)
    _draw_curves(figure, smoothed, band, verdict)
    _draw_final(figure, last, verdict)
    figure.update_xaxes(title_text="step")
    # Without the format, plotly writes the zero of a symmetric axis as a rounding error.
    figure.update_yaxes(title_text="loss difference (nats per token)", tickformat=".6~f")
    figure.update_yaxes(range=_range(band, smoothed, verdict))
    return figure


def _finding(verdict: Verdict) -> str:
    arm, reference, shared = contrast(verdict.arm, verdict.reference)
    both = f" (both {shared})" if shared else ""
    if not verdict.seeds:
        return f"{arm} and {reference}{both} have no finished seed in common"
    judged = "insufficient data to judge" if verdict.answer is Answer.INSUFFICIENT else verdict.answer_words
    return f"{arm} ends {verdict.mean_difference_nats:+.4f} nats from {reference}{both}: {judged}"


def _reading(verdict: Verdict, steps: int) -> str:
    if not verdict.seeds:
        return " ".join([verdict.decided_by, *verdict.findings, verdict.settled_by])
    n = "1 seed, so no interval" if verdict.n_seeds == 1 else f"{verdict.n_seeds} seeds"
    band = f"; band: {100 * verdict.interval.level:g} % t interval of the mean" if verdict.n_seeds > 1 else ""
    margin = f"margin ±{verdict.margin_nats:.4f}" if verdict.margin_nats > 0 else "no margin"
    return " ".join(
        [f"Paired by seed, mean over the trailing {steps} steps{band}; n = {n}; {margin}.", verdict.decided_by]
    )


def _draw_margin(figure: go.Figure, verdict: Verdict) -> None:
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    if verdict.margin_nats > 0:
        figure.add_hrect(
            y0=-verdict.margin_nats,
            y1=verdict.margin_nats,
            fillcolor="rgba(0,158,115,0.10)",
            line={"color": "rgba(0,158,115,0.7)", "width": 1, "dash": "dot"},
            layer="below",
        )
        label = {"text": "equivalence margin", "font": {"size": 12, "color": MUTED}, "showarrow": False}
        place = {"x": 0.01, "xref": "x domain", "y": verdict.margin_nats, "yanchor": "bottom"}
        figure.add_annotation(**label, **place)


def _draw_curves(figure: go.Figure, smoothed: pd.DataFrame, band: pd.DataFrame, verdict: Verdict) -> None:
    style = arm_styles([verdict.arm])[verdict.arm]
    draw_band(figure, band["low"], band["high"], style)
    x, y = joined_lines(smoothed)
    line = {"color": style.fill(0.45), "width": 1}
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, name="one seed", hoverinfo="skip"))
    draw_mean(figure, band["mean"], style, name="mean over seeds", hovertemplate="%{y:+.4f}")
    figure.data[-1].line.dash = "solid"


def _draw_final(figure: go.Figure, last: int, verdict: Verdict) -> None:
    reach = (verdict.interval.high - verdict.interval.low) / 2.0
    bar = {"array": [reach], "visible": verdict.interval.exists, "color": INK, "thickness": 2, "width": 7}
    figure.add_trace(
        go.Scatter(
            x=[last],
            y=[verdict.mean_difference_nats],
            error_y=bar,
            mode="markers",
            name="final difference, as judged",
            marker={"color": INK, "size": 10, "symbol": arm_styles([verdict.arm])[verdict.arm].symbol},
            hovertemplate="%{y:+.4f}",
        )
    )


def _range(band: pd.DataFrame, smoothed: pd.DataFrame, verdict: Verdict) -> list[float]:
    """Symmetric range of the axis, cut where a large early difference would hide what is judged."""
    interval = verdict.interval
    ends = np.array([verdict.mean_difference_nats, interval.low, interval.high, verdict.margin_nats])
    judged = float(np.nanmax(np.abs(ends)))
    everything = float(np.nanmax(np.abs(np.concatenate([band.to_numpy(), smoothed.to_numpy()], axis=1))))
    reach = 1.15 * max(judged, min(everything, 4.0 * judged))
    return [-reach, reach] if reach > 0 else [-1.0, 1.0]
