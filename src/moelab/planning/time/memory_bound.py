"""Time of work that moves memory and computes little: norms, activations, residuals, the loss, the optimizer.

Each kernel of a compiled layer reads its inputs and writes its outputs once; backward moves twice as much. Without
compilation every operation does so. Gradient clipping and AdamW move what a rank holds of the parameters.
"""

from __future__ import annotations

import functools

from moelab.layout.sharding import Degrees, Held, StageModules, held
from moelab.model import ModelShape
from moelab.planning.memory.activations import BF16
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.job import Job, Times, add

LOSS_BYTES = 14.0
"""Of each logit: written, read twice by the softmax, its gradient written and read (BF16, one copy in FP32)."""
ACCUMULATE_BYTES = 10.0
"""Of a gradient in BF16 added to one in FP32: read, read, write."""


def memory_rate(job: Job, calibration: Calibration) -> float:
    """Bytes a second of a kernel that copies."""
    return float(job.node.gpu.hbm_tb_s or 0) * 1e12 * float(calibration.copy)


def elementwise_bytes(job: Job, *, moe: bool, again: bool = False) -> float:
    """Bytes that the fused elementwise kernels of one layer move forward, or ``again`` in the backward pass."""
    shape, work = job.shape, job.work
    t, s, heads = work.tokens, work.residual, shape.n_heads / work.tp
    latent = shape.q_lora_rank + shape.kv_lora_rank
    elements = 6 * s * shape.dim + 2 * t * latent + 2 * t * heads * shape.qk_head_dim
    if shape.grouped_queries:  # keys are turned as queries are, and both are normed before
        kv_heads = shape.kv_heads / work.tp
        elements += 2 * t * (kv_heads + shape.qk_norm * (heads + kv_heads)) * shape.qk_head_dim
    else:
        elements += t * heads * (shape.qk_nope_head_dim + 2 * shape.v_head_dim + shape.qk_head_dim)
    elements += 2 * t * heads * shape.v_head_dim
    if moe:  # SwiGLU reads gate and up and writes one, of the shared experts and of the routed ones
        elements += 3 * t * shape.shared_hidden_dim / work.tp
        if not (again and job.keeps_products):
            elements += 3 * work.received(shape) * shape.moe_hidden_dim
        elements += 6 * work.routed_tokens * shape.dim
    else:
        elements += 3 * t * shape.dense_hidden_dim / work.tp + 3 * s * shape.dim
    return BF16 * elements


def add_memory_bound(times: Times, job: Job, calibration: Calibration, *, moe: bool) -> None:
    """Elementwise work of one layer."""
    passes = 1.0 if job.stack.fused else float(calibration.eager_passes)
    forward = passes * elementwise_bytes(job, moe=moe) / memory_rate(job, calibration)
    add(times, "forward", "memory-bound", forward)
    add(times, "dgrad", "memory-bound", 2 * forward)  # each input is read again beside the gradients
    if job.checkpointing != "none":
        again = passes * elementwise_bytes(job, moe=moe, again=True) / memory_rate(job, calibration)
        add(times, "recompute", "memory-bound", again)


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


WHOLE_GRADIENT_BYTES = 8.0
"""Of each gathered gradient under Megatron's distributed optimizer: set to zero and scaled, FP32."""


@functools.lru_cache(maxsize=4096)
def held_by_kind(shape: ModelShape, degrees: Degrees) -> dict[str, Held]:
    """What one module of each kind has on a rank: ``dense`` and ``moe`` layers, ``embedding`` and ``head``."""
    kinds = {
        "dense": StageModules(dense_layers=min(1, shape.n_dense_layers)),
        "moe": StageModules(moe_layers=min(1, shape.n_moe_layers)),
        "embedding": StageModules(embedding=1),
        "head": StageModules(head=1),  # the last norm is gathered with it
    }
    return {kind: held(shape, modules, degrees) for kind, modules in kinds.items()}


def held_by_rank(job: Job, rank: int) -> Held:
    """What a pipeline rank holds."""
    stages = [held(job.shape, job.stages[stage], job.degrees) for stage in job.stages_of_rank[rank]]
    return Held(*map(sum, zip(*stages, strict=True)))


def optimizer_time_s(job: Job, calibration: Calibration, held: Held) -> float:
    """Seconds of a rank at the end of a step."""
    moved = held.local * float(calibration.optimizer_bytes)
    if job.stack.distributed_optimizer:
        local = held.dense / job.degrees.fsdp + held.experts / max(1, job.degrees.efsdp)
        # states are sharded, gradients are whole on every rank
        moved = local * float(calibration.optimizer_bytes) + WHOLE_GRADIENT_BYTES * held.gathered
    return moved / memory_rate(job, calibration)
