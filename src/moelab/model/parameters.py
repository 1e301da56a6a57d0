"""What a model is made of and what a step does with it: parameters, FLOPs, GEMMs and the bytes that tokens travel with.

Letters: M, N, K of a GEMM are rows, output features, input features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from moelab.model.shape import EMBEDDING, HEAD, NORM, ModelShape

DispatchPrecision = Literal["bf16", "fp8", "mxfp8"]
Part = Literal["attention", "dense FFN", "routed experts", "shared experts", "router", "norms", "embedding", "head"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One weight of one module of TorchTitan's model."""

    name: str  # as TorchTitan names it, inside its module
    shape: tuple[int, ...]  # of the whole tensor
    part: Part
    tp_dim: int | None = None
    """Dimension that tensor parallelism shards; None where every rank holds it whole. Routed experts are sharded by
    it only where there is no expert parallelism."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@functools.lru_cache(maxsize=4096)
def parameters(shape: ModelShape, module: str) -> tuple[Parameter, ...]:
    """The parameters of one top module, in no particular order."""
    if module == EMBEDDING:
        return (Parameter(name="weight", shape=(shape.vocab_size, shape.dim), part="embedding", tp_dim=0),)
    if module == HEAD:
        return (Parameter(name="weight", shape=(shape.vocab_size, shape.dim), part="head", tp_dim=0),)
    if module == NORM:
        return (Parameter(name="weight", shape=(shape.dim,), part="norms"),)
    layer = int(module.removeprefix("layers."))
    dense = _swiglu("feed_forward", shape, shape.dense_hidden_dim, "dense FFN")
    ffn = dense if layer < shape.n_dense_layers else _moe(shape)
    norms = [
        Parameter(name=f"{name}.weight", shape=(shape.dim,), part="norms") for name in ("attention_norm", "ffn_norm")
    ]
    return (*norms, *_attention(shape), *ffn)


def _linear(name: str, out: int, into: int, part: Part, tp_dim: int | None) -> Parameter:
    return Parameter(name=f"{name}.weight", shape=(out, into), part=part, tp_dim=tp_dim)


def _attention(shape: ModelShape) -> Iterator[Parameter]:
    """Of latent attention, down-projections are whole on every tensor-parallel rank and up-projections sharded."""
    queries, values = shape.n_heads * shape.qk_head_dim, shape.kv_heads * shape.v_head_dim
    if shape.q_lora_rank:
        yield _linear("attention.wq_a", shape.q_lora_rank, shape.dim, "attention", None)
        yield Parameter(name="attention.q_norm.weight", shape=(shape.q_lora_rank,), part="norms")
        yield _linear("attention.wq_b", queries, shape.q_lora_rank, "attention", 0)
    else:
        yield _linear("attention.wq", queries, shape.dim, "attention", 0)
    if shape.grouped_queries:
        yield _linear("attention.wk", shape.kv_heads * shape.qk_head_dim, shape.dim, "attention", 0)
        yield _linear("attention.wv", values, shape.dim, "attention", 0)
        for name in ("q_norm", "k_norm") if shape.qk_norm else ():
            yield Parameter(name=f"attention.{name}.weight", shape=(shape.qk_head_dim,), part="norms")
    else:
        yield _linear("attention.wkv_a", shape.kv_lora_rank + shape.qk_rope_head_dim, shape.dim, "attention", None)
        yield Parameter(name="attention.kv_norm.weight", shape=(shape.kv_lora_rank,), part="norms")
        keys_values = shape.n_heads * shape.qk_nope_head_dim + values
        yield _linear("attention.wkv_b", keys_values, shape.kv_lora_rank, "attention", 0)
    # Its inputs are the heads, which are sharded already; so are those of `w2`.
    yield _linear("attention.wo", shape.dim, shape.n_heads * shape.v_head_dim, "attention", 1)


def _swiglu(prefix: str, shape: ModelShape, hidden: int, part: Part) -> Iterator[Parameter]:
    yield _linear(f"{prefix}.w1", hidden, shape.dim, part, 0)
    yield _linear(f"{prefix}.w2", shape.dim, hidden, part, 1)
    yield _linear(f"{prefix}.w3", hidden, shape.dim, part, 0)


def _moe(shape: ModelShape) -> Iterator[Parameter]:
    experts, hidden = shape.num_experts, shape.moe_hidden_dim
    for name, sizes, tp_dim in (
        ("w1_EFD", (experts, hidden, shape.dim), 1),
        ("w2_EDF", (experts, shape.dim, hidden), 2),
        ("w3_EFD", (experts, hidden, shape.dim), 1),
    ):
        full = f"moe.routed_experts.inner_experts.{name}"
        yield Parameter(name=full, shape=sizes, part="routed experts", tp_dim=tp_dim)
    # Whole on every rank: each routes tokens of its own.
    yield _linear("moe.router.gate", experts, shape.dim, "router", None)
    if shape.num_shared_experts:
        yield from _swiglu("moe.shared_experts", shape, shape.shared_hidden_dim, "shared experts")


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Elements of the whole model; ``active`` counts of the routed experts only the share that a token uses."""

    by_part: dict[Part, int]
    total: int
    active: int


