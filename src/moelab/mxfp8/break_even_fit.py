"""Fit of the break-even model to published or measured times, and what it says of real layouts, with intervals.

An observation is one of three: a *kernel* alone, a *step* (forward and backward, with what the benchmark does beside
it), or a *speed-up* of kernels. Which are fitted is decided here, by what they are and not by how well they fit; all
others are predicted.

Constants are positive, so their logarithms are fitted, by least squares of relative errors with a soft loss: one odd
row does not bend the rest. Intervals are those of a parametric bootstrap: the fit is repeated on its own predictions
with errors drawn anew, as large as those that the model makes on all observations of a kind, those that it was not
fitted on included.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from moelab.analysis.published import CONVERGENCE_SETUP, THROUGHPUT_SETUP, Setup
from moelab.errors import BadInput
from moelab.model import gemms, shape_of
from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import CAST_BYTES, Constants, Kind, break_even_m, gain, gemm_parts
from moelab.mxfp8.grouped_gemm_cases import Case, Direction, Precision
from moelab.mxfp8.grouped_gemm_results import SHAPE, GroupedGemmResult

SPREAD = {"kernel": 0.05, "step": 0.05, "speed-up": 0.03}
"""Relative error that an observation is thought to have: it weighs as its inverse."""
FITTED_CURVE = (16384, 131072)
"""The ends of torchao's curve are fitted, its inner points predicted."""
GOAL = 0.10
"""A prediction within this of the measured speed-up reaches the goal."""
RESAMPLES, CONFIDENCE, SEED = 100, 0.9, 20261101
CASTS = ("row_cast_tb_s", "column_cast_tb_s", "weight_cast_tb_s")
RATES = ("low_tflops", "low_wgrad_tflops")
START = Constants(
    gpu="B200",
    low="mxfp8",
    bf16_tflops=1000,
    low_tflops=2000,
    low_wgrad_tflops=2000,
    row_cast_tb_s=5,
    column_cast_tb_s=5,
    weight_cast_tb_s=5,
    overhead_us=200,
    overhead_us_per_mrow=1000,
    bf16_in_step=1.1,
    low_in_step=1.1,
)
B200_FREE: tuple[tuple[str, ...], ...] = (
    ("bf16_tflops",),
    ("low_tflops",),
    ("low_wgrad_tflops",),
    CASTS,
    ("overhead_us",),
    ("overhead_us_per_mrow",),
    ("bf16_in_step",),
    ("low_in_step",),
)


# Observations


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
        component: of a kernel.
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
    component: Kind = "gemm"
    elements: int = 0
    extra_bytes: int = 0

    def predict(self, constants: Constants) -> float:
        """What the model gives for it, in its unit."""
        sizes = (self.case.m, self.case.n, self.case.k, self.case.groups)
        if self.kind == "speed-up":
            return gain(*sizes, constants)
        if self.component.startswith("cast"):
            rate = getattr(constants, f"{self.component.split()[1].removesuffix('s')}_cast_tb_s")
            return self.elements * CAST_BYTES[constants.low] / rate / 1e6
        parts = gemm_parts(*sizes, self.precision, constants, in_step=self.kind == "step")
        if self.kind == "step":
            factor = constants.bf16_in_step if self.precision == "bf16" else constants.low_in_step
            extra_s = self.extra_bytes / constants.row_cast_tb_s / 1e12
            return 1e6 * (sum(part.time_s for part in parts) + factor * extra_s)
        kernels = [part for part in parts if part.kind == self.component and self.direction in (None, part.direction)]
        return 1e6 * sum(part.time_s for part in kernels)


def b200_observations() -> list[Observation]:
    """Torchao's figures: its kernels and the ends of its curve are fitted, and the rows with as many groups as they."""
    return [*_b200_kernels(), *_b200_curve(), *_b200_steps()]


def _b200_kernels() -> Iterator[Observation]:
    case = b200.KERNELS_CASE
    kernel_of = functools.partial(Observation, kind="kernel", case=case, precision="mxfp8", fitted=True)
    for kernel in b200.KERNELS:
        observe = functools.partial(kernel_of, value=kernel.us, direction=kernel.direction)
        name = f"{kernel.direction}: {kernel.kind} {kernel.operand}".strip()
        if kernel.kind == "gemm":
            yield observe(name=name)
        elif kernel.kind == "quantise":
            component = _cast_component(kernel.direction, kernel.operand)
            yield observe(name=name, component=component, elements=case.elements[kernel.operand])
    scales_us = sum(kernel.us for kernel in b200.KERNELS if kernel.kind == "scales")
    yield kernel_of(name="all: scales into blocks", value=scales_us, component="overhead")


