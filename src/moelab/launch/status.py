"""The status of runs that were submitted to Slurm, a live view of any runs, and commands on their jobs.

A job writes its own status (:mod:`moelab.launch.in_job`) and knows best how training ended; Slurm knows what no program
can write down itself: that it waits, was cancelled, or lost its node. An end that nobody saw is ``unknown``, never
completed.

The live view only reads run directories; the runs go on when it ends.

Nothing is cancelled, requeued or drained unless someone asks for it. Draining needs an operator's rights; without them,
:func:`requeue_without` still keeps a job away from nodes.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from moelab.errors import BadInput, MoelabError, Refused
from moelab.launch import ends, slurm
from moelab.launch.cluster import line as as_in_a_script
from moelab.launch.slurm import Queue, SlurmError, SlurmJob, SlurmMissing, call, checked, state_of, ticket_of, words_of
from moelab.privacy import one_line
from moelab.runs.directory import RunDir
from moelab.runs.follow import RunNow, StudyFollower, format_seconds
from moelab.runs.status import BY_CANCEL, State, Status
from moelab.runs.stragglers import slow_steps

ACTIVE = (State.SUBMITTED, State.RUNNING)
INTERVAL_S: Final = 2.0
ASK_INTERVAL_S: Final = 15.0
"""How often Slurm is asked."""
QUIET_S: Final = 30.0
"""If all runs have ended and none began for this long, there is nothing left to watch."""
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"
_SHOWN_LINES: Final = 6
LEAVING_S = 120.0
"""How long a requeued job may take to leave its nodes: Slurm's KillWait is 30 s by default, an epilog may add to it."""
POLL_S = 0.2
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def refresh(runs: Collection[RunDir]) -> list[Status]:
    """Update the status of runs, and collect those that ended: Slurm's with one query, and a killed launcher's.

    Returns:
        The status of each. Where Slurm cannot be asked, the last known one, with the reason why it may be out of date.
    """
    ends.close_killed(run for run in runs if not ticket_of(run))
    if not any(ticket_of(run) for run in runs):
        return [run.status for run in runs]
    try:
        queue = Queue.of(runs)
    except (SlurmError, SlurmMissing) as error:
        last = [run.status for run in runs]
        stale = f"as last seen; {error}"
        return [replace(one, reason=stale) if one.job_id and not one.state.is_final else one for one in last]
    return update(runs, queue)


def update(runs: Collection[RunDir], queue: Queue) -> list[Status]:
    """As :func:`refresh`, with a queue that was read just now."""
    jobs = {run: queue.job_of(run) for run in runs}
    gone = [run for run, job in jobs.items() if job is None and run.status.job_id and not run.status.state.is_final]
    ended = _ended(gone)
    return [_update(run, jobs[run] or ended.get(run)) for run in runs]


def busy(runs: Collection[RunDir], queue: Queue) -> list[str]:
    """The runs that train or may train, each with its state in words; of Slurm's those that were just updated."""
    states = {run: run.status for run in runs}
    alive = [
        run for run, now in states.items() if now.state in ACTIVE or (now.state is State.UNKNOWN and queue.job_of(run))
    ]
    return [f"{run.name} is {_whose(run, states[run])}" for run in alive]


def _whose(run: RunDir, status: Status) -> str:
    if status.job_id:
        return f"{status.state} as job {status.job_id}"
    return status.in_words() if ticket_of(run) else f"{status.state} by `moelab run`, which ends with Ctrl-C there"


def require_no_jobs(runs: Collection[RunDir]) -> None:
    """Make sure that Slurm trains none of the runs, after asking it.

    Raises:
        Refused: naming each whose job is, or may be, alive.
    """
    of_slurm = [run for run in runs if ticket_of(run)]
    if not of_slurm:
        return
    try:
        queue = Queue.of(of_slurm)
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


