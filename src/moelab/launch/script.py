"""The sbatch script of a job, from a template in which every value is quoted.

A job is an array with one task for each run directory. The script sets up the environment, starts
:mod:`moelab.launch.in_job` once on each node, and passes on Slurm's warning before the time limit; the rest is Python.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moelab.errors import BadInput, Refused
from moelab.launch.cluster import ClusterProfile, line, word
from moelab.launch.in_job import REQUEUE_CODE

TEMPLATES = Path(__file__).parent / "templates"
_DEPENDENCY = re.compile(r"(after|afterany|afternotok|afterok|aftercorr)(:\d+(_\d+)?)+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job, of a size that :func:`moelab.launch.requirements.check_plans` has checked against the cluster.

    Raises:
        BadInput: naming the value that cannot stand in a script.
        Refused: if the cluster has no Slurm.
    """

    cluster: ClusterProfile
    runs: tuple[Path, ...]  # absolute paths of run directories, one array task each
    name: str
    comment: str  # that Slurm keeps with the job, by which it is found again
    nodes: int  # per array task
    gpus_per_node: int  # ranks per node: GPUs, or processes where the cluster has no GPUs
    dependency: str | None = None  # as sbatch takes it, such as `afterok:123`; if that fails, Slurm cancels the job

    def __post_init__(self) -> None:
        cluster = self.cluster
        if cluster.scheduler != "slurm":
            raise Refused(f"cluster {cluster.name} has no Slurm: use `moelab run`, or name a cluster that has one")
        _check("name", self.name, word)
        _check("comment", self.comment, word)
        for run in self.runs:
            _check("run", str(run), line)
        _check("folder of the runs", str(self.folder), lambda path: word(path.removeprefix("/")))
        if self.dependency is not None and not _DEPENDENCY.fullmatch(self.dependency):
            raise BadInput(f"dependency: got {self.dependency!r}; valid: such as afterok:123 or afterany:123_4:125")

    @property
    def folder(self) -> Path:
        """Where the job starts, and where Slurm writes the script's own output."""
        return self.runs[0] / "logs" if len(self.runs) == 1 else Path(os.path.commonpath(self.runs))


def render(spec: JobSpec) -> str:
    """The whole script.

    >>> from moelab.launch.cluster import read_cluster
    >>> run = Path("/runs/study/bf16_standard/seed0/20260914T031022Z-0a1b2c")
    >>> spec = JobSpec(cluster=read_cluster("slurm_generic"), runs=(run,), name="study", comment="study", nodes=2,
    ...                gpus_per_node=8)
    >>> render(spec).splitlines()[:3]
    ['#!/bin/bash', '#SBATCH --job-name=study', '#SBATCH --comment=study']
    """
    # `finalize` quotes whatever the template inserts, but no #SBATCH lines: to bash they are comments, and the profile
    # lets no sign into them that sbatch reads as something else.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,  # a name that is misspelt in the template fails instead of vanishing
        autoescape=False,  # noqa: S701 - a shell script
        finalize=lambda value: value if isinstance(value, _Directive) else shlex.quote(str(value)),
        keep_trailing_newline=True,
    )
    return environment.get_template("job.sbatch.j2").render(
        directives=[_Directive(option) for option in _directives(spec)],
        set_up=list(set_up(spec.cluster)),
        memlock=spec.cluster.memlock,
        runs=spec.runs,
        step=list(_step(spec)),
        python=python_of(spec.cluster),
        requeue_code=REQUEUE_CODE,
    )


class _Directive(str):
    """An option of sbatch, as it stands in a script."""


def _directives(spec: JobSpec) -> Iterator[str]:
    cluster = spec.cluster
    yield f"--job-name={spec.name}"
    yield f"--comment={spec.comment}"
    yield from place_options(cluster)
    yield f"--array=0-{len(spec.runs) - 1}"  # of a single run too: every run has a task number
    yield from _size(spec)
    if cluster.exclusive:
        yield "--exclusive"
    yield f"--time={cluster.time_limit_minutes}"
    # B: only to the script, which passes it on once. Without B, Slurm would signal every rank directly.
    yield f"--signal=B:USR1@{cluster.signal_s}"
    yield "--requeue"
    yield "--propagate=NONE"  # limits of the nodes, not of the machine that submits: memlock above all
    yield "--open-mode=append"  # a requeued job keeps what it printed before
    yield f"--chdir={spec.folder}"
    yield f"--output={spec.folder}/slurm-%A_%a.out"
    if spec.dependency:
        yield f"--dependency={spec.dependency}"
        yield "--kill-on-invalid-dep=yes"


def _size(spec: JobSpec) -> Iterator[str]:
    """Options of the job and again of its step, which does not inherit all of them."""
    cluster = spec.cluster
    yield f"--nodes={spec.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={cluster.cpus_per_task}"
    yield from gpu_options(cluster, spec.gpus_per_node)
    if cluster.memory_gib is not None:
        yield f"--mem={cluster.memory_gib}G" if cluster.memory_gib else "--mem=0"


def _step(spec: JobSpec) -> Iterator[str]:
    yield from _size(spec)
    yield f"--ntasks={spec.nodes}"
    # A node whose ranks failed ends the others, which would otherwise wait in a collective until its timeout.
    yield "--kill-on-bad-exit=1"
    # A site's default may be pmix, whose plugin some nodes and containers lack.
    yield "--mpi=none"
    yield from container_options(spec.cluster)


def place_options(cluster: ClusterProfile) -> Iterator[str]:
    """Options that say where a job may run, and on whose account."""
    names = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "segment", "switches")
    yield from (f"--{name}={value}" for name in names if (value := getattr(cluster, name)))


def gpu_options(cluster: ClusterProfile, count: int) -> list[str]:
    """Options that request this many GPUs of each node, where the cluster has any and is asked for them."""
    if not cluster.gpus_per_node or cluster.gpu_request == "none":
        return []
    gpus = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return [f"--gres=gpu:{gpus}" if cluster.gpu_request == "gres" else f"--gpus-per-node={gpus}"]


def container_options(cluster: ClusterProfile) -> Iterator[str]:
    """Options with which pyxis starts the cluster's container, if it has one."""
    if container := cluster.container:
        yield f"--container-image={container.image}"
        if container.mounts:
            yield f"--container-mounts={','.join(container.mounts)}"


def set_up(cluster: ClusterProfile) -> Iterator[list[str]]:
    """Commands that set up a shell on a node, as words: files, modules, environments, variables."""
    yield from (["source", file] for file in cluster.source)
    yield from (["module", "load", module] for module in cluster.modules)
    if cluster.venv:
        yield ["source", f"{cluster.venv}/bin/activate"]
    if cluster.conda_env:
        yield ["conda", "activate", cluster.conda_env]
    yield from (["export", f"{name}={value}"] for name, value in cluster.variables.items())


def python_of(cluster: ClusterProfile) -> str:
    """The interpreter on the nodes: the profile's, or that of its environment or container, or this one."""
    provided = cluster.venv or cluster.conda_env or cluster.container
    return cluster.python or ("python" if provided else sys.executable)


def _check(name: str, value: str, rule: Callable[[str], str]) -> None:
    try:
        rule(value)
    except ValueError as error:
        raise BadInput(f"{name}: got {value[:80]!r}; valid: {error}") from None
