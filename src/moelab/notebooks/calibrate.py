"""Constants of the step-time model from the micro-experiments of one node.

A constant that is a rate enters a time as ``fixed + part / rate``. Both parts are known from the model, so every row of
a measurement asks for one value of the constant; the median over rows is taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from moelab.errors import BadInput
from moelab.experiment import EPBackend
from moelab.hardware import GPUS, MODELS, known_gpu
from moelab.model import BYTES_PER_ELEMENT, shape_of
from moelab.projection.calibration import CALIBRATION, Calibration, with_values
from moelab.projection.exchange import exchange_job, exchange_time_s
from moelab.projection.gemm import grouped_time_s, is_blackwell, rates_of
from moelab.projection.measured import Measurement

Row = Mapping[str, Any]
NO_LIMIT = 1e9
"""A rate at which only the fixed part of a time is left."""


def constants_of_node(grouped_gemm: Measurement, all_to_all: Measurement) -> dict[str, float]:
    """The constants that a node's files decide.

    Args:
        grouped_gemm: of notebook 02 or ``benchmarks/grouped_gemm.py``.
        all_to_all: of notebook 04 or ``benchmarks/all_to_all.py``.

    Returns:
        Values for :func:`moelab.projection.calibration.with_values`; none for what a file has no rows of.

    Raises:
        BadInput: if a file is of no GPU whose datasheet is known.
    """
    gpu = _gpu_of(grouped_gemm)
    grouped = "blackwell_grouped" if is_blackwell(GPUS[gpu]) else "hopper_grouped"
    asked = {
        grouped: list(_of_products(grouped_gemm, gpu, grouped)),
        "nccl_nvlink": list(_of_exchanges(all_to_all, "standard", "nccl_nvlink")),
        "deepep_nvlink": list(_of_exchanges(all_to_all, "deepep", "deepep_nvlink")),
    }
    return {name: statistics.median(values) for name, values in asked.items() if values}


def _of_products(measured: Measurement, gpu: str, name: str) -> Iterator[float]:
    for row in measured.rows:
        if (row["precision"], row["pass"]) == ("bf16", "forward+backward"):

            def predict(calibration: Calibration, row: Row = row) -> float:
                rates = rates_of(GPUS[gpu], calibration)
                return grouped_time_s(row["m"], row["n"], row["k"], row["groups"], "bf16", rates)

            yield from _asked(predict, 1e-6 * row["median_us"], name)


def _of_exchanges(measured: Measurement, backend: str, name: str) -> Iterator[float]:
    """From the rows whose wire carries BF16 tokens once for each destination and writes nothing else.

    Of DeepEP these are of its dense layout, which files of format 2 have. In the expanding layout of training the wire
    part is bound by the writes, so it does not say what NVLink does.
    """
    gpu = _gpu_of(measured)
    if GPUS[gpu].nvlink_gb_s is None:
        return  # cards without NVLink between all of them have no share of it
    for row in measured.rows:
        if row["arm"] not in ("standard bf16", "deepep bf16 dense") or row["backend"] != backend:
            continue
        sizes = {"dim": row["hidden"], "num_experts": row["experts"], "top_k": row["top_k"], "expert_groups": 1}
        shape = replace(shape_of("671B"), **sizes)
        job = exchange_job(gpu, ep=row["ranks"], shape=shape, tokens=row["tokens"])
        job = replace(job, work=replace(job.work, backend=EPBackend(backend)))

        def predict(calibration: Calibration, job: Any = job) -> float:
            return exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"])

        yield from _asked(predict, 1e-6 * row["parts_us"]["wire"], name)


def _asked(predict: Callable[[Calibration], float], measured_s: float, name: str) -> Iterator[float]:
    """The value of a rate with which the model meets a time; none if the fixed part alone is longer."""
    fixed_s = predict(with_values(**{name: NO_LIMIT}))
    if measured_s > fixed_s:
        part = (predict(CALIBRATION) - fixed_s) * float(getattr(CALIBRATION, name))
        yield part / (measured_s - fixed_s)


def _gpu_of(measured: Measurement) -> str:
    """The kind of GPU that a file is of."""
    content = measured.content or {}
    found = [content.get("hardware", {}).get("gpu")]
    found += [device["name"] for device in content.get("environment", {}).get("gpus", ())]
    names = list(dict.fromkeys(filter(None, found)))
    kind = known_gpu(names[0]) if len(names) == 1 else None
    if kind is None:
        said = " and ".join(names) or "no GPU"
        raise BadInput(f"{measured.name} is of {said}; datasheets are known of {', '.join(MODELS)}")
    return kind.name
