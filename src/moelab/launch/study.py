"""Run the experiments of a study that are not finished yet, one after the other.

A finished study is left as it is; an interrupted one is continued with what is missing. One launcher at a time works on
a study, so a run that says ``running`` while no launcher holds the study was left by one that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.launch.capability import refusals
from moelab.launch.local import close, run_experiment
from moelab.launch.progress import Progress, Say, say_on_stderr
from moelab.launch.slurm.ticket import ticket_of
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.status import State

OnFailure = Literal["continue", "stop"]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """What came of a study.

    Attributes:
        runs: the latest run of each experiment that has one, in the study's order.
        trained: how many were trained now; the others were finished before.
    """

    runs: tuple[RunDir, ...]
    trained: int

    @property
    def failed(self) -> tuple[RunDir, ...]:
        """Runs that did not complete."""
        return tuple(run for run in self.runs if run.status.state is not State.COMPLETED)


def run_study(study: Study, runs: Path, *, on_failure: OnFailure = "continue", say: Say = say_on_stderr) -> StudyRun:
    """Train what is missing of a study on this machine.

    Args:
        study: its experiments run in their order.
        runs: the folder that holds all studies.
        on_failure: whether to go on with the next experiment after one failed.
        say: receives lines of progress.

    Raises:
        Refused: before anything is started, if this machine cannot run one of the experiments, or another process is
            already working on the study.
    """
    runs = runs.absolute()
    _require_runnable(study)
    with only_launcher(runs, study):
        _close_orphans(runs, study)
        finished = ((index, _finished(runs, experiment)) for index, experiment in enumerate(study.experiments))
        found = {index: run for index, run in finished if run}
        progress = Progress(study, found, say)
        before = len(found)
        for index, experiment in enumerate(study.experiments):
            if index in found:
                continue
            progress.start(index)
            found[index] = run_experiment(runs, experiment, on_rows=progress.rows)
            status = found[index].status
            progress.end(f"{status.state}: {status.reason}" if status.reason else status.state.value)
            if status.state is not State.COMPLETED and on_failure == "stop":
                break
        return StudyRun(runs=tuple(found[index] for index in sorted(found)), trained=len(found) - before)


def _require_runnable(study: Study) -> None:
    reasons = {f"{e.arm}: {reason}": None for e in study.experiments for reason in refusals(e)}
    if reasons:
        raise Refused("\n".join(reasons))


def _finished(runs: Path, experiment: Experiment) -> RunDir | None:
    done = [run for run in directory.attempts(runs, experiment) if run.status.state is State.COMPLETED]
    return done[-1] if done else None


@contextmanager
def only_launcher(runs: Path, study: Study) -> Iterator[None]:
    """Hold a study: one process at a time trains or submits it.

    Raises:
        Refused: if another one does.
    """
    folder = runs / study.name
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".launcher.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Refused(f"another process is launching study {study.name!r} in {runs}; wait for it or stop it") from None
    try:
        yield
    finally:
        lock.release()


def _close_orphans(runs: Path, study: Study) -> None:
    for run in directory.find(runs / study.name):
        status = run.status
        if not status.state.is_final and not (status.job_id or ticket_of(run)):  # a job of Slurm has no launcher here
            close(run, replace(status, state=State.FAILED, reason="the launcher was killed"))
