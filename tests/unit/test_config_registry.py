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
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.trainer import Trainer

from moelab.deepep.checkpoint import CommunicationSavingFullAC
from moelab.errors import BadInput, Refused
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import read_study
from moelab.layout import check
from moelab.mxfp8.converter import MXFP8EmulatedLinear
from moelab.runs import directory
from moelab.titan import config_registry
from moelab.titan.arms import PUBLISHED, config_name, named_arms, nearest
from moelab.titan.config_registry import EndValidator, assume_gpu, trainer_config
from moelab.titan.models import FLASH_BLOCKS, model_spec
from moelab.titan.preempt import ResumeCheckpoints
from moelab.titan.routing import RandomBalancedRouter

ROOT = Path(__file__).parents[2]
RUNNABLE = [name for name, arm in named_arms().items() if check(arm).legal]
REFUSED = [name for name in named_arms() if name not in RUNNABLE]


@pytest.fixture(autouse=True)
def _sm100() -> Iterator[None]:
    with assume_gpu((10, 0)):
        yield
    forget()


def model_of(config: Trainer.Config) -> Any:
    """The model's configuration after TorchTitan has filled it in and applied the overrides."""
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    config._validate_cuda_graphs()
    return config.model_spec.model


def parts(model: Any, kind: Any) -> list[Any]:
    """The model's parts of a kind."""
    return [part for _, part, _, _ in model.traverse(kind.Config)]


Layer = tuple[str, int | None, str, str | None]
"""Of a layer: its dispatcher, the multiple of rows that it pads to, its experts, and the arithmetic of moelab's."""


def layers_of(model: Any) -> list[Layer]:
    layers = []
    for layer in parts(model, RoutedExperts):
        dispatcher, experts = layer.token_dispatcher, layer.inner_experts
        padding = getattr(dispatcher, "alignment", getattr(dispatcher, "pad_multiple", None))
        with torch.device("meta"):
            arithmetic = getattr(experts.build(), "_arithmetic", None)
        layers.append((type(dispatcher)._owner.__name__, padding, type(experts)._owner.__name__, arithmetic))
    return layers


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
    assert (len(RUNNABLE), len(REFUSED)) == (40, 36)


def test_torchtitans_command_line_takes_a_name_and_overrides_it_and_lists_the_names() -> None:
    name = ["--module", "moelab.titan", "--config"]
    config = ConfigManager().parse_args([*name, "dsv3_671b_mxfp8_hybridep", "--training.steps", "3"])
    assert (config.training.steps, config.training.seq_len, config.model_spec.flavor) == (3, 8192, "671B")
    with pytest.raises(ValueError, match=r"Available config functions: \['dsv3_16b_bf16_deepep'.*'experiment'\]"):
        ConfigManager().parse_args([*name, "dsv3_670b"])


MXFP8_LAYER = ("MXFP8MXFP8Experts", "mxfp8_native")
LAYERS: dict[str, Layer] = {
    "bf16_standard": ("AllToAllTokenDispatcher", None, "GroupedExperts", None),
    "bf16_deepep": ("PaddedDispatcher", 8, "ScoredGroupedExperts", None),
    "bf16_hybridep": ("HybridEPTokenDispatcher", None, "GroupedExperts", None),
    "bf16_minimal_async_ep": ("MinimalAsyncEPTokenDispatcher", None, "FusedGroupedExperts", None),
    "fp8_standard": ("TorchAOTokenDispatcher", 16, "FP8GroupedExperts", "fp8"),
    "fp8_deepep": ("PaddedDispatcher", 16, "FP8GroupedExperts", "fp8"),
    "fp8_deepep_dispatch_fp8": ("PaddedDispatcher", 16, "FP8GroupedExperts", "fp8"),
    "fp8_hybridep": ("HybridEPTokenDispatcher", 16, "FP8GroupedExperts", "fp8"),
    "mxfp8_standard": ("TorchAOTokenDispatcher", 128, "MXFP8Experts", None),
    "mxfp8_standard_wgrad_bf16": ("TorchAOTokenDispatcher", 128, "MXFP8Experts", None),
    "mxfp8_standard_wgrad_bf16_dispatch_mxfp8": ("QuantisedDispatcher", 128, *MXFP8_LAYER),
    "mxfp8_deepep": ("PaddedDispatcher", 128, "MXFP8MXFP8Experts", "mxfp8_native_wgrad_mxfp8"),
    "mxfp8_deepep_wgrad_bf16": ("PaddedDispatcher", 128, *MXFP8_LAYER),
    "mxfp8_deepep_wgrad_bf16_dispatch_mxfp8": ("PaddedDispatcher", 128, *MXFP8_LAYER),
    "mxfp8_hybridep": ("HybridEPTokenDispatcher", 128, "MXFP8Experts", None),
    "mxfp8_hybridep_wgrad_bf16": ("HybridEPTokenDispatcher", 128, "MXFP8Experts", None),
}


