"""From what a run left to rows: its log and its TensorBoard events, or a log, a folder or an export from elsewhere.

A folder from elsewhere may be what a job left there: its log, torchrun's folders of single ranks, ``slurm-*.out``,
``dmesg``. They are one run, whose rows are those of the log, or of the rank that has the loss.

The log is written line by line and the events every two minutes, so a killed run has all its steps in the log; the
events have more digits and the learning rate. Both are read and united. ``metrics.parquet`` and ``results.json`` are
derived from them and can be made again at any time. They are read instead, which takes a tenth of the time, for as long
as the log and the events are byte for byte those that they were derived from.
"""

from __future__ import annotations

import gc
import hashlib
import io
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
import pyarrow as pa
from pyarrow.parquet import ParquetFile

from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.files import finite_or_none, write_json, write_whole
from moelab.privacy import each_text, one_line, without_secrets
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.expert_load import FILE as LOAD_FILE
from moelab.runs.expert_load import ExpertLoad, expert_load
from moelab.runs.failure import cause, rank_folders
from moelab.runs.log import read_log, read_runs
from moelab.runs.log_text import LogBytes, NotALog, tail, what_was_seen
from moelab.runs.settings import launch_settings
from moelab.runs.side_files import SideFiles, read_side_files
from moelab.runs.statements import Statement
from moelab.runs.status import State, Status
from moelab.runs.table import (
    COLUMNS,
    Columns,
    MetricsRead,
    combine,
    grad_norm_finding,
    merge_segments,
    metrics_table,
    throughput_rows,
)
from moelab.runs.tensorboard import NotATensorBoardFolder, event_files, read_tensorboard, tensorboard_runs
from moelab.runs.wandb_export import is_export, read_wandb

