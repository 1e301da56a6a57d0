"""The ways to move tokens that the experiment compares, each split into the parts that are timed.

``wire``
    what the communication library does: NCCL's or gloo's all-to-all; DeepEP's kernels with their copy out of its
    buffer and, in dispatch, the wait for the counts.
``counts``
    the exchange of counts and the read-back by the host that a plain all-to-all needs before its sizes are known.
``permute``
    gathers, scatters, and the scores, in PyTorch as TorchTitan 0.3.0 does them
    (``torchtitan/models/common/token_dispatcher.py``, ``torchtitan/distributed/deepep/deepep.py``). What is pointwise
    is one compiled kernel on a GPU, as in a compiled model.
``quantise``
    BF16 to FP8 with scales.

All arms deliver rows sorted by local expert and return what the tokens' own rank needs, so that they can be exchanged
for each other. The row products that the scores' gradient needs are the same in all and left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moelab.deepep.all_to_all.clock import Clock
from moelab.deepep.all_to_all.count import SCALE_BLOCK

# Shape suffixes: T tokens of this rank, K experts a token, N = T*K, R rows received (a copy for each local expert),
# U tokens received once each, D hidden, E experts, e local experts, P ranks, S scales of a row.

ALIGNMENT = 128
"""Rows of an expert are padded to this multiple in DeepEP's expanded layout; the largest that MXFP8 kernels ask for."""
FP8_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One rank's input: activations ``(T, D)`` BF16, expert ids ``(T, K)`` int64, scores ``(T, K)`` FP32."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    experts: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows at the experts ``(R, D)``, by local expert: BF16, or FP8 with ``scales`` ``(R, S)`` FP32."""

    data_RD: torch.Tensor
    scales_RS: torch.Tensor | None = None

    def bf16(self) -> torch.Tensor:
        """The values, dequantised."""
        if self.scales_RS is None:
            return self.data_RD
        blocks = self.data_RD.float().unflatten(1, (-1, SCALE_BLOCK))
        return (blocks * self.scales_RS.unsqueeze(-1)).flatten(1).to(torch.bfloat16)


@functools.cache
def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A pointwise function as one kernel on a GPU; as it is on a CPU."""
    return torch.compile(function, dynamic=True) if device.type == "cuda" else function


def weigh(rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Rows ``(R, D)`` times a score each ``(R,)``, in FP32 and rounded once."""
    return (rows.float() * scores.unsqueeze(-1)).to(rows.dtype)


def take_and_weigh(rows: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Rows by index ``(R,)``, times a score each ``(R,)``."""
    return weigh(rows[index], scores)


class Mover(Protocol):
    """What every arm can do, in this order: the four operations of one layer."""

    def dispatch(self, clock: Clock) -> Rows:
        """Send the tokens to their experts."""

    def combine(self, rows_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Return expert outputs, weighted by the scores and summed, ``(T, D)``."""

    def combine_backward(self, grad_TD: torch.Tensor, clock: Clock) -> Rows:
        """Send the gradient of the output to the experts, weighted by the scores unless it travels in FP8."""

    def dispatch_backward(self, grad_RD: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Return the gradient of the tokens, ``(T, D)``."""

    def expert_of_row(self) -> torch.Tensor:
        """Local expert of each row after ``dispatch``, int64 ``(R,)``; the number of local experts for padding."""

    def received(self) -> list[int] | None:
        """Rows that arrived from each rank by the library's own count; None where it does not say."""

    def score_of_row(self) -> torch.Tensor:
        """Score of each row, FP32 ``(R,)``; 0 for padding."""


def quantise(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 ``(T, D)`` to E4M3 ``(T, D)`` and FP32 scales ``(T, D/128)``, as ``deep_ep/utils/math.py`` lays them out."""
    blocks = x_TD.float().unflatten(1, (-1, SCALE_BLOCK))
    largest = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    data = (blocks * (FP8_MAX / largest).unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    return data, largest / FP8_MAX
