"""What torchao publishes of single kernels, products and MoE layers on B200, as rows of the validation table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moelab.hardware import B200
from moelab.memory.activations import BF16
from moelab.model import BYTES_PER_ELEMENT, ModelShape, shape_of
from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import CAST_BYTES, OVERHEAD_SHARE
from moelab.mxfp8.grouped_gemm_cases import Case as Size
from moelab.projection.calibration import Calibration, with_values
from moelab.projection.gemm_rate import grouped_time_s, rates_of
from moelab.projection.job import Job
from moelab.projection.memory_bound import memory_rate
from moelab.projection.moe_exchange import COPIES, exchange_time_s
from moelab.projection.parts import Predict, grouped_job, product_parts_s, product_predicted
from moelab.projection.validation_row import Case

TORCHAO = "torchao"


def torchao_cases() -> Iterator[Case]:
    """Every row of torchao's."""
    yield from _products()
    yield from _kernels()
    yield from _layers()


def _products() -> Iterator[Case]:
    for row in b200.ROWS:
        extra = b200.benchmark_extra_bytes(row.case)
        for precision, us in (("bf16", row.bf16_us), ("mxfp8", row.mxfp8_us)):
            predict = product_predicted("B200", precision, row.case, extra_bytes=extra)
            name = f"{row.case.name}, {precision}"
            yield _part(name, "µs", us, predict, b200.ROWS_SOURCE, seen=row.case.groups == 8)


CASTS = {"dim0 rceil": 220.1, "dim0 Triton": 138.2, "dim1 CUDA rceil": 142.3}
"""Casts of 16384² elements, µs."""


def _kernels() -> Iterator[Case]:
    for name, us in CASTS.items():
        yield _part(f"cast of 16384², {name}", "µs", us, _cast_us(16384**2))
    case = b200.KERNELS_CASE
    for kernel in b200.KERNELS:
        name = f"kernel of {kernel.direction}: {kernel.kind} {kernel.operand}".strip()
        if kernel.kind == "quantise":
            yield _part(name, "µs", kernel.us, _cast_us(case.elements[kernel.operand]), b200.KERNELS_SOURCE, seen=True)
        elif kernel.kind == "gemm":
            yield _part(name, "µs", kernel.us, _product_us(kernel.direction), b200.KERNELS_SOURCE, seen=True)
    for direction, share in OVERHEAD_SHARE["mxfp8"].items():
        us = sum(one.us for one in b200.KERNELS if (one.direction, one.kind) == (direction, "scales"))
        name = f"kernels of {direction}: scales"
        yield _part(name, "µs", us, _scales_us(share), b200.KERNELS_SOURCE, seen=True)
    for m, speedup in b200.CURVE.items():
        size = replace(case, m=m)
        yield _part(f"products and casts, {size.name}", "speed-up", speedup, _gain_of(size), b200.CURVE_SOURCE)


def _part(
    name: str, unit: str, measured: float, predict: Predict, reference: str = b200.SOURCE, *, seen: bool = False
) -> Case:
    return Case(
        source=TORCHAO,
        name=name,
        unit=unit,
        measured=measured,
        predict=predict,
        reference=reference,
        whole=False,
        seen=seen,
    )


def _cast_us(elements: int) -> Predict:
    tb_s = float(B200.hbm_tb_s or 0)
    return lambda calibration: elements * CAST_BYTES["mxfp8"] / (1e6 * float(calibration.blackwell_cast) * tb_s)


def _scales_us(share: float) -> Predict:
    return lambda calibration: share * float(calibration.blackwell_scales_us)


def _product_us(direction: str) -> Predict:
    """A kernel alone: a rate of a step without what a step adds to it."""
    m, n, k, groups = b200.KERNELS_CASE.m, b200.KERNELS_CASE.n, b200.KERNELS_CASE.k, b200.KERNELS_CASE.groups
    sizes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[direction]

    def predict(calibration: Calibration) -> float:
        rates = rates_of(B200, with_values(calibration, blackwell_low_in_step=1.0))
        return 1e6 * grouped_time_s(*sizes, groups, rates, low=True, wgrad=direction == "wgrad")

    return predict


