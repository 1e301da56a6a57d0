"""One step of training as the model of its time sees it: sizes, degrees, stages and software, nothing to resolve.

Seconds are entered in a table of passes by parts. What software does with a layer is a :class:`Stack`; TorchTitan's is
read from an experiment, others are those of ``benchmarks/validation``.

Sources: ``torchtitan`` 0.3.0, ``models/common/decoder.py`` (FlexAttention with a causal mask of packed documents),
``components/loss.py`` (eight chunks, each of which adds to the FP32 gradient of the head), ``distributed/fsdp.py``
(parameters stay gathered from one micro-batch to the next under a pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moelab.errors import Refused
from moelab.experiment import NUMBERS_ONLY, EPBackend, Experiment, Precision, Routing
from moelab.hardware import Node
from moelab.layout import Layout
from moelab.layout.mesh import nvlink_ranks
from moelab.layout.schedule import split_layers
from moelab.layout.sharding import Degrees, StageModules, degrees_of, stage_modules
from moelab.model import ModelShape, shape_for
from moelab.planning.memory.activations import Work, keeps_arrived
from moelab.planning.memory.peak import MemoryConstants, emulates, memory_constants, work_of
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, expected_destinations, routing_of_load
from moelab.planning.time.traffic import Method, OnWires, expected_rows

C4_KEYS = 427.0
"""Keys that a token of C4 meets where documents are kept apart: their mean length, as if lengths were exponentially
distributed; 156 G tokens in 365 M documents (Dodge et al. 2021, arXiv 2104.08758, table 1)."""
CORPUS_KEYS = 325.0
"""The same of moelab's own corpus: half of a passage of 2,000 characters, about three of them to a token."""


class Permutation(NamedTuple):
    """What brings rows into the experts' order and back."""

    copies: tuple[float, float, float, float]
    """Times that all rows are read and written: in dispatch, combine, combine's gradient and dispatch's gradient."""
    launches: int  # kernels of dispatch and combine


STANDARD = Permutation((2.48, 11.8, 8.2, 5.4), 40)
"""TorchTitan's, not compiled (``all_to_all_h100.json``)."""
STANDARD_COMPILED = Permutation((1.5, 3.0, 4.0, 3.3), 40)
"""The same, compiled (kernels of ``h100_standard_step.json``)."""
EXPANDED = Permutation((0.5, 0.7, 0.5, 0.8), 15)
"""moelab's over DeepEP, which writes rows in order (``all_to_all_h100.json``)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A training stack; the defaults are TorchTitan's, compiled."""

    name: str
    document_keys: float | None = None
    """Keys that a token meets where packed documents are kept apart; None where they are not."""
    flex_tiles: bool = False  # whether FlexAttention has tiles that were chosen for Hopper
    fused_attention: float | None = None  # rate of another attention, of the datasheet's; None is FlexAttention
    compiled: bool = True  # whether elementwise work between products is fused
    expert_gemm: Literal["torch", "library", "streams"] = "torch"
    """torch's or torchao's grouped kernels, or those of a ``library``, which casts an operand once for both axes: all
    experts in one launch, or each in one of a few ``streams``."""
    low_down: bool = True  # whether the experts' down-projection multiplies in their precision as gate and up do
    low_linears: bool = False  # whether attention, dense FFN and shared experts multiply in the experts' precision
    permutation: Permutation = STANDARD_COMPILED
    loss_chunks: int = 8  # pieces in which the head's gradient is added up; 1 for a fused loss
    exchange_overlapped: bool = False  # whether the all-to-all runs beside compute
    launch_s: float | None = None  # host time of a launch; None is PyTorch's, 0 under CUDA graphs
    distributed_optimizer: bool = False  # whether parameters are whole on every rank, as Megatron's are; else FSDP2


