"""Clusters by name, and the machine at hand."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from moelab.errors import BadInput
from moelab.experiment import OwnHardware
from moelab.hardware.catalogue import CLUSTERS, cluster_from, known_gpu, mib
from moelab.hardware.spec import Cluster, Figure, Gpu, Node
from moelab.machine import GpuInfo, cores, gpus, memory_bytes

SHARES_MEMORY = ("NVIDIA GB10",)
"""GPUs whose memory is the system's; nvidia-smi says ``[N/A]``."""


def _cpu() -> Cluster:
    """This machine without its GPUs; every process shares one memory."""
    memory = Figure(value=memory_bytes() / 2**30, label="measured", source="physical memory of this machine")
    return Cluster(name="cpu", nodes=1, node=Node(gpu=Gpu(name="CPU", capability=0.0, memory_gib=memory), gpus=cores()))


def _local() -> Cluster:
    """This machine: its GPUs if it has any, else its processor."""
    found = gpus()
    if not found:
        return replace(_cpu(), name="local")
    return Cluster(name="local", nodes=1, node=Node(gpu=_weakest([gpu_from(one) for one in found]), gpus=len(found)))


def _weakest(found: Sequence[Gpu]) -> Gpu:
    """One kind that stands for all GPUs of a node; of several kinds only what holds for each, and no rates."""
    counts = Counter(gpu.name for gpu in found)
    if len(counts) == 1:
        return found[0]
    memory = [gpu.memory_gib for gpu in found if gpu.memory_gib]
    return Gpu(
        name=" and ".join(f"{count} × {name}" for name, count in counts.items()),
        capability=found[0].capability if len({gpu.capability for gpu in found}) == 1 else None,
        memory_gib=min(memory, key=float) if len(memory) == len(found) else None,
    )


def gpu_from(info: GpuInfo) -> Gpu:
    """A GPU as nvidia-smi lists it, with the figures of its exact model where they are known."""
    kind = known_gpu(info.name) or Gpu(name=info.name, capability=None, memory_gib=None)
    memory = _memory(info)
    return replace(kind, capability=info.capability or kind.capability, memory_gib=memory or kind.memory_gib)


def _memory(info: GpuInfo) -> Figure | None:
    if info.memory_mib and " MIG " in info.name:
        return mib(info.memory_mib, "derived", f"the profile of the MIG instance ({info.name})")
    if info.memory_mib:
        return mib(info.memory_mib, "measured", "nvidia-smi on this machine")
    if info.name in SHARES_MEMORY:
        return Figure(value=memory_bytes() / 2**30, label="measured", source="physical memory, which the GPU shares")
    return None


_HERE: dict[str, Callable[[], Cluster]] = {"local": _local, "cpu": _cpu}
PROFILES = (*CLUSTERS, *_HERE)


@functools.cache
def cluster_of(hardware: str | OwnHardware) -> Cluster:
    """The cluster that an experiment's ``hardware`` names or describes.

    Raises:
        BadInput: if there is no such profile, or no such GPU.
        GpusUnknown: for ``local`` where nvidia-smi fails.

    Example:
        >>> cluster_of("b200_x256").gpus
        256
    """
    if isinstance(hardware, OwnHardware):
        return cluster_from(hardware)
    if hardware in CLUSTERS:
        return CLUSTERS[hardware]
    if hardware not in _HERE:
        raise BadInput(
            f"hardware is {hardware!r}: there is no such profile; the profiles are {', '.join(PROFILES)}; a YAML file "
            "describes your own"
        )
    return _HERE[hardware]()


def gpu_of(hardware: str | OwnHardware) -> Gpu:
    """The GPU of an experiment's ``hardware``.

    Raises:
        BadInput: if there is no such profile, or no such GPU.
        GpusUnknown: for ``local`` where nvidia-smi fails.

    Example:
        >>> gpu_of("h100_node").capability
        9.0
    """
    return cluster_of(hardware).node.gpu
