"""Submit a study to Slurm: a job array with a task for each arm and seed, and never the same run twice.

What the study needs of the cluster is looked at first, from where it is submitted: plan, memory, data, room. Everything
is written down before sbatch is called: run directories with their experiment, the exact script, and a ticket by which
the job is found in the queue (:mod:`moelab.launch.slurm`). What stays ``prepared``, because nothing was submitted or
Slurm refused, is used again by the next call.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.finding import Finding
from moelab.launch import slurm
from moelab.launch.cluster import ClusterProfile
from moelab.launch.local import completed, only_launcher, require_known_ends
from moelab.launch.script import JobSpec, render
from moelab.launch.slurm import (
    PREFIX,
    SCRIPT_FILE,
    NumberUnknown,
    Queue,
    SlurmError,
    SlurmMissing,
    Ticket,
    checked,
    new_comment,
    number_unknown,
    ticket_of,
)
from moelab.launch.status import ACTIVE, update
from moelab.memory.activations import FP32
from moelab.model import TOKENIZERS, count_parameters, shape_for
from moelab.plan import Plan, plan
from moelab.projection.project import project
from moelab.runs import directory
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.files import write_whole
from moelab.runs.status import State, Status

Task = tuple[Experiment, RunDir]
STREAMING_NODES = 4
"""Nodes that may stream C4: each rank asks the hub for itself, some ten times at the start, and a cluster has one
address; 500 calls of its API are answered in 5 minutes (huggingface.co/docs/hub/rate-limits, November 2026)."""
STATE_BYTES = 3 * FP32
"""Of a parameter in a checkpoint: its FP32 master weight and AdamW's two moments."""
LOG_BYTES = 1 << 30
"""Room for what else a run writes. A choice."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a call of :func:`submit` did.

    Attributes:
        study: its name.
        scripts: as sbatch got them, or would; one for each number of nodes and GPUs.
        prepared: runs with a script that were not submitted.
        submitted: runs that Slurm accepted now.
        adopted: runs whose job was found in the queue, or named by a person: its number had not been written down.
        completed: runs that were finished before, and left alone.
        found: what was there before.
    """

    study: str
    scripts: tuple[str, ...]
    prepared: tuple[RunDir, ...] = ()
    submitted: tuple[RunDir, ...] = ()
    adopted: tuple[RunDir, ...] = ()
    completed: tuple[RunDir, ...] = ()
    found: Discovery

    def to_json(self) -> dict[str, Any]:
        """The submission as the command line prints it."""
        kinds = ("prepared", "submitted", "adopted", "completed")
        rows = [
            {"run": run.name, "path": str(run.path), "did": kind, "job_id": run.status.job_id}
            for kind in kinds
            for run in getattr(self, kind)
        ]
        return {"study": self.study, "runs": rows, "scripts": list(self.scripts), **self.found.to_json()}

    def as_text(self) -> str:
        """The same for a person."""
        rows = self.to_json()["runs"]
        lines = [f"{row['path']}: {row['did']}" + (f", job {row['job_id']}" if row["job_id"] else "") for row in rows]
        return "\n".join(
            [*self.found.lines, *lines, f"{self.study}: {len(self.submitted)} of {len(rows)} runs submitted now"]
        )


def dry_run(study: Study, runs: Path, cluster: ClusterProfile, *, after: str | None = None) -> Submission:
    """The scripts of everything in a study that is not finished; nothing is touched, and Slurm is not asked.

    Args:
        study: arms and seeds.
        runs: the folder that holds all studies; the run directories of the scripts are not made.
        cluster: where it would run.
        after: job that has to succeed first, such as ``123`` or ``123_4``.

    Raises:
        BadInput, Refused: as :func:`submit`.
    """
    runs = runs.absolute()
    _require(check_plans(study, cluster))
    found = directory.discover(runs / study.name)
    attempts = {experiment: found.attempts(experiment) for experiment in study.experiments}
    require_known_ends(attempts.values())
    tasks = [_task(runs, experiment, tried) for experiment, tried in attempts.items() if not completed(tried)]
    specs = _specs(study, tasks, cluster, after)
    return Submission(study=study.name, scripts=tuple(render(spec) for spec, _ in specs), found=found)


