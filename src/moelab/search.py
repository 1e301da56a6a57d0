"""Every legal layout of a model on a cluster, best first.

There is no prediction of speed in this order. It is what a person would look at first, in this sequence:

1. the layout fits into memory;
2. the pipeline waits little (:func:`~moelab.layout.bubble_fraction`, a property of the schedule), in steps of 5 %;
3. fewest ranks share a sequence (``tp * cp``), because they talk in every layer;
4. expert parallelism spans the fewest nodes;
5. the pipeline waits least, exactly;
6. the most memory is left.

What is still equal is ordered by the degrees themselves, so that two searches agree. Memory is estimated only as far
down the order as the answer reaches: the estimate costs more than all rules together. :mod:`moelab.recommend` puts an
estimate of the time before all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, NamedTuple

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.layout import RULES, SCHEDULES, Facts, Layout, bubble_fraction, facts_of, resolve
from moelab.layout.mesh import divisors

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
    """

    experiment: Experiment
    bubble_fraction: float
    ep_nodes: int
    headroom_gib: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it fits into memory; None if that was not estimated."""
        return None if self.headroom_gib is None else self.headroom_gib >= 0

    def to_json(self) -> dict[str, Any]:
        """The layout as fields of an experiment, and what it was ordered by."""
        fields = {field: getattr(self.experiment, field) for field in (*VARIED, "local_batch")}
        return {
            "set": fields,
            "global_batch": self.experiment.local_batch * self.experiment.dp_replicate * self.experiment.dp_shard,
            "bubble_fraction": round(self.bubble_fraction, 6),
            "ep_nodes": self.ep_nodes,
            "fits": self.fits,
            "headroom_gib": None if self.headroom_gib is None else round(self.headroom_gib, 2),
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
        if all(rule.fault(facts) is None for rule in RULES):
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
    schedule = SCHEDULES[facts.pp_schedule]
    bubble = bubble_fraction(schedule, pp=facts.pp, microbatches=facts.microbatches)
    degrees = (facts.pp, facts.tp, facts.cp, facts.dp_replicate, facts.ep, facts.microbatch)
    tie_break = (*degrees, list(SCHEDULES).index(facts.pp_schedule))
    return int(bubble / BUBBLE_STEP), facts.tp * facts.cp, _ep_nodes(facts), bubble, tie_break


def _ep_nodes(facts: Facts) -> int:
    """Nodes of one group of expert-parallel ranks, which are neighbours in TorchTitan's mesh."""
    per_node = facts.experiment.gpus_per_node
    return max(1, -(-facts.ep // per_node))


def _by_memory(legal: list[tuple[_Key, Facts]], headroom_gib: Headroom | None) -> Iterator[Candidate]:
    """Candidates in order, with memory estimated group by group: it decides only among those equal in all else."""
    for _key, group in groupby(legal, key=lambda pair: pair[0][:-1]):
        candidates = [_candidate(facts, key, headroom_gib) for key, facts in group]
        yield from sorted(candidates, key=lambda candidate: -(candidate.headroom_gib or 0.0))


def _candidate(facts: Facts, key: _Key, headroom_gib: Headroom | None) -> Candidate:
    changes = {field: getattr(facts, field) for field in (*VARIED, "local_batch")}
    experiment = facts.experiment.model_copy(update=changes)
    return Candidate(
        experiment=experiment,
        bubble_fraction=key.bubble,
        ep_nodes=key.ep_nodes,
        headroom_gib=None if headroom_gib is None else headroom_gib(experiment, resolve(facts)),
    )


def layouts(experiment: Experiment, *, fixed: Collection[str] = (), global_batch: int | None = None) -> Iterator[Facts]:
    """Every layout to judge: the ways to write the ranks as a product of five axes, times the other varied fields.

    Degrees that divide neither ranks, heads nor experts are left out here, because there are many and the rules refuse
    each of them.
    """
    start = facts_of(experiment)
    for pp, dp_replicate, cp, tp in _axes(start, fixed):
        dp_shard = start.world_size // (pp * dp_replicate * cp * tp)
        if "dp_shard" in fixed and experiment.dp_shard not in (-1, dp_shard):
            continue
        local_batch = experiment.local_batch
        if global_batch is not None:
            local_batch, over = divmod(global_batch, dp_replicate * dp_shard)
            if over or not local_batch:
                continue
        for ep, schedule, microbatch in _inner(start, fixed, pp, local_batch):
            yield replace(
                start,
                pp=pp,
                dp_replicate=dp_replicate,
                dp_shard_given=dp_shard,
                cp=cp,
                tp=tp,
                ep=ep,
                pp_schedule=schedule,
                local_batch=local_batch,
                microbatch=microbatch,
            )


def _axes(start: Facts, fixed: Collection[str]) -> Iterator[tuple[int, int, int, int]]:
    """Degrees of pp, dp_replicate, cp and tp whose product divides the ranks."""

    def degrees(axis: str, ranks: int) -> Iterator[int]:
        options = (getattr(start, axis),) if axis in fixed else divisors(ranks)
        return (degree for degree in options if ranks % degree == 0)

    for pp in degrees("pp", start.world_size):
        for tp in degrees("tp", start.world_size // pp):
            for cp in degrees("cp", start.world_size // (pp * tp)):
                for dp_replicate in degrees("dp_replicate", start.world_size // (pp * tp * cp)):
                    yield pp, dp_replicate, cp, tp


def _inner(start: Facts, fixed: Collection[str], pp: int, local_batch: int) -> Iterator[tuple[int, str, int]]:
    """Expert-parallel degree, schedule and micro-batch; without a pipeline the last two mean nothing and stay."""
    experts = (start.ep,) if "ep" in fixed else divisors(start.shape.num_experts)
    schedules = (start.pp_schedule,) if "pp_schedule" in fixed or pp == 1 else tuple(SCHEDULES)
    microbatches = (start.microbatch,) if "microbatch" in fixed or pp == 1 else divisors(local_batch)
    return product(experts, schedules, microbatches)
