"""What this machine has, as nvidia-smi and control groups tell of it, and what the doctor makes of that."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nvidia_smi_support import B200, H100, MISMATCH, forget, nvidia_smi, with_files

from moelab import cli, machine
from moelab.experiment import EPBackend, Precision
from moelab.finding import Finding
from moelab.health import doctor
from moelab.health.doctor import examine, trains
from moelab.health.node import check_gpus, report
from moelab.launch import capability
from moelab.machine import GpusUnknown, environment, gpu_problem, gpus
from moelab.notebooks import measure_all_to_all
from moelab.notebooks.parameters import StartParameters

Smi = Callable[..., Path]


@pytest.fixture(autouse=True)
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Smi]:
    """Puts a stand-in for nvidia-smi on PATH; afterwards GPUs are asked for again."""
    yield partial(nvidia_smi, monkeypatch, tmp_path)
    forget()


def seen() -> list[str]:
    """Rows as nvidia-smi prints them."""
    return [f"{gpu.name}, {gpu.capability}, {gpu.driver}, {gpu.memory_mib}" for gpu in gpus()]


VGPU, GB10 = "GRID A100X-40C, [N/A], 535.104.05, 40960", "NVIDIA GB10, 12.1, 580.95.05, [N/A]"
NOISE = """\
* Welcome, users! Maintenance on 3.12, 9.0 h
ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.
name, compute_cap, driver_version, memory.total [MiB]
WARNING: infoROM is corrupted at gpu 0000:18:00.0, slot 1"""


@pytest.mark.parametrize(
    ("printed", "row"),
    [
        (B200, B200),
        (f"{NOISE}\n{H100}\n{NOISE}", H100),
        (VGPU, "GRID A100X-40C, None, 535.104.05, 40960"),
        (GB10, "NVIDIA GB10, 12.1, 580.95.05, None"),
        ("Tesla K80, [Not Supported], 470.1, [Not Supported]", "Tesla K80, None, 470.1, None"),
        ("NVIDIA A100, 8.0, 550.54.15, [Insufficient Permissions]", "NVIDIA A100, 8.0, 550.54.15, None"),
        ("Acme, Inc. Model 9, rev. 2, 9.0, 580.1, 81559", "Acme, Inc. Model 9, rev. 2, 9.0, 580.1, 81559"),
        ("NVIDIA B300, 10,3, 580.1, 143.771", "NVIDIA B300, 10.3, 580.1, 143771"),  # numbers of another language
        ("NVIDIA H200, 9.0, 570.1, 143,771 MiB", "NVIDIA H200, 9.0, 570.1, 143771"),
        ("Orin (nvgpu), [N/A], 540.4.0, [Not Supported]\r", "Orin (nvgpu), None, 540.4.0, None"),
    ],
)
def test_gpus_are_read_from_nvidia_smi(smi: Smi, printed: str, row: str) -> None:
    for code in (0, machine.LISTS_DESPITE):
        smi(printed, printed, code=code)
        assert seen() == [row, row]
        assert gpu_problem() is None


def test_a_driver_that_does_not_tell_uuids(smi: Smi) -> None:
    no_uuids = f'[ "$1" = -L ] && exit 255; echo "{B200}"'
    smi(body=no_uuids)
    assert seen() == [B200]
    smi(body=no_uuids, visible="GPU-0a5d-11ef")
    with pytest.raises(GpusUnknown, match="names GPUs by UUID"):
        gpus()


FOUR = "\n".join(f"GPU {index}: NVIDIA B200 (UUID: GPU-{index}a5d-11ef)" for index in range(4))
MIG = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0a5d-11ef)
  MIG 3g.40gb     Device  0: (UUID: MIG-7c1e-0001)
  MIG 1g.10gb     Device  1: (UUID: MIG-7c1e-0002)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1a5d-11ef)"""


