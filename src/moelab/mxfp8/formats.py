"""Number formats by torchao's own casts: BF16, FP8 with one scale a tensor or a row, MXFP8 and NVFP4 with one a block.

A format has one operation, ``cast``: it stores a tensor in few bits and expands it again. Scales lie along the last
axis, which in a matrix product is the one that is summed over, because only then can a kernel apply them outside the
sum. So one tensor is cast along different axes, transposed or not, for different products.

MXFP8 is the OCP Microscaling format: 32 consecutive numbers share one scale, a power of two stored as an 8-bit exponent
(E8M0), and each is stored as E4M3 or E5M2. torchao 0.18 has four ways to a scale from the block's largest magnitude:

=========  ============================================================  ==========================================
scaling    scale, for E4M3 (emax 8, max 448)                             a block's largest number
=========  ============================================================  ==========================================
``floor``  2^(floor(log2 amax) - emax), as the OCP specification has it  saturates where amax is 1.75 to 2 times a
                                                                         power of two
``even``   as floor, of amax rounded to the element's mantissa first     saturates from 1.75 to 1.9375
``ceil``   2^(ceil(log2 amax) - emax)                                    never saturates; uses 256 of 448 at most
``rceil``  2^ceil(log2(amax / max)), as Blackwell's conversion does      never saturates; uses more than 224 of 448
=========  ============================================================  ==========================================

torchao computes the logarithm of ``rceil`` in float32 unless it compiles for SM100: an amax less than 4e-7 (relative)
above 448 times a power of two gets half of its scale. No BF16 number is there. It also misreads blocks whose scale
would be 2^-127 or less, an amax of about 10^-36: far below what a run computes.

NVFP4 halves the bits: 16 consecutive numbers, each four bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign), share
a scale in E4M3, and a second scale, one FP32 number for the tensor, brings the largest block's scale to 448. A block's
scale is rounded to nearest, so that half of all blocks have one that is a little too small, and their largest number
saturates.

Source: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; torchao 0.18 ``prototype/mx_formats/mx_tensor.py``,
``prototype/mx_formats/nvfp4_tensor.py`` and ``float8/float8_utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from moelab.mxfp8.quantise import BLOCK, NVFP4_BLOCK, NVFP4_LEAST_AMAX, require_whole_blocks

Scaling = Literal["floor", "rceil", "even", "ceil"]
SCALINGS: tuple[Scaling, ...] = ("floor", "rceil", "even", "ceil")


@dataclass(frozen=True, kw_only=True)
class Element:
    """A floating-point type."""

    name: str
    dtype: torch.dtype  # of E2M1, which PyTorch has in pairs only, that of a byte for each code
    max: float  # largest finite magnitude
    emin: int  # exponent of the smallest normal number
    mantissa_bits: int  # stored bits after the binary point

    @property
    def rounding_percent(self) -> float:
        """Largest relative error of rounding a normal number: half a step, on the smallest number that has it."""
        return 100 / (2 ** (self.mantissa_bits + 1) + 1)


E4M3 = Element(name="E4M3", dtype=torch.float8_e4m3fn, max=448.0, emin=-6, mantissa_bits=3)
E5M2 = Element(name="E5M2", dtype=torch.float8_e5m2, max=57344.0, emin=-14, mantissa_bits=2)
E2M1 = Element(name="E2M1", dtype=torch.uint8, max=6.0, emin=0, mantissa_bits=1)
BFLOAT16 = Element(name="BF16", dtype=torch.bfloat16, max=torch.finfo(torch.bfloat16).max, emin=-126, mantissa_bits=7)
ELEMENTS = {element.name.lower(): element for element in (E4M3, E5M2, E2M1)}


@dataclass(frozen=True, kw_only=True)
class Cast:
    """A tensor as a format stores it; each has the tensor's shape."""

    values: torch.Tensor  # what is read back, float32
    stored: torch.Tensor  # the elements, in the format's own type
    scale: torch.Tensor  # what each element is multiplied by, float32


