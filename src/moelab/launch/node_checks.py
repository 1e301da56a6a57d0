"""Reports of all nodes held against each other and against the cluster's profile: the odd one out is named."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moelab.deepep.findings import Finding
from moelab.launch.cluster import ClusterProfile
from moelab.runs.log import CLOCK_SKEW_S

Report = Mapping[str, Any]
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL and data loaders share memory between a node's processes; a container gets 64 MiB unless it is told otherwise
(NCCL user guide, Troubleshooting: ``--shm-size=1g``)."""
OPEN_FILES = 4096
"""A choice: a rank of a few hundred holds some sockets for each peer and communicator, and its checkpoint's files."""
NAMED_NODES = 8
ABSENT = Finding(
    name="DeepEP",
    severity="error",
    found="not installed",
    cause="an arm of the study needs it",
    consequence="that arm fails when it builds its model",
    remedy="install it in the environment of the profile, or leave the arm out (--arm)",
)


def compare(reports: Sequence[Report], cluster: ClusterProfile, *, nodes: int, deepep: bool) -> tuple[Finding, ...]:
    """Judge what the nodes said.

    Args:
        reports: of :func:`moelab.launch.node_report.report`, with ``clock_offset_s`` where it was measured.
        cluster: what its nodes should have.
        nodes: reports that were asked for.
        deepep: whether a run needs DeepEP, so that its findings count.
    """
    if not reports:
        return (_missing(0, nodes),)
    return (
        *([_missing(len(reports), nodes)] if len(reports) < nodes else []),
        *_versions(reports),
        *_gpus(reports, cluster),
        *_folders(reports),
        _clocks(reports),
        *_limits(reports, cluster),
        *(_deepep(reports) if deepep else ()),
    )


def _missing(answered: int, nodes: int) -> Finding:
    return Finding(
        name="nodes",
        severity="error",
        found=f"{answered} of {nodes} answered",
        cause="a node is down, or the environment of the profile does not work there",
        consequence="a run on all of them does not start",
        remedy="see what srun printed; sinfo -R shows nodes that are down or drained",
    )


def _versions(reports: Sequence[Report]) -> Iterator[Finding]:
    different = False
    for name in reports[0]["versions"]:
        groups = _grouped(reports, lambda report, name=name: report["versions"].get(name))
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
    if not cluster.gpus_per_node:
        return
    groups = _grouped(reports, lambda report: report.get("gpu_problem") or _counted(report["gpus"]))
    wrong = [report for report in reports if not _as_profile(report["gpus"], cluster)]
    if not wrong and len(groups) == 1:
        yield Finding(name="GPUs", severity="ok", found=f"{next(iter(groups))} on each of {len(reports)} nodes")
        return
    wanted = f"{cluster.gpus_per_node} × {cluster.gpu_type or 'one kind'}"
    yield Finding(
        name="GPUs",
        severity="error",
        found=_odd(groups, "none") + f"; the profile says {wanted}",
        cause="a GPU is lost, hidden from the job, or the node is of another kind",
        consequence="ranks without a GPU fail at once, and unequal ones wait for the slowest",
        remedy="nvidia-smi -L on that node; drain it, or correct the profile",
    )


def _as_profile(gpus: Sequence[str], cluster: ClusterProfile) -> bool:
    kind = (cluster.gpu_type or "").lower()
    return len(gpus) == cluster.gpus_per_node and all(kind in gpu.lower() for gpu in gpus)


def _folders(reports: Sequence[Report]) -> Iterator[Finding]:
    if bad := _grouped([one for one in reports if one["write_problem"]], lambda report: report["write_problem"]):
        yield Finding(
            name="runs and checkpoints",
            severity="error",
            found=_listed(bad),
            cause="the folder is not mounted there, is read-only, full, or over quota",
            consequence="the run cannot write its log or its checkpoints",
            remedy="set runs and scratch of the profile to a shared folder with room",
        )
    if unseen := _grouped(
        [one for one in reports if one["unseen"]], lambda report: f"does not see {', '.join(report['unseen'])}"
    ):
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
    middle = statistics.median(offsets.values())
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
    small = [one for one in reports if one["shared_memory_bytes"] < SHARED_MEMORY_BYTES]
    if small:
        yield Finding(
            name="shared memory",
            severity="warning",
            found=_listed(_grouped(small, lambda report: f"{report['shared_memory_bytes'] >> 20} MiB of /dev/shm")),
            cause="the container was started with its default, or the node has little memory",
            consequence="NCCL or a data loader fails with: No space left on device, or a bus error",
            remedy="give the container 1 GiB or more (--shm-size), or mount the node's /dev/shm",
        )
    locked = [one for one in reports if one["memlock_bytes"] is not None]
    if locked and cluster.memlock == "unlimited":
        yield Finding(
            name="locked memory",
            severity="error",
            found=_listed(_grouped(locked, lambda report: f"{report['memlock_bytes'] / 2**20:.3g} MiB")),
            cause="the limit (ulimit -l) of slurmd or the container; the profile says memlock: unlimited",
            consequence="RDMA cannot register its buffers: NCCL and DeepEP fail between nodes",
            remedy="LimitMEMLOCK=infinity for slurmd, --ulimit memlock=-1 for a container",
        )
    few = [one for one in reports if one["open_files"] is not None and one["open_files"] < OPEN_FILES]
    if few:
        yield Finding(
            name="open files",
            severity="warning",
            found=_listed(_grouped(few, lambda report: str(report["open_files"]))),
            cause="the limit (ulimit -n) of slurmd or the container",
            consequence="a run of many ranks fails with: Too many open files",
            remedy=f"LimitNOFILE of slurmd, or ulimit -n {OPEN_FILES} in a file of the profile's source",
        )
    if not small and not few and not (locked and cluster.memlock == "unlimited"):
        yield Finding(name="limits", severity="ok", found="shared and locked memory and open files suffice")


def _deepep(reports: Sequence[Report]) -> Iterator[Finding]:
    """What a node finds about DeepEP; the same finding of several nodes comes once."""
    entries = [(one["node"], Finding(**entry)) for one in reports for entry in one["deepep"]]
    entries += [(node, ABSENT) for node, finding in entries if finding.name == "DeepEP" and finding.severity == "note"]
    faults = {fault: [node for node, other in entries if other == fault] for _, fault in entries if not fault.ok}
    for finding, nodes in faults.items():
        where = "all nodes" if len(nodes) == len(reports) else _names(nodes)
        yield Finding(**{**finding.to_json(), "name": f"DeepEP on {where}: {finding.name}"})
    if not faults:
        build = next((finding.found for _, finding in entries if finding.name == "DeepEP"), "nothing against it")
        yield Finding(name="DeepEP on all nodes", severity="ok", found=build)


def _grouped(reports: Iterable[Report], key: Any) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report["node"])
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


def _counted(gpus: Sequence[str]) -> str:
    """Such as ``8 × NVIDIA B200``."""
    return ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
