"""Every published arm is a TorchTitan configuration by name; what cannot run is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvidia_smi_support import H100, MISMATCH, forget, nvidia_smi
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts
from torchtitan.trainer import Trainer

from moelab.deepep.checkpoint import CommunicationSavingFullAC
from moelab.deepep.dispatcher import PaddedDispatcher, ScoredRoutedExperts
from moelab.errors import BadInput, Refused
from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.experiment_file import read_study
from moelab.layout import check
from moelab.mxfp8.converter import MXFP8EmulatedLinear, MXFP8Experts
from moelab.runs import directory
from moelab.titan import config_registry
from moelab.titan.arms import PUBLISHED, config_name, named_arms, nearest
from moelab.titan.config_registry import assume_gpu, trainer_config
from moelab.titan.models import FLASH_BLOCKS, model_spec
from moelab.titan.preempt import ResumeCheckpoints
from moelab.titan.routing import RandomBalancedRouter

ROOT = Path(__file__).parents[2]
RUNNABLE = [name for name, arm in named_arms().items() if check(arm).legal]
REFUSED = [name for name, arm in named_arms().items() if not check(arm).legal]
DISPATCHER = {
    EPBackend.STANDARD: AllToAllTokenDispatcher,
    EPBackend.DEEPEP: PaddedDispatcher,
    EPBackend.HYBRIDEP: HybridEPTokenDispatcher,
    EPBackend.MINIMAL_ASYNC_EP: MinimalAsyncEPTokenDispatcher,
}


@pytest.fixture(autouse=True)
def _sm100() -> Iterator[None]:
    with assume_gpu((10, 0)):
        yield
    forget()


def model_of(config: Trainer.Config) -> Any:
    """The model's configuration after TorchTitan has filled it in and applied the overrides."""
    assert config.model_spec is not None
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    config._validate_cuda_graphs()
    return config.model_spec.model


def parts(model: Any, kind: Any) -> list[Any]:
    """The model's parts of a kind."""
    return [part for _, part, _, _ in model.traverse(kind.Config)]


def published(name: str, **changes: Any) -> Experiment:
    return named_arms()[f"dsv3_{name}"].model_copy(update=changes)


def test_the_table_has_every_combination_and_each_once() -> None:
    names = set(named_arms())
    backends = ("standard", "deepep", "hybridep", "minimal_async_ep")
    for model, precision, backend in product(("16b", "671b"), ("bf16", "mxfp8", "fp8"), backends):
        arm = f"dsv3_{model}_{precision}_{backend}"
        dispatch = "_wgrad_bf16_dispatch_mxfp8" if precision == "mxfp8" else "_dispatch_mxfp8"
        assert {arm, f"{arm}{dispatch}"} <= names
    assert {"dsv3_16b_mxfp8_hybridep_linears", "dsv3_671b_fp8_deepep_dispatch_fp8"} <= names
    assert not [name for name in names if "671b" in name and "linears" in name]  # tp is 2
    assert all(config_name(arm) == name for name, arm in named_arms().items())
    assert config_name(Experiment(model="16B", lr=1e-5, arm_fields=["lr"])) == "dsv3_16b_bf16_standard"
    assert all(getattr(config_registry, name).__name__ == name for name in names)
    assert names < {*dir(config_registry)}
    assert len(RUNNABLE) + len(REFUSED) == len(names) == 76


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="dsv3_670b"):
        config_registry.dsv3_670b_bf16_standard  # noqa: B018
    with pytest.raises(ValueError, match=r"Available config functions: \['dsv3_16b_bf16_deepep'.*'experiment'\]"):
        ConfigManager().parse_args(["--module", "moelab.titan", "--config", "dsv3_670b"])


def test_torchtitans_command_line_takes_a_name_and_overrides_it() -> None:
    arguments = ["--module", "moelab.titan", "--config", "dsv3_671b_mxfp8_hybridep", "--training.steps", "3"]
    config = ConfigManager().parse_args(arguments)
    assert (config.training.steps, config.training.seq_len) == (3, 8192)
    assert config.model_spec.flavor == "671B"


