"""Figures of a study, and of runs side by side: loss and its difference, throughput, gradient norms, expert load.

In the difference each seed is averaged over a trailing window as long as the one behind the verdict's final loss: the
last point of the curve, with its interval, is the verdict itself, and the figure shows how it came about.

``styles`` are looks by arm, in the order of the legend; None gives the arms of a study theirs. A ``note`` is a
condition to state in the title, such as "emulated kernels".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from scipy import stats

from moelab.errors import BadInput
from moelab.judge.arms import contrast
from moelab.judge.report import Difference
from moelab.judge.throughput import GAINS, SOURCE, THROUGHPUT, THROUGHPUT_SETUP, ArmThroughput, Gain
from moelab.judge.verdict import Answer, ArmSeeds, Verdict, first_final_step, judge
from moelab.runs.expert_load import ExpertLoad
from moelab.runs.table import merge_segments
from moelab.viz.draw import (
    draw_band,
    draw_marks,
    draw_mean,
    draw_seeds,
    drawn_seeds,
    interval_marks,
    legend_below,
    list_rows,
    over_steps,
    panels,
    thinning,
    write_beside,
)
from moelab.viz.theme import (
    INK,
    MUTED,
    NORMAL,
    WARNING,
    WIDE,
    ArmStyle,
    arm_styles,
    in_order,
    new_figure,
    plot_text,
    span,
    wrap,
)

GREEN = "rgba(0,158,115,{})"
"""The colour of an equivalent verdict, and of the band where one lies, with an opacity."""


def seed_curves(table: pd.DataFrame, arm: str, column: str = "loss") -> pd.DataFrame:
    """A column of one arm: steps (index) by seeds (columns), NaN where a run has no value; segments are merged here."""
    rows = table[table["arm"] == arm]
    return merge_segments(rows).pivot(index="step", columns="seed", values=column).sort_index()


def paired_difference(table: pd.DataFrame, verdict: Verdict) -> pd.DataFrame:
    """Loss of a verdict's arm minus the reference's, of each judged seed, over a trailing window.

    The window is that of the final losses, so the last row is what was judged.
    """
    assert verdict.steps is not None  # None is of a held-out loss, which has no curve
    (first, last), seeds = verdict.steps, list(verdict.seeds)
    # Runs side by side may log other steps; a window counts those that all have.
    difference = (seed_curves(table, verdict.arm)[seeds] - seed_curves(table, verdict.reference)[seeds]).dropna()
    return difference.loc[:last].rolling(len(difference.loc[first:last])).mean().dropna(how="all")


def mean_and_interval(curves: pd.DataFrame, *, level: float) -> pd.DataFrame:
    """Mean over seeds at each step with its t interval, as columns ``mean``, ``low``, ``high`` (NaN for one seed)."""
    mean, n = curves.mean(axis=1), curves.shape[1]
    reach = stats.t.ppf(0.5 + level / 2.0, max(1, n - 1)) * curves.std(axis=1, ddof=1) / n**0.5
    return pd.DataFrame({"mean": mean, "low": mean - reach, "high": mean + reach})


def loss_curves(
    table: pd.DataFrame,
    *,
    final_fraction: float = 0.1,
    styles: Mapping[str, ArmStyle] | None = None,
    note: str = "",
    marks: Sequence[tuple[int, float]] = (),
) -> go.Figure:
    """Loss over all steps, and beside it the last part again: every seed thin, the mean over seeds bold.

    Curves of more than 100 logged steps are smoothed over one hundredth of them, as the subtitle states. The last part
    is left out where an arm has fewer than two steps in it.

    Args:
        table: Metrics table.
        final_fraction: The last part, of all steps.
        styles: Looks by arm.
        note: Condition.
        marks: Steps, with their loss, whose gradient norm was not finite.

    Raises:
        BadInput: The table has no loss.
    """
    curves = {str(arm): seed_curves(table, str(arm)) for arm in sorted(table["arm"].unique())}
    # One hundredth of the logged steps: nothing in a short run, and in a long one less than the eye averages over.
    windows = {name: max(1, round(len(arm) / 100)) for name, arm in curves.items()}
    averaged = {name: _averaged_seeds(arm) for name, arm in curves.items()}
    first_of_last = first_final_step(max(int(arm.index.max()) for arm in curves.values()), final_fraction)
    # A line of one point is none.
    has_last = all(len(arm.dropna(how="all").loc[first_of_last:]) > 1 for arm in averaged.values())
    figure = panels(
        "Training loss",
        ("all steps", f"the last {100 * final_fraction:g} %") if has_last else ("",),
        subtitle=_loss_reading(curves, averaged, max(windows.values())),
        note=note,
        height=440,
        width=WIDE,
        widths=(0.6, 0.4) if has_last else None,
    )
    styles = {name: style for name, style in (styles or arm_styles(curves)).items() if name in curves}
    for column, first in enumerate((0, first_of_last) if has_last else (0,), start=1):
        axes = {"xaxis": f"x{column}", "yaxis": f"y{column}"}
        for name, style in styles.items():  # seeds are fainter behind a smoothed mean
            # A lone seed that is not smoothed is the bold line itself.
            if curves[name].shape[1] > 1 or windows[name] > 1:
                opacity = 0.35 if windows[name] == 1 else 0.2
                draw_seeds(figure, curves[name].loc[first:], style, opacity=opacity, **axes)
        for name, style in styles.items():
            # The first steps are means over what there is.
            mean = averaged[name].rolling(windows[name], min_periods=1).mean().mean(axis=1)
            draw_mean(figure, mean.loc[first:], style, **axes, showlegend=column == 1)
    draw_marks(figure, marks)
    figure.update_xaxes(title_text="step").update_yaxes(title_text="loss (nats per token)", col=1)
    return legend_below(figure.update_layout(hovermode="x unified", showlegend=True))


def gradient_norms(table: pd.DataFrame, *, styles: Mapping[str, ArmStyle]) -> go.Figure:
    """Gradient norm over all steps on a logarithmic axis: of each arm the mean over its seeds."""
    figure = new_figure("Gradient norm", subtitle="Mean over the seeds of each arm, where it is finite.", height=400)
    for name, style in styles.items():
        norms = seed_curves(table, name, "grad_norm").replace([np.inf, -np.inf], np.nan)
        draw_mean(figure, norms.mean(axis=1).dropna(), style, hovertemplate="%{y:.4g}")
    return legend_below(over_steps(figure, "gradient norm", type="log").update_layout(showlegend=True))


def _averaged_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """Seeds that reach the last step; where none does, all seeds at the steps that all logged."""
    done = curves.loc[:, curves.notna().iloc[-1]]  # a mean that loses a seed on the way would jump
    return curves.dropna() if done.empty else done


def _loss_reading(curves: Mapping[str, pd.DataFrame], averaged: Mapping[str, pd.DataFrame], window: int) -> str:
    n, each = max(arm.shape[1] for arm in curves.values()), " each" if len(curves) > 1 else ""
    smoothing = f", smoothed over {window} logged steps" if window > 1 else ""
    drawn = _thinning_words(max(len(arm) for arm in curves.values()))
    if n == 1:
        return f"One run{each}{smoothing}.{drawn}"
    seeds = f"{len(drawn_seeds(n))} of {n} seeds" if len(drawn_seeds(n)) < n else "seeds"
    counts = span(arm.shape[1] for arm in averaged.values())
    return f"Thin: {seeds}; bold: their mean{smoothing}; n = {counts} seeds{each}.{drawn}"


def _thinning_words(rows: int) -> str:
    """What a subtitle says of curves whose longest has so many logged steps; empty where all are drawn."""
    every = thinning(rows)
    return f" Of the longest curve, one logged step in {every} is drawn." if every > 1 else ""


def loss_difference(
    table: pd.DataFrame, verdict: Verdict, *, style: ArmStyle | None = None, note: str = ""
) -> go.Figure:
    """Loss difference at each step, paired by seed: mean with its interval over seeds, zero line, margin band.

    Args:
        table: What the verdict was made from.
        verdict: On a training loss.
        style: Look of the arm; None gives an arm of a study its own.
        note: Condition to state in the title, such as "emulated kernels".

    Raises:
        BadInput: The verdict is on a held-out loss or has no pair, and so no curve.
    """
    if verdict.steps is None or not verdict.seeds:
        raise BadInput("this verdict has no curves: it is on a held-out loss, or the arms have no seed in common")
    first, last = verdict.steps
    arm, reference, shared = contrast(verdict.arm, verdict.reference)
    both = f" (both {shared})" if shared else ""
    judged = "insufficient data to judge" if verdict.answer is Answer.INSUFFICIENT else verdict.answer_words
    n = "1 seed, so no interval" if verdict.n_seeds == 1 else f"{verdict.n_seeds} seeds"
    band_words = f"; band: {100 * verdict.interval.level:g} % t interval of the mean" if verdict.n_seeds > 1 else ""
    margin = f"margin ±{verdict.margin_nats:.4f}" if verdict.margin_nats > 0 else "no margin"
    figure = new_figure(
        f"{arm} ends {verdict.mean_difference_nats:+.4f} nats from {reference}{both}: {judged}",
        subtitle=f"Paired by seed, mean over the trailing {last - first + 1} steps{band_words}; n = {n}; {margin}. "
        f"{verdict.decided_by}",
        note=note,
        height=430,
    )
    smoothed = paired_difference(table, verdict)
    band = mean_and_interval(smoothed, level=verdict.interval.level)
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    if verdict.margin_nats > 0:
        edges = {"y0": -verdict.margin_nats, "y1": verdict.margin_nats, "layer": "below"}
        line = {"color": GREEN.format(0.7), "width": 1, "dash": "dot"}
        figure.add_hrect(**edges, fillcolor=GREEN.format(0.1), line=line)
        label = {"text": "equivalence margin", "font": {"size": 12, "color": MUTED}, "showarrow": False}
        figure.add_annotation(**label, x=0.01, xref="x domain", y=verdict.margin_nats, yanchor="bottom")
    style = style or arm_styles([verdict.arm])[verdict.arm]
    draw_band(figure, band["low"], band["high"], style)
    draw_seeds(figure, smoothed, style, opacity=0.45, name="one seed", showlegend=True, legendgroup=None)
    line = {"color": style.color, "width": 2.5}  # a dash tells arms apart, and here is one
    draw_mean(figure, band["mean"], style, name="mean over seeds", hovertemplate="%{y:+.4f}", line=line)
    # The t interval is symmetric, so plotly needs one length.
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
    # The range is symmetric, and cut where a large early difference would hide what is judged.
    ends = [verdict.mean_difference_nats, verdict.interval.low, verdict.interval.high, verdict.margin_nats]
    most = float(np.nanmax(np.abs(ends)))
    everything = float(np.nanmax(np.abs(np.concatenate([band.to_numpy(), smoothed.to_numpy()], axis=1))))
    high = 1.15 * max(most, min(everything, 4.0 * most)) or 1.0  # of a run against itself all are zero
    # Without the format, plotly writes the zero of a symmetric axis as a rounding error.
    return legend_below(over_steps(figure, "loss difference (nats per token)", tickformat=".6~f", range=[-high, high]))


def run_differences(differences: Sequence[Difference], styles: Mapping[str, ArmStyle], *, note: str = "") -> go.Figure:
    """Loss of single runs minus that of the first, at the steps that both logged; styles are by label."""
    figure = new_figure(
        f"Loss minus that of {differences[0].reference}",
        subtitle="Thin: each step; bold: trailing mean over as many steps as the final difference. How a difference "
        "scatters from step to step is no interval over seeds."
        + _thinning_words(max(len(one.steps) for one in differences)),
        note=note,
        height=480,
    )
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    for one in differences:
        window = max(1, len(one.curve.loc[one.first_step :]))  # so the curve ends at the difference itself
        draw_seeds(figure, one.curve.to_frame(), styles[one.label], opacity=0.4)
        draw_mean(figure, one.curve.rolling(window).mean(), styles[one.label], hovertemplate="%{y:+.4f}")
    first = wrap(f"loss − loss of {differences[0].reference}", 40)
    over_steps(figure, f"{first}<br>(nats per token)", tickformat=".6~f")
    return figure.update_layout(showlegend=True)


def verdict_intervals(verdicts: Mapping[str, Verdict], title: str, *, note: str = "") -> go.Figure:
    """Every verdict's difference with its interval on the band of its margin, a row each, by what the row is called."""
    figure = new_figure(
        title,
        subtitle="Dots: mean difference from the reference; bars: its t interval over seeds; band: equivalence margin.",
        note=note,
        height=150 + 52 * len(verdicts),
        width=WIDE,
    )
    colors = {Answer.EQUIVALENT: "#009E73", Answer.DIFFERENT: WARNING}
    answers = [wrap(one.answer_words, 44) for one in verdicts.values()]  # at the right, one below the other
    for place, (name, one) in enumerate(verdicts.items()):
        color = colors.get(one.answer, MUTED)
        if one.margin_nats > 0:
            edges = {"x0": -one.margin_nats, "x1": one.margin_nats, "y0": place - 0.4, "y1": place + 0.4}
            figure.add_shape(type="rect", **edges, fillcolor=GREEN.format(0.14), line_width=0, layer="below")
        ends = [(one.interval.low, one.mean_difference_nats, one.interval.high)]
        hover = f"{plot_text(name)}: %{{x:+.4f}} nats<extra></extra>"
        # One trace for each verdict, as each has the colour of its answer.
        mark = interval_marks([place], ends, color=color, marker={"color": color, "size": 11}, hovertemplate=hover)
        figure.add_trace(mark.update(error_x_visible=one.interval.exists))
        right = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 8, "y": place, "align": "left"}
        ink = color if color != MUTED else INK
        figure.add_annotation(text=f"<b>{answers[place]}</b>", font_color=ink, showarrow=False, **right)
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    figure.update_xaxes(tickformat="+.4~f", hoverformat="+.4f")
    right_px = 30 + 8 * max(len(line) for answer in answers for line in answer.split("<br>"))
    names = [wrap(name, 34) for name in verdicts]
    return list_rows(figure, "loss difference (nats per token)", names=names, showlegend=False, margin_r=right_px)


