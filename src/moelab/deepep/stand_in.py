"""A stand-in for DeepEP's ``ElasticBuffer`` on plain collectives: the same contract, any device, no speed.

It lets the dispatcher, its gradients and its compiled form run and be tested without DeepEP: on a CPU with gloo, or on
GPUs. It has only the *expanding* layout, the one that moelab uses, as DeepEP 2.1.0 documents it
(``deep_ep/buffers/elastic.py``):

- a token crosses to a rank once, however many of its experts live there;
- the rows of a local expert lie together and start at a multiple of ``expert_alignment``; what fills the gap is zero if
  ``do_zero_padding`` and *undefined* otherwise, which here means NaN, so that nothing can come to rely on it;
- ``combine`` adds the rows of a token on each rank first, then across ranks, in FP32, rounding to BF16 after each.

Where DeepEP leaves the order of the rows of an expert open, this is one legal order: by source rank, then by token.
Every rank sees all tokens and takes those that it needs, so timings mean nothing.

Shape suffixes: T tokens of this rank, N tokens that the buffers of all W ranks have room for, U tokens received (once
each), K experts of a token, R rows (one for each token and local expert, padded), D features, e local experts.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.functional import pad


class StandInBuffer:
    """``ElasticBuffer`` over ``torch.distributed``.

    Its handle has the attributes of DeepEP's ``EPHandle`` that the operators of :mod:`moelab.deepep.ops` pass on, or
    that it needs itself.
    """

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
        if handle is None:
            assert topk_idx is not None
            assert num_experts is not None
            handle = self._handle(topk_idx, num_experts, expert_alignment)
        token_U, slots_UK = _tokens_and_slots(handle)
        taken, lane = torch.nonzero(slots_UK >= 0, as_tuple=True)

        def empty_rows(like: torch.Tensor) -> torch.Tensor:
            rows = like.new_empty((handle.num_expanded_tokens, *like.shape[1:]))
            _as_bytes(rows).fill_(0 if do_zero_padding else 0xFF)  # a NaN in BF16, in E4M3 and in FP32
            return rows

        def expand(values_T: torch.Tensor) -> torch.Tensor:
            rows = empty_rows(values_T)
            _as_bytes(rows)[slots_UK[taken, lane]] = _as_bytes(self._of_all_ranks(values_T)[token_U])[taken]
            return rows

        weights_R = None
        if topk_weights is not None:
            weights_R = empty_rows(topk_weights[:, 0])
            weights_R[slots_UK[taken, lane]] = self._of_all_ranks(topk_weights)[token_U][taken, lane]
        rows = tuple(map(expand, x)) if isinstance(x, tuple) else expand(x)
        return rows, None, weights_R, handle, None

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Add the rows of each token and send the sums home; padding is not read.

        Returns:
            ``(T, D)``; the weights ``(T, K)``, each at its token and expert, or None; None for the event.
        """
        token_U, slots_UK = _tokens_and_slots(handle)
        present_UK = slots_UK >= 0
        tokens = handle.topk_idx.shape[0]
        # First the rows of a token on this rank, rounded to BF16, then those of its ranks: DeepEP rounds twice, too.
        sums_UD = torch.zeros((slots_UK.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
        for lane in range(slots_UK.shape[1]):
            sums_UD[present_UK[:, lane]] += x[slots_UK[present_UK[:, lane], lane]].float()
        combined = self._home(sums_UD.to(x.dtype), token_U, tokens).to(x.dtype)
        if topk_weights is None:
            return combined, None, None
        weights_UK = torch.where(present_UK, topk_weights[slots_UK.clamp(min=0)], 0.0)
        return combined, self._home(weights_UK, token_U, tokens), None

    def _of_all_ranks(self, values_T: torch.Tensor) -> torch.Tensor:
        """``(T, …)`` of every rank, one after another, each with all of its room: ``(N, …)``."""
        sent = pad(_as_bytes(values_T), (0, 0, 0, self.num_max_tokens_per_rank - values_T.shape[0]))
        parts = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(parts, sent, group=self.group)
        return torch.cat(parts).view(values_T.dtype).reshape(-1, *values_T.shape[1:])

    def _home(self, values_U: torch.Tensor, token_U: torch.Tensor, tokens: int) -> torch.Tensor:
        """``(U, …)`` to ``(T, …)``, summed over the ranks in FP32."""
        sent = values_U.new_zeros((self.ranks * self.num_max_tokens_per_rank, *values_U.shape[1:]))
        sent[token_U] = values_U
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        return arrived.unflatten(0, (self.ranks, -1)).float().sum(0)[:tokens]

    def _handle(self, topk_idx: torch.Tensor, experts: int, alignment: int) -> SimpleNamespace:
        tokens, top_k = topk_idx.shape
        if tokens > self.num_max_tokens_per_rank:
            raise ValueError(f"{tokens} tokens exceed the buffer's {self.num_max_tokens_per_rank}")
        local = experts // self.ranks
        # Counted from 1, so that the room that a rank does not use is nobody's, as are experts of other ranks.
        ids_NK = self._of_all_ranks(topk_idx + 1) - 1 - self.rank * local
        ids_NK = torch.where((ids_NK >= 0) & (ids_NK < local), ids_NK, -1)
        token_U = torch.nonzero((ids_NK >= 0).any(dim=1))[:, 0]  # once, with all of its experts that live here
        ids_UK = ids_NK[token_U]
        received_W = torch.bincount(token_U // self.num_max_tokens_per_rank, minlength=self.ranks)
        counts_e = torch.bincount(ids_UK[ids_UK >= 0], minlength=local)
        aligned_e = (counts_e + alignment - 1) // alignment * alignment
        starts_e = aligned_e.cumsum(0) - aligned_e
        slots_UK = torch.full_like(ids_UK, -1)  # the row of each received token at each of its experts
        for expert in range(local):
            mine = ids_UK == expert
            slots_UK[mine] = starts_e[expert] + torch.arange(int(counts_e[expert]), device=ids_UK.device)
        master_U = (ids_UK >= 0).int().argmax(dim=1)  # the first of its experts that lives here
        rank_U = torch.repeat_interleave(received_W)
        # DeepEP numbers tokens by rank, each with room for as many as the buffer holds.
        metadata = torch.cat([token_U[:, None], (rank_U * top_k + master_U)[:, None], slots_UK], dim=1)
        return SimpleNamespace(
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


def _tokens_and_slots(handle: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the received tokens, int64 ``(U,)``, and their rows ``(U, K)``, -1 for experts elsewhere."""
    return handle.recv_src_metadata[:, 0].long(), handle.recv_src_metadata[:, 2:].long()


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """``(N, …)`` as bytes ``(N, B)``: collectives and indexing know every dtype then."""
    width = math.prod(values.shape[1:])
    return values.reshape(values.shape[0], width).view(torch.uint8)
