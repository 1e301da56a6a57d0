"""The control of the convergence study: as coarse as it says, forward and backward, and TorchTitan takes it."""

from __future__ import annotations

import pytest
import torch
from convergence_control import CoarseExperts, coarse
from torchtitan.config.override import apply_overrides
from torchtitan.models.common.moe import GroupedExperts

from moelab.experiment import Experiment
from moelab.titan.config_registry import trainer_config


@pytest.mark.parametrize("levels", [1, 3])
def test_a_block_has_so_many_evenly_spaced_values_and_its_gradient_passes(levels: int) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    rounded = coarse(x, levels)
    for block, exact in zip(rounded.reshape(-1, 32), x.reshape(-1, 32), strict=True):
        step = exact.abs().max().double() / levels
        multiples = block.double() / step
        assert torch.allclose(multiples, (exact.double() / step).round(), atol=0.01)  # BF16 has 8 bits
        assert len(block.unique()) <= 2 * levels + 1
    weights = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    (rounded.float() * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights.bfloat16())


def test_a_block_of_zeros_stays_zero() -> None:
    assert torch.equal(coarse(torch.zeros(1, 32), 3), torch.zeros(1, 32))


def test_the_override_puts_them_in_place_of_all_experts() -> None:
    config = trainer_config(Experiment(overrides=["convergence_control.three_bits"]))
    apply_overrides(config.override, config)
    experts = [one for _, one, *_ in config.model_spec.model.traverse(GroupedExperts.Config)]
    assert [(type(one)._owner, one.levels) for one in experts] == [(CoarseExperts, 3)] * 3
