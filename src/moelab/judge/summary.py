"""What every report says: faster, same loss, on what; and what a reader must know before its numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moelab.errors import BadInput
from moelab.judge.convergence import first_final_step, recovered_spikes
from moelab.judge.side import Side
from moelab.judge.sides import NotJudged
from moelab.judge.throughput import over
from moelab.runs import directory
from moelab.runs.collect import Collected

if TYPE_CHECKING:
    from moelab.judge.comparison import Difference
    from moelab.judge.throughput import ArmThroughput
    from moelab.judge.verdict import Verdict
    from moelab.traces.explanation import Explanation

_ASKED = {
    "ep": ("EP", "EP {}"),
    "seq_len": ("sequence length", "sequences of {} tokens"),
    "local_batch": ("local batch", "local batch {}"),
    "lr": ("learning rate", "learning rate {}"),
}
"""Settings in the summary's last sentence, in words."""


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """Sides and what they say, the first being what the others are held against."""

    sides: tuple[Side, ...]  # at least one
    study: str | None = None  # that the sides are the arms of; None for several studies, and runs from elsewhere
    paths: tuple[Path, ...]
    not_judged: tuple[NotJudged, ...]  # every run of ours at the paths that is in no side
    discovery_notes: tuple[str, ...]  # what a reader should know of the folders
    final_fraction: float = 0.1  # of the steps, that a final loss or difference is a mean of
    dropped_seeds: Sequence[int] = ()  # from every side
    explain: Callable[[list[Path]], Explanation] | None = None  # of the traces that a run left; None leaves them out
    origin: str = ""  # of replayed runs, for the titles of figures

    def __post_init__(self) -> None:
        first_final_step(1, self.final_fraction)  # refuses a part of nothing now, and not when a loss is asked for
        seeds = set().union(*(side.seeds for side in self.sides))
        if unknown := [seed for seed in self.dropped_seeds if seed not in seeds]:
            known = ", ".join(str(seed) for seed in sorted(seeds)) or "not known"
            raise BadInput(f"seed {unknown[0]} cannot be dropped: the seeds of these runs are {known}")
        # Figures, reasons and corrected verdicts find a side by its name or its label.
        for names in ([side.name for side in self.sides], [side.label for side in self.sides]):
            assert len(set(names)) == len(names), f"two sides have one name: {names}"

    @property
    @abstractmethod
    def title(self) -> str:
        """What the report is about."""

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """Convergence of the other sides on the final training loss; none where a run is from elsewhere."""
        return ()

    @property
    def held_out(self) -> Sequence[Verdict]:
        """Convergence of the other sides on the loss of text that no run trained on; none as :attr:`verdicts`."""
        return ()

    @property
    def differences(self) -> Sequence[Difference]:
        """Loss of single runs against the first's, where there are no verdicts."""
        return ()

    @property
    def throughput(self) -> Sequence[ArmThroughput]:
        """Tokens per second per rank of every arm; none where a run is from elsewhere, whose steps have a spread."""
        return ()

    @property
    def comparable_tps(self) -> dict[str, dict[int, float]]:
        """Throughput by arm and seed, of the reference and every arm whose gain over it is claimed."""
        return {}

    @property
    @abstractmethod
    def no_gain(self) -> dict[str, str]:
        """Why no ratio of a side's speed to the first's is claimed: label to words."""

    @property
    @abstractmethod
    def emulation_note(self) -> str:
        """What was emulated, for a figure's title; empty for real kernels."""

    @property
    @abstractmethod
    def speed_note(self) -> str:
        """What must be said where speed is shown; empty for real kernels on GPUs of one kind."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""

    @property
    @abstractmethod
    def _same_loss(self) -> str: ...

    @abstractmethod
    def _speed_words(self, side: Side) -> str:
        """What is known of the speed of a side over the first's, where both were measured."""

    @property
    @abstractmethod
    def _lines(self) -> list[str]:
        """The numbers in sentences."""

    @property
    @abstractmethod
    def _left_out(self) -> list[str]:
        """Which runs are left out and why."""

    @property
    @abstractmethod
    def _own_notes(self) -> list[str]: ...

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

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the runs that are shown, by the name of their side."""
        return pd.concat([side.table for side in self.sides], ignore_index=True)

    @property
    def on_cpu(self) -> bool:
        """Whether ranks of a run were processes on a CPU."""
        return any(side.on_cpu for side in self.sides)

    @property
    def measured_speeds(self) -> list[Side]:
        """The other sides whose tokens/s may be held against the reference's: real kernels on GPUs in both."""
        if self.reference.on_cpu or self.reference.emulated:
            return []  # its own tokens/s are no measure of a GPU's
        return [side for side in self.others if not (side.on_cpu or side.emulated)]

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
            if side.diverged_seeds and (side.finished or self.verdicts)
        ]
        diverged += [side.unfinished for side in self.sides if side.diverged and not side.diverged_seeds]
        notes = self.grad_norm_notes
        first = [f"{notes[0]}, and {len(notes) - 1} more runs"] if len(notes) > 1 else notes  # the rest is in `notes`
        return "; ".join(filter(None, [self.origin, self.emulation_note, *diverged, *first]))

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
        return [
            *self.grad_norm_notes,
            *(f"left out: {words}" for words in self._left_out),
            *self._own_notes,
            *filter(None, [self.speed_note]),
            *(
                f"{side.name_of(run)}: {words}"
                for side in self.sides
                for run in side.attempted
                for words in (*run.damaged, *run.notes, *_spike_words(run))
            ),
            *self.traced[1],
            *filter(None, [self.origin]),
            *self.discovery_notes,
        ]

    @cached_property
    def summary(self) -> dict[str, str]:
        """What a reader asks first, each question with its answer in a sentence."""
        if not self.others:
            alone = "There is nothing to compare with."
            return {"Faster?": alone, "Same loss?": alone, "On what?": self._on_what}
        return {"Faster?": self._faster, "Same loss?": self._same_loss, "On what?": self._on_what}

    def as_text(self) -> str:
        """The findings as sentences: the three of the summary, then each with its numbers."""
        opening = [f"{question} {answer}" for question, answer in self.summary.items()]
        return "\n".join([*opening, *self._lines, *(f"Note: {note}" for note in self.notes)])

    @property
    def _faster(self) -> str:
        on_cpu, words = [side for side in self.others if side.on_cpu], "a CPU process stands in for a GPU"
        if self.reference.on_cpu or len(on_cpu) == len(self.others):
            return f"Not measured: {words} here, so its tokens/s say nothing about a GPU's."
        findings = [
            self.unclaimed(side.label) if side.label in self.no_gain else self._speed_words(side)
            for side in self.measured_speeds
        ]
        if emulated := [side for side in self.sides if side.emulated]:
            findings.append(f"not measured for {names_of(emulated)}: emulated kernels are slower than real ones")
        findings += [f"not measured for {names_of(on_cpu)}: {words}"] if on_cpu else []
        words = joined(findings)
        # A label that comes first keeps its own case.
        return f"{words[0].upper()}{words[1:]}" if words.startswith(("no ", "not ")) else words

    def unclaimed(self, label: str) -> str:
        """That no gain of a side is claimed, and why."""
        return f"no gain of {over(label, self.reference.label)} is claimed: {self.no_gain[label]}"

    @property
    def _on_what(self) -> str:
        known = [side.settings.values for side in self.sides]
        experiment = self.reference.experiment
        labels = [side.experiment.model_label if side.experiment else "" for side in self.sides]
        model = _each([label or own.get("model", "") for label, own in zip(labels, known, strict=True)], "model")
        chips = _each([own.get("gpu") or own.get("processor", "") for own in known], "hardware")
        # A log from elsewhere names its GPU, and seldom how many there were.
        ranks = "" if experiment is None else f"{experiment.world_size} {'processes of' if self.on_cpu else '×'} "
        parts, differing = [f"{model} on {ranks}{chips}"], []
        for name, (noun, words) in _ASKED.items():
            values = {own.get(name, "") for own in known}
            if len(values - {""}) > 1:
                differing.append(noun)
            elif "" not in values:
                parts.append(words.format(*values))
        steps = f"{span_of(side.last_step for side in self.sides)} steps"
        if any(side.steps_logged != side.last_step for side in self.sides):
            steps += f", {span_of(side.steps_logged for side in self.sides)} of them logged"
        seeds = span_of(max(1, len(side.runs)) for side in self.sides)
        each = "one run" if experiment is None and seeds == "1" else f"{seeds} seed{'s' * (seeds != '1')}"
        also = f"; they differ in {', '.join(differing)}" if differing else ""
        return f"{', '.join(parts)}; {steps}, {each} each{also}."


def span_of(values: Iterable[int]) -> str:
    """The smallest and the largest of whole numbers, or the only one."""
    known = list(values)
    return " to ".join(dict.fromkeys(f"{end:,}" for end in (min(known), max(known))))


def joined(findings: Sequence[str]) -> str:
    """A few findings as one sentence; of more than four, how many follow."""
    shown = [*findings[:4], *([f"and {len(findings) - 4} more below"] if len(findings) > 4 else [])]
    return f"{'; '.join(shown)}."


def names_of(sides: Sequence[Side]) -> str:
    """Labels of a few sides."""
    names = [side.label for side in sides]
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _each(values: Iterable[str], noun: str) -> str:
    """Each value once, and that one is unknown."""
    article = "an " if noun == "model" else ""
    return " and ".join(dict.fromkeys(value or f"{article}unknown {noun}" for value in values))


def _spike_words(run: Collected) -> list[str]:
    steps = [f"{step:,}" for step in recovered_spikes(run.rows)]
    steps[5:] = [f"{len(steps) - 5} more"] if len(steps) > 5 else []
    return [f"the loss had a spike at step {', '.join(steps)}, from which it recovered"] if steps else []
