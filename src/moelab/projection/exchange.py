"""Rows of one dispatch from rank to rank, counted from the experts that tokens have, method by method.

Combine takes the same ways back, so this counts it too, with senders and receivers exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import ExpertIds, RoutingModel, draw_expert_ids
from moelab.projection.wires import Method, OnWires, require_method

# Shape suffixes: P ranks of the group, S senders, R receivers (both P), T tokens of a rank, K experts of a token,
# N nodes, L ranks of a node.

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ExchangeCount:
    """Rows from rank to rank in one exchange, counted.

    Attributes:
        nvlink_SR: rows that S sends to R of its own node, ``(P, P)``.
        network_SR: rows that S sends to R of another node, ``(P, P)``.
        local_S: rows that a rank keeps, ``(P,)``.
    """

    nvlink_SR: Counts
    network_SR: Counts
    local_S: Counts

    @property
    def mean(self) -> OnWires:
        """Rows that a rank sends, mean over ranks."""
        ranks = len(self.local_S)
        nvlink, network, local = (float(rows.sum()) / ranks for rows in self._parts)
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

    @property
    def _parts(self) -> tuple[Counts, Counts, Counts]:
        return self.nvlink_SR, self.network_SR, self.local_S


def count_rows(ids_STK: ExpertIds, placement: ExpertPlacement, method: Method) -> ExchangeCount:
    """Rows of one dispatch, counted from the experts that tokens really have.

    Args:
        ids_STK: expert ids of every rank's tokens, ``(P, T, K)``, distinct for each token.
        placement: where the experts are.
        method: how tokens are sent.

    Returns:
        Rows from rank to rank. With ``deepep_hybrid``, ``local_S`` counts what a relay, or the sender itself, needs.

    Raises:
        BadInput: for an unknown method, or ids of another number of ranks.
    """
    require_method(method)
    if ids_STK.ndim != 3 or len(ids_STK) != placement.ep:
        raise BadInput(f"expert ids are of shape {ids_STK.shape}; expected (ep {placement.ep}, tokens, top_k)")
    count = _count_hybrid if method == "deepep_hybrid" else _count_direct
    wires = {name: np.zeros((placement.ep, placement.ep), dtype=np.int64) for name in ("nvlink", "network", "local")}
    for sender in range(placement.ep):
        rows_TR = _rows_by_rank(ids_STK[sender], placement)
        count(wires, sender, rows_TR if method == "standard" else np.minimum(rows_TR, 1), placement)
    return ExchangeCount(nvlink_SR=wires["nvlink"], network_SR=wires["network"], local_S=np.diag(wires["local"]).copy())


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
    flat = ids_TK // placement.experts_per_rank + P * np.arange(tokens)[:, None]
    return np.bincount(flat.ravel(), minlength=tokens * P).reshape(tokens, P)


def _count_direct(wires: dict[str, Counts], sender: int, rows_TR: Counts, placement: ExpertPlacement) -> None:
    """Straight from the sender to every receiver."""
    near = np.arange(placement.ep) // placement.local_ranks == sender // placement.local_ranks
    itself = np.arange(placement.ep) == sender
    rows_R = rows_TR.sum(axis=0)
    for name, taken in (("nvlink", near & ~itself), ("network", ~near), ("local", itself)):
        wires[name][sender] += np.where(taken, rows_R, 0)


def _count_hybrid(wires: dict[str, Counts], sender: int, hits_TR: Counts, placement: ExpertPlacement) -> None:
    """Once to the relay of each node, which is the sender itself at home; from there over NVLink."""
    L = placement.local_ranks
    hits_TNL = hits_TR.reshape(len(hits_TR), placement.nodes, L)
    home, place = divmod(sender, L)
    for node, rows in enumerate(hits_TNL.any(axis=-1).sum(axis=0)):
        relay = node * L + place
        if node != home:
            wires["network"][sender, relay] += rows
        for local, forwarded in enumerate(hits_TNL[:, node].sum(axis=0)):
            wires["local" if local == place else "nvlink"][relay, node * L + local] += forwarded
