"""Parts of a step alone, as the whole step has them: as much of a job as they need, and a grouped product's time."""

from __future__ import annotations

from collections.abc import Callable

from moelab.experiment import Precision
from moelab.hardware import GPUS, Node
from moelab.memory.activations import Work
from moelab.memory.sharding import Degrees
from moelab.model import ModelShape, shape_of
from moelab.mxfp8.grouped_gemm_cases import Case as Size
from moelab.projection.calibration import Calibration
from moelab.projection.gemm_rate import grouped_time_s, rates_of
from moelab.projection.job import Job
from moelab.projection.memory_bound import memory_rate
from moelab.projection.quantisation import DIRECTIONS, cast_time_s
from moelab.projection.routing_model import RoutingModel
from moelab.projection.stack import Stack

Predict = Callable[[Calibration], float]


def grouped_job(gpu: str, precision: str, *, ep: int = 1, shape: ModelShape | None = None, tokens: int = 1) -> Job:
    """As much of a job as a part of a layer needs."""
    node = Node(gpu=GPUS[gpu], gpus=8)
    return Job(
        shape=shape or shape_of("671B"),
        node=node,
        stack=Stack(name="part", permutation="standard compiled"),
        work=Work(tokens=tokens, ep=ep),
        seq_len=4096,
        microbatches=1,
        schedule="1F1B",
        stages=(),
        stages_of_rank=((0,),),
        degrees=Degrees(1, ep, 1, ep, 1),
        precision=Precision(precision.split("_")[0]),
        bf16_wgrad=precision.endswith("wgrad_bf16"),
        routing=RoutingModel(kind="random_balanced"),
    )


def product_parts_s(job: Job, calibration: Calibration, m: float, n: int, k: int, groups: int) -> dict[str, float]:
    """Seconds by direction of one grouped product, casts included."""
    low = job.precision is not Precision.BF16
    casts = cast_time_s(job, calibration, m, n, k, groups) if low else dict.fromkeys(DIRECTIONS, 0.0)
    rows = int(m)
    sizes = {"forward": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (n, k, rows)}
    rates = rates_of(job.node.gpu, calibration)
    found: dict[str, float] = {}
    for name in DIRECTIONS:
        wgrad = name == "wgrad"
        quantised = low and not (job.bf16_wgrad and wgrad)
        gemm_s = grouped_time_s(*sizes[name], groups, rates, low=quantised, wgrad=wgrad)
        found[name] = gemm_s + (casts[name] if quantised else 0.0)
    return found


def product_predicted(
    gpu: str, precision: str, size: Size, *, extra_bytes: float = 0.0, unit_s: float = 1e-6
) -> Predict:
    """What the model says of a grouped product forward and backward, and of ``extra_bytes`` moved beside it."""
    job = grouped_job(gpu, precision)

    def predict(calibration: Calibration) -> float:
        parts = product_parts_s(job, calibration, size.m, size.n, size.k, size.groups)
        return (sum(parts.values()) + extra_bytes / memory_rate(job, calibration)) / unit_s

    return predict
