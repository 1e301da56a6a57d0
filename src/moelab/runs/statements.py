"""What the lines of a text say about the end of a run: exceptions, signals, time-outs, words of Slurm and the kernel.

A text is what one rank wrote, or a log in which many ranks, torchrun, Slurm and the kernel did. Its lines are told
apart by their prefixes (PyTorch's ``[rank3]: ``, torchrun's, ``srun --label``'s, time stamps, and whatever else stands
in front of both a traceback's header and the next line), so that the tracebacks of ranks that write at the same time
are not mixed. An exception is read with its chain: of its exceptions the last counts that is no consequence. All else
is a line that says it all, by a table.

A log has millions of lines and a few that matter; a line is looked at only if it has one of a few words.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from moelab.machine import APPLICATION_XIDS, COLOUR

SURVIVED_STEPS: Final = 3
"""Logged after a statement, they show that the job went on: the ranks of a step wait for each other."""
MESSAGE_LINES: Final = 40
LINE_LENGTH: Final = 4000
CHAIN_LINES: Final = 400
"""A rank's earlier exception belongs to its last one if it is no further above."""


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


# --- the words of exceptions ---

TRACEBACK: Final = "Traceback (most recent call last)"
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|socket timeout|socket closed|broken pipe|pair closure|"
    r"ncclRemoteError|remote process exited|socketProgress|socketPollConnect|socketStartConnect|bootstrap.*timed? ?out|"
    r"communicator (was|has been) aborted|client socket has timed out|wait(ing)? timeout after|"
    r"timed out (after \d+ seconds )?waiting for (clients|workers|key)|failed to recv, got 0 bytes|"
    r"Rendezvous(Connection|Timeout|Closed|GracefulExit)|store based barrier|EOFError|"
    r"NCCL Error 6|recvValue failed|sendBytes failed|recvBytes failed",
    re.I,
)
_DOWNLOAD = re.compile(
    r"https?://|(HTTPS?|ReadTimeout|Protocol|Client)\w*(Error|Pool)|"
    r"\b(requests|urllib3?|httpx|httpcore|aiohttp|huggingface_hub|botocore|boto3|s3fs|gcsfs|fsspec|wandb)\b",
)
_OF_PEERS = re.compile(r"(RuntimeError|Dist\w*Error|Rendezvous\w+|BrokenPipeError|EOFError)$")
"""What c10d, gloo, torchrun and the pipe to a worker raise when the other end dies."""
_OF_SOCKETS = re.compile(r"Connection(Reset|Refused|Aborted)Error$")
"""Of Python's own sockets, so of a service rather than of a rank."""
_WORDS_OF_KIND: Final = (
    (Kind.WAITED, re.compile(r"DeepEP error: timeout|HybridEP.*time(d )?-?out", re.I)),
    (Kind.TRAPPED, re.compile(r"unspecified launch failure|device-side assert triggered|an illegal instruction was")),
    (Kind.TIMED_OUT, re.compile(r"collective operation timeout|timed out waiting \d+ ?ms for (recv|send)", re.I)),
    (Kind.ENDED, re.compile(r"^\S*(SignalException|KeyboardInterrupt)\b|killed by signal: Terminated")),
    (Kind.ENDED, re.compile(r"See inner exception")),
    # These say that something failed, and another exception of their chain says what.
    (Kind.ABORTED, re.compile(r"Got completion .*(status=|with error)|\] failed to run (forward|backward):")),
    (Kind.ABORTED, re.compile(r"DataLoader worker \(pid.*exited unexpectedly|unexpected pos \d+ vs \d+")),
)
_BOILERPLATE = re.compile(
    r"^((CUDA|HIP) kernel errors might|For debugging consider|Compile with `TORCH_USE_(CUDA|HIP)_DSA|"
    r"Search for `cudaError|Device-side assertion tracking|Set TORCHDYNAMO_VERBOSE|You can suppress this|"
    r"Exception raised from|frame #|#\d+ .* from \S+:\d+$|"
    r"nccl\w+(Error|Usage): |The above operation failed|This error may appear if|C\+\+ CapturedTraceback)"
)
_DETAIL = re.compile(
    r"^(\s+\S|Last error|nccl\w+:|(\w+\.)*\w*(Error|Exception)\b|target:|ptxas|Cuda failure|NET/|Call to )"
)
_WANTS_DETAIL = re.compile(r":\s*$|validation errors? for \w+$")
_WITHOUT_WORDS = re.compile(
    r"^[\w.]+:?\s*$|^(\w+\.)*(KeyError|IndexError|StopIteration|NotImplementedError|ZeroDivisionError)\b"
)
_NCCL_PLACE = re.compile(r"NCCL error in: (?:\S*/)?(\S+), ")
_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)(?:,? in (.+))?')


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
    for kind, words in _WORDS_OF_KIND:
        if words.search(message):
            return kind
    if not _LOST_PEER.search(message) or _DOWNLOAD.search(message) or _DOWNLOAD.search(place):
        return Kind.FAULT
    name = message.partition(": ")[0].rpartition(".")[2]
    if _OF_SOCKETS.match(name):
        return Kind.ABORTED
    return Kind.FAULT if name.isidentifier() and not _OF_PEERS.match(name) else Kind.LOST_PEER


