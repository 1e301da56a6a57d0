"""MXFP8, NVFP4, and FP8 with a scale a row, to the bit as torchao computes them: to 8 bits, back, and there and back.

Scales of MXFP8 and FP8 are powers of two, the least that keeps the largest magnitude in E4M3's range (RCEIL)::

    E = clamp(ceil(log2(amax / 448)), -127, 127),  data = round_to_E4M3(x * 2^-E),  x ~ data * 2^E

over 32 consecutive values (MXFP8, E stored as a byte) or over a row (FP8, 2^E stored as float32). torchao 0.18 finds E
by a division, a logarithm and a rounding up, which compiled kernels may compute less exactly than PyTorch does. Here it
is an integer addition on the bits of ``amax``, because 448 is 1.75 * 2^8: the exponent less 8, and one more if the
significand is above 1.75. For BF16 input the results are torchao's, compiled or not, and exact in BF16 when expanded.

Emulation needs the expanded values alone (:func:`fake_quantise_rows` and its kin). Adding and subtracting 1.5 * 2^23
quanta in FP32 leaves a multiple of the quantum, rounded to nearest even. The ends of the range are torchao 0.18's: a
block with a NaN becomes NaN; a block with an infinity is scaled by 2^127; a block whose scale would be 2^-127 or less
becomes (signed) zeros; and what rounds past BF16's largest number becomes an infinity.

These are operators, opaque to torch.compile and free of side effects, so that a compiled layer quantises an operand
once however many GEMMs take it. On CUDA they are one Triton kernel (``fake_quantise_cuda.py``) that reads the tensor
once, on a CPU plain PyTorch. (They are opaque there too because inductor of torch 2.14.1 fails with an assertion in
``cpp.py``'s ``try_loop_split`` when it fuses blocks along both axes.)

Source: torchao 0.18, ``to_mx`` in ``prototype/mx_formats/mx_tensor.py`` and ``tensor_to_scale`` in
``float8/float8_utils.py``; ``nvfp4_quantize`` and ``NVFP4Tensor.dequantize`` in
``prototype/mx_formats/nvfp4_tensor.py``.

Shape suffixes: B batch (experts), R rows, C columns.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch

from moelab.errors import BadInput

Precision8 = Literal["mxfp8", "fp8"]
E4M3 = torch.float8_e4m3fn
BLOCK = 32
"""Values that share one scale."""
FP8_LEAST_AMAX = 1e-12
"""torchao treats a row of smaller magnitudes as if this were its largest."""

_INFINITY = 0x7F800000  # the bits of an FP32 number's exponent, which alone are infinity
_BEYOND_1_75 = 0x1FFFFF  # carries into the exponent if the significand is above 1.75
_E4M3_MAX_EXPONENT = 8
_E8M0_OF_INFINITY, _E8M0_OF_NAN = 254, 255
_TWO_TO_MINUS_127, _QUIET_NAN = 0x00400000, 0x7FC00000
_E4M3_ROUNDING = (3, 121 << 23, 135 << 23)
_E2M1_ROUNDING = (1, 127 << 23, 129 << 23)
"""Mantissa bits, and FP32's bits of the smallest exponent, which subnormals share, and of the largest."""
NVFP4_BLOCK = 16
E2M1_MAX, E4M3_MAX, _E4M3_LEAST_NORMAL = 6.0, 448.0, 2.0**-6
NVFP4_LEAST_AMAX = 2688 * 2.0**-121
"""Below it, and of a tensor of zeros, torchao divides by zero or overflows and returns NaN; here they become zeros."""


class NotWholeBlocks(BadInput):
    """A dimension that a format would cut into blocks cannot be cut so."""


def require_whole_blocks(what: str, size: int, block: int = BLOCK, *, or_none: bool = False) -> None:
    """Check that a dimension can be cut into blocks; :class:`NotWholeBlocks` names the nearest sizes that can.

    Along tokens 0 will do, too (``or_none``), because no token may have chosen a rank's experts.
    """
    if size % block or not (size or or_none):
        below = size - size % block
        cut = f"cut it to {below} or " if below else ""
        raise NotWholeBlocks(
            f"{what} has {size} values, not a multiple of the block of {block}; {cut}pad it with zeros to "
            f"{below + block}"
        )


# To 8 bits and back


