"""Read a log that TorchTitan wrote elsewhere into the metrics table.

A step line is ``step: N  loss: …`` and any further ``name: value`` (TorchTitan from its first release to its main of
August 2026, and forks). The log of a job is one file that every rank of every node, and every launch after a requeue,
appends to. Two things have to be undone.

*Ranks.* A step is printed once by each rank that logs, and ranks without the last pipeline stage print a negative
number for the loss. One step gets one row: the values of the rank that has the loss (the earliest line if several have
it), the memory of the fullest rank; if no rank has the loss it is NaN.

*Segments.* One launch is one segment. A launch begins

1. with a ``Training starts at step N`` that is later than a step of the launch before. Every rank prints that line, and
   clocks differ, so with the same N it has to be more than 3 s later;
2. with a step that was trained already: a lower one more than 3 s after the step that followed it was printed, or the
   newest one more than 30 s after it was first printed. Anything else is another rank's late line;
3. in a log without time stamps, with a lower step than the last one.

A launch that begins before an earlier one did, with another loss, is another run.

A log of 256 ranks is gigabytes of text of which a few lines matter, so blocks are searched as bytes, and the lines of
one step are merged as they come. The time stamp is local time without a zone, that of the machine that reads.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from moelab.errors import BadInput
from moelab.runs.log_text import LogBytes, NotALog, plain, unwrapped, what_was_seen
from moelab.runs.table import REPORTED_NAN, VALUE_COLUMNS, Columns, MetricsRead, metrics_read, runs_of_launches

CLOCK_SKEW_S: Final = 3.0
"""The clocks of a cluster's nodes, and the moments at which its ranks print, differ by less; a restart takes longer."""
REPEATED_STEP_S: Final = 30.0
"""The newest step printed again after so many seconds comes from a restart, not from a rank that was slow to print."""
SAME_LOSS: Final = 0.0005
"""All ranks print the same mean loss; two that differ by more, in nats, are of two runs."""
WRAPPED_BYTES: Final = 16 << 20
"""A longer log is no paste, and is not searched for wrapped lines."""
NO_RANK: Final = -1
_COLUMN: Final = {
    **{name.encode(): name for name in ("loss", "grad_norm", "tps", "tflops", "mfu", "lr")},
    b"wps": "tps", b"memory": "memory_gib", b"peak_memory": "memory_gib",
}  # fmt: skip
_GIB: Final = {b"KiB": 2**-20, b"MiB": 2**-10, b"GiB": 1, b"TiB": 2**10} | {
    unit: factor / 2**30 for unit, factor in ((b"KB", 1e3), (b"MB", 1e6), (b"GB", 1e9), (b"TB", 1e12))
}
_THOUSANDS: Final = {b"": 1.0, b"%": 1.0, b"k": 1e3, b"K": 1e3, b"M": 1e6}
# Possessive quantifiers: a torn line must fail at once instead of trying every way to share out its blanks.
_NUMBER: Final = rb"[-+]?+(?:[\d.,]++(?:[eE][-+]?+\d++)?+|(?i:nan|inf(?:inity)?+))"


def _field(group: bytes) -> bytes:
    """A pattern of ``name: 1,234.5GiB(12.3%)``, its parts in groups that open with ``group``."""
    number = group + _NUMBER + rb")[ \t]*+"
    value = number + group + rb"[KMGT]i?+B|%|[kKM])?+(?:[ \t]*+\([ \t]*+" + number + rb"%\))?+(?!:\d)"
    return (
        rb"[ \t|,;]*+" + group + rb"(?:[A-Za-z]|(?<=[\s|,;])_)[\w./%-]*+):[ \t]*+(?:" + value + rb"|(?i:n/a|none|--?+))"
    )


