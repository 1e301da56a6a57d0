"""A Kineto trace, read as a stream into columns of what an explanation needs.

``torch.profiler`` writes one JSON file for each rank: what ran on the GPU, the calls that launched it and the operators
that made the calls. A step of a large model has gigabytes of it, so events are parsed one by one (``ijson``) and only
numbers are kept: a file of any size takes a few hundred MB.

A file that was cut off or is damaged is read as far as it goes, and ``notes`` say so. PyTorch itself writes invalid
JSON at times: ``inf`` for the bandwidth of a copy that took no time, a lone backslash in a name. Both are mended.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import ijson
import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.files import open_regular

Rows = npt.NDArray[Any]
"""A structured array: a row for each event."""
CHUNK = 1 << 16
"""Bytes that are parsed at a time."""
DEEPEST = 1000
"""Brackets that a chunk may leave open: a trace has about six, and the parser's memory grows with their square."""
LONGEST_US = 3.6e9
"""Kineto has written durations of 2⁶⁴ ns and starts at 0; what is so far from the rest is no part of a step."""
UNNAMED_GPU = "a GPU that is not named"
RECORD = "record one with torch.profiler: prof.export_chrome_trace('trace.json.gz')"

_KINDS = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "gpu"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver"), "call"),
    **dict.fromkeys(("cpu_op", "user_annotation"), "op"),
}
_CALLS = re.compile(r"launch|memcpy|memset|synchronize|graph", re.IGNORECASE)
_VIEWS = re.compile(
    r"aten::(?:as_strided|view\w*|empty\w*|detach_?|t|transpose|unsqueeze|squeeze|expand|slice|select|lift_fresh|narrow|"
    r"unsafe_view|_unsafe_view|permute|alias|resize_|result_type|is_nonzero|resolve_\w+)$|detach_?$"
)
"""Operators that launch nothing, a third of all; their time is their parent's."""
_GEMM_OPS = re.compile(r"aten::(addmm|mm|bmm|baddbmm|_scaled_mm|_grouped_mm|_scaled_grouped_mm)$")
_NO_NUMBER = re.compile(rb"(:\s*)-?(?:(?:inf(?:inity)?|nan)\b|\d{19,}(?=[,}\s]))", re.IGNORECASE)  # nor one of 64 bits
_ESCAPE = re.compile(rb'\\(["\\/bfnrtu]?)')


class Collective(NamedTuple):
    """What the profiler says of a collective: its name, elements in or out, process group, and order in it."""

    name: str
    elements: int
    group: str
    order: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One rank's trace; times are in µs, and :class:`_Columns` has the columns."""

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
        columns = {name: np.frombuffer(column, column.typecode) for name, column in self.columns.items()}
        # lexsort's last key counts most; of operators that begin together the longest is around the others
        by = np.lexsort([-columns[name] if name == "end" else columns[name] for name in reversed(order)])
        rows = np.empty(len(by), [(name, column.dtype) for name, column in columns.items()])
        for name, column in columns.items():
            rows[name] = column[by]
        return rows


