"""The prediction of a step in one call: how long it takes, where the time goes, how far to trust it, what it costs.

An experiment is judged as ``moelab plan`` judges it; what is illegal or does not fit is refused with the plan's
reasons. The interval adds up, part by part, what the validation table shows of that part's errors. A prediction outside
of what the model was validated on says so in its label and in ``outside``, and its interval is wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, Precision
from moelab.hardware import PROFILES, Cluster, Node, SourcedNumber, cluster_of, gpu_of, has_native_mxfp8
from moelab.launch.requirements import Foreseen
from moelab.layout import LayoutCheck, check
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.model import flops_per_token, shape_for
from moelab.planning.memory import MemoryConstants, estimate, memory_constants
from moelab.planning.plan import plan
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.job import Job, job_of
from moelab.planning.time.step import step_parts_s
from moelab.planning.trust import CONFIDENCE, Estimate, gain_interval, outside, relative_width


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A predicted step."""

    experiment: Experiment
    cluster: Cluster
    job: Job  # the step as the model saw it
    breakdown_s: dict[str, float]  # seconds of the step by part; they add up to it
    flops: dict[str, int]  # operations of a token: TorchTitan's count, and those that are computed
    outside: tuple[str, ...]  # what lies outside of what the model was validated on; empty if nothing does
    notes: tuple[str, ...] = ()  # of the plan, on the tokens' way

    @property
    def step_time_s(self) -> float:
        """Seconds of a step."""
        return step_s(self.breakdown_s)

    @property
    def tps(self) -> float:
        """Tokens per second per GPU."""
        return self.job.tokens_per_gpu / self.step_time_s

    @property
    def label(self) -> str:
        """``derived``, and that it is extrapolated where it is."""
        return "derived, extrapolated" if self.outside else "derived"

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s of each GPU by either count."""
        return {count: flops * self.tps / 1e12 for count, flops in self.flops.items()}

    @property
    def mfu(self) -> dict[str, float]:
        """Share of the BF16 datasheet peak by either count."""
        peak = self.cluster.node.gpu.bf16_tflops
        return {count: value / float(peak or math.inf) for count, value in self.tflops.items()}

    @property
    def interval(self) -> tuple[float, float]:
        """Tokens per second per GPU between which it lies with 90 % confidence."""
        # errors are factors: as likely twice too fast as twice too slow
        width = relative_width(self.breakdown_s, extrapolated=bool(self.outside))
        return self.tps / (1 + width), self.tps * (1 + width)

    def to_json(self) -> dict[str, Any]:
        """The projection as one JSON object."""
        return {
            "tps": self.tps,
            "step_time_s": self.step_time_s,
            "breakdown_s": self.breakdown_s,
            "interval": list(self.interval),
            "confidence": CONFIDENCE,
            "label": self.label,
            "outside": list(self.outside),
            "notes": list(self.notes),
            "document_tokens": self.job.stack.document_keys,
            "flops_per_token": self.flops,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "gpus": self.job.gpus,
            "hardware": self.cluster.name,
            "stack": self.job.stack.name,
        }


GROUPS: Mapping[str, tuple[str, ...]] = {
    "expert GEMMs": ("expert GEMMs",),
    "attention and other GEMMs": ("attention", "other GEMMs"),
    "quantisation": ("quantisation",),
    "permutation, memory-bound, optimizer": ("permutation and padding", "memory-bound", "optimizer"),
    "all-to-all": ("all-to-all",),
    "TP, CP and FSDP collectives": (
        "tensor-parallel collectives",
        "context-parallel collectives",
        "FSDP collectives",
    ),
    "host, bubble, stragglers": ("host and waiting", "pipeline bubble", "imbalance and stragglers"),
}
"""Parts of a step as people compare arms by them."""


def step_s(parts_s: Mapping[str, float]) -> float:
    """Seconds of a whole step, whose parts follow one another."""
    return sum(parts_s.values())


def group_s(parts_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by :data:`GROUPS`."""
    return {name: sum(parts_s[part] for part in parts) for name, parts in GROUPS.items()}


