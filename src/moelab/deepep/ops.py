"""DeepEP's dispatch and combine as PyTorch operators: differentiable, compilable, safe to checkpoint.

Four operators, because the gradient of a dispatch is a combine and the gradient of a combine is a dispatch that repeats
the forward's routing:

==================  =====================================================  ============================
operator            sends                                                  its gradient
==================  =====================================================  ============================
dispatch            tokens to experts, expert-major, padded               ``collect`` (rows and weights)
collect             rows to tokens, with the weights' gradients            –
combine             rows to tokens                                         ``resend``
resend              tokens to experts as an earlier dispatch sent them     –
==================  =====================================================  ============================

TorchTitan 0.3.0 has such operators too, which neither pad nor compile. These do both:

- They use DeepEP's *expanding* layout in training: the copy out of the communication buffer, which DeepEP makes anyway,
  writes rows in expert-major order with every expert's group padded and the padding zeroed. No gather follows, and
  ``combine`` skips the padding by itself. A forward layer has one host sync, DeepEP's own, for the row count.
- Every operator has a fake implementation, so ``torch.compile`` can trace it.
- DeepEP's handle is passed on as the tensors that it consists of. Nothing is cached, so an activation checkpoint may
  save it or make it again, a pipeline may hold many, and a forward without a backward leaks nothing.

Shape suffixes: T tokens of this rank, K experts of a token, R rows, U tokens received (once each), D features, S scales
of a token, e local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelab.deepep.buffer import Exchange, exchange
from moelab.mxfp8.experts import place

NAMESPACE = "moelab_deepep"
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


@torch.library.custom_op(f"{NAMESPACE}::dispatch", mutates_args=())
def dispatch(
    x_TD: Tensor,
    data_TD: Tensor | None,
    scales_TS: Tensor | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    group: str,
    experts: int,
    alignment: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send tokens to their experts, in BF16 or already quantised.

    Quantised tokens travel in the place of ``x_TD``, to which their gradient belongs. FP8 tensors carry no BF16
    gradient in PyTorch, so the first output is then a BF16 ``(R, D)`` of one element in memory, whose gradient is that
    of the rows.

    Args:
        x_TD: BF16 tokens.
        data_TD: the same in FP8, or None to send BF16.
        scales_TS: their scales, four bytes each.
        weights_TK: float32 routing scores; travel along.
        ids_TK: int64 experts.
        group: name of the expert-parallel process group.
        experts: of all ranks.
        alignment: rows of each local expert are padded to a multiple of this.

    Returns:
        BF16 rows (or the gradient's place) ``(R, D)``, rows in FP8 ``(R, D)`` and their scales ``(R, S)`` (both empty
        where BF16 travels), weights ``(R,)``, and ``HANDLE_TENSORS``.
    """
    opened = exchange(group)
    rows, _, weights_R, handle, _ = opened.buffer.dispatch(
        x_TD.contiguous() if data_TD is None else (data_TD.contiguous(), scales_TS),
        topk_idx=ids_TK.contiguous(),
        topk_weights=weights_TK.contiguous(),
        num_experts=experts,
        num_max_tokens_per_rank=x_TD.shape[0],
        expert_alignment=alignment,
        num_sms=opened.num_sms,
        do_handle_copy=False,
        do_cpu_sync=True,  # for the number of rows
        do_expand=True,
        do_zero_padding=True,  # a NaN in padding would be one in its expert's weight gradient
    )
    # An operator's results share no memory, so each that is missing is a tensor of its own.
    arrived = (rows, _nothing(x_TD), _nothing(x_TD)) if data_TD is None else (place(x_TD, len(rows[0])), *rows)
    tensors = [getattr(handle, name) for name in HANDLE_TENSORS]
    return (*arrived, weights_R, *(_nothing(x_TD) if tensor is None else tensor for tensor in tensors))


@dispatch.register_fake
def _(
    x_TD: Tensor,
    data_TD: Tensor | None,
    scales_TS: Tensor | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    group: str,
    experts: int,
    alignment: int,
) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    opened, top_k = exchange(group), ids_TK.shape[1]
    buffer, ranks = opened.buffer, opened.buffer.group.size()
    local = experts // ranks
    rows, received = context.new_dynamic_size(), context.new_dynamic_size()  # of tokens; only the data know

    def index(*shape: Any) -> Tensor:
        return ids_TK.new_empty(shape, dtype=torch.int32)

    arrived = x_TD.new_empty((rows, x_TD.shape[1])), index(0), index(0)
    if data_TD is not None and scales_TS is not None:
        quantised = (sent.new_empty((rows, sent.shape[1])) for sent in (data_TD, scales_TS))
        arrived = (place(x_TD, rows), *quantised)
    # Only where tokens cross between nodes (DeepEP's scale-out) do the last two tensors hold anything; how much, and
    # how long the lists of slots are, only the data know.
    beyond_node = [index(*ids_TK.shape), index(0), index(0)]
    if getattr(buffer, "num_scaleout_ranks", 1) > 1:
        beyond_node = [index(*(context.new_dynamic_size() for _ in range(n))) for n in _SCALEOUT_DIMENSIONS]
    return (
        *arrived,
        weights_TK.new_empty((rows,)),
        index(getattr(buffer, "num_scaleup_ranks", ranks)),
        index(local),
        index(local),
        index(received, top_k + 2),  # where the token is from, its rank and first expert here, its row at each expert
        *beyond_node,
    )


