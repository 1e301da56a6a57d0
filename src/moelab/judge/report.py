"""A study judged: its arms share seeds, so each is held against the reference over seeds, on what finished runs logged.

:func:`judge_paths` and :func:`judge_study` are what the notebooks and ``moelab report`` both come through, so they
cannot disagree. Arms of several studies are judged alike; as soon as a run is from elsewhere, or a side has no result,
runs stand side by side without a verdict (``comparison.py``). ``sides.py`` finds what is judged and what is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
import pandas as pd

from moelab.errors import BadInput, MoelabError
from moelab.experiment import NUMBERS_ONLY, Experiment, Precision
from moelab.experiment_file import Study
from moelab.files import finite_or_none
from moelab.judge.arms import PRECISIONS, contrast, seed_names, seeds_words
from moelab.judge.comparison import Comparison
from moelab.judge.convergence import FinalLosses, compare_convergence, final_losses, first_final_step
from moelab.judge.equivalence import MIN_SEEDS, prediction_interval
from moelab.judge.side import (
    ARM_FIELDS,
    NOT_FOR_SPEED,
    Side,
    caveats,
    differing_settings,
    kernel_facts,
    machine_differences,
    mixed_facts,
)
from moelab.judge.sides import (
    VALID,
    NotJudged,
    end_of,
    left_out_words,
    run_json,
    sides_of,
    sides_of_study,
    studies_in,
)
from moelab.judge.summary import Report, joined
from moelab.judge.throughput import ArmThroughput, Gain, arm_throughput, gain
from moelab.judge.verdict import HELD_OUT, Answer, ArmSeeds, OtherAttempt, Verdict, correct_for_arms
from moelab.model import shape_for, tokenizer_size
from moelab.runs import directory
from moelab.runs.collect import WARMUP_STEPS, Collected
from moelab.runs.directory import Discovery
from moelab.runs.table import merge_segments, throughput_rows


class NothingToJudge(MoelabError):
    """No run of the study finished."""


@dataclass(frozen=True, kw_only=True)
class StudyReport(Report):
    """The arms of a study, or of several, judged against the first."""

    margin_nats: float | None = None  # None derives it from the reference's seeds
    margin_cap_nats: float | None = None  # None is 1 % of the reference's mean loss

    @property
    def title(self) -> str:
        """What the report is about."""
        return f"Study {self.study}" if self.study is not None else f"{len(self.sides)} arms side by side"

    @property
    def finished(self) -> list[Collected]:
        """Runs that trained every step."""
        return [run for side in self.sides for run in side.finished]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the finished runs by arm."""
        return pd.concat([side.table for side in self.sides if side.finished], ignore_index=True)

    @cached_property
    def kept(self) -> pd.DataFrame:
        """Rows of :attr:`table` without those of dropped seeds."""
        return self.table[~self.table["seed"].isin(self.dropped_seeds)]

    # Loss

    @cached_property
    def final(self) -> FinalLosses:
        """Final training loss of every finished run, at the steps that all arms logged."""
        return final_losses(self.table, final_fraction=self.final_fraction)

    @cached_property
    def verdicts(self) -> Sequence[Verdict]:
        """Convergence of every other arm, on the final training loss."""
        # An arm that diverged with every seed has no loss and a verdict all the same.
        if not self.reference.has_result:
            return []
        judged = [side for side in self.others if side.has_result]
        return correct_for_arms([self._verdict(side, self._final_of(side)) for side in judged])

    def _final_of(self, side: Side) -> FinalLosses:
        """Final losses of an arm and the reference at the steps that both logged, whatever a third arm did."""
        if len(self.sides) == 2:
            return self.final
        pair = self.table[self.table["arm"].isin([self.reference.name, side.name])]
        return final_losses(pair, final_fraction=self.final_fraction) if len(pair) else self.final

    @cached_property
    def held_out(self) -> Sequence[Verdict]:
        """Convergence of the arms that were validated, on the loss of text that no run trained on."""
        runs = [run for side in self.sides for run in side.finished if len(run.validation)]
        # The step that most validated last: one run alone, cut off or longer, does not decide for the others.
        step = mode(int(run.validation["step"].iloc[-1]) for run in runs) if runs else 0
        seeds = {side.name: _held_out_of(side, step) for side in self.sides}
        if not any(one.losses for one in seeds.values()):
            return []
        # An arm that diverged with every seed is judged on its training loss; it has no held-out one to add, and an arm
        # that never validated has nothing to hold against the others.
        validated = [
            side for side in self.sides if side.diverged_seeds or seeds[side.name].losses or seeds[side.name].diverged
        ]
        if self.reference not in validated:
            return []
        final = FinalLosses(seeds=seeds, final_fraction=self.final_fraction)
        return correct_for_arms([self._verdict(side, final) for side in validated[1:] if side.finished])

    def _verdict(self, side: Side, final: FinalLosses) -> Verdict:
        """Judge an arm against the reference, and say in what else they differ."""
        first, seeds = self.reference, {}
        for one in (first, side):
            known = final.seeds.get(one.name, ArmSeeds.of())
            seeds[one.name] = ArmSeeds.of(
                known.losses,
                {**one.diverged_seeds, **known.diverged},
                {**one.lost_seeds, **known.lost},
                changes=known.changes,
                unmatched=known.unmatched,
                attempts=() if one is first else tuple(_other_attempts(side, first, final)),
            )
        # One vocabulary for all: an arm changes how a model is trained, not what it predicts.
        model = _experiment_of(first)
        (verdict,) = compare_convergence(
            replace(final, seeds=seeds),
            reference=first.name,
            # Rows of the embedding that no token uses are never predicted, after a few steps.
            untrained_nats=math.log(min(shape_for(model).vocab_size, tokenizer_size(model))),
            lr_warmup_steps=model.warmup_steps,
            margin_nats=self.margin_nats,
            margin_cap_nats=self.margin_cap_nats,
            dropped_seeds=self.dropped_seeds,
        )
        return replace(verdict, findings=(*verdict.findings, *caveats(side, first)))

    @property
    def _same_loss(self) -> str:
        if not self.verdicts:
            which = "no arm besides the reference" if self.reference.finished else "no run of the reference"
            return f"Not known: {which} finished."
        held_out = {verdict.arm: verdict for verdict in self.held_out}
        verdicts = {verdict.arm: verdict for verdict in self.verdicts}
        openings = [
            (side, _Opening.of(verdicts[side.name], held_out.get(side.name), not self._other_settings(side)))
            for side in self.others
            if side.name in verdicts
        ]
        controls = [own for side, own in openings if self._is_control(side)]
        if len(controls) == len(openings):
            controls = []  # they are what the study asks about
        asked = sorted((own for _, own in openings if own not in controls), key=lambda own: -own.severity)
        by_word: dict[str, list[str]] = {}  # arms of one answer share its word; the worst answer comes first
        for own in asked:
            by_word.setdefault(own.word, []).append(own.words)
        answers = [f"{word}: {joined(words)}" for word, words in by_word.items()]
        answers += map(_control_words, controls)
        answers += [
            words if len(openings) == 1 else f"{side.label}: {words}"
            for side, own in openings
            for words in (*own.cautions, *caveats(side, self.reference))
        ]
        return " ".join(answers)

    def _other_settings(self, side: Side) -> dict[str, str]:
        """Settings of an arm that are not the reference's, beside what makes it an arm."""
        return differing_settings(_experiment_of(side), _experiment_of(self.reference))

    def _is_control(self, side: Side) -> bool:
        """Whether an arm has the reference's number formats and exchange, and differs in another setting on purpose."""
        differing = _experiment_of(side).differences(_experiment_of(self.reference))
        return self.study is not None and bool(differing) and not ARM_FIELDS & {*differing}

    # Speed

    @cached_property
    def throughput(self) -> Sequence[ArmThroughput]:
        """Tokens per second per rank of every arm; empty where no step is left after the warm-up."""
        if throughput_rows(self.kept, warmup_steps=WARMUP_STEPS).empty:
            return []
        return arm_throughput(self.kept, warmup_steps=WARMUP_STEPS)

    @cached_property
    def no_gain(self) -> dict[str, str]:
        """Why no gain over the reference is claimed: label to words."""
        first, reasons = self.reference, {}
        # An arm without a finished run has no speed that anything could be claimed of.
        for side in [side for side in self.others if side.finished]:
            words = [fact for name, fact in self._other_settings(side).items() if name not in NOT_FOR_SPEED]
            words += machine_differences(side, first)
            # One arm of native and emulated kernels has no speed of its own.
            words += [fact for one in (side, first) for fact in mixed_facts(one.finished, kernel_facts)]
            if not all(any(run.speed_known for run in one.finished) for one in (side, first)):
                words.append("one of the arms has no run whose machine and kernels are known")
            # NVFP4 only has numerics here: its kernels are emulated on every machine.
            if Precision.NVFP4 in (_experiment_of(side).precision, _experiment_of(first).precision):
                words.append(NUMBERS_ONLY)
            if words:
                reasons[side.label] = "; ".join(dict.fromkeys(words))
        return reasons

    @cached_property
    def gains(self) -> list[Gain]:
        """Throughput over the reference of every other arm that ran like it, over the runs whose machine is known."""
        # A gain is paired by seed, so a run of an unknown machine takes its partner with it.
        known = [run.run for run in self.finished if run.speed_known and run.seed not in self.dropped_seeds]
        table, baseline = self.table[self.table["run"].isin(known)], self.reference.name
        if throughput_rows(table, warmup_steps=WARMUP_STEPS).empty:
            return []
        seeds = {side.name: set(table.loc[table["arm"] == side.name, "seed"]) for side in self.sides}
        alike = [side.name for side in self.others if side.label not in self.no_gain]
        # A gain of arms without a common seed would be refused, and the report with it.
        arms = [arm for arm in alike if seeds[arm] & seeds[baseline]]
        return [gain(table, baseline=baseline, arm=arm, warmup_steps=WARMUP_STEPS) for arm in arms]

    @property
    def comparable_tps(self) -> dict[str, dict[int, float]]:
        """Throughput by arm and seed, of the reference and every arm whose gain over it is claimed."""
        arms = {self.reference.name, *(one.arm for one in self.gains)}
        return {one.arm: one.tps_by_seed for one in self.throughput if one.arm in arms}

    @property
    def rank_words(self) -> str:
        """What tokens per second are counted by."""
        # An unknown machine is not taken for one with GPUs.
        on_gpus = all(run.environment is not None and run.environment.gpus for run in self.finished)
        return "per GPU" if on_gpus else "per rank"

    @property
    def emulation_note(self) -> str:
        """What was emulated, for a figure's title; empty for real kernels."""
        emulated = [run.experiment for run in self.runs if run.emulates_products]
        formats = sorted({PRECISIONS[one.precision] for one in emulated if one})
        notes = [f"emulated {' and '.join(formats)} kernels"] if formats else []
        deepep = any(run.emulates_deepep for run in self.runs)
        return ", ".join([*notes, *(["DeepEP emulated on plain collectives"] if deepep else [])])

    @property
    def speed_note(self) -> str:
        """What must be said where speed is shown; empty for real kernels on GPUs of one kind."""
        shown = [side for side in self.sides if side.finished]
        on_cpu = [side for side in shown if side.on_cpu]
        # Where all of a study ran on CPUs, the figure need not name its arms.
        where = "" if len(on_cpu) == len(shown) else f" in {', '.join(side.label for side in on_cpu)}"
        notes = [f"each rank is a CPU process{where}"] if on_cpu else []
        notes += [f"{self.emulation_note}: no measure of speed"] if self.emulation_note else []
        return "; ".join([*notes, *map(self.unclaimed, self.no_gain)])

    def _speed_words(self, side: Side) -> str:
        gains = [one for one in self.gains if one.arm == side.name]
        # One seed has no interval: its sentence says so, and "no difference is shown" would be a second finding.
        unresolved = any(one.interval.exists and not one.resolved for one in gains)
        words = "; ".join(one.sentence() for one in gains) or f"{side.label} logged no tokens/s for a common seed"
        return f"{words}: no difference is shown" if unresolved else words

    # Notes, text and JSON

    @property
    def _left_out(self) -> list[str]:
        # An arm without any finished or diverged seed has no verdict that would name it.
        ended = [run for side in self.sides if not side.has_result for run in side.attempted]
        return left_out_words([*map(NotJudged.of, ended), *self.not_judged])

    @property
    def _own_notes(self) -> list[str]:
        dropped = f"dropped from every arm, as requested: {seed_names(self.dropped_seeds)}"
        others = [f"{side.label}: {words}" for side in self.others for words in caveats(side, self.reference)]
        return [*([dropped] if self.dropped_seeds else []), *others]

    @property
    def _lines(self) -> list[str]:
        finished, attempts = self._finished_of_all, len(self.runs) + len(self.not_judged)
        judged = f", {len(self.finished)} of them judged" if len(self.finished) < finished else ""
        which = "an arm besides the reference" if self.reference.finished else "the reference"
        none = [] if self.verdicts else [f"No verdict: no run of {which} {self.reference.name} finished"]
        return [
            f"{finished} of {attempts} runs finished{judged}",
            *(verdict.sentence() for verdict in self.verdicts),
            *none,
            *(f"Held-out text: {verdict.sentence()}" for verdict in self.held_out),
            # The table says tokens/s per GPU of every source; on a CPU that is a rank.
            *(arm.sentence().replace("per GPU", self.rank_words) for arm in self.throughput),
            *(one.sentence() for one in self.gains),
        ]

    @property
    def _finished_of_all(self) -> int:
        others = [one.collected for one in self.not_judged if one.collected is not None]
        return sum(run.finished for run in [*self.runs, *others])

    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""
        return {
            "study": self.study,
            "summary": self.summary,
            "finished": self._finished_of_all,
            "judged": len(self.finished),
            "runs": [
                *(run_json(run, self._why_unused(run)) for run in self.runs),
                *(one.to_json() for one in self.not_judged),
            ],
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            # Of every arm, also those of which no gain is claimed: a rate is a fact where a ratio would be a claim.
            "tps": {arm.arm: finite_or_none(arm.tps) for arm in self.throughput},
            "gains": [self._gain_json(side) for side in self.others if side.finished],
            "note": "; ".join(note.removesuffix(".") for note in self.notes),
        }

    def _why_unused(self, run: Collected) -> str | None:
        if not run.finished:
            return end_of(run)
        return "its seed is dropped from every arm, as requested" if run.seed in self.dropped_seeds else None

    def _gain_json(self, side: Side) -> dict[str, Any]:
        claimed = next((one for one in self.gains if one.arm == side.name), None)
        if claimed is None:
            reason = self.no_gain.get(side.label, "no common seed with a known machine and a logged speed")
            return {"arm": side.name, "percent": None, "interval_percent": [None, None], "seeds": 0, "reason": reason}
        percent = claimed.interval.percent
        return {
            "arm": side.name,
            "percent": finite_or_none(claimed.percent),
            "interval_percent": [finite_or_none(end) for end in (percent.low, percent.high)],
            "seeds": claimed.n_seeds,
        }