# --- the lines of a text ---

_BEGINNING: Final = 48
_RANKS = re.compile(r"^.{0,200}?((?:\[[A-Za-z_]+\d+\]: ?)+)")
_STAMPS = re.compile(
    r"^(?:\s*\d{1,5}: |\d{1,3}(?:\.\d{1,3}){3}: |(?!slurmstepd)[\w.-]*-\d+: |\([^()]*\bpid=\d+[^()]*\) |"
    r"(?:stdout|stderr) [FP] |"
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ :]|\d\d:\d\d:\d\d(?:[.,]\d+)? |"
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ (?=kernel|\S+\[\d+\]: )|kernel: |"
    r"\[ *\d+\.\d+\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2}[^\]]{10,20}\] )+"
)
_CLOCK = re.compile(r"\d+(?:[:./T-]\d+)+(?:,\d+)?|\d{10,}")  # differs from line to line, unlike a rank
_OF_RANK = re.compile(r"(?i)rank\W{0,2}(\d+)|\[\d+,(\d+)\]<std|\|(\d+)\]:")  # mpirun's, and torchrun's by template
_MESSAGES: Final = ("log", "line", "message", "msg", "textPayload")  # Docker's, Loki's, loggers' and Google's
_MARGIN = re.compile(r"^ *(?:[+|] ?)+(?=\S| )")  # of the exceptions in a group
_NESTED = re.compile(r"Original Traceback|\(RANK \d+\)")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(: |:?$)")
_LINK = re.compile(
    r"^(The above exception was|During handling of the above|-- Process (\d+) terminated with|\s*\+[-+ \d]{12,}$)"
)
_OF_THREAD: Final = "Exception in thread"
_MUTED = re.compile(f"Exception ignored|{_OF_THREAD}")
_LOG_LINE = re.compile(
    r"^(\[?[WEIF]\d{3,4} |\[titan\]|\d{4}-\d\d-\d\d|[=*-]{8}|terminate called|wandb:|srun:|slurmstepd|"
    r"Fatal Python|Exception (?:ignored|in thread)|\S+:\d+:\d+ \[\d+\] )"
)
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): ")
_STEP = re.compile(r"step:\s*(\d+)\s+loss:")
_WATCHDOG = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: Work\w*\((?:SeqNum=(?P<number>\d+), )?"
    r"OpType=(?P<operation>\w+).*?Timeout\(ms\)=(?P<limit>\d+)\)(?: ran for (?P<ms>\d+) milliseconds)?"
)
_GROUP = re.compile(r"\[PG .*?GUID [^( \]]*(?:\(([^)]+)\))? Rank (\d+)\].*(?:by watchdog|thread terminated)")
_STUCK = re.compile(r"(?:\[PG .*?Rank (\d+)\] )?ProcessGroupNCCL's watchdog got stuck for (\d+) ?seconds")
_WHAT = re.compile(r"(?:what\(\):\s+|watchdog (?=thread terminated with exception: CUDA))(.*)")
_FATAL = re.compile(r"^Fatal Python error: (.+)")
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_BLOCK_RANK = re.compile(r"^(?:.{0,200}\s)?rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_BLOCK_CODE = re.compile(r"^(?:.{0,200}\s)?exitcode\s*:\s*(-?\d+)(?: \(pid: (\d+)\))?")
_BLOCK_TRACE = re.compile(r"^\s*traceback : (.*)")
_AGENT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_BY_TORCHRUN = re.compile(r"Unable to shutdown process (\d+) via")
GROUPS: Final = {"ep": "expert-parallel", "tp": "tensor-parallel", "pp": "pipeline", "cp": "context-parallel",
                 "fsdp": "FSDP", "efsdp": "expert-FSDP", "dp_shard": "FSDP", "dp_replicate": "replica",
                 "batch": "data-parallel", "loss_mesh": "loss", "default_pg": "default"}  # fmt: skip
"""Axes of TorchTitan's meshes (``distributed/parallel_dims.py``), by which PyTorch calls their groups."""


class _Line(NamedTuple):
    """A line that says it all."""

    kind: Kind
    sign: str  # a word that all such lines have
    pattern: str
    message: str = r"\1"
    is_end: bool = True


_TRAINS: Final = r"(?:python|pt_|torch|train|cuda|NCCL|nccl|ray\b)"  # how processes and threads that train are named
_TIME_LIMIT: Final = "Slurm's time limit was reached"
_LINES: Final = (
    _Line(Kind.OUTSIDE, "Node failure on", r"srun: error: Node failure on (\S+)", r"node \1 failed"),
    _Line(Kind.OUTSIDE, "DUE TO NODE", r"DUE TO NODE (?:(\S+) )?FAILURE", r"node \1 failed"),
    _Line(Kind.OUTSIDE, "oom", r"(slurmstepd\S*: error: Detected \d+ oom.kill event.*?)(?:\. Some of|$)",
          r"out of memory: \1"),
    _Line(Kind.OUTSIDE, "xceeded", r"(slurmstepd\S*: error: .*xceeded (?:step|job) memory limit.*)",
          r"out of memory: \1"),
    _Line(Kind.OUTSIDE, "Out Of Memory", r"srun: error: (\S+): tasks? ([\d,-]+): Out Of Memory",
          r"out of memory: task \2 on \1"),
    # The kernel tells of the processes of others too.
    _Line(Kind.OUTSIDE, "ut of memory: Kill",
          rf"((?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process \d+ \({_TRAINS}.*?\)(?:.*?anon-rss:\w+)?)"),
    _Line(Kind.OUTSIDE, "oom-kill:", rf"(oom-kill:constraint=\w+).*(task={_TRAINS}[^,]*,pid=\d+)",
          r"out of memory: \1 \2"),
    _Line(Kind.OUTSIDE, "OOMKilled", "(OOMKilled)", r"out of memory: \1"),
    _Line(Kind.OUTSIDE, "HW Exception by GPU", "(HW Exception by GPU node.*)"),
    _Line(Kind.OUTSIDE, "uncorrectable hardware error",  # none of them is reported too
          r"(amdgpu \S+: .*\b[1-9]\d* (?:new )?uncorrectable hardware errors? .*)", is_end=False),
    _Line(Kind.OUTSIDE, "PBS: job killed", r"PBS: job killed: (v?mem .*)", r"out of memory: PBS: \1"),
    _Line(Kind.OUTSIDE, "TERM_MEMLIMIT", r"(TERM_MEMLIMIT: .*)", r"out of memory: \1"),
    _Line(Kind.STOPPED, "PBS: job killed", r"PBS: job killed: (walltime .*)", r"PBS's time limit was reached: \1"),
    _Line(Kind.STOPPED, "TERM_", r"(TERM_(?:RUNLIMIT|PREEMPT): .*)"),
    _Line(Kind.OUTSIDE, "NVRM: Xid", r"NVRM: (Xid \(.*?\): \d+, .*)", is_end=False),
    _Line(Kind.STOPPED, "DUE TO TIME LIMIT", "CANCELLED AT", _TIME_LIMIT),
    _Line(Kind.STOPPED, "DUE TO PREEMPTION", "CANCELLED AT", "preempted by another job of Slurm"),
    _Line(Kind.STOPPED, "DUE TO JOB REQUEUE", "CANCELLED AT", "requeued by Slurm"),
    _Line(Kind.ENDED, "CANCELLED AT", r"\*\*\* ((?:JOB|STEP) \S+) ON \S+ CANCELLED AT", r"\1 was cancelled"),
    _Line(Kind.FAULT, "srun: error",
          r"error: (\S+): tasks? ([\d,-]+): ((?:Segmentation fault|Bus error|Illegal).*)", r"task \2 on \1: \3"),
    _Line(Kind.ABORTED, "srun: error", r"error: (\S+): tasks? ([\d,-]+): ((?:Killed|Aborted).*)", r"task \2 on \1: \3"),
    _Line(Kind.ENDED, "srun: error", r"error: (\S+): tasks? ([\d,-]+): ((?:Terminated|Exited).*)",
          r"task \2 on \1: \3"),
    _Line(Kind.ABORTED, "noticed that process rank", r"(rank \d+) with PID \d+ (on node \S+ exited on signal .*)",
          r"\1 \2"),  # by mpirun
    _Line(Kind.ABORTED, " died from signal", r"(\S+: rank \d+ died from signal .*)"),  # by PALS' mpiexec
    _Line(Kind.FAULT, "srun: error", "(srun: error: (?:Task launch|Unable to|Timed out).*)"),
    _Line(Kind.FAULT, "pyxis: ", r"error: (pyxis:) {2,}+((?!\[INFO\]).*)", r"\1 \2",  # what enroot printed
          is_end=False),
    _Line(Kind.ABORTED, "pyxis: ", r"error: (pyxis: (?!child |printing |if the )\S.*)", is_end=False),
    _Line(Kind.FAULT, "FATAL:  ", r"^(FATAL: {2,}.*)"),  # Apptainer's
    _Line(Kind.FAULT, "Error response from daemon", "(Error response from daemon: (?!No such container).*)"),
    _Line(Kind.FAULT, "symbol lookup error", r"(\S+: symbol lookup error: .*)"),
    _Line(Kind.FAULT, "shared libraries: ", r"(\S+: error while loading shared libraries: .*)"),
    _Line(Kind.FAULT, "execve", "(slurmstepd: error: execve.*)"),
    _Line(Kind.FAULT, ": line ", r"line \d+: +\d+ ((?:Segmentation fault|Bus error|Illegal instruction).*)"),
    _Line(Kind.ABORTED, ": line ", r"line \d+: +\d+ ((?:Killed|Aborted).*)"),
    _Line(Kind.FAULT, "core dumped", r"^((?:Segmentation fault|Bus error|Illegal instruction) \(core dumped\))$"),
    _Line(Kind.ABORTED, "Killed", r"^(Killed)$", r"\1 (often the system running out of memory)"),
    _Line(Kind.OUTSIDE, "SXid (", r"(SXid \(.*?\): \d+, .*)", is_end=False),
    _Line(Kind.FAULT, "segfault at", rf"({_TRAINS}\S*\[\d+\]: segfault at .*? in \S+?)\["),
    _Line(Kind.FAULT, "invalid opcode", rf"traps: ({_TRAINS}\S* trap invalid opcode .* in \S+?)\["),
    _Line(Kind.FAULT, "Caught signal", r"Caught signal \d+ \((.*)\)"),
    _Line(Kind.FAULT, "Memory access fault", "(Memory access fault by GPU node.*?Reason: [^.]*)"),
    _Line(Kind.FAULT, " aborting with ", r"ueue (?:\S+ )?aborting with (?:error|status) ?: (.*?)(?: Available .*)?$",
          r"ROCm aborted a queue: \1"),
    _Line(Kind.FAULT, "thread: [", r"(?:^|/)([^/\s]+:\d+): .*block: \[.*Assertion `?(.*?)[`']? failed",
          r"a CUDA kernel's assertion failed (\1): \2"),
    _Line(Kind.FAULT, "Assertion `", r"^(?:\S+: )?(?:\S*/)?([^/\s]+:\d+): .*Assertion `(.*)' failed\.",
          r"assertion failed (\1): \2"),
    _Line(Kind.FAULT, "Assertion failed:", r"Assertion failed: (?:\S*/)?([^/\s]+:\d+), condition: (.*)",
          r"a DeepEP kernel's assertion failed (\1): \2"),
    _Line(Kind.WAITED, "Warning: DeepEP", "(DeepEP timeout for .*)", is_end=False),
    _Line(Kind.WAITED, "DeepEP", r"(DeepEP [\w() -]*timeout(?:,| for| check failed).*)"),
    _Line(Kind.FAULT, "free()", r"((?:double )?free\(\): .*)"),
    _Line(Kind.FAULT, "corrupt", r"((?:double free or corruption|malloc\w*\(\): |corrupted (?:size|double)).*)"),
    _Line(Kind.FAULT, "alloc", r"((?:malloc\w*|realloc)\(\): .*)"),
    _Line(Kind.FAULT, "munmap_chunk()", r"(munmap_chunk\(\).*)"),
    _Line(Kind.FAULT, "stack smashing", r"(\*\*\* stack smashing detected.*)"),
    _Line(Kind.FAULT, "in worker.", r"ERROR: (Unexpected .* in worker\..*)"),
    _Line(Kind.FAULT, "nvshmem",
          r"^(\S*:\d+: (?:NULL value|non-zero status|Unable|nvshmem init|\[GPU \d+\] Peer).*)", r"NVSHMEM: \1"),
    _Line(Kind.FAULT, "transport/ib", r"^(\S*:\d+: (?:NULL value|non-zero status).*)", r"NVSHMEM: \1"),
    _Line(Kind.FAULT, "NVSHMEM API", "(NVSHMEM API called before NVSHMEM initialization.*)"),
    _Line(Kind.ABORTED, "NCCL WARN",
          r"NCCL WARN ((?:(?:NET/\w+ ?: )?Got (?:completion .*(?:status=|error )(?!0\b)|async event ?: )"
          r"|NET/OFI .*completed with error).*)",
          r"NCCL: \1", is_end=False),
    _Line(Kind.FAULT, "NCCL WARN",
          "NCCL WARN (.*(?:Duplicate GPU|[Mm]ismatch|No space left|Cuda failure|out of memory|uncorrectable).*)",
          r"NCCL: \1", is_end=False),
    _Line(Kind.FAULT, "NCCL WARN", r"NCCL WARN (.*(?:Cannot allocate|ibv_\w+ failed|no socket interface).*)",
          r"NCCL: \1", is_end=False),
    _Line(Kind.LOST_PEER, "NCCL WARN", "NCCL WARN (.*(?:remote peer|[Ss]ocket|[Cc]onnect|[Tt]imeout|Call to recv).*)",
          r"NCCL: \1", is_end=False),
    _Line(Kind.FAULT, "python", r"^((?:\S*/)?python[\d.]*: (?:No module named|can't open file|Error while finding).*)"),
    _Line(Kind.FAULT, "command not found", r"^(.*: (?:line \d+: )?\S+: command not found)$"),
    _Line(Kind.FAULT, "No such file", r"^(\S+: line \d+: \S+: No such file or directory)$"),
    _Line(Kind.FAULT, ": error: ", r"^(\S+: error: (?:unrecognized|argument|the following|invalid|ambiguous) .*)"),
    _Line(Kind.FAULT, "options: ", "((?:Unrecognized|Required|Missing) options?: [^│]*)"),
    _Line(Kind.FAULT, "arguments: ", "((?:Unrecognized|Required|Missing) arguments?: [^│]*)"),
    _Line(Kind.FAULT, "No space left", r"^((?:cp|cat|tee|tar|echo|bash|rsync)\b.*: No space left on device.*)"),
    _Line(Kind.FAULT, "quota exceeded", r"^((?:cp|cat|tee|tar|echo|bash|rsync)\b.*: Disk quota exceeded.*)"),
)  # fmt: skip
#: A line without any of these is not looked at, unless something was said before that may go on.
_SIGNS: Final = tuple(dict.fromkeys((
    "Traceback", "atchdog", "PG GUID", "what():", "terminate called", "Fatal Python", "Error: ", 'File "', "rank  ",
    "exitcode", "Root Cause", "Failures:", "traceback :", "Unable to shutdown", "Exception i", "Training completed",
    "terminated with", "above exception", "Starting job:", *(line.sign for line in _LINES),
)))  # fmt: skip


@dataclass
class _Stream:
    """Lines with the same prefix: those of one rank, as far as the prefix tells."""

    rank: int | None
    has_own_prefix: bool = False
    inside: bool = False  # between a traceback's header and its exception
    muted_by: str = ""  # what a traceback that does not end the process begins with
    is_linked: bool = False  # the next traceback belongs to the one before
    text: list[str] = field(default_factory=list)  # of the exception that was raised last
    at: int = 0  # the line on which it began
    frame: tuple[str, str, str] | None = None
    source: str = ""
    places: str = ""
    chain: list[tuple[int, Statement]] = field(default_factory=list)  # exceptions so far, each with its line
    chains: list[list[tuple[int, Statement]]] = field(default_factory=list)
    fatal: str = ""  # what ended the interpreter, until a frame of the thread that did is read
    is_current: bool = False
    before: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to what was said before."""
        return bool(self.inside or self.text or self.fatal or self.is_linked)


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
        self._prefixes: list[re.Pattern[str]] = []  # of wrappers that no table has, as their tracebacks show them
        self._kernels: set[str] = set()  # how lines begin that a kernel prints from each of its threads, 100,000 times
        self._line = 0
        for raw, following in itertools.pairwise(itertools.chain(_unpacked(text), ("",))):
            self._line += 1
            if raw[:_BEGINNING] in self._kernels:
                continue
            if "step:" in raw and (step := _STEP.search(COLOUR.sub("", raw))):
                if not self._steps:
                    self._learn_prefix(_plain(raw), "[titan] ")
                self._steps[int(step[1])] = self._line
            elif self._open or self._in_trace or any(sign in raw for sign in _SIGNS):
                self._take(raw, following)
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
        placed += [one for stream in self._streams.values() for one in self._last_chains(stream)]
        last_lines = sorted(self._steps.values())
        over_at = math.inf
        for line, statement in sorted(placed, key=lambda one: one[0]):
            steps_after = len(last_lines) - bisect_right(last_lines, line)
            if steps_after < SURVIVED_STEPS and line > self._completed:
                over_at = line if statement.message == _TIME_LIMIT else over_at
                is_in_launch = not any(over_at < launch < line for launch in self._launches)
                is_interrupted = over_at < line and is_in_launch and statement.kind is Kind.FAULT  # by Slurm's signal
                placed_one = replace(statement, kind=Kind.ENDED) if is_interrupted else statement
                yield self._with_global_rank(self._with_group(placed_one))

    def _with_global_rank(self, statement: Statement) -> Statement:
        """As torchrun's summary numbers it, where a line has the local rank in torchrun's own prefix."""
        same = {reported for reported, local in self.places if local == statement.rank}
        if len(same) != 1 or statement.rank in {rank for rank, _ in self.places} | self.own_ranks:
            return statement
        return replace(statement, rank=same.pop())

    def _last_chains(self, stream: _Stream) -> Iterator[tuple[int, Statement]]:
        """Of a rank's tracebacks the last, and of the text of an unknown number of ranks all.

        What a rank raised long before its end it got over; another exception may be raised on the way out of one.
        """
        for chain in stream.chains:
            if stream.rank is None or stream.chains[-1][-1][0] - chain[-1][0] < CHAIN_LINES:
                # The innermost exception of a chain comes first and the last says what it meant, if it is no worse; for
                # want of memory anything may be raised.
                yield min(reversed(chain), key=lambda one: (one[1].kind, "OutOfMemoryError" not in one[1].message))

    def _take(self, raw: str, following: str) -> None:
        line = _plain(raw)
        key, rank, is_own = "", self.rank, self._is_exception
        if TRACEBACK in line:
            self._learn_prefix(line, TRACEBACK, _plain(following))
        if learned := next((match for prefix in self._prefixes if (match := prefix.match(line))), None):
            key, line = _CLOCK.sub("", learned[0]), line[learned.end() :]
            if of_rank := _OF_RANK.search(key):
                rank = int(next(filter(None, of_rank.groups())))
        elif match := _RANKS.match(line):
            key, line = match[1].rstrip(), line[match.end() :]
            rank = int(re.findall(r"\d+", key)[-1])
            is_own = match[1].endswith(" ")  # PyTorch's own prefix, which every line of a message has
        elif stamp := _STAMPS.match(line):
            line = line[stamp.end() :]
            key = "".join(re.findall(r"^ *\d+: |[\w.-]*-\d+: |pid=\d+", stamp[0]))
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(rank=rank)
        if self._summary(line):
            return
        if TRACEBACK in line:
            stream.has_own_prefix = is_own
        if not self._exception(stream, line):
            if self._one_line(stream, line):
                self._kernels.add(raw[:_BEGINNING])
            if line.strip():
                stream.before = line
        (self._open.add if stream.is_open else self._open.discard)(key)

    def _learn_prefix(self, line: str, begins: str, following: str = "") -> None:
        """Remember what stands before TorchTitan's words, or before a traceback's header and the line that follows."""
        prefix, begun, _ = line.partition(begins)
        # PyTorch's prefix and the time stamps are known, and a margin is that of an exception group.
        is_known = not begun or not _STAMPS.sub("", _RANKS.sub("", prefix)).strip(" |+")
        if is_known or any(known.match(line) for known in self._prefixes):
            return
        pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(prefix)))
        match = pattern.match(following)
        if begins != TRACEBACK or (match and following.startswith(("  ", TRACEBACK), match.end())):
            self._prefixes.append(pattern)

    # Python's exceptions

    def _exception(self, stream: _Stream, line: str) -> bool:
        """Whether the line belongs to a traceback or to the message of its exception."""
        if TRACEBACK in line:
            # A worker's traceback, or another rank's, is part of the message of the exception that reports it.
            message = "\n".join(stream.text).rstrip()
            is_nested = stream.is_linked or bool(message and (message.endswith(":") or _NESTED.search(line)))
            self._close(stream)
            if not is_nested:
                self._end_chain(stream)
            stream.inside, stream.is_linked, stream.places, stream.frame = True, False, "", None
            # Python prints these two kinds for what does not end the process, the first at its very end.
            stream.muted_by = match[0] if (match := _MUTED.match(stream.before)) else ""
            if of_rank := re.search(r"\(RANK (\d+)\)", line):
                stream.rank = int(of_rank[1])
            stream.before = ""
            return True
        if link := _LINK.match(line):
            self._close(stream)
            stream.is_linked = True
            stream.rank = int(link[2]) if link[2] else stream.rank
            return True
        if stream.inside:
            content = _MARGIN.sub("", line)
            if frame := _FRAME.match(content):
                stream.frame, stream.source = (frame[1], frame[2], frame[3] or ""), ""
                stream.places += f" {frame[1]}"
            elif not content.strip() or content[0].isspace() or content[0] in "│╭╰❱":
                if not stream.source and content.strip(" ^~│"):
                    stream.source = content.strip()
            elif _EXCEPTION.match(content) and not _LOG_LINE.match(content):  # else another rank's line came between
                stream.inside, stream.text, stream.at = False, [content], self._line
            return True
        if stream.text:
            is_message = stream.has_own_prefix or _DETAIL.match(line) or _WANTS_DETAIL.search(stream.text[-1])
            is_other = _LOG_LINE.match(line) or (not line.strip() and not stream.has_own_prefix)
            if is_message and not is_other and len(stream.text) < MESSAGE_LINES:
                stream.text.append(_MARGIN.sub("", line))
                return True
            self._close(stream)
        elif _SYNTAX.match(line) and stream.before:  # of the script itself: Python prints no header
            self._add(stream, Kind.FAULT, f"{line} ({stream.before.strip()})")
            return True
        return False

    def _close(self, stream: _Stream) -> None:
        """Make a statement of the exception that was read last."""
        if stream.text and stream.muted_by == _OF_THREAD:  # it explains an end that nobody else does
            self._add(stream, Kind.ENDED, " ".join(line.strip() for line in stream.text), is_end=False)
        elif stream.text and not stream.muted_by and "ChildFailedError" not in stream.text[0]:
            lines = [line.strip() for line in stream.text]
            kept = [line for line in lines if line and not _BOILERPLATE.match(line) and "Traceback (most" not in line]
            message = _NCCL_PLACE.sub(r"NCCL error in \1: ", " ".join(kept) or lines[0])
            if stream.frame and (_WITHOUT_WORDS.match(message) or _SYNTAX.match(message)):
                message = f"{message.rstrip(': ')} {_where(stream)}"
            kind = kind_of(" ".join(lines), stream.places)
            stream.chain.append((stream.at, Statement(kind=kind, rank=stream.rank, message=message)))
        stream.text, stream.inside = [], False
        self._add_fatal(stream)

    def _end_chain(self, stream: _Stream) -> None:
        if stream.chain:
            stream.chains.append(stream.chain)
            stream.chain = []

    # what is said on one line

    def _one_line(self, stream: _Stream, line: str) -> bool:
        """Whether a kernel said the line."""
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
            stream.frame, stream.muted_by, stream.places = None, "", ""
        elif match := _FATAL.match(line):
            stream.fatal, stream.is_current = match[1], False
        elif stream.fatal and _THREAD.match(line):
            stream.is_current = line.startswith("Current")
        elif stream.is_current and (frame := _FRAME.match(line)):
            stream.frame, stream.source = (frame[1], frame[2], frame[3] or ""), ""
            self._add_fatal(stream)
        elif match := _BY_TORCHRUN.search(line):
            self._ended_by_torchrun.add(match[1])
        elif match := _AGENT.search(line):
            self._agents.append(match)
        else:
            return self._by_table(stream, line)
        return False

    def _add_fatal(self, stream: _Stream) -> None:
        if stream.fatal:
            place = f" {_where(stream)}" if stream.is_current and stream.frame else ""
            kind = Kind.ABORTED if stream.fatal.startswith("Aborted") else Kind.FAULT
            self._add(stream, kind, stream.fatal + place)
        stream.fatal, stream.is_current, stream.frame = "", False, None

    def _by_table(self, stream: _Stream, line: str) -> bool:
        """Whether a kernel said the line."""
        for entry in _LINES:
            if entry.sign not in line or not (match := re.search(entry.pattern, line)):
                continue
            kind, message = entry.kind, " ".join(match.expand(entry.message).split())
            if message.startswith("Xid") and int(re.findall(r"\): (\d+)", message)[0]) in APPLICATION_XIDS:
                kind = Kind.TRAPPED
            # A link that breaks before anybody times out is what they wait for; later it is a process that gave up. In
            # the text of one rank nothing tells which.
            elif kind is Kind.ABORTED and "NET/" in message and self.rank is None:
                kind = kind if any(one.kind is Kind.TIMED_OUT for one in self._found) else Kind.WAITED
            self._add(stream, kind, message, is_end=entry.is_end)
            return entry.kind is Kind.WAITED or "kernel's assertion" in entry.message
        return False

    def _add(
        self, stream: _Stream, kind: Kind, message: str, *, else_rank: str | None = None, is_end: bool = True
    ) -> None:
        rank = int(else_rank) if stream.rank is None and else_rank else stream.rank
        # What Slurm and the kernel say about a node may stand in a rank's text, and is of no rank.
        is_of_rank = kind not in (Kind.OUTSIDE, Kind.STOPPED)
        one = Statement(kind=kind, message=message, rank=rank if is_of_rank else None, is_end=is_end)
        self._found[one] = self._line

    def _with_group(self, statement: Statement) -> Statement:
        """A time-out with the group that it was in, which other lines name."""
        name = self._groups.get(statement.rank, "undefined").removeprefix("mesh_")  # as PyTorch calls those of a mesh
        if statement.kind is not Kind.TIMED_OUT or name == "undefined":
            return statement
        group = f"the {GROUPS[name]} group ({name})" if name in GROUPS else f"group {name}"
        return replace(statement, message=statement.message.replace(" after ", f" of {group} after ", 1))

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
        stream = self._streams.setdefault(key, _Stream(rank=self._block, has_own_prefix=True))
        self._exception(stream, line)

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


_SIGNAL_HINTS: Final = {
    "SIGKILL": " (often the system running out of memory)",
    "SIGBUS": " (often no space left in /dev/shm)",
    "SIGILL": " (an instruction that the processor does not have)",
}


def _unpacked(text: str) -> Iterator[str]:
    """The lines of a text; of a logger's JSON that has a traceback in one string, those of the traceback."""
    for line in text.splitlines():
        parts = [line]
        if line.startswith("{") and TRACEBACK in line:
            with suppress(ValueError, AttributeError):
                texts = [value for value in json.loads(line).values() if isinstance(value, str) and TRACEBACK in value]
                parts = "\n".join(texts).splitlines() or parts
        yield from parts


def _plain(raw: str) -> str:
    """A line without colours; of one that a container or a logger wrote as JSON, the message."""
    line = COLOUR.sub("", raw[:LINE_LENGTH])
    if line.startswith("{"):
        with suppress(ValueError, AttributeError):
            record = json.loads(line)
            line = next((text for key in _MESSAGES if isinstance(text := record.get(key), str)), line)
    return line.rstrip("\n")


def _where(stream: _Stream) -> str:
    """The frame that raised and its source line."""
    file, line, function = stream.frame or ("", "", "")
    parts = Path(file).parts
    below = [index for index, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    short = "/".join(parts[below[-1] + 1 :] if below else parts[-2:])
    source = f": {stream.source}" if stream.source else ""
    return f"({short}:{line}{f' in {function}' if function else ''}{source})"
