"""A whole step: layers put together to stages, stages to a pipeline, and what comes once a step.

Of a layer, the embedding and the head one micro-batch on one rank is timed, pass by pass and part by part. Work between
products moves memory and computes little: each kernel of a compiled layer reads its inputs and writes its outputs once;
backward moves twice as much. Where n ranks meet, they wait for the slowest. With times that scatter by sigma around
their mean, normally distributed, it comes at ``mean + sigma * E_n``, where E_n is the expected maximum of n standard
normal draws.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import numpy as np

from moelab.layout.schedule import Durations, simulate
from moelab.layout.sharding import Degrees, Held, StageModules, held
from moelab.model import ModelShape
from moelab.planning.memory.activations import BF16, FP32
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.exchange import (
    add_exchange,
    add_layer_collectives,
    expected_maximum,
    fsdp_time_s,
    network_rate,
    nvlink_rate,
    ring_time_s,
)
from moelab.planning.time.gemm import (
    add_attention,
    add_expert_casts,
    memory_rate,
    products_by_module,
    weights_by_module,
)
from moelab.planning.time.job import CATEGORIES, INDEX, PASS_INDEX, Job, PassName, Times, add, nothing

# Work between products

LOSS_BYTES = 14.0
"""Of each logit: written, read twice by the softmax, its gradient written and read (BF16, one copy in FP32)."""
ACCUMULATE_BYTES = 10.0
"""Of a gradient in BF16 added to one in FP32: read, read, write."""
WHOLE_GRADIENT_BYTES = 8.0
"""Of each gathered gradient under Megatron's distributed optimizer: set to zero and scaled, FP32."""


def elementwise_bytes(job: Job, *, moe: bool, again: bool = False) -> float:
    """Bytes that the fused elementwise kernels of one layer move forward, or ``again`` in the backward pass."""
    shape, work = job.shape, job.work
    t, s, heads = work.tokens, work.residual, shape.n_heads / work.tp
    latent = shape.q_lora_rank + shape.kv_lora_rank
    elements = 6 * s * shape.dim + 2 * t * latent + 2 * t * heads * shape.qk_head_dim
    if shape.grouped_queries:  # keys are turned as queries are, and both are normed before
        kv_heads = shape.kv_heads / work.tp
        elements += 2 * t * (kv_heads + shape.qk_norm * (heads + kv_heads)) * shape.qk_head_dim
    else:
        elements += t * heads * (shape.qk_nope_head_dim + 2 * shape.v_head_dim + shape.qk_head_dim)
    elements += 2 * t * heads * shape.v_head_dim
    if moe:  # SwiGLU reads gate and up and writes one, of the shared experts and of the routed ones
        elements += 3 * t * shape.shared_hidden_dim / work.tp
        if not (again and job.keeps_products):
            elements += 3 * work.received(shape) * shape.moe_hidden_dim
        elements += 6 * work.routed_tokens * shape.dim
    else:
        elements += 3 * t * shape.dense_hidden_dim / work.tp + 3 * s * shape.dim
    return BF16 * elements


def add_memory_bound(times: Times, job: Job, calibration: Calibration, *, moe: bool) -> None:
    """Elementwise work of one layer."""
    rate = memory_rate(job, calibration) / (1.0 if job.stack.compiled else calibration.eager)
    forward = elementwise_bytes(job, moe=moe) / rate
    add(times, "forward", "memory-bound", forward)
    add(times, "dgrad", "memory-bound", 2 * forward)  # each input is read again beside the gradients
    if job.checkpointing != "none":
        add(times, "recompute", "memory-bound", elementwise_bytes(job, moe=moe, again=True) / rate)


def add_accumulation(times: Times, job: Job, calibration: Calibration, kind: str) -> None:
    """A micro-batch's weight gradients of a kind of module added to those of the others."""
    if job.microbatches > 1:
        gathered = held_by_kind(job.shape, job.degrees)[kind].gathered
        add(times, "wgrad", "memory-bound", gathered * ACCUMULATE_BYTES / memory_rate(job, calibration))


