"""Constants of the GEMM model from published and measured times, with draws around them for the intervals.

An observation is one of three: a *kernel* alone, a *step* (forward and backward, with what the benchmark does beside
it), or a *speed-up* of kernels. Which are fitted is decided here, by what they are and not by how well they fit; all
others are predicted. The B200's are torchao's (``data/torchao_b200.yaml``), the H100's this project's own.

Constants are positive, so their logarithms are fitted, by least squares of relative errors with a soft loss: one odd
row does not bend the rest. Intervals are those of a parametric bootstrap: the fit is repeated on its own predictions
with errors drawn anew, as large as those that the model makes on all observations of a kind, those that it was not
fitted on included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from moelab.data import read_json, read_yaml
from moelab.hardware import B200, H100, Gpu
from moelab.micro.grouped_gemm import DIRECTIONS, SHAPE, STORED, Case, Direction, GroupedPrecision, stored
from moelab.planning.gemm_fit import GOAL
from moelab.planning.time.calibration import CALIBRATION, Calibration, with_values
from moelab.planning.time.gemm import CAST_BYTES, Kind, gain, grouped_parts, grouped_time_s, rates_of

SPREAD = {"kernel": 0.05, "step": 0.05, "speed-up": 0.03}
"""Relative error that an observation is thought to have: it weighs as its inverse."""
FITTED_CURVE = (16384, 131072)
"""The ends of torchao's curve are fitted, its inner points predicted."""
DRAWS, SEED = 100, 20261101
B200_FREE = (
    "blackwell_grouped",
    "blackwell_bf16_alone",
    "blackwell_low",
    "blackwell_low_wgrad",
    "blackwell_low_in_step",
    "blackwell_cast",
    "blackwell_scales_us",
    "blackwell_scales_wgrad_us",
    "blackwell_scales_us_per_mrow",
)
GEMMS: tuple[Kind, ...] = ("gemm",)
CASTS: tuple[Kind, ...] = ("cast rows", "cast columns", "cast weights")
H100_FREE = ("hopper_gemm", "hopper_low", "hopper_cast")


# Observations


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One figure, and what the model says of it.

    Attributes:
        kind: ``kernel``, ``step`` (both µs) or ``speed-up``.
        name: for tables.
        value: µs, or a ratio.
        fitted: or else predicted.
        predict: the value by a calibration, in its unit.
        source: where the figure stands.
    """

    kind: Literal["kernel", "step", "speed-up"]
    name: str
    value: float
    fitted: bool
    predict: Callable[[Calibration], float]
    source: str


class Step(NamedTuple):
    """One of torchao's rows: forward and backward, µs; group sizes were random and are not published."""

    case: Case
    bf16_us: float
    mxfp8_us: float

    @property
    def speedup(self) -> float:
        """BF16 time over MXFP8 time."""
        return self.bf16_us / self.mxfp8_us


class Kernel(NamedTuple):
    """One kernel of a step at :data:`KERNELS_CASE`, µs; ``operand`` of a GEMM is empty."""

    direction: Direction
    kind: Literal["quantise", "scales", "gemm"]
    operand: Literal["rows", "weights", "gradient", ""]
    us: float


_TORCHAO = read_yaml("torchao_b200.yaml")
_SIZES = ("m", "n", "k", "groups")
KERNELS_CASE = Case(**_TORCHAO["kernels_case"])
KERNELS = tuple(Kernel(**row) for row in _TORCHAO["kernels"])
STEPS = tuple(
    Step(Case(**{name: row[name] for name in _SIZES}, sizes="random"), row["bf16_us"], row["mxfp8_us"])
    for row in _TORCHAO["rows"]
)


def elements_of(case: Case) -> dict[str, int]:
    """Elements of ``rows``, ``weights`` and ``gradient``, which casts read."""
    return {"rows": case.m * case.k, "weights": case.groups * case.n * case.k, "gradient": case.m * case.n}


