"""Equivalence of two arms from a handful of seeds: the margin, the tests, outlying seeds, and how many it would take.

The question is not "is there a difference?" (an absent one cannot be shown by failing to find it) but "is the
difference smaller than what a change of seed does anyway?". So the margin is a multiple of σ, the seed-to-seed standard
deviation of the reference arm, and the interval of the mean paired difference is held against ±margin *and* against
zero: inside the margin is equivalent (with or without a shift), wholly outside is different, and between is open.

σ is estimated from the same few seeds, which goes wrong in three ways:

* The estimate is above σ in nearly half of all studies, and where the paired differences are tight (they are: both arms
  see the same data) most of those say "equivalent" at a true difference of exactly the margin: 34 % of studies with 3
  seeds, 41 % with 8, instead of 5 %. So the margin uses a lower confidence limit of σ at level α/2, and the interval
  has level α/2 on each side. A false "equivalent" at the margin needs the limit to exceed σ or the interval to miss, so
  by the union bound its rate is at most α, whatever the dependence between the two.
* One seed that went astray makes any arm look harmless. So σ is estimated without the one seed that widens it most
  (how far below σ that lies for normal losses is simulated), and a reference seed that lies apart is named.
* A reference whose seeds scatter widely would let anything pass. So the margin has a cap: 1 % of the reference's loss.

And a reference whose seeds hardly scatter would let nothing pass. So the margin has a floor, which is less than
rounding alone moves a loss by.

Functions on ``(N, M)`` arrays take N seeds of M independent studies at once, so that the calibration tests exercise the
code that judges a real study, in which M is 1.

References:
    Schuirmann, "A comparison of the two one-sided tests procedure and the power approach", 1987.
    Lakens, Scheel and Isager, "Equivalence testing for psychological research", 2018: margin and zero.
    Grubbs, "Procedures for detecting outlying observations in samples", 1969.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

from moelab.errors import BadInput
from moelab.judge.arms import arm_label, seeds_words

Array = NDArray[np.float64]
NAN = float("nan")

MIN_SEEDS = 3
MAX_SEEDS_SEARCHED = 100
ALPHA = 0.05
"""Rate that is allowed for a false "equivalent" at the margin."""
MARGIN_FACTOR = 2.0
"""Of the reference's seed-to-seed standard deviation. A choice."""
MARGIN_CAP = 0.01
"""Of the reference's mean loss: no derived margin is wider. A choice."""
MARGIN_FLOOR = 0.001
"""Of the reference's mean loss: no derived margin is narrower. Twelve pairs of trainings that differ in rounding alone
(a router weight nudged by one unit in the last place of BF16, or DeepEP's order of sums) are 0.13 to 2.5 % apart in the
last ten of 50 steps (``benchmarks/results/dispatcher_losses*.json``): a tenth of a percent is below all of them."""
COPIES_SPREAD = 1e-4
"""Of the mean loss: seeds that end closer together have no spread. In each of those pairs a step up to the 16th differs
by more; and two seeds begin with other weights."""
OUTLIER_ALPHA = 0.01
"""Rate at which normal seeds are said to hold an outlying one: at most this, by Bonferroni over the seeds."""
POWER = 0.8
_DRAWS = 20_000
_QUANTILES = 32


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval over seeds; ``low`` and ``high`` are NaN where the data give none (one seed)."""

    low: float
    high: float
    level: float

    @property
    def exists(self) -> bool:
        """Whether the data gave an interval."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    @property
    def percent(self) -> Interval:
        """That of a ratio, as percent above 1."""
        return Interval(low=100.0 * (self.low - 1.0), high=100.0 * (self.high - 1.0), level=self.level)

    def words(self, spec: str = "+.4f", unit: str = "") -> str:
        """The interval in words, its ends in the format ``spec``.

        Example:
            >>> Interval(low=1.25, high=3.5, level=0.95).words("+.1f", " %")
            '95 % interval +1.2 to +3.5 %'
        """
        if not self.exists:
            return "no interval"
        return f"{100 * self.level:g} % interval {self.low:{spec}} to {self.high:{spec}}{unit}"


