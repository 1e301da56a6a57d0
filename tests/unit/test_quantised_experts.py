"""Experts in 8 bits: their products are torchao's to the bit; test_emulation.py has the casts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.prototype.moe_training import mxfp8_grouped_mm as torchao_mxfp8
from torchao.prototype.moe_training.kernels.mxfp8 import quant as reference
from torchao.prototype.mx_formats import kernels as mx_kernels
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchtitan.models.common.moe import GroupedExperts

from moelab.mxfp8 import operators
from moelab.mxfp8.converter import MXFP8Experts
from moelab.mxfp8.experts import QuantisedRows, expert_rows, place, quantised_experts
from moelab.mxfp8.quantise import E4M3, expand, quantise

RCEIL = ScaleCalculationMode.RCEIL
GROUPS = [64, 0, 32, 96]  # rows of each expert, padded as a dispatcher pads them
ENDS = torch.tensor(GROUPS).cumsum(0).to(torch.int32)
DIM, HIDDEN = 64, 96


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def operands(precision: Any, arrived: bool, *, dim: int = DIM, hidden: int = HIDDEN, groups: list[int] = GROUPS) -> Any:
    """Rows (quantised, or BF16); where their gradient arrives, w1, w3, w2 and scores; an upstream gradient."""
    torch.manual_seed(0)
    x = torch.randn(sum(groups), dim).bfloat16()
    x[60:64] = 0  # padding
    rows: Any = x.requires_grad_()
    if arrived:
        rows = QuantisedRows(place(x, len(x)).detach().requires_grad_(), *quantise(x.detach(), precision))
    sizes = ((hidden, dim), (hidden, dim), (dim, hidden))
    weights = [(torch.randn(len(groups), *size) / 8).bfloat16().requires_grad_() for size in sizes]
    scores = torch.rand(len(x)).requires_grad_()
    return rows, [rows[0] if arrived else rows, *weights, scores], torch.randn(len(x), dim).bfloat16()


def run(arithmetic: str, arrived: bool = True, function: Callable[..., Any] = expert_rows) -> list[Tensor]:
    """The output and the gradients of the rows, of w1, w3 and w2, and of the scores."""
    rows, inputs, upstream = operands(arithmetic.partition("_")[0], arrived)
    output = function(rows, *inputs[1:4], ENDS, inputs[4], arithmetic)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def exact(precision: Any, arrived: bool) -> list[Tensor]:
    """As :func:`run`, in float64 from the rows as they came, nothing else quantised."""
    rows, (_, *others), upstream = operands(precision, arrived)
    came = expand(rows.data_RD, rows.scales_RS, precision) if arrived else rows
    inputs = x, w1, w3, w2, s = [tensor.detach().double().requires_grad_() for tensor in (came, *others)]
    of_experts = [slice(end - size, end) for size, end in zip(GROUPS, ENDS.tolist(), strict=True)]
    hidden = [F.silu(x[r] @ w1[e].T) * (x[r] @ w3[e].T) * s[r, None] for e, r in enumerate(of_experts)]
    output = torch.cat([h @ w.T for h, w in zip(hidden, w2, strict=True)])
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream.double())]


@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_experts_are_near_exact_ones_and_traced_as_one_graph_the_same(precision: str, arrived: bool) -> None:
    """E4M3 rounds by up to 1/16; over a sum of products of two such the errors are a few per cent."""
    right, errors = exact(precision, arrived), {}
    traced = torch.compile(expert_rows, fullgraph=True, backend="aot_eager")
    first = {"mxfp8": "mxfp8_emulated", "fp8": "fp8"}[precision]
    for arithmetic in (first, f"{first}_wgrad_{precision}"):
        ours = run(arithmetic, arrived)
        pairs = zip(ours, right, strict=True)
        errors[arithmetic] = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
        # Nothing at all would mean that nothing was quantised.
        assert all(0.01 < error < 0.09 for error in errors[arithmetic]), errors
        if arrived:
            for one, other in zip(ours, run(arithmetic, arrived, traced), strict=True):
                assert torch.equal(one, other)
    # For FP8, the scale of a row belongs to either factor of an outer product: its rows need no second rounding.
    more = 0.02 if precision == "fp8" else 0.09
    for bf16, low in zip(*(of[2:5] for of in errors.values()), strict=True):
        assert bf16 < low < bf16 + more, errors


@pytest.mark.parametrize(
    ("parent", "precision", "settings_", "arithmetic"),
    [
        (GroupedExperts, "fp8", {"wgrad": "bf16"}, "fp8"),
        (GroupedExperts, "fp8", {"wgrad": "fp8"}, "fp8_wgrad_fp8"),
        (MXFP8Experts, "mxfp8", {"kernels": "emulated", "wgrad": "bf16"}, "mxfp8_emulated"),
    ],
)
def test_modules_take_either_kind_of_row(parent: Any, precision: Any, settings_: Any, arithmetic: str) -> None:
    shape = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": len(GROUPS)}
    experts = quantised_experts(parent, precision).Config(**shape, **settings_).build()
    torch.manual_seed(3)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.125)
    weights = [getattr(experts, name).bfloat16() for name in ("w1_EFD", "w3_EFD", "w2_EDF")]
    for arrived in (True, False):
        rows, *_ = operands(precision, arrived)
        assert torch.equal(experts(rows, torch.tensor(GROUPS)), expert_rows(rows, *weights, ENDS, None, arithmetic))


def test_the_shapes_that_a_compiler_is_told_are_those_of_the_results() -> None:
    gate_up, rows, scores = (torch.randn(size) for size in ((96, 128), (96, 64), (96,)))
    gate_up, rows, ends = gate_up.bfloat16(), rows.bfloat16(), torch.tensor([32, 32, 96], dtype=torch.int32)
    eight, weights = rows.t().contiguous().to(E4M3), [torch.randn(3, size, 64).bfloat16() for size in (32, 96)]
    calls: dict[Any, list[tuple[Any, ...]]] = {
        operators.quantised_swiglu: [(gate_up, None, "fp8"), (gate_up, scores, "mxfp8")],
        operators.quantised_swiglu_backward: [(gate_up, rows, None, "mxfp8"), (gate_up, rows, scores, "fp8")],
        operators.fp8_rows: [(rows,)],
        operators.fp8_weights: [(weights, False), (weights, True)],
        operators.fp8_turned: [(rows, scores, ends)],
        operators.fp8_wgrad: [(eight, eight, torch.ones(3, 64), torch.ones(3, 64), ends)],
        operators.turned: [(eight,)],
    }
    for operator, arguments in calls.items():
        for one in arguments:
            torch.library.opcheck(operator, one, test_utils="test_faketensor")


@pytest.fixture
def sm100(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """torchao's kernels for SM100 replaced by torchao's own references in PyTorch.

    Returns:
        What ``torch._scaled_grouped_mm`` is given and gives back, in the order of the calls.
    """
    plain: dict[int, Tensor] = {}  # scales as they were before they were laid out in blocks
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def noted(layout: Callable[..., Any]) -> Callable[..., Tensor]:
        def lay_out(scales: Tensor, *ends: Tensor) -> Tensor:
            made = layout(bits(scales), *ends)
            blocked = made if isinstance(made, Tensor) else made[0]
            plain[id(blocked)] = bits(scales)
            return blocked

        return lay_out

    along_rows, of_weights = map(
        noted, (reference.torch_to_blocked_2d_M_groups, reference.torch_to_blocked_per_group_3d)
    )

    def cast(x: Tensor, block: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
        assert x.is_contiguous()
        scales, data = to_mx(x, E4M3, block, ScaleCalculationMode(scaling_mode))
        return data, scales

    def cast_and_block(x: Tensor, scaling_mode: str, offs: Tensor) -> tuple[Tensor, Tensor]:
        data, scales = cast(x, scaling_mode=scaling_mode)
        return data, along_rows(scales, offs)

    def cast_weights(w: Tensor, block: int, **how: Any) -> tuple[Tensor, Tensor]:
        data, scales = reference._mxfp8_quantize_reference_3d(w, block_size=block, blocked_scale_output=False, **how)
        return data, of_weights(scales.mT)

    def cast_columns(x: Tensor, rowwise: bool, colwise: bool, scaling_mode: str) -> tuple[Any, ...]:
        assert (rowwise, colwise) == (False, True)
        data, scales = cast(x.t().contiguous(), scaling_mode=scaling_mode)
        return None, data.t(), None, scales

    def multiply(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offs: Tensor, out_dtype: Any) -> Tensor:
        x, w = (expand(d, plain[id(s)], "mxfp8") for d, s in ((a, a_scales), (b.mT, b_scales)))
        product = torch._grouped_mm(x, w.mT, offs=offs, out_dtype=out_dtype)
        calls.append(((a, b, a_scales, b_scales, offs), product))
        return product

    for name, stand_in in {
        "mx_block_rearrange_2d_M_groups_cuda": along_rows,
        "triton_mx_block_rearrange_2d_K_groups": noted(reference.torch_to_blocked_2d_K_groups),
        "triton_mx_block_rearrange_per_group_3d": of_weights,
        "mxfp8_quantize_2d_1x32_cutedsl": cast_and_block,
        "triton_to_mxfp8_dim0": cast,
        "mxfp8_quantize_cuda_3d": cast_weights,
    }.items():
        monkeypatch.setattr(torchao_mxfp8, name, stand_in)
    monkeypatch.setattr(mx_kernels, "mxfp8_quantize_cuda", cast_columns)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)
    return calls


NATIVE: dict[str, Any] = {"groups": [128, 0, 256, 128], "dim": 128, "hidden": 256}
"""Rows as a dispatcher pads them for SM100; the blocks of torchao's reference are of 128 features."""


