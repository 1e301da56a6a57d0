"""Finished tables that come with the package: how far the projection is off, and what the published study leaves open.

``python -m benchmarks.validation --write`` makes them from everything that was measured; a test holds them to what the
model says now. A row of the validation table is of one of three kinds: a constant was *fitted* on it (or read off it),
it was *seen* while the form of the model was chosen, or it is *blind*: measured or found after the prediction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from moelab.data import read_json
from moelab.experiment import Routing
from moelab.planning.trust import Estimate

ONE_NODE = "one node, EP 4, before it ran"
"""Source of the rows whose predictions were written down before four H200s ran."""
OWN = ("H100 arms, first campaign", "H100 arms, later", ONE_NODE, "one node, EP 4", "one H200, EP 1")
"""Sources of this project's own steps."""
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
    stack: str = ""  # that trained a whole step, "TorchTitan" or another's, which nobody can ask a projection for
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
def _packaged() -> dict[str, Any]:
    return read_json("validation.json")


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


def timed(rows: Iterable[ValidationRow]) -> list[ValidationRow]:
    """Whole steps with an interval, which are all but gains."""
    return [row for row in rows if row.of == "step" and row.interval]


def median_error(rows: Sequence[ValidationRow]) -> float:
    """Median of the errors' sizes, percent."""
    return float(np.median([abs(row.error) for row in rows]))


def coverage(rows: Sequence[ValidationRow]) -> float:
    """Share of measured values that lie in their interval, percent."""
    return 100 * float(np.mean([row.inside for row in rows]))


def error_table() -> pd.DataFrame:
    """Errors of whole steps, of memory and of parts, by who measured them and by kind."""
    return pd.DataFrame(_packaged()["errors"]).set_index("rows")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step of the way from the published arm to Megatron-Bridge's, and the projected tokens/s/GPU after it."""

    name: str
    tps: float


def waterfall() -> tuple[Change, ...]:
    """The way from 918 to 3,328 tokens/s/GPU on 256 B200, one change after another; the published arm first."""
    return tuple(Change(**change) for change in _packaged()["waterfall"])


@dataclass(frozen=True, kw_only=True)
class TwoByTwo:
    """The four arms of the published study by all constants that meet what was published: medians and whole ranges."""

    tps: Mapping[str, Estimate]  # tokens/s/GPU of each arm; ``mxfp8_standard`` was never published
    gains: Mapping[str, Estimate]  # over ``bf16_standard``, as a ratio
    interaction: Estimate  # gain of both over the product of the gains of each, less one: zero if they compose
    parts_s: Mapping[str, Mapping[str, Estimate]]
    """Seconds of each part of a step: of one set of constants in the middle, whose parts add up, and the range."""
    sets: int  # of constants


def projected_two_by_two(routing: Routing = Routing.ROUND_ROBIN) -> TwoByTwo:
    """The published arms and the missing one under forced balance, as published, or random routing."""
    table = _packaged()["published"][routing.value]
    return TwoByTwo(
        tps=_estimates(table["tps"]),
        gains=_estimates(table["gains"]),
        interaction=Estimate(**table["interaction"]),
        parts_s={arm: _estimates(parts) for arm, parts in table["parts_s"].items()},
        sets=table["sets"],
    )


def _estimates(table: Mapping[str, Mapping[str, float]]) -> dict[str, Estimate]:
    return {name: Estimate(**one) for name, one in table.items()}


def left_open() -> list[str]:
    """What the published steps leave open, and which single measurement would settle most."""
    return list(_packaged()["left_open"])
