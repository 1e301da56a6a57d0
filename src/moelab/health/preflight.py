"""What would stop a study on a cluster, checked before it is submitted: here, by Slurm and on every node.

Three groups: the study against the profile (an error is a refusal, exit code 3), this machine and Slurm, and the nodes,
which report through :mod:`moelab.health.node` in a short srun step and are compared with each other. Inside a job, such
as before a big run, the step runs on the job's own nodes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.errors import MoelabError
from moelab.experiment import EPBackend
from moelab.experiment_file import Study
from moelab.finding import Finding, any_error, as_text, fault
from moelab.launch import slurm
from moelab.launch.cluster import ClusterProfile
from moelab.launch.requirements import Foresee, check_data, check_plans, check_room, foresee_nothing
from moelab.launch.script import container_options, gpu_options, place_options, python_of, set_up
from moelab.launch.slurm import SlurmError, SlurmMissing
from moelab.launch.submit import dry_run
from moelab.machine import counted
from moelab.runs.log import CLOCK_SKEW_S

WAIT_S, STEP_MINUTES = 300, 5
"""How long srun waits for the nodes, and the time limit of its step."""
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL and data loaders share memory between a node's processes; a container has 64 MiB by default
(NCCL user guide, Troubleshooting: ``--shm-size=1g``)."""
OPEN_FILES = 4096
"""A choice: in a job of hundreds of ranks, each has a few sockets per peer and communicator, and checkpoint files."""
NAMED_NODES = 8
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
        """0 if all is fine, 1 if a check failed, 3 if the study would be refused."""
        if any_error(self.study):
            return 3
        return 1 if any_error((*self.here, *self.nodes)) else 0

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        listed = {group: [one.to_json() for one in getattr(self, group)] for group in TITLES}
        return {"ok": self.exit_code == 0, **listed}

    def as_text(self) -> str:
        """For a person."""
        return as_text({title: getattr(self, group) for group, title in TITLES.items()})


def preflight(
    cluster: ClusterProfile,
    study: Study | None,
    runs: Path,
    *,
    ask_nodes: bool,
    foresee: Foresee = foresee_nothing,
) -> Preflight:
    """Check everything; without a study the cluster alone.

    With ``ask_nodes`` the nodes report: as many as the study needs, or else as the profile has. ``foresee`` says an
    arm's memory and time, such as :func:`moelab.planning.project.foresee`.
    """
    runs = runs.absolute()
    here = [*check_room(study, cluster, runs, foresee), _slurm(cluster)]
    plans = tuple(check_plans(study, cluster, foresee)) if study else ()
    if study and cluster.scheduler == "slurm" and not any_error((*here, *plans)):
        here.append(_test_only(study, cluster, runs))
    return Preflight(
        study=(*plans, *check_data(study, cluster)) if study else (),
        here=tuple(here),
        nodes=check_nodes(cluster, study, runs) if ask_nodes else (),  # may wait minutes for the nodes
    )


def _slurm(cluster: ClusterProfile) -> Finding:
    if cluster.scheduler != "slurm":
        found = f"cluster {cluster.name} has none: `moelab run` starts runs"
        return Finding(name="Slurm", severity="note", found=found)
    try:
        return Finding(name="Slurm", severity="ok", found=slurm.call("sbatch", "--version").strip())
    except (SlurmMissing, SlurmError) as error:
        return fault("Slurm", str(error))


def _test_only(study: Study, cluster: ClusterProfile, runs: Path) -> Finding:
    """Ask Slurm about exactly the scripts that would be submitted."""
    try:
        scripts = dry_run(study, runs, cluster).scripts
    except MoelabError as error:  # such as a run whose status is damaged; the other findings are worth reading still
        return fault("submission", str(error))
    name = "sbatch --test-only"
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
            for script in scripts:
                Path(file.name).write_text(script)  # the same file for each: --test-only reads it at once
                slurm.call("sbatch", "--test-only", file.name)
    except (SlurmMissing, SlurmError) as error:
        return fault(name, str(error))
    return Finding(name=name, severity="ok", found=f"Slurm would accept {len(scripts)} script(s)")


# --- reports of nodes


def check_nodes(cluster: ClusterProfile, study: Study | None, runs: Path) -> tuple[Finding, ...]:
    """Have every node report, and compare the reports."""
    experiments = study.experiments if study else ()
    nodes = max((one.nodes for one in experiments), default=cluster.nodes)  # the largest job; the others fit in it
    backends = {one.ep_backend for one in experiments if one.ep_kernels == "native"}
    # The nodes look for a new file: an old copy of the folder does not have it, only the shared folder itself.
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=runs, prefix=".moelab-seen-") as marker:
        sees = [marker.name, *cluster.datasets.values(), *cluster.tokenizers.values()]
        try:
            reports, complaint = collect_reports(cluster, nodes, writes=Path(cluster.scratch or runs), sees=sees)
        except SlurmMissing as error:
            return (fault("srun", str(error)),)
    unanswered = [fault("srun", complaint[:COMPLAINT_CHARACTERS])] if complaint and len(reports) < nodes else []
    deepep = bool(backends & {EPBackend.DEEPEP, EPBackend.HYBRIDEP})
    return (*unanswered, *compare(reports, cluster, nodes=nodes, deepep=deepep))


