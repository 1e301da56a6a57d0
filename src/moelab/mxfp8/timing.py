"""Times of GPU work by CUDA events, of alternatives that take turns, and this GPU's measured peaks.

Alternatives are timed in the order A B A B …: a GPU that heats up or lowers its clock does so for all of them. The GPU
sleeps before each measurement, so that the host has queued the work when it starts and its overhead is not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from moelab.marks import Marks

HEAD_START_CYCLES = 2_000_000
"""About 1 ms: more than the host needs to queue a compiled forward and backward."""
PEAK_SIZE = 8192
"""Rows, columns and summed elements of the product that stands for a GPU's peak."""
PEAK_REPEATS, COPY_BYTES = 12, 2 << 30


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and interquartile range of ``n`` times, µs."""

    median_us: float
    iqr_us: float
    n: int

    @staticmethod
    def of(times_us: list[float]) -> Spread:
        """Summarise at least two times.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
            Spread(median_us=3.0, iqr_us=2.0, n=5)
        """
        low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return Spread(median_us=round(middle, 3), iqr_us=round(high - low, 3), n=len(times_us))


class Clock(Marks):
    """Marks that begin when the host is ahead of the GPU."""

    def start(self) -> None:
        """Give the host its head start and set the first mark."""
        self.marks = []
        if self.gpu:
            torch.cuda._sleep(HEAD_START_CYCLES)
        self.mark("start")

    def parts_us(self) -> dict[str, float]:
        """Microseconds of each part, and ``total`` from the first mark to the last."""
        return {**super().parts_us(), "total": self.between_us(0, len(self.marks) - 1)}


Work = Callable[[Clock], None]
"""Something to time: it queues work and marks the end of each part."""


Name = TypeVar("Name", bound=str)


def interleaved(
    alternatives: Mapping[Name, Work], device: torch.device, *, repeats: int, warm_up: int = 2
) -> dict[Name, dict[str, Spread]]:
    """Time alternatives in turns.

    Args:
        alternatives: what to time, by name.
        device: that they run on.
        repeats: turns that count, at least 2.
        warm_up: turns before them that do not.

    Returns:
        For each alternative, the spread of each part that it marks and of the ``total``.
    """
    times: dict[Name, dict[str, list[float]]] = {name: {} for name in alternatives}
    for turn in range(warm_up + repeats):
        for name, work in alternatives.items():
            clock = Clock(device)
            clock.start()
            work(clock)
            for part, us in clock.parts_us().items():
                if turn >= warm_up:
                    times[name].setdefault(part, []).append(us)
    return {name: {part: Spread.of(us) for part, us in parts.items()} for name, parts in times.items()}


def time_alone(work: Callable[[], object], device: torch.device, *, repeats: int) -> Spread:
    """Time one piece of work by itself."""

    def marked(clock: Clock) -> None:
        work()
        clock.mark("work")

    return interleaved({"work": marked}, device, repeats=repeats)["work"]["total"]


def measure_peaks(device: torch.device, *, size: int = PEAK_SIZE, copy_bytes: int = COPY_BYTES) -> dict[str, Any]:
    """What this GPU reaches on a large square product of each precision, and on a copy.

    Returns:
        ``bf16_tflops``, ``fp8_tflops`` and ``mxfp8_tflops`` (None with ``<name>_error`` where there is no such kernel),
        ``copy_tb_s`` (bytes read and written), and how they were measured.
    """
    found: dict[str, Any] = {"product": size, "repeats": PEAK_REPEATS, "copy_bytes": copy_bytes}
    for name, make in (("bf16", _bf16_product), ("fp8", _fp8_product), ("mxfp8", _mxfp8_product)):
        try:
            spread = time_alone(make(size, device), device, repeats=PEAK_REPEATS)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found |= {f"{name}_tflops": None, f"{name}_error": str(error).splitlines()[0][:200]}
        else:
            found[f"{name}_tflops"] = round(2 * size**3 / spread.median_us / 1e6, 3)
    source = torch.ones(copy_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = time_alone(lambda: target.copy_(source), device, repeats=PEAK_REPEATS)
    return {**found, "copy_tb_s": round(2 * source.numel() / copied.median_us / 1e6, 4)}


def _square(size: int, device: torch.device) -> torch.Tensor:
    return torch.randn(size, size, device=device, dtype=torch.bfloat16)


def _bf16_product(size: int, device: torch.device) -> Callable[[], object]:
    a, b = _square(size, device), _square(size, device).t()
    return lambda: torch.mm(a, b)


def _fp8_product(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (_square(size, device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _mxfp8_product(size: int, device: torch.device) -> Callable[[], object]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 10:
        raise NotImplementedError("MXFP8 tensor cores begin with SM100")
    a, b = (_square(size, device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.ones(size * size // 32, device=device).to(torch.float8_e8m0fnu)
    return lambda: torch._scaled_mm(a, b.t(), scales, scales, out_dtype=torch.bfloat16)