@pytest.mark.parametrize("name", RUNNABLE)
def test_published_setting_dispatcher_and_quantised_modules(name: str) -> None:
    arm, config = named_arms()[name], getattr(config_registry, name)()
    parallelism, training, large = config.parallelism, config.training, arm.model == "671B"
    batches = (training.seq_len, training.local_batch_size, training.steps, config.lr_scheduler.warmup_steps)
    assert batches == ((8192, 64, 20, 2000) if large else (8192, 16, 1500, 2000))
    assert (parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree) == ((2, 2) if large else (1, 1))
    assert parallelism.expert_parallel_degree == (8 if arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP else 32)
    assert (arm.world_size, parallelism.data_parallel_shard_degree, parallelism.spmd_backend) == (256, -1, "spmd_types")
    assert config.optimizer.param_groups[-1].optimizer_kwargs["lr"] == 1e-4
    assert type(config.activation_checkpoint)._owner is FullAC
    assert (config.compile.enable, config.compile.components) == (True, ["model", "loss"])
    assert (config.debug.moe_force_load_balance, config.dataloader.dataset) == (True, "c4")
    assert training.disable_cuda_graphs
    model = model_of(config)
    linears = "_linears" in name
    layer = LAYERS[name.replace("_linears", "").split("_", 2)[2]]
    assert layers_of(model) == [layer] * (58 if large else 26)
    for routed in parts(model, RoutedExperts):
        assert not getattr(routed.token_dispatcher, "non_blocking_capacity_factor", None)  # drop no token
        # Of one micro-batch under a pipeline, where TorchTitan would take the local batch; tp ranks share a sequence.
        tokens = 8192 // 2 if large else 16 * 8192
        assert getattr(routed.token_dispatcher, "num_max_tokens_per_rank", tokens) == tokens
        assert type(routed)._owner.__name__ == ("ScoredRoutedExperts" if "deepep" in name else "RoutedExperts")
        if arm.precision is Precision.MXFP8:
            assert (routed.inner_experts.kernels, routed.inner_experts.wgrad) == ("native", arm.wgrad)
    assert has_quantization(model) == (arm.precision is not Precision.BF16)
    assert bool(parts(model, MXFP8EmulatedLinear)) == linears


H100_, B200, B300 = (9, 0), (10, 0), (10, 3)
EMULATED_DEEPEP = {"ep_backend": "deepep", "ep_kernels": "emulated"}
QUANTISED_DISPATCH = {"precision": "mxfp8", "wgrad": "bf16", "dispatch_precision": "mxfp8"}


