"""The projection drawn: the parts of a step, arms and their gains, the way to another stack, an explorer."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from moelab.experiment import Experiment
from moelab.judge.arms import arm_label, contrast
from moelab.layout import check
from moelab.model.hugging_face import IN_MENUS, read_model
from moelab.planning.memory import estimate
from moelab.planning.project import (
    DEEPSEEK_TOKENS,
    GROUPS,
    KINDS,
    Cost,
    Projection,
    cluster_like,
    cost,
    group_s,
    on,
    project,
    step_s,
)
from moelab.planning.tables import Change, TwoByTwo
from moelab.planning.trust import Estimate
from moelab.viz.draw import (
    diamonds,
    draw_arm_axis,
    draw_bars,
    error_bars,
    inside,
    interval_marks,
    list_rows,
    panels,
    running_bars,
    write_beside,
)
from moelab.viz.table import TableView, as_table
from moelab.viz.theme import INK, MUTED, NARROW, OTHER, WIDE, arm_styles, new_figure, wrap
from moelab.viz.widget import Explorer, labelled_control, menu, menus

_GROUP_COLORS = ("#0072B2", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#BBBBBB")
_DARK = ("#0072B2", "#D55E00")
"""Of the colours, those on which white is legible."""
DERIVED_COLOR = "#0072B2"
LEVEL = "90 %"
BASELINE = "bf16_standard"
NOTE = "derived: the step-time model, not a profile"


def step_breakdown(
    parts_s: Mapping[str, float],
    *,
    ranges: Mapping[str, Estimate] | None = None,
    measured_s: float | None = None,
    words: str = "",
    width: int = WIDE,
) -> go.Figure:
    """One step from zero to its whole, the longest part first.

    Args:
        parts_s: seconds by part.
        ranges: of the same parts where other constants would do as well; they stand beside the seconds.
        measured_s: of the whole step as it was published; drawn as a line.
        words: of what step, for the subtitle.
        width: of the figure, px.
    """
    # A part that the layout does not have, such as a bubble without a pipeline, is no row.
    parts = sorted(((name, value) for name, value in parts_s.items() if value), key=lambda part: -part[1])
    total_s = step_s(parts_s)
    largest, seconds = parts[0]
    quoted = f" Dashed: the published step, {measured_s:,.0f} s (quoted)." if measured_s else ""
    share = f"{ranges[largest].low:,.0f} to {ranges[largest].high:,.0f} s" if ranges else f"{seconds / total_s:.0%}"
    figure = new_figure(
        f"The longest part of the step: {largest}, {_seconds(seconds)} of {_seconds(total_s)} s ({share})",
        subtitle=words
        if width == NARROW
        else f"{words} The busiest pipeline rank; every bar begins where the one above ends.{quoted}",
        note=NOTE,
        height=150 + 24 * len(parts),
        width=width,
    )
    names, values = [*(name for name, _ in parts), "whole step"], [*(value for _, value in parts), total_s]
    bars = running_bars(names, values, ["#56B4E9"] * len(parts) + [OTHER], hover="%{y}: %{x:.2f} s<extra></extra>")
    # Seconds stand left of bars that begin beyond the middle, and right of the others.
    left = [start > 0.5 * total_s for start in bars.base]
    ends = [start if before else start + value for start, value, before in zip(bars.base, values, left, strict=True)]
    spread = {name: f" ({_seconds(one.low)} to {_seconds(one.high)})" for name, one in (ranges or {}).items()}
    figure.add_trace(bars)
    figure.add_scatter(
        x=ends,
        y=names,
        mode="text",
        text=[f" {_seconds(one)} s{spread.get(name, '')} " for name, one in zip(names, values, strict=True)],
        textposition=["middle left" if before else "middle right" for before in left],
        textfont_size=12,
        hoverinfo="skip",
    )
    if measured_s:
        figure.add_vline(x=measured_s, line={"color": INK, "dash": "dash", "width": 1.5})
    figure.update_xaxes(range=[0, 1.16 * max(total_s, measured_s or 0)])
    return list_rows(figure, "seconds of a step", showlegend=False, bargap=0.25)


def _seconds(value: float) -> str:
    """Seconds with two or three digits."""
    return f"{value:,.0f}" if value >= 19.5 else f"{value:,.1f}" if value >= 0.95 else f"{value:,.2f}"


def arm_breakdowns(
    parts_s: Mapping[str, Mapping[str, float]], *, published_s: Mapping[str, float] | None = None, words: str = ""
) -> go.Figure:
    """Steps of several arms as stacked bars of seconds, published whole steps as diamonds; ``words``: of what steps."""
    labels = {arm: wrap(arm_label(arm), 18) for arm in parts_s}
    totals = {arm: step_s(parts) for arm, parts in parts_s.items()}
    of_arms = [group_s(parts) for parts in parts_s.values()]
    groups = {name: [one[name] for one in of_arms] for name in GROUPS}
    quoted = " Diamonds: published (quoted)." if published_s else ""
    first, fastest = next(iter(totals)), min(totals, key=totals.__getitem__)
    finding = f"{arm_label(first)}: {totals[first]:,.0f} s a step"
    if fastest != first:  # what sets it apart from the first, in the whole seconds that the bars show
        saved = {name: round(values[0]) - round(values[list(totals).index(fastest)]) for name, values in groups.items()}
        most = max(saved, key=saved.__getitem__)
        finding = (
            f"{arm_label(fastest)} saves {round(totals[first]) - round(totals[fastest]):,} of {totals[first]:,.0f} s, "
            f"{saved[most]:,} of them in {most}"
        )
    figure = new_figure(
        finding,
        subtitle=f"{words} The busiest pipeline rank, parts that add up to the step.{quoted}",
        note=NOTE,
        height=310 + 46 * len(parts_s),
        width=WIDE,
    )
    longest = max(totals.values())
    for (name, values), color in zip(groups.items(), _GROUP_COLORS, strict=True):
        marker = {"color": color, "line": {"color": "white", "width": 1.5}}
        seconds = [f"{value:,.0f}" if value > 0.03 * longest else "" for value in values]
        written = inside(seconds, color="white" if color in _DARK else INK, size=13)
        draw_bars(figure, [*labels.values()], values, name, "%{x:.1f} s", marker=marker, **written)
    published = published_s or {}
    for arm, total in totals.items():
        known = f", published {published[arm]:,.0f} s" if arm in published else ""
        at = max(total, published.get(arm, 0.0))
        write_beside(figure, at, labels[arm], f"<b>{total:,.0f} s</b>{known}", px=12)
    if published:
        look = {"name": "published (quoted)", "hovertemplate": "published: %{x:,.1f} s<extra></extra>"}
        figure.add_trace(diamonds(list(published.values()), [labels[arm] for arm in published], **look))
    figure.update_xaxes(range=[0, 1.4 * longest])
    return list_rows(figure, "seconds of a step", barmode="relative", bargap=0.35, legend_y=-0.22)


def arms_beside_projection(
    known: Mapping[str, float], projected: Mapping[str, Estimate], *, known_words: str, words: str, fitted: bool = False
) -> go.Figure:
    """Throughput of arms as it is known, and as it is projected.

    Args:
        known: tokens/s per GPU by arm; an arm that was never measured is not in it.
        projected: estimates by arm.
        known_words: what ``known`` is, such as "published (quoted)".
        words: of which runs, for the subtitle.
        fitted: whether the constants were found on ``known``, which is no test of them then; an estimate's ends are
            those of the range over all such constants, else of its interval.
    """
    arms = list(dict.fromkeys([*projected, *known]))
    figure = new_figure(
        _worst_error(known, projected, fitted=fitted),
        subtitle=f"{words} {f'Circles: {known_words}. ' if known else ''}Squares: projected, with the "
        f"{'range' if fitted else f'{LEVEL} interval'}.",
        note=f"{known_words} against derived" if known else "derived: the step-time model",
    )
    # In the order of `projected`, which is that of the squares below.
    spans = [(one.low, one.value, one.high) for one in projected.values()]
    for name, tps, aside, options in (
        (known_words, known, -0.12, {"marker": {"size": 12, "color": "white", "line": {"color": INK, "width": 2}}}),
        (
            "projected",
            {arm: one.value for arm, one in projected.items()},
            0.12,
            {
                "error_y": error_bars(spans, thickness=1.5, width=5),
                "marker": {"size": 10, "color": DERIVED_COLOR, "symbol": "square"},
            },
        ),
    ):
        figure.add_scatter(
            x=[arms.index(arm) + aside for arm in tps],
            y=list(tps.values()),
            mode="markers+text",
            name=name,
            text=[f"{one:,.0f}" for one in tps.values()],
            textposition=f"middle {'left' if aside < 0 else 'right'}",
            hovertemplate="%{y:,.0f} tokens/s<extra></extra>",
            **options,
        )
    draw_arm_axis(figure, arms)
    # Ends of the intervals count too: plotly does not stretch a given range for error bars.
    highest = max([*known.values(), *(one.high for one in projected.values())])
    figure.update_yaxes(title_text="tokens/s per GPU", range=[0, 1.1 * highest], tickformat=",")
    return figure.update_layout(legend_y=-0.24)


def _worst_error(known: Mapping[str, float], projected: Mapping[str, Estimate], *, fitted: bool) -> str:
    """The largest error where something is known and tests the constants, and what is said of arms that are not."""
    bounds = {arm: f"{one.value:,.0f} ({one.low:,.0f} to {one.high:,.0f})" for arm, one in projected.items()}
    errors = {arm: projected[arm].error(tps) for arm, tps in known.items() if arm in projected}
    if not errors:
        best = max(projected, key=lambda arm: projected[arm].value)
        return f"{arm_label(best)} is projected to make most: {bounds[best]} tokens/s"
    worst = max(errors, key=lambda arm: abs(errors[arm]))
    error = f"The projection is {errors[worst]:+.1%} off at worst ({arm_label(worst)})"
    return "; ".join(
        [
            "The known arms are met, as the constants were found on them" if fitted else error,
            *(f"{arm_label(arm)} is not identified: {bounds[arm]}" for arm in projected if arm not in known),
        ]
    )


def gains_and_interaction(projected: TwoByTwo) -> go.Figure:
    """Projected gains over BF16 with the standard all-to-all, and how far they are from multiplying."""
    arms = list(arm_styles(projected.gains))
    percents = [_percent(projected.gains[arm]) for arm in arms]
    low, gain, high = _percent(projected.gains["mxfp8_standard"])
    left = projected.interaction
    composes = left.low <= 0 <= left.high
    figure = panels(
        f"By all constants that meet the published steps {contrast('mxfp8_standard', BASELINE)[0]} alone gains "
        f"{gain:.1f} % ({low:.1f} to {high:.1f}) and "
        f"{'no interaction is shown' if composes else 'the two gains do not simply multiply'}; those steps identify "
        "neither",
        ("", ""),
        subtitle=f"Left: gain over {arm_label(BASELINE)}. Right: gain of both over the product of the gains of each. "
        "Medians and ranges over all constants that meet the three published steps.",
        note="derived: MXFP8 + standard all-to-all was never published",
        height=330,
        spacing=0.17,
        widths=(0.66, 0.34),
    )
    _draw_intervals(figure, [wrap(arm_label(arm), 20) for arm in arms], percents, row=1, col=1)
    _draw_intervals(figure, ["interaction"], [(100 * left.low, 100 * left.value, 100 * left.high)], row=1, col=2)
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5}, row=1, col=2)
    figure.update_xaxes(title_text="gain (%)", rangemode="tozero", col=1)
    return figure.update_xaxes(title_text="interaction (%)", col=2)


def deepep_gain_by_routing(forced: TwoByTwo, random: TwoByTwo, own: Estimate) -> go.Figure:
    """DeepEP's gain over BF16 as it was published under forced balance, and as constants put it under random routing.

    Both two-by-twos are by all constants that meet the published steps; ``own`` is percent by the model's own.
    """
    rows = {
        "forced balance:<br>as published": _percent(forced.gains["bf16_deepep"]),
        "random routing: constants<br>that meet the published steps": _percent(random.gains["bf16_deepep"]),
        "random routing: the model's own<br>constants, 90 % interval": (own.low, own.value, own.high),
    }
    low, high = (pick(ends for row in list(rows.values())[1:] for ends in row) for pick in (min, max))
    figure = new_figure(
        f"Under random routing DeepEP gains anything from {low:+.0f} to {high:+.0f} %"
        f"{': even the sign is open' if low < 0 < high else ''}",
        subtitle="BF16, 671B on 256 × B200, over the standard all-to-all. Published: one run of each arm under forced "
        "balance, where every token goes to one rank. The model's own constants serve all public steps at once, under "
        "today's software; the others meet the three published steps with that of March 2026.",
        note=NOTE,
        height=300,
    )
    _draw_intervals(figure, list(rows), list(rows.values()))
    for name, (_, value, end) in rows.items():
        write_beside(figure, end, name, f"{value:+.0f} %", px=8, size=13)
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5})
    return figure.update_xaxes(title_text="gain of DeepEP (%)", range=[1.1 * min(low, 0) - 5, 1.15 * high + 5])


def _draw_intervals(
    figure: go.Figure, rows: Sequence[str], ends: Sequence[tuple[float, float, float]], **place: object
) -> None:
    """Values with their low and high ends, one below the other."""
    look = {"marker": {"size": 10, "color": DERIVED_COLOR, "symbol": "square"}}
    hover = "%{x:.2f} %<extra></extra>"
    marks = interval_marks(rows, ends, along="x", color=DERIVED_COLOR, hovertemplate=hover, **look)
    list_rows(figure.add_trace(marks, **place), showlegend=False)


def _percent(ratio: Estimate) -> tuple[float, float, float]:
    """Low end, value and high end of a gain in percent."""
    return 100 * (ratio.low - 1), 100 * (ratio.value - 1), 100 * (ratio.high - 1)


def arm_table(
    projected: Mapping[str, Projection], gains: Mapping[str, Estimate], costs: Mapping[str, Cost], words: str
) -> TableView:
    """Speed of each arm with its 90 % interval, its gain, and what a whole training takes.

    Gains are percent over the first arm, as of :func:`moelab.planning.project.gain_over`; ``words``: what is projected.
    """
    rows = [
        {
            "arm": arm_label(arm),
            "tokens/s per GPU": round(one.tps),
            "90 % interval": f"{one.interval[0]:,.0f} to {one.interval[1]:,.0f}",
            f"gain over {arm_label(next(iter(projected)))}": _interval(gains[arm]) if arm in gains else "–",
            "seconds a step": one.step_time_s,
            "MFU (%)": 100 * one.mfu["computed"],
            "M GPU-hours": costs[arm].gpu_hours / 1e6,
            "M USD": costs[arm].price / 1e6,
            "GWh": costs[arm].energy_mwh / 1e3,
            "how known": one.label,
        }
        for arm, one in projected.items()
    ]
    decimals = dict.fromkeys(("seconds a step", "MFU (%)", "M GPU-hours", "M USD", "GWh"), 1)
    return as_table(pd.DataFrame(rows), words, decimals=decimals)


# The way to another stack

UP, DOWN = "#009E73", "#D55E00"


def waterfall_bars(changes: Sequence[Change], *, quoted_first: float, quoted_last: float) -> go.Figure:
    """What each change of :func:`moelab.planning.tables.waterfall` adds, between published tokens/s per GPU."""
    before = [0.0, *(change.tps for change in changes[:-1])]  # the first change is whole
    steps = [change.tps - start for change, start in zip(changes, before, strict=True)]
    most = max(range(1, len(steps)), key=steps.__getitem__)
    figure = new_figure(
        f"The largest of {len(steps) - 1} steps from {changes[0].tps:,.0f} to {changes[-1].tps:,.0f}: "
        f"{changes[most].name} ({steps[most]:+,.0f})",
        subtitle=f"256 × B200, MXFP8, tokens/s per GPU, one change after another; another order would share the total "
        f"out differently. Diamonds: quoted, {quoted_first:,.0f} (PyTorch and Nebius) and {quoted_last:,.0f} "
        "(Megatron-Bridge 26.04.01).",
        note="derived between two quoted ends",
        height=150 + 44 * (len(changes) + 1),
    )
    rows = [*(wrap(change.name, 34) for change in changes), "Megatron-Bridge, whole"]
    colors = [OTHER, *(UP if step >= 0 else DOWN for step in steps[1:]), OTHER]
    shapes = ["", *("" if step >= 0 else "/" for step in steps[1:]), ""]
    heights = [*steps, changes[-1].tps]
    figure.add_trace(running_bars(rows, heights, colors, shapes, hover="%{y}: %{x:+,.0f}<extra></extra>"))
    quoted = {rows[0]: quoted_first, rows[-1]: quoted_last}  # a label stands beyond its row's
    for row, start, height in zip(rows, [*before, 0.0], heights, strict=True):
        end = max(start, start + height, quoted.get(row, 0.0))
        label = f"{height:,.0f} (quoted {quoted[row]:,.0f})" if row in quoted else f"{height:+,.0f}"
        write_beside(figure, end, row, label, px=8, size=12)
    hover = "quoted: %{x:,.0f}<extra></extra>"
    figure.add_trace(diamonds(list(quoted.values()), list(quoted), hovertemplate=hover))
    figure.update_xaxes(range=[0, 1.5 * max(quoted_last, *(c.tps for c in changes))]).update_yaxes(tickfont_size=12)
    return list_rows(figure, "tokens/s per GPU", showlegend=False, bargap=0.3)


def _interval(gain: Estimate) -> str:
    """A gain in percent with its interval."""
    return f"{gain.value:+.0f} % ({gain.low:+.0f} to {gain.high:+.0f})"


# Live

_GPUS_OF_NODE = {"H100": 8, "H200": 8, "B200": 8, "GB200": 64}
"""GPUs of a node that a layout of powers of two uses."""
_MENUS: Mapping[str, tuple[str, Mapping[Any, str]]] = {
    "gpu": ("GPU", {gpu: gpu for gpu in KINDS}),
    "gpus": ("number of GPUs", {count: f"{count:,}" for count in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)}),
    "precision": ("experts in", {"bf16": "BF16", "mxfp8": "MXFP8 or FP8"}),
    "ep_backend": ("dispatch by", {"standard": "standard all-to-all", "deepep": "DeepEP"}),
    "routing": (
        "routing",
        {"round_robin": "forced round-robin", "random_balanced": "balanced random", "learned": "learned"},
    ),
    "pp": ("pipeline ranks, PP", {degree: str(degree) for degree in (1, 2, 4, 8, 16)}),
    "tp": ("tensor ranks, TP", {degree: str(degree) for degree in (1, 2, 4, 8)}),
    "ep": ("expert ranks, EP", {degree: str(degree) for degree in (8, 16, 32, 64)}),
    "local_batch": ("sequences a DP rank", {count: str(count) for count in (4, 8, 16, 32, 64, 128, 256)}),
    "activation_checkpoint": (
        "recomputes",
        {"none": "nothing", "selective": "cheap parts", "full+dispatch": "all but dispatch", "full": "everything"},
    ),
}
"""Label and words of the values of each menu but the models'; 8 bits are FP8 before SM100."""
_SLIDERS: Mapping[str, tuple[str, float, float]] = {
    "network_gb_s": ("network (GB/s)", 10.0, 400.0),
    "price_per_gpu_hour": ("USD a GPU-hour", 0.1, 20.0),
    "watts_per_gpu": ("W a GPU", 50.0, 5000.0),
}


