"""Submit a study to Slurm: a job array with a task for each arm and seed, and never the same run twice.

First, from where it is submitted, the study is checked against the cluster: plan, memory, data, disk space. Everything
is written before sbatch is called: run directories with their experiment, the exact script, and a ticket by which the
job is found in the queue (:mod:`moelab.launch.slurm`). The next call reuses what stayed ``prepared``, because nothing
was submitted or Slurm refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.files import write_whole
from moelab.finding import Finding
from moelab.launch import slurm
from moelab.launch.cluster import ClusterProfile, keep_cluster
from moelab.launch.ends import close_killed, only_launcher
from moelab.launch.local import completed, require_known_ends
from moelab.launch.requirements import Foresee, check_data, check_plans, foresee_nothing
from moelab.launch.script import JobSpec, render
from moelab.launch.slurm import SCRIPT_FILE, NumberUnknown, Queue, SlurmError, SlurmMissing, Ticket, ticket_of
from moelab.launch.status import ACTIVE, busy, update
from moelab.runs import directory
from moelab.runs.directory import Discovery, RunDir
from moelab.runs.status import State

Attempts = Mapping[Experiment, Sequence[RunDir]]
Task = tuple[Experiment, RunDir]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a call of :func:`submit` did."""

    study: str
    scripts: tuple[str, ...]  # as sbatch gets them; one for each number of nodes and GPUs
    submitted: tuple[RunDir, ...] = ()  # runs that Slurm accepted now
    found: tuple[RunDir, ...] = ()  # runs whose job was in the queue, but its number had not been recorded
    completed: tuple[RunDir, ...] = ()  # runs that were finished before and left alone
    discovered: Discovery  # runs that were there before

    def to_json(self) -> dict[str, Any]:
        """The submission as the command line prints it."""
        rows = [
            {"run": run.name, "path": str(run.path), "did": kind, "job_id": run.status.job_id}
            for kind, runs in (("submitted", self.submitted), ("found", self.found), ("completed", self.completed))
            for run in runs
        ]
        return {"study": self.study, "runs": rows, "scripts": list(self.scripts), **self.discovered.to_json()}

    def as_text(self) -> str:
        """The same for a person."""
        rows = self.to_json()["runs"]
        lines = [f"{row['path']}: {row['did']}" + (f", job {row['job_id']}" if row["job_id"] else "") for row in rows]
        return "\n".join(
            [*self.discovered.lines, *lines, f"{self.study}: {len(self.submitted)} of {len(rows)} runs submitted now"]
        )


def dry_run(
    study: Study,
    runs: Path,
    cluster: ClusterProfile,
    *,
    foresee: Foresee = foresee_nothing,
    after: str | None = None,
) -> Submission:
    """The scripts of everything that is not finished in a study; nothing is written, and Slurm is not asked.

    Args and Raises are those of :func:`submit`.
    """
    runs = runs.absolute()
    _require(check_plans(study, cluster, foresee))
    here = directory.discover(runs / study.name)
    attempts = {experiment: here.attempts(experiment) for experiment in study.experiments}
    require_known_ends(attempts.values())
    missing = {experiment: tried for experiment, tried in attempts.items() if not completed(tried)}
    jobs = _jobs(study, runs, missing, cluster, after)
    return Submission(study=study.name, scripts=tuple(render(spec) for spec, _ in jobs), discovered=here)


