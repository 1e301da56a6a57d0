"""How far a prediction can be trusted: the width of its interval, and what lies outside of what the model has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moelab.experiment import EPBackend, Precision
from moelab.hardware import ROCM
from moelab.model import ModelShape, shape_of
from moelab.projection.gemm import is_blackwell
from moelab.projection.job import Job

CONFIDENCE = 0.9


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 90 % interval; infinite where there is no such number."""

    value: float
    low: float
    high: float


PART_SPREAD = {
    "attention": 0.25,
    "expert GEMMs": 0.10,
    "other GEMMs": 0.10,
    "quantisation": 0.20,
    "permutation and padding": 0.25,
    "all-to-all": 0.32,
    "memory-bound": 0.15,
    "tensor-parallel collectives": 0.20,
    "context-parallel collectives": 0.50,
    "FSDP collectives": 0.30,
    "optimizer": 0.10,
    "host and waiting": 0.15,
    "pipeline bubble": 0.20,
    "imbalance and stragglers": 0.50,
}
"""Standard deviation of each part, relative to it: judged by the validation table's rows of that kind, and by guess
where no row is of that kind alone (attention, host, stragglers). The all-to-all has the root mean square of its blind
rows on H200. A test holds whole steps against the interval."""
SYSTEM_SPREAD = 0.07
"""Standard deviation of a whole step between two systems of one kind: half of the 14 % by which the 671B baseline
differs between two campaigns on H100."""
OUTSIDE_FACTOR = 3.0
"""How much wider an interval is outside of what the model was held against: enough for the table's GB200 row, which is
27 % off, and not for its GB300 row, which is 43 % off."""
GPUS_SEEN = ("H100", "H200", "B200")
MOST_GPUS, LEAST_TOKENS, SEQUENCES, NETWORK_GB_S = 256, 2048, (2048, 8192), 50.0


def relative_width(parts_s: Mapping[str, float], *, extrapolated: bool = False) -> float:
    """Half the width of the 90 % interval of a step, relative to it; parts err independently of each other.

    Args:
        parts_s: seconds of the step by part.
        extrapolated: whether the step lies outside of what was seen.
    """
    step_s = sum(parts_s.values())
    variance = sum((PART_SPREAD[part] * seconds / step_s) ** 2 for part, seconds in parts_s.items())
    return 1.645 * math.sqrt(variance + SYSTEM_SPREAD**2) * (OUTSIDE_FACTOR if extrapolated else 1.0)


def outside(job: Job) -> tuple[str, ...]:
    """What of a job lies outside of what the model was held against."""
    node, work = job.node, job.work
    low, high = SEQUENCES
    checks = (
        (node.gpu.name not in GPUS_SEEN, f"{node.gpu.name}: held against {', '.join(GPUS_SEEN)}"),
        (
            not _is_known(job.shape),
            f"dimensions of its own: of {job.shape.name}, only the numbers of layers and experts were seen to differ",
        ),
        (
            node.gpu.capability in ROCM,
            f"{node.gpu.name}: its kernels on ROCm are taken to reach the shares of peak that a B200's do",
        ),
        (job.gpus > MOST_GPUS, f"{job.gpus} GPUs: TorchTitan was seen on up to {MOST_GPUS}"),
        (not low <= job.seq_len <= high, f"seq_len {job.seq_len}: seen from {low} to {high}"),
        (work.routed_tokens < LEAST_TOKENS, f"{work.routed_tokens} routed tokens of a micro-batch: seen from 2048"),
        (work.cp > 1, "context parallelism: not in any row"),
        (
            job.gpus > node.gpus and node.nic_gb_s is not None and node.nic_gb_s.value != NETWORK_GB_S,
            f"network of {float(node.nic_gb_s or 0):g} GB/s: seen at {NETWORK_GB_S:g}",
        ),
        (
            work.backend is EPBackend.HYBRIDEP,
            "HybridEP under TorchTitan: its exchange by HybridEP's own table, what is around it as with DeepEP",
        ),
        (
            job.gpus > node.gpus and not job.stack.distributed_optimizer and not _as_published(job),
            "TorchTitan's host time on several nodes: known from the published run alone (671B on B200, PP 2, TP 2, "
            "8192 tokens a micro-batch, compiled)",
        ),
        (job.precision is Precision.FP8 and is_blackwell(node.gpu), "FP8 on Blackwell: no rate of it was measured"),
        (job.emulated and is_blackwell(node.gpu), "emulated MXFP8 on Blackwell: seen on H100"),
        (work.backend is EPBackend.MINIMAL_ASYNC_EP, "minimal_async_ep: modelled as DeepEP"),
        (
            work.imbalance != 1.0,
            f"the router's own choice, which gives the busiest rank {work.imbalance:.2f} x the mean: no row has it",
        ),
        (node.gpus > 8, f"NVLink among {node.gpus} GPUs: seen among 8"),
    )
    return tuple(reason for applies, reason in checks if applies)


def _is_known(shape: ModelShape) -> bool:
    """Whether a shape is a model's own, or differs in its counts of layers and experts alone."""
    known = shape_of(shape.name)
    return shape == known.thin(
        dense_layers=shape.n_dense_layers, moe_layers=shape.n_moe_layers, num_experts=shape.num_experts
    )


def _as_published(job: Job) -> bool:
    """Whether a pass of the host has the size that its only constant for several nodes was fitted on."""
    work = job.work
    sizes = (job.shape, job.node.gpu.name, job.pp, work.tp, work.tokens, job.stack.fused)
    return sizes == (shape_of("671B"), "B200", 2, 2, 8192, True)
