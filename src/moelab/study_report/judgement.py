"""What the finished runs of a study say: convergence, held-out loss, throughput, and what limits each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from moelab.analysis import (
    ArmThroughput,
    FinalLosses,
    Gain,
    Verdict,
    arm_label,
    arm_throughput,
    compare_convergence,
    compare_held_out,
    final_losses,
    gain,
)
from moelab.experiment import Experiment
from moelab.runs.collect import WARMUP_STEPS, Collected, joined_rows
from moelab.runs.files import finite_or_none
from moelab.runs.table import throughput_rows

ARM_FIELDS = frozenset(
    {
        "seed",
        "precision",
        "mxfp8_kernels",
        "quantize",
        "wgrad",
        "ep_backend",
        "ep_kernels",
        "dispatch_precision",
        "routing",
    }
)
"""What sets two arms apart; every other field should be the same in both."""


@dataclass(frozen=True, kw_only=True)
class StudyJudgement:
    """A study and what its finished runs say.

    Attributes:
        name: the study.
        reference: arm that the others are held against.
        runs: of each arm and seed the finished run, else the latest attempt.
        environment: ``environment.json`` of a finished run.
        settings: an experiment of each arm.
        commands: one launch command for each arm.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin that was given, or None.
    """

    name: str
    reference: str
    runs: tuple[Collected, ...]
    environment: dict[str, Any]
    settings: dict[str, Experiment]
    commands: dict[str, str]
    final_fraction: float = 0.1
    margin_nats: float | None = None

    @property
    def finished(self) -> list[Collected]:
        """Runs that trained every step."""
        return [run for run in self.runs if run.finished]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the finished runs."""
        return joined_rows(self.finished)

    @property
    def arms(self) -> list[str]:
        """Arms with a finished run, the reference first."""
        found = sorted({run.arm for run in self.finished}, key=lambda arm: (arm != self.reference, arm))
        return found

    @property
    def others(self) -> list[str]:
        """Arms to hold against the reference."""
        return [arm for arm in self.arms if arm != self.reference]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Convergence of every other arm, on the final training loss."""
        if self.reference not in self.arms or not self.others:
            return []
        return compare_convergence(
            self.table, reference=self.reference, final_fraction=self.final_fraction, margin_nats=self.margin_nats
        )

    @cached_property
    def held_out(self) -> list[Verdict]:
        """Convergence of every other arm, on the loss of text that no run trained on."""
        losses = {(run.arm, run.seed): run.validation_loss for run in self.finished if run.seed is not None}
        known = {key: loss for key, loss in losses.items() if not math.isnan(loss)}
        if not any(arm == self.reference for arm, _ in known):
            return []
        return compare_held_out(known, reference=self.reference, margin_nats=self.margin_nats)

    @cached_property
    def throughput(self) -> list[ArmThroughput]:
        """Tokens per second per rank of every arm; empty where no step is left after the warm-up."""
        if throughput_rows(self.table, warmup_steps=WARMUP_STEPS).empty:
            return []
        return arm_throughput(self.table, warmup_steps=WARMUP_STEPS)

    @cached_property
    def gains(self) -> list[Gain]:
        """Throughput of every other arm over the reference."""
        if self.reference not in self.arms or not self.throughput:
            return []
        arms = [arm for arm in self.others if self._shares_seed(arm)]
        return [gain(self.table, baseline=self.reference, arm=arm, warmup_steps=WARMUP_STEPS) for arm in arms]

    @property
    def on_cpu(self) -> bool:
        """Whether ranks were processes on a CPU."""
        return not self.environment.get("gpus")

    @property
    def emulated(self) -> bool:
        """Whether an MXFP8 arm ran emulated kernels."""
        return any((run.converted or {}).get("kernels") == "emulated" for run in self.runs)

    @property
    def emulated_deepep(self) -> bool:
        """Whether DeepEP's stand-in moved the tokens of an arm."""
        return any((run.dispatcher or {}).get("kernels") == "emulated" for run in self.runs)

    @property
    def emulation_note(self) -> str:
        """What was emulated, for a figure's title; empty for real kernels."""
        notes = ["emulated MXFP8 kernels"] if self.emulated else []
        return ", ".join([*notes, *(["DeepEP emulated on plain collectives"] if self.emulated_deepep else [])])

    @property
    def grad_norm_notes(self) -> list[str]:
        """Runs that reported a gradient norm of NaN or Inf, and in which steps."""
        return [
            f"{arm_label(run.arm)}, seed {run.seed}: {run.grad_norm_finding}"
            for run in self.runs
            if run.grad_norm_finding
        ]

    @property
    def grad_norm_marks(self) -> list[tuple[int, float]]:
        """These steps of finished runs, and their loss in nats: marks for a figure."""
        return [mark for run in self.finished for mark in run.grad_norm_marks]

    @property
    def loss_note(self) -> str:
        """What must be said in the title of a figure of the loss."""
        return "; ".join([*([self.emulation_note] if self.emulation_note else []), *first_of(self.grad_norm_notes)])

    @property
    def settings_note(self) -> str:
        """What the arms differ in beside what makes them arms; empty where the comparison is of the arms alone."""
        fields = [name for name in Experiment.model_fields if name not in ARM_FIELDS]
        differing = [name for name in fields if len({getattr(one, name) for one in self.settings.values()}) > 1]
        return f"the arms also differ in {', '.join(differing)}" if differing else ""

    @property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        return [*self.grad_norm_notes, *(note for note in (self.settings_note, self.speed_note) if note)]

    @property
    def speed_note(self) -> str:
        """What must be said where throughput is shown; empty for real kernels on GPUs."""
        notes = ["a rank is a CPU process"] if self.on_cpu else []
        notes += [f"{self.emulation_note}: not a statement about speed"] if self.emulation_note else []
        return "; ".join(notes)

    def final_loss(self, run: Collected) -> float:
        """Final smoothed loss of a finished run, in nats; NaN for one that did not finish."""
        if not run.finished or run.seed is None:
            return math.nan
        return self._final.by_run.get((run.arm, run.seed), math.nan)

    def as_text(self) -> str:
        """The findings as sentences."""
        lines = [f"{len(self.finished)} of {len(self.runs)} runs finished"]
        lines += [verdict.sentence() for verdict in self.verdicts] or [f"No verdict: {self._no_verdict}"]
        lines += [f"Held-out text: {verdict.sentence()}" for verdict in self.held_out]
        lines += [arm.sentence().replace("per GPU", self.rank_words) for arm in self.throughput]
        lines += [one.sentence() for one in self.gains]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def _no_verdict(self) -> str:
        if self.reference not in self.arms:
            return f"no run of the reference {self.reference} finished"
        return f"no run of an arm beside the reference {self.reference} finished"

    @property
    def rank_words(self) -> str:
        """What tokens per second are counted by."""
        return "per rank" if self.on_cpu else "per GPU"

    def to_json(self) -> dict[str, Any]:
        """The verdicts and figures for a program."""
        return {
            "study": self.name,
            "finished": len(self.finished),
            "runs": len(self.runs),
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            "tps": {arm.arm: finite_or_none(arm.tps) for arm in self.throughput},
            "note": "; ".join(self.notes),
        }

    @cached_property
    def _final(self) -> FinalLosses:
        return final_losses(self.table, final_fraction=self.final_fraction)

    def _shares_seed(self, arm: str) -> bool:
        seeds = {name: {run.seed for run in self.finished if run.arm == name} for name in (arm, self.reference)}
        return bool(seeds[arm] & seeds[self.reference])


def first_of(notes: Sequence[str]) -> list[str]:
    """The first note, and how many more there are: for a title, which has no room for all."""
    return [f"{notes[0]}, and {len(notes) - 1} more runs" if len(notes) > 1 else notes[0]] if notes else []
