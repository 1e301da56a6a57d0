"""A mean over seeds with its t interval: the one interval that every summary of a study uses.

The unit of analysis is a seed. Values of successive steps of one run are autocorrelated, so an interval over steps
would be far too narrow; a run is first reduced to one number and the interval is taken over those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from statsmodels.stats.weightstats import DescrStatsW


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A confidence interval; ``low`` and ``high`` are NaN where the data give none (one seed)."""

    low: float
    high: float
    level: float

    @property
    def exists(self) -> bool:
        """Whether the data gave an interval."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))


def t_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Student-t interval of the mean of independent values.

    ``mean ± t(1 − (1 − level)/2, n − 1) · s/√n``

    Args:
        values: One value a seed.
        level: Coverage, 0.95 for a 95 % interval.

    Returns:
        The interval; NaN on both sides for fewer than two values, which have no spread to take one from.

    Example:
        >>> interval = t_interval([1.0, 2.0, 3.0])
        >>> round(interval.low, 3), round(interval.high, 3)
        (-0.484, 4.484)
    """
    if len(values) < 2:
        return Interval(low=float("nan"), high=float("nan"), level=level)
    low, high = DescrStatsW(np.asarray(values, dtype=float)).tconfint_mean(1.0 - level)
    return Interval(low=float(low), high=float(high), level=level)