def project(
    experiment: Experiment,
    cluster: Cluster | None = None,
    *,
    calibration: Calibration = CALIBRATION,
    constants: MemoryConstants = memory_constants,
    document_tokens: float | None = None,
) -> Projection:
    """Predict the step of an experiment.

    Args:
        experiment: what would run; its nodes and GPUs of a node are used, the cluster gives their kind and network.
        cluster: another one than the experiment's ``hardware``.
        calibration: constants of the model.
        constants: of memory and of how uneven the router is, such as a measured load of the experts.
        document_tokens: mean length of the documents that a sequence is packed with, which attention keeps apart; None
            is that of the experiment's dataset.

    Raises:
        Refused: if the layout is illegal or does not fit, with every reason, or if its speed is not modelled.
        BadInput: if the hardware lacks a figure that is needed, or has no such profile, or for an impossible length.
    """
    cluster = cluster or cluster_of(experiment.hardware)
    experiment = on_cluster(experiment, cluster)  # rules and kernels are those of the GPU that is asked about
    verdict = check(experiment)
    if not verdict.legal or verdict.layout is None:
        raise Refused("illegal layout:\n" + "\n".join(f"- {reason}" for reason in verdict.reasons))
    node = cluster.node
    if not can_be_placed(experiment, experiment.ep, node):
        valid = [ep for ep in divisors(shape_for(experiment).num_experts) if can_be_placed(experiment, ep, node)]
        raise Refused(
            f"no projection: ep is {experiment.ep} on nodes of {experiment.gpus_per_node} GPUs, so that a group begins "
            f"or ends inside a node; layouts with ep {', '.join(map(str, valid))} can be projected"
        )
    memory = estimate(experiment, verdict.layout, node.gpu, constants=constants)
    if not memory.fits:
        raise Refused(
            f"does not fit: {memory.worst_gib:.1f} GiB of {memory.capacity_gib:.1f} GiB on pipeline rank "
            f"{memory.worst.rank}; {memory.dominant}"
        )
    job = job_of(experiment, verdict.layout, node, constants=constants)
    if document_tokens is not None:
        _require_positive(document_tokens=document_tokens)
        job = replace(job, stack=replace(job.stack, document_keys=document_tokens))
    return Projection(
        experiment=experiment,
        cluster=cluster,
        job=job,
        breakdown_s=step_parts_s(job, calibration),
        flops={
            "torchtitan": flops_per_token(job.shape, experiment.seq_len),
            "computed": flops_per_token(job.shape, round(2 * job.keys), causal=True),
        },
        outside=outside(job),
        notes=tuple(_notes(verdict, job, experiment.attention_backend)),
    )


def _notes(verdict: LayoutCheck, job: Job, attention: str) -> Iterator[str]:
    """What bears on the speed and is not a matter of range."""
    yield from (note for note in verdict.notes if note.startswith("traffic"))
    if attention not in ("flex", "flex_tiles"):
        yield f"attention_backend {attention} is not modelled: it is taken to be as fast as flex_tiles"
    if job.pp == 1 and job.microbatches > 1:
        yield "gradients accumulate without a pipeline: measured steps of another stack do so, none of TorchTitan"


def foresee(experiment: Experiment) -> Foreseen:
    """What a launch needs to know of an arm: memory, and how long a step takes at most."""
    planned, step_s = plan(experiment), None
    with suppress(BadInput, Refused):  # hardware without figures, or an arm that cannot run
        projection = project(experiment)
        step_s = projection.job.tokens_per_gpu / projection.interval[0]
    if planned.memory is None or planned.fits is None:
        return Foreseen(slowest_step_s=step_s)
    memory = planned.memory
    words = f"{memory.worst_gib:.1f} of {memory.capacity_gib:.1f} GiB on the fullest GPU (predicted)"
    return Foreseen(fits=planned.fits, memory=words, dominant=memory.dominant, slowest_step_s=step_s)


def gain_over(with_it: Projection, without: Projection) -> Estimate:
    """Percent that one projected step is faster than another on the same machine, with its 90 % interval."""
    extrapolated = bool(with_it.outside or without.outside)
    parts_s = with_it.breakdown_s, without.breakdown_s
    return gain_interval(with_it.job, without.job, parts_s, extrapolated=extrapolated)


def on_cluster(experiment: Experiment, cluster: Cluster) -> Experiment:
    """The experiment with a hardware profile of the cluster's GPU, which the rules ask for its capability.

    Raises:
        BadInput: if the cluster lacks what a projection needs, or no profile has a GPU of its kind.
    """
    _require_figures(experiment, cluster)
    if cluster == cluster_of(experiment.hardware):
        return experiment
    if cluster.name in PROFILES:  # its NVLink domains too decide what spans nodes
        return experiment.model_copy(update={"hardware": cluster.name})
    capability = cluster.node.gpu.capability
    if gpu_of(experiment.hardware).capability == capability:
        return experiment
    same = [name for name in PROFILES if name not in ("local", "cpu") and gpu_of(name).capability == capability]
    if not same:
        raise BadInput(f"{cluster.name} has {cluster.node.gpu.name}, and no profile has a GPU of its kind")
    return experiment.model_copy(update={"hardware": same[0]})