def _b200_curve() -> Iterator[Observation]:
    for m, speedup in b200.CURVE.items():
        yield Observation(
            kind="speed-up",
            name=f"kernels' speed-up, M = {m}",
            case=replace(b200.KERNELS_CASE, m=m),
            precision="mxfp8",
            value=speedup,
            fitted=m in FITTED_CURVE,
        )


def _b200_steps() -> Iterator[Observation]:
    """Torchao's eight rows, two times each."""
    for row in b200.ROWS:
        precisions: tuple[tuple[Precision, float], ...] = (("bf16", row.bf16_us), ("mxfp8", row.mxfp8_us))
        for precision, us in precisions:
            yield Observation(
                kind="step",
                name=f"{row.case.name}, {precision}",
                case=row.case,
                precision=precision,
                value=us,
                fitted=row.case.groups == b200.KERNELS_CASE.groups,
                extra_bytes=b200.benchmark_extra_bytes(row.case),
            )


def measured_observations(result: GroupedGemmResult, precision: Precision = "fp8") -> list[Observation]:
    """Times of a micro-experiment: the even 671B cases with 8 groups are fitted, the others predicted.

    Args:
        result: with BF16 and the precision.
        precision: the 8-bit format.
    """
    observations: list[Observation] = []
    for row in result.speedups(precision).to_dict("records"):
        case = Case(**{name: row[name] for name in SHAPE})
        observe = functools.partial(Observation, kind="step", case=case, fitted=_is_reference(case))
        observations.append(observe(name=f"{case.name}, bf16", precision="bf16", value=row["bf16_us"]))
        observations.append(observe(name=f"{case.name}, {precision}", precision=precision, value=row["low_us"]))
    for row in result.components.to_dict("records"):
        if row["precision"] not in ("bf16", precision) or row["kind"] == "scales":
            continue
        case = Case(**{name: row[name] for name in SHAPE})
        cast = row["kind"] == "quantise"
        operand = "weights" if "weights" in row["component"] else "rows"
        observations.append(
            Observation(
                kind="kernel",
                name=f"{case.name}, {row['precision']}, {row['pass']}: {row['component']}",
                case=case,
                precision=row["precision"],
                value=row["median_us"],
                fitted=_is_reference(case),
                direction=row["pass"],
                component=_cast_component(row["pass"], operand) if cast else "gemm",
                elements=row["size"] // 3 if cast else 0,
            )
        )
    return observations


def _is_reference(case: Case) -> bool:
    return (case.n, case.k, case.groups, case.sizes) == (2048, 7168, 8, "even")


def _cast_component(direction: str, operand: str) -> Kind:
    """Which constant a cast belongs to."""
    if operand == "weights":
        return "cast weights"
    return "cast columns" if direction == "wgrad" else "cast rows"


