"""The input of the experiment, and whether an arm moves it right."""

from __future__ import annotations

import torch

from moelab.deepep.all_to_all.arms import Mover, Tokens
from moelab.deepep.all_to_all.clock import Clock
from moelab.deepep.all_to_all.plan import Size
from moelab.deepep.all_to_all.routing import choose_experts
from moelab.deepep.all_to_all.world import World


def make_tokens(size: Size, routing: str, world: World, *, tokens: int | None = None) -> Tokens:
    """Random activations and scores, and experts under a routing; ``tokens`` takes only the first so many."""
    generator = torch.Generator(device=world.device).manual_seed(world.rank)
    ids_TK = choose_experts(routing, size, rank=world.rank, device=world.device)
    x_TD = torch.randn((size.tokens, size.hidden), generator=generator, device=world.device).to(torch.bfloat16)
    scores_TK = torch.rand((size.tokens, size.top_k), generator=generator, device=world.device) + 0.1
    scores_TK /= scores_TK.sum(dim=-1, keepdim=True)
    chosen = slice(None, tokens)
    return Tokens(x_TD=x_TD[chosen], ids_TK=ids_TK[chosen], scores_TK=scores_TK[chosen], experts=size.experts)


def round_trip(mover: Mover, tokens: Tokens, world: World, *, weighted: bool) -> float:
    """Forward and backward through experts that multiply by a number of their own; the larger relative error of both.

    Args:
        mover: of one arm; all ranks call this together.
        tokens: its input.
        world: the ranks.
        weighted: whether gradients reach the experts already weighted by the scores.

    Raises:
        ArmFailed: on every rank, if a step fails on one.
    """
    clock, grad_TD = Clock(world.device), tokens.x_TD.flip(0)
    factor_E = 1 + torch.arange(tokens.experts, device=world.device) / tokens.experts
    local_e = factor_E.view(world.ranks, -1)[world.rank]
    expected_T1 = (tokens.scores_TK * factor_E[tokens.ids_TK]).sum(dim=-1, keepdim=True)
    rows_RD = world.together(lambda: mover.dispatch(clock).bf16().clone())
    factor_R1 = torch.cat([local_e, local_e.new_zeros(1)])[mover.expert_of_row()].unsqueeze(-1)
    outputs_RD = (rows_RD.float() * factor_R1).to(rows_RD.dtype)
    out_TD = world.together(lambda: mover.combine(outputs_RD, clock))
    grad_RD = world.together(lambda: mover.combine_backward(grad_TD, clock)).bf16().float() * factor_R1
    if not weighted:
        grad_RD *= world.together(mover.score_of_row).unsqueeze(-1)
    back_TD = world.together(lambda: mover.dispatch_backward(grad_RD.to(rows_RD.dtype), clock))
    return max(_error(out_TD, tokens.x_TD * expected_T1), _error(back_TD, grad_TD * expected_T1))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
