"""Marks on a stream of GPU work, and the times between them: what both micro-experiments' clocks are made of."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Splits work into named parts, each ended by a ``mark``.

    On a GPU the marks are CUDA events of the current stream: a part includes what the GPU waits for in it, a host that
    reads a count back, too. Without one they are times of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """End a part: what was queued since the last mark belongs to it."""
        if not self.gpu:
            self.marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((part, event))

    def parts_us(self) -> dict[str, float]:
        """Microseconds of each part after the first mark, summed where a name returns; waits for the device."""
        if self.gpu:
            torch.cuda.synchronize()
        parts: dict[str, float] = {}
        for index, (part, _) in enumerate(self.marks[1:]):
            parts[part] = parts.get(part, 0.0) + self.between_us(index, index + 1)
        return parts

    def between_us(self, first: int, last: int) -> float:
        """Microseconds between two marks, by their numbers; the device has passed both."""
        begin, end = self.marks[first][1], self.marks[last][1]
        return float(begin.elapsed_time(end) * 1e3 if self.gpu else (end - begin) * 1e6)
