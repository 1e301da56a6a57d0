"""The GPUs and clusters of ``data/hardware.yaml``, which has every figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from moelab.data import read_yaml
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
NIC_400G = Figure(**_CONTENT["nic_400g"])
CLUSTERS = {
    name: Cluster(
        name=name,
        nodes=row["nodes"],
        node=Node(gpu=GPUS[row["gpu"]], gpus=row["gpus"], nic_gb_s=NIC_400G if row["nodes"] > 1 else None),
    )
    for name, row in _CONTENT["clusters"].items()
}


def known_gpu(name: str) -> Gpu | None:
    """The GPU of a name that CUDA or nvidia-smi gives, such as ``NVIDIA H100 PCIe``; None where it is not known.

    Example:
        >>> known_gpu("NVIDIA H100 NVL").bf16_tflops.value, known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        (835, None)
    """
    return MODELS.get(name.removeprefix("NVIDIA "))
