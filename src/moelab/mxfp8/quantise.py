"""MXFP8, and FP8 with a scale a row, to the bit as torchao computes them: to 8 bits, back, and there and back at once.

Both scales are powers of two, the least that keeps the largest magnitude in E4M3's range (RCEIL)::

    E = clamp(ceil(log2(amax / 448)), -127, 127),  data = round_to_E4M3(x * 2^-E),  x ~ data * 2^E

over 32 consecutive values (MXFP8, E stored as a byte) or over a row (FP8, 2^E stored as float32). torchao 0.18 finds E
by a division, a logarithm and a rounding up, which compiled kernels may compute less exactly than PyTorch does. Here it
is an integer addition on the bits of ``amax``, because 448 is 1.75 * 2^8: the exponent less 8, and one more if the
significand is above 1.75. For BF16 input the results are torchao's, compiled or not. What is expanded again is exact in
BF16: an E4M3 number has 4 significant bits, and the scale is a power of two.

Emulation needs the expanded values alone (:func:`fake_quantise_rows` and its kin). They are one function of a block of
32 values: adding and subtracting 1.5 * 2^23 quanta in FP32 leaves a multiple of the quantum, rounded to nearest even.
The ends of the range are torchao 0.18's: a block with a NaN becomes NaN; a block with an infinity is scaled by 2^127; a
block whose scale would be 2^-127 or less becomes (signed) zeros; and what rounds past BF16's largest number becomes an
infinity.

These three are operators, opaque to torch.compile and free of side effects, so that a compiled layer quantises an
operand once however many GEMMs take it. On CUDA they are one Triton kernel (``fake_quantise_cuda.py``) that reads the
tensor once; on a CPU plain PyTorch, with as few passes as it can be done in. (They are opaque there too because
inductor of torch 2.14.1 fails with an assertion in ``cpp.py``'s ``try_loop_split`` when it fuses blocks along both
axes.)

Source: torchao 0.18, ``to_mx`` in ``prototype/mx_formats/mx_tensor.py`` and ``tensor_to_scale`` in
``float8/float8_utils.py``.

Shape suffixes: B batch (experts), R rows, C columns, b blocks of 32 values.
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
_LEAST_EXPONENT, _LARGEST_EXPONENT = 121 << 23, 135 << 23  # of E4M3: -6 (its subnormals have it too) to 8
_QUANTA = (20 << 23) | 0x400000  # added to the bits of a power of two: times 1.5 * 2^(23 - 3)


class NotWholeBlocks(BadInput):
    """A dimension that a format would cut into blocks cannot be cut so."""


def require_whole_blocks(what: str, size: int, block: int = BLOCK, *, or_none: bool = False) -> None:
    """Check that a dimension can be cut into blocks.

    Args:
        what: name of the dimension.
        size: of it.
        block: values of a block.
        or_none: whether 0 will do, as along tokens: no token may have chosen a rank's experts.

    Raises:
        NotWholeBlocks: naming the dimension and the nearest sizes that can.
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
    """:func:`quantise_mxfp8` or :func:`quantise_fp8`."""
    return quantise_mxfp8(x) if precision == "mxfp8" else quantise_fp8(x)


