"""What a layer costs one rank: what it keeps for its backward pass, and what it needs for a moment while it runs.

Each list names the tensors that autograd saves in one layer under TorchTitan 0.3.0, with their bytes, as its modules
and PyTorch's autograd formulas give them (``torchtitan/models/deepseek_v3/model.py`` and ``models/common/``, there
``moe.py``, ``token_dispatcher.py``, ``feed_forward.py``, ``attention.py``). The lists were then held against what
PyTorch's allocator said was alive at the end of a forward pass on an H100 (``benchmarks/memory_h100.py``): a compiled
layer keeps the same tensors, except that outputs of experts are combined in BF16 and SiLU's output is recomputed.
With moelab's DeepEP dispatcher (``moelab/deepep``) the rows arrive in the experts' order and are kept once, and the
experts' outputs are not kept, because the scores are applied before the last product. moelab's quantised experts keep
gate and up, and make their product again (``moelab/mxfp8/experts.py``).

Letters: ``t`` tokens of the micro-batch on this rank's sequence, ``s`` the share of them that sequence parallelism
leaves in the residual stream, ``n`` routed copies that this rank sends, ``r`` rows that its experts receive.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from moelab.experiment import ActivationCheckpoint, EPBackend, Precision
from moelab.layout.sharding import Degrees, Held, module_held
from moelab.model import ModelShape

BF16, FP32, INT32, INT64 = 2, 4, 4, 8


@dataclass(frozen=True)
class Work:
    """How much of each tensor one rank has in one micro-batch."""

    tokens: int  # of the micro-batch on this rank's data-parallel and context-parallel coordinate
    tp: int = 1  # tensor-parallel degree; with more than 1, TorchTitan shards the residual stream along the sequence
    cp: int = 1  # context-parallel degree; keys and values are gathered over it
    ep: int = 1
    imbalance: float = 1.0  # received rows relative to perfect balance
    scaling_bytes: int = FP32
    """Of each element of the experts' outputs when they are scaled by their scores: TorchTitan's own dispatchers do
    it in FP32, the others in BF16, and a compiled layer keeps BF16."""
    pad_multiple: int = 1  # rows to a multiple of which each expert's group is padded
    backend: EPBackend = EPBackend.STANDARD
    row_bytes: float = BF16
    """Of each feature of a row as it arrives, its share of the scales included; less than 2 with quantised dispatch."""
    one_pass_experts: bool = False  # whether an expert's three products are one function, moelab's of 8 bits
    scaled_products: bool = False
    """Whether experts multiply in 8 bits, by an operator of which selective checkpointing keeps every product."""

    @property
    def quantised_dispatch(self) -> bool:
        """Whether rows arrive quantised."""
        return self.row_bytes < BF16

    @property
    def residual(self) -> int:
        """Tokens in the residual stream."""
        return self.tokens // self.tp

    @property
    def routed_tokens(self) -> int:
        """Tokens that this rank routes: its share of the sequence under expert parallelism."""
        return self.residual if self.ep > 1 else self.tokens

    def sent(self, shape: ModelShape) -> int:
        """Routed copies of tokens."""
        return self.routed_tokens * shape.top_k

    def received(self, shape: ModelShape) -> int:
        """Rows of the experts' input, half a padding multiple for each local expert included."""
        padding = shape.num_experts // self.ep * (self.pad_multiple // 2)
        imbalance = self.imbalance if self.ep > 1 else 1.0
        return round(self.sent(shape) * imbalance) + padding


@functools.lru_cache(maxsize=65_536)
def saved_without_checkpointing(shape: ModelShape, *, moe: bool, work: Work, compiled: bool) -> Mapping[str, float]:
    """Bytes of every tensor that one layer keeps for its backward pass."""
    tensors = _attention(shape, work)
    tensors |= _moe(shape, work, compiled=compiled) if moe else _ffn(shape, work, compiled=compiled)
    return MappingProxyType(tensors)


