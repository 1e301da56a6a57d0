"""NVIDIA's HybridEP."""

from __future__ import annotations

from typing import Any

import torch

from moelab.deepep.all_to_all.arms import Rows, Tokens, fused, weigh
from moelab.deepep.all_to_all.clock import Clock


class HybridEP:
    """NVIDIA's HybridEP (DeepEP's ``hybrid-ep`` branch), whose kernels permute as they send: all of it is ``wire``."""

    def __init__(self, tokens: Tokens, buffer: Any, *, ranks: int) -> None:
        self.tokens, self.buffer, self.local_experts = tokens, buffer, tokens.experts // ranks
        self.weigh = fused(weigh, tokens.x_TD.device)
        shape = (tokens.x_TD.shape[0], tokens.experts)
        self.map_TE = torch.zeros(shape, dtype=torch.bool, device=tokens.x_TD.device).scatter(1, tokens.ids_TK, True)
        scores_TE = torch.zeros(shape, dtype=torch.float32, device=tokens.x_TD.device)
        self.scores_TE = scores_TE.scatter(1, tokens.ids_TK, tokens.scores_TK)

    def dispatch(self, clock: Clock) -> Rows:
        """Send and permute in one."""
        rows_RD, self.scores_R, _, self.counts_e, self.handle = self.buffer.dispatch_with_permute(
            hidden=self.tokens.x_TD,
            routing_map=self.map_TE,
            probs=self.scores_TE,
            num_of_experts_per_rank=self.local_experts,
        )
        self.rows = rows_RD.shape[0]
        clock.mark("wire")
        return Rows(data_RD=rows_RD)

    def combine(self, rows_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Weight, then permute back and send in one."""
        weighted_RD = self.weigh(rows_RD, self.scores_R)
        clock.mark("permute")
        out_TD, _ = self.buffer.combine_with_unpermute(hidden=weighted_RD, handle=self.handle)
        clock.mark("wire")
        return out_TD

    def combine_backward(self, grad_TD: torch.Tensor, clock: Clock) -> Rows:
        """Send the gradient by the layout that dispatch found."""
        grad_RD, *_ = self.buffer.dispatch_with_permute(
            hidden=grad_TD, handle=self.handle, num_permuted_tokens=self.rows
        )
        clock.mark("wire")
        weighted_RD = self.weigh(grad_RD, self.scores_R)
        clock.mark("permute")
        return Rows(data_RD=weighted_RD)

    def dispatch_backward(self, grad_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Send the rows' gradients home."""
        grad_TD, _ = self.buffer.combine_with_unpermute(hidden=grad_RD, probs=self.scores_R, handle=self.handle)
        clock.mark("wire")
        return grad_TD

    def expert_of_row(self) -> torch.Tensor:
        """Local expert of each row."""
        counts_e = self.counts_e.to(self.tokens.x_TD.device)
        return torch.arange(self.local_experts, device=counts_e.device).repeat_interleave(counts_e)

    def received(self) -> None:
        """Rows from each rank."""
        return None

    def score_of_row(self) -> torch.Tensor:
        """Score of each row."""
        scores: torch.Tensor = self.scores_R
        return scores
