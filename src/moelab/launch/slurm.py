"""Slurm: its commands, what they say about jobs, and how a run's job is found again.

Commands are called with lists of arguments, never through a shell, and always with a time limit.

One source answers at a time. The controller has the jobs that wait, run, or ended in the last minutes: ``squeue
--json``, or ``scontrol show job -o`` of a Slurm that was built without JSON. Accounting (``sacct``) has those that it
forgot. Their answers become records with the names of squeue's JSON, and one function reads all of them. States there
are a word (22.05) or a list of words (23.02 and later), numbers are plain or ``{"set": true, "number": 3}``. Sites wrap
these commands, and their plugins print too, so the answer is searched for in what is printed.

A run's job is identified by the comment it was submitted with and its task of the array: the run's ticket, which is
written before sbatch is called. A client that is killed before it has noted the job's number therefore loses nothing:
the next one looks for the comment in the queue.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moelab.errors import MoelabError, Refused
from moelab.files import read_bytes, write_json
from moelab.machine import COLOUR, end_with_parent
from moelab.runs.directory import RunDir
from moelab.runs.status import State

TIMEOUT_S = 60.0
PREFIX = "moelab:"
TICKET_FILE, SCRIPT_FILE = "launch/submission.json", "launch/job.sbatch"
ACCOUNTING_COLUMNS = "JobID,JobIDRaw,State,ExitCode"
# Such variables would override the script or change what commands print; inside a job, its own would be taken for the
# new job's.
_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
_ARRAY_ID = re.compile(r"(\d+)_(\d+|\[[^]]*\])", re.ASCII)  # 12_3, or 12_[5-9%4] for tasks that never started
_TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?", re.ASCII)
_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z0-9_:/&]*)=")
_SCONTROL_NAMES = {  # each with its name in squeue's JSON
    "JobId": "job_id",
    "ArrayJobId": "array_job_id",
    "ArrayTaskId": "array_task_string",
    "JobState": "job_state",
    "Reason": "state_reason",
    "ExitCode": "exit_code",
    "Restarts": "restart_cnt",
    "Comment": "comment",
}
_SUBMITTED = (  # how sbatch, or a site's wrapper of it, prints a job's number; the first form that occurs counts
    re.compile(r"Submitted batch job ([1-9]\d{0,9})\b", re.ASCII),
    # `--parsable`, on a line of its own below a greeting, as on TACC's systems (maestrowf issue 441).
    re.compile(r"^\s*([1-9]\d{0,9})(?:;[\w.-]+)?\s*$", re.ASCII | re.M),
)
_WORDS = {
    State.SUBMITTED: "PENDING REQUEUED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    State.RUNNING: "RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT",
    State.FAILED: "FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED LAUNCH_FAILED RECONFIG_FAIL",
    State.CANCELLED: "CANCELLED",
    State.COMPLETED: "COMPLETED",
}
STATES = {word: state for state, words in _WORDS.items() for word in words.split()}
"""What Slurm's words mean; any other word is *unknown*, never completed."""


class SlurmError(MoelabError):
    """A Slurm command failed or did not answer; the message has Slurm's own words."""


class SlurmMissing(Refused):
    """This machine has no Slurm."""


class NumberUnknown(SlurmError):
    """sbatch accepted a script but did not print the job's number in a known form."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One job, or one task of an array."""

    job_id: str  # as commands take it: `12`, or `12_3` for a task
    state: str  # Slurm's word for what is happening now, such as `RUNNING` or `COMPLETING`
    reason: str | None = None  # Slurm's words for why it waits or failed
    exit_code: int | None = None  # of the batch script; negative for a signal; meaningless before the end
    restarts: int = 0  # how often it was requeued
    comment: str = ""  # that it was submitted with

    @property
    def run_state(self) -> State:
        """The run's state by Slurm's word. Slurm does not know whether all steps were trained."""
        return STATES.get(self.state, State.UNKNOWN)

    @property
    def in_words(self) -> str:
        """Slurm's own words, such as ``Slurm: PENDING (Resources)``."""
        return f"Slurm: {self.state}" + (f" ({self.reason})" if self.reason else "")


