"""Rows in 8 bits with their scales, as they travel and as grouped GEMMs take them: MXFP8, and FP8 with a scale a row.

Both scales are powers of two, the least that keeps the largest magnitude in E4M3's range (RCEIL)::

    E = ceil(log2(amax / 448)),  data = round_to_E4M3(x * 2^-E),  x ~ data * 2^E

over 32 consecutive values (MXFP8, E stored as a byte) or over a row (FP8, 2^E stored as float32). torchao 0.18 finds E
by a division, a logarithm and a rounding up, which compiled kernels may compute less exactly than PyTorch does; here it
is an addition on the bits of ``amax``, because 448 is 1.75 * 2^8: the exponent less 8, and one more if the significand
is above 1.75. The results are torchao's to the bit for BF16 input, compiled or not.

Expanded rows are exact in BF16: an E4M3 number has 4 significant bits, and the scale is a power of two.

Source: torchao 0.18, ``to_mx`` in ``prototype/mx_formats/mx_tensor.py`` and ``tensor_to_scale`` in
``float8/float8_utils.py``.
"""

from __future__ import annotations

from typing import Literal

import torch

from moelab.mxfp8.fake_quantise import BLOCK, biased_exponents, dequantise, require_whole_blocks

Precision8 = Literal["mxfp8", "fp8"]
E4M3 = torch.float8_e4m3fn
FP8_LEAST_AMAX = 1e-12
"""torchao treats a row of smaller magnitudes as if this were its largest."""

_INFINITE, _NAN = 254, 255  # biased exponents that torchao gives to blocks with an infinity and with a NaN


def quantise(x: torch.Tensor, precision: Precision8) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantise_mxfp8` or :func:`quantise_fp8`."""
    return quantise_mxfp8(x) if precision == "mxfp8" else quantise_fp8(x)


def expand(data: torch.Tensor, scales: torch.Tensor, precision: Precision8) -> torch.Tensor:
    """The BF16 values of quantised rows, exact.

    Args:
        data: E4M3, ``(..., D)``.
        scales: as :func:`quantise_mxfp8` or :func:`quantise_fp8` return them.
        precision: which of the two.
    """
    if precision == "mxfp8":
        return dequantise(data, scales)
    return (data.float() * scales).to(torch.bfloat16)


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


def _biased_exponents(amax: torch.Tensor) -> torch.Tensor:
    """E + 127 as int32, 255 for a NaN."""
    return torch.where(amax.isnan(), _NAN, biased_exponents(amax.view(torch.int32)))


def _reciprocals(exponents: torch.Tensor) -> torch.Tensor:
    """2^-E; as torchao, 1 where the scale is the smallest."""
    normal = ((254 - exponents) << 23).view(torch.float32)
    normal = torch.where(exponents == 0, 1.0, normal)
    normal = torch.where(exponents == _INFINITE, 2.0**-127, normal)
    return torch.where(exponents == _NAN, torch.nan, normal)
