"""The fastest layouts of a model on a cluster: a grid of degrees, the rules, memory, and a projection of the best.

The grid has every way to write the GPUs as a product of axes, every schedule, micro-batch and checkpointing, but no
tensor parallelism beyond what NVLink joins and no pipeline of more than :data:`MOST_STAGES` ranks. What is legal gets a
first estimate: the time of a micro-batch in all layers, which layouts share by the thousand, over what the schedule's
bubble leaves. That is less than the step takes, so layouts that fit are projected in its order until no other can be
among the best, or :data:`PROJECTED` have been.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.hardware import Cluster, cluster_of
from moelab.layout import SCHEDULES, Facts, bubble_fraction, facts_of, resolve
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.layout.rules import faults_of_degrees, pipeline_faults
from moelab.planning.memory import estimate
from moelab.planning.project import Projection, can_be_placed, on_cluster, project
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.job import job_of
from moelab.planning.time.step import work_s
from moelab.planning.trust import least_width, outside

VARIED = ("pp", "pp_schedule", "microbatch", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Fields of an experiment that a search chooses unless they are fixed."""
POLICIES = ("none", "selective", "full")
"""Checkpointing that it chooses from, beside the experiment's own."""
PROJECTED = 400
"""Layouts that are projected at most."""
MOST_TOKENS_AT_ONCE = 2**17
"""Of a rank: products and exchanges of more tokens are no more efficient, and hold more memory."""
MOST_STAGES = 64
"""Pipeline ranks: twice as many as any published training has."""
MOST_GPUS, MOST_SEQUENCES = 2**17, 2**20
"""Of a search: more of either, in a step, no training has."""
DOUBLINGS = 8
"""How often the nodes are doubled to find how many it would take."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One legal layout."""

    experiment: Experiment
    headroom_gib: float  # memory left on the fullest GPU; negative if it does not fit
    projection: Projection | None = None  # None where it does not fit

    @property
    def bubble_fraction(self) -> float:
        """Share of a step in which a pipeline rank waits, by the schedule alone."""
        x = self.experiment
        schedule, microbatches = SCHEDULES.get(x.pp_schedule, SCHEDULES["1F1B"]), x.local_batch // x.sequences_at_once
        return bubble_fraction(schedule, pp=x.pp, microbatches=microbatches, turns=x.pp_stages_per_rank)

    def to_json(self) -> dict[str, Any]:
        """The layout as fields of an experiment, and what is known of it."""
        speed = {}
        if self.projection is not None:
            speed = {"tps": self.projection.tps, "interval": list(self.projection.interval)}
            speed |= {"step_time_s": self.projection.step_time_s, "label": self.projection.label}
        return {
            "set": chosen_fields(self.experiment),
            "global_batch": self.experiment.global_batch,
            "bubble_fraction": round(self.bubble_fraction, 6),
            "fits": self.headroom_gib >= 0,
            "headroom_gib": round(self.headroom_gib, 2),
            **speed,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search came back with."""

    candidates: tuple[Candidate, ...]  # legal layouts that fit, the first by :func:`certain_tps`
    examined: int
    legal: int
    projected: int
    nearest: Candidate | None = None  # if none fits, the plain layout that needs least
    enough: Candidate | None = None  # and one that fits, on as many more nodes as that takes

    def to_json(self) -> dict[str, Any]:
        """The layouts as one JSON object."""
        names = ("examined", "legal", "projected")
        return {
            "candidates": [one.to_json() for one in self.candidates],
            "nearest": [one.to_json() for one in (self.nearest,) if one],
            "gpus_that_fit": self.enough and self.enough.experiment.world_size,
            **{name: getattr(self, name) for name in names},
        }


def chosen_fields(experiment: Experiment) -> dict[str, Any]:
    """What a search chooses, as fields of an experiment."""
    names = (*VARIED, "local_batch", "accumulate_gradients", "activation_checkpoint")
    return {field: getattr(experiment, field) for field in names}


def search(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    global_batch: int | None = None,
    calibration: Calibration = CALIBRATION,
) -> SearchResult:
    """The fastest legal layouts that fit.

    Args:
        experiment: model, batch, precision and all else that is not varied; its nodes and GPUs of a node.
        cluster: another one than the experiment's ``hardware``.
        fixed: fields of :data:`VARIED`, and ``activation_checkpoint``, that keep the experiment's value.
        limit: layouts to return.
        global_batch: sequences of a step, from which ``local_batch`` follows; None keeps the experiment's.
        calibration: constants of the model of time.

    Raises:
        BadInput: if a fixed field is not varied, the hardware lacks a figure that a projection needs, or a number is
            beyond what can be searched.

    >>> debug = search(Experiment(model="debug", gpus_per_node=4, hardware="h100_node"), limit=1)
    >>> debug.candidates[0].experiment.world_size
    4
    """
    if unknown := sorted(set(fixed) - {*VARIED, "activation_checkpoint"}):
        raise BadInput(f"{', '.join(unknown)}: a search does not vary this; it varies {', '.join(VARIED)}")
    if not 1 <= limit <= PROJECTED:
        raise BadInput(f"limit is {limit}; a search projects at most {PROJECTED} layouts, so give 1 to {PROJECTED}")
    if experiment.world_size > MOST_GPUS:
        raise BadInput(
            f"a search is of at most {MOST_GPUS:,} GPUs, and this has {experiment.world_size:,}: lower nodes"
        )
    cluster = cluster or cluster_of(experiment.hardware)
    experiment = on_cluster(experiment, cluster)  # rules and memory are those of the GPU that is asked about
    batch = global_batch or experiment.global_batch
    if batch > MOST_SEQUENCES:
        raise BadInput(
            f"a search is of at most {MOST_SEQUENCES:,} sequences a step, and this has {batch:,}: lower them"
        )
    grid = _Grid(experiment, cluster, frozenset(fixed), batch, calibration)
    legal = grid.legal()
    fitting: list[Candidate] = []
    found_tps: list[float] = []
    for most_tps, one in legal:
        # It is worse than the `limit` best so far, and so are all that follow.
        if len(fitting) == PROJECTED or (len(found_tps) >= limit and most_tps < found_tps[-limit]):
            break
        left = grid.headroom_gib(one)
        if left >= 0:
            projection = project(one.facts(grid.given).experiment, cluster, calibration=calibration)
            fitting.append(Candidate(experiment=projection.experiment, headroom_gib=left, projection=projection))
            insort(found_tps, certain_tps(projection))
    result = SearchResult(
        candidates=tuple(sorted(fitting, key=_order, reverse=True)[:limit]),
        examined=grid.examined,
        legal=len(legal),
        projected=len(fitting),
    )
    if fitting or not legal:
        return result
    return replace(result, nearest=grid.thriftiest(), enough=grid.enough())


def certain_tps(projection: Projection) -> float:
    """What a layout is ranked by: its speed, or what it is at least where that is extrapolated."""
    return projection.interval[0] if projection.outside else projection.tps


def _order(candidate: Candidate) -> float:
    return certain_tps(candidate.projection) if candidate.projection else 0.0


class _Layout(NamedTuple):
    """A layout by the names of an experiment's fields: a search has a hundred thousand, and makes few an experiment."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    local_batch: int
    pp_schedule: str
    microbatch: int
    activation_checkpoint: str

    def facts(self, given: Facts) -> Facts:
        """The layout with everything else as ``given``."""
        return given.vary(**self._asdict(), accumulate_gradients=self.pp == 1 and self.microbatch < self.local_batch)


class _Grid:
    """Everything that an experiment could be laid out as, with what is asked of it more than once."""

    def __init__(
        self, experiment: Experiment, cluster: Cluster, fixed: frozenset[str], batch: int, calibration: Calibration
    ) -> None:
        self.experiment, self.cluster, self.fixed, self.batch = experiment, cluster, fixed, batch
        self.given, self.calibration = facts_of(experiment), calibration
        self.examined = 0
        policies = () if "activation_checkpoint" in fixed else POLICIES
        self.policies = tuple(dict.fromkeys((experiment.activation_checkpoint, *policies)))
        self.headroom_gib, self._pipelines = cache(self._headroom_gib), cache(self._legal_pipelines)
        self._speeds: dict[tuple[Any, ...], float] = {}
        self._widths: dict[tuple[Any, ...], float] = {}

    def legal(self) -> list[tuple[float, _Layout]]:
        """Legal layouts with a bound of their :func:`certain_tps`; the highest first."""
        layouts = []
        for plain in self.plain():
            examined, pipelines = self._pipelines(plain.pp, plain.local_batch, plain.cp)
            self.examined += examined * len(self.policies)
            for (schedule, size, waits), policy in product(pipelines, self.policies):
                one = plain._replace(pp_schedule=schedule, microbatch=size, activation_checkpoint=policy)
                layouts.append(((1 - waits) * self._most_tps(one), one))
        return sorted(layouts, key=lambda layout: (-layout[0], layout[1]))

    def plain(self, **only: int) -> Iterator[_Layout]:
        """Legal degrees, pipelines aside, with 1F1B, one sequence at a time and full checkpointing: they hold least.

        Degrees that divide neither ranks, heads nor experts are not tried; ``only`` are some that are given.
        """
        x, ranks = self.experiment, self.experiment.world_size
        most = {"tp": nvlink_ranks(x, node=self.cluster.node), "pp": max(MOST_STAGES, x.pp)}

        def options(axis: str, left: int) -> Iterator[int]:
            values = (getattr(x, axis),) if axis in self.fixed else (only[axis],) if axis in only else divisors(left)
            return (value for value in values if left % value == 0 and value <= most.get(axis, left))

        experts = (x.ep,) if "ep" in self.fixed else divisors(self.given.shape.num_experts)
        placed = [ep for ep in experts if can_be_placed(x, ep, self.cluster.node)]
        axes = (
            (pp, tp, cp, replicas)
            for pp in options("pp", ranks)
            for tp in options("tp", ranks // pp)
            for cp in options("cp", ranks // (pp * tp))
            for replicas in options("dp_replicate", ranks // (pp * tp * cp))
        )
        for pp, tp, cp, replicas in axes:
            shard = ranks // (pp * tp * cp * replicas)
            local_batch, over = divmod(self.batch, replicas * shard)
            if over or not local_batch or ("dp_shard" in self.fixed and x.dp_shard not in (-1, shard)):
                continue
            schedule = x.pp_schedule if pp == 1 or "pp_schedule" in self.fixed else "1F1B"
            for ep in placed:
                one = _Layout(pp, replicas, shard, cp, tp, ep, local_batch, schedule, 1, "full")
                if next(faults_of_degrees(one.facts(self.given)), None) is None:
                    yield one

    def _legal_pipelines(self, pp: int, local_batch: int, cp: int) -> tuple[int, list[tuple[str, int, float]]]:
        """How many were judged; schedule, micro-batch and bubble of the legal ones."""
        x = self.experiment
        # Without a pipeline the schedule means nothing and stays, and gradients of micro-batches are accumulated.
        schedules = (x.pp_schedule,) if "pp_schedule" in self.fixed or pp == 1 else tuple(SCHEDULES)
        sizes = (x.microbatch,) if "microbatch" in self.fixed else divisors(local_batch)
        legal: dict[tuple[int, bool, float], tuple[str, int, float]] = {}
        for name, size in product(schedules, sizes):
            if size > 1 and size * x.seq_len > MOST_TOKENS_AT_ONCE * cp:  # each rank of cp has a share of the tokens
                continue
            accumulates = pp == 1 and size < local_batch
            sized = {"local_batch": local_batch, "microbatch": size, "accumulate_gradients": accumulates}
            if next(pipeline_faults(self.given.vary(pp=pp, pp_schedule=name, **sized)), None) is None:
                waits, is_v = 0.0, pp > 1 and SCHEDULES[name].style == "v"
                if pp > 1:
                    turns, microbatches = x.pp_stages_per_rank, local_batch // size
                    waits = bubble_fraction(SCHEDULES[name], pp=pp, microbatches=microbatches, turns=turns)
                # Of schedules that wait equally long the first holds least, those of a V apart.
                legal.setdefault((size, is_v, round(waits, 9)), (name, size, waits))
        return len(schedules) * len(sizes), list(legal.values())

    def _most_tps(self, one: _Layout) -> float:
        """At most the :func:`certain_tps` of a layout, the schedule's bubble aside."""
        alike = (one.tp, one.cp, one.ep, one.microbatch, one.activation_checkpoint)
        more = (*alike, one.pp > 1)  # what is extrapolated depends on that too
        if more not in self._widths:
            facts = one.facts(self.given)
            job = job_of(facts.experiment, resolve(facts), self.cluster.node)
            self._widths[more] = 1 + least_width(extrapolated=True) if outside(job) else 1.0
            if alike not in self._speeds:  # of one micro-batch: adding up gradients only takes longer
                seconds = work_s(replace(job, microbatches=1), self.calibration)
                self._speeds[alike] = job.work.tokens / (seconds * one.tp)  # its tp ranks share the tokens
        return self._speeds[alike] / self._widths[more]

    def _headroom_gib(self, one: _Layout) -> float:
        """GiB that are left on the fullest GPU."""
        # Micro-batches of one under full checkpointing hold least: where not even they fit, nothing else is tried.
        least = one._replace(microbatch=1, activation_checkpoint="full")
        takes = one.pp == 1 or SCHEDULES[one.pp_schedule].takes(one.local_batch, one.pp)
        if takes and one != least and (left := self.headroom_gib(least)) < 0:
            return left
        facts = one.facts(self.given)
        return estimate(facts.experiment, resolve(facts), self.cluster.node.gpu).headroom_gib

    def thriftiest(self) -> Candidate | None:
        """Of the layouts without replicas and context parallelism that hold least, the one that leaves most memory.

        Where memory is short these are what a person would try.
        """
        best: Candidate | None = None
        for one in self.plain(cp=1, dp_replicate=1):
            facts = one.facts(self.given)
            if next(pipeline_faults(facts), None) is None:
                left = self.headroom_gib(one)
                if best is None or left > best.headroom_gib:
                    best = Candidate(experiment=facts.experiment, headroom_gib=left)
        return best

    def enough(self) -> Candidate | None:
        """A layout that fits on twice, four times, … as many GPUs, a sequence of a step for each at least."""
        x = self.experiment
        for gpus in (x.world_size * 2**doubling for doubling in range(1, DOUBLINGS + 1)):
            per_node = min(max(x.gpus_per_node, self.cluster.node.gpus), gpus)  # nodes are filled first
            more = x.model_copy(update={"nodes": gpus // per_node, "gpus_per_node": per_node, "dp_shard": -1})
            fixed, batch = self.fixed - {"dp_shard"}, max(self.batch, gpus)
            found = _Grid(more, self.cluster, fixed, batch, self.calibration).thriftiest()
            if found and found.headroom_gib >= 0:
                return found
        return None
