"""The break-even model: its laws, its data against what their source prints, and its fit against known constants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import BadInput
from moelab.mxfp8 import break_even_fit
from moelab.mxfp8 import torchao_b200 as b200
from moelab.mxfp8.break_even import CAST_BYTES, Constants, break_even_m, gain, gemm_parts, gemm_time_s
from moelab.mxfp8.break_even_fit import (
    B200_FREE,
    GOAL,
    Fit,
    Observation,
    b200_observations,
    break_even,
    estimate,
    expert_work,
    fit,
    fit_b200,
    fit_measured,
    gain_table,
    leave_one_out,
    published_work,
    rows_text,
    spread_by_kind,
)
from moelab.mxfp8.grouped_gemm_cases import DIRECTIONS, PRECISIONS
from moelab.mxfp8.grouped_gemm_results import stored

CONSTANTS = Constants(
    gpu="made up",
    low="mxfp8",
    bf16_tflops=1000,
    low_tflops=2500,
    low_wgrad_tflops=2000,
    row_cast_tb_s=6,
    column_cast_tb_s=5,
    weight_cast_tb_s=4,
    overhead_us=200,
    overhead_us_per_mrow=1000,
    bf16_in_step=1.3,
    low_in_step=1.1,
)
SIZES = {"m": st.integers(1, 2**22), "n": st.integers(32, 16384), "k": st.integers(32, 16384)}
GROUPS = st.integers(1, 64)


# The model


def test_the_time_is_that_of_the_formula() -> None:
    m, n, k, groups = 10_000, 2000, 7000, 4
    products, casts = 2 * m * n * k, CAST_BYTES["mxfp8"]
    gemms = 2 * products / 2500e12 + products / 2000e12
    rows = (m * k + m * n) * casts / 6e12 + m * (n + k) * casts / 5e12
    weights = 2 * groups * n * k * casts / 4e12
    overhead = (200 + 1000 * m / 1e6) / 1e6
    assert gemm_time_s(m, n, k, groups, "mxfp8", CONSTANTS) == pytest.approx(gemms + rows + weights + overhead)
    assert gemm_time_s(m, n, k, groups, "bf16", CONSTANTS) == pytest.approx(3 * products / 1000e12)
    assert gemm_time_s(m, n, k, groups, "bf16", CONSTANTS, in_step=True) == pytest.approx(1.3 * 3 * products / 1e15)


def test_what_a_step_moves_beside_its_kernels_slows_down_as_they_do() -> None:
    step = next(one for one in b200_observations() if one.kind == "step" and one.precision == "bf16")
    alone = replace(step, extra_bytes=0).predict(CONSTANTS)
    assert step.predict(CONSTANTS) - alone == pytest.approx(1.3 * step.extra_bytes / 6e12 * 1e6)


@given(**SIZES, groups=GROUPS)
def test_directions_and_parts_add_up(m: int, n: int, k: int, groups: int) -> None:
    for precision in ("bf16", "mxfp8", "mxfp8_wgrad_bf16"):
        whole = gemm_time_s(m, n, k, groups, precision, CONSTANTS)
        parts = gemm_parts(m, n, k, groups, precision, CONSTANTS)
        one_by_one = [gemm_time_s(m, n, k, groups, precision, CONSTANTS, direction=name) for name in DIRECTIONS]
        assert sum(part.time_s for part in parts) == pytest.approx(whole)
        assert sum(one_by_one) == pytest.approx(whole)
        assert all(part.time_s >= 0 for part in parts)


@given(**SIZES, groups=GROUPS)
def test_wgrad_in_bf16_is_wgrad_of_bf16_and_the_rest_of_mxfp8(m: int, n: int, k: int, groups: int) -> None:
    mixed = [gemm_time_s(m, n, k, groups, "mxfp8_wgrad_bf16", CONSTANTS, direction=name) for name in DIRECTIONS]
    low = [gemm_time_s(m, n, k, groups, "mxfp8", CONSTANTS, direction=name) for name in DIRECTIONS]
    assert mixed[:2] == pytest.approx(low[:2])
    assert mixed[2] == pytest.approx(gemm_time_s(m, n, k, groups, "bf16", CONSTANTS, direction="wgrad"))


@given(**SIZES, groups=GROUPS, in_step=st.booleans())
def test_gain_grows_with_rows_and_falls_with_groups(m: int, n: int, k: int, groups: int, in_step: bool) -> None:
    here = gain(m, n, k, groups, CONSTANTS, in_step=in_step)
    assert gain(2 * m, n, k, groups, CONSTANTS, in_step=in_step) > here
    assert gain(m, n, k, 2 * groups, CONSTANTS, in_step=in_step) < here
    assert gain(m, k, n, groups, CONSTANTS, in_step=in_step) == pytest.approx(here)  # w2 is as good as w1


@given(n=SIZES["n"], k=SIZES["k"], groups=GROUPS)
def test_at_the_break_even_both_take_as_long(n: int, k: int, groups: int) -> None:
    rows = break_even_m(n, k, groups, CONSTANTS)
    if rows is None:
        assert gain(2.0**26, n, k, groups, CONSTANTS) < 1
    else:
        assert gain(rows, n, k, groups, CONSTANTS) == pytest.approx(1, abs=1e-4)


def test_an_eight_bit_format_without_overhead_always_pays() -> None:
    free = dict.fromkeys(("row_cast_tb_s", "column_cast_tb_s", "weight_cast_tb_s"), 1000000000.0)
    ideal = replace(CONSTANTS, **free, overhead_us=0, overhead_us_per_mrow=0)  # type: ignore[arg-type]
    assert break_even_m(2048, 7168, 8, ideal) == 1
    assert break_even_m(2048, 7168, 8, replace(CONSTANTS, low_tflops=900, low_wgrad_tflops=900)) is None


@pytest.mark.parametrize("sizes", [(0, 32, 32, 1), (32, -1, 32, 1), (32, 32, 32, 0)])
def test_sizes_that_are_none(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadInput, match="positive"):
        gemm_time_s(*sizes, "mxfp8", CONSTANTS)


def test_constants_say_nothing_about_another_format() -> None:
    with pytest.raises(BadInput, match="'fp8'; the constants of made up are of bf16 and mxfp8"):
        gemm_time_s(32, 32, 32, 1, "fp8", CONSTANTS)
    with pytest.raises(BadInput, match="'mxfp8_wgrad_bf16'"):
        gemm_time_s(32, 32, 32, 1, "mxfp8_wgrad_bf16", replace(CONSTANTS, low="fp8"))
    assert {"bf16", "mxfp8", "mxfp8_wgrad_bf16"} < set(PRECISIONS)


# The published data, against what its source prints beside the times


def test_rows_have_the_printed_speedups() -> None:
    printed = [1.808, 1.690, 1.637, 1.700, 1.188, 1.321, 1.595, 1.440]
    assert [row.speedup for row in b200.ROWS] == pytest.approx(printed, abs=6e-4)


def test_elements_and_operations_give_the_printed_efficiencies() -> None:
    """The source derates the datasheet to 92 % of 8 TB/s and 78 % of 4500 TFLOP/s."""
    quantise = {("forward", "rows"): 73.7, ("forward", "weights"): 74.0, ("dgrad", "gradient"): 76.6}
    quantise |= {("dgrad", "weights"): 68.4, ("wgrad", "gradient"): 78.1, ("wgrad", "rows"): 81.9}
    gemm = {"forward": 65.6, "dgrad": 65.1, "wgrad": 52.1}
    elements = b200.KERNELS_CASE.elements
    checked = 0
    for kernel in b200.KERNELS:
        if kernel.kind == "quantise":
            tb_s = elements[kernel.operand] * CAST_BYTES["mxfp8"] / kernel.us / 1e6
            assert 100 * tb_s / (0.92 * 8) == pytest.approx(quantise[kernel.direction, kernel.operand], abs=0.06)
        elif kernel.kind == "gemm":
            tflops = b200.KERNELS_CASE.flops / kernel.us / 1e6
            assert 100 * tflops / (0.78 * 4500) == pytest.approx(gemm[kernel.direction], abs=0.06)
        checked += kernel.kind != "scales"
    assert checked == len(quantise) + len(gemm)


# The fit


def synthetic(constants: Constants) -> list[Observation]:
    """torchao's observations with the model's own values, all of them fitted."""
    return [replace(one, value=one.predict(constants), fitted=True) for one in b200_observations()]


def test_a_fit_finds_the_constants_that_made_the_data() -> None:
    truth = replace(CONSTANTS, column_cast_tb_s=6, weight_cast_tb_s=6)
    found = fit(synthetic(truth), break_even_fit.START, B200_FREE).constants
    for name in (name for group in B200_FREE for name in group):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name


def test_one_wrong_figure_does_not_bend_the_others() -> None:
    truth = replace(CONSTANTS, column_cast_tb_s=6, weight_cast_tb_s=6)
    wrong = [replace(one, value=2 * one.value) if i == 20 else one for i, one in enumerate(synthetic(truth))]
    found = fit(wrong, break_even_fit.START, B200_FREE).constants
    assert found.low_tflops == pytest.approx(2500, rel=0.02)
    assert gain(32768, 2048, 7168, 8, found) == pytest.approx(gain(32768, 2048, 7168, 8, truth), rel=0.02)


def test_a_fit_needs_data_and_known_constants() -> None:
    with pytest.raises(BadInput, match="2 observations cannot determine 8 constants"):
        fit(b200_observations()[:2], break_even_fit.START, B200_FREE)
    with pytest.raises(BadInput, match="speed is no constant of the model"):
        fit(b200_observations(), break_even_fit.START, (("speed",),))


def test_only_fitted_observations_count() -> None:
    changed = [one if one.fitted else replace(one, value=3 * one.value) for one in b200_observations()]
    assert fit(changed, break_even_fit.START, B200_FREE).constants == fit_b200().constants
    roles = fit_b200().residuals().groupby(["kind", "role"]).size()
    assert roles["step", "fitted"] == 4
    assert roles["step", "predicted"] == 12
    assert roles["speed-up", "predicted"] == 2


def test_kernels_are_explained_by_one_bandwidth_and_three_rates() -> None:
    kernels = fit_b200().residuals().query("kind == 'kernel'")
    assert len(kernels) == 10
    assert kernels["error"].abs().max() < GOAL


def test_a_row_that_is_left_out_has_no_say_in_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leave_one_out()
    rows = [replace(row, bf16_us=1.3 * row.bf16_us) if i == 1 else row for i, row in enumerate(b200.ROWS)]
    monkeypatch.setattr(b200, "ROWS", tuple(rows))
    after = leave_one_out()
    assert after["left_out"][1] == pytest.approx(before["left_out"][1])
    assert after["measured"][1] == pytest.approx(1.3 * before["measured"][1])
    assert after["left_out"][5] != pytest.approx(before["left_out"][5])


# Intervals and layouts


def test_an_interval_is_as_wide_as_the_errors_of_the_model() -> None:
    """With one free rate and one observation, its logarithm is normal with the observation's error."""
    one = next(o for o in b200_observations() if o.name == "forward: gemm")
    single = fit([one], fit_b200().constants, (("low_tflops",),))
    found = estimate(single, lambda constants: constants.low_tflops, resamples=200)
    assert found.low is not None
    assert found.high is not None
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.645 * spread_by_kind(single)["kernel"], rel=0.2)
    assert found.low < one.case.flops / one.value / 1e6 < found.high


