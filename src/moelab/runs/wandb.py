"""Read a history that was exported from Weights & Biases into the metrics table.

CSV, JSON, JSON lines or Parquet of ``wandb.Api().run(…).scan_history()`` has ``_step``, ``_timestamp`` and TorchTitan's
metric names as columns, and may hold several runs with a column that names them. The CSV of a chart in the web page has
``Step`` and a column ``<run> - <metric>`` for each run. Cells are text until their metric is known, because a value
that was *reported* as NaN must not look like one that is missing.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moelab.errors import BadInput
from moelab.files import read_bytes
from moelab.runs.log_text import LogBytes, NotALog
from moelab.runs.table import VALIDATION_METRICS, MetricsRead, merge_ranks, not_finite, runs_of_launches, step_column

_STEPS: Final = ("step", "_step", "Step", "trainer/global_step", "global_step")
_TIMES: Final = ("_timestamp", "Timestamp", "time")
_NAMES: Final = ("run_name", "run.name", "Name", "name", "display_name", "run")
_IDS: Final = ("run_id", "run.id", "id")
_SUFFIXES: Final = (".csv", ".json", ".jsonl", ".parquet")
_LAST_SECOND: Final = 1e11
"""Of an epoch's seconds, in the year 5138: more are milliseconds, as W&B's server counts."""
_MISSING: Final = ("", "-", "--", "n/a", "none", "null")
_MOST_BYTES: Final = 1 << 30


def is_export(path: Path) -> bool:
    """Tell whether a file is a W&B export by its name."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".xz", ".bz2")]
    return path.is_file() and bool(suffixes) and suffixes[-1] in _SUFFIXES


def read_wandb(path: Path) -> list[MetricsRead]:
    """Read the runs of an export, named where it names them; ``lr`` is the largest of all ``lr/…`` metrics.

    Raises:
        BadInput: the file cannot be read, or has no step column or none of TorchTitan's metrics.
    """
    cells, damage = _cells(path)
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
    steps = _numbers(cells[step])
    if "_step" in cells:  # where only some rows have the metric `step`
        steps = steps.fillna(_numbers(cells["_step"]))
    places = pd.DataFrame({"step": steps, "time": _times(cells)}).dropna(subset="step").astype({"step": "int64"})
    labels = _labels(cells)
    runs = dict(list(cells.groupby(labels, sort=False))) if labels is not None else {None: cells}
    reads = []
    for chart, metrics in charts.items():
        for name, rows in runs.items():
            history = cells.loc[rows.index.intersection(places.index), list(metrics)].rename(columns=metrics)
            # Rows that only hold another run's metrics, or system metrics, are no steps of this one.
            history = history[(history != "").any(axis=1)]
            launches = _in_launches(places.loc[history.index])
            trained = list(_records(history, launches, step_column))
            held_out = list(_records(history, launches, VALIDATION_METRICS.get))
            reads += runs_of_launches(
                merge_ranks(trained),
                merge_ranks(held_out),
                not_finite(trained),
                source=path,
                run=chart if name is None else str(name),
                notes=(*damage, *_no_numbers(history)),
            )
    return reads


