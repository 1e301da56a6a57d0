"""Parameters of the notebooks: what each takes, and the check of what a person gave.

papermill injects whatever it is given: an unknown parameter only warns, and ``"false"`` is a true string. The cell
after a notebook's parameters cell checks them against its schema. What each means is said beside it in that cell.

A parameter that has the name of an experiment's field is that field: its values and bounds are those of
:class:`~moelab.experiment.Experiment`, unless the notebook takes fewer. ``ranks`` are its ``gpus_per_node``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.door import runs_folder
from moelab.errors import BadInput
from moelab.experiment import NUMBERS_ONLY, Experiment, Precision
from moelab.experiment_file import Study, make_study, parse, read_experiment, read_hardware
from moelab.machine import gpus
from moelab.model import SHAPES, shape_for, shape_of
from moelab.model.hugging_face import read_model
from moelab.planning.project import on
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, routing_of, routing_of_load
from moelab.runs.directory import EXPERIMENT_FILE, TRACES_FOLDER, find
from moelab.runs.expert_load import routers_load

INJECTED = "# Parameters\n"
"""How papermill 2.7.0 begins the cell that it injects (``Translator.codify``)."""
_JUPYTER_NAMES = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython"})
Parameters = TypeVar("Parameters", bound=BaseModel)
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=4095)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
NodeProfile = Literal["b200_x256", "b200_node", "h100_node", "h200_node"]
_SHARED: dict[str, Any] = {
    "hardware": str,
    "runs_dir": Annotated[str, AfterValidator(lambda name: str(runs_folder(name)))],
    "submit": bool,
    "ranks": Count,
    "seeds": Annotated[int, Field(ge=1, le=100)],
    "final_fraction": Annotated[float, Field(gt=0, le=1)],
    "margin_nats": Annotated[float, Field(ge=0, allow_inf_nan=False)],
    "search_limit": Annotated[int, Field(ge=1, le=50)],
}
"""Parameters of several notebooks that are no fields of an experiment, or take what an experiment does not."""


class NotebookParameters(BaseModel):
    """What all schemas share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if TYPE_CHECKING:  # `_takes` makes the fields

        def __getattr__(self, name: str) -> Any: ...

    @property
    def of_experiment(self) -> dict[str, Any]:
        """The parameters that are fields of an experiment."""
        given = self.model_dump()
        ranks = {"gpus_per_node": given["ranks"]} if "ranks" in given else {}
        hardware = {"hardware": read_hardware(given["hardware"])} if "hardware" in given else {}
        return {name: value for name, value in given.items() if name in Experiment.model_fields} | ranks | hardware


def _with_a_speed(precision: object) -> object:
    if precision == Precision.NVFP4:
        raise ValueError(f"fp8 or mxfp8. {NUMBERS_ONLY}; notebook 06 trains it")
    return precision


Schema = TypeVar("Schema", bound=NotebookParameters)


def _takes(names: str, **own: Any) -> Callable[[type[Schema]], type[Schema]]:
    """Give a schema its fields, none with a default.

    Args:
        names: in the order of the notebook's parameters cell.
        own: types of those that are not as in an experiment or in other notebooks, nor a text.
    """

    def with_fields(schema: type[Schema]) -> type[Schema]:
        types = {name: own.get(name, _SHARED.get(name)) or _type_in_experiment(name) for name in names.split()}
        fields: dict[str, Any] = {name: (kind, ...) for name, kind in types.items()}
        return create_model(
            schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **fields
        )

    return with_fields


def _type_in_experiment(name: str) -> Any:
    """The type of an experiment's field; of what is none, a text."""
    if name not in Experiment.model_fields:
        return str
    field = Experiment.model_fields[name]
    return Annotated[field.annotation, Field(), *field.metadata]  # some have no metadata, which Annotated must have


