"""The clock of the experiments: marks on a stream of GPU work, and the times between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
        for index, (part, _) in enumerate(self.marks[1:]):
            parts[part] = parts.get(part, 0.0) + self._between_us(index, index + 1)
        return parts

    def total_us(self) -> float:
        """Microseconds from the first mark to the last; waits for the device."""
        if self.gpu:
            torch.cuda.synchronize()
        return self._between_us(0, -1)

    def _between_us(self, first: int, last: int) -> float:
        begin, end = self.marks[first][1], self.marks[last][1]
        # CUDA tells milliseconds, the host's clock seconds.
        return float(begin.elapsed_time(end) * 1e3 if self.gpu else (end - begin) * 1e6)


def interquartile_range(times_us: Sequence[float]) -> float:
    """Distance of the upper quartile from the lower, of at least two times.

    Example:
        >>> interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0])
        2.0
    """
    low, _, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return high - low
