"""From what a run left to rows: its ``metrics.jsonl``, or a log, a folder or an export from elsewhere.

A folder from elsewhere may be what a job left there: its log, torchrun's folders of single ranks, ``slurm-*.out``,
``dmesg``. They are one run, whose rows are those of the log, or of the rank that has the loss.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.files import finite_or_none, write_json
from moelab.privacy import each_text, one_line, shown
from moelab.runs import directory, metrics
from moelab.runs.directory import RunDir
from moelab.runs.expert_load import FILE as LOAD_FILE
from moelab.runs.expert_load import ExpertLoad, expert_load
from moelab.runs.failure import Statement, cause, rank_folders
from moelab.runs.log import no_steps, read_log, read_logs
from moelab.runs.log_text import LogBytes, NotALog, tail, what_was_seen
from moelab.runs.metrics import read_metrics
from moelab.runs.side_files import SideFiles, read_side_files
from moelab.runs.status import State, Status
from moelab.runs.table import (
    COLUMNS,
    VALIDATION_COLUMNS,
    Columns,
    MetricsRead,
    grad_norm_finding,
    merge_segments,
    metrics_table,
    throughput_rows,
    validation_table,
)
from moelab.runs.tensorboard import event_files, read_tensorboard
from moelab.runs.wandb import is_export, read_wandb

RESULTS_FILE = "results.json"
WARMUP_STEPS = 3
_LOG_NAME = re.compile(  # of launchers, Slurm, rotated files and the kernel
    r"(?:^|\.)(log|out|err|txt|stdout|stderr)(\.\d+)?(\.(gz|xz|bz2))?$|^(dmesg|messages|syslog|stdout|stderr)\b"
)
_FOR_ITS_LOSS = re.compile(
    r"""(?ix) loss(?![a-z]) \W+ (\w+\W+){0,4}? ({0}) \b  # loss or gradient norm is not finite, loss became NaN
    | \b ({0}) \W+ ((training|validation)\W+)? loss \b | \b (loss|training) \W+ (\w+\W+){0,2}? diverged \b
    """.replace("{0}", r"not\ finite|non-?finite|nan|[-+]?inf(inite|inity)?")
)
"""How TorchTitan, a reader of its log or a person says in a status that training stopped for its loss."""


@dataclass(frozen=True, kw_only=True)
class Collected(SideFiles):
    """What one run left, with its side files; of these nothing is known from elsewhere."""

    run: str
    arm: str  # name of its arm, empty for a source from elsewhere
    seed: int | None
    status: Status  # how it ended; a loss that is not finite is `failed` whatever the exit code said
    segments: int  # launches that logged a step
    columns: Columns  # of its rows, and of its held-out losses
    validation_columns: Columns
    steps_planned: int | None = None
    diverged: str | None = None  # which loss was not finite, None where none was or training got over it
    experiment: Experiment | None = None
    # NaN or Inf by the step that reported it as its gradient norm
    grad_norm_not_finite: Mapping[int, float] = field(default_factory=dict)
    load: ExpertLoad | None = None
    notes: tuple[str, ...] = ()  # what a reader should know of its source

    @property
    def finished(self) -> bool:
        """Whether every planned step was trained and the run ended well; never of a source from elsewhere."""
        return self.status.state is State.COMPLETED and self.steps_planned in (None, self.last_step)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Metrics table."""
        return metrics_table(self.columns, run=self.run, arm=self.arm or None, seed=self.seed)

    @cached_property
    def validation(self) -> pd.DataFrame:
        """Held-out loss by step."""
        return validation_table(self.validation_columns)

    @property
    def last_step(self) -> int:
        """Last step that was logged; 0 before the first."""
        return int(np.max(self.columns["step"], initial=0))

    @property
    def validation_loss(self) -> float:
        """Held-out loss at the last validated step, in nats per token; NaN without one."""
        return float(self.validation["loss"].iloc[-1]) if len(self.validation) else math.nan

    @property
    def emulates_products(self) -> bool:
        """Whether quantised products were emulated, as its ranks recorded or, without a record, as was asked for."""
        if self.experiment is None or self.experiment.precision is not Precision.MXFP8:
            return self.experiment is not None and self.experiment.precision is Precision.NVFP4
        return "emulated" in (self.converted["kernels"] if self.converted else self.experiment.mxfp8_kernels)

    @property
    def emulates_deepep(self) -> bool:
        """Whether DeepEP's stand-in moved the tokens, as its ranks recorded or, without a record, as was asked for."""
        if self.dispatcher is not None:
            return self.dispatcher.get("kernels") == "emulated"
        experiment = self.experiment
        return (
            experiment is not None
            and experiment.ep_backend is not EPBackend.STANDARD
            and experiment.ep_kernels == "emulated"
        )

    @property
    def grad_norm_finding(self) -> str | None:
        """In which steps the gradient norm was reported as NaN or Inf; None if in none."""
        return grad_norm_finding(self.grad_norm_not_finite, self.rows)

    @property
    def grad_norm_marks(self) -> list[tuple[int, float]]:
        """These steps with their loss, where that is finite."""
        if not self.grad_norm_not_finite:
            return []
        losses = merge_segments(self.rows).set_index("step")["loss"]
        return [(step, losses[step]) for step in self.grad_norm_not_finite if math.isfinite(losses[step])]

    @property
    def summary(self) -> str:
        """The run on one line."""
        state = "end not recorded" if self.status.state is State.UNKNOWN else str(self.status.state)
        rows = f"{len(self.rows)} rows to step {self.last_step} in {self.segments} segment(s)"
        parts, losses = [f"{self.run}: {state}", rows], self.rows["loss"].dropna()
        speeds = throughput_rows(self.rows, warmup_steps=WARMUP_STEPS)["tps"].dropna()
        parts += [f"loss {losses.iloc[0]:.3f} to {losses.iloc[-1]:.3f}"] if len(losses) else []
        parts += [f"{speeds.median():,.0f} tokens/s per GPU (median)"] if len(speeds) else []
        peak = self.rows["memory_gib"].max()
        parts += [f"{peak:.1f} GiB"] if math.isfinite(peak) else []
        parts += [self.grad_norm_finding] if self.grad_norm_finding else []
        return "; ".join(
            [", ".join(parts), *([self.status.reason] if self.status.reason else []), *self.damaged, *self.notes]
        )

    def to_json(self) -> dict[str, Any]:
        """The run as the command line prints it; missing numbers are null."""
        return dict(json.loads(self.json_text()))

    def json_text(self) -> str:
        """:meth:`to_json` as a text on one line."""
        head = {
            "run": self.run,
            "arm": self.arm,
            "seed": self.seed,
            "status": self.status.state.value,
            "reason": self.status.reason,
            "diverged": self.diverged,
            "damaged": list(self.damaged),
            "notes": list(self.notes),
            "segments": self.segments,
            **self.grad_norm_json,
            "traces": list(self.traces),
            "expert_load": self.load.to_json() if self.load else None,
        }
        head = each_text(shown, head)
        # From the columns: a study has thousands of tables, and making one takes pandas as long as reading its run.
        rows = _json_rows(self.columns, COLUMNS, run=head["run"], arm=self.arm or None, seed=self.seed)
        held_out = _json_rows(self.validation_columns, VALIDATION_COLUMNS)
        return f'{json.dumps(head)[:-1]}, "rows": {rows}, "validation": {held_out}}}'

    @property
    def grad_norm_json(self) -> dict[str, int | None]:
        """The finding for a program: the first of these steps, and how many they are."""
        steps = self.grad_norm_not_finite
        return {"grad_norm_not_finite_from": min(steps, default=None), "grad_norm_not_finite_steps": len(steps)}


