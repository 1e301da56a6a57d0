"""What activation checkpoints keep: operators, and gradients that do not change. See test_dispatcher.py for counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from moelab.deepep import ops
from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC, communication_ops

TOKENS, FEATURES, EXPERTS = 64, 32, 8


def test_every_operator_that_sends_in_a_forward_pass_is_kept() -> None:
    """The two others, the gradients' own, are never part of a forward pass."""
    registered = {
        name for name in dir(getattr(torch.ops, ops.NAMESPACE)) if not name.startswith("_") and name != "name"
    }
    kept = {operator._schema.name.split("::")[1] for operator in communication_ops()}
    assert kept == {"dispatch", "dispatch_quantised", "combine"} <= registered
    assert registered - kept <= {"collect", "resend"}


def test_selective_keeps_what_torchtitans_keeps_moelabs_communication_and_products_in_8_bits() -> None:
    theirs, ours = (
        SelectiveAC(SelectiveAC.Config()).get_save_ops(),
        CommunicationSavingAC(CommunicationSavingAC.Config()),
    )
    assert ours.get_save_ops() == theirs | communication_ops() | {torch.ops.aten._scaled_grouped_mm.default}


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


class Counted(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] = self.calls.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients(block: nn.Module) -> tuple[list[torch.Tensor], dict[Any, int]]:
    x_TD = torch.randn((TOKENS, FEATURES), generator=torch.Generator().manual_seed(1)).requires_grad_()
    with Counted() as counted:
        block(x_TD).sin().sum().backward()
    return [x_TD.grad, *(parameter.grad for parameter in block.parameters())], counted.calls  # type: ignore[list-item]


@pytest.mark.parametrize("policy", [FullAC, CommunicationSavingFullAC], ids=["full", "full+dispatch"])
def test_everything_but_the_choice_of_experts_is_computed_again(policy: Any) -> None:
    """The router's choice is what the rows that are kept belong to, so it is kept too."""
    plain, once = gradients(Routed())
    found, counted = gradients(policy(policy.Config())._wrap_block(Routed()))
    torch.testing.assert_close(found, plain)
    topk, sine = torch.ops.aten.topk.default, torch.ops.aten.sin.default
    assert counted[topk] == once[topk] + (policy is FullAC)
    assert counted[sine] == once[sine] + 1
