"""What makes an experiment illegal, and what a person should know of a legal one.

:func:`check` is the one judge of legality: plans ask it, ``moelab run`` asks it for the GPUs that it finds, and the
trainer asks it again before it starts; a search asks the same rules. A rule is written once: a function that says in
words what is wrong with some :class:`~moelab.layout.mesh.Facts`, or None. The rules are those of TorchTitan 0.3.0 and
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, get_args

from moelab.experiment import EPBackend, Experiment, Precision, Routing
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
from moelab.layout.mesh import Facts, Layout, divisors, facts_of, resolve
from moelab.layout.schedule import SCHEDULES, effective_layers, rank_with_loss
from moelab.model import tokenizer_size

FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (``_DEFAULT_SPARSE_BLOCK_SIZE`` of torch 2.14)."""
ROPE_TOKENS = {"nano": 4096, "debug": 16384, "16B": 16384, "671B": 16384}
"""Tokens that the rotary embedding of each model reaches: ``max_seq_len`` of its ``RoPE.Config``."""
PADS = (EPBackend.STANDARD, EPBackend.DEEPEP, EPBackend.HYBRIDEP)
"""Dispatchers that pad each expert's tokens."""
SENDS: Mapping[EPBackend, tuple[str, ...]] = MappingProxyType(
    {
        EPBackend.STANDARD: ("bf16", "mxfp8"),
        EPBackend.DEEPEP: ("bf16", "mxfp8", "fp8"),
        EPBackend.HYBRIDEP: ("bf16",),
        EPBackend.MINIMAL_ASYNC_EP: ("bf16",),
    }
)
"""Formats in which tokens can travel; values of ``dispatch_precision``."""
COMBINE_FEATURES = 256
"""DeepEP combines tokens of a multiple of this many BF16 features."""
MAX_TOP_K = 32
"""Experts of a token that DeepEP takes."""
PACKED_FEATURES = 128
"""Features whose MXFP8 scales fill the four bytes that DeepEP moves as one."""
BLOCK = {Precision.BF16: 8, Precision.FP8: 16, Precision.MXFP8: 32}
"""Features that a grouped GEMM needs in a multiple of, along every dimension of a weight; of BF16, 16 bytes."""
LOSS_CHUNKS = 8
"""Pieces into which TorchTitan cuts a rank's sequence for the loss (``ChunkedLossWrapper``)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of legality.

    Attributes:
        name: short name, for tests and tables.
        factor: field of the experiment that is named as the one at fault; what else could change is in ``fault``.
        fault: what is wrong with a candidate, without the factor and without the choices; None where it keeps the rule
            or where another rule leaves nothing to judge.
        shapes_layout: whether no layout can be resolved without it.
        offers_choices: whether the values of ``factor`` that would do are listed; the others say it in ``fault``.
    """

    name: str
    factor: str
    fault: Callable[[Facts], str | None]
    shapes_layout: bool = False
    offers_choices: bool = True

    def holds(self, facts: Facts) -> bool:
        """Whether a candidate keeps the rule."""
        return self.fault(facts) is None

    def reason(self, facts: Facts) -> str | None:
        """The fault as a sentence: the factor, what was given, what is wrong, and the legal choices."""
        fault = self.fault(facts)
        if fault is None:
            return None
        said = f"{self.factor} is {_given(facts, self.factor)}: {fault}"
        if not self.offers_choices:
            return said
        choices = self.choices(facts)
        if not choices:
            return f"{said}. No {self.factor} is legal while the other fields stay as they are"
        return f"{said}. Legal {self.factor}: {', '.join(map(str, choices))}"

    def choices(self, facts: Facts) -> list[Any]:
        """Values of the factor that keep every rule of this factor, and every other rule that is kept now."""
        kept = [rule for rule in RULES if rule.factor == self.factor or rule.holds(facts)]
        options = ((value, facts.vary(self.factor, value)) for value in candidates(facts, self.factor))
        return [value for value, changed in options if all(rule.holds(changed) for rule in kept)]


def _given(facts: Facts, factor: str) -> Any:
    """The value of a field as the experiment gives it."""
    if factor == "dp_shard":
        return facts.dp_shard_given
    value = getattr(facts if hasattr(facts, factor) else facts.experiment, factor)
    return value.value if isinstance(value, Enum) else value


