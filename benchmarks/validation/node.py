"""One node of two to eight GPUs: what was predicted before anyone measured it, and what was measured.

``h100_full_node_predicted.json`` is what was expected; what is measured later is held against the file, not against
what the model says by then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moelab.data import read_json
from moelab.errors import BadInput
from moelab.judge.throughput import ArmResult
from moelab.planning.measured import Measurement

from .two_by_two import arm_results

GPU_PROFILES = {"NVIDIA H100 80GB HBM3": "h100_node", "NVIDIA H200": "h200_node"}
"""Hardware profiles of the GPUs that steps are predicted for, by the name that nvidia-smi prints."""
PREDICTED = "h100_full_node_predicted"
EP_DEGREES = (2, 4, 8)
ROUTINGS = ("round_robin", "random_balanced")
SCALING = "671B, 8 experts a GPU"
"""The shape whose work stays the same on each GPU, whatever their number, so that only the exchange grows."""
SAME_SHAPE = {"671B MoE-heavy": SCALING}
"""Shapes of the two-by-two that on its two GPUs are those of the full node by another name."""


def hardware_of(measured: Measurement) -> str:
    """The hardware profile that a measurement was made on.

    Raises:
        BadInput: if its GPUs are of several kinds or have no profile: they are not held against another's predictions.
    """
    kinds = set(measured.gpu_names)
    if len(kinds) != 1 or not kinds <= GPU_PROFILES.keys():
        names = ", ".join(sorted(kinds)) or "no GPU"
        raise BadInput(f"{measured.name} was measured on {names}; predictions are for {', '.join(GPU_PROFILES)}")
    return GPU_PROFILES[kinds.pop()]


def load_predicted() -> dict[str, Any]:
    """The predictions of one node of two to eight GPUs that come with the package."""
    return read_json(f"measured/{PREDICTED}.json")


class Place(NamedTuple):
    """What one figure of a full node is of."""

    shape: str
    ep: int
    routing: str
    arm: str


def node_results(full_node: Measurement, two_by_two: Measurement) -> dict[Place, ArmResult]:
    """What was measured at each degree; where the full node was not measured on two GPUs, the two-by-two's figure.

    The two-by-two is left out if its GPUs are others.
    """
    alike = not (full_node.rows and two_by_two.rows) or hardware_of(full_node) == hardware_of(two_by_two)
    # older files do not carry the checkpointing, which all arms of a shape share
    checkpointing = {name: shape["activation_checkpoint"] for name, shape in load_predicted()["shapes"].items()}
    at_two = [{**row, "ep": 2, "shape": SAME_SHAPE.get(row["shape"], row["shape"])} for row in two_by_two.rows if alike]
    at_two = [row for row in at_two if row["activation_checkpoint"] == checkpointing.get(row["shape"])]
    own = [{"activation_checkpoint": checkpointing.get(row["shape"]), **row} for row in full_node.rows]
    results: dict[Place, ArmResult] = {}
    for rows in (at_two, own):  # the later replaces the earlier: the node's own figures come last
        for ep in dict.fromkeys(row["ep"] for row in rows):
            of_degree = arm_results(row for row in rows if row["ep"] == ep)
            results |= {Place(one.shape, ep, one.routing, one.arm): one for one in of_degree}
    return results
