"""Bring ``status.json`` up to date with what Slurm knows of each run's job.

The job writes its own status (:mod:`moelab.launch.in_job`) and knows best how training ended; Slurm knows of what no
program can write down: waiting, being cancelled, a lost node. What nobody saw is ``unknown``, never completed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from moelab.launch import local
from moelab.launch.slurm import jobs
from moelab.launch.slurm.client import SlurmError, SlurmMissing
from moelab.launch.slurm.jobs import Job
from moelab.launch.slurm.states import state_of, words_of
from moelab.launch.slurm.ticket import Queue, ticket_of
from moelab.runs.directory import RunDir
from moelab.runs.status import State, Status

ACTIVE = (State.SUBMITTED, State.RUNNING)


def refresh(runs: Iterable[RunDir]) -> list[Status]:
    """Update the runs that are jobs of Slurm, and collect those that ended, with one look at the queue for all.

    Args:
        runs: any; those that are not jobs are left as they are.

    Returns:
        The status of each. Where Slurm cannot be asked, that of the file, with the reason why it may be out of date.
    """
    runs = list(runs)
    if not any(ticket_of(run) for run in runs):
        return [run.status for run in runs]
    try:
        queue = Queue(jobs.queue())
    except (SlurmError, SlurmMissing) as error:
        return [_not_asked(run.status, error) for run in runs]
    return update(runs, queue)


def update(runs: Iterable[RunDir], queue: Queue) -> list[Status]:
    """As :func:`refresh`, with a queue that was read just now."""
    runs = list(runs)
    found = {run: queue.job_of(run) for run in runs}
    gone = [run for run, job in found.items() if job is None and run.status.job_id and not run.status.state.is_final]
    ended = _ended(gone)
    return [_update(run, found[run] or ended.get(run)) for run in runs]


def _not_asked(status: Status, error: Exception) -> Status:
    if status.state.is_final or not status.job_id:
        return status
    return replace(status, reason=f"as last seen; {error}")


def _ended(runs: list[RunDir]) -> dict[RunDir, Job]:
    """Ends that the controller has forgotten: from accounting, else from the job completion log."""
    if not runs:
        return {}
    numbers = {run: run.status.job_id or "" for run in runs}
    accounted = jobs.accounted(numbers.values())
    found = {run: accounted[number] for run, number in numbers.items() if number in accounted}
    raw = {run: ticket.raw_id for run in runs if run not in found and (ticket := ticket_of(run)) and ticket.raw_id}
    logged = jobs.completed(raw.values()) if raw else {}
    found.update({run: logged[number] for run, number in raw.items() if number in logged})
    return {run: job for run, job in found.items() if state_of(job).is_final}


def _update(run: RunDir, job: Job | None) -> Status:
    before = run.status
    if job and job.state == "RUNNING":
        _remember_number(run, job)
    after = _after(run, before, job)
    if after == before:
        return before
    if run.status != before:  # the job has just written its own
        return run.status
    with suppress(OSError):  # a full quota, or another person's runs: what Slurm says is told all the same
        if after.state.is_final:
            local.close(run, after)
        else:
            run.set_status(after)
    return after


def _after(run: RunDir, status: Status, job: Job | None) -> Status:
    if job is None:
        if status.state.is_final or status.state is State.UNKNOWN or not status.job_id:
            return status
        gone = f"Slurm no longer knows job {status.job_id}, and the job wrote no end"
        return replace(status, state=State.UNKNOWN, reason=gone)
    state = state_of(job)
    # A job that was requeued after its last start had written an end is alive again.
    again = state in ACTIVE and job.state != "COMPLETING" and job.restarts >= status.attempts
    if status.state.is_final and not again:
        return status
    status = replace(status, job_id=job.job_id, exit_code=None)
    if state is State.COMPLETED:  # of the script; whether all steps were trained, its log says
        return local.ended(run, replace(status, exit_code=0), run.log.parent)
    if state is State.RUNNING:
        return replace(status, state=state, reason=None)
    if state is State.FAILED:
        return replace(
            status,
            state=state,
            reason=f"{words_of(job)}; see {run.log.name}, or slurm-{job.job_id}.out for what came before the ranks",
            exit_code=job.exit_code,
        )
    return replace(status, state=state, reason=words_of(job))


def _remember_number(run: RunDir, job: Job) -> None:
    ticket = ticket_of(run)
    if ticket and ticket.raw_id != job.raw_id:
        with suppress(OSError):
            replace(ticket, raw_id=job.raw_id).write(run)
