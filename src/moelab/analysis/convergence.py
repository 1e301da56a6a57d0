"""From the metrics table to the verdict: reduce each run to its final loss, then judge the arms over seeds.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Final loss of every finished run: mean over steps ``first_step`` to ``last_step``, nats per token.

    ``by_run`` maps (arm, seed) to the loss; ``diverged`` maps those without one to where their loss was not finite,
    and ``lost`` to another reason. ``excluded`` names each run in whose place another of its seed counts. ``arms`` are
    all that have a row.
    """

    by_run: dict[ArmSeed, float]
    diverged: dict[ArmSeed, str]
    lost: dict[ArmSeed, str]
    first_step: int
    last_step: int
    excluded: tuple[str, ...]
    arms: tuple[str, ...]

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

    Args:
        table: Metrics table (``run, arm, seed, segment, step, loss, …``); segments of a run are merged here.
        final_fraction: Part of the steps that the mean is over, 0.1 for the last 10 %.

    Returns:
        The losses. Left out and named are runs that ended early, that lost or never had a finite loss in the window,
        and all but the newest finished run of an arm and seed.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1], or the table has no loss or unnamed runs.
    """
    require_names(table)
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)  # of a step that a restart repeated the last value counts
    last_step = int(merged["step"].max())
    first_step = first_final_step(last_step, final_fraction)
    merged["run"] = merged["run"].astype(str)  # a column of Python's own texts, which the loop below takes as keys
    own = merged.groupby(["run", "arm", "seed"], sort=False)
    runs = own["step"].max().rename("end").reset_index()
    window = merged[merged["step"].between(first_step, last_step)]
    # Logging every tenth step is no gap: what counts is the steps that any run logged.
    expected = window["step"].nunique()
    of_run = window.groupby("run", sort=False)
    seen, means = of_run.size().to_dict(), of_run["loss"].mean().to_dict()
    first_not_finite = window[~np.isfinite(window["loss"])].groupby("run", sort=False)["step"].first().to_dict()
    by_run: dict[ArmSeed, float] = {}
    diverged: dict[ArmSeed, str] = {}
    excluded: list[tuple[ArmSeed, str, str]] = []
    # Run names start with their UTC time, so in descending order the first finished run of a seed is the newest.
    for run, arm, seed, end in sorted(runs.itertuples(index=False, name=None), reverse=True):
        key = str(arm), int(seed)
        if run in first_not_finite:
            reason = f"loss is not finite at step {first_not_finite[run]}"
            diverged.setdefault(key, reason)
            excluded.append((key, run, reason))
            continue
        reason = f"ended at step {end} of {last_step}" if end < last_step else ""
        if not reason and seen.get(run, 0) < expected:
            reason = f"{expected - seen.get(run, 0)} of {expected} final steps are not in the log"
        if not reason and key in by_run:
            reason = "a newer finished run has the same arm and seed"
        if reason:
            excluded.append((key, run, reason))
        else:
            by_run[key] = float(means[run])
    # Of several attempts the newest tells why: it was excluded first, and the last to be set stays.
    lost = {key: reason for key, _, reason in reversed(excluded) if key not in by_run and key not in diverged}
    # Not the run that tells what became of its seed; an attempt that diverged beside a finished one is named too.
    others = [
        f"{arm}, seed {seed} ({run}): {why}"
        for (arm, seed), run, why in excluded
        if (arm, seed) in by_run or diverged.get((arm, seed), why) != why
    ]
    return FinalLosses(
        by_run=dict(sorted(by_run.items())),
        diverged={key: reason for key, reason in diverged.items() if key not in by_run},
        lost=lost,
        first_step=first_step,
        last_step=last_step,
        excluded=tuple(sorted(others)),
        arms=tuple(sorted(map(str, merged["arm"].unique()))),
    )


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
        **options: ``margin_nats``, ``margin_cap_nats``, ``dropped_seeds``, ``untrained_nats`` and
            ``lr_warmup_steps`` of :func:`~moelab.analysis.verdict.judge`.

    Returns:
        One verdict an arm, *different* corrected for their number.

    Raises:
        BadInput: An arm has no loss, or an option is out of range.
    """
    excluded: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    quantity = "held-out loss"
    if not isinstance(losses, FinalLosses):
        by_seed = losses
    else:
        by_seed, excluded, also = losses.by_run, losses.excluded, losses.arms
        diverged, lost = {**losses.diverged, **diverged}, {**losses.lost, **lost}
        first, last = options["steps"] = losses.first_step, losses.last_step
        quantity = f"the loss of step {last}" if first == last else f"the mean loss of steps {first} to {last}"
    known = sorted({*(arm for arm, _ in (*by_seed, *diverged, *lost)), *also})
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
    return [
        replace(one, excluded=(*(row for row in excluded if row.split(",")[0] in (one.arm, reference)), *one.excluded))
        for one in correct_for_arms(verdicts)
    ]