def judge_paths(paths: Sequence[Path], *, reference: str = "bf16_standard", **options: Any) -> Report:
    """Judge one study or the arms of several, or compare whatever is at the paths.

    Args:
        paths: studies, run directories, or logs from elsewhere; the first is what the others are held against.
        reference: arm of a study that its others are held against.
        **options: fields of a :class:`StudyReport` or :class:`~moelab.judge.comparison.Comparison`.

    Raises:
        BadInput: if there is no path, or one cannot be read; it is named.
        NothingToJudge: if no run of a study alone finished.
    """
    if not paths:
        raise BadInput(f"give at least one path: {VALID}")
    # A study whose runs all have damaged records is one too: it is refused with the reason of each, not called no log.
    folder = directory.discover(paths[0].resolve()) if len(paths) == 1 and paths[0].is_dir() else None
    if folder is not None and folder.all_runs:
        return _of_study(paths[0], folder, None, reference, **options)
    sides, not_judged, notes = sides_of(paths, reference=reference)
    found: dict[str, Any] = {
        "sides": tuple(sides),
        "paths": tuple(paths),
        "not_judged": tuple(not_judged),
        "discovery_notes": tuple(notes),
    }
    own = tuple(side for side in sides if side.experiment is not None and side.has_result)
    can_be_judged = len(own) > 1 and any(side.finished for side in own)
    ours = StudyReport(**found | {"sides": own}, **options) if can_be_judged else None
    if ours and len(own) == len(sides):
        return ours
    # A margin is of a verdict.
    others = {name: value for name, value in options.items() if not name.startswith("margin_")}
    return Comparison(**found, ours=ours, **others)


