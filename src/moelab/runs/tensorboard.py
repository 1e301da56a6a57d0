"""Read the TensorBoard events of a TorchTitan run into the metrics table.

TorchTitan writes ``tb/<date-hour-minute>/[replica_<i>/][rank_<r>/]events.out.tfevents.<seconds>.…``: each launch starts
a new event file, in a new folder unless it follows within the minute. The files of one launch's ranks are one segment.
A launch whose file holds no step, killed before the writer's first flush at 120 s, is not a segment.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from moelab.errors import BadInput
from moelab.runs.table import (
    REPORTED_NAN,
    VALIDATION_METRICS,
    Columns,
    MetricsRead,
    grouped,
    metrics_read,
    ranks_to_rows,
    separate_runs,
    step_column,
)

_RANK_FOLDER = re.compile(r"(rank|replica|worker|node)[-_]?\d+")
_LAUNCH_FOLDER = re.compile(
    r"tb|tensorboard|events|\d{8}[-_]\d{4,6}|\d{4}-\d\d-\d\d[T_ -].*|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*"
)
_LENGTH: Final = struct.Struct("<Q")
_LONGEST_BYTES: Final = 1 << 14
"""Of a record that is read: a longer one is a picture or a text, and none of its values is a scalar."""


class NotATensorBoardFolder(BadInput):
    """There is no event file in the folder."""


def read_tensorboard(folder: str | Path) -> MetricsRead:
    """Read every event file under a folder of one run.

    Values have the float32 precision in which they were written. ``lr`` is the largest of the optimizers' and parameter
    groups' learning rates, ``time`` the moment at which the loss was written.

    Raises:
        NotATensorBoardFolder: no event file lies under ``folder``.
    """
    damage: list[str] = []
    columns = _columns(_launches(_event_files(Path(folder))), damage)
    return metrics_read(*columns, notes=tuple(damage))


def tensorboard_runs(folder: Path) -> list[MetricsRead]:
    """Read every event file under a folder of one run or of several.

    A folder whose name is no launch's date, no rank and not ``tb`` is a run, named by its path below ``folder``.

    Raises:
        NotATensorBoardFolder: no event file lies under ``folder``.
    """
    files = _event_files(folder)
    runs: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        parts = [*file.parent.relative_to(folder).parts]
        names = [part for part in parts if not (_RANK_FOLDER.fullmatch(part) or _LAUNCH_FOLDER.fullmatch(part))]
        runs["/".join(names)].append(file)
    reads = []
    for name, own in sorted(runs.items()):
        damage: list[str] = []
        columns = _columns(_launches(own), damage)
        called = (name or None) if len(runs) > 1 else None
        reads += separate_runs(*columns, source=folder, run=called, notes=tuple(damage))
    return reads


def _columns(launches: list[list[Path]], damage: list[str]) -> tuple[Columns, Columns, dict[int, tuple[int, float]]]:
    """Return what :func:`metrics_read` takes, of the launches that logged anything; add what is lost to ``damage``."""
    # The number of a file stands for its rank: only which rows are of one rank matters.
    every = ([(rank, one) for rank, file in enumerate(files) for one in _scalars(file, damage)] for files in launches)
    logged = [scalars for scalars in every if scalars]
    failures = {}
    for number, scalars in enumerate(logged):
        losses = [one for _, one in scalars if step_column(one.tag) == "loss"]
        pairs = chain.from_iterable(zip(one.step.tolist(), one.value.tolist(), strict=True) for one in losses)
        failed = [(step, loss) for step, loss in pairs if not math.isfinite(loss)]
        if failed:
            failures[number] = min(failed, key=lambda failure: failure[0])
    return _rows(logged, step_column), _rows(logged, VALIDATION_METRICS.get), failures


def _rows(logged: list[list[tuple[int, Scalars]]], column_of: Callable[[str], str | None]) -> Columns:
    """Turn the scalars of each launch, with the numbers of their files, into one row per segment and step."""
    parts = [
        (column, segment, rank, one)
        for segment, scalars in enumerate(logged)
        for rank, one in scalars
        if (column := column_of(one.tag))
    ]
    if not parts:
        none = np.array([], dtype="int64")
        return {"segment": none, "step": none}
    counts = [len(one.step) for *_, one in parts]
    segment, rank = (np.repeat([part[field] for part in parts], counts) for field in (1, 2))
    step, value, time = (np.concatenate(columns) for columns in zip(*(one[1:] for *_, one in parts), strict=True))
    order, starts = grouped([segment, rank, step])
    rows: dict[str, NDArray[Any]] = {
        "segment": segment[order][starts],
        "step": step[order][starts],
        "time": np.minimum.reduceat(time[order], starts),  # the loss is the first that TorchTitan writes of a step
        "loss": np.full(len(starts), math.nan),
    }
    for name in dict.fromkeys(column for column, *_ in parts):
        own = np.repeat([column == name for column, *_ in parts], counts)
        given = np.where(np.isnan(value), REPORTED_NAN, value) if name == "grad_norm" else value
        # The largest of parameter groups and of ranks; `fmax` passes over the NaN of those that have none.
        rows[name] = np.fmax.reduceat(np.where(own, given, math.nan)[order], starts)
    return ranks_to_rows(rows, ["segment", "step"])


def event_files(folder: Path) -> list[Path]:
    """Every event file below a folder, in no order; a link may lead nowhere."""
    walked = os.walk(folder)  # a tenth of the time of rglob
    return [Path(here, name) for here, _, names in walked for name in names if name.startswith("events.out.tfevents.")]


def _event_files(folder: Path) -> list[Path]:
    files = [file for file in event_files(folder) if file.is_file()]
    if not files:
        raise NotATensorBoardFolder(
            f"{folder}: no events.out.tfevents.* file below it. Give a run's tb/ folder; TorchTitan writes one "
            "only if its metrics config has enable_tensorboard set."
        )
    return sorted(files, key=_created)


def _launches(files: list[Path]) -> list[list[Path]]:
    """Return the event files of each launch, in time order."""
    streams = defaultdict(list)  # a rank's files in one folder are launches within one minute
    for file in files:
        streams[file.parent].append(file)
    launches = defaultdict(list)
    for parent, files in streams.items():
        parts = [part for part in parent.parts if not _RANK_FOLDER.fullmatch(part)]
        for number, file in enumerate(files):
            launches[*parts, number].append(file)
    return sorted(launches.values(), key=lambda files: min(map(_created, files)))


def _created(file: Path) -> tuple[float, str]:
    seconds = file.name.split(".")[3]  # events.out.tfevents.<seconds>.<host>
    return (float(seconds) if seconds.isdigit() else math.inf, file.name)


class Scalars(NamedTuple):
    """Values of one tag: ``step`` int64, ``value`` and ``time`` float64, of one length."""

    tag: str
    step: NDArray[np.int64]
    value: NDArray[np.float64]
    time: NDArray[np.float64]


def _scalars(file: Path, damage: list[str]) -> Iterator[Scalars]:
    """Yield all scalars of a file, in any order, and add how many of its records are lost to ``damage``.

    A run has thousands of records, and those of one tag differ in time, step and value alone. So protobuf reads one of
    each kind, and the others are read by the places that these have in it.
    """
    # Imported here: whoever reads logs does not need it. Its own reader takes a hundred times as long.
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    content, starts, sizes, lost = _sound_records(file.read_bytes())
    if lost:
        damage.append(f"{file.name} is damaged: {lost}")
    for records, width in _records_of_one_form(content, starts, sizes):
        event = Event.FromString(records[0].tobytes())
        # Protobuf's number: seven bits a byte, the lowest first.
        step = (records[:, 10 : 10 + width].astype(np.int64) & 127) << 7 * np.arange(width)
        values = [one for one in event.summary.value if one.HasField("simple_value")]
        if len(values) == 1:
            plain = Summary.Value(tag=values[0].tag, simple_value=values[0].simple_value)
            written = Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=[plain]))
            is_plain = written.SerializeToString() == records[0].tobytes()  # nothing else is in it
            if is_plain and event.wall_time and event.step and step[0].sum() == event.step:  # zeros are not written
                value, time = (np.ascontiguousarray(part) for part in (records[:, -4:], records[:, 1:9]))
                yield Scalars(
                    plain.tag, step.sum(axis=1), value.view("<f4")[:, 0].astype(float), time.view("<f8")[:, 0]
                )
                continue
        for event in map(Event.FromString, map(bytes, records)):
            for one in event.summary.value:
                if one.HasField("simple_value"):
                    numbers = [event.step], [one.simple_value], [event.wall_time]
                    yield Scalars(one.tag, *map(np.array, numbers))


def _records_of_one_form(
    content: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield records that are alike but for bytes 1 to 8, the number from byte 10 on, and the last 4; and its width."""
    for size in np.unique(sizes[sizes > 0]).tolist():
        records = sliding_window_view(content, size)[starts[sizes == size]]
        # A number has seven bits in each byte, and its last byte is below 128.
        widths = 1 + np.cumprod(records[:, 10:18] >= 128, axis=1).sum(axis=1)
        for width in np.unique(widths).tolist():
            same = records[widths == width]
            fixed = same[:, [0, 9, *range(10 + width, size - 4)]] if size > 10 else same
            _, form = np.unique(np.ascontiguousarray(fixed).view(f"V{fixed.shape[1]}"), return_inverse=True)
            for number in range(form.max() + 1):
                yield same[form.reshape(-1) == number], width


