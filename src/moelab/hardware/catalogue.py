"""The GPUs and clusters of ``data/hardware.yaml``, which has every figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import OwnHardware
from moelab.hardware.spec import Cluster, Figure, Gpu, Label, Node

_CONTENT: dict[str, Any] = read_yaml("hardware.yaml")
_GPUS: dict[str, dict[str, Any]] = _CONTENT["gpus"]
FIGURES = tuple(field.name for field in fields(Gpu) if field.name not in ("name", "capability"))


def quoted(value: float, source: str) -> Figure:
    """A figure as its source gives it."""
    return Figure(value=value, label="quoted", source=source)


def mib(value: float, label: Label, source: str) -> Figure:
    """Memory in GiB from a number of MiB."""
    return Figure(value=value / 1024, label=label, source=source)


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    """A GPU by its row, which must have nothing else."""
    changes: dict[str, Any] = {"name": name}
    for key, value in row.items():
        if key == "memory_gb":
            sheet = f"{value:g} GB ({row['sheet']})"
            source = f"{sheet} times what is seen of H100's 80 and B200's 180, 99 to 99.5 % of as many GiB"
            changes["memory_gib"] = Figure(value=value * 0.99, label="derived", source=source)
        elif key in FIGURES:
            own = isinstance(value, dict)
            changes[key] = None if value is None else Figure(**value) if own else quoted(value, row["sheet"])
        elif key not in ("cuda", "like", "sheet"):
            changes[key] = value
    if "like" in row:
        return replace(_gpu(row["like"], _GPUS[row["like"]]), **changes)
    return Gpu(**{"memory_gib": None, **changes})


GPUS = {name: _gpu(name, row) for name, row in _GPUS.items()}
MODELS = {row["cuda"]: GPUS[name] for name, row in _GPUS.items()}
"""By the name that CUDA and nvidia-smi give, without ``NVIDIA``; no other name is one of these."""
H100, H200, H800, B200, GB200, GB300 = (GPUS[name] for name in ("H100", "H200", "H800", "B200", "GB200", "GB300"))


def cluster_from(own: OwnHardware) -> Cluster:
    """The cluster that a file describes, or a row of the catalogue's clusters; figures that it gives are quoted.

    Raises:
        BadInput: for a GPU that is neither in the catalogue nor described.
        ImpossibleHardware: for figures that cannot be.
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
NIC_400G = CLUSTERS["b200_x256"].node.nic_gb_s


def known_gpu(name: str) -> Gpu | None:
    """The GPU of a name that CUDA or nvidia-smi gives, such as ``NVIDIA H100 PCIe``; None where it is not known.

    Example:
        >>> known_gpu("NVIDIA H100 NVL").bf16_tflops.value, known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        (835, None)
    """
    return MODELS.get(name.removeprefix("NVIDIA "))
