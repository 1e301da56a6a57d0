"""A report: arms of our studies judged over seeds, runs from elsewhere held against the first on common steps.

:func:`judge_paths` and :func:`judge_study` are what the notebooks and ``moelab report`` both come through, so they
cannot disagree. A run from elsewhere has no seeds and so no verdict: its difference from the first comes with its
spread from step to step, which is no interval, since another seed might have given another difference. What nobody
recorded of a log is missing, which is NaN here and a dash for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
import pandas as pd

from moelab.errors import BadInput, MoelabError
from moelab.experiment_file import Study
from moelab.files import finite_or_none
from moelab.judge.arms import PRECISIONS, arm_label, contrast, seed_names, seeds_words
from moelab.judge.equivalence import MIN_SEEDS, prediction_interval
from moelab.judge.sides import (
    ARM_FIELDS,
    NOT_FOR_SPEED,
    OF_A_TOKEN,
    OF_THE_LOSS,
    SPEED_FACTS,
    SPEED_FACTS_OF_A_LOG,
    VALID,
    Attempt,
    Side,
    caveats,
    differing_facts,
    differing_of,
    differing_settings,
    differing_values,
    end_of,
    sides_at,
    study_of,
)
from moelab.judge.throughput import ArmThroughput, Gain, arm_throughput, gain, over
from moelab.judge.verdict import (
    HELD_OUT,
    Answer,
    ArmSeeds,
    FinalLosses,
    OtherAttempt,
    Verdict,
    correct_for_arms,
    final_losses,
    first_final_step,
    judge,
    recovered_spikes,
)
from moelab.model import shape_for, tokenizer_size
from moelab.runs.collect import Collected
from moelab.runs.table import merge_segments, throughput_rows

_ASKED = {
    "ep": "EP {}",
    "seq_len": "sequences of {} tokens",
    "local_batch": "local batch {}",
    "lr": "learning rate {}",
}
"""Settings in the summary's last sentence, in words."""


_ON_CPU, _EMULATED = "a CPU process stands in for a GPU", "emulated kernels are slower than real ones"


class NothingToJudge(MoelabError):
    """No run of the study finished."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Loss of the side ``label`` minus that of ``reference``, in nats per token."""

    reference: str
    label: str
    curve: pd.Series[float]  # by the step that all runs of both logged
    first_step: int  # of the last part, which the difference is a mean over
    nats: float  # NaN if one diverged
    spread_nats: float  # standard deviation from step to step in that part
    diverged: str  # which of the two did
    differing: str  # settings that the loss depends on, in words

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that both logged."""
        return tuple(int(step) for step in self.curve.index)

    @property
    def words(self) -> str:
        """How far the two are apart at the end, and in what else they differ."""
        if self.diverged:
            return self.diverged
        if not self.steps:
            return f"{self.label} and {self.reference} have no step with a loss in common at the end"
        last = self.steps[-1]
        where = f"over steps {self.first_step} to {last}" if math.isfinite(self.spread_nats) else f"at step {last}"
        also = f" (they also differ: {self.differing})" if self.differing else ""
        return f"{self.label} is {self.nats:+.4f} nats from {self.reference} {where}{also}"

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
            "sentence": self.sentence(),
        }


def difference(reference: Side, side: Side, *, final_fraction: float = 0.1) -> Difference:
    """Hold a side's loss against that of the first, over the last part of the steps that both logged."""
    first, other = _mean_loss(reference), _mean_loss(side)
    both = (other - first).dropna()
    if len(both):
        end = min(first.index.max(), other.index.max())
        # One that logs seldom has its last of them before the other's end.
        both_end = min(first.loc[:end].index.max(), other.loc[:end].index.max())
        # Of logs of other steps the first alone may be common, which says nothing about the end.
        both = both if both.index.max() >= first_final_step(int(both_end), final_fraction) else both.iloc[:0]
    first_step = first_final_step(int(both.index.max()), final_fraction) if len(both) else 0
    # What one logged before it diverged says nothing about the end.
    diverged = "; ".join(one.unfinished for one in (reference, side) if one.diverged)
    final = both.iloc[:0] if diverged else both.loc[first_step:].where(np.isfinite).dropna()
    return Difference(
        reference=reference.label,
        label=side.label,
        curve=both,
        first_step=first_step,
        nats=float(final.mean()),
        spread_nats=float(final.std(ddof=1)),
        diverged=diverged,
        differing=", ".join(differing_of(side, reference, OF_THE_LOSS)),
    )