@dataclass(frozen=True, kw_only=True)
class BF16:
    """bfloat16, without a scale."""

    element: Element = BFLOAT16

    def cast(self, x: torch.Tensor) -> Cast:
        """Round to bfloat16."""
        stored = x.to(torch.bfloat16)
        return Cast(values=stored.float(), stored=stored, scale=torch.ones_like(x, dtype=torch.float32))


@dataclass(frozen=True, kw_only=True)
class FP8:
    """8-bit elements under one scale for the whole tensor or for each row, computed from the largest magnitude."""

    per: Literal["tensor", "row"]  # a row's scale is a power of two, as in torchao's recipe
    element: Element = E4M3

    def cast(self, x: torch.Tensor) -> Cast:
        """Scale and round any floating-point tensor with torchao's float8 functions."""
        granularity = ScalingGranularity.TENSORWISE if self.per == "tensor" else ScalingGranularity.AXISWISE
        wide = x.float()  # torchao scales BF16 in FP32, too
        factor = tensor_to_scale(
            wide,
            self.element.dtype,
            scaling_granularity=granularity,
            axiswise_dim=-1,
            round_scales_to_power_of_2=self.per == "row",
        )
        # torchao's scale is what values are multiplied by to store them; to read them back it divides.
        stored = to_fp8_saturated(wide * factor, self.element.dtype)
        return Cast(values=stored.float() / factor, stored=stored, scale=(1.0 / factor).expand(x.shape))


@dataclass(frozen=True, kw_only=True)
class MX:
    """Blocks of consecutive 8-bit elements, each block under one power of two; MXFP8 where the block is 32."""

    scaling: Scaling = "rceil"
    element: Element = E4M3
    block: int = BLOCK

    def cast(self, x: torch.Tensor) -> Cast:
        """Quantise a floating-point tensor with torchao's ``to_mx``; a block with a NaN becomes all NaN.

        Blocks lie along the last axis; :class:`NotWholeBlocks` if its size is no multiple of theirs.

        Example:
            >>> MX().cast(torch.full((1, 32), 1.1)).values[0, 0].item()
            1.125
        """
        require_whole_blocks("the axis", x.shape[-1], self.block)
        wide = x.float().contiguous()  # to_mx cuts blocks along the last axis of memory
        e8m0, stored = to_mx(wide, self.element.dtype, self.block, ScaleCalculationMode(self.scaling))
        values = to_dtype(stored, e8m0, self.element.dtype, self.block, torch.float32)
        # E8M0 is an exponent; as a number it is a power of two, in FP32.
        scale = get_fp_scale(e8m0).repeat_interleave(self.block, dim=-1)
        return Cast(values=values, stored=stored, scale=scale)


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """Blocks of 16 consecutive E2M1 elements under an E4M3 scale each, and an FP32 scale for the whole tensor."""

    element: Element = E2M1
    block: int = NVFP4_BLOCK

    def cast(self, x: torch.Tensor) -> Cast:
        """Quantise a floating-point tensor with torchao's ``nvfp4_quantize``.

        A NaN or an infinity makes the whole tensor NaN. One whose largest magnitude is below ``NVFP4_LEAST_AMAX``, for
        which torchao divides by zero, becomes zeros. Blocks lie along the last axis; :class:`NotWholeBlocks` if its
        size is no multiple of theirs.

        Example:
            >>> NVFP4().cast(torch.tensor([6.0, 2.4] * 8)[None]).values[0, :2].tolist()
            [6.0, 2.0]
        """
        require_whole_blocks("the axis", x.shape[-1], self.block)
        wide = x.float().contiguous()
        amax = wide.abs().max()
        # With a scale of 1 such small numbers round to zero; torchao's would be infinite.
        outer = torch.where(amax < NVFP4_LEAST_AMAX, 1.0, per_tensor_amax_to_scale(amax))
        inner, packed = nvfp4_quantize(wide.view(-1, wide.shape[-1]), self.block, outer)
        # torchao stores two codes in a byte.
        codes = unpack_uint4(packed).view(wide.shape)
        # What an element is multiplied by is the product of both scales.
        scale = (outer * inner.float()).repeat_interleave(self.block, dim=-1).view(wide.shape)
        return Cast(values=f4_unpacked_to_f32(codes) * scale, stored=codes, scale=scale)


Format = BF16 | FP8 | MX | NVFP4
