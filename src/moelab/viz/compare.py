"""Figures that only runs side by side have: the difference of single runs, tokens per second, how long steps take.

Their loss, and a difference that is paired by seed, are drawn as those of a study: :mod:`moelab.viz.study`.

Sides keep the order in which they were given, the first being what the others are held against. Each has a colour, a
dash and a marker: those of its arm where they are free, else the next of the theme. ``styles`` are of
:func:`side_styles`; a ``note`` states a condition in the title, such as "emulated kernels".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from moelab.judge.compare_runs import Difference, difference_curve, machine_differences, speed_differences
from moelab.judge.side import Side, median, speed_ratio
from moelab.viz.draw import draw_band, draw_mean, list_rows, over_steps, panels
from moelab.viz.study import thinning_words
from moelab.viz.theme import INK, STUDY_ARMS, ArmStyle, arm_styles, new_figure, plot_text, span, wrap

_LOOKS = arm_styles([*STUDY_ARMS, "~1", "~2", "~3", "~4", "~5"])
"""Every look of the theme with the arm that it belongs to; ``~n`` are those of no arm."""
LABEL_CHARACTERS = 24
ROW_PX = 46


def side_styles(sides: Sequence[Side]) -> dict[str, ArmStyle]:
    """A look for each side by its label; after the eleventh they begin again."""
    # An arm of the study keeps its look in every figure, so it is served before sides of no arm.
    free = dict(_LOOKS)
    own = {side.label: free.pop(side.arm) for side in sides if side.arm in free}
    others = [side.label for side in sides if side.label not in own]
    rest = [*free.values(), *_LOOKS.values()]
    looks = own | {label: rest[number % len(rest)] for number, label in enumerate(others)}
    return {side.label: replace(looks[side.label], label=plot_text(side.label)) for side in sides}


def compared_difference(
    sides: Sequence[Side], differences: Sequence[Difference], styles: Mapping[str, ArmStyle], *, note: str = ""
) -> go.Figure:
    """Loss of sides without seeds in common minus that of the first, each with a band over steps."""
    figure = new_figure(
        _difference_finding(differences),
        subtitle="Trailing mean over as many steps as the final difference. Band: one standard deviation over those "
        "steps to either side, which is not an interval over seeds."
        + thinning_words(max(len(one.steps) for one in differences)),
        note=note,
        height=480,
    )
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    by_label = {side.label: side for side in sides}
    for one in differences:
        band = difference_curve(by_label[one.reference], by_label[one.label], one)
        draw_band(figure, band["low"], band["high"], styles[one.label])
        draw_mean(figure, band["mean"], styles[one.label], hovertemplate="%{y:+.4f}")
    first = wrap(f"loss − loss of {sides[0].label}", 40)
    over_steps(figure, f"{first}<br>(nats per token)", tickformat=".6~f")
    return figure.update_layout(showlegend=True)


def gradient_norms(sides: Sequence[Side], styles: Mapping[str, ArmStyle], *, note: str = "") -> go.Figure:
    """Gradient norm of every side over its steps, and the learning rate where it was logged; means over runs."""
    columns = {"grad_norm": "gradient norm", "lr": "learning rate"}
    means = {side.label: side.training_means for side in sides}
    ends = [side.final_grad_norm for side in sides if math.isfinite(side.final_grad_norm)]
    peaks = {side.label: side.grad_norm_peak for side in sides if math.isfinite(side.grad_norm_peak)}
    worst = max(peaks, key=peaks.__getitem__, default="")
    spike = f"; it rises to {peaks[worst]:.3g} times its median in {worst}" if peaks.get(worst, 0.0) > 2 else ""
    shown = {name: title for name, title in columns.items() if any(mean[name].notna().any() for mean in means.values())}
    figure = panels(
        f"The gradient norm ends at {span(ends, '.3g')}{spike}",
        list(shown.values()),
        subtitle="Mean over the runs of each side; the end is the median of the last tenth of the logged steps.",
        note=note,
        height=400,
        spacing=0.1,
    )
    for column, name in enumerate(shown, start=1):
        axes = {"xaxis": f"x{column}", "yaxis": f"y{column}", "showlegend": column == 1, "hovertemplate": "%{y:.4g}"}
        for label, mean in means.items():
            draw_mean(figure, mean[name].dropna(), styles[label], **axes)
        # A learning rate that only warms up would else look as if it began at zero.
        figure.update_yaxes(rangemode="tozero", col=column)
    figure.update_yaxes(**_log_axis(np.concatenate([mean["grad_norm"] for mean in means.values()])), col=1)
    return figure.update_xaxes(title_text="step").update_layout(hovermode="x unified")


def compared_throughput(sides: Sequence[Side], styles: Mapping[str, ArmStyle], *, note: str = "") -> go.Figure:
    """Tokens per second per GPU of every side: median, the middle half of the steps, and nine of ten of them."""
    steps = ", ".join(str(len(side.tps)) for side in sides)
    warmup = max(side.warmup_steps for side in sides)
    subtitle = (
        f"Line: median step; box: the middle half of the steps; whiskers: 5 to 95 %. After {warmup} warm-up steps; "
        f"n = {steps} steps. The spread is over steps, not over seeds."
    )
    figure = new_figure(_throughput_finding(sides), subtitle=subtitle, note=note, height=190 + ROW_PX * len(sides))
    for side in sides:
        style = styles[side.label]
        low, first, middle, third, high = side.tps_percentiles
        figure.add_box(
            y=[wrap(side.label, LABEL_CHARACTERS)],
            # Given as five numbers: plotly's own quartiles would need all steps in the figure, thousands a side.
            **{"lowerfence": [low], "q1": [first], "median": [middle], "q3": [third], "upperfence": [high]},
            orientation="h",
            fillcolor=style.fill(0.35),
            line={"color": style.color, "width": 2},
            name=style.label,
        )
    figure.update_xaxes(rangemode="tozero", tickformat=",")
    return list_rows(figure, "tokens/s per GPU (per process on a CPU)", showlegend=False)


def compared_step_time(sides: Sequence[Side], styles: Mapping[str, ArmStyle], *, note: str = "") -> go.Figure:
    """How step times are distributed: the share of steps that took at most so long."""
    worst = max(sides, key=lambda side: side.step_time_tail)
    figure = new_figure(
        f"{worst.label}: one step in twenty takes {worst.step_time_tail:.2f} times the median or more",
        subtitle="From one logged step to the next, by the log's clock: validations and checkpoints count too. "
        "A steep line is a steady run; a tail to the right is steps that waited.",
        note=note,
    )
    for side in sides:
        style, (percent, seconds) = styles[side.label], side.step_time_shares
        # Steps, not slopes: between two times of steps no further step ended.
        line = {**style.line(), "shape": "hv"}
        reading = "%{y:.0f} % of steps within %{x:.3g} s"
        figure.add_scatter(x=seconds, y=percent, mode="lines", line=line, name=style.label, hovertemplate=reading)
    everything = np.concatenate([side.step_time_s for side in sides])
    # On a linear axis one checkpoint of a minute would squeeze all steps into a line.
    if everything.max() > 10 * everything.min():
        figure.update_xaxes(**_log_axis(everything))
    figure.update_xaxes(title_text="seconds a step")
    figure.update_yaxes(title_text="steps done within (%)", range=[0, 102])
    return figure.update_layout(showlegend=True)


def _log_axis(values: ArrayLike) -> dict[str, Any]:
    """A logarithmic axis whose ticks are written in full: Plotly writes 0.5 as a small 5 below a 1."""
    positive = np.asarray(values, dtype=float)
    positive = positive[positive > 0]
    if not positive.size:
        return {"type": "log"}
    low, high = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
    ticks = [digit * 10.0**power for power in range(low, high + 1) for digit in ((1, 2, 5) if high - low < 4 else (1,))]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def loss_finding(sides: Sequence[Side], differences: Sequence[Difference]) -> str:
    """What a figure of the sides' loss shows: a divergence, how a lone run goes, or the largest difference."""
    known = [one for one in differences if math.isfinite(one.nats)]
    if diverged := [side.unfinished for side in sides if side.diverged]:
        return diverged[0] + (f", and {len(diverged) - 1} more diverged" if len(diverged) > 1 else "")
    if len(sides) == 1:
        rows = sides[0].table.dropna(subset=["loss"])
        return f"{sides[0].label} goes from {rows['loss'].iloc[0]:.3f} to {rows['loss'].iloc[-1]:.3f} nats per token"
    if not known:
        return "The runs have no step in common at the end"
    far = max(known, key=lambda one: abs(one.nats))
    steps = f"over steps {far.first_step:,} to {far.steps[-1]:,}"
    where = f"{abs(far.nats):.4f} nats {'below' if far.nats < 0 else 'above'} {far.reference}"
    return f"{far.label} is {where} {steps}" + (", further than any other" if len(known) > 1 else "")


