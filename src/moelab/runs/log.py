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
for the few words that such lines start with, and nothing is decoded or split before that. Every line is placed by its
own time stamp among the segments known so far, so it does not matter in which order the ranks' lines arrived.

A step line is ``step: N  loss: …`` and any further ``name: value``. TorchTitan's (``train.py``, later
``components/metrics.py``):

=========================  =====================================================
since                      fields
=========================  =====================================================
15 March 2024 (9f5a56d)    loss, memory, wps
20 March 2024 (e5d1b89)    loss, memory, wps, mfu
25 Nov. 2024 (4d182a1)     loss, memory, tps, mfu
18 Feb. 2025 (4e32663)     loss, memory, tps, tflops, mfu
25 June 2025 (a85e2a5)     loss, grad_norm, memory, tps, tflops, mfu
28 Feb. 2026 (f113706)     as before, ``mfu: N/A`` in FP8 and MXFP8
15 July 2025 (53f6642)     ``validate step: N``, loss, memory, tps
=========================  =====================================================

A line that was cut or torn in two by another rank's output would show ``7.2`` where ``7.20000`` was meant. One that
ends in its ``mfu`` is whole. One that ends in another field counts if the line ends there, and if most lines of its
launch are no longer.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.runs.log_text import BLOCK_BYTES, WRAPPED_BYTES, LogBytes, NotALog, unwrapped, what_was_seen
from moelab.runs.table import (
    REPORTED_NAN,
    Columns,
    MetricsRead,
    metrics_read,
    metrics_table,
    separate_runs,
)

#: What a step or validation line measures, in the order of :attr:`LogLine.values`; ``time`` is seconds since the epoch,
#: ``last`` the place of its last field in :data:`_ORDER`.
FIELDS: Final = ("loss", "grad_norm", "tps", "tflops", "mfu", "memory_gib", "memory_pct", "lr", "time", "last")
_INDEX: Final = {name: index for index, name in enumerate(FIELDS)}
LOSS, TPS, MEMORY_GIB, MEMORY_PCT, TIME, LAST = (
    _INDEX[name] for name in ("loss", "tps", "memory_gib", "memory_pct", "time", "last")
)
_FILLS: Final = {
    **{name.encode(): index for name, index in _INDEX.items() if index < MEMORY_GIB},
    b"wps": TPS, b"memory": MEMORY_GIB, b"peak_memory": MEMORY_GIB, b"lr": _INDEX["lr"],
}  # fmt: skip
_GRAD_NORM: Final = _INDEX["grad_norm"]
_ORDER: Final = (b"loss", b"grad_norm", b"lr", b"peak_memory", b"memory", b"wps", b"tps", b"tflops", b"mfu")
_WHOLE: Final = len(_ORDER) - 1.0
_GIB: Final = {b"KiB": 2**-20, b"MiB": 2**-10, b"GiB": 1, b"TiB": 2**10} | {
    unit: factor / 2**30 for unit, factor in ((b"KB", 1e3), (b"MB", 1e6), (b"GB", 1e9), (b"TB", 1e12))
}
_THOUSANDS: Final = {b"k": 1e3, b"K": 1e3, b"M": 1e6}
#: Stored in place of the negative number that a pipeline rank without the loss prints.
NO_LOSS: Final = -1.0
#: The rank of a line without a prefix such as ``[rank3]:``.
NO_RANK: Final = -1

_NAN: Final = math.nan
_MINUS, _ESCAPE = b"-\x1b"
# Possessive quantifiers: a torn line must fail at once instead of trying every way to share out its blanks.
_BLANK = rb"[ \t\xa0\xc2]*+"  # the last two are UTF-8's no-break space, which web pages put in
# Colours, 24-bit ones too; a JSON string, `cat -v`, rsyslog or a paste has another sign or none for the escape.
_COLOUR = rb"(?:\x1b|\\u001[bB]|\\x1b|\\033|\^\[|#033)?+\[[0-9;:]*+[mK]"
_GAP = _BLANK + rb"(?:(?:" + _COLOUR + rb"|[|,;])" + _BLANK + rb")*+"
_NUMBER = rb"[-+]?+(?:[\d.,]++(?:[eE][-+]?+\d++)?+|(?i:nan|inf(?:inity)?+))"  # `float` then refuses what is none


