"""Every figure that the model is held against, and how it is predicted.

What others published and what was noted by hand is in ``cases.csv``: a row has the figure with its source and date, the
name of a function of :data:`PREDICT`, and what that function is asked. What programs of ``benchmarks/`` measured is
read from their own files; torchao's table of grouped products and the H100's are those that
:mod:`moelab.projection.gemm_fit` fits, DeepEP's is :data:`moelab.projection.exchange.QUOTED`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.analysis.published import GAINS, SOURCE, THROUGHPUT
from moelab.analysis.two_by_two import CODE, arm_results, checkpointing_words
from moelab.experiment import EPBackend, Precision
from moelab.hardware import B200, GB200, GB300, GPUS, H100, H800, NIC_400G, Node
from moelab.memory.activations import BF16
from moelab.model import BYTES_PER_ELEMENT, shape_of
from moelab.mxfp8.grouped_gemm_cases import Case as Size
from moelab.mxfp8.grouped_gemm_cases import Precision as GroupedPrecision
from moelab.projection.calibration import Calibration
from moelab.projection.exchange import PERMUTATIONS, QUOTED, QuotedBandwidth, exchange_job, exchange_time_s
from moelab.projection.gemm import Rates, grouped_time_s, rates_of
from moelab.projection.gemm_fit import b200_observations, cast_us, h100_observations, step_us
from moelab.projection.job import Job
from moelab.projection.measured import (
    ALL_TO_ALL,
    ALL_TO_ALL_H200,
    TWO_BY_TWO,
    Row,
    hardware_of,
    load_measured,
)
from moelab.projection.megatron import BRIDGE, bridge_job, simumax_job
from moelab.projection.memory_bound import memory_rate
from moelab.projection.published import job_as_published, published_job
from moelab.projection.routing import ExpertPlacement, RoutingModel, expected_destinations
from moelab.projection.step import step_time, tps_of
from moelab.projection.validation import H100_LATER, PUBLISHED, debug_job
from moelab.titan.arms import named_arms
from validation.shapes import ALL_SHAPES, arm_of, thin_job

HERE = Path(__file__).parent
DEEPEP, H100_KERNELS, H200_EXCHANGES, TORCHAO = "DeepEP", "H100 micro-experiments", "H200 exchanges", "torchao"
EP_ROWS = 131_072
"""Rows of torchao's pipeline and MoE layers; its README gives ``total_M`` 131,072."""
Predict = Callable[[Calibration], float]
Inputs = Mapping[str, Any]


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
    predict: Predict
    reference: str
    whole: bool
    seen: bool = False
    job: Job | None = None


def all_cases() -> Iterator[Case]:
    """Whole steps, then parts of steps."""
    yield from published_steps()
    for kind in ("mxfp8 all-to-all", "megatron", "simumax", "thin", "debug"):
        yield from noted(kind)
    yield from later_steps()
    yield from torchao_kernels()
    yield from noted("destinations")
    yield from deepep_bandwidths()
    yield from noted("product")
    yield from h100_kernels()
    yield from h200_exchanges()