def _attention(shape: ModelShape, work: Work) -> dict[str, float]:
    t, s, heads, kv_heads = work.tokens, work.residual, shape.n_heads // work.tp, shape.kv_heads // work.tp
    qk, v = shape.qk_head_dim, shape.v_head_dim
    # Latents are expanded to keys without their rotary part and to values; grouped queries have values of their own.
    expanded = v if shape.grouped_queries else shape.qk_nope_head_dim + v
    tensors: dict[str, float] = {
        "layer input": BF16 * s * shape.dim,
        "normed layer input": BF16 * t * shape.dim,
        "latents": BF16 * t * (shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim),
        "normed latents": BF16 * t * (shape.q_lora_rank + shape.kv_lora_rank),
        "rotary angles": FP32 * t * shape.qk_rope_head_dim,
        "keys and values before attention": BF16 * t * kv_heads * expanded,
        "queries": BF16 * t * heads * qk,
        "keys": BF16 * t * work.cp * kv_heads * qk,
        "attention output": BF16 * t * heads * v,
        "attention log-sum-exp": FP32 * t * heads,
        "residual after attention": BF16 * s * shape.dim,
    }
    if work.cp > 1:
        tensors["gathered values"] = BF16 * t * work.cp * kv_heads * v
    if shape.qk_norm:
        tensors["queries and keys before their norm"] = BF16 * t * (heads + kv_heads) * qk
    return tensors


def _ffn(shape: ModelShape, work: Work, *, compiled: bool) -> dict[str, float]:
    hidden = BF16 * work.tokens * shape.dense_hidden_dim / work.tp
    return {
        "FFN input": float(BF16 * work.tokens * shape.dim),
        "FFN gate, up and product": 3 * hidden,
        "FFN activation": 0.0 if compiled else hidden,
    }


def _moe(shape: ModelShape, work: Work, *, compiled: bool) -> dict[str, float]:
    r, routed = work.received(shape), work.routed_tokens
    hidden = float(BF16 * r * shape.moe_hidden_dim)
    shared = BF16 * work.tokens * shape.shared_hidden_dim / work.tp
    tensors = {
        "MoE input": float(BF16 * routed * shape.dim),
        "router input in FP32": float(FP32 * routed * shape.dim),
        "router scores": float(FP32 * routed * shape.num_experts),
        "routing indices": _routing_indices(shape, work),
        "experts' input": work.row_bytes * r * shape.dim,
        "experts' gate, up and product": (2 if work.one_pass_experts else 3) * hidden,
        "shared gate, up and product": 3 * shared,
    }
    scored_inside = work.backend is EPBackend.DEEPEP
    if not scored_inside:
        tensors["outputs to be scaled"] = float(work.scaling_bytes * work.sent(shape) * shape.dim)
    if compiled:
        tensors["sum of routed outputs"] = float(BF16 * routed * shape.dim)
    else:
        tensors["activations of experts"] = hidden * (not work.one_pass_experts) + shared
        tensors["products to be scaled in FP32"] = 2 * hidden * (scored_inside and not work.one_pass_experts)
    if work.tp > 1 and work.ep > 1:
        tensors["shared experts' input"] = float(BF16 * work.tokens * shape.dim)
    return tensors


def _routing_indices(shape: ModelShape, work: Work) -> float:
    """Where each row came from: TorchTitan's sorted indices, or DeepEP's handle and the rows' scores."""
    n, r = work.sent(shape), work.received(shape)
    if work.backend is not EPBackend.DEEPEP:
        return float(INT64 * (4 * n + r))
    tokens_received = min(work.ep, shape.top_k) * work.routed_tokens
    return float((INT64 + INT32) * n + INT32 * (shape.top_k + 2) * tokens_received + FP32 * r)


def arrived(shape: ModelShape, work: Work) -> Mapping[str, float]:
    """Bytes of what the dispatch and the combine of one layer bring over the network, by name.

    Names that are those of :func:`saved_without_checkpointing` are the same tensors.
    """
    if work.ep == 1:
        return {}
    rows = work.row_bytes * work.received(shape) * shape.dim
    if work.backend is EPBackend.STANDARD:
        return {"rows by sender": rows, "outputs to be scaled": float(BF16 * work.sent(shape) * shape.dim)}
    sums = float(BF16 * work.routed_tokens * shape.dim)
    return {"experts' input": rows, "sum of routed outputs": sums, "routing indices": _routing_indices(shape, work)}