def _cells(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the file's cells as text, empty where there is no value, and what could not be read."""
    damage: list[str] = []
    try:
        if ".parquet" in path.suffixes:
            frame = pd.read_parquet(io.BytesIO(read_bytes(path, _MOST_BYTES)))
            frame = frame.reset_index(drop=frame.index.name is None)  # `_step` may be the index
            return frame.astype(object).where(frame.notna(), "").astype(str), damage
        text = LogBytes(path).beginning(_MOST_BYTES).decode("utf-8-sig")  # a spreadsheet puts a mark in front
        if ".csv" in path.suffixes:
            separator = max(",;\t", key=text.partition("\n")[0].count)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an empty cell to spare in each row
                options: dict[str, Any] = {"sep": separator, "dtype": str, "keep_default_na": False}
                return pd.read_csv(io.StringIO(text), **options, index_col=False), damage
        rows = json.loads(text) if ".json" in path.suffixes else []
        lines = text.splitlines() if ".jsonl" in path.suffixes else []
        for line in lines:
            with suppress(ValueError):
                rows.append(json.loads(line))
        if lost := len(lines) - len(rows) if lines else 0:
            damage.append(f"{lost} of {len(lines)} lines are damaged or cut off, and are not read")
        records = [{name: str(cell) for name, cell in row.items() if cell is not None} for row in rows]
        return pd.DataFrame(records, dtype=object).fillna(""), damage
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, NotALog) as error:  # JSON of any shape
        raise BadInput(
            f"{path}: {str(error).strip()}. Give a .csv, .json, .jsonl or .parquet export of a W&B run's history, "
            "such as `pandas.DataFrame(wandb.Api().run('entity/project/id').scan_history()).to_csv('history.csv')`."
        ) from error


def _labels(cells: pd.DataFrame) -> pd.Series[str] | None:
    """What each row's run is called; None where no column says it. A name that two runs have gets their ids."""
    name, number = (next((one for one in names if one in cells), None) for names in (_NAMES, _IDS))
    if name is None or number is None:
        return cells[name or number] if name or number else None
    is_shared = cells.groupby(name)[number].transform("nunique") > 1
    return cells[name].where(~is_shared, cells[name] + " (" + cells[number] + ")")


def _numbers(cells: pd.Series[Any]) -> pd.Series[float]:
    return pd.to_numeric(cells, errors="coerce").astype("float64")


def _times(cells: pd.DataFrame) -> pd.Series[float]:
    name = next((name for name in _TIMES if name in cells), None)
    times = _numbers(cells[name]) if name else pd.Series(math.nan, index=cells.index)
    if name and times.isna().all():  # a web page and pandas write dates
        dates = pd.to_datetime(cells[name], utc=True, errors="coerce", format="mixed")
        times = (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return times.where(times < _LAST_SECOND, times / 1000)


def _in_launches(places: pd.DataFrame) -> pd.DataFrame:
    """Number the ``segment`` of one run's rows: a launch begins where a step goes back, if any step is there twice."""
    goes_back = places["step"].diff() < 0
    if not (goes_back.any() and places["step"].duplicated().any()):
        return places.assign(segment=0)
    launch: pd.Series[Any] = goes_back.cumsum()
    if places["time"].notna().all():  # exports may be joined the newest first
        launch = places["time"].groupby(launch).transform("min").rank(method="dense").astype("int64") - 1
    return places.assign(segment=launch)


def _records(history: pd.DataFrame, places: pd.DataFrame, column_of: Any) -> Iterator[Mapping[str, Any]]:
    """What each row has for the columns of the table; rows that have nothing are passed over."""
    columns = {name: column for name in history.columns if (column := column_of(str(name)))}
    cells = {name: [_value(cell) for cell in history[name]] for name in columns}
    for row, (segment, step, time) in enumerate(places[["segment", "step", "time"]].itertuples(index=False)):
        values: dict[str, float] = {}
        for name, column in columns.items():
            if (value := cells[name][row]) is not None:
                values[column] = max(value, values.get(column, value)) if column == "lr" else values.get(column, value)
        if values:
            yield {"segment": int(segment), "step": int(step), "time": time, **values}


def _value(cell: str) -> float | None:
    """A number, which may be one that is not finite; None where there is none."""
    try:
        return None if cell.strip().lower() in _MISSING else float(cell)
    except ValueError:
        return None


def _no_numbers(history: pd.DataFrame) -> Iterator[str]:
    """Say which values of metrics are no numbers, such as those with a decimal comma."""
    for name, cells in history.items():
        wrong = [cell for cell in cells if _value(cell) is None and cell.strip().lower() not in _MISSING]
        if wrong:
            yield f"{len(wrong)} of {len(cells)} values of {name} are no numbers, such as {wrong[0][:40]!r}"