@pytest.mark.parametrize(
    ("gpu", "fields", "layer"),
    [
        (H100_, {"precision": "mxfp8"}, ("TorchAOTokenDispatcher", 32, "MXFP8Experts", None)),
        (H100_, QUANTISED_DISPATCH, ("QuantisedDispatcher", 32, "MXFP8MXFP8Experts", "mxfp8_emulated")),
        (H100_, QUANTISED_DISPATCH | EMULATED_DEEPEP, ("PaddedDispatcher", 32, "MXFP8MXFP8Experts", "mxfp8_emulated")),
        # TorchTitan's three products, each emulated
        (H100_, {"precision": "mxfp8"} | EMULATED_DEEPEP, ("PaddedDispatcher", 32, "ScoredMXFP8Experts", None)),
        (B300, QUANTISED_DISPATCH | EMULATED_DEEPEP, ("PaddedDispatcher", 128, *MXFP8_LAYER)),
        (
            H100_,
            {"precision": "fp8", "wgrad": "fp8"},
            ("TorchAOTokenDispatcher", 16, "FP8GroupedExperts", "fp8_wgrad_fp8"),
        ),
        (H100_, {"precision": "fp8", "wgrad": "mxfp8"}, ("TorchAOTokenDispatcher", 16, "FP8GroupedExperts", "fp8")),
        # NVFP4 is emulated on a B200, too
        (B200, {"precision": "nvfp4", "wgrad": "bf16"}, ("TorchAOTokenDispatcher", 16, "MXFP8Experts", None)),
        (B200, {"precision": "nvfp4"} | EMULATED_DEEPEP, ("PaddedDispatcher", 16, "ScoredMXFP8Experts", None)),
    ],
)
def test_the_gpu_and_the_experiment_choose_padding_and_arithmetic(gpu: Any, fields: Any, layer: Layer) -> None:
    experiment = Experiment(**fields)
    with assume_gpu(gpu):
        model = model_of(trainer_config(experiment))
    assert layers_of(model) == [layer] * 3
    for routed in parts(model, RoutedExperts):
        assert getattr(routed.token_dispatcher, "kernels", "emulated") == "emulated"
        if experiment.precision is not Precision.FP8:
            experts, kernels = routed.inner_experts, "native" if gpu == B300 else "emulated"
            made = (experts.precision, experts.kernels, experts.wgrad, experts.pad_inside)
            assert made == (experiment.precision, kernels, experiment.wgrad, False)  # the dispatcher pads


@pytest.mark.parametrize("name", REFUSED)
def test_an_illegal_name_is_refused_in_the_words_of_a_plan_with_the_nearest(name: str) -> None:
    arm, instead = named_arms()[name], named_arms()[nearest(name)]
    assert (instead.model, instead.precision) == (arm.model, arm.precision)
    assert instead.ep_backend is arm.ep_backend or arm.ep_backend is EPBackend.MINIMAL_ASYNC_EP
    assert nearest(name) in RUNNABLE
    with pytest.raises(Refused) as caught:
        getattr(config_registry, name)()
    assert str(caught.value).splitlines() == [*check(arm).reasons, f"nearest by name: --config {nearest(name)}"]


def test_full_checkpointing_with_the_dispatch_kept() -> None:
    arm = published("671b_mxfp8_deepep", activation_checkpoint="full+dispatch")
    assert type(trainer_config(arm).activation_checkpoint)._owner is CommunicationSavingFullAC


@pytest.mark.parametrize(("pp", "batches"), [(1, (2, 4096)), (2, (64, -1))])
def test_torchtitan_adds_up_gradients_where_no_pipeline_takes_the_microbatches(pp: int, batches: Any) -> None:
    changes = {"accumulate_gradients": True, "microbatch": 2, "local_batch": 32 * pp, "pp": pp}
    training = trainer_config(published("671b_bf16_standard", **changes)).training
    assert (training.local_batch_size, training.global_batch_size) == batches


def test_the_default_corpus_has_its_held_out_text_evaluated_at_the_end() -> None:
    config = trainer_config(Experiment(steps=7))
    validator = config.validator
    assert (config.dataloader.dataset, validator.dataloader.dataset) == ("python", "python_held_out")
    assert (validator.enable, validator.freq, validator.steps) == (True, 7, config_registry.VALIDATION_BATCHES)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [({}, [10]), ({"validate_every": 4}, [4, 8, 10]), ({"validate_every": 5}, [5, 10]), ({"validate_every": 99}, [10])],
)
def test_held_out_text_is_evaluated_every_so_often_and_after_the_last_step(
    fields: dict[str, int], steps: list[int]
) -> None:
    validator = trainer_config(Experiment(steps=10, **fields)).validator
    asked = [step for step in range(1, 11) if EndValidator.should_validate(SimpleNamespace(config=validator), step)]
    assert asked == steps


