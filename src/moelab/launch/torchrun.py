"""torchrun as moelab starts it, on one machine or as one node of several: its command, and its process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.machine import cores, end_with_parent
from moelab.runs import directory

STOP_S = 45.0  # torchrun kills ranks that do not end by themselves after 30 s
# Port 0: the system picks a free one, so that runs beside each other do not meet.
ONE_NODE = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
NODE_VARIABLE = "MOELAB_NODE"
KILLED_S, KILL_POLL_S = 30.0, 0.05
"""What a killed process gets to leave: one that holds a GPU is gone only when the driver has freed it."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is executed: an argument list and the variables that it needs beyond the caller's environment."""

    arguments: list[str]
    variables: dict[str, str]

    def as_shell(self) -> str:
        """The command as a line that a person can paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def command(
    experiment: Experiment,
    folder: Path,
    *,
    rendezvous: Sequence[str] = ONE_NODE,
    logs: str = "logs",
    titan: Sequence[str] = (),
) -> Command:
    """The torchrun command of an experiment, for one node.

    Args:
        experiment: its ``gpus_per_node`` ranks are started.
        folder: its run directory, absolute.
        rendezvous: torchrun's options about nodes and where they meet.
        logs: folder of the ranks' own logs in the run directory.
        titan: further options of TorchTitan.
    """
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={experiment.gpus_per_node}"),
        *rendezvous,
        *("--log-line-prefix-template=[rank${rank}]:", "--tee=3", f"--log-dir={folder}/{logs}"),
    ]
    train = ["-m", "torchtitan.train", "--module", "moelab.titan", "--config", "experiment"]
    train += ["--dump_folder", str(folder), *titan]
    variables = {
        "MOELAB_EXPERIMENT": str(folder / directory.EXPERIMENT_FILE),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as TorchTitan's own launcher; memory is predicted for it
        # Ranks share the cores evenly; torchrun would give each of several ranks one thread.
        "OMP_NUM_THREADS": str(max(1, cores() // experiment.gpus_per_node)),
    }
    # A GPU that is here would be taken by ranks that were asked to run on the processor.
    if experiment.hardware == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    # The default text is local: no rank waits for a hub that a node may not reach.
    if experiment.dataset == "python":
        variables["HF_HUB_OFFLINE"] = "1"
    return Command(arguments=torchrun + train, variables=variables)


class Process:
    """torchrun in a session of its own, stopped with all its ranks however the block is left."""

    def __init__(self, launched: Command, log: IO[bytes] | None) -> None:
        """Start it.

        Args:
            launched: what to start.
            log: where its output goes; None: where this process's goes.
        """
        self._experiment = Path(launched.variables["MOELAB_EXPERIMENT"])
        self._node = launched.variables.get(NODE_VARIABLE, "")
        launcher = os.getpid()

        def in_child() -> None:
            end_with_parent()
            if os.getppid() != launcher:  # it died between the fork and the request
                os._exit(1)
            # Slurm sends SIGUSR1 to every process of a step, not to its tasks alone; only the launcher knows what to do
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        self._popen = subprocess.Popen(
            launched.arguments,
            env={**os.environ, **launched.variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,  # a signal reaches the launcher, which stops the ranks in order
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
            with suppress(Refused):  # the run has its end, whatever a driver takes to let its ranks go
                end_processes([self._experiment], is_meant=lambda node: node == self._node)


def end_processes(experiments: Collection[Path], is_meant: Callable[[str], bool] = lambda node: True) -> int:
    """Kill what lives of runs on this Linux machine: torchrun, its ranks, whose sessions are their own, and theirs.

    All carry the variables of their run. Looked for until none is left: one that is about to die may start another.

    Args:
        experiments: the ``experiment.yaml`` of each run.
        is_meant: of a process of theirs, by the value of :data:`NODE_VARIABLE`, which is empty without Slurm.

    Returns:
        How many there were.

    Raises:
        Refused: naming those that are there after :data:`KILLED_S` seconds.
    """
    wanted, killed, end = {path.resolve() for path in experiments}, set[int](), time.monotonic() + KILLED_S
    while wanted and (alive := [one for one, path, node in _launched() if path in wanted and is_meant(node)]):
        if time.monotonic() > end:
            raise Refused(f"processes {', '.join(map(str, alive))} do not end although they were killed; see `ps`")
        for process in alive:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        killed.update(alive)
        time.sleep(KILL_POLL_S)
    return len(killed)


def living() -> set[Path]:
    """The ``experiment.yaml`` of each run of which a process lives on this machine, resolved."""
    return {experiment for _, experiment, _ in _launched()}


def _launched() -> Iterator[tuple[int, Path, str]]:
    """Each process that moelab's variables were given to, with its experiment and node."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            pairs = (entry.partition(b"=") for entry in (folder / "environ").read_bytes().split(b"\0"))
            variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
            # Of our session is a shell whose user exported the variable, never what was launched.
            is_apart = os.getsid(int(folder.name)) != os.getsid(0)
            if is_apart and (experiment := variables.get("MOELAB_EXPERIMENT")):
                yield int(folder.name), Path(experiment).resolve(), variables.get(NODE_VARIABLE, "")
