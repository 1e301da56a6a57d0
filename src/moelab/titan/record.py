"""What a built model runs, written into its run directory: the modules that multiply in 8 bits, and the dispatcher."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.tools.logging import logger

from moelab.mxfp8.converter import NothingConverted, converted_modules
from moelab.runs.directory import CONVERTED_FOLDER, DISPATCHER_FILE
from moelab.runs.files import write_json


def record_conversion(model: nn.Module, dump_folder: Path, kernels: str, *, stages: int) -> None:
    """Write down which modules of the built model multiply in 8 bits, and with which kernels.

    The first rank of each pipeline stage writes one file; a stage may be built from several parts, and again by a
    job that goes on.

    Args:
        model: the whole model, or one part of it under pipeline parallelism.
        dump_folder: the run directory.
        kernels: ``native`` or ``emulated``.
        stages: pipeline-parallel degree.

    Raises:
        NothingConverted: if the whole model has no such module. A part may have none: its layers may be dense.
    """
    names = converted_modules(model)
    if not names and stages == 1:
        raise NothingConverted("the experts should be quantised, but no module of the built model multiplies in 8 bits")
    logger.info(f"moelab: {len(names)} modules multiply in 8 bits ({kernels} kernels): {', '.join(names)}")
    rank = torch.distributed.get_rank()
    if _first_of_stage(stages):
        path = dump_folder / CONVERTED_FOLDER / f"rank{rank}.json"
        before = json.loads(path.read_text())["modules"] if path.exists() else []
        write_json(path, {"kernels": kernels, "modules": list(dict.fromkeys([*before, *names]))})


def record_dispatcher(model: nn.Module, dump_folder: Path, *, stages: int) -> None:
    """Write down what moves the tokens of the built model, and whether it is DeepEP itself or its stand-in.

    Args:
        model: the whole model, or one part of it under pipeline parallelism; a part of dense layers has none.
        dump_folder: the run directory.
        stages: pipeline-parallel degree.
    """
    found = [module.token_dispatcher for module in model.modules() if isinstance(module, RoutedExperts)]
    if not found or not _first_of_stage(stages):
        return
    settings = ("kernels", "cast_kernels", "precision", "alignment", "pad_multiple", "num_max_tokens_per_rank")
    known = {name: getattr(found[0], name) for name in settings if getattr(found[0], name, None) is not None}
    write_json(dump_folder / DISPATCHER_FILE, {"dispatcher": type(found[0]).__name__, **known})


def _first_of_stage(stages: int) -> bool:
    """Whether this is the first rank of its pipeline rank."""
    return torch.distributed.get_rank() % (torch.distributed.get_world_size() // stages) == 0
