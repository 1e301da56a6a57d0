"""Slurm: its commands, what they say about jobs, and how a run's job is found again.

Commands are called with lists of arguments, never through a shell, and always with a time limit.

``squeue --json`` is asked first: states as a word (22.05) or a list of words (23.02 and later), numbers plain or as
``{"set": true, "number": 3}``. A Slurm built without JSON has ``scontrol show job -o``. Jobs that have left the
controller's memory are in accounting (``sacct``), or in the job completion log (``sacct -c``).

Sites wrap these commands, and their plugins print too, so the answer is searched for in what is printed, and nothing is
taken that does not have its form. A field or a job that cannot be read hides no other.

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
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from moelab.errors import MoelabError, Refused
from moelab.files import write_json
from moelab.machine import COLOUR, end_with_parent
from moelab.runs.directory import RunDir
from moelab.runs.status import State

TIMEOUT_S = 60.0
_JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
# Such variables would override the script or change what commands print; inside a job, its own would be taken for the
# new job's.
_OPTIONS = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")
_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z0-9_:/&]*)=")
_SCONTROL_NAMES = {  # of what squeue's JSON has, too, by its name there
    "JobId": "job_id",
    "ArrayJobId": "array_job_id",
    "ArrayTaskId": "array_task_string",
    "JobState": "job_state",
    "Reason": "state_reason",
    "ExitCode": "exit_code",
    "Restarts": "restart_cnt",
    "Comment": "comment",
}
_TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?", re.ASCII)
_ENDED = re.compile(  # 12_3|15|CANCELLED by 1000|0:15, from the completion log without the second column
    r"(?P<id>\d+(_(\d+|\[[^]|]*\]))?)\|((?P<raw>\d+)\|)?(?P<state>[A-Z_]+\+?)( [^|]*)?\|(?P<exit>\d*:?\d*)\|?", re.ASCII
)
_SUBMITTED = (  # how sbatch, or a site's wrapper of it, prints a job's number; the first form that occurs counts
    re.compile(r"Submitted batch job (?P<id>[1-9]\d{0,9})\b(?: on cluster (?P<cluster>[\w.-]+))?", re.ASCII),
    re.compile(r"\"job_?id\"\s*:\s*\"?(?P<id>[1-9]\d{0,9})\b(?P<cluster>)", re.ASCII | re.I),
    # `--parsable`, on a line of its own below a greeting, as on TACC's systems (maestrowf issue 441).
    re.compile(r"^\s*(?P<id>[1-9]\d{0,9})(?:;(?P<cluster>[\w.-]+))?\s*$", re.ASCII | re.M),
)
_HIDDEN = {"None", "(null)", "N/A", "Unknown", ""}
ACCOUNTING_COLUMNS = "JobID,JobIDRaw,State,ExitCode"
COMPLETION_COLUMNS = "JobID,State,ExitCode"
PREFIX = "moelab:"
TICKET_FILE, SCRIPT_FILE = "launch/submission.json", "launch/job.sbatch"


class SlurmError(MoelabError):
    """A Slurm command failed or did not answer; the message has Slurm's own words."""


class SlurmMissing(Refused):
    """This machine has no Slurm."""


class NumberUnknown(SlurmError):
    """sbatch accepted a script but did not print the job's number in a known form."""


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


def sbatch(script: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[str, str | None]:
    """Submit a script; returns the number of the job, and the cluster's name where sbatch names one.

    Raises:
        SlurmMissing, SlurmError: as :func:`call`. Without an answer, the job may have been accepted nevertheless.
        NumberUnknown: with what was printed, if that holds no number or several.
    """
    output, errors = _printed(("sbatch", "--parsable", str(script)), timeout_s)
    for text in (output, errors):  # some wrappers print the number on standard error
        for form in _SUBMITTED:
            named = {(match["id"], match["cluster"] or None) for match in form.finditer(COLOUR.sub("", text))}
            if len(named) == 1:
                return named.pop()
            if named:  # several numbers: none of them can be trusted
                break
    raise NumberUnknown(f"sbatch accepted the script but printed no job number: {_words(output + errors)!r}")


def cancel(jobs: Iterable[SlurmJob]) -> None:
    """Cancel jobs; one that has ended is left as it is. Raises as :func:`call`."""
    numbers: dict[str | None, list[str]] = {}  # by cluster, since two clusters may use the same number
    for job in jobs:
        numbers.setdefault(job.cluster, []).append(checked(job.job_id))
    for cluster, ids in numbers.items():
        call("scancel", *_on(cluster), *ids)


def requeue(job: SlurmJob) -> None:
    """Restart a running or finished job; raises as :func:`call`."""
    call("scontrol", *_on(job.cluster), "requeue", checked(job.job_id))


def checked(job_id: str) -> str:
    """Return a job's number; SlurmError for anything else, which may not reach a command as an argument."""
    if not is_number(job_id):
        raise SlurmError(f"job: got {job_id[:80]!r}; valid: a number such as 123, or 123_4 for a task of an array")
    return job_id


def is_number(job_id: str) -> bool:
    """Whether a text is a job's number, or that of a task of an array."""
    return bool(_JOB_ID.fullmatch(job_id))


def _on(cluster: str | None) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OPTIONS)}
    return {**kept, "SLURM_BITSTR_LEN": "0"}  # else squeue truncates the waiting tasks of a long array: 0-5,7,…


