"""The first node of a job accounts for the whole run: its status, its files, and whether the job is started again."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

from moelab.launch.failure import LOST_PEER
from moelab.launch.local import close, ended, failure_of, no_space
from moelab.launch.node import Start, train
from moelab.launch.place import REQUEUE_CODE, TERMINATED
from moelab.machine import environment
from moelab.runs.directory import STOPPED_FILE
from moelab.runs.files import write_json, write_whole
from moelab.runs.status import State, Status

LOG_QUIET_S, LOG_WAIT_S = 1.0, 15.0


def account_for(start: Start) -> int:
    """Train as :func:`moelab.launch.node.train` does, and write the run's status before, after and in between.

    Returns:
        What :func:`moelab.launch.in_job.main` returns.
    """
    before = start.run.status
    status = Status(state=State.RUNNING, job_id=start.place.label, attempts=before.attempts + 1)
    start.run.set_status(status)
    try:
        code, status = _end(start, status)
    except Exception as error:
        close(start.run, replace(status, state=State.FAILED, reason=f"the launcher failed: {error}"))
        raise
    if status.state is State.SUBMITTED:
        start.run.set_status(status)
    else:
        close(start.run, status)
    return code


def _end(start: Start, status: Status) -> tuple[int, Status]:
    """Train to some end; the exit code for the script, and the run's status."""
    run = start.run
    if not _is_free(start.port):
        return _again(start, status, f"port {start.port} of {start.options.host} is in use by another program")
    (run.path / STOPPED_FILE).unlink(missing_ok=True)
    _record(start, status.attempts)
    log_start = run.log.stat().st_size

    def is_over() -> object:
        if start.signals.end:  # written at once: SIGKILL follows
            run.set_status(_terminated(start, status, log_start))
        return start.signals.end or no_space(run.path)  # without space, ranks would train on and lose what they log

    code = train(start, is_over)
    if start.signals.end:
        return TERMINATED, _terminated(start, status, log_start)
    if code == TERMINATED:
        return 1, replace(status, state=State.FAILED, reason=no_space(run.path) or "no disk space for a moment")
    _settle(run.log)
    if code == 0 and (run.path / STOPPED_FILE).exists():
        step = json.loads((run.path / STOPPED_FILE).read_text())["step"]
        return _again(start, status, f"saved step {step} of {run.experiment.steps} before the time limit")
    status = ended(run, replace(status, exit_code=code), start.logs, log_start=log_start)
    return (0 if status.state is State.COMPLETED else 1), status


def _again(start: Start, status: Status, why: str) -> tuple[int, Status]:
    """Have the job started again, unless that was done too often."""
    done, task = start.place.restarts, start.place.label.partition("_")[2]
    if done < start.options.requeues:
        return REQUEUE_CODE, replace(status, state=State.SUBMITTED, reason=f"{why}; requeued")
    go_on = f"`sbatch --array={task} {start.run.path}/launch/job.sbatch` goes on from there"
    limit = f"requeued {done} times, which is the limit of the cluster's profile"
    return 1, replace(status, state=State.FAILED, reason=f"{why}; {limit}; {go_on}")


def _terminated(start: Start, status: Status, log_start: int) -> Status:
    """The status after SIGTERM: a rank's failure if there is one, or else what Slurm alone knows.

    srun ends all nodes when one fails, and Slurm does when the job is cancelled, preempted, requeued or out of time.
    """
    found = failure_of(start.run, start.logs, log_start)
    if found and not LOST_PEER.search(found):
        return replace(status, state=State.FAILED, reason=found)
    if start.signals.save:
        late = "out of time before a checkpoint was saved: raise signal_s of the cluster's profile"
        return replace(status, state=State.FAILED, reason=late)
    said = start.run.status
    if said.state is State.CANCELLED:  # `moelab cancel` knows why
        return replace(status, state=said.state, reason=said.reason)
    ended_by = "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"
    return replace(status, state=State.UNKNOWN, reason=ended_by)


def _record(start: Start, attempt: int) -> None:
    """Write down what runs and where; a later start adds its own files, since it may run on other nodes."""
    run = start.run
    number = "" if attempt == 1 else f"-{attempt}"
    write_whole(run.path / "launch" / f"command{number}.sh", f"{start.command(run.experiment).as_shell()}\n")
    write_json(run.path / f"environment{number}.json", environment(nodes=start.place.nodes))


def _settle(log: Path) -> None:
    """Wait until srun has written everything that the ranks of all nodes said."""
    end, size = time.monotonic() + LOG_WAIT_S, -1
    while time.monotonic() < end and size != (size := log.stat().st_size):
        time.sleep(LOG_QUIET_S)


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("", port))
        except OSError:
            return False
        return True
