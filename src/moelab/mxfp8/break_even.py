r"""Time of a grouped GEMM, forward and backward, and the number of rows from which on 8 bits save time.

A product of M rows costs tensor-core time that grows with M·N·K; casting its operands costs memory time that grows with
their elements alone:

==========  ===================================  ==========================================================
product     GEMM                                 casts to 8 bits (3 bytes an element: 2 read, 1 written)
==========  ===================================  ==========================================================
forward     2·M·N·K / rate                       M·K rows and G·N·K weights
dgrad       2·M·N·K / rate                       M·N gradient and G·N·K weights
wgrad       2·M·N·K / rate of wgrad              M·N gradient and M·K rows; none where wgrad stays in BF16
==========  ===================================  ==========================================================

MXFP8 kernels also want the scales in blocks, which takes a time that hardly shrinks with M: ``overhead``. For each row
the GEMMs save 6·N·K·(1/R16 − 1/R8) and the casts take 6·(N + K)/B, so large N and K win at any large M, while
weights (G·N·K) and overhead have to be shared among many rows: that is where the break-even M comes from.

Letters: M rows of all groups, N output features, K input features, G groups. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from scipy.optimize import brentq

from moelab.errors import BadInput
from moelab.mxfp8.grouped_gemm_cases import DIRECTIONS, PRECISIONS, Direction, Precision

Kind = Literal["gemm", "cast rows", "cast columns", "cast weights", "overhead"]
CAST_BYTES = {"fp8": 3.0, "mxfp8": 3.0 + 1 / 32}
"""Of one element: two read, one written, and MXFP8's share of a scale."""
OVERHEAD_SHARE: dict[str, dict[Direction, float]] = {
    "fp8": {"forward": 1 / 3, "dgrad": 1 / 3, "wgrad": 1 / 3},
    "mxfp8": {"forward": 43.0 / 483.0, "dgrad": 32.3 / 483.0, "wgrad": 407.7 / 483.0},
}
"""Which product the overhead belongs to; MXFP8's as torchao's kernels have it (:mod:`moelab.mxfp8.torchao_b200`)."""
SEARCHED_ROWS = (1.0, 2.0**26)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a GPU and its kernels reach; found by :mod:`moelab.mxfp8.break_even_fit`.

    Attributes:
        gpu: such as ``B200``.
        low: the 8-bit format that the constants are of, ``mxfp8`` or ``fp8``.
        bf16_tflops: rate of BF16 grouped GEMMs, TFLOP/s.
        low_tflops: rate of 8-bit grouped GEMMs in forward and dgrad, TFLOP/s.
        low_wgrad_tflops: the same in wgrad, TFLOP/s.
        row_cast_tb_s: casts of rows and gradients along their rows, TB/s.
        column_cast_tb_s: the same along their columns, for wgrad, TB/s.
        weight_cast_tb_s: casts of weights, TB/s.
        overhead_us: of a forward and backward, whatever its size, µs.
        overhead_us_per_mrow: of a forward and backward, for each million rows, µs.
        bf16_in_step: how much longer BF16 kernels take in a step than alone.
        low_in_step: the same of 8-bit kernels.
    """

    gpu: str
    low: Literal["mxfp8", "fp8"]
    bf16_tflops: float
    low_tflops: float
    low_wgrad_tflops: float
    row_cast_tb_s: float
    column_cast_tb_s: float
    weight_cast_tb_s: float
    overhead_us: float
    overhead_us_per_mrow: float = 0.0
    bf16_in_step: float = 1.0
    low_in_step: float = 1.0


class Part(NamedTuple):
    """A share of one product's time."""

    direction: Direction
    kind: Kind
    time_s: float


