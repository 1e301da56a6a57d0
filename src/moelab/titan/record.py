"""Records, in the run directory, of what a built model runs: 8-bit modules, the dispatcher, the load of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.tools.logging import logger

from moelab.files import write_json
from moelab.mxfp8.converter import NothingConverted, converted_modules
from moelab.mxfp8.experts import local
from moelab.runs.directory import CONVERTED_FOLDER, DISPATCHER_FILE
from moelab.runs.expert_load import ExpertLoadFile


def record_conversion(model: nn.Module, dump_folder: Path, kernels: str, *, stages: int) -> None:
    """Record which modules of the built model multiply in 8 bits, and with which kernels.

    The first rank of each pipeline stage writes one file; a stage may consist of several parts, and a resumed job
    builds it again.

    Raises:
        NothingConverted: if a whole model has no such module. A part of one (of more than one of the pipeline's
            ``stages``) may have none: its layers may be dense.
    """
    names = converted_modules(model)
    if not names and stages == 1:
        raise NothingConverted("the experts should be quantised, but no module of the built model multiplies in 8 bits")
    logger.info(f"moelab: {len(names)} modules multiply in 8 bits ({kernels} kernels): {', '.join(names)}")
    rank = torch.distributed.get_rank()
    if _first_of_stage(stages):
        path = dump_folder / CONVERTED_FOLDER / f"rank{rank}.json"
        # A rank may hold several parts of the pipeline, each of which is recorded as it is built.
        before = json.loads(path.read_text())["modules"] if path.exists() else []
        write_json(path, {"kernels": kernels, "modules": list(dict.fromkeys([*before, *names]))})


def record_dispatcher(model: nn.Module, dump_folder: Path, *, stages: int) -> None:
    """Record what moves the tokens of the built model, and whether it is DeepEP itself or its stand-in.

    Under pipeline parallelism (more than one of ``stages``) a part of dense layers has none.
    """
    layers = (module for module in model.modules() if isinstance(module, RoutedExperts))
    if (layer := next(layers, None)) and _first_of_stage(stages):
        settings = ("kernels", "cast_kernels", "precision", "alignment", "pad_multiple", "num_max_tokens_per_rank")
        values = {name: getattr(layer.token_dispatcher, name, None) for name in settings}
        known = {name: value for name, value in values.items() if value is not None}
        write_json(dump_folder / DISPATCHER_FILE, {"dispatcher": type(layer.token_dispatcher).__name__, **known})


LOAD_SAMPLES = 50
"""Steps, besides the first, at which a run records the load of its experts."""


def record_expert_load(trainer: Any) -> None:
    """Record the tokens of each expert of each MoE layer, at the first step and at evenly spaced ones.

    TorchTitan 0.3.0 counts them on each rank; before each optimizer step it sums and clears the counts, to balance the
    load. Just before that, all ranks sum them over the same process groups, and rank 0 writes.
    """
    blocks = {
        int(name): block
        for part in trainer.model_parts
        for name, block in part.layers.items()
        if getattr(block, "moe_enabled", False)
    }
    dims, device = trainer.parallel_dims, trainer.device
    own = [block.moe.tokens_per_expert_E.shape[0] for block in blocks.values()]
    size = torch.tensor([max(blocks, default=-1) + 1, max(own, default=0)], device=device)
    if dims.pp_enabled:  # a stage knows neither the last layer's number nor, if it is dense, how many experts there are
        dist.all_reduce(size, dist.ReduceOp.MAX, group=dims.get_mesh("pp").get_group())
    layers, experts = size.tolist()
    if not layers:
        return
    # With expert parallelism, tensor-parallel ranks have different tokens; without, the same ones.
    summed_over = [name for name in ("tp", "loss", "pp") if name != "tp" or (dims.ep_enabled and dims.tp > 1)]
    groups = [mesh.get_group() for name in summed_over if (mesh := dims.get_optional_mesh(name)) is not None]
    every = max(1, trainer.config.training.steps // LOAD_SAMPLES)
    file = ExpertLoadFile(Path(trainer.config.dump_folder)) if dist.get_rank() == 0 else None

    def record(*_: object) -> None:
        if trainer.step != 1 and trainer.step % every:
            return
        tokens_LE = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        for layer, block in blocks.items():
            counted_E = local(block.moe.tokens_per_expert_E)
            # A layer that the backward pass recomputed has counted its tokens twice.
            is_recomputed = getattr(block, "checkpoint_impl", None) is CheckpointImpl.NO_REENTRANT
            tokens_LE[layer] = counted_E // (2 if is_recomputed else 1)
        for group in groups:
            dist.all_reduce(tokens_LE, group=group)
        if file is not None:
            try:
                file.add(trainer.step, tokens_LE.numpy(force=True))
            except OSError as error:  # a full disk must not end the training
                logger.warning(f"moelab: {file.path.name} cannot be written: {error.strerror}")

    # Before TorchTitan's own hook, which updates the biases by the counts and clears them.
    hook = trainer.optimizers.register_step_pre_hook(record)
    trainer.optimizers._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)


def _first_of_stage(stages: int) -> bool:
    """Whether this is the first rank of its pipeline rank."""
    return torch.distributed.get_rank() % (torch.distributed.get_world_size() // stages) == 0
