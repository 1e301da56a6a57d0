"""What a job's script starts once on each node: ``srun … python -m moelab.launch.in_job RUN HOST``.

The rest of what it is to do stands in the cluster profile that :mod:`moelab.launch.submit` left in the run. Each node
starts torchrun for its ranks (:mod:`moelab.launch.node`). SIGUSR1, which Slurm sends before the time limit, asks the
ranks to save a checkpoint and stop; SIGTERM ends them. The first node writes the run's status, and its exit code tells
the script whether to requeue the job.

Every start appends: the lines of all ranks, each with its global rank, continue ``logs/train.log``; the ranks' own logs
are in ``logs/<job>-<restart>/node<k>/``; training continues from the newest complete checkpoint.
"""

# Only the standard library: imports that take long would delay the signal handlers.
from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REQUEUE_CODE = 200
"""Exit code of a step whose job should be requeued. Above 128 + any signal, since srun ends the other nodes by SIGTERM
and returns the highest code of all."""
TERMINATED = 128 + signal.SIGTERM
_PORTS_PER_JOB = 8  # a restart gets another port: processes of the last start may still hold theirs


@dataclass(frozen=True, kw_only=True)
class NodeOfJob:
    """One node of one start of a job."""

    job_id: int  # of the array task, which no other job has
    label: str  # as people and `scontrol requeue` write it, such as `123_4`
    node: int  # number of this node in the job, from 0
    nodes: int  # how many there are
    restarts: int  # how often the job was requeued

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> NodeOfJob:
        """Read what srun sets for a task.

        Raises:
            KeyError: outside a job step.
        """
        job_id, array = environment["SLURM_JOB_ID"], environment.get("SLURM_ARRAY_JOB_ID")
        return cls(
            job_id=int(job_id),
            label=f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else job_id,
            node=int(environment["SLURM_NODEID"]),
            nodes=int(environment["SLURM_STEP_NUM_NODES"]),
            restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
        )

    @property
    def start(self) -> str:
        """Name of this start, which no other start of any job has."""
        return f"{self.label}-{self.restarts}"

    def port(self, first: int, last: int) -> int:
        """A port that no other job has, nor this job when it was last started.

        Any ``(last - first + 1) // 8`` jobs with consecutive ids have different ports.

        >>> NodeOfJob(job_id=1201, label="1201", node=0, nodes=2, restarts=1).port(20000, 28999)
        20609
        """
        return first + (self.job_id * _PORTS_PER_JOB + self.restarts % _PORTS_PER_JOB) % (last - first + 1)

    def rendezvous(self, host: str, port: int) -> list[str]:
        """Options of torchrun for this node; each node's number is given, so that global ranks follow Slurm's order."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={host}:{port}",
            f"--rdzv-id={self.start}",
        ]


class Signals:
    """Which signals arrived. Created first of all in a process, because the default action of both is to die."""

    def __init__(self) -> None:
        self.save = self.end = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "save", True))
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "end", True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this node until the run is finished, stopped or failed.

    Returns:
        0; :data:`REQUEUE_CODE` if the job should be requeued; else the code that torchrun or a signal ended with.
    """
    # SIGUSR1 may arrive while Python still imports what follows, which takes a second.
    signals = Signals()
    parser = argparse.ArgumentParser(prog="moelab.launch.in_job", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run directory, absolute")
    parser.add_argument("host", help="name or address of the first node")
    options = parser.parse_args(arguments)
    from moelab.launch.cluster import kept_cluster
    from moelab.launch.node import Start, account_for, train
    from moelab.runs.directory import RunDir
    from moelab.runs.status import State

    run, place = RunDir(options.run), NodeOfJob.of(os.environ)
    if run.status.state is State.COMPLETED:  # a job that was started again after its end
        return 0
    # For this user alone, and on this node: each rank looks into it before each step.
    with tempfile.TemporaryDirectory(prefix="moelab-") as folder:
        cluster = kept_cluster(run.path)
        start = Start(run=run, cluster=cluster, host=options.host, place=place, signals=signals, folder=Path(folder))
        # One node writes the run's files: several would overwrite each other's status.
        return train(start) if place.node else account_for(start)


if __name__ == "__main__":
    sys.exit(main())
