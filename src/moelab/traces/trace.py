"""A Kineto trace, read as a stream into columns of what an explanation needs.

``torch.profiler`` writes one JSON file for each rank: what ran on the GPU, the calls that launched it and the operators
that made the calls. A step of a large model has gigabytes of it. Events are decoded one by one from a window of text
and only numbers are kept, so that a file of any size takes a few hundred MB.

A file that was cut off, or has damaged events, is read as far as it goes, and ``notes`` say what is missing. PyTorch
itself writes invalid JSON at times: ``inf`` for the bandwidth of a copy that took no time, a lone backslash in a name.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput

Rows = npt.NDArray[Any]
"""A structured array: a row for each event."""
WINDOW, LONGEST_EVENT = 1 << 20, 1 << 24
"""Characters: what is read at once, and beyond which a value without an end is damaged."""
LONGEST_US = 3.6e9
"""Kineto has written durations of 2⁶⁴ ns and starts at 0; what is so far from the rest is no part of a step."""
MOST_OTHERS = 40
"""Events of other kinds that are looked at to name the writer of a file that has no known ones."""
UNNAMED_GPU = "a GPU that is not named"
RECORD = "record one with torch.profiler: prof.export_chrome_trace('trace.json.gz')"

_KINDS = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"), "gpu"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "hip_driver"), "call"),
    **dict.fromkeys(("xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"), "call"),
    **dict.fromkeys(("cpu_op", "operator", "user_annotation"), "op"),
    "gpu_user_annotation": "mark",
}
"""Categories of events, those of PyTorch before 1.12 among them."""
_CALLS = re.compile(r"launch|memcpy|memset|memory(?:copy|fill)|synchroni[sz]e|graph|QueueFinish|EventWait", re.I)
_VIEWS = re.compile(
    r"aten::(?:as_strided|view\w*|empty\w*|detach_?|t|transpose|unsqueeze|squeeze|expand|slice|select|lift_fresh|narrow|"
    r"unsafe_view|_unsafe_view|permute|alias|resize_|result_type|is_nonzero|resolve_\w+)$|detach_?$"
)
"""Operators that launch nothing, a third of all; their time is their parent's."""
_GEMM_OPS = re.compile(r"aten::(addmm|mm|bmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm)$")
_NEXT_EVENT = re.compile(r'\}(?:,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|args|s)")|(?=\s*\]\s*(?:\}|,\s*"|$)))')
_OF_NSIGHT = re.compile(
    rb'"(?:CudaEvent|NvtxEvent|TraceProcessEvent|globalVid|StringIds|TARGET_INFO\w*|CUPTI_ACTIVITY\w*)"|Nsight Systems'
)
_WRITERS = {
    "JAX (XLA)": re.compile(r"\bhlo_|/(?:host|device):"),
    "AMD's rocprof": re.compile(r"rocprof|BeginNs"),
    "VizTracer": re.compile(r"viztracer"),
    "Ascend's profiler": re.compile(r"Task Type"),
}
"""By marks among a file's keys and its events."""
_BETWEEN = re.compile(r"[\s,]*")
_NO_NUMBER = re.compile(r":\s*-?(?:inf|nan)\b", re.I)
_LONE_BACKSLASH = re.compile(r'\\(?!["\\/bfnrtu])')


class Collective(NamedTuple):
    """What the profiler says of a collective: its name, elements in or out, process group, and order in it."""

    name: str
    elements: int
    group: str
    order: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One rank's trace; times are in µs, and :class:`_Reader` has the columns."""

    path: Path
    rank: int | None  # global; None where neither the file nor its name says
    gpu: str | None  # that events ran on, or UNNAMED_GPU; None for a CPU
    names: Sequence[str]  # of kernels, calls and operators, which the columns of that name are indices of
    events: Rows  # what ran on the GPU, by start
    calls: Rows  # that launch or wait, by thread and start
    ops: Rows  # operators and annotations, by thread and start
    collectives: Sequence[Collective]  # which that column of events is an index of
    shapes: Sequence[Any]  # operands' dimensions of the products among ops
    steps: Sequence[tuple[str, float, float]]  # the profiler's, by start: name, start and end on the host
    notes: tuple[str, ...]