@functools.lru_cache(maxsize=65_536)
def saved(
    shape: ModelShape,
    *,
    moe: bool,
    work: Work,
    compiled: bool,
    checkpointing: ActivationCheckpoint,
    scaled_linears: bool = False,
) -> float:
    """Bytes that one layer keeps from its forward to its backward pass under activation checkpointing.

    ``selective`` keeps the layer's input, attention's output, and the output of every second matrix product
    (``torchtitan/distributed/activation_checkpoint.py``). Where attention alone is compiled, it is one operator, whose
    operands are kept with its output; a compiled layer computes them again (two H200s, five and ten layers: 1.3 GiB of
    each). Products of quantised linears (``scaled_linears``) are another operator, of which it keeps every one. Grouped
    products in BF16 are not on its list, so that such experts are recomputed whole; those in 8 bits are on moelab's
    (``moelab/deepep/checkpoint.py``): gate and up are kept, and without compilation, which drops what the backward pass
    does not read, the experts' outputs too. What arrived is kept as well where the dispatcher's communication is an
    operator (:func:`keeps_arrived`).
    ``full+dispatch`` keeps the layer's input and what arrived.
    """
    tensors = saved_without_checkpointing(shape, moe=moe, work=work, compiled=compiled)
    if checkpointing == "none":
        return sum(tensors.values())
    kept = tensors["layer input"]
    if moe and keeps_arrived(work, compiled=compiled, checkpointing=checkpointing):
        kept += sum(arrived(shape, work).values())
    if checkpointing != "selective":
        return kept
    kept += sum(tensors.get(name, 0.0) for name in (*_ATTENTION_OUTPUTS, *(() if compiled else _ATTENTION_OPERANDS)))
    if moe and work.scaled_products:
        kept += BF16 * work.received(shape) * (2 * shape.moe_hidden_dim + (0 if compiled else shape.dim))
    # TorchTitan's policy keeps every second matrix product, and another operator each time.
    every = 1 if scaled_linears else 2
    products = _matrix_products(shape, moe=moe, tp=work.tp, with_operands=compiled)
    return kept + sum(BF16 * work.tokens * width for width in products[::every])


def keeps_arrived(work: Work, *, compiled: bool, checkpointing: ActivationCheckpoint) -> bool:
    """Whether a layer keeps what arrived and does not communicate again.

    TorchTitan's standard all-to-all is an operator that can be kept in a compiled layer only; the quantised one always.
    """
    operator = compiled or work.quantised_dispatch or work.backend is not EPBackend.STANDARD
    return operator and checkpointing in ("selective", "full+dispatch")


_ATTENTION_OUTPUTS = ("attention output", "attention log-sum-exp")
_ATTENTION_OPERANDS = ("queries", "keys", "gathered values", "keys and values before attention")


def _matrix_products(shape: ModelShape, *, moe: bool, tp: int, with_operands: bool) -> list[float]:
    """Output features on one rank of a layer's matrix products in order.

    The router's product is never kept and not counted; that of keys and values counts, but has no features here unless
    asked for ``with_operands``: it is one of attention's operands.
    """
    queries, kv_heads = shape.n_heads // tp * shape.qk_head_dim, shape.kv_heads // tp
    products: list[float] = [shape.q_lora_rank, queries] if shape.q_lora_rank else [queries]
    if shape.grouped_queries:
        products += [kv_heads * shape.qk_head_dim, with_operands * kv_heads * shape.v_head_dim, shape.dim]
    else:
        expanded = kv_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        products += [shape.kv_lora_rank + shape.qk_rope_head_dim, with_operands * expanded, shape.dim]
    hidden = (shape.shared_hidden_dim if moe else shape.dense_hidden_dim) / tp
    return products + ([hidden, hidden, shape.dim] if hidden else [])


def forward_working_set(shape: ModelShape, *, moe: bool, work: Work, compiled: bool) -> float:
    """Bytes of temporaries at the fullest moment of one layer's forward pass.

    For routed experts this is the sum of their outputs into tokens: what the all-to-all brought, its product with the
    scores (FP32 in TorchTitan's own dispatchers; a compiled layer does not write it out) and that product in BF16. With
    moelab's DeepEP dispatcher it is the experts' outputs, whose scores are applied already, and their sums.
    """
    if not moe:
        return 2 * BF16 * work.tokens * shape.dense_hidden_dim / work.tp
    if work.backend is EPBackend.DEEPEP:
        return float(BF16 * shape.dim * (work.received(shape) + work.routed_tokens))
    return float(work.sent(shape) * shape.dim * (BF16 if compiled else work.scaling_bytes + 2 * BF16))


