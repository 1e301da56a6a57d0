"""The published two-by-two with its missing arm, and whether its two gains compose.

Each arm is projected many times with constants drawn around their values, as uncertain as the way in which they are
known; the host's time on several nodes is found anew each time, so that every draw meets the published baseline. What
is left uncertain is what the gains depend on.

What is not drawn is the form in which the host's time hides behind the GPU's (``step.py``); the intervals are too
narrow by whatever that is wrong. Nor do the three published rows *identify* the missing arm, or what random routing
does: :func:`meeting_all_published` meets all three exactly with other constants, of which two are far outside of what
is drawn, and says something else.

The interaction is the gain of both over the product of the gains of each, less one: zero if they compose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq, root

from moelab.analysis.published import THROUGHPUT
from moelab.experiment import EPBackend, Experiment, Routing
from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.projection.calibration import CALIBRATION, Calibration, drawn, with_values
from moelab.projection.job import MODEL_OF_ROUTING, Job, job_of, titan
from moelab.projection.step import step_time, tps_of
from moelab.projection.uncertainty import Estimate
from moelab.titan.arms import named_arms

ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
DRAWS, SEED = 100, 20261128
LEAST_HOST_S, MOST_HOST_S = 1e-6, 1.0


def published_job(arm: str) -> Job:
    """A published 671B arm, or the one that was not, with the software of the time."""
    return job_as_published(named_arms()[f"dsv3_671b_{arm}"])


def job_as_published(experiment: Experiment) -> Job:
    """A job under TorchTitan of early 2026 with its own dispatchers, whose permutation was not compiled."""
    layout = check(experiment).layout
    assert layout is not None, "the published layouts are legal"
    deepep = experiment.ep_backend is EPBackend.DEEPEP
    stack = replace(
        titan(experiment),
        name="TorchTitan, March 2026",
        permutation="deepep dense" if deepep else "standard",
        deepep_v1=True,
    )
    return job_of(experiment, layout, cluster_of(experiment.hardware).node, stack=stack)


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
    jobs = {arm: replace(published_job(arm), routing=MODEL_OF_ROUTING[routing]) for arm in ARMS}
    random = np.random.default_rng(SEED)
    samples = [calibration] + [_meeting_the_baseline(drawn(calibration, random)) for _ in range(draws)]
    tps = {arm: np.array([tps_of(job, one) for one in samples]) for arm, job in jobs.items()}
    gains = {arm: tps[arm] / tps["bf16_standard"] for arm in ARMS[1:]}
    both = gains["mxfp8_deepep"] / (gains["bf16_deepep"] * gains["mxfp8_standard"]) - 1
    return TwoByTwo(
        routing=routing,
        tps={arm: _estimate(values) for arm, values in tps.items()},
        gains={arm: _estimate(values) for arm, values in gains.items()},
        interaction=_estimate(both),
    )


@dataclass(frozen=True, kw_only=True)
class OtherConstants:
    """Three constants with which the model meets all three published rows, and what it then says of what was not.

    Attributes:
        host_nodes_s: of the host, a layer and micro-batch on several nodes, seconds.
        blackwell_grouped: rate of BF16 grouped products, share of the peak.
        deepep_gb_s: that DeepEP reaches of a network card, GB/s.
        tps: of the four arms under forced balance.
        deepep_gain_random: of BF16 with DeepEP under balanced random routing, as a ratio.
    """

    host_nodes_s: float
    blackwell_grouped: float
    deepep_gb_s: float
    tps: Mapping[str, float]
    deepep_gain_random: float


@functools.cache
def meeting_all_published() -> OtherConstants:
    """Free the host's time, BF16's grouped rate and DeepEP's share of the network, and meet 651, 859 and 918.

    Raises:
        RuntimeError: if no such constants are found.
    """
    jobs = {arm: published_job(arm) for arm in ARMS}
    published = {row.arm: row.tps for row in THROUGHPUT}
    card = jobs["bf16_deepep"].node.nic_gb_s
    assert card is not None, "32 nodes have a network"

    def tps(arm: str, logs: np.ndarray, routing: Routing = Routing.ROUND_ROBIN) -> float:
        host_s, grouped, share = map(float, np.exp(logs))
        job = replace(jobs[arm], routing=MODEL_OF_ROUTING[routing])
        if "deepep" in arm:
            job = replace(job, node=replace(job.node, nic_gb_s=replace(card, value=float(card) * share)))
        return tps_of(job, with_values(host_nodes_s=host_s, blackwell_grouped=grouped))

    def errors(logs: np.ndarray) -> list[float]:
        return [float(np.log(tps(arm, logs) / rate)) for arm, rate in published.items()]

    solved = root(errors, np.log([0.05, 0.3, 0.4]), tol=1e-9)
    if not solved.success:
        raise RuntimeError(f"no constants meet {published}: {solved.message}")
    gain = tps("bf16_deepep", solved.x, Routing.RANDOM_BALANCED) / tps(ARMS[0], solved.x, Routing.RANDOM_BALANCED)
    host_s, grouped, share = map(float, np.exp(solved.x))
    return OtherConstants(
        host_nodes_s=host_s,
        blackwell_grouped=grouped,
        deepep_gb_s=share * float(CALIBRATION.network) * float(card),
        tps={arm: tps(arm, solved.x) for arm in ARMS},
        deepep_gain_random=gain,
    )


def equal_seconds_tps() -> float:
    """Tokens/s of the missing arm if MXFP8 saved the seconds of a step that it saved beside DeepEP; no model."""
    rate = {row.arm: row.tps for row in THROUGHPUT}
    return 1 / (1 / rate["bf16_standard"] - 1 / rate["bf16_deepep"] + 1 / rate["mxfp8_deepep"])


def identification_lines(forced: TwoByTwo, random: TwoByTwo) -> list[str]:
    """What the published rows leave open: the model's own figures, and those of other constants that meet all three.

    Args:
        forced: projected under forced balance.
        random: under balanced random routing.
    """
    other = meeting_all_published()
    missing, gain = forced.tps["mxfp8_standard"], random.gains["bf16_deepep"]
    return [
        f"missing arm, this model: {missing.value:.0f} tokens/s ({missing.low:.0f} to {missing.high:.0f})",
        f"missing arm, equal seconds saved: {equal_seconds_tps():.0f} tokens/s",
        f"missing arm, other constants: {other.tps['mxfp8_standard']:.0f} tokens/s; they too meet all published rows: "
        f"host {1e3 * other.host_nodes_s:.0f} ms a layer, BF16 grouped products at {other.blackwell_grouped:.0%} of "
        f"the peak, DeepEP at {other.deepep_gb_s:.1f} GB/s",
        f"DeepEP under random routing, this model: {gain.value - 1:+.0%}; other constants: "
        f"{other.deepep_gain_random - 1:+.0%}",
    ]


def _meeting_the_baseline(calibration: Calibration) -> Calibration:
    """The calibration with the host's time such that the published baseline is met."""
    baseline = published_job("bf16_standard")
    target_s = baseline.tokens_per_gpu / THROUGHPUT[0].tps

    def late_s(host_s: float) -> float:
        return step_time(baseline, with_values(calibration, host_nodes_s=host_s)).total_s - target_s

    if late_s(LEAST_HOST_S) >= 0:  # the rest alone is as long as the step that was published
        return with_values(calibration, host_nodes_s=LEAST_HOST_S)
    return with_values(calibration, host_nodes_s=brentq(late_s, LEAST_HOST_S, MOST_HOST_S, xtol=1e-5))


def _estimate(values: np.ndarray) -> Estimate:
    low, high = np.quantile(values[1:], [0.05, 0.95])
    return Estimate(value=float(values[0]), low=float(low), high=float(high))
