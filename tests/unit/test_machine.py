"""GPUs as nvidia-smi and ``CUDA_VISIBLE_DEVICES`` tell of them, and an nvidia-smi that fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nvidia_smi_support import B200, H100, MISMATCH, forget, nvidia_smi, with_files
from processes import program

from moelab import cli, machine
from moelab.health.node import check_gpus, report
from moelab.machine import GpuInfo, GpusUnknown, environment, gpu_problem, gpus
from moelab.notebooks.all_to_all import can_use_gpus
from moelab.notebooks.parameters import StartParameters

FOUR = "\n".join(f"GPU {index}: NVIDIA B200 (UUID: GPU-{index}a5d-11ef)" for index in range(4))
MIG = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a5d-11ef)
  MIG 3g.40gb     Device  0: (UUID: MIG-7c1e-0001)
  MIG 1g.10gb     Device  1: (UUID: MIG-7c1e-0002)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1a5d-11ef)"""
DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."


Smi = Callable[..., Path]


@pytest.fixture(autouse=True)
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Smi]:
    """Puts a stand-in for nvidia-smi on PATH; afterwards GPUs are asked for again."""
    yield partial(nvidia_smi, monkeypatch, tmp_path)
    forget()


def rows(count: int) -> list[str]:
    """Rows of GPUs that differ in their memory, which tells them apart."""
    return [f"NVIDIA B200, 10.0, 580.95.05, {100_000 + index}" for index in range(count)]


def visible() -> list[int]:
    return [(gpu.memory_mib or 0) - 100_000 for gpu in gpus()]


def test_gpus_are_read_from_nvidia_smi(smi: Smi, tmp_path: Path) -> None:
    smi(B200, B200)
    one = GpuInfo(name="NVIDIA B200", capability=10.0, driver="580.95.05", memory_mib=183_359)
    assert gpus() == (one, one)
    assert gpu_problem() is None
    assert len((tmp_path / "asked").read_text().splitlines()) == 2  # the query and -L, once


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("GRID A100X-40C, [N/A], 535.104.05, 40960", ("GRID A100X-40C", None, 40_960)),
        ("NVIDIA GB10, 12.1, 580.95.05, [N/A]", ("NVIDIA GB10", 12.1, None)),
        ("Tesla K80, [Not Supported], 470.1, [Not Supported]", ("Tesla K80", None, None)),
        ("NVIDIA A100-SXM4-40GB, 8.0, 550.54.15, [Insufficient Permissions]", ("NVIDIA A100-SXM4-40GB", 8.0, None)),
        ("Acme, Inc. Model 9, rev. 2, 9.0, 580.1, 81559", ("Acme, Inc. Model 9, rev. 2", 9.0, 81_559)),
        ("NVIDIA B300, 10,3, 580.1, 143.771", ("NVIDIA B300", 10.3, 143_771)),  # numbers of another language
        ("NVIDIA H200, 9.0, 570.1, 143,771 MiB", ("NVIDIA H200", 9.0, 143_771)),
        ("Orin (nvgpu), [N/A], 540.4.0, [Not Supported]\r", ("Orin (nvgpu)", None, None)),
    ],
)
def test_what_a_gpu_does_not_say_is_not_known(
    smi: Smi, row: str, expected: tuple[str, float | None, int | None]
) -> None:
    smi(row)
    (gpu,) = gpus()
    assert (gpu.name, gpu.capability, gpu.memory_mib) == expected


NOISE = """\
* Welcome, users! Maintenance on 3.12, 9.0 h
ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.
name, compute_cap, driver_version, memory.total [MiB]
WARNING: infoROM is corrupted at gpu 0000:18:00.0, slot 1
"""


