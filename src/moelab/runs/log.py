"""Read a log that TorchTitan wrote elsewhere into the metrics table.

A step line is ``step: N  loss: …`` and any further ``name: value`` (TorchTitan from its first release to its main of
August 2026). The log of a job is one file that every rank of every node, and every launch after a requeue, appends to.
Two things have to be undone.

*Ranks.* A step is printed once by each rank that logs, and ranks without the last pipeline stage print a negative
number for the loss. One step gets one row: the values of the rank that has the loss (the earliest line if several have
it), the memory of the fullest rank; if no rank has the loss it is missing.

*Segments.* One launch is one segment. A launch begins

1. with a ``Training starts at step N`` that is later than a step of the launch before. Every rank prints that line, and
   clocks differ, so with the same N it has to be more than 3 s later;
2. with a step that was trained already: a lower one more than 3 s after the step that followed it was printed, or the
   newest one more than 30 s after it was first printed. Anything else is another rank's late line;
3. in a log without time stamps, with a lower step than the last one.

A log of 256 ranks is gigabytes of text of which a few lines matter, so blocks are searched as bytes, and the lines of
one step are merged as they come. The time stamp is local time without a zone, that of the machine that reads.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from moelab.errors import BadInput
from moelab.runs.log_text import LogBytes, NotALog, plain, unwrapped, what_was_seen
from moelab.runs.table import Columns, MetricsRead, columns_of, metrics_read, refuse_two_runs

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
    **{name.encode(): name for name in ("loss", "grad_norm", "tps", "tflops", "mfu")},
    b"wps": "tps", b"memory": "memory_gib",
}  # fmt: skip
# Possessive quantifiers: a torn line must fail at once instead of trying every way to share out its blanks.
_NUMBER: Final = rb"(?i:[-+]?+(?:\d[\d.,]*+(?:e[-+]?\d++)?+|nan|inf(?:inity)?+))"
_FIELD: Final = re.compile(
    rb"[ \t]*+([a-z_]++):[ \t]*+(?:(NUMBER)(?:GiB\((NUMBER)%\)|(%))?+|N/A)".replace(b"NUMBER", _NUMBER)
)
_FIELDS: Final = re.sub(rb"(?<!\\)\((?!\?)", b"(?:", _FIELD.pattern)  # without groups of its own
_STEP: Final = re.compile(
    rb"step:[ \t]*+(?P<step>\d{1,15}+)(?P<fields>(?=[ \t]*+loss:)(?:" + _FIELDS + rb")++)(?P<ends>[ \t]*+[\r\n])?+"
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
    rb"(?<![\d.])(\d{4}-\d\d-\d\d)[T ]?+(\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?+ ?(Z|[-+]\d\d:?\d\d)?+"
)
_LONGEST_PREFIX_BYTES: Final = 200
_LONGEST_LINE_BYTES: Final = 1 << 16


class LogLine(NamedTuple):
    """A line that matters: a ``step`` or ``validation`` with its values, a ``start``, ``failure`` or ``loss rank``."""

    kind: str
    step: int
    values: dict[str, float]  # of `VALUE_COLUMNS`; a negative loss is of a rank that has none
    time: float  # seconds since the epoch, NaN if not known
    rank: int  # in the prefix of the line


def read_log(source: Path | Iterable[str | bytes]) -> MetricsRead:
    """Read a whole log as one run, in memory that depends on its rows and not on its size; it may have no step.

    Raises:
        NotALog: there is no such file.
        BadInput: it holds two runs.

    >>> line = "step: 10  loss:  7.20000  memory: 1.00GiB(1.00%)  tps: 4,000  mfu: N/A"
    >>> read_log([line]).rows[["step", "loss", "tps"]].values.tolist()
    [[10.0, 7.2, 4000.0]]
    """
    if isinstance(source, Path):
        return read_logs([source], source)
    texts = (line.encode(errors="replace") if isinstance(line, str) else line for line in source)
    text = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in texts)
    return _read([text], lambda size: text[:size], None)


def read_logs(files: Sequence[Path], source: Path) -> MetricsRead:
    """Read the logs of one run: of its ranks, of its launches, or the same lines twice.

    Raises:
        NotALog: there is no such file.
        BadInput: they are of two runs.
    """
    logs = [LogBytes(file) for file in files]
    # A file may end without a line end.
    blocks = itertools.chain.from_iterable(itertools.chain(log, [b"\n"]) for log in logs)
    read = _read(blocks, lambda size: b"\n".join(log.beginning(size) for log in logs), source)
    return replace(read, notes=(*(log.damage for log in logs if log.damage), *read.notes))


def _read(blocks: Iterable[bytes], beginning: Callable[[int], bytes], source: Path | None) -> MetricsRead:
    lines, is_whole = _lines(blocks)
    head = b"" if is_whole else beginning(WRAPPED_BYTES)
    if 0 < len(head) < WRAPPED_BYTES:
        mended, _ = _lines([unwrapped(head) + b"\n"])
        lines = max(lines, mended, key=lambda some: sum(len(line.values) for line in some))
    launches = _launches(lines)
    _refuse_mixed(launches, source)
    steps = _columns([(number, row) for number, one in enumerate(launches) for row in one.rows.values()])
    held_out = _columns([(number, row) for number, one in enumerate(launches) for row in one.validation.values()])
    if source:
        refuse_two_runs(steps, source)
    return metrics_read(steps, held_out, notes=[note for note in (_no_loss(lines),) if note])


def no_steps(path: Path) -> NotALog:
    """What to raise for a file that has no step line."""
    seen = what_was_seen(LogBytes(path).beginning(WRAPPED_BYTES))
    return NotALog(
        f"{path}: no TorchTitan step line ('step: N  loss: …  memory: …  tps: …  mfu: …') found{seen and '; '}{seen}. "
        "Give the output of a TorchTitan training (its stdout, from the rank that logs)"
    )


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
            yield LogLine("validation" if is_validation else "step", int(match["step"]), values, *place)
    for match in rare:
        yield _rare_line(block, match)


def _rare_line(block: bytes, match: re.Match[bytes]) -> LogLine:
    place = (_time(block, match.start()), _rank(block, match.start()))
    if match["start"]:
        return LogLine("start", int(match["start"]), {}, *place)
    if match["at"]:
        return LogLine("failure", int(match["at"]), {"loss": abs(float(match["loss"]))}, math.nan, NO_RANK)
    if match["visible"]:
        return LogLine("loss rank", int(match["visible"]), {}, *place)
    # TorchTitan, `_get_metrics_rank`: the first rank of the last stage.
    others = math.prod(int(degree) for degree in re.findall(rb"\d+", match["others"]))
    return LogLine("loss rank", others * (int(match["pp"]) - 1), {}, *place)


def _values(match: re.Match[bytes]) -> dict[str, float] | None:
    """A line's values; None for one that was torn, by another rank's output or by a kill."""
    fields = _FIELD.findall(match["fields"])
    name, number, _, percent = fields[-1]
    if not (name == b"mfu" and (percent or not number)) and match["ends"] is None:
        return None
    values: dict[str, float] = {}
    try:
        for name, number, share, _ in fields:
            if column := _COLUMN.get(name):
                values[column] = _float(number) if number else math.nan
                values |= {"memory_pct": _float(share)} if share else {}
    except ValueError:
        return None
    if fields[0][1].startswith(b"-"):
        # The sentinel is -1 summed over micro-steps and ranks; a validation divides that by the tokens: "-0.0000".
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
    stamps = _STAMP.findall(block, _line_start(block, position), position)
    if not stamps:
        return math.nan
    date, clock, part, zone = (text.decode() for text in stamps[-1])
    try:
        return _second(f"{date} {clock}{zone}") + float(f"0.{part or 0}")
    except ValueError:
        return math.nan


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


# Lines to rows


def _lines(blocks: Iterable[bytes]) -> tuple[list[LogLine], bool]:
    """The lines that matter, those of a step's ranks merged, and whether all have all that TorchTitan prints."""
    lines: list[LogLine] = []
    places: dict[tuple[str, int], int] = {}  # where in them the last line of a step is
    begun, whole, rest = 0, 0, b""
    for block in itertools.chain(blocks, [b"\n"]):
        block = rest + block
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1  # progress bars end lines with the second
        rest = block[cut:][-_LONGEST_LINE_BYTES:]
        begun += max(block.count(b"step:", 0, cut), block.count(b"loss:", 0, cut))
        for line in scan(block[:cut]):
            whole += line.kind == "validation" or "mfu" in line.values
            place = places.get((line.kind, line.step), -1)
            same = lines[place] if place >= 0 else line
            # Of ranks that print a step at one time; without times, if nothing stands between them.
            apart_s = abs(line.time - same.time)
            is_same = place == len(lines) - 1 if math.isnan(apart_s) else apart_s <= CLOCK_SKEW_S
            if place < 0 or not is_same or _disagree(same, line):
                places[line.kind, line.step] = len(lines)
                lines.append(line)
            elif line.values:
                lines[place] = merged(same, line)
    return lines, 0 < whole == begun


