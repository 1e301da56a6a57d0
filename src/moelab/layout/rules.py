"""What makes an experiment illegal, and what a person should know of a legal one.

:func:`check` is the one judge of legality: plans ask it, ``moelab run`` asks it for the GPUs that it finds, and the
trainer asks it again before it starts; a search asks the same :func:`faults`. A rule is written once: a condition on
some :class:`~moelab.layout.mesh.Facts`, and the words for what is wrong. The rules are those of TorchTitan 0.3.0 and
torch 2.14, of DeepEP 2.1.0, and of the quantised kernels of torchao 0.18; a test
(``tests/unit/test_layout_against_torchtitan.py``) asks TorchTitan about thousands of random experiments, and lists
which rules it notices late or never.

What a dispatcher can do:

=================  =====  ==================  ========================================================================
dispatcher         pads   sends tokens in     made by
=================  =====  ==================  ========================================================================
standard           yes    bf16, mxfp8         TorchTitan; MXFP8 is torchao's all-to-all, put in place by moelab
deepep             yes    bf16, mxfp8, fp8    moelab, on DeepEP 2.x: TorchTitan's own neither pads nor compiles
hybridep           yes    bf16                TorchTitan
minimal_async_ep   no     bf16                TorchTitan
=================  =====  ==================  ========================================================================

Quantised experts need a dispatcher that pads each expert's tokens. Quantised dispatch is for experts of the same
format, and with it the first two GEMMs' weight gradient is BF16: activations that arrive quantised along the features
cannot be scaled along the tokens, which is the axis of that product. MXFP8 asks for it by name (``wgrad=bf16``, as in
the published 16B arm); FP8 has it by construction.

Nothing here loads torch: the trainer's ranks and ``moelab --help`` both come by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, get_args

from moelab.experiment import NUMBERS_ONLY, EPBackend, Experiment, Precision, Routing
from moelab.hardware import (
    GROUP_PADDING,
    ROCM,
    Gpu,
    architecture,
    cluster_of,
    has_deepep,
    has_grouped_fp8,
    has_native_mxfp8,
)
from moelab.layout.mesh import Facts, Layout, divisors, facts_of, nvlink_ranks, resolve
from moelab.layout.schedule import SCHEDULES, effective_layers, rank_with_loss
from moelab.model import tokenizer_size

FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (``_DEFAULT_SPARSE_BLOCK_SIZE`` of torch 2.14)."""
ROPE_TOKENS = {"nano": 4096, "debug": 16384, "16B": 16384, "671B": 16384}
"""Tokens that the rotary embedding of each model reaches: ``max_seq_len`` of its ``RoPE.Config``."""
PADS = (EPBackend.STANDARD, EPBackend.DEEPEP, EPBackend.HYBRIDEP)
"""Dispatchers that pad each expert's tokens."""
SENDS: Mapping[EPBackend, tuple[str, ...]] = {
    EPBackend.STANDARD: ("bf16", "mxfp8"),
    EPBackend.DEEPEP: ("bf16", "mxfp8", "fp8"),
    EPBackend.HYBRIDEP: ("bf16",),
    EPBackend.MINIMAL_ASYNC_EP: ("bf16",),
}
"""Formats in which tokens can travel; values of ``dispatch_precision``."""
COMBINE_FEATURES = 256
"""DeepEP combines tokens of a multiple of this many BF16 features."""
MAX_TOP_K = 32
"""Experts of a token that DeepEP takes."""
PACKED_FEATURES = 128
"""Features whose MXFP8 scales fill the four bytes that DeepEP moves as one."""
BLOCK = {Precision.BF16: 8, Precision.FP8: 16, Precision.MXFP8: 32, Precision.NVFP4: 16}
"""Features that a grouped GEMM needs in a multiple of, along every dimension of a weight; of BF16, 16 bytes."""
NATIVE_BLOCK = 128
"""The same of native MXFP8 on SM100, whose rows torchao casts by ``mxfp8_quantize_2d_1x32_cutedsl``: it asserts so with
the first batch (``torchao/prototype/moe_training/kernels/mxfp8/cutedsl_quantize_2d_1x32.py`` at 0.18)."""
LOSS_CHUNKS = 8
"""Pieces into which TorchTitan cuts a rank's sequence for the loss (``ChunkedLossWrapper``)."""


