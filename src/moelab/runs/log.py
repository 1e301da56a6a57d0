"""Read TorchTitan's log into the metrics table: whole, as a stream, or while it is being written.

The log of a job is one file that every rank of every node, and every launch after a requeue, appends to. Two things
have to be undone.

*Ranks.* A step is printed once by each rank that logs. torchrun alone prefixes a line with the **local** rank, which
repeats on every node, so the rows do not depend on the prefix (:mod:`moelab.runs.rank_steps` does). Under pipeline
parallelism the ranks without the loss print a negative number instead. One step gets one row: the values of the rank
that has the loss (the earliest line if several have it), the memory of the fullest rank; if no rank has the loss it is
NaN.

*Segments.* One launch is one segment. By the time stamps on the lines, wherever they stand in the file:

1. ``Training starts at step N`` opens a segment only if it is later than a step row of the current one. Every rank
   prints that line, and clocks differ, so with the same N as before it has to be more than 3 s later
   (:data:`~moelab.runs.segments.CLOCK_SKEW_S`); with another N any later moment will do, as one launch has one N.
2. Without such lines, a step opens a segment if it was trained already, that is if a lower step is printed more than
   3 s after the step that followed it, or the newest step more than 30 s after it was first printed. An older line
   that merely arrives late is neither.
3. A line belongs to the last segment that had begun at its time.

Lines without a time stamp go by their order in the file: a start after a row, or a step lower than the last one.

The time stamp is local time without a zone; ``time`` assumes the zone of the machine that reads.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.runs.log_lines import FIELDS, LOSS, parameter_count, scan
from moelab.runs.metric_names import REPORTED_NAN
from moelab.runs.rank_steps import LogTail, RankSteps
from moelab.runs.segments import Segment, Segments, StepRows
from moelab.runs.table import MetricsRead, failure_reason, grad_norms_not_finite, metrics_table, validation_table

_BLOCK_BYTES: Final = 1 << 20
_LONGEST_LINE_BYTES: Final = 1 << 16


class NotALog(BadInput):
    """The file does not exist or has no TorchTitan step line."""


@dataclass(frozen=True, kw_only=True)
class LogRead(MetricsRead):
    """A log's rows, validations, segments and failure, and the model's size.

    Attributes:
        model_parameters: total parameters that TorchTitan printed, or None.
    """

    model_parameters: int | None


class StepRow(NamedTuple):
    """One step of one segment; the fields are the metrics table's columns of the same name."""

    segment: int
    step: int
    loss: float
    grad_norm: float
    tps: float
    tflops: float
    mfu: float
    memory_gib: float
    memory_pct: float
    time: float


def read_log(source: str | Path | Iterable[str | bytes], *, allow_empty: bool = False) -> LogRead:
    """Read a whole log, in memory that depends on the number of its rows and not on its size.

    Args:
        source: path of a log (``.gz`` too), or its lines as text or bytes.
        allow_empty: return an empty table for a log without a step line, as of a job that has just started.

    Raises:
        NotALog: there is no such file, or no step line in it and ``allow_empty`` is False.

    Example:
        >>> line = "step: 10  loss:  7.20000  memory: 1.00GiB(1.00%)  tps: 4,000  mfu: N/A"
        >>> read_log([line]).rows[["step", "loss", "tps"]].values.tolist()
        [[10.0, 7.2, 4000.0]]
    """
    reader = _Reader()
    for block in _blocks(source):
        reader.feed(block)
    read = reader.result()
    if read.rows.empty and not allow_empty:
        name = source if isinstance(source, str | Path) else "the given lines"
        raise NotALog(
            f"{name}: no TorchTitan step line ('step: N  loss: …  memory: …  tps: …  mfu: …') found. "
            "Give the output of a TorchTitan training (its stdout, from the rank that logs)"
        )
    return read


def iter_rows(lines: Iterable[str | bytes], *, look_ahead: int = 64) -> Iterator[StepRow]:
    """Yield the rows of a log of any length, each once, oldest first, while reading it.

    A row is held back until ``look_ahead`` later rows are there, so that slower ranks can complete it; what a rank
    prints after that is dropped. A loss that no rank had is NaN.

    Args:
        lines: lines of a log as text or bytes; an open file will do.
        look_ahead: rows to hold, at least 1.
    """
    segments = Segments()
    for line in lines:
        for found in scan(_as_bytes(line)):
            segments.add(found)
        yield from _popped(segments, look_ahead)
    yield from _popped(segments, 0)


