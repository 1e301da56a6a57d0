"""What a machine can run, for machines that are not here; every refusal says what is wrong and what would run."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.launch import capability
from moelab.launch.capability import refusals
from moelab.machine import GpuInfo, GpusUnknown, has_module
from moelab.planning.plan import plan


def node(count: int, name: str, sm: float | None) -> tuple[GpuInfo, ...]:
    return (GpuInfo(name=name, capability=sm, driver="580.1", memory_mib=80_000),) * count


CPU: tuple[GpuInfo, ...] = ()
A100, H100, B200 = node(8, "NVIDIA A100", 8.0), node(8, "NVIDIA H100", 9.0), node(8, "NVIDIA B200", 10.0)
RTX, VGPU = node(8, "NVIDIA GeForce RTX 5090", 12.0), node(8, "GRID A100X-40C", None)
MINIMAL: dict[str, Any] = {"ep_backend": "minimal_async_ep", "activation_checkpoint": "full"}
NATIVE: dict[str, Any] = {"precision": "mxfp8", "mxfp8_kernels": "native"}
DEEPEP: dict[str, Any] = {"ep_backend": "deepep", "model": "debug"}
EMULATED: dict[str, Any] = {"ep_backend": "deepep", "ep_kernels": "emulated"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "cores", lambda: 2)
    monkeypatch.setattr(capability, "has_module", lambda name: name in ("triton", *capability.kernels.MODULES))


def why(devices: tuple[GpuInfo, ...], **fields: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capability, "gpus", lambda: devices)
        return refusals(Experiment(**fields))


@pytest.mark.parametrize(
    ("devices", "fields"),
    [
        (CPU, {"gpus_per_node": 8}),  # four for each of its cores
        (A100, {"precision": "mxfp8", "gpus_per_node": 8}),
        (B200, {"hardware": "cpu"}),
        (CPU, {**EMULATED, "precision": "mxfp8", "compile": "model+loss"}),
        (H100, {**EMULATED, "precision": "fp8", "dispatch_precision": "fp8"}),
    ],
)
def test_what_runs(devices: tuple[GpuInfo, ...], fields: dict[str, Any]) -> None:
    assert why(devices, **fields) == []


@pytest.mark.parametrize(
    ("devices", "fields", "wrong", "legal"),
    [
        (CPU, NATIVE, "this machine has no GPU to use", "Legal mxfp8_kernels: auto, emulated"),
        (CPU, {"model": "16B"}, "model 16B", "model=debug"),
        (CPU, {"gpus_per_node": 16}, "gpus_per_node is 16", "at most 8"),
        (CPU, {"nodes": 2}, "nodes is 2", "nodes=1"),
        (A100, {"precision": "fp8"}, "NVIDIA A100 is SM80", "Legal precision: bf16, mxfp8"),
        (RTX, NATIVE, "RTX 5090 is SM120", "Legal mxfp8_kernels: auto, emulated"),
        (VGPU, {"precision": "fp8"}, "GRID A100X-40C is of unknown SM version", "Legal precision: bf16, mxfp8"),
        (H100, {"gpus_per_node": 16}, "this machine has 8 GPUs", "gpus_per_node=8"),
        (B200, DEEPEP, "not installed", "ep_backend=standard, or ep_kernels=emulated"),
        (B200, {**DEEPEP, "ep_backend": "hybridep"}, "not installed", "ep_backend=standard"),
        (B200, {**MINIMAL, "precision": "mxfp8"}, "standard, deepep, hybridep", "Legal ep_backend: standard, hybridep"),
        (H100, {"hardware": "cpu", "model": "16B"}, "model 16B", "model=nano"),
        (H100, {"hardware": "b200_node"}, "hardware is b200_node", "hardware=local"),
        # On a mixed node the weakest GPU decides, in whatever place it is.
        ((B200[0], A100[0]), {**NATIVE, "ep": 2}, "NVIDIA A100 is SM80", "Legal mxfp8_kernels: auto, emulated"),
    ],
)
def test_a_refusal_names_what_is_wrong_and_what_would_run(
    devices: tuple[GpuInfo, ...], fields: dict[str, Any], wrong: str, legal: str
) -> None:
    (reason,) = why(devices, **fields)
    assert wrong in reason
    assert legal in reason
    assert "\n" not in reason


@pytest.mark.parametrize("devices", [CPU, A100, H100, B200, RTX, VGPU])
def test_what_every_refusal_names_runs(devices: tuple[GpuInfo, ...]) -> None:
    """Following the advice of each refusal, `field=value` or the first legal value, ends at an arm that runs."""
    for precision, backend, dispatch in product(Precision, EPBackend, ("bf16", "mxfp8", "fp8")):
        fields = {"precision": precision, "ep_backend": backend, "dispatch_precision": dispatch}
        fields["activation_checkpoint"] = "full"
        for _ in range(4):
            reasons = why(devices, **fields)
            advice = [re.search(r"Legal (\w+): (\w+)", one) or re.search(r"(\w+)=(\w+)", one) for one in reasons]
            fields |= {one[1]: one[2] for one in advice if one}
        assert why(devices, **fields) == []


def test_all_reasons_are_given_at_once_and_the_illegal_in_the_words_of_a_plan() -> None:
    fields: dict[str, Any] = {"precision": "fp8", "ep_backend": "deepep", "model": "16B", "nodes": 4, "pp": 3}
    reasons = why(CPU, **fields)
    assert [reason.split()[0] for reason in reasons] == ["nodes", "model", "pp", "precision", "ep_backend"]
    assert reasons[2:3] == list(plan(Experiment(**fields)).verdict.reasons)  # which knows nothing of this machine


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_an_installed_deepep_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(capability, "has_module", lambda name: name in ("deep_ep", "triton"))
    fields = {"model": "debug", "ep_backend": backend}
    for precision, compiled in product(("bf16", "fp8", "mxfp8"), ("none", "model+loss")):
        assert why(H100, **fields, precision=precision, compile=compiled) == []
    for devices in (A100, RTX, VGPU):
        (reason,) = why(devices, **fields)
        assert "it needs CUDA and SM90, SM100 or SM103, and " in reason
        assert devices[0].name in reason
        assert ("ep_kernels=emulated" in reason) == (backend == "deepep")


def test_a_machine_whose_nvidia_smi_fails_runs_on_its_processor_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    error = GpusUnknown("nvidia-smi fails (exit code 9)")
    monkeypatch.setattr(capability, "gpus", Mock(side_effect=error))
    assert refusals(Experiment()) == [str(error)]
    assert refusals(Experiment(hardware="cpu")) == []


def test_an_override_must_be_a_module_that_ranks_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capability, "has_module", has_module)  # in place of the fixture's
    one = Experiment(hardware="cpu", overrides=["mine.parts.coarse"])
    (refusal,) = refusals(one)
    assert refusal.startswith("overrides has mine.parts.coarse, and there is no module mine.parts here; start in")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "parts.py").touch()  # torchrun's ranks have the working folder on their path
    assert refusals(one) == []
    assert refusals(one.model_copy(update={"overrides": ("torchtitan.overrides.fused_swiglu.fused_swiglu",)})) == []
