"""What a step computes and moves: FLOPs, GEMMs and the bytes that tokens travel with.

Letters: M, N, K of a GEMM are rows, output features, input features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from moelab.model.parameters import Part, count_parameters, parameters
from moelab.model.shape import HEAD, ModelShape

DispatchPrecision = Literal["bf16", "fp8", "mxfp8"]


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
