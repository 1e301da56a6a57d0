"""A pipeline played through, event by event: who computes what when, and how long the last rank takes.

Each rank has an order of its own (:func:`order`); a step begins when the rank is free and what it needs has arrived.
Orders are those of torch 2.14, of its two V-shaped schedules that of ZBVZeroBubble: DualPipeV waits as long. After its
first rounds a pipeline repeats itself, so of many micro-batches a part is played and the rest is added at the rate of
the last rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moelab.layout.stages import SCHEDULES, stages_of_rank

PLAYED_ROUNDS, PLAYED_LEAST = 6, 24
"""Rounds of ``pp`` micro-batches, and micro-batches, that are played: what follows is within 0.2 % of a repetition."""


class Event(NamedTuple):
    """One piece of work: ``F`` forward, ``B`` whole backward, ``I`` dgrad alone, ``W`` wgrad alone."""

    kind: str
    stage: int
    microbatch: int


class Durations(NamedTuple):
    """Seconds of one stage and micro-batch, and of a message to the next stage."""

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
    """Play a schedule.

    Args:
        schedule: a name of ``moelab.layout.SCHEDULES``.
        durations: of each stage.
        pp: pipeline ranks.
        microbatches: of a step.
        message_s: seconds between the end of a stage and the beginning of the next.

    Example:
        >>> simulate("1F1B", (Durations(1.0, 1.0, 1.0),) * 2, pp=2, microbatches=4).makespan_s
        15.0
    """
    turns = len(durations) // pp
    owners = owners_of(schedule, pp, turns)
    busy = tuple(microbatches * sum(sum(durations[stage]) for stage in stages) for stages in owners)
    if pp == 1:
        return Played(busy[0], busy)
    shorter = _played_microbatches(pp, microbatches)
    if shorter == microbatches:
        return Played(_play(schedule, durations, pp, microbatches, message_s), busy)
    less = _play(schedule, durations, pp, shorter - pp, message_s)
    more = _play(schedule, durations, pp, shorter, message_s)
    round_s = max(more - less, max(busy) * pp / microbatches)  # no rank goes faster than its own work
    return Played(more + round_s * (microbatches - shorter) / pp, busy)


def owners_of(schedule: str, pp: int, turns: int) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank; Megatron's interleaving may have more than two."""
    if pp > 1 and SCHEDULES[schedule].style == "v":
        return stages_of_rank(SCHEDULES[schedule], pp)
    return tuple(tuple(rank + turn * pp for turn in range(turns)) for rank in range(pp))