def submit(
    study: Study,
    runs: Path,
    cluster: ClusterProfile,
    *,
    submit: bool,
    after: str | None = None,
    timeout_s: float = slurm.TIMEOUT_S,
) -> Submission:
    """Prepare what is missing of a study, and give it to Slurm.

    Args:
        study: arms and seeds; completed runs are left alone, failed and cancelled ones get a new run directory.
        runs: the folder that holds all studies, on a file system that the nodes share.
        cluster: where to run.
        submit: False: write run directories and scripts, and leave Slurm alone.
        after: job that has to succeed first, such as ``123`` or ``123_4``; else the new one is cancelled.
        timeout_s: for sbatch, which waits and tries again where the queue is full.

    Raises:
        BadInput: for a value that cannot stand in a script.
        Refused: if a plan is illegal or does not fit, data is not where the nodes look for it, a run is with Slurm
            already (named, with its job), nobody knows how a run ended, or Slurm does not accept the script (with its
            words; runs stay prepared).
        SlurmMissing, SlurmError: if Slurm cannot be asked; nothing was submitted.
        NumberUnknown: if Slurm took a script and nobody knows the job's number, with how it is adopted.
    """
    runs = runs.absolute()
    _require(check_plans(study, cluster))
    if submit:
        _require(check_data(study, cluster))
    with only_launcher(runs, study):
        here = directory.discover(runs / study.name)
        attempts = {experiment: here.attempts(experiment) for experiment in study.experiments}
        tried = [run for found in attempts.values() for run in found]
        queue = Queue.of(tried) if submit else Queue([])
        if submit and after and not queue.jobs_of(after):
            raise Refused(f"--after {after}: Slurm knows no such job, and would not wait for it; leave --after out")
        prepared = [run for run in tried if run.status.state is State.PREPARED]
        updated = dict(zip(tried, update(tried, queue), strict=True)) if submit else {}
        adopted = [run for run in prepared if submit and updated[run].state in ACTIVE]
        _require_idle([run for run in tried if run not in adopted], queue)
        require_known_ends(attempts.values())
        left = set(adopted) if submit else set(filter(ticket_of, tried))  # a ticket may be a job's already
        wanted = [one for one, found in attempts.items() if not completed(found) and not set(found) & left]
        specs = _specs(study, [_task(runs, one, attempts[one]) for one in wanted], cluster, after)
        scripts = [render(spec) for spec, _ in specs]
        for (spec, tasks), script in zip(specs, scripts, strict=True):
            for number, (experiment, run) in enumerate(tasks):
                if not run.path.exists():
                    directory.make(run, experiment)
                write_whole(run.path / SCRIPT_FILE, script)
                Ticket(comment=spec.comment, task=number).write(run)  # last, because it says that all is there
        if submit:
            for spec, tasks in specs:
                _submit(spec, tasks, timeout_s)
    written = tuple(run for _, tasks in specs for _, run in tasks)
    return Submission(
        study=study.name,
        scripts=tuple(scripts),
        prepared=() if submit else (*(run for run in tried if run in left), *written),
        submitted=written if submit else (),
        adopted=tuple(adopted),
        completed=tuple(done for found in attempts.values() if (done := completed(found))),
        found=here,
    )


def _require(findings: Iterable[Finding]) -> None:
    faults = [f"{one.name}: {one.found}" for one in findings if one.severity == "error"]
    if faults:
        raise Refused("\n".join(faults))


def _require_idle(runs: Iterable[RunDir], queue: Queue) -> None:
    """A job in a state that is not known may be alive."""
    statuses = {run: run.status for run in runs}
    busy = [
        f"{run.name} is {status.state} as job {status.job_id}"
        if status.job_id
        else f"{run.name} is {status.state}: {status.reason}"
        for run, status in statuses.items()
        if status.state in ACTIVE or (status.state is State.UNKNOWN and queue.job_of(run))
    ]
    if busy:
        raise Refused("\n".join([*busy, "wait for them, `moelab cancel` them, or name other arms with --arm"]))


