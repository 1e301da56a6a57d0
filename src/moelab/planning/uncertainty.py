"""How far a prediction can be trusted: the width of its interval, and what lies outside of what the model has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moelab.experiment import EPBackend, Precision
from moelab.hardware import ROCM
from moelab.planning.time.calibration import Calibration, drawn
from moelab.planning.time.exchange import waits_over_network
from moelab.planning.time.gemm import is_blackwell
from moelab.planning.time.job import CATEGORIES, PART_SPREAD, Job, Times
from moelab.planning.time.step import step_parts_s

CONFIDENCE = 0.9


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 90 % interval or, where it says so, a whole range; infinite where there is no such number."""

    value: float
    low: float
    high: float

    def error(self, known: float) -> float:
        """How far the value is above what is known, as a part of that."""
        return self.value / known - 1


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
MOST_IMBALANCE = 1.5
"""Of the busiest rank, over the mean: what is known of a router's own choice in public steps is that it trained."""
WAIT = "waiting at TorchTitan's exchanges over the network: known only from public 671B steps with EP 32"

ACCUMULATED = "gradients accumulated without a pipeline: no public step of TorchTitan does so"


def relative_width(parts_s: Mapping[str, float], *, extrapolated: bool = False) -> float:
    """Half the width of the 90 % interval of a step, relative to it; parts err independently of each other."""
    step_s = sum(parts_s.values())
    variance = sum((PART_SPREAD[part] * seconds / step_s) ** 2 for part, seconds in parts_s.items())
    # 1.645 standard deviations to either side hold 90 % of a normal distribution
    return 1.645 * math.sqrt(variance + SYSTEM_SPREAD**2) * (OUTSIDE_FACTOR if extrapolated else 1.0)


GAIN_DRAWS = 64
OWN_PARTS: Mapping[str, tuple[str, ...]] = {
    "dispatcher": ("all-to-all", "permutation and padding", "host and waiting"),
    "precision": ("expert GEMMs", "quantisation"),
}
"""Parts whose kernels a technique replaces."""


def gain_interval(with_it: Job, without: Job, calibration: Calibration, *, extrapolated: bool = False) -> Estimate:
    """Percent that one job is faster than another on the same machine, with its 90 % interval.

    Both sides are priced with the same drawn constants, and each part errs alike on both, but for the parts whose
    kernels differ: of these the one side's error says nothing of the other's.
    """
    own: tuple[str, ...] = ()
    if with_it.work.backend != without.work.backend:
        own += OWN_PARTS["dispatcher"]
    if with_it.precision != without.precision:
        own += OWN_PARTS["precision"]
    random = np.random.default_rng(0)  # the same draws for every pair: a ranking by gains does not flicker
    spread = np.array([PART_SPREAD[part] for part in CATEGORIES])
    differs = np.array([part in own for part in CATEGORIES])

    def log_speeds(constants: Calibration, errors: Sequence[Times]) -> Times:
        speeds = []
        for job, factors in zip((with_it, without), errors, strict=True):
            parts_s = step_parts_s(job, constants)
            seconds = sum(error * parts_s[part] for part, error in zip(CATEGORIES, factors, strict=True))
            speeds.append(job.tokens_per_gpu / seconds)
        return np.log(speeds)

    exact = np.ones(len(CATEGORIES))
    one, other = log_speeds(calibration, (exact, exact))  # the middle is the projections' own, not that of the draws
    logs = []
    for _ in range(GAIN_DRAWS):
        shared = np.exp(random.normal(0, spread))  # a factor: no part can take less than no time
        apart = np.where(differs, np.exp(random.normal(0, spread)), shared)
        drawn_one, drawn_other = log_speeds(drawn(calibration, random), (apart, shared))
        logs.append(drawn_one - drawn_other)  # what both sides err alike cancels
    width = 1.645 * float(np.std(logs)) * (OUTSIDE_FACTOR if extrapolated else 1.0)
    low, value, high = (100 * (math.exp(one - other + side) - 1) for side in (-width, 0.0, width))
    return Estimate(value=value, low=low, high=high)


def outside(job: Job) -> tuple[str, ...]:
    """What of a job lies outside of what the model was validated on, a phrase each; empty if nothing does."""
    node, work = job.node, job.work
    low, high = SEQUENCES
    sizes = (job.shape.dim, job.shape.moe_hidden_dim)
    # Megatron's published steps are of more GPUs; a node here is all that NVLink joins
    titan, over_network = job.stack.host == "torch", job.gpus > node.gpus
    checks = (
        (node.gpu.name not in GPUS_SEEN, f"{node.gpu.name}: validated on {', '.join(GPUS_SEEN)}"),
        (
            not all(least <= size <= most for size, (least, most) in zip(sizes, DIMENSIONS, strict=True)),
            f"model and expert dimensions {sizes[0]} and {sizes[1]}: validated from "
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
        (work.cp > 1, "context parallelism: never validated"),
        (work.ep == 1 and work.tp > 1, "experts split by tensor parallelism (ep 1): never validated"),
        (
            over_network and node.nic_gb_s is not None and node.nic_gb_s.value != NETWORK_GB_S,
            f"network of {float(node.nic_gb_s or 0):g} GB/s: validated at {NETWORK_GB_S:g}",
        ),
        (waits_over_network(job) and (job.shape.dim, job.shape.top_k, work.ep) != (7168, 8, 32), WAIT),
        (job.precision is Precision.FP8 and is_blackwell(node.gpu), "FP8 on Blackwell: its rates were never measured"),
        (job.emulated and is_blackwell(node.gpu), "emulated MXFP8 on Blackwell: validated on H100"),
        (work.backend is EPBackend.MINIMAL_ASYNC_EP, "minimal_async_ep: modelled as DeepEP"),
        (
            work.imbalance > MOST_IMBALANCE,
            f"a busiest rank with {work.imbalance:.2f} x the mean load: validated up to {MOST_IMBALANCE:g} x",
        ),
        (node.gpus > 8, f"NVLink among {node.gpus} GPUs: validated among 8"),
    )
    return tuple(reason for applies, reason in checks if applies)