def verdict_examples() -> go.Figure:
    """The four answers on constructed losses of four seeds: what a verdict looks like before there is one."""
    reference = {0: 3.600, 1: 3.640, 2: 3.570, 3: 3.610}
    shifts = {
        "close, and every seed agrees": (0.003, -0.002, 0.004, -0.001),
        "close on average, but seeds disagree": (0.06, -0.055, 0.05, -0.045),
        "far, and every seed agrees": (0.09, 0.10, 0.095, 0.088),
        "far on average, but seeds disagree": (0.02, 0.14, 0.05, 0.10),
    }
    judged = {
        name: judge(
            ArmSeeds({seed: reference[seed] + shift for seed, shift in enumerate(own)}),
            ArmSeeds(reference),
            arm="mxfp8_standard",
            reference="bf16_standard",
        )
        for name, own in shifts.items()
    }
    note = "constructed losses of four seeds, no measurement"
    return verdict_intervals(judged, "Inside the margin: the same loss; across its edge: not decided", note=note)


# Throughput

TWO_BY_TWO = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
"""``mxfp8_standard`` was not published."""


def throughput_bars(
    arms: Sequence[ArmThroughput],
    *,
    gains: Sequence[Gain] = (),
    styles: Mapping[str, ArmStyle] | None = None,
    note: str = "",
) -> go.Figure:
    """Tokens per second per GPU of every arm with its seeds, and beside the bars their gains over a baseline."""
    measured = {arm.arm: arm for arm in arms}
    arms = [measured[name] for name in styles or in_order(measured) if name in measured]
    by_arm = {one.arm: one for one in gains if one.arm in measured}
    counts = [arm.n_seeds for arm in arms]
    reading = (
        f"Geometric mean over seeds of each run's median after its warm-up; n = {span(counts)} seeds per arm, "
        f"{100 * arms[0].interval.level:g} % t intervals, cut where they leave the axis; gains are paired by "
        "seed."
    )
    if max(counts) == 1:
        reading = "Median over the steps after the warm-up; one run each, so no interval."
    texts = []
    for arm in arms:
        texts.append(f"<b>{arm.tps:,.0f}</b>")
        if over := by_arm.get(arm.arm):
            percent = over.interval.percent
            gained = f"{percent.low:+.1f} to {percent.high:+.1f}" if percent.exists else "no interval"
            texts[-1] += f"<br>{over.percent:+.1f} % ({gained})"
    # With two seeds an interval may be a hundred times as long as the bars, which must stay readable beside it.
    most = max(arm.tps for arm in arms)
    ends = [min(2 * most, max(arm.interval.high if arm.interval.exists else 0.0, arm.tps)) for arm in arms]
    tps = {arm.arm: arm.tps for arm in arms}
    figure = _arm_rows("Throughput by arm", tps, texts, ends, styles=styles, subtitle=reading, note=note)
    judged = {place: arm for place, arm in enumerate(arms) if arm.interval.exists}
    intervals = [(arm.interval.low, arm.tps, arm.interval.high) for arm in judged.values()]
    figure.add_trace(interval_marks(list(judged), intervals, color=INK, marker_color=INK, hoverinfo="skip"))
    return figure


