"""The run directory: everything that one run left, and all that is needed to redraw its figures.

``runs/<study>/<arm>/seed<k>/<UTC time>-<6 hex>/`` holds ``experiment.yaml`` (resolved), ``environment.json``,
``launch/`` (exact command), ``logs/``, ``tb/``, ``status.json``, ``metrics.parquet`` and ``results.json``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import read_experiment, write_experiment
from moelab.runs.files import write_whole
from moelab.runs.status import State, Status, read_status, write_status

EXPERIMENT_FILE = "experiment.yaml"
CONVERTED_FOLDER, DISPATCHER_FILE = "launch/converted", "launch/dispatcher.json"
"""What the built model runs: a file for each pipeline rank of what multiplies in MXFP8; what moves the tokens."""
STOP_VARIABLE, STOPPED_FILE = "MOELAB_STOP_FILE", "launch/stopped.json"
"""Names the file that asks ranks to save and stop; which step they saved when they did."""


@dataclass(frozen=True)
class RunDir:
    """A run directory on disk."""

    path: Path

    @property
    def experiment(self) -> Experiment:
        """The resolved experiment."""
        file = self.path / EXPERIMENT_FILE
        try:
            return read_experiment(file)
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None

    @property
    def status(self) -> Status:
        """Where the run is."""
        return read_status(self.path)

    @property
    def log(self) -> Path:
        """Combined output of all ranks."""
        return self.path / "logs" / "train.log"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event folders."""
        return self.path / "tb"

    @property
    def name(self) -> str:
        """``<study>/<arm>/seed<k>/<time>-<hex>``: the same on every machine that holds the run."""
        return "/".join(self.path.resolve().parts[-4:])

    def set_status(self, status: Status) -> None:
        """Replace ``status.json``."""
        write_status(self.path, status)


def fresh(runs: Path, experiment: Experiment) -> RunDir:
    """A run directory with a name that no other has; nothing is made."""
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    return RunDir(runs / experiment.name / experiment.arm / f"seed{experiment.seed}" / stamp)


def make(run: RunDir, experiment: Experiment) -> None:
    """Make a fresh run directory with its experiment and the status ``prepared``."""
    for part in ("launch", "logs", "tb"):
        (run.path / part).mkdir(parents=True)
    write_whole(run.path / EXPERIMENT_FILE, write_experiment(experiment))
    run.set_status(Status(state=State.PREPARED))


def create(runs: Path, experiment: Experiment) -> RunDir:
    """Make a run directory.

    Args:
        runs: the folder that holds all studies.
        experiment: what will run.
    """
    run = fresh(runs, experiment)
    make(run, experiment)
    return run


def attempts(runs: Path, experiment: Experiment) -> list[RunDir]:
    """Run directories of exactly this experiment, oldest first; another model or step count is another experiment."""
    folder = runs / experiment.name / experiment.arm / f"seed{experiment.seed}"
    found = [RunDir(path.parent) for path in sorted(folder.glob(f"*/{EXPERIMENT_FILE}"))]
    return [run for run in found if _is_of(run, experiment)]


def find(path: Path) -> Iterator[RunDir]:
    """Every run directory at or below a path, in order of name; folders inside a run are not looked into."""
    for folder, inside, files in os.walk(path):
        if EXPERIMENT_FILE in files and "logs" in inside:  # else a person's own file of that name
            inside.clear()
            yield RunDir(Path(folder))
        inside.sort()


def _is_of(run: RunDir, experiment: Experiment) -> bool:
    try:
        return run.experiment == experiment
    except BadInput:  # written by another version of moelab
        return False