def _played_microbatches(pp: int, microbatches: int) -> int:
    """A smaller number that leaves the same remainder and still repeats."""
    most = max(PLAYED_ROUNDS * pp, PLAYED_LEAST // pp * pp)
    if microbatches < most + pp:
        return microbatches
    return most + microbatches % pp


def _play(schedule: str, durations: Sequence[Durations], pp: int, microbatches: int, message_s: float) -> float:
    seconds = [
        float(value) for one in durations for value in (one.forward, one.dgrad + one.wgrad, one.dgrad, one.wgrad)
    ]
    graph = _graph(schedule, pp, microbatches, len(durations) // pp)
    ends = [0.0] * (len(graph) + 1)  # the last stays zero: -1 is what waits for nothing
    late = (0.0, message_s)
    for place, (kind, previous, needed, remote) in enumerate(graph):
        begin, arrival = ends[previous], ends[needed] + late[remote]
        ends[place] = (arrival if arrival > begin else begin) + seconds[kind]
    return max(ends)


@functools.lru_cache(maxsize=256)
def _graph(schedule: str, pp: int, microbatches: int, turns: int) -> tuple[tuple[int, int, int, bool], ...]:
    """Events in an order in which each comes after all it needs.

    Returns:
        Of each event the place of its duration, the places of the events before it on its rank and in the micro-batch,
        -1 for none, and whether the latter is another rank's.
    """
    orders = order(schedule, pp=pp, microbatches=microbatches, turns=turns)
    last_stage = pp * turns - 1
    place: dict[Event, int] = {}
    found: list[tuple[int, int, int, bool]] = []
    ranks: list[int] = []
    heads, previous = [0] * pp, [-1] * pp
    while any(heads[rank] < len(orders[rank]) for rank in range(pp)):
        moved = False
        for rank in range(pp):
            while heads[rank] < len(orders[rank]):
                event = orders[rank][heads[rank]]
                needed = _needs(event, last_stage)
                where = -1 if needed is None else next((place[one] for one in needed if one in place), -2)
                if where == -2:
                    break
                place[event] = len(found)
                remote = where >= 0 and ranks[where] != rank
                found.append((4 * event.stage + "FBIW".index(event.kind), previous[rank], where, remote))
                ranks.append(rank)
                previous[rank] = place[event]
                heads[rank] += 1
                moved = True
        assert moved, "an order that waits for itself"
    return tuple(found)


def _needs(event: Event, last_stage: int) -> tuple[Event, ...] | None:
    """What must be done before; the first of them that is in the order counts."""
    kind, stage, microbatch = event
    if kind == "F":
        return None if stage == 0 else (Event("F", stage - 1, microbatch),)
    if kind == "W":
        return (Event("I", stage, microbatch),)
    if stage == last_stage:
        return (Event("F", stage, microbatch),)
    return Event("I", stage + 1, microbatch), Event("B", stage + 1, microbatch)


@functools.lru_cache(maxsize=256)
def order(schedule: str, *, pp: int, microbatches: int, turns: int) -> tuple[tuple[Event, ...], ...]:
    """What each rank, with ``turns`` stages, computes in order."""
    if SCHEDULES[schedule].style == "v":
        return tuple(tuple(_v_shaped(pp, microbatches, rank)) for rank in range(pp))
    return tuple(tuple(_looped(schedule, pp, microbatches, turns, rank)) for rank in range(pp))


def _looped(schedule: str, pp: int, microbatches: int, turns: int, rank: int) -> Iterator[Event]:
    """Forwards ahead, then one forward and one backward in turns, then backwards."""
    kind = SCHEDULES[schedule]
    size = microbatches // max(1, microbatches // pp) if turns > 1 else 1
    total = turns * microbatches
    if schedule in ("GPipe", "LoopedBFS"):
        size, ahead = microbatches, total
    elif turns == 1:
        ahead = min(total, pp - 1 - rank)
    else:
        ahead = min(total, (turns - 1) * size + (1 if kind.splits_backward else 2) * (pp - 1 - rank))

    def at(step: int, *, backward: bool) -> tuple[int, int]:
        turn = step // size % turns
        turn = turns - 1 - turn if backward else turn
        place = step % size
        if backward and schedule == "LoopedBFS":  # the last micro-batch first
            place = size - 1 - place
        return rank + turn * pp, step // (size * turns) * size + place

    yield from (Event("F", *at(step, backward=False)) for step in range(ahead))
    weights = 0
    for step in range(total):
        if ahead + step < total:
            yield Event("F", *at(ahead + step, backward=False))
        yield Event("I" if kind.splits_backward else "B", *at(step, backward=True))
        if kind.splits_backward and step >= rank:
            yield Event("W", *at(weights, backward=True))
            weights += 1
    if kind.splits_backward:
        yield from (Event("W", *at(step, backward=True)) for step in range(weights, total))


def _v_shaped(pp: int, microbatches: int, rank: int) -> Iterator[Event]:
    """Zero-bubble V (Qi et al. 2024, arXiv 2405.15362): forwards run down one arm of the V and up the other.

    The order is that of 2 pp - 1 micro-batches or more; with fewer, those that are not there leave gaps.
    """
    first, second = rank, 2 * pp - 1 - rank
    padded = max(2 * pp - 1, microbatches)
    counts = dict.fromkeys((("F", first), ("F", second), ("I", first), ("I", second), ("W", first), ("W", second)), 0)

    def take(*wanted: tuple[str, int]) -> Iterator[Event]:
        for kind, stage in wanted:
            counts[kind, stage] += 1
            if counts[kind, stage] <= microbatches:
                yield Event(kind, stage, counts[kind, stage] - 1)

    down, up = (("F", first),), (("I", second), ("W", second))
    for _ in range(2 * (pp - rank) - 1):
        yield from take(*down)
    for _ in range(rank):
        yield from take(("F", second), *down)
    for _ in range(pp - rank):
        yield from take(("F", second), *up)
    while counts["F", second] < padded:
        yield from take(*(down if counts["F", first] < padded else ()), ("I", first), ("W", first))
        yield from take(("F", second), *up)
    for _ in range(rank):
        yield from take(("I", first), ("I", second))
    for _ in range(pp - rank):
        yield from take(("I", first), ("W", first))
    for stage in (second, first):
        yield from take(*[("W", stage)] * (padded - counts["W", stage]))
