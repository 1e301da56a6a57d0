"""What this machine has, found out without loading torch.

The checks of :mod:`moelab.health` are given a :class:`Machine`, so that tests can make machines up.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import moelab
from moelab.errors import Refused

PACKAGES = (
    "torch",
    "torchtitan",
    "torchao",
    "tokenizers",
    "triton",
    "nvidia-nccl-cu13",
    "deep_ep",
    "plotly",
    "papermill",
)
ROOT = Path("/")
INFINIBAND = "/sys/class/infiniband"
COLOUR = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")  # and whatever else a program has a terminal do
COMMAND_TIMEOUT_S = 20
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: a forked child of a process with threads must not load libraries

DEVICES = Path("/dev")
LISTS_DESPITE = 14
"""nvidia-smi's exit code for a corrupted infoROM: a warning, the GPUs are listed and work."""
_FIELDS = ("name", "compute_cap", "driver_version", "memory.total", "mig.mode.current")
_CSV = "--format=csv,noheader,nounits"
_ABSENT = r"\[[^]]+\]|N/A"
_ROW = re.compile(
    rf"(?P<name>.+?),\s*(?P<capability>\d+[.,]\d+|{_ABSENT}),\s*(?P<driver>\d[\d.]*|{_ABSENT}),"
    rf"\s*(?P<memory>\d+(?:[.,]\d{{3}})*|{_ABSENT})(?: MiB)?"
    rf"(?:,\s*(?P<mig>Enabled|Disabled|{_ABSENT}))?\s*"
)
"""A row of the answer; a name may have commas in it. Warnings and banners stand on lines of their own."""
_BROKEN = re.compile(
    r"is lost|fallen off the bus|requires (a )?reset|Unknown Error|ERR!|Unable to determine the device"
)
"""What nvidia-smi prints for a GPU that does not answer, sometimes with exit code 0."""
_FULL = re.compile(r"GPU (\d+): .* \(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
APPLICATION_XIDS = frozenset({13, 31, 43, 45})
"""Xids of the NVIDIA driver that a program causes on a sound GPU (13 an exception, 31 a page fault) or that follow
another error (43, 45); any other points at the GPU or its driver (NVIDIA, "Xid Errors",
docs.nvidia.com/deploy/xid-errors)."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent dies; a parent that died before goes unnoticed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, number)


def end_with_torchrun() -> None:
    """In a rank: die with torchrun, which starts ranks in sessions of their own.

    torchrun may have died while the rank was loading; then its parent is another process, without the run's variables.

    Raises:
        SystemExit: if it has.
    """
    end_with_parent(signal.SIGKILL)
    own = f"MOELAB_EXPERIMENT={os.environ.get('MOELAB_EXPERIMENT', '')}".encode()
    try:
        is_torchrun = own in Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # it died just now; without /proc, nobody can tell
        is_torchrun = sys.platform != "linux"
    if not is_torchrun:
        raise SystemExit("moelab: torchrun has died; a rank does not train on alone")


DRIVER = "fix the driver (reboot after an upgrade; in a container, pass the GPUs through)"


class GpusUnknown(Refused):
    """This machine may have GPUs, but nvidia-smi fails or is missing, so that nobody knows what they can do."""

    def __init__(self, found: str, remedy: str = DRIVER) -> None:
        self.found, self.remedy = found, remedy  # what was seen, such as nvidia-smi's own words; what to do about it
        super().__init__(
            f"{found}. So moelab does not know this machine's GPUs: {remedy}, use the processor with hardware=cpu, or "
            "plan for other nodes with a profile such as hardware=b200_x256"
        )


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU, or MIG instance of one, as nvidia-smi lists it."""

    name: str  # the marketing name; of a MIG instance as in CUDA: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`
    capability: float | None  # SM version, such as 10.0; None where nvidia-smi does not say, as of some virtual GPUs
    driver: str
    memory_mib: int | None  # None where nvidia-smi does not say, as where the GPU shares the system's memory


def gpus() -> tuple[GpuInfo, ...]:
    """GPUs of this node that a process may use, as CUDA reads ``CUDA_VISIBLE_DEVICES``; empty without nvidia-smi.

    CUDA gives a process one MIG instance at most, so where a visible GPU is split, its first instance is all there is.
    ``CUDA_DEVICE_ORDER`` is assumed to be ``PCI_BUS_ID``, which only matters on a node with GPUs of several kinds.

    Raises:
        GpusUnknown: if nvidia-smi is here and fails, with its words, or is missing where GPUs are.
    """
    listing = gpu_listing(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if isinstance(listing, GpusUnknown):
        raise GpusUnknown(listing.found, listing.remedy)  # a new one: the cached one would collect tracebacks
    return listing


def gpu_problem() -> str | None:
    """Why this machine's GPUs are not known, such as the words of an nvidia-smi that fails; None if they are."""
    listing = gpu_listing(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return listing.found if isinstance(listing, GpusUnknown) else None


CPU_RANKS = 2
"""Processes of a run on the processor: the fewest that can share experts."""


def ranks_here(hardware: str = "local") -> int:
    """Ranks of a run here where nobody chose how many: all GPUs, or two processes on the processor.

    Raises:
        GpusUnknown: as :func:`gpus`.
    """
    return (len(gpus()) if hardware != "cpu" else 0) or CPU_RANKS


@functools.cache
def gpu_listing(visible: str | None) -> tuple[GpuInfo, ...] | GpusUnknown:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, or why they are not known."""
    if visible is not None and not _entries(visible):
        return ()  # whatever is here was hidden on purpose
    code, output = _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", _CSV)
    if code is None:
        return GpusUnknown(f"nvidia-smi fails: {output}") if output else _without_nvidia_smi()
    rows = [match.groupdict() for line in output.splitlines() if (match := _ROW.fullmatch(line))]
    # A GPU that fell off the bus stands in the list beside sound ones, at times with exit code 0.
    if code not in (0, LISTS_DESPITE) or not rows or _BROKEN.search(output):
        words = "; ".join(line.strip() for line in output.splitlines() if line.strip())[:400] or "it lists no GPU"
        return GpusUnknown(f"nvidia-smi fails (exit code {code}): {words.rstrip('.')}")
    whole = [
        GpuInfo(
            name=row["name"],
            capability=leading_number(row["capability"]),
            driver=row["driver"],
            memory_mib=int(re.sub(r"\D", "", row["memory"])) if row["memory"][0].isdigit() else None,
        )
        for row in rows
    ]
    # The query shows whole GPUs; only -L has their UUIDs and MIG instances.
    code, listed = _nvidia_smi("-L")
    if code not in (0, LISTS_DESPITE) and visible is not None and visible.startswith(("GPU-", "MIG-")):
        return GpusUnknown(f"nvidia-smi -L fails (exit code {code}), and CUDA_VISIBLE_DEVICES names GPUs by UUID")
    cut = {index for index, row in enumerate(rows) if row["mig"] == "Enabled"}
    gpus_seen = _visible(whole, listed, visible, cut if code == 0 else set())
    if not gpus_seen and cut and "MIG " not in listed:
        return GpusUnknown(
            f"GPU {', '.join(map(str, sorted(cut)))} is in MIG mode without an instance, so CUDA sees no GPU",
            "create one (nvidia-smi mig -cgi 0 -C), or leave MIG mode (nvidia-smi -mig 0)",
        )
    return gpus_seen


def _without_nvidia_smi() -> tuple[GpuInfo, ...] | GpusUnknown:
    """No GPU, unless NVIDIA's device files show that there are some."""
    if nodes := sorted(path.name for path in DEVICES.glob("nvidia[0-9]*")):
        return GpusUnknown(
            f"nvidia-smi is missing, but there are {len(nodes)} GPU devices ({DEVICES / nodes[0]})",
            "give the container the driver's programs (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        )
    return ()


def counted(names: Iterable[str]) -> str:
    """Such as ``8 × NVIDIA B200``."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(names).items())


def _nvidia_smi(*arguments: str) -> tuple[int | None, str]:
    return _answer(["nvidia-smi", *arguments], stderr=subprocess.STDOUT)  # it prints errors on either


def _answer(command: Sequence[str], *, stderr: int) -> tuple[int | None, str]:
    """Exit code and output of a command.

    Without an exit code, the output says how it failed to start or to end; it is empty where there is no such command.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace"
        )
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, error.strerror or str(error)
    try:
        output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        # subprocess.run would wait on: a driver that hangs holds nvidia-smi in the kernel, killed or not.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        if process.stdout:
            process.stdout.close()
        process.poll()
        return None, f"no answer within {COMMAND_TIMEOUT_S} s"
    return process.returncode, output


def _entries(visible: str) -> list[str]:
    """Entries of ``CUDA_VISIBLE_DEVICES`` up to the first invalid one; none at all if one is repeated.

    These are the driver's rules, as in ``torch.cuda._parse_visible_devices`` of torch 2.14: numbers are read as by
    ``strtoul``, UUIDs may be cut short, and the first entry decides which of the two the others must be.
    """
    prefix = next((kind for kind in ("GPU-", "MIG-") if visible.startswith(kind)), None)
    entries: list[str] = []
    for entry in visible.split(","):
        number = re.match(r"\s*\+?(\d+)", entry)
        if entry.startswith(prefix) if prefix else number:
            entries.append(entry.strip() if prefix or not number else str(int(number[1])))
        else:
            break
    return entries if len(set(entries)) == len(entries) else []


def _visible(whole: Sequence[GpuInfo], listed: str, visible: str | None, cut: Collection[int]) -> tuple[GpuInfo, ...]:
    """What CUDA makes of GPUs.

    Args:
        whole: all GPUs, by index.
        listed: what ``nvidia-smi -L`` prints: the UUIDs, and the MIG instances under each GPU.
        visible: ``CUDA_VISIBLE_DEVICES``.
        cut: indices of those in MIG mode, of which CUDA sees only the instances.
    """
    uuids: dict[str, int] = {}
    instances: dict[str, GpuInfo] = {}
    first: dict[int, GpuInfo] = {}  # MIG instance of each GPU that has some
    index = -1
    for line in listed.splitlines():
        if match := _FULL.match(line):
            index = int(match[1])
            uuids[match[2]] = index
        elif (match := _MIG.match(line)) and 0 <= index < len(whole):
            instances[match[2]] = _instance(whole[index], match[1])
            first.setdefault(index, instances[match[2]])
    chosen: list[GpuInfo] = []
    for entry in map(str, range(len(whole))) if visible is None else _entries(visible):
        if entry.isdecimal():
            at = int(entry)
        else:
            if mig := [instance for uuid, instance in instances.items() if uuid.startswith(entry)]:
                return (mig[0],)
            at = next((number for uuid, number in uuids.items() if uuid.startswith(entry)), len(whole))
        if at >= len(whole):
            break
        if at in first:
            return (first[at],)
        if at not in cut:
            chosen.append(whole[at])
    return tuple(chosen)


def _instance(whole: GpuInfo, profile: str) -> GpuInfo:
    """A MIG instance: a profile such as ``1g.10gb`` has its memory in it."""
    size = re.search(r"(\d+)gb", profile)
    return replace(whole, name=f"{whole.name} MIG {profile}", memory_mib=size and int(size[1]) * 10**9 // 2**20)


def leading_number(cell: str) -> float | None:
    """The number that a cell of nvidia-smi begins with, such as ``1980 MHz``; None of ``[N/A]`` and the like."""
    match = re.match(r"-?\d+(?:[.,]\d+)?", cell)  # a decimal comma in some languages
    return float(match[0].replace(",", ".")) if match else None


def version(package: str) -> str | None:
    """Installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


TESTED = {"torch": ("2.14", "2.15"), "torchtitan": ("0.3.0",), "torchao": ("0.18.0",)}
"""Releases that moelab is written for: it calls their internals (``docs/torchtitan.md``)."""


def is_tested(package: str, found: str | None) -> bool:
    """Whether a version of a package is of the release in :data:`TESTED`; its build (``+cu130``) does not matter.

    >>> is_tested("torchao", "0.18.0+cu130"), is_tested("torchao", "0.19.0")
    (True, False)
    """
    release = (found or "").partition("+")[0]
    return any(release == one or release.startswith(f"{one}.") for one in TESTED[package])


def cores(root: Path = ROOT) -> int:
    """Processor cores that this process may use: those of its cpuset, up to the quota of its container or job."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for text in _limits(root, "cpu.max")]
    # Rounded up: a quota of 1.5 cores keeps two threads busy for most of the time.
    return min([allowed, *(max(1, math.ceil(int(quota) / int(period))) for quota, period in quotas if quota.isdigit())])


def physical_memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or less where its container or job has a limit."""
    limits = (int(limit) for limit in _limits(root, "memory.max") if limit.isdigit())  # not `max`
    return min([physical_memory_bytes(), *limits])


def _limits(root: Path, file: str) -> Iterator[str]:
    """A file of this process's control group (version 2) and of each above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            # A container may see the host's path here, of which it has the end alone.
            group = Path(line.removeprefix("0::").lstrip("/"))
            for folder in dict.fromkeys((group, *group.parents)):
                with suppress(OSError):
                    yield (root / "sys/fs/cgroup" / folder / file).read_text().strip()


def boot_id() -> str | None:
    """Random number of this machine's kernel since it was started; None where it is not Linux."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else None


def processor_name() -> str:
    """Model name of the processor, or what the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def has_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    with suppress(ModuleNotFoundError):  # of the package that it would be in
        return importlib.util.find_spec(name) is not None
    return False


def find_chromium() -> str | None:
    """Path of a Chromium, which draws PNGs, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def git_commit() -> str | None:
    """Commit of the repository that the caller is in, with ``-dirty`` if it has changes; None outside of one."""
    return (run_command(["git", "describe", "--always", "--abbrev=40", "--dirty"]) or "").strip() or None


def environment(*, nodes: int = 1) -> dict[str, Any]:
    """Content of ``environment.json``: versions and hardware of one of ``nodes`` hosts, no host or user names.

    ``gpus`` is empty, and ``gpu_problem`` has the words, where nvidia-smi fails.
    """
    problem = gpu_problem()
    return {
        "moelab": moelab.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {package: version(package) for package in PACKAGES},
        "processor": processor_name(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": [] if problem else [asdict(gpu) for gpu in gpus()],
        "gpu_problem": problem,
        "git_commit": git_commit(),
        "hosts": nodes,
    }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to examine."""

    root: Path  # of its file system; `/sys` and `/proc` are looked for under it
    env: Mapping[str, str]
    # gives a command's standard output, or None where it is missing or fails
    run: Callable[[Sequence[str]], str | None]
    # folders that Python imports from. Packages are looked for there, not imported: a wrong one may crash
    search: tuple[Path, ...]
    memlock_bytes: int | None  # soft limit of locked memory; None for unlimited

    def text(self, path: str) -> str | None:
        """Content of a file under the root, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder under the root; none where it does not exist."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """An installed distribution by its name."""
        distributions = importlib.metadata.distributions(name=name, path=[str(path) for path in self.search])
        return next(iter(distributions), None)

    def module_folder(self, name: str) -> Path | None:
        """Folder of a package that Python would import."""
        return next((path / name for path in self.search if (path / name / "__init__.py").is_file()), None)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        root=Path("/"),
        env=dict(os.environ),  # a copy: later changes to the environment do not reach the checks
        run=run_command,
        search=tuple(Path(entry or ".") for entry in sys.path),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def run_command(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None where it is missing, fails or hangs."""
    code, output = _answer(command, stderr=subprocess.DEVNULL)
    return output if code == 0 else None
