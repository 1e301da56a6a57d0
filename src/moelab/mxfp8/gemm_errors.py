"""What a number format does to the three grouped GEMMs of a layer, held against float64.

A layer ``y = x Wᵀ`` costs three products in a training step. Each casts two operands along the axis it sums over:

========  ===================  ===========================  ==========================================
product   computes             summed over                  so the blocks lie along
========  ===================  ===========================  ==========================================
output    ``x Wᵀ``             K, features in               rows of x, rows of W
dgrad     ``g W``              N, features out              rows of g, columns of W
wgrad     ``gᵀ x``             M, tokens of one expert      columns of g and of x, within the expert
========  ===================  ===========================  ==========================================

Products are exact over the cast operands up to float32 sums, and are rounded to BF16 once, as tensor cores and
torchao's emulation do. So the error of BF16 itself is that of rounding, and those of the others are their casts'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F

from moelab.errors import BadInput
from moelab.mxfp8.errors import sqnr_db
from moelab.mxfp8.formats import BF16, E5M2, FP8, MX, Format, require_finite, require_whole_blocks

Product = Literal["output", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = ("output", "dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A recipe of mixed-precision training: the format of every operand.

    Attributes:
        name: folder-safe.
        label: for people.
        operand: format of activations and weights.
        gradient: format of output gradients.
        wgrad_in_bf16: whether the weight gradient is left in BF16.
    """

    name: str
    label: str
    operand: Format
    gradient: Format
    wgrad_in_bf16: bool = False

    def formats(self, product: Product) -> tuple[Format, Format]:
        """Formats of a product's left and right operand."""
        if product == "wgrad" and self.wgrad_in_bf16:
            return BF16(), BF16()
        return (self.operand if product == "output" else self.gradient), self.operand


_ROW = FP8(per="row", power_of_two=True)
METHODS: tuple[Method, ...] = (
    Method(name="bf16", label="BF16", operand=BF16(), gradient=BF16()),
    Method(
        name="fp8_tensorwise",
        label="FP8, one scale a tensor",
        operand=FP8(per="tensor"),
        gradient=FP8(per="tensor", element=E5M2),
    ),
    Method(name="fp8_rowwise", label="FP8, one scale a row", operand=_ROW, gradient=_ROW),
    Method(name="mxfp8", label="MXFP8", operand=MX(), gradient=MX()),
    Method(name="mxfp8_wgrad-bf16", label="MXFP8, wgrad BF16", operand=MX(), gradient=MX(), wgrad_in_bf16=True),
)
"""torchao's recipes: tensor-wise stores gradients as E5M2, row-wise rounds scales to powers of two, MXFP8 is RCEIL."""


@dataclass(frozen=True, kw_only=True)
class GroupedGemm:
    """Operands of one weight of the experts.

    Attributes:
        name: of the weight.
        x: input (M, K), tokens of one expert after those of another.
        weight: (G, N, K), one matrix an expert.
        grad: gradient of the output (M, N).
        offsets: where each expert's tokens end, int32 (G,).

    Raises:
        BadInput: for shapes that do not fit, values that are not finite, or K or N that are no whole blocks of 32.
    """

    name: str
    x: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        (m, k), (g, n, k_weight) = self.x.shape, self.weight.shape
        if k != k_weight or self.grad.shape != (m, n) or self.offsets.shape != (g,) or m == 0:
            shapes = ", ".join(str(tuple(each.shape)) for each in (self.x, self.weight, self.grad, self.offsets))
            raise BadInput(
                f"{self.name}: x, weight, grad and offsets are {shapes}; "
                "valid: (M, K), (G, N, K), (M, N) and (G,), with M above 0"
            )
        ends = self.offsets.tolist()
        if ends[-1] != m or any(before > after for before, after in pairwise([0, *ends])):
            raise BadInput(f"{self.name}: offsets are {ends}; valid: ascending ends of groups, the last {m}")
        for size in (k, n):
            require_whole_blocks(size, MX().block)
        for role, tensor in (("x", self.x), ("weight", self.weight), ("grad", self.grad)):
            require_finite(f"{role} of {self.name}", tensor)

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """x, weight and grad of every expert that has tokens."""
        starts = [0, *self.offsets.tolist()]
        for index, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                yield self.x[start:end], self.weight[index], self.grad[start:end]


