"""What is expected of one node of eight GPUs, written down before anyone measured it.

``benchmarks/h100_full_node.py`` trains thin models with expert parallelism over two, four and eight GPUs of a node.
With eight experts on each GPU, whatever the number of GPUs, the work of a GPU stays the same and only the exchange
grows. The predictions of those steps are a file with its date and commit; what is measured later is held against the
file, not against what the model says by then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from moelab.hardware import cluster_of
from moelab.layout import check
from moelab.layout.schedule import split_layers
from moelab.planning.measured import FULL_NODE, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.memory import estimate
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.time.job import Job
from moelab.planning.time.step import step_parts_s
from moelab.planning.trust import CONFIDENCE, DEVIATIONS, outside, relative_width

from .node import EP_DEGREES, ROUTINGS, SCALING, hardware_of, node_results
from .published import drawn
from .shapes import ALL_SHAPES, DEEPEST, NODE_SHAPES, SMALL, Shape, arm_of, thin_experiment, thin_job, tps_of

HARDWARE = ("h100_node", "h200_node")
STOCK = "bf16_standard"
ARMS = (STOCK, "bf16_deepep", "fp8_standard", "fp8_deepep", "fp8_deepep_dispatch-fp8", "mxfp8-emulated_deepep")
MEMORY_MARGIN = 0.06
"""Memory that is left free: the worst error of the memory model on H100."""
DRAWS, SEED = 50, 20261128


def predicted_file(*, date: str, git_commit: str | None) -> dict[str, Any]:
    """Content of ``h100_full_node_predicted.json``: the predictions, and which model made them when."""
    shapes = {SCALING: NODE_SHAPES[SCALING], SMALL: ALL_SHAPES[SMALL], **NODE_SHAPES}
    return {
        "label": "derived",
        "what": "tokens/s per GPU of thin models on 2, 4 and 8 GPUs of one node, by moelab.planning, before any of "
        "it was measured on more than two",
        "date": date,
        "git_commit": git_commit,
        "confidence": CONFIDENCE,
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "rows": predictions(),
    }


def predictions(*, draws: int = DRAWS) -> list[dict[str, Any]]:
    """A row for each hardware, shape, degree, routing and arm.

    Args:
        draws: calibrations drawn around the model's own. What an arm and stock share does not make their ratio
            uncertain, so a gain's interval is that of the drawn ratios, widened by the errors of the gains on two GPUs.

    Returns:
        ``tps`` is tokens/s per GPU, ``gain`` its ratio to stock's at the same degree and routing; intervals are of
        90 %. ``exchange_ms`` is what the step spends on its all-to-alls.
    """
    random = np.random.default_rng(SEED)
    calibrations = (CALIBRATION, *(drawn(CALIBRATION, random) for _ in range(draws)))
    errors = {shape: gain_error(shape) for shape in (SCALING, SMALL)}
    return [
        row
        for hardware in HARDWARE
        for shape, ep in (*((shape, ep) for shape in (SCALING, SMALL) for ep in EP_DEGREES), (DEEPEST[hardware], 8))
        for routing in ROUTINGS
        # the deepest shapes were not measured on two GPUs: they are thought to err as the shape that they deepen
        for row in _predicted(shape, routing, ep, hardware, calibrations, errors.get(shape, errors[SCALING]))
    ]


def node_job(shape: Shape, arm: str, routing: str, *, ep: int, hardware: str) -> Job:
    """A step of a thin model on ``ep`` GPUs of one node."""
    return thin_job(shape, {**arm_of(arm), "routing": routing}, gpus=ep, hardware=hardware)


def layers_that_fit(shape: Shape, *, ep: int, hardware: str) -> int:
    """Most MoE layers with which every arm leaves :data:`MEMORY_MARGIN` of the GPU free, by the memory model."""
    moe = 0
    while all(_share_of_memory(replace(shape, moe=moe + 1), arm, ep, hardware) <= 1 for arm in ARMS):
        moe += 1
    return moe


def _share_of_memory(shape: Shape, arm: str, ep: int, hardware: str) -> float:
    experiment = thin_experiment(shape, {**arm_of(arm), "routing": ROUTINGS[0]}, gpus=ep, hardware=hardware)
    layout, thin = check(experiment).layout, shape.thin(ep)
    assert layout is not None, "one node and no pipeline"
    layout = replace(layout, stages=split_layers(thin.n_layers, 1))
    memory = estimate(experiment, layout, cluster_of(hardware).node.gpu, shape=thin)
    return memory.worst_gib * (1 + MEMORY_MARGIN) / memory.capacity_gib


def _predicted(
    shape: str, routing: str, ep: int, hardware: str, calibrations: Sequence[Calibration], error: float
) -> Iterable[dict[str, Any]]:
    jobs = {arm: node_job(ALL_SHAPES[shape], arm, routing, ep=ep, hardware=hardware) for arm in ARMS}
    tps = {arm: [tps_of(job, one) for one in calibrations] for arm, job in jobs.items()}
    for arm, job in jobs.items():
        parts_s = step_parts_s(job, calibrations[0])
        width = relative_width(parts_s, extrapolated=bool(outside(job)))
        gain, *others = (mine / stock for mine, stock in zip(tps[arm], tps[STOCK], strict=True))
        spread = statistics.stdev(math.log(one) for one in others)
        wide = math.exp(DEVIATIONS * math.hypot(spread, error * (arm != STOCK)))
        yield {
            **{"hardware": hardware, "shape": shape, "ep": ep, "routing": routing, "arm": arm},
            "tps": round(tps[arm][0], 1),
            "interval": [round(tps[arm][0] / (1 + width), 1), round(tps[arm][0] * (1 + width), 1)],
            "gain": round(gain, 4),
            "gain_interval": [round(gain / wide, 4), round(gain * wide, 4)],
            "exchange_ms": round(1e3 * parts_s.get("all-to-all", 0.0), 2),
        }


def gain_error(shape: str) -> float:
    """Root mean square of the logarithmic errors of gains that were measured on two GPUs."""
    measured = load_measured(TWO_BY_TWO)
    results = node_results(Measurement(name=FULL_NODE, content=None), measured)
    errors = []
    for place, result in results.items():
        if place.shape == shape and place.arm in ARMS and place.arm != STOCK and result.ratio:
            jobs = (
                node_job(ALL_SHAPES[shape], arm, place.routing, ep=2, hardware=hardware_of(measured))
                for arm in (place.arm, STOCK)
            )
            mine, stock = (tps_of(job, CALIBRATION) for job in jobs)
            errors.append(math.log(mine / stock / result.ratio))
    return math.sqrt(statistics.fmean(error**2 for error in errors))
