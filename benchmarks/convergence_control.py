"""A control for the convergence study: experts so coarse that their harm must be seen, as an override of TorchTitan's.

A study that finds no harm in MXFP8 says little unless it finds some where there is some. These experts multiply a token
and a weight that were rounded to a few evenly spaced values for each block of 32, 7 (three bits) or 3 (two bits): the
step is a block's largest magnitude over 3 or 1. Gradients pass straight through the rounding, and are not rounded; the
products of the backward pass take the rounded operands. The rest of the model is BF16, as in every other arm::

    moelab run studies/convergence_gpu.yaml        # whose arm has overrides: [benchmarks.convergence_control.NAME]

It is no format that anybody trains in. MXFP8's E4M3 has 253 values, and NVFP4's E2M1 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts

BLOCK = 32


def coarse(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Round each block of 32 along the last dimension to ``2 * levels + 1`` evenly spaced values; straight-through.

    >>> coarse(torch.tensor([[0.4, 0.6, -3.0, 1.4] * 8]), levels=3)[0, :4].tolist()
    [0.0, 1.0, -3.0, 1.0]
    """
    blocks = x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    step = (blocks.abs().amax(-1, keepdim=True) / levels).clamp(min=torch.finfo(torch.bfloat16).tiny)
    rounded = (torch.round(blocks / step) * step).flatten(-2).to(x.dtype)
    # Exactly the rounded number, for x - x is 0; and its gradient is that of x.
    return rounded.detach() + (x - x.detach())


class CoarseExperts(GroupedExperts):
    """TorchTitan's experts between rounded tokens and rounded weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """``levels``: values on each side of zero."""

        levels: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._levels = config.levels

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        weight = coarse(B_t.transpose(-2, -1), self._levels)
        return super()._grouped_mm(A=coarse(A, self._levels), B_t=weight.transpose(-2, -1), offs=offs)


@override(target=GroupedExperts.Config, description="experts of seven values a block")
def three_bits(config: GroupedExperts.Config) -> CoarseExperts.Config:
    """Seven evenly spaced values a block."""
    return derive(config, CoarseExperts.Config, levels=3)


@override(target=GroupedExperts.Config, description="experts of three values a block")
def two_bits(config: GroupedExperts.Config) -> CoarseExperts.Config:
    """Three evenly spaced values a block."""
    return derive(config, CoarseExperts.Config, levels=1)
