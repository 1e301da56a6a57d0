"""How many micro-batches a pipeline rank holds activations of at a time.

A micro-batch's activations live from its forward step to the end of its backward step, or of its wgrad step where a
schedule splits the two. The numbers are properties of the order in which PyTorch 2.14's schedules run
(``torch/distributed/pipelining/schedules.py``); ``tests/unit/test_memory.py`` plays those orders through.
"""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=65_536)
def in_flight(schedule: str, *, pp: int, microbatches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """The fullest moments of a rank: micro-batches held of each of its stages.

    Args:
        schedule: as TorchTitan names it.
        pp: pipeline ranks.
        microbatches: of a step.
        rank: pipeline rank.

    Returns:
        One tuple for each moment that may be the fullest, depending on how large the stages are.

    Example:
        >>> in_flight("1F1B", pp=4, microbatches=16, rank=1)
        ((3,),)
    """
    m = microbatches
    if pp == 1:
        return ((1,),)
    if schedule == "1F1B":
        return ((min(m, pp - rank),),)
    if schedule == "GPipe":
        return ((m,),)
    if schedule == "LoopedBFS":
        return ((m, m),)
    if schedule == "Interleaved1F1B":
        return _interleaved(pp, m, rank)
    if schedule == "InterleavedZeroBubble":
        moments = [(_round(pp, m) + ahead, pp - ahead) for ahead in range(pp + 1)]
    elif schedule == "ZBVZeroBubble":
        moments = [(2 * pp - rank, rank), (2 * pp - 1 - rank, rank + 1)]
    else:  # DualPipeV
        moments = [(2 * pp - rank, rank + 1)]
    return tuple((min(m, first), min(m, second)) for first, second in moments)


def _round(pp: int, m: int) -> int:
    """Micro-batches that pass through one stage of a rank before its other stage's turn."""
    return m // max(1, m // pp)


def _interleaved(pp: int, m: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Forward and backward steps alternate after the warm-up, each between the two stages in rounds."""
    size = _round(pp, m)
    warm_up = min(2 * m, size + 2 * (pp - 1 - rank))
    live = [0, 0]
    moments = set()
    for step in range(2 * m):
        live[step // size % 2] += 1
        if step >= warm_up or step == 2 * m - 1:
            moments.add((live[0], live[1]))
        if step >= warm_up:
            live[1 - (step - warm_up) // size % 2] -= 1
    return tuple(moment for moment in sorted(moments) if not any(_below(moment, other) for other in moments))


def _below(moment: tuple[int, int], other: tuple[int, int]) -> bool:
    return moment != other and moment[0] <= other[0] and moment[1] <= other[1]
