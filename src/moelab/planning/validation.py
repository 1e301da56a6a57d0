"""The validation table: everything that was measured, beside what the model says of it, and the goals.

The table is a file of the package. ``python -m benchmarks.validation --write`` makes it from the rows there; a test
holds it to what the model says now. A row is of one of three kinds: a constant was *fitted* on it (or read off it), it
was *seen* while the form of the model was chosen, or it is *blind*: measured or found after the prediction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from moelab.data import read_json

PUBLISHED, BRIDGE_SOURCE, NOUS = ("PyTorch and Nebius", "Megatron-Bridge", "NousResearch")
H100_FIRST, H100_LATER, ONE_NODE, NOW = OWN = (
    "H100 arms, first campaign",
    "H100 arms, later",
    "one node, EP 4, before it ran",
    "one node, EP 4",
)
"""Sources of rows that a goal or a notebook is about; the last four are this project's own steps."""
TABLE = "validation.json"
KINDS = ("fitted", "seen", "blind")
GAIN = "% gain"
"""Unit of rows whose error is in percentage points."""


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """Something that was measured, with its prediction."""

    of: Literal["step", "part", "memory"]  # a whole training step, a part of one, or the memory of a rank
    source: str
    name: str
    date: str  # of the measurement, as far as it is known
    kind: Literal["fitted", "seen", "blind"]
    unit: str  # of both values
    measured: float
    predicted: float = math.nan  # NaN until the model is asked
    interval: tuple[float, float] | None = None  # of the prediction, 90 %; only steps that are no gain have one
    inferred: str = ""  # what the source does not say and the prediction needs
    reference: str  # where the measured value stands

    @property
    def error(self) -> float:
        """Error of the prediction in percent; of gains, in percentage points."""
        if self.unit == GAIN:  # a relative error of a small gain says nothing
            return self.predicted - self.measured
        return 100 * (self.predicted / self.measured - 1)

    @property
    def public(self) -> bool:
        """Whether others measured it."""
        return self.source not in OWN

    @property
    def inside(self) -> bool:
        """Whether the measured value lies in the interval."""
        return self.interval is not None and self.interval[0] <= self.measured <= self.interval[1]


@functools.cache
def _packaged() -> dict[str, list[dict[str, Any]]]:
    return read_json(TABLE)


def validation_table() -> tuple[ValidationRow, ...]:
    """All rows: steps with their memory, the node of four as it was predicted before it ran, then parts of steps."""
    rows = _packaged()["rows"]
    return tuple(ValidationRow(**{**row, "interval": row["interval"] and tuple(row["interval"])}) for row in rows)


def row_table(rows: Iterable[ValidationRow]) -> pd.DataFrame:
    """Rows with measured and predicted value, error and whether the measured one lies in the interval."""
    return pd.DataFrame(
        {
            "source": row.source,
            "row": row.name,
            "date": row.date,
            "kind": row.kind,
            "measured": row.measured,
            "predicted": row.predicted,
            "unit": row.unit,
            "error": f"{row.error:+.1f} {'points' if row.unit == GAIN else '%'}",
            "in its interval": "" if row.interval is None else "yes" if row.inside else "no",
            "inferred": row.inferred,
        }
        for row in rows
    ).round(1)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the way from the published arm to Megatron-Bridge's, and the projected tokens/s/GPU after it."""

    name: str
    tps: float


def added_tps(changes: Sequence[Change]) -> list[float]:
    """What each change adds to the tokens/s/GPU of the one before; the first is whole."""
    before = [0.0, *(change.tps for change in changes[:-1])]
    return [change.tps - start for change, start in zip(changes, before, strict=True)]


def waterfall() -> tuple[Change, ...]:
    """The way from 918 to 3,328 tokens/s/GPU on 256 B200, one change after another; the published arm first."""
    return tuple(Change(**change) for change in _packaged()["waterfall"])


def timed(rows: Iterable[ValidationRow]) -> list[ValidationRow]:
    """Whole steps with an interval, which are all but gains."""
    return [row for row in rows if row.of == "step" and row.interval]


def median_error(rows: Sequence[ValidationRow]) -> float:
    """Median of the errors' sizes, percent."""
    return float(np.median([abs(row.error) for row in rows]))


def coverage(rows: Sequence[ValidationRow]) -> float:
    """Share of measured values that lie in their interval, percent."""
    return 100 * float(np.mean([row.inside for row in rows]))


def median_width(rows: Sequence[ValidationRow]) -> float:
    """Median of the upper half of the intervals, percent of the prediction."""
    return float(np.median([100 * (row.interval[1] / row.predicted - 1) for row in rows if row.interval]))


def errors_by_kind(rows: Sequence[ValidationRow]) -> pd.DataFrame:
    """Errors of whole steps, of memory and of parts, by kind and by who measured them.

    Returns:
        A row for each that has any, with the number of rows, the median size of the error in percent, the share of
        rows within 15 %, and of steps how many lie in their 90 % interval and how wide the median one is, ± percent.
    """
    groups = [
        (f"steps of {whose}, {kind}", [row for row in timed(rows) if (row.public, row.kind) == (public, kind)])
        for public, whose in ((True, "others"), (False, "this project"))
        for kind in KINDS
    ]
    groups += [("memory of others", [row for row in rows if row.of == "memory" and row.kind != "fitted"])]
    groups += [(f"parts, {kind}", [row for row in rows if row.of == "part" and row.kind == kind]) for kind in KINDS]
    table = [
        {
            "rows": name,
            "n": len(group),
            "median error": median_error(group),
            "within 15 %": 100 * float(np.mean([abs(row.error) <= 15 for row in group])),
            "in their interval": coverage(group) if group[0].interval else np.nan,  # only steps have one
            "median interval": median_width(group) if group[0].interval else np.nan,
        }
        for name, group in groups
        if group
    ]
    return pd.DataFrame(table).set_index("rows").round(1)


def goal_table() -> pd.DataFrame:
    """Goals that were set before the model was made, with what is reached."""
    return pd.DataFrame(_packaged()["goals"]).set_index("goal")


def not_predicted() -> pd.DataFrame:
    """Figures of the same sources that are no rows: source, what, and why not."""
    return pd.DataFrame(_packaged()["not_predicted"]).set_index("source")