def _mean_loss(side: Side) -> pd.Series[float]:
    """Mean loss over the side's runs at each step that all of them have one for."""
    # A mean that loses a run on the way would jump.
    wide = merge_segments(side.table).pivot(index="step", columns="run", values="loss")
    return wide.mean(axis=1, skipna=False).dropna()


@dataclass(frozen=True, kw_only=True)
class Report:
    """Sides and what they say, the first being what the others are held against."""

    sides: tuple[Side, ...]  # at least one
    study: str | None = None  # that the sides are the arms of; None for several studies, and runs from elsewhere
    paths: tuple[Path, ...]
    not_judged: tuple[Attempt, ...]  # every run of ours at the paths that is in no side
    discovery_notes: tuple[str, ...]  # what a reader should know of the folders
    final_fraction: float = 0.1  # of the steps, that a final loss or difference is a mean of
    dropped_seeds: Sequence[int] = ()  # from every arm
    margin_nats: float | None = None  # None derives it from the reference's seeds
    margin_cap_nats: float | None = None  # None is 1 % of the reference's mean loss
    origin: str = ""  # of replayed runs, for the titles of figures

    def __post_init__(self) -> None:
        first_final_step(1, self.final_fraction)  # refuses a part of nothing now, and not when a loss is asked for
        seeds = set().union(*(side.seeds for side in self.sides))
        if unknown := [seed for seed in self.dropped_seeds if seed not in seeds]:
            known = ", ".join(str(seed) for seed in sorted(seeds)) or "not known"
            raise BadInput(f"seed {unknown[0]} cannot be dropped: the seeds of these runs are {known}")

    @property
    def title(self) -> str:
        """What the report is about."""
        if self.study is not None:
            return f"Study {self.study}"
        noun = "arms" if self.arms else "runs"
        return f"{len(self.sides)} {noun} side by side" if self.others else f"Run {self.reference.label}"

    @property
    def reference(self) -> Side:
        """What the other sides are held against."""
        return self.sides[0]

    @property
    def others(self) -> tuple[Side, ...]:
        """The other sides."""
        return self.sides[1:]

    @cached_property
    def arms(self) -> list[Side]:
        """Sides that are judged over seeds, their reference first; none where nothing can be held against another."""
        own = [side for side in self.sides if side.experiment is not None and side.has_result]
        is_judged = len(own) > 1 and (self.study is None or own[0] is self.reference)
        return own if is_judged and any(side.finished for side in own) else []

    @property
    def finished(self) -> list[Collected]:
        """Runs of ours that trained every step."""
        return [run for side in self.sides for run in side.finished]

    @property
    def on_cpu(self) -> bool:
        """Whether ranks of a run were processes on a CPU."""
        return any(side.on_cpu for side in self.sides)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the runs that are shown, by the name of their side, without those of dropped seeds."""
        rows = pd.concat([side.table for side in self.sides], ignore_index=True)
        ours = [side.name for side in self.sides if side.experiment is not None]
        kept = rows[~(rows["arm"].isin(ours) & rows["seed"].isin(self.dropped_seeds))]
        return kept if len(kept) else rows  # with every seed dropped all curves are better than an empty figure

    @cached_property
    def attempts(self) -> list[tuple[str, Attempt]]:
        """Every run behind what its side is called."""
        own = [
            (side.label, Attempt(run=run.run, arm=run.arm, seed=run.seed, reason=reason, collected=run))
            for side in self.sides
            for run in side.attempted
            for reason in [self._why_unused(side, run)]
        ]
        others = [(arm_label(one.arm) if one.arm else one.run, one) for one in self.not_judged]
        if self.study is None:
            others = [(f"{study_of(one.run)}: {name}" if one.arm else name, one) for name, one in others]
        return own + others

    def _why_unused(self, side: Side, run: Collected) -> str:
        if side.experiment is None:
            return ""
        # Side by side an arm is shown by runs that did not finish where none did.
        if not run.finished and (side.finished or self.study is not None):
            return end_of(run)
        return "its seed is dropped from every arm, as requested" if run.seed in self.dropped_seeds else ""

    # Loss

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Convergence of every other arm, on the final training loss; none where a run is from elsewhere."""
        return correct_for_arms([_verdict(self, side, self._final_of(side)) for side in self.arms[1:]])

    def _final_of(self, side: Side) -> FinalLosses:
        """Final losses of an arm and the reference at the steps that both logged, whatever a third arm did."""
        pair = [one.table for one in (self.arms[0], side) if one.finished]
        if pair:
            return final_losses(pd.concat(pair), final_fraction=self.final_fraction)
        last = self.arms[0].last_step  # every seed of both diverged
        return FinalLosses(seeds={}, first_step=first_final_step(last, self.final_fraction), last_step=last)

    @cached_property
    def held_out(self) -> list[Verdict]:
        """Convergence of the arms that were validated, on the loss of text that no run trained on."""
        runs = [run for side in self.arms for run in side.finished if len(run.validation)]
        # The step that most validated last: one run alone, cut off or longer, does not decide for the others.
        step = mode(int(run.validation["step"].iloc[-1]) for run in runs) if runs else 0
        seeds = {side.name: _held_out_of(side, step) for side in self.arms}
        if not any(one.losses for one in seeds.values()):
            return []
        # An arm that never validated has nothing to hold against the others.
        validated = [side for side in self.arms if seeds[side.name].losses or seeds[side.name].diverged]
        judged = validated[1:] if self.arms[0] in validated else []
        final = FinalLosses(seeds=seeds, final_fraction=self.final_fraction)
        return correct_for_arms([_verdict(self, side, final) for side in judged])

    @cached_property
    def differences(self) -> Sequence[Difference]:
        """Loss of every other side against the first, on the steps that both logged, where no verdict is on it."""
        judged = self.arms if self.reference in self.arms else []
        others = [side for side in self.others if side not in judged] if self.study is None else []
        return [difference(self.reference, side, final_fraction=self.final_fraction) for side in others]

    # Speed

    @cached_property
    def timed(self) -> pd.DataFrame:
        """Rows of :attr:`table` whose speed counts."""
        rows = pd.concat([side.timed for side in self.sides])
        kept = self.table[["arm", "run"]].drop_duplicates()
        return throughput_rows(rows.merge(kept), warmup_steps=0)

    @cached_property
    def throughput(self) -> Sequence[ArmThroughput]:
        """Tokens per second per rank of every side that has a speed after its warm-up."""
        return arm_throughput(self.timed, warmup_steps=0) if len(self.timed) else []

    @cached_property
    def no_gain(self) -> dict[str, str]:
        """Why no ratio of a side's speed to the first's is claimed: label to words."""
        first, reasons = self.reference, {}
        for side in self.others:
            both, arm, reference = (side, first), side.experiment, first.experiment
            if any(one.on_cpu for one in both):
                words = [_ON_CPU]
            elif any(one.emulated for one in both):
                words = [_EMULATED]
            elif arm is None or reference is None:
                words = differing_of(side, first, OF_A_TOKEN) + differing_facts(side, first, SPEED_FACTS_OF_A_LOG)
            else:
                settings = differing_settings(arm, reference)
                words = [fact for name, fact in settings.items() if name not in NOT_FOR_SPEED]
                words += differing_facts(side, first, SPEED_FACTS)
                if not all(any(run.speed_known for run in one.runs) for one in both):
                    words.append("one of the arms has no run whose machine and kernels are known")
            if words:
                reasons[side.label] = "; ".join(words)
        return reasons

    @cached_property
    def gains(self) -> list[Gain]:
        """Throughput over the reference of every other arm that ran like it, over the runs whose machine is known."""
        if self.reference not in self.arms:
            return []
        # A gain is paired by seed, so a run of an unknown machine takes its partner with it.
        rows = self.timed[self.timed["run"].isin([run.run for run in self.finished if run.speed_known])]
        seeds = {side.name: set(rows.loc[rows["arm"] == side.name, "seed"]) for side in self.arms}
        alike = [side.name for side in self.arms[1:] if side.label not in self.no_gain]
        # A gain of arms without a common seed would be refused, and the report with it.
        arms, baseline = [arm for arm in alike if seeds[arm] & seeds[self.reference.name]], self.reference.name
        return [gain(rows, baseline=baseline, arm=arm, warmup_steps=0) for arm in arms]

    @property
    def comparable_tps(self) -> dict[str, dict[int, float]]:
        """Throughput by arm and seed, of the reference and every arm whose gain over it is claimed."""
        arms = {self.reference.name, *(one.arm for one in self.gains)}
        return {one.arm: one.tps_by_seed for one in self.throughput if one.arm in arms}

    @property
    def rank_words(self) -> str:
        """What tokens per second are counted by."""
        # An unknown machine is not taken for one with GPUs.
        known = [run.environment is not None and bool(run.environment.gpus) for run in self.finished]
        return "per rank" if self.on_cpu or not all(known) else "per GPU"

    # What must be said

    @property
    def emulation_note(self) -> str:
        """What was emulated, for a figure's title; empty for real kernels."""
        runs = [run for side in self.sides for run in side.attempted]
        emulated = [run.experiment for run in runs if run.emulates_products]
        formats = {PRECISIONS[one.precision] for one in emulated if one}
        formats |= {"MXFP8" for side in self.sides if side.emulated and side.experiment is None}
        notes = [f"emulated {' and '.join(sorted(formats))} kernels"] if formats else []
        deepep = any(run.emulates_deepep for run in runs)
        return ", ".join([*notes, *(["DeepEP emulated on plain collectives"] if deepep else [])])

    @property
    def speed_notes(self) -> list[str]:
        """What must be said where speed is shown."""
        notes = {_ON_CPU: "each rank is a CPU process"} if all(side.on_cpu for side in self.sides) else {}
        notes |= {_EMULATED: f"{self.emulation_note}: no measure of speed"} if self.emulation_note else {}
        reasons = [(words, names) for words, names in _by_words(self.unclaimed) if words not in notes]
        return [*notes.values(), *(f"no gain is claimed for {names}: {words}" for words, names in reasons)]

    @property
    def unclaimed(self) -> list[tuple[str, str, None]]:
        """Why no gain is claimed, of what, and no seed."""
        sides = [side for side in self.others if side.label in self.no_gain]
        return [(self.no_gain[side.label], over(side.name, self.reference.name), None) for side in sides]

    @property
    def grad_norm_notes(self) -> list[str]:
        """Runs that reported a gradient norm of NaN or Inf, and in which steps."""
        runs = [(side.name_of(run), run.grad_norm_finding) for side in self.sides for run in side.attempted]
        return [f"{name}: {finding}" for name, finding in runs if finding]

    @property
    def loss_note(self) -> str:
        """What must be said in the title of a figure of the loss, which has no room for every run."""
        diverged = [
            f"{side.label}: {len(side.diverged_seeds)} diverged, not drawn" if side.finished else side.unfinished
            for side in self.sides
            if side.diverged_seeds or side.diverged
        ]
        notes = self.grad_norm_notes
        first = [f"{notes[0]}, and {len(notes) - 1} more runs"] if len(notes) > 1 else notes  # the rest is in `notes`
        return "; ".join(filter(None, [self.origin, self.emulation_note, *diverged, *first]))

    @cached_property
    def summary(self) -> dict[str, str]:
        """What a reader asks first, each question with its answer in a sentence."""
        alone = "There is nothing to compare with."
        faster, same_loss = (_faster(self), _same_loss(self)) if self.others else (alone, alone)
        return {"Faster?": faster, "Same loss?": same_loss, "On what?": _on_what(self)}

    @cached_property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        return _notes(self)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every run for a table and for a program; what is missing is null."""
        medians = {(arm.arm, seed): tps for arm in self.throughput for seed, tps in arm.tps_by_seed.items()}
        sides = {side.label: side for side in self.sides}
        return [_row(self, one, label, sides.get(label), medians) for label, one in self.attempts]

    @property
    def finished_of_all(self) -> int:
        """How many runs of ours trained every step, those that are not judged among them."""
        return sum(one.collected is not None and one.collected.finished for _, one in self.attempts)

    def as_text(self) -> str:
        """The findings as sentences: the three of the summary, then each with its numbers."""
        finished, judged, every = self.finished_of_all, len(self.finished), len(self.attempts)
        counts = f"{finished} of {every} runs finished{f', {judged} of them judged' * (judged < finished)}"
        settings = differing_values(self.sides).items() if self.study is None else []
        return "\n".join(
            [
                *(f"{question} {answer}" for question, answer in self.summary.items()),
                *([counts] if any(one.arm for _, one in self.attempts) else []),
                *(verdict.sentence() for verdict in self.verdicts),
                *(f"Held-out text: {verdict.sentence()}" for verdict in self.held_out),
                *(one.sentence() for one in self.differences),
                # The table says tokens/s per GPU of every source; on a CPU that is a rank.
                *(arm.sentence().replace("per GPU", self.rank_words) for arm in self.throughput),
                *(one.sentence() for one in self.gains),
                *(f"{name} differs: {', '.join(value or '–' for value in values)}" for name, values in settings),
                *(f"Note: {note}" for note in self.notes),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""
        return {
            "study": self.study,
            "summary": self.summary,
            "finished": self.finished_of_all,
            "judged": len(self.finished),
            "runs": self.rows,
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            "differences": [one.to_json() for one in self.differences],
            "differing_settings": differing_values(self.sides),
            # Of every side, also those of which no gain is claimed: a rate is a fact where a ratio would be a claim.
            "tps": {one.arm: finite_or_none(one.tps) for one in self.throughput},
            "gains": [one.to_json() for one in self.gains],
            "no_gain": self.no_gain,
            "note": "; ".join(note.removesuffix(".") for note in self.notes),
        }


def judge_paths(
    paths: Sequence[Path], *, study: Study | None = None, reference: str = "bf16_standard", **options: Any
) -> Report:
    """Judge one study or the arms of several, or compare whatever is at the paths.

    Args:
        paths: studies, run directories, or logs from elsewhere; the first is what the others are held against.
        study: judge the runs of exactly these experiments; None takes the settings of most of the reference's seeds,
            and of each other arm those that agree with them.
        reference: arm of a study that its others are held against.
        **options: fields of a :class:`Report`.

    Raises:
        BadInput: if there is no path, or one cannot be read; it is named.
        NothingToJudge: if no run of a study alone finished, with the reason of each.
    """
    if not paths:
        raise BadInput(f"give at least one path: {VALID}")
    sides, not_judged, notes = sides_at(paths, reference=reference, planned=study)
    runs = [run for side in sides for run in side.attempted]
    studies = {study_of(name) for name in [*(run.run for run in runs if run.arm), *(one.run for one in not_judged)]}
    name = studies.pop() if len(paths) == len(studies) == 1 else None
    left_out = [f"{one.run}: left out: {one.reason}" for one in not_judged]
    if not sides or (name and not any(side.finished for side in sides)):
        lines = [f"no run of {name or 'these'} finished:", *(f"{run.run}: {end_of(run)}" for run in runs), *left_out]
        raise NothingToJudge("\n  ".join(lines))
    if name and sides[0].name != reference:  # which comes first if it is there
        arms = ", ".join(side.name for side in sides)
        raise BadInput("\n  ".join([f"reference {reference!r} is not an arm of {name}; its arms: {arms}", *left_out]))
    return Report(
        sides=tuple(sides),
        study=name,
        paths=tuple(paths),
        not_judged=tuple(not_judged),
        discovery_notes=tuple(notes),
        **options,
    )


def judge_study(path: Path, *, study: Study | None = None, **options: Any) -> Report:
    """Collect a study's runs and judge them; the options are those of :func:`judge_paths`.

    Raises:
        BadInput: if the path is not a study's folder or has no run of the reference.
        NothingToJudge: if no run finished, with the reason of each.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a study, such as runs/06_compare_convergence")
    report = judge_paths([path], study=study, **options)
    if report.study is None:
        studies = sorted({study_of(run.run) for side in report.sides for run in side.attempted if run.arm})
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    return report