def candidates(facts: Facts, factor: str) -> Iterable[Any]:
    """Values that a field could have, most of them illegal."""
    if factor == "ep":
        return divisors(facts.shape.num_experts)
    if factor == "tp":
        return divisors(facts.shape.kv_heads)
    if factor == "microbatch":
        return divisors(facts.local_batch)
    if factor in ("pp", "cp", "dp_replicate", "dp_shard"):
        return divisors(facts.world_size)
    if factor == "pp_schedule":
        return tuple(SCHEDULES)
    if factor in ("ep_backend", "precision"):
        return tuple(EPBackend if factor == "ep_backend" else Precision)
    return get_args(Experiment.model_fields[factor].annotation)


def _rule(
    name: str, factor: str, *, shapes_layout: bool = False, offers_choices: bool = True
) -> Callable[[Callable[[Facts], str | None]], Rule]:
    """Make a rule of the function below."""
    return lambda fault: Rule(
        name=name, factor=factor, fault=fault, shapes_layout=shapes_layout, offers_choices=offers_choices
    )


# --- the mesh --------------------------------------------------------------------------------------------------------
# TorchTitan checks the product (``ParallelDims``) and the heads (``Decoder.Config.update_from_config``). It fails late
# on the region of expert parallelism and on uneven expert shards, and not at all on experts that do not divide.

AXES = ("pp", "dp_replicate", "cp", "tp")


def _axis_rule(axis: str) -> Rule:
    """The rule that the outer axes divide the ranks, told of the axis at fault."""

    @_rule("axes divide the ranks", axis, shapes_layout=True)
    def axes_divide(facts: Facts) -> str | None:
        if facts.world_size % facts.outer == 0:
            return None
        alone = [name for name in AXES if facts.world_size % getattr(facts, name)]
        at_fault = alone[0] if alone else max(AXES, key=lambda name: int(getattr(facts, name)))
        if at_fault != axis:
            return None
        product = " * ".join(f"{name} {getattr(facts, name)}" for name in AXES)
        return f"{product} = {facts.outer} must divide the {facts.world_size} ranks (nodes * gpus_per_node)"

    return axes_divide


@_rule("dp_shard takes the rest", "dp_shard", shapes_layout=True, offers_choices=False)
def _dp_shard(facts: Facts) -> str | None:
    left, over = divmod(facts.world_size, facts.outer)
    if over or facts.dp_shard == left:
        return None
    return (
        f"pp {facts.pp} * dp_replicate {facts.dp_replicate} * cp {facts.cp} * tp {facts.tp} leave {left} of the "
        f"{facts.world_size} ranks (nodes * gpus_per_node). Legal dp_shard: {left}, or -1 for the ranks that are left"
    )


@_rule("tp divides the heads", "tp")
def _heads(facts: Facts) -> str | None:
    heads, of = facts.shape.kv_heads, "key and value" if facts.shape.grouped_queries else "attention"
    return f"tensor parallelism must divide the {heads} {of} heads" if heads % facts.tp else None


@_rule("ep divides its region", "ep", shapes_layout=True)
def _region(facts: Facts) -> str | None:
    if not facts.dp_shard or facts.region % facts.ep == 0:
        return None
    region = f"dp_shard {facts.dp_shard} * cp {facts.cp} * tp {facts.tp} = {facts.region}"
    return f"it must divide the ranks it shares out, {region}"


@_rule("ep divides the experts", "ep")
def _experts(facts: Facts) -> str | None:
    experts = facts.shape.num_experts
    return f"it must divide the {experts} experts of {facts.shape.name}" if experts % facts.ep else None


@_rule("expert shards are even", "ep")
def _even_shards(facts: Facts) -> str | None:
    """FSDP shards experts along their hidden dimension once there are more ranks than experts, and only evenly."""
    if not facts.dp_shard or not _region.holds(facts) or not _experts.holds(facts):
        return None
    hidden, dim = facts.shape.moe_hidden_dim, facts.shape.dim
    if facts.ep > 1:
        ranks, shards = facts.region, facts.efsdp
    else:  # TorchTitan counts all ranks then, and tensor parallelism cuts the experts first
        ranks, shards = facts.dp_replicate * facts.region, facts.dp_shard * facts.cp
        hidden //= facts.tp
    if ranks <= facts.shape.num_experts or (hidden % shards == 0 and dim % shards == 0):
        return None
    return (
        f"{ranks} ranks share {facts.shape.num_experts} experts, so FSDP cuts each expert's weights into {shards} "
        f"parts, which must divide their {hidden} hidden features and {dim} outputs"
    )


