"""Hardware profiles: their published figures, their sources, and figures that are refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from moelab import hardware
from moelab.errors import BadInput
from moelab.hardware import (
    B200,
    H100,
    MODELS,
    Gpu,
    ImpossibleHardware,
    SourcedNumber,
    cluster_of,
    gpu_from,
    gpu_of,
    has_deepep,
    has_grouped_fp8,
    has_native_mxfp8,
    known_gpu,
)
from moelab.machine import GpuInfo, memory_bytes


def figures(gpu: Gpu) -> list[SourcedNumber]:
    return [value for field in fields(gpu) if isinstance(value := getattr(gpu, field.name), SourcedNumber)]


def test_the_machine_at_hand_without_gpus() -> None:
    gpu = gpu_of("cpu")
    assert (gpu.name, gpu.capability, gpu.bf16_tflops) == ("CPU", 0.0, None)
    assert float(gpu.memory_gib) == memory_bytes() / 2**30


def test_a_gpu_is_known_by_its_name() -> None:
    info = GpuInfo(name="NVIDIA H100 80GB HBM3", capability=9.0, driver="580", memory_mib=81_559)
    assert gpu_from(info) == replace(H100, memory_gib=gpu_from(info).memory_gib)
    assert gpu_from(info).memory_gib.label == "measured"
    assert gpu_from(replace(info, name="NVIDIA B200", capability=10.0)).bf16_tflops == B200.bf16_tflops
    assert gpu_from(replace(info, name="NVIDIA GB300", capability=10.3)).name == "GB300"


def test_an_unknown_gpu_keeps_what_the_machine_says() -> None:
    gpu = gpu_from(GpuInfo(name="NVIDIA RTX 9000", capability=12.0, driver="580", memory_mib=2048))
    assert (gpu.name, float(gpu.memory_gib), gpu.bf16_tflops) == ("NVIDIA RTX 9000", 2.0, None)
    shared = gpu_from(GpuInfo(name="NVIDIA GB10", capability=12.1, driver="580", memory_mib=None))
    assert float(shared.memory_gib) == memory_bytes() / 2**30


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_impossible_figures_are_refused(value: float) -> None:
    with pytest.raises(ImpossibleHardware, match="give a positive number"):
        SourcedNumber(value=value, label="quoted", source="a datasheet")


def test_swapped_peaks_and_negative_capability_are_refused() -> None:
    with pytest.raises(ImpossibleHardware, match="mixed up"):
        replace(H100, bf16_tflops=H100.fp8_tflops, fp8_tflops=H100.bf16_tflops)
    with pytest.raises(ImpossibleHardware, match="capability is -1"):
        replace(H100, capability=-1)


def test_an_unknown_profile_names_the_others() -> None:
    with pytest.raises(BadInput, match="no such profile; the profiles are b200_x256") as caught:
        cluster_of("dgx_spark")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_found_by_its_exact_name(name: str) -> None:
    info = GpuInfo(name=f"NVIDIA {name}", capability=None, driver="580", memory_mib=1024)
    assert replace(gpu_from(info), memory_gib=MODELS[name].memory_gib) == MODELS[name]
    assert all(len(figure.source) > 10 for figure in figures(MODELS[name]))


NAMESAKES = {  # BF16 TFLOP/s and TB/s of memory, by their datasheets
    "H100 80GB HBM3": (989, 3.35), "H100 PCIe": (756, 2), "H100 NVL": (835, 3.9), "H200 NVL": (835, 4.8),
    "GH200 480GB": (990, 4), "GH200 144G HBM3e": (990, 4.9), "A100-SXM4-80GB": (312, 2.039),
    "A100 80GB PCIe": (312, 1.935), "B300 SXM6 AC": (2250, 8), "GB300": (2500, 8), "H800": (989, 3.35),
    "H20": (148, 4), "B200": (2250, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMESAKES)
def test_namesakes_have_their_own_figures(name: str) -> None:
    gpu = gpu_from(GpuInfo(name=f"NVIDIA {name}", capability=9.0, driver="580", memory_mib=80_000))
    assert (float(gpu.bf16_tflops or 0), float(gpu.hbm_tb_s or 0)) == NAMESAKES[name]
    assert (gpu.nvlink_gb_s is None) == any(word in name for word in ("PCIe", "NVL", "GH200"))


UNKNOWN = (
    "NVIDIA H100", "NVIDIA H100 SXM5 64GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100-40C", "NVIDIA H800 PCIe",
    "NVIDIA H20-3e", "NVIDIA H200 141GB", "NVIDIA GH200 120GB", "NVIDIA A100-SXM4-40GB", "GRID A100X-40C",
    "NVIDIA GB10", "NVIDIA GB300-WS", "NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
)  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_in_the_catalogue_is_unknown_by_name(name: str) -> None:
    gpu = gpu_from(GpuInfo(name=name, capability=9.0, driver="580", memory_mib=40_960))
    assert gpu == Gpu(name=name, capability=9.0, memory_gib=gpu.memory_gib)
    assert known_gpu(name) is None


def test_memory_is_the_systems_only_where_the_gpu_shares_it() -> None:
    virtual = gpu_from(GpuInfo(name="GRID A100X-40C", capability=None, driver="535", memory_mib=None))
    assert (virtual.capability, virtual.memory_gib) == (None, None)
    slice_ = gpu_from(GpuInfo(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", capability=9.0, driver="580", memory_mib=9536))
    assert slice_.memory_gib is not None
    assert slice_.memory_gib.label == "derived"


def test_a_node_of_several_kinds_has_no_rates_and_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = GpuInfo(name="NVIDIA H100 80GB HBM3", capability=9.0, driver="580", memory_mib=81_559)
    found = (h100, h100, replace(h100, name="NVIDIA H100 PCIe", memory_mib=81_000))
    monkeypatch.setattr(hardware, "gpus", lambda: found)
    cluster_of.cache_clear()
    gpu = gpu_of("local")
    assert (gpu.name, gpu.capability, gpu.bf16_tflops) == ("2 × H100 and 1 × H100 PCIe", 9.0, None)
    assert float(gpu.memory_gib or 0) == 81_000 / 1024
    monkeypatch.setattr(hardware, "gpus", lambda: (h100, replace(h100, name="NVIDIA B200", capability=10.0)))
    cluster_of.cache_clear()
    assert gpu_of("local").capability is None
    cluster_of.cache_clear()


def test_kernels_by_sm_version() -> None:
    """9.4 and 9.5 are AMD's gfx942 and gfx950, for which torchao has MXFP8 kernels."""
    versions = (None, 8.0, 8.9, 9.0, 9.4, 9.5, 10.0, 10.3, 11.0, 12.0, 12.1)
    assert [one for one in versions if has_grouped_fp8(one)] == [9.0, 10.0, 10.3]
    assert [one for one in versions if has_native_mxfp8(one)] == [9.5, 10.0, 10.3]
    assert [one for one in versions if has_deepep(one)] == [9.0, 10.0, 10.3]