class LogFollower:
    """Reads a log that is still being written, each byte once.

    The file need not exist yet. If it was truncated or replaced it is read from its beginning, and the rows so far are
    kept. The last line is used as soon as it is complete, with or without its line end.

    Attributes:
        offset: bytes of the file that were read.
        rank_steps: newest steps by rank.
        tail: last lines beside the step lines.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self._inode = -1
        self._unfinished = _UnfinishedLine()
        self.rank_steps, self.tail = RankSteps(), LogTail()
        self._reader = _Reader(self.rank_steps)

    def poll(self) -> pd.DataFrame:
        """Read what was appended since the last call.

        Returns:
            The rows that are new or that another rank's line has completed since the last call, ordered by segment and
            step. Where ``(segment, step)`` was returned before, the new row replaces the old one.
        """
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._read_on(file)
        return self._reader.changed_rows()

    def result(self) -> LogRead:
        """Return everything read so far, as :func:`read_log` with ``allow_empty`` would."""
        return self._reader.result()

    def _read_on(self, file: BinaryIO) -> None:
        inode, size = (stat := Path(file.name).stat()).st_ino, stat.st_size
        if size < self.offset or inode != self._inode:
            self.offset, self._inode, self._unfinished = 0, inode, _UnfinishedLine()
        file.seek(self.offset)
        while block := file.read(_BLOCK_BYTES):
            self.offset += len(block)
            lines = self._unfinished.complete(block)
            self._reader.feed(lines)
            self.tail.add(lines)
        # Harmless if the line is read again with its end: the same values merge into the same row.
        self._reader.feed(self._unfinished.rest)


class _UnfinishedLine:
    """The bytes after the last line end, kept until the rest of their line arrives."""

    def __init__(self) -> None:
        self.rest = b""

    def complete(self, block: bytes) -> bytes:
        """Return the whole lines so far; progress bars end lines with a carriage return alone."""
        block = self.rest + block
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        self.rest = block[cut:][-_LONGEST_LINE_BYTES:]
        return block[:cut]


class _Reader:
    """Collects what blocks of a log contain; with ``rank_steps`` also which rows changed, and each rank's steps."""

    def __init__(self, rank_steps: RankSteps | None = None) -> None:
        self._segments, self._rank_steps = Segments(), rank_steps
        self._model_parameters: int | None = None
        self._changed: set[tuple[int, int]] = set()

    def feed(self, block: bytes) -> None:
        add = self._segments.add
        if self._model_parameters is None:
            self._model_parameters = parameter_count(block)
        if self._rank_steps is None:
            for line in scan(block):
                add(line)
            return
        for line in scan(block):
            if segment := add(line):
                self._changed.add((segment.index, line[1]))
            self._rank_steps.add(line)

    def changed_rows(self) -> pd.DataFrame:
        """Return the rows that changed since the last call."""
        keys = sorted(self._changed)
        rows = StepRows()
        for number, (segment, step) in enumerate(keys):
            rows.add(number, self._segments.all[segment].rows.row(step))
        self._changed.clear()
        numbers = np.array(keys, dtype="int64").reshape(-1, 2)
        return metrics_table({"segment": numbers[:, 0], "step": numbers[:, 1], **_columns([rows])})

    def result(self) -> LogRead:
        logged = self._segments.logged()
        failure = self._segments.all[-1].failure
        columns = _numbered(logged, [segment.rows for segment in logged])
        return LogRead(
            rows=metrics_table(columns),
            validation=validation_table(_numbered(logged, [segment.validation for segment in logged])),
            segments=len(logged),
            reason=failure_reason(self._segments.all[-1].index, *failure) if failure else None,
            grad_norm_not_finite=grad_norms_not_finite(columns),
            model_parameters=self._model_parameters,
        )


def _numbered(segments: list[Segment], stores: list[StepRows]) -> dict[str, np.ndarray]:
    numbers = [np.full(len(store.steps), segment.index) for segment, store in zip(segments, stores, strict=True)]
    steps = [np.array(store.steps, dtype="int64") for store in stores]
    empty = np.empty(0, dtype="int64")
    return {"segment": np.concatenate([empty, *numbers]), "step": np.concatenate([empty, *steps]), **_columns(stores)}


def _columns(stores: list[StepRows]) -> dict[str, np.ndarray]:
    values = np.concatenate([np.array(store.values) for store in stores] or [np.empty(0)]).reshape(-1, len(FIELDS))
    columns = {name: values[:, index] for index, name in enumerate(FIELDS)}
    return columns | {"loss": np.where(columns["loss"] < 0, np.nan, columns["loss"])}


def _popped(segments: Segments, keep: int) -> Iterator[StepRow]:
    for segment, step, values in segments.pop_first(keep):
        row = StepRow(segment, step, *values)
        row = row._replace(grad_norm=math.nan) if row.grad_norm == REPORTED_NAN else row
        yield row._replace(loss=math.nan) if values[LOSS] < 0 else row


def _blocks(source: str | Path | Iterable[str | bytes]) -> Iterator[bytes]:
    if not isinstance(source, str | Path):
        yield from (_as_bytes(line) for line in source)
        return
    path = Path(source)
    if not path.is_file():
        raise NotALog(f"{path}: no such file. Give the path of a log that TorchTitan wrote.")
    unfinished = _UnfinishedLine()
    for block in read_bytes(path):
        yield unfinished.complete(block)
    yield unfinished.rest


def read_bytes(path: Path) -> Iterator[bytes]:
    """Blocks of a log, unpacked if it ends in ``.gz``; of one whose end was cut off, all that is there."""
    opener = gzip.open if path.suffix == ".gz" else open
    with cast("BufferedReader", opener(path, "rb")) as file, suppress(EOFError):
        while block := file.read1(_BLOCK_BYTES):
            yield block


def _as_bytes(line: str | bytes) -> bytes:
    line = line.encode(errors="replace") if isinstance(line, str) else line
    return line if line.endswith(b"\n") else line + b"\n"
