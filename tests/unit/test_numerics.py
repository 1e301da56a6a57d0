"""Casts against the OCP definition and torchao, error measures against torchao, and the laws that formats obey."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import compute_error
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

from moelab.errors import BadInput
from moelab.mxfp8.errors import (
    DISTRIBUTIONS,
    METHODS,
    PRODUCTS,
    GroupedGemm,
    Method,
    block_sqnr_db,
    cast_product,
    compare_products,
    layer_gemms,
    measure,
    relative_error,
    sqnr_db,
    synthetic,
)
from moelab.mxfp8.formats import BF16, E2M1, E4M3, E5M2, FP8, MX, NVFP4, SCALINGS, Element

FORMATS = [MX(scaling=scaling, element=element) for scaling in SCALINGS for element in (E4M3, E5M2)]
BY_NAME = {method.name: method for method in METHODS}


def label(made: object) -> str:
    return f"{made.scaling}-{made.element.name}" if isinstance(made, MX) else str(made)


# RCEIL takes a logarithm in float32, so an amax less than 4e-7 above 448 times a power of two would get a scale that is
# too small. BF16 has no such numbers, and what experts multiply is BF16.


@st.composite
def rows(draw: st.DrawFn, blocks: int = 3) -> torch.Tensor:
    """(1, 32 * blocks), BF16 values: each block near one magnitude, or over the whole range, or zero."""
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(blocks):
        kind = draw(st.sampled_from(["near", "wide", "zero", "one"]))
        exponent = draw(st.floats(-60, 60))
        block = generator.standard_normal(32) * 2.0**exponent
        if kind == "wide":
            block *= 2.0 ** generator.uniform(-30, 0, 32)
        if kind == "zero":
            block *= 0
        if kind == "one":
            block[1:] = 0
        made.append(block)
    return torch.tensor(np.concatenate(made)[None]).bfloat16().float()


# --- the OCP definition, written again in float64 --------------------------------------------------------------------


def round_to_element(x: np.ndarray[Any, Any], element: Element) -> np.ndarray[Any, Any]:
    """Nearest element, ties to even, saturating (OCP OFP8 and MX v1.0, section 5.3)."""
    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, element.emin)
    step = 2.0 ** (exponent - element.mantissa_bits)
    return np.clip(np.rint(x / step) * step, -element.max, element.max)


def shared_exponent(amax: float, made: MX) -> int:
    """Exponent of a block's scale; MX v1.0 section 6.3 for floor, torchao's and NVIDIA's definitions for the others."""
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [1/2, 1)
    floor = exponent - 1
    if made.scaling == "floor":
        return floor - made.element.emax
    if made.scaling == "ceil":
        return floor + (mantissa > 0.5) - made.element.emax
    if made.scaling == "even":  # a half rounds up in torchao's integer arithmetic
        grid = 2.0**made.element.mantissa_bits
        rounded = math.floor(2 * mantissa * grid + 0.5) / grid
        return floor + (rounded >= 2) - made.element.emax
    mantissa, exponent = math.frexp(amax / made.element.max)
    return exponent - 1 + (mantissa > 0.5)


def reference(x: torch.Tensor, made: MX) -> np.ndarray[Any, Any]:
    """Values of one row, and what each is multiplied by; no scale of a block of zeros."""
    out = []
    for block in x.double().numpy().reshape(-1, made.block):
        amax = float(np.abs(block).max())
        scale = 2.0 ** shared_exponent(amax, made) if amax else math.nan
        out.append((round_to_element(block / scale, made.element) * scale if amax else block, block * 0 + scale))
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("made", FORMATS, ids=label)
@settings(max_examples=25, deadline=None)
@given(x=rows())
def test_mx_is_the_ocp_definition(made: MX, x: torch.Tensor) -> None:
    cast, (values, scale) = made.cast(x), reference(x, made)
    np.testing.assert_array_equal(cast.values.double().numpy()[0], values)
    np.testing.assert_array_equal(np.where(np.isnan(scale), np.nan, cast.scale.double().numpy()[0]), scale)


@settings(max_examples=40, deadline=None)
@given(x=rows())
@example(x=torch.zeros(1, 32))
def test_nvfp4_is_its_definition(x: torch.Tensor) -> None:
    """NVIDIA, arXiv 2509.25149, appendix B, written again in float64: two scales, each of them rounded."""
    amax = float(x.abs().max())
    cast = NVFP4().cast(x)
    assert cast.scale.isfinite().all()
    if amax < 2688 * 2.0**-121:
        assert not cast.values.any()
        return
    outer = amax / (448 * 6)
    for block, scale, values in zip(
        x.double().numpy().reshape(-1, 16), cast.scale.reshape(-1, 16)[:, 0], cast.values.reshape(-1, 16), strict=True
    ):
        inner = np.clip(round_to_element(np.abs(block).max(keepdims=True) / 6 / outer, E4M3), 2.0**-6, 448)
        assert scale.item() == pytest.approx(outer * inner[0], rel=1e-6)
        # A number within FP32's rounding of a tie may fall to either side of it.
        expected = [
            round_to_element(block * near / (outer * inner), E2M1) * outer * inner for near in (1, 1 - 1e-6, 1 + 1e-6)
        ]
        assert np.min([np.abs(one - values.double().numpy()) for one in expected], axis=0).max() <= 1e-6 * amax


