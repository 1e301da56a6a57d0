"""From Slurm's words for a job to the states of a run. A word that is not known is ``unknown``, never completed."""

from __future__ import annotations

from moelab.launch.slurm.jobs import Job
from moelab.runs.status import State

WAITS = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
RUNS = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
FAILED = {
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "LAUNCH_FAILED",
    "RECONFIG_FAIL",
}
CANCELLED = {"CANCELLED", "REVOKED"}
_STATES = (
    (WAITS, State.SUBMITTED),
    (RUNS, State.RUNNING),
    (FAILED, State.FAILED),
    (CANCELLED, State.CANCELLED),
    ({"COMPLETED"}, State.COMPLETED),
)


def state_of(job: Job) -> State:
    """What Slurm's word means for the run; whether it trained all its steps, Slurm does not know.

    Example:
        >>> state_of(Job(job_id="12", raw_id="12", state="NODE_FAIL"))
        <State.FAILED: 'failed'>
    """
    return next((state for words, state in _STATES if job.state in words), State.UNKNOWN)


def words_of(job: Job) -> str:
    """Slurm's own words, such as ``Slurm: PENDING (Resources)``."""
    return f"Slurm: {job.state}" + (f" ({job.reason})" if job.reason else "")
