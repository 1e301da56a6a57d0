"""Why a run failed, on one line, from everything that its job left.

A dying job says a great deal: every rank raises something, torchrun reports all of them, Slurm adds its own view, and
most of it is about somebody else's death. So each text is searched for *statements*, and a statement has a *kind*. The
kinds (:class:`Kind`) are in the order in which one explains the next: a node that failed explains an exception, an
exception explains a time-out elsewhere, a time-out explains a lost connection, and that explains the signal by which
torchrun ended the others. The cause is the first statement of the first kind that anybody made. Among equals come the
rank that torchrun saw fail first (its *root cause*), then the earlier one.

Texts are each rank's ``error.json``, ``stderr.log`` and ``stdout.log`` of the last attempt (kernels print to standard
output), the combined log with torchrun's and Slurm's words, ``dmesg``, and PyTorch's flight recorder. Exceptions are
read as Python prints them, with their chain: *the last, caused by the first*. Other lines mean what
``data/causes.yaml`` says. What a job got over is no cause: statements that three further steps follow, or the end of
training, do not count.
"""

from __future__ import annotations

import functools
import math
import re
import signal
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from moelab import data
from moelab.files import read_json
from moelab.machine import APPLICATION_XIDS, COLOUR
from moelab.runs.flight_recorder import not_entered
from moelab.runs.log_text import tail, unbroken

MESSAGE_LENGTH: Final = 280
"""Characters of a message; with its rank in front it has less than 300."""
RANK_TAIL_BYTES: Final = 1_000_000
SURVIVED_STEPS: Final = 3
"""Logged after a statement, they show that the job went on: the ranks of a step wait for each other."""
MESSAGE_LINES: Final = 40
LINE_LENGTH: Final = 4000
CHAIN_LINES: Final = 400
"""A rank's earlier exception belongs to its last one if it is no further above."""
TRACEBACK: Final = "Traceback (most recent call last)"
GROUPS: Final = {"ep": "expert-parallel", "tp": "tensor-parallel", "pp": "pipeline", "cp": "context-parallel",
                 "fsdp": "FSDP", "efsdp": "expert-FSDP", "dp_shard": "FSDP", "dp_replicate": "replica",
                 "batch": "data-parallel", "loss_mesh": "loss", "default_pg": "default"}  # fmt: skip
"""Axes of TorchTitan's meshes (``distributed/parallel_dims.py``), by which PyTorch calls their groups."""


