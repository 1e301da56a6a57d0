"""Follows the runs at a path while they train: each record of a run's metrics is read once.

Nothing is stored beside the run directories. After a restart of the process that watches, one read brings everything
back, so there is no second copy that could be wrong. Of several attempts at one arm and seed the newest is followed;
:mod:`moelab.runs.collect` reads the others.

Of the run that is shown, a live view has also what each rank printed about its newest steps, and a log's last lines. A
rank is known by the number in torchrun's prefix, ``[rank3]:``, which moelab's launcher makes the global one. Only the
end of the log is read for that, and only while somebody asks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.files import open_regular
from moelab.privacy import without_secrets
from moelab.runs import directory, metrics
from moelab.runs.collect import numbers_of
from moelab.runs.directory import RunDir
from moelab.runs.log import NO_RANK, LogLine, scan
from moelab.runs.metrics import MetricsTail, read_of
from moelab.runs.status import FILE as STATUS_FILE
from moelab.runs.status import State, Status
from moelab.runs.table import VALUE_COLUMNS, grad_norm_finding, joined_rows, merge_segments, metrics_table

FIND_INTERVAL_S: Final = 10.0
"""New run directories are looked for this often: a walk over a shared filesystem costs more than reading on."""
KEPT_STEPS: Final = 64
KEPT_LINES: Final = 12
LONGEST_LINE_CHARACTERS: Final = 300
TAIL_BYTES: Final = 16 << 20
"""Of a log that is shown for the first time: 64 steps of 1,024 ranks."""


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """The newest steps of all ranks, S steps by R ranks; NaN where a rank said nothing."""

    steps: np.ndarray[Any, np.dtype[np.int64]]  # of shape (S,), ascending
    # of shape (S, R): seconds a step, between two step lines of the same rank. All that happens between them is in it,
    # such as a checkpoint. The first line of a launch has none
    step_time_s: np.ndarray[Any, np.dtype[np.float64]]
    memory_gib: np.ndarray[Any, np.dtype[np.float64]]  # of shape (R,): what its newest line shows

    @property
    def median_step_s(self) -> float:
        """Over all steps and ranks; NaN where no rank has printed two steps."""
        known = self.step_time_s[np.isfinite(self.step_time_s)]
        return float(np.median(known)) if len(known) else math.nan

    @classmethod
    def empty(cls) -> RankTable:
        """Of one rank that has said nothing."""
        return LogTail(Path()).table(1)


class LogTail:
    """What ranks printed about their newest steps, and the last other lines, of a log that is still being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._rest = -1, b""
        self._step_time_s: dict[int, dict[int, float]] = {}  # by step, then by rank; the column made first goes first
        self._last: dict[int, LogLine] = {}  # step line of each rank
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    def poll(self) -> None:
        """Read what was appended since the last call, at first the end of it."""
        try:
            file = open_regular(self._path)
        except OSError:
            return
        with file:
            size = self._path.stat().st_size
            if not 0 <= self._offset <= size:  # never read, or truncated
                self._offset, self._rest = max(0, size - TAIL_BYTES), b""
            file.seek(self._offset)
            block = self._rest + file.read()
            self._offset = file.tell()
        cut = block.rfind(b"\n") + 1
        self._rest = block[cut:]
        for line in scan(block[:cut]):
            if line.rank != NO_RANK and line.kind in ("start", "step"):
                self._add(line)
        self._lines.extend(_last_lines(block[:cut]))

    @property
    def lines(self) -> list[str]:
        """The last :data:`KEPT_LINES` lines that are not a rank's step line, oldest first, as they may be shown."""
        # Together, because a key may have several lines; and cut afterwards, because half a key is not recognised.
        shown = without_secrets("\n".join(line.decode(errors="replace") for line in self._lines))
        return [line[:LONGEST_LINE_CHARACTERS] for line in shown.splitlines()]

    def table(self, ranks: int) -> RankTable:
        """Return the newest :data:`KEPT_STEPS` steps of the ranks 0 to ``ranks`` − 1."""
        steps = sorted(self._step_time_s)
        rows = [_by_rank(self._step_time_s[step], ranks) for step in steps]
        memory = {rank: line.values.get("memory_gib", math.nan) for rank, line in self._last.items()}
        return RankTable(
            steps=np.array(steps, dtype=np.int64),
            step_time_s=np.array(rows, dtype=np.float64).reshape(-1, ranks),
            memory_gib=_by_rank(memory, ranks),
        )

    def _add(self, line: LogLine) -> None:
        """Take one line; each rank's come in the order in which it printed them."""
        last = self._last.get(line.rank)
        if line.kind == "start" or (last and line.step <= last.step):  # trained again: the restart is part of no step
            for later in [step for step in self._step_time_s if step >= line.step]:
                self._step_time_s[later].pop(line.rank, None)
                if not self._step_time_s[later]:
                    del self._step_time_s[later]
            last = None
        elif last and last.kind == "step" and line.time > last.time:
            if line.step not in self._step_time_s and len(self._step_time_s) == KEPT_STEPS:
                del self._step_time_s[next(iter(self._step_time_s))]
            time_s = (line.time - last.time) / (line.step - last.step)
            self._step_time_s.setdefault(line.step, {})[line.rank] = time_s
        if line.kind == "step":
            self._last[line.rank] = line
        elif line.rank in self._last:  # what follows is no step after the last one, whose memory is still the newest
            self._last[line.rank] = self._last[line.rank]._replace(kind="start", step=-1)


