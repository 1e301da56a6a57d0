"""The metrics table: one schema for every source, and the operations that respect its segments.

One row per (run, segment, step). A segment is one launch of the job, counted from 0; a requeued job repeats the steps
since its last checkpoint, so the same step can stand in two segments. ``tps`` is tokens per second **per GPU**, as
TorchTitan prints it, ``time`` is seconds since the Unix epoch, ``mfu`` and ``memory_pct`` are percentages, memory is in
GiB. What a source does not have is NaN, never zero; a loss that was *reported* as NaN is told by a reader's ``reason``,
a gradient norm by its ``grad_norm_not_finite``.
"""

from __future__ import annotations

import functools
import itertools
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
_ROUNDED_MEMORY: Final = 0.00501  # GiB or percent: the log prints memory to two decimals
_ROUNDED_LOSS: Final = 0.0000501  # the least precise loss that a TorchTitan log prints has four decimals
_SAME_AFTER_RESTART: Final = ("model", "parameters", "seq_len", "optimizer", "lr", "mxfp8_kernels", "experts_in")
"""Settings that a run keeps; nodes that were lost change its parallelism, and an update its versions."""
SAME_SEED: Final = 0.002
"""Nats by which the first losses of two launches with the same seed differ at most: sums are in another order."""
SAME_RUN: Final = 0.01
"""Share by which the first losses of a restart and of what it repeats differ at most."""
_QUARTER_HOUR_S: Final = 900.0  # every time zone is a whole number of these from UTC


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
        return _table(self.validation_columns, VALIDATION_COLUMNS)


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