def _words(text: str) -> str:
    """What a command printed, on one line, without the program's name on each."""
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in COLOUR.sub("", text).splitlines())
    return "; ".join(_line(line) for line in lines if line)[:500]


def _line(text: str) -> str:
    """Another program's text as one printable line."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:500]).split())


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One job, or one task of an array."""

    job_id: str  # as commands take it: `12`, or `12_3` for a task
    raw_id: str  # its own number; a waiting task shares that of its array
    state: str  # Slurm's word, such as `RUNNING`; `COMPLETING` and `REQUEUED` take precedence over other flags
    reason: str | None = None  # Slurm's words for why it waits or failed
    exit_code: int | None = None  # of the batch script; negative for a signal; meaningless before the end
    restarts: int = 0  # how often it was requeued
    comment: str = ""  # that it was submitted with
    cluster: str | None = None  # its name where it is not the default cluster of the commands


def queue(cluster: str | None = None) -> list[SlurmJob]:
    """All jobs that the controller of a cluster remembers, including those that ended in the last few minutes.

    Raises:
        SlurmMissing, SlurmError: if it cannot be asked.
    """
    try:
        jobs = parse_squeue(call("squeue", *_on(cluster), "--json", "--states=all"))
    except SlurmError as error:
        # Older than 21.08, or built without a JSON library: squeue names the option or the missing plugin.
        if "json" not in str(error).lower() and "unrecognized option" not in str(error):
            raise
        jobs = parse_scontrol(call("scontrol", *_on(cluster), "show", "job", "-o"))
    return [replace(job, cluster=cluster) for job in jobs]


def ended_by_accounting(job_ids: Iterable[str], cluster: str | None = None) -> dict[str, SlurmJob]:
    """Jobs that ended, from accounting; empty where there is no accounting.

    Whole arrays are asked for, since tasks that never started share one row.
    """
    return _ended([*_on(cluster), "-X"], ACCOUNTING_COLUMNS, {job_id.partition("_")[0] for job_id in job_ids})


def ended_by_completion_log(raw_ids: Iterable[str]) -> dict[str, SlurmJob]:
    """Jobs that ended, by their own number, from the job completion log; empty where there is no such log.

    That log does not know arrays: asked for ``12_3``, it answers with any task. A requeued job is there several times;
    the last entry is its end.
    """
    return _ended(["-c"], COMPLETION_COLUMNS, set(raw_ids))


def _ended(source: Sequence[str], columns: str, job_ids: Set[str]) -> dict[str, SlurmJob]:
    # Whatever an old record holds, only numbers reach the command line.
    numbers = ",".join(sorted(filter(is_number, job_ids)))
    if not numbers:
        return {}
    try:
        table = call("sacct", *source, "-P", "-n", f"--format={columns}", "-j", numbers)
    except (SlurmError, SlurmMissing):
        return {}
    return {job.job_id: job for job in parse_sacct(table)}