def titan(experiment: Experiment) -> Stack:
    """TorchTitan 0.3.0 with moelab's dispatchers, as an experiment sets it up."""
    compiled = experiment.compile == "model+loss"
    deepep = experiment.ep_backend is not EPBackend.STANDARD
    return Stack(
        name="TorchTitan",
        document_keys=C4_KEYS if experiment.dataset == "c4" else CORPUS_KEYS,
        flex_tiles=experiment.attention_backend != "flex",  # what others reach was never measured here
        compiled=compiled,
        low_linears=experiment.quantize == "experts+linears",
        permutation=EXPANDED if deepep else STANDARD_COMPILED if compiled else STANDARD,
    )


PART_SPREAD = {
    "attention": 0.25,
    "expert GEMMs": 0.15,
    "other GEMMs": 0.15,
    "quantisation": 0.20,
    "permutation and padding": 0.35,
    "all-to-all": 0.32,
    "memory-bound": 0.20,
    "tensor-parallel collectives": 0.20,
    "context-parallel collectives": 0.50,
    "FSDP collectives": 0.30,
    "optimizer": 0.10,
    "host and waiting": 0.40,
    "pipeline bubble": 0.20,
    "imbalance and stragglers": 0.50,
}
"""Parts of a step, in the order in which a figure stacks them, with the standard deviation of each, relative to it.

Judged by the validation table's rows of that kind, and by guess where no row is of that kind alone (attention,
stragglers). A test holds whole steps against the interval that follows."""
CATEGORIES = tuple(PART_SPREAD)
INDEX = {name: place for place, name in enumerate(CATEGORIES)}
PassName = Literal["forward", "recompute", "dgrad", "wgrad"]
PASSES: tuple[PassName, ...] = ("forward", "recompute", "dgrad", "wgrad")
PASS_INDEX = {name: place for place, name in enumerate(PASSES)}
Times = npt.NDArray[np.float64]
"""Seconds, ``(passes, categories)``."""


def nothing() -> Times:
    """A table of zeros."""
    return np.zeros((len(PASSES), len(CATEGORIES)))


def add(times: Times, pass_name: PassName, category: str, seconds: float) -> None:
    """Add to one cell."""
    times[PASS_INDEX[pass_name], INDEX[category]] += seconds


def add_both_ways(times: Times, category: str, forward: float, backward: float, *, again: bool) -> None:
    """Add a forward and a backward pass, and the forward pass ``again`` where the backward pass repeats it."""
    add(times, "forward", category, forward)
    add(times, "dgrad", category, backward)
    if again:
        add(times, "recompute", category, forward)


