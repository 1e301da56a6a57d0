"""An :class:`~moelab.experiment.Experiment` as a TorchTitan ``Trainer.Config``.

TorchTitan calls the function named by ``--config`` with no arguments, so the experiment comes by an environment
variable that names its YAML file::

    MOELAB_EXPERIMENT=runs/study/bf16_standard/seed0/…/experiment.yaml \
        torchrun --nproc-per-node 2 -m torchtitan.train --module moelab.titan --config experiment --dump_folder …

or it is one of the published arms, by name (:mod:`moelab.titan.arms`)::

    torchrun … -m torchtitan.train --module moelab.titan --config dsv3_671b_mxfp8_deepep

Every field of TorchTitan's configuration can still be overridden on that command line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchao.prototype.moe_training import mxfp8_grouped_mm
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.config.override import OverrideConfig, override
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from moelab.deepep.checkpoint import CommunicationSavingAC, CommunicationSavingFullAC
from moelab.deepep.dispatcher import PADDED
from moelab.errors import Refused
from moelab.experiment import EPBackend, Experiment, Precision, Routing
from moelab.experiment_file import read_experiment
from moelab.hardware import GROUP_PADDING, has_native_mxfp8
from moelab.layout import check
from moelab.machine import end_with_torchrun, gpus
from moelab.model import TOKENIZERS, shape_for
from moelab.mxfp8 import capture
from moelab.mxfp8 import dispatch as mxfp8_dispatch
from moelab.mxfp8 import kernels as mxfp8_kernels
from moelab.mxfp8.converter import LINEARS, Quantiser
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.titan import corpus, routing
from moelab.titan.arms import named_arms, nearest
from moelab.titan.metrics import KeptMetrics
from moelab.titan.models import model_spec
from moelab.titan.preempt import ResumeCheckpoints, StoppableTrainer
from moelab.titan.record import record_conversion, record_dispatcher

EXPERIMENT_VARIABLE = "MOELAB_EXPERIMENT"
VALIDATION_BATCHES = 8
_ACTIVATION_CHECKPOINT = {
    "none": None,
    "selective": CommunicationSavingAC.Config(),
    "full": FullAC.Config(),
    "full+dispatch": CommunicationSavingFullAC.Config(),
}
_COMPILE = {"none": [], "loss": ["loss"], "model+loss": ["model", "loss"]}
_FP32_GATE = "moelab.titan.cpu.fp32_gate"
ONE_MICROBATCH = "moelab.titan.config_registry.one_microbatch"
_FUSED_SWIGLU = (
    "torchtitan.overrides.fused_swiglu.fused_swiglu",
    "torchtitan.overrides.fused_swiglu.fused_grouped_experts",
)


class EndValidator(Validator):
    """TorchTitan's validator without its pass at step 1, and with one after the last step: the trained model's."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """As TorchTitan's, with the number of the last step."""

        last_step: int

    def should_validate(self, step: int) -> bool:
        """Whether held-out text is evaluated after this step."""
        return step % self.config.freq == 0 or step == self.config.last_step


