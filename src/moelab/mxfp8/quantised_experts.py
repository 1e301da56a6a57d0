"""A routed expert's three products in 8 bits, as one differentiable function: MXFP8 and row-wise FP8.

An expert is ``(silu(x @ w1.T) * (x @ w3.T) * score) @ w2.T``. TorchTitan computes it as three independent products, and
torchao quantises the operands of each. Computed as one function, they save passes over memory that cost as much as some
of the products:

- w1 and w3 take the same rows, so they are one product of 2F columns, and the gradient of the rows is one product that
  sums over 2F (two in the emulation, which keeps torchao's roundings).
- Rows that a dispatch has sent in 8 bits are multiplied as they arrive: not quantised again, not kept in BF16.
- SwiGLU, the routing score and the cast of their result are one pass over memory, and so are their gradients
  (``quantised_experts_cuda.py``).

A row's scales lie along its features, the axis over which the forward and dgrad sum. wgrad sums over tokens and needs
scales along these, so by default it is a BF16 product of the (expanded) rows, torchao's ``wgrad_with_hp``. In 8 bits:

- *MXFP8* casts both operands once more, from BF16, along the tokens. Rows that arrived quantised along their features
  cannot be cast again without a second rounding, and are refused (:func:`require_bf16_wgrad`), as torchao does.
- *FP8* has one scale for a row, and a weight's gradient, the sum over rows of ``outer(g_r, x_r)``, is the same whether
  that scale belongs to ``x_r`` or to ``g_r``. What is quantised by rows already goes into the product as it is,
  transposed, and its scales go into the other operand, which is quantised by columns.

==========================  ================================================  ==========================================
arithmetic                  forward and dgrad                                 where
==========================  ================================================  ==========================================
mxfp8_native                torchao's MXFP8 kernels                           SM100
mxfp8_native_wgrad_mxfp8    the same, and wgrad by them too                   SM100
mxfp8_emulated              operands quantised, expanded, multiplied as BF16  anywhere; torchao's emulation to the bit
mxfp8_emulated_wgrad_mxfp8  the same, and wgrad so too                        anywhere; likewise
fp8                         ``torch._scaled_grouped_mm``, a scale for each    SM90 and SM100; elsewhere operands are
                            row and each column                               expanded and multiplied as BF16
fp8_wgrad_fp8               the same, and wgrad in FP8 too                    the same
==========================  ================================================  ==========================================

FP8 tensors have no BF16 gradient in PyTorch, so rows that arrive in 8 bits come with a *place* for it: a BF16
``(R, D)`` of one element in memory, whose gradient is that of the rows.

Every kernel keeps a row's values in its row, but wgrad sums over all rows of an expert: a NaN in one padding row is a
NaN in that expert's weight gradient. So dispatchers fill padding with zeros, of the rows and of their gradients.

Shape suffixes: R rows in expert-major order, D features, S scales of a row, F hidden features, H = 2F of gate and up, e
local experts; of a product, K is what it sums over and N its columns.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8

from moelab.errors import BadInput
from moelab.experts import local, scored_swiglu, times_scores
from moelab.mxfp8.emulation import quantised_wgrad
from moelab.mxfp8.quantise import (
    BLOCK,
    E4M3,
    Precision8,
    expand,
    fake_quantise_columns,
    fake_quantise_rows,
    quantise,
    quantise_fp8,
)


class QuantisedRows(NamedTuple):
    """Rows as a dispatch in 8 bits delivers them; padding rows have data 0 and any finite scale.

    MXFP8's scales are their biased exponents, ``(R, D / 32)`` bytes in any dtype (uint8, E8M0, or int32 with four of
    them); FP8's float32 ``(R, 1)``, a power of two that the row is multiplied by to expand it.
    """

    place_RD: Tensor  # BF16 of one element in memory; receives the gradient (see :func:`place`)
    data_RD: Tensor  # E4M3
    scales_RS: Tensor


def place(like: Tensor, rows: Any) -> Tensor:
    """A BF16 ``(rows, D)`` of one element in memory that receives the gradient of rows of ``like``, ``(T, D)``."""
    return like.new_zeros((1, 1)).expand(rows, like.shape[1])


@functools.cache
def quantised_experts(parent: type, precision: Precision8 = "mxfp8") -> Any:
    """A subclass of a grouped-experts module that multiplies in 8 bits.

    Its forward is ``(rows, num_tokens_per_expert_e, scores_R=None)``; the scores, where a dispatch brings them,
    multiply the hidden activation (:mod:`moelab.experts`). ``Config`` is the parent's; ``kernels``, if it has them,
    choose between native and emulated MXFP8, and ``wgrad`` the weight gradient's precision: ``bf16`` or the products'.

    Args:
        parent: TorchTitan's ``GroupedExperts`` or a subclass with the same parameters.
        precision: of the products, and of rows that arrive quantised.

    Example:
        >>> from torchtitan.models.common.moe import GroupedExperts
        >>> quantised_experts(GroupedExperts, "fp8").__name__
        'FP8GroupedExperts'
    """
    config_class: Any = parent.Config  # type: ignore[attr-defined]

    class QuantisedExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(config_class):
            wgrad: str = "bf16"

        multiplies_in = precision

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            kernels = getattr(config, "kernels", "emulated")
            self._arithmetic = "fp8" if precision == "fp8" else f"mxfp8_{kernels}"
            if config.wgrad == precision:  # else in BF16, whatever another precision's name says
                self._arithmetic += f"_wgrad_{precision}"

        def forward(
            self, rows: Tensor | QuantisedRows, num_tokens_per_expert_e: Tensor, scores_R: Tensor | None = None
        ) -> Tensor:
            """SwiGLU of every row by its expert, times the row's score if there are scores: BF16 ``(R, D)``.

            Rows are in expert-major order, BF16 or as they arrived; each expert's group, and so its count, is padded
            to what the kernels need. Scores are float32, 0 for padding.
            """
            # Plain tensors: moelab's operators know no DTensor, and the products are of this rank's experts alone.
            w1_eFD, w3_eFD, w2_eDF = (local(weight).bfloat16() for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
            ends_e = torch.cumsum(num_tokens_per_expert_e, dim=0, dtype=torch.int32)
            return expert_rows(rows, w1_eFD, w3_eFD, w2_eDF, ends_e, scores_R, self._arithmetic)

    QuantisedExperts.__name__ = QuantisedExperts.__qualname__ = f"{precision.upper()}{parent.__name__}"
    return QuantisedExperts


def require_bf16_wgrad(experts: Any) -> None:
    """Refuse to send MXFP8 rows to experts that would have to cast them again for their weight gradient.

    :class:`BadInput` unless this configuration of experts is MXFP8 with the weight gradient in BF16.
    """
    wgrad = getattr(experts, "wgrad", None)
    if wgrad == "bf16" and hasattr(experts, "kernels"):
        return
    raise BadInput(
        "dispatch_precision mxfp8 needs MXFP8 experts with their weight gradient in BF16, and these are "
        f"{type(experts)._owner.__name__}{f' with wgrad {wgrad}' if wgrad else ''}; set precision=mxfp8 and "
        "wgrad=bf16, or dispatch_precision=bf16"
    )


def expert_rows(
    rows: Tensor | QuantisedRows,
    w1_eFD: Tensor,
    w3_eFD: Tensor,
    w2_eDF: Tensor,
    ends_e: Tensor,
    scores_R: Tensor | None,
    arithmetic: str,
) -> Tensor:
    """Experts' outputs, BF16 ``(R, D)``; differentiable in the rows (or their place), the weights and the scores.

    Rows are in expert-major order, BF16 ``(R, D)`` or quantised, and end at ``ends_e``, int32. Weights are BF16 and
    contiguous: w1 is the gate's, w3 that of the factor beside it, w2 that of the product that follows. Scores are
    float32 factors of the hidden activation; ``arithmetic`` is a key of ``ARITHMETIC``.
    """
    # Apart, because an autograd function sees no gradient of a tensor that comes inside of a tuple.
    x_RD, data_RD, scales_RS = (rows, None, None) if isinstance(rows, Tensor) else rows
    return _ExpertRows.apply(x_RD, data_RD, scales_RS, w1_eFD, w3_eFD, w2_eDF, ends_e, scores_R, arithmetic)


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        data_RD: Tensor | None,
        scales_RS: Tensor | None,
        w1_eFD: Tensor,
        w3_eFD: Tensor,
        w2_eDF: Tensor,
        ends_e: Tensor,
        scores_R: Tensor | None,
        arithmetic: str,
    ) -> Tensor:
        how = ARITHMETIC[arithmetic]
        rows = how.rows(x_RD, ends_e) if data_RD is None else how.arrived(data_RD, scales_RS, ends_e)
        gate_up_RH = how.product(rows, how.weights([w1_eFD, w3_eFD]), ends_e)
        ctx.arithmetic, ctx.arrived, ctx.scored = arithmetic, data_RD is not None, scores_R is not None
        kept = (x_RD,) if data_RD is None else (data_RD, scales_RS)
        scores = () if scores_R is None else (scores_R,)
        # Not the activation: the gradient of SwiGLU computes it again while it reads gate and up anyway.
        ctx.save_for_backward(gate_up_RH, w1_eFD, w3_eFD, w2_eDF, ends_e, *kept, *scores)
        return how.product(how.swiglu(gate_up_RH, scores_R, ends_e), how.weights([w2_eDF]), ends_e)

    @staticmethod
    def backward(ctx: Any, y_RD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_RH, w1_eFD, w3_eFD, w2_eDF, ends_e, *kept = ctx.saved_tensors
        scores_R = kept.pop() if ctx.scored else None
        how = ARITHMETIC[ctx.arithmetic]
        y_RD = y_RD.contiguous()  # of a plain sum it is one number, expanded; kernels read rows of memory
        y = how.rows(y_RD, ends_e)
        h_grad_RF = how.product(y, how.transposed_weights([w2_eDF]), ends_e)
        grad_RH, grad, h_RF, scores_grad_R = how.swiglu_backward(gate_up_RH, h_grad_RF, scores_R, ends_e)
        x_grad_RD = None
        if ctx.needs_input_grad[0]:
            x_grad_RD = how.gradient_of_rows(grad, [w1_eFD, w3_eFD], ends_e)
        w1_grad_eFD, w3_grad_eFD = how.wgrads_of_gate_and_up(grad_RH, kept, ends_e)
        w2_grad_eDF = how.wgrad_of_output(y_RD, y, h_RF, ends_e)
        scores_grad = scores_grad_R if ctx.scored else None
        # Data and scales have no gradient of their own: that of the rows went to their place.
        return x_grad_RD, None, None, w1_grad_eFD, w3_grad_eFD, w2_grad_eDF, None, scores_grad, None


# Arithmetics: static methods, because torch.compile traces the autograd function, which can hold a name but no object


class _EmulatedMXFP8:
    """Operands quantised, expanded again and multiplied as BF16: torchao's emulation."""

    precision: Precision8 = "mxfp8"

    @staticmethod
    def arrived(data_RD: Tensor, scales_RS: Any, ends_e: Tensor) -> Any:
        """Left operand of rows that came in 8 bits."""
        del ends_e
        return expand(data_RD, scales_RS, "mxfp8")

    @staticmethod
    def rows(x_RK: Tensor, ends_e: Tensor) -> Any:
        """Left operand of BF16 rows."""
        del ends_e
        return fake_quantise_rows(x_RK)

    @staticmethod
    def weights(weights_eNK: list[Tensor]) -> Any:
        """Right operand ``(e, K, N)`` of a product with weights side by side, which sums over their last axis."""
        return fake_quantise_rows(_beside(weights_eNK)).transpose(-2, -1)

    @staticmethod
    def transposed_weights(weights_eNK: list[Tensor]) -> Any:
        """Right operand ``(e, N, K)`` of the gradient's product, which sums over the columns of all weights."""
        return fake_quantise_columns(_beside(weights_eNK)).transpose(-2, -1)

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        """BF16 ``(R, N)``."""
        return torch._grouped_mm(left, right, offs=ends_e)

    @classmethod
    def swiglu(cls, gate_up_RH: Tensor, scores_R: Tensor | None, ends_e: Tensor) -> Any:
        """Left operand of ``silu(gate) * up * score``."""
        return cls.rows(swiglu(gate_up_RH, scores_R), ends_e)

    @classmethod
    def swiglu_backward(
        cls, gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, ends_e: Tensor
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Gradient of gate and up ``(R, H)``, the same as a left operand, activation ``(R, F)``, scores' gradient."""
        grad_RH, h_RF, scores_grad_R = swiglu_backward(gate_up_RH, h_grad_RF, scores_R)
        return grad_RH, cls.rows(grad_RH, ends_e), h_RF, scores_grad_R

    @classmethod
    def gradient_of_rows(cls, grad: Any, weights_eFD: list[Tensor], ends_e: Tensor) -> Tensor:
        """BF16 ``(R, D)`` from the gradient of gate and up as a left operand.

        Emulated as two products, each rounded, because torchao's numbers are those; elsewhere one product sums over
        both.
        """
        # Blocks of 32 do not cross from gate to up, so a half of the operand is the half's own cast.
        gate, up = (
            cls.product(half_RF, cls.transposed_weights([weight_eFD]), ends_e)
            for half_RF, weight_eFD in zip(grad.chunk(2, dim=1), weights_eFD, strict=True)
        )
        return gate + up

    @classmethod
    def wgrads_of_gate_and_up(cls, grad_RH: Tensor, rows: list[Tensor], ends_e: Tensor) -> list[Tensor]:
        """Gradients of w1 and w3; ``rows`` are BF16 or data and scales, as they came.

        Two products, though one of 2F would do: autograd would copy views of one gradient to accumulate them.
        """
        x_RD = rows[0] if len(rows) == 1 else expand(rows[0], rows[1], cls.precision)
        return cls.wgrads(grad_RH, x_RD, ends_e, 2)

    @classmethod
    def wgrad_of_output(cls, y_RD: Tensor, y: Any, h_RF: Tensor, ends_e: Tensor) -> Tensor:
        """Gradient of w2, from the upstream gradient, that gradient as a left operand, and the activation."""
        del y
        return cls.wgrads(y_RD, h_RF, ends_e, 1)[0]

    @staticmethod
    def wgrads(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        """Gradients of so many weights side by side, BF16 ``(e, N / weights, K)``: sums over each expert's rows."""
        # Views of columns, which the product takes as they lie.
        parts = grad_RN.chunk(weights, dim=1)
        return [torch._grouped_mm(one.transpose(-2, -1), x_RK, offs=ends_e, out_dtype=torch.bfloat16) for one in parts]


class _EmulatedMXFP8WithWgrad(_EmulatedMXFP8):
    """wgrad in emulated MXFP8 too."""

    @staticmethod
    def wgrads(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        # Blocks along the tokens do not cross columns, so the weights' gradients can be cast together and cut after.
        grad_NR, x_KR = fake_quantise_columns(grad_RN), fake_quantise_columns(x_RK)
        return [quantised_wgrad(part, x_KR, ends_e) for part in grad_NR.chunk(weights)]


class _In8Bits(_EmulatedMXFP8):
    """Operands that stay in 8 bits: SwiGLU and its gradient are quantised as they are computed."""

    @classmethod
    def swiglu(cls, gate_up_RH: Tensor, scores_R: Tensor | None, ends_e: Tensor) -> Any:
        data, scales = quantised_swiglu(gate_up_RH, scores_R, cls.precision)
        return cls.arrived(data, scales, ends_e)

    @classmethod
    def swiglu_backward(
        cls, gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, ends_e: Tensor
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        grad_RH, data, scales, h_RF, scores_grad_R = quantised_swiglu_backward(
            gate_up_RH, h_grad_RF, scores_R, cls.precision
        )
        return grad_RH, cls.arrived(data, scales, ends_e), h_RF, scores_grad_R

    @classmethod
    def gradient_of_rows(cls, grad: Any, weights_eFD: list[Tensor], ends_e: Tensor) -> Tensor:
        return cls.product(grad, cls.transposed_weights(weights_eFD), ends_e)


class _NativeMXFP8(_In8Bits):
    """torchao's kernels on SM100.

    Not by torchao's ``_to_mxfp8_then_scaled_grouped_mm`` of an ``MXTensor``: torchao 0.18 reads that tensor's scales
    by an attribute which it does not have (``mxfp8_grouped_mm.py``, ``_compute_fwd_sm100``).
    """

    @staticmethod
    def arrived(data_RD: Tensor, scales_RS: Any, ends_e: Tensor) -> Any:
        """E4M3 rows and their scales in the layout that the tensor cores read."""
        # Collectives and DeepEP carry the scales as other types of the same bytes.
        e8m0_RS = scales_RS.contiguous().view(torch.float8_e8m0fnu)
        return data_RD, torchao_mxfp8.mx_block_rearrange_2d_M_groups_cuda(e8m0_RS, ends_e)

    @staticmethod
    def rows(x_RK: Tensor, ends_e: Tensor) -> Any:
        return torchao_mxfp8.mxfp8_quantize_2d_1x32_cutedsl(x_RK, scaling_mode="rceil", offs=ends_e)

    @staticmethod
    def weights(weights_eNK: list[Tensor]) -> Any:
        # The forward's weights: blocks along D, as their rows have them, then the tensor cores' layout.
        data_eNK, scales = torchao_mxfp8.triton_to_mxfp8_dim0(_beside(weights_eNK), BLOCK, "rceil")
        return data_eNK.transpose(-2, -1), torchao_mxfp8.triton_mx_block_rearrange_per_group_3d(scales)

    @staticmethod
    def transposed_weights(weights_eNK: list[Tensor]) -> Any:
        return torchao_mxfp8.mxfp8_quantize_cuda_3d(
            _beside(weights_eNK), BLOCK, scale_block_dim1=BLOCK, scale_block_dim2=1, scaling_mode="rceil"
        )

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        (data, scales), (weight, weight_scales) = left, right
        return torch._scaled_grouped_mm(data, weight, scales, weight_scales, offs=ends_e, out_dtype=torch.bfloat16)


class _NativeMXFP8WithWgrad(_NativeMXFP8):
    """wgrad by torchao's kernels too."""

    @staticmethod
    def wgrads(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        return native_mxfp8_wgrads(grad_RN, x_RK, ends_e, weights)


class _FP8(_In8Bits):
    """One scale for each row of the left operand and each column of the right: torchao's row-wise FP8."""

    precision = "fp8"

    @staticmethod
    def arrived(data_RD: Tensor, scales_RS: Any, ends_e: Tensor) -> Any:
        del ends_e
        return data_RD, scales_RS.reshape(-1)

    @staticmethod
    def rows(x_RK: Tensor, ends_e: Tensor) -> Any:
        del ends_e
        return fp8_rows(x_RK)

    @staticmethod
    def weights(weights_eNK: list[Tensor]) -> Any:
        data_eNK, factors_eN = fp8_weights(weights_eNK, transposed=False)
        return data_eNK.transpose(-2, -1), factors_eN

    @staticmethod
    def transposed_weights(weights_eNK: list[Tensor]) -> Any:
        data_eKN, factors_eK = fp8_weights(weights_eNK, transposed=True)
        return data_eKN.transpose(-2, -1), factors_eK

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        (data, factors_R), (weight, factors_eN) = left, right
        if _on_cuda(data):
            # Fast accumulation, as torchao has it: Hopper's tensor cores keep the sum, which has fewer bits than FP32.
            return torch._scaled_grouped_mm(
                data, weight, factors_R, factors_eN, ends_e, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        expanded = expand(weight.transpose(-2, -1), factors_eN[..., None], "fp8").transpose(-2, -1)
        return torch._grouped_mm(expand(data, factors_R[:, None], "fp8"), expanded, offs=ends_e)


class _FP8WithWgrad(_FP8):
    """wgrad in FP8 too."""

    @classmethod
    def wgrads_of_gate_and_up(cls, grad_RH: Tensor, rows: list[Tensor], ends_e: Tensor) -> list[Tensor]:
        # Rows that arrived in 8 bits are used as they came, with no second rounding.
        data_RD, factors_R = fp8_rows(rows[0]) if len(rows) == 1 else (rows[0], rows[1].reshape(-1))
        x_DR = turned(data_RD)
        grad_HR, factors_eH = fp8_turned(grad_RH, factors_R, ends_e)
        # Every scale is in the other operand, but the product asks for a factor of each row of both.
        ones = factors_eH.new_ones(len(ends_e) * len(x_DR))
        return [
            fp8_wgrad(half_FR, x_DR, factors_eF.reshape(-1), ones, ends_e)
            for half_FR, factors_eF in zip(grad_HR.chunk(2), factors_eH.chunk(2, dim=1), strict=True)
        ]

    @classmethod
    def wgrad_of_output(cls, y_RD: Tensor, y: Any, h_RF: Tensor, ends_e: Tensor) -> Tensor:
        del y_RD
        data_RD, factors_R = y
        h_FR, factors_eF = fp8_turned(h_RF, factors_R, ends_e)
        y_DR = turned(data_RD)
        ones = factors_eF.new_ones(len(ends_e) * len(y_DR))
        return fp8_wgrad(y_DR, h_FR, ones, factors_eF.reshape(-1), ends_e)


ARITHMETIC: dict[str, type[_EmulatedMXFP8]] = {
    "mxfp8_emulated": _EmulatedMXFP8,
    "mxfp8_emulated_wgrad_mxfp8": _EmulatedMXFP8WithWgrad,
    "mxfp8_native": _NativeMXFP8,
    "mxfp8_native_wgrad_mxfp8": _NativeMXFP8WithWgrad,
    "fp8": _FP8,
    "fp8_wgrad_fp8": _FP8WithWgrad,
}
"""How an expert's products are computed, by name."""


def _on_cuda(data: Tensor) -> bool:
    """Whether there are FP8 products; elsewhere their operands are expanded."""
    return data.is_cuda


def _beside(weights_eNK: list[Tensor]) -> Tensor:
    return weights_eNK[0] if len(weights_eNK) == 1 else torch.cat(weights_eNK, dim=1)


# SwiGLU, rounded to BF16 where TorchTitan rounds


def swiglu(gate_up_RH: Tensor, scores_R: Tensor | None) -> Tensor:
    """``silu(gate) * up``, times the score in FP32: BF16 ``(R, F)``."""
    gate_RF, up_RF = gate_up_RH.chunk(2, dim=1)
    return F.silu(gate_RF) * up_RF if scores_R is None else scored_swiglu(gate_RF, up_RF, scores_R)


def swiglu_backward(gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`swiglu`: of gate and up ``(R, H)``, then its result again, then those of the scores ``(R,)``.

    The last are empty without scores.
    """
    gate_RF, up_RF = gate_up_RH.chunk(2, dim=1)
    silu_RF = F.silu(gate_RF)
    h_RF = silu_RF * up_RF
    scores_grad_R = gate_up_RH.new_empty(0, dtype=torch.float32)
    if scores_R is not None:
        scores_grad_R = (h_grad_RF.float() * h_RF.float()).sum(1)
        h_grad_RF, h_RF = times_scores(h_grad_RF, scores_R), times_scores(h_RF, scores_R)
    gate_grad_RF = torch.ops.aten.silu_backward(h_grad_RF * up_RF, gate_RF)
    return torch.cat([gate_grad_RF, h_grad_RF * silu_RF], dim=1), h_RF, scores_grad_R


# Operators: on a CPU they are defined by what follows, on CUDA they are Triton kernels that read their input once


@torch.library.custom_op("moelab::quantised_swiglu", mutates_args=(), device_types="cpu")
def quantised_swiglu(gate_up_RH: Tensor, scores_R: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """:func:`swiglu` in 8 bits: E4M3 ``(R, F)``, and scales as :class:`QuantisedRows` has them."""
    return quantise(swiglu(gate_up_RH, scores_R), precision)  # type: ignore[arg-type]


@torch.library.custom_op("moelab::quantised_swiglu_backward", mutates_args=(), device_types="cpu")
def quantised_swiglu_backward(
    gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`swiglu_backward`, with the gradient of gate and up in BF16 and in 8 bits.

    Returns:
        That gradient in BF16 ``(R, H)``, in E4M3, its scales, the activation ``(R, F)``, the scores' gradient ``(R,)``.
    """
    grad_RH, h_RF, scores_grad_R = swiglu_backward(gate_up_RH, h_grad_RF, scores_R)
    return grad_RH, *quantise(grad_RH, precision), h_RF, scores_grad_R  # type: ignore[arg-type]


@torch.library.custom_op("moelab::fp8_rows", mutates_args=(), device_types="cpu")
def fp8_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8: E4M3 ``(R, K)``, and what each is multiplied by to expand it, float32 ``(R,)``."""
    data_RK, factors_R1 = quantise_fp8(x_RK)
    return data_RK, factors_R1.squeeze(-1)


@torch.library.custom_op("moelab::fp8_weights", mutates_args=(), device_types="cpu")
def fp8_weights(weights_eNK: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
    """Weights side by side, N rows in all, or their transpose, with a factor for each row of the result.

    Returns:
        E4M3 ``(e, N, K)`` and float32 ``(e, N)``; transposed ``(e, K, N)`` and ``(e, K)``.
    """
    wide = _beside(weights_eNK)
    data, factors = quantise_fp8(wide.transpose(-2, -1).contiguous() if transposed else wide)
    return data, factors.squeeze(-1)


@torch.library.custom_op("moelab::fp8_turned", mutates_args=(), device_types="cpu")
def fp8_turned(x_RC: Tensor, factors_R: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """Rows times a factor each, quantised by columns of each expert, and transposed.

    Returns:
        E4M3 ``(C, R)``, undefined for rows after the last end, and float32 ``(e, C)`` that expand it.
    """
    data_CR, factors_eC = empty_fp8_turned(x_RC, factors_R, ends_e)
    # On a CPU; the CUDA kernel reads where an expert's rows end on the device.
    starts = [0, *ends_e.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        part_CR = (x_RC[start:end].float() * factors_R[start:end, None]).t().contiguous()
        if end == start:
            factors_eC[expert] = 1.0  # any finite one: the sum over no rows is zero
            continue
        data, factors_C1 = quantise_fp8(part_CR)
        data_CR[:, start:end], factors_eC[expert] = data, factors_C1.squeeze(-1)
    return data_CR, factors_eC


@torch.library.custom_op("moelab::fp8_wgrad", mutates_args=())
def fp8_wgrad(left_NR: Tensor, right_KR: Tensor, factors_eN: Tensor, factors_eK: Tensor, ends_e: Tensor) -> Tensor:
    """BF16 ``(e, N, K)``: the sum over each expert's rows; a factor for each expert and row of either operand.

    An operator, because PyTorch's own asks a compiler for the stride of a tensor whose width only the data know.
    """
    if _on_cuda(left_NR):
        return torch._scaled_grouped_mm(
            left_NR, right_KR.t(), factors_eN, factors_eK, ends_e, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    # E4M3 is exact in BF16; a factor of a whole row or column can be applied after the sum.
    left_RN, right_RK = (operand.float().bfloat16().t().contiguous() for operand in (left_NR, right_KR))
    sums_eNK = torch._grouped_mm(left_RN.t(), right_RK, offs=ends_e, out_dtype=torch.bfloat16)
    experts = len(ends_e)
    return (sums_eNK.float() * factors_eN.view(experts, -1, 1) * factors_eK.view(experts, 1, -1)).bfloat16()


@torch.library.custom_op("moelab::native_mxfp8_wgrads", mutates_args=())
def native_mxfp8_wgrads(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
    """Gradients of so many weights side by side by torchao's kernels for SM100, BF16 ``(e, N / weights, K)`` each.

    An operator for the reason of :func:`fp8_wgrad`. The casts and their order are those of torchao 0.18's
    ``_compute_wgrad_sm100``; the gradient of all weights is cast at once.
    """
    ends_of_scales = ends_e // BLOCK  # exact, for dispatchers pad groups to whole blocks

    def along_tokens(operand: Tensor, parts: int) -> list[tuple[Tensor, Tensor]]:
        cast = torchao_mxfp8._to_mxfp8_dim1_kernel_wrapper(
            operand.contiguous(),
            BLOCK,
            elem_dtype=E4M3,
            hp_dtype=operand.dtype,
            kernel_preference=torchao_mxfp8.KernelPreference.AUTO,
            cast_kernel_choice=torchao_mxfp8.MXFP8Dim1CastKernelChoice.CUDA,
            scale_calculation_mode=torchao_mxfp8.ScaleCalculationMode.RCEIL,
        )
        # Scales are laid out in tiles of 128 rows for each weight, so they are cut before that and not after it.
        scales = [
            torchao_mxfp8.triton_mx_block_rearrange_2d_K_groups(s, ends_of_scales) for s in cast.scale.chunk(parts)
        ]
        return list(zip(cast.qdata.chunk(parts), scales, strict=True))

    grads = along_tokens(grad_RN, weights)
    ((x_KR, x_scales),) = along_tokens(x_RK, 1)
    return [
        torch._scaled_grouped_mm(
            grad_NR, x_KR.transpose(-2, -1), grad_scales, x_scales, offs=ends_e, out_dtype=torch.bfloat16
        )
        for grad_NR, grad_scales in grads
    ]


@torch.library.custom_op("moelab::turned", mutates_args=(), device_types="cpu")
def turned(data_RC: Tensor) -> Tensor:
    """E4M3 ``(C, R)``, contiguous."""
    return data_RC.t().contiguous()


def _empty_scales(rows_RK: Tensor, K: int, precision: str) -> Tensor:
    if precision == "fp8":
        return rows_RK.new_empty((rows_RK.shape[0], 1), dtype=torch.float32)
    return rows_RK.new_empty((rows_RK.shape[0], K // BLOCK), dtype=torch.uint8)


@quantised_swiglu.register_fake
def empty_quantised_swiglu(gate_up_RH: Tensor, scores_R: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
    del scores_R
    R, H = gate_up_RH.shape
    return gate_up_RH.new_empty((R, H // 2), dtype=E4M3), _empty_scales(gate_up_RH, H // 2, precision)


@quantised_swiglu_backward.register_fake
def empty_quantised_swiglu_backward(
    gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Memory for the results."""
    R, H = gate_up_RH.shape
    data_RH, scales = gate_up_RH.new_empty((R, H), dtype=E4M3), _empty_scales(gate_up_RH, H, precision)
    scores_grad_R = gate_up_RH.new_empty(0 if scores_R is None else R, dtype=torch.float32)
    return gate_up_RH.new_empty((R, H)), data_RH, scales, h_grad_RF.new_empty(h_grad_RF.shape), scores_grad_R


@fp8_rows.register_fake
def empty_fp8_rows(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
    return x_RK.new_empty(x_RK.shape, dtype=E4M3), x_RK.new_empty(x_RK.shape[:1], dtype=torch.float32)


@fp8_weights.register_fake
def empty_fp8_weights(weights_eNK: list[Tensor], transposed: bool) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
    first, (e, _, K) = weights_eNK[0], weights_eNK[0].shape
    N = sum(weight.shape[1] for weight in weights_eNK)
    rows, columns = (K, N) if transposed else (N, K)
    return first.new_empty((e, rows, columns), dtype=E4M3), first.new_empty((e, rows), dtype=torch.float32)


@fp8_turned.register_fake
def empty_fp8_turned(x_RC: Tensor, factors_R: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
    del factors_R
    R, C = x_RC.shape
    return x_RC.new_empty((C, R), dtype=E4M3), x_RC.new_empty((len(ends_e), C), dtype=torch.float32)


@fp8_wgrad.register_fake
def _(left_NR: Tensor, right_KR: Tensor, factors_eN: Tensor, factors_eK: Tensor, ends_e: Tensor) -> Tensor:
    del factors_eN, factors_eK
    return left_NR.new_empty((len(ends_e), len(left_NR), len(right_KR)), dtype=torch.bfloat16)


@native_mxfp8_wgrads.register_fake
def _(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
    size = (len(ends_e), grad_RN.shape[1] // weights, x_RK.shape[1])
    return [grad_RN.new_empty(size) for _ in range(weights)]


@turned.register_fake
def empty_turned(data_RC: Tensor) -> Tensor:
    """Memory for the result."""
    return data_RC.new_empty(data_RC.shape[::-1])


if torch.cuda.is_available():
    importlib.import_module("moelab.mxfp8.quantised_experts_cuda")  # gives the operators their CUDA kernels
