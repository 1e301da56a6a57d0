"""The standard all-to-all: a copy for each expert of a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from moelab.deepep.all_to_all.arms import Rows, Tokens, fused, take_and_weigh, weigh
from moelab.deepep.all_to_all.clock import Clock


class Standard:
    """A copy for each expert of a token through one all-to-all, as TorchTitan's ``AllToAllTokenDispatcher``."""

    def __init__(self, tokens: Tokens, group: dist.ProcessGroup) -> None:
        from torchtitan.ops.scatter_add import deterministic_scatter_add  # the standard combine ends with it

        self.tokens, self.group, self.ranks = tokens, group, dist.get_world_size(group)
        self.scatter_add: Callable[..., torch.Tensor] = deterministic_scatter_add
        self.weigh = fused(weigh, tokens.x_TD.device)
        self.take_and_weigh = fused(take_and_weigh, tokens.x_TD.device)
        self.counts_E = torch.bincount(tokens.ids_TK.flatten(), minlength=tokens.experts)  # the router has them

    def dispatch(self, clock: Clock) -> Rows:
        """Sort by expert, exchange counts, send, sort again by local expert."""
        tokens = self.tokens
        order_N = torch.argsort(tokens.ids_TK.flatten(), stable=True)
        self.scores_N = tokens.scores_TK.flatten()[order_N]
        self.token_N = order_N // tokens.ids_TK.shape[1]
        rows_ND = tokens.x_TD[self.token_N]
        clock.mark("permute")
        counts_PE = torch.empty_like(self.counts_E)
        dist.all_to_all_single(counts_PE, self.counts_E, group=self.group)
        self.counts_Pe = counts_PE.view(self.ranks, -1)
        self.sent: list[int] = self.counts_E.view(self.ranks, -1).sum(dim=1).tolist()
        self.got: list[int] = self.counts_Pe.sum(dim=1).tolist()
        clock.mark("counts")
        rows_RD = self._exchange(rows_ND, self.sent, self.got)
        clock.mark("wire")
        self.by_expert_R = self._rank_major_of_expert_major(rows_RD.shape[0])
        rows_RD = rows_RD[self.by_expert_R]
        clock.mark("permute")
        return Rows(data_RD=rows_RD)

    def combine(self, rows_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Undo the second order, send back, weight and add at the tokens' own rank."""
        by_rank_RD = torch.empty_like(rows_RD)
        by_rank_RD[self.by_expert_R] = rows_RD
        clock.mark("permute")
        rows_ND = self._exchange(by_rank_RD, self.got, self.sent)
        clock.mark("wire")
        rows_ND = self.weigh(rows_ND, self.scores_N)
        index_ND = self.token_N.unsqueeze(-1).expand(-1, rows_ND.shape[1])
        out_TD = self.scatter_add(torch.zeros_like(self.tokens.x_TD), index_ND, rows_ND)
        clock.mark("permute")
        return out_TD

    def combine_backward(self, grad_TD: torch.Tensor, clock: Clock) -> Rows:
        """Gather and weight the gradient for each copy, send it the way of dispatch."""
        grad_ND = self.take_and_weigh(grad_TD, self.token_N, self.scores_N)
        clock.mark("permute")
        grad_RD = self._exchange(grad_ND, self.sent, self.got)
        clock.mark("wire")
        grad_RD = grad_RD[self.by_expert_R]
        clock.mark("permute")
        return Rows(data_RD=grad_RD)

    def dispatch_backward(self, grad_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Send the rows' gradients home and add those of each token."""
        by_rank_RD = torch.empty_like(grad_RD)
        by_rank_RD[self.by_expert_R] = grad_RD
        clock.mark("permute")
        grad_ND = self._exchange(by_rank_RD, self.got, self.sent)
        clock.mark("wire")
        grad_TD = torch.zeros_like(self.tokens.x_TD).index_put_((self.token_N,), grad_ND, accumulate=True)
        clock.mark("permute")
        return grad_TD

    def expert_of_row(self) -> torch.Tensor:
        """Local expert of each row."""
        counts_e = self.counts_Pe.sum(dim=0)
        return torch.arange(counts_e.shape[0], device=counts_e.device).repeat_interleave(counts_e)

    def received(self) -> list[int]:
        """Rows from each rank."""
        return self.got

    def score_of_row(self) -> torch.Tensor:
        """Score of each row."""
        return self._exchange(self.scores_N, self.sent, self.got)[self.by_expert_R]

    def _exchange(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        received = rows.new_empty((sum(got), *rows.shape[1:]))
        dist.all_to_all_single(received, rows, got, sent, group=self.group)
        return received

    def _rank_major_of_expert_major(self, rows: int) -> torch.Tensor:
        """Where each row of the order by expert lies in the order by rank, int64 ``(R,)``."""
        lengths_eP = self.counts_Pe.t().reshape(-1)
        flat = self.counts_Pe.reshape(-1)
        starts_eP = (flat.cumsum(0) - flat).view_as(self.counts_Pe).t().reshape(-1)
        segment_R = torch.arange(lengths_eP.shape[0], device=flat.device).repeat_interleave(
            lengths_eP, output_size=rows
        )
        offset_eP = starts_eP - (lengths_eP.cumsum(0) - lengths_eP)
        return offset_eP[segment_R] + torch.arange(rows, device=flat.device)
