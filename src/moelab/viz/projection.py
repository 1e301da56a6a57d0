"""The projection drawn: the parts of a step, arms and their gains, the way to another stack, an explorer."""

from __future__ import annotations

import html
from collections.abc import Mapping
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
from moelab.planning.trust import Estimate
from moelab.viz.draw import (
    Look,
    bar_rows,
)
from moelab.viz.table import TableView, as_table
from moelab.viz.theme import INK, NARROW, WIDE, wrap
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
    """Parts of one step, the longest first, and the whole.

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
    figure = bar_rows(
        f"Where the {_seconds(parts['whole step'])} s of a step go",
        list(parts),
        {"": (list(parts.values()), ("#56B4E9", ""))},
        "seconds of a step",
        unit=":.2f s",
        subtitle=f"{words} The busiest pipeline rank, the longest part first.{quoted}",
        note=NOTE,
        row_px=24,
        ends=[f"{_seconds(value)} s{spread.get(name, '')}" for name, value in parts.items()],
        limit=measured_s,
        width=width,
    )
    figure.update_xaxes(range=[0, 1.2 * parts["whole step"]]).update_layout(showlegend=False)
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
    known = published_s or {}
    published = {arm: f", published {known[arm]:,.0f} s" if arm in known else "" for arm in totals}
    looks: list[Look] = [(color, "") for color in _GROUP_COLORS]
    figure = bar_rows(
        "A step's seconds by arm",
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
