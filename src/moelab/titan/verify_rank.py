"""The child of ``verify.py``: build one rank after another with TorchTitan, on the meta device, under the fake backend.

It follows ``Trainer.__init__`` of TorchTitan 0.3.0, in its order, up to the parallelised model. Three things differ:
the model is not compiled, nothing is allocated, and dispatchers that create GPU buffers as soon as they get their mesh
are replaced by the standard one, which does not (none of them has parameters).

Each rank is built in a fork of this process, because a process keeps one view of the world (meshes are cached by
identity), and the imports take longer than a build.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.tools.utils import set_default_dtype
from torchtitan.trainer import Trainer

from moelab.errors import MoelabError
from moelab.experiment import Experiment
from moelab.machine import cores
from moelab.mxfp8.converter import converted_modules
from moelab.mxfp8.experts import local
from moelab.titan import cpu
from moelab.titan.config_registry import assume_gpu, trainer_config

GPU_BUFFERS = (DeepEPTokenDispatcher.Config, HybridEPTokenDispatcher.Config, MinimalAsyncEPTokenDispatcher.Config)
NOT_BUILT = (
    "torch.compile is not applied: it would compile for this machine's processor",
    "no forward, backward or optimizer step is run, and nothing is allocated",
)


def main() -> int:
    """Answer one request from stdin with one JSON object on the last line of stdout."""
    request = json.load(sys.stdin)
    experiment, capability = Experiment(**request["experiment"]), tuple(request["capability"])
    rows = list(_in_forks(experiment, capability, request["ranks"]))
    # The same on every rank, so the last that was built speaks for all.
    shared = {key: value for row in rows for key, value in row.pop("shared", {}).items()}
    print(json.dumps({"gpu": f"SM{capability[0]}{capability[1]}", **shared, "ranks": rows}))  # noqa: T201
    return 0


def _in_forks(experiment: Experiment, capability: tuple[int, int], ranks: list[int]) -> Iterator[dict[str, Any]]:
    # Not a pool: if a worker is killed (for memory, say), a pool waits for its answer forever.
    context = multiprocessing.get_context("fork")
    width = max(1, cores())
    for start in range(0, len(ranks), width):
        running = []
        for rank in ranks[start : start + width]:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, experiment, capability, rank))
            process.start()
            theirs.close()  # else our read would not end with the child
            running.append((rank, ours, process))
        for rank, ours, process in running:
            try:
                yield ours.recv()
            except EOFError:
                yield {"rank": rank, "error": f"rank {rank} ended without an answer (exit code {process.exitcode})"}
            process.join()


def _answer(connection: Connection, experiment: Experiment, capability: tuple[int, int], rank: int) -> None:
    try:
        connection.send(build_rank(experiment, capability, rank))
    except MoelabError as error:
        connection.send({"rank": rank, "error": str(error)})
    except Exception as error:  # TorchTitan refuses with ValueError, AssertionError, RuntimeError and others
        connection.send({"rank": rank, "error": f"{type(error).__name__}: {error}"})


def build_rank(experiment: Experiment, capability: tuple[int, int], rank: int) -> dict[str, Any]:
    """Build one global rank of the experiment, configured for a GPU, in this process, which can do so once."""
    started = time.monotonic()
    with assume_gpu(capability):
        config = trainer_config(experiment)
    cpu.enable()  # from here on, meshes and tensors are on the real device
    dist_utils.init_fake_mode(experiment.world_size, rank=rank)
    dims = ParallelDims.from_config(config.parallelism, experiment.world_size)
    # TorchTitan's trainer refuses sequences that sequence and context parallelism would cut unevenly.
    pieces = dims.tp if config.parallelism.enable_sequence_parallel else 1
    pieces *= 2 * dims.cp if dims.cp_enabled else 1
    if config.training.seq_len % pieces:
        raise ValueError(
            f"seq_len {config.training.seq_len} does not divide by the {pieces} pieces of tp {dims.tp}, cp {dims.cp}"
        )
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    model, shared = _whole_model(config)
    parts, stages = _parts(config, model, dims)
    return {
        "rank": rank,
        "pp_rank": rank // (experiment.world_size // experiment.pp),
        "stages": stages,
        **count(parts, copies=experiment.world_size // experiment.pp),
        "mxfp8_modules": sum(len(converted_modules(part)) for part in parts),
        "seconds": round(time.monotonic() - started, 1),
        "shared": shared,
    }


def _whole_model(config: Trainer.Config) -> tuple[nn.Module, dict[str, Any]]:
    """The whole model before it is split and sharded, and the facts that are the same on every rank."""
    assert config.model_spec is not None
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    replaced = apply_overrides(config.override, config)
    config._validate_cuda_graphs()
    dispatcher, missing = _stand_in(model_config)  # after the overrides, which install moelab's dispatchers
    # On the meta device, 671B parameters are only shapes and take no memory.
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model: nn.Module = model_config.build()
    model.verify_module_protocol()
    return model, {
        "total_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "spmd_backend": config.parallelism.spmd_backend,
        "dispatcher": dispatcher,
        "overrides": sorted({line.split(":")[0].removeprefix("[Override] ") for line in replaced}),
        "not_built": [*NOT_BUILT, *missing],
    }


def _stand_in(model_config: Any) -> tuple[str, list[str]]:
    """The dispatcher in words, and what is not built; replaces dispatchers that need a GPU."""
    described, missing = "", []
    # A list, because the loop replaces what it walks over.
    for _name, config, parent, attribute in list(model_config.traverse(LocalTokenDispatcher.Config)):
        settings = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
        numbers = ", ".join(f"{name}={value}" for name, value in settings if isinstance(value, int | float))
        described = f"{type(config)._owner.__name__}({numbers})"
        if isinstance(config, GPU_BUFFERS):
            needs = "peers" if getattr(config, "kernels", "") == "emulated" else "GPUs"
            missing = [f"{type(config)._owner.__name__} is not built: its communication buffer needs {needs}"]
            standard = AllToAllTokenDispatcher.Config(num_experts=config.num_experts, top_k=config.top_k)
            setattr(parent, attribute, standard)  # it has no buffer, and moves no tokens here
    return described, missing


def _parts(
    config: Trainer.Config, model: nn.Module, dims: ParallelDims
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    """The parallelised parts of this rank, one for each pipeline stage that it holds, and the stages in words."""
    spec, uncompiled = config.model_spec, CompileConfig(enable=False)
    assert spec is not None
    with tempfile.TemporaryDirectory() as folder:  # an MXFP8 run records there what was converted
        arguments: dict[str, Any] = {
            "parallel_dims": dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": uncompiled,
            "ac_config": config.activation_checkpoint,
            "dump_folder": folder,
        }
        if not dims.pp_enabled:
            parts, numbers = [spec.parallelize_fn(model, **arguments)], [0]
        else:
            schedule, parts, _first, _last = spec.pipelining_fn(
                model,
                device=torch.device("cpu"),
                model_config=spec.model,
                parallelize_fn=spec.parallelize_fn,
                loss_fn=config.loss.build(compile_config=uncompiled),
                **arguments,
            )
            numbers = [stage.stage_index for stage in getattr(schedule, "_stages", None) or [schedule._stage]]
    stages = zip(numbers, parts, strict=True)
    return parts, [{"stage": number, "modules": list(_modules_of(part))} for number, part in stages]


def _modules_of(part: nn.Module) -> Iterator[str]:
    """Names of the modules of one stage, as TorchTitan names them when it splits a model."""
    for name, child in part.named_children():
        if name == "layers":
            yield from (f"layers.{number}" for number, _layer in child.named_children())
        elif any(True for _parameter in child.parameters()):
            yield name


def count(parts: list[nn.Module], *, copies: int) -> dict[str, float]:
    """Elements of this rank's shards of the parts of a model; ``copies`` ranks hold what is not distributed."""
    total = experts = 0
    unique = 0.0
    for name, parameter in (named for part in parts for named in part.named_parameters()):
        elements = local(parameter).numel()
        holders = copies
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            holders = math.prod(size for size, placement in sizes if isinstance(placement, Replicate))
        total += elements
        experts += elements if ".inner_experts." in name else 0
        unique += elements / holders
    return {"parameters": total, "expert_parameters": experts, "unique_parameters": unique}


if __name__ == "__main__":
    sys.exit(main())
