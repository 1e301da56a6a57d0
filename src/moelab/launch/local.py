"""Run one experiment on this machine: torchrun, its log, its end.

The launcher holds nothing that a kill could lose. torchrun writes to a file, the metrics are read from that file, and
the status is replaced whole. torchrun is asked to end when the launcher dies, so no rank keeps a core busy unseen.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, Precision
from moelab.launch import failure
from moelab.launch.capability import refusals
from moelab.launch.staging import stage_data
from moelab.launch.torchrun import Command, Process, command
from moelab.machine import environment
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json, write_whole
from moelab.runs.follow import LogFollower
from moelab.runs.side_files import converted_modules
from moelab.runs.status import State, Status

POLL_S = 0.5
LOG_TAIL_BYTES = 200_000
MIN_FREE_BYTES = 16 << 20
Row = dict[str, float]


def run_experiment(
    runs: Path,
    experiment: Experiment,
    *,
    on_rows: Callable[[list[Row]], None] = lambda _rows: None,
) -> RunDir:
    """Train one experiment to its end and collect what it left.

    Args:
        runs: the folder that holds all studies.
        experiment: a single-node experiment.
        on_rows: called with each batch of new metric rows while training runs.

    Returns:
        The run directory, whose status says how it ended.

    Raises:
        Refused: before anything is started, if this machine cannot run it.
        KeyboardInterrupt: after the ranks were stopped and the status written.
    """
    if reasons := refusals(experiment):
        raise Refused("\n".join(reasons))
    runs = runs.absolute()
    runs.mkdir(parents=True, exist_ok=True)
    if problem := no_space(runs):
        raise Refused(problem)
    stage_data(experiment)
    run = directory.create(runs, experiment)
    try:
        write_json(run.path / "environment.json", environment(nodes=experiment.nodes))
        launched = command(experiment, run.path)
        write_whole(run.path / "launch" / "command.sh", f"{launched.as_shell()}\n")
        status = _train(run, launched, on_rows)
    except OSError as error:
        status = replace(run.status, state=State.FAILED, reason=f"the launcher failed: {error}")
    except (KeyboardInterrupt, SystemExit):
        close(run, replace(run.status, state=State.CANCELLED, reason="interrupted by the user"))
        raise
    except Exception as error:
        close(run, replace(run.status, state=State.FAILED, reason=f"the launcher failed: {error!r}"))
        raise
    close(run, status)
    return run


def close(run: RunDir, status: Status) -> None:
    """Write the final status first; metrics and results can be made again from the log at any time."""
    run.set_status(status)
    with suppress(OSError, BadInput):  # a full disk; an experiment of another version of moelab
        collect_run(run, save=True)


def _train(run: RunDir, launched: Command, on_rows: Callable[[list[Row]], None]) -> Status:
    status = Status(state=State.RUNNING, attempts=1)
    run.set_status(status)
    follower = LogFollower(run.log)
    with run.log.open("ab") as log, Process(launched, log) as process:
        while process.poll() is None:
            with suppress(TimeoutExpired):
                process.wait(POLL_S)
            _report(follower, on_rows)
            if problem := no_space(run.path):  # ranks would train on and lose what they log
                return replace(status, state=State.FAILED, reason=problem)
    _report(follower, on_rows)
    return ended(run, replace(status, exit_code=process.returncode), run.log.parent)


def no_space(folder: Path) -> str | None:
    """What to say if there is too little space for what a run logs, else None."""
    free = shutil.disk_usage(folder).free
    if free >= MIN_FREE_BYTES:
        return None
    return (
        f"no disk space: {free / 2**20:.1f} MiB are free where the runs are, {MIN_FREE_BYTES >> 20} MiB are needed; "
        "free some, or choose another folder for the runs"
    )


def _report(follower: LogFollower, on_rows: Callable[[list[Row]], None]) -> None:
    rows = follower.poll()
    if len(rows):
        on_rows([{str(name): value for name, value in row.items()} for row in rows.to_dict("records")])


def ended(run: RunDir, status: Status, logs: Path, *, log_start: int = 0) -> Status:
    """What a run's end means.

    Args:
        run: its directory, with everything logged.
        status: with torchrun's exit code.
        logs: the ranks' own logs of this launch, as torchrun was told to write them.
        log_start: where this launch begins in ``train.log``, in bytes.
    """
    if status.exit_code == 0:
        if run.experiment.precision is Precision.MXFP8 and not converted_modules(run):
            return replace(status, state=State.FAILED, reason="precision is mxfp8, but no module was converted")
        left, planned = collect_run(run), run.experiment.steps
        if left.status.state is State.FAILED:
            return replace(status, state=State.FAILED, reason=left.status.reason)
        if left.last_step < planned:
            return replace(status, state=State.FAILED, reason=f"training ended at step {left.last_step} of {planned}")
        return replace(status, state=State.COMPLETED)
    reason = failure_of(run, logs, log_start) or f"torchrun ended with exit code {status.exit_code}; see {run.log.name}"
    return replace(status, state=State.FAILED, reason=reason)


def failure_of(run: RunDir, logs: Path, log_start: int) -> str | None:
    """What failed first in a launch, on one line, or None; the arguments are those of :func:`ended`."""
    with run.log.open("rb") as log:
        log.seek(max(log_start, run.log.stat().st_size - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace")
    return failure.cause(logs, tail, ranks_per_node=run.experiment.gpus_per_node)
