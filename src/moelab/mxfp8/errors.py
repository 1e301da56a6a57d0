"""How much of a tensor a number format loses, measured in float64.

The signal-to-quantisation-noise ratio (SQNR) is that of energies, in decibels: 20 dB is a relative error of a tenth,
6 dB more halves it, so one mantissa bit is worth about 6 dB. The fractions say how: a *saturated* value was cut to the
largest element, an *underflow* was rounded to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moelab.errors import BadInput
from moelab.mxfp8.fake_quantise import BLOCK
from moelab.mxfp8.formats import Format, require_finite, require_whole_blocks


@dataclass(frozen=True, kw_only=True)
class TensorErrors:
    """What a format does to one tensor.

    Attributes:
        sqnr_db: energy of the values over energy of their errors, dB; infinite where nothing is lost.
        relative_error: norm of the errors over norm of the values.
        saturated_fraction: of all values, those beyond the largest element times their scale.
        underflow_fraction: of all values, those that are not zero and are stored as zero.
    """

    sqnr_db: float
    relative_error: float
    saturated_fraction: float
    underflow_fraction: float


def measure(x: torch.Tensor, number_format: Format, *, axis: int = -1) -> TensorErrors:
    """Cast a tensor and hold it against itself.

    Args:
        x: finite values, not all zero.
        number_format: what it is cast to.
        axis: along which scales are shared.

    Raises:
        BadInput: for values that are not finite or all zero, or an axis that cannot be cut into blocks.

    Example:
        >>> from moelab.mxfp8.formats import MX
        >>> round(measure(torch.linspace(1.0, 1.9, 32), MX()).sqnr_db)
        36
    """
    require_finite("the tensor", x)
    if not x.any():
        raise BadInput("the tensor has no value other than zero, so there is no error to measure")
    cast = number_format.cast(x, axis)
    magnitude = x.abs().double()
    return TensorErrors(
        sqnr_db=sqnr_db(x, cast.values),
        relative_error=relative_error(x, cast.values),
        saturated_fraction=float((magnitude > number_format.max * cast.scale.double()).double().mean()),
        underflow_fraction=float(((cast.values == 0) & (x != 0)).double().mean()),
    )


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference, in float64."""
    exact = reference.double()
    return float(torch.linalg.vector_norm(value.double() - exact) / torch.linalg.vector_norm(exact))


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """Signal-to-quantisation-noise ratio, dB; infinite for equal tensors."""
    error = relative_error(reference, value)
    return -20 * math.log10(error) if error else math.inf


def block_sqnr_db(x: torch.Tensor, value: torch.Tensor, *, block: int = BLOCK) -> torch.Tensor:
    """SQNR of every block along the last axis, dB.

    Args:
        x: exact values, last axis a multiple of the block.
        value: what became of them, same shape.
        block: elements of a block.

    Returns:
        float64, one number a block; infinite where nothing is lost, NaN where the block is zero.
    """
    exact = _blocks(x, block)
    noise = _blocks(value, block) - exact
    return 10 * torch.log10(exact.square().sum(-1) / noise.square().sum(-1))


def block_range_bits(x: torch.Tensor, *, axis: int = -1, block: int = BLOCK) -> torch.Tensor:
    """Dynamic range of every block: log2 of its largest over its smallest magnitude that is not zero.

    Returns:
        float64, one number a block; NaN where a block is zero. E4M3 reaches 17.8 bits from its smallest number above
        zero to its largest, E5M2 31.8.
    """
    magnitude = _blocks(x.movedim(axis, -1), block).abs()
    smallest = magnitude.masked_fill(magnitude == 0, math.inf).amin(-1)
    return torch.log2(magnitude.amax(-1) / smallest).masked_fill(torch.isinf(smallest), math.nan)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    require_whole_blocks(x.shape[-1], block)
    return x.double().reshape(-1, block)
