"""Bandwidths that DeepEP publishes, and what they are on the wire.

DeepEP counts *logical* bytes: a token once for each destination, those that never leave the node included. With N nodes
a share of 1/N stays, so the network carries 1 − 1/N of the figure.

References:
    ``deepseek-ai/DeepEP``, README (V2) and ``docs/legacy.md`` (V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

V2 = "deepseek-ai/DeepEP, README of 2.1.0: 8,192 tokens, hidden 7168, top-8, FP8 dispatch, BF16 combine"
V1 = "deepseek-ai/DeepEP, docs/legacy.md: 4,096 tokens, hidden 7168, top-8 of 4 groups, FP8 dispatch, BF16 combine"


@dataclass(frozen=True, kw_only=True)
class QuotedBandwidth:
    """One row of DeepEP's tables; GB/s are logical.

    Attributes:
        version: of DeepEP.
        gpu: as the table names it.
        nodes: hosts of 8 GPUs.
        wire: where the bottleneck is.
        dispatch_gb_s: of dispatch.
        combine_gb_s: of combine.
        sms: streaming multiprocessors used; None where the table does not say.
        source: of the row.
        label: always quoted.
    """

    version: str
    gpu: str
    nodes: int
    wire: Literal["network", "NVLink"]
    dispatch_gb_s: float
    combine_gb_s: float
    sms: int | None
    source: str
    label: Literal["quoted"] = "quoted"

    @property
    def name(self) -> str:
        """Such as ``V2, SM90, EP 8×2``."""
        return f"{self.version}, {self.gpu}, EP 8×{self.nodes}"

    def on_wire_gb_s(self, logical_gb_s: float) -> float:
        """Bytes that cross the bottleneck: 1 − 1/N of the logical ones over a network, 7/8 over NVLink in a node."""
        return logical_gb_s * (1 - 1 / (self.nodes if self.wire == "network" else 8))


def _row(version: str, gpu: str, nodes: int, dispatch: float, combine: float, sms: int | None) -> QuotedBandwidth:
    return QuotedBandwidth(
        version=version,
        gpu=gpu,
        nodes=nodes,
        wire="NVLink" if nodes == 1 else "network",
        dispatch_gb_s=dispatch,
        combine_gb_s=combine,
        sms=sms,
        source=V2 if version == "V2" else V1,
    )


QUOTED = (
    _row("V2", "SM90", 2, 90, 81, 12),
    _row("V2", "SM90", 4, 61, 61, 6),
    _row("V2", "SM100", 2, 90, 91, 12),
    _row("V2", "SM100", 1, 726, 740, 64),
    _row("V2", "SM100", 1, 643, 675, 24),
    _row("V1", "H800", 1, 153, 158, None),
    _row("V1", "H800", 2, 43, 43, None),
    _row("V1", "H800", 4, 58, 57, None),
    _row("V1", "H800", 8, 51, 50, None),
)