def _notes(report: Report) -> list[str]:
    named = {side.label for side in report.arms}  # whose runs without a result a verdict names
    not_judged = {id(one) for one in report.not_judged}
    left_out = [
        (one.reason, label, one.seed)
        for label, one in report.attempts
        if one.reason and (id(one) in not_judged or (label not in named and one.seed not in report.dropped_seeds))
        # An attempt that another one replaced stands in the table of runs alone, unless it diverged.
        if not one.is_replaced or (one.collected and one.collected.diverged)
    ]
    of_runs = [
        (words, side.label, run.seed)
        for side in report.sides
        for run in side.attempted
        for words in (*run.damaged, *run.notes, *_spike_words(run))
    ]
    unknown = [("no configuration can be read", side.label, None) for side in report.sides if not side.values]
    unfinished = [side.unfinished for side in report.sides if side not in report.arms and report.study is None]
    dropped = f"dropped from every arm, as requested: {seed_names(report.dropped_seeds)}"
    return [
        *report.grad_norm_notes,
        *(f"left out: {names}: {words}" for words, names in _by_words(left_out)),
        *([dropped] if report.dropped_seeds else []),
        *filter(None, unfinished),
        *report.speed_notes,
        *(f"{names}: {words}" for words, names in _by_words([*unknown, *of_runs])),
        *filter(None, [report.origin]),
        *report.discovery_notes,
    ]