def quantise(x: torch.Tensor, precision: Precision8) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales as :func:`quantise_mxfp8` or :func:`quantise_fp8` returns them."""
    return quantise_mxfp8(x) if precision == "mxfp8" else quantise_fp8(x)


def quantise_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise BF16 ``(..., D)`` to MXFP8 in blocks along the last dimension.

    Returns:
        E4M3 ``(..., D)``, and the biased exponents of the scales, uint8 ``(..., D / 32)``: E8M0's bits in a dtype that
        every collective takes. To the bit those of torchao's ``to_mx(x, float8_e4m3fn, 32, RCEIL)``.

    Raises:
        NotWholeBlocks: if D is not a multiple of 32.

    Example:
        >>> data, scales = quantise_mxfp8(torch.full((1, 32), 448.0).bfloat16())
        >>> data[0, 0].item(), scales.item() - 127
        (448.0, 0)
    """
    require_whole_blocks("the last dimension", x.shape[-1])
    blocks = x.unflatten(-1, (-1, BLOCK)).float()
    exponents = _biased_exponents(blocks.abs().amax(-1, keepdim=True))
    data = (blocks * _reciprocals(exponents)).clamp(-448.0, 448.0).to(E4M3)
    return data.flatten(-2), exponents.squeeze(-1).to(torch.uint8)


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise BF16 ``(..., D)`` to FP8 with one scale for each row.

    Returns:
        E4M3 ``(..., D)``, and what each row is multiplied by to expand it, float32 ``(..., 1)``: the reciprocal of
        torchao's ``tensor_to_scale(x, axiswise_dim=-1, round_scales_to_power_of_2=True)``. A row with a NaN or an
        infinity becomes NaN.

    Example:
        >>> data, scales = quantise_fp8(torch.tensor([[3.0, -7.0]]).bfloat16())
        >>> (data.float() * scales).tolist()
        [[3.0, -7.0]]
    """
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True).clamp(min=FP8_LEAST_AMAX)
    exponents = _biased_exponents(torch.where(amax == torch.inf, torch.nan, amax))
    data = (wide * _reciprocals(exponents)).clamp(-448.0, 448.0).to(E4M3)
    return data, (exponents << 23).view(torch.float32)


def expand(data: torch.Tensor, scales: torch.Tensor, precision: Precision8) -> torch.Tensor:
    """The BF16 values of quantised rows; exact wherever BF16 can hold them.

    Args:
        data: E4M3, ``(..., D)``.
        scales: as :func:`quantise_mxfp8` or :func:`quantise_fp8` return them; MXFP8's bytes in any dtype (E8M0, or
            int32 with four of them).
        precision: which of the two.
    """
    if precision == "fp8":
        return (data.float() * scales).to(torch.bfloat16)
    exponents = scales.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(exponents == 0, _TWO_TO_MINUS_127, exponents << 23)
    factor = torch.where(exponents == _E8M0_OF_NAN, _QUIET_NAN, bits).view(torch.float32).unsqueeze(-1)
    return (data.unflatten(-1, (-1, BLOCK)).float() * factor).to(torch.bfloat16).flatten(-2)


def _biased_exponents(amax: torch.Tensor) -> torch.Tensor:
    """E + 127 as int32, from FP32; 254 for an infinity, 255 for a NaN, as torchao stores them."""
    exponents = (amax.view(torch.int32) + _BEYOND_1_75).bitwise_right_shift_(23).sub_(_E4M3_MAX_EXPONENT).clamp_(min=0)
    exponents.masked_fill_(amax == torch.inf, _E8M0_OF_INFINITY)
    return exponents.masked_fill_(amax.isnan(), _E8M0_OF_NAN)  # not by bits: some of amax's NaNs have the sign set


def _reciprocals(exponents: torch.Tensor) -> torch.Tensor:
    """2^-E; as torchao, 1 where the scale is the smallest."""
    normal = ((254 - exponents) << 23).view(torch.float32)
    normal = torch.where(exponents == 0, 1.0, normal)
    normal = torch.where(exponents == _E8M0_OF_INFINITY, 2.0**-127, normal)
    return torch.where(exponents == _E8M0_OF_NAN, torch.nan, normal)


# There and back at once


@torch.library.custom_op("moelab::fake_quantise_rows", mutates_args=(), device_types="cpu")
def fake_quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantise BF16 ``(..., C)`` to MXFP8 in blocks along the last dimension, and expand again.

    Returns BF16, ``(..., C)``, contiguous: the values of torchao's ``to_mx(x, float8_e4m3fn, 32, RCEIL)`` times its
    scales. :class:`NotWholeBlocks` if C is not a multiple of 32 (0 included).
    """
    require_whole_blocks("the last dimension", x.shape[-1])
    return _round_trip(x.contiguous().unflatten(-1, (-1, BLOCK)), -1).flatten(-2)