def experiment() -> Trainer.Config:
    """The experiment whose YAML file ``MOELAB_EXPERIMENT`` names; :class:`Refused` if it is illegal."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_torchrun()  # a rank outlives a torchrun that is killed, and keeps its GPU
    path = os.environ.get(EXPERIMENT_VARIABLE)
    if not path:
        raise KeyError(f"set {EXPERIMENT_VARIABLE} to the path of an experiment.yaml; `moelab run` does so")
    folder = Path(path).parent
    # A run's record must have every field; a person's file has defaults.
    is_record = Path(path).name == directory.EXPERIMENT_FILE and directory.is_run(folder)
    chosen = RunDir(folder).experiment if is_record else read_experiment(Path(path))
    if reasons := check(chosen).reasons:
        raise Refused("\n".join(reasons))
    return trainer_config(chosen)


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """The configuration function of a published arm, by its name."""
    # TorchTitan looks `--config NAME` up with getattr, so a hundred arms need no hundred functions.
    try:
        arm = named_arms()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def config() -> Trainer.Config:
        if reasons := check(arm).reasons:
            raise Refused("\n".join([*reasons, f"nearest by name: --config {nearest(name)}"]))
        return trainer_config(arm)

    config.__name__ = config.__qualname__ = name  # TorchTitan logs it
    config.__doc__ = f"The published {arm.model} setting as arm {arm.arm}."
    return config


def __dir__() -> list[str]:
    """What ``--config`` takes; TorchTitan lists it when it is given another name."""
    return [experiment.__name__, *named_arms()]


@contextmanager
def assume_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Have the device answer as a GPU of this compute capability would, to configure only.

    A configuration depends on the GPU in a few places: which MXFP8 kernels exist, whether FP8 experts are allowed, who
    pads the experts' groups. Torch, torchao 0.18 and TorchTitan 0.3.0 query the device and take no argument for it.

    >>> with assume_gpu((9, 0)):
    ...     torch.cuda.get_device_capability()
    (9, 0)
    """
    major, minor = capability
    answers = {
        "is_available": True,
        "get_device_capability": capability,
        "get_device_name": f"an assumed SM{major}{minor} GPU",
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_device, _answer=answer: _answer))
        native = has_native_mxfp8(major)
        stack.enter_context(mock.patch.object(mxfp8_grouped_mm, "_SM100_KERNELS_AVAILABLE", native))
        stack.enter_context(mock.patch.object(mxfp8_kernels, "why_not_cutedsl", return_value=None))  # its packages too
        yield


def _require_no_gpus(experiment: Experiment) -> None:
    """Make sure that the processor is used because there are no GPUs or ``hardware`` says so, not because they fail.

    :class:`Refused` if nvidia-smi fails, or lists GPUs that PyTorch does not see.
    """
    if experiment.hardware != "cpu" and (listed := gpus()):
        raise Refused(
            f"nvidia-smi lists {len(listed)} × {listed[0].name} (driver {listed[0].driver}), but PyTorch "
            f"{torch.__version__} sees no CUDA device: it was built without CUDA, or for a newer driver. Install a "
            "matching PyTorch or driver, or train on the processor with hardware=cpu"
        )


