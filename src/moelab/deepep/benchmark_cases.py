"""What the all-to-all experiment measures, and how its bytes are counted.

Expert parallelism moves tokens four times a layer: *dispatch* to the experts' ranks, *combine* back, and both again for
the gradients (the backward of dispatch is a combine, that of combine is a dispatch). The experiment times each of the
four for every way to do it, at sizes of real models, under each routing, the ways taking turns (A B C A B C).

Bytes are counted from the experts that were drawn, never by a formula, and only those that leave a GPU for another one:
a plain all-to-all sends a copy of a token for each of its experts, DeepEP one for each *rank* of its experts.

Payload is counted: data, and scales where the data is quantised. Expert ids, scores and counts travel too: some 1 % of
the data at hidden 7168. Of several ranks the busiest counts, and of its two directions the fuller one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moelab.errors import BadInput
from moelab.experts import draw_experts
from moelab.model import DispatchPrecision, shape_of

# Shape suffixes: T tokens of this rank, K experts a token, E experts, P ranks.

Backend = Literal["standard", "deepep"]
Operation = Literal["dispatch", "combine", "combine_backward", "dispatch_backward"]
OPERATIONS: tuple[Operation, ...] = ("dispatch", "combine", "combine_backward", "dispatch_backward")
ROUTINGS = ("random_balanced", "round_robin", "skewed")
SM_COUNTS = (8, 16, 24, 32, 64, 96)
SKEW = 0.7
"""Popularity of the r-th most popular expert is r to the power of minus this."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """One MoE layer's traffic: ``tokens`` of one rank, each to ``top_k`` of ``experts``, as vectors of ``hidden``."""

    name: str
    hidden: int
    top_k: int
    experts: int
    tokens: int


def _size(model: str, *, experts: int, tokens: int) -> Size:
    shape = shape_of(model)
    return Size(name=f"{model}, {experts} experts", hidden=shape.dim, top_k=shape.top_k, experts=experts, tokens=tokens)


SIZES = (
    _size("671B", experts=32, tokens=8192),
    _size("16B", experts=64, tokens=16384),
    _size("671B", experts=16, tokens=8192),
)
NODE_SIZE = _size("671B", experts=64, tokens=8192)
"""Eight experts on each of eight GPUs; on request."""
SMALL = Size(name="small", hidden=256, top_k=4, experts=8, tokens=256)
"""For a laptop and for tests."""