class _Columns:
    """The numbers of a file's events, column by column."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.collectives: list[Collective] = []
        self.shapes: dict[str, int] = {}
        self.steps: list[tuple[str, float, float]] = []
        self.read = self.damaged = self.without_duration = 0
        times = "start:d end:d name:i"
        self.gpu = _Table(f"{times} stream:q device:q correlation:q external:q graph:q bytes:d collective:i")
        self.call = _Table(f"{times} thread:i correlation:q")
        self.op = _Table(f"{times} thread:i external:q sequence:q forward_thread:q shape:i annotation:b")

    def take(self, event: Any) -> None:
        """Keep an event's numbers, if it is one that counts."""
        self.read += 1
        kind = _KINDS.get(str(event.get("cat")).lower()) if isinstance(event, dict) and event.get("ph") == "X" else None
        if not kind:
            return
        try:
            start, args, took = float(event["ts"]), event.get("args") or {}, event.get("dur")
            end = start + max(float(took or 0.0), 0.0)  # in this order NaN stays NaN, and is damaged
            if not isfinite(end) or end - start > LONGEST_US:
                raise ValueError(end)
            self.without_duration += took is None and kind == "gpu"
            name = self.names.setdefault(str(event["name"]), len(self.names))
            getattr(self, f"_take_{kind}")(event, str(event["name"]), args, (start, end, name))
        except (KeyError, TypeError, ValueError, AttributeError):
            self.damaged += 1

    def _take_gpu(
        self, event: dict[str, Any], name: str, args: dict[str, Any], times: tuple[float, float, int]
    ) -> None:
        # Where the arguments do not name them, Kineto has the device as the process and the stream as the thread.
        stream, device = _whole(args.get("stream", event.get("tid"))), _whole(args.get("device", event.get("pid")), 0)
        correlation, graph, moved = _whole(args.get("correlation")), _whole(args.get("graph id"), 0), args.get("bytes")
        collective = -1
        if "Collective name" in args:
            group = f"{args.get('Process Group Description', '')} {args.get('Process Group Name', '')}"
            # a gather's input and a scatter's output are a shard: the larger one is what is moved
            elements = max(_whole(args.get("In msg nelems"), 0), _whole(args.get("Out msg nelems"), 0))
            self.collectives.append(Collective(str(args["Collective name"]), elements, group, _whole(args.get("Seq"))))
            collective = len(self.collectives) - 1
        numbers = (stream, device, correlation, _external(args), graph, float(moved or 0.0))
        self.gpu.add(*times, *numbers, collective)

    def _take_call(
        self, event: dict[str, Any], name: str, args: dict[str, Any], times: tuple[float, float, int]
    ) -> None:
        if _CALLS.search(name):
            self.call.add(*times, self._thread(event), _whole(args.get("correlation")))

    def _take_op(self, event: dict[str, Any], name: str, args: dict[str, Any], times: tuple[float, float, int]) -> None:
        if name.startswith("ProfilerStep"):
            self.steps.append((name, *times[:2]))
        elif not _VIEWS.match(name):
            shape = -1
            if "Input Dims" in args and _GEMM_OPS.match(name):
                shape = self.shapes.setdefault(json.dumps(args["Input Dims"]), len(self.shapes))
            numbers = (_external(args), _whole(args.get("Sequence number")), _whole(args.get("Fwd thread id")), shape)
            self.op.add(*times, self._thread(event), *numbers, event["cat"] == "user_annotation")

    def _thread(self, event: dict[str, Any]) -> int:
        return self.threads.setdefault((event.get("pid"), event.get("tid")), len(self.threads))


def _whole(value: Any, otherwise: int = -1) -> int:
    """A whole number that fits a column, whatever type it was written as."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if abs(number) < 1 << 62 else otherwise  # columns have 64 bits


def _external(args: dict[str, Any]) -> int:
    return _whole(args.get("External id", args.get("external id")))


class _MendedFile:
    """A file's bytes as valid JSON, for :mod:`ijson`: what PyTorch is known to get wrong is put right."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest, self.cut = file, b"", False

    def read(self, size: int) -> bytes:
        """At least a byte, or none at the end; up to the last comma or line break, so that no token is torn."""
        if not size:
            return b""
        data = self._rest
        while True:
            try:
                more = self._file.read(CHUNK)
            except (EOFError, OSError, zlib.error):  # gzip: cut off, or damaged from here on
                more, self.cut = b"", True
            data += more
            end = max(data.rfind(b"\n"), data.rfind(b",")) + 1 if more else len(data)
            if end or not more:
                break
        self._rest = data[end:]
        if sum(map(data.count, (b"[", b"{"))) - sum(map(data.count, (b"]", b"}"))) > DEEPEST:
            raise ValueError("nested too deeply")
        whole = _NO_NUMBER.sub(rb"\1null", data[:end])
        return _ESCAPE.sub(lambda match: match[0] if match[1] else rb"\\", whole) if b"\\" in whole else whole


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked if it is compressed."""
    with open_regular(path) as file:
        begin = file.read(3)
        file.seek(3 if begin == b"\xef\xbb\xbf" else 0)  # a byte order mark is no JSON
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if begin.startswith(b"\x1f\x8b") else file


def _header(path: Path) -> tuple[str, dict[str, Any]]:
    """Where the events are, as ijson names it, and what stands before them: the device and the rank."""
    header: dict[str, Any] = {}
    builder, key = ijson.ObjectBuilder(), ""
    with _opened(path) as file:
        for prefix, event, value in ijson.parse(_MendedFile(file), use_float=True, buf_size=CHUNK):
            if not prefix and event == "start_array":
                return "item", {}
            if prefix == "traceEvents":
                break
            if not prefix and event == "map_key":
                key, builder = value, ijson.ObjectBuilder()
            elif prefix and key in ("deviceProperties", "distributedInfo"):
                builder.event(event, value)
                header[key] = builder.value
    return "traceEvents.item", header


def _events(path: Path, place: str, columns: _Columns) -> str:
    """Take all events; returns what is wrong with the file's end, or nothing."""
    with _opened(path) as file:
        text = _MendedFile(file)
        try:
            for event in ijson.items(text, place, use_float=True, buf_size=CHUNK):
                columns.take(event)
        except (ijson.IncompleteJSONError, ValueError) as error:
            cut = text.cut or "premature EOF" in str(error)
            return "was cut off" if cut else "is damaged"
    return ""