def _task(runs: Path, experiment: Experiment, attempts: Sequence[RunDir]) -> Task:
    """A run directory that was prepared and not used, or the name of a fresh one."""
    prepared = [run for run in attempts if run.status.state is State.PREPARED]
    return experiment, (prepared[-1] if prepared else directory.fresh(runs, experiment))


def _specs(
    study: Study, tasks: Iterable[Task], cluster: ClusterProfile, after: str | None
) -> list[tuple[JobSpec, list[Task]]]:
    """One job array for each size."""
    by_size: dict[tuple[int, int], list[Task]] = {}
    for experiment, run in tasks:
        by_size.setdefault((experiment.nodes, experiment.gpus_per_node), []).append((experiment, run))
    return [
        (
            JobSpec(
                cluster=cluster,
                runs=tuple(run.path for _, run in together),
                name=study.name,
                comment=new_comment(study.name),
                nodes=nodes,
                gpus_per_node=gpus,
                dependency=f"afterok:{after}" if after else None,
            ),
            together,
        )
        for (nodes, gpus), together in by_size.items()
    ]


def _submit(spec: JobSpec, tasks: Sequence[Task], timeout_s: float) -> None:
    """Call sbatch, and write down what it said of the job.

    Raises:
        Refused: if Slurm did not take the script.
        NumberUnknown: if it did, and nobody knows the job's number.
    """
    runs = [run for _, run in tasks]
    try:
        job = slurm.sbatch(runs[0].path / SCRIPT_FILE, timeout_s=timeout_s)
    except (SlurmError, SlurmMissing) as error:
        in_queue = None
        with suppress(SlurmError, SlurmMissing):  # accepted all the same, where its answer was lost?
            in_queue = Queue(slurm.queue()).id_of(spec.comment)
        if in_queue is None and isinstance(error, NumberUnknown):
            for run in runs:
                if run.status.state is State.PREPARED:
                    words = number_unknown(run, str(error))
                    run.set_status(replace(run.status, state=State.SUBMITTED, reason=words))
            raise NumberUnknown(f"{spec.name}: {number_unknown(runs[0], str(error))}") from error
        if in_queue is None:
            for run in runs:
                run.set_status(replace(run.status, reason=f"not submitted: {error}"))
            raise Refused(
                f"{error}\nnothing of {spec.name} was submitted by this script; its runs stay prepared"
            ) from error
        job = in_queue
    _write_number(runs, *job)


def _write_number(runs: Iterable[RunDir], job_id: str, cluster: str | None) -> None:
    """Make runs the tasks of a job, unless one has begun: then the job has written its number itself."""
    for run in runs:
        status, ticket = run.status, ticket_of(run)
        if ticket and (status.state is State.PREPARED or is_without_number(status)):
            if cluster:
                replace(ticket, cluster=cluster).write(run)
            label = f"{job_id}_{ticket.task}"
            run.set_status(replace(status, state=State.SUBMITTED, job_id=label, reason=None))


def is_without_number(status: Status) -> bool:
    """Whether a run was submitted, and nobody knows as which job."""
    return status.state is State.SUBMITTED and status.job_id is None


def adopt(study: Study, runs: Path, job_id: str) -> Submission:
    """Say as which job the runs of a study were submitted, where sbatch's answer was not understood.

    Args:
        study: arms and seeds.
        runs: the folder that holds all studies.
        job_id: number of the job array.

    Raises:
        Refused: if no run waits for a number, runs of several submissions do, Slurm does not know the job, or it was
            submitted for something else.
        SlurmMissing, SlurmError: if Slurm cannot be asked.
    """
    with only_launcher(runs.absolute(), study):
        here = directory.discover(runs.absolute() / study.name)
        tried = [run for experiment in study.experiments for run in here.attempts(experiment)]
        queue = Queue.of(tried)
        update(tried, queue)  # one that is in the queue with its comment needs no help
        waiting = {run: ticket for run in tried if is_without_number(run.status) and (ticket := ticket_of(run))}
        comments = {ticket.comment for ticket in waiting.values()}
        if len(comments) != 1:
            which = f"{len(comments)} submissions have such runs; name an arm with --arm" if comments else "none has"
            raise Refused(f"--adopt {job_id}: no single submission of {study.name} waits for a job's number: {which}")
        jobs = queue.jobs_of(job_id)
        if not (jobs or slurm.accounted([checked(job_id)])):
            raise Refused(f"--adopt {job_id}: Slurm knows no such job")
        if others := {job.comment for job in jobs if job.comment.startswith(PREFIX)} - comments:
            raise Refused(f"--adopt {job_id}: that job was submitted for something else: {', '.join(others)}")
        _write_number(waiting, job_id, None)
        update(waiting, queue)
    return Submission(study=study.name, scripts=(), adopted=tuple(waiting), found=here)


