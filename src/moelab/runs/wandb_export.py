"""Read a history that was exported from Weights & Biases into the metrics table.

Two shapes are known: the CSV, JSON or JSON lines of ``wandb.Api().run(…).history()`` or ``scan_history()``, with
``_step``, ``_timestamp`` and TorchTitan's metric names as columns; and the CSV of a chart in the web page, with
``Step`` and a column ``<run> - <metric>`` per run, next to ``…__MIN`` and ``…__MAX``, which are ignored. ``history()``
samples 500 points unless told otherwise, so prefer ``scan_history()``. W&B refuses steps that go back within a run;
where they do in a file, several exports of one job were joined, and each is a segment.

Cells stay text until their metric is known, because a value *reported* as NaN must not look like one that is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moelab.errors import BadInput
from moelab.runs.table import (
    REPORTED_NAN,
    STEP_METRICS,
    VALIDATION_METRICS,
    MetricsRead,
    failure_reason,
    grad_norms_not_finite,
    metrics_table,
    ranks_to_rows,
    step_column,
    validation_table,
)

_LOSS: Final = "loss_metrics/global_avg_loss"
_STEP_NAMES: Final = ("_step", "Step", "step")
_TIME_NAMES: Final = ("_timestamp", "Timestamp")
_NOT_FINITE: Final = ("nan", "inf", "-inf", "infinity", "-infinity")


class NotAWandbExport(BadInput):
    """The file is no history with a step and TorchTitan's metrics."""


def read_wandb(path: str | Path) -> list[MetricsRead]:
    """Read a W&B history export, of one run or of several in one chart.

    Args:
        path: a ``.csv``, ``.json`` or ``.jsonl`` file.

    Returns:
        What each run has, with ``run`` named where the export names it. ``lr`` is the largest of all ``lr/…`` metrics.

    Raises:
        NotAWandbExport: the file cannot be read, or has no step column or none of TorchTitan's metrics.
    """
    return [_read(run, history) for run, history in _runs(_cells(Path(path)), Path(path))]


def _read(run: str | None, history: pd.DataFrame) -> MetricsRead:
    columns = _columns(history, STEP_METRICS)
    rows = metrics_table(columns, run=run)
    return MetricsRead(
        rows=rows,
        validation=validation_table(_columns(history, VALIDATION_METRICS)),
        segments=int(rows["segment"].max()) + 1 if len(rows) else 0,
        reason=_reason(history),
        grad_norm_not_finite=grad_norms_not_finite(columns),
    )


def _cells(path: Path) -> pd.DataFrame:
    """Return the file's cells as text, empty where there is no value."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return pd.read_csv(StringIO(text), dtype=str, keep_default_na=False)
        records = [{name: str(value) for name, value in row.items() if value is not None} for row in _records(text)]
        return pd.DataFrame(records, dtype=object).fillna("")
    except (OSError, ValueError, AttributeError) as error:
        raise NotAWandbExport(
            f"{path}: {error}. Give a .csv, .json or .jsonl export of a W&B run's history, for instance "
            "`pandas.DataFrame(wandb.Api().run('entity/project/id').scan_history()).to_csv('history.csv')`."
        ) from error


def _records(text: str) -> list[dict[str, Any]]:
    parsed = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    if len(parsed) == 1 and isinstance(cells := parsed[0].get("_step"), dict):  # pandas' JSON by column
        return [{name: column.get(index) for name, column in parsed[0].items()} for index in cells]
    return list(parsed)


def _runs(cells: pd.DataFrame, path: Path) -> Iterator[tuple[str | None, pd.DataFrame]]:
    """Yield each run's name, or None, and its cells: numeric ``segment, step, time``, then text by metric."""
    step = next((name for name in _STEP_NAMES if name in cells), None)
    time = next((name for name in _TIME_NAMES if name in cells), None)
    metrics: dict[str | None, dict[str, str]] = {}
    for column in cells.columns:
        name, _, metric = str(column).rpartition(" - ")
        if step_column(metric) or metric in VALIDATION_METRICS:
            metrics.setdefault(name or None, {})[column] = metric
    if step is None or not metrics:
        raise NotAWandbExport(
            f"{path}: looked for a step column ({', '.join(_STEP_NAMES)}) and one of TorchTitan's metrics "
            f"({_LOSS}, throughput(tps), …); found the columns {', '.join(map(str, cells.columns[:8]))}"
        )
    numbers = pd.DataFrame({"step": _number(cells[step]), "time": _number(cells[time]) if time else math.nan})
    for run, columns in metrics.items():
        history = numbers.join(cells[list(columns)].rename(columns=columns)).dropna(subset=["step"])
        history = history[(history[list(columns.values())] != "").any(axis=1)].astype({"step": "int64"})
        yield run, history.assign(segment=(history["step"].diff() < 0).cumsum())


def _columns(history: pd.DataFrame, metrics: dict[str, str]) -> pd.DataFrame:
    """Return table columns from the ``metrics`` and, if they are those of a training step, the learning rates."""
    names = {name: column for name, column in metrics.items() if name in history}
    lr = [name for name in history if metrics is STEP_METRICS and step_column(str(name)) == "lr"]
    logged = history[(history[[*names, *lr]] != "").any(axis=1)]
    columns = logged[["segment", "step", "time", *names]].rename(columns=names)
    columns = columns.assign(**{column: _number(columns[column]) for column in names.values()})
    if "grad_norm" in columns:
        reported = logged["grad_norm"].str.lower() == "nan"
        columns["grad_norm"] = columns["grad_norm"].mask(reported, REPORTED_NAN)
    columns["lr"] = logged[lr].apply(_number).max(axis=1) if lr else math.nan
    if "loss" not in columns:
        columns["loss"] = math.nan
    return ranks_to_rows(columns, ["segment", "step"])


def _number(cells: pd.Series[Any]) -> pd.Series[float]:
    return pd.to_numeric(cells, errors="coerce").astype("float64")


def _reason(history: pd.DataFrame) -> str | None:
    last = history[history["segment"] == history["segment"].max()]
    if _LOSS not in last:
        return None
    failed = last[last[_LOSS].str.lower().isin(_NOT_FINITE)]
    if failed.empty:
        return None
    row = failed.iloc[0]
    return failure_reason(int(row["segment"]), int(row["step"]), float(row[_LOSS]))
