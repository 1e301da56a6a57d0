"""Whether DeepEP can work on this machine, and what carries its bytes, judged from files and a few programs' answers.

Nothing is imported or run: importing the wrong build may crash the process, and loading torch takes seconds.
:mod:`moelab.health.smoke` runs two ranks and observes what is only inferred here. Figures and file names are those of
DeepEP 2.1.0.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

from moelab.finding import Finding, Severity, fault
from moelab.machine import COLOUR, INFINIBAND, Machine, this_machine

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
LIBMLX5_NEEDED = 25
"""NCCL's GIN looks for the symbols ``MLX5_1.25`` in libmlx5 (DeepEP issue 628)."""
LIBMLX5 = ("usr/lib/*-linux-gnu", "lib/*-linux-gnu", "usr/lib64", "usr/lib")
EFA_PLUGIN = ("opt/amazon/ofi-nccl/lib*", "opt/amazon/ofi-nccl/lib/*-linux-gnu", "opt/aws-ofi-nccl/lib*")
PREFIXES = ("NCCL_", "NVSHMEM_", "UCX_", "EP_")
MEMLOCK_NEEDED_BYTES = 64 << 30  # a choice


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
        *check_gpudirect(machine),
        *(check_gin(machine, nodes) if build.kind == "V2" else ()),
        check_memlock(machine),
        *check_variables(machine),
    )


# --- which DeepEP, and which NCCL


@dataclass(frozen=True, kw_only=True)
class Build:
    """The DeepEP that Python would import."""

    kind: Kind  # by its modules
    version: str = ""  # empty if unknown
    folder: Path | None = None
    compiled: bool = False  # whether its extension module is there
    from_index: bool = False  # whether pip installed it from a package index such as PyPI

    @property
    def in_words(self) -> str:
        """Such as ``V2 (ElasticBuffer, on NCCL) 2.1.0``."""
        return f"{NAMES[self.kind]} {self.version}".strip() if self.kind != "none" else "not installed"


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
        version, from_index = first_match(folder / "__init__.py", rb"__version__\s*=\s*['\"](.+?)['\"]") or "", False
    else:
        version = distribution.version
        # pip records where a package came from, unless it was an index; DeepEP's own builds have ``+commit``.
        came_from = json.loads(distribution.read_text("direct_url.json") or "null")
        from_index = distribution.read_text("INSTALLER") is not None and not came_from and "+" not in version
    return Build(kind=kind, version=version, folder=folder, compiled=bool(extensions), from_index=from_index)


