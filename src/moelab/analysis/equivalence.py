"""Equivalence of two arms from a handful of seeds: margin, paired TOST, and how many seeds it would take.

The question is not "is there a difference?" (an absent one cannot be shown by failing to find it) but "is the
difference smaller than what a change of seed does anyway?". So the margin is a multiple of σ, the seed-to-seed standard
deviation of the reference arm, and the test is two one-sided t tests (TOST) on the paired differences against ±margin.

σ is itself estimated, from the same few seeds. Putting the estimate s straight into the margin is wrong: s is above σ
in nearly half of all studies, and where the paired differences are tight (they are: both arms see the same data) most
of those say "equivalent" at a true difference of exactly the margin. The false rate is then 34 % with 3 seeds and 41 %
with 8, instead of 5 %. So the margin uses a lower confidence limit of σ at level α/2, and the TOST runs at level α/2. A
false "equivalent" at the margin needs the limit to exceed σ or the TOST to err, so by the union bound its rate is at
most α, whatever the dependence between the two.

Every function works on columns at once (``(N, M)``: N seeds, M independent studies), so that the calibration test
exercises the code that judges a real study, in which M is 1.

References:
    Schuirmann, "A comparison of the two one-sided tests procedure and the power approach", 1987.
    Lakens, "Equivalence tests", Social Psychological and Personality Science, 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW

Array = NDArray[np.float64]

MIN_SEEDS = 3
MAX_SEEDS_SEARCHED = 500


@dataclass(frozen=True, kw_only=True)
class PairedTests:
    """Outcome of the tests on M studies; every array is ``(M,)``.

    ``low`` and ``high`` bound the mean difference at coverage ``level``; ``tost_p`` is the larger of the two one-sided
    p values and ``t_p`` that of the two-sided paired t test of no difference.
    """

    mean: Array
    sd: Array
    low: Array
    high: Array
    level: float
    tost_p: Array
    t_p: Array
    equivalent: NDArray[np.bool_]
    different: NDArray[np.bool_]


def lower_sd_limit(values_NM: ArrayLike, *, alpha: float) -> Array:
    """One-sided lower confidence limit of a normal standard deviation.

    ``s · sqrt((N − 1) / χ²(1 − alpha, N − 1))``, which exceeds σ with probability ``alpha``.

    Args:
        values_NM: ``(N,)`` or ``(N, M)`` values, N seeds of M studies.
        alpha: Probability that the limit is above the true standard deviation.

    Returns:
        ``(M,)`` limits, in the unit of the values.

    Example:
        >>> float(lower_sd_limit([3.58, 3.60, 3.62], alpha=0.025)[0].round(4))
        0.0104
    """
    values_NM = _columns(values_NM)
    dof = len(values_NM) - 1
    limit: Array = values_NM.std(axis=0, ddof=1) * np.sqrt(dof / stats.chi2.ppf(1.0 - alpha, dof))
    return limit


def paired_tests(differences_NM: ArrayLike, margin_M: ArrayLike, *, tost_alpha: float, t_alpha: float) -> PairedTests:
    """TOST and t test of paired differences.

    Args:
        differences_NM: ``(N,)`` or ``(N, M)`` differences, arm − reference, one a seed.
        margin_M: Equivalence margin of each study, in the unit of the differences.
        tost_alpha: Level of the TOST; the interval reported has coverage ``1 − 2 tost_alpha``, so "equivalent" and
            "the interval lies inside ±margin" are the same statement.
        t_alpha: Level of the two-sided t test of no difference.

    Returns:
        The tests, with ``different`` only where ``equivalent`` is false.
    """
    differences = DescrStatsW(_columns(differences_NM))
    margin = np.asarray(margin_M, dtype=float)
    # Differences without any spread divide by zero: their t is infinite, and 0/0 (no difference at all) is no evidence.
    with np.errstate(divide="ignore", invalid="ignore"):
        tost_p = np.nan_to_num(differences.ttost_mean(-margin, margin)[0], nan=1.0)
        t_p = np.nan_to_num(differences.ttest_mean(0.0)[1], nan=1.0)
    low, high = differences.tconfint_mean(2.0 * tost_alpha)
    equivalent = tost_p < tost_alpha
    return PairedTests(
        mean=differences.mean,
        sd=_columns(differences_NM).std(axis=0, ddof=1),
        low=low,
        high=high,
        level=1.0 - 2.0 * tost_alpha,
        tost_p=tost_p,
        t_p=t_p,
        equivalent=equivalent,
        different=~equivalent & (t_p < t_alpha),
    )


def equivalence_power(
    n_seeds: int, *, sd_difference: float, alpha: float, margin: float | None, reference_sd: float, margin_factor: float
) -> float:
    """Probability of "equivalent" when the true difference is 0.

    The mean of the differences is independent of their standard deviation, so given the two sample standard deviations
    the probability is a normal one; it is then averaged over their χ² distributions on a grid of quantiles.

    Args:
        n_seeds: Common seeds.
        sd_difference: True standard deviation of the paired differences.
        alpha: Rate allowed for a false "equivalent" at the margin.
        margin: The margin where it was given; None where it is estimated.
        reference_sd: True seed-to-seed standard deviation of the reference, used where ``margin`` is None.
        margin_factor: Margin in units of that standard deviation.

    Returns:
        The power, between 0 and 1.
    """
    dof = n_seeds - 1
    chi2_Q = stats.chi2.ppf((np.arange(64) + 0.5) / 64, dof)
    tost_alpha = alpha if margin is not None else alpha / 2.0
    standard_error = max(sd_difference, 1e-300) / np.sqrt(n_seeds)
    reach_Q = stats.t.ppf(1.0 - tost_alpha, dof) * standard_error * np.sqrt(chi2_Q / dof)
    limit = margin_factor * reference_sd * np.sqrt(chi2_Q / stats.chi2.ppf(1.0 - alpha / 2.0, dof))
    margin_R = np.atleast_1d(margin) if margin is not None else limit
    room_RQ = np.clip(margin_R[:, None] - reach_Q[None, :], 0.0, None)
    return float(np.mean(2.0 * stats.norm.cdf(room_RQ / standard_error) - 1.0))


def seeds_needed(
    *,
    sd_difference: float,
    reference_sd: float,
    alpha: float = 0.05,
    margin: float | None = None,
    margin_factor: float = 2.0,
    power: float = 0.8,
) -> int | None:
    """Fewest common seeds that say "equivalent" with the given power when the true difference is 0.

    Args:
        sd_difference: Standard deviation of the paired differences, as observed.
        reference_sd: Seed-to-seed standard deviation of the reference, as observed.
        alpha: Rate allowed for a false "equivalent" at the margin.
        margin: The margin where it was given; None where it is estimated.
        margin_factor: Margin in units of the reference's standard deviation.
        power: Probability wanted.

    Returns:
        The number of seeds, or None where more than 500 would be needed.

    Example:
        >>> seeds_needed(sd_difference=0.004, reference_sd=0.03)
        3
    """
    for n_seeds in range(MIN_SEEDS, MAX_SEEDS_SEARCHED + 1):
        reached = equivalence_power(
            n_seeds,
            sd_difference=sd_difference,
            alpha=alpha,
            margin=margin,
            reference_sd=reference_sd,
            margin_factor=margin_factor,
        )
        if reached >= power:
            return n_seeds
    return None


def _columns(values_NM: ArrayLike) -> Array:
    values = np.asarray(values_NM, dtype=float)
    return values[:, None] if values.ndim == 1 else values