class _Table:
    """Columns that grow."""

    def __init__(self, columns: str) -> None:
        """Columns as ``name:typecode``, one after the other."""
        named = (column.split(":") for column in columns.split())
        self.columns = {name: array(code) for name, code in named}

    def add(self, *values: Any) -> None:
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def rows(self, *order: str) -> Rows:
        """A structured array, sorted by columns; the first counts most, and of ``end`` the latest comes first."""
        keys = {name: np.frombuffer(self.columns[name], self.columns[name].typecode) for name in order}
        # lexsort's last key counts most; of operators that begin together the longest is around the others
        by = np.lexsort([-keys[name] if name == "end" else keys[name] for name in reversed(order)])
        keys.clear()  # an array that is still viewed cannot be let go below
        rows = np.empty(len(by), [(name, np.dtype(column.typecode)) for name, column in self.columns.items()])
        for name in tuple(self.columns):  # each is let go as it is copied
            rows[name] = np.frombuffer(self.columns[name], rows[name].dtype)[by]
            del self.columns[name]
        return rows


def _decoded(file: BinaryIO) -> Iterator[str]:
    """Text of a file, unpacked if it is compressed, as far as it goes."""
    # -sig: some writers begin with a byte order mark; a name in another encoding costs its letters, not the file.
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    begin = file.read(2)
    file.seek(0)
    unpack = zlib.decompressobj(31) if begin == b"\x1f\x8b" else None  # 31: with the header of gzip
    while raw := file.read(WINDOW):
        while raw:
            try:
                data, raw = (unpack.decompress(raw, WINDOW), unpack.unconsumed_tail) if unpack else (raw, b"")
            except zlib.error:  # damaged from here on
                return
            if text := decoder.decode(data):
                yield text
            if unpack and unpack.eof:  # members that follow each other, as some writers append them
                raw, unpack = unpack.unused_data, zlib.decompressobj(31)
    if unpack and (text := decoder.decode(unpack.flush(), final=True)):
        yield text


