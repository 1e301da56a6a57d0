"""One node as measured, beside what was predicted of it before.

``h200_full_node.json`` is of four GPUs so far: EP 4, all arms of its shapes in turn. EP 2 is the two-by-two's, and EP 8
is predicted only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moelab.analysis.two_by_two import ArmResult, arm_results
from moelab.errors import BadInput
from moelab.projection.full_node import NODE_SHAPES, SCALING, load_predicted
from moelab.projection.measured import FULL_NODE, TWO_BY_TWO, Measurement, hardware_of, load_measured
from moelab.projection.validation_row import ValidationRow

SOURCE = "one node, EP 2 to 8"
SAME_SHAPE = {"671B MoE-heavy": SCALING}
"""Shapes of the two-by-two that on its two GPUs are those of the full node by another name."""


class Place(NamedTuple):
    """What one figure is of."""

    shape: str
    ep: int
    routing: str
    arm: str


def node_results(full_node: Measurement, two_by_two: Measurement) -> dict[Place, ArmResult]:
    """What was measured at each degree; where the full node was not measured on two GPUs, the two-by-two's figure.

    Args:
        full_node: of ``h200_full_node``.
        two_by_two: of ``h100_two_by_two``; left out if its GPUs are others.
    """
    alike = not (full_node.rows and two_by_two.rows) or hardware_of(full_node) == hardware_of(two_by_two)
    at_two = [{**row, "ep": 2, "shape": SAME_SHAPE.get(row["shape"], row["shape"])} for row in two_by_two.rows if alike]
    at_two = [row for row in at_two if row["activation_checkpoint"] == _checkpointing(row["shape"])]
    own = [{"activation_checkpoint": _checkpointing(row["shape"]), **row} for row in full_node.rows]
    found: dict[Place, ArmResult] = {}
    for rows in (at_two, own):
        for ep in dict.fromkeys(row["ep"] for row in rows):
            results = arm_results(row for row in rows if row["ep"] == ep)
            found |= {Place(one.shape, ep, one.routing, one.arm): one for one in results}
    return found


def _checkpointing(shape: str) -> str | None:
    """The checkpointing of all arms of a shape, which older files do not carry."""
    return NODE_SHAPES[shape].activation_checkpoint if shape in NODE_SHAPES else None


def full_node_rows(
    measured: Measurement | None = None, predicted: Mapping[str, Any] | None = None
) -> tuple[ValidationRow, ...]:
    """Rows of the validation table: the file's predictions beside what was measured later.

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
        _row(place, result, expected[place], reference) for place, result in results.items() if place in expected
    )


def _row(place: Place, result: ArmResult, expected: Mapping[str, Any], reference: str) -> ValidationRow:
    low, high = expected["interval"]
    return ValidationRow(
        source=SOURCE,
        name=f"{place.shape} {place.arm}, {place.routing}, EP {place.ep}",
        unit="tokens/s/GPU",
        measured=result.tps,
        predicted=expected["tps"],
        use="predicted",
        whole=True,
        reference=reference,
        interval=(low, high),
    )
