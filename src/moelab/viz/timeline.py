"""A pipeline schedule played through: when each pipeline rank computes what, if nothing but the order made it wait.

Forward, dgrad and wgrad of every stage take one unit of time, a whole backward two, and communication none. That is no
prediction: it shows what the order alone costs, as :func:`moelab.layout.bubble_fraction` says in a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moelab.titan.pipeline_order import Step

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time that each kind of work takes."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of work on one pipeline rank, from ``start`` to ``end`` in units of one forward."""

    rank: int
    step: Step
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Blocks of every pipeline rank, in its own order, and when the last one ends."""

    blocks: tuple[tuple[Block, ...], ...]
    end: int

    @property
    def bubble_fraction(self) -> float:
        """Share of the time in which a rank waits, averaged over ranks."""
        work = sum(block.end - block.start for rank in self.blocks for block in rank)
        return 1.0 - work / (self.end * len(self.blocks))

    def waits(self, rank: int) -> list[tuple[int, int]]:
        """Start and end of every idle stretch of a rank."""
        edges = [0, *(edge for block in self.blocks[rank] for edge in (block.start, block.end)), self.end]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pairs if end > start]


def play(order: Sequence[Sequence[Step]]) -> Timeline:
    """Run every rank's steps in order, each as soon as what it needs is there.

    A forward needs the forward of the stage before; a backward or dgrad needs that of the stage behind, and on the last
    stage its own forward; a wgrad needs the dgrad of the same stage.

    Args:
        order: steps of each rank, as :func:`moelab.titan.pipeline_order.pipeline_order` gives them.

    Raises:
        ValueError: if the ranks wait for each other forever.
    """
    last = max(step.stage for rank in order for step in rank)
    done: dict[tuple[str, int, int], int] = {}
    blocks: list[list[Block]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(order):
            while len(blocks[rank]) < len(steps):
                step = steps[len(blocks[rank])]
                ready = 0 if step.kind == "F" and step.stage == 0 else done.get(_needed(step, last))
                if ready is None:
                    break
                start = max(ready, blocks[rank][-1].end if blocks[rank] else 0)
                block = Block(rank=rank, step=step, start=start, end=start + UNITS[step.kind])
                blocks[rank].append(block)
                done[_result(step)] = block.end
                moved = True
    if any(len(made) < len(steps) for made, steps in zip(blocks, order, strict=True)):
        raise ValueError("this order never ends: pipeline ranks wait for each other")
    return Timeline(blocks=tuple(map(tuple, blocks)), end=max(rank[-1].end for rank in blocks))


def _needed(step: Step, last: int) -> tuple[str, int, int]:
    """What must have been computed before a step, as :func:`_result` names it."""
    if step.kind == "F":
        return "F", step.stage - 1, step.microbatch
    if step.kind == "W":
        return "I", step.stage, step.microbatch
    return ("F", last, step.microbatch) if step.stage == last else ("I", step.stage + 1, step.microbatch)


def _result(step: Step) -> tuple[str, int, int]:
    """What a step leaves for others: the gradient of its input, or its output; nobody needs a wgrad."""
    return "I" if step.kind == "B" else step.kind, step.stage, step.microbatch
