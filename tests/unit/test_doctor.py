"""What the doctor says about machines: this one, and ones that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nvidia_smi_support import B200, H100, MISMATCH, forget, nvidia_smi

from moelab import cli, doctor
from moelab.doctor import ArmAnswer, examine
from moelab.experiment import EPBackend, Precision
from moelab.finding import Finding
from moelab.launch import capability
from moelab.machine import environment

Smi = Callable[..., Path]


@pytest.fixture(autouse=True)
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Smi]:
    """Puts a stand-in for nvidia-smi on PATH; afterwards GPUs are asked for again."""
    yield partial(nvidia_smi, monkeypatch, tmp_path)
    forget()


def arms() -> dict[str, ArmAnswer]:
    return {arm.name: arm for arm in examine().arms}


def finding(name: str) -> Finding:
    (found,) = [one for one in examine().findings if one.name == name]
    return found


VGPU, GB10 = "GRID A100X-40C, [N/A], 535.104.05, 40960", "NVIDIA GB10, 12.1, 580.95.05, [N/A]"
OF_B200 = "NVIDIA B200, SM100, driver 580.95.05"
UNKNOWN = "the peak rates of {} are unknown: no MFU, no projection"
SEVERAL = "a run on several kinds of GPU is as slow as the slowest; choose one with CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("rows", "found", "advice"),
    [
        ([B200] * 2, f"2 × {OF_B200}", ""),
        ([H100, B200], f"1 × NVIDIA H100 80GB HBM3, SM90, driver 570.1; 1 × {OF_B200}", SEVERAL),
        ([VGPU], "1 × GRID A100X-40C, of unknown SM version, driver 535.104.05", UNKNOWN.format("GRID A100X-40C")),
        ([GB10], "1 × NVIDIA GB10, SM121, driver 580.95.05", UNKNOWN.format("NVIDIA GB10")),
    ],
)
def test_gpus_are_listed(smi: Smi, monkeypatch: pytest.MonkeyPatch, rows: list[str], found: str, advice: str) -> None:
    smi(*rows)
    one = finding("GPUs")
    assert (one.ok, one.found, one.remedy) == (True, found, advice)
    assert not examine().failed
    monkeypatch.setattr(doctor, "version", lambda name: "2.14.0+cpu")
    assert finding("torch").remedy.startswith("this build has no CUDA")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert finding("GPUs").found.startswith("none left by CUDA_VISIBLE_DEVICES='-1'")
    assert finding("torch").ok


def test_an_nvidia_smi_that_fails_is_a_failed_check(smi: Smi, capsys: pytest.CaptureFixture[str]) -> None:
    smi(MISMATCH, code=18)
    assert cli.main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (one,) = [one for one in told["findings"] if one["name"] == "GPUs"]
    assert not one["ok"]
    assert "Driver/library version mismatch" in one["found"]
    assert not any(arm["runs"] for arm in told["arms"])
    assert "version mismatch" in told["environment"]["gpu_problem"]
    examined = examine(smoke=True)
    text = examined.as_text()
    assert all(f"{one.name}: {one.found}" in text for one in (*examined.findings, *examined.deepep))
    assert all(f"{arm.name}: {arm.reason}" in text for arm in examined.arms)
    titles = [line for line in text.splitlines() if line and line[0] != " "]
    assert titles == ["This machine", "DeepEP and what it needs", "Arms of a study (nano model)"]
    assert "no GPU" not in text
    assert "GPUs: none" not in text


def test_memory_errors_and_throttling_are_told(smi: Smi) -> None:
    states = [f"{index}, 0000:0{index}:00.0, 1980 MHz, 60, {errors}, 0x4" for index, errors in enumerate((0, 3))]
    body = f"""case "$1" in
*ecc*) printf '%s\\n' {" ".join(f"'{state}'" for state in states)};;
--query-gpu=*) printf '%s\\n' '{H100}' '{H100}';;
esac"""
    smi(body=body)
    assert finding("ECC errors").found == "GPU 1: 3 uncorrected"
    assert finding("GPUs").ok
    assert examine().failed


def test_a_limit_is_told_beside_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(doctor, "physical_memory_bytes", lambda: 512 << 30)
    assert finding("processor and memory").found.endswith(
        "8 GiB of the machine's 512, by the limit of this container or job"
    )


def test_a_machine_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    forget()
    assert finding("GPUs").found.startswith("none; ranks run as processes on the CPU")
    assert finding("Slurm").found.startswith("no sbatch")


def test_arms_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = arms()
    assert len(found) == len(Precision) * len(EPBackend)
    runs = {name: arm.kernels for name, arm in found.items() if not arm.reason}
    assert runs == {
        "bf16_standard": "runs",
        "mxfp8_standard": "runs emulated: MXFP8 numerics, not its speed",
        "nvfp4_standard": "runs emulated: NVFP4 numerics, not its speed",
    }
    assert found["mxfp8_deepep"].reason.startswith("ep_backend is deepep: it needs CUDA")
    assert all(arm.reason.count(f"{field} is ") <= 1 for arm in found.values() for field in ("precision", "ep_backend"))


def test_arms_of_gpus(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native MXFP8 is not promised beyond SM100, and one GPU is enough."""
    monkeypatch.setattr(capability, "has_module", lambda name: name == "triton")
    common, fast = {"bf16_standard", "mxfp8_standard", "nvfp4_standard"}, {"fp8_standard", "bf16_minimal_async_ep"}
    for row, count, words, more in (
        (H100, 2, "runs emulated", fast),
        (B200, 2, "runs with native kernels", fast),
        ("NVIDIA GeForce RTX 5090, 12.0, 580.1, 32607", 1, "runs emulated", set()),
        (GB10, 1, "runs emulated", set()),
    ):
        smi(*[row] * count)
        found = arms()
        assert {name for name, arm in found.items() if not arm.reason} == common | more, row
        assert found["mxfp8_standard"].kernels.startswith(words)


@pytest.mark.parametrize(
    ("package", "fitting", "others"),
    [
        ("torch", ["2.14.0", "2.14.1+cu130", "2.14.1+cpu"], ["2.140.0", "2.13.9"]),
        ("torchao", ["0.18.0", "0.18.0+cu130"], ["0.18.1"]),
        ("torchtitan", ["0.3.0"], [None]),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, package: str, fitting: list[str], others: list[str | None]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for version in (*fitting, *others):
        monkeypatch.setattr(doctor, "version", lambda name, version=version: version)
        one = finding(package)
        assert (one.ok, one.found) == (version in fitting, version or "not installed")
        assert bool(one.remedy) is not one.ok


def test_the_environment_names_no_host_and_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import socket

    text = json.dumps(environment(nodes=4))
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    assert json.loads(text)["hosts"] == 4