def left(smi: Smi, *rows: str, listed: str, choices: Iterable[str]) -> dict[str, tuple[int | None, ...]]:
    """By ``CUDA_VISIBLE_DEVICES``, the memory of what it leaves, which tells GPUs and instances apart."""
    memory_mib = {}
    for visible in choices:
        smi(*rows, listed=listed, visible=visible)
        memory_mib[visible] = tuple(gpu.memory_mib for gpu in gpus())
    return memory_mib


def test_what_cuda_visible_devices_leaves(smi: Smi) -> None:
    four = [f"NVIDIA B200, 10.0, 580.95.05, {index}" for index in range(4)]
    numbers = {"3,1": (3, 1), " 2": (2,), "1,-1,2": (1,), "0,9,1": (0,), "0,GPU-1a5d-11ef": (0,)}
    uuids = {"GPU-3a": (3,), "GPU-2a5d-11ef,GPU-0a5d-11ef": (2, 0), "GPU-1a5d-11ef,0": (1,)}
    expected = numbers | uuids | dict.fromkeys(("", "-1", "NoDevFiles", "1,1", "GPU-ffff"), ())
    assert left(smi, *four, listed=FOUR, choices=expected) == expected
    both = "MIG-7c1e-0002,MIG-7c1e-0001"  # a process has one instance
    instances = {"0": (38_146,), "1": (81_559,), "MIG-7c1e-0002": (9_536,), both: (9_536,), "MIG-ffff": ()}
    assert left(smi, H100, H100, listed=MIG, choices=instances) == instances


def test_a_gpu_in_mig_mode_is_its_instance_or_none(smi: Smi) -> None:
    for mode in ("Enabled", "[N/A]"):
        smi(f"{H100}, {mode}", f"{H100}, [N/A]", listed=MIG)
        assert seen() == ["NVIDIA H100 80GB HBM3 MIG 3g.40gb, 9.0, 570.1, 38146"]
    without = "\n".join(line for line in MIG.splitlines() if line.startswith("GPU"))
    smi(f"{H100}, Enabled", f"{H100}, Disabled", listed=without)
    assert seen() == [H100]
    smi(f"{H100}, Enabled", f"{H100}, Disabled", listed=without, visible="0")
    with pytest.raises(GpusUnknown, match="GPU 0 is in MIG mode without an instance, so CUDA sees no GPU"):
        gpus()


# --- an nvidia-smi that fails, or is missing


LOST = f"{B200}\nUnable to determine the device handle for GPU1"