@pytest.mark.parametrize("name", RUNNABLE)
def test_published_setting_dispatcher_and_quantised_modules(name: str) -> None:
    arm, config = named_arms()[name], getattr(config_registry, name)()
    parallelism, training = config.parallelism, config.training
    large = arm.model == "671B"
    batches = (training.seq_len, training.local_batch_size, training.steps, config.lr_scheduler.warmup_steps)
    assert batches == ((8192, 64, 20, 2000) if large else (8192, 16, 1500, 2000))
    assert (parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree) == ((2, 2) if large else (1, 1))
    assert parallelism.expert_parallel_degree == (8 if arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP else 32)
    assert (arm.world_size, parallelism.data_parallel_shard_degree, parallelism.spmd_backend) == (256, -1, "spmd_types")
    assert config.optimizer.param_groups[-1].optimizer_kwargs["lr"] == 1e-4
    assert isinstance(config.activation_checkpoint, FullAC.Config)
    assert config.compile.enable
    assert config.compile.components == ["model", "loss"]
    assert config.debug.moe_force_load_balance
    assert config.dataloader.dataset == "c4"
    assert training.disable_cuda_graphs
    model = model_of(config)
    found, layers = parts(model, LocalTokenDispatcher), {"16B": 26, "671B": 58}[arm.model]
    assert len(found) == layers
    assert all(issubclass(type(dispatcher)._owner, DISPATCHER[arm.ep_backend]) for dispatcher in found)
    assert not any(getattr(dispatcher, "non_blocking_capacity_factor", None) for dispatcher in found)  # drop no token
    fused = layers if (arm.ep_backend, arm.precision) == (EPBackend.MINIMAL_ASYNC_EP, Precision.BF16) else 0
    assert len(parts(model, FusedGroupedExperts)) == fused
    deepep = arm.ep_backend is EPBackend.DEEPEP
    padding = {Precision.BF16: 8 if deepep else None, Precision.FP8: 16, Precision.MXFP8: 128}[arm.precision]
    assert getattr(found[0], "alignment" if deepep else "pad_multiple", None) == padding
    assert len(parts(model, ScoredRoutedExperts)) == (layers if deepep else 0)
    assert has_quantization(model) == (arm.precision is not Precision.BF16)
    experts = parts(model, MXFP8Experts)
    assert len(experts) == (layers if arm.precision is Precision.MXFP8 else 0)
    assert all((config.kernels, config.wgrad) == ("native", arm.wgrad) for config in experts)
    assert bool(parts(model, MXFP8EmulatedLinear)) == (
        arm.quantize == "experts+linears" and arm.precision is Precision.MXFP8
    )


@pytest.mark.parametrize("name", REFUSED)
def test_an_illegal_name_is_refused_in_the_words_of_a_plan_with_the_nearest(name: str) -> None:
    arm, instead = named_arms()[name], named_arms()[nearest(name)]
    assert (instead.model, instead.precision) == (arm.model, arm.precision)
    assert instead.ep_backend is arm.ep_backend or arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP
    assert nearest(name) in RUNNABLE
    with pytest.raises(Refused) as caught:
        getattr(config_registry, name)()
    assert str(caught.value).splitlines() == [*check(arm).reasons, f"nearest by name: --config {nearest(name)}"]


def test_an_illegal_experiment_is_refused_before_torchtitan_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("gpus_per_node: 4\nep: 3\n", encoding="utf-8")
    monkeypatch.setenv(config_registry.EXPERIMENT_VARIABLE, str(path))
    with pytest.raises(Refused, match="ep is 3: it must divide the ranks it shares out"):
        config_registry.experiment()


def test_full_checkpointing_with_the_dispatch_kept() -> None:
    arm = published("671b_mxfp8_deepep", activation_checkpoint="full+dispatch")
    assert type(trainer_config(arm).activation_checkpoint)._owner is CommunicationSavingFullAC


@pytest.mark.parametrize(("kernels", "capability", "padding"), [("auto", (9, 0), 32), ("native", (10, 0), 128)])
def test_deepep_pads_as_the_experts_kernels_need(kernels: str, capability: tuple[int, int], padding: int) -> None:
    arm = published("16b_mxfp8_deepep", mxfp8_kernels=kernels, ep_kernels="emulated")
    with assume_gpu(capability):
        dispatchers = parts(model_of(trainer_config(arm)), LocalTokenDispatcher)
    assert {(one.alignment, one.kernels) for one in dispatchers} == {(padding, "emulated")}


@pytest.mark.parametrize(("pp", "batches"), [(1, (2, 4096)), (2, (64, -1))])
def test_torchtitan_adds_up_gradients_where_no_pipeline_takes_the_microbatches(pp: int, batches: Any) -> None:
    changes = {"accumulate_gradients": True, "microbatch": 2, "local_batch": 32 * pp, "pp": pp}
    training = trainer_config(published("671b_bf16_standard", **changes)).training
    assert (training.local_batch_size, training.global_batch_size) == batches


@pytest.mark.parametrize(("backend", "padding"), [("standard", "pad_multiple"), ("deepep", "alignment")])
def test_nvfp4_is_emulated_in_blocks_of_16_on_a_b200_too(backend: str, padding: str) -> None:
    arm = Experiment(precision="nvfp4", wgrad="bf16", ep_backend=backend, ep_kernels="emulated")
    model = model_of(trainer_config(arm))
    made = [(one.nvfp4, one.kernels, one.wgrad, one.pad_inside) for one in parts(model, MXFP8Experts)]
    assert made == [(True, "emulated", "bf16", False)] * 3
    assert {getattr(one, padding) for one in parts(model, LocalTokenDispatcher)} == {16}


