"""Casts and the emulated grouped GEMM (``mxfp8_emulated_rceil``) are torchao 0.18's to the bit; no other reference."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.common import KernelPreference

from moelab.mxfp8.dispatch import padded_rows, places
from moelab.mxfp8.experts import grouped_mm
from moelab.mxfp8.quantise import (
    NVFP4_LEAST_AMAX,
    NotWholeBlocks,
    expand,
    fake_quantise_columns,
    fake_quantise_nvfp4,
    fake_quantise_rows,
    quantise,
)
from moelab.titan import cpu

E4M3, BLOCK, RCEIL = torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL
GroupedMM = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens, weights (G, N, K) and group ends to an output."""

sizes = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64]), st.integers(0, 100))
patterns = st.lists(sizes, min_size=1, max_size=6).filter(any)
whole_blocks = st.lists(st.integers(0, 3).map(lambda n: 32 * n), min_size=1, max_size=6).filter(any)
seeds = st.integers(0, 2**31)


def assert_same_bits(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Equal bit for bit, the sign of zeros included; of a NaN only that it is one."""
    assert ours.dtype is reference.dtype is torch.bfloat16
    assert ours.shape == reference.shape
    assert torch.equal(ours.isnan(), reference.isnan())
    numbers = ~ours.isnan()
    assert torch.equal(ours[numbers].view(torch.int16), reference[numbers].view(torch.int16))


def any_bits(*shape: int, seed: int) -> torch.Tensor:
    """BF16 numbers of all kinds and magnitudes, those along the last dimension within 2^20 of each other."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=random)

    exponent = (draw(0, 256, *shape[:-1], 1) - draw(0, 20, *shape)).clamp(0, 255)
    return (draw(0, 2, *shape) << 15 | exponent << 7 | draw(0, 128, *shape)).to(torch.int16).view(torch.bfloat16)


def every_amax() -> torch.Tensor:
    """All 65,536 BF16 numbers, each with 31 others that are not larger."""
    largest = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    factors = torch.rand(2**16, 31, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.cat([largest[:, None], (largest[:, None].float() * factors).bfloat16()], 1)


# --- casts -----------------------------------------------------------------------------------------------------------


def expanded_as_torchao(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Operands as torchao's emulated GEMM expands them."""
    blocks = data.unflatten(-1, (-1, BLOCK)).to(torch.bfloat16)
    return (blocks * scale.unsqueeze(-1).to(torch.bfloat16)).flatten(-2)


def assert_casts_are_torchaos(x: torch.Tensor) -> None:
    casts = (to_mx(each, E4M3, BLOCK, RCEIL) for each in (x, x.transpose(-2, -1).contiguous()))
    rows, columns = (expanded_as_torchao(data, scale) for scale, data in casts)
    assert_same_bits(fake_quantise_rows(x), rows)
    assert_same_bits(fake_quantise_columns(x), columns)


def test_casts_are_torchaos_for_every_largest_magnitude() -> None:
    x = every_amax()
    assert_casts_are_torchaos(x)
    data, scales = quantise(x, "mxfp8")
    torchao_scales, torchao_data = to_mx(x, E4M3, BLOCK, RCEIL)
    assert torch.equal(scales, torchao_scales.view(torch.uint8))
    assert torch.equal(data.view(torch.uint8), torchao_data.view(torch.uint8))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), seeds)
@settings(max_examples=20, deadline=None)
def test_casts_are_torchaos_for_any_bits(batch: int, rows: int, columns: int, seed: int) -> None:
    assert_casts_are_torchaos(any_bits(batch, BLOCK * rows, BLOCK * columns, seed=seed))


def test_fp8_rows_are_torchaos_for_every_largest_magnitude() -> None:
    x = every_amax()
    data, scales = quantise(x, "fp8")
    how: dict[str, Any] = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
    factor = tensor_to_scale(x, E4M3, **how, round_scales_to_power_of_2=True)
    torchao_data = to_fp8_saturated(x.float() * factor, E4M3)
    finite = x.isfinite().all(1)
    assert torch.equal(scales[finite], factor[finite].reciprocal())
    assert torch.equal(data[finite].view(torch.uint8), torchao_data[finite].view(torch.uint8))
    expanded = expand(data, scales, "fp8")
    assert torch.equal(expanded[finite], (torchao_data.float() / factor)[finite].bfloat16())
    assert expanded[~finite].isnan().all()


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_casts_compiled_are_the_same(precision: Any) -> None:
    x = every_amax()[::7]
    compiled = torch.compile(quantise, fullgraph=True)(x, precision)
    for a, b in zip(quantise(x, precision), compiled, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_expanded_rows_are_torchaos_for_every_scale_and_element() -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(E4M3)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e8m0fnu)
    assert_same_bits(expand(data, scale, "mxfp8"), expanded_as_torchao(data, scale))


# --- products --------------------------------------------------------------------------------------------------------


def torchao_grouped_mm(*, wgrad: str, pad_inside: bool) -> GroupedMM:
    return lambda x, w, ends: torchao._to_mxfp8_then_scaled_grouped_mm(
        x,
        w.mT,
        ends,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=wgrad == "bf16",
        scale_calculation_mode=RCEIL,
        pad_token_groups_for_grouped_mm=pad_inside,
    )


def our_grouped_mm(*, wgrad: str = "mxfp8", pad_inside: bool = False, precision: str = "mxfp8") -> GroupedMM:
    """With ``pad_inside`` as MXFP8 experts pad on a CPU; a ``wgrad`` that is not in BF16 is in the precision."""
    arithmetic = f"{precision}_emulated" + ("" if wgrad == "bf16" else f"_wgrad_{precision}")

    def multiply(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if not pad_inside:
            return grouped_mm(x, w.mT, ends, arithmetic)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        rows = padded_rows(counts, BLOCK)
        place = places(counts[None], rows, len(x))
        padded = x.new_zeros((len(x) + 2 * BLOCK * len(rows)) // BLOCK * BLOCK, x.shape[1]).index_copy(0, place, x)
        return grouped_mm(padded, w.mT, rows.cumsum(0).int(), arithmetic).index_select(0, place)

    return multiply


def run(
    product: GroupedMM, x: torch.Tensor, weight_GNK: torch.Tensor, upstream: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Output and both gradients."""
    x, weight_GNK = x.detach().requires_grad_(), weight_GNK.detach().requires_grad_()
    output = product(x, weight_GNK, ends)
    return output.detach(), *torch.autograd.grad(output, (x, weight_GNK), upstream)


def operands(groups: list[int], K: int = 64, N: int = 96, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Tokens, weights (G, N, K), upstream gradient with small numbers as gradients have, group ends."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(groups), K, generator=random).bfloat16()
    weight_GNK = (torch.randn(len(groups), N, K, generator=random) / 8).bfloat16()
    upstream = (torch.randn(sum(groups), N, generator=random) * 1e-4).bfloat16()
    return x, weight_GNK, upstream, torch.tensor(groups).cumsum(0).to(torch.int32)


def assert_runs_equal(ours: GroupedMM, reference: GroupedMM, given_operands: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(run(ours, *given_operands), run(reference, *given_operands), strict=True):
        assert_same_bits(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.fixture(params=["PyTorch's product", "FP32 product"])
def cpu_product(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways in which BF16 is multiplied on a CPU: PyTorch's, and that of ``moelab.titan.cpu``."""
    if request.param == "PyTorch's product":
        yield
        return
    library = cpu.use_fp32_products_for_bf16.__wrapped__()
    yield
    library._destroy()


@pytest.mark.usefixtures("cpu_product")
@pytest.mark.parametrize("pad_inside", [True, False])
@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_output_and_gradients_are_torchaos_to_the_bit(wgrad: str, pad_inside: bool) -> None:
    how: dict[str, Any] = {"wgrad": wgrad, "pad_inside": pad_inside}
    groups_of = patterns if pad_inside or wgrad == "bf16" else whole_blocks

    @given(groups_of, st.sampled_from([32, 96]), st.sampled_from([32, 64]), seeds)
    @settings(max_examples=12, deadline=None)
    def equal(groups: list[int], K: int, N: int, seed: int) -> None:
        assert_runs_equal(our_grouped_mm(**how), torchao_grouped_mm(**how), operands(groups, K, N, seed=seed))

    equal()


@pytest.mark.parametrize("wgrad", ["mxfp8", "bf16"])
def test_compiles_as_a_full_graph_with_the_same_bits(wgrad: str) -> None:
    how: dict[str, Any] = {"wgrad": wgrad, "pad_inside": True}
    compiled = torch.compile(our_grouped_mm(**how), fullgraph=True, dynamic=True)
    for groups in ([37, 0, 1, 64], [1, 90, 3, 20]):
        assert_runs_equal(compiled, torchao_grouped_mm(**how), operands(groups))


@pytest.mark.parametrize(
    ("groups", "K", "N", "message"),
    [
        ([32, 32], 48, 32, "inner dimension K has 48"),
        ([32, 32], 32, 40, "outer dimension N has 40"),
        ([37, 64], 32, 32, "token axis has 101"),
    ],
)
def test_dimensions_that_are_no_whole_blocks_are_named(groups: list[int], K: int, N: int, message: str) -> None:
    with pytest.raises(NotWholeBlocks, match=message):
        run(our_grouped_mm(), *operands(groups, K, N))


INTERPRETED = """
import torch
from moelab.mxfp8 import fake_quantise_cuda, quantise
torch.manual_seed(0)
for shape in [(96, 160), (3, 64, 32)]:
    exponents = torch.randint(30, 225, shape) - torch.randint(0, 20, shape)
    x = torch.randint(0, 2, shape) << 15 | exponents << 7 | torch.randint(0, 128, shape)
    x = x.to(torch.int16).view(torch.bfloat16)
    x[..., 0, 0], x[..., 1, 1], x[..., 2, :] = torch.nan, torch.inf, 0
    for operator in ("fake_quantise_rows", "fake_quantise_columns"):
        ours, reference = (getattr(module, operator)(x) for module in (fake_quantise_cuda, quantise))
        assert ours.shape == reference.shape
        numbers = ~reference.isnan()
        assert torch.equal(ours.isnan(), reference.isnan())
        assert torch.equal(ours[numbers].view(torch.int16), reference[numbers].view(torch.int16))
"""


def test_triton_kernel_interpreted_on_a_cpu_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter truncates where a GPU rounds to BF16, so no block here has numbers that BF16 cannot hold.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True)


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def torchao_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """``x``, one tensor of a single FP32 scale, through torchao's NVFP4 and back to BF16."""
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())).dequantize(torch.bfloat16)


def rows_of(ends: torch.Tensor) -> list[slice]:
    """Each expert's rows."""
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends.tolist()])]


