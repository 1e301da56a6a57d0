"""Time of one layer, and of the embedding and the head, for one micro-batch on one rank: pass by pass, part by part."""

from __future__ import annotations

import functools
from collections import defaultdict
from math import hypot
from typing import NamedTuple

from moelab.experiment import Precision
from moelab.hardware import Gpu
from moelab.model import Gemm, ModelShape, gemms
from moelab.projection.attention import add_attention
from moelab.projection.calibration import Calibration, ProductRates
from moelab.projection.collective import add_context_parallel, add_tensor_parallel
from moelab.projection.costs import INDEX, PassName, Times, add, nothing
from moelab.projection.gemm_rate import gemm_time_s, grouped_time_s
from moelab.projection.job import Job
from moelab.projection.memory_bound import add_accumulation, add_loss, add_memory_bound, memory_rate
from moelab.projection.moe_exchange import add_exchange
from moelab.projection.optimizer import held_by_kind
from moelab.projection.quantisation import add_expert_casts, add_linear_casts

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention.wq_b", "attention.wo", "feed_forward.w3", "moe.shared_experts.w3", "moe.routed_experts"),
    "full": ("",),
    "full+dispatch": ("",),
    "mla+mlp": ("attention.wq_b", "attention.wkv_b", "feed_forward"),
}
"""Beginnings of the names of products that are computed again in the backward pass; of ``selective``, about every
second one and the routed experts."""


def layer_times(job: Job, calibration: Calibration, *, moe: bool) -> Times:
    """One layer."""
    times = nothing()
    for module in ("attention", "moe" if moe else "feed_forward"):
        _add_gemms(times, job, calibration, module)
    add_attention(times, job, calibration)
    add_memory_bound(times, job, calibration, moe=moe)
    add_tensor_parallel(times, job, calibration)
    add_context_parallel(times, job, calibration)
    if moe:
        add_exchange(times, job, calibration)
        add_expert_casts(times, job, calibration, recomputed=job.checkpointing not in ("none", "mla+mlp"))
    held = held_by_kind(job)["moe" if moe else "dense"]
    add_accumulation(times, job, calibration, held.gathered)
    _add_host(times, job, calibration)
    return times


def head_times(job: Job, calibration: Calibration) -> Times:
    """The vocabulary head and the loss."""
    times = nothing()
    _add_gemms(times, job, calibration, "head")
    add_loss(times, job, calibration)
    add_accumulation(times, job, calibration, held_by_kind(job)["head"].gathered)
    return times


def embedding_times(job: Job, calibration: Calibration) -> Times:
    """The embedding: a gather forward, a sum backward, and its gradient written whole."""
    times = nothing()
    rate = memory_rate(job, calibration)
    rows = 4.0 * job.work.residual * job.shape.dim / rate
    add(times, "forward", "memory-bound", rows)
    add(times, "wgrad", "memory-bound", 2 * rows + 2 * job.shape.vocab_size * job.shape.dim / job.work.tp / rate)
    add_accumulation(times, job, calibration, held_by_kind(job)["embedding"].gathered)
    return times


@functools.lru_cache(maxsize=4096)
def _products_by_module(shape: ModelShape, tokens: int, tp: int, ep: int) -> dict[str, tuple[Gemm, ...]]:
    found: defaultdict[str, dict[tuple[str, str], Gemm]] = defaultdict(dict)
    for gemm in gemms(shape, tokens, tp=tp, ep=ep):
        module = "head" if gemm.part == "head" else gemm.name.partition(".")[0]
        found[module][gemm.name, gemm.direction] = gemm
    return {module: tuple(products.values()) for module, products in found.items()}


def products(shape: ModelShape, tokens: int, tp: int, ep: int, module: str) -> tuple[Gemm, ...]:
    """Products of one ``attention``, ``moe`` or ``feed_forward``, or of the ``head``, each once."""
    return _products_by_module(shape, tokens, tp, ep).get(module, ())