@dataclass(frozen=True, kw_only=True)
class ExchangeArm:
    """One way to move tokens."""

    backend: Backend
    precision: DispatchPrecision = "bf16"  # of the dispatch; the other three operations are in BF16, as in training
    sms: int = 0  # streaming multiprocessors that DeepEP may use; 0 takes as many as training does

    @property
    def layout(self) -> str:
        """``expanded`` if the library delivers rows by expert, padded; ``dense`` if PyTorch sorts them."""
        return "expanded" if self.backend == "deepep" else "dense"

    @property
    def name(self) -> str:
        """Such as ``deepep fp8 expanded, 24 SMs``."""
        layout = f" {self.layout}" if self.backend == "deepep" else ""
        return f"{self.backend} {self.precision}{layout}" + (f", {self.sms} SMs" if self.sms else "")

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What is timed: after the dispatch, 8-bit arms do what the BF16 arm does."""
        return OPERATIONS if self.precision == "bf16" else ("dispatch",)


@dataclass(frozen=True, kw_only=True)
class ArmGroup:
    """Arms that take turns at one size under one routing; ``what`` tells two groups of both apart."""

    size: Size
    routing: str
    arms: tuple[ExchangeArm, ...]
    what: str = ""

    @property
    def name(self) -> str:
        """Such as ``671B, 32 experts, round_robin``."""
        return f"{self.size.name}, {self.routing}" + (f", {self.what}" if self.what else "")


def plan(
    sizes: Sequence[Size], routings: Sequence[str], backends: Sequence[Backend], sms: Sequence[int]
) -> list[ArmGroup]:
    """The groups in the order of importance: the time may end before they do.

    SM counts are swept in a group of their own, at the first size under the first routing.
    """
    base = [ExchangeArm(backend="standard")] if "standard" in backends else []
    sweep: list[ExchangeArm] = []
    if "deepep" in backends:
        precisions: tuple[DispatchPrecision, ...] = ("bf16", "fp8", "mxfp8")
        base += [ExchangeArm(backend="deepep", precision=precision) for precision in precisions]
        sweep = [ExchangeArm(backend="deepep", precision=one, sms=count) for count in sms for one in precisions[:2]]
    groups = [ArmGroup(size=size, routing=routing, arms=tuple(base)) for size in sizes for routing in routings if base]
    if sweep:
        # Before the last size: DeepEP compiles three to five kernels for each count, a second or two each.
        swept = ArmGroup(size=sizes[0], routing=routings[0], arms=tuple(sweep), what="SM counts")
        groups.insert(max(1, len(sizes) - 1) * len(routings), swept)
    return groups


def choose_experts(routing: str, size: Size, *, rank: int, device: torch.device) -> torch.Tensor:
    """Experts of each token, int64 ``(T, K)``, distinct in each row; random ones differ between ranks.

    ``round_robin`` is TorchTitan's forced balance; ``random_balanced`` is :func:`moelab.experts.draw_experts`;
    ``skewed`` draws distinct experts at random by a popularity that falls as a power law and is the same on all ranks.
    The last stands for a router early in training; it is made up, not learned. :class:`BadInput` for another routing.
    """
    T, K, E = size.tokens, size.top_k, size.experts
    if routing == "round_robin":
        return torch.arange(T * K, device=device).view(T, K) % E
    if routing == "random_balanced":
        torch.manual_seed(0)
        return draw_experts(T, E, K, rank=rank, device=device)
    if routing == "skewed":
        order_E = torch.randperm(E, generator=torch.Generator().manual_seed(0))  # popularity is one for all ranks
        logits_E = -SKEW * torch.log1p(order_E.float())
        own = torch.Generator().manual_seed(rank + 1)
        # The top-k of logits plus Gumbel noise is a draw without replacement in proportion to the popularity.
        noise_TE = -torch.log(torch.empty(T, E).exponential_(generator=own))
        return (logits_E + noise_TE).topk(K, dim=-1).indices.to(device)
    raise BadInput(f"there is no routing {routing!r}; the routings are {', '.join(ROUTINGS)}")


def rows_to_ranks(ids_TK: torch.Tensor, *, experts: int, ranks: int) -> dict[str, list[int]]:
    """Rows that this rank's tokens send to each rank, itself included; rank ``p`` holds the ``p``-th part of experts.

    Returns:
        ``copies`` with one for each expert of a token, ``once`` with one for each rank of a token's experts.

    Example:
        >>> rows_to_ranks(torch.tensor([[0, 1], [1, 2]]), experts=4, ranks=2)
        {'copies': [3, 1], 'once': [2, 1]}
    """
    rank_TK = ids_TK // (experts // ranks)
    copies_P = torch.bincount(rank_TK.flatten(), minlength=ranks)
    reached_TP = torch.zeros((ids_TK.shape[0], ranks), dtype=torch.int64, device=ids_TK.device)
    # A token reaches a rank once, however many of its experts are there.
    once_P = reached_TP.scatter_(1, rank_TK, 1).sum(dim=0)
    return {"copies": copies_P.tolist(), "once": once_P.tolist()}


def row_bytes(hidden: int, precision: DispatchPrecision) -> int:
    """Bytes of one token's vector on the wire: BF16; FP8 with an FP32 scale a row; MXFP8 with a byte for 32 values.

    Example:
        >>> [row_bytes(7168, precision) for precision in ("bf16", "fp8", "mxfp8")]
        [14336, 7172, 7392]
    """
    return {"bf16": 2 * hidden, "fp8": hidden + 4, "mxfp8": hidden + hidden // 32}[precision]


def traffic(sent_PP: Sequence[Sequence[int]], *, hidden: int, precision: DispatchPrecision) -> dict[str, int | float]:
    """What one operation moves between ranks, from the rows that rank ``p`` (outer) sends to rank ``q`` (inner).

    Copies to the own rank do not travel.

    Returns:
        ``physical_bytes`` of the busiest rank, and ``rows_to_others``, the mean of all ranks.
    """
    ranks = range(len(sent_PP))
    out = [sum(sent_PP[p]) - sent_PP[p][p] for p in ranks]
    into = [sum(sent_PP[q][p] for q in ranks) - sent_PP[p][p] for p in ranks]
    # A link carries both directions at once, so the fuller one takes the time; the way back is as long.
    return {
        "physical_bytes": max(*out, *into) * row_bytes(hidden, precision),
        "rows_to_others": statistics.fmean(out),
    }