def _json_rows(columns: Columns, names: Sequence[str], **same: str | int | None) -> str:
    """Rows as JSON has them: what is missing or not finite is null; ``same`` is in each of them."""
    values: dict[str, list[Any]] = {}
    for name in names:
        if name in same or name not in columns:
            values[name] = [same.get(name)] * len(columns["step"])
        else:
            known = columns[name].tolist()
            values[name] = (
                known if np.isfinite(columns[name]).all() else [x if math.isfinite(x) else None for x in known]
            )
    return json.dumps([dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)])


def collect_run(run: RunDir) -> Collected:
    """Read a run directory."""
    experiment, status = run.experiment, run.status
    read, unread = numbers_of(run, status)
    side = read_side_files(run, experiment, started=bool(len(read.columns["step"])))
    load, damaged = None, [*unread, *side.damaged]
    try:
        load = expert_load(run.path / LOAD_FILE)
    except BadInput as error:
        damaged.append(str(error))
    diverged = read.reason
    # A step whose loss was not finite may have no row; then the reason alone says it.
    if status.state in (State.FAILED, State.CANCELLED) and _FOR_ITS_LOSS.search(status.reason or ""):
        diverged = diverged or status.reason
    if read.reason and not (status.state is State.FAILED and status.reason):  # the launcher's own reason says more
        status = replace(status, state=State.FAILED, reason=read.reason)
    return Collected(
        **{**vars(side), "damaged": tuple(damaged)},  # of its numbers, its side files and its load
        run=run.name,
        arm=experiment.arm,
        seed=experiment.seed,
        status=status,
        segments=read.segments,
        columns=_without_traced_speed(read.columns, experiment),
        validation_columns=read.validation_columns,
        steps_planned=experiment.steps,
        diverged=diverged,
        experiment=experiment,
        load=load,
        notes=(*read.notes, *_traced_notes(experiment, status, side.traces)),
        grad_norm_not_finite=read.grad_norm_not_finite,
    )


