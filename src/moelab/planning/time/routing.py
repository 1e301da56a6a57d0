"""Where experts live, how tokens choose them, and how many ranks and nodes a token reaches.

TorchTitan shards the expert weights along their first dimension, so rank r of the group holds experts r·E/EP to
(r + 1)·E/EP − 1, and consecutive ranks share a node.

Each kind of routing is a model that can be drawn without a network:

====================  ==============================================================================================
kind                  experts of a token
====================  ==============================================================================================
``round_robin``       TorchTitan's forced balance: token t of every rank takes experts t·k to t·k + k − 1, modulo E
``random_balanced``   random windows of random permutations: equal load, each token a uniformly random set
                      (``moelab.titan.routing``)
``uniform``           each token a uniformly random set of k experts, on its own
``group_limited``     DeepSeek-V3's node-limited routing: experts lie in groups, a token may use some of the groups
                      only; here groups and experts are drawn uniformly
``group_by_score``    the same, as a router with independent scores does it: it keeps the groups whose two best scores
                      have the largest sum, then the best experts in them
``skewed``            experts drawn one after the other without replacement, with given weights
``measured``          the same, with the weights that give each expert its measured load (:func:`routing_of_load`);
                      inside groups, which are drawn by their load, where the model has groups
====================  ==============================================================================================

``group_by_score`` reaches more destinations than ``group_limited``: a group is kept because it has at least one good
expert, so hardly any kept group stays unused.

How many ranks and nodes a token reaches decides whether sending it once per destination saves anything. A destination
is a block of b = E/G consecutive experts, of G ranks or G nodes. Under uniform routing the block is missed if all k
experts come from the other E − b, so a token reaches

    G · (1 − C(E − b, k) / C(E, k))

of them on average (the same expression as in DeepEP's ``get_theoretical_num_sms``). Under group-limited routing it
holds inside the kept groups, averaged over which groups those are. Round-robin is counted over one whole circle of
tokens. What has no formula is drawn and counted, and says so.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2 (node-limited routing);
    ``torchtitan/models/common/moe.py`` at 0.3.0, ``TokenChoiceTopKRouter``;
    B. Rosén, On sampling with probability proportional to size, J. Statist. Plann. Inference 62, 1997 (the weights of
    a measured load).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts, the ranks that share them out, and the nodes that hold the ranks.

    Raises:
        BadInput: for a count that is not positive, or one that does not divide.
    """

    experts: int  # routed experts of a layer
    top_k: int
    ep: int  # ranks of the expert-parallel group; a divisor of ``experts``
    ranks_per_node: int  # consecutive ranks of the group on one node; all of them where the group is smaller

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "ep", "ranks_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{name} is {value!r}; give a whole number of at least 1")
        if self.top_k > self.experts:
            raise BadInput(f"top_k is {self.top_k}, but there are {self.experts} experts; valid: 1 to {self.experts}")
        if self.experts % self.ep:
            legal = ", ".join(str(ep) for ep in range(1, self.experts + 1) if self.experts % ep == 0)
            raise BadInput(f"ep is {self.ep} and does not divide {self.experts} experts; valid: {legal}")
        if self.ep > self.ranks_per_node and self.ep % self.ranks_per_node:
            raise BadInput(
                f"ranks_per_node is {self.ranks_per_node} and does not divide ep {self.ep}: the group must fill whole "
                "nodes, or fit in one"
            )

    @property
    def local_ranks(self) -> int:
        """Ranks of the group on each of its nodes."""
        return min(self.ranks_per_node, self.ep)

    @property
    def nodes(self) -> int:
        """Nodes that the group lies on."""
        return self.ep // self.local_ranks

    @property
    def experts_per_rank(self) -> int:
        """Experts that each rank holds."""
        return self.experts // self.ep

    @property
    def experts_per_node(self) -> int:
        """Experts that the ranks of one node hold together."""
        return self.experts // self.nodes


# Shape suffixes: T tokens, E experts, K experts of a token, G groups.