@functools.lru_cache(maxsize=4096)
def held_by_kind(shape: ModelShape, degrees: Degrees) -> dict[str, Held]:
    """What one module of each kind has on a rank: ``dense`` and ``moe`` layers, ``embedding`` and ``head``."""
    kinds = {
        "dense": StageModules(dense_layers=min(1, shape.n_dense_layers)),
        "moe": StageModules(moe_layers=min(1, shape.n_moe_layers)),
        "embedding": StageModules(embedding=1),
        "head": StageModules(head=1),  # the last norm is gathered with it
    }
    return {kind: held(shape, modules, degrees) for kind, modules in kinds.items()}


def held_by_rank(job: Job, rank: int) -> Held:
    """What a pipeline rank holds."""
    stages = [held(job.shape, job.stages[stage], job.degrees) for stage in job.stages_of_rank[rank]]
    return Held(*map(sum, zip(*stages, strict=True)))


# Modules


def layer_times(job: Job, calibration: Calibration, products: Mapping[str, Times], *, moe: bool) -> Times:
    """One layer, with routed experts (``moe``) or dense; ``products`` of :func:`products_by_module`."""
    times = products["attention"] + products["moe" if moe else "feed_forward"]
    add_attention(times, job, calibration)
    add_memory_bound(times, job, calibration, moe=moe)
    add_layer_collectives(times, job, calibration)
    if moe:
        add_exchange(times, job, calibration)
        add_expert_casts(times, job, calibration)
    add_accumulation(times, job, calibration, "moe" if moe else "dense")
    add_host(times, job, calibration, moe=moe)
    return times


def head_times(job: Job, calibration: Calibration, products: Mapping[str, Times]) -> Times:
    """The vocabulary head, and the loss: softmax and cross-entropy, and the head's gradient added up over chunks."""
    times, rate = products["head"].copy(), memory_rate(job, calibration)
    loss_s = job.work.tokens * job.shape.vocab_size / job.work.tp * LOSS_BYTES / rate
    add(times, "forward", "memory-bound", loss_s / 2)
    add(times, "dgrad", "memory-bound", loss_s / 2)
    if job.stack.loss_chunks > 1:
        head = job.shape.dim * job.shape.vocab_size / job.work.tp
        add(times, "wgrad", "memory-bound", job.stack.loss_chunks * head * ACCUMULATE_BYTES / rate)
    add_accumulation(times, job, calibration, "head")
    return times


def embedding_times(job: Job, calibration: Calibration) -> Times:
    """The embedding: a gather forward, a sum backward, and its gradient written whole."""
    times, rate = nothing(), memory_rate(job, calibration)
    rows = 4.0 * job.work.residual * job.shape.dim / rate
    add(times, "forward", "memory-bound", rows)
    add(times, "wgrad", "memory-bound", 2 * rows + 2 * job.shape.vocab_size * job.shape.dim / job.work.tp / rate)
    add_accumulation(times, job, calibration, "embedding")
    return times


ATTENTION_LAUNCHES, ROUTER_LAUNCHES, BACKWARD_LAUNCHES = 12, 18, 1.6
"""Kernels of attention's and the router's own forward pass that belong to no product (of the router with the grouped
products' bookkeeping), and of a backward pass for each of forward. The traced steps launch 84 in a forward pass of an
MoE layer, and 300 in all passes of one under full checkpointing."""
LAUNCHED_AGAIN = {"none": 0.0, "selective": 0.7, "mla": 0.2, "norm+act": 0.2, "mla+mlp": 0.3}
"""Kernels of a forward pass that checkpointing launches again, of all."""


def launches(job: Job, calibration: Calibration, *, moe: bool) -> dict[PassName, float]:
    """Kernels of one layer by pass: a product and what is fused to it for each weight, and what has none."""
    modules = weights_by_module(job.shape, job.work.tp, job.work.ep)
    products = sum(len(modules[name]) for name in ("attention", "moe" if moe else "feed_forward"))
    forward = 2.0 * products + ATTENTION_LAUNCHES
    if moe:
        forward += ROUTER_LAUNCHES + job.stack.permutation.launches
    if not job.stack.compiled:
        forward *= calibration.eager
    again = LAUNCHED_AGAIN.get(job.checkpointing, 1.0) * forward  # both kinds of full launch all of it
    return {"forward": forward, "recompute": again, "dgrad": BACKWARD_LAUNCHES * forward}


