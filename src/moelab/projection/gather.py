"""Bytes that pass over a GPU's memory between the wire and the experts' grouped GEMM.

The grouped GEMM wants rows in expert-major order, in FP8 or MXFP8 each expert's group padded: the kernels work on whole
tiles and whole scale blocks, so a group may not begin in the middle of one (16 rows for FP8, 32 for MXFP8, 128 where
Blackwell's scale layout is used). Each pass reads and writes all rows:

====================================  ======================================================================
path                                  passes
====================================  ======================================================================
TorchTitan's standard dispatcher      gather and pad in one (torchao's ``permute_and_pad``), quantise
TorchTitan's DeepEP dispatcher        copy out of the buffer, gather; quantised experts, which 0.3.0 refuses here, would
                                      add a pass that pads, and quantise
DeepEP's expanding layout             the copy out of the buffer writes expert-major and padded; quantise
the same, FP8 dispatch                the copy alone: rows arrive quantised
====================================  ======================================================================

References:
    ``torchtitan`` 0.3.0, ``models/common/token_dispatcher.py`` and ``distributed/deepep/deepep.py``;
    ``torchao`` 0.18.0, ``prototype/moe_training/ep/permute.py``; ``deepseek-ai/DeepEP`` 2.1.0, ``do_expand``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moelab.model import BYTES_PER_ELEMENT

STOCK_STANDARD, STOCK_DEEPEP = "standard: gather + pad, quantise", "stock DeepEP: copy, gather, pad, quantise"
EXPANDING, EXPANDING_FP8 = "expanding DeepEP: copy, quantise", "expanding DeepEP, FP8 dispatch: copy"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over memory of one rank's rows."""

    name: str
    read_bytes: float
    write_bytes: float

    @property
    def moved_bytes(self) -> float:
        """Read and written."""
        return self.read_bytes + self.write_bytes


def padded_rows(rows: float, experts: int, alignment: int) -> float:
    """Expected rows after padding each of ``experts`` groups, whose sizes end anywhere in a block of ``alignment``.

    Example:
        >>> padded_rows(32768, 8, 128)
        33276.0
    """
    return rows + experts * (alignment - 1) / 2


def gather_passes(
    *, received: float, rows: float, experts: int, hidden: int, alignment: int, precision: str = "mxfp8"
) -> Mapping[str, tuple[Pass, ...]]:
    """Passes over memory of one rank's forward dispatch in one layer, by path.

    Args:
        received: rows that arrive where a token is sent once to a rank.
        rows: rows of the grouped GEMM, one for each token and local expert.
        experts: local experts, each with a group of its own.
        hidden: elements of a row.
        alignment: rows that a group is padded to a multiple of.
        precision: that the experts multiply in.

    Returns:
        Passes in order, by the name of the path.
    """
    wide, low = hidden * BYTES_PER_ELEMENT["bf16"], hidden * BYTES_PER_ELEMENT[precision]
    padded = padded_rows(rows, experts, alignment)
    quantise = Pass(name="quantise", read_bytes=padded * wide, write_bytes=padded * low)
    return {
        STOCK_STANDARD: (Pass(name="gather", read_bytes=rows * wide, write_bytes=padded * wide), quantise),
        STOCK_DEEPEP: (
            Pass(name="copy out", read_bytes=received * wide, write_bytes=received * wide),
            Pass(name="gather", read_bytes=rows * wide, write_bytes=rows * wide),
            Pass(name="pad", read_bytes=rows * wide, write_bytes=padded * wide),
            quantise,
        ),
        EXPANDING: (Pass(name="copy out", read_bytes=received * wide, write_bytes=padded * wide), quantise),
        EXPANDING_FP8: (Pass(name="copy out", read_bytes=received * low, write_bytes=padded * low),),
    }
