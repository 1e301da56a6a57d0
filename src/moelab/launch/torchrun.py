"""torchrun as moelab starts it, on one machine or as one node of several: its command, and its process."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moelab.experiment import Experiment
from moelab.machine import cores
from moelab.runs import directory

STOP_S = 45.0  # torchrun kills ranks that do not end by themselves after 30 s
# Port 0: the system picks a free one, so that runs beside each other do not meet.
ONE_NODE = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
NODE_VARIABLE = "MOELAB_NODE"
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
        "OMP_NUM_THREADS": str(max(1, cores() // experiment.gpus_per_node)),
    }
    if experiment.hardware == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
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
        names = ("MOELAB_EXPERIMENT", NODE_VARIABLE)
        self._marks = [f"{name}={launched.variables[name]}" for name in names if name in launched.variables]
        self._popen = subprocess.Popen(
            launched.arguments,
            env={**os.environ, **launched.variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,  # a signal reaches the launcher, which stops the ranks in order
            preexec_fn=_before_torchrun if sys.platform == "linux" else None,
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
            _kill_ranks(self._marks)


def _kill_ranks(marks: Sequence[str]) -> None:
    """Kill what is left of a run on Linux: torchrun's ranks have sessions of their own, but all carry its variables."""
    wanted = {mark.encode() for mark in marks}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                os.kill(int(folder.name), signal.SIGKILL)


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent dies (``prctl(PR_SET_PDEATHSIG)``)."""
    _LIBC.prctl(1, signal.SIGTERM)


def _before_torchrun() -> None:
    """In the child: end with the launcher, and ignore the signal that asks to save.

    Slurm sends SIGUSR1 to every process of a step, not to its tasks alone, and only the launcher knows what to do then.
    """
    end_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