def _ended(runs: list[RunDir]) -> dict[RunDir, SlurmJob]:
    """Ends that the controller has forgotten: from accounting, else from the job completion log."""
    jobs: dict[RunDir, SlurmJob] = {}
    tickets = {run: ticket_of(run) for run in runs}
    clusters = {run: ticket.cluster if ticket else None for run, ticket in tickets.items()}
    for cluster in set(clusters.values()):
        here = {run: str(run.status.job_id) for run in runs if clusters[run] == cluster}
        accounted = slurm.ended_by_accounting(here.values(), cluster)
        jobs.update({run: accounted[number] for run, number in here.items() if number in accounted})
    left = {run: ticket for run, ticket in tickets.items() if run not in jobs and ticket}
    raw = {run: ticket.raw_id or str(run.status.job_id).partition("_")[0] for run, ticket in left.items()}
    logged = slurm.ended_by_completion_log(raw.values())
    for run, ticket in left.items():
        job = logged.get(raw[run])
        # An array that was cancelled while it waited has one entry, by its own number, for all that never started.
        if job and (ticket.raw_id or (run.status.attempts == 0 and state_of(job) is State.CANCELLED)):
            jobs[run] = job
    # The completion log has a job's number but not its task, hence job_id. A job that accounting believes to be alive
    # has left the controller unseen and is gone; but with a named cluster it may be alive, because squeue --json of
    # Slurm 22.05 asks its own controller, whatever cluster is named.
    return {
        run: replace(job, job_id=str(run.status.job_id), cluster=clusters[run])
        for run, job in jobs.items()
        if state_of(job).is_final or clusters[run]
    }


def _update(run: RunDir, job: SlurmJob | None) -> Status:
    before = run.status
    try:
        if job and job.state == "RUNNING" and (ticket := ticket_of(run)) and ticket.raw_id != job.raw_id:
            with suppress(OSError):
                replace(ticket, raw_id=job.raw_id).write(run)
        after = _after(run, before, job)
    except (MoelabError, OSError, ValueError) as error:  # a damaged record or log must not hide other runs
        why = f"{words_of(job)}; " if job else ""
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
    if job is None:
        # An earlier version recorded whatever sbatch printed, such as the dashes above a site's greeting.
        if not status.state.is_final and status.job_id and not slurm.is_number(status.job_id):
            words = slurm.number_unknown(run, repr(status.job_id[:80]))
            return replace(status, state=State.SUBMITTED, job_id=None, reason=words)
        if status.state.is_final or status.state is State.UNKNOWN or not status.job_id:
            return status
        gone = f"Slurm no longer knows job {status.job_id}, and the job did not record its end"
        return replace(status, state=State.UNKNOWN, reason=gone)
    state = state_of(job)
    # A job that was requeued after its last start had recorded an end is alive again.
    is_alive = state in ACTIVE and job.state != "COMPLETING" and job.restarts >= status.attempts
    if status.state.is_final and not is_alive:
        return status
    status = replace(status, job_id=job.job_id, exit_code=None)
    if state is State.COMPLETED:  # the script ended with 0; only the log says whether all steps were trained
        return ends.ended(run, replace(status, exit_code=0), run.log.parent)[0]
    # A reason from the last start, such as a requeue, no longer holds.
    if state is State.RUNNING:
        return replace(status, state=state, reason=None)
    if state is State.FAILED:
        return replace(
            status,
            state=state,
            reason=f"{words_of(job)}; see {run.log.name}, or slurm-{job.job_id}.out if no rank started",
            exit_code=job.exit_code,
        )
    return replace(status, state=state, reason=words_of(job))