def _row(
    report: Report, one: Attempt, label: str, side: Side | None, medians: Mapping[tuple[str, int], float]
) -> dict[str, Any]:
    run, known = one.collected, one.collected.environment if one.collected else None
    numbers = {
        "final_loss_nats": final_loss(run, report.final_fraction) if run else math.nan,
        "held_out_loss_nats": run.validation_loss if run else math.nan,
        "tps": medians.get((side.name if side and not one.reason else "", one.seed or 0), math.nan),
        "memory_gib": float(run.rows["memory_gib"].max()) if run else math.nan,
    }
    reason = one.reason or (run.status.reason if run else None)
    return {
        "side": label,
        "run": one.run,
        "arm": one.arm,
        "seed": one.seed,
        "status": run.status.state.value if run else "unknown",
        "steps": run.last_step if run else 0,
        **{name: finite_or_none(number) for name, number in numbers.items()},
        "machine": known.machine if known else None,
        "versions": known.versions if known else {},
        "damaged": list(run.damaged) if run else [],
        "used": not one.reason,
        **({"reason": reason} if reason else {}),
    }


# What a report opens with


def _faster(report: Report) -> str:
    first, tps = report.reference, {one.arm: one.tps for one in report.throughput}
    findings = []
    for side in [side for side in report.others if side.label not in report.no_gain]:
        own = next((one for one in report.gains if one.arm == side.name), None)
        if own is not None:
            # One seed has no interval: its sentence says so, and "no difference" would be a second finding.
            unresolved = own.interval.exists and not own.resolved
            findings.append(f"{own.sentence()}{': no difference is shown' * unresolved}")
        elif {side.name, first.name} <= tps.keys():
            ratio = f"{tps[side.name] / tps[first.name]:.3g} times the tokens/s per GPU of {first.label}"
            names = {"model": "model", "gpu": "GPU"}
            unknown = [noun for name, noun in names.items() if not (name in side.values and name in first.values)]
            caveat = f" (whether it is the same {' and '.join(unknown)} is not known)" if unknown else ""
            findings.append(f"{side.label} logged {ratio}{caveat}")
        else:
            findings.append(f"{side.label} and {first.label} did not both log tokens/s")
    findings += [f"not measured for {names}: {words}" for words, names in _by_words(report.unclaimed)]
    words = _joined(findings)
    return f"N{words[1:]}" if words.startswith("not ") else words  # a label that comes first keeps its own case


