"""Read a history that was exported from Weights & Biases into the metrics table.

Three shapes are known:

- CSV, JSON, JSON lines or Parquet of ``wandb.Api().run(…).history()`` or ``scan_history()``, with ``_step``,
  ``_timestamp`` and TorchTitan's metric names as columns. ``history()`` samples 500 points unless told otherwise, so
  prefer ``scan_history()``;
- such histories of several runs under each other, with a column that names the run, or as JSON by run;
- the CSV of a chart in the web page, with ``Step`` and a column ``<run> - <metric>`` per run, next to ``…__MIN`` and
  ``…__MAX``, which are ignored.

TorchTitan before 15 February 2025 (4a16970) logged its step as a metric ``step``, and ``_step`` counted what was
logged. W&B refuses steps that go back within a run; where they do, in the order of ``_timestamp``, several exports were
joined, and each is a launch.

Cells stay text until their metric is known, because a value *reported* as NaN must not look like one that is missing.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final, cast

import pandas as pd

from moelab.errors import BadInput
from moelab.runs.log_text import LogBytes, NotALog
from moelab.runs.table import (
    REPORTED_NAN,
    STEP_METRICS,
    VALIDATION_METRICS,
    Columns,
    MetricsRead,
    ranks_to_rows,
    separate_runs,
    step_column,
)

_LOSSES: Final = tuple(name for name, column in STEP_METRICS.items() if column == "loss")
_STEP_NAMES: Final = ("step", "_step", "Step", "trainer/global_step", "global_step")
_ID_NAMES: Final = ("run_id", "run.id", "id", "ID", "run_path")
_RUN_NAMES: Final = ("run_name", "run.name", "Name", "name", "display_name", "displayName", "run")
_ARM_NAMES: Final = ("experiment", "group", "arm", "config", "precision", "seed")
_SUFFIXES: Final = (".csv", ".json", ".jsonl", ".ndjson", ".parquet")
_PACKED: Final = (".gz", ".xz", ".bz2", ".zst")
_TIME_NAMES: Final = ("_timestamp", "Timestamp", "time")
_LAST_SECOND: Final = 1e11
"""Of an epoch's seconds, in the year 5138: more are milliseconds, as W&B's server counts."""
_MISSING: Final = ("", "-", "--", "n/a", "none", "null")
_NOT_FINITE: Final = ("nan", "inf", "-inf", "infinity", "-infinity")


def read_wandb(path: str | Path) -> list[MetricsRead]:
    """Read a W&B history export, of one run or several in one chart: CSV, JSON, JSON lines or Parquet, packed or not.

    Returns:
        What each run has, with ``run`` named where the export names it. ``lr`` is the largest of all ``lr/…`` metrics.

    Raises:
        BadInput: the file cannot be read, or has no step column or none of TorchTitan's metrics.
    """
    reads, damage = [], list[str]()
    for run, history in _runs(_cells(Path(path), damage), Path(path)):
        steps, validation = _columns(history, STEP_METRICS), _columns(history, VALIDATION_METRICS)
        notes = (*damage, *_no_numbers(history))
        reads += separate_runs(steps, validation, _failures(history), source=Path(path), run=run, notes=notes)
    return reads


def is_export(path: Path) -> bool:
    """Tell whether a file is a W&B export by its name; containers keep logs as JSON too."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _PACKED]
    if not path.is_file() or not suffixes or suffixes[-1] not in _SUFFIXES:
        return False
    if suffixes[-1] in (".csv", ".parquet"):
        return True
    head = next(iter(LogBytes(path)), b"")
    return not (b"step:" in head and b"loss:" in head)


def _cells(path: Path, damage: list[str]) -> pd.DataFrame:
    """Return the file's cells as text, empty where there is no value, and add what could not be read to ``damage``."""
    try:
        if ".parquet" in path.suffixes:
            frame = pd.read_parquet(path)
            frame = frame.reset_index(drop=frame.index.name is None)  # `_step` may be the index
            return frame.astype(object).where(frame.notna(), "").astype(str)
        content = LogBytes(path)
        text = b"".join(content).decode("utf-8-sig")  # Excel puts a mark in front
        damage += [content.damage] if content.damage else []
        if ".csv" in path.suffixes:
            separator = max(",;\t", key=text.partition("\n")[0].count)  # a spreadsheet may have saved it
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                options: dict[str, Any] = {
                    "dtype": str,
                    "keep_default_na": False,
                    "sep": separator,
                    "on_bad_lines": "warn",
                }
                cells: pd.DataFrame = pd.read_csv(StringIO(text), **options)
                # A cell to spare in each row is its name, as R writes it, or an empty one at the end.
                if not isinstance(cells.index, pd.RangeIndex) and (cells.iloc[:, -1].fillna("") == "").all():
                    caught.clear()
                    cells = pd.read_csv(StringIO(text), **options, index_col=False)
                cells = cells.reset_index(drop=True)
            damage += [" ".join(str(warning.message).split()) for warning in caught]
            return cells
        parsed = _records(text, damage)
        records = [{name: str(value) for name, value in row.items() if value is not None} for row in parsed]
        return pd.DataFrame(records, dtype=object).fillna("")
    except (OSError, ValueError, AttributeError, TypeError, NotALog) as error:  # JSON may be of any shape
        raise BadInput(
            f"{path}: {error}. Give a .csv, .json, .jsonl or .parquet export of a W&B run's history, for instance "
            "`pandas.DataFrame(wandb.Api().run('entity/project/id').scan_history()).to_csv('history.csv')`."
        ) from error


