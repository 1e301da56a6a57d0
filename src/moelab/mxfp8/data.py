"""Synthetic tensors that are hard for a number format in one way each.

Gaussian values are the easy case. Heavy tails put a few large values anywhere. Outlier channels put them into the same
few columns of every row, as trained transformers do: LLM.int8() (Dettmers et al., 2022) found features some 20 times
the rest, *Massive Activations* (Sun et al., 2024) single ones at 10,000 times the median.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from moelab.errors import BadInput

Distribution = Literal["gaussian", "student_t"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)
DEGREES_OF_FREEDOM = 3.0
"""Of Student's t: its variance is finite, its fourth moment is not."""


def synthetic(
    distribution: Distribution, shape: tuple[int, ...], *, seed: int = 0, outlier: float = 1.0, every: int = 64
) -> torch.Tensor:
    """Draw a tensor.

    Args:
        distribution: ``gaussian``, or ``student_t`` with 3 degrees of freedom.
        shape: rows first, channels last.
        seed: of the values; the same seed gives the same tensor.
        outlier: factor on outlier channels; 1 for none.
        every: one channel of this many is an outlier.

    Returns:
        float32.

    Raises:
        BadInput: for another distribution, or a factor or spacing that is not positive.
    """
    if distribution not in DISTRIBUTIONS:
        raise BadInput(f"distribution is {distribution!r}; valid: {', '.join(DISTRIBUTIONS)}")
    if not outlier > 0 or every < 1:
        raise BadInput(f"outlier is {outlier} in one of {every} channels; valid: a positive factor, and at least 1")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    if distribution == "student_t":
        half_degrees = torch.full(shape, DEGREES_OF_FREEDOM / 2)
        chi_squared = 2 * torch._standard_gamma(half_degrees, generator=generator)
        drawn *= torch.rsqrt(chi_squared / DEGREES_OF_FREEDOM)
    drawn[..., every // 2 :: every] *= outlier
    return drawn
