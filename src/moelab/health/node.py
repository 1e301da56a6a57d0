"""What a node says of itself without a measurement, and the reports of all nodes held against each other.

``srun … python -m moelab.health.node`` prints a node's report as one line of JSON. :mod:`moelab.health.preflight`
starts it on every node; :func:`compare` names the odd one out. Loads no torch.
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
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import moelab
from moelab.finding import Finding
from moelab.health.deepep import examine_environment
from moelab.health.gpu import check_gpus, read_gpus
from moelab.health.links import Expected, check_ports
from moelab.launch.cluster import ClusterProfile
from moelab.machine import Machine, gpus, this_machine, version
from moelab.runs.segments import CLOCK_SKEW_S

Report = Mapping[str, Any]
UNREAD = "kernel log"
XID = re.compile(r"NVRM: (Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+).*)")
APPLICATION_XIDS = {13: "graphics engine exception", 31: "page fault", 43: "stopped processing", 45: "cleanup"}
"""Xids that a faulty program makes on a sound GPU; any other says something about the GPU or its driver: NVIDIA, "Xid
Errors" (docs.nvidia.com/deploy/xid-errors)."""
VERSIONS = ("torch", "torchtitan", "torchao", "triton", "nvidia-nccl-cu13", "deep-ep")
"""Packages that have to be the same everywhere; None where one is not installed."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL and data loaders share memory between a node's processes; a container gets 64 MiB unless it is told otherwise
(NCCL user guide, Troubleshooting: ``--shm-size=1g``)."""
OPEN_FILES = 4096
"""A choice: a rank of a few hundred holds some sockets for each peer and communicator, and its checkpoint's files."""
NAMED_NODES = 8


