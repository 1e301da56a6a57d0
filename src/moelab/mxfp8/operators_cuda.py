"""The operators of ``operators.py`` on CUDA: Triton kernels that read each operand once.

All of them are bound by memory. A program holds a whole row (F or K values, in registers), because a scale of FP8
belongs to a row; what is transposed needs a second pass, for a scale that belongs to a column. The arithmetic is
``quantise.py``'s: the scale is a power of two, found by adding to the bits of the largest magnitude. MXFP8's scales are
written as rows of bytes; torchao's kernel then lays them out in the blocks that SM100's tensor cores read.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from moelab.mxfp8 import operators
from moelab.mxfp8.quantise import BLOCK, empty_transposed

WARPS = 8
TILE_N, TILE_K = 256, 64
"""Tile of a weight that is transposed: lines of 128 bytes where it is read and of 256 where it is written."""
TURN_R, TURN_C, SPLIT = 256, 64, 8
"""Tile of rows that are transposed, and programs that share the rows of an expert."""


# Largest magnitudes are kept as bits, int32: they order as the numbers do, with a NaN above everything, where
# Triton's maximum of two floats drops a NaN.


@triton.jit
def _exponents(amax):  # type: ignore[no-untyped-def]
    """E + 127 of the scale 2^E for magnitudes of which this is the largest; 254 for an infinity, 255 for a NaN."""
    exponents = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    return tl.where(amax > 0x7F800000, 255, tl.where(amax == 0x7F800000, 254, exponents))


@triton.jit
def _reciprocals(exponents):  # type: ignore[no-untyped-def]
    """2^-E, 1 for the smallest scale."""
    # 2^-127, the reciprocal of an infinity's scale, is subnormal: its bits are the top one of the mantissa.
    bits = tl.where(exponents == 255, 0x7FC00000, tl.where(exponents == 254, 0x00400000, (254 - exponents) << 23))
    return tl.where(exponents == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _amax(x, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude along an axis."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis, keep_dims=True)


@triton.jit
def _fp8_exponents(amax):  # type: ignore[no-untyped-def]
    """As ``_exponents``, for a row of FP8: not of magnitudes below 1e-12, and NaN for an infinity."""
    least = 0x2B8CBCCC  # 1e-12
    return tl.where(amax >= 0x7F800000, 255, ((tl.maximum(amax, least) + 0x1FFFFF) >> 23) - 8)


@triton.jit
def _store_quantised(x, data, scales, columns, inside, K, SIZE: tl.constexpr, MX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise a row of K values, ``(1, SIZE)`` in FP32, and store it with its scale, or its scales for 32 each."""
    if MX:
        blocks = tl.reshape(x, (SIZE // 32, 32))
        exponents = _exponents(_amax(blocks, 1))
        x = tl.reshape(blocks * _reciprocals(exponents), (1, SIZE))
        block = tl.arange(0, SIZE // 32)[:, None]
        tl.store(scales + block, exponents.to(tl.uint8), mask=block < K // 32)
    else:
        exponents = _fp8_exponents(_amax(x, 1))
        x = x * _reciprocals(exponents)
        tl.store(scales + tl.zeros_like(exponents), (exponents << 23).to(tl.float32, bitcast=True))
    # Beyond 448 only beside an infinity. tl.minimum drops a NaN, which the data must keep.
    x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -448.0), 448.0))
    tl.store(data + columns, x.to(tl.float8e4nv), mask=inside)


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    """FP32, rounded to BF16 as TorchTitan's intermediate results are."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _swiglu_kernel(gate_up, scores, data, scales, F, SCORED: tl.constexpr, SIZE: tl.constexpr, MX: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)[None, :]
    inside = columns < F
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded after SiLU, after the product and after the score, as separate kernels would.
    h = _rounded(_rounded(gate / (1.0 + tl.exp(-gate))) * up)
    if SCORED:
        h = _rounded(h * tl.load(scores + row))
    _store_quantised(h, data + row * F, scales + row * (F // 32 if MX else 1), columns, inside, F, SIZE, MX)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    h_grad,
    scores,
    grad,
    data,
    scales,
    h_out,
    scores_grad,
    F,
    SCORED: tl.constexpr,
    SIZE: tl.constexpr,
    MX: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)[None, :]
    inside = columns < F
    gate = tl.load(gate_up + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(h_grad + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = _rounded(gate * sigmoid)
    h = _rounded(silu * up)
    if SCORED:
        score = tl.load(scores + row)
        tl.store(scores_grad + row, tl.sum(tl.sum(upstream * h, axis=1), axis=0))
        upstream = _rounded(upstream * score)
        h = _rounded(h * score)
    tl.store(h_out + row * F + columns, h.to(tl.bfloat16), mask=inside)
    # aten.silu_backward, whose operands are BF16 and whose arithmetic is FP32.
    gate_grad = _rounded(_rounded(upstream * up) * sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    up_grad = _rounded(upstream * silu)
    tl.store(grad + row * 2 * F + columns, gate_grad.to(tl.bfloat16), mask=inside)
    tl.store(grad + row * 2 * F + F + columns, up_grad.to(tl.bfloat16), mask=inside)
    data += row * 2 * F
    if MX:
        scales += row * (2 * F // 32)
        # F is a multiple of 32, so no block has values of both halves.
        _store_quantised(gate_grad, data, scales, columns, inside, F, SIZE, True)
        _store_quantised(up_grad, data + F, scales + F // 32, columns, inside, F, SIZE, True)
    else:
        # One scale for both halves: together they are a row of the product that sums over 2F.
        exponents = _fp8_exponents(tl.maximum(_amax(gate_grad, 1), _amax(up_grad, 1)))
        reciprocal = _reciprocals(exponents)
        tl.store(data + columns, (gate_grad * reciprocal).to(tl.float8e4nv), mask=inside)
        tl.store(data + F + columns, (up_grad * reciprocal).to(tl.float8e4nv), mask=inside)
        tl.store(scales + row + tl.zeros_like(exponents), (exponents << 23).to(tl.float32, bitcast=True))


@triton.jit
def _rows_kernel(x, data, factors, K, N, N_ALL, FIRST, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of N for each expert, to rows ``FIRST`` and on of ``N_ALL`` for each."""
    row = tl.program_id(0).to(tl.int64)
    target = row // N * N_ALL + FIRST + row % N
    columns = tl.arange(0, SIZE)[None, :]
    inside = columns < K
    wide = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    _store_quantised(wide, data + target * K, factors + target, columns, inside, K, SIZE, False)


@triton.jit
def _column_amax_kernel(x, amax, K, N, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude of each of K columns of an expert's weight, and of what ``amax`` has already."""
    expert = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * TILE_K + tl.arange(0, TILE_K)[None, :]
    # w1's, when this is w3: both share a column's scale.
    largest = tl.load(amax + expert * K + k, mask=k < K, other=0)
    for start in range(0, N, TILE_N):
        n = start + tl.arange(0, TILE_N)[:, None]
        tile = tl.load(x + expert * N * K + n * K + k, mask=(n < N) & (k < K), other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _amax(tile, 0))
    tl.store(amax + expert * K + k, largest, mask=k < K)


@triton.jit
def _transpose_kernel(x, amax, data, factors, K, N, N_ALL, FIRST, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """An expert's weight ``(N, K)`` to columns ``FIRST`` and on of ``(K, N_ALL)`` in FP8, a factor for each k."""
    expert = tl.program_id(1).to(tl.int64)
    tiles_K = tl.cdiv(K, TILE_K)
    n = (tl.program_id(0) // tiles_K) * TILE_N + tl.arange(0, TILE_N)[:, None]
    k = (tl.program_id(0) % tiles_K) * TILE_K + tl.arange(0, TILE_K)[None, :]
    inside = (n < N) & (k < K)
    exponents = _fp8_exponents(tl.load(amax + expert * K + k, mask=k < K, other=0))
    wide = tl.load(x + expert * N * K + n * K + k, mask=inside, other=0.0).to(tl.float32)
    quantised = tl.trans((wide * _reciprocals(exponents)).to(tl.float8e4nv))
    target = data + expert * K * N_ALL + tl.trans(k).to(tl.int64) * N_ALL + FIRST + tl.trans(n)
    tl.store(target, quantised, mask=tl.trans(inside))
    # All weights' tiles know the factors; the first weight's first row of tiles writes them.
    if FIRST == 0 and tl.program_id(0) < tiles_K:
        tl.store(factors + expert * K + k, (exponents << 23).to(tl.float32, bitcast=True), mask=k < K)


@triton.jit
def _turned_amax_kernel(x, row_factors, ends, amax, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude of each column of an expert's rows, times the rows' factors."""
    expert = tl.program_id(1)
    c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)[None, :]
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    largest = tl.zeros((1, TILE_C), dtype=tl.int32)
    for first in range(start + tl.program_id(2) * TILE_R, end, tl.num_programs(2) * TILE_R):
        r = first + tl.arange(0, TILE_R)[:, None]
        factors = tl.load(row_factors + r, mask=r < end, other=0.0)
        tile = tl.load(x + r.to(tl.int64) * C + c, mask=(r < end) & (c < C), other=0.0).to(tl.float32) * factors
        largest = tl.maximum(largest, _amax(tile, 0))
    # Of integers, so that the result does not depend on the order of the programs.
    tl.atomic_max(amax + expert.to(tl.int64) * C + c, largest, mask=c < C, sem="relaxed")


@triton.jit
def _turned_kernel(x, row_factors, ends, amax, data, factors, R, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """An expert's rows in FP8, a factor for each column, to ``(C, R)``."""
    expert = tl.program_id(1)
    c = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)[None, :]
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    exponents = _fp8_exponents(tl.load(amax + expert.to(tl.int64) * C + c, mask=c < C, other=0))
    if tl.program_id(2) == 0:
        # An expert without rows: any finite factor, for its sum over nothing.
        factor = tl.where(end > start, (exponents << 23).to(tl.float32, bitcast=True), 1.0)
        tl.store(factors + expert.to(tl.int64) * C + c, factor, mask=c < C)
    reciprocals = _reciprocals(exponents)
    for first in range(start + tl.program_id(2) * TILE_R, end, tl.num_programs(2) * TILE_R):
        r = first + tl.arange(0, TILE_R)[:, None]
        inside = (r < end) & (c < C)
        wide = tl.load(x + r.to(tl.int64) * C + c, mask=inside, other=0.0).to(tl.float32)
        wide = wide * tl.load(row_factors + r, mask=r < end, other=0.0) * reciprocals
        target = data + tl.trans(c).to(tl.int64) * R + tl.trans(r)
        tl.store(target, tl.trans(wide.to(tl.float8e4nv)), mask=tl.trans(inside))


@triton.jit
def _turn_kernel(x, data, R, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.program_id(1).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)[:, None]
    c = tl.program_id(0).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)[None, :]
    inside = (r < R) & (c < C)
    tile = tl.load(x + r * C + c, mask=inside)
    tl.store(data + tl.trans(c) * R + tl.trans(r), tl.trans(tile), mask=tl.trans(inside))


@operators.quantised_swiglu.register_kernel("cuda")
def quantised_swiglu(gate_up_RH: Tensor, scores_R: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """One read of gate and up, one write of 8 bits."""
    data, scales = operators.empty_quantised_swiglu(gate_up_RH, scores_R, precision)
    gate_up_RH, F = gate_up_RH.contiguous(), data.shape[1]
    if len(data):
        scored, scores = scores_R is not None, gate_up_RH if scores_R is None else scores_R
        how = (F, scored, _size(F), precision == "mxfp8")
        _swiglu_kernel[(len(data),)](gate_up_RH, scores, data, scales, *how, num_warps=WARPS)
    return data, scales


@operators.quantised_swiglu_backward.register_kernel("cuda")
def quantised_swiglu_backward(
    gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One read of gate, up and the upstream gradient; gradients in BF16 and in 8 bits, and the activation again."""
    results = operators.empty_quantised_swiglu_backward(gate_up_RH, h_grad_RF, scores_R, precision)
    R, F = h_grad_RF.shape
    if R:
        scored, scores = scores_R is not None, gate_up_RH if scores_R is None else scores_R
        given, how = (gate_up_RH.contiguous(), h_grad_RF.contiguous(), scores), (scored, _size(F), precision == "mxfp8")
        _swiglu_backward_kernel[(R,)](*given, *results, F, *how, num_warps=WARPS)
    return results


@operators.fp8_rows.register_kernel("cuda")
def fp8_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """One read, one write."""
    data_RK, factors_R = operators.empty_fp8_rows(x_RK)
    _quantise_rows(x_RK.contiguous()[None], data_RK, factors_R, len(x_RK), 0)
    return data_RK, factors_R


@operators.fp8_weights.register_kernel("cuda")
def fp8_weights(weights_eNK: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
    """Each weight into its place beside the others."""
    data, factors = operators.empty_fp8_weights(weights_eNK, transposed)
    weights_eNK = [weight.contiguous() for weight in weights_eNK]
    e, _, K = weights_eNK[0].shape
    tiles_K = triton.cdiv(K, TILE_K)
    if transposed:  # a column's scale is known when all weights have been read
        amax_eK = torch.zeros_like(factors, dtype=torch.int32)
        for weight_eNK in weights_eNK:
            _column_amax_kernel[(tiles_K, e)](weight_eNK, amax_eK, K, weight_eNK.shape[1], TILE_N, TILE_K)
    first = 0
    for weight_eNK in weights_eNK:
        N = weight_eNK.shape[1]
        if transposed:
            _transpose_kernel[(triton.cdiv(N, TILE_N) * tiles_K, e)](
                weight_eNK, amax_eK, data, factors, K, N, data.shape[2], first, TILE_N, TILE_K, num_warps=WARPS
            )
        else:
            _quantise_rows(weight_eNK, data, factors, data.shape[1], first)
        first += N
    return data, factors


@operators.fp8_turned.register_kernel("cuda")
def fp8_turned(x_RC: Tensor, factors_R: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """Two passes: a column's scale is known when all rows of the expert have been read."""
    data_CR, factors_eC = operators.empty_fp8_turned(x_RC, factors_R, ends_e)
    x_RC, factors_R = x_RC.contiguous(), factors_R.contiguous()
    R, C = x_RC.shape
    amax_eC = torch.zeros_like(factors_eC, dtype=torch.int32)
    grid = (triton.cdiv(C, TURN_C), len(ends_e), SPLIT)
    _turned_amax_kernel[grid](x_RC, factors_R, ends_e, amax_eC, C, TURN_R, TURN_C, num_warps=WARPS)
    _turned_kernel[grid](x_RC, factors_R, ends_e, amax_eC, data_CR, factors_eC, R, C, TURN_R, TURN_C, num_warps=WARPS)
    return data_CR, factors_eC


@operators.turned.register_kernel("cuda")
def turned(data_RC: Tensor) -> Tensor:
    """One read, one write, as bytes."""
    data_CR, (R, C) = empty_transposed(data_RC), data_RC.shape
    if data_RC.numel():
        # As bytes: to move E4M3, Triton need not compute with it.
        source, target = data_RC.contiguous().view(torch.uint8), data_CR.view(torch.uint8)
        _turn_kernel[(triton.cdiv(C, 128), triton.cdiv(R, 128))](source, target, R, C, 128, 128, num_warps=WARPS)
    return data_CR


def _quantise_rows(x_eNK: Tensor, data: Tensor, factors: Tensor, N_all: int, first: int) -> None:
    e, N, K = x_eNK.shape
    if e * N:
        _rows_kernel[(e * N,)](x_eNK, data, factors, K, N, N_all, first, SIZE=_size(K), num_warps=WARPS)


def _size(K: int) -> int:
    """Values of a program: a power of two, as Triton wants it, and a whole block."""
    return int(max(BLOCK, triton.next_power_of_2(K)))