def cancel(runs: Collection[RunDir]) -> list[Status]:
    """Cancel waiting and running jobs, and runs that were only prepared; ended ones are left as they are.

    Raises:
        Refused: if none of the runs was prepared for Slurm.
        SlurmMissing, SlurmError: with Slurm's words; statuses are then as before.
    """
    of_slurm = [run for run in runs if ticket_of(run)]
    if not of_slurm:
        raise Refused("no run there was prepared for Slurm; stop `moelab run` with Ctrl-C where it was started")
    queue = Queue.of(of_slurm)
    before = dict(zip(of_slurm, update(of_slurm, queue), strict=True))
    # A state is also unknown where a newer Slurm has a new word for it: the job may be alive.
    going = [
        run
        for run, status in before.items()
        if status.state in ACTIVE or (status.state is State.UNKNOWN and queue.job_of(run))
    ]
    for run in going:  # before scancel: a job that SIGTERM ends looks here for the reason, to write it in its status
        with suppress(OSError):
            run.set_status(replace(before[run], reason=BY_CANCEL))
    if going:
        try:
            slurm.cancel(job for run in going if (job := queue.job_of(run) or _ended([run]).get(run)))
        except (SlurmError, SlurmMissing):
            for run in going:
                with suppress(OSError):
                    if run.status.reason == BY_CANCEL:
                        run.set_status(before[run])
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
    queue = Queue.of(of_slurm) if of_slurm else Queue([])  # a machine without Slurm can tell that there is no job
    left = (State.COMPLETED, State.SUBMITTED, State.PREPARED)
    wanted = [run for run, now in zip(of_slurm, update(of_slurm, queue), strict=True) if now.state not in left]
    if not wanted:
        raise Refused("no run there has a Slurm job that runs, failed or was cancelled")
    jobs = {run: job for run in wanted if (job := queue.job_of(run))}
    if forgotten := [run.name for run in wanted if run not in jobs]:
        raise Refused(f"Slurm no longer knows the job of {', '.join(forgotten)}; `moelab submit` the study again")
    for run, job in jobs.items():
        slurm.requeue(job)
        waiting = replace(run.status, state=State.SUBMITTED, reason="requeued by `moelab requeue`", exit_code=None)
        run.set_status(waiting)
    return [run.status for run in runs]


def drain(nodes: Sequence[str], reason: str) -> None:
    """Let nodes finish what they run and take no more, until an operator, who sees the reason, resumes them.

    Raises:
        BadInput: for an invalid name or reason.
        SlurmMissing, SlurmError: if Slurm does not do it, such as for lack of rights.
    """
    try:
        as_in_a_script(reason)
    except ValueError as error:
        raise BadInput(f"reason: got {reason[:80]!r}; valid: {error}") from None
    call("scontrol", "update", f"nodename={_node_list(nodes)}", "state=drain", f"reason={reason}")


def requeue_without(job_id: str, nodes: Sequence[str]) -> None:
    """Restart a running or waiting job on other nodes; its script must allow a requeue, as moelab's do.

    Raises:
        BadInput: for an invalid node name.
        SlurmMissing, SlurmError: if Slurm does not do it, or the job does not leave its nodes; it is then held until
            ``scontrol release``.
    """
    job, listed = checked(job_id), _node_list(nodes)
    # Held, so that it does not start before the nodes are excluded.
    call("scontrol", "hold" if _job_state(job) == "PENDING" else "requeuehold", job)
    end = time.monotonic() + LEAVING_S
    while (state := _job_state(job)) != "PENDING":
        if time.monotonic() > end:
            raise SlurmError(f"job {job} is still {state} {LEAVING_S:.0f} s after it was requeued")
        time.sleep(POLL_S)
    call("scontrol", "update", f"jobid={job}", f"excnodelist={listed}")
    call("scontrol", "release", job)


def _node_list(nodes: Sequence[str]) -> str:
    if not nodes or not all(_NODE.fullmatch(node) for node in nodes):
        raise BadInput(f"nodes: got {', '.join(nodes)[:80]!r}; valid: at least one node name, such as gpu017")
    return ",".join(nodes)


def _job_state(job: str) -> str:
    state = re.search(r"\bJobState=(\w+)", call("scontrol", "show", "job", "-o", job))
    return state[1] if state else ""


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
    newest = max(follower.runs, key=lambda one: one.now.status.updated, default=None)
    if newest:
        lines += ["", newest.now.name]
        table = newest.rank_table
        known = table.step_time_s[np.isfinite(table.step_time_s)]
        if len(known):
            slow = slow_steps(table.steps, table.step_time_s).items()
            longer = f"; longer: {', '.join(f'step {step} {share:+.0%}' for step, share in slow)}" if slow else ""
            lines.append(f"{np.median(known):.3g} s a step over the newest {len(table.steps)}{longer}")
        lines += newest.tail[-_SHOWN_LINES:]
    return "".join(f"{line[:width]}\n" for line in lines)
