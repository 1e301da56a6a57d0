"""Parameters of the notebooks: what each takes, and the check of what a person gave.

papermill injects whatever it is given, and ``"false"`` is a true string. The cell after a notebook's parameters cell
makes one checked object of them. What each means is said beside it in that cell. Those that are fields of an experiment
are checked by :class:`~moelab.experiment.Experiment` once a study is made of them; ``ranks`` is ``gpus_per_node``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from moelab.data.example_logs import EXAMPLE_LOGS
from moelab.door import read_study, runs_folder, status
from moelab.errors import BadInput
from moelab.experiment import NUMBERS_ONLY, EPBackend, Experiment, OwnHardware, Precision, Routing
from moelab.experiment_file import Study, make_study, parse, read_hardware
from moelab.hardware import cluster_of
from moelab.launch.cluster import ClusterProfile, read_cluster
from moelab.launch.local import completed
from moelab.machine import CPU_RANKS, counted, gpu_problem, gpus, ranks_here
from moelab.model import SHAPES, shape_for, shape_of
from moelab.model.hugging_face import read_model
from moelab.planning.project import on
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, routing_of, routing_of_load
from moelab.runs.directory import TRACES_FOLDER, find
from moelab.runs.expert_load import routers_load

Count = Annotated[int, Field(ge=1)]
Folder = Annotated[str, AfterValidator(lambda name: str(runs_folder(name)))]
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seeds = Annotated[int, Field(ge=1, le=100)]
Share = Annotated[float, Field(gt=0, le=1)]
Margin = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=4095)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
Limit = Annotated[int, Field(ge=1, le=50)]
NodeProfile = Literal["b200_x256", "b200_node", "h100_node", "h200_node"]


class NotebookParameters(BaseModel):
    """What all of them share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, namespace: Mapping[str, Any]) -> Self:
        """Check the parameters of a notebook: ``parameters = StartParameters.of(globals())``.

        Returns:
            The parameters with their declared types: ``"false"`` is False and ``"1e-4"`` is 0.0001.

        Raises:
            BadInput: for a value of the wrong type or out of its bounds, or a parameter that is missing.
        """
        return parse(cls, {name: namespace[name] for name in cls.model_fields if name in namespace})

    @property
    def of_experiment(self) -> dict[str, Any]:
        """The parameters that are fields of an experiment; an ``ep`` of 0, which nobody chose, is left out."""
        given = self.model_dump()
        fields = {name: value for name, value in given.items() if name in Experiment.model_fields}
        fields |= {"hardware": read_hardware(given["hardware"])} if "hardware" in given else {}
        return {name: value for name, value in fields.items() if value or name != "ep"}


class _Trains(NotebookParameters):
    """A study that is trained, on this machine unless its parameters say elsewhere."""

    study: str
    runs_dir: Folder
    ranks: NotNegative

    @property
    def of_experiment(self) -> dict[str, Any]:
        """As in other notebooks, and the ranks; on the processor where a lesson takes more than there are GPUs."""
        fields, least = super().of_experiment, self._least_ranks
        if self.on_cpu_because:
            return fields | {"hardware": "cpu", "gpus_per_node": max(least, CPU_RANKS)}
        ranks = self.ranks or (self._cluster.gpus_per_node if self.on_slurm else 0)
        if self._takes_this_machine:
            ranks = ranks_here() // least * least  # two of three GPUs
        return fields | ({"gpus_per_node": ranks} if ranks else {})

    @property
    def _cluster(self) -> ClusterProfile:
        return read_cluster(getattr(self, "cluster", "local"))

    @property
    def on_slurm(self) -> bool:
        """Whether the study goes to a cluster with Slurm."""
        return self._cluster.scheduler == "slurm"

    @property
    def _least_ranks(self) -> int:
        """Ranks without which there is nothing to see: those of the degrees, two for any but the usual all-to-all."""
        given = self.model_dump()
        moves = given.get("ep_backend", EPBackend.STANDARD) != EPBackend.STANDARD
        return int(max(given.get("ep", 0), given.get("tp", 1) * given.get("pp", 1), 1 + moves))

    @property
    def _takes_this_machine(self) -> bool:
        """Whether nobody chose where it runs, nor on how many ranks."""
        is_chosen = self.ranks or getattr(self, "hardware", "local") != "local" or getattr(self, "nodes", 1) > 1
        return not is_chosen and not self.on_slurm

    @property
    def on_cpu_because(self) -> str:
        """Why this trains on the processor of a machine with GPUs; empty where it does not, or somebody chose so."""
        if not self._takes_this_machine or ranks_here() >= self._least_ranks:
            return ""
        here = counted(gpu.name for gpu in gpus()) or "no GPU"
        return f", because it takes {self._least_ranks} ranks and this machine has {here}"

    @property
    def place(self) -> str:
        """What the study trains on, in words."""
        experiment = self.to_study().experiments[0]
        count, hardware = experiment.world_size, experiment.hardware
        if hardware == "cpu" or (hardware == "local" and not gpu_problem() and not gpus()):
            return f"{count} process{'es' * (count > 1)} on a CPU{self.on_cpu_because}"
        return f"{count} GPU{'s' * (count > 1)}"

    def to_study(self) -> Study:
        """The experiments that these parameters name."""
        raise NotImplementedError


