"""What Slurm says of jobs, from whichever of its commands answers.

``squeue --json`` is asked first: states as a word (22.05) or a list of words (23.02 and later), numbers plain or as
``{"set": true, "number": 3}``. A Slurm built without JSON has ``scontrol show job -o``. What has left the controller's
memory is asked of accounting (``sacct``), else of the job completion log (``sacct -c``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moelab.launch.slurm.client import SlurmError, SlurmMissing, call, checked

_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z0-9_:/&]*)=")
_TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?", re.ASCII)
_HIDDEN = {"None", "(null)", "N/A", "Unknown", ""}
ACCOUNTING_COLUMNS = "JobID,JobIDRaw,State,ExitCode"
COMPLETION_COLUMNS = "JobID,State,ExitCode"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or one task of an array.

    Attributes:
        job_id: as commands take it: ``12``, or ``12_3`` for a task.
        raw_id: its own number; a waiting task shares that of its array.
        state: Slurm's word, such as ``RUNNING``; with ``COMPLETING`` and ``REQUEUED`` over what they follow.
        reason: Slurm's words for why it waits or failed.
        exit_code: of the batch script; negative for a signal; it says nothing before the end.
        restarts: how often it was requeued.
        comment: as it was submitted with.
    """

    job_id: str
    raw_id: str
    state: str
    reason: str | None = None
    exit_code: int | None = None
    restarts: int = 0
    comment: str = ""


def queue() -> list[Job]:
    """Every job that the controller remembers, ended ones for a few minutes too.

    Raises:
        SlurmMissing, SlurmError: if it cannot be asked.
    """
    try:
        printed = call("squeue", "--json", "--states=all")
    except SlurmError as error:
        if "json" not in str(error).lower() and "unrecognized option" not in str(error):
            raise
        return list(parse_scontrol(call("scontrol", "show", "job", "-o")))
    return list(parse_squeue(printed))


def accounted(job_ids: Iterable[str]) -> dict[str, Job]:
    """Jobs that ended, from accounting; empty where there is none.

    Args:
        job_ids: such as ``12`` and ``12_3``.
    """
    asked = ",".join(map(checked, job_ids))
    try:
        table = call("sacct", "-X", "-P", "-n", f"--format={ACCOUNTING_COLUMNS}", "-j", asked)
    except (SlurmError, SlurmMissing):
        return {}
    return {job.job_id: job for job in parse_sacct(table)}


def completed(raw_ids: Iterable[str]) -> dict[str, Job]:
    """Jobs that ended, by their own number, from the job completion log; empty where there is none.

    That log does not know arrays: asked for ``12_3`` it answers with any task of them. A job that was requeued is there
    several times; the last entry is its end.
    """
    asked = ",".join(map(checked, raw_ids))
    try:
        table = call("sacct", "-c", "-P", "-n", f"--format={COMPLETION_COLUMNS}", "-j", asked)
    except (SlurmError, SlurmMissing):
        return {}
    return {job.job_id: job for job in parse_sacct(table)}


def parse_squeue(text: str) -> Iterator[Job]:
    """Jobs of ``squeue --json``; a waiting array gives each of its tasks.

    Raises:
        SlurmError: if it is not that, or says (with exit code 0) that the controller did not answer.
    """
    try:
        content = json.loads(text)
        errors, jobs = content.get("errors") or [], content["jobs"]
        if errors:
            said = "; ".join(str(error.get("description") or error.get("error")) for error in errors)
            raise SlurmError(f"squeue: {said[:500]}")
        for job in jobs:
            yield from _of_json(job)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlurmError(f"squeue --json: not what Slurm 22.05 to 25.11 print ({error!r}): {text[:200]!r}") from error


def parse_scontrol(text: str) -> Iterator[Job]:
    """Jobs of ``scontrol show job -o``, one a line.

    The values are not quoted: of a field that is there twice, as a comment can pretend, the first is taken.
    """
    for line in text.splitlines():
        parts = _FIELD.split(line)
        fields: dict[str, str] = {}
        for name, value in zip(parts[1::2], parts[2::2], strict=True):
            fields.setdefault(name, value.rstrip())
        if not {"JobId", "JobState"} <= fields.keys():
            continue  # "No jobs in the system"
        for job_id in _ids(fields["JobId"], fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")):
            yield Job(
                job_id=job_id,
                raw_id=fields["JobId"],
                state=fields["JobState"],
                reason=_shown(fields.get("Reason", "").replace("_", " ")),
                exit_code=_exit_code_of_text(fields.get("ExitCode", "")),
                restarts=int(fields.get("Restarts", "0")),
                comment=fields.get("Comment", ""),
            )


def parse_sacct(text: str) -> Iterator[Job]:
    """Jobs of ``sacct -P -n`` with :data:`ACCOUNTING_COLUMNS` or :data:`COMPLETION_COLUMNS`."""
    for line in text.splitlines():
        *ids, state, exit_code = line.split("|")
        if ids and re.fullmatch(r"\d+(_\d+)?", ids[0]) and state:
            word = state.split()[0]  # CANCELLED by 1000
            yield Job(job_id=ids[0], raw_id=ids[-1], state=word, exit_code=_exit_code_of_text(exit_code))


def _of_json(job: dict[str, Any]) -> Iterator[Job]:
    raw_id, array = str(_number(job["job_id"])), _number(job.get("array_job_id"))
    task = _number(job.get("array_task_id"))
    tasks = str(task) if task is not None else str(job.get("array_task_string") or "")
    for job_id in _ids(raw_id, str(array) if array else None, tasks):
        yield Job(
            job_id=job_id,
            raw_id=raw_id,
            state=_state(job["job_state"]),
            reason=_shown(str(job.get("state_description") or job.get("state_reason") or "")),
            exit_code=_exit_code(job.get("exit_code")),
            restarts=_number(job.get("restart_cnt")) or 0,
            comment=str(job.get("comment") or ""),
        )


def _state(given: str | list[str] | None) -> str:
    """Of a state and its flags, the one that says what happens now."""
    words = [given] if isinstance(given, str) else [str(word) for word in given or ()]
    over = ("COMPLETING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT")
    return next((word for word in over if word in words), words[0] if words else "UNKNOWN")


def _number(value: Any) -> int | None:
    if isinstance(value, dict):
        return int(value["number"]) if value.get("set", True) and not value.get("infinite") else None
    return None if value is None or isinstance(value, bool) else int(value)


def _exit_code(value: Any) -> int | None:
    """From the raw status of ``wait`` (22.05) or an object of a return code and a signal."""
    if not isinstance(value, dict):
        status = _number(value)
        try:
            return None if status is None else os.waitstatus_to_exitcode(status & 0xFFFF)
        except ValueError:  # of a process that has only stopped
            return None
    if "return_code" not in value:
        return _exit_code(_number(value))
    signal = value.get("signal") or {}
    number = _number(signal.get("id", signal.get("signal_id")))
    return -number if number else _number(value["return_code"])


def _exit_code_of_text(text: str) -> int | None:
    """``3:0`` is exit code 3, ``0:9`` signal 9."""
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if not found:
        return None
    code, signal = map(int, found.groups())
    return -signal if signal else code


def _ids(raw_id: str, array: str | None, tasks: str) -> Iterator[str]:
    """Ids of the tasks ``0-2,5%4`` of an array, or of the one job."""
    if not array or not tasks:
        yield raw_id
        return
    for part in tasks.partition("%")[0].split(","):
        if found := _TASKS.fullmatch(part):
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            yield from (f"{array}_{task}" for task in range(first, last + 1, step))


def _shown(word: str) -> str | None:
    return None if word in _HIDDEN else word