class _Text:
    """JSON values, one after the other, from a file that is never in memory as a whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._chunks, self._text, self._at = _decoded(file), "", 0
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def _fill(self) -> bool:
        """Read on; False at the end of the file."""
        more = next(self._chunks, "")
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def peek(self) -> str:
        """The next character that is no space or comma; empty at the end."""
        while True:
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def skip(self) -> None:
        """Go over one character that :meth:`peek` has seen."""
        self._at += 1

    def value(self) -> Any:
        """The next value.

        Raises:
            EOFError: if the file ends inside it.
            ValueError: if it is not JSON.
        """
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # near the end of the window a value may only be cut; an error far before it is in the file itself
                open_string = error.msg.startswith("Unterminated") and len(self._text) - error.pos < WINDOW
                if not (open_string or error.pos >= len(self._text) - 16) or len(self._text) - self._at > LONGEST_EVENT:
                    raise
                if not self._fill():
                    raise EOFError from None
                continue
            if end == len(self._text) and self._fill():  # a number may go on
                continue
            self._at = end
            return value

    def mended(self) -> Any:
        """An event that is not JSON: with what PyTorch is known to get wrong put right, else None; goes past it."""
        while (match := _NEXT_EVENT.search(self._text, self._at)) is None:
            if len(self._text) - self._at > LONGEST_EVENT or not self._fill():
                self._at = len(self._text)
                raise EOFError
        text = self._text[self._at : match.start() + 1]
        self._at = match.end()
        try:
            return json.loads(_LONE_BACKSLASH.sub(r"\\\\", _NO_NUMBER.sub(": null", text)), strict=False)
        except ValueError:
            return None


class _Reader:
    """Fills the columns of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.collectives: list[Collective] = []
        self.shapes: dict[str, int] = {}
        self.steps: list[tuple[str, float, float]] = []
        self.others: set[str] = set()
        self.read = self.damaged = self.without_duration = 0
        times = "start:d end:d name:i"
        self.gpu = _Table(f"{times} stream:q device:q correlation:q external:q graph:q bytes:d collective:i")
        self.call = _Table(f"{times} thread:i correlation:q")
        self.mark = _Table("start:d end:d stream:q external:q")
        self.op = _Table(f"{times} thread:i external:q sequence:q forward_thread:q shape:i annotation:b")

    def take(self, event: Any) -> None:
        """Keep an event's numbers, if it is one that counts."""
        self.read += 1
        if not isinstance(event, dict):
            self.damaged += 1
            return
        kind = _KINDS.get(str(event.get("cat", "")).lower()) if event.get("ph") == "X" else None
        if not kind:
            if event.get("ph") in ("X", "M") and len(self.others) < MOST_OTHERS:
                self.others.add(f"{event.get('cat')} {event.get('args')}"[:200])
            return
        try:
            start, args, took = float(event["ts"]), event.get("args") or {}, event.get("dur")
            end = start + max(float(took or 0.0), 0.0)  # in this order NaN stays NaN, and is damaged
            if not isfinite(end) or end - start > LONGEST_US:
                raise ValueError(end)
            self.without_duration += took is None and kind == "gpu"
            getattr(self, f"_take_{kind}")(event, str(event["name"]), start, end, args)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.damaged += 1

    def _name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def _thread(self, event: dict[str, Any]) -> int:
        return self.threads.setdefault((event.get("pid"), event.get("tid")), len(self.threads))

    def _take_gpu(self, event: dict[str, Any], name: str, start: float, end: float, args: dict[str, Any]) -> None:
        # Where a runtime does not name them, Kineto has the device as the process and the stream as the thread.
        stream, device = _whole(args.get("stream", event.get("tid"))), _whole(args.get("device", event.get("pid")), 0)
        correlation, graph, moved = _whole(args.get("correlation")), _whole(args.get("graph id"), 0), args.get("bytes")
        numbers = (stream, device, correlation, _external(args), graph, float(moved or 0.0))
        collective = -1
        if "Collective name" in args:
            group = f"{args.get('Process Group Description', '')} {args.get('Process Group Name', '')}"
            # a gather's input and a scatter's output are a shard: the larger one is what is moved
            elements = max(_whole(args.get("In msg nelems"), 0), _whole(args.get("Out msg nelems"), 0))
            self.collectives.append(Collective(str(args["Collective name"]), elements, group, _whole(args.get("Seq"))))
            collective = len(self.collectives) - 1
        self.gpu.add(start, end, self._name(name), *numbers, collective)

    def _take_mark(self, event: dict[str, Any], name: str, start: float, end: float, args: dict[str, Any]) -> None:
        if name.startswith("nccl:"):
            self.mark.add(start, end, _whole(event.get("tid")), _external(args))

    def _take_call(self, event: dict[str, Any], name: str, start: float, end: float, args: dict[str, Any]) -> None:
        if _CALLS.search(name):
            self.call.add(start, end, self._name(name), self._thread(event), _whole(args.get("correlation")))

    def _take_op(self, event: dict[str, Any], name: str, start: float, end: float, args: dict[str, Any]) -> None:
        if name.startswith("ProfilerStep"):
            self.steps.append((name, start, end))
        elif not _VIEWS.match(name):
            shape = -1
            if "Input Dims" in args and _GEMM_OPS.match(name):
                shape = self.shapes.setdefault(json.dumps(args["Input Dims"]), len(self.shapes))
            numbers = (_external(args), _whole(args.get("Sequence number")), _whole(args.get("Fwd thread id")), shape)
            annotation = event.get("cat") == "user_annotation"
            self.op.add(start, end, self._name(name), self._thread(event), *numbers, annotation)


