"""A whole step: layers put together to stages, stages to a pipeline, and what comes once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moelab.layout.schedule import Durations, simulate
from moelab.memory.activations import BF16, FP32
from moelab.memory.sharding import Held
from moelab.projection.calibration import Calibration
from moelab.projection.collective import fsdp_time_s, ring_time_s
from moelab.projection.costs import CATEGORIES, INDEX, Times
from moelab.projection.imbalance import expected_maximum
from moelab.projection.job import Job
from moelab.projection.layer_time import embedding_times, head_times, layer_times, products_by_module
from moelab.projection.memory_bound import memory_rate
from moelab.projection.optimizer import held_by_kind, held_by_rank, optimizer_time_s


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
    a layer: exposed is what comes before and after all layers, and what is longer than all compute.
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
    return min(whole + again, ends + max(0.0, whole + again - ends - busy_s))
