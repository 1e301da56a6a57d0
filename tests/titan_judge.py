"""What TorchTitan itself says of an experiment, asked of its own code in a process of its own.

Depths of a question:

- ``configure``: everything up to the model and the mesh that needs no process group: configuration objects, the first
  part of ``Trainer.__init__``, the model's ``update_from_config``, the pipeline's split and its schedule;
- ``mesh``: that, and the device mesh under the fake backend;
- ``shard``: that, and the model on the meta device, sharded as rank 0. One process for each, because a process keeps
  one view of the world.

The device is the CPU with the settings of a GPU (``spmd_types``): only shapes matter here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

from titan_process import in_titan_process

from moelab.experiment import EPBackend, Experiment, Precision

PADDING = {Precision.FP8: 16, Precision.MXFP8: 32, Precision.NVFP4: 16}
Answers = dict[str, dict[Experiment, str | None]]
"""By depth and experiment, TorchTitan's message; None where it accepts."""


def ask(questions: Mapping[str, Sequence[Experiment]]) -> Answers:
    """What TorchTitan says of experiments, by depth."""
    answers: Answers = {}
    for depth, rows in questions.items():
        shares = [[row] for row in rows] if depth == "shard" else [rows]
        answers[depth] = dict(
            zip(rows, (words for one in shares for words in in_titan_process(judge, depth, one)), strict=True)
        )
    return answers


def judge(depth: str, experiments: Sequence[Experiment]) -> list[str | None]:
    """TorchTitan's messages in this process."""
    import torchtitan.models.deepseek_v3
    import torchtitan.trainer  # noqa: F401 - cpu.enable() reaches the modules that are loaded

    from moelab.titan import cpu

    os.environ["LOCAL_RANK"] = "0"
    cpu.enable()
    answers: list[str | None] = []
    for experiment in experiments:
        try:
            {"configure": configure, "mesh": build_mesh, "shard": shard}[depth](experiment)
            answers.append(None)
        except Exception as error:  # whatever TorchTitan raises is its verdict
            answers.append(f"{type(error).__name__}: {error}")
    return answers


class _ReachedProcessGroup(Exception):
    """``Trainer.__init__`` has come as far as it can without a world."""


def configure(experiment: Experiment) -> Any:
    """TorchTitan's configuration and dimensions of an experiment, with every check that needs no process group."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

    config = _trainer_config(experiment)
    dims = ParallelDims.from_config(config.parallelism, experiment.world_size)
    with (
        mock.patch.object(Trainer, "init_distributed", return_value=dims),
        mock.patch("torchtitan.trainer.dist_utils.set_spmd_backend", side_effect=_ReachedProcessGroup),
        suppress(_ReachedProcessGroup),
    ):
        Trainer.__init__.__wrapped__(Trainer.__new__(Trainer), config)
    config.model_spec.model.update_from_config(config=config)
    config._validate_cuda_graphs()
    if experiment.pp > 1:
        _pipeline(experiment, config, dims)
    return config, dims


def _trainer_config(experiment: Experiment) -> Any:
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.trainer import Trainer

    from moelab.deepep.checkpoint import CommunicationSavingFullAC
    from moelab.titan.models import model_spec

    x, policies = experiment, {"selective": SelectiveAC, "full": FullAC, "full+dispatch": CommunicationSavingFullAC}
    spec = model_spec(x.model, ep_backend=x.ep_backend.value)
    # The first step of TorchTitan's converters of experts; moelab's DeepEP pads, and takes its place later.
    if x.precision is not Precision.BF16 and x.ep_backend is not EPBackend.DEEPEP:
        for _name, _config, parent, _attribute in spec.model.traverse(GroupedExperts.Config):
            swap_token_dispatcher(parent, PADDING[x.precision])
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=x.local_batch, seq_len=x.seq_len, disable_cuda_graphs=True),
        activation_checkpoint=policies[x.activation_checkpoint].Config() if x.activation_checkpoint != "none" else None,
        compile=CompileConfig(enable=x.compile != "none", components=x.compile.split("+")),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=x.dp_replicate,
            data_parallel_shard_degree=x.dp_shard,
            tensor_parallel_degree=x.tp,
            pipeline_parallel_degree=x.pp,
            pipeline_parallel_schedule=x.pp_schedule,
            pipeline_parallel_microbatch_size=x.microbatch,
            context_parallel_degree=x.cp,
            expert_parallel_degree=x.ep,
        ),
    )


def _pipeline(experiment: Experiment, config: Any, dims: Any) -> None:
    """Split the model and build the schedule."""
    from torchtitan.distributed import pipeline_parallel as titan

    n_stages, n_layers, first, last = titan._get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
    n_stages = experiment.pp_stages_per_rank * dims.pp or n_stages  # as ``module_fqns_per_model_part`` says it
    titan._generate_llm_fqn_per_model_part(n_stages, n_layers, first, last)
    held = titan._get_pp_rank_to_stage_indices_mapping(0, dims.pp, experiment.pp_schedule, n_stages)
    _schedule(experiment.pp_schedule, experiment.pp, n_stages, held, experiment.local_batch, experiment.microbatch)


@functools.cache
def _schedule(name: str, pp: int, n_stages: int, held: tuple[int, ...], local_batch: int, microbatch: int) -> Any:
    """The schedule of pipeline rank 0, on stages without modules. Large ones stop before communication is added."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import pipeline_parallel as titan

    shared = {"num_stages": n_stages, "group_rank": 0, "group_size": pp, "submod": None, "has_backward": True}
    stages = [
        SimpleNamespace(stage_index=stage, is_first=stage == 0, is_last=stage == n_stages - 1, **shared)
        for stage in held
    ]
    parallelism = ParallelismConfig(
        pipeline_parallel_schedule=name,
        pipeline_parallel_degree=pp,
        pipeline_parallel_microbatch_size=microbatch,
    )
    large = pp * local_batch > 128
    skip = mock.patch.object(_PipelineScheduleRuntime, "_prepare_schedule_with_comms", return_value=None)
    with skip if large else mock.MagicMock():
        return titan._build_pipeline_schedule(
            parallelism=parallelism, local_batch_size=local_batch, stages=stages, loss_fn=lambda *_tensors: None
        )


def build_mesh(experiment: Experiment) -> None:
    """Build TorchTitan's device mesh of the whole world as rank 0."""
    import torch.distributed
    from torchtitan.distributed.utils import init_fake_mode

    _config, dims = configure(experiment)
    init_fake_mode(experiment.world_size)
    try:
        dims.build_mesh()
    finally:
        torch.distributed.destroy_process_group()


def shard(experiment: Experiment) -> None:
    """Build the model on the meta device and let TorchTitan shard it as rank 0."""
    import torch
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.utils import init_fake_mode, set_spmd_backend

    config, dims = configure(experiment)
    init_fake_mode(experiment.world_size)
    set_spmd_backend(config.parallelism.spmd_backend)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
