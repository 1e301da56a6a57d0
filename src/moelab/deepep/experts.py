"""Experts that apply the routing scores between their GEMMs, where it costs nothing.

A token's output is the sum over its experts of score x expert(token). TorchTitan multiplies the output rows,
``(R, D)``; the score is a number for each row, so it may as well multiply the hidden activation ``(R, F)`` before the
last GEMM: ``(s * h) @ w2 = s * (h @ w2)``. There it joins the SwiGLU in one pass over memory, the output rows need not
be kept for the score's gradient, and combine stays a pure sum. The difference is one rounding to BF16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


@functools.cache
def scored(parent: type) -> Any:
    """A subclass of a grouped-experts module whose forward takes the rows' scores.

    Args:
        parent: TorchTitan's ``GroupedExperts`` or a quantised subclass of it: whatever multiplies by ``_grouped_mm``.

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

            Args:
                x_RD: rows in expert-major order.
                num_tokens_per_expert_e: rows of each local expert, padding included.
                scores_R: float32; 0 for padding.
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
    h_RF = F.silu(gate_RF) * up_RF
    return (h_RF.float() * scores_R[:, None]).to(h_RF.dtype)


def local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
