"""Every legal layout of a model on a cluster, best first.

There is no prediction of speed in this order. It is what a person would look at first, in this sequence:

1. the layout fits into memory;
2. the pipeline waits little (:func:`~moelab.layout.bubble_fraction`, a property of the schedule), in steps of 5 %;
3. fewest ranks share a sequence (``tp * cp``), because they talk in every layer;
4. expert parallelism spans the fewest nodes;
5. the pipeline waits least, exactly;
6. the most memory is left.

What is still equal is ordered by the degrees themselves, so that two searches agree. Memory is estimated only as far
down the order as the answer reaches: the estimate costs more than all rules together.

:func:`recommend` puts predicted speed before all of these. Every legal layout is given a cheap estimate: the time of a
micro-batch in all layers, which layouts share by the thousand, over what the schedule's bubble leaves. The first
:data:`CONSIDERED` of them that fit are projected, and the fastest come first; the answer says which place of the
estimate's order the fastest had, and how many were left out. A setting's worth is what is lost when it alone goes back
to the experiment's value, other settings as in the best layout; the settings that a search does not vary are tried one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf
from typing import Any, NamedTuple

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.hardware import Cluster, cluster_of, gpu_of, has_native_mxfp8
from moelab.layout import SCHEDULES, Facts, Layout, bubble_fraction, facts_of, faults, resolve
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.plan import headroom_gib, rows
from moelab.projection.calibration import CALIBRATION
from moelab.projection.job import job_of
from moelab.projection.project import Projection, aligned, can_be_placed, extrapolated, project, require_figures
from moelab.projection.step import work_s

VARIED = ("pp", "pp_schedule", "microbatch", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Fields of an experiment that a search chooses unless they are fixed."""
ORDER = (
    "fits",
    "pipeline bubble in steps of 5 %",
    "fewest ranks to a sequence (tp * cp)",
    "fewest nodes to an ep group",
    "exact bubble",
    "most memory left",
)
"""What candidates are ordered by, first things first."""
Headroom = Callable[[Experiment, Layout], float]
"""GiB that an experiment leaves on its fullest GPU; negative if it does not fit."""
Before = Callable[[Facts], float]
"""What a layout is ordered by before everything else, the least first."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One legal layout.

    Attributes:
        experiment: what was searched for, with this layout.
        bubble_fraction: share of a step in which a pipeline rank waits, from the schedule alone.
        ep_nodes: nodes that a group of expert-parallel ranks spans.
        headroom_gib: memory left on the fullest GPU, negative if it does not fit; None if it was not estimated.
        projection: of its speed; None if it was not made.
    """

    experiment: Experiment
    bubble_fraction: float
    ep_nodes: int
    headroom_gib: float | None = None
    projection: Projection | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into memory; None if that was not estimated."""
        return None if self.headroom_gib is None else self.headroom_gib >= 0

    def to_json(self) -> dict[str, Any]:
        """The layout as fields of an experiment, and what it was ordered by."""
        fields = {field: getattr(self.experiment, field) for field in (*VARIED, "local_batch")}
        speed = {}
        if self.projection is not None:
            speed = {"tps": self.projection.tps, "interval": list(self.projection.interval)}
            speed |= {"step_time_s": self.projection.step_time_s, "label": self.projection.label}
        return {
            "set": fields,
            "global_batch": self.experiment.local_batch * self.experiment.dp_replicate * self.experiment.dp_shard,
            "bubble_fraction": round(self.bubble_fraction, 6),
            "ep_nodes": self.ep_nodes,
            "fits": self.fits,
            "headroom_gib": None if self.headroom_gib is None else round(self.headroom_gib, 2),
            **speed,
        }


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came back with.

    Attributes:
        candidates: legal layouts that fit, best first.
        nearest: if none fits, the legal ones that exceed the memory least.
        examined: layouts that were judged.
        legal: how many of them are legal.
        too_large: legal ones, better by all but memory, that do not fit.
    """

    candidates: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    examined: int
    legal: int
    too_large: int

    def to_json(self) -> dict[str, Any]:
        """The layouts as one JSON object."""
        return {
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "nearest": [candidate.to_json() for candidate in self.nearest],
            "examined": self.examined,
            "legal": self.legal,
            "too_large": self.too_large,
            "order": list(ORDER),
        }