_FIELD: Final = re.compile(_field(rb"("))
_STEP: Final = re.compile(
    rb"step:[ \t]*+(?P<step>\d{1,15}+)(?:[ \t]*+/[ \t]*+\d++)?+"
    rb"(?P<fields>(?=[ \t|,;]*+loss:)(?:" + _field(rb"(?:") + rb")++)"
    rb"(?P<ends>[ \t|]*+(?:[\r\n\"]|(?<=[ \t])[^\r\n]{0,2000}+[\r\n]))?+"
)
_RARE_WORDS: Final = (b"Training", b"is not finite", b"loss is not visible", b"parallelism: pp=")
_RARE: Final = re.compile(
    rb"Training ?+starts ?+at ?+step ?+(?P<start>\d{1,15}+)(?=[\s.,])"
    rb"|Loss is not finite \(global_avg_loss=(?P<loss>-?(?:nan|inf))\) at step (?P<at>\d{1,15}+)\."
    rb"|Pipeline Parallel loss is not visible\.[^\n]{0,40}?rank (?P<visible>\d{1,9})"
    rb"|parallelism: pp=(?P<pp>\d{1,6}), dp_replicate=(?P<others>\d{1,6}, dp_shard=\d{1,6}, cp=\d{1,6}, tp=\d{1,6})"
)
_GROUPED: Final = re.compile(rb"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_RANK: Final = re.compile(rb"\[[A-Za-z_]*+(\d++)\]:")
_STAMP: Final = re.compile(
    rb"(?<![\d.])(?P<date>\d{4}[-/]\d\d[-/]\d\d|\d\d/\d\d/\d\d(?:\d\d)?+)[T_, ]*+"
    rb"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?+ ?(?P<zone>Z|UTC|[-+]\d\d:?\d\d)?+"
)
_LONGEST_PREFIX_BYTES: Final = 200
_LONGEST_LINE_BYTES: Final = 1 << 16


class LogLine(NamedTuple):
    """A line that matters: a ``step`` or a ``validation`` with its values, a ``start``, or a ``failure``."""

    kind: str
    step: int
    values: dict[str, float]  # of `VALUE_COLUMNS`; a negative loss is of a rank that has none
    time: float  # seconds since the epoch, NaN if not known
    rank: int  # in the prefix of the line
    width: float = 0.0  # how many fields the line has


def read_log(source: Path | Iterable[str | bytes]) -> MetricsRead:
    """Read a whole log as one run, in memory that depends on its rows and not on its size; it may have no step.

    Raises:
        NotALog: there is no such file, or it cannot be unpacked here.

    >>> line = "step: 10  loss:  7.20000  memory: 1.00GiB(1.00%)  tps: 4,000  mfu: N/A"
    >>> read_log([line]).rows[["step", "loss", "tps"]].values.tolist()
    [[10.0, 7.2, 4000.0]]
    """
    log = _Log(source)
    return metrics_read(*log.parts(), notes=log.notes)


def read_runs(path: Path, settings: Sequence[Mapping[str, str]] = ()) -> list[MetricsRead]:
    """Read a log that may hold several runs one after the other.

    ``settings`` are those of each launch in it, in the order of the file, as far as they are known.

    Raises:
        NotALog: as :func:`read_log`, or no step line is in it.
        BadInput: the lines of two runs are mixed, so that nothing says which is whose.
    """
    log = _Log(path)
    if not any(launch.rows for launch in log.launches):
        seen = what_was_seen(LogBytes(path).beginning(WRAPPED_BYTES))
        raise NotALog(
            f"{path}: no TorchTitan step line ('step: N  loss: …  memory: …  tps: …  mfu: …') found"
            f"{seen and '; '}{seen}. Give the output of a TorchTitan training (its stdout, from the rank that logs)"
        )
    for launch in log.launches:
        if 1 < len(two := launch.disagreements) >= len(launch.rows) / 2:
            step, (first, second) = next(iter(two.items()))
            raise BadInput(
                f"{path}: two runs are mixed in it: {len(two)} steps have two losses each, such as {first:g} and "
                f"{second:g} at step {step}. Give the log of each run by itself"
            )
    return runs_of_launches(*log.parts(), source=path, settings=settings, notes=log.notes)


def scan(block: bytes) -> Iterator[LogLine]:
    """Yield the lines that matter among whole ones, in the order of the file, with any prefixes and line ends."""
    block = plain(block)
    # A search for a few words is several times faster than one for the pattern, and nearly always says no.
    rare = deque(_RARE.finditer(block) if any(word in block for word in _RARE_WORDS) else ())
    for match in _STEP.finditer(block):
        while rare and rare[0].start() < match.start():
            yield _rare_line(block, rare.popleft())
        if values := _values(match):
            is_validation = block[max(0, match.start() - 9) : match.start()].rstrip().endswith(b"validate")
            place = (_time(block, match.start()), _rank(block, match.start()))
            width = values.pop("width")
            yield LogLine("validation" if is_validation else "step", int(match["step"]), values, *place, width)
    for match in rare:
        yield _rare_line(block, match)


def _rare_line(block: bytes, match: re.Match[bytes]) -> LogLine:
    if match["start"]:
        return LogLine("start", int(match["start"]), {}, _time(block, match.start()), _rank(block, match.start()))
    if match["at"]:
        return LogLine("failure", int(match["at"]), {"loss": float(match["loss"])}, math.nan, NO_RANK)
    if match["visible"]:
        return LogLine("loss rank", int(match["visible"]), {}, math.nan, NO_RANK)
    # TorchTitan, `_get_metrics_rank`: the first rank of the last stage.
    others = math.prod(int(degree) for degree in re.findall(rb"\d+", match["others"]))
    return LogLine("loss rank", others * (int(match["pp"]) - 1), {}, math.nan, NO_RANK)


class _Launch:
    """What one launch logged: rows by step."""

    def __init__(self, start_step: int | None = None) -> None:
        self.start_step = start_step
        self.first_time = math.inf
        self.rows: dict[int, LogLine] = {}
        self.steps: list[int] = []  # ascending
        self.validation: dict[int, LogLine] = {}
        self.failure: tuple[int, float] | None = None
        self.disagreements: dict[int, tuple[float, float]] = {}

    def is_over_at(self, start: LogLine) -> bool:
        """Tell whether a "Training starts" line belongs to a later launch."""
        if not self.rows:
            return False
        if math.isnan(start.time) or math.isinf(self.first_time):
            return True
        is_same = self.start_step in (None, start.step)
        return start.time > self.first_time + (CLOCK_SKEW_S if is_same else 0.0)

    def is_over_with(self, line: LogLine) -> bool:
        """Tell whether a step that is not new here was trained again rather than printed late by another rank."""
        if not self.steps or line.step > self.steps[-1]:
            return False
        if line.step == self.steps[-1]:
            latest = self.rows[line.step].time + REPEATED_STEP_S
        else:  # a rank prints a step before it can join the next one: no late line is younger than the next step's
            latest = self.rows[self.steps[bisect_right(self.steps, line.step)]].time + CLOCK_SKEW_S
        if math.isnan(line.time) or math.isnan(latest):
            return line.step < self.steps[-1]
        return line.time > latest

    def add(self, line: LogLine) -> None:
        if line.kind == "validation":
            self.validation[line.step] = merged(self.validation.get(line.step), line)
            return
        before = self.rows.get(line.step)
        if before and _disagree(before, line):
            self.disagreements[line.step] = (before.values["loss"], line.values["loss"])
        self.rows[line.step] = merged(before, line)
        if before is None:
            insort(self.steps, line.step)
        self.first_time = min(self.first_time, math.inf if math.isnan(line.time) else line.time)
        if not math.isfinite(line.values["loss"]):
            self.fail(line)

    def fail(self, line: LogLine) -> None:
        """Remember the earliest step at which the loss was not finite."""
        failed = (line.step, line.values["loss"])
        self.failure = min(self.failure or failed, failed, key=lambda failure: failure[0])

    def whole_rows(self) -> list[LogLine]:
        """Rows whose line is as long as most are; others were torn."""
        widths = Counter(row.width for row in self.rows.values())
        usual = max(widths.items(), key=lambda item: (item[1], item[0]), default=(0.0, 0))[0]
        return [self.rows[step] for step in self.steps if self.rows[step].width >= usual]


def merged(before: LogLine | None, line: LogLine) -> LogLine:
    """The row of one step from what two ranks printed: that of the loss, and the fullest memory."""
    if before is None:
        return line
    # Every rank prints its own tps: the earliest line wins, so that the order of arrival does not matter.
    first = min(before, line, key=lambda one: (one.values["loss"] < 0, -one.width, one.time, one.values.get("tps", 0)))
    fullest = {
        name: max(one.values.get(name, -1.0) for one in (before, line))
        for name in ("memory_gib", "memory_pct")
        if name in before.values or name in line.values
    }
    return first._replace(values=first.values | fullest)


def _disagree(one: LogLine, other: LogLine) -> bool:
    losses = one.values["loss"], other.values["loss"]
    return min(losses) >= 0 and one.width == other.width and abs(losses[0] - losses[1]) > SAME_LOSS


class _Log:
    """A log read once, and again without the line breaks that someone put into it if its step lines are broken."""

    def __init__(self, source: Path | Iterable[str | bytes]) -> None:
        self.launches: list[_Launch] = []
        self.notes: tuple[str, ...] = ()
        blocks: Iterable[bytes]
        if isinstance(source, Path):
            blocks = log = LogBytes(source)
            beginning = log.beginning
        else:
            texts = (line.encode(errors="replace") if isinstance(line, str) else line for line in source)
            text = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in texts)
            blocks, log, beginning = [text], None, lambda size: text[:size]
        self._loss_rank: int | None = None
        lines, fields, may_be_wrapped = _lines(blocks)
        head = beginning(WRAPPED_BYTES) if may_be_wrapped else b""
        if 0 < len(head) < WRAPPED_BYTES:
            mended, more, _ = _lines([unwrapped(head) + b"\n"])
            lines = mended if more > fields else lines
        self._place(lines)
        if log and log.damage:
            self.notes = (log.damage,)
        if lines_without := self._no_loss():
            self.notes = (*self.notes, lines_without)

    def parts(self) -> tuple[Columns, Columns, dict[int, tuple[int, float]]]:
        """Return what :func:`moelab.runs.table.metrics_read` takes."""
        rows = _columns([(number, row) for number, one in enumerate(self.launches) for row in one.whole_rows()])
        held_out = [(number, row) for number, one in enumerate(self.launches) for row in one.validation.values()]
        return rows, _columns(held_out), {n: one.failure for n, one in enumerate(self.launches) if one.failure}

    def _place(self, lines: list[LogLine]) -> None:
        self.launches = [_Launch()]
        for line in _in_time_order(lines):
            launch = self.launches[-1]
            if line.kind == "start" and launch.is_over_at(line):
                self.launches.append(_Launch(line.step))
            elif line.kind == "start":
                launch.start_step = line.step if launch.start_step is None else launch.start_step
            elif line.kind == "loss rank":
                self._loss_rank = line.step
            elif line.kind == "failure":
                launch.fail(line)
            else:
                if line.kind == "step" and launch.is_over_with(line):
                    self.launches.append(_Launch())
                self.launches[-1].add(line)

    def _no_loss(self) -> str:
        """Say why there is no loss, if no rank printed one."""
        losses = [row.values["loss"] for launch in self.launches for row in launch.rows.values()]
        if not losses or not all(loss < 0 for loss in losses):
            return ""
        rank = "the first rank of the last stage, world size / PP · (PP − 1)"
        which = rank if self._loss_rank is None else f"rank {self._loss_rank}, {rank}"
        return (
            "no loss: under pipeline parallelism a rank without the last stage prints -1 instead. Give the log of "
            f"{which}, or add that rank to LOG_RANK"
        )


