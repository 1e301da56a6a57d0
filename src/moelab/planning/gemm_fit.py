"""What the constants of grouped products say of real layouts, with intervals.

``python -m benchmarks.validation --write`` fits the constants to torchao's figures of a B200 and to this project's of
an H100 and keeps them, with draws of a parametric bootstrap around them, in ``data/gemm_fit.json``. The constants
themselves are those of ``calibration.yaml``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moelab.data import read_json
from moelab.errors import BadInput
from moelab.hardware import GPUS, Gpu
from moelab.judge.throughput import CONVERGENCE_SETUP, THROUGHPUT_SETUP
from moelab.micro.grouped_gemm import Case, GroupedPrecision
from moelab.model import gemms
from moelab.model.hugging_face import read_model
from moelab.model.shape import SHAPES
from moelab.planning.time.calibration import Calibration, with_values
from moelab.planning.time.gemm import Rates, break_even_m, gain, rates_of
from moelab.planning.trust import CONFIDENCE, Estimate

FILE = "gemm_fit.json"
GOAL = 0.10
"""A prediction within this of the measured speed-up reaches the goal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Constants and how well they meet what they were fitted on."""

    gpu: Gpu
    calibration: Calibration  # with the constants as fitted
    free: tuple[str, ...]  # names of the constants that were free
    residuals: pd.DataFrame  # all observations: kind, name, role, value, the model's and its relative error
    draws: tuple[Calibration, ...]  # calibrations of a parametric bootstrap

    def rates(self, *, in_step: bool = False) -> Rates:
        """Of kernels alone, or as they run in a step."""
        return rates_of(self.gpu, self.calibration, alone=not in_step)


def fit_b200() -> Fit:
    """MXFP8 on a B200, from torchao's figures."""
    return _fit("B200")


def fit_h100() -> Fit:
    """Row-wise FP8 on an H100, from the packaged micro-experiment."""
    return _fit("H100")


@functools.cache
def _fit(gpu: str) -> Fit:
    stored = read_json(FILE)["fits"][gpu]
    free = tuple(stored["free"])
    # what is stored is the free constants alone, the fitted ones first
    first, *draws = (with_values(**dict(zip(free, one, strict=True))) for one in (stored["values"], *stored["draws"]))
    residuals = pd.DataFrame(stored["residuals"])
    return Fit(gpu=GPUS[gpu], calibration=first, free=free, residuals=residuals, draws=tuple(draws))


def leave_one_out() -> pd.DataFrame:
    """Torchao's eight rows, each predicted by a fit on all other figures.

    Returns:
        A row for each: ``case``, ``measured``, the ``split`` prediction of :func:`fit_b200` with its role, the
        ``left_out`` prediction, their errors, and whether each is within the goal.
    """
    return pd.DataFrame(read_json(FILE)["left_out"])


def estimate(fitted: Fit, quantity: Callable[[Rates], float], *, in_step: bool = False) -> Estimate:
    """A quantity that follows from a GPU's rates, with its interval; infinite where there is no such number."""
    values = [quantity(rates_of(fitted.gpu, one, alone=not in_step)) for one in fitted.draws]
    tail = (1 - CONFIDENCE) / 2
    # the nearest draw, not between two: between a number and "never" there is none
    low, high = (float(np.quantile(values, q, method="nearest")) for q in (tail, 1 - tail))
    return Estimate(value=quantity(fitted.rates(in_step=in_step)), low=low, high=high)


def break_even(
    case: Case, fitted: Fit, *, precision: GroupedPrecision | None = None, in_step: bool = False
) -> Estimate:
    """The rows from which on the 8-bit format saves time at a case's N, K and groups, with its interval."""

    def rows(rates: Rates) -> float:
        even = break_even_m(case.n, case.k, case.groups, rates, precision)
        return math.inf if even is None else even

    return estimate(fitted, rows, in_step=in_step)