def parse_squeue(text: str) -> Iterator[SlurmJob]:
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
        # All are read before the first is yielded, so that another program's answer is refused as a whole.
        jobs = [list(_of_record(record)) for record in records]
        if records and not any(jobs):
            raise ValueError("none of the jobs has a number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SlurmError(f"squeue --json: not what Slurm 22.05 to 25.11 print ({error!r}): {text[:200]!r}") from error
    yield from (job for of_record in jobs for job in of_record)


def parse_scontrol(text: str) -> Iterator[SlurmJob]:
    """Jobs of ``scontrol show job -o``, one a line."""
    for line in text.splitlines():
        parts = _FIELD.split(line)
        fields: dict[str, str] = {}
        for name, value in zip(parts[1::2], parts[2::2], strict=True):
            # Values are not quoted, and a comment may hold "JobState=COMPLETED". Comment= comes late: the first counts.
            fields.setdefault(name, value.rstrip())
        if "JobState" in fields:  # else "No jobs in the system"
            fields["Reason"] = fields.get("Reason", "").replace("_", " ")
            yield from _of_record({key: fields.get(name) for name, key in _SCONTROL_NAMES.items()})


def parse_sacct(text: str) -> Iterator[SlurmJob]:
    """Jobs of ``sacct -P -n`` with :data:`ACCOUNTING_COLUMNS` or :data:`COMPLETION_COLUMNS`.

    A row of tasks that never started, ``12_[5-9%4]``, yields each of them before the rows of single tasks: one may
    have started after all.
    """
    rows = [row for line in text.splitlines() if (row := _ENDED.fullmatch(line.strip()))]
    for row in sorted(rows, key=lambda row: "[" not in row["id"]):  # stable: a requeued job's last row is its end
        array, _, tasks = row["id"].partition("_")
        for job_id in _ids(row["id"], array, tasks):
            exit_code = _exit_code(row["exit"])
            yield SlurmJob(job_id=job_id, raw_id=row["raw"] or array, state=_word(row["state"]), exit_code=exit_code)


def _of_record(job: Any) -> Iterator[SlurmJob]:
    """The tasks of a record of squeue's JSON; none if it has no job number."""
    if not isinstance(job, dict) or (number := _whole_number(job.get("job_id"))) is None:
        return
    array, task = _whole_number(job.get("array_job_id")), _whole_number(job.get("array_task_id"))
    tasks = str(task) if task is not None else str(job.get("array_task_string") or "")
    for job_id in _ids(str(number), str(array) if array else None, tasks):
        yield SlurmJob(
            job_id=job_id,
            raw_id=str(number),
            state=_state(job.get("job_state")),
            reason=_shown(str(job.get("state_description") or job.get("state_reason") or "")),
            exit_code=_exit_code(job.get("exit_code")),
            restarts=_whole_number(job.get("restart_cnt")) or 0,
            comment=str(job.get("comment") or ""),
        )


def _state(given: Any) -> str:
    """Of a state and its flags, the one that says what is happening now."""
    words = [_word(str(word)) for word in (given if isinstance(given, list) else [given] if given else [])]
    # A cancelled job that still occupies its nodes is ["CANCELLED", "COMPLETING"].
    over = ("COMPLETING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT")
    return next((word for word in over if word in words), words[0] if words else "UNKNOWN")


def _word(state: str) -> str:
    """The first word of a state, such as ``CANCELLED by 1000``; whole where a narrow column cut it to ``CANCELL+``."""
    word = _line(state).partition(" ")[0] or "UNKNOWN"
    whole = [known for known in STATES if word.endswith("+") and known.startswith(word[:-1])]
    return whole[0] if len(whole) == 1 else word


def _whole_number(value: Any) -> int | None:
    """A whole number, not negative, in any of Slurm's forms; None for anything else."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    # By its text, since True is an int, too.
    return int(value) if re.fullmatch(r"\d{1,18}", str(value), re.ASCII) else None


def _exit_code(value: Any) -> int | None:
    """From ``3:0``, the raw status of ``wait`` (22.05), or an object of a return code and a signal; 9 as -9."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", value, re.ASCII)
        value = {"return_code": match[1], "signal": {"id": match[2]}} if match else None
    if not isinstance(value, dict) or "return_code" not in value:
        status = _whole_number(value)
        try:
            return None if status is None else os.waitstatus_to_exitcode(status & 0xFFFF)
        except ValueError:  # of a process that has only stopped
            return None
    signal = value.get("signal")
    number = _whole_number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, dict) else None
    return -number if number else _whole_number(value["return_code"])


def _ids(raw_id: str, array: str | None, tasks: str) -> Iterator[str]:
    """Ids of the tasks ``0-2,5%4`` of an array, or of the one job."""
    if not array or not tasks:
        yield raw_id
        return
    for part in tasks.strip("[]").partition("%")[0].split(","):  # %4: at most four tasks at a time
        if match := _TASKS.fullmatch(part):
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            yield from (f"{array}_{task}" for task in range(first, last + 1, step))


