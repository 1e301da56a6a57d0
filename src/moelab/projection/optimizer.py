"""Time of gradient clipping and AdamW: memory traffic of the parameters that a rank holds."""

from __future__ import annotations

import functools

from moelab.memory.sharding import NOTHING, Degrees, Held, module_held
from moelab.model import EMBEDDING, HEAD, NORM, ModelShape
from moelab.projection.calibration import Calibration
from moelab.projection.job import Job
from moelab.projection.memory_bound import memory_rate

WHOLE_GRADIENT_BYTES = 8.0
"""Of each gathered gradient under Megatron's distributed optimizer: set to zero and scaled, FP32."""


def held_by_kind(job: Job) -> dict[str, Held]:
    """What one module of each kind has on a rank."""
    return _held_by_kind(job.shape, job.degrees)


@functools.lru_cache(maxsize=4096)
def _held_by_kind(shape: ModelShape, degrees: Degrees) -> dict[str, Held]:
    names = {"dense": "layers.0", "moe": f"layers.{shape.n_dense_layers}", "embedding": EMBEDDING, "head": HEAD}
    there = {"dense": shape.n_dense_layers, "moe": shape.n_moe_layers}
    found = {kind: module_held(shape, name, degrees) if there.get(kind, 1) else NOTHING for kind, name in names.items()}
    norm = module_held(shape, NORM, degrees)
    found["head"] = Held(*(a + b for a, b in zip(found["head"], norm, strict=True)))
    return found


def held_by_rank(job: Job, rank: int) -> Held:
    """What a pipeline rank holds."""
    kinds = held_by_kind(job)
    total = NOTHING
    for stage in job.stages_of_rank[rank]:
        modules = job.stages[stage]
        counts = {"dense": modules.dense_layers, "moe": modules.moe_layers}
        counts |= {"embedding": modules.embedding, "head": modules.head}
        for kind, count in counts.items():
            if count:
                total = Held(*(a + count * b for a, b in zip(total, kinds[kind], strict=True)))
    return total


def optimizer_time_s(job: Job, calibration: Calibration, held: Held) -> float:
    """Seconds of a rank at the end of a step."""
    moved = held.local * float(calibration.optimizer_bytes)
    if job.stack.distributed_optimizer:
        local = held.dense / job.degrees.fsdp + held.experts / max(1, job.degrees.efsdp)
        moved = local * float(calibration.optimizer_bytes) + WHOLE_GRADIENT_BYTES * held.gathered
    return moved / memory_rate(job, calibration)
