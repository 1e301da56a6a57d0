"""Rows that arrive quantised: casts and products are torchao's to the bit, and the experts' are TorchTitan's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype, to_mx
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization.float8 import _get_float8_grouped_experts_cls
from torchtitan.models.common.moe import GroupedExperts

from moelab.mxfp8 import prequantised
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.prequantised import QuantisedRows, gate_and_up, place, prequantised_experts
from moelab.mxfp8.quantise import E4M3, NotWholeBlocks, expand, quantise, quantise_fp8, quantise_mxfp8

RCEIL, EMULATED = ScaleCalculationMode.RCEIL, KernelPreference.EMULATED
GROUPS = [64, 0, 32, 96]  # rows of each expert, padded as a dispatcher pads them
ENDS = torch.tensor(GROUPS).cumsum(0).to(torch.int32)
DIM, HIDDEN = 64, 96
SETTINGS: dict[str, Any] = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": len(GROUPS)}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def every_bf16() -> Tensor:
    """All 65,536 BF16 numbers as the first of a row of 32, the others smaller and random."""
    largest = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    factors = torch.rand(31, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.stack([largest, *(largest * factor.bfloat16() for factor in factors)], 1)


def torchao_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """torchao's row-wise cast: data and what the row was multiplied by."""
    factor = tensor_to_scale(
        x, E4M3, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1, round_scales_to_power_of_2=True
    )
    return to_fp8_saturated(x.float() * factor, E4M3), factor


def test_mxfp8_rows_are_torchaos_for_every_largest_magnitude() -> None:
    x = every_bf16()
    data, scales = quantise_mxfp8(x)
    torchao_scales, torchao_data = to_mx(x, E4M3, 32, RCEIL)
    assert torch.equal(scales, bits(torchao_scales))
    assert torch.equal(bits(data), bits(torchao_data))
    finite = x.isfinite().all(1)
    expanded = to_dtype(torchao_data, torchao_scales, E4M3, 32, torch.bfloat16)
    # torchao's own expansion makes zeros of the smallest scale, 2^-127
    ordinary = finite & (scales[:, 0] > 0)
    assert torch.equal(expand(data, scales, "mxfp8")[ordinary], expanded[ordinary])


def test_fp8_rows_are_torchaos_for_every_largest_magnitude() -> None:
    x = every_bf16()
    data, scales = quantise_fp8(x)
    torchao_data, factor = torchao_fp8(x)
    finite = x.isfinite().all(1)
    assert torch.equal(scales[finite], factor[finite].reciprocal())
    assert torch.equal(bits(data)[finite], bits(torchao_data)[finite])
    assert expand(data, scales, "fp8")[~finite].isnan().all()


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_casts_compiled_are_the_same(precision: Any) -> None:
    x = every_bf16()[::7]
    eager = quantise(x, precision)
    compiled = torch.compile(quantise, fullgraph=True)(x, precision)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32), min_size=1, max_size=4
    ),
    precision=st.sampled_from(["mxfp8", "fp8"]),
)
def test_expanded_rows_are_near_and_quantised_again_the_same(rows: list[list[float]], precision: Any) -> None:
    x = torch.tensor(rows).bfloat16()
    x = torch.where(x.abs() < 2.0**-100, 0.0, x.float()).bfloat16()
    once = expand(*quantise(x, precision), precision)
    assert torch.equal(expand(*quantise(once, precision), precision), once)
    quantum = x.float().abs().amax(-1, keepdim=True) / 448 * 2 * 2.0**-9  # the smallest E4M3 step under the scale
    assert ((once.double() - x.double()).abs() <= torch.maximum(x.double().abs() / 16, quantum.double() / 2)).all()


def test_ragged_blocks_are_refused() -> None:
    with pytest.raises(NotWholeBlocks, match="48"):
        quantise_mxfp8(torch.zeros(2, 48, dtype=torch.bfloat16))


def operands(
    precision: Any, seed: int = 0, groups: list[int] = GROUPS
) -> tuple[QuantisedRows, Tensor, Tensor, Tensor, Tensor]:
    """Quantised rows, two weights and two upstream gradients."""
    torch.manual_seed(seed)
    x = torch.randn(sum(groups), DIM).bfloat16()
    x[60:64] = 0  # padding
    rows = QuantisedRows(place(x, len(x)).requires_grad_(), *quantise(x, precision))
    w1, w3 = ((torch.randn(len(groups), HIDDEN, DIM) / 8).bfloat16().requires_grad_() for _ in range(2))
    g1, g3 = (torch.randn(sum(groups), HIDDEN).bfloat16() for _ in range(2))
    return rows, w1, w3, g1, g3


