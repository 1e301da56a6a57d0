"""Bytes of an operation, counted from the experts that were drawn, and what its time makes of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

SCALE_BLOCK = 128
"""Elements that share one FP32 scale in an FP8 row. MXFP8 has a byte for 32: the same bytes."""


def row_bytes(hidden: int, precision: str) -> int:
    """Bytes of one token's vector on the wire: BF16, or FP8 with an FP32 scale for each block.

    Example:
        >>> row_bytes(7168, "bf16"), row_bytes(7168, "fp8")
        (14336, 7392)
    """
    return 2 * hidden if precision == "bf16" else hidden + 4 * -(-hidden // SCALE_BLOCK)


def traffic(
    sent_PP: Sequence[Sequence[int]], *, logical_rows: int, hidden: int, precision: str
) -> dict[str, int | float]:
    """Bytes of one operation.

    Args:
        sent_PP: rows that rank ``p`` (outer) sends to rank ``q`` (inner), itself included.
        logical_rows: rows that one rank's tokens need, one for each expert of each token.
        hidden: elements of a row.
        precision: of the rows.

    Returns:
        ``logical_bytes`` of one rank; ``physical_bytes`` of the busiest rank and direction, without copies to itself;
        ``rows_to_others`` and ``rows_to_self``, the mean of all ranks.
    """
    ranks = range(len(sent_PP))
    out = [sum(sent_PP[p]) - sent_PP[p][p] for p in ranks]
    into = [sum(sent_PP[q][p] for q in ranks) - sent_PP[p][p] for p in ranks]
    each = row_bytes(hidden, precision)
    return {
        "logical_bytes": logical_rows * each,
        "physical_bytes": max(*out, *into) * each,
        "rows_to_others": statistics.fmean(out),
        "rows_to_self": statistics.fmean(sent_PP[p][p] for p in ranks),
    }


def summarise(times_us: Sequence[float]) -> dict[str, float]:
    """Median and interquartile range, µs.

    Example:
        >>> summarise([1.0, 2.0, 3.0, 4.0, 5.0])
        {'us_median': 3.0, 'us_iqr': 2.0}
    """
    low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return {"us_median": round(middle, 2), "us_iqr": round(high - low, 2)}


def rates(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, float | None]:
    """GB/s of a measured row and its fractions of the machine's copies.

    Args:
        row: with ``us_median`` (of the whole operation), ``parts_us``, ``logical_bytes`` and ``physical_bytes``.
        reference: with ``between_ranks_gb_s`` and ``local_gb_s``.

    Returns:
        ``logical_gb_s`` over the whole operation and ``physical_gb_s`` over its wire part alone; what they are of the
        copy inside one device and of the copy between two. None where nothing travelled.
    """
    wire_us = row["parts_us"]["wire"]
    logical = row["logical_bytes"] / row["us_median"] / 1e3
    physical = row["physical_bytes"] / wire_us / 1e3 if wire_us and row["physical_bytes"] else None
    of_copy = None if physical is None else round(physical / reference["between_ranks_gb_s"], 4)
    return {
        "logical_gb_s": round(logical, 3),
        "physical_gb_s": None if physical is None else round(physical, 3),
        "fraction_of_copy_between_ranks": of_copy,
        "fraction_of_local_copy": round(logical / reference["local_gb_s"], 4),
    }
