"""What the doctor says of DeepEP on made-up machines, and of ranks that crash, hang or return wrong tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, get_args
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvidia_smi_support import H100, forget, made_machine, nvidia_smi

from moelab import health
from moelab.cli import main
from moelab.finding import Finding, Severity, fault, known_faults
from moelab.health import deepep, doctor, smoke
from moelab.health.deepep import examine_environment, nvlink_matrix
from moelab.health.smoke import smoke_test
from moelab.launch import capability
from moelab.machine import Machine, run_command

V2 = {"__init__.py": "__version__ = '2.1.0'\n", "buffers/elastic.py": "", "_C.cpython-312-x86_64-linux-gnu.so": ""}
V1 = {"__init__.py": "", "buffer.py": "", "../deep_ep_cpp.cpython-312-x86_64-linux-gnu.so": ""}
HYBRID = {"__init__.py": "", "buffer.py": "", "hybrid_ep_buffer.py": "", "../hybrid_ep_cpp.cpython-312.so": ""}
OTHER_NCCL = "persistent_envs = dict()\npersistent_envs['EP_NCCL_ROOT_DIR'] = '/opt/nccl'\n"
PORT_UP = {"state": "4: ACTIVE\n", "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n"}
UNMANAGED = {**PORT_UP, "state": "2: INIT\n", "phys_state": "5: LinkUp\n"}
ETHERNET = {**PORT_UP, "rate": "40 Gb/sec (4X QDR)\n", "link_layer": "Ethernet\n"}
PORT_DOWN = {**PORT_UP, "state": "1: DOWN\n", "rate": "10 Gb/sec (4X SDR)\n"}
HALF = {"mlx5_0": {**PORT_UP, "rate": "200 Gb/sec (4X HDR)\n"}}
CARDS = {"mlx5_0": PORT_UP, "mlx5_1": PORT_UP}
FRONT = {**CARDS, "mlx5_2": {**PORT_UP, "rate": "100 Gb/sec (4X EDR)\n"}, "mlx5_3": PORT_DOWN}
EFA: dict[str, Any] = {"modules": "efa 1 0\nnvidia_peermem 16384 0\n", "ibstat": None}
EFA |= {"cards": {"rdmap79s0": {**PORT_UP, "link_layer": "Unspecified\n"}}}
OLD_MLX5 = {"usr/lib/x86_64-linux-gnu/libmlx5.so.1": "\x7fELF MLX5_1.0 MLX5_1.16 MLX5_1.17"}
NEW_MLX5 = {"usr/lib64/libmlx5.so.1": "\x7fELF MLX5_1.0 MLX5_1.9 MLX5_1.25"}
IBSTAT = "CA 'mlx5_0'\n\tCA type: MT4129\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"


def topology(*rows: str) -> str:
    """What ``nvidia-smi topo -m`` prints, underlined headings and legend included."""
    heads = "".join(f"\t\x1b[4mGPU{number}\x1b[0m" for number in range(len(rows)))
    lines = [f"GPU{number}\t" + "\t".join(f" {kind} " for kind in row.split()) for number, row in enumerate(rows)]
    tails = [f"{line}\t0-47\t0\t\tN/A" for line in lines]
    return f"{heads}\tCPU Affinity\tNUMA Affinity\n" + "\n".join(tails) + "\n\nLegend:\n\n  X    = Self\n"


TWO_LINKED, TWO_PCIE = topology("X NV18", "NV18 X"), topology("X PIX", "PIX X")
BRIDGED = topology("X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X")


def nccl_header(version: str) -> str:
    named = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    return "".join(f"#define NCCL_{part} {number}\n" for part, number in named)


def node(
    root: Path,
    *,
    deepep: Mapping[str, str] = V2,
    version: str | None = None,
    nccl: str | None = "2.30.7",
    header: str | None = None,
    wheels: Sequence[str] = ("nvidia-nccl-cu13",),
    cards: Mapping[str, Mapping[str, str]] = CARDS,
    modules: str = "nvidia_peermem 16384 0\n",
    nvcc: bool = True,
    topo: str | None = TWO_LINKED,
    ibstat: str | None = IBSTAT,
    memlock: int | None = None,
    env: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Machine:
    """A node of a cluster with DeepEP V2 in a folder: site-packages, /sys and /proc."""
    written: dict[str, str] = {f"site/deep_ep/{name}": text for name, text in deepep.items()}
    if version is not None:
        written["site/deep_ep-x.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: deep_ep\nVersion: {version}\n"
        written["site/deep_ep-x.dist-info/INSTALLER"] = "pip\n"
    for wheel in wheels:
        written[f"site/{wheel.replace('-', '_')}-1.dist-info/METADATA"] = f"Name: {wheel}\nVersion: {nccl}\n"
    if nccl is not None:
        written["site/nvidia/nccl/lib/libnccl.so.2"] = f"\x7fELF\0junk\0NCCL version {nccl}+cuda13.0\0"
        written["site/nvidia/nccl/include/nccl.h"] = nccl_header(header or nccl)
    for card, port in cards.items():
        written |= {f"sys/class/infiniband/{card}/ports/1/{name}": text for name, text in port.items()}
    written |= {f"sys/class/net/{name}/mtu": "1500\n" for name in ("eth0", "lo")}
    written |= {"proc/modules": modules, **({"usr/local/cuda/bin/nvcc": ""} if nvcc else {}), **(files or {})}
    return made_machine(
        root, written, {"nvidia-smi topo": topo, "ibstat": ibstat}, env=env or {}, memlock_bytes=memlock
    )


LAPTOP: dict[str, Any] = {"deepep": {}, "nccl": None, "wheels": (), "cards": {}, "modules": "", "nvcc": False}
LAPTOP |= {"nodes": 1, "topo": None, "memlock": 8 << 20}
NVLINK_ONLY: dict[str, Any] = {"nodes": 1, "cards": {}, "env": {"EP_DISABLE_GIN": "1"}, "version": "2.1.0+dd758ca"}
OPEN_MODULES = {"modules": "", "files": {"proc/driver/nvidia/version": OPEN_DRIVER}}


def examined(root: Path, *, nodes: int = 4, nic_gb_s: float | None = 50, **what: Any) -> dict[str, Finding]:
    findings = examine_environment(node(root, **what), nodes=nodes, nic_gb_s=nic_gb_s)
    return {one.name: one for one in findings}


@pytest.mark.parametrize(
    ("what", "name", "found"),
    [
        (LAPTOP, "DeepEP", "not installed; arms with deepep need it, CUDA GPUs and NVLink"),
        (LAPTOP, "NVLink", "unknown: `nvidia-smi topo -m` is missing or fails"),
        (LAPTOP, "locked memory", "8 MiB; with RDMA it should be unlimited"),
        (LAPTOP, "RDMA devices", "none: DeepEP works within this node only"),
        (NVLINK_ONLY, "DeepEP", "V2 (ElasticBuffer, on NCCL) 2.1.0+dd758ca"),
        (NVLINK_ONLY, "NVLink", "all 1 pairs of 2 GPUs (NV18)"),
        (NVLINK_ONLY, "GIN", "off (EP_DISABLE_GIN): NVLink only"),
        ({}, "RDMA devices", "2 of 2 ports active (InfiniBand)"),
        ({}, "locked memory", "unlimited"),
        ({}, "GIN", "possible; type chosen by NCCL: GDAKI if the card supports it, else proxy"),
        ({}, "CUDA compiler", "/usr/local/cuda/bin/nvcc"),
        ({}, "NCCL", "loaded 2.30.7, DeepEP built against 2.30.7"),
        ({"nccl": "2.31.0", "header": "2.30.7"}, "NCCL", "loaded 2.31.0, DeepEP built against 2.30.7"),
        ({"env": {"NCCL_GIN_TYPE": "2"}}, "GIN", "possible; type proxy"),
        ({"deepep": HYBRID}, "DeepEP", "hybrid-ep (HybridEPBuffer)"),
        ({"topo": topology("X")}, "NVLink", "one GPU, no pairs"),
        ({"topo": BRIDGED, "env": {"CUDA_VISIBLE_DEVICES": "2,3"}}, "NVLink", "all 1 pairs of 2 GPUs (NV12)"),
        ({"deepep": {}, "topo": TWO_PCIE}, "NVLink", "missing between 1 of 1 pairs: 0-1 (PIX)"),
        (OPEN_MODULES, "GPUDirect RDMA", "open kernel modules, which export GPU memory (dma-buf)"),
        ({"env": {"NCCL_IB_HCA": "mlx5_0:1,mlx5_1"}}, "communication variables", "NCCL_IB_HCA=mlx5_0:1,mlx5_1"),
        ({"env": {"NCCL_IB_HCA": "mlx5"}}, "communication variables", "NCCL_IB_HCA=mlx5"),
        ({"env": {"NCCL_IB_HCA": "^mlx5_9"}}, "communication variables", "NCCL_IB_HCA=^mlx5_9"),
        ({"env": {"UCX_NET_DEVICES": "all"}}, "communication variables", "UCX_NET_DEVICES=all"),
        ({"files": NEW_MLX5}, "GIN", "possible; type chosen by NCCL: GDAKI if the card supports it, else proxy"),
        # the front-end network's card, and one that is down, where NCCL does not use them
        (
            {"cards": FRONT, "env": {"NCCL_IB_HCA": "=mlx5_0,mlx5_1:1"}},
            "RDMA devices",
            "2 of 2 ports active (InfiniBand); NCCL_IB_HCA leaves out 2",
        ),
        (
            {"cards": FRONT, "env": {"NCCL_IB_HCA": "^mlx5_2,mlx5_3"}},
            "RDMA devices",
            "2 of 2 ports active (InfiniBand); NCCL_IB_HCA leaves out 2",
        ),
        ({**EFA, "nodes": 1, "env": {"EP_DISABLE_GIN": "1"}}, "RDMA devices", "1 of 1 ports active (EFA)"),
        (
            {**EFA, "files": {"opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so": ""}},
            "RDMA devices",
            "1 of 1 ports active (EFA)",
        ),
    ],
)
def test_what_is_right_is_not_complained_about(tmp_path: Path, what: dict[str, Any], name: str, found: str) -> None:
    findings = examined(tmp_path, **what)
    assert all(one.ok for one in findings.values())
    assert findings[name].found == found


@pytest.mark.parametrize(
    ("what", "complaint", "words"),
    [
        # which DeepEP
        ({"deepep": V1, "version": "1.0.0"}, "error DeepEP", "PyPI's `deep-ep` is an upload of DeepEP V1's"),
        ({"deepep": V1, "version": "1.2.1+9af0e0d"}, "error DeepEP", "DeepEP 2.0"),
        ({"deepep": V1, "version": "1.2.1", "files": {"site/deep_ep-x.dist-info/direct_url.json": '{"url": "file:x"}'}},
         "error DeepEP", "DeepEP 2.0"),
        ({"deepep": {"__init__.py": ""}}, "error DeepEP", "an unknown package named deep_ep"),
        ({"deepep": {"__init__.py": "", "buffers/elastic.py": ""}}, "error DeepEP", "not compiled"),
        ({"nvcc": False}, "error CUDA compiler", "compiles a kernel whenever"),
        # which NCCL
        ({"nccl": "2.28.9"}, "error NCCL", "2.30.4"),
        ({"nccl": None, "wheels": ()}, "error NCCL", "no libnccl"),
        ({"header": "2.30.4"}, "error NCCL", "loaded 2.30.7, DeepEP built against 2.30.4"),
        ({"files": {"opt/libnccl.so.2": "NCCL version 2.27.3+cuda12.9"}, "env": {"LD_PRELOAD": "/opt/libnccl.so.2"}},
         "error NCCL", "loaded 2.27.3, DeepEP built against 2.30.7"),
        ({"deepep": {**V2, "envs.py": OTHER_NCCL}, "files": {"opt/nccl/include/nccl.h": nccl_header("2.30.4")}},
         "error NCCL", "DeepEP built against 2.30.4"),
        ({"wheels": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}, "warning NCCL packages", "the same folder"),
        # the fabric
        ({"topo": BRIDGED}, "error NVLink", "missing between 4 of 6 pairs: 0-2 (SYS), 0-3 (SYS)"),
        ({"cards": {}, "nodes": 1}, "warning GIN", "export EP_DISABLE_GIN=1"),
        ({"env": {"EP_DISABLE_GIN": "1"}}, "error GIN", "cannot reach"),
        ({"env": {"NCCL_GIN_ENABLE": "0"}}, "error GIN", "NCCL GIN is unavailable"),
        ({"deepep": {}, "cards": {}}, "error RDMA devices", "/dev/infiniband"),
        ({"cards": {**CARDS, "mlx5_1": PORT_DOWN}}, "warning RDMA devices", "mlx5_1 (1: DOWN)"),
        ({"deepep": {}, "cards": {"mlx5_0": PORT_DOWN}}, "error RDMA devices", "0 of 1 ports active"),
        ({"deepep": {}, "cards": {"mlx5_0": UNMANAGED}}, "error RDMA devices", "subnet manager"),
        # and not the Ethernet card, as of Azure's ND H100 v5
        ({"cards": {**HALF, "mlx5_an0": ETHERNET}}, "warning RDMA rate", '"found": "mlx5_0 25 GB/s"'),
        ({"cards": {**HALF, "mlx5_1": PORT_UP}, "nic_gb_s": None}, "warning RDMA rate", "the others have 50 GB/s"),
        ({"cards": FRONT, "env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1,mlx5_2"}}, "warning RDMA rate", "mlx5_2 12.5 GB/s"),
        (EFA, "warning GIN", "the network is EFA, and there is no aws-ofi-nccl plugin"),
        ({"files": OLD_MLX5}, "warning GIN", "up to MLX5_1.17, and NCCL's GIN needs MLX5_1.25"),
        ({"modules": ""}, "warning GPUDirect RDMA", "modprobe nvidia_peermem"),
        ({"memlock": 64 << 10}, "warning locked memory", "0.0625 MiB"),
        ({"ibstat": None}, "warning RDMA bandwidth for DeepEP", "diags"),
        # variables
        ({"env": {"NCCL_P2P_DISABLE": "1"}}, "error NCCL_P2P_DISABLE", "unset"),
        ({"env": {"NCCL_CUMEM_ENABLE": "0"}}, "error NCCL_CUMEM_ENABLE", "symmetric window"),
        ({"env": {"EP_SUPPRESS_NCCL_CHECK": "1"}}, "warning EP_SUPPRESS_NCCL_CHECK", "go unnoticed"),
        ({"env": {"NCCL_IB_HCA": "mlx5_9"}}, "error NCCL_IB_HCA", "there is no mlx5_9 here"),
        ({"env": {"NCCL_IB_HCA": "=mlx5:1"}}, "error NCCL_IB_HCA", "there is no mlx5 here"),
        ({"env": {"UCX_NET_DEVICES": "mlx5_0:1,ib7"}}, "error UCX_NET_DEVICES", "no ib7"),
        ({"env": {"NVSHMEM_HCA_LIST": "mlx5_4:1"}}, "error NVSHMEM_HCA_LIST", "no mlx5_4"),
        ({"env": {"NCCL_SOCKET_IFNAME": "bond0"}}, "error NCCL_SOCKET_IFNAME", "has eth0, lo"),
    ],
)  # fmt: skip
def test_one_fault_is_named_and_explained_and_no_other(
    tmp_path: Path, what: dict[str, Any], complaint: str, words: str
) -> None:
    (found,) = [one for one in examined(tmp_path, **what).values() if not one.ok]
    assert f"{found.severity} {found.name}" == complaint
    assert words in json.dumps(found.to_json())


@given(st.integers(1, 16), st.data())
def test_the_topology_is_read_back(gpus: int, data: Any) -> None:
    kinds = st.sampled_from(["NV1", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    matrix = [["X" if a == b else data.draw(kinds) for b in range(gpus)] for a in range(gpus)]
    assert nvlink_matrix(topology(*(" ".join(row) for row in matrix))) == matrix


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
    assert run_command([sys.executable, "-c", f"{code} sys.modules.keys())"]) == "set()\n"
    assert run_command([sys.executable, "-c", "print('here'); raise SystemExit(3)"]) is None


# --- the smoke test: processes that end in every way


def ended(code: str, machine: Machine, *, gpus: int = 2, timeout_s: float = 60) -> Finding:
    """Of a stand-in for the rank's program; ``rank`` and ``folder`` are its arguments."""
    head = "import os, pathlib, signal, sys, time, json\nrank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[3])\n"
    step = "def step(text): (folder / f'step{rank}').write_text(text)\n"
    program = [sys.executable, "-c", head + step + code]
    return smoke_test(machine=machine, gpu_count=gpus, program=program, timeout_s=timeout_s)