def add_host(times: Times, job: Job, calibration: Calibration, *, moe: bool) -> None:
    """What the GPU waits for the host: where launching takes longer than what is launched, and where they meet.

    The host is ahead as long as the GPU has more to do; within forward and within backward it may catch up. A dispatch
    whose host waits for the counts of its rows takes the lead away: what follows reaches the GPU ``sync_s`` later.
    """
    launch_s = calibration.launch_s if job.stack.launch_s is None else job.stack.launch_s
    kernels = launches(job, calibration, moe=moe)
    forward, recompute, dgrad, wgrad = times.sum(axis=1).tolist()
    waits_s = calibration.sync_s * (moe and job.waits_for_counts)
    again_s = waits_s * (job.recomputes_layers and not job.keeps_exchange)
    late_s = max(0.0, launch_s * kernels["forward"] - forward)
    add(times, "forward", "host and waiting", late_s + waits_s)
    late_s = max(0.0, launch_s * (kernels["recompute"] + kernels["dgrad"]) - recompute - dgrad - wgrad)
    add(times, "dgrad", "host and waiting", late_s + again_s)


def module_times(job: Job, calibration: Calibration) -> dict[str, Times]:
    """One micro-batch in one module of each kind: ``dense`` and ``moe`` layers, ``embedding`` and ``head``."""
    products = products_by_module(job, calibration)
    layers = {"dense": job.shape.n_dense_layers, "moe": job.shape.n_moe_layers}
    return {
        **{kind: layer_times(job, calibration, products, moe=kind == "moe") for kind, there in layers.items() if there},
        "embedding": embedding_times(job, calibration),
        "head": head_times(job, calibration, products),
    }


# The step


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
    _add_once_a_step(parts, job, calibration, held_by_rank(job, busiest), modules)
    if job.pp == 1 and not job.stack.distributed_optimizer:  # gathers of every layer are where all nodes meet
        noise = calibration.node_noise * expected_maximum(-(-job.gpus // job.node.gpus))
        parts[INDEX["imbalance and stragglers"]] += noise * parts.sum()
    return dict(zip(CATEGORIES, map(float, parts), strict=True))


def _add_once_a_step(
    parts: Times, job: Job, calibration: Calibration, held: Held, modules: Mapping[str, Times]
) -> None:
    """What a rank that holds ``held`` does beside its micro-batches: FSDP, optimizer, and the host between steps."""
    rate = memory_rate(job, calibration)
    parts[INDEX["FSDP collectives"]] += _fsdp_s(job, calibration, held, modules)
    if job.stack.distributed_optimizer:  # states are sharded, gradients are whole on every rank
        local = held.dense / job.degrees.fsdp + held.experts / max(1, job.degrees.efsdp)
        moved = local * calibration.optimizer_bytes + WHOLE_GRADIENT_BYTES * held.gathered
    else:  # FSDP copies what it gathers out of its buffer, and gradients into one
        moved = held.local * calibration.optimizer_bytes
        parts[INDEX["memory-bound"]] += held.gathered * calibration.fsdp_copy_bytes / rate
    parts[INDEX["optimizer"]] += moved / rate
    if job.stack.launch_s is None:
        read_s = job.work.tokens * job.work.cp * job.microbatches * calibration.data_token_s
        parts[INDEX["host and waiting"]] += calibration.step_s + read_s


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
    within = job.gpus <= job.node.gpus
    rate = nvlink_rate(job, calibration) if within else network_rate(job, calibration)
    return BF16 * job.work.residual * job.shape.dim / rate


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
        exposed += max(0.0, gather[following] - hides[one][PASS_INDEX["forward"]])
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
