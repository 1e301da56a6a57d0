"""The most that each pipeline rank holds at a time, by part.

A training step has a few moments that can be its fullest, and which of them is depends on the layout: the last layer's
forward pass, the loss, the backward pass of a layer (its recomputation under activation checkpointing included), the
end of the backward pass when every gradient is there. :func:`estimate` adds up each of them and keeps the largest.

PyTorch's allocator keeps a pool for each CUDA stream and lends no pool's free memory to another stream. FSDP2 gathers
parameters on one stream and reduces gradients on a second, so what these two ever need stays theirs: gradients occupy
their memory during the whole step, and a moment is what the main stream needs beside them.

The buffer of a dispatcher is allocated once, outside of PyTorch's allocator, for the most tokens that a rank dispatches
at a time: those of one micro-batch under pipeline parallelism, of the local batch without. DeepEP's is exact: the
arithmetic of ``csrc/elastic/buffer.hpp`` (``get_dispatch_buffer_size``, ``get_combine_buffer_size``) and
``deep_ep/include/deep_ep/common/layout.cuh`` at 2.1.0. A token lies in it with its features, its experts' numbers and
weights, and on its way there where it came from. Ranks that share NVLink are one *scale-up* domain; between domains
(*scale-out*) tokens pass through buffers of their own. Dispatch and combine take turns with one buffer, so the larger
of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.hardware import GROUP_PADDING, Gpu, SourcedNumber
from moelab.layout import Layout
from moelab.layout.mesh import nvlink_ranks
from moelab.layout.rules import LOSS_CHUNKS, native_mxfp8
from moelab.layout.schedule import in_flight
from moelab.layout.sharding import NOTHING, Degrees, Held, StageModules, degrees_of, held, module_held, stage_modules
from moelab.model import EMBEDDING, HEAD, ModelShape, shape_for
from moelab.planning.memory.activations import BF16, FP32, LayerCosts, Mode, Work, layer_costs

GIB = 2**30
SCALE_BYTES = {"bf16": 0.0, "mxfp8": 1 / 32, "fp8": 0.0}
"""Of each feature of a quantised row: one byte for a block of 32; one number for a whole row is nothing."""
ADVICE = {
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
"""What to change about each part."""
PARTS = tuple(ADVICE)
"""Names of the parts, in the order in which a figure stacks them."""
OUTSIDE = ("dispatch buffers", "CUDA and NCCL")
"""Parts that PyTorch's allocator knows nothing of."""
LOSS_BYTES = {"eager": 3 * FP32 + BF16, "compiled": FP32 + 2 * BF16}
"""Bytes for each logit of a chunk: the BF16 logits with log-softmax, its gradient and theirs in FP32; compiled, the
logits, a row of intermediate FP32 and the gradient of the logits."""
Parts = dict[str, float]
Moment = tuple[str, Parts]
TOKEN_ALIGNMENT = 32
"""Bytes to a multiple of which each field of a token is padded (``ptx::kNumTMAAlignBytes``)."""
BUFFER_ALIGNMENT = 2 * 2**20
"""Bytes to a multiple of which the buffer is padded (``symmetric::kNumAlignmentBytes``)."""
CHANNELS = 8 * 160
"""Tokens of slack of each scale-out buffer (``ElasticBuffer::kNumMaxChannels``)."""
WORKSPACE_BYTES = 7 * BUFFER_ALIGNMENT
"""Counters and signals, the same for every model (``layout::WorkspaceLayout``: 12,820,528 bytes, padded)."""
EARLY_ROUTING = (
    "fitted: pytorch/torchtitan PR 3639, 16B on 8 H100, EP 4, the router's own choice from the first step, 68.8 GiB; "
    "that of PR 3934, the debug model at EP 2 on B200, is then 5 % low"
)
H100_ROWS = "benchmarks/results/memory_h100.json, 2 x H100, November 2026"


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Numbers of the memory model that are no arithmetic on the model's dimensions; replace one to see what it does."""

    routing_imbalance: SourcedNumber
    """Received rows of the busiest rank over all layers, relative to perfect balance, where the router decides; a
    run's own, if it was measured (:func:`~moelab.planning.memory.measured.measured_constants`)."""
    busiest_layer: SourcedNumber  # the same of its busiest layer
    expert_shares: tuple[float, ...] = ()
    """Of a middling layer's rows, that each expert got; empty where no load was measured."""
    fragmentation: SourcedNumber  # reserved memory relative to what the pools of the allocator are known to need
    context_gib: SourcedNumber  # CUDA context, kernels and libraries, outside PyTorch's allocator, GiB
    communicator_gib: SourcedNumber  # NCCL's buffers for each process group of more than one GPU, GiB


