"""Traffic of expert parallelism: formulas against enumeration, the model against the routers and a real exchange."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from moelab.deepep.benchmark_cases import ROUTINGS, SKEW, Size, choose_experts, rows_to_ranks, traffic
from moelab.errors import BadInput
from moelab.hardware import cluster_of
from moelab.projection.routing import (
    KINDS,
    Destinations,
    ExpertIds,
    ExpertPlacement,
    Kind,
    RoutingModel,
    distinct_destinations,
    draw_expert_ids,
    expected_destinations,
    routing_of_load,
    zipf_weights,
)
from moelab.projection.traffic import (
    METHODS,
    Method,
    OnWires,
    count_rows,
    expected_rows,
    expected_traffic,
    layer_bytes,
    move_time_s,
)
from moelab.titan.routing import RandomBalancedRouter
from moelab.viz.traffic import hops

# PyTorch has no FP32 autocast on a CPU and says so; tensors are in FP32 here anyway.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
PUBLISHED = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
DIM = 64
TOKENS = 1024
"""Of each of 32 ranks: enough for a mean within 1 %."""
UNIFORM = RoutingModel(kind="uniform")


def model(kind: Kind, placement: ExpertPlacement = PUBLISHED) -> RoutingModel:
    """A routing of each kind that fits the placement."""
    if kind == "measured":
        shares = zipf_weights(placement.experts, 0.7)
        return routing_of_load(shares, top_k=placement.top_k, groups=8, limited_groups=4)
    weights = zipf_weights(placement.experts, 0.7) if kind == "skewed" else ()
    return RoutingModel(kind=kind, groups=8, limited_groups=4, weights=weights)


# --- destinations: the published table and enumeration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes"),
    [("round_robin", 1.0, 1.0), ("group_limited", 6.6, 2.93), ("uniform", 7.26, 3.62), ("random_balanced", 7.26, 3.62)],
)
def test_destinations_of_the_published_layout(kind: Kind, ranks: float, nodes: float) -> None:
    """256 experts, top-8, EP 32 on 4 nodes of 8; the figures were simulated, to the digits given."""
    found = expected_destinations(model(kind), PUBLISHED)
    assert found.label == "derived"
    assert found.copies == 8
    assert found.ranks == pytest.approx(ranks, abs=0.01)
    assert found.nodes == pytest.approx(nodes, abs=0.01)


def subsets_of_kept_groups(experts: int, top_k: int, groups: int, limited: int) -> ExpertIds:
    """Every choice of groups with every choice of experts in them, each equally likely."""
    size = experts // groups
    return np.array(
        [
            chosen
            for kept in itertools.combinations(range(groups), limited)
            for chosen in itertools.combinations([g * size + e for g in kept for e in range(size)], top_k)
        ]
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "ep", "local", "groups", "limited"),
    [(8, 3, 4, 2, 1, 1), (8, 3, 4, 2, 4, 2), (12, 4, 4, 2, 4, 3), (12, 3, 12, 2, 6, 2), (12, 3, 6, 6, 3, 2)],
)
def test_formulas_are_the_means_over_all_choices(
    experts: int, top_k: int, ep: int, local: int, groups: int, limited: int
) -> None:
    placement = ExpertPlacement(experts=experts, top_k=top_k, ep=ep, ranks_per_node=local)
    routing = RoutingModel(kind="group_limited", groups=groups, limited_groups=limited)
    every = subsets_of_kept_groups(experts, top_k, groups, limited)
    found = expected_destinations(routing, placement)
    assert found.label == "derived"
    assert found.ranks == pytest.approx(distinct_destinations(every, placement.experts_per_rank).mean(), rel=1e-12)
    assert found.nodes == pytest.approx(distinct_destinations(every, placement.experts_per_node).mean(), rel=1e-12)
    if groups == limited:
        uniform = expected_destinations(UNIFORM, placement)
        assert (uniform.ranks, uniform.nodes) == pytest.approx((found.ranks, found.nodes), rel=1e-12)


def test_groups_that_cut_across_ranks_are_simulated() -> None:
    placement = ExpertPlacement(experts=12, top_k=2, ep=3, ranks_per_node=3)  # 4 experts a rank
    routing = RoutingModel(kind="group_limited", groups=2, limited_groups=1)  # 6 experts a group
    found = expected_destinations(routing, placement)
    assert found.label == "simulated"
    every = subsets_of_kept_groups(12, 2, 2, 1)
    assert found.ranks == pytest.approx(distinct_destinations(every, 4).mean(), abs=0.02)


def test_skewed_routing_draws_without_replacement() -> None:
    """Chance of a pair: w_a / W · w_b / (W − w_a), in either order."""
    weights = (8.0, 4.0, 2.0, 1.0)
    placement = ExpertPlacement(experts=4, top_k=2, ep=4, ranks_per_node=2)
    ids_TK = draw_expert_ids(RoutingModel(kind="skewed", weights=weights), placement, 40_000, seed=3)
    for a, b in itertools.combinations(range(4), 2):
        expected = sum(weights[x] / 15 * weights[y] / (15 - weights[x]) for x, y in ((a, b), (b, a)))
        seen = float((np.sort(ids_TK, axis=-1) == (a, b)).all(axis=-1).mean())
        assert seen == pytest.approx(expected, abs=4 * math.sqrt(expected / 40_000))


@pytest.mark.parametrize(("groups", "limited"), [(1, 1), (8, 4)])
def test_a_measured_load_is_the_load_of_the_routing_that_is_made_of_it(groups: int, limited: int) -> None:
    """Experts get their shares whatever their groups, one without tokens gets none, and so a rank gets its own."""
    tokens_E = np.random.default_rng(4).gamma(2.0, size=256)
    tokens_E[40:44] = 0
    shares_E = tokens_E / tokens_E.sum()
    routing = routing_of_load(tokens_E.tolist(), top_k=8, groups=groups, limited_groups=limited)
    ids_TK = draw_expert_ids(routing, PUBLISHED, 20_000, seed=2)
    drawn_E = np.bincount(ids_TK.ravel(), minlength=256) / ids_TK.size
    assert abs(drawn_E - shares_E).sum() / 2 < 0.02  # of which a draw's chance is 0.015
    assert not drawn_E[40:44].any()
    ranks_R, drawn_R = shares_E.reshape(32, -1).sum(axis=1), drawn_E.reshape(32, -1).sum(axis=1)
    assert drawn_R == pytest.approx(ranks_R, rel=0.05)
    with pytest.raises(BadInput, match="no expert has a token"):
        routing_of_load([0, 0], top_k=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_distinct_experts_and_repeats_with_its_seed(kind: Kind) -> None:
    ids_TK, again, other = (draw_expert_ids(model(kind), PUBLISHED, 257, rank=rank, seed=5) for rank in (3, 3, 4))
    assert ids_TK.shape == (257, 8)
    assert set(ids_TK.ravel()) <= set(range(256))
    assert (distinct_destinations(ids_TK, 1) == 8).all()
    assert np.array_equal(ids_TK, again)
    assert np.array_equal(ids_TK, other) is (kind == "round_robin")
    if model(kind).grouped:
        assert distinct_destinations(ids_TK, 32).max() <= 4
    if kind in ("random_balanced", "round_robin"):
        load_E = np.bincount(ids_TK.ravel(), minlength=256)
        assert load_E.max() - load_E.min() <= 1


# --- the model against an exchange that moves tokens hop by hop ------------------------------------------------------


def exchange(ids_STK: ExpertIds, placement: ExpertPlacement, method: Method) -> Counter[tuple[int, int]]:
    """Rows by (sender, receiver) of tokens that are moved by hand."""
    rows: Counter[tuple[int, int]] = Counter()
    L = placement.local_ranks
    for sender, ids_TK in enumerate(ids_STK.tolist()):
        for ids in ids_TK:
            ranks = [expert // placement.experts_per_rank for expert in ids]
            if method != "deepep_hybrid":
                rows.update((sender, rank) for rank in (ranks if method == "standard" else set(ranks)))
                continue
            for node in {rank // L for rank in ranks}:
                relay = node * L + sender % L
                rows[sender, relay] += node != sender // L
                rows.update((relay, rank) for rank in {rank for rank in ranks if rank // L == node} - {relay})
    return rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ep", "local"), [(8, 4), (8, 1), (4, 4), (1, 1)])
def test_counts_and_drawn_hops_are_those_of_the_exchange_by_hand(
    ep: int, local: int, kind: Kind, method: Method
) -> None:
    placement = ExpertPlacement(experts=16, top_k=3, ep=ep, ranks_per_node=local)
    ids_STK = np.stack([draw_expert_ids(model(kind, placement), placement, 20, rank=rank) for rank in range(ep)])
    count, rows = count_rows(ids_STK, placement, method), exchange(ids_STK, placement, method)
    drawn: Counter[tuple[int, int]] = Counter()
    for sender, experts in ((sender, ids) for sender, ids_TK in enumerate(ids_STK.tolist()) for ids in ids_TK):
        for hop in hops(experts, placement, method, sender=sender):
            drawn[hop.sender, hop.receiver] += hop.copies
    wires_SR = count.nvlink_SR + count.network_SR
    for pair in itertools.product(range(ep), repeat=2):
        if pair[0] != pair[1]:
            assert wires_SR[pair] == rows[pair] == drawn[pair]
        same_node = pair[0] // local == pair[1] // local
        assert (count.network_SR if same_node else count.nvlink_SR)[pair] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_expected_rows_are_those_of_a_draw(kind: Kind) -> None:
    """For even and for skewed loads."""
    check_expected_rows(
        kind, np.stack([draw_expert_ids(model(kind), PUBLISHED, TOKENS, rank=rank, seed=1) for rank in range(32)])
    )


def check_expected_rows(kind: Kind, ids_STK: ExpertIds) -> None:
    """Within 1 %, round-robin exactly."""
    destinations = expected_destinations(model(kind), PUBLISHED)
    for method in METHODS:
        expected = expected_rows(destinations, PUBLISHED, method).times(TOKENS)
        counted = count_rows(ids_STK, PUBLISHED, method).mean
        for wire in ("nvlink", "network", "logical"):
            tolerance = 1e-12 if kind == "round_robin" else 0.01
            assert getattr(counted, wire) == pytest.approx(getattr(expected, wire), rel=tolerance), (method, wire)


# --- the model against the routers and the dispatcher that train -----------------------------------------------------


def router(config: type[TokenChoiceTopKRouter.Config], *, forced: bool = False, grouped: bool = False) -> nn.Module:
    built: nn.Module = config(
        num_experts=PUBLISHED.experts,
        gate=Linear.Config(in_features=DIM, out_features=PUBLISHED.experts),
        top_k=PUBLISHED.top_k,
        score_func="sigmoid",
        num_expert_groups=8 if grouped else None,
        num_limited_groups=4 if grouped else None,
        _debug_force_load_balance=forced,
    ).build()
    nn.init.normal_(built.gate.weight, std=DIM**-0.5)  # logits of unit variance
    return built


def routed(built: nn.Module, tokens: int) -> ExpertIds:
    """What the router chooses for ``tokens`` tokens of every rank, ``(P, T, K)``."""
    chosen = []
    with torch.no_grad():
        for rank in range(PUBLISHED.ep):
            built.rank = rank
            _, ids_BLK, _ = built(torch.randn(1, tokens, DIM))
            chosen.append(ids_BLK.view(tokens, -1).numpy())
    return np.stack(chosen)


@pytest.fixture(scope="module")
def chosen_by_the_routers() -> dict[str, ExpertIds]:
    torch.manual_seed(0)
    routers = {
        "round_robin": router(TokenChoiceTopKRouter.Config, forced=True),
        "random_balanced": router(RandomBalancedRouter.Config),
        "uniform": router(TokenChoiceTopKRouter.Config),  # learned, fresh weights
        "group_by_score": router(TokenChoiceTopKRouter.Config, grouped=True),
    }
    return {kind: routed(built, TOKENS) for kind, built in routers.items()}


@pytest.mark.parametrize("kind", ["round_robin", "random_balanced", "uniform", "group_by_score"])
def test_expected_rows_are_those_of_the_real_routers(kind: Kind, chosen_by_the_routers: dict[str, ExpertIds]) -> None:
    """TorchTitan's router, forced, free and group-limited, and the balanced random one, with real tokens."""
    check_expected_rows(kind, chosen_by_the_routers[kind])