@pytest.mark.parametrize(
    ("arrived", "wgrad"), [(True, ""), (False, ""), (False, "_wgrad_mxfp8")], ids=["arrived", "bf16", "wgrad"]
)
def test_native_mxfp8_products_are_what_torchao_computes(sm100: Any, arrived: bool, wgrad: str) -> None:
    """Each product on SM100 gets the operands, with their layouts, that torchao's own code for SM100 hands over."""
    rows, inputs, upstream = operands("mxfp8", arrived, **NATIVE)
    _, w1, w3, w2, scores = inputs
    ends = torch.tensor(NATIVE["groups"]).cumsum(0).to(torch.int32)
    gradients = torch.autograd.grad(
        expert_rows(rows, w1, w3, w2, ends, scores, f"mxfp8_native{wgrad}"), inputs, upstream
    )
    ours = list(sm100)

    x = sent = (expand(rows.data_RD, rows.scales_RS, "mxfp8") if arrived else rows).detach()
    if arrived:
        e8m0 = rows.scales_RS.view(torch.float8_e8m0fnu)
        sent = MXTensor.from_qdata_and_scales(rows.data_RD, e8m0, orig_dtype=torch.bfloat16, block_size=32)
        sent.scales = sent.scale  # torchao 0.18 looks for them under a name that they do not have
    gate_up, both = ours[0][1], torch.cat([w1, w3], 1).detach()
    h_grad, (hidden, out) = ours[2][1], (operators.swiglu(gate_up, scores.detach()), w2.detach())
    gate_up_grad, again, _ = operators.swiglu_backward(gate_up, h_grad, scores.detach())
    assert torch.equal(again, hidden)
    how: Any = {"block_size": 32, "out_dtype": torch.bfloat16, "scale_calculation_mode": RCEIL}
    sm100.clear()
    for left, weight in ((sent, both), (hidden, out)):
        torchao_mxfp8._compute_fwd_sm100(left, weight.mT, ends, **how)
    for left, weight in ((upstream, out), (gate_up_grad, both)):
        torchao_mxfp8._compute_dgrad_sm100(left, weight.mT, ends, **how)
    pairs = [(half.contiguous(), x) for half in gate_up_grad.chunk(2, 1)] + [(upstream, hidden)]
    wgrads = [torchao_mxfp8._compute_wgrad_sm100(*pair, ends, wgrad_with_hp=not wgrad, **how) for pair in pairs]
    assert len(ours) == len(sm100) == (7 if wgrad else 4)
    for (mine, result), (torchaos, right) in zip(ours, sm100, strict=True):
        assert torch.equal(result, right)
        for a, b in zip(mine[:2], torchaos[:2], strict=True):
            assert (a.shape, a.stride()) == (b.shape, b.stride())
            assert torch.equal(bits(a), bits(b))
        for a, b in zip(mine[2:4], torchaos[2:4], strict=True):
            assert torch.equal(bits(a).flatten(), bits(b).flatten())
    for gradient, right in zip(gradients[1:4], wgrads, strict=True):
        assert torch.equal(gradient, right.mT)

    if wgrad:  # the shapes that a compiler is told are those of the results
        torch.library.opcheck(
            operators.native_mxfp8_wgrads, (gate_up_grad, x, ends, 2), test_utils=("test_schema", "test_faketensor")
        )
    emulated = torch.autograd.grad(
        expert_rows(rows, w1, w3, w2, ends, scores, f"mxfp8_emulated{wgrad}"), inputs, upstream
    )
    # Of the rows, one sum there, two rounded ones here.
    assert float((gradients[0] - emulated[0]).norm() / emulated[0].norm()) < 2**-8
    for gradient, right in zip(gradients[1:], emulated[1:], strict=True):
        assert torch.equal(gradient, right)