# --- measures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [1.0, 4096.0])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sqnr_is_torchaos_error_in_db(distribution: Any, outlier: float) -> None:
    x = synthetic(distribution, (64, 128), outlier=outlier)
    for made in (MX(), NVFP4(), FP8(per="tensor"), FP8(per="row"), BF16()):
        values = made.cast(x).values
        found = measure(x, made)
        assert found.sqnr_db == pytest.approx(compute_error(x.double(), values.double()).item(), abs=1e-9)


def test_fractions_count_what_they_say() -> None:
    x = torch.full((1, 32), 300.0)
    x[0, 0] = 500.0  # floor: scale 1, so 500 is beyond 448
    x[0, 1] = 0.0
    x[0, 2] = 2.0**-11  # below half of the smallest element, 2^-9
    found = measure(x, MX(scaling="floor"))
    assert found.saturated_fraction == 1 / 32
    assert found.underflow_fraction == 1 / 32
    assert measure(x, MX(scaling="rceil")).saturated_fraction == 0


def test_what_is_exact_has_no_error() -> None:
    x = torch.tensor([[2.0**e for e in range(-8, 8)] * 2])
    assert measure(x, MX()).sqnr_db == math.inf
    assert sqnr_db(x, x) == math.inf


def test_blocks_are_measured_as_tensors_of_their_own() -> None:
    noisy = synthetic("gaussian", (4, 64))
    values = MX().cast(noisy).values
    by_block = block_sqnr_db(noisy, values)
    for index, (exact, ours) in enumerate(zip(noisy.reshape(-1, 32), values.reshape(-1, 32), strict=True)):
        assert by_block[index].item() == pytest.approx(sqnr_db(exact, ours))


# --- data ------------------------------------------------------------------------------------------------------------


def test_distributions_are_as_described() -> None:
    gaussian = synthetic("gaussian", (400, 256)).double()
    heavy = synthetic("student_t", (400, 256)).double()
    channels = synthetic("gaussian", (400, 256), outlier=100.0).double()
    assert gaussian.std().item() == pytest.approx(1, abs=0.02)
    # Student's t with 3 degrees of freedom, from its tables: quartiles at 0.7649, and P(|t| > 5.841) is 0.01.
    assert heavy.abs().median().item() == pytest.approx(0.7649, abs=0.02)
    assert (heavy.abs() > 5.841).double().mean().item() == pytest.approx(0.01, abs=0.0015)
    spread = channels.std(0)
    assert (spread > 50).nonzero().flatten().tolist() == [32, 96, 160, 224]
    assert torch.equal(synthetic("student_t", (4, 4), seed=3), synthetic("student_t", (4, 4), seed=3))
    assert not torch.equal(synthetic("gaussian", (4, 4), seed=3), synthetic("gaussian", (4, 4), seed=4))


# --- the three GEMMs -------------------------------------------------------------------------------------------------

SIZES = ((64, 32, 96), (40, 1, 87), (0, 128, 5))


def operands(sizes: tuple[int, ...], *, n: int = 64, k: int = 96) -> GroupedGemm:
    m = sum(sizes)
    made = (
        synthetic("student_t", (m, k), seed=1),
        synthetic("gaussian", (len(sizes), n, k), seed=2) / 8,
        synthetic("student_t", (m, n), seed=3) * 2.0**-20,
    )
    x, weight, grad = (tensor.bfloat16() for tensor in made)
    return GroupedGemm(name="w", x=x, weight=weight, grad=grad, offsets=torch.tensor(sizes).cumsum(0).int())


