"""The order in which each pipeline rank computes, as torch's own schedule classes have it. No GPU, no process group.

Schedules of two stages a rank are asked of the classes of torch 2.14 (``torch/distributed/pipelining/schedules.py``).
Their constructors want stages and process groups, so an instance is made without one and given the few attributes that
its calculation reads. GPipe and 1F1B are written out from their ``_step_microbatches``, because the order that torch
derives for them (``_get_pipeline_order``) counts the micro-batches of the last rank from 1.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from moelab.layout import SCHEDULES

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, dgrad alone (torch's *backward input*), wgrad alone (*backward weight*)."""


class Step(NamedTuple):
    """One piece of work of a pipeline rank."""

    kind: Kind
    stage: int
    microbatch: int


def pipeline_order(schedule: str, *, pp: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """What each of ``pp`` ranks computes, in order.

    Args:
        schedule: a name of ``moelab.layout.SCHEDULES``.
        pp: pipeline ranks.
        microbatches: micro-batches of a step.

    Raises:
        ValueError: if the schedule cannot run this many micro-batches.

    Example:
        >>> [f"{kind}{microbatch}" for kind, _, microbatch in pipeline_order("1F1B", pp=2, microbatches=2)[0]]
        ['F0', 'F1', 'B0', 'B1']
    """
    if not SCHEDULES[schedule].takes(microbatches, pp):
        raise ValueError(f"{schedule} on {pp} pipeline ranks cannot run {microbatches} micro-batches")
    if SCHEDULES[schedule].stages_per_rank == 1:
        # Forwards of a rank before its first backward.
        ahead = [microbatches if schedule == "GPipe" else min(microbatches, pp - rank) for rank in range(pp)]
        return tuple(_one_stage(rank, ahead[rank], microbatches) for rank in range(pp))
    return tuple(tuple(_steps(actions)) for actions in _torch_order(schedule, pp, microbatches))


def _one_stage(stage: int, ahead: int, microbatches: int) -> tuple[Step, ...]:
    """Forwards run ``ahead`` of the backwards, then take turns with them."""
    steps = [Step("F", stage, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        steps.append(Step("B", stage, microbatch))
        if ahead + microbatch < microbatches:
            steps.append(Step("F", stage, ahead + microbatch))
    return tuple(steps)


def _torch_order(name: str, pp: int, microbatches: int) -> list[list[Any]]:
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(name)
    schedule = kind.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches = pp, microbatches
    schedule.n_local_stages, schedule._stages = 2, [None, None]
    schedule.num_stages = schedule._num_stages = 2 * pp
    schedule.number_of_rounds = max(1, microbatches // pp)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return [schedule._calculate_single_rank_operations(rank) for rank in range(pp)]


def _steps(actions: list[Any]) -> list[Step]:
    """Computation alone: idle slots left out, a forward overlapped with a backward as one after the other."""
    steps: list[Step] = []
    for action in actions:
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            steps.append(Step(part.computation_type.value, part.stage_index, part.microbatch_index))
    return steps
