"""The validation table as the package carries it: everything that was measured, beside what the model says of it."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize_scalar
from scipy.stats import beta

from moelab.errors import BadInput
from moelab.planning.measured import FULL_NODE, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.tables import ONE_NODE, ValidationRow, coverage, median_error, timed
from moelab.planning.time.calibration import CALIBRATION, CONSTANTS, Calibration, fitted, with_values
from moelab.planning.time.step import step_parts_s
from moelab.planning.trust import outside, relative_width

from .node import Place, hardware_of, load_predicted, node_results
from .parts import Part, all_parts
from .published import published_tables
from .shapes import tps_of
from .sources import NOUS, NOW
from .steps import HERE, LAUNCHES_FITTED_ON, Step, all_steps
from .waterfall import waterfall


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal that was set before the model was made.

    Attributes:
        name: what it asks.
        about: whether it is about a step.
        reached: by all steps that it is about, percent.
        least: value that is still good enough.
        most: value that is still good enough.
    """

    name: str
    about: Callable[[ValidationRow], bool]
    reached: Callable[[Sequence[ValidationRow]], float]
    least: float = 0.0
    most: float


def median_width(rows: Sequence[ValidationRow]) -> float:
    """Median of the upper half of the intervals, percent of the prediction."""
    return float(np.median([100 * (row.interval[1] / row.predicted - 1) for row in rows if row.interval]))


KINDS = ("fitted", "seen", "blind")
WHOSE: dict[str, Callable[[ValidationRow], bool]] = {
    "steps of others, TorchTitan": lambda row: row.public and row.stack == TITAN,
    "steps of others, another stack": lambda row: row.public and row.stack != TITAN,
    "steps of this project": lambda row: not row.public,
}
"""Of other stacks nobody can ask a projection: they show what the terms are worth, not what a user gets."""


def errors_by_kind(rows: Sequence[ValidationRow]) -> pd.DataFrame:
    """Errors of whole steps, of memory and of parts, by kind and by who measured them.

    Returns:
        A row for each that has any, with the number of rows, the median size of the error and the mean error in
        percent, the share of rows within 15 %, and of steps how many lie in their 90 % interval, with the 90 % interval
        of that share (Clopper and Pearson), and how wide the median one is, ± percent.
    """
    groups = [
        (f"{whose}, {kind}", [row for row in timed(rows) if is_theirs(row) and row.kind == kind])
        for whose, is_theirs in WHOSE.items()
        for kind in KINDS
    ]
    groups += [("memory of others", [row for row in rows if row.of == "memory" and of_others(row)])]
    groups += [(f"parts, {kind}", [row for row in rows if row.of == "part" and row.kind == kind]) for kind in KINDS]
    table = []
    for name, group in groups:
        if group:
            shares = {"in their interval": np.nan, "from": np.nan, "to": np.nan, "median interval": np.nan}
            if group[0].interval:  # only steps have one
                low, high = share_interval(sum(row.inside for row in group), len(group))
                shares = {"in their interval": coverage(group), "from": low, "to": high}
                shares |= {"median interval": median_width(group)}
            errors = [row.error for row in group]
            within = 100 * float(np.mean([abs(error) <= 15 for error in errors]))
            table.append(
                {
                    "rows": name,
                    "n": len(group),
                    "median error": median_error(group),
                    "mean error": float(np.mean(errors)),
                    "within 15 %": within,
                    **shares,
                }
            )
    return pd.DataFrame(table).set_index("rows").round(1)


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """90 % interval of a share, percent."""
    low = beta.ppf(0.05, hits, of - hits + 1) if hits else 0.0
    high = beta.ppf(0.95, hits + 1, of - hits) if hits < of else 1.0
    return 100 * float(low), 100 * float(high)


def of_others(row: ValidationRow) -> bool:
    """Steps that others measured and no constant was fitted on."""
    return row.public and row.kind != "fitted"


def worst_error(rows: Sequence[ValidationRow]) -> float:
    """Largest size of an error, percent."""
    return max(abs(row.error) for row in rows)


def of_four(model: str) -> Callable[[ValidationRow], bool]:
    """Steps of a model on four H200s, as they are predicted now."""
    return lambda row: row.source == NOW and row.name.startswith(model)


def mean_error(rows: Sequence[ValidationRow]) -> float:
    """Mean of the errors with their signs, percent."""
    return float(np.mean([row.error for row in rows]))


