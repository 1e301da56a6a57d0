"""Slurm: its commands, what they say of jobs, and by what a run's job is found again.

Commands are called with lists of arguments, never through a shell, and never for longer than a limit.

``squeue --json`` is asked first: states as a word (22.05) or a list of words (23.02 and later), numbers plain or as
``{"set": true, "number": 3}``. A Slurm built without JSON has ``scontrol show job -o``. What has left the controller's
memory is asked of accounting (``sacct``), else of the job completion log (``sacct -c``).

A run's job is known by the comment that it was submitted with, and its task of the array: the run's ticket, which is in
its directory before sbatch is called. A client that is killed before it has written the job's number down therefore
loses nothing: the next one asks the queue for the comment.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.errors import MoelabError, Refused
from moelab.machine import end_with_parent
from moelab.runs.directory import RunDir
from moelab.runs.files import write_json
from moelab.runs.status import State

TIMEOUT_S = 60.0
_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
# Variables of these would overrule the script, or change what is printed; those of a job, if this is started in one,
# would be taken for the new job's.
_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")
_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z0-9_:/&]*)=")
_TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?", re.ASCII)
_HIDDEN = {"None", "(null)", "N/A", "Unknown", ""}
ACCOUNTING_COLUMNS = "JobID,JobIDRaw,State,ExitCode"
COMPLETION_COLUMNS = "JobID,State,ExitCode"
PREFIX = "moelab:"
TICKET_FILE, SCRIPT_FILE = "launch/submission.json", "launch/job.sbatch"


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
            preexec_fn=end_with_parent,
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
    return _ended("-X", ACCOUNTING_COLUMNS, job_ids)


def completed(raw_ids: Iterable[str]) -> dict[str, Job]:
    """Jobs that ended, by their own number, from the job completion log; empty where there is none.

    That log does not know arrays: asked for ``12_3`` it answers with any task of them. A job that was requeued is there
    several times; the last entry is its end.
    """
    return _ended("-c", COMPLETION_COLUMNS, raw_ids)


def _ended(source: str, columns: str, job_ids: Iterable[str]) -> dict[str, Job]:
    numbers = ",".join(map(checked, job_ids))
    try:
        table = call("sacct", source, "-P", "-n", f"--format={columns}", "-j", numbers)
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
_STATES = (  # a word that is not known is `unknown`, never completed
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
