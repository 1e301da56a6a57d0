"""One line about a study that trains: which arm and seed, which step, the loss, tokens/s and the time left."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable

from moelab.experiment_file import Study

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line of progress at once."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - this is the progress display


class Progress:
    """Follows a study and says a line every ``interval_s`` seconds.

    The time left counts, for every run still to come, what a run takes beside its steps (start-up, held-out loss, the
    end) and its steps at the pace of its arm; an arm that has not run yet is reckoned at the mean pace of the others.
    """

    def __init__(
        self,
        study: Study,
        done: Iterable[int],
        say: Say,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._say, self._interval_s, self._clock = study, say, interval_s, clock
        finished = set(done)
        self._waiting = [index for index in range(len(study.experiments)) if index not in finished]
        self._pace_s: dict[str, float] = {}
        self._beside_s: list[float] = []
        self._last_said = -math.inf
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._begin(self._waiting[0] if self._waiting else 0)

    def start(self, index: int) -> None:
        """Experiment number ``index`` of the study begins."""
        self._waiting.remove(index)
        self._begin(index)
        self._say(f"{self._where()} | starting")

    def rows(self, rows: list[dict[str, float]]) -> None:
        """New metric rows of the experiment that runs."""
        now, last = self._clock(), rows[-1]
        self._step = max(self._step, int(last["step"]))
        if self._first is None:
            self._first = (self._step, now)
        elif self._step > self._first[0]:
            self._pace_s[self._run.arm] = (now - self._first[1]) / (self._step - self._first[0])
        if now - self._last_said >= self._interval_s:
            self._last_said = now
            speed = f"loss {last['loss']:.3f} | {last['tps']:,.0f} tokens/s per rank"
            self._say(f"{self._where()} | {speed}{self._left(now)}")

    def end(self, outcome: str) -> None:
        """The experiment that ran is over."""
        if self._run.arm in self._pace_s:
            steps_s = self._pace_s[self._run.arm] * self._step
            self._beside_s.append(max(0.0, self._clock() - self._started - steps_s))
        self._say(f"{self._where()} | {outcome}")

    def _begin(self, index: int) -> None:
        self._run = self._study.experiments[index]
        self._started, self._step, self._first = self._clock(), 0, None

    def _where(self) -> str:
        run = self._run
        return f"{self._study.name} | {run.arm} | seed {run.seed} | step {self._step}/{run.steps}"

    def _left(self, now: float) -> str:
        if not self._pace_s:
            return ""
        mean = statistics.fmean(self._pace_s.values())
        start_s = (self._first[1] if self._first else now) - self._started
        beside_s = statistics.fmean(self._beside_s) if self._beside_s else start_s
        waiting = [self._study.experiments[index] for index in self._waiting]
        left_s = self._pace_s.get(self._run.arm, mean) * (self._run.steps - self._step)
        left_s += sum(beside_s + self._pace_s.get(run.arm, mean) * run.steps for run in waiting)
        return f" | about {format_seconds(left_s)} left"


def format_seconds(seconds: float) -> str:
    """A duration for a person.

    >>> format_seconds(200)
    '3 min 20 s'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