def check_node(machine: Machine) -> Iterator[Finding]:
    """A node's GPUs, its kernel log and its network cards."""
    yield from check_gpus(read_gpus(machine))
    yield from check_kernel_log(machine)
    yield from check_ports(machine)


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
        What :func:`compare` reads. ``time`` is taken last.
    """
    machine, devices = this_machine(), gpus()
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


def compare(reports: Sequence[Report], cluster: ClusterProfile, *, nodes: int, deepep: bool) -> tuple[Finding, ...]:
    """Judge what the nodes said.

    Args:
        reports: of :func:`report`, with ``clock_offset_s`` where it was measured.
        cluster: what its nodes should have.
        nodes: reports that were asked for.
        deepep: whether a run needs DeepEP, so that its findings count.
    """
    missing = Finding(
        name="nodes",
        severity="error",
        found=f"{len(reports)} of {nodes} answered",
        cause="a node is down, or the environment of the profile does not work there",
        consequence="a run on all of them does not start",
        remedy="see what srun printed; sinfo -R shows nodes that are down or drained",
    )
    if not reports:
        return (missing,)
    return (
        *([missing] if len(reports) < nodes else []),
        *_versions(reports),
        *(_gpus(reports, cluster) if cluster.gpus_per_node else ()),
        *_folders(reports),
        _clocks(reports),
        *_limits(reports, cluster),
        *(_deepep(reports) if deepep else ()),
    )


def _versions(reports: Sequence[Report]) -> Iterator[Finding]:
    different = False
    for name in reports[0]["versions"]:
        groups = _grouped((one, one["versions"].get(name)) for one in reports)
        if len(groups) > 1:
            different = True
            yield Finding(
                name=f"{name} on all nodes",
                severity="error",
                found=_odd(groups, "not installed"),
                cause="the nodes have other images or file systems, or the environment is set up differently there",
                consequence="ranks compute differently, fail to load what the others saved, or wait for ever",
                remedy="use one environment on a shared file system, or one container image",
            )
    if not different:
        named = ", ".join(f"{name} {value}" for name, value in reports[0]["versions"].items() if value)
        yield Finding(name="versions", severity="ok", found=f"the same on {len(reports)} nodes: {named}")


def _gpus(reports: Sequence[Report], cluster: ClusterProfile) -> Iterator[Finding]:
    kind, wanted = (cluster.gpu_type or "").lower(), cluster.gpus_per_node
    groups = _grouped((one, _counted(one["gpus"])) for one in reports)
    right = all(len(one["gpus"]) == wanted and all(kind in gpu.lower() for gpu in one["gpus"]) for one in reports)
    if right and len(groups) == 1:
        yield Finding(name="GPUs", severity="ok", found=f"{next(iter(groups))} on each of {len(reports)} nodes")
        return
    yield Finding(
        name="GPUs",
        severity="error",
        found=f"{_odd(groups, 'none')}; the profile says {wanted} × {cluster.gpu_type or 'one kind'}",
        cause="a GPU is lost, hidden from the job, or the node is of another kind",
        consequence="ranks without a GPU fail at once, and unequal ones wait for the slowest",
        remedy="nvidia-smi -L on that node; drain it, or correct the profile",
    )


def _folders(reports: Sequence[Report]) -> Iterator[Finding]:
    if bad := _grouped((one, one["write_problem"]) for one in reports if one["write_problem"]):
        yield Finding(
            name="runs and checkpoints",
            severity="error",
            found=_listed(bad),
            cause="the folder is not mounted there, is read-only, full, or over quota",
            consequence="the run cannot write its log or its checkpoints",
            remedy="set runs and scratch of the profile to a shared folder with room",
        )
    if unseen := _grouped((one, f"does not see {', '.join(one['unseen'])}") for one in reports if one["unseen"]):
        yield Finding(
            name="shared files",
            severity="error",
            found=_listed(unseen),
            cause="the file system is not mounted there, or the path is local to one machine",
            consequence="the run finds neither its directory nor its data",
            remedy="use a path that all nodes share; mount it into the container too",
        )
    if not bad and not unseen:
        yield Finding(name="shared files", severity="ok", found=f"{len(reports)} nodes see and write them")


def _clocks(reports: Sequence[Report]) -> Finding:
    offsets = {one["node"]: one["clock_offset_s"] for one in reports if one.get("clock_offset_s") is not None}
    if not offsets:
        return Finding(name="clocks", severity="note", found="not compared: nobody noted when the reports came")
    middle = statistics.median(offsets.values())  # the clock of the machine that asks may itself be wrong
    far = {node: offset - middle for node, offset in offsets.items() if abs(offset - middle) > CLOCK_SKEW_S}
    if not far:
        widest = max(offsets.values()) - min(offsets.values())
        return Finding(name="clocks", severity="ok", found=f"within {widest:.1f} s of each other, as reports came in")
    return Finding(
        name="clocks",
        severity="error",
        found=", ".join(f"{node} {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" for node, skew in far.items()),
        cause="the node's clock is not synchronised",
        consequence=f"above {CLOCK_SKEW_S:g} s a log's lines are taken for those of another start of the job",
        remedy="chronyc tracking (or timedatectl) on that node",
    )


def _limits(reports: Sequence[Report], cluster: ClusterProfile) -> Iterator[Finding]:
    shared = [(one, one["shared_memory_bytes"]) for one in reports]
    small = _grouped((one, f"{size >> 20} MiB of /dev/shm") for one, size in shared if size < SHARED_MEMORY_BYTES)
    if small:
        yield Finding(
            name="shared memory",
            severity="warning",
            found=_listed(small),
            cause="the container was started with its default, or the node has little memory",
            consequence="NCCL or a data loader fails with: No space left on device, or a bus error",
            remedy="give the container 1 GiB or more (--shm-size), or mount the node's /dev/shm",
        )
    lockable = [(one, one["memlock_bytes"]) for one in reports if cluster.memlock == "unlimited"]
    locked = _grouped((one, f"{limit / 2**20:.3g} MiB") for one, limit in lockable if limit is not None)
    if locked:
        yield Finding(
            name="locked memory",
            severity="error",
            found=_listed(locked),
            cause="the limit (ulimit -l) of slurmd or the container; the profile says memlock: unlimited",
            consequence="RDMA cannot register its buffers: NCCL and DeepEP fail between nodes",
            remedy="LimitMEMLOCK=infinity for slurmd, --ulimit memlock=-1 for a container",
        )
    files = [(one, one["open_files"]) for one in reports]
    few = _grouped((one, str(limit)) for one, limit in files if limit is not None and limit < OPEN_FILES)
    if few:
        yield Finding(
            name="open files",
            severity="warning",
            found=_listed(few),
            cause="the limit (ulimit -n) of slurmd or the container",
            consequence="a run of many ranks fails with: Too many open files",
            remedy=f"LimitNOFILE of slurmd, or ulimit -n {OPEN_FILES} in a file of the profile's source",
        )
    if not small and not locked and not few:
        yield Finding(name="limits", severity="ok", found="shared and locked memory and open files suffice")


def _deepep(reports: Sequence[Report]) -> Iterator[Finding]:
    """What a node finds about DeepEP; the same finding of several nodes comes once."""
    faults: dict[Finding, list[str]] = {}
    for node, finding in [(one["node"], Finding(**entry)) for one in reports for entry in one["deepep"]]:
        if finding.name == "DeepEP" and finding.severity == "note":  # a node alone does not know that it is needed
            finding = replace(
                finding,
                severity="error",
                found="not installed",
                cause="an arm of the study needs it",
                consequence="that arm fails when it builds its model",
                remedy="install it in the environment of the profile, or leave the arm out (--arm)",
            )
        if not finding.ok:
            faults.setdefault(finding, []).append(node)
    for finding, nodes in faults.items():
        where = "all nodes" if len(nodes) == len(reports) else _names(nodes)
        yield replace(finding, name=f"DeepEP on {where}: {finding.name}")
    if not faults:
        build = next(entry["found"] for entry in reports[0]["deepep"] if entry["name"] == "DeepEP")
        yield Finding(name="DeepEP on all nodes", severity="ok", found=build)


def _counted(gpus: Sequence[str]) -> str:
    """Such as ``8 × NVIDIA B200``."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(gpus).items())


def _grouped(values: Iterable[tuple[Report, Any]]) -> dict[Any, list[str]]:
    """Names of the nodes that have each value."""
    groups: dict[Any, list[str]] = {}
    for one, value in values:
        groups.setdefault(value, []).append(one["node"])
    return groups


def _odd(groups: Mapping[Any, list[str]], absent: str) -> str:
    """The smaller groups by name, the largest by its size: ``n1: 0.17.0; 2 others: 0.18.0``."""
    *smaller, (value, nodes) = sorted(groups.items(), key=lambda item: len(item[1]))
    named = [f"{_names(held)}: {shown or absent}" for shown, held in smaller]
    return "; ".join([*named, f"{len(nodes)} {'other' if len(nodes) == 1 else 'others'}: {value or absent}"])


def _listed(groups: Mapping[Any, list[str]]) -> str:
    return "; ".join(f"{_names(nodes)}: {value}" for value, nodes in groups.items())


def _names(nodes: Sequence[str]) -> str:
    rest = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
    return ", ".join(nodes[:NAMED_NODES]) + rest


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