class Fault(NamedTuple):
    """A rule that a candidate breaks."""

    rule: str
    factor: str  # field of the experiment that is named as the one at fault; what else could change is in ``words``
    words: str  # what is wrong, without the factor and without the choices
    shapes_layout: bool = False  # whether no layout can be resolved where the rule is broken
    offers_choices: bool = True
    """Whether the values of ``factor`` that would do are listed; the others say it in ``words``."""

    def reason(self, facts: Facts) -> str:
        """The fault as a sentence: the factor, what was given, what is wrong, and the legal choices."""
        given = getattr(facts.experiment, self.factor)
        told = f"{self.factor} is {given.value if isinstance(given, Enum) else given}: {self.words}"
        if not self.offers_choices:
            return told
        if choices := self.choices(facts):
            return f"{told}. Legal {self.factor}: {', '.join(map(str, choices))}"
        return f"{told}. No {self.factor} is legal while the other fields stay as they are"

    def choices(self, facts: Facts) -> list[Any]:
        """Values of the factor that keep every rule of this factor, and every other rule that is kept now."""
        # What other fields break now is theirs to mend; a choice may break nothing more.
        # Rule and field: the words of one that stays broken may name other numbers.
        others = {fault[:2] for fault in faults(facts) if fault.factor != self.factor}
        options = ((value, facts.vary(**{self.factor: value})) for value in candidates(facts, self.factor))
        return [value for value, changed in options if all(fault[:2] in others for fault in faults(changed))]


def candidates(facts: Facts, factor: str) -> Iterable[Any]:
    """Values that a field could have, most of them illegal."""
    if factor == "ep":
        return divisors(facts.shape.num_experts)
    if factor == "tp":
        return divisors(facts.shape.kv_heads)
    if factor == "microbatch":
        return divisors(facts.experiment.local_batch)
    if factor in ("pp", "cp", "dp_replicate", "dp_shard"):
        return divisors(facts.experiment.world_size)
    if factor == "pp_schedule":
        return tuple(SCHEDULES)
    if factor in ("ep_backend", "precision"):
        return tuple(EPBackend if factor == "ep_backend" else Precision)
    return get_args(Experiment.model_fields[factor].annotation)


def faults(facts: Facts) -> Iterator[Fault]:
    """Every rule that a candidate breaks, in the order in which they are told."""
    return chain(_mesh(facts), pipeline_faults(facts), _sequence(facts), _arm(facts), _numbers(facts), _gpu(facts))


def faults_of_degrees(facts: Facts) -> Iterator[Fault]:
    """All but :func:`pipeline_faults`: a search judges them once for all schedules and micro-batches."""
    return chain(_mesh(facts), _sequence(facts), _arm(facts), _numbers(facts), _gpu(facts))