def _difference_finding(differences: Sequence[Difference]) -> str:
    known = [one for one in differences if math.isfinite(one.nats)]
    if not known:
        return differences[0].sentence()
    far = max(known, key=lambda one: abs(one.nats))
    ends = f"{far.label} {far.verb} {far.nats:+.4f} nats from {far.reference}"
    if far.unfinished:
        return f"{ends} at step {far.steps[-1]:,}; {far.unfinished}"
    return f"{ends}; one run each cannot say whether a change of seed does as much"


def _throughput_finding(sides: Sequence[Side]) -> str:
    middles = {side.label: median(side.tps) for side in sides}
    if len(sides) == 1:
        return f"{sides[0].label}: {middles[sides[0].label]:,.0f} tokens/s"
    slow, *_, fast = sorted(sides, key=lambda side: middles[side.label])  # two, also where all are as fast
    if speed_differences(fast, slow):
        both = f"{middles[fast.label]:,.0f} and {middles[slow.label]:,.0f} tokens/s"
        why = "not on like machines" if machine_differences(fast, slow) else "not of the same work"
        return f"{fast.label} and {slow.label} logged {both}, {why}: no gain is claimed"
    ratio = f"{speed_ratio(fast, slow):.3g}"
    known = all("gpu" in side.settings.values for side in sides)
    if not known or any(side.emulated or side.on_cpu for side in sides):  # it may say nothing of a GPU
        return f"{fast.label} logged {ratio} times the tokens/s per GPU of {slow.label}"
    return f"{fast.label} trains {ratio} times as fast as {slow.label}"
