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
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
HEADER = 1 << 21
"""Bytes in which Kineto names the GPU and the rank, before the events."""
DEEPEST = 1000
"""Brackets that a chunk may leave open: a trace has about six, and the parser's memory grows with their square."""
LONGEST_US = 3.6e9
"""Kineto has written durations of 2⁶⁴ ns and starts at 0; what is so far from the rest is no part of a step."""
UNNAMED_GPU = "a GPU that is not named"
RECORD = "record one with torch.profiler: prof.export_chrome_trace('trace.json.gz')"

GPU, CALL, OP, ANNOTATION = 1, 2, 3, 4
"""Kinds of events: what ran on the GPU, calls that launch or wait, operators, and annotations around them."""
_KINDS = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), GPU),
    **dict.fromkeys(("cuda_runtime", "cuda_driver"), CALL),
    **{"cpu_op": OP, "user_annotation": ANNOTATION},
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

_NUMBERS = {  # by column, where an event has it; Kineto writes the device and the stream as process and thread too
    "stream": ("stream", "tid"),
    "device": ("device", "pid"),
    "correlation": ("correlation",),
    "external": ("External id", "external id"),
    "graph": ("graph id",),
    "sequence": ("Sequence number",),
    "forward_thread": ("Fwd thread id",),
}
_COLUMNS = ("kind", "name", "thread", "collective", "shape")
_ROW = np.dtype(
    [("start", "f8"), ("end", "f8"), *((one, "i8") for one in _NUMBERS), *((one, "i4") for one in _COLUMNS)]
)
_PACKED = struct.Struct(f"=2d{len(_NUMBERS)}q{len(_COLUMNS)}i")