def ours(gemm: GroupedGemm, method: Method) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {product: [] for product in PRODUCTS}
    for x, weight, grad in gemm.groups():
        parts["output"].append(cast_product("output", x, weight, method))
        parts["dgrad"].append(cast_product("dgrad", grad, weight.T, method))
        parts["wgrad"].append(cast_product("wgrad", grad.T, x.T, method))
    return {
        "output": torch.cat(parts["output"]),
        "dgrad": torch.cat(parts["dgrad"]),
        "wgrad": torch.stack(parts["wgrad"]),
    }


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_wgrad-bf16"])
def test_mxfp8_products_are_torchaos(sizes: tuple[int, ...], name: str) -> None:
    gemm = operands(sizes)
    x, weight = gemm.x.clone().requires_grad_(), gemm.weight.clone().requires_grad_()
    output = _to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        offs=gemm.offsets,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=name != "mxfp8",
        pad_token_groups_for_grouped_mm=True,
    )
    output.backward(gemm.grad)
    found = ours(gemm, BY_NAME[name])
    assert x.grad is not None
    assert weight.grad is not None
    used = [index for index, size in enumerate(sizes) if size]
    theirs = {"output": output.detach(), "dgrad": x.grad, "wgrad": weight.grad[used]}
    for product in PRODUCTS:  # one rounding to BF16 apart at most: sums run in another order
        assert relative_error(theirs[product], found[product]) < 2**-10, product
        assert (found[product] == theirs[product]).double().mean() > 0.98, product


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_products_are_those_of_torchaos_linear(recipe: str) -> None:
    gemm = operands((96,))
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    linear = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(gemm.weight[0])
    theirs_linear = Float8Linear.from_float(linear, config)
    x = gemm.x.clone().requires_grad_()
    output = theirs_linear(x)
    output.backward(gemm.grad)
    assert x.grad is not None
    found = ours(gemm, BY_NAME[f"fp8_{recipe}"])
    theirs = {"output": output.detach(), "dgrad": x.grad, "wgrad": theirs_linear.weight.grad[None]}
    for product in PRODUCTS:  # torchao's emulation multiplies in BF16, where not every scaled E4M3 number has a place
        assert relative_error(theirs[product], found[product]) < 2**-7, product
        loss = relative_error(exact(gemm)[product], found[product])
        assert relative_error(theirs[product], found[product]) < loss / 2, product


def exact(gemm: GroupedGemm) -> dict[str, torch.Tensor]:
    x, weight, grad = gemm.x.double(), gemm.weight.double(), gemm.grad.double()
    return {"output": x @ weight[0].T, "dgrad": grad @ weight[0], "wgrad": (grad.T @ x)[None]}


def test_rows_of_products_are_the_errors_of_the_products() -> None:
    gemm = operands((96,))
    rows = compare_products([gemm])
    assert [(row.method, row.product) for row in rows] == [(m.name, product) for m in METHODS for product in PRODUCTS]
    for row in rows:
        product = ours(gemm, BY_NAME[row.method])[row.product]
        expected = compute_error(exact(gemm)[row.product], product.double()).item()
        assert row.sqnr_db == pytest.approx(expected, abs=1e-6), row


def test_the_operands_of_a_layer_give_autograds_gradients() -> None:
    gemm = operands((64, 0, 40), n=32, k=64)
    x, grad, offsets = gemm.x, (synthetic("gaussian", (104, 64), seed=5)).bfloat16(), gemm.offsets
    w1, w3 = gemm.weight, (gemm.weight.flip(1)).contiguous()
    w2 = gemm.weight.transpose(-2, -1).contiguous()
    leaves = [tensor.double().requires_grad_() for tensor in (x, w1, w2, w3)]
    starts = [0, *offsets.tolist()]
    parts = [
        (torch.nn.functional.silu(leaves[0][a:b] @ v1.T) * (leaves[0][a:b] @ v3.T)) @ v2.T
        for a, b, v1, v2, v3 in zip(starts, starts[1:], *(leaves[i] for i in (1, 2, 3)), strict=False)
    ]
    torch.cat(parts).backward(grad.double())
    bf16 = BY_NAME["bf16"]
    for gemm_of, leaf in zip(layer_gemms(x, w1, w2, w3, grad, offsets), (leaves[1], leaves[3], leaves[2]), strict=True):
        assert leaf.grad is not None
        assert relative_error(leaf.grad[[0, 2]], ours(gemm_of, bf16)["wgrad"]) < 0.02, gemm_of.name


# --- bad input -------------------------------------------------------------------------------------------------------


def gemm_of_ones(**changes: torch.Tensor) -> GroupedGemm:
    fitting = {"x": torch.ones(4, 32), "weight": torch.ones(1, 64, 32), "grad": torch.ones(4, 64)}
    return GroupedGemm(name="w1", **{**fitting, "offsets": torch.tensor([4]), **changes})


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (lambda: MX().cast(torch.ones(4, 48)), "has 48 values, not .* of 32; cut it to 32 or pad it with zeros to 64"),
        (lambda: gemm_of_ones(x=torch.ones(4, 16), weight=torch.ones(1, 64, 16)), "K of w1 has 16 .*; pad it with"),
        (lambda: gemm_of_ones(x=torch.full((4, 32), math.nan)), "x of w1 has 128 values"),
        (lambda: gemm_of_ones(grad=torch.full((4, 64), -math.inf)), "grad of w1 has 256 values"),
        (lambda: gemm_of_ones(x=torch.ones(0, 32), grad=torch.ones(0, 64), offsets=torch.tensor([0])), "M above 0"),
        (lambda: measure(torch.tensor([[math.nan, math.inf, *[1.0] * 62]]), MX()), "2 values of 64"),
        (lambda: measure(torch.zeros(1, 32), MX()), "no value other than zero"),
        (lambda: synthetic("cauchy", (2, 2)), "valid: "),  # type: ignore[arg-type]
        (lambda: synthetic("gaussian", (2, 2), outlier=-1.0), "valid: "),
    ],
)
def test_values_that_no_error_can_be_measured_of_are_named(refused: Callable[[], object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        refused()
