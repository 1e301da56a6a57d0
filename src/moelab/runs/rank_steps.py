"""What each rank printed about its newest steps, and a log's last lines: what a live view shows beside the rows.

A rank is known by the number in torchrun's prefix, ``[rank3]:``. The launcher and the job script of moelab make that
the **global** rank; in other logs of several nodes it is the local one, and ranks of the same number look like one.
Both classes keep a bounded amount however long the log is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from moelab.runs.log_lines import MEMORY_GIB, NO_RANK, TIME, LogLine

KEPT_STEPS: Final = 64
KEPT_LINES: Final = 12
LONGEST_LINE_CHARACTERS: Final = 300
_LINES_LOOKED_AT: Final = 1024
_CONTROL = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class RankTable:
    """The newest steps of all ranks, S steps by R ranks; NaN where a rank said nothing.

    Attributes:
        steps: int64 of shape (S,), ascending.
        step_time_s: float64 of shape (S, R): seconds a step, between two step lines of the same rank. All that happens
            between them is in it, such as a checkpoint. The first line of a launch has none.
        memory_gib: float64 of shape (R,): memory that its newest line shows, in GiB.
    """

    steps: np.ndarray[Any, np.dtype[np.int64]]
    step_time_s: np.ndarray[Any, np.dtype[np.float64]]
    memory_gib: np.ndarray[Any, np.dtype[np.float64]]

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
            self._column(step)[rank] = (time - last_time) / (step - last_step)

    def _column(self, step: int) -> dict[int, float]:
        if step not in self._step_time_s and len(self._step_time_s) == KEPT_STEPS:
            del self._step_time_s[next(iter(self._step_time_s))]
        return self._step_time_s.setdefault(step, {})

    def _start(self, rank: int, step: int) -> None:
        """Forget what the rank trains again, and the time of its last line: the restart is no part of a step."""
        self._last.pop(rank, None)
        for later in [number for number in self._step_time_s if number >= step]:
            self._step_time_s[later].pop(rank, None)
            if not self._step_time_s[later]:
                del self._step_time_s[later]


class LogTail:
    """The last :data:`KEPT_LINES` lines that are not a rank's step line, without colours."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)

    @property
    def lines(self) -> list[str]:
        """The lines as text, oldest first."""
        return [_clean(line) for line in self._lines]

    def add(self, block: bytes) -> None:
        """Take whole lines of a log."""
        newest: list[bytes] = []
        for line in reversed(block.rsplit(b"\n", _LINES_LOOKED_AT)[-_LINES_LOOKED_AT:]):
            if line.strip() and not (b"step:" in line and b"loss:" in line):
                newest.append(line[-4 * LONGEST_LINE_CHARACTERS :] if b"\r" in line else line)
                if len(newest) == KEPT_LINES:
                    break
        self._lines.extend(reversed(newest))


def _by_rank(values: Mapping[int, float], ranks: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = np.full(ranks, np.nan)
    for rank, value in values.items():
        if rank < ranks:
            found[rank] = value
    return found


def _clean(line: bytes) -> str:
    text = line[: 4 * LONGEST_LINE_CHARACTERS].decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
    return _CONTROL.sub("", text)[:LONGEST_LINE_CHARACTERS]
