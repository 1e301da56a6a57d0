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
from all_to_all import Group, measure
from dispatcher_ranks import communication, counted_operators
from torch.distributed.device_mesh import DeviceMesh

from moelab.deepep import ops
from moelab.deepep.buffer import close_exchanges
from moelab.deepep.stand_in import StandInBuffer
from moelab.micro.exchange import (
    DEEPEP,
    ROUTINGS,
    SMALL,
    STANDARD,
    ExchangeArm,
    Layer,
    RoundTripFailed,
    World,
    new_report,
    round_trip,
)

SIZE = replace(SMALL, tokens=96)
ARMS = (STANDARD, *DEEPEP)


class Broken(StandInBuffer):
    """DeepEP that returns the wrong sums with 16 SMs, and on one rank no gradient of the scores with 20."""

    def combine(self, x: Any, handle: Any, topk_weights: Any = None, **options: Any) -> Any:
        combined, weights, event = super().combine(x, handle, topk_weights, **options)
        if options["num_sms"] == 20 and weights is not None and self.rank == 1:
            weights = torch.full_like(weights, torch.nan)
        return combined * (2 if options["num_sms"] == 16 else 1), weights, event


class Counted(StandInBuffer):
    """The stand-in, and the SM count of each dispatch."""

    sms: ClassVar[list[int]] = []

    def dispatch(self, *args: Any, **options: Any) -> Any:
        if options.get("handle") is None:
            self.sms.append(options["num_sms"])
        return super().dispatch(*args, **options)


def deepep(sms: int) -> ExchangeArm:
    return ExchangeArm(backend="deepep", sms=sms)


def received(layer: Layer) -> list[int]:
    """Rows that arrived from each rank, by the library's own count."""
    if layer.arm.backend == "standard":
        return list(layer.state.output_splits)
    ends_P = layer.state.handle[ops.HANDLE_TENSORS.index("psum_num_recv_tokens_per_scaleup_rank")]
    counts: list[int] = torch.diff(ends_P, prepend=ends_P.new_zeros(1)).tolist()
    return counts


def experiment(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Put the experiment through its paces, with files in a folder; returns what this rank saw."""
    world = World(device=torch.device("cpu"), group=mesh.get_group())
    groups: list[Group] = [(SIZE, routing, ARMS) for routing in ("random_balanced", "round_robin")]

    def measured(name: str, of: list[Group], *, compiled: bool = False) -> None:
        report = new_report(world, deepep="stand-in", compiled=compiled)
        measure(of, world, folder / f"{name}.json", report, kernels="emulated", compiled=compiled, repeats=3)

    seen: dict[str, Any] = {"arms": {}, "compiled": [], "broken": []}
    buffer = sys.modules["moelab.deepep.buffer"]
    with mock.patch.object(buffer, "StandInBuffer", Counted):
        for routing in ROUTINGS:
            for arm in ARMS:
                layer = Layer(arm, SIZE, routing, world, kernels="emulated")
                with counted_operators(communication) as counted:
                    error = round_trip(layer, world)
                about = {"error": error, "received": received(layer), "operators": counted}
                seen["arms"][f"{routing} {arm.name}"] = about
        measured("good", groups)
        Counted.sms.clear()
        measured("sweep", [(SIZE, "skewed", (STANDARD, deepep(8), deepep(24)))])
        seen["sms"] = Counted.sms
    with mock.patch.object(buffer, "StandInBuffer", Broken):
        close_exchanges()  # the next one is broken
        for sms in (8, 16, 20):
            try:
                round_trip(Layer(deepep(sms), SIZE, "skewed", world, kernels="emulated"), world)
            except RoundTripFailed as error:
                seen["broken"].append(str(error))
    compiler = torch.compile

    def compiled(function: Any, *, fullgraph: bool) -> Any:
        seen["compiled"].append(function.__name__)
        return compiler(function, fullgraph=fullgraph, backend="aot_eager")  # inductor takes minutes on a CPU

    with mock.patch.object(torch, "compile", compiled):
        measured("compiled", groups[:1], compiled=True)
    return seen
