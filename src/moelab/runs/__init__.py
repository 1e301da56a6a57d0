"""Run directories, and the metrics table that every source of a run's metrics is read into."""

from __future__ import annotations

from moelab.runs.log import LogFollower, LogRead, NotALog, StepRow, iter_rows, read_log
from moelab.runs.table import (
    COLUMNS,
    VALIDATION_COLUMNS,
    MetricsRead,
    cluster_tps,
    combine,
    merge_segments,
    metrics_table,
    overlap,
    throughput_rows,
)
from moelab.runs.tensorboard import NotATensorBoardFolder, read_tensorboard
from moelab.runs.wandb_export import NotAWandbExport, read_wandb

__all__ = [
    "COLUMNS",
    "VALIDATION_COLUMNS",
    "LogFollower",
    "LogRead",
    "MetricsRead",
    "NotALog",
    "NotATensorBoardFolder",
    "NotAWandbExport",
    "StepRow",
    "cluster_tps",
    "combine",
    "iter_rows",
    "merge_segments",
    "metrics_table",
    "overlap",
    "read_log",
    "read_tensorboard",
    "read_wandb",
    "throughput_rows",
]