@functools.lru_cache(maxsize=256)
def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Count the parameters of the whole model, exactly as TorchTitan does.

    >>> from moelab.model import shape_of
    >>> f"{count_parameters(shape_of('671B')).active / 1e9:.1f} G active"
    '37.6 G active'
    """
    by_part: dict[Part, int] = {}
    for module in shape.modules:
        for parameter in parameters(shape, module):
            by_part[parameter.part] = by_part.get(parameter.part, 0) + parameter.numel
    total, experts = sum(by_part.values()), by_part["routed experts"]
    return ParameterCounts(
        by_part=by_part, total=total, active=total - experts + experts * shape.top_k // shape.num_experts
    )


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = False) -> int:
    """Floating-point operations of one training step for each token, forward and backward.

    Six for every active parameter outside the embedding, and attention's two products. TorchTitan counts attention as
    if every query met every key (``torchtitan/models/utils.py`` at 0.3.0); ``causal`` counts the half that is needed.

    >>> from moelab.model import shape_of
    >>> [round(flops_per_token(shape_of("671B"), 8192, causal=causal) / 1e9, 1) for causal in (False, True)]
    [342.6, 281.2]
    """
    counts = count_parameters(shape)
    heads = shape.n_layers * shape.n_heads * (shape.qk_head_dim + shape.v_head_dim)
    attention = 6 * heads * seq_len
    return 6 * (counts.active - counts.by_part["embedding"]) + (attention // 2 if causal else attention)


@dataclass(frozen=True)
class Gemm:
    """A product of (M, K) and (K, N) that one rank computes ``count`` times.

    Of a grouped product, M is the sum over its ``groups``; of a grouped wgrad, K is.
    """

    name: str
    part: Part
    direction: Literal["forward", "dgrad", "wgrad"]
    m: int
    n: int
    k: int
    groups: int
    count: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of all ``count`` of them."""
        return 2 * self.m * self.n * self.k * self.count


def gemms(shape: ModelShape, tokens: int, *, tp: int = 1, ep: int = 1) -> tuple[Gemm, ...]:
    """The GEMMs of forward and backward over one micro-batch on one rank, with balanced routing.

    Without parallel axes their FLOPs and those of the norms' weights and attention add up to :func:`flops_per_token`.

    ``tokens`` are of the micro-batch on this rank's data-parallel and context-parallel coordinate, before tensor
    parallelism splits the sequence. With expert parallelism each tensor-parallel rank routes its own share of them.
    """
    routed = tokens * shape.top_k // (tp if ep > 1 else 1)
    # The router runs on the sequence shard that each tensor-parallel rank routes.
    rows_of = {"routed experts": routed, "router": tokens // tp if ep > 1 else tokens}
    products: list[Gemm] = []
    for name, part, n, k, groups, count in _weights(shape, tp, ep):
        rows = rows_of.get(part, tokens)
        products += (
            Gemm(name, part, "forward", rows, n, k, groups, count),
            # The weight transposed, and then a sum over rows: K of wgrad is what M is of the others.
            Gemm(name, part, "dgrad", rows, k, n, groups, count),
            Gemm(name, part, "wgrad", n, k, rows, groups, count),
        )
    return tuple(products)


@functools.lru_cache(maxsize=256)
def _weights(shape: ModelShape, tp: int, ep: int) -> tuple[tuple[str, Part, int, int, int, int], ...]:
    """Name, part, output and input features, groups and number of every weight that multiplies on one rank."""
    counts = (("layers.0", shape.n_dense_layers), (f"layers.{shape.n_dense_layers}", shape.n_moe_layers), (HEAD, 1))
    weights = []
    for weight, count in ((weight, count) for module, count in counts if count for weight in parameters(shape, module)):
        if weight.part == "norms":
            continue
        grouped = weight.part == "routed experts"
        # Under expert parallelism experts are whole, and tensor-parallel ranks share their rows out.
        sharded = weight.tp_dim is not None and not (grouped and ep > 1)
        sizes = [size // tp if sharded and dim == weight.tp_dim else size for dim, size in enumerate(weight.shape)]
        groups = shape.num_experts // ep if grouped else 1
        n, k = sizes[-2:]
        weights.append((weight.name.removesuffix(".weight"), weight.part, n, k, groups, count))
    return tuple(weights)


BYTES_PER_ELEMENT = {"bf16": 2.0, "mxfp8": 1.0 + 1 / 32, "fp8": 1.0 + 4 / 128}
"""Bytes of one element in flight: BF16; MXFP8 with one byte of scale for 32 elements (OCP MX specification 1.0); FP8
with one FP32 scale for 128 (DeepEP's FP8 dispatch, ``deepseek-ai/DeepEP`` README)."""