def t_interval(values: Sequence[float]) -> Interval:
    """Student-t interval of the mean of independent values, one a seed: ``mean ± t(0.975, n − 1) · s/√n``.

    NaN on both sides for fewer than two values, which have no spread to take one from.

    Example:
        >>> interval = t_interval([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-0.484, 4.484)
    """
    if len(values) < 2:
        return Interval(low=NAN, high=NAN, level=0.95)
    low, high = DescrStatsW(np.asarray(values, dtype=float)).tconfint_mean(0.05)
    return Interval(low=float(low), high=float(high), level=0.95)


def prediction_interval(values: Sequence[float]) -> Interval:
    """Where one more value of the same normal distribution lies: ``mean ± t(0.975, n − 1) · s · √(1 + 1/n)``.

    Example:
        >>> interval = prediction_interval([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-2.968, 6.968)
    """
    if len(values) < 2:
        return Interval(low=NAN, high=NAN, level=0.95)
    n, mean = len(values), float(np.mean(values))
    reach = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) * math.sqrt(1.0 + 1.0 / n))
    return Interval(low=mean - reach, high=mean + reach, level=0.95)


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Equivalence margin, how it was derived, and the spread of the reference."""

    nats: float  # NaN where the reference has no spread to derive it from
    cap_nats: float  # of a derived margin
    source: str
    widest_nats: float  # that the reference's seeds leave room for, below the cap; the margin itself if it was given
    reference_sd: float  # over seeds without the one that widens it most; NaN for fewer than three
    given: bool
    floor_nats: float = 0.0  # of a derived margin

    @property
    def exists(self) -> bool:
        """Whether there is a margin to test against."""
        return math.isfinite(self.nats)

    @property
    def tost_alpha(self) -> float:
        """Level on each side of the interval: half of the rate goes to the estimated spread of a derived margin."""
        return ALPHA if self.given else ALPHA / 2.0


def equivalence_margin(
    reference_losses: Mapping[int, float],
    *,
    reference: str,
    margin_nats: float | None = None,
    margin_cap_nats: float | None = None,
) -> Margin:
    """Take the margin as given, or derive it: ``MARGIN_FACTOR · lower limit of σ``, between its floor and its cap.

    Args:
        reference_losses: Finite loss of the reference by seed, nats per token.
        reference: Name of the reference arm.
        margin_nats: The margin where a person gives it; only a cap that is given too applies.
        margin_cap_nats: None takes 1 % of the reference's mean loss, outlying seeds left out.

    Raises:
        BadInput: An option is out of range.

    Example:
        >>> equivalence_margin({0: 3.58, 1: 3.60, 2: 3.62}, reference="bf16_standard").nats.__round__(3)
        0.029
    """
    for name, value in (("margin_nats", margin_nats), ("margin_cap_nats", margin_cap_nats)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise BadInput(f"{name} is {value}: give nats above 0, or leave it out to derive it from the reference")
    if margin_nats is not None and margin_cap_nats is not None and margin_nats > margin_cap_nats:
        raise BadInput(f"margin_nats is {margin_nats}, above margin_cap_nats, {margin_cap_nats}: leave one of them out")
    outlying = outlying_seeds(reference_losses)
    values = list(reference_losses.values())
    # A seed at 8 nats would raise the cap of 1 % as it would raise the spread.
    usual = [loss for seed, loss in reference_losses.items() if seed not in outlying]
    mean = abs(float(np.mean(usual))) if usual else NAN
    floor, cap = MARGIN_FLOOR * mean, MARGIN_CAP * mean
    cap_words = f"1 % of the mean loss of {arm_label(reference)}"
    if margin_cap_nats is not None:
        cap, cap_words = margin_cap_nats, "given"
    n = f"n = {seeds_words(len(values))}"
    has_spread = len(values) >= MIN_SEEDS and float(np.ptp(values)) > COPIES_SPREAD * mean
    sd = float(trimmed_sd(values)[0]) if has_spread else NAN
    if margin_nats is not None:
        wider = f"; wider than {cap_words}, {cap:.4f}" if margin_cap_nats is None and margin_nats > cap else ""
        nats, widest, source = margin_nats, margin_nats, f"given{wider}"
    elif not has_spread:
        nats, widest = NAN, cap
        source = f"none: {arm_label(reference)} has no seed-to-seed spread to derive it from ({n})"
    else:
        limit = float(lower_sd_limit(values, alpha=ALPHA / 2.0)[0])
        dof = len(values) - 1
        upper = float(np.std(values, ddof=1)) * math.sqrt(dof / stats.chi2.ppf(ALPHA / 2.0, dof))
        nats, widest = (min(max(MARGIN_FACTOR * sd_limit, floor), cap) for sd_limit in (limit, upper))
        source = (
            f"{MARGIN_FACTOR:g} × {limit:.4f}, the lower {100 * (1 - ALPHA / 2):g} % confidence limit of the "
            f"seed-to-seed standard deviation of {arm_label(reference)} (estimate {sd:.4f} without the seed that "
            f"widens it most, {n})"
        )
        alone = f"the seeds alone would give {MARGIN_FACTOR * limit:.4f}: {source}"
        if nats == cap:
            source = f"its cap, {cap:.4f} ({cap_words}); {alone}"
        elif nats == floor:
            source = f"its floor, {floor:.4f} (0.1 % of the mean loss, less than rounding alone moves it by); {alone}"
        else:
            source += f"; below its cap, {cap:.4f} ({cap_words})"
    given = margin_nats is not None
    return Margin(
        nats=nats, floor_nats=floor, cap_nats=cap, source=source, widest_nats=widest, reference_sd=sd, given=given
    )


def trimmed_sd(values_NM: ArrayLike) -> Array:
    """Standard deviation over ``(N,)`` or ``(N, M)`` values, without the one of N ≥ 3 seeds that widens it most.

    No single value, however far off, can make it large. For normal values it lies below σ; :func:`lower_sd_limit` knows
    by how much. Returns ``(M,)``, in the unit of the values.
    """
    ordered_NM = np.sort(_columns(values_NM), axis=0)
    # The seed whose removal narrows the rest most is always the smallest or the largest.
    sd_M: Array = np.minimum(ordered_NM[:-1].std(axis=0, ddof=1), ordered_NM[1:].std(axis=0, ddof=1))
    return sd_M


@functools.cache
def _trimmed_sd_of_normals(n_seeds: int) -> Array:
    """Sorted simulated :func:`trimmed_sd` of ``n_seeds`` standard normal values, ``(draws,)``."""
    draws: Array = np.sort(trimmed_sd(np.random.default_rng(n_seeds).normal(size=(n_seeds, _DRAWS))))
    return draws


def lower_sd_limit(values_NM: ArrayLike, *, alpha: float) -> Array:
    """One-sided lower confidence limit of a normal standard deviation, which one outlying value cannot raise.

    ``trimmed_sd / q``, where ``q`` is the simulated ``1 − alpha`` quantile of the trimmed standard deviation of as many
    standard normal values: the limit exceeds σ with probability ``alpha``. Shapes are those of :func:`trimmed_sd`.

    Example:
        >>> float(lower_sd_limit([3.58, 3.60, 3.62], alpha=0.025)[0].round(3))
        0.014
    """
    values_NM = _columns(values_NM)
    limit: Array = trimmed_sd(values_NM) / np.quantile(_trimmed_sd_of_normals(len(values_NM)), 1.0 - alpha)
    return limit


def outlying_seeds(losses: Mapping[int, float]) -> tuple[int, ...]:
    """The seeds whose loss does not belong to the others', one or two: Grubbs' test, and Rosner's step against masking.

    The t statistic of the seed that lies farthest from the mean and spread of the *others*, against its Bonferroni
    limit, so that normal losses are accused at most at the rate :data:`OUTLIER_ALPHA`, half of it for each step. Two
    outlying seeds hide each other from this; so with five seeds or more the test is made again without the farthest,
    and both are named, the farthest first, if it finds one.

    Example:
        >>> outlying_seeds({0: 3.60, 1: 3.62, 2: 3.64, 3: 3.65, 4: 8.0})
        (4,)
        >>> outlying_seeds({0: 3.60, 1: 3.62, 2: 3.64, 3: 3.65, 4: 8.0, 5: 8.1})
        (5, 4)
    """
    rest, farthest, named = dict(losses), [], 0
    for step in range(2 if len(losses) >= 5 else 1):
        n, values = len(rest), np.array(list(rest.values()))
        if n < MIN_SEEDS or np.ptp(values) == 0:
            break
        index = int(np.argmax(np.abs(values - values.mean())))
        others = np.delete(values, index)
        # Others that agree to the last digit have no spread; then any value apart from them is infinitely far.
        with np.errstate(divide="ignore"):
            t = abs(values[index] - others.mean()) / (others.std(ddof=1) * math.sqrt(1.0 + 1.0 / (n - 1)))
        farthest.append(list(rest)[index])
        del rest[farthest[-1]]
        if t > stats.t.ppf(1.0 - OUTLIER_ALPHA / (4 * n), n - 2):  # two steps, two sides, n seeds
            named = step + 1
    return tuple(farthest[:named])


@dataclass(frozen=True, kw_only=True)
class PairedTests:
    """Outcome of the tests on M studies; every array is ``(M,)``."""

    sd: Array
    low: Array  # low and high bound the mean difference
    high: Array
    tost_p: Array  # the larger of the two one-sided p values for a mean inside ±margin
    beyond_p: Array  # one-sided, for a mean outside of ±margin on the side where it lies
    t_p: Array  # two-sided paired t test of no difference
    equivalent: NDArray[np.bool_]
    different: NDArray[np.bool_]


def paired_tests(differences_NM: ArrayLike, margin_M: ArrayLike, *, tost_alpha: float) -> PairedTests:
    """Hold the mean of paired differences against ±margin, and against zero.

    Args:
        differences_NM: ``(N,)`` or ``(N, M)`` differences, arm − reference, one a seed.
        margin_M: Equivalence margin of each study, in the unit of the differences.
        tost_alpha: Level of each one-sided test. The interval has coverage ``1 − 2 tost_alpha``, so "equivalent" says
            that it lies inside ±margin, and "different" that it lies wholly outside.
    """
    differences_NM = _columns(differences_NM)
    paired, margin = DescrStatsW(differences_NM), np.asarray(margin_M, dtype=float)
    n, sd = len(differences_NM), differences_NM.std(axis=0, ddof=1)
    # Differences without any spread divide by zero: their t is infinite, and 0/0 (no difference at all) is no evidence.
    with np.errstate(divide="ignore", invalid="ignore"):
        tost_p = np.nan_to_num(paired.ttost_mean(-margin, margin)[0], nan=1.0)
        t_p = np.nan_to_num(paired.ttest_mean(0.0)[1], nan=1.0)
        beyond_p = np.nan_to_num(stats.t.sf((np.abs(paired.mean) - margin) / (sd / np.sqrt(n)), n - 1), nan=1.0)
    low, high = paired.tconfint_mean(2.0 * tost_alpha)
    return PairedTests(
        sd=sd,
        low=low,
        high=high,
        tost_p=tost_p,
        beyond_p=beyond_p,
        t_p=t_p,
        equivalent=tost_p < tost_alpha,
        different=beyond_p < tost_alpha,
    )


def equivalence_power(n_seeds: int, *, sd_difference: ArrayLike, reference_sd: ArrayLike, margin: Margin) -> Array:
    """Probability of "equivalent" when the true difference is 0, for each of S pairs of true spreads.

    The mean of the differences is independent of their standard deviation, so given the sample's two spreads the
    probability is a normal one; it is then averaged over both, on a grid of quantiles.

    Args:
        n_seeds: Common seeds.
        sd_difference: ``(S,)`` true standard deviations of the paired differences.
        reference_sd: ``(S,)`` true seed-to-seed ones of the reference; no matter where the margin was given.
        margin: How the margin comes about: given, or derived and capped.
    """
    dof, at_Q = n_seeds - 1, (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    # Differences without any spread are equivalent for certain, and no division by zero.
    standard_error_S = np.maximum(np.atleast_1d(sd_difference), 1e-300) / np.sqrt(n_seeds)
    reach_Q = stats.t.ppf(1.0 - margin.tost_alpha, dof) * np.sqrt(stats.chi2.ppf(at_Q, dof) / dof)
    if margin.given:
        room_SRQ = (margin.nats / standard_error_S)[:, None, None] - reach_Q
    else:
        spreads = _trimmed_sd_of_normals(n_seeds)
        limit_R = np.quantile(spreads, at_Q) / np.quantile(spreads, 1.0 - ALPHA / 2.0)
        derived_SR = MARGIN_FACTOR * np.atleast_1d(reference_sd)[:, None] * limit_R
        margin_SR = np.minimum(np.maximum(derived_SR, margin.floor_nats), margin.cap_nats)
        room_SRQ = (margin_SR / standard_error_S[:, None])[:, :, None] - reach_Q
    power: Array = (2.0 * stats.norm.cdf(np.clip(room_SRQ, 0.0, None)) - 1.0).mean(axis=(1, 2))
    return power


def seeds_needed(
    *, n_seeds: int, sd_difference: float, n_reference: int, margin: Margin
) -> tuple[int | None, int | None]:
    """How many common seeds say "equivalent" with 80 % power when the true difference is 0: a range of 80 % coverage.

    Both spreads are known from a few seeds only. So true spreads are drawn that could have given the observed ones
    (``σ = s · sqrt(dof / χ²)``, and for the reference in units of its trimmed spread); each asks for its own number.

    Args:
        n_seeds: Common seeds that were observed.
        sd_difference: Standard deviation of their paired differences.
        n_reference: Seeds of the reference that the margin was derived from.
        margin: The margin, with the reference's observed spread.

    Returns:
        Lowest and highest number; None where it is more than :data:`MAX_SEEDS_SEARCHED`.

    Example:
        >>> margin = equivalence_margin({0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61}, reference="bf16_standard")
        >>> low, high = seeds_needed(n_seeds=4, sd_difference=0.02, n_reference=4, margin=margin)
        >>> low < high
        True
    """
    # A fixed seed: the same study gets the same range each time that it is reported.
    rng, draws = np.random.default_rng(0), 200
    dof = n_seeds - 1
    sd_S = sd_difference * np.sqrt(dof / rng.chisquare(dof, size=draws))
    reference_S = np.zeros(draws)
    if not margin.given:
        reference_S = margin.reference_sd / rng.choice(_trimmed_sd_of_normals(n_reference), size=draws)
    needed_S = np.full(draws, MAX_SEEDS_SEARCHED + 1)
    candidates = [*range(MIN_SEEDS, 16), *range(16, 40, 2), *range(40, MAX_SEEDS_SEARCHED + 1, 10)]
    for candidate in candidates:  # ascending: only the spreads that need more are tried again
        open_S = np.flatnonzero(needed_S > MAX_SEEDS_SEARCHED)
        if not len(open_S):
            break
        reached = equivalence_power(
            candidate, sd_difference=sd_S[open_S], reference_sd=reference_S[open_S], margin=margin
        )
        needed_S[open_S[reached >= POWER]] = candidate
    ends = np.quantile(needed_S, [0.1, 0.9], method="nearest")
    low, high = (int(end) if end <= MAX_SEEDS_SEARCHED else None for end in ends)
    return low, high


def _columns(values_NM: ArrayLike) -> Array:
    values = np.asarray(values_NM, dtype=float)
    return values[:, None] if values.ndim == 1 else values