class _Launch:
    """What one launch logged: rows by step."""

    def __init__(self, start_step: int | None = None) -> None:
        self.start_step = start_step
        self.first_time = math.inf
        self.rows: dict[int, LogLine] = {}
        self.steps: list[int] = []  # ascending
        self.validation: dict[int, LogLine] = {}
        self.disagreements: dict[int, tuple[float, float]] = {}

    def is_over_at(self, start: LogLine) -> bool:
        """Tell whether a "Training starts" line belongs to a later launch."""
        if not self.rows or math.isnan(start.time) or math.isinf(self.first_time):
            return bool(self.rows)
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
        rows = self.validation if line.kind == "validation" else self.rows
        before = rows.get(line.step)
        rows[line.step] = merged(before, line) if before else line
        if rows is self.rows:
            if before and _disagree(before, line):
                self.disagreements[line.step] = (before.values["loss"], line.values["loss"])
            if before is None:
                insort(self.steps, line.step)
            self.first_time = min(self.first_time, math.inf if math.isnan(line.time) else line.time)


def _launches(lines: list[LogLine]) -> list[_Launch]:
    # A step line that lacks what most have was torn at its end.
    usual = Counter(len(line.values) for line in lines if line.kind == "step")
    width = max(usual, key=lambda count: (usual[count], count), default=0)
    lines = [line for line in lines if line.kind != "step" or len(line.values) >= width]
    if not any(math.isnan(line.time) for line in lines if line.kind in ("start", "step")):
        # A line without a time stays behind the one that it follows.
        time, timed = -math.inf, list[tuple[float, LogLine]]()
        for line in lines:
            time = time if math.isnan(line.time) else line.time
            timed.append((time, line))
        lines = [line for _, line in sorted(timed, key=lambda one: one[0])]
    launches = [_Launch()]
    for line in lines:
        launch = launches[-1]
        if line.kind == "start" and launch.is_over_at(line):
            launches.append(_Launch(line.step))
        elif line.kind == "start":
            launch.start_step = line.step if launch.start_step is None else launch.start_step
        elif line.kind != "loss rank":
            if line.kind == "step" and launch.is_over_with(line):
                launches.append(_Launch())
            launches[-1].add(line)
    return [launch for launch in launches if launch.rows or launch.validation]


