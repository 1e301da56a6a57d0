"""Casts against the OCP definition and torchao, error measures against torchao, and the laws that formats obey."""

from __future__ import annotations

import math
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
from moelab.micro import numerics
from moelab.micro.numerics import METHODS, PRODUCTS, GroupedGemm, measure, sqnr_db, synthetic
from moelab.mxfp8.formats import BF16, E2M1, E4M3, E5M2, FP8, MX, NVFP4, SCALINGS, Element

FORMATS = [MX(scaling=scaling, element=element) for scaling in SCALINGS for element in (E4M3, E5M2)]
BY_NAME = {method.name: method for method in METHODS}

# RCEIL takes a logarithm in float32, so an amax less than 4e-7 above 448 times a power of two would get a scale that is
# too small. BF16 has no such numbers, and what experts multiply is BF16.


@st.composite
def rows(draw: st.DrawFn, blocks: int = 3) -> torch.Tensor:
    """(1, 32 * blocks), BF16 values: each block near one magnitude, or over the whole range, or zero."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = []
    for _ in range(blocks):
        kind = draw(st.sampled_from(["near", "wide", "zero", "one"]))
        block = generator.standard_normal(32) * 2.0 ** draw(st.floats(-60, 60))
        if kind == "wide":
            block *= 2.0 ** generator.uniform(-30, 0, 32)
        block[{"zero": 0, "one": 1}.get(kind, 32) :] = 0  # all but so many
        made.append(block)
    return torch.tensor(np.concatenate(made)[None]).bfloat16().float()


# --- the definitions, written again in float64 -----------------------------------------------------------------------


def round_to_element(x: np.ndarray[Any, Any], element: Element) -> np.ndarray[Any, Any]:
    """Nearest element, ties to even, saturating (OCP OFP8 and MX v1.0, section 5.3)."""
    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, element.emin)
    step = 2.0 ** (exponent - element.mantissa_bits)
    return np.clip(np.rint(x / step) * step, -element.max, element.max)


def shared_exponent(amax: float, made: MX) -> int:
    """Exponent of a block's scale; MX v1.0 section 6.3 for floor, torchao's and NVIDIA's definitions for the others."""
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [1/2, 1)
    floor = exponent - 1
    emax = math.frexp(made.element.max)[1] - 1  # exponent of the element's largest power of two
    if made.scaling == "floor":
        return floor - emax
    if made.scaling == "ceil":
        return floor + (mantissa > 0.5) - emax
    if made.scaling == "even":  # a half rounds up in torchao's integer arithmetic
        grid = 2.0**made.element.mantissa_bits
        rounded = math.floor(2 * mantissa * grid + 0.5) / grid
        return floor + (rounded >= 2) - emax
    mantissa, exponent = math.frexp(amax / made.element.max)
    return exponent - 1 + (mantissa > 0.5)


@pytest.mark.parametrize("made", FORMATS, ids=lambda made: f"{made.scaling}-{made.element.name}")
@settings(max_examples=25, deadline=None)
@given(x=rows())
def test_mx_is_the_ocp_definition(made: MX, x: torch.Tensor) -> None:
    cast = made.cast(x)
    blocks = (each.double().numpy().reshape(-1, made.block) for each in (x, cast.values, cast.scale))
    for block, values, scales in zip(*blocks, strict=True):
        amax = float(np.abs(block).max())
        if not amax:  # whatever its scale
            assert not values.any()
            continue
        scale = 2.0 ** shared_exponent(amax, made)
        np.testing.assert_array_equal(scales, scale)
        np.testing.assert_array_equal(values, round_to_element(block / scale, made.element) * scale)


@settings(max_examples=40, deadline=None)
@given(x=rows())
@example(x=torch.zeros(1, 32))
@example(x=torch.tensor([[3.5] + [0.0] * 15 + [1.9375] + [0.0] * 15]))  # 248, between 240 and 256
def test_nvfp4_is_its_definition(x: torch.Tensor) -> None:
    """NVIDIA, arXiv 2509.25149, appendix B: two scales, each of them rounded."""
    amax = float(x.abs().max())
    cast = NVFP4().cast(x)
    assert cast.scale.isfinite().all()
    if amax < 2688 * 2.0**-121:
        assert not cast.values.any()
        return
    outer = amax / (448 * 6)
    blocks = (each.double().numpy().reshape(-1, 16) for each in (x, cast.values, cast.scale))
    for block, values, scales in zip(*blocks, strict=True):
        # Halfway between two scales FP32's rounding may choose either, as below for the numbers.
        quotient = np.abs(block).max() / 6 / outer * np.array([1 - 1e-6, 1 + 1e-6])
        either = np.clip(round_to_element(quotient, E4M3), 2.0**-6, 448)
        inner = either[[np.abs(outer * either - scales[0]).argmin()]]
        assert scales == pytest.approx(outer * inner[0], rel=1e-6)
        # A number within FP32's rounding of a tie may fall to either side of it.
        expected = [
            round_to_element(block * near / (outer * inner), E2M1) * outer * inner for near in (1, 1 - 1e-6, 1 + 1e-6)
        ]
        assert np.min([np.abs(one - values) for one in expected], axis=0).max() <= 1e-6 * amax


