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

:func:`recommend` puts predicted speed before all of these, and keeps the sequences of a step. Every legal layout, with
every checkpointing, is given a cheap estimate: the time of a micro-batch in all layers, which layouts share by the
thousand, over what the schedule's bubble leaves. That is less than the step takes, so those that fit are projected in
its order until no other can be among the best. These are ordered by the low end of their intervals. The other value of
a setting, or a technique, is priced at a best layout of its own: what DeepEP gains at a layout that nobody should
choose is no advice.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from math import inf
from typing import Any, NamedTuple

from moelab.errors import BadInput, Refused
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import Cluster, cluster_of, gpu_of, has_native_mxfp8
from moelab.layout import SCHEDULES, Facts, Layout, bubble_fraction, check, facts_of, resolve
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.layout.rules import faults_of_degrees, pipeline_faults
from moelab.model import count_parameters, shape_for
from moelab.plan import amount, headroom_gib, rows, tokens_text
from moelab.projection.calibration import CALIBRATION, Calibration
from moelab.projection.job import Job, job_of
from moelab.projection.project import Projection, aligned, can_be_placed, extrapolated, project, require_figures
from moelab.projection.step import expert_s, work_s
from moelab.projection.uncertainty import SYSTEM_SPREAD, Estimate, gain_interval

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
        speed = {}
        if self.projection is not None:
            speed = {"tps": self.projection.tps, "interval": list(self.projection.interval)}
            speed |= {"step_time_s": self.projection.step_time_s, "label": self.projection.label}
        return {
            "set": chosen_fields(self.experiment),
            "global_batch": sequences_of(self.experiment),
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
        left_out: legal ones that were not looked at, because enough better ones fit.
    """

    candidates: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    examined: int
    legal: int
    too_large: int
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """The layouts as one JSON object."""
        return {
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "nearest": [candidate.to_json() for candidate in self.nearest],
            "examined": self.examined,
            "legal": self.legal,
            "too_large": self.too_large,
            "left_out": self.left_out,
            "order": list(ORDER),
        }


def search(
    experiment: Experiment,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    headroom_gib: Headroom | None = None,
    global_batch: int | None = None,
) -> Found:
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

    Example:
        >>> found = search(Experiment(model="debug", gpus_per_node=4), limit=1)
        >>> best = found.candidates[0].experiment
        >>> best.pp, best.dp_replicate, best.dp_shard, best.tp, best.ep
        (1, 1, 4, 1, 1)
    """
    examined, legal = 0, []
    for judged, some in _legal_layouts(experiment, fixed=fixed, global_batch=global_batch):
        examined += judged
        legal += some
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for candidate in _by_memory(facts_of(experiment), sorted(legal), headroom_gib):
        (too_large if candidate.fits is False else fitting).append(candidate)
        if len(fitting) == limit:
            break
    nearest = [] if fitting else sorted(too_large, key=_room, reverse=True)[:limit]
    return Found(
        candidates=tuple(fitting),
        nearest=tuple(nearest),
        examined=examined,
        legal=len(legal),
        too_large=len(too_large),
    )


BUBBLE_STEP = 0.05


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
    for _, group in groupby(legal, key=lambda one: one[: len(ORDER) - 2]):
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


def search_text(found: Found) -> str:
    """The layouts of a search as a table, with the order that it is in."""
    shown = found.candidates or found.nearest
    counts = f"{found.examined:,} layouts checked, {found.legal:,} legal"
    if not shown:
        return counts
    lines = aligned([CANDIDATE_HEADER, *(candidate_row(candidate) for candidate in shown)])
    if found.candidates:
        counts += f"; {found.too_large:,} that rank higher do not fit."
        why = "This hardware has no figures to predict speed from: name a profile, such as hardware=b200_x256."
        return "\n".join([*lines, "", counts, *rows("", [f"Order: {', '.join(ORDER)}. {why}"])])
    return "\n".join([f"{counts}, and none fits. The closest:", *lines])


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
    "checkpointing",
    "bubble",
    "free GiB",
)


