"""What a person should know of a layout that is legal: raised padding, where the loss is printed, traps of a layout."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from moelab.experiment import EPBackend, Precision, Routing
from moelab.hardware import cluster_of, has_native_mxfp8
from moelab.layout.facts import Facts
from moelab.layout.stages import rank_with_loss

PADDING = {Precision.FP8: 16, Precision.MXFP8: 32}
"""Tokens: what TorchTitan 0.3.0's converters pad each expert's group to by default."""
NATIVE_PADDING = 128
"""Tokens: what torchao 0.18's quantisation kernel needs on SM100."""
DEEPEP_PADDING = 8
"""Tokens: what moelab's DeepEP dispatcher pads each expert's group to for BF16 experts."""


def notes(facts: Facts) -> tuple[str, ...]:
    """Every note that applies."""
    found = (
        note(facts)
        for note in (
            _cluster,
            _emulated,
            _padding,
            _cuda_graphs,
            _microbatch,
            _loss_rank,
            _ep_nodes,
            _traffic,
            _warmup,
        )
    )
    return tuple(note for note in found if note)


def _cluster(facts: Facts) -> str | None:
    """Whether a named profile has the ranks; on the machine at hand that is for ``moelab run`` to say."""
    cluster = cluster_of(facts.experiment.hardware)
    if cluster.name in ("local", "cpu") or facts.world_size <= cluster.gpus:
        return None
    return f"hardware: {cluster.name} has {cluster.gpus} GPUs, and this takes {facts.world_size}"


def _emulated(facts: Facts) -> str | None:
    if facts.ep_backend is not EPBackend.DEEPEP or facts.ep_kernels != "emulated":
        return None
    return "dispatcher: DeepEP is emulated on plain collectives: its numerics, not its speed"


def _padding(facts: Facts) -> str | None:
    if not facts.quantised:
        if facts.ep_backend is not EPBackend.DEEPEP:
            return None
        return f"padding: each expert's tokens are padded to a multiple of {DEEPEP_PADDING}"
    default = PADDING[facts.precision]
    kernels = facts.experiment.mxfp8_kernels
    raised = f"{default} tokens raised to {NATIVE_PADDING}, which torchao's quantisation kernel needs on SM100"
    plain = f"each expert's tokens are padded to a multiple of {default}"
    if facts.precision is Precision.FP8 or kernels == "emulated":
        return f"padding: {plain}"
    if kernels == "native" or has_native_mxfp8(facts.capability):
        return f"padding: {raised}"
    if facts.capability is None:
        return f"padding: {plain} where MXFP8 is emulated; {raised}"
    return f"padding: {plain}, emulated"


def _cuda_graphs(facts: Facts) -> str | None:
    """Where TorchTitan's default, CUDA graphs on, would be refused."""
    waits = facts.ep > 1 and facts.ep_backend is not EPBackend.MINIMAL_ASYNC_EP
    if facts.pp == 1 and not waits:
        return None
    cause = "pipeline parallelism" if facts.pp > 1 else f"ep_backend {facts.ep_backend.value}, which waits for the host"
    return f"cuda graphs: off; TorchTitan 0.3.0 does not support them with {cause}"


def _microbatch(facts: Facts) -> str | None:
    if facts.pp > 1 or facts.microbatch == facts.local_batch or facts.local_batch == 1:
        return None
    return (
        f"microbatch: {facts.microbatch} is for pipeline parallelism only; without it the {facts.local_batch} "
        "sequences of local_batch go forward at once"
    )


def _loss_rank(facts: Facts) -> str | None:
    schedule = facts.schedule
    if facts.pp == 1 or schedule is None or facts.world_size % facts.pp:
        return None
    rank = rank_with_loss(schedule, facts.pp) * (facts.world_size // facts.pp)
    said = f"loss: global rank {rank} holds it; the other pipeline ranks print -1"
    if schedule.name == "DualPipeV":
        wrong = (facts.pp - 1) * (facts.world_size // facts.pp)
        return f"{said}, and rank {wrong}, which TorchTitan 0.3.0 takes for TensorBoard and W&B, is one of them"
    return said


def _ep_nodes(facts: Facts) -> str | None:
    per_node = facts.experiment.gpus_per_node
    if facts.ep == 1 or per_node % facts.ep == 0:
        return None
    return f"traffic: ep {facts.ep} does not fit into a node of {per_node}, so tokens cross the network between nodes"


def _traffic(facts: Facts) -> str | None:
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
    starts = range(0, experts, gcd(experts, top_k))
    reached = [len({(start + copy) % experts // local for copy in range(top_k)}) for start in starts]
    return sum(reached) / len(reached)


def _warmup(facts: Facts) -> str | None:
    steps, warmup = facts.experiment.steps, facts.experiment.warmup_steps
    if warmup <= steps:
        return None
    return f"learning rate: TorchTitan shortens warmup_steps {warmup} to the {steps} steps of this run"
