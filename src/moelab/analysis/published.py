"""The published experiment that this project reproduces, as data.

PyTorch and Nebius pre-trained DeepSeek-V3 on 256 B200 GPUs with TorchTitan and reported three of the four arms of
{BF16, MXFP8} × {standard all-to-all, DeepEP}; MXFP8 with the standard all-to-all was not published, so whether the two
gains compose was never tested. Figures carry ``quoted`` where the source prints them and ``derived`` where they were
computed from printed ones.

References:
    PyTorch and Nebius, DeepSeek-V3 pre-training with MXFP8 and DeepEP on B200, March 2026; Nebius ``ml-cookbook``,
    folder ``pytorch-dsv3-mxfp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Label = Literal["measured", "derived", "quoted"]
"""How the project knows a figure: measured here, derived by a formula, or quoted from a source."""

SOURCE = "PyTorch and Nebius, March 2026; Nebius ml-cookbook, pytorch-dsv3-mxfp8"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, cluster and parallel layout of a published run; ``fsdp`` None is TorchTitan's automatic degree."""

    model: str
    seq_len: int
    local_batch: int
    tp: int
    pp: int
    dp_replicate: int
    fsdp: int | None
    cp: int
    ep: int
    etp: int
    steps: int
    hardware: str = "256 × B200: 32 nodes of 8, NVLink inside, InfiniBand between"
    software: str = "TorchTitan, TorchAO, DeepEP; torch.compile of model and loss; full activation checkpointing; C4"
    lr: float = 1e-4
    warmup_steps: int = 2000
    source: str = SOURCE
    label: Label = "quoted"


@dataclass(frozen=True, kw_only=True)
class PublishedThroughput:
    """Throughput of one published arm in tokens per second per GPU."""

    arm: str
    tps: float
    source: str = SOURCE
    label: Label = "quoted"


@dataclass(frozen=True, kw_only=True)
class PublishedGain:
    """How much faster one published arm is than another, in percent."""

    baseline: str
    arm: str
    percent: float
    source: str = SOURCE
    label: Label = "quoted"


THROUGHPUT_SETUP = Setup(
    model="671B", seq_len=8192, local_batch=64, tp=2, pp=2, dp_replicate=1, fsdp=64, cp=1, ep=32, etp=1, steps=20
)
"""Printed for the BF16 + standard run; the source lists no other layout for the DeepEP runs."""

CONVERGENCE_SETUP = Setup(
    model="16B", seq_len=8192, local_batch=16, tp=1, pp=1, dp_replicate=1, fsdp=None, cp=1, ep=32, etp=1, steps=1500
)
"""BF16 against MXFP8 experts (MXFP8 all-to-all, weight gradient in BF16), standard all-to-all: called equivalent, with
one curve each, so without a spread over seeds. Its 1,500 steps end inside the 2,000-step warm-up."""

THROUGHPUT = (
    PublishedThroughput(arm="bf16_standard", tps=651.0),
    PublishedThroughput(arm="bf16_deepep", tps=859.0),
    PublishedThroughput(arm="mxfp8_deepep", tps=918.0),
)

GAINS = (
    PublishedGain(baseline="bf16_standard", arm="bf16_deepep", percent=32.0),
    PublishedGain(baseline="bf16_standard", arm="mxfp8_deepep", percent=41.0),
    PublishedGain(baseline="bf16_deepep", arm="mxfp8_deepep", percent=6.9, source="918 / 859 − 1", label="derived"),
)


def published_tps(arm: str) -> PublishedThroughput | None:
    """Published throughput of an arm.

    Args:
        arm: Name of an arm.

    Returns:
        The figure, or None for an arm that was not published.

    Example:
        >>> published_tps("mxfp8_deepep").tps
        918.0
    """
    return next((row for row in THROUGHPUT if row.arm == arm), None)
