"""Parts of a step that were measured alone: kernels, casts, layers, exchanges, and where tokens go.

What others published and what was noted by hand is in ``parts.csv``: a row has the figure with its source and date, the
name of a function of :data:`PREDICT`, and what that function is asked. What programs of ``benchmarks/`` measured is
read from their own files; torchao's table of grouped products and the H100's are those that
:mod:`validation.gemm_fit` fits, DeepEP's is :data:`moelab.planning.time.exchange.QUOTED`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moelab.experiment import EPBackend, Precision
from moelab.hardware import B200, GPUS, Node
from moelab.layout.sharding import Degrees
from moelab.micro.grouped_gemm import Case as Size
from moelab.micro.grouped_gemm import GroupedPrecision
from moelab.model import BYTES_PER_ELEMENT, ModelShape, shape_of
from moelab.planning.measured import ALL_TO_ALL, GROUPED_GEMM, Measurement, Row, load_measured
from moelab.planning.memory.activations import BF16, Work
from moelab.planning.tables import ValidationRow
from moelab.planning.time.calibration import Calibration
from moelab.planning.time.exchange import QUOTED, QuotedBandwidth, exchange_time_s
from moelab.planning.time.gemm import Rates, grouped_time_s, memory_rate, rates_of
from moelab.planning.time.job import EXPANDED, STANDARD_COMPILED, Job, Stack
from moelab.planning.time.routing import ExpertPlacement, RoutingModel, expected_destinations

from .gemm_fit import b200_observations, cast_us, h100_observations, step_us
from .steps import FUSED

HERE = Path(__file__).parent
DEEPEP, H100_KERNELS, H200_EXCHANGES, TORCHAO = "DeepEP", "H100 micro-experiments", "H200 exchanges", "torchao"
DATES = {"V1": "2025-02", "V2": "2026-03"}
NIC_GB_S = 50.0
"""Of the 400 Gb/s cards that DeepEP's tables are of."""
EP_ROWS = 131_072
"""Rows of torchao's pipeline and MoE layers; its README gives ``total_M`` 131,072."""
DEEPEP_ALONE_S = 346e-6
"""An exchange of DeepEP alone beside its bytes: notification and the host's wait (``all_to_all_h100.json``:
``deepep bf16 dense`` on the wire, less its bytes)."""
Predict = Callable[[Calibration], float]
Inputs = Mapping[str, Any]


class Part(NamedTuple):
    """A part of a step that was measured alone, not predicted yet, and how to predict it by a calibration."""

    row: ValidationRow
    predict: Predict


def part(predict: Predict, *, fitted: bool = False, **facts: Any) -> Part:
    """A part by the fields of its row.

    Args:
        predict: its value by a calibration, in its unit.
        fitted: whether a constant was fitted on this very figure or read off it.
        facts: of :class:`ValidationRow`.
    """
    return Part(ValidationRow(of="part", kind="fitted" if fitted else "seen", **facts), predict)


def all_parts() -> Iterator[Part]:
    """Kernels and layers, destinations of tokens, exchanges."""
    yield from torchao_kernels()
    yield from noted("destinations")
    yield from deepep_bandwidths()
    yield from noted("product")
    yield from noted("grouped rate")
    yield from h100_kernels()
    yield from h200_exchanges()


