"""Figures of a report's sides: gradient norms; of runs side by side their difference, tokens per second, step times.

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

from moelab.judge.comparison import Difference, difference_curve
from moelab.judge.side import Side
from moelab.viz.draw import draw_band, draw_mean, list_rows, over_steps, panels
from moelab.viz.study import thinning_words
from moelab.viz.theme import INK, STUDY_ARMS, ArmStyle, arm_styles, new_figure, plot_text, wrap

_LOOKS = arm_styles([*STUDY_ARMS, "~1", "~2", "~3", "~4", "~5"])
"""Every look of the theme with the arm that it belongs to; ``~n`` are those of no arm."""
LABEL_CHARACTERS = 24
ROW_PX = 46


def side_styles(sides: Sequence[Side]) -> dict[str, ArmStyle]:
    """A look for each side by its name; after the eleventh they begin again."""
    # An arm of the study keeps its look in every figure, so it is served before sides of no arm.
    free = dict(_LOOKS)
    own = {side.name: free.pop(side.name) for side in sides if side.name in free}
    others = [side.name for side in sides if side.name not in own]
    rest = [*free.values(), *_LOOKS.values()]
    looks = own | {name: rest[number % len(rest)] for number, name in enumerate(others)}
    return {side.name: replace(looks[side.name], label=plot_text(side.label)) for side in sides}


def compared_difference(
    sides: Sequence[Side], differences: Sequence[Difference], styles: Mapping[str, ArmStyle], *, note: str = ""
) -> go.Figure:
    """Loss of single runs minus that of the first, each with a band over steps."""
    figure = new_figure(
        f"Loss minus that of {sides[0].label}",
        subtitle="Trailing mean over as many steps as the final difference. Band: one standard deviation over those "
        "steps to either side, which is not an interval over seeds."
        + thinning_words(max(len(one.steps) for one in differences)),
        note=note,
        height=480,
    )
    figure.add_hline(y=0.0, line={"color": INK, "width": 1})
    by_label = {side.label: side for side in sides}
    for one in differences:
        side = by_label[one.label]
        band = difference_curve(by_label[one.reference], side, one)
        draw_band(figure, band["low"], band["high"], styles[side.name])
        draw_mean(figure, band["mean"], styles[side.name], hovertemplate="%{y:+.4f}")
    first = wrap(f"loss − loss of {sides[0].label}", 40)
    over_steps(figure, f"{first}<br>(nats per token)", tickformat=".6~f")
    return figure.update_layout(showlegend=True)


def gradient_norms(sides: Sequence[Side], styles: Mapping[str, ArmStyle], *, note: str = "") -> go.Figure:
    """Gradient norm of every side over its steps, and the learning rate where it was logged; means over runs."""
    columns = {"grad_norm": "gradient norm", "lr": "learning rate"}
    means = {side.name: side.training_means for side in sides}
    shown = {name: title for name, title in columns.items() if any(mean[name].notna().any() for mean in means.values())}
    figure = panels(
        " and ".join(shown.values()).capitalize(),
        list(shown.values()),
        subtitle="Mean over the runs of each side.",
        note=note,
        height=400,
        spacing=0.1,
    )
    for column, name in enumerate(shown, start=1):
        axes = {"xaxis": f"x{column}", "yaxis": f"y{column}", "showlegend": column == 1, "hovertemplate": "%{y:.4g}"}
        for side, mean in means.items():
            draw_mean(figure, mean[name].dropna(), styles[side], **axes)
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
    figure = new_figure(
        "Tokens per second of each step", subtitle=subtitle, note=note, height=190 + ROW_PX * len(sides)
    )
    for side in sides:
        style = styles[side.name]
        low, first, middle, third, high = np.percentile(side.tps, [5, 25, 50, 75, 95])
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
    figure = new_figure(
        "Share of the steps that finish within a time",
        subtitle="From one logged step to the next, by the log's clock: validations and checkpoints count too. "
        "A steep line is a steady run; a tail to the right is steps that waited.",
        note=note,
    )
    shares = np.linspace(0.0, 1.0, 101)
    for side in sides:
        style = styles[side.name]
        # Of the definitions the one that gives times which steps took, not values between two of them.
        seconds = np.quantile(side.step_time_s, shares, method="inverted_cdf")
        # Steps, not slopes: between two times of steps no further step ended.
        line = {**style.line(), "shape": "hv"}
        reading = "%{y:.0f} % of steps within %{x:.3g} s"
        figure.add_scatter(x=seconds, y=100 * shares, mode="lines", line=line, name=style.label, hovertemplate=reading)
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
