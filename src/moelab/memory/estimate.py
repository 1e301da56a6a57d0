"""The most that each pipeline rank holds at a time, by part.

A training step has a few moments that can be its fullest, and which of them is depends on the layout: the last layer's
forward pass, the loss, the backward pass of a layer (its recomputation under activation checkpointing included), the
end of the backward pass when every gradient is there. :func:`estimate` adds up each of them and keeps the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.hardware import Gpu, has_native_mxfp8
from moelab.layout import Layout
from moelab.memory.activations import BF16, FP32, Work
from moelab.memory.constants import MemoryConstants, memory_constants
from moelab.memory.dispatch_buffer import DispatchBuffer, dispatch_buffer
from moelab.memory.layer import Mode
from moelab.memory.moments import Parts, Step, step
from moelab.memory.sharding import held, stage_modules
from moelab.model import ModelShape, shape_for

GIB = 2**30
PADDING = {Precision.BF16: 1, Precision.FP8: 16, Precision.MXFP8: 32}
"""Rows to a multiple of which each expert's group is padded; native MXFP8 kernels need ``NATIVE_PADDING``."""
NATIVE_PADDING = 128
DEEPEP_PADDING = 8
"""Rows to a multiple of which moelab's DeepEP dispatcher pads groups for BF16 experts."""
SCALE_BYTES = {"bf16": 0.0, "mxfp8": 1 / 32, "fp8": 0.0}
"""Of each feature of a quantised row: one byte for a block of 32; one number for a whole row is nothing."""
PARTS = (
    "parameters",
    "optimizer states",
    "gradients",
    "gathered parameters",
    "gathered gradients",
    "activations",
    "working set",
    "quantised copies",
    "loss",
    "communication buffers",
    "fragmentation",
    "dispatch buffers",
    "CUDA and NCCL",
)
"""Names of the parts, in the order in which a figure stacks them."""
OUTSIDE = ("dispatch buffers", "CUDA and NCCL")
"""Parts that PyTorch's allocator knows nothing of."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The fullest moment of one pipeline rank.

    Attributes:
        rank: pipeline rank.
        stages: numbers of the stages that it holds.
        moment: which moment of a step is the fullest.
        parts: GiB of each part then.
    """

    rank: int
    stages: tuple[int, ...]
    moment: str
    parts: Parts

    @property
    def total_gib(self) -> float:
        """Everything, GiB."""
        return sum(self.parts.values())

    @property
    def reserved_gib(self) -> float:
        """What PyTorch's allocator reserves: TorchTitan's ``memory``, GiB."""
        return self.total_gib - sum(self.parts[name] for name in OUTSIDE)

    @property
    def in_use_gib(self) -> float:
        """What is allocated at the fullest moment, GiB."""
        return self.reserved_gib - self.parts["fragmentation"]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Predicted device memory of a layout.

    Attributes:
        by_stage: one entry for each pipeline rank.
        capacity_gib: memory of the GPU; NaN where it is not known.
        buffer: what the dispatcher allocates for its communication, or None.
    """

    by_stage: tuple[StageMemory, ...]
    capacity_gib: float
    buffer: DispatchBuffer | None = None

    @cached_property
    def worst(self) -> StageMemory:
        """The pipeline rank that needs most."""
        return max(self.by_stage, key=lambda stage: stage.total_gib)

    @property
    def worst_gib(self) -> float:
        """What the worst rank needs, GiB."""
        return self.worst.total_gib

    @property
    def parts(self) -> Parts:
        """Parts of the worst rank, GiB."""
        return self.worst.parts

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits into the GPU."""
        return self.worst_gib <= self.capacity_gib

    @property
    def dominant(self) -> str:
        """The largest part of the worst rank and what to change about it."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name} {self.parts[name]:.1f} of {self.worst_gib:.1f} GiB: {_ADVICE[name]}"


_ADVICE = {
    "parameters": "raise dp_shard, ep or pp",
    "optimizer states": "raise dp_shard, ep or pp",
    "gradients": "raise dp_shard, ep or pp",
    "gathered parameters": "raise ep, tp or pp; under a pipeline they stay gathered",
    "gathered gradients": "raise ep, tp or pp; under a pipeline they accumulate in FP32",
    "activations": "use a smaller local_batch or microbatch, more activation_checkpoint, or raise tp or cp",
    "working set": "use a smaller local_batch or microbatch, or raise tp or cp",
    "quantised copies": "use a smaller local_batch or microbatch, or native kernels",
    "loss": "use a smaller local_batch or microbatch, or raise tp",
    "communication buffers": "use a smaller local_batch or microbatch, or raise dp_shard or ep",
    "fragmentation": "set PYTORCH_ALLOC_CONF=expandable_segments:True",
    "dispatch buffers": "use ep_backend=standard, a smaller local_batch or microbatch",
    "CUDA and NCCL": "use fewer process groups",
}


def estimate(
    experiment: Experiment,
    layout: Layout,
    gpu: Gpu,
    *,
    shape: ModelShape | None = None,
    constants: MemoryConstants = memory_constants,
) -> MemoryEstimate:
    """Predict the peak of device memory on every pipeline rank.

    Args:
        experiment: batch, sequence, precision, checkpointing, compilation and dispatcher are taken from it.
        layout: a legal layout of it.
        gpu: its memory is the capacity.
        shape: the model, where it is not the experiment's own.
        constants: see :class:`MemoryConstants`.

    Example:
        >>> from moelab.hardware import gpu_of
        >>> from moelab.layout import check
        >>> experiment = Experiment(model="16B", gpus_per_node=8, ep=8, seq_len=4096, activation_checkpoint="full")
        >>> estimate(experiment, check(experiment).layout, gpu_of("h100_node")).fits
        True
    """
    shape = shape or shape_for(experiment)
    work = work_of(experiment, layout, gpu, constants)
    run = step(
        shape,
        layout,
        experiment.pp_schedule,
        work=work,
        mode=Mode(
            experiment.activation_checkpoint,
            experiment.compile == "model+loss",
            experiment.compile != "none",
            experiment.precision,
            emulates(experiment, gpu),
        ),
    )
    buffer = dispatch_buffer(experiment, layout, shape, work)
    stages = tuple(_stage_memory(run, rank, buffer, constants) for rank in range(layout.pp))
    return MemoryEstimate(by_stage=stages, capacity_gib=float(gpu.memory_gib or math.nan), buffer=buffer)


def emulates(experiment: Experiment, gpu: Gpu) -> bool:
    """Whether MXFP8 is emulated: where it is asked for, and where a GPU has no MXFP8 tensor cores."""
    auto = experiment.mxfp8_kernels == "auto" and not has_native_mxfp8(gpu.capability)
    return experiment.precision is Precision.MXFP8 and (auto or experiment.mxfp8_kernels == "emulated")


def work_of(experiment: Experiment, layout: Layout, gpu: Gpu, constants: MemoryConstants) -> Work:
    """How much one rank has of a micro-batch."""
    compiled = experiment.compile == "model+loss"
    sent = experiment.dispatch_precision
    return Work(
        tokens=layout.microbatch_size * experiment.seq_len // layout.cp,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        imbalance=constants.routing_imbalance.value if experiment.routing is Routing.LEARNED else 1.0,
        scaling_bytes=FP32 if experiment.ep_backend is EPBackend.STANDARD and not compiled else BF16,
        pad_multiple=_padding(experiment, gpu),
        backend=experiment.ep_backend,
        row_bytes=BF16 if sent == "bf16" else 1 + SCALE_BYTES[sent],
    )


def _padding(experiment: Experiment, gpu: Gpu) -> int:
    if experiment.precision is Precision.MXFP8 and not emulates(experiment, gpu):
        return NATIVE_PADDING
    if experiment.precision is Precision.BF16 and experiment.ep_backend is EPBackend.DEEPEP:
        return DEEPEP_PADDING
    return PADDING[experiment.precision]


def _stage_memory(run: Step, rank: int, buffer: DispatchBuffer | None, constants: MemoryConstants) -> StageMemory:
    """The fullest moment of one pipeline rank."""
    numbers = run.layout.stages_of_rank[rank]
    modules = [stage_modules(run.layout.stages[number], run.shape.n_dense_layers) for number in numbers]
    total = [held(run.shape, run.layout.stages[number], run.degrees) for number in numbers]
    found: Parts = dict.fromkeys(PARTS, 0.0)
    moment, parts = max(run.moments(rank, modules, total), key=lambda candidate: sum(candidate[1].values()))
    found |= parts
    found["parameters"] = float(FP32 * sum(one.padded for one in total))
    found["optimizer states"] = float(2 * FP32 * sum(one.local for one in total))
    found["gradients"] = float(FP32 * sum(one.padded for one in total))
    pools = run.gather_pool(modules) + run.reduce_pool(modules)
    found["communication buffers"] = pools + _received(run, numbers)
    found["fragmentation"] = (constants.fragmentation.value - 1) * sum(found.values())
    if buffer and any(stage.moe_layers for stage in modules):
        found["dispatch buffers"] = float(buffer.size_bytes)
    found["CUDA and NCCL"] = GIB * _outside(run, constants)
    return StageMemory(
        rank=rank, stages=numbers, moment=moment, parts={name: value / GIB for name, value in found.items()}
    )


def _outside(run: Step, constants: MemoryConstants) -> float:
    sizes = (run.degrees.dp_replicate, run.degrees.fsdp, run.degrees.tp, run.degrees.ep, run.layout.pp)
    groups = sum(size > 1 for size in sizes)
    return constants.context_gib.value + groups * constants.communicator_gib.value


def _received(run: Step, numbers: tuple[int, ...]) -> float:
    """What a pipeline rank receives into: one buffer for each micro-batch and direction."""
    last = len(run.layout.stages) - 1
    directions = sum((number > 0) + (number < last) for number in numbers)
    return float(directions * run.layout.microbatches * BF16 * run.work.residual * run.shape.dim)