def _mesh(facts: Facts) -> Iterator[Fault]:
    """Degrees of parallelism.

    TorchTitan checks the product (``ParallelDims``) and the heads (``Decoder.Config.update_from_config``). It fails
    late on the region of expert parallelism and on uneven expert shards, and not at all on experts that do not divide.
    """
    x, shape, ranks, ep = facts.experiment, facts.shape, facts.experiment.world_size, facts.experiment.ep
    dp_shard, region, outer = facts.dp_shard, facts.region, facts.outer
    left, over = divmod(ranks, outer)
    product = f"pp {x.pp} * dp_replicate {x.dp_replicate} * cp {x.cp} * tp {x.tp}"
    if over:
        degrees = {"pp": x.pp, "dp_replicate": x.dp_replicate, "cp": x.cp, "tp": x.tp}
        # An axis that does not divide by itself is the one to name, else the largest.
        alone = (axis for axis, degree in degrees.items() if ranks % degree)
        at_fault = next(alone, max(degrees, key=lambda axis: degrees[axis]))
        words = f"{product} = {outer} must divide the {ranks} ranks (nodes * gpus_per_node)"
        yield Fault("axes divide the ranks", at_fault, words, shapes_layout=True)
    elif dp_shard != left:
        words = f"{product} leave {left} of the {ranks} ranks (nodes * gpus_per_node). Legal dp_shard: {left}, or -1 "
        words += "for the ranks that are left"
        yield Fault("dp_shard takes the rest", "dp_shard", words, shapes_layout=True, offers_choices=False)
    if shape.kv_heads % x.tp:
        of = "key and value" if shape.grouped_queries else "attention"
        yield Fault("tp divides the heads", "tp", f"tensor parallelism must divide the {shape.kv_heads} {of} heads")
    whole_region, whole_experts = region % ep == 0, shape.num_experts % ep == 0
    # Axes that do not divide the ranks leave no region: one fault is told then, not two.
    if dp_shard and not whole_region:
        words = f"it must divide the ranks it shares out, dp_shard {dp_shard} * cp {x.cp} * tp {x.tp} = {region}"
        yield Fault("ep divides its region", "ep", words, shapes_layout=True)
    if not whole_experts:
        yield Fault("ep divides the experts", "ep", f"it must divide the {shape.num_experts} experts of {shape.name}")
    if dp_shard and whole_region and whole_experts:
        # FSDP shards experts along their hidden dimension once there are more ranks than experts, and only evenly.
        hidden, sharing, shards = shape.moe_hidden_dim, region, region // ep
        if ep == 1:  # TorchTitan counts all ranks then, and tensor parallelism cuts the experts first
            hidden, sharing, shards = hidden // x.tp, x.dp_replicate * region, dp_shard * x.cp
        if sharing > shape.num_experts and (hidden % shards or shape.dim % shards):
            words = (
                f"{sharing} ranks share {shape.num_experts} experts, so FSDP cuts each expert's weights into {shards} "
                f"parts, which must divide their {hidden} hidden features and {shape.dim} outputs"
            )
            yield Fault("expert shards are even", "ep", words)


def pipeline_faults(facts: Facts) -> Iterator[Fault]:
    """Stages and micro-batches: the rules that look at ``pp_schedule``, ``local_batch``, ``microbatch`` and ``pp``.

    TorchTitan checks stages when it splits the model (``_generate_llm_fqn_per_model_part``) and micro-batches when it
    builds the schedule, both after every rank has started.
    """
    x, schedule = facts.experiment, facts.schedule
    if x.local_batch % (x.microbatch if x.pp > 1 else x.sequences_at_once):
        cutter = "pipeline parallelism" if x.pp > 1 else "gradient accumulation"
        words = f"{cutter} cuts local_batch {x.local_batch} into micro-batches of this size"
        yield Fault("micro-batches are whole", "microbatch", words, shapes_layout=True)
    if x.pp == 1:
        return
    turns, layers = facts.stages_per_rank, facts.shape.n_layers
    if x.pp * turns > (effective := effective_layers(layers)):
        words = f"{x.pp_schedule} makes {x.pp * turns} stages for {effective} effective layers ({layers} layers, and "
        words += "one each for the embedding and the output)"
        yield Fault("stages have layers", "pp", words, shapes_layout=True)
    if schedule is None:
        words = "there is no such schedule; names are spelt as TorchTitan spells them"
        yield Fault("schedule exists", "pp_schedule", words, shapes_layout=True)
        return
    own = schedule.stages_per_rank
    loops = own > 1 and schedule.style == "loop"
    if turns != own and not (loops and turns > 1):
        legal = f"{own}{' and more' * loops}, or 0 for the schedule's own"
        words = f"{schedule.name} does not put that many stages on a rank. Legal pp_stages_per_rank: {legal}"
        yield Fault("stages are the schedule's", "pp_stages_per_rank", words, shapes_layout=True, offers_choices=False)
    made, least = facts.microbatches, schedule.least_microbatches(x.pp)
    if x.local_batch % x.microbatch == 0 and not schedule.takes(made, x.pp):
        words = f"at microbatch {x.microbatch} it makes {made} micro-batches, and {schedule.name} on pp {x.pp} "
        if made < least:
            words += f"needs at least {least}, one for each stage. Legal local_batch: {least * x.microbatch} and more"
        else:
            whole = x.pp * x.microbatch
            near = x.local_batch // whole * whole
            words += f"runs them in {made // x.pp} equal rounds. Legal local_batch: any multiple of {whole}, such as "
            words += f"{near} or {near + whole}"
        yield Fault("micro-batches suffice", "local_batch", words, offers_choices=False)
    if schedule.splits_backward and x.compile == "model+loss":
        words = (
            "it splits dgrad from wgrad, which torch 2.14 cannot do with compiled layers (compile is model+loss); "
            "compile=loss or compile=none allow it"
        )
        yield Fault("no split backward when compiled", "pp_schedule", words)
    if schedule.style == "v" and (x.dataset != "c4" or x.validate_every):
        words = (
            f"held-out text is evaluated (dataset is {x.dataset}, validate_every {x.validate_every}), which torch 2.14 "
            "cannot do under a V schedule; dataset=c4 with validate_every=0 only trains"
        )
        yield Fault("V schedules do not evaluate", "pp_schedule", words)


