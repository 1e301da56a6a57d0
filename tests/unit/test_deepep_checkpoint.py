"""What activation checkpoints keep: operators, and gradients that do not change. See test_dispatcher.py for counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_counts import counted_operators
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC, communication_ops

TOKENS, FEATURES, EXPERTS = 64, 32, 8


def test_selective_keeps_what_torchtitans_keeps_moelabs_communication_and_products_in_8_bits() -> None:
    theirs, ours = (made(made.Config()).get_save_ops() for made in (SelectiveAC, CommunicationSavingAC))
    assert ours == theirs | communication_ops() | {torch.ops.aten._scaled_grouped_mm.default}


class Routed(nn.Module):
    """A block whose output depends on which experts its router chooses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate = nn.Parameter(torch.randn((FEATURES, EXPERTS), generator=generator))
        self.experts = nn.Parameter(torch.randn((EXPERTS, FEATURES, FEATURES), generator=generator))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        scores_TK, ids_TK = torch.topk(torch.softmax(x_TD @ self.gate, dim=1), 2, dim=1)
        return torch.einsum("td,tkdf,tk->tf", torch.sin(x_TD), self.experts[ids_TK], scores_TK)


def gradients(block: nn.Module) -> tuple[list[torch.Tensor], dict[str, int]]:
    x_TD = torch.randn((TOKENS, FEATURES), generator=torch.Generator().manual_seed(1)).requires_grad_()
    with counted_operators(lambda func, _args: {func._schema.name.removeprefix("aten::"): 1}) as counted:
        block(x_TD).sin().sum().backward()
    return [x_TD.grad, *(parameter.grad for parameter in block.parameters())], counted  # type: ignore[list-item]


@pytest.mark.parametrize("policy", [FullAC, CommunicationSavingFullAC], ids=["full", "full+dispatch"])
def test_everything_but_the_choice_of_experts_is_computed_again(policy: Any) -> None:
    """The router's choice is what the rows that are kept belong to, so it is kept too."""
    plain, once = gradients(Routed())
    found, counted = gradients(policy(policy.Config())._wrap_block(Routed()))
    torch.testing.assert_close(found, plain)
    assert counted["topk"] == once["topk"] + (policy is FullAC)
    assert counted["sin"] == once["sin"] + 1