def trainer_config(experiment: Experiment) -> Trainer.Config:
    """Translate a legal experiment, and prepare this process for it: its device, its corpus, its kernels.

    :class:`Refused` if this machine lacks the kernels that the arm asks for by name.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        _require_no_gpus(experiment)
        from moelab.titan import cpu

        cpu.enable()
    spec = _model(experiment, on_cpu=on_cpu)
    accumulates = experiment.pp == 1 and experiment.accumulate_gradients
    return StoppableTrainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))),
        optimizer=default_adamw(lr=experiment.lr),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=experiment.warmup_steps, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
        ),
        training=TrainingConfig(
            local_batch_size=experiment.microbatch if accumulates else experiment.local_batch,
            # TorchTitan accumulates gradients over as many local batches as make up the global one.
            global_batch_size=experiment.global_batch if accumulates else -1,
            seq_len=experiment.seq_len,
            steps=experiment.steps,
            disable_cuda_graphs=True,  # a dispatcher that waits for the host cannot be captured
        ),
        parallelism=_parallelism(experiment, on_cpu=on_cpu),
        checkpoint=ResumeCheckpoints.Config(enable=False),  # launch/node.py enables them with TorchTitan's options
        activation_checkpoint=_ACTIVATION_CHECKPOINT[experiment.activation_checkpoint],
        compile=CompileConfig(enable=experiment.compile != "none", components=_COMPILE[experiment.compile]),
        comm=CommConfig(trace_buf_size=0) if on_cpu else CommConfig(),  # NCCL's flight recorder, which gloo lacks
        debug=DebugConfig(
            seed=experiment.seed,
            moe_force_load_balance=experiment.routing is Routing.ROUND_ROBIN,
            save_config_file="launch/titan_config.json",
            enable_structured_logging=False,
        ),
        metrics=KeptMetrics.Config(log_freq=1, enable_tensorboard=True, disable_color_printing=True),
        override=OverrideConfig(imports=_overrides(experiment, on_cpu=on_cpu)),
        trace_step=experiment.trace_step,
        trace_ranks=experiment.trace_ranks,
        memory_snapshot=experiment.memory_snapshot,
        **_data(experiment),
    )


def _overrides(experiment: Experiment, *, on_cpu: bool) -> list[Any]:
    """Overrides that TorchTitan applies after it has filled in the model's configuration."""
    imports: list[Any] = []
    if on_cpu:
        from moelab.titan import cpu

        imports += cpu.OVERRIDES
    if experiment.routing is Routing.RANDOM_BALANCED:
        if on_cpu:
            imports.remove(_FP32_GATE)  # part of the router's override: two overrides may not claim the same module
        imports.append((routing.RANDOM_BALANCED, {"fp32_gate": on_cpu}))
    if experiment.ep_backend is EPBackend.DEEPEP:
        imports.append((PADDED, _padding(experiment)))
    elif experiment.dispatch_precision != "bf16":
        imports.append(mxfp8_dispatch.QUANTISED)
    elif experiment.ep_backend is not EPBackend.STANDARD and experiment.pp > 1:
        imports.append((ONE_MICROBATCH, {"tokens": tokens_of_a_microbatch(experiment)}))
    if experiment.ep_backend is EPBackend.MINIMAL_ASYNC_EP:
        # Most rows of its fixed-size buffer are uninitialised; the fused activation stops at the last row in use.
        imports += _FUSED_SWIGLU
    return [*imports, *experiment.overrides]


def _padding(experiment: Experiment) -> dict[str, Any]:
    """Arguments of the override that installs moelab's DeepEP dispatcher."""
    kind = f"mxfp8_{_kernels(experiment)}" if experiment.precision is Precision.MXFP8 else experiment.precision.value
    return {
        "alignment": GROUP_PADDING[kind],
        "tokens": tokens_of_a_microbatch(experiment) if experiment.pp > 1 else None,
        "kernels": experiment.ep_kernels,
        "precision": experiment.dispatch_precision,
    }


def tokens_of_a_microbatch(experiment: Experiment) -> int:
    """Tokens that a rank dispatches at a time with a pipeline; its context- and tensor-parallel peers share a sequence.

    >>> tokens_of_a_microbatch(Experiment(seq_len=8192, microbatch=1, tp=2, pp=2, local_batch=64))
    4096
    """
    return experiment.microbatch * experiment.seq_len // (experiment.cp * experiment.tp)


@override(target=BaseEPTokenDispatcher.Config, description="buffers for one micro-batch under pipeline parallelism")
def one_microbatch(config: BaseEPTokenDispatcher.Config, *, tokens: int) -> Any:
    """Limit the tokens of a dispatch where the dispatcher, HybridEP's or MinimalAsyncEP's, has such a setting.

    Both allocate their buffer once, for the most tokens that a rank ever dispatches at a time. TorchTitan 0.3.0 assumes
    the whole local batch and refuses a smaller number, but with a pipeline a rank dispatches one micro-batch: with 64
    sequences and micro-batches of one, the buffer would be 64 times too large. This can go when TorchTitan counts
    micro-batches. (moelab's dispatcher does the same for DeepEP. ``planning/memory/peak.py`` has the buffers' sizes.)
    """
    if not hasattr(config, "num_max_tokens_per_rank"):
        return config
    return dataclasses.replace(config, num_max_tokens_per_rank=tokens)


