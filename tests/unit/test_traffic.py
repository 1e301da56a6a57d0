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

from moelab.errors import BadInput
from moelab.hardware import cluster_of
from moelab.micro.exchange import ROUTINGS, SKEW, Size, choose_experts, rows_to_ranks, traffic
from moelab.planning.time.routing import (
    KINDS,
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
from moelab.planning.time.traffic import (
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
TOKENS = 1024  # of each of 32 ranks: enough for a mean within 1 %
UNIFORM = RoutingModel(kind="uniform")


def model(kind: Kind, placement: ExpertPlacement = PUBLISHED) -> RoutingModel:
    """A routing of each kind that fits the placement."""
    shares = zipf_weights(placement.experts, 0.7)
    if kind == "measured":
        return routing_of_load(shares, top_k=placement.top_k, groups=8, limited_groups=4)
    return RoutingModel(kind=kind, groups=8, limited_groups=4, weights=shares if kind == "skewed" else ())


def drawn(kind: Kind, placement: ExpertPlacement, tokens: int) -> ExpertIds:
    ranks = range(placement.ep)
    return np.stack([draw_expert_ids(model(kind, placement), placement, tokens, rank=rank, seed=1) for rank in ranks])


# Destinations: the published table and enumeration


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes"),
    [("round_robin", 1.0, 1.0), ("group_limited", 6.6, 2.93), ("uniform", 7.26, 3.62), ("random_balanced", 7.26, 3.62)],
)
def test_destinations_of_the_published_layout(kind: Kind, ranks: float, nodes: float) -> None:
    """256 experts, top-8, EP 32 on 4 nodes of 8; the figures were simulated, to the digits given."""
    mean = expected_destinations(model(kind), PUBLISHED)
    assert (mean.label, mean.copies) == ("derived", 8)
    assert (mean.ranks, mean.nodes) == pytest.approx((ranks, nodes), abs=0.01)


@pytest.mark.parametrize(
    ("experts", "top_k", "ep", "local", "groups", "limited", "label"),
    [
        (8, 3, 4, 2, 1, 1, "derived"),
        (8, 3, 4, 2, 4, 2, "derived"),
        (12, 4, 4, 2, 4, 3, "derived"),
        (12, 3, 12, 2, 6, 2, "derived"),
        (12, 3, 6, 6, 3, 2, "derived"),
        (4, 4, 4, 2, 1, 1, "derived"),  # every expert of the layer
        (12, 2, 3, 3, 2, 1, "simulated"),  # groups of six cut across ranks of four
    ],
)
def test_destinations_are_the_means_over_all_choices(
    experts: int, top_k: int, ep: int, local: int, groups: int, limited: int, label: str
) -> None:
    """Of every choice of groups with every choice of experts in them, each equally likely."""
    placement = ExpertPlacement(experts=experts, top_k=top_k, ep=ep, ranks_per_node=local)
    groups_of = np.arange(experts).reshape(groups, -1)
    every = np.array(
        [
            chosen
            for kept in itertools.combinations(range(groups), limited)
            for chosen in itertools.combinations(groups_of[list(kept)].ravel(), top_k)
        ]
    )
    sizes = (placement.experts_per_rank, placement.experts_per_node)
    means = [distinct_destinations(every, size).mean() for size in sizes]
    limits = RoutingModel(kind="group_limited", groups=groups, limited_groups=limited)
    for routing in (limits, UNIFORM) if groups == limited else (limits,):
        mean = expected_destinations(routing, placement)
        assert mean.label == label
        assert [mean.ranks, mean.nodes] == pytest.approx(
            means, **({"rel": 1e-12} if label == "derived" else {"abs": 0.02})
        )


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


# The model against an exchange that moves tokens hop by hop, and against the routers and the dispatcher that train


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
    ids_STK = drawn(kind, placement, 20)
    count, rows = count_rows(ids_STK, placement, method), exchange(ids_STK, placement, method)
    shown: Counter[tuple[int, int]] = Counter()
    for sender, experts in ((sender, ids) for sender, ids_TK in enumerate(ids_STK.tolist()) for ids in ids_TK):
        for hop in hops(experts, placement, method, sender=sender):
            shown[hop.sender, hop.receiver] += hop.copies
    wires_SR = count.nvlink_SR + count.network_SR
    for pair in itertools.product(range(ep), repeat=2):
        if pair[0] != pair[1]:
            assert wires_SR[pair] == rows[pair] == shown[pair]
        same_node = pair[0] // local == pair[1] // local
        assert (count.network_SR if same_node else count.nvlink_SR)[pair] == 0


def router(config: type[TokenChoiceTopKRouter.Config], **fields: Any) -> nn.Module:
    gate = Linear.Config(in_features=DIM, out_features=PUBLISHED.experts)
    built: nn.Module = config(
        num_experts=PUBLISHED.experts, gate=gate, top_k=PUBLISHED.top_k, score_func="sigmoid", **fields
    ).build()
    nn.init.normal_(built.gate.weight, std=DIM**-0.5)  # logits of unit variance
    return built


@pytest.fixture(scope="module")
def chosen_by_the_routers() -> dict[str, ExpertIds]:
    """What TorchTitan's router and the balanced random one choose for the tokens of every rank, ``(P, T, K)``."""
    torch.manual_seed(0)
    routers = {
        "round_robin": router(TokenChoiceTopKRouter.Config, _debug_force_load_balance=True),
        "random_balanced": router(RandomBalancedRouter.Config),
        "uniform": router(TokenChoiceTopKRouter.Config),  # learned, fresh weights
        "group_by_score": router(TokenChoiceTopKRouter.Config, num_expert_groups=8, num_limited_groups=4),
    }
    chosen: dict[str, list[ExpertIds]] = {kind: [] for kind in routers}
    with torch.no_grad():
        for (kind, built), rank in itertools.product(routers.items(), range(PUBLISHED.ep)):
            built.rank = rank
            _, ids_BLK, _ = built(torch.randn(1, TOKENS, DIM))
            chosen[kind].append(ids_BLK.view(TOKENS, -1).numpy())
    return {kind: np.stack(ids) for kind, ids in chosen.items()}


REAL: tuple[Kind, ...] = ("round_robin", "random_balanced", "uniform", "group_by_score")


@pytest.mark.parametrize(("kind", "real"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in REAL)])
def test_expected_rows_are_those_of_draws_and_of_the_real_routers(
    kind: Kind, real: bool, request: pytest.FixtureRequest
) -> None:
    """For even and for skewed loads; within 1 %, round-robin exactly."""
    ids_STK = request.getfixturevalue("chosen_by_the_routers")[kind] if real else drawn(kind, PUBLISHED, TOKENS)
    destinations = expected_destinations(model(kind), PUBLISHED)
    for method in METHODS:
        expected = expected_rows(destinations, PUBLISHED, method).times(TOKENS)
        counted = count_rows(ids_STK, PUBLISHED, method).mean
        wires = [(one.nvlink, one.network, one.logical) for one in (counted, expected)]
        assert wires[0] == pytest.approx(wires[1], rel=1e-12 if kind == "round_robin" else 0.01), method


