"""Experts whose rows arrive quantised, from a dispatch that sends 8 bits: native and emulated, MXFP8 and row-wise FP8.

The first two GEMMs of an expert, w1 and w3, take the same rows. Here they take them as they arrive: nothing is
quantised a second time, and no BF16 copy is kept for the backward. A row's scales lie along its features, the axis that
the forward sums over. The weight gradient sums over tokens and would need scales along these, so it is computed in BF16
from the expanded rows (torchao's ``wgrad_with_hp``, which it demands of quantised inputs). The third GEMM, w2, stays
what the parent class makes of it.

==================  ==============================================  =========================================
arithmetic          forward and dgrad                               where
==================  ==============================================  =========================================
mxfp8_native        torchao's MXFP8 kernels                         SM100
mxfp8_emulated      operands quantised, expanded, multiplied as     anywhere; torchao's emulation to the bit
                    BF16
fp8_native          torchao's casts, ``torch._scaled_grouped_mm``   CUDA, SM90 and SM100
fp8_emulated        as MXFP8's, a scale for each row and column     anywhere
==================  ==============================================  =========================================

FP8 tensors have no BF16 gradient in PyTorch, so rows come with a *place* for it: a BF16 ``(R, D)`` of one element in
memory, whose gradient is that of the rows.

Shape suffixes: R rows in expert-major order, D features, S scales of a row, F hidden features, e local experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.kernels import (
    triton_fp8_colwise_3d_scale_and_cast,
    triton_fp8_rowwise_2d_scale_and_cast,
    triton_fp8_rowwise_3d_transpose_rhs,
)
from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor
from torchao.prototype.moe_training.utils import unwrap_weight
from torchao.prototype.mx_formats.config import ScaleCalculationMode

from moelab.experts import local, scored_swiglu
from moelab.mxfp8.quantise import (
    BLOCK,
    E4M3,
    Precision8,
    expand,
    fake_quantise_columns,
    fake_quantise_rows,
    quantise_fp8,
)


class QuantisedRows(NamedTuple):
    """Rows as a dispatch in 8 bits delivers them.

    Attributes:
        place_RD: BF16 of one element in memory; receives the gradient (see :func:`place`).
        data_RD: E4M3.
        scales_RS: MXFP8: the scales' biased exponents, ``(R, D / 32)`` bytes in any dtype (uint8, E8M0, or int32 with
            four of them). FP8: float32 ``(R, 1)``, a power of two that the row is multiplied by to expand it. Padding
            rows have data 0 and any finite scale.
    """

    place_RD: Tensor
    data_RD: Tensor
    scales_RS: Tensor


def place(like: Tensor, rows: Any) -> Tensor:
    """A BF16 ``(rows, D)`` that takes no memory, for rows made of ``like``, ``(T, D)``."""
    return like.new_zeros((1, 1)).expand(rows, like.shape[1])


@functools.cache
def prequantised_experts(parent: type, precision: Precision8 = "mxfp8") -> Any:
    """A subclass of a grouped-experts module that takes :class:`QuantisedRows` instead of BF16 rows.

    Its forward is ``(rows, num_tokens_per_expert_e, scores_R=None)``; the scores, where a dispatch brings them,
    multiply the hidden activation (:mod:`moelab.experts`). ``Config`` is the parent's; its ``kernels``, if it
    has them, choose between native and emulated MXFP8.

    Args:
        parent: TorchTitan's ``GroupedExperts`` or a quantised subclass, whose ``_grouped_mm`` multiplies by w2.
        precision: of the rows, and of the weights that they are multiplied by.

    Example:
        >>> from torchtitan.models.common.moe import GroupedExperts
        >>> prequantised_experts(GroupedExperts).__name__
        'PrequantisedGroupedExperts'
    """
    config_class: Any = parent.Config  # type: ignore[attr-defined]

    class PrequantisedExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(config_class):
            pass

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._arithmetic = arithmetic_name(precision, getattr(config, "kernels", "emulated"))

        def forward(
            self, rows: QuantisedRows, num_tokens_per_expert_e: Tensor, scores_R: Tensor | None = None
        ) -> Tensor:
            """SwiGLU of every row by its expert, times the row's score if there are scores.

            Args:
                rows: in expert-major order, each expert's group padded to what the kernels need.
                num_tokens_per_expert_e: rows of each local expert, padding included.
                scores_R: float32; 0 for padding.

            Returns:
                BF16 ``(R, D)``.
            """
            w1_eFD, w3_eFD = (_unwrapped(local(weight)).bfloat16() for weight in (self.w1_EFD, self.w3_EFD))
            ends_e = torch.cumsum(num_tokens_per_expert_e, dim=0, dtype=torch.int32)
            gate_RF, up_RF = gate_and_up(rows, w1_eFD, w3_eFD, ends_e, self._arithmetic)
            h_RF = F.silu(gate_RF) * up_RF if scores_R is None else scored_swiglu(gate_RF, up_RF, scores_R)
            w2_eDF = local(self.w2_EDF).bfloat16()
            return self._grouped_mm(A=h_RF, B_t=w2_eDF.transpose(-2, -1), offs=ends_e)

    PrequantisedExperts.__name__ = PrequantisedExperts.__qualname__ = f"Prequantised{parent.__name__}"
    return PrequantisedExperts


def gate_and_up(
    rows: QuantisedRows, w1_eFD: Tensor, w3_eFD: Tensor, ends_e: Tensor, arithmetic: str
) -> tuple[Tensor, Tensor]:
    """Multiply quantised rows by two weights of their experts; differentiable in the rows' place and both weights.

    Args:
        rows: in expert-major order.
        w1_eFD: BF16, contiguous.
        w3_eFD: BF16, contiguous.
        ends_e: int32, where each expert's rows end.
        arithmetic: a key of ``ARITHMETIC``.

    Returns:
        Two BF16 ``(R, F)``.
    """
    return _GateAndUp.apply(*rows, w1_eFD, w3_eFD, ends_e, arithmetic)


class _GateAndUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        place_RD: Tensor,
        data_RD: Tensor,
        scales_RS: Tensor,
        w1_eFD: Tensor,
        w3_eFD: Tensor,
        ends_e: Tensor,
        arithmetic: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(data_RD, scales_RS, w1_eFD, w3_eFD, ends_e)
        how = ARITHMETIC[arithmetic]
        operand = how.operand(data_RD, scales_RS, ends_e)
        return how.multiply(operand, w1_eFD, ends_e), how.multiply(operand, w3_eFD, ends_e)

    @staticmethod
    def backward(ctx: Any, gate_RF: Tensor, up_RF: Tensor) -> tuple[Tensor | None, ...]:
        data_RD, scales_RS, w1_eFD, w3_eFD, ends_e = ctx.saved_tensors
        how = ARITHMETIC[ctx.arithmetic]
        gate_RF, up_RF = gate_RF.contiguous(), up_RF.contiguous()
        x_RD = None
        if ctx.needs_input_grad[0]:
            x_RD = how.dgrad(gate_RF, w1_eFD, ends_e) + how.dgrad(up_RF, w3_eFD, ends_e)
        expanded_RD = how.expand(data_RD, scales_RS)
        w1_grad_eFD, w3_grad_eFD = (
            torch._grouped_mm(grad_RF.transpose(-2, -1), expanded_RD, offs=ends_e, out_dtype=torch.bfloat16)
            for grad_RF in (gate_RF, up_RF)
        )
        return x_RD, None, None, w1_grad_eFD, w3_grad_eFD, None, None


def _unwrapped(weight: Tensor) -> Tensor:
    """A weight without torchao's wrapper, which would quantise the rows once more."""
    return unwrap_weight(weight) if isinstance(weight, TrainingWeightWrapperBaseTensor) else weight


