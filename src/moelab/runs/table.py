"""The metrics table: one schema for every source, and the operations that respect its segments.

One row per (run, segment, step). A segment is one launch of the job, counted from 0; a requeued job repeats the steps
since its last checkpoint, so the same step can stand in two segments. ``tps`` is tokens per second **per GPU**, as
TorchTitan prints it, ``time`` is seconds since the Unix epoch, ``mfu`` and ``memory_pct`` are percentages, memory is in
GiB. What a source does not have is NaN, never zero; a loss that was *reported* as NaN is told by a reader's ``reason``,
a gradient norm by its ``grad_norm_not_finite``.
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
"""A gradient norm that was reported as NaN, until the metrics table is made, in which NaN is what is missing."""
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

_RUN: Final = ["run", "arm", "seed"]
_MEMORY: Final = ("memory_gib", "memory_pct")
_SAME_AFTER_RESTART: Final = ("model", "parameters", "seq_len", "optimizer", "lr", "mxfp8_kernels", "experts_in")
SAME_SEED: Final = 0.002
"""Nats by which the first losses of two launches with the same seed differ at most: sums are in another order."""
SAME_RUN: Final = 0.01
"""Share by which the first losses of a restart and of what it repeats differ at most."""


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
    name: str | None = None  # of the run, where the source holds several; None if it has none
    run: str | None = None  # as the source names all of it

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
    columns: Columns,
    validation: Columns,
    failures: Mapping[int, tuple[int, float]],
    *,
    notes: tuple[str, ...] = (),
    **more: Any,
) -> MetricsRead:
    """Return what a reader found, however its source is built.

    ``failures`` has, by segment, the first step at which its loss was not finite, and that loss. Training failed if the
    last loss is not finite; of a loss that was finite again, also after a restart, there is a note.
    """
    segment, steps = columns["segment"], columns["step"]
    logged = {*np.unique(segment).tolist(), *np.unique(validation["segment"]).tolist()}
    last, reason, recovered = max(logged | set(failures), default=0), None, list[str]()
    for number, (step, loss) in sorted(failures.items()):
        finite, own = np.isfinite(columns["loss"]), (segment == number) & (steps >= step)
        at_the_end = own & (steps == steps[own].max(initial=step))
        if number == last and not finite[at_the_end].any():
            reason = f"loss is {loss} at step {step} (segment {number})"
        elif number == last or finite[segment > number].any():
            count = int((own & ~finite).sum())
            which = f"step {step}" if count < 2 else f"{count} steps from {step} on"
            recovered.append(f"the loss was {loss} at {which} (segment {number}) and finite afterwards")
    return MetricsRead(
        columns=columns,
        validation_columns=validation,
        segments=len(logged),
        reason=reason,
        grad_norm_not_finite=grad_norms_not_finite(columns),
        notes=(*notes, *recovered),
        **more,
    )


def runs_of_launches(
    columns: Columns,
    validation: Columns,
    failures: Mapping[int, tuple[int, float]],
    *,
    source: Path,
    settings: Sequence[Mapping[str, str]] = (),
    run: str | None = None,
    notes: tuple[str, ...] = (),
) -> list[MetricsRead]:
    """Part the launches of a source from elsewhere into runs, as two logs are found in one file.

    A launch that goes on after the first step of an earlier one is its restart. One that begins again is another run,
    unless its first loss is the same: a restart that found no checkpoint, with the same seed. Launches of other
    settings are never of one run.

    ``columns``, ``validation`` and ``failures`` are what :func:`metrics_read` takes; ``settings`` are those of each
    launch, as far as they are known, and ``run`` is how the source names all of it.

    Raises:
        BadInput: the launches show that two runs are mixed, so that nothing says which row is whose.
    """
    launches = {
        number: pd.Series(columns["loss"], index=columns["step"])[columns["segment"] == number]
        for number in np.unique(columns["segment"]).tolist()
    }
    if _log_in_turns(launches.values()):
        raise BadInput(
            f"{source}: the steps of two runs are mixed in it: they go back {len(launches) - 1} times. "
            "Give the history of each run by itself"
        )
    known = dict(zip(launches, settings if len(settings) == len(launches) else [{}] * len(launches), strict=True))
    groups: list[list[int]] = []
    for number, losses in launches.items():
        jumps = {}
        for place, group in enumerate(groups):
            first = launches[group[0]]
            is_later = losses.index.min() > first.index.min()
            if _goes_on(first, losses) and not _differ(known[group[0]], known[number], is_later=is_later):
                jumps[place] = _jump(launches[group[-1]], losses)
        if jumps:  # of several runs that it could go on with, the one whose loss it starts from
            groups[min(jumps, key=lambda place: jumps[place])].append(number)
        else:
            groups.append([number])
    if len(groups) < 2:
        return [metrics_read(columns, validation, failures, run=run, notes=notes)]
    reads = []
    for index, group in enumerate(groups, start=1):
        places = {number: place for place, number in enumerate(group)}
        rows, held_out = (_renumbered(part, places) for part in (columns, validation))
        failed = {places[number]: failures[number] for number in group if number in failures}
        name = f"run {index} of {len(groups)}"
        reads.append(metrics_read(rows, held_out, failed, run=run, notes=notes, name=name))
    return reads


def _renumbered(columns: Columns, numbers: Mapping[int, int]) -> Columns:
    """Rows of these segments, in the order of their new numbers."""
    segment = np.array([numbers.get(number, -1) for number in columns["segment"].tolist()], dtype=np.int64)
    order = np.argsort(segment, kind="stable")[int((segment < 0).sum()) :]
    return {**{name: values[order] for name, values in columns.items()}, "segment": segment[order]}


def _log_in_turns(launches: Iterable[pd.Series[float]]) -> bool:
    """Tell whether most of many launches leave out steps, two at least of those that the others have."""
    steps = [np.unique(losses.index.to_numpy()) for losses in launches]
    if len(steps) < 3:
        return False
    interval = np.median(np.diff(np.unique(np.concatenate(steps))))
    return 2 * sum(bool((np.diff(one) >= 2 * interval).any()) for one in steps if len(one) > 1) > len(steps)


def _goes_on(first: pd.Series[float], losses: pd.Series[float]) -> bool:
    """Tell whether a launch goes on with what a first one began, or begins it again with the same seed."""
    begins, began = losses.index.min(), first.index.min()
    if begins != began:
        return bool(begins > began)
    if begins > 1:  # of what went before nothing is known
        return not abs(losses.iloc[0] - first.iloc[0]) > SAME_RUN * abs(first.iloc[0])
    ends = [0, -1] if losses.index.max() == first.index.max() else [0]  # two runs of one seed part on the way
    return not any(abs(losses.iloc[end] - first.iloc[end]) > SAME_SEED for end in ends)


def _differ(settings: Mapping[str, str], other: Mapping[str, str], *, is_later: bool) -> bool:
    """Tell whether two launches train other things; of a restart, nodes that were lost change the parallelism."""
    names = _SAME_AFTER_RESTART if is_later else settings
    return any(name in settings and name in other and settings[name] != other[name] for name in names)


def _jump(earlier: pd.Series[float], losses: pd.Series[float]) -> float:
    """How far the loss at a launch's first step is from that of an earlier launch at the step nearest to it."""
    nearest = int(np.abs(earlier.index.to_numpy() - losses.index.min()).argmin())
    jump = abs(float(losses.iloc[0]) - float(earlier.iloc[nearest]))
    return math.inf if math.isnan(jump) else jump


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
    return _table(columns, VALIDATION_COLUMNS)


