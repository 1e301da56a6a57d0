"""Fake quantisation on CUDA: a Triton kernel that reads a tensor once, behind the operators of ``quantise.py``.

The arithmetic is that module's, bit for bit. It is memory-bound: a BF16 value is read and one written. Offsets are
64-bit, for a tensor may have more than 2^31 values.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from moelab.mxfp8 import quantise
from moelab.mxfp8.quantise import BLOCK, empty_transposed, require_whole_blocks

ROWS_TILE = (256, 32, 4)
"""Rows, columns and warps of a program that only wants blocks along rows: 32 columns make it one stretch of memory."""
COLUMNS_TILE = (64, 64, 4)
"""The same where a transposed result is written: lines of 128 bytes on both sides."""


@triton.jit
def _round_trip(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Fake-quantise a BF16 tile ``(ROWS, COLUMNS)`` in blocks of 32 along its columns."""
    # BF16 is the upper half of FP32, so a shift of its bits is the exact conversion.
    bits = tl.reshape(x.to(tl.int16, bitcast=True).to(tl.int32) << 16, (ROWS, COLUMNS // 32, 32))
    magnitude = bits & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=2, keep_dims=True)  # as integers, in which a NaN is above everything
    exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    exponent = tl.where(amax >= 0x7F800000, 254, exponent)
    # 0x00400000 is 2^-127, the reciprocal of an infinity's scale.
    reciprocal = tl.maximum((254 - exponent) << 23, 0x00400000).to(tl.float32, bitcast=True)
    factor = tl.where(amax > 0x7F800000, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)
    scaled = bits.to(tl.float32, bitcast=True) * reciprocal
    own = scaled.to(tl.int32, bitcast=True) & 0x7F800000
    # E4M3's normal numbers go from 2^-6 to 2^8; those below share the quantum of the smallest.
    own = tl.minimum(tl.maximum(own, 121 << 23), 135 << 23)
    # 1.5 * 2^20 times the power of two: FP32 then has no bit left below E4M3's last, and rounds there.
    quanta = (own + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)
    rounded = ((scaled + quanta) - quanta) * factor
    # What rounds to zero keeps its sign, as in torchao.
    signed = (rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.reshape(signed, (ROWS, COLUMNS)).to(tl.bfloat16)


@triton.jit
def _kernel(x_BRC, out, R, C, TRANSPOSED: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # type: ignore[no-untyped-def]
    tiles_C = tl.cdiv(C, TILE_C)
    r = (tl.program_id(0) // tiles_C).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)[:, None]
    c = (tl.program_id(0) % tiles_C).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)[None, :]
    start = tl.program_id(1).to(tl.int64) * R * C
    inside = (r < R) & (c < C)
    x = tl.load(x_BRC + start + r * C + c, mask=inside, other=0.0)
    if TRANSPOSED:
        quantised = _round_trip(tl.trans(x), TILE_C, TILE_R)
        tl.store(out + start + tl.trans(c) * R + tl.trans(r), quantised, mask=tl.trans(inside))
    else:
        tl.store(out + start + r * C + c, _round_trip(x, TILE_R, TILE_C), mask=inside)


def launch(x_BRC: torch.Tensor, out: torch.Tensor, tile: tuple[int, int, int], *, transposed: bool) -> torch.Tensor:
    """Fill ``out`` in blocks along C, or transposed in blocks along R; both BF16 and contiguous.

    A ``tile`` has the rows and columns of a program, multiples of 32 and powers of two, and its warps.
    """
    if x_BRC.numel():
        R, C = x_BRC.shape[-2:]
        tile_R, tile_C, warps = tile
        grid = (triton.cdiv(R, tile_R) * triton.cdiv(C, tile_C), x_BRC.numel() // (R * C))
        _kernel[grid](x_BRC, out, R, C, transposed, tile_R, tile_C, num_warps=warps)
    return out


@quantise.fake_quantise_rows.register_kernel("cuda")
def fake_quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """``(..., C)`` to the same, in blocks along C."""
    require_whole_blocks("the last dimension", x.shape[-1])
    x = x.contiguous()
    return launch(x.view(-1, BLOCK), torch.empty_like(x), ROWS_TILE, transposed=False)


@quantise.fake_quantise_columns.register_kernel("cuda")
def fake_quantise_columns(x_BRC: torch.Tensor) -> torch.Tensor:
    """``(..., R, C)`` to ``(..., C, R)``, in blocks along R."""
    require_whole_blocks("the last dimension but one", x_BRC.shape[-2], or_none=True)
    return launch(x_BRC.contiguous(), empty_transposed(x_BRC), COLUMNS_TILE, transposed=True)