def b200_observations() -> list[Observation]:
    """Torchao's figures: its kernels and the ends of its curve are fitted, and the rows with as many groups as they."""
    return [*_b200_kernels(), *_b200_curve(), *_b200_steps()]


def _b200_kernels() -> Iterator[Observation]:
    observe = functools.partial(Observation, kind="kernel", fitted=True, source=_TORCHAO["sources"]["kernels"])
    for one in KERNELS:
        if one.kind == "quantise":
            predict = cast_us(B200, "mxfp8", elements_of(KERNELS_CASE)[one.operand])
            yield observe(name=f"{one.direction}: quantise {one.operand}", value=one.us, predict=predict)
        elif one.kind == "gemm":
            predict = kernels_us(B200, KERNELS_CASE, "mxfp8", (one.direction,), ("gemm",))
            yield observe(name=f"{one.direction}: gemm", value=one.us, predict=predict)
    for direction in DIRECTIONS:
        us = sum(one.us for one in KERNELS if (one.direction, one.kind) == (direction, "scales"))
        predict = kernels_us(B200, KERNELS_CASE, "mxfp8", (direction,), ("scales",))
        yield observe(name=f"{direction}: scales into blocks", value=us, predict=predict)


def _b200_curve() -> Iterator[Observation]:
    for point in _TORCHAO["curve"]:
        case = replace(KERNELS_CASE, m=point["m"])
        yield Observation(
            kind="speed-up",
            name=f"kernels' speed-up, M = {case.m}",
            value=point["speedup"],
            fitted=case.m in FITTED_CURVE,
            predict=kernels_gain(B200, case),
            source=_TORCHAO["sources"]["curve"],
        )


def _b200_steps() -> Iterator[Observation]:
    """Torchao's eight rows, two times each."""
    for row in STEPS:
        precisions: tuple[tuple[GroupedPrecision, float], ...] = (("bf16", row.bf16_us), ("mxfp8", row.mxfp8_us))
        for precision, us in precisions:
            yield Observation(
                kind="step",
                name=f"{row.case.name}, {precision}",
                value=us,
                fitted=row.case.groups == KERNELS_CASE.groups,
                predict=step_us(B200, row.case, precision, extra_bytes=benchmark_extra_bytes(row.case)),
                source=_TORCHAO["sources"]["rows"],
            )


def benchmark_extra_bytes(case: Case) -> int:
    """Memory traffic of torchao's benchmark beside the products and casts, in either precision.

    Its backward adds each gradient to that of the call before (read, read, write of M·K and G·N·K) and its loss is a
    mean squared error (two reads forward, two reads and a write backward of M·N), all BF16.

    Source: ``benchmarks/utils.py`` of pytorch/ao, ``bench_fwd_bwd_microseconds``.
    """
    gradients = case.m * case.k + case.groups * case.n * case.k
    return 2 * (3 * gradients + 5 * case.m * case.n)


def h100_observations() -> list[Observation]:
    """The packaged micro-experiment: its kernels alone are fitted, whole steps predicted."""
    result = stored()
    whole = result.rows.query("`pass` == 'forward+backward' and precision in ('bf16', 'fp8')")
    components = pd.DataFrame(read_json(f"measured/{STORED}")["components"])
    kernels = components.query("kind in ('gemm', 'quantise')")
    # summed over a case, so that short casts of weights count as little as they take
    sums = kernels.groupby([*SHAPE, "precision", "kind"], sort=False)["median_us"].sum().reset_index()
    observe = functools.partial(Observation, source=result.stamp)
    observations = []
    for row in whole.to_dict("records"):
        case, precision = Case(**{name: row[name] for name in SHAPE}), row["precision"]
        observations.append(
            observe(
                kind="step",
                name=f"{case.name}, {precision}",
                value=row["median_us"],
                fitted=False,
                predict=step_us(H100, case, precision),
            )
        )
    for row in sums.to_dict("records"):
        case, precision = Case(**{name: row[name] for name in SHAPE}), row["precision"]
        name, kinds = ("casts", CASTS) if row["kind"] == "quantise" else ("GEMMs", GEMMS)
        observations.append(
            observe(
                kind="kernel",
                name=f"{case.name}, {precision}: {name}",
                value=row["median_us"],
                fitted=True,
                predict=kernels_us(H100, case, precision, DIRECTIONS, kinds),
            )
        )
    return observations


