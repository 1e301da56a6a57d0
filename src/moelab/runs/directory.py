"""The run directory: everything that one run left, and all that is needed to redraw its figures.

``runs/<study>/<arm>/seed<k>/<UTC time>-<6 hex>/`` holds ``experiment.yaml`` (resolved), ``environment.json``,
``launch/`` (exact command), ``logs/``, ``tb/``, ``status.json``, ``metrics.parquet``, ``expert_load.parquet`` and
``results.json``, and ``traces/`` where a step was traced.

``experiment.yaml`` is a record: it has every field, and agrees with the arm and seed that the folders are called by. A
run whose record cannot be trusted is left out by name; what it lacks is never filled in.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import read_record, write_experiment
from moelab.files import read_bytes, write_json, write_whole
from moelab.layout import training_of
from moelab.privacy import one_line
from moelab.runs.status import FILE as STATUS_FILE
from moelab.runs.status import RESERVE, RESERVE_BYTES, State, Status

EXPERIMENT_FILE = "experiment.yaml"
CONVERTED_FOLDER, DISPATCHER_FILE = "launch/converted", "launch/dispatcher.json"
"""What the built model runs: a file for each pipeline rank of what multiplies in MXFP8; what moves the tokens."""
TRACES_FOLDER, RECORDED_FOLDER = "traces", "launch/recorded"
"""Traces of a step; for each rank that was traced, a file of what its trace cost and where it is."""
LAUNCHES_FOLDER = "launch/started"
"""An empty file for each launch whose processes may live."""
STOP_VARIABLE, STOPPED_FILE = "MOELAB_STOP_FILE", "launch/stopped.json"
"""Names the file that asks ranks to save and stop; which step they saved when they did."""
_STATUS = TypeAdapter(Status)
_shown = functools.lru_cache(maxsize=1024)(one_line)  # thousands of runs have the same folders
_SEED, _STAMP = re.compile(r"seed(\d+)"), re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


@dataclass(frozen=True)
class RunDir:
    """A run directory on disk."""

    path: Path

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The resolved experiment.

        Raises:
            BadInput: if its record is damaged, lacks a field, or disagrees with its folders.
        """
        file = self.path / EXPERIMENT_FILE
        try:
            experiment = read_record(file)
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        recorded, folders = f"{experiment.arm}/seed{experiment.seed}", "/".join(self._place[-3:-1])
        is_in_a_study = self._names_a_seed or folders.startswith(f"{experiment.arm}/")  # else copied out of one
        if is_in_a_study and recorded != folders:
            raise BadInput(f"{file}: the record is of {recorded}, but the run is in {folders}")
        return experiment

    @property
    def arm(self) -> str:
        """Name of its arm, by its folder if that names a seed below an arm, else by its record."""
        return self._place[-3] if self._names_a_seed else self.experiment.arm

    @property
    def seed(self) -> int:
        """Its seed, by its folder if that names one, else by its record."""
        return int(self._place[-2].removeprefix("seed")) if self._names_a_seed else self.experiment.seed

    @property
    def status(self) -> Status:
        """Where the run is: ``unknown``, with what is wrong, if ``status.json`` cannot be read as a status."""
        try:
            return _STATUS.validate_json(read_bytes(self.path / STATUS_FILE))
        except OSError as error:
            return Status(state=State.UNKNOWN, reason=f"{STATUS_FILE} cannot be read: {error.strerror}")
        except ValidationError as error:
            fault = error.errors()[0]  # enough for one line
            what = ": ".join([*map(str, fault["loc"]), fault["msg"]])
            return Status(state=State.UNKNOWN, reason=f"{STATUS_FILE} is damaged: {what}")

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
        return "/".join(self._place)

    def set_status(self, status: Status) -> None:
        """Replace ``status.json``.

        A little space is reserved while the run is alive, so that a run that fills the disk can still say so.
        """
        reserve = self.path / RESERVE
        if status.state.is_final:
            reserve.unlink(missing_ok=True)  # before the file is written, which now has room
        elif not reserve.exists():
            reserve.write_bytes(os.urandom(RESERVE_BYTES))  # zeros would take no blocks where a filesystem compresses
        write_json(self.path / STATUS_FILE, asdict(replace(status, updated=time.time())))

    @functools.cached_property
    def _place(self) -> tuple[str, ...]:
        """Study, arm, seed and run: links below the study are places of their own, one to a study is not."""
        given = Path(os.path.abspath(self.path))  # noqa: PTH100 - keeps links
        is_in_study = _SEED.fullmatch(given.parent.name)
        below = (_real_name(given.parent.parent.parent), *given.parts[-3:]) if is_in_study else ()
        place = below or self.path.resolve().parts[-4:]
        # It is shown wherever the run is. The last folder has a date, which tells apart what is then called the same.
        return tuple(part if _STAMP.fullmatch(part) else _shown(part) for part in place)

    @property
    def _names_a_seed(self) -> bool:
        return len(self._place) > 2 and bool(_SEED.fullmatch(self._place[-2]))


