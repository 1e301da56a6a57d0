"""The published two-by-two with its missing arm, and whether its two gains compose.

Each arm is projected many times with constants drawn around their values, as uncertain as the way in which they are
known; the host's time on several nodes is found anew each time, so that every draw meets the published baseline. What
is left uncertain is what the gains depend on.

What is not drawn is the form in which the host's time hides behind the GPU's (``layer_time.py``); the intervals are too
narrow by whatever that is wrong.

The interaction is the gain of both over the product of the gains of each, less one: zero if they compose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import brentq

from moelab.analysis.published import THROUGHPUT
from moelab.experiment import Routing
from moelab.projection.calibration import CALIBRATION, Calibration, Constant, with_values
from moelab.projection.job import ROUTINGS, Job
from moelab.projection.step import step_time
from moelab.projection.step_cases import published_job, tps_of

ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
SPREAD = {"measured": 0.05, "quoted": 0.10, "fitted": 0.10, "assumed": 0.30}
"""Relative standard deviation of a constant by how it is known."""
DRAWS, SEED = 100, 20261128
LEAST_HOST_S, MOST_HOST_S = 1e-6, 1.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TwoByTwo:
    """Four arms under one routing.

    Attributes:
        routing: how tokens choose experts.
        tps: tokens/s/GPU of each arm; ``mxfp8_standard`` was never published.
        gains: over ``bf16_standard``, as a ratio.
        interaction: see the module.
    """

    routing: Routing
    tps: Mapping[str, Estimate]
    gains: Mapping[str, Estimate]
    interaction: Estimate


@functools.lru_cache(maxsize=8)
def projected_two_by_two(
    routing: Routing = Routing.ROUND_ROBIN, *, calibration: Calibration = CALIBRATION, draws: int = DRAWS
) -> TwoByTwo:
    """Project the four published arms, with the software of the time.

    Args:
        routing: ``round_robin``, as published, or ``random_balanced``.
        calibration: constants around which others are drawn.
        draws: how many.
    """
    published = {arm: published_job(arm) for arm in ARMS}
    jobs = {arm: replace(job, routing=ROUTINGS[routing]) for arm, job in published.items()}
    random = np.random.default_rng(SEED)
    samples = [calibration] + [drawn(calibration, random, published["bf16_standard"]) for _ in range(draws)]
    tps = {arm: np.array([tps_of(job, one) for one in samples]) for arm, job in jobs.items()}
    gains = {arm: tps[arm] / tps["bf16_standard"] for arm in ARMS[1:]}
    both = gains["mxfp8_deepep"] / (gains["bf16_deepep"] * gains["mxfp8_standard"]) - 1
    return TwoByTwo(
        routing=routing,
        tps={arm: _estimate(values) for arm, values in tps.items()},
        gains={arm: _estimate(values) for arm, values in gains.items()},
        interaction=_estimate(both),
    )


def drawn(calibration: Calibration, random: np.random.Generator, anchor: Job) -> Calibration:
    """Constants drawn anew, with the host's time such that the published baseline is met."""
    values = {}
    for field in fields(calibration):
        constant: Constant = getattr(calibration, field.name)
        values[field.name] = constant.value * float(np.exp(random.normal(0, SPREAD[constant.how])))
    once = with_values(calibration, **values)
    target_s = anchor.tokens_per_gpu / THROUGHPUT[0].tps

    def late_s(host_s: float) -> float:
        return step_time(anchor, with_values(once, host_nodes_s=host_s)).total_s - target_s

    if late_s(LEAST_HOST_S) >= 0:  # the rest alone is as long as the step that was published
        return with_values(once, host_nodes_s=LEAST_HOST_S)
    return with_values(once, host_nodes_s=brentq(late_s, LEAST_HOST_S, MOST_HOST_S, xtol=1e-5))


def _estimate(values: np.ndarray) -> Estimate:
    low, high = np.quantile(values[1:], [0.05, 0.95])
    return Estimate(value=float(values[0]), low=float(low), high=float(high))
