"""Arms that are one training are refused by name, and they are the ones that TorchTitan cannot tell apart.

The reference is what TorchTitan gets and makes of it: the configuration with its overrides applied, the degrees of its
mesh, its learning rates, its split of a pipeline; and the variables of the ranks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia_smi_support import B200, forget, nvidia_smi
from run_support import ENDS, curve, make_run, train
from run_support import make_study as made_study
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.experiment_file import make_study
from moelab.hardware import GPUS, Gpu
from moelab.judge.report import judge_study
from moelab.launch import capability
from moelab.launch.capability import refusals_of
from moelab.launch.cluster import read_cluster
from moelab.launch.local import run_study
from moelab.launch.submit import dry_run, submit
from moelab.launch.torchrun import command
from moelab.layout import check, training_of
from moelab.runs import directory
from moelab.titan import config_registry
from moelab.titan.config_registry import EndValidator, assume_gpu, trainer_config


@pytest.fixture(autouse=True)
def _one_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_registry.corpus, "folder_of", lambda name, _: Path("/", name))
    monkeypatch.setattr(config_registry.corpus, "register", lambda _: None)


H100_GPU, B200_GPU = GPUS["H100"], GPUS["B200"]


def described(value: Any) -> Any:
    """Configurations as mappings with the names of their classes; TorchTitan's own `to_dict` leaves these out."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, list | tuple):
        return list(map(described, value))
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value


def as_torchtitan_runs_it(x: Experiment, gpu: Gpu) -> Any:
    """What TorchTitan gets, where it resolves a setting itself as it does."""
    assert gpu.capability
    with assume_gpu((int(gpu.capability), 0)):
        config = trainer_config(x)
        config.model_spec.model.update_from_config(config=config)
        apply_overrides(config.override, config)
    told = described(config)
    parallel, training = told["parallelism"], told["training"]
    dims = ParallelDims.from_config(config.parallelism, x.world_size)
    parallel["data_parallel_shard_degree"] = dims.dp_shard
    if dims.pp_enabled:
        stages, layers, first, last = _get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
        split = config.parallelism.module_fqns_per_model_part
        parallel["module_fqns_per_model_part"] = split or _generate_llm_fqn_per_model_part(stages, layers, first, last)
    else:  # trainer.py and validate.py read them `if parallel_dims.pp_enabled`
        parallel = {key: value for key, value in parallel.items() if not key.startswith("pipeline_parallel_")}
    batches = training["local_batch_size"] * dims.dp_replicate * dims.dp_shard
    training["global_batch_size"] = batches if training["global_batch_size"] < 0 else training["global_batch_size"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    (schedule,) = config.lr_scheduler.build(optimizers=[optimizer], training_steps=x.steps).schedulers
    told["lr_scheduler"] = [schedule.lr_lambdas[0](step) for step in range(x.steps)]
    if config.validator.enable:
        due = object.__new__(EndValidator)
        due.config = config.validator
        told["validator"]["freq"] = [step for step in range(1, x.steps + 1) if due.should_validate(step)]
    if not x.trace_step:  # as StoppableTrainer reads them
        del told["trace_ranks"], told["memory_snapshot"]
    for layer in told["model_spec"]["model"]["layers"]:
        if x.routing != "learned" and layer["moe"]:  # which is the last test's
            del layer["moe"]["router"]["num_expert_groups"], layer["moe"]["router"]["num_limited_groups"]
    launched = command(x, Path("/run"))
    return {**told, "parallelism": parallel}, launched.variables, launched.arguments, x.nodes, x.capture_step


FP8, MXFP8, NVFP4 = {"precision": "fp8"}, {"precision": "mxfp8"}, {"precision": "nvfp4"}
PIPELINE = {"pp": 2, "gpus_per_node": 4, "local_batch": 4}
TWINS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"quantize": "experts+linears"}, "quantize", "precision is bf16, and nothing is quantised"),
    ({}, {"wgrad": "bf16"}, "wgrad", "nothing is quantised"),
    (FP8, {"wgrad": "bf16"}, "wgrad", "in BF16 unless wgrad is fp8"),
    ({}, {"mxfp8_kernels": "emulated"}, "mxfp8_kernels", "precision is bf16, which has no MXFP8 kernels"),
    (NVFP4, {"mxfp8_kernels": "emulated"}, "mxfp8_kernels", "precision is nvfp4"),
    ({**MXFP8, "hardware": "b200_node"}, {"mxfp8_kernels": "native"}, "mxfp8_kernels", "auto is native on b200_node"),
    ({**MXFP8, "hardware": "h200_node"}, {"mxfp8_kernels": "emulated"}, "mxfp8_kernels", "auto is emulated on h200"),
    ({}, {"ep_kernels": "emulated"}, "ep_kernels", "ep_backend is standard"),
    ({}, {"dp_shard": 2}, "dp_shard", "the other axes leave 2 ranks"),
    ({"pp": 2}, {"dp_shard": 2}, "dp_shard", "the other axes leave 2 ranks"),
    ({}, {"pp_schedule": "GPipe"}, "pp_schedule", "pp is 1"),
    ({}, {"pp_stages_per_rank": 2}, "pp_stages_per_rank", "pp is 1"),
    (PIPELINE, {"pp_stages_per_rank": 1}, "pp_stages_per_rank", "1F1B has 1 on each rank by itself"),
    (PIPELINE, {"accumulate_gradients": True}, "accumulate_gradients", "the pipeline takes the micro-batches"),
    ({}, {"microbatch": 2}, "microbatch", "all 4 sequences of local_batch go forward at once"),
    ({"microbatch": 4}, {"accumulate_gradients": True}, "accumulate_gradients", "all 4 sequences of local_batch"),
    ({"steps": 5, "warmup_steps": 5}, {"warmup_steps": 2000}, "warmup_steps", "a warm-up ends with the run, at step 5"),
    ({}, {"validate_every": 100}, "validate_every", "held-out text is evaluated after the last step, 60, in any case"),
    ({}, {"trace_ranks": [0, 1]}, "trace_ranks", "trace_step is 0"),
    ({}, {"shape": {"n_layers": 4}}, "shape.n_layers", "model nano has n_layers 4 by itself"),
    (
        {"routing": "random_balanced"},
        {"shape": {"expert_groups": 2, "limited_groups": 1}},
        "shape.expert_groups",
        "routing is random_balanced, and the router's choice among groups is discarded",
    ),
    ({}, {"quantize": "experts+linears", "pp_schedule": "GPipe"}, "pp_schedule", "nothing is quantised"),
]