@functools.lru_cache(maxsize=256)  # a study has thousands of runs
def _real_name(study: Path) -> str:
    return study.resolve().name


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that cannot be used, because nobody can say what it is a run of."""

    run: RunDir
    reason: str  # what is wrong with its record, on one line

    def __str__(self) -> str:
        """For a person."""
        return f"{self.run.name}: left out: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The run directories at a path."""

    runs: tuple[RunDir, ...]  # those whose record is whole and agrees with its folder, in order of path
    left_out: tuple[LeftOut, ...]  # all others
    notes: tuple[str, ...]  # what a reader should know of the runs that are used

    @property
    def all_runs(self) -> list[RunDir]:
        """Also those that are left out: their status and their job can be known all the same."""
        return sorted([*self.runs, *(one.run for one in self.left_out)], key=lambda run: run.path)

    @property
    def lines(self) -> list[str]:
        """What a person should know of them."""
        return [*map(str, self.left_out), *self.notes]

    def to_json(self) -> dict[str, Any]:
        """The same for a program."""
        left_out = [{"run": one.run.name, "path": str(one.run.path), "reason": one.reason} for one in self.left_out]
        return {"left_out": left_out, "notes": list(self.notes)}

    def attempts(self, experiment: Experiment) -> list[RunDir]:
        """Runs of exactly this training, oldest first, whatever its study and arm are called."""
        wanted = training_of(experiment)
        same = [
            run for run in self.runs if run.experiment.seed == experiment.seed and training_of(run.experiment) == wanted
        ]
        return sorted(same, key=lambda run: run.path.name)


def fresh(runs: Path, experiment: Experiment) -> RunDir:
    """A run directory with a name that no other has; nothing is made."""
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    return RunDir(runs / experiment.name / experiment.arm / f"seed{experiment.seed}" / stamp)


def make(run: RunDir, experiment: Experiment) -> None:
    """Make a fresh run directory with its record and the status ``prepared``; it appears whole or not at all."""
    begun = RunDir(run.path.with_name(f".{run.path.name}"))  # `find` looks into no hidden folder
    for part in ("launch", "logs", "tb"):
        (begun.path / part).mkdir(parents=True)
    write_whole(begun.path / EXPERIMENT_FILE, write_experiment(experiment))
    begun.set_status(Status(state=State.PREPARED))
    begun.path.rename(run.path)


def create(runs: Path, experiment: Experiment) -> RunDir:
    """Make a run directory in the folder that holds all studies."""
    run = fresh(runs, experiment)
    make(run, experiment)
    return run


def discover(path: Path) -> Discovery:
    """The run directories that :func:`find` finds, with their records read."""
    runs: list[RunDir] = []
    left_out: list[LeftOut] = []
    notes: list[str] = []
    for run in find(path):
        try:
            study = run.experiment.name
        except BadInput as error:
            # On one line and without the path: the run's name stands in front of it.
            reason = str(error).removeprefix(f"{run.path / EXPERIMENT_FILE}: ")
            left_out.append(LeftOut(run=run, reason=f"{EXPERIMENT_FILE}: {'; '.join(reason.splitlines())}"))
            continue
        runs.append(run)
        folder, *_ = run.name.split("/")
        if not run._names_a_seed:
            place = f"{run.arm}/seed{run.seed}"
            notes.append(f"{run.name} is not in the folder of an arm and seed: taken for {place}, as recorded")
        elif folder != study:
            notes.append(f"folder {folder} holds runs that were recorded as study {study}")
    return Discovery(runs=tuple(runs), left_out=tuple(left_out), notes=tuple(dict.fromkeys(notes)))


def find(path: Path) -> list[RunDir]:
    """Every run directory at or below a path and through links, whatever its record is like, in order of path.

    A run that is reached twice counts once, under its own path rather than a link's. Folders inside a run are not
    looked into, nor hidden ones; one that cannot be looked into counts as a run, so that it does not disappear.
    """
    runs: list[RunDir] = []
    seen: set[Path] = set()
    starts = [path]
    while starts:  # real folders first, then what links lead to
        closed: list[OSError] = []
        for folder, inside, _ in os.walk(starts.pop(0), onerror=closed.append):
            here = Path(folder)
            if (real := here.resolve()) in seen:
                inside.clear()
                continue
            seen.add(real)
            if is_run(here):
                inside.clear()
                runs.append(RunDir(here))
            inside[:] = [name for name in inside if not name.startswith(".")]  # such as a run that is being made
            links = (here / name for name in sorted(inside) if (here / name).is_symlink())
            # A link to a folder above would lead around in circles.
            starts += [link for link in links if not path.resolve().is_relative_to(link.resolve())]
        runs += [RunDir(Path(error.filename)) for error in closed if isinstance(error, PermissionError)]
    return sorted(runs, key=lambda run: run.path)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, whole or damaged; one with only a person's own ``experiment.yaml`` is not."""
    # Emptied by a hand or a full disk, it is a run that is damaged and not none.
    if _STAMP.fullmatch(folder.name) and _SEED.fullmatch(folder.parent.name):
        return True
    names = (EXPERIMENT_FILE, STATUS_FILE, "launch", "logs")
    return sum(os.path.exists(folder / name) for name in names) > 1  # noqa: PTH110 - False if it may not be asked
