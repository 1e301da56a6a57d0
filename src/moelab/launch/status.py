"""The status of runs that were submitted to Slurm, commands on their jobs, and a live view of any runs.

A job writes its own status (:mod:`moelab.launch.in_job`) and knows best how training ended; Slurm knows what no program
can write down itself: that it waits, was cancelled, or lost its node. An end that nobody saw is ``unknown``, never
completed. Nothing is cancelled or requeued unless someone asks for it, and the live view only reads run directories.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from moelab.errors import MoelabError, Refused
from moelab.launch import ends, slurm
from moelab.launch.slurm import Queue, SlurmError, SlurmJob, SlurmMissing, ticket_of
from moelab.privacy import one_line
from moelab.runs.directory import RunDir
from moelab.runs.follow import RunNow, StudyFollower, format_seconds
from moelab.runs.status import BY_CANCEL, State, Status
from moelab.runs.stragglers import slow_steps

ACTIVE = (State.SUBMITTED, State.RUNNING)
INTERVAL_S = 2.0
ASK_INTERVAL_S = 15.0
"""How often Slurm is asked."""
QUIET_S = 30.0
"""If all runs have ended and none began for this long, there is nothing left to watch."""
_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_SHOWN_LINES = 6


def refresh(runs: Collection[RunDir]) -> list[Status]:
    """Update the status of runs, and collect those that ended: Slurm's with one query, and a killed launcher's.

    Returns:
        The status of each. Where Slurm cannot be asked, the last known one, with the reason why it may be out of date.
    """
    ends.close_killed(run for run in runs if not ticket_of(run))
    if not any(ticket_of(run) for run in runs):
        return [run.status for run in runs]
    try:
        queue = Queue(slurm.queue())
    except (SlurmError, SlurmMissing) as error:
        last = [run.status for run in runs]
        stale = f"as last seen; {error}"
        return [replace(one, reason=stale) if one.job_id and not one.state.is_final else one for one in last]
    return update(runs, queue)


def update(runs: Collection[RunDir], queue: Queue) -> list[Status]:
    """As :func:`refresh`, with a queue that was read just now."""
    jobs = {run: queue.job_of(run) for run in runs}
    before = {run: run.status for run, job in jobs.items() if job is None}
    gone = {run: now.job_id for run, now in before.items() if now.job_id and not now.state.is_final}
    ended = slurm.ended(gone.values())
    return [_update(run, jobs[run] or ended.get(gone.get(run, ""))) for run in runs]


def _update(run: RunDir, job: SlurmJob | None) -> Status:
    before = run.status
    try:
        after = _after(run, before, job)
    except (MoelabError, OSError, ValueError) as error:  # a damaged record or log must not hide other runs
        why = f"{job.in_words}; " if job else ""
        return before if before.state.is_final else replace(before, state=State.UNKNOWN, reason=f"{why}{error}")
    # Unchanged, it is not written: `updated` is when the status changed, not when somebody looked.
    if after == before:
        return before
    if run.status != before:  # the job has just written its own
        return run.status
    with suppress(OSError):  # over quota, or another user's runs: report what Slurm says nevertheless
        if after.state.is_final:
            ends.close(run, after)
        else:
            run.set_status(after)
    return after


def _after(run: RunDir, status: Status, job: SlurmJob | None) -> Status:
    """What a run's status becomes by what Slurm says of its job; None: it knows none."""
    if job is None:
        if status.state.is_final or status.state is State.UNKNOWN or not status.job_id:
            return status
        gone = f"Slurm no longer knows job {status.job_id}, and the job did not record its end"
        return replace(status, state=State.UNKNOWN, reason=gone)
    state = job.run_state
    # A job that was requeued after its last start had recorded an end is alive again.
    is_alive = state in ACTIVE and job.state != "COMPLETING" and job.restarts >= status.attempts
    if status.state.is_final and not is_alive:
        return status
    status = replace(status, job_id=job.job_id, exit_code=None)
    if state is State.COMPLETED:  # the script ended with 0; only the log says whether all steps were trained
        return ends.ended(run, replace(status, exit_code=0), run.log.parent)[0]
    if state is State.FAILED:
        where = f"see {run.log.name}, or slurm-{job.job_id}.out if no rank started"
        return replace(status, state=state, reason=f"{job.in_words}; {where}", exit_code=job.exit_code)
    # A reason from the last start, such as a requeue, no longer holds.
    return replace(status, state=state, reason=None if state is State.RUNNING else job.in_words)