# --- the pipeline ----------------------------------------------------------------------------------------------------
# TorchTitan checks stages when it splits the model (``_generate_llm_fqn_per_model_part``) and micro-batches when it
# builds the schedule, both after every rank has started.


@_rule("schedule exists", "pp_schedule", shapes_layout=True)
def _schedule(facts: Facts) -> str | None:
    if facts.pp == 1 or facts.pp_schedule in SCHEDULES:
        return None
    return "there is no such schedule; names are spelt as TorchTitan spells them"


@_rule("stages are the schedule's", "pp_stages_per_rank", shapes_layout=True, offers_choices=False)
def _turns(facts: Facts) -> str | None:
    if facts.pp == 1 or facts.schedule is None or not facts.experiment.pp_stages_per_rank:
        return None
    name, own = facts.schedule.name, facts.schedule.stages_per_rank
    if facts.stages_per_rank == own or (own > 1 and facts.schedule.style == "loop" and facts.stages_per_rank > 1):
        return None
    legal = f"{own} and more" if own > 1 and facts.schedule.style == "loop" else f"{own}"
    return f"a rank of {name} holds another number of stages. Legal pp_stages_per_rank: {legal}, or 0 for its own"


@_rule("stages have layers", "pp", shapes_layout=True)
def _stages(facts: Facts) -> str | None:
    if facts.pp == 1 or facts.schedule is None:
        return None
    stages, layers = facts.pp * facts.stages_per_rank, facts.shape.n_layers
    if stages <= effective_layers(layers):
        return None
    return (
        f"{facts.pp_schedule} makes {stages} stages for {effective_layers(layers)} effective layers ({layers} "
        "layers, and one each for the embedding and the output)"
    )


@_rule("micro-batches are whole", "microbatch", shapes_layout=True)
def _whole_microbatches(facts: Facts) -> str | None:
    if facts.pp == 1 or facts.local_batch % facts.microbatch == 0:
        return None
    return f"pipeline parallelism cuts local_batch {facts.local_batch} into micro-batches of this size"


@_rule("micro-batches suffice", "local_batch", offers_choices=False)
def _microbatches(facts: Facts) -> str | None:
    schedule = facts.schedule
    if facts.pp == 1 or schedule is None or not _whole_microbatches.holds(facts):
        return None
    if schedule.takes(facts.microbatches, facts.pp):
        return None
    made = f"at microbatch {facts.microbatch} it makes {facts.microbatches} micro-batches"
    least = schedule.least_microbatches(facts.pp * schedule.stages_per_rank)
    if facts.microbatches < least:
        return (
            f"{made}, and {schedule.name} on pp {facts.pp} needs at least {least}, one for each stage. "
            f"Legal local_batch: {least * facts.microbatch} and more"
        )
    rounds, whole = facts.microbatches // facts.pp, facts.pp * facts.microbatch
    near = facts.local_batch // whole * whole
    return (
        f"{made}, and {schedule.name} on pp {facts.pp} runs them in {rounds} rounds, into which they must divide. "
        f"Legal local_batch: any multiple of {whole}, such as {near} or {near + whole}"
    )


@_rule("no split backward when compiled", "pp_schedule")
def _split_backward(facts: Facts) -> str | None:
    splits = facts.pp > 1 and facts.schedule is not None and facts.schedule.splits_backward
    if not splits or facts.compile != "model+loss":
        return None
    return (
        "it runs dgrad and wgrad apart, which torch 2.14 cannot do with compiled layers (compile is model+loss); "
        "compile=loss or compile=none allow it"
    )


@_rule("V schedules do not evaluate", "pp_schedule")
def _evaluates(facts: Facts) -> str | None:
    in_v = facts.pp > 1 and facts.schedule is not None and facts.schedule.style == "v"
    if not in_v or facts.experiment.dataset != "python":
        return None
    return (
        "dataset=python evaluates held-out text after the last step, which torch 2.14 cannot do under a V "
        "schedule; dataset=c4 only trains"
    )