def _records(text: str, damage: list[str]) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(text)
    except ValueError:  # a record a line
        parsed, lines = [], [line for line in text.splitlines() if line.strip()]
        for line in lines:
            with suppress(ValueError):
                parsed.append(json.loads(line))
        if not parsed:
            raise
        if lost := len(lines) - len(parsed):
            damage.append(f"{lost} of {len(lines)} lines are damaged or cut off, and are not read")
    if not isinstance(parsed, dict):
        return list(parsed)
    columns = list(parsed.values())
    if all(isinstance(column, dict) for column in columns):  # pandas' JSON by column
        rows = {index: None for column in columns for index in column}
        return [{name: column.get(index) for name, column in parsed.items()} for index in rows]
    if all(isinstance(column, list) for column in columns):  # a history for each run
        return [{"run_name": run, **row} for run, rows in parsed.items() for row in rows]
    return [parsed]


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
        raise BadInput(
            f"{path}: looked for a step column ({', '.join(_STEP_NAMES)}) and one of TorchTitan's metrics "
            f"({_LOSSES[0]}, throughput(tps), …); found the columns {', '.join(map(str, cells.columns[:8]))}"
        )
    numbers = pd.DataFrame({"step": _number(cells[step]), "time": _number(cells[time]) if time else math.nan})
    if time and numbers["time"].isna().all():  # a web page and pandas write dates
        dates = pd.to_datetime(cells[time], utc=True, errors="coerce", format="mixed")
        numbers["time"] = (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    numbers["time"] = numbers["time"].where(numbers["time"] < _LAST_SECOND, numbers["time"] / 1000)
    if "_step" in cells:  # where only some rows have the metric `step`
        numbers["step"] = numbers["step"].fillna(_number(cells["_step"]))
    for run, columns in metrics.items():
        history = numbers.join(cells[list(columns)].rename(columns=columns)).dropna(subset=["step"])
        # Rows that only hold another run's metrics, or system metrics, are no steps of this one.
        history = history[(history[list(columns.values())] != "").any(axis=1)].astype({"step": "int64"})
        for stacked, rows in _stacked(cells, history):
            yield stacked or run, _in_launches(rows)


def _stacked(cells: pd.DataFrame, history: pd.DataFrame) -> Iterator[tuple[str | None, pd.DataFrame]]:
    """Yield the rows of each run by the columns that name it; a name that two runs have gets their ids."""
    names = [next((c for c in names if c in cells), None) for names in (_ID_NAMES, _RUN_NAMES)]
    named = [name for name in names if name] or [name for name in _ARM_NAMES if name in cells]
    if not named:
        yield None, history
        return
    keys = [cells.loc[history.index, column] for column in named]
    runs = [([str(key) for key in cast("tuple[Any, ...]", of)], rows) for of, rows in history.groupby(keys, sort=False)]
    if None in names:
        yield from ((" ".join(of), rows) for of, rows in runs)
        return
    count = Counter(name for (_, name), _ in runs)
    yield from ((name if count[name] == 1 else f"{name} ({of})", rows) for (of, name), rows in runs)


def _in_launches(history: pd.DataFrame) -> pd.DataFrame:
    """Number the ``segment`` of one run's rows: where a step is there twice, a launch ends where a step goes back."""
    losses = history[(history[[name for name in _LOSSES if name in history]] != "").any(axis=1)]
    if not losses["step"].duplicated().any():
        return history.sort_values("step", kind="stable").assign(segment=0)
    launch: pd.Series[Any] = (history["step"].diff() < 0).cumsum()  # in the order of the file
    if history["time"].notna().all():  # exports may be joined the newest first
        launch = history["time"].groupby(launch).transform("min").rank(method="dense").astype("int64") - 1
    return history.assign(segment=launch).sort_values("segment", kind="stable")


def _columns(history: pd.DataFrame, metrics: dict[str, str]) -> Columns:
    """Return table columns from the ``metrics`` and, if they are those of a training step, the learning rates."""
    names: dict[str, str] = {}
    for name, column in metrics.items():
        if name in history and column not in names.values():
            names[name] = column
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
    return ranks_to_rows({str(name): cells.to_numpy() for name, cells in columns.items()}, ["segment", "step"])


def _number(cells: pd.Series[Any]) -> pd.Series[float]:
    return pd.to_numeric(cells, errors="coerce").astype("float64")


def _no_numbers(history: pd.DataFrame) -> Iterator[str]:
    """Say which values of metrics are no numbers, such as those with a decimal comma."""
    for name in (str(column) for column in history.columns):
        if step_column(name) or name in VALIDATION_METRICS:
            cells = history[name]
            wrong = cells[_number(cells).isna() & ~cells.str.strip().str.lower().isin((*_MISSING, *_NOT_FINITE))]
            if len(wrong):
                yield f"{len(wrong)} of {len(cells)} values of {name} are no numbers, such as {wrong.iloc[0][:40]!r}"


def _failures(history: pd.DataFrame) -> dict[int, tuple[int, float]]:
    """The first step of each segment whose loss was not finite, and that loss."""
    failures: dict[int, tuple[int, float]] = {}
    for name in _LOSSES:
        if name in history:
            failed = history[history[name].str.lower().isin(_NOT_FINITE)]
            for segment, step, loss in failed[["segment", "step", name]].itertuples(index=False):
                failures.setdefault(int(segment), (int(step), float(loss)))
    return failures
