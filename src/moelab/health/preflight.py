"""Before a study goes to a cluster: what would stop it, looked at here, by Slurm and on every node.

Three groups: the study against the profile (an error is a refusal, exit code 3), this machine and Slurm, and the nodes,
which report by :mod:`moelab.health.node` in a short step of srun and are held against each other. Called inside a job,
as before a big run, the step runs on the job's own nodes.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.experiment import EPBackend
from moelab.experiment_file import Study
from moelab.finding import Finding, any_error, fault
from moelab.launch import slurm
from moelab.launch.cluster import ClusterProfile
from moelab.launch.requirements import check_data, check_plans, check_room
from moelab.launch.script import container_options, gpu_options, python_of, set_up
from moelab.launch.slurm import SlurmError, SlurmMissing
from moelab.launch.submit import dry_run
from moelab.runs.log import CLOCK_SKEW_S

WAIT_S = 300
"""How long srun waits for the nodes."""
STEP_MINUTES = 5
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL and data loaders share memory between a node's processes; a container gets 64 MiB unless it is told otherwise
(NCCL user guide, Troubleshooting: ``--shm-size=1g``)."""
OPEN_FILES = 4096
"""A choice: a rank of a few hundred holds some sockets for each peer and communicator, and its checkpoint's files."""
NAMED_NODES = 8
DEEPEP = (EPBackend.DEEPEP, EPBackend.HYBRIDEP)
COMPLAINT_LINES, COMPLAINT_CHARACTERS = 3, 400
Report = Mapping[str, Any]
TITLES = {"study": "The study on this cluster", "here": "This machine and Slurm", "nodes": "The nodes"}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was found, by group."""

    study: tuple[Finding, ...]
    here: tuple[Finding, ...]
    nodes: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a check failed, 3 the study would be refused."""
        if any_error(self.study):
            return 3
        return 1 if any_error((*self.here, *self.nodes)) else 0

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        listed = {group: [one.to_json() for one in getattr(self, group)] for group in TITLES}
        return {"ok": self.exit_code == 0, **listed}

    def as_text(self) -> str:
        """For a person."""
        groups = {title: getattr(self, group) for group, title in TITLES.items()}
        shown = {title: [line for one in group for line in one.as_lines()] for title, group in groups.items()}
        return "\n\n".join("\n".join([title, *lines]) for title, lines in shown.items() if lines)


def preflight(cluster: ClusterProfile, study: Study | None, runs: Path, *, ask_nodes: bool) -> Preflight:
    """Look at everything.

    Args:
        cluster: where it would run.
        study: what would run; None looks at the cluster alone.
        runs: folder of all studies.
        ask_nodes: whether every node that the study needs, or the profile has, reports.
    """
    runs = runs.absolute()
    here = [*check_room(study, cluster, runs), *_slurm(cluster)]
    plans = tuple(check_plans(study, cluster)) if study else ()
    # Of a study that is refused, or without room, Slurm's opinion adds nothing, and a dry run would raise.
    if study and not any_error(here) and not any_error(plans):
        here.append(_test_only(study, cluster, runs))
    return Preflight(
        study=(*plans, *check_data(study, cluster)) if study else (),
        here=tuple(here),
        nodes=check_nodes(cluster, study, runs) if ask_nodes else (),
    )


def check_nodes(cluster: ClusterProfile, study: Study | None, runs: Path) -> tuple[Finding, ...]:
    """Let every node report, and compare what they say."""
    experiments = study.experiments if study else ()
    nodes = max((one.nodes for one in experiments), default=cluster.nodes)
    deepep = any(one.ep_backend in DEEPEP and one.ep_kernels == "native" for one in experiments)
    # A file made now cannot be on a node by chance, as an old copy of the folder could.
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=runs, prefix=".moelab-seen-") as marker:
        sees = [marker.name, *cluster.datasets.values(), *cluster.tokenizers.values()]
        try:
            reports, complaint = collect_reports(cluster, nodes, writes=Path(cluster.scratch or runs), sees=sees)
        except SlurmMissing as error:
            return (fault("srun", str(error)),)
    unanswered = [fault("srun", complaint[:COMPLAINT_CHARACTERS])] if complaint and len(reports) < nodes else []
    return (*unanswered, *compare(reports, cluster, nodes=nodes, deepep=deepep))


