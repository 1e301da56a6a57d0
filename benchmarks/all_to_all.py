"""Dispatch and combine of a standard all-to-all and of DeepEP at the sizes of real models, on this machine.

    python -m moelab.launch.loopback --nproc-per-node 2 benchmarks/all_to_all.py --output FILE.json
    python -m moelab.launch.loopback --nproc-per-node 2 benchmarks/all_to_all.py --output dry.json --device cpu

It is notebook 04's experiment (``moelab.micro.exchange``) with a choice of sizes and arms, a sweep of the
multiprocessors that DeepEP gets, the bandwidth of plain copies beside it, and the parts of every operation, watched in
turns of their own:

``wire``
    NCCL's or gloo's all-to-all; of DeepEP all but the quantisation, because its kernels write the rows in order.
``counts``
    the exchange of counts and their read-back by the host, which the standard all-to-all needs before its sizes are
    known. Compiled code may gather the rows meanwhile, which then counts here and not as ``permute``.
``permute``
    gathers, scatters, scores, in PyTorch.
``quantise``
    BF16 to 8 bits with scales.

 DeepEP compiles some 70 kernels on the
way with ``nvcc``, a second or two each, and keeps them for the next call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moelab.deepep import ops
from moelab.files import write_json
from moelab.micro.clock import Marks
from moelab.micro.exchange import (
    DEEPEP,
    REPEATS,
    ROUTINGS,
    SIZES,
    SMALL,
    STANDARD,
    WARM_UP,
    Backend,
    ExchangeArm,
    Layer,
    Size,
    World,
    find_deepep,
    new_report,
    open_world,
    ready_layers,
    size_of,
    time_layers,
)
from moelab.mxfp8.kernels import Kernels

SM_COUNTS = (8, 16, 24, 32, 64, 96)
NODE_SIZE = size_of("671B", experts=64, tokens=8192)
"""Eight experts on each of eight GPUs; on request."""
COPY_BYTES, COPY_REPEATS = 512 << 20, 8
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default


def say(world: World, text: str) -> None:
    """Progress, from the first rank."""
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)


class Watch(TorchDispatchMode):
    """Marks a clock around every operator that communicates, in compiled code and in gradients, too."""

    def __init__(self, clock: Marks, arm: ExchangeArm) -> None:
        super().__init__()
        self.clock = clock
        self.around = "permute" if arm.backend == "standard" else "wire"
        self.part = self.around if arm.precision == "bf16" else "quantise"

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; end the part before it and its own if it communicates."""
        if func is not EXCHANGE and func.namespace != ops.NAMESPACE:
            return func(*args, **(kwargs or {}))
        self.clock.mark(self.part)
        result = func(*args, **(kwargs or {}))
        counts = func is EXCHANGE and not args[0].is_floating_point()
        if func is EXCHANGE:
            result = torch.ops._c10d_functional.wait_tensor(result)  # it has only been queued
        self.clock.mark("counts" if counts else "wire")
        self.part = "counts" if counts else self.around  # until the sizes are known on the host
        return result


def watch_parts(layers: Sequence[Layer], world: World, repeats: int) -> dict[tuple[str, str], dict[str, float]]:
    """The median of each part of every operation, µs, on the slowest rank of each turn."""
    mine: dict[tuple[str, str], list[dict[str, float]]] = {}
    clock = Marks(world.device)
    for turn in range(WARM_UP + repeats):
        for layer in layers:
            for operation, call in layer.turn():
                watch = Watch(clock, layer.arm)
                clock.start(world.meet)
                with watch:
                    call()
                clock.mark(watch.part)
                if turn >= WARM_UP:
                    mine.setdefault((layer.arm.name, operation), []).append(clock.parts_us())
    medians = {}
    for name, parts in mine.items():
        turns = zip(*world.everywhere(parts), strict=True)
        slowest = [max(turn, key=lambda one: sum(one.values())) for turn in turns]
        names = dict.fromkeys(part for one in slowest for part in one)
        medians[name] = {part: round(statistics.median(one[part] for one in slowest), 2) for part in names}
    return medians


Group = tuple[Size, str, Sequence[ExchangeArm]]
"""A size, a routing, and the arms that take turns there."""


