"""Experts whose rows arrive quantised, from a dispatch that sends 8 bits.

The first two GEMMs of an expert, w1 and w3, take the same rows. Here they take them as they arrive: nothing is
quantised a second time, and no BF16 copy is kept for the backward. A row's scales lie along its features, the axis that
the forward sums over. The weight gradient sums over tokens and would need scales along these, so it is computed in BF16
from the expanded rows (torchao's ``wgrad_with_hp``, which it demands of quantised inputs). The third GEMM, w2, stays
what the parent class makes of it. The arithmetic is in :mod:`moelab.mxfp8.row_products`.

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
from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor
from torchao.prototype.moe_training.utils import unwrap_weight

from moelab.deepep.experts import local, scored_swiglu
from moelab.mxfp8.quantise import Precision8
from moelab.mxfp8.row_products import ARITHMETIC, arithmetic_name


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
    multiply the hidden activation (:mod:`moelab.deepep.experts`). ``Config`` is the parent's; its ``kernels``, if it
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
            w1_eFD, w3_eFD = (unwrapped(local(weight)).bfloat16() for weight in (self.w1_EFD, self.w3_EFD))
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


def unwrapped(weight: Tensor) -> Tensor:
    """A weight without torchao's wrapper, which would quantise the rows once more."""
    return unwrap_weight(weight) if isinstance(weight, TrainingWeightWrapperBaseTensor) else weight
