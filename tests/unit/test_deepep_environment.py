"""What the doctor says of DeepEP on made-up machines, and of ranks that crash, hang or return wrong tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_smi_support import with_files

from moelab import doctor, health
from moelab.cli import main
from moelab.errors import BadInput
from moelab.finding import Finding, Severity, fault, known_faults
from moelab.health import deepep, smoke
from moelab.health.deepep import examine_environment
from moelab.health.links import nvlink_matrix
from moelab.health.smoke import smoke_test
from moelab.machine import Machine, run_command, this_machine

V2 = {"__init__.py": "__version__ = '2.1.0'\n", "buffers/elastic.py": "", "_C.cpython-312-x86_64-linux-gnu.so": ""}
V1 = {"__init__.py": "", "buffer.py": "", "../deep_ep_cpp.cpython-312-x86_64-linux-gnu.so": ""}
HYBRID = {"__init__.py": "", "buffer.py": "", "hybrid_ep_buffer.py": "", "../hybrid_ep_cpp.cpython-312.so": ""}
OPEN_DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"}
PORT_UP = {"state": "4: ACTIVE\n", "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n"}
PORT_DOWN = {**PORT_UP, "state": "1: DOWN\n", "rate": "10 Gb/sec (4X SDR)\n"}
IBSTAT = "CA 'mlx5_0'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n"


def topology(*rows: str) -> str:
    """What ``nvidia-smi topo -m`` prints, underlined headings and legend included."""
    heads = "".join(f"\t\x1b[4mGPU{number}\x1b[0m" for number in range(len(rows)))
    lines = [f"GPU{number}\t" + "\t".join(f" {kind} " for kind in row.split()) for number, row in enumerate(rows)]
    tails = [f"{line}\t0-47\t0\t\tN/A" for line in lines]
    return f"{heads}\tCPU Affinity\tNUMA Affinity\n" + "\n".join(tails) + "\n\nLegend:\n\n  X    = Self\n"


TWO_LINKED, TWO_PCIE = topology("X NV18", "NV18 X"), topology("X PIX", "PIX X")
BRIDGED = topology("X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X")


def made(
    root: Path,
    *,
    deepep: Mapping[str, str] | None = None,
    version: str | None = None,
    direct_url: str | None = None,
    nccl: str | None = "2.30.7",
    header: str | None = None,
    wheels: Sequence[str] = ("nvidia-nccl-cu13",),
    cards: Mapping[str, Mapping[str, str]] | None = None,
    modules: str = "nvidia_peermem 16384 0\n",
    nvcc: bool = True,
    topo: str | None = TWO_LINKED,
    ibstat: str | None = IBSTAT,
    memlock: int | None = None,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Machine:
    """A machine in a folder: site-packages, /sys and /proc."""
    site = root / "site"
    written: dict[str, str] = {f"site/deep_ep/{name}": text for name, text in (deepep or {}).items()}
    if version is not None:
        written["site/deep_ep-x.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: deep_ep\nVersion: {version}\n"
        written["site/deep_ep-x.dist-info/INSTALLER"] = "pip\n"
    if direct_url is not None:
        written["site/deep_ep-x.dist-info/direct_url.json"] = direct_url
    for wheel in wheels:
        written[f"site/{wheel.replace('-', '_')}-1.dist-info/METADATA"] = f"Name: {wheel}\nVersion: {nccl}\n"
    if nccl is not None:
        written["site/nvidia/nccl/lib/libnccl.so.2"] = f"\x7fELF\0junk\0NCCL version {nccl}+cuda13.0\0"
        written["site/nvidia/nccl/include/nccl.h"] = nccl_header(header or nccl)
    for card, port in (cards or {}).items():
        written |= {f"sys/class/infiniband/{card}/ports/1/{name}": text for name, text in port.items()}
    written |= {f"sys/class/net/{name}/mtu": "1500\n" for name in ("eth0", "lo")}
    written |= {"proc/modules": modules, **({"usr/local/cuda/bin/nvcc": ""} if nvcc else {}), **(files or {})}
    with_files(root, written)
    answers = {"nvidia-smi": topo, "ibstat": ibstat}
    return Machine(
        root=root, env=dict(env or {}), run=lambda command: answers[command[0]], search=(site,), memlock_bytes=memlock
    )


def nccl_header(version: str) -> str:
    named = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    return "".join(f"#define NCCL_{part} {number}\n" for part, number in named)


def faults(machine: Machine, expected: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    return {one.name: one for one in examine_environment(machine, **(expected or {})) if not one.ok}


def seen(machine: Machine, name: str, expected: Mapping[str, Any] | None = None) -> Finding:
    (one,) = [one for one in examine_environment(machine, **(expected or {})) if one.name == name]
    return one


CARDS = {"mlx5_0": PORT_UP, "mlx5_1": PORT_UP}
CLUSTER = {"nodes": 4, "nic_gb_s": 50}


def test_a_laptop_has_nothing_to_complain_about(tmp_path: Path) -> None:
    machine = made(tmp_path, nccl=None, wheels=(), topo=None, nvcc=False, memlock=8 << 20, modules="")
    assert faults(machine) == {}
    assert seen(machine, "DeepEP").found.startswith("not installed")
    assert seen(machine, "NVLink").found == "unknown: `nvidia-smi topo -m` is missing or fails"
    assert seen(machine, "locked memory").found.startswith("8 MiB")


def test_two_linked_gpus_with_deepep_v2(tmp_path: Path) -> None:
    machine = made(tmp_path, deepep=V2, version="2.1.0+dd758ca", env={"EP_DISABLE_GIN": "1"})
    assert faults(machine) == {}
    assert seen(machine, "DeepEP").found == "V2 (ElasticBuffer, on NCCL) 2.1.0+dd758ca"
    assert seen(machine, "NCCL").found == "loaded 2.30.7, DeepEP built against 2.30.7"
    assert seen(machine, "NVLink").found == "all 1 pairs of 2 GPUs (NV18)"
    assert "NVLink only" in seen(machine, "GIN").found


def test_a_node_of_a_cluster_with_deepep_v2(tmp_path: Path) -> None:
    machine = made(tmp_path, deepep=V2, cards=CARDS, env={"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"})
    assert faults(machine, CLUSTER) == {}
    assert seen(machine, "RDMA devices", CLUSTER).found == "2 of 2 ports active (InfiniBand)"
    assert "GDAKI if the card supports it, else proxy" in seen(machine, "GIN", CLUSTER).found
    proxied = replace(machine, env={**machine.env, "NCCL_GIN_TYPE": "2"})
    assert "type proxy" in seen(proxied, "GIN", CLUSTER).found
    assert seen(machine, "locked memory").found == "unlimited"


@pytest.mark.parametrize(
    ("what", "expected", "name", "severity", "words"),
    [
        # which DeepEP
        ({"deepep": V1, "version": "1.0.0"}, None, "DeepEP", "error", "PyPI's `deep-ep` is an upload of DeepEP V1's"),
        ({"deepep": V1, "version": "1.2.1+9af0e0d"}, None, "DeepEP", "error", "DeepEP 2.0"),
        ({"deepep": V1, "version": "1.2.1", "direct_url": '{"url": "file:x"}'}, None, "DeepEP", "error", "DeepEP 2.0"),
        ({"deepep": {"__init__.py": ""}}, None, "DeepEP", "error", "an unknown package named deep_ep"),
        ({"deepep": {"__init__.py": "", "buffers/elastic.py": ""}}, None, "DeepEP", "error", "not compiled"),
        ({"deepep": V2, "nvcc": False}, None, "CUDA compiler", "error", "compiles a kernel whenever"),
        # which NCCL
        ({"deepep": V2, "nccl": "2.28.9"}, None, "NCCL", "error", "2.30.4"),
        ({"deepep": V2, "nccl": None, "wheels": ()}, None, "NCCL", "error", "no libnccl"),
        ({"deepep": V2, "header": "2.30.4"}, None, "NCCL", "error", "built against 2.30.4"),
        ({"wheels": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}, None, "NCCL packages", "warning", "the same folder"),
        # the fabric
        ({"deepep": V2, "topo": TWO_PCIE}, None, "NVLink", "error", "missing between 1 of 1 pairs: 0-1 (PIX)"),
        ({"deepep": V2, "topo": BRIDGED}, None, "NVLink", "error", "4 of 6 pairs"),
        ({"deepep": V2}, None, "GIN", "warning", "export EP_DISABLE_GIN=1"),
        ({"deepep": V2}, CLUSTER, "GIN", "error", "NCCL GIN is unavailable"),
        ({"deepep": V2, "cards": CARDS, "env": {"EP_DISABLE_GIN": "1"}}, CLUSTER, "GIN", "error", "cannot reach"),
        ({"deepep": V2, "cards": CARDS, "env": {"NCCL_GIN_ENABLE": "0"}}, CLUSTER, "GIN", "error", "not available"),
        ({}, CLUSTER, "RDMA devices", "error", "/dev/infiniband"),
        ({"cards": {"mlx5_0": PORT_UP, "mlx5_1": PORT_DOWN}}, CLUSTER, "RDMA devices", "warning", "mlx5_1 (1: DOWN)"),
        ({"cards": {"mlx5_0": PORT_DOWN}}, CLUSTER, "RDMA devices", "error", "0 of 1 ports active"),
        ({"cards": CARDS}, {"nic_gb_s": 100}, "RDMA rate", "warning", "mlx5_0 50 GB/s"),
        ({"cards": CARDS, "modules": ""}, None, "GPUDirect RDMA", "warning", "modprobe nvidia_peermem"),
        ({"cards": CARDS, "memlock": 64 << 10}, None, "locked memory", "warning", "0.0625 MiB"),
        ({"deepep": V2, "cards": CARDS, "ibstat": None}, None, "RDMA bandwidth for DeepEP", "warning", "diags"),
        # variables
        ({"env": {"NCCL_P2P_DISABLE": "1"}}, None, "NCCL_P2P_DISABLE", "error", "unset"),
        ({"env": {"NCCL_CUMEM_ENABLE": "0"}}, None, "NCCL_CUMEM_ENABLE", "error", "symmetric window"),
        ({"env": {"EP_SUPPRESS_NCCL_CHECK": "1"}}, None, "EP_SUPPRESS_NCCL_CHECK", "warning", "go unnoticed"),
        ({"env": {"NCCL_IB_HCA": "mlx5_9"}, "cards": CARDS}, None, "NCCL_IB_HCA", "error", "there is no mlx5_9 here"),
        ({"env": {"NCCL_IB_HCA": "=mlx5:1"}, "cards": CARDS}, None, "NCCL_IB_HCA", "error", "there is no mlx5 here"),
        ({"env": {"UCX_NET_DEVICES": "mlx5_0:1,ib7"}, "cards": CARDS}, None, "UCX_NET_DEVICES", "error", "no ib7"),
        ({"env": {"NVSHMEM_HCA_LIST": "mlx5_4:1"}, "cards": CARDS}, None, "NVSHMEM_HCA_LIST", "error", "no mlx5_4"),
        ({"env": {"NCCL_SOCKET_IFNAME": "bond0"}}, None, "NCCL_SOCKET_IFNAME", "error", "has eth0, lo"),
    ],
)  # fmt: skip
def test_one_fault_is_named_and_explained(
    tmp_path: Path, what: dict[str, Any], expected: Mapping[str, Any] | None, name: str, severity: str, words: str
) -> None:
    found = faults(made(tmp_path, **what), expected)
    assert name in found
    assert found[name].severity == severity
    assert words in json.dumps(found[name].to_json())


@pytest.mark.parametrize(
    ("what", "expected", "name"),
    [
        ({"deepep": V2, "nccl": "2.31.0", "header": "2.30.7"}, None, "NCCL"),
        ({"cards": CARDS, "modules": "", "files": OPEN_DRIVER}, None, "GPUDirect RDMA"),
        ({"deepep": HYBRID}, None, "DeepEP"),
        ({"topo": topology("X")}, None, "NVLink"),
        ({"topo": BRIDGED, "deepep": V2, "env": {"CUDA_VISIBLE_DEVICES": "2,3"}}, None, "NVLink"),
        ({"topo": TWO_PCIE}, None, "NVLink"),
        ({"env": {"NCCL_IB_HCA": "mlx5"}, "cards": CARDS}, None, "communication variables"),
        ({"env": {"NCCL_IB_HCA": "^mlx5_9", "UCX_NET_DEVICES": "all"}}, None, "communication variables"),
    ],
)  # fmt: skip
def test_what_is_right_is_not_complained_about(
    tmp_path: Path, what: dict[str, Any], expected: Mapping[str, Any] | None, name: str
) -> None:
    machine = made(tmp_path, **what)
    assert seen(machine, name, expected).ok
    assert not [one for one in faults(machine, expected) if one.startswith(("NCCL_", "UCX_"))]


def test_a_preloaded_nccl_is_the_one_that_counts(tmp_path: Path) -> None:
    other = {"opt/libnccl.so.2": "NCCL version 2.27.3+cuda12.9"}
    machine = made(tmp_path, deepep=V2, files=other, env={"LD_PRELOAD": "/opt/libnccl.so.2", "EP_DISABLE_GIN": "1"})
    assert faults(machine)["NCCL"].found == "loaded 2.27.3, DeepEP built against 2.30.7"


def test_deepep_remembers_the_nccl_that_it_was_built_with(tmp_path: Path) -> None:
    kept = {**V2, "envs.py": "persistent_envs = dict()\npersistent_envs['EP_NCCL_ROOT_DIR'] = '/opt/nccl'\n"}
    header = {"opt/nccl/include/nccl.h": nccl_header("2.30.4")}
    assert "built against 2.30.4" in faults(made(tmp_path, deepep=kept, files=header))["NCCL"].found


@given(st.integers(1, 16), st.data())
def test_the_topology_is_read_back(gpus: int, data: Any) -> None:
    kinds = st.sampled_from(["NV1", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    matrix = [["X" if a == b else data.draw(kinds) for b in range(gpus)] for a in range(gpus)]
    assert nvlink_matrix(topology(*(" ".join(row) for row in matrix))) == matrix


def test_commands_that_are_missing_or_fail_are_none(tmp_path: Path) -> None:
    assert run_command([str(tmp_path / "missing")]) is None
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run_command([sys.executable, "-c", "print('here')"]) == "here\n"


def test_a_fault_must_be_explained() -> None:
    with pytest.raises(ValueError, match="without cause, consequence and remedy"):
        Finding(name="a cable", severity="error", found="loose")


@pytest.mark.parametrize("key", known_faults())
def test_a_known_fault_is_explained_and_is_looked_for(key: str) -> None:
    entry = known_faults()[key]
    words = {word: 1.0 for text in entry.values() for _, word, _, _ in Formatter().parse(text) if word}
    found = fault(key, "seen", **words)
    assert found.severity in get_args(Severity)
    lines = found.as_lines()
    assert found.ok or [line.split(":")[0].strip() for line in lines[1:]] == ["because", "so", "do"]
    assert "{" not in "".join(lines)
    sources = [file.read_text() for file in Path(health.__file__).parents[1].glob("*/*.py")]
    assert "sign" in entry or any(f'"{key}"' in source for source in sources)


def test_a_node_reports_although_a_package_is_broken() -> None:
    code = "import sys; from moelab.health.node import report; report(); print({'torch', 'pandas', 'pydantic'} & "
    code += "sys.modules.keys())"
    assert run_command([sys.executable, "-c", code]) == "set()\n"
    assert this_machine().root == Path("/")


# --- the smoke test: processes that end in every way


def python(code: str) -> list[str]:
    """A stand-in for the rank's program; ``rank`` and ``folder`` are its arguments."""
    head = "import os, pathlib, signal, sys, time, json\nrank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[3])\n"
    step = "def step(text): (folder / f'step{rank}').write_text(text)\n"
    return [sys.executable, "-c", head + step + code]


