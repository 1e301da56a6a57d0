"""Parameters of the notebooks: what each takes, and the check of what a person gave.

papermill injects whatever it is given: an unknown parameter only warns, and ``"false"`` is a true string. The cell
after a notebook's parameters cell checks them against its schema: here those of the notebooks that train or judge runs,
in ``technique_parameters.py`` those that explain a technique or plan.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.experiment import ActivationCheckpoint
from moelab.experiment_file import Study, make_study, parse
from moelab.machine import gpus

INJECTED = "# Parameters\n"
"""How papermill 2.7.0 begins the cell that it injects (``Translator.codify``)."""
_JUPYTER_NAMES = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython"})
Parameters = TypeVar("Parameters", bound=BaseModel)


Model = Literal["nano", "debug", "16B", "671B"]
Backend = Literal["standard", "deepep", "hybridep", "minimal_async_ep"]
Compile = Literal["none", "loss", "model+loss"]
Routing = Literal["learned", "round_robin", "random_balanced"]
Dataset = Literal["python", "c4"]


class NotebookParameters(BaseModel):
    """What all schemas share. Each names its fields in the order of its notebook's parameters cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StartParameters(NotebookParameters):
    """Parameters of ``00_start_here``."""

    study: str
    runs_dir: str
    ranks: int = Field(ge=0, description="0: two, or one where there is one GPU")
    steps: int = Field(ge=2)

    def to_study(self) -> Study:
        """The nano model in BF16 and with MXFP8 experts, once each, in steps of 512 tokens a rank."""
        ranks = self.ranks or (1 if len(gpus()) == 1 else 2)
        shared: dict[str, Any] = {"gpus_per_node": ranks, "ep": ranks, "seq_len": 128, "local_batch": 4}
        shared |= {"steps": self.steps, "warmup_steps": max(1, self.steps // 5), "lr": 4.0e-3}
        return make_study(self.study, shared, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0])


class ConvergenceParameters(NotebookParameters):
    """Parameters of ``06_compare_convergence``."""

    study: str
    runs_dir: str
    model: Model
    arms: str = Field(description="precisions, the reference first, such as bf16,mxfp8")
    quantize: Literal["experts", "experts+linears"]
    wgrad: Literal["mxfp8", "bf16"]
    ep_backend: Backend
    nodes: int = Field(ge=1)
    ranks: int = Field(ge=1, description="ranks on each node")
    ep: int = Field(ge=1)
    seeds: int = Field(ge=1, le=100)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    lr: float = Field(gt=0, allow_inf_nan=False)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    routing: Routing
    dataset: Dataset
    hardware: str
    final_fraction: float = Field(gt=0, le=1)
    margin_nats: float = Field(ge=0, allow_inf_nan=False, description="0 takes the margin from the seeds' spread")
    on_failure: Literal["continue", "stop"]

    def to_study(self) -> Study:
        """The experiments that these parameters name."""
        shared = {
            name: getattr(self, name)
            for name in (
                "model",
                "nodes",
                "ep",
                "steps",
                "warmup_steps",
                "lr",
                "seq_len",
                "local_batch",
                "activation_checkpoint",
                "compile",
                "routing",
                "dataset",
                "hardware",
                "ep_backend",
            )
        }
        arms = [_arm(precision.strip(), self) for precision in self.arms.split(",")]
        return make_study(self.study, {**shared, "gpus_per_node": self.ranks}, arms, range(self.seeds))

    @property
    def reference(self) -> str:
        """Name of the arm that the others are held against: the first."""
        return self.to_study().arms[0]

    @property
    def study_folder(self) -> Path:
        """Where the study's runs and report are."""
        return Path(self.runs_dir) / self.study


class LaunchParameters(NotebookParameters):
    """Parameters of ``09_launch_and_watch_run``."""

    study: str
    runs_dir: str
    runs: str = Field(description="existing folder of a run or study to watch; empty: this notebook's study")
    submit: bool = Field(description="give the study to Slurm")
    cluster: str = Field(description="name of a cluster profile, or a path of one; local starts the ranks here")
    wait: bool = Field(description="show progress until the runs have ended before the figures are drawn")
    model: Model
    precision: Literal["bf16", "fp8", "mxfp8"]
    ep_backend: Backend
    nodes: int = Field(ge=1)
    ranks: int = Field(ge=1, description="ranks on each node")
    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    ep: int = Field(ge=1)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    lr: float = Field(gt=0, allow_inf_nan=False)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    routing: Routing
    dataset: Dataset
    hardware: str

    def to_study(self) -> Study:
        """One arm at one seed."""
        own = {"study", "runs_dir", "runs", "submit", "cluster", "wait", "ranks"}
        fields = self.model_dump(exclude=own) | {"gpus_per_node": self.ranks}
        return make_study(self.study, fields, [{}], [0])

    @property
    def watched(self) -> Path:
        """Folder of the runs to watch."""
        return Path(self.runs) if self.runs else Path(self.runs_dir) / self.study


class ThroughputParameters(NotebookParameters):
    """Parameters of ``07_compare_throughput``."""

    study: str
    runs_dir: str
    submit: bool = Field(description="give the study to Slurm")
    cluster: str = Field(description="name of a cluster profile, or a path of one; local trains here")
    model: Model
    precision: Literal["fp8", "mxfp8"] = Field(description="of the experts in the quantised arms")
    ep_kernels: Literal["native", "emulated"]
    nodes: int = Field(ge=1)
    ranks: int = Field(ge=1, description="ranks on each node")
    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    pp_schedule: str
    ep: int = Field(ge=2)
    seeds: int = Field(ge=1, le=100)
    steps: int = Field(ge=5, description="the first three do not count")
    warmup_steps: int = Field(ge=0)
    lr: float = Field(gt=0, allow_inf_nan=False)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    routing: Routing
    dataset: Dataset
    hardware: str

    def to_study(self) -> Study:
        """The two-by-two: BF16 and quantised experts, each with the standard all-to-all and with DeepEP."""
        own = {"study", "runs_dir", "submit", "cluster", "precision", "ranks", "seeds"}
        shared = self.model_dump(exclude=own) | {"gpus_per_node": self.ranks}
        arms = [
            {"precision": precision, "ep_backend": backend}
            for precision in ("bf16", self.precision)
            for backend in ("standard", "deepep")
        ]
        return make_study(self.study, shared, arms, range(self.seeds))


class ReportParameters(NotebookParameters):
    """Parameters of ``10_report_study``."""

    paths: str = Field(description="a study, or runs and logs to compare, with ; between; empty: the packaged logs")
    reference: str
    final_fraction: float = Field(gt=0, le=1)
    margin_nats: float = Field(ge=0, allow_inf_nan=False, description="0 takes the margin from the seeds' spread")
    with_paths: bool
    output: str

    def to_paths(self) -> tuple[Path, ...]:
        """What the report is about."""
        given = [Path(path.strip()) for path in self.paths.split(";") if path.strip()]
        return tuple(given) or EXAMPLE_LOGS


def _arm(precision: str, parameters: ConvergenceParameters) -> dict[str, Any]:
    if precision != "mxfp8":
        return {"precision": precision}
    return {"precision": precision, "quantize": parameters.quantize, "wgrad": parameters.wgrad}


def validated(schema: type[Parameters], namespace: Mapping[str, Any]) -> Parameters:
    """Check the parameters of a notebook; called in the cell after its parameters cell.

    In a notebook, parameters are the names that its parameters cell and papermill's injected cell assigned when they
    last ran, as IPython's history has them: what else the kernel holds, from later cells of an earlier run, is none.

    Args:
        schema: what the notebook takes.
        namespace: ``globals()`` of the notebook. Of a mapping without a history every name is a parameter, but for
            modules, functions, classes and private names.

    Returns:
        The parameters with their declared types: ``"false"`` is False and ``"1e-4"`` is 0.0001.

    Raises:
        BadInput: for a value of the wrong type, a parameter that is missing, or one that the notebook does not have.
    """
    history = namespace.get("In", [])
    assigned = _assigned_by_parameters_cells(history, schema.model_fields.keys()) or namespace.keys()
    return parse(
        schema,
        {name: value for name, value in namespace.items() if name in assigned and _is_parameter(name, value)},
    )


def assigned_names(source: str) -> list[str]:
    """Names that the top-level assignments of a cell bind, in their order.

    Raises:
        SyntaxError: if the cell is not Python.
    """
    return [
        node.id
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _assigned_by_parameters_cells(history: Sequence[str], fields: Set[str]) -> set[str]:
    """Names that the notebook's own parameters cell and the one injected after it assigned; empty if neither ran.

    The history has no tags. More than half of the fields make a parameters cell: a line may be lost, and that field is
    then missing, though the kernel still holds its value.
    """
    own: set[str] = set()
    injected: set[str] = set()
    for cell in history:
        try:
            names = set(assigned_names(cell))
        except SyntaxError:  # it never ran
            continue
        if cell.startswith(INJECTED):
            injected = names
        elif 2 * len(names & fields) > len(fields):
            own, injected = names, set()
    return own | injected if own else own


def _is_parameter(name: str, value: object) -> bool:
    return not (name.startswith("_") or name in _JUPYTER_NAMES or isinstance(value, ModuleType) or callable(value))