def run(arithmetic: str, precision: Any, product: Callable[..., Any] = gate_and_up) -> list[Tensor]:
    """Both outputs and the gradients of the place and the weights."""
    rows, w1, w3, g1, g3 = operands(precision)
    gate, up = product(rows, w1, w3, ENDS, arithmetic)
    torch.autograd.backward((gate, up), (g1, g3))
    return [gate.detach(), up.detach(), *(tensor.grad for tensor in (rows.place_RD, w1, w3))]  # type: ignore[misc]


groups_of_any_size = st.lists(
    st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64]), st.integers(0, 100)), min_size=1, max_size=6
)


@given(groups_of_any_size.filter(any), st.integers(0, 2**31))
@example(GROUPS, 0)
@settings(max_examples=12, deadline=None)
def test_mxfp8_products_are_torchaos_of_an_mxtensor(groups: list[int], seed: int) -> None:
    rows, w1, w3, g1, g3 = operands("mxfp8", seed, groups)
    ends = torch.tensor(groups).cumsum(0).to(torch.int32)
    e8m0 = rows.scales_RS.view(torch.float8_e8m0fnu)
    x = MXTensor.from_qdata_and_scales(rows.data_RD, e8m0, orig_dtype=torch.bfloat16, block_size=32)
    common = {"block_size": 32, "out_dtype": torch.bfloat16, "scale_calculation_mode": RCEIL}
    with torch.no_grad():
        outputs = [
            torchao_mxfp8._compute_fwd(x, w.mT, padded_group_end_offsets=ends, kernel_preference=EMULATED, **common)
            for w in (w1, w3)
        ]
        dgrads = [
            torchao_mxfp8._compute_dgrad(g, w.mT, ends, kernel_preference=EMULATED, **common)
            for g, w in ((g1, w1), (g3, w3))
        ]
        wgrads = [
            torchao_mxfp8._compute_wgrad(
                g, x.dequantize(), ends, wgrad_with_hp=True, kernel_preference=EMULATED, **common
            ).mT
            for g in (g1, g3)
        ]
    expected = [*outputs, dgrads[0] + dgrads[1], *wgrads]
    gate, up = gate_and_up(rows, w1, w3, ends, "mxfp8_emulated")
    torch.autograd.backward((gate, up), (g1, g3))
    for ours, torchaos in zip((gate, up, rows.place_RD.grad, w1.grad, w3.grad), expected, strict=True):
        assert ours is not None
        assert torch.equal(ours, torchaos)


def test_fp8_products_match_torchaos_casts_in_float64() -> None:
    rows, w1, w3, g1, g3 = operands("fp8")

    def through(x: Tensor) -> Tensor:
        data, factor = torchao_fp8(x.detach())
        return data.double() / factor.double()

    x = rows.data_RD.double() * rows.scales_RS.double()
    expected: list[Tensor] = []
    for w in (w1, w3):
        expected.append(grouped(lambda e, r, w=w: x[r] @ through(w)[e].T))
    dgrads = [
        grouped(lambda e, r, w=w, g=g: through(g)[r] @ through(w.mT.contiguous())[e].T) for g, w in ((g1, w1), (g3, w3))
    ]
    wgrads = [torch.stack(list(each(lambda _, r, g=g: g[r].double().T @ x[r]))) for g in (g1, g3)]
    results = run("fp8_emulated", "fp8")
    for ours, exact in zip(results, [*expected, dgrads[0] + dgrads[1], *wgrads], strict=True):
        # one rounding to BF16 of a sum in float32; dgrad is the sum of two such
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=3e-2)


def each(product: Callable[[int, slice], Tensor]) -> list[Tensor]:
    return [product(e, slice(end - size, end)) for e, (size, end) in enumerate(zip(GROUPS, ENDS.tolist(), strict=True))]