def _sequence(facts: Facts) -> Iterator[Fault]:
    """Tokens of a sequence.

    TorchTitan checks evenness when the trainer starts; torch checks the blocks of the attention mask under context
    parallelism with the first batch, and the loss its chunks.
    """
    x, name, reach = facts.experiment, facts.shape.name, ROPE_TOKENS[facts.shape.name]
    even = x.tp * (2 * x.cp if x.cp > 1 else 1)  # two chunks a rank, for load balance
    blocks, chunks = FLEX_BLOCK * x.cp if x.cp > 1 else 1, LOSS_CHUNKS * x.cp
    # The nearest lengths keep all three rules, so that a mended seq_len is not refused for the next.
    multiple = math.lcm(even, blocks, chunks)
    below = x.seq_len // multiple * multiple
    # 8 tokens are the least that an experiment takes.
    near = [value for value in (below, below + multiple) if 8 <= value <= reach]
    advice = f"nearest legal seq_len: {' or '.join(map(str, near))}" if near else "reduce tp or cp"
    if x.seq_len % even:
        parts = f"tp {x.tp}" + (f" * 2 * cp {x.cp}" if x.cp > 1 else "")
        words = f"sequence and context parallelism cut it into {parts} = {even} equal parts; {advice}"
        yield Fault("sequence is cut evenly", "seq_len", words, offers_choices=False)
    if x.seq_len % blocks:
        words = (
            f"context parallelism shards FlexAttention's mask in blocks of {FLEX_BLOCK} tokens, so it must be a "
            f"multiple of {FLEX_BLOCK} * cp {x.cp} = {blocks}; {advice}"
        )
        yield Fault("mask is cut in blocks", "seq_len", words, offers_choices=False)
    # Blocks of the mask are multiples of the chunks: one fault is told, not two.
    elif x.seq_len % chunks:
        words = f"the loss cuts a rank's share of it into {LOSS_CHUNKS} equal chunks; {advice}"
        yield Fault("loss is cut evenly", "seq_len", words, offers_choices=False)
    if x.cp > 1 and facts.capability == 0:
        words = (
            f"context parallelism shards FlexAttention's mask, and {facts.gpu_in_words}: on a CPU, which has no "
            "backward pass of FlexAttention, masked attention takes its place"
        )
        yield Fault("context parallelism has FlexAttention", "cp", words)
    if x.tp > 1 and x.routing is not Routing.LEARNED and facts.capability == 0:
        # On a GPU (``spmd_types``) the scores are plain tensors under tensor parallelism too.
        words = (
            f"routing {x.routing.value} gathers the router's scores by plain numbers of experts, and "
            f"{facts.gpu_in_words}: on a CPU tensor parallelism makes the scores DTensors, which do not mix; "
            "routing=learned allows it"
        )
        yield Fault("forced routing has plain scores", "tp", words)
    if x.seq_len > reach:
        words = f"the rotary embedding of {name} reaches {reach} tokens; legal seq_len: up to {reach}"
        yield Fault("rotary embedding reaches", "seq_len", words, offers_choices=False)


