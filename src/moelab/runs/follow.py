"""Follows the runs at a path while they train: each byte of a log is read once, and what is shown is kept in memory.

Nothing is stored beside the run directories. After a restart of the process that watches, one read of the logs brings
everything back, so there is no second copy that could be wrong. Of several attempts at one arm and seed the newest is
followed; :mod:`moelab.runs.collect` reads the others.

Beside the rows, a live view shows what each rank printed about its newest steps, and a log's last lines. A rank is
known by the number in torchrun's prefix, ``[rank3]:``. The launcher and the job script of moelab make that the
**global** rank; in other logs of several nodes it is the local one, and ranks of the same number look like one. Both
keep a bounded amount however long the log is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.privacy import without_secrets
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.log import MEMORY_GIB, NO_RANK, TIME, LogLine, Segments, UnfinishedLine, scan
from moelab.runs.log_text import BLOCK_BYTES
from moelab.runs.status import State, Status
from moelab.runs.table import MetricsRead, grad_norm_finding, joined_rows, merge_segments, metrics_read, metrics_table

FIND_INTERVAL_S: Final = 10.0
"""New run directories are looked for this often: a walk over a shared filesystem costs more than reading a log on."""
KEPT_STEPS: Final = 64
KEPT_LINES: Final = 12
LONGEST_LINE_CHARACTERS: Final = 300
_LINES_LOOKED_AT: Final = 1024


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
        return RankSteps().table(1)


class RankSteps:
    """Collects step lines by rank; each rank's lines must come in the order in which it printed them."""

    def __init__(self) -> None:
        self._step_time_s: dict[int, dict[int, float]] = {}  # by step, then by rank; the column made first goes first
        self._last: dict[int, tuple[int, float]] = {}
        self._memory_gib: dict[int, float] = {}

    def add(self, line: LogLine) -> None:
        """Take one line; those that are no step or start of a known rank are passed over."""
        kind, step, values, rank = line
        if rank == NO_RANK:
            return
        if kind == "start":
            self._start(rank, step)
        elif kind == "step":
            self._add_step(rank, step, values)

    def table(self, ranks: int) -> RankTable:
        """Return the newest :data:`KEPT_STEPS` steps of the ranks 0 to ``ranks`` − 1."""
        steps = sorted(self._step_time_s)
        rows = [_by_rank(self._step_time_s[step], ranks) for step in steps]
        return RankTable(
            steps=np.array(steps, dtype=np.int64),
            step_time_s=np.array(rows, dtype=np.float64).reshape(-1, ranks),
            memory_gib=_by_rank(self._memory_gib, ranks),
        )

    def _add_step(self, rank: int, step: int, values: tuple[float, ...]) -> None:
        time = values[TIME]
        last_step, last_time = self._last.get(rank, (step, time))
        if (step, time) == (last_step, last_time) and rank in self._last:
            return  # an unfinished line that came again with its end
        if step < last_step or (step == last_step and rank in self._last):
            self._start(rank, step)
            last_step = step
        self._last[rank] = (step, time)
        self._memory_gib[rank] = values[MEMORY_GIB]
        if step > last_step and time > last_time:
            if step not in self._step_time_s and len(self._step_time_s) == KEPT_STEPS:
                del self._step_time_s[next(iter(self._step_time_s))]
            self._step_time_s.setdefault(step, {})[rank] = (time - last_time) / (step - last_step)

    def _start(self, rank: int, step: int) -> None:
        """Forget what the rank trains again, and the time of its last line: the restart is no part of a step."""
        self._last.pop(rank, None)
        # A copy: steps that no rank has a time of any more are taken out below.
        for later in [number for number in self._step_time_s if number >= step]:
            self._step_time_s[later].pop(rank, None)
            if not self._step_time_s[later]:
                del self._step_time_s[later]