class _EmulatedMXFP8:
    """Operands quantised, expanded again and multiplied as BF16: torchao's emulation."""

    @staticmethod
    def expand(data_RD: Tensor, scales_RS: Tensor) -> Tensor:
        """BF16 rows, exact."""
        return expand(data_RD, scales_RS, "mxfp8")

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


class _NativeMXFP8(_EmulatedMXFP8):
    """torchao's kernels on SM100.

    Not by torchao's ``_to_mxfp8_then_scaled_grouped_mm`` of an ``MXTensor``: torchao 0.18 reads that tensor's scales
    by an attribute which it does not have (``mxfp8_grouped_mm.py``, ``_compute_fwd_sm100``).
    """

    @staticmethod
    def operand(data_RD: Tensor, scales_RS: Tensor, ends_e: Tensor) -> Any:
        """E4M3 rows and their scales in the layout that the tensor cores read."""
        e8m0_RS = scales_RS.contiguous().view(torch.float8_e8m0fnu)
        return data_RD, torchao_mxfp8.mx_block_rearrange_2d_M_groups_cuda(e8m0_RS, ends_e)

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
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
        # Private to torchao 0.18: the half of its backward that rows which are quantised already still need.
        return torchao_mxfp8._compute_dgrad_sm100(
            grad_RF, w_eFD.transpose(-2, -1), ends_e, BLOCK, torch.bfloat16, ScaleCalculationMode.RCEIL
        )


