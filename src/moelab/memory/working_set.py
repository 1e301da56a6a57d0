"""What a layer needs for a moment only, beyond what it keeps: the largest of its temporary tensors at one time."""

from __future__ import annotations

from moelab.experiment import EPBackend, Precision
from moelab.memory.activations import BF16, FP32, Work
from moelab.model import ModelShape


def forward_working_set(shape: ModelShape, *, moe: bool, work: Work, compiled: bool) -> float:
    """Bytes of temporaries at the fullest moment of one layer's forward pass.

    For routed experts this is the sum of their outputs into tokens: what the all-to-all brought, its product with the
    scores (FP32 in TorchTitan's own dispatchers; a compiled layer does not write it out) and that product in BF16. With
    moelab's DeepEP dispatcher it is the experts' outputs, whose scores are applied already, and their sums.
    """
    if not moe:
        return 2 * BF16 * work.tokens * shape.dense_hidden_dim / work.tp
    if work.backend is EPBackend.DEEPEP:
        return float(BF16 * shape.dim * (work.received(shape) + work.routed_tokens))
    return float(work.sent(shape) * shape.dim * (BF16 if compiled else work.scaling_bytes + 2 * BF16))


def backward_working_set(shape: ModelShape, *, moe: bool, work: Work, compiled: bool) -> float:
    """Bytes of temporaries at the fullest moment of one layer's backward pass, gradients of weights apart.

    Uncompiled, it is the gradient of scaling the outputs by their scores: three tensors of their size. moelab's DeepEP
    dispatcher scales within the experts.
    """
    if not moe:
        return 3 * BF16 * work.tokens * shape.dense_hidden_dim / work.tp
    n, r = work.sent(shape), work.received(shape)
    experts = BF16 * r * (2 * shape.dim + 3 * shape.moe_hidden_dim)
    if work.backend is EPBackend.DEEPEP:
        return float(experts)
    scaling = n * shape.dim * (2 * BF16 if compiled else 3 * work.scaling_bytes)
    return float(max(experts, scaling))


def quantised_working_set(
    shape: ModelShape, *, precision: Precision, emulated: bool, work: Work, gathered_experts: int
) -> float:
    """Bytes of the quantised copies of one grouped product's operands, their scales included.

    torchao saves the BF16 operands for the backward pass and quantises them again there, so no quantised copy outlives
    its product (``torchao/prototype/moe_training/{fp8,mxfp8}_grouped_mm.py`` at 0.18). Emulation holds what it
    quantised and what it expanded again, with an FP32 copy of the larger operand on the way. Rows that arrive quantised
    need no copy, but one in BF16 for their weight gradient.
    """
    if precision is Precision.BF16:
        return 0.0
    rows = work.received(shape) * max(shape.dim, shape.moe_hidden_dim)
    if work.quantised_dispatch and not emulated:
        return float(max(work.received(shape) * shape.moe_hidden_dim + gathered_experts / 3, BF16 * rows))
    weights = gathered_experts / 3
    if precision is Precision.MXFP8 and emulated:
        return (1 + BF16) * (rows + weights) + FP32 * max(rows, weights)
    return rows + weights
