"""Read TensorBoard events of TorchTitan runs from elsewhere into the metrics table, by TensorBoard's own reader.

TorchTitan writes ``tb/<date-hour-minute>/[replica_<i>/][rank_<r>/]events.out.tfevents.<seconds>.…``: each launch starts
a new event file, in a new folder unless it follows within the minute. The files of one launch's ranks are one segment.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from moelab.errors import BadInput
from moelab.runs.table import VALIDATION_METRICS, MetricsRead, merge_ranks, metrics_read, refuse_two_runs, step_column

_RANK_FOLDER = re.compile(r"(rank|replica)[-_]?\d+")
_LAUNCH_FOLDER = re.compile(r"tb|tensorboard|events|\d{8}[-_]\d{4,6}|\d{4}-\d\d-\d\d[T_ -].*")


class NotATensorBoardFolder(BadInput):
    """There is no event file in the folder."""


def read_tensorboard(folder: Path) -> list[MetricsRead]:
    """Read every event file under a folder, of one run or of several.

    A folder whose name is no launch's date, no rank and not ``tb`` is a run, named by its path below ``folder``. Values
    have the float32 precision in which they were written; ``lr`` is the largest of all learning rates, ``time`` the
    moment at which the loss was written.

    Raises:
        NotATensorBoardFolder: no event file lies under ``folder``.
        BadInput: launches of two runs lie in the folder of one.
    """
    files = event_files(folder)
    if not files:
        raise NotATensorBoardFolder(
            f"{folder}: no events.out.tfevents.* file below it. Give a run's tb/ folder; TorchTitan writes one "
            "only if its metrics config has enable_tensorboard set."
        )
    runs: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        parts = file.parent.relative_to(folder).parts
        names = [part for part in parts if not (_RANK_FOLDER.fullmatch(part) or _LAUNCH_FOLDER.fullmatch(part))]
        runs["/".join(names)].append(file)
    return [_read(own, folder / name, name if len(runs) > 1 else "") for name, own in sorted(runs.items())]


def event_files(folder: Path) -> list[Path]:
    """Every event file below a folder, in the order in which they were created; pipes and devices are none."""
    files = [Path(here, name) for here, _, names in os.walk(folder) for name in names if "events.out.tfevents." in name]
    return sorted(filter(Path.is_file, files), key=_created)


def _created(file: Path) -> tuple[float, str]:
    seconds = file.name.split(".")[3]  # events.out.tfevents.<seconds>.<host>
    return (float(seconds) if seconds.isdigit() else math.inf, file.name)


def _read(files: Iterable[Path], source: Path, name: str) -> MetricsRead:
    """Read the event files of one run, in time order."""
    launches: dict[tuple[Any, ...], int] = {}
    seen: Counter[Path] = Counter()  # a rank's files in one folder are launches within one minute
    steps: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for file in files:
        seen[file.parent] += 1
        if scalars := list(_scalars(file)):
            parts = (part for part in file.parent.parts if not _RANK_FOLDER.fullmatch(part))
            segment = launches.setdefault((*parts, seen[file.parent]), len(launches))
            steps += _rows(segment, scalars, step_column)
            held_out += _rows(segment, scalars, VALIDATION_METRICS.get)
    columns = merge_ranks(steps)
    refuse_two_runs(columns, source)
    return metrics_read(columns, merge_ranks(held_out), run=name or None)


def _rows(
    segment: int, scalars: Iterable[tuple[str, Any]], column_of: Callable[[str], str | None]
) -> Iterator[dict[str, Any]]:
    """What one file has of each step; of several scalars for one column, such as learning rates, the largest."""
    rows: dict[int, dict[str, Any]] = {}
    for tag, scalar in scalars:
        if column := column_of(tag):
            row = rows.setdefault(scalar.step, {"segment": segment, "step": scalar.step, "time": scalar.wall_time})
            row["time"] = min(row["time"], scalar.wall_time)
            row[column] = scalar.value if column not in row else max(row[column], scalar.value)
    yield from rows.values()


def _scalars(file: Path) -> Iterator[tuple[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to load

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    for tag in events.Tags()["scalars"]:
        yield from ((tag, scalar) for scalar in events.Scalars(tag))
