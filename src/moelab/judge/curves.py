"""Curves over steps, one column a seed, and their mean and interval over seeds: what loss figures are drawn from."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy import stats

from moelab.judge.arms import require_names, require_one_run_a_seed
from moelab.judge.verdict import Verdict
from moelab.runs.table import merge_segments

POINTS_DRAWN = 600
"""Of a curve, one for every two pixels of a wide figure; a report holds dozens of curves and goes by mail."""
SEEDS_DRAWN = 100
"""Of an arm, as lines of their own; the mean and the band are of all."""
SEED_POINTS_DRAWN = 4 * POINTS_DRAWN
"""Of all seeds of an arm together."""


Curves = TypeVar("Curves", "pd.DataFrame", "pd.Series[float]")


def seed_curves(table: pd.DataFrame, arm: str, column: str = "loss") -> pd.DataFrame:
    """A column of one arm: steps (index) by seeds (columns), NaN where a run has no value; segments are merged here.

    Raises:
        BadInput: if the table has unnamed runs, or two of a seed.
    """
    require_names(table)
    rows = table[table["arm"] == arm]
    require_one_run_a_seed(rows)
    merged = merge_segments(rows)
    return merged.pivot(index="step", columns="seed", values=column).sort_index()


def arm_curves(table: pd.DataFrame, column: str) -> dict[str, pd.DataFrame]:
    """Values of every arm over steps, as :func:`seed_curves` gives them, by arm."""
    return {str(arm): seed_curves(table, str(arm), column) for arm in sorted(table["arm"].unique())}


def averaged_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """Seeds that reach the last step; where none does, all seeds at the steps that all logged."""
    done = curves.loc[:, curves.notna().iloc[-1]]  # a mean that loses a seed on the way would jump
    return curves.dropna() if done.empty else done


def mean_curve(curves: pd.DataFrame, window: int) -> pd.Series[float]:
    """Mean over seeds, each a trailing mean over ``window`` logged steps; the first steps over what there is."""
    return (curves.rolling(window, min_periods=1).mean() if window > 1 else curves).mean(axis=1)


def paired_difference(table: pd.DataFrame, verdict: Verdict) -> pd.DataFrame:
    """Loss of a verdict's arm minus the reference's, of each judged seed, over a trailing window.

    The window is that of the final losses, so the last row is what was judged.
    """
    assert verdict.steps is not None  # None is of a held-out loss, which has no curve
    (first, last), seeds = verdict.steps, list(verdict.seeds)
    # Runs side by side may log other steps; a window counts those that all have.
    difference = (seed_curves(table, verdict.arm)[seeds] - seed_curves(table, verdict.reference)[seeds]).dropna()
    return difference.loc[:last].rolling(len(difference.loc[first:last])).mean().dropna(how="all")


def smoothing_window(curves: pd.DataFrame) -> int:
    """One hundredth of the logged steps: nothing in a short run, and in a long one less than the eye averages over."""
    return max(1, round(len(curves) / 100))


def mean_and_interval(curves: pd.DataFrame, *, level: float) -> pd.DataFrame:
    """Mean over seeds at each step with its t interval, as columns ``mean``, ``low``, ``high`` (NaN for one seed)."""
    n = curves.notna().sum(axis=1).to_numpy()
    mean = curves.mean(axis=1)
    quantile = stats.t.ppf(0.5 + level / 2.0, np.where(n > 1, n - 1, np.nan))  # 0 degrees of freedom would warn
    reach = quantile * curves.std(axis=1, ddof=1) / np.sqrt(n)
    return pd.DataFrame({"mean": mean, "low": mean - reach, "high": mean + reach})


def thinned(curves: Curves, points: int = POINTS_DRAWN) -> Curves:
    """Every nth row and the last: at most so many ``points`` and one."""
    every = thinning(len(curves), points)
    # The last row is kept, so that a curve ends where its run did.
    return pd.concat([curves.iloc[:-1:every], curves.iloc[-1:]]) if every > 1 else curves


def thinning(rows: int, points: int = POINTS_DRAWN) -> int:
    """Which of so many rows :func:`thinned` keeps: every nth, 1 for all."""
    return max(1, math.ceil(rows / points))


def drawn_seeds(seeds: int) -> range:
    """Places of the seeds that are drawn as lines of their own: all, or evenly chosen ones."""
    return range(0, seeds, max(1, math.ceil(seeds / SEEDS_DRAWN)))


def joined_lines(curves: pd.DataFrame) -> tuple[list[float], list[float]]:
    """Seeds as one line broken by NaN: one trace an arm, of :data:`SEED_POINTS_DRAWN` and a few at most."""
    x: list[float] = []
    y: list[float] = []
    curves = curves[curves.columns[list(drawn_seeds(curves.shape[1]))]]
    curves = thinned(curves, min(POINTS_DRAWN, SEED_POINTS_DRAWN // max(1, curves.shape[1])))
    for seed in curves.columns:
        values = curves[seed].dropna()
        x += [*values.index.astype(float), np.nan]  # the gap between two seeds
        y += [*values.astype(float), np.nan]
    return x, y