def numbers_of(run: RunDir, status: Status) -> tuple[MetricsRead, list[str]]:
    """What the run logged, and which file cannot be read; of a run before moelab 0.3, which has a log alone, that."""
    name = metrics.FILE
    try:
        return read_metrics(run.path / name), []
    except FileNotFoundError:
        pass
    except OSError as error:
        return read_log([]), [f"{name} cannot be read ({error.strerror})"]
    log = f"logs/{run.log.name}"
    try:
        read = read_log(run.log)
    except NotALog as error:
        is_over = status.state not in (State.PREPARED, State.SUBMITTED, State.RUNNING)
        words = f"{log} is missing" if not run.log.exists() else str(error).removeprefix(f"{run.path}/")
        return read_log([]), [f"{name} is missing, and {words}"] * is_over
    if not len(read.columns["step"]):  # it may have ended before its first step
        return read, [f"{name} is missing"] if status.state is State.COMPLETED else []
    return replace(read, notes=(f"{name} is missing: read from {log}, which rounds", *read.notes)), []


def _slowed_steps(experiment: Experiment) -> range:
    """The traced step, the one before, which warms the profiler up, and the one after, when the trace was written."""
    step = experiment.trace_step
    return range(step - 1, step + 2) if step else range(0)


def _without_traced_speed(columns: Columns, experiment: Experiment) -> Columns:
    """Columns without a speed where a trace slowed it."""
    if not experiment.trace_step:
        return columns
    slowed = np.isin(columns["step"], _slowed_steps(experiment))
    speeds = columns.keys() & {"tps", "tflops", "mfu"}
    return {**columns, **{name: np.where(slowed, math.nan, columns[name]) for name in speeds}}