def collect_reports(
    cluster: ClusterProfile, nodes: int, *, writes: Path, sees: Sequence[str]
) -> tuple[list[Report], str]:
    """Start :mod:`moelab.health.node` on nodes; returns their reports, and what srun complained of.

    A report's ``clock_offset_s`` is its own time less the time here when its line arrived. It differs between nodes as
    their clocks do, apart from the milliseconds that a line takes.

    Raises:
        SlurmMissing: if there is no srun here.
    """
    command = [*_srun(cluster, nodes), "bash", "-c", node_script(cluster, nodes, writes=writes, sees=sees)]
    with tempfile.TemporaryFile("w+") as errors:  # a file: a second pipe that nobody reads would fill and block srun
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        except FileNotFoundError:
            raise SlurmMissing("srun is not on PATH; use a machine that has Slurm, such as a login node") from None
        with process:
            assert process.stdout is not None, "it is a pipe"
            reports = list(_reports(process.stdout))  # read as lines arrive, for their clock_offset_s
        errors.seek(0)
        # The complaints of the nodes, each once and without labels; if there are none, srun's own.
        lines = [line.strip() for line in errors if line.strip()]
        labelled = [line.partition(": ") for line in lines]
        of_nodes = dict.fromkeys(text for label, _, text in labelled if label.isdecimal())
        return reports, "; ".join((list(of_nodes) or lines)[-COMPLAINT_LINES:])


def node_script(cluster: ClusterProfile, nodes: int, *, writes: Path, sees: Sequence[str]) -> str:
    """The bash script for a node: the set-up of a job's script, then the report.

    If a limit cannot be raised, the script goes on, and the report says what the limit is.
    """
    report = ["-m", "moelab.health.node", f"--nodes={nodes}", f"--writes={writes}"]
    report += [f"--sees={path}" for path in sees]
    lines = [shlex.join(words) for words in set_up(cluster)]
    limit = ["ulimit -l unlimited || true"] if cluster.memlock == "unlimited" else []
    return "\n".join(["set -eo pipefail", *lines, *limit, f"exec {shlex.join([python_of(cluster), *report])}"])