def separate_runs(
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
    unless its first loss is the same, and the last one of the same step: a restart that found no checkpoint, with the
    same seed. Launches of other settings are never of one run.

    ``columns``, ``validation`` and ``failures`` are what :func:`metrics_read` takes; ``settings`` are those of each
    launch, as far as they are known, and ``run`` is how the source names all of it.

    Raises:
        BadInput: the launches show that two runs are mixed, so that nothing says which row is whose.

    >>> launches = {"segment": np.array([0, 0, 1, 1]), "step": np.array([1, 2, 1, 2])}
    >>> launches["loss"] = np.array([8.11, 8.0, 8.13, 8.1])
    >>> none = {name: values[:0] for name, values in launches.items()}
    >>> reads = separate_runs(launches, none, {}, source=Path("two.log"))
    >>> [(read.name, read.segments, read.rows["loss"].tolist()) for read in reads]
    [('run 1 of 2', 1, [8.11, 8.0]), ('run 2 of 2', 1, [8.13, 8.1])]
    """
    groups: list[list[int]] = []
    launches = {
        number: pd.Series(columns["loss"], index=columns["step"])[columns["segment"] == number]
        for number in np.unique(columns["segment"]).tolist()
    }
    # Two runs that log in turns look like many short launches, each without the other's steps.
    if len(launches) > 2 and _has_holes(launches.values()):
        raise BadInput(
            f"{source}: the steps of two runs are mixed in it: they go back {len(launches) - 1} times. "
            "Give the history of each run by itself"
        )
    known = settings if len(settings) == len(launches) else [{}] * len(launches)
    own = dict(zip(launches, known, strict=True))
    for number, losses in launches.items():
        earlier = [
            group
            for group in groups
            if _is_restart(pd.concat([launches[one] for one in group]), losses, own[group[0]], own[number])
        ]
        if earlier:
            # Of several runs that it could go on with, the one whose loss it starts from.
            min(earlier, key=lambda group: _jump(launches[group[-1]], losses)).append(number)
        else:
            groups.append([number])
    if "time" not in columns or np.isnan(columns["time"]).all():
        for group in groups:
            starts = [launches[number].index.min() for number in group]
            if starts[0] > min(starts):  # the newest launch is first in the source
                group.sort(key=lambda number: launches[number].index.min())
    if len(groups) < 2 and groups[:1] in ([], [sorted(launches)]):
        return [metrics_read(columns, validation, failures, run=run, notes=notes)]
    reads = []
    for index, group in enumerate(groups, start=1):
        renumbered = {number: place for place, number in enumerate(group)}
        rows, held_out = (_renumbered(part, renumbered) for part in (columns, validation))
        failed = {renumbered[number]: failures[number] for number in group if number in failures}
        name = f"run {index} of {len(groups)}" if len(groups) > 1 else None
        reads.append(metrics_read(rows, held_out, failed, run=run, notes=notes, name=name))
    return reads


def _renumbered(columns: Columns, numbers: Mapping[int, int]) -> Columns:
    """Rows of these segments, in the order of their new numbers."""
    segment = np.array([numbers.get(number, -1) for number in columns["segment"].tolist()], dtype=np.int64)
    order = np.argsort(segment, kind="stable")[int((segment < 0).sum()) :]
    return {**{name: values[order] for name, values in columns.items()}, "segment": segment[order]}


def _has_holes(launches: Iterable[pd.Series[float]]) -> bool:
    """Tell whether most launches leave out steps, two at least of those that the others have."""
    steps = [np.unique(losses.index.to_numpy()) for losses in launches]
    interval = np.median(np.diff(np.unique(np.concatenate(steps))))
    holes = [bool((np.diff(one) >= 2 * interval).any()) for one in steps if len(one) > 1]
    return 2 * sum(holes) > len(steps)


def _is_restart(
    earlier: pd.Series[float], losses: pd.Series[float], settings: Mapping[str, str], own_settings: Mapping[str, str]
) -> bool:
    """Tell whether a launch with these losses by step, and these settings, goes on with what earlier ones trained."""
    first = losses.index.min()
    names = _SAME_AFTER_RESTART if first > earlier.index.min() else {*settings, *own_settings}
    if settings and own_settings and any(settings.get(name) != own_settings.get(name) for name in names):
        return False
    if first > earlier.index.min() or first not in earlier.index:
        return True
    scratch, last = first <= 1, losses.index.max()
    compared = [first, last] if scratch and last == earlier.index.max() else [first]  # as long: a repetition?
    earlier = earlier[~earlier.index.duplicated(keep="last")]
    allowed = SAME_SEED if scratch else SAME_RUN * abs(earlier[first])
    return not any(abs(losses[step] - earlier[step]) > allowed for step in compared)  # NaN says nothing


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


def combine(log: Columns, tb: Columns) -> Columns:
    """Unite what the log and TensorBoard have of the same run; no step that either has is lost.

    TensorBoard's values are not rounded and include ``lr``, so they win where both have a step. But its writer flushes
    every 120 s: a killed launch lacks its last steps there, and one killed early may have no segment at all. Its
    segments are therefore matched with the log's by what they contain (loss, then time), not by their number. Memory is
    the larger of the two, because TensorBoard knows one rank only. Times of log lines are moved to TensorBoard's when
    the log was written in another time zone than it is read in.
    """
    if not len(log["step"]) or not len(tb["step"]):
        return log if len(log["step"]) else tb
    log, tb = (_with_all_values(part) for part in (log, tb))
    matches = _matching_segments(log, tb)
    tb = {**tb, "segment": np.array([matches[number] for number in tb["segment"].tolist()])}
    both = {name: np.concatenate([log[name], tb[name]]) for name in log}
    is_exact = np.arange(len(both["step"])) >= len(log["step"])
    order, starts = grouped([both["segment"], both["step"]], then=[is_exact])
    first, last = order[starts], _last_of_each(order, starts)  # the same row where one has the step
    differences = (both["time"][last] - both["time"][first])[first != last]
    if len(known := differences[~np.isnan(differences)]):
        zone_s = round(float(np.median(known)) / _QUARTER_HOUR_S) * _QUARTER_HOUR_S
        both["time"] = np.where(is_exact, both["time"], both["time"] + zone_s)
    united = {name: np.where(np.isnan(values[last]), values[first], values[last]) for name, values in both.items()}
    for name in _MEMORY:
        logged = both[name][first]
        united[name] = np.where(logged > united[name] + _ROUNDED_MEMORY, logged, united[name])
    segment = united["segment"]
    if segment[0] < 0:  # a launch that the log lacks takes its place by its time
        first_time = pd.Series(united["time"]).groupby(segment).min().sort_values()
        position = {number: index for index, number in enumerate(first_time.index)}
        united["segment"] = np.array([position[number] for number in segment.tolist()])
        order, _ = grouped([united["segment"], united["step"]])
        united = {name: values[order] for name, values in united.items()}
    return united


def _with_all_values(columns: Columns) -> Columns:
    """With every column of values, and a gradient norm that was reported as NaN like one that is missing."""
    missing = np.full(len(columns["step"]), math.nan)
    every = {name: columns.get(name, missing) for name in ("segment", "step", *VALUE_COLUMNS)}
    return {**every, "grad_norm": np.where(every["grad_norm"] == REPORTED_NAN, math.nan, every["grad_norm"])}


def _matching_segments(log: Columns, tb: Columns) -> dict[int, int]:
    """Return the log's segment for each of TensorBoard's; one that the log lacks gets a negative number."""
    pairs = []
    launches = [
        {number: np.flatnonzero(part["segment"] == number) for number in np.unique(part["segment"]).tolist()}
        for part in (tb, log)
    ]
    for (tb_number, tb_rows), (log_number, log_rows) in itertools.product(*(one.items() for one in launches)):
        _, in_tb, in_log = np.intersect1d(tb["step"][tb_rows], log["step"][log_rows], return_indices=True)
        if len(in_tb):
            losses, times = (tb[name][tb_rows[in_tb]] - log[name][log_rows[in_log]] for name in ("loss", "time"))
            # Both sources write a step in the same instant, apart from the time zone.
            seconds = np.abs(times - np.round(times / _QUARTER_HOUR_S) * _QUARTER_HOUR_S)
            differs, known = float(np.mean(np.abs(losses) > _ROUNDED_LOSS)), seconds[~np.isnan(seconds)]
            pairs.append((differs, float(np.median(known)) if len(known) else math.inf, tb_number, log_number))
    matches: dict[int, int] = {}
    for differs, _, tb_number, log_number in sorted(pairs):
        if differs <= 0.5 and tb_number not in matches and log_number not in matches.values():
            matches[tb_number] = log_number
    return {number: matches.get(number, -1 - number) for number in launches[0]}


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


def ranks_to_rows(columns: Columns, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Merge the rows that several pipeline ranks wrote for the same ``keys`` into one.

    A negative loss marks a rank without the loss: the values of a rank that has it are kept, with the largest memory;
    if none has it, ``loss`` is NaN.
    """
    lacks = np.signbit(columns["loss"]) & np.isfinite(columns["loss"])
    order, starts = grouped([columns[name] for name in keys], then=[lacks, columns["time"]])
    merged = {
        name: np.fmax.reduceat(values[order], starts) if name in _MEMORY and len(starts) else values[order][starts]
        for name, values in columns.items()
    }
    return merged | {"loss": np.where(lacks[order][starts], math.nan, merged["loss"])}
