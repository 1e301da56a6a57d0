"""What the finished runs of a study say: convergence, held-out loss, throughput, and what limits each of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from moelab.analysis.comparable import (
    NOT_FOR_SPEED,
    caveats,
    differing_facts,
    differing_settings,
    kernel_facts,
    speed_facts,
)
from moelab.analysis.throughput import why_no_gain
from moelab.experiment import Experiment
from moelab.model import shape_for, tokenizer_size
from moelab.runs.collect import WARMUP_STEPS, Collected, joined_rows
from moelab.runs.files import finite_or_none
from moelab.runs.settings import spread
from moelab.runs.table import throughput_rows

ANOTHER_ATTEMPT = "another attempt at this arm and seed is judged"
Seeds = dict[tuple[str, int], str]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that is not judged.

    Attributes:
        run: its name.
        arm: name of its arm; empty if nothing says it.
        seed: its seed; None if nothing says it.
        reason: why it is not judged.
        collected: what it left; None if its record cannot be read.
    """

    run: str
    arm: str
    seed: int | None
    reason: str
    collected: Collected | None = None


@dataclass(frozen=True, kw_only=True)
class StudyJudgement:
    """A study and what its finished runs say.

    Attributes:
        name: the study.
        reference: arm that the others are held against.
        runs: that are judged: of each arm and seed the finished attempt, else one that diverged, else the latest.
        left_out: every other run that was found.
        planned: arm and seed of each run that the study has; None if that is not known.
        discovery_notes: what a reader should know of the folders.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin that was given, or None.
        margin_cap_nats: what a margin may be at most, or None for the usual cap.
        dropped_seeds: seeds that are left out in every arm, as was asked for.
    """

    name: str
    reference: str
    runs: tuple[Collected, ...]
    left_out: tuple[LeftOut, ...] = ()
    planned: frozenset[tuple[str, int]] | None = None
    discovery_notes: tuple[str, ...] = ()
    final_fraction: float = 0.1
    margin_nats: float | None = None
    margin_cap_nats: float | None = None
    dropped_seeds: tuple[int, ...] = ()

    @property
    def finished(self) -> list[Collected]:
        """Judged runs that trained every step."""
        return [run for run in self.runs if run.finished]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the finished runs."""
        return joined_rows(self.finished)

    @property
    def arms(self) -> list[str]:
        """Arms with a finished run, the reference first."""
        return sorted({run.arm for run in self.finished}, key=self._reference_first)

    @property
    def others(self) -> list[str]:
        """Arms with a finished run to hold against the reference."""
        return [arm for arm in self.arms if arm != self.reference]

    @property
    def settings(self) -> dict[str, Experiment]:
        """What the runs of each arm were asked to do; they differ in the seed alone."""
        found = {run.arm: run.experiment for run in self.runs if run.experiment is not None}
        return {arm: found[arm] for arm in sorted(found, key=self._reference_first)}

    @cached_property
    def unfinished(self) -> tuple[Seeds, Seeds]:
        """Seeds of each arm that should have a loss and have none: those that diverged, and those lost otherwise.

        Both map arm and seed to the reason. A seed should have a loss if the study has it or, where that is not known,
        if any arm has a run of it.
        """
        return unfinished_seeds(self.runs, self.left_out, self.planned)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Convergence of every other arm, on the final training loss."""
        diverged, lost = self.unfinished
        known = {*self.arms, *(arm for arm, _ in diverged)}
        arms = sorted(known - {self.reference})
        if self.reference not in known or not arms:
            return []
        verdicts = compare_convergence(
            self.table,
            reference=self.reference,
            arms=arms,
            final_fraction=self.final_fraction,
            margin_nats=self.margin_nats,
            margin_cap_nats=self.margin_cap_nats,
            diverged=diverged,
            lost=lost,
            dropped_seeds=self.dropped_seeds,
            **self._learning,
        )
        return [self._qualified(one) for one in verdicts]

    @cached_property
    def held_out(self) -> list[Verdict]:
        """Convergence of every other arm, on the loss of text that no run trained on."""
        diverged, lost = (dict(seeds) for seeds in self.unfinished)
        losses: dict[tuple[str, int], float] = {}
        for run in self.finished:
            key, loss = (run.arm, run.seed or 0), run.validation_loss
            if math.isfinite(loss):
                losses[key] = loss
            elif len(run.validation) and run.rows["loss"].notna().any():
                diverged[key] = f"the held-out loss is {loss}"
            else:
                lost[key] = "no held-out loss was logged"
        validated = {arm for arm, _ in {**losses, **diverged}}
        arms = [arm for arm in self.others if arm in validated]
        if not losses or self.reference not in validated or not arms:
            return []
        verdicts = compare_held_out(
            losses,
            reference=self.reference,
            arms=arms,
            margin_nats=self.margin_nats,
            margin_cap_nats=self.margin_cap_nats,
            diverged=diverged,
            lost=lost,
            dropped_seeds=self.dropped_seeds,
            **self._learning,
        )
        return [self._qualified(one) for one in verdicts]

    @cached_property
    def throughput(self) -> list[ArmThroughput]:
        """Tokens per second per rank of every arm; empty where no step is left after the warm-up."""
        if throughput_rows(self.table, warmup_steps=WARMUP_STEPS).empty:
            return []
        return arm_throughput(self.table, warmup_steps=WARMUP_STEPS)

    @cached_property
    def no_gain(self) -> dict[str, str]:
        """Why no gain over the reference is claimed, by arm."""
        if self.reference not in self.settings:
            return {}
        reference = self._of(self.reference)
        found = {}
        for arm in self.others:
            runs, settings = self._of(arm), differing_settings(self.settings[arm], self.settings[self.reference])
            words = [words for name, words in settings.items() if name not in NOT_FOR_SPEED]
            words += differing_facts(runs, reference, speed_facts)
            for own in (runs, reference):
                words += [f"{name} {spread(values)} of one arm" for name, values in _mixed(own, kernel_facts).items()]
            if not any(run.speed_known for run in runs) or not any(run.speed_known for run in reference):
                words.append("the machine or the kernels of all runs of an arm are unknown")
            if words:
                found[arm] = "; ".join(dict.fromkeys(words))
        return found

    @cached_property
    def gains(self) -> list[Gain]:
        """Throughput over the reference of every other arm that ran like it, over the runs whose machine is known."""
        table = joined_rows([run for run in self.finished if run.speed_known])
        if self.reference not in self.arms or throughput_rows(table, warmup_steps=WARMUP_STEPS).empty:
            return []
        seeds = {arm: set(table.loc[table["arm"] == arm, "seed"]) for arm in self.arms}
        arms = [arm for arm in self.others if arm not in self.no_gain and seeds[arm] & seeds[self.reference]]
        return [gain(table, baseline=self.reference, arm=arm, warmup_steps=WARMUP_STEPS) for arm in arms]

    @property
    def comparable_tps(self) -> dict[str, dict[int, float]]:
        """Throughput by arm and seed, of the reference and every arm whose gain over it is claimed."""
        arms = {self.reference, *(one.arm for one in self.gains)}
        return {one.arm: one.tps_by_seed for one in self.throughput if one.arm in arms}

    @property
    def on_cpu(self) -> bool:
        """Whether ranks of a run were processes on a CPU."""
        return any(_on_cpu(run) for run in self.finished)

    @property
    def emulated(self) -> bool:
        """Whether an MXFP8 arm ran emulated kernels."""
        return any(run.emulates_mxfp8 for run in self.runs)

    @property
    def emulated_deepep(self) -> bool:
        """Whether DeepEP's stand-in moved the tokens of an arm."""
        return any(run.emulates_deepep for run in self.runs)

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
        seeds: dict[str, list[int]] = {}
        for arm, seed in self.unfinished[0]:
            seeds.setdefault(arm, []).append(seed)
        diverged = [
            f"{arm_label(arm)}: {len(own)} diverged seed{'s' * (len(own) > 1)} not drawn" for arm, own in seeds.items()
        ]
        return "; ".join(filter(None, [self.emulation_note, *diverged, *first_of(self.grad_norm_notes)]))

    @property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        caveats = [f"{arm_label(arm)}: {words}" for arm in self.settings for words in self._caveats(arm)]
        known = {*self.arms, *(arm for arm, _ in self.unfinished[0])}  # an arm that is not has no verdict to name it
        unjudged = [left_out_unfinished(run) for run in self.runs if run.arm not in known]
        left_out = [f"left out: {words}" for words in left_out_words([*unjudged, *self.left_out])]
        damaged = [f"{_name(run)}: {words}" for run in self.runs for words in run.damaged]
        speed = [self.speed_note] if self.speed_note else []
        dropped = ", ".join(str(seed) for seed in self.dropped_seeds)
        plural = "s" if len(self.dropped_seeds) > 1 else ""
        told = [f"dropped in every arm, as asked for: seed{plural} {dropped}"] if dropped else []
        return [*self.grad_norm_notes, *left_out, *told, *caveats, *speed, *damaged, *self.discovery_notes]

    @property
    def speed_note(self) -> str:
        """What must be said where throughput is shown; empty for real kernels on GPUs of one kind."""
        on_cpu = list(dict.fromkeys(run.arm for run in self.finished if _on_cpu(run)))
        where = f" in {', '.join(map(arm_label, on_cpu))}" if len(on_cpu) < len(self.arms) else ""
        notes = [f"a rank is a CPU process{where}"] if on_cpu else []
        notes += [f"{self.emulation_note}: not a statement about speed"] if self.emulation_note else []
        notes += [why_no_gain(arm, self.reference, words) for arm, words in self.no_gain.items()]
        return "; ".join(notes)

    def final_loss(self, run: Collected) -> float:
        """Final smoothed loss of a finished run, in nats; NaN for one that did not finish."""
        if not run.finished or run.seed is None:
            return math.nan
        return self._final.by_run.get((run.arm, run.seed), math.nan)

    def as_text(self) -> str:
        """The findings as sentences."""
        lines = [self._counts]
        lines += [verdict.sentence() for verdict in self.verdicts] or [f"No verdict: {self._no_verdict}"]
        lines += [f"Held-out text: {verdict.sentence()}" for verdict in self.held_out]
        lines += [arm.sentence().replace("per GPU", self.rank_words) for arm in self.throughput]
        lines += [one.sentence() for one in self.gains]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def _counts(self) -> str:
        finished, found = self._finished_of_all, len(self.runs) + len(self.left_out)
        judged = f", {len(self.finished)} of them judged" if len(self.finished) < finished else ""
        return f"{finished} of {found} runs finished{judged}"

    @property
    def _finished_of_all(self) -> int:
        others = [one.collected for one in self.left_out if one.collected is not None]
        return sum(run.finished for run in [*self.runs, *others])

    @property
    def _no_verdict(self) -> str:
        if self.reference not in self.arms:
            return f"no run of the reference {self.reference} finished"
        return f"no run of an arm beside the reference {self.reference} finished"

    @property
    def rank_words(self) -> str:
        """What tokens per second are counted by."""
        on_gpus = all(run.environment is not None and run.environment.gpus for run in self.finished)
        return "per GPU" if on_gpus else "per rank"

    def to_json(self) -> dict[str, Any]:
        """The verdicts and figures for a program."""
        gains = {one.arm: one for one in self.gains}
        return {
            "study": self.name,
            "finished": self._finished_of_all,
            "judged": len(self.finished),
            "runs": [
                *(run_json(run, self._why_unused(run)) for run in self.runs),
                *(left_out_json(one) for one in self.left_out),
            ],
            "verdicts": [one.to_json() for one in [*self.verdicts, *self.held_out]],
            "tps": {arm.arm: finite_or_none(arm.tps) for arm in self.throughput},
            "gains": [_gain_json(arm, gains.get(arm), self.no_gain.get(arm)) for arm in self.others],
            "note": "; ".join(note.removesuffix(".") for note in self.notes),
        }

    @cached_property
    def _final(self) -> FinalLosses:
        return final_losses(self.table, final_fraction=self.final_fraction)

    @property
    def _learning(self) -> dict[str, Any]:
        """What says whether an arm has learnt at all, and whether it ended inside its warm-up."""
        experiment = self.settings[self.reference]
        return {
            "untrained_nats": math.log(min(shape_for(experiment).vocab_size, tokenizer_size(experiment))),
            "lr_warmup_steps": experiment.warmup_steps,
        }

    def _qualified(self, verdict: Verdict) -> Verdict:
        return replace(verdict, findings=(*verdict.findings, *self._caveats(verdict.arm)))

    def _caveats(self, arm: str) -> tuple[str, ...]:
        others = self._found(self.reference)
        return caveats(self._found(arm), others) if arm != self.reference else ()

    def _why_unused(self, run: Collected) -> str | None:
        if not run.finished:
            return _why_unfinished(run)
        return "its seed is dropped in every arm, as asked for" if run.seed in self.dropped_seeds else None

    def _of(self, arm: str) -> list[Collected]:
        return [run for run in self.finished if run.arm == arm]

    def _found(self, arm: str) -> list[Collected]:
        """Judged runs of an arm, however they ended."""
        return [run for run in self.runs if run.arm == arm]

    def _reference_first(self, arm: str) -> tuple[bool, str]:
        return arm != self.reference, arm