def _add_gemms(times: Times, job: Job, calibration: Calibration, module: str) -> None:
    work, stack = job.work, job.stack
    low = job.precision is not Precision.BF16 and not job.emulated
    bf16_wgrad = "all" if job.bf16_wgrad else "first two" if work.quantised_dispatch else "none"
    kinds = ProductKinds(low, bf16_wgrad, low and stack.low_linears, stack.expert_gemm == "library")
    sizes = job.shape, work.tokens, work.tp, work.ep, module
    found = product_times(*sizes, job.checkpointing, kinds, job.node.gpu, calibration.products)
    times += found
    if module == "moe":  # rows beyond an even share: padding, and the busiest rank's
        uneven = work.received(job.shape) / work.sent(job.shape) - 1
        times[:, INDEX["expert GEMMs"]] += uneven * found[:, INDEX["expert GEMMs"]]
    if kinds.low_linears:
        for gemm in products(*sizes):
            if gemm.direction == "forward" and gemm.part not in UNQUANTISED:
                again = module != "head" and gemm.name.startswith(RECOMPUTED[job.checkpointing])
                add_linear_casts(times, job, calibration, gemm, recomputed=again)


UNQUANTISED = ("head", "router", "routed experts")
"""Parts whose products are not quantised with the linears."""


class ProductKinds(NamedTuple):
    """What decides a product's rate beside its size."""

    low: bool
    bf16_wgrad: str
    low_linears: bool
    library: bool


@functools.lru_cache(maxsize=4096)
def product_times(
    shape: ModelShape,
    tokens: int,
    tp: int,
    ep: int,
    module: str,
    checkpointing: str,
    kinds: ProductKinds,
    gpu: Gpu,
    rates: ProductRates,
) -> Times:
    """Products of one layer or of the head; not to be written to."""
    sums: defaultdict[tuple[PassName, str], float] = defaultdict(float)
    again = RECOMPUTED[checkpointing] if module != "head" else ()
    for gemm in products(shape, tokens, tp, ep, module):
        category, seconds = _product(gemm, kinds, gpu, rates)
        sums[gemm.direction, category] += seconds
        if gemm.direction == "forward" and gemm.name.startswith(again):
            sums["recompute", category] += seconds
    times = nothing()
    for (pass_name, category), seconds in sums.items():
        add(times, pass_name, category, seconds)
    times.flags.writeable = False
    return times


def _product(gemm: Gemm, kinds: ProductKinds, gpu: Gpu, rates: ProductRates) -> tuple[str, float]:
    if gemm.part != "routed experts":
        low = kinds.low_linears and gemm.part not in UNQUANTISED
        return "other GEMMs", gemm_time_s(gemm, gpu, rates, low=low)
    in_bf16 = kinds.bf16_wgrad == "all" or (kinds.bf16_wgrad == "first two" and "w2" not in gemm.name)
    low = kinds.low and not (in_bf16 and gemm.direction == "wgrad")
    time_s = gemm_time_s if kinds.library else grouped_time_s
    return "expert GEMMs", time_s(gemm, gpu, rates, low=low)


def _add_host(times: Times, job: Job, calibration: Calibration) -> None:
    """What launching and waiting cost beyond the GPU's work, which hides part of it.

    Exposed is sqrt(G^2 + H^2) - G of a pass with G seconds on the GPU and H on the host: next to nothing where the GPU
    has much more to do, all but nothing hidden where it has little. Nothing derives this form. It was chosen with the
    three published rows in view, so that their gains are predicted by constants which have not seen them, but not by a
    model which has not; the uncompiled H100 arms, which it had not seen, are within 4 % of it at the 16B shape.
    """
    if not job.stack.host:
        return
    layer = host_layer_s(job, calibration)
    for name, part, share in (("forward", times[:1], 1 / 3), ("dgrad", times[1:], 2 / 3)):
        busy = float(part.sum())
        add(times, name, "host and waiting", hypot(busy, share * layer) - busy)  # type: ignore[arg-type]


def host_layer_s(job: Job, calibration: Calibration) -> float:
    """Seconds of a layer and micro-batch on the host, forward and backward."""
    if job.gpus > job.node.gpus and not job.stack.distributed_optimizer:
        return float(calibration.host_nodes_s)
    return float(calibration.host_layer_s) * (float(calibration.host_compiled) if job.stack.fused else 1.0)