class _HasRows(Protocol):
    @property
    def rows(self) -> pd.DataFrame: ...


def joined_rows(runs: Iterable[_HasRows]) -> pd.DataFrame:
    """The metrics table of several runs."""
    tables = [one.rows for one in runs if len(one.rows)]
    return pd.concat(tables, ignore_index=True) if tables else metrics_table({"segment": [], "step": []})


def _table(
    columns: Mapping[str, Any], names: Sequence[str], missing: Mapping[str, str | int | None] | None = None
) -> pd.DataFrame:
    # Columns are made one by one: a study has thousands of tables, and DataFrame.astype takes ten times as long.
    data: dict[str, Any] = {}
    for name in names:
        given, count = columns.get(name), len(columns["step"])
        if name in _RUN:
            value = (missing or {}).get(name)
            data[name] = _single(name, value).repeat(count) if given is None else pd.array(given, dtype=DTYPES[name])
        else:
            data[name] = np.full(count, math.nan) if given is None else np.asarray(given, DTYPES[name])
    if "grad_norm" in data:
        data["grad_norm"] = np.where(data["grad_norm"] == REPORTED_NAN, math.nan, data["grad_norm"])
    return pd.DataFrame(data)


@functools.lru_cache(maxsize=64)
def _single(name: str, value: str | int | None) -> Any:
    """A column of one row: making one of a list takes pandas ten times as long as repeating it."""
    return pd.array([value], dtype=DTYPES[name])  # type: ignore[call-overload]


