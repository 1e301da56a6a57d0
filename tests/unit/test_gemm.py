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
    elements_of,
    fit,
    fit_file,
    fitted_b200,
    resampled,
    residuals,
    spread_by_kind,
)
from validation.published import published_job

from moelab.errors import BadInput
from moelab.hardware import B200
from moelab.micro.grouped_gemm import DIRECTIONS
from moelab.planning import gemm_fit as packaged
from moelab.planning.gemm_fit import (
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
from moelab.planning.time.calibration import CALIBRATION, with_values
from moelab.planning.time.gemm import (
    CAST_BYTES,
    add_expert_casts,
    break_even_m,
    cast_parts,
    gain,
    gemm_time_s,
    grouped_parts,
    grouped_time_s,
    products_by_module,
    rates_of,
)
from moelab.planning.time.job import INDEX

TRUTH = with_values(
    blackwell_grouped=1000 / 1.3 / 2250, blackwell_bf16_alone=1.3, blackwell_low=2500 / 4500,
    blackwell_low_wgrad=2000 / 4500, blackwell_low_in_step=1.1, blackwell_cast=6 / 8, blackwell_scales_us=50,
    blackwell_scales_wgrad_us=200, blackwell_scales_us_per_mrow=8000,
)  # fmt: skip
RATES = rates_of(B200, TRUTH, alone=True)
N, K, GROUPS = st.integers(512, 16384), st.integers(512, 16384), st.integers(1, 64)


# The model


def test_the_time_is_that_of_the_formula() -> None:
    m, n, k, groups = 10_000, 2000, 7000, 4
    cast_bytes = 2 + 1 + 1 / 32  # read in BF16, written in 8 bits with a 32nd of a scale
    products, casts = 2 * m * n * k, cast_bytes / 6e12
    rows, weights = 2 * m * (n + k) * casts, 2 * groups * n * k * casts
    scales = (2 * 50 + 200 + 8000 * (m / groups) / 1e6) / 1e6
    bf16_s, mxfp8_s = 3 * products / 1e15, 2 * products / 2500e12 + products / 2000e12 + rows + weights + scales
    for rates, slower_bf16, slower_mxfp8 in ((RATES, 1.0, 1.0), (rates_of(B200, TRUTH), 1.3, 1.1)):  # alone, in a step
        assert grouped_time_s(m, n, k, groups, "bf16", rates) == pytest.approx(slower_bf16 * bf16_s)
        assert grouped_time_s(m, n, k, groups, "mxfp8", rates) == pytest.approx(slower_mxfp8 * mxfp8_s)
    emulated_s = sum(part.time_s for part in cast_parts(m, n, k, groups, "emulated", RATES))
    assert emulated_s == pytest.approx((rows + weights) * (2 + 2) / cast_bytes)  # BF16 again
    few_rows_s = gemm_time_s(32, n, k, groups, RATES, grouped=True, low=False, wgrad=False)
    assert few_rows_s > 2 * groups * n * k / 8e12  # all weights are read


@given(m=st.integers(4096, 2**22), n=N, k=K, groups=GROUPS)
def test_directions_add_up_and_wgrad_in_bf16_is_that_of_bf16(m: int, n: int, k: int, groups: int) -> None:
    times = {}
    for precision in ("bf16", "mxfp8", "mxfp8_wgrad_bf16"):
        parts = grouped_parts(m, n, k, groups, precision, RATES)
        times[precision] = [grouped_time_s(m, n, k, groups, precision, RATES, direction=name) for name in DIRECTIONS]
        assert sum(part.time_s for part in parts) == pytest.approx(sum(times[precision]))
        assert all(part.time_s > 0 for part in parts)
    assert times["mxfp8_wgrad_bf16"] == pytest.approx([*times["mxfp8"][:2], times["bf16"][2]])


@given(n=N, k=K, groups=GROUPS)
def test_at_the_break_even_both_take_as_long(n: int, k: int, groups: int) -> None:
    rows = break_even_m(n, k, groups, RATES)
    if rows is None:
        assert gain(2.0**26, n, k, groups, RATES) < 1
    else:
        assert gain(rows, n, k, groups, RATES) == pytest.approx(1, abs=1e-4)


def test_an_eight_bit_format_without_overhead_always_pays_and_one_as_slow_as_bf16_never() -> None:
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
    one_by_one_s = sum(
        grouped_time_s(rows, n, k, groups, job.precision.value, rates)
        for n, k in ((hidden, dim), (hidden, dim), (dim, hidden))
    )
    assert times[:, [INDEX["expert GEMMs"], INDEX["quantisation"]]].sum() == pytest.approx(one_by_one_s, rel=1e-9)


# The published data, against what its source prints beside the times


KERNEL_FLOPS = 2 * KERNELS_CASE.m * KERNELS_CASE.n * KERNELS_CASE.k


def test_the_published_data_are_what_their_source_prints() -> None:
    """Speed-ups of steps, and efficiencies of a datasheet derated to 92 % of 8 TB/s and 78 % of 4500 TFLOP/s."""
    printed = [1.808, 1.690, 1.637, 1.700, 1.188, 1.321, 1.595, 1.440]
    assert [row.speedup for row in STEPS] == pytest.approx(printed, abs=6e-4)
    percent = {
        (one.direction, one.operand): elements_of(KERNELS_CASE)[one.operand]
        * CAST_BYTES["mxfp8"]
        / one.us
        / 1e4
        / (0.92 * 8)
        if one.kind == "quantise"
        else KERNEL_FLOPS / one.us / 1e4 / (0.78 * 4500)
        for one in KERNELS
        if one.kind in ("quantise", "gemm")
    }
    assert percent == pytest.approx(
        {
            ("forward", "rows"): 73.7, ("forward", "weights"): 74.0, ("dgrad", "gradient"): 76.6,
            ("dgrad", "weights"): 68.4, ("wgrad", "gradient"): 78.1, ("wgrad", "rows"): 81.9,
            ("forward", ""): 65.6, ("dgrad", ""): 65.1, ("wgrad", ""): 52.1,
        },
        abs=0.06,
    )  # fmt: skip


# The fit


def test_the_packaged_fits_are_what_fitting_finds_now_and_the_projections_constants() -> None:
    """Otherwise: ``python -m benchmarks.validation --write``."""
    now = fit_file(draws=2)
    tables = [table.drop(columns=["case", "role"]) for table in (gemm_fit.leave_one_out(), packaged.leave_one_out())]
    assert tables[0].to_numpy(float) == pytest.approx(tables[1].to_numpy(float), rel=1e-4)
    for gpu, stored in (("B200", fit_b200()), ("H100", fit_h100())):
        found = now["fits"][gpu]
        kept, of_projection = (
            [[float(getattr(one, name)) for name in stored.free] for one in calibrations]
            for calibrations in ([stored.calibration, *stored.draws[:2]], [CALIBRATION])
        )
        assert [found["values"], *found["draws"]] == [pytest.approx(one, rel=1e-4) for one in kept]
        assert of_projection == [pytest.approx(kept[0], rel=1e-3)]
        assert [row["model"] for row in found["residuals"]] == pytest.approx(list(stored.residuals["model"]), rel=1e-4)
        assert len(stored.draws) == gemm_fit.DRAWS


def synthetic() -> list[Observation]:
    """torchao's observations with the true constants' own values, all of them fitted."""
    return [replace(one, value=one.predict(TRUTH), fitted=True) for one in b200_observations()]


def test_a_fit_finds_the_constants_that_made_the_data_and_one_wrong_figure_does_not_bend_the_others() -> None:
    found = fit(synthetic(), B200_FREE)
    for name in B200_FREE:
        assert float(getattr(found, name)) == pytest.approx(float(getattr(TRUTH, name)), rel=0.02), name
    wrong = [replace(one, value=2 * one.value) if i == 20 else one for i, one in enumerate(synthetic())]
    bent = rates_of(B200, fit(wrong, B200_FREE), alone=True)
    assert bent.low == pytest.approx(2500e12, rel=0.02)
    assert gain(32768, 2048, 7168, 8, bent) == pytest.approx(gain(32768, 2048, 7168, 8, RATES), rel=0.02)


def test_only_fitted_observations_count() -> None:
    changed = [one if one.fitted else replace(one, value=3 * one.value) for one in b200_observations()]
    assert rates_of(B200, fit(changed, B200_FREE)) == rates_of(B200, fitted_b200())
    roles = fit_b200().residuals.groupby(["kind", "role"]).size()
    assert (roles["step", "fitted"], roles["step", "predicted"], roles["speed-up", "predicted"]) == (4, 12, 2)
    assert (fit_h100().residuals.query("kind == 'step'")["role"] == "predicted").all()


def test_a_row_that_is_left_out_has_no_say_in_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gemm_fit.leave_one_out()
    changed = [row._replace(bf16_us=1.3 * row.bf16_us) if i == 1 else row for i, row in enumerate(STEPS)]
    monkeypatch.setattr(gemm_fit, "STEPS", tuple(changed))
    after = gemm_fit.leave_one_out()
    assert after["left_out"][1] == pytest.approx(before["left_out"][1])
    assert after["measured"][1] == pytest.approx(1.3 * before["measured"][1])
    assert after["left_out"][5] != pytest.approx(before["left_out"][5])


def test_how_well_the_model_meets_what_it_was_not_fitted_on() -> None:
    b200, h100 = (one.residuals.query("kind == 'step' and role == 'predicted'") for one in (fit_b200(), fit_h100()))
    few_rows = h100["name"].eq("16384×1408×2048, 8 even groups, fp8")
    assert few_rows.sum() == 1
    for predicted in (b200[b200["name"].str.endswith("mxfp8")], h100[~few_rows]):
        assert predicted["error"].abs().max() < GOAL


# Intervals and layouts


def test_an_interval_is_as_wide_as_the_errors_of_the_model() -> None:
    """With one free rate and one observation, its logarithm is normal with the observation's error."""
    one = next(one for one in b200_observations() if one.name == "forward: gemm")
    single = fit([one], ("blackwell_low",))
    drawn = replace(fit_b200(), calibration=single, draws=tuple(resampled(single, [one], ("blackwell_low",), 200)))
    rate = estimate(drawn, lambda rates: rates.low)
    spread = spread_by_kind(residuals([one], single))["kernel"]
    assert math.log(rate.high / rate.low) == pytest.approx(2 * 1.645 * spread, rel=0.2)
    assert rate.low < KERNEL_FLOPS / one.value * 1e6 < rate.high


def test_intervals_hold_their_value_and_671b_breaks_even_before_16b() -> None:
    large, small = (
        break_even(replace(expert_work("one node", model, 8192, ep=8).case, groups=8), fit_b200())
        for model in ("671B", "16B")
    )
    assert large.low < large.value < large.high < small.low < small.value < small.high
    assert rows_text(estimate(fit_b200(), lambda rates: math.inf)) == "never [never, never]"


def test_the_verdict_is_that_of_the_interval() -> None:
    table = gain_table((*published_work(), expert_work("short", "16B", 256, ep=8)), fit_b200())
    assert len(table) == 3 * 2 * 2
    for row in table.itertuples():
        low, high = (float(text) for text in str(row.gain).split("[")[1].rstrip("]").split(", "))
        assert row.verdict == ("saves time" if low > 1 else "loses time" if high < 1 else "too near to call")
    assert set(table[table["layout"] == "short"]["verdict"]) == {"loses time"}
