"""The two-by-two on thin models: every arm's throughput over stock TorchTitan's, as ``benchmarks/`` worked it out.

Stock is BF16 with the standard all-to-all, compiled, in the faster of TorchTitan's own settings (:data:`STOCK`). A
ratio is over stock under the *same* activation checkpointing: full checkpointing pays each exchange of the forward pass
twice, so a faster exchange gains most there. ``benchmarks/validation/two_by_two.py`` says how passes and campaigns are
combined, and writes ``data/two_by_two.json``, which is read here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moelab.data import read_json
from moelab.judge.arms import arm_label

BASELINE = "bf16_standard"
STOCK = (BASELINE, f"{BASELINE}_flex_tiles")
"""Arms of TorchTitan's settings alone."""
CODE = "8-bit experts in one pass"
"""Of moelab in rows that are measured now. Rows without any are older: ``fp8_standard`` and ``fp8_deepep`` trained
their experts in BF16 there, and ``fp8_deepep_dispatch-fp8`` its w2, because TorchTitan 0.3.0 drops torchao's wrapper
of a weight where experts are spread over ranks (``spmd_types.shard``)."""
FUSED = "fused FP8 experts"
"""What a reader sees for :data:`CODE`: an expert's three products are one FP8 function."""
STOCK_CHECKPOINTING = {"full+dispatch": "full"}
"""TorchTitan's checkpointing that an arm's own kind is held against."""
SHAPE_WORDS = {
    "671B, 10 MoE layers": "671B: 10 MoE layers, 16 experts",
    "671B MoE-heavy": "671B: 5 MoE layers, 16 experts",
    "671B": "671B: 1 dense + 2 MoE layers, 32 experts",
    "16B": "16B: 1 dense + 4 MoE layers, 64 experts",
}
"""The thin models of ``benchmarks/validation/shapes.py``."""


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm at one shape under one activation checkpointing and one routing; tokens/s per GPU.

    Rates, passes, steps and retries are of its campaign of most passes, the first of several; ratios the mean over
    campaigns, each over stock in the same one.
    """

    shape: str
    activation_checkpoint: str
    routing: str
    arm: str
    tps: float  # median over all timed steps
    low: float  # lower quartile
    high: float
    passes: tuple[float, ...]  # median of each, in order
    steps: int  # that were timed
    ratio: float | None  # over stock under the same checkpointing; None where that was not measured
    best_ratio: float | None  # over its fastest checkpointing; None where it ran under one alone that recomputes
    stock: str | None = None  # the arm of STOCK that the ratio is over, in the first campaign that has both
    code: str | None = None  # of moelab, as the rows name it; None of the oldest
    retries: int = 0  # of the allocator in the timed steps; above zero it was short of memory
    stock_short: bool = False  # of memory, where the ratio is over it in any campaign

    @property
    def label(self) -> str:
        """The arm in words."""
        return two_by_two_label(self.arm)

    @property
    def ratio_ends(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of its steps over stock; for a result that has a ratio."""
        assert self.ratio is not None
        stock_tps = self.tps / self.ratio
        return self.low / stock_tps, self.tps / stock_tps, self.high / stock_tps

    @property
    def setting(self) -> str:
        """The shape and the checkpointing that the arm and stock share, in words."""
        return f"{self.shape}, {checkpointing_words(self.activation_checkpoint)}"


def checkpointing_words(activation_checkpoint: str) -> str:
    """TorchTitan's checkpointing that an arm is held against, in words.

    >>> checkpointing_words("full+dispatch"), checkpointing_words("none")
    ('full checkpointing', 'no checkpointing')
    """
    kind = STOCK_CHECKPOINTING.get(activation_checkpoint, activation_checkpoint)
    return f"{'no' if kind == 'none' else kind} checkpointing"


def shape_words(shape: str) -> str:
    """The layers and experts of a thin model that has a name in :data:`SHAPE_WORDS`."""
    return SHAPE_WORDS.get(shape, f"{shape} layers")


def two_by_two_label(arm: str) -> str:
    """An arm in words; emulated kernels are named.

    Example:
        >>> two_by_two_label("mxfp8-emulated_deepep")
        'MXFP8 emulated + DeepEP'
        >>> two_by_two_label("fp8_deepep_wgrad-fp8_flex_tiles")
        'FP8 + DeepEP (wgrad FP8, flex tiles)'
    """
    arm = arm.replace("flex_", "flex ")  # else "tiles" would be a change of its own
    emulated = arm.removeprefix("mxfp8-emulated_")
    if emulated == arm:
        return arm_label(arm)
    return arm_label(f"mxfp8_{emulated}").replace("MXFP8", "MXFP8 emulated", 1)


@functools.cache
def _finished() -> dict[str, Any]:
    return read_json("two_by_two.json")


def measured_arms() -> list[ArmResult]:
    """Every arm that was measured, at each shape, checkpointing and routing."""
    return [ArmResult(**{**one, "passes": tuple(one["passes"])}) for one in _finished()["results"]]


def current_results(results: Iterable[ArmResult]) -> list[ArmResult]:
    """Of results those whose experts multiplied in the format that the arm is named after, on real kernels."""
    return [one for one in results if one.code == CODE or (one.code is None and one.arm.startswith("bf16"))]