def assert_nvfp4_is_torchaos(x: torch.Tensor, ends: torch.Tensor) -> None:
    parts = [x[rows].contiguous() for rows in rows_of(ends) if rows.start < rows.stop]
    assert_same_bits(fake_quantise_nvfp4(x, ends), torch.cat([torchao_nvfp4(part) for part in parts]))
    columns = torch.cat([torchao_nvfp4(part.t().contiguous()) for part in parts], dim=1)
    assert_same_bits(fake_quantise_nvfp4(x, ends, by_columns=True), columns)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any), st.integers(1, 4), seeds)
@settings(max_examples=40, deadline=None)
def test_nvfp4_is_torchaos_for_any_bits(groups: list[int], columns: int, seed: int) -> None:
    """Magnitudes over 2^20 within a row, and from BF16's largest down to where torchao divides by zero."""
    x = any_bits(16 * sum(groups), 16 * columns, seed=seed)
    ends = torch.tensor(groups).cumsum(0).mul(16).to(torch.int32)
    for rows in rows_of(ends):  # one number keeps each expert in the range in which torchao has an answer
        x[rows][:1, 0] = 2 * NVFP4_LEAST_AMAX
    assert_nvfp4_is_torchaos(x, ends)


def test_nvfp4_rounds_ties_as_torchao_and_to_the_even_neighbour() -> None:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = (grid[1:] + grid[:-1]) / 2
    # The largest magnitude, 2688, makes the FP32 scale 1, and a block's largest, 6, its E4M3 scale 1.
    x = torch.zeros(16, 32)
    x[0, 16], x[1:, 0], x[1:, 1:8], x[1:, 8:15] = 2688, 6, ties, -ties
    x[1:, 15] = -6
    x, ends = x.bfloat16(), torch.tensor([16], dtype=torch.int32)
    assert_nvfp4_is_torchaos(x, ends)
    assert fake_quantise_nvfp4(x, ends)[1, 1:8].tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_nvfp4_of_special_values() -> None:
    ends = torch.tensor([16, 32, 48, 64, 80, 96], dtype=torch.int32)
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[20, 3], x[40, 5], x[50, 6] = torch.nan, torch.inf, -torch.inf
    x[64:80] *= 2.0**-30  # small beside a number that sets the second scale: subnormal scales are raised to 2^-6
    x[64, 0] = 1.0
    x[80:96, 16:] *= 0.0  # blocks of zeros of both signs
    assert_nvfp4_is_torchaos(x, ends)
    rows = fake_quantise_nvfp4(x, ends)
    assert [bool(part.isnan().all()) for part in rows.split(16)] == [False, True, True, True, False, False]
    # Where torchao divides by zero, an expert's zeros stay zeros: its weight gradients are zero, not NaN.
    for least in (0.0, NVFP4_LEAST_AMAX / 2):
        x[:16] = torch.tensor(least).bfloat16()
        x[0, 0] *= -1
        assert fake_quantise_nvfp4(x, ends)[:16].view(torch.int16).unique().tolist() == [-(2**15), 0]
    assert torchao_nvfp4(torch.zeros(16, 16).bfloat16()).isnan().all()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), st.sampled_from(["mxfp8", "bf16"]), seeds)
