"""What TorchTitan itself says of an experiment, asked of its own code in a process of its own.

Questions, ``{depth: [experiment, …], …}``, are answered with TorchTitan's error messages, None where it raises none.
Depths:

- ``configure``: everything up to the model and the mesh that needs no process group: configuration objects, the first
  part of ``Trainer.__init__``, the model's ``update_from_config``, the pipeline's split and its schedule;
- ``mesh``: that, and the device mesh under the fake backend;
- ``shard``: that, and the model on the meta device, sharded as rank 0. One process for each, because a process keeps
  one view of the world.

The device is the CPU with the settings of a GPU (``spmd_types``): only shapes matter here.
"""

from __future__ import annotations

import functools
import multiprocessing
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
    found = in_titan_process(answers, {depth: list(rows) for depth, rows in questions.items()})
    return {depth: dict(zip(rows, found[depth], strict=True)) for depth, rows in questions.items()}


def answers(questions: Mapping[str, Sequence[Experiment]]) -> dict[str, list[str | None]]:
    """TorchTitan's messages in this process, in the order of the questions."""
    from moelab.titan import cpu

    os.environ["LOCAL_RANK"] = "0"
    import torchtitan.models.deepseek_v3
    import torchtitan.trainer  # noqa: F401 - cpu.enable() reaches the modules that are loaded

    cpu.enable()
    judges = {"configure": configure, "mesh": build_mesh, "shard": shard_in_fork}
    return {depth: [_words(judges[depth], row) for row in rows] for depth, rows in questions.items()}


def _words(judge: Any, experiment: Experiment) -> str | None:
    try:
        judge(experiment)
    except Exception as error:  # whatever TorchTitan raises is its verdict
        return f"{type(error).__name__}: {error}"
    return None


class _ReachedProcessGroup(Exception):
    """``Trainer.__init__`` has come as far as it can without a world."""


def configure(experiment: Experiment) -> Any:
    """TorchTitan's configuration and dimensions of an experiment, with every check that needs no process group."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

    config = _trainer_config(experiment)
    dims = []

    def no_process_group(_trainer: Trainer) -> ParallelDims:
        dims.append(ParallelDims.from_config(config.parallelism, experiment.world_size))
        return dims[0]

    with (
        mock.patch.object(Trainer, "init_distributed", no_process_group),
        mock.patch("torchtitan.trainer.dist_utils.set_spmd_backend", side_effect=_ReachedProcessGroup),
        suppress(_ReachedProcessGroup),
    ):
        Trainer.__init__.__wrapped__(Trainer.__new__(Trainer), config)
    config.model_spec.model.update_from_config(config=config)
    config._validate_cuda_graphs()
    if experiment.pp > 1:
        _pipeline(experiment, config, dims[0])
    return config, dims[0]


def _trainer_config(experiment: Experiment) -> Any:
    from torchtitan.components.quantization.utils import swap_token_dispatcher
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.trainer import Trainer

    from moelab.deepep.checkpoint import CommunicationSavingFullAC
    from moelab.titan.models import model_spec

    spec = model_spec(experiment.model, ep_backend=experiment.ep_backend.value)
    if experiment.precision is not Precision.BF16:  # the first step of TorchTitan's converters of experts
        for _name, _config, parent, _attribute in spec.model.traverse(GroupedExperts.Config):
            if experiment.ep_backend is not EPBackend.DEEPEP:  # moelab's pads, and takes its place later
                swap_token_dispatcher(parent, PADDING[experiment.precision])
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(
            local_batch_size=experiment.local_batch, seq_len=experiment.seq_len, disable_cuda_graphs=True
        ),
        activation_checkpoint={
            "none": None,
            "selective": SelectiveAC.Config(),
            "full": FullAC.Config(),
            "full+dispatch": CommunicationSavingFullAC.Config(),
        }[experiment.activation_checkpoint],
        compile=CompileConfig(enable=experiment.compile != "none", components=experiment.compile.split("+")),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=experiment.dp_replicate,
            data_parallel_shard_degree=experiment.dp_shard,
            tensor_parallel_degree=experiment.tp,
            pipeline_parallel_degree=experiment.pp,
            pipeline_parallel_schedule=experiment.pp_schedule,
            pipeline_parallel_microbatch_size=experiment.microbatch,
            context_parallel_degree=experiment.cp,
            expert_parallel_degree=experiment.ep,
        ),
    )


def _pipeline(experiment: Experiment, config: Any, dims: Any) -> tuple[list[list[str]], list[tuple[int, ...]]]:
    """Split the model and build the schedule; returns the stages' modules and each rank's stages."""
    from torchtitan.distributed import pipeline_parallel as titan

    n_stages, n_layers, first, last = titan._get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
    n_stages = experiment.pp_stages_per_rank * dims.pp or n_stages  # as ``module_fqns_per_model_part`` says it
    modules = titan._generate_llm_fqn_per_model_part(n_stages, n_layers, first, last)
    held = [
        titan._get_pp_rank_to_stage_indices_mapping(rank, dims.pp, experiment.pp_schedule, n_stages)
        for rank in range(dims.pp)
    ]
    _schedule(experiment.pp_schedule, experiment.pp, n_stages, held[0], experiment.local_batch, experiment.microbatch)
    return modules, held


@functools.cache
def _schedule(name: str, pp: int, n_stages: int, held: tuple[int, ...], local_batch: int, microbatch: int) -> Any:
    """The schedule of pipeline rank 0, on stages without modules. Large ones stop before communication is added."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import pipeline_parallel as titan

    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=n_stages,
            group_rank=0,
            group_size=pp,
            is_first=stage == 0,
            is_last=stage == n_stages - 1,
            submod=None,
            has_backward=True,
        )
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


def build_mesh(experiment: Experiment) -> Any:
    """Build TorchTitan's device mesh of the whole world as rank 0."""
    import torch.distributed
    from torchtitan.distributed.utils import init_fake_mode

    _config, dims = configure(experiment)
    init_fake_mode(experiment.world_size)
    try:
        dims.build_mesh()
    finally:
        torch.distributed.destroy_process_group()


def shard_in_fork(experiment: Experiment) -> None:
    """As :func:`shard`, in a child of this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(_words(shard, experiment)))
    process.start()
    theirs.close()
    try:
        words = ours.recv()
    finally:
        process.join()
    if words is not None:
        raise RuntimeError(words)


def shard(experiment: Experiment) -> None:
    """Build the model on the meta device and let TorchTitan shard it as rank 0."""
    import torch
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.utils import init_fake_mode, set_spmd_backend

    config, dims = configure(experiment)
    init_fake_mode(experiment.world_size)
    set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
