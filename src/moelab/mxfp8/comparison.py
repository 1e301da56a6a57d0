"""Tables of errors: data sets against methods, and the nine products of an expert layer against methods."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moelab.mxfp8.errors import block_sqnr_db, measure
from moelab.mxfp8.fake_quantise import BLOCK
from moelab.mxfp8.formats import MX, SCALINGS, Format, Scaling
from moelab.mxfp8.gemm_errors import METHODS, PRODUCTS, GroupedGemm, Method, gemm_errors

WORST = 0.05
"""Quantile of blocks that counts as the worst."""


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """What one method does to one tensor.

    Attributes:
        data: name of the tensor.
        method: name of the method, or of the scaling.
        label: the same for people.
        sqnr_db: of the whole tensor, dB.
        worst_blocks_db: SQNR that 5 % of the blocks of 32 stay below, dB; blocks of zeros are left out.
        underflow_fraction: of all values, those that became zero.
        saturated_fraction: of all values, those that were cut.
    """

    data: str
    method: str
    label: str
    sqnr_db: float
    worst_blocks_db: float
    underflow_fraction: float
    saturated_fraction: float


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """SQNR in dB of one product of one weight by one method, against float64."""

    weight: str
    product: str
    method: str
    label: str
    sqnr_db: float


def compare_methods(
    tensors: Mapping[str, torch.Tensor], *, gradients: Collection[str] = (), methods: Sequence[Method] = METHODS
) -> list[ErrorRow]:
    """Every tensor by every method, scales along the last axis.

    Args:
        tensors: by name.
        gradients: names of those that are gradients, for which a method may have another format.
        methods: those that cast a tensor alike are listed once, by the first.
    """
    rows = []
    for name, x in tensors.items():
        seen = set()
        for method in methods:
            number_format = method.gradient if name in gradients else method.operand
            if number_format not in seen:
                seen.add(number_format)
                rows.append(_row(name, x, number_format, method.name, method.label))
    return rows


def compare_scalings(tensors: Mapping[str, torch.Tensor]) -> list[ErrorRow]:
    """Every tensor by MXFP8 (E4M3) with each of torchao's ways to choose the scale."""
    return [
        _row(name, x, MX(scaling=scaling), scaling, scaling.upper())
        for name, x in tensors.items()
        for scaling in SCALINGS
    ]


def largest_number_errors(points: int = 256) -> tuple[list[float], dict[Scaling, list[float]]]:
    """What each scaling does to the largest number of an MXFP8 block, between one power of two and the next.

    Args:
        points: magnitudes to try, evenly from 1 to 2; the result for any other power of two is the same.

    Returns:
        The magnitudes, and the relative error of each by the name of the scaling.
    """
    amax = 1 + torch.arange(points) / points
    blocks = torch.zeros(points, BLOCK)
    blocks[:, 0] = amax
    cast = {scaling: MX(scaling=scaling).cast(blocks).values[:, 0] for scaling in SCALINGS}
    return amax.tolist(), {scaling: ((found - amax) / amax).tolist() for scaling, found in cast.items()}


def compare_products(gemms: Iterable[GroupedGemm], methods: Sequence[Method] = METHODS) -> list[GemmRow]:
    """Every product of every weight by every method."""
    rows = []
    for gemm in gemms:
        found = gemm_errors(gemm, methods)
        rows += [
            GemmRow(
                weight=gemm.name,
                product=product,
                method=method.name,
                label=method.label,
                sqnr_db=found[method.name][product],
            )
            for method in methods
            for product in PRODUCTS
        ]
    return rows


def _row(name: str, x: torch.Tensor, number_format: Format, method: str, label: str) -> ErrorRow:
    errors = measure(x, number_format)
    blocks = block_sqnr_db(x, number_format.cast(x).values)
    known = blocks[~blocks.isnan()]
    worst = float(torch.quantile(known, WORST, interpolation="lower")) if len(known) else math.nan
    return ErrorRow(
        data=name,
        method=method,
        label=label,
        sqnr_db=errors.sqnr_db,
        worst_blocks_db=worst,
        underflow_fraction=errors.underflow_fraction,
        saturated_fraction=errors.saturated_fraction,
    )