def noted(kind: str) -> Iterator[Case]:
    """Rows of ``cases.csv`` that ``PREDICT[kind]`` predicts."""
    with (HERE / "cases.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["predict"] == kind]
    for row in rows:
        pairs = (pair.split("=") for pair in row["inputs"].split())
        inputs = {name: int(value) if value.isdecimal() else value for name, value in pairs}
        predict, job = PREDICT[kind](inputs)
        yield Case(
            source=row["source"],
            name=row["name"],
            unit=row["unit"],
            measured=float(row["measured"]),
            predict=predict,
            reference=row["reference"],
            whole=row["of"] == "whole",
            job=job,
        )


# --- whole steps -----------------------------------------------------------------------------------------------------


def tps_case(source: str, name: str, tps: float, job: Job, reference: str, *, seen: bool = False) -> Case:
    """Tokens per second per GPU of a whole step."""
    predict, _ = _tps(job)
    unit = "tokens/s/GPU"
    return Case(
        source=source, name=name, unit=unit, measured=tps, predict=predict, reference=reference, whole=True, seen=seen,
        job=job,
    )  # fmt: skip


def published_steps() -> Iterator[Case]:
    """The published 671B arms, and their gains."""
    jobs = {row.arm: published_job(row.arm) for row in THROUGHPUT}
    for row in THROUGHPUT:
        yield tps_case(PUBLISHED, f"671B {row.arm}", row.tps, jobs[row.arm], row.source)
    for gain in GAINS[:2]:
        yield Case(
            source=PUBLISHED,
            name=f"gain of {gain.arm}",
            unit="% gain",
            measured=gain.percent,
            predict=_gain_percent(jobs[gain.arm], jobs[gain.baseline]),
            reference=SOURCE,
            whole=True,
        )


def later_steps() -> Iterator[Case]:
    """The H100 and H200 arms of the later campaigns."""
    standard = json.loads((HERE.parent / "results" / "h100_standard_step.json").read_text())
    for row in standard["rows"]:
        job = thin_job(ALL_SHAPES[row["shape"]], {"routing": row["routing"]})
        reference = "benchmarks/results/h100_standard_step.json, 2 × H100, November 2026"
        profiled = row["shape"] == "671B MoE-heavy"  # constants were read off the kernels of this step
        name = f"{row['shape']} bf16_standard, {row['routing']}"
        yield tps_case(H100_LATER, name, row["tps_median"], job, reference, seen=profiled)
    measured = load_measured(TWO_BY_TWO)
    for result in arm_results(measured.rows):
        old_fp8 = result.code is None and result.arm.startswith("fp8")
        if result.retries or old_fp8 or result.code not in (None, CODE):  # see NOT_PREDICTED
            continue
        shape = ALL_SHAPES[result.shape]
        arm = {**arm_of(result.arm), "routing": result.routing, "activation_checkpoint": result.activation_checkpoint}
        name = f"two by two: {result.shape} {result.arm}, {result.routing}"
        if result.activation_checkpoint not in (shape.activation_checkpoint, "full+dispatch"):
            name += f", {checkpointing_words(result.activation_checkpoint)}"
        if result.code:
            name += f", {result.code}"
        job = thin_job(shape, arm, hardware=hardware_of(measured))
        # host_compiled_s was read off the former; the latter were at hand when the model learnt of their code
        seen = result.shape == "16B" or result.code is not None
        yield tps_case(H100_LATER, name, result.tps, job, measured.stamp, seen=seen)


def _tps(job: Job) -> tuple[Predict, Job]:
    return lambda calibration: tps_of(job, calibration), job


def _gain_percent(arm: Job, baseline: Job) -> Predict:
    return lambda calibration: 100 * (tps_of(arm, calibration) / tps_of(baseline, calibration) - 1)


def _mxfp8_all_to_all(inputs: Inputs) -> tuple[Predict, None]:
    """MXFP8 experts and all-to-all over BF16 ones, 16B on B200."""
    bf16 = named_arms()["dsv3_16b_bf16_standard"].model_copy(update=dict(inputs))
    quantised = {"precision": Precision.MXFP8, "wgrad": "bf16", "dispatch_precision": "mxfp8"}
    return _gain_percent(job_as_published(bf16.model_copy(update=quantised)), job_as_published(bf16)), None


PLAIN = replace(BRIDGE, exchange_overlapped=False)
STACKS = {
    "plain": PLAIN,
    "launched": replace(PLAIN, host=True),
    "DeepSeek": replace(BRIDGE, name="DeepSeek"),
}
NODES = {name: Node(gpu=gpu, gpus=8, nic_gb_s=NIC_400G) for name, gpu in (("H100", H100), ("H800", H800))} | {
    name: Node(gpu=gpu, gpus=64, nic_gb_s=NIC_400G) for name, gpu in (("GB200", GB200), ("GB300", GB300))
}
"""Of the 72 GPUs of an NVLink domain, 64 are used by layouts of powers of two."""


def _megatron(inputs: Inputs) -> tuple[Predict, Job]:
    named = {"node": NODES.get, "stack": STACKS.get, "backend": EPBackend, "precision": Precision}
    return _tps(bridge_job(**{name: named.get(name, int)(value) for name, value in inputs.items()}))


def _simumax(inputs: Inputs) -> tuple[Predict, Job]:
    job = simumax_job(**inputs)
    return lambda calibration: 1e3 * step_time(job, calibration).total_s, job


def _thin(inputs: Inputs) -> tuple[Predict, Job]:
    arm = {name: value for name, value in inputs.items() if name != "shape"}
    return _tps(thin_job(ALL_SHAPES[inputs["shape"]], {**arm, "routing": "round_robin"}))


# --- parts of steps --------------------------------------------------------------------------------------------------


def part(
    source: str, name: str, unit: str, measured: float, predict: Predict, reference: str, *, seen: bool = False
) -> Case:
    """A part of a step that was measured alone."""
    return Case(
        source=source, name=name, unit=unit, measured=measured, predict=predict, reference=reference, whole=False,
        seen=seen,
    )  # fmt: skip


def torchao_kernels() -> Iterator[Case]:
    """Single kernels, products and MoE layers on B200, as torchao publishes them."""
    for one in b200_observations():
        unit = "speed-up" if one.kind == "speed-up" else "µs"
        yield part(TORCHAO, one.name, unit, one.value, one.predict, one.source, seen=one.fitted)
    for kind in ("cast", "pipeline", "layer"):
        yield from noted(kind)


def deepep_bandwidths() -> Iterator[Case]:
    """Every row of DeepEP's tables, there and back."""
    for row in QUOTED:
        for operation, value in (("dispatch", row.dispatch_gb_s), ("combine", row.combine_gb_s)):
            name = f"{row.name}{f', {row.sms} SMs' if row.sms else ''}, {operation}"
            seen = row.version == "V2" and ((row.gpu == "SM100" and row.nodes == 1) or row.nodes == 4)
            yield part(DEEPEP, name, "logical GB/s", value, _logical_gb_s(row), row.source, seen=seen)


def h100_kernels() -> Iterator[Case]:
    """Grouped products and exchanges of the later campaigns."""
    for one in h100_observations():
        if one.kind == "step":
            yield part(H100_KERNELS, one.name, "µs", one.value, one.predict, one.source, seen="bf16" in one.name)
    measured = load_measured(ALL_TO_ALL)
    for row in measured.rows:
        name, predict = f"{row['arm']}, {row['operation']}, on the wire", _wire("H100", row)
        yield part(H100_KERNELS, name, "µs", row["parts_us"]["wire"], predict, measured.stamp, seen=True)


def h200_exchanges() -> Iterator[Case]:
    """All four directions together; measured when every constant had its value."""
    measured = load_measured(ALL_TO_ALL_H200)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in measured.rows:
        if row["precision"] == "bf16" and row["sms_chosen_by"] == "library":
            groups.setdefault((row["size"], row["routing"], row["arm"]), []).append(row)
    for name, rows in groups.items():
        us = sum(row["parts_us"]["wire"] for row in rows)
        predict = _sum([_wire("H200", row) for row in rows])
        yield part(H200_EXCHANGES, ", ".join(name) + ", on the wire", "µs", us, predict, measured.stamp)


def _product_ms(inputs: Inputs) -> tuple[Predict, None]:
    size = Size(m=inputs["m"], n=inputs["n"], k=inputs["k"], groups=inputs["groups"])
    us = step_us(GPUS[inputs["gpu"]], size, inputs["precision"])
    return lambda calibration: us(calibration) / 1e3, None


def _cast(inputs: Inputs) -> tuple[Predict, None]:
    return cast_us(B200, "mxfp8", inputs["elements"]), None


def _sum(parts: list[Predict]) -> Predict:
    return lambda calibration: sum(one(calibration) for one in parts)


def _destinations(inputs: Inputs) -> tuple[Predict, None]:
    """Distinct ranks or nodes of a token: 256 experts, top-8, 32 ranks on four nodes."""
    placement = ExpertPlacement(experts=256, top_k=8, ep=32, ranks_per_node=8)
    routing = RoutingModel(**{name: value for name, value in inputs.items() if name != "what"})
    reached: float = getattr(expected_destinations(routing, placement), inputs["what"])
    return lambda _: reached, None


def _logical_gb_s(row: QuotedBandwidth) -> Predict:
    gpu = GPUS["B200" if row.gpu == "SM100" else row.gpu if row.gpu in GPUS else "H100"]

    def predict(calibration: Calibration) -> float:
        if row.wire == "network":
            wire = float(NIC_400G) * float(calibration.deepep_network)
        else:
            wire = float(gpu.nvlink_gb_s or 0) * float(calibration.deepep_nvlink)
        return wire / row.on_wire_gb_s(1.0)

    return predict


def _wire(gpu: str, row: Row) -> Predict:
    """Microseconds of a measured exchange; DeepEP's expanding layout writes every expert's row within it."""
    shape = replace(shape_of("671B"), num_experts=row["experts"], dim=row["hidden"], top_k=row["top_k"])
    job = exchange_job(gpu, ep=row["ranks"], shape=shape, tokens=row["tokens"])
    work = replace(job.work, backend=EPBackend(row["backend"]))
    job = replace(job, work=work, routing=RoutingModel(kind=row["routing"]))
    place = ("dispatch", "combine", "combine_backward", "dispatch_backward").index(row["operation"])
    copies = PERMUTATIONS["deepep expanded"].copies[place] if row["layout"] == "expanded" else 0.0

    def predict(calibration: Calibration) -> float:
        copy_s = 2 * BF16 * job.work.received(job.shape) * job.shape.dim / memory_rate(job, calibration)
        return 1e6 * (exchange_time_s(job, calibration, BYTES_PER_ELEMENT["bf16"]) + copies * copy_s)

    return predict


def _pipeline(inputs: Inputs) -> tuple[Predict, None]:
    """Dispatch, permutation, one grouped product, and back, on 8 × B200, ms."""
    dim, hidden, precision = inputs["dim"], inputs["hidden"], inputs["precision"]
    shape = replace(shape_of("671B"), dim=dim, moe_hidden_dim=hidden, num_experts=64, top_k=1, expert_groups=1)
    multiplied: GroupedPrecision = "mxfp8_wgrad_bf16" if precision == "mxfp8" else "bf16"
    job = exchange_job("B200", ep=8, shape=shape, tokens=EP_ROWS)

    def predict(calibration: Calibration) -> float:
        low, high = (exchange_time_s(job, calibration, BYTES_PER_ELEMENT[one]) for one in (precision, "bf16"))
        sizes = (EP_ROWS, hidden, dim, 8, multiplied, rates_of(B200, calibration))
        forward_s = grouped_time_s(*sizes, direction="forward")
        copies = PERMUTATIONS["fused"].copies
        copy_s = 2 * BF16 * EP_ROWS * dim / memory_rate(job, calibration)
        if inputs["direction"] == "forward":
            return 1e3 * (low + high + forward_s + sum(copies[:2]) * copy_s)
        backward_s = grouped_time_s(*sizes) - forward_s
        return 1e3 * (low + high + backward_s + sum(copies[2:]) * copy_s)

    return predict, None


def _layer_gain(inputs: Inputs) -> tuple[Predict, None]:
    """Speed-up of a whole MoE layer with 8 local experts by MXFP8."""
    dim, hidden = inputs["dim"], inputs["hidden"]
    moved = BF16 * EP_ROWS * (2 * dim * sum(PERMUTATIONS["standard compiled"].copies) + 9 * hidden)

    def layer_s(precision: GroupedPrecision, rates: Rates) -> float:
        first, last = ((EP_ROWS, n, k, 8, precision, rates) for n, k in ((hidden, dim), (dim, hidden)))
        return 2 * grouped_time_s(*first) + grouped_time_s(*last) + moved / rates.memory

    def predict(calibration: Calibration) -> float:
        rates = rates_of(B200, calibration)
        return layer_s("bf16", rates) / layer_s("mxfp8", rates)

    return predict, None


PREDICT: dict[str, Callable[[Inputs], tuple[Predict, Job | None]]] = {
    "mxfp8 all-to-all": _mxfp8_all_to_all,
    "megatron": _megatron,
    "simumax": _simumax,
    "thin": _thin,
    "debug": lambda _: _tps(debug_job()),
    "destinations": _destinations,
    "product": _product_ms,
    "cast": _cast,
    "pipeline": _pipeline,
    "layer": _layer_gain,
}