def _whole(value: Any, otherwise: int = -1) -> int:
    """A whole number that fits a column, whatever type it was written as."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if abs(number) < 1 << 62 else otherwise  # columns have 64 bits


def _external(args: dict[str, Any]) -> int:
    return _whole(args.get("External id", args.get("external id")))


def _events(text: _Text, reader: _Reader) -> Iterator[Any]:
    """The events of a file, whose other content goes into the reader's header.

    Raises:
        EOFError: if it ends before it is whole.
        BadInput: if it is no chrome trace.
    """
    first = text.peek()
    if first not in ("{", "["):
        raise BadInput(
            f"{reader.path} is not a Kineto trace: it begins with {first!r} instead of a JSON object; {RECORD}"
        )
    text.skip()
    if first == "{":
        while (key := text.peek()) != "}":
            if not key:
                raise EOFError
            key = text.value()
            if text.peek() == ":":
                text.skip()
            if key == "traceEvents" and text.peek() == "[":
                text.skip()
                yield from _elements(text)
            else:
                reader.header[str(key)] = None  # a key names its writer, whatever follows
                reader.header[str(key)] = text.value()
        text.skip()
        if not reader.read and text.peek():
            raise BadInput(f"{reader.path} has one JSON object per line, as Nsight exports have; {RECORD}")
    else:
        yield from _elements(text)


def _elements(text: _Text) -> Iterator[Any]:
    while (following := text.peek()) != "]":
        if not following:
            raise EOFError
        try:
            yield text.value()
        except json.JSONDecodeError:
            yield text.mended()
    text.skip()


def read_trace(path: Path) -> Trace:
    """Read one rank's trace: a ``.json`` or ``.json.gz`` that ``torch.profiler`` wrote.

    Raises:
        BadInput: if it is none, or has neither GPU events nor operators.
    """
    reader, cut = _Reader(path), False
    with path.open("rb") as file:
        _refuse_binary(path, file.read(4096))
        file.seek(0)
        try:
            for event in _events(_Text(file), reader):
                reader.take(event)
        except EOFError:
            cut = True
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path} {_writer(reader) or f'is not a Kineto trace: {error}'}; {RECORD}") from None
    return _trace_of(reader, cut)


def _refuse_binary(path: Path, begin: bytes) -> None:
    nsight = path.suffix.lower() in (".nsys-rep", ".qdrep", ".ncu-rep", ".sqlite") or begin.startswith(b"SQLite format")
    packed = begin.startswith(b"\x1f\x8b")
    with suppress(zlib.error):
        begin = zlib.decompressobj(31).decompress(begin) if packed else begin
    if nsight or _OF_NSIGHT.search(begin):
        raise BadInput(f"{path} is a report or an export of Nsight, which moelab cannot read; {RECORD}")
    if path.name.endswith(".xplane.pb"):
        raise BadInput(f"{path} is a trace of JAX (XLA) or TensorFlow, which moelab cannot read; {RECORD}")
    if b"\x00" in begin and not packed:
        raise BadInput(f"{path} is a binary file, not a JSON trace; {RECORD}")


def _trace_of(reader: _Reader, cut: bool) -> Trace:
    path, header, notes = reader.path, reader.header, []
    name, names = path.name, list(reader.names)
    events = reader.gpu.rows("start", "end", "stream", "name")  # equal ones beside each other
    ops = reader.op.rows("thread", "start", "end")
    count = len(events)
    if count:
        far = abs(events["start"] - np.median(events["start"])) > LONGEST_US  # such as an event at 0 among dates
        events = events[~far]
        reader.damaged += int(far.sum())
        # an event that was written twice has the same correlation, and the sort has put both beside each other
        same = ["start", "end", "name", "stream", "device", "correlation"]
        is_repeated = (events[same][1:] == events[same][:-1]) & (events["correlation"][1:] >= 0)
        events = events[np.concatenate([[True], ~is_repeated])]
        _take_marks(events, reader.mark.rows("stream", "start"))
        if twice := int(is_repeated.sum()):
            notes.append(f"{name}: {twice:,} of {count:,} kernels and copies appear twice and are counted once")
    if cut:
        notes.append(f"{name} was cut off: it ends after {reader.read:,} events, and what followed is missing")
    if reader.damaged:
        notes.append(f"{name}: {reader.damaged:,} of {reader.read:,} events are damaged and were left out")
    if reader.without_duration:
        notes.append(f"{name}: {reader.without_duration:,} kernels and copies have no duration and take no time here")
    devices, counts = np.unique(events["device"], return_counts=True)
    device = int(devices[counts.argmax()]) if count else -1  # most events are of the rank's own
    if len(devices) > 1:
        others = ", ".join(str(one) for one in devices if one != device)
        notes.append(f"{name} has events of devices {device} and {others}; only those of {device} are shown")
        events = events[events["device"] == device]
    if not count and not len(ops):
        kinds = " of the kinds that torch.profiler writes" if reader.read else ""
        nothing = f"has no events{kinds} (kernels, operators)"
        raise BadInput(f"{path} {_writer(reader) or nothing}{'; it was cut off' if cut else ''}; {RECORD}")
    properties = header.get("deviceProperties")
    known = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    own = sorted(known, key=lambda one: one.get("id") != device)
    amd = any(one.startswith("hip") for one in names)
    gpu = str(own[0].get("name")) if own else "AMD GPU" if amd else UNNAMED_GPU
    if not count:
        launched = any("launch" in one.lower() for one in names)
        why = ", though calls launched some: the profiler ran without ProfilerActivity.CUDA or without access to CUPTI"
        notes.append(f"{name} has no GPU kernels{why if launched else ''}; the operators' own CPU time is shown")
    distributed = header.get("distributedInfo")
    in_header = distributed.get("rank") if isinstance(distributed, dict) else None
    in_name = re.search(r"rank[_-]?(\d+)", name)
    # `is not None`, because rank 0 is a rank; the header is torch.distributed's own word, a name anyone's
    rank = _whole(in_header if in_header is not None else in_name and in_name[1])
    if count and (amd or re.search(r"\b(AMD|Radeon|Instinct|gfx\d)", gpu, re.I)):
        notes.append(
            f"{name} is of an AMD GPU ({gpu}): its kernels are classified by name, and its peaks are not known"
        )
    return Trace(
        path=path,
        rank=rank if rank >= 0 else None,
        gpu=gpu if count else None,
        names=names,
        events=events,
        calls=reader.call.rows("thread", "start"),
        ops=ops,
        collectives=reader.collectives,
        shapes=[json.loads(shape) for shape in reader.shapes],
        steps=sorted(reader.steps, key=lambda step: step[1]),
        notes=tuple(notes),
    )


def _take_marks(events: Rows, marks: Rows) -> None:
    """Give collectives without a call, as RCCL launches them, the operator of the annotation that they run under."""
    for stream in np.unique(marks["stream"]):
        of_stream = marks[marks["stream"] == stream]
        places = np.flatnonzero((events["stream"] == stream) & (events["external"] < 0))
        under = of_stream[np.maximum(np.searchsorted(of_stream["start"], events["start"][places], "right") - 1, 0)]
        within = (under["start"] <= events["start"][places]) & (events["end"][places] <= under["end"] + 1.0)
        events["external"][places[within]] = under["external"][within]


def _writer(reader: _Reader) -> str:
    """Who else wrote a file, by its keys, categories and arguments; empty where they do not tell."""
    words = " ".join([*reader.header, *reader.others])
    writer = next((writer for writer, marks in _WRITERS.items() if marks.search(words)), None)
    return f"is a trace of {writer}, which moelab cannot read (its events have other categories)" if writer else ""


def _naturally(path: Path) -> list[tuple[int, str]]:
    """``iteration_20`` before ``iteration_100``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """Files of the traces at paths: each a file, or a folder, such as a run, that has them somewhere below.

    Raises:
        BadInput: if there is nothing.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            there = [one for one in sorted(path.rglob("*"), key=_naturally) if re.search(r"\.json(\.gz)?$", one.name)]
            named = [one for one in there if re.search(r"trace|kineto", one.name) or "trac" in one.parent.name]
            named = named or [one for one in there if one.parent == path and re.search(r"rank[_-]?\d", one.name)]
            if not named:
                raise BadInput(f"no trace (trace*.json or .json.gz) below {path}; {RECORD}")
            files += named
        elif path.is_file():
            files.append(path)
        else:
            raise BadInput(f"{path} does not exist; give a trace, a folder of traces, or a run")
    return files