def _sound_records(data: bytes) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], str]:
    """Return the bytes of a TFRecord file, where its sound records start, their lengths, and what is lost, in words.

    A record is its length, the length's checksum, the content and its checksum. Where a length is damaged or the file
    was cut, nothing behind it can be found.
    """
    starts, sizes, position = [], [], 0
    while position + 12 <= len(data):
        (size,) = _LENGTH.unpack_from(data, position)
        starts.append(position)
        sizes.append(min(size, len(data)))  # a damaged one may be more than an int64 holds
        position += 16 + size
    content, start, size_ = np.frombuffer(data, np.uint8), np.array(starts, np.int64), np.array(sizes, np.int64)
    unsound = np.flatnonzero(~_are_sound(content, start, np.full(len(start), 8)))
    known = slice(unsound[0] if len(unsound) else None)
    start, size_ = start[known] + 12, size_[known]
    small = (size_ <= _LONGEST_BYTES) & (start + size_ + 4 <= len(data))  # and whole: of the last, a kill leaves a part
    start, size_ = start[small], size_[small]
    kept = _are_sound(content, start, size_)
    lost = [f"{len(kept) - kept.sum()} of {len(kept)} records cannot be read"] if not kept.all() else []
    lost += [f"what follows record {unsound[0]} cannot be found"] if len(unsound) else []
    return content, start[kept], size_[kept], " and ".join(lost)