@pytest.mark.parametrize("code", [0, machine.LISTS_DESPITE])
def test_warnings_banners_and_a_header_are_passed_over(smi: Smi, code: int) -> None:
    smi(NOISE, H100, NOISE, H100, code=code)
    assert [(gpu.name, gpu.memory_mib) for gpu in gpus()] == [("NVIDIA H100 80GB HBM3", 81_559)] * 2


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3,1", [3, 1]),
        (" 2", [2]),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("1,1", []),
        ("0,GPU-1a5d-11ef", [0]),
        ("GPU-2a5d-11ef,GPU-0a5d-11ef", [2, 0]),
        ("GPU-3a", [3]),
        ("GPU-ffff", []),
        ("GPU-1a5d-11ef,0", [1]),
    ],
)
def test_what_cuda_visible_devices_leaves(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, chosen: str, expected: list[int]
) -> None:
    smi(*rows(4), listed=FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [("MIG 3g.40gb", 38_146)]),
        ("0", [("MIG 3g.40gb", 38_146)]),
        ("1", [("", 81_559)]),
        ("MIG-7c1e-0002", [("MIG 1g.10gb", 9_536)]),
        ("MIG-7c1e-0002,MIG-7c1e-0001", [("MIG 1g.10gb", 9_536)]),
        ("MIG-ffff", []),
    ],
)
def test_a_process_has_one_mig_instance(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: list[tuple[str, int]]
) -> None:
    smi(H100, H100, listed=MIG)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [(gpu.name, gpu.memory_mib) for gpu in gpus()] == [
        (f"NVIDIA H100 80GB HBM3 {name}".strip(), mib) for name, mib in expected
    ]


def test_a_gpu_in_mig_mode_without_instances_is_none_for_cuda(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "\n".join(line for line in MIG.splitlines() if line.startswith("GPU"))
    smi(f"{H100}, Enabled", f"{H100}, Disabled", listed=listed)
    assert len(gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(GpusUnknown, match="GPU 0 is in MIG mode without an instance, so CUDA sees no GPU"):
        gpus()
    smi(f"{H100}, Enabled", f"{H100}, [N/A]", listed=MIG)
    assert [gpu.memory_mib for gpu in gpus()] == [38_146]


# An nvidia-smi that fails


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        (MISMATCH, 18, "(exit code 18): Failed to initialize NVML: Driver/library version mismatch; NVML library"),
        (DRIVER, 9, "(exit code 9): NVIDIA-SMI has failed because it couldn't communicate"),
        ("No devices were found", 6, "(exit code 6): No devices were found"),
        ("No devices were found", 0, "(exit code 0): No devices were found"),
        ("", 0, "(exit code 0): it lists no GPU"),
        (f"{B200}\nUnable to determine the device handle for GPU1: Unknown Error", 15, "Unable to determine"),
        (f"{B200}\nUnable to determine the device handle for GPU1: 0000:1A:00.0: GPU is lost.", 0, "GPU is lost"),
        (f"{B200}\n[GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]", 0, "[GPU is lost]"),
        ("NVIDIA H100 80GB HBM3, 9.0, [GPU requires reset], [GPU requires reset]", 0, "[GPU requires reset]"),
        ("NVIDIA A100, [Unknown Error], 550.1, ERR!", 0, "[Unknown Error]"),
        ("Failed to initialize NVML: Unknown Error", 255, "(exit code 255): Failed to initialize NVML: Unknown Error"),
        ("Failed to initialize NVML: Insufficient Permissions", 4, "Insufficient Permissions"),
        ("NVIDIA H100 80GB HBM3, 9.0", 0, "NVIDIA H100 80GB HBM3, 9.0"),  # columns are missing
    ],
)
def test_a_machine_with_broken_gpus_is_not_one_without(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, said: str, code: int, words: str
) -> None:
    smi(said, code=code)
    with pytest.raises(GpusUnknown, match="hardware=cpu") as caught:
        gpus()
    assert words in str(caught.value)
    assert words in str(gpu_problem())
    assert caught.value.exit_code == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose: there is nothing to ask
    assert gpus() == ()