class Collective(NamedTuple):
    """What the profiler says of a collective: its name, elements in or out, process group, and order in it."""

    name: str
    elements: int
    group: str
    order: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """One rank's trace: times in µs, whole numbers -1 where they are not told."""

    path: Path
    rank: int | None  # global; None where neither the file nor its name says
    gpu: str | None  # that events ran on, or UNNAMED_GPU; None for a CPU
    events: Rows  # what ran on the GPU, by start
    calls: Rows  # by thread and start
    ops: Rows  # operators and annotations, by thread and start, of those that begin together the longest first
    names: Sequence[str]  # which a column is an index of, as of the next two
    collectives: Sequence[Collective]
    shapes: Sequence[Any]  # dimensions of a product's operands
    steps: Sequence[tuple[str, float, float]]  # the profiler's, by start: name, start and end on the host
    notes: tuple[str, ...]

    def named(self, rows: Rows, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
        """Which of some rows have a name in which a pattern is found."""
        return np.isin(rows["name"], [index for index, name in enumerate(self.names) if pattern.search(name)])


class _Events:
    """What is kept of a file's events: packed rows, and what columns of them number."""

    def __init__(self) -> None:
        self.packed = bytearray()
        self.names: dict[str, int] = {}
        self.threads: dict[Any, int] = {}
        self.collectives: dict[Collective, int] = {}
        self.shapes: dict[str, int] = {}
        self.steps: list[tuple[str, float, float]] = []
        self.read = self.damaged = self.endless = 0

    def take(self, event: Any) -> None:
        """Keep an event's numbers, if it is one that counts."""
        self.read += 1
        if isinstance(event, dict) and event.get("ph") == "X" and (kind := _KINDS.get(str(event.get("cat")).lower())):
            try:
                self._keep(kind, event)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.damaged += 1

    def _keep(self, kind: int, event: dict[str, Any]) -> None:
        name, start = str(event["name"]), float(event["ts"])
        end = start + max(float(event.get("dur") or 0.0), 0.0)  # in this order NaN stays NaN, and is damaged
        if not isfinite(end) or end - start > LONGEST_US:
            raise ValueError(f"{name} ends at {end}")
        if name.startswith("ProfilerStep"):
            self.steps.append((name, start, end))
        elif not (kind == CALL and not _CALLS.search(name)) and not (kind == OP and _VIEWS.match(name)):
            self.endless += kind == GPU and event.get("dur") is None
            told = {**event, **(event.get("args") or {})}
            collective, shape = -1, -1
            if "Collective name" in told:
                collective = _number_of(_collective(told), self.collectives)
            if "Input Dims" in told and _GEMM_OPS.match(name):
                shape = _number_of(json.dumps(told["Input Dims"]), self.shapes)
            numbers = [_whole(next((told[key] for key in keys if key in told), None)) for keys in _NUMBERS.values()]
            thread = _number_of((event.get("pid"), event.get("tid")), self.threads)
            numbers += kind, _number_of(name, self.names), thread, collective, shape
            self.packed += _PACKED.pack(start, end, *numbers)


def _number_of(one: Any, known: dict[Any, int]) -> int:
    return known.setdefault(one, len(known))


def _whole(value: Any) -> int:
    """A whole number that fits a column, whatever type it was written as; -1 for what is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 1 << 62 else -1


def _collective(told: dict[str, Any]) -> Collective:
    group = f"{told.get('Process Group Description', '')} {told.get('Process Group Name', '')}"
    # a gather's input and a scatter's output are a shard: the larger one is what is moved
    elements = max(0, _whole(told.get("In msg nelems")), _whole(told.get("Out msg nelems")))
    return Collective(str(told["Collective name"]), elements, group, _whole(told.get("Seq")))


class _MendedFile:
    """A file's bytes as valid JSON, for :mod:`ijson`: what PyTorch is known to get wrong is put right."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest, self.cut = file, b"", False

    def read(self, size: int) -> bytes:
        """At least a byte, or none at the end; up to the last comma or line break, so that no token is torn."""
        if not size:
            return b""
        data, end, more = self._rest, 0, b"more"
        while more and not end:
            try:
                more = self._file.read(CHUNK)
            except (EOFError, OSError, zlib.error):  # gzip: cut off, or damaged from here on
                more, self.cut = b"", True
            data += more
            end = max(data.rfind(b"\n"), data.rfind(b",")) + 1 if more else len(data)
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


def _read_into(events: _Events, path: Path) -> tuple[dict[str, Any], str]:
    """Take all events of a file; returns what stands before them, and what is wrong with the file, or nothing."""
    header, place = {}, "traceEvents.item"
    with suppress(ValueError, RecursionError), _opened(path) as file:
        text, head, more = _MendedFile(file), b"", b"more"
        while more and b'"traceEvents"' not in head and len(head) < HEADER:
            more = text.read(CHUNK)
            head += more
        if head.lstrip().startswith(b"["):
            place = "item"
        elif (end := head.find(b'"traceEvents"')) > 0:
            header = json.loads(head[:end].rstrip().removesuffix(b",") + b"}")
    with _opened(path) as file:
        text = _MendedFile(file)
        try:
            for event in ijson.items(text, place, use_float=True, buf_size=CHUNK):
                events.take(event)
        except (ijson.JSONError, ValueError, RecursionError) as error:
            return header, "was cut off" if text.cut or "premature EOF" in str(error) else "is damaged"
    return header, ""


def read_trace(path: Path) -> Trace:
    """Read one rank's trace: a ``.json`` or ``.json.gz`` that ``torch.profiler`` wrote.

    Raises:
        BadInput: if it is none, or has neither GPU events nor operators.
    """
    taken = _Events()
    try:
        header, broken = _read_into(taken, path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; {RECORD}") from error
    rows = np.frombuffer(taken.packed, _ROW)
    events, calls, ops = rows[rows["kind"] == GPU], rows[rows["kind"] == CALL], rows[rows["kind"] >= OP]
    if not len(events) and not len(ops):
        why = "has no kernels or operators"
        if broken:
            why = f"{broken} before its first kernel or operator" if taken.read else "is not JSON, or was cut off"
        raise BadInput(f"{path} is not a Kineto trace of PyTorch, the only kind that moelab reads: it {why}; {RECORD}")
    on_gpu, device, others = len(events) > 0, 0, ""
    if on_gpu:
        far = abs(events["start"] - np.median(events["start"])) > LONGEST_US  # such as an event at 0 among dates
        taken.damaged += int(far.sum())
        events["device"] = np.maximum(events["device"], 0)  # what tells none is of the first
        devices, counts = np.unique(events["device"], return_counts=True)
        device = int(devices[counts.argmax()])  # most events are of the rank's own
        others = ", ".join(str(one) for one in devices if one != device)
        events = events[~far & (events["device"] == device)]
        events = events[np.lexsort((events["name"], events["stream"], -events["end"], events["start"]))]
    launched = any("launch" in name.lower() for name in taken.names)
    without_cupti = ", though calls launched some: the profiler ran without ProfilerActivity.CUDA or access to CUPTI"
    notes = {
        f" {broken}: it ends after {taken.read:,} events, and what followed is missing": broken,
        f": {taken.damaged:,} of {taken.read:,} events are damaged and were left out": taken.damaged,
        f": {taken.endless:,} kernels and copies have no duration and take no time here": taken.endless,
        f" has events of devices {device} and {others}; only those of {device} are shown": others,
        f" has no GPU kernels{without_cupti if launched else ''}; the operators' own CPU time is shown": not on_gpu,
    }
    return Trace(
        path=path,
        rank=_rank(header, path.name),
        gpu=_gpu(header, device) if on_gpu else None,
        events=events,
        calls=calls[np.lexsort((calls["start"], calls["thread"]))],
        ops=ops[np.lexsort((-ops["end"], ops["start"], ops["thread"]))],
        names=tuple(taken.names),
        collectives=tuple(taken.collectives),
        shapes=[json.loads(shape) for shape in taken.shapes],
        steps=sorted(taken.steps, key=lambda step: step[1]),
        notes=tuple(f"{path.name}{note}" for note, told in notes.items() if told),
    )


def _gpu(header: dict[str, Any], device: int) -> str:
    properties = header.get("deviceProperties")
    known = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    own = sorted(known, key=lambda one: one.get("id") != device)
    return str(own[0].get("name")) if own else UNNAMED_GPU


def _rank(header: dict[str, Any], name: str) -> int | None:
    """The global rank: torch.distributed's own word, else the file's name, which is anyone's."""
    told, in_name = header.get("distributedInfo"), re.search(r"rank[_-]?(\d+)", name)
    rank = _whole(told.get("rank")) if isinstance(told, dict) else -1
    return rank if rank >= 0 else int(in_name[1]) if in_name else None


def trace_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Files of the traces at paths: each a file, or a folder, such as a run, that has them somewhere below.

    Raises:
        BadInput: if there is nothing.
    """
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            # iteration_20 before iteration_100
            there = [one for one in path.rglob("*.json*") if one.name.endswith((".json", ".json.gz"))]
            there.sort(key=lambda one: re.sub(r"\d+", lambda number: number[0].zfill(9), str(one)))
            named = [one for one in there if re.search(r"trace|kineto", one.name) or "trac" in one.parent.name]
            named = named or [one for one in there if one.parent == path and re.search(r"rank[_-]?\d", one.name)]
            if not named:
                raise BadInput(f"no trace (trace*.json or .json.gz) below {path}; {RECORD}")
            yield from named
        else:
            wrong = "is no regular file" if path.exists() else "does not exist"
            raise BadInput(f"{path} {wrong}; give a trace, a folder of traces, or a run")
