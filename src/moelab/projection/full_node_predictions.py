"""The predictions of one node of eight GPUs, as the file that is written before it is measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from moelab.projection.arms_projected import SPREAD
from moelab.projection.calibration import CALIBRATION, Calibration, Constant, with_values
from moelab.projection.full_node import (
    ARMS,
    DEEPEST,
    EP_DEGREES,
    HARDWARE,
    NODE_SHAPES,
    ROUTINGS,
    SCALING,
    SMALL,
    STOCK,
    node_job,
)
from moelab.projection.full_node_measured import node_results
from moelab.projection.measured import FULL_NODE, TWO_BY_TWO, Measurement, hardware_of, load_measured
from moelab.projection.step import step_time
from moelab.projection.step_cases import tps_of
from moelab.projection.uncertainty import CONFIDENCE, outside, relative_width

DRAWS, SEED = 50, 20261128
NORMAL_90 = 1.645
"""Standard deviations to either side that hold 90 % of a normal distribution."""


def predictions(calibration: Calibration = CALIBRATION, *, draws: int = DRAWS) -> list[dict[str, Any]]:
    """A row for each hardware, shape, degree, routing and arm.

    Args:
        calibration: constants of the model.
        draws: calibrations drawn around it. What an arm and stock share does not make their ratio uncertain, so a
            gain's interval is that of the drawn ratios, widened by the errors of the gains on two GPUs.

    Returns:
        ``tps`` is tokens/s per GPU, ``gain`` its ratio to stock's at the same degree and routing; intervals are of
        90 %. ``exchange_ms`` is what the step spends on its all-to-alls.
    """
    random = np.random.default_rng(SEED)
    drawn = [_drawn(calibration, random) for _ in range(draws)]
    errors = {shape: gain_error(shape, calibration) for shape in (SCALING, SMALL)}
    return [
        row
        for hardware in HARDWARE
        for shape, ep in _shapes_on(hardware)
        for routing in ROUTINGS
        for row in _predicted(shape, routing, ep, hardware, (calibration, *drawn), errors.get(shape, errors[SCALING]))
    ]


def _shapes_on(hardware: str) -> Iterable[tuple[str, int]]:
    yield from ((shape, ep) for shape in (SCALING, SMALL) for ep in EP_DEGREES)
    yield DEEPEST[hardware], max(EP_DEGREES)


def _predicted(
    shape: str, routing: str, ep: int, hardware: str, calibrations: Sequence[Calibration], error: float
) -> Iterable[dict[str, Any]]:
    jobs = {arm: node_job(NODE_SHAPES[shape], arm, routing, ep=ep, hardware=hardware) for arm in ARMS}
    tps = {arm: [tps_of(job, one) for one in calibrations] for arm, job in jobs.items()}
    for arm, job in jobs.items():
        parts_s = step_time(job, calibrations[0]).parts_s
        width = relative_width(parts_s, extrapolated=bool(outside(job)))
        gain, *others = (mine / stock for mine, stock in zip(tps[arm], tps[STOCK], strict=True))
        spread = statistics.stdev(math.log(one) for one in others)
        wide = math.exp(NORMAL_90 * math.hypot(spread, error * (arm != STOCK)))
        yield {
            **{"hardware": hardware, "shape": shape, "ep": ep, "routing": routing, "arm": arm},
            "tps": round(tps[arm][0], 1),
            "interval": [round(tps[arm][0] / (1 + width), 1), round(tps[arm][0] * (1 + width), 1)],
            "gain": round(gain, 4),
            "gain_interval": [round(gain / wide, 4), round(gain * wide, 4)],
            "exchange_ms": round(1e3 * parts_s.get("all-to-all", 0.0), 2),
        }


def gain_error(shape: str, calibration: Calibration = CALIBRATION) -> float:
    """Root mean square of the logarithmic errors of gains that were measured on two GPUs."""
    measured = load_measured(TWO_BY_TWO)
    results = node_results(Measurement(name=FULL_NODE, content=None), measured)
    errors = []
    for place, result in results.items():
        if place.shape == shape and place.arm in ARMS and place.arm != STOCK and result.ratio:
            jobs = (
                node_job(NODE_SHAPES[shape], arm, place.routing, ep=2, hardware=hardware_of(measured))
                for arm in (place.arm, STOCK)
            )
            mine, stock = (tps_of(job, calibration) for job in jobs)
            errors.append(math.log(mine / stock / result.ratio))
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def _drawn(calibration: Calibration, random: np.random.Generator) -> Calibration:
    values = {}
    for field in fields(calibration):
        constant: Constant = getattr(calibration, field.name)
        values[field.name] = constant.value * float(np.exp(random.normal(0, SPREAD[constant.how])))
    return with_values(calibration, **values)


def predicted_file(*, date: str, git_commit: str | None) -> dict[str, Any]:
    """Content of ``h100_full_node_predicted.json``: the predictions, and which model made them when."""
    return {
        "label": "derived",
        "what": "tokens/s per GPU of thin models on 2, 4 and 8 GPUs of one node, by moelab.projection, before any of "
        "it was measured on more than two",
        "date": date,
        "git_commit": git_commit,
        "confidence": CONFIDENCE,
        "shapes": {name: asdict(shape) for name, shape in NODE_SHAPES.items()},
        "rows": predictions(),
    }
