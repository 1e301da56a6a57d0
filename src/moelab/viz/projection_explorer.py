"""The projection explorer: cluster, layout and arm as controls; below them the speed, its cost and the step's parts.

It shows nothing of its own: the numbers are those of :func:`moelab.projection.project.project` and
:func:`moelab.projection.cost.cost`. ipywidgets loads slowly, so it is imported when one is made.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from moelab.analysis.arms import arm_label
from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.projection.cost import DEEPSEEK_TOKENS, Cost, cost
from moelab.projection.project import Projection, project
from moelab.sweep import GPUS_OF_NODE, PROFILES, cluster_like, on
from moelab.viz.step_breakdown import step_breakdown
from moelab.viz.widget import as_output, in_rows, make_panel, refusal

if TYPE_CHECKING:
    import ipywidgets

FIELDS: Mapping[str, tuple[Any, ...]] = {
    "precision": ("bf16", "mxfp8"),
    "ep_backend": ("standard", "deepep"),
    "routing": ("round_robin", "random_balanced", "learned"),
    "pp": (1, 2, 4, 8, 16),
    "tp": (1, 2, 4, 8),
    "ep": (8, 16, 32, 64),
    "local_batch": (8, 16, 32, 64, 128, 256),
    "activation_checkpoint": ("selective", "full+dispatch", "full"),
}
"""Fields of the experiment that have a menu; 8 bits are FP8 before SM100."""
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ProjectionExplorer:
    """Controls, numbers and a figure that belong together; show ``panel``.

    What is illegal or does not fit is said in words, with the plan's reasons.

    Args:
        experiment: where the controls begin; what has no control stays as it is here.
        gpu: kind of GPU at the beginning.
        network_gb_s: of each GPU's card at the beginning.
        price_per_gpu_hour: at the beginning.
        watts_per_gpu: at the beginning.

    Attributes:
        controls: by name.
        summary: the numbers as HTML.
        figure: the step by part; empty where a choice cannot be.
        panel: everything, to be displayed.
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
        import ipywidgets as widgets

        self.experiment = experiment
        starts = {name: getattr(experiment, name) for name in FIELDS} | {"gpu": gpu, "gpus": experiment.world_size}
        menus = {"gpu": tuple(PROFILES), "gpus": GPUS, **FIELDS}
        self.controls: dict[str, ipywidgets.Widget] = {
            name: widgets.Dropdown(
                description=name, options=_options(values, starts[name]), value=starts[name], **_LOOK
            )
            for name, values in menus.items()
        }
        for name, value, most, step in (
            ("network_gb_s", network_gb_s, 400.0, 10.0),
            ("price_per_gpu_hour", price_per_gpu_hour, 20.0, 0.1),
            ("watts_per_gpu", watts_per_gpu, 5000.0, 50.0),
        ):
            lowest = 10.0 if name == "network_gb_s" else step
            slider = {"min": lowest, "max": most, "step": step, "value": value, "readout_format": ".4g"}
            self.controls[name] = widgets.FloatSlider(description=name, continuous_update=False, **slider, **_LOOK)
        self.summary = widgets.HTML()
        self.figure = widgets.Output()
        self.panel = make_panel([in_rows(self.controls.values()), self.summary, self.figure])
        for control in self.controls.values():
            control.observe(self._refresh, names="value")
        self._refresh()

    def projected(self) -> Projection:
        """The projection of the controls as they stand.

        Raises:
            Refused: if the layout is illegal or does not fit.
        """
        chosen = {name: control.value for name, control in self.controls.items()}
        node = min(chosen["gpus"], GPUS_OF_NODE[chosen["gpu"]])
        sizes = {"nodes": chosen["gpus"] // node, "gpus_per_node": node, "dp_shard": -1}
        fields = {name: chosen[name] for name in FIELDS}
        cluster = cluster_like(chosen["gpu"], nodes=sizes["nodes"], network_gb_s=chosen["network_gb_s"])
        return project(on(chosen["gpu"], self.experiment, **fields, **sizes), cluster)

    def _refresh(self, _change: object = None) -> None:
        try:
            found = self.projected()
        except (BadInput, Refused) as error:
            self.summary.value = refusal("Cannot be", str(error).splitlines())
            self.figure.outputs = ()
            return
        price, watts = (self.controls[name].value for name in ("price_per_gpu_hour", "watts_per_gpu"))
        self.summary.value = _summary(found, cost(found, price_per_gpu_hour=price, watts_per_gpu=watts))
        self.figure.outputs = (as_output(explorer_figure(found)),)


_LOOK = {"style": {"description_width": "154px"}, "layout": {"width": "344px"}}


def explorer_figure(found: Projection) -> go.Figure:
    """The figure of the explorer: its static twin."""
    one = found.experiment
    where = f"{found.job.gpus} × {found.cluster.node.gpu.name}, PP {one.pp}, TP {one.tp}, EP {one.ep}"
    words = f"{one.model}, {arm_label(one.arm)}, {where}; {found.label}."
    return step_breakdown(found.breakdown_s, words=words)


def _options(values: tuple[Any, ...], start: Any) -> list[Any]:
    options = list(dict.fromkeys([*values, start]))
    return options if isinstance(start, str) else sorted(options)


def _summary(found: Projection, spent: Cost) -> str:
    """The numbers in HTML; screen readers are told when they change."""
    low, high = found.interval
    outside = "".join(f"<br>Outside of what the model was held against: {html.escape(one)}" for one in found.outside)
    return (
        f"<div role='status'><b>{found.tps:,.0f} tokens/s per GPU</b> ({low:,.0f} to {high:,.0f} with 90 % confidence; "
        f"{found.label}), {found.step_time_s:,.2f} s a step, MFU {found.mfu['causal']:.1%} (causal count)."
        f"<br>{DEEPSEEK_TOKENS / 1e12:g} T tokens: {spent.gpu_hours / 1e6:,.2f} M GPU-hours, {spent.days:,.0f} days, "
        f"price {spent.price / 1e6:,.1f} M, {spent.energy_mwh / 1e3:,.1f} GWh.{outside}</div>"
    )
