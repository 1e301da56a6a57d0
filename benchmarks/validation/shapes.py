"""Thin models of the H100 and H200 arms, and a step of one on the GPUs of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moelab.experiment import Experiment, Precision
from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.model import ModelShape, shape_of
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.job import Job, job_of
from moelab.planning.time.step import step_parts_s

from .node import SCALING


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A thin model and its batch.

    Attributes:
        model: whose layers it has.
        dense: layers without experts.
        moe: layers with experts.
        experts: of a layer; of each GPU where ``per_gpu``.
        per_gpu: whether experts grow with the number of GPUs.
        local_batch: sequences of each GPU.
        seq_len: tokens of a sequence.
        activation_checkpoint: as an experiment has it.
    """

    model: str
    dense: int
    moe: int
    experts: int
    per_gpu: bool = False
    local_batch: int
    seq_len: int = 4096
    activation_checkpoint: str = "none"

    def thin(self, gpus: int) -> ModelShape:
        """The model's dimensions on ``gpus`` GPUs, all of one expert-parallel group."""
        experts = self.experts * (gpus if self.per_gpu else 1)
        return shape_of(self.model).thin(dense_layers=self.dense, moe_layers=self.moe, num_experts=experts)


SMALL = "16B"
SHAPES = {
    "671B": Shape(model="671B", dense=1, moe=2, experts=32, local_batch=2),
    "671B MoE-heavy": Shape(model="671B", dense=0, moe=5, experts=16, local_batch=2, activation_checkpoint="full"),
    SMALL: Shape(model="16B", dense=1, moe=4, experts=64, local_batch=4),
}
BIG_SHAPES = {f"671B, {layers} MoE layers": replace(SHAPES["671B MoE-heavy"], moe=layers) for layers in (3, 10)}
"""For GPUs of 140 GB: as many layers as one of them holds with all the experts, and twice the depth for two."""
_DEEP = replace(SHAPES["671B MoE-heavy"], experts=8, per_gpu=True)
DEEPEST = {"h100_node": f"{SCALING}, 8 MoE layers", "h200_node": f"{SCALING}, 18 MoE layers"}
"""As many MoE layers as fit on eight GPUs of 80 and of 141 GB with every arm, by ``full_node.layers_that_fit``."""
NODE_SHAPES = {
    SCALING: _DEEP,
    DEEPEST["h100_node"]: replace(_DEEP, moe=8),
    DEEPEST["h200_node"]: replace(_DEEP, moe=18),
}
"""Shapes whose experts grow with the number of GPUs; the first has as many MoE layers as fit on two GPUs of 80 GB, so
that it can be compared at every degree."""
ALL_SHAPES = SHAPES | BIG_SHAPES | NODE_SHAPES


def arm_of(name: str) -> dict[str, str]:
    """Fields of an experiment from the name of an arm of ``h100_two_by_two.json``.

    Example:
        >>> arm_of("bf16_deepep_full+dispatch")
        {'precision': 'bf16', 'ep_backend': 'deepep', 'activation_checkpoint': 'full+dispatch'}
        >>> arm_of("bf16_standard_flex_tiles")
        {'precision': 'bf16', 'ep_backend': 'standard', 'attention_backend': 'flex_tiles'}
    """
    precision, backend, *more = name.replace("flex_", "flex-").split("_")
    fields = {"precision": precision.split("-")[0], "ep_backend": backend}
    for one in more:
        if one.startswith("dispatch-"):
            fields["dispatch_precision"] = one.removeprefix("dispatch-")
        elif one.startswith("wgrad-"):
            fields["wgrad"] = one.removeprefix("wgrad-")
        elif one.startswith("flex-"):
            fields["attention_backend"] = one.replace("-", "_")
        elif one == "linears":
            fields["quantize"] = "experts+linears"
        else:
            fields["activation_checkpoint"] = one
    if fields["precision"] == "mxfp8" and "dispatch_precision" in fields:
        fields["wgrad"] = "bf16"
    return fields


def thin_experiment(shape: Shape, arm: Mapping[str, Any], *, gpus: int = 2, hardware: str = "h100_node") -> Experiment:
    """The experiment of a thin model on ``gpus`` GPUs of one node; :meth:`Shape.thin` thins the model itself."""
    fields = {"compile": "model+loss", "activation_checkpoint": shape.activation_checkpoint, **arm}
    sizes = {"gpus_per_node": gpus, "ep": gpus, "seq_len": shape.seq_len, "local_batch": shape.local_batch}
    return Experiment(model=shape.model, hardware=hardware, **sizes, **fields)


def thin_job(shape: Shape, arm: Mapping[str, Any], *, gpus: int = 2, hardware: str = "h100_node") -> Job:
    """A step of a thin model on ``gpus`` GPUs of one node."""
    experiment = thin_experiment(shape, arm, gpus=gpus, hardware=hardware)
    layout = check(experiment).layout
    assert layout is not None, "one node and no pipeline"
    return job_of(experiment, layout, cluster_of(hardware).node, shape=shape.thin(gpus))


def tps_of(job: Job, calibration: Calibration) -> float:
    """Tokens per second per GPU."""
    return job.tokens_per_gpu / sum(step_parts_s(job, calibration).values())


def as_in_november(job: Job) -> Job:
    """The step of an FP8 arm as moelab ran it before its own FP8 experts (28 November 2026, 23:00).

    TorchTitan 0.3.0 drops torchao's wrapper of a weight where ep > 1, so experts multiplied in BF16: all of them, but
    for gate and up on rows that DeepEP had sent in FP8. The trace of such a step has 30 grouped products in FP8 and 25
    in BF16 (``trace_two_h200_full_fp8_deepep.json.gz``, five layers: ``forward``, ``recompute`` and ``dgrad`` of gate
    and up; of down two of these and every ``wgrad``).
    """
    if job.precision is not Precision.FP8:
        return job
    work = replace(job.work, one_pass_experts=False, scaled_products=False)
    if not work.quantised_dispatch:
        return replace(job, precision=Precision.BF16, work=work)
    return replace(job, work=work, stack=replace(job.stack, low_down=False))
