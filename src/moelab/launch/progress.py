"""One line about a study that trains: which arm and seed, which step, the loss, tokens/s and the time left."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable

from moelab.experiment import Experiment
from moelab.experiment_file import Study

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line of progress at once."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - this is the progress display


class Progress:
    """Follows a study and says a line every ``interval_s`` seconds.

    The time left is estimated for each arm from its own pace, start-up included, and from the mean pace of the others
    for an arm that has not run yet.
    """

    def __init__(self, study: Study, done: set[int], say: Say, interval_s: float = 5.0) -> None:
        self._study, self._say, self._interval_s = study, say, interval_s
        self._waiting = [index for index in range(len(study.experiments)) if index not in done]
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps: dict[str, int] = defaultdict(int)
        self._last_said = 0.0
        self._current: Experiment | None = None
        self._started = self._step = 0.0

    def start(self, index: int) -> None:
        """Experiment number ``index`` of the study begins."""
        self._current = self._study.experiments[index]
        self._waiting.remove(index)
        self._started, self._step = time.monotonic(), 0
        self._say(f"{self._where()} | starting")

    def rows(self, rows: list[dict[str, float]]) -> None:
        """New metric rows of the experiment that runs."""
        last = rows[-1]
        self._step = max(self._step, last["step"])
        now, finished = time.monotonic(), self._current is not None and self._step >= self._current.steps
        if now - self._last_said < self._interval_s and not finished:
            return
        self._last_said = now
        self._say(
            f"{self._where()} | loss {last['loss']:.3f} | {last['tps']:,.0f} tokens/s per rank | {self._left(now)}"
        )

    def end(self, outcome: str) -> None:
        """The experiment that ran is over."""
        assert self._current is not None
        self._seconds[self._current.arm] += time.monotonic() - self._started
        self._steps[self._current.arm] += int(self._step)
        self._say(f"{self._where()} | {outcome}")

    def _where(self) -> str:
        assert self._current is not None
        run = self._current
        return f"{self._study.name} | {run.arm} | seed {run.seed} | step {int(self._step)}/{run.steps}"

    def _left(self, now: float) -> str:
        assert self._current is not None
        seconds, steps = dict(self._seconds), dict(self._steps)
        arm = self._current.arm
        seconds[arm] = seconds.get(arm, 0.0) + now - self._started
        steps[arm] = steps.get(arm, 0) + int(self._step)
        mean = sum(seconds.values()) / max(1, sum(steps.values()))
        pace = {arm: seconds[arm] / steps[arm] for arm in steps if steps[arm]}
        ahead = [(arm, self._current.steps - self._step)]
        ahead += [(e.arm, e.steps) for e in (self._study.experiments[index] for index in self._waiting)]
        return f"about {format_seconds(sum(pace.get(arm, mean) * count for arm, count in ahead))} left"


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