def gemm_parts(
    m: float, n: int, k: int, groups: int, precision: Precision, constants: Constants, *, in_step: bool = False
) -> list[Part]:
    """The pieces of forward and backward of one grouped product.

    Args:
        m: rows of all groups.
        n: output features.
        k: input features.
        groups: local experts.
        precision: ``bf16``, ``fp8``, ``mxfp8`` or ``mxfp8_wgrad_bf16``.
        constants: of the GPU; those of ``mxfp8`` say nothing about ``fp8``.
        in_step: kernels as they run in a step, not alone.

    Raises:
        BadInput: for sizes that are not positive, or a precision that the constants are not of.
    """
    if min(m, n, k, groups) <= 0:
        raise BadInput(f"m, n, k and groups are {m}, {n}, {k} and {groups}; give positive numbers")
    if precision not in PRECISIONS or not (precision == "bf16" or precision.startswith(constants.low)):
        raise BadInput(f"precision is {precision!r}; the constants of {constants.gpu} are of bf16 and {constants.low}")
    bf16, low = (constants.bf16_in_step, constants.low_in_step) if in_step else (1.0, 1.0)
    cast_s = CAST_BYTES[constants.low] / 1e12
    overhead_us = constants.overhead_us + constants.overhead_us_per_mrow * m / 1e6
    parts: list[Part] = []
    for direction in DIRECTIONS:
        wgrad = direction == "wgrad"
        if precision == "bf16" or (precision == "mxfp8_wgrad_bf16" and wgrad):
            parts.append(Part(direction, "gemm", bf16 * 2 * m * n * k / constants.bf16_tflops / 1e12))
            continue
        rate = constants.low_wgrad_tflops if wgrad else constants.low_tflops
        overhead_s = OVERHEAD_SHARE[constants.low][direction] * overhead_us / 1e6
        times_s: dict[Kind, float] = {"gemm": 2 * m * n * k / rate / 1e12, "overhead": overhead_s}
        if wgrad:
            times_s["cast columns"] = m * (n + k) * cast_s / constants.column_cast_tb_s
        else:
            times_s["cast rows"] = m * (k if direction == "forward" else n) * cast_s / constants.row_cast_tb_s
            times_s["cast weights"] = groups * n * k * cast_s / constants.weight_cast_tb_s
        parts += [Part(direction, kind, low * time_s) for kind, time_s in times_s.items()]
    return parts


def gemm_time_s(
    m: float,
    n: int,
    k: int,
    groups: int,
    precision: Precision,
    constants: Constants,
    *,
    direction: Direction | None = None,
    in_step: bool = False,
) -> float:
    """Time of one grouped product: forward and backward together, or of one ``direction``; arguments as above."""
    parts = gemm_parts(m, n, k, groups, precision, constants, in_step=in_step)
    return sum(part.time_s for part in parts if direction in (None, part.direction))


def gain(
    m: float,
    n: int,
    k: int,
    groups: int,
    constants: Constants,
    *,
    precision: Precision | None = None,
    in_step: bool = False,
) -> float:
    """BF16 time over 8-bit time, forward and backward; above 1 the 8-bit format saves time."""
    low = precision or constants.low
    times = [gemm_time_s(m, n, k, groups, name, constants, in_step=in_step) for name in ("bf16", low)]
    return times[0] / times[1]


def break_even_m(
    n: int, k: int, groups: int, constants: Constants, *, precision: Precision | None = None, in_step: bool = False
) -> float | None:
    """Rows of all groups from which on the 8-bit format saves time; None where it never does.

    The gain grows with M, because all that does not grow with M is overhead of the 8-bit side.

    Example:
        >>> from moelab.mxfp8.break_even_fit import fit_b200
        >>> rows = break_even_m(2048, 7168, 8, fit_b200().constants)
        >>> 10_000 < rows < 25_000
        True
    """

    def above(m: float) -> float:
        return gain(m, n, k, groups, constants, precision=precision, in_step=in_step) - 1

    low, high = SEARCHED_ROWS
    if above(high) < 0:
        return None
    return low if above(low) >= 0 else float(brentq(above, low, high, rtol=1e-6))