def test_fp8_has_one_power_of_two_for_each_row_or_one_scale_for_all() -> None:
    x = torch.tensor([[7.0, -3.0], [7.0 * 2.0**-30, 2.0**-30]])
    for per, scales, values in (
        ("row", [2.0**-6, 2.0**-36], x),
        ("tensor", [7 / 448] * 2, x * torch.tensor([[1], [0]])),
    ):
        cast = FP8(per=per).cast(x)
        torch.testing.assert_close(cast.scale, torch.tensor(scales)[:, None].expand(2, 2))
        torch.testing.assert_close(cast.values, values, rtol=2**-4, atol=0.0)


# --- measures, and data to take them of ------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [1.0, 4096.0])
@pytest.mark.parametrize("distribution", numerics.DISTRIBUTIONS)
def test_sqnr_is_torchaos_error_in_db(distribution: Any, outlier: float) -> None:
    x = synthetic(distribution, (64, 128), outlier=outlier)
    for made in (MX(), NVFP4(), FP8(per="tensor"), FP8(per="row"), BF16()):
        values = made.cast(x).values
        lost = measure(x, made)
        assert lost.sqnr_db == pytest.approx(compute_error(x.double(), values.double()).item(), abs=1e-9)
        by_block = numerics.block_sqnr_db(x, values)  # each block as a tensor of its own
        pairs = zip(x.reshape(-1, 32), values.reshape(-1, 32), strict=True)
        assert by_block.tolist() == pytest.approx([sqnr_db(exact, ours) for exact, ours in pairs])
        assert (
            (by_block < lost.worst_blocks_db).double().mean()
            < 0.05
            <= (by_block <= lost.worst_blocks_db).double().mean()
        )


def test_fractions_count_what_they_say_and_what_is_exact_has_no_error() -> None:
    x = torch.full((1, 32), 300.0)
    x[0, :3] = torch.tensor([500.0, 0.0, 2.0**-11])  # of scale 1: beyond 448, and below half of the least element, 2^-9
    lost = measure(x, MX(scaling="floor"))
    assert (lost.saturated_fraction, lost.underflow_fraction) == (1 / 32, 1 / 32)
    assert measure(x, MX(scaling="rceil")).saturated_fraction == 0
    assert measure(2.0 ** torch.arange(-8, 8).repeat(2)[None], MX()).sqnr_db == sqnr_db(x, x) == math.inf


def test_distributions_are_as_described() -> None:
    gaussian = synthetic("gaussian", (400, 256)).double()
    heavy = synthetic("student_t", (400, 256)).double()
    channels = synthetic("gaussian", (400, 256), outlier=100.0).double()
    assert gaussian.std().item() == pytest.approx(1, abs=0.02)
    # Student's t with 3 degrees of freedom, from its tables: quartiles at 0.7649, and P(|t| > 5.841) is 0.01.
    assert heavy.abs().median().item() == pytest.approx(0.7649, abs=0.02)
    assert (heavy.abs() > 5.841).double().mean().item() == pytest.approx(0.01, abs=0.0015)
    assert (channels.std(0) > 50).nonzero().flatten().tolist() == [32, 96, 160, 224]
    assert torch.equal(synthetic("student_t", (4, 4), seed=3), synthetic("student_t", (4, 4), seed=3))
    assert not torch.equal(synthetic("gaussian", (4, 4), seed=3), synthetic("gaussian", (4, 4), seed=4))