# --- the sequence ----------------------------------------------------------------------------------------------------
# TorchTitan checks evenness when the trainer starts; torch checks the blocks of the attention mask under context
# parallelism with the first batch, and the loss its chunks.


def _even_multiple(facts: Facts) -> int:
    """Tokens that TorchTitan's sequence and context parallelism need: two chunks a rank for load balance."""
    return facts.tp * (2 * facts.cp if facts.cp > 1 else 1)


def _mask_multiple(facts: Facts) -> int:
    return FLEX_BLOCK * facts.cp if facts.cp > 1 else 1


def _loss_multiple(facts: Facts) -> int:
    return LOSS_CHUNKS * facts.cp


def _near_lengths(facts: Facts) -> str:
    """The nearest lengths that keep all three rules."""
    multiple = math.lcm(_even_multiple(facts), _mask_multiple(facts), _loss_multiple(facts))
    below = facts.seq_len // multiple * multiple
    values = [value for value in (below, below + multiple) if 8 <= value <= ROPE_TOKENS[facts.shape.name]]
    return f"nearest legal seq_len: {' or '.join(map(str, values))}" if values else "reduce tp or cp"


@_rule("sequence is cut evenly", "seq_len", offers_choices=False)
def _even_sequence(facts: Facts) -> str | None:
    parts = _even_multiple(facts)
    if facts.seq_len % parts == 0:
        return None
    chunks = f"tp {facts.tp}" + (f" * 2 * cp {facts.cp}" if facts.cp > 1 else "")
    return f"sequence and context parallelism cut it into {chunks} = {parts} equal parts; {_near_lengths(facts)}"


@_rule("mask is cut in blocks", "seq_len", offers_choices=False)
def _mask_blocks(facts: Facts) -> str | None:
    multiple = _mask_multiple(facts)
    if facts.seq_len % multiple == 0:
        return None
    return (
        f"context parallelism shards FlexAttention's mask in blocks of {FLEX_BLOCK} tokens, so it must be a multiple "
        f"of {FLEX_BLOCK} * cp {facts.cp} = {multiple}; {_near_lengths(facts)}"
    )


@_rule("loss is cut evenly", "seq_len", offers_choices=False)
def _loss_chunks(facts: Facts) -> str | None:
    multiple = _loss_multiple(facts)
    if facts.seq_len % multiple == 0 or not _mask_blocks.holds(facts):  # whose blocks are multiples
        return None
    return f"the loss cuts a rank's share of it into {LOSS_CHUNKS} equal chunks; {_near_lengths(facts)}"


@_rule("context parallelism has FlexAttention", "cp")
def _flex_attention(facts: Facts) -> str | None:
    if facts.cp == 1 or facts.capability != 0:
        return None
    return (
        f"context parallelism shards FlexAttention's mask, and {facts.gpu_in_words}: on a CPU, which has no backward "
        "pass of FlexAttention, masked attention takes its place"
    )


@_rule("forced routing has plain scores", "tp")
def _forced_routing(facts: Facts) -> str | None:
    """On a GPU (``spmd_types``) the scores are plain tensors under tensor parallelism too."""
    routing = facts.experiment.routing
    if facts.tp == 1 or routing is Routing.LEARNED or facts.capability != 0:
        return None
    return (
        f"routing {routing.value} gathers the router's scores by plain numbers of experts, and {facts.gpu_in_words}: "
        "on a CPU tensor parallelism makes the scores DTensors, which do not mix; routing=learned runs"
    )


@_rule("rotary embedding reaches", "seq_len", offers_choices=False)
def _rope(facts: Facts) -> str | None:
    reach = ROPE_TOKENS[facts.shape.name]
    if facts.seq_len <= reach:
        return None
    return f"the rotary embedding of {facts.shape.name} reaches {reach} tokens; legal seq_len: up to {reach}"


# --- the arm: dispatcher, precision, compilation and checkpointing ----------------------------------------------------


@_rule("dispatcher needs ep", "ep")
def _dispatcher_needs_ep(facts: Facts) -> str | None:
    if facts.ep > 1 or facts.ep_backend is EPBackend.STANDARD:
        return None
    return (
        f"ep_backend {facts.ep_backend.value} moves tokens between expert-parallel ranks and needs at least 2; "
        "ep_backend=standard runs without expert parallelism"
    )