memory_constants = MemoryConstants(
    routing_imbalance=SourcedNumber(value=1.1, label="derived", source="assumed; over many layers, busy ones even out"),
    busiest_layer=SourcedNumber(value=1.9, label="derived", source=EARLY_ROUTING),
    fragmentation=SourcedNumber(value=1.01, label="measured", source=f"{H100_ROWS}, row '16B none'"),
    context_gib=SourcedNumber(
        value=2.16, label="measured", source=f"{H100_ROWS}, the most: '1 GPU full'; the least is 1.23"
    ),
    communicator_gib=SourcedNumber(
        value=0.35, label="measured", source=f"{H100_ROWS}, row '16B selective', two groups"
    ),
)


@dataclass(frozen=True, kw_only=True)
class DispatchBuffer:
    """What DeepEP allocates on each rank: its own arithmetic."""

    size_bytes: int  # of everything that it allocates
    tokens: int  # that a rank dispatches at a time
    ranks: int
    nvlink_ranks: int  # those of them that NVLink joins

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        rest = {name: getattr(self, name) for name in ("tokens", "ranks", "nvlink_ranks")}
        return {"dispatcher": EPBackend.DEEPEP.value, "bytes": self.size_bytes, **rest}


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The fullest moment of one pipeline rank."""

    rank: int
    stages: tuple[int, ...]
    moment: str
    parts: Parts  # GiB of each part then

    @property
    def total_gib(self) -> float:
        """Everything, GiB."""
        return sum(self.parts.values())

    @property
    def reserved_gib(self) -> float:
        """What PyTorch's allocator reserves: TorchTitan's ``memory``, GiB."""
        return self.total_gib - self.outside_gib

    @property
    def outside_gib(self) -> float:
        """What CUDA, NCCL and the dispatcher take besides, GiB: `nvidia-smi` shows it, TorchTitan does not."""
        return sum(self.parts[name] for name in OUTSIDE)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Predicted device memory of a layout."""

    by_stage: tuple[StageMemory, ...]  # one entry for each pipeline rank
    capacity_gib: float  # memory of the GPU; NaN where it is not known
    buffer: DispatchBuffer | None = None  # what the dispatcher allocates for its communication, or None

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
    def headroom_gib(self) -> float:
        """What the worst rank leaves of the GPU, GiB; negative if it does not fit, NaN where the GPU is not known."""
        return self.capacity_gib - self.worst_gib

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits into the GPU."""
        return self.worst_gib <= self.capacity_gib

    @property
    def dominant(self) -> str:
        """The largest part of the worst rank and what to change about it."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name} {self.parts[name]:.1f} of {self.worst_gib:.1f} GiB: {ADVICE[name]}"


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
    """
    shape = shape or shape_for(experiment)
    work = work_of(experiment, layout, gpu, constants)
    degrees = degrees_of(layout)
    mode = Mode(
        experiment.activation_checkpoint,
        experiment.compile == "model+loss",
        experiment.compile != "none",
        experiment.precision,
        emulates(experiment, gpu),
        experiment.quantize != "experts" and experiment.precision is not Precision.BF16,
        # a rank gets no more than all rows of its group
        min(constants.busiest_layer.value, layout.ep) if experiment.routing is Routing.LEARNED else 1.0,
    )
    run = Moments(
        shape=shape,
        layout=layout,
        schedule=experiment.pp_schedule,
        degrees=degrees,
        work=work,
        mode=mode,
        dense=layer_costs(shape, moe=False, degrees=degrees, work=work, mode=mode),
        moe=layer_costs(shape, moe=True, degrees=degrees, work=work, mode=mode),
        embedding=module_held(shape, EMBEDDING, degrees),
        head=module_held(shape, HEAD, degrees),
        buffer=dispatch_buffer(experiment, layout, shape, work),
    )
    # Ranks between the first and the last hold the same modules: what follows from these alone is found once.
    weights: dict[tuple[StageModules, ...], RankWeights] = {}
    by_stage = []
    for rank, numbers in enumerate(layout.stages_of_rank):
        modules = tuple(stage_modules(layout.stages[number], shape.n_dense_layers) for number in numbers)
        if modules not in weights:
            weights[modules] = run.weights(modules)
        by_stage.append(run.of_rank(rank, modules, weights[modules], constants))
    return MemoryEstimate(by_stage=tuple(by_stage), capacity_gib=float(gpu.memory_gib or math.nan), buffer=run.buffer)


def emulates(experiment: Experiment, gpu: Gpu) -> bool:
    """Whether products are emulated: NVFP4's always, MXFP8's where asked for or where a GPU has none of its own."""
    mxfp8 = experiment.precision is Precision.MXFP8 and not native_mxfp8(experiment, gpu.capability)
    return mxfp8 or experiment.precision is Precision.NVFP4


def work_of(experiment: Experiment, layout: Layout, gpu: Gpu, constants: MemoryConstants) -> Work:
    """How much one rank has of a micro-batch."""
    compiled = experiment.compile == "model+loss"
    sent, precision = experiment.dispatch_precision, experiment.precision
    padded: str = precision.value
    if precision is Precision.MXFP8:
        padded = "mxfp8_emulated" if emulates(experiment, gpu) else "mxfp8_native"
    elif precision is Precision.BF16 and experiment.ep_backend is not EPBackend.DEEPEP:
        padded = ""  # TorchTitan's own dispatcher does not pad for BF16 experts
    return Work(
        tokens=layout.microbatch_size * experiment.seq_len // layout.cp,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        imbalance=constants.routing_imbalance.value if experiment.routing is Routing.LEARNED else 1.0,
        scaling_bytes=FP32 if experiment.ep_backend is EPBackend.STANDARD and not compiled else BF16,
        pad_multiple=GROUP_PADDING[padded] if padded else 1,
        backend=experiment.ep_backend,
        row_bytes=BF16 if sent == "bf16" else 1 + SCALE_BYTES[sent],
        # torchao's MXFP8 experts are three products; moelab's, which take rows of DeepEP in 8 bits, are one. With
        # native kernels they take BF16 rows too, which is counted as torchao's until a B200 was measured: more is kept.
        one_pass_experts=precision is Precision.FP8 or (sent != "bf16" and experiment.ep_backend is EPBackend.DEEPEP),
        scaled_products=precision is not Precision.BF16 and not emulates(experiment, gpu),
    )


class RankWeights(NamedTuple):
    """Elements of a pipeline rank's parameters as in :class:`Held`, and bytes of the pools of FSDP2's two streams.

    Of the ranks that share a shard the first is meant, which holds the most: its part has no padding.
    """

    local: int
    gathered: int
    pools: float


@dataclass(frozen=True)
class Moments:
    """The moments of a step on the main stream, from what all pipeline ranks share."""

    shape: ModelShape
    layout: Layout
    schedule: str
    degrees: Degrees
    work: Work
    mode: Mode
    dense: LayerCosts
    moe: LayerCosts
    embedding: Held
    head: Held
    buffer: DispatchBuffer | None

    def of_rank(
        self, rank: int, modules: tuple[StageModules, ...], weights: RankWeights, constants: MemoryConstants
    ) -> StageMemory:
        """The fullest moment of one pipeline rank."""
        numbers, last = self.layout.stages_of_rank[rank], len(self.layout.stages) - 1
        sizes: Parts = dict.fromkeys(PARTS, 0.0)
        moments = self.pipeline(rank, modules, weights) if self.layout.pp > 1 else self.single(modules[0])
        moment, parts = max(moments, key=lambda candidate: sum(candidate[1].values()))
        sizes |= parts
        # Master weights, AdamW's two moments and gradients are in FP32; what is gathered is in BF16.
        sizes["parameters"] = float(FP32 * weights.local)
        sizes["optimizer states"] = float(2 * FP32 * weights.local)
        sizes["gradients"] = float(FP32 * weights.local)
        # A pipeline rank receives into one buffer for each micro-batch and direction.
        directions = sum((number > 0) + (number < last) for number in numbers)
        received = float(directions * self.layout.microbatches * BF16 * self.work.residual * self.shape.dim)
        sizes["communication buffers"] = weights.pools + received
        # Of what the allocator has; what follows lies outside of it.
        sizes["fragmentation"] = (constants.fragmentation.value - 1) * sum(sizes.values())
        if self.buffer and any(stage.moe_layers for stage in modules):
            sizes["dispatch buffers"] = float(self.buffer.size_bytes)
        degrees = (self.degrees.dp_replicate, self.degrees.fsdp, self.degrees.tp, self.degrees.ep, self.layout.pp)
        # Each group of several GPUs has a communicator with buffers of its own.
        groups = sum(degree > 1 for degree in degrees)
        outside_gib = constants.context_gib.value + groups * constants.communicator_gib.value
        sizes["CUDA and NCCL"] = GIB * outside_gib
        return StageMemory(
            rank=rank, stages=numbers, moment=moment, parts={name: value / GIB for name, value in sizes.items()}
        )

    def weights(self, modules: tuple[StageModules, ...]) -> RankWeights:
        """What a pipeline rank holds of its parameters, and what gathering and reducing them needs.

        The stream that gathers has two modules in a row, and this rank's shard of one in BF16; the one that reduces,
        beyond the gradients, a copy where a group is a single rank.
        """
        parts = [held(self.shape, stage, self.degrees) for stage in modules]
        chain = [module for stage in modules for module in self._chain(stage)]
        pairs = zip(chain, [*chain[1:], NOTHING], strict=True)
        gathers = max(BF16 * (self.shared(one) + self.shared(two) + self._shard(one)) for one, two in pairs)
        return RankWeights(
            local=sum(one.local for one in parts),
            gathered=sum(one.gathered for one in parts),
            pools=gathers + max(FP32 * (module.gathered - self.shared(module)) for module in chain),
        )

    def _chain(self, stage: StageModules) -> list[Held]:
        """The modules of a stage in order, at most two layers of a kind."""
        layers = [self.dense.held] * min(2, stage.dense_layers) + [self.moe.held] * min(2, stage.moe_layers)
        return [self.embedding] * stage.embedding + layers + [self.head] * stage.head

    def single(self, modules: StageModules) -> Iterator[Moment]:
        """Without a pipeline: activations pile up to the loss and go layer by layer from then on."""
        final_norm = float(BF16 * self.shape.dim * (self.work.residual + self.work.tokens))
        everything = modules.dense_layers * self.dense.saved + modules.moe_layers * self.moe.saved
        last = self.moe if modules.moe_layers else self.dense
        forward = {
            "activations": everything,
            "gathered parameters": float(BF16 * last.held.gathered),
            "working set": last.forward,
            "quantised copies": last.quantised,
        }
        yield "forward pass of the last layer", forward
        yield from self._loss(everything + final_norm)
        yield from self._backward(modules, everything + final_norm)
        end = {"gathered gradients": float((BF16 + FP32) * self.embedding.gathered)}
        yield "gradients of the embedding", end

    def _loss(self, activations: float) -> Iterator[Moment]:
        """The loss of the last chunk of the sequence, and the reduction of the head's gradient after it.

        The head's gradient adds up over the chunks in FP32, as FSDP2 does with whatever it does not reduce at once.
        """
        chunk = self.work.tokens / LOSS_CHUNKS * self.shape.vocab_size / self.work.tp
        hidden = (BF16 + FP32) * self.work.tokens * self.shape.dim
        shared = {"activations": activations, "gathered parameters": float(BF16 * self.head.gathered)}
        per_logit = LOSS_BYTES["compiled" if self.mode.loss_compiled else "eager"]
        inside = {"gathered gradients": float(FP32 * self.head.gathered), "loss": hidden + per_logit * chunk}
        yield "loss", shared | inside
        end = {"gathered gradients": float(2 * FP32 * self.head.gathered), "loss": hidden + BF16 * chunk}
        yield "gradients of the head", shared | end

    def _backward(self, modules: StageModules, everything: float) -> Iterator[Moment]:
        """The first and the last layer of each kind; between them the moments change evenly."""
        alive, after = everything, self.head
        kinds = (("an MoE", self.moe, modules.moe_layers), ("a dense", self.dense, modules.dense_layers))
        for name, layer, count in kinds:
            for done in sorted({0, 1, count - 1} & set(range(count))):
                before = alive - done * layer.saved
                yield from self._backward_layer(name, layer, after=layer.held if done else after, activations=before)
            alive -= count * layer.saved
            after = layer.held if count else after

    def _backward_layer(self, name: str, layer: LayerCosts, *, after: Held, activations: float) -> Iterator[Moment]:
        """A layer's backward pass: at its fullest, when only attention is left, and while its gradients are reduced.

        The FP32 input of the reduction of the layer after it lives until its own gradients are reduced.
        """
        gathered = {"gathered parameters": float(BF16 * layer.held.gathered)}
        fullest = {
            "activations": activations + layer.recomputed,
            "working set": layer.backward,
            "quantised copies": layer.quantised,
            "gathered gradients": float(FP32 * after.gathered),
        }
        yield f"backward pass of {name} layer", gathered | fullest
        rest = activations - layer.saved
        attention = {
            "activations": rest + layer.attention,
            "working set": layer.attention,
            "gathered gradients": float(FP32 * after.gathered + BF16 * layer.held.gathered),
        }
        yield f"backward pass of attention in {name} layer", gathered | attention
        yield f"gradients of {name} layer", {"activations": rest, "gathered gradients": self._reducing(layer.held)}

    def _reducing(self, module: Held) -> float:
        """Gradients in BF16 and the FP32 input of their reduction; with expert parallelism, experts come first."""
        if self.degrees.ep == 1:
            return float((BF16 + FP32) * module.gathered)
        first = BF16 * module.gathered + FP32 * module.experts
        return float(max(first, BF16 * module.dense + FP32 * module.gathered))

    def pipeline(self, rank: int, modules: tuple[StageModules, ...], weights: RankWeights) -> Iterator[Moment]:
        """With a pipeline: parameters stay gathered, gradients add up whole and in FP32 until the last micro-batch.

        FSDP2 does not reshard between micro-batches and adds up gradients in the precision of their reduction
        (``torch/distributed/pipelining/stage.py`` and ``torch/distributed/fsdp/_fully_shard`` at 2.14).
        """
        kept = [stage.dense_layers * self.dense.saved + stage.moe_layers * self.moe.saved for stage in modules]
        pp, microbatches = self.layout.pp, self.layout.microbatches
        fullest = in_flight(self.schedule, pp=pp, microbatches=microbatches, rank=rank, turns=len(modules))
        activations = max(sum(n * size for n, size in zip(moment, kept, strict=True)) for moment in fullest)
        largest = self.moe if any(stage.moe_layers for stage in modules) else self.dense
        whole = {
            "gathered parameters": float(BF16 * weights.gathered),
            "gathered gradients": float(FP32 * weights.gathered),
        }
        steady = {
            "activations": activations + largest.recomputed,
            "working set": max(largest.forward, largest.backward),
            "quantised copies": largest.quantised,
        }
        yield "steady state of the pipeline", whole | steady
        ends = {"activations": activations, "working set": float((BF16 + FP32) * largest.held.gathered)}
        yield "gradients of a layer of a micro-batch", whole | ends
        has_head = any(stage.head for stage in modules)
        if has_head:
            for name, parts in self._loss(activations):
                extra = parts["gathered gradients"] - FP32 * self.head.gathered
                yield name, whole | {"activations": activations, "loss": parts["loss"], "working set": extra}
        reduced = max(self.head.gathered * has_head, largest.held.gathered)
        yield "reduction of the gradients", whole | {"working set": float(FP32 * reduced)}

    def shared(self, module: Held) -> int:
        """Elements of a module, when gathered, that more than one rank has a shard of."""
        ranks = self.degrees.efsdp if self.degrees.ep > 1 else self.degrees.fsdp
        return module.dense * (self.degrees.fsdp > 1) + module.experts * (ranks > 1)

    def _shard(self, module: Held) -> float:
        """This rank's part of what :meth:`shared` counts."""
        ranks = self.degrees.efsdp if self.degrees.ep > 1 else self.degrees.fsdp
        dense = module.dense / self.degrees.fsdp if self.degrees.fsdp > 1 else 0
        return dense + (module.experts / ranks if ranks > 1 else 0)


