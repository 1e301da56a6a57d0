"""torchao's published times of MXFP8 grouped GEMMs on one B200, as data: what the break-even model is held against.

All figures are quoted from ``torchao/prototype/moe_training/README.md`` (``pytorch/ao``, state of August 2026). They
were made at different times: the eight rows with torchao 0.14 and torch 2.10, the kernels with torchao 0.16 and torch
2.11, the curve, read off a plot, in November 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moelab.mxfp8.grouped_gemm_cases import Case

SOURCE = "torchao/prototype/moe_training/README.md, pytorch/ao, August 2026"
ROWS_SOURCE = f"{SOURCE}: autograd function, torchao 0.14.0+gitc7b8e13da, torch 2.10.0a0, one B200"
KERNELS_SOURCE = f"{SOURCE}: breakdown by pass, torchao 0.16.0+gitaa38ae104, torch 2.11.0.dev20260101, one B200"
CURVE_SOURCE = f"{SOURCE}: dsv3_rooflines.png, November 2025, read off the plot (±3 %)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Forward and backward of one case, µs; group sizes were random and are not published."""

    case: Case
    bf16_us: float
    mxfp8_us: float

    @property
    def speedup(self) -> float:
        """BF16 time over MXFP8 time."""
        return self.bf16_us / self.mxfp8_us


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a step at :data:`KERNELS_CASE`, µs; ``operand`` of a GEMM is empty."""

    direction: Literal["forward", "dgrad", "wgrad"]
    kind: Literal["quantise", "scales", "gemm"]
    operand: Literal["rows", "weights", "gradient", ""]
    us: float


def _row(n: int, k: int, groups: int, bf16_us: float, mxfp8_us: float) -> Row:
    return Row(case=Case(m=128000, n=n, k=k, groups=groups, sizes="random"), bf16_us=bf16_us, mxfp8_us=mxfp8_us)


ROWS = (
    _row(8192, 5120, 1, 43140.2, 23867.0),
    _row(8192, 5120, 2, 39487.6, 23359.0),
    _row(8192, 5120, 4, 39189.2, 23945.5),
    _row(8192, 5120, 8, 37700.7, 22170.6),
    _row(2048, 7168, 1, 13064.8, 10996.0),
    _row(2048, 7168, 2, 14900.2, 11283.4),
    _row(2048, 7168, 4, 15823.6, 9919.36),
    _row(2048, 7168, 8, 14966.8, 10397.2),
)
KERNELS_CASE = Case(m=131072, n=2048, k=7168, groups=8)
KERNELS = (
    Kernel(direction="forward", kind="quantise", operand="rows", us=525.3),
    Kernel(direction="forward", kind="quantise", operand="weights", us=65.4),
    Kernel(direction="forward", kind="scales", operand="rows", us=29.7),
    Kernel(direction="forward", kind="scales", operand="weights", us=13.3),
    Kernel(direction="forward", kind="gemm", operand="", us=1671.2),
    Kernel(direction="dgrad", kind="quantise", operand="gradient", us=144.4),
    Kernel(direction="dgrad", kind="quantise", operand="weights", us=70.7),
    Kernel(direction="dgrad", kind="scales", operand="gradient", us=19.4),
    Kernel(direction="dgrad", kind="scales", operand="weights", us=12.9),
    Kernel(direction="dgrad", kind="gemm", operand="", us=1683.4),
    Kernel(direction="wgrad", kind="quantise", operand="gradient", us=141.5),
    Kernel(direction="wgrad", kind="quantise", operand="rows", us=472.2),
    Kernel(direction="wgrad", kind="scales", operand="gradient", us=199.8),
    Kernel(direction="wgrad", kind="scales", operand="rows", us=207.9),
    Kernel(direction="wgrad", kind="gemm", operand="", us=2103.3),
)
CURVE = {16384: 0.995, 32768: 1.20, 65536: 1.255, 131072: 1.385}
"""Rows to speed-up of the kernels of forward and backward, at N = 2048, K = 7168, 8 groups."""
PUBLIC_16B_LAYER = 0.953
"""Speed-up of a 16B MoE layer that a user measured (pytorch/torchtitan issue 2086); a layer is more than its GEMMs."""


def benchmark_extra_bytes(case: Case) -> int:
    """Memory traffic of torchao's benchmark beside the products and casts, in either precision.

    Its backward adds each gradient to that of the call before (read, read, write of M·K and G·N·K) and its loss is a
    mean squared error (two reads forward, two reads and a write backward of M·N), all BF16.

    Source: ``benchmarks/utils.py`` of pytorch/ao, ``bench_fwd_bwd_microseconds``.
    """
    gradients = case.m * case.k + case.groups * case.n * case.k
    return 2 * (3 * gradients + 5 * case.m * case.n)