def _last_lines(block: bytes) -> list[bytes]:
    """The last lines that are not of a step; a block may have 100,000, of which a dozen are kept."""
    newest: list[bytes] = []
    for line in reversed(block.rsplit(b"\n", 1024)[-1024:]):
        if line.strip() and not (b"step:" in line and b"loss:" in line):
            written_last = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]  # of a progress bar
            newest.append(written_last[: 16 * LONGEST_LINE_CHARACTERS])
            if len(newest) == KEPT_LINES:
                break
    return newest[::-1]


@dataclass(frozen=True, kw_only=True)
class RunNow:
    """Where one run is, by its last logged step; a number that it has not logged yet is NaN."""

    name: str
    arm: str
    seed: int | None  # None where the experiment cannot be read
    # as its `status.json` says; a loss or gradient norm that is not finite is its reason until there is another
    status: Status
    step: int  # 0 before the first
    steps: int  # that are planned, 0 where the experiment cannot be read
    loss: float  # in nats per token
    tps: float  # tokens per second per GPU
    memory_gib: float  # of the fullest rank
    step_time_s: float  # over the last two logged steps
    segments: int  # launches that logged a step

    @property
    def done(self) -> float:
        """Trained part of the planned steps; 0 where these are not known."""
        return self.step / self.steps if self.steps else 0.0

    @property
    def left_s(self) -> float:
        """Seconds to the last step at the pace of the last two; NaN unless the run trains."""
        # By the last two steps and not the mean, which holds compilation and checkpoints.
        return self.step_time_s * (self.steps - self.step) if self.status.state is State.RUNNING else math.nan