@pytest.mark.parametrize(("shared", "change", "field", "why"), TWINS)
def test_two_arms_of_one_training_are_refused_with_what_makes_no_difference(
    shared: dict[str, Any], change: dict[str, Any], field: str, why: str
) -> None:
    shared = {"gpus_per_node": 4 if shared.get("pp") else 2, **shared}
    one, other = Experiment(**shared), Experiment(**{**shared, **change})
    gpu = H100_GPU if one.hardware == "h200_node" else B200_GPU
    assert check(other, gpu=gpu).legal
    assert as_torchtitan_runs_it(one, gpu) == as_torchtitan_runs_it(other, gpu)
    for first, second, arms in ((one, other, [{}, change]), (other, one, [change, {}])):
        if first.arm == second.arm:
            second = second.model_copy(update={"arm_fields": second.differences(first)})
        with pytest.raises(BadInput, match="the same training in two arms; leave one of them out") as refused:
            make_study("s", shared, arms, [0, 1])
        told = str(refused.value).splitlines()[1]
        assert told.startswith(f"arm {second.arm}: it is the same training as {first.arm}: ")
        assert f"{field} makes no difference: " in told
        assert why in told


BASES: list[dict[str, Any]] = [
    {},
    FP8,
    {**FP8, "wgrad": "fp8", "model": "debug", "ep_backend": "deepep"},
    MXFP8,
    {**MXFP8, "quantize": "experts+linears", "warmup_steps": 100},
    {**MXFP8, "wgrad": "bf16", "dispatch_precision": "mxfp8", "model": "debug", "ep_backend": "deepep"},
    NVFP4,
    {"ep_backend": "hybridep", "compile": "model+loss", "attention_backend": "flex_tiles"},
    {**PIPELINE, "dp_shard": 2},
    {**PIPELINE, "pp_schedule": "Interleaved1F1B", "shape": {"n_layers": 8}},
    {"accumulate_gradients": True, "microbatch": 2},
    {"trace_step": 3, "trace_ranks": [1], "dataset": "c4"},
    {"routing": "round_robin", "shape": {"expert_groups": 4, "limited_groups": 2}},
    {"ep": 1, "tp": 2, "dp_replicate": 2, "routing": "random_balanced"},
]
VALUES: dict[str, tuple[Any, ...]] = {
    "model": ("debug",),
    "shape": ({"n_layers": 4}, {"n_layers": 5}, {"expert_groups": 2, "limited_groups": 1}, {"num_experts": 8}),
    "precision": ("bf16", "fp8", "mxfp8", "nvfp4"),
    "mxfp8_kernels": ("auto", "native", "emulated"),
    "quantize": ("experts", "experts+linears"),
    "wgrad": ("mxfp8", "bf16", "fp8"),
    "ep_backend": ("standard", "deepep", "hybridep", "minimal_async_ep"),
    "ep_kernels": ("native", "emulated"),
    "dispatch_precision": ("bf16", "mxfp8", "fp8"),
    "routing": ("learned", "round_robin", "random_balanced"),
    "nodes": (2,),
    "gpus_per_node": (8,),
    "dp_replicate": (1, 2),
    "dp_shard": (-1, 1, 2, 4),
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "pp_schedule": ("1F1B", "GPipe", "Interleaved1F1B"),
    "pp_stages_per_rank": (0, 1, 2, 4),
    "cp": (2,),
    "ep": (1, 2, 4),
    "seq_len": (512,),
    "local_batch": (2, 8),
    "microbatch": (1, 2, 4),
    "accumulate_gradients": (False, True),
    "steps": (60, 100),
    "warmup_steps": (6, 60, 61, 2000),
    "lr": (1.0e-3,),
    "activation_checkpoint": ("none", "selective", "full", "full+dispatch"),
    "compile": ("none", "loss", "model+loss"),
    "attention_backend": ("flex", "flex_tiles", "varlen"),
    "dataset": ("python", "c4", "my/text"),
    "validate_every": (0, 20, 60, 61),
    "overrides": ((), ("torchtitan.overrides.fused_swiglu.fused_swiglu",)),
    "hardware": ("cpu", "h200_node"),
    "capture_step": (3,),
    "trace_step": (0, 3),
    "trace_ranks": ([0], [0, 1]),
    "memory_snapshot": (False, True),
}


