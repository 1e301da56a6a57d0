"""The prediction of a step in one call: how long it takes, where the time goes, how far to trust it.

An experiment is judged as ``moelab plan`` judges it; what is illegal or does not fit is refused with the plan's
reasons. The interval adds up, part by part, what the validation table shows of that part's errors. A prediction outside
of what the model was validated on says so in its label and in ``outside``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, Precision
from moelab.hardware import PROFILES, Cluster, Node, SourcedNumber, cluster_of, gpu_of
from moelab.layout import check
from moelab.layout.mesh import divisors, nvlink_ranks
from moelab.model import flops_per_token, shape_for
from moelab.planning.memory import MemoryConstants, estimate, memory_constants
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.exchange import waits_over_network
from moelab.planning.time.job import Job, job_of
from moelab.planning.time.step import step_parts_s
from moelab.planning.uncertainty import (
    ACCUMULATED,
    CONFIDENCE,
    WAIT,
    Estimate,
    gain_interval,
    outside,
    relative_width,
)


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A predicted step."""

    experiment: Experiment
    cluster: Cluster
    job: Job  # the step as the model saw it
    breakdown_s: dict[str, float]  # seconds of the step by part; they add up to it
    flops: dict[str, int]  # operations of a token, TorchTitan's count and a causal one
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
    def rests_on(self) -> tuple[str, ...]:
        """What advice from it rests on that is extrapolated, or in range and yet not identified."""
        accumulates = self.job.pp == 1 and self.job.microbatches > 1
        known_little = ((WAIT, waits_over_network(self.job)), (ACCUMULATED, accumulates))
        return self.outside or tuple(reason for reason, applies in known_little if applies)

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
) -> Projection:
    """Predict the step of an experiment.

    Args:
        experiment: what would run; its nodes and GPUs of a node are used, the cluster gives their kind and network.
        cluster: another one than the experiment's ``hardware``.
        calibration: constants of the model.
        constants: of memory and of how uneven the router is, such as a measured load of the experts.

    Raises:
        Refused: if the layout is illegal or does not fit, with every reason.
        BadInput: if the hardware lacks a figure that is needed, or has no such profile.
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
    return Projection(
        experiment=experiment,
        cluster=cluster,
        job=job,
        breakdown_s=step_parts_s(job, calibration),
        flops={
            "torchtitan": flops_per_token(job.shape, experiment.seq_len),
            "causal": flops_per_token(job.shape, experiment.seq_len, causal=True),
        },
        outside=outside(job),
        notes=tuple(note for note in verdict.notes if note.startswith("traffic")),  # the others do not bear on speed
    )


def gain_over(with_it: Projection, without: Projection, calibration: Calibration) -> Estimate:
    """Percent that one projected step is faster than another on the same machine, with its 90 % interval."""
    extrapolated = bool(with_it.outside or without.outside)
    return gain_interval(with_it.job, without.job, calibration, extrapolated=extrapolated)


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
        ImpossibleHardware: for a bandwidth that is not positive and finite.
    """
    figure = SourcedNumber(value=nic_gb_s, label="derived", source="what-if: network bandwidth as given")
    return replace(cluster, name=f"{cluster.name}, {nic_gb_s:g} GB/s", node=replace(cluster.node, nic_gb_s=figure))


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
    given = {"price_per_gpu_hour": price_per_gpu_hour, "watts_per_gpu": watts_per_gpu, "tokens": tokens}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise BadInput(f"{name} is {value}; give a positive number")
    gpu_hours = tokens / projection.tps / 3600
    return Cost(
        gpu_hours=gpu_hours,
        days=gpu_hours / projection.job.gpus / 24,
        price=gpu_hours * price_per_gpu_hour,
        energy_mwh=gpu_hours * watts_per_gpu / 1e6,
    )


def speed_text(projection: Projection) -> str:
    """Tokens/s per GPU with the interval, whether it rests on what was never seen, and the MFU of causal attention."""
    low, high = projection.interval
    label = "derived, extrapolated" if projection.rests_on else "derived"
    speed = f"{projection.tps:,.0f} tokens/s per GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {label})"
    return f"{speed} · MFU {100 * projection.mfu['causal']:.0f} %"


def projection_text(projection: Projection) -> str:
    """One projection: speed, interval, FLOPs, and the parts of the step."""
    low, high = projection.interval
    lines = [
        f"{projection.tps:,.0f} tokens/s/GPU ({low:,.0f} to {high:,.0f} with 90 % confidence; {projection.label}), "
        f"{projection.step_time_s:.3f} s per step",
        f"{projection.experiment.model_label}, arm {projection.experiment.arm}, {projection.job.gpus} GPUs, "
        f"hardware {projection.cluster.name}",
    ]
    for count, tflops in projection.tflops.items():
        counted = f"{projection.flops[count] / 1e9:.1f} GFLOP per token"
        lines.append(f"{tflops:.0f} TFLOP/s/GPU, MFU {projection.mfu[count]:.1%} by the {count} count, {counted}")
    lines += map(extrapolated, projection.rests_on)
    lines += projection.notes
    rows = [
        (part, f"{seconds:.3f} s", f"{seconds / projection.step_time_s:.1%}")
        for part, seconds in sorted(projection.breakdown_s.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    return "\n".join([*lines, "", *aligned(rows)])


def arms_text(projections: Mapping[str, Projection]) -> str:
    """Arms beside each other; gains are over the first."""
    first = next(iter(projections.values())).tps
    rows = [("arm", "tokens/s/GPU", "low", "high", "over the first", "")]
    for arm, one in projections.items():
        low, high = one.interval
        rows.append((arm, f"{one.tps:,.0f}", f"{low:,.0f}", f"{high:,.0f}", f"{one.tps / first - 1:+.1%}", one.label))
    # each reason once, in the order of the arms
    reasons = dict.fromkeys(
        reason for one in projections.values() for reason in (*map(extrapolated, one.rests_on), *one.notes)
    )
    return "\n".join([*aligned(rows), *reasons])


def extrapolated(reason: str) -> str:
    """How advice names one of :attr:`Projection.rests_on`."""
    return f"extrapolated from limited evidence: {reason}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns flush right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
