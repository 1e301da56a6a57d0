"""Every parameter of a model: its name, its shape, and the dimension that tensor parallelism shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from moelab.model.shape import EMBEDDING, HEAD, NORM, ModelShape

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
