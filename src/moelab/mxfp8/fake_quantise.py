"""MXFP8 there and back: the BF16 values that a tensor has after quantisation, which is all that emulation needs.

torchao emulates an MXFP8 GEMM by casting each operand to E4M3 with E8M0 scales, expanding it to BF16 again and
multiplying in BF16. The two casts and the product with the scale are one function of a block of 32 values, and this
module computes that function directly, to the bit:

    E  = clamp(ceil(log2(amax / 448)), -127, 127)       RCEIL: the least power of two that keeps amax in E4M3's range
    q  = round_to_E4M3(x * 2^-E) * 2^E                  an E4M3 value has 4 significant bits, so q is exact in BF16

``amax`` is a BF16 number, and 448 is 1.75 * 2^8, so the logarithm is an integer addition on its bits: the exponent
less 8, and one more if the significand is above 1.75. The rounding is FP32 arithmetic: adding and subtracting
1.5 * 2^23 quanta leaves a multiple of the quantum, rounded to nearest even.

The ends of the range are torchao 0.18's: a block with a NaN becomes NaN; a block with an infinity is scaled by 2^127; a
block whose scale would be 2^-127 or less becomes (signed) zeros; and what rounds past BF16's largest number becomes an
infinity.

Three operators do it, opaque to torch.compile and free of side effects, so that a compiled layer quantises an operand
once however many GEMMs take it. On CUDA they are one Triton kernel (``fake_quantise_cuda.py``) that reads the tensor
once; on a CPU plain PyTorch, with as few passes as it can be done in. (They are opaque there too because inductor of
torch 2.14.1 fails with an assertion in ``cpp.py``'s ``try_loop_split`` when it fuses blocks along both axes.)

Shape suffixes: B batch (experts), R rows, C columns, b blocks of 32 values.
"""

from __future__ import annotations

import importlib

import torch

from moelab.errors import BadInput

BLOCK = 32
"""Values that share one scale."""

_INFINITY = 0x7F800000  # the bits of an FP32 number's exponent, which alone are infinity
_BEYOND_1_75 = 0x1FFFFF  # carries into the exponent if the significand is above 1.75
_E4M3_MAX_EXPONENT = 8
_E8M0_OF_INFINITY = 254
_TWO_TO_MINUS_127, _QUIET_NAN = 0x00400000, 0x7FC00000
_LEAST_EXPONENT, _LARGEST_EXPONENT = 121 << 23, 135 << 23  # of E4M3: -6 (its subnormals have it too) to 8
_QUANTA = (20 << 23) | 0x400000  # added to the bits of a power of two: times 1.5 * 2^(23 - 3)


class NotWholeBlocks(BadInput):
    """A dimension that a format would cut into blocks cannot be cut so."""


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
    require_whole_or_no_blocks("the last dimension but one", x_BRC.shape[-2])
    blocks = x_BRC.contiguous().unflatten(-2, (x_BRC.shape[-2] // BLOCK, BLOCK))
    return _round_trip(blocks, -2).flatten(-3, -2).transpose(-2, -1).contiguous()


@torch.library.custom_op("moelab::fake_quantise_both", mutates_args=(), device_types="cpu")
def fake_quantise_both(x_BRC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the above; on CUDA for one read of ``x_BRC``.

    Returns:
        ``(..., R, C)`` with blocks along C, and ``(..., C, R)`` with blocks along R.
    """
    return fake_quantise_rows(x_BRC), fake_quantise_columns(x_BRC)


@fake_quantise_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@fake_quantise_columns.register_fake
def _(x_BRC: torch.Tensor) -> torch.Tensor:
    return empty_transposed(x_BRC)


@fake_quantise_both.register_fake
def _(x_BRC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x_BRC.new_empty(x_BRC.shape), empty_transposed(x_BRC)


def empty_transposed(x_BRC: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for ``(..., C, R)``."""
    *batch, R, C = x_BRC.shape
    return x_BRC.new_empty((*batch, C, R))


def dequantise(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Expand MXFP8 to BF16.

    Args:
        data: ``float8_e4m3fn``, ``(..., C)``.
        scale: ``float8_e8m0fnu``, ``(..., C / 32)``.

    Returns:
        BF16, ``(..., C)``; each value times its scale, exact wherever BF16 can hold it.
    """
    exponent = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, _TWO_TO_MINUS_127, exponent << 23)
    factor = torch.where(exponent == 255, _QUIET_NAN, bits).view(torch.float32).unsqueeze(-1)
    return (data.unflatten(-1, (-1, BLOCK)).to(torch.float32) * factor).to(torch.bfloat16).flatten(-2)


def require_whole_blocks(what: str, size: int) -> None:
    """Raise if a dimension cannot be cut into blocks of 32.

    Raises:
        NotWholeBlocks: naming the dimension.
    """
    if size % BLOCK or not size:
        raise NotWholeBlocks(
            f"{what} has {size} values, and MXFP8 scales blocks of {BLOCK}: it must be a multiple of {BLOCK}, "
            f"{BLOCK} or more"
        )


def require_whole_or_no_blocks(what: str, size: int) -> None:
    """The same for an axis of tokens, which may be empty: no token may have chosen a rank's experts."""
    if size:
        require_whole_blocks(what, size)


def biased_exponents(amax_bits: torch.Tensor) -> torch.Tensor:
    """E + 127 of each block, int32, from the bits of its amax in FP32; 254 for an infinity or a NaN."""
    exponent = (amax_bits + _BEYOND_1_75).bitwise_right_shift_(23).sub_(_E4M3_MAX_EXPONENT).clamp_(min=0)
    return exponent.masked_fill_(amax_bits >= _INFINITY, _E8M0_OF_INFINITY)


def _round_trip(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Fake-quantise blocks that lie along ``axis``, whose size is 32."""
    wide = x.float()
    amax = wide.abs().amax(axis, keepdim=True).abs_()  # twice: the NaN that amax makes has its sign bit set
    reciprocal, factor = _scales(amax.view(torch.int32))
    scaled = wide.mul_(reciprocal)
    exponents = scaled.view(torch.int32) & _INFINITY
    quanta = exponents.clamp_(_LEAST_EXPONENT, _LARGEST_EXPONENT).add_(_QUANTA).view(torch.float32)
    rounded = scaled.add_(quanta).sub_(quanta).mul_(factor).to(torch.bfloat16)
    signs = x.view(torch.int16) & -0x8000  # a negative value that rounds to zero keeps its sign
    return (rounded.view(torch.int16) | signs).view(torch.bfloat16)


def _scales(amax_bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2^-E and 2^E in FP32, from the bits of each block's amax in FP32.

    A block whose scale would be 2^-127 gets 0 for 2^E, an infinite one 2^-127 and 2^127, one with a NaN gets NaN.
    """
    exponent = biased_exponents(amax_bits)
    reciprocal = (254 - exponent).bitwise_left_shift_(23).clamp_(min=_TWO_TO_MINUS_127)
    factor = exponent.bitwise_left_shift_(23).masked_fill_(amax_bits > _INFINITY, _QUIET_NAN)
    return reciprocal.view(torch.float32), factor.view(torch.float32)


if torch.cuda.is_available():
    importlib.import_module("moelab.mxfp8.fake_quantise_cuda")  # gives the operators their CUDA kernels
