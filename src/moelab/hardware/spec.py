"""What a GPU, a node and a cluster are, and which figures are impossible."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from moelab.errors import BadInput

Label = Literal["measured", "derived", "quoted"]


class ImpossibleHardware(BadInput):
    """A figure that no hardware can have: negative, not finite, or a count that is not a positive whole number."""


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
        capability: CUDA compute capability, such as 9.0; 0 where the "GPU" is a CPU, None where it is not known.
        memory_gib: device memory that CUDA shows, GiB; None where it is not known.
        bf16_tflops: dense BF16 tensor-core peak, TFLOP/s.
        fp8_tflops: dense FP8 tensor-core peak, TFLOP/s.
        mxfp8_tflops: dense MXFP8 tensor-core peak, TFLOP/s.
        hbm_tb_s: memory bandwidth, TB/s.
        nvlink_gb_s: NVLink bandwidth each way, GB/s.
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
    """One host: ``gpus`` of one kind with NVLink between them, and one network card each.

    Attributes:
        gpu: the kind of GPU.
        gpus: how many.
        nic_gb_s: network bandwidth of one GPU each way, GB/s; None where there is no network.
    """

    gpu: Gpu
    gpus: int
    nic_gb_s: Figure | None = None

    def __post_init__(self) -> None:
        _require_count("gpus of a node", self.gpus)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """``nodes`` equal hosts, under the name that an experiment's ``hardware`` gives them."""

    name: str
    node: Node
    nodes: int

    def __post_init__(self) -> None:
        _require_count(f"nodes of {self.name}", self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.node.gpus


def _require_count(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ImpossibleHardware(f"{what} is {value!r}; give a whole number of at least 1")


def has_grouped_fp8(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 9.0, is known to multiply FP8 experts.

    ``torch._scaled_grouped_mm`` of torch 2.14 is for Hopper and Blackwell; SM89 has FP8 tensor cores, but not it
    (``aten/src/ATen/native/cuda/GroupedBlas.cpp``).
    """
    return int(capability or 0) in (9, 10)


def has_native_mxfp8(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 10.0, is known to run torchao's MXFP8 kernels.

    torchao 0.18.0 asks for major version 10 exactly: SM120 and SM121 have MXFP8 tensor cores, but other instructions
    (``_is_sm_10x`` in ``torchao/prototype/moe_training/kernels/mxfp8/quant.py``).
    """
    return int(capability or 0) == 10


def has_deepep(capability: float | None) -> bool:
    """Whether a GPU of this SM version, such as 9.0, is known to run DeepEP V2.

    Its README asks for Hopper or what else has SM90's PTX, and has results of SM90 and SM100.
    """
    return int(capability or 0) in (9, 10)
