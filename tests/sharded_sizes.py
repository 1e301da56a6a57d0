"""TorchTitan's sharded models without memory: how many elements each rank holds.

The model is on the meta device, the ranks talk through torch's fake process group, and the parallelisation is
TorchTitan's own, with the backend that it uses on GPUs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import init_fake_mode, set_spmd_backend
from torchtitan.trainer import Trainer

from moelab.experiment import Experiment
from moelab.titan.config_registry import trainer_config


def local_numel(experiment: Experiment, rank: int) -> int:
    """Elements of the parameters of one rank."""
    init_fake_mode(experiment.world_size, rank=rank)
    with tempfile.TemporaryDirectory() as folder:  # a run notes there what moves its tokens
        parts = model_parts(trainer_config(experiment), folder)
    return sum(parameter.to_local().numel() for part in parts for parameter in part.parameters())


def model_parts(config: Trainer.Config, folder: str) -> list[torch.nn.Module]:
    """The parts of the model that this rank has, sharded, as TorchTitan's trainer makes them."""
    config.parallelism.spmd_backend = "spmd_types"
    spec = config.model_spec
    set_spmd_backend("spmd_types")
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    shared: dict[str, Any] = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": None,
        "dump_folder": folder,
    }
    if dims.pp_enabled:
        _schedule, parts, _first, _last = spec.pipelining_fn(
            model,
            **shared,
            device=torch.device("cpu"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda *_: (torch.zeros(()), {}),
        )
        return list(parts)
    return [spec.parallelize_fn(model, **shared)]


def all_local_numel(jobs: list[tuple[Experiment, int]]) -> list[int]:
    """Elements of the parameters of each experiment and rank, each in a fork: device meshes are cached by process."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.starmap(local_numel, jobs, chunksize=1)
