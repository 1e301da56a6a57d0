"""A whole step: layers put together to stages, stages to a pipeline, and what comes once a step.

Of a layer, the embedding and the head one micro-batch on one rank is timed, pass by pass and part by part. Every
synchronising step waits for the slowest of n ranks. With times that scatter by sigma around their mean, normally
distributed, it comes at ``mean + sigma * E_n``, where E_n, the expected maximum of n standard normal draws, is found by
Blom's approximation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from moelab.layout.schedule import Durations, simulate
from moelab.layout.sharding import Held
from moelab.planning.memory.activations import BF16, FP32
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.exchange import (
    PERMUTATIONS,
    add_exchange,
    add_layer_collectives,
    expected_maximum,
    fsdp_time_s,
    ring_time_s,
)
from moelab.planning.time.gemm import add_attention, add_expert_casts, products_by_module, weights_by_module
from moelab.planning.time.job import CATEGORIES, INDEX, PASS_INDEX, Job, PassName, Times, add, nothing
from moelab.planning.time.memory_bound import (
    add_accumulation,
    add_loss,
    add_memory_bound,
    held_by_kind,
    held_by_rank,
    memory_rate,
    optimizer_time_s,
)


def layer_times(job: Job, calibration: Calibration, products: Mapping[str, Times], *, moe: bool) -> Times:
    """One layer, with routed experts (``moe``) or dense; ``products`` of :func:`products_by_module`."""
    times = products["attention"] + products["moe" if moe else "feed_forward"]
    add_attention(times, job, calibration)
    add_memory_bound(times, job, calibration, moe=moe)
    add_layer_collectives(times, job, calibration)
    if moe:
        add_exchange(times, job, calibration)
        add_expert_casts(times, job, calibration)
    held = held_by_kind(job.shape, job.degrees)["moe" if moe else "dense"]
    add_accumulation(times, job, calibration, held.gathered)
    add_host(times, job, calibration, moe=moe)
    return times


def head_times(job: Job, calibration: Calibration, products: Mapping[str, Times]) -> Times:
    """The vocabulary head and the loss; arguments as :func:`layer_times`."""
    times = products["head"].copy()
    add_loss(times, job, calibration)
    add_accumulation(times, job, calibration, held_by_kind(job.shape, job.degrees)["head"].gathered)
    return times


def embedding_times(job: Job, calibration: Calibration) -> Times:
    """The embedding: a gather forward, a sum backward, and its gradient written whole."""
    times = nothing()
    rate = memory_rate(job, calibration)
    rows = 4.0 * job.work.residual * job.shape.dim / rate
    add(times, "forward", "memory-bound", rows)
    add(times, "wgrad", "memory-bound", 2 * rows + 2 * job.shape.vocab_size * job.shape.dim / job.work.tp / rate)
    add_accumulation(times, job, calibration, held_by_kind(job.shape, job.degrees)["embedding"].gathered)
    return times


ATTENTION_LAUNCHES, ROUTER_LAUNCHES, BACKWARD_LAUNCHES, EAGER_LAUNCHES = 12, 18, 1.6, 1.6
"""Kernels of attention's and the router's own forward pass that belong to no product (of the router with the grouped
products' bookkeeping); kernels of a backward pass for each of forward; operators for each kernel of a compiled layer.
The traced steps launch 84 in a forward pass of an MoE layer, and 300 in all passes of one under full checkpointing."""

LAUNCHED_AGAIN = {"none": 0.0, "selective": 0.7, "mla": 0.2, "norm+act": 0.2, "mla+mlp": 0.3}
"""Kernels of a forward pass that checkpointing launches again, of all."""


def launches(job: Job, *, moe: bool) -> dict[PassName, float]:
    """Kernels of one layer by pass: a product and what is fused to it for each weight, and what has none.

    Without compilation each operator is a kernel.
    """
    modules = weights_by_module(job.shape, job.work.tp, job.work.ep)
    products = sum(len(modules[name]) for name in ("attention", "moe" if moe else "feed_forward"))
    forward = 2.0 * products + ATTENTION_LAUNCHES
    if moe:
        forward += ROUTER_LAUNCHES + PERMUTATIONS[job.stack.permutation].launches
    if not job.stack.fused:
        forward *= EAGER_LAUNCHES
    again = LAUNCHED_AGAIN.get(job.checkpointing, 1.0) * forward  # both kinds of full launch all of it
    return {"forward": forward, "recompute": again, "dgrad": BACKWARD_LAUNCHES * forward}


def add_host(times: Times, job: Job, calibration: Calibration, *, moe: bool) -> None:
    """What the GPU waits for the host: where launching takes longer than what is launched, and where they meet.

    The host is ahead as long as the GPU has more to do. A dispatch whose host waits for the counts of its rows takes
    the lead away: what follows reaches the GPU ``sync_s`` later.
    """
    if job.stack.host == "graphs":
        return
    kernels, busy_of = launches(job, moe=moe), times.sum(axis=1).tolist()
    launch_s = float(calibration.launch_s if job.stack.host == "torch" else calibration.launch_library_s)
    waits = moe and job.waits_for_counts
    again = waits and job.recomputes_layers and not job.keeps_exchange
    backward: tuple[PassName, ...] = ("recompute", "dgrad", "wgrad")
    blocks: tuple[tuple[tuple[PassName, ...], PassName, bool], ...] = (
        (("forward",), "forward", waits),
        (backward, "dgrad", again),
    )
    for passes, shown_in, waited in blocks:  # forward and backward: within each the host may run ahead and catch up
        busy = sum(busy_of[PASS_INDEX[one]] for one in passes)
        launched = launch_s * sum(kernels.get(one, 0.0) for one in passes)
        add(times, shown_in, "host and waiting", max(0.0, launched - busy) + waited * float(calibration.sync_s))


def step_parts_s(job: Job, calibration: Calibration) -> dict[str, float]:
    """Seconds of a step by part: the busiest pipeline rank's work, and its waiting as ``pipeline bubble``."""
    modules = module_times(job, calibration)
    stages = stage_times(job, modules)
    sums = {id(table): table.sum(axis=1).tolist() for table in stages}  # stages with equal modules share a table
    message_s = _message_s(job, calibration)
    # a card that sends activations to the next stage does not send rows meanwhile
    shared_s = message_s if job.gpus > job.node.gpus and job.rows_sent.network else 0.0
    # schedules may put weight gradients off, but not what the stage before waits for, recomputation included
    durations = tuple(
        Durations(forward + shared_s, recompute + dgrad + shared_s, wgrad)
        for forward, recompute, dgrad, wgrad in (sums[id(table)] for table in stages)
    )
    played = simulate(job.schedule, durations, pp=job.pp, microbatches=job.microbatches, message_s=message_s)
    busiest = int(np.argmax(played.busy_s))
    mine = job.stages_of_rank[busiest]
    parts = np.asarray(job.microbatches * sum(stages[stage].sum(axis=0) for stage in mine), dtype=np.float64)
    parts[INDEX["all-to-all"]] += 2 * job.microbatches * len(mine) * shared_s
    # the busiest rank is described; whatever it does not compute until the last rank has ended is its bubble
    parts[INDEX["pipeline bubble"]] += played.makespan_s - played.busy_s[busiest]
    held = held_by_rank(job, busiest)
    parts[INDEX["FSDP collectives"]] += _fsdp_s(job, calibration, held, modules)
    parts[INDEX["optimizer"]] += optimizer_time_s(job, calibration, held)
    if not job.stack.distributed_optimizer:  # FSDP copies what it gathers out of its buffer, and gradients into one
        parts[INDEX["memory-bound"]] += (
            held.gathered * float(calibration.fsdp_copy_bytes) / memory_rate(job, calibration)
        )
    if job.stack.host == "torch":
        read_s = job.work.tokens * job.work.cp * job.microbatches * float(calibration.data_token_s)
        parts[INDEX["host and waiting"]] += float(calibration.step_s) + read_s
    # each rank's step scatters around its mean, and all end with the slowest
    noise = float(calibration.step_noise) * expected_maximum(job.gpus)
    parts[INDEX["imbalance and stragglers"]] += noise * parts.sum()
    return dict(zip(CATEGORIES, map(float, parts), strict=True))


def module_times(job: Job, calibration: Calibration) -> dict[str, Times]:
    """One micro-batch in one module of each kind: ``dense`` and ``moe`` layers, ``embedding`` and ``head``."""
    products = products_by_module(job, calibration)
    layers = {"dense": job.shape.n_dense_layers, "moe": job.shape.n_moe_layers}
    return {
        **{kind: layer_times(job, calibration, products, moe=kind == "moe") for kind, there in layers.items() if there},
        "embedding": embedding_times(job, calibration),
        "head": head_times(job, calibration, products),
    }


def stage_times(job: Job, modules: Mapping[str, Times]) -> list[Times]:
    """One micro-batch on each stage, of :func:`module_times`."""
    kinds = {}
    for stage in set(job.stages):  # one table for stages alike, whose sums are then taken once
        counts = {
            "dense": stage.dense_layers,
            "moe": stage.moe_layers,
            "head": stage.head,
            "embedding": stage.embedding,
        }
        kinds[stage] = sum((count * modules[kind] for kind, count in counts.items() if count), start=nothing())
    return [kinds[stage] for stage in job.stages]


def work_s(job: Job, calibration: Calibration) -> float:
    """Seconds of one micro-batch in all layers, one after the other."""
    layers = {"dense": job.shape.n_dense_layers, "moe": job.shape.n_moe_layers}
    modules = module_times(job, calibration)
    return sum(layers.get(kind, 1) * float(table.sum()) for kind, table in modules.items())


def _message_s(job: Job, calibration: Calibration) -> float:
    """Activations from one stage to the next; neighbours lie on other nodes where the stages fill theirs."""
    if job.pp == 1:
        return 0.0
    whole = BF16 * job.work.residual * job.shape.dim
    if job.gpus <= job.node.gpus:
        wire = float(calibration.nccl_ring) * float(job.node.gpu.nvlink_gb_s or 1)
    else:
        wire = float(calibration.nccl_network) * float(job.node.nic_gb_s or 1)
    return whole / wire / 1e9 + float(calibration.collective_s)


def _fsdp_s(job: Job, calibration: Calibration, held: Held, modules: Mapping[str, Times]) -> float:
    """Seconds of gathers and scatters that no compute hides.

    Once a step under a pipeline, where TorchTitan keeps parameters gathered and nothing runs beside the end; so with
    Megatron's distributed optimizer. Without a pipeline every micro-batch gathers each module twice and scatters it
    once: a module's compute hides the next one's gather and, backward, the last one's scatter as far as it is long
    enough. An exchange uses the same wires and hides nothing. Nor does anything run beside the embedding's first gather
    and last scatter, nor beside the head's: the loss in chunks gathers it before, and backward goes on after its
    scatter and one more gather.
    """
    if job.pp > 1 or job.stack.distributed_optimizer:
        return _collected_s(job, calibration, held, BF16) + _collected_s(job, calibration, held, FP32)
    kinds = held_by_kind(job.shape, job.degrees)
    gather = {kind: _collected_s(job, calibration, kinds[kind], BF16) for kind in modules}
    scatter = {kind: _collected_s(job, calibration, kinds[kind], FP32) for kind in modules}
    hides = {kind: (table.sum(axis=1) - table[:, INDEX["all-to-all"]]).tolist() for kind, table in modules.items()}
    shape = job.shape
    order = ["embedding", *["dense"] * shape.n_dense_layers, *["moe"] * shape.n_moe_layers]
    exposed = gather["embedding"] + scatter["embedding"] + 2 * gather["head"] + scatter["head"]
    for one, following in itertools.pairwise(order):
        exposed += max(0.0, gather[following] - hides[one][0])
    # backward, last module first: beside `one` the module before it is gathered again, and the gradients of the one
    # behind it are scattered
    for one, following, done in zip(order[1:], order, [*order[2:], None], strict=False):
        exposed += max(0.0, gather[following] + (scatter[done] if done else 0.0) - sum(hides[one][1:]))
    return job.microbatches * exposed


def _collected_s(job: Job, calibration: Calibration, held: Held, element_bytes: int) -> float:
    """Seconds to gather some parameters in BF16, or to scatter, and with replicas to reduce, gradients in FP32."""
    seconds = fsdp_time_s(job, calibration, held.dense, held.experts, element_bytes)
    if element_bytes == FP32 and job.degrees.dp_replicate > 1:
        stride = job.degrees.fsdp * job.work.tp
        seconds += 2 * ring_time_s(job, calibration, FP32 * held.padded, job.degrees.dp_replicate, stride=stride)
    return seconds


def tps_of(job: Job, calibration: Calibration) -> float:
    """Tokens per second per GPU."""
    return job.tokens_per_gpu / sum(step_parts_s(job, calibration).values())