@_rule("minimal_async_ep is not quantised", "ep_backend")
def _padded(facts: Facts) -> str | None:
    if not facts.quantised or facts.ep_backend in PADS:
        return None
    return (
        f"quantised experts (precision {facts.precision.value}) need a dispatcher that pads each expert's tokens, "
        f"and this one does not; those that do: {', '.join(PADS)}"
    )


@_rule("DeepEP takes the tokens", "ep_backend")
def _deepep(facts: Facts) -> str | None:
    """:mod:`moelab.deepep.buffer` refuses the same once more before its kernels run; emulation takes any features."""
    if facts.ep_backend is not EPBackend.DEEPEP:
        return None
    top_k, dim, name = facts.shape.top_k, facts.shape.dim, facts.shape.name
    if top_k > MAX_TOP_K:
        return f"DeepEP takes at most {MAX_TOP_K} experts of a token, and {name} routes to {top_k}"
    if facts.dispatch_precision == "mxfp8" and dim % PACKED_FEATURES:
        return (
            f"DeepEP moves MXFP8 scales four at a time, of {PACKED_FEATURES} features, and {name} has {dim}; "
            "dispatch_precision=bf16 has no scales"
        )
    if facts.ep_kernels == "native" and dim % COMBINE_FEATURES:
        return (
            f"DeepEP combines tokens of a multiple of {COMBINE_FEATURES} features, and {name} has {dim}; "
            "ep_kernels=emulated takes any"
        )
    return None


@_rule("minimal_async_ep recomputes", "activation_checkpoint")
def _minimal_recomputes(facts: Facts) -> str | None:
    if facts.ep_backend is not EPBackend.MINIMAL_ASYNC_EP or facts.activation_checkpoint == "full":
        return None
    return "ep_backend minimal_async_ep reuses one buffer and needs every layer recomputed"


@_rule("minimal_async_ep stays in a node", "ep")
def _minimal_in_a_node(facts: Facts) -> str | None:
    per_node = facts.experiment.gpus_per_node
    if facts.ep_backend is not EPBackend.MINIMAL_ASYNC_EP or per_node % facts.ep == 0:
        return None
    return (
        "ep_backend minimal_async_ep writes into its peers' memory over NVLink, so the expert-parallel ranks must "
        f"lie in one node (gpus_per_node {per_node})"
    )


@_rule("dispatch is kept", "activation_checkpoint")
def _kept_dispatch(facts: Facts) -> str | None:
    if facts.activation_checkpoint != "full+dispatch" or facts.ep_backend is not EPBackend.STANDARD or facts.ep == 1:
        return None
    if facts.compile == "model+loss" or facts.dispatch_precision != "bf16" or not facts.capability:
        return None
    return (
        "uncompiled, TorchTitan's standard all-to-all on a GPU is no operator whose result a checkpoint can keep; "
        "compile=model+loss makes it one, and ep_backend=deepep always is"
    )


@_rule("dispatch is quantised as its experts", "dispatch_precision")
def _quantised_dispatch(facts: Facts) -> str | None:
    sent, backend = facts.dispatch_precision, facts.ep_backend
    if sent == "bf16":
        return None
    if sent not in SENDS[backend]:
        others = ", ".join(other for other, formats in SENDS.items() if sent in formats)
        return f"{backend.value} sends tokens in {' or '.join(SENDS[backend])} only; those that send {sent}: {others}"
    if facts.precision.value != sent:
        return f"tokens travel in the experts' own format or in bf16, and precision is {facts.precision.value}"
    if facts.ep == 1:
        return "without expert parallelism (ep 1) no token travels"
    if facts.precision is Precision.MXFP8 and facts.wgrad != "bf16":
        return (
            "tokens that arrive quantised along their features cannot be scaled along the tokens, as an MXFP8 weight "
            "gradient needs; wgrad=bf16 allows it"
        )
    return None


@_rule("weight gradients are in FP8 with FP8 experts", "wgrad")
def _fp8_wgrad(facts: Facts) -> str | None:
    if facts.wgrad != "fp8" or facts.precision is Precision.FP8:
        return None
    return f"wgrad fp8 is of FP8 experts, and precision is {facts.precision.value}"


@_rule("attention runs here", "attention_backend")
def _attention(facts: Facts) -> str | None:
    backend = facts.attention_backend
    if backend == "flex" or facts.capability is None:
        return None
    if not facts.capability:
        return f"attention_backend {backend} is for GPUs, and {facts.gpu_in_words}"
    if facts.cp > 1 and backend == "varlen":
        return "TorchTitan 0.3.0 has no context parallelism for varlen attention"
    return None


