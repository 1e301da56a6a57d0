"""Everything about a study in one object: its runs, what they say, and the figures and the report that show it.

The notebooks and ``moelab report`` both go through :func:`judge_study`, so they cannot disagree.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
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
from moelab.errors import BadInput, MoelabError
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.runs import directory
from moelab.runs.collect import WARMUP_STEPS, Collected, collect, joined_rows, newest
from moelab.runs.directory import RunDir
from moelab.runs.table import throughput_rows

_FOLDERS = re.compile(r"(?<![\w:/…])/(?:[^\s/'\":]+/)+")  # of the machine that ran it, in a text
ARM_FIELDS = frozenset(
    {"seed", "precision", "mxfp8_kernels", "quantize", "wgrad", "ep_backend", "dispatch_precision", "routing"}
)
"""What sets two arms apart; every other field should be the same in both."""
VERSIONS_SHOWN = ("torch", "torchtitan", "torchao", "nvidia-nccl-cu13")


class NothingToJudge(MoelabError):
    """No run of the study finished."""


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
        others = [arm for arm in self.others if any(arm == name for name, _ in known)]
        return [
            compare_held_out(known, arm=arm, reference=self.reference, margin_nats=self.margin_nats) for arm in others
        ]

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
    def settings_note(self) -> str:
        """What the arms differ in beside what makes them arms; empty where the comparison is of the arms alone."""
        fields = [name for name in Experiment.model_fields if name not in ARM_FIELDS]
        differing = [name for name in fields if len({getattr(one, name) for one in self.settings.values()}) > 1]
        return f"the arms also differ in {', '.join(differing)}" if differing else ""

    @property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        return [note for note in (self.settings_note, self.speed_note) if note]

    @property
    def speed_note(self) -> str:
        """What must be said where throughput is shown; empty for real kernels on GPUs."""
        notes = ["a rank is a CPU process"] if self.on_cpu else []
        notes += ["emulated MXFP8 kernels: not a statement about speed"] if self.emulated else []
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
        verdicts = [
            {
                "arm": one.arm,
                "reference": one.reference,
                "answer": one.answer.value,
                "quantity": one.quantity,
                "seeds": list(one.seeds),
                "difference_nats": _number(one.mean_difference_nats),
                "interval_nats": [_number(one.interval.low), _number(one.interval.high)],
                "margin_nats": _number(one.margin_nats),
                "sentence": one.sentence(),
            }
            for one in [*self.verdicts, *self.held_out]
        ]
        return {
            "study": self.name,
            "finished": len(self.finished),
            "runs": len(self.runs),
            "verdicts": verdicts,
            "tps": {arm.arm: _number(arm.tps) for arm in self.throughput},
            "note": "; ".join(self.notes),
        }

    @cached_property
    def _final(self) -> FinalLosses:
        return final_losses(self.table, final_fraction=self.final_fraction)

    def _shares_seed(self, arm: str) -> bool:
        seeds = {name: {run.seed for run in self.finished if run.arm == name} for name in (arm, self.reference)}
        return bool(seeds[arm] & seeds[self.reference])


def judge_study(
    path: Path,
    *,
    study: Study | None = None,
    reference: str = "bf16_standard",
    final_fraction: float = 0.1,
    margin_nats: float | None = None,
) -> StudyJudgement:
    """Collect a study's runs and judge them.

    Args:
        path: the study's folder.
        study: judge the runs of exactly these experiments; None takes, for each arm, those of its newest settings.
        reference: arm that the others are held against.
        final_fraction: part of the steps that the final loss is a mean of.
        margin_nats: equivalence margin, or None to take it from the reference's own seed-to-seed spread.

    Raises:
        BadInput: if the path is not a study's folder or has no run of the reference.
        NothingToJudge: if no run finished, with the reason of each.
    """
    if not path.is_dir():
        raise BadInput(f"{path} is not a folder; give a study, such as runs/06_compare_convergence")
    places = {run.name: run for run in directory.find(path)}
    studies = sorted({name.split("/")[0] for name in places})
    if len(studies) > 1:
        raise BadInput(f"{path} holds several studies; give the folder of one: {', '.join(studies)}")
    collected = collect(path)
    if study is None:
        collected = _of_latest_experiment(collected, places)
    else:
        collected = [run for run in collected if run.run in places and places[run.run].experiment in study.experiments]
    runs = newest(collected)
    finished = [run for run in runs if run.finished]
    if not finished:
        reasons = "\n".join(f"  {run.run}: {run.status.state}: {run.status.reason}" for run in runs)
        raise NothingToJudge(f"no run of {path.name} finished:\n{reasons}")
    arms = sorted({run.arm for run in runs})
    if reference not in arms:
        raise BadInput(f"reference {reference!r} is not an arm of {path.name}; its arms: {', '.join(arms)}")
    folders = {run.arm: places[run.run].path for run in finished}
    return StudyJudgement(
        name=studies[0],
        reference=reference,
        runs=tuple(runs),
        environment=json.loads((next(iter(folders.values())) / "environment.json").read_text()),
        settings={run.arm: places[run.run].experiment for run in finished},
        commands={arm: (folder / "launch" / "command.sh").read_text().strip() for arm, folder in folders.items()},
        final_fraction=final_fraction,
        margin_nats=margin_nats,
    )


def _of_latest_experiment(collected: list[Collected], places: Mapping[str, RunDir]) -> list[Collected]:
    """Leave out finished runs from before a field of their arm was changed: seeds must differ in nothing else."""
    finished = [run for run in collected if run.finished and run.run in places]
    experiments = {run.run: places[run.run].experiment.model_copy(update={"seed": 0}) for run in finished}
    by_time = sorted(finished, key=lambda run: run.run.rsplit("/", 1)[-1])
    latest = {run.arm: experiments[run.run] for run in by_time}
    return [run for run in collected if run.run not in experiments or experiments[run.run] == latest[run.arm]]


def write_study_report(judged: StudyJudgement, path: Path) -> Path:
    """Write the study as one self-contained HTML file.

    Args:
        judged: the study.
        path: file to write.
    """
    from moelab.viz import write_report

    return write_report(
        path,
        title=f"Study {judged.name}",
        verdicts=[*judged.verdicts, *judged.held_out],
        figures=study_figures(judged),
        tables=[runs_table(judged), conversion_table(judged)],
        provenance=provenance(judged),
        notes=judged.notes,
    )


def study_figures(judged: StudyJudgement) -> Sequence[Any]:
    """The figures of a study with their captions."""
    from moelab.viz import Figure, loss_curves, loss_difference, loss_tail, throughput_bars

    note = "emulated MXFP8 kernels" if judged.emulated else ""
    figures = [
        Figure(
            caption="Training loss of every seed (thin) and the mean over seeds (bold); the inset enlarges the end.",
            figure=loss_curves(judged.table, final_fraction=judged.final_fraction, note=note),
        ),
        Figure(
            caption="The last 30 % of the steps: mean over seeds and one standard deviation.",
            figure=loss_tail(judged.table, note=note),
        ),
    ]
    for verdict in judged.verdicts:
        figures.append(
            Figure(
                caption=f"Difference of {arm_label(verdict.arm)} from {arm_label(verdict.reference)}, paired by seed.",
                figure=loss_difference(judged.table, verdict, note=note),
            )
        )
    if not judged.throughput:
        return figures
    bars = throughput_bars(
        judged.table,
        baseline=judged.reference,
        warmup_steps=WARMUP_STEPS,
        note=judged.speed_note,
        rank_words=judged.rank_words,
    )
    figures.append(Figure(caption="Throughput: geometric mean of the seeds' medians after warm-up.", figure=bars))
    return figures


def runs_table(judged: StudyJudgement) -> Any:
    """One row for each arm and seed."""
    from moelab.viz import Table

    medians = {(arm.arm, seed): tps for arm in judged.throughput for seed, tps in arm.tps_by_seed.items()}
    rows = []
    for run in judged.runs:
        key = (run.arm, run.seed if run.seed is not None else -1)
        memory = float(run.rows["memory_gib"].max()) if len(run.rows) else math.nan
        reason = f": {_FOLDERS.sub('…/', run.status.reason)}" if run.status.reason else ""
        rows.append(
            [
                arm_label(run.arm),
                run.seed,
                f"{run.status.state}{reason}",
                run.last_step,
                judged.final_loss(run),
                run.validation_loss,
                medians.get(key, math.nan),
                memory,
            ]
        )
    tps = f"tokens/s {judged.rank_words}"
    memory_words = "memory per process, GiB" if judged.on_cpu else "memory per GPU, GiB"
    return Table(
        title="Runs",
        columns=["arm", "seed", "status", "steps", "final loss, nats", "held-out loss, nats", tps, memory_words],
        rows=rows,
        decimals={tps: 0, memory_words: 2},
    )


def conversion_table(judged: StudyJudgement) -> Any:
    """What multiplies in MXFP8 in each arm."""
    from moelab.viz import Table

    rows = []
    for arm in judged.arms:
        converted = next((run.converted for run in judged.finished if run.arm == arm and run.converted), None)
        names = ", ".join(converted["modules"]) if converted else "–"
        rows.append([arm_label(arm), converted["kernels"] if converted else "–", names])
    return Table(title="Modules that multiply in MXFP8", columns=["arm", "kernels", "modules"], rows=rows)


def provenance(judged: StudyJudgement) -> dict[str, str]:
    """What was run, where and with what."""
    found = judged.environment
    packages = [f"{name} {found['packages'][name]}" for name in VERSIONS_SHOWN if found["packages"].get(name)]
    gpus = [gpu["name"] for gpu in found["gpus"]]
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "moelab": found["moelab"] + (f", commit {found['git_commit']}" if found["git_commit"] else ""),
        "Software": f"Python {found['python']}, {', '.join(packages)}",
        "Hardware": f"{len(gpus)} × {gpus[0]}" if gpus else f"{found['processor']}, {found['cores']} cores, no GPU",
        "Memory": f"{found['memory_gib']} GiB",
        "System": found["platform"],
        **{f"Command, {arm_label(arm)}": _portable(command) for arm, command in judged.commands.items()},
    }


def _portable(command: str) -> str:
    """A launch command without the folders of the machine that ran it."""
    return " ".join(_without_folder(word) for word in shlex.split(command))


def _without_folder(word: str) -> str:
    before, slash, rest = word.partition("/")
    if not slash:
        return word
    parts = rest.split("/")
    if parts[-1].startswith("python"):
        return f"{before}{parts[-1]}"
    if "runs" not in parts:
        return f"{before}…/{parts[-1]}"
    last = len(parts) - 1 - parts[::-1].index("runs")
    return f"{before}{'/'.join(parts[last:])}"


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
