"""From the metrics table to the verdict: reduce each run to its final loss, then judge the arms over seeds.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moelab.analysis.arms import require_names, require_one_run_a_seed
from moelab.analysis.verdict import ArmSeeds, Verdict, correct_for_arms, judge
from moelab.errors import BadInput
from moelab.runs.table import merge_segments


@dataclass(frozen=True, kw_only=True)
class FinalLosses:
    """Final losses, each a mean over steps ``first_step`` to ``last_step``, or the loss of held-out text."""

    seeds: Mapping[str, ArmSeeds]  # by arm
    first_step: int = 0  # both are 0 where the losses are of held-out text
    last_step: int = 0

    def means(self) -> tuple[dict[str, float], set[int]]:
        """Mean of each arm that has a loss, over the seeds that all of these have, and those seeds.

        Where none is common to all, each mean is over the arm's own.
        """
        known = {arm: one.losses for arm, one in self.seeds.items() if one.losses}
        # A seed that one arm lacks would shift the means apart, also against the verdict's sign.
        common = set.intersection(*map(set, known.values())) if known else set()
        return {
            arm: float(np.mean([loss for seed, loss in losses.items() if seed in common or not common]))
            for arm, losses in known.items()
        }, common


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
    require_one_run_a_seed(table)
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)  # of a step that a restart repeated the last value counts
    last_step = int(merged["step"].max())
    first_step = first_final_step(last_step, final_fraction)
    run = ["arm", "seed"]  # one of each; a run that is in two sides has two arms
    runs = merged.groupby(run)["step"].max().reset_index()
    window = merged[merged["step"].between(first_step, last_step)]
    # Logging every tenth step is no gap: what counts is the steps that any run logged.
    expected = window["step"].nunique()
    of_run = window.groupby(run)
    seen, means = of_run.size().to_dict(), of_run["loss"].mean().to_dict()
    first_not_finite = window[~np.isfinite(window["loss"])].groupby(run)["step"].first().to_dict()
    seeds: dict[str, ArmSeeds] = {}
    for arm, of_arm in runs.groupby("arm"):
        losses, diverged, lost = dict[int, float](), dict[int, str](), dict[int, str]()
        for seed, end in of_arm[["seed", "step"]].itertuples(index=False, name=None):
            key = arm, seed
            logged = seen.get(key, 0)
            if key in first_not_finite:
                diverged[seed] = f"loss is not finite at step {first_not_finite[key]}"
            elif end < last_step:
                lost[seed] = f"ended at step {end} of {last_step}"
            elif logged < expected:
                lost[seed] = f"{expected - logged} of {expected} final steps are not in the log"
            else:
                losses[seed] = means[key]
        seeds[str(arm)] = ArmSeeds.of(losses, diverged, lost)
    return FinalLosses(seeds=seeds, first_step=first_step, last_step=last_step)


def compare_convergence(final: FinalLosses, *, reference: str, **options: Any) -> list[Verdict]:
    """Judge arms against a reference on their final losses.

    Args:
        final: Losses of the arms.
        reference: Arm to compare with, usually ``bf16_standard``.
        **options: of :func:`~moelab.analysis.verdict.judge`.

    Returns:
        One verdict for every other arm, *different* corrected for their number.

    Raises:
        BadInput: The reference is no arm, or an option is out of range.
    """
    first, last = final.first_step, final.last_step
    if not last:
        options["quantity"] = "held-out loss"
    else:
        quantity = f"the loss of step {last}" if first == last else f"the mean loss of steps {first} to {last}"
        options |= {"quantity": quantity, "steps": (first, last)}
    if reference not in final.seeds:
        raise BadInput(f"arm {reference!r} is not in this table: the arms are {', '.join(final.seeds)}")
    theirs, others = final.seeds[reference], {arm: ours for arm, ours in final.seeds.items() if arm != reference}
    return correct_for_arms(
        [judge(ours, theirs, arm=arm, reference=reference, **options) for arm, ours in others.items()]
    )