def _same_loss(report: Report) -> str:
    judged = _judged_loss(report) if report.verdicts else ""
    if report.differences:
        words = _joined([one.words for one in report.differences])
        single = f"Not decided: {words} A single run cannot show what another seed would change."
        return f"{single} {judged}".strip() if judged.startswith("Yes") else f"{judged} {single}".strip()
    which = "no arm besides the reference" if report.reference.finished else "no run of the reference"
    return judged or f"Not known: {which} finished."


def _judged_loss(report: Report) -> str:
    first, held_out = report.arms[0], {verdict.arm: verdict for verdict in report.held_out}
    openings, controls = [], dict[_Opening, Verdict]()
    for side, verdict in zip(report.arms[1:], report.verdicts, strict=True):
        is_at_equal_settings = not differing_settings(side.experiment, first.experiment)
        own = _Opening.of(verdict, held_out.get(side.name), is_at_equal_settings)
        openings.append((side, own))
        # A control has the reference's number formats and exchange, and differs in another setting on purpose.
        differing = side.experiment.differences(first.experiment) if side.experiment and first.experiment else ()
        if report.study is not None and differing and not ARM_FIELDS & {*differing}:
            controls[own] = verdict
    if len(controls) == len(openings):
        controls.clear()  # they are what the study asks about
    by_word: dict[str, list[str]] = {}  # arms of one answer share its word; the worst answer comes first
    for _, own in sorted(openings, key=lambda each: -each[1].severity):
        if own not in controls:
            by_word.setdefault(own.word, []).append(own.words)
    answers = [f"{word}: {_joined(words)}" for word, words in by_word.items()]
    seen = {0: "so a change of this size is within the margin", 2: "so this study sees a change of this size"}
    for own, verdict in controls.items():
        undecided = "so it does not say whether such a change is seen"
        if not verdict.decided_by and verdict.excludes_zero:
            undecided = "so this study sees the change, but not that it is larger than the margin"
        answers.append(f"As a control, {own.words}, {seen.get(own.severity, undecided)}.")
    for (side, own), verdict in zip(openings, report.verdicts, strict=True):
        arm, _, _ = contrast(verdict.arm, verdict.reference)
        answers += [
            words if len(openings) == 1 or arm in words else f"{side.label}: {words}"
            for words in (*own.cautions, *caveats(side, first))
        ]
    return " ".join(answers)