def check_build(machine: Machine, build: Build) -> Iterator[Finding]:
    """Which DeepEP it is, whether it can be imported, and the nvcc with which V2 compiles its kernels on first use."""
    if build.kind == "none":
        stray = machine.distribution("deep-ep")
        found = "not installed" if stray is None else f"version {stray.version} is registered, but its files are gone"
        yield Finding(name="DeepEP", severity="note", found=f"{found}; arms with deepep need it, CUDA GPUs and NVLink")
    elif build.from_index:
        yield fault("DeepEP of an index", f"{build.in_words}, from a package index")
    elif build.kind in ("V1", "unknown"):
        yield fault("DeepEP before V2", build.in_words)
    elif not build.compiled:
        yield fault("DeepEP not compiled", f"{build.in_words}, not compiled", folder=build.folder)
    else:
        yield Finding(name="DeepEP", severity="ok", found=build.in_words)
    if build.kind == "V2" and build.compiled and not build.from_index:
        env = machine.env
        candidates = [f"{env[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
        candidates += [env["EP_JIT_NVCC_COMPILER"]] if "EP_JIT_NVCC_COMPILER" in env else []
        candidates += [f"{folder}/nvcc" for folder in env.get("PATH", "").split(":") if folder]
        here = (path for path in (*candidates, "/usr/local/cuda/bin/nvcc") if _under(machine, path).exists())
        nvcc = next(here, None)
        yield Finding(name="CUDA compiler", severity="ok", found=nvcc) if nvcc else fault("CUDA compiler")


def check_nccl(machine: Machine, build: Build) -> Iterator[Finding]:
    """The NCCL that PyTorch loads, the one that DeepEP was built against, and the one that V2 needs."""
    library = _loaded_nccl(machine)
    if library is None and build.kind != "V2":
        return
    loaded = (first_match(library, rb"NCCL version (\d+\.\d+\.\d+)") if library else None) or ""
    built = _built_against(machine, build)
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


def _loaded_nccl(machine: Machine) -> Path | None:
    """The library that PyTorch loads: a preloaded one, else the wheel's, which PyTorch's RPATH names."""
    # ld.so accepts both separators.
    preloaded = [entry for entry in re.split(r"[:\s]", machine.env.get("LD_PRELOAD", "")) if "libnccl" in entry]
    wheels = (path / "nvidia" / "nccl" / "lib" / "libnccl.so.2" for path in machine.search)
    return _under(machine, preloaded[0]) if preloaded else next((path for path in wheels if path.is_file()), None)


def _built_against(machine: Machine, build: Build) -> str | None:
    """Version of the headers that V2 was built with: in the folder that the build recorded, or in the wheel."""
    if build.kind != "V2" or build.folder is None:
        return None
    kept = first_match(build.folder / "envs.py", rb"persistent_envs\['EP_NCCL_ROOT_DIR'\] = '(.+?)'")
    named = [kept, machine.env.get("EP_NCCL_ROOT_DIR"), machine.env.get("NCCL_DIR")]
    roots = [_under(machine, one) for one in named if one]
    roots += [path / "nvidia" / "nccl" for path in machine.search]
    header = next((path for root in roots if (path := root / "include" / "nccl.h").is_file()), None)
    if header is None:
        return None
    numbers = [first_match(header, rb"#define NCCL_%s (\d+)" % part) for part in (b"MAJOR", b"MINOR", b"PATCH")]
    return ".".join(number or "?" for number in numbers)


# --- what carries the bytes


class Port(NamedTuple):
    """One port of an RDMA device, such as ``mlx5_0``, in a state such as ``4: ACTIVE, 5: LinkUp``."""

    device: str
    state: str
    rate_gb_s: float
    link_layer: str  # InfiniBand, Ethernet, or EFA: AWS's, whose devices say "Unspecified"

    @property
    def active(self) -> bool:
        """Whether it can send."""
        return "ACTIVE" in self.state


def ports(machine: Machine) -> list[Port]:
    """Ports of the RDMA devices, as ``/sys/class/infiniband`` lists them."""
    listed, efa = [], re.search(r"^efa\b", machine.text("/proc/modules") or "", re.M)
    for device in machine.names(INFINIBAND):
        for number in machine.names(f"{INFINIBAND}/{device}/ports"):
            names = ("state", "phys_state", "rate", "link_layer")
            state, link, rate, layer = (machine.text(f"{INFINIBAND}/{device}/ports/{number}/{one}") for one in names)
            gb_s = re.match(r"[\d.]+", rate or "")  # 400 Gb/sec (4X NDR)
            layer = "EFA" if efa and layer in ("Unspecified", None) else layer or "unknown link layer"
            states = ", ".join(one for one in (state, link) if one)
            listed.append(Port(device, states, float(gb_s[0]) / 8 if gb_s else 0.0, layer))
    return listed


def check_rdma(machine: Machine, *, nodes: int = 1, nic_gb_s: float | None = None) -> Iterator[Finding]:
    """Whether the ports of the RDMA cards are up, and as fast as the profile says, or else as the fastest one.

    Cards that NCCL_IB_HCA leaves out, such as the one of the front-end network, are counted and not judged.
    """
    name, all_ports = "RDMA devices", ports(machine)
    if not all_ports:
        alone = Finding(name=name, severity="note", found="none: DeepEP works within this node only")
        yield fault(name, nodes=nodes) if nodes > 1 else alone
        return
    chosen = named_by(machine.env.get("NCCL_IB_HCA", ""), [port.device for port in all_ports], prefixes=True)
    used = [port for port in all_ports if port.device in chosen] or all_ports  # names of no card are another finding
    active, down = [port for port in used if port.active], [port for port in used if not port.active]
    kinds = sorted({port.link_layer for port in active})
    counted = f"{len(active)} of {len(used)} ports active" + (f" ({', '.join(kinds)})" if kinds else "")
    counted += f"; NCCL_IB_HCA leaves out {len(all_ports) - len(used)}" if len(used) < len(all_ports) else ""
    if down:
        kind = "RDMA ports unmanaged" if all("LinkUp" in port.state for port in down) else "RDMA ports down"
        listed = ", ".join(f"{port.device} ({port.state})" for port in down)
        yield fault(kind, f"{counted}; down: {listed}", severity="warning" if active else "error")
    else:
        yield Finding(name=name, severity="ok", found=counted)
    # Cards of another link layer are not of the fabric, such as the one for Ethernet beside eight for InfiniBand.
    fastest = max(active, key=lambda port: port.rate_gb_s, default=used[0])
    fabric = [port for port in active if port.link_layer == fastest.link_layer]
    wanted = nic_gb_s or fastest.rate_gb_s
    if slow := [port for port in fabric if port.rate_gb_s < 0.99 * wanted]:  # 1 % for rounding
        kind = "RDMA rate of the profile" if nic_gb_s else "RDMA rate"
        yield fault(kind, ", ".join(f"{port.device} {port.rate_gb_s:g} GB/s" for port in slow), wanted=wanted)


def check_gpudirect(machine: Machine) -> Iterator[Finding]:
    """Whether the network cards can reach GPU memory."""
    name = "GPUDirect RDMA"
    if not machine.names(INFINIBAND):
        return
    if "nvidia_peermem" in (machine.text("/proc/modules") or ""):
        yield Finding(name=name, severity="ok", found="nvidia_peermem is loaded")
    elif "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or ""):
        yield Finding(name=name, severity="ok", found="open kernel modules, which export GPU memory (dma-buf)")
    else:
        yield fault(name)


def check_gin(machine: Machine, nodes: int) -> Iterator[Finding]:
    """GPU-initiated networking (GIN), which V2 requests from NCCL unless told not to, and what V2 asks of the cards."""
    name, cards, active = "GIN", machine.names(INFINIBAND), [port for port in ports(machine) if port.active]
    card = machine.env.get("EP_NIC_NAME", "mlx5_0")
    is_efa = bool(active) and all(port.link_layer == "EFA" for port in active)
    # V2 chooses its number of SMs by the bandwidth that ibstat prints for one card; EFA has no ibstat.
    if cards and not is_efa and f"CA '{card}'" not in (machine.run(["ibstat"]) or ""):
        yield fault("RDMA bandwidth for DeepEP", f"ibstat does not name {card}", cards=", ".join(cards))
    if machine.env.get("EP_DISABLE_GIN", "0") not in ("", "0"):
        off = Finding(name=name, severity="ok", found="off (EP_DISABLE_GIN): NVLink only")
        yield fault("GIN off between nodes", nodes=nodes) if nodes > 1 else off
    elif not active or machine.env.get("NCCL_GIN_ENABLE") == "0":
        yield fault("GIN between nodes" if nodes > 1 else "GIN")
    elif is_efa:
        plugin = next(_files(machine, EFA_PLUGIN, "libnccl-*.so*"), None)
        found = f"NCCL reaches EFA through {plugin}; whether that has GIN, its release notes say"
        yield Finding(name=name, severity="note", found=found) if plugin else fault("GIN over EFA")
    elif (newest := _libmlx5(machine)) is not None and newest < LIBMLX5_NEEDED:
        found = f"libmlx5 has symbols up to MLX5_1.{newest}, and NCCL's GIN needs MLX5_1.{LIBMLX5_NEEDED}"
        yield fault("GIN with an old libmlx5", found)
    else:
        kinds = {"2": "proxy", "3": "GDAKI"}
        by_nccl = "chosen by NCCL: GDAKI if the card supports it, else proxy"
        kind = kinds.get(machine.env.get("NCCL_GIN_TYPE", ""), by_nccl)
        yield Finding(name=name, severity="ok", found=f"possible; type {kind}")


def _libmlx5(machine: Machine) -> int | None:
    """The newest symbol version ``MLX5_1.x`` of the cards' user library; None where it is not found."""
    library = next(_files(machine, LIBMLX5, "libmlx5.so.1"), None)
    versions = re.findall(rb"MLX5_1\.(\d+)", library.read_bytes()) if library else []
    return max(map(int, versions), default=None)


def check_memlock(machine: Machine) -> Finding:
    """Memory that a process may lock; RDMA locks every buffer that it registers."""
    limit = machine.memlock_bytes
    if limit is None:
        return Finding(name="locked memory", severity="ok", found="unlimited")
    found = f"{limit / 2**30:.3g} GiB" if limit >= 2**30 else f"{limit / 2**20:.3g} MiB"
    if limit >= MEMLOCK_NEEDED_BYTES or not machine.names(INFINIBAND):
        return Finding(name="locked memory", severity="note", found=f"{found}; with RDMA it should be unlimited")
    return fault("locked memory", found)


def check_nvlink(machine: Machine, *, needed: bool) -> Finding:
    """NVLink between every pair of GPUs, as ``nvidia-smi topo -m`` shows it.

    ``needed``: DeepEP is installed, so a pair without NVLink is an error.
    """
    topology = machine.run(["nvidia-smi", "topo", "-m"])
    links = nvlink_matrix(topology or "")
    visible = machine.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d,]*", visible):  # nvidia-smi lists all GPUs; UUIDs are not followed
        chosen = [int(one) for one in visible.split(",") if one and int(one) < len(links)]
        links = [[links[a][b] for b in chosen] for a in chosen]
    if len(links) < 2:
        unseen = "is missing or fails" if topology is None else "shows no GPUs"
        found = "one GPU, no pairs" if links else f"unknown: `nvidia-smi topo -m` {unseen}"
        return Finding(name="NVLink", severity="note", found=found)
    pairs = list(combinations(range(len(links)), 2))
    without = [f"{a}-{b} ({links[a][b]})" for a, b in pairs if not links[a][b].startswith("NV")]
    if not without:
        kinds = ", ".join(sorted({links[a][b] for a, b in pairs}))
        return Finding(name="NVLink", severity="ok", found=f"all {len(pairs)} pairs of {len(links)} GPUs ({kinds})")
    named = ", ".join(without[:4]) + (", …" if len(without) > 4 else "")
    found = f"missing between {len(without)} of {len(pairs)} pairs: {named}"
    return fault("NVLink", found, severity="error" if needed else "note")