def merged(before: LogLine, line: LogLine) -> LogLine:
    """The row of one step from what two ranks printed: that of the loss, and the fullest memory."""
    # Every rank prints its own tps: the earliest line wins, so that the order of arrival does not matter.
    first = min(before, line, key=lambda one: (one.values["loss"] < 0, one.time, one.values.get("tps", 0)))
    fullest = {
        name: max(one.values.get(name, -1.0) for one in (before, line))
        for name in ("memory_gib", "memory_pct")
        if name in before.values or name in line.values
    }
    return first._replace(values=first.values | fullest)


def _disagree(one: LogLine, other: LogLine) -> bool:
    losses = [line.values.get("loss", -1.0) for line in (one, other)]
    return min(losses) >= 0 and abs(losses[0] - losses[1]) > SAME_LOSS


def _refuse_mixed(launches: Iterable[_Launch], source: Path | None) -> None:
    for launch in launches:
        if 1 < len(two := launch.disagreements) >= len(launch.rows) / 2:
            step, (first, second) = next(iter(two.items()))
            raise BadInput(
                f"{source or 'the log'}: two runs are mixed in it: {len(two)} steps have two losses each, such as "
                f"{first:g} and {second:g} at step {step}. Give the log of each run by itself"
            )


def _columns(rows: Iterable[tuple[int, LogLine]]) -> Columns:
    ordered = sorted(rows, key=lambda row: (row[0], row[1].step))
    return columns_of([{"segment": n, "step": line.step, **line.values, "time": line.time} for n, line in ordered])


def _no_loss(lines: Iterable[LogLine]) -> str:
    """Say why there is no loss, if no rank printed one."""
    losses = [line.values["loss"] for line in lines if line.kind == "step"]
    if not losses or not all(loss < 0 for loss in losses):
        return ""
    known = next((f"rank {line.step}, " for line in lines if line.kind == "loss rank"), "")
    return (
        "no loss: under pipeline parallelism a rank without the last stage prints -1 instead. Give the log of "
        f"{known}the first rank of the last stage, world size / PP · (PP − 1), or add that rank to LOG_RANK"
    )
