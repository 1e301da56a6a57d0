"""One node of a job: it runs torchrun and asks its ranks to stop when time runs out.

The first node also writes the run's status and files, and decides whether the job is requeued.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moelab.experiment import Experiment
from moelab.files import write_json, write_whole
from moelab.launch.cluster import ClusterProfile
from moelab.launch.ends import close, ended, failure_of
from moelab.launch.in_job import REQUEUE_CODE, TERMINATED, NodeOfJob, Signals
from moelab.launch.local import no_space, stage_data
from moelab.launch.torchrun import NODE_VARIABLE, Command, Process, command, end_processes, launches_of
from moelab.machine import environment
from moelab.runs.collect import Collected
from moelab.runs.directory import STOP_VARIABLE, STOPPED_FILE, RunDir
from moelab.runs.failure import Kind
from moelab.runs.status import BY_CANCEL, State, Status

POLL_S = 0.2
LOG_QUIET_S, LOG_WAIT_S = 1.0, 15.0
COLLECTIVE_TIMEOUT_S = 1800  # ranks wait for the slowest one's part of a checkpoint


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run, on this node."""

    run: RunDir
    place: NodeOfJob
    cluster: ClusterProfile
    host: str  # name or address of the first node
    signals: Signals  # which arrived so far
    folder: Path  # on this node, for this user alone

    @property
    def logs(self) -> Path:
        """Folder of the ranks' own logs, of all nodes."""
        return self.run.log.parent / self.place.start

    @property
    def stop_file(self) -> Path:
        """The file that asks the ranks of this node to save and stop."""
        return self.folder / "stop"

    def command(self, experiment: Experiment) -> Command:
        """The torchrun command for this node's ranks, with the folders of checkpoints and of this cluster's data."""
        cluster, folder = self.cluster, self.run.path
        if cluster.scratch:
            folder = Path(cluster.scratch) / self.run.name
        arguments = [
            "--checkpoint.enable",
            f"--checkpoint.folder={folder}/checkpoint",
            # TorchTitan has no value for "never": an interval beyond the last step stands for it.
            f"--checkpoint.interval={cluster.checkpoint_interval_steps or experiment.steps + 1}",
            f"--checkpoint.keep_latest_k={cluster.checkpoints_kept}",
            f"--comm.train_timeout_seconds={COLLECTIVE_TIMEOUT_S}",
        ]
        dataset, tokenizer = self.data(experiment)
        arguments += [f"--dataloader.dataset_path={dataset}"] if dataset else []
        if dataset and experiment.validate_every:
            arguments.append(f"--validator.dataloader.dataset_path={dataset}")
        arguments += [f"--hf_assets_path={tokenizer}"] if tokenizer else []
        launched = command(
            experiment,
            self.run.path,
            rendezvous=self.place.rendezvous(self.host, self.port),
            logs=f"{self.logs.relative_to(self.run.path)}/node{self.place.node}",
            titan=arguments,
        )
        own = {NODE_VARIABLE: f"{self.place.start}-{self.place.node}", STOP_VARIABLE: str(self.stop_file)}
        return replace(launched, variables={**launched.variables, **own})

    @property
    def port(self) -> int:
        """Where the ranks meet on the first node."""
        return self.place.port(self.cluster.first_port, self.cluster.last_port)

    def data(self, experiment: Experiment) -> tuple[Path | None, Path | None]:
        """The cluster's copies of the experiment's dataset and tokenizer; other text than C4 has its own tokenizer."""
        if experiment.dataset != "c4":
            return None, None
        dataset, tokenizer = self.cluster.datasets.get("c4"), self.cluster.tokenizers.get(experiment.model)
        return Path(dataset) if dataset else None, Path(tokenizer) if tokenizer else None


def train(start: Start, is_over: Callable[[], object] | None = None) -> int:
    """Run this node's ranks until they end or it is over: by default, once SIGTERM has arrived.

    ``is_over`` is called several times a second.

    Returns:
        The exit code of torchrun, or :data:`~moelab.launch.in_job.TERMINATED` if this function ended it.
    """
    experiment = start.run.experiment
    # Where Slurm lost this node and its daemon, ranks of the job's earlier start still run and would train beside ours.
    own = f"{start.place.start}-"
    end_processes([launch for launch in launches_of(start.run) if not launch.name.startswith(own)])
    dataset, tokenizer = start.data(experiment)
    stage_data(experiment, dataset=dataset, tokenizer=tokenizer)
    with Process(start.command(experiment), None) as process:
        while process.poll() is None:
            # A file and no signal, because torchrun only passes on signals that end its ranks.
            if start.signals.save:
                start.stop_file.touch()
            if is_over() if is_over else start.signals.end:
                return TERMINATED
            time.sleep(POLL_S)
    return process.returncode


