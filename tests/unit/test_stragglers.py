"""Who is slow: robustly, by the median and its deviation."""

from __future__ import annotations

import numpy as np
import pytest

from moelab.runs.stragglers import outliers, slow_steps


@pytest.mark.parametrize(
    ("values", "slow"),
    [
        ([], {}),
        ([1.0, 9.0], {}),  # of two nobody is the odd one
        ([1.0, 1.0, 1.0, 0.5], {}),  # faster is no fault
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.04], {}),  # equal ones are within a few per cent
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.06], {5: 0.06}),
        ([0.98, 1.0, 1.02, 1.14], {}),  # five deviations of 0.02 * 1.4826 above 1.01
        ([0.98, 1.0, 1.02, 1.17], {3: 0.16}),
    ],
)
def test_outliers(values: list[float], slow: dict[int, float]) -> None:
    assert outliers(dict(enumerate(values))) == slow


def test_slow_steps_are_slow_for_all_ranks() -> None:
    step_time_s = np.random.default_rng(0).normal(2.0, 0.01, (20, 8))
    step_time_s[[6, 13]] += 1.0  # two checkpoints
    step_time_s[0] = np.nan  # the first line of a launch has no time
    assert slow_steps(np.arange(1, 21), step_time_s).keys() == {7, 14}