def step_us(
    gpu: Gpu, case: Case, precision: GroupedPrecision, *, extra_bytes: float = 0.0
) -> Callable[[Calibration], float]:
    """Forward and backward in a step, and ``extra_bytes`` that are moved beside them."""

    def predict(calibration: Calibration) -> float:
        alone, rates = (rates_of(gpu, calibration, alone=one) for one in (True, False))
        # at the rate of casts, and slowed by the step as much as the product's own kernels are
        slower = alone.grouped / rates.grouped if precision == "bf16" else alone.low / rates.low
        extra_s = slower * extra_bytes / alone.cast
        return 1e6 * (grouped_time_s(*case.mnkg, precision, rates) + extra_s)

    return predict


def kernels_us(
    gpu: Gpu, case: Case, precision: GroupedPrecision, directions: Sequence[Direction], kinds: Sequence[Kind]
) -> Callable[[Calibration], float]:
    """Kernels of some directions and kinds, alone."""

    def predict(calibration: Calibration) -> float:
        parts = grouped_parts(*case.mnkg, precision, rates_of(gpu, calibration, alone=True))
        return 1e6 * sum(part.time_s for part in parts if part.direction in directions and part.kind in kinds)

    return predict


def kernels_gain(gpu: Gpu, case: Case) -> Callable[[Calibration], float]:
    """BF16 time over 8-bit time of the kernels of forward and backward, alone."""
    return lambda calibration: gain(*case.mnkg, rates_of(gpu, calibration, alone=True))


def cast_us(gpu: Gpu, low: str, elements: float) -> Callable[[Calibration], float]:
    """One cast, alone."""
    return lambda calibration: 1e6 * elements * CAST_BYTES[low] / rates_of(gpu, calibration, alone=True).cast


# The fit


def residuals(observations: Sequence[Observation], calibration: Calibration) -> pd.DataFrame:
    """All observations: kind, name, role, value, the model's and its relative error."""
    models = [one.predict(calibration) for one in observations]
    return pd.DataFrame(
        {
            "kind": one.kind,
            "name": one.name,
            "role": "fitted" if one.fitted else "predicted",
            "value": one.value,
            "model": model,
            "error": model / one.value - 1,
        }
        for one, model in zip(observations, models, strict=True)
    )


def spread_by_kind(table: pd.DataFrame) -> dict[str, float]:
    """Relative error of each kind in a table of :func:`residuals`; at least that of :data:`SPREAD`."""
    squares = np.log1p(table["error"]).pow(2).groupby(table["kind"]).mean()
    return {kind: max(least, math.sqrt(squares.get(kind, 0.0))) for kind, least in SPREAD.items()}


def fit(
    observations: Sequence[Observation],
    free: tuple[str, ...],
    *,
    start: Calibration = CALIBRATION,
    tolerance: float = 1e-8,
) -> Calibration:
    """Find constants.

    Args:
        observations: those that are ``fitted`` count.
        free: names of the constants to find.
        start: where to begin; what is not free stays as it is here.
        tolerance: relative change of the errors or constants at which to stop.
    """
    fitted = [one for one in observations if one.fitted]

    def calibration_of(logs: np.ndarray) -> Calibration:
        return with_values(start, **dict(zip(free, np.exp(logs).tolist(), strict=True)))

    def weighted_errors(logs: np.ndarray) -> np.ndarray:
        calibration = calibration_of(logs)
        return np.array([math.log(one.predict(calibration) / one.value) / SPREAD[one.kind] for one in fitted])

    first = np.log([getattr(start, name) for name in free])
    stop = {"ftol": tolerance, "xtol": tolerance}
    # a factor of a thousand either way: a constant that the data do not hold stops there instead of leaving the floats
    solution = least_squares(weighted_errors, first, loss="soft_l1", bounds=(first - 7, first + 7), **stop)
    return calibration_of(solution.x)