def can_be_placed(experiment: Experiment, ep: int, node: Node) -> bool:
    """Whether a group of ``ep`` ranks on such nodes lies within what NVLink joins or fills it: no other is modelled."""
    joined = nvlink_ranks(experiment, ep, node=node)
    return experiment.world_size == joined or joined % ep == 0 or ep % joined == 0


def _require_figures(experiment: Experiment, cluster: Cluster) -> None:
    """Check that a cluster has what a projection of an experiment needs.

    Raises:
        BadInput: naming each figure that is missing, or a node with fewer GPUs than asked for.
    """
    gpu = cluster.node.gpu
    wanted = {name: getattr(gpu, name) for name in ("memory_gib", "bf16_tflops", "hbm_tb_s", "nvlink_gb_s")}
    if experiment.precision is not Precision.BF16:
        wanted["fp8_tflops"] = gpu.fp8_tflops  # MXFP8 too is priced by FP8's peak
    # Where nothing leaves NVLink a profile without network will do.
    if experiment.world_size > nvlink_ranks(experiment, node=cluster.node):
        wanted["nic_gb_s"] = cluster.node.nic_gb_s
    if missing := [name for name, figure in wanted.items() if figure is None]:
        if cluster.name == "local":
            raise Refused(
                f"this machine ({gpu.name}) has no {', '.join(missing)} that a projection could take; name the GPUs "
                "with hardware=, such as b200_x256, h200_x256, h100_x1024, gb200_nvl72_x4"
            )
        raise BadInput(
            f"the profile {cluster.name} ({gpu.name}) has no {', '.join(missing)}, which a projection needs; name "
            "another with hardware=, such as b200_x256, h200_x256, h100_x1024, gb200_nvl72_x4"
        )
    if experiment.gpus_per_node > cluster.node.domain:
        raise BadInput(
            f"gpus_per_node is {experiment.gpus_per_node}, but a node of {cluster.name} has {cluster.node.domain} GPUs"
        )


def with_network(cluster: Cluster, nic_gb_s: float) -> Cluster:
    """A cluster whose network gives each GPU ``nic_gb_s`` GB/s each way.

    Raises:
        BadInput: for a bandwidth that is not positive and finite.
    """
    figure = SourcedNumber(value=nic_gb_s, label="derived", source="what-if: network bandwidth as given")
    return replace(cluster, name=f"{cluster.name}, {nic_gb_s:g} GB/s", node=replace(cluster.node, nic_gb_s=figure))


KINDS: Mapping[str, str] = {
    "H100": "h100_x1024",
    "H200": "h200_x256",
    "B200": "b200_x256",
    "GB200": "gb200_nvl72_x4",
}
"""The profile of a cluster of each kind of GPU, for its node and its network card."""


def cluster_like(gpu: str, *, nodes: int, network_gb_s: float | None = None) -> Cluster:
    """A cluster of a kind of GPU with another size and another network.

    ``gpu`` is a name of :data:`KINDS`; ``network_gb_s`` that of each GPU's card each way, GB/s, None the profile's.

    Raises:
        BadInput: for an unknown GPU or an impossible figure.
    """
    if gpu not in KINDS:
        raise BadInput(f"gpu is {gpu!r}; the kinds are {', '.join(KINDS)}")
    like = replace(cluster_of(KINDS[gpu]), nodes=nodes)
    return like if network_gb_s is None else with_network(like, network_gb_s)


def on(gpu: str, experiment: Experiment, **changes: Any) -> Experiment:
    """An experiment on a kind of GPU; its 8-bit format is the one that the GPU's tensor cores have."""
    fields = {**experiment.model_dump(), **changes, "hardware": KINDS[gpu]}  # validated: a copy would not be
    native = has_native_mxfp8(cluster_of(KINDS[gpu]).node.gpu.capability)
    if fields["precision"] != Precision.BF16:
        # Defaults of the rest: what was asked of one format's kernels means nothing to the other.
        fields |= {"precision": "mxfp8" if native else "fp8", "wgrad": "mxfp8", "mxfp8_kernels": "auto"}
    return Experiment.model_validate(fields)


