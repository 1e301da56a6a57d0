"""Whether DeepEP can work on this machine, judged from files for ``moelab doctor``, without importing or running it.

Importing the wrong build may crash the process, and loading torch takes seconds. :mod:`moelab.health.smoke` runs two
ranks and observes what is only inferred here. Figures and file names are those of DeepEP 2.1.0.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moelab.finding import Finding, Severity, fault
from moelab.health.links import check_gpudirect, check_memlock, check_nvlink, check_rdma, ports
from moelab.machine import INFINIBAND, Machine, this_machine

Kind = Literal["none", "V1", "V2", "hybrid-ep", "unknown"]
NAMES = {
    "V1": "V1 (Buffer, on NVSHMEM)",
    "V2": "V2 (ElasticBuffer, on NCCL)",
    "hybrid-ep": "hybrid-ep (HybridEPBuffer)",
    "unknown": "an unknown package named deep_ep",
}
NCCL_NEEDED = (2, 30, 4)
"""From DeepEP's ``README.md``."""
NCCL_STABLE_ABI = (2, 31)
"""Before this release, the NCCL that is loaded must be the one that DeepEP was compiled with (DeepEP's ``nccl.cu``)."""
NCCL_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
PREFIXES = ("NCCL_", "NVSHMEM_", "UCX_", "EP_")


def examine_environment(
    machine: Machine | None = None, *, nodes: int = 1, nic_gb_s: float | None = None
) -> tuple[Finding, ...]:
    """Check everything that DeepEP depends on, on this machine unless another is given; in reading order.

    ``nodes`` are the hosts of a job, ``nic_gb_s`` is the bandwidth of one GPU each way where the profile has it.
    """
    machine = machine or this_machine()
    build = find_build(machine)
    return (
        *check_build(machine, build),
        *check_nccl(machine, build),
        check_nvlink(machine, needed=build.kind != "none"),
        *check_rdma(machine, nodes=nodes, nic_gb_s=nic_gb_s),
        *(check_nic_name(machine) if build.kind == "V2" else ()),
        *check_gpudirect(machine),
        *([check_gin(machine, nodes)] if build.kind == "V2" else ()),
        check_memlock(machine),
        *check_variables(machine),
    )


@dataclass(frozen=True, kw_only=True)
class Build:
    """The DeepEP that Python would import."""

    kind: Kind  # by its modules
    version: str = ""  # empty if unknown
    folder: Path | None = None
    compiled: bool = False  # whether its extension module is there
    from_index: bool = False  # whether pip installed it from a package index such as PyPI


def find_build(machine: Machine) -> Build:
    """Find the package ``deep_ep`` without importing it."""
    folder = machine.module_folder("deep_ep")
    if folder is None:
        return Build(kind="none")
    kind: Kind = "unknown"
    # V1 and hybrid-ep install their extension beside the package, V2 inside it.
    extensions = list(folder.parent.glob("deep_ep_cpp*.so"))
    if (folder / "buffers" / "elastic.py").is_file():
        kind, extensions = "V2", list(folder.glob("_C*.so"))
    elif (folder / "hybrid_ep_buffer.py").is_file():  # checked before V1, whose buffer.py it has too
        kind, extensions = "hybrid-ep", list(folder.parent.glob("hybrid_ep_cpp*.so"))
    elif (folder / "buffer.py").is_file():
        kind = "V1"
    distribution = machine.distribution("deep-ep")
    if distribution is None:
        written = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", (folder / "__init__.py").read_text(), re.M)
        return Build(kind=kind, version=written[1] if written else "", folder=folder, compiled=bool(extensions))
    # pip records where a package came from, unless it was an index; DeepEP's own builds have ``+commit``.
    came_from = json.loads(distribution.read_text("direct_url.json") or "null")
    by_pip = distribution.read_text("INSTALLER") is not None
    return Build(
        kind=kind,
        version=distribution.version,
        folder=folder,
        compiled=bool(extensions),
        from_index=by_pip and not came_from and "+" not in distribution.version,
    )


