"""The pipeline played through: against closed forms, torch's own orders, a brute force, and laws."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.layout import SCHEDULES, bubble_fraction
from moelab.projection.pipeline_simulation import Durations, _play, order, owners_of, simulate
from moelab.titan.pipeline_order import pipeline_order

SECONDS = st.floats(0.1, 10.0)
NAMES = sorted(SCHEDULES)


def durations_of(name: str, pp: int, values: Sequence[float]) -> tuple[Durations, ...]:
    stages = pp * SCHEDULES[name].stages_per_rank
    return tuple(Durations(*(values[(3 * stage + kind) % len(values)] for kind in range(3))) for stage in range(stages))


def brute_force(name: str, durations: Sequence[Durations], pp: int, microbatches: int, message_s: float) -> float:
    """Torch's order, played by looking again and again for a rank that can go on."""
    orders = [list(rank) for rank in pipeline_order(name, pp=pp, microbatches=microbatches)]
    last = len(durations) - 1
    ends: dict[tuple[str, int, int], tuple[float, int]] = {}
    free = [0.0] * pp
    while any(orders):
        for rank, steps in enumerate(orders):
            if not steps:
                continue
            kind, stage, microbatch = steps[0]
            if kind == "F" and stage > 0:
                found = ends.get(("F", stage - 1, microbatch))
            elif kind == "W":
                found = ends.get(("I", stage, microbatch))
            elif kind in "BI":
                before = ("F", stage) if stage == last else ("B", stage + 1)
                found = ends.get((*before, microbatch), ends.get(("I", stage + 1, microbatch)))
            else:
                found = (0.0, rank)
            if found is None:
                continue
            arrival = found[0] + (message_s if found[1] != rank else 0.0)
            one = durations[stage]
            seconds = {"F": one.forward, "B": one.dgrad + one.wgrad, "I": one.dgrad, "W": one.wgrad}[kind]
            free[rank] = max(free[rank], arrival) + seconds
            ends[kind, stage, microbatch] = free[rank], rank
            steps.pop(0)
    return max(free)


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_wait_as_the_closed_form_says(name: str) -> None:
    for pp in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 8, 12, 16, 24, 64, 128):
            if pp > 1 and not SCHEDULES[name].takes(microbatches, pp):
                continue
            played = simulate(name, durations_of(name, pp, [1.0]), pp=pp, microbatches=microbatches)
            expected = bubble_fraction(SCHEDULES[name], pp=pp, microbatches=microbatches)
            assert 1 - played.busy_s[0] / played.makespan_s == pytest.approx(expected, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([name for name in NAMES if name != "DualPipeV"]),
    pp=st.integers(2, 4),
    rounds=st.integers(1, 3),
    values=st.lists(SECONDS, min_size=5, max_size=24),
    message_s=st.floats(0.0, 1.0),
)
def test_it_takes_as_long_as_torchs_order_does(
    name: str, pp: int, rounds: int, values: list[float], message_s: float
) -> None:
    durations = durations_of(name, pp, values)
    if not SCHEDULES[name].takes(pp * rounds, pp):
        return
    played = simulate(name, durations, pp=pp, microbatches=pp * rounds, message_s=message_s)
    assert played.makespan_s == pytest.approx(brute_force(name, durations, pp, pp * rounds, message_s))


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pp=st.integers(2, 4),
    more=st.integers(0, 3),
    values=st.lists(SECONDS, min_size=6, max_size=24),
)
def test_many_microbatches_take_as_long_as_if_all_were_played(
    name: str, pp: int, more: int, values: list[float]
) -> None:
    microbatches = (16 + more) * pp
    durations = durations_of(name, pp, values)
    alike = tuple(one._replace(forward=4 + one.forward / 20, dgrad=4 + one.dgrad / 20, wgrad=3.0) for one in durations)
    # Of 20,000 drawn, stages within 15 % of each other, as models have, were off by 1 % at worst, any stages by 6 %.
    for stages, tolerance in ((alike, 0.015), (durations, 0.08)):
        whole = _play(name, stages, pp, microbatches, 0.0)
        found = simulate(name, stages, pp=pp, microbatches=microbatches).makespan_s
        assert found == pytest.approx(whole, rel=tolerance)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(1, 4), values=st.lists(SECONDS, min_size=6, max_size=24))
def test_no_rank_is_done_before_its_own_work_and_longer_work_is_never_faster(
    name: str, pp: int, values: list[float]
) -> None:
    durations = durations_of(name, pp, values)
    if pp == 1:
        durations = durations[:1]
    played = simulate(name, durations, pp=pp, microbatches=2 * pp)
    assert played.makespan_s >= max(played.busy_s) * (1 - 1e-12)
    longer = (durations[0]._replace(forward=durations[0].forward + 1), *durations[1:])
    assert simulate(name, longer, pp=pp, microbatches=2 * pp).makespan_s >= played.makespan_s


@pytest.mark.parametrize("name", [name for name in NAMES if name != "DualPipeV"])
def test_the_order_is_torchs(name: str) -> None:
    for pp, microbatches in ((2, 4), (4, 8), (4, 12)):
        if SCHEDULES[name].takes(microbatches, pp):
            turns = SCHEDULES[name].stages_per_rank
            mine = order(name, pp=pp, microbatches=microbatches, turns=turns)
            theirs = pipeline_order(name, pp=pp, microbatches=microbatches)
            assert [[tuple(step) for step in rank] for rank in mine] == [
                [tuple(step) for step in rank] for rank in theirs
            ]


def test_more_turns_of_interleaving_shorten_the_wait_as_published() -> None:
    """Narayanan et al. 2021, section 2.2: with v turns the bubble is (p - 1) / (v m) of the work."""
    for turns in (1, 2, 4, 8):
        stages = (Durations(1.0 / turns, 1.0 / turns, 1.0 / turns),) * (4 * turns)
        name = "Interleaved1F1B" if turns > 1 else "1F1B"
        played = simulate(name, stages, pp=4, microbatches=16)
        assert played.makespan_s / played.busy_s[0] - 1 == pytest.approx(3 / (turns * 16))
    assert owners_of("Interleaved1F1B", 2, 3) == ((0, 2, 4), (1, 3, 5))