def _model(experiment: Experiment, *, on_cpu: bool) -> ModelSpec:
    spec = model_spec(
        experiment.model,
        ep_backend=experiment.ep_backend.value,
        attention_backend=experiment.attention_backend,
        shape=shape_for(experiment),
    )
    converter = _converter(experiment)
    if converter is not None:
        # Before TorchTitan applies overrides, because those of dispatchers depend on the experts they find.
        spec.model = converter.build().convert(spec.model)
    kernels = None if converter is None else _kernels(experiment)

    def parallelize(model: nn.Module, **arguments: Any) -> nn.Module:
        model = parallelize_titan(model, **arguments)  # first, so that FSDP's hooks run before those added below
        if on_cpu:
            from moelab.titan import cpu

            cpu.sum_gradients(model)
        record_dispatcher(model, Path(arguments["dump_folder"]), stages=experiment.pp)
        if kernels:
            record_conversion(model, Path(arguments["dump_folder"]), kernels, stages=experiment.pp)
        capture.install(model, experiment, Path(arguments["dump_folder"]))
        return model

    parallelize_titan = spec.parallelize_fn
    return dataclasses.replace(spec, parallelize_fn=parallelize)


def _kernels(experiment: Experiment) -> mxfp8_kernels.Kernels:
    """Kernels of a quantised experiment; FP8's are native wherever FP8 is legal, NVFP4's never."""
    if experiment.precision is Precision.NVFP4:
        return "emulated"
    return mxfp8_kernels.resolve(experiment.mxfp8_kernels) if experiment.precision is Precision.MXFP8 else "native"


def _converter(experiment: Experiment) -> Any:
    if experiment.precision is Precision.BF16:
        return None
    # The field's default is mxfp8, which for FP8 means weight gradients in BF16, as in torchao's recipe.
    own = "fp8" if experiment.precision is Precision.FP8 else "mxfp8"
    return Quantiser.Config(
        model_compile_enabled=experiment.compile == "model+loss",
        precision=experiment.precision.value,
        kernels=_kernels(experiment),
        wgrad=own if experiment.wgrad == own else "bf16",
        linears=list(LINEARS) if experiment.quantize == "experts+linears" else [],
    )


def _parallelism(experiment: Experiment, *, on_cpu: bool) -> ParallelismConfig:
    stages = None
    if experiment.pp_stages_per_rank and (layout := check(experiment).layout) and layout.pp > 1:
        # TorchTitan derives more than two stages per rank from layers per stage, which cannot give every number.
        stages = list(map(list, layout.stages))
    return ParallelismConfig(
        data_parallel_replicate_degree=experiment.dp_replicate,
        data_parallel_shard_degree=experiment.dp_shard,
        tensor_parallel_degree=experiment.tp,
        pipeline_parallel_degree=experiment.pp,
        pipeline_parallel_schedule=experiment.pp_schedule,
        pipeline_parallel_microbatch_size=experiment.microbatch,
        module_fqns_per_model_part=stages,
        context_parallel_degree=experiment.cp,
        expert_parallel_degree=experiment.ep,
        # The all-to-all of spmd_types needs equal splits with gloo.
        spmd_backend="partial_dtensor" if on_cpu else "spmd_types",
    )


def _data(experiment: Experiment) -> dict[str, Any]:
    """Data loader, tokenizer and validator of the experiment's dataset."""
    train, held_out = ("c4", "c4_validation") if experiment.dataset == "c4" else ("python", "python_held_out")
    folder = TOKENIZERS.get(experiment.model) if experiment.dataset == "c4" else None
    if folder is None:
        text = corpus.folder_of(experiment.dataset, shape_for(experiment).vocab_size)
        corpus.register(text)
    data = {"dataloader": HuggingFaceTextDataLoader.Config(dataset=train), "hf_assets_path": folder or str(text)}
    if experiment.dataset == "c4" and not experiment.validate_every:
        return data
    validator = EndValidator.Config(
        enable=True,
        freq=experiment.validate_every or experiment.steps,
        last_step=experiment.steps,
        steps=VALIDATION_BATCHES,
        dataloader=HuggingFaceTextDataLoader.Config(dataset=held_out, infinite=True),
    )
    return data | {"validator": validator}
