"""Bytes that dispatch and combine put on NVLink and on the network, by method and routing, and on a GPU's memory.

====================  =============================================================  =================================
method                what travels                                                   over the network
====================  =============================================================  =================================
``standard``          a copy for each expert of a token (TorchTitan's all-to-all)    a copy for each remote expert
``deepep_direct``     a token once to each rank that holds one of its experts        once per remote rank
``deepep_hybrid``     once to each node, to the GPU with the sender's place there,   once per remote node
                      which forwards it over NVLink to the other ranks concerned
====================  =============================================================  =================================

*Rows* are token vectors. What a rank keeps is ``local`` and crosses no wire. Combine takes the same ways back: partial
sums are formed in each rank, with ``deepep_hybrid`` again in each node (DeepEP's ``allow_multiple_reduction``, on by
default), so it moves as many rows as dispatch.

Not counted: indices and scores, which DeepEP sends along (12 bytes an expert, below 1 % of a BF16 row of 7168), NCCL's
protocol, and any detour that NCCL makes through a neighbour's network card.

Between the wire and the experts, the grouped GEMM wants rows in expert-major order, in FP8 or MXFP8 each expert's group
padded: the kernels work on whole tiles and whole scale blocks, so a group may not begin in the middle of one (16 rows
for FP8, 32 for MXFP8, 128 where Blackwell's scale layout is used). Each pass reads and writes all rows:

====================================  ======================================================================
path                                  passes
====================================  ======================================================================
TorchTitan's standard dispatcher      gather and pad in one (torchao's ``permute_and_pad``), quantise
TorchTitan's DeepEP dispatcher        copy out of the buffer, gather; quantised experts, which 0.3.0 refuses here, would
                                      add a pass that pads, and quantise
DeepEP's expanding layout             the copy out of the buffer writes expert-major and padded; quantise
the same, FP8 dispatch                the copy alone: rows arrive quantised
====================================  ======================================================================

References:
    ``torchtitan`` 0.3.0, ``models/common/token_dispatcher.py`` and ``distributed/deepep/deepep.py``;
    ``torchao`` 0.18.0, ``prototype/moe_training/ep/permute.py``; ``deepseek-ai/DeepEP`` 2.1.0,
    ``deep_ep/buffers/elastic.py`` (hybrid and direct mode, ``do_expand``), ``tests/elastic/test_ep.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.hardware import Node
from moelab.model import BYTES_PER_ELEMENT, DispatchPrecision
from moelab.planning.time.routing import (
    Destinations,
    ExpertIds,
    ExpertPlacement,
    RoutingModel,
    draw_expert_ids,
    expected_destinations,
)

Method = Literal["standard", "deepep_direct", "deepep_hybrid"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class OnWires:
    """An amount, of rows or bytes, that a rank sends on average, by the wire that it takes."""

    nvlink: float
    network: float
    local: float

    @property
    def logical(self) -> float:
        """All of it, what stays in the rank included: the traffic that DeepEP's own bandwidths are over."""
        return self.nvlink + self.network + self.local

    def times(self, factor: float) -> OnWires:
        """The amount, scaled."""
        return OnWires(nvlink=self.nvlink * factor, network=self.network * factor, local=self.local * factor)


def move_time_s(sent: OnWires, node: Node) -> tuple[float, float]:
    """Seconds that NVLink and the network need to carry bytes at the profile's full bandwidth; the larger is a bound.

    They are 0 where nothing takes that wire.

    Raises:
        BadInput: if bytes take a wire that the node does not have.
    """
    wires = (("nvlink", sent.nvlink, node.gpu.nvlink_gb_s), ("network", sent.network, node.nic_gb_s))
    for name, amount, bandwidth in wires:
        if amount > 0 and bandwidth is None:
            raise BadInput(
                f"bytes travel over {name}, but the profile of {node.gpus} × {node.gpu.name} has no {name} bandwidth; "
                "choose a profile that has: b200_x256"
            )
    nvlink_s, network_s = (amount / float(bandwidth) / 1e9 if bandwidth else 0.0 for _, amount, bandwidth in wires)
    return nvlink_s, network_s


