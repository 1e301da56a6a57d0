"""Pipeline schedules: which there are, how they cut the model into stages, and which rank holds which stage.

The rules are those of TorchTitan 0.3.0 (``torchtitan/distributed/pipeline_parallel.py``) and of the schedule classes of
torch 2.14 (``torch/distributed/pipelining/schedules.py``); ``tests/unit/test_layout_against_torchtitan.py`` holds them
against both. TorchTitan gives every rank of a multi-stage schedule two stages, and counts the embedding and the output
as one layer each when it shares layers out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

FIRST_STAGE_LESS_LAYERS = 1
"""Layers that the embedding counts for; TorchTitan's default."""
LAST_STAGE_LESS_LAYERS = 1
"""Layers that the final norm and the vocabulary head count for; TorchTitan's default."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: as TorchTitan spells it.
        stages_per_rank: 1, or 2 for a schedule of several stages.
        style: ``loop`` (rank r holds stages r and r + pp) or ``v`` (stages r and 2 pp - 1 - r).
        splits_backward: whether dgrad and wgrad are separate steps (zero-bubble schedules).
        least_microbatches: micro-batches that a number of stages needs.
        whole_rounds: whether micro-batches must divide into rounds of about ``pp``.
    """

    name: str
    stages_per_rank: int
    style: str = "loop"
    splits_backward: bool = False
    least_microbatches: Callable[[int], int] = lambda _stages: 1
    whole_rounds: bool = False

    def takes(self, microbatches: int, pp: int) -> bool:
        """Whether the schedule can run this many micro-batches on ``pp`` ranks."""
        if microbatches < self.least_microbatches(pp * self.stages_per_rank):
            return False
        return not self.whole_rounds or microbatches % max(1, microbatches // pp) == 0


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="1F1B", stages_per_rank=1, least_microbatches=lambda stages: stages),
        Schedule(name="GPipe", stages_per_rank=1),
        Schedule(name="Interleaved1F1B", stages_per_rank=2, whole_rounds=True),
        Schedule(name="LoopedBFS", stages_per_rank=2),
        Schedule(name="InterleavedZeroBubble", stages_per_rank=2, splits_backward=True, whole_rounds=True),
        Schedule(name="ZBVZeroBubble", stages_per_rank=2, style="v", splits_backward=True),
        Schedule(
            name="DualPipeV",
            stages_per_rank=2,
            style="v",
            splits_backward=True,
            least_microbatches=lambda stages: stages,
        ),
    )
}


def schedule_in_any_case(name: str) -> Schedule | None:
    """The schedule of a name as torch reads it, which does not mind the case of letters; TorchTitan's logging does."""
    return next((schedule for known, schedule in SCHEDULES.items() if known.lower() == name.lower()), None)


def effective_layers(n_layers: int) -> int:
    """Layers as TorchTitan counts them when it shares them out over stages.

    >>> effective_layers(61)
    63
    """
    return n_layers + FIRST_STAGE_LESS_LAYERS + LAST_STAGE_LESS_LAYERS


@lru_cache(maxsize=1024)
def split_layers(n_layers: int, n_stages: int) -> tuple[tuple[str, ...], ...]:
    """Names of the modules of each stage.

    The first ``effective % n_stages`` stages get one effective layer more. A first or last stage may have no layer at
    all, only the embedding or the output.

    Args:
        n_layers: transformer layers of the model.
        n_stages: stages in total, at most the effective layers.

    >>> split_layers(3, 2)
    (('tok_embeddings', 'layers.0', 'layers.1'), ('layers.2', 'norm', 'lm_head'))
    """
    least, more = divmod(effective_layers(n_layers), n_stages)
    assert least >= 1, "more stages than effective layers"
    counts = [least + (stage < more) for stage in range(n_stages)]
    counts[0] -= FIRST_STAGE_LESS_LAYERS
    counts[-1] -= LAST_STAGE_LESS_LAYERS
    stages, layer = [], 0
    for count in counts:
        stages.append([f"layers.{number}" for number in range(layer, layer + count)])
        layer += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return tuple(tuple(stage) for stage in stages)


@lru_cache(maxsize=1024)
def stages_of_rank(schedule: Schedule, pp: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the stages that each of ``pp`` ranks holds.

    >>> stages_of_rank(SCHEDULES["ZBVZeroBubble"], 2)
    ((0, 3), (1, 2))
    """
    if pp == 1:
        return ((0,),)
    if schedule.style == "v":
        return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))
    return tuple(tuple(rank + turn * pp for turn in range(schedule.stages_per_rank)) for rank in range(pp))


def rank_with_loss(schedule: Schedule, pp: int) -> int:
    """Pipeline rank that holds the last stage and so the loss."""
    return 0 if schedule.style == "v" else pp - 1


def bubble_fraction(schedule: Schedule, *, pp: int, microbatches: int) -> float:
    r"""Share of a step in which a pipeline rank waits, from the order of the schedule alone.

    Forward, dgrad and wgrad of a stage are taken to cost the same and communication nothing: the figure orders
    schedules and predicts no time. In units of one of the three, with *p* ranks, *m* micro-batches and *v* stages a
    rank, the work is :math:`3 v m` and the wait :math:`3 (p - 1)`, or :math:`p - 1` where dgrad and wgrad are apart.
    Schedules of two stages wait longer when they have too few micro-batches to fill the pipeline. The formulas equal
    what the orders of torch 2.14's schedule classes give when they are played through (``tests/unit/test_layout.py``).

    Returns:
        A number from 0 (no wait) to below 1; 0 without a pipeline.

    References:
        Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Qi et al. 2023 (arXiv 2401.10241), sections 2 and 6.

    >>> round(bubble_fraction(SCHEDULES["1F1B"], pp=2, microbatches=64), 4)
    0.0154
    """
    if pp == 1:
        return 0.0
    work = 3 * schedule.stages_per_rank * microbatches
    wait = _wait(schedule, pp, microbatches)
    return wait / (work + wait)


def _wait(schedule: Schedule, pp: int, microbatches: int) -> int:
    """Idle time of a rank in units of one forward of one stage and micro-batch."""
    missing = max(0, pp - microbatches)
    if schedule.style == "v":
        return max(pp - 1, 2 * (2 * pp - 1 - microbatches))
    if schedule.splits_backward:
        return pp - 1 + 2 * missing + max(0, pp - 2 * microbatches)
    return 3 * (pp - 1) + 3 * missing * (schedule.stages_per_rank - 1)