def collect_reports(
    cluster: ClusterProfile, nodes: int, *, writes: Path, sees: Sequence[str]
) -> tuple[list[Report], str]:
    """Start :mod:`moelab.health.node` on nodes; their reports, and what srun said beside them.

    A report's ``clock_offset_s`` is its time less the time here when its line came: what differs between nodes is the
    difference of their clocks, but for the milliseconds that a line takes.

    Raises:
        SlurmMissing: if there is no srun here.
    """
    command = [*_srun(cluster, nodes), "bash", "-c", node_script(cluster, nodes, writes=writes, sees=sees)]
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        except FileNotFoundError:
            raise SlurmMissing("srun is not on PATH; use a machine that has Slurm, such as a login node") from None
        with process:
            assert process.stdout is not None, "it is a pipe"
            reports = list(_reports(process.stdout))
        errors.seek(0)
        # What the nodes complained of, once each and without their labels; else what srun itself did.
        lines = [line.strip() for line in errors if line.strip()]
        labelled = [line.partition(": ") for line in lines]
        of_nodes = dict.fromkeys(text for label, _, text in labelled if label.isdecimal())
        return reports, "; ".join((list(of_nodes) or lines)[-COMPLAINT_LINES:])


def node_script(cluster: ClusterProfile, nodes: int, *, writes: Path, sees: Sequence[str]) -> str:
    """What bash does on a node: the set-up of the job's script, and the report.

    A limit that cannot be raised is no failure here: the report says what it is.
    """
    report = ["-m", "moelab.health.node", f"--nodes={nodes}", f"--writes={writes}"]
    report += [f"--sees={path}" for path in sees]
    lines = [shlex.join(words) for words in set_up(cluster)]
    limit = ["ulimit -l unlimited || true"] if cluster.memlock == "unlimited" else []
    return "\n".join(["set -eo pipefail", *lines, *limit, f"exec {shlex.join([python_of(cluster), *report])}"])


def _srun(cluster: ClusterProfile, nodes: int) -> list[str]:
    """Srun with one task on each node; inside a job it takes the job's nodes."""
    options = ["--label", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    options += [*gpu_options(cluster, cluster.gpus_per_node), *container_options(cluster)]
    # Inside a job srun takes what the job has; asking for a partition again would make a job of its own.
    if "SLURM_JOB_ID" not in os.environ:
        named = [f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(cluster, name))]
        options += [*named, f"--immediate={WAIT_S}", f"--time={STEP_MINUTES}", "--propagate=NONE"]
        options += ["--job-name=moelab-preflight", *(["--exclusive"] if cluster.exclusive else [])]
    return ["srun", *options]


def _reports(lines: Iterable[str]) -> Iterator[Report]:
    """Reports from what ``srun --label`` prints: ``3: {…}``, cut every 1024 bytes into lines of the same label.

    What a module or a shell file prints before is passed over.
    """
    begun: dict[str, str] = {}
    for line in lines:
        label, _, text = line.rstrip("\n").partition(": ")
        if not begun.get(label) and not text.startswith("{"):
            continue
        begun[label] = begun.get(label, "") + text
        try:
            report = json.loads(begun[label])
        except ValueError:
            continue  # more lines of it follow
        yield {**report, "clock_offset_s": report["time"] - time.time()}


def _slurm(cluster: ClusterProfile) -> Iterator[Finding]:
    if cluster.scheduler != "slurm":
        yield Finding(name="Slurm", severity="note", found=f"cluster {cluster.name} has none: `moelab run` starts runs")
        return
    try:
        yield Finding(name="Slurm", severity="ok", found=slurm.call("sbatch", "--version").strip())
    except (SlurmMissing, SlurmError) as error:
        yield fault("Slurm", str(error))


def _test_only(study: Study, cluster: ClusterProfile, runs: Path) -> Finding:
    """Ask Slurm about the very scripts that submitting would hand over."""
    name = "sbatch --test-only"
    if cluster.scheduler != "slurm":
        return Finding(name=name, severity="note", found=f"{cluster.name} starts runs without Slurm")
    scripts = dry_run(study, runs, cluster).scripts
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
            for script in scripts:
                Path(file.name).write_text(script)
                slurm.call("sbatch", "--test-only", file.name)
    except (SlurmMissing, SlurmError) as error:
        return fault(name, str(error))
    return Finding(name=name, severity="ok", found=f"Slurm would take {len(scripts)} script(s)")


