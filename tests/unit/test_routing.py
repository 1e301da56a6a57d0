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

from moelab.titan.cpu import Fp32Gate
from moelab.titan.models import model_spec
from moelab.titan.routing import RANDOM_BALANCED, RandomBalancedRouter, draw_experts, random_balanced

# PyTorch has no FP32 autocast on a CPU and says so; tensors are in FP32 here anyway.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
DIM = 16


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def draw(tokens: int, experts: int, top_k: int, *, rank: int = 0) -> torch.Tensor:
    return draw_experts(tokens, experts, top_k, rank=rank, device=torch.device("cpu"))


@given(st.integers(1, 200), st.integers(1, 24), st.integers(1, 8), st.integers(0, 300))
@example(48, 64, 6, 0)
@settings(max_examples=60, deadline=None)
def test_load_is_equal_and_experts_distinct(tokens: int, experts: int, top_k: int, rank: int) -> None:
    top_k = min(top_k, experts)
    ids_TK = draw(tokens, experts, top_k, rank=rank)
    assert ids_TK.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in ids_TK.tolist())
    load_E = torch.bincount(ids_TK.flatten(), minlength=experts)
    assert (len(load_E), int(load_E.sum())) == (experts, tokens * top_k)
    whole_circles = tokens * top_k % math.lcm(experts, top_k) == 0
    assert int(load_E.max() - load_E.min()) <= (0 if whole_circles else 1)


def test_every_expert_follows_every_other() -> None:
    """Marginals: each pair of experts meets in a token about as often as in uniform draws."""
    ids_TK = draw(20_000, 8, 2)
    pairs = torch.bincount(8 * ids_TK.min(dim=1).values + ids_TK.max(dim=1).values, minlength=64)
    met = pairs.view(8, 8)[torch.ones(8, 8).triu(1).bool()]
    assert 0.85 * 20_000 / 28 < met.min() <= met.max() < 1.15 * 20_000 / 28


def test_draws_follow_the_seed_and_differ_by_call_and_rank() -> None:
    def two_calls(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        return draw(512, 64, 6, rank=rank), draw(512, 64, 6, rank=rank)

    first, second = two_calls(0)
    assert all(map(torch.equal, (first, second), two_calls(0)))
    for other in (second, *(two_calls(rank)[0] for rank in (1, 2, 31, 255))):
        # Independent draws of 6 from 64 share 6 * 6 / 64 = 0.56 experts of a token on average.
        shared = sum(len(set(a) & set(b)) for a, b in zip(first.tolist(), other.tolist(), strict=True)) / 512
        assert 0.3 < shared < 0.9


class Block(Module):
    """A layer around a router whose groups would limit it, as checkpointing and compilation see it."""

    def __init__(self, top_k: int = 3) -> None:
        super().__init__()
        gate = Linear.Config(in_features=DIM, out_features=16)
        self.router = RandomBalancedRouter.Config(
            num_experts=16, gate=gate, top_k=top_k, score_func="sigmoid", route_norm=True, route_scale=2.5,
            num_expert_groups=4, num_limited_groups=2,
        ).build()  # fmt: skip
        nn.init.normal_(self.router.gate.weight)

    def forward(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_BLK, ids_BLK, _ = self.router(x_BLD)
        return scores_BLK, ids_BLK


def test_groups_of_the_router_do_not_limit_the_draw() -> None:
    _, ids_BLK = Block(top_k=4)(torch.randn(2, 256, DIM))
    groups = [len(set(row)) for row in (ids_BLK.view(-1, 4) // 4).tolist()]
    assert sum(groups) / len(groups) > 2.5  # group-limited to 2 of 4


def check_gradients(block: Block, run: nn.Module) -> list[torch.Tensor]:
    """Two micro-batches forward, then backward: scores and gradients are the gate's, of the experts of the forward."""
    inputs = [torch.randn(2, 9, DIM) for _ in range(2)]
    outputs = [run(x_BLD) for x_BLD in inputs]
    for x_BLD, (scores_BLK, ids_BLK) in zip(inputs, outputs, strict=True):
        block.zero_grad()
        scores_BLK.square().sum().backward()
        weight = block.router.gate.weight.detach().double().requires_grad_()
        chosen_BLK = torch.sigmoid(x_BLD.double() @ weight.T).gather(-1, ids_BLK)
        expected_BLK = 2.5 * chosen_BLK / chosen_BLK.sum(-1, keepdim=True)
        expected_BLK.square().sum().backward()
        torch.testing.assert_close(scores_BLK.double(), expected_BLK, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(block.router.gate.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-5)
    return [ids_BLK for _, ids_BLK in outputs]


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("policy", [FullAC.Config(), SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])])
def test_recomputation_draws_the_same_experts(policy: FullAC.Config, backend: str | None) -> None:
    block = Block()
    wrapped = policy.build(dump_folder="")._wrap_block(block)
    run = wrapped if backend is None else torch.compile(wrapped, backend=backend, fullgraph=True)
    first, second = check_gradients(block, run)
    assert not torch.equal(first, second)


def test_compiles_as_one_graph_and_draws_as_without() -> None:
    block, drawn = Block(), []
    for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(3)
        drawn.append(torch.stack(check_gradients(block, run)))
    assert torch.equal(*drawn)


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