def merge_segments(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of every run: a repeated step keeps its last values, and the largest memory.

    A restart repeats steps; so does a log without times in which the lines of one rank follow those of another.

    >>> rows = metrics_table({"segment": [0, 0, 1], "step": [90, 100, 100], "loss": [5.1, 5.0, 5.001]})
    >>> merge_segments(rows)[["segment", "step", "loss"]].values.tolist()
    [[0.0, 90.0, 5.1], [1.0, 100.0, 5.001]]
    """
    # Numbers in the place of names: a study has a million rows, which a sort of texts takes minutes for.
    names = [pd.factorize(table[name], sort=True, use_na_sentinel=False)[0] for name in _RUN]
    order, starts = grouped([*names, table["step"]], then=[table["segment"]])
    last = _last_of_each(order, starts)
    kept: pd.DataFrame = table.iloc[last].reset_index(drop=True)
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


def grad_norms_not_finite(columns: Mapping[str, Any]) -> dict[int, float]:
    """NaN or Inf by the step that reported it as its gradient norm; of a repeated step the last value counts.

    >>> grad_norms_not_finite({"segment": [0, 0, 1], "step": [7, 8, 8], "grad_norm": [float("inf"), REPORTED_NAN, 0.5]})
    {7: inf}
    """
    if "grad_norm" not in columns or not np.isinf(columns["grad_norm"]).any():
        return {}
    order, starts = grouped([columns["step"]], then=[columns["segment"]])
    last = _last_of_each(order, starts)
    norms = zip(
        np.asarray(columns["step"])[last].tolist(), np.asarray(columns["grad_norm"])[last].tolist(), strict=True
    )
    return {step: norm if norm > 0 else math.nan for step, norm in norms if math.isinf(norm)}


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
    largest memory; if none has it, ``loss`` is NaN. A gradient norm of NaN was reported.
    """
    rows: dict[tuple[int, int], Mapping[str, Any]] = {}
    for record in records:
        place = (record["segment"], record["step"])
        before = rows.get(place, record)
        first = record if _lacks_loss(before) and not _lacks_loss(record) else before
        fullest = {name: max(before.get(name) or 0.0, record.get(name) or 0.0) or None for name in _MEMORY}
        rows[place] = {**before, **record, **first, **fullest}  # W&B makes a row of each call
    ordered = [rows[place] for place in sorted(rows)]
    columns = columns_of(ordered)
    columns["loss"] = np.where(columns["loss"] < 0, math.nan, columns["loss"])
    return columns


def not_finite(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, float]]:
    """By segment the first step at which the loss was not finite, and that loss."""
    failures: dict[int, tuple[int, float]] = {}
    for record in sorted(records, key=lambda one: one["step"]):
        if (loss := record.get("loss")) is not None and not math.isfinite(loss):
            failures.setdefault(record["segment"], (record["step"], loss))
    return failures


def _lacks_loss(record: Mapping[str, Any]) -> bool:
    loss = record.get("loss")
    return loss is None or loss < 0


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
    """Records as columns, in their order; a gradient norm of NaN was reported, and one of None is missing."""
    columns: dict[str, NDArray[Any]] = {
        name: np.array([record[name] for record in records], dtype=np.int64) for name in ("segment", "step")
    }
    columns |= {name: np.array([record.get(name) for record in records], dtype=float) for name in VALUE_COLUMNS}
    reported = np.array([record.get("grad_norm") is not None for record in records], dtype=bool)
    columns["grad_norm"] = np.where(np.isnan(columns["grad_norm"]) & reported, REPORTED_NAN, columns["grad_norm"])
    return columns