def nvlink_matrix(topology: str) -> list[list[str]]:
    """Connections between GPUs, such as ``NV18`` or ``SYS``, from the output of ``nvidia-smi topo -m``."""
    # Headings are underlined.
    rows = [line.split() for line in COLOUR.sub("", topology).splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # unlike the heading, which also begins with GPU0
    return [row[1 : len(rows) + 1] for row in rows]


# --- variables


NO_WINDOW = "NCCL cannot register the symmetric window that holds DeepEP V2's buffer"
NO_PEERS = "the GPUs of a node cannot reach each other's memory"
HARMFUL: tuple[tuple[str, tuple[str, ...], Severity, str], ...] = (
    ("NCCL_P2P_DISABLE", ("1",), "error", f"{NO_PEERS}: no NVLink for DeepEP or anything else"),
    ("NCCL_P2P_LEVEL", ("LOC", "0"), "error", NO_PEERS),
    ("NCCL_CUMEM_ENABLE", ("0",), "error", NO_WINDOW),
    ("NCCL_WIN_ENABLE", ("0",), "error", NO_WINDOW),
    ("NCCL_IB_DISABLE", ("1",), "warning", "between nodes NCCL uses TCP, and DeepEP V2 has no GIN"),
    ("EP_SUPPRESS_NCCL_CHECK", ("1",), "warning", "two different NCCL libraries go unnoticed until one crashes"),
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
            yield fault("variable that harms", f"{name}={env[name]}", severity=severity, variable=name, follows=follows)
    # A list with cards or interfaces of another machine is the usual fault of a copied script.
    for name, here in (
        ("NCCL_IB_HCA", cards),
        ("NVSHMEM_HCA_LIST", cards),
        ("UCX_NET_DEVICES", [*cards, *interfaces]),
        ("EP_NIC_NAME", cards),
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interfaces),
    ):
        value, prefixes = env.get(name, ""), name.startswith("NCCL_")
        if value == "all" or value.startswith("^"):  # ^ excludes what follows: it need not be here
            continue
        exact = "=" if value.startswith("=") else ""
        wanted = [one for one in value.removeprefix("=").split(",") if one]
        missing = [one for one in wanted if not named_by(exact + one, here, prefixes=prefixes)]
        if missing:
            names = ", ".join(one.partition(":")[0] for one in missing)
            found = f"{name}={value}; there is no {names} here"
            yield fault("variable of another machine", found, variable=name, here=", ".join(here) or "none")


def named_by(value: str, here: Sequence[str], *, prefixes: bool) -> list[str]:
    """Those of the cards or interfaces here that a variable names; all where it is empty.

    ``^`` excludes what follows. NCCL's own variables have ``prefixes``, unless ``=`` demands whole names.

    >>> named_by("^mlx5_0:1", ["mlx5_0", "mlx5_1", "mlx5_10"], prefixes=True)
    ['mlx5_1', 'mlx5_10']
    """
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    whole, rest = rest.startswith("=") or not prefixes, rest.removeprefix("=")
    names = [one.partition(":")[0] for one in rest.split(",") if one]  # mlx5_0:1 is its port 1
    matched = [held for held in here if any(held == one if whole else held.startswith(one) for one in names)]
    return list(here) if not names else [held for held in here if (held in matched) != excludes]


# --- files


def _under(machine: Machine, path: str) -> Path:
    return machine.root / path.lstrip("/")  # joining an absolute path would drop the root


def _files(machine: Machine, folders: Sequence[str], pattern: str) -> Iterator[Path]:
    return (file for folder in folders for file in sorted(machine.root.glob(f"{folder}/{pattern}")))


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
