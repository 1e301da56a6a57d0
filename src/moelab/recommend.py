"""The layouts of a search by predicted speed, and what each setting of the best is worth.

Every legal layout is given a cheap estimate: the time of a micro-batch in all layers, which layouts share by the
thousand, over what the schedule's bubble leaves. The first :data:`CONSIDERED` of them that fit are projected, and the
fastest come first; the answer says which place of the estimate's order the fastest had, and how many were left out. A
setting's worth is what is lost when it alone goes back to the experiment's value, other settings as in the best layout;
the settings that a search does not vary are tried one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.hardware import Cluster, cluster_of, gpu_of, has_native_mxfp8
from moelab.layout import SCHEDULES, Facts, bubble_fraction, resolve
from moelab.plan import headroom_gib
from moelab.plan_text import CANDIDATE_HEADER, aligned, candidate_row, search_text
from moelab.projection.calibration import CALIBRATION
from moelab.projection.job import Job, job_of
from moelab.projection.project import Projection, can_be_placed, project, require_figures
from moelab.projection.step import work_s
from moelab.search import VARIED, Candidate, Found, search

CONSIDERED = 200
ORDER = "layers of a micro-batch for each token, over 1 - bubble; then as a search without speed"
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
        found: the search, in the order of the estimate.
        ranked: the fastest layouts first; empty where none fits.
        worth: of settings of the best; negative where another value is faster.
        considered: layouts that were projected.
        place: of the fastest in the order of the estimate, from 1; 0 where none fits.
    """

    found: Found
    ranked: tuple[Ranked, ...]
    worth: tuple[Worth, ...]
    considered: int
    place: int

    @property
    def left_out(self) -> int:
        """Legal layouts of which neither memory nor speed was predicted."""
        return self.found.legal - self.found.too_large - len(self.found.candidates)

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
        counts = {"considered": self.considered, "place": self.place, "left_out": self.left_out}
        return {**self.found.to_json(), "order": [ORDER], "candidates": rows, "worth": worth, **counts}


def recommend(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    global_batch: int | None = None,
) -> Recommendation:
    """Search layouts and order them by predicted speed.

    Args:
        experiment: model, batch and all that is not varied; its nodes and GPUs of a node.
        cluster: another one than the experiment's ``hardware``, such as one with another network.
        fixed: fields that keep the experiment's value.
        limit: layouts to return.
        global_batch: see :func:`moelab.search.search`.

    Raises:
        BadInput: if the hardware lacks a figure that a projection needs, or a fixed field is not varied.
    """
    cluster = cluster or cluster_of(experiment.hardware)
    require_figures(experiment, cluster)
    wide = search(
        experiment,
        fixed=fixed,
        limit=max(limit, CONSIDERED),
        headroom_gib=headroom_gib(experiment),
        global_batch=global_batch,
        before=_estimate(cluster),
    )
    projected = [(place, one) for place, one in enumerate(_projected(wide.candidates, cluster), 1)]
    projected.sort(key=lambda pair: -pair[1].projection.tps)
    ranked = tuple(one for _, one in projected[:limit])
    return Recommendation(
        found=wide,
        ranked=ranked,
        worth=tuple(worth_of(ranked[0].projection, experiment)) if ranked else (),
        considered=len(projected),
        place=projected[0][0] if projected else 0,
    )


def _projected(candidates: Iterable[Candidate], cluster: Cluster) -> Iterator[Ranked]:
    for one in candidates:
        try:
            yield Ranked(candidate=one, projection=project(one.experiment, cluster))
        except Refused:  # legal, but no layout that can be projected
            continue


def _estimate(cluster: Cluster) -> Callable[[Facts], float]:
    """Seconds of a layout for each token, without its collectives at the end and its optimizer."""
    known: dict[tuple[int, ...], float] = {}

    def seconds(facts: Facts) -> float:
        size = facts.microbatch if facts.pp > 1 else facts.local_batch
        key = (size, facts.tp, facts.cp, facts.ep, facts.microbatches > 1)
        if key not in known:
            known[key] = work_s(_job(facts, cluster), CALIBRATION) if can_be_placed(facts.experiment, facts.ep) else inf
        bubble = bubble_fraction(SCHEDULES[facts.pp_schedule], pp=facts.pp, microbatches=facts.microbatches)
        return known[key] * facts.tp * facts.cp / size / (1 - bubble)

    return seconds


def _job(facts: Facts, cluster: Cluster) -> Job:
    experiment = facts.experiment.model_copy(update={"local_batch": facts.local_batch})
    return job_of(experiment, resolve(facts), cluster.node)


def worth_of(best: Projection, given: Experiment) -> Iterator[Worth]:
    """What single settings of the best layout are worth, the most valuable first."""
    found = []
    for field, other in _alternatives(best.experiment, given):
        try:
            experiment = Experiment.model_validate({**best.experiment.model_dump(), field: other})
            changed = project(experiment, best.cluster)
        except (Refused, BadInput):
            continue
        value = getattr(best.experiment, field)
        found.append(Worth(field=field, value=value, other=other, tps=best.tps, other_tps=changed.tps))
    return iter(sorted(found, key=lambda one: -abs(one.percent)))


def _alternatives(best: Experiment, given: Experiment) -> Iterator[tuple[str, Any]]:
    for field in (name for name in VARIED if name not in ("dp_shard", "dp_replicate")):
        if getattr(given, field) != getattr(best, field):
            yield field, getattr(given, field)
    native = has_native_mxfp8(gpu_of(best.hardware).capability)
    unknown = "fp8" if native else "mxfp8"  # no rate of it was ever measured there
    for field, values in TRIED.items():
        yield from ((field, value) for value in values if value not in (getattr(best, field), unknown))


def recommendation_text(found: Recommendation) -> str:
    """The layouts as a table, fastest first, and what settings of the fastest are worth."""
    if not found.ranked:
        return search_text(found.found)
    table = [(*candidate_row(one.candidate), _marked(one.projection)) for one in found.ranked]
    counts = f"{found.found.examined:,} layouts judged, {found.found.legal:,} legal; {found.considered:,} projected"
    counts += f", of which the fastest was number {found.place:,} by a first estimate"
    counts += f"; {found.left_out:,} that the estimate has behind them are left out" if found.left_out else ""
    label = "Speeds are derived; * extrapolated: `moelab project` says what was not seen"
    lines = [*aligned([(*CANDIDATE_HEADER, "tokens/s/GPU"), *table]), "", f"{counts}.", f"{label}."]
    lines += ["", "the fastest with one setting changed:"] if found.worth else []
    return "\n".join(lines + [f"  {_changed(one)}" for one in found.worth])


def _marked(projection: Projection) -> str:
    return f"{projection.tps:,.0f}" + ("*" if projection.outside else "")


def _changed(worth: Worth) -> str:
    value, other = (getattr(one, "value", one) for one in (worth.value, worth.other))
    change = 100 * (worth.other_tps / worth.tps - 1)
    return f"{worth.field} {other} instead of {value}: {change:+.1f} %"
