"""Emulated MXFP8 and NVFP4 grouped GEMMs: torchao's numbers to the bit, without torchao's time.

torchao 0.18's emulation (``torchao/prototype/moe_training/mxfp8_grouped_mm.py``, recipe ``mxfp8_emulated_rceil``)
quantises each operand, expands it to BF16 and gives all groups to one ``torch._grouped_mm``. What it costs is the
casts, some thirty passes over each operand, and a loop over the groups to pad them. Ours are in ``quantise.py``
and :func:`_padding_of`; the three products are the same calls of the same operator on operands of the same bits, shapes
and strides, so output and gradients are torchao's wherever that operator is deterministic:

==========  =======================  =====================  ===================================
product     left operand             right operand          blocks of 32 along
==========  =======================  =====================  ===================================
output      x (M, K)                 w (G, K, N)            K of both
dgrad       grad (M, N)              w (G, N, K)            N of both
wgrad       grad (N, M)              x (M, K)               M of both; in BF16 when asked, from
                                                            the values before quantisation
==========  =======================  =====================  ===================================

The blocks of wgrad run along tokens, so every group must be a multiple of 32 tokens: the dispatcher pads, or
``pad_inside`` does. NVFP4 has blocks of 16, and a second scale for each expert's tokens and weight.
A weight's two forms differ by block axis and cannot be derived from each other; each is computed where it is needed.

Activations that arrive quantised, from a dispatch that sends MXFP8, are :mod:`moelab.mxfp8.quantised_experts`'s.

Shape suffixes: M tokens of all groups, G groups (experts), K and N a GEMM's inner and outer features, b blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from moelab.mxfp8.quantise import (
    BLOCK,
    NVFP4_BLOCK,
    fake_quantise_both,
    fake_quantise_columns,
    fake_quantise_nvfp4,
    fake_quantise_rows,
    require_whole_blocks,
)


class _Casts(NamedTuple):
    """How a format casts operands: values of a block, and a cast there and back along rows, along columns, and both.

    A cast takes the tensor and where each expert's rows end, which NVFP4 asks for its second scale.
    """

    block: int
    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    columns: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    both: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


_CASTS = {
    "mxfp8": _Casts(
        BLOCK,
        lambda x, _ends: fake_quantise_rows(x),
        lambda x, _ends: fake_quantise_columns(x),
        lambda x, _ends: fake_quantise_both(x),
    ),
    "nvfp4": _Casts(
        NVFP4_BLOCK,
        fake_quantise_nvfp4,
        # A weight's other form is the cast of its transpose, which has the same largest magnitude.
        lambda x, ends: fake_quantise_nvfp4(*((x.mT.contiguous(), ends) if x.ndim == 3 else (x, ends, True))),
        lambda x, ends: (fake_quantise_nvfp4(x, ends), fake_quantise_nvfp4(x, ends, True)),
    ),
}


def grouped_mm(
    x_MK: torch.Tensor,
    weight_GKN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    wgrad: Literal["mxfp8", "bf16"] = "mxfp8",
    pad_inside: bool = False,
    precision: Literal["mxfp8", "nvfp4"] = "mxfp8",
) -> torch.Tensor:
    """Multiply each group of tokens by its expert's weight in emulated MXFP8 or NVFP4; differentiable.

    MXFP8 is equal, to the bit, to torchao 0.18's ``_to_mxfp8_then_scaled_grouped_mm`` with
    ``KernelPreference.EMULATED`` and RCEIL scales, output and both gradients, on the same device. NVFP4 casts each
    operand as torchao's ``NVFP4Tensor`` does and multiplies as its ``_emulated_nvfp4_scaled_grouped_mm`` does: rounded
    to nearest, without Hadamard transforms, stochastic rounding or layers kept in BF16, which NVIDIA's recipe for long
    trainings has (arXiv 2509.25149).

    Args:
        x_MK: BF16 ``(M, K)``, tokens sorted by group.
        weight_GKN: BF16 ``(G, K, N)``, the transposed view of a contiguous ``(G, N, K)``.
        ends_G: int32 ``(G,)``, where each group of rows ends. Rows after the last are not computed.
        wgrad: ``bf16`` leaves the operands of the weight gradient unquantised; ``mxfp8`` is the precision's own.
        pad_inside: pad each group with zeros to whole blocks of tokens, and take them off again; ``ends_G`` must
            then end at M.
        precision: of the operands.

    Returns:
        BF16 ``(M, N)``.

    Raises:
        NotWholeBlocks: if K or N, or for a quantised wgrad M, is not a multiple of the block, 32 or NVFP4's 16.

    Example:
        >>> x, w = torch.randn(64, 32).bfloat16(), torch.randn(2, 96, 32).bfloat16()
        >>> grouped_mm(x, w.transpose(-2, -1), torch.tensor([32, 64], dtype=torch.int32)).shape
        torch.Size([64, 96])
    """
    block = _CASTS[precision].block
    require_whole_blocks("the inner dimension K", weight_GKN.shape[1], block)
    require_whole_blocks("the outer dimension N", weight_GKN.shape[2], block)
    # Only wgrad has blocks along the tokens: a validation pass may bring any number of them.
    needs_wgrad = torch.is_grad_enabled() and weight_GKN.requires_grad
    # A compiler does not know how many tokens a dispatch brings; the dispatcher has padded them.
    if needs_wgrad and wgrad == "mxfp8" and not (pad_inside or torch.compiler.is_compiling()):
        require_whole_blocks("the token axis (pad_inside=True pads it)", x_MK.shape[0], block, or_none=True)
    return _GroupedMM.apply(x_MK, weight_GKN, ends_G, wgrad == "bf16", pad_inside, precision)


def _padding_of(ends_G: torch.Tensor, tokens: int, block: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Each token's row when groups are padded to whole blocks, int64 ``(M,)``; where the groups end; rows in all.

    The layout of torchao's ``pad_token_groups``, without its loop over the groups.
    """
    starts_G = torch.nn.functional.pad(ends_G[:-1], (1, 0))
    padded_G = (ends_G - starts_G + block - 1) // block * block
    padded_ends_G = torch.cumsum(padded_G, 0, dtype=torch.int32)
    shift_G = padded_ends_G - padded_G - starts_G
    token_M = torch.arange(tokens, device=ends_G.device, dtype=torch.int32)
    # A token's group is the first that ends after it; empty groups end where the one before does.
    rows_M = token_M + shift_G[torch.searchsorted(ends_G, token_M, right=True)]
    # The most that padding can need: the exact number is on the device, and reading it would be a host sync.
    rows = (tokens + block - 1) // block * block + ends_G.shape[0] * block
    return rows_M.long(), padded_ends_G, rows