@pytest.mark.parametrize(("asked", "given"), [("fp8", "fp8"), ("mxfp8", "bf16")])
def test_fp8_experts_have_the_weight_gradient_that_is_asked_for(asked: str, given: str) -> None:
    with assume_gpu((9, 0)):
        model = model_of(trainer_config(published("16b_fp8_standard", wgrad=asked)))
    assert {experts.wgrad for experts in parts(model, GroupedExperts)} == {given}


@pytest.mark.parametrize("backend", ["deepep", "hybridep", "minimal_async_ep"])
def test_buffers_hold_one_microbatch_under_a_pipeline(backend: str) -> None:
    """TorchTitan would take the whole local batch: 64 sequences of 8192 tokens, over 2 tensor-parallel ranks."""
    for model, tokens in (("671b", 8192 // 2), ("16b", 16 * 8192)):
        dispatchers = parts(model_of(trainer_config(published(f"{model}_bf16_{backend}"))), LocalTokenDispatcher)
        assert {dispatcher.num_max_tokens_per_rank for dispatcher in dispatchers} == {tokens}


@pytest.mark.parametrize(
    ("routing", "forced", "owner"),
    [
        (Routing.LEARNED, False, TokenChoiceTopKRouter),
        (Routing.ROUND_ROBIN, True, TokenChoiceTopKRouter),
        (Routing.RANDOM_BALANCED, False, RandomBalancedRouter),
    ],
)
def test_routing(routing: Routing, forced: bool, owner: type) -> None:
    routers = parts(model_of(trainer_config(published("671b_bf16_standard", routing=routing))), TokenChoiceTopKRouter)
    assert len(routers) == 58
    assert all(type(router)._owner is owner and router._debug_force_load_balance == forced for router in routers)


def test_a_rank_reads_a_record_as_a_record_and_a_persons_file_with_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_registry, "trainer_config", lambda experiment: experiment)
    own, run = tmp_path / "experiment.yaml", directory.create(tmp_path / "runs", Experiment(steps=7))
    own.write_text("steps: 8\n")
    record = run.path / "experiment.yaml"
    for file, steps in ((own, 8), (record, 7)):
        monkeypatch.setenv("MOELAB_EXPERIMENT", str(file))
        assert config_registry.experiment() == Experiment(steps=steps)
    record.write_text("name: study\nsteps: 7\n")  # of an earlier version, cut off
    with pytest.raises(BadInput, match="the record lacks model"):
        config_registry.experiment()


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_study_file_of_a_model_holds_named_arms(model: str) -> None:
    study = read_study(ROOT / "studies" / f"{model}_b200_x256.yaml")
    for experiment in study.experiments:
        assert named_arms()[config_name(experiment)] == experiment.model_copy(update={"seed": 0})
    assert not [experiment.arm for experiment in study.experiments if not check(experiment).legal]


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [(MISMATCH, 18, "version mismatch"), (H100, 0, r"lists 1 × NVIDIA H100 80GB HBM3 .*sees no CUDA device")],
)
def test_a_processor_does_not_stand_in_for_gpus_that_do_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str, code: int, said: str
) -> None:
    nvidia_smi(monkeypatch, tmp_path, row, code=code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match=said):
        trainer_config(Experiment())


@pytest.mark.parametrize(("capability", "blocks"), [((9, 0), FLASH_BLOCKS), ((10, 0), (256, 128))])
def test_flash_attention_has_a_mask_in_blocks_that_its_backward_pass_takes(
    capability: tuple[int, int], blocks: tuple[int, int]
) -> None:
    with assume_gpu(capability):
        spec = model_spec("671B", ep_backend="standard", attention_backend="flex_flash")
    attentions = parts(spec.model, FlexAttention)
    assert {attention.block_size for attention in attentions} == {blocks}
    assert {attention.kernel_options["BACKEND"] for attention in attentions} == {"FLASH"}


def test_a_step_that_was_loaded_or_saved_is_not_saved_again_when_a_job_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def save(manager: ResumeCheckpoints, step: int) -> bool:
        return manager._should_save(step) and not done.append(step)

    monkeypatch.setattr(CheckpointManager, "_load", lambda *_: True)
    monkeypatch.setattr(CheckpointManager, "_save", save)
    monkeypatch.setattr(CheckpointManager, "_wait_for_saving", lambda *_: done.append("waited"))
    manager = object.__new__(ResumeCheckpoints)
    settings = {"enable": True, "load_only": False, "interval": 100, "enable_first_step_checkpoint": False}
    vars(manager).update(settings, save_future=object(), states={"train_state": SimpleNamespace(step=7)})
    manager.load()
    assert [manager._should_save(step) for step in (99, 100)] == [False, True]  # of the interval
    for step in (7, 8, 8):
        manager.save_now(step)
    manager.enable = False  # there is nothing to close
    assert done == ["waited", 8, "waited", "waited"]
