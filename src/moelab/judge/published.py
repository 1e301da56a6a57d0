"""The published experiment that this project reproduces; ``data/published.yaml`` has its figures and their sources.

What its scripts do differently from what is done here is in :mod:`moelab.planning.plan`.

References:
    PyTorch and Nebius, DeepSeek-V3 pre-training with MXFP8 and DeepEP on B200, March 2026; Nebius ``ml-cookbook``,
    folder ``pytorch-dsv3-mxfp8``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moelab.data import read_yaml

Label = Literal["measured", "derived", "quoted"]
"""How the project knows a figure: measured here, derived by a formula, or quoted from a source."""


class _Known(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    label: Label


class Setup(_Known):
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
    hardware: str
    software: str
    lr: float
    warmup_steps: int


class PublishedThroughput(_Known):
    """Throughput of one published arm in tokens per second per GPU."""

    arm: str
    tps: float


class PublishedGain(_Known):
    """How much faster one published arm is than another, in percent."""

    baseline: str
    arm: str
    percent: float


_CONTENT: dict[str, Any] = read_yaml("published.yaml")
SOURCE: str = _CONTENT["source"]
# Where a row names no source of its own.
_KNOWN = {"source": SOURCE, "label": _CONTENT["label"]}
# The two published runs share most of their set-up; each names what is its own.
THROUGHPUT_SETUP, CONVERGENCE_SETUP = (
    Setup(**{**_KNOWN, **_CONTENT["shared"], **_CONTENT[name]}) for name in ("throughput_setup", "convergence_setup")
)
THROUGHPUT = tuple(PublishedThroughput(**{**_KNOWN, **row}) for row in _CONTENT["throughput"])
GAINS = tuple(PublishedGain(**{**_KNOWN, **row}) for row in _CONTENT["gains"])


def published_tps(arm: str) -> PublishedThroughput | None:
    """Published throughput of an arm, or None for one that was not published.

    Example:
        >>> published_tps("mxfp8_deepep").tps
        918.0
    """
    return next((row for row in THROUGHPUT if row.arm == arm), None)