def require_method(method: str) -> None:
    """Check the name of a method.

    Raises:
        BadInput: naming the methods.
    """
    if method not in METHODS:
        raise BadInput(f"method is {method!r}; valid: {', '.join(METHODS)}")


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Bytes that a rank sends in one MoE layer, forward and backward.

    Backward, the gradient of combine's output travels as dispatch did, the gradient of dispatch's output as combine.
    """

    dispatch: OnWires
    combine: OnWires

    @property
    def total(self) -> OnWires:
        """All four exchanges."""
        way, back = self.dispatch, self.combine
        return OnWires(
            nvlink=2 * (way.nvlink + back.nvlink),
            network=2 * (way.network + back.network),
            local=2 * (way.local + back.local),
        )


def expected_rows(destinations: Destinations, placement: ExpertPlacement, method: Method) -> OnWires:
    """Rows that a rank sends for each of its tokens: mean over the ranks, whose tokens all choose alike.

    With N nodes of L ranks, P = N·L: ``standard`` and ``deepep_direct`` send c rows a token, c being k or the distinct
    ranks; of them 1/P stay, (L − 1)/P take NVLink, 1 − 1/N the network. ``deepep_hybrid`` sends distinct nodes times
    1 − 1/N over the network and distinct ranks times 1 − 1/L over NVLink: one rank in L has the token already. The mean
    holds for uneven loads too, since each destination is its own sender once in P; the busiest rank is another matter,
    which :func:`simulate_rows` tells.

    Raises:
        BadInput: for an unknown method.
    """
    require_method(method)
    P, L, N = placement.ep, placement.local_ranks, placement.nodes
    if method == "deepep_hybrid":
        nvlink = destinations.ranks * (1 - 1 / L)  # the relay is itself one of L destinations in its node
        return OnWires(nvlink=nvlink, network=destinations.nodes * (1 - 1 / N), local=destinations.ranks - nvlink)
    sent = destinations.copies if method == "standard" else destinations.ranks
    return OnWires(nvlink=sent * (L - 1) / P, network=sent * (1 - 1 / N), local=sent / P)


def layer_bytes(rows: OnWires, hidden: int, *, dispatch_precision: DispatchPrecision = "bf16") -> LayerTraffic:
    """Bytes of dispatch and combine of one MoE layer.

    ``rows`` are those that a rank sends in one exchange, of ``hidden`` elements each. ``dispatch_precision`` is that of
    dispatch and of combine's gradient, block scales included; the sums that combine and dispatch's gradient carry stay
    in BF16.
    """
    dispatch, combine = (rows.times(hidden * BYTES_PER_ELEMENT[one]) for one in (dispatch_precision, "bf16"))
    return LayerTraffic(dispatch=dispatch, combine=combine)


def expected_traffic(
    routing: RoutingModel,
    placement: ExpertPlacement,
    method: Method,
    *,
    tokens: int,
    hidden: int,
    dispatch_precision: DispatchPrecision = "bf16",
) -> LayerTraffic:
    """Bytes that a rank sends in one MoE layer, on average: the whole model in one call.

    ``tokens`` are those that each rank routes, ``hidden`` the elements of each.

    Raises:
        BadInput: for an unknown method, or a routing that does not fit.

    >>> published = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
    >>> uniform = RoutingModel(kind="uniform")
    >>> sent = expected_traffic(uniform, published, "deepep_hybrid", tokens=4096, hidden=7168)
    >>> f"{sent.dispatch.network / 1e6:.0f} MB over the network"
    '159 MB over the network'
    """
    rows = expected_rows(expected_destinations(routing, placement), placement, method)
    return layer_bytes(rows.times(tokens), hidden, dispatch_precision=dispatch_precision)


# Shape suffixes: P ranks of the group, S senders, R receivers (both P), T tokens of a rank, K experts of a token,
# N nodes, L ranks of a node.

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ExchangeCount:
    """Rows from rank to rank in one exchange, counted."""

    nvlink_SR: Counts  # rows that S sends to R of its own node, ``(P, P)``
    network_SR: Counts  # rows that S sends to R of another node, ``(P, P)``
    local_S: Counts  # rows that a rank keeps, ``(P,)``

    @property
    def mean(self) -> OnWires:
        """Rows that a rank sends, mean over ranks."""
        ranks = len(self.local_S)
        nvlink, network, local = (float(rows.sum()) / ranks for rows in (self.nvlink_SR, self.network_SR, self.local_S))
        return OnWires(nvlink=nvlink, network=network, local=local)

    @property
    def busiest(self) -> OnWires:
        """For each wire, the rows of the rank that sends or receives most: the one that all others wait for."""
        nvlink, network = (
            float(max(rows_SR.sum(axis=1).max(), rows_SR.sum(axis=0).max()))
            for rows_SR in (self.nvlink_SR, self.network_SR)
        )
        return OnWires(nvlink=nvlink, network=network, local=float(self.local_S.max()))

    @property
    def rows_SR(self) -> Counts:
        """Rows from rank to rank over any wire, those that stay on the diagonal."""
        return self.nvlink_SR + self.network_SR + np.diag(self.local_S)


def count_rows(ids_STK: ExpertIds, placement: ExpertPlacement, method: Method) -> ExchangeCount:
    """Rows of one dispatch, counted from the experts of every rank's tokens, ``(P, T, K)``, each token's distinct.

    Returns:
        Rows from rank to rank. With ``deepep_hybrid``, ``local_S`` counts what a relay, or the sender itself, needs.

    Raises:
        BadInput: for an unknown method, or ids of another number of ranks.
    """
    require_method(method)
    P, L = placement.ep, placement.local_ranks
    if ids_STK.ndim != 3 or len(ids_STK) != P:  # ids of another group would be counted, and be wrong
        raise BadInput(f"expert ids are of shape {ids_STK.shape}; expected (ep {P}, tokens, top_k)")
    near_SR, far_SR = np.zeros((2, P, P), dtype=np.int64)
    for sender, ids_TK in enumerate(ids_STK):
        rows_TR = _rows_by_rank(ids_TK, placement)
        # a plain all-to-all sends a copy for each expert, DeepEP a token once for each rank that has any
        rows_TNL = (rows_TR if method == "standard" else np.minimum(rows_TR, 1)).reshape(-1, placement.nodes, L)
        rows_NL, home = rows_TNL.sum(axis=0), sender // L
        if method == "deepep_hybrid":  # once to the relay of each node, itself at home; from there over NVLink
            relays_N = np.arange(placement.nodes) * L + sender % L
            far_SR[sender, relays_N] = rows_TNL.any(axis=-1).sum(axis=0)
            for node, relay in enumerate(relays_N):
                near_SR[relay].reshape(-1, L)[node] += rows_NL[node]
        else:  # straight to every receiver
            far_SR[sender] = rows_NL.ravel()
            near_SR[sender].reshape(-1, L)[home] = rows_NL[home]
        far_SR[sender].reshape(-1, L)[home] = 0
    local_S = np.diag(near_SR)
    return ExchangeCount(nvlink_SR=near_SR - np.diag(local_S), network_SR=far_SR, local_S=local_S)


def simulate_rows(
    routing: RoutingModel, placement: ExpertPlacement, method: Method, *, tokens: int, seed: int = 0
) -> ExchangeCount:
    """As :func:`count_rows`, of a seeded draw of ``tokens`` tokens on every rank.

    Raises:
        BadInput: for an unknown method, or a routing that does not fit.
    """
    ids_STK = np.stack(
        [draw_expert_ids(routing, placement, tokens, rank=rank, seed=seed) for rank in range(placement.ep)]
    )
    return count_rows(ids_STK, placement, method)


def _rows_by_rank(ids_TK: ExpertIds, placement: ExpertPlacement) -> Counts:
    """How many experts of each token every rank holds, ``(T, P)``."""
    tokens, P = len(ids_TK), placement.ep
    # A bin for each token and rank, so that one bincount does for all tokens.
    flat = ids_TK // placement.experts_per_rank + P * np.arange(tokens)[:, None]
    return np.bincount(flat.ravel(), minlength=tokens * P).reshape(tokens, P)


STOCK_STANDARD, STOCK_DEEPEP = "standard: gather + pad, quantise", "stock DeepEP: copy, gather, pad, quantise"
EXPANDING, EXPANDING_FP8 = "expanding DeepEP: copy, quantise", "expanding DeepEP, FP8 dispatch: copy"


class Pass(NamedTuple):
    """One pass over memory of one rank's rows."""

    name: str
    moved_bytes: float  # read and written


