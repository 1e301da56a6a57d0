"""Run directories, and the metrics table that every source of a run's metrics is read into."""

from __future__ import annotations

from moelab.runs.follow import LogFollower
from moelab.runs.log import read_log
from moelab.runs.log_text import NotALog
from moelab.runs.table import COLUMNS, MetricsRead, combine, merge_segments, metrics_table, throughput_rows
from moelab.runs.tensorboard import NotATensorBoardFolder, read_tensorboard
from moelab.runs.wandb_export import read_wandb

__all__ = [
    "COLUMNS",
    "LogFollower",
    "MetricsRead",
    "NotALog",
    "NotATensorBoardFolder",
    "combine",
    "merge_segments",
    "metrics_table",
    "read_log",
    "read_tensorboard",
    "read_wandb",
    "throughput_rows",
]
