"""DeepEP's handle as tensors: how a dispatch is sent, what it returns for a compiler, and the handle made again.

Shape suffixes as in :mod:`moelab.deepep.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.deepep.elastic import Exchange, exchange

HANDLE_TENSORS = (
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
)
"""The tensors of DeepEP's handle beside ``topk_idx``, which is an input of the dispatch."""
UNALIGNED = HANDLE_TENSORS.index("num_unaligned_recv_tokens_per_expert")
_SCALEOUT_DIMENSIONS = (4, 3, 3)
"""Dimensions of ``dst_buffer_slot_idx`` and of the last two tensors where tokens cross between nodes."""


def send(
    data_TD: Tensor,
    scales_TS: Tensor | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    group: str,
    experts: int,
    alignment: int,
) -> tuple[Tensor, ...]:
    """Rows, scales (empty without), weights and the handle's tensors."""
    place = exchange(group)
    data_TD = data_TD.contiguous()
    rows, _, weights_R, handle, _ = place.buffer.dispatch(
        data_TD if scales_TS is None else (data_TD, scales_TS),
        topk_idx=ids_TK.contiguous(),
        topk_weights=weights_TK.contiguous(),
        num_experts=experts,
        num_max_tokens_per_rank=data_TD.shape[0],
        expert_alignment=alignment,
        num_sms=place.num_sms,
        do_handle_copy=False,
        do_cpu_sync=True,
        do_expand=True,
        do_zero_padding=True,
    )
    rows_RD, scales_RS = (rows, _nothing(data_TD)) if scales_TS is None else rows
    tensors = [getattr(handle, name) for name in HANDLE_TENSORS]
    return rows_RD, scales_RS, weights_R, *(_nothing(data_TD) if tensor is None else tensor for tensor in tensors)


def fake_send(
    data_TD: Tensor, scales_TS: Tensor | None, weights_TK: Tensor, ids_TK: Tensor, group: str, experts: int
) -> tuple[Tensor, ...]:
    """Shapes of what :func:`send` returns; the number of rows, and of tokens received, only the data know."""
    context = torch.library.get_ctx()
    rows, received = context.new_dynamic_size(), context.new_dynamic_size()
    ranks, scaleup, scaleout = _domain(group)
    local, top_k = experts // ranks, ids_TK.shape[1]

    def index(*shape: Any) -> Tensor:
        return ids_TK.new_empty(shape, dtype=torch.int32)

    def unknown(dimensions: int) -> Tensor:
        return index(*(context.new_dynamic_size() for _ in range(dimensions)))

    slots, forwarded, linked = (
        (unknown(n) for n in _SCALEOUT_DIMENSIONS)
        if scaleout > 1
        else (
            index(*ids_TK.shape),
            index(0),
            index(0),
        )
    )
    return (
        data_TD.new_empty((rows, data_TD.shape[1])),
        index(0) if scales_TS is None else scales_TS.new_empty((rows, scales_TS.shape[1])),
        weights_TK.new_empty((rows,)),
        index(scaleup),
        index(local),
        index(local),
        index(received, top_k + 2),
        slots,
        forwarded,
        linked,
    )


def _nothing(like: Tensor) -> Tensor:
    """Operators return tensors only: an empty one stands for None."""
    return like.new_empty((0,), dtype=torch.int32)


def _domain(group: str) -> tuple[int, int, int]:
    """Ranks, and how DeepEP sees them: ranks of a scale-up domain (NVLink) and number of such domains."""
    buffer = exchange(group).buffer
    ranks = buffer.group.size()
    return ranks, getattr(buffer, "num_scaleup_ranks", ranks), getattr(buffer, "num_scaleout_ranks", 1)


def handle_of(place: Exchange, ids_TK: Tensor, tensors: list[Tensor], experts: int, alignment: int, rows: int) -> Any:
    """DeepEP's handle again, from its tensors."""
    named = dict(zip(HANDLE_TENSORS, tensors, strict=True))
    for name in HANDLE_TENSORS[-2:]:
        if named[name].numel() == 0:
            named[name] = None
    handle = place.handle_type(
        do_expand=True,
        num_experts=experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=ids_TK.shape[0],
        num_sms=place.num_sms,
        topk_idx=ids_TK,
        num_recv_tokens=named["recv_src_metadata"].shape[0],
        num_expanded_tokens=rows,
        num_recv_tokens_per_expert_list=[],
        **named,
    )
    # A deterministic buffer asks for it whenever it sends by a handle, and does nothing with it where rows expand.
    handle.cached_recv_src_metadata_before_sort = handle.recv_src_metadata
    return handle