def padded_rows(rows: float, experts: int, alignment: int) -> float:
    """Expected rows after padding each of ``experts`` groups, whose sizes end anywhere in a block of ``alignment``.

    >>> padded_rows(32768, 8, 128)
    33276.0
    """
    return rows + experts * (alignment - 1) / 2


def gather_passes(
    *, received: float, rows: float, experts: int, hidden: int, alignment: int, precision: str = "mxfp8"
) -> Mapping[str, tuple[Pass, ...]]:
    """Passes over memory of one rank's forward dispatch in one layer, by path.

    Args:
        received: rows that arrive where a token is sent once to a rank.
        rows: rows of the grouped GEMM, one for each token and local expert.
        experts: local experts, each with a group of its own.
        hidden: elements of a row.
        alignment: rows that a group is padded to a multiple of.
        precision: that the experts multiply in.
    """
    wide, low = hidden * BYTES_PER_ELEMENT["bf16"], hidden * BYTES_PER_ELEMENT[precision]
    padded = padded_rows(rows, experts, alignment)
    quantise = Pass("quantise", padded * wide + padded * low)
    return {
        STOCK_STANDARD: (Pass("gather", rows * wide + padded * wide), quantise),
        STOCK_DEEPEP: (
            Pass("copy out", 2 * received * wide),
            Pass("gather", 2 * rows * wide),
            Pass("pad", rows * wide + padded * wide),
            quantise,
        ),
        EXPANDING: (Pass("copy out", received * wide + padded * wide), quantise),
        EXPANDING_FP8: (Pass("copy out", received * low + padded * low),),
    }
