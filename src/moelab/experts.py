"""Experts that apply the routing scores between their GEMMs, where it costs nothing.

A token's output is the sum over its experts of score x expert(token). TorchTitan multiplies the output rows,
``(R, D)``; the score is a number for each row, so it may as well multiply the hidden activation ``(R, F)`` before the
last GEMM: ``(s * h) @ w2 = s * (h @ w2)``. There it joins the SwiGLU in one pass over memory, the output rows need not
be kept for the score's gradient, and combine stays a pure sum. The difference is one rounding to BF16.

Both DeepEP's dispatcher and quantised experts use them, and both the trainer and the exchange experiment draw balanced
experts as here: a random permutation of all experts, read in a circle, gives the tokens their experts, top-k at a time,
until tokens and circle end together; then comes the next permutation. A window of a random permutation is a uniformly
random set of distinct experts, and whole circles load every expert alike; only the last permutation may be cut short,
so loads differ by one at most.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@functools.cache
def scored(parent: type) -> Any:
    """A subclass of a grouped-experts module whose forward takes the rows' scores.

    The parent is TorchTitan's ``GroupedExperts`` or a quantised subclass of it: whatever multiplies by ``_grouped_mm``.

    Example:
        >>> from torchtitan.models.common.moe import GroupedExperts
        >>> scored(GroupedExperts).__name__
        'ScoredGroupedExperts'
    """
    config_class: Any = parent.Config  # type: ignore[attr-defined]

    class ScoredExperts(parent):
        @dataclass(kw_only=True, slots=True)
        class Config(config_class):
            pass

        def forward(
            self, x_RD: torch.Tensor, num_tokens_per_expert_e: torch.Tensor, scores_R: torch.Tensor
        ) -> torch.Tensor:
            """SwiGLU of every row by its expert, times the row's score.

            Rows are in expert-major order; ``num_tokens_per_expert_e`` counts those of each local expert, padding
            included. Scores are float32, and 0 for padding.
            """
            w1_eFD, w2_eDF, w3_eFD = (local(weight) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
            offs = torch.cumsum(num_tokens_per_expert_e, dim=0, dtype=torch.int32)
            gate_RF = self._grouped_mm(A=x_RD, B_t=w1_eFD.bfloat16().transpose(-2, -1), offs=offs)
            up_RF = self._grouped_mm(A=x_RD, B_t=w3_eFD.bfloat16().transpose(-2, -1), offs=offs)
            h_RF = scored_swiglu(gate_RF, up_RF, scores_R)
            return self._grouped_mm(A=h_RF, B_t=w2_eDF.bfloat16().transpose(-2, -1), offs=offs)

    ScoredExperts.__name__ = ScoredExperts.__qualname__ = f"Scored{parent.__name__}"
    return ScoredExperts


def scored_swiglu(gate_RF: torch.Tensor, up_RF: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` rounded as TorchTitan rounds it, times the score in FP32, rounded once more."""
    return times_scores(F.silu(gate_RF) * up_RF, scores_R)


def times_scores(x_RF: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """Rows times a score each in FP32, rounded to the rows' dtype."""
    return (x_RF.float() * scores_R[:, None]).to(x_RF.dtype)


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def draw_experts(tokens: int, experts: int, top_k: int, *, rank: int, device: torch.device) -> torch.Tensor:
    """Distinct experts for each token, at random from the default generator, with equal load.

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