def check_build(machine: Machine, build: Build) -> Iterator[Finding]:
    """Which DeepEP it is, and whether it can be imported."""
    name = "DeepEP"
    if build.kind == "none":
        stray = machine.distribution("deep-ep")
        found = "not installed" if stray is None else f"version {stray.version} is registered, but its files are gone"
        yield Finding(name=name, severity="note", found=f"{found}; arms with deepep need it, CUDA GPUs and NVLink")
        return
    found = f"{NAMES[build.kind]} {build.version}".strip()
    if build.from_index:
        yield fault("DeepEP of an index", f"{found}, from a package index")
    elif build.kind in ("V1", "unknown"):
        yield fault("DeepEP before V2", found)
    elif not build.compiled:
        yield fault("DeepEP not compiled", f"{found}, not compiled", folder=build.folder)
    else:
        yield Finding(name=name, severity="ok", found=found)
        if build.kind == "V2":
            yield check_compiler(machine)


def check_compiler(machine: Machine) -> Finding:
    """The nvcc with which V2 compiles its kernels on first use."""
    env = machine.env
    candidates = [f"{env[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    candidates += [env["EP_JIT_NVCC_COMPILER"]] if "EP_JIT_NVCC_COMPILER" in env else []
    candidates += [f"{folder}/nvcc" for folder in env.get("PATH", "").split(":") if folder]
    for path in map(Path, [*candidates, "/usr/local/cuda/bin/nvcc"]):
        if (machine.root / str(path).lstrip("/")).exists():  # lstrip: joining an absolute path would drop the root
            return Finding(name="CUDA compiler", severity="ok", found=str(path))
    return fault("CUDA compiler")


def check_nccl(machine: Machine, build: Build) -> Iterator[Finding]:
    """The NCCL that PyTorch loads, the one that DeepEP was built against, and the one that V2 needs."""
    library = loaded_nccl(machine)
    if library is None and build.kind != "V2":
        return
    loaded = (first_match(library, rb"NCCL version (\d+\.\d+\.\d+)") if library else None) or ""
    built = built_against(machine, build)
    found = f"loaded {loaded or 'of unknown version'}" + (f", DeepEP built against {built}" if built else "")
    enough = version_tuple(loaded) >= NCCL_NEEDED
    # Too old comes first: then it does not matter which NCCL DeepEP was built against.
    if build.kind == "V2" and not enough:
        yield fault("NCCL too old", found if library else "no libnccl found")
    elif built and built != loaded and version_tuple(loaded) < NCCL_STABLE_ABI:
        yield fault("NCCL of another build", found)
    else:
        yield Finding(name="NCCL", severity="ok" if enough else "note", found=found)
    wheels = [name for name in NCCL_WHEELS if machine.distribution(name) is not None]
    if library and len(wheels) > 1:
        yield fault("NCCL packages", " and ".join(wheels))


def loaded_nccl(machine: Machine) -> Path | None:
    """The library that PyTorch loads: a preloaded one, else the wheel's, which PyTorch's RPATH names."""
    # ld.so accepts both separators.
    for entry in re.split(r"[:\s]", machine.env.get("LD_PRELOAD", "")):
        if "libnccl" in entry:
            return machine.root / entry.lstrip("/")
    wheels = (path / "nvidia" / "nccl" / "lib" / "libnccl.so.2" for path in machine.search)
    return next((path for path in wheels if path.is_file()), None)


def built_against(machine: Machine, build: Build) -> str | None:
    """Version of the headers that V2 was built with: in the folder that the build recorded, or in the wheel."""
    if build.kind != "V2" or build.folder is None:
        return None
    kept = first_match(build.folder / "envs.py", rb"persistent_envs\['EP_NCCL_ROOT_DIR'\] = '(.+?)'")
    named = [kept, machine.env.get("EP_NCCL_ROOT_DIR"), machine.env.get("NCCL_DIR")]
    roots = [machine.root / one.lstrip("/") for one in named if one]
    roots += [path / "nvidia" / "nccl" for path in machine.search]
    header = next((path for root in roots if (path := root / "include" / "nccl.h").is_file()), None)
    if header is None:
        return None
    numbers = [first_match(header, rb"#define NCCL_%s (\d+)" % part) for part in (b"MAJOR", b"MINOR", b"PATCH")]
    return ".".join(number or "?" for number in numbers)


def check_nic_name(machine: Machine) -> Iterator[Finding]:
    """Whether V2 can read a card's bandwidth from ``ibstat``, by which it chooses its number of SMs."""
    cards, card = machine.names(INFINIBAND), machine.env.get("EP_NIC_NAME", "mlx5_0")
    if cards and f"CA '{card}'" not in (machine.run(["ibstat"]) or ""):
        yield fault("RDMA bandwidth for DeepEP", f"ibstat does not name {card}", cards=", ".join(cards))


def check_gin(machine: Machine, nodes: int) -> Finding:
    """GPU-initiated networking (GIN), which V2 requests from NCCL unless it is told not to."""
    if machine.env.get("EP_DISABLE_GIN", "0") not in ("", "0"):
        if nodes > 1:
            return fault("GIN off between nodes", nodes=nodes)
        return Finding(name="GIN", severity="ok", found="off (EP_DISABLE_GIN): NVLink only")
    if any(port.active for port in ports(machine)) and machine.env.get("NCCL_GIN_ENABLE") != "0":
        kinds = {"2": "proxy", "3": "GDAKI"}
        kind = kinds.get(
            machine.env.get("NCCL_GIN_TYPE", ""), "chosen by NCCL: GDAKI if the card supports it, else proxy"
        )
        return Finding(name="GIN", severity="ok", found=f"possible; type {kind}")
    return fault("GIN between nodes" if nodes > 1 else "GIN")


NO_WINDOW = "NCCL cannot register the symmetric window that holds DeepEP V2's buffer"
NO_PEERS = "the GPUs of a node cannot reach each other's memory"
TWO_NCCL = "two different NCCL libraries go unnoticed until one of them crashes"
HARMFUL: tuple[tuple[str, tuple[str, ...], Severity, str], ...] = (
    ("NCCL_P2P_DISABLE", ("1",), "error", f"{NO_PEERS}: no NVLink for DeepEP or anything else"),
    ("NCCL_P2P_LEVEL", ("LOC", "0"), "error", NO_PEERS),
    ("NCCL_CUMEM_ENABLE", ("0",), "error", NO_WINDOW),
    ("NCCL_WIN_ENABLE", ("0",), "error", NO_WINDOW),
    ("NCCL_IB_DISABLE", ("1",), "warning", "between nodes NCCL uses TCP, and DeepEP V2 has no GIN"),
    ("EP_SUPPRESS_NCCL_CHECK", ("1",), "warning", TWO_NCCL),
    ("NCCL_DEBUG", ("TRACE",), "warning", "every collective writes to the log, which slows it down"),
    ("CUDA_LAUNCH_BLOCKING", ("1",), "warning", "communication and computation do not overlap"),
)
"""Variables, their values that break DeepEP or slow it down on any cluster, how bad that is, and what follows."""


def check_variables(machine: Machine) -> Iterator[Finding]:
    """Variables that control communication: which are set, which do harm, and which name something that is not here."""
    env, cards, interfaces = machine.env, machine.names(INFINIBAND), machine.names("/sys/class/net")
    listed = ", ".join(f"{name}={value}" for name, value in sorted(env.items()) if name.startswith(PREFIXES))
    yield Finding(name="communication variables", severity="note", found=listed or "none set")
    for name, values, severity, follows in HARMFUL:
        if env.get(name) in values:
            found = f"{name}={env[name]}"
            yield fault("variable that harms", found, severity=severity, variable=name, follows=follows)
    # A list with cards or interfaces of another machine is the usual fault of a copied script.
    for name, here in (
        ("NCCL_IB_HCA", cards),
        ("NVSHMEM_HCA_LIST", cards),
        ("UCX_NET_DEVICES", [*cards, *interfaces]),
        ("EP_NIC_NAME", cards),
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interfaces),
    ):
        value = env.get(name, "")
        if value == "all" or value.startswith("^"):  # ^ excludes what follows: it need not be here
            continue
        wanted = [one.partition(":")[0] for one in value.removeprefix("=").split(",") if one]  # mlx5_0:1 is its port 1
        missing = [one for one in wanted if one not in here]
        # NCCL alone accepts prefixes, unless = demands whole names.
        if name.startswith("NCCL_") and not value.startswith("="):
            missing = [one for one in missing if not any(held.startswith(one) for held in here)]
        if missing:
            found = f"{name}={value}; there is no {', '.join(missing)} here"
            yield fault("variable of another machine", found, variable=name, here=", ".join(here) or "none")


def first_match(path: Path, pattern: bytes) -> str | None:
    """The group of the first match of a pattern in a file of any size, or None."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(pattern, content)
            return None if match is None else match[1].decode(errors="replace")
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """Numbers of a version, such as ``(2, 30, 7)`` of ``2.30.7+cuda13.3``.

    >>> version_tuple("2.30.7+cuda13.3") >= (2, 30, 4)
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