@pytest.fixture
def ep_mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("torchtitan.distributed.utils._spmd_backend", "partial_dtensor")  # as training here
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PUBLISHED.ep)
    yield init_device_mesh("cpu", (PUBLISHED.ep,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


class Sent(Exception):
    """Stops a dispatch once what it would send is known."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__("what is sent is known")
        self.sizes = sizes


class CountingDispatcher(AllToAllTokenDispatcher):
    """TorchTitan's own dispatcher, up to the exchange."""

    def _dispatch_token_exchange(
        self, routed_input_ND: torch.Tensor, pg: object, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        raise Sent([part.nbytes for part in routed_input_ND.split(input_splits)])


@pytest.mark.parametrize("kind", ["round_robin", "random_balanced", "group_by_score"])
def test_standard_bytes_are_those_that_torchtitans_dispatcher_hands_to_the_exchange(
    kind: Kind, chosen_by_the_routers: dict[str, ExpertIds], ep_mesh: Any
) -> None:
    ids_STK, hidden = chosen_by_the_routers[kind], 16
    dispatcher = CountingDispatcher(AllToAllTokenDispatcher.Config(num_experts=256, top_k=8))
    dispatcher.wire_meshes(ep_mesh=ep_mesh)
    bytes_SR = np.zeros((PUBLISHED.ep, PUBLISHED.ep))
    for sender, ids in enumerate(ids_STK):
        ids_TK = torch.from_numpy(ids)
        x_TD = torch.zeros(len(ids), hidden, dtype=torch.bfloat16)
        load_E = torch.bincount(ids_TK.flatten(), minlength=PUBLISHED.experts)
        with pytest.raises(Sent) as sent:
            dispatcher.dispatch(x_TD, torch.ones(ids_TK.shape), ids_TK, load_E)
        bytes_SR[sender] = sent.value.sizes
    count = count_rows(ids_STK, PUBLISHED, "standard")
    assert np.array_equal(count.rows_SR * hidden * 2, bytes_SR)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("ranks", "method"), [(2, "standard"), (2, "deepep_direct"), (8, "standard"), (8, "deepep_direct")]
)
def test_bytes_are_those_that_the_all_to_all_experiment_counts(routing: str, ranks: int, method: Method) -> None:
    """Its count from its own draw against the model's expectation, within 1 %, and against the model's count."""
    size = Size(name="thin 671B", hidden=7168, top_k=8, experts=32, tokens=2048)
    placement = ExpertPlacement(experts=32, top_k=8, ep=ranks, ranks_per_node=8)
    ids_STK = np.stack([choose_experts(routing, size, rank=rank, device=torch.device("cpu")) for rank in range(ranks)])
    counted = [rows_to_ranks(torch.from_numpy(ids), experts=32, ranks=ranks) for ids in ids_STK]
    sent_PP = [one["copies" if method == "standard" else "once"] for one in counted]
    theirs = traffic(sent_PP, hidden=7168, precision="mxfp8")
    ours = count_rows(ids_STK, placement, method)
    assert ours.rows_SR.tolist() == sent_PP
    busiest = layer_bytes(ours.busiest, 7168, dispatch_precision="mxfp8").dispatch
    assert busiest.nvlink == theirs["physical_bytes"]
    assert layer_bytes(ours.mean, 7168).dispatch.nvlink == pytest.approx(theirs["rows_to_others"] * 14336)
    popular = sorted(zipf_weights(32, SKEW), reverse=True)
    order_E = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()  # the experiment's default seed
    weights = tuple(popular[place] for place in order_E) if routing == "skewed" else ()
    reached = expected_destinations(RoutingModel(kind=routing, weights=weights), placement)  # type: ignore[arg-type]
    expected = expected_rows(reached, placement, method).times(2048)
    assert expected.nvlink == pytest.approx(theirs["rows_to_others"], rel=0.01)


# --- bytes, time, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_a_plain_all_to_all_sends_a_token_to_each_of_its_experts(precision: Any) -> None:
    """Dispatch and combine's gradient in the given precision, with a byte of scale for 32 values; the rest in BF16."""
    sent = expected_traffic(UNIFORM, PUBLISHED, "standard", tokens=4096, hidden=7168, dispatch_precision=precision)
    elements = 4096 * 8 * 7168
    low, high = elements * (2 if precision == "bf16" else 33 / 32), elements * 2
    assert sent.dispatch.logical == pytest.approx(low)
    assert sent.combine.logical == pytest.approx(high)
    assert sent.total.logical == pytest.approx(2 * (low + high))


def test_hybrid_mode_agrees_with_deepeps_own_traffic_model() -> None:
    """``get_theoretical_num_sms`` in DeepEP 2.1.0: RDMA (nodes)·(1 − 1/N) and NVLink (ranks)·(1 − 1/L), by token."""
    found = expected_destinations(UNIFORM, PUBLISHED)
    rows = expected_rows(found, PUBLISHED, "deepep_hybrid")

    def expected_top_k(groups: int) -> float:
        return groups * (1 - math.comb(256 - 256 // groups, 8) / math.comb(256, 8))

    assert rows.network / found.ranks == pytest.approx(1 / expected_top_k(32) * (expected_top_k(4) * (1 - 1 / 4)))
    assert rows.nvlink / found.ranks == pytest.approx(1 - 1 / 8)


def test_one_node_uses_no_network_and_one_rank_no_wire() -> None:
    for ep, wires in ((8, ("network",)), (1, ("network", "nvlink"))):
        placement = ExpertPlacement(experts=256, top_k=8, ep=ep, ranks_per_node=8)
        for method in METHODS:
            rows = expected_rows(expected_destinations(UNIFORM, placement), placement, method)
            assert [getattr(rows, wire) for wire in wires] == [0.0] * len(wires)


def test_time_to_move() -> None:
    node = cluster_of("b200_x256").node
    assert move_time_s(OnWires(nvlink=9e9, network=1e9, local=5e9), node) == pytest.approx((9 / 900, 1 / 50))
    alone = cluster_of("h100_node").node
    assert move_time_s(OnWires(nvlink=9e9, network=0.0, local=0.0), alone) == pytest.approx((9 / 450, 0.0))
    with pytest.raises(BadInput, match="travel over network, but the profile of 8 × H100 has no network bandwidth"):
        move_time_s(OnWires(nvlink=0.0, network=1.0, local=0.0), alone)


PLACEMENT = {"experts": 256, "top_k": 8, "ep": 32, "ranks_per_node": 8}
GROUPED = {"kind": "group_limited", "groups": 7, "limited_groups": 2}
REFUSED = {
    "ep is 24 and does not divide 256 experts; valid: 1, 2, 4": {"ep": 24},
    "top_k is 300, but there are 256 experts": {"top_k": 300},
    "ranks_per_node is 5 and does not divide ep 32": {"ranks_per_node": 5},
    "experts is 0; give a whole number": {"experts": 0},
    "ep is True; give a whole number": {"ep": True},
    "7 groups do not divide 256 experts": GROUPED,
    "top_k is 8, but 1 of 64 groups hold 4": {**GROUPED, "groups": 64, "limited_groups": 1},
    "needs at least two": {"kind": "group_by_score", "groups": 256, "limited_groups": 9},
    "a weight for each of 256 experts; got 2": {"kind": "skewed", "weights": (1.0, 2.0)},
    "positive and finite": {"kind": "skewed", "weights": (1.0, math.nan)},
    "limited_groups is 5 of 4 groups": {**GROUPED, "groups": 4, "limited_groups": 5},
    "routing is 'random'; valid: round_robin": {"kind": "random"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_placements_and_routings_that_cannot_be(said: str) -> None:
    given: dict[str, Any] = REFUSED[said]  # type: ignore[assignment]
    placement = {name: value for name, value in given.items() if name in PLACEMENT}
    routing = {"kind": "uniform", **{name: value for name, value in given.items() if name not in PLACEMENT}}
    with pytest.raises(BadInput, match=said):
        expected_destinations(RoutingModel(**routing), ExpertPlacement(**{**PLACEMENT, **placement}))


def test_unknown_methods_and_ids_of_another_group_are_refused() -> None:
    destinations, ids_STK = Destinations(copies=8, ranks=7, nodes=3, label="derived"), np.zeros((32, 4, 8), np.int64)
    unknown: Any = "nccl"
    for call in (expected_rows, count_rows):
        with pytest.raises(BadInput, match="method is 'nccl'; valid: standard, deepep_direct, deepep_hybrid"):
            call(destinations if call is expected_rows else ids_STK, PUBLISHED, unknown)  # type: ignore[operator]
    with pytest.raises(BadInput, match=r"shape \(2, 4, 8\); expected \(ep 32, tokens, top_k\)"):
        count_rows(ids_STK[:2], PUBLISHED, "standard")