@pytest.mark.parametrize(
    ("printed", "code"),
    [
        (MISMATCH, 18),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ("Failed to initialize NVML: Unknown Error", 255),
        ("Failed to initialize NVML: Insufficient Permissions", 4),
        ("No devices were found", 6),
        ("No devices were found", 0),
        ("", 0),
        (f"{LOST}: Unknown Error", 15),
        (f"{LOST}: 0000:1A:00.0: GPU is lost.", 0),
        (f"{B200}\n[GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]", 0),
        ("NVIDIA H100 80GB HBM3, 9.0, [GPU requires reset], [GPU requires reset]", 0),
        ("NVIDIA A100, [Unknown Error], 550.1, ERR!", 0),
        ("NVIDIA H100 80GB HBM3, 9.0", 0),  # columns are missing
        (B200, 9),
    ],
)
def test_a_machine_with_broken_gpus_is_not_one_without(smi: Smi, printed: str, code: int) -> None:
    smi(printed, code=code)
    words = printed.replace("\n", "; ").rstrip(".") or "it lists no GPU"
    assert gpu_problem() == f"nvidia-smi fails (exit code {code}): {words}"
    with pytest.raises(GpusUnknown, match="hardware=cpu"):
        gpus()
    smi(printed, code=code, visible="")  # hidden on purpose: there is nothing to ask
    assert gpus() == ()


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


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        (("nvidiactl", "nvidia-uvm"), None),
        (("nvidia0", "nvidia1", "nvidiactl"), "nvidia-smi is missing, but there are 2 GPU devices ({}0)"),
    ],
)
def test_a_machine_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: tuple[str, ...], problem: str | None
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "DEVICES", tmp_path / "dev")
    with_files(tmp_path / "dev", dict.fromkeys(devices, ""))
    forget()
    assert gpu_problem() == (problem and problem.format(tmp_path / "dev" / "nvidia"))
    if problem:
        with pytest.raises(GpusUnknown, match="NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
            gpus()
    else:
        assert gpus() == ()


# --- limits of containers and jobs, by their control groups


GROUP, SYS, JOB = "proc/self/cgroup", "sys/fs/cgroup", "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("files", "gib", "most"),
    [
        ({}, None, None),
        ({GROUP: "0::/\n", f"{SYS}/memory.max": f"{2 << 30}\n", f"{SYS}/cpu.max": "100000 100000\n"}, 2, 1),
        ({GROUP: "0::/\n", f"{SYS}/memory.max": "max\n", f"{SYS}/cpu.max": "max 100000\n"}, None, None),
        # Slurm: the job's limit stands above the step's
        ({GROUP: f"0::/{JOB}/step_0\n", f"{SYS}/{JOB}/memory.max": f"{3 << 30}\n",
          f"{SYS}/{JOB}/step_0/memory.max": "max\n"}, 3, None),
    ],
)  # fmt: skip
def test_limits_of_control_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], gib: int | None, most: int | None
) -> None:
    root, machine_bytes = with_files(tmp_path, files), machine.physical_memory_bytes()
    assert machine.memory_bytes(root) == (gib << 30 if gib else machine_bytes)
    assert machine.cores(root) == (most or len(os.sched_getaffinity(0)))
    monkeypatch.setattr(doctor, "memory_bytes", partial(machine.memory_bytes, root))
    told = f" of the machine's {machine_bytes / 2**30:.0f}, by the limit of this container or job" if gib else ""
    one = finding("processor and memory")
    assert one.found.endswith(f" {gib or machine_bytes / 2**30:.0f} GiB{told}")
    assert one.remedy == ("two ranks of nano need about 4 GiB" if gib else "")


# --- the doctor, and the plan for the machine at hand


def finding(name: str) -> Finding:
    (found,) = [one for one in examine().findings if one.name == name]
    return found


EMULATED = "runs emulated: MXFP8 numerics, not its speed"
OF_B200 = "NVIDIA B200, SM100, driver 580.95.05"
OF_VGPU = "GRID A100X-40C, of unknown SM version, driver 535.104.05"
UNKNOWN = "the peak rates of {} are unknown: no MFU, no projection"
SEVERAL = "a run on several kinds of GPU is as slow as the slowest; choose one with CUDA_VISIBLE_DEVICES"
SLOW, FAST = {"bf16_standard", "mxfp8_standard", "nvfp4_standard"}, {"fp8_standard", "bf16_minimal_async_ep"}


@pytest.mark.parametrize(
    ("rows", "found", "advice", "arms", "mxfp8"),
    [
        ([B200] * 2, f"2 × {OF_B200}", "", SLOW | FAST, "runs with native kernels"),
        ([H100, B200], f"1 × NVIDIA H100 80GB HBM3, SM90, driver 570.1; 1 × {OF_B200}", SEVERAL, SLOW | FAST, EMULATED),
        ([VGPU], f"1 × {OF_VGPU}", UNKNOWN.format("GRID A100X-40C"), SLOW, EMULATED),
        # one GPU is enough, and native MXFP8 is not promised beyond SM100
        ([GB10], "1 × NVIDIA GB10, SM121, driver 580.95.05", UNKNOWN.format("NVIDIA GB10"), SLOW, EMULATED),
    ],
)
def test_gpus_and_their_arms(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, rows: list[str], found: str, advice: str, arms: set[str], mxfp8: str
) -> None:
    monkeypatch.setattr(capability, "has_module", lambda name: name in ("triton", *capability.kernels.MODULES))
    smi(*rows)
    examined = examine()
    gpu = next(one for one in examined.findings if one.name == "GPUs")
    assert (gpu.ok, gpu.found, gpu.remedy, examined.failed) == (True, found, advice, False)
    kernels = {arm.name: arm.kernels for arm in examined.arms if not arm.reason}
    assert (kernels.keys(), kernels["mxfp8_standard"]) == (arms, mxfp8)