def _pad(x_MK: torch.Tensor, rows_M: torch.Tensor, rows: int) -> torch.Tensor:
    return x_MK.new_zeros((rows, x_MK.shape[1])).index_copy_(0, rows_M, x_MK)


def _product(left: torch.Tensor, right: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(left, right, offs=ends_G, out_dtype=torch.bfloat16)


@torch.library.custom_op("moelab::quantised_wgrad", mutates_args=())
def quantised_wgrad(grad_NM: torch.Tensor, x_KM: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """The weight gradient of operands whose blocks lie along the tokens, as :func:`fake_quantise_columns` leaves them.

    An operator of its own because torch 2.14's shape function of ``_grouped_mm`` asks whether M is 1, which a compiler
    cannot know of the rows that a dispatch brings. Operands are BF16 and contiguous,
    ``ends_G`` is int32; what comes back is BF16 ``(G, N, K)``, zeros of a rank without tokens.
    """
    if not x_KM.shape[1]:
        return x_KM.new_zeros((ends_G.shape[0], grad_NM.shape[0], x_KM.shape[0]))
    return _product(grad_NM, x_KM.transpose(-2, -1), ends_G)


@quantised_wgrad.register_fake
def _(grad_NM: torch.Tensor, x_KM: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return x_KM.new_empty((ends_G.shape[0], grad_NM.shape[0], x_KM.shape[0]))


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        weight_GKN: torch.Tensor,
        ends_G: torch.Tensor,
        wgrad_in_bf16: bool,
        pad_inside: bool,
        precision: str,
    ) -> torch.Tensor:
        ctx.wgrad_in_bf16, ctx.precision = wgrad_in_bf16, precision
        casts, rows_M, x_MK = _CASTS[precision], None, x_MK.contiguous()
        if pad_inside:
            rows_M, ends_G, rows = _padding_of(ends_G, x_MK.shape[0], casts.block)
            x_MK = _pad(x_MK, rows_M, rows)
        ctx.save_for_backward(x_MK, weight_GKN, ends_G, rows_M)
        # Weights come as the transposed view of contiguous ones, so this is no copy.
        quantised_GNK = casts.rows(weight_GKN.transpose(-2, -1).contiguous(), ends_G)
        output_MN = _product(casts.rows(x_MK, ends_G), quantised_GNK.transpose(-2, -1), ends_G)
        return output_MN if rows_M is None else output_MN.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, weight_GKN, ends_G, rows_M = ctx.saved_tensors
        casts = _CASTS[ctx.precision]
        grad_MN = grad_MN.contiguous() if rows_M is None else _pad(grad_MN, rows_M, x_MK.shape[0])
        # wgrad in BF16 is of the values before quantisation, as torchao's `wgrad_with_hp`.
        if ctx.wgrad_in_bf16:
            quantised_MN = casts.rows(grad_MN, ends_G)
            wgrad_GNK = _product(grad_MN.transpose(-2, -1), x_MK, ends_G)
        else:
            quantised_MN, quantised_NM = casts.both(grad_MN, ends_G)
            wgrad_GNK = quantised_wgrad(quantised_NM, casts.columns(x_MK, ends_G), ends_G)
        # Quantised a second time, along N: keeping both forms would double the memory of the weights.
        quantised_GKN = casts.columns(weight_GKN.transpose(-2, -1).contiguous(), ends_G)
        dgrad_MK = _product(quantised_MN, quantised_GKN.transpose(-2, -1), ends_G)
        if rows_M is not None:
            dgrad_MK = dgrad_MK.index_select(0, rows_M)
        return dgrad_MK, wgrad_GNK.transpose(-2, -1), None, None, None, None