def unfinished_seeds(
    judged: Sequence[Collected], left_out: Sequence[LeftOut], planned: Collection[tuple[str, int]] | None = None
) -> tuple[Seeds, Seeds]:
    """What :attr:`StudyJudgement.unfinished` is, of these runs.

    Args:
        judged: one run of each arm and seed.
        left_out: every other run that was found.
        planned: arm and seed of each run that the study has; None if that is not known.
    """
    runs = {(run.arm, run.seed): run for run in judged}
    reasons = {(one.arm, one.seed): one.reason for one in left_out}
    damaged = [(one.arm, one.seed) for one in left_out if one.collected is None]
    arms = {run.arm for run in judged}
    seeds = {seed for arm, seed in [*runs, *damaged] if arm in arms and seed is not None}
    expected = {(arm, seed) for arm in arms for seed in seeds} if planned is None else planned
    diverged: Seeds = {}
    lost: Seeds = {}
    for arm, seed in sorted(expected):
        run = runs.get((arm, seed))
        if run is None:
            lost[arm, seed] = reasons.get((arm, seed), "no run of it")
        elif run.diverged and not run.finished:
            diverged[arm, seed] = run.diverged
        elif not run.finished:
            lost[arm, seed] = _end_of(run)
    return diverged, lost


def run_json(run: Collected, reason: str | None = None) -> dict[str, Any]:
    """A run for a program: which it is, how it ended, where it ran, and whether it is used or why not."""
    environment = run.environment
    return {
        "run": run.run,
        "arm": run.arm,
        "seed": run.seed,
        "status": run.status.state.value,
        "machine": environment.machine if environment is not None else None,
        "versions": environment.versions if environment is not None else {},
        "damaged": list(run.damaged),
        "used": reason is None,
        **({} if reason is None else {"reason": reason}),
    }


