"""The GEMM model: its laws, its data against what their source prints, and its fit against known constants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from validation import gemm_fit
from validation.gemm_fit import (
    B200_FREE,
    KERNELS,
    KERNELS_CASE,
    STEPS,
    Observation,
    b200_observations,
    benchmark_extra_bytes,
    fit,
    fit_file,
    fitted_b200,
    leave_one_out,
    resampled,
    residuals,
    spread_by_kind,
)

from moelab.errors import BadInput
from moelab.hardware import B200
from moelab.mxfp8.grouped_gemm_cases import DIRECTIONS
from moelab.projection.calibration import CALIBRATION, Calibration, with_values
from moelab.projection.gemm import (
    CAST_BYTES,
    add_expert_casts,
    break_even_m,
    cast_parts,
    gain,
    grouped_parts,
    grouped_time_s,
    products_by_module,
    rates_of,
)
from moelab.projection.gemm_fit import (
    GOAL,
    break_even,
    estimate,
    expert_work,
    fit_b200,
    fit_h100,
    gain_table,
    published_work,
    rows_text,
)
from moelab.projection.gemm_fit import leave_one_out as gemm_fit_table
from moelab.projection.job import INDEX
from moelab.projection.published import published_job

TRUTH = with_values(
    blackwell_grouped=1000 / 1.3 / 2250, blackwell_bf16_alone=1.3, blackwell_low=2500 / 4500,
    blackwell_low_wgrad=2000 / 4500, blackwell_low_in_step=1.1, blackwell_cast=6 / 8, blackwell_scales_us=50,
    blackwell_scales_wgrad_us=200, blackwell_scales_us_per_mrow=8000,
)  # fmt: skip
RATES = rates_of(B200, TRUTH, alone=True)
SIZES = {"m": st.integers(4096, 2**22), "n": st.integers(512, 16384), "k": st.integers(512, 16384)}
GROUPS = st.integers(1, 64)


# The model


def test_the_time_is_that_of_the_formula() -> None:
    m, n, k, groups = 10_000, 2000, 7000, 4
    cast_bytes = 2 + 1 + 1 / 32  # read in BF16, written in 8 bits with a 32nd of a scale
    products, casts = 2 * m * n * k, cast_bytes / 6e12
    gemms = 2 * products / 2500e12 + products / 2000e12
    rows, weights = 2 * m * (n + k) * casts, 2 * groups * n * k * casts
    scales = (2 * 50 + 200 + 8000 * (m / groups) / 1e6) / 1e6
    assert grouped_time_s(m, n, k, groups, "mxfp8", RATES) == pytest.approx(gemms + rows + weights + scales)
    assert grouped_time_s(m, n, k, groups, "bf16", RATES) == pytest.approx(3 * products / 1000e12)
    in_step = rates_of(B200, TRUTH)
    assert grouped_time_s(m, n, k, groups, "bf16", in_step) == pytest.approx(1.3 * 3 * products / 1e15)
    slower = 1.1 * (gemms + rows + weights + scales)
    assert grouped_time_s(m, n, k, groups, "mxfp8", in_step) == pytest.approx(slower)
    emulated_s = sum(part.time_s for part in cast_parts(m, n, k, groups, "emulated", RATES))
    assert emulated_s == pytest.approx((rows + weights) * (2 + 2) / cast_bytes)  # BF16 again


@given(**SIZES, groups=GROUPS)
def test_directions_add_up_and_wgrad_in_bf16_is_that_of_bf16(m: int, n: int, k: int, groups: int) -> None:
    times = {}
    for precision in ("bf16", "mxfp8", "mxfp8_wgrad_bf16"):
        parts = grouped_parts(m, n, k, groups, precision, RATES)
        times[precision] = [grouped_time_s(m, n, k, groups, precision, RATES, direction=name) for name in DIRECTIONS]
        assert sum(part.time_s for part in parts) == pytest.approx(sum(times[precision]))
        assert all(part.time_s > 0 for part in parts)
    assert times["mxfp8_wgrad_bf16"] == pytest.approx([*times["mxfp8"][:2], times["bf16"][2]])


@given(n=SIZES["n"], k=SIZES["k"], groups=GROUPS)
def test_at_the_break_even_both_take_as_long(n: int, k: int, groups: int) -> None:
    rows = break_even_m(n, k, groups, RATES)
    if rows is None:
        assert gain(2.0**26, n, k, groups, RATES) < 1
    else:
        assert gain(rows, n, k, groups, RATES) == pytest.approx(1, abs=1e-4)


def test_an_eight_bit_format_without_overhead_always_pays() -> None:
    ideal = RATES._replace(cast=1e21, scales_s=0.0, scales_wgrad_s=0.0, scales_row_s=0.0)
    assert break_even_m(2048, 7168, 8, ideal) == 1
    assert break_even_m(2048, 7168, 8, RATES._replace(low=9e14, low_wgrad=9e14)) is None


def test_products_without_a_time() -> None:
    for sizes in ((0, 32, 32, 1), (32, -1, 32, 1), (32, 32, 32, 0)):
        with pytest.raises(BadInput, match="positive"):
            grouped_time_s(*sizes, "mxfp8", RATES)
    with pytest.raises(BadInput, match="'fp8'; the rates of B200 are of bf16 and mxfp8"):
        grouped_time_s(32, 32, 32, 1, "fp8", RATES)
    for degrees in ({"ep": 3}, {"tp": 0}):
        with pytest.raises(BadInput, match="ep a divisor of 64"):
            expert_work("x", "16B", 1024, **degrees)


@pytest.mark.parametrize("arm", ["bf16_standard", "mxfp8_standard"])
def test_a_projected_layer_spends_what_its_grouped_products_take(arm: str) -> None:
    """The step's way through passes and modules, and notebook 02's through one product, are the same model."""
    job = replace(published_job(arm), checkpointing="none")
    times = products_by_module(job, CALIBRATION)["moe"].copy()
    add_expert_casts(times, job, CALIBRATION)
    rows, dim, hidden = job.work.received(job.shape), job.shape.dim, job.shape.moe_hidden_dim
    rates, groups = rates_of(B200, CALIBRATION), job.shape.num_experts // job.work.ep
    one_by_one = [
        grouped_time_s(rows, n, k, groups, job.precision.value, rates)
        for n, k in ((hidden, dim), (hidden, dim), (dim, hidden))
    ]
    found = times[:, [INDEX["expert GEMMs"], INDEX["quantisation"]]].sum()
    assert found == pytest.approx(sum(one_by_one), rel=1e-9)


# The published data, against what its source prints beside the times


def test_rows_have_the_printed_speedups() -> None:
    printed = [1.808, 1.690, 1.637, 1.700, 1.188, 1.321, 1.595, 1.440]
    assert [row.speedup for row in STEPS] == pytest.approx(printed, abs=6e-4)


def test_elements_and_operations_give_the_printed_efficiencies() -> None:
    """The source derates the datasheet to 92 % of 8 TB/s and 78 % of 4500 TFLOP/s."""
    quantise = {("forward", "rows"): 73.7, ("forward", "weights"): 74.0, ("dgrad", "gradient"): 76.6}
    quantise |= {("dgrad", "weights"): 68.4, ("wgrad", "gradient"): 78.1, ("wgrad", "rows"): 81.9}
    gemm = {"forward": 65.6, "dgrad": 65.1, "wgrad": 52.1}
    for one in (one for one in KERNELS if one.kind == "quantise"):
        tb_s = KERNELS_CASE.elements[one.operand] * CAST_BYTES["mxfp8"] / one.us / 1e6
        assert 100 * tb_s / (0.92 * 8) == pytest.approx(quantise.pop((one.direction, one.operand)), abs=0.06)
    for one in (one for one in KERNELS if one.kind == "gemm"):
        tflops = KERNELS_CASE.flops / one.us / 1e6
        assert 100 * tflops / (0.78 * 4500) == pytest.approx(gemm.pop(one.direction), abs=0.06)
    assert not quantise
    assert not gemm


def test_what_a_benchmark_moves_beside_its_kernels_slows_down_as_they_do() -> None:
    case = STEPS[0].case
    steps = {one.name.rpartition(", ")[2]: one for one in b200_observations() if one.name.startswith(case.name)}
    for precision, factor in (("bf16", 1.3), ("mxfp8", 1.1)):
        alone_s = grouped_time_s(case.m, case.n, case.k, case.groups, precision, rates_of(B200, TRUTH))  # type: ignore[arg-type]
        extra_us = factor * benchmark_extra_bytes(case) / 6e6
        assert steps[precision].predict(TRUTH) == pytest.approx(1e6 * alone_s + extra_us)


# The fit


def test_the_projections_constants_are_those_of_the_fits() -> None:
    """One model: what notebook 02 draws and what a projection computes come from the same constants."""
    for found in (fit_b200(), fit_h100()):
        for name in found.free:
            assert float(getattr(CALIBRATION, name)) == pytest.approx(float(getattr(found.calibration, name)), rel=1e-3)


def test_the_packaged_fits_are_what_fitting_finds_now() -> None:
    """Otherwise: ``python -m benchmarks.validation --write``."""
    now = fit_file(draws=2)
    assert leave_one_out().drop(columns=["case", "role"]).to_numpy(float) == pytest.approx(
        gemm_fit_table().drop(columns=["case", "role"]).to_numpy(float), rel=1e-4
    )
    for gpu, packaged in (("B200", fit_b200()), ("H100", fit_h100())):
        found = now["fits"][gpu]
        draws = [packaged.calibration, *packaged.draws[:2]]
        values = [[float(getattr(one, name)) for name in packaged.free] for one in draws]
        assert [found["values"], *found["draws"]] == [pytest.approx(one, rel=1e-4) for one in values]
        assert [row["model"] for row in found["residuals"]] == pytest.approx(
            list(packaged.residuals["model"]), rel=1e-4
        )
        assert len(packaged.draws) == gemm_fit.DRAWS


def synthetic(calibration: Calibration) -> list[Observation]:
    """torchao's observations with the model's own values, all of them fitted."""
    return [replace(one, value=one.predict(calibration), fitted=True) for one in b200_observations()]


def test_a_fit_finds_the_constants_that_made_the_data() -> None:
    found = fit(synthetic(TRUTH), B200_FREE)
    for name in B200_FREE:
        assert float(getattr(found, name)) == pytest.approx(float(getattr(TRUTH, name)), rel=0.02), name


def test_one_wrong_figure_does_not_bend_the_others() -> None:
    wrong = [replace(one, value=2 * one.value) if i == 20 else one for i, one in enumerate(synthetic(TRUTH))]
    found = rates_of(B200, fit(wrong, B200_FREE), alone=True)
    assert found.low == pytest.approx(2500e12, rel=0.02)
    assert gain(32768, 2048, 7168, 8, found) == pytest.approx(gain(32768, 2048, 7168, 8, RATES), rel=0.02)


def test_only_fitted_observations_count() -> None:
    changed = [one if one.fitted else replace(one, value=3 * one.value) for one in b200_observations()]
    assert rates_of(B200, fit(changed, B200_FREE)) == rates_of(B200, fitted_b200())
    roles = fit_b200().residuals.groupby(["kind", "role"]).size()
    assert (roles["step", "fitted"], roles["step", "predicted"], roles["speed-up", "predicted"]) == (4, 12, 2)
    assert (fit_h100().residuals.query("kind == 'step'")["role"] == "predicted").all()


def test_a_row_that_is_left_out_has_no_say_in_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leave_one_out()
    changed = [row._replace(bf16_us=1.3 * row.bf16_us) if i == 1 else row for i, row in enumerate(STEPS)]
    monkeypatch.setattr(gemm_fit, "STEPS", tuple(changed))
    after = leave_one_out()
    assert after["left_out"][1] == pytest.approx(before["left_out"][1])
    assert after["measured"][1] == pytest.approx(1.3 * before["measured"][1])
    assert after["left_out"][5] != pytest.approx(before["left_out"][5])


def test_how_well_the_model_meets_what_it_was_not_fitted_on() -> None:
    b200, h100 = (one.residuals.query("kind == 'step' and role == 'predicted'") for one in (fit_b200(), fit_h100()))
    mxfp8 = b200[b200["name"].str.endswith("mxfp8")]
    assert mxfp8["error"].abs().max() < GOAL
    few_rows = h100["name"].eq("16384×1408×2048, 8 even groups, fp8")
    assert h100[~few_rows]["error"].abs().max() < GOAL
    assert few_rows.sum() == 1


# Intervals and layouts


def test_an_interval_is_as_wide_as_the_errors_of_the_model() -> None:
    """With one free rate and one observation, its logarithm is normal with the observation's error."""
    one = next(one for one in b200_observations() if one.name == "forward: gemm")
    single = fit([one], ("blackwell_low",))
    drawn = replace(fit_b200(), calibration=single, draws=tuple(resampled(single, [one], ("blackwell_low",), 200)))
    found = estimate(drawn, lambda rates: rates.low)
    assert math.log(found.high / found.low) == pytest.approx(
        2 * 1.645 * spread_by_kind(residuals([one], single))["kernel"], rel=0.2
    )
    assert found.low < KERNELS_CASE.flops / one.value * 1e6 < found.high


def test_intervals_hold_their_value_and_671b_breaks_even_before_16b() -> None:
    large, small = (expert_work("one node", model, 8192, ep=8).case for model in ("671B", "16B"))
    evens = [break_even(replace(case, groups=8), fit_b200()) for case in (large, small)]
    assert all(even.low < even.value < even.high for even in evens)
    assert evens[0].high < evens[1].low
    assert rows_text(estimate(fit_b200(), lambda rates: math.inf)) == "never [never, never]"


def test_the_verdict_is_that_of_the_interval() -> None:
    works = (*published_work(), expert_work("short", "16B", 256, ep=8))
    table = gain_table(works, fit_b200())
    assert len(table) == 3 * 2 * 2
    for row in table.itertuples():
        low, high = (float(text) for text in str(row.gain).split("[")[1].rstrip("]").split(", "))
        assert row.verdict == ("saves time" if low > 1 else "loses time" if high < 1 else "too near to call")
    assert set(table[table["layout"] == "short"]["verdict"]) == {"loses time"}
