"""What the doctor says about machines: this one, and ones that are made up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moelab import doctor, machine
from moelab.doctor import Arm, examine
from moelab.experiment import EPBackend, Precision
from moelab.launch import capability
from moelab.machine import GpuInfo, environment, gpus

B200 = "NVIDIA B200, 10.0, 580.95.05, 183359"
H100 = "NVIDIA H100 80GB HBM3, 9.0, 570.1, 81559"


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    gpus.cache_clear()
    yield
    gpus.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return []


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]], *rows: str, code: int = 0) -> None:
    run = subprocess.run

    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != "nvidia-smi":
            return run(command, **options)
        calls.append(command)
        if code:
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, 0, "".join(f"{row}\n" for row in rows), "")

    monkeypatch.setattr(machine.subprocess, "run", answer)


def arms() -> dict[str, Arm]:
    return {arm.name: arm for arm in examine().arms}


def finding(name: str) -> doctor.Finding:
    (found,) = [one for one in examine().findings if one.name == name]
    return found


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    nvidia_smi(monkeypatch, calls, B200, B200)
    one = GpuInfo(name="NVIDIA B200", capability=10.0, driver="580.95.05", memory_mib=183_359)
    assert gpus() == (one, one)
    assert finding("GPUs").found == "2 × NVIDIA B200, SM100, driver 580.95.05"
    assert not any(word.startswith("--id") for word in calls[0])


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    nvidia_smi(monkeypatch, calls, B200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert len(gpus()) == 1
    assert calls[0][-1] == "--id=3,5"


def test_a_gpu_that_shares_the_systems_memory(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    nvidia_smi(monkeypatch, calls, "NVIDIA GB10, 12.1, 580.95.05, [N/A]")
    assert [(gpu.capability, gpu.memory_mib) for gpu in gpus()] == [(12.1, None)]


@pytest.mark.parametrize("code", [0, 6, 9, 255])
def test_a_machine_without_a_working_gpu(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]], code: int) -> None:
    nvidia_smi(monkeypatch, calls, "No devices were found", code=code)
    assert gpus() == ()
    assert finding("GPUs").ok


def test_a_machine_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()
    assert machine.git_commit() is None
    assert finding("Slurm").found.startswith("no sbatch")


def test_arms_of_a_cpu(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    nvidia_smi(monkeypatch, calls, code=9)
    found = arms()
    assert len(found) == len(Precision) * len(EPBackend)
    runs = {name: arm.kernels for name, arm in found.items() if not arm.reason}
    assert runs == {
        "bf16_standard": "runs",
        "mxfp8_standard": "runs emulated: MXFP8 numerics, not its speed",
    }


def test_arms_of_hopper_and_blackwell(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    monkeypatch.setattr(capability, "has_module", lambda name: name == "triton")
    expected = {"bf16_standard", "fp8_standard", "mxfp8_standard", "bf16_minimal_async_ep"}
    for row, words in ((H100, "emulated"), (B200, "native kernels")):
        gpus.cache_clear()
        nvidia_smi(monkeypatch, calls, row, row)
        found = arms()
        assert {name for name, arm in found.items() if not arm.reason} == expected
        assert words in found["mxfp8_standard"].kernels


def test_one_gpu_is_enough(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    nvidia_smi(monkeypatch, calls, H100)
    assert arms()["bf16_standard"].reason == ""


@pytest.mark.parametrize(
    ("package", "found", "fits"),
    [
        ("torch", "2.14.0", True),
        ("torch", "2.14.1+cu130", True),
        ("torch", "2.140.0", False),
        ("torch", "2.13.9", False),
        ("torchao", "0.18.0", True),
        ("torchao", "0.18.0+cu130", True),
        ("torchao", "0.18.1", False),
        ("torchtitan", "0.3.0", True),
        ("torchtitan", None, False),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, package: str, found: str | None, fits: bool) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: found)
    one = finding(package)
    assert (one.ok, one.found) == (fits, found or "not installed")
    assert bool(one.advice) is not fits


def test_this_machine_as_text_and_as_json() -> None:
    found = examine()
    text = found.as_text()
    assert text.startswith("This machine\n  ")
    assert "\nArms of a study (nano model)\n" in text
    for one in found.findings:
        assert f"{one.name}: {one.found}" in text
        assert one.ok or one.advice
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [arm["runs"] for arm in data["arms"]] == [not arm.reason for arm in found.arms]
    assert data["environment"]["hosts"] == 1


def test_the_environment_names_no_host_and_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import socket

    text = json.dumps(environment(nodes=4))
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    assert json.loads(text)["hosts"] == 4
