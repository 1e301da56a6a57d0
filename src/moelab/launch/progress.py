"""How far a study's training is: as lines, as bars of a terminal, or as bars of a notebook.

The time left is, for every run still to come, what a run takes besides its steps (start-up, held-out loss, the end)
plus its steps at the pace of its arm; an arm that has not run yet gets the mean pace of the others.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moelab.experiment_file import Study
from moelab.privacy import without_secrets
from moelab.runs.follow import format_seconds

LINE_INTERVAL_S = 5.0
Row = Mapping[str, Any]
Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line of progress at once."""
    print(without_secrets(line), file=sys.stderr, flush=True)  # noqa: T201 - this is the progress display


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose outputs can be widgets."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


@contextmanager
def progress_of(study: Study, done: Collection[int], say: Say | None) -> Iterator[Progress]:
    """The progress of a study of which some experiments are done: lines for ``say``, or what the reader's place has."""
    nothing_to_do = len(done) == len(study.experiments)
    if say or nothing_to_do or not (in_notebook() or sys.stderr.isatty()):
        yield Progress(study, done, say or say_on_stderr)
        return
    bars = Bars(study, done)
    try:
        yield bars
    finally:
        bars.close()


class Progress:
    """Says lines of progress, :data:`LINE_INTERVAL_S` seconds apart while a run trains."""

    def __init__(
        self, study: Study, done: Collection[int], say: Say, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._study, self._say, self._clock = study, say, clock
        self._waiting = [index for index in range(len(study.experiments)) if index not in done]
        self._pace_s: dict[str, float] = {}
        self._beside_s: list[float] = []
        self._last_said = -math.inf
        self._first: tuple[int, float] | None = None
        self._step = 0

    def start(self, index: int) -> None:
        """Experiment number ``index`` of the study has begun."""
        self._waiting.remove(index)
        self._run = self._study.experiments[index]
        self._started, self._step, self._first = self._clock(), 0, None
        self._show_start()

    def row(self, last: Row) -> None:
        """The running experiment has a new metric row."""
        now = self._clock()
        self._step = max(self._step, int(last["step"]))
        if self._first is None:  # the time before it is start-up, and no part of the pace
            self._first = (self._step, now)
        elif self._step > self._first[0]:
            self._pace_s[self._run.arm] = (now - self._first[1]) / (self._step - self._first[0])
        self._show_row(f"loss {last['loss']:.3f}", f"{last['tps']:,.0f} tokens/s per rank", now)

    def end(self, outcome: str) -> None:
        """The running experiment has ended."""
        if self._run.arm in self._pace_s:
            steps_s = self._pace_s[self._run.arm] * self._step
            self._beside_s.append(max(0.0, self._clock() - self._started - steps_s))
        self._show_end(outcome)

    def _show_start(self) -> None:
        self._say(f"{self._where()} | starting")

    def _show_row(self, loss: str, speed: str, now: float) -> None:
        if now - self._last_said >= LINE_INTERVAL_S:
            self._last_said = now
            left = self._left(now)
            self._say(f"{self._where()} | {loss} | {speed}{f' | {left}' if left else ''}")

    def _show_end(self, outcome: str) -> None:
        self._say(f"{self._where()} | {outcome}")

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
        return f"about {format_seconds(left_s)} left"


class Bars(Progress):
    """Shows two bars of tqdm: the study's, with the time left, and below it that of the run that trains."""

    def __init__(self, study: Study, done: Collection[int], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(study, done, self._write, clock=clock)
        names = [study.name, *(f"{one.arm}, seed {one.seed}" for one in study.experiments)]
        self._width = max(map(len, names))
        self._failed = 0
        self._of_study = self._bar(study.name, len(study.experiments))
        self._of_study.n = len(done)
        self._of_run: Any = None
        self._handle: Any = None
        self._show_study("")

    def close(self) -> None:
        """Leave the study's line; in a notebook as text, which also a reader without a kernel sees."""
        if self._of_run is not None:
            self._of_run.close()
        self._show_study("")
        if self._handle is not None:
            self._handle.update({"text/plain": f"{self._study.name}: {self._of_study.said}"}, raw=True)
        self._of_study.close()

    def _bar(self, name: str, total: int) -> Any:
        bar = _bar_class()(
            total=total,
            desc=name.ljust(self._width),
            leave=name == self._study.name,
            dynamic_ncols=True,
            bar_format="{desc} |{bar}| {said}" if in_notebook() else "{desc} |{bar:16}| {said}",
            **({"display": False} if in_notebook() else {"file": sys.stderr}),
        )
        return bar

    def _write(self, line: str) -> None:
        if in_notebook():
            print(line)  # noqa: T201 - this is the progress display
        else:
            self._of_study.write(line, file=sys.stderr)  # above the bars

    def _show_study(self, left: str) -> None:
        bar = self._of_study
        failed = f", {self._failed} failed" if self._failed else ""
        bar.said = f"{bar.n} of {bar.total} trainings{failed}{f', {left}' if left else ''}"
        bar.refresh()

    def _show_start(self) -> None:
        self._of_run = self._bar(f"{self._run.arm}, seed {self._run.seed}", self._run.steps)
        self._of_run.said = "starting"
        self._of_run.refresh()
        if in_notebook():
            self._display()

    def _display(self) -> None:
        """Show both bars in one output, which :meth:`close` can replace."""
        import ipywidgets
        from IPython.display import display

        both = ipywidgets.VBox([self._of_study.container, self._of_run.container])
        if self._handle is None:
            self._handle = display(both, display_id=True)
        else:
            self._handle.update(both)

    def _show_row(self, loss: str, speed: str, now: float) -> None:
        bar = self._of_run
        bar.n, bar.said = self._step, f"step {self._step} of {self._run.steps}, {loss}, {speed}"
        bar.refresh()
        self._show_study(self._left(now))

    def _show_end(self, outcome: str) -> None:
        self._of_run.close()
        if outcome != "completed":
            self._failed += 1
            self._say(f"{self._where()} | {outcome}")
        self._of_study.n += 1
        self._show_study("")


def _bar_class() -> Any:
    """The class of tqdm for this place, with a text behind the bar; tqdm puts a comma in front of its own."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        said = ""

        @property
        def format_dict(self) -> dict[str, Any]:
            return {**super().format_dict, "said": self.said}

    return Bar