def read_trace(path: Path) -> Trace:
    """Read one rank's trace: a ``.json`` or ``.json.gz`` that ``torch.profiler`` wrote.

    Raises:
        BadInput: if it is none, or has neither GPU events nor operators.
    """
    columns, broken = _Columns(), ""
    try:
        place, header = _header(path)
        broken = _events(path, place, columns)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; {RECORD}") from error
    except (ijson.JSONError, ValueError, RecursionError) as error:
        raise _no_trace(path, "is not JSON") from error
    if not columns.gpu.columns["start"] and not columns.op.columns["start"]:
        raise _no_trace(
            path, f"{broken} before its first kernel or operator" if broken else "has no kernels or operators"
        )
    return _trace_of(path, columns, header, broken)


def _no_trace(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} is not a Kineto trace of PyTorch, the only kind that moelab reads: it {why}; {RECORD}")


def _trace_of(path: Path, columns: _Columns, header: dict[str, Any], broken: str) -> Trace:
    name, names, notes = path.name, list(columns.names), []
    events = columns.gpu.rows("start", "end", "stream", "name")  # equal ones beside each other
    count = len(events)
    if count:
        far = abs(events["start"] - np.median(events["start"])) > LONGEST_US  # such as an event at 0 among dates
        events = events[~far]
        columns.damaged += int(far.sum())
        # an event that was written twice has the same correlation, and the sort has put both beside each other
        same = ["start", "end", "name", "stream", "device", "correlation"]
        is_repeated = (events[same][1:] == events[same][:-1]) & (events["correlation"][1:] >= 0)
        events = events[np.concatenate([[True], ~is_repeated])]
        if twice := int(is_repeated.sum()):
            notes.append(f"{name}: {twice:,} of {count:,} kernels and copies appear twice and are counted once")
    if broken:
        notes.append(f"{name} {broken}: it ends after {columns.read:,} events, and what followed is missing")
    if columns.damaged:
        notes.append(f"{name}: {columns.damaged:,} of {columns.read:,} events are damaged and were left out")
    if columns.without_duration:
        notes.append(f"{name}: {columns.without_duration:,} kernels and copies have no duration and take no time here")
    devices, counts = np.unique(events["device"], return_counts=True)
    device = int(devices[counts.argmax()]) if count else -1  # most events are of the rank's own
    if len(devices) > 1:
        others = ", ".join(str(one) for one in devices if one != device)
        notes.append(f"{name} has events of devices {device} and {others}; only those of {device} are shown")
        events = events[events["device"] == device]
    if not count:
        launched = any("launch" in one.lower() for one in names)
        why = ", though calls launched some: the profiler ran without ProfilerActivity.CUDA or without access to CUPTI"
        notes.append(f"{name} has no GPU kernels{why if launched else ''}; the operators' own CPU time is shown")
    return Trace(
        path=path,
        rank=_rank(header, name),
        gpu=_gpu(header, device) if count else None,
        names=names,
        events=events,
        calls=columns.call.rows("thread", "start"),
        ops=columns.op.rows("thread", "start", "end"),
        collectives=columns.collectives,
        shapes=[json.loads(shape) for shape in columns.shapes],
        steps=sorted(columns.steps, key=lambda step: step[1]),
        notes=tuple(notes),
    )


def _gpu(header: dict[str, Any], device: int) -> str:
    properties = header.get("deviceProperties")
    known = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    own = sorted(known, key=lambda one: one.get("id") != device)
    return str(own[0].get("name")) if own else UNNAMED_GPU


def _rank(header: dict[str, Any], name: str) -> int | None:
    """The global rank: torch.distributed's own word, else the file's name, which is anyone's."""
    distributed = header.get("distributedInfo")
    in_header = _whole(distributed.get("rank")) if isinstance(distributed, dict) else -1
    in_name = re.search(r"rank[_-]?(\d+)", name)
    rank = in_header if in_header >= 0 else _whole(in_name and in_name[1])
    return rank if rank >= 0 else None


def _naturally(path: Path) -> list[tuple[int, str]]:
    """``iteration_20`` before ``iteration_100``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def trace_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Files of the traces at paths: each a file, or a folder, such as a run, that has them somewhere below.

    Raises:
        BadInput: if there is nothing.
    """
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            there = [one for one in sorted(path.rglob("*"), key=_naturally) if re.search(r"\.json(\.gz)?$", one.name)]
            named = [one for one in there if re.search(r"trace|kineto", one.name) or "trac" in one.parent.name]
            named = named or [one for one in there if one.parent == path and re.search(r"rank[_-]?\d", one.name)]
            if not named:
                raise BadInput(f"no trace (trace*.json or .json.gz) below {path}; {RECORD}")
            yield from named
        elif path.exists():
            raise BadInput(f"{path} is no regular file; give a trace, a folder of traces, or a run")
        else:
            raise BadInput(f"{path} does not exist; give a trace, a folder of traces, or a run")
