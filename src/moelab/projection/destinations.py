"""How many ranks and nodes a token reaches: what decides whether sending it once per destination saves anything.

A destination is a block of b = E/G consecutive experts, of G ranks or G nodes. Under uniform routing the block is
missed if all k experts come from the other E − b, so a token reaches

    G · (1 − C(E − b, k) / C(E, k))

of them on average (the same expression as in DeepEP's ``get_theoretical_num_sms``). Under group-limited routing it
holds inside the kept groups, averaged over which groups those are. Round-robin is counted over one whole circle of
tokens. What has no formula is drawn and counted, and says so.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import ExpertIds, RoutingModel, draw_expert_ids

SIMULATED_TOKENS = 16_384
"""Tokens of a draw: the standard error of a mean of at most ``top_k`` ranks is below 0.02."""


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """Means over tokens.

    Attributes:
        copies: experts of a token, each of which a plain all-to-all serves with a copy of its own.
        ranks: distinct ranks of a token.
        nodes: distinct nodes of a token.
        label: ``derived`` from a formula, or ``simulated`` from a seeded draw.
    """

    copies: float
    ranks: float
    nodes: float
    label: Literal["derived", "simulated"]


@functools.lru_cache(maxsize=256)  # a draw takes a while, and figures ask for the same one more than once
def expected_destinations(
    routing: RoutingModel, placement: ExpertPlacement, *, tokens: int = SIMULATED_TOKENS, seed: int = 0
) -> Destinations:
    """Mean number of ranks and nodes that a token reaches.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        tokens: of the draw, where there is no formula.
        seed: of the draw.

    Raises:
        BadInput: if the routing does not fit the placement.

    Example:
        >>> published = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
        >>> found = expected_destinations(RoutingModel(kind="group_limited", groups=8, limited_groups=4), published)
        >>> f"{found.ranks:.2f} ranks, {found.nodes:.2f} nodes, {found.label}"
        '6.60 ranks, 2.93 nodes, derived'
    """
    routing.require_fits(placement)
    sizes = placement.experts_per_rank, placement.experts_per_node
    if routing.kind == "round_robin":
        circle = math.lcm(placement.experts, placement.top_k) // placement.top_k
        ids_TK = draw_expert_ids(routing, placement, circle)
        ranks, nodes = (mean_destinations(ids_TK, size) for size in sizes)
        return Destinations(copies=placement.top_k, ranks=ranks, nodes=nodes, label="derived")
    formulas = [_formula(routing, placement, size) for size in sizes]
    if None not in formulas:
        ranks, nodes = (float(value) for value in formulas if value is not None)
        return Destinations(copies=placement.top_k, ranks=ranks, nodes=nodes, label="derived")
    ids_TK = draw_expert_ids(routing, placement, tokens, seed=seed)
    ranks, nodes = (mean_destinations(ids_TK, size) for size in sizes)
    return Destinations(copies=placement.top_k, ranks=ranks, nodes=nodes, label="simulated")


def distinct_destinations(ids_TK: ExpertIds, experts_each: int) -> ExpertIds:
    """Number of distinct destinations of each token.

    Args:
        ids_TK: experts of the tokens, ``(T, K)``.
        experts_each: consecutive experts that make a destination.

    Returns:
        ``(T,)``, int64.

    Example:
        >>> distinct_destinations(np.array([[0, 1, 7], [0, 4, 7]]), 4).tolist()
        [2, 2]
    """
    sorted_TK = np.sort(ids_TK // experts_each, axis=-1)
    changes_T: ExpertIds = (np.diff(sorted_TK, axis=-1) != 0).sum(axis=-1)
    return changes_T + 1


def mean_destinations(ids_TK: ExpertIds, experts_each: int) -> float:
    """Mean of :func:`distinct_destinations`."""
    return float(distinct_destinations(ids_TK, experts_each).mean())


def _formula(routing: RoutingModel, placement: ExpertPlacement, block: int) -> float | None:
    """Expected distinct blocks of ``block`` experts, or None where only a draw can tell."""
    experts, top_k = placement.experts, placement.top_k
    if routing.kind in ("uniform", "random_balanced"):
        return experts // block * _hit(experts, block, top_k)
    if routing.kind != "group_limited":
        return None
    group = experts // routing.groups
    kept = routing.limited_groups * group
    if group % block == 0:  # blocks lie inside groups
        return kept // block * _hit(kept, block, top_k)
    if block % group == 0:  # a block is made of groups, of which some are kept
        mean = sum(
            chance * _hit(kept, held * group, top_k)
            for held, chance in _hypergeometric(routing.groups, block // group, routing.limited_groups)
        )
        return experts // block * mean
    return None


def _hit(experts: int, block: int, top_k: int) -> float:
    """Chance that ``top_k`` distinct experts of ``experts`` include one of ``block`` given ones."""
    return 1.0 - math.comb(experts - block, top_k) / math.comb(experts, top_k)


def _hypergeometric(population: int, marked: int, drawn: int) -> list[tuple[int, float]]:
    """Counts of marked among the drawn, with their chances."""
    ways = math.comb(population, drawn)
    counts = range(max(0, drawn - (population - marked)), min(marked, drawn) + 1)
    return [(hit, math.comb(marked, hit) * math.comb(population - marked, drawn - hit) / ways) for hit in counts]