def _shown(word: str) -> str | None:
    return None if word in _HIDDEN else _line(word)


_WORDS = {
    State.SUBMITTED: "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
    State.RUNNING: "RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT",
    State.FAILED: "FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED LAUNCH_FAILED RECONFIG_FAIL",
    State.CANCELLED: "CANCELLED",
    State.COMPLETED: "COMPLETED",
}
# An unknown word is `unknown`, never completed; so is REVOKED: another cluster of a federation has the job.
STATES = {word: state for state, words in _WORDS.items() for word in words.split()}


def state_of(job: SlurmJob) -> State:
    """The run's state by Slurm's word. Slurm does not know whether all steps were trained.

    >>> state_of(SlurmJob(job_id="12", raw_id="12", state="NODE_FAIL"))
    <State.FAILED: 'failed'>
    """
    return STATES.get(job.state, State.UNKNOWN)


def words_of(job: SlurmJob) -> str:
    """Slurm's own words, such as ``Slurm: PENDING (Resources)``."""
    return f"Slurm: {job.state}" + (f" ({job.reason})" if job.reason else "")


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a run directory keeps about its submission."""

    comment: str  # of the whole array; no other submission has it
    task: int  # of the array, from 0
    raw_id: str | None = None  # the task's own number in Slurm, once it has one: the job completion log knows no other
    cluster: str | None = None  # that sbatch named, where it is not the only one

    def write(self, run: RunDir) -> None:
        """Replace a run's ticket."""
        write_json(run.path / TICKET_FILE, asdict(self))


def new_comment(study: str) -> str:
    """A comment that no other submission has."""
    return f"{PREFIX}{study}:{secrets.token_hex(6)}"  # random, because two clients may submit in the same second


def ticket_of(run: RunDir) -> Ticket | None:
    """A run's ticket; None if the run was never prepared for Slurm."""
    try:
        return _TICKET.validate_json((run.path / TICKET_FILE).read_bytes())
    except (OSError, ValueError):
        return None


_TICKET = TypeAdapter(Ticket)


def number_unknown(run: RunDir, got: str) -> str:
    """The message about a submitted run whose job number is unknown, with what to do."""
    study = run.name.partition("/")[0]
    return (
        f"its job number is unknown: {got}. moelab finds the job once the queue shows its comment, or once it starts. "
        f"Otherwise look for it (`squeue --me --name={study}`) and run `moelab submit FILE --cluster PROFILE --adopt "
        "NUMBER`. If Slurm has no such job, `moelab cancel` the run and submit it again"
    )


class Queue:
    """The jobs that Slurm knows, to be looked up by run."""

    def __init__(self, jobs: Iterable[SlurmJob]) -> None:
        in_order = sorted(jobs, key=lambda job: int(job.raw_id))  # of two with one key, the later job stays
        self._by_ticket = {(job.comment, int(job.job_id.partition("_")[2] or 0)): job for job in in_order}
        self._by_id = {(job.cluster, job.job_id): job for job in in_order}

    @classmethod
    def of(cls, runs: Iterable[RunDir]) -> Queue:
        """The queues of every cluster that runs were submitted to.

        Raises:
            SlurmMissing, SlurmError: if one cannot be asked.
        """
        named = sorted({ticket.cluster for run in runs if (ticket := ticket_of(run)) and ticket.cluster})
        return cls([*queue(), *(job for cluster in named for job in queue(cluster))])

    def job_of(self, run: RunDir) -> SlurmJob | None:
        """The job of a run: by its ticket, or by its number where Slurm shows another comment."""
        ticket = ticket_of(run)
        if ticket and (job := self._by_ticket.get((ticket.comment, ticket.task))):
            return job
        # Some sites' plugins replace the comment. A comment of moelab's, though, means that the number is another
        # submission's.
        by_id = self._by_id.get((ticket.cluster if ticket else None, run.status.job_id or ""))
        return by_id if by_id and not by_id.comment.startswith(PREFIX) else None

    def id_of(self, comment: str) -> tuple[str, str | None] | None:
        """Number and cluster of the array that was submitted with this comment."""
        known = next((job for job in self._by_id.values() if job.comment == comment), None)
        return (known.job_id.partition("_")[0], known.cluster) if known else None

    def jobs_of(self, job_id: str) -> list[SlurmJob]:
        """The job, the task, or all tasks of the array with this number."""
        return [job for (_, known), job in self._by_id.items() if job_id in (known, known.partition("_")[0])]
