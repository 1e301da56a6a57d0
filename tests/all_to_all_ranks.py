"""What the ranks of :mod:`dispatcher_ranks` are asked about the all-to-all experiment.

DeepEP is moelab's stand-in, and one that is broken.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from all_to_all import watch_parts
from dispatcher_ranks import communication, counted_operators
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moelab.deepep.stand_in import StandInBuffer
from moelab.micro.exchange import (
    ROUTINGS,
    SMALL,
    ArmGroup,
    ExchangeArm,
    Layer,
    World,
    make_tokens,
    plan,
    round_trip,
    run,
)

SIZE = replace(SMALL, tokens=96)


class Broken(StandInBuffer):
    """DeepEP that returns the wrong sums with 16 SMs, loses the scores' gradient with 20, fails on one rank with 24."""

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **options: Any) -> Any:
        combined, weights, event = super().combine(x, handle, topk_weights, **options)
        if options["num_sms"] == 24 and self.rank == 1:
            raise RuntimeError("an illegal memory access was encountered")
        if options["num_sms"] == 20 and weights is not None:
            weights = torch.zeros_like(weights)
        return combined * (2 if options["num_sms"] == 16 else 1), weights, event


class Counted(StandInBuffer):
    """The stand-in, and the SM count of each dispatch."""

    sms: ClassVar[list[int]] = []

    def dispatch(self, *args: Any, **options: Any) -> Any:
        if options.get("handle") is None:
            self.sms.append(options["num_sms"])
        return super().dispatch(*args, **options)


def measure(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Put the experiment through its paces, with files in a folder; returns what this rank saw."""
    group, control = mesh.get_group(), dist.new_group(backend="gloo")
    world = World(device=torch.device("cpu"), group=group, control=control, rank=mesh.get_rank(), ranks=mesh.size())
    settings: Any = {"libraries": {"deepep": "stand-in"}, "kernels": "emulated", "repeats": 3, "also": watch_parts}
    groups = plan([SIZE], ["random_balanced", "round_robin"], ["standard", "deepep"])

    def measured(name: str, of: list[ArmGroup] = groups, **options: Any) -> None:
        run(of, world, folder / f"{name}.json", **settings, **options)

    def arms(*sms: int) -> list[ArmGroup]:
        deepep = [ExchangeArm(backend="deepep", sms=count) for count in sms]
        return [ArmGroup(size=SIZE, routing="skewed", arms=(ExchangeArm(backend="standard"), *deepep))]

    seen: dict[str, Any] = {"arms": {}, "compiled": []}
    buffer = sys.modules["moelab.deepep.buffer"]
    with mock.patch.object(buffer, "StandInBuffer", Counted):
        for routing in ROUTINGS:
            tokens = make_tokens(SIZE, routing, world)
            for arm in plan([SIZE], [routing], ["standard", "deepep"])[0].arms:
                layer = Layer(arm, SIZE, tokens, world, kernels="emulated", compiled=False)
                with counted_operators(communication) as counted:
                    error = round_trip(layer, SIZE, world)
                about = {"error": error, "received": layer.received(), "operators": counted}
                seen["arms"][f"{routing} {arm.name}"] = about
        measured("good")
        Counted.sms.clear()
        measured("sweep", arms(8, 24))
        seen["sms"] = Counted.sms
    with mock.patch.object(buffer, "StandInBuffer", Broken):
        measured("broken", arms(8, 16, 20, 24))
    compiler = torch.compile

    def compiled(function: Any, *, fullgraph: bool) -> Any:
        seen["compiled"].append(function.__name__)
        return compiler(function, fullgraph=fullgraph, backend="aot_eager")  # inductor takes minutes on a CPU

    with mock.patch.object(torch, "compile", compiled):
        measured("compiled", groups[:1], compiled=True)
    return seen
