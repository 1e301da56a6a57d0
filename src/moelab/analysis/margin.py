"""The equivalence margin: how large a loss difference still counts as none.

By default it is two standard deviations of the reference's own final loss over seeds: the band in which the reference
itself lands when nothing but the seed changes. :mod:`moelab.analysis.equivalence` says why a lower confidence limit
of that standard deviation stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moelab.analysis.arms import arm_label
from moelab.analysis.equivalence import lower_sd_limit
from moelab.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Equivalence margin in nats, how it was derived, and the spread of the reference.

    ``nats`` is NaN where the reference has no spread to derive it from. ``reference_sd`` is the sample standard
    deviation over seeds, NaN for fewer than two. ``alpha`` is the rate allowed for a false "equivalent" at the margin.
    """

    nats: float
    source: str
    reference_sd: float
    given: bool
    factor: float
    alpha: float

    @property
    def exists(self) -> bool:
        """Whether there is a margin to test against."""
        return math.isfinite(self.nats)

    @property
    def tost_alpha(self) -> float:
        """Level of the TOST: half of ``alpha`` goes to the estimate of the spread where the margin is derived."""
        return self.alpha if self.given else self.alpha / 2.0


def equivalence_margin(
    reference_losses: Mapping[int, float],
    *,
    reference: str,
    margin_nats: float | None = None,
    margin_factor: float = 2.0,
    alpha: float = 0.05,
) -> Margin:
    """Take the margin as given, or derive it from the reference's seed-to-seed spread.

    ``margin = margin_factor · s · sqrt((n − 1) / χ²(1 − alpha/2, n − 1))``

    Args:
        reference_losses: Finite loss of the reference by seed, nats per token.
        reference: Name of the reference arm.
        margin_nats: The margin where a person gives it.
        margin_factor: Margin in units of the standard deviation, used where ``margin_nats`` is None.
        alpha: Rate allowed for a false "equivalent" at the margin.

    Returns:
        The margin with its origin.

    Raises:
        BadInput: ``margin_nats``, ``margin_factor`` or ``alpha`` is out of range.

    Example:
        >>> equivalence_margin({0: 3.58, 1: 3.60, 2: 3.62}, reference="bf16_standard").nats.__round__(4)
        0.0208
    """
    _check(margin_nats=margin_nats, margin_factor=margin_factor, alpha=alpha)
    values = list(reference_losses.values())
    sd = _spread(values)
    n = f"n = {len(values)} seed{'' if len(values) == 1 else 's'}"
    if margin_nats is not None:
        nats, source = margin_nats, "given"
    elif not sd > 0.0:
        nats = float("nan")
        source = f"none: {arm_label(reference)} has no seed-to-seed spread to derive it from ({n})"
    else:
        limit = float(lower_sd_limit(values, alpha=alpha / 2.0)[0])
        nats = margin_factor * limit
        source = (
            f"{margin_factor:g} × {limit:.4f}, the lower {100 * (1 - alpha / 2):g} % confidence limit of the "
            f"seed-to-seed standard deviation of {arm_label(reference)} (estimate {sd:.4f}, {n})"
        )
    return Margin(
        nats=nats, source=source, reference_sd=sd, given=margin_nats is not None, factor=margin_factor, alpha=alpha
    )


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return float("nan")
    # The standard deviation of identical losses is a rounding error above 0, which is no spread.
    return float(np.std(values, ddof=1)) if np.ptp(values) > 0 else 0.0


def _check(*, margin_nats: float | None, margin_factor: float, alpha: float) -> None:
    if margin_nats is not None and not (math.isfinite(margin_nats) and margin_nats > 0):
        raise BadInput(f"margin_nats is {margin_nats}: give nats above 0, or None to derive it from the reference")
    if not (math.isfinite(margin_factor) and margin_factor > 0):
        raise BadInput(f"margin_factor is {margin_factor}: give standard deviations above 0, 2.0 for two")
    if not 0.0 < alpha < 0.5:
        raise BadInput(f"alpha is {alpha}: give an error rate between 0 and 0.5, 0.05 for 5 %")