def published_bars() -> go.Figure:
    """Figure 2 of the published study: three arms of the two-by-two with their gains, and the place of the fourth.

    Nothing here was measured by moelab.
    """
    gains = {gain.arm: f"{gain.percent:+.1f} %" for gain in GAINS if gain.baseline == "bf16_standard"}
    known = {row.arm: row.tps for row in THROUGHPUT}
    published = {arm: known.get(arm) for arm in TWO_BY_TWO}
    setup = THROUGHPUT_SETUP
    return _arm_rows(
        "The published throughput: MXFP8 alone is missing",
        {arm: tps or 0.0 for arm, tps in published.items()},
        [
            f"<b>{tps:,.0f}</b> ({gains.get(arm, 'baseline')})" if tps else "not published"
            for arm, tps in published.items()
        ],
        subtitle=f"{setup.model}, {setup.hardware.split(':')[0]}, sequences of {setup.seq_len:,} tokens, "
        f"TP {setup.tp}, PP {setup.pp}, EP {setup.ep}, forced balance. n = 1 run of {setup.steps} steps per arm; no "
        "interval and no rule for discarding steps were published.",
        note=f"quoted: {SOURCE.split(';')[0]}",
        width=WIDE,
    )


def _arm_rows(
    title: str,
    tps: Mapping[str, float],
    texts: Sequence[str],
    ends: Sequence[float] = (),
    *,
    subtitle: str,
    note: str,
    styles: Mapping[str, ArmStyle] | None = None,
    width: int = NORMAL,
) -> go.Figure:
    """Throughput of arms as bars of their colours at places 0, 1, 2 …, with texts beside them or beside other ends."""
    looks = styles or arm_styles(tps)
    drawn = [looks[arm] for arm in tps]
    figure = new_figure(title, subtitle=subtitle, note=note, height=130 + 64 * len(tps), width=width)
    figure.add_bar(
        x=list(tps.values()),
        y=list(range(len(tps))),
        width=0.56,
        orientation="h",
        marker={
            "color": [style.fill(0.35) for style in drawn],
            "line": {"color": [style.color for style in drawn], "width": 2},
        },
        hovertemplate="%{x:,.0f} tokens/s<extra></extra>",
    )
    ends = ends or list(tps.values())
    for place, (end, text) in enumerate(zip(ends, texts, strict=True)):
        write_beside(figure, end, place, text, px=10)
    figure.update_xaxes(range=[0, 1.65 * max(ends)], tickformat=",").update_annotations(align="left")
    return list_rows(figure, "tokens/s per GPU", names=[style.label for style in drawn], showlegend=False)


