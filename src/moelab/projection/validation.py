"""The validation table: everything that was measured, beside what the model says of it, and the goals.

The table is a file of the package. ``benchmarks/projection.py --write`` makes it from ``benchmarks/validation``, which
has every case and how it is predicted; a test holds it to what the model says now. Rows that a constant was fitted on,
or read off, are marked; all others are predictions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
from scipy.optimize import root

from moelab.experiment import Experiment
from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.projection.calibration import (
    CALIBRATION,
    Calibration,
    fitted,
    with_values,
)
from moelab.projection.job import Job, job_of
from moelab.projection.megatron import simumax_job
from moelab.projection.published import published_job
from moelab.projection.step import step_time, tps_of

PUBLISHED, BRIDGE_SOURCE, SIMUMAX, H100_FIRST, H100_LATER, ONE_NODE = (
    "PyTorch and Nebius",
    "other systems",
    "SimuMax",
    "H100 arms, first campaign",
    "H100 arms, later",
    "one node, EP 2 to 8",
)
"""Sources of rows that a goal or a notebook is about."""
TABLE = "validation.json"


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """Something that was measured, with its prediction.

    Attributes:
        source: who measured it.
        name: unique in its source.
        unit: of both values.
        measured: value.
        predicted: value.
        use: ``fitted``, ``constant read off it`` or ``predicted``.
        whole: a whole training step, not a part of one.
        reference: where the measured value stands.
        interval: of the prediction, 90 %; None of a part of a step or a gain.
    """

    source: str
    name: str
    unit: str
    measured: float
    predicted: float
    use: str
    whole: bool
    reference: str
    interval: tuple[float, float] | None

    @property
    def error(self) -> float:
        """Relative error of the prediction; of gains, the difference in percentage points."""
        if self.unit == "% gain":
            return self.predicted - self.measured
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """The row as columns."""
        return {**asdict(self), "error": self.error}


def validation_table() -> tuple[ValidationRow, ...]:
    """All rows, in the order of their sources; those of the full node are as they were predicted before it ran."""
    return _packaged("rows")


def left_out_table() -> tuple[ValidationRow, ...]:
    """Whole steps, each predicted as if its source had never been seen.

    What was fitted on the source falls back to what the others know of the same thing.
    """
    return _packaged("left_out")


@functools.cache
def _packaged(table: str) -> tuple[ValidationRow, ...]:
    content = json.loads((resources.files("moelab") / "data" / TABLE).read_text())
    return tuple(
        ValidationRow(**{**row, "interval": row["interval"] and tuple(row["interval"])}) for row in content[table]
    )


def debug_job() -> Job:
    """A model so small that the GPU waits for the host, on one H100, not compiled."""
    experiment = Experiment(
        model="debug", hardware="h100_node", seq_len=2048, local_batch=8, activation_checkpoint="selective"
    )
    layout = check(experiment).layout
    assert layout is not None, "one node and no pipeline"
    return job_of(experiment, layout, cluster_of("h100_node").node)


def refit(calibration: Calibration = CALIBRATION) -> Calibration:
    """Find the fitted constants again, all at once.

    Returns:
        A calibration that meets every row that a constant was fitted on.
    """
    constants = fitted(calibration)
    measured = {row.name: row.measured for row in validation_table()}
    simumax, debug, published = simumax_job(ep=8, pp=1, microbatches=32), debug_job(), published_job("bf16_standard")

    def errors(logs: np.ndarray) -> list[float]:
        tried = with_values(calibration, **dict(zip(constants, map(float, np.exp(logs)), strict=True)))
        predicted = {
            "SimuMax EP8 PP1, 32 micro-batches": 1e3 * step_time(simumax, tried).total_s,
            "debug bf16_standard, not compiled, selective": tps_of(debug, tried),
            "671B bf16_standard": tps_of(published, tried),
        }
        rows = [constant.fitted_on[0] for constant in constants.values()]
        return [float(np.log(predicted[row] / measured[row])) for row in rows]

    solved = root(errors, np.log([constant.value for constant in constants.values()]), tol=1e-9)
    return with_values(calibration, **dict(zip(constants, map(float, np.exp(solved.x)), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal that was set before the model was made.

    Attributes:
        name: what it asks.
        limit: largest error allowed; relative, or percentage points of a gain.
        worst: largest error of a row that no constant had seen.
        at: the row that has it.
        predicted: how many rows no constant had seen; they alone are judged.
        seen: how many others there are.
        reason: what is known about a goal that is missed.
    """

    name: str
    limit: float
    worst: float
    at: str
    predicted: int
    seen: int
    reason: str

    @property
    def met(self) -> bool:
        """Whether every row that no constant had seen is within the limit."""
        return abs(self.worst) <= self.limit