@_rule("quantised linears are whole", "quantize")
def _quantised_linears(facts: Facts) -> str | None:
    if facts.quantize == "experts" or not facts.quantised or facts.tp == 1:
        return None
    return f"quantised linears are for tp 1 only (tp is {facts.tp})"


@_rule("expert blocks are whole", "tp")
def _expert_blocks(facts: Facts) -> str | None:
    hidden = facts.shape.moe_hidden_dim
    if facts.ep > 1 or facts.tp == 1 or hidden % (facts.tp * BLOCK[facts.precision]) == 0:
        return None
    return (
        f"without expert parallelism (ep 1) it cuts the {hidden} hidden features of each "
        f"expert, and {facts.precision.value} needs multiples of {BLOCK[facts.precision]}"
    )


@_rule("expert blocks are whole", "precision")
def _weight_blocks(facts: Facts) -> str | None:
    """Dimensions of quantised weights; others, such as a head's, follow or are fixed."""
    if not facts.quantised:
        return None
    linears = ("q_lora_rank", "kv_lora_rank", "dense_hidden_dim") if facts.quantize != "experts" else ()
    sizes = {name: getattr(facts.shape, name) for name in ("dim", "moe_hidden_dim", *linears)}
    block = BLOCK[facts.precision]
    broken = [f"{name} is {size}" for name, size in sizes.items() if size % block]
    return f"it needs multiples of {block} features, and {', '.join(broken)}" if broken else None


@_rule("vocabulary holds the tokenizer", "dataset", offers_choices=False)
def _vocabulary(facts: Facts) -> str | None:
    tokens, size = tokenizer_size(facts.experiment), facts.shape.vocab_size
    if size >= tokens:
        return None
    return f"its tokenizer has {tokens} tokens, and vocab_size is {size}; legal vocab_size: {tokens} or more"


# --- the GPU; None is no verdict --------------------------------------------------------------------------------------


@_rule("GPU has FP8", "precision")
def _fp8_gpu(facts: Facts) -> str | None:
    if facts.precision is not Precision.FP8 or facts.capability is None or has_grouped_fp8(facts.capability):
        return None
    return f"FP8 grouped GEMMs need SM90 or SM100, and {facts.gpu_in_words}; precision=mxfp8 runs anywhere, emulated"


@_rule("GPU has MXFP8", "mxfp8_kernels", offers_choices=False)
def _mxfp8_gpu(facts: Facts) -> str | None:
    native = facts.precision is Precision.MXFP8 and facts.experiment.mxfp8_kernels == "native"
    if not native or facts.capability is None or has_native_mxfp8(facts.capability):
        return None
    here = facts.gpu_in_words
    return f"torchao's MXFP8 kernels are for SM100 and SM103, and {here}. Legal mxfp8_kernels: auto, emulated"


@_rule("dispatcher needs CUDA", "ep_backend")
def _cuda(facts: Facts) -> str | None:
    """What the dispatcher needs: CUDA, and for DeepEP's kernels an SM version of theirs."""
    backend, capability = facts.ep_backend, facts.capability
    deepep, minimal = backend is EPBackend.DEEPEP, backend is EPBackend.MINIMAL_ASYNC_EP
    if capability is None or backend is EPBackend.STANDARD or (deepep and facts.ep_kernels == "emulated"):
        return None
    if bool(capability) and capability not in ROCM if minimal else has_deepep(capability):
        return None
    versions = "" if minimal else " and SM90, SM100 or SM103"
    emulated = "; ep_kernels=emulated has its numerics on any device" if deepep else ""
    return f"it needs CUDA{versions}, and {facts.gpu_in_words}{emulated}"


@_rule("memory snapshots are CUDA's", "memory_snapshot", offers_choices=False)
def _snapshot(facts: Facts) -> str | None:
    if not facts.experiment.memory_snapshot:
        return None
    if not facts.experiment.trace_step:
        return "it is of the traced step, and trace_step is 0; give trace_step a step of this run"
    if facts.capability != 0:
        return None
    return f"it is of CUDA's allocator, and {facts.gpu_in_words}; trace_step alone works on a processor too"