def quantise_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP8 in blocks along the last dimension.

    Args:
        x: BF16, ``(..., D)``, D a multiple of 32.

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
    """Quantise to FP8 with one scale for each row.

    Args:
        x: BF16, ``(..., D)``.

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
    return exponents.masked_fill_(amax.isnan(), _E8M0_OF_NAN)  # asked by name: some of amax's NaNs have the sign set


def _reciprocals(exponents: torch.Tensor) -> torch.Tensor:
    """2^-E; as torchao, 1 where the scale is the smallest."""
    normal = ((254 - exponents) << 23).view(torch.float32)
    normal = torch.where(exponents == 0, 1.0, normal)
    normal = torch.where(exponents == _E8M0_OF_INFINITY, 2.0**-127, normal)
    return torch.where(exponents == _E8M0_OF_NAN, torch.nan, normal)


# There and back at once


@torch.library.custom_op("moelab::fake_quantise_rows", mutates_args=(), device_types="cpu")
def fake_quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """Quantise to MXFP8 in blocks along the last dimension, and expand again.

    Args:
        x: BF16, ``(..., C)``, C a multiple of 32.

    Returns:
        BF16, ``(..., C)``, contiguous: the values of torchao's ``to_mx(x, float8_e4m3fn, 32, RCEIL)`` times its scales.

    Raises:
        NotWholeBlocks: if C is not a multiple of 32 (0 included).
    """
    require_whole_blocks("the last dimension", x.shape[-1])
    return _round_trip(x.contiguous().unflatten(-1, (-1, BLOCK)), -1).flatten(-2)


@torch.library.custom_op("moelab::fake_quantise_columns", mutates_args=(), device_types="cpu")
def fake_quantise_columns(x_BRC: torch.Tensor) -> torch.Tensor:
    """Quantise to MXFP8 in blocks along the last dimension but one, expand again, and transpose.

    A GEMM whose contraction runs over the rows (wgrad over tokens, dgrad over a weight's outputs) needs blocks there,
    and the layout of the result is the one in which torchao gives that operand to the GEMM.

    Args:
        x_BRC: BF16, ``(..., R, C)``, R a multiple of 32.

    Returns:
        BF16, ``(..., C, R)``, contiguous.

    Raises:
        NotWholeBlocks: if R is not a multiple of 32.
    """
    require_whole_blocks("the last dimension but one", x_BRC.shape[-2], or_none=True)
    blocks = x_BRC.contiguous().unflatten(-2, (x_BRC.shape[-2] // BLOCK, BLOCK))
    return _round_trip(blocks, -2).flatten(-3, -2).transpose(-2, -1).contiguous()


@torch.library.custom_op("moelab::fake_quantise_both", mutates_args=(), device_types="cpu")
def fake_quantise_both(x_BRC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the above; on CUDA for one read of ``x_BRC``.

    Returns:
        ``(..., R, C)`` with blocks along C, and ``(..., C, R)`` with blocks along R.
    """
    return fake_quantise_rows(x_BRC), fake_quantise_columns(x_BRC)


def empty_transposed(x_BRC: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for ``(..., C, R)``."""
    *batch, R, C = x_BRC.shape
    return x_BRC.new_empty((*batch, C, R))


fake_quantise_rows.register_fake(lambda x: x.new_empty(x.shape))
fake_quantise_columns.register_fake(empty_transposed)
fake_quantise_both.register_fake(lambda x_BRC: (x_BRC.new_empty(x_BRC.shape), empty_transposed(x_BRC)))


def _round_trip(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Fake-quantise blocks that lie along ``axis``, whose size is 32."""
    wide = x.float()
    exponents = _biased_exponents(wide.abs().amax(axis, keepdim=True))
    # 0 for 2^E where E is -127 makes the zeros that torchao makes; 2^-E is then whatever, if only finite.
    reciprocals = (254 - exponents).bitwise_left_shift_(23).clamp_(min=_TWO_TO_MINUS_127).view(torch.float32)
    factors = exponents.bitwise_left_shift_(23)
    factors = factors.masked_fill_(factors == _INFINITY, _QUIET_NAN).view(torch.float32)
    scaled = wide.mul_(reciprocals)
    own_exponents = scaled.view(torch.int32) & _INFINITY
    quanta = own_exponents.clamp_(_LEAST_EXPONENT, _LARGEST_EXPONENT).add_(_QUANTA).view(torch.float32)
    rounded = scaled.add_(quanta).sub_(quanta).mul_(factors).to(torch.bfloat16)
    signs = x.view(torch.int16) & -0x8000  # a negative value that rounds to zero keeps its sign
    return (rounded.view(torch.int16) | signs).view(torch.bfloat16)


if torch.cuda.is_available():
    importlib.import_module("moelab.mxfp8.fake_quantise_cuda")  # gives the operators their CUDA kernels