def grouped(product: Callable[[int, slice], Tensor]) -> Tensor:
    return torch.cat(each(product))


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_products_traced_as_one_graph_are_the_same(precision: str) -> None:
    arithmetic = f"{precision}_emulated"
    eager = run(arithmetic, precision)
    traced = run(arithmetic, precision, torch.compile(gate_and_up, fullgraph=True, backend="aot_eager"))
    for a, b in zip(eager, traced, strict=True):
        assert torch.equal(a, b)


def test_scales_may_travel_in_any_dtype() -> None:
    rows, w1, w3, *_ = operands("mxfp8")
    data, scales = quantise_mxfp8(torch.randn(sum(GROUPS), 128).bfloat16())
    assert torch.equal(expand(data, scales.view(torch.int32), "mxfp8"), expand(data, scales, "mxfp8"))
    e8m0 = rows._replace(scales_RS=rows.scales_RS.view(torch.float8_e8m0fnu))
    assert torch.equal(
        gate_and_up(e8m0, w1, w3, ENDS, "mxfp8_emulated")[0], gate_and_up(rows, w1, w3, ENDS, "mxfp8_emulated")[0]
    )


def initialised(experts: Any) -> Any:
    torch.manual_seed(3)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.125)
    return experts


def trained(experts: Any, rows: Any, *, into: Tensor, scores: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of the rows (found in ``into``), of the weights and of the scores."""
    output = experts(rows, torch.tensor(GROUPS)) if scores is None else experts(rows, torch.tensor(GROUPS), scores)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).bfloat16())
    grads = [into.grad, *(parameter.grad for parameter in experts.parameters())]
    return [output.detach(), *grads, *([] if scores is None else [scores.grad])]  # type: ignore[list-item]


def test_mxfp8_experts_equal_titans_on_the_expanded_rows() -> None:
    """Rows expanded to BF16 quantise again to themselves, so TorchTitan's experts with torchao give the same bits."""
    settings_ = {**SETTINGS, "kernels": "emulated", "wgrad": "bf16"}
    rows, *_ = operands("mxfp8")
    experts = initialised(prequantised_experts(MXFP8Experts).Config(**settings_).build())
    ours = trained(experts, rows, into=rows.place_RD)
    x = expand(rows.data_RD, rows.scales_RS, "mxfp8").requires_grad_()
    theirs = trained(initialised(MXFP8Experts.Config(**settings_).build()), x, into=x)
    assert len(ours) == len(theirs) == 5
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_scores_multiply_the_hidden_activation() -> None:
    """In float64, score x expert(row) and its gradients; BF16 and MXFP8 roundings between."""
    rows, *_ = operands("mxfp8")
    scores = torch.rand(sum(GROUPS), requires_grad=True)
    experts = initialised(prequantised_experts(GroupedExperts).Config(**SETTINGS).build())
    output, *_, scores_grad = trained(experts, rows, into=rows.place_RD, scores=scores)
    x = expand(rows.data_RD, rows.scales_RS, "mxfp8").double()
    w1, w2, w3 = (dict(experts.named_parameters())[name].detach() for name in ("w1_EFD", "w2_EDF", "w3_EFD"))

    def through(w: Tensor) -> Tensor:
        return expand(*quantise_mxfp8(w.bfloat16()), "mxfp8").double()

    s = scores.detach().double().requires_grad_()

    def expert(e: int, r: slice) -> Tensor:
        hidden = F.silu(x[r] @ through(w1)[e].T) * (x[r] @ through(w3)[e].T)
        return s[r, None] * (hidden @ w2[e].bfloat16().double().T)

    exact = grouped(expert)
    exact.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).bfloat16().double())
    exact = exact.detach()
    assert float((output - exact).norm() / exact.norm()) < 0.01
    assert s.grad is not None
    assert float((scores_grad - s.grad).norm() / s.grad.norm()) < 0.01


def test_fp8_experts_unwrap_the_weights_that_torchao_wrapped() -> None:
    """torchao's FP8 experts wrap their weights; of the three products only w2's may go through the wrapper."""
    parent = _get_float8_grouped_experts_cls(GroupedExperts)
    experts = initialised(prequantised_experts(parent, "fp8").Config(**SETTINGS).build())
    products = []
    experts._grouped_mm = lambda **operands_: products.append(operands_) or operands_["A"] @ operands_["B_t"][0]
    rows, *_ = operands("fp8")
    experts(rows, torch.tensor(GROUPS)).sum().backward()
    (product,) = products
    assert type(product["B_t"]).__name__ == "Float8TrainingWeightWrapperTensor"
    assert rows.place_RD.grad is not None
    assert all(parameter.grad is not None for parameter in experts.parameters())


