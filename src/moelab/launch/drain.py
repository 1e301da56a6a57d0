"""Take bad nodes out of a cluster, and let a job start again without them. Nothing here is done unless it is asked for.

Draining needs an operator's rights. Without them a job can still be kept away from nodes: :func:`requeue_without`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from moelab.errors import BadInput
from moelab.launch.cluster import line
from moelab.launch.slurm.client import SlurmError, call, checked

LEAVING_S = 120.0
"""What a requeued job gets to leave its nodes: KillWait of Slurm is 30 s by default, an epilog may take longer."""
POLL_S = 0.2
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def drain(nodes: Sequence[str], reason: str) -> None:
    """Let nodes finish what they run and take no more, until an operator resumes them.

    Args:
        nodes: their names in Slurm.
        reason: that operators will read.

    Raises:
        BadInput: for a name or reason that is not one.
        SlurmMissing, SlurmError: if Slurm does not do it; without the rights it says so.
    """
    call("scontrol", "update", f"nodename={_listed(nodes)}", "state=drain", f"reason={_reason(reason)}")


def requeue_without(job_id: str, nodes: Sequence[str]) -> None:
    """Start a running or waiting job again, on other nodes.

    Args:
        job_id: such as ``123`` or ``123_4``; its script must allow a requeue, as moelab's do.
        nodes: that it shall not get.

    Raises:
        BadInput: for a name that is not a node's.
        SlurmMissing, SlurmError: if Slurm does not do it, or the job does not leave its nodes; it is then held, and
            ``scontrol release`` lets it go.
    """
    job, listed = checked(job_id), _listed(nodes)
    if _state(job) != "PENDING":
        call("scontrol", "requeuehold", job)  # held: it must not start again before the nodes are excluded
    else:
        call("scontrol", "hold", job)
    _wait_until_pending(job)
    call("scontrol", "update", f"jobid={job}", f"excnodelist={listed}")
    call("scontrol", "release", job)


def _listed(nodes: Sequence[str]) -> str:
    if not nodes or not all(_NODE.fullmatch(node) for node in nodes):
        raise BadInput(f"nodes: got {', '.join(nodes)[:80]!r}; valid: at least one name of a node, such as gpu017")
    return ",".join(nodes)


def _reason(reason: str) -> str:
    try:
        return line(reason)
    except ValueError as error:
        raise BadInput(f"reason: got {reason[:80]!r}; valid: {error}") from None


def _state(job: str) -> str:
    found = re.search(r"\bJobState=(\w+)", call("scontrol", "show", "job", "-o", job))
    return found[1] if found else ""


def _wait_until_pending(job: str) -> None:
    end = time.monotonic() + LEAVING_S
    while (state := _state(job)) != "PENDING":
        if time.monotonic() > end:
            raise SlurmError(f"job {job} is still {state} {LEAVING_S:.0f} s after it was requeued")
        time.sleep(POLL_S)
