"""The same training elsewhere: other GPUs, other networks, more or fewer GPUs, by the projection alone.

A layout that suits 256 GPUs suits no other number, so each size takes the fastest of a few layouts that are legal and
fit. What no layout fits is left out, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from moelab.analysis.arms import base_arm
from moelab.errors import BadInput, Refused
from moelab.experiment import Experiment, Precision
from moelab.hardware import Cluster, cluster_of, has_native_mxfp8
from moelab.planning.project import Projection, gain_over, project, with_network
from moelab.planning.time.calibration import CALIBRATION, Calibration
from moelab.planning.uncertainty import Estimate

PROFILES: Mapping[str, str] = {
    "H100": "h100_x1024",
    "H200": "h200_x256",
    "B200": "b200_x256",
    "GB200": "gb200_nvl72_x4",
}
"""A cluster of each kind of GPU, for its node and its network card."""
GPUS_OF_NODE: Mapping[str, int] = {"H100": 8, "H200": 8, "B200": 8, "GB200": 64}
"""GPUs of a node that a layout of powers of two uses."""
LAYOUTS: Mapping[str, Sequence[int]] = {"pp": (1, 2, 4, 8, 16), "tp": (1, 2), "ep": (8, 16, 32, 64)}
"""Degrees that :func:`by_gpus` tries."""
FOUR_ARMS: Mapping[str, Mapping[str, str]] = {
    f"{precision}_{backend}": {"precision": precision, "ep_backend": backend}
    for precision in ("bf16", "mxfp8")
    for backend in ("standard", "deepep")
}
"""The two-by-two; on GPUs before SM100 FP8 takes the place of MXFP8."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One projection of a sweep: ``series`` is its line, ``x`` its place on it."""

    series: str
    x: float
    projection: Projection


def cluster_like(gpu: str, *, nodes: int, network_gb_s: float | None = None) -> Cluster:
    """A cluster of a kind of GPU with another size and another network.

    ``gpu`` is a name of :data:`PROFILES`; ``network_gb_s`` that of each GPU's card each way, GB/s, None the profile's.

    Raises:
        BadInput: for an unknown GPU or an impossible figure.
    """
    if gpu not in PROFILES:
        raise BadInput(f"gpu is {gpu!r}; the kinds are {', '.join(PROFILES)}")
    like = replace(cluster_of(PROFILES[gpu]), nodes=nodes)
    return like if network_gb_s is None else with_network(like, network_gb_s)


def on(gpu: str, experiment: Experiment, **changes: Any) -> Experiment:
    """An experiment on a kind of GPU; its 8-bit format is the one that the GPU's tensor cores have."""
    fields = {**experiment.model_dump(), **changes, "hardware": PROFILES[gpu]}  # validated: a copy would not be
    native = has_native_mxfp8(cluster_of(PROFILES[gpu]).node.gpu.capability)
    if fields["precision"] != Precision.BF16:
        # Defaults of the rest: what was asked of one format's kernels means nothing to the other.
        fields |= {"precision": "mxfp8" if native else "fp8", "wgrad": "mxfp8", "mxfp8_kernels": "auto"}
    return Experiment.model_validate(fields)


def by_network(
    experiment: Experiment, gpu: str, network_gb_s: Sequence[float], *, calibration: Calibration = CALIBRATION
) -> list[Point]:
    """The two-by-two against the network of each GPU, layout and size as they are.

    ``gpu`` is a name of :data:`PROFILES`; ``network_gb_s`` are bandwidths each way of one GPU's card, GB/s.

    Raises:
        Refused: if an arm is illegal or does not fit.
    """
    points = []
    for speed, fields in product(network_gb_s, FOUR_ARMS.values()):
        cluster = cluster_like(gpu, nodes=experiment.nodes, network_gb_s=speed)
        one = project(on(gpu, experiment, **fields), cluster, calibration=calibration)
        points.append(Point(series=base_arm(one.experiment.arm)[0], x=speed, projection=one))
    return points


def gains_by_network(
    points: Sequence[Point], *, calibration: Calibration = CALIBRATION
) -> dict[str, dict[float, Estimate]]:
    """Percent, by arm and bandwidth, that each of :func:`by_network` is faster than BF16 with the standard exchange."""
    at = {(point.series, point.x): point.projection for point in points}
    baseline, *arms = dict.fromkeys(point.series for point in points)
    return {
        arm: {x: gain_over(one, at[baseline, x], calibration) for (series, x), one in at.items() if series == arm}
        for arm in arms
    }


def by_gpus(experiment: Experiment, gpus: Sequence[int], *, calibration: Calibration = CALIBRATION) -> list[Point]:
    """The fastest layout on each number of GPUs of each kind, at the experiment's sequences a step."""
    points = []
    for kind, count in product(PROFILES, gpus):
        best = max(_fitting(experiment, kind, count, calibration), key=lambda one: one.tps, default=None)
        if best is not None:
            points.append(Point(series=kind, x=count, projection=best))
    return points


def _fitting(experiment: Experiment, kind: str, count: int, calibration: Calibration) -> Iterator[Projection]:
    node = min(count, GPUS_OF_NODE[kind])
    for pp, tp, ep in product(*LAYOUTS.values()):
        shards, over = divmod(count, pp * tp)
        # A step keeps its sequences at every size, so that they must divide over its ranks.
        if over or not shards or experiment.global_batch % shards:
            continue
        sizes = {"nodes": count // node, "gpus_per_node": node, "local_batch": experiment.global_batch // shards}
        degrees = {"pp": pp, "tp": tp, "ep": ep, "dp_shard": -1, "dp_replicate": 1, "cp": 1, "microbatch": 1}
        cluster = cluster_like(kind, nodes=count // node)
        try:
            yield project(on(kind, experiment, **sizes, **degrees), cluster, calibration=calibration)
        except Refused:
            continue