def _field(group: bytes) -> bytes:
    """A pattern of ``name: 1,234.5GiB(12.3%)``, its parts in groups that open with ``group``."""
    number = group + _NUMBER + rb")" + _BLANK
    value = number + group + rb"[KMGT]i?+B|%|[kKM])?+(?:" + _BLANK + rb"\(" + _BLANK + number + rb"%\))?+"
    name = group + rb"(?:[A-Za-z]|(?<=[\s|,;m])_)[\w./%-]*+):"
    return _GAP + name + _BLANK + rb"(?:" + value + rb"(?!:\d)|(?i:n/a|none|--?+))"


_FIELD = re.compile(_field(rb"("))
# All fields of today's line at once, which is twice as fast: a log of 256 ranks has hardly another.
_USUAL = rb"".join(
    _GAP + name + rb":" + _BLANK + rb"(" + _NUMBER + rb")" + unit
    for name, unit in (
        (b"loss", b""),
        (b"grad_norm", b""),
        (b"memory", rb"GiB\((" + _NUMBER + rb")%\)"),
        (b"tps", b""),
        (b"tflops", b""),
    )
)
_STEP_NUMBER = rb"\d{1,15}+"  # what fits a table; a longer one is damage
_STEP = re.compile(
    rb"step:" + _BLANK + rb"(" + _STEP_NUMBER + rb")(?:" + _BLANK + rb"/" + _BLANK + rb"\d++)?+(?:"
    + _USUAL + _GAP + rb"mfu:" + _BLANK + rb"(?:(" + _NUMBER + rb")%|N/A)"
    + rb"|(?=" + _GAP + rb"loss:)((?:" + _field(rb"(?:") + rb")++))"
)  # fmt: skip
_LINE_END = re.compile(_GAP + rb"(?:[\r\n\"\\]|(?<=[\sm])[^\r\n]{0,2000}+[\r\n])")
_GROUPED = re.compile(rb"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_START = re.compile(rb"Training ?starts ?at ?step ?(" + _STEP_NUMBER + rb")(?=[\s.,\x1b\"\\])")
_NOT_FINITE = re.compile(rb"Loss is not finite \(global_avg_loss=(-?\w++)\) at step (" + _STEP_NUMBER + rb")\.")
_LOSS_RANK = re.compile(rb"Pipeline Parallel loss is not visible\.[^\n]{0,40}?rank (\d{1,9})")
_MESH = re.compile(
    rb"parallelism: pp=(\d{1,6}), dp_replicate=(\d{1,6}), dp_shard=(\d{1,6}), cp=(\d{1,6}), tp=(\d{1,6})"
    rb"|device mesh with \[b?'pp'[^\n\]]*\], \[([\d, ]{1,60})\]"
)
_PREFIX = re.compile(rb"\[[A-Za-z_]*+(\d++)\]:")
_STAMP = re.compile(
    rb"(?<![\d.])(?:(?P<date>\d{4}[-/]\d\d[-/]\d\d|\d\d/\d\d/\d\d(?:\d\d)?+|[A-Z][a-z]{2} [ \d]\d)[T_, ]*+"
    rb"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?+ ?(?P<zone>Z|UTC|[-+]\d\d:?\d\d)?+"
    rb"|(?P<epoch>1\d{9}(?:\d{3}){0,3}+(?:\.\d{1,9})?+)(?![\d.:]))"
)
_LONGEST_PREFIX_BYTES: Final = 200


#: One line that matters: its kind (``step``, ``validation``, ``start`` or ``failure``), its step, the values of its
#: :data:`FIELDS` and the rank in its prefix (that of step and start lines alone). A plain tuple, because millions are
#: made.
LogLine: TypeAlias = tuple[str, int, tuple[float, ...], int]
#: The clocks of a cluster's nodes, and the moments at which its ranks print, differ by less; a restart takes longer.
CLOCK_SKEW_S: Final = 3.0
SAME_LOSS: Final = 0.0005
"""All ranks print the same mean loss; two that differ by more, in nats, are of two runs."""
#: The newest step printed again after this many seconds comes from a restart, not from a rank that was slow to print.
REPEATED_STEP_S: Final = 30.0
_WIDTH: Final = len(FIELDS)
SORTED_LINES: Final = 4_000
"""So many lines are brought into the order of their times: logs are pasted together the newest first."""
_LONGEST_LINE_BYTES: Final = 1 << 16


def read_log(source: str | Path | Iterable[str | bytes], *, mend: bool = True) -> MetricsRead:
    """Read a whole log, in memory that depends on the number of its rows and not on its size.

    The table of a log without a step line is empty: its job may have just started.

    Args:
        source: path of a log, as :class:`moelab.runs.log_text.LogBytes` takes it, or its lines as text or bytes.
        mend: look for lines that someone wrapped; nobody did in a log that a job of ours writes.

    Raises:
        NotALog: there is no such file, or it is packed in a way that cannot be unpacked here.

    >>> line = "step: 10  loss:  7.20000  memory: 1.00GiB(1.00%)  tps: 4,000  mfu: N/A"
    >>> read_log([line]).rows[["step", "loss", "tps"]].values.tolist()
    [[10.0, 7.2, 4000.0]]
    """
    log = _Log(source, mend=mend)
    return metrics_read(*log.segments.columns(), notes=log.notes)


def read_runs(path: Path, settings: Sequence[Mapping[str, str]] = ()) -> list[MetricsRead]:
    """Read a log from elsewhere, which may hold several runs one after the other.

    ``settings`` are those of each launch in it, in the order of the file, as far as they are known.

    Raises:
        NotALog: as :func:`read_log`, or no step line is in it.
        BadInput: the lines of two runs are mixed, so that nothing says which is whose.
    """
    log = _Log(path)
    if not any(segment.rows.steps for segment in log.segments.all):
        seen = what_was_seen(log.beginning())
        raise NotALog(
            f"{path}: no TorchTitan step line ('step: N  loss: …  memory: …  tps: …  mfu: …') found"
            f"{seen and '; '}{seen}. Give the output of a TorchTitan training (its stdout, from the rank that logs)"
        )
    if two := log.segments.disagreements:
        step, (first, second) = next(iter(two.items()))
        raise BadInput(
            f"{path}: two runs are mixed in it: {len(two)} steps have two losses each, such as {first:g} and "
            f"{second:g} at step {step}. Give the log of each run by itself"
        )
    return separate_runs(*log.segments.columns(), source=path, settings=settings, notes=log.notes)


class _Log:
    """A log read once, and again without the line breaks that someone put into it if its step lines are broken."""

    def __init__(self, source: str | Path | Iterable[str | bytes], *, mend: bool = True) -> None:
        self._content: LogBytes | list[bytes]
        if not isinstance(source, str | Path):
            lines = (line.encode(errors="replace") if isinstance(line, str) else line for line in source)
            self._content = [line if line.endswith(b"\n") else line + b"\n" for line in lines]
        elif Path(source).is_file():
            self._content = LogBytes(Path(source))
        else:
            raise NotALog(f"{source}: no such file. Give the path of a log that TorchTitan wrote.")
        self._wrapped = False
        # Fields found, against those of as many whole lines: a wrapped log has lost some of each.
        self.segments, fields, could_be = _segments(self.blocks())
        limit = WRAPPED_BYTES if could_be else BLOCK_BYTES
        if mend and (fields < could_be or not could_be) and len(self.beginning()) < limit:
            self._wrapped = True
            segments, more, _ = _segments(self.blocks())
            self._wrapped = more > fields
            self.segments = segments if self._wrapped else self.segments
        self.notes = self.segments.notes
        if isinstance(self._content, LogBytes) and self._content.damage:
            self.notes = (self._content.damage, *self.notes)

    def blocks(self) -> Iterator[bytes]:
        """Yield whole lines."""
        if self._wrapped:
            yield unwrapped(self.beginning()) + b"\n"
            return
        unfinished = UnfinishedLine()
        for block in self._content:
            yield unfinished.complete(block)
        yield unfinished.rest + b"\n"

    def beginning(self) -> bytes:
        """Return at most :data:`WRAPPED_BYTES` of it."""
        text = bytearray()
        for block in self._content:
            text += block
            if len(text) >= WRAPPED_BYTES:
                break
        return bytes(text[:WRAPPED_BYTES])


def _segments(blocks: Iterable[bytes]) -> tuple[Segments, int, int]:
    """Return what is read, how many fields it has as a measure, and how many there were if every line was whole."""
    fields = lines = 0

    def placed() -> Iterator[LogLine]:
        nonlocal fields, lines
        for block in blocks:
            lines += max(block.count(b"step:"), block.count(b"loss:"))
            for line in scan(block):
                if line[0] == "validation":
                    fields += len(_ORDER)
                elif line[0] == "step":
                    fields += int(line[2][LAST]) + 1
                yield line

    segments, placed_lines = Segments(), placed()
    while batch := list(islice(placed_lines, SORTED_LINES)):
        for line in _in_time_order(batch):
            segments.add(line)
    return segments, fields, lines * len(_ORDER)


def _in_time_order(lines: list[LogLine]) -> list[LogLine]:
    """Sort lines, unless ranks that print at about the same time, or a clock set back, are all that is out of order."""
    times = np.array([line[2][TIME] for line in lines])
    # A line without a time stays behind the one that it follows.
    times = np.nan_to_num(times[np.maximum.accumulate(np.where(np.isnan(times), 0, np.arange(len(times))))])
    steps = np.array([line[1] if line[0] == "step" else math.inf for line in lines])
    # In autumn local time goes back by an hour while the steps go on.
    goes_back = steps < np.maximum.accumulate(np.where(np.isinf(steps), 0, steps))
    if not np.any(goes_back & (np.maximum.accumulate(times) - times > CLOCK_SKEW_S)):
        return lines
    return [lines[index] for index in np.argsort(times, kind="stable")]


def scan(block: bytes) -> Iterator[LogLine]:
    """Yield the lines that matter among whole ones, in the order of the file.

    Any encoding that keeps ASCII will do, with any line ends and rank prefixes.
    """
    rare = deque(sorted(_rare_lines(block)))
    for match in _STEP.finditer(block):
        while rare and rare[0][0] < match.start():
            yield rare.popleft()[1]
        values = _values(block, match)
        if values is None:
            continue
        if block[max(0, match.start() - 9) : match.start()].rstrip().endswith(b"validate"):
            yield "validation", int(match[1]), values, NO_RANK
        else:
            yield "step", int(match[1]), values, _rank(block, match.start())
    for _, line in rare:
        yield line


class StepRows:
    """Rows sorted by step, one for all ranks: the values of the rank with the loss, the memory of the fullest rank."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.last_step = -1
        self.disagreements: dict[int, tuple[float, float]] = {}

    def add(self, step: int, values: tuple[float, ...]) -> bool:
        """Merge one rank's :data:`FIELDS` into the row of its step and tell whether that changed anything."""
        if step > self.last_step:
            self.last_step = step
            self.steps.append(step)
            self.values.extend(values)
            return True
        index = len(self.steps) - 1 if step == self.last_step else bisect_left(self.steps, step)
        if self.steps[index] == step:
            return self._merge(step, index * _WIDTH, values)
        self.steps.insert(index, step)
        self.values[index * _WIDTH : index * _WIDTH] = array("d", values)
        return True

    def row(self, step: int) -> tuple[float, ...]:
        """Return the values of a step that is here."""
        start = bisect_left(self.steps, step) * _WIDTH
        return tuple(self.values[start : start + _WIDTH])

    def _merge(self, step: int, start: int, new: tuple[float, ...]) -> bool:
        values = self.values
        loss, last = values[start], values[start + LAST]
        if loss >= 0 <= new[LOSS] and last == new[LAST] and abs(loss - new[LOSS]) > SAME_LOSS:
            self.disagreements[step] = (loss, new[LOSS])  # all ranks print the same mean: this is another run
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
        old = self.values[start : start + _WIDTH]
        lacks_loss = new[LOSS] < 0
        if lacks_loss != (old[LOSS] < 0):
            return not lacks_loss
        if new[LAST] != old[LAST]:
            return new[LAST] > old[LAST]
        return new[TIME] < old[TIME] or (new[TIME] == old[TIME] and new[TPS] < old[TPS])

    def without_torn(self) -> StepRows:
        """Return the rows whose line goes as far as most do, or is whole for certain."""
        lasts = self.values[LAST::_WIDTH]
        usual = max(Counter(lasts).items(), key=lambda item: (item[1], item[0]), default=(0.0, 0))[0]
        if all(last >= usual for last in lasts):
            return self
        kept = StepRows()
        for step, last in zip(self.steps, lasts, strict=True):
            if last >= usual:
                kept.add(step, self.row(step))
        return kept


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
        self.failure = min(self.failure or (step, loss), (step, loss), key=lambda failure: failure[0])


class Segments:
    """All segments of one log, oldest first."""

    def __init__(self) -> None:
        self.all = [Segment(0, -math.inf)]
        self._loss_rank: int | None = None

    def add(self, line: LogLine) -> Segment | None:
        """Place one line; return the segment whose row of the line's step it created or changed, if it did."""
        kind, step, values, _rank = line
        time = values[TIME]
        segment = self.all[-1]
        if time < segment.opened_at:
            # A late line of an earlier launch; the first segment opened before any time.
            segment = next(s for s in reversed(self.all) if not time < s.opened_at - CLOCK_SKEW_S)
        if kind == "step":
            return self._add_step(segment, step, values)
        if kind == "start":
            if segment.is_over_at(step, time):
                segment = self._after(segment, time, step)
            if segment.start_step is None:
                segment.start_step = step
        elif kind == "validation":
            segment.validation.add(step, values)
        elif kind == "loss rank":
            self._loss_rank = step
        else:
            segment.fail(step, values[LOSS])
        return None

    @property
    def disagreements(self) -> dict[int, tuple[float, float]]:
        """Both losses by step, where most steps of a launch have two."""
        disagreements: dict[int, tuple[float, float]] = {}
        for rows in (segment.rows for segment in self.all):
            if 1 < len(rows.disagreements) >= len(rows.steps) / 2:
                disagreements |= rows.disagreements
        return disagreements

    def columns(self) -> tuple[Columns, Columns, dict[int, tuple[int, float]]]:
        """Return everything so far as :func:`moelab.runs.table.metrics_read` takes it."""
        rows = _numbered([(segment.index, segment.rows.without_torn()) for segment in self.all])
        validation = _numbered([(segment.index, segment.validation) for segment in self.all])
        return rows, validation, {segment.index: segment.failure for segment in self.all if segment.failure}

    def rows_at(self, keys: Sequence[tuple[int, int]]) -> pd.DataFrame:
        """Return the rows of these segments and steps."""
        rows = StepRows()
        for number, (segment, step) in enumerate(keys):
            rows.add(number, self.all[segment].rows.row(step))
        numbers = np.array(keys, dtype="int64").reshape(-1, 2)
        return metrics_table({"segment": numbers[:, 0], "step": numbers[:, 1], **_columns(rows)})

    @property
    def notes(self) -> tuple[str, ...]:
        """Why there is no loss, if no rank printed one."""
        losses = [segment.rows.values[LOSS::_WIDTH] for segment in self.all]
        if not any(map(len, losses)) or any(not loss < 0 for of_segment in losses for loss in of_segment):
            return ()
        rank = "the first rank of the last stage, world size / PP · (PP − 1)"
        which = rank if self._loss_rank is None else f"rank {self._loss_rank}, {rank}"
        return (
            "no loss: under pipeline parallelism a rank without the last stage prints -1 instead. Give the log of "
            f"{which}, or add that rank to LOG_RANK",
        )

    def _add_step(self, segment: Segment, step: int, values: tuple[float, ...]) -> Segment | None:
        time = values[TIME]
        if step <= segment.rows.last_step and segment.goes_back(step, time):
            segment = self._after(segment, time, None)
        if time < segment.first_time:
            segment.first_time = time
        if not math.isfinite(values[LOSS]):
            segment.fail(step, values[LOSS])
        return segment if segment.rows.add(step, values) else None

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
        if not cut and len(block) > _LONGEST_LINE_BYTES:  # a log in one string of JSON
            cut = block.rfind(b'"') + 1
        self.rest = block[cut:][-_LONGEST_LINE_BYTES:]
        return block[:cut]


def _numbered(stores: Sequence[tuple[int, StepRows]]) -> Columns:
    joined = StepRows()
    for _, rows in stores:
        joined.steps += rows.steps
        joined.values += rows.values
    segment = np.repeat([number for number, _ in stores], [len(rows.steps) for _, rows in stores])
    return {"segment": segment, "step": np.array(joined.steps, dtype="int64"), **_columns(joined)}


def _columns(rows: StepRows) -> Columns:
    values = np.array(rows.values).reshape(-1, _WIDTH)
    columns = {name: values[:, index] for name, index in _INDEX.items()}
    return columns | {"loss": np.where(columns["loss"] < 0, np.nan, columns["loss"])}


def _values(block: bytes, match: re.Match[bytes]) -> tuple[float, ...] | None:
    """Return a line's :data:`FIELDS`; None for one that was torn."""
    _, loss, grad_norm, memory_gib, memory_pct, tps, tflops, mfu, text = match.groups()
    if text is None:
        try:
            return (
                _loss(loss),
                _reported(float(grad_norm)),
                float(tps.replace(b",", b"")),
                float(tflops.replace(b",", b"")),
                float(mfu) if mfu else _NAN,
                float(memory_gib),
                float(memory_pct),
                _NAN,
                _time(block, match.start()),
                _WHOLE,
            )
        except ValueError:  # torn by another rank's output in the middle of a number
            return None
    fields = _FIELD.findall(text)
    name, number, unit, _ = fields[-1]
    whole = name == b"mfu" and (unit == b"%" or not number)
    if not whole and not _LINE_END.match(block, match.end()):
        return None
    values = [_NAN] * _WIDTH
    try:
        for name, number, unit, percent in fields:
            index = _FILLS.get(name)
            if index is None or not number:
                continue
            if index == MEMORY_GIB:
                if unit == b"%":
                    values[MEMORY_PCT] = _float(number)
                    continue
                values[MEMORY_GIB] = _float(number) * _GIB[unit]
                values[MEMORY_PCT] = _float(percent) if percent else _NAN
            elif index == LOSS:
                values[LOSS] = _loss(number)
            else:
                values[index] = _float(number) * _THOUSANDS.get(unit, 1.0)
    except (KeyError, ValueError):
        return None
    if b"grad_norm" in text:
        values[_GRAD_NORM] = _reported(values[_GRAD_NORM])
    values[TIME] = _time(block, match.start())
    values[LAST] = _ORDER.index(fields[-1][0]) if fields[-1][0] in _ORDER else len(_ORDER)
    if name == b"mfu" and not whole:
        values[LAST] -= 0.5  # its digits may be cut off, if most lines have the sign behind them
    return tuple(values)


def _reported(grad_norm: float) -> float:
    return REPORTED_NAN if math.isnan(grad_norm) else grad_norm


def _float(text: bytes) -> float:
    text = text.rstrip(b",")
    if b"," not in text:
        return float(text)
    if not _GROUPED.fullmatch(text):
        raise ValueError(text)
    return float(text.replace(b",", b""))


def _rare_lines(block: bytes) -> Iterator[tuple[int, LogLine]]:
    # The substring tests are several times faster than a search for the pattern and nearly always say no.
    if b"Training starts at step" in block or b"Trainingstartsatstep" in block:
        for match in _START.finditer(block):
            values = (*[_NAN] * TIME, _time(block, match.start()), _NAN)
            yield match.start(), ("start", int(match[1]), values, _rank(block, match.start()))
    if b"Pipeline Parallel loss is not visible" in block:
        for match in _LOSS_RANK.finditer(block):
            yield match.start(), ("loss rank", int(match[1]), (_NAN,) * _WIDTH, NO_RANK)
    if b" mesh with " in block:
        for match in _MESH.finditer(block):
            degrees = match[6] or b" ".join(match.groups()[:5])
            pipeline, *others = (int(degree) for degree in re.findall(rb"\d+", degrees))
            # TorchTitan, `_get_metrics_rank`: the first rank of the last stage.
            yield match.start(), ("loss rank", math.prod(others) * (pipeline - 1), (_NAN,) * _WIDTH, NO_RANK)
    if b"Loss is not finite" in block:
        for match in _NOT_FINITE.finditer(block):
            # A traceback may quote the line of source, where a name stands for the number.
            loss = float(match[1]) if match[1].lower().lstrip(b"-") in (b"nan", b"inf") else _NAN
            yield match.start(), ("failure", int(match[2]), (loss, *[_NAN] * (_WIDTH - 1)), NO_RANK)


def _loss(text: bytes) -> float:
    # The sentinel is -1 summed over micro-steps and ranks; a validation divides that by the tokens, hence "-0.0000".
    value = float(text)
    if text[0] != _MINUS:
        return value
    return NO_LOSS if math.isfinite(value) else _NAN


def _time(block: bytes, position: int) -> float:
    """Return the last time stamp before ``position`` on its line, in seconds since the epoch, or NaN."""
    level = block.rfind(b" - INFO - ", position - 48 if position > 48 else 0, position)
    message = level + 10
    if level >= 0 and (message == position or block[message] == _ESCAPE):  # TorchTitan's own, a fast way
        comma = block.rfind(b",", level - 64 if level > 64 else 0, level)
        with suppress(ValueError):
            return _second(block[comma - 19 : comma]) + int(block[comma + 1 : comma + 4]) / 1000
    start = _line_start(block, position)
    stamps = list(_STAMP.finditer(block, start, position))
    if not stamps and block[start : start + 1] == b"{":  # a container's JSON line has the time after the message
        end = block.find(b"\n", position, position + _LONGEST_LINE_BYTES)
        stamps = list(_STAMP.finditer(block, position, max(end, position)))
    try:
        return _moment(stamps[-1]) if stamps else _NAN
    except ValueError:
        return _NAN


def _moment(stamp: re.Match[bytes]) -> float:
    date, clock, part, zone, epoch = (text.decode("ascii", "replace") for text in stamp.groups(b""))
    if epoch:
        whole, _, fraction = epoch.partition(".")
        return float(f"{whole[:10]}.{whole[10:]}{fraction}")
    date = date.replace("/", "-")
    if date[0].isalpha():  # syslog says no year: the last one in which that day is not in the future
        now = datetime.now()
        day = datetime.strptime(f"{now.year} {date}", "%Y %b %d")
        date = f"{day.year - (day > now + timedelta(days=1))}{day:-%m-%d}"
    elif date[2] == "-":  # month, day, year
        date = f"{date[6:] if len(date) == 10 else f'20{date[6:]}'}-{date[:5]}"
    zone = {"Z": "+00:00", "UTC": "+00:00"}.get(zone, zone)
    return datetime.fromisoformat(f"{date} {clock}{zone}").timestamp() + float(f"0.{part or 0}")


def _line_start(block: bytes, position: int) -> int:
    """Return where the line at ``position`` starts, or where one could that is not too long."""
    earliest = max(0, position - _LONGEST_PREFIX_BYTES)
    return max(block.rfind(b"\n", earliest, position), block.rfind(b"\r", earliest, position), earliest - 1) + 1


def _rank(block: bytes, position: int) -> int:
    """Return the rank in torchrun's prefix of the line at ``position``, or :data:`NO_RANK`."""
    ranks = _PREFIX.findall(block, _line_start(block, position), position)
    return int(ranks[-1]) if ranks else NO_RANK  # the last: two ranks' output may share a line


@lru_cache(maxsize=256)
def _second(stamp: bytes) -> float:
    # All ranks print a step within a second or two. The stamp is the local time of the machine that trained.
    return datetime.fromisoformat(stamp.decode("ascii", "replace")).timestamp()