def relative_error(reference: torch.Tensor, value: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


# --- the three GEMMs -------------------------------------------------------------------------------------------------


def operands(sizes: tuple[int, ...], *, n: int = 64, k: int = 96) -> GroupedGemm:
    m = sum(sizes)
    made = (
        synthetic("student_t", (m, k), seed=1),
        synthetic("gaussian", (len(sizes), n, k), seed=2) / 8,
        synthetic("student_t", (m, n), seed=3) * 2.0**-20,
    )
    x, weight, grad = (tensor.bfloat16() for tensor in made)
    return GroupedGemm(name="w", x=x, weight=weight, grad=grad, offsets=torch.tensor(sizes).cumsum(0).int())


def ours(gemm: GroupedGemm, method: numerics.Method) -> dict[str, torch.Tensor]:
    parts = [
        (
            numerics.cast_product("output", x, weight, method),
            numerics.cast_product("dgrad", grad, weight.T, method),
            numerics.cast_product("wgrad", grad.T, x.T, method),
        )
        for x, weight, grad in gemm.groups()
    ]
    output, dgrad, wgrad = zip(*parts, strict=True)
    return {"output": torch.cat(output), "dgrad": torch.cat(dgrad), "wgrad": torch.stack(wgrad)}


def exact(gemm: GroupedGemm) -> dict[str, torch.Tensor]:
    x, weight, grad = gemm.x.double(), gemm.weight.double(), gemm.grad.double()
    return {"output": x @ weight[0].T, "dgrad": grad @ weight[0], "wgrad": (grad.T @ x)[None]}


@pytest.mark.parametrize("sizes", [(64, 32, 96), (40, 1, 87), (0, 128, 5)])
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
    dgrad, wgrad = torch.autograd.grad(output, (x, weight), gemm.grad)
    theirs = (output.detach(), dgrad, wgrad[[index for index, size in enumerate(sizes) if size]])
    for (product, mine), right in zip(ours(gemm, BY_NAME[name]).items(), theirs, strict=True):
        # one rounding to BF16 apart at most: sums run in another order
        assert relative_error(right, mine) < 2**-10, product
        assert (mine == right).double().mean() > 0.98, product


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_products_are_those_of_torchaos_linear(recipe: str) -> None:
    gemm = operands((96,))
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    linear = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(gemm.weight[0])
    linear = Float8Linear.from_float(linear, config)
    x = gemm.x.clone().requires_grad_()
    output = linear(x)
    dgrad, wgrad = torch.autograd.grad(output, (x, linear.weight), gemm.grad)
    mine, right = ours(gemm, BY_NAME[f"fp8_{recipe}"]), exact(gemm)
    for product, theirs in (("output", output.detach()), ("dgrad", dgrad), ("wgrad", wgrad[None])):
        # torchao's emulation multiplies in BF16, where not every scaled E4M3 number has a place
        assert relative_error(theirs, mine[product]) < min(2**-7, relative_error(right[product], mine[product]) / 2)


def test_rows_of_products_are_the_errors_of_the_products() -> None:
    gemm = operands((96,))
    table = numerics.compare_products([gemm])
    assert [(row.method, row.product) for row in table] == [(m.name, product) for m in METHODS for product in PRODUCTS]
    for row in table:
        product = ours(gemm, BY_NAME[row.method])[row.product]
        expected = compute_error(exact(gemm)[row.product], product.double()).item()
        assert row.sqnr_db == pytest.approx(expected, abs=1e-6), row


def test_the_operands_of_a_layer_give_autograds_gradients() -> None:
    gemm = operands((64, 0, 40), n=32, k=64)
    grad = synthetic("gaussian", (104, 64), seed=5).bfloat16()
    weights = gemm.weight, gemm.weight.transpose(-2, -1).contiguous(), gemm.weight.flip(1).contiguous()
    x, w1, w2, w3 = (tensor.double().requires_grad_() for tensor in (gemm.x, *weights))
    ends = gemm.offsets.tolist()
    parts = [
        (torch.nn.functional.silu(x[a:b] @ v1.T) * (x[a:b] @ v3.T)) @ v2.T
        for a, b, v1, v2, v3 in zip([0, *ends[:-1]], ends, w1, w2, w3, strict=True)
    ]
    wgrads = torch.autograd.grad(torch.cat(parts), (w1, w3, w2), grad.double())
    for made, wgrad in zip(numerics.layer_gemms(gemm.x, *weights, grad, gemm.offsets), wgrads, strict=True):
        assert relative_error(wgrad[[0, 2]], ours(made, BY_NAME["bf16"])["wgrad"]) < 0.02, made.name


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"x": torch.ones(4, 16), "weight": torch.ones(1, 64, 16)}, "K of w1 has 16 .*; pad it with"),
        ({"x": torch.full((4, 32), math.nan)}, "x of w1 has 128 values"),
        ({"grad": torch.full((4, 64), -math.inf)}, "grad of w1 has 256 values"),
        ({"x": torch.ones(0, 32), "grad": torch.ones(0, 64), "offsets": torch.tensor([0])}, "M above 0"),
    ],
)
def test_operands_without_a_product_are_named(changes: dict[str, torch.Tensor], told: str) -> None:
    fitting = {"x": torch.ones(4, 32), "weight": torch.ones(1, 64, 32), "grad": torch.ones(4, 64)}
    with pytest.raises(BadInput, match=told):
        GroupedGemm(name="w1", **{**fitting, "offsets": torch.tensor([4]), **changes})


def test_values_that_no_error_can_be_measured_of_are_named() -> None:
    with pytest.raises(BadInput, match=r"has 48 values, not .* of 32; cut it to 32 or pad it with zeros to 64"):
        MX().cast(torch.ones(4, 48))
    with pytest.raises(BadInput, match="2 values of 64"):
        measure(torch.tensor([[math.nan, math.inf, *[1.0] * 62]]), MX())
    with pytest.raises(BadInput, match="no value other than zero"):
        measure(torch.zeros(1, 32), MX())
    for distribution, outlier in (("cauchy", 1.0), ("gaussian", -1.0)):
        with pytest.raises(BadInput, match=r"is ('cauchy'|-1\.0); valid: "):
            synthetic(distribution, (2, 2), outlier=outlier)
