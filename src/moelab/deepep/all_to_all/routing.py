"""Which experts the experiment's tokens choose, and how many rows each rank then sends to each other, counted."""

from __future__ import annotations

import torch

from moelab.deepep.all_to_all.plan import ROUTINGS, Size
from moelab.errors import BadInput

# Shape suffixes: T tokens of this rank, K experts a token, E experts, P ranks.

SKEW = 0.7
"""Popularity of the r-th most popular expert is r to the power of minus this."""


def choose_experts(routing: str, size: Size, *, rank: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Experts of each token.

    Args:
        routing: ``round_robin`` is TorchTitan's forced balance; ``random_balanced`` is
            :func:`moelab.titan.routing.draw_experts`; ``skewed`` draws distinct experts at random by a popularity that
            falls as a power law and is the same on all ranks. The last stands for a router early in training; it is
            made up, not learned.
        size: tokens, experts and top-k.
        rank: of this process; random tokens differ between ranks.
        device: of the result.
        seed: of what is random.

    Returns:
        int64 ``(T, K)``, distinct in each row.

    Raises:
        BadInput: if there is no such routing.
    """
    T, K, E = size.tokens, size.top_k, size.experts
    if routing == "round_robin":
        return torch.arange(T * K, device=device).view(T, K) % E
    if routing == "random_balanced":
        from moelab.titan.routing import draw_experts  # loads TorchTitan

        torch.manual_seed(seed)
        return draw_experts(T, E, K, rank=rank, device=device)
    if routing == "skewed":
        order_E = torch.randperm(E, generator=torch.Generator().manual_seed(seed))
        logits_E = -SKEW * torch.log1p(order_E.float())
        own = torch.Generator().manual_seed(seed * 1009 + rank + 1)
        # The top-k of logits plus Gumbel noise is a draw without replacement in proportion to the popularity.
        noise_TE = -torch.log(torch.empty(T, E).exponential_(generator=own))
        return (logits_E + noise_TE).topk(K, dim=-1).indices.to(device)
    raise BadInput(f"there is no routing {routing!r}; the routings are {', '.join(ROUTINGS)}")


def rows_to_ranks(ids_TK: torch.Tensor, *, experts: int, ranks: int) -> dict[str, list[int]]:
    """Rows that this rank's tokens send to each rank, itself included.

    Args:
        ids_TK: experts of each token, int64 ``(T, K)``.
        experts: of all ranks; rank ``p`` holds the ``p``-th equal part of them.
        ranks: expert-parallel ranks.

    Returns:
        ``copies`` with one for each expert of a token, ``once`` with one for each rank of a token's experts.

    Example:
        >>> rows_to_ranks(torch.tensor([[0, 1], [1, 2]]), experts=4, ranks=2)
        {'copies': [3, 1], 'once': [2, 1]}
    """
    rank_TK = ids_TK // (experts // ranks)
    copies_P = torch.bincount(rank_TK.flatten(), minlength=ranks)
    reached_TP = torch.zeros((ids_TK.shape[0], ranks), dtype=torch.int64, device=ids_TK.device)
    once_P = reached_TP.scatter_(1, rank_TK, 1).sum(dim=0)
    return {"copies": copies_P.tolist(), "once": once_P.tolist()}


def load_imbalance(ids_TK: torch.Tensor, *, experts: int) -> float:
    """Tokens of this rank at its busiest expert over the mean; 1 is balance."""
    counts_E = torch.bincount(ids_TK.flatten(), minlength=experts).float()
    return float(counts_E.max() / counts_E.mean())
