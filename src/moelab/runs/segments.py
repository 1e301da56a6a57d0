"""Which launch of a job logged which step, decided line by line.

The rule is stated in :mod:`moelab.runs.log`; this module holds it. Every line is placed by its own time stamp among the
segments known so far, so it does not matter in which order the ranks' lines arrived. Rows are kept as machine numbers,
72 bytes each, sorted by step: one row for all the ranks that print a step.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from moelab.runs.log_lines import FIELDS, LOSS, MEMORY_GIB, MEMORY_PCT, TIME, TPS, LogLine

#: The clocks of a cluster's nodes, and the moments at which its ranks print, differ by less; a restart takes longer.
CLOCK_SKEW_S: Final = 3.0
#: The newest step printed again after this many seconds comes from a restart, not from a rank that was slow to print.
REPEATED_STEP_S: Final = 30.0
_WIDTH: Final = len(FIELDS)


class StepRows:
    """Rows sorted by step, one for all ranks: the values of the rank with the loss, the memory of the fullest rank."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.last_step = -1
        self._emitted_step = -1

    def add(self, step: int, values: tuple[float, ...]) -> bool:
        """Merge one rank's line into the row of its step and tell whether that changed anything.

        Args:
            step: training step, counted from 1.
            values: the line's :data:`~moelab.runs.log_lines.FIELDS`.
        """
        if step > self.last_step:
            self.last_step = step
            self.steps.append(step)
            self.values.extend(values)
            return True
        if step <= self._emitted_step:
            return False
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

    def pop_first(self) -> tuple[int, tuple[float, ...]]:
        """Remove and return the row of the lowest step; later lines of that step are dropped."""
        self._emitted_step = self.steps.pop(0)
        row = tuple(self.values[:_WIDTH])
        del self.values[:_WIDTH]
        return self._emitted_step, row

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

    def pop_first(self, keep: int) -> Iterator[tuple[int, int, tuple[float, ...]]]:
        """Remove and yield the oldest rows as (segment, step, values) until ``keep`` rows are left."""
        excess = sum(len(segment.rows.steps) for segment in self.all) - keep
        for segment in self.all:
            while excess > 0 and segment.rows.steps:
                excess -= 1
                yield segment.index, *segment.rows.pop_first()

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
