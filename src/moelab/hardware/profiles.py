"""Clusters by name, and the machine at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from moelab.errors import BadInput
from moelab.hardware.catalogue import B200, GB200, GPUS, H100, H200, NIC_400G
from moelab.hardware.spec import Cluster, Figure, Gpu, Node
from moelab.machine import GpuInfo, cores, gpus, memory_bytes

_PUBLISHED = {
    "b200_x256": Cluster(name="b200_x256", nodes=32, node=Node(gpu=B200, gpus=8, nic_gb_s=NIC_400G)),
    "b200_node": Cluster(name="b200_node", nodes=1, node=Node(gpu=B200, gpus=8)),
    "gb200_nvl72_x4": Cluster(name="gb200_nvl72_x4", nodes=4, node=Node(gpu=GB200, gpus=72, nic_gb_s=NIC_400G)),
    "h100_x1024": Cluster(name="h100_x1024", nodes=128, node=Node(gpu=H100, gpus=8, nic_gb_s=NIC_400G)),
    "h200_x256": Cluster(name="h200_x256", nodes=32, node=Node(gpu=H200, gpus=8, nic_gb_s=NIC_400G)),
    "h100_node": Cluster(name="h100_node", nodes=1, node=Node(gpu=H100, gpus=8)),
    "h200_node": Cluster(name="h200_node", nodes=1, node=Node(gpu=H200, gpus=8)),
}


def _cpu() -> Cluster:
    """This machine without its GPUs; every process shares one memory."""
    memory = Figure(value=memory_bytes() / 2**30, label="measured", source="physical memory of this machine")
    return Cluster(name="cpu", nodes=1, node=Node(gpu=Gpu(name="CPU", capability=0.0, memory_gib=memory), gpus=cores()))


def _local() -> Cluster:
    """This machine: its GPUs if it has any, else its processor."""
    found = gpus()
    if not found:
        return replace(_cpu(), name="local")
    return Cluster(name="local", nodes=1, node=Node(gpu=gpu_from(found[0]), gpus=len(found)))


def gpu_from(info: GpuInfo) -> Gpu:
    """A GPU as nvidia-smi lists it, with the figures of its kind where they are known."""
    kind = next((gpu for name, gpu in GPUS.items() if name in info.name.replace(" ", "")), None)
    shown = info.memory_mib / 1024 if info.memory_mib else memory_bytes() / 2**30
    memory = Figure(value=shown, label="measured", source="nvidia-smi on this machine")
    if kind is None:
        return Gpu(name=info.name, capability=info.capability, memory_gib=memory)
    return replace(kind, capability=info.capability, memory_gib=memory)


_HERE: dict[str, Callable[[], Cluster]] = {"local": _local, "cpu": _cpu}
PROFILES = (*_PUBLISHED, *_HERE)


@functools.cache
def cluster_of(hardware: str) -> Cluster:
    """The cluster that an experiment's ``hardware`` names.

    Raises:
        BadInput: if there is no such profile.

    Example:
        >>> cluster_of("b200_x256").gpus
        256
    """
    if hardware in _PUBLISHED:
        return _PUBLISHED[hardware]
    if hardware not in _HERE:
        raise BadInput(f"hardware is {hardware!r}: there is no such profile; the profiles are {', '.join(PROFILES)}")
    return _HERE[hardware]()


def gpu_of(hardware: str) -> Gpu:
    """The GPU of an experiment's ``hardware``.

    Raises:
        BadInput: if there is no such profile.

    Example:
        >>> gpu_of("h100_node").capability
        9.0
    """
    return cluster_of(hardware).node.gpu
