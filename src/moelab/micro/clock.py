"""The clock of the experiments: marks on a stream of GPU work, and the times between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

HEAD_START_CYCLES = 2_000_000
"""About 1 ms: more than the host needs to queue a compiled forward and backward."""


class Marks:
    """Splits work into named parts, each ended by a ``mark``.

    On a GPU the marks are CUDA events of the current stream: a part includes what the GPU waits for in it, a host that
    reads a count back, too. Without one they are times of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def start(self, meet: Callable[[], object] = lambda: None) -> None:
        """Set the first mark when the host is ahead of the GPU, so that the host's own time is not measured.

        Args:
            meet: called before the mark; ranks wait for each other in it.
        """
        self.marks = []
        if self.gpu:
            torch.cuda._sleep(HEAD_START_CYCLES)
        meet()
        self.mark("start")

    def mark(self, part: str) -> None:
        """End a part: what was queued since the last mark belongs to it."""
        if not self.gpu:
            self.marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # only queued: the GPU notes the time when it comes to it
        self.marks.append((part, event))

    def parts_us(self) -> dict[str, float]:
        """Microseconds of each part after the first mark, summed where a name returns; waits for the device."""
        if self.gpu:
            torch.cuda.synchronize()  # an event that was not reached yet has no time
        parts: dict[str, float] = {}
        for (_, begin), (part, end) in pairwise(self.marks):
            # CUDA tells milliseconds, the host's clock seconds.
            us = begin.elapsed_time(end) * 1e3 if self.gpu else (end - begin) * 1e6
            parts[part] = parts.get(part, 0.0) + us
        return parts


def median_and_iqr(times: Sequence[float]) -> tuple[float, float]:
    """The median of at least two times, and the distance of the upper quartile from the lower.

    Example:
        >>> median_and_iqr([1.0, 2.0, 3.0, 4.0, 5.0])
        (3.0, 2.0)
    """
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return middle, high - low
