"""From the metrics table to the verdict: reduce each run to its final loss, then judge the arms over seeds.

A run's final loss is the mean of its last steps, which averages the noise of single batches. It is one number a run:
successive steps are autocorrelated, so a test on steps would count the same evidence many times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.judge.arms import require_names, require_one_run_a_seed
from moelab.judge.verdict import HELD_OUT, ArmSeeds, Verdict, correct_for_arms, judge
from moelab.runs.table import merge_segments

BLOW_UP_NATS = 0.5
"""A run whose median loss over the final steps is so far above its lowest over as many steps, and above what is usual
in the arm that rises least, diverged, though its loss is finite. A choice."""
SPIKE_NATS = 1.0
"""A step that is so far above those before it is told of, and is a divergence where it is the last. A choice; spikes of
half a nat are usual in rapid trainings."""
_RUN = ["arm", "seed"]


@dataclass(frozen=True, kw_only=True)
class FinalLosses:
    """Final losses, each a mean over steps ``first_step`` to ``last_step``, or the loss of held-out text."""

    seeds: Mapping[str, ArmSeeds]  # by arm
    first_step: int = 0  # both are 0 where the losses are of held-out text
    last_step: int = 0
    final_fraction: float = 0.1  # of the steps


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
    """Mean loss of each run over the last part of training, at the steps that all arms logged.

    Where arms end at different steps, the end is that of the first to end. Left out and named are runs that ended
    before others of their arm or lack some of these steps. A run diverged if its loss ends or stays not finite, or far
    above where it was. A step at which the loss of a run was not finite, and was again afterwards, counts for no run:
    the text of a step is the same in all.

    Raises:
        BadInput: ``final_fraction`` is outside (0, 1], or the table has no loss, unnamed runs or two of a seed.
    """
    require_names(table)
    require_one_run_a_seed(table)
    if table["loss"].notna().sum() == 0:
        raise BadInput("the table has no loss: collect a run that logged at least one step")
    merged = merge_segments(table)  # of a step that a restart repeated the last value counts
    last_step = int(merged.groupby("arm")["step"].max().min())
    first_step = first_final_step(last_step, final_fraction)
    merged = merged[merged["step"] <= last_step]
    merged = merged.assign(loss=merged["loss"].where(np.isfinite(merged["loss"])))
    window = merged[merged["step"] >= first_step]
    # An arm that logs every tenth step has no gaps: what counts is the steps that most runs of each arm logged.
    logged = window.groupby(["arm", "step"]).size().unstack(fill_value=0)
    usual = logged.ge(window.groupby("arm")["seed"].nunique() / 2, axis=0).all() & (
        len(logged) == merged["arm"].nunique()
    )
    losses_RS = window[window["step"].isin(usual.index[usual])].pivot(index=_RUN, columns="step", values="loss")
    expected, finite = losses_RS.shape[1], losses_RS.notna()
    seen = window[window["step"].isin(losses_RS.columns)].groupby(_RUN).size().to_dict()
    not_finite = window[window["loss"].isna()].groupby(_RUN)["step"].first().to_dict()
    recovers = (finite.iloc[:, -1:].all(axis=1) & (2 * finite.sum(axis=1) >= expected)).to_dict()
    whole = [key for key in losses_RS.index if recovers[key] and seen[key] == expected]
    averaged_RS = losses_RS.loc[:, finite.loc[whole].all()]
    means, changes, own_means = (
        averaged_RS.mean(axis=1),
        _fitted_changes(averaged_RS),
        window.groupby(_RUN)["loss"].mean(),
    )
    blow_ups = _blow_ups(merged[merged.set_index(_RUN).index.isin(whole)], first_step)
    seeds: dict[str, ArmSeeds] = {}
    for arm, runs in merged.groupby(_RUN)["step"].max().reset_index().groupby("arm"):
        losses, unmatched, diverged, lost = dict[int, float](), dict[int, float](), dict[int, str](), dict[int, str]()
        for seed, end in runs[["seed", "step"]].itertuples(index=False, name=None):
            key, lacks = (str(arm), int(seed)), expected - seen.get((arm, seed), 0)
            if key in not_finite and not recovers.get(key):
                diverged[seed] = f"loss is not finite at step {not_finite[key]}"
            elif end < runs["step"].max():
                lost[seed] = f"ended at step {end} of {runs['step'].max()}"
            elif not expected:
                unmatched[seed] = own_means.get(key, math.nan)
            elif lacks:
                lost[seed] = f"{lacks} of {expected} final steps are not in the log"
            elif key in blow_ups:
                diverged[seed] = blow_ups[key]
            else:
                losses[seed] = means[key]
        own_changes = {seed: changes[str(arm), seed] for seed in losses if (str(arm), seed) in changes}
        seeds[str(arm)] = ArmSeeds.of(losses, diverged, lost, changes=own_changes, unmatched=unmatched)
    if expected:
        first_step, last_step = int(averaged_RS.columns[0]), int(averaged_RS.columns[-1])
    return FinalLosses(seeds=seeds, first_step=first_step, last_step=last_step, final_fraction=final_fraction)


def recovered_spikes(rows: pd.DataFrame) -> list[int]:
    """Steps of one run whose loss rose by more than :data:`SPIKE_NATS` and came back.

    It is held against the median of the twenty logged steps before, and the run must end below that again.
    """
    logged = rows["loss"].to_numpy(dtype=float)
    logged = logged[np.isfinite(logged)]
    # Medians of thousands of runs take seconds, and few have a step so far above any before.
    if not (logged - np.minimum.accumulate(logged) > SPIKE_NATS).any():
        return []
    losses = merge_segments(rows).set_index("step")["loss"].where(np.isfinite).dropna()
    before = losses.rolling(20, min_periods=1).median().shift()
    spikes = losses.index[(losses > before + SPIKE_NATS) & (losses.iloc[-1:].sum() < before + SPIKE_NATS)]
    return [int(step) for step in spikes]


def _fitted_changes(losses_RS: pd.DataFrame) -> dict[tuple[str, int], float]:
    """By arm and seed, how far a straight line through the run's losses goes from the first step to the last."""
    steps = losses_RS.columns.to_numpy(dtype=float)
    if len(steps) < 2:
        return {}
    centred = steps - steps.mean()
    slopes = losses_RS.to_numpy() @ centred / (centred @ centred)
    return dict(zip(losses_RS.index, slopes * (steps[-1] - steps[0]), strict=True))