def candidate_row(candidate: Candidate) -> tuple[str, ...]:
    """One layout of a search, as cells."""
    x = candidate.experiment
    pipeline = (x.pp_schedule if x.pp > 1 else "-", str(x.sequences_at_once))
    degrees = (x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.local_batch)
    free = "?" if candidate.headroom_gib is None else f"{candidate.headroom_gib:.1f}"
    total, policy = str(sequences_of(x)), x.activation_checkpoint
    return (str(x.pp), *pipeline, *map(str, degrees), total, policy, f"{candidate.bubble_fraction:.1%}", free)


CONSIDERED = 200
"""Layouts that are projected at most."""
BREAK_EVEN_STEP = 1.05
"""To which factor a break-even is looked for."""
MOST_TOKENS_AT_ONCE = 2**17
"""Of a rank: products and exchanges of more tokens are no more efficient, and hold more memory."""
LEAST_WIDTH = 1 + 1.645 * SYSTEM_SPREAD
"""A speed over the low end of its interval is at least this."""
ORDER_BY_SPEED = "low end of the 90 % interval of tokens/s per GPU, so what nobody has measured must be clearly faster"
MUCH_WAITING = 0.2
"""Share of a step that the GPU is idle, from which on the answer names it beside the gain of faster products."""
TRIED: Mapping[str, tuple[Any, ...]] = {
    "precision": (Precision.BF16, Precision.MXFP8, Precision.FP8),
    "quantize": ("experts", "experts+linears"),
    "ep_backend": (EPBackend.STANDARD, EPBackend.DEEPEP),
    "dispatch_precision": ("bf16", "mxfp8", "fp8"),
    "wgrad": ("mxfp8", "bf16"),
    "activation_checkpoint": ("none", "selective", "full+dispatch", "full"),
    "compile": ("none", "model+loss"),
}
"""Settings beside the layout, with the values that are tried."""
POLICIES = ("none", "selective", "full")
"""Checkpointing that a search chooses from, beside the experiment's own."""
PLAIN: Mapping[str, Any] = {
    "precision": Precision.BF16,
    "ep_backend": EPBackend.STANDARD,
    "dispatch_precision": "bf16",
}
"""Neither technique."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a setting is worth, with the best layout of either side.

    Attributes:
        name: of the technique or the field.
        with_it: fastest projection with it; None where no legal layout has it and fits.
        without: fastest projection without it.
        interval: percent; both sides err by the same constants, because they are the same machine.
        why: what it comes from, where the model can say so, or why there is no layout.
    """

    name: str
    with_it: Projection | None
    without: Projection
    interval: Estimate
    why: str = ""

    @property
    def rests_on(self) -> tuple[str, ...]:
        """What was never seen of either side."""
        sides = (self.without, *((self.with_it,) if self.with_it else ()))
        return tuple(dict.fromkeys(reason for side in sides for reason in side.rests_on))

    def to_json(self) -> dict[str, Any]:
        """The gain as one JSON object."""
        sides = {"with": self.with_it, "without": self.without}
        return {
            "technique": self.name,
            "percent": self.interval.value if self.with_it else None,
            "interval": [self.interval.low, self.interval.high] if self.with_it else None,
            "why": self.why,
            "extrapolated": list(self.rests_on),
            **{name: side and {"tps": side.tps, "set": chosen_fields(side.experiment)} for name, side in sides.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A setting of the best layout: ``value`` instead of ``other``, tokens/s/GPU of the best layout with each."""

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
        experiment: that was given.
        found: the search; its candidates are those that were projected, in the order of the estimate.
        ranked: the best layouts first, each with its projection; empty where none fits.
        gains: of the techniques, each side with its own best layout.
        worth: of settings of the best; negative where another value is faster.
        own_tps: tokens/s/GPU with the layout that was given; None where it is illegal or does not fit.
    """

    experiment: Experiment
    found: Found
    ranked: tuple[Candidate, ...]
    gains: tuple[Gain, ...]
    worth: tuple[Worth, ...]
    own_tps: float | None

    @property
    def considered(self) -> int:
        """Layouts that were projected."""
        return len(self.found.candidates)

    @property
    def place(self) -> int:
        """Of the best in the order of the estimate, from 1; 0 where none fits."""
        return self.found.candidates.index(self.ranked[0]) + 1 if self.ranked else 0

    @property
    def best(self) -> Projection | None:
        """Of the first layout; None where none fits."""
        return self.ranked[0].projection if self.ranked else None

    def to_json(self, name: str = "") -> dict[str, Any]:
        """The search as one JSON object, the best first; ``name`` as in :func:`answer_lines`."""
        return {
            "answer": answer_lines(self, name),
            **self.found.to_json(),
            "order": [ORDER_BY_SPEED],
            "candidates": [one.to_json() for one in self.ranked],
            "gains": [gain.to_json() for gain in self.gains],
            "given_tps": self.own_tps,
            "worth": [
                {name: getattr(one, name) for name in ("field", "value", "other", "percent")} for one in self.worth
            ],
            "considered": self.considered,
            "place": self.place,
        }


def recommend(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    fixed: Collection[str] = (),
    limit: int = 10,
    global_batch: int | None = None,
    calibration: Calibration = CALIBRATION,
    settings: bool = True,
) -> Recommendation:
    """Search layouts and order them by predicted speed.

    Args:
        experiment: model, batch and all that is not varied; its nodes and GPUs of a node.
        cluster: another one than the experiment's ``hardware``, such as one with another network.
        fixed: fields that keep the experiment's value.
        limit: layouts to return.
        global_batch: sequences of a step; None keeps the experiment's own.
        calibration: constants of the model.
        settings: whether each setting is priced too, which takes most of the time.

    Raises:
        BadInput: if the hardware lacks a figure that a projection needs, or a fixed field is not varied.
    """
    space = Space(experiment, cluster, fixed=fixed, global_batch=global_batch, calibration=calibration)
    found, ranked = space.search(limit)
    best = ranked[0].projection if ranked else None
    own = None
    with suppress(Refused):
        own = project(experiment, space.cluster, calibration=calibration).tps
    return Recommendation(
        experiment=experiment,
        found=found,
        ranked=ranked,
        gains=tuple(space.gains()) if best else (),
        worth=tuple(space.worth_of(best)) if best and settings else (),
        own_tps=own,
    )


QUICK_GPUS = 512
"""Up to so many a projection looks for a better layout by itself."""


def better_layout(given: Projection, calibration: Calibration = CALIBRATION) -> Projection | None:
    """A layout that the model prices higher than the one given, with its settings and batch; None if there is none.

    A quick look: CP, replicas, schedule and checkpointing stay, and so do the sequences of a step.
    """
    x = given.experiment
    fixed = ("cp", "dp_replicate", "activation_checkpoint", *(("pp_schedule",) if x.pp > 1 else ()))
    if x.world_size > QUICK_GPUS:
        return None
    best = Space(x, given.cluster, fixed=fixed, calibration=calibration).best()
    return best if best and best.tps > BETTER * given.tps else None


BETTER = 1.02
"""How much faster a layout must be for a projection of another to name it."""


def better_text(better: Mapping[str, Projection | None], given: Mapping[str, Projection], file: str) -> str:
    """Better layouts beside those that were projected, by arm, and what the gains over the first arm then are.

    Args:
        better: of :func:`better_layout`, by arm.
        given: what was projected, by arm.
        file: to be named in the command that lists more.
    """
    if not any(better.values()):
        return ""
    best = {arm: better[arm] or given[arm] for arm in given}
    first, *others = best
    lines = ["this is not the best layout for this model on this cluster; each arm at a better one:"]
    for arm, one in best.items():
        gain = ""
        if arm in others:
            gains = [100 * (side[arm].tps / side[first].tps - 1) for side in (best, given)]
            gain = f", {gains[0]:+.1f} % over the first instead of {gains[1]:+.1f} %"
        change = f" ({100 * (one.tps / given[arm].tps - 1):+.1f} %)"
        name = f"{arm}: " if others else ""
        lines.append(f"{name}{one.tps:,.0f} tokens/s/GPU{change}{gain}: {layout_words(one.experiment)}")
        lines[-1] += _resting(one.rests_on)
    lines.append(f"more layouts, and the settings: moelab plan {file} --search")
    return "\n".join(["", *(line for text in lines for line in rows("", [text]))])


def _low_end(candidate: Candidate) -> float:
    return candidate.projection.interval[0] if candidate.projection else 0.0


def _room(candidate: Candidate) -> float:
    return -inf if candidate.headroom_gib is None else candidate.headroom_gib


class Space:
    """The legal layouts of an experiment, judged once, among which the fastest with any setting is looked for.

    Of schedules that wait equally long and hold equally much only the first is kept.

    Args:
        experiment, cluster, fixed, global_batch, calibration: as :func:`recommend` takes them.

    Attributes:
        cluster: that layouts are projected to.
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
        require_figures(experiment, self.cluster)
        self._experiment, self._calibration = experiment, calibration
        self._headroom = headroom_gib(experiment)
        self._examined = self._legal = 0
        self._known: dict[tuple[Any, ...], Projection | None] = {}
        self._variants: dict[tuple[Any, ...], _Variant] = {}
        checkpointing = () if "activation_checkpoint" in fixed else POLICIES
        self._checkpointing = list(dict.fromkeys((experiment.activation_checkpoint, *checkpointing)))
        self._layouts: list[_Legal] = []
        batch = global_batch or sequences_of(experiment)
        of_layout = [field for field in fixed if field != "activation_checkpoint"]
        for judged, legal in _legal_layouts(experiment, fixed=of_layout, global_batch=batch):
            self._examined += judged
            self._legal += len(legal)
            kept: set[tuple[Any, ...]] = set()
            for one in legal:
                same = (one.ep, one.microbatch, _is_v(one), round(one.bubble, 9))
                too_long = one.at_once > 1 and one.at_once * experiment.seq_len > MOST_TOKENS_AT_ONCE * one.cp
                if not too_long and same not in kept:
                    kept.add(same)
                    self._layouts.append(one)
        self._layouts.sort()

    def search(self, limit: int) -> tuple[Found, tuple[Candidate, ...]]:
        """All that was projected for the experiment as it is, and the best; what is asked later keeps CP and replicas.

        That is, it has those of one of these best: other degrees have been looked at and were slower.
        """
        found = self.fastest(limit)
        ranked = tuple(sorted(found.candidates, key=_low_end, reverse=True)[:limit])
        if ranked:
            self._known[()] = ranked[0].projection
            near = {(one.experiment.cp, one.experiment.dp_replicate) for one in ranked}
            self._layouts = [one for one in self._layouts if (one.cp, one.dp_replicate) in near]
        return found, ranked

    def fastest(self, limit: int = 1, **changes: Any) -> Found:
        """Layouts that fit, with their projections: all that can be among the ``limit`` best, up to some hundreds.

        A layout is not projected any more once its estimate, which is less than the step takes, is too slow.

        Args:
            limit: how many of the best are wanted.
            changes: fields of the experiment that have another value, those of the layout among them.
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
            fastest_tps = self._experiment.seq_len / estimate_s
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
                if not fitting and (group[4:] not in nearest or left > nearest[group[4:]][0]):
                    nearest[group[4:]] = left, one, variant
                continue
            projection = variant.projection(one)
            fitting.append(one.candidate(projection.experiment, left, projection))
            insort(lows, projection.interval[0])
        closest = sorted(nearest.values(), key=lambda entry: -entry[0])[: max(limit, 1)] if not fitting else ()
        return Found(
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
            given = facts_of(self._experiment).vary(**fields)
            self._variants[key] = _Variant(given, self.cluster, self._calibration, self._headroom)
        return self._variants[key]

    def best(self, **changes: Any) -> Projection | None:
        """The projection of the best layout with some settings changed; None where none is legal and fits."""
        x = self._experiment
        free = (*VARIED, "activation_checkpoint")  # of which one value is not the same as any
        changes = {field: value for field, value in changes.items() if field in free or getattr(x, field) != value}
        key = tuple(sorted(changes.items()))
        if key not in self._known:
            best = max(self.fastest(**changes).candidates, key=_low_end, default=None)
            self._known[key] = best.projection if best else None
        return self._known[key]

    def gains(self) -> Iterator[Gain]:
        """Of 8-bit experts, of DeepEP and of both, over neither; nothing where no layout fits with neither."""
        if (without := self.best(**PLAIN)) is None:
            return
        low = Precision.MXFP8 if has_native_mxfp8(self.cluster.node.gpu.capability) else Precision.FP8
        experts, dispatcher = {"precision": low}, {"ep_backend": EPBackend.DEEPEP}
        techniques: dict[str, dict[str, Any]] = {f"{low.upper()} experts": experts, "DeepEP": dispatcher}
        techniques[" with ".join(techniques)] = experts | dispatcher
        for name, fields in techniques.items():
            with_it, interval = self.best(**{**PLAIN, **fields}), Estimate(value=0.0, low=0.0, high=0.0)
            if with_it is None:
                reasons = check(Experiment.model_validate({**without.experiment.model_dump(), **fields})).reasons
                why = reasons[0] if reasons else "no layout with it fits"
            else:
                interval = gain_interval(
                    with_it.job,
                    without.job,
                    self._calibration,
                    extrapolated=bool(with_it.outside or without.outside),
                )
                why = _rows_and_break_even(with_it.job, self._calibration) if fields == experts else ""
                waits = with_it.breakdown_s["host and waiting"] / with_it.step_time_s
                if why and waits > MUCH_WAITING:
                    why += f"; the GPU waits {waits:.0%} of the step, mostly for the host: 8 bits do not shorten that"
            yield Gain(name=name, with_it=with_it, without=without, interval=interval, why=why)

    def worth_of(self, best: Projection) -> list[Worth]:
        """What single settings of the best layout are worth, the most valuable first; each other value has its own."""
        x, given = best.experiment, self._experiment
        layout = [field for field in VARIED if field not in ("dp_shard", "dp_replicate")]
        others = [(field, getattr(given, field)) for field in layout if getattr(given, field) != getattr(x, field)]
        native = has_native_mxfp8(gpu_of(x.hardware).capability)
        unknown = "fp8" if native else "mxfp8"  # no rate of it was ever measured there
        others += [(name, value) for name, tried in TRIED.items() for value in tried if value != unknown]
        worth = []
        for field, other in others:
            value = getattr(x, field)
            changed = None if value == other else self.best(**{field: other})
            # What means nothing beside the other settings, as the weight gradient of BF16 experts, changes nothing.
            if changed and changed.tps != best.tps:
                rests_on = tuple(dict.fromkeys((*best.rests_on, *changed.rests_on)))
                worth.append(
                    Worth(field=field, value=value, other=other, tps=best.tps, other_tps=changed.tps, rests_on=rests_on)
                )
        return sorted(worth, key=lambda one: -abs(one.percent))


class _Variant:
    """An experiment with some settings and a checkpointing: which layouts are legal, how fast and how large they are.

    Args:
        given: the experiment; its layout does not matter.
        cluster, calibration: as :func:`recommend` takes them.
        headroom_gib: memory left; None where the GPU is not known.
    """

    def __init__(self, given: Facts, cluster: Cluster, calibration: Calibration, headroom_gib: Headroom | None) -> None:
        self.given, self._cluster, self._calibration, self._headroom = given, cluster, calibration, headroom_gib
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
        key = one[4:]
        if key not in self._left:
            facts = one.of(self.given)
            self._left[key] = self._headroom(facts.experiment, resolve(facts)) if self._headroom else inf
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

    Args:
        variants: the checkpointings.
        least: is never slower than one of them.
        layouts: in the stated order, in which those that are priced alike wait ever longer.
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
        if index < len(alike[key]):
            one = alike[key][index]
            seconds = variants[place].token_s(one) / (1 - one.bubble)
            heapq.heapreplace(heap, (seconds, one, place, key, index))
        else:
            heapq.heappop(heap)


def sequences_of(experiment: Experiment) -> int:
    """Sequences of a step over all ranks, those of a layout that does not divide them rounded down."""
    ranks = experiment.world_size // (experiment.pp * experiment.tp * experiment.cp)
    return experiment.local_batch * max(1, ranks)


def chosen_fields(experiment: Experiment) -> dict[str, Any]:
    """What a search chooses, as fields of an experiment."""
    names = (*VARIED, "local_batch", "accumulate_gradients", "activation_checkpoint")
    return {field: getattr(experiment, field) for field in names}


def _rows_and_break_even(job: Job, calibration: Calibration) -> str:
    """Rows that the experts of a GPU multiply at a time, beside those from which on 8 bits save time in a layer."""

    def saves(tokens: float) -> bool:
        low, bf16 = (
            expert_s(replace(job, precision=precision, work=replace(work, tokens=round(tokens))), calibration)
            for precision, work in (
                (job.precision, job.work),
                (Precision.BF16, replace(job.work, one_pass_experts=False, scaled_products=False, pad_multiple=1)),
            )
        )
        return low < bf16

    tokens, rows_of_token = job.work.tokens, job.work.received(job.shape) / job.work.tokens
    least, most = 2.0**8, 2.0**22
    if not saves(most):
        even = "8 bits save no time at any number of rows on this GPU"
    else:
        while most / least > BREAK_EVEN_STEP:
            middle = math.sqrt(least * most)
            least, most = (least, middle) if saves(middle) else (middle, most)
        even = f"break-even is {most * rows_of_token:,.0f}"
    return f"your experts multiply M = {tokens * rows_of_token:,.0f} rows at a time on each GPU; {even}"


def answer_lines(found: Recommendation, name: str = "") -> list[str]:
    """The answer to *which layout, does it fit, how fast, and is a technique worth it*, one sentence a line.

    Args:
        found: the search.
        name: of the model, where the experiment's own would be a list of dimensions.
    """
    x, counts = found.experiment, count_parameters(shape_for(found.experiment))
    sequences = sequences_of(found.best.experiment if found.best else x)
    model = (
        f"{name or x.model_label}: {amount(counts.total)} parameters, {amount(counts.active)} active per token; "
        f"{x.world_size} GPUs ({x.nodes} × {x.gpus_per_node}) of {x.hardware}, arm {x.arm}, "
        f"{sequences:,} sequences of {x.seq_len:,} tokens ({tokens_text(sequences * x.seq_len)}) a step"
    )
    if not found.best:
        if not found.found.legal:
            return ["no layout is legal", model]
        over = -(found.found.nearest[0].headroom_gib or 0.0) if found.found.nearest else 0.0
        return [f"legal · no layout fits: the closest is {over:.1f} GiB short on its fullest GPU", model]
    lines = [
        f"legal · fits ({found.ranked[0].headroom_gib:.1f} GiB free) · {speed_text(found.best)}",
        model,
        f"best layout: {layout_words(found.best.experiment)}{_resting(found.best.rests_on)}",
    ]
    seen = next((one.projection for one in found.ranked if one.projection and not one.projection.rests_on), None)
    if found.best.rests_on and seen:
        lines.append(f"best of what was seen: {layout_words(seen.experiment)}: {speed_text(seen)}")
    if found.own_tps is not None and found.own_tps < found.best.tps:
        faster = f"the best is {100 * (found.best.tps / found.own_tps - 1):.1f} % faster"
        lines.append(f"as given: {layout_words(x)}: {found.own_tps:,.0f} tokens/s per GPU; {faster}")
    return [*lines, *(gain_text(gain, said=found.best.rests_on) for gain in found.gains)]


def speed_text(projection: Projection) -> str:
    """Tokens/s per GPU with the interval, whether it rests on what was never seen, and the MFU of causal attention."""
    low, high = projection.interval
    label = "derived, extrapolated" if projection.rests_on else "derived"
    speed = f"{projection.tps:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {label})"
    return f"{speed} · MFU {100 * projection.mfu['causal']:.0f} %"


def layout_words(experiment: Experiment) -> str:
    """A layout in one line; degrees of one are left out, as is what follows from the others.

    >>> layout_words(Experiment(gpus_per_node=8, ep=8, dp_shard=8, local_batch=2))
    'FSDP 8, EP 8, 2 sequences at a time, checkpointing none'
    """
    x = experiment
    shard = x.dp_shard if x.dp_shard > 0 else x.world_size // (x.pp * x.tp * x.cp * x.dp_replicate)
    names = {"PP": x.pp, "replicas": x.dp_replicate, "FSDP": shard, "CP": x.cp, "TP": x.tp, "EP": x.ep}
    degrees = [f"{name} {degree}" for name, degree in names.items() if degree > 1 or name == "EP"]
    degrees[:1] = [f"{degrees[0]} ({x.pp_schedule})"] if x.pp > 1 else degrees[:1]
    size = x.sequences_at_once
    at_once = f"{size} sequence{'s' if size > 1 else ''} at a time"
    at_once += f", {x.local_batch // size} times" if size < x.local_batch else ""
    return f"{', '.join(degrees)}, {at_once}, checkpointing {x.activation_checkpoint}"


def gain_text(gain: Gain, *, said: Sequence[str] = ()) -> str:
    """A gain in a sentence, with what either side's best layout is and what it rests on, unless that was ``said``."""
    if gain.with_it is None:
        return f"{gain.name}: {gain.why}"
    low, high = gain.interval.low, gain.interval.high
    text = f"{gain.name}: {gain.interval.value:+.1f} % ({low:+.1f} to {high:+.1f} %)"
    text += f", {gain.with_it.tps:,.0f} instead of {gain.without.tps:,.0f} tokens/s per GPU, each at its best layout: "
    same = chosen_fields(gain.with_it.experiment) == chosen_fields(gain.without.experiment)
    if same:
        text += "the same for both"
    else:
        text += f"{layout_words(gain.with_it.experiment)}; without it {layout_words(gain.without.experiment)}"
    return text + (f"; {gain.why}" if gain.why else "") + _resting(gain.rests_on, said)


def _resting(reasons: Sequence[str], said: Sequence[str] = ()) -> str:
    """What a figure rests on, in full the first time."""
    if not reasons:
        return ""
    return " (extrapolated *)" if reasons[0] in said else f" ({extrapolated(reasons[0])})"


def recommendation_text(found: Recommendation, name: str = "") -> str:
    """The answer, the layouts as a table, the best first, and what settings of the best are worth."""
    lines = [line for sentence in answer_lines(found, name) for line in rows("", [sentence], bullet="")]
    if not found.ranked:
        return "\n".join([*lines, "", search_text(found.found)])
    table = [
        (*candidate_row(one), f"{one.projection.tps:,.0f}" + "*" * bool(one.projection.rests_on))
        for one in found.ranked
        if one.projection is not None
    ]
    counts = f"{found.found.examined:,} layouts checked, {found.found.legal:,} legal; {found.considered:,} projected"
    counts += f", of which a first estimate ranked the best number {found.place:,}"
    counts += (
        f"; over all checkpointings it found {found.found.left_out:,} more too slow" if found.found.left_out else ""
    )
    best = found.best
    assert best is not None
    label = "Speeds are derived" + (f"; * {extrapolated(best.rests_on[0])}" if best.rests_on else "")
    lines += ["", *aligned([(*CANDIDATE_HEADER, "tokens/s/GPU"), *table]), ""]
    lines += [*rows("", [f"{counts}.", f"Order: {ORDER_BY_SPEED}.", f"{label}."]), *best.notes]
    lines += ["", "other settings, each with its own best layout:"] if found.worth else []
    return "\n".join(lines + [f"  {_changed(one, best.rests_on)}" for one in found.worth])


def _changed(worth: Worth, said: Sequence[str]) -> str:
    value, other = (getattr(one, "value", one) for one in (worth.value, worth.other))
    change = 100 * (worth.other_tps / worth.tps - 1)
    return f"{worth.field} {other} instead of {value}: {change:+.1f} %{_resting(worth.rests_on, said)}"
