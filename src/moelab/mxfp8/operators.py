"""What experts compute beside their products, as operators: SwiGLU with its cast, casts of FP8, weight gradients.

Operators are opaque to torch.compile. Most are bound by memory: on a CPU they are defined by this module's PyTorch, on
CUDA they are Triton kernels that read their input once (``operators_cuda.py``). Weight gradients are operators because
torch 2.14's shape functions ask for sizes or strides of rows whose number only the data know.

Shape suffixes: R rows in expert-major order, F hidden features, H = 2F of gate and up, e local experts; of a product, K
is what it sums over and N its columns.
"""

from __future__ import annotations

import importlib
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8

from moelab.mxfp8.quantise import BLOCK, E4M3, empty_transposed, quantise, quantise_fp8


def on_cuda(data: Tensor) -> bool:
    """Whether there are FP8 products; elsewhere their operands are expanded."""
    return data.is_cuda


def beside(weights_eNK: list[Tensor]) -> Tensor:
    """Weights side by side, ``(e, N of all, K)``."""
    return weights_eNK[0] if len(weights_eNK) == 1 else torch.cat(weights_eNK, dim=1)


# SwiGLU, rounded to BF16 where TorchTitan rounds


def swiglu(gate_up_RH: Tensor, scores_R: Tensor | None) -> Tensor:
    """``silu(gate) * up``, times the score in FP32: BF16 ``(R, F)``."""
    gate_RF, up_RF = gate_up_RH.chunk(2, dim=1)
    h_RF = F.silu(gate_RF) * up_RF
    return h_RF if scores_R is None else times_scores(h_RF, scores_R)


def times_scores(x_RF: Tensor, scores_R: Tensor) -> Tensor:
    """Rows times a score each in FP32, rounded to the rows' dtype."""
    return (x_RF.float() * scores_R[:, None]).to(x_RF.dtype)


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
    wide = beside(weights_eNK)
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


@torch.library.custom_op("moelab::quantised_wgrad", mutates_args=())
def quantised_wgrad(grad_NM: Tensor, x_KM: Tensor, ends_G: Tensor) -> Tensor:
    """The weight gradient of operands whose blocks lie along the tokens, as :func:`fake_quantise_columns` leaves them.

    An operator of its own because torch 2.14's shape function of ``_grouped_mm`` asks whether M is 1, which a compiler
    cannot know of the rows that a dispatch brings. Operands are BF16 and contiguous,
    ``ends_G`` is int32; what comes back is BF16 ``(G, N, K)``, zeros of a rank without tokens.
    """
    if not x_KM.shape[1]:
        return x_KM.new_zeros((len(ends_G), len(grad_NM), len(x_KM)))
    return torch._grouped_mm(grad_NM, x_KM.transpose(-2, -1), offs=ends_G, out_dtype=torch.bfloat16)


quantised_wgrad.register_fake(lambda grad_NM, x_KM, ends_G: x_KM.new_empty((len(ends_G), len(grad_NM), len(x_KM))))


@torch.library.custom_op("moelab::fp8_wgrad", mutates_args=())
def fp8_wgrad(left_NR: Tensor, right_KR: Tensor, factors_eN: Tensor, factors_eK: Tensor, ends_e: Tensor) -> Tensor:
    """BF16 ``(e, N, K)``: the sum over each expert's rows; a factor for each expert and row of either operand.

    An operator, because PyTorch's own asks a compiler for the stride of a tensor whose width only the data know.
    """
    if on_cuda(left_NR):
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
def empty_quantised_swiglu(gate_up_RH: Tensor, _scores_R: Tensor | None, precision: str) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
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
def empty_fp8_turned(x_RC: Tensor, _factors_R: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the result."""
    R, C = x_RC.shape
    return x_RC.new_empty((C, R), dtype=E4M3), x_RC.new_empty((len(ends_e), C), dtype=torch.float32)


@fp8_wgrad.register_fake
def _(left_NR: Tensor, right_KR: Tensor, _factors_eN: Tensor, _factors_eK: Tensor, ends_e: Tensor) -> Tensor:
    return left_NR.new_empty((len(ends_e), len(left_NR), len(right_KR)), dtype=torch.bfloat16)


@native_mxfp8_wgrads.register_fake
def _(grad_RN: Tensor, x_RK: Tensor, ends_e: Tensor, weights: int) -> list[Tensor]:
    size = (len(ends_e), grad_RN.shape[1] // weights, x_RK.shape[1])
    return [grad_RN.new_empty(size) for _ in range(weights)]


turned.register_fake(empty_transposed)


if torch.cuda.is_available():
    importlib.import_module("moelab.mxfp8.operators_cuda")  # gives the operators their CUDA kernels