def left_out_json(one: LeftOut) -> dict[str, Any]:
    """The same of a run that is left out."""
    if one.collected is not None:
        return run_json(one.collected, one.reason)
    unknown: dict[str, Any] = {"status": "unknown", "machine": None, "versions": {}, "damaged": []}
    return {"run": one.run, "arm": one.arm, "seed": one.seed, **unknown, "used": False, "reason": one.reason}


def _gain_json(arm: str, found: Gain | None, reason: str | None) -> dict[str, Any]:
    return {
        "arm": arm,
        "percent": finite_or_none(found.percent) if found else None,
        "interval_percent": [finite_or_none(100 * (bound - 1)) for bound in (found.interval.low, found.interval.high)]
        if found
        else [None, None],
        "seeds": found.n_seeds if found else 0,
        **({} if found else {"reason": reason or "no common seed whose machine is known and that logged a speed"}),
    }


def _on_cpu(run: Collected) -> bool:
    return run.environment is not None and run.environment.on_cpu


def _mixed(runs: Sequence[Collected], facts: Any) -> Mapping[str, list[str]]:
    """Facts that are not the same in all of an arm's runs: name to the values."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in facts(run).items():
            values.setdefault(name, []).append(value)
    return {name: own for name, own in values.items() if len(set(own)) > 1}


def left_out_unfinished(run: Collected) -> LeftOut:
    """A run that did not finish where others of its arm did."""
    return LeftOut(run=run.run, arm=run.arm, seed=run.seed, reason=_why_unfinished(run), collected=run)


def _why_unfinished(run: Collected) -> str:
    return f"diverged: {run.diverged}" if run.diverged else _end_of(run)


def _end_of(run: Collected) -> str:
    """How a run that did not finish ended, on one line."""
    planned = f" of {run.steps_planned}" if run.steps_planned else ""
    reason = f": {run.status.reason}" if run.status.reason else ""
    damaged = f" ({'; '.join(run.damaged)})" if run.damaged else ""
    return f"{run.status.state}{reason}, {run.last_step}{planned} steps logged{damaged}"


def left_out_words(left_out: Sequence[LeftOut]) -> list[str]:
    """Which runs are left out and why, those of one arm and reason together.

    An attempt that another one replaced stands in the table of runs alone, unless it diverged.
    """
    seeds: dict[tuple[str, str], list[int]] = {}
    for one in left_out:
        if one.reason.startswith(ANOTHER_ATTEMPT) and not (one.collected and one.collected.diverged):
            continue
        known = one.arm and one.seed is not None
        own = seeds.setdefault((arm_label(one.arm) if known else one.run, one.reason), [])
        own += [one.seed] if known and one.seed is not None else []
    return [
        ", ".join([name, *([f"seed{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))}"] if own else [])])
        + f": {reason}"
        for (name, reason), own in seeds.items()
    ]


def _name(run: Collected) -> str:
    return f"{arm_label(run.arm)}, seed {run.seed}"


def first_of(notes: Sequence[str]) -> list[str]:
    """The first note, and how many more there are: for a title, which has no room for all."""
    return [f"{notes[0]}, and {len(notes) - 1} more runs" if len(notes) > 1 else notes[0]] if notes else []
