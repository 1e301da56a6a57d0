"""What a node says of itself without a measurement. Loads little, so that a node with a broken package still reports.

``srun … python -m moelab.health.node`` prints the report as one line of JSON; :mod:`moelab.health.preflight` starts it
on every node and holds the reports against each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import moelab
from moelab.finding import Finding
from moelab.health.deepep import examine_environment
from moelab.health.gpu import check_gpus, read_gpus
from moelab.health.links import Expected, check_rdma
from moelab.machine import Machine, gpu_problem, gpus, this_machine, version

UNREAD = "kernel log"
XID = re.compile(r"NVRM: (Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+).*)")
APPLICATION_XIDS = {13: "graphics engine exception", 31: "page fault", 43: "stopped processing", 45: "cleanup"}
"""Xids that a faulty program makes on a sound GPU; any other says something about the GPU or its driver: NVIDIA, "Xid
Errors" (docs.nvidia.com/deploy/xid-errors)."""
VERSIONS = ("torch", "torchtitan", "torchao", "triton", "nvidia-nccl-cu13", "deep-ep")
"""Packages that have to be the same everywhere; None where one is not installed."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to


def check_node(machine: Machine) -> Iterator[Finding]:
    """A node's GPUs, its kernel log and its network cards."""
    yield from check_gpus(read_gpus(machine))
    yield from check_kernel_log(machine)
    yield from check_rdma(machine, Expected())


def check_kernel_log(machine: Machine) -> Iterator[Finding]:
    """Xid messages of the NVIDIA driver since the node was started."""
    log = machine.run(["dmesg"])
    if log is None:
        log = machine.run(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"])
    if not log:
        restricted = machine.text("/proc/sys/kernel/dmesg_restrict") == "1"
        why = "permission denied (kernel.dmesg_restrict is 1)" if restricted else "dmesg and journalctl do not answer"
        yield Finding(name=UNREAD, severity="note", found=f"cannot be read: {why}; Xid errors are not known")
        return
    by_number: dict[int, list[tuple[str, str]]] = {}
    for line, device, number in XID.findall(log):
        by_number.setdefault(int(number), []).append((device, line))
    for number, entries in sorted(by_number.items()):
        devices = ", ".join(sorted({device for device, _ in entries}))
        program = number in APPLICATION_XIDS
        yield Finding(
            name=f"Xid {number}",
            severity="warning" if program else "error",
            found=f"{len(entries)} since the node was started, on {devices}; last: {entries[-1][1][:160]}",
            cause="most often a program that failed" if program else "the GPU, its link or its driver failed",
            consequence="a run that was on it has ended"
            if program
            else "the next run on it is likely to end the same way",
            remedy="look for the program that ran then"
            if program
            else f"look {number} up in docs.nvidia.com/deploy/xid-errors, and drain the node",
        )
    if not by_number:
        yield Finding(name="Xid errors", severity="ok", found="none in the kernel log")


def report(*, writes: Path | None = None, sees: Sequence[Path] = (), nodes: int = 1) -> dict[str, Any]:
    """Look at this node.

    Args:
        writes: folder that runs or checkpoints go to.
        sees: files and folders that every node has to see.
        nodes: of the job, for what DeepEP needs between them.

    Returns:
        What :func:`moelab.health.preflight.compare` reads. ``time`` is taken last.
    """
    machine, problem = this_machine(), gpu_problem()
    devices = () if problem else gpus()
    open_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in VERSIONS},
            "moelab": f"{moelab.__version__}, source {_source()}",
            "driver": devices[0].driver if devices else None,
        },
        "gpus": [gpu.name for gpu in devices],
        "gpu_problem": problem,
        "memlock_bytes": machine.memlock_bytes,
        "open_files": None if open_files == resource.RLIM_INFINITY else open_files,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "write_problem": _write_problem(writes) if writes else None,
        "unseen": [str(path) for path in sees if not path.exists()],
        "deepep": [one.to_json() for one in examine_environment(machine, Expected(nodes=nodes))],
        "time": time.time(),
    }


def _source() -> str:
    """Digest of moelab's source, so that two copies of the same version are told apart."""
    folder = Path(moelab.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _write_problem(folder: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moelab-node-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())  # a quota on a network file system is noticed here, not before
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="moelab.health.node", description="Say what this node has.")
    parser.add_argument("--writes", type=Path, help="folder of runs or checkpoints")
    parser.add_argument("--sees", type=Path, action="append", default=[], help="what every node has to see")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    options = parser.parse_args(arguments)
    print(json.dumps(report(writes=options.writes, sees=options.sees, nodes=options.nodes)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
