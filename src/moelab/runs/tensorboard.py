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

import numpy as np
import pandas as pd

from moelab.errors import BadInput
from moelab.runs.table import (
    REPORTED_NAN,
    VALIDATION_METRICS,
    MetricsRead,
    failure_reason,
    grad_norms_not_finite,
    metrics_table,
    ranks_to_rows,
    step_column,
    validation_table,
)

_RANK_FOLDER = re.compile(r"(rank|replica)_\d+")


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
    launches = [_scalars(files) for files in _launches(Path(folder))]
    logged = [scalars for scalars in launches if not scalars.empty]
    rows = _numbered([_rows(scalars, {tag: step_column(tag) for tag in scalars["tag"].unique()}) for scalars in logged])
    return MetricsRead(
        rows=metrics_table(rows),
        validation=validation_table(_numbered([_rows(scalars, VALIDATION_METRICS) for scalars in logged])),
        segments=len(logged),
        reason=_reason(logged[-1], len(logged) - 1) if logged else None,
        grad_norm_not_finite=grad_norms_not_finite(rows),
    )


def _numbered(parts: list[pd.DataFrame]) -> pd.DataFrame:
    numbered = [part.assign(segment=index) for index, part in enumerate(parts)]
    return pd.concat(numbered) if numbered else pd.DataFrame({"segment": [], "step": []})


def _launches(folder: Path) -> list[list[Path]]:
    """Return the event files of each launch, in time order."""
    streams = defaultdict(list)
    for file in sorted(folder.rglob("events.out.tfevents.*"), key=_created):
        if file.is_file():  # a link may lead nowhere
            streams[file.parent].append(file)
    if not streams:
        raise NotATensorBoardFolder(
            f"{folder}: no events.out.tfevents.* file below it. Give a run's tb/ folder; TorchTitan writes one "
            "only if its metrics config has enable_tensorboard set."
        )
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


def _reason(scalars: pd.DataFrame, segment: int) -> str | None:
    losses = scalars[scalars["tag"] == "loss_metrics/global_avg_loss"]
    failed = losses[~np.isfinite(losses["value"])].sort_values("step")
    return None if failed.empty else failure_reason(segment, failed["step"].iloc[0], failed["value"].iloc[0])
