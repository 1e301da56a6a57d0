"""From the metrics table to the verdict: reduce each run to its final loss, then judge the arms over seeds.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from moelab.analysis.arms import require_names
from moelab.analysis.verdict import Answer, Verdict, correct_for_arms, judge
from moelab.errors import BadInput
from moelab.runs.table import merge_segments

__all__ = ["Answer", "FinalLosses", "Verdict", "compare_convergence", "compare_held_out", "final_losses", "judge"]

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

    Example:
        >>> first_final_step(60, 0.1)
        55
    """
    return last_step - max(1, round(final_fraction * last_step)) + 1


def final_losses(table: pd.DataFrame, *, final_fraction: float = 0.1, steps: int | None = None) -> FinalLosses:
    """Mean loss of each run over the last part of training.

    Args:
        table: Metrics table (``run, arm, seed, segment, step, loss, …``); segments of a run are merged here.
        final_fraction: Part of the steps that the mean is over, 0.1 for the last 10 %.
        steps: Step at which a run is finished; None takes the largest step in the table.

    Returns:
        The losses. Left out and named are runs that ended early, that lost or never had a finite loss in the window,
        and all but the newest finished run of an arm and seed.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1], or the table has no loss or unnamed runs.
    """
    if not 0.0 < final_fraction <= 1.0:
        raise BadInput(f"final_fraction is {final_fraction}: give a part of the steps above 0 and up to 1, such as 0.1")
    require_names(table)
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)
    last_step = int(merged["step"].max()) if steps is None else steps
    first_step = first_final_step(last_step, final_fraction)
    merged["run"] = merged["run"].astype(str)  # a column of Python's own texts, which the loop below takes as keys
    own = merged.groupby(["run", "arm", "seed"], sort=False)
    runs = own["step"].max().rename("end").reset_index()
    window = merged[merged["step"].between(first_step, last_step)]
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
            diverged.setdefault(key, f"loss is not finite at step {first_not_finite[run]}")
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
    lost = {key: reason for key, _, reason in reversed(excluded) if key not in by_run and key not in diverged}
    others = [f"{arm}, seed {seed} ({run}): {why}" for (arm, seed), run, why in excluded if (arm, seed) not in lost]
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
    measured: pd.DataFrame | FinalLosses,
    *,
    reference: str,
    arms: Sequence[str] | None = None,
    final_fraction: float = 0.1,
    steps: int | None = None,
    diverged: Mapping[ArmSeed, str] | None = None,
    lost: Mapping[ArmSeed, str] | None = None,
    lr_warmup_steps: int = 0,
    **options: Any,
) -> list[Verdict]:
    """Judge arms against a reference on the final training loss.

    Args:
        measured: Metrics table of the runs that finished, others being left out by name; or its final losses.
        reference: Arm to compare with, usually ``bf16_standard``.
        arms: Arms to judge; None takes every other arm of the table, ``diverged`` and ``lost``.
        final_fraction: Part of the steps that the final loss is a mean over.
        steps: Step at which a run is finished; None takes the largest step in the table.
        diverged: Seeds that failed numerically, by (arm, seed), each with the reason.
        lost: Seeds without a result for another reason.
        lr_warmup_steps: Steps over which the learning rate rises.
        **options: ``margin_nats``, ``margin_cap_nats``, ``margin_factor``, ``alpha``, ``dropped_seeds`` and
            ``untrained_nats`` of :func:`~moelab.analysis.verdict.judge`.

    Returns:
        One verdict an arm, *different* corrected for their number.

    Raises:
        BadInput: An arm is not in the table, or an option is out of range.
    """
    final = measured
    if isinstance(final, pd.DataFrame):
        final = final_losses(final, final_fraction=final_fraction, steps=steps)
    verdicts = _judged(
        final.by_run,
        reference,
        arms,
        {**final.diverged, **(diverged or {})},
        {**final.lost, **(lost or {})},
        also=final.arms,
        quantity=f"the loss of step {final.last_step}"
        if final.first_step == final.last_step
        else f"the mean loss of steps {final.first_step} to {final.last_step}",
        steps=(final.first_step, final.last_step),
        lr_warmup_steps=lr_warmup_steps,
        **options,
    )
    return [
        replace(one, excluded=(*(line for line in final.excluded if line.startswith(_of(one))), *one.excluded))
        for one in verdicts
    ]


def compare_held_out(
    losses: Mapping[ArmSeed, float],
    *,
    reference: str,
    arms: Sequence[str] | None = None,
    diverged: Mapping[ArmSeed, str] | None = None,
    lost: Mapping[ArmSeed, str] | None = None,
    **options: Any,
) -> list[Verdict]:
    """Judge arms against a reference on the held-out (validation) loss.

    Args:
        losses: Held-out loss by (arm, seed), nats per token; one that is not finite is a divergence.
        reference: Arm to compare with.
        arms: Arms to judge; None takes every other arm.
        diverged: Seeds that failed numerically before they were validated, each with the reason.
        lost: Seeds without a result for another reason.
        **options: As for :func:`compare_convergence`.

    Returns:
        One verdict an arm, *different* corrected for their number.

    Raises:
        BadInput: An arm has no loss, or an option is out of range.
    """
    return _judged(losses, reference, arms, diverged or {}, lost or {}, quantity="held-out loss", **options)


def _judged(
    losses: Mapping[ArmSeed, float],
    reference: str,
    arms: Sequence[str] | None,
    diverged: Mapping[ArmSeed, str],
    lost: Mapping[ArmSeed, str],
    also: Iterable[str] = (),
    **options: Any,
) -> list[Verdict]:
    known = sorted({*(arm for arm, _ in (*losses, *diverged, *lost)), *(str(arm) for arm in also)})
    chosen = [arm for arm in known if arm != reference] if arms is None else list(arms)
    for arm in (reference, *chosen):
        if arm not in known:
            raise BadInput(f"arm {arm!r} is not in this table: the arms are {', '.join(known)}")

    def of(seeds: Mapping[ArmSeed, Any], name: str) -> dict[int, Any]:
        return {seed: value for (arm, seed), value in seeds.items() if arm == name}

    verdicts = [
        judge(
            of(losses, arm),
            of(losses, reference),
            arm=arm,
            reference=reference,
            arm_diverged=of(diverged, arm),
            reference_diverged=of(diverged, reference),
            arm_lost=of(lost, arm),
            reference_lost=of(lost, reference),
            **options,
        )
        for arm in chosen
    ]
    return correct_for_arms(verdicts)


def _of(verdict: Verdict) -> tuple[str, str]:
    """How the lines of :class:`FinalLosses` begin that are about one of a verdict's arms."""
    return f"{verdict.arm},", f"{verdict.reference},"
