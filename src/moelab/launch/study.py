"""Run the experiments of a study that are not finished yet, one after the other.

A finished study is left as it is; an interrupted one is continued with what is missing. One launcher at a time works on
a study, so a run that says ``running`` while no launcher holds the study was left by one that was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from moelab.errors import Refused
from moelab.experiment_file import Study
from moelab.launch.capability import refusals
from moelab.launch.local import close, run_experiment
from moelab.launch.progress import Progress, Say, say_on_stderr
from moelab.launch.slurm.ticket import ticket_of
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.status import FILE as STATUS_FILE
from moelab.runs.status import State

OnFailure = Literal["continue", "stop"]


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """What came of a study.

    Attributes:
        runs: the latest run of each experiment that has one, in the study's order.
        trained: how many were trained now; the others were finished before.
        found: what was there before.
    """

    runs: tuple[RunDir, ...]
    trained: int
    found: Discovery

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
        Refused: before anything is started, if this machine cannot run one of the experiments, another process is
            already working on the study, or nobody knows how a run of it ended.
    """
    runs = runs.absolute()
    _require_runnable(study)
    with only_launcher(runs, study):
        here = directory.discover(runs / study.name)
        for line in here.lines:
            say(line)
        attempts = [here.attempts(experiment) for experiment in study.experiments]
        require_known_ends(attempts)
        _close_orphans(here)
        found = {index: run for index, tried in enumerate(attempts) if (run := completed(tried))}
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
        return StudyRun(runs=tuple(found[index] for index in sorted(found)), trained=len(found) - before, found=here)


def _require_runnable(study: Study) -> None:
    reasons = {f"{e.arm}: {reason}": None for e in study.experiments for reason in refusals(e)}
    if reasons:
        raise Refused("\n".join(reasons))


def completed(attempts: Sequence[RunDir]) -> RunDir | None:
    """The last of the attempts at an experiment that completed."""
    return next((run for run in reversed(attempts) if run.status.state is State.COMPLETED), None)


def require_known_ends(attempts: Iterable[Sequence[RunDir]]) -> None:
    """Train nothing again of which a run may have completed, or may still be training.

    Args:
        attempts: at each experiment.

    Raises:
        Refused: if none of an experiment's runs completed and one has no readable status.
    """
    lost = [run for tried in attempts if not completed(tried) for run in tried if run.status.is_lost]
    if lost:
        raise Refused(
            "\n".join(
                f"{run.name}: nobody knows how it ended ({run.status.reason}); it has {collect_run(run).last_step} of "
                f"{run.experiment.steps} steps"
                for run in lost
            )
            + f'\nto train it again, move its folder out of the study; to keep it, write {{"state": "completed"}} '
            f"into its {STATUS_FILE}"
        )


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


def _close_orphans(found: Discovery) -> None:
    for run in found.all_runs:
        status = run.status
        is_ours = not (status.job_id or ticket_of(run))  # a job of Slurm has no launcher here
        if is_ours and not (status.is_lost or status.state.is_final):
            close(run, replace(status, state=State.FAILED, reason="the launcher was killed"))
