"""Throughput of an arm, and how much faster one arm is than another.

A run is reduced to the median of its tokens per second per GPU after the warm-up steps, because step times have a long
upper tail (a checkpoint, a slow host) that a mean would let in. Arms are averaged over seeds in the logarithm: a gain
is a ratio, and the geometric mean of ratios is the ratio of geometric means, so the arm figures and the gain agree.

Two gains compose if what both changes give together is the product of what each gives alone:
``log I = log t(both) − log t(first) − log t(second) + log t(baseline)``, once for each unit (a seed, a pass) that all
four arms have. ``I`` of 1 means that the gains multiply; below 1 the second gains less where the first is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.judge.arms import arm_label, contrast, require_names, seeds_words
from moelab.judge.equivalence import Interval, t_interval
from moelab.runs.table import throughput_rows


@dataclass(frozen=True, kw_only=True)
class ArmThroughput:
    """Throughput of one arm in tokens per second per GPU."""

    arm: str
    tps: float  # geometric mean over seeds of each seed's median
    interval: Interval  # NaN for one seed
    n_seeds: int
    tps_by_seed: dict[int, float]

    def sentence(self) -> str:
        """State the figure in words, with its interval and the number of seeds."""
        spread = f"{self.interval.words(',.0f')}, n = {seeds_words(self.n_seeds)}"
        return f"{arm_label(self.arm)}: {self.tps:,.0f} tokens/s per GPU ({spread})"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A geometric mean of ratios."""

    ratio: float  # 1.32 is 32 % more
    interval: Interval  # of the ratio; NaN where n is 1

    @property
    def percent(self) -> float:
        """What the ratio is above 1: ``100 (ratio − 1)``."""
        return 100.0 * (self.ratio - 1.0)

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves out a ratio of 1, so that the sign is known."""
        return self.interval.exists and not self.interval.low <= 1.0 <= self.interval.high


@dataclass(frozen=True, kw_only=True)
class Gain(Ratio):
    """Throughput of ``arm`` over ``baseline``, paired by seed."""

    baseline: str
    arm: str
    n_seeds: int

    def sentence(self) -> str:
        """State the gain in words, with its interval and the number of seeds."""
        spread = f"{self.interval.percent.words('+.1f', ' %')}, n = {seeds_words(self.n_seeds)}"
        return f"{over(self.arm, self.baseline)}: {self.percent:+.1f} % tokens/s ({spread})"


@dataclass(frozen=True, kw_only=True)
class Interaction(Ratio):
    """The gain of both changes over the product of their gains alone; a ratio of 1 means that the gains multiply."""

    units: int
    unit: str  # what they are, in the plural

    def sentence(self) -> str:
        """The answer in words."""
        words = f"Both together are {self.percent:+.1f} % from the product of the two gains"
        if not self.interval.exists:
            return f"{words}; no interval, n = {self.units} {self.unit}: no test"
        words += f" ({self.interval.percent.words('+.1f', ' %')}, n = {self.units} {self.unit})"
        if not self.resolved:
            return f"{words}: no interaction is shown; effects within these bounds are not ruled out"
        return f"{words}: the gains {'weaken' if self.percent < 0 else 'strengthen'} each other"


def over(arm: str, baseline: str) -> str:
    """An arm over another in words, by what sets them apart.

    Example:
        >>> over("mxfp8_standard", "bf16_standard")
        'MXFP8 over BF16 (both standard all-to-all)'
    """
    words, baseline_words, shared = contrast(arm, baseline)
    return f"{words} over {baseline_words}" + (f" (both {shared})" if shared else "")


def arm_throughput(table: pd.DataFrame, *, warmup_steps: int = 3) -> list[ArmThroughput]:
    """Throughput of every arm: geometric mean over seeds of the run medians, with its t interval.

    ``log tps(arm) = mean over seeds of log median(seed)``; the interval is of that mean, mapped back.

    Args:
        table: Metrics table (``run, arm, seed, segment, step, tps, …``).
        warmup_steps: Steps discarded at the start of a run: compilation, allocator growth, NCCL set-up.

    Raises:
        BadInput: No step with a throughput is left, or the table has unnamed runs.
    """
    results = []
    for arm, logs in _seed_logs(table, warmup_steps).items():
        mean, interval = _mapped_back(list(logs.values()))
        by_seed = {seed: float(np.exp(value)) for seed, value in logs.items()}
        results.append(ArmThroughput(arm=arm, tps=mean, interval=interval, n_seeds=len(logs), tps_by_seed=by_seed))
    return results


def gain(table: pd.DataFrame, *, baseline: str, arm: str, warmup_steps: int = 3) -> Gain:
    """Throughput of one arm over another, paired by seed.

    ``log ratio = mean over common seeds of (log median(arm, seed) − log median(baseline, seed))``

    Pairing takes out what a seed does to both arms, such as its routing and so its load balance. ``table`` and
    ``warmup_steps`` are as :func:`arm_throughput` takes them.

    Raises:
        BadInput: An arm is not in the table, or the arms have no seed in common.
    """
    logs = _seed_logs(table, warmup_steps)
    for name in (baseline, arm):
        if name not in logs:
            raise BadInput(f"arm {name!r} has no throughput in this table: the arms are {', '.join(logs)}")
    common = sorted(logs[arm].keys() & logs[baseline].keys())  # a seed of one arm alone has no partner
    if not common:
        raise BadInput(f"{arm!r} and {baseline!r} have no seed in common: train both with the same seeds")
    ratio, interval = _mapped_back([logs[arm][seed] - logs[baseline][seed] for seed in common])
    return Gain(baseline=baseline, arm=arm, ratio=ratio, interval=interval, n_seeds=len(common))


def interaction(
    tps: Mapping[str, Mapping[int, float]],
    *,
    baseline: str,
    first: str,
    second: str,
    both: str,
    unit: str = "seeds",
) -> Interaction:
    """Test whether the gains of two changes compose.

    Args:
        tps: throughput by arm and unit.
        baseline: arm without either change.
        first: arm with one of them.
        second: arm with the other.
        both: arm with both.
        unit: of :class:`Interaction`.

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
    # In logarithms, so that a gain and its inverse weigh the same.
    logs = [float(np.log(tps[both][i] * tps[baseline][i] / tps[first][i] / tps[second][i])) for i in common]
    ratio, interval = _mapped_back(logs)
    return Interaction(ratio=ratio, interval=interval, units=len(common), unit=unit)


