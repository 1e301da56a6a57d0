"""One block of MXFP8 with all its parts: the largest magnitude, the scale's exponent, and the code of every number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moelab.errors import BadInput
from moelab.mxfp8.errors import sqnr_db
from moelab.mxfp8.formats import MX, require_finite


@dataclass(frozen=True, kw_only=True)
class OneBlock:
    """A block as MXFP8 stores it.

    Attributes:
        number_format: with which it was cast.
        values: exact.
        codes: stored bytes.
        read_back: what the block says after the cast.
        exponent: of the scale, a power of two; stored with 127 added, as E8M0.
    """

    number_format: MX
    values: tuple[float, ...]
    codes: tuple[int, ...]
    read_back: tuple[float, ...]
    exponent: int

    @property
    def amax(self) -> float:
        """Largest magnitude, from which the scale follows."""
        return max(abs(value) for value in self.values)

    @property
    def scale(self) -> float:
        """What every element is multiplied by."""
        return 2.0**self.exponent

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantisation-noise ratio of the block, dB."""
        return sqnr_db(torch.tensor(self.values), torch.tensor(self.read_back))

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of each number; 0 for a zero."""
        return tuple(
            (back - value) / value if value else 0.0 for value, back in zip(self.values, self.read_back, strict=True)
        )

    def as_text(self) -> str:
        """A table with a line a number: value, value over scale, code, element, what is read back, error."""
        element = self.number_format.element
        lines = [
            f"amax {self.amax:.6g}, scale 2^{self.exponent}, stored as E8M0 byte {self.exponent + 127}",
            f"{'value':>12} {'/ scale':>10}  {'sign exponent mantissa':<23} {element.name:>8} {'read back':>12}  error",
        ]
        for value, code, back, error in zip(self.values, self.codes, self.read_back, self.errors, strict=True):
            bits = f"{code:08b}"
            split = 8 - element.mantissa_bits
            shown = f"{bits[0]}    {bits[1:split]}     {bits[split:]}"
            scaled, stored = value / self.scale, back / self.scale
            lines.append(f"{value:12.5g} {scaled:10.4f}  {shown:<23} {stored:8g} {back:12.5g} {error:+6.1%}")
        return "\n".join(lines)


def one_block(values: torch.Tensor, number_format: MX | None = None) -> OneBlock:
    """Cast one block.

    Args:
        values: as many finite numbers as a block has, one axis.
        number_format: MXFP8 with E4M3 and RCEIL if None.

    Raises:
        BadInput: for another shape, or numbers that are not finite.
    """
    number_format = number_format or MX()
    if values.shape != (number_format.block,):
        raise BadInput(f"one block is {number_format.block} numbers along one axis; got shape {tuple(values.shape)}")
    require_finite("the block", values)
    cast = number_format.cast(values)
    return OneBlock(
        number_format=number_format,
        values=tuple(values.double().tolist()),
        codes=tuple(cast.stored.view(torch.uint8).tolist()),
        read_back=tuple(cast.values.double().tolist()),
        exponent=round(math.log2(cast.scale[0].item())),
    )