CRASH = "step('opening the buffer')\nif rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)"
LOST = (
    "step('dispatching and combining')\nif rank == 1: os.kill(os.getpid(), signal.SIGABRT)\n"
    "time.sleep(1); raise ConnectionError('connection closed by peer')"
)
RAISED = "if rank == 1: raise ValueError('the cause')\ntime.sleep(1); os.kill(os.getpid(), signal.SIGABRT)"
HANGS = "step('dispatching and combining')\nif rank == 1: time.sleep(600)"
KNOWN = "if rank == 1: raise RuntimeError('NVCC compilation failed')"


@pytest.mark.parametrize(
    ("code", "found", "cause"),
    [
        (CRASH, "was ended by SIGSEGV (segmentation fault) while opening the buffer", "a communicator that does not"),
        # the rank that failed first is named, and not the one that lost it
        (LOST, "was ended by SIGABRT (abort) while dispatching and combining", "compiled code of DeepEP or torch"),
        (RAISED, "failed while starting: ValueError: the cause", "DeepEP raised this"),
        (KNOWN, "failed while starting: RuntimeError: NVCC compilation failed", "V2 compiles its kernels"),
        (HANGS, "was still dispatching and combining after 2 s", "the ranks wait for each other"),
    ],
)
def test_how_a_rank_ended_is_a_sentence(tmp_path: Path, code: str, found: str, cause: str) -> None:
    one = ended(code, node(tmp_path), timeout_s=2)
    assert (one.severity, one.found) == ("error", f"rank 1 {found}")
    assert cause in one.cause
    assert "ep_backend=deepep" in one.consequence


