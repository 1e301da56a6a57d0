"""A stand-in for DeepEP's ``ElasticBuffer`` on plain collectives: the same contract, any device, no speed.

It lets the dispatcher, its gradients and its compiled form run and be tested without DeepEP: on a CPU with gloo, or on
GPUs. It has only the *expanding* layout, the one that moelab uses, as DeepEP 2.1.0 documents it
(``deep_ep/buffers/elastic.py``):

- a token crosses to a rank once, however many of its experts live there;
- the rows of a local expert lie together and start at a multiple of ``expert_alignment``; what fills the gap is zero if
  ``do_zero_padding`` and *undefined* otherwise, which here means NaN, so that nothing can come to rely on it;
- ``combine`` adds the rows of a token on each rank first, then across ranks, in FP32, rounding to BF16 after each.

Where DeepEP leaves the order of the rows of an expert open, this is one legal order: by source rank, then by token.
Timings of it mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist

# Shape suffixes: T tokens of this rank, K experts of a token, U tokens received (once each), R rows (one for each
# token and local expert, padded), D features, e local experts, W ranks.


class StandInBuffer:
    """``ElasticBuffer`` over ``torch.distributed``.

    Its handle has the attributes of DeepEP's ``EPHandle`` that the operators of :mod:`moelab.deepep.ops` pass on, or
    that it needs itself.
    """

    handle_type = SimpleNamespace

    def __init__(self, group: dist.ProcessGroup, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
        self.group = group
        self.rank, self.ranks = group.rank(), group.size()
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """A number where DeepEP wants one."""
        return 1

    def destroy(self) -> None:
        """It holds no memory."""

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int = 1,
        handle: Any = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        **_: Any,
    ) -> tuple[Any, None, torch.Tensor | None, Any, None]:
        """Send each token to the ranks of its experts; arguments as DeepEP's, layout as the module describes it.

        Returns:
            Rows ``(R, D)`` (or the pair), None, weights ``(R,)`` or None, the handle, None for the event.
        """
        if not do_expand:
            raise NotImplementedError("the stand-in has the expanding layout only")
        if handle is not None:
            topk_idx, num_experts, expert_alignment = handle.topk_idx, handle.num_experts, handle.expert_alignment
        assert topk_idx is not None
        assert num_experts is not None
        capacity = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        if topk_idx.shape[0] > capacity:
            raise ValueError(f"{topk_idx.shape[0]} tokens exceed the buffer's {capacity}")
        local = num_experts // self.ranks
        sent_TW = self._destinations(topk_idx, local)
        sent_W = sent_TW.sum(dim=0)
        received_W = torch.empty_like(sent_W)
        dist.all_to_all_single(received_W, sent_W, group=self.group)
        arrive = _Way(self, sent_TW, received_W).there
        # A token arrives once with all of its experts, of which those of other ranks are nobody's here.
        ids_UK = arrive(topk_idx) - self.rank * local
        ids_UK = torch.where((ids_UK >= 0) & (ids_UK < local), ids_UK, -1)
        if handle is None:
            handle = self._handle(topk_idx, ids_UK, arrive, received_W, num_experts, expert_alignment, capacity)
        slots_UK = _slots(handle)

        def empty_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            rows = torch.empty((handle.num_expanded_tokens, *shape), dtype=dtype, device=topk_idx.device)
            _as_bytes(rows).fill_(0 if do_zero_padding else 0xFF)  # a NaN in BF16, in E4M3 and in FP32
            return rows

        def expand(values_T: torch.Tensor) -> torch.Tensor:
            rows = empty_rows(*values_T.shape[1:], dtype=values_T.dtype)
            taken, lane = torch.nonzero(slots_UK >= 0, as_tuple=True)
            _as_bytes(rows)[slots_UK[taken, lane]] = _as_bytes(arrive(values_T))[taken]
            return rows

        data, scales = x if isinstance(x, tuple) else (x, None)
        weights_R = None
        if topk_weights is not None:
            weights_UK = arrive(topk_weights)
            weights_R = empty_rows(dtype=weights_UK.dtype)
            weights_R[slots_UK[slots_UK >= 0]] = weights_UK[slots_UK >= 0]
        rows = expand(data) if scales is None else (expand(data), expand(scales))
        return rows, None, weights_R, handle, None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Add the rows of each token and send the sums home; padding is not read.

        Returns:
            ``(T, D)``; the weights ``(T, K)``, each at its token and expert, or None; None for the event.
        """
        local = handle.num_experts // self.ranks
        sent_TW = self._destinations(handle.topk_idx, local)
        received_W = torch.diff(handle.psum_num_recv_tokens_per_scaleup_rank, prepend=sent_TW.new_zeros(1))
        slots_UK = _slots(handle)
        present_UK = slots_UK >= 0
        # First the rows of a token on this rank, rounded to BF16, then those of its ranks: DeepEP rounds twice, too.
        sums_UD = torch.zeros((slots_UK.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
        for lane in range(slots_UK.shape[1]):
            sums_UD[present_UK[:, lane]] += x[slots_UK[present_UK[:, lane], lane]].float()
        home = _Way(self, sent_TW, received_W).home
        combined = home(sums_UD.to(x.dtype)).to(x.dtype)
        if topk_weights is None:
            return combined, None, None
        weights_UK = torch.where(present_UK, topk_weights[slots_UK.clamp(min=0)], 0.0)
        return combined, home(weights_UK), None

    def _destinations(self, topk_idx: torch.Tensor, local: int) -> torch.Tensor:
        """Whether each token goes to each rank, int64 ``(T, W)`` of 0 and 1."""
        # Experts of -1 go to a rank beyond the last, whose column is cut off below.
        ranks_TK = torch.where(topk_idx >= 0, topk_idx // local, self.ranks)
        marks = torch.zeros((topk_idx.shape[0], self.ranks + 1), dtype=torch.int64, device=topk_idx.device)
        return marks.scatter_(1, ranks_TK, 1)[:, : self.ranks]

    def _handle(
        self,
        topk_idx: torch.Tensor,
        ids_UK: torch.Tensor,
        arrive: Callable[[torch.Tensor], torch.Tensor],
        received_W: torch.Tensor,
        experts: int,
        alignment: int,
        capacity: int,
    ) -> SimpleNamespace:
        local, top_k = experts // self.ranks, topk_idx.shape[1]
        counts_e = torch.bincount(ids_UK[ids_UK >= 0], minlength=local)
        aligned_e = (counts_e + alignment - 1) // alignment * alignment
        starts_e = aligned_e.cumsum(0) - aligned_e
        slots_UK = torch.full_like(ids_UK, -1)  # the row of each received token at each of its experts
        for expert in range(local):
            mine = ids_UK == expert
            slots_UK[mine] = starts_e[expert] + torch.arange(int(counts_e[expert]), device=ids_UK.device)
        # As DeepEP numbers tokens: by rank, each with room for as many as the buffer holds.
        mine_T = torch.arange(topk_idx.shape[0], device=topk_idx.device) + self.rank * capacity
        source_U = arrive(mine_T)
        rank_U = torch.repeat_interleave(received_W)
        master_U = (ids_UK >= 0).int().argmax(dim=1)  # the first of its experts that lives here
        metadata = torch.cat([source_U[:, None], (rank_U * top_k + master_U)[:, None], slots_UK], dim=1)
        return SimpleNamespace(
            num_experts=experts,
            expert_alignment=alignment,
            topk_idx=topk_idx,
            num_expanded_tokens=int(aligned_e.sum()),
            psum_num_recv_tokens_per_scaleup_rank=received_W.cumsum(0).int(),
            psum_num_recv_tokens_per_expert=(starts_e + counts_e).int(),
            num_unaligned_recv_tokens_per_expert=counts_e.int(),
            recv_src_metadata=metadata.int(),
            dst_buffer_slot_idx=torch.zeros_like(topk_idx, dtype=torch.int32),
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )


def _slots(handle: Any) -> torch.Tensor:
    """Row of each received token at each of its experts, int64 ``(U, K)``; -1 for experts elsewhere."""
    received = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    return handle.recv_src_metadata[:received, 2:].long()


class _Way:
    """Moves a value of each token to the ranks of its experts, and sums of them back."""

    def __init__(self, buffer: StandInBuffer, sent_TW: torch.Tensor, received_W: torch.Tensor) -> None:
        self.group, self.tokens = buffer.group, sent_TW.shape[0]
        # The order of an all-to-all: by rank, then by token.
        self.token_S = torch.cat([torch.nonzero(sent_TW[:, rank])[:, 0] for rank in range(buffer.ranks)])
        self.sent_W: list[int] = sent_TW.sum(dim=0).tolist()
        self.received_W: list[int] = received_W.tolist()

    def there(self, values_T: torch.Tensor) -> torch.Tensor:
        """``(T, …)`` to ``(U, …)``."""
        sent = _as_bytes(values_T)[self.token_S].contiguous()
        received = sent.new_empty((sum(self.received_W), sent.shape[1]))
        dist.all_to_all_single(received, sent, self.received_W, self.sent_W, group=self.group)
        return received.view(values_T.dtype).reshape(-1, *values_T.shape[1:])

    def home(self, values_U: torch.Tensor) -> torch.Tensor:
        """``(U, …)`` to ``(T, …)``, summed in FP32."""
        back = values_U.new_empty((sum(self.sent_W), *values_U.shape[1:]))
        dist.all_to_all_single(back, values_U.contiguous(), self.sent_W, self.received_W, group=self.group)
        home = torch.zeros((self.tokens, *values_U.shape[1:]), dtype=torch.float32, device=values_U.device)
        return home.index_add_(0, self.token_S, back.float())


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """``(N, …)`` as bytes ``(N, B)``: collectives and indexing know every dtype then."""
    width = math.prod(values.shape[1:])
    return values.reshape(values.shape[0], width).view(torch.uint8)