def account_for(start: Start) -> int:
    """Train as :func:`train` does, and keep the run's status up to date.

    Returns:
        What :func:`moelab.launch.in_job.main` returns.
    """
    before = start.run.status
    status = Status(state=State.RUNNING, job_id=start.place.label, attempts=before.attempts + 1)
    start.run.set_status(status)  # before anything can fail: `attempts` counts every start
    try:
        code, status, left = _end(start, status)
    except Exception as error:
        close(start.run, replace(status, state=State.FAILED, reason=f"the launcher failed: {error}"))
        raise
    if status.state is State.SUBMITTED:
        start.run.set_status(status)
    else:
        close(start.run, status, left)
    return code


def _end(start: Start, status: Status) -> tuple[int, Status, Collected | None]:
    """Train until something ends it; returns the script's exit code, the status, and what the run left if read."""
    run = start.run
    if not _is_free(start.port):
        return *_requeue(start, status, f"port {start.port} of {start.host} is in use by another program"), None
    (run.path / STOPPED_FILE).unlink(missing_ok=True)
    # Each start adds files of its own, since it may run on other nodes.
    number = "" if status.attempts == 1 else f"-{status.attempts}"
    write_whole(run.path / "launch" / f"command{number}.sh", f"{start.command(run.experiment).as_shell()}\n")
    write_json(run.path / f"environment{number}.json", environment(nodes=start.place.nodes))
    log_start = run.log.stat().st_size

    def is_over() -> object:
        if start.signals.end:  # written at once, because SIGKILL follows
            run.set_status(_terminated(start, status, log_start))
        return start.signals.end or no_space(run.path)  # ranks would train on, and their logs be lost

    code = train(start, is_over)
    if start.signals.end:
        return TERMINATED, _terminated(start, status, log_start), None
    if code == TERMINATED:
        return 1, replace(status, state=State.FAILED, reason=no_space(run.path) or "no disk space for a moment"), None
    # The lines of other nodes arrive through srun, after their ranks have ended.
    _settle(run.log)
    if code == 0 and (run.path / STOPPED_FILE).exists():
        step = json.loads((run.path / STOPPED_FILE).read_text())["step"]
        return *_requeue(start, status, f"saved step {step} of {run.experiment.steps} before the time limit"), None
    status, left = ended(run, replace(status, exit_code=code), start.logs, log_start=log_start)
    return (0 if status.state is State.COMPLETED else 1), status, left


def _requeue(start: Start, status: Status, why: str) -> tuple[int, Status]:
    """Have the job requeued, unless it was requeued too often."""
    done, task = start.place.restarts, start.place.label.partition("_")[2]
    if done < start.cluster.requeues:
        return REQUEUE_CODE, replace(status, state=State.SUBMITTED, reason=f"{why}; requeued")
    limit = f"requeued {done} times, the limit in the cluster profile"
    resume = f"`sbatch --array={task} {start.run.path}/launch/job.sbatch` continues from there"
    return 1, replace(status, state=State.FAILED, reason=f"{why}; {limit}; {resume}")


def _terminated(start: Start, status: Status, log_start: int) -> Status:
    """The status after SIGTERM: a rank's failure if there is one; otherwise only Slurm knows the cause.

    srun sends SIGTERM to all nodes when one fails, and Slurm when the job is cancelled, preempted, requeued or late.
    """
    failure = failure_of(start.run, start.logs, log_start)
    if failure and failure.kind < Kind.ABORTED and failure.kind is not Kind.STOPPED:
        return replace(status, state=State.FAILED, reason=str(failure))
    if start.signals.save:
        late = "time ran out before a checkpoint was saved: raise signal_s in the cluster profile"
        return replace(status, state=State.FAILED, reason=late)
    written = start.run.status
    if written.state is State.CANCELLED or written.reason == BY_CANCEL:
        return replace(status, state=State.CANCELLED, reason=written.reason)
    ended_by = "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"
    return replace(status, state=State.UNKNOWN, reason=ended_by)


def _settle(log: Path) -> None:
    """Wait until srun has written the last lines of all nodes: until the log stops growing."""
    end, size = time.monotonic() + LOG_WAIT_S, -1
    while time.monotonic() < end and size != (size := log.stat().st_size):
        time.sleep(LOG_QUIET_S)


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torchrun's store: TIME_WAIT does not count
        try:
            attempt.bind(("", port))
        except OSError:
            return False
        return True
