"""The metrics table: one schema for every source, and the operations that respect its segments.

One row per (run, segment, step). A segment is one launch of the job, counted from 0; a requeued job repeats the steps
since its last checkpoint, so the same step can stand in two segments. ``tps`` is tokens per second **per GPU**, as
TorchTitan prints it, ``time`` is seconds since the Unix epoch, ``mfu`` and ``memory_pct`` are percentages, memory is in
GiB. What a source does not have is NaN, never zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moelab.errors import BadInput

Columns: TypeAlias = Mapping[str, NDArray[Any]]
"""Columns of a table that is not made yet, all of one length: a study has thousands of tables, and making one takes
longer than reading a log does."""
VALUE_COLUMNS: Final = ("loss", "grad_norm", "tps", "tflops", "mfu", "memory_gib", "memory_pct", "lr", "time")
COLUMNS: Final = ("run", "arm", "seed", "segment", "step", *VALUE_COLUMNS)
DTYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("run", "arm"), "string"),
    "seed": "Int64",
    **dict.fromkeys(("segment", "step"), "int64"),
    **dict.fromkeys(VALUE_COLUMNS, "float64"),
}
VALIDATION_COLUMNS: Final = ("segment", "step", "loss", "tps", "memory_gib", "time")
REPORTED_NAN: Final = -math.inf
"""A loss or gradient norm that was reported as NaN, until the table is made, in which NaN is what is missing."""
#: TorchTitan's metric names, as TensorBoard and W&B store them, and the columns that they fill; of two for one column
#: the first counts. Memory is what was reserved, as in the log line, and ``wps`` is of releases before 25 November 2024
#: (4d182a1). Own trainers use the columns' names. Source: torchtitan 0.3.0, ``MetricsProcessor.log`` and
#: ``log_validation`` in ``components/metrics.py`` and ``LRSchedulersContainer.get_metrics`` in
#: ``components/optimizer/lr_scheduler.py``.
STEP_METRICS: Final = {
    "loss_metrics/global_avg_loss": "loss",
    "throughput(tps)": "tps",
    "wps": "tps",
    "mfu(%)": "mfu",
    "memory/max_reserved(GiB)": "memory_gib",
    "memory/max_reserved(%)": "memory_pct",
    **{name: name for name in VALUE_COLUMNS if name not in ("lr", "time")},
    "train/loss": "loss",
}
VALIDATION_METRICS: Final = {
    "validation_metrics/loss": "loss",
    "validation_metrics/throughput(tps)": "tps",
    "validation_metrics/memory/max_reserved(GiB)": "memory_gib",
}
SAME_SEED: Final = 0.002
"""Nats by which the first losses of two launches with the same seed differ at most: sums are in another order."""
SAME_RUN: Final = 0.01
"""Share by which the first losses of a restart and of what it repeats differ at most."""
_RUN: Final = ["run", "arm", "seed"]
_MEMORY: Final = ("memory_gib", "memory_pct")


@dataclass(frozen=True, kw_only=True)
class MetricsRead:
    """What a reader found."""

    columns: Columns  # any of the metrics table's, `segment` and `step` among them, with `REPORTED_NAN`
    validation_columns: Columns  # any of `VALIDATION_COLUMNS`, one row per segment and validated step
    segments: int  # number of segments that logged anything
    reason: str | None  # one line when the source itself shows that training failed, else None
    # NaN or Inf by the step that reported it as its gradient norm
    grad_norm_not_finite: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader should know of the source: what of it could not be read, or has no loss
    run: str | None = None  # as a source of several runs calls it

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Metrics table (:data:`COLUMNS`); ``run``, ``arm`` and ``seed`` are empty unless the source names them."""
        return metrics_table(self.columns, run=self.run)

    @functools.cached_property
    def validation(self) -> pd.DataFrame:
        """Table of :data:`VALIDATION_COLUMNS`."""
        return validation_table(self.validation_columns)