def _srun(cluster: ClusterProfile, nodes: int) -> list[str]:
    """The srun command, with one task on each node; inside a job, on the job's nodes."""
    # --mpi=none as in the job's script: some nodes lack the default's plugin.
    options = ["--label", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none"]
    options += [*gpu_options(cluster, cluster.gpus_per_node), *container_options(cluster)]
    # Inside a job these options would have srun allocate a job of its own.
    if "SLURM_JOB_ID" not in os.environ:
        # Give up rather than queue behind other jobs, and report the nodes' own limits, not those of the shell here.
        options += [*place_options(cluster), f"--immediate={WAIT_S}", f"--time={STEP_MINUTES}", "--propagate=NONE"]
        options += ["--job-name=moelab-preflight", *(["--exclusive"] if cluster.exclusive else [])]
    return ["srun", *options]


def _reports(lines: Iterable[str]) -> Iterator[Report]:
    """Reports from the output of ``srun --label``: ``3: {…}``, cut every 1024 bytes into lines with the same label.

    What a module or a shell file prints before them is skipped.
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


# --- reports compared


def compare(reports: Sequence[Report], cluster: ClusterProfile, *, nodes: int, deepep: bool) -> tuple[Finding, ...]:
    """Judge what :func:`moelab.health.node.report` said on nodes, with the ``clock_offset_s`` of each.

    So many ``nodes`` should have reported; findings about DeepEP count where a run needs it.
    """
    missing = [fault("nodes", f"{len(reports)} of {nodes} answered")] if len(reports) < nodes else []
    if not reports:
        return tuple(missing)
    gpus = [_gpus(reports, cluster)] if cluster.gpus_per_node else []
    return (*missing, *_versions(reports), *gpus, *_nodes(reports, cluster), *(_deepep(reports) if deepep else ()))


def _versions(reports: Sequence[Report]) -> Iterator[Finding]:
    groups = {name: _grouped((one, one["versions"].get(name)) for one in reports) for name in reports[0]["versions"]}
    different = {name: held for name, held in groups.items() if len(held) > 1}
    yield from (fault("versions", _odd(held, "not installed"), package=name) for name, held in different.items())
    if not different:
        named = ", ".join(f"{name} {value}" for name, value in reports[0]["versions"].items() if value)
        yield Finding(name="versions", severity="ok", found=f"the same on {len(reports)} nodes: {named}")


def _gpus(reports: Sequence[Report], cluster: ClusterProfile) -> Finding:
    # Slurm names an "NVIDIA H100 80GB HBM3" `h100` or `nvidia_h100_80gb_hbm3`; `b200` is no part of a GB200.
    kind, wanted = _one_word(cluster.gpu_type or ""), cluster.gpus_per_node
    is_kind = re.compile(rf"(?<![a-z0-9]){re.escape(kind)}").search
    groups = _grouped((one, one.get("gpu_problem") or counted(one["gpus"])) for one in reports)
    # It is not enough that all nodes are alike: all may differ from the profile.
    right = all(len(one["gpus"]) == wanted and all(is_kind(_one_word(gpu)) for gpu in one["gpus"]) for one in reports)
    if right and len(groups) == 1 and not reports[0].get("gpu_problem"):
        return Finding(name="GPUs", severity="ok", found=f"{next(iter(groups))} on each of {len(reports)} nodes")
    return fault("GPUs", f"{_odd(groups, 'none')}; the profile says {wanted} × {cluster.gpu_type or 'one kind'}")


def _one_word(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower())


def _nodes(reports: Sequence[Report], cluster: ClusterProfile) -> Iterator[Finding]:
    """What single nodes lack: folders, the right time, limits; nodes of which the same is said stand together."""
    # This machine's own clock may be the wrong one.
    middle_s = statistics.median(one["clock_offset_s"] for one in reports)
    lacks: dict[str, list[tuple[Report, str]]] = {}
    for one in reports:
        for key, words in _lacking(one, cluster, one["clock_offset_s"] - middle_s):
            lacks.setdefault(key, []).append((one, words))
    for key, entries in lacks.items():
        listed = "; ".join(f"{_names(held)}: {words}" for words, held in _grouped(entries).items())
        yield fault(key, listed, needed=OPEN_FILES, skew_s=CLOCK_SKEW_S)
    if not lacks:
        found = f"{len(reports)} nodes see and write the shared files, agree on the time and have high enough limits"
        yield Finding(name="each node", severity="ok", found=found)


def _lacking(report: Report, cluster: ClusterProfile, skew_s: float) -> Iterator[tuple[str, str]]:
    """Keys of known faults of a node, with words."""
    lockable, shared, files = (report[name] for name in ("memlock_bytes", "shared_memory_bytes", "open_files"))
    if problem := report["write_problem"]:
        yield "runs and checkpoints", problem
    if unseen := report["unseen"]:
        yield "shared files", f"does not see {', '.join(unseen)}"
    if abs(skew_s) > CLOCK_SKEW_S:
        yield "clocks", f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
    if shared < SHARED_MEMORY_BYTES:
        yield "shared memory", f"{shared >> 20} MiB of /dev/shm"
    if cluster.memlock == "unlimited" and lockable is not None:
        yield "locked memory of a node", f"{lockable / 2**20:.3g} MiB"
    if files is not None and files < OPEN_FILES:
        yield "open files", str(files)


def _deepep(reports: Sequence[Report]) -> Iterator[Finding]:
    """Findings about DeepEP; what several nodes find alike is reported once."""
    faults: dict[Finding, list[str]] = {}
    for node, finding in [(one["node"], Finding(**entry)) for one in reports for entry in one["deepep"]]:
        # That it is missing is only a note on a node; here a run needs it.
        missing = finding.name == "DeepEP" and finding.severity == "note"
        if missing or not finding.ok:
            # Findings are equal if their words are, so the dictionary joins the nodes that say the same.
            faults.setdefault(fault("DeepEP needed") if missing else finding, []).append(node)
    for finding, nodes in faults.items():
        where = "all nodes" if len(nodes) == len(reports) else _names(nodes)
        yield replace(finding, name=f"DeepEP on {where}: {finding.name}")
    if not faults:
        build = next(entry["found"] for entry in reports[0]["deepep"] if entry["name"] == "DeepEP")
        yield Finding(name="DeepEP on all nodes", severity="ok", found=build)


def _grouped(values: Iterable[tuple[Report, Any]]) -> dict[Any, list[str]]:
    """For each value, the names of the nodes that have it."""
    groups: dict[Any, list[str]] = {}
    for one, value in values:
        groups.setdefault(value, []).append(one["node"])
    return groups


def _odd(groups: Mapping[Any, list[str]], absent: str) -> str:
    """The smaller groups with their names, the largest with its size: ``n1: 0.17.0; 2 others: 0.18.0``."""
    # Of groups of one size, the last in the order of the reports is called the others.
    *smaller, (value, nodes) = sorted(groups.items(), key=lambda item: len(item[1]))
    named = [f"{_names(held)}: {shown or absent}" for shown, held in smaller]
    return "; ".join([*named, f"{len(nodes)} {'other' if len(nodes) == 1 else 'others'}: {value or absent}"])


def _names(nodes: Sequence[str]) -> str:
    rest = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
    return ", ".join(nodes[:NAMED_NODES]) + rest
