"""Time of one layer, and of the embedding and the head, for one micro-batch on one rank: pass by pass, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot

from moelab.experiment import Precision
from moelab.projection.attention import add_attention
from moelab.projection.calibration import HOST_COMPILED_S, Calibration
from moelab.projection.collective import add_context_parallel, add_tensor_parallel
from moelab.projection.costs import INDEX, Times, add, nothing
from moelab.projection.gemm_rate import rates_of
from moelab.projection.job import Job
from moelab.projection.memory_bound import add_accumulation, add_loss, add_memory_bound, memory_rate
from moelab.projection.moe_exchange import add_exchange
from moelab.projection.optimizer import held_by_kind
from moelab.projection.product_time import (
    UNQUANTISED,
    ProductKinds,
    Weight,
    product_times,
    recomputed,
    weights_by_module,
)
from moelab.projection.quantisation import add_expert_casts, add_linear_casts


def layer_times(job: Job, calibration: Calibration, products: Mapping[str, Times], *, moe: bool) -> Times:
    """One layer.

    Args:
        job: the step.
        calibration: constants.
        products: of :func:`products_by_module`.
        moe: a layer with routed experts, or a dense one.
    """
    times = products["attention"] + products["moe" if moe else "feed_forward"]
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


def head_times(job: Job, calibration: Calibration, products: Mapping[str, Times]) -> Times:
    """The vocabulary head and the loss; arguments as :func:`layer_times`."""
    times = products["head"].copy()
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


def products_by_module(job: Job, calibration: Calibration) -> dict[str, Times]:
    """Products, and casts of linears, of one ``attention``, ``moe``, ``feed_forward`` and of the ``head``."""
    work, stack = job.work, job.stack
    low = job.precision is not Precision.BF16 and not job.emulated
    bf16_wgrad = "all" if job.bf16_wgrad else "first two" if work.quantised_dispatch else "none"
    kinds = ProductKinds(low, bf16_wgrad, low and stack.low_linears, stack.expert_gemm == "library")
    rates = rates_of(job.node.gpu, calibration)
    found = {}
    for module, weights in weights_by_module(job.shape, work.tp, work.ep).items():
        times = product_times(weights, work.residual, job.checkpointing, kinds, rates).copy()
        if module == "moe":  # rows beyond an even share: padding, and the busiest rank's
            times[:, INDEX["expert GEMMs"]] *= work.received(job.shape) / work.sent(job.shape)
        if kinds.low_linears:
            _add_linear_casts(times, job, calibration, weights)
        found[module] = times
    return found


def _add_linear_casts(times: Times, job: Job, calibration: Calibration, weights: tuple[Weight, ...]) -> None:
    for weight in weights:
        if weight.part not in UNQUANTISED:
            add_linear_casts(times, job, calibration, weight, recomputed=recomputed(weight, job.checkpointing))


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
    return float(HOST_COMPILED_S if job.stack.fused else calibration.host_layer_s)
