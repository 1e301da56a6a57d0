"""How tokens choose experts in a benchmark: traffic that is balanced, and not flattering.

========================  =====================================================  ==========================
routing                   experts of a token                                     distinct ranks of a token
========================  =====================================================  ==========================
``learned``               the router's choice                                    the model's
``round_robin``           TorchTitan's forced balance: the next top-k experts    as few as possible
                          in order, so neighbours, and neighbours share a rank
``random_balanced``       drawn at random, different for each layer, step and    as uniform random routing
                          rank, with the same load on every expert
========================  =====================================================  ==========================

A dispatcher that sends a token once per destination is flattered by ``round_robin``: with 256 experts, top-8 and EP 32
all copies of a token go to one rank. :class:`RandomBalancedRouter` keeps the balance and takes the favour away.

How the experts are drawn: :func:`moelab.experts.draw_experts`.

Why the default random generator and no counter: under activation checkpointing a layer runs its forward again in the
backward, and under a pipeline many micro-batches later. A counter in the router would have moved on, and the second run
would send the tokens elsewhere. PyTorch's checkpointing stores the generator's state with each checkpointed call and
restores it for the recomputation (``preserve_rng_state``, on by default in TorchTitan), and AOTAutograd does the same
for random operators in recomputed regions, so the draw of the forward is the draw of the recomputation by contract
(torch.compile's ``eager`` backend alone does not keep it; TorchTitan refuses that backend with FlexAttention). The
generator is seeded by TorchTitan's ``debug.seed``, and every call moves it on: layers, micro-batches and steps differ.

The router's group-limited top-k does not matter here: its choice is thrown away, as in TorchTitan's forced balance.
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
        """Draw experts where TorchTitan's forced balance counts through them.

        Args:
            scores_BLE: the gate's scores of this rank's tokens.

        Returns:
            Expert ids ``(B, L, K)``, int64, and their scores ``(B, L, K)``.
        """
        B, L, E = scores_BLE.shape
        ids_BLK = draw_experts(B * L, E, self.top_k, rank=self.rank, device=scores_BLE.device).view(B, L, self.top_k)
        return ids_BLK, scores_BLE.gather(dim=-1, index=ids_BLK)


@override(
    target=TokenChoiceTopKRouter.Config, exact=True, description="experts drawn at random, with equal load on each"
)
def random_balanced(config: TokenChoiceTopKRouter.Config, *, fp32_gate: bool = False) -> RandomBalancedRouter.Config:
    """Swap the router for :class:`RandomBalancedRouter`, keeping its gate, scores and scaling.

    Args:
        config: the router.
        fp32_gate: put ``moelab.titan.cpu.fp32_gate`` in place of the gate too: TorchTitan 0.3.0 refuses two overrides
            of which one claims a part of what the other claims.
    """
    if not fp32_gate:
        return derive(config, RandomBalancedRouter.Config)
    from moelab.titan import cpu

    return derive(config, RandomBalancedRouter.Config, gate=cpu.fp32_gate(config.gate))