def test_known_messages_are_signs_of_a_fault() -> None:
    for message, cause in {
        "NCCL GIN is unavailable. This is usually due to a network configuration issue": "GPU-initiated networking",
        "Duplicate NCCL runtime found in the current system": "a different NCCL",
        "NVCC compilation failed": "compiles its kernels at run time",
        "CUDA error: out of memory": "another process occupies the GPU's memory",
        "CUDA error: no kernel image is available for execution on the device": "another GPU architecture",
        "libnvshmem_host.so.3: cannot open shared object file": "a different PyTorch, CUDA or NVSHMEM",
    }.items():
        assert cause in known_faults()[smoke.sign_of(f"RuntimeError: {message}")]["cause"]


def test_ranks_that_end_well(tmp_path: Path) -> None:
    write = (
        "result = {'relative_error': 0.001 * (rank + 1), 'version': '2.1.0'}\n"
        "(folder / f'result{rank}.json').write_text(json.dumps(result))\nassert sys.argv[4] == 'EXPECTED'\n"
        "assert (os.environ.get('CUDA_VISIBLE_DEVICES') == '') == (sys.argv[4] == 'cpu')\n"
    )
    v1, v2 = node(tmp_path / "v1", deepep=V1), node(tmp_path / "v2")
    well = ended(write.replace("EXPECTED", "cuda"), v2)
    moved = "2 ranks sent tokens to their experts and back, forward and backward; relative error 2.0e-03"
    assert (well.severity, well.found) == ("ok", f"DeepEP 2.1.0: {moved}")
    for machine, gpus, why in ((v2, 1, "1 GPU where 2 are needed"), (v1, 8, "DeepEP V2 is not installed")):
        note = ended(write.replace("EXPECTED", "cpu"), machine, gpus=gpus)
        assert (note.severity, note.found) == ("note", f"DeepEP was not run: {why}. Over gloo on the CPU {moved}")