# --- commands


def call(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Standard output of a Slurm command.

    Raises:
        SlurmMissing: if it is not installed here.
        SlurmError: if it fails, or takes longer than ``timeout_s`` seconds.
    """
    return _printed(arguments, timeout_s)[0]


def _printed(arguments: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """Standard output and standard error of :func:`call`."""
    try:
        done = subprocess.run(
            arguments,
            env=_environment(),
            stdin=subprocess.DEVNULL,  # a site's wrapper that asks a question gets no answer instead of waiting
            capture_output=True,
            timeout=timeout_s,
            check=False,
            # An sbatch that waits for the controller must not submit after this process has died.
            preexec_fn=end_with_parent,
        )
    except FileNotFoundError:
        raise SlurmMissing(
            f"{arguments[0]} is not on PATH; use a machine that has Slurm, such as a login node"
        ) from None
    except subprocess.TimeoutExpired as error:
        words = _words((error.stderr or b"").decode(errors="replace"))
        raise SlurmError(f"{arguments[0]}: no answer in {timeout_s:.0f} s{f': {words}' if words else ''}") from None
    output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if done.returncode:
        words = _words(errors) or f"exit code {done.returncode}"
        if "configuration source" in words:  # Slurm's own words name DNS, and not what to do
            words += "; Slurm's programs are installed here, but know no cluster: use a login node"
        raise SlurmError(f"{arguments[0]}: {words}")
    return output, errors


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OPTIONS)}
    return {**kept, "SLURM_BITSTR_LEN": "0"}  # else squeue truncates the waiting tasks of a long array: 0-5,7,…


def sbatch(script: Path, *, timeout_s: float = TIMEOUT_S) -> str:
    """Submit a script; returns the number of the job.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`. Without an answer, the job may have been accepted nevertheless.
        NumberUnknown: with what was printed, if that holds no number or several.
    """
    output, errors = _printed(("sbatch", "--parsable", str(script)), timeout_s)
    for text in (output, errors):  # some wrappers print the number on standard error
        for form in _SUBMITTED:
            numbers = set(form.findall(COLOUR.sub("", text)))
            if len(numbers) == 1:
                return str(numbers.pop())
            if numbers:  # several: none of them can be trusted
                break
    raise NumberUnknown(f"sbatch accepted the script but printed no job number: {_words(output + errors)!r}")


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs; one that has ended is left as it is. Raises as :func:`call`."""
    if numbers := [checked(job_id) for job_id in job_ids]:
        call("scancel", *numbers)


def requeue(job_id: str) -> None:
    """Restart a running or finished job; raises as :func:`call`."""
    call("scontrol", "requeue", checked(job_id))


def checked(job_id: str) -> str:
    """Return a job's number; SlurmError for anything else, which may not reach a command as an argument."""
    if not _JOB_ID.fullmatch(job_id):
        raise SlurmError(f"job: got {job_id[:80]!r}; valid: a number such as 123, or 123_4 for a task of an array")
    return job_id


def queue() -> list[SlurmJob]:
    """All jobs that the controller remembers, including those that ended in the last few minutes.

    Raises:
        SlurmMissing, SlurmError: if it cannot be asked.
    """
    try:
        return parse_squeue(call("squeue", "--json", "--states=all"))
    except SlurmError as error:
        # Older than 21.08, or built without a JSON library: squeue names the option or the missing plugin.
        if "json" not in str(error).lower() and "unrecognized option" not in str(error):
            raise
    return parse_scontrol(call("scontrol", "show", "job", "-o"))


def ended(job_ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Jobs that the controller has forgotten, by number, from accounting; empty where there is no accounting."""
    # Whole arrays, since tasks that never started share one row. Whatever a record holds, only numbers are passed on.
    arrays = {job_id.partition("_")[0] for job_id in job_ids if _JOB_ID.fullmatch(job_id)}
    if not arrays:
        return {}
    try:
        table = call("sacct", "-X", "-P", "-n", f"--format={ACCOUNTING_COLUMNS}", "-j", ",".join(sorted(arrays)))
    except (SlurmError, SlurmMissing):
        return {}
    # One that accounting believes to be alive left the controller without an end that anybody saw.
    return {job.job_id: job for job in parse_sacct(table) if job.run_state.is_final}


# --- answers


def parse_squeue(text: str) -> list[SlurmJob]:
    """Jobs of ``squeue --json``; of a waiting array, each of its tasks.

    Raises:
        SlurmError: if it is something else, or says (with exit code 0) that the controller did not answer.
    """
    start = re.search(r"^\s*\{", text, re.M)  # wrappers and plugins may print before it
    try:
        content, _ = json.JSONDecoder().raw_decode(text, start.end() - 1 if start else 0)
        errors, records = content.get("errors") or [], list(content["jobs"])
        if errors:
            words = "; ".join(str(error.get("description") or error.get("error")) for error in errors)
            raise SlurmError(f"squeue: {_line(words)}")
        jobs = [job for record in records for job in _jobs_of(record)]
        if records and not jobs:
            raise ValueError("none of the jobs has a number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SlurmError(f"squeue --json: not what Slurm 22.05 to 25.11 print ({error!r}): {text[:200]!r}") from error
    return jobs


def parse_scontrol(text: str) -> list[SlurmJob]:
    """Jobs of ``scontrol show job -o``, one a line."""
    jobs: list[SlurmJob] = []
    for line in text.splitlines():
        parts = _FIELD.split(line)
        fields: dict[str, str] = {}
        for name, value in zip(parts[1::2], parts[2::2], strict=True):
            # Values are not quoted, and a comment may hold "JobState=COMPLETED". Comment= comes late: the first counts.
            fields.setdefault(name, value.rstrip())
        if "JobState" in fields:  # else "No jobs in the system"
            fields["Reason"] = fields.get("Reason", "").replace("_", " ")
            jobs += _jobs_of({key: fields.get(name) for name, key in _SCONTROL_NAMES.items()})
    return jobs


def parse_sacct(text: str) -> list[SlurmJob]:
    """Jobs of ``sacct -P -n`` with :data:`ACCOUNTING_COLUMNS`; of several with one number, the last is its end.

    A row of tasks that never started, ``12_[5-9%4]``, yields each of them before the rows of single tasks: one may
    have started after all.
    """
    rows = [cells for line in text.splitlines() if len(cells := line.strip().split("|")) >= 4]
    jobs: list[SlurmJob] = []
    for job_id, _raw, state, exit_code, *_ in sorted(rows, key=lambda cells: "[" not in cells[0]):
        array = _ARRAY_ID.fullmatch(job_id)  # of a step, such as `12_3.batch`, there is neither form of a number
        ids = {"array_job_id": array[1], "array_task_string": array[2]} if array else {}
        jobs += _jobs_of({"job_id": array[1] if array else job_id, **ids, "job_state": state, "exit_code": exit_code})
    return jobs


def _jobs_of(record: Any) -> Iterator[SlurmJob]:
    """The tasks of a record with the names of squeue's JSON; none if it has no job number.

    A field that cannot be read hides no other.
    """
    if not isinstance(record, Mapping) or (number := _whole_number(record.get("job_id"))) is None:
        return
    array, task = _whole_number(record.get("array_job_id")), _whole_number(record.get("array_task_id"))
    tasks = str(record.get("array_task_string") or "") if task is None else str(task)
    for job_id in _task_ids(array, tasks) if array and tasks else [str(number)]:
        reason = _line(str(record.get("state_description") or record.get("state_reason") or ""))
        yield SlurmJob(
            job_id=job_id,
            state=_state(record.get("job_state")),
            reason=None if reason in ("None", "(null)", "N/A", "Unknown", "") else reason,
            exit_code=_exit_code(record.get("exit_code")),
            restarts=_whole_number(record.get("restart_cnt")) or 0,
            comment=str(record.get("comment") or ""),
        )


def _task_ids(array: int, tasks: str) -> Iterator[str]:
    """Numbers of the tasks ``[0-2,5%4]`` of an array."""
    for part in tasks.strip("[]").partition("%")[0].split(","):  # %4: at most four tasks at a time
        if match := _TASKS.fullmatch(part):
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            yield from (f"{array}_{task}" for task in range(first, last + 1, step))


def _state(given: Any) -> str:
    """Of a state and its flags, the one that says what is happening now; ``CANCELLED`` of ``CANCELLED by 1000``."""
    words = [_line(str(word)).partition(" ")[0] for word in (given if isinstance(given, list) else [given or ""])]
    # A cancelled job that still occupies its nodes is ["CANCELLED", "COMPLETING"].
    flags = ("COMPLETING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT")
    return next((flag for flag in flags if flag in words), (words or [""])[0]) or "UNKNOWN"


def _whole_number(value: Any) -> int | None:
    """A whole number, not negative, in any of Slurm's forms; None for anything else."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    # By its text, since True is an int, too.
    return int(value) if re.fullmatch(r"\d{1,18}", str(value), re.ASCII) else None


def _exit_code(value: Any) -> int | None:
    """From ``3:0``, the raw status of ``wait`` (22.05), or an object of a return code and a signal; 9 as -9."""
    if isinstance(value, str):
        code, _, number_of_signal = value.partition(":")
        value = {"return_code": code, "signal": {"id": number_of_signal}}
    if isinstance(value, dict) and "return_code" in value:
        signal = value.get("signal")
        number = _whole_number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, dict) else None
        return -number if number else _whole_number(value["return_code"])
    status = _whole_number(value)
    try:
        return None if status is None else os.waitstatus_to_exitcode(status & 0xFFFF)
    except ValueError:  # of a process that has only stopped
        return None


def _words(text: str) -> str:
    """What a command printed, on one line, without the program's name on each."""
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in COLOUR.sub("", text).splitlines())
    return "; ".join(_line(line) for line in lines if line)[:500]


def _line(text: str) -> str:
    """Another program's text as one printable line."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:500]).split())


# --- runs and their jobs


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a run directory keeps about its submission."""

    comment: str  # of the whole array; no other submission has it
    task: int  # of the array, from 0

    def write(self, run: RunDir) -> None:
        """Replace a run's ticket."""
        write_json(run.path / TICKET_FILE, asdict(self))


_TICKET = TypeAdapter(Ticket)


def ticket_of(run: RunDir) -> Ticket | None:
    """A run's ticket; None if the run was never prepared for Slurm."""
    try:
        return _TICKET.validate_json(read_bytes(run.path / TICKET_FILE))
    except (OSError, ValueError):
        return None


def new_comment(study: str) -> str:
    """A comment that no other submission has."""
    return f"{PREFIX}{study}:{secrets.token_hex(6)}"  # random, because two clients may submit in the same second


class Queue:
    """The jobs that Slurm knows, to be looked up by run."""

    def __init__(self, jobs: Iterable[SlurmJob]) -> None:
        # Of two jobs of one run, such as after its script was submitted by hand, the later stays.
        in_order = sorted(jobs, key=lambda job: int(job.job_id.partition("_")[0]))
        self._by_ticket = {(job.comment, int(job.job_id.partition("_")[2] or 0)): job for job in in_order}
        self._by_id = {job.job_id: job for job in in_order}

    def job_of(self, run: RunDir) -> SlurmJob | None:
        """The job of a run: by its ticket, or by its number where Slurm shows another comment."""
        ticket = ticket_of(run)
        if ticket and (job := self._by_ticket.get((ticket.comment, ticket.task))):
            return job
        # Some sites' plugins replace the comment. A comment of moelab's, though, means that the number is another
        # submission's.
        by_id = self._by_id.get(run.status.job_id or "")
        return by_id if by_id and not by_id.comment.startswith(PREFIX) else None

    def array_of(self, comment: str) -> str | None:
        """Number of the array that was submitted with this comment."""
        return next((job_id.partition("_")[0] for job_id, job in self._by_id.items() if job.comment == comment), None)

    def __contains__(self, job_id: str) -> bool:
        """Whether Slurm knows the job, the task, or a task of the array with this number."""
        return any(job_id in (known, known.partition("_")[0]) for known in self._by_id)
