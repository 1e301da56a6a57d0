"""Runs side by side of which one at least is from elsewhere: curves, speed, and how far losses are apart.

Each is held against the first on the steps that both logged, without a verdict, which takes seeds. The spread of that
difference over the last steps says how noisy it is from step to step; it is no interval, since another seed might have
given another difference. What nobody recorded of a log is missing, which is NaN here and a dash for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from moelab.files import finite_or_none
from moelab.judge.convergence import first_final_step
from moelab.judge.curves import arm_curves
from moelab.judge.side import (
    OF_A_TOKEN,
    OF_THE_LOSS,
    Side,
    differing_of,
    differing_values,
    machine_differences,
    median,
    quartiles,
)
from moelab.judge.sides import NotJudged, end_of, left_out_words, run_json
from moelab.judge.summary import Report, joined, names_of
from moelab.runs.table import merge_segments

if TYPE_CHECKING:
    from moelab.judge.report import StudyReport
    from moelab.judge.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Loss of the side ``label`` minus that of ``reference``, in nats per token."""

    reference: str
    label: str
    steps: tuple[int, ...]  # that both logged
    first_step: int  # of the last part, which the difference is a mean over
    nats: float  # NaN if one diverged
    spread_nats: float  # standard deviation from step to step in that part
    unfinished: str  # which of the two diverged or ended before its planned steps
    differing: tuple[str, ...]  # settings that the loss depends on
    goes_on: bool  # whether one of the two has steps behind these

    @property
    def words(self) -> str:
        """How far the two are apart at the end, and in what else they differ."""
        ended = [self.unfinished] if self.unfinished else []
        if not self.steps:
            return "; ".join(
                [*ended, f"{self.label} and {self.reference} have no step with a loss in common at the end"]
            )
        if math.isnan(self.nats):
            return "; ".join(ended) or f"{self.label} has no finite difference from {self.reference} at the end"
        last, verb = self.steps[-1], "is" if self.goes_on else "ends"
        where = f"over steps {self.first_step} to {last}" if math.isfinite(self.spread_nats) else f"at step {last}"
        also = f" (they also differ in {', '.join(self.differing)})" if self.differing else ""
        return "; ".join([*ended, f"{self.label} {verb} {self.nats:+.4f} nats from {self.reference} {where}{also}"])

    def sentence(self) -> str:
        """The difference with its spread from step to step."""
        if self.nats == self.spread_nats == 0.0:
            return f"{self.words}, the same at every step: one may be a copy of the other."
        scatter = f", {self.spread_nats:.4f} from step to step" if math.isfinite(self.spread_nats) else ""
        return f"{self.words}{scatter}."

    def to_json(self) -> dict[str, Any]:
        """The difference for a program; what is missing is null."""
        return {
            "label": self.label,
            "reference": self.reference,
            "common_steps": len(self.steps),
            "difference_nats": finite_or_none(self.nats),
            "step_spread_nats": finite_or_none(self.spread_nats),
            "differing": list(self.differing),
            "sentence": self.sentence(),
        }


def difference(reference: Side, side: Side, *, final_fraction: float = 0.1) -> Difference:
    """Hold a side's loss against that of the first, over the last part of the steps that both logged."""
    common = _common_steps(reference, side)
    # Of logs of other steps the first alone may be common, which says nothing about the end.
    logged = [one.table.dropna(subset=["loss"])["step"] for one in (reference, side)]
    ends = [int(steps.max()) for steps in logged] if common else [0]
    # One that logs seldom has its last of them before the other's end.
    both_end = min(max((step for step in steps if step <= min(ends)), default=0) for steps in logged)
    if common and max(common) < first_final_step(both_end, final_fraction):
        common = set()
    both = (_mean_loss(side) - _mean_loss(reference)).loc[lambda rows: rows.index.isin(common)]
    steps = tuple(int(step) for step in both.index)
    first_step = first_final_step(steps[-1], final_fraction) if steps else 0
    diverged = reference.diverged or side.diverged  # what it logged before says nothing about the end
    final = both.loc[first_step:].dropna() if not diverged else both.iloc[:0]
    return Difference(
        reference=reference.label,
        label=side.label,
        steps=steps,
        first_step=first_step,
        nats=float(final.mean()),
        spread_nats=float(final.std(ddof=1)),
        unfinished="; ".join(one.unfinished for one in (reference, side) if one.unfinished),
        differing=tuple(differing_of((reference, side), OF_THE_LOSS)),
        goes_on=bool(common) and max(common) < first_final_step(max(ends), final_fraction),
    )


