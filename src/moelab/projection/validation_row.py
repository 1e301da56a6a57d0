"""A row of the validation table: what was measured elsewhere, what the model says, and whether it had seen the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moelab.projection.calibration import Calibration, fitted
from moelab.projection.job import Job
from moelab.projection.step import step_time
from moelab.projection.uncertainty import outside, relative_width


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that was measured, and how to predict it.

    Attributes:
        source: who measured it; constants fitted on one source are left out together.
        name: unique in its source.
        unit: of both values.
        measured: value.
        predict: the value by a calibration.
        reference: where the value stands.
        whole: a whole training step, not a part of one.
        seen: whether constants that are not fitted were read off this very figure.
        job: of a whole step, from which the interval of its prediction follows.
    """

    source: str
    name: str
    unit: str
    measured: float
    predict: Callable[[Calibration], float]
    reference: str
    whole: bool = True
    seen: bool = False
    job: Job | None = None


@dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """A case with its prediction.

    Attributes:
        use: ``fitted``, ``constant read off it`` or ``predicted``.
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
        names = ("source", "name", "unit", "measured", "predicted", "use", "whole", "reference", "interval")
        return {**{name: getattr(self, name) for name in names}, "error": self.error}


def row_of(case: Case, calibration: Calibration) -> ValidationRow:
    """Predict a case."""
    anchors = {name for constant in fitted(calibration).values() for name in constant.fitted_on}
    use = "fitted" if case.name in anchors else "constant read off it" if case.seen else "predicted"
    predicted = case.predict(calibration)
    return ValidationRow(
        source=case.source,
        name=case.name,
        unit=case.unit,
        measured=case.measured,
        predicted=predicted,
        use=use,
        whole=case.whole,
        reference=case.reference,
        interval=_interval(case.job, predicted, calibration) if case.job else None,
    )


def _interval(job: Job, predicted: float, calibration: Calibration) -> tuple[float, float]:
    width = relative_width(step_time(job, calibration).parts_s, extrapolated=bool(outside(job)))
    return predicted / (1 + width), predicted * (1 + width)
