"""Whether two gains compose: what both changes give together, over the product of what each gives alone.

``log I = log t(both) − log t(first) − log t(second) + log t(baseline)``, once for each unit (a seed, a pass) that all
four arms have. ``I`` of 1 means that the gains multiply; below 1 the second gains less where the first is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moelab.analysis.interval import Interval, t_interval
from moelab.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """The gain of both changes over the product of their gains alone.

    Attributes:
        ratio: geometric mean over units; 1 if the gains multiply.
        interval: of the ratio; NaN on both sides for one unit.
        units: how many.
        unit: what they are, in the plural.
    """

    ratio: float
    interval: Interval
    units: int
    unit: str

    @property
    def percent(self) -> float:
        """The interaction in percent: ``100 (ratio − 1)``."""
        return 100 * (self.ratio - 1)

    def sentence(self) -> str:
        """The answer in words."""
        found = f"Both together are {self.percent:+.1f} % from the product of the two gains"
        if not self.interval.exists:
            return f"{found}; no interval, n = {self.units} of {self.unit}: no test"
        low, high = (100 * (bound - 1) for bound in (self.interval.low, self.interval.high))
        spread = f"{100 * self.interval.level:g} % interval {low:+.1f} to {high:+.1f} %, n = {self.units} {self.unit}"
        if low <= 0 <= high:
            return f"{found} ({spread}): no interaction is shown; effects within these bounds are not ruled out"
        return f"{found} ({spread}): the gains {'weaken' if high < 0 else 'strengthen'} each other"


def interaction(
    tps: Mapping[str, Mapping[int, float]],
    *,
    baseline: str,
    first: str,
    second: str,
    both: str,
    unit: str = "seeds",
    level: float = 0.95,
) -> Interaction:
    """Test whether the gains of two changes compose.

    Args:
        tps: throughput by arm and unit.
        baseline: arm without either change.
        first: arm with one of them.
        second: arm with the other.
        both: arm with both.
        unit: what units are, in the plural.
        level: coverage of the interval.

    Raises:
        BadInput: if an arm is missing, or no unit has all four.

    Example:
        >>> tps = {"a": {0: 100.0}, "b": {0: 130.0}, "c": {0: 110.0}, "d": {0: 143.0}}
        >>> round(interaction(tps, baseline="a", first="b", second="c", both="d").percent, 6)
        0.0
    """
    arms = (both, first, second, baseline)
    if missing := [arm for arm in arms if arm not in tps]:
        raise BadInput(f"arm {missing[0]!r} has no throughput: an interaction needs all of {', '.join(arms)}")
    common = sorted(set.intersection(*(set(tps[arm]) for arm in arms)))
    if not common:
        raise BadInput(f"none of the {unit} has all of {', '.join(arms)}")
    logs = [float(np.log(tps[both][i] * tps[baseline][i] / tps[first][i] / tps[second][i])) for i in common]
    around = t_interval(logs, level=level)
    interval = Interval(low=float(np.exp(around.low)), high=float(np.exp(around.high)), level=level)
    return Interaction(ratio=float(np.exp(np.mean(logs))), interval=interval, units=len(common), unit=unit)