def busy(runs: Collection[RunDir], queue: Queue) -> list[str]:
    """The runs that train or may train, each with its state in words; of Slurm's those that were just updated."""
    lines = []
    for run in runs:
        status, is_job = run.status, bool(ticket_of(run))
        if not may_live(run, status, queue):
            continue
        if status.job_id:
            lines.append(f"{run.name} is {status.state} as job {status.job_id}")
        elif is_job:
            lines.append(f"{run.name} is {status.in_words()}")
        else:
            lines.append(f"{run.name} is {status.state} by `moelab run`, which ends with Ctrl-C there")
    return lines


def may_live(run: RunDir, status: Status, queue: Queue) -> bool:
    """Whether a run waits or trains, or has a job in a state that only a newer Slurm has a word for."""
    return status.state in ACTIVE or (status.state is State.UNKNOWN and queue.job_of(run) is not None)


def require_no_jobs(runs: Collection[RunDir]) -> None:
    """Make sure that Slurm trains none of the runs, after asking it.

    Raises:
        Refused: naming each whose job is, or may be, alive.
    """
    of_slurm = [run for run in runs if ticket_of(run)]
    if not of_slurm:
        return
    try:
        queue = Queue(slurm.queue())
        update(of_slurm, queue)
        lines = busy(of_slurm, queue)
    except (SlurmError, SlurmMissing) as error:
        last = {run: run.status for run in of_slurm}
        lines = [
            f"{run.name} was {status.state} as job {status.job_id} when last seen, and Slurm cannot be asked: {error}"
            for run, status in last.items()
            if status.job_id and not status.state.is_final
        ]
    if lines:
        raise Refused("\n".join([*lines, "wait for them, or end them with `moelab cancel`"]))


def cancel(runs: Collection[RunDir]) -> list[Status]:
    """Cancel waiting and running jobs, and runs that were only prepared; ended ones are left as they are.

    Raises:
        Refused: if none of the runs was prepared for Slurm.
        SlurmMissing, SlurmError: with Slurm's words; statuses are then as before.
    """
    of_slurm = [run for run in runs if ticket_of(run)]
    if not of_slurm:
        raise Refused("no run there was prepared for Slurm; stop `moelab run` with Ctrl-C where it was started")
    queue = Queue(slurm.queue())
    before = dict(zip(of_slurm, update(of_slurm, queue), strict=True))
    going = {run: status for run, status in before.items() if may_live(run, status, queue)}
    for run, status in going.items():
        with suppress(OSError):  # before scancel: a job that SIGTERM ends looks here for the reason, and writes it
            run.set_status(replace(status, reason=BY_CANCEL))
    try:
        slurm.cancel(job.job_id for run in going if (job := queue.job_of(run)))
    except (SlurmError, SlurmMissing):
        for run, status in going.items():
            with suppress(OSError):
                if run.status.reason == BY_CANCEL:
                    run.set_status(status)
        raise
    for run, status in before.items():
        # A run that ended by itself in the meantime keeps its own end.
        if (run in going and not run.status.state.is_final) or status.state is State.PREPARED:
            unseen = run in going and not status.job_id
            reason = BY_CANCEL + ("; moelab did not find its job: check with `squeue --me`" * unseen)
            with suppress(OSError):  # another user's run, or over quota: the next query gets it from Slurm
                run.set_status(replace(status, state=State.CANCELLED, reason=reason))
    return [run.status for run in runs]


