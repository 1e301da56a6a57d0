"""Before a study goes to a cluster: what would stop it, looked at here, by Slurm and on every node.

Three groups: the study against the profile (an error is a refusal, exit code 3), this machine and Slurm, and the nodes,
which report by :mod:`moelab.health.node` in a short step of srun. Called inside a job, as before a big run, the
step runs on the job's own nodes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.experiment import EPBackend
from moelab.experiment_file import Study
from moelab.finding import Finding, any_error
from moelab.health.node import Report, compare
from moelab.launch.cluster import ClusterProfile
from moelab.launch.script import python_of, set_up
from moelab.launch.slurm import client
from moelab.launch.slurm.client import SlurmError, SlurmMissing
from moelab.launch.study_checks import check_data, check_plans, check_room
from moelab.launch.submit import dry_run

WAIT_S = 300
"""How long srun waits for the nodes."""
STEP_MINUTES = 5
DEEPEP = (EPBackend.DEEPEP, EPBackend.HYBRIDEP)
COMPLAINT_LINES, COMPLAINT_CHARACTERS = 3, 400


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
        groups = {"study": self.study, "here": self.here, "nodes": self.nodes}
        listed = {name: [one.to_json() for one in found] for name, found in groups.items()}
        return {"ok": self.exit_code == 0, **listed}

    def as_text(self) -> str:
        """For a person."""
        groups = {
            "The study on this cluster": self.study,
            "This machine and Slurm": self.here,
            "The nodes": self.nodes,
        }
        shown = [
            [title, *(line for one in found for line in one.as_lines())] for title, found in groups.items() if found
        ]
        return "\n\n".join("\n".join(lines) for lines in shown)


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
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=runs, prefix=".moelab-seen-") as marker:
        sees = [marker.name, *cluster.datasets.values(), *cluster.tokenizers.values()]
        try:
            reports, complaint = collect_reports(cluster, nodes, writes=Path(cluster.scratch or runs), sees=sees)
        except SlurmMissing as error:
            return (_no_answer(str(error)),)
    unanswered = [_no_answer(complaint)] if complaint and len(reports) < nodes else []
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
        return reports, _complaint(errors)


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
    if cluster.gpus_per_node:
        kind = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        options.append(f"--gres=gpu:{kind}{cluster.gpus_per_node}")
    if container := cluster.container:
        options.append(f"--container-image={container.image}")
        options += [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
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


def _complaint(errors: Iterable[str]) -> str:
    """What the nodes complained of, once each and without their labels; else what srun itself did."""
    lines = [line.strip() for line in errors if line.strip()]
    labelled = [line.partition(": ") for line in lines]
    of_nodes = dict.fromkeys(text for label, _, text in labelled if label.isdecimal())
    return "; ".join((list(of_nodes) or lines)[-COMPLAINT_LINES:])


def _slurm(cluster: ClusterProfile) -> Iterator[Finding]:
    if cluster.scheduler != "slurm":
        yield Finding(name="Slurm", severity="note", found=f"cluster {cluster.name} has none: `moelab run` starts runs")
        return
    try:
        yield Finding(name="Slurm", severity="ok", found=client.call("sbatch", "--version").strip())
    except (SlurmMissing, SlurmError) as error:
        yield Finding(
            name="Slurm",
            severity="error",
            found=str(error),
            cause="this is not a login node, or Slurm's programs are not on PATH",
            consequence="nothing can be submitted from here",
            remedy="log in to the cluster's login node, or load its module for Slurm",
        )


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
                client.test_only(Path(file.name))
    except (SlurmMissing, SlurmError) as error:
        return Finding(
            name=name,
            severity="error",
            found=str(error),
            cause="the partition, account, QOS, time limit or GPUs of the profile are not what Slurm has",
            consequence="sbatch would refuse the script, or it would wait for ever",
            remedy="sinfo and sacctmgr show what there is; correct the profile, or use --cluster-set",
        )
    return Finding(name=name, severity="ok", found=f"Slurm would take {len(scripts)} script(s)")


def _no_answer(complaint: str) -> Finding:
    return Finding(
        name="srun",
        severity="error",
        found=complaint[:COMPLAINT_CHARACTERS],
        cause="the nodes are not free within a few minutes, or the set-up of the profile failed on one",
        consequence="these nodes are not checked",
        remedy="try again when they are free, or call this inside a job that has them",
    )