def dispatch_buffer(experiment: Experiment, layout: Layout, shape: ModelShape, work: Work) -> DispatchBuffer | None:
    """DeepEP's buffer; None of other dispatchers, whose own are not modelled, and of its emulation, which has none."""
    ranks, tokens = layout.ep, work.routed_tokens
    if experiment.ep_backend is not EPBackend.DEEPEP or experiment.ep_kernels == "emulated" or ranks == 1:
        return None
    # Domains of one size: the largest that NVLink joins and that divides the group.
    joined = math.gcd(ranks, nvlink_ranks(experiment, ranks))
    size = WORKSPACE_BYTES + deepep_buffer_bytes(
        tokens=tokens, dim=shape.dim, top_k=shape.top_k, ranks=ranks, nvlink_ranks=joined
    )
    return DispatchBuffer(size_bytes=size, tokens=tokens, ranks=ranks, nvlink_ranks=joined)


def deepep_buffer_bytes(*, tokens: int, dim: int, top_k: int, ranks: int, nvlink_ranks: int) -> int:
    """Bytes of DeepEP's buffer on one rank, its workspace apart: ``ElasticBuffer.num_bytes`` for BF16 tokens.

    ``tokens`` are those that a rank dispatches at a time, ``nvlink_ranks`` the ``ranks`` of one NVLink domain.

    >>> deepep_buffer_bytes(tokens=8192, dim=7168, top_k=8, ranks=2, nvlink_ranks=2) // 2**20
    226
    """
    domains, domain = ranks // nvlink_ranks, nvlink_ranks
    features, weights = _aligned(BF16 * dim), 8 * top_k
    sent, returned = features + _aligned(weights + 4 * (1 + top_k)), features + _aligned(weights)
    if domains == 1:
        dispatch_rows, combine_rows = ranks * tokens, min(ranks, top_k) * tokens
    else:
        dispatch_rows = ranks * tokens + tokens + domains * (tokens + CHANNELS)
        combine_rows = (min(domain, top_k) * domains + min(domains, top_k)) * tokens + domains * (tokens + CHANNELS)
    return _aligned(max(sent * dispatch_rows, returned * combine_rows), BUFFER_ALIGNMENT)


def _aligned(size: int, multiple: int = TOKEN_ALIGNMENT) -> int:
    return -(-size // multiple) * multiple
