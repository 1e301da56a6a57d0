"""torchrun as moelab starts it, on one machine or as one node of several: the command and the process."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.machine import cores, end_with_parent
from moelab.runs import directory
from moelab.runs.directory import RunDir

STOP_S = 45.0  # torchrun itself kills ranks that have not ended after 30 s
NODE_VARIABLE = "MOELAB_NODE"
LAUNCH_VARIABLE = "MOELAB_LAUNCH"
"""Of every process that a launch starts: the launch's record, a file in the run directory. A command that a person
pastes, or a shell with the run's other variables, does not have it."""
KILLED_S, KILL_POLL_S = 30.0, 0.05
"""How long a killed process may take to disappear: one that holds a GPU stays until the driver has freed it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """An argument list, and the variables that it needs beyond the caller's environment."""

    arguments: list[str]
    variables: dict[str, str]

    def as_shell(self) -> str:
        """The command as one line to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def on_this_machine(ranks: int) -> list[str]:
    """Torchrun for so many ranks of this machine alone; further options, the program and its arguments follow."""
    return [sys.executable, "-m", "moelab.launch.loopback", f"--nproc-per-node={ranks}"]


def command(
    experiment: Experiment,
    folder: Path,
    *,
    rendezvous: Sequence[str] = (),
    logs: str = "logs",
    titan: Sequence[str] = (),
) -> Command:
    """The torchrun command of an experiment, for one node.

    Args:
        experiment: it starts ``gpus_per_node`` ranks.
        folder: absolute path of its run directory.
        rendezvous: torchrun's options for the nodes and where they meet; none for this machine alone.
        logs: folder of the ranks' own logs, in the run directory.
        titan: further options for TorchTitan.
    """
    ranks = experiment.gpus_per_node
    # `python -m`, because the torchrun on PATH may belong to another environment.
    several = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *rendezvous]
    torchrun = [
        *(several if rendezvous else on_this_machine(ranks)),
        *("--log-line-prefix-template=[rank${rank}]:", "--tee=3", f"--log-dir={folder}/{logs}"),
    ]
    train = ["-m", "moelab.launch.rank", "--module", "moelab.titan", "--config", "experiment"]
    train += ["--dump_folder", str(folder), *titan]
    variables = {
        "MOELAB_EXPERIMENT": str(folder / directory.EXPERIMENT_FILE),
        "PYTHONUNBUFFERED": "1",  # a rank that is killed must not take its last lines with it
        "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns about every fork
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as TorchTitan's own launcher; memory is predicted for it
        # Ranks share the cores evenly; torchrun would give each of several ranks a single thread.
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
    }
    # Otherwise ranks that should run on the processor would take a GPU that is here.
    if experiment.hardware == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    # Other text is local, so no rank has to wait for a hub that the node may not reach.
    if experiment.dataset != "c4":
        variables["HF_HUB_OFFLINE"] = "1"
    return Command(arguments=torchrun + train, variables=variables)


class Process:
    """torchrun in a session of its own; it is stopped with all its ranks however the block is left."""

    def __init__(self, launched: Command, log: IO[bytes] | None) -> None:
        """Start it; without a log its output goes where this process's goes."""
        launches = Path(launched.variables["MOELAB_EXPERIMENT"]).parent / directory.LAUNCHES_FOLDER
        self._launch = launches / f"{launched.variables.get(NODE_VARIABLE, 'here')}-{secrets.token_hex(8)}"
        launches.mkdir(parents=True, exist_ok=True)
        self._launch.touch()  # before the first process that has its name
        launcher = os.getpid()

        def in_child() -> None:
            end_with_parent()
            if os.getppid() != launcher:  # it died before end_with_parent was called, which then has no effect
                os._exit(1)
            # Slurm sends SIGUSR1 to every process of a step; only the launcher knows what to do with it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        self._popen = subprocess.Popen(
            launched.arguments,
            env={**os.environ, **launched.variables, LAUNCH_VARIABLE: str(self._launch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the ranks in order
            preexec_fn=in_child,
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
            with suppress(Refused, OSError):  # the run is over, even if the driver has not released its ranks yet
                end_processes([self._launch])
                self._launch.unlink()


def launches_of(run: RunDir) -> list[Path]:
    """Records of the launches of a run whose processes may live, on this machine or another node of its job."""
    return sorted((run.path / directory.LAUNCHES_FOLDER).glob("*"))


def end_processes(launches: Collection[Path]) -> int:
    """Kill what launches started on this Linux machine: torchrun, its ranks in sessions of their own, their children.

    Repeats until none is left: one that is about to die may start another.

    Returns:
        How many there were.

    Raises:
        Refused: naming those that are still there after :data:`KILLED_S` seconds.
    """
    killed, end = set[int](), time.monotonic() + KILLED_S
    while alive := [process for process, _ in _launched(launches)]:
        if time.monotonic() > end:
            raise Refused(
                f"processes {', '.join(map(str, alive))} were killed and are still there after {KILLED_S:.0f} s; see "
                "`ps`"
            )
        for process in alive:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        killed.update(alive)
        time.sleep(KILL_POLL_S)
    return len(killed)


def living(launches: Collection[Path]) -> set[Path]:
    """Those of the launches that have a process on this machine."""
    return {launch for _, launch in _launched(launches)}


def _launched(launches: Collection[Path]) -> Iterator[tuple[int, Path]]:
    """Processes of launches, each with its launch."""
    wanted = {launch.resolve(): launch for launch in launches}
    for folder in Path("/proc").glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            pairs = (entry.partition(b"=") for entry in (folder / "environ").read_bytes().split(b"\0"))
            variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
            if (named := variables.get(LAUNCH_VARIABLE)) and (launch := wanted.get(Path(named).resolve())):
                yield int(folder.name), launch