@functools.cache
def fitted_b200() -> Calibration:
    """MXFP8 on a B200, from torchao's figures; ``calibration.yaml`` has what it finds."""
    return fit(b200_observations(), B200_FREE)


def leave_one_out() -> pd.DataFrame:
    """Torchao's eight rows, each predicted by a fit on all other figures.

    Returns:
        A row for each: ``case``, ``measured``, the ``split`` prediction of :func:`fitted_b200` with its role, the
        ``left_out`` prediction, their errors, and whether each is within the goal.
    """
    split = fitted_b200()
    others = [one for one in b200_observations() if one.kind != "step"]
    steps = list(_b200_steps())
    rows = []
    for row in STEPS:
        bf16, mxfp8 = (one for one in steps if one.name.startswith(f"{row.case.name}, "))
        but_this = [replace(one, fitted=one not in (bf16, mxfp8)) for one in steps]
        left_out = fit([*others, *but_this], B200_FREE)
        predicted = {
            name: bf16.predict(calibration) / mxfp8.predict(calibration)
            for name, calibration in (("split", split), ("left_out", left_out))
        }
        errors = {f"{name}_error": value / row.speedup - 1 for name, value in predicted.items()}
        within = {f"{name}_within": abs(errors[f"{name}_error"]) <= GOAL for name in predicted}
        role = "fitted" if bf16.fitted else "predicted"
        rows.append({"case": row.case.name, "role": role, "measured": row.speedup, **predicted, **errors, **within})
    return pd.DataFrame(rows)


# What the package carries


def resampled(
    calibration: Calibration, observations: Sequence[Observation], free: tuple[str, ...], draws: int = DRAWS
) -> list[Calibration]:
    """Calibrations of a parametric bootstrap around the one that was fitted."""
    random = np.random.default_rng(SEED)
    spread = spread_by_kind(residuals(observations, calibration))
    fitted = [one for one in observations if one.fitted]
    models = [one.predict(calibration) for one in fitted]
    calibrations = []
    for _ in range(draws):
        drawn = [
            replace(one, value=model * math.exp(random.normal(0, spread[one.kind])))
            for one, model in zip(fitted, models, strict=True)
        ]
        calibrations.append(fit(drawn, free, start=calibration, tolerance=1e-4))
    return calibrations


def fit_file(draws: int = DRAWS) -> dict[str, Any]:
    """Content of ``moelab/data/gemm_fit.json``: both fits with their draws, and the rows that were left out in turn."""
    fits = {}
    for gpu, observations, free in (
        ("B200", b200_observations(), B200_FREE),
        ("H100", h100_observations(), H100_FREE),
    ):
        calibration = fit(observations, free)
        fits[gpu] = {
            "free": list(free),
            "residuals": _rounded(residuals(observations, calibration)),
            "values": _values(calibration, free),
            "draws": [_values(drawn, free) for drawn in resampled(calibration, observations, free, draws)],
        }
    return {
        "label": "derived",
        "what": "benchmarks/validation/gemm_fit.py, as python -m benchmarks.validation --write wrote it",
        "left_out": _rounded(leave_one_out()),
        "fits": fits,
    }


def _rounded(table: pd.DataFrame) -> list[dict[str, Any]]:
    numbers = table.select_dtypes("float").map(lambda value: float(f"{value:.6g}"))
    return table.assign(**numbers).to_dict("records")


def _values(calibration: Calibration, free: Sequence[str]) -> list[float]:
    return [float(f"{getattr(calibration, name):.6g}") for name in free]
