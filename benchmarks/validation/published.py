"""The published two-by-two: what three measured steps say of the missing arm and of random routing, and what not.

No profile of those steps was published, and other constants than the model's meet them as well. So the answer is a set.
Constants are drawn: those of :data:`UNKNOWN` over all that is thinkable, the others around their values, as uncertain
as the way in which each is known. Then the three of :data:`SOLVED`, which decide most, are found with which the model
meets 651, 859 and 918 tokens/s, each within :data:`RUN_TO_RUN`, for one run an arm was published and no variance. What
would need impossible values is dropped. Every figure is the range over the sets that are left, with their median.

The interaction is the gain of both over the product of the gains of each, less one: zero if they compose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from moelab.experiment import EPBackend, Routing
from moelab.hardware import cluster_of
from moelab.judge.throughput import THROUGHPUT
from moelab.layout import check
from moelab.planning.time.calibration import CALIBRATION, CONSTANTS, Calibration, with_values
from moelab.planning.time.job import MODEL_OF_ROUTING, STANDARD, Job, Permutation, job_of, titan
from moelab.planning.time.step import step_parts_s
from moelab.planning.trust import Estimate
from moelab.titan.arms import named_arms

from .shapes import tps_of

ARMS = ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep")
DRAWS, SEED, RUN_TO_RUN = 100, 20261128, 0.02
UNKNOWN = {
    "nccl_network": (0.6, 1.0),
    "deepep_network": (0.15, 0.9),
    "flex_forward": (0.1, 0.3),
    "launch_s": (40e-6, 140e-6),
}
"""What nobody published of that cluster and its software, and what it may have been: shares of the network card that
NCCL and DeepEP reached, FlexAttention's rates, and the host's time of a launch."""
SOLVED = {"wait_s": (0.0, 10e-3), "deepep_s": (50e-6, 10e-3), "blackwell_grouped": (0.15, 0.7)}
"""What the three steps decide, given all else, and within which limits a value is possible."""


DENSE = Permutation((2.55, 7.95, 7.25, 1.73), 25)
"""TorchTitan's own over DeepEP, whose rows PyTorch permutes (``all_to_all_h100.json``)."""


def published_job(arm: str) -> Job:
    """A published 671B arm, or the one that was not, under TorchTitan of early 2026, its permutation not compiled."""
    experiment = named_arms()[f"dsv3_671b_{arm}"]
    layout = check(experiment).layout
    assert layout is not None, "the published layouts are legal"
    stack = replace(
        titan(experiment),
        name="TorchTitan, March 2026",
        permutation=DENSE if experiment.ep_backend is EPBackend.DEEPEP else STANDARD,
    )
    return job_of(experiment, layout, cluster_of(experiment.hardware).node, stack=stack)


CONSTANT_SPREAD = {"measured": 0.05, "quoted": 0.10, "fitted": 0.10, "assumed": 0.30}
"""Relative standard deviation of a constant by how it is known."""


def drawn(calibration: Calibration, random: np.random.Generator) -> Calibration:
    """Constants drawn anew around their values, log-normally, each by its :data:`CONSTANT_SPREAD`."""
    values = {
        name: getattr(calibration, name) * float(np.exp(random.normal(0, CONSTANT_SPREAD[constant.how])))
        for name, constant in CONSTANTS.items()
    }
    return with_values(calibration, **values)


@functools.lru_cache(maxsize=8)
def meeting_published(calibration: Calibration, draws: int) -> tuple[Calibration, ...]:
    """Constants with which the model meets all three published steps; of the ``draws``, those that have a solution.

    Raises:
        RuntimeError: if no set meets the published steps.
    """
    random = np.random.default_rng(SEED)
    jobs = [published_job(row.arm) for row in THROUGHPUT]
    tries = (_solved(jobs, calibration, random) for _ in range(draws))
    sets = tuple(one for one in tries if one is not None)
    if not sets:
        raise RuntimeError(f"none of {draws} sets of constants meets the published steps")
    return sets