def _seed_logs(table: pd.DataFrame, warmup_steps: int) -> dict[str, dict[int, float]]:
    """Log of the median throughput by arm and seed, sorted; several runs of one seed count as one, by their mean."""
    require_names(table)
    rows = throughput_rows(table, warmup_steps=warmup_steps)
    if rows.empty:
        raise BadInput(
            f"no throughput is left after discarding {warmup_steps} warm-up steps: the table has {len(table)} rows. "
            "Train for more steps, or lower warmup_steps"
        )
    of_runs = np.log(rows.groupby(["arm", "seed", "run"])["tps"].median())
    logs: dict[str, dict[int, float]] = {}
    # Over the runs of a seed first: a seed that was trained twice counts once.
    for (arm, seed), mean in of_runs.groupby(level=["arm", "seed"]).mean().items():
        logs.setdefault(str(arm), {})[int(seed)] = float(mean)
    return logs


def _mapped_back(logs: list[float]) -> tuple[float, Interval]:
    """Mean and 95 % interval of logarithms, back on the scale of the values."""
    of_logs = t_interval(logs)
    # Ends are mapped, not the width: on the scale of the values the interval is not symmetric.
    interval = Interval(low=float(np.exp(of_logs.low)), high=float(np.exp(of_logs.high)), level=of_logs.level)
    return float(np.exp(np.mean(logs))), interval