def _arm(facts: Facts) -> Iterator[Fault]:
    """Dispatcher, checkpointing and attention."""
    x, backend = facts.experiment, facts.experiment.ep_backend
    minimal, precision = backend is EPBackend.MINIMAL_ASYNC_EP, x.precision
    if x.ep == 1 and backend is not EPBackend.STANDARD:
        words = (
            f"ep_backend {backend.value} moves tokens between expert-parallel ranks and needs at least 2; "
            "ep_backend=standard runs without expert parallelism"
        )
        yield Fault("dispatcher needs ep", "ep", words)
    if facts.quantised and backend not in PADS:
        words = (
            f"quantised experts (precision {precision.value}) need a dispatcher that pads each expert's tokens, "
            f"and this one does not; those that do: {', '.join(PADS)}"
        )
        yield Fault("minimal_async_ep is not quantised", "ep_backend", words)
    if backend is EPBackend.DEEPEP and (cause := _not_for_deepep(facts)):
        yield Fault("DeepEP takes the tokens", "ep_backend", cause)
    if minimal and x.activation_checkpoint != "full":
        words = "ep_backend minimal_async_ep reuses one buffer and needs every layer recomputed"
        yield Fault("minimal_async_ep recomputes", "activation_checkpoint", words)
    if minimal and x.gpus_per_node % x.ep:
        words = (
            "ep_backend minimal_async_ep writes into its peers' memory over NVLink, so the expert-parallel ranks must "
            f"lie in one node (gpus_per_node {x.gpus_per_node})"
        )
        yield Fault("minimal_async_ep stays in a node", "ep", words)
    plain = backend is EPBackend.STANDARD and x.ep > 1 and x.compile != "model+loss" and x.dispatch_precision == "bf16"
    if x.activation_checkpoint == "full+dispatch" and plain and facts.capability:
        words = (
            "uncompiled, TorchTitan's standard all-to-all on a GPU is no operator whose result a checkpoint can keep; "
            "compile=model+loss makes it one, and ep_backend=deepep always is"
        )
        yield Fault("dispatch is kept", "activation_checkpoint", words)
    if x.activation_checkpoint == "full+dispatch" and backend is EPBackend.HYBRIDEP:
        words = "full+dispatch keeps what the standard all-to-all and DeepEP bring, not what HybridEP brings"
        yield Fault("dispatch is kept", "activation_checkpoint", words)
    if cause := _not_dispatched(facts):
        yield Fault("dispatch is quantised as its experts", "dispatch_precision", cause)
    # Where it is not known which GPU it will be, nothing is said.
    if x.attention_backend != "flex" and facts.capability == 0:
        words = f"attention_backend {x.attention_backend} is for GPUs, and {facts.gpu_in_words}"
        yield Fault("attention runs here", "attention_backend", words)
    elif x.attention_backend == "varlen" and facts.capability is not None and x.cp > 1:
        words = "TorchTitan 0.3.0 has no context parallelism for varlen attention"
        yield Fault("attention runs here", "attention_backend", words)


def _numbers(facts: Facts) -> Iterator[Fault]:
    """Number formats, the blocks that they need, and the vocabulary."""
    x, shape, precision = facts.experiment, facts.shape, facts.experiment.precision
    if x.wgrad == "fp8" and precision is not Precision.FP8:
        words = f"wgrad fp8 is for FP8 experts, and precision is {precision.value}"
        yield Fault("weight gradients are in FP8 with FP8 experts", "wgrad", words)
    if x.quantize != "experts" and facts.quantised and x.tp > 1:
        yield Fault("quantised linears are whole", "quantize", f"quantised linears are for tp 1 only (tp is {x.tp})")
    if x.quantize != "experts" and precision is Precision.NVFP4:
        words = "NVFP4 is emulated for experts only; torchao's NVFP4 linears are SM100 kernels with other numerics"
        yield Fault("NVFP4 is of experts", "quantize", words)
    native = native_mxfp8(x, facts.capability) and facts.capability not in ROCM  # AMD's kernels take any block
    block = NATIVE_BLOCK if native else BLOCK[precision]
    kernels = {NATIVE_BLOCK: f" with native kernels, and of {BLOCK[precision]} with mxfp8_kernels=emulated"}
    # Without expert parallelism tensor parallelism cuts the experts themselves.
    if x.ep == 1 < x.tp and shape.moe_hidden_dim % (x.tp * block):
        words = (
            f"without expert parallelism (ep 1) it cuts the {shape.moe_hidden_dim} hidden features of each "
            f"expert, and {precision.value} needs multiples of {block}{kernels.get(block, '')}"
        )
        yield Fault("expert blocks are whole", "tp", words)
    # Dimensions of quantised weights; others, such as a head's, follow or are fixed.
    linears = ("q_lora_rank", "kv_lora_rank", "dense_hidden_dim") if x.quantize != "experts" else ()
    blocks = {"dim": block, "moe_hidden_dim": block, **dict.fromkeys(linears, BLOCK[precision])}
    if facts.quantised and (cut := [name for name, size in blocks.items() if getattr(shape, name) % size]):
        most = max(blocks[name] for name in cut)
        given = ", ".join(f"{name} is {getattr(shape, name)}" for name in cut)
        words = f"it needs features in multiples of {most}{kernels.get(most, '')}, and {given}"
        yield Fault("expert blocks are whole", "precision", words)
    if shape.vocab_size < (tokens := tokenizer_size(x)):
        words = f"its tokenizer has {tokens} tokens, and vocab_size is {shape.vocab_size}; legal vocab_size: {tokens} "
        yield Fault("vocabulary holds the tokenizer", "dataset", words + "or more", offers_choices=False)