RESULTS_FILE, METRICS_FILE = "results.json", "metrics.parquet"
READER_VERSION = 4
"""Of what a log and events are read as; raised when that changes, so that no table of an earlier reader is used."""
WARMUP_STEPS = 3
_LOG_NAME = re.compile(  # of launchers, Slurm, PBS (train.o123), rotated files and the kernel
    r"(?:^|\.)(log|out|err|txt|stdout|stderr|[oe]\d+)(\.\d+)?(\.(gz|xz|zst|bz2))?$|^(dmesg|messages|syslog|stdout|stderr)\b"
)
_FOR_ITS_LOSS = re.compile(
    r"""(?ix) loss(?![a-z]) \W+ (\w+\W+){0,2}? ({0}) \b  # loss is not finite, global_avg_loss=nan, loss became NaN
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
    rows: pd.DataFrame
    validation: pd.DataFrame  # held-out loss by step
    steps_planned: int | None = None
    diverged: str | None = None  # which loss was not finite, None where none was or training got over it
    experiment: Experiment | None = None
    # NaN or Inf by the step that reported it as its gradient norm
    grad_norm_not_finite: Mapping[int, float] = field(default_factory=dict)
    load: ExpertLoad | None = None
    read: MetricsRead | None = None
    # digests of the log and the events by their path, when they were read; empty if one of them could not be
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader should know of its source

    @property
    def finished(self) -> bool:
        """Whether every planned step was trained and the run ended well; never of a source from elsewhere."""
        return self.status.state is State.COMPLETED and self.steps_planned in (None, self.last_step)

    @cached_property
    def last_step(self) -> int:
        """Last step that was logged; 0 before the first."""
        return int(self.rows["step"].max()) if len(self.rows) else 0

    @property
    def validation_loss(self) -> float:
        """Held-out loss at the last validated step, in nats per token; NaN without one."""
        return float(self.validation["loss"].iloc[-1]) if len(self.validation) else math.nan

    @property
    def slowed_steps(self) -> range:
        """Steps whose time a trace lengthened."""
        return _slowed_steps(self.experiment) if self.experiment else range(0)

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
            "damaged": list(self.damaged),
            "notes": list(self.notes),
            "segments": self.segments,
            **self.grad_norm_json,
            "traces": list(self.traces),
            "expert_load": self.load.to_json() if self.load else None,
        }
        head = each_text(without_secrets, head)
        # The rows of a large study are millions of numbers: pandas writes them, and nobody parses them again.
        rows = self.rows if head["run"] == self.run else self.rows.assign(run=head["run"])
        tables = {"rows": rows, "validation": self.validation}
        parts = [f'"{name}": {rows.to_json(orient="records", double_precision=15)}' for name, rows in tables.items()]
        return ", ".join([json.dumps(head)[:-1], *parts]) + "}"

    @property
    def grad_norm_json(self) -> dict[str, int | None]:
        """The finding for a program: the first of these steps, and how many they are."""
        steps = self.grad_norm_not_finite
        return {"grad_norm_not_finite_from": min(steps, default=None), "grad_norm_not_finite_steps": len(steps)}


def collect_run(run: RunDir) -> Collected:
    """Read a run directory."""
    experiment, status = run.experiment, run.status
    sources = _sources(run)
    read, unread = _read_saved(run, sources), list[str]()
    if read is None:  # never saved, or the log has grown since
        read, unread = _read_log_and_events(run, status)
    side = read_side_files(run, experiment, started=bool(len(read.columns["step"])))
    load, damaged = None, [*unread, *side.damaged]
    try:
        load = expert_load(run.path / LOAD_FILE)
    except BadInput as error:
        damaged.append(str(error))
    diverged = read.reason
    # The log may lack the step whose loss was not finite; then the reason alone says it.
    if status.state in (State.FAILED, State.CANCELLED) and _FOR_ITS_LOSS.search(status.reason or ""):
        diverged = diverged or status.reason
    if read.reason and not (status.state is State.FAILED and status.reason):  # the launcher's own reason says more
        status = replace(status, state=State.FAILED, reason=read.reason)
    return Collected(
        **{**vars(side), "damaged": tuple(damaged)},  # of its log, its side files and its load
        run=run.name,
        arm=experiment.arm,
        seed=experiment.seed,
        status=status,
        segments=read.segments,
        rows=metrics_table(
            _without_traced_speed(read.columns, experiment), run=run.name, arm=experiment.arm, seed=experiment.seed
        ),
        validation=read.validation,
        steps_planned=experiment.steps,
        diverged=diverged,
        experiment=experiment,
        load=load,
        notes=(*read.notes, *_traced_notes(experiment, status, side.traces)),
        grad_norm_not_finite=read.grad_norm_not_finite,
        read=read,
        sources={} if unread else sources,  # what could not be read is tried again each time
    )


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
    reads, ended = _read_elsewhere(path)
    name = path.stem.removesuffix(".log")
    # Of several runs, the one that logged last is the one that ended; without times it is the last.
    ends = [np.fmax.reduce(read.columns.get("time", ()), initial=-math.inf) for read in reads]
    last = max(zip(ends, range(len(ends)), strict=True))[1]
    collected = [
        _from_elsewhere(read, name, ended if number == last else None)
        for number, read in enumerate(reads)
        if len(read.rows) or (ended and number == last)
    ]
    if not collected:
        raise BadInput(f"{path}: no step in it has a value of one of TorchTitan's metrics; give what has logged a step")
    return collected


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
    """Write ``metrics.parquet`` and ``results.json``, each whole or not at all."""
    # The table first: results.json holds its digest, so after a kill between the two the old results are not used.
    buffer = io.BytesIO()
    collected.rows.to_parquet(buffer, index=False)
    write_whole(run.path / METRICS_FILE, buffer.getvalue())
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
    if collected.sources and collected.read:
        read = {name: getattr(collected.read, name) for name in ("segments", "reason", "notes", "name")} | {
            "version": READER_VERSION,
            "sources": {**collected.sources, METRICS_FILE: _digest(buffer.getvalue())},
            "grad_norm_not_finite": {step: str(norm) for step, norm in collected.grad_norm_not_finite.items()},
            # 15 digits: pandas writes 10, and a held-out loss that is read back would be another.
            "validation": json.loads(collected.validation.to_json(orient="split", index=False, double_precision=15)),
        }
        text = json.dumps(read)  # kept as the text that was digested: parsed and dumped again it may differ
        results |= {"read": text, "read_digest": _digest(text.encode())}
    write_json(run.path / RESULTS_FILE, results)


def _sources(run: RunDir) -> dict[str, str]:
    """Digests of the log and the events by their path in the run; empty if one of them cannot be read."""
    try:
        files = [run.log, *sorted(event_files(run.tensorboard))]
        return {file.relative_to(run.path).as_posix(): _digest(file) for file in files}
    except OSError:
        return {}


def _digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.blake2b(content, digest_size=16).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_saved(run: RunDir, sources: Mapping[str, str]) -> MetricsRead | None:
    """What the log and the events were read as when the results were saved; None if one of all files is another now."""
    try:
        results = json.loads((run.path / RESULTS_FILE).read_bytes())
        if results["read_digest"] != _digest(results["read"].encode()):
            return None
        read, table = json.loads(results["read"]), (run.path / METRICS_FILE).read_bytes()
        is_same = read.pop("sources") == {**sources, METRICS_FILE: _digest(table)} and bool(sources)
        if read.pop("version") != READER_VERSION or not is_same:
            return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # of thousands of brackets
        return None
    held_out = read.pop("validation")  # a NaN in it is null
    validation = np.array(held_out["data"], dtype=float).reshape(-1, len(held_out["columns"]))
    # Without run, arm and seed, which the folder says: it may have been moved. Threads take longer than so few rows.
    rows = ParquetFile(pa.BufferReader(table)).read(columns=[*COLUMNS[3:]], use_threads=False)
    return MetricsRead(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
        | {
            "columns": {name: rows[name].to_numpy() for name in rows.column_names},
            "validation_columns": dict(zip(held_out["columns"], validation.T, strict=True)),
            "grad_norm_not_finite": {int(step): float(norm) for step, norm in read["grad_norm_not_finite"].items()},
        }
    )


def _read_log_and_events(run: RunDir, status: Status) -> tuple[MetricsRead, list[str]]:
    """What both have, and which of them cannot be read."""
    log: MetricsRead | None = None
    damaged = []
    name = f"logs/{run.log.name}"
    try:
        log = read_log(run.log, mend=False)
    except OSError as error:
        damaged.append(f"{name} cannot be read ({error.strerror or error})")
    except NotALog:
        if run.log.exists():
            damaged.append(f"{name} is not a file")
        elif status.state not in (State.PREPARED, State.SUBMITTED, State.RUNNING):
            damaged.append(f"{name} is missing")
    if log is None:
        log = read_log([])
    try:
        events = read_tensorboard(run.tensorboard)
    except NotATensorBoardFolder:
        return log, damaged
    except OSError as error:
        return log, [*damaged, f"{run.tensorboard.name} cannot be read ({error.strerror})"]
    return _united(log, events), damaged


def _united(log: MetricsRead, events: MetricsRead) -> MetricsRead:
    columns = combine(log.columns, events.columns)
    # The longer: the events lack what was not flushed, and a log what was printed by another rank.
    held_out = max(log.validation_columns, events.validation_columns, key=lambda part: len(part["step"]))
    reported = {**events.grad_norm_not_finite, **log.grad_norm_not_finite}
    norms = merge_segments(metrics_table(columns)).set_index("step")["grad_norm"] if reported else pd.Series()
    reason = log.reason or events.reason
    if reason != log.reason:  # the log may go on behind the last events that were flushed
        last = columns["segment"] == columns["segment"].max()
        ends = last & (columns["step"] == columns["step"][last].max())
        reason = None if np.isfinite(columns["loss"][ends]).any() else reason
    return replace(
        log,
        columns=columns,
        validation_columns=held_out,
        reason=reason,
        notes=tuple(dict.fromkeys((*log.notes, *events.notes))),
        # One of them may lack the launch that repeated a step, and hold its earlier value.
        grad_norm_not_finite={step: reported[step] for step in sorted(reported) if not math.isfinite(norms[step])},
    )


def _from_elsewhere(read: MetricsRead, name: str, ended: Statement | None = None) -> Collected:
    run = read.rows["run"].fillna(name)  # an export names its runs, a log does not
    run = run if read.name is None else run + f" ({read.name})"
    rows = read.rows.assign(run=run.map({each: one_line(str(each)) for each in run.unique()}))
    reason = read.reason or (str(ended) if ended else None)
    return Collected(
        run=str(rows["run"].iloc[0]) if len(rows) else one_line(name),
        arm="",
        seed=None,
        status=Status(state=State.FAILED if reason else State.UNKNOWN, reason=reason),
        segments=read.segments,
        rows=rows,
        validation=read.validation,
        diverged=read.reason,
        grad_norm_not_finite=read.grad_norm_not_finite,
        notes=read.notes,
    )


def _read_elsewhere(path: Path) -> tuple[list[MetricsRead], Statement | None]:
    """The metrics of each run at a path, and what ended the run if something there shows that it failed."""
    if path.is_dir():
        return _read_job(path)
    if path.name.startswith("events.out.tfevents"):
        return tensorboard_runs(path.parent), None
    if is_export(path):
        return read_wandb(path), None
    try:
        reads = read_runs(path, list(launch_settings(path)))
    except NotALog:
        # A job that fails before its first step leaves a log all the same.
        ended = cause(None, tail(path)) if path.is_file() else None  # a pipe would be waited for
        if ended is None:
            raise
        return [read_log([])], ended
    return reads, cause(None, tail(path))


def _read_job(folder: Path) -> tuple[list[MetricsRead], Statement | None]:
    """What a job left in a folder; event files may be of several runs.

    Raises:
        BadInput: if it left neither metrics nor a failure, or the logs are of several runs.
    """
    # What a rank printed is in the job's log too: its own files only count where there is no such log.
    ranks = rank_folders(folder)
    logs: dict[Path, MetricsRead] = {}
    faults = []
    for file in _logs(folder):
        if file.parent not in ranks:
            try:
                logs[file] = read_log(file)
            except (NotALog, OSError) as error:
                faults.append(f"left out: {error}")
    reads = {file: read for file, read in logs.items() if len(read.rows)}  # dmesg has none
    of_ranks = [
        read_log(file, mend=False)
        for rank in ranks
        for file in (rank / "stderr.log", rank / "stdout.log")
        if not reads and file.is_file()
    ]
    read = _of_one_run(folder, reads) if reads else _of_rank_with_loss(of_ranks)
    read = replace(read, notes=(*read.notes, *faults))
    ended = cause(folder, *(tail(file) for file in logs))
    try:
        events = tensorboard_runs(folder)
    except NotATensorBoardFolder as error:
        if ended or len(read.rows):
            return [read], ended
        if not logs and not ranks:
            # Tables alone: JSON beside one is W&B's configuration and summary.
            if exports := sorted(filter(is_export, folder.glob("*.csv*"))):
                return _read_exports(exports), None
            nothing = (
                f"{folder}: nothing in it is a log, an events.out.tfevents.* file or a W&B export; give what has one"
            )
            raise BadInput("\n".join([nothing, *faults])) from None
        names = ", ".join(str(file.relative_to(folder)) for file in [*logs, *ranks][:5])
        beginnings = (next(iter(LogBytes(file)), b"") for file in logs)
        seen = next((f"; {words}" for beginning in beginnings if (words := what_was_seen(beginning))), "")
        raise BadInput(f"{error} There is no TorchTitan step line or failure in {names} either{seen}") from None
    if not len(read.rows):
        return events, ended
    return [_united(read, events[0]) if len(events) == 1 else read], ended


def _read_exports(files: Sequence[Path]) -> list[MetricsRead]:
    """The runs of all of them; what is no export is named in the notes, unless none is one."""
    reads: list[MetricsRead] = []
    faults: list[str] = []
    for file in files:
        try:
            reads += read_wandb(file)
        except BadInput as error:
            faults.append(str(error))
    if not reads:
        raise BadInput("\n".join(faults))
    return [replace(read, notes=(*read.notes, *(f"left out: {fault}" for fault in faults))) for read in reads]


def _logs(folder: Path) -> list[Path]:
    """Logs by their names, at most three folders down, not in hidden ones nor in those that hold none."""
    logs: list[Path] = []
    for here, inside, names in os.walk(folder):
        is_deep = len(Path(here).relative_to(folder).parts) > 2
        # What is taken out of `inside` is not walked into.
        inside[:] = [name for name in inside if not (is_deep or name.startswith((".", "checkpoint", "step-", "tb")))]
        # No pipe, no dangling link; unlike Path's, this one is False too of what cannot be looked at.
        named = (name for name in names if _LOG_NAME.search(name))
        logs += [Path(here, name) for name in named if os.path.isfile(f"{here}/{name}")]  # noqa: PTH113
    return sorted(logs)


def _of_one_run(folder: Path, reads: Mapping[Path, MetricsRead]) -> MetricsRead:
    """Of several readings of the same steps, such as ``train.log`` and ``slurm-1.out``, the longest; of ranks', all."""
    losses = {file: merge_segments(read.rows).set_index("step")["loss"].dropna() for file, read in reads.items()}
    longest = max(reads, key=lambda file: (len(losses[file]), len(reads[file].rows)))
    # All ranks print the same digits, and two runs hardly ever do.
    others = [file for file in reads if not losses[file].isin(losses[longest]).all()]
    if others:
        names = ", ".join(str(file.relative_to(folder)) for file in [longest, *others])
        raise BadInput(f"{folder} has logs of several runs or launches: {names}; give one of them")
    # Segments are counted in each log: that of a later launch alone would put its memory at other steps.
    return _of_rank_with_loss([read for read in reads.values() if read.segments == reads[longest].segments])


def _of_rank_with_loss(reads: list[MetricsRead]) -> MetricsRead:
    """The rank that has the loss, with the memory of the fullest."""
    if not any(len(read.rows) for read in reads):
        return read_log([])
    read = max(reads, key=lambda read: (int(read.rows["loss"].notna().sum()), len(read.rows)))
    memory = ["memory_gib", "memory_pct"]
    fullest = pd.concat([one.rows for one in reads]).groupby(["segment", "step"])[memory].max()
    # Each rank printed its own memory, and the job fails with the fullest.
    keys = pd.MultiIndex.from_frame(read.rows[["segment", "step"]])
    return replace(read, columns={**read.columns, **{name: fullest.loc[keys, name].to_numpy() for name in memory}})