@pytest.mark.parametrize("arithmetic", ["mxfp8_emulated", "mxfp8_emulated_wgrad_mxfp8", "fp8", "fp8_wgrad_fp8"])
def test_a_nan_in_padding_stays_in_its_row_but_for_its_experts_weights(arithmetic: str) -> None:
    """So dispatchers have to fill the padding of rows and of their gradients with zeros, and do."""
    rows, inputs, upstream = operands(arithmetic.partition("_")[0], False)
    results = []
    for poison in (0.0, float("nan")):
        upstream[62] = poison  # padding of the first expert
        output = expert_rows(rows, *inputs[1:4], ENDS, inputs[4], arithmetic)
        results.append(torch.autograd.grad(output, inputs, upstream))
    for clean, poisoned in zip(*results, strict=True):
        # In the first dimension rows or experts.
        poisonable = torch.arange(len(clean)) == (62 if len(clean) == sum(GROUPS) else 0)
        assert torch.equal(clean[~poisonable], poisoned[~poisonable])
        assert clean.isfinite().all()
        assert poisoned[poisonable].isnan().any()


def test_native_fp8_products_take_operands_as_torchao_hands_them_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch._scaled_grouped_mm`` replaced by its definition, for tensors that say that they are on CUDA."""
    products = []

    def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, **options: Any) -> Tensor:
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        assert a.dtype == b.dtype == E4M3
        assert a.is_contiguous()
        assert b.mT.is_contiguous()  # both operands lie along what is summed over, as Hopper's FP8 products need
        products.append(b.ndim)
        if b.ndim == 3:
            x, w = (a.float() * scale_a[:, None]).bfloat16(), (b.float() * scale_b[:, None]).bfloat16()
            return torch._grouped_mm(x, w, offs=offs)
        x, w = (operand.float().bfloat16() for operand in (a, b))
        sums = torch._grouped_mm(x.t().contiguous().t(), w.contiguous(), offs=offs)
        return (sums.float() * scale_a.view(len(offs), -1, 1) * scale_b.view(len(offs), 1, -1)).bfloat16()

    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)
    emulated = run("fp8_wgrad_fp8")
    assert not products
    monkeypatch.setattr(operators, "on_cuda", lambda _: True)
    for ours, right in zip(run("fp8_wgrad_fp8"), emulated, strict=True):
        torch.testing.assert_close(ours, right, rtol=2**-6, atol=1e-2)
    assert products == [3, 3, 3, 3, 2, 2, 2]  # w1 beside w3 are one product, but for their weight gradients


INTERPRETED = """
import torch
from moelab.mxfp8 import operators as defined
from moelab.mxfp8 import operators_cuda as kernels

