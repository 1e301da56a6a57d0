"""A whole step: layers put together to stages, stages to a pipeline, and what comes once a step.

Of a layer, the embedding and the head one micro-batch on one rank is timed, pass by pass and part by part. Every
synchronising step waits for the slowest of n ranks. With times that scatter by sigma around their mean, normally
distributed, it comes at ``mean + sigma * E_n``, where E_n, the expected maximum of n standard normal draws, is found by
Blom's approximation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from statistics import NormalDist

import numpy as np

from moelab.layout.schedule import Durations, simulate
from moelab.memory.activations import BF16, FP32
from moelab.memory.sharding import Held
from moelab.projection.calibration import Calibration
from moelab.projection.exchange import add_context_parallel, add_exchange, add_tensor_parallel, fsdp_time_s, ring_time_s
from moelab.projection.gemm import add_attention, add_expert_casts, products_by_module
from moelab.projection.job import CATEGORIES, INDEX, Job, Times, add, nothing
from moelab.projection.memory_bound import (
    add_accumulation,
    add_loss,
    add_memory_bound,
    held_by_kind,
    held_by_rank,
    memory_rate,
    optimizer_time_s,
)


@functools.lru_cache(maxsize=1024)
def expected_maximum(draws: int) -> float:
    """Expected maximum of standard normal draws.

    References:
        Blom 1958, Statistical Estimates and Transformed Beta-Variables: alpha 0.375.

    >>> round(expected_maximum(2), 2), round(expected_maximum(256), 2)
    (0.59, 2.81)
    """
    return 0.0 if draws < 2 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def layer_times(job: Job, calibration: Calibration, products: Mapping[str, Times], *, moe: bool) -> Times:
    """One layer.

    Args:
        job: the step.
        calibration: constants.
        products: of :func:`products_by_module`.
        moe: a layer with routed experts, or a dense one.
    """
    times = products["attention"] + products["moe" if moe else "feed_forward"]
    add_attention(times, job, calibration)
    add_memory_bound(times, job, calibration, moe=moe)
    add_tensor_parallel(times, job, calibration)
    add_context_parallel(times, job, calibration)
    if moe:
        add_exchange(times, job, calibration)
        add_expert_casts(times, job, calibration)
    held = held_by_kind(job)["moe" if moe else "dense"]
    add_accumulation(times, job, calibration, held.gathered)
    _add_host(times, job, calibration)
    return times


def head_times(job: Job, calibration: Calibration, products: Mapping[str, Times]) -> Times:
    """The vocabulary head and the loss; arguments as :func:`layer_times`."""
    times = products["head"].copy()
    add_loss(times, job, calibration)
    add_accumulation(times, job, calibration, held_by_kind(job)["head"].gathered)
    return times


def embedding_times(job: Job, calibration: Calibration) -> Times:
    """The embedding: a gather forward, a sum backward, and its gradient written whole."""
    times = nothing()
    rate = memory_rate(job, calibration)
    rows = 4.0 * job.work.residual * job.shape.dim / rate
    add(times, "forward", "memory-bound", rows)
    add(times, "wgrad", "memory-bound", 2 * rows + 2 * job.shape.vocab_size * job.shape.dim / job.work.tp / rate)
    add_accumulation(times, job, calibration, held_by_kind(job)["embedding"].gathered)
    return times


def _add_host(times: Times, job: Job, calibration: Calibration) -> None:
    """What launching and waiting cost beyond the GPU's work, which hides part of it.

    Exposed is sqrt(G^2 + H^2) - G of a pass with G seconds on the GPU and H on the host: next to nothing where the GPU
    has much more to do, all but nothing hidden where it has little. Nothing derives this form. It was chosen with the
    three published rows in view, so that their gains are predicted by constants which have not seen them, but not by a
    model which has not; the uncompiled H100 arms, which it had not seen, are within 4 % of it at the 16B shape.
    """
    if not job.stack.host:
        return
    layer = host_layer_s(job, calibration)
    for name, part, share in (("forward", times[:1], 1 / 3), ("dgrad", times[1:], 2 / 3)):
        busy = float(part.sum())
        add(times, name, "host and waiting", hypot(busy, share * layer) - busy)  # type: ignore[arg-type]


def host_layer_s(job: Job, calibration: Calibration) -> float:
    """Seconds of a layer and micro-batch on the host, forward and backward."""
    if job.gpus > job.node.gpus and not job.stack.distributed_optimizer:
        return float(calibration.host_nodes_s)
    return float(calibration.host_compiled_s if job.stack.fused else calibration.host_layer_s)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part; the busiest pipeline rank's work, and its waiting as ``pipeline bubble``."""

    parts_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """The step."""
        return sum(self.parts_s.values())