GOALS = (
    Goal(
        name="median error of public steps of TorchTitan",
        about=lambda row: of_others(row) and row.stack == TITAN,
        reached=median_error,
        most=8,
    ),
    Goal(name="median error of public steps", about=of_others, reached=median_error, most=12),
    Goal(
        name="mean error of GB200, GB300 and B300",
        about=lambda row: row.public and any(gpu in row.name for gpu in ("GB200", "GB300", "B300")),
        reached=mean_error,
        least=-5,
        most=5,
    ),
    Goal(name="public steps in their 90 % interval", about=of_others, reached=coverage, least=80, most=97),
    Goal(name="median 90 % interval of public steps, ±", about=of_others, reached=median_width, most=25),
    Goal(
        name="worst of 1 to 16 nodes, Qwen3-30B with DeepEP",
        about=lambda row: row.source == NOUS and "DeepEP" in row.name,
        reached=worst_error,
        most=10,
    ),
    Goal(name="worst of four H200s, 671B", about=of_four("671B"), reached=worst_error, most=3),
    Goal(name="worst of four H200s, 16B", about=of_four("16B"), reached=worst_error, most=7),
)


def goals(rows: Sequence[ValidationRow]) -> list[dict[str, Any]]:
    """What is asked and reached, a row for each goal."""
    judged = []
    for goal in GOALS:
        group = [row for row in timed(rows) if goal.about(row)]
        value = goal.reached(group)
        asked = f"{goal.least:g} to {goal.most:g} %" if goal.least else f"at most {goal.most:g} %"
        answer = "met" if goal.least <= value <= goal.most else "MISSED"
        judged.append({"goal": goal.name, "asked": asked, "reached": f"{value:.1f} %", "rows": len(group), "": answer})
    return judged


def not_predicted() -> list[dict[str, str]]:
    """Figures of the same sources that are no rows: source, what, and why not."""
    with (HERE / "not_predicted.csv").open(newline="") as file:
        return list(csv.DictReader(file))


TITAN = "TorchTitan"
BEGIN, END = "<!-- written by python -m benchmarks.validation --write -->", "<!-- end of what it wrote -->"


def with_errors(page: str, rows: Sequence[ValidationRow]) -> str:
    """A page of the documentation with errors by kind, the goals and what stays open between its two marks."""
    tables = (errors_by_kind(rows).map("{:g}".format).replace("nan", "–"), pd.DataFrame(goals(rows)).set_index("goal"))
    open_ = [f"- {line.strip()}" for line in published()["left_open"]]
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    blocks = [*(_markdown(table) for table in tables), "What the published study leaves open:", "\n".join(open_)]
    return "\n\n".join([before + BEGIN, *blocks, END + after])