def test_c4_is_validated_where_that_is_asked_for() -> None:
    assert not trainer_config(published("16b_bf16_standard")).validator.enable
    validator = trainer_config(published("16b_bf16_standard", validate_every=250)).validator
    assert (validator.enable, validator.freq, validator.dataloader.dataset) == (True, 250, "c4_validation")


def test_overrides_of_your_own_come_after_moelabs() -> None:
    mine = "torchtitan.overrides.fused_swiglu.fused_swiglu"
    config = trainer_config(Experiment(overrides=[mine]))
    assert config.override.imports == [*trainer_config(Experiment()).override.imports, mine]


@pytest.mark.parametrize(
    ("routing", "forced", "owner"),
    [
        ("learned", False, TokenChoiceTopKRouter),
        ("round_robin", True, TokenChoiceTopKRouter),
        ("random_balanced", False, RandomBalancedRouter),
    ],
)
def test_routing(routing: str, forced: bool, owner: type) -> None:
    routers = parts(model_of(trainer_config(Experiment(routing=routing))), TokenChoiceTopKRouter)
    assert [(type(router)._owner, router._debug_force_load_balance) for router in routers] == [(owner, forced)] * 3


@pytest.mark.parametrize(("capability", "blocks"), [(H100_, FLASH_BLOCKS), (B200, (256, 128))])
def test_flash_attention_has_a_mask_in_blocks_that_its_backward_pass_takes(capability: Any, blocks: Any) -> None:
    with assume_gpu(capability):
        spec = model_spec("671B", ep_backend="standard", attention_backend="flex_flash")
    attentions = parts(spec.model, FlexAttention)
    assert {(one.block_size, one.kernel_options["BACKEND"]) for one in attentions} == {(blocks, "FLASH")}


def test_a_rank_reads_a_record_as_a_record_and_a_persons_file_with_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_registry, "trainer_config", lambda experiment: experiment)
    own, run = tmp_path / "experiment.yaml", directory.create(tmp_path / "runs", Experiment(steps=7))
    own.write_text("steps: 8\n")
    record = run.path / "experiment.yaml"
    for file, steps in ((own, 8), (record, 7)):
        monkeypatch.setenv(config_registry.EXPERIMENT_VARIABLE, str(file))
        assert config_registry.experiment() == Experiment(steps=steps)
    record.write_text("name: study\nsteps: 7\n")  # before moelab 0.2
    with pytest.raises(BadInput, match="the record has no version"):
        config_registry.experiment()
    own.write_text("gpus_per_node: 4\nep: 3\n")
    monkeypatch.setenv(config_registry.EXPERIMENT_VARIABLE, str(own))
    with pytest.raises(Refused, match="ep is 3: it must divide the ranks it shares out"):
        config_registry.experiment()
    monkeypatch.delenv(config_registry.EXPERIMENT_VARIABLE)
    with pytest.raises(KeyError, match=f"set {config_registry.EXPERIMENT_VARIABLE}"):
        config_registry.experiment()


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_study_file_of_a_model_holds_named_arms(model: str) -> None:
    study = read_study(ROOT / "studies" / f"{model}_b200_x256.yaml")
    for experiment in study.experiments:
        assert named_arms()[config_name(experiment)] == experiment.model_copy(update={"seed": 0})
        assert check(experiment).legal


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [(MISMATCH, 18, "version mismatch"), (H100, 0, r"lists 1 × NVIDIA H100 80GB HBM3 .*sees no CUDA device")],
)
def test_a_processor_does_not_stand_in_for_gpus_that_do_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str, code: int, told: str
) -> None:
    nvidia_smi(monkeypatch, tmp_path, row, code=code)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match=told):
        trainer_config(Experiment())


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
