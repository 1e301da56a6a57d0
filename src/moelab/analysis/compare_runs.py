"""Runs side by side: what each did, and how far its loss is from that of the first.

A *side* of a comparison is one run, or the runs of one arm that differ in nothing but the seed. Sides may come from
anywhere: our studies, or logs of someone else's training. So every number may be missing, which is NaN here and a dash
for the reader, and what a difference is worth depends on what is known:

* Where both sides have seeds in common, the difference is paired by seed and judged as in a study, if on the steps that
  both logged.
* Otherwise there is one curve against another. Its spread over the last steps says how noisy the difference is from
  step to step; it is no interval, since another seed might have given another difference.
* A side that diverged, or ended before its planned steps, is not judged: what it logged before says nothing about the
  end. The report says which side it was and at which step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from moelab.analysis.comparable import caveats
from moelab.analysis.convergence import compare_convergence, first_final_step
from moelab.analysis.side import Side
from moelab.analysis.verdict import Verdict
from moelab.model import shape_for
from moelab.runs.table import merge_segments


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Loss of a side against that of the first, in nats per token.

    Attributes:
        reference: label of the first side.
        label: of this side.
        steps: that both logged.
        first_step: of the last part, which the difference is a mean over; up to the last of ``steps``.
        nats: mean difference over that part, this side − first; NaN if one diverged.
        spread_nats: standard deviation of the difference from step to step in that part.
        verdict: with seeds in common, the judgement over them; None without.
        unfinished: which of the two diverged or ended before its planned steps, so that there is no verdict.
    """

    reference: str
    label: str
    steps: tuple[int, ...]
    first_step: int
    nats: float
    spread_nats: float
    verdict: Verdict | None
    unfinished: str = ""

    @property
    def paired(self) -> bool:
        """Whether there are seeds enough for an interval over them."""
        return self.verdict is not None and self.verdict.n_seeds > 1

    def sentence(self) -> str:
        """State the difference and what it is worth."""
        if self.verdict is not None and self.verdict.seeds:
            return self.verdict.sentence()
        unjudged = f"{self.unfinished}: no verdict. " if self.unfinished else ""
        if not self.steps:
            return f"{unjudged}{self.label} and {self.reference} have no step with a loss in common: no difference."
        if math.isnan(self.nats):
            return unjudged.strip() or f"{self.label} has no finite difference from {self.reference} at the end."
        last = self.steps[-1]
        many = math.isfinite(self.spread_nats)
        where = f"over steps {self.first_step} to {last}" if many else f"at step {last}"
        spread = f" ({self.spread_nats:.4f} from step to step)" if many else ""
        worth = "" if unjudged else " One run against another: whether a change of seed does as much is not known."
        return f"{unjudged}{self.label} differs from {self.reference} by {self.nats:+.4f} nats {where}{spread}.{worth}"


def difference(
    reference: Side,
    side: Side,
    *,
    final_fraction: float = 0.1,
    margin_nats: float | None = None,
    margin_cap_nats: float | None = None,
    dropped_seeds: Collection[int] = (),
) -> Difference:
    """Hold a side's loss against that of the first, on the steps that both logged.

    Args:
        reference: the first side.
        side: another.
        final_fraction: part of the common steps that the final difference is a mean over.
        margin_nats: equivalence margin, or None to take it from the reference's seeds.
        margin_cap_nats: what that margin may be at most, or None for the usual cap.
        dropped_seeds: left out of both sides; a seed of neither changes nothing.
    """
    both = (_mean_loss(side) - _mean_loss(reference)).loc[lambda rows: rows.index.isin(_common_steps(reference, side))]
    steps = tuple(int(step) for step in both.index)
    unfinished = "; ".join(one.unfinished for one in (reference, side) if one.unfinished)
    if not steps:
        return Difference(
            reference=reference.label,
            label=side.label,
            steps=(),
            first_step=0,
            nats=math.nan,
            spread_nats=math.nan,
            verdict=None,
            unfinished=unfinished,
        )
    first_step = first_final_step(steps[-1], final_fraction)
    final = both.loc[first_step:].dropna()
    verdict = None
    if not unfinished and reference.seeds_known and side.seeds_known:
        verdict = _verdict(
            reference,
            side,
            steps,
            final_fraction=final_fraction,
            margin_nats=margin_nats,
            margin_cap_nats=margin_cap_nats,
            dropped_seeds=[seed for seed in dropped_seeds if seed in reference.seeds | side.seeds],
        )
    diverged = reference.diverged or side.diverged
    mean = verdict.mean_difference_nats if verdict is not None and verdict.seeds else float(final.mean())
    return Difference(
        reference=reference.label,
        label=side.label,
        steps=steps,
        first_step=first_step,
        nats=math.nan if diverged else mean,
        spread_nats=float(final.std(ddof=1)) if len(final) > 1 and not diverged else math.nan,
        verdict=verdict,
        unfinished=unfinished,
    )


def differing_settings(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all sides: name to one value a side, None where it is not known.

    What only some sides say counts where others could have said it, their settings being read from the same place: one
    log may speak of MXFP8 modules and another not. What a source cannot say is not a difference.
    """
    names = dict.fromkeys(name for side in sides for name in side.settings.values)
    rows = {name: [side.settings.values.get(name) for side in sides] for name in names}
    return {name: values for name, values in rows.items() if _differ(sides, values)}


def shared_settings(sides: Sequence[Side]) -> dict[str, str]:
    """Settings that are known of every side and the same in all."""
    first = sides[0].settings.values.items()
    return {name: value for name, value in first if all(one.settings.values.get(name) == value for one in sides)}


def _differ(sides: Sequence[Side], values: Sequence[str | None]) -> bool:
    if len(set(values) - {None}) > 1:
        return True
    sources = [(side.settings.source, value) for side, value in zip(sides, values, strict=True)]
    return any((source, None) in sources for source, value in sources if value is not None)


def _verdict(reference: Side, side: Side, steps: Sequence[int], **options: Any) -> Verdict:
    table = pd.concat([reference.table, side.table], ignore_index=True)
    both = (reference, side)
    model = reference.experiment
    (verdict,) = compare_convergence(
        table[table["step"].isin(steps)],
        reference=reference.label,
        arms=[side.label],
        diverged={(one.label, seed): why for one in both for seed, why in one.diverged_seeds.items()},
        lost={(one.label, seed): why for one in both for seed, why in one.lost_seeds.items()},
        untrained_nats=math.log(shape_for(model).vocab_size) if model is not None else None,
        lr_warmup_steps=model.warmup_steps if model is not None else 0,
        **options,
    )
    return replace(verdict, findings=(*verdict.findings, *caveats(side.runs, reference.runs)))


def _common_steps(*sides: Side) -> set[int]:
    """Steps that every run of all sides logged, finite or not; a step that a source gives no loss for is not logged."""
    if not all(side.table["loss"].notna().any() for side in sides):
        return set()
    tables = [side.table if side.seeds_known or side.diverged else side.table.dropna(subset=["loss"]) for side in sides]
    return set.intersection(*(set(rows["step"]) for table in tables for _, rows in table.groupby("run")))


def _mean_loss(side: Side) -> pd.Series[float]:
    """Mean loss over the side's runs at each step, NaN where one has none or it is not finite."""
    wide = merge_segments(side.table).pivot(index="step", columns="run", values="loss")
    return wide.mean(axis=1, skipna=False).where(lambda mean: mean.abs() < math.inf)
