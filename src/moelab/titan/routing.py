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
:func:`draw_experts` draws the experts.

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

import math
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import TokenChoiceTopKRouter

# Shape suffixes: B batch, L sequence length, E experts, K experts per token, P permutations.

RANDOM_BALANCED = "moelab.titan.routing.random_balanced"
"""Name for TorchTitan's ``override.imports``."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def draw_experts(tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device) -> torch.Tensor:
    """Distinct experts for each token, at random from the default generator, with equal load.

    A random permutation of all experts, read in a circle, gives the tokens their experts, top-k at a time, until tokens
    and circle end together; then comes the next permutation. A window of a random permutation is a uniformly random set
    of distinct experts, and whole circles load every expert alike; only the last permutation may be cut short, so loads
    differ by one at most.

    TorchTitan seeds all ranks of a pipeline stage alike, so ``rank`` shifts the draw: random keys in [0, 1) are moved
    round the unit circle by another amount for each rank and expert, which leaves them uniform (a Cranley-Patterson
    rotation) and orders them anew.

    The draw is made on the device, and nothing is read back from it.

    Returns:
        int64 ``(tokens, top_k)``; each expert occurs ``tokens * top_k / experts`` times, rounded down or up.

    Example:
        >>> ids = draw_experts(16, 8, 2, rank=0, device=torch.device("cpu"))
        >>> torch.bincount(ids.flatten()).tolist()
        [4, 4, 4, 4, 4, 4, 4, 4]
    """
    slots = tokens * top_k
    circle = math.lcm(experts, top_k)  # slots after which a permutation and a token end together
    permutations = -(-slots // circle)
    keys_PE = torch.rand((permutations, experts), device=device)
    # Multiples of an irrational number: no two ranks are shifted alike, however many there are.
    shift_E = (rank * GOLDEN_RATIO % 1.0) * torch.arange(experts, device=device)
    ids_PE = ((keys_PE + shift_E) % 1.0).argsort(dim=-1)  # the order of random keys is a random permutation
    ids = ids_PE.unsqueeze(1).expand(permutations, circle // experts, experts).reshape(-1)
    return ids[:slots].view(tokens, top_k)


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
