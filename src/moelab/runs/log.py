"""Read TorchTitan's log into the metrics table.

The log of a job is one file that every rank of every node, and every launch after a requeue, appends to. Two things
have to be undone.

*Ranks.* A step is printed once by each rank that logs. torchrun alone prefixes a line with the **local** rank, which
repeats on every node, so the rows do not depend on the prefix (:class:`moelab.runs.follow.RankSteps` does). Under
pipeline parallelism the ranks without the loss print a negative number instead. One step gets one row: the values of
the rank that has the loss (the earliest line if several have it), the memory of the fullest rank; if no rank has the
loss it is NaN.

*Segments.* One launch is one segment. By the time stamps on the lines, wherever they stand in the file:

1. ``Training starts at step N`` opens a segment only if it is later than a step row of the current one. Every rank
   prints that line, and clocks differ, so with the same N as before it has to be more than 3 s later
   (:data:`CLOCK_SKEW_S`); with another N any later moment will do, as one launch has one N.
2. Without such lines, a step opens a segment if it was trained already, that is if a lower step is printed more than
   3 s after the step that followed it, or the newest step more than 30 s after it was first printed. An older line
   that merely arrives late is neither.
3. A line belongs to the last segment that had begun at its time.

Lines without a time stamp go by their order in the file: a start after a row, or a step lower than the last one.

The time stamp is local time without a zone; ``time`` assumes the zone of the machine that reads.

A log of 256 ranks is gigabytes of text of which a few lines matter, so a whole block of the file is searched at once
for the few words that such lines start with, and nothing is decoded or split before that. A line counts only if it is
complete: a step line ends in ``mfu: …%`` or ``mfu: N/A``, and one that was cut or torn in two by another rank's output
would show ``7.2`` where ``7.20000`` was meant. Colour codes may stand between any two fields. Every line is placed by
its own time stamp among the segments known so far, so it does not matter in which order the ranks' lines arrived.

The formats are those of torchtitan 0.3.0 (``components/metrics.py``, ``tools/logging.py``, ``trainer.py``); older
releases, which print neither ``grad_norm`` nor ``tflops``, are read too.
"""

from __future__ import annotations

import gzip
import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeAlias, cast

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.runs.table import (
    REPORTED_NAN,
    MetricsRead,
    failure_reason,
    grad_norms_not_finite,
    metrics_table,
    validation_table,
)

#: What a step or validation line measures, in the order of :attr:`LogLine.values`; ``time`` is seconds since the epoch.
FIELDS: Final = ("loss", "grad_norm", "tps", "tflops", "mfu", "memory_gib", "memory_pct", "time")
LOSS, TPS, MEMORY_GIB, MEMORY_PCT, TIME = (
    FIELDS.index(name) for name in ("loss", "tps", "memory_gib", "memory_pct", "time")
)
#: Stored in place of the negative number that a pipeline rank without the loss prints.
NO_LOSS: Final = -1.0
#: The rank of a line without a prefix such as ``[rank3]:``.
NO_RANK: Final = -1

_NAN: Final = math.nan
_MINUS, _ESCAPE = b"-\x1b"
# Possessive quantifiers: a torn line must fail at once instead of trying every way to share out its blanks.
_BLANK = rb"[ \t]*+"
_GAP = _BLANK + rb"(?:\x1b\[[0-9;:]*+m" + _BLANK + rb")*+"  # with colours, 24-bit ones too
# Deliberately loose, and twice as fast as an exact pattern; `float` then refuses what is not a number.
_NUMBER = _BLANK + rb"([-\d.,naifNAIF]++)"
_STEP_NUMBER = rb"\d{1,15}+"  # what fits a table; a longer one is damage
_LOSS = _BLANK + rb"(" + _STEP_NUMBER + rb")" + _GAP + rb"loss:" + _NUMBER
_GRAD_NORM = rb"(?:" + _GAP + rb"grad_norm:" + _NUMBER + rb")?+"
_MEMORY = _GAP + rb"memory:" + _NUMBER + rb"GiB\(" + _NUMBER + rb"%\)"
_TPS = _GAP + rb"tps:" + _NUMBER
_TFLOPS = rb"(?:" + _GAP + rb"tflops:" + _NUMBER + rb")?+"
_MFU = _GAP + rb"mfu:(?:" + _NUMBER + rb"%|" + _BLANK + rb"N/A)"
_STEP = re.compile(rb"step:" + _LOSS + _GRAD_NORM + _MEMORY + _TPS + _TFLOPS + _MFU)
_VALIDATION = re.compile(rb"validate step:" + _LOSS + _MEMORY + _TPS + rb"(?=[\s\x1b])")
_START = re.compile(rb"Training starts at step (" + _STEP_NUMBER + rb")(?=[\s.\x1b])")
_NOT_FINITE = re.compile(rb"Loss is not finite \(global_avg_loss=(-?\w++)\) at step (" + _STEP_NUMBER + rb")\.")
_PREFIX = re.compile(rb"\[[A-Za-z_]*+(\d++)\]:")
_LONGEST_PREFIX_BYTES: Final = 160


