"""Measure every GPU, node and pair of nodes before a big job: ``… -m moelab.health.measure --output FILE``.

Start it as many times as there are ranks, by torchrun or by srun with one task for each GPU::

    srun --nodes=32 --ntasks-per-node=8 --gpus-per-node=8 python -m moelab.health.measure --output health.json \
        --cluster nebius_soperator_b200

Each rank first times GEMMs by itself; meanwhile the first rank of each node reads its GPUs' clocks and throttling. Then
come all-reduces: within each node, between each pair of nodes (in rounds that keep all nodes busy, :func:`rounds`), and
over all ranks. NCCL moves the bytes, or gloo where there are no GPUs, and the result says which.

The file is rewritten after every stage, so a failure keeps the stages before it. Exit code 1: something is wrong.

Bandwidth is nccl-tests' bus bandwidth, bytes / time * 2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md), with the time of
the slowest rank: it can be compared with a link's speed whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from moelab.errors import BadInput, MoelabError
from moelab.files import write_json
from moelab.finding import any_error
from moelab.health.node import check_node
from moelab.health.slow import judge
from moelab.launch.cluster import read_cluster
from moelab.launch.in_job import NodeOfJob
from moelab.machine import this_machine
from moelab.micro.clock import Marks

TIMEOUT_S = 180  # a link that hangs is to end here, not at the job's time limit
PAYLOAD_BYTES = {"nccl": 1 << 30, "gloo": 4 << 20}
GEMM_SIZE = {"cuda": 8192, "cpu": 512}
GEMM_BATCH = 10
LOAD_S = {"cuda": 2.0, "cpu": 0.0}
"""How long GPUs compute: enough for clocks and power to settle, and for nvidia-smi to answer."""
REPEATS, WARMUPS = 8, 2  # a group connects in its first all-reduce
FIRST_PORT, LAST_PORT = 20_000, 28_999  # below Linux's ephemeral ports, which any process may be given


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Which rank this process is, on which node it sits, and where the ranks meet."""

    rank: int
    ranks: int
    local_rank: int
    node: str
    meeting: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Seat:
        """Read torchrun's variables, or else those of a task of srun.

        Raises:
            BadInput: if neither started this process.
        """
        node = env.get("SLURMD_NODENAME") or socket.gethostname()
        try:
            if "RANK" in env:
                rank, ranks, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
                return cls(rank=rank, ranks=ranks, local_rank=local, node=node, meeting="env://")
            rank, ranks, local = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
            first, port = first_node(env["SLURM_STEP_NODELIST"]), NodeOfJob.of(env).port(FIRST_PORT, LAST_PORT)
        except KeyError as error:
            raise BadInput(f"{error} is not set: start this with torchrun, or srun with a task for each GPU") from None
        return cls(rank=rank, ranks=ranks, local_rank=local, node=node, meeting=f"tcp://{first}:{port}")