class LogTail:
    """The last :data:`KEPT_LINES` lines that are not a rank's step line, as they may be shown."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    @property
    def lines(self) -> list[str]:
        """The lines as text, oldest first."""
        # Together, because a key may have several lines; and cut afterwards, because half a key is not recognised.
        shown = without_secrets("\n".join(line.decode(errors="replace") for line in self._lines))
        return [line[:LONGEST_LINE_CHARACTERS] for line in shown.splitlines()]

    def add(self, block: bytes) -> None:
        """Take whole lines of a log."""
        newest: list[bytes] = []
        # From the end: a block may have 100,000 lines, of which a dozen are kept.
        for line in reversed(block.rsplit(b"\n", _LINES_LOOKED_AT)[-_LINES_LOOKED_AT:]):
            if line.strip() and not (b"step:" in line and b"loss:" in line):
                written_last = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]  # of a progress bar
                newest.append(written_last[: 16 * LONGEST_LINE_CHARACTERS])
                if len(newest) == KEPT_LINES:
                    break
        self._lines.extend(reversed(newest))


class LogFollower:
    """Reads a log that is still being written, each byte once.

    The file need not exist yet. If it was truncated or replaced it is read from its beginning, and the rows so far are
    kept. The last line is used as soon as it is complete, with or without its line end.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0  # bytes of the file that were read
        self._inode = -1
        self._unfinished = UnfinishedLine()
        self.rank_steps, self.tail = RankSteps(), LogTail()  # newest steps by rank; last lines beside the step lines
        self._segments, self._changed = Segments(), set[tuple[int, int]]()

    def poll(self) -> pd.DataFrame:
        """Read what was appended since the last call.

        Returns:
            The rows that are new or that another rank's line has completed since the last call, ordered by segment and
            step. Where ``(segment, step)`` was returned before, the new row replaces the old one.
        """
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._read_on(file)
        keys = sorted(self._changed)
        self._changed.clear()
        return self._segments.rows_at(keys)

    def result(self) -> MetricsRead:
        """Return everything read so far, as :func:`read_log` without ``mend`` would."""
        return metrics_read(*self._segments.columns(), notes=self._segments.notes)

    def _read_on(self, file: BinaryIO) -> None:
        inode, size = (stat := Path(file.name).stat()).st_ino, stat.st_size
        if size < self.offset or inode != self._inode:  # truncated, or another file by this name
            self.offset, self._inode, self._unfinished = 0, inode, UnfinishedLine()
        file.seek(self.offset)
        while block := file.read(BLOCK_BYTES):
            self.offset += len(block)
            lines = self._unfinished.complete(block)
            self._take(lines)
            self.tail.add(lines)
        # Harmless if the line is read again with its end: the same values merge into the same row.
        self._take(self._unfinished.rest)

    def _take(self, lines: bytes) -> None:
        for line in scan(lines):
            if segment := self._segments.add(line):
                self._changed.add((segment.index, line[1]))
            self.rank_steps.add(line)


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
        self._log = LogFollower(run.log)
        self._seed: int | None = None
        try:
            experiment = run.experiment
        except BadInput:  # damaged, or written by another version of moelab
            self._arm, self._steps, self.ranks, self.model = run.name.split("/")[-3], 0, 1, ""
        else:
            self._arm, self._seed, self._steps = experiment.arm, experiment.seed, experiment.steps
            # The label has the experiment's own dimensions.
            self.ranks, self.model = experiment.world_size, experiment.model_label
        self.rows = joined_rows([])  # metrics table, in which a step that was repeated after a restart stands once
        self._segments, self._status = 0, run.status
        self._failure: str | None = None
        self.now = self._now()

    @property
    def tail(self) -> list[str]:
        """Last lines of the log beside the step lines."""
        return self._log.tail.lines

    @property
    def rank_table(self) -> RankTable:
        """The newest steps of all ranks."""
        return self._log.rank_steps.table(self.ranks)

    def poll(self) -> bool:
        """Read what is new; tell whether anything is."""
        offset = self._log.offset
        has_rows = bool(len(self._log.poll()))
        if has_rows:
            read = self._log.result()
            self.rows = merge_segments(metrics_table(read.columns, run=self.run.name, arm=self._arm, seed=self._seed))
            self._segments = read.segments
            # A loss that is not finite stops the run; a gradient norm alone may not.
            self._failure = read.reason or grad_norm_finding(read.grad_norm_not_finite, read.rows)
        status = self.run.status
        is_other = status != self._status
        if has_rows or is_other:
            self._status = status
            self.now = self._now()
        return has_rows or is_other or offset != self._log.offset

    def _now(self) -> RunNow:
        status = self._status
        if self._failure and not status.reason:
            status = replace(status, reason=self._failure)
        names = ("step", "loss", "tps", "memory_gib")
        last = {name: float(self.rows[name].iloc[-1]) if len(self.rows) else math.nan for name in names}
        return RunNow(
            name=self.run.name,
            arm=self._arm,
            seed=self._seed,
            status=status,
            step=0 if math.isnan(last["step"]) else int(last["step"]),
            steps=self._steps,
            loss=last["loss"],
            tps=last["tps"],
            memory_gib=last["memory_gib"],
            step_time_s=_pace_s(self.rows),
            segments=self._segments,
        )


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


def _pace_s(rows: pd.DataFrame) -> float:
    """Seconds a step between the last two rows of one launch."""
    last = rows.iloc[-2:]
    if len(last) < 2 or last["segment"].nunique() > 1:
        return math.nan
    return float(last["time"].diff().iloc[-1] / last["step"].diff().iloc[-1])


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
