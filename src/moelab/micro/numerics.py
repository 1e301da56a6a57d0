"""What a number format loses: of 32 numbers, of a tensor, and of the three grouped GEMMs of a layer.

The signal-to-quantisation-noise ratio (SQNR) compares energies, in decibels: 20 dB is a relative error of a tenth, and
6 dB more halve it, which is what one mantissa bit is worth. A *saturated* value was cut to the largest element, an
*underflow* was rounded to zero. Everything is measured in float64.

A layer ``y = x Wᵀ`` costs three products in a training step. Each casts two operands along the axis it sums over:

========  ===================  ===========================  ==========================================
product   computes             summed over                  so the blocks lie along
========  ===================  ===========================  ==========================================
output    ``x Wᵀ``             K, features in               rows of x, rows of W
dgrad     ``g W``              N, features out              rows of g, columns of W
wgrad     ``gᵀ x``             M, tokens of one expert      columns of g and of x, within the expert
========  ===================  ===========================  ==========================================

Products of cast operands are summed in float32 and rounded to BF16 once, as tensor cores and torchao's emulation do. So
BF16's own error is that of rounding the result, and the others' are mostly their casts'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import torch.nn.functional as F

from moelab.errors import BadInput
from moelab.mxfp8.formats import BF16, E5M2, FP8, MX, NVFP4, SCALINGS, Format, Scaling
from moelab.mxfp8.quantise import BLOCK, require_whole_blocks

Distribution = Literal["gaussian", "student_t"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)
DEGREES_OF_FREEDOM = 3.0
"""Of Student's t: its variance is finite, its fourth moment is not."""
OUTLIER_SPACING = 64
WORST = 0.05
"""Share of the blocks that counts as the worst."""
Product = Literal["output", "dgrad", "wgrad"]
PRODUCTS: tuple[Product, ...] = get_args(Product)