def ended(code: str, machine: Machine, *, gpus: int = 2, timeout_s: float = 60) -> Finding:
    return smoke_test(machine=machine, gpu_count=gpus, program=python(code), timeout_s=timeout_s)


@pytest.fixture
def with_deepep(tmp_path: Path) -> Machine:
    return made(tmp_path, deepep=V2, version="2.1.0+dd758ca")


def test_a_segmentation_fault_becomes_a_sentence(with_deepep: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "GRACE_S", 0.2)
    crash = "step('opening the buffer')\nif rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)"
    found = ended(crash, with_deepep)
    assert found.severity == "error"
    assert found.found == "rank 1 was ended by SIGSEGV (segmentation fault) while opening the buffer"
    assert "communicator" in found.cause
    assert "ep_backend=deepep" in found.consequence
    assert "rebuild DeepEP" in found.remedy


def test_the_rank_that_crashed_is_named_and_not_the_one_that_lost_it(with_deepep: Machine) -> None:
    crash = (
        "step('dispatching and combining')\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGABRT)\n"
        "time.sleep(1); raise ConnectionError('connection closed by peer')"
    )
    assert ended(crash, with_deepep).found == "rank 1 was ended by SIGABRT (abort) while dispatching and combining"
    raised = "if rank == 0: raise ValueError('the cause')\ntime.sleep(1); os.kill(os.getpid(), signal.SIGABRT)"
    assert ended(raised, with_deepep).found == "rank 0 failed while starting: ValueError: the cause"


