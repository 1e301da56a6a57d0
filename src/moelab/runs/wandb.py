"""Read a history that was exported from Weights & Biases into the metrics table, by pandas.

CSV or Parquet of ``pandas.DataFrame(wandb.Api().run(…).scan_history())`` has ``_step``, ``_timestamp`` and TorchTitan's
metric names as columns, and may hold several runs with a column that names them. The CSV of a chart in the web page has
``Step`` and a column ``<run> - <metric>`` for each run. Cells are text until their metric is known, because a value
that was *reported* as NaN must not look like one that is missing.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moelab.errors import BadInput
from moelab.files import read_bytes
from moelab.runs.log_text import LogBytes, NotALog
from moelab.runs.table import VALIDATION_METRICS, MetricsRead, merge_ranks, metrics_read, refuse_two_runs, step_column

_STEPS: Final = ("step", "_step", "Step")
_NAMES: Final = ("run_name", "run.name", "Name", "name", "display_name", "run", "run_id", "run.id", "id")
_LAST_SECOND: Final = 1e11
"""Of an epoch's seconds, in the year 5138: more are milliseconds, as W&B's server counts."""
_MISSING: Final = ("", "-", "--", "n/a", "none", "null")
_MOST_BYTES: Final = 1 << 30


def is_export(path: Path) -> bool:
    """Tell whether a file is a W&B export by its name."""
    return path.is_file() and path.name.removesuffix(".gz").endswith((".csv", ".parquet", ".json", ".jsonl"))


def read_wandb(path: Path) -> list[MetricsRead]:
    """Read the runs of an export, named where it names them; ``lr`` is the largest of all ``lr/…`` metrics.

    Raises:
        BadInput: the file cannot be read, has no step column or none of TorchTitan's metrics, or mixes two runs.
    """
    cells = _cells(path)
    step = next((name for name in _STEPS if name in cells), None)
    charts: dict[str | None, dict[str, str]] = {}
    for column in map(str, cells.columns):
        run, _, metric = column.rpartition(" - ")
        if step_column(metric) or metric in VALIDATION_METRICS:
            charts.setdefault(run or None, {})[column] = metric
    if step is None or not charts:
        raise BadInput(
            f"{path}: looked for a step column ({', '.join(_STEPS)}) and one of TorchTitan's metrics (loss_metrics/"
            f"global_avg_loss, throughput(tps), …); found the columns {', '.join(map(str, cells.columns[:8]))}"
        )
    steps = pd.to_numeric(cells[step], errors="coerce")
    if "_step" in cells:  # where only some rows have the metric `step`
        steps = steps.fillna(pd.to_numeric(cells["_step"], errors="coerce"))
    cells = cells.assign(step=steps, time=_times(cells)).dropna(subset="step").astype({"step": "int64"})
    name = next((name for name in _NAMES if name in cells), None)
    runs: list[tuple[Any, pd.DataFrame]] = [*cells.groupby(name, sort=False)] if name else [(None, cells)]
    reads = []
    for chart, metrics in charts.items():
        for called, own in runs:
            history = own[["step", "time", *metrics]].rename(columns=metrics)
            # Rows that only hold another run's metrics, or system metrics, are no steps of this one.
            history = history[(history[[*metrics.values()]] != "").any(axis=1)]
            history.insert(0, "segment", _launches(history))
            columns = merge_ranks(_records(history, step_column))
            refuse_two_runs(columns, path)
            held_out = merge_ranks(_records(history, VALIDATION_METRICS.get))
            run_name = chart if called is None else str(called)
            reads.append(metrics_read(columns, held_out, notes=[*_no_numbers(history)], run=run_name))
    return reads


def _cells(path: Path) -> pd.DataFrame:
    """The file's cells as text, empty where there is no value."""
    try:
        if path.name.endswith(".parquet"):
            frame = pd.read_parquet(io.BytesIO(read_bytes(path, _MOST_BYTES)))
            frame = frame.reset_index(drop=frame.index.name is None)  # `_step` may be the index
            return frame.astype(object).where(frame.notna(), "").astype(str)
        if not path.name.removesuffix(".gz").endswith(".csv"):
            raise ValueError("JSON is not read")
        text = LogBytes(path).beginning(_MOST_BYTES).decode("utf-8-sig")  # a spreadsheet puts a mark in front
        separator = max(",;\t", key=text.partition("\n")[0].count)
        return pd.read_csv(io.StringIO(text), sep=separator, dtype=str, keep_default_na=False)
    except (OSError, ValueError, NotALog) as error:
        raise BadInput(
            f"{path}: {str(error).strip()}. Give a .csv or .parquet export of a W&B run's history, such as "
            "`pandas.DataFrame(wandb.Api().run('entity/project/id').scan_history()).to_csv('history.csv')`."
        ) from error


def _times(cells: pd.DataFrame) -> pd.Series[float]:
    if "_timestamp" not in cells:
        return pd.Series(math.nan, index=cells.index)
    times = pd.to_numeric(cells["_timestamp"], errors="coerce").astype("float64")
    return times.where(times < _LAST_SECOND, times / 1000)


def _launches(history: pd.DataFrame) -> pd.Series[Any]:
    """The launch of each row: one begins where a step goes back, if any step is there twice."""
    goes_back = history["step"].diff() < 0
    if not (goes_back.any() and history["step"].duplicated().any()):
        return pd.Series(0, index=history.index)
    launch: pd.Series[Any] = goes_back.cumsum()
    if history["time"].notna().all():  # exports may be joined the newest first
        launch = history["time"].groupby(launch).transform("min").rank(method="dense").astype("int64") - 1
    return launch


def _records(history: pd.DataFrame, column_of: Callable[[str], str | None]) -> Iterator[dict[str, Any]]:
    """What each row has for the columns of the table; rows that have nothing are passed over."""
    columns = [(name, column) for name in history if (column := column_of(str(name)))]
    for row in history.to_dict("records"):
        values: dict[str, float] = {}
        for name, column in columns:
            if (value := _value(row[name])) is not None:
                values[column] = max(value, values.get(column, value)) if column == "lr" else values.get(column, value)
        if values:
            yield {"segment": row["segment"], "step": row["step"], "time": row["time"], **values}


def _value(cell: str) -> float | None:
    """A number, which may be one that is not finite; None where there is none."""
    try:
        return None if cell.strip().lower() in _MISSING else float(cell)
    except ValueError:
        return None


def _no_numbers(history: pd.DataFrame) -> Iterator[str]:
    """Say which values of metrics are no numbers, such as those with a decimal comma."""
    for name, cells in history.drop(columns=["segment", "step", "time"]).items():
        wrong = [cell for cell in cells if _value(cell) is None and cell.strip().lower() not in _MISSING]
        if wrong:
            yield f"{len(wrong)} of {len(cells)} values of {name} are no numbers, such as {wrong[0][:40]!r}"