def search(
    experiment: Experiment,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    headroom_gib: Headroom | None = None,
    global_batch: int | None = None,
    before: Before = lambda _: 0.0,
) -> Found:
    """The best legal layouts that fit.

    Args:
        experiment: model, cluster, batch, precision and everything else that is not varied.
        fixed: fields of ``VARIED`` that keep the experiment's value.
        limit: how many layouts to return.
        headroom_gib: memory left by an experiment; None orders without memory.
        global_batch: sequences of a step over all ranks, from which each layout's ``local_batch`` follows; None keeps
            the experiment's ``local_batch``.
        before: comes before the stated order; everything is equal in it by default.

    Raises:
        BadInput: if a fixed field is not one that a search varies.

    Example:
        >>> found = search(Experiment(model="debug", gpus_per_node=4), limit=1)
        >>> best = found.candidates[0].experiment
        >>> best.pp, best.dp_replicate, best.dp_shard, best.tp, best.ep
        (1, 1, 4, 1, 1)
    """
    if unknown := sorted(set(fixed) - set(VARIED)):
        raise BadInput(f"{', '.join(unknown)}: a search does not vary this; it varies {', '.join(VARIED)}")
    examined, legal = 0, []
    for facts in layouts(experiment, fixed=fixed, global_batch=global_batch):
        examined += 1
        if next(faults(facts), None) is None:
            legal.append((_Key(before(facts), *_order(facts)), facts))
    legal.sort(key=lambda pair: pair[0])
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for candidate in _by_memory(legal, headroom_gib):
        (too_large if candidate.fits is False else fitting).append(candidate)
        if len(fitting) == limit:
            break
    nearest = [] if fitting else sorted(too_large, key=lambda candidate: -(candidate.headroom_gib or 0.0))[:limit]
    return Found(
        candidates=tuple(fitting),
        nearest=tuple(nearest),
        examined=examined,
        legal=len(legal),
        too_large=len(too_large),
    )


BUBBLE_STEP = 0.05


class _Key(NamedTuple):
    """What layouts are ordered by, memory aside."""

    before: float
    bubble_steps: int
    sequence_ranks: int
    ep_nodes: int
    bubble: float
    tie_break: tuple[int, ...]


