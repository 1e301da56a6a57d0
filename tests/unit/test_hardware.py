"""Hardware profiles: their published figures, their sources, and figures that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moelab import hardware
from moelab.errors import BadInput
from moelab.hardware import (
    FIGURES,
    H100,
    MODELS,
    Gpu,
    SourcedNumber,
    cluster_of,
    gpu_from,
    gpu_of,
    has_deepep,
    has_grouped_fp8,
    has_native_mxfp8,
)
from moelab.machine import GpuInfo, memory_bytes

SYSTEM_GIB = memory_bytes() / 2**30
LISTED = GpuInfo(name="NVIDIA H100 80GB HBM3", capability=9.0, driver="580", memory_mib=81_559)
DATASHEETS = {  # BF16 TFLOP/s and TB/s of memory
    "H100 80GB HBM3": (989, 3.35), "H100 PCIe": (756, 2), "H100 NVL": (835, 3.9), "H200 NVL": (835, 4.8),
    "GH200 480GB": (990, 4), "GH200 144G HBM3e": (990, 4.9), "A100-SXM4-80GB": (312, 2.039),
    "A100 80GB PCIe": (312, 1.935), "B300 SXM6 AC": (2250, 8), "GB300": (2500, 8), "H800": (989, 3.35),
    "H20": (148, 4), "B200": (2250, 8),
}  # fmt: skip
UNKNOWN = (
    "NVIDIA H100", "NVIDIA H100 SXM5 64GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100-40C", "NVIDIA H800 PCIe",
    "NVIDIA H20-3e", "NVIDIA H200 141GB", "NVIDIA GH200 120GB", "NVIDIA A100-SXM4-40GB", "GRID A100X-40C",
    "NVIDIA GB10", "NVIDIA GB300-WS", "NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS | DATASHEETS)
def test_a_gpu_is_known_by_its_exact_name_and_has_its_own_figures_with_their_sources(name: str) -> None:
    gpu = gpu_from(replace(LISTED, name=f"NVIDIA {name}", capability=None, memory_mib=1024))
    assert replace(gpu, memory_gib=MODELS[name].memory_gib) == MODELS[name]
    assert gpu.memory_gib == SourcedNumber(value=1.0, label="measured", source="nvidia-smi on this machine")
    figures = [figure for figure in (getattr(MODELS[name], field) for field in FIGURES) if figure]
    assert min(len(figure.source) for figure in figures) > 10
    if name in DATASHEETS:
        assert (float(gpu.bf16_tflops or 0), float(gpu.hbm_tb_s or 0)) == DATASHEETS[name]
        assert (gpu.nvlink_gb_s is None) == any(word in name for word in ("PCIe", "NVL", "GH200"))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_in_the_catalogue_is_unknown_by_name_and_keeps_what_the_machine_says(name: str) -> None:
    gpu = gpu_from(replace(LISTED, name=name, memory_mib=40_960))
    label = "derived" if "MIG" in name else "measured"
    assert gpu == Gpu(name=name, capability=9.0, memory_gib=gpu.memory_gib)
    assert gpu.memory_gib is not None
    assert (float(gpu.memory_gib), gpu.memory_gib.label) == (40.0, label)


def test_memory_is_the_systems_only_where_the_gpu_shares_it() -> None:
    without_memory = [
        gpu_from(replace(LISTED, name=name, capability=None, memory_mib=None))
        for name in ("NVIDIA GB10", "GRID A100X-40C")
    ]
    assert [gpu.memory_gib and float(gpu.memory_gib) for gpu in without_memory] == [SYSTEM_GIB, None]
    cpu = gpu_of("cpu")
    assert (cpu.name, cpu.capability, cpu.bf16_tflops, float(cpu.memory_gib or 0)) == ("CPU", 0.0, None, SYSTEM_GIB)


def test_a_node_of_several_kinds_has_no_rates_and_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pcie = replace(LISTED, name="NVIDIA H100 PCIe", memory_mib=81_000)
    b200 = replace(LISTED, name="NVIDIA B200", capability=10.0)
    for listed, expected in (
        ((LISTED, LISTED), ("H100", 9.0, 81_559, H100.bf16_tflops)),
        ((LISTED, LISTED, pcie), ("2 × H100 and 1 × H100 PCIe", 9.0, 81_000, None)),
        ((LISTED, b200), ("1 × H100 and 1 × B200", None, 81_559, None)),
    ):
        monkeypatch.setattr(hardware, "gpus", lambda listed=listed: listed)
        cluster_of.cache_clear()
        gpu = gpu_of("local")
        assert (gpu.name, gpu.capability, 1024 * float(gpu.memory_gib or 0), gpu.bf16_tflops) == expected
    cluster_of.cache_clear()


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_impossible_figures_are_refused(value: float) -> None:
    with pytest.raises(BadInput, match="give a positive number"):
        SourcedNumber(value=value, label="quoted", source="a datasheet")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"bf16_tflops": H100.fp8_tflops, "fp8_tflops": H100.bf16_tflops}, "mixed up"), ({"capability": -1}, "is -1")],
)
def test_figures_that_cannot_be_of_one_gpu_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        replace(H100, **fields)


def test_an_unknown_profile_names_the_others() -> None:
    with pytest.raises(BadInput, match="no such profile; the profiles are b200_x256"):
        cluster_of("dgx_spark")


def test_kernels_by_sm_version() -> None:
    """9.4 and 9.5 are AMD's gfx942 and gfx950, for which torchao has MXFP8 kernels."""
    versions = (None, 8.0, 8.9, 9.0, 9.4, 9.5, 10.0, 10.3, 11.0, 12.0, 12.1)
    assert [one for one in versions if has_grouped_fp8(one)] == [9.0, 10.0, 10.3]
    assert [one for one in versions if has_native_mxfp8(one)] == [9.5, 10.0, 10.3]
    assert [one for one in versions if has_deepep(one)] == [9.0, 10.0, 10.3]