#: One line that matters: its kind (``step``, ``validation``, ``start`` or ``failure``), its step, the values of its
#: :data:`FIELDS` and the rank in its prefix (that of step and start lines alone). A plain tuple, because millions are
#: made.
LogLine: TypeAlias = tuple[str, int, tuple[float, ...], int]
#: The clocks of a cluster's nodes, and the moments at which its ranks print, differ by less; a restart takes longer.
CLOCK_SKEW_S: Final = 3.0
#: The newest step printed again after this many seconds comes from a restart, not from a rank that was slow to print.
REPEATED_STEP_S: Final = 30.0
_WIDTH: Final = len(FIELDS)
BLOCK_BYTES: Final = 1 << 20
_LONGEST_LINE_BYTES: Final = 1 << 16


class NotALog(BadInput):
    """The file does not exist or has no TorchTitan step line."""


def read_log(source: str | Path | Iterable[str | bytes], *, allow_empty: bool = False) -> MetricsRead:
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
    reader = LogReader()
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


def scan(block: bytes) -> Iterator[LogLine]:
    """Yield the lines of ``block`` that matter, in the order of the file.

    Args:
        block: whole lines of a log, any encoding that keeps ASCII, with any line ends and rank prefixes.
    """
    position = 0
    for start, line in sorted(_rare_lines(block)):
        yield from _step_lines(block, position, start)
        yield line
        position = start
    yield from _step_lines(block, position, len(block))


class StepRows:
    """Rows sorted by step, one for all ranks: the values of the rank with the loss, the memory of the fullest rank."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.last_step = -1

    def add(self, step: int, values: tuple[float, ...]) -> bool:
        """Merge one rank's line into the row of its step and tell whether that changed anything.

        Args:
            step: training step, counted from 1.
            values: the line's :data:`FIELDS`.
        """
        if step > self.last_step:
            self.last_step = step
            self.steps.append(step)
            self.values.extend(values)
            return True
        index = len(self.steps) - 1 if step == self.last_step else bisect_left(self.steps, step)
        if self.steps[index] == step:
            return self._merge(index * _WIDTH, values)
        self.steps.insert(index, step)
        self.values[index * _WIDTH : index * _WIDTH] = array("d", values)
        return True

    def row(self, step: int) -> tuple[float, ...]:
        """Return the values of a step that is here."""
        start = bisect_left(self.steps, step) * _WIDTH
        return tuple(self.values[start : start + _WIDTH])

    def _merge(self, start: int, new: tuple[float, ...]) -> bool:
        values = self.values
        memory_gib, memory_pct = values[start + MEMORY_GIB], values[start + MEMORY_PCT]
        wins, is_fuller = self._wins(start, new), new[MEMORY_GIB] > memory_gib
        if wins:
            values[start : start + _WIDTH] = array("d", new)
        if wins or is_fuller:
            values[start + MEMORY_GIB] = max(memory_gib, new[MEMORY_GIB])
            values[start + MEMORY_PCT] = max(memory_pct, new[MEMORY_PCT])
        return wins or is_fuller

    def _wins(self, start: int, new: tuple[float, ...]) -> bool:
        # Every rank prints its own tps: the earliest line wins, so that the order of arrival does not matter.
        lacks_loss = new[LOSS] < 0
        if lacks_loss != (self.values[start + LOSS] < 0):
            return not lacks_loss
        time = self.values[start + TIME]
        return new[TIME] < time or (new[TIME] == time and new[TPS] < self.values[start + TPS])


class Segment:
    """What one launch of the job logged."""

    def __init__(self, index: int, opened_at: float, start_step: int | None = None) -> None:
        self.index = index
        self.opened_at = opened_at
        self.start_step = start_step
        self.first_time = math.inf
        self.rows = StepRows()
        self.validation = StepRows()
        self.failure: tuple[int, float] | None = None

    def goes_back(self, step: int, time: float) -> bool:
        """Tell whether a step that is not new here was trained again rather than printed late by another rank."""
        steps, values = self.rows.steps, self.rows.values
        if not steps:
            return False
        if step == self.rows.last_step:
            latest = values[TIME - _WIDTH] + REPEATED_STEP_S
        else:  # a rank prints a step before it can join the next one: no late line is younger than the next step's
            latest = values[bisect_right(steps, step) * _WIDTH + TIME] + CLOCK_SKEW_S
        if math.isnan(time) or math.isnan(latest):
            return step < self.rows.last_step
        return time > latest

    def is_over_at(self, start_step: int, time: float) -> bool:
        """Tell whether a "Training starts" line at ``time`` belongs to a later launch than this one."""
        if self.rows.last_step < 0:
            return False
        if math.isnan(time) or math.isinf(self.first_time):
            return True
        same_launch = self.start_step in (None, start_step)
        return time > self.first_time + (CLOCK_SKEW_S if same_launch else 0.0)

    def fail(self, step: int, loss: float) -> None:
        """Remember the earliest step at which the loss was not finite."""
        if self.failure is None or step < self.failure[0]:
            self.failure = (step, loss)


class Segments:
    """All segments of one log, oldest first."""

    def __init__(self) -> None:
        self.all = [Segment(0, -math.inf)]

    def add(self, line: LogLine) -> Segment | None:
        """Place one line; return the segment whose row of the line's step it created or changed, if it did."""
        kind, step, values, _rank = line
        time = values[TIME]
        segment = self.all[-1]
        if time < segment.opened_at:
            segment = self._at(time)
        if kind == "step":
            return self._add_step(segment, step, values)
        if kind == "start":
            self._add_start(segment, step, time)
        elif kind == "validation":
            segment.validation.add(step, values)
        else:
            segment.fail(step, values[LOSS])
        return None

    def logged(self) -> list[Segment]:
        """Return the segments that logged a step or a validation."""
        return [segment for segment in self.all if segment.rows.last_step >= 0 or segment.validation.last_step >= 0]

    def _add_step(self, segment: Segment, step: int, values: tuple[float, ...]) -> Segment | None:
        time = values[TIME]
        if step <= segment.rows.last_step and segment.goes_back(step, time):
            segment = self._after(segment, time, None)
        if time < segment.first_time:
            segment.first_time = time
        if not math.isfinite(values[LOSS]):
            segment.fail(step, values[LOSS])
        return segment if segment.rows.add(step, values) else None

    def _add_start(self, segment: Segment, step: int, time: float) -> None:
        if segment.is_over_at(step, time):
            segment = self._after(segment, time, step)
        if segment.start_step is None:
            segment.start_step = step

    def _at(self, time: float) -> Segment:
        return next(s for s in reversed(self.all) if not time < s.opened_at - CLOCK_SKEW_S)

    def _after(self, segment: Segment, time: float, start_step: int | None) -> Segment:
        if segment is self.all[-1]:
            self.all.append(Segment(len(self.all), time, start_step))
        else:  # another rank's later lines came first: that segment began earlier than they showed
            self.all[segment.index + 1].opened_at = min(time, self.all[segment.index + 1].opened_at)
        return self.all[segment.index + 1]