def judge_study(
    path: Path, *, study: Study | None = None, reference: str = "bf16_standard", **options: Any
) -> StudyReport:
    """Collect a study's runs and judge them.

    Args:
        path: the study's folder.
        study: judge the runs of exactly these experiments; None takes, for each arm, the settings that most of its
            seeds share with the reference.
        reference: arm that the others are held against.
        **options: as :func:`judge_paths` takes them.

    Raises:
        BadInput: if the path is not a study's folder or has no run of the reference.
        NothingToJudge: if no run finished, with the reason of each.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a study, such as runs/06_compare_convergence")
    return _of_study(path, directory.discover(path.resolve()), study, reference, **options)


def _of_study(path: Path, folder: Discovery, study: Study | None, reference: str, **options: Any) -> StudyReport:
    studies = studies_in(folder)
    if not studies:
        raise BadInput(f"{path} holds no run; give a study, such as runs/06_compare_convergence")
    if len(studies) > 1:
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    (name,) = studies
    sides, not_judged = sides_of_study(folder, name, reference=reference, planned=study)
    left_out = [f"{one.run}: left out: {one.reason}" for one in not_judged]
    if not any(side.finished for side in sides):
        runs = [run for side in sides for run in side.attempted]
        ends = [run.status.reason or f"{run.last_step} of {run.steps_planned} steps logged" for run in runs]
        lines = [f"{run.run}: {run.status.state}: {end}" for run, end in zip(runs, ends, strict=True)]
        raise NothingToJudge("\n  ".join([f"no run of {name} finished:", *lines, *left_out]))
    if sides[0].name != reference:  # which comes first if it is there
        arms = ", ".join(side.name for side in sides)
        lines = [words for one, words in zip(not_judged, left_out, strict=True) if one.arm in ("", reference)]
        raise BadInput("\n  ".join([f"reference {reference!r} is not an arm of {name}; its arms: {arms}", *lines]))
    return StudyReport(
        sides=tuple(sides),
        study=name,
        paths=(path,),
        not_judged=tuple(not_judged),
        discovery_notes=folder.notes,
        **options,
    )


def _experiment_of(side: Side) -> Experiment:
    assert side.experiment is not None, f"{side.label} is no run of ours"
    return side.experiment


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
    return ArmSeeds.of(losses, diverged, lost)


def _other_attempts(side: Side, reference: Side, final: FinalLosses) -> Iterator[OtherAttempt]:
    """Runs of both arms that are not judged, each held against the other arm's run of its seed where both end."""
    attempts = [
        (own, other, run, is_replaced)
        for own, other in ((side, reference), (reference, side))
        for is_replaced, runs in enumerate([[run for run in own.attempted if run.seed in own.lost_seeds], own.replaced])
        for run in runs
    ]
    if not attempts:
        return

    def curve(run: Collected) -> pd.Series[float]:
        rows = merge_segments(run.rows) if final.last_step else run.validation.drop_duplicates("step", keep="last")
        return rows.set_index("step")["loss"].where(lambda loss: loss.abs() < math.inf).dropna()

    ours, theirs = ({run.seed: curve(run) for run in one.finished} for one in (side, reference))
    judged = pd.DataFrame({seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()})
    for own, other, run, is_replaced in attempts:
        assert run.seed is not None  # of ours, each has one
        partner = next((curve(one) for one in other.attempted if one.seed == run.seed), None)
        losses = curve(run)
        common = losses if partner is None else losses[losses.index.isin(partner.index)]
        if len(common):
            common = common.loc[first_final_step(int(common.index.max()), final.final_fraction) :]
        differences = math.nan if partner is None else (common - partner).dropna() * (1 if own is side else -1)
        yield OtherAttempt(
            arm=own.name,
            seed=run.seed,
            end=run.diverged or own.lost_seeds.get(run.seed) or run.status.in_words(),
            is_replaced=bool(is_replaced),
            is_finished=run.finished,
            has_diverged=run.diverged is not None,
            loss=float(common.mean()),
            nats=float(np.mean(differences)) if len(common) else math.nan,
            usual=prediction_interval(judged.reindex(common.index).mean(skipna=False).dropna().tolist()),
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


def _control_words(opening: _Opening) -> str:
    """An arm that differs in a setting on purpose: what the study would see of a change of that size."""
    seen = {0: "so a change of this size is within the margin", 1: "so it does not say whether such a change is seen"}
    return f"As a control, {opening.words}, {seen.get(opening.severity, 'so this study sees a change of this size')}."


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