def test_experiments_are_one_training_exactly_where_torchtitan_cannot_tell_them_apart() -> None:
    """Of every field beside every base, of those that are legal on the GPU."""
    assert VALUES.keys() == Experiment.model_fields.keys() - {"name", "seed", "arm_fields"}
    seen: dict[str, set[bool]] = {field: set() for field in VALUES}
    for gpu, base in [*((B200_GPU, base) for base in BASES), (H100_GPU, FP8), (H100_GPU, MXFP8)]:
        one = Experiment(**{"gpus_per_node": 4, **base})
        assert check(one, gpu=gpu).legal, base
        runs = as_torchtitan_runs_it(one, gpu)
        for field, values in VALUES.items():
            for value in values:
                fields = {"gpus_per_node": 4, **base, field: value}
                try:
                    other = Experiment(**fields)
                except ValueError:
                    continue
                if not check(other, gpu=gpu).legal or other == one:
                    continue
                same = training_of(one, gpu) == training_of(other, gpu)
                assert same == (as_torchtitan_runs_it(other, gpu) == runs), (base, field, value)
                seen[field].add(same)
    never_idle = {"model", "precision", "ep_backend", "dispatch_precision", "routing", "nodes", "gpus_per_node", "lr"}
    never_idle |= {"tp", "pp", "cp", "ep", "dp_replicate", "seq_len", "local_batch", "steps", "activation_checkpoint"}
    never_idle |= {"compile", "attention_backend", "dataset", "overrides", "capture_step", "trace_step"}
    never_idle |= {"memory_snapshot"}
    assert {field for field, outcomes in seen.items() if True not in outcomes} == never_idle
    # A legal dp_shard is what the other axes leave.
    assert {field for field, outcomes in seen.items() if False not in outcomes} == {"dp_shard"}


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_a_forced_choice_of_experts_does_not_depend_on_groups() -> None:
    """TorchTitan's router, whose top-k of groups is discarded."""
    torch.manual_seed(0)
    gate = Linear.Config(in_features=16, out_features=8)
    x_BLD = torch.randn(2, 6, 16)
    weight = torch.randn(8, 16)
    found = []
    for groups in ({}, {"num_expert_groups": 4, "num_limited_groups": 2}):
        shared = {"num_experts": 8, "gate": gate, "top_k": 2, "_debug_force_load_balance": True}
        router = TokenChoiceTopKRouter.Config(**shared, **groups).build()
        router.gate.weight.data = weight
        found.append(router(x_BLD))
    for mine, others in zip(*found, strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)