@_takes(
    "study runs_dir ranks steps",
    ranks=Annotated[int, Field(ge=0)],  # 0: two, or one where there is one GPU
    steps=Annotated[int, Field(ge=2)],
)
class StartParameters(NotebookParameters):
    """Parameters of ``00_start_here``."""

    def to_study(self) -> Study:
        """The nano model in BF16 and with MXFP8 experts, once each, in steps of 512 tokens a rank."""
        ranks = self.ranks or (1 if len(gpus()) == 1 else 2)
        shared: dict[str, Any] = {"gpus_per_node": ranks, "ep": ranks, "seq_len": 128, "local_batch": 4}
        shared |= {"steps": self.steps, "warmup_steps": max(1, self.steps // 5), "lr": 4.0e-3}
        return make_study(self.study, shared, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0])


@_takes(
    "capture_run study runs_dir model ranks ep steps seq_len local_batch activation_checkpoint hardware layer "
    "outlier_log2",
    layer=Annotated[int, Field(ge=0)],
    outlier_log2=Annotated[int, Field(ge=0, le=20)],
)
class QuantiseParameters(NotebookParameters):
    """Parameters of ``01_quantise_to_mxfp8``."""

    def to_study(self) -> Study:
        """One BF16 run that captures what its experts multiply at its last step."""
        shared = self.of_experiment | {"warmup_steps": max(1, self.steps // 5), "capture_step": self.steps}
        return make_study(self.study, shared, [{"precision": "bf16"}], [0])


@_takes(
    "experiment result precision shapes model tokens tp ep aspect",
    experiment=Literal["replay", "run"],
    precision=Literal["fp8", "mxfp8", "mxfp8_wgrad_bf16"],
    model=str,
    tokens=Count,
    aspect=Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)],
)
class GroupedGemmParameters(NotebookParameters):
    """Parameters of ``02_find_grouped_gemm_break_even``."""


@_takes(
    "experts top_k ep ranks_per_node routing groups limited_groups skew load tokens hidden precision hardware token "
    "seed",
    experts=Annotated[int, Field(ge=2)],
    top_k=Count,
    ranks_per_node=Count,
    routing=Literal["random_balanced", "uniform", "group_limited", "group_by_score", "skewed", "measured"],
    groups=Count,
    limited_groups=Count,
    skew=Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)],
    tokens=Tokens,
    hidden=Count,
    hardware=NodeProfile,
    token=Token,
)
class RouteParameters(NotebookParameters):
    """Parameters of ``03_route_tokens``; all but ``load`` and ``seed`` have the names of the explorer's controls."""

    def to_placement(self) -> ExpertPlacement:
        """Where the experts are.

        Raises:
            BadInput: if the numbers do not divide.
        """
        return ExpertPlacement(experts=self.experts, top_k=self.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node)

    @property
    def measured(self) -> RoutingModel | None:
        """The routing of the measured load, in the groups of the model that it is of; None if none is given.

        Raises:
            BadInput: if there is no such load, or it is of another number of experts.
        """
        if not self.load:
            return None
        load, run = routers_load(Path(self.load), self.experts)
        shape = shape_for(run.experiment) if run else None
        groups = {"groups": shape.expert_groups, "limited_groups": shape.limited_groups} if shape else {}
        return routing_of_load(load.shares_E(self.ep).tolist(), top_k=self.top_k, **groups)

    def to_routing(self, kind: str = "") -> RoutingModel:
        """How tokens choose experts: as the parameters say, or in another way.

        Raises:
            BadInput: if there is no such way, or the load that it needs is not given.
        """
        kind = kind or self.routing
        if kind == "measured":
            if (measured := self.measured) is None:
                raise BadInput("routing is measured: give load, a run directory that has an expert_load.parquet")
            return measured
        groups = {"groups": self.groups, "limited_groups": self.limited_groups}
        return routing_of(kind, experts=self.experts, **groups, skew=self.skew)

    def to_compared(self) -> list[RoutingModel]:
        """Ways that figures compare: forced balance, two that are derived, a made-up load, and a measured one."""
        kinds = ["round_robin", "group_limited", "random_balanced", "skewed", *(["measured"] if self.load else [])]
        return [self.to_routing(kind) for kind in kinds]