def test_native_mxfp8_needs_its_kernels_packages_too(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "has_module", lambda name: name in ("triton", "tvm_ffi"))
    smi(B200, B200)
    lines = {what: (runs, words) for runs, what, words in trains(examine().arms)}
    runs, words = lines["MXFP8"]
    assert not runs
    assert "native kernels need nvidia-cutlass-dsl, cuda-python, not installed here: pip install" in words
    assert "or set mxfp8_kernels=emulated" in words
    assert lines["BF16"] == (True, "runs")


FABRIC = """
GPU 00000000:18:00.0
    Product Name                          : NVIDIA H200
    Fabric
        State                             : {}
        Status                            : {}
    GPU 1 has a name
"""


@pytest.mark.parametrize(
    ("state", "status", "found"),
    [
        ("Completed", "Success", None),
        ("N/A", "N/A", None),  # a GPU without NVSwitches
        ("In Progress", "N/A", "1 of 2 GPUs: In Progress, N/A"),
        ("Completed", "Insufficient Resources", "1 of 2 GPUs: Completed, Insufficient Resources"),
    ],
)
@pytest.mark.parametrize("queried", [False, True])
def test_a_gpu_that_has_not_joined_its_fabric_trains_nothing(
    smi: Smi, state: str, status: str, found: str | None, queried: bool
) -> None:
    """CUDA then fails with error 802."""
    sections = FABRIC.format("Completed", "Success") + FABRIC.format(state, status)
    rows = f"0, Completed, Success\n1, {state}, {status}"
    answers = {"*fabric.state*": rows} if queried else {"-q": sections}
    cases = "".join(f"{of}) cat <<'P'\n{text}\nP\n;;\n" for of, text in answers.items())
    smi(body=f"case $1 in\n{cases}*) printf '%s\\n' '{H100}' '{H100}';;\nesac")
    examined = examine()
    faults = {one.name: one.found for one in examined.findings if one.name == "fabric"}
    assert faults == ({"fabric": found} if found else {})
    assert examined.failed == bool(found)
    if found:
        assert trains(examined.arms) == [(False, "BF16, FP8, MXFP8, NVFP4", f"fabric: {found}")]
    assert report()["gpu_problem"] == (f"fabric: {found}" if found else None)  # and to preflight


def test_arms_of_a_cpu(smi: Smi) -> None:
    smi(B200, visible="")
    assert finding("GPUs").found.startswith("none left by CUDA_VISIBLE_DEVICES=''; ranks run as processes on the CPU")
    found = {arm.name: arm for arm in examine().arms}
    assert len(found) == len(Precision) * len(EPBackend)
    assert {name: arm.kernels for name, arm in found.items() if not arm.reason} == {
        "bf16_standard": "runs",
        "mxfp8_standard": EMULATED,
        "nvfp4_standard": EMULATED.replace("MXFP8", "NVFP4"),
    }
    assert found["mxfp8_deepep"].reason.startswith("ep_backend is deepep: it needs CUDA")
    assert all(arm.reason.count(f"{field} is ") <= 1 for arm in found.values() for field in ("precision", "ep_backend"))


def test_memory_errors_are_a_failed_check(smi: Smi) -> None:
    states = [f"{index}, 0000:0{index}:00.0, 1980 MHz, 60, {errors}, 0x4" for index, errors in enumerate((0, 3))]
    smi(body=f"[[ $1 = *ecc* ]] && printf '%s\\n' '{states[0]}' '{states[1]}' || printf '%s\\n' '{H100}' '{H100}'")
    assert finding("ECC errors").found == "GPU 1: 3 uncorrected"
    assert finding("GPUs").ok
    assert examine().failed


