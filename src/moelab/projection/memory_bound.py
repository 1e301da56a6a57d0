"""Time of work that moves memory and computes little: norms, rotary embedding, activations, residuals, the loss.

Each kernel of a compiled layer reads its inputs and writes its outputs once; backward moves twice as much. Without
compilation every operation does so.
"""

from __future__ import annotations

from moelab.memory.activations import BF16
from moelab.projection.calibration import Calibration
from moelab.projection.costs import Times, add
from moelab.projection.job import Job

LOSS_BYTES = 14.0
"""Of each logit: written, read twice by the softmax, its gradient written and read (BF16, one copy in FP32)."""
ACCUMULATE_BYTES = 10.0
"""Of a gradient in BF16 added to one in FP32: read, read, write."""


def memory_rate(job: Job, calibration: Calibration) -> float:
    """Bytes a second of a kernel that copies."""
    return float(job.node.gpu.hbm_tb_s or 0) * 1e12 * float(calibration.copy)


def layer_bytes(job: Job, *, moe: bool) -> float:
    """Bytes that the fused elementwise kernels of one layer move forward."""
    shape, work = job.shape, job.work
    t, s, heads = work.tokens, work.residual, shape.n_heads / work.tp
    latent = shape.q_lora_rank + shape.kv_lora_rank
    elements = 6 * s * shape.dim + 2 * t * latent + 2 * t * heads * shape.qk_head_dim
    elements += t * heads * (shape.qk_nope_head_dim + 2 * shape.v_head_dim + shape.qk_head_dim)
    elements += 2 * t * heads * shape.v_head_dim
    if moe:
        elements += 3 * t * shape.shared_hidden_dim / work.tp + 3 * work.received(shape) * shape.moe_hidden_dim
        elements += 6 * work.routed_tokens * shape.dim
    else:
        elements += 3 * t * shape.dense_hidden_dim / work.tp + 3 * s * shape.dim
    return BF16 * elements


def add_memory_bound(times: Times, job: Job, calibration: Calibration, *, moe: bool) -> None:
    """Elementwise work of one layer."""
    passes = 1.0 if job.stack.fused else float(calibration.eager_passes)
    forward = passes * layer_bytes(job, moe=moe) / memory_rate(job, calibration)
    add(times, "forward", "memory-bound", forward)
    add(times, "dgrad", "memory-bound", 2 * forward)
    if job.checkpointing != "none":
        add(times, "recompute", "memory-bound", forward)


def add_accumulation(times: Times, job: Job, calibration: Calibration, gathered: float) -> None:
    """A micro-batch's weight gradients added to those of the others, ``gathered`` elements."""
    if job.microbatches > 1:
        add(times, "wgrad", "memory-bound", gathered * ACCUMULATE_BYTES / memory_rate(job, calibration))


def add_loss(times: Times, job: Job, calibration: Calibration) -> None:
    """Softmax and cross-entropy, and the head's gradient added up over chunks."""
    logits = job.work.tokens * job.shape.vocab_size / job.work.tp
    rate = memory_rate(job, calibration)
    add(times, "forward", "memory-bound", logits * LOSS_BYTES / 2 / rate)
    add(times, "dgrad", "memory-bound", logits * LOSS_BYTES / 2 / rate)
    if job.stack.loss_chunks > 1:
        head = job.shape.dim * job.shape.vocab_size / job.work.tp
        add(times, "wgrad", "memory-bound", job.stack.loss_chunks * head * ACCUMULATE_BYTES / rate)