def test_a_rank_that_hangs_is_ended(with_deepep: Machine) -> None:
    found = ended("step('dispatching and combining')\nif rank == 0: time.sleep(600)", with_deepep, timeout_s=2)
    assert found.found == "rank 0 was still dispatching and combining after 2 s"


def test_what_a_rank_raises_is_told_with_its_cause(with_deepep: Machine) -> None:
    found = ended("raise RuntimeError('something new')", with_deepep)
    assert found.found.endswith("failed while starting: RuntimeError: something new")
    assert "DeepEP raised this" in found.cause
    assert "compiles its kernels" in ended("raise RuntimeError('NVCC compilation failed')", with_deepep).cause


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("NCCL GIN is unavailable. This is usually due to a network configuration issue", "GPU-initiated networking"),
        ("Duplicate NCCL runtime found in the current system", "a different NCCL"),
        ("NVCC compilation failed", "compiles its kernels at run time"),
        ("CUDA error: out of memory", "another process occupies the GPU's memory"),
        ("CUDA error: no kernel image is available for execution on the device", "another GPU architecture"),
        ("libnvshmem_host.so.3: cannot open shared object file", "a different PyTorch, CUDA or NVSHMEM"),
    ],
)
def test_known_messages_are_signs_of_a_fault(message: str, cause: str) -> None:
    assert cause in known_faults()[smoke.sign_of(f"RuntimeError: {message}")]["cause"]


