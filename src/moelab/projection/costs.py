"""Where the time of a step goes: the names of the parts, and a table of passes by parts."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

CATEGORIES = (
    "attention",
    "expert GEMMs",
    "other GEMMs",
    "quantisation",
    "permutation and padding",
    "all-to-all",
    "memory-bound",
    "tensor-parallel collectives",
    "context-parallel collectives",
    "FSDP collectives",
    "optimizer",
    "host and waiting",
    "pipeline bubble",
    "imbalance and stragglers",
)
"""Parts of a step, in the order in which a figure stacks them."""
INDEX = {name: place for place, name in enumerate(CATEGORIES)}
PassName = Literal["forward", "recompute", "dgrad", "wgrad"]
PASSES: tuple[PassName, ...] = ("forward", "recompute", "dgrad", "wgrad")
PASS_INDEX = {name: place for place, name in enumerate(PASSES)}
Times = npt.NDArray[np.float64]
"""Seconds, ``(passes, categories)``."""


def nothing() -> Times:
    """A table of zeros."""
    return np.zeros((len(PASSES), len(CATEGORIES)))


def add(times: Times, pass_name: PassName, category: str, seconds: float) -> None:
    """Add to one cell."""
    times[PASS_INDEX[pass_name], INDEX[category]] += seconds