@torch.library.custom_op("moelab::fake_quantise_columns", mutates_args=(), device_types="cpu")
def fake_quantise_columns(x_BRC: torch.Tensor) -> torch.Tensor:
    """The same along the last dimension but one, and transposed: ``(..., R, C)`` to a contiguous ``(..., C, R)``.

    A GEMM that sums over the rows (wgrad over tokens, dgrad over a weight's outputs) needs blocks there, and this is
    the layout in which torchao gives it that operand. :class:`NotWholeBlocks` if R is not a multiple of 32.
    """
    require_whole_blocks("the last dimension but one", x_BRC.shape[-2], or_none=True)
    blocks = x_BRC.contiguous().unflatten(-2, (x_BRC.shape[-2] // BLOCK, BLOCK))
    return _round_trip(blocks, -2).flatten(-3, -2).transpose(-2, -1).contiguous()


def empty_transposed(x_BRC: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for ``(..., C, R)``."""
    *batch, R, C = x_BRC.shape
    return x_BRC.new_empty((*batch, C, R))


fake_quantise_rows.register_fake(lambda x: x.new_empty(x.shape))
fake_quantise_columns.register_fake(empty_transposed)


def _round_trip(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Fake-quantise blocks that lie along ``axis``, whose size is 32."""
    wide = x.float()
    exponents = _biased_exponents(wide.abs().amax(axis, keepdim=True))
    # 2^E is 0 where E is -127, which makes the zeros that torchao makes; 2^-E only has to be finite there.
    reciprocals = (254 - exponents).bitwise_left_shift_(23).clamp_(min=_TWO_TO_MINUS_127).view(torch.float32)
    factors = exponents.bitwise_left_shift_(23)
    factors = factors.masked_fill_(factors == _INFINITY, _QUIET_NAN).view(torch.float32)
    scaled = wide.mul_(reciprocals)
    return _with_signs(_round(scaled, *_E4M3_ROUNDING).mul_(factors), x)


def _round(scaled: torch.Tensor, mantissa_bits: int, least: int, largest: int) -> torch.Tensor:
    """Round FP32 in place to an element type, ties to even, by adding a number whose last bit is worth one step."""
    exponents = (scaled.view(torch.int32) & _INFINITY).clamp_(least, largest)
    # Added to the bits of a power of two: times 1.5 * 2^(23 - mantissa bits).
    steps = exponents.add_((23 - mantissa_bits) << 23 | 0x400000).view(torch.float32)
    return scaled.add_(steps).sub_(steps)


def _with_signs(rounded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """BF16 with the signs of ``x``: a negative value that rounds to zero keeps its sign."""
    bits = rounded.to(torch.bfloat16).view(torch.int16)
    return (bits | (x.view(torch.int16) & -0x8000)).view(torch.bfloat16)


# NVFP4, there and back: for its numbers alone, in plain PyTorch on any device


@torch.library.custom_op("moelab::fake_quantise_nvfp4", mutates_args=())
def fake_quantise_nvfp4(x: torch.Tensor, ends_G: torch.Tensor | None, by_columns: bool = False) -> torch.Tensor:
    """Quantise to NVFP4 and expand again: E2M1 elements, an E4M3 scale for 16 of them, an FP32 scale for a tensor.

    What counts as a tensor is one expert's: its tokens, or its weight.

    Args:
        x: BF16, ``(M, C)`` with an expert's rows after another's, or a weight ``(G, N, C)``.
        ends_G: int32, where each expert's rows end; None for a weight.
        by_columns: of ``(M, C)`` alone, blocks along M, with every end a multiple of 16, and the result transposed, as
            :func:`fake_quantise_columns` has it.

    Returns:
        BF16, contiguous, ``(M, C)``, ``(C, M)`` or ``(G, N, C)``: the values of torchao 0.18's ``NVFP4Tensor.to_nvfp4``
        with ``per_tensor_amax_to_scale`` of each expert's own largest magnitude, to the bit; where that is below
        :data:`NVFP4_LEAST_AMAX` they are zeros.

    Raises:
        NotWholeBlocks: if the axis of the blocks is not a multiple of 16.
    """
    if ends_G is None:
        amax = x.abs().amax((1, 2)).view(-1, 1, 1, 1)
    else:
        row_M = torch.arange(x.shape[0], device=x.device, dtype=ends_G.dtype)
        group_M = torch.searchsorted(ends_G, row_M, right=True)  # rows after the last end are a group of their own
        amax_G = x.new_zeros(ends_G.shape[0] + 1)
        amax_G.scatter_reduce_(0, group_M, x.abs().amax(1), "amax")
        amax = amax_G[group_M].view(-1, 1, 1)
    if by_columns:
        require_whole_blocks("the token axis", x.shape[0], NVFP4_BLOCK, or_none=True)
        x, amax = x.t().contiguous(), amax[::NVFP4_BLOCK].view(1, -1, 1)
    else:
        require_whole_blocks("the last dimension", x.shape[-1], NVFP4_BLOCK)
        x = x.contiguous()
    amax, blocks = amax.float(), x.unflatten(-1, (x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK))
    outer = torch.where(amax < NVFP4_LEAST_AMAX, 1.0, amax / (E4M3_MAX * E2M1_MAX))
    wide = blocks.float()
    inner = (wide.abs().amax(-1, keepdim=True) / E2M1_MAX / outer).clamp(_E4M3_LEAST_NORMAL, E4M3_MAX).to(E4M3).float()
    # torchao's order of the operations, which decides the last bit: (1 / outer) / inner, and outer * inner.
    scaled = wide.mul_(1.0 / outer / inner).clamp_(-E2M1_MAX, E2M1_MAX)
    return _with_signs(_round(scaled, *_E2M1_ROUNDING).mul_(outer * inner), blocks).flatten(-2)


@fake_quantise_nvfp4.register_fake
def _(x: torch.Tensor, ends_G: torch.Tensor | None, by_columns: bool = False) -> torch.Tensor:
    return empty_transposed(x) if by_columns else x.new_empty(x.shape)


if torch.cuda.is_available():
    importlib.import_module("moelab.mxfp8.fake_quantise_cuda")  # gives the operators their CUDA kernels
