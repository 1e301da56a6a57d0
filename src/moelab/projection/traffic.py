"""Bytes that dispatch and combine put on NVLink and on the network, by method and routing.

====================  =============================================================  =================================
method                what travels                                                   over the network
====================  =============================================================  =================================
``standard``          a copy for each expert of a token (TorchTitan's all-to-all)    a copy for each remote expert
``deepep_direct``     a token once to each rank that holds one of its experts        once per remote rank
``deepep_hybrid``     once to each node, to the GPU with the sender's place there,   once per remote node
                      which forwards it over NVLink to the other ranks concerned
====================  =============================================================  =================================

Combine takes the same ways back: partial sums are formed in each rank, with ``deepep_hybrid`` again in each node
(DeepEP's ``allow_multiple_reduction``, on by default), so it moves as many rows as dispatch.

Not counted: indices and scores, which DeepEP sends along (12 bytes an expert, below 1 % of a BF16 row of 7168), NCCL's
protocol, and any detour that NCCL makes through a neighbour's network card.

References:
    ``deepseek-ai/DeepEP`` 2.1.0, ``deep_ep/buffers/elastic.py`` (hybrid and direct mode), ``tests/elastic/test_ep.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from moelab.model import BYTES_PER_ELEMENT, Precision
from moelab.projection.destinations import Destinations, expected_destinations
from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import RoutingModel
from moelab.projection.wires import Method, OnWires, require_method


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Bytes that a rank sends in one MoE layer, forward and backward.

    Backward, the gradient of combine's output travels as dispatch did, the gradient of dispatch's output as combine.
    """

    dispatch: OnWires
    combine: OnWires
    combine_gradient: OnWires
    dispatch_gradient: OnWires

    @property
    def total(self) -> OnWires:
        """All four exchanges."""
        parts = self.dispatch, self.combine, self.combine_gradient, self.dispatch_gradient
        return OnWires(
            nvlink=sum(part.nvlink for part in parts),
            network=sum(part.network for part in parts),
            local=sum(part.local for part in parts),
        )


def expected_rows(destinations: Destinations, placement: ExpertPlacement, method: Method) -> OnWires:
    """Rows that a rank sends for each of its tokens: mean over the ranks, whose tokens all choose alike.

    With N nodes of L ranks, P = N·L: ``standard`` and ``deepep_direct`` send c rows a token, c being k or the distinct
    ranks; of them 1/P stay, (L − 1)/P take NVLink, 1 − 1/N the network. ``deepep_hybrid`` sends distinct nodes times
    1 − 1/N over the network and distinct ranks times 1 − 1/L over NVLink: one rank in L has the token already. The mean
    holds for uneven loads too, since each destination is its own sender once in P; the busiest rank is another matter,
    which :func:`moelab.projection.simulate_rows` tells.

    Args:
        destinations: of a token.
        placement: where the experts are.
        method: how tokens are sent.

    Raises:
        BadInput: for an unknown method.
    """
    require_method(method)
    P, L, N = placement.ep, placement.local_ranks, placement.nodes
    if method == "deepep_hybrid":
        nvlink = destinations.ranks * (1 - 1 / L)
        return OnWires(nvlink=nvlink, network=destinations.nodes * (1 - 1 / N), local=destinations.ranks - nvlink)
    sent = destinations.copies if method == "standard" else destinations.ranks
    return OnWires(nvlink=sent * (L - 1) / P, network=sent * (1 - 1 / N), local=sent / P)


def layer_bytes(rows: OnWires, hidden: int, *, dispatch_precision: Precision = "bf16") -> LayerTraffic:
    """Bytes of the four exchanges of one MoE layer.

    Args:
        rows: that a rank sends in one exchange.
        hidden: elements of a row.
        dispatch_precision: of dispatch and of combine's gradient, block scales included; the sums that combine and
            dispatch's gradient carry stay in BF16.
    """
    low = rows.times(hidden * BYTES_PER_ELEMENT[dispatch_precision])
    high = rows.times(hidden * BYTES_PER_ELEMENT["bf16"])
    return LayerTraffic(dispatch=low, combine=high, combine_gradient=low, dispatch_gradient=high)


def expected_traffic(
    routing: RoutingModel,
    placement: ExpertPlacement,
    method: Method,
    *,
    tokens: int,
    hidden: int,
    dispatch_precision: Precision = "bf16",
) -> LayerTraffic:
    """Bytes that a rank sends in one MoE layer, on average: the whole model in one call.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        method: how tokens are sent.
        tokens: that each rank routes.
        hidden: elements of a token.
        dispatch_precision: as for :func:`layer_bytes`.

    Raises:
        BadInput: for an unknown method, or a routing that does not fit.

    Example:
        >>> published = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
        >>> uniform = RoutingModel(kind="uniform")
        >>> sent = expected_traffic(uniform, published, "deepep_hybrid", tokens=4096, hidden=7168)
        >>> f"{sent.dispatch.network / 1e6:.0f} MB over the network"
        '159 MB over the network'
    """
    rows = expected_rows(expected_destinations(routing, placement), placement, method)
    return layer_bytes(rows.times(tokens), hidden, dispatch_precision=dispatch_precision)
