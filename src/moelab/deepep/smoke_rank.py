"""One rank of the smoke test: ``smoke.py`` starts it, reads its step and its result, and explains its end."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moelab.deepep.benchmark import World

Step = Callable[[str], object]
GIN_TYPES = {0: "none", 2: "proxy", 3: "GDAKI", 4: "GPI"}
NCCL_MAGIC = 0xCAFEBEEF


class _Properties(ctypes.Structure):
    """``ncclCommProperties`` of ``nccl_device/core.h`` in NCCL 2.30."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
        ("cuda_device", ctypes.c_int),
        ("nvml_device", ctypes.c_int),
        ("device_api", ctypes.c_bool),
        ("multimem", ctypes.c_bool),
        ("gin_type", ctypes.c_int),
        ("nvlink_teams", ctypes.c_int),
        ("host_rma", ctypes.c_bool),
        ("railed_gin_type", ctypes.c_int),
    )


def main() -> None:
    """Send a few tokens round and write what came of it."""
    rank, ranks, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

    def step(doing: str) -> None:
        (folder / f"step{rank}").write_text(doing)

    step("loading torch")
    from moelab.deepep.benchmark import TOLERANCE, ArmFailed, Layer, installed, make_tokens, open_world, round_trip
    from moelab.deepep.benchmark_cases import SMALL, Arm

    step("joining the process group")
    world = open_world(device, init_method=f"file://{folder}/store", rank=rank, ranks=ranks)
    step("importing DeepEP")
    backends, libraries = installed(device)
    if device == "cuda" and "deepep" not in backends:
        raise ArmFailed(libraries["deepep"])
    step("opening the buffer")
    arm = Arm(backend="deepep" if device == "cuda" else "standard")
    tokens = make_tokens(SMALL, "round_robin", world)
    layer = Layer(arm, SMALL, tokens, world, kernels="native", compiled=False)
    step("dispatching and combining")
    error = round_trip(layer, SMALL, world)
    if not error < TOLERANCE["bf16"]:
        raise ArmFailed(f"tokens came back wrong: relative error {error:.3g}")
    result = {"relative_error": error, "version": libraries["deepep"], "gin": _gin(world)}
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    step("closing the buffer")
    world.leave()


def _gin(world: World) -> str:
    """The type of GPU-initiated networking that NCCL found between these ranks; words where it cannot be asked."""
    import torch

    if world.device.type != "cuda":
        return "not asked: there is no NCCL"
    version = torch.cuda.nccl.version()
    if version[:2] != (2, 30):
        return f"not asked: this knows NCCL 2.30, and {version} is loaded"
    backend = world.group._get_backend(world.device)
    properties = _Properties(
        size=ctypes.sizeof(_Properties), magic=NCCL_MAGIC, version=version[0] * 10000 + version[1] * 100 + version[2]
    )
    query = ctypes.CDLL("libnccl.so.2").ncclCommQueryProperties  # loaded already, by torch
    if query(ctypes.c_void_p(backend._comm_ptr()), ctypes.byref(properties)) != 0:
        return "not known: NCCL did not answer"
    between, rails = (GIN_TYPES.get(one, str(one)) for one in (properties.gin_type, properties.railed_gin_type))
    return f"{between} between all ranks, {rails} along rails"


if __name__ == "__main__":
    main()