def native_mxfp8(experiment: Experiment, capability: float | None) -> bool:
    """Whether products are MXFP8 by torchao's own kernels: asked for, or chosen where a GPU has them."""
    kernels = experiment.mxfp8_kernels
    chosen = kernels == "native" or (kernels == "auto" and has_native_mxfp8(capability))
    return chosen and experiment.precision is Precision.MXFP8


def _not_for_deepep(facts: Facts) -> str | None:
    """:mod:`moelab.deepep.buffer` refuses the same once more before its kernels run; emulation takes any features."""
    x, top_k, dim, name = facts.experiment, facts.shape.top_k, facts.shape.dim, facts.shape.name
    if top_k > MAX_TOP_K:
        return f"DeepEP takes at most {MAX_TOP_K} experts per token, and {name} routes to {top_k}"
    if x.dispatch_precision == "mxfp8" and dim % PACKED_FEATURES:
        return (
            f"DeepEP moves MXFP8 scales four at a time, of {PACKED_FEATURES} features, and {name} has {dim}; "
            "dispatch_precision=bf16 has no scales"
        )
    if x.ep_kernels == "native" and dim % COMBINE_FEATURES:
        return (
            f"DeepEP combines tokens of a multiple of {COMBINE_FEATURES} features, and {name} has {dim}; "
            "ep_kernels=emulated takes any"
        )
    return None


def _not_dispatched(facts: Facts) -> str | None:
    """Why tokens cannot travel in the asked format."""
    x, sent, backend = facts.experiment, facts.experiment.dispatch_precision, facts.experiment.ep_backend
    if sent == "bf16":
        return None
    if sent not in SENDS[backend]:
        others = ", ".join(other for other, formats in SENDS.items() if sent in formats)
        return f"{backend.value} sends tokens in {' or '.join(SENDS[backend])} only; those that send {sent}: {others}"
    if x.precision.value != sent:
        return f"tokens travel in the experts' own format or in bf16, and precision is {x.precision.value}"
    if x.ep == 1:
        return "without expert parallelism (ep 1) no token travels"
    if x.precision is Precision.MXFP8 and x.wgrad != "bf16":
        return (
            "tokens that arrive quantised along their features cannot be scaled along the tokens, as an MXFP8 weight "
            "gradient needs; wgrad=bf16 allows it"
        )
    return None


def _gpu(facts: Facts) -> Iterator[Fault]:
    """What the GPU must have; nothing is said of one that is not known."""
    x, capability, here = facts.experiment, facts.capability, facts.gpu_in_words
    if capability is not None and x.precision is Precision.FP8 and not has_grouped_fp8(capability):
        words = f"FP8 grouped GEMMs need SM90 or SM100, and {here}; precision=mxfp8 runs anywhere, emulated"
        yield Fault("GPU has FP8", "precision", words)
    # `auto` needs no kernels: without them MXFP8 is emulated.
    native = x.precision is Precision.MXFP8 and x.mxfp8_kernels == "native"
    if capability is not None and native and not has_native_mxfp8(capability):
        words = f"torchao's MXFP8 kernels are for SM100 and SM103, and {here}. Legal mxfp8_kernels: auto, emulated"
        yield Fault("GPU has MXFP8", "mxfp8_kernels", words, offers_choices=False)
    deepep, minimal = x.ep_backend is EPBackend.DEEPEP, x.ep_backend is EPBackend.MINIMAL_ASYNC_EP
    needs_cuda = x.ep_backend is not EPBackend.STANDARD and not (deepep and x.ep_kernels == "emulated")
    # DeepEP's kernels, and HybridEP's, are for some SM versions; minimal_async_ep needs CUDA alone.
    runs = (bool(capability) and capability not in ROCM) if minimal else has_deepep(capability)
    if capability is not None and needs_cuda and not runs:
        versions = "" if minimal else " and SM90, SM100 or SM103"
        emulated = "; ep_kernels=emulated has its numerics on any device" if deepep else ""
        words = f"it needs CUDA{versions}, and {here}{emulated}"
        yield Fault("dispatcher needs CUDA", "ep_backend", words)
    if x.memory_snapshot and (not x.trace_step or capability == 0):
        words = f"it records CUDA's allocator, and {here}; trace_step alone works on a CPU too"
        if not x.trace_step:
            words = "it records the traced step, and trace_step is 0; set trace_step to a step of this run"
        yield Fault("memory snapshots are CUDA's", "memory_snapshot", words, offers_choices=False)


