"""What became of a run: ``status.json``.

``prepared → submitted → running → completed | failed | cancelled | unknown``. A run whose end nobody saw is *unknown*,
never completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import ConfigDict

from moelab.privacy import one_line

FILE = "status.json"
RESERVE = ".space_for_status"
RESERVE_BYTES = 16_384
# In a reason, so that a job that ends by it is told from one that Slurm cancelled.
BY_CANCEL = "by `moelab cancel`"


class State(StrEnum):
    """Where a run is."""

    PREPARED = "prepared"
    SUBMITTED = "submitted"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self in (State.COMPLETED, State.FAILED, State.CANCELLED)  # an unknown one may still be training


@dataclass(frozen=True, kw_only=True)
class Status:
    """Content of ``status.json``."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    state: State
    reason: str | None = None  # on one line, why it failed or was cancelled
    exit_code: int | None = None  # of torchrun or of the job
    job_id: str | None = None  # of Slurm, when there is one
    attempts: int = 0  # how often it was started
    updated: float = 0.0  # seconds since the Unix epoch
    boot_id: str | None = None  # of the machine that `moelab run` runs on, since it was started; it names no machine

    def __post_init__(self) -> None:
        """A reason may quote a log, and is shown and stored as it is: it holds no keys and moves no cursor."""
        if self.reason is not None:
            object.__setattr__(self, "reason", one_line(self.reason))

    def in_words(self) -> str:
        """The state, and the reason if it has one."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)

    @property
    def is_lost(self) -> bool:
        """Whether neither a file nor a job of Slurm says where the run is."""
        return self.state is State.UNKNOWN and self.job_id is None