RULES: tuple[Rule, ...] = (
    *map(_axis_rule, AXES),
    _dp_shard,
    _heads,
    _region,
    _experts,
    _even_shards,
    _schedule,
    _turns,
    _stages,
    _whole_microbatches,
    _microbatches,
    _split_backward,
    _evaluates,
    _even_sequence,
    _mask_blocks,
    _loss_chunks,
    _flex_attention,
    _forced_routing,
    _rope,
    _dispatcher_needs_ep,
    _padded,
    _deepep,
    _minimal_recomputes,
    _minimal_in_a_node,
    _kept_dispatch,
    _quantised_dispatch,
    _fp8_wgrad,
    _attention,
    _quantised_linears,
    _expert_blocks,
    _weight_blocks,
    _vocabulary,
    _fp8_gpu,
    _mxfp8_gpu,
    _cuda,
    _snapshot,
)
"""All rules in the order in which they are told."""


@dataclass(frozen=True, kw_only=True)
class LayoutCheck:
    """The verdict on an experiment.

    Attributes:
        reasons: why it is not legal, every one; empty if it is. Each begins with the field at fault and what was given.
        notes: what a person should know of a legal one too, such as padding that is raised.
        layout: None if it cannot be resolved.
    """

    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    layout: Layout | None

    @property
    def legal(self) -> bool:
        """Whether TorchTitan can train it, memory aside."""
        return not self.reasons


def check(experiment: Experiment, *, gpu: Gpu | None = None) -> LayoutCheck:
    """Judge an experiment.

    Args:
        experiment: what a person wants to run, on any number of nodes.
        gpu: judge for this machine's GPU (of capability 0 for none), and not for that of the experiment's hardware.

    Returns:
        The verdict. It says nothing about memory.

    Raises:
        BadInput: if its hardware profile does not exist.

    Example:
        >>> from moelab.experiment import Experiment
        >>> print(check(Experiment(gpus_per_node=4, ep=3)).reasons[0])
        ep is 3: it must divide the ranks it shares out, dp_shard 4 * cp 1 * tp 1 = 4. Legal ep: 1, 2, 4
    """
    facts = facts_of(experiment, gpu)
    reasons = {rule: reason for rule in RULES if (reason := rule.reason(facts))}
    return LayoutCheck(
        reasons=tuple(reasons.values()),
        notes=tuple(note for write in NOTES if (note := write(facts))),
        layout=None if any(rule.shapes_layout for rule in reasons) else resolve(facts),
    )


# --- what is worth knowing of a legal layout --------------------------------------------------------------------------


def _plan_only_note(facts: Facts) -> str | None:
    return facts.shape.plan_only


def _cluster_note(facts: Facts) -> str | None:
    """Whether a named profile has the ranks; on the machine at hand that is for ``moelab run`` to say."""
    cluster = cluster_of(facts.experiment.hardware)
    if cluster.name in ("local", "cpu") or facts.world_size <= cluster.gpus:
        return None
    return f"hardware: {cluster.name} has {cluster.gpus} GPUs, and this takes {facts.world_size}"


def _emulation_note(facts: Facts) -> str | None:
    if facts.ep_backend is not EPBackend.DEEPEP or facts.ep_kernels != "emulated":
        return None
    return "dispatcher: DeepEP is emulated on plain collectives: its numerics, not its speed"


def _padding_note(facts: Facts) -> str | None:
    if not facts.quantised:
        if facts.ep_backend is not EPBackend.DEEPEP:
            return None
        return f"padding: each expert's tokens are padded to a multiple of {GROUP_PADDING['bf16']}"
    default = GROUP_PADDING["fp8" if facts.precision is Precision.FP8 else "mxfp8_emulated"]
    native = GROUP_PADDING["mxfp8_native"]
    kernels = facts.experiment.mxfp8_kernels
    raised = f"{default} tokens raised to {native}, which torchao's quantisation kernel needs on SM100"
    plain = f"each expert's tokens are padded to a multiple of {default}"
    if facts.precision is Precision.FP8 or kernels == "emulated":
        return f"padding: {plain}"
    if kernels == "native" or has_native_mxfp8(facts.capability):
        return f"padding: {raised}"
    if facts.capability is None:
        return f"padding: {plain} where MXFP8 is emulated; {raised}"
    return f"padding: {plain}, emulated"