# The fit


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Constants and what they were fitted on.

    Attributes:
        constants: as fitted.
        free: names of the constants that were free; those of one group share a value.
        observations: fitted and predicted.
    """

    constants: Constants
    free: tuple[tuple[str, ...], ...]
    observations: tuple[Observation, ...]

    def residuals(self) -> pd.DataFrame:
        """All observations: kind, name, role, value, prediction and relative error."""
        rows = [
            {
                "kind": one.kind,
                "name": one.name,
                "role": "fitted" if one.fitted else "predicted",
                "value": one.value,
                "model": (model := one.predict(self.constants)),
                "error": model / one.value - 1,
            }
            for one in self.observations
        ]
        return pd.DataFrame(rows)


def fit(
    observations: Sequence[Observation], start: Constants, free: tuple[tuple[str, ...], ...], *, tolerance: float = 1e-8
) -> Fit:
    """Find constants.

    Args:
        observations: those that are ``fitted`` count.
        start: where to begin; what is not free stays as it is here.
        free: groups of names of constants; the members of a group share one value.
        tolerance: relative change of the errors or constants at which to stop.

    Raises:
        BadInput: with fewer fitted observations than free constants, or a constant that does not exist.
    """
    known = {field.name for field in fields(Constants)} - {"gpu", "low"}
    if wrong := {name for group in free for name in group} - known:
        raise BadInput(f"{', '.join(sorted(wrong))} is no constant of the model; they are {', '.join(sorted(known))}")
    fitted = [one for one in observations if one.fitted]
    if len(fitted) < len(free):
        raise BadInput(
            f"{len(fitted)} observations cannot determine {len(free)} constants; fit fewer of them or add rows"
        )

    def constants_of(logs: np.ndarray) -> Constants:
        values = {name: float(math.exp(log)) for group, log in zip(free, logs, strict=True) for name in group}
        return replace(start, **values)  # type: ignore[arg-type]  # only numbers are free

    def weighted_errors(logs: np.ndarray) -> np.ndarray:
        constants = constants_of(logs)
        return np.array([math.log(one.predict(constants) / one.value) / SPREAD[one.kind] for one in fitted])

    first = np.log([getattr(start, group[0]) for group in free])
    stop = {"ftol": tolerance, "xtol": tolerance}
    solution = least_squares(weighted_errors, first, loss="soft_l1", bounds=(first - 7, first + 7), **stop)
    return Fit(constants=constants_of(solution.x), free=free, observations=tuple(observations))


@functools.cache
def fit_b200() -> Fit:
    """The model of MXFP8 on a B200, from torchao's figures: eight constants, of which one is all casts' bandwidth."""
    return fit(b200_observations(), START, B200_FREE)


def fit_measured(result: GroupedGemmResult, *, gpu: str = "H100") -> Fit:
    """The model of row-wise FP8 on the GPU of a micro-experiment.

    With times of the kernels alone each kind of cast has its own bandwidth; without them all casts share one.

    Args:
        result: with BF16 and FP8 rows.
        gpu: its short name.
    """
    start = replace(START, gpu=gpu, low="fp8", bf16_tflops=600, low_tflops=1000, low_wgrad_tflops=1000)
    start = replace(start, row_cast_tb_s=1.5, column_cast_tb_s=1.5, weight_cast_tb_s=1.5, overhead_us=100)
    start = replace(start, overhead_us_per_mrow=0.0, bf16_in_step=1.0, low_in_step=1.0)
    free: tuple[tuple[str, ...], ...] = (("bf16_tflops",), ("overhead_us",))
    if result.components.empty:
        free = (*free, RATES, CASTS)
    else:
        free = (*free, *((name,) for name in (*RATES, *CASTS)), ("bf16_in_step",), ("low_in_step",))
    return fit(measured_observations(result), start, free)


def leave_one_out() -> pd.DataFrame:
    """Torchao's eight rows, each predicted by a fit on all other figures.

    Returns:
        A row for each: ``case``, ``measured``, the ``split`` prediction of :func:`fit_b200` with its role, the
        ``left_out`` prediction, their errors, and whether each is within the goal.
    """
    split = fit_b200().constants
    others = [one for one in b200_observations() if one.kind != "step"]
    steps = list(_b200_steps())
    rows = []
    for row in b200.ROWS:
        but_this = [replace(one, fitted=one.case != row.case) for one in steps]
        left_out = fit([*others, *but_this], split, B200_FREE).constants
        bf16, mxfp8 = (one for one in steps if one.case == row.case)
        predicted = {
            name: bf16.predict(constants) / mxfp8.predict(constants)
            for name, constants in (("split", split), ("left_out", left_out))
        }
        errors = {f"{name}_error": value / row.speedup - 1 for name, value in predicted.items()}
        within = {f"{name}_within": abs(errors[f"{name}_error"]) <= GOAL for name in predicted}
        role = "fitted" if bf16.fitted else "predicted"
        rows.append({"case": row.case.name, "role": role, "measured": row.speedup, **predicted, **errors, **within})
    return pd.DataFrame(rows)


# Intervals


@functools.lru_cache(maxsize=8)
def _resampled(result: Fit, resamples: int) -> tuple[Constants, ...]:
    """Constants of a parametric bootstrap."""
    random = np.random.default_rng(SEED)
    spread = spread_by_kind(result)
    fitted = [one for one in result.observations if one.fitted]
    models = [one.predict(result.constants) for one in fitted]
    constants = []
    for _ in range(resamples):
        drawn = [
            replace(one, value=model * math.exp(random.normal(0, spread[one.kind])))
            for one, model in zip(fitted, models, strict=True)
        ]
        constants.append(fit(drawn, result.constants, result.free, tolerance=1e-4).constants)
    return tuple(constants)


def spread_by_kind(result: Fit) -> dict[str, float]:
    """Relative error of each kind of observation: that of the model on all of them, at least the one assumed."""
    errors: dict[str, list[float]] = {kind: [] for kind in SPREAD}
    for one in result.observations:
        errors[one.kind].append(math.log(one.predict(result.constants) / one.value))
    return {
        kind: max(SPREAD[kind], math.sqrt(float(np.mean(np.square(of_kind)))) if of_kind else 0.0)
        for kind, of_kind in errors.items()
    }


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its 90 % interval; None where there is no such number."""

    value: float | None
    low: float | None
    high: float | None


def estimate(fitted: Fit, quantity: Callable[[Constants], float | None], *, resamples: int = RESAMPLES) -> Estimate:
    """A quantity that follows from constants, with its interval.

    Args:
        fitted: the fit.
        quantity: of constants; None, such as a break-even that is never reached, counts as infinite.
        resamples: of the bootstrap.

    Example:
        >>> rate = estimate(fit_b200(), lambda constants: constants.low_tflops, resamples=20)
        >>> rate.low <= rate.value <= rate.high
        True
    """
    values = [quantity(constants) for constants in _resampled(fitted, resamples)]
    numbers = np.array([math.inf if value is None else value for value in values])
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(numbers, q, method="nearest")) for q in (tail, 1 - tail))
    return Estimate(
        value=quantity(fitted.constants),
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
    )


