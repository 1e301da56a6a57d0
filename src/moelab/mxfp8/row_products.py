"""Grouped GEMMs of rows that are quantised already: native and emulated, MXFP8 and row-wise FP8.

==================  ==============================================  =========================================
arithmetic          forward and dgrad                               where
==================  ==============================================  =========================================
mxfp8_native        torchao's MXFP8 kernels                         SM100
mxfp8_emulated      operands quantised, expanded, multiplied as     anywhere; torchao's emulation to the bit
                    BF16
fp8_native          torchao's casts, ``torch._scaled_grouped_mm``   CUDA, SM89 and SM90
fp8_emulated        as MXFP8's, a scale for each row and column     anywhere
==================  ==============================================  =========================================

Shape suffixes: R rows in expert-major order, D features, S scales of a row, F hidden features, e local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.kernels import (
    triton_fp8_colwise_3d_scale_and_cast,
    triton_fp8_rowwise_2d_scale_and_cast,
    triton_fp8_rowwise_3d_transpose_rhs,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode

from moelab.mxfp8.quantise import (
    BLOCK,
    E4M3,
    Precision8,
    expand,
    fake_quantise_columns,
    fake_quantise_rows,
    quantise_fp8,
)


class EmulatedMXFP8:
    """Operands quantised, expanded again and multiplied as BF16: torchao's emulation."""

    @staticmethod
    def expand(data_RD: Tensor, scales_RS: Tensor) -> Tensor:
        """BF16 rows, exact."""
        return expand(data_RD, exponents(scales_RS), "mxfp8")

    @classmethod
    def operand(cls, data_RD: Tensor, scales_RS: Tensor, ends_e: Tensor) -> Any:
        """What ``multiply`` takes; made once for both weights."""
        del ends_e
        return cls.expand(data_RD, scales_RS)

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Rows times one weight, BF16 ``(R, F)``."""
        return torch._grouped_mm(operand, fake_quantise_rows(w_eFD).transpose(-2, -1), offs=ends_e)

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient of the rows, BF16 ``(R, D)``: the upstream gradient and the weight, quantised along F."""
        weight_eFD = fake_quantise_columns(w_eFD).transpose(-2, -1)
        return torch._grouped_mm(fake_quantise_rows(grad_RF), weight_eFD, offs=ends_e)


class NativeMXFP8(EmulatedMXFP8):
    """torchao's kernels on SM100.

    Not by torchao's ``_to_mxfp8_then_scaled_grouped_mm`` of an ``MXTensor``: torchao 0.18 reads that tensor's scales
    by an attribute which it does not have (``mxfp8_grouped_mm.py``, ``_compute_fwd_sm100``).
    """

    @staticmethod
    def operand(data_RD: Tensor, scales_RS: Tensor, ends_e: Tensor) -> Any:
        """E4M3 rows and their scales in the layout that the tensor cores read."""
        e8m0_RS = exponents(scales_RS).view(torch.float8_e8m0fnu)
        return data_RD, torchao_mxfp8.mx_block_rearrange_2d_M_groups_cuda(e8m0_RS, ends_e)

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Rows times one weight, BF16 ``(R, F)``."""
        data_RD, blocked_scales = operand
        weight_eFD, w_scales = torchao_mxfp8.triton_to_mxfp8_dim0(w_eFD, BLOCK, "rceil")
        return torch._scaled_grouped_mm(
            data_RD,
            weight_eFD.transpose(-2, -1),
            blocked_scales,
            torchao_mxfp8.triton_mx_block_rearrange_per_group_3d(w_scales),
            offs=ends_e,
            out_dtype=torch.bfloat16,
        )

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient of the rows, BF16 ``(R, D)``."""
        return torchao_mxfp8._compute_dgrad_sm100(
            grad_RF, w_eFD.transpose(-2, -1), ends_e, BLOCK, torch.bfloat16, ScaleCalculationMode.RCEIL
        )


class EmulatedFP8(EmulatedMXFP8):
    """As emulated MXFP8, with one scale for each row of the left operand and each column of the right."""

    @staticmethod
    def expand(data_RD: Tensor, scales_RS: Tensor) -> Tensor:
        """BF16 rows, exact."""
        return expand(data_RD, scales_RS, "fp8")

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Rows times one weight, BF16 ``(R, F)``."""
        return torch._grouped_mm(operand, _through_fp8(w_eFD).transpose(-2, -1), offs=ends_e)

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient of the rows, BF16 ``(R, D)``."""
        weight_eDF = _through_fp8(w_eFD.transpose(-2, -1))
        return torch._grouped_mm(_through_fp8(grad_RF), weight_eDF.transpose(-2, -1), offs=ends_e)


class NativeFP8(EmulatedFP8):
    """torchao's casts and PyTorch's grouped GEMM, as in torchao's ``_to_fp8_rowwise_then_scaled_grouped_mm``."""

    @staticmethod
    def operand(data_RD: Tensor, scales_RS: Tensor, ends_e: Tensor) -> Any:
        """E4M3 rows and a factor for each."""
        del ends_e
        return data_RD, scales_RS.reshape(-1)

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Rows times one weight, BF16 ``(R, F)``."""
        data_RD, factor_R = operand
        weight_eDF, w_scales = triton_fp8_colwise_3d_scale_and_cast(w_eFD.transpose(-2, -1), E4M3, True)
        return _scaled_product(data_RD, factor_R, weight_eDF, w_scales, ends_e)

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient of the rows, BF16 ``(R, D)``."""
        data_RF, factors_R = triton_fp8_rowwise_2d_scale_and_cast(grad_RF, E4M3, True)
        weight_eFD, w_scales = triton_fp8_rowwise_3d_transpose_rhs(w_eFD.transpose(-2, -1), E4M3, True)
        return _scaled_product(data_RF, factors_R.squeeze(-1).reciprocal(), weight_eFD, w_scales, ends_e)


ARITHMETIC: dict[str, type[EmulatedMXFP8]] = {
    "mxfp8_emulated": EmulatedMXFP8,
    "mxfp8_native": NativeMXFP8,
    "fp8_emulated": EmulatedFP8,
    "fp8_native": NativeFP8,
}
"""How quantised rows are multiplied, by name: an autograd function that torch.compile reads takes no objects."""


def exponents(scales_RS: Tensor) -> Tensor:
    """The bytes of MXFP8's scales, uint8 ``(R, D / 32)``, in whatever dtype they travelled."""
    return scales_RS if scales_RS.dtype is torch.uint8 else scales_RS.contiguous().view(torch.uint8)


def arithmetic_name(precision: Precision8, kernels: str) -> str:
    """A key of ``ARITHMETIC``.

    Args:
        precision: of the rows.
        kernels: ``native`` or ``emulated``, for MXFP8; FP8 is native wherever there is CUDA.
    """
    if precision == "fp8":
        kernels = "native" if torch.cuda.is_available() else "emulated"
    return f"{precision}_{kernels}"


def _through_fp8(x: Tensor) -> Tensor:
    return expand(*quantise_fp8(x), "fp8")


def _scaled_product(left: Tensor, factor_R: Tensor, right: Tensor, right_scales: Tensor, ends_e: Tensor) -> Tensor:
    """Product of FP8 operands; torchao's scales are what a column was multiplied by, PyTorch's what expands it."""
    factor = right_scales.reshape(right.shape[0], -1).reciprocal()
    return torch._scaled_grouped_mm(
        left, right, factor_R, factor, ends_e, out_dtype=torch.bfloat16, use_fast_accum=True
    )