def powers(*shape):
    return (torch.randint(0, 2, shape) * 2 - 1) * 2.0 ** torch.randint(-3, 4, shape)

def four_bits(*shape):
    return (torch.randint(8, 16, shape) * powers(*shape)).bfloat16()

def compare(ours, right):
    for one, other in zip(ours, right, strict=True):
        one, other = one.float(), other.float()
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))

torch.manual_seed(0)
ends = torch.tensor([64, 64, 96, 192], dtype=torch.int32)
weights = [four_bits(3, 70, 150), four_bits(3, 40, 150)]
x, factors = four_bits(192, 150), 2.0 ** torch.randint(-3, 3, (192,)).float()
compare(kernels.fp8_turned(x, factors, ends), defined.fp8_turned(x, factors, ends))
compare([kernels.turned(x.to(torch.float8_e4m3fn))], [defined.turned(x.to(torch.float8_e4m3fn))])
x[1] = 0
compare(kernels.fp8_rows(x), defined.fp8_rows(x))
for transposed in (False, True):
    compare(kernels.fp8_weights(weights, transposed), defined.fp8_weights(weights, transposed))
for F in (96, 64):  # one of them no power of two
    gate = torch.randint(8, 16, (9, F)) * 4.0  # above 17 silu is the identity in FP32
    gate_up, grad = torch.cat([gate, powers(9, F)], 1).bfloat16(), powers(9, F).bfloat16()
    gate_up[3] = grad[3] = 0
    for scores in (None, powers(9).float()):
        for format_ in ("fp8", "mxfp8"):
            of = gate_up, scores, format_
            compare(kernels.quantised_swiglu(*of), defined.quantised_swiglu(*of))
            of = gate_up, grad, scores, format_
            compare(kernels.quantised_swiglu_backward(*of), defined.quantised_swiglu_backward(*of))
            gate_up[5, -1] = torch.nan  # of one row: its scale says so, and no other row changes
            found, right = (module.quantised_swiglu_backward(*of) for module in (kernels, defined))
            compare(found[2:3], right[2:3])
            rows = torch.arange(9) != 5
            compare([one[rows] for one in found if len(one)], [one[rows] for one in right if len(one)])
            gate_up[5, -1] = 1
"""


def test_triton_kernels_interpreted_on_a_cpu_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton's interpreter neither rounds to BF16 and E4M3 as a GPU does nor knows E4M3's NaN: all results are numbers
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True)
