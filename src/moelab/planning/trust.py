"""How far a prediction can be trusted: what lies outside of what was measured, and how wide the interval is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moelab.experiment import EPBackend, Precision
from moelab.hardware import ROCM
from moelab.model import count_parameters
from moelab.planning.time.exchange import waits_over_network
from moelab.planning.time.gemm import is_blackwell
from moelab.planning.time.job import PART_SPREAD, Job

CONFIDENCE = 0.9
DEVIATIONS = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""
SYSTEM_SPREAD = 0.09
"""Standard deviation of a whole step between two systems of one kind, from public steps of the validation table: half
of them are less than 8 % off."""
OUTSIDE_FACTOR = 1.8
"""How much wider an interval is outside of what the model was validated on: enough for nine of ten such rows of the
validation table; one of GB300, 28 % off, is the worst."""
GPUS_SEEN = ("H100", "H200", "H800", "B200")
MOST_GPUS, LEAST_TOKENS, SEQUENCES, NETWORK_GB_S = 512, 1024, (2048, 8192), 50.0
DIMENSIONS = ((2048, 7168), (768, 2048))
"""Least and most of a model's and its experts' dimensions, from Qwen3-30B to DeepSeek-V3."""
MOST_TP, MOST_WITHOUT_PIPELINE = 4, 35e9
"""Tensor-parallel ranks, and parameters of a model that was timed without a pipeline: Qwen3-30B's."""
MOST_IMBALANCE = 1.5
"""Of the busiest rank, over the mean: what is known of a router's own choice in public steps is that it trained."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 90 % interval or, where it says so, a whole range; infinite where there is no such number."""

    value: float
    low: float
    high: float

    def error(self, known: float) -> float:
        """How far the value is above what is known, as a part of that."""
        return self.value / known - 1


def relative_width(parts_s: Mapping[str, float], *, extrapolated: bool = False) -> float:
    """Half the width of the 90 % interval of a step, relative to it; parts err independently of each other."""
    step_s = sum(parts_s.values())
    variance = sum((PART_SPREAD[part] * seconds / step_s) ** 2 for part, seconds in parts_s.items())
    return DEVIATIONS * math.sqrt(variance + SYSTEM_SPREAD**2) * (OUTSIDE_FACTOR if extrapolated else 1.0)


def least_width(*, extrapolated: bool) -> float:
    """Of all steps: what :func:`relative_width` is never below."""
    return DEVIATIONS * SYSTEM_SPREAD * (OUTSIDE_FACTOR if extrapolated else 1.0)


OWN_PARTS: Mapping[str, tuple[str, ...]] = {
    "dispatcher": ("all-to-all", "permutation and padding", "host and waiting"),
    "precision": ("expert GEMMs", "quantisation"),
}
"""Parts whose kernels a technique replaces."""


def gain_interval(
    with_it: Job, without: Job, parts_s: tuple[Mapping[str, float], Mapping[str, float]], *, extrapolated: bool = False
) -> Estimate:
    """Percent that one step is faster than another on the same machine, with its 90 % interval.

    Each part errs alike on both sides, and what they share cancels, but for the parts whose kernels differ: of these
    the one side's error says nothing of the other's. ``parts_s`` are seconds of either step, ``with_it``'s first.
    """
    own: tuple[str, ...] = ()
    if with_it.work.backend != without.work.backend:
        own += OWN_PARTS["dispatcher"]
    if with_it.precision != without.precision:
        own += OWN_PARTS["precision"]
    whole = [sum(parts.values()) for parts in parts_s]
    variance = 0.0
    for part, spread in PART_SPREAD.items():
        one, other = (parts[part] / step_s for parts, step_s in zip(parts_s, whole, strict=True))
        variance += spread**2 * (one**2 + other**2 if part in own else (one - other) ** 2)
    width = DEVIATIONS * math.sqrt(variance) * (OUTSIDE_FACTOR if extrapolated else 1.0)
    gain = math.log(with_it.tokens_per_gpu / whole[0]) - math.log(without.tokens_per_gpu / whole[1])
    low, value, high = (100 * math.expm1(gain + side) for side in (-width, 0.0, width))
    return Estimate(value=value, low=low, high=high)


def outside(job: Job) -> tuple[str, ...]:
    """What of a job lies outside of what the model was validated on, a phrase each; empty if nothing does."""
    node, work, shape = job.node, job.work, job.shape
    low, high = SEQUENCES
    # Megatron's published steps are of more GPUs; a node here is all that NVLink joins
    titan, over_network = job.stack.launch_s is None, job.gpus > node.gpus
    parameters = count_parameters(shape).total
    checks = (
        (node.gpu.name not in GPUS_SEEN, f"{node.gpu.name}: validated on {', '.join(GPUS_SEEN)}"),
        (
            not all(least <= size <= most for size, (least, most) in zip(_sizes(job), DIMENSIONS, strict=True)),
            f"model and expert dimensions {shape.dim} and {shape.moe_hidden_dim}: validated from "
            + " and ".join(f"{least} to {most}" for least, most in DIMENSIONS),
        ),
        (
            node.gpu.capability in ROCM,
            f"{node.gpu.name}: its ROCm kernels are assumed to reach the same shares of peak as a B200's",
        ),
        (titan and job.gpus > MOST_GPUS, f"{job.gpus} GPUs: validated for TorchTitan on up to {MOST_GPUS}"),
        (not low <= job.seq_len <= high, f"seq_len {job.seq_len}: validated from {low} to {high}"),
        (
            work.routed_tokens < LEAST_TOKENS,
            f"{work.routed_tokens} routed tokens in a micro-batch: validated from {LEAST_TOKENS}",
        ),
        (
            titan and job.pp == 1 and parameters > MOST_WITHOUT_PIPELINE,
            f"{parameters / 1e9:,.0f} G parameters without a pipeline: validated up to "
            f"{MOST_WITHOUT_PIPELINE / 1e9:.0f} G",
        ),
        (work.tp > MOST_TP, f"tensor parallelism over {work.tp} GPUs: validated up to {MOST_TP}"),
        (work.cp > 1, "context parallelism: never validated"),
        (work.ep == 1 and work.tp > 1, "experts split by tensor parallelism (ep 1): never validated"),
        (
            over_network and node.nic_gb_s is not None and node.nic_gb_s.value != NETWORK_GB_S,
            f"network of {float(node.nic_gb_s or 0):g} GB/s: validated at {NETWORK_GB_S:g}",
        ),
        (
            waits_over_network(job) and (shape.dim, shape.top_k, work.ep) != (7168, 8, 32),
            "waiting at TorchTitan's exchanges over the network: known only from public 671B steps with EP 32",
        ),
        (job.precision is Precision.FP8 and is_blackwell(node.gpu), "FP8 on Blackwell: its rates were never measured"),
        (job.emulated and is_blackwell(node.gpu), "emulated MXFP8 on Blackwell: validated on H100"),
        (
            titan and work.backend in (EPBackend.HYBRIDEP, EPBackend.MINIMAL_ASYNC_EP),
            f"{work.backend.value} is not modelled: it is taken to be as fast as DeepEP",
        ),
        (
            work.imbalance > MOST_IMBALANCE,
            f"a busiest rank with {work.imbalance:.2f} x the mean load: validated up to {MOST_IMBALANCE:g} x",
        ),
        (node.gpus > 8, f"NVLink among {node.gpus} GPUs: validated among 8"),
    )
    return tuple(reason for applies, reason in checks if applies)


def _sizes(job: Job) -> tuple[int, int]:
    return job.shape.dim, job.shape.moe_hidden_dim