def step_time(job: Job, calibration: Calibration) -> StepTime:
    """Predict a step."""
    stages = stage_times(job, calibration)
    sums = {id(table): table.sum(axis=1).tolist() for table in stages}
    durations = tuple(Durations(one[0], one[1] + one[2], one[3]) for one in (sums[id(table)] for table in stages))
    message_s = _message_s(job, calibration)
    played = simulate(job.schedule, durations, pp=job.pp, microbatches=job.microbatches, message_s=message_s)
    busiest = int(np.argmax(played.busy_s))
    parts = job.microbatches * sum(stages[stage].sum(axis=0) for stage in job.stages_of_rank[busiest])
    parts = np.asarray(parts, dtype=np.float64)
    parts[INDEX["pipeline bubble"]] += played.makespan_s - played.busy_s[busiest]
    _add_once(parts, job, calibration, busiest)
    noise = float(calibration.step_noise) * expected_maximum(job.gpus)
    parts[INDEX["imbalance and stragglers"]] += noise * parts.sum()
    return StepTime(parts_s=dict(zip(CATEGORIES, map(float, parts), strict=True)))


def stage_times(job: Job, calibration: Calibration) -> list[Times]:
    """One micro-batch on each stage."""
    products = products_by_module(job, calibration)
    dense = layer_times(job, calibration, products, moe=False) if job.shape.n_dense_layers else 0.0
    moe = layer_times(job, calibration, products, moe=True) if job.shape.n_moe_layers else 0.0
    head, embedding = head_times(job, calibration, products), embedding_times(job, calibration)
    kinds = {
        stage: stage.dense_layers * dense + stage.moe_layers * moe + stage.head * head + stage.embedding * embedding
        for stage in set(job.stages)
    }
    return [kinds[stage] for stage in job.stages]


def work_s(job: Job, calibration: Calibration) -> float:
    """Seconds of one micro-batch in all layers, one after the other."""
    return float(sum(table.sum() for table in stage_times(job, calibration)))


def _message_s(job: Job, calibration: Calibration) -> float:
    """Activations from one stage to the next; neighbours lie on other nodes where the stages fill theirs."""
    if job.pp == 1:
        return 0.0
    whole = BF16 * job.work.residual * job.shape.dim
    near = job.gpus <= job.node.gpus
    wire = float(calibration.nccl_ring) * float(job.node.gpu.nvlink_gb_s or 1)
    if not near:
        wire = float(calibration.network) * float(job.node.nic_gb_s or 1)
    return whole / wire / 1e9 + float(calibration.collective_s)


def _add_once(parts: Times, job: Job, calibration: Calibration, rank: int) -> None:
    """FSDP's collectives as far as nothing hides them, and the optimizer, on one pipeline rank."""
    held = held_by_rank(job, rank)
    parts[INDEX["FSDP collectives"]] += _fsdp_s(job, calibration, held, float(parts.sum()))
    parts[INDEX["optimizer"]] += optimizer_time_s(job, calibration, held)
    if job.stack.distributed_optimizer:
        return
    copied = held.gathered * float(calibration.fsdp_copy_bytes)
    parts[INDEX["memory-bound"]] += copied / memory_rate(job, calibration)
    if job.stack.host:
        parts[INDEX["host and waiting"]] += float(calibration.step_s)


def _fsdp_s(job: Job, calibration: Calibration, held: Held, busy_s: float) -> float:
    """Seconds of gathers and scatters that no compute hides.

    Once a step under a pipeline, where TorchTitan keeps parameters gathered and nothing runs beside the end; so with
    Megatron's distributed optimizer. Without a pipeline, the next layer's gather and the last one's scatter run beside
    a layer: exposed is what comes before and after all layers, and of the rest ``fsdp_exposed``, or what is longer than
    all compute.
    """
    whole = fsdp_time_s(job, calibration, held.dense, held.experts, BF16 + FP32)
    if job.degrees.dp_replicate > 1:
        stride = job.degrees.fsdp * job.work.tp
        reduced = ring_time_s(job, calibration, FP32 * held.padded, job.degrees.dp_replicate, stride=stride)
        whole += 2 * reduced
    if job.pp > 1 or job.stack.distributed_optimizer:
        return whole
    again = fsdp_time_s(job, calibration, held.dense, held.experts, BF16)  # gathered a second time, backward
    first = held_by_kind(job)["embedding"]
    ends = fsdp_time_s(job, calibration, first.dense, first.experts, BF16 + FP32)
    rest = whole + again - ends
    return min(whole + again, ends + max(rest * float(calibration.fsdp_exposed), rest - busy_s))


def tps_of(job: Job, calibration: Calibration) -> float:
    """Tokens per second per GPU."""
    return job.tokens_per_gpu / step_time(job, calibration).total_s
