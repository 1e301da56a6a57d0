"""Slurm's commands, called with lists of arguments, never through a shell, and never for longer than a limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from moelab.errors import MoelabError, Refused
from moelab.launch.torchrun import end_with_parent

TIMEOUT_S = 60.0
_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
# Variables of these would overrule the script, or change what is printed; those of a job, if this is started in one,
# would be taken for the new job's.
_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")


class SlurmError(MoelabError):
    """A command of Slurm failed or did not answer; the message has Slurm's own words."""


class SlurmMissing(Refused):
    """This machine has no Slurm."""


def call(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """What a command of Slurm prints.

    Raises:
        SlurmMissing: if it is not installed here.
        SlurmError: if it fails, or takes longer than ``timeout_s`` seconds.
    """
    try:
        done = subprocess.run(
            arguments,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            # An sbatch whose client is gone must not submit later.
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    except FileNotFoundError:
        raise SlurmMissing(
            f"{arguments[0]} is not on PATH; use a machine that has Slurm, such as a login node"
        ) from None
    except subprocess.TimeoutExpired as error:
        words = _words(error.stderr)
        raise SlurmError(f"{arguments[0]}: no answer in {timeout_s:.0f} s{f': {words}' if words else ''}") from None
    if done.returncode:
        raise SlurmError(f"{arguments[0]}: {_words(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def sbatch(script: Path, *, timeout_s: float = TIMEOUT_S) -> str:
    """Submit a script; returns the number of the job.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`. After no answer, the job may have been accepted all the same.
    """
    printed = call("sbatch", "--parsable", str(script), timeout_s=timeout_s)
    return printed.strip().partition(";")[0]  # a federation adds its cluster's name


def test_only(script: Path) -> str:
    """When and where Slurm would start a script.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`, if Slurm would not accept it.
    """
    return call("sbatch", "--test-only", str(script))


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs such as ``12_3``; one that has ended is left as it is.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`.
    """
    call("scancel", *map(checked, job_ids))


def requeue(job_id: str) -> None:
    """Let a running or finished job start again.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`.
    """
    call("scontrol", "requeue", checked(job_id))


def checked(job_id: str) -> str:
    """A job's number as it is, so that nothing else reaches a command as an argument.

    Raises:
        SlurmError: if it is not one.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise SlurmError(f"job: got {job_id[:80]!r}; valid: a number such as 123, or 123_4 for a task of an array")
    return job_id


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OPTIONS)}
    return {**kept, "SLURM_BITSTR_LEN": "0"}  # or squeue would cut a long array's waiting tasks off: 0-5,7,…


def _words(errors: bytes | None) -> str:
    """Standard error on one line, without each line's own program name."""
    lines = (errors or b"").decode(errors="replace").splitlines()
    return "; ".join(re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in lines if line.strip())[:500]