class UnfinishedLine:
    """The bytes after the last line end, kept until the rest of their line arrives."""

    def __init__(self) -> None:
        self.rest = b""

    def complete(self, block: bytes) -> bytes:
        """Return the whole lines so far; progress bars end lines with a carriage return alone."""
        block = self.rest + block
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        self.rest = block[cut:][-_LONGEST_LINE_BYTES:]
        return block[:cut]


class LogReader:
    """Collects what blocks of a log contain, and which rows changed if each line is wanted too.

    Args:
        on_line: takes every line that matters.
    """

    def __init__(self, on_line: Callable[[LogLine], None] | None = None) -> None:
        self._segments, self._on_line = Segments(), on_line
        self._changed: set[tuple[int, int]] = set()

    def feed(self, block: bytes) -> None:
        """Take whole lines."""
        add = self._segments.add
        if self._on_line is None:
            for line in scan(block):
                add(line)
            return
        for line in scan(block):
            if segment := add(line):
                self._changed.add((segment.index, line[1]))
            self._on_line(line)

    def changed_rows(self) -> pd.DataFrame:
        """Return the rows that changed since the last call."""
        keys = sorted(self._changed)
        rows = StepRows()
        for number, (segment, step) in enumerate(keys):
            rows.add(number, self._segments.all[segment].rows.row(step))
        self._changed.clear()
        numbers = np.array(keys, dtype="int64").reshape(-1, 2)
        return metrics_table({"segment": numbers[:, 0], "step": numbers[:, 1], **_columns([rows])})

    def result(self) -> MetricsRead:
        """Everything so far."""
        logged = self._segments.logged()
        failure = self._segments.all[-1].failure
        columns = _numbered(logged, [segment.rows for segment in logged])
        return MetricsRead(
            rows=metrics_table(columns),
            validation=validation_table(_numbered(logged, [segment.validation for segment in logged])),
            segments=len(logged),
            reason=failure_reason(self._segments.all[-1].index, *failure) if failure else None,
            grad_norm_not_finite=grad_norms_not_finite(columns),
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


def _blocks(source: str | Path | Iterable[str | bytes]) -> Iterator[bytes]:
    if not isinstance(source, str | Path):
        yield from (_as_bytes(line) for line in source)
        return
    path = Path(source)
    if not path.is_file():
        raise NotALog(f"{path}: no such file. Give the path of a log that TorchTitan wrote.")
    unfinished = UnfinishedLine()
    for block in read_bytes(path):
        yield unfinished.complete(block)
    yield unfinished.rest


def read_bytes(path: Path) -> Iterator[bytes]:
    """Blocks of a log, unpacked if it ends in ``.gz``; of one whose end was cut off, all that is there."""
    opener = gzip.open if path.suffix == ".gz" else open
    with cast("BufferedReader", opener(path, "rb")) as file, suppress(EOFError):
        while block := file.read1(BLOCK_BYTES):
            yield block


def _as_bytes(line: str | bytes) -> bytes:
    line = line.encode(errors="replace") if isinstance(line, str) else line
    return line if line.endswith(b"\n") else line + b"\n"


def _step_lines(block: bytes, start: int, end: int) -> Iterator[LogLine]:
    for match in _STEP.finditer(block, start, end):
        step, loss, grad_norm, memory_gib, memory_pct, tps, tflops, mfu = match.groups()
        try:
            values = (
                _loss(loss),
                _reported(float(grad_norm)) if grad_norm else _NAN,
                float(tps.replace(b",", b"")),
                float(tflops.replace(b",", b"")) if tflops else _NAN,
                float(mfu) if mfu else _NAN,
                float(memory_gib),
                float(memory_pct),
                _time(block, match.start()),
            )
        except ValueError:  # torn by another rank's output in the middle of a number
            continue
        yield "step", int(step), values, _rank(block, match.start())


def _rare_lines(block: bytes) -> Iterator[tuple[int, LogLine]]:
    # The substring tests are several times faster than a search for the pattern and nearly always say no.
    if b"Training starts at step" in block:
        for match in _START.finditer(block):
            values = (*[_NAN] * TIME, _time(block, match.start()))
            yield match.start(), ("start", int(match[1]), values, _rank(block, match.start()))
    if b"validate step:" in block:
        for match in _VALIDATION.finditer(block):
            try:
                yield match.start(), ("validation", int(match[1]), _validation_values(block, match), NO_RANK)
            except ValueError:
                continue
    if b"Loss is not finite" in block:
        for match in _NOT_FINITE.finditer(block):
            loss = float(match[1]) if match[1].lower().lstrip(b"-") in (b"nan", b"inf") else _NAN
            yield match.start(), ("failure", int(match[2]), (loss, *[_NAN] * TIME), NO_RANK)


def _validation_values(block: bytes, match: re.Match[bytes]) -> tuple[float, ...]:
    _, loss, memory_gib, memory_pct, tps = match.groups()
    tokens_per_s = float(tps.replace(b",", b""))
    time = _time(block, match.start())
    return (_loss(loss), _NAN, tokens_per_s, _NAN, _NAN, float(memory_gib), float(memory_pct), time)


def _loss(text: bytes) -> float:
    # The sentinel is -1 summed over micro-steps and ranks; a validation divides that by the tokens, hence "-0.0000".
    value = float(text)
    if text[0] != _MINUS:
        return value
    return NO_LOSS if math.isfinite(value) else _NAN


def _reported(grad_norm: float) -> float:
    return REPORTED_NAN if math.isnan(grad_norm) else grad_norm


def _time(block: bytes, position: int) -> float:
    """Return the time stamp that stands just before ``position`` on its line, in seconds since the epoch, or NaN."""
    level = block.rfind(b" - INFO - ", position - 48 if position > 48 else 0, position)
    message = level + 10
    if level < 0 or (message != position and block[message] != _ESCAPE):
        return _NAN
    comma = block.rfind(b",", level - 64 if level > 64 else 0, level)
    try:
        return _second(block[comma - 19 : comma]) + int(block[comma + 1 : comma + 4]) / 1000
    except ValueError:
        return _NAN


def _rank(block: bytes, position: int) -> int:
    """Return the rank in torchrun's prefix of the line at ``position``, or :data:`NO_RANK`."""
    earliest = max(0, position - _LONGEST_PREFIX_BYTES)
    start = max(block.rfind(b"\n", earliest, position), block.rfind(b"\r", earliest, position), earliest - 1) + 1
    found = _PREFIX.findall(block, start, position)
    return int(found[-1]) if found else NO_RANK  # the last: two ranks' output may share a line


@lru_cache(maxsize=256)
def _second(stamp: bytes) -> float:
    # All ranks print a step within a second or two. The stamp is the local time of the machine that trained.
    return datetime.fromisoformat(stamp.decode("ascii", "replace")).timestamp()