def check_plans(study: Study, cluster: ClusterProfile) -> Iterator[Finding]:
    """Each arm's layout, memory and size. An error here is a refusal: submitting would be one too."""
    for experiment in study.first_of_arms:
        planned, nodes, gpus = plan(experiment), experiment.nodes, experiment.gpus_per_node
        plan_only = shape_for(experiment).plan_only
        problems = [*planned.verdict.reasons, *([plan_only] if plan_only else [])]
        if nodes > cluster.nodes:
            problems.append(f"nodes is {nodes}: a job of {cluster.name} gets up to {cluster.nodes}")
        if 0 < cluster.gpus_per_node < gpus:
            problems.append(f"gpus_per_node is {gpus}: a node of {cluster.name} has {cluster.gpus_per_node}")
        if problems:
            yield Finding(
                name=f"plan of {experiment.arm}",
                severity="error",
                found="; ".join(problems),
                cause="the experiment asks for what TorchTitan or the cluster does not have",
                consequence="the run would fail when it starts",
                remedy="`moelab plan FILE --search` lists legal layouts",
            )
            continue
        yield _memory(planned)


def check_data(study: Study, cluster: ClusterProfile) -> Iterator[Finding]:
    """Whether the data is where the nodes will look for it."""
    wanted = [one for one in study.first_of_arms if one.dataset == "c4"]
    if not wanted:
        yield Finding(name="data", severity="ok", found="made on the nodes from Python's own text: no download")
        return
    folder, nodes = cluster.datasets.get("c4"), max(one.nodes for one in wanted)
    if folder is None and nodes > STREAMING_NODES:
        yield _refused(
            f"C4 would be streamed by {nodes} nodes",
            f"the hub limits requests by address, and more than {STREAMING_NODES} nodes go beyond it",
            "download C4 once to a shared folder and set datasets.c4 of the cluster's profile to it",
        )
    elif folder is None:
        yield Finding(name="data", severity="note", found=f"C4 is streamed from the hub by {nodes} nodes")
    elif not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        yield _refused(
            f"datasets.c4 is {folder}: no folder here, or empty",
            "C4 was not downloaded to it, or it is not mounted here",
            "download it there, or correct datasets.c4 of the cluster's profile",
        )
    else:
        yield Finding(name="data", severity="ok", found=f"C4 in {folder}")
    for model in sorted({one.model for one in wanted} & TOKENIZERS.keys()):
        tokenizer = Path(cluster.tokenizers.get(model, TOKENIZERS[model]))
        if not (tokenizer / "tokenizer.json").exists():
            yield _refused(
                f"no tokenizer.json in {tokenizer}, for model {model}",
                "TorchTitan's scripts/download_hf_assets.py has not put it there",
                f"fetch it, and set tokenizers.{model} of the cluster's profile to its folder",
            )


def check_room(study: Study | None, cluster: ClusterProfile, runs: Path) -> Iterator[Finding]:
    """Whether runs and checkpoints can be written here, and fit."""
    saves, needed = Path(cluster.scratch or runs), checkpoint_bytes(study, cluster) if study else 0
    wanted = {runs: LOG_BYTES, saves: needed + (0 if cluster.scratch else LOG_BYTES)}
    for folder, size in wanted.items():
        yield _room(folder, size, _checkpoints_in_words(study, cluster, needed) if study and folder == saves else "")