def _lines(blocks: Iterable[bytes]) -> tuple[list[LogLine], float, bool]:
    """Return the lines that matter, those of a step's ranks merged, their fields, and whether one may lack its end."""
    lines: list[LogLine] = []
    places: dict[tuple[str, int], list[int]] = {}  # where in them a step's lines are, one for each launch
    begun, whole, fields, rest = 0, 0, 0.0, b""
    for block in itertools.chain(blocks, [b"\n"]):
        block = rest + block
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1  # progress bars end lines with the second
        rest = block[cut:][-_LONGEST_LINE_BYTES:]
        begun += max(block.count(b"step:", 0, cut), block.count(b"loss:", 0, cut))
        for line in scan(block[:cut]):
            fields += line.width
            whole += line.kind == "validation" or "mfu" in line.values
            before = places.setdefault((line.kind, line.step), [])
            same = next((place for place in reversed(before) if _is_of_ranks(lines[place], line, lines[-1])), None)
            if same is None or line.kind in ("failure", "loss rank") or (line.values and _disagree(lines[same], line)):
                before.append(len(lines))
                lines.append(line)
            elif line.values:
                lines[same] = merged(lines[same], line)
    return lines, fields, whole < begun or not lines


def _is_of_ranks(before: LogLine, line: LogLine, last: LogLine) -> bool:
    """Tell whether two lines of one step were printed at one time; without times, if nothing stands between them."""
    apart = abs(line.time - before.time)
    return before is last if math.isnan(apart) else apart <= CLOCK_SKEW_S


