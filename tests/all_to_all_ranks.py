"""What the ranks of :mod:`dispatcher_ranks` are asked about the all-to-all experiment.

DeepEP is moelab's stand-in, and one that is broken.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from operator_counts import communication, counted_operators
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moelab.deepep.benchmark import ArmFailed, Layer, World, make_tokens, round_trip, run
from moelab.deepep.benchmark_cases import ROUTINGS, SMALL, ArmGroup, ExchangeArm, plan
from moelab.deepep.stand_in import StandInBuffer

SIZE = replace(SMALL, tokens=96)
LIBRARIES = {"deepep": "stand-in"}


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
    """The stand-in, how often it was opened, and the SM count of each dispatch."""

    opened = 0
    sms: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        Counted.opened += 1

    def dispatch(self, *args: Any, **options: Any) -> Any:
        if options.get("handle") is None:
            self.sms.append(options["num_sms"])
        return super().dispatch(*args, **options)


def use(stand_in: type[StandInBuffer]) -> None:
    """Open buffers of this class from now on."""
    vars(sys.modules["moelab.deepep.buffer"])["StandInBuffer"] = stand_in


def measure(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Put the experiment through its paces, with files in a folder; returns what this rank saw."""
    group, control = mesh.get_group(), dist.new_group(backend="gloo")
    world = World(device=torch.device("cpu"), group=group, control=control, rank=mesh.get_rank(), ranks=mesh.size())
    use(Counted)
    seen: dict[str, Any] = {"arms": {}}
    for routing in ROUTINGS:
        tokens = make_tokens(SIZE, routing, world)
        for arm in plan([SIZE], [routing], ["standard", "deepep"], [])[0].arms:
            layer = Layer(arm, SIZE, tokens, world, kernels="emulated", compiled=False)
            with counted_operators(communication) as counted:
                error = round_trip(layer, SIZE, world)
            seen["arms"][f"{routing} {arm.name}"] = {
                "error": error,
                "received": layer.received(),
                "operators": counted,
            }
    groups = plan([SIZE], ["random_balanced", "round_robin"], ["standard", "deepep"], [8])
    settings: Any = {"libraries": LIBRARIES, "kernels": "emulated", "repeats": 3, "began": time.monotonic()}
    run(groups, world, folder / "good.json", **settings, budget_s=600)
    before = Counted.opened
    run(groups, world, folder / "good.json", **settings, budget_s=600)  # nothing is missing
    seen["buffers_of_a_second_call"] = Counted.opened - before
    Counted.sms.clear()
    sweep = ArmGroup(
        size=SIZE, routing="skewed", arms=tuple(ExchangeArm(backend="deepep", sms=count) for count in (8, 24))
    )
    run([sweep], world, folder / "sweep.json", **settings, budget_s=600)
    seen["sms"] = Counted.sms
    run(groups, world, folder / "late.json", **settings, budget_s=0)
    other = folder / "other.json"
    other.write_text("not a result")
    try:
        run(groups, world, other, **settings, budget_s=0)
    except ArmFailed as failure:
        seen["refused"] = str(failure)
    use(Broken)
    arms = (ExchangeArm(backend="standard"), *(ExchangeArm(backend="deepep", sms=count) for count in (8, 16, 20, 24)))
    swept = ArmGroup(size=SIZE, routing="skewed", arms=arms)
    run([swept], world, folder / "broken.json", **settings, budget_s=600)
    use(StandInBuffer)
    compiler, seen["compiled"] = torch.compile, []

    def compiled(function: Any, *, fullgraph: bool) -> Any:
        seen["compiled"].append(function.__name__)
        return compiler(function, fullgraph=fullgraph, backend="aot_eager")  # inductor takes minutes on a CPU

    torch.compile = compiled
    run(groups[:1], world, folder / "compiled.json", **settings, compiled=True, budget_s=600)
    return seen