def _on_what(report: Report) -> str:
    sides, experiment = report.sides, report.reference.experiment
    values = [side.values | ({"model": side.experiment.model_label} if side.experiment else {}) for side in sides]
    chips = [own.get("gpu") or own.get("processor", "unknown hardware") for own in values]
    # A log from elsewhere names its GPU, and seldom how many there were.
    ranks = "" if experiment is None else f"{experiment.world_size} {'processes of' if report.on_cpu else '×'} "
    models = " and ".join(dict.fromkeys(own.get("model", "an unknown model") for own in values))
    parts = [f"{models} on {ranks}{' and '.join(dict.fromkeys(chips))}"]
    for name, words in _ASKED.items():
        known = dict.fromkeys(own[name] for own in values if name in own)
        parts += [words.format(" and ".join(known))] if known else []
    steps = f"{span_of(side.last_step for side in sides)} steps"
    if any(side.steps_logged != side.last_step for side in sides):
        steps += f", {span_of(side.steps_logged for side in sides)} of them logged"
    seeds = span_of(max(1, len(side.runs)) for side in sides)
    each = "one run" if experiment is None and seeds == "1" else f"{seeds} seed{'s' * (seeds != '1')}"
    return f"{', '.join(parts)}; {steps}, {each} each."


def final_loss(run: Collected, final_fraction: float) -> float:
    """Mean loss of one run over the last part of its own steps; NaN if it diverged."""
    rows = merge_segments(run.rows).set_index("step")["loss"].where(np.isfinite).dropna()
    if run.diverged or rows.empty:
        return math.nan
    return float(rows.loc[first_final_step(run.last_step, final_fraction) :].mean())