def gemm_errors(gemm: GroupedGemm, methods: Sequence[Method] = METHODS) -> dict[str, dict[Product, float]]:
    """SQNR in dB of the three products of one weight, against float64 over the operands as they are given.

    Args:
        gemm: the operands.
        methods: how each is cast. With one scale a tensor, each expert's operand counts as a tensor.

    Returns:
        For the name of each method, the SQNR of each product.
    """
    exact = _products(gemm, _exact)
    found = {}
    for method in methods:
        ours = _products(gemm, partial(_cast_product, method))
        found[method.name] = {product: sqnr_db(exact[product], ours[product]) for product in PRODUCTS}
    return found


def cast_product(product: Product, left: torch.Tensor, right: torch.Tensor, method: Method) -> torch.Tensor:
    """One product of cast operands.

    Args:
        product: which one, for the formats.
        left: (R, S); S is summed over.
        right: (C, S).
        method: formats of both.

    Returns:
        (R, C), BF16.
    """
    casts = (_cast(operand, form) for operand, form in zip((left, right), method.formats(product), strict=True))
    left_cast, right_cast = casts
    return (left_cast @ right_cast.T).bfloat16()


def layer_gemms(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    grad: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[GroupedGemm, GroupedGemm, GroupedGemm]:
    """Operands of all nine products of an expert layer ``(silu(x w1ᵀ) * (x w3ᵀ)) w2ᵀ``, as BF16 training has them.

    Args:
        x: routed input (M, D).
        w1: (G, F, D).
        w2: (G, D, F).
        w3: (G, F, D).
        grad: gradient of the layer's output (M, D).
        offsets: where each expert's tokens end, (G,).

    Returns:
        The grouped GEMMs of w1, w3 and w2, in the order of the forward pass.
    """
    gate, up = (_grouped(x, w, offsets).requires_grad_() for w in (w1, w3))
    hidden = F.silu(gate) * up
    grad_hidden = _grouped(grad, w2.transpose(-2, -1), offsets)
    grad_gate, grad_up = torch.autograd.grad(hidden, (gate, up), grad_hidden)
    return (
        GroupedGemm(name="w1", x=x, weight=w1, grad=grad_gate, offsets=offsets),
        GroupedGemm(name="w3", x=x, weight=w3, grad=grad_up, offsets=offsets),
        GroupedGemm(name="w2", x=hidden.detach(), weight=w2, grad=grad, offsets=offsets),
    )


def _grouped(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``x Wᵀ`` of each group, float32 sums, rounded to BF16."""
    starts = [0, *offsets.tolist()]
    rows = [x[a:b].float() @ w.float().T for (a, b), w in zip(pairwise(starts), weight, strict=True)]
    return torch.cat(rows).bfloat16()


def _products(
    gemm: GroupedGemm, multiply: Callable[[Product, torch.Tensor, torch.Tensor], torch.Tensor]
) -> dict[Product, torch.Tensor]:
    """All three products over all experts, flat; operands lie with the summed axis last."""
    parts: dict[Product, list[torch.Tensor]] = {product: [] for product in PRODUCTS}
    for x, weight, grad in gemm.groups():
        parts["output"].append(multiply("output", x, weight).flatten())
        parts["dgrad"].append(multiply("dgrad", grad, weight.T).flatten())
        parts["wgrad"].append(multiply("wgrad", grad.T, x.T).flatten())
    return {product: torch.cat(found) for product, found in parts.items()}


def _cast_product(method: Method, product: Product, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return cast_product(product, left, right, method)


def _exact(_product: Product, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.double() @ right.double().T


def _cast(x: torch.Tensor, number_format: Format) -> torch.Tensor:
    """Values after the cast along the last axis; a ragged end is padded with zeros, as torchao pads token groups."""
    if not isinstance(number_format, MX):
        return number_format.cast(x).values
    short = -x.shape[-1] % number_format.block
    return number_format.cast(F.pad(x, (0, short))).values[..., : x.shape[-1]]