def rows_text(rows: Estimate) -> str:
    """Rows with their interval, to two digits: ``17k [14k, 19k]``."""

    def in_words(m: float) -> str:
        if math.isinf(m):
            return "never"
        m = float(f"{m:.2g}")
        return f"{m / 1e6:g}M" if m >= 1e6 else f"{m / 1e3:g}k"

    return f"{in_words(rows.value)} [{in_words(rows.low)}, {in_words(rows.high)}]"


# Layouts


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The grouped product of one rank's experts under a layout."""

    name: str  # for figures
    case: Case  # w1 (and w3) of the experts; w2 is its transpose and takes as long in the model
    layout: str  # in words


def expert_work(name: str, model: str, tokens: int, *, tp: int = 1, ep: int = 1) -> ExpertWork:
    """The experts' product of one micro-batch on one rank, with balanced routing.

    ``model`` is one of an experiment's, or one of :func:`moelab.model.hugging_face.read_model`; ``tokens`` are those of
    the micro-batch on the rank's data-parallel coordinate, before tensor parallelism shares them out.

    Raises:
        BadInput: for an unknown model, a degree that does not divide the experts, or fewer tokens than ranks.

    >>> expert_work("671B", "671B", 8192, tp=2, ep=32).case.name
    '32768×2048×7168, 8 even groups'
    """
    shape = SHAPES[model] if model in SHAPES else read_model(model).dimensions
    if tokens < 1 or tp < 1 or ep < 1 or shape.num_experts % ep:
        raise BadInput(f"tokens {tokens}, tp {tp}, ep {ep}: give positive numbers, ep a divisor of {shape.num_experts}")
    # gate and up are of one size, down is their transpose: the first of them stands for all
    of_experts = [one for one in gemms(shape, tokens, tp=tp, ep=ep) if one.part == "routed experts"]
    first = next(one for one in of_experts if one.direction == "forward" and one.k == shape.dim)
    case = Case(m=first.m, n=first.n, k=first.k, groups=first.groups)
    return ExpertWork(name=name, case=case, layout=f"{tokens} tokens × top-{shape.top_k} / TP {tp}, EP {ep}")


def published_work() -> tuple[ExpertWork, ExpertWork]:
    """The two published runs: 671B with a pipeline, so one sequence at a time; 16B with its whole local batch."""
    large, small = THROUGHPUT_SETUP, CONVERGENCE_SETUP
    return (
        expert_work("671B, published", large.model, large.seq_len, tp=large.tp, ep=large.ep),
        expert_work("16B, published", small.model, small.local_batch * small.seq_len, tp=small.tp, ep=small.ep),
    )


def gain_table(works: Sequence[ExpertWork], fitted: Fit) -> pd.DataFrame:
    """Gain and break-even of layouts, for MXFP8 and for MXFP8 with wgrad in BF16.

    Returns:
        A row for each layout, precision and kind of time (``alone``: kernels by themselves, ``in a step``: as the
        projection of a step has them): rows ``m``, ``gain`` and ``break_even_m``, each with its interval in words, and
        ``verdict``.
    """
    rows = []
    precisions: tuple[GroupedPrecision, ...] = ("mxfp8", "mxfp8_wgrad_bf16")
    for work, precision, in_step in itertools.product(works, precisions, (False, True)):
        case = work.case
        gain_of = functools.partial(gain, *case.mnkg, precision=precision)
        gained = estimate(fitted, gain_of, in_step=in_step)
        even = break_even(case, fitted, precision=precision, in_step=in_step)
        saves, loses = gained.low > 1, gained.high < 1
        rows.append(
            {
                "layout": work.name,
                "precision": precision,
                "kernels": "in a step" if in_step else "alone",
                "m": case.m,
                "groups": case.groups,
                "gain": f"{gained.value:.2f} [{gained.low:.2f}, {gained.high:.2f}]",
                "break_even_m": rows_text(even),
                "verdict": "saves time" if saves else "loses time" if loses else "too near to call",
            }
        )
    return pd.DataFrame(rows)