def checkpoint_bytes(study: Study, cluster: ClusterProfile) -> int:
    """Bytes of checkpoints at most, of every run at once: a job array has no order, and a finished run's stay."""
    return sum(_state_bytes(one) * checkpoints_at_most(one, cluster) for one in study.experiments)


def checkpoints_at_most(experiment: Experiment, cluster: ClusterProfile) -> int:
    """Checkpoints of a run that are there at once: those that are kept, and one that is written before an old one goes.

    One is due at every interval but not after the last step (:class:`~moelab.titan.preempt.ResumeCheckpoints`), and
    whenever the time limit stops the run: by the slow end of the projection, or never where there is none.
    """
    if cluster.scheduler == "none":  # `moelab run` saves none
        return 0
    interval, steps = cluster.checkpoint_interval_steps, experiment.steps
    due = (steps - 1) // interval if interval else 0
    with suppress(BadInput, Refused):  # of hardware without figures, or a plan that is refused with its own reason
        projection = project(experiment)
        slowest_s = steps * projection.tokens_per_gpu / projection.interval[0]
        stops = math.ceil(slowest_s / (60 * cluster.time_limit_minutes - cluster.signal_s)) - 1
        due += min(stops, cluster.requeues + 1)
    return min(due, cluster.checkpoints_kept + 1)


def _memory(planned: Plan) -> Finding:
    name, memory = f"plan of {planned.experiment.arm}", planned.memory
    assert memory is not None, "only a legal plan has memory"
    if planned.fits is None:
        return Finding(name=name, severity="note", found="legal; whether it fits is not known: hardware is local")
    found = f"{memory.worst_gib:.1f} of {memory.capacity_gib:.1f} GiB on the fullest GPU (predicted)"
    if planned.fits:
        return Finding(name=name, severity="ok", found=f"legal; {found}")
    return Finding(
        name=name,
        severity="error",
        found=found,
        cause=memory.dominant,
        consequence="the run would end with: CUDA out of memory",
        remedy="`moelab plan FILE --search` lists layouts that fit",
    )


def _refused(found: str, cause: str, remedy: str) -> Finding:
    consequence = "ranks would fail while they load data, and the others wait for them"
    return Finding(name="data", severity="error", found=found, cause=cause, consequence=consequence, remedy=remedy)


def _state_bytes(experiment: Experiment) -> int:
    """Of one checkpoint."""
    return STATE_BYTES * count_parameters(shape_for(experiment)).total


def _checkpoints_in_words(study: Study, cluster: ClusterProfile, needed_bytes: int) -> str:
    if needed_bytes:
        count = sum(checkpoints_at_most(one, cluster) for one in study.experiments)
        return f" (derived: up to {count} checkpoints of all runs at once, 12 bytes a parameter)"
    if cluster.scheduler == "none":
        return ""
    largest = max(map(_state_bytes, study.experiments))
    return f" (no checkpoint is due; a run that is stopped before its end would save one of {largest / 1e9:,.1f} GB)"


def _room(folder: Path, wanted_bytes: int, checkpoints: str) -> Finding:
    name = f"room in {folder}"
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".moelab-"):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Finding(
            name=name,
            severity="error",
            found=f"cannot be written: {error.strerror or error}",
            cause=f"{existing} is read-only, full, over quota, no folder, or not {os.environ.get('USER', 'yours')}'s",
            consequence="no run directory can be made",
            remedy="choose another folder with --runs, or set runs and scratch of the cluster's profile",
        )
    found = f"{free / 1e9:,.0f} GB free, {wanted_bytes / 1e9:,.0f} GB wanted{checkpoints}"
    if free >= wanted_bytes:
        return Finding(name=name, severity="ok", found=f"{found}; a quota is not seen")
    return Finding(
        name=name,
        severity="error",
        found=found,
        cause="the file system is nearly full, or too small for the checkpoints of this study",
        consequence="a checkpoint would be cut off, and what was trained since the last one lost",
        remedy="free some, set scratch of the profile to a larger file system, or submit fewer arms (--arm) and delete "
        "their checkpoints before the others",
    )