def measure(groups: Iterable[Group], world: World, output: Path, report: dict[str, Any], **how: Any) -> None:
    """Add the rows of every group to a report, each with its ``parts_us``, and write it after each group."""
    repeats = how.pop("repeats", REPEATS)
    for size, routing, arms in groups:
        say(world, f"{size.name}, {routing}")
        layers = ready_layers(size, routing, arms, world, **how)
        rows, parts = time_layers(layers, world, repeats=repeats), watch_parts(layers, world, repeats)
        report["rows"] += [row | {"parts_us": parts[row["arm"], row["operation"]]} for row in rows]
        if world.rank == 0:
            write_json(output, report)


def measure_copies(world: World) -> dict[str, Any]:
    """Bandwidth of a plain copy from each rank to the next while all others do the same.

    Returns:
        ``between_ranks_gb_s``, GB/s of bytes that are copied (each is read once and written once), the median of the
        slowest rank; ``how`` in words; ``bytes`` and ``repeats``.
    """
    group, rank, ranks, on_gpus = world.group, world.rank, world.ranks, world.device.type == "cuda"
    nbytes = COPY_BYTES if on_gpus else COPY_BYTES >> 6
    source = torch.ones(nbytes, dtype=torch.uint8, device=world.device)
    # On a GPU the copy engines do it, which need no NCCL.
    target = torch.empty_like(source, device=torch.device("cuda", (rank + 1) % ranks) if on_gpus else world.device)

    def exchange_with_neighbours() -> None:
        send = dist.P2POp(dist.isend, source, group=group, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, target, group=group, group_peer=(rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    clock, times_us = Marks(world.device), []
    for _ in range(COPY_REPEATS + WARM_UP):
        clock.start(world.meet)
        if on_gpus:
            target.copy_(source, non_blocking=True)
        else:
            exchange_with_neighbours()
        clock.mark("copy")
        times_us.append(clock.parts_us()["copy"])
    slowest_us = max(world.everywhere(statistics.median(times_us[WARM_UP:])))
    how = "peer copies, all GPUs at once" if on_gpus else "sends to the next rank, all ranks at once"
    return {
        "between_ranks_gb_s": round(nbytes / slowest_us / 1e3, 3), "bytes": nbytes, "repeats": COPY_REPEATS, "how": how,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after each group of arms")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    names = [size.name for size in (*SIZES, SMALL, NODE_SIZE)]
    parser.add_argument("--sizes", nargs="*", choices=names, help="default: all on GPUs, small on a CPU")
    parser.add_argument("--routings", nargs="*", choices=ROUTINGS, default=list(ROUTINGS))
    of_backends = "default: what is installed; on a CPU, deepep is a stand-in"
    parser.add_argument("--backends", nargs="*", choices=get_args(Backend), help=of_backends)
    parser.add_argument("--sms", nargs="*", type=int, default=list(SM_COUNTS), help="SM counts to give DeepEP")
    parser.add_argument("--eager", action="store_true", help="do not compile (never done on a CPU)")
    parser.add_argument("--repeats", type=int, default=10, help="timed turns of each arm")
    options = parser.parse_args()
    on_gpus = options.device == "cuda"
    world = open_world(options.device)
    has_deepep, version = find_deepep(options.device)
    kernels: Kernels = "native"
    if not on_gpus and "deepep" in (options.backends or ()):
        has_deepep, kernels = True, "emulated"
        version = "moelab's stand-in on collectives: no measure of DeepEP"
    say(world, f"DeepEP: {version}")
    sizes = [size for size in (*SIZES, SMALL, NODE_SIZE) if size.name in (options.sizes or ())]
    sizes = sizes or (list(SIZES) if on_gpus else [SMALL])
    here = [STANDARD, *(DEEPEP if has_deepep else ())]
    arms = [arm for arm in here if options.backends is None or arm.backend in options.backends]
    groups: list[Group] = [(size, routing, arms) for size in sizes for routing in options.routings]
    if has_deepep and options.sms:
        swept = [ExchangeArm(backend="deepep", precision=one, sms=n) for n in options.sms for one in ("bf16", "fp8")]
        groups.append((sizes[0], options.routings[0], swept))
    compiled = on_gpus and not options.eager
    report = new_report(world, deepep=version, compiled=compiled)
    report["copies"] = measure_copies(world)  # first: the sweep's figure needs it, of a run that is stopped, too
    say(world, f"copies: {report['copies']}")
    measure(groups, world, options.output, report, kernels=kernels, compiled=compiled, repeats=options.repeats)
    world.leave()


if __name__ == "__main__":
    main()