def backward_working_set(shape: ModelShape, *, moe: bool, work: Work, compiled: bool) -> float:
    """Bytes of temporaries at the fullest moment of one layer's backward pass, gradients of weights apart.

    Uncompiled, it is the gradient of scaling the outputs by their scores: three tensors of their size. moelab's DeepEP
    dispatcher scales within the experts.
    """
    if not moe:
        return 3 * BF16 * work.tokens * shape.dense_hidden_dim / work.tp
    n, r = work.sent(shape), work.received(shape)
    experts = BF16 * r * (2 * shape.dim + 3 * shape.moe_hidden_dim)
    if work.backend is EPBackend.DEEPEP:
        return float(experts)
    scaling = n * shape.dim * (2 * BF16 if compiled else 3 * work.scaling_bytes)
    return float(max(experts, scaling))


def quantised_working_set(
    shape: ModelShape, *, precision: Precision, emulated: bool, work: Work, gathered_experts: int
) -> float:
    """Bytes of the quantised copies of one grouped product's operands, their scales included.

    torchao saves the BF16 operands for the backward pass and quantises them again there, so no quantised copy outlives
    its product (``torchao/prototype/moe_training/{fp8,mxfp8}_grouped_mm.py`` at 0.18). Emulation holds what it
    quantised and what it expanded again, with an FP32 copy of the larger operand on the way. Rows that arrive quantised
    need no copy, but one in BF16 for their weight gradient.
    """
    if precision is Precision.BF16:
        return 0.0
    rows = work.received(shape) * max(shape.dim, shape.moe_hidden_dim)
    if work.quantised_dispatch and not emulated:
        return float(max(work.received(shape) * shape.moe_hidden_dim + gathered_experts / 3, BF16 * rows))
    weights = gathered_experts / 3
    if emulated:
        return (1 + BF16) * (rows + weights) + FP32 * max(rows, weights)
    return rows + weights


@dataclass(frozen=True)
class Mode:
    """What an experiment says about how its layers run.

    ``linears`` is whether linears are quantised as well, ``busiest_layer`` the received rows of the layer that is the
    fullest moment, relative to perfect balance.
    """

    checkpointing: ActivationCheckpoint
    compiled: bool
    loss_compiled: bool
    precision: Precision
    emulated: bool
    linears: bool = False
    busiest_layer: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Bytes of one layer on one rank."""

    held: Held
    saved: float  # kept from its forward to its backward pass
    forward: float  # temporaries of its forward pass
    recomputed: float  # brought back by its backward pass under activation checkpointing
    attention: float  # what attention alone keeps without checkpointing
    backward: float  # temporaries of its backward pass
    quantised: float  # quantised copies of one product's operands


@functools.lru_cache(maxsize=65_536)
def layer_costs(shape: ModelShape, *, moe: bool, degrees: Degrees, work: Work, mode: Mode) -> LayerCosts:
    """The costs of a layer with routed experts, or of a dense one."""
    held = module_held(shape, f"layers.{shape.n_dense_layers if moe else 0}", degrees)
    kept = saved(
        shape, moe=moe, work=work, compiled=mode.compiled, checkpointing=mode.checkpointing, scaled_linears=mode.linears
    )
    # What all layers keep follows the average layer; the moment in which one layer runs, the one with most rows.
    work = replace(work, imbalance=max(work.imbalance, mode.busiest_layer))
    forward = forward_working_set(shape, moe=moe, work=work, compiled=mode.compiled)
    backward = backward_working_set(shape, moe=moe, work=work, compiled=mode.compiled)
    tensors = saved_without_checkpointing(shape, moe=moe, work=work, compiled=mode.compiled)
    everything = sum(tensors.values())
    if moe and keeps_arrived(work, compiled=mode.compiled, checkpointing=mode.checkpointing):
        # The recomputation makes the experts' own order of what is kept as it came.
        everything += sum(max(0.0, size - tensors.get(name, 0.0)) for name, size in arrived(shape, work).items())
    quantised = quantised_working_set(
        shape, precision=mode.precision, emulated=mode.emulated, work=work, gathered_experts=held.experts
    )
    return LayerCosts(
        held=held,
        saved=kept,
        forward=forward,
        # Without checkpointing the rows of a busy layer are among what all layers keep.
        recomputed=0.0 if mode.checkpointing == "none" else max(0.0, everything - kept),
        attention=sum(_attention(shape, work).values()),
        backward=backward if mode.checkpointing == "none" else max(forward, backward),
        quantised=quantised if moe else 0.0,
    )
