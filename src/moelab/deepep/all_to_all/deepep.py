"""DeepEP V2: one copy for each rank of a token's experts."""

from __future__ import annotations

from typing import Any

import torch

from moelab.deepep.all_to_all.arms import ALIGNMENT, Rows, Tokens, fused, quantise, weigh
from moelab.deepep.all_to_all.clock import Clock
from moelab.deepep.all_to_all.plan import Arm


class DeepEP:
    """DeepEP V2: a token crosses to a rank once, whatever the number of its experts there.

    Calls are those of ``tests/elastic/test_ep.py`` of DeepEP 2.1.0. In the ``dense`` layout PyTorch gathers the tokens
    by expert, as TorchTitan does; in the ``expanded`` one DeepEP's copy kernel writes them there, padded with zeros.
    """

    def __init__(self, arm: Arm, tokens: Tokens, buffer: Any, *, max_tokens: int, ranks: int) -> None:
        self.arm, self.tokens, self.buffer, self.max_tokens = arm, tokens, buffer, max_tokens
        self.local_experts = tokens.experts // ranks
        self.expanded = arm.layout == "expanded"
        self.sms = arm.sms or buffer.get_theoretical_num_sms(tokens.experts, tokens.ids_TK.shape[1])
        self.quantise = fused(quantise, tokens.x_TD.device)
        self.weigh = fused(weigh, tokens.x_TD.device)

    def dispatch(self, clock: Clock) -> Rows:
        """Send, and sort by expert unless DeepEP has done so."""
        x = self._payload(self.tokens.x_TD, clock)
        received, ids, scores, self.handle, _ = self.buffer.dispatch(
            x,
            topk_idx=self.tokens.ids_TK,
            topk_weights=self.tokens.scores_TK,
            num_experts=self.tokens.experts,
            num_max_tokens_per_rank=self.max_tokens,
            expert_alignment=ALIGNMENT,
            num_sms=self.sms,
            do_expand=self.expanded,
            do_zero_padding=self.expanded,
        )
        clock.mark("wire")
        self.ids_UK, self.received_scores = ids, scores
        if not self.expanded:
            self._sort_by_expert()
        return self._rows(received, clock)

    def combine(self, rows_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Weight, add what one rank holds of a token unless DeepEP does so, send back."""
        sums = self.weigh(rows_RD, self.score_of_row())
        if not self.expanded:
            zeros_UD = sums.new_zeros((self.ids_UK.shape[0], sums.shape[1]))
            sums = zeros_UD.scatter_add_(0, self.token_R.unsqueeze(-1).expand_as(sums), sums)
        clock.mark("permute")
        out_TD, _, _ = self.buffer.combine(sums, handle=self.handle, num_sms=self.sms)
        clock.mark("wire")
        return out_TD

    def combine_backward(self, grad_TD: torch.Tensor, clock: Clock) -> Rows:
        """Send the gradient by the layout that dispatch found."""
        received, *_ = self.buffer.dispatch(
            self._payload(grad_TD, clock),
            handle=self.handle,
            num_sms=self.sms,
            do_expand=self.expanded,
            do_zero_padding=self.expanded,
        )
        clock.mark("wire")
        rows = self._rows(received, clock)
        if rows.scales_RS is not None:
            return rows
        weighted_RD = self.weigh(rows.data_RD, self.score_of_row())
        clock.mark("permute")
        return Rows(data_RD=weighted_RD)

    def dispatch_backward(self, grad_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Send the rows' gradients home; DeepEP adds them."""
        sums = grad_RD
        if not self.expanded:
            zeros_UD = sums.new_zeros((self.ids_UK.shape[0], sums.shape[1]))
            sums = zeros_UD.index_add_(0, self.token_R, sums)
            clock.mark("permute")
        # The scores stand for their gradient, which travels the same way.
        grad_TD, _, _ = self.buffer.combine(
            sums, handle=self.handle, topk_weights=self.received_scores, num_sms=self.sms
        )
        clock.mark("wire")
        return grad_TD

    def expert_of_row(self) -> torch.Tensor:
        """Local expert of each row."""
        if not self.expanded:
            return self.ids_UK[self.ids_UK >= 0].sort(stable=True).values
        padded = self.handle.num_recv_tokens_per_expert_list
        ends_e = self.handle.psum_num_recv_tokens_per_expert.long()
        device = ends_e.device
        expert_R = torch.arange(self.local_experts, device=device).repeat_interleave(
            torch.tensor(padded, device=device)
        )
        position_R = torch.arange(expert_R.shape[0], device=device)
        return torch.where(position_R < ends_e[expert_R], expert_R, self.local_experts)

    def received(self) -> list[int]:
        """Rows from each rank."""
        ends = self.handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def score_of_row(self) -> torch.Tensor:
        """Score of each row."""
        return self.received_scores if self.expanded else self.scores_R

    def _payload(self, x_TD: torch.Tensor, clock: Clock) -> Any:
        if self.arm.precision == "bf16":
            return x_TD
        pair = self.quantise(x_TD)
        clock.mark("quantise")
        return pair

    def _sort_by_expert(self) -> None:
        """Where the rows of each expert are among the tokens received; part of the permutation."""
        here_UK = self.ids_UK >= 0
        order_R = torch.argsort(self.ids_UK[here_UK], stable=True)
        token_U = torch.arange(self.ids_UK.shape[0], device=order_R.device)
        self.token_R = token_U.repeat_interleave(here_UK.sum(dim=1))[order_R]
        self.scores_R = self.received_scores[here_UK][order_R]

    def _rows(self, received: Any, clock: Clock) -> Rows:
        data, scales = received if isinstance(received, tuple) else (received, None)
        if not self.expanded:
            data = _take(data, self.token_R)
            scales = None if scales is None else scales[self.token_R]
            clock.mark("permute")
        return Rows(data_RD=data, scales_RS=scales)


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows by index; FP8 as bytes, which every index kernel knows."""
    if rows.dtype is not torch.float8_e4m3fn:
        return rows.index_select(0, index)
    return rows.view(torch.uint8).index_select(0, index).view(rows.dtype)