def difference_curve(reference: Side, side: Side, one: Difference) -> pd.DataFrame:
    """Difference over the steps that both logged, averaged over a trailing window as long as the final difference's.

    Returns:
        Steps by ``mean``, ``low`` and ``high`` (nats): one standard deviation over the window's steps to either side,
        which is no interval.
    """
    first, other = (arm_curves(each.table, "loss")[each.name].loc[list(one.steps)] for each in (reference, side))
    window = max(1, sum(step >= one.first_step for step in one.steps))  # so the curve ends at the difference itself
    rolling = (other.mean(axis=1) - first.mean(axis=1)).rolling(window)
    mean, spread = rolling.mean(), rolling.std(ddof=1)
    return pd.DataFrame({"mean": mean, "low": mean - spread, "high": mean + spread})


@dataclass(frozen=True, kw_only=True)
class Comparison(Report):
    """Runs side by side, of which one at least is from elsewhere."""

    ours: StudyReport | None = None  # those that are not, judged among themselves; None of fewer than two

    @property
    def title(self) -> str:
        """What the report is about."""
        return f"Run {self.reference.label}" if len(self.sides) == 1 else f"{len(self.sides)} runs side by side"

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """Of the arms of ours."""
        return self.ours.verdicts if self.ours else ()

    @property
    def held_out(self) -> Sequence[Verdict]:
        """Of the arms of ours."""
        return self.ours.held_out if self.ours else ()

    @cached_property
    def differences(self) -> Sequence[Difference]:
        """Loss of every other side against the first, on the steps that both logged, where no verdict is on it."""
        judged = self.ours.sides if self.ours and self.ours.reference is self.reference else ()
        others = [side for side in self.others if side not in judged]
        return [difference(self.reference, side, final_fraction=self.final_fraction) for side in others]

    @cached_property
    def no_gain(self) -> dict[str, str]:
        """Why no ratio of a side's speed to the first's is claimed: label to words."""
        reasons = {}
        for side in self.others:
            work = differing_of((side, self.reference), OF_A_TOKEN)
            words = [f"{name} {' against '.join(values)}" for name, values in work.items()]
            if words := [*words, *machine_differences(side, self.reference)]:
                reasons[side.label] = "; ".join(words)
        return reasons

    @property
    def emulation_note(self) -> str:
        """Which sides had emulated kernels."""
        emulated = [side for side in self.sides if side.emulated]
        return f"emulated kernels in {names_of(emulated)}" if emulated else ""

    @property
    def speed_note(self) -> str:
        """What must be said where speed is shown."""
        on_cpu = [side for side in self.sides if side.on_cpu]
        notes = [f"each rank is a CPU process in {names_of(on_cpu)}"] if on_cpu else []
        notes += [f"{self.emulation_note}: no measure of speed"] if self.emulation_note else []
        return "; ".join([*notes, *map(self.unclaimed, self.no_gain)])

    def _speed_words(self, side: Side) -> str:
        first = self.reference
        own, reference = median(side.tps), median(first.tps)
        if math.isnan(own) or math.isnan(reference):
            return f"{side.label} and {first.label} did not both log tokens/s"
        words = f"{side.label} logged {own / reference:.3g} times the tokens/s per GPU of {first.label}"
        both = [one.settings.values for one in (side, first)]
        unknown = [noun for name, noun in (("model", "model"), ("gpu", "GPU")) if not all(name in one for one in both)]
        if not unknown:
            return words
        return f"{words} (whether {' and '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} the same is not known)"

    @property
    def _same_loss(self) -> str:
        words = joined([one.words for one in self.differences])
        single = f"Not decided: {words} A single run cannot show what another seed would change."
        if self.ours is None:
            return single
        ours = self.ours.summary["Same loss?"]
        return f"{single} {ours}" if ours.startswith("Yes") else f"{ours} {single}"

    @property
    def _lines(self) -> list[str]:
        settings = differing_values(self.sides).items()
        return [
            *(f"{side.label}: {_in_words(side)}" for side in self.sides),
            *(one.sentence() for one in self.differences),
            *(verdict.sentence() for verdict in self.verdicts),
            *(f"Held-out text: {verdict.sentence()}" for verdict in self.held_out),
            *(f"{name} differs: {', '.join(value or '–' for value in values)}" for name, values in settings),
        ]

    @property
    def _left_out(self) -> list[str]:
        # Also runs that did not finish where others of their side did.
        ended = [run for side in self.sides if side.finished for run in side.attempted if not run.finished]
        not_shown = [*self.not_judged, *map(NotJudged.of, ended)]
        return [
            f"{study}: {words}"
            for study in dict.fromkeys(one.study for one in not_shown)
            for words in left_out_words(one for one in not_shown if one.study == study)
        ]

    @property
    def _own_notes(self) -> list[str]:
        no_mfu = [side for side in self.sides if not side.on_cpu and math.isnan(side.mfu_percent(causal=True))]
        unknown = {
            "no configuration can be read": [side for side in self.sides if not side.settings.values],
            "MFU by the two counts needs the model's shape, the sequence length and the GPU's peak": no_mfu,
        }
        notes = [side.unfinished for side in self.sides if side.unfinished]
        notes += [f"{names_of(sides)}: {what}" for what, sides in unknown.items() if sides]
        held_out = {
            side.label: int(run.validation["step"].iloc[-1])
            for side in self.sides
            for run in side.runs
            if len(run.validation)
        }
        if len(set(held_out.values())) > 1:
            steps = ", ".join(f"{label} step {step:,}" for label, step in held_out.items())
            notes.append(f"the held-out losses are of different steps: {steps}")
        return notes

    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""
        shown = [
            # A run that did not finish is used if its side has none that did.
            run_json(run, end_of(run) if side.finished and not run.finished else None) | {"side": side.label}
            for side in self.sides
            for run in side.attempted
        ]
        return {
            "summary": self.summary,
            "runs": [*shown, *(one.to_json() for one in self.not_judged)],
            "sides": [_side_json(side, self.final_fraction) for side in self.sides],
            "differences": [one.to_json() for one in self.differences],
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            "differing_settings": differing_values(self.sides),
            "note": "; ".join(note.removesuffix(".") for note in self.notes),
        }