class RunFollower:
    """One run directory, read on at every poll."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._metrics, self._log = MetricsTail(run.path / metrics.FILE), LogTail(run.log)
        self._records: list[dict[str, Any]] = []  # of trained steps
        self._rows: pd.DataFrame | None = None
        self._seen: list[Any] = []
        self._seed: int | None = None
        try:
            experiment = run.experiment
        except BadInput:  # damaged, or written by another version of moelab
            self._arm, self._steps, self.ranks, self.model = run.name.split("/")[-3], 0, 1, ""
        else:
            self._arm, self._seed, self._steps = experiment.arm, experiment.seed, experiment.steps
            # The label has the experiment's own dimensions.
            self.ranks, self.model = experiment.world_size, experiment.model_label
        self._status, self._failure = run.status, ""
        self.now = self._now()

    @property
    def rows(self) -> pd.DataFrame:
        """Metrics table, in which a step that was repeated after a restart stands once."""
        if self._rows is None:
            columns = read_of(self._records).columns
            self._rows = merge_segments(metrics_table(columns, run=self.run.name, arm=self._arm, seed=self._seed))
        return self._rows

    @property
    def tail(self) -> list[str]:
        """Last lines of the log beside the step lines."""
        self._log.poll()
        return self._log.lines

    @property
    def rank_table(self) -> RankTable:
        """The newest steps of all ranks."""
        self._log.poll()
        return self._log.table(self.ranks)

    def poll(self) -> bool:
        """Read what is new; tell whether anything is."""
        # Of 256 runs most have nothing new: three questions to the file system for each, and no file is opened.
        seen = [_version(path) for path in (self._metrics.path, self.run.path / STATUS_FILE, self.run.log)]
        if seen == self._seen:
            return False
        before, self._seen = self._seen or [None] * 3, seen
        if seen[0] != before[0]:
            self._add(self._metrics.poll())
        if seen[1] != before[1]:
            self._status = self.run.status
            if seen[0] is None and self._status.state.is_final:  # a run of an earlier version, in its log alone
                read, _ = numbers_of(self.run, self._status)
                rows = read.rows[["segment", "step", *VALUE_COLUMNS]]
                self._add([{str(name): value for name, value in row.items()} for row in rows.to_dict("records")])
        self.now = self._now()
        return True

    def _add(self, records: list[dict[str, Any]]) -> None:
        new = [record for record in records if "validation_loss" not in record]
        if new:
            self._records += new
            self._rows = None
            if any(not math.isfinite(record.get(name) or 0.0) for record in new for name in ("loss", "grad_norm")):
                read = read_of(self._records)
                # A loss that is not finite stops the run; a gradient norm alone may not.
                self._failure = read.reason or grad_norm_finding(read.grad_norm_not_finite, read.rows) or ""

    def _now(self) -> RunNow:
        status = self._status
        if self._failure and not status.reason:
            status = replace(status, reason=self._failure)
        last = self._records[-1] if self._records else {}
        numbers = {name: last.get(name) for name in ("loss", "tps", "memory_gib")}
        return RunNow(
            name=self.run.name,
            arm=self._arm,
            seed=self._seed,
            status=status,
            step=int(last.get("step", 0)),
            steps=self._steps,
            **{name: math.nan if value is None else value for name, value in numbers.items()},
            step_time_s=_pace_s(self._records[-2:]),
            segments=last.get("segment", -1) + 1,
        )


def _version(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file's content; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class StudyFollower:
    """All runs at or below a path, the newest attempt at each arm and seed.

    The path need not exist yet: a job that waits makes its folder when it starts.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path.absolute()
        self.runs: list[RunFollower] = []
        self._clock, self._found_at = clock, -math.inf

    @property
    def all_final(self) -> bool:
        """Whether there are runs, and nothing more will happen to any of them."""
        return bool(self.runs) and all(one.now.status.state.is_final for one in self.runs)

    @property
    def rows(self) -> pd.DataFrame:
        """Metrics table of all runs."""
        return joined_rows(self.runs)

    def poll(self) -> list[RunFollower]:
        """Read what is new; return the runs of which anything is."""
        if self._clock() - self._found_at >= FIND_INTERVAL_S:
            known = {one.run.path: one for one in self.runs}
            newest = {run.path.parent: run for run in directory.find(self.path)}  # attempts are named by their time
            self.runs = [known.get(run.path) or RunFollower(run) for run in newest.values()]
            self._found_at = self._clock()
        return [one for one in self.runs if one.poll()]

    def ask(self, scheduler: Callable[[Sequence[RunDir]], Sequence[Status]]) -> str:
        """Have the status files brought up to date; the next poll reads them.

        Returns:
            Why the scheduler could not find out the status of a run: a reason that its file does not have. Else an
            empty text.
        """
        runs = [one.run for one in self.runs]
        pairs = zip(runs, scheduler(runs), strict=True)
        return next((now.reason for run, now in pairs if now.reason and now.reason != run.status.reason), "")


def _pace_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Seconds a step between the last two records, if they are of one launch."""
    if len(records) < 2 or records[0]["segment"] != records[1]["segment"]:
        return math.nan
    first, last = records
    steps = last["step"] - first["step"]
    seconds = (last.get("time") or math.nan) - (first.get("time") or math.nan)
    return float(seconds / steps) if steps > 0 else math.nan


def _by_rank(values: Mapping[int, float], ranks: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    by_rank = np.full(ranks, np.nan)
    for rank, value in values.items():
        if rank < ranks:
            by_rank[rank] = value
    return by_rank


def format_seconds(seconds: float) -> str:
    """A duration for a person.

    >>> [format_seconds(seconds) for seconds in (0.4, 59.6, 200, 3599.7, 36_061)]
    ['0 s', '1 min 0 s', '3 min 20 s', '1 h 0 min', '10 h 1 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