def _in_time_order(lines: list[LogLine]) -> list[LogLine]:
    """Sort lines, unless ranks that print at about the same time, or a clock set back, are all that is out of order."""
    times = np.array([line.time for line in lines])
    # A line without a time stays behind the one that it follows.
    times = np.nan_to_num(times[np.maximum.accumulate(np.where(np.isnan(times), 0, np.arange(len(times))))])
    steps = np.array([line.step if line.kind == "step" else math.inf for line in lines])
    # In autumn local time goes back by an hour while the steps go on.
    goes_back = steps < np.maximum.accumulate(np.where(np.isinf(steps), 0, steps))
    if not np.any(goes_back & (np.maximum.accumulate(times) - times > CLOCK_SKEW_S)):
        return lines
    return [lines[index] for index in np.argsort(times, kind="stable")]


def _columns(rows: Sequence[tuple[int, LogLine]]) -> Columns:
    columns: dict[str, Any] = {
        name: np.array([row.values.get(name, math.nan) for _, row in rows], dtype=float) for name in VALUE_COLUMNS[:-1]
    }
    return {
        "segment": np.array([number for number, _ in rows], dtype=np.int64),
        "step": np.array([row.step for _, row in rows], dtype=np.int64),
        **columns,
        "loss": np.where(columns["loss"] < 0, np.nan, columns["loss"]),
        "time": np.array([row.time for _, row in rows], dtype=float),
    }


