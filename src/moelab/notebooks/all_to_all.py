"""The all-to-all experiment, started from a notebook: on two GPUs where they are, else between two CPU processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from moelab.errors import MoelabError
from moelab.launch.torchrun import on_this_machine
from moelab.machine import gpus
from moelab.planning.measured import ALL_TO_ALL, Measurement, load_measured

RANKS = 2
PROGRAM = "moelab.micro.exchange"


class ExperimentFailed(MoelabError):
    """The all-to-all experiment stopped before it had a result."""


def measure_all_to_all(output: str | Path) -> Measurement:
    """Run the experiment in processes of its own and read what it wrote to a JSON file.

    Without two GPUs its sizes are small and its backend is gloo, and it says so.

    Raises:
        GpusUnknown: if nvidia-smi fails.
        ExperimentFailed: with the last lines that the processes wrote.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if len(gpus()) >= RANKS else "cpu"
    program = ["-m", PROGRAM, "--output", str(output.absolute()), "--device", device]
    done = subprocess.run(
        [*on_this_machine(RANKS), *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0 or not output.exists():
        last = done.stdout.splitlines()[-100:]  # 40 are torchrun's own, after those of the rank that failed
        raise ExperimentFailed("the all-to-all experiment failed:\n" + "\n".join(last))
    return load_measured(ALL_TO_ALL, output)