# Where it is known on what it runs


KERNELS = {"mxfp8_kernels": "emulated"}


def test_arms_that_are_one_on_this_machine_are_refused_when_they_would_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may compare machines, and `auto` is not known before."""
    kernels = make_study("s", MXFP8, [{}, KERNELS], [0])
    places = make_study("s", {}, [{}, {"hardware": "cpu"}], [0])
    nvidia_smi(monkeypatch, tmp_path, visible="")
    for study, words in ((kernels, "auto is emulated on this machine"), (places, "both run on this machine")):
        with pytest.raises(Refused, match=f"^{study.arms[1]}: it is the same training as {study.arms[0]}: .*{words}$"):
            run_study(study, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    nvidia_smi(monkeypatch, tmp_path, B200, B200)
    monkeypatch.setattr(capability.kernels, "MODULES", {})  # with the packages of the native kernels
    assert (refusals_of(kernels), refusals_of(places)) == ([], [])
    forget()


def test_arms_that_are_one_on_every_cluster_are_not_submitted(tmp_path: Path) -> None:
    study = make_study("s", {"gpus_per_node": 8}, [{"hardware": "h200_node"}, {"hardware": "b200_node"}], [0])
    cluster = read_cluster("slurm_generic", ["gpus_per_node=8"])
    for ask in (submit, dry_run):
        with pytest.raises(Refused, match=r"hardware makes no difference: .* both run on cluster slurm_generic"):
            ask(study, tmp_path, cluster)


def test_a_finished_run_is_not_trained_again_for_a_field_that_makes_no_difference(tmp_path: Path) -> None:
    run = make_run(tmp_path, Experiment(name="s", microbatch=2, steps=2), [8.0, 7.0])
    here = directory.discover(tmp_path)
    assert here.attempts(Experiment(name="s", steps=2)) == [run]
    assert here.attempts(Experiment(name="s", steps=2, accumulate_gradients=True)) == []
    judged = judge_study(tmp_path / "s", study=make_study("s", {"steps": 2}, [{}], [0]))
    assert [one.run for one in judged.finished] == [run.name]


def test_two_arms_of_one_training_that_were_trained_before_are_judged_as_one(tmp_path: Path) -> None:
    study = made_study(tmp_path)
    for seed, end in ENDS.items():
        arm = {"quantize": "experts+linears", "arm_fields": ["quantize"]}
        train(study, "bf16", seed, curve(end + 1.0), **arm)
    judged = judge_study(study)
    assert [verdict.arm for verdict in judged.verdicts] == ["mxfp8_standard"]
    (reason,) = {one.reason for one in judged.not_judged}
    assert reason.startswith("it is the same training as bf16_standard: quantize makes no difference: ")
