"""Times of the parts of one operation, and of plain copies to hold them against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from moelab.marks import Marks

COPY_BYTES = 512 << 20
COPY_REPEATS = 8
HEAD_START_CYCLES = 400_000
"""What the GPU idles before a measurement, so that the host has queued the operation when it starts: some 0.2 ms."""


class Clock(Marks):
    """Marks that begin when every rank is there."""

    def start(self, group: dist.ProcessGroup) -> None:
        """Begin when every rank is here."""
        self.marks = []
        if self.gpu:
            torch.cuda._sleep(HEAD_START_CYCLES)
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # the ranks' streams meet here
        else:
            dist.barrier(group=group)
        self.mark("start")


def measure_copies(device: torch.device, group: dist.ProcessGroup, *, nbytes: int = COPY_BYTES) -> dict[str, Any]:
    """Bandwidth of plain copies, GB/s of bytes that are copied (each is read once and written once).

    Args:
        device: of this rank.
        group: all ranks.
        nbytes: of one copy.

    Returns:
        ``local_gb_s`` inside one device; ``between_ranks_gb_s`` from each rank to the next while all others do the
        same, ``one_way_gb_s`` while only rank 0 sends, ``how`` in words, and ``all_to_all_gb_s`` of the library's
        collective with equal parts, counting what goes to other ranks. All are medians, of the slowest rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    here = torch.empty_like(source)
    copy, how = _between_ranks(source, device, group)
    parts = source[: nbytes // ranks * ranks], here[: nbytes // ranks * ranks]
    to_others = nbytes // ranks * (ranks - 1)
    one_way = copy if rank == 0 else lambda: None
    measured = {
        "local_gb_s": _gb_s(lambda: here.copy_(source), nbytes, device, group),
        "between_ranks_gb_s": _gb_s(copy, nbytes, device, group),
        "one_way_gb_s": _gb_s(one_way, nbytes, device, group) if "peer" in how else None,
        "all_to_all_gb_s": _gb_s(
            lambda: dist.all_to_all_single(parts[1], parts[0], group=group), to_others, device, group
        ),
    }
    return {**measured, "bytes": nbytes, "repeats": COPY_REPEATS, "how": how}


def _between_ranks(
    source: torch.Tensor, device: torch.device, group: dist.ProcessGroup
) -> tuple[Callable[[], Any], str]:
    """A copy to the next rank: by the copy engines where this process sees the other GPU, else by send and receive."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if device.type == "cuda" and torch.cuda.device_count() >= ranks:
        other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
        if torch.cuda.can_device_access_peer(device, other):
            there = torch.empty(source.shape, dtype=source.dtype, device=other)
            return lambda: there.copy_(source, non_blocking=True), "peer copies, all GPUs at once"
    received = torch.empty_like(source)

    def exchange() -> None:
        send = dist.P2POp(dist.isend, source, group=group, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return exchange, "send to the next rank, receive from the one before, all ranks at once"


def _gb_s(copy: Callable[[], Any], nbytes: int, device: torch.device, group: dist.ProcessGroup) -> float:
    clock, times_us = Clock(device), []
    for _ in range(COPY_REPEATS + 2):
        clock.start(group)
        copy()
        clock.mark("copy")
        times_us.append(clock.parts_us()["copy"])
    slowest: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(slowest, statistics.median(times_us[2:]), group=group)
    return round(nbytes / max(slowest) / 1e3, 3)