@torch.library.custom_op(f"{NAMESPACE}::collect", mutates_args=())
def collect(
    rows_RD: Tensor, weights_R: Tensor, ids_TK: Tensor, handle: list[Tensor], group: str, experts: int, alignment: int
) -> tuple[Tensor, Tensor]:
    """Add the rows of each token and bring home the weights too: the gradient of :func:`dispatch`.

    Returns:
        ``(T, D)`` in the rows' dtype and float32 ``(T, K)``.
    """
    opened = exchange(group)
    handle_ = _handle_of(opened, ids_TK, handle, experts, alignment, rows_RD.shape[0])
    x_TD, weights_TK, _ = opened.buffer.combine(
        rows_RD.contiguous(), handle=handle_, topk_weights=weights_R.float().contiguous(), num_sms=opened.num_sms
    )
    return x_TD, weights_TK


@collect.register_fake
def _(rows_RD: Tensor, weights_R: Tensor, ids_TK: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    x_TD = rows_RD.new_empty((ids_TK.shape[0], rows_RD.shape[1]))
    return x_TD, weights_R.new_empty(ids_TK.shape, dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::combine", mutates_args=())
def combine(rows_RD: Tensor, ids_TK: Tensor, handle: list[Tensor], group: str, experts: int, alignment: int) -> Tensor:
    """Add the rows of each token, ``(R, D)`` to ``(T, D)``; weights are applied before."""
    opened = exchange(group)
    handle_ = _handle_of(opened, ids_TK, handle, experts, alignment, rows_RD.shape[0])
    combined, _, _ = opened.buffer.combine(rows_RD.contiguous(), handle=handle_, num_sms=opened.num_sms)
    return combined


@combine.register_fake
def _(rows_RD: Tensor, ids_TK: Tensor, *_settings: Any) -> Tensor:
    return rows_RD.new_empty((ids_TK.shape[0], rows_RD.shape[1]))


@torch.library.custom_op(f"{NAMESPACE}::resend", mutates_args=())
def resend(
    x_TD: Tensor, ids_TK: Tensor, handle: list[Tensor], group: str, experts: int, alignment: int, rows_like: Tensor
) -> Tensor:
    """Send BF16 ``(T, D)`` as an earlier dispatch sent its tokens: the gradient of :func:`combine`. No host sync.

    ``rows_like`` is any tensor with as many rows as arrive; the other arguments are the dispatch's and its handle.
    """
    opened = exchange(group)
    handle_ = _handle_of(opened, ids_TK, handle, experts, alignment, rows_like.shape[0])
    rows_RD, *_ = opened.buffer.dispatch(
        x_TD.contiguous(),
        handle=handle_,
        expert_alignment=alignment,
        num_sms=opened.num_sms,
        do_cpu_sync=False,  # the handle knows the number of rows
        do_expand=True,
        do_zero_padding=True,
    )
    return rows_RD


@resend.register_fake
def _(x_TD: Tensor, *settings: Any) -> Tensor:
    *_, rows_like = settings
    return x_TD.new_empty((rows_like.shape[0], x_TD.shape[1]))


def _nothing(like: Tensor) -> Tensor:
    """Operators return tensors only: an empty one stands for None."""
    return like.new_empty((0,), dtype=torch.int32)


def _handle_of(opened: Exchange, ids_TK: Tensor, tensors: list[Tensor], experts: int, alignment: int, rows: int) -> Any:
    """DeepEP's handle, rebuilt from its tensors."""
    named = dict(zip(HANDLE_TENSORS, tensors, strict=True))
    for name in HANDLE_TENSORS[-2:]:  # None within a node, where an empty tensor stood for it
        if named[name].numel() == 0:
            named[name] = None
    handle = opened.handle_type(
        do_expand=True,
        num_experts=experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=ids_TK.shape[0],
        num_sms=opened.num_sms,
        topk_idx=ids_TK,
        num_recv_tokens=named["recv_src_metadata"].shape[0],
        num_expanded_tokens=rows,
        num_recv_tokens_per_expert_list=[],
        **named,
    )
    # A deterministic buffer reads it whenever it sends by a handle, but only uses it where rows do not expand.
    handle.cached_recv_src_metadata_before_sort = handle.recv_src_metadata
    return handle


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, ids_TK, ctx.group, ctx.experts, ctx.alignment = inputs
    _rows_RD, data_RD, scales_RS, _weights_R, *handle = output
    # Left are the rows (or their gradient's place) and the scores, whose gradients `collect` brings home.
    ctx.mark_non_differentiable(data_RD, scales_RS, *handle)
    ctx.save_for_backward(ids_TK, *handle)


def _dispatch_backward(ctx: Any, rows_RD: Tensor, _data_RD: None, _scales_RS: None, weights_R: Tensor, *_: None) -> Any:
    ids_TK, *handle = ctx.saved_tensors
    x_TD, weights_TK = collect(rows_RD, weights_R, ids_TK, handle, ctx.group, ctx.experts, ctx.alignment)
    return x_TD, None, None, weights_TK, None, None, None, None


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_RD, ids_TK, handle, ctx.group, ctx.experts, ctx.alignment = inputs
    # An empty tensor that has the number of rows: the rows themselves are not needed again.
    ctx.save_for_backward(ids_TK, rows_RD.new_empty((rows_RD.shape[0], 0)), *handle)


def _combine_backward(ctx: Any, x_TD: Tensor) -> Any:
    ids_TK, rows_like, *handle = ctx.saved_tensors
    rows_RD = resend(x_TD, ids_TK, handle, ctx.group, ctx.experts, ctx.alignment, rows_like)
    return rows_RD, None, [None] * len(handle), None, None, None  # a list of tensors has a list of gradients


dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_context)
combine.register_autograd(_combine_backward, setup_context=_combine_context)
