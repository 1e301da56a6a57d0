"""The layouts of a search by predicted speed, and what each setting of the best is worth.

The search's own order says which layouts are worth a prediction: the first :data:`CONSIDERED` of it that fit are
projected, and the fastest come first. A setting's worth is what is lost when it alone goes back to the experiment's
value, other settings as in the best layout; the settings that a search does not vary are tried one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.hardware import gpu_of
from moelab.plan import headroom_gib
from moelab.plan_text import CANDIDATE_HEADER, aligned, candidate_row, search_text
from moelab.projection.project import Projection, project
from moelab.search import VARIED, Candidate, Found, search

CONSIDERED = 300
TRIED: Mapping[str, tuple[Any, ...]] = {
    "precision": ("bf16", "mxfp8", "fp8"),
    "quantize": ("experts", "experts+linears"),
    "ep_backend": ("standard", "deepep"),
    "dispatch_precision": ("bf16", "mxfp8", "fp8"),
    "wgrad": ("mxfp8", "bf16"),
    "activation_checkpoint": ("none", "selective", "full+dispatch", "full"),
    "compile": ("none", "model+loss"),
}
"""Settings beside the layout, with the values that are tried."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A layout with its projection."""

    candidate: Candidate
    projection: Projection


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A setting of the best layout: ``value`` instead of ``other``, and tokens/s/GPU with each."""

    field: str
    value: Any
    other: Any
    tps: float
    other_tps: float

    @property
    def percent(self) -> float:
        """How much faster the best is than with the other value."""
        return 100 * (self.tps / self.other_tps - 1)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A search by predicted speed.

    Attributes:
        found: the search in its own order.
        ranked: the fastest layouts first; empty where none fits.
        worth: of settings of the best; negative where another value is faster.
        considered: layouts that were projected.
    """

    found: Found
    ranked: tuple[Ranked, ...]
    worth: tuple[Worth, ...]
    considered: int

    def to_json(self) -> dict[str, Any]:
        """The search as one JSON object, candidates by speed."""
        rows = [
            {**one.candidate.to_json(), "tps": one.projection.tps, "interval": list(one.projection.interval)}
            | {"step_time_s": one.projection.step_time_s, "label": one.projection.label}
            for one in self.ranked
        ]
        worth = [
            {"field": one.field, "value": one.value, "other": one.other, "percent": one.percent} for one in self.worth
        ]
        return {**self.found.to_json(), "candidates": rows, "worth": worth, "considered": self.considered}


def recommend(
    experiment: Experiment, *, fixed: Collection[str] = (), limit: int = 10, global_batch: int | None = None
) -> Recommendation:
    """Search layouts and order them by predicted speed.

    Args:
        experiment: model, cluster, batch and all that is not varied.
        fixed: fields that keep the experiment's value.
        limit: layouts to return.
        global_batch: see :func:`moelab.search.search`.

    Raises:
        BadInput: if the hardware lacks a figure that a projection needs, or a fixed field is not varied.
    """
    headroom = headroom_gib(experiment)
    wide = search(
        experiment, fixed=fixed, limit=max(limit, CONSIDERED), headroom_gib=headroom, global_batch=global_batch
    )
    projected = [Ranked(candidate=one, projection=project(one.experiment)) for one in wide.candidates]
    projected.sort(key=lambda one: -one.projection.tps)
    return Recommendation(
        found=wide,
        ranked=tuple(projected[:limit]),
        worth=tuple(worth_of(projected[0].projection, experiment)) if projected else (),
        considered=len(projected),
    )


def worth_of(best: Projection, given: Experiment) -> Iterator[Worth]:
    """What single settings of the best layout are worth, the most valuable first."""
    found = []
    for field, other in _alternatives(best.experiment, given):
        try:
            changed = project(Experiment.model_validate({**best.experiment.model_dump(), field: other}))
        except (Refused, BadInput):
            continue
        value = getattr(best.experiment, field)
        found.append(Worth(field=field, value=value, other=other, tps=best.tps, other_tps=changed.tps))
    return iter(sorted(found, key=lambda one: -abs(one.percent)))


def _alternatives(best: Experiment, given: Experiment) -> Iterator[tuple[str, Any]]:
    for field in (name for name in VARIED if name not in ("dp_shard", "dp_replicate")):
        if getattr(given, field) != getattr(best, field):
            yield field, getattr(given, field)
    unknown = "fp8" if gpu_of(best.hardware).capability >= 10 else "mxfp8"  # no rate of it was ever measured there
    for field, values in TRIED.items():
        yield from ((field, value) for value in values if value not in (getattr(best, field), unknown))


def recommendation_text(found: Recommendation) -> str:
    """The layouts as a table, fastest first, and what settings of the fastest are worth."""
    if not found.ranked:
        return search_text(found.found)
    table = [(*candidate_row(one.candidate), _marked(one.projection)) for one in found.ranked]
    counts = f"{found.found.examined:,} layouts judged, {found.found.legal:,} legal, {found.considered:,} projected"
    label = "speeds are derived; * extrapolated: `moelab project` says what was not seen"
    lines = [*aligned([(*CANDIDATE_HEADER, "tokens/s/GPU"), *table]), "", f"{counts}; {label}."]
    lines += ["", "the fastest with one setting changed:"] if found.worth else []
    return "\n".join(lines + [f"  {_changed(one)}" for one in found.worth])


def _marked(projection: Projection) -> str:
    return f"{projection.tps:,.0f}" + ("*" if projection.outside else "")


def _changed(worth: Worth) -> str:
    value, other = (getattr(one, "value", one) for one in (worth.value, worth.other))
    change = 100 * (worth.other_tps / worth.tps - 1)
    return f"{worth.field} {other} instead of {value}: {change:+.1f} %"