def _order(facts: Facts) -> tuple[int, int, int, float, tuple[int, ...]]:
    """The stated order, with a tie-break."""
    x, bubble = facts.experiment, _bubble(facts)
    # Expert-parallel ranks are neighbours in TorchTitan's mesh: they span nodes, or NVLink domains, of so many ranks.
    ep_nodes = max(1, -(-x.ep // nvlink_ranks(x)))
    tie_break = (x.pp, x.tp, x.cp, x.dp_replicate, x.ep, x.microbatch, list(SCHEDULES).index(x.pp_schedule))
    return int(bubble / BUBBLE_STEP), x.tp * x.cp, ep_nodes, bubble, tie_break


def _bubble(facts: Facts) -> float:
    x = facts.experiment
    schedule, turns = SCHEDULES[x.pp_schedule], facts.stages_per_rank
    return bubble_fraction(schedule, pp=x.pp, microbatches=facts.microbatches, turns=turns)


def _by_memory(legal: list[tuple[_Key, Facts]], headroom_gib: Headroom | None) -> Iterator[Candidate]:
    """Candidates in order, with memory estimated group by group: it decides only among those equal in all else."""
    for _key, group in groupby(legal, key=lambda pair: pair[0][:-1]):
        candidates = [
            Candidate(
                experiment=facts.experiment,
                bubble_fraction=key.bubble,
                ep_nodes=key.ep_nodes,
                headroom_gib=None if headroom_gib is None else headroom_gib(facts.experiment, resolve(facts)),
            )
            for key, facts in group
        ]
        yield from sorted(candidates, key=lambda candidate: -(candidate.headroom_gib or 0.0))


def layouts(experiment: Experiment, *, fixed: Collection[str] = (), global_batch: int | None = None) -> Iterator[Facts]:
    """Every layout to judge: the ways to write the ranks as a product of five axes, times the other varied fields.

    Degrees that divide neither ranks, heads nor experts are left out here, because there are many and the rules refuse
    each of them.
    """
    facts, ranks = facts_of(experiment), experiment.world_size

    def degrees(axis: str, left: int) -> Iterator[int]:
        options = (getattr(experiment, axis),) if axis in fixed else divisors(left)
        return (degree for degree in options if left % degree == 0)

    axes = (
        (pp, tp, cp, dp_replicate)
        for pp in degrees("pp", ranks)
        for tp in degrees("tp", ranks // pp)
        for cp in degrees("cp", ranks // (pp * tp))
        for dp_replicate in degrees("dp_replicate", ranks // (pp * tp * cp))
    )
    experts = (experiment.ep,) if "ep" in fixed else divisors(facts.shape.num_experts)
    for pp, tp, cp, dp_replicate in axes:
        dp_shard = ranks // (pp * dp_replicate * cp * tp)
        if "dp_shard" in fixed and experiment.dp_shard not in (-1, dp_shard):
            continue
        local_batch, over = experiment.local_batch, 0
        if global_batch is not None:
            local_batch, over = divmod(global_batch, dp_replicate * dp_shard)
        if over or not local_batch:
            continue
        # Without a pipeline the schedule and the micro-batch mean nothing and stay.
        schedules = (experiment.pp_schedule,) if "pp_schedule" in fixed or pp == 1 else tuple(SCHEDULES)
        microbatches = (experiment.microbatch,) if "microbatch" in fixed or pp == 1 else divisors(local_batch)
        for ep, schedule, microbatch in product(experts, schedules, microbatches):
            yield facts.vary(
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard=dp_shard,
                cp=cp,
                tp=tp,
                ep=ep,
                pp_schedule=schedule,
                local_batch=local_batch,
                microbatch=microbatch,
            )


def search_text(found: Found) -> str:
    """The layouts of a search as a table, with the order that it is in."""
    shown = found.candidates or found.nearest
    counts = f"{found.examined:,} layouts judged, {found.legal:,} legal"
    if not shown:
        return f"{counts}"
    lines = aligned([CANDIDATE_HEADER, *(candidate_row(candidate) for candidate in shown)])
    if found.candidates:
        order = f"Order: {', '.join(ORDER)}. No speed is predicted."
        return "\n".join([*lines, "", f"{counts}, {found.too_large:,} better ones do not fit.", *rows("", [order])])
    return "\n".join([f"{counts}, and none fits. The nearest to fitting:", *lines])


CANDIDATE_HEADER = (
    "pp",
    "schedule",
    "micro",
    "dp_rep",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "local",
    "global",
    "bubble",
    "free GiB",
)


def candidate_row(candidate: Candidate) -> tuple[str, ...]:
    """One layout of a search, as cells."""
    x = candidate.experiment
    pipeline = (x.pp_schedule, str(x.microbatch)) if x.pp > 1 else ("-", "-")
    degrees = (x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.local_batch)
    free = "?" if candidate.headroom_gib is None else f"{candidate.headroom_gib:.1f}"
    total = x.local_batch * x.dp_replicate * x.dp_shard
    return (str(x.pp), *pipeline, *map(str, degrees), str(total), f"{candidate.bubble_fraction:.1%}", free)


CONSIDERED = 200
ORDER_BY_SPEED = "layers of a micro-batch for each token, over 1 - bubble; then as a search without speed"
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
class Worth:
    """A setting of the best layout: ``value`` instead of ``other``, tokens/s/GPU with each, and what that rests on."""

    field: str
    value: Any
    other: Any
    tps: float
    other_tps: float
    rests_on: tuple[str, ...] = ()

    @property
    def percent(self) -> float:
        """How much faster the best is than with the other value."""
        return 100 * (self.tps / self.other_tps - 1)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A search by predicted speed.

    Attributes:
        found: the search, in the order of the estimate.
        ranked: the fastest layouts first, each with its projection; empty where none fits.
        worth: of settings of the best; negative where another value is faster.
        considered: layouts that were projected.
        place: of the fastest in the order of the estimate, from 1; 0 where none fits.
    """

    found: Found
    ranked: tuple[Candidate, ...]
    worth: tuple[Worth, ...]
    considered: int
    place: int

    @property
    def left_out(self) -> int:
        """Legal layouts of which neither memory nor speed was predicted."""
        return self.found.legal - self.found.too_large - len(self.found.candidates)

    def to_json(self) -> dict[str, Any]:
        """The search as one JSON object, candidates by speed."""
        worth = [
            {"field": one.field, "value": one.value, "other": one.other, "percent": one.percent} for one in self.worth
        ]
        counts = {"considered": self.considered, "place": self.place, "left_out": self.left_out}
        return {
            **self.found.to_json(),
            "order": [ORDER_BY_SPEED],
            "candidates": [one.to_json() for one in self.ranked],
            "worth": worth,
            **counts,
        }


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
        global_batch: see :func:`search`.

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
    projected: list[tuple[Projection, Candidate]] = []
    for candidate in wide.candidates:
        with suppress(Refused):  # legal, but no layout that can be projected
            projected.append((project(candidate.experiment, cluster), candidate))
    by_speed = sorted(range(len(projected)), key=lambda place: -projected[place][0].tps)
    ranked = [replace(candidate, projection=one) for one, candidate in (projected[place] for place in by_speed[:limit])]
    return Recommendation(
        found=wide,
        ranked=tuple(ranked),
        worth=tuple(worth_of(projected[by_speed[0]][0], experiment)) if ranked else (),
        considered=len(projected),
        place=by_speed[0] + 1 if ranked else 0,
    )


def _estimate(cluster: Cluster) -> Callable[[Facts], float]:
    """Seconds of a layout for each token, without its collectives at the end and its optimizer."""
    known: dict[tuple[int, ...], float] = {}

    def seconds(facts: Facts) -> float:
        x = facts.experiment
        size = x.microbatch if x.pp > 1 else x.local_batch
        key = (size, x.tp, x.cp, x.ep, facts.microbatches > 1)
        if key not in known:
            placed = can_be_placed(x, x.ep, cluster.node)
            known[key] = work_s(job_of(x, resolve(facts), cluster.node), CALIBRATION) if placed else inf
        return known[key] * x.tp * x.cp / size / (1 - _bubble(facts))

    return seconds


def worth_of(best: Projection, given: Experiment) -> Iterator[Worth]:
    """What single settings of the best layout are worth, the most valuable first."""
    x = best.experiment
    layout = [field for field in VARIED if field not in ("dp_shard", "dp_replicate")]
    others = [(field, getattr(given, field)) for field in layout if getattr(given, field) != getattr(x, field)]
    native = has_native_mxfp8(gpu_of(x.hardware).capability)
    unknown = "fp8" if native else "mxfp8"  # no rate of it was ever measured there
    others += [(name, value) for name, tried in TRIED.items() for value in tried if value != unknown]
    worth = []
    for field, other in others:
        value = getattr(x, field)
        if value == other:
            continue
        with suppress(Refused, BadInput):
            changed = project(Experiment.model_validate({**x.model_dump(), field: other}), best.cluster)
            rests_on = tuple(dict.fromkeys((*best.rests_on, *changed.rests_on)))
            worth.append(
                Worth(field=field, value=value, other=other, tps=best.tps, other_tps=changed.tps, rests_on=rests_on)
            )
    return iter(sorted(worth, key=lambda one: -abs(one.percent)))


def recommendation_text(found: Recommendation) -> str:
    """The layouts as a table, fastest first, and what settings of the fastest are worth."""
    if not found.ranked:
        return search_text(found.found)
    table = [
        (*candidate_row(one), f"{one.projection.tps:,.0f}" + "*" * bool(one.projection.rests_on))
        for one in found.ranked
        if one.projection is not None
    ]
    counts = f"{found.found.examined:,} layouts judged, {found.found.legal:,} legal; {found.considered:,} projected"
    counts += f", of which the fastest was number {found.place:,} by a first estimate"
    counts += f"; {found.left_out:,} that the estimate has behind them are left out" if found.left_out else ""
    best = found.ranked[0].projection
    assert best is not None
    label = "Speeds are derived" + (f"; * {extrapolated(best.rests_on[0])}" if best.rests_on else "")
    lines = [*aligned([(*CANDIDATE_HEADER, "tokens/s/GPU"), *table]), "", f"{counts}.", f"{label}.", *best.notes]
    lines += ["", "the fastest with one setting changed:"] if found.worth else []
    return "\n".join(lines + [f"  {_changed(one)}" for one in found.worth])


def _changed(worth: Worth) -> str:
    value, other = (getattr(one, "value", one) for one in (worth.value, worth.other))
    change = 100 * (worth.other_tps / worth.tps - 1)
    said = f" ({extrapolated(worth.rests_on[0])})" if worth.rests_on else ""
    return f"{worth.field} {other} instead of {value}: {change:+.1f} %{said}"
