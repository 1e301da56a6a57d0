"""The validation table as the package carries it: every case predicted, and once more as if its source were unknown."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from moelab.errors import BadInput
from moelab.projection.calibration import CALIBRATION, Calibration, fitted, with_values
from moelab.projection.measured import (
    FULL_NODE,
    TWO_BY_TWO,
    Measurement,
    Place,
    hardware_of,
    load_measured,
    load_predicted,
    node_results,
)
from moelab.projection.step import step_time
from moelab.projection.uncertainty import outside, relative_width
from moelab.projection.validation import ONE_NODE, ValidationRow
from validation.cases import Case, all_cases

FALLBACK = {"blackwell_gemm": "hopper_gemm", "selective_launch": "eager_passes"}
"""What a fitted constant would have been: the rate of the older GPU, the host of one node, the host of several."""


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every figure that the model is held against."""
    return tuple(all_cases())


def table_file(*, date: str, git_commit: str | None) -> dict[str, Any]:
    """Content of ``moelab/data/validation.json``."""
    return {
        "label": "derived beside measured and quoted",
        "what": "benchmarks/validation, as benchmarks/projection.py --write wrote it",
        "date": date,
        "git_commit": git_commit,
        "rows": [asdict(row) for row in table_rows()],
        "left_out": [asdict(row) for row in left_out_rows()],
    }


def table_rows() -> list[ValidationRow]:
    """Every case, predicted by the model as it is now; the full node as it was predicted before it ran."""
    return [*(row_of(case) for case in cases()), *full_node_rows()]


def row_of(case: Case, calibration: Calibration = CALIBRATION) -> ValidationRow:
    """Predict a case."""
    anchors = {name for constant in fitted(calibration).values() for name in constant.fitted_on}
    predicted, interval = case.predict(calibration), None
    if case.job:
        width = relative_width(step_time(case.job, calibration).parts_s, extrapolated=bool(outside(case.job)))
        interval = (predicted / (1 + width), predicted * (1 + width))
    return ValidationRow(
        source=case.source,
        name=case.name,
        unit=case.unit,
        measured=case.measured,
        predicted=predicted,
        use="fitted" if case.name in anchors else "constant read off it" if case.seen else "predicted",
        whole=case.whole,
        reference=case.reference,
        interval=interval,
    )


def left_out_rows(calibration: Calibration = CALIBRATION) -> list[ValidationRow]:
    """Whole steps, each predicted without what was fitted on its source."""
    rows = []
    for source in dict.fromkeys(case.source for case in cases() if case.whole):
        without = leave_out(source, calibration)
        rows += [row_of(case, without) for case in cases() if case.source == source]
    return rows


def leave_out(source: str, calibration: Calibration = CALIBRATION) -> Calibration:
    """The calibration without what was fitted on a source: what the others know of the same thing takes its place."""
    names = {case.name for case in cases() if case.whole and case.source == source}
    values = {}
    for name, constant in fitted(calibration).items():
        if names & set(constant.fitted_on):
            values[name] = float(getattr(calibration, FALLBACK[name]))
    return with_values(calibration, **values)


def full_node_rows(
    measured: Measurement | None = None, predicted: Mapping[str, Any] | None = None
) -> tuple[ValidationRow, ...]:
    """One node: the packaged predictions beside what was measured later.

    Args:
        measured: of ``h200_full_node``; the package's by default.
        predicted: content of ``h100_full_node_predicted``; the package's by default.

    Returns:
        Nothing where nothing was measured yet.

    Raises:
        BadInput: if the predictions are not older than the measurement, or for none of its GPUs.
    """
    measured = measured or load_measured(FULL_NODE)
    if measured.content is None:
        return ()
    predicted = predicted or load_predicted()
    if predicted["date"] >= measured.content["date"]:
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
            source=ONE_NODE,
            name=f"{place.shape} {place.arm}, {place.routing}, EP {place.ep}",
            unit="tokens/s/GPU",
            measured=result.tps,
            predicted=expected[place]["tps"],
            use="predicted",
            whole=True,
            reference=reference,
            interval=tuple(expected[place]["interval"]),
        )
        for place, result in results.items()
        if place in expected
    )