def break_even(
    case: Case,
    fitted: Fit,
    *,
    precision: Precision | None = None,
    in_step: bool = False,
    resamples: int = RESAMPLES,
) -> Estimate:
    """The rows from which on the 8-bit format saves time at a case's N, K and groups, with its interval."""
    return estimate(
        fitted,
        lambda constants: break_even_m(case.n, case.k, case.groups, constants, precision=precision, in_step=in_step),
        resamples=resamples,
    )


def rows_text(rows: Estimate) -> str:
    """Rows with their interval in thousands: ``16.6k [14.3k, 19.0k]``."""
    value, low, high = ("never" if m is None else f"{m / 1e3:.1f}k" for m in (rows.value, rows.low, rows.high))
    return f"{value} [{low}, {high}]"


# Layouts


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The grouped product of one rank's experts under a layout.

    Attributes:
        name: for figures.
        case: w1 (and w3) of the experts; w2 is its transpose and takes as long in the model.
        layout: in words.
    """

    name: str
    case: Case
    layout: str


def expert_work(name: str, model: str, tokens: int, *, tp: int = 1, ep: int = 1) -> ExpertWork:
    """The experts' product of one micro-batch on one rank, with balanced routing.

    Args:
        name: for figures.
        model: ``nano``, ``debug``, ``16B`` or ``671B``.
        tokens: of the micro-batch on the rank's data-parallel coordinate.
        tp: tensor-parallel degree.
        ep: expert-parallel degree.

    Raises:
        BadInput: for a degree that does not divide the experts, or fewer tokens than ranks.

    Example:
        >>> expert_work("671B", "671B", 8192, tp=2, ep=32).case.name
        '32768×2048×7168, 8 even groups'
    """
    shape = shape_of(model)
    if tokens < 1 or tp < 1 or ep < 1 or shape.num_experts % ep:
        raise BadInput(f"tokens {tokens}, tp {tp}, ep {ep}: give positive numbers, ep a divisor of {shape.num_experts}")
    of_experts = [one for one in gemms(shape, tokens, tp=tp, ep=ep) if one.part == "routed experts"]
    first = next(one for one in of_experts if one.direction == "forward" and one.k == shape.dim)
    case = Case(m=first.m, n=first.n, k=first.k, groups=first.groups)
    return ExpertWork(name=name, case=case, layout=f"{tokens} tokens × top-{shape.top_k} / TP {tp}, EP {ep}")


def published_work() -> tuple[ExpertWork, ExpertWork]:
    """The two published runs: 671B with a pipeline, so one sequence at a time; 16B with its whole local batch."""
    return _of_setup("671B, published", THROUGHPUT_SETUP), _of_setup("16B, published", CONVERGENCE_SETUP)


def _of_setup(name: str, setup: Setup) -> ExpertWork:
    sequences = 1 if setup.pp > 1 else setup.local_batch
    return expert_work(name, setup.model, sequences * setup.seq_len // setup.cp, tp=setup.tp, ep=setup.ep)


def gain_table(works: Sequence[ExpertWork], fitted: Fit, *, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Gain and break-even of layouts, for MXFP8 and for MXFP8 with wgrad in BF16.

    Args:
        works: layouts.
        fitted: constants and their spread.
        resamples: of the bootstrap.

    Returns:
        A row for each layout, precision and kind of time (``alone``: kernels by themselves, ``in a step``: as torchao's
        benchmark times them): rows ``m``, ``gain`` and ``break_even_m``, each with its interval in words, and
        ``verdict``.
    """
    rows = []
    precisions: tuple[Precision, ...] = ("mxfp8", "mxfp8_wgrad_bf16")
    for work, precision, in_step in itertools.product(works, precisions, (False, True)):
        case = work.case
        gain_of = functools.partial(gain, case.m, case.n, case.k, case.groups, precision=precision, in_step=in_step)
        gained = estimate(fitted, gain_of, resamples=resamples)
        even = break_even(case, fitted, precision=precision, in_step=in_step, resamples=resamples)
        rows.append(
            {
                "layout": work.name,
                "precision": precision,
                "kernels": "in a step" if in_step else "alone",
                "m": case.m,
                "groups": case.groups,
                "gain": f"{gained.value:.2f} [{gained.low:.2f}, {gained.high:.2f}]",
                "break_even_m": rows_text(even),
                "verdict": _verdict(gained),
            }
        )
    return pd.DataFrame(rows)


def _verdict(gained: Estimate) -> str:
    assert gained.low is not None
    assert gained.high is not None
    if gained.low > 1:
        return "saves time"
    return "loses time" if gained.high < 1 else "too near to call"
