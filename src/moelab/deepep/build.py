"""Which DeepEP is installed, and what it was built with: told from files, since importing the wrong one may crash."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moelab.deepep.probe import search_file, version_tuple
from moelab.finding import Finding
from moelab.machine import Machine

Kind = Literal["none", "V1", "V2", "hybrid-ep", "unknown"]
NAMES = {
    "V1": "V1 (Buffer, on NVSHMEM)",
    "V2": "V2 (ElasticBuffer, on NCCL)",
    "hybrid-ep": "hybrid-ep (HybridEPBuffer)",
    "unknown": "a package deep_ep that is none of DeepEP's",
}
SOURCE = "github.com/deepseek-ai/DeepEP"
NCCL_NEEDED = (2, 30, 4)
"""``README.md`` of DeepEP 2.1.0."""
NCCL_STABLE_ABI = (2, 31)
"""Before this release the NCCL that is loaded must be the one that DeepEP was compiled with: ``nccl.cu`` of 2.1.0."""
NCCL_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, kw_only=True)
class Build:
    """The DeepEP that Python would import.

    Attributes:
        kind: told by its modules.
        version: empty where nothing says it.
        folder: of the package.
        compiled: whether its extension module lies beside it.
        from_index: whether pip took it from a package index such as PyPI.
    """

    kind: Kind
    version: str = ""
    folder: Path | None = None
    compiled: bool = False
    from_index: bool = False


def find_build(machine: Machine) -> Build:
    """Look for a package ``deep_ep`` without importing it."""
    folder = machine.module_folder("deep_ep")
    if folder is None:
        return Build(kind="none")
    kind: Kind = "unknown"
    if (folder / "buffers" / "elastic.py").is_file():
        kind = "V2"
    elif (folder / "hybrid_ep_buffer.py").is_file():
        kind = "hybrid-ep"
    elif (folder / "buffer.py").is_file():
        kind = "V1"
    pattern, place = {"V2": ("_C*.so", folder), "hybrid-ep": ("hybrid_ep_cpp*.so", folder.parent)}.get(
        kind, ("deep_ep_cpp*.so", folder.parent)
    )
    return Build(
        kind=kind,
        version=_version(machine, folder),
        folder=folder,
        compiled=any(place.glob(pattern)),
        from_index=_from_index(machine),
    )


def _version(machine: Machine, folder: Path) -> str:
    distribution = machine.distribution("deep-ep")
    if distribution is not None:
        return distribution.version
    written = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", (folder / "__init__.py").read_text(), re.M)
    return written[1] if written else ""


def _from_index(machine: Machine) -> bool:
    """Pip notes where a package came from unless it was an index; DeepEP's own builds carry ``+commit``."""
    distribution = machine.distribution("deep-ep")
    if distribution is None or "+" in distribution.version:
        return False
    came_from = distribution.read_text("direct_url.json")
    return distribution.read_text("INSTALLER") is not None and not (came_from and json.loads(came_from))


def check_build(machine: Machine, build: Build) -> Iterator[Finding]:
    """Which DeepEP it is, and whether it can be imported."""
    name = "DeepEP"
    if build.kind == "none":
        stray = machine.distribution("deep-ep")
        found = "not installed" if stray is None else f"{stray.version} is listed, and its package is not there"
        yield Finding(name=name, severity="note", found=f"{found}; arms with deepep need it, CUDA GPUs and NVLink")
        return
    found = f"{NAMES[build.kind]} {build.version}".strip()
    if build.from_index:
        yield Finding(
            name=name,
            severity="error",
            found=f"{found}, from a package index",
            cause="PyPI's `deep-ep` is an upload of V1's sources of February 2025; it is not DeepEP V2",
            consequence="there is no ElasticBuffer: neither TorchTitan 0.3.0 nor moelab can use it",
            remedy=f"pip uninstall deep-ep, then build V2 from {SOURCE}",
        )
        return
    if build.kind in ("V1", "unknown"):
        yield Finding(
            name=name,
            severity="error",
            found=found,
            cause="TorchTitan 0.3.0 and moelab call ElasticBuffer, which DeepEP has since 2.0",
            consequence="the import fails before the first step",
            remedy=f"build V2 from {SOURCE}, and remove this one first",
        )
        return
    if not build.compiled:
        yield Finding(
            name=name,
            severity="error",
            found=f"{found}, not compiled",
            cause=f"no extension module lies beside {build.folder}: these are the sources",
            consequence="`import deep_ep` fails",
            remedy="build it (python setup.py install, or pip install --no-build-isolation .), or leave its checkout",
        )
        return
    yield Finding(name=name, severity="ok", found=found)
    if build.kind == "V2":
        yield _compiler(machine)