def test_ranks_that_end_well(with_deepep: Machine, tmp_path: Path) -> None:
    write = (
        "result = {'relative_error': 0.001 * (rank + 1), 'version': '2.1.0'}\n"
        "(folder / f'result{rank}.json').write_text(json.dumps(result))\nassert sys.argv[4] == 'DEVICE'\n"
    )
    well = ended(write.replace("DEVICE", "cuda"), with_deepep)
    moved = "2 ranks sent tokens to their experts and back, forward and backward; relative error 2.0e-03"
    assert (well.severity, well.found) == ("ok", f"DeepEP 2.1.0: {moved}")
    v1 = made(tmp_path / "v1", deepep=V1)
    for machine, gpus, why in ((with_deepep, 1, "1 GPU where 2 are needed"), (v1, 8, "DeepEP V2 is not installed")):
        note = ended(write.replace("DEVICE", "cpu"), machine, gpus=gpus)
        assert note.severity == "note"
        assert note.found == f"DeepEP was not run: {why}. Over gloo on the CPU {moved}"


def test_two_real_ranks_over_gloo(tmp_path: Path) -> None:
    found = smoke_test(machine=made(tmp_path), gpu_count=0)
    assert found.severity == "note", found
    assert "relative error" in found.found


def test_the_doctor_shows_the_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in data["deepep"]} >= {"DeepEP", "NVLink", "RDMA devices", "locked memory"}
    crash = ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    monkeypatch.setattr(doctor, "smoke_test", lambda: smoke_test(program=[sys.executable, *crash], gpu_count=0))
    assert main(["doctor", "--smoke"]) == 1
    text = capsys.readouterr().out
    assert "\nDeepEP and what it needs\n" in text
    assert re.search(rf"--  {smoke.NAME}: rank [01] was ended by SIGSEGV", text)


def test_the_doctor_holds_the_network_against_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = {"mlx5_0": {**PORT_UP, "rate": "200 Gb/sec (4X HDR)"}}
    for name, cards, words in (
        ("a", {}, "DeepEP cannot send between 32 nodes"),
        ("b", half, "the profile says 50 GB/s"),
    ):
        monkeypatch.setattr(deepep, "this_machine", partial(made, tmp_path / name, cards=cards))
        found = [line for one in doctor.examine(hardware="b200_x256").deepep for line in one.as_lines()]
        assert any(words in line for line in found)
        assert not any(words in line for one in doctor.examine(hardware="h100_node").deepep for line in one.as_lines())
    with pytest.raises(BadInput, match="there is no such profile"):
        doctor.examine(hardware="a_cluster")
    assert main(["doctor", "--hardware", "a_cluster"]) == 2
    assert "there is no such profile" in capsys.readouterr().err