Kind = Literal["round_robin", "random_balanced", "uniform", "group_limited", "group_by_score", "skewed", "measured"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ExpertIds = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RoutingModel:
    """One kind of routing with what it needs."""

    kind: Kind  # see the table above
    groups: int = 1  # groups of experts, for the two group-limited kinds and a measured load
    limited_groups: int = 1
    weights: tuple[float, ...] = ()
    """Of each expert; for ``skewed`` on any positive scale, for ``measured`` those of a measured load."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"routing is {self.kind!r}; valid: {', '.join(KINDS)}")
        if not 1 <= self.limited_groups <= self.groups:
            raise BadInput(
                f"limited_groups is {self.limited_groups} of {self.groups} groups; valid: 1 to {self.groups}"
            )
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise BadInput("weights of experts must be positive and finite")

    @property
    def grouped(self) -> bool:
        """Whether a token may use some groups of experts only."""
        return self.kind in ("group_limited", "group_by_score") or (self.kind == "measured" and self.groups > 1)

    def require_fits(self, placement: ExpertPlacement) -> None:
        """Check that this routing can choose ``top_k`` of the experts.

        Raises:
            BadInput: if groups do not divide the experts, hold too few of them, or weights are of another number.
        """
        experts, top_k = placement.experts, placement.top_k
        if self.grouped and experts % self.groups:
            raise BadInput(f"{self.groups} groups do not divide {experts} experts")
        if self.grouped and self.limited_groups * experts // self.groups < top_k:
            raise BadInput(
                f"top_k is {top_k}, but {self.limited_groups} of {self.groups} groups hold "
                f"{self.limited_groups * experts // self.groups} experts; raise limited_groups"
            )
        if self.kind == "group_by_score" and experts // self.groups < 2:
            raise BadInput("a group is scored by its two best experts, so it needs at least two")
        if self.kind in ("skewed", "measured") and len(self.weights) != experts:
            raise BadInput(f"{self.kind} routing needs a weight for each of {experts} experts; got {len(self.weights)}")


def routing_of(kind: str, *, experts: int, groups: int, limited_groups: int, skew: float) -> RoutingModel:
    """A routing from the values that a person gives; what its kind does not need is ignored.

    ``skew`` is the exponent of :func:`zipf_weights`.

    Raises:
        BadInput: if there is no such routing.
    """
    if kind in ("group_limited", "group_by_score"):
        return RoutingModel(kind=kind, groups=groups, limited_groups=limited_groups)  # type: ignore[arg-type]
    weights = zipf_weights(experts, skew) if kind == "skewed" else ()
    return RoutingModel(kind=kind, weights=weights)  # type: ignore[arg-type]


def routing_of_load(shares: Sequence[float], *, top_k: int, groups: int = 1, limited_groups: int = 1) -> RoutingModel:
    """A routing under which each expert gets its share of the rows on average.

    Of experts that are drawn one after the other with weights −ln(1 − p), each is drawn with a chance of about p
    (Rosén). One without tokens has next to none.

    ``shares`` are of a layer's rows, on any positive scale; ``groups`` and ``limited_groups`` are the model's.

    Raises:
        BadInput: if nothing was routed.

    >>> routing_of_load([3, 2, 2, 1], top_k=2).weights
    (1.3862943611198906, 0.6931471805599453, 0.6931471805599453, 0.2876820724517809)
    """
    shares_E = np.asarray(shares, dtype=np.float64)
    if not shares_E.sum() > 0:
        raise BadInput("no expert has a token: there is no load to route by")
    weights = tuple(_weights_of_chances(top_k * shares_E / shares_E.sum()).tolist())
    return RoutingModel(kind="measured", groups=groups, limited_groups=limited_groups, weights=weights)


def _weights_of_chances(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = -np.log1p(-np.clip(chances, 1e-9, 1 - 1e-9))
    return weights


def zipf_weights(experts: int, exponent: float) -> tuple[float, ...]:
    """Weights 1 / place^exponent, where the experts' places in popularity are shuffled; exponent 0 is uniform.

    A made-up load for experiments; that of a trained router comes from its own counts.
    """
    places = np.random.default_rng(0).permutation(experts) + 1.0
    return tuple((1.0 / places**exponent).tolist())


def draw_expert_ids(
    routing: RoutingModel, placement: ExpertPlacement, tokens: int, *, rank: int = 0, seed: int = 0
) -> ExpertIds:
    """Experts of the tokens of one rank, ``(T, K)``, distinct in a row.

    Every ``rank`` of the expert-parallel group draws its own, but round-robin is the same on all.

    Raises:
        BadInput: if the routing does not fit the placement.

    >>> four = ExpertPlacement(experts=4, top_k=2, ep=2, ranks_per_node=2)
    >>> draw_expert_ids(RoutingModel(kind="round_robin"), four, 3).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    routing.require_fits(placement)
    experts, top_k = placement.experts, placement.top_k
    if routing.kind == "round_robin":
        return np.arange(tokens * top_k, dtype=np.int64).reshape(tokens, top_k) % experts
    rng = np.random.default_rng((seed, rank))  # a stream of its own for each rank
    if routing.kind == "random_balanced":
        return _balanced(rng, tokens, experts, top_k)
    return _best(_scores(routing, rng, tokens, experts), top_k)


def _balanced(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> ExpertIds:
    """Random permutations read in circles, as ``moelab.titan.routing.draw_experts`` does."""
    slots, circle = tokens * top_k, math.lcm(experts, top_k)
    order_PE = rng.random((-(-slots // circle), experts)).argsort(axis=-1)  # a permutation for each circle
    return np.tile(order_PE, (1, circle // experts)).reshape(-1)[:slots].reshape(tokens, top_k).astype(np.int64)


def _scores(routing: RoutingModel, rng: np.random.Generator, tokens: int, experts: int) -> npt.NDArray[np.float64]:
    """Scores ``(T, E)`` whose best are the chosen experts; those of groups that are not kept are minus infinity."""
    weights_E = np.asarray(routing.weights)
    if routing.kind == "measured" and routing.grouped:  # an expert's chance is that of its group, times one inside it
        chances_Ge = -np.expm1(-weights_E).reshape(routing.groups, -1)
        chances_G = np.minimum(1.0, routing.limited_groups * chances_Ge.sum(axis=1) / chances_Ge.sum())
        weights_E = _weights_of_chances(chances_Ge / chances_G[:, None]).ravel()
    if routing.weights:  # Gumbel noise on logarithms of weights draws without replacement
        scores_TE: npt.NDArray[np.float64] = np.log(weights_E) + rng.gumbel(size=(tokens, experts))
    elif routing.kind == "group_by_score":  # a sigmoid router with normally distributed logits
        scores_TE = 1.0 / (1.0 + np.exp(-rng.standard_normal((tokens, experts))))
    else:
        scores_TE = rng.random((tokens, experts))
    if not routing.grouped:
        return scores_TE
    scores_TGe = scores_TE.reshape(tokens, routing.groups, -1)
    if routing.kind == "group_by_score":
        group_scores_TG = np.sort(scores_TGe, axis=-1)[..., -2:].sum(axis=-1)
    elif routing.kind == "measured":
        group_scores_TG = np.log(_weights_of_chances(chances_G)) + rng.gumbel(size=(tokens, routing.groups))
    else:
        group_scores_TG = rng.random((tokens, routing.groups))
    kept_TG = np.zeros((tokens, routing.groups), dtype=bool)
    np.put_along_axis(kept_TG, _best(group_scores_TG, routing.limited_groups), True, axis=-1)
    return np.where(kept_TG[..., None], scores_TGe, -np.inf).reshape(tokens, experts)


def _best(scores: npt.NDArray[np.float64], count: int) -> ExpertIds:
    """Columns of the ``count`` largest scores of each row."""
    if count == scores.shape[-1]:  # which argpartition cannot part
        return np.broadcast_to(np.arange(count, dtype=np.int64), scores.shape).copy()
    return np.argpartition(-scores, count - 1, axis=-1)[:, :count].astype(np.int64)


SIMULATED_TOKENS = 16_384
"""Tokens of a draw: the standard error of a mean of at most ``top_k`` ranks is below 0.02."""


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """Means over tokens: of the distinct ranks and nodes that one reaches, and of its copies."""

    copies: float  # experts of a token, each of which a plain all-to-all serves with a copy of its own
    ranks: float
    nodes: float
    label: Literal["derived", "simulated"]  # ``derived`` from a formula, or ``simulated`` from a seeded draw


@functools.lru_cache(maxsize=256)  # a draw takes a while, and figures ask for the same one more than once
def expected_destinations(routing: RoutingModel, placement: ExpertPlacement) -> Destinations:
    """Mean number of ranks and nodes that a token reaches; where there is no formula, of a draw.

    Raises:
        BadInput: if the routing does not fit the placement.

    >>> published = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
    >>> mean = expected_destinations(RoutingModel(kind="group_limited", groups=8, limited_groups=4), published)
    >>> f"{mean.ranks:.2f} ranks, {mean.nodes:.2f} nodes, {mean.label}"
    '6.60 ranks, 2.93 nodes, derived'
    """
    routing.require_fits(placement)
    sizes = placement.experts_per_rank, placement.experts_per_node
    ranks, nodes = (_formula(routing, placement, size) for size in sizes)
    label: Literal["derived", "simulated"] = "derived"
    if ranks is None or nodes is None:
        tokens, label = SIMULATED_TOKENS, "simulated"
        if routing.kind == "round_robin":  # repeats itself, so one circle of tokens says all
            tokens, label = math.lcm(placement.experts, placement.top_k) // placement.top_k, "derived"
        ids_TK = draw_expert_ids(routing, placement, tokens)
        ranks, nodes = (float(distinct_destinations(ids_TK, size).mean()) for size in sizes)
    return Destinations(copies=placement.top_k, ranks=ranks, nodes=nodes, label=label)


def distinct_destinations(ids_TK: ExpertIds, experts_each: int) -> ExpertIds:
    """Number of distinct destinations of each token, ``(T,)``: blocks of ``experts_each`` consecutive experts.

    >>> distinct_destinations(np.array([[0, 1, 7], [0, 4, 7]]), 4).tolist()
    [2, 2]
    """
    sorted_TK = np.sort(ids_TK // experts_each, axis=-1)  # equal destinations stand beside each other
    changes_T: ExpertIds = (np.diff(sorted_TK, axis=-1) != 0).sum(axis=-1)
    return changes_T + 1


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
