"""Waiting for the slowest rank, as the expected maximum of a distribution.

Every synchronising step waits for the slowest of n ranks. With times that scatter by sigma around their mean, normally
distributed, it comes at ``mean + sigma * E_n``, where E_n, the expected maximum of n standard normal draws, is found
by Blom's approximation.
"""

from __future__ import annotations

import functools
from statistics import NormalDist


@functools.lru_cache(maxsize=1024)
def expected_maximum(draws: int) -> float:
    """Expected maximum of standard normal draws.

    References:
        Blom 1958, Statistical Estimates and Transformed Beta-Variables: alpha 0.375.

    >>> round(expected_maximum(2), 2), round(expected_maximum(256), 2)
    (0.59, 2.81)
    """
    return 0.0 if draws < 2 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