def _markdown(table: pd.DataFrame) -> str:
    lines = [[str(table.index.name), *table.columns], ["---"] * (1 + len(table.columns))]
    lines += [[str(name), *map(str, row)] for name, row in zip(table.index, table.to_numpy(), strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@functools.cache
def steps() -> tuple[Step, ...]:
    """Every step that the model is held against."""
    return tuple(all_steps())


@functools.cache
def parts() -> tuple[Part, ...]:
    """Every part of a step."""
    return tuple(all_parts())


def table_file(*, date: str, git_commit: str | None) -> dict[str, Any]:
    """Content of ``moelab/data/validation.json``."""
    rows = table_rows()
    return {
        "label": "derived beside measured and quoted",
        "what": "benchmarks/validation, as python -m benchmarks.validation --write wrote it",
        "date": date,
        "git_commit": git_commit,
        "errors": json.loads(errors_by_kind(rows).reset_index().to_json(orient="records")),
        **published(),
        "rows": [asdict(row) for row in rows],
        "waterfall": [{"name": one.name, "tps": six_digits(one.tps)} for one in waterfall(steps())],
    }


@functools.cache
def published() -> dict[str, Any]:
    """Tables of the published study."""
    return published_tables()


def table_rows() -> list[ValidationRow]:
    """Every row, predicted by the model as it is now; the node of four also as it was predicted before it ran."""
    rows = [row for step in steps() for row in rows_of_step(step)]
    of_parts = [replace(row, predicted=six_digits(predict(CALIBRATION))) for row, predict in parts()]
    return [*rows, *full_node_rows(), *of_parts]


def predicted_by(step: Step, calibration: Calibration) -> tuple[float, tuple[float, float] | None]:
    """What the model says of a step in its unit, and its 90 % interval; a gain has none."""
    if step.over is not None:
        return 100 * (tps_of(step.job, calibration) / tps_of(step.over, calibration) - 1), None
    parts_s = step_parts_s(step.job, calibration)
    step_s = sum(parts_s.values())
    value = 1e3 * step_s if step.row.unit == "ms" else step.job.tokens_per_gpu / step_s
    width = relative_width(parts_s, extrapolated=bool(outside(step.job)))
    return value, (value / (1 + width), value * (1 + width))


def six_digits(value: float) -> float:
    """As the file has it: what follows differs between machines."""
    return float(f"{value:.6g}")


def rows_of_step(step: Step) -> list[ValidationRow]:
    """Its speed and its memory, as far as each was measured and can be predicted."""
    stack = TITAN if step.job.stack.launch_s is None else step.job.stack.name
    rows, row = [], replace(step.row, stack=stack)  # a step may have a speed, a memory, or both
    if row.unit != "GiB":
        value, interval = predicted_by(step, CALIBRATION)
        rows.append(
            replace(
                row,
                kind="fitted" if row.name in fitted_on() else row.kind,
                predicted=six_digits(value),
                interval=interval and (six_digits(interval[0]), six_digits(interval[1])),
            )
        )
    if step.memory_gib and step.memory_predicted_gib:
        rows.append(
            replace(
                row,
                of="memory",
                name=f"{row.name}, memory",
                kind=MEMORY_KINDS.get(row.name, row.kind),
                unit="GiB",
                measured=step.memory_gib,
                predicted=six_digits(step.memory_predicted_gib),
            )
        )
    return rows


MEMORY_KINDS = {"16B, 8 × H100, EP 4": "fitted", "Qwen3-30B, 8 × B200, EP 1": "seen"}
"""Of peaks that are not of their step's kind: that of the busiest layer's rows, and one that, predicted 19 % too high,
led to what a compiled layer keeps under selective checkpointing."""


def fitted_on() -> set[str]:
    """Names of steps that a constant was fitted on."""
    return {LAUNCHES_FITTED_ON, *(row for name in fitted() for row in CONSTANTS[name].fitted_on)}


def full_node_rows(measured: Measurement | None = None) -> tuple[ValidationRow, ...]:
    """One node: the packaged predictions beside what was measured later, by default in the package's file.

    Returns:
        Nothing where nothing was measured yet.

    Raises:
        BadInput: if the predictions are not older than the measurement, or for none of its GPUs.
    """
    measured = measured or load_measured(FULL_NODE)
    if measured.content is None:
        return ()
    predicted = load_predicted()
    if predicted["date"] >= measured.content["date"]:  # both are ISO 8601 in UTC, so they compare as text
        raise BadInput(
            f"the predictions are of {predicted['date']} and the measurement of {measured.content['date']}: "
            "what was written down afterwards is no prediction"
        )
    hardware = hardware_of(measured)
    results = node_results(measured, Measurement(name=TWO_BY_TWO, content=None))
    expected = {
        Place(row["shape"], row["ep"], row["routing"], row["arm"]): row
        for row in predicted["rows"]
        if row["hardware"] == hardware
    }
    reference = f"predicted {predicted['date'][:10]} at {str(predicted['git_commit'])[:12]}; {measured.stamp}"
    return tuple(
        ValidationRow(
            of="step",
            source=ONE_NODE,
            name=f"{place.shape} {place.arm}, {place.routing}, EP {place.ep}",
            date=measured.content["date"][:10],
            kind="blind",
            unit="tokens/s/GPU",
            measured=result.tps,
            predicted=expected[place]["tps"],
            interval=tuple(expected[place]["interval"]),
            reference=reference,
        )
        for place, result in results.items()
        if place in expected
    )


def refit(calibration: Calibration = CALIBRATION) -> Calibration:
    """Find the fitted constants again, one after the other: each where the logarithmic errors of its rows are least."""
    for name in fitted():
        calibration = with_values(calibration, **{name: _best_value(name, calibration)})
    return calibration


def _best_value(name: str, calibration: Calibration) -> float:
    rows = [step for step in steps() if step.row.name in CONSTANTS[name].fitted_on]
    usual = float(getattr(calibration, name))

    def squares(log: float) -> float:
        tried = with_values(calibration, **{name: usual * math.exp(log)})
        return sum(math.log(predicted_by(step, tried)[0] / step.row.measured) ** 2 for step in rows)

    # logarithms keep constants positive
    found = minimize_scalar(squares, bounds=(-2, 2), method="bounded", options={"xatol": 1e-6})
    return usual * math.exp(found.x)