def test_a_break_even_that_is_never_reached_is_no_number() -> None:
    never = estimate(fit_b200(), lambda constants: None, resamples=10)
    assert (never.value, never.low, never.high) == (None, None, None)
    assert rows_text(never) == "never [never, never]"


def test_intervals_hold_their_value_and_671b_breaks_even_before_16b() -> None:
    large, small = published_work()
    evens = [break_even(work.case, fit_b200(), resamples=30) for work in (large, small)]
    for even in evens:
        assert even.value is not None
        assert even.low is not None
        assert even.low < even.value
        assert even.high is None or even.value < even.high
    assert evens[0].high is not None
    assert evens[1].low is not None
    assert evens[0].high < evens[1].low


def test_rows_of_the_published_layouts() -> None:
    large, small = published_work()
    assert (large.case.m, large.case.n, large.case.k, large.case.groups) == (8192 * 8 // 2, 2048, 7168, 256 // 32)
    assert (small.case.m, small.case.n, small.case.k, small.case.groups) == (16 * 8192 * 6, 1408, 2048, 64 // 32)


@pytest.mark.parametrize("degrees", [{"ep": 3}, {"tp": 0}, {"ep": 0}])
def test_a_layout_that_is_none(degrees: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="ep a divisor of 64"):
        expert_work("x", "16B", 1024, **degrees)


def test_the_verdict_is_that_of_the_interval() -> None:
    works = (*published_work(), expert_work("short", "16B", 256, ep=8))
    table = gain_table(works, fit_b200(), resamples=20)
    assert len(table) == 3 * 2 * 2
    said = {"saves time": lambda low, high: low > 1, "loses time": lambda low, high: high < 1}
    said["too near to call"] = lambda low, high: low <= 1 <= high
    for row in table.itertuples():
        low, high = (float(text) for text in str(row.gain).split("[")[1].rstrip("]").split(", "))
        assert said[str(row.verdict)](low - 0.005, high + 0.005) or said[str(row.verdict)](low + 0.005, high - 0.005)
    assert set(table[table["layout"] == "short"]["verdict"]) == {"loses time"}


# Another GPU


@pytest.fixture(scope="module")
def h100() -> Fit:
    return fit_measured(stored())


def test_the_h100_fit_uses_the_671b_shape_and_predicts_the_rest(h100: Fit) -> None:
    steps = h100.residuals().query("kind == 'step'")
    fitted = steps[steps["role"] == "fitted"]
    assert fitted["name"].str.contains("×2048×7168, 8 even groups").all()
    assert len(fitted) >= 8
    assert (steps["role"] == "predicted").sum() >= 6
    assert h100.constants.low == "fp8"


def test_the_h100_fit_gives_its_own_steps_within_the_goal(h100: Fit) -> None:
    steps = h100.residuals().query("kind == 'step' and role == 'fitted'")
    reference = steps[~steps["name"].str.startswith("4096×")]
    assert reference["error"].abs().max() < GOAL


@settings(max_examples=20)
@given(m=st.integers(1000, 2**20))
def test_row_wise_fp8_gains_less_on_an_h100_than_mxfp8_on_a_b200(h100: Fit, m: int) -> None:
    assert gain(m, 2048, 7168, 8, h100.constants) < gain(max(m, 16384), 2048, 7168, 8, fit_b200().constants)
