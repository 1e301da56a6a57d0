"""How tokens choose experts in a benchmark: balanced traffic that does not flatter a dispatcher.

========================  =====================================================  ==========================
routing                   experts of a token                                     distinct ranks of a token
========================  =====================================================  ==========================
``learned``               the router's choice                                    the model's
``round_robin``           TorchTitan's forced balance: the next top-k experts    as few as possible
                          in order, so neighbours, and neighbours share a rank
``random_balanced``       drawn at random, different for each layer, step and    as in uniform random routing
                          rank, with the same load on every expert
========================  =====================================================  ==========================

A dispatcher that sends a token once per destination is flattered by ``round_robin``: with 256 experts, top-8 and EP 32
all copies of a token go to one rank. :class:`RandomBalancedRouter` keeps the balance without that advantage.
:func:`moelab.experts.draw_experts` draws the experts.

Why the default random generator and not a counter: with activation checkpointing, a layer repeats its forward pass
during the backward pass, and with a pipeline many micro-batches later. A counter in the router would have moved on, and
the repetition would send the tokens elsewhere. PyTorch's checkpointing stores the generator's state with each
checkpointed call and restores it for the recomputation (``preserve_rng_state``, on by default in TorchTitan), and
AOTAutograd does the same for random operators in recomputed regions, so both draws are equal by contract (only
torch.compile's ``eager`` backend breaks it, which TorchTitan refuses with FlexAttention). TorchTitan's ``debug.seed``
seeds the generator, and every call advances it: layers, micro-batches and steps differ.

The router's group-limited top-k does not matter here: its choice is discarded, as with TorchTitan's forced balance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from moelab.experts import draw_experts

# Shape suffixes: B batch, L sequence length, E experts, K experts per token, P permutations.

RANDOM_BALANCED = "moelab.titan.routing.random_balanced"
"""Name for TorchTitan's ``override.imports``."""


class RandomBalancedRouter(TokenChoiceTopKRouter):
    """A router whose experts are drawn at random with equal load; scores, and their gradients, stay the gate's."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """No settings of its own; the forced choice is always on."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._debug_force_load_balance = True
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def _debug_force_load_balance_routing(self, scores_BLE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw experts, where TorchTitan's forced balance takes them in order.

        Returns:
            Expert ids ``(B, L, K)``, int64, and the gate's scores of them ``(B, L, K)``.
        """
        B, L, E = scores_BLE.shape
        ids_BLK = draw_experts(B * L, E, self.top_k, rank=self.rank, device=scores_BLE.device).view(B, L, self.top_k)
        return ids_BLK, scores_BLE.gather(dim=-1, index=ids_BLK)


@override(
    target=TokenChoiceTopKRouter.Config, exact=True, description="experts drawn at random, with equal load on each"
)
def random_balanced(config: TokenChoiceTopKRouter.Config, *, fp32_gate: bool = False) -> RandomBalancedRouter.Config:
    """Swap the router for :class:`RandomBalancedRouter`, keeping its gate, scores and scaling."""
    if not fp32_gate:
        return derive(config, RandomBalancedRouter.Config)
    # Here too, because TorchTitan 0.3.0 refuses two overrides of which one claims a part of what the other claims.
    from moelab.titan import cpu

    return derive(config, RandomBalancedRouter.Config, gate=cpu.fp32_gate(config.gate))
