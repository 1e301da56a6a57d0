"""Figures of MXFP8 against the tables that they draw, notebook 01's path against torchao, the explorer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from figure_support import assert_says, traces
from torchao.prototype.moe_training import ep, mxfp8_grouped_mm

from moelab.errors import BadInput
from moelab.micro import numerics
from moelab.micro.numerics import GroupedGemm, block_sqnr_db, first_numbers, measure, synthetic
from moelab.mxfp8.formats import E4M3, E5M2, ELEMENTS, MX, NVFP4, SCALINGS
from moelab.viz import mxfp8 as viz
from moelab.viz.mxfp8 import Choice

ROOT = Path(__file__).parents[2]
TENSORS = {
    "easy": synthetic("gaussian", (64, 256)),
    "hard": synthetic("gaussian", (64, 256), outlier=2.0**14),
    "gradient": synthetic("student_t", (64, 256)),
}

# Stored numbers


@pytest.mark.parametrize(
    "made", [MX(), MX(scaling="floor"), MX(element=E5M2), NVFP4()], ids=["rceil", "floor", "e5m2", "nvfp4"]
)
def test_the_parts_of_stored_numbers_make_their_values(made: MX | NVFP4) -> None:
    """The bits are read again by the definition of such numbers and with nothing of torchao's."""
    stored, read_back = first_numbers(TENSORS["gradient"], made), made.cast(TENSORS["gradient"]).values[0, :32]
    assert list(stored.read_back) == read_back.double().tolist()
    assert stored.sqnr_db == pytest.approx(numerics.sqnr_db(TENSORS["gradient"][0, :32], read_back))
    width = 4 if isinstance(made, NVFP4) else 8
    for place, written in enumerate(stored.to_frame()["sign exponent mantissa"]):
        sign, exponent, mantissa = written.split()
        assert (len(exponent), len(mantissa)) == (width - 1 - made.element.mantissa_bits, made.element.mantissa_bits)
        assert int(sign + exponent + mantissa, 2) == stored.codes[place]
        bias, fraction, power = 2 ** (len(exponent) - 1) - 1, int(mantissa, 2) / 2 ** len(mantissa), int(exponent, 2)
        number = (fraction + (power > 0)) * 2.0 ** (max(power, 1) - bias) * (-1) ** int(sign)
        assert stored.read_back[place] == pytest.approx(number * stored.scales[place // made.block], rel=1e-6)
    assert (len(stored.scales), stored.stored_bytes) == ((2, 18) if isinstance(made, NVFP4) else (1, 33))


@pytest.mark.parametrize("values", [torch.ones(31), torch.full((32,), math.nan)])
def test_what_is_no_block_is_refused(values: torch.Tensor) -> None:
    zero = torch.ones(32).index_fill(0, torch.tensor([3]), 0)
    assert first_numbers(zero, MX()).errors == (0.0,) * 32  # a zero has no error
    with pytest.raises(BadInput):
        first_numbers(values, MX())


def test_the_figure_shows_the_numbers_of_both_formats_and_their_largest_rounding_errors() -> None:
    values = torch.ones(32)
    values[5] = 1 + 2.0**-4  # halfway between two numbers of E4M3
    values[0], values[16] = 6.0, 6.0
    stored = [first_numbers(values, MX()), first_numbers(values * 448, NVFP4())]
    figure = viz.stored_figure(stored, source="here")
    exact, *drawn = figure.data
    assert tuple(exact.y) == stored[0].values
    for one, (read_back, error) in zip(stored, (drawn[:2], drawn[2:]), strict=True):
        assert (tuple(read_back.y), tuple(error.y)) == (one.read_back, tuple(100 * each for each in one.errors))
        assert_says(figure, f"{one.name} ({one.stored_bytes} bytes)")
    halfway = torch.full((16,), 1.25)
    halfway[0] = 6.0
    bands = max(map(abs, stored[0].errors)), abs(NVFP4().cast(halfway).values[1].item() - 1.25) / 1.25
    shaded = [(shape.y0, shape.y1) for shape in figure.layout.shapes]
    assert shaded == [pytest.approx((-100 * band, 100 * band)) for band in bands]
    assert_says(figure, "±5.88 % in E4M3")


def test_the_largest_number_of_a_block_is_cut_by_floor_and_even_alone() -> None:
    amax, lost = numerics.largest_number_errors()
    below = {scaling for scaling in SCALINGS if min(lost[scaling]) < -(2.0**-4)}
    assert below == {"floor", "even"}
    assert all(len({lost[scaling][n] for scaling in SCALINGS}) == 1 for n, each in enumerate(amax) if each <= 1.75)
    assert 100 * min(lost["rceil"]) == pytest.approx(-E4M3.rounding_percent), "the worst rounding, as the subtitle has"
    figure = viz.largest_number_error(amax, lost)
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        name.upper(): [round(100 * one, 3) for one in each] for name, each in lost.items()
    }
    assert_says(figure, "FLOOR and EVEN clip", "RCEIL and CEIL never do", f"±{E4M3.rounding_percent:.2f} % (1/17)")


# Tables and their figures


def test_rows_are_the_measures_and_every_finite_number_is_drawn() -> None:
    tensors = TENSORS | {"bf16 already": TENSORS["easy"].bfloat16().float()}
    rows = numerics.compare_methods(tensors, gradients=["gradient"])
    assert len(rows) == 28  # seven each: MXFP8 casts a tensor alike, whatever it does with wgrad
    for row in rows:
        method = next(method for method in numerics.STORED_METHODS if method.name == row.method)
        made, tensor = method.formats("dgrad" if row.data == "gradient" else "output")[0], tensors[row.data]
        assert vars(measure(tensor, made)).items() <= vars(row).items()
        blocks = block_sqnr_db(tensor, made.cast(tensor).values)
        assert 0.03 <= (blocks < row.worst_blocks_db).double().mean() <= 0.05 or math.isinf(row.worst_blocks_db)
    figure = viz.method_errors(rows)
    numbers = {"x": [row.sqnr_db for row in rows], "x3": [100 * row.underflow_fraction for row in rows]}
    for axis, values in numbers.items():
        drawn = [value for trace in traces(figure, xaxis=axis) for value in trace.x]
        assert sorted(drawn) == pytest.approx(sorted(filter(math.isfinite, values)))
    assert sum(map(math.isfinite, numbers["x"])) == len(rows) - 1  # BF16 where the tensor is BF16


def test_blocks_of_zeros_do_not_count_as_the_worst() -> None:
    half = TENSORS["easy"].clone()
    half[:, :128] = 0
    whole, with_zeros = (measure(x, MX()) for x in (TENSORS["easy"][:, 128:].contiguous(), half))
    assert with_zeros.worst_blocks_db == whole.worst_blocks_db


def test_every_product_is_drawn() -> None:
    shapes = [(48, 64), (2, 32, 64), (48, 32)]
    x, weight, grad = (synthetic("gaussian", shape, seed=seed) for seed, shape in enumerate(shapes))
    gemm = GroupedGemm(name="w1", x=x, weight=weight, grad=grad, offsets=torch.tensor([20, 48]))
    rows = numerics.compare_products([gemm])
    figure = viz.product_errors(rows, note="MXFP8 emulated")
    assert sum(len(trace.x) for trace in figure.data) == len(rows) == 3 * len(numerics.METHODS)
    assert_says(figure, "MXFP8 emulated")


# The path


def test_the_path_says_of_every_product_which_axes_torchao_casts_along(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []  # blocks lie along the last axis of what is cast
    cast = mxfp8_grouped_mm.to_mx

    def spy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(tensor.shape[-1])
        return cast(tensor, *args, **options)

    monkeypatch.setattr(mxfp8_grouped_mm, "to_mx", spy)
    tokens, k, n = 32, 64, 96
    x, weight = torch.randn(tokens, k).bfloat16().requires_grad_(), torch.randn(1, n, k).bfloat16().requires_grad_()
    output = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        offs=torch.tensor([tokens], dtype=torch.int32),
        kernel_preference=mxfp8_grouped_mm.KernelPreference.EMULATED,
    )
    output.backward(torch.randn_like(output))
    assert seen == [k, k, n, n, tokens, tokens]  # output: x, w; dgrad: gradient, w; wgrad: gradient, x
    # The table of notebook 01 says the same: K of w1 and w3 is D, N is F; of w2 K is F and N is D.
    cells = json.loads((ROOT / "notebooks" / "01_quantise_to_mxfp8.ipynb").read_text())["cells"]
    table = next(text for cell in cells if "| forward ↓ |" in (text := "".join(cell["source"])))
    for row in (
        "| **w1, w3**: x along D, w along D | **dgrad w1, w3**: gradient along F, w along F |",
        "| **wgrad w1, w3**: gradient and x along the tokens",
        "| **w2**: h along F, w along F | **dgrad w2**: gradient along D, w along D |",
        "| **wgrad w2**: gradient and h along the tokens",
        "| dispatch, BF16 or MXFP8 | dispatch backward, BF16 |",
        "| combine, BF16; scores in FP32 | combine backward, BF16 or MXFP8 |",
    ):
        assert row in table
    # The all-to-alls that can be MXFP8 are those of torchao.
    assert callable(ep.a2a_dispatch_mxfp8_fwd_hp_bwd)
    assert callable(ep.a2a_combine_hp_fwd_mxfp8_bwd)


# The explorer


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(distribution="student_t", outlier_log2=16, block=512),
        Choice(outlier_log2=20, block=8, scaling="floor", element="e5m2"),
        Choice(distribution="student_t", element="e2m1"),
    ],
)
def test_the_explorer_figure_counts_every_block_and_number(choice: Choice) -> None:
    figure = viz.quantisation_figure(choice)
    assert [sum(trace.y) for trace in figure.data] == pytest.approx([1, 1, 1])
    mx = MX(scaling=choice.scaling, element=ELEMENTS[choice.element], block=choice.block)
    made = NVFP4() if choice.element == "e2m1" else mx
    lost = measure(synthetic(choice.distribution, (128, 512), outlier=2.0**choice.outlier_log2), made)
    become = f"{lost.underflow_fraction:.2%} of the values become zero, {lost.saturated_fraction:.2%} are clipped"
    assert_says(figure, f"SQNR {lost.sqnr_db:.1f} dB; {become}")


@pytest.mark.parametrize(("field", "value"), [("block", 48), ("outlier_log2", 21), ("outlier_log2", -1)])
def test_a_choice_that_cannot_be_drawn_is_refused(field: str, value: int) -> None:
    with pytest.raises(BadInput, match=rf"^{field} is {value}; valid: "):
        viz.quantisation_figure(Choice(**{field: value}))


def test_the_explorer_follows_every_control_with_the_static_figure() -> None:
    explorer = viz.QuantisationExplorer()
    choice = Choice(distribution="student_t", outlier_log2=12, block=512, scaling="even", element="e5m2")
    for name, value in vars(choice).items():
        explorer.controls[name].value = value
    assert explorer.figure == viz.quantisation_figure(choice)
    disabled = [explorer.controls[name].disabled for name in ("block", "scaling")]
    explorer.controls["element"].value = "e2m1"  # NVFP4 has blocks and scales of its own
    assert [*disabled, *(explorer.controls[name].disabled for name in ("block", "scaling"))] == [False] * 2 + [True] * 2