def _verdict(report: Report, side: Side, final: FinalLosses) -> Verdict:
    """Judge an arm against the reference, and say in what else they differ."""
    first, seeds = report.arms[0], {}
    for one in (first, side):
        known = final.seeds.get(one.name, ArmSeeds())
        seeds[one.name] = ArmSeeds(
            known.losses,
            {**one.diverged_seeds, **known.diverged},
            {**one.lost_seeds, **known.lost},
            changes=known.changes,
            unmatched=known.unmatched,
            attempts=() if one is first else tuple(_other_attempts(side, first, final)),
        )
    # One vocabulary for all: an arm changes how a model is trained, not what it predicts.
    model = first.experiment
    assert model is not None
    verdict = judge(
        seeds[side.name],
        seeds[first.name],
        arm=side.name,
        reference=first.name,
        quantity=final.quantity,
        steps=final.steps,
        # Rows of the embedding that no token uses are never predicted, after a few steps.
        untrained_nats=math.log(min(shape_for(model).vocab_size, tokenizer_size(model))),
        lr_warmup_steps=model.warmup_steps,
        margin_nats=report.margin_nats,
        margin_cap_nats=report.margin_cap_nats,
        dropped_seeds=report.dropped_seeds,
    )
    return replace(verdict, findings=(*verdict.findings, *caveats(side, first)))


def _held_out_of(side: Side, step: int) -> ArmSeeds:
    """What became of an arm's finished seeds on held-out text at a step."""
    losses, diverged, lost = dict[int, float](), dict[int, str](), dict[int, str]()
    for run in side.finished:
        of_step = run.validation.loc[run.validation["step"] == step, "loss"]
        seed, loss = run.seed or 0, float(of_step.iloc[-1]) if len(of_step) else math.nan
        if math.isfinite(loss):
            losses[seed] = loss
        # The log of a pipeline rank without the loss has no held-out loss either: that is no divergence.
        elif len(of_step) and run.rows["loss"].notna().any():
            diverged[seed] = f"the held-out loss is {loss}"
        else:
            lost[seed] = f"no held-out loss was logged at step {step}"
    return ArmSeeds(losses, diverged, lost)


def _other_attempts(side: Side, reference: Side, final: FinalLosses) -> Iterator[OtherAttempt]:
    """Runs of both arms that are not judged, each held against the other arm's run of its seed where both end."""

    def curve(run: Collected) -> pd.Series[float]:
        rows = merge_segments(run.rows) if final.last_step else run.validation.drop_duplicates("step", keep="last")
        return rows.set_index("step")["loss"].where(np.isfinite).dropna()

    both = [(side, reference, 1), (reference, side, -1)]
    attempts = [
        (own, run, {one.seed: one for one in other.attempted}.get(run.seed), sign, is_replaced)
        for own, other, sign in both
        for is_replaced, runs in ((False, own.attempted), (True, own.replaced))
        for run in runs
        if is_replaced or run.seed in own.lost_seeds
    ]
    ours, theirs = ({run.seed: curve(run) for run in one.finished if attempts} for one in (side, reference))
    judged = pd.DataFrame({seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()})
    for own, run, other, sign, is_replaced in attempts:
        losses = curve(run)
        differences = losses * math.nan if other is None else (losses - curve(other)).dropna() * sign
        common = losses.index if other is None else differences.index
        if len(common):
            common = common[common >= first_final_step(int(common.max()), final.final_fraction)]
        yield OtherAttempt(
            arm=own.name,
            seed=run.seed or 0,
            end=end_of(run) if run.diverged or not run.finished else "finished",
            is_replaced=is_replaced,
            has_ended=run.finished or run.diverged is not None,
            has_diverged=run.diverged is not None,
            loss=float(losses.reindex(common).mean()),
            nats=float(differences.reindex(common).mean()),
            usual=prediction_interval(judged.reindex(common).mean(skipna=False).dropna().tolist()),
        )


