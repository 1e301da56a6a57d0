"""Throughput of an arm, and how much faster one arm is than another.

A run is reduced to the median of its tokens per second per GPU after the warm-up steps, because step times have a long
upper tail (a checkpoint, a slow host) that a mean would let in. Arms are averaged over seeds in the logarithm: a gain
is a ratio, and the geometric mean of ratios is the ratio of geometric means, so the arm figures and the gain agree.

Two gains compose if what both changes give together is the product of what each gives alone:
``log I = log t(both) − log t(first) − log t(second) + log t(baseline)``, once for each unit (a seed, a pass) that all
four arms have. ``I`` of 1 means that the gains multiply; below 1 the second gains less where the first is there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from moelab.data import read_json, read_yaml
from moelab.errors import BadInput
from moelab.files import finite_or_none
from moelab.judge.arms import arm_label, contrast, seeds_words
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

    def to_json(self) -> dict[str, Any]:
        """The gain for a program; what is missing is null."""
        ends = [finite_or_none(end) for end in (self.interval.percent.low, self.interval.percent.high)]
        return {"arm": self.arm, "percent": self.percent, "interval_percent": ends, "seeds": self.n_seeds}


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
        BadInput: No step with a throughput is left.
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


# What was published

_CONTENT: dict[str, Any] = read_yaml("published.yaml")
SOURCE: str = _CONTENT["source"]


def _published(name: str) -> list[SimpleNamespace]:
    """The rows of a table, each with its ``source`` and its ``label``: those of the file where it names none."""
    known = {"source": SOURCE, "label": _CONTENT["label"]}
    return [SimpleNamespace(**{**known, **row}) for row in _CONTENT[name]]


# The two published runs share most of their set-up; each names what is its own.
THROUGHPUT_SETUP, CONVERGENCE_SETUP = (
    SimpleNamespace(**{**_CONTENT["shared"], **_CONTENT[name]}) for name in ("throughput_setup", "convergence_setup")
)
THROUGHPUT, GAINS = _published("throughput"), _published("gains")


# What was measured on thin models

BASELINE = "bf16_standard"
STOCK = (BASELINE, f"{BASELINE}_flex_tiles")
"""Arms of TorchTitan's settings alone."""
CODE = "8-bit experts in one pass"
"""Of moelab in rows that are measured now. Rows without any are older: ``fp8_standard`` and ``fp8_deepep`` trained
their experts in BF16 there, and ``fp8_deepep_dispatch-fp8`` its w2, because TorchTitan 0.3.0 drops torchao's wrapper
of a weight where experts are spread over ranks (``spmd_types.shard``)."""
FUSED = "fused FP8 experts"
"""What a reader sees for :data:`CODE`: an expert's three products are one FP8 function."""
STOCK_CHECKPOINTING = {"full+dispatch": "full"}
"""TorchTitan's checkpointing that an arm's own kind is held against."""
SHAPE_WORDS = {
    "671B, 10 MoE layers": "671B: 10 MoE layers, 16 experts",
    "671B MoE-heavy": "671B: 5 MoE layers, 16 experts",
    "671B": "671B: 1 dense + 2 MoE layers, 32 experts",
    "16B": "16B: 1 dense + 4 MoE layers, 64 experts",
}
"""The thin models of ``benchmarks/validation/shapes.py``."""


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm at one shape under one activation checkpointing and one routing; tokens/s per GPU.

    Rates, passes, steps and retries are of its campaign of most passes, the first of several; ratios the mean over
    campaigns, each over stock in the same one.
    """

    shape: str
    activation_checkpoint: str
    routing: str
    arm: str
    tps: float  # median over all timed steps
    low: float  # lower quartile
    high: float
    passes: tuple[float, ...]  # median of each, in order
    steps: int  # that were timed
    ratio: float | None  # over stock under the same checkpointing; None where that was not measured
    best_ratio: float | None  # over its fastest checkpointing; None where it ran under one alone that recomputes
    stock: str | None = None  # the arm of STOCK that the ratio is over, in the first campaign that has both
    code: str | None = None  # of moelab, as the rows name it; None of the oldest
    retries: int = 0  # of the allocator in the timed steps; above zero it was short of memory
    stock_short: bool = False  # of memory, where the ratio is over it in any campaign

    @property
    def label(self) -> str:
        """The arm in words."""
        return two_by_two_label(self.arm)

    @property
    def ratio_ends(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of its steps over stock; for a result that has a ratio."""
        assert self.ratio is not None
        stock_tps = self.tps / self.ratio
        return self.low / stock_tps, self.tps / stock_tps, self.high / stock_tps

    @property
    def setting(self) -> str:
        """The shape and the checkpointing that the arm and stock share, in words."""
        return f"{self.shape}, {checkpointing_words(self.activation_checkpoint)}"


def checkpointing_words(activation_checkpoint: str) -> str:
    """TorchTitan's checkpointing that an arm is held against, in words.

    >>> checkpointing_words("full+dispatch"), checkpointing_words("none")
    ('full checkpointing', 'no checkpointing')
    """
    kind = STOCK_CHECKPOINTING.get(activation_checkpoint, activation_checkpoint)
    return f"{'no' if kind == 'none' else kind} checkpointing"


def shape_words(shape: str) -> str:
    """The layers and experts of a thin model that has a name in :data:`SHAPE_WORDS`."""
    return SHAPE_WORDS.get(shape, f"{shape} layers")


def two_by_two_label(arm: str) -> str:
    """An arm in words; emulated kernels are named.

    Example:
        >>> two_by_two_label("mxfp8-emulated_deepep")
        'MXFP8 emulated + DeepEP'
        >>> two_by_two_label("fp8_deepep_wgrad-fp8_flex_tiles")
        'FP8 + DeepEP (wgrad FP8, flex tiles)'
    """
    arm = arm.replace("flex_", "flex ")  # else "tiles" would be a change of its own
    emulated = arm.removeprefix("mxfp8-emulated_")
    if emulated == arm:
        return arm_label(arm)
    return arm_label(f"mxfp8_{emulated}").replace("MXFP8", "MXFP8 emulated", 1)


@functools.cache
def _finished() -> dict[str, Any]:
    return read_json("two_by_two.json")


def measured_arms() -> list[ArmResult]:
    """Every arm that was measured, at each shape, checkpointing and routing."""
    return [ArmResult(**{**one, "passes": tuple(one["passes"])}) for one in _finished()["results"]]


def current_results(results: Iterable[ArmResult]) -> list[ArmResult]:
    """Of results those whose experts multiplied in the format that the arm is named after, on real kernels."""
    return [one for one in results if one.code == CODE or (one.code is None and one.arm.startswith("bf16"))]