def _blow_ups(merged: pd.DataFrame, first_step: int) -> dict[tuple[str, int], str]:
    """By arm and seed, the runs that end far above where they were, in words."""
    usual, above, words = math.inf, dict[tuple[str, int], float](), dict[tuple[str, int], str]()
    for arm, rows in merged.groupby("arm"):
        losses = rows.pivot(index="step", columns="seed", values="loss").ffill()
        window = len(losses.loc[first_step:])
        # Medians: a spike among the last steps, from which the loss came back, is no end.
        medians = losses.rolling(window, min_periods=(window + 1) // 2).median()
        # Text that becomes harder raises the loss of every arm.
        usual = min(usual, float((medians.iloc[-1] - medians.min()).median()))
        of_seeds = (map(int, losses.columns), medians.idxmin(), medians.min(), medians.iloc[-1], losses.iloc[-1])
        for seed, step, low, stays, ends in zip(*of_seeds, strict=True):
            above[str(arm), seed] = max(stays - BLOW_UP_NATS, ends - SPIKE_NATS) - low
            words[str(arm), seed] = f"loss rose from {low:.2f} nats at step {step} to {ends:.2f} at the end"
    return {key: words[key] for key, nats in above.items() if nats > usual}


def compare_convergence(final: FinalLosses, *, reference: str, **options: Any) -> list[Verdict]:
    """Judge arms against a reference on their final losses.

    Args:
        final: Losses of the arms.
        reference: Arm to compare with, usually ``bf16_standard``.
        **options: of :func:`~moelab.judge.verdict.judge`.

    Returns:
        One verdict for every other arm, *different* corrected for their number.

    Raises:
        BadInput: The reference is no arm, or an option is out of range.
    """
    first, last = final.first_step, final.last_step
    if not last:
        options["quantity"] = HELD_OUT
    else:
        quantity = f"the loss of step {last}" if first == last else f"the mean loss of steps {first} to {last}"
        options |= {"quantity": quantity, "steps": (first, last)}
    if reference not in final.seeds:
        raise BadInput(f"arm {reference!r} is not in this table: the arms are {', '.join(final.seeds)}")
    theirs, others = final.seeds[reference], {arm: ours for arm, ours in final.seeds.items() if arm != reference}
    return correct_for_arms(
        [judge(ours, theirs, arm=arm, reference=reference, **options) for arm, ours in others.items()]
    )
