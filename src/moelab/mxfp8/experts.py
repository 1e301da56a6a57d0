"""Routed experts in 8 bits or fewer: one arithmetic, with native or emulated products.

An expert is ``(silu(x @ w1.T) * (x @ w3.T) * score) @ w2.T``: three products forward, two gradients each backward.

============  =======================  =====================  ==================================
product       left operand             right operand          blocks of 32 along
============  =======================  =====================  ==================================
output        rows (R, K)              weight (e, K, N)       K of both
dgrad         gradient (R, N)          weight (e, N, K)       N of both
wgrad         gradient (N, R)          rows (R, K)            R of both, if not in BF16
============  =======================  =====================  ==================================

An *arithmetic* says how these operands are cast and multiplied:

===================  =================================================  ============================================
arithmetic           operands                                           where
===================  =================================================  ============================================
``mxfp8_emulated``   quantised, expanded again, multiplied as BF16      anywhere; to the bit torchao's emulation,
                                                                        whose casts take thirty passes, not one
``nvfp4_emulated``   likewise; a second scale for each expert           anywhere
``mxfp8_native``     as torchao's kernels cast and multiply them        SM100
``fp8``              a scale for each row and each column, into         SM90 and SM100; elsewhere expanded and
                     ``torch._scaled_grouped_mm``                       multiplied as BF16
===================  =================================================  ============================================

The weight gradient is a BF16 product of unquantised operands (torchao's ``wgrad_with_hp``), or, with ``_wgrad_mxfp8``
(``nvfp4``, ``fp8``) behind the name, in the precision of the others. In FP8 a weight's gradient, the sum over rows of
``outer(g_r, x_r)``, is the same whether a row's scale belongs to ``x_r`` or to ``g_r``: what is quantised by rows
already goes into the product as it is, transposed, and its scales go into the other operand, quantised by columns.

Products are called in two ways. :func:`grouped_mm` is one of them, for TorchTitan's experts. :func:`expert_rows` is an
expert as one function, which saves passes over memory that cost as much as some of the products: w1 and w3 take the
same rows, so they are one product of 2F columns; rows that a dispatch has sent in 8 bits are multiplied as they arrive;
SwiGLU, the routing score and the cast of their result are one pass (``operators.py``). Rows that arrived in MXFP8 along
their features cannot be cast along the tokens without a second rounding, so their wgrad is in BF16
(:func:`require_bf16_wgrad`), as torchao's is.

The scores multiply the hidden activation, not the output: ``(s * h) @ w2 = s * (h @ w2)``. There it costs nothing, the
output rows need not be kept for the score's gradient, and combine stays a pure sum. The difference is one rounding.

Every kernel keeps a row's values in its row, but wgrad sums over all rows of an expert: a NaN in one padding row is a
NaN in that expert's weight gradient. So dispatchers fill padding with zeros, of the rows and of their gradients.

Shape suffixes: R rows in expert-major order, D features, S scales of a row, F hidden features, H = 2F of gate and up, e
local experts; of a product, K is what it sums over and N its columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8

from moelab.errors import BadInput
from moelab.mxfp8 import operators
from moelab.mxfp8.operators import beside, swiglu, swiglu_backward, times_scores
from moelab.mxfp8.quantise import (
    BLOCK,
    NVFP4_BLOCK,
    Precision8,
    expand,
    fake_quantise_columns,
    fake_quantise_nvfp4,
    fake_quantise_rows,
    require_whole_blocks,
)

# Arithmetics: static methods, because torch.compile traces the autograd function, which can hold a name but no object


class _EmulatedMXFP8:
    """Operands quantised, expanded again and multiplied as BF16; wgrad of the values before quantisation."""

    precision: Precision8 = "mxfp8"
    block = BLOCK

    @staticmethod
    def along_rows(x: Tensor, ends_e: Tensor | None) -> Tensor:
        """Cast along the last axis, and back; ``ends_e`` are None of weights."""
        del ends_e
        return fake_quantise_rows(x)

    @staticmethod
    def along_columns(x: Tensor, ends_e: Tensor | None) -> Tensor:
        """Cast along the last axis but one, and back; transposed."""
        del ends_e
        return fake_quantise_columns(x)

    @staticmethod
    def arrived(data_RD: Tensor, scales_RS: Any, ends_e: Tensor) -> Any:
        """Left operand of rows that came in 8 bits."""
        del ends_e
        return expand(data_RD, scales_RS, "mxfp8")

    @classmethod
    def rows(cls, x_RK: Tensor, ends_e: Tensor) -> Any:
        """Left operand of BF16 rows."""
        return cls.along_rows(x_RK, ends_e)

    @classmethod
    def weights(cls, weights_eNK: list[Tensor]) -> Any:
        """Right operand ``(e, K, N)`` of a product with weights side by side, which sums over their last axis."""
        return cls.along_rows(beside(weights_eNK), None).transpose(-2, -1)

    @classmethod
    def transposed_weights(cls, weights_eNK: list[Tensor]) -> Any:
        """Right operand ``(e, N, K)`` of the gradient's product, which sums over the columns of all weights."""
        return cls.along_columns(beside(weights_eNK), None).transpose(-2, -1)

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        """BF16 ``(R, N)``."""
        return torch._grouped_mm(left, right, offs=ends_e, out_dtype=torch.bfloat16)

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

    @classmethod
    def wgrads(cls, grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        """Gradients of so many weights side by side, BF16 ``(e, N / weights, K)``: sums over each expert's rows."""
        # Views of columns, which the product takes as they lie.
        parts = grad_RN.chunk(weights, dim=1)
        return [torch._grouped_mm(one.transpose(-2, -1), x_RK, offs=ends_e, out_dtype=torch.bfloat16) for one in parts]


class _EmulatedMXFP8WithWgrad(_EmulatedMXFP8):
    @classmethod
    def wgrads(cls, grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        # Blocks along the tokens do not cross columns, so the weights' gradients can be cast together and cut after.
        grad_NR, x_KR = cls.along_columns(grad_RN, ends_e), cls.along_columns(x_RK, ends_e)
        return [operators.quantised_wgrad(part, x_KR, ends_e) for part in grad_NR.chunk(weights)]


class _NVFP4Casts:
    block = NVFP4_BLOCK

    @staticmethod
    def along_rows(x: Tensor, ends_e: Tensor | None) -> Tensor:
        return fake_quantise_nvfp4(x, ends_e)

    @staticmethod
    def along_columns(x: Tensor, ends_e: Tensor | None) -> Tensor:
        if ends_e is None:  # the transpose of a weight has the same largest magnitude
            return fake_quantise_nvfp4(x.transpose(-2, -1).contiguous(), None)
        return fake_quantise_nvfp4(x, ends_e, True)


class _EmulatedNVFP4(_NVFP4Casts, _EmulatedMXFP8):
    """Likewise, in NVFP4."""


class _EmulatedNVFP4WithWgrad(_NVFP4Casts, _EmulatedMXFP8WithWgrad):
    """Likewise, in NVFP4."""


class _In8Bits(_EmulatedMXFP8):
    """Operands that stay in 8 bits: SwiGLU and its gradient are quantised as they are computed."""

    @classmethod
    def swiglu(cls, gate_up_RH: Tensor, scores_R: Tensor | None, ends_e: Tensor) -> Any:
        data, scales = operators.quantised_swiglu(gate_up_RH, scores_R, cls.precision)
        return cls.arrived(data, scales, ends_e)

    @classmethod
    def swiglu_backward(
        cls, gate_up_RH: Tensor, h_grad_RF: Tensor, scores_R: Tensor | None, ends_e: Tensor
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        grad_RH, data, scales, h_RF, scores_grad_R = operators.quantised_swiglu_backward(
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
        # Collectives and DeepEP carry the scales as other types of the same bytes; tensor cores read them in blocks.
        e8m0_RS = scales_RS.contiguous().view(torch.float8_e8m0fnu)
        return data_RD, torchao_mxfp8.mx_block_rearrange_2d_M_groups_cuda(e8m0_RS, ends_e)

    @staticmethod
    def rows(x_RK: Tensor, ends_e: Tensor) -> Any:
        return torchao_mxfp8.mxfp8_quantize_2d_1x32_cutedsl(x_RK, scaling_mode="rceil", offs=ends_e)

    @staticmethod
    def weights(weights_eNK: list[Tensor]) -> Any:
        data_eNK, scales = torchao_mxfp8.triton_to_mxfp8_dim0(beside(weights_eNK), BLOCK, "rceil")
        return data_eNK.transpose(-2, -1), torchao_mxfp8.triton_mx_block_rearrange_per_group_3d(scales)

    @staticmethod
    def transposed_weights(weights_eNK: list[Tensor]) -> Any:
        return torchao_mxfp8.mxfp8_quantize_cuda_3d(
            beside(weights_eNK), BLOCK, scale_block_dim1=BLOCK, scale_block_dim2=1, scaling_mode="rceil"
        )

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        (data, scales), (weight, weight_scales) = left, right
        return torch._scaled_grouped_mm(data, weight, scales, weight_scales, offs=ends_e, out_dtype=torch.bfloat16)


class _NativeMXFP8WithWgrad(_NativeMXFP8):
    @classmethod
    def wgrads(cls, grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
        return operators.native_mxfp8_wgrads(grad_RN, x_RK, ends_e, weights)


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
        return operators.fp8_rows(x_RK)

    @staticmethod
    def weights(weights_eNK: list[Tensor]) -> Any:
        data_eNK, factors_eN = operators.fp8_weights(weights_eNK, transposed=False)
        return data_eNK.transpose(-2, -1), factors_eN

    @staticmethod
    def transposed_weights(weights_eNK: list[Tensor]) -> Any:
        data_eKN, factors_eK = operators.fp8_weights(weights_eNK, transposed=True)
        return data_eKN.transpose(-2, -1), factors_eK

    @staticmethod
    def product(left: Any, right: Any, ends_e: Tensor) -> Tensor:
        (data, factors_R), (weight, factors_eN) = left, right
        if operators.on_cuda(data):
            # Fast accumulation, as torchao has it: Hopper's tensor cores keep the sum, which has fewer bits than FP32.
            return torch._scaled_grouped_mm(
                data, weight, factors_R, factors_eN, ends_e, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        expanded = expand(weight.transpose(-2, -1), factors_eN[..., None], "fp8").transpose(-2, -1)
        return torch._grouped_mm(expand(data, factors_R[:, None], "fp8"), expanded, offs=ends_e)


class _FP8WithWgrad(_FP8):
    @classmethod
    def wgrads_of_gate_and_up(cls, grad_RH: Tensor, rows: list[Tensor], ends_e: Tensor) -> list[Tensor]:
        # Rows that arrived in 8 bits are used as they came, with no second rounding.
        data_RD, factors_R = operators.fp8_rows(rows[0]) if len(rows) == 1 else (rows[0], rows[1].reshape(-1))
        x_DR = operators.turned(data_RD)
        grad_HR, factors_eH = operators.fp8_turned(grad_RH, factors_R, ends_e)
        # Every scale is in the other operand, but the product asks for a factor of each row of both.
        ones = factors_eH.new_ones(len(ends_e) * len(x_DR))
        return [
            operators.fp8_wgrad(half_FR, x_DR, factors_eF.reshape(-1), ones, ends_e)
            for half_FR, factors_eF in zip(grad_HR.chunk(2), factors_eH.chunk(2, dim=1), strict=True)
        ]

    @classmethod
    def wgrad_of_output(cls, y_RD: Tensor, y: Any, h_RF: Tensor, ends_e: Tensor) -> Tensor:
        del y_RD
        data_RD, factors_R = y
        h_FR, factors_eF = operators.fp8_turned(h_RF, factors_R, ends_e)
        y_DR = operators.turned(data_RD)
        ones = factors_eF.new_ones(len(ends_e) * len(y_DR))
        return operators.fp8_wgrad(y_DR, h_FR, ones, factors_eF.reshape(-1), ends_e)


ARITHMETIC: dict[str, type[_EmulatedMXFP8]] = {
    "mxfp8_emulated": _EmulatedMXFP8,
    "mxfp8_emulated_wgrad_mxfp8": _EmulatedMXFP8WithWgrad,
    "nvfp4_emulated": _EmulatedNVFP4,
    "nvfp4_emulated_wgrad_nvfp4": _EmulatedNVFP4WithWgrad,
    "mxfp8_native": _NativeMXFP8,
    "mxfp8_native_wgrad_mxfp8": _NativeMXFP8WithWgrad,
    "fp8": _FP8,
    "fp8_wgrad_fp8": _FP8WithWgrad,
}
"""How an expert's products are computed, by name."""


# One product


def grouped_mm(x_RK: Tensor, weight_eKN: Tensor, ends_e: Tensor, arithmetic: str) -> Tensor:
    """Multiply each group of rows by its expert's weight, emulated; differentiable.

    MXFP8 is equal, to the bit, to torchao 0.18's ``_to_mxfp8_then_scaled_grouped_mm`` with
    ``KernelPreference.EMULATED`` and RCEIL scales, output and both gradients, on the same device. NVFP4 casts each
    operand as torchao's ``NVFP4Tensor`` does and multiplies as its ``_emulated_nvfp4_scaled_grouped_mm`` does: rounded
    to nearest, without Hadamard transforms, stochastic rounding or layers kept in BF16, which NVIDIA's recipe for long
    trainings has (arXiv 2509.25149).

    Args:
        x_RK: BF16 ``(R, K)``, rows sorted by group.
        weight_eKN: BF16 ``(e, K, N)``, the transposed view of a contiguous ``(e, N, K)``.
        ends_e: int32 ``(e,)``, where each group of rows ends. Rows after the last are not computed.
        arithmetic: an emulated one of ``ARITHMETIC``.

    Returns:
        BF16 ``(R, N)``.

    Raises:
        NotWholeBlocks: if K or N, or for a quantised wgrad R, is not a multiple of the block, 32 or NVFP4's 16.
    """
    block = ARITHMETIC[arithmetic].block
    require_whole_blocks("the inner dimension K", weight_eKN.shape[1], block)
    require_whole_blocks("the outer dimension N", weight_eKN.shape[2], block)
    # Only wgrad has blocks along the tokens: a validation pass may bring any number of them.
    along_tokens = "_wgrad_" in arithmetic and torch.is_grad_enabled() and weight_eKN.requires_grad
    # A compiler does not know how many tokens a dispatch brings; who called has padded them.
    if along_tokens and not torch.compiler.is_compiling():
        require_whole_blocks("the token axis", x_RK.shape[0], block, or_none=True)
    return _GroupedMM.apply(x_RK.contiguous(), weight_eKN, ends_e, arithmetic)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_eKN: Tensor, ends_e: Tensor, arithmetic: str) -> Tensor:
        how = ARITHMETIC[arithmetic]
        ctx.arithmetic = arithmetic
        ctx.save_for_backward(x_RK, weight_eKN, ends_e)
        # Weights come as the transposed view of contiguous ones, so this is no copy.
        weights = how.weights([weight_eKN.transpose(-2, -1).contiguous()])
        return how.product(how.rows(x_RK, ends_e), weights, ends_e)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        x_RK, weight_eKN, ends_e = ctx.saved_tensors
        how, grad_RN = ARITHMETIC[ctx.arithmetic], grad_RN.contiguous()
        (wgrad_eNK,) = how.wgrads(grad_RN, x_RK, ends_e, 1)
        # Quantised a second time, along N: keeping both forms would double the memory of the weights.
        weights = how.transposed_weights([weight_eKN.transpose(-2, -1).contiguous()])
        dgrad_RK = how.product(how.rows(grad_RN, ends_e), weights, ends_e)
        return dgrad_RK, wgrad_eNK.transpose(-2, -1), None, None


# An expert as one function


class QuantisedRows(NamedTuple):
    """Rows as a dispatch in 8 bits delivers them; padding rows have data 0 and any finite scale.

    MXFP8's scales are their biased exponents, ``(R, D / 32)`` bytes in any dtype (uint8, E8M0, or int32 with four of
    them); FP8's float32 ``(R, 1)``, a power of two that the row is multiplied by to expand it.
    """

    place_RD: Tensor  # FP8 tensors have no BF16 gradient in PyTorch: this one receives it (see :func:`place`)
    data_RD: Tensor  # E4M3
    scales_RS: Tensor


def place(like: Tensor, rows: Any) -> Tensor:
    """A BF16 ``(rows, D)`` of one element in memory that receives the gradient of rows of ``like``, ``(T, D)``."""
    return like.new_zeros((1, 1)).expand(rows, like.shape[1])


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
        ctx.arithmetic, ctx.scored = arithmetic, scores_R is not None
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


# TorchTitan's modules


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


@functools.cache
def scored(parent: type) -> Any:
    """A subclass of a grouped-experts module whose forward takes the rows' scores.

    The parent is TorchTitan's ``GroupedExperts`` or a quantised subclass of it: whatever multiplies by ``_grouped_mm``.
    """
    config_class: Any = parent.Config  # type: ignore[attr-defined]

    class ScoredExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(config_class):
            pass

        def forward(self, x_RD: Tensor, num_tokens_per_expert_e: Tensor, scores_R: Tensor) -> Tensor:
            """SwiGLU of every row by its expert, times the row's score in float32, 0 for padding.

            Rows are in expert-major order; ``num_tokens_per_expert_e`` counts padding, too.
            """
            w1_eFD, w2_eDF, w3_eFD = (local(weight) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
            offs = torch.cumsum(num_tokens_per_expert_e, dim=0, dtype=torch.int32)
            gate_RF = self._grouped_mm(A=x_RD, B_t=w1_eFD.bfloat16().transpose(-2, -1), offs=offs)
            up_RF = self._grouped_mm(A=x_RD, B_t=w3_eFD.bfloat16().transpose(-2, -1), offs=offs)
            h_RF = times_scores(F.silu(gate_RF) * up_RF, scores_R)
            return self._grouped_mm(A=h_RF, B_t=w2_eDF.bfloat16().transpose(-2, -1), offs=offs)

    ScoredExperts.__name__ = ScoredExperts.__qualname__ = f"Scored{parent.__name__}"
    return ScoredExperts


@functools.cache
def quantised_experts(parent: type, precision: Precision8 = "mxfp8") -> Any:
    """A subclass of a grouped-experts module that multiplies in 8 bits, each expert as one function.

    The parent is TorchTitan's ``GroupedExperts`` or a subclass with the same parameters; the precision is that of the
    products, and of rows that arrive quantised. ``Config`` is the parent's; ``kernels``, if it has them, choose between
    native and emulated MXFP8, and ``wgrad`` the weight gradient's precision: ``bf16`` or the products'.
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
            """Likewise; rows are BF16 or as they arrived, in groups padded to what the kernels need."""
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
