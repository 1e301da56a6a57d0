"""How runs end: who may launch a study, what a killed launcher left, and the final status of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from moelab.errors import BadInput, Refused
from moelab.experiment import BLOCK_SCALED
from moelab.launch.slurm import ticket_of
from moelab.launch.torchrun import end_processes, launches_of, living
from moelab.machine import boot_id
from moelab.runs.collect import Collected, collect_run, save_results
from moelab.runs.directory import RunDir
from moelab.runs.failure import Statement, cause
from moelab.runs.log_text import tail
from moelab.runs.side_files import converted_modules
from moelab.runs.status import State, Status

LOCK_WAIT_S = 1.0
"""Longer than those hold the lock who only look whether a launcher is alive."""


@contextmanager
def only_launcher(folder: Path) -> Iterator[None]:
    """Lock the folder of a study: one process at a time trains or submits it.

    Raises:
        Refused: if another one holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".launcher.lock")  # the system releases it when this process ends, however that happens
    try:
        lock.acquire(timeout=LOCK_WAIT_S)
    except Timeout:
        raise Refused(
            f"another process is launching study {folder.name!r} in {folder.parent}; wait for it or stop it"
        ) from None
    try:
        yield
    finally:
        lock.release()


def close_killed(runs: Iterable[RunDir]) -> None:
    """Close runs that say ``running`` although their launcher was killed on this machine and none of it is alive.

    This machine cannot see a launcher on another one, or before its own reboot: the next run closes those.
    """
    here = boot_id()
    mine = [run for run in runs if here and (status := run.status).state is State.RUNNING and status.boot_id == here]
    alive = living([launch for run in mine for launch in launches_of(run)])
    for run in mine:
        if not alive & {*launches_of(run)}:
            with suppress(Refused, OSError), only_launcher(run.path.parents[2]):  # held: the launcher lives
                close_orphans([run])


def close_orphans(runs: Iterable[RunDir]) -> int:
    """Close runs whose launcher was killed, and end their processes, so that nothing trains beside the next run.

    Returns:
        How many processes there were.
    """
    orphans = {
        run: status
        for run in runs  # a Slurm job has no launcher here
        if not ((status := run.status).job_id or ticket_of(run) or status.is_lost or status.state.is_final)
    }
    killed = end_processes([launch for run in orphans for launch in launches_of(run)])
    for run, status in orphans.items():
        close(run, replace(status, state=State.FAILED, reason="the launcher was killed"))
    return killed


def close(run: RunDir, status: Status, left: Collected | None = None) -> None:
    """Write the final status first; results can be made again from the metrics at any time.

    ``left`` is what the run left, where :func:`ended` has read that already.
    """
    run.set_status(status)
    with suppress(OSError, BadInput):  # a full disk; a record of another version of moelab
        save_results(run, replace(left, status=status) if left else collect_run(run))


def ended(run: RunDir, status: Status, logs: Path, *, log_start: int = 0) -> tuple[Status, Collected | None]:
    """The final status of a run, and what the run left, where that had to be read.

    Args:
        run: with everything logged.
        status: with torchrun's exit code.
        logs: folder of the ranks' own logs of this launch.
        log_start: where this launch begins in ``train.log``, in bytes.
    """
    if status.exit_code != 0:
        code = f"torchrun ended with exit code {status.exit_code}; see {run.log.name}"
        return replace(status, state=State.FAILED, reason=str(failure_of(run, logs, log_start) or code)), None
    left, planned = collect_run(run), run.experiment.steps
    reason: str | None
    if run.experiment.precision in BLOCK_SCALED and not converted_modules(run):
        reason = f"precision is {run.experiment.precision.value}, but no module was converted"
    elif left.status.state is State.FAILED:  # exit code 0, but a loss that is not finite
        reason = left.status.reason
    elif left.last_step < planned:
        reason = f"training ended at step {left.last_step} of {planned}"
    else:
        return replace(status, state=State.COMPLETED), left
    return replace(status, state=State.FAILED, reason=reason), left


def failure_of(run: RunDir, logs: Path, log_start: int) -> Statement | None:
    """What failed first in a launch, or None; the arguments are those of :func:`ended`."""
    traces = run.path / "comm_traces"  # where TorchTitan has the flight recorder dump
    log = tail(run.log, start=log_start)
    return cause(logs, log, ranks_per_node=run.experiment.gpus_per_node, traces=traces)
