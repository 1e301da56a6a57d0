"""From the metrics table to the verdict: reduce each run to its final loss, then judge the arms over seeds.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from moelab.analysis.arms import require_names
from moelab.analysis.verdict import Verdict, correct_for_arms, judge
from moelab.errors import BadInput
from moelab.runs.table import merge_segments

ArmSeed = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class FinalLosses:
    """Final loss of every finished run: mean over steps ``first_step`` to ``last_step``, nats per token."""

    by_run: dict[ArmSeed, float]
    diverged: dict[ArmSeed, str]  # runs whose loss was not finite there, and where
    lost: dict[ArmSeed, str]  # runs without a final loss for another reason
    first_step: int
    last_step: int

    def of(self, arm: str) -> dict[int, float]:
        """Final losses of one arm by seed."""
        return {seed: loss for (name, seed), loss in self.by_run.items() if name == arm}


def first_final_step(last_step: int, final_fraction: float) -> int:
    """Where the last part of the steps begins, which is one step at least.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1].

    Example:
        >>> first_final_step(60, 0.1)
        55
    """
    if not 0.0 < final_fraction <= 1.0:
        raise BadInput(f"final_fraction is {final_fraction}: give a part of the steps above 0 and up to 1, such as 0.1")
    return last_step - max(1, round(final_fraction * last_step)) + 1  # both ends count


def final_losses(table: pd.DataFrame, *, final_fraction: float = 0.1) -> FinalLosses:
    """Mean loss of each run over the last part of training.

    Left out and named are runs that ended early, or have no loss for some of these steps, or one that is not finite.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1], or the table has no loss, unnamed runs or two of a seed.
    """
    require_names(table)
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)  # of a step that a restart repeated the last value counts
    last_step = int(merged["step"].max())
    first_step = first_final_step(last_step, final_fraction)
    merged["run"] = merged["run"].astype(str)  # a column of Python's own texts, which the loop below takes as keys
    runs = merged.groupby(["arm", "seed", "run"])["step"].max().reset_index()
    if (twice := runs[runs.duplicated(["arm", "seed"])]).size:
        arm, seed = twice[["arm", "seed"]].iloc[0]
        raise BadInput(f"the table has two runs of {arm}, seed {seed}: keep one, as moelab.runs.collect.newest chooses")
    window = merged[merged["step"].between(first_step, last_step)]
    # Logging every tenth step is no gap: what counts is the steps that any run logged.
    expected = window["step"].nunique()
    of_run = window.groupby("run", sort=False)
    seen, means = of_run.size().to_dict(), of_run["loss"].mean().to_dict()
    first_not_finite = window[~np.isfinite(window["loss"])].groupby("run", sort=False)["step"].first().to_dict()
    by_run: dict[ArmSeed, float] = {}
    diverged: dict[ArmSeed, str] = {}
    lost: dict[ArmSeed, str] = {}
    for arm, seed, run, end in runs.itertuples(index=False, name=None):
        key, missing = (str(arm), int(seed)), expected - seen.get(run, 0)
        if run in first_not_finite:
            diverged[key] = f"loss is not finite at step {first_not_finite[run]}"
        elif end < last_step:
            lost[key] = f"ended at step {end} of {last_step}"
        elif missing > 0:  # of a run that is in two sides each step is there twice
            lost[key] = f"{missing} of {expected} final steps are not in the log"
        else:
            by_run[key] = float(means[run])
    return FinalLosses(by_run=by_run, diverged=diverged, lost=lost, first_step=first_step, last_step=last_step)


def compare_convergence(
    losses: FinalLosses | Mapping[ArmSeed, float],
    *,
    reference: str,
    arms: Sequence[str] | None = None,
    diverged: Mapping[ArmSeed, str] = MappingProxyType({}),
    lost: Mapping[ArmSeed, str] = MappingProxyType({}),
    **options: Any,
) -> list[Verdict]:
    """Judge arms against a reference on their final training losses, or on the loss of held-out text.

    Args:
        losses: Final losses of a table's runs; or the held-out loss by (arm, seed), nats per token, of which one that
            is not finite is a divergence.
        reference: Arm to compare with, usually ``bf16_standard``.
        arms: Arms to judge; None takes every other arm of ``losses``, ``diverged`` and ``lost``.
        diverged: Seeds that failed numerically, by (arm, seed), each with the reason.
        lost: Seeds without a result for another reason.
        **options: of :func:`~moelab.analysis.verdict.judge`.

    Returns:
        One verdict an arm, *different* corrected for their number.

    Raises:
        BadInput: An arm has no loss, or an option is out of range.
    """
    quantity = "held-out loss"
    by_seed = losses.by_run if isinstance(losses, FinalLosses) else losses
    if isinstance(losses, FinalLosses):
        diverged, lost = {**losses.diverged, **diverged}, {**losses.lost, **lost}
        first, last = options["steps"] = losses.first_step, losses.last_step
        quantity = f"the loss of step {last}" if first == last else f"the mean loss of steps {first} to {last}"
    known = sorted({arm for arm, _ in (*by_seed, *diverged, *lost)})
    chosen = [arm for arm in known if arm != reference] if arms is None else list(arms)
    for arm in (reference, *chosen):
        if arm not in known:
            raise BadInput(f"arm {arm!r} is not in this table: the arms are {', '.join(known)}")

    def of(seeds: Mapping[ArmSeed, Any], name: str) -> dict[int, Any]:
        return {seed: value for (arm, seed), value in seeds.items() if arm == name}

    verdicts = [
        judge(
            of(by_seed, arm),
            of(by_seed, reference),
            arm=arm,
            reference=reference,
            quantity=quantity,
            arm_diverged=of(diverged, arm),
            reference_diverged=of(diverged, reference),
            arm_lost=of(lost, arm),
            reference_lost=of(lost, reference),
            **options,
        )
        for arm in chosen
    ]
    return correct_for_arms(verdicts)