# The load of experts


def expert_load_figure(load: ExpertLoad, *, ep: int, name: str) -> go.Figure:
    """How evenly a run, ``name`` in words, loads its experts: the busiest expert and rank, experts without tokens.

    Raises:
        BadInput: if ``ep`` does not divide the experts.
    """
    (worst_S, median_S), steps, idle = load.busiest_rank_over_layers(ep), load.steps, load.idle_percent_S
    dead = f"{load.dead_experts} of {load.late_LE.size} experts are dead" if load.dead_experts else "no expert is dead"
    figure = panels(
        f"Load of the experts: {dead}",
        [
            "busiest expert of<br>each layer, × mean",
            f"busiest of {ep} ranks,<br>× their mean",
            "experts without<br>a token (%)",
        ],
        subtitle=f"{name}; {len(steps)} recorded steps, tokens of all ranks. Dead experts got no token in the last "
        "fifth of the steps.",
        height=320,
        spacing=0.14,
    )
    figure.add_heatmap(
        x=steps,
        y=[str(layer) for layer in load.layers],
        z=np.round(load.busiest_expert_SL.T, 3),
        colorscale="Blues",
        zmin=1,
        colorbar={"thickness": 8, "x": 0.245, "xpad": 2, "outlinewidth": 0},
        hovertemplate="step %{x}, layer %{y}: %{z:.2f} × the mean<extra></extra>",
        row=1,
        col=1,
    )
    of_ranks = "%{y:.2f} × the mean of the ranks"
    for column, label, values, color, dash, hover in (
        (2, "worst layer", worst_S, WARNING, "solid", of_ranks),
        (2, "median layer", median_S, INK, "dash", of_ranks),
        (3, "experts", idle, MUTED, "dot", "step %{x}: %{y:.1f} %"),
    ):
        line = {"color": color, "dash": dash}
        trace = {"x": steps, "y": values, "name": label, "mode": "lines", "line": line, "hovertemplate": hover}
        figure.add_scatter(**trace, showlegend=column == 2, row=1, col=column)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="layer", type="category", autorange="reversed", showgrid=False, col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    figure.update_yaxes(range=[0, max(5.0, 1.1 * float(idle.max()))], col=3)
    return legend_below(figure)
