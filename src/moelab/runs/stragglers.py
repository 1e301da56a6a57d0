"""What is slower than the rest, robustly: steps of a run, GPUs and links in a health check.

Training is synchronous: a step ends for every rank when the slowest one has come to its last collective, so step times
and tps are the same on all ranks and cannot name the slow one. :mod:`moelab.health.measure` can: it times the same
GEMMs on every GPU without any collective, and the all-reduce of every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import numpy as np

DEVIATIONS: Final = 5.0
"""Robust standard deviations above the median from which on a value is an outlier. A choice."""
LEAST_EXCESS: Final = 0.05
"""Share above the median that an outlier has at least, however alike the others are. A choice."""
MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)
LEAST_VALUES: Final = 3  # of two, nobody can say which is the odd one
Name = TypeVar("Name")


def outliers(values: Mapping[Name, float]) -> dict[Name, float]:
    """Names whose value is far above the median, by the median absolute deviation; with the share above it.

    Values are positive; of fewer than three none is an outlier.

    >>> outliers({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.5})
    {'d': 0.49}
    """
    numbers = np.array([value for value in values.values() if np.isfinite(value)])
    if len(numbers) < LEAST_VALUES:
        return {}
    # Medians, and not a mean and its deviation: a rank that is slow enough would hide itself in both.
    middle = float(np.median(numbers))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(numbers - middle)))
    limit = middle + max(DEVIATIONS * spread, LEAST_EXCESS * middle)
    return {name: round(value / middle - 1, 2) for name, value in values.items() if value > limit}


def slow_steps(
    steps: np.ndarray[Any, np.dtype[np.int64]], step_time_s: np.ndarray[Any, np.dtype[np.float64]]
) -> dict[int, float]:
    """Steps that took all ranks longer than the others, such as one with a checkpoint, with the share by which.

    Shapes are (S,) and (S, R), as :class:`moelab.runs.follow.RankTable` has them.
    """
    known = np.isfinite(step_time_s).any(axis=1)
    whole = np.nanmedian(step_time_s[known], axis=1)
    return outliers(dict(zip(steps[known].tolist(), whole.tolist(), strict=True)))