def noted(kind: str) -> Iterator[Part]:
    """Rows of ``parts.csv`` that ``PREDICT[kind]`` predicts."""
    with (HERE / "parts.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["predict"] == kind]
    for row in rows:
        pairs = (pair.split("=") for pair in row.pop("inputs").split())
        inputs = {name: int(value) if value.isdecimal() else value for name, value in pairs}
        yield part(PREDICT[row.pop("predict")](inputs), measured=float(row.pop("measured")), **row)


def date_of(measured: Measurement) -> str:
    """Day of a measurement of this project."""
    return str((measured.content or {})["date"])[:10]


def torchao_kernels() -> Iterator[Part]:
    """Single kernels, products and MoE layers on B200, as torchao publishes them."""
    for one in b200_observations():
        unit = "speed-up" if one.kind == "speed-up" else "µs"
        yield part(
            one.predict, fitted=one.fitted, source=TORCHAO, name=one.name, unit=unit, measured=one.value,
            date="2026-08", reference=one.source,
        )  # fmt: skip
    for kind in ("cast", "pipeline", "layer"):
        yield from noted(kind)


def deepep_bandwidths() -> Iterator[Part]:
    """Every row of DeepEP's tables, there and back."""
    for row in QUOTED:
        for operation, value in (("dispatch", row.dispatch_gb_s), ("combine", row.combine_gb_s)):
            name = f"{row.name}{f', {row.sms} SMs' if row.sms else ''}, {operation}"
            seen = row.version == "V2" and ((row.gpu == "SM100" and row.nodes == 1) or row.nodes == 4)
            yield part(
                _logical_gb_s(row), fitted=seen, source=DEEPEP, name=name, unit="logical GB/s", measured=value,
                date=DATES[row.version], reference=row.source,
            )  # fmt: skip


def h100_kernels() -> Iterator[Part]:
    """Grouped products and exchanges of the later campaigns."""
    for one in h100_observations():
        if one.kind == "step":
            yield part(
                one.predict, fitted="bf16" in one.name, source=H100_KERNELS, name=one.name, unit="µs",
                measured=one.value, date=date_of(load_measured(GROUPED_GEMM)), reference=one.source,
            )  # fmt: skip
    measured = load_measured(ALL_TO_ALL)
    for row in measured.rows:
        name = f"{row['arm']}, {row['operation']}, on the wire"
        yield part(
            _wire("H100", row), fitted=True, source=H100_KERNELS, name=name, unit="µs",
            measured=row["parts_us"]["wire"], date=date_of(measured), reference=measured.stamp,
        )  # fmt: skip


def h200_exchanges() -> Iterator[Part]:
    """All four directions together; measured when every constant had its value."""
    measured = load_measured(ALL_TO_ALL, HERE.parent / "results" / "all_to_all_h200.json")
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in measured.rows:
        if row["precision"] == "bf16" and row["sms_chosen_by"] == "library":
            groups.setdefault((row["size"], row["routing"], row["arm"]), []).append(row)
    for name, rows in groups.items():
        us = sum(row["parts_us"]["wire"] for row in rows)
        yield part(
            _sum([_wire("H200", row) for row in rows]), source=H200_EXCHANGES, name=", ".join(name) + ", on the wire",
            unit="µs", measured=us, date=date_of(measured), reference=measured.stamp,
        )  # fmt: skip


def _product_ms(inputs: Inputs) -> Predict:
    size = Size(m=inputs["m"], n=inputs["n"], k=inputs["k"], groups=inputs["groups"])
    us = step_us(GPUS[inputs["gpu"]], size, inputs["precision"])
    return lambda calibration: us(calibration) / 1e3


def _grouped_tflops(inputs: Inputs) -> Predict:
    """Mean rate over the experts of DeepSeek-V3 on ranks of EP 8, 16 and 32, 4,096 rows for each."""

    def predict(calibration: Calibration) -> float:
        rates, tflops = rates_of(GPUS[inputs["gpu"]], calibration), []
        for groups in (8, 16, 32):
            for n, k in ((4096, 7168), (7168, 2048)):
                sizes = (4096 * groups, n, k, groups, inputs["precision"], rates)
                forward_s = grouped_time_s(*sizes, direction="forward")
                flops = 2.0 * 4096 * groups * n * k
                backward = 2 * flops / (grouped_time_s(*sizes) - forward_s)
                tflops.append(flops / forward_s if inputs["direction"] == "forward" else backward)
        return statistics.fmean(tflops) / 1e12

    return predict


def _cast(inputs: Inputs) -> Predict:
    return cast_us(B200, "mxfp8", inputs["elements"])


def _sum(parts: list[Predict]) -> Predict:
    return lambda calibration: sum(one(calibration) for one in parts)


def _destinations(inputs: Inputs) -> Predict:
    """Distinct ranks or nodes of a token: 256 experts, top-8, 32 ranks on four nodes."""
    placement = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
    routing = RoutingModel(**{name: value for name, value in inputs.items() if name != "what"})
    reached: float = getattr(expected_destinations(routing, placement), inputs["what"])
    return lambda _: reached


def _logical_gb_s(row: QuotedBandwidth) -> Predict:
    gpu = GPUS["B200" if row.gpu == "SM100" else row.gpu if row.gpu in GPUS else "H100"]

    def predict(calibration: Calibration) -> float:
        if row.wire == "network":
            wire = NIC_GB_S * calibration.deepep_network
        else:
            wire = float(gpu.nvlink_gb_s or 0) * calibration.nvlink
        return wire / row.on_wire_gb_s(1.0)

    return predict


def _wire(gpu: str, row: Row) -> Predict:
    """Microseconds of a measured exchange; DeepEP's expanding layout writes every expert's row within it."""
    shape = replace(shape_of("671B"), num_experts=row["experts"], dim=row["hidden"], top_k=row["top_k"])
    job = exchange_job(gpu, ep=row["ranks"], shape=shape, tokens=row["tokens"])
    work = replace(job.work, backend=EPBackend(row["backend"]))
    job = replace(job, work=work, routing=RoutingModel(kind=row["routing"]))
    place = ("dispatch", "combine", "combine_backward", "dispatch_backward").index(row["operation"])
    copies = EXPANDED.copies[place] if row["layout"] == "expanded" else 0.0

    def predict(calibration: Calibration) -> float:
        copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / memory_rate(job, calibration)
        wire_s = exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"])
        if job.work.backend is EPBackend.DEEPEP:  # alone its kernel waits for the host; in a step the GPU does
            wire_s += DEEPEP_ALONE_S - calibration.deepep_s
        return 1e6 * (wire_s + copies * copy_s)

    return predict


def exchange_job(gpu: str, *, ep: int, shape: ModelShape, tokens: int) -> Job:
    """As much of a job as an exchange alone needs, on one node of eight GPUs."""
    return Job(
        shape=shape,
        node=Node(gpu=GPUS[gpu], gpus=8),
        stack=Stack(name="part"),
        work=Work(tokens=tokens, ep=ep),
        seq_len=4096,
        microbatches=1,
        schedule="1F1B",
        stages=(),
        stages_of_rank=((0,),),
        degrees=Degrees(1, ep, 1, ep, 1),
        precision=Precision.BF16,
        routing=RoutingModel(kind="random_balanced"),
    )


def _pipeline(inputs: Inputs) -> Predict:
    """Dispatch, permutation, one grouped product, and back, on 8 × B200, ms."""
    dim, hidden, precision = inputs["dim"], inputs["hidden"], inputs["precision"]
    shape = replace(shape_of("671B"), dim=dim, moe_hidden_dim=hidden, num_experts=64, top_k=1, expert_groups=1)
    multiplied: GroupedPrecision = "mxfp8_wgrad_bf16" if precision == "mxfp8" else "bf16"
    job = exchange_job("B200", ep=8, shape=shape, tokens=EP_ROWS)

    def predict(calibration: Calibration) -> float:
        low, high = (exchange_time_s(job, calibration, BYTES_PER_ELEMENT[one]) for one in (precision, "bf16"))
        sizes = (EP_ROWS, hidden, dim, 8, multiplied, rates_of(B200, calibration))
        forward_s = grouped_time_s(*sizes, direction="forward")
        copies = FUSED.copies
        copy_s = 2 * BF16 * EP_ROWS * dim / memory_rate(job, calibration)
        if inputs["direction"] == "forward":
            return 1e3 * (low + high + forward_s + sum(copies[:2]) * copy_s)
        backward_s = grouped_time_s(*sizes) - forward_s
        return 1e3 * (low + high + backward_s + sum(copies[2:]) * copy_s)

    return predict


def _layer_gain(inputs: Inputs) -> Predict:
    """Speed-up of a whole MoE layer with 8 local experts by MXFP8."""
    dim, hidden = inputs["dim"], inputs["hidden"]
    moved = BF16 * EP_ROWS * (2 * dim * sum(STANDARD_COMPILED.copies) + 9 * hidden)

    def layer_s(precision: GroupedPrecision, rates: Rates) -> float:
        first, last = ((EP_ROWS, n, k, 8, precision, rates) for n, k in ((hidden, dim), (dim, hidden)))
        return 2 * grouped_time_s(*first) + grouped_time_s(*last) + moved / rates.memory

    def predict(calibration: Calibration) -> float:
        rates = rates_of(B200, calibration)
        return layer_s("bf16", rates) / layer_s("mxfp8", rates)

    return predict


PREDICT: dict[str, Callable[[Inputs], Predict]] = {
    "destinations": _destinations,
    "product": _product_ms,
    "grouped rate": _grouped_tflops,
    "cast": _cast,
    "pipeline": _pipeline,
    "layer": _layer_gain,
}