class ProjectionExplorer(Explorer):
    """Model, cluster, layout and arm as controls; beside them the step's parts, and above speed and cost.

    They begin at the arguments (US dollars); what has no control stays as it is in ``experiment``.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        gpu: str = "B200",
        network_gb_s: float = 50.0,
        price_per_gpu_hour: float = 3.0,
        watts_per_gpu: float = 1400.0,
    ) -> None:
        self.experiment = experiment
        starts = experiment.model_dump(mode="json") | {"gpu": gpu, "gpus": experiment.world_size}
        starts["precision"] = "bf16" if starts["precision"] == "bf16" else "mxfp8"
        model = menu("model", [experiment.model_label, *IN_MENUS], experiment.model_label)
        controls = {"model": model, **menus(_MENUS, starts)}
        rates = (network_gb_s, price_per_gpu_hour, watts_per_gpu)
        for (name, (label, least, most)), value in zip(_SLIDERS.items(), rates, strict=True):
            scale: dict[str, Any] = {"value": value, "min": least, "max": most, "step": least, "readout_format": ".4g"}
            controls[name] = labelled_control("FloatSlider", label, **scale)
        super().__init__(controls, ["step"])

    def projected(self) -> Projection:
        """The projection of the controls as they stand.

        Raises:
            Refused: if the layout is illegal or does not fit.
        """
        chosen = self.chosen
        # Fewer GPUs than a node has are a part of one node.
        node = min(chosen["gpus"], _GPUS_OF_NODE[chosen["gpu"]])
        fields = {name: chosen[name] for name in _MENUS if name in Experiment.model_fields}
        fields |= {"nodes": chosen["gpus"] // node, "gpus_per_node": node, "dp_shard": -1}
        if chosen["model"] in IN_MENUS:
            model = read_model(chosen["model"])
            fields |= {"model": model.model, "shape": model.shape}
        network_gb_s = round(chosen["network_gb_s"], 3)  # the browser's slider gives 49.99999999999999 back for 50
        cluster = cluster_like(chosen["gpu"], nodes=fields["nodes"], network_gb_s=network_gb_s)
        return project(on(chosen["gpu"], self.experiment, **fields), cluster)

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """Whether it fits, speed and cost in words, and the step by part."""
        shown = self.projected()
        rates = {name: self.controls[name].value for name in ("price_per_gpu_hour", "watts_per_gpu")}
        spent, (low, high) = cost(shown, **rates), shown.interval
        layout = check(shown.experiment).layout
        assert layout is not None  # else it would not have been projected
        memory = estimate(shown.experiment, layout, shown.cluster.node.gpu)
        room = "" if memory.capacity_gib is None else f" of {memory.capacity_gib:.0f}"
        outside = [f"<br>Extrapolated: {html.escape(one)}" for one in shown.outside]
        words = (
            f"<b>Legal · fits</b> ({memory.worst_gib:.0f}{room} GiB) · "
            f"<b>{shown.tps:,.0f} tokens/s per GPU</b> ({low:,.0f} to {high:,.0f} with 90 % confidence; {shown.label}) "
            f"· {shown.step_time_s:,.2f} s a step · MFU {shown.mfu['computed']:.1%}<br>"
            f"{DEEPSEEK_TOKENS / 1e12:g} T tokens: {spent.gpu_hours / 1e6:,.2f} M GPU-hours · {spent.days:,.0f} days · "
            f"{spent.price / 1e6:,.1f} M USD · {spent.energy_mwh / 1e3:,.1f} GWh{''.join(outside)}"
        )
        one = shown.experiment
        where = f"{shown.job.gpus} × {shown.cluster.node.gpu.name}, PP {one.pp}, TP {one.tp}, EP {one.ep}"
        model = self.chosen["model"]
        figure = step_breakdown(
            shown.breakdown_s, words=f"{model}, {arm_label(one.arm)}, {where}; {shown.label}.", width=NARROW
        )
        return words, {"step": figure.update_layout(height=500)}