def _gain_of(size: Size) -> Predict:
    predicted = {precision: product_predicted("B200", precision, size) for precision in ("bf16", "mxfp8")}
    return lambda calibration: predicted["bf16"](calibration) / predicted["mxfp8"](calibration)


EP_PIPELINE = {
    (8192, 5120): (18.037, 12.145, 30.485, 21.839),
    (7168, 2048): (9.394, 6.424, 13.762, 10.306),
    (2048, 1408): (3.368, 2.952, 4.982, 3.877),
}
"""Dispatch, permutation, one grouped product, and back, on 8 × B200: ms forward in BF16 and MXFP8, backward in both."""
EP_ROWS = 131_072
LAYERS = {
    "Llama4, 5120 × 8192": (5120, 8192, 1.431, b200.SOURCE),
    "DSv3 671B, 7168 × 2048": (7168, 2048, 1.148, b200.SOURCE),
    "DSv3 16B, 2048 × 1408": (2048, 1408, b200.PUBLIC_16B_LAYER, "pytorch/torchtitan issue 2086: 16.882 to 17.710 ms"),
}
"""A whole MoE layer with 8 local experts: dim, hidden and the speed-up. The 16B one has as many rows as the pipeline;
torchao's README gives ``total_M`` 131,072 for its two, which is as many."""


def _layers() -> Iterator[Case]:
    for (dim, hidden), values in EP_PIPELINE.items():
        names = [f"{name}, {precision}" for name in ("forward", "backward") for precision in ("bf16", "mxfp8")]
        for name, ms in zip(names, values, strict=True):
            yield _part(f"EP pipeline {dim} × {hidden}, {name}", "ms", ms, _pipeline(dim, hidden, name))
    for name, (dim, hidden, speedup, reference) in LAYERS.items():
        yield _part(f"MoE layer {name}", "speed-up", speedup, _layer_gain(dim, hidden), reference)


def _pipeline(dim: int, hidden: int, name: str) -> Predict:
    direction, precision = name.split(", ")
    job = grouped_job(
        "B200", "mxfp8_wgrad_bf16" if precision == "mxfp8" else "bf16", ep=8, shape=_wide(dim, hidden), tokens=EP_ROWS
    )

    def predict(calibration: Calibration) -> float:
        low, high = (exchange_time_s(job, calibration, BYTES_PER_ELEMENT[one]) for one in (precision, "bf16"))
        parts = product_parts_s(job, calibration, EP_ROWS, hidden, dim, 8)
        copies = COPIES["fused"]
        copy_s = 2 * BF16 * EP_ROWS * dim / memory_rate(job, calibration)
        if direction == "forward":
            return 1e3 * (low + high + parts["forward"] + sum(copies[:2]) * copy_s)
        return 1e3 * (low + high + parts["dgrad"] + parts["wgrad"] + sum(copies[2:]) * copy_s)

    return predict


def _wide(dim: int, hidden: int) -> ModelShape:
    return replace(shape_of("671B"), dim=dim, moe_hidden_dim=hidden, num_experts=64, top_k=1, expert_groups=1)


def _layer_gain(dim: int, hidden: int) -> Predict:
    jobs = [grouped_job("B200", precision) for precision in ("bf16", "mxfp8")]
    moved = BF16 * EP_ROWS * (2 * dim * sum(COPIES["standard compiled"]) + 9 * hidden)

    def layer_s(job: Job, calibration: Calibration) -> float:
        products = 2 * sum(product_parts_s(job, calibration, EP_ROWS, hidden, dim, 8).values())
        products += sum(product_parts_s(job, calibration, EP_ROWS, dim, hidden, 8).values())
        return products + moved / memory_rate(job, calibration)

    def predict(calibration: Calibration) -> float:
        bf16_s, mxfp8_s = (layer_s(job, calibration) for job in jobs)
        return bf16_s / mxfp8_s

    return predict
