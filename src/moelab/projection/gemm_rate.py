"""Time of a matrix product by shape and precision: a rate of the datasheet's times what its shape leaves of it.

A product is cut into tiles of 128 × 256; the last wave of tiles rarely fills the GPU, and each tile needs a while to
begin and end, which a long K hides. Grouped products on B200 run at one rate, or as fast as memory is read.

Letters: M rows of the product over all groups, N its columns, K what is summed over; of a grouped wgrad, K is the rows
of all groups, each of which has an M × N output of its own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from moelab.hardware import Gpu, has_native_mxfp8
from moelab.projection.calibration import Calibration

TILE_M, TILE_N = 128, 256
SMS = {8: 108, 9: 132, 10: 148}
"""Streaming multiprocessors by major capability (datasheets of A100, H100 and B200)."""
LAUNCH_S = 4e-6


class Rates(NamedTuple):
    """What decides the time of a GPU's products.

    Attributes:
        bf16: of large BF16 products, FLOP/s.
        grouped: of grouped ones in BF16, FLOP/s.
        low: of 8-bit products, forward and dgrad, FLOP/s.
        low_wgrad: of 8-bit wgrad, FLOP/s.
        memory: bytes a second.
        inner: K at which half of a tile's time is its beginning and end.
        sms: streaming multiprocessors.
        grouped_in_tiles: whether grouped products lose what their shape loses; else ``grouped`` has it.
    """

    bf16: float
    grouped: float
    low: float
    low_wgrad: float
    memory: float
    inner: float
    sms: int
    grouped_in_tiles: bool


def is_blackwell(gpu: Gpu) -> bool:
    """SM100 and SM103."""
    return has_native_mxfp8(gpu.capability)


def rates_of(gpu: Gpu, calibration: Calibration) -> Rates:
    """The rates of products in a step on a GPU."""
    c, blackwell = calibration, is_blackwell(gpu)
    bf16, low = (1e12 * float(figure or 0) for figure in (gpu.bf16_tflops, gpu.fp8_tflops))
    if blackwell:
        in_step = float(c.blackwell_low_in_step)
        low_rates = [low * float(share) / in_step for share in (c.blackwell_low, c.blackwell_low_wgrad)]
    else:
        low_rates = [low * float(c.hopper_low)] * 2
    return Rates(
        bf16=bf16 * float(c.blackwell_gemm if blackwell else c.hopper_gemm),
        grouped=bf16 * float(c.blackwell_grouped if blackwell else c.hopper_grouped),
        low=low_rates[0],
        low_wgrad=low_rates[1],
        memory=1e12 * float(gpu.hbm_tb_s or 1) * float(c.copy),
        inner=float(c.inner),
        sms=SMS.get(int(gpu.capability or 0), 132),
        grouped_in_tiles=not blackwell,
    )


def gemm_time_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds of a dense product, or of a grouped one at the rate of dense ones; sizes as in the module.

    Args:
        m: see the module.
        n: see the module.
        k: see the module.
        groups: 1 for a dense product.
        rates: of the GPU.
        low: in 8 bits, casts apart.
        wgrad: whether it is a weight gradient.
    """
    rate = (rates.low_wgrad if wgrad else rates.low) if low else rates.bf16
    return _in_tiles_s(m, n, k, groups, rates, rate, low=low, wgrad=wgrad)


def grouped_time_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds of a product of ``torch._grouped_mm`` or of torchao's kernels; arguments as :func:`gemm_time_s`."""
    rate = (rates.low_wgrad if wgrad else rates.low) if low else rates.grouped
    if rates.grouped_in_tiles:
        return _in_tiles_s(m, n, k, groups, rates, rate, low=low, wgrad=wgrad)
    return max(2 * m * n * k / rate, _memory_s(m, n, k, groups, rates, low=low, wgrad=wgrad))


def _in_tiles_s(m: int, n: int, k: int, groups: int, rates: Rates, rate: float, *, low: bool, wgrad: bool) -> float:
    """Waves of tiles at ``rate``, or memory, whichever is slower."""
    inner = k / groups if wgrad else k
    rows = m if wgrad else m / groups  # of one group
    tiles = groups * ceil(rows / TILE_M) * ceil(n / TILE_N)
    share = groups * rows * n / (TILE_M * TILE_N * ceil(tiles / rates.sms) * rates.sms)
    compute_s = 2 * m * n * k / (rate * share * inner / (inner + rates.inner))
    return max(compute_s, _memory_s(m, n, k, groups, rates, low=low, wgrad=wgrad)) + LAUNCH_S


def _memory_s(m: int, n: int, k: int, groups: int, rates: Rates, *, low: bool, wgrad: bool) -> float:
    """Seconds to read both operands and to write the BF16 product."""
    of_groups, outputs = (1, groups) if wgrad else (groups, 1)
    moved = (1 if low else 2) * (m * k + of_groups * k * n) + 2 * m * n * outputs
    return moved / rates.memory
