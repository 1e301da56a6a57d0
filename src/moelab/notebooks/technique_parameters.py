"""Parameters of the notebooks that explain a technique, plan a layout or project a step; see ``parameters.py``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from moelab.experiment import ActivationCheckpoint, Experiment
from moelab.experiment_file import Study, make_study, parse
from moelab.model import shape_of
from moelab.notebooks.parameters import Backend, Compile, Model, NotebookParameters, Routing
from moelab.projection import ExpertPlacement, RoutingModel, routing_of
from moelab.sweep import on


class QuantiseParameters(NotebookParameters):
    """Parameters of ``01_quantise_to_mxfp8``."""

    capture_run: str = Field(description="run directory with captures; empty: a short training makes them")
    study: str
    runs_dir: str
    model: Model
    ranks: int = Field(ge=1)
    ep: int = Field(ge=1)
    steps: int = Field(ge=1)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    activation_checkpoint: ActivationCheckpoint
    hardware: str
    layer: int = Field(ge=0, description="which of the captured layers: 0 is the first")
    outlier_log2: int = Field(ge=0, le=20)

    def to_study(self) -> Study:
        """One BF16 run that captures what its experts multiply at its last step."""
        fields = ("model", "ep", "steps", "seq_len", "local_batch", "activation_checkpoint", "hardware")
        shared = {name: getattr(self, name) for name in fields}
        shared |= {"gpus_per_node": self.ranks, "warmup_steps": max(1, self.steps // 5), "capture_step": self.steps}
        return make_study(self.study, shared, [{"precision": "bf16"}], [0])


class GroupedGemmParameters(NotebookParameters):
    """Parameters of ``02_find_grouped_gemm_break_even``."""

    experiment: Literal["replay", "run"]
    result: str = Field(description="file that is written by a run and read by a replay; empty: the stored one")
    precision: Literal["fp8", "mxfp8", "mxfp8_wgrad_bf16"]
    shapes: str = Field(description="M,N,K,G separated by semicolons; empty: all of the experiment's own")
    model: Literal["16B", "671B"]
    tokens: int = Field(ge=1, description="of one micro-batch on a data-parallel rank")
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    aspect: float = Field(gt=0, le=100, allow_inf_nan=False, description="K / N of the map's weights")
    resamples: int = Field(ge=10, le=1000)


class PlanParameters(NotebookParameters):
    """Parameters of ``05_plan_layout``; but for the last two they are fields of an experiment, with the same names."""

    model: Model
    hardware: str
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    pp: int = Field(ge=1)
    pp_schedule: str
    dp_replicate: int = Field(ge=1)
    dp_shard: int
    cp: int = Field(ge=1)
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    microbatch: int = Field(ge=1)
    precision: Literal["bf16", "fp8", "mxfp8"]
    ep_backend: Backend
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    rank: int = Field(ge=0, description="global rank whose groups are drawn")
    search_limit: int = Field(ge=1, le=50, description="layouts that the search lists")

    def to_experiment(self, **changes: Any) -> Experiment:
        """The experiment that these parameters name, on C4 as the published runs.

        Args:
            changes: fields of the experiment that are to differ.

        Raises:
            BadInput: if a value is none that an experiment takes.
        """
        fields = self.model_dump(exclude={"rank", "search_limit"})
        return parse(Experiment, {"name": "plan", "dataset": "c4", **fields, **changes})


class RouteParameters(NotebookParameters):
    """Parameters of ``03_route_tokens``; all but ``seed`` have the names of the traffic explorer's controls."""

    experts: int = Field(ge=2)
    top_k: int = Field(ge=1)
    ep: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    routing: Literal["random_balanced", "uniform", "group_limited", "group_by_score", "skewed"]
    groups: int = Field(ge=1, description="groups of experts, where routing is limited to some of them")
    limited_groups: int = Field(ge=1, description="groups that a token may use")
    skew: float = Field(ge=0, le=5, allow_inf_nan=False, description="exponent of the popularity of experts")
    tokens: int = Field(ge=1, le=1_000_000, description="of each rank")
    hidden: int = Field(ge=1)
    precision: Literal["bf16", "fp8", "mxfp8"]
    hardware: Literal["b200_x256", "b200_node", "h100_node", "h200_node"]
    token: int = Field(ge=0, le=4095, description="which token is drawn")
    seed: int = Field(ge=0)

    def to_placement(self) -> ExpertPlacement:
        """Where the experts are.

        Raises:
            BadInput: if the numbers do not divide.
        """
        return ExpertPlacement(experts=self.experts, top_k=self.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node)

    def to_routing(self) -> RoutingModel:
        """How tokens choose experts."""
        return routing_of(
            self.routing,
            experts=self.experts,
            groups=self.groups,
            limited_groups=self.limited_groups,
            skew=self.skew,
        )


class DispatchParameters(NotebookParameters):
    """Parameters of ``04_dispatch_with_deepep``."""

    model: Literal["debug", "16B", "671B"]
    ep: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    tokens: int = Field(ge=1, le=1_000_000, description="of each rank")
    alignment: Literal[16, 32, 128]
    hardware: Literal["b200_x256", "b200_node", "h100_node", "h200_node"]
    sender: int = Field(ge=0)
    token: int = Field(ge=0, le=4095, description="which token is drawn")
    measure: bool
    output: str
    size: str = Field(description="which size of the packaged measurement; empty takes its first")

    def to_placement(self) -> ExpertPlacement:
        """Where the model's experts are.

        Raises:
            BadInput: if the numbers do not divide.
        """
        shape = shape_of(self.model)
        return ExpertPlacement(
            experts=shape.num_experts, top_k=shape.top_k, ep=self.ep, ranks_per_node=self.ranks_per_node
        )


class ProjectParameters(NotebookParameters):
    """Parameters of ``08_project_to_cluster``."""

    gpu: Literal["H100", "H200", "B200", "GB200"]
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    network_gb_s: float = Field(gt=0, allow_inf_nan=False)
    pp: int = Field(ge=1)
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    seq_len: int = Field(ge=8)
    local_batch: int = Field(ge=1)
    routing: Routing
    price_per_gpu_hour: float = Field(gt=0, allow_inf_nan=False)
    watts_per_gpu: float = Field(gt=0, allow_inf_nan=False)
    tokens_t: float = Field(gt=0, allow_inf_nan=False, description="trillions of tokens of the whole training")
    grouped_gemm: str = Field(description="file of your node's grouped GEMMs; empty: the packaged one")
    all_to_all: str = Field(description="file of your node's all-to-all; empty: the packaged one")
    draws: int = Field(ge=10, le=10_000)
    most_gpus: int = Field(ge=8, le=4096)
    search_limit: int = Field(ge=1, le=50)

    def to_experiment(self, **changes: Any) -> Experiment:
        """The 671B model with MXFP8 (FP8 before SM100) experts and DeepEP on your cluster.

        Args:
            changes: fields of the experiment that are to differ.

        Raises:
            BadInput: if a value is none that an experiment takes.
        """
        names = ("nodes", "gpus_per_node", "pp", "tp", "ep", "seq_len", "local_batch", "routing")
        fields = {name: getattr(self, name) for name in names} | {"name": "project", "model": "671B", "dataset": "c4"}
        fields |= {"precision": "mxfp8", "ep_backend": "deepep", "pp_schedule": "Interleaved1F1B"}
        fields |= {"activation_checkpoint": "full", "compile": "model+loss"}
        return on(self.gpu, parse(Experiment, {**fields, **changes}))
