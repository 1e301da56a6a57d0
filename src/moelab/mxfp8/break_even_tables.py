"""What follows from the break-even model for real layouts: rows at the experts, gains, and when MXFP8 will lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from moelab.analysis.published import CONVERGENCE_SETUP, THROUGHPUT_SETUP, Setup
from moelab.errors import BadInput
from moelab.model import gemms, shape_of
from moelab.mxfp8.break_even import break_even_m, gain
from moelab.mxfp8.break_even_fit import RESAMPLES, Estimate, Fit, estimate
from moelab.mxfp8.grouped_gemm_cases import Case, Precision


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
    found = [one for one in gemms(shape, tokens, tp=tp, ep=ep) if one.part == "routed experts"]
    first = next(one for one in found if one.direction == "forward" and one.k == shape.dim)
    case = Case(m=first.m, n=first.n, k=first.k, groups=first.groups)
    return ExpertWork(name=name, case=case, layout=f"{tokens} tokens × top-{shape.top_k} / TP {tp}, EP {ep}")


def published_work() -> tuple[ExpertWork, ExpertWork]:
    """The two published runs: 671B with a pipeline, so one sequence at a time; 16B with its whole local batch."""
    return _of_setup("671B, published", THROUGHPUT_SETUP), _of_setup("16B, published", CONVERGENCE_SETUP)


def _of_setup(name: str, setup: Setup) -> ExpertWork:
    sequences = 1 if setup.pp > 1 else setup.local_batch
    return expert_work(name, setup.model, sequences * setup.seq_len // setup.cp, tp=setup.tp, ep=setup.ep)


def gain_table(
    works: Sequence[ExpertWork],
    fitted: Fit,
    *,
    precisions: Sequence[Precision] = ("mxfp8", "mxfp8_wgrad_bf16"),
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """Gain and break-even of layouts.

    Args:
        works: layouts.
        fitted: constants and their spread.
        precisions: 8-bit formats to hold against BF16.
        resamples: of the bootstrap.

    Returns:
        A row for each layout, precision and kind of time (``alone``: kernels by themselves, ``in a step``: as torchao's
        benchmark times them): rows ``m``, ``gain`` and ``break_even_m``, each with its interval in words, and
        ``verdict``.
    """
    rows = []
    for work in works:
        case = work.case
        for precision in precisions:
            for in_step in (False, True):
                gained = estimate(
                    fitted,
                    lambda c, case=case, precision=precision, in_step=in_step: gain(  # type: ignore[misc]
                        case.m, case.n, case.k, case.groups, c, precision=precision, in_step=in_step
                    ),
                    resamples=resamples,
                )
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
        lambda c: break_even_m(case.n, case.k, case.groups, c, precision=precision, in_step=in_step),
        resamples=resamples,
    )


def rows_text(found: Estimate) -> str:
    """Rows with their interval in thousands: ``16.6k [14.3k, 19.0k]``."""
    low, high = (_thousands(value) for value in (found.low, found.high))
    return f"{_thousands(found.value)} [{low}, {high}]"


def _thousands(rows: float | None) -> str:
    return "never" if rows is None else f"{rows / 1e3:.1f}k"


def _verdict(gained: Estimate) -> str:
    assert gained.low is not None
    assert gained.high is not None
    if gained.low > 1:
        return "saves time"
    return "loses time" if gained.high < 1 else "too near to call"
