"""Time of attention's two products: pairs of tokens that may see each other, times a kernel's rate.

FlexAttention works on blocks of 128 × 128 and skips those that the mask leaves empty; a mask that keeps packed
documents apart leaves few. Backward is five products where forward has two.
"""

from __future__ import annotations

from moelab.projection.calibration import Calibration
from moelab.projection.costs import Times, add
from moelab.projection.job import Job

FLEX_BLOCK = 128
BACKWARD = 2.5


def seen_tokens(job: Job) -> float:
    """Keys that a query meets on average, masked parts of blocks included."""
    causal = job.seq_len / 2
    documents = job.stack.document_keys
    return causal if documents is None else min(causal, documents + FLEX_BLOCK / 2)


def add_attention(times: Times, job: Job, calibration: Calibration) -> None:
    """Attention of one layer."""
    shape, work = job.shape, job.work
    width = shape.n_heads / work.tp * (shape.qk_head_dim + shape.v_head_dim)
    flops = 2 * work.tokens * width * seen_tokens(job)
    peak = float(job.node.gpu.bf16_tflops or 0) * 1e12
    flex = job.stack.attention == "flex"
    forward = flops / peak / float(calibration.flex_forward if flex else calibration.fused_forward)
    backward = BACKWARD * flops / peak / float(calibration.flex_backward if flex else calibration.fused_backward)
    add(times, "forward", "attention", forward)
    add(times, "dgrad", "attention", backward)
    if job.checkpointing in ("full", "full+dispatch"):
        add(times, "recompute", "attention", forward)
