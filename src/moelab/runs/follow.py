"""Follows the runs at a path while they train: each byte of a log is read once, and what is shown is kept in memory.

Nothing is stored beside the run directories. After a restart of the process that watches, one read of the logs brings
everything back, so there is no second copy that could be wrong. Of several attempts at one arm and seed the newest is
followed; :mod:`moelab.runs.collect` reads the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pandas as pd

from moelab.errors import BadInput
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.log import LogFollower
from moelab.runs.rank_steps import RankTable
from moelab.runs.status import State, Status
from moelab.runs.table import grad_norm_finding, merge_segments, metrics_table

FIND_INTERVAL_S: Final = 10.0
"""New run directories are looked for this often: a walk over a shared filesystem costs more than reading a log on."""


@dataclass(frozen=True, kw_only=True)
class RunNow:
    """Where one run is; a number that it has not logged yet is NaN.

    Attributes:
        name: of the run directory.
        arm: its arm.
        seed: its seed, None where the experiment cannot be read.
        status: as its ``status.json`` says; a loss or gradient norm that is not finite is its reason until there is
            another.
        step: last step that was logged, 0 before the first.
        steps: steps that are planned, 0 where the experiment cannot be read.
        loss: of the last step, in nats per token.
        tps: tokens per second per GPU of the last step.
        memory_gib: of the fullest rank at the last step.
        step_time_s: of the last two logged steps.
        segments: launches that logged a step.
    """

    name: str
    arm: str
    seed: int | None
    status: Status
    step: int
    steps: int
    loss: float
    tps: float
    memory_gib: float
    step_time_s: float
    segments: int

    @property
    def left_s(self) -> float:
        """Seconds to the last step at the pace of the last two; NaN unless the run trains."""
        return self.step_time_s * (self.steps - self.step) if self.status.state is State.RUNNING else math.nan


class RunFollower:
    """One run directory, read on at every poll.

    Attributes:
        run: the directory.
        model: of its experiment with its own dimensions, empty where that cannot be read.
        ranks: of its experiment.
        now: where the run is.
        rows: metrics table, a step that was repeated after a restart once.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._log = LogFollower(run.log)
        self._seed: int | None = None
        try:
            experiment = run.experiment
        except BadInput:  # damaged, or written by another version of moelab
            self._arm, self._steps, self.ranks, self.model = run.name.split("/")[-3], 0, 1, ""
        else:
            self._arm, self._seed, self._steps = experiment.arm, experiment.seed, experiment.steps
            self.ranks, self.model = experiment.world_size, experiment.model_label
        self.rows = metrics_table({"segment": [], "step": []})
        self._segments, self._status = 0, run.status
        self._failure: str | None = None
        self.now = self._now()

    @property
    def tail(self) -> list[str]:
        """Last lines of the log beside the step lines."""
        return self._log.tail.lines

    @property
    def rank_table(self) -> RankTable:
        """The newest steps of all ranks."""
        return self._log.rank_steps.table(self.ranks)

    def poll(self) -> bool:
        """Read what is new; tell whether anything is."""
        offset = self._log.offset
        has_rows = bool(len(self._log.poll()))
        if has_rows:
            self._renew_rows()
        status = self.run.status
        is_other = status != self._status
        if has_rows or is_other:
            self._status = status
            self.now = self._now()
        return has_rows or is_other or offset != self._log.offset

    def _renew_rows(self) -> None:
        read = self._log.result()
        count = len(read.rows)
        self.rows = merge_segments(
            read.rows.assign(
                run=pd.array([self.run.name] * count, dtype="string"),
                arm=pd.array([self._arm] * count, dtype="string"),
                seed=pd.array([self._seed] * count, dtype="Int64"),
            )
        )
        self._segments = read.segments
        self._failure = read.reason or grad_norm_finding(read.grad_norm_not_finite, read.rows)

    def _now(self) -> RunNow:
        status = self._status
        if self._failure and not status.reason:
            status = replace(status, reason=self._failure)
        last = {name: _last(self.rows, name) for name in ("step", "loss", "tps", "memory_gib")}
        return RunNow(
            name=self.run.name,
            arm=self._arm,
            seed=self._seed,
            status=status,
            step=0 if math.isnan(last["step"]) else int(last["step"]),
            steps=self._steps,
            loss=last["loss"],
            tps=last["tps"],
            memory_gib=last["memory_gib"],
            step_time_s=_pace_s(self.rows),
            segments=self._segments,
        )


class StudyFollower:
    """All runs at or below a path, the newest attempt at each arm and seed.

    The path need not exist yet: a job that waits makes its folder when it starts.

    Args:
        path: a run, a study, or the folder of all studies.
        find_interval_s: how often new run directories are looked for.
        clock: monotonic seconds.

    Attributes:
        path: absolute.
        runs: in order of name.
    """

    def __init__(
        self,
        path: Path,
        *,
        find_interval_s: float = FIND_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path.absolute()
        self.runs: list[RunFollower] = []
        self._find_interval_s, self._clock = find_interval_s, clock
        self._found_at = -math.inf

    @property
    def all_final(self) -> bool:
        """Whether there are runs, and nothing more will happen to any of them."""
        return bool(self.runs) and all(one.now.status.state.is_final for one in self.runs)

    @property
    def rows(self) -> pd.DataFrame:
        """Metrics table of all runs."""
        tables = [one.rows for one in self.runs if len(one.rows)]
        return pd.concat(tables, ignore_index=True) if tables else metrics_table({"segment": [], "step": []})

    def poll(self) -> list[RunFollower]:
        """Read what is new; return the runs of which anything is."""
        if self._clock() - self._found_at >= self._find_interval_s:
            self._find()
            self._found_at = self._clock()
        return [one for one in self.runs if one.poll()]

    def ask(self, scheduler: Callable[[Sequence[RunDir]], Sequence[Status]]) -> str:
        """Have the status files brought up to date; the next poll reads them.

        Args:
            scheduler: returns the status of each run; where it could not find out, with a reason beyond the file's.

        Returns:
            That reason, or an empty text.
        """
        runs = [one.run for one in self.runs]
        statuses = scheduler(runs)
        told = (found.reason for run, found in zip(runs, statuses, strict=True) if found.reason != run.status.reason)
        return next((reason for reason in told if reason), "")

    def _find(self) -> None:
        known = {one.run.path: one for one in self.runs}
        newest = _newest(directory.find(self.path))
        self.runs = [known.get(run.path) or RunFollower(run) for run in newest]


def _newest(runs: Iterable[RunDir]) -> list[RunDir]:
    """The last attempt in each folder of an arm and seed; attempts are named by their time."""
    return list({run.path.parent: run for run in runs}.values())


def _last(rows: pd.DataFrame, column: str) -> float:
    return float(rows[column].iloc[-1]) if len(rows) else math.nan


def _pace_s(rows: pd.DataFrame) -> float:
    """Seconds a step between the last two rows of one launch."""
    last = rows.iloc[-2:]
    if len(last) < 2 or last["segment"].nunique() > 1:
        return math.nan
    return float(last["time"].diff().iloc[-1] / last["step"].diff().iloc[-1])