@dataclass(frozen=True, kw_only=True)
class LayoutCheck:
    """The verdict on an experiment."""

    reasons: tuple[str, ...]
    """Why it is not legal, every one; empty if it is. Each begins with the field at fault and what was given."""
    notes: tuple[str, ...]  # what a person should know of a legal one too, such as padding that is raised
    layout: Layout | None  # None if it cannot be resolved

    @property
    def legal(self) -> bool:
        """Whether TorchTitan can train it, memory aside."""
        return not self.reasons


def check(experiment: Experiment, *, gpu: Gpu | None = None) -> LayoutCheck:
    """Judge an experiment, memory aside.

    With a ``gpu``, of this machine and of capability 0 for none, it is judged for that, and not for its hardware's.

    Raises:
        BadInput: if its hardware profile does not exist.

    >>> from moelab.experiment import Experiment
    >>> print(check(Experiment(gpus_per_node=4, ep=3)).reasons[0])
    ep is 3: it must divide the ranks it shares out, dp_shard 4 * cp 1 * tp 1 = 4. Legal ep: 1, 2, 4
    """
    facts = facts_of(experiment, gpu)
    broken = list(faults(facts))
    return LayoutCheck(
        reasons=tuple(fault.reason(facts) for fault in broken),
        notes=tuple(_notes(facts)),
        # An experiment that breaks other rules still has a layout to show.
        layout=None if any(fault.shapes_layout for fault in broken) else resolve(facts),
    )