@settings(max_examples=15, deadline=None)
def test_nvfp4_products_are_those_of_torchaos_operands(groups: list[int], wgrad: str, seed: int) -> None:
    x, weight_GNK, upstream, ends = operands(groups, K=48, N=32, seed=seed)
    product = our_grouped_mm(wgrad=wgrad, pad_inside=True, precision="nvfp4")
    output, dgrad, wgrads = run(product, x, weight_GNK, upstream, ends)
    cast = torchao_nvfp4 if wgrad == "mxfp8" else (lambda exact: exact)
    for rows, weight, wgrad_NK in zip(rows_of(ends), weight_GNK, wgrads, strict=True):
        if rows.stop == rows.start:
            assert not wgrad_NK.any()
            continue
        padding = (0, 0, 0, (rows.start - rows.stop) % 16)
        mine, grad = (torch.nn.functional.pad(part[rows], padding) for part in (x, upstream))
        for got, left, right in (
            (output[rows], torchao_nvfp4(mine), torchao_nvfp4(weight)),
            (dgrad[rows], torchao_nvfp4(grad), torchao_nvfp4(weight.T.contiguous())),
            (wgrad_NK, cast(grad.T.contiguous()), cast(mine.T.contiguous())),
        ):
            expected = left.float() @ right.float().T
            # The operands are the same to the bit; sums of FP32 in another order may round to the next BF16 number.
            tolerance = {"rtol": 2**-8, "atol": 1e-6 * expected.abs().max()}
            torch.testing.assert_close(got.float(), expected[: len(got)], **tolerance)
