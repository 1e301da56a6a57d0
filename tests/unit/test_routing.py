"""Random balanced routing: exact load, distinct experts, destinations as in uniform routing, safe to recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.protocols.module import Module

from moelab.experts import draw_experts
from moelab.titan.cpu import Fp32Gate
from moelab.titan.models import model_spec
from moelab.titan.routing import RANDOM_BALANCED, RandomBalancedRouter, random_balanced

# PyTorch has no FP32 autocast on a CPU and says so; tensors are in FP32 here anyway.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
CPU = torch.device("cpu")
DIM = 16


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def draw(tokens: int, experts: int, top_k: int, *, rank: int = 0) -> torch.Tensor:
    return draw_experts(tokens, experts, top_k, rank=rank, device=CPU)


@given(st.integers(1, 200), st.integers(1, 24), st.integers(1, 8), st.integers(0, 300))
@example(48, 64, 6, 0)
@settings(max_examples=60, deadline=None)
def test_load_is_equal_and_experts_distinct(tokens: int, experts: int, top_k: int, rank: int) -> None:
    top_k = min(top_k, experts)
    ids_TK = draw(tokens, experts, top_k, rank=rank)
    assert ids_TK.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())
    load_E = torch.bincount(ids_TK.flatten(), minlength=experts)
    assert len(load_E) == experts
    assert int(load_E.max() - load_E.min()) <= 1
    assert int(load_E.sum()) == tokens * top_k
    if tokens * top_k % math.lcm(experts, top_k) == 0:  # whole circles
        assert load_E.min() == load_E.max()


def destinations(ids_TK: torch.Tensor, experts_each: int) -> float:
    """Mean number of distinct groups of experts that a token goes to."""
    return sum(len(set(row)) for row in (ids_TK // experts_each).tolist()) / len(ids_TK)


def test_every_expert_follows_every_other() -> None:
    """Marginals: each pair of experts meets in a token about as often as in uniform draws."""
    ids_TK = draw(20_000, 8, 2)
    pairs = torch.zeros(8, 8)
    pairs.index_put_((ids_TK[:, 0], ids_TK[:, 1]), torch.ones(len(ids_TK)), accumulate=True)
    off_diagonal = (pairs + pairs.T)[~torch.eye(8, dtype=torch.bool)]
    assert off_diagonal.min() > 0.85 * 20_000 / 28
    assert off_diagonal.max() < 1.15 * 20_000 / 28


def test_draws_follow_the_seed_and_differ_by_call_and_rank() -> None:
    def two_calls(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        return draw(512, 64, 6, rank=rank), draw(512, 64, 6, rank=rank)

    first, second = two_calls(0)
    assert torch.equal(first, two_calls(0)[0])
    assert torch.equal(second, two_calls(0)[1])
    others = [second, *(two_calls(rank)[0] for rank in (1, 2, 31, 255))]
    for other in others:
        # Independent draws of 6 from 64 share 6 * 6 / 64 = 0.56 experts of a token on average.
        shared = sum(len(set(a) & set(b)) for a, b in zip(first.tolist(), other.tolist(), strict=True)) / 512
        assert 0.3 < shared < 0.9


def router(config_class: type, *, experts: int = 16, top_k: int = 3, forced: bool = False) -> nn.Module:
    gate = Linear.Config(in_features=DIM, out_features=experts)
    config = config_class(
        num_experts=experts,
        gate=gate,
        top_k=top_k,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        num_expert_groups=4,
        num_limited_groups=2,
        _debug_force_load_balance=forced,
    )
    built: nn.Module = config.build()
    nn.init.normal_(built.gate.weight)
    return built


def hidden(length: int = 32) -> torch.Tensor:
    return torch.randn(2, length, DIM)


def exact_scores(routed: nn.Module, x_BLD: torch.Tensor, ids_BLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of given experts in float64, and the gate's weight that they depend on."""
    weight = routed.gate.weight.detach().double().requires_grad_()
    chosen = torch.sigmoid(x_BLD.double() @ weight.T).gather(-1, ids_BLK)
    return 2.5 * chosen / chosen.sum(-1, keepdim=True), weight


def test_groups_of_the_router_do_not_limit_the_draw() -> None:
    _, ids_BLK, _ = router(RandomBalancedRouter.Config, top_k=4)(hidden(256))
    assert destinations(ids_BLK.view(-1, 4), 4) > 2.5  # group-limited to 2 of 4


class Block(Module):
    """A layer around a router, as checkpointing and compilation see it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = router(RandomBalancedRouter.Config)

    def forward(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_BLK, ids_BLK, _ = self.router(x_BLD)
        return scores_BLK, ids_BLK


def compiled(module: nn.Module, backend: str | None) -> nn.Module:
    return module if backend is None else torch.compile(module, backend=backend, fullgraph=True)


def check_gradients(block: Block, run: nn.Module) -> list[torch.Tensor]:
    """Two micro-batches forward, then backward: scores and gradients are the gate's, of the experts of the forward."""
    inputs = [torch.randn(2, 9, DIM) for _ in range(2)]
    outputs = [run(x_BLD) for x_BLD in inputs]
    for x_BLD, (scores_BLK, ids_BLK) in zip(inputs, outputs, strict=True):
        block.zero_grad()
        scores_BLK.square().sum().backward()
        expected_BLK, weight = exact_scores(block.router, x_BLD, ids_BLK)
        expected_BLK.square().sum().backward()
        torch.testing.assert_close(scores_BLK.double(), expected_BLK, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(block.router.gate.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-5)
    return [ids_BLK for _, ids_BLK in outputs]


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("policy", [FullAC.Config(), SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])])
def test_recomputation_draws_the_same_experts(policy: FullAC.Config, backend: str | None) -> None:
    block = Block()
    first, second = check_gradients(block, compiled(policy.build(dump_folder="")._wrap_block(block), backend))
    assert not torch.equal(first, second)


def test_compiles_as_one_graph_and_draws_as_without() -> None:
    block = Block()
    torch.manual_seed(3)
    plain = check_gradients(block, block)
    torch.manual_seed(3)
    for one, other in zip(plain, check_gradients(block, compiled(block, "aot_eager")), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("kwargs", "gate"), [({}, Linear.Config), ({"fp32_gate": True}, Fp32Gate.Config)])
def test_torchtitan_applies_the_override(kwargs: dict[str, bool], gate: type) -> None:
    model = model_spec("nano", ep_backend="standard").model
    replaced = apply_overrides(OverrideConfig(imports=[(RANDOM_BALANCED, kwargs)]), model)
    routers = [config for _, config, _, _ in model.traverse(TokenChoiceTopKRouter.Config)]
    assert len(replaced) == len(routers) == 3
    assert all(type(config) is RandomBalancedRouter.Config and type(config.gate) is gate for config in routers)
    theirs = model_spec("671B", ep_backend="standard").model.layers[3].moe.router
    swapped = random_balanced(theirs)
    assert (swapped.num_experts, swapped.top_k, swapped.route_scale, swapped.gate) == (256, 8, 2.5, theirs.gate)
