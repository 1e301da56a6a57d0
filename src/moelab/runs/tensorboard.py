"""Read the TensorBoard events of a TorchTitan run into the metrics table.

TorchTitan writes ``tb/<date-hour-minute>/[replica_<i>/][rank_<r>/]events.out.tfevents.<seconds>.…``: each launch starts
a new event file, in a new folder unless it follows within the minute. The files of one launch's ranks are one segment.
A launch whose file holds no step, killed before the writer's first flush at 120 s, is not a segment.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moelab.errors import BadInput
from moelab.runs.table import (
    REPORTED_NAN,
    VALIDATION_METRICS,
    MetricsRead,
    metrics_read,
    ranks_to_rows,
    separate_runs,
    step_column,
)

EVENT_FILES = "events.out.tfevents.*"
_RANK_FOLDER = re.compile(r"(rank|replica|worker|node)[-_]?\d+")
_LAUNCH_FOLDER = re.compile(
    r"tb|tensorboard|events|\d{8}[-_]\d{4,6}|\d{4}-\d\d-\d\d[T_ -].*|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.*"
)
Columns: TypeAlias = tuple[pd.DataFrame, pd.DataFrame, dict[int, tuple[int, float]]]


class NotATensorBoardFolder(BadInput):
    """There is no event file in the folder."""


def read_tensorboard(folder: str | Path) -> MetricsRead:
    """Read every event file under a folder of one run.

    Values have the float32 precision in which they were written. ``lr`` is the largest of the optimizers' and parameter
    groups' learning rates, ``time`` the moment at which the loss was written.

    Args:
        folder: a run's TensorBoard folder, or any folder above its event files.

    Raises:
        NotATensorBoardFolder: no event file lies under ``folder``.
    """
    return metrics_read(*_columns(_launches(_event_files(Path(folder)))))


def tensorboard_runs(folder: Path) -> list[MetricsRead]:
    """Read every event file under a folder of one run or of several.

    A folder whose name is no launch's date, no rank and not ``tb`` is a run, named by its path below ``folder``.

    Args:
        folder: any folder above event files.

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
        reads += separate_runs(*_columns(_launches(own)), source=folder, run=(name or None) if len(runs) > 1 else None)
    return reads


def _columns(launches: list[list[Path]]) -> Columns:
    every = (_scalars(files) for files in launches)
    logged = [scalars for scalars in every if not scalars.empty]
    rows = _numbered([_rows(scalars, {tag: step_column(tag) for tag in scalars["tag"].unique()}) for scalars in logged])
    validation = _numbered([_rows(scalars, VALIDATION_METRICS) for scalars in logged])
    failures = {}
    for number, scalars in enumerate(logged):
        losses = scalars[scalars["tag"].map(step_column) == "loss"]
        failed = losses[~np.isfinite(losses["value"])].sort_values("step")
        if len(failed):
            failures[number] = int(failed["step"].iloc[0]), float(failed["value"].iloc[0])
    return rows, validation, failures


def _numbered(parts: list[pd.DataFrame]) -> pd.DataFrame:
    numbered = [part.assign(segment=index) for index, part in enumerate(parts)]
    return pd.concat(numbered) if numbered else pd.DataFrame({"segment": [], "step": []})


def _event_files(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob(EVENT_FILES) if file.is_file()]  # a link may lead nowhere
    if not files:
        raise NotATensorBoardFolder(
            f"{folder}: no events.out.tfevents.* file below it. Give a run's tb/ folder; TorchTitan writes one "
            "only if its metrics config has enable_tensorboard set."
        )
    return sorted(files, key=_created)


def _launches(files: list[Path]) -> list[list[Path]]:
    """Return the event files of each launch, in time order."""
    streams = defaultdict(list)
    for file in files:
        streams[file.parent].append(file)
    launches = defaultdict(list)
    for parent, files in streams.items():
        parts = [part for part in parent.parts if not _RANK_FOLDER.fullmatch(part)]
        for number, file in enumerate(files):
            launches[*parts, number].append(file)
    return sorted(launches.values(), key=lambda files: min(map(_created, files)))


def _created(file: Path) -> tuple[float, str]:
    seconds = file.name.split(".")[3]
    return (float(seconds) if seconds.isdigit() else math.inf, file.name)


def _scalars(files: list[Path]) -> pd.DataFrame:
    """Return all scalars of one launch: ``rank`` (number of the file), ``tag, step, value, time``."""
    # Imported here: whoever reads logs does not need it. Its own reader takes ten times as long for the same values.
    from tensorboard.compat.proto.event_pb2 import Event

    found = []
    for rank, file in enumerate(files):
        for record in _records(file.read_bytes()):
            event = Event.FromString(record)
            if event.HasField("summary"):
                found += [
                    (rank, value.tag, event.step, value.simple_value, event.wall_time)
                    for value in event.summary.value
                    if value.HasField("simple_value")
                ]
    return pd.DataFrame(found, columns=["rank", "tag", "step", "value", "time"])


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a TFRecord file: length, its checksum, content and its checksum; one that is damaged is left out.

    Where a length is damaged or the file was cut, nothing behind it can be found.
    """
    records, checks, position = [], [], 0
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        end = position + 12 + length
        if end + 4 > len(data):
            break
        records += [data[position : position + 8], data[position + 12 : end]]
        checks += [data[position + 8 : position + 12], data[end : end + 4]]
        position = end + 4
    sound = _checksums(records) == np.frombuffer(b"".join(checks), "<u4")
    for index in range(0, len(records), 2):
        if not sound[index]:
            return
        if sound[index + 1]:
            yield records[index + 1]


def _checksums(records: Sequence[bytes]) -> NDArray[np.uint32]:
    """Masked CRC-32C of each, as TFRecord has it; records of one length are done together."""
    state = np.zeros(len(records), np.uint32)
    lengths = np.array([len(record) for record in records])
    for length in np.unique(lengths):
        (own,) = np.nonzero(lengths == length)
        columns = (
            np.frombuffer(b"".join(records[index] for index in own.tolist()), np.uint8).reshape(len(own), length).T
        )
        crc = np.full(len(own), 0xFFFFFFFF, np.uint32)
        for column in columns:
            crc = _CRC_TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
        state[own] = ~crc
    return np.asarray(((state >> 15) | (state << 17)) + np.uint32(0xA282EAD8), np.uint32)


def _crc_table() -> NDArray[np.uint32]:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1).astype(np.uint32)
    return np.asarray(crc, np.uint32)


_CRC_TABLE: Final = _crc_table()


def _rows(scalars: pd.DataFrame, columns: Mapping[str, str | None]) -> pd.DataFrame:
    """Turn one launch's scalars into one row per step."""
    scalars = scalars[scalars["tag"].map(lambda tag: columns.get(tag) is not None)]
    places, place = np.unique(scalars[["rank", "step"]].to_numpy(), axis=0, return_inverse=True)
    place, names = place.reshape(-1), scalars["tag"].map(columns).to_numpy()
    wide = pd.DataFrame({"rank": places[:, 0], "step": places[:, 1], "loss": math.nan})
    for name in dict.fromkeys(names):
        own, value = names == name, np.full(len(places), math.nan)
        given = scalars["value"].to_numpy(dtype=float)[own]
        np.fmax.at(value, place[own], np.where(np.isnan(given), REPORTED_NAN, given) if name == "grad_norm" else given)
        wide[name] = value
    time = np.full(len(places), math.inf)
    np.minimum.at(time, place, scalars["time"].to_numpy(dtype=float))
    return ranks_to_rows(wide.assign(time=time), ["step"])
