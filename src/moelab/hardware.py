"""GPUs, nodes and clusters, with a source for every figure, and the machine at hand.

``data/hardware.yaml`` has the figures and the clusters that an experiment's ``hardware`` can name; a file of one's own
has the same fields. A node is Slurm's; NVLink may go beyond it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Literal

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import OwnHardware
from moelab.machine import GpuInfo, cores, gpu_problem, gpus, memory_bytes

Label = Literal["measured", "derived", "quoted"]
GROUP_PADDING = {"bf16": 8, "fp8": 16, "nvfp4": 16, "mxfp8_emulated": 32, "mxfp8_native": 128}
"""Rows to a multiple of which each expert's group is padded, by what multiplies it.

BF16 and FP8: 16 bytes; TorchTitan's own BF16 experts on the standard backend do without. NVFP4 and MXFP8: one
block; native MXFP8: what torchao 0.18's CuTeDSL quantisation kernel needs on SM100.
"""
ROCM = {9.4: "gfx942", 9.5: "gfx950"}
"""AMD's GPUs by the capability that PyTorch gives them on ROCm; no CUDA device has one of these."""


@dataclass(frozen=True, kw_only=True)
class SourcedNumber:
    """A number with where it comes from; the unit is in the name of the field that holds it."""

    value: float
    label: Label
    source: str

    def __post_init__(self) -> None:
        if not isfinite(self.value) or self.value <= 0:
            raise BadInput(f"a hardware figure is {self.value} ({self.source}); give a positive number")

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; None where a figure is not known, or where there is no such unit."""

    name: str
    capability: float | None
    """Compute capability, such as 9.0, or what PyTorch gives a GPU of AMD (:data:`ROCM`); 0 where the "GPU" is a
    CPU, None where it is not known."""
    memory_gib: SourcedNumber | None  # memory of the device, as CUDA shows it
    bf16_tflops: SourcedNumber | None = None  # dense BF16 tensor-core peak, TFLOP/s
    fp8_tflops: SourcedNumber | None = None  # dense FP8 tensor-core peak, TFLOP/s
    mxfp8_tflops: SourcedNumber | None = None  # dense MXFP8 tensor-core peak, TFLOP/s
    hbm_tb_s: SourcedNumber | None = None
    nvlink_gb_s: SourcedNumber | None = None
    """NVLink bandwidth each way, GB/s; for a GPU of AMD that of its Infinity Fabric."""

    def __post_init__(self) -> None:
        if self.capability is not None and (not isfinite(self.capability) or self.capability < 0):
            raise BadInput(f"{self.name}: capability is {self.capability}; 9.0 is SM90, 0 is a CPU")
        if self.fp8_tflops and self.bf16_tflops and self.fp8_tflops.value < self.bf16_tflops.value:
            raise BadInput(f"{self.name}: FP8 is slower than BF16, so the two figures are mixed up")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host of Slurm's: ``gpus`` of one kind, one network card each, and NVLink between them and perhaps beyond."""

    gpu: Gpu
    gpus: int
    nic_gb_s: SourcedNumber | None = None  # network bandwidth of one GPU each way, GB/s; None where there is no network
    nvlink_gpus: int | None = None
    """GPUs that NVLink joins, where these are more than the host's: 72 of 18 hosts in an NVL72 rack."""

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins."""
        return self.nvlink_gpus or self.gpus

    def nvlink_ranks(self, *, nodes: int, gpus_per_node: int, ep: int = 1) -> int:
        """Consecutive ranks of a job that NVLink joins: those of the nodes that the job takes of each domain.

        It takes equally many of each, as ``sbatch --segment`` places it, and of the counts that do not cut an
        expert-parallel group the largest: 64 hosts of four GPUs with groups of 64 are 16 in each of four NVL72 racks.

        >>> tray = Node(gpu=Gpu(name="GB200", capability=10.0, memory_gib=None), gpus=4, nvlink_gpus=72)
        >>> tray.nvlink_ranks(nodes=64, gpus_per_node=4, ep=64), tray.nvlink_ranks(nodes=72, gpus_per_node=4)
        (64, 72)
        """
        # a host counts whole towards its domain, even if the job leaves some of its GPUs idle
        most = max(1, self.domain // max(gpus_per_node, self.gpus))
        sizes = [taken * gpus_per_node for taken in range(1, min(nodes, most) + 1) if nodes % taken == 0]
        # Whole groups in a domain; else whole domains in a group, which then crosses the network evenly.
        whole = [size for size in sizes if size % ep == 0] or [size for size in sizes if ep % size == 0]
        return max(whole or sizes)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``nodes`` equal hosts, under the name that an experiment's ``hardware`` gives them."""

    name: str
    node: Node
    nodes: int

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.node.gpus