def test_versions(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, installed, visible, advice in (
        ("torch", "2.14.1+cu130", None, ""),
        ("torch", "2.14.1+cpu", "", ""),
        ("torch", "2.14.1+cpu", None, "this build has no CUDA and cannot see the GPUs"),
        ("torch", "2.140.0", "", "moelab needs torch 2.14 or 2.15"),
        ("torchao", "0.18.1", None, "moelab needs torchao 0.18.0"),
        ("torchtitan", None, "", "moelab needs torchtitan 0.3.0"),
    ):
        smi(B200, visible=visible)
        monkeypatch.setattr(doctor, "version", {package: installed}.get)
        one = finding(package)
        assert (one.ok, one.found, one.remedy.partition(":")[0]) == (not advice, installed or "not installed", advice)


# --- what follows for plans, runs, records and notebooks


def test_a_driver_that_fails_is_refused_and_told_of_everywhere(
    smi: Smi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(MISMATCH, code=18)
    broken = "nvidia-smi fails (exit code 18): Failed to initialize NVML: Driver/library version mismatch"
    file = tmp_path / "study.yaml"
    file.write_text("name: s\nsteps: 2\n")
    for verb in (["run", str(file), "--runs", str(tmp_path / "runs")], ["plan", str(file)]):
        assert cli.main(verb) == 3
        assert broken in capsys.readouterr().err
    assert not (tmp_path / "runs" / "s").exists()
    for hardware in ("cpu", "b200_node"):
        assert cli.main(["plan", str(file), "--set", f"hardware={hardware}"]) == 0
    study_of = StartParameters(study="s", runs_dir="runs", ranks=0, steps=2).to_study
    for ask in (study_of, lambda: measure_all_to_all(tmp_path / "all_to_all.json")):
        with pytest.raises(GpusUnknown, match="version mismatch"):  # not taken for a processor
            ask()
    here, told, (one,) = environment(), report(), check_gpus([])
    assert here["gpus"] == told["gpus"] == []
    assert here["gpu_problem"] == told["gpu_problem"] == one.found
    assert (one.found.startswith(broken), one.severity) == (True, "error")
    capsys.readouterr()
    assert cli.main(["doctor", "--json"]) == 1
    doctors = json.loads(capsys.readouterr().out)
    assert doctors["environment"]["gpu_problem"].startswith(broken)
    assert not any(arm["runs"] for arm in doctors["arms"])
    examined = examine()
    (gpu,) = [one for one in examined.findings if one.name == "GPUs"]
    assert (gpu.ok, gpu.found.startswith(broken)) == (False, True)
    text = examined.as_text()
    assert all(f"{one.name}: {one.found}" in text for one in (*examined.findings, *examined.deepep))
    assert text.splitlines()[-1] == "  --  BF16, FP8, MXFP8, NVFP4: nothing is known about this machine's GPUs"
    titles = [line for line in text.splitlines() if line and line[0] != " "]
    assert titles == ["This machine", "DeepEP and what it needs", doctor.TRAINS]


def test_a_plan_needs_no_memory_that_is_not_known(smi: Smi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("name: s\nsteps: 2\n")
    plans = []
    for row in (VGPU, VGPU.replace("40960", "[N/A]")):
        smi(row, row)
        assert cli.main(["plan", str(file), "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        assert cli.main(["project", str(file)]) == 3  # neither has NVLink between all GPUs
    assert [(one["fits"], one["capacity_gib"]) for one in plans] == [(True, pytest.approx(40)), (None, None)]
    unknown = ["the memory of GRID A100X-40C is not known" in str(one["notes"]) for one in plans]
    assert unknown == [False, True]


def test_the_environment_names_no_host_and_no_user() -> None:
    text = json.dumps(environment(nodes=4))
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
    assert getpass.getuser() == "root" or getpass.getuser() not in text
    assert json.loads(text)["hosts"] == 4
