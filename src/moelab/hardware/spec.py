"""What a GPU, a node and a cluster are, and which figures are impossible."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from moelab.errors import BadInput

Label = Literal["measured", "derived", "quoted"]
GROUP_PADDING = {"bf16": 8, "fp8": 16, "mxfp8_emulated": 32, "mxfp8_native": 128}
"""Rows to a multiple of which each expert's group is padded, by what multiplies it.

BF16 and FP8: 16 bytes; TorchTitan's own BF16 experts on the standard backend do without. MXFP8: one block, and what
torchao 0.18's CuTeDSL quantisation kernel needs on SM100.
"""
ROCM = {9.4: "gfx942", 9.5: "gfx950"}
"""AMD's GPUs by the capability that PyTorch gives them on ROCm; no CUDA device has one of these."""
GFX950 = 9.5


class ImpossibleHardware(BadInput):
    """A figure that no hardware can have: negative, not finite, or FP8 slower than BF16."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number with where it comes from; the unit is in the name of the field that holds it."""

    value: float
    label: Label
    source: str

    def __post_init__(self) -> None:
        if not isfinite(self.value) or self.value <= 0:
            raise ImpossibleHardware(f"a hardware figure is {self.value} ({self.source}); give a positive number")

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; None where a figure is not known, or where there is no such unit.

    Attributes:
        name: as people say it, such as ``H100``.
        capability: compute capability, such as 9.0, or what PyTorch gives a GPU of AMD (:data:`ROCM`); 0 where the
            "GPU" is a CPU, None where it is not known.
        memory_gib: device memory that CUDA shows, GiB; None where it is not known.
        bf16_tflops: dense BF16 tensor-core peak, TFLOP/s.
        fp8_tflops: dense FP8 tensor-core peak, TFLOP/s.
        mxfp8_tflops: dense MXFP8 tensor-core peak, TFLOP/s.
        hbm_tb_s: memory bandwidth, TB/s.
        nvlink_gb_s: NVLink bandwidth each way, GB/s; for a GPU of AMD that of its Infinity Fabric.
    """

    name: str
    capability: float | None
    memory_gib: Figure | None
    bf16_tflops: Figure | None = None
    fp8_tflops: Figure | None = None
    mxfp8_tflops: Figure | None = None
    hbm_tb_s: Figure | None = None
    nvlink_gb_s: Figure | None = None

    def __post_init__(self) -> None:
        if self.capability is not None and (not isfinite(self.capability) or self.capability < 0):
            raise ImpossibleHardware(f"{self.name}: capability is {self.capability}; 9.0 is SM90, 0 is a CPU")
        if self.fp8_tflops and self.bf16_tflops and self.fp8_tflops.value < self.bf16_tflops.value:
            raise ImpossibleHardware(f"{self.name}: FP8 is slower than BF16, so the two figures are mixed up")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One host of Slurm's: ``gpus`` of one kind, one network card each, and NVLink between them and perhaps beyond.

    Attributes:
        gpu: the kind of GPU.
        gpus: how many.
        nic_gb_s: network bandwidth of one GPU each way, GB/s; None where there is no network.
        nvlink_gpus: GPUs that NVLink joins, where these are more than the host's: 72 of 18 hosts in an NVL72 rack.
    """

    gpu: Gpu
    gpus: int
    nic_gb_s: Figure | None = None
    nvlink_gpus: int | None = None

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins."""
        return self.nvlink_gpus or self.gpus

    def nvlink_ranks(self, *, nodes: int, gpus_per_node: int, ep: int = 1) -> int:
        """Consecutive ranks of a job that NVLink joins: those of the nodes that the job takes of each domain.

        It takes equally many of each, as ``sbatch --segment`` places it, and of the counts that do not cut an
        expert-parallel group the largest: 64 hosts of four GPUs with groups of 64 are 16 in each of four NVL72 racks.

        Args:
            nodes: of the job.
            gpus_per_node: that it uses of each.
            ep: ranks of an expert-parallel group.

        Example:
            >>> tray = Node(gpu=Gpu(name="GB200", capability=10.0, memory_gib=None), gpus=4, nvlink_gpus=72)
            >>> tray.nvlink_ranks(nodes=64, gpus_per_node=4, ep=64), tray.nvlink_ranks(nodes=72, gpus_per_node=4)
            (64, 72)
        """
        most = max(1, self.domain // max(gpus_per_node, self.gpus))
        sizes = [taken * gpus_per_node for taken in range(1, min(nodes, most) + 1) if nodes % taken == 0]
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
    return capability == GFX950 or int(capability or 0) == 10


def has_deepep(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 9.0, is known to run DeepEP V2.

    Its README asks for Hopper or what else has SM90's PTX, and has results of SM90 and SM100.
    """
    return capability not in ROCM and int(capability or 0) in (9, 10)