def submit(
    study: Study,
    runs: Path,
    cluster: ClusterProfile,
    *,
    foresee: Foresee = foresee_nothing,
    after: str | None = None,
    timeout_s: float = slurm.TIMEOUT_S,
) -> Submission:
    """Prepare what a study still lacks, and submit it to Slurm.

    Args:
        study: arms and seeds; completed runs are left alone, failed and cancelled ones get a new run directory.
        runs: the folder that holds all studies, on a file system that the nodes share.
        cluster: where to run.
        foresee: memory and time of an arm, such as :func:`moelab.planning.project.foresee`.
        after: job that must succeed first, such as ``123`` or ``123_4``; otherwise Slurm cancels the new job.
        timeout_s: for sbatch, which waits and retries while the queue is full.

    Raises:
        BadInput: for a value that cannot stand in a script.
        Refused: if a plan is illegal or does not fit, data is not where the nodes look for it, a run is with Slurm
            already (named, with its job), it is unknown how a run ended, or Slurm rejects the script (with its words;
            runs stay prepared).
        SlurmMissing, SlurmError: if Slurm cannot be asked; nothing was submitted.
        NumberUnknown: if Slurm accepted a script but the job's number is unknown; the message says what to do.
    """
    runs = runs.absolute()
    _require(check_plans(study, cluster, foresee))
    _require(check_data(study, cluster))
    close_killed(directory.find(runs / study.name))  # before the lock, by which it tells that a launcher lives
    with only_launcher(runs / study.name):  # two clients that submit at once would submit everything twice
        here = directory.discover(runs / study.name)
        attempts = {experiment: here.attempts(experiment) for experiment in study.experiments}
        tried = [run for of_one in attempts.values() for run in of_one]
        # Before anything is written: if the queue cannot be read, nothing has changed.
        queue = Queue(slurm.queue())
        if after and after not in queue:
            raise Refused(f"--after {after}: Slurm knows no such job and would not wait for it; leave --after out")
        prepared = [run for run in tried if run.status.state is State.PREPARED]
        # After `prepared`, since this changes the status of those that are in the queue.
        updated = dict(zip(tried, update(tried, queue), strict=True))
        # In the queue although only prepared: the client was killed between sbatch and recording the number.
        found = [run for run in prepared if updated[run].state in ACTIVE]
        if lines := busy([run for run in tried if run not in found], queue):
            raise Refused("\n".join([*lines, "wait for them, `moelab cancel` them, or name other arms with --arm"]))
        require_known_ends(attempts.values())
        missing = {
            one: of_one for one, of_one in attempts.items() if not completed(of_one) and not set(of_one) & set(found)
        }
        jobs = _jobs(study, runs, missing, cluster, after)
        scripts = [render(spec) for spec, _ in jobs]
        for (spec, tasks), script in zip(jobs, scripts, strict=True):
            for number, (experiment, run) in enumerate(tasks):
                if not run.path.exists():
                    directory.make(run, experiment)
                keep_cluster(cluster, run.path)
                write_whole(run.path / SCRIPT_FILE, script)
                Ticket(comment=spec.comment, task=number).write(run)  # last: it means that everything is there
        for spec, tasks in jobs:
            _submit(spec, [run for _, run in tasks], timeout_s)
    return Submission(
        study=study.name,
        scripts=tuple(scripts),
        submitted=tuple(run for _, tasks in jobs for _, run in tasks),
        found=tuple(found),
        completed=tuple(done for of_one in attempts.values() if (done := completed(of_one))),
        discovered=here,
    )


def _require(findings: Iterable[Finding]) -> None:
    faults = [f"{one.name}: {one.found}" for one in findings if one.severity == "error"]
    if faults:
        raise Refused("\n".join(faults))


def _jobs(
    study: Study, runs: Path, missing: Attempts, cluster: ClusterProfile, after: str | None
) -> list[tuple[JobSpec, list[Task]]]:
    """One job array for each size; experiments come with their attempts so far, none of which completed."""
    by_size: dict[tuple[int, int], list[Task]] = {}  # all tasks of an array get the same resources
    for experiment, attempts in missing.items():
        unused = [run for run in attempts if run.status.state is State.PREPARED]
        task = experiment, (unused[-1] if unused else directory.fresh(runs, experiment))
        by_size.setdefault((experiment.nodes, experiment.gpus_per_node), []).append(task)
    jobs = []
    for (nodes, gpus), tasks in by_size.items():
        spec = JobSpec(
            cluster=cluster,
            runs=tuple(run.path for _, run in tasks),
            name=study.name,
            comment=slurm.new_comment(study.name),
            nodes=nodes,
            gpus_per_node=gpus,
            dependency=f"afterok:{after}" if after else None,
        )
        jobs.append((spec, tasks))
    return jobs


def _submit(spec: JobSpec, runs: Sequence[RunDir], timeout_s: float) -> None:
    """Call sbatch and record the job's number.

    Raises:
        Refused: if Slurm rejected the script.
        NumberUnknown: if Slurm accepted it but the job's number is unknown.
    """
    try:
        number = slurm.sbatch(runs[0].path / SCRIPT_FILE, timeout_s=timeout_s)
    except (SlurmError, SlurmMissing) as error:
        in_queue = None
        with suppress(SlurmError, SlurmMissing):  # it may have been accepted, and only the answer was lost
            in_queue = Queue(slurm.queue()).array_of(spec.comment)
        if in_queue is None and isinstance(error, NumberUnknown):
            words = (
                f"its job number is unknown: {error}. moelab finds the job once the queue shows its comment, or once "
                f"it starts. If Slurm has no such job (`squeue --me --name={spec.name}`), `moelab cancel` the run and "
                "submit it again"
            )
            for run in runs:
                if run.status.state is State.PREPARED:
                    run.set_status(replace(run.status, state=State.SUBMITTED, reason=words))
            raise NumberUnknown(f"{spec.name}: {words}") from error
        if in_queue is None:
            for run in runs:
                run.set_status(replace(run.status, reason=f"not submitted: {error}"))
            raise Refused(f"{error}\nthis script of {spec.name} was not submitted; its runs stay prepared") from error
        number = in_queue  # accepted after all
    for run in runs:
        status, ticket = run.status, ticket_of(run)
        if ticket and status.state is State.PREPARED:  # else it has begun, and has recorded its number itself
            run.set_status(replace(status, state=State.SUBMITTED, job_id=f"{number}_{ticket.task}", reason=None))