@pytest.fixture
def ep_mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("torchtitan.distributed.utils._spmd_backend", "partial_dtensor")  # as training here
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PUBLISHED.ep)
    yield init_device_mesh("cpu", (PUBLISHED.ep,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


class Sent(Exception):
    """Stops a dispatch once what it would send is known."""


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
    ids_STK, hidden, sent_SR = chosen_by_the_routers[kind], 16, []
    dispatcher = CountingDispatcher(AllToAllTokenDispatcher.Config(num_experts=256, top_k=8))
    dispatcher.wire_meshes(ep_mesh=ep_mesh)
    for ids_TK in map(torch.from_numpy, ids_STK):
        x_TD = torch.zeros(len(ids_TK), hidden, dtype=torch.bfloat16)
        load_E = torch.bincount(ids_TK.flatten(), minlength=PUBLISHED.experts)
        with pytest.raises(Sent) as sent:
            dispatcher.dispatch(x_TD, torch.ones(ids_TK.shape), ids_TK, load_E)
        sent_SR.append(sent.value.args[0])
    assert (count_rows(ids_STK, PUBLISHED, "standard").rows_SR * hidden * 2).tolist() == sent_SR


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("method", ["standard", "deepep_direct"])
def test_bytes_are_those_that_the_all_to_all_experiment_counts(routing: str, ranks: int, method: Method) -> None:
    """Its count from its own draw against the model's expectation, within 1 %, and against the model's count."""
    size = Size(name="thin 671B", hidden=7168, top_k=8, experts=32, tokens=2048)
    placement = ExpertPlacement(experts=32, top_k=8, ep=ranks, ranks_per_node=8)
    ids_STK = np.stack([choose_experts(routing, size, rank=rank, device=torch.device("cpu")) for rank in range(ranks)])
    once = method != "standard"
    sent_PP = [rows_to_ranks(torch.from_numpy(ids), experts=32, ranks=ranks, once=once) for ids in ids_STK]
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


# Bytes, time, and what is refused


@pytest.mark.parametrize(("precision", "element_bytes"), [("bf16", 2), ("fp8", 33 / 32), ("mxfp8", 33 / 32)])
def test_a_plain_all_to_all_sends_a_token_to_each_of_its_experts(precision: Any, element_bytes: float) -> None:
    """Dispatch and combine's gradient in the given precision, with a byte of scale for 32 values; the rest in BF16."""
    sent = expected_traffic(UNIFORM, PUBLISHED, "standard", tokens=4096, hidden=7168, dispatch_precision=precision)
    elements = 4096 * 8 * 7168
    amounts = (sent.dispatch.logical, sent.combine.logical, sent.total.logical)
    assert amounts == pytest.approx([elements * size for size in (element_bytes, 2, 2 * (element_bytes + 2))])


def test_hybrid_mode_agrees_with_deepeps_own_traffic_model() -> None:
    """``get_theoretical_num_sms`` in DeepEP 2.1.0: RDMA (nodes)·(1 − 1/N) and NVLink (ranks)·(1 − 1/L), by token."""
    destinations = expected_destinations(UNIFORM, PUBLISHED)
    rows = expected_rows(destinations, PUBLISHED, "deepep_hybrid")
    ranks, nodes = (
        groups * (1 - math.comb(256 - 256 // groups, 8) / math.comb(256, 8))
        for groups in (PUBLISHED.ep, PUBLISHED.nodes)
    )
    assert rows.network / destinations.ranks == pytest.approx(nodes / ranks * (1 - 1 / 4))
    assert rows.nvlink / destinations.ranks == pytest.approx(1 - 1 / 8)


def test_one_node_uses_no_network_and_one_rank_no_wire() -> None:
    for ep, method in itertools.product((8, 1), METHODS):
        placement = ExpertPlacement(experts=256, top_k=8, ep=ep, ranks_per_node=8)
        rows = expected_rows(expected_destinations(UNIFORM, placement), placement, method)
        assert (rows.network, rows.nvlink == 0) == (0, ep == 1)


def test_time_to_move() -> None:
    node, alone = cluster_of("b200_x256").node, cluster_of("h100_node").node
    assert move_time_s(OnWires(nvlink=9e9, network=1e9, local=5e9), node) == pytest.approx((9 / 900, 1 / 50))
    assert move_time_s(OnWires(nvlink=9e9, network=0.0, local=0.0), alone) == pytest.approx((9 / 450, 0.0))
    with pytest.raises(BadInput, match="travel over network, but the profile of 8 × H100 has no network bandwidth"):
        move_time_s(OnWires(nvlink=0.0, network=1.0, local=0.0), alone)


@pytest.mark.parametrize(
    ("words", "placement", "routing"),
    [
        ("ep is 24 and does not divide 256 experts; valid: 1, 2, 4", {"ep": 24}, {}),
        ("top_k is 300, but there are 256 experts", {"top_k": 300}, {}),
        ("ranks_per_node is 5 and does not divide ep 32", {"ranks_per_node": 5}, {}),
        ("experts is 0; give a whole number", {"experts": 0}, {}),
        ("ep is True; give a whole number", {"ep": True}, {}),
        ("7 groups do not divide 256 experts", {}, {"groups": 7, "limited_groups": 2}),
        ("top_k is 8, but 1 of 64 groups hold 4", {}, {"groups": 64, "limited_groups": 1}),
        ("needs at least two", {}, {"kind": "group_by_score", "groups": 256, "limited_groups": 9}),
        ("a weight for each of 256 experts; got 2", {}, {"kind": "skewed", "weights": (1.0, 2.0)}),
        ("positive and finite", {}, {"kind": "skewed", "weights": (1.0, math.nan)}),
        ("limited_groups is 5 of 4 groups", {}, {"groups": 4, "limited_groups": 5}),
        ("routing is 'random'; valid: round_robin", {}, {"kind": "random"}),
    ],
)
def test_placements_and_routings_that_cannot_be(words: str, placement: dict[str, Any], routing: dict[str, Any]) -> None:
    whole = {"experts": 256, "top_k": 8, "ep": 32, "ranks_per_node": 8, **placement}
    with pytest.raises(BadInput, match=words):
        expected_destinations(RoutingModel(**{"kind": "group_limited", **routing}), ExpertPlacement(**whole))


def test_methods_ids_and_loads_that_cannot_be() -> None:
    unknown: Any = "nccl"
    with pytest.raises(BadInput, match="method is 'nccl'; valid: standard, deepep_direct, deepep_hybrid"):
        expected_traffic(UNIFORM, PUBLISHED, unknown, tokens=1, hidden=1)
    for shape, method, words in (
        ((2, 4, 8), "standard", r"shape \(2, 4, 8\); expected \(ep 32, tokens, top_k\)"),
        ((32, 8), "standard", r"shape \(32, 8\); expected"),
        ((32, 4, 8), unknown, "method is 'nccl'"),
    ):
        with pytest.raises(BadInput, match=words):
            count_rows(np.zeros(shape, np.int64), PUBLISHED, method)
    with pytest.raises(BadInput, match="no expert has a token"):
        routing_of_load([0, 0], top_k=1)
