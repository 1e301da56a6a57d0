"""GPUs as nvidia-smi and ``CUDA_VISIBLE_DEVICES`` tell of them, and an nvidia-smi that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvidia_smi_support import B200, H100, MISMATCH, forget, nvidia_smi

from moelab import cli, machine
from moelab.health.gpu import check_gpus
from moelab.health.node import report
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


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    yield
    forget()


def rows(count: int) -> list[str]:
    """Rows of GPUs that differ in their memory, which tells them apart."""
    return [f"NVIDIA B200, 10.0, 580.95.05, {100_000 + index}" for index in range(count)]


def visible() -> list[int]:
    return [(gpu.memory_mib or 0) - 100_000 for gpu in gpus()]


def test_gpus_are_read_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(monkeypatch, tmp_path, B200, B200)
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
        (
            "NVIDIA A100-SXM4-40GB, 8.0, 550.54.15, [Insufficient Permissions]",
            ("NVIDIA A100-SXM4-40GB", 8.0, None),
        ),
        ("Acme, Inc. Model 9, rev. 2, 9.0, 580.1, 81559", ("Acme, Inc. Model 9, rev. 2", 9.0, 81_559)),
    ],
)
def test_what_a_gpu_does_not_say_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: str, expected: tuple[str, float | None, int | None]
) -> None:
    nvidia_smi(monkeypatch, tmp_path, row)
    (gpu,) = gpus()
    assert (gpu.name, gpu.capability, gpu.memory_mib) == expected
    assert gpu.sm == ("of unknown SM version" if expected[1] is None else f"SM{10 * expected[1]:.0f}")


@pytest.mark.parametrize("code", [0, machine.LISTS_DESPITE])
def test_warnings_between_the_rows_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    nvidia_smi(
        monkeypatch, tmp_path, "", H100, "WARNING: infoROM is corrupted at gpu 0000:18:00.0, slot 1", H100, code=code
    )
    assert [gpu.name for gpu in gpus()] == ["NVIDIA H100 80GB HBM3"] * 2


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str, expected: list[int]
) -> None:
    nvidia_smi(monkeypatch, tmp_path, *rows(4), listed=FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ("0", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"),
        ("1", "NVIDIA H100 80GB HBM3"),
        ("MIG-7c1e-0002", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("MIG-7c1e-0002,MIG-7c1e-0001", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("MIG-ffff", None),
    ],
)
def test_a_process_has_one_mig_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, expected: str | None
) -> None:
    nvidia_smi(monkeypatch, tmp_path, H100, H100, listed=MIG)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.name for gpu in gpus()] == ([expected] if expected else [])
    if expected and "MIG" in expected:
        (instance,) = gpus()
        assert instance.memory_mib == (38_146 if "40gb" in expected else 9_536)


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
    ],
)
def test_a_machine_with_broken_gpus_is_not_one_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, code: int, words: str
) -> None:
    nvidia_smi(monkeypatch, tmp_path, said, code=code)
    with pytest.raises(GpusUnknown, match="hardware=cpu") as caught:
        gpus()
    assert words in str(caught.value)
    assert words in str(gpu_problem())
    assert caught.value.exit_code == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose: there is nothing to ask
    assert gpus() == ()


def test_an_nvidia_smi_that_hangs_or_cannot_be_started_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = nvidia_smi(monkeypatch, tmp_path, body="exec sleep 60")
    monkeypatch.setattr(machine, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    assert gpu_problem() == "nvidia-smi fails: no answer within 0.2 s"
    program.write_bytes(b"\x7fELF of another architecture")
    forget()
    assert gpu_problem() == "nvidia-smi fails: Exec format error"


def test_uuids_that_cannot_be_looked_up_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvidia_smi(monkeypatch, tmp_path, body=f'[ "$1" = -L ] && exit 255; echo "{B200}"')
    assert len(gpus()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a5d-11ef")
    with pytest.raises(GpusUnknown, match="names GPUs by UUID"):
        gpus()


def test_a_machine_without_nvidia_smi_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    forget()
    assert gpus() == ()
    assert machine.git_commit() is None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    nvidia_smi(monkeypatch, tmp_path, MISMATCH, code=18)
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
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: str,
    fits: bool | None,
    note: str | None,
) -> None:
    nvidia_smi(monkeypatch, tmp_path, row, row)
    file = tmp_path / "study.yaml"
    file.write_text("name: s\nsteps: 2\n")
    assert cli.main(["plan", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is fits
    assert (told["capacity_gib"] is None) == (fits is None)
    assert any(note in one for one in told["notes"]) if note else "not known" not in str(told["notes"])
    assert cli.main(["project", str(file)]) == 2  # neither has NVLink between all GPUs
    assert "has no " in capsys.readouterr().err


def test_a_broken_machine_is_told_of_in_every_record(broken: str) -> None:
    here = environment()
    assert here["gpus"] == []
    assert here["gpu_problem"].startswith(broken)
    told = report()
    assert told["gpu_problem"] == here["gpu_problem"]
    assert json.loads(json.dumps(told))["gpus"] == []
    (found,) = check_gpus([])
    assert found.severity == "error"
    assert broken in found.found


def test_a_notebook_does_not_take_a_broken_machine_for_a_processor(broken: str) -> None:
    parameters = StartParameters(study="s", runs_dir="runs", ranks=0, steps=2)
    for ask in (parameters.to_study, can_use_gpus):
        with pytest.raises(GpusUnknown, match="version mismatch"):
            ask()