def _compiler(machine: Machine) -> Finding:
    """V2 compiles its kernels when they are first used."""
    folders = [machine.env.get("CUDA_HOME"), machine.env.get("CUDA_PATH")]
    given = [Path(folder) / "bin" / "nvcc" for folder in folders if folder]
    given += [Path(machine.env["EP_JIT_NVCC_COMPILER"])] if "EP_JIT_NVCC_COMPILER" in machine.env else []
    on_path = [Path(folder) / "nvcc" for folder in machine.env.get("PATH", "").split(":") if folder]
    candidates = [*given, *on_path, Path("/usr/local/cuda/bin/nvcc")]
    found = next((path for path in candidates if (machine.root / str(path).lstrip("/")).exists()), None)
    if found is not None:
        return Finding(name="CUDA compiler", severity="ok", found=str(found))
    return Finding(
        name="CUDA compiler",
        severity="error",
        found="no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda",
        cause="DeepEP V2 compiles a kernel for every setting when it first meets it",
        consequence="the first dispatch fails",
        remedy="install the CUDA toolkit of PyTorch's CUDA version and set CUDA_HOME",
    )


def check_nccl(machine: Machine, build: Build) -> Iterator[Finding]:
    """The NCCL that is loaded, the one that DeepEP was built against, and what V2 needs."""
    loaded_path = _loaded_nccl(machine)
    if loaded_path is None:
        if build.kind == "V2":
            yield _too_old("no libnccl found")
        return
    loaded = search_file(loaded_path, rb"NCCL version (\d+\.\d+\.\d+)") or ""
    built = _built_against(machine, build)
    found = f"loaded {loaded or 'of unknown version'}" + (f", DeepEP built against {built}" if built else "")
    if build.kind != "V2":
        yield Finding(name="NCCL", severity="ok" if version_tuple(loaded) >= NCCL_NEEDED else "note", found=found)
    elif version_tuple(loaded) < NCCL_NEEDED:
        yield _too_old(found)
    elif built and built != loaded and version_tuple(loaded) < NCCL_STABLE_ABI:
        yield Finding(
            name="NCCL",
            severity="error",
            found=found,
            cause="before NCCL 2.31 its device interface has no stable layout; DeepEP checks that both are the same",
            consequence="the buffer's creation fails, or reads memory that is laid out differently",
            remedy="rebuild DeepEP against the NCCL that PyTorch loads (EP_NCCL_ROOT_DIR), or install the other one",
        )
    else:
        yield Finding(name="NCCL", severity="ok", found=found)
    wheels = [name for name in NCCL_WHEELS if machine.distribution(name) is not None]
    if len(wheels) > 1:
        yield Finding(
            name="NCCL packages",
            severity="warning",
            found=" and ".join(wheels),
            cause="both write the same folder nvidia/nccl",
            consequence="which NCCL is loaded depends on which was installed last",
            remedy="uninstall both, then install the one of PyTorch's CUDA version",
        )


def _too_old(found: str) -> Finding:
    return Finding(
        name="NCCL",
        severity="error",
        found=found,
        cause="DeepEP V2 is built on NCCL's device interface of 2.30.4 and later",
        consequence="DeepEP does not build, or its buffer cannot be created",
        remedy='pip install "nvidia-nccl-cu13>=2.30.4" --no-deps, then rebuild DeepEP',
    )


def _loaded_nccl(machine: Machine) -> Path | None:
    """The library that PyTorch loads: one that is preloaded, else the wheel's, which its RPATH names."""
    for entry in re.split(r"[:\s]", machine.env.get("LD_PRELOAD", "")):
        if "libnccl" in entry:
            return machine.root / entry.lstrip("/")
    wheels = (path / "nvidia" / "nccl" / "lib" / "libnccl.so.2" for path in machine.search)
    return next((path for path in wheels if path.is_file()), None)


def _built_against(machine: Machine, build: Build) -> str | None:
    """The headers that DeepEP's build found: in the folder that it was given and remembers, else in the wheel."""
    if build.kind != "V2" or build.folder is None:
        return None
    kept = search_file(build.folder / "envs.py", rb"persistent_envs\['EP_NCCL_ROOT_DIR'\] = '(.+?)'")
    named = [kept, machine.env.get("EP_NCCL_ROOT_DIR"), machine.env.get("NCCL_DIR")]
    roots = [machine.root / one.lstrip("/") for one in named if one]
    roots += [path / "nvidia" / "nccl" for path in machine.search]
    header = next((path for root in roots if (path := root / "include" / "nccl.h").is_file()), None)
    if header is None:
        return None
    numbers = [search_file(header, rb"#define NCCL_%s (\d+)" % part) for part in (b"MAJOR", b"MINOR", b"PATCH")]
    return ".".join(number or "?" for number in numbers)
