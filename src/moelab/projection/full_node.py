"""What is expected of one node of eight GPUs, written down before anyone measured it.

``benchmarks/h100_full_node.py`` trains thin models with expert parallelism over two, four and eight GPUs of a node.
With eight experts on each GPU, whatever the number of GPUs, the work of a GPU stays the same and only the exchange
grows. The predictions of those steps (:mod:`moelab.projection.full_node_predictions`) are a file with its date and
commit; what is measured later is held against the file, not against what the model says by then
(:mod:`moelab.projection.full_node_measured`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from moelab.experiment import Experiment
from moelab.hardware import cluster_of
from moelab.layout import Layout, check
from moelab.layout.schedule import split_layers
from moelab.memory import estimate
from moelab.model import ModelShape, shape_of
from moelab.projection.job import Job, job_of
from moelab.projection.step_cases import arm_of

EP_DEGREES = (2, 4, 8)
HARDWARE = ("h100_node", "h200_node")
ROUTINGS = ("round_robin", "random_balanced")
STOCK = "bf16_standard"
ARMS = (STOCK, "bf16_deepep", "fp8_standard", "fp8_deepep", "fp8_deepep_dispatch-fp8", "mxfp8-emulated_deepep")
PREDICTED = "h100_full_node_predicted"
MEMORY_MARGIN = 0.06
"""Memory that is left free: the worst error of the memory model on H100."""


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """A thin model for one node.

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

    model: Literal["16B", "671B"]
    dense: int
    moe: int
    experts: int
    per_gpu: bool = False
    local_batch: int
    seq_len: int = 4096
    activation_checkpoint: Literal["none", "full"] = "none"

    def thin(self, ep: int) -> ModelShape:
        """The model's dimensions on ``ep`` GPUs."""
        experts = self.experts * (ep if self.per_gpu else 1)
        return shape_of(self.model).thin(dense_layers=self.dense, moe_layers=self.moe, num_experts=experts)


SCALING, SMALL = "671B, 8 experts a GPU", "16B"
_DEEP = NodeShape(
    model="671B", dense=0, moe=5, experts=8, per_gpu=True, local_batch=2, activation_checkpoint="full"
)  # fmt: skip
DEEPEST = {"h100_node": f"{SCALING}, 8 MoE layers", "h200_node": f"{SCALING}, 18 MoE layers"}
"""As many MoE layers as fit on eight GPUs of 80 and of 141 GB with every arm, by :func:`layers_that_fit`."""
NODE_SHAPES = {
    SCALING: _DEEP,
    SMALL: NodeShape(model="16B", dense=1, moe=4, experts=64, local_batch=4),
    DEEPEST["h100_node"]: replace(_DEEP, moe=8),
    DEEPEST["h200_node"]: replace(_DEEP, moe=18),
}
"""The first has as many MoE layers as fit on two GPUs of 80 GB, so that it can be compared at every degree."""


def node_experiment(shape: NodeShape, arm: str, routing: str, *, ep: int, hardware: str) -> Experiment:
    """The experiment whose step is predicted; its model is thinned by :meth:`NodeShape.thin`."""
    fields: dict[str, Any] = {"activation_checkpoint": shape.activation_checkpoint, **arm_of(arm)}
    return Experiment(
        model=shape.model,
        hardware=hardware,
        gpus_per_node=ep,
        ep=ep,
        seq_len=shape.seq_len,
        local_batch=shape.local_batch,
        compile="model+loss",
        routing=routing,
        **fields,
    )


def node_job(shape: NodeShape, arm: str, routing: str, *, ep: int, hardware: str) -> Job:
    """A step of a thin model on ``ep`` GPUs of one node."""
    experiment = node_experiment(shape, arm, routing, ep=ep, hardware=hardware)
    return job_of(experiment, _layout(experiment), cluster_of(hardware).node, shape=shape.thin(ep))


def layers_that_fit(shape: NodeShape, *, ep: int, hardware: str) -> int:
    """Most MoE layers with which every arm leaves :data:`MEMORY_MARGIN` of the GPU free, by the memory model."""
    moe = 0
    while all(_share_of_memory(replace(shape, moe=moe + 1), arm, ep, hardware) <= 1 for arm in ARMS):
        moe += 1
    return moe


def _share_of_memory(shape: NodeShape, arm: str, ep: int, hardware: str) -> float:
    experiment = node_experiment(shape, arm, ROUTINGS[0], ep=ep, hardware=hardware)
    layout, thin = _layout(experiment), shape.thin(ep)
    layout = replace(layout, stages=split_layers(thin.n_layers, 1))
    found = estimate(experiment, layout, cluster_of(hardware).node.gpu, shape=thin)
    return found.worst_gib * (1 + MEMORY_MARGIN) / found.capacity_gib


def _layout(experiment: Experiment) -> Layout:
    layout = check(experiment).layout
    assert layout is not None, "one node and no pipeline"
    return layout


def load_predicted() -> dict[str, Any]:
    """The predictions that come with the package."""
    file = resources.files("moelab") / "data" / "measured" / f"{PREDICTED}.json"
    content: dict[str, Any] = json.loads(file.read_text())
    return content