def _in_words(side: Side) -> str:
    """Its steps, speed and memory on one line."""
    low, high = quartiles(side.tps)
    speed = "no tokens/s"
    if len(side.tps):
        each = "rank" if side.on_cpu else "GPU"
        speed = f"{median(side.tps):,.0f} tokens/s per {each} (middle half {low:,.0f} to {high:,.0f})"
    memory = f"{side.memory_gib:.2f} GiB" if math.isfinite(side.memory_gib) else "no memory"
    seeds = f"{len(side.runs)} seeds, " if len(side.runs) > 1 else ""
    steps = f"{side.last_step:,} step{'s' * (side.last_step != 1)}"
    steps += f" ({side.steps_logged:,} of them logged)" if side.steps_logged != side.last_step else ""
    return f"{seeds}{steps}, {speed}, {memory}"


def _side_json(side: Side, final_fraction: float) -> dict[str, Any]:
    return {
        "label": side.label,
        "arm": side.name if side.experiment is not None else "",
        "seeds": [run.seed for run in side.runs],
        "status": side.state,
        "last_step": side.last_step,
        "final_loss_nats": finite_or_none(side.final_nats(final_fraction)),
        "held_out_loss_nats": finite_or_none(side.held_out_nats),
        "tps": {
            "median": finite_or_none(median(side.tps)),
            "quartiles": [finite_or_none(end) for end in quartiles(side.tps)],
            "n": len(side.tps),
        },
        "step_time_s": {"median": finite_or_none(median(side.step_time_s)), "n": len(side.step_time_s)},
        "memory_gib": finite_or_none(side.memory_gib),
        "mfu_percent": {
            "logged": finite_or_none(side.mfu_logged_percent),
            "torchtitan": finite_or_none(side.mfu_percent(causal=False)),
            "causal": finite_or_none(side.mfu_percent(causal=True)),
        },
        "settings": side.settings.values,
    }


def _common_steps(*sides: Side) -> set[int]:
    """Steps that every run of all sides logged, finite or not; a step that a source gives no loss for is not logged."""
    if not all(side.table["loss"].notna().any() for side in sides):  # an export of throughput alone
        return set()
    known = [side.table if side.experiment or side.diverged else side.table.dropna(subset=["loss"]) for side in sides]
    return set.intersection(*(set(rows["step"]) for table in known for _, rows in table.groupby("run")))


def _mean_loss(side: Side) -> pd.Series[float]:
    """Mean loss over the side's runs at each step, NaN where one has none or it is not finite."""
    # NaN where one run has none: a mean that loses a run on the way would jump.
    wide = merge_segments(side.table).pivot(index="step", columns="run", values="loss")
    return wide.mean(axis=1, skipna=False).where(lambda mean: mean.abs() < math.inf)