GOALS: tuple[tuple[str, str, str, float, str], ...] = (
    (
        "published 671B throughput within 5 %",
        PUBLISHED,
        "671B",
        0.05,
        "not identified: DeepEP's exchange may come out too short, as it is taken to reach 45.5 of a card's 50 GB/s, "
        "as on 32 ranks. At 21.5, what DeepEP's table has for V1 on 16 ranks, the model says 860 tokens/s instead of "
        "912; other constants do as well",
    ),
    (
        "published gains within 2 points",
        PUBLISHED,
        "gain",
        2.0,
        "not identified, as above: at 21.5 GB/s DeepEP gains 32 %, and then 1 % under random routing. That full "
        "checkpointing sends nothing again would be no explanation: it makes the gain 17 %",
    ),
    ("SimuMax's six rows within 5 %", SIMUMAX, "SimuMax", 0.05, ""),
    ("H100 and H200 arms within 6 %", H100_LATER, "", 0.06, ""),
    (
        "H100 arms of the first campaign within 6 %",
        H100_FIRST,
        "",
        0.06,
        "that campaign's grouped products alone took up to 55 % longer than the same shapes did later, and its 671B "
        "baseline 14 % longer than the same arm did later: a slower GPU, or a slower clock, which no row tells. Its "
        "emulated MXFP8 was torchao's, not the faster one that is modelled",
    ),
    ("Megatron-Bridge on 256 × B200 within 15 %", BRIDGE_SOURCE, "256 × B200", 0.15, ""),
)
"""Name, source, beginning of the rows' names, limit, and the reason if it is missed."""


NOT_PREDICTED: tuple[tuple[str, str, str], ...] = (
    ("PyTorch and Nebius", "loss of 16B in BF16 and MXFP8", "not a time; notebooks 05 and 06 are about it"),
    ("other systems", "TFLOP/s beside tokens/s", "the same runs; every tool counts operations in its own way"),
    ("torchao", "speed-ups, GB/s and shares of a peak beside times", "quotients of rows that are in the table"),
    ("SimuMax", "memory of six steps", "not a time; moelab.memory is held against it"),
    ("Primus, SimAI, vTrain, Charon", "errors of their own predictions", "the measured steps are not at hand"),
    (
        "two by two",
        "arms whose allocator retried in the timed steps",
        "the model has no time for freeing and asking again",
    ),
    (
        "two by two, H100 arms of the first campaign",
        "FP8 arms before November 28, 23:00",
        "their experts were BF16 in all products or in one: TorchTitan 0.3.0 drops torchao's wrapper of a weight where "
        "ep > 1, and the model is of what runs now",
    ),
    ("two by two", "the trial", "one pass, in which attention had chosen tiles in its backward pass alone"),
    ("two processor cores", "seconds of a step on a CPU", "the model has no rates of a processor"),
)
"""Figures of the same sources that are no rows: source, what, and why not."""


def goals(rows: Sequence[ValidationRow]) -> tuple[Goal, ...]:
    """Every goal with its worst row of those that no constant had seen."""
    judged = []
    for name, source, prefix, limit, reason in GOALS:
        about = [row for row in rows if row.source == source and row.name.startswith(prefix)]
        new = [row for row in about if row.use == "predicted"]
        worst = max(new, key=lambda row: abs(row.error))
        counts = {"predicted": len(new), "seen": len(about) - len(new)}
        judged.append(Goal(name=name, limit=limit, worst=worst.error, at=worst.name, reason=reason, **counts))
    return tuple(judged)
