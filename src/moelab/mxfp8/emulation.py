"""Emulated MXFP8 grouped GEMM: torchao's numbers to the bit, without torchao's time.

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
``pad_inside`` does. A weight's two forms differ by block axis and cannot be derived from each other; each is computed
once a product, where it is needed, for keeping both would double the memory of the weights.

Activations that arrive quantised, from a dispatch that sends MXFP8, are :mod:`moelab.mxfp8.quantised_experts`'s.

Shape suffixes: M tokens of all groups, G groups (experts), K and N a GEMM's inner and outer features, b blocks of 32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from moelab.mxfp8.quantise import (
    BLOCK,
    fake_quantise_both,
    fake_quantise_columns,
    fake_quantise_rows,
    require_whole_blocks,
)


def grouped_mm(
    x_MK: torch.Tensor,
    weight_GKN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    wgrad: Literal["mxfp8", "bf16"] = "mxfp8",
    pad_inside: bool = False,
) -> torch.Tensor:
    """Multiply each group of tokens by its expert's weight in emulated MXFP8; differentiable.

    Equal, to the bit, to torchao 0.18's ``_to_mxfp8_then_scaled_grouped_mm`` with ``KernelPreference.EMULATED`` and
    RCEIL scales, output and both gradients, on the same device.

    Args:
        x_MK: BF16 ``(M, K)``, tokens sorted by group.
        weight_GKN: BF16 ``(G, K, N)``, the transposed view of a contiguous ``(G, N, K)``.
        ends_G: int32 ``(G,)``, where each group of rows ends. Rows after the last are not computed.
        wgrad: ``bf16`` leaves the operands of the weight gradient unquantised.
        pad_inside: pad each group with zeros to a multiple of 32 tokens, and take them off again; ``ends_G`` must
            then end at M.

    Returns:
        BF16 ``(M, N)``.

    Raises:
        NotWholeBlocks: if K or N, or for a quantised wgrad M, is not a multiple of 32.

    Example:
        >>> x, w = torch.randn(64, 32).bfloat16(), torch.randn(2, 96, 32).bfloat16()
        >>> grouped_mm(x, w.transpose(-2, -1), torch.tensor([32, 64], dtype=torch.int32)).shape
        torch.Size([64, 96])
    """
    require_whole_blocks("the inner dimension K", weight_GKN.shape[1])
    require_whole_blocks("the outer dimension N", weight_GKN.shape[2])
    needs_wgrad = torch.is_grad_enabled() and weight_GKN.requires_grad
    # A compiler does not know the number of tokens that a dispatch brings, and the dispatcher has padded them.
    if needs_wgrad and wgrad == "mxfp8" and not (pad_inside or torch.compiler.is_compiling()):
        require_whole_blocks("the token axis (pad_inside=True pads it)", x_MK.shape[0], or_none=True)
    return _GroupedMM.apply(x_MK, weight_GKN, ends_G, wgrad == "bf16", pad_inside)


def _padding_of(ends_G: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Each token's row when groups are padded to whole blocks, int64 ``(M,)``; where the groups end; blocks of rows.

    The layout of torchao's ``pad_token_groups``, without its loop over the groups.
    """
    starts_G = torch.nn.functional.pad(ends_G[:-1], (1, 0))
    padded_G = (ends_G - starts_G + BLOCK - 1) // BLOCK * BLOCK
    padded_ends_G = torch.cumsum(padded_G, 0, dtype=torch.int32)
    shift_G = padded_ends_G - padded_G - starts_G
    token_M = torch.arange(tokens, device=ends_G.device, dtype=torch.int32)
    rows_M = token_M + shift_G[torch.searchsorted(ends_G, token_M, right=True)]
    # The most that padding can need: a size that depends on the groups would have to come from the device.
    blocks = (tokens + BLOCK - 1) // BLOCK + ends_G.shape[0]
    return rows_M.long(), padded_ends_G, blocks


def _pad(x_MK: torch.Tensor, rows_M: torch.Tensor, blocks: int) -> torch.Tensor:
    return x_MK.new_zeros((blocks * BLOCK, x_MK.shape[1])).index_copy_(0, rows_M, x_MK)


def _product(left: torch.Tensor, right: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(left, right, offs=ends_G, out_dtype=torch.bfloat16)


@torch.library.custom_op("moelab::quantised_wgrad", mutates_args=())
def quantised_wgrad(grad_NM: torch.Tensor, x_KM: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """The weight gradient of operands whose blocks lie along the tokens, as :func:`fake_quantise_columns` leaves them.

    An operator of its own because torch 2.14's shape function of ``_grouped_mm`` asks whether M is 1, which a compiler
    cannot know of the rows that a dispatch brings.

    Args:
        grad_NM: BF16 ``(N, M)``, contiguous.
        x_KM: BF16 ``(K, M)``, contiguous.
        ends_G: int32 ``(G,)``.

    Returns:
        BF16 ``(G, N, K)``; zeros of a rank without tokens.
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
    ) -> torch.Tensor:
        ctx.wgrad_in_bf16 = wgrad_in_bf16
        rows_M, x_MK = None, x_MK.contiguous()
        if pad_inside:
            rows_M, ends_G, blocks = _padding_of(ends_G, x_MK.shape[0])
            x_MK = _pad(x_MK, rows_M, blocks)
        ctx.save_for_backward(x_MK, weight_GKN, ends_G, rows_M)
        quantised_GNK = fake_quantise_rows(weight_GKN.transpose(-2, -1).contiguous())
        output_MN = _product(fake_quantise_rows(x_MK), quantised_GNK.transpose(-2, -1), ends_G)
        return output_MN if rows_M is None else output_MN.index_select(0, rows_M)

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, weight_GKN, ends_G, rows_M = ctx.saved_tensors
        grad_MN = grad_MN.contiguous() if rows_M is None else _pad(grad_MN, rows_M, x_MK.shape[0] // BLOCK)
        if ctx.wgrad_in_bf16:
            quantised_MN = fake_quantise_rows(grad_MN)
            wgrad_GNK = _product(grad_MN.transpose(-2, -1), x_MK, ends_G)
        else:
            quantised_MN, quantised_NM = fake_quantise_both(grad_MN)
            wgrad_GNK = quantised_wgrad(quantised_NM, fake_quantise_columns(x_MK), ends_G)
        # Quantised a second time, along N: to keep both would double the memory of the weights.
        quantised_GKN = fake_quantise_columns(weight_GKN.transpose(-2, -1).contiguous())
        dgrad_MK = _product(quantised_MN, quantised_GKN.transpose(-2, -1), ends_G)
        if rows_M is not None:
            dgrad_MK = dgrad_MK.index_select(0, rows_M)
        return dgrad_MK, wgrad_GNK.transpose(-2, -1), None, None, None
