"""Processes that have loaded TorchTitan, for what is global to a process: device meshes, process groups, patches.

Loading takes as long as ten answers, so it happens once, in a server that does nothing else; every call is answered by
a fresh fork of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torchtitan.trainer", "torchtitan.models.deepseek_v3", "moelab.titan.verify_rank"])


def in_titan_process(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """What a function of an importable module returns, or raises, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(function, *arguments, **options).result()


def moelab(*arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command of moelab."""
    from moelab.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(list(arguments))
    return code, printed.getvalue()


def verified(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of ``moelab.titan.verify_rank`` to a request of ``moelab.titan.verify``."""
    from moelab.titan import verify_rank

    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
    sys.stdin = io.StringIO(json.dumps(request))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        verify_rank.main()
    answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return answer


def groups_of_torchtitan(rank: int, degrees: dict[str, int]) -> dict[str, list[int]]:
    """Ranks of each group of TorchTitan's meshes that a rank is a member of."""
    import torch.distributed as dist
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torch.testing._internal.distributed.fake_pg import FakeStore

    vars(parallel_dims)["device_type"] = "cpu"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees["world_size"])
    dims = parallel_dims.ParallelDims(**degrees, spmd_backend="partial_dtensor")
    dims.build_mesh()
    axes = ("tp", "cp", "ep", "efsdp", "fsdp", "dp_replicate", "pp")
    found: dict[str, Any] = {axis: dims.get_optional_mesh(axis) for axis in axes}
    return {axis: mesh.mesh.flatten().tolist() for axis, mesh in found.items() if mesh is not None}
