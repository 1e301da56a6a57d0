"""What Slurm tells a process of a job: its place in it, where its ranks meet, and by signals when to stop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

REQUEUE_CODE = 200
"""Of a step that wants its job to be started again. Above 128 + any signal, since srun ends the other nodes by SIGTERM
and returns the highest code of all."""
TERMINATED = 128 + signal.SIGTERM
_PORTS_PER_JOB = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """One node of one start of a job.

    Attributes:
        job_id: of the array task, which no other job has.
        label: as people and ``scontrol requeue`` write it, such as ``123_4``.
        node: number of this node in the job, from 0.
        nodes: how many there are.
        restarts: how often the job was requeued.
    """

    job_id: int
    label: str
    node: int
    nodes: int
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
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

        >>> Place(job_id=1201, label="1201", node=0, nodes=2, restarts=1).port(20000, 28999)
        20609
        """
        return first + (self.job_id * _PORTS_PER_JOB + self.restarts % _PORTS_PER_JOB) % (last - first + 1)

    def rendezvous(self, host: str, port: int) -> list[str]:
        """Options of torchrun for this node; each node's number is given, so that global ranks follow Slurm's order.

        Args:
            host: name or address of node 0.
            port: the same on every node.
        """
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={host}:{port}",
            f"--rdzv-id={self.start}",
        ]


class Signals:
    """Which signals came. Made first of all in a process, because the default of both is to die."""

    def __init__(self) -> None:
        self.save = self.end = False
        signal.signal(signal.SIGUSR1, self._on_save)
        signal.signal(signal.SIGTERM, self._on_end)

    def _on_save(self, *_: object) -> None:
        self.save = True

    def _on_end(self, *_: object) -> None:
        self.end = True
