"""One report: sides, and what they say in sentences, for a program and to whoever draws.

A study is a report whose sides are its arms: they share seeds, so they are judged together, on what every finished run
logged. Any other report holds runs side by side: each is held against the first on the steps that both logged, and what
nobody recorded of a log from elsewhere is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING, Any

import pandas as pd

from moelab.errors import BadInput, MoelabError
from moelab.experiment import NUMBERS_ONLY, Precision
from moelab.experiment_file import Study
from moelab.files import finite_or_none
from moelab.judge.arms import PRECISIONS, contrast, seed_names, seeds_words
from moelab.judge.compare_runs import (
    NOT_FOR_SPEED,
    Difference,
    caveats,
    difference,
    differing_settings,
    differing_values,
    judge_sides,
    kernel_facts,
    machine_differences,
    mixed_facts,
    speed_differences,
)
from moelab.judge.convergence import FinalLosses, final_losses, first_final_step, recovered_spikes
from moelab.judge.equivalence import MIN_SEEDS
from moelab.judge.side import Side, median
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
from moelab.judge.throughput import ArmThroughput, Gain, arm_throughput, gain, over
from moelab.judge.verdict import HELD_OUT, Answer, ArmSeeds, Verdict, correct_for_arms
from moelab.runs import directory
from moelab.runs.collect import WARMUP_STEPS, Collected
from moelab.runs.directory import Discovery
from moelab.runs.settings import spread
from moelab.runs.table import joined_rows, throughput_rows

if TYPE_CHECKING:
    from moelab.traces.explanation import Explanation


class NothingToJudge(MoelabError):
    """No run of the study finished."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Sides and what they say, the first being what the others are held against."""

    sides: tuple[Side, ...]  # at least one; of a study its arms, the reference's first
    study: str | None = None  # that the sides are the arms of; None for runs side by side
    paths: tuple[Path, ...]
    not_judged: tuple[NotJudged, ...]  # every run of ours at the paths that is in no side
    discovery_notes: tuple[str, ...]  # what a reader should know of the folders
    final_fraction: float = 0.1  # of the steps, that a final loss or difference is a mean of
    margin_nats: float | None = None  # None derives it from the reference's seeds
    margin_cap_nats: float | None = None  # None is 1 % of the reference's mean loss
    dropped_seeds: Sequence[int] = ()  # from every side
    explain: Callable[[list[Path]], Explanation] | None = None  # of the traces that a run left; None leaves them out

    def __post_init__(self) -> None:
        first_final_step(1, self.final_fraction)  # refuses a part of nothing now, and not when a loss is asked for
        seeds = set().union(*(side.seeds for side in self.sides))
        if unknown := [seed for seed in self.dropped_seeds if seed not in seeds]:
            known = ", ".join(str(seed) for seed in sorted(seeds)) or "not known"
            raise BadInput(f"seed {unknown[0]} cannot be dropped: the seeds of these runs are {known}")
        # Figures, reasons and corrected verdicts find a side by its label.
        labels = [side.label for side in self.sides]
        assert len(set(labels)) == len(labels), f"two sides have one label: {labels}"

    @property
    def title(self) -> str:
        """What the report is about."""
        if self.study is not None:
            return f"Study {self.study}"
        return f"Run {self.reference.label}" if len(self.sides) == 1 else f"{len(self.sides)} runs side by side"

    @property
    def reference(self) -> Side:
        """What the other sides are held against."""
        return self.sides[0]

    @property
    def others(self) -> tuple[Side, ...]:
        """The other sides."""
        return self.sides[1:]

    @property
    def runs(self) -> list[Collected]:
        """Runs of all sides, however they ended."""
        return [run for side in self.sides for run in side.attempted]

    @property
    def finished(self) -> list[Collected]:
        """Those that trained every step; a log from elsewhere does not say that it did."""
        return [run for run in self.runs if run.finished]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of a study's finished runs by arm, or of the runs that are shown by the label of their side."""
        if self.study is None:
            return pd.concat([side.table for side in self.sides], ignore_index=True)
        return joined_rows(self.finished)

    @cached_property
    def kept(self) -> pd.DataFrame:
        """Rows of :attr:`table` without those of dropped seeds."""
        return self.table[~self.table["seed"].isin(self.dropped_seeds)]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Convergence of every other side, on the final training loss."""
        if self.study is None:
            return [one.judged for one in self.differences if one.judged is not None]
        # An arm that diverged with every seed has no loss and a verdict all the same.
        judged = [side for side in self.sides if side.finished or side.diverged_seeds]
        if self.reference not in judged or len(judged) < 2:
            return []
        return judge_sides(self.final, judged, name=lambda side: side.arm, **self._margins)

    @cached_property
    def held_out(self) -> list[Verdict]:
        """Convergence of the other sides that are judged, on the loss of text that no run trained on."""
        if self.study is not None:
            return self._held_out(self.sides, lambda side: side.arm)
        judged = [side for side, one in zip(self.others, self.differences, strict=True) if one.judged is not None]
        pairs = [self._held_out((self.reference, side), lambda side: side.label) for side in judged]
        return correct_for_arms([verdict for pair in pairs for verdict in pair])

    def _held_out(self, sides: Sequence[Side], name: Callable[[Side], str]) -> list[Verdict]:
        seeds: dict[str, ArmSeeds] = {}
        runs = [run for side in sides for run in side.finished if len(run.validation)]
        # The step that most validated last: one run alone, cut off or longer, does not decide for the others.
        step = mode(int(run.validation["step"].iloc[-1]) for run in runs) if runs else 0
        for side in sides:
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
            # Arms that never validated are left out: they have nothing to hold against the others.
            if losses or diverged or side.diverged_seeds:
                seeds[name(side)] = ArmSeeds.of(losses, diverged, lost)
        # An arm that diverged with every seed is judged on its training loss; it has no held-out one to add.
        first, *others = sides
        judged = [side for side in others if side.finished and name(side) in seeds]
        if not any(one.losses for one in seeds.values()) or name(first) not in seeds or not judged:
            return []
        final = FinalLosses(seeds=seeds, final_fraction=self.final_fraction)
        return judge_sides(final, [first, *judged], name=name, **self._margins)

    @cached_property
    def differences(self) -> list[Difference]:
        """Loss of every other side against the first, on the steps that both logged."""
        options = {"final_fraction": self.final_fraction, **self._margins}
        differences = [difference(self.reference, side, **options) for side in self.others]
        judged = [one.verdict for one in differences if one.verdict is not None]
        # Each was judged alone, on steps of its own; together a chance difference is more likely.
        corrected = {verdict.arm: verdict for verdict in correct_for_arms(judged)}
        return [replace(one, verdict=corrected.get(one.label)) for one in differences]

    @cached_property
    def throughput(self) -> list[ArmThroughput]:
        """Tokens per second per rank of every arm; empty where no step is left after the warm-up."""
        if throughput_rows(self.kept, warmup_steps=WARMUP_STEPS).empty:
            return []
        return arm_throughput(self.kept, warmup_steps=WARMUP_STEPS)

    @cached_property
    def no_gain(self) -> dict[str, str]:
        """Why no gain over the first side, and no ratio to its speed, is claimed: label to words."""
        first, reasons = self.reference, {}
        for side in self.others:
            words = (speed_differences if self.study is None else machine_differences)(side, first)
            if self.study is not None and side.experiment is not None and first.experiment is not None:
                settings = differing_settings(side.experiment, first.experiment)
                words = [*(fact for name, fact in settings.items() if name not in NOT_FOR_SPEED), *words]
                # One arm of native and emulated kernels has no speed of its own.
                words += [fact for one in (side, first) for fact in mixed_facts(one.finished, kernel_facts)]
                if not all(any(run.speed_known for run in one.finished) for one in (side, first)):
                    words.append("one of the arms has no run whose machine and kernels are known")
                # NVFP4 only has numerics here: its kernels are emulated on every machine.
                if Precision.NVFP4 in (side.experiment.precision, first.experiment.precision):
                    words.append(NUMBERS_ONLY)
            # An arm without a finished run has no speed that anything could be claimed of.
            if words and (side.finished or self.study is None):
                reasons[side.label] = "; ".join(dict.fromkeys(words))
        return reasons

    @cached_property
    def gains(self) -> list[Gain]:
        """Throughput over the reference of every other arm that ran like it, over the runs whose machine is known."""
        # A gain is paired by seed, so a run of an unknown machine takes its partner with it.
        known = [run for run in self.finished if run.speed_known and run.seed not in self.dropped_seeds]
        table, baseline = joined_rows(known), self.reference.arm
        if throughput_rows(table, warmup_steps=WARMUP_STEPS).empty:
            return []
        seeds = {side.arm: set(table.loc[table["arm"] == side.arm, "seed"]) for side in self.sides}
        alike = [side.arm for side in self.others if side.label not in self.no_gain]
        # A gain of arms without a common seed would be refused, and the report with it.
        arms = [arm for arm in alike if seeds[arm] & seeds[baseline]]
        return [gain(table, baseline=baseline, arm=arm, warmup_steps=WARMUP_STEPS) for arm in arms]

    @property
    def comparable_tps(self) -> dict[str, dict[int, float]]:
        """Throughput by arm and seed, of the reference and every arm whose gain over it is claimed."""
        arms = {self.reference.arm, *(one.arm for one in self.gains)}
        return {one.arm: one.tps_by_seed for one in self.throughput if one.arm in arms}

    @property
    def on_cpu(self) -> bool:
        """Whether ranks of a run were processes on a CPU."""
        return any(side.on_cpu for side in self.sides)

    @property
    def emulation_note(self) -> str:
        """What was emulated, for a figure's title; empty for real kernels."""
        if self.study is None:
            emulated = [side for side in self.sides if side.emulated]
            return f"emulated kernels in {_names(emulated)}" if emulated else ""
        emulated_runs = [run.experiment for run in self.runs if run.emulates_products]
        formats = sorted({PRECISIONS[one.precision] for one in emulated_runs if one})
        notes = [f"emulated {' and '.join(formats)} kernels"] if formats else []
        deepep = any(run.emulates_deepep for run in self.runs)
        return ", ".join([*notes, *(["DeepEP emulated on plain collectives"] if deepep else [])])

    @property
    def speed_note(self) -> str:
        """What must be said where speed is shown; empty for real kernels on GPUs of one kind."""
        shown = [side for side in self.sides if self.study is None or side.finished]
        on_cpu = [side for side in shown if side.on_cpu]
        # Where all of a study ran on CPUs, the figure need not name its arms.
        where = "" if self.study is not None and len(on_cpu) == len(shown) else f" in {_names(on_cpu)}"
        notes = [f"each rank is a CPU process{where}"] if on_cpu else []
        notes += [f"{self.emulation_note}: no measure of speed"] if self.emulation_note else []
        notes += [self._unclaimed(label) for label in self.no_gain]
        return "; ".join(notes)

    @property
    def grad_norm_notes(self) -> list[str]:
        """Runs that reported a gradient norm of NaN or Inf, and in which steps."""
        return [
            f"{side.name_of(run)}: {run.grad_norm_finding}"
            for side in self.sides
            for run in side.attempted
            if run.grad_norm_finding
        ]

    @property
    def loss_note(self) -> str:
        """What must be said in the title of a figure of the loss, which has no room for every run."""
        diverged = [
            f"{side.label}: {len(side.diverged_seeds)} diverged seed{'s' * (len(side.diverged_seeds) > 1)} not drawn"
            for side in self.sides
            if side.diverged_seeds and (side.finished or self.study is not None)
        ]
        notes = self.grad_norm_notes
        first = [f"{notes[0]}, and {len(notes) - 1} more runs"] if len(notes) > 1 else notes  # the rest is in `notes`
        return "; ".join(filter(None, [self.emulation_note, *diverged, *first]))

    @cached_property
    def traced(self) -> tuple[dict[str, Explanation], list[str]]:
        """By label a traced step of each side that has one, explained; and what a reader should know of the traces."""
        if self.explain is None:
            return {}, []
        folders = [run for path in self.paths for run in directory.find(path.resolve())]
        traces = {run.name: sorted((run.path / directory.TRACES_FOLDER).glob("*.json*")) for run in folders}
        explained: dict[str, Explanation] = {}
        notes: list[str] = []
        for side in self.sides:
            for run in [run for run in side.runs if traces.get(run.run)][:1]:  # one stands for the side
                name, files = side.name_of(run), traces[run.run]
                try:
                    explained[side.label] = self.explain(files)
                except BadInput as error:
                    # Readers name a file with its folder, and a report goes to other people.
                    notes.append(f"{name}: {str(error).replace(f'{files[0].parent}/', '')}")
                else:
                    notes += [f"{name}: {note}" for note in explained[side.label].notes]
        return explained, notes

    @property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        unjudged: list[str] = []
        if self.study is None:
            judged = {label for one in self.differences if one.judged for label in (one.label, one.reference)}
            early = [side for side in self.sides if side.unfinished and side.label not in judged]
            unjudged = [f"{side.unfinished}: its loss is not judged" for side in early]
            # Also runs that did not finish where others of their side did.
            ended = [run for side in self.sides if side.finished for run in side.attempted if not run.finished]
            not_shown = [*self.not_judged, *map(NotJudged.of, ended)]
            left_out = [
                f"{study}: {words}"
                for study in dict.fromkeys(one.study for one in not_shown)
                for words in left_out_words([one for one in not_shown if one.study == study])
            ]
            unknown = {
                "no configuration can be read": [side for side in self.sides if not side.settings.values],
                "MFU by the two counts needs the model's shape, the sequence length and the GPU's peak": [
                    side for side in self.sides if not side.on_cpu and math.isnan(side.mfu_percent(causal=True))
                ],
            }
            others = [f"{_names(sides)}: {what}" for what, sides in unknown.items() if sides]
            held_out = {
                side.label: int(run.validation["step"].iloc[-1])
                for side in self.sides
                for run in side.runs
                if len(run.validation)
            }
            if len(set(held_out.values())) > 1:
                steps = ", ".join(f"{label} step {step:,}" for label, step in held_out.items())
                others.append(f"the held-out losses are of different steps: {steps}")
        else:
            # An arm without any finished or diverged seed has no verdict that would name it.
            unnamed = [side for side in self.sides if not side.finished and not side.diverged_seeds]
            ended = [run for side in unnamed for run in side.attempted]
            left_out = left_out_words([*map(NotJudged.of, ended), *self.not_judged])
            others = [f"{side.label}: {words}" for side in self.others for words in caveats(side, self.reference)]
        dropped = f"dropped from every {self._kind}, as requested: {seed_names(self.dropped_seeds)}"
        return [
            *unjudged,
            *self.grad_norm_notes,
            *(f"left out: {words}" for words in left_out),
            *([dropped] if self.dropped_seeds else []),
            *others,
            *filter(None, [self.speed_note]),
            *(
                f"{side.name_of(run)}: {words}"
                for side in self.sides
                for run in side.attempted
                for words in (*run.damaged, *run.notes, *_spike_words(run))
            ),
            *self.traced[1],
            *self.discovery_notes,
        ]

    @property
    def rank_words(self) -> str:
        """What tokens per second are counted by."""
        # An unknown machine is not taken for one with GPUs.
        on_gpus = all(run.environment is not None and run.environment.gpus for run in self.finished)
        return "per GPU" if on_gpus else "per rank"

    @cached_property
    def final(self) -> FinalLosses:
        """Final training loss of every finished run."""
        return final_losses(self.table, final_fraction=self.final_fraction)

    @property
    def measured_speeds(self) -> list[Side]:
        """The other sides whose tokens/s may be held against the reference's: real kernels on GPUs in both."""
        if self.reference.on_cpu or self.reference.emulated:
            return []  # its own tokens/s are no measure of a GPU's
        return [side for side in self.others if not (side.on_cpu or side.emulated)]

    @cached_property
    def summary(self) -> dict[str, str]:
        """What a reader asks first, each question with its answer in a sentence."""
        return {"Faster?": self._faster, "Same loss?": self._same_loss, "On what?": self._on_what}

    @property
    def _faster(self) -> str:
        if not self.others:
            return "There is nothing to compare with."
        on_cpu, words = [side for side in self.others if side.on_cpu], "a CPU process stands in for a GPU"
        if self.reference.on_cpu or len(on_cpu) == len(self.others):
            return f"Not measured: {words} here, so its tokens/s say nothing about a GPU's."
        findings = [self._speed_words(side) for side in self.measured_speeds]
        if emulated := [side for side in self.sides if side.emulated]:
            findings.append(f"not measured for {_names(emulated)}: emulated kernels are slower than real ones")
        findings += [f"not measured for {_names(on_cpu)}: {words}"] if on_cpu else []
        words = _joined(findings)
        # A label that comes first keeps its own case.
        return f"{words[0].upper()}{words[1:]}" if words.startswith(("no ", "not ")) else words

    def _unclaimed(self, label: str) -> str:
        return f"no gain of {over(label, self.reference.label)} is claimed: {self.no_gain[label]}"

    def _speed_words(self, side: Side) -> str:
        """What is known of a side's speed over the reference's."""
        first = self.reference
        if side.label in self.no_gain:
            return self._unclaimed(side.label)
        if self.study is not None:
            gains = [one for one in self.gains if one.arm == side.arm]
            # One seed has no interval: its sentence says so, and "no difference is shown" would be a second finding.
            unresolved = any(one.interval.exists and not one.resolved for one in gains)
            words = "; ".join(one.sentence() for one in gains) or f"{side.label} logged no tokens/s for a common seed"
            return f"{words}: no difference is shown" if unresolved else words
        own, reference = median(side.tps), median(first.tps)
        if math.isnan(own) or math.isnan(reference):
            return f"{side.label} and {first.label} did not both log tokens/s"
        return f"{side.label} logged {own / reference:.3g} times the tokens/s per GPU of {first.label}"

    @property
    def _same_loss(self) -> str:
        if not self.others:
            return "There is nothing to compare with."
        if self.study is not None and not self.verdicts:
            which = "no arm besides the reference" if self.reference.finished else "no run of the reference"
            return f"Not known: {which} finished."
        held_out = {verdict.arm: verdict for verdict in self.held_out}
        verdicts = {verdict.arm: verdict for verdict in self.verdicts}
        openings = {
            side.label: _Opening.of(verdicts[key], held_out.get(key), self._at_equal_settings(side))
            for side in self.others
            for key in (side.arm, side.label)
            if key in verdicts
        }
        single = [one.ends() for one in self.differences if one.judged is None] if self.study is None else []
        findings = [*openings.values(), *(_Opening(severity=1, word=_NOT_DECIDED, words=words) for words in single)]
        by_word: dict[str, list[str]] = {}  # arms of one answer share its word; the worst answer comes first
        for one in sorted(findings, key=lambda one: one.severity, reverse=True):
            by_word.setdefault(one.word, []).append(one.words)
        answers = [f"{word}: {_joined(words)}" for word, words in by_word.items()]
        if single:
            answers.append("A single run cannot show what another seed would change.")
        answers += [
            words if len(openings) == 1 else f"{side.label}: {words}"
            for side in self.others
            if side.label in openings
            for words in (*openings[side.label].cautions, *caveats(side, self.reference))
        ]
        return " ".join(answers)

    def _at_equal_settings(self, side: Side) -> bool:
        """Whether a side differs from the first in nothing but what makes it an arm, as far as is known."""
        own, first = side.experiment, self.reference.experiment
        return own is None or first is None or not differing_settings(own, first)

    @property
    def _on_what(self) -> str:
        known = {
            name: spread(side.settings.values.get(name, "") or "unknown" for side in self.sides) for name in _ASKED
        }
        known = {name: value for name, value in known.items() if value != "unknown"}
        experiment = self.reference.experiment
        model = experiment.model_label if experiment is not None else known.get("model", "an unknown model")
        chip = known.get("gpu") or known.get("processor") or "unknown hardware"
        # A log from elsewhere names its GPU, and seldom how many there were.
        ranks = experiment.world_size if experiment is not None else None
        counted = f"{ranks} processes of {chip}" if self.on_cpu else f"{ranks} × {chip}"
        parts = [f"{model} on {counted if ranks else chip}"]
        parts += [words.format(known[name]) for name, words in _ASKED.items() if words and name in known]
        steps = span_of(side.last_step for side in self.sides)
        seeds = span_of(max(1, len(side.runs)) for side in self.sides)
        runs = "one run each" if self.study is None and seeds == "1" else f"{seeds} seed{'s' * (seeds != '1')} each"
        return f"{', '.join(parts)}; {steps} steps, {runs}."

    def as_text(self) -> str:
        """The findings as sentences: the three of the summary, then each with its numbers."""
        opening = [f"{question} {answer}" for question, answer in self.summary.items()]
        held_out = [f"Held-out text: {verdict.sentence()}" for verdict in self.held_out]
        if self.study is not None:
            finished, attempts = self._finished_of_all, len(self.runs) + len(self.not_judged)
            judged = f", {len(self.finished)} of them judged" if len(self.finished) < finished else ""
            which = "an arm besides the reference" if self.reference.finished else "the reference"
            lines = [f"{finished} of {attempts} runs finished{judged}"]
            lines += [verdict.sentence() for verdict in self.verdicts]
            lines += [] if self.verdicts else [f"No verdict: no run of {which} {self.reference.arm} finished"]
            lines += held_out
            # The table says tokens/s per GPU of every source; on a CPU that is a rank.
            lines += [arm.sentence().replace("per GPU", self.rank_words) for arm in self.throughput]
            lines += [one.sentence() for one in self.gains]
        else:
            lines = [f"{side.label}: {side.in_words()}" for side in self.sides]
            lines += [*(one.sentence() for one in self.differences), *held_out]
            for name, values in differing_values(self.sides).items():
                lines.append(f"{name} differs: {', '.join(value or '–' for value in values)}")
        return "\n".join([*opening, *lines, *(f"Note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""
        runs = [
            run_json(run, self._why_unused(side, run)) | ({"side": side.label} if self.study is None else {})
            for side in self.sides
            for run in side.attempted
        ]
        runs += [one.to_json() for one in self.not_judged]
        note = "; ".join(note.removesuffix(".") for note in self.notes)
        if self.study is None:
            return {
                "summary": self.summary,
                "runs": runs,
                "sides": [side.to_json(final_fraction=self.final_fraction) for side in self.sides],
                "differences": [one.to_json() for one in self.differences],
                "held_out": [one.to_json() for one in self.held_out],
                "differing_settings": differing_values(self.sides),
                "note": note,
            }
        return {
            "study": self.study,
            "summary": self.summary,
            "finished": self._finished_of_all,
            "judged": len(self.finished),
            "runs": runs,
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            # Of every arm, also those of which no gain is claimed: a rate is a fact where a ratio would be a claim.
            "tps": {arm.arm: finite_or_none(arm.tps) for arm in self.throughput},
            "gains": [self._gain_json(side) for side in self.others if side.finished],
            "note": note,
        }

    @property
    def _kind(self) -> str:
        return "side" if self.study is None else "arm"

    @property
    def _margins(self) -> dict[str, Any]:
        options = {"margin_nats": self.margin_nats, "margin_cap_nats": self.margin_cap_nats}
        return {**options, "dropped_seeds": self.dropped_seeds}

    @property
    def _finished_of_all(self) -> int:
        others = [one.collected for one in self.not_judged if one.collected is not None]
        return sum(run.finished for run in [*self.runs, *others])

    def _why_unused(self, side: Side, run: Collected) -> str | None:
        # Side by side a run that did not finish is used if its side has none that did.
        if not run.finished and (side.finished or self.study is not None):
            return end_of(run)
        return f"its seed is dropped from every {self._kind}, as requested" if run.seed in self.dropped_seeds else None

    def _gain_json(self, side: Side) -> dict[str, Any]:
        claimed = next((one for one in self.gains if one.arm == side.arm), None)
        if claimed is None:
            reason = self.no_gain.get(side.label, "no common seed with a known machine and a logged speed")
            return {"arm": side.arm, "percent": None, "interval_percent": [None, None], "seeds": 0, "reason": reason}
        percent = claimed.interval.percent
        return {
            "arm": side.arm,
            "percent": finite_or_none(claimed.percent),
            "interval_percent": [finite_or_none(end) for end in (percent.low, percent.high)],
            "seeds": claimed.n_seeds,
        }


def judge_paths(paths: Sequence[Path], *, reference: str = "bf16_standard", **options: Any) -> Report:
    """Judge one study, or compare whatever is at several paths, or at one that holds no run of ours.

    Args:
        paths: studies, run directories, or logs from elsewhere; the first is what the others are held against.
        reference: arm of a study that its others are held against.
        **options: ``final_fraction``, ``margin_nats``, ``margin_cap_nats``, ``dropped_seeds`` and ``explain`` of a
            :class:`Report`.

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
    return Report(
        sides=tuple(sides),
        paths=tuple(paths),
        not_judged=tuple(not_judged),
        discovery_notes=tuple(notes),
        **options,
    )


def judge_study(path: Path, *, study: Study | None = None, reference: str = "bf16_standard", **options: Any) -> Report:
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


def _of_study(path: Path, folder: Discovery, study: Study | None, reference: str, **options: Any) -> Report:
    studies = studies_in(folder)
    if not studies:
        raise BadInput(f"{path} holds no run; give a study, such as runs/06_compare_convergence")
    if len(studies) > 1:
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    (name,) = studies
    sides, not_judged = sides_of_study(folder, name, reference=reference, planned=study)
    if not any(side.finished for side in sides):
        runs = [run for side in sides for run in side.attempted]
        ends = [run.status.reason or f"{run.last_step} of {run.steps_planned} steps logged" for run in runs]
        lines = [f"{run.run}: {run.status.state}: {end}" for run, end in zip(runs, ends, strict=True)]
        lines += [f"{one.run}: left out: {one.reason}" for one in not_judged]
        raise NothingToJudge("\n  ".join([f"no run of {name} finished:", *lines]))
    if sides[0].arm != reference:  # which comes first if it is there
        arms = ", ".join(side.arm for side in sides)
        lines = [f"{one.run}: left out: {one.reason}" for one in not_judged if one.arm in ("", reference)]
        raise BadInput("\n  ".join([f"reference {reference!r} is not an arm of {name}; its arms: {arms}", *lines]))
    return Report(
        sides=tuple(sides),
        study=name,
        paths=(path,),
        not_judged=tuple(not_judged),
        discovery_notes=folder.notes,
        **options,
    )


_ASKED = {
    "model": "",
    "gpu": "",
    "processor": "",
    "ep": "EP {}",
    "seq_len": "sequences of {} tokens",
    "local_batch": "local batch {}",
    "lr": "learning rate {}",
}
"""Settings in the summary's last sentence, in words; those without are said in another way."""


def _spike_words(run: Collected) -> list[str]:
    steps = [f"{step:,}" for step in recovered_spikes(run.rows)]
    steps[5:] = [f"{len(steps) - 5} more"] if len(steps) > 5 else []
    return [f"the loss had a spike at step {', '.join(steps)}, from which it recovered"] if steps else []


def span_of(values: Iterable[int]) -> str:
    """The smallest and the largest of whole numbers, or the only one."""
    known = list(values)
    return " to ".join(dict.fromkeys(f"{end:,}" for end in (min(known), max(known))))


def _joined(findings: Sequence[str]) -> str:
    """A few findings as one sentence; of more than four, how many follow."""
    shown = [*findings[:4], *([f"and {len(findings) - 4} more below"] if len(findings) > 4 else [])]
    return f"{'; '.join(shown)}."


_NOT_DECIDED = "Not decided"
_WORDS = {Answer.EQUIVALENT: "Yes", Answer.DIFFERENT: "No"}
_SEVERITY = {Answer.EQUIVALENT: 0, Answer.INSUFFICIENT: 1, Answer.NOT_TRAINED: 1, Answer.DIFFERENT: 2}


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What a report opens with of one arm's loss: the worst of what was judged."""

    severity: int
    word: str  # Yes, No or Not decided, and on what condition
    words: str
    cautions: tuple[str, ...] = ()

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


def _names(sides: Sequence[Side]) -> str:
    names = [side.label for side in sides]
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