class Kind(IntEnum):
    """What a statement says; a lower one explains a higher one."""

    OUTSIDE = 0  # the node, its memory or its GPU failed: the rank could not say anything
    FAULT = 1  # a rank's own exception, crash or assertion
    STOPPED = 2  # Slurm ended the job: out of time, preempted
    WAITED = 3  # what a time-out waited for, by a communication kernel or a flight recorder
    TRAPPED = 4  # the CUDA error that is left by a kernel that stopped itself
    TIMED_OUT = 5  # a collective operation
    ABORTED = 6  # a communication library gave up, or words that only say that something else failed
    LOST_PEER = 7  # another rank's death, seen from here
    ENDED = 8  # by SIGTERM, or with an exit code alone


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What somebody said about the end of a run."""

    kind: Kind
    message: str  # on one line
    rank: int | None = None  # of whom; None if that is not known
    time: float = math.inf  # in whole seconds since the Unix epoch; infinite if not known
    has_words: bool = True  # whether it says more than that the rank ended
    is_end: bool = True  # whether it shows that the job ended; a warning only explains why

    def __str__(self) -> str:
        """With the rank in front."""
        return self.message if self.rank is None else f"rank {self.rank}: {self.message}"


class _Row(NamedTuple):
    """A line that says it all."""

    kind: Kind
    pattern: re.Pattern[str]
    says: str
    ends: bool


@functools.cache
def _table() -> dict[str, Any]:
    content = yaml.safe_load((resources.files(data) / "causes.yaml").read_text())
    lines = [
        _Row(Kind[row["kind"]], re.compile(row["pattern"]), row.get("says", r"\1"), row.get("ends", True))
        for row in content["lines"]
    ]
    exceptions = [(Kind[row["kind"]], re.compile(row["pattern"], re.I)) for row in content["exceptions"]]
    lost, signs = re.compile(content["lost_peer"], re.I), re.compile(f"{content['signs']}|{_OWN_SIGNS}")
    return {"lines": lines, "exceptions": exceptions, "lost": lost, "signs": signs}


def cause(logs: Path | None, *texts: str, ranks_per_node: int = 0, traces: Path | None = None) -> Statement | None:
    """The cause of a failed run, such as ``rank 1: RuntimeError: Loss is not finite (…)``.

    Args:
        logs: the folder given to torchrun as ``--log-dir``; of several nodes, the one that holds ``node0`` and so on.
        texts: the end of each log that more than one rank, or none, wrote: torchrun's, Slurm's, the kernel's.
        ranks_per_node: of a run on several nodes; 0: as torchrun's summary shows it.
        traces: folder of flight-recorder dumps; ``logs`` by default.

    Returns:
        None if nothing shows that the run failed.
    """
    scans = [_Scan(unbroken(text)) for text in texts]
    of_texts = [list(scan.statements()) for scan in scans]
    done = [text for text, scan, made in zip(texts, scans, of_texts, strict=True) if scan.is_completed and not made]
    if done:  # what another text tells of came before, or was of others, unless it is of a later launch
        ends = max(_TITAN_STAMP.findall(text)[-1:] for text in done)
        begins = [_TITAN_STAMP.findall(text)[:1] for text in texts]
        of_texts = [made for begin, made in zip(begins, of_texts, strict=True) if ends and begin > ends]
        if not any(of_texts):
            return None
    statements = [statement for made in of_texts for statement in made]
    if logs is not None:
        statements += _of_ranks(logs, ranks_per_node, [place for scan in scans for place in scan.places])
    if not any(statement.is_end for statement in statements):
        return None
    dumps = traces or logs
    if dumps and any(one.kind in (Kind.TIMED_OUT, Kind.ABORTED, Kind.LOST_PEER) for one in statements):
        waited = not_entered(dumps)
        statements += [Statement(kind=Kind.WAITED, rank=rank, message=words) for rank, words in waited]
    roots = {root for scan in scans for root in scan.roots}
    # `sorted` is stable: what is equal so far stays in the order in which it was written.
    ranked = sorted(statements, key=lambda one: (one.kind, not one.has_words, one.rank not in roots, one.time))
    first = ranked[0]
    if first.message.startswith("killed by SIG"):  # the kernel or the rank may have said why
        about = (one for one in ranked if one.kind is first.kind and one.rank in (None, first.rank))
        if words := next((one.message for one in about if not one.message.startswith("killed by SIG")), ""):
            first = replace(first, message=f"{first.message.partition(' (')[0]}: {words}")
    line = " ".join(first.message.split())
    return replace(first, message=line if len(line) <= MESSAGE_LENGTH else f"{line[: MESSAGE_LENGTH - 1].rstrip()}…")


# --- what each rank left ---

_TITAN_STAMP: Final = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_PLACE: Final = re.compile(r"(?:node(\d+)/)?(?:[^/]+/)?attempt_(\d+)/(\d+)$")


def rank_folders(logs: Path) -> list[Path]:
    """Torchrun's folders of single ranks at or below a path, of the last attempt of each launch."""
    folders = [folder for folder in logs.glob("**/attempt_*/[0-9]*") if _PLACE.search(folder.as_posix())]
    last: dict[Path, int] = {}
    for folder in folders:
        number = int(folder.parent.name.removeprefix("attempt_"))
        last[folder.parents[1]] = max(number, last.get(folder.parents[1], 0))
    current = [folder for folder in folders if folder.parent.name == f"attempt_{last[folder.parents[1]]}"]
    return sorted(current, key=lambda folder: (folder.parent, int(folder.name)))


def _of_ranks(logs: Path, ranks_per_node: int, places: Sequence[tuple[int, int]]) -> Iterator[Statement]:
    """What each rank left, by the global and local ranks in ``places``, as torchrun reported them."""
    folders = rank_folders(logs)
    offsets = {rank - local for rank, local in places}
    # Global and local ranks differ by whole nodes.
    per_node = ranks_per_node or math.gcd(*offsets) or max((int(folder.name) + 1 for folder in folders), default=0)
    for folder in folders:
        match = _PLACE.search(folder.as_posix())
        node = int(match[1]) if match and match[1] else None
        first = node * per_node if node is not None else min(offsets) if len(offsets) == 1 else 0
        rank = first + int(folder.name)
        # Exceptions first: among equals, what was read first is the cause.
        files = [file for name in ("stderr.log", "stdout.log") if (file := folder / name).is_file()]
        scans = [(file, _Scan(tail(file, RANK_TAIL_BYTES), rank=rank)) for file in files]
        own = {number for _, scan in scans for number in scan.own_ranks}
        rank = own.pop() if len(own) == 1 else rank  # by PyTorch, which knows best where folders do not tell
        yield from _recorded(folder / "error.json", rank)
        for file, scan in scans:
            written = float(int(file.stat().st_mtime))  # in whole seconds, as those in error.json
            for one in scan.statements():
                yield replace(one, time=written, rank=None if one.rank is None else rank)