def step_column(name: str) -> str | None:
    """Return the table column that a metric of a training step fills, or None.

    Learning rates are called ``lr/<optimizer>``, or ``lr/<optimizer>/<i>`` with several parameter groups. Several such
    metrics share the column ``lr``; readers keep the largest.

    >>> step_column("lr/AdamW/0"), step_column("memory/num_ooms")
    ('lr', None)
    """
    return "lr" if name == "lr" or name.startswith("lr/") else STEP_METRICS.get(name)


def metrics_read(
    columns: Columns, validation: Columns, *, notes: Sequence[str] = (), run: str | None = None
) -> MetricsRead:
    """What a reader found, with what its columns say of losses and gradient norms that are not finite."""
    reason, recovered = _losses_not_finite(columns)
    return MetricsRead(
        columns=columns,
        validation_columns=validation,
        segments=len({*np.unique(columns["segment"]).tolist(), *np.unique(validation["segment"]).tolist()}),
        reason=reason,
        grad_norm_not_finite=grad_norms_not_finite(columns),
        notes=(*notes, *recovered),
        run=run,
    )


def _losses_not_finite(columns: Columns) -> tuple[str | None, list[str]]:
    """Why training failed, if its last loss is not finite, and a note for each launch whose loss was finite again."""
    loss, step, segment = columns["loss"], columns["step"], columns["segment"]
    reason, notes = None, []
    for number in np.unique(segment[np.isinf(loss)]).tolist():
        places = np.flatnonzero((segment == number) & np.isinf(loss))
        first = places[np.argmin(step[places])]
        what = "inf" if loss[first] > 0 else "nan"
        own = segment == number
        if number == segment.max() and not np.isfinite(loss[own & (step == step[own].max())]).any():
            reason = f"loss is {what} at step {step[first]} (segment {number})"
        elif number == segment.max() or np.isfinite(loss[segment > number]).any():
            which = f"step {step[first]}" if len(places) < 2 else f"{len(places)} steps from {step[first]} on"
            notes.append(f"the loss was {what} at {which} (segment {number}) and finite afterwards")
    return reason, notes


def refuse_two_runs(columns: Columns, source: Path) -> None:
    """Refuse launches of two runs in a source from elsewhere, of which the last would hide the other.

    Raises:
        BadInput: a launch begins where the first one did with another loss, or has another where both end.
    """
    steps, losses = columns["step"], columns["loss"]
    launches = [np.flatnonzero(columns["segment"] == number) for number in np.unique(columns["segment"])]
    for other in launches[1:]:
        first = launches[0]
        common, ours, theirs = np.intersect1d(steps[first], steps[other], return_indices=True)
        if not len(common) or steps[first[0]] != steps[other[0]]:
            continue
        is_from_scratch = common[0] <= 1  # of what went before another step nothing is known
        for place in (0, -1) if is_from_scratch else (0,):  # two runs of one seed part on the way
            one, two = losses[first[ours[place]]], losses[other[theirs[place]]]
            most = SAME_SEED if is_from_scratch else SAME_RUN * abs(one)
            if math.isfinite(one - two) and abs(one - two) > most:  # a launch may have diverged there
                raise BadInput(
                    f"{source}: it holds two runs, of which one has a loss of {one:g} at step {common[place]} and "
                    f"another {two:g}. Give each by itself"
                )


def metrics_table(
    columns: Mapping[str, Any], *, run: str | None = None, arm: str | None = None, seed: int | None = None
) -> pd.DataFrame:
    """Return a table with exactly :data:`COLUMNS` and :data:`DTYPES`; columns not given are missing values.

    Of ``columns``, arrays of equal length, ``segment`` and ``step`` are required; ``run``, ``arm`` and ``seed`` are put
    into every row that they give none for.
    """
    return _table(columns, COLUMNS, {"run": run, "arm": arm, "seed": seed})


