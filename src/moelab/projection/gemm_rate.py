"""Time of a matrix product by shape and precision: a rate of the datasheet's times what its shape leaves of it.

A product is cut into tiles of 128 × 256; the last wave of tiles rarely fills the GPU, and each tile needs a while to
begin and end, which a long K hides. Grouped products on B200 follow :mod:`moelab.mxfp8.break_even`.
"""

from __future__ import annotations

import functools
from math import ceil

from moelab.hardware import Gpu
from moelab.model import Gemm
from moelab.projection.calibration import ProductRates

TILE_M, TILE_N = 128, 256
SMS = {9: 132, 10: 148}
"""Streaming multiprocessors by major capability (datasheets of H100 and B200)."""
LAUNCH_S = 4e-6


@functools.lru_cache(maxsize=65_536)
def wave_share(m: int, n: int, groups: int, sms: int) -> float:
    """Tiles that are computed of those that the GPU has room for, padding of tiles included."""
    tiles = groups * ceil(m / groups / TILE_M) * ceil(n / TILE_N)
    used = m * n / (TILE_M * TILE_N)
    return used / (ceil(tiles / sms) * sms)


def is_blackwell(gpu: Gpu) -> bool:
    """SM100 and later."""
    return gpu.capability >= 10


def gemm_time_s(gemm: Gemm, gpu: Gpu, rates: ProductRates, *, low: bool = False) -> float:
    """Seconds of one of ``gemm.count`` dense products, or of a grouped one at the rate of dense ones.

    Args:
        gemm: its shape.
        gpu: the GPU.
        rates: of the rates.
        low: in 8 bits, casts apart.
    """
    if low:
        return _time_s(gemm, gpu, rates, low_rate(gemm, gpu, rates), 1)
    fraction = rates.blackwell_gemm if is_blackwell(gpu) else rates.hopper_gemm
    return _time_s(gemm, gpu, rates, 1e12 * fraction * float(gpu.bf16_tflops or 0), 2)


def low_rate(gemm: Gemm, gpu: Gpu, rates: ProductRates) -> float:
    """FLOP/s of an 8-bit product in a step."""
    peak = 1e12 * float(gpu.fp8_tflops or 0)
    if not is_blackwell(gpu):
        return peak * rates.hopper_low
    share = rates.blackwell_low_wgrad if gemm.direction == "wgrad" else rates.blackwell_low
    return peak * share / rates.blackwell_low_in_step


def _time_s(gemm: Gemm, gpu: Gpu, rates: ProductRates, rate: float, size: int) -> float:
    """Waves at ``rate``, or memory, whichever is slower."""
    flops = gemm.flops / gemm.count
    rows, inner = (gemm.m, gemm.k)
    groups = gemm.groups
    if groups > 1 and gemm.direction == "wgrad":  # every group has an output of its own
        inner = inner // groups
        rows = rows * groups
    share = wave_share(rows, gemm.n, groups, SMS.get(int(gpu.capability), 132))
    compute = flops / (rate * share * inner / (inner + rates.inner))
    return max(compute, _memory_s(gemm, gpu, rates, size)) + LAUNCH_S


def grouped_time_s(gemm: Gemm, gpu: Gpu, rates: ProductRates, *, low: bool) -> float:
    """Seconds of one of ``gemm.count`` products of ``torch._grouped_mm`` or torchao's kernels, casts apart."""
    flops = gemm.flops / gemm.count
    blackwell = is_blackwell(gpu)
    share = float(rates.blackwell_grouped if blackwell else rates.hopper_grouped)
    rate = low_rate(gemm, gpu, rates) if low else 1e12 * share * float(gpu.bf16_tflops or 0)
    size = 1 if low else 2
    return max(flops / rate, _memory_s(gemm, gpu, rates, size)) if blackwell else _time_s(gemm, gpu, rates, rate, size)


def _memory_s(gemm: Gemm, gpu: Gpu, rates: ProductRates, size: int) -> float:
    """Seconds to read both operands, of ``size`` bytes an element, and to write the BF16 product."""
    of_groups, outputs = (1, gemm.groups) if gemm.direction == "wgrad" else (gemm.groups, 1)
    moved = size * (gemm.m * gemm.k + of_groups * gemm.k * gemm.n) + 2 * gemm.m * gemm.n * outputs
    return moved / (float(gpu.hbm_tb_s or 1) * 1e12 * rates.copy)