def architecture(capability: float | None) -> str:
    """The capability in words.

    >>> architecture(10.3), architecture(9.5), architecture(None)
    ('SM103', 'gfx950', 'of unknown SM version')
    """
    if capability is None:
        return "of unknown SM version"
    return ROCM.get(capability, f"SM{capability * 10:.0f}")


def has_grouped_fp8(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 9.0, is known to multiply FP8 experts.

    ``torch._scaled_grouped_mm`` of torch 2.14 is for Hopper and Blackwell; SM89 has FP8 tensor cores, but not it
    (``aten/src/ATen/native/cuda/GroupedBlas.cpp``), and what it does on ROCm nobody here has seen.
    """
    return capability not in ROCM and int(capability or 0) in (9, 10)


def has_native_mxfp8(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 10.0, is known to run torchao's MXFP8 kernels.

    torchao 0.18.0 asks for major version 10 exactly: SM120 and SM121 have MXFP8 tensor cores, but other instructions
    (``_is_sm_10x`` in ``torchao/prototype/moe_training/kernels/mxfp8/quant.py``). The same file has kernels for AMD's
    gfx950, which has the tensor cores too; no run of them stands behind this.
    """
    return capability == 9.5 or int(capability or 0) == 10


def has_deepep(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 9.0, is known to run DeepEP V2.

    Its README asks for Hopper or what else has SM90's PTX, and has results of SM90 and SM100.
    """
    return capability not in ROCM and int(capability or 0) in (9, 10)


# --- the catalogue --------------------------------------------------------------------------------------------------


_CONTENT: dict[str, Any] = read_yaml("hardware.yaml")
_GPUS: dict[str, dict[str, Any]] = _CONTENT["gpus"]
FIGURES = tuple(field.name for field in fields(Gpu) if field.name not in ("name", "capability"))


def quoted(value: float, source: str) -> SourcedNumber:
    """A figure as its source gives it."""
    return SourcedNumber(value=value, label="quoted", source=source)


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    """A GPU by its row, which must have nothing else."""
    changes: dict[str, Any] = {"name": name}
    for key, value in row.items():
        if key == "memory_gb":
            sheet = f"{value:g} GB ({row['sheet']})"
            source = f"{sheet} times what is seen of H100's 80 and B200's 180, 99 to 99.5 % of as many GiB"
            changes["memory_gib"] = SourcedNumber(value=value * 0.99, label="derived", source=source)
        elif key in FIGURES:
            own = isinstance(value, dict)
            changes[key] = None if value is None else SourcedNumber(**value) if own else quoted(value, row["sheet"])
        elif key not in ("cuda", "like", "sheet"):
            changes[key] = value
    if "like" in row:  # what its own sheet does not say is as in the other; `null` takes a figure away
        return replace(_gpu(row["like"], _GPUS[row["like"]]), **changes)
    return Gpu(**{"memory_gib": None, **changes})


GPUS = {name: _gpu(name, row) for name, row in _GPUS.items()}
MODELS = {row["cuda"]: GPUS[name] for name, row in _GPUS.items()}
"""By the name that CUDA and nvidia-smi give, without ``NVIDIA``; no other name is one of these."""
H100, H200, H800, B200, GB200, GB300 = (GPUS[name] for name in ("H100", "H200", "H800", "B200", "GB200", "GB300"))


def cluster_from(own: OwnHardware) -> Cluster:
    """The cluster that a file describes, or a row of the catalogue's clusters; figures that it gives are quoted.

    Raises:
        BadInput: for a GPU that is neither in the catalogue nor described, or figures that cannot be.
    """
    if own.gpu not in GPUS and own.capability is None:
        raise BadInput(
            f"hardware {own.name}: gpu is {own.gpu!r}, which is not in the catalogue ({', '.join(GPUS)}); name one of "
            "these, or give the capability of your own, such as 9.0, and its figures"
        )
    gpu = GPUS.get(own.gpu) or Gpu(name=own.gpu, capability=None, memory_gib=None)
    figures: dict[str, Any] = {
        name: quoted(value, own.source) for name in FIGURES if (value := getattr(own, name)) is not None
    }
    capability = gpu.capability if own.capability is None else own.capability
    node = Node(
        gpu=replace(gpu, capability=capability, **figures),
        gpus=own.gpus,
        nic_gb_s=None if own.nic_gb_s is None else quoted(own.nic_gb_s, own.source),
        nvlink_gpus=own.nvlink_gpus,
    )
    return Cluster(name=own.name, nodes=own.nodes, node=node)


CLUSTERS = {name: cluster_from(OwnHardware(name=name, **row)) for name, row in _CONTENT["clusters"].items()}


def known_gpu(name: str) -> Gpu | None:
    """The GPU of a name that CUDA or nvidia-smi gives, such as ``NVIDIA H100 PCIe``; None where it is not known.

    >>> known_gpu("NVIDIA H100 NVL").bf16_tflops.value, known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (835, None)
    """
    return MODELS.get(name.removeprefix("NVIDIA "))


# --- an experiment's hardware ----------------------------------------------------------------------------------------


SHARES_MEMORY = ("NVIDIA GB10",)
"""GPUs whose memory is the system's; nvidia-smi says ``[N/A]``."""


def _cpu() -> Cluster:
    """This machine without its GPUs; every process shares one memory."""
    memory = SourcedNumber(value=memory_bytes() / 2**30, label="measured", source="memory that a process may use here")
    return Cluster(name="cpu", nodes=1, node=Node(gpu=Gpu(name="CPU", capability=0.0, memory_gib=memory), gpus=cores()))


def _local() -> Cluster:
    """This machine: its GPUs if it has any, else its processor."""
    gpus_here = gpus()
    if not gpus_here:
        return replace(_cpu(), name="local")
    return Cluster(
        name="local", nodes=1, node=Node(gpu=_weakest([gpu_from(one) for one in gpus_here]), gpus=len(gpus_here))
    )


def _weakest(kinds: Sequence[Gpu]) -> Gpu:
    """One kind that stands for all GPUs of a node; of several kinds only what holds for each, and no rates."""
    counts = Counter(gpu.name for gpu in kinds)
    if len(counts) == 1:
        return kinds[0]
    memory = [gpu.memory_gib for gpu in kinds if gpu.memory_gib]
    return Gpu(
        name=" and ".join(f"{count} × {name}" for name, count in counts.items()),
        capability=kinds[0].capability if len({gpu.capability for gpu in kinds}) == 1 else None,
        memory_gib=min(memory, key=float) if len(memory) == len(kinds) else None,
    )


def gpu_from(info: GpuInfo) -> Gpu:
    """A GPU as nvidia-smi lists it, with the figures of its exact model where they are known."""
    kind = known_gpu(info.name) or Gpu(name=info.name, capability=None, memory_gib=None)
    memory = kind.memory_gib
    if info.memory_mib:
        is_mig = " MIG " in info.name
        memory = SourcedNumber(
            value=info.memory_mib / 1024,
            label="derived" if is_mig else "measured",
            source=f"the profile of the MIG instance ({info.name})" if is_mig else "nvidia-smi on this machine",
        )
    elif info.name in SHARES_MEMORY:
        source = "this machine's memory, which the GPU shares"
        memory = SourcedNumber(value=memory_bytes() / 2**30, label="measured", source=source)
    # nvidia-smi of some virtual GPUs does not say the capability; the catalogue does, if it has the name
    return replace(kind, capability=info.capability or kind.capability, memory_gib=memory)


_HERE: dict[str, Callable[[], Cluster]] = {"local": _local, "cpu": _cpu}
PROFILES = (*CLUSTERS, *_HERE)


@functools.cache  # nvidia-smi takes a while, and a machine does not change its GPUs meanwhile
def cluster_of(hardware: str | OwnHardware) -> Cluster:
    """The cluster that an experiment's ``hardware`` names or describes.

    Raises:
        BadInput: if there is no such profile, or no such GPU.
        GpusUnknown: for ``local`` where nvidia-smi fails.
    """
    if isinstance(hardware, OwnHardware):
        return cluster_from(hardware)
    if hardware in CLUSTERS:
        return CLUSTERS[hardware]
    if hardware not in _HERE:
        raise BadInput(
            f"hardware is {hardware!r}: there is no such profile; the profiles are {', '.join(PROFILES)}; or give "
            "a YAML file of your own"
        )
    return _HERE[hardware]()


def has_gpus_of(hardware: str | OwnHardware, gpus_here: Sequence[GpuInfo]) -> bool:
    """Whether GPUs, as nvidia-smi lists them, are all of the kind that an experiment's hardware has."""
    # A GPU that the catalogue does not have is called as CUDA calls it.
    kinds = {gpu_from(one).name.removeprefix("NVIDIA ") for one in gpus_here}
    return kinds == {gpu_of(hardware).name.removeprefix("NVIDIA ")}


def is_here(hardware: str | OwnHardware) -> bool:
    """Whether this machine trains for the hardware: it is named as such, or has GPUs of that kind.

    Raises:
        BadInput: as :func:`cluster_of`.
    """
    return hardware in _HERE or has_gpus_of(hardware, () if gpu_problem() else gpus())


def gpu_of(hardware: str | OwnHardware) -> Gpu:
    """The GPU of an experiment's ``hardware``; raises as :func:`cluster_of`."""
    return cluster_of(hardware).node.gpu