class Check:
    """One rank's part; the first one keeps and writes the result."""

    def __init__(self, seat: Seat, output: Path) -> None:
        self.seat, self.output = seat, output
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.device = torch.device("cpu")
        if self.backend == "nccl":  # % because srun may show each task only its own GPU
            self.device = torch.device("cuda", seat.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend,
            init_method=seat.meeting,
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # no device_id: with one, a pair's communicator is split from that of all nodes, which need not be healthy
        self.node_of: list[str] = self._gather(seat.node)
        self.nodes = list(dict.fromkeys(self.node_of))
        self.first_of_node = self.node_of.index(seat.node) == seat.rank
        self.result: dict[str, Any] = {
            "backend": self.backend,
            "device": torch.cuda.get_device_name(self.device) if self.backend == "nccl" else "CPU",
            "torch": torch.__version__,
            "ranks": seat.ranks,
            "nodes": self.nodes,
            "payload_bytes": PAYLOAD_BYTES[self.backend],
        }
        # Allocated once: nothing is measured but the all-reduce.
        self.payload = torch.zeros(PAYLOAD_BYTES[self.backend] // 4, dtype=torch.float32, device=self.device)

    def run(self) -> None:
        """All stages."""
        self._begin("timing GEMMs")  # first, because it needs no working network
        self.result |= self._gemms()
        self._begin("reducing within nodes")
        inside = self._by_node(self._measure((self.seat.node,)))
        self.result["inside_gb_s"] = {node: value for node, value in inside.items() if value}
        if len(self.nodes) > 1:
            self._begin("reducing pairs of nodes")
            self.result["pairs_gb_s"] = self._pairs()
        self._begin("reducing all ranks")
        self.result["all_gb_s"] = self._measure(self.nodes)
        self._write("finished")

    def close(self) -> None:
        """Leave together."""
        self._meet()
        dist.destroy_process_group()

    def _begin(self, stage: str) -> None:
        self._write(stage)
        if self.seat.rank == 0:
            print(f"health: {stage}", file=sys.stderr, flush=True)  # noqa: T201

    def _write(self, stage: str) -> None:
        self.result["stage"] = stage
        if self.seat.rank == 0:
            write_json(self.output, self.result)

    def _gemms(self) -> dict[str, Any]:
        """Median time of a GEMM on each rank, and the findings about its node meanwhile."""
        size, kind = GEMM_SIZE[self.device.type], self.device.type
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        with ThreadPoolExecutor(1) as aside:
            findings = aside.submit(lambda: [*check_node(this_machine())] if self.first_of_node else [])
            times_ms = _time_gemms(size, dtype, self.device, until=findings.done)
        mine = (median(times_ms), [one.to_json() for one in findings.result()])
        gathered: list[tuple[float, Any]] = self._gather(mine)
        names = [f"{node} rank {rank}" for rank, node in enumerate(self.node_of)]
        return {
            "gemm": f"{size} x {size} x {size} {dtype}".replace("torch.", ""),
            "gemm_ms": {name: time_ms for name, (time_ms, _) in zip(names, gathered, strict=True)},
            "node_findings": {node: found for node, (_, found) in zip(self.node_of, gathered, strict=True) if found},
        }

    def _pairs(self) -> list[tuple[str, str, float]]:
        rows = []
        for met in rounds(len(self.nodes)):
            pairs = [(self.nodes[first], self.nodes[second]) for first, second in met]
            # A node without a partner measures itself, because PyTorch names a group by how many groups a rank has made
            # before: all ranks must make the same number.
            mine = next((pair for pair in pairs if self.seat.node in pair), (self.seat.node,))
            gb_s = self._by_node(self._measure(mine))
            rows += [(first, second, gb_s[first]) for first, second in pairs]
        return rows

    def _by_node(self, mine: float) -> dict[str, float]:
        return dict(zip(self.node_of, self._gather(mine), strict=True))

    def _measure(self, nodes: Sequence[str]) -> float:
        """Bus bandwidth, GB/s, of an all-reduce over all ranks of some nodes, which all call this; of one rank, 0."""
        ranks = [rank for rank, node in enumerate(self.node_of) if node in nodes]
        # Synchronised among themselves: other pairs make their groups at the same time.
        group = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S), use_local_synchronization=True)
        times_s = []
        for repeat in range(WARMUPS + REPEATS):
            marks = Marks(self.device)
            self._meet(group)
            marks.mark("start")
            dist.all_reduce(self.payload, group=group)  # of zeros: the sum stays finite
            marks.mark("end")
            if repeat >= WARMUPS:
                times_s.append(marks.parts_us()["end"] / 1e6)
        slowest = torch.tensor([median(times_s)], dtype=torch.float64, device=self.device)
        # A group is as slow as its slowest rank; the median, because a repeat may be slow by chance.
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        dist.destroy_process_group(group)
        return bus_bandwidth_gb_s(PAYLOAD_BYTES[self.backend], slowest.item(), len(ranks))

    def _meet(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait for all ranks, and for the device to finish its work."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def _gather(self, mine: Any) -> list[Any]:
        values: list[Any] = [None] * self.seat.ranks
        # Plain data alone: the nodes' network may have strangers on it, and a pickle could run anything.
        dist.all_gather_object(values, mine, weights_only=True)
        return values


def _time_gemms(size: int, dtype: torch.dtype, device: torch.device, *, until: Callable[[], bool]) -> list[float]:
    """Milliseconds of each GEMM; GEMMs run until the load has lasted long enough and ``until`` holds."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    times_ms: list[float] = []
    end = time.monotonic() + LOAD_S[device.type]
    # Until the node has been examined, too: idle GPUs have low clocks, which would look like a fault.
    while not times_ms or time.monotonic() < end or not until():
        marks = Marks(device)
        marks.mark("start")
        for repeat in range(GEMM_BATCH):
            torch.mm(left, right)
            marks.mark(str(repeat))
        times_ms += [part / 1e3 for part in marks.parts_us().values()]
    return times_ms


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of the numbers below ``count``, in rounds in which no number occurs twice.

    The circle method of round-robin tournaments: n - 1 rounds, or n if n is odd, with one number idle in each.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    ring = [*range(count), *([-1] if count % 2 else [])]
    made = []
    for _ in range(len(ring) - 1):
        met = [sorted((ring[index], ring[-1 - index])) for index in range(len(ring) // 2)]
        made.append(sorted((first, second) for first, second in met if first >= 0))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return made


def first_node(node_list: str) -> str:
    """The first name in a node list of Slurm's; containers have no scontrol to expand it.

    >>> first_node("rack[0-1]n[08-10,12],login1")
    'rack0n08'
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", node_list).partition(",")[0]


def bus_bandwidth_gb_s(payload_bytes: int, time_s: float, ranks: int) -> float:
    """Bus bandwidth of an all-reduce (nccl-tests, doc/PERFORMANCE.md).

    >>> bus_bandwidth_gb_s(1_000_000_000, 0.5, 8)
    3.5
    """
    return payload_bytes / time_s * 2 * (ranks - 1) / ranks / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and on the first rank write and judge."""
    parser = argparse.ArgumentParser(prog="moelab.health.measure", description="Measure GPUs, nodes and links.")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cluster", help="profile with the all_reduce_floor_gb_s that healthy nodes reach")
    options = parser.parse_args(arguments)
    try:
        floor = read_cluster(options.cluster).all_reduce_floor_gb_s if options.cluster else None
        check = Check(Seat.of(os.environ), options.output)
    except MoelabError as error:
        print(f"health: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    check.run()
    findings = judge(check.result, floor) if check.seat.rank == 0 else ()
    check.close()
    for finding in findings:
        print("\n".join(finding.as_lines()))  # noqa: T201
    return 1 if any_error(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