def _solved(jobs: Sequence[Job], calibration: Calibration, random: np.random.Generator) -> Calibration | None:
    """Constants drawn, and those of :data:`SOLVED` found; None if no possible values meet the published steps.

    A step grows all but in proportion to each wait and to the inverse of a rate, so a few steps of Newton's method with
    its first slopes end where the steps are met.
    """
    unknown = {name: float(random.uniform(*limits)) for name, limits in UNKNOWN.items()}
    others = with_values(drawn(calibration, random), **unknown)
    published_s = [job.tokens_per_gpu / row.tps for job, row in zip(jobs, THROUGHPUT, strict=True)]
    # one run of each arm was published: its time may be off by as much as runs differ
    target_s = np.array(published_s) * random.uniform(1 - RUN_TO_RUN, 1 + RUN_TO_RUN, size=len(jobs))

    def constants(x: np.ndarray) -> Calibration:
        wait_s, deepep_s, inverse = map(float, x)
        return with_values(others, wait_s=wait_s, deepep_s=deepep_s, blackwell_grouped=1 / inverse)

    def late_s(x: np.ndarray) -> np.ndarray:
        return np.array([job.tokens_per_gpu / tps_of(job, constants(x)) for job in jobs]) - target_s

    low, high = np.array(list(SOLVED.values())).T
    low[2], high[2] = 1 / high[2], 1 / low[2]  # a step is linear in the inverse of a rate, not in the rate
    low[0] = high[0] / 1e6  # no constant is zero
    x, steps = np.array([1e-3, 1e-3, 1 / calibration.blackwell_grouped]), np.diag([1e-3, 1e-3, 0.2])
    late = late_s(x)
    slopes = np.array([(late_s(x + step) - late) / step.sum() for step in steps]).T  # once: a step is almost linear
    for _ in range(4):
        x = x - np.linalg.solve(slopes, late)
        if np.any(x < low) or np.any(x > high):  # steps hardly bend, so what leaves the limits does not come back
            return None
        late = late_s(x)
    return constants(x)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Four arms under one routing; estimates are medians with the whole range."""

    routing: Routing
    tps: Mapping[str, Estimate]  # tokens/s/GPU of each arm; ``mxfp8_standard`` was never published
    gains: Mapping[str, Estimate]  # over ``bf16_standard``, as a ratio
    interaction: Estimate  # see the module
    constants: tuple[Calibration, ...]  # every set with which the published steps are met
    samples: Mapping[str, np.ndarray]  # tokens/s/GPU of each arm by each of them


@functools.lru_cache(maxsize=8)
def sampled_two_by_two(
    routing: Routing = Routing.ROUND_ROBIN, *, calibration: Calibration = CALIBRATION, draws: int = DRAWS
) -> Sampled:
    """Project the four published arms, with the software of the time, by all constants that meet what was published.

    Routing is ``round_robin``, as published, or ``random_balanced``.
    """
    jobs = {arm: replace(published_job(arm), routing=MODEL_OF_ROUTING[routing]) for arm in ARMS}
    sets = meeting_published(calibration, draws)
    tps = {arm: np.array([tps_of(job, one) for one in sets]) for arm, job in jobs.items()}
    gains = {arm: tps[arm] / tps["bf16_standard"] for arm in ARMS[1:]}
    return Sampled(
        routing=routing,
        tps={arm: _estimate(values) for arm, values in tps.items()},
        gains={arm: _estimate(values) for arm, values in gains.items()},
        interaction=_estimate(_interaction(tps)),
        constants=sets,
        samples=tps,
    )


def published_parts(two: Sampled) -> dict[str, dict[str, Estimate]]:
    """Seconds of each part of the four steps: by the set in the middle, whose parts add up, with the range over all.

    The middle is the set whose parts of the baseline lie nearest to their medians over all sets, in seconds.
    """
    baseline = replace(published_job(ARMS[0]), routing=MODEL_OF_ROUTING[two.routing])
    in_parts = np.array([list(step_parts_s(baseline, one).values()) for one in two.constants])
    middle = int(np.abs(in_parts - np.median(in_parts, axis=0)).sum(axis=1).argmin())
    parts: dict[str, dict[str, Estimate]] = {}
    for arm in ARMS:
        job = replace(published_job(arm), routing=MODEL_OF_ROUTING[two.routing])
        steps = [step_parts_s(job, one) for one in two.constants]
        by_part = {part: [step[part] for step in steps] for part in steps[0]}
        parts[arm] = {
            name: Estimate(value=all_s[middle], low=min(all_s), high=max(all_s)) for name, all_s in by_part.items()
        }
    return parts


def _interaction(tps: Mapping[str, np.ndarray]) -> np.ndarray:
    one_each = tps["bf16_deepep"] * tps["mxfp8_standard"]
    return np.asarray(tps["mxfp8_deepep"] * tps["bf16_standard"] / one_each - 1)


def _estimate(values: np.ndarray) -> Estimate:
    return Estimate(value=float(np.median(values)), low=float(values.min()), high=float(values.max()))


MEASUREMENTS = {
    "wait_s": "a trace of one published step: how long ranks wait at their exchanges",
    "deepep_s": "DeepEP alone on four nodes: its time beside its bytes",
    "deepep_network": "DeepEP alone on four nodes: its rate",
    "nccl_network": "the standard all-to-all alone on four nodes",
    "blackwell_grouped": "BF16 grouped products in a step on one GPU",
}
"""By the constant that each would settle; two runs that were not published would settle more than one."""


def remaining(forced: Sampled, random: Sampled) -> dict[str, float]:
    """What each single measurement would leave of the spread of the three answers, on average; the least first.

    An answer's spread given a measurement is what a line through the sets of constants does not explain.
    """
    gain = random.samples["bf16_deepep"] / random.samples["bf16_standard"]
    answers = (forced.samples["mxfp8_standard"], gain, _interaction(forced.samples))
    measured = {
        words: np.array([getattr(one, name) for one in forced.constants]) for name, words in MEASUREMENTS.items()
    }
    measured["a run of the missing arm"] = forced.samples["mxfp8_standard"]
    measured["a run of BF16 with DeepEP under random routing"] = random.samples["bf16_deepep"]
    left = {
        words: float(np.mean([np.sqrt(max(0.0, 1 - np.corrcoef(values, one)[0, 1] ** 2)) for one in answers]))
        for words, values in measured.items()
    }
    return dict(sorted(left.items(), key=lambda item: item[1]))


def identification_lines(forced: Sampled, random: Sampled) -> list[str]:
    """What the published steps leave open, and which single measurement would settle most; as :func:`remaining`."""
    missing, gain = forced.tps["mxfp8_standard"], random.gains["bf16_deepep"]
    settles, left = next(iter(remaining(forced, random).items()))
    return [
        f"{len(forced.constants)} sets of constants meet 651, 859 and 918 tokens/s within {RUN_TO_RUN:.0%}; they say:",
        f"  missing arm, MXFP8 with the standard all-to-all: {missing.low:.0f} to {missing.high:.0f} tokens/s",
        f"  DeepEP's gain under random routing: {gain.low - 1:+.0%} to {gain.high - 1:+.0%}",
        f"  interaction: {forced.interaction.low:+.1%} to {forced.interaction.high:+.1%}",
        f"one measurement that would settle most: {settles}; it leaves {left:.0%} of the spread",
    ]


def published_tables() -> dict[str, Any]:
    """What ``moelab/data/validation.json`` has of the published study."""
    both = {one: sampled_two_by_two(one) for one in (Routing.ROUND_ROBIN, Routing.RANDOM_BALANCED)}
    return {
        "published": {
            routing.value: {
                "tps": {arm: _rounded(one) for arm, one in two.tps.items()},
                "gains": {arm: _rounded(one) for arm, one in two.gains.items()},
                "interaction": _rounded(two.interaction),
                "parts_s": {
                    arm: {part: _rounded(one) for part, one in parts.items()}
                    for arm, parts in published_parts(two).items()
                },
                "sets": len(two.constants),
            }
            for routing, two in both.items()
        },
        "left_open": identification_lines(*both.values()),
    }


def _rounded(estimate: Estimate) -> dict[str, float]:
    """In the six digits that do not differ between machines."""
    return {name: float(f"{value:.6g}") for name, value in asdict(estimate).items()}
