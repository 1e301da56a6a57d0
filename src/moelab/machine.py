"""What this machine has, asked without loading torch.

The checks of :mod:`moelab.health` ask a :class:`Machine` that is given to them, so that tests can make machines up.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moelab

PACKAGES = ("torch", "torchtitan", "torchao", "tokenizers", "triton", "nvidia-nccl-cu13", "plotly", "papermill")
INFINIBAND = "/sys/class/infiniband"
COMMAND_TIMEOUT_S = 20


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU as nvidia-smi lists it; ``capability`` is its SM version, such as 10.0.

    ``memory_mib`` is None where the GPU shares the system's memory.
    """

    name: str
    capability: float
    driver: str
    memory_mib: int | None


@functools.cache
def gpus() -> tuple[GpuInfo, ...]:
    """GPUs of this node that ``CUDA_VISIBLE_DEVICES`` leaves; empty where there is no working nvidia-smi."""
    query = ["--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        query.append(f"--id={visible}")
    try:
        done = subprocess.run(
            ["nvidia-smi", *query],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    return tuple(
        GpuInfo(name=n, capability=float(c), driver=d, memory_mib=int(m) if m.isdigit() else None)
        for n, c, d, m in rows
    )


def version(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor_name() -> str:
    """Model name of the processor, or what the system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def has_module(name: str) -> bool:
    """Whether a module can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def find_chromium() -> str | None:
    """A Chromium that can draw PNGs, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def git_commit() -> str | None:
    """Commit of the repository that the caller is in, with ``-dirty`` if it has changes; None outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def environment(*, nodes: int = 1) -> dict[str, Any]:
    """Content of ``environment.json``: versions and hardware, no host or user names.

    Args:
        nodes: hosts that take part in the run.
    """
    return {
        "moelab": moelab.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {package: version(package) for package in PACKAGES},
        "processor": processor_name(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": [asdict(gpu) for gpu in gpus()],
        "git_commit": git_commit(),
        "hosts": nodes,
    }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to examine.

    Attributes:
        root: of its file system; ``/sys`` and ``/proc`` are looked for under it.
        env: its environment variables.
        run: gives a command's standard output, or None where it is missing or fails.
        search: folders that Python imports from. Packages are looked for there, not imported: a wrong one may crash.
        memlock_bytes: soft limit of locked memory; None for unlimited.
    """

    root: Path
    env: Mapping[str, str]
    run: Callable[[Sequence[str]], str | None]
    search: tuple[Path, ...]
    memlock_bytes: int | None

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
        found = importlib.metadata.distributions(name=name, path=[str(path) for path in self.search])
        return next(iter(found), None)

    def module_folder(self, name: str) -> Path | None:
        """Folder of a package that Python would import."""
        return next((path / name for path in self.search if (path / name / "__init__.py").is_file()), None)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        root=Path("/"),
        env=dict(os.environ),
        run=run_command,
        search=tuple(Path(entry or ".") for entry in sys.path),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def run_command(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
