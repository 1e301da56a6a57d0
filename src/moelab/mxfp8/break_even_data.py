"""What the break-even model is fitted on and tested against: one observation for each published or measured time.

An observation is one of three: a *kernel* alone, a *step* (forward and backward, with what the benchmark does beside
it), or a *speed-up* of kernels. Which are fitted is decided here, by what they are and not by how well they fit; all
others are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import CAST_BYTES, Constants, Direction, gain, gemm_parts
from moelab.mxfp8.grouped_gemm_cases import Case, Precision
from moelab.mxfp8.grouped_gemm_results import SHAPE, GroupedGemmResult, case_of

SPREAD = {"kernel": 0.05, "step": 0.05, "speed-up": 0.03}
"""Relative error that an observation is thought to have: it weighs as its inverse."""
FITTED_CURVE = (16384, 131072)
"""The ends of torchao's curve are fitted, its inner points predicted."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One figure.

    Attributes:
        kind: ``kernel``, ``step`` (both µs) or ``speed-up``.
        name: for tables.
        case: shape; what a kernel is of.
        precision: BF16, or the 8-bit format.
        value: µs, or a ratio.
        fitted: or else predicted.
        direction: product of a kernel.
        component: of a kernel: ``gemm``, a kind of cast, or ``overhead``.
        elements: that a cast kernel reads.
        extra_bytes: that a step moves beside products and casts.
    """

    kind: Literal["kernel", "step", "speed-up"]
    name: str
    case: Case
    precision: Precision
    value: float
    fitted: bool
    direction: Direction | None = None
    component: Literal["gemm", "cast rows", "cast columns", "cast weights", "overhead"] = "gemm"
    elements: int = 0
    extra_bytes: int = 0

    def predict(self, constants: Constants) -> float:
        """What the model gives for it, in its unit."""
        if self.kind == "kernel":
            return self._kernel_us(constants)
        if self.kind == "speed-up":
            case = self.case
            return gain(case.m, case.n, case.k, case.groups, constants)
        extra_s = self.extra_bytes / constants.row_cast_tb_s / 1e12
        factor = constants.bf16_in_step if self.precision == "bf16" else constants.low_in_step
        return 1e6 * (sum(self._parts(constants, in_step=True)) + factor * extra_s)

    def _parts(self, constants: Constants, *, in_step: bool) -> list[float]:
        case = self.case
        parts = gemm_parts(case.m, case.n, case.k, case.groups, self.precision, constants, in_step=in_step)
        return [part.time_s for part in parts]

    def _kernel_us(self, constants: Constants) -> float:
        case = self.case
        if self.component.startswith("cast"):
            rate = getattr(constants, f"{self.component.split()[1].removesuffix('s')}_cast_tb_s")
            return self.elements * CAST_BYTES[constants.low] / rate / 1e6
        parts = gemm_parts(case.m, case.n, case.k, case.groups, self.precision, constants)
        wanted = [part for part in parts if part.kind == self.component]
        return 1e6 * sum(part.time_s for part in wanted if self.direction in (None, part.direction))


def b200_observations(*, rows_fitted: tuple[int, ...] = (8,)) -> list[Observation]:
    """Torchao's figures.

    Args:
        rows_fitted: group counts whose rows are fitted; 8 is that of the kernels.
    """
    return [*_b200_kernels(), *_b200_curve(), *b200_rows(rows_fitted)]


def _b200_kernels() -> Iterator[Observation]:
    case, elements = b200.KERNELS_CASE, operand_elements(b200.KERNELS_CASE)
    base = {"kind": "kernel", "case": case, "precision": "mxfp8", "fitted": True}
    for kernel in b200.KERNELS:
        name = f"{kernel.direction}: {kernel.kind} {kernel.operand}".strip()
        if kernel.kind == "gemm":
            yield _observation(base, name=name, value=kernel.us, direction=kernel.direction)
        elif kernel.kind == "quantise":
            component = cast_component(kernel.direction, kernel.operand)
            cast = {"component": component, "elements": elements[kernel.operand], "direction": kernel.direction}
            yield _observation(base, name=name, value=kernel.us, **cast)
    scales_us = sum(kernel.us for kernel in b200.KERNELS if kernel.kind == "scales")
    yield _observation(base, name="all: scales into blocks", value=scales_us, component="overhead")


def _b200_curve() -> Iterator[Observation]:
    for m, speedup in b200.CURVE.items():
        case = replace(b200.KERNELS_CASE, m=m)
        name = f"kernels' speed-up, M = {m}"
        fitted = m in FITTED_CURVE
        yield Observation(
            kind="speed-up", name=name, case=case, precision="mxfp8", value=speedup, fitted=fitted, component="gemm"
        )


def b200_rows(fitted: tuple[int, ...]) -> Iterator[Observation]:
    """Torchao's eight rows, two times each."""
    for row in b200.ROWS:
        base = {"kind": "step", "case": row.case, "fitted": row.case.groups in fitted}
        base["extra_bytes"] = b200.benchmark_extra_bytes(row.case)
        yield _observation(base, name=f"{row.case.name}, bf16", precision="bf16", value=row.bf16_us)
        yield _observation(base, name=f"{row.case.name}, mxfp8", precision="mxfp8", value=row.mxfp8_us)


def measured_observations(result: GroupedGemmResult, precision: Precision = "fp8") -> list[Observation]:
    """Times of a micro-experiment: the even 671B cases with 8 groups are fitted, the others predicted.

    Args:
        result: with BF16 and the precision.
        precision: the 8-bit format.
    """
    found: list[Observation] = []
    for row in result.speedups(precision).itertuples():
        case = case_of(row)
        for name, us in (("bf16", row.bf16_us), (precision, row.low_us)):
            base = {"kind": "step", "case": case, "fitted": _is_reference(case), "precision": name}
            found.append(_observation(base, name=f"{case.name}, {name}", value=float(str(us))))
    return [*found, *_measured_kernels(result.components, precision)]


def _measured_kernels(components: pd.DataFrame, precision: Precision) -> Iterator[Observation]:
    if components.empty:
        return
    for row in components[components["precision"].isin(["bf16", precision])].to_dict("records"):
        direction, kind = str(row["pass"]), row["kind"]
        case = Case(**{name: row[name] for name in SHAPE})
        base = {"kind": "kernel", "case": case, "fitted": _is_reference(case), "precision": row["precision"]}
        base |= {"name": f"{case.name}, {row['precision']}, {direction}: {row['component']}"}
        base |= {"value": row["median_us"], "direction": direction}
        if kind == "gemm":
            yield _observation(base)
        elif kind == "quantise":
            component = cast_component(direction, "weights" if "weights" in row["component"] else "")
            yield _observation(base, component=component, elements=row["size"] // 3)


def _is_reference(case: Case) -> bool:
    return (case.n, case.k, case.groups, case.sizes) == (2048, 7168, 8, "even")


def operand_elements(case: Case) -> dict[str, int]:
    """Elements of rows, weights and gradient."""
    return {"rows": case.m * case.k, "weights": case.groups * case.n * case.k, "gradient": case.m * case.n}


def cast_component(direction: str, operand: str) -> str:
    """Which constant a cast belongs to."""
    if operand == "weights":
        return "cast weights"
    return "cast columns" if direction == "wgrad" else "cast rows"


def _observation(base: dict[str, object], **more: object) -> Observation:
    return Observation(**{**base, **more})  # type: ignore[arg-type]  # assembled above from its own fields
