"""Pipeline schedules: how they cut the model into stages, and in which order each rank computes.

Everything about a schedule follows from its order (:func:`pipeline_order`): how many micro-batches a rank holds at a
time (:func:`in_flight`), how long a step takes (:func:`simulate`), when each rank computes what (:func:`timeline`).
Only :func:`bubble_fraction` is a formula, because a search asks for it thousands of times; tests hold it against the
order played through.

The rules are those of TorchTitan 0.3.0 (``torchtitan/distributed/pipeline_parallel.py``) and of the schedule classes of
torch 2.14 (``torch/distributed/pipelining/schedules.py``); ``tests/unit/test_layout_against_torchtitan.py`` and
``tests/unit/test_schedule.py`` hold them against both. TorchTitan gives every rank of a multi-stage schedule two
stages unless it is told which modules make a stage, and counts the embedding and the output as one layer each when it
shares layers out.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

FIRST_STAGE_LESS_LAYERS = 1
"""Layers that the embedding counts for; TorchTitan's default."""
LAST_STAGE_LESS_LAYERS = 1
"""Layers that the final norm and the vocabulary head count for; TorchTitan's default."""
PLAYED_ROUNDS, PLAYED_LEAST = 6, 24
"""Rounds of ``pp`` micro-batches, and micro-batches, that are played: what follows is within 0.2 % of a repetition."""
HELD_ROUNDS = 4
"""Rounds of ``pp`` micro-batches, after which a rank holds no more than before."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One pipeline schedule."""

    name: str
    stages_per_rank: int  # 1, or 2 for a schedule of several stages, of which a ``loop`` takes more
    style: str = "loop"  # ``loop`` (rank r holds stages r and r + pp) or ``v`` (stages r and 2 pp - 1 - r)
    splits_backward: bool = False  # whether dgrad and wgrad are separate steps (zero-bubble schedules)
    fills_stages: bool = False  # whether it needs a micro-batch for each stage
    whole_rounds: bool = False  # whether micro-batches must divide into rounds of about ``pp``

    def least_microbatches(self, pp: int) -> int:
        """Micro-batches that ``pp`` ranks need at least."""
        return pp * self.stages_per_rank if self.fills_stages else 1

    def takes(self, microbatches: int, pp: int) -> bool:
        """Whether the schedule can run this many micro-batches on ``pp`` ranks."""
        if microbatches < self.least_microbatches(pp):
            return False
        # torch makes microbatches // pp rounds, and raises where they are not equal.
        return not self.whole_rounds or microbatches % max(1, microbatches // pp) == 0


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="1F1B", stages_per_rank=1, fills_stages=True),
        Schedule(name="GPipe", stages_per_rank=1),
        Schedule(name="Interleaved1F1B", stages_per_rank=2, whole_rounds=True),
        Schedule(name="LoopedBFS", stages_per_rank=2),
        Schedule(name="InterleavedZeroBubble", stages_per_rank=2, splits_backward=True, whole_rounds=True),
        Schedule(name="ZBVZeroBubble", stages_per_rank=2, style="v", splits_backward=True),
        Schedule(name="DualPipeV", stages_per_rank=2, style="v", splits_backward=True, fills_stages=True),
    )
}
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules in which every forward comes before the first backward."""


def effective_layers(n_layers: int) -> int:
    """Layers as TorchTitan counts them when it shares them out over stages.

    >>> effective_layers(61)
    63
    """
    return n_layers + FIRST_STAGE_LESS_LAYERS + LAST_STAGE_LESS_LAYERS


@functools.lru_cache(maxsize=1024)
def split_layers(n_layers: int, n_stages: int) -> tuple[tuple[str, ...], ...]:
    """Names of the modules of each stage.

    The first ``effective % n_stages`` stages get one effective layer more. A first or last stage may have no layer at
    all, only the embedding or the output.

    >>> split_layers(3, 2)
    (('tok_embeddings', 'layers.0', 'layers.1'), ('layers.2', 'norm', 'lm_head'))
    """
    least, more = divmod(effective_layers(n_layers), n_stages)
    assert least >= 1, "more stages than effective layers"
    counts = [least + (stage < more) for stage in range(n_stages)]
    # What the embedding and the output count for holds no layer.
    counts[0] -= FIRST_STAGE_LESS_LAYERS
    counts[-1] -= LAST_STAGE_LESS_LAYERS
    stages, layer = [], 0
    for count in counts:
        stages.append([f"layers.{number}" for number in range(layer, layer + count)])
        layer += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return tuple(tuple(stage) for stage in stages)


@functools.lru_cache(maxsize=1024)
def stages_of_rank(schedule: Schedule, pp: int, turns: int = 0) -> tuple[tuple[int, ...], ...]:
    """Numbers of the stages that each of ``pp`` ranks holds.

    ``turns`` are stages of a rank; 0 for the schedule's own. A loop of several stages may have more than two.

    >>> stages_of_rank(SCHEDULES["ZBVZeroBubble"], 2)
    ((0, 3), (1, 2))
    """
    if pp == 1:
        return (tuple(range(turns or 1)),)
    if schedule.style == "v":
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(rank + turn * pp for turn in range(turns or schedule.stages_per_rank)) for rank in range(pp))


def rank_with_loss(schedule: Schedule, pp: int) -> int:
    """Pipeline rank that holds the last stage and so the loss."""
    return 0 if schedule.style == "v" else pp - 1


class Action(NamedTuple):
    """One piece of work of a pipeline rank.

    ``F`` is a forward, ``B`` a whole backward, ``I`` dgrad alone (torch's *backward input*), ``W`` wgrad alone
    (*backward weight*).
    """

    kind: str
    stage: int
    microbatch: int


@functools.lru_cache(maxsize=256)
def pipeline_order(schedule: str, *, pp: int, microbatches: int, turns: int = 0) -> tuple[tuple[Action, ...], ...]:
    """What each of ``pp`` ranks computes, in order, as torch 2.14 runs it.

    A forward that DualPipeV overlaps with a backward comes before it.

    Raises:
        ValueError: if the schedule cannot run this many micro-batches.

    >>> [f"{kind}{microbatch}" for kind, _, microbatch in pipeline_order("1F1B", pp=2, microbatches=2)[0]]
    ['F0', 'F1', 'B0', 'B1']
    """
    if pp > 1 and not SCHEDULES[schedule].takes(microbatches, pp):
        raise ValueError(f"{schedule} on {pp} pipeline ranks cannot run {microbatches} micro-batches")
    if SCHEDULES[schedule].style == "v":
        return tuple(tuple(_v_shaped(schedule, pp, microbatches, rank)) for rank in range(pp))
    turns = turns or SCHEDULES[schedule].stages_per_rank
    return tuple(tuple(_looped(schedule, pp, microbatches, turns, rank)) for rank in range(pp))


def _looped(schedule: str, pp: int, microbatches: int, turns: int, rank: int) -> Iterator[Action]:
    """Forwards ahead, then one forward and one backward in turns, then backwards."""
    kind = SCHEDULES[schedule]
    # Micro-batches of a round: torch makes rounds of about pp, and a rank changes its stage after each.
    size = microbatches // max(1, microbatches // pp) if turns > 1 else 1
    total = turns * microbatches
    if schedule in FORWARDS_FIRST:
        size, ahead = microbatches, total
    elif turns == 1:
        ahead = min(total, pp - 1 - rank)
    else:
        # Torch sends twice as many ahead where a rank has several stages, unless dgrad alone lets the next rank go on.
        ahead = min(total, (turns - 1) * size + (1 if kind.splits_backward else 2) * (pp - 1 - rank))

    def at(step: int, *, backward: bool) -> tuple[int, int]:
        turn = step // size % turns
        turn = turns - 1 - turn if backward else turn
        place = step % size
        if backward and schedule == "LoopedBFS":  # the last micro-batch first
            place = size - 1 - place
        return rank + turn * pp, step // (size * turns) * size + place

    yield from (Action("F", *at(step, backward=False)) for step in range(ahead))
    weights = 0
    for step in range(total):
        if ahead + step < total:
            yield Action("F", *at(ahead + step, backward=False))
        yield Action("I" if kind.splits_backward else "B", *at(step, backward=True))
        # A rank may put off as many wgrads as there are ranks before it, which fill its wait at the end.
        if kind.splits_backward and step >= rank:
            yield Action("W", *at(weights, backward=True))
            weights += 1
    if kind.splits_backward:
        yield from (Action("W", *at(step, backward=True)) for step in range(weights, total))


def _v_shaped(schedule: str, pp: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Forwards run down one arm of the V and up the other: ``F0`` is a forward of the first arm, ``B1`` of the second.

    Zero-bubble V (Qi et al. 2024, arXiv 2405.15362) has the order of 2 pp - 1 micro-batches or more; with fewer, those
    that are not there leave gaps. DualPipe cut in half (github.com/deepseek-ai/DualPipe) has whole backwards, split
    where a rank would wait; ``W`` is then the wgrad that has waited longest.
    """
    behind, half = pp - 1 - rank, (rank + 1) // 2
    orders = {
        "ZBVZeroBubble": (
            (2 * behind + 1, "F0"),
            (rank, "F1 F0"),
            (behind + 1, "F1 I1 W1"),
            (max(2 * pp - 1, microbatches) - pp, "F0 I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (behind + 1, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ),
        "DualPipeV": (
            (2 * behind, "F0"),
            (rank + 1, "F0 F1"),
            (behind, "I1 W F1"),
            (microbatches - 2 * pp + rank + 1, "F0 B1 F1 B0"),
            (behind, "B1 F1 B0"),
            (half, "B1 B0"),
            (rank + 1 - 2 * half, "B1 I0"),
            (half, "I1 I0"),
            (behind, "W I0"),
            (rank + 1, "W"),
        ),
    }
    stages, counts, waiting = (rank, 2 * pp - 1 - rank), Counter[tuple[str, int]](), deque[Action]()
    for times, actions in orders[schedule]:
        for step in actions.split() * times:
            if step == "W":
                if waiting:
                    yield waiting.popleft()
                continue
            kind, stage = step[0], stages[int(step[1])]
            counted = "B" if kind == "I" else kind, stage
            action = Action(kind, stage, counts[counted])
            counts[counted] += 1
            if kind == "I":
                waiting.append(action._replace(kind="W"))
            if action.microbatch < microbatches:
                yield action


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, *, pp: int, microbatches: int, rank: int, turns: int = 0) -> tuple[tuple[int, ...], ...]:
    """The fullest moments of a rank: micro-batches of each of its stages whose activations it holds.

    They live from the forward step to the end of the backward step, or of the wgrad step where the two are apart.

    There is one tuple for each moment that may be the fullest, depending on how large the stages are.

    >>> in_flight("1F1B", pp=4, microbatches=16, rank=1)
    ((3,),)
    """
    if pp == 1:
        return ((1,),)
    place = {stage: index for index, stage in enumerate(stages_of_rank(SCHEDULES[schedule], pp, turns)[rank])}
    if schedule in FORWARDS_FIRST:
        return ((microbatches,) * len(place),)
    if microbatches % pp == 0:  # whole rounds repeat themselves after the third; a remainder would change their size
        microbatches = min(microbatches, HELD_ROUNDS * pp)
    held = [0] * len(place)
    moments: set[tuple[int, ...]] = set()
    for kind, stage, _ in pipeline_order(schedule, pp=pp, microbatches=microbatches, turns=turns)[rank]:
        if kind == "F":
            held[place[stage]] += 1
            moments.add(tuple(held))
        elif kind != "I":
            held[place[stage]] -= 1

    def is_exceeded(moment: tuple[int, ...]) -> bool:
        return any(other != moment and all(map(operator.ge, other, moment)) for other in moments)

    return tuple(moment for moment in sorted(moments) if not is_exceeded(moment))


def bubble_fraction(schedule: Schedule, *, pp: int, microbatches: int, turns: int = 0) -> float:
    r"""Share of a step in which a pipeline rank waits, from the order of the schedule alone.

    Forward, dgrad and wgrad of a stage are taken to cost the same and communication nothing: the figure orders
    schedules and predicts no time. In units of one of the three, with *p* ranks, *m* micro-batches and *v* stages a
    rank, the work is :math:`3 v m` and the wait :math:`3 (p - 1)`, or :math:`p - 1` where dgrad and wgrad are apart.
    Schedules of several stages wait longer when they have too few micro-batches to fill the pipeline.

    References:
        Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Qi et al. 2023 (arXiv 2401.10241), sections 2 and 6.

    >>> round(bubble_fraction(SCHEDULES["1F1B"], pp=2, microbatches=64), 4)
    0.0154
    """
    if pp == 1:
        return 0.0
    missing, turns = max(0, pp - microbatches), turns or schedule.stages_per_rank
    if schedule.style == "v":
        wait = max(pp - 1, 2 * (2 * pp - 1 - microbatches))
    elif schedule.splits_backward:
        wait = pp - 1 + turns * missing + (turns - 1) * max(0, pp - 2 * microbatches)
    else:
        wait = 3 * (pp - 1) + 3 * missing * (turns - 1)
    return wait / (3 * turns * microbatches + wait)


class Durations(NamedTuple):
    """Seconds of one stage and micro-batch."""

    forward: float
    dgrad: float
    wgrad: float


class Played(NamedTuple):
    """When the pipeline is done, and the seconds in which each rank computes."""

    makespan_s: float
    busy_s: tuple[float, ...]


@functools.lru_cache(maxsize=4096)
def simulate(
    schedule: str, durations: tuple[Durations, ...], *, pp: int, microbatches: int, message_s: float = 0.0
) -> Played:
    """Play a schedule: an action begins when its rank is free and what it needs has arrived.

    After its first rounds a pipeline repeats itself, so of many micro-batches a part is played and the rest is added
    at the rate of the last rounds.

    ``message_s`` are seconds between the end of a stage and the beginning of the next.

    >>> simulate("1F1B", (Durations(1.0, 1.0, 1.0),) * 2, pp=2, microbatches=4).makespan_s
    15.0
    """
    if pp == 1:  # the schedule means nothing, and its name may be anything
        busy_s = microbatches * sum(map(sum, durations))
        return Played(busy_s, (busy_s,))
    owners = stages_of_rank(SCHEDULES[schedule], pp, len(durations) // pp)
    busy = tuple(microbatches * sum(sum(durations[stage]) for stage in stages) for stages in owners)
    # A smaller number that leaves the same remainder and still repeats: 126 micro-batches on 16 ranks are 7 rounds of
    # 18; 110 of them would be no whole rounds, which have no order.
    shorter, kind = max(PLAYED_ROUNDS * pp, PLAYED_LEAST // pp * pp) + microbatches % pp, SCHEDULES[schedule]
    if shorter >= microbatches or not (kind.takes(shorter, pp) and kind.takes(shorter - pp, pp)):
        return Played(max(_ends(schedule, durations, pp, microbatches, message_s)), busy)
    whole = max(_ends(schedule, durations, pp, shorter, message_s))
    less = max(_ends(schedule, durations, pp, shorter - pp, message_s))
    round_s = max(whole - less, max(busy) * pp / microbatches)  # no rank goes faster than its own work
    return Played(whole + round_s * (microbatches - shorter) / pp, busy)


class Block(NamedTuple):
    """One action of a pipeline rank, from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


def timeline(
    schedule: str, durations: Sequence[Durations], *, pp: int, microbatches: int
) -> tuple[tuple[Block, ...], ...]:
    """When each of ``pp`` ranks computes what, if nothing but the order makes it wait.

    >>> timeline("GPipe", [Durations(1, 1, 1)] * 2, pp=2, microbatches=1)[0]
    (Block(action=Action(kind='F', stage=0, microbatch=0), start=0, end=1), \
Block(action=Action(kind='B', stage=0, microbatch=0), start=4, end=6))
    """
    graph = _graph(schedule, pp, microbatches, len(durations) // pp)
    ends = dict(zip(graph.actions, _ends(schedule, durations, pp, microbatches, 0), strict=True))
    seconds = _seconds(durations)
    return tuple(
        tuple(Block(action, ends[action] - seconds[_place(action)], ends[action]) for action in rank)
        for rank in pipeline_order(schedule, pp=pp, microbatches=microbatches, turns=len(durations) // pp)
    )


def _seconds(durations: Sequence[Durations]) -> list[float]:
    """Of every kind of action on every stage, as :func:`_place` counts them."""
    return [value for one in durations for value in (one.forward, one.dgrad + one.wgrad, one.dgrad, one.wgrad)]


def _place(action: Action) -> int:
    return 4 * action.stage + "FBIW".index(action.kind)


def _ends(schedule: str, durations: Sequence[Durations], pp: int, microbatches: int, message_s: float) -> list[float]:
    """When each action ends, in the order of the graph."""
    seconds = _seconds(durations)
    steps = _graph(schedule, pp, microbatches, len(durations) // pp).steps
    ends: list[float] = [0] * (len(steps) + 1)  # the last stays zero: -1 is what waits for nothing
    late = (0, message_s)
    for place, (kind, previous, needed, remote) in enumerate(steps):
        begin, arrival = ends[previous], ends[needed] + late[remote]
        ends[place] = (arrival if arrival > begin else begin) + seconds[kind]
    return ends[:-1]


class _Graph(NamedTuple):
    """Actions in an order in which each comes after all it needs.

    ``steps`` has of each action the place of its duration, the places of the actions before it on its rank and in its
    micro-batch, -1 for none, and whether the latter is another rank's.
    """

    actions: tuple[Action, ...]
    steps: tuple[tuple[int, int, int, bool], ...]


def _needed(action: Action, last_stage: int) -> list[Action]:
    """What an action waits for, but for those before it on its rank: the first of these that the order has."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)]
    if kind == "W" or stage == last_stage:
        return [Action("I" if kind == "W" else "F", stage, microbatch)]
    return [Action("I", stage + 1, microbatch), Action("B", stage + 1, microbatch)]  # with its wgrad or without


@functools.lru_cache(maxsize=256)
def _graph(schedule: str, pp: int, microbatches: int, turns: int) -> _Graph:
    orders = pipeline_order(schedule, pp=pp, microbatches=microbatches, turns=turns)
    rank_of = {action: rank for rank, order in enumerate(orders) for action in order}
    previous = {after: before for order in orders for before, after in pairwise(order)}
    needed = {
        action: next((one for one in _needed(action, pp * turns - 1) if one in rank_of), None) for action in rank_of
    }
    after = {action: [one for one in (previous.get(action), needed[action]) if one] for action in rank_of}
    actions = tuple(TopologicalSorter(after).static_order())
    place: dict[Action | None, int] = {None: -1, **{action: number for number, action in enumerate(actions)}}
    steps = []
    for action in actions:
        other_rank = (one := needed[action]) is not None and rank_of[one] != rank_of[action]
        steps.append((_place(action), place[previous.get(action)], place[one], other_rank))
    return _Graph(actions, tuple(steps))
