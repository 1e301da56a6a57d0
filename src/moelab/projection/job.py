"""One step of training as the model of its time sees it: sizes, degrees, stages and software, nothing to resolve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.hardware import Node
from moelab.layout import Layout
from moelab.layout.schedule import split_layers
from moelab.memory.activations import Work, keeps_arrived
from moelab.memory.peak import emulates, memory_constants, work_of
from moelab.memory.sharding import Degrees, StageModules, degrees_of, stage_modules
from moelab.model import ModelShape, shape_for
from moelab.projection.destinations import expected_destinations
from moelab.projection.placement import ExpertPlacement
from moelab.projection.routing_model import RoutingModel
from moelab.projection.stack import Stack, titan
from moelab.projection.traffic import expected_rows
from moelab.projection.wires import Method, OnWires

ROUTINGS = {
    Routing.ROUND_ROBIN: RoutingModel(kind="round_robin"),
    Routing.RANDOM_BALANCED: RoutingModel(kind="random_balanced"),
}

METHODS: dict[EPBackend, Method] = {
    EPBackend.STANDARD: "standard",
    EPBackend.DEEPEP: "deepep_hybrid",
    EPBackend.HYBRIDEP: "deepep_hybrid",
    EPBackend.MINIMAL_ASYNC_EP: "deepep_direct",
}
"""How each dispatcher sends tokens."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step.

    Attributes:
        shape: the model.
        node: GPUs, NVLink and network.
        stack: the software.
        work: what one rank has of a micro-batch.
        seq_len: tokens of a sequence.
        microbatches: of a step on each rank.
        schedule: of the pipeline.
        stages: modules of each stage.
        stages_of_rank: stages of each pipeline rank.
        degrees: that shard parameters.
        precision: of the experts.
        bf16_wgrad: whether the experts' weight gradients are BF16 all the same; those of the first two products are
            wherever tokens arrive quantised.
        emulated: whether MXFP8 is emulated.
        dispatch: format of tokens on their way to their experts.
        routing: how tokens choose experts.
        checkpointing: activation checkpointing, one of the experiment's or ``mla+mlp`` (Megatron's).
    """

    shape: ModelShape
    node: Node
    stack: Stack
    work: Work
    seq_len: int
    microbatches: int
    schedule: str
    stages: tuple[StageModules, ...]
    stages_of_rank: tuple[tuple[int, ...], ...]
    degrees: Degrees
    precision: Precision
    bf16_wgrad: bool = False
    emulated: bool = False
    dispatch: str = "bf16"
    routing: RoutingModel
    checkpointing: str = "none"

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.stages_of_rank)

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.degrees.dp_replicate * self.degrees.fsdp // self.work.cp

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.work.cp * self.work.tp

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of a step for each GPU."""
        return self.work.tokens * self.work.cp * self.microbatches * self.dp / self.gpus

    @cached_property
    def placement(self) -> ExpertPlacement:
        """Where the experts are."""
        return ExpertPlacement(
            experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            ep=self.work.ep,
            ranks_per_node=min(self.work.ep, self.node.gpus),
        )

    @cached_property
    def rows_sent(self) -> OnWires:
        """Rows that a rank sends for each of its tokens in one exchange, by wire."""
        destinations = expected_destinations(self.routing, self.placement)
        return expected_rows(destinations, self.placement, METHODS[self.work.backend])

    @property
    def keeps_exchange(self) -> bool:
        """Whether what came over the network is kept and not sent again in the backward pass."""
        compiled = self.stack.fused
        return keeps_arrived(self.work, compiled=compiled, checkpointing=self.checkpointing)  # type: ignore[arg-type]


def job_of(
    experiment: Experiment, layout: Layout, node: Node, *, shape: ModelShape | None = None, stack: Stack | None = None
) -> Job:
    """A job of an experiment whose layout is legal."""
    shape = shape or shape_for(experiment)
    stages = split_layers(shape.n_layers, len(layout.stages))
    return Job(
        shape=shape,
        node=replace(node, gpus=experiment.gpus_per_node),
        stack=stack or titan(experiment),
        work=work_of(experiment, layout, node.gpu, memory_constants),
        seq_len=experiment.seq_len,
        microbatches=layout.microbatches,
        schedule=experiment.pp_schedule,
        stages=tuple(stage_modules(stage, shape.n_dense_layers) for stage in stages),
        stages_of_rank=layout.stages_of_rank,
        degrees=degrees_of(layout),
        precision=experiment.precision,
        bf16_wgrad=experiment.wgrad == "bf16" and experiment.precision is Precision.MXFP8,
        emulated=emulates(experiment, node.gpu),
        dispatch=experiment.dispatch_precision,
        routing=_routing(experiment, shape),
        checkpointing=experiment.activation_checkpoint,
    )


def _routing(experiment: Experiment, shape: ModelShape) -> RoutingModel:
    """The router's own choice is taken to be uniform, in its groups where the model has groups."""
    if experiment.routing in ROUTINGS:
        return ROUTINGS[experiment.routing]
    if shape.expert_groups > 1 and shape.num_experts % shape.expert_groups == 0:
        return RoutingModel(kind="group_limited", groups=shape.expert_groups, limited_groups=shape.limited_groups)
    return RoutingModel(kind="uniform")
