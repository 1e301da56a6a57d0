"""Figures of MXFP8 against the tables that they draw, the drawn path against TorchTitan and torchao, the explorer."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from figure_support import title
from torchao.prototype.moe_training import ep as torchao_ep

from moelab.errors import BadInput
from moelab.mxfp8.errors import (
    METHODS,
    STORED_METHODS,
    GroupedGemm,
    block_sqnr_db,
    compare_methods,
    compare_products,
    first_numbers,
    largest_number_errors,
    measure,
    sqnr_db,
    synthetic,
)
from moelab.mxfp8.formats import E4M3, E5M2, MX, NVFP4, SCALINGS
from moelab.viz.mxfp8 import (
    DGRAD,
    FORWARD,
    MXFP8,
    PATH,
    WGRAD,
    Choice,
    QuantisationExplorer,
    largest_number_error,
    method_errors,
    product_errors,
    quantisation_figure,
    stored_figure,
)

TENSORS = {
    "easy": synthetic("gaussian", (64, 256)),
    "hard": synthetic("gaussian", (64, 256), outlier=2.0**14),
    "gradient": synthetic("student_t", (64, 256)),
}


def gemm() -> GroupedGemm:
    x, weight, grad = (
        synthetic("gaussian", shape, seed=i) for i, shape in enumerate([(48, 64), (2, 32, 64), (48, 32)])
    )
    return GroupedGemm(name="w1", x=x, weight=weight, grad=grad, offsets=torch.tensor([20, 48]))


# --- stored numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [MX(), MX(scaling="floor"), MX(element=E5M2), NVFP4()], ids=["rceil", "floor", "e5m2", "nvfp4"]
)
def test_the_parts_of_stored_numbers_make_their_values(made: MX | NVFP4) -> None:
    tensor = TENSORS["gradient"]
    stored = first_numbers(tensor, made)
    read_back = made.cast(tensor).values[0, :32]
    assert torch.equal(read_back.double(), torch.tensor(stored.read_back).double())
    assert stored.sqnr_db == pytest.approx(sqnr_db(tensor[0, :32], read_back))
    # Read the bits again, by the definition of such numbers and with nothing of torchao's.
    element, width = made.element, 4 if isinstance(made, NVFP4) else 8
    for place, written in enumerate(stored.to_frame()["sign exponent mantissa"]):
        sign, exponent, mantissa = written.split()
        assert (len(exponent), len(mantissa)) == (width - 1 - element.mantissa_bits, element.mantissa_bits)
        assert int(sign + exponent + mantissa, 2) == stored.codes[place]
        bias, fraction = 2 ** (len(exponent) - 1) - 1, int(mantissa, 2) / 2 ** len(mantissa)
        power = int(exponent, 2)
        number = (fraction + (power > 0)) * 2.0 ** (max(power, 1) - bias) * (-1) ** int(sign)
        assert stored.read_back[place] == pytest.approx(number * stored.scales[place // made.block], rel=1e-6)
    assert (len(stored.scales), stored.stored_bytes) == ((2, 18) if isinstance(made, NVFP4) else (1, 33))


@pytest.mark.parametrize("values", [torch.ones(31), torch.full((32,), math.nan)])
def test_what_is_no_block_is_refused(values: torch.Tensor) -> None:
    zero = torch.ones(32).index_fill(0, torch.tensor([3]), 0)
    assert first_numbers(zero, MX()).errors == (0.0,) * 32  # a zero has no error
    with pytest.raises(BadInput):
        first_numbers(values, MX())


def test_the_figure_shows_the_numbers_of_both_formats() -> None:
    stored = [first_numbers(TENSORS["easy"], made) for made in (MX(), NVFP4())]
    figure = stored_figure(stored, source="here")
    exact, *drawn = figure.data
    assert tuple(exact.y) == stored[0].values
    for one, (read_back, error) in zip(stored, (drawn[:2], drawn[2:]), strict=True):
        assert tuple(read_back.y) == one.read_back
        assert tuple(error.y) == tuple(100 * each for each in one.errors)
        worst = max(map(abs, one.errors))
        assert f"{one.name} in {one.stored_bytes} bytes, off by up to {100 * worst:.0f} %" in title(figure)


def test_the_shaded_bands_are_the_largest_rounding_errors() -> None:
    values = torch.ones(32)
    values[5] = 1 + 2.0**-4  # halfway between two numbers of E4M3
    values[0], values[16] = 6.0, 6.0
    stored = [first_numbers(values, MX()), first_numbers(values * 448, NVFP4())]
    figure = stored_figure(stored, source="here")
    of_mxfp8, of_nvfp4 = (shape for shape in figure.layout.shapes if shape.type == "rect")
    assert of_mxfp8.y1 == -of_mxfp8.y0 == pytest.approx(100 * max(map(abs, stored[0].errors)))
    assert "±5.88 % in E4M3" in title(figure)
    halfway = torch.full((16,), 1.25)
    halfway[0] = 6.0
    assert of_nvfp4.y1 == pytest.approx(100 * abs(NVFP4().cast(halfway).values[1] - 1.25) / 1.25)


# --- tables and their figures ----------------------------------------------------------------------------------------


def test_rows_are_the_measures() -> None:
    rows = compare_methods(TENSORS, gradients=["gradient"])
    assert len(rows) == 21  # MXFP8 casts a tensor alike, whatever it does with wgrad
    for row in rows:
        method = next(method for method in STORED_METHODS if method.name == row.method)
        made = method.gradient if row.data == "gradient" else method.operand
        found = measure(TENSORS[row.data], made)
        assert (row.sqnr_db, row.underflow_fraction) == (found.sqnr_db, found.underflow_fraction)
        blocks = block_sqnr_db(TENSORS[row.data], made.cast(TENSORS[row.data]).values)
        below = (blocks < row.worst_blocks_db).double().mean().item()
        assert 0.03 <= below <= 0.05


def test_blocks_of_zeros_do_not_count_as_the_worst() -> None:
    half = TENSORS["easy"].clone()
    half[:, :128] = 0
    whole, with_zeros = (measure(x, MX()) for x in (TENSORS["easy"][:, 128:].contiguous(), half))
    assert with_zeros.worst_blocks_db == whole.worst_blocks_db


def test_the_largest_number_of_a_block_is_cut_by_floor_alone() -> None:
    amax, errors = largest_number_errors()
    half_step = 2.0**-4
    for scaling in SCALINGS:
        assert (min(errors[scaling]) < -half_step) is (scaling in ("floor", "even"))
    for index in (index for index, each in enumerate(amax) if each <= 1.75):
        assert len({errors[scaling][index] for scaling in SCALINGS}) == 1
    figure = largest_number_error(amax, errors)
    assert {trace.name for trace in figure.data} == {"FLOOR", "EVEN", "CEIL", "RCEIL"}
    assert "RCEIL and CEIL never do" in title(figure)
    assert min(errors["rceil"]) == pytest.approx(-E4M3.rounding_percent / 100)
    assert f"±{E4M3.rounding_percent:.2f} % (1/17)" in title(figure)


def test_method_figure_draws_every_number_that_is_finite() -> None:
    exact = {"bf16 already": TENSORS["easy"].bfloat16().float()}
    rows = compare_methods(TENSORS | exact, gradients=["gradient"])
    figure = method_errors(rows)
    finite = sum(math.isfinite(row.sqnr_db) for row in rows)
    assert sum(len(trace.x) for trace in figure.data if trace.xaxis == "x") == finite
    percent_to_zero = [value for trace in figure.data if trace.xaxis == "x3" for value in trace.x]
    assert sorted(percent_to_zero) == pytest.approx(sorted(100 * row.underflow_fraction for row in rows))
    assert finite == len(rows) - 1
    assert "of hard" in title(figure)
    by = {(row.data, row.method): row.worst_blocks_db for row in rows}
    for method in ("nvfp4", "mxfp8_floor"):
        lost = [by[name, "mxfp8"] - by[name, method] for name in TENSORS | exact]
        assert f"{min(lost):.1f} to {max(lost):.1f} dB more than" in title(figure)


def test_product_figure_draws_every_product() -> None:
    rows = compare_products([gemm()])
    figure = product_errors(rows, note="MXFP8 emulated")
    assert f"NVFP4's worst {min(row.sqnr_db for row in rows if row.method == 'nvfp4'):.0f}" in title(figure)
    assert sum(len(trace.x) for trace in figure.data) == len(rows) == 3 * len(METHODS)
    worst = min((row for row in rows if row.method == "mxfp8"), key=lambda row: row.sqnr_db)
    assert f"worst product is {worst.weight} {worst.product}" in title(figure)
    assert "MXFP8 emulated" in title(figure)


# --- the path --------------------------------------------------------------------------------------------------------


def test_the_path_says_of_every_product_which_axes_torchao_casts_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchao say along which axes it casts, and compare with what is written."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm

    seen: list[tuple[int, ...]] = []
    cast = mxfp8_grouped_mm.to_mx

    def spy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return cast(tensor, *args, **options)

    monkeypatch.setattr(mxfp8_grouped_mm, "to_mx", spy)
    tokens, k, n = 32, 64, 96  # blocks lie along the last axis of what is cast
    x, weight = torch.randn(tokens, k).bfloat16().requires_grad_(), torch.randn(1, n, k).bfloat16().requires_grad_()
    output = mxfp8_grouped_mm._to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        offs=torch.tensor([tokens], dtype=torch.int32),
        kernel_preference=mxfp8_grouped_mm.KernelPreference.EMULATED,
    )
    output.backward(torch.randn_like(output))
    ends = [shape[-1] for shape in seen]
    assert ends == [k, k, n, n, tokens, tokens]  # output: x, w; dgrad: gradient, w; wgrad: gradient, x
    written = {(box.column, box.row): box.detail for box in PATH if box.fill == MXFP8}
    assert written == {
        (FORWARD, 4): "x along D · w along D",  # K of w1 and w3 is D, N is F
        (DGRAD, 4): "gradient along F · w along F",
        (WGRAD, 4): "gradient, x along tokens",
        (FORWARD, 8): "h along F · w along F",  # K of w2 is F, N is D
        (DGRAD, 8): "gradient along D · w along D",
        (WGRAD, 8): "gradient, h along tokens",
    }


def test_the_all_to_alls_that_can_be_mxfp8_are_those_of_torchao() -> None:
    assert inspect.isfunction(torchao_ep.a2a_dispatch_mxfp8_fwd_hp_bwd)
    assert inspect.isfunction(torchao_ep.a2a_combine_hp_fwd_mxfp8_bwd)
    either = {(box.column, box.text) for box in PATH if "all-to-all" in box.text and box.fill != "#d3e6f3"}
    assert either == {(FORWARD, "dispatch: all-to-all"), (DGRAD, "combine backward: all-to-all")}


# --- explorer --------------------------------------------------------------------------------------------------------


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
    figure = quantisation_figure(choice)
    assert [sum(trace.y) for trace in figure.data] == pytest.approx([1, 1, 1])
    x = synthetic(choice.distribution, (128, 512), outlier=2.0**choice.outlier_log2)
    made: MX | NVFP4 = NVFP4()
    if choice.element != "e2m1":
        element = {"e4m3": MX().element, "e5m2": E5M2}[choice.element]
        made = MX(scaling=choice.scaling, element=element, block=choice.block)
    found = measure(x, made)
    assert f"SQNR {found.sqnr_db:.1f} dB; {found.underflow_fraction:.2%} of the values become zero" in title(figure)
    assert f"{found.saturated_fraction:.2%} are clipped" in title(figure)


@pytest.mark.parametrize(("field", "value"), [("block", 48), ("outlier_log2", 21), ("outlier_log2", -1)])
def test_a_choice_that_cannot_be_drawn_is_refused(field: str, value: int) -> None:
    with pytest.raises(BadInput, match=rf"^{field} is {value}; valid: "):
        quantisation_figure(Choice(**{field: value}))


def test_the_explorer_follows_every_control_with_the_static_figure() -> None:
    explorer = QuantisationExplorer()
    choice = Choice(distribution="student_t", outlier_log2=12, block=512, scaling="even", element="e5m2")
    for name, value in vars(choice).items():
        explorer.controls[name].value = value
    assert explorer.figures["errors"] == quantisation_figure(choice)
    assert not explorer.controls["block"].disabled
    explorer.controls["element"].value = "e2m1"  # NVFP4 has blocks and scales of its own
    assert explorer.controls["block"].disabled
    assert explorer.controls["scaling"].disabled