def _traced_notes(experiment: Experiment, status: Status, traces: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    step = experiment.trace_step
    if traces:
        longest = max(traces, key=lambda trace: trace["write_s"])
        usual = f" instead of {longest['usual_step_s']:.3f} s" if longest["usual_step_s"] else ""
        yield (
            f"step {step} was traced: it took {longest['step_s']:.3f} s{usual}, plus {longest['write_s']:.1f} s to "
            f"write the trace; throughput leaves out steps {step - 1} to {step + 1}"
        )
    for one in (file for trace in traces for file in trace["files"] if file["reason"]):
        yield f"{one['file']}: {one['reason']}"
    missing = set(experiment.trace_ranks) - {trace["rank"] for trace in traces}
    if step and missing and status.state is State.COMPLETED:
        ranks = ", ".join(map(str, sorted(missing)))
        yield f"step {step} was not traced on rank {ranks}: a launch began after it, or the record could not be written"


def collect_runs(runs: Iterable[RunDir]) -> list[Collected]:
    """What each of several runs has, in their order."""
    looks_for_circles = gc.isenabled()
    gc.disable()  # tables of thousands of runs hold no circles, and looking for some takes a fifth of the time
    try:
        return [collect_run(run) for run in runs]
    finally:
        if looks_for_circles:
            gc.enable()


def newest(collected: Iterable[Collected]) -> list[Collected]:
    """Of the attempts at each arm and seed, the finished one, else one that diverged, else the latest.

    A divergence is not undone by a later attempt that was lost to a machine.
    """
    chosen: dict[tuple[str, int | None], Collected] = {}
    # In order of worth: of one arm and seed the last is kept.
    for one in sorted(collected, key=lambda one: (one.finished, one.diverged is not None, one.run)):
        chosen[one.arm, one.seed] = one
    return sorted(chosen.values(), key=lambda one: (one.arm, one.seed or 0))


def save_results(run: RunDir, collected: Collected) -> None:
    """Write ``results.json``: the run in a few numbers."""
    merged = merge_segments(collected.rows)
    counted = throughput_rows(collected.rows, warmup_steps=WARMUP_STEPS)
    results = {
        "status": collected.status.state.value,
        "reason": collected.status.reason,
        "steps": collected.last_step,
        "segments": collected.segments,
        "last_loss_nats": finite_or_none(merged["loss"].iloc[-1]) if len(merged) else None,
        "validation_loss_nats": finite_or_none(collected.validation_loss),
        "tps_median": finite_or_none(counted["tps"].median()),
        "warmup_steps_left_out": WARMUP_STEPS,
        "memory_gib_peak": finite_or_none(merged["memory_gib"].max()),
        "mxfp8": collected.converted,
        "dispatcher": collected.dispatcher,
        **collected.grad_norm_json,
    }
    write_json(run.path / RESULTS_FILE, results)


# From elsewhere


def collect(path: Path) -> list[Collected]:
    """Read whatever is at a path: run directories at or below it, a TorchTitan log, TensorBoard events, a W&B export.

    A log, or a folder of what a job left, that ends in a failure gives a run that failed, with the cause as its reason.

    Runs whose record cannot be used are left out (:func:`moelab.runs.directory.discover` names them).

    Raises:
        BadInput: if it is none of them, or all runs are left out.
    """
    if not path.exists():
        valid = "a run, a study, a TorchTitan log, a TensorBoard folder or a W&B export"
        raise BadInput(f"{path} does not exist; give {valid}")
    discovered = directory.discover(path.absolute()) if path.is_dir() else None
    if discovered and discovered.left_out and not discovered.runs:
        raise BadInput("\n".join(discovered.lines))
    if discovered and discovered.runs:
        return collect_runs(discovered.runs)
    reads, ended = _read_folder(path) if path.is_dir() else _read_file(path)
    if not ended and not any(len(read.rows) for read in reads):
        raise BadInput(f"{path}: no step in it has a value of one of TorchTitan's metrics; give what has logged a step")
    return [_from_elsewhere(read, path.stem.removesuffix(".log"), ended) for read in reads if ended or len(read.rows)]


def _from_elsewhere(read: MetricsRead, name: str, ended: Statement | None) -> Collected:
    run = one_line(read.run or name)  # an export names its runs, a log does not
    reason = read.reason or (str(ended) if ended else None)
    return Collected(
        run=run,
        arm="",
        seed=None,
        status=Status(state=State.FAILED if reason else State.UNKNOWN, reason=reason),
        segments=read.segments,
        columns=read.columns,
        validation_columns=read.validation_columns,
        diverged=reason if read.reason or _FOR_ITS_LOSS.search(reason or "") else None,
        grad_norm_not_finite=read.grad_norm_not_finite,
        notes=read.notes,
    )


def _read_file(path: Path) -> tuple[list[MetricsRead], Statement | None]:
    """The metrics of each run in a file, and what ended it if something there shows that it failed."""
    if path.name.startswith("events.out.tfevents"):
        return read_tensorboard(path.parent), None
    if is_export(path):
        return read_wandb(path), None
    read, ended = read_log(path), cause(None, tail(path))
    if not ended and not len(read.rows):  # a job that fails before its first step leaves a log all the same
        raise no_steps(path)
    return [read], ended


def _read_folder(folder: Path) -> tuple[list[MetricsRead], Statement | None]:
    """The same of a folder that a job left; event files and exports may be of several runs.

    Raises:
        BadInput: if it has neither metrics nor a failure, or logs of several runs.
    """
    # What a rank printed is in the job's log too: its own files only count where there is no such log.
    ranks = rank_folders(folder)
    logs = [file for file in _logs(folder) if file.parent not in ranks]
    read, ended = read_logs(logs, folder), cause(folder, *(tail(file) for file in logs))
    if not len(read.rows):
        files = [rank / name for rank in ranks for name in ("stderr.log", "stdout.log")]
        read = read_logs([file for file in files if file.is_file()], folder)
    if ended or len(read.rows):
        return [read], ended
    if event_files(folder):
        return read_tensorboard(folder), None
    if exports := sorted(filter(is_export, folder.glob("*.csv*"))):
        return [one for file in exports for one in read_wandb(file)], None
    tried = [*logs, *ranks]
    if not tried:
        raise BadInput(f"{folder}: nothing in it is a log, an events.out.tfevents.* file or a W&B export")
    names = ", ".join(str(file.relative_to(folder)) for file in tried[:5])
    seen = next((f"; {words}" for file in logs if (words := what_was_seen(LogBytes(file).beginning(1 << 20)))), "")
    raise BadInput(f"{folder}: there is no TorchTitan step line or failure in {names}, and no TensorBoard events{seen}")


def _logs(folder: Path) -> list[Path]:
    """Logs by their names, at most three folders down, not in hidden ones nor in those that hold none."""
    logs: list[Path] = []
    for here, inside, names in os.walk(folder):
        is_deep = len(Path(here).relative_to(folder).parts) > 2
        # What is taken out of `inside` is not walked into.
        inside[:] = [name for name in inside if not (is_deep or name.startswith((".", "checkpoint", "step-", "tb")))]
        logs += [file for name in names if _LOG_NAME.search(name) and (file := Path(here, name)).is_file()]
    return sorted(logs)
