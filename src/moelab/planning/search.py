"""Every legal layout of a model on a cluster, and the fastest of them.

:func:`search` orders them without any prediction of speed, by what a person would look at first:

1. the layout fits into memory;
2. the pipeline waits little (:func:`~moelab.layout.bubble_fraction`, a property of the schedule), in steps of 5 %;
3. fewest ranks share a sequence (``tp * cp``), because they talk in every layer;
4. expert parallelism spans the fewest nodes;
5. the pipeline waits least, exactly;
6. the most memory is left.

What is still equal is ordered by the degrees themselves, so that two searches agree. Memory is estimated only as far
down the order as the answer reaches: the estimate costs more than all rules together.

:class:`Space` puts predicted speed before all of these, and keeps the sequences of a step. Every legal layout, with
every checkpointing, is given a cheap estimate: the time of a micro-batch in all layers, which layouts share by the
thousand, over what the schedule's bubble leaves. That is less than the step takes, so those that fit are projected in
its order until no other can be among the best. These are ordered by the low end of their intervals.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from math import inf
from typing import Any, NamedTuple

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import Cluster, cluster_of
from moelab.layout import SCHEDULES, Facts, Layout, bubble_fraction, facts_of, resolve
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.layout.rules import faults_of_degrees, pipeline_faults
from moelab.planning.memory import estimate
from moelab.planning.project import Projection, can_be_placed, on_cluster, project
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.job import job_of
from moelab.planning.time.step import work_s
from moelab.planning.uncertainty import SYSTEM_SPREAD

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
BUBBLE_STEP = 0.05
"""Bubbles in the same step of this width count as equal at first."""
CONSIDERED = 200
"""Layouts that are projected at most."""
MOST_TOKENS_AT_ONCE = 2**17
"""Of a rank: products and exchanges of more tokens are no more efficient, and hold more memory."""
LEAST_WIDTH = 1 + 1.645 * SYSTEM_SPREAD
"""A speed over the low end of its interval is at least this."""
POLICIES = ("none", "selective", "full")
"""Checkpointing that a search chooses from, beside the experiment's own."""
Headroom = Callable[[Experiment, Layout], float]
"""GiB that an experiment leaves on its fullest GPU; negative if it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One legal layout."""

    experiment: Experiment
    bubble_fraction: float
    ep_nodes: int  # nodes that a group of expert-parallel ranks spans
    headroom_gib: float | None = None
    """Memory left on the fullest GPU, negative if it does not fit; None if it was not estimated."""
    projection: Projection | None = None  # of its speed; None if it was not made

    @property
    def fits(self) -> bool | None:
        """Whether it fits into memory; None if that was not estimated."""
        return None if self.headroom_gib is None else self.headroom_gib >= 0

    def to_json(self) -> dict[str, Any]:
        """The layout as fields of an experiment, and what it was ordered by."""
        speed = {}
        if self.projection is not None:
            speed = {"tps": self.projection.tps, "interval": list(self.projection.interval)}
            speed |= {"step_time_s": self.projection.step_time_s, "label": self.projection.label}
        return {
            "set": chosen_fields(self.experiment),
            "global_batch": self.experiment.global_batch,
            "bubble_fraction": round(self.bubble_fraction, 6),
            "ep_nodes": self.ep_nodes,
            "fits": self.fits,
            "headroom_gib": None if self.headroom_gib is None else round(self.headroom_gib, 2),
            **speed,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search came back with."""

    candidates: tuple[Candidate, ...]  # legal layouts that fit, best first
    nearest: tuple[Candidate, ...]  # if none fits, the legal ones that exceed the memory least
    examined: int
    legal: int
    too_large: int  # legal ones, better by all but memory, that do not fit
    left_out: int = 0  # legal ones that were not looked at, because enough better ones fit

    def to_json(self) -> dict[str, Any]:
        """The layouts as one JSON object."""
        layouts = {name: [one.to_json() for one in getattr(self, name)] for name in ("candidates", "nearest")}
        counts = {name: getattr(self, name) for name in ("examined", "legal", "too_large", "left_out")}
        return {**layouts, **counts, "order": list(ORDER)}


def chosen_fields(experiment: Experiment) -> dict[str, Any]:
    """What a search chooses, as fields of an experiment."""
    names = (*VARIED, "local_batch", "accumulate_gradients", "activation_checkpoint")
    return {field: getattr(experiment, field) for field in names}


def search(
    experiment: Experiment,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    headroom_gib: Headroom | None = None,
    global_batch: int | None = None,
) -> SearchResult:
    """The best legal layouts that fit.

    Args:
        experiment: model, cluster, batch, precision and everything else that is not varied.
        fixed: fields of ``VARIED`` that keep the experiment's value.
        limit: how many layouts to return.
        headroom_gib: memory left by an experiment; None orders without memory.
        global_batch: sequences of a step over all ranks, from which each layout's ``local_batch`` follows; None keeps
            the experiment's ``local_batch``.

    Raises:
        BadInput: if a fixed field is not one that a search varies.

    >>> debug = search(Experiment(model="debug", gpus_per_node=4), limit=1)
    >>> best = debug.candidates[0].experiment
    >>> best.pp, best.dp_replicate, best.dp_shard, best.tp, best.ep
    (1, 1, 4, 1, 1)
    """
    examined, legal = 0, []
    for judged, some in _legal_layouts(experiment, fixed=fixed, global_batch=global_batch):
        examined += judged
        legal += some
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for candidate in _by_memory(facts_of(experiment), sorted(legal), headroom_gib):  # tuples in the stated order
        (too_large if candidate.fits is False else fitting).append(candidate)
        if len(fitting) == limit:
            break
    nearest = [] if fitting else sorted(too_large, key=lambda one: -(one.headroom_gib or 0.0))[:limit]
    return SearchResult(
        candidates=tuple(fitting), nearest=tuple(nearest), examined=examined, legal=len(legal), too_large=len(too_large)
    )


class _Legal(NamedTuple):
    """A legal layout in a few numbers, which compare in the stated order, memory aside.

    A search has a hundred thousand of them: one is made an experiment, at fifty times the cost, once it is looked at.
    """

    bubble_steps: int
    sequence_ranks: int
    ep_nodes: int
    bubble: float
    pp: int
    tp: int
    cp: int
    dp_replicate: int
    ep: int
    microbatch: int
    schedule_place: int
    pp_schedule: str
    dp_shard: int
    local_batch: int

    @property
    def order(self) -> tuple[Any, ...]:
        """What :data:`ORDER` says of it, memory aside."""
        return self[:4]

    @property
    def layout(self) -> tuple[Any, ...]:
        """What makes it this layout and no other."""
        return self[4:]

    @property
    def at_once(self) -> int:
        """``sequences_at_once`` of its experiment."""
        return min(self.microbatch, self.local_batch)

    @property
    def priced_by(self) -> tuple[int, ...]:
        """What decides how long a token takes in all layers, the schedule's bubble aside."""
        return self.at_once, self.tp, self.cp, self.ep, self.local_batch > self.at_once

    def of(self, given: Facts) -> Facts:
        """The layout with everything else as ``given``."""
        fields = {name: getattr(self, name) for name in (*VARIED, "local_batch")}
        return given.vary(**fields, accumulate_gradients=self.pp == 1 and self.microbatch < self.local_batch)

    def candidate(
        self, experiment: Experiment, headroom_gib: float | None, projection: Projection | None = None
    ) -> Candidate:
        """The layout as an answer of a search has it."""
        return Candidate(
            experiment=experiment,
            bubble_fraction=self.bubble,
            ep_nodes=self.ep_nodes,
            headroom_gib=headroom_gib,
            projection=projection,
        )


def _by_memory(given: Facts, legal: list[_Legal], headroom_gib: Headroom | None) -> Iterator[Candidate]:
    """Candidates in order, with memory estimated group by group: it decides only among those equal in all else."""
    for _, group in groupby(legal, key=lambda one: one.order):
        candidates = []
        for one in group:
            facts = one.of(given)
            left = headroom_gib(facts.experiment, resolve(facts)) if headroom_gib else None
            candidates.append(one.candidate(facts.experiment, left))
        yield from sorted(candidates, key=lambda candidate: -(candidate.headroom_gib or 0.0))


def _legal_layouts(
    experiment: Experiment, *, fixed: Collection[str], global_batch: int | None
) -> Iterator[tuple[int, list[_Legal]]]:
    """Legal layouts, and how many were judged, for each way to write the ranks as a product of five axes.

    Degrees that divide neither ranks, heads nor experts are left out here, because there are many and the rules refuse
    each of them.

    Raises:
        BadInput: if a fixed field is not one that a search varies.
    """
    if unknown := sorted(set(fixed) - set(VARIED)):
        raise BadInput(f"{', '.join(unknown)}: a search does not vary this; it varies {', '.join(VARIED)}")
    facts, ranks = facts_of(experiment), experiment.world_size
    degrees_are_legal, pipeline_is_legal = _judges(facts)

    def degrees(axis: str, left: int) -> Iterator[int]:
        options = (getattr(experiment, axis),) if axis in fixed else divisors(left)
        return (degree for degree in options if left % degree == 0)

    def bubble(pp: int, schedule: str, microbatches: int) -> float:
        turns = experiment.pp_stages_per_rank
        return bubble_fraction(SCHEDULES[schedule], pp=pp, microbatches=microbatches, turns=turns) if pp > 1 else 0.0

    @cache
    def pipelines(pp: int, local_batch: int) -> tuple[int, list[tuple[float, int, int, str]]]:
        """How many there are; bubble, micro-batch and schedule of the legal ones."""
        # Without a pipeline the schedule means nothing and stays, and gradients of micro-batches are accumulated.
        schedules = (experiment.pp_schedule,) if "pp_schedule" in fixed or pp == 1 else tuple(SCHEDULES)
        sizes = (experiment.microbatch,) if "microbatch" in fixed else divisors(local_batch)
        legal = [
            (bubble(pp, schedule, local_batch // size), size, place, schedule)
            for (place, schedule), size in product(enumerate(schedules), sizes)
            if pipeline_is_legal(pp, schedule, local_batch, size)
        ]
        return len(schedules) * len(sizes), legal

    axes = (
        (pp, tp, cp, dp_replicate)
        for pp in degrees("pp", ranks)
        for tp in degrees("tp", ranks // pp)
        for cp in degrees("cp", ranks // (pp * tp))
        for dp_replicate in degrees("dp_replicate", ranks // (pp * tp * cp))
    )
    experts = (experiment.ep,) if "ep" in fixed else divisors(facts.shape.num_experts)
    # Expert-parallel ranks are neighbours in TorchTitan's mesh: they span nodes, or NVLink domains, of so many ranks.
    ep_nodes = {ep: max(1, -(-ep // nvlink_ranks(experiment, ep))) for ep in experts}
    for pp, tp, cp, dp_replicate in axes:
        dp_shard = ranks // (pp * dp_replicate * cp * tp)
        if "dp_shard" in fixed and experiment.dp_shard not in (-1, dp_shard):
            continue
        local_batch, over = experiment.local_batch, 0
        if global_batch is not None:
            local_batch, over = divmod(global_batch, dp_replicate * dp_shard)
        if over or not local_batch:
            continue
        judged, legal = pipelines(pp, local_batch)
        legal_with = [
            _Legal(
                bubble_steps=int(waits / BUBBLE_STEP),
                sequence_ranks=tp * cp,
                ep_nodes=ep_nodes[ep],
                bubble=waits,
                pp=pp,
                tp=tp,
                cp=cp,
                dp_replicate=dp_replicate,
                ep=ep,
                microbatch=size,
                schedule_place=place,
                pp_schedule=schedule,
                dp_shard=dp_shard,
                local_batch=local_batch,
            )
            for ep in experts
            if legal and degrees_are_legal(pp, dp_replicate, dp_shard, cp, tp, ep)
            for waits, size, place, schedule in legal
        ]
        yield judged * len(experts), legal_with


def _judges(given: Facts) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """Whether degrees are legal, and whether a pipeline is: no rule looks at both, so each is judged once."""

    @cache
    def degrees_are_legal(pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int) -> bool:
        facts = given.vary(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
        return next(faults_of_degrees(facts), None) is None

    @cache
    def pipeline_is_legal(pp: int, pp_schedule: str, local_batch: int, microbatch: int) -> bool:
        accumulates = pp == 1 and microbatch < local_batch
        sizes = {"local_batch": local_batch, "microbatch": microbatch, "accumulate_gradients": accumulates}
        return next(pipeline_faults(given.vary(pp=pp, pp_schedule=pp_schedule, **sizes)), None) is None

    return degrees_are_legal, pipeline_is_legal


def _low_end(candidate: Candidate) -> float:
    return candidate.projection.interval[0] if candidate.projection else 0.0


class Space:
    """The legal layouts of an experiment, judged once, among which the fastest with any setting is looked for.

    Of schedules that wait equally long and hold equally much only the first is kept.

    Arguments are those of :func:`~moelab.planning.advice.recommend`; ``experiment`` is then on the cluster's GPUs.
    """

    def __init__(
        self,
        experiment: Experiment,
        cluster: Cluster | None = None,
        *,
        fixed: Collection[str] = (),
        global_batch: int | None = None,
        calibration: Calibration = CALIBRATION,
    ) -> None:
        self.cluster = cluster or cluster_of(experiment.hardware)
        # Rules and memory are those of the cluster's GPU, as in the projections, whatever the experiment's hardware is.
        experiment = on_cluster(experiment, self.cluster)
        self.experiment, self.calibration = experiment, calibration
        self._examined = self._legal = 0
        self._known: dict[tuple[Any, ...], Projection | None] = {}
        self._variants: dict[tuple[Any, ...], _Variant] = {}
        checkpointing = () if "activation_checkpoint" in fixed else POLICIES
        self._checkpointing = list(dict.fromkeys((experiment.activation_checkpoint, *checkpointing)))
        self._layouts: list[_Legal] = []
        batch = global_batch or experiment.global_batch
        of_layout = [field for field in fixed if field != "activation_checkpoint"]
        for judged, legal in _legal_layouts(experiment, fixed=of_layout, global_batch=batch):
            self._examined += judged
            self._legal += len(legal)
            kept: set[tuple[Any, ...]] = set()
            for one in legal:
                same = (one.ep, one.microbatch, _is_v(one), round(one.bubble, 9))  # equal but for rounding
                # Context parallelism cuts sequences: each of its ranks has a share of the tokens.
                too_long = one.at_once > 1 and one.at_once * experiment.seq_len > MOST_TOKENS_AT_ONCE * one.cp
                if not too_long and same not in kept:
                    kept.add(same)
                    self._layouts.append(one)
        self._layouts.sort()

    def search(self, limit: int) -> tuple[SearchResult, tuple[Candidate, ...]]:
        """All that was projected for the experiment as it is, and the best; what is asked later keeps CP and replicas.

        That is, it has those of one of these best: other degrees have been looked at and were slower.
        """
        result = self.fastest(limit)
        ranked = tuple(sorted(result.candidates, key=_low_end, reverse=True)[:limit])
        if ranked:
            self._known[()] = ranked[0].projection
            near = {(one.experiment.cp, one.experiment.dp_replicate) for one in ranked}
            self._layouts = [one for one in self._layouts if (one.cp, one.dp_replicate) in near]
        return result, ranked

    def fastest(self, limit: int = 1, **changes: Any) -> SearchResult:
        """Layouts that fit, with their projections: all that can be among the ``limit`` best, up to some hundreds.

        A layout is not projected any more once its estimate, which is less than the step takes, is too slow.

        ``changes`` are fields of the experiment that have another value, those of the layout among them.
        """
        of_layout = {field: value for field, value in changes.items() if field in VARIED}
        settings = {field: value for field, value in changes.items() if field not in of_layout}
        policy = settings.pop("activation_checkpoint", None)
        variants = [self._variant(settings, one) for one in ([policy] if policy else self._checkpointing)]
        # Micro-batches of one under full checkpointing hold least: where not even they fit, nothing else is tried.
        thrifty = self._variant(settings, "full")
        # What is computed again takes time: no checkpointing is faster than none.
        least = self._variant(settings, "none") if len(self._checkpointing) > 1 else variants[0]
        layouts = [one for one in self._layouts if all(getattr(one, field) == of_layout[field] for field in of_layout)]
        fitting: list[Candidate] = []
        lows: list[float] = []
        too_large = looked_at = 0
        nearest: dict[tuple[Any, ...], tuple[float, _Legal, _Variant]] = {}
        for estimate_s, one, variant in _by_estimate(variants, least, layouts):
            # Even with the narrowest interval its low end would come after the `limit` best so far.
            fastest_tps = self.experiment.seq_len / estimate_s
            if len(fitting) >= CONSIDERED or (len(lows) >= limit and fastest_tps / LEAST_WIDTH < lows[-limit]):
                break
            looked_at += 1
            if not variant.is_legal(one):
                continue
            # 1F1B holds least of the schedules that are no V, where it has a micro-batch for each stage.
            other = not _is_v(one) and SCHEDULES["1F1B"].takes(one.local_batch, one.pp)
            schedule = "1F1B" if other else one.pp_schedule
            group = one._replace(microbatch=1, schedule_place=0, pp_schedule=schedule)
            left = thrifty.left(group)
            if left >= 0:
                left = variant.left(one)
            if left < 0:
                too_large += 1
                if not fitting and left > nearest.get(group.layout, (-inf,))[0]:
                    nearest[group.layout] = left, one, variant
                continue
            projection = variant.projection(one)
            fitting.append(one.candidate(projection.experiment, left, projection))
            insort(lows, projection.interval[0])
        closest = sorted(nearest.values(), key=lambda entry: -entry[0])[:limit] if not fitting else ()
        return SearchResult(
            candidates=tuple(fitting),
            nearest=tuple(one.candidate(one.of(variant.given).experiment, left) for left, one, variant in closest),
            examined=self._examined,
            legal=self._legal,
            too_large=too_large,
            left_out=len(variants) * len(layouts) - looked_at,
        )

    def _variant(self, settings: Mapping[str, Any], checkpointing: str) -> _Variant:
        fields = {**settings, "activation_checkpoint": checkpointing}
        key = tuple(sorted(fields.items()))
        if key not in self._variants:
            given = facts_of(self.experiment).vary(**fields)
            self._variants[key] = _Variant(given, self.cluster, self.calibration)
        return self._variants[key]

    def best(self, **changes: Any) -> Projection | None:
        """The projection of the best layout with some settings changed; None where none is legal and fits."""
        x = self.experiment
        free = (*VARIED, "activation_checkpoint")  # of which one value is not the same as any
        changes = {field: value for field, value in changes.items() if field in free or getattr(x, field) != value}
        key = tuple(sorted(changes.items()))
        if key not in self._known:
            best = max(self.fastest(**changes).candidates, key=_low_end, default=None)
            self._known[key] = best.projection if best else None
        return self._known[key]


class _Variant:
    """An experiment with some settings and a checkpointing: which layouts are legal, how fast and how large they are.

    The layout of ``given`` does not matter.
    """

    def __init__(self, given: Facts, cluster: Cluster, calibration: Calibration) -> None:
        self.given, self._cluster, self._calibration = given, cluster, calibration
        self._degrees_are_legal, self._pipeline_is_legal = _judges(given)
        self._can_be_placed = cache(lambda ep: can_be_placed(given.experiment, ep, cluster.node))
        self._seconds: dict[tuple[Any, ...], float] = {}
        self._left: dict[tuple[Any, ...], float] = {}
        self._projections: dict[_Legal, Projection] = {}

    def is_legal(self, one: _Legal) -> bool:
        """Whether it is legal with these settings, and can be projected."""
        return (
            self._can_be_placed(one.ep)
            and self._degrees_are_legal(one.pp, one.dp_replicate, one.dp_shard, one.cp, one.tp, one.ep)
            and self._pipeline_is_legal(one.pp, one.pp_schedule, one.local_batch, one.microbatch)
        )

    def token_s(self, one: _Legal) -> float:
        """Seconds of a token in all layers: without the schedule's bubble, and what ends a step."""
        if one.priced_by not in self._seconds:
            facts, work = one.of(self.given), inf
            if self._can_be_placed(one.ep):
                work = work_s(job_of(facts.experiment, resolve(facts), self._cluster.node), self._calibration)
            self._seconds[one.priced_by] = work * one.tp * one.cp / one.at_once
        return self._seconds[one.priced_by]

    def left(self, one: _Legal) -> float:
        """GiB that are left on the fullest GPU."""
        key = one.layout
        if key not in self._left:
            facts = one.of(self.given)
            self._left[key] = estimate(facts.experiment, resolve(facts), self._cluster.node.gpu).headroom_gib
        return self._left[key]

    def projection(self, one: _Legal) -> Projection:
        """Of a layout that is legal and fits."""
        if one not in self._projections:
            experiment = one.of(self.given).experiment
            self._projections[one] = project(experiment, self._cluster, calibration=self._calibration)
        return self._projections[one]


def _is_v(one: _Legal) -> bool:
    return one.pp > 1 and SCHEDULES[one.pp_schedule].style == "v"


def _by_estimate(
    variants: Sequence[_Variant], least: _Variant, layouts: Sequence[_Legal]
) -> Iterator[tuple[float, _Legal, _Variant]]:
    """Every layout with each checkpointing by its seconds for each token, priced as late as ``least`` allows.

    ``least`` is never slower than one of the ``variants``; ``layouts`` are in the stated order, in which those that are
    priced alike wait ever longer.
    """
    alike: defaultdict[tuple[Any, ...], list[_Legal]] = defaultdict(list)
    for one in layouts:
        alike[one.priced_by].append(one)
    # () comes before every layout, so that what is not priced yet is priced before it can be missed.
    heap: list[tuple[float, Any, int, tuple[Any, ...], int]] = [
        (least.token_s(some[0]) / (1 - some[0].bubble), (), place, key, 0)
        for key, some in alike.items()
        for place in range(len(variants))
    ]
    heapq.heapify(heap)
    while heap:
        _, one, place, key, index = heap[0]
        if one:
            yield heap[0][0], one, variants[place]
            index += 1
        # The next layout of the same price takes its place: one entry of each kind is in the heap.
        if index < len(alike[key]):
            one = alike[key][index]
            seconds = variants[place].token_s(one) / (1 - one.bubble)
            heapq.heapreplace(heap, (seconds, one, place, key, index))
        else:
            heapq.heappop(heap)