MODEL_OF_ROUTING = {
    Routing.ROUND_ROBIN: RoutingModel(kind="round_robin"),
    Routing.RANDOM_BALANCED: RoutingModel(kind="random_balanced"),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step."""

    shape: ModelShape
    node: Node  # GPUs that NVLink joins, be they of one host or of several, and network
    stack: Stack
    work: Work  # what one rank has of a micro-batch
    seq_len: int  # tokens of a sequence
    microbatches: int
    schedule: str
    stages: tuple[StageModules, ...]  # modules of each stage
    stages_of_rank: tuple[tuple[int, ...], ...]
    degrees: Degrees  # that shard parameters
    precision: Precision
    bf16_wgrad: bool = False  # whether the experts' weight gradients are BF16 all the same
    emulated: bool = False  # whether MXFP8 is emulated
    dispatch: str = "bf16"  # format of tokens on their way to their experts
    routing: RoutingModel  # how tokens choose experts
    checkpointing: str = "none"  # activation checkpointing, one of :data:`moelab.planning.time.gemm.RECOMPUTED`

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
        # cp ranks have a share of each sequence, tp and pp ranks work on the same one
        return self.work.tokens * self.work.cp * self.microbatches * self.dp / self.gpus

    @cached_property
    def placement(self) -> ExpertPlacement:
        """Where the experts are."""
        return ExpertPlacement(
            experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            ep=self.work.ep,
            ranks_per_node=min(self.work.ep, self.node.gpus),  # a group smaller than a node lies in one
        )

    @cached_property
    def rows_sent(self) -> OnWires:
        """Rows that a rank sends for each of its tokens in one exchange, by wire."""
        method: Method = "standard" if self.work.backend is EPBackend.STANDARD else "deepep_hybrid"
        return expected_rows(expected_destinations(self.routing, self.placement), self.placement, method)

    @property
    def keys(self) -> float:
        """Keys that a query meets on average, of its own document and before it."""
        documents = self.stack.document_keys
        return self.seq_len / 2 if documents is None else min(self.seq_len / 2, documents)

    @property
    def recomputes_attention(self) -> bool:
        """Whether the backward pass runs attention again too."""
        return self.checkpointing in ("full", "full+dispatch")

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward pass runs layers again, experts and dispatch among them."""
        return self.checkpointing in ("selective", "full", "full+dispatch")

    @property
    def keeps_products(self) -> bool:
        """Whether the experts' products are kept and not computed again in the backward pass."""
        return self.work.scaled_products and self.checkpointing == "selective"

    @property
    def waits_for_counts(self) -> bool:
        """Whether the host waits at each dispatch until it knows how many rows come."""
        return self.work.ep > 1 and self.stack.launch_s != 0

    @property
    def keeps_exchange(self) -> bool:
        """Whether what came over the network is kept and not sent again in the backward pass."""
        compiled = self.stack.compiled
        return keeps_arrived(self.work, compiled=compiled, checkpointing=self.checkpointing)  # type: ignore[arg-type]


def job_of(
    experiment: Experiment,
    layout: Layout,
    node: Node,
    *,
    shape: ModelShape | None = None,
    stack: Stack | None = None,
    constants: MemoryConstants = memory_constants,
) -> Job:
    """A job of an experiment whose layout is legal.

    Raises:
        Refused: for NVFP4, of whose speed nothing is known here.
    """
    if experiment.precision is Precision.NVFP4:
        raise Refused(f"precision is nvfp4: {NUMBERS_ONLY}. Legal precision of a projection: bf16, fp8, mxfp8")
    shape = shape or shape_for(experiment)
    # The layout's own stages have the experiment's layers, not a thin model's.
    stages = split_layers(shape.n_layers, len(layout.stages))
    return Job(
        shape=shape,
        node=replace(
            node,
            gpus=nvlink_ranks(experiment, node=node),
            nvlink_gpus=None,  # from here on a node is what NVLink joins, be it of one host or of a rack
        ),
        stack=stack or titan(experiment),
        work=work_of(experiment, layout, node.gpu, constants),
        seq_len=experiment.seq_len,
        microbatches=layout.microbatches,
        schedule=experiment.pp_schedule,
        stages=tuple(stage_modules(stage, shape.n_dense_layers) for stage in stages),
        stages_of_rank=layout.stages_of_rank,
        degrees=degrees_of(layout),
        precision=experiment.precision,
        bf16_wgrad=experiment.wgrad != experiment.precision.value,
        emulated=emulates(experiment, node.gpu),
        dispatch=experiment.dispatch_precision,
        routing=_routing(experiment, shape, constants),
        checkpointing=experiment.activation_checkpoint,
    )


def _routing(experiment: Experiment, shape: ModelShape, constants: MemoryConstants) -> RoutingModel:
    """The router's own choice is as it was measured, else uniform; in its groups where the model has groups."""
    if experiment.routing in MODEL_OF_ROUTING:
        return MODEL_OF_ROUTING[experiment.routing]
    # a thin model's experts may not fill the groups of the model that it is made of: then nothing limits its router
    grouped = shape.expert_groups > 1 and shape.num_experts % shape.expert_groups == 0
    groups, limited = (shape.expert_groups, shape.limited_groups) if grouped else (1, 1)
    if constants.expert_shares:
        return routing_of_load(constants.expert_shares, top_k=shape.top_k, groups=groups, limited_groups=limited)
    return RoutingModel(kind="group_limited" if grouped else "uniform", groups=groups, limited_groups=limited)