def _with_a_speed(precision: object) -> object:
    if precision == Precision.NVFP4:
        raise ValueError(f"fp8 or mxfp8. {NUMBERS_ONLY}; notebook 06 trains it")
    return precision


def _several(ep: int) -> int:
    if ep == 1 or ep < 0:
        raise ValueError("2 or more, or 0 if you do not choose: DeepEP moves tokens between ranks")
    return ep


def _two_by_two(precision: str) -> list[dict[str, str]]:
    """BF16 and quantised experts, each with the standard all-to-all and with DeepEP."""
    return [{"precision": one, "ep_backend": moves} for one in ("bf16", precision) for moves in ("standard", "deepep")]


class StartParameters(_Trains):
    """Parameters of ``00_start_here``."""

    steps: Annotated[int, Field(ge=2)]

    def to_study(self) -> Study:
        """The nano model in BF16 and with MXFP8 experts, once each, in steps of 512 tokens a rank."""
        shared = self.of_experiment | {"seq_len": 128, "local_batch": 4}
        shared |= {"warmup_steps": max(1, self.steps // 5), "lr": 4.0e-3}
        return make_study(self.study, shared, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0])


class QuantiseParameters(_Trains):
    """Parameters of ``01_quantise_to_mxfp8``."""

    capture_run: str
    model: str
    ep: NotNegative
    steps: Count
    seq_len: Count
    local_batch: Count
    activation_checkpoint: str
    hardware: str
    layer: NotNegative
    outlier_log2: Annotated[int, Field(ge=0, le=20)]

    def to_study(self) -> Study:
        """One BF16 run that captures what its experts multiply at its last step."""
        shared = self.of_experiment | {"warmup_steps": max(1, self.steps // 5), "capture_step": self.steps}
        return make_study(self.study, shared, [{"precision": "bf16"}], [0])


class GroupedGemmParameters(NotebookParameters):
    """Parameters of ``02_find_grouped_gemm_break_even``."""

    experiment: Literal["replay", "run"]
    result: str
    precision: Literal["fp8", "mxfp8", "mxfp8_wgrad_bf16"]
    shapes: str
    model: str
    tokens: Count
    tp: Count
    ep: Count
    aspect: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class RouteParameters(NotebookParameters):
    """Parameters of ``03_route_tokens``; all but ``load`` and ``seed`` have the names of the explorer's controls."""

    experts: Annotated[int, Field(ge=2)]
    top_k: Count
    ep: Count
    ranks_per_node: Count
    routing: Literal["random_balanced", "uniform", "group_limited", "group_by_score", "skewed", "measured"]
    groups: Count
    limited_groups: Count
    skew: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)]
    load: str
    tokens: Tokens
    hidden: Count
    precision: Precision
    hardware: NodeProfile
    token: Token
    seed: NotNegative

    def to_placement(self) -> ExpertPlacement:
        """Where the experts are."""
        return ExpertPlacement(experts=self.experts, top_k=self.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node)

    @property
    def measured(self) -> RoutingModel | None:
        """The routing of the measured load, in the groups of the model that it is of; None if none is given."""
        if not self.load:
            return None
        load, run = routers_load(Path(self.load), self.experts)
        shape = shape_for(run.experiment) if run else None
        groups = {"groups": shape.expert_groups, "limited_groups": shape.limited_groups} if shape else {}
        return routing_of_load(load.shares_E(self.ep).tolist(), top_k=self.top_k, **groups)

    def to_routing(self, kind: str = "") -> RoutingModel:
        """How tokens choose experts: as the parameters say, or in another way."""
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


class DispatchParameters(NotebookParameters):
    """Parameters of ``04_dispatch_with_deepep``."""

    model: Literal["debug", "16B", "671B"]
    ep: Count
    ranks_per_node: Count
    tokens: Tokens
    alignment: Literal[16, 32, 128]
    hardware: NodeProfile
    token: Token
    measure: bool
    output: str
    size: str

    def to_placement(self) -> ExpertPlacement:
        """Where the model's experts are."""
        shape = shape_of(self.model)
        return ExpertPlacement(
            experts=shape.num_experts, top_k=shape.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node
        )


class PlanParameters(NotebookParameters):
    """Parameters of ``05_plan_layout``."""

    model: str
    shape: str
    hardware: str
    nodes: Count
    gpus_per_node: Count
    pp: Count
    pp_schedule: str
    dp_replicate: Count
    dp_shard: int
    cp: Count
    tp: Count
    ep: Count
    seq_len: Count
    local_batch: Count
    microbatch: Count
    precision: Precision
    ep_backend: EPBackend
    activation_checkpoint: str
    compile: str
    routing: Routing
    rank: NotNegative
    search_limit: Limit

    def to_experiment(self, **changes: Any) -> Experiment:
        """The experiment that these parameters name but for the changes, on C4 as the published runs."""
        fields = {"name": "plan", "dataset": "c4", **self.of_experiment}
        fields["shape"] = yaml.safe_load(f"{{{self.shape}}}")
        if self.model not in SHAPES:
            model = read_model(self.model)
            fields |= {"model": model.model, "shape": model.shape | fields["shape"]}
        return parse(Experiment, {**fields, **changes})


class _Training(_Trains):
    """A study that is trained here or given to Slurm."""

    submit: bool
    cluster: str
    model: str
    nodes: Count
    ep: NotNegative
    steps: Count
    warmup_steps: NotNegative
    lr: Positive
    seq_len: Count
    local_batch: Count
    activation_checkpoint: str
    compile: str
    routing: Routing
    dataset: str
    hardware: str

    @field_validator("cluster")
    @classmethod
    def _takes_jobs(cls, cluster: str, info: ValidationInfo) -> str:
        if info.data.get("submit") and read_cluster(cluster).scheduler != "slurm":
            raise ValueError("a profile with Slurm, because submit is True; set submit = False to train here")
        return cluster

    @property
    def will_submit(self) -> bool:
        """Whether there is something to give to Slurm: not while runs are with it, nor after all have completed."""
        if not self.submit:
            return False
        study, there = self.to_study(), status(self.to_study(), runs=self.runs_dir)
        lacks = not there.found or any(not completed(there.found.attempts(one)) for one in study.experiments)
        return lacks and not there.going


class ConvergenceParameters(_Training):
    """Parameters of ``06_compare_convergence``."""

    study_file: str
    arms: str
    quantize: str
    wgrad: str
    ep_backend: EPBackend
    seeds: Seeds
    final_fraction: Share
    margin_nats: Margin
    on_failure: Literal["continue", "stop"]

    def to_study(self) -> Study:
        """The experiments of the study's file, if one is named, or those that the other parameters make."""
        if self.study_file:
            return read_study(self.study_file)
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


class ThroughputParameters(_Training):
    """Parameters of ``07_compare_throughput``."""

    precision: Annotated[Literal["fp8", "mxfp8"], BeforeValidator(_with_a_speed)]
    ep_kernels: str
    tp: Count
    pp: Count
    pp_schedule: str
    ep: Annotated[int, AfterValidator(_several)]
    seeds: Seeds
    steps: Annotated[int, Field(ge=5)]

    @property
    def _least_ranks(self) -> int:
        """Two: half of the arms have DeepEP."""
        return max(2, super()._least_ranks)

    def to_study(self) -> Study:
        """The two-by-two: BF16 and quantised experts, each with the standard all-to-all and with DeepEP."""
        return make_study(self.study, self.of_experiment, _two_by_two(self.precision), range(self.seeds))


class ProjectParameters(NotebookParameters):
    """Parameters of ``08_project_to_cluster``."""

    gpu: Literal["H100", "H200", "B200", "GB200"]
    nodes: Count
    gpus_per_node: Count
    network_gb_s: Positive
    pp: Count
    tp: Count
    ep: Count
    seq_len: Count
    local_batch: Count
    routing: Routing
    price_per_gpu_hour: Positive
    watts_per_gpu: Positive
    tokens_t: Positive
    calibration: str
    search_limit: Limit

    def to_experiment(self, **changes: Any) -> Experiment:
        """The 671B model with MXFP8 (FP8 before SM100) experts and DeepEP on your cluster, but for the changes."""
        fields = self.of_experiment | {"name": "project", "model": "671B", "dataset": "c4"}
        fields |= {"precision": "mxfp8", "ep_backend": "deepep", "pp_schedule": "Interleaved1F1B"}
        fields |= {"activation_checkpoint": "full", "compile": "model+loss"}
        return on(self.gpu, parse(Experiment, {**fields, **changes}))

    def to_study(self) -> Study:
        """BF16 and the GPU's 8-bit format, each with both all-to-alls, on your cluster with its own network."""
        experiment = self.to_experiment()
        node = cluster_of(experiment.hardware).node
        cluster = {"name": f"{self.gpu}-cluster", "gpu": self.gpu, "nodes": self.nodes, "gpus": node.gpus}
        cluster |= {"nvlink_gpus": node.nvlink_gpus, "nic_gb_s": self.network_gb_s}
        shared = {name: getattr(experiment, name) for name in experiment.model_fields_set - {"name", "seed"}}
        return make_study(
            "project", shared | {"hardware": OwnHardware(**cluster)}, _two_by_two(experiment.precision), [0]
        )


class LaunchParameters(_Training):
    """Parameters of ``09_launch_and_watch_run``."""

    runs: str
    wait: bool
    precision: Precision
    ep_backend: EPBackend
    tp: Count
    pp: Count
    trace_step: NotNegative

    def to_study(self) -> Study:
        """One arm at one seed."""
        return make_study(self.study, self.of_experiment, [{}], [0])

    @property
    def watched(self) -> Path:
        """Folder of the runs to watch."""
        return Path(self.runs) if self.runs else Path(self.runs_dir, self.study)


class ReportParameters(NotebookParameters):
    """Parameters of ``10_report_study``."""

    paths: str
    reference: str
    final_fraction: Share
    margin_nats: Margin
    with_paths: bool
    output: str

    def to_paths(self) -> tuple[Path, ...]:
        """What the report is about."""
        given = [Path(path.strip()) for path in self.paths.split(";") if path.strip()]
        return tuple(given) or EXAMPLE_LOGS


class ExplainParameters(_Trains):
    """Parameters of ``11_explain_step``."""

    trace: str
    against: str
    rank: Annotated[int, Field(ge=-1)]
    profiler_step: Annotated[int, Field(ge=-1)]
    layer: Annotated[int, Field(ge=-1)]
    phase: Literal["forward", "recompute", "backward"]
    record: bool
    model: str
    trace_step: Annotated[int, Field(ge=2, le=1000)]
    seq_len: Count
    local_batch: Count
    compile: str
    hardware: str

    def to_study(self) -> Study:
        """One BF16 run whose last step is traced."""
        shared = self.of_experiment | {"steps": self.trace_step, "warmup_steps": 1}
        return make_study(self.study, shared, [{"precision": "bf16"}], [0])

    def to_paths(self) -> list[Path]:
        """Of your own traces: the given one, or what the run that is trained here left so far."""
        if self.trace or not self.record:
            return [Path(self.trace)] if self.trace else []
        traced = [run.path for run in find(Path(self.runs_dir, self.study)) if (run.path / TRACES_FOLDER).is_dir()]
        return traced[-1:]

    def to_choice(self) -> dict[str, int | None]:
        """Which rank and step of them is shown, as :func:`moelab.explain` takes it."""
        return {
            "rank": None if self.rank < 0 else self.rank,
            "step": None if self.profiler_step < 0 else self.profiler_step,
        }