def validation_table(columns: Columns) -> pd.DataFrame:
    """Return a table of :data:`VALIDATION_COLUMNS`."""
    return _table(columns, VALIDATION_COLUMNS, {})


def _table(columns: Mapping[str, Any], names: Sequence[str], same: Mapping[str, str | int | None]) -> pd.DataFrame:
    # Columns are made one by one: a study has thousands of tables, and DataFrame.astype takes ten times as long.
    data: dict[str, Any] = {}
    for name in names:
        given, count = columns.get(name), len(columns["step"])
        if name in _RUN:
            data[name] = _single(name, same[name]).repeat(count) if given is None else pd.array(given, DTYPES[name])
        else:
            data[name] = np.full(count, math.nan) if given is None else np.asarray(given, DTYPES[name])
    for name in {"loss", "grad_norm"} & data.keys():
        data[name] = np.where(data[name] == REPORTED_NAN, math.nan, data[name])
    return pd.DataFrame(data)


@functools.lru_cache(maxsize=64)
def _single(name: str, value: str | int | None) -> Any:
    """A column of one row: making one of a list takes pandas ten times as long as repeating it."""
    return pd.array([value], dtype=DTYPES[name])  # type: ignore[call-overload]


class _HasRows(Protocol):
    @property
    def rows(self) -> pd.DataFrame: ...


def joined_rows(runs: Iterable[_HasRows]) -> pd.DataFrame:
    """The metrics table of several runs."""
    tables = [one.rows for one in runs if len(one.rows)]
    return pd.concat(tables, ignore_index=True) if tables else metrics_table({"segment": [], "step": []})