def _are_sound(content: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell whether the bytes behind each start have the masked CRC-32C that stands behind them.

    One byte of every record at a time: in Python's own loop over bytes a million records take minutes.
    """
    if not len(starts):  # the file may be shorter than a checksum
        return np.empty(0, bool)
    longest_first = np.argsort(-sizes, kind="stable")
    starts, ends = starts[longest_first], (starts + sizes)[longest_first]
    state = np.full(len(starts), 0xFFFFFFFF, np.uint32)
    for place in range(int(sizes.max(initial=0))):
        # The records that have a byte at this place are the first ones.
        still = np.searchsorted(starts - ends, -place, side="left")
        state[:still] = _CRC_TABLE[(state[:still] ^ content[starts[:still] + place]) & 0xFF] ^ (state[:still] >> 8)
    masked = ((~state >> 15) | (~state << 17)) + np.uint32(0xA282EAD8)
    is_sound = np.empty(len(starts), bool)
    is_sound[longest_first] = masked == sliding_window_view(content, 4)[ends].copy().view("<u4")[:, 0]
    return is_sound


def _crc_table() -> NDArray[np.uint32]:
    """CRC-32C of each byte (RFC 3720, appendix B.4); zlib has CRC-32 alone."""
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1).astype(np.uint32)
    return crc


_CRC_TABLE = _crc_table()
