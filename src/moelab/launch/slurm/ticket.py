"""By what a run's job is found again in Slurm: the comment that it was submitted with, and its task of the array.

The ticket is in the run directory before sbatch is called. A client that is killed before it has written the job's
number down therefore loses nothing: the next one asks the queue for the comment.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from moelab.launch.slurm.jobs import Job
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json

PREFIX = "moelab:"
TICKET_FILE, SCRIPT_FILE = "launch/submission.json", "launch/job.sbatch"


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a run directory holds of its submission.

    Attributes:
        comment: of the whole array; no other submission has it.
        task: of the array, from 0.
        raw_id: the task's own number in Slurm, once it has one: the job completion log knows no other.
    """

    comment: str
    task: int
    raw_id: str | None = None

    def write(self, run: RunDir) -> None:
        """Replace a run's ticket."""
        write_json(run.path / TICKET_FILE, asdict(self))


def new_comment(study: str) -> str:
    """A comment that no other submission has."""
    return f"{PREFIX}{study}:{secrets.token_hex(6)}"


def ticket_of(run: RunDir) -> Ticket | None:
    """A run's ticket; None of a run that no submission was ever prepared for."""
    try:
        return Ticket(**json.loads((run.path / TICKET_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class Queue:
    """Jobs that Slurm knows, found by run."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        in_order = sorted(jobs, key=lambda job: int(job.raw_id))  # of two, the later one
        self._by_ticket = {(job.comment, _task(job)): job for job in in_order}
        self._by_id = {job.job_id: job for job in in_order}

    def job_of(self, run: RunDir) -> Job | None:
        """The job of a run: by its ticket, or by its number where Slurm shows another comment than was given."""
        ticket = ticket_of(run)
        if ticket and (found := self._by_ticket.get((ticket.comment, ticket.task))):
            return found
        by_id = self._by_id.get(run.status.job_id or "")
        return by_id if by_id and not by_id.comment.startswith(PREFIX) else None

    def id_of(self, comment: str) -> str | None:
        """The number of the array that was submitted with a comment."""
        return next((job.job_id.partition("_")[0] for job in self._by_id.values() if job.comment == comment), None)

    def knows(self, job_id: str) -> bool:
        """Whether it has a job, an array or a task of this number."""
        return any(job_id in (known, known.partition("_")[0]) for known in self._by_id)


def _task(job: Job) -> int:
    return int(job.job_id.partition("_")[2] or 0)