@_takes(
    "model ep ranks_per_node tokens alignment hardware sender token measure output size",
    model=Literal["debug", "16B", "671B"],
    ranks_per_node=Count,
    tokens=Tokens,
    alignment=Literal[16, 32, 128],
    hardware=NodeProfile,
    sender=Annotated[int, Field(ge=0)],
    token=Token,
    measure=bool,
)
class DispatchParameters(NotebookParameters):
    """Parameters of ``04_dispatch_with_deepep``."""

    def to_placement(self) -> ExpertPlacement:
        """Where the model's experts are.

        Raises:
            BadInput: if the numbers do not divide.
        """
        shape = shape_of(self.model)
        return ExpertPlacement(
            experts=shape.num_experts, top_k=shape.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node
        )


@_takes(
    "model shape hardware nodes gpus_per_node pp pp_schedule dp_replicate dp_shard cp tp ep seq_len local_batch "
    "microbatch precision ep_backend activation_checkpoint compile routing rank search_limit",
    model=str,
    shape=str,
    rank=Annotated[int, Field(ge=0)],
)
class PlanParameters(NotebookParameters):
    """Parameters of ``05_plan_layout``."""

    def to_experiment(self, **changes: Any) -> Experiment:
        """The experiment that these parameters name but for the changes, on C4 as the published runs.

        Raises:
            BadInput: if a value is none that an experiment takes, or there is no such model.
        """
        fields = {"name": "plan", "dataset": "c4", **self.of_experiment}
        fields["shape"] = yaml.safe_load(f"{{{self.shape}}}")
        if self.model not in SHAPES:
            model = read_model(self.model)
            fields |= {"model": model.model, "shape": model.shape | fields["shape"]}
        return parse(Experiment, {**fields, **changes})


@_takes(
    "study runs_dir submit cluster model arms quantize wgrad ep_backend nodes ranks ep seeds steps warmup_steps lr "
    "seq_len local_batch activation_checkpoint compile routing dataset hardware final_fraction margin_nats on_failure",
    on_failure=Literal["continue", "stop"],
)
class ConvergenceParameters(NotebookParameters):
    """Parameters of ``06_compare_convergence``."""

    def to_study(self) -> Study:
        """The experiments that these parameters name."""
        of_mxfp8 = {"quantize": self.quantize, "wgrad": self.wgrad}
        shared = {name: value for name, value in self.of_experiment.items() if name not in of_mxfp8}
        arms = [
            {"precision": precision, **{"mxfp8": of_mxfp8, "nvfp4": {"wgrad": self.wgrad}}.get(precision, {})}
            for precision in map(str.strip, self.arms.split(","))
        ]
        return make_study(self.study, shared, arms, range(self.seeds))

    @property
    def reference(self) -> str:
        """Name of the arm that the others are held against: the first."""
        return self.to_study().arms[0]

    @property
    def study_folder(self) -> Path:
        """Where the study's runs and report are."""
        return Path(self.runs_dir, self.study)


@_takes(
    "study runs_dir submit cluster model precision ep_kernels nodes ranks tp pp pp_schedule ep seeds steps "
    "warmup_steps lr seq_len local_batch activation_checkpoint compile routing dataset hardware",
    precision=Annotated[Literal["fp8", "mxfp8"], BeforeValidator(_with_a_speed)],
    ep=Annotated[int, Field(ge=2)],
    steps=Annotated[int, Field(ge=5)],  # the first three do not count
)
class ThroughputParameters(NotebookParameters):
    """Parameters of ``07_compare_throughput``."""

    def to_study(self) -> Study:
        """The two-by-two: BF16 and quantised experts, each with the standard all-to-all and with DeepEP."""
        arms = [
            {"precision": precision, "ep_backend": backend}
            for precision in ("bf16", self.precision)
            for backend in ("standard", "deepep")
        ]
        return make_study(self.study, self.of_experiment, arms, range(self.seeds))