def test_two_real_ranks_over_gloo(tmp_path: Path) -> None:
    found = smoke_test(machine=node(tmp_path), gpu_count=0)
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


def doctors_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *gpus: str, **what: Any
) -> dict[str, tuple[bool, str]]:
    """What the doctor says that a node with these GPUs trains."""
    machine = node(folder / "node", **{name: value for name, value in what.items() if name != "nodes"})
    for module in (deepep, doctor):
        monkeypatch.setattr(module, "this_machine", lambda: machine)
    monkeypatch.setattr(capability, "has_module", lambda name: True)
    nvidia_smi(monkeypatch, folder, *gpus)
    try:
        return {what: (runs, words) for runs, what, words in doctor.trains(doctor.examine().arms)}
    finally:
        forget()


def test_the_doctor_says_what_a_sound_deepep_machine_trains_each_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one node of linked GPUs (DeepEP, issue 630): asked of nano, DeepEP would refuse its 128 features."""
    lines = doctors_lines(tmp_path, monkeypatch, *[H100] * 8, **NVLINK_ONLY)
    assert lines == {
        "BF16": (True, "runs"),
        "FP8": (True, "runs with FP8 tensor cores"),
        "MXFP8": (True, "runs emulated: MXFP8 numerics, not its speed"),
        "NVFP4": (True, "runs emulated: NVFP4 numerics, not its speed"),
        "deepep dispatch": (True, "runs in bf16_deepep, fp8_deepep, mxfp8_deepep, nvfp4_deepep"),
        "bf16_hybridep, fp8_hybridep, mxfp8_hybridep, nvfp4_hybridep": (
            False,
            "ep_backend hybridep needs another build of DeepEP, hybrid-ep; here: V2 (ElasticBuffer, on NCCL) "
            "2.1.0+dd758ca",
        ),
        "minimal_async_ep dispatch": (True, "runs in bf16_minimal_async_ep"),
        "fp8_minimal_async_ep, mxfp8_minimal_async_ep, nvfp4_minimal_async_ep": (False, ANY),
    }


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"deepep": V1}, "needs another build of DeepEP, V2; here: V1 (Buffer, on NVSHMEM)"),
        ({"deepep": HYBRID}, "needs another build of DeepEP, V2; here: hybrid-ep (HybridEPBuffer)"),
        ({"topo": TWO_PCIE}, "NVLink: missing between 1 of 1 pairs: 0-1 (PIX)"),
        ({"nccl": "2.28.9"}, "NCCL: loaded 2.28.9, DeepEP built against 2.28.9"),
    ],
)
def test_what_stops_deepep_is_its_arms_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], why: str
) -> None:
    lines = doctors_lines(tmp_path, monkeypatch, H100, H100, **{**NVLINK_ONLY, **what})
    runs, words = lines["bf16_deepep, fp8_deepep, mxfp8_deepep, nvfp4_deepep"]
    assert not runs
    assert why in words
    assert lines["BF16"] == (True, "runs")


def test_the_doctor_holds_the_network_against_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for cards, words in (({}, "DeepEP cannot send between 32 nodes"), (HALF, "the profile says 50 GB/s")):
        monkeypatch.setattr(deepep, "this_machine", partial(node, tmp_path / str(len(cards)), cards=cards))
        network, alone = (doctor.examine(hardware=one).deepep for one in ("b200_x256", "h100_node"))
        assert any(words in line for one in network for line in one.as_lines())
        assert not any(words in line for one in alone for line in one.as_lines())
    assert main(["doctor", "--hardware", "a_cluster"]) == 2
    assert "there is no such profile" in capsys.readouterr().err
