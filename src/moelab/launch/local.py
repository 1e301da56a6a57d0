"""Run one experiment on this machine: torchrun, its log, its end.

The launcher holds nothing that a kill could lose. torchrun writes to a file, the metrics are read from that file, and
the status is replaced whole. torchrun is asked to end when the launcher dies, so no rank keeps a core busy unseen.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, Precision
from moelab.launch import failure
from moelab.launch.capability import refusals
from moelab.launch.staging import stage_data
from moelab.machine import cores, environment
from moelab.runs import directory
from moelab.runs.collect import collect_run, converted_modules
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json, write_whole
from moelab.runs.log import LogFollower
from moelab.runs.status import State, Status

POLL_S = 0.5
STOP_S = 45.0  # torchrun kills ranks that do not end by themselves after 30 s
LOG_TAIL_BYTES = 200_000
MIN_FREE_BYTES = 16 << 20
Row = dict[str, float]
_LIBC = ctypes.CDLL(None)  # loaded here: a forked child of a process with threads must not load libraries


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is executed: an argument list and the variables that it needs beyond the caller's environment."""

    arguments: list[str]
    variables: dict[str, str]

    def as_shell(self) -> str:
        """The command as a line that a person can paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def command(experiment: Experiment, folder: Path) -> Command:
    """The torchrun command of an experiment.

    Args:
        experiment: a single-node experiment.
        folder: its run directory, absolute.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={experiment.gpus_per_node}"]
    # Port 0: the system picks a free one, so that runs beside each other do not meet.
    torchrun += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--role=rank",
        "--tee=3",
        f"--log-dir={folder}/logs",
    ]
    train = [
        "-m",
        "torchtitan.train",
        "--module",
        "moelab.titan",
        "--config",
        "experiment",
        "--dump_folder",
        str(folder),
    ]
    variables = {
        "MOELAB_EXPERIMENT": str(folder / directory.EXPERIMENT_FILE),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as TorchTitan's own launcher; memory is predicted for it
        "OMP_NUM_THREADS": str(max(1, cores() // experiment.gpus_per_node)),
    }
    if experiment.hardware == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if experiment.dataset == "python":
        variables["HF_HUB_OFFLINE"] = "1"
    return Command(arguments=torchrun + train, variables=variables)


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
    if problem := _no_space(runs):
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
    with run.log.open("ab") as log, _Process(launched, log) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            _report(follower, on_rows)
            if problem := _no_space(run.path):  # ranks would train on and lose what they log
                return replace(status, state=State.FAILED, reason=problem)
    _report(follower, on_rows)
    return _ended(run, replace(status, exit_code=process.returncode))


def _no_space(folder: Path) -> str | None:
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


def _ended(run: RunDir, status: Status) -> Status:
    if status.exit_code == 0:
        if run.experiment.precision is Precision.MXFP8 and not converted_modules(run):
            return replace(status, state=State.FAILED, reason="precision is mxfp8, but no module was converted")
        left, planned = collect_run(run), run.experiment.steps
        if left.status.state is State.FAILED:
            return replace(status, state=State.FAILED, reason=left.status.reason)
        if left.last_step < planned:
            return replace(status, state=State.FAILED, reason=f"training ended at step {left.last_step} of {planned}")
        return replace(status, state=State.COMPLETED)
    with run.log.open("rb") as log:
        log.seek(max(0, run.log.stat().st_size - LOG_TAIL_BYTES))
        tail = log.read().decode(errors="replace")
    reason = (
        failure.cause(run.log.parent, tail) or f"torchrun ended with exit code {status.exit_code}; see {run.log.name}"
    )
    return replace(status, state=State.FAILED, reason=reason)


class _Process:
    """torchrun in a session of its own, stopped with all its ranks however the block is left."""

    def __init__(self, launched: Command, log: IO[bytes]) -> None:
        self._experiment = launched.variables["MOELAB_EXPERIMENT"]
        self._popen = subprocess.Popen(
            launched.arguments,
            env={**os.environ, **launched.variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the launcher, which stops the ranks in order
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._popen

    def __exit__(self, *_exception: object) -> None:
        try:
            if self._popen.poll() is None:
                self._popen.terminate()  # torchrun passes SIGTERM on to its ranks
                with suppress(subprocess.TimeoutExpired):
                    self._popen.wait(STOP_S)
        finally:  # also after a second Ctrl-C, and where torchrun itself was killed
            self._popen.kill()
            self._popen.wait()
            _kill_ranks(self._experiment)


def _kill_ranks(experiment: str) -> None:
    """Kill what is left of a run on Linux: torchrun's ranks have sessions of their own, but all carry its variable."""
    variable = f"MOELAB_EXPERIMENT={experiment}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent dies (``prctl(PR_SET_PDEATHSIG)``)."""
    _LIBC.prctl(1, signal.SIGTERM)