class _EmulatedFP8(_EmulatedMXFP8):
    """As emulated MXFP8, with one scale for each row of the left operand and each column of the right."""

    @staticmethod
    def expand(data_RD: Tensor, scales_RS: Tensor) -> Tensor:
        return expand(data_RD, scales_RS, "fp8")

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        return torch._grouped_mm(operand, _through_fp8(w_eFD).transpose(-2, -1), offs=ends_e)

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        weight_eDF = _through_fp8(w_eFD.transpose(-2, -1))
        return torch._grouped_mm(_through_fp8(grad_RF), weight_eDF.transpose(-2, -1), offs=ends_e)


class _NativeFP8(_EmulatedFP8):
    """torchao's casts and PyTorch's grouped GEMM, as in torchao's ``_to_fp8_rowwise_then_scaled_grouped_mm``."""

    @staticmethod
    def operand(data_RD: Tensor, scales_RS: Tensor, ends_e: Tensor) -> Any:
        """E4M3 rows and a factor for each."""
        del ends_e
        return data_RD, scales_RS.reshape(-1)

    @staticmethod
    def multiply(operand: Any, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        data_RD, factor_R = operand
        weight_eDF, w_scales = triton_fp8_colwise_3d_scale_and_cast(w_eFD.transpose(-2, -1), E4M3, True)
        return _scaled_product(data_RD, factor_R, weight_eDF, w_scales, ends_e)

    @staticmethod
    def dgrad(grad_RF: Tensor, w_eFD: Tensor, ends_e: Tensor) -> Tensor:
        data_RF, factors_R = triton_fp8_rowwise_2d_scale_and_cast(grad_RF, E4M3, True)
        weight_eFD, w_scales = triton_fp8_rowwise_3d_transpose_rhs(w_eFD.transpose(-2, -1), E4M3, True)
        return _scaled_product(data_RF, factors_R.squeeze(-1).reciprocal(), weight_eFD, w_scales, ends_e)


ARITHMETIC: dict[str, type[_EmulatedMXFP8]] = {
    "mxfp8_emulated": _EmulatedMXFP8,
    "mxfp8_native": _NativeMXFP8,
    "fp8_emulated": _EmulatedFP8,
    "fp8_native": _NativeFP8,
}
"""How quantised rows are multiplied, by name: an autograd function that torch.compile reads takes no objects."""


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
