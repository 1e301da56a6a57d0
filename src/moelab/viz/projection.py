"""The projection drawn: the parts of a step, arms and their gains, the way to another stack, an explorer."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from moelab.experiment import Experiment
from moelab.judge.arms import arm_label
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
    Look,
    bar_rows,
    interval_rows,
    running_rows,
)
from moelab.viz.table import TableView, as_table
from moelab.viz.theme import INK, NARROW, OTHER, WIDE, in_order, wrap
from moelab.viz.widget import Explorer, Menu, Slider

_GROUP_COLORS = ("#0072B2", "#56B4E9", "#CC79A7", "#F0E442", "#D55E00", "#E69F00", "#BBBBBB")
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
    parts = dict(sorted(((name, value) for name, value in parts_s.items() if value), key=lambda part: -part[1]))
    parts["whole step"] = step_s(parts_s)
    spread = {name: f" ({_seconds(one.low)} to {_seconds(one.high)})" for name, one in (ranges or {}).items()}
    quoted = f" Dashed: the published step, {measured_s:,.0f} s (quoted)." if measured_s else ""
    figure = running_rows(
        f"Where the {_seconds(parts['whole step'])} s of a step go",
        list(parts),
        list(parts.values()),
        "seconds of a step",
        labels=[f"{_seconds(value)} s{spread.get(name, '')}" for name, value in parts.items()],
        looks=[("#56B4E9", "")] * (len(parts) - 1) + [(OTHER, "")],
        unit=":.2f s",
        subtitle=f"{words} The busiest pipeline rank; every bar begins where the one above ends.{quoted}",
        note=NOTE,
        width=width,
    )
    if measured_s:
        figure.add_vline(x=measured_s, line={"color": INK, "dash": "dash", "width": 1.5})
    return figure


def _seconds(value: float) -> str:
    """Seconds with two or three digits."""
    return f"{value:,.0f}" if value >= 19.5 else f"{value:,.1f}" if value >= 0.95 else f"{value:,.2f}"


def arm_breakdowns(
    parts_s: Mapping[str, Mapping[str, float]], *, published_s: Mapping[str, float] | None = None, words: str = ""
) -> go.Figure:
    """Steps of several arms as stacked bars of seconds, published whole steps as diamonds; ``words``: of what steps."""
    totals = {arm: step_s(parts) for arm, parts in parts_s.items()}
    of_arms = {arm: group_s(parts) for arm, parts in parts_s.items()}
    first, fastest = next(iter(totals)), min(totals, key=totals.__getitem__)
    title = f"{arm_label(first)}: {totals[first]:,.0f} s a step"
    if fastest != first:  # what sets it apart from the first, in the whole seconds that the bars show
        saved = {name: round(of_arms[first][name]) - round(of_arms[fastest][name]) for name in GROUPS}
        most = max(saved, key=saved.__getitem__)
        title = (
            f"{arm_label(fastest)} saves {round(totals[first]) - round(totals[fastest]):,} of {totals[first]:,.0f} s, "
            f"{saved[most]:,} of them in {most}"
        )
    known = published_s or {}
    published = {arm: f", published {known[arm]:,.0f} s" if arm in known else "" for arm in totals}
    looks: list[Look] = [(color, "") for color in _GROUP_COLORS]
    figure = bar_rows(
        title,
        [wrap(arm_label(arm), 18) for arm in parts_s],
        {name: ([one[name] for one in of_arms.values()], look) for name, look in zip(GROUPS, looks, strict=True)},
        "seconds of a step",
        unit=":.1f s",
        numbers=",.0f",
        subtitle=f"{words} The busiest pipeline rank, parts that add up to the step."
        f"{' Diamonds: published (quoted).' * bool(known)}",
        note=NOTE,
        row_px=60,
        ends=[f"<b>{total:,.0f} s</b>{published[arm]}" for arm, total in totals.items()],
        diamonds=("published (quoted)", [known.get(arm) for arm in totals]) if known else None,
        width=WIDE,
    )
    return figure.update_xaxes(range=[0, 1.4 * max(totals.values())])


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
    found = f" The constants were found on the arms that are {known_words}, which is no test of them." if fitted else ""
    ends = [
        f"<b>{one.value:,.0f}</b> ({one.low:,.0f} to {one.high:,.0f})" if (one := projected.get(arm)) else ""
        for arm in arms
    ]
    values = [projected[arm].value if arm in projected else 0.0 for arm in arms]
    figure = bar_rows(
        "Projected throughput by arm",
        [wrap(arm_label(arm), 20) for arm in arms],
        {"projected": (values, ("#a9cfe8", ""))},
        "tokens/s per GPU",
        unit=":,.0f tokens/s",
        subtitle=f"{words} In brackets: {'the range over all constants' if fitted else 'the 90 % interval'}.{found}",
        note=f"{known_words} against derived" if known else "derived: the step-time model",
        row_px=56,
        ends=ends,
        diamonds=(known_words, [known.get(arm) for arm in arms]) if known else None,
    )
    return figure.update_xaxes(range=[0, 1.4 * max([*known.values(), *values])])


def gains_and_interaction(projected: TwoByTwo) -> go.Figure:
    """Projected gains over BF16 with the standard all-to-all, and how far they are from multiplying."""
    gains = {wrap(arm_label(arm), 20): _percent(projected.gains[arm]) for arm in in_order(projected.gains)}
    left = projected.interaction
    return interval_rows(
        "Gains that meet the published steps, and what is left of their product",
        {**gains, "gain of both over<br>the product of each": (100 * left.low, 100 * left.value, 100 * left.high)},
        "gain over BF16 + standard all-to-all (%)",
        subtitle="Medians and ranges over all constants that meet the three published steps; these steps identify "
        "neither the gain of MXFP8 alone nor the interaction.",
        note="derived: MXFP8 + standard all-to-all was never published",
    )


def deepep_gain_by_routing(forced: TwoByTwo, random: TwoByTwo, own: Estimate) -> go.Figure:
    """DeepEP's gain over BF16 as it was published under forced balance, and as constants put it under random routing.

    Both two-by-twos are by all constants that meet the published steps; ``own`` is percent by the model's own.
    """
    open_ends = (_percent(random.gains["bf16_deepep"]), (own.low, own.value, own.high))
    low, high = min(open_ends[0][0], own.low), max(open_ends[0][2], own.high)
    return interval_rows(
        f"Under random routing DeepEP gains anything from {low:+.0f} to {high:+.0f} %",
        {
            "forced balance:<br>as published": _percent(forced.gains["bf16_deepep"]),
            "random routing: constants<br>that meet the published steps": open_ends[0],
            "random routing: the model's own<br>constants, 90 % interval": open_ends[1],
        },
        "gain of DeepEP (%)",
        subtitle="BF16, 671B on 256 × B200, over the standard all-to-all. Published: one run of each arm under forced "
        "balance, where every token goes to one rank. The model's own constants serve all public steps at once, under "
        "today's software; the others meet the three published steps with that of March 2026.",
        note=NOTE,
    )


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
            f"gain over {arm_label(next(iter(projected)))}": f"{gains[arm].value:+.0f} % ({gains[arm].low:+.0f} to "
            f"{gains[arm].high:+.0f})"
            if arm in gains
            else "–",
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


def waterfall_bars(changes: Sequence[Change], *, quoted_first: float, quoted_last: float) -> go.Figure:
    """What each change of :func:`moelab.planning.tables.waterfall` adds, between published tokens/s per GPU."""
    tps = [change.tps for change in changes]
    steps = [end - start for start, end in pairwise(tps)]
    rows = [*(wrap(change.name, 42) for change in changes), "Megatron-Bridge, whole"]
    figure = running_rows(
        f"From {quoted_first:,.0f} to {quoted_last:,.0f} tokens/s per GPU, one change after another",
        rows,
        [tps[0], *steps, tps[-1]],
        "tokens/s per GPU",
        labels=[
            f"{tps[0]:,.0f} (quoted {quoted_first:,.0f})",
            *(f"{step:+,.0f}" for step in steps),
            f"{tps[-1]:,.0f} (quoted {quoted_last:,.0f})",
        ],
        looks=[(OTHER, ""), *(("#009E73", "") if step >= 0 else ("#D55E00", "/") for step in steps), (OTHER, "")],
        unit=":+,.0f",
        points={rows[0]: quoted_first, rows[-1]: quoted_last},
        subtitle="256 × B200, MXFP8; another order would share the total out differently. Diamonds: quoted (PyTorch "
        "and Nebius; Megatron-Bridge 26.04.01).",
        note="derived between two quoted ends",
        row_px=44,
    )
    return figure.update_xaxes(range=[0, 1.6 * max(quoted_last, *tps)]).update_yaxes(tickfont_size=12)


# The explorer

_GPUS_OF_NODE = {"H100": 8, "H200": 8, "B200": 8, "GB200": 64}
"""GPUs of a node that a layout of powers of two uses."""
CONTROLS: Mapping[str, Menu | Slider] = {
    "model": Menu.of("model", IN_MENUS),
    "gpu": Menu.of("GPU", KINDS),
    "gpus": Menu.of("number of GPUs", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "{:,}".format),
    "precision": Menu("experts in", {"bf16": "BF16", "mxfp8": "MXFP8 or FP8"}),  # 8 bits are FP8 before SM100
    "ep_backend": Menu("dispatch by", {"standard": "standard all-to-all", "deepep": "DeepEP"}),
    "routing": Menu(
        "routing",
        {"round_robin": "forced round-robin", "random_balanced": "balanced random", "learned": "learned"},
    ),
    "pp": Menu.of("pipeline, PP", (1, 2, 4, 8, 16)),
    "tp": Menu.of("tensor, TP", (1, 2, 4, 8)),
    "ep": Menu.of("experts, EP", (8, 16, 32, 64)),
    "local_batch": Menu.of("sequences a rank", (4, 8, 16, 32, 64, 128, 256)),
    "activation_checkpoint": Menu(
        "recomputes",
        {"none": "nothing", "selective": "cheap parts", "full+dispatch": "all but dispatch", "full": "everything"},
    ),
    "network_gb_s": Slider("network (GB/s)", 10.0, 400.0, 10.0),
    "price_per_gpu_hour": Slider("USD a GPU-hour", 0.1, 20.0, 0.1),
    "watts_per_gpu": Slider("W a GPU", 50.0, 5000.0, 50.0),
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
        starts |= {"model": experiment.model_label, "network_gb_s": network_gb_s}
        starts |= {"price_per_gpu_hour": price_per_gpu_hour, "watts_per_gpu": watts_per_gpu}
        starts["precision"] = "bf16" if starts["precision"] == "bf16" else "mxfp8"
        own = Menu.of("model", dict.fromkeys([experiment.model_label, *IN_MENUS]))
        super().__init__(dict(CONTROLS) | {"model": own}, starts)

    def projected(self) -> Projection:
        """The projection of the controls as they stand.

        Raises:
            Refused: if the layout is illegal or does not fit.
        """
        chosen = self.chosen
        # Fewer GPUs than a node has are a part of one node.
        node = min(chosen["gpus"], _GPUS_OF_NODE[chosen["gpu"]])
        fields = {name: value for name, value in chosen.items() if name in Experiment.model_fields and name != "model"}
        fields |= {"nodes": chosen["gpus"] // node, "gpus_per_node": node, "dp_shard": -1}
        if chosen["model"] in IN_MENUS:
            model = read_model(chosen["model"])
            fields |= {"model": model.model, "shape": model.shape}
        network_gb_s = round(chosen["network_gb_s"], 3)  # the browser's slider gives 49.99999999999999 back for 50
        cluster = cluster_like(chosen["gpu"], nodes=fields["nodes"], network_gb_s=network_gb_s)
        return project(on(chosen["gpu"], self.experiment, **fields), cluster)

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        """Whether it fits, speed and cost in words, and the step by part."""
        shown = self.projected()
        spent = cost(shown, **{rate: chosen[rate] for rate in ("price_per_gpu_hour", "watts_per_gpu")})
        one, (low, high), gpu = shown.experiment, shown.interval, shown.cluster.node.gpu
        layout = check(one).layout
        assert layout is not None  # else it would not have been projected
        memory = estimate(one, layout, gpu)
        room = "" if memory.capacity_gib is None else f" of {memory.capacity_gib:.0f}"
        outside = [f"<br>Extrapolated: {html.escape(each)}" for each in shown.outside]
        words = (
            f"<b>Legal · fits</b> ({memory.worst_gib:.0f}{room} GiB) · "
            f"<b>{shown.tps:,.0f} tokens/s per GPU</b> ({low:,.0f} to {high:,.0f} with 90 % confidence; {shown.label}) "
            f"· {shown.step_time_s:,.2f} s a step · MFU {shown.mfu['computed']:.1%}<br>"
            f"{DEEPSEEK_TOKENS / 1e12:g} T tokens: {spent.gpu_hours / 1e6:,.2f} M GPU-hours · {spent.days:,.0f} days · "
            f"{spent.price / 1e6:,.1f} M USD · {spent.energy_mwh / 1e3:,.1f} GWh{''.join(outside)}"
        )
        where = f"{shown.job.gpus} × {gpu.name}, PP {one.pp}, TP {one.tp}, EP {one.ep}"
        of = f"{chosen['model']}, {arm_label(one.arm)}, {where}; {shown.label}."
        return words, step_breakdown(shown.breakdown_s, words=of, width=NARROW)
