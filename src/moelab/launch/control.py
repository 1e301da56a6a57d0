"""Cancel the jobs of runs, or let them start again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moelab.errors import Refused
from moelab.launch.slurm import client, jobs
from moelab.launch.slurm.ticket import Queue, ticket_of
from moelab.launch.watch import ACTIVE, update
from moelab.runs.directory import RunDir
from moelab.runs.status import State, Status


def cancel(runs: Iterable[RunDir]) -> list[Status]:
    """Cancel what waits or runs; what has ended is left as it is.

    Args:
        runs: any; those that were prepared for Slurm and not submitted are cancelled too.

    Raises:
        SlurmMissing, SlurmError: with Slurm's words; statuses are then as before.
    """
    runs = list(runs)
    of_slurm = [run for run in runs if ticket_of(run)]
    if not of_slurm:
        raise Refused("no run there was prepared for Slurm; stop `moelab run` with Ctrl-C where it was started")
    queue = Queue(jobs.queue())
    before = dict(zip(of_slurm, update(of_slurm, queue), strict=True))
    going = [
        run
        for run, status in before.items()
        if status.state in ACTIVE or (status.state is State.UNKNOWN and queue.job_of(run))
    ]
    if going:
        client.cancel(job.job_id for run in going if (job := queue.job_of(run)))
    for run, status in before.items():
        if run in going or status.state is State.PREPARED:
            run.set_status(replace(status, state=State.CANCELLED, reason="by `moelab cancel`"))
    return [run.status for run in runs]


def requeue(runs: Iterable[RunDir]) -> list[Status]:
    """Let jobs that run, failed or were cancelled start again, from their newest checkpoint.

    Raises:
        Refused: if Slurm no longer knows one of the jobs; none is then requeued.
        SlurmMissing, SlurmError: with Slurm's words.
    """
    runs = list(runs)
    queue = Queue(jobs.queue())
    states = [status.state for status in update(runs, queue)]
    left = (State.COMPLETED, State.SUBMITTED, State.PREPARED)
    wanted = [run for run, state in zip(runs, states, strict=True) if ticket_of(run) and state not in left]
    if not wanted:
        raise Refused("no run there has a job of Slurm that runs, failed or was cancelled")
    found = {run: job for run in wanted if (job := queue.job_of(run))}
    if forgotten := [run.name for run in wanted if run not in found]:
        raise Refused(f"Slurm no longer knows the job of {', '.join(forgotten)}; use `moelab submit` again")
    for run, job in found.items():
        client.requeue(job.job_id)
        waiting = replace(run.status, state=State.SUBMITTED, reason="requeued by `moelab requeue`", exit_code=None)
        run.set_status(waiting)
    return [run.status for run in runs]