@_takes(
    "gpu nodes gpus_per_node network_gb_s pp tp ep seq_len local_batch routing price_per_gpu_hour watts_per_gpu "
    "tokens_t calibration search_limit",
    gpu=Literal["H100", "H200", "B200", "GB200"],
    network_gb_s=Positive,
    price_per_gpu_hour=Positive,
    watts_per_gpu=Positive,
    tokens_t=Positive,
)
class ProjectParameters(NotebookParameters):
    """Parameters of ``08_project_to_cluster``."""

    def to_experiment(self, **changes: Any) -> Experiment:
        """The 671B model with MXFP8 (FP8 before SM100) experts and DeepEP on your cluster, but for the changes.

        Raises:
            BadInput: if a value is none that an experiment takes.
        """
        fields = self.of_experiment | {"name": "project", "model": "671B", "dataset": "c4"}
        fields |= {"precision": "mxfp8", "ep_backend": "deepep", "pp_schedule": "Interleaved1F1B"}
        fields |= {"activation_checkpoint": "full", "compile": "model+loss"}
        return on(self.gpu, parse(Experiment, {**fields, **changes}))


@_takes(
    "study runs_dir runs submit cluster wait model precision ep_backend nodes ranks tp pp ep steps trace_step "
    "warmup_steps lr seq_len local_batch activation_checkpoint compile routing dataset hardware",
    wait=bool,
)
class LaunchParameters(NotebookParameters):
    """Parameters of ``09_launch_and_watch_run``."""

    def to_study(self) -> Study:
        """One arm at one seed."""
        return make_study(self.study, self.of_experiment, [{}], [0])

    @property
    def watched(self) -> Path:
        """Folder of the runs to watch."""
        return Path(self.runs) if self.runs else Path(self.runs_dir, self.study)


@_takes(
    "paths reference final_fraction margin_nats with_paths output",
    with_paths=bool,
)
class ReportParameters(NotebookParameters):
    """Parameters of ``10_report_study``."""

    def to_paths(self) -> tuple[Path, ...]:
        """What the report is about."""
        given = [Path(path.strip()) for path in self.paths.split(";") if path.strip()]
        return tuple(given) or EXAMPLE_LOGS


@_takes(
    "trace against rank profiler_step layer phase record study runs_dir model ranks trace_step seq_len local_batch "
    "compile hardware",
    rank=Annotated[int, Field(ge=-1)],
    profiler_step=Annotated[int, Field(ge=-1)],
    layer=Annotated[int, Field(ge=-1)],
    phase=Literal["forward", "recompute", "backward"],
    record=bool,
    trace_step=Annotated[int, Field(ge=2, le=1000)],
)
class ExplainParameters(NotebookParameters):
    """Parameters of ``11_explain_step``."""

    def to_study(self) -> Study:
        """One BF16 run whose last step is traced."""
        shared = self.of_experiment | {"ep": self.ranks, "steps": self.trace_step, "warmup_steps": 1}
        return make_study(self.study, shared, [{"precision": "bf16"}], [0])

    def to_paths(self) -> list[Path]:
        """Of your own traces: the given one, or what the run that is trained here left so far."""
        if self.trace or not self.record:
            return [Path(self.trace)] if self.trace else []
        traced = [run.path for run in find(Path(self.runs_dir, self.study)) if (run.path / TRACES_FOLDER).is_dir()]
        return traced[-1:]

    def to_choice(self) -> dict[str, int | None]:
        """Which rank and step of them is shown, as :func:`moelab.traces.explanation.explain` takes it."""
        return {
            "rank": None if self.rank < 0 else self.rank,
            "step": None if self.profiler_step < 0 else self.profiler_step,
        }

    def to_experiment(self) -> Experiment | None:
        """What ran, if it is known."""
        if self.against:
            return read_experiment(Path(self.against))
        records = [path / EXPERIMENT_FILE for path in self.to_paths()]
        return next((read_experiment(record) for record in records if record.is_file()), None)


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