def test_a_driver_that_does_not_know_compute_cap(smi: Smi) -> None:
    body = """case "$1" in
*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;;
--query*) echo 'Tesla V100-SXM2-32GB, 470.57.02, 32510'; exit 0;;
esac"""
    smi(body=body)
    assert gpus() == (GpuInfo(name="Tesla V100-SXM2-32GB", capability=None, driver="470.57.02", memory_mib=32_510),)


def test_an_nvidia_smi_that_hangs_or_cannot_be_started_fails(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = smi(body="sleep 20 & wait")  # killed, its child still holds the pipe, as a driver that hangs does
    monkeypatch.setattr(machine, "COMMAND_TIMEOUT_S", 0.2)
    start = time.monotonic()
    assert gpu_problem() == "nvidia-smi fails: no answer within 0.2 s"
    assert machine.run_command([str(stand_in)]) is None
    assert time.monotonic() - start < 15
    stand_in.write_bytes(b"\x7fELF of another architecture")
    forget()
    assert gpu_problem() == "nvidia-smi fails: Exec format error"


def test_uuids_that_cannot_be_looked_up_are_a_failure(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(body=f'[ "$1" = -L ] && exit 255; echo "{B200}"')
    assert len(gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a5d-11ef")
    with pytest.raises(GpusUnknown, match="names GPUs by UUID"):
        gpus()


def without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine that has nothing on PATH but what a test puts there, and no device."""
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "DEVICES", folder / "dev")
    forget()


def test_devices_without_nvidia_smi_are_no_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_nvidia_smi(monkeypatch, tmp_path)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    with pytest.raises(GpusUnknown, match="NVIDIA_DRIVER_CAPABILITIES=compute,utility") as caught:
        gpus()
    assert caught.value.found == f"nvidia-smi is missing, but there are 2 GPU devices ({tmp_path}/dev/nvidia0)"


ROCM_SMI = """\
============================ ROCm System Management Interface ============================
====================================== Product Info ======================================
GPU[0]\t\t: Card Series: \t\tAMD Instinct MI355X
GPU[0]\t\t: Card Model: \t\t0x75a3
GPU[1]\t\t: Card Series: \t\tAMD Instinct MI355X
GPU[1]\t\t: GFX Version: \t\tgfx950"""
AMD_SMI = "GPU: 0\n    ASIC:\n        MARKET_NAME: AMD Instinct MI350X\n        VENDOR_ID: 0x1002"


@pytest.mark.parametrize(
    ("name", "said", "found"),
    [
        ("rocm-smi", ROCM_SMI, "rocm-smi lists 2 × AMD Instinct MI355X"),
        ("amd-smi", AMD_SMI, "amd-smi lists 1 × AMD Instinct MI350X"),
        ("rocm-smi", "GPU[0]\t\t: Card Series: \t\tAMD Radeon 780M Graphics", None),  # a laptop's
        ("rocm-smi", "ERROR: No AMD GPUs", None),
    ],
)
def test_gpus_of_amd_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, said: str, found: str | None
) -> None:
    program(tmp_path, name, f"cat <<'P'\n{said}\nP")
    without_nvidia_smi(monkeypatch, tmp_path)
    assert gpu_problem() == found
    if found:
        with pytest.raises(GpusUnknown, match="moelab has never run on ROCm, use the processor with hardware=cpu"):
            gpus()


def test_a_machine_without_nvidia_smi_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()
    assert machine.git_commit() is None


# Containers and jobs: limits of control groups, not the machine's sizes


GROUP = "proc/self/cgroup"
SYS = "sys/fs/cgroup"
JOB = "system.slice/slurmstepd.scope/job_7"


def version_1(*, memory: str, quota: str) -> dict[str, str]:
    cpu = {f"{SYS}/cpu/cpu.cfs_quota_us": f"{quota}\n", f"{SYS}/cpu/cpu.cfs_period_us": "100000\n"}
    return {f"{SYS}/memory/memory.limit_in_bytes": f"{memory}\n", **cpu}


@pytest.mark.parametrize(
    ("files", "gib", "most"),
    [
        ({}, None, None),
        ({GROUP: "0::/\n", f"{SYS}/memory.max": f"{2 << 30}\n", f"{SYS}/cpu.max": "100000 100000\n"}, 2, 1),
        ({GROUP: "0::/\n", f"{SYS}/memory.max": "max\n", f"{SYS}/cpu.max": "max 100000\n"}, None, None),
        # Slurm: the job's limit stands above the step's
        ({GROUP: f"0::/{JOB}/step_0\n", f"{SYS}/{JOB}/memory.max": f"{3 << 30}\n",
          f"{SYS}/{JOB}/step_0/memory.max": "max\n"}, 3, None),
        # version 1 in a container, which sees its host's path and mounts the end of it
        ({GROUP: "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
          **version_1(memory=str(1 << 30), quota="50000")}, 1, 1),
        ({GROUP: "5:memory:/\n4:cpu,cpuacct:/\n", **version_1(memory="9223372036854771712", quota="-1")}, None, None),
    ],
)  # fmt: skip
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], gib: int | None, most: int | None) -> None:
    root = with_files(tmp_path, files)
    assert machine.memory_bytes(root) == (gib << 30 if gib else machine.physical_memory_bytes())
    assert machine.cores(root) == (most or len(os.sched_getaffinity(0)))


@pytest.fixture
def broken(smi: Smi) -> str:
    smi(MISMATCH, code=18)
    return "nvidia-smi fails (exit code 18): Failed to initialize NVML: Driver/library version mismatch"


def test_a_broken_machine_is_refused_by_name(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("name: s\nsteps: 2\n")
    for verb in (["run", str(file), "--runs", str(tmp_path / "runs")], ["plan", str(file)]):
        assert cli.main(verb) == 3
        assert broken in capsys.readouterr().err
    assert not (tmp_path / "runs" / "s").exists()
    assert cli.main(["plan", str(file), "--set", "hardware=cpu", "--json"]) == 0
    assert cli.main(["plan", str(file), "--set", "hardware=b200_node", "--json"]) == 0


@pytest.mark.parametrize(
    ("row", "fits", "note"),
    [
        ("NVIDIA H100 NVL, 9.0, 580.1, 95830", True, None),
        ("GRID A100X-40C, [N/A], 535.104.05, 40960", True, None),
        ("GRID A100X-40C, [N/A], 535.104.05, [N/A]", None, "the memory of GRID A100X-40C is not known"),
    ],
)
def test_a_plan_for_the_machine_at_hand(
    smi: Smi, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, fits: bool | None, note: str | None
) -> None:
    smi(row, row)
    file = tmp_path / "study.yaml"
    file.write_text("name: s\nsteps: 2\n")
    assert cli.main(["plan", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is fits
    assert (told["capacity_gib"] is None) == (fits is None)
    assert any(note in one for one in told["notes"]) if note else "not known" not in str(told["notes"])
    assert cli.main(["project", str(file)]) == 2  # neither has NVLink between all GPUs
    assert "has no " in capsys.readouterr().err


def test_a_broken_machine_is_told_of_in_every_record_and_notebook(broken: str) -> None:
    here, told, (found,) = environment(), report(), check_gpus([])
    assert here["gpus"] == json.loads(json.dumps(told))["gpus"] == []
    assert here["gpu_problem"].startswith(broken)
    assert told["gpu_problem"] == here["gpu_problem"] == found.found
    assert found.severity == "error"
    for ask in (StartParameters(study="s", runs_dir="runs", ranks=0, steps=2).to_study, can_use_gpus):
        with pytest.raises(GpusUnknown, match="version mismatch"):  # not taken for a processor
            ask()
