"""Is an arm's loss equivalent to the reference's? One value a seed in, one verdict with its numbers out.

The statistics are in :mod:`moelab.analysis.equivalence`; here the three answers are told apart. "Not equivalent" alone
would merge two findings that call for opposite actions (the arm hurts; there are too few seeds to say), so the third
answer exists and comes with the number of seeds that would settle it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moelab.analysis.arms import contrast
from moelab.analysis.equivalence import MAX_SEEDS_SEARCHED, MIN_SEEDS, paired_tests, seeds_needed
from moelab.analysis.interval import Interval
from moelab.analysis.margin import Margin, equivalence_margin

NAN = float("nan")


class Answer(StrEnum):
    """What a comparison says."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INSUFFICIENT = "insufficient data"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Tests of the paired differences of one study; NaN where the seeds do not give the number."""

    mean: float
    sd: float
    interval: Interval
    tost_p: float
    t_p: float
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one arm, with every number behind it.

    Losses and differences (arm − reference, paired by seed) are in nats. ``interval`` is the one that the TOST tests:
    it lies inside ±``margin_nats`` exactly when the answer is ``equivalent``. ``settled_by`` is empty unless the answer
    is ``insufficient data``; ``excluded`` names each run left out and why; ``steps`` is the first and last step behind
    the losses, None for a held-out loss.
    """

    arm: str
    reference: str
    answer: Answer
    quantity: str
    seeds: tuple[int, ...]
    mean_difference_nats: float
    sd_difference: float
    interval: Interval
    margin_nats: float
    margin_source: str
    reference_sd: float
    tost_p: float
    t_p: float
    arm_losses: dict[int, float]
    reference_losses: dict[int, float]
    excluded: tuple[str, ...]
    settled_by: str
    steps: tuple[int, int] | None

    @property
    def n_seeds(self) -> int:
        """Number of seeds that both arms have."""
        return len(self.seeds)

    def sentence(self) -> str:
        """State the verdict in words with the numbers behind it."""
        arm, reference, shared = contrast(self.arm, self.reference)
        both = f" (both {shared})" if shared else ""
        if not self.seeds:
            return f"{arm} and {reference}{both} have no finished seed in common: {self.answer}. {self.settled_by}"
        margin = f"margin ±{self.margin_nats:.4f}" if math.isfinite(self.margin_nats) else "no margin"
        seeds = "1 seed" if self.n_seeds == 1 else f"{self.n_seeds} seeds"
        sentence = (
            f"{arm} differs from {reference}{both} by {self.mean_difference_nats:+.4f} nats in {self.quantity} "
            f"({self._interval_words()}), {margin}, n = {seeds}: {self.answer}."
        )
        return f"{sentence} {self.settled_by}".strip()

    def _interval_words(self) -> str:
        if not self.interval.exists:
            return "no interval from one seed"
        low, high = self.interval.low, self.interval.high
        return f"{100 * self.interval.level:g} % interval {low:+.4f} to {high:+.4f}"


def judge(
    arm_losses: Mapping[int, float],
    reference_losses: Mapping[int, float],
    *,
    arm: str,
    reference: str,
    quantity: str = "final loss",
    margin_nats: float | None = None,
    margin_factor: float = 2.0,
    alpha: float = 0.05,
    excluded: tuple[str, ...] = (),
    steps: tuple[int, int] | None = None,
) -> Verdict:
    """Judge one arm against the reference from one loss a seed.

    ``equivalent`` where the interval of the mean paired difference lies inside ±margin; ``different`` where it does not
    and the two-sided paired t test at ``alpha`` finds a difference; ``insufficient data`` otherwise, with fewer than 3
    common seeds, and where the reference has no spread to take a margin from.

    Args:
        arm_losses: Loss of the arm by seed, nats per token.
        reference_losses: Loss of the reference by seed. Seeds without a partner still count for the spread.
        arm: Name of the arm.
        reference: Name of the reference arm.
        quantity: What the losses are, for the sentence.
        margin_nats: Margin; None takes ``margin_factor`` times a lower confidence limit of the reference's spread.
        margin_factor: Margin in units of the reference's seed-to-seed standard deviation.
        alpha: Rate allowed for a false "equivalent" at the margin and for a false "different" at no difference.
        excluded: Runs already left out, each with its reason. A loss that is not finite is added to them.
        steps: First and last step behind the losses, where they come from training steps.

    Returns:
        The verdict.

    Raises:
        BadInput: ``margin_nats``, ``margin_factor`` or ``alpha`` is out of range.

    Example:
        >>> reference = {0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61}
        >>> arm = {0: 3.603, 1: 3.645, 2: 3.571, 3: 3.614}
        >>> str(judge(arm, reference, arm="mxfp8_standard", reference="bf16_standard").answer)
        'equivalent'
    """
    excluded += _not_finite(arm, arm_losses) + _not_finite(reference, reference_losses)
    arm_losses, reference_losses = _finite(arm_losses), _finite(reference_losses)
    margin = equivalence_margin(
        reference_losses, reference=reference, margin_nats=margin_nats, margin_factor=margin_factor, alpha=alpha
    )
    seeds = tuple(sorted(arm_losses.keys() & reference_losses.keys()))
    result = _compare([arm_losses[seed] - reference_losses[seed] for seed in seeds], margin)
    return Verdict(
        arm=arm,
        reference=reference,
        answer=result.answer,
        quantity=quantity,
        seeds=seeds,
        mean_difference_nats=result.mean,
        sd_difference=result.sd,
        interval=result.interval,
        margin_nats=margin.nats,
        margin_source=margin.source,
        reference_sd=margin.reference_sd,
        tost_p=result.tost_p,
        t_p=result.t_p,
        arm_losses=arm_losses,
        reference_losses=reference_losses,
        excluded=excluded,
        settled_by=_settled_by(len(seeds), result.sd, margin) if result.answer is Answer.INSUFFICIENT else "",
        steps=steps,
    )


def _compare(differences: list[float], margin: Margin) -> Comparison:
    """Run the tests where there are differences enough, and choose the answer."""
    if len(differences) < 2:
        mean = differences[0] if differences else NAN
        nothing = Interval(low=NAN, high=NAN, level=1.0 - 2.0 * margin.tost_alpha)
        return Comparison(mean=mean, sd=NAN, interval=nothing, tost_p=NAN, t_p=NAN, answer=Answer.INSUFFICIENT)
    tests = paired_tests(differences, margin.nats, tost_alpha=margin.tost_alpha, t_alpha=margin.alpha)
    answer = Answer.INSUFFICIENT
    if len(differences) >= MIN_SEEDS and margin.exists:
        if tests.equivalent[0]:
            answer = Answer.EQUIVALENT
        elif tests.different[0]:
            answer = Answer.DIFFERENT
    return Comparison(
        mean=float(np.mean(differences)),
        sd=float(tests.sd[0]),
        interval=Interval(low=float(tests.low[0]), high=float(tests.high[0]), level=tests.level),
        tost_p=float(tests.tost_p[0]) if margin.exists else NAN,
        t_p=float(tests.t_p[0]),
        answer=answer,
    )


def _settled_by(n_seeds: int, sd_difference: float, margin: Margin) -> str:
    """Say what would turn "insufficient data" into an answer."""
    if n_seeds < MIN_SEEDS:
        return f"At least {MIN_SEEDS} common seeds are needed."
    if not margin.exists:
        return "Give a margin in nats (margin_nats), or train the reference with different seeds."
    needed = seeds_needed(
        sd_difference=sd_difference,
        reference_sd=margin.reference_sd,
        alpha=margin.alpha,
        margin=margin.nats if margin.given else None,
        margin_factor=margin.factor,
    )
    if needed is None:
        return f"Even {MAX_SEEDS_SEARCHED} seeds would not give 80 % power: the differences are wide for this margin."
    if needed <= n_seeds:
        return f"{n_seeds} seeds have 80 % power for a true difference of 0, so it is probably not far from the margin."
    return f"If the true difference is 0, about {needed} common seeds would show it with 80 % power."


def _finite(losses: Mapping[int, float]) -> dict[int, float]:
    return {int(seed): float(loss) for seed, loss in losses.items() if math.isfinite(loss)}


def _not_finite(arm: str, losses: Mapping[int, float]) -> tuple[str, ...]:
    return tuple(f"{arm}, seed {seed}: loss is {loss}" for seed, loss in losses.items() if not math.isfinite(loss))