def merge_segments(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of every run: a repeated step keeps its last values, and the largest memory.

    >>> rows = metrics_table({"segment": [0, 0, 1], "step": [90, 100, 100], "loss": [5.1, 5.0, 5.001]})
    >>> merge_segments(rows)[["segment", "step", "loss"]].values.tolist()
    [[0.0, 90.0, 5.1], [1.0, 100.0, 5.001]]
    """
    # Numbers in the place of names: a study has a million rows, which a sort of texts takes minutes for.
    names = [pd.factorize(table[name], sort=True, use_na_sentinel=False)[0] for name in _RUN]
    order, starts = grouped([*names, table["step"]], then=[table["segment"]])
    kept: pd.DataFrame = table.iloc[_last_of_each(order, starts)].reset_index(drop=True)
    if len(kept) == len(table):
        return kept
    return kept.assign(
        **{name: np.fmax.reduceat(table[name].to_numpy()[order], starts) for name in _MEMORY if name in table}
    )


def grouped(keys: Sequence[Any], then: Sequence[Any] = ()) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows in the order of their keys, then of others; and where among them each new combination of keys starts.

    Of the columns of each the first counts most.

    >>> grouped([np.array([7, 5, 7])])
    (array([1, 0, 2]), array([0, 1]))
    """
    order = np.lexsort([*then[::-1], *keys[::-1]])
    places = np.array(keys)[:, order]
    changes = (places[:, 1:] != places[:, :-1]).any(axis=0)
    return order, np.flatnonzero(np.r_[True, changes][: len(order)])


def _last_of_each(order: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last row of each combination of keys, from what :func:`grouped` returns; none of no rows."""
    last: NDArray[np.int64] = order[np.append(starts[1:], len(order))[: len(starts)] - 1]
    return last


def throughput_rows(table: pd.DataFrame, *, warmup_steps: int) -> pd.DataFrame:
    """Return the rows whose ``tps`` counts for throughput statistics.

    Left out are the steps up to ``warmup_steps``, the first row that each restart logged (its interval contains
    compilation and allocator warm-up again), and rows without ``tps``, or one of 0. A row averages over the steps
    since the row before it, so choose ``warmup_steps`` as a multiple of the logging interval.
    """
    keep = (table["step"] > warmup_steps) & (table["tps"] > 0)  # NaN is not above 0 either
    if (table["segment"] > 0).any():  # grouping takes ten times as long as all the rest, and most runs never restart
        first_step = table.groupby([*_RUN, "segment"], dropna=False)["step"].transform("min")
        keep &= ~((table["segment"] > 0) & (table["step"] == first_step))
    return table[keep].reset_index(drop=True)


def grad_norms_not_finite(columns: Columns) -> dict[int, float]:
    """NaN or Inf by the step that reported it as its gradient norm; of a repeated step the last value counts.

    >>> grad_norms = np.array([float("inf"), REPORTED_NAN, 0.5])
    >>> grad_norms_not_finite({"segment": np.array([0, 0, 1]), "step": np.array([7, 8, 8]), "grad_norm": grad_norms})
    {7: inf}
    """
    if "grad_norm" not in columns or not np.isinf(columns["grad_norm"]).any():
        return {}
    last = _last_of_each(*grouped([columns["step"]], then=[columns["segment"]]))
    norms = dict(zip(columns["step"][last].tolist(), columns["grad_norm"][last].tolist(), strict=True))
    return {step: norm if norm > 0 else math.nan for step, norm in norms.items() if math.isinf(norm)}


def grad_norm_finding(not_finite: Mapping[int, float], rows: pd.DataFrame) -> str | None:
    """Say in which steps the gradient norm was not finite; None if it always was.

    A loss may stay finite beside it while the weights no longer move, as MXFP8 training is known to fail.

    >>> rows = metrics_table({"segment": [0, 0, 0], "step": [6, 7, 8]})
    >>> grad_norm_finding({7: float("nan"), 8: float("nan")}, rows)
    'gradient norm is NaN from step 7 on'
    """
    if not not_finite:
        return None
    first = min(not_finite)
    kinds = " or ".join(sorted({"NaN" if math.isnan(norm) else "Inf" for norm in not_finite.values()}, reverse=True))
    steps = set(rows["step"])
    if all(step in not_finite for step in steps if step >= first):
        return f"gradient norm is {kinds} from step {first} on"
    return f"gradient norm is {kinds} at {len(not_finite)} of {len(steps)} logged steps, first at step {first}"


def merge_ranks(records: Iterable[Mapping[str, Any]]) -> Columns:
    """Records of steps as columns with one row per segment and step, None and NaN in the place of what is missing.

    A negative loss marks a rank without the loss: of several ranks' records that of one that has it is kept, with the
    largest memory; if none has it, ``loss`` is missing.
    """
    rows: dict[tuple[int, int], Mapping[str, Any]] = {}
    for record in records:
        place = (record["segment"], record["step"])
        before = rows.get(place, record)
        first = record if _lacks_loss(before) and not _lacks_loss(record) else before
        fullest = {name: max(before.get(name) or 0.0, record.get(name) or 0.0) or None for name in _MEMORY}
        rows[place] = {**before, **record, **first, **fullest}  # W&B makes a row of each call
    return columns_of([rows[place] for place in sorted(rows)])


def _lacks_loss(record: Mapping[str, Any]) -> bool:
    loss = record.get("loss")
    return loss is None or loss < 0


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Records as columns, in their order.

    A NaN of a loss or gradient norm was reported, None is missing, and so is a negative loss: of a pipeline rank.
    """
    columns: dict[str, NDArray[Any]] = {
        name: np.array([record[name] for record in records], dtype=np.int64) for name in ("segment", "step")
    }
    columns |= {name: np.array([record.get(name) for record in records], dtype=float) for name in VALUE_COLUMNS}
    columns["loss"] = np.where(columns["loss"] < 0, math.nan, columns["loss"])
    for name in ("loss", "grad_norm"):
        if np.isnan(columns[name]).any():
            values = [record.get(name) for record in records]
            reported = np.array([value is not None and math.isnan(value) for value in values], dtype=bool)
            columns[name] = np.where(reported, REPORTED_NAN, columns[name])
    return columns