def _rocm_note(facts: Facts) -> str | None:
    if facts.capability not in ROCM:
        return None
    mxfp8 = "; torchao 0.18.0 has MXFP8 kernels for it" if has_native_mxfp8(facts.capability) else ""
    return f"hardware: {architecture(facts.capability)} is AMD's, on ROCm{mxfp8}; moelab has not run there"


def _cuda_graphs_note(facts: Facts) -> str | None:
    """Where TorchTitan's default, CUDA graphs on, would be refused."""
    waits = facts.ep > 1 and facts.ep_backend is not EPBackend.MINIMAL_ASYNC_EP
    if facts.pp == 1 and not waits:
        return None
    cause = "pipeline parallelism" if facts.pp > 1 else f"ep_backend {facts.ep_backend.value}, which waits for the host"
    return f"cuda graphs: off; TorchTitan 0.3.0 does not support them with {cause}"


def _microbatch_note(facts: Facts) -> str | None:
    if facts.pp > 1 or facts.microbatch == facts.local_batch or facts.local_batch == 1:
        return None
    return (
        f"microbatch: {facts.microbatch} is for pipeline parallelism only; without it the {facts.local_batch} "
        "sequences of local_batch go forward at once"
    )


def _loss_note(facts: Facts) -> str | None:
    schedule = facts.schedule
    if facts.pp == 1 or schedule is None or facts.world_size % facts.pp:
        return None
    rank = rank_with_loss(schedule, facts.pp) * (facts.world_size // facts.pp)
    said = f"loss: global rank {rank} holds it; the other pipeline ranks print -1"
    if schedule.name == "DualPipeV":
        wrong = (facts.pp - 1) * (facts.world_size // facts.pp)
        return f"{said}, and rank {wrong}, which TorchTitan 0.3.0 takes for TensorBoard and W&B, is one of them"
    return said


def _nodes_note(facts: Facts) -> str | None:
    """What of the exchange leaves the node: over NVLink within a rack such as NVL72, else over the network."""
    per_node, joined = facts.experiment.gpus_per_node, facts.nvlink_ranks
    if facts.ep == 1 or per_node % facts.ep == 0:
        return None
    if joined == per_node:
        return (
            f"traffic: ep {facts.ep} does not fit into a node of {per_node}, so tokens cross the network between nodes"
        )
    domain = cluster_of(facts.experiment.hardware).node.domain
    placed = f"{joined // per_node} nodes of each NVLink domain of {domain} (sbatch --segment={joined // per_node})"
    if joined % facts.ep == 0:
        return f"traffic: ep {facts.ep} stays within NVLink where the job has {placed}"
    return f"traffic: ep {facts.ep} does not fit into {placed}, so tokens cross the network between them"


def _routing_note(facts: Facts) -> str | None:
    if facts.experiment.routing is not Routing.ROUND_ROBIN or facts.ep == 1 or facts.shape.num_experts % facts.ep:
        return None
    ranks = _ranks_a_token(facts.shape.num_experts, facts.shape.top_k, facts.ep)
    return (
        f"traffic: round_robin sends a token's {facts.shape.top_k} copies to {ranks:.3g} of {facts.ep} "
        "ranks, far fewer than a trained router; use routing=random_balanced for a benchmark that does not flatter"
    )


@lru_cache(maxsize=256)
def _ranks_a_token(experts: int, top_k: int, ep: int) -> float:
    """Distinct ranks that TorchTitan's round-robin sends a token to, averaged over tokens."""
    local = experts // ep
    starts = range(0, experts, math.gcd(experts, top_k))
    reached = [len({(start + copy) % experts // local for copy in range(top_k)}) for start in starts]
    return sum(reached) / len(reached)


def _warmup_note(facts: Facts) -> str | None:
    steps, warmup = facts.experiment.steps, facts.experiment.warmup_steps
    if warmup <= steps:
        return None
    return f"learning rate: TorchTitan shortens warmup_steps {warmup} to the {steps} steps of this run"


NOTES = (
    _plan_only_note,
    _cluster_note,
    _rocm_note,
    _emulation_note,
    _padding_note,
    _cuda_graphs_note,
    _microbatch_note,
    _loss_note,
    _nodes_note,
    _routing_note,
    _warmup_note,
)
"""What is worth knowing, each as a function that says it or None."""
