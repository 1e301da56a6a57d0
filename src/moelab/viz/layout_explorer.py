"""The layout explorer: degrees as controls; below them the verdict and three figures, which follow every change.

It shows nothing of its own: legality is :func:`moelab.layout.check`, memory :func:`moelab.memory.estimate`, and the
figures are those of this package. ipywidgets loads slowly, so it is imported when an explorer is made.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from moelab.experiment import Experiment
from moelab.hardware import gpu_of
from moelab.layout import LayoutCheck, check, facts_of
from moelab.layout.rules import candidates
from moelab.memory import estimate
from moelab.viz.memory_bars import memory_bars
from moelab.viz.mesh import mesh_map
from moelab.viz.pipeline import pipeline_schedule
from moelab.viz.widget import as_output, in_rows, make_panel, refusal

if TYPE_CHECKING:
    import ipywidgets

CHOSEN = (
    "nodes",
    "pp",
    "pp_schedule",
    "local_batch",
    "microbatch",
    "dp_replicate",
    "cp",
    "tp",
    "ep",
    "precision",
    "ep_backend",
    "activation_checkpoint",
)
"""Fields of an experiment that have a control; ``dp_shard`` takes the ranks that are left."""
FIGURES = ("memory", "pipeline", "mesh")
_POWERS = tuple(2**exponent for exponent in range(9))


class LayoutExplorer:
    """Controls and figures that belong together; show ``panel``.

    Every control is a menu or a field, so the keyboard reaches all of them. A menu says which of its values would be
    illegal while the other controls stay as they are; they can be chosen, and the verdict then says why.

    Args:
        experiment: where the controls begin; what has no control stays as it is here.
        rank: global rank whose groups the mesh shows first.

    Attributes:
        experiment: as the controls stand now.
        controls: by name of the field; ``rank`` too.
        verdict: text below the controls.
        figures: by name of ``FIGURES``; empty where there is nothing to draw.
        panel: everything, to be displayed.
    """

    def __init__(self, experiment: Experiment, *, rank: int = 0) -> None:
        import ipywidgets as widgets

        self.experiment = experiment.model_copy(update={"dp_shard": -1})
        self.controls: dict[str, ipywidgets.Widget] = {
            field: widgets.Dropdown(description=field, style=_STYLE, layout=_WIDTH) for field in CHOSEN
        }
        self.controls["rank"] = widgets.BoundedIntText(
            value=rank, max=experiment.world_size - 1, description="show rank", style=_STYLE, layout=_WIDTH
        )
        self.verdict = widgets.HTML()
        self.figures = {name: widgets.Output() for name in FIGURES}
        self.panel = make_panel([in_rows(self.controls.values()), self.verdict, *self.figures.values()])
        self._refresh()
        self._listen()

    def _listen(self) -> None:
        for control in self.controls.values():
            control.observe(self._changed, names="value")

    def _changed(self, _change: object) -> None:
        """Read all controls, then renew all that depends on them without hearing of it."""
        for control in self.controls.values():
            control.unobserve(self._changed, names="value")
        chosen = {field: self.controls[field].value for field in CHOSEN}
        self.experiment = self.experiment.model_copy(update=chosen)
        self._refresh()
        self._listen()

    def _refresh(self) -> None:
        for field in CHOSEN:
            self._renew_menu(field)
        rank = self.controls["rank"]
        rank.max = self.experiment.world_size - 1  # lowers the value too where it is above
        found = check(self.experiment)
        self.verdict.value = _verdict(self.experiment, found)
        for name, figure in _figures(self.experiment, found, rank.value).items():
            self.figures[name].outputs = () if figure is None else (as_output(figure),)

    def _renew_menu(self, field: str) -> None:
        """Say of every value whether it is legal beside the other controls."""
        current = getattr(self.experiment, field)
        options = tuple((_label(self.experiment, field, value), value) for value in _values(self.experiment, field))
        control = self.controls[field]
        if control.options != options:
            control.options = options
        control.value = current


_STYLE = {"description_width": "154px"}
_WIDTH = {"width": "318px"}


def _values(experiment: Experiment, field: str) -> list[Any]:
    """Values of a menu, the current one among them."""
    if field in ("nodes", "local_batch"):
        found: Iterable[Any] = _POWERS
    else:
        found = candidates(facts_of(experiment), field)
    values = list(dict.fromkeys([*found, getattr(experiment, field)]))
    return sorted(values) if isinstance(values[0], int) else values


def _label(experiment: Experiment, field: str, value: Any) -> str:
    legal = check(experiment.model_copy(update={field: value})).legal
    return str(value) if legal else f"{value} (illegal)"


def _verdict(experiment: Experiment, found: LayoutCheck) -> str:
    """The verdict as HTML; screen readers are told when it changes."""
    if not found.legal:
        return refusal("Illegal", found.reasons)
    layout = found.layout
    assert layout is not None
    degrees = " · ".join(f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    said = (
        f"{experiment.world_size} GPUs: {degrees} · ep {layout.ep}, experts sharded by {layout.efsdp}; "
        f"{experiment.local_batch * layout.data_parallel:,} sequences a step"
    )
    return f"<div role='status'><b>Legal</b>: {said}<ul>{notes}</ul></div>"


def _figures(experiment: Experiment, found: LayoutCheck, rank: int) -> dict[str, go.Figure | None]:
    """Figures of a legal layout; of an illegal one the mesh, as far as there is one."""
    layout = found.layout
    if layout is None:
        return dict.fromkeys(FIGURES)
    drawn: dict[str, go.Figure | None] = dict.fromkeys(FIGURES)
    drawn["mesh"] = mesh_map(layout, gpus_per_node=experiment.gpus_per_node, rank=rank)
    if found.legal:
        gpu = gpu_of(experiment.hardware)
        drawn["memory"] = memory_bars(estimate(experiment, layout, gpu), layout, gpu)
        drawn["pipeline"] = pipeline_schedule(layout, experiment.pp_schedule)
    return drawn