def _notes(facts: Facts) -> Iterator[str]:
    """What is worth knowing of a legal layout."""
    x, cluster, capability = facts.experiment, cluster_of(facts.experiment.hardware), facts.capability
    if facts.shape.plan_only:
        yield facts.shape.plan_only
    # On the machine at hand it is for `moelab run` to say whether it has the ranks.
    if cluster.name not in ("local", "cpu"):
        if x.world_size > cluster.gpus:
            yield f"hardware: {cluster.name} has {cluster.gpus} GPUs, and this takes {x.world_size}"
        if x.gpus_per_node > cluster.node.gpus:
            there = f"a node of {cluster.name} has {cluster.node.gpus} GPUs"
            yield f"hardware: {there}, and gpus_per_node is {x.gpus_per_node}"
    if capability in ROCM:
        mxfp8 = "; torchao 0.18.0 has MXFP8 kernels for it" if has_native_mxfp8(capability) else ""
        yield f"hardware: {architecture(capability)} is AMD's, on ROCm{mxfp8}; moelab has not run there"
    if x.ep_backend is EPBackend.DEEPEP and x.ep_kernels == "emulated":
        yield "dispatcher: DeepEP is emulated on plain collectives: its numerics, not its speed"
    if x.precision is Precision.NVFP4:
        yield f"precision: {NUMBERS_ONLY}"
    if padding := _padding(facts):
        yield f"padding: {padding}"
    # TorchTitan's default, CUDA graphs on, would be refused.
    if x.pp > 1 or (x.ep > 1 and x.ep_backend is not EPBackend.MINIMAL_ASYNC_EP):
        cause = "pipeline parallelism" if x.pp > 1 else f"ep_backend {x.ep_backend.value}, which waits for the host"
        yield f"cuda graphs: off; TorchTitan 0.3.0 does not support them with {cause}"
    if x.microbatch != x.sequences_at_once > 1:
        yield (
            f"microbatch: {x.microbatch} is for pipeline parallelism; without it the {x.local_batch} sequences of "
            "local_batch go forward at once, unless accumulate_gradients is set"
        )
    if x.pp > 1 and (schedule := facts.schedule) and x.world_size % x.pp == 0:
        told = f"loss: global rank {rank_with_loss(schedule, x.pp) * (x.world_size // x.pp)} holds it; the other "
        told += "pipeline ranks print -1"
        if schedule.name == "DualPipeV":
            wrong = (x.pp - 1) * (x.world_size // x.pp)
            told += f", and rank {wrong}, which TorchTitan 0.3.0 takes for TensorBoard and W&B, is one of them"
        yield told
    if x.ep > 1 and x.gpus_per_node % x.ep:
        yield f"traffic: ep {x.ep} {_beyond_a_node(facts)}"
    if x.routing is Routing.ROUND_ROBIN and x.ep > 1 and facts.shape.num_experts % x.ep == 0:
        ranks = _ranks_a_token(facts.shape.num_experts, facts.shape.top_k, x.ep)
        yield (
            f"traffic: round_robin sends a token's {facts.shape.top_k} copies to {ranks:.3g} of {x.ep} "
            "ranks, far fewer than a trained router; use routing=random_balanced for a benchmark that does not flatter"
        )
    if x.warmup_steps > x.steps:
        yield f"learning rate: TorchTitan shortens warmup_steps {x.warmup_steps} to the {x.steps} steps of this run"


def _padding(facts: Facts) -> str:
    """To what each expert's tokens are padded; nothing for BF16 with a dispatcher that does not pad."""
    x, native, emulated = facts.experiment, GROUP_PADDING["mxfp8_native"], GROUP_PADDING["mxfp8_emulated"]
    raised = f"{emulated} tokens raised to {native}, which torchao's quantisation kernel needs on SM100"
    if native_mxfp8(x, facts.capability):
        return raised
    if x.precision is Precision.BF16 and x.ep_backend is not EPBackend.DEEPEP:
        return ""
    size = GROUP_PADDING["mxfp8_emulated" if x.precision is Precision.MXFP8 else x.precision.value]
    padded = f"each expert's tokens are padded to a multiple of {size}"
    chosen = x.precision is Precision.MXFP8 and x.mxfp8_kernels == "auto"
    if chosen and facts.capability is None:
        return f"{padded} where MXFP8 is emulated; {raised}"
    return f"{padded}, emulated" if chosen or x.precision is Precision.NVFP4 else padded


def _beyond_a_node(facts: Facts) -> str:
    """What of the exchange leaves the node: over NVLink within a rack such as NVL72, else over the network."""
    x, joined = facts.experiment, nvlink_ranks(facts.experiment)
    nodes = joined // x.gpus_per_node
    # Every plan that sends tokens by DeepEP between nodes says so: nobody has run this project's dispatcher there.
    unseen = (
        "; DeepEP between nodes was never run here, and on 8 nodes with ep 64 its combine hung elsewhere "
        "(pytorch/torchtitan issue 3877)"
    ) * (x.ep_backend is EPBackend.DEEPEP)
    if joined == x.gpus_per_node:
        return f"does not fit into a node of {joined}, so tokens cross the network between nodes{unseen}"
    placed = f"{nodes} nodes of each NVLink domain of {cluster_of(x.hardware).node.domain} (sbatch --segment={nodes})"
    if joined % x.ep == 0:
        return f"stays within NVLink where the job has {placed}"
    return f"does not fit into {placed}, so tokens cross the network between them{unseen}"


@lru_cache(maxsize=256)
def _ranks_a_token(experts: int, top_k: int, ep: int) -> float:
    """Distinct ranks that TorchTitan's round-robin sends a token to, averaged over tokens."""
    local = experts // ep
    # Copies are dealt out one after another, so a token begins at any multiple of this.
    starts = range(0, experts, math.gcd(experts, top_k))
    reached = [len({(start + copy) % experts // local for copy in range(top_k)}) for start in starts]
    return sum(reached) / len(reached)