def requeue(runs: Collection[RunDir]) -> list[Status]:
    """Restart jobs that run, failed or were cancelled, from their newest checkpoint.

    Raises:
        Refused: if there is no such job, or Slurm no longer knows one of them; none is then requeued.
        SlurmMissing, SlurmError: with Slurm's words.
    """
    of_slurm = [run for run in runs if ticket_of(run)]
    queue = Queue(slurm.queue() if of_slurm else [])  # a machine without Slurm can tell that there is no job
    left = (State.COMPLETED, State.SUBMITTED, State.PREPARED)
    wanted = [run for run, now in zip(of_slurm, update(of_slurm, queue), strict=True) if now.state not in left]
    if not wanted:
        raise Refused("no run there has a Slurm job that runs, failed or was cancelled")
    jobs = {run: queue.job_of(run) for run in wanted}
    if forgotten := [run.name for run, job in jobs.items() if job is None]:
        raise Refused(f"Slurm no longer knows the job of {', '.join(forgotten)}; `moelab submit` the study again")
    for run, job in jobs.items():
        assert job is not None
        slurm.requeue(job.job_id)
        waiting = replace(run.status, state=State.SUBMITTED, reason="requeued by `moelab requeue`", exit_code=None)
        run.set_status(waiting)
    return [run.status for run in runs]


# --- the live view


def follow(
    path: Path,
    stream: TextIO,
    *,
    ask: Callable[[Sequence[RunDir]], Sequence[Status]] = refresh,
    interval_s: float = INTERVAL_S,
    quiet_s: float = QUIET_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> StudyFollower:
    """Show the runs at a path until all have ended; a terminal is redrawn in place.

    The path is that of a run, a study or the folder of all studies, and may appear later. ``ask`` updates the
    ``status.json`` of runs from their scheduler. After the last run has ended, new ones are waited for ``quiet_s``
    seconds; not at all, if all had ended before.

    Returns:
        The follower, with all that was read.

    Raises:
        KeyboardInterrupt: on Ctrl-C, which does nothing to the runs.
    """
    follower, is_terminal = StudyFollower(path, clock=clock), stream.isatty()
    changed_at, asked_at, problem, shown = -math.inf, -math.inf, "", dict[str, str]()
    # There is no time limit: jobs may wait for days.
    for look in itertools.count():
        changed = follower.poll()
        if clock() - asked_at >= ASK_INTERVAL_S:
            problem, asked_at = follower.ask(ask), clock()
            changed = [*changed, *follower.poll()]
        changed_at = clock() if changed and look else changed_at
        if is_terminal:
            stream.write(f"{_HOME_AND_CLEAR}{_screen(follower, problem)}")
        else:
            lines = {one.now.name: run_line(one.now) for one in changed}
            stream.write("".join(f"{line}\n" for name, line in lines.items() if shown.get(name) != line))
            shown.update(lines)
        stream.flush()
        if follower.all_final and clock() - changed_at >= quiet_s:
            break
        sleep(interval_s)
    return follower


def run_line(now: RunNow) -> str:
    """Where a run is, on one line."""
    return " | ".join([f"{now.name}: {now.status.in_words()}", *_numbers(now)])


def _numbers(now: RunNow) -> Iterator[str]:
    yield f"step {now.step}/{now.steps}" if now.steps else f"step {now.step}"
    if now.step:
        yield f"loss {now.loss:.3f}"
        yield f"{now.tps:,.0f} tokens/s per rank"
        yield f"{now.memory_gib:.1f} GiB"
    if now.segments > 1:
        yield f"{now.segments} launches"
    if math.isfinite(now.left_s):
        yield f"about {format_seconds(now.left_s)} left"


def _screen(follower: StudyFollower, problem: str) -> str:
    width = shutil.get_terminal_size().columns
    lines = [f"{time.strftime('%H:%M:%S')} | Ctrl-C does not stop the runs | {one_line(str(follower.path))}", ""]
    lines += [one_line(problem)] if problem else []
    for one in follower.runs:
        lines += [f"{one.now.name}: {one.now.status.in_words()}", f"  {' | '.join(_numbers(one.now))}"]
    lines += [] if follower.runs else ["no runs yet"]
    if newest := max(follower.runs, key=lambda one: one.now.status.updated, default=None):
        table = newest.rank_table
        lines += ["", newest.now.name]
        if math.isfinite(table.median_step_s):
            slow = slow_steps(table.steps, table.step_time_s).items()
            longer = f"; longer: {', '.join(f'step {step} {share:+.0%}' for step, share in slow)}" if slow else ""
            lines.append(f"{table.median_step_s:.3g} s a step over the newest {len(table.steps)}{longer}")
        lines += newest.tail[-_SHOWN_LINES:]
    return "".join(f"{line[:width]}\n" for line in lines)
