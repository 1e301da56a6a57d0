"""What stands beside a run's log: where it ran, what multiplied in MXFP8, what moved the tokens, and its command.

A kill, a full disk or a hand may leave any of these files missing, cut off or as something else. That degrades the run
that they belong to, by name, and hides neither this run nor another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moelab.experiment import BLOCK_SCALED, EPBackend, Experiment, Precision
from moelab.files import read_bytes, read_text
from moelab.machine import counted
from moelab.runs.directory import CONVERTED_FOLDER, DISPATCHER_FILE, RECORDED_FOLDER, RunDir

ENVIRONMENT_FILE, LATER_ENVIRONMENT_FILES = "environment.json", "environment-*.json"
"""Where a run was started first, and again after it was requeued."""
COMMAND_FILE = "launch/command.sh"
_COMMAND = re.compile(r"""(?s)(?:[^"'\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*+")*+""")
"""Text in which no quote is left open; splitting thousands into words takes seconds."""
Content = TypeVar("Content", bound=BaseModel)


class _Written(BaseModel):
    """A file of JSON; a field that another version wrote is passed over."""

    # Strict: a number in quotes was written by something else. Fields may be called `model_…`.
    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())


class GpuRecord(_Written):
    """One GPU of a node."""

    name: str
    driver: str | None = None


class Environment(_Written):
    """Where a run ran: ``environment.json``, as :func:`moelab.machine.environment` writes it.

    ``gpus`` are those of one node; empty where the ranks were processes on a CPU, or where nvidia-smi failed and
    ``gpu_problem`` says how.
    """

    moelab: str
    python: str
    platform: str
    packages: dict[str, str | None]
    processor: str
    cores: Annotated[int, Field(ge=1)]
    memory_gib: Annotated[float, Field(allow_inf_nan=False)]
    gpus: list[GpuRecord]
    gpu_problem: str | None = None
    git_commit: str | None
    hosts: Annotated[int, Field(ge=1)]

    @property
    def on_cpu(self) -> bool:
        """Whether it is known that the ranks were processes on a CPU."""
        return not self.gpus and self.gpu_problem is None

    @property
    def machine(self) -> str:
        """The GPUs and how many, or the processor.

        >>> Environment.model_construct(gpus=[], processor="A processor", cores=2, hosts=1).machine
        'A processor, 2 cores, no GPU'
        """
        none = "no GPU" if self.on_cpu else f"GPUs unknown: {self.gpu_problem}"
        one = counted(gpu.name for gpu in self.gpus) or f"{self.processor}, {self.cores} cores, {none}"
        return one if self.hosts == 1 else f"{one} on each of {self.hosts} hosts"

    @property
    def chip(self) -> str:
        """Model of what computes: the GPUs', or the processor's."""
        models = ", ".join(dict.fromkeys(gpu.name for gpu in self.gpus))
        return models or (self.processor if self.on_cpu else "unknown GPUs")

    @property
    def versions(self) -> dict[str, str]:
        """Version by name, of what is installed."""
        drivers = ", ".join(dict.fromkeys(gpu.driver for gpu in self.gpus if gpu.driver))
        own = {"moelab": self.moelab, "git_commit": self.git_commit, "python": self.python, "driver": drivers}
        return {name: version for name, version in {**own, **self.packages}.items() if version}


class _Converted(_Written):
    kernels: Literal["native", "emulated"]
    modules: list[str]


class _Dispatcher(_Written):
    model_config = ConfigDict(extra="allow")

    dispatcher: str
    kernels: Literal["native", "emulated"] | None = None


class _RecordedFile(_Written):
    file: str
    bytes: int
    reason: str | None


class _Recorded(_Written):
    step: int
    step_s: float
    usual_step_s: float | None
    write_s: float
    files: list[_RecordedFile]


@dataclass(frozen=True, kw_only=True)
class SideFiles:
    """What a run's side files say."""

    environment: Environment | None = None  # where it ran; None if that is not known
    # what multiplies in MXFP8 over all pipeline stages: `kernels` and `modules`; None if nothing was recorded. Where
    # ranks disagree, `kernels` names all
    converted: dict[str, Any] | None = None
    # what moved the tokens: `dispatcher`, and `kernels` of a DeepEP one, `emulated` where its stand-in did; None if
    # nothing was recorded
    dispatcher: dict[str, Any] | None = None
    command: str = ""  # that launched it on one machine; empty if it is not known
    # for each rank whose step was traced, its `rank` and `step`, the seconds that the step and an untraced one took
    # (`step_s`, `usual_step_s`), those of writing (`write_s`), and `files`, each with its `file`, its `bytes` and the
    # `reason` if it was not kept
    traces: tuple[dict[str, Any], ...] = ()
    damaged: tuple[str, ...] = ()  # what is wrong, a phrase for each file, with what is therefore not known
    # whether it is known what its speed is the speed of: one machine, and kernels emulated or not
    speed_known: bool = False


def read_side_files(run: RunDir, experiment: Experiment, *, started: bool) -> SideFiles:
    """Read what stands beside a run's log.

    ``started``: it logged a step, so its launcher had written ``environment.json`` by then.
    """
    environment, wrong = _read(run.path / ENVIRONMENT_FILE, Environment)
    damaged = [f"{wrong}: machine and versions unknown"] if wrong and (started or "missing" not in wrong) else []
    moved = [] if environment is None else list(_moved(run, environment))
    # Only now: a run that went on elsewhere is judged by all of its machine.
    if environment is not None and experiment.hardware == "cpu":  # hides the GPUs of its machine
        environment = environment.model_copy(update={"gpus": [], "gpu_problem": None})
    converted, unsound = _converted(run)
    damaged += [*moved, *unsound]
    if experiment.precision in BLOCK_SCALED and started and converted is None and not unsound:
        name = experiment.precision.value.upper()
        damaged.append(f"{CONVERTED_FOLDER} has no record: which modules ran in {name} is unknown")
    dispatcher, wrong = _read(run.path / DISPATCHER_FILE, _Dispatcher)
    unreadable = bool(wrong) and "missing" not in wrong  # a run without expert parallelism has none
    damaged += [f"{wrong}: the dispatcher is unknown"] if unreadable else []
    command, wrong = _command(run.path / COMMAND_FILE)
    damaged += [f"{COMMAND_FILE} {wrong}: command unknown"] if wrong else []
    traces = []
    for file in sorted((run.path / RECORDED_FOLDER).glob("rank*.json")):
        recorded, wrong = _read(file, _Recorded)
        rank = file.stem.removeprefix("rank")
        if recorded is None or not rank.isdecimal():
            damaged.append(f"{RECORDED_FOLDER}/{wrong or file.name}: the cost of its trace is unknown")
        else:
            traces.append({"rank": int(rank), **recorded.model_dump()})
    kernels_asked = experiment.mxfp8_kernels == "auto" and experiment.precision is Precision.MXFP8
    dispatch_asked = unreadable and experiment.ep_backend is not EPBackend.STANDARD
    # `auto` leaves the choice to the machine: without a record nobody knows what it was.
    kernels_known = not dispatch_asked and not (kernels_asked and (converted is None or unsound))
    return SideFiles(
        environment=environment,
        converted=converted,
        dispatcher=dispatcher.model_dump(exclude_none=True) if dispatcher else None,
        command=command,
        traces=tuple(sorted(traces, key=lambda trace: trace["rank"])),
        damaged=tuple(damaged),
        speed_known=environment is not None and environment.gpu_problem is None and not moved and kernels_known,
    )


def _command(file: Path) -> tuple[str, str]:
    """The command that launched a run on one machine, and what is wrong with its file."""
    try:
        command = read_text(file).strip()
    except FileNotFoundError:  # a job of Slurm has a script in its place
        return "", ""
    except OSError as error:
        return "", f"cannot be read ({error.strerror})"
    except ValueError:
        return "", "is damaged"
    return (command, "") if _COMMAND.fullmatch(command) else ("", "is damaged")  # a quote is open: it was cut off


def _moved(run: RunDir, first: Environment) -> Iterator[str]:
    """What a later start of a requeued run says of where it ran, if it is not the first one's machine and software."""
    for file in sorted(run.path.glob(LATER_ENVIRONMENT_FILES)):
        later, wrong = _read(file, Environment)
        if later is None:
            yield f"{wrong}: where a later start ran is unknown"
        elif (later.machine, later.versions) != (first.machine, first.versions):
            names = dict.fromkeys([*first.versions, *later.versions])
            others = [name for name in names if first.versions.get(name) != later.versions.get(name)]
            machine = f" on {later.machine}" if later.machine != first.machine else ""
            software = f" with a different {', '.join(others)}" if others else ""
            yield f"{file.name}: a later start ran{machine}{software}"


def converted_modules(run: RunDir) -> dict[str, Any] | None:
    """What multiplies in MXFP8 over all pipeline stages: ``kernels`` and ``modules``; None if nothing was recorded."""
    return _converted(run)[0]


def _converted(run: RunDir) -> tuple[dict[str, Any] | None, list[str]]:
    """What :attr:`SideFiles.converted` is, and what is wrong with its files."""
    stages: dict[str, _Converted] = {}
    damaged = []
    for file in sorted((run.path / CONVERTED_FOLDER).glob("rank*.json")):
        stage, wrong = _read(file, _Converted)
        if stage is None:
            damaged.append(f"{CONVERTED_FOLDER}/{wrong}: which modules ran in MXFP8 there is unknown")
        elif stage.modules:  # a stage of dense layers alone has none
            stages[file.stem] = stage
    kernels = dict.fromkeys(str(stage.kernels) for stage in stages.values())
    if len(kernels) > 1:
        by_rank = ", ".join(f"{rank} {stage.kernels}" for rank, stage in stages.items())
        damaged.append(f"{CONVERTED_FOLDER}: ranks disagree on the MXFP8 kernels ({by_rank})")
    modules = [name for stage in stages.values() for name in stage.modules]
    return ({"kernels": " and ".join(kernels), "modules": modules} if modules else None), damaged


def _read(file: Path, content: type[Content]) -> tuple[Content | None, str]:
    """A file's content, or None and what is wrong with it."""
    try:
        return content.model_validate_json(read_bytes(file)), ""
    except FileNotFoundError:
        return None, f"{file.name} is missing"
    except OSError as error:
        return None, f"{file.name} cannot be read ({error.strerror})"
    except ValidationError:
        return None, f"{file.name} is damaged"