def _values(match: re.Match[bytes]) -> dict[str, float] | None:
    """Return a line's values and its ``width``; None for one that was torn."""
    fields = _FIELD.findall(match["fields"])
    name, number, unit, _ = fields[-1]
    is_whole = name == b"mfu" and (unit == b"%" or not number)
    if not is_whole and match["ends"] is None:
        return None
    known = sum(field[0] in _COLUMN for field in fields)
    # Without its sign, which most lines have, the digits of the last field may be cut off.
    values = {"width": known - (0.5 if name == b"mfu" and not is_whole else 0.0)}
    try:
        for name, number, unit, percent in fields:
            column = _COLUMN.get(name)
            if column is None or not (number or column == "mfu"):
                continue
            if column == "memory_gib" and unit == b"%":
                values["memory_pct"] = _float(number)
            elif column == "memory_gib":
                values[column] = _float(number) * _GIB[unit]
                values |= {"memory_pct": _float(percent)} if percent else {}
            else:
                values[column] = _float(number) * _THOUSANDS[unit] if number else math.nan
    except (KeyError, ValueError):  # torn by another rank's output in the middle of a number
        return None
    if math.isnan(values.get("grad_norm", 0.0)):
        values["grad_norm"] = REPORTED_NAN
    # The sentinel is -1 summed over micro-steps and ranks; a validation divides that by the tokens, hence "-0.0000".
    if fields[0][1].startswith(b"-"):
        values["loss"] = -1.0 if math.isfinite(values["loss"]) else math.nan
    return values if "loss" in values else None


def _float(text: bytes) -> float:
    text = text.rstrip(b",")
    if b"," not in text:
        return float(text)
    if not _GROUPED.fullmatch(text):
        raise ValueError(text)
    return float(text.replace(b",", b""))


def _time(block: bytes, position: int) -> float:
    """Return the last time stamp before ``position`` on its line, in seconds since the epoch, or NaN."""
    stamps = list(_STAMP.finditer(block, _line_start(block, position), position))
    try:
        return _moment(stamps[-1]) if stamps else math.nan
    except ValueError:
        return math.nan


def _moment(stamp: re.Match[bytes]) -> float:
    date, clock, part, zone = (text.decode() for text in stamp.groups(b""))
    date = date.replace("/", "-")
    if date[2] == "-":  # month, day, year
        date = f"{date[6:] if len(date) == 10 else f'20{date[6:]}'}-{date[:5]}"
    zone = {"Z": "+00:00", "UTC": "+00:00"}.get(zone, zone)
    return _second(f"{date} {clock}{zone}") + float(f"0.{part or 0}")


@lru_cache(maxsize=256)
def _second(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()  # all ranks print a step within a second or two


def _line_start(block: bytes, position: int) -> int:
    """Return where the line at ``position`` starts, or where one could that is not too long."""
    earliest = max(0, position - _LONGEST_PREFIX_BYTES)
    return max(block.rfind(b"\n", earliest, position), block.rfind(b"\r", earliest, position), earliest - 1) + 1


def _rank(block: bytes, position: int) -> int:
    """Return the rank in torchrun's prefix of the line at ``position``, or :data:`NO_RANK`."""
    ranks = _RANK.findall(block, _line_start(block, position), position)
    return int(ranks[-1]) if ranks else NO_RANK  # the last: two ranks' output may share a line
