"""Hardware profiles: their published figures, their sources, and figures that are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from moelab.errors import BadInput
from moelab.hardware import (
    B200,
    GPUS,
    H100,
    PROFILES,
    Cluster,
    Figure,
    Gpu,
    ImpossibleHardware,
    Node,
    cluster_of,
    gpu_from,
    gpu_of,
)
from moelab.machine import GpuInfo, memory_bytes


def figures(gpu: Gpu) -> list[Figure]:
    return [value for field in fields(gpu) if isinstance(value := getattr(gpu, field.name), Figure)]


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "local"])
def test_every_figure_of_every_profile_has_a_label_and_a_source(name: str) -> None:
    node = cluster_of(name).node
    for figure in [*figures(node.gpu), *([node.nic_gb_s] if node.nic_gb_s else [])]:
        assert figure.label in ("measured", "derived", "quoted")
        assert len(figure.source) > 10


def test_the_published_cluster() -> None:
    cluster = cluster_of("b200_x256")
    assert (cluster.nodes, cluster.node.gpus, cluster.gpus) == (32, 8, 256)
    gpu, nic = cluster.node.gpu, cluster.node.nic_gb_s
    assert nic is not None
    assert float(nic) == 50
    peaks = (gpu.bf16_tflops, gpu.fp8_tflops, gpu.mxfp8_tflops, gpu.hbm_tb_s, gpu.nvlink_gb_s)
    assert [float(peak) for peak in peaks if peak] == [2250, 4500, 4500, 8, 900]


@pytest.mark.parametrize(
    ("name", "capability", "least_gib", "most_gib"),
    [("h100_node", 9.0, 78, 80), ("h200_node", 9.0, 138, 141), ("b200_node", 10.0, 176, 180)],
)
def test_capability_and_memory_of_a_node(name: str, capability: float, least_gib: float, most_gib: float) -> None:
    gpu = gpu_of(name)
    assert gpu.capability == capability
    assert least_gib < float(gpu.memory_gib) < most_gib


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
        Figure(value=value, label="quoted", source="a datasheet")


@pytest.mark.parametrize("count", [0, -8, 2.5, True])
def test_impossible_counts_are_refused(count: Any) -> None:
    with pytest.raises(ImpossibleHardware, match="whole number"):
        Node(gpu=H100, gpus=count)
    with pytest.raises(ImpossibleHardware, match="nodes of mine"):
        Cluster(name="mine", node=Node(gpu=H100, gpus=8), nodes=count)


def test_swapped_peaks_and_negative_capability_are_refused() -> None:
    with pytest.raises(ImpossibleHardware, match="mixed up"):
        replace(H100, bf16_tflops=H100.fp8_tflops, fp8_tflops=H100.bf16_tflops)
    with pytest.raises(ImpossibleHardware, match="capability is -1"):
        replace(H100, capability=-1)


def test_an_unknown_profile_names_the_others() -> None:
    with pytest.raises(BadInput, match="no such profile; the profiles are b200_x256") as caught:
        cluster_of("dgx_spark")
    assert "local" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", GPUS)
def test_each_kind_is_found_by_its_own_name(name: str) -> None:
    assert gpu_from(GpuInfo(name=f"NVIDIA {name}", capability=9.0, driver="580", memory_mib=1024)).name == name