DEEPSEEK_TOKENS = 14.8e12
"""Tokens that DeepSeek-V3 was trained on (its technical report)."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of training on ``tokens`` tokens."""

    gpu_hours: float  # of all GPUs
    days: float  # of wall time, without interruptions
    price: float
    energy_mwh: float  # of the GPUs' share of the facility, MWh


def cost(
    projection: Projection, *, price_per_gpu_hour: float, watts_per_gpu: float, tokens: float = DEEPSEEK_TOKENS
) -> Cost:
    """Cost of a training run at a projected speed.

    Args:
        projection: gives the speed and the number of GPUs.
        price_per_gpu_hour: of one GPU, in any currency.
        watts_per_gpu: drawn for each GPU, its share of host, network and cooling included.
        tokens: to train on.

    Raises:
        BadInput: for a number that is not positive.
    """
    _require_positive(price_per_gpu_hour=price_per_gpu_hour, watts_per_gpu=watts_per_gpu, tokens=tokens)
    gpu_hours = tokens / projection.tps / 3600
    return Cost(
        gpu_hours=gpu_hours,
        days=gpu_hours / projection.job.gpus / 24,
        price=gpu_hours * price_per_gpu_hour,
        energy_mwh=gpu_hours * watts_per_gpu / 1e6,
    )


def _require_positive(**given: float) -> None:
    for name, value in given.items():
        if not 0 < value < math.inf:  # NaN too
            raise BadInput(f"{name} is {value}; give a positive number")


def speed_text(projection: Projection) -> str:
    """Tokens/s per GPU with the interval, whether it is extrapolated, and the MFU of what is computed."""
    low, high = projection.interval
    speed = (
        f"{projection.tps:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {projection.label})"
    )
    return f"{speed} · MFU {100 * projection.mfu['computed']:.0f} %"


def documents_text(projection: Projection) -> str:
    """What is assumed of the documents in a sequence; nothing where attention does not tell them apart."""
    tokens = projection.job.stack.document_keys
    if tokens is None or tokens >= projection.job.seq_len / 2:
        return ""
    return (
        f"documents: of {tokens:g} tokens on average (assumed: {projection.experiment.dataset}'s), which attention "
        "keeps apart, so that a longer seq_len costs no more; moelab project --document-tokens takes your own"
    )


def projection_text(projection: Projection) -> str:
    """One projection: speed, interval, FLOPs, and the parts of the step."""
    low, high = projection.interval
    lines = [
        f"{projection.tps:,.0f} tokens/s/GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {projection.label}), "
        f"{projection.step_time_s:.3f} s per step",
        f"{projection.experiment.model_label}, arm {projection.experiment.arm}, {projection.job.gpus} GPUs, "
        f"hardware {projection.cluster.name}",
    ]
    counts = {"torchtitan": "by TorchTitan's count", "computed": "of what is computed"}
    for count, tflops in projection.tflops.items():
        counted = f"{projection.flops[count] / 1e9:.1f} GFLOP per token"
        lines.append(f"{tflops:.0f} TFLOP/s/GPU, MFU {projection.mfu[count]:.1%} {counts[count]}, {counted}")
    lines += [*remarks(projection), ""]
    parts = [
        (part, f"{seconds:.3f} s", f"{seconds / projection.step_time_s:.1%}")
        for part, seconds in sorted(projection.breakdown_s.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    return "\n".join([*lines, *aligned(parts)])


def remarks(projection: Projection) -> list[str]:
    """What a reader has to know beside the figures: what is extrapolated and assumed, and the plan's notes."""
    words = [*map(extrapolated, projection.outside), documents_text(projection), *projection.notes]
    return [one for one in words if one]


def arms_text(projections: Mapping[str, Projection], refused: Mapping[str, str]) -> str:
    """Arms beside each other, gains over the first, and why the ``refused`` ones are not projected."""
    first = next(iter(projections.values())).tps if projections else 0.0
    table = [("arm", "tokens/s/GPU", "low", "high", "over the first", "")]
    for arm, one in projections.items():
        low, high = one.interval
        table.append((arm, f"{one.tps:,.0f}", f"{low:,.0f}", f"{high:,.0f}", f"{one.tps / first - 1:+.1%}", one.label))
    told = dict.fromkeys(words for one in projections.values() for words in remarks(one))  # each once
    lines = [*aligned(table), *told] if projections else []
    return "\n".join([*lines, *(f"{arm} is not projected: {why}" for arm, why in refused.items())])


def extrapolated(reason: str) -> str:
    """How one of :attr:`Projection.outside` is named beside its figure."""
    return f"extrapolated from limited evidence: {reason}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns flush right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
