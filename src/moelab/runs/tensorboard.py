"""Read the TensorBoard events of a TorchTitan run into the metrics table.

TorchTitan writes ``tb/<date-hour-minute>/[replica_<i>/][rank_<r>/]events.out.tfevents.<seconds>.…``: each launch starts
a new event file, in a new folder unless it follows within the minute. The files of one launch's ranks are one segment.
A launch whose file holds no step, killed before the writer's first flush at 120 s, is not a segment.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

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
    return rows, validation, {number: first for number, scalars in enumerate(logged) if (first := _failure(scalars))}


def _numbered(parts: list[pd.DataFrame]) -> pd.DataFrame:
    numbered = [part.assign(segment=index) for index, part in enumerate(parts)]
    return pd.concat(numbered) if numbered else pd.DataFrame({"segment": [], "step": []})


def _event_files(folder: Path) -> list[Path]:
    files = [file for file in folder.rglob("events.out.tfevents.*") if file.is_file()]  # a link may lead nowhere
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
    # Imported here: it takes a second, and whoever reads logs does not need it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for rank, file in enumerate(files):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
        for tag in events.Tags()["scalars"]:
            found += [(rank, tag, event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
    return pd.DataFrame(found, columns=["rank", "tag", "step", "value", "time"])


def _rows(scalars: pd.DataFrame, columns: Mapping[str, str | None]) -> pd.DataFrame:
    """Turn one launch's scalars into one row per step."""
    named = scalars.assign(column=scalars["tag"].map(columns)).dropna(subset=["column"])
    named["value"] = named["value"].mask((named["column"] == "grad_norm") & named["value"].isna(), REPORTED_NAN)
    wide = named.groupby(["rank", "step", "column"])["value"].max().unstack("column")
    wide["time"] = named.groupby(["rank", "step"])["time"].min()
    if "loss" not in wide:
        wide["loss"] = math.nan
    return ranks_to_rows(wide.reset_index(), ["step"])


def _failure(scalars: pd.DataFrame) -> tuple[int, float] | None:
    losses = scalars[scalars["tag"].map(step_column) == "loss"]
    failed = losses[~np.isfinite(losses["value"])].sort_values("step")
    return None if failed.empty else (int(failed["step"].iloc[0]), float(failed["value"].iloc[0]))
