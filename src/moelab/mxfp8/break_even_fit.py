"""Fit of the break-even model, its residuals, and intervals of what follows from it.

Constants are positive, so their logarithms are fitted, by least squares of relative errors with a soft loss: one odd
row does not bend the rest. Intervals are those of a parametric bootstrap: the fit is repeated on its own predictions
with errors drawn anew, as large as those that the model makes on all observations of a kind, those that it was not
fitted on included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from moelab.errors import BadInput
from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import Constants
from moelab.mxfp8.break_even_data import SPREAD, Observation, b200_observations, b200_rows, measured_observations
from moelab.mxfp8.grouped_gemm_results import GroupedGemmResult

CASTS = ("row_cast_tb_s", "column_cast_tb_s", "weight_cast_tb_s")
RATES = ("low_tflops", "low_wgrad_tflops")
GOAL = 0.10
"""A prediction within this of the measured speed-up reaches the goal."""
RESAMPLES, CONFIDENCE, SEED = 100, 0.9, 20261101
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

    @property
    def fitted(self) -> list[Observation]:
        """The observations that the constants follow from."""
        return [one for one in self.observations if one.fitted]

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
    used = [one for one in observations if one.fitted]
    if len(used) < len(free):
        raise BadInput(
            f"{len(used)} observations cannot determine {len(free)} constants; fit fewer of them or add rows"
        )

    def weighted_errors(logs: np.ndarray) -> np.ndarray:
        constants = _with(start, free, logs)
        return np.array([math.log(one.predict(constants) / one.value) / SPREAD[one.kind] for one in used])

    first = np.log([getattr(start, group[0]) for group in free])
    stop = {"ftol": tolerance, "xtol": tolerance}
    found = least_squares(weighted_errors, first, loss="soft_l1", bounds=(first - 7, first + 7), **stop)
    return Fit(constants=_with(start, free, found.x), free=free, observations=tuple(observations))


def _with(start: Constants, free: tuple[tuple[str, ...], ...], logs: np.ndarray) -> Constants:
    values = {name: float(math.exp(log)) for group, log in zip(free, logs, strict=True) for name in group}
    return replace(start, **values)  # type: ignore[arg-type]  # only numbers are free


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


@functools.cache
def fit_b200(*, rows_fitted: tuple[int, ...] = (8,)) -> Fit:
    """The model of MXFP8 on a B200, from torchao's figures: eight constants, of which one is all casts' bandwidth.

    Args:
        rows_fitted: group counts whose rows are fitted; the others are predicted.
    """
    return fit(b200_observations(rows_fitted=rows_fitted), START, B200_FREE)


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
    rows = []
    for row in b200.ROWS:
        steps = [replace(one, fitted=one.case != row.case) for one in b200_rows(())]
        left_out = fit([*others, *steps], split, B200_FREE).constants
        predicted = {
            name: _step_speedup(row, constants) for name, constants in (("split", split), ("left_out", left_out))
        }
        errors = {f"{name}_error": value / row.speedup - 1 for name, value in predicted.items()}
        within = {f"{name}_within": abs(errors[f"{name}_error"]) <= GOAL for name in predicted}
        role = "fitted" if row.case.groups == b200.KERNELS_CASE.groups else "predicted"
        rows.append({"case": row.case.name, "role": role, "measured": row.speedup, **predicted, **errors, **within})
    return pd.DataFrame(rows)


def _step_speedup(row: b200.Row, constants: Constants) -> float:
    bf16, mxfp8 = (one.predict(constants) for one in b200_rows(()) if one.case == row.case)
    return bf16 / mxfp8


@functools.lru_cache(maxsize=8)
def resampled(fitted: Fit, *, resamples: int = RESAMPLES, seed: int = SEED) -> tuple[Constants, ...]:
    """Constants of a parametric bootstrap.

    Args:
        fitted: the fit.
        resamples: how many.
        seed: of the draws.
    """
    random = np.random.default_rng(seed)
    models = [one.predict(fitted.constants) for one in fitted.fitted]
    spread = spread_by_kind(fitted)
    found = []
    for _ in range(resamples):
        again = [
            replace(one, value=model * math.exp(random.normal(0, spread[one.kind])))
            for one, model in zip(fitted.fitted, models, strict=True)
        ]
        found.append(fit(again, fitted.constants, fitted.free, tolerance=1e-4).constants)
    return tuple(found)


def spread_by_kind(fitted: Fit) -> dict[str, float]:
    """Relative error of each kind of observation: that of the model on all of them, at least the one assumed."""
    errors: dict[str, list[float]] = {kind: [] for kind in SPREAD}
    for one in fitted.observations:
        errors[one.kind].append(math.log(one.predict(fitted.constants) / one.value))
    squared = {kind: float(np.mean(np.square(found))) if found else 0.0 for kind, found in errors.items()}
    return {kind: max(SPREAD[kind], math.sqrt(squared[kind])) for kind in SPREAD}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its interval; None where there is no such number."""

    value: float | None
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE


def estimate(
    fitted: Fit,
    quantity: Callable[[Constants], float | None],
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """A quantity that follows from constants, with its interval.

    Args:
        fitted: the fit.
        quantity: of constants; None, such as a break-even that is never reached, counts as infinite.
        resamples: of the bootstrap.
        confidence: of the interval.

    Example:
        >>> found = estimate(fit_b200(), lambda constants: constants.low_tflops, resamples=20)
        >>> found.low <= found.value <= found.high
        True
    """
    values = [quantity(constants) for constants in resampled(fitted, resamples=resamples)]
    finite = np.array([math.inf if value is None else value for value in values])
    tail = (1 - confidence) / 2
    low, high = (float(np.quantile(finite, q, method="nearest")) for q in (tail, 1 - tail))
    return Estimate(value=quantity(fitted.constants), low=_or_none(low), high=_or_none(high), confidence=confidence)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
