"""Loss figures: the whole run with an inset, the last part enlarged, the difference against its margin.

Each takes the metrics table and returns a plotly figure whose title is computed from the data.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import arm_label, contrast
from moelab.analysis.convergence import final_losses
from moelab.analysis.verdict import Answer, Verdict
from moelab.errors import BadInput
from moelab.viz.curves import finished, joined_lines, mean_and_interval, mean_and_sd, seed_curves
from moelab.viz.theme import INK, MUTED, ArmStyle, arm_styles, new_figure

INSET_LEFT, INSET_GAP, INSET_MIN_HEIGHT = 0.47, 0.10, 0.42
"""Left edge of the inset, its clearance above the curves, its smallest height; all parts of the plot area."""


def loss_curves(table: pd.DataFrame, *, final_fraction: float = 0.1, note: str = "") -> go.Figure:
    """Loss over all steps: every seed thin, the mean over seeds bold, the last part again in an inset.

    Args:
        table: Metrics table.
        final_fraction: Part of the steps shown in the inset, and that the final losses in the title are means over.
        note: Condition to state in the title, such as "emulated kernels".

    Returns:
        The figure.
    """
    curves = _arm_curves(table, "loss")
    inset = f"Inset: the last {100 * final_fraction:g} % of steps."
    figure = new_figure(
        _final_finding(table, final_fraction),
        subtitle=f"Thin: seeds; bold: their mean; {_seeds(curves)}. {inset}",
        note=note,
        height=520,
    )
    _draw_seeds_and_means(figure, curves)
    last = max(int(arm.index.max()) for arm in curves.values())
    first = last - max(1, round(final_fraction * last)) + 1
    _draw_seeds_and_means(figure, {name: arm.loc[first:] for name, arm in curves.items()}, inset=True)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss (nats per token)")
    _place_inset(figure, curves, last)
    return figure


def loss_tail(table: pd.DataFrame, *, fraction: float = 0.3, note: str = "") -> go.Figure:
    """Loss over the last part of the steps: mean over seeds with a band of one standard deviation over seeds.

    Args:
        table: Metrics table.
        fraction: Part of the steps shown.
        note: Condition to state in the title.

    Returns:
        The figure.
    """
    curves = {name: finished(arm) for name, arm in _arm_curves(table, "loss").items()}
    last = max(int(arm.index.max()) for arm in curves.values())
    tails = {name: mean_and_sd(arm.loc[last - round(fraction * last) + 1 :]) for name, arm in curves.items()}
    figure = new_figure(
        _tail_finding(tails, fraction),
        subtitle=f"Mean over seeds ± one standard deviation over seeds, unsmoothed; {_seeds(curves)}.",
        note=note,
    )
    for name, style in arm_styles(tails).items():
        tail = tails[name]
        _draw_band(figure, tail.index, tail["mean"] - tail["sd"], tail["mean"] + tail["sd"], style)
        _draw_mean(figure, tail["mean"], style)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss (nats per token)")
    return figure


def loss_difference(table: pd.DataFrame, verdict: Verdict, *, note: str = "") -> go.Figure:
    """Loss of an arm minus the reference's at each step, paired by seed, against the equivalence margin.

    Each seed's difference is averaged over the trailing window that the verdict's final loss uses, so the last point
    and its interval are the verdict's own.

    Args:
        table: Metrics table that the verdict was made from.
        verdict: Verdict of ``compare_convergence``.
        note: Condition to state in the title.

    Returns:
        The figure; without curves where the arms have no finished seed in common.

    Raises:
        BadInput: The verdict is on a held-out loss, which has no curve.
    """
    if verdict.steps is None:
        raise BadInput("this verdict is on a held-out loss, which has no steps: pass one of compare_convergence")
    first, last = verdict.steps
    figure = new_figure(_difference_finding(verdict), subtitle=_difference_subtitle(verdict), note=note)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss difference (nats per token)", tickformat="+")
    _draw_margin(figure, verdict)
    if not verdict.seeds:
        return figure
    seeds = list(verdict.seeds)
    difference = seed_curves(table, verdict.arm)[seeds] - seed_curves(table, verdict.reference)[seeds]
    window = int(difference.loc[first:last].shape[0])
    smoothed = difference.loc[:last].rolling(window).mean().dropna(how="all")
    _draw_difference(figure, smoothed, verdict)
    return figure


def gradient_norm(table: pd.DataFrame, *, note: str = "") -> go.Figure:
    """Gradient norm over all steps: every seed thin, the mean over seeds bold.

    Args:
        table: Metrics table.
        note: Condition to state in the title.

    Returns:
        The figure.
    """
    curves = {name: arm for name, arm in _arm_curves(table, "grad_norm").items() if arm.notna().any(axis=None)}
    if not curves:
        raise BadInput("the table has no gradient norm: TorchTitan logs it as grad_norm with the loss")
    peaks = {name: arm.max(axis=1) for name, arm in curves.items()}
    worst = max(peaks, key=lambda name: peaks[name].max())
    figure = new_figure(
        f"The largest gradient norm is {peaks[worst].max():.3g} ({arm_label(worst)}, step {peaks[worst].idxmax()})",
        subtitle=f"Before clipping. Thin: seeds; bold: their mean; {_seeds(curves)}.",
        note=note,
    )
    _draw_seeds_and_means(figure, curves)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="gradient norm", type="log", dtick="D2")
    return figure


# --- findings --------------------------------------------------------------------------------------------------------


def _final_finding(table: pd.DataFrame, final_fraction: float) -> str:
    final = final_losses(table, final_fraction=final_fraction)
    arms = sorted({arm for arm, _ in final.by_run})
    if not arms:
        return "No run reached its last step with a finite loss"
    ends = {arm: float(np.mean(list(final.of(arm).values()))) for arm in arms}
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    if len(arms) == 1:
        return f"{arm_label(low)} ends at {ends[low]:.3f} nats per token"
    first, second, shared = contrast(low, high)
    arms_words = (
        f"the {len(arms)} arms" if len(arms) > 2 else f"{first} and {second}{f' (both {shared})' if shared else ''}"
    )
    return (
        f"After {final.last_step:,} steps {arms_words} end {ends[high] - ends[low]:.4f} nats apart: "
        f"{first} at {ends[low]:.3f}, {second} at {ends[high]:.3f}"
    )


def _tail_finding(tails: dict[str, pd.DataFrame], fraction: float) -> str:
    means = pd.DataFrame({name: tail["mean"] for name, tail in tails.items()})
    if means.shape[1] == 1:
        return f"{arm_label(means.columns[0])}: the last {100 * fraction:g} % of steps"
    gap = (means.max(axis=1) - means.min(axis=1)).max()
    return f"In the last {100 * fraction:g} % of steps the mean curves stay within {gap:.4f} nats of each other"


def _difference_finding(verdict: Verdict) -> str:
    arm, reference, shared = contrast(verdict.arm, verdict.reference)
    both = f" (both {shared})" if shared else ""
    if not verdict.seeds:
        return f"{arm} and {reference}{both} have no finished seed in common"
    judged = "insufficient data to judge" if verdict.answer is Answer.INSUFFICIENT else str(verdict.answer)
    return f"{arm} ends {verdict.mean_difference_nats:+.4f} nats from {reference}{both}: {judged}"


def _difference_subtitle(verdict: Verdict) -> str:
    if not verdict.seeds:
        return verdict.settled_by
    first, last = verdict.steps or (0, 0)
    interval = f"{100 * verdict.interval.level:g} % t interval" if verdict.n_seeds > 1 else "no interval"
    margin = f"equivalence margin ±{verdict.margin_nats:.4f}" if verdict.margin_nats > 0 else "no margin"
    return (
        f"Paired by seed, mean over the trailing {last - first + 1} steps; n = {verdict.n_seeds}, {interval}; {margin}."
    )


def _seeds(curves: dict[str, pd.DataFrame]) -> str:
    counts = {finished(arm).shape[1] for arm in curves.values()}
    numbers = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"n = {numbers} seed{'' if numbers == '1' else 's'} an arm" if len(curves) > 1 else f"n = {numbers}"


# --- drawing ---------------------------------------------------------------------------------------------------------


def _arm_curves(table: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    return {str(arm): seed_curves(table, str(arm), column) for arm in sorted(table["arm"].unique())}


def _draw_seeds_and_means(figure: go.Figure, curves: dict[str, pd.DataFrame], *, inset: bool = False) -> None:
    axes = {"xaxis": "x2", "yaxis": "y2", "showlegend": False} if inset else {}
    styles = arm_styles(curves)
    for name, style in styles.items():
        x, y = joined_lines(curves[name])
        line = {"color": style.fill(0.35), "width": 1}
        seeds = go.Scatter(x=x, y=y, mode="lines", line=line, hoverinfo="skip", legendgroup=name, **axes)
        figure.add_trace(seeds.update(showlegend=False))
    for name, style in styles.items():
        _draw_mean(figure, mean_and_sd(finished(curves[name]))["mean"], style, group=name, **axes)


def _draw_mean(figure: go.Figure, mean: pd.Series[float], style: ArmStyle, group: str = "", **axes: object) -> None:
    figure.add_trace(
        go.Scatter(
            x=mean.index.to_numpy(),
            y=mean.to_numpy(),
            mode="lines",
            name=style.label,
            legendgroup=group or style.label,
            line={"color": style.color, "width": 2.5, "dash": style.dash},
            hovertemplate="%{y:.4f}",
            **axes,
        )
    )


def _draw_band(
    figure: go.Figure, steps: pd.Index[int], low: pd.Series[float], high: pd.Series[float], style: ArmStyle
) -> None:
    x = np.concatenate([steps.to_numpy(), steps.to_numpy()[::-1]])
    y = np.concatenate([high.to_numpy(), low.to_numpy()[::-1]])
    drawn = np.isfinite(y)
    outline = {"color": style.fill(0.0), "width": 0}
    band = {"fill": "toself", "fillcolor": style.fill(0.18), "mode": "lines", "line": outline, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(x=x[drawn], y=y[drawn], legendgroup=style.label, showlegend=False, **band))


def _draw_margin(figure: go.Figure, verdict: Verdict) -> None:
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    if verdict.margin_nats > 0:
        figure.add_hrect(
            y0=-verdict.margin_nats,
            y1=verdict.margin_nats,
            fillcolor="rgba(0,158,115,0.10)",
            line={"color": "rgba(0,158,115,0.7)", "width": 1, "dash": "dot"},
            layer="below",
            annotation={"text": "equivalence margin", "font": {"size": 12, "color": MUTED}},
            annotation_position="top left",
            annotation_xshift=6,
        )


def _draw_difference(figure: go.Figure, smoothed: pd.DataFrame, verdict: Verdict) -> None:
    style = arm_styles([verdict.arm])[verdict.arm]
    band = mean_and_interval(smoothed, level=verdict.interval.level)
    _draw_band(figure, band.index, band["low"], band["high"], style)
    x, y = joined_lines(smoothed)
    line = {"color": style.fill(0.45), "width": 1}
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line=line, name="one seed", hoverinfo="skip"))
    _draw_mean(figure, band["mean"], style)
    figure.data[-1].update(name="mean over seeds", line_dash="solid")
    figure.update_yaxes(range=_difference_range(band, smoothed, verdict))
    reach = (verdict.interval.high - verdict.interval.low) / 2.0
    figure.add_trace(
        go.Scatter(
            x=[band.index[-1]],
            y=[verdict.mean_difference_nats],
            error_y={"array": [reach], "visible": verdict.interval.exists, "color": INK, "thickness": 2, "width": 7},
            mode="markers",
            name="final difference, as judged",
            marker={"color": INK, "size": 10, "symbol": style.symbol},
            hovertemplate="%{y:+.4f}",
        )
    )


def _difference_range(band: pd.DataFrame, smoothed: pd.DataFrame, verdict: Verdict) -> list[float]:
    """Symmetric range of the axis, cut where a large early difference would hide what is judged."""
    ends = np.abs([verdict.mean_difference_nats, verdict.interval.low, verdict.interval.high, verdict.margin_nats])
    judged = float(np.nanmax(ends))
    everything = float(np.nanmax(np.abs(np.concatenate([band.to_numpy(), smoothed.to_numpy()], axis=1))))
    reach = 1.12 * max(judged, min(everything, 4.0 * judged))
    return [-reach, reach] if reach > 0 else [-1.0, 1.0]


def _place_inset(figure: go.Figure, curves: dict[str, pd.DataFrame], last: int) -> None:
    """Put the inset at the top right, above the highest loss to the right of its left edge."""
    values = np.concatenate([arm.to_numpy(dtype=float).ravel() for arm in curves.values()])
    low, high = np.nanmin(values), np.nanmax(values)
    below = [arm.loc[int(0.9 * INSET_LEFT * last) :].to_numpy(dtype=float).ravel() for arm in curves.values()]
    clear = float(np.nanmax(np.concatenate(below)))
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