def compare(reports: Sequence[Report], cluster: ClusterProfile, *, nodes: int, deepep: bool) -> tuple[Finding, ...]:
    """Judge what the nodes said.

    Args:
        reports: of :func:`moelab.health.node.report`, with ``clock_offset_s`` where it was measured.
        cluster: what its nodes should have.
        nodes: reports that were asked for.
        deepep: whether a run needs DeepEP, so that its findings count.
    """
    missing = [fault("nodes", f"{len(reports)} of {nodes} answered")] if len(reports) < nodes else []
    if not reports:
        return tuple(missing)
    return (
        *missing,
        *_versions(reports),
        *([_gpus(reports, cluster)] if cluster.gpus_per_node else ()),
        *_folders(reports),
        _clocks(reports),
        *_limits(reports, cluster),
        *(_deepep(reports) if deepep else ()),
    )


def _versions(reports: Sequence[Report]) -> Iterator[Finding]:
    groups = {name: _grouped((one, one["versions"].get(name)) for one in reports) for name in reports[0]["versions"]}
    different = {name: held for name, held in groups.items() if len(held) > 1}
    yield from (fault("versions", _odd(held, "not installed"), package=name) for name, held in different.items())
    if not different:
        named = ", ".join(f"{name} {value}" for name, value in reports[0]["versions"].items() if value)
        yield Finding(name="versions", severity="ok", found=f"the same on {len(reports)} nodes: {named}")


def _gpus(reports: Sequence[Report], cluster: ClusterProfile) -> Finding:
    kind, wanted = (cluster.gpu_type or "").lower(), cluster.gpus_per_node
    groups = _grouped((one, one.get("gpu_problem") or _counted(one["gpus"])) for one in reports)
    # All nodes alike is not enough: they may all be of another kind than the profile says.
    right = all(len(one["gpus"]) == wanted and all(kind in gpu.lower() for gpu in one["gpus"]) for one in reports)
    if right and len(groups) == 1:
        found = f"{next(iter(groups))} on each of {len(reports)} nodes"
        return Finding(name="GPUs", severity="ok", found=found)
    return fault("GPUs", f"{_odd(groups, 'none')}; the profile says {wanted} × {cluster.gpu_type or 'one kind'}")


def _folders(reports: Sequence[Report]) -> Iterator[Finding]:
    bad = _grouped((one, one["write_problem"]) for one in reports if one["write_problem"])
    unseen = _grouped((one, f"does not see {', '.join(one['unseen'])}") for one in reports if one["unseen"])
    if bad:
        yield fault("runs and checkpoints", _listed(bad))
    if unseen:
        yield fault("shared files", _listed(unseen))
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
    listed = [f"{node} {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" for node, skew in far.items()]
    return fault("clocks", ", ".join(listed), skew_s=CLOCK_SKEW_S)


def _limits(reports: Sequence[Report], cluster: ClusterProfile) -> Iterator[Finding]:
    shared = [(one, one["shared_memory_bytes"]) for one in reports]
    lockable = [(one, one["memlock_bytes"]) for one in reports if cluster.memlock == "unlimited"]
    files = [(one, one["open_files"]) for one in reports]
    too_low = {
        "shared memory": [(one, f"{size >> 20} MiB of /dev/shm") for one, size in shared if size < SHARED_MEMORY_BYTES],
        "locked memory of a node": [(one, f"{size / 2**20:.3g} MiB") for one, size in lockable if size is not None],
        "open files": [(one, str(limit)) for one, limit in files if limit is not None and limit < OPEN_FILES],
    }
    yield from (fault(key, _listed(_grouped(nodes)), needed=OPEN_FILES) for key, nodes in too_low.items() if nodes)
    if not any(too_low.values()):
        yield Finding(name="limits", severity="ok", found="shared and locked memory and open files suffice")


def _deepep(reports: Sequence[Report]) -> Iterator[Finding]:
    """What a node finds about DeepEP; the same finding of several nodes comes once."""
    faults: dict[Finding, list[str]] = {}
    for node, finding in [(one["node"], Finding(**entry)) for one in reports for entry in one["deepep"]]:
        missing = finding.name == "DeepEP" and finding.severity == "note"
        if missing or not finding.ok:
            faults.setdefault(fault("DeepEP needed") if missing else finding, []).append(node)
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