def test_native_mxfp8_hands_torchaos_kernels_what_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, *_ = operands("mxfp8")
    calls: list[tuple[str, Any]] = []

    def note(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **_: Any) -> Any:
            calls.append((name, args))
            return result(*args)

        return stand_in

    def cast(w: Tensor, block: int, mode: str) -> tuple[Tensor, Tensor]:
        assert (block, mode) == (32, "rceil")
        data, scales = quantise_mxfp8(w)
        return data, scales.view(torch.float8_e8m0fnu)

    def multiply(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
        x, w = (expand(d, s.view(torch.uint8), "mxfp8") for d, s in ((a, a_scales), (b.mT, b_scales)))
        return torch._grouped_mm(x, w.mT, offs=ENDS)

    monkeypatch.setattr(
        torchao_mxfp8, "mx_block_rearrange_2d_M_groups_cuda", note("rearrange rows", lambda s, _ends: s)
    )
    monkeypatch.setattr(torchao_mxfp8, "triton_mx_block_rearrange_per_group_3d", note("rearrange weights", lambda s: s))
    monkeypatch.setattr(torchao_mxfp8, "triton_to_mxfp8_dim0", note("cast", cast))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", note("multiply", multiply))
    monkeypatch.setattr(torchao_mxfp8, "_compute_dgrad_sm100", note("dgrad", torchao_mxfp8._compute_dgrad_emulated))
    native = run("mxfp8_native", "mxfp8")
    for ours, emulated in zip(native, run("mxfp8_emulated", "mxfp8"), strict=True):
        assert torch.equal(ours, emulated)
    once = ["rearrange rows", *["cast", "rearrange weights", "multiply"] * 2, "dgrad", "dgrad"]
    assert [name for name, _ in calls] == once
    assert torch.equal(bits(calls[0][1][0]), rows.scales_RS)  # as they arrived
    assert all(torch.equal(bits(args[0]), bits(rows.data_RD)) for name, args in calls if name == "multiply")


def test_native_fp8_multiplies_as_torchao_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels replaced by their definitions: operands go in as torchao's own grouped GEMM hands them over."""

    def columns(w: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
        assert (dtype, power_of_two) == (E4M3, True)
        data, factor = torchao_fp8(w.mT.contiguous())
        return data.mT, factor.mT  # (e, K, N), (e, 1, N)

    def rows_of(x: Tensor, _dtype: torch.dtype, _power_of_two: bool) -> tuple[Tensor, Tensor]:
        return torchao_fp8(x)

    def transposed(w: Tensor, _dtype: torch.dtype, _power_of_two: bool) -> tuple[Tensor, Tensor]:
        data, factor = torchao_fp8(w)
        return data.mT, factor.squeeze(-1)  # (e, N, K), (e, K)

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **options: Any) -> Tensor:
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0],), (b.shape[0], b.shape[2]))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        x, w = (a.float() * scale_a[:, None]).bfloat16(), (b.float() * scale_b[:, None]).bfloat16()
        return torch._grouped_mm(x, w, offs=offs)

    monkeypatch.setattr(prequantised, "triton_fp8_colwise_3d_scale_and_cast", columns)
    monkeypatch.setattr(prequantised, "triton_fp8_rowwise_2d_scale_and_cast", rows_of)
    monkeypatch.setattr(prequantised, "triton_fp8_rowwise_3d_transpose_rhs", transposed)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)
    for ours, emulated in zip(run("fp8_native", "fp8"), run("fp8_emulated", "fp8"), strict=True):
        torch.testing.assert_close(ours, emulated, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize(
    ("precision", "kernels", "cuda", "expected"),
    [
        ("mxfp8", "native", True, "mxfp8_native"),
        ("mxfp8", "emulated", True, "mxfp8_emulated"),
        ("fp8", "emulated", True, "fp8_native"),
        ("fp8", "emulated", False, "fp8_emulated"),
    ],
)
def test_arithmetic_follows_kernels_and_device(
    monkeypatch: pytest.MonkeyPatch, precision: Any, kernels: str, cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(prequantised, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: cuda)))
    assert prequantised.arithmetic_name(precision, kernels) == expected
    assert expected in prequantised.ARITHMETIC