def synthetic(
    distribution: Distribution, shape: tuple[int, ...], *, seed: int = 0, outlier: float = 1.0
) -> torch.Tensor:
    """Draw a float32 tensor that challenges a number format in one way.

    Gaussian values are the easy case; Student's t, with 3 degrees of freedom, puts a few large values anywhere.
    ``outlier`` multiplies one column in 64, as trained transformers have them: LLM.int8() (Dettmers et al., 2022)
    found features about 20 times the rest, *Massive Activations* (Sun et al., 2024) single ones at 10,000 times the
    median.

    Raises:
        BadInput: for another distribution, or a factor that is not positive.
    """
    if distribution not in DISTRIBUTIONS:
        raise BadInput(f"distribution is {distribution!r}; valid: {', '.join(DISTRIBUTIONS)}")
    if not outlier > 0:
        raise BadInput(f"outlier is {outlier}; valid: a positive factor")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    if distribution == "student_t":
        # torch.distributions takes no generator: it would draw from the process's.
        chi_squared = 2 * torch._standard_gamma(torch.full(shape, DEGREES_OF_FREEDOM / 2), generator=generator)
        drawn *= torch.rsqrt(chi_squared / DEGREES_OF_FREEDOM)
    drawn[..., OUTLIER_SPACING // 2 :: OUTLIER_SPACING] *= outlier
    return drawn


# Errors of a tensor


@dataclass(frozen=True, kw_only=True)
class TensorErrors:
    """What a format does to one tensor."""

    sqnr_db: float  # infinite where nothing is lost
    worst_blocks_db: float  # SQNR that 5 % of the blocks of 32 stay below; blocks of zeros are left out
    saturated_fraction: float  # of all values, those beyond the largest element times their scale
    underflow_fraction: float  # of all values, those that are not zero and are stored as zero


def measure(x: torch.Tensor, number_format: Format) -> TensorErrors:
    """Cast a tensor along its last axis and compare it with itself.

    :class:`BadInput` for values that are not finite or all zero, or an axis that cannot be cut into blocks.

    Example:
        >>> round(measure(torch.linspace(1.0, 1.9, 32), MX()).sqnr_db)
        32
    """
    _require_finite("the tensor", x)
    if not x.any():
        raise BadInput("the tensor has no value other than zero, so there is no error to measure")
    cast = number_format.cast(x)
    blocks = block_sqnr_db(x, cast.values)
    # Not interpolated: half-way between a finite SQNR and an infinite one there is nothing.
    worst = torch.quantile(blocks[~blocks.isnan()], WORST, interpolation="lower")
    return TensorErrors(
        sqnr_db=sqnr_db(x, cast.values),
        worst_blocks_db=float(worst),
        saturated_fraction=float((x.abs().double() > number_format.element.max * cast.scale.double()).double().mean()),
        underflow_fraction=float(((cast.values == 0) & (x != 0)).double().mean()),
    )


def _require_finite(name: str, x: torch.Tensor) -> None:
    if wrong := int((~torch.isfinite(x)).sum()):
        raise BadInput(f"{name} has {wrong} values of {x.numel()} that are NaN or infinite; valid: finite values")


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    """SQNR of a tensor, by norms in float64; infinite for equal ones."""
    exact = reference.double()
    error = float((value.double() - exact).norm() / exact.norm())
    return -20 * math.log10(error) if error else math.inf


def block_sqnr_db(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """SQNR of every block of 32 along the last axis: infinite where nothing is lost, NaN where the block is zero."""
    require_whole_blocks("the last axis", x.shape[-1])
    exact = x.double().reshape(-1, BLOCK)
    noise = value.double().reshape(-1, BLOCK) - exact
    return 10 * torch.log10(exact.square().sum(-1) / noise.square().sum(-1))


def rounded_shares(numbers: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """Whole numbers that rounding makes of these, ascending, and the share of each."""
    values, counts = np.unique(np.round(numbers), return_counts=True)
    return values, counts / len(numbers)


def largest_number_errors() -> tuple[list[float], dict[Scaling, list[float]]]:
    """What each scaling does to the largest number of an MXFP8 block, between one power of two and the next.

    Returns:
        Magnitudes evenly spaced from 1 to 2 (other powers of two behave alike), and their relative errors by the name
        of the scaling.
    """
    amax = 1 + torch.arange(256) / 256
    blocks = F.pad(amax[:, None], (0, BLOCK - 1))
    read_back = {scaling: MX(scaling=scaling).cast(blocks).values[:, 0] for scaling in SCALINGS}
    return amax.tolist(), {scaling: ((values - amax) / amax).tolist() for scaling, values in read_back.items()}


# Numbers as they are stored


@dataclass(frozen=True, kw_only=True)
class StoredNumbers:
    """32 consecutive numbers as a format stores them: one block of MXFP8, two of NVFP4."""

    number_format: MX | NVFP4
    values: tuple[float, ...]  # exact
    codes: tuple[int, ...]  # stored elements, as bits
    read_back: tuple[float, ...]  # what the codes and scales say
    scales: tuple[float, ...]  # what the elements of each block are multiplied by

    @property
    def name(self) -> str:
        """Of the format."""
        return "NVFP4" if isinstance(self.number_format, NVFP4) else "MXFP8"

    @property
    def code_bits(self) -> int:
        """Of an element."""
        return 4 if isinstance(self.number_format, NVFP4) else 8

    @property
    def stored_bytes(self) -> int:
        """Of elements and block scales; NVFP4's four bytes for a tensor are not counted."""
        return len(self.codes) * self.code_bits // 8 + len(self.scales)

    @property
    def sqnr_db(self) -> float:
        """SQNR of these numbers."""
        return sqnr_db(torch.tensor(self.values), torch.tensor(self.read_back))

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative error of each number; 0 for a zero."""
        pairs = zip(self.values, self.read_back, strict=True)
        return tuple((back - value) / value if value else 0.0 for value, back in pairs)

    def to_frame(self) -> pd.DataFrame:
        """A row for each number: value, value over its block's scale, the code's bits, what is read back, error."""
        exponent_ends = self.code_bits - self.number_format.element.mantissa_bits
        codes = [f"{code:0{self.code_bits}b}" for code in self.codes]
        scaled = [value / self.scales[at // self.number_format.block] for at, value in enumerate(self.values)]
        columns = {
            "value": [float(f"{value:.5g}") for value in self.values],
            "value / scale": [float(f"{value:.4g}") for value in scaled],
            "sign exponent mantissa": [f"{code[0]} {code[1:exponent_ends]} {code[exponent_ends:]}" for code in codes],
            "read back": [float(f"{back:.5g}") for back in self.read_back],
            "error (%)": [round(100 * error, 1) for error in self.errors],
        }
        return pd.DataFrame(columns)


def first_numbers(x: torch.Tensor, number_format: MX | NVFP4) -> StoredNumbers:
    """Cast a tensor, and take the first 32 of its numbers apart; NVFP4's second scale is that of all of ``x``.

    :class:`BadInput` for numbers that are not finite, or a last axis that cannot be cut into blocks of 32.
    """
    require_whole_blocks("the last axis", x.shape[-1])
    _require_finite("the tensor", x)
    cast = number_format.cast(x)
    values, stored, read_back, scale = (
        each.reshape(-1)[:BLOCK] for each in (x, cast.stored.view(torch.uint8), cast.values, cast.scale)
    )
    return StoredNumbers(
        number_format=number_format,
        values=tuple(values.double().tolist()),
        codes=tuple(stored.tolist()),
        read_back=tuple(read_back.double().tolist()),
        scales=tuple(scale[:: number_format.block].double().tolist()),
    )


# Methods: the format of every operand


@dataclass(frozen=True, kw_only=True)
class Method:
    """A recipe of mixed-precision training."""

    name: str  # folder-safe
    label: str  # for people
    operand: Format  # of activations and weights
    gradient: Format | None = None  # of output gradients, where it is another
    wgrad_in_bf16: bool = False

    def formats(self, product: Product) -> tuple[Format, Format]:
        """Formats of a product's left and right operand."""
        if product == "wgrad" and self.wgrad_in_bf16:
            return BF16(), BF16()
        return (self.operand if product == "output" else self.gradient or self.operand), self.operand


METHODS = (
    Method(name="bf16", label="BF16", operand=BF16()),
    Method(
        name="fp8_tensorwise",
        label="FP8, one scale per tensor",
        operand=FP8(per="tensor"),
        gradient=FP8(per="tensor", element=E5M2),
    ),
    Method(name="fp8_rowwise", label="FP8, one scale per row", operand=FP8(per="row")),
    Method(name="mxfp8", label="MXFP8", operand=MX()),
    Method(name="mxfp8_wgrad-bf16", label="MXFP8, wgrad BF16", operand=MX(), wgrad_in_bf16=True),
    Method(name="nvfp4", label="NVFP4", operand=NVFP4()),
)
"""torchao's recipes: tensor-wise stores gradients as E5M2, row-wise rounds scales to powers of two, MXFP8 is RCEIL.
NVFP4 is the format alone, without the transforms and the stochastic rounding of NVIDIA's recipe for training."""
STORED_METHODS = (
    *METHODS,
    Method(name="mxfp8_floor", label="MXFP8, FLOOR", operand=MX(scaling="floor")),
    Method(name="mxfp8_even", label="MXFP8, EVEN", operand=MX(scaling="even")),
)
"""How a tensor can be stored: by the recipes, and in MXFP8 with the scales that clip; CEIL stores what RCEIL does."""


@dataclass(frozen=True, kw_only=True)
class ErrorRow(TensorErrors):
    """What one method, by name and for people, does to one tensor."""

    data: str
    method: str
    label: str


def compare_methods(tensors: Mapping[str, torch.Tensor], *, gradients: Collection[str] = ()) -> list[ErrorRow]:
    """Every tensor by every way to store it, scales along the last axis; methods that cast a tensor alike are one row.

    For the tensors named in ``gradients`` a method may have another format, such as E5M2.
    """
    rows = []
    for name, x in tensors.items():
        methods: dict[Format, Method] = {}
        for method in STORED_METHODS:
            methods.setdefault(method.formats("dgrad" if name in gradients else "output")[0], method)
        for number_format, method in methods.items():
            errors = measure(x, number_format)
            rows.append(ErrorRow(data=name, method=method.name, label=method.label, **vars(errors)))
    return rows


# Products


@dataclass(frozen=True, kw_only=True)
class GroupedGemm:
    """Operands of one weight of the experts.

    :class:`BadInput` for no tokens, values that are not finite, or K or N that are no whole blocks of 32.
    """

    name: str  # of the weight
    x: torch.Tensor  # input (M, K), tokens of one expert after those of another
    weight: torch.Tensor  # (G, N, K), one matrix an expert
    grad: torch.Tensor  # of the output (M, N)
    offsets: torch.Tensor  # where each expert's tokens end, int32 (G,)

    def __post_init__(self) -> None:
        if not len(self.x):
            raise BadInput(f"{self.name}: no expert has a token, so there is no product; valid: M above 0")
        for name, size in (("K", self.x.shape[1]), ("N", self.grad.shape[1])):
            require_whole_blocks(f"{name} of {self.name}", size)
        for role in ("x", "weight", "grad"):
            _require_finite(f"{role} of {self.name}", getattr(self, role))

    def groups(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """x, weight and grad of every expert that has tokens."""
        for weight, (start, end) in zip(self.weight, pairwise([0, *self.offsets.tolist()]), strict=True):
            if end > start:  # an empty product has no error
                yield self.x[start:end], weight, self.grad[start:end]

    def products(
        self, multiply: Callable[[Product, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> dict[Product, torch.Tensor]:
        """All three products over all experts, flat; ``multiply`` gets operands with the summed axis last."""
        parts: dict[Product, list[torch.Tensor]] = {product: [] for product in PRODUCTS}
        for x, weight, grad in self.groups():
            operands = {"output": (x, weight), "dgrad": (grad, weight.T), "wgrad": (grad.T, x.T)}
            for product in PRODUCTS:
                parts[product].append(multiply(product, *operands[product]).flatten())
        return {product: torch.cat(results) for product, results in parts.items()}


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """SQNR of one product of one weight by one method, against float64."""

    weight: str
    product: Product
    method: str
    label: str
    sqnr_db: float


def compare_products(gemms: Iterable[GroupedGemm]) -> list[GemmRow]:
    """Every product of every weight by every method, against float64 over the operands as they are given.

    With one scale per tensor, each expert's operand counts as a tensor.
    """
    rows = []
    for gemm in gemms:
        exact = gemm.products(lambda _product, left, right: left.double() @ right.double().T)
        for method in METHODS:
            cast = gemm.products(partial(cast_product, method=method))
            about = {"weight": gemm.name, "method": method.name, "label": method.label}
            rows += [GemmRow(**about, product=one, sqnr_db=sqnr_db(exact[one], cast[one])) for one in PRODUCTS]
    return rows


def cast_product(product: Product, left: torch.Tensor, right: torch.Tensor, method: Method) -> torch.Tensor:
    """One product of cast operands, (R, S) and (C, S) summed over S: (R, C), BF16."""
    left_format, right_format = method.formats(product)
    return (_cast(left, left_format) @ _cast(right, right_format).T).bfloat16()


def _cast(x: torch.Tensor, number_format: Format) -> torch.Tensor:
    """Values after the cast along the last axis; a ragged end is padded with zeros, as torchao pads token groups."""
    short = -x.shape[-1] % number_format.block if isinstance(number_format, MX | NVFP4) else 0
    return number_format.cast(F.pad(x, (0, short))).values[..., : x.shape[-1]]


def layer_gemms(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor
) -> tuple[GroupedGemm, GroupedGemm, GroupedGemm]:
    """Operands of all nine products of an expert layer ``(silu(x w1ᵀ) * (x w3ᵀ)) w2ᵀ``, as BF16 training has them.

    It takes what a :class:`~moelab.mxfp8.capture.Capture` has, and returns the grouped GEMMs of w1, w3 and w2, in the
    order of the forward pass.
    """

    def multiply(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # In FP32 and rounded once, as tensor cores do; a CPU's own BF16 product may sum otherwise.
        groups = zip(pairwise([0, *offsets.tolist()]), weights, strict=True)
        return torch.cat([rows[start:end].float() @ w.float().T for (start, end), w in groups]).bfloat16()

    gate, up = (multiply(x, w).requires_grad_() for w in (w1, w3))
    hidden = F.silu(gate) * up
    grad_hidden = multiply(grad, w2.transpose(-2, -1))
    grad_gate, grad_up = torch.autograd.grad(hidden, (gate, up), grad_hidden)
    return (
        GroupedGemm(name="w1", x=x, weight=w1, grad=grad_gate, offsets=offsets),
        GroupedGemm(name="w3", x=x, weight=w3, grad=grad_up, offsets=offsets),
        GroupedGemm(name="w2", x=hidden.detach(), weight=w2, grad=grad, offsets=offsets),
    )