def _recorded(file: Path, rank: int) -> Iterator[Statement]:
    """What ``torch.distributed.elastic``'s ``@record`` wrote; nothing where that is missing or torn."""
    try:
        content = read_json(file)["message"]
        if isinstance(content, str):  # of older versions of torch
            content = {"message": content}
        extra = content.get("extraInfo", {})
        time, called = float(extra.get("timestamp", math.inf)), str(extra.get("py_callstack", ""))
        message = str(content["message"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    # A traceback names the exception in full and has its frame.
    kind, _, words = message.partition("\n")[0].partition(": ")
    text = called if called.startswith(TRACEBACK) and (words or kind) in called else f"{TRACEBACK}:\n{message}"
    scan = _Scan(text, rank=rank, is_exception=True)
    for one in list(scan.statements()) or [Statement(kind=kind_of(message), message=message, rank=rank)]:
        yield replace(one, time=time)


# --- exceptions ---

_DOWNLOAD: Final = re.compile(
    r"https?://|(HTTPS?|ReadTimeout|Protocol|Client)\w*(Error|Pool)|"
    r"\b(requests|urllib3?|httpx|httpcore|aiohttp|huggingface_hub|fsspec|wandb)\b",
)
_OF_PEERS: Final = re.compile(r"(RuntimeError|Dist\w*Error|Rendezvous\w+|BrokenPipeError|EOFError)$")
"""What c10d, gloo, torchrun and the pipe to a worker raise when the other end dies."""
_OF_SOCKETS: Final = re.compile(r"Connection(Reset|Refused|Aborted)Error$")
"""Of Python's own sockets, so of a service rather than of a rank."""
_BOILERPLATE: Final = re.compile(
    r"^(CUDA kernel errors might|For debugging consider|Compile with `TORCH_USE_CUDA_DSA|Search for `cudaError|"
    r"Device-side assertion tracking|Set TORCHDYNAMO_VERBOSE|You can suppress this|Exception raised from|frame #|"
    r"nccl\w+(Error|Usage): |The above operation failed|This error may appear if|C\+\+ CapturedTraceback)"
)
_DETAIL: Final = re.compile(
    r"^(\s+\S|Last error|nccl\w+:|(\w+\.)*\w*(Error|Exception)\b|target:|ptxas|Cuda failure|NET/|Call to )"
)
_WANTS_DETAIL: Final = re.compile(r":\s*$|validation errors? for \w+$")
_WITHOUT_WORDS: Final = re.compile(
    r"^[\w.]+:?\s*$|^(\w+\.)*(KeyError|IndexError|StopIteration|NotImplementedError|ZeroDivisionError)\b"
)
_FRAME: Final = re.compile(r'^\s*File "(.+?)", line (\d+)(?:,? in (.+))?')
_NESTED: Final = re.compile(r"Original Traceback|\(RANK (\d+)\)")
_EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_LINK: Final = re.compile(r"^(The above exception was|During handling of the above)")
_LOG_LINE: Final = re.compile(
    r"^(\[?[WEIF]\d{3,4} |\[titan\]|\d{4}-\d\d-\d\d|[=*-]{8}|terminate called|wandb:|srun:|slurmstepd|"
    r"Fatal Python|Exception (?:ignored|in thread)|\S+:\d+:\d+ \[\d+\] )"
)


def kind_of(message: str, place: str = "") -> Kind:
    """The kind of an exception.

    Args:
        message: with its type in front.
        place: files that the traceback went through. Words alone do not make a lost peer: *connection reset by peer*
            is a download's fault where it was one.

    >>> kind_of("RuntimeError: Connection reset by peer").name
    'LOST_PEER'
    >>> kind_of("OSError: Connection reset by peer", place="site-packages/urllib3/response.py").name
    'FAULT'
    """
    for kind, words in _table()["exceptions"]:
        if words.search(message):
            return Kind(kind)
    if not _table()["lost"].search(message) or _DOWNLOAD.search(message) or _DOWNLOAD.search(place):
        return Kind.FAULT
    name = message.partition(": ")[0].rpartition(".")[2]
    if _OF_SOCKETS.match(name):
        return Kind.ABORTED
    return Kind.FAULT if name.isidentifier() and not _OF_PEERS.match(name) else Kind.LOST_PEER


class _Line(NamedTuple):
    number: int  # in the text
    text: str  # without its prefix
    is_own: bool  # whether the prefix is one that every line of a message has


class _Raised(NamedTuple):
    """An exception as Python, or C++ on its way out, printed it."""

    end: int  # index of the line behind it
    number: int  # of its own line in the text
    lines: list[str]  # of its message; none where the traceback was cut off
    frame: str  # that raised, and its source line
    places: str  # files of all frames


def _raised(lines: Sequence[_Line], header: int) -> _Raised:
    """The exception whose traceback has its header at an index."""
    is_own, frame, places = lines[header].is_own, "", ""
    for at in range(header + 1, len(lines)):
        line = lines[at].text
        if match := _FRAME.match(line):
            frame, places = _where(match), f"{places} {match[1]}"
        elif not line.strip() or line[0].isspace():
            if frame.endswith(" ") and line.strip(" ^~"):
                frame = f"{frame[:-1]}: {line.strip()}"
        elif TRACEBACK in line:
            return _Raised(at, lines[at].number, [], frame, places)
        elif _EXCEPTION.match(line) and not _LOG_LINE.match(line):  # else another rank's line came between
            message = _message(lines, at + 1, [line], is_own)
            return _Raised(at + len(message), lines[at].number, message, frame, places)
    return _Raised(len(lines), 0, [], frame, places)


def _message(lines: Sequence[_Line], at: int, message: list[str], is_own: bool) -> list[str]:
    """A message, from its first line, and what of the following lines belongs to it."""
    for line in (one.text for one in lines[at : at + MESSAGE_LINES]):
        is_more = is_own or _DETAIL.match(line) or _WANTS_DETAIL.search(message[-1])
        is_other = TRACEBACK in line or _LINK.match(line) or _LOG_LINE.match(line)
        if not is_more or is_other or not (line.strip() or is_own):
            break
        message = [*message, line]
    return message


def _said(raised: _Raised) -> str:
    """The message of an exception on one line, and where it has no words its frame."""
    stripped = [line.strip() for line in raised.lines]
    words = " ".join(line for line in stripped if line and not _BOILERPLATE.match(line)) or stripped[0]
    words = re.sub(r"NCCL error in: (?:\S*/)?(\S+), ", r"NCCL error in \1: ", words)
    if raised.frame and _WITHOUT_WORDS.match(words):
        words = f"{words.rstrip(': ')} ({raised.frame.rstrip()})"
    return words


def _where(frame: re.Match[str]) -> str:
    """A frame in short; its source line follows the blank at the end."""
    parts = Path(frame[1]).parts
    below = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    short = "/".join(parts[below[-1] + 1 :] if below else parts[-2:])
    return f"{short}:{frame[2]}{f' in {frame[3]}' if frame[3] else ''} "


def _one_of_chain(chain: list[tuple[int, Statement]]) -> tuple[int, Statement]:
    """What a chain of exceptions says: the last that is no consequence, and the first of those as its cause."""
    worst = min(one.kind for _, one in chain)
    (_, first), *_, (line, last) = [one for one in chain if one[1].kind is worst] * 2
    words = re.sub(r"^[\w.]+: (\[Errno \d+\] )?", "", first.message)
    if words in last.message:
        return line, last
    half = MESSAGE_LENGTH // 2
    message = f"{last.message if len(last.message) < half else f'{last.message[:half]}…'}, caused by {first.message}"
    return line, replace(last, message=message)


# --- the statements of a text ---

_RANKS: Final = re.compile(r"^.{0,200}?((?:\[[A-Za-z_]+\d+\]: ?)+)")
_STAMPS: Final = re.compile(
    r"^(?:\s*\d{1,5}: |\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :]|"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?=kernel)|kernel: |\[ *\d+\.\d+\] |"
    r"\[[A-Z][a-z]{2} [A-Z][a-z]{2}[^\]]{10,20}\] )+"
)
_STEP: Final = re.compile(r"step:\s*(\d+)\s+loss:")
_WATCHDOG: Final = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: Work\w*\((?:SeqNum=(?P<number>\d+), )?"
    r"OpType=(?P<operation>\w+).*?Timeout\(ms\)=(?P<limit>\d+)\)(?: ran for (?P<ms>\d+) milliseconds)?"
)
_GROUP: Final = re.compile(r"\[PG .*?GUID [^( \]]*(?:\(([^)]+)\))? Rank (\d+)\].*(?:by watchdog|thread terminated)")
_WHAT: Final = re.compile(r"(?:what\(\):\s+|watchdog (?=thread terminated with exception: CUDA))(.*)")
_NCCL_PLACE: Final = re.compile(r"(\S+?):\d+:\d+ \[(\d+)\]")
_BLOCK_RANK: Final = re.compile(r"^(?:.{0,200}\s)?rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_BLOCK_CODE: Final = re.compile(r"^(?:.{0,200}\s)?exitcode\s*:\s*(-?\d+)(?: \(pid: (\d+)\))?")
_AGENT: Final = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_BY_TORCHRUN: Final = re.compile(r"Unable to shutdown process (\d+) via")
_OWN_SIGNS: Final = "atchdog|PG GUID|exitcode|Unable to shutdown|Training completed|Starting job:"
_BEGINNING: Final = 48
_SIGNAL_HINTS: Final = {
    "SIGKILL": " (often the system running out of memory)",
    "SIGBUS": " (often no space left in /dev/shm)",
    "SIGILL": " (an instruction that the processor does not have)",
}


class _Scan:
    """The statements in one text, which several ranks may have written.

    ``rank`` wrote it, where no line says otherwise; ``is_exception``: it is one and nothing else, as in error.json.
    """

    def __init__(self, text: str, *, rank: int | None = None, is_exception: bool = False) -> None:
        self.rank = rank
        self.roots: set[int] = set()  # ranks that failed first, by torchrun
        self.places: list[tuple[int, int]] = []  # global and local rank of those in torchrun's summary
        self.own_ranks: set[int] = set()  # in PyTorch's own prefixes
        self._found: dict[Statement, int] = {}  # and the line on which it was made last
        self._groups: dict[int | None, str] = {}
        self._steps: dict[int, int] = {}  # the line on which a step was logged last
        self._completed, self._launches = -1, list[int]()
        self._ended_by_torchrun: set[str] = set()
        self._agents: list[re.Match[str]] = []  # what torchrun says before its summary
        streams: dict[str, tuple[int | None, list[_Line]]] = {}
        for number, raw in enumerate(text.splitlines(), start=1):
            if "step:" in raw and (step := _STEP.search(COLOUR.sub("", raw))):
                self._steps[int(step[1])] = number
                continue
            line, key, writer, is_own = COLOUR.sub("", raw[:LINE_LENGTH]), "", rank, is_exception
            if match := _RANKS.match(line):
                key, line = match[1].rstrip(), line[match.end() :]
                writer = int(re.findall(r"\d+", key)[-1])
                is_own = match[1].endswith(" ")  # PyTorch's own prefix, which every line of a message has
            elif stamp := _STAMPS.match(line):
                line = line[stamp.end() :]
                key = "".join(re.findall(r"^ *\d+: ", stamp[0]))
            streams.setdefault(key, (writer, []))[1].append(_Line(number, line, is_own))
            if key and is_own and TRACEBACK in line and writer is not None:
                self.own_ranks.add(writer)
        for writer, lines in streams.values():
            self._read(lines, writer)
        for match in self._agents if not self.places else ():  # with local ranks: only if there is nothing better
            self._exit(int(match[2]), int(match[1]), match[3], number)

    @property
    def is_completed(self) -> bool:
        """Whether the last launch trained to its end."""
        return self._completed > max(self._steps.values(), default=0)

    def statements(self) -> Iterator[Statement]:
        """Those that the job did not get over, in the order in which they were made."""
        last_lines = sorted(self._steps.values())
        over_at = math.inf
        for statement, line in sorted(self._found.items(), key=lambda one: one[1]):
            steps_after = len(last_lines) - bisect_right(last_lines, line)
            if steps_after < SURVIVED_STEPS and line > self._completed:
                over_at = line if statement.kind is Kind.STOPPED else over_at
                is_in_launch = not any(over_at < launch < line for launch in self._launches)
                is_interrupted = over_at < line and is_in_launch and statement.kind is Kind.FAULT  # by Slurm's signal
                one = replace(statement, kind=Kind.ENDED) if is_interrupted else statement
                yield self._with_global_rank(self._with_group(one))

    def _with_global_rank(self, statement: Statement) -> Statement:
        """As torchrun's summary numbers it, where a line has the local rank in torchrun's own prefix."""
        same = {reported for reported, local in self.places if local == statement.rank}
        if len(same) != 1 or statement.rank in {rank for rank, _ in self.places} | self.own_ranks:
            return statement
        return replace(statement, rank=same.pop())

    def _with_group(self, statement: Statement) -> Statement:
        """A time-out with the group that it was in, which other lines name."""
        name = self._groups.get(statement.rank, "undefined").removeprefix("mesh_")  # as PyTorch calls those of a mesh
        if statement.kind is not Kind.TIMED_OUT or name == "undefined":
            return statement
        group = f"the {GROUPS[name]} group ({name})" if name in GROUPS else f"group {name}"
        return replace(statement, message=statement.message.replace(" after ", f" of {group} after ", 1))

    def _read(self, lines: Sequence[_Line], rank: int | None) -> None:
        """Make the statements of the lines with one prefix."""
        chains: list[list[tuple[int, Statement]]] = []
        seen: set[str] = set()  # how lines begin that a kernel prints from each of its threads, 100,000 times
        at, before, is_linked, block, is_root = 0, "", False, -1, False
        while at < len(lines):
            number, line, _ = lines[at]
            at += 1
            if match := _BLOCK_RANK.match(line):
                block = int(match[1])
                self.places.append((block, int(match[2])))
                self.roots |= {block} if is_root else set()
            elif "Root Cause (first observed failure)" in line:
                is_root = True
            elif block >= 0 and (match := _BLOCK_CODE.match(line)):
                self._exit(block, int(match[1]), match[2] or "", number)
            elif block >= 0 and "traceback : " in line and TRACEBACK in line:
                inner = [_Line(number, f"{TRACEBACK}:", True)]  # with two blanks before all of it
                while at < len(lines) and lines[at].text.startswith("  ") and not _BLOCK_RANK.match(lines[at].text):
                    inner.append(_Line(lines[at].number, lines[at].text[2:], True))
                    at += 1
                self._read(inner, block)
            elif TRACEBACK in line:
                if (of_rank := _NESTED.search(line)) and of_rank[1]:  # a checkpoint's, of another rank than writes it
                    rank = int(of_rank[1])
                    self.own_ranks = {rank}
                raised = _raised(lines, at - 1)
                at = raised.end
                following = lines[at].text if at < len(lines) else ""
                is_report = _NESTED.search(following) or " ".join(raised.lines).rstrip().endswith(":")
                if TRACEBACK in following and is_report:
                    continue  # a worker's, or another rank's: what reports it says less
                if raised.lines and before.startswith("Exception in thread"):  # explains an end that nobody else does
                    self._add(number, Kind.ENDED, _said(raised), rank, is_end=False)
                elif raised.lines and "Exception ignored" not in before and "ChildFailedError" not in raised.lines[0]:
                    kind = kind_of(" ".join(raised.lines), raised.places)
                    one = (raised.number, Statement(kind=kind, rank=rank, message=_said(raised)))
                    chains = [*chains[:-1], [*chains[-1], one]] if is_linked and chains else [*chains, [one]]
                links = [next_at for next_at in range(at, min(at + 3, len(lines))) if _LINK.match(lines[next_at].text)]
                is_linked, at = bool(links), links[0] + 1 if links else at
            elif (match := _WHAT.search(line)) and not _WATCHDOG.search(line):
                thrown = before.partition("instance of ")[2].strip(" '")
                words = match[1].partition("terminated with exception: ")[2] or match[1]
                message = _message(lines, at, [f"{thrown}: {words}" if thrown else words], is_own=False)
                at += len(message) - 1
                said = _said(_Raised(at, number, message, "", ""))
                chains.append([(number, Statement(kind=kind_of(" ".join(message)), rank=rank, message=said))])
            elif _table()["signs"].search(line) and line[:_BEGINNING] not in seen:
                if self._one_line(lines, at - 1, rank):
                    seen.add(line[:_BEGINNING])
            before = line if line.strip() else before
        for chain in chains:
            # What a rank raised long before its end it got over; another may be raised on the way out of one.
            if rank is None or chains[-1][-1][0] - chain[-1][0] < CHAIN_LINES:
                line_number, one_statement = _one_of_chain(chain)
                self._found[one_statement] = line_number

    def _one_line(self, lines: Sequence[_Line], at: int, rank: int | None) -> bool:
        """Whether a row of the table knows the line."""
        number, line, _ = lines[at]
        if "Training completed" in line:
            self._completed = number
        elif "Starting job:" in line:
            self._launches.append(number)
        # The ranks in these brackets are those of the group; the prefix of the line has the job's.
        if group := _GROUP.search(line):
            self._groups.setdefault(int(group[2]) if rank is None else rank, group[1] or "undefined")
        if match := _WATCHDOG.search(line):
            of_group = f" (sequence number {match['number']})" if match["number"] else ""
            seconds = int(match["ms"] or match["limit"]) / 1000
            words = f"a collective timed out: {match['operation']}{of_group} after {seconds:.0f} s"
            by_line = int(match["rank"]) if match["rank"] else None
            self._add(number, Kind.TIMED_OUT, words, by_line if rank is None else rank)
        elif match := _BY_TORCHRUN.search(line):
            self._ended_by_torchrun.add(match[1])
        elif match := _AGENT.search(line):
            self._agents.append(match)
        else:
            for row in _table()["lines"]:
                if match := row.pattern.search(line):
                    self._by_row(row, match, lines, at, rank)
                    return True
        return False

    def _by_row(self, row: _Row, match: re.Match[str], lines: Sequence[_Line], at: int, rank: int | None) -> None:
        kind, message = row.kind, " ".join(match.expand(row.says).split())
        number, line, _ = lines[at]
        if message.startswith("Xid") and int(re.findall(r"\): (\d+)", message)[0]) in APPLICATION_XIDS:
            kind = Kind.TRAPPED
        if message.startswith("NCCL: ") and (place := _NCCL_PLACE.search(line)):
            message += f" (host {place[1]}, GPU {place[2]})"
        # A link that breaks before anybody times out is what they wait for; later it is a process that gave up. In the
        # text of one rank nothing tells which.
        if kind is Kind.ABORTED and "NET/" in message and self.rank is None:
            kind = kind if any(one.kind is Kind.TIMED_OUT for one in self._found) else Kind.WAITED
        if line.startswith("Fatal Python error"):
            after = [one.text for one in lines[at : at + 200]]
            current = next((place for place, text in enumerate(after) if text.startswith("Current thread")), len(after))
            frame = next(filter(None, map(_FRAME.match, after[current:])), None)
            message += f" ({_where(frame).rstrip()})" if frame else ""
        self._add(number, kind, message, rank, is_end=row.ends)

    def _add(self, number: int, kind: Kind, message: str, rank: int | None, *, is_end: bool = True) -> None:
        # What Slurm and the kernel say about a node may stand in a rank's text, and is of no rank.
        is_of_rank = kind not in (Kind.OUTSIDE, Kind.STOPPED)
        self._found[Statement(kind=kind, message=message, rank=rank if is_of_rank else None, is_end=is_end)] = number

    def _exit(self, rank: int, code: int, process: str, number: int) -> None:
        """A rank that ended by a signal or with a code; a shell in between makes 128 + n of a signal n."""
        sign = -code if code < 0 else code - 128 if 128 < code <= 128 + signal.SIGRTMAX else 0
        name = signal.Signals(sign).name if sign in set(signal.Signals) else f"signal {sign}"
        if sign in (0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) or process in self._ended_by_torchrun:
            words = f"killed by {name}" if sign else f"ended with exit code {code}"
            statement = Statement(kind=Kind.ENDED, rank=rank, message=words, has_words=False)
        elif sign == signal.SIGABRT:  # of a communication library that lost a peer, more often than not
            statement = Statement(kind=Kind.ABORTED, rank=rank, message=f"killed by {name}", has_words=False)
        else:
            kind = Kind.OUTSIDE if sign == signal.SIGKILL else Kind.FAULT
            statement = Statement(kind=kind, rank=rank, message=f"killed by {name}{_SIGNAL_HINTS.get(name, '')}")
        self._found[statement] = number