_NOT_DECIDED = "Not decided"
_WORDS = {Answer.EQUIVALENT: "Yes", Answer.DIFFERENT: "No"}
_SEVERITY = {Answer.EQUIVALENT: 0, Answer.INSUFFICIENT: 1, Answer.NOT_TRAINED: 1, Answer.DIFFERENT: 2}


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What a report opens with of one arm's loss: the worst of what was judged."""

    severity: int
    word: str  # Yes, No or Not decided, and on what condition
    words: str
    cautions: tuple[str, ...]

    @classmethod
    def of(cls, training: Verdict, held_out: Verdict | None, is_at_equal_settings: bool) -> _Opening:
        """That of a verdict on the training loss and one on the held-out loss."""
        worst, other = training, held_out
        if held_out is not None and _SEVERITY[held_out.answer] > _SEVERITY[training.answer]:
            worst, other = held_out, training
        severity, word, words = _SEVERITY[worst.answer], _WORDS.get(worst.answer, _NOT_DECIDED), _loss_words(worst)
        if other is not None and other.seeds:
            loss, nats = "training loss" if other is training else HELD_OUT, f"{other.mean_difference_nats:+.4f}"
            answer = "equivalent" if other.answer is Answer.EQUIVALENT else "not decided"
            is_better = _SEVERITY[other.answer] < severity
            words += f", though its {loss} is {answer} ({nats} nats)" if is_better else f", and {nats} in {loss}"
        if worst.answer is Answer.EQUIVALENT and not is_at_equal_settings:
            # A yes is of the arms alone only where all else is the same.
            severity, word, words = 1, _NOT_DECIDED, f"{words}: equivalent, but not at equal settings"
        elif word != _NOT_DECIDED and not worst.decided_by and worst.n_seeds == MIN_SEEDS:
            word += ", as a study of three seeds suggests"
        elif worst.answer is Answer.EQUIVALENT and worst.cautions:
            word += ", with a caution"
        cautions = dict.fromkeys((*worst.cautions, *training.cautions))
        return cls(severity=severity, word=word, words=words, cautions=tuple(cautions))


def _loss_words(verdict: Verdict) -> str:
    """A verdict in a line: its numbers, and what decided where they did not."""
    where = f" in {HELD_OUT}" if verdict.quantity == HELD_OUT else ""
    if verdict.decided_by:
        return f"{verdict.answer}{where}: {verdict.decided_by.removesuffix('.')}"
    if not verdict.seeds:
        return verdict.unpaired_words
    arm, reference, _ = contrast(verdict.arm, verdict.reference)
    words = [*([verdict.interval.words()] if verdict.interval.exists else []), seeds_words(verdict.n_seeds)]
    words += [f"margin ±{verdict.margin_nats:.4f}"] if verdict.margin_nats > 0 else []  # NaN, of no margin, is not
    answer = "" if verdict.answer_words == Answer.EQUIVALENT else f": {verdict.answer_words}"
    return f"{arm} ends {verdict.mean_difference_nats:+.4f} nats from {reference}{where} ({', '.join(words)}){answer}"


def span_of(values: Iterable[int]) -> str:
    """The smallest and the largest of whole numbers, or the only one."""
    known = list(values)
    return " to ".join(dict.fromkeys(f"{end:,}" for end in (min(known), max(known))))


def _joined(findings: Sequence[str]) -> str:
    """A few findings as one sentence; of more than four, how many follow."""
    shown = [*findings[:4], *([f"and {len(findings) - 4} more below"] if len(findings) > 4 else [])]
    return f"{'; '.join(shown)}."


def _by_words(of_runs: Iterable[tuple[str, str, int | None]]) -> Iterator[tuple[str, str]]:
    """What is said of runs, each given with its label and seed, behind the names of those that it is said of."""
    groups: dict[str, dict[str, list[int]]] = {}
    for words, label, seed in of_runs:
        groups.setdefault(words, {}).setdefault(label, []).extend([] if seed is None else [seed])
    for words, runs in groups.items():
        yield words, "; ".join(f"{label}, {seed_names(seeds)}" if seeds else label for label, seeds in runs.items())


def _spike_words(run: Collected) -> list[str]:
    steps = [f"{step:,}" for step in recovered_spikes(run.rows)]
    steps[5:] = [f"{len(steps) - 5} more"] if len(steps) > 5 else []
    return [f"the loss had a spike at step {', '.join(steps)}, from which it recovered"] if steps else []
