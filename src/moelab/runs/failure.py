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
from dataclasses import dataclass, field, replace
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
    lost = re.compile(content["lost_peer"], re.I)
    return {"lines": lines, "exceptions": exceptions, "lost": lost, "signs": f"{content['signs']}|{_OWN_SIGNS}"}


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
    scans = [Scan(unbroken(text)) for text in texts]
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
        scans = [(file, Scan(tail(file, RANK_TAIL_BYTES), rank=rank)) for file in files]
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
        if isinstance(content, str):
            content = {"message": content}
        extra = content.get("extraInfo", {})
        time, called = float(extra.get("timestamp", math.inf)), str(extra.get("py_callstack", ""))
        message = str(content["message"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    # A traceback names the exception in full and has its frame; older versions of torch wrote the message alone.
    kind, _, words = message.partition("\n")[0].partition(": ")
    text = called if called.startswith(TRACEBACK) and (words or kind) in called else f"{TRACEBACK}:\n{message}"
    statements = list(Scan(text, is_exception=True).statements()) or [Statement(kind=kind_of(message), message=message)]
    yield from (replace(one, time=time, rank=rank if one.rank is None else one.rank) for one in statements)


# --- exceptions ---

_DOWNLOAD: Final = re.compile(
    r"https?://|(HTTPS?|ReadTimeout|Protocol|Client)\w*(Error|Pool)|"
    r"\b(requests|urllib3?|httpx|httpcore|aiohttp|huggingface_hub|botocore|boto3|s3fs|gcsfs|fsspec|wandb)\b",
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

_BEGINNING: Final = 48
_OWN_SIGNS: Final = (
    r'Traceback|atchdog|PG GUID|what\(\):|terminate called|Error: |File "|rank  |exitcode|Root Cause|Failures:|'
    r"traceback :|Unable to shutdown|Exception i|Training completed|terminated with|above exception|Starting job:"
)
_RANKS: Final = re.compile(r"^.{0,200}?((?:\[[A-Za-z_]+\d+\]: ?)+)")
_STAMPS: Final = re.compile(
    r"^(?:\s*\d{1,5}: |(?!slurmstepd)[\w.-]*-\d+: |"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :]|\d\d:\d\d:\d\d(?:[.,]\d+)? |"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?=kernel|\S+\[\d+\]: )|kernel: |"
    r"\[ *\d+\.\d+\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2}[^\]]{10,20}\] )+"
)
_NESTED: Final = re.compile(r"Original Traceback|\(RANK \d+\)")
_EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_LINK: Final = re.compile(r"^(The above exception was|During handling of the above|-- Process (\d+) terminated with)")
_OF_THREAD: Final = "Exception in thread"
_MUTED: Final = re.compile(f"Exception ignored|{_OF_THREAD}")
_LOG_LINE: Final = re.compile(
    r"^(\[?[WEIF]\d{3,4} |\[titan\]|\d{4}-\d\d-\d\d|[=*-]{8}|terminate called|wandb:|srun:|slurmstepd|"
    r"Fatal Python|Exception (?:ignored|in thread)|\S+:\d+:\d+ \[\d+\] )"
)
_STEP: Final = re.compile(r"step:\s*(\d+)\s+loss:")
_WATCHDOG: Final = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: Work\w*\((?:SeqNum=(?P<number>\d+), )?"
    r"OpType=(?P<operation>\w+).*?Timeout\(ms\)=(?P<limit>\d+)\)(?: ran for (?P<ms>\d+) milliseconds)?"
)
_GROUP: Final = re.compile(r"\[PG .*?GUID [^( \]]*(?:\(([^)]+)\))? Rank (\d+)\].*(?:by watchdog|thread terminated)")
_STUCK: Final = re.compile(r"(?:\[PG .*?Rank (\d+)\] )?ProcessGroupNCCL's watchdog got stuck for (\d+) ?seconds")
_WHAT: Final = re.compile(r"(?:what\(\):\s+|watchdog (?=thread terminated with exception: CUDA))(.*)")
_NCCL_PLACE: Final = re.compile(r"(\S+?):\d+:\d+ \[(\d+)\]")
_BLOCK_RANK: Final = re.compile(r"^(?:.{0,200}\s)?rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_BLOCK_CODE: Final = re.compile(r"^(?:.{0,200}\s)?exitcode\s*:\s*(-?\d+)(?: \(pid: (\d+)\))?")
_BLOCK_TRACE: Final = re.compile(r"^\s*traceback : (.*)")
_AGENT: Final = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_BY_TORCHRUN: Final = re.compile(r"Unable to shutdown process (\d+) via")
_SIGNAL_HINTS: Final = {
    "SIGKILL": " (often the system running out of memory)",
    "SIGBUS": " (often no space left in /dev/shm)",
    "SIGILL": " (an instruction that the processor does not have)",
}


@dataclass
class _Stream:
    """Lines with the same prefix: those of one rank, as far as the prefix tells."""

    rank: int | None
    has_own_prefix: bool = False
    inside: bool = False  # between a traceback's header and its exception
    muted_by: str = ""  # what a traceback that does not end the process begins with
    link: str = ""  # the next traceback is `chained` to the one before, or `nested` in its message
    text: list[str] = field(default_factory=list)  # of the exception that was raised last
    at: int = 0  # the line on which it began
    frame: str = ""  # that raised, and its source line
    places: str = ""
    chain: list[tuple[int, Statement]] = field(default_factory=list)  # exceptions so far, each with its line
    chains: list[list[tuple[int, Statement]]] = field(default_factory=list)
    before: str = ""
    fatal: Statement | None = None  # what ended the interpreter, until a frame of the thread that did is read

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to what was said before."""
        return bool(self.inside or self.text or self.link)


class Scan:
    """The statements in one text, which several ranks may have written.

    ``rank`` wrote it, where no line says otherwise; ``is_exception``: it is one and nothing else, as in error.json.
    """

    def __init__(self, text: str, *, rank: int | None = None, is_exception: bool = False) -> None:
        self.rank, self._is_exception = rank, is_exception
        self.roots: set[int] = set()
        self.places: list[tuple[int, int]] = []
        self._found: dict[Statement, int] = {}  # and the line on which it was made last
        self._streams: dict[str, _Stream] = {}
        self._open: set[str] = set()  # of them, those whose next line may belong to what they said before
        self._groups: dict[int | None, str] = {}
        self._steps: dict[int, int] = {}  # the line on which a step was logged last
        self._completed, self._launches = -1, list[int]()
        self._ended_by_torchrun: set[str] = set()
        self._agents: list[re.Match[str]] = []  # what torchrun says before its summary
        self._block: int | None = None  # the rank whose entry of torchrun's summary is read
        self._is_root, self._in_trace = False, False
        self._said: set[str] = set()  # how lines begin that a kernel prints from each of its threads, 100,000 times
        self._line = 0
        is_worth = re.compile(_table()["signs"]).search
        for raw in text.splitlines():
            self._line += 1
            if "step:" in raw and (step := _STEP.search(COLOUR.sub("", raw))):
                self._steps[int(step[1])] = self._line
            elif raw[:_BEGINNING] not in self._said and (self._open or self._in_trace or is_worth(raw)):
                self._take(raw)
        for stream in self._streams.values():
            self._close(stream)
            self._end_chain(stream)
        for match in self._agents if not self.places else ():  # with local ranks: only if there is nothing better
            self._exit(int(match[2]), int(match[1]), match[3])

    @property
    def own_ranks(self) -> set[int]:
        """Ranks in PyTorch's own prefixes."""
        own = (stream.rank for key, stream in self._streams.items() if key and stream.has_own_prefix)
        return {rank for rank in own if rank is not None}

    @property
    def is_completed(self) -> bool:
        """Whether the last launch trained to its end."""
        return self._completed > max(self._steps.values(), default=0)

    def statements(self) -> Iterator[Statement]:
        """Those that the job did not get over, in the order in which they were made."""
        placed = [(line, one) for one, line in self._found.items()]
        placed += [one for stream in self._streams.values() for one in _last_chains(stream)]
        last_lines = sorted(self._steps.values())
        over_at = math.inf
        for line, statement in sorted(placed, key=lambda one: one[0]):
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

    def _take(self, raw: str) -> None:
        line = COLOUR.sub("", raw[:LINE_LENGTH])
        key, rank, is_own = "", self.rank, self._is_exception
        if match := _RANKS.match(line):
            key, line = match[1].rstrip(), line[match.end() :]
            rank = int(re.findall(r"\d+", key)[-1])
            is_own = match[1].endswith(" ")  # PyTorch's own prefix, which every line of a message has
        elif stamp := _STAMPS.match(line):
            line = line[stamp.end() :]
            key = "".join(re.findall(r"^ *\d+: |[\w.-]*-\d+: ", stamp[0]))
        stream = self._streams.setdefault(key, _Stream(rank=rank))
        if self._summary(line):
            return
        if TRACEBACK in line:
            stream.has_own_prefix = is_own
        if not self._exception(stream, line):
            if self._one_line(stream, line):
                self._said.add(raw[:_BEGINNING])
            if line.strip():
                stream.before = line
        (self._open.add if stream.is_open else self._open.discard)(key)

    # Python's exceptions

    def _exception(self, stream: _Stream, line: str) -> bool:
        """Whether the line belongs to a traceback or to the message of its exception."""
        if TRACEBACK in line:
            self._begin(stream, line)
        elif link := _LINK.match(line):
            self._close(stream)
            stream.link = "nested" if link[2] else "chained"
            stream.rank = int(link[2]) if link[2] else stream.rank
        elif stream.inside:
            if frame := _FRAME.match(line):
                stream.frame = _where(frame)
                stream.places += f" {frame[1]}"
            elif not line.strip() or line[0].isspace():
                if stream.frame.endswith(" ") and line.strip(" ^~"):
                    stream.frame = f"{stream.frame[:-1]}: {line.strip()}"
            elif _EXCEPTION.match(line) and not _LOG_LINE.match(line):  # else another rank's line came between
                stream.inside, stream.text, stream.at = False, [line], self._line
        elif stream.text:
            is_message = stream.has_own_prefix or _DETAIL.match(line) or _WANTS_DETAIL.search(stream.text[-1])
            is_other = _LOG_LINE.match(line) or (not line.strip() and not stream.has_own_prefix)
            if not is_message or is_other or len(stream.text) >= MESSAGE_LINES:
                self._close(stream)
                return False
            stream.text.append(line)
        else:
            return False
        return True

    def _begin(self, stream: _Stream, line: str) -> None:
        """A traceback's header: of another exception of a chain, of one in a message, or of the first."""
        message = "\n".join(stream.text).rstrip()
        if message and (message.endswith(":") or _NESTED.search(line)):
            stream.link = "nested"  # a worker's, or another rank's
        self._close(stream)
        if not stream.link:
            self._end_chain(stream)
        elif stream.link == "nested" and stream.chain:
            stream.chain.pop()  # what reports it says less
        stream.inside, stream.link, stream.places, stream.frame = True, "", "", ""
        # Python prints these two kinds for what does not end the process, the first at its very end.
        stream.muted_by = match[0] if (match := _MUTED.match(stream.before)) else ""
        if of_rank := re.search(r"\(RANK (\d+)\)", line):
            stream.rank = int(of_rank[1])
        stream.before = ""

    def _close(self, stream: _Stream) -> None:
        """Make a statement of the exception that was read last."""
        lines = [line.strip() for line in stream.text]
        if lines and stream.muted_by == _OF_THREAD:  # it explains an end that nobody else does
            self._add(stream, Kind.ENDED, " ".join(lines), is_end=False)
        elif lines and not stream.muted_by and "ChildFailedError" not in lines[0]:
            kept = [line for line in lines if line and not _BOILERPLATE.match(line) and "Traceback (most" not in line]
            message = re.sub(r"NCCL error in: (?:\S*/)?(\S+), ", r"NCCL error in \1: ", " ".join(kept) or lines[0])
            if stream.frame and _WITHOUT_WORDS.match(message):
                message = f"{message.rstrip(': ')} ({stream.frame.rstrip()})"
            kind = kind_of(" ".join(lines), stream.places)
            stream.chain.append((stream.at, Statement(kind=kind, rank=stream.rank, message=message)))
        stream.text, stream.inside = [], False

    def _end_chain(self, stream: _Stream) -> None:
        if stream.chain:
            stream.chains.append(stream.chain)
            stream.chain = []

    # what is said on one line

    def _one_line(self, stream: _Stream, line: str) -> bool:
        """Whether a row of the table knows the line."""
        if "Training completed" in line:
            self._completed = self._line
        elif "Starting job:" in line:
            self._launches.append(self._line)
        # The ranks in these brackets are those of the group; the prefix of the line has the job's.
        if group := _GROUP.search(line):
            rank = int(group[2]) if stream.rank is None else stream.rank
            self._groups.setdefault(rank, group[1] or "undefined")
        if match := _WATCHDOG.search(line):
            number = f" (sequence number {match['number']})" if match["number"] else ""
            seconds = int(match["ms"] or match["limit"]) / 1000
            words = f"a collective timed out: {match['operation']}{number} after {seconds:.0f} s"
            self._add(stream, Kind.TIMED_OUT, words, else_rank=match["rank"])
        elif match := _STUCK.search(line):
            words = f"NCCL's watchdog got stuck for {match[2]} s in a CUDA or NCCL call"
            self._add(stream, Kind.ABORTED, words, else_rank=match[1])
        elif match := _WHAT.search(line):
            thrown = stream.before.partition("instance of ")[2].strip(" '")
            words = match[1].partition("terminated with exception: ")[2] or match[1]
            self._end_chain(stream)
            stream.text, stream.at = [f"{thrown}: {words}" if thrown else words], self._line
            stream.frame, stream.muted_by, stream.places = "", "", ""
        elif stream.fatal and (frame := _FRAME.match(line)) and stream.before.startswith("Current thread"):
            message = f"{stream.fatal.message} ({_where(frame).rstrip()})"
            self._found[replace(stream.fatal, message=message)] = self._found.pop(stream.fatal)
            stream.fatal = None
        elif match := _BY_TORCHRUN.search(line):
            self._ended_by_torchrun.add(match[1])
        elif match := _AGENT.search(line):
            self._agents.append(match)
        else:
            return self._by_table(stream, line)
        return False

    def _by_table(self, stream: _Stream, line: str) -> bool:
        for row in _table()["lines"]:
            if not (match := row.pattern.search(line)):
                continue
            kind, message = row.kind, " ".join(match.expand(row.says).split())
            if message.startswith("Xid") and int(re.findall(r"\): (\d+)", message)[0]) in APPLICATION_XIDS:
                kind = Kind.TRAPPED
            if message.startswith("NCCL: ") and (place := _NCCL_PLACE.search(line)):
                message += f" (host {place[1]}, GPU {place[2]})"
            # A link that breaks before anybody times out is what they wait for; later it is a process that gave up. In
            # the text of one rank nothing tells which.
            if kind is Kind.ABORTED and "NET/" in message and self.rank is None:
                kind = kind if any(one.kind is Kind.TIMED_OUT for one in self._found) else Kind.WAITED
            one = self._add(stream, kind, message, is_end=row.ends)
            stream.fatal = one if line.startswith("Fatal Python error") else stream.fatal
            return True
        return False

    def _add(
        self, stream: _Stream, kind: Kind, message: str, *, else_rank: str | None = None, is_end: bool = True
    ) -> Statement:
        rank = int(else_rank) if stream.rank is None and else_rank else stream.rank
        # What Slurm and the kernel say about a node may stand in a rank's text, and is of no rank.
        is_of_rank = kind not in (Kind.OUTSIDE, Kind.STOPPED)
        one = Statement(kind=kind, message=message, rank=rank if is_of_rank else None, is_end=is_end)
        self._found[one] = self._line
        return one

    # torchrun's summary

    def _summary(self, line: str) -> bool:
        """Whether the line belongs to torchrun's list of failures, with two spaces before all of it."""
        if self._in_trace and line.startswith("  ") and not _BLOCK_RANK.match(line):
            self._summarised(line[2:])
            return True
        self._in_trace = False
        if "Root Cause (first observed failure)" in line:
            self._is_root = True
        elif line.startswith("Failures:"):
            self._is_root = False
        elif match := _BLOCK_RANK.match(line):
            self._block = int(match[1])
            self.places.append((int(match[1]), int(match[2])))
            if self._is_root:
                self.roots.add(int(match[1]))
        elif self._block is not None and (match := _BLOCK_CODE.match(line)):
            self._exit(self._block, int(match[1]), match[2] or "")
        elif self._block is not None and (match := _BLOCK_TRACE.match(line)):
            self._in_trace = TRACEBACK in match[1]
            if self._in_trace:
                self._summarised(match[1])
        else:
            return False
        return True

    def _summarised(self, line: str) -> None:
        """A line of the traceback of the rank whose entry this is."""
        key = f"summary of rank {self._block}"
        self._exception(self._streams.setdefault(key, _Stream(rank=self._block, has_own_prefix=True)), line)

    def _exit(self, rank: int, code: int, process: str) -> None:
        """A rank that ended by a signal or with a code; a shell in between makes 128 + n of a signal n."""
        number = -code if code < 0 else code - 128 if 128 < code <= 128 + signal.SIGRTMAX else 0
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number in (0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) or process in self._ended_by_torchrun:
            words = f"killed by {name}" if number else f"ended with exit code {code}"
            statement = Statement(kind=Kind.ENDED, rank=rank, message=words, has_words=False)
        elif number == signal.SIGABRT:  # of a communication library that lost a peer, more often than not
            statement = Statement(kind=Kind.ABORTED, rank=rank, message=f"killed by {name}", has_words=False)
        else:
            kind = Kind.OUTSIDE if number == signal.SIGKILL else Kind.FAULT
            statement = Statement(kind=kind, rank=rank, message=f"killed by {name}{_SIGNAL_HINTS.get(name, '')}")
        self._found[statement] = self._line


def _last_chains(stream: _Stream) -> Iterator[tuple[int, Statement]]:
    """Of a rank's tracebacks the last, and of the text of an unknown number of ranks all.

    What a rank raised long before its end it got over; another exception may be raised on the way out of one.
    """
    for chain in stream.chains:
        if stream.rank is None or stream.chains[-1][-1][0] - chain[-1][0] < CHAIN_LINES:
            yield _one_of_chain(chain)


def _where(frame: re.Match[str]) -> str:
    """A frame in short; its source line follows the blank at the end."""
    parts = Path(frame[1]).parts
    below = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    short = "/".join(parts[below[-1] + 1 :] if below else parts[-2:])
    return f"{short}:{frame[2]}{f' in {frame[3]}' if frame[3] else ''} "
