"""Time of all matrix products of one layer, or of the head, for one micro-batch on one rank.

What a layer multiplies depends on the model and its degrees alone and is derived once; only rows grow with the tokens.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import NamedTuple

from moelab.model import ModelShape, gemms
from moelab.projection.costs import PassName, Times, add, nothing
from moelab.projection.gemm_rate import Rates, gemm_time_s, grouped_time_s

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention.wq_b", "attention.wo", "feed_forward.w3", "moe.shared_experts.w3", "moe.routed_experts"),
    "full": ("",),
    "full+dispatch": ("",),
    "mla+mlp": ("attention.wq_b", "attention.wkv_b", "feed_forward"),
}
"""Beginnings of the names of products that are computed again in the backward pass; of ``selective``, about every
second one and the routed experts."""
UNQUANTISED = ("head", "router", "routed experts")
"""Parts whose products are not quantised with the linears."""


class Weight(NamedTuple):
    """A weight that multiplies: ``rows`` of tokens by (k, n), once for each of ``groups``.

    ``rows`` are those of ``tp`` tokens, one for each tensor-parallel rank.
    """

    name: str
    part: str
    rows: int
    n: int
    k: int
    groups: int


class ProductKinds(NamedTuple):
    """What decides a product's rate beside its size.

    Attributes:
        low: whether experts multiply in 8 bits.
        bf16_wgrad: of the experts' weight gradients, which are BF16 all the same: ``all``, ``first two`` or ``none``.
        low_linears: whether linears multiply in 8 bits.
        library: whether experts multiply one after the other at the rate of large products.
    """

    low: bool
    bf16_wgrad: str
    low_linears: bool
    library: bool


@functools.lru_cache(maxsize=1024)
def weights_by_module(shape: ModelShape, tp: int, ep: int) -> dict[str, tuple[Weight, ...]]:
    """Weights of one ``attention``, ``moe`` and ``feed_forward``, and of the ``head``, each once."""
    found: defaultdict[str, dict[str, Weight]] = defaultdict(dict)
    for one in gemms(shape, tp, tp=tp, ep=ep):
        if one.direction == "forward":
            module = "head" if one.part == "head" else one.name.partition(".")[0]
            found[module][one.name] = Weight(one.name, one.part, one.m, one.n, one.k, one.groups)
    return {module: tuple(weights.values()) for module, weights in found.items()}


def recomputed(weight: Weight, checkpointing: str) -> bool:
    """Whether its forward product is computed again in the backward pass."""
    return weight.part != "head" and weight.name.startswith(RECOMPUTED[checkpointing])


@functools.lru_cache(maxsize=4096)
def product_times(
    weights: tuple[Weight, ...], share: int, checkpointing: str, kinds: ProductKinds, rates: Rates
) -> Times:
    """Products of one module; not to be written to.

    Args:
        weights: of the module.
        share: tokens of the micro-batch for each tensor-parallel rank.
        checkpointing: says which products are computed again.
        kinds: precision and kernels.
        rates: of the GPU.
    """
    sums: defaultdict[tuple[PassName, str], float] = defaultdict(float)
    for weight in weights:
        expert = weight.part == "routed experts"
        category = "expert GEMMs" if expert else "other GEMMs"
        forward, dgrad, wgrad = (
            _of_experts(weight, share, kinds, rates) if expert else _dense(weight, share, kinds, rates)
        )
        sums["forward", category] += forward
        sums["dgrad", category] += dgrad
        sums["wgrad", category] += wgrad
        if recomputed(weight, checkpointing):
            sums["recompute", category] += forward
    times = nothing()
    for (pass_name, category), seconds in sums.items():
        add(times, pass_name, category, seconds)
    times.flags.writeable = False
    return times


def _dense(weight: Weight, share: int, kinds: ProductKinds, rates: Rates) -> tuple[float, float, float]:
    """Seconds of forward, dgrad and wgrad."""
    m, n, k, groups = weight.rows * share, weight.n, weight.k, weight.groups
    low = kinds.low_linears and weight.part not in UNQUANTISED
    return (
        gemm_time_s(m, n, k, groups, rates, low=low, wgrad=False),
        gemm_time_s(m, k, n, groups, rates, low=low, wgrad=False),
        gemm_time_s(n, k, m, groups, rates, low=low, wgrad=True),
    )


def _of_experts(weight: Weight, share: int, kinds: ProductKinds, rates: Rates) -> tuple[float, float, float]:
    m, n, k, groups = weight.rows * share, weight.n, weight.k, weight.groups
    time_s = gemm_time_s if kinds.library else grouped_time_s
    in_bf16 = kinds.bf16_wgrad == "all" or (kinds.bf16_wgrad == "first two" and "w2" not in weight.name)
    return (
        time_s(m, n, k, groups, rates, low=kinds.low, wgrad=False),
        time_s(m, k, n, groups, rates, low=kinds.low, wgrad=False),
        time_s(n, k, m, groups, rates, low=kinds.low and not in_bf16, wgrad=True),
    )
