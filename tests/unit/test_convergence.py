import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from moelab.analysis import Answer, compare_convergence, compare_held_out, final_losses, judge, seeds_needed
from moelab.analysis.equivalence import equivalence_power, lower_sd_limit, paired_tests
from moelab.errors import BadInput

ALPHA = 0.05
FACTOR = 2.0
DRAWS = 4000
ALLOWANCE = 3 * math.sqrt(ALPHA * (1 - ALPHA) / DRAWS)
SEEDS = (3, 4, 5, 8)
RATIOS = (0.05, 0.3, 1.0)  # standard deviation of the differences over that of the reference


def simulate(n: int, ratio: float, true_difference: float):
    """Differences and reference losses of ``DRAWS`` studies with a seed-to-seed standard deviation of 1."""
    rng = np.random.default_rng([n, int(100 * ratio), int(10 * true_difference)])
    reference_NM = rng.normal(size=(n, DRAWS))
    return true_difference + ratio * rng.normal(size=(n, DRAWS)), reference_NM


def derived_margin(differences_NM, reference_NM):
    margin_M = FACTOR * lower_sd_limit(reference_NM, alpha=ALPHA / 2)
    return paired_tests(differences_NM, margin_M, tost_alpha=ALPHA / 2, t_alpha=ALPHA)


# --- calibration: the rates that the verdict promises ---------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n", SEEDS)
def test_false_equivalent_rate_at_the_margin(n, ratio):
    tests = derived_margin(*simulate(n, ratio, FACTOR))
    assert tests.equivalent.mean() <= ALPHA + ALLOWANCE


@pytest.mark.parametrize("n", SEEDS)
def test_false_equivalent_rate_where_differences_follow_the_reference(n):
    # The bound holds for any dependence: here an arm regresses to the mean, so d falls as the reference rises.
    differences, reference = simulate(n, 0.05, FACTOR)
    assert derived_margin(differences - 0.5 * reference, reference).equivalent.mean() <= ALPHA + ALLOWANCE


@pytest.mark.parametrize("n", SEEDS)
def test_the_estimated_spread_itself_would_break_the_rate(n):
    # Why the margin uses a confidence limit: with the estimate in its place the rate is about seven times too high.
    differences, reference = simulate(n, 0.05, FACTOR)
    naive_margin_M = FACTOR * reference.std(axis=0, ddof=1)
    naive = paired_tests(differences, naive_margin_M, tost_alpha=ALPHA, t_alpha=ALPHA)
    assert naive.equivalent.mean() > 0.3


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n", SEEDS)
def test_given_margin_reaches_its_level(n, ratio):
    differences, _ = simulate(n, ratio, FACTOR)
    rate = paired_tests(differences, FACTOR, tost_alpha=ALPHA, t_alpha=ALPHA).equivalent.mean()
    assert rate <= ALPHA + ALLOWANCE
    if ratio < 1.0:  # with wide differences and few seeds the two one-sided tests are rarely both passed
        assert rate >= ALPHA - ALLOWANCE


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n", SEEDS)
def test_false_different_rate_at_no_difference(n, ratio):
    assert derived_margin(*simulate(n, ratio, 0.0)).different.mean() <= ALPHA + ALLOWANCE


@pytest.mark.parametrize(("n", "ratio"), [(3, 0.05), (4, 0.05), (8, 0.05), (8, 0.3)])
def test_tight_differences_are_found_equivalent(n, ratio):
    assert derived_margin(*simulate(n, ratio, 0.0)).equivalent.mean() >= 0.8


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_a_difference_of_twice_the_margin_is_found(ratio):
    tests = derived_margin(*simulate(8, ratio, 2 * FACTOR))
    assert tests.different.mean() >= 0.95
    assert tests.equivalent.mean() == 0.0


# --- references ------------------------------------------------------------------------------------------------------


def test_tests_agree_with_statsmodels_and_scipy():
    rng = np.random.default_rng(0)
    reference = rng.normal(3.6, 0.03, size=5)
    arm = reference + rng.normal(0.004, 0.006, size=5)
    tests = paired_tests(arm - reference, 0.02, tost_alpha=0.05, t_alpha=0.05)
    t = stats.ttest_rel(arm, reference)
    interval = t.confidence_interval(0.90)
    assert tests.tost_p[0] == pytest.approx(ttost_paired(arm, reference, -0.02, 0.02)[0])
    assert tests.t_p[0] == pytest.approx(t.pvalue)
    assert (tests.low[0], tests.high[0]) == pytest.approx((interval.low, interval.high))


def test_columns_are_independent_studies():
    differences, reference = simulate(4, 0.3, 0.5)
    together = derived_margin(differences[:, :20], reference[:, :20])
    for column in range(20):
        alone = derived_margin(differences[:, column], reference[:, column])
        assert alone.tost_p[0] == pytest.approx(together.tost_p[column])


def test_lower_limit_covers():
    rng = np.random.default_rng(1)
    above = lower_sd_limit(rng.normal(size=(4, 20_000)), alpha=0.025) > 1.0
    assert above.mean() == pytest.approx(0.025, abs=0.004)


@pytest.mark.parametrize(("n", "ratio"), [(3, 0.3), (5, 1.0), (8, 1.0)])
def test_power_agrees_with_simulation(n, ratio):
    computed = equivalence_power(
        n, sd_difference=ratio, alpha=ALPHA, margin=None, reference_sd=1.0, margin_factor=FACTOR
    )
    assert computed == pytest.approx(derived_margin(*simulate(n, ratio, 0.0)).equivalent.mean(), abs=0.03)


@pytest.mark.parametrize("margin", [None, 0.05])
def test_seeds_needed_is_the_fewest(margin):
    options = {"sd_difference": 0.04, "reference_sd": 0.03, "alpha": ALPHA, "margin": margin, "margin_factor": FACTOR}
    n = seeds_needed(**options)
    assert equivalence_power(n, **options) >= 0.8 > equivalence_power(n - 1, **options)


# --- the verdict -----------------------------------------------------------------------------------------------------

REFERENCE = {0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61}
NAMES = {"arm": "mxfp8_standard", "reference": "bf16_standard"}


def shifted(*shifts: float) -> dict[int, float]:
    return {seed: REFERENCE[seed] + shift for seed, shift in enumerate(shifts)}


def test_equivalent_is_stated_with_its_numbers():
    verdict = judge(shifted(0.003, 0.005, 0.001, 0.004), REFERENCE, **NAMES)
    assert verdict.answer is Answer.EQUIVALENT
    assert verdict.mean_difference_nats == pytest.approx(0.00325)
    assert -verdict.margin_nats < verdict.interval.low < verdict.interval.high < verdict.margin_nats
    assert verdict.interval.level == pytest.approx(0.95)
    assert verdict.reference_sd == pytest.approx(np.std(list(REFERENCE.values()), ddof=1))
    assert "lower 97.5 % confidence limit" in verdict.margin_source
    sentence = verdict.sentence()
    for part in (
        "MXFP8 differs from BF16 (both standard all-to-all)",
        "+0.0032 nats",
        "95 % interval",
        "n = 4 seeds",
        ": equivalent.",
    ):
        assert part in sentence


def test_different():
    verdict = judge(shifted(0.30, 0.31, 0.29, 0.30), REFERENCE, **NAMES)
    assert verdict.answer is Answer.DIFFERENT
    assert verdict.t_p < 0.05
    assert verdict.settled_by == ""


def test_a_small_significant_difference_is_equivalent():
    verdict = judge(shifted(0.0040, 0.0041, 0.0039, 0.0040), REFERENCE, **NAMES)
    assert verdict.t_p < 0.001
    assert verdict.answer is Answer.EQUIVALENT


def test_insufficient_says_how_many_seeds():
    verdict = judge(shifted(0.08, -0.07, 0.05, -0.04), REFERENCE, **NAMES)
    assert verdict.answer is Answer.INSUFFICIENT
    assert "common seeds would show it with 80 % power" in verdict.sentence()


@pytest.mark.parametrize("shifts", [(), (0.001,), (0.001, 0.002)])
def test_fewer_than_three_seeds_are_insufficient_whatever_the_margin(shifts):
    verdict = judge(shifted(*shifts), REFERENCE, margin_nats=1.0, **NAMES)
    assert verdict.answer is Answer.INSUFFICIENT
    assert verdict.n_seeds == len(shifts)
    assert "At least 3 common seeds are needed." in verdict.sentence()


def test_no_spread_gives_no_margin_unless_one_is_given():
    same = dict.fromkeys(range(4), 3.6)
    verdict = judge(same, same, **NAMES)
    assert verdict.answer is Answer.INSUFFICIENT
    assert math.isnan(verdict.margin_nats)
    assert "margin_nats" in verdict.sentence()
    given = judge(same, same, margin_nats=0.01, **NAMES)
    assert given.answer is Answer.EQUIVALENT
    assert (given.tost_p, given.t_p, given.margin_source) == (0.0, 1.0, "given")
    assert given.interval.level == pytest.approx(0.90)


def test_a_constant_shift_past_a_given_margin_is_different():
    verdict = judge(dict.fromkeys(range(3), 1.5), dict.fromkeys(range(3), 1.0), margin_nats=0.1, **NAMES)
    assert verdict.answer is Answer.DIFFERENT


def test_unpaired_reference_seeds_count_for_the_spread_only():
    verdict = judge(shifted(0.003, 0.005, 0.001), REFERENCE, **NAMES)
    assert verdict.seeds == (0, 1, 2)
    assert verdict.reference_sd == pytest.approx(np.std(list(REFERENCE.values()), ddof=1))


def test_losses_that_are_not_finite_are_named():
    verdict = judge(shifted(0.003, 0.005, 0.001, 0.004) | {4: math.nan}, REFERENCE | {5: math.inf}, **NAMES)
    assert verdict.excluded == ("mxfp8_standard, seed 4: loss is nan", "bf16_standard, seed 5: loss is inf")
    assert verdict.answer is Answer.EQUIVALENT


@pytest.mark.parametrize(
    "option",
    [{"margin_nats": 0.0}, {"margin_nats": math.nan}, {"margin_factor": -1.0}, {"alpha": 0.5}, {"alpha": 5.0}],
)
def test_options_out_of_range(option):
    with pytest.raises(BadInput, match=next(iter(option))):
        judge(REFERENCE, REFERENCE, **NAMES, **option)


def test_held_out_losses():
    losses = {("bf16_standard", seed): loss for seed, loss in REFERENCE.items()}
    losses |= {("mxfp8_standard", seed): loss for seed, loss in shifted(0.003, 0.005, 0.001, 0.004).items()}
    verdict = compare_held_out(losses, **NAMES)
    assert verdict.answer is Answer.EQUIVALENT
    assert "held-out loss" in verdict.sentence()


# --- from the table --------------------------------------------------------------------------------------------------


def run_rows(arm: str, seed: int, final: float, steps: int = 80, run: str | None = None) -> pd.DataFrame:
    step = np.arange(1, steps + 1)
    loss = np.where(step > 72, final, 7.6 - step / 80)
    row = {"run": run or f"20261101-{arm}-{seed}", "arm": arm, "seed": seed, "segment": 0, "step": step, "loss": loss}
    return pd.DataFrame(row)


def study() -> pd.DataFrame:
    arm = shifted(0.003, 0.005, 0.001, 0.004)
    rows = [run_rows("bf16_standard", seed, loss) for seed, loss in REFERENCE.items()]
    return pd.concat(rows + [run_rows("mxfp8_standard", seed, loss) for seed, loss in arm.items()])


def test_final_loss_is_the_mean_of_the_last_tenth():
    final = final_losses(study())
    assert (final.first_step, final.last_step) == (73, 80)
    assert final.of("bf16_standard") == pytest.approx(REFERENCE)
    assert final.excluded == ()


def test_table_to_verdict():
    (verdict,) = compare_convergence(study(), reference="bf16_standard")
    expected = judge(shifted(0.003, 0.005, 0.001, 0.004), REFERENCE, **NAMES)
    assert verdict.steps == (73, 80)
    assert verdict.answer is expected.answer
    assert verdict.interval.low == pytest.approx(expected.interval.low)
    assert verdict.margin_nats == pytest.approx(expected.margin_nats)
    assert "steps 73 to 80" in verdict.sentence()


def test_runs_without_a_final_loss_are_left_out_and_named():
    table = study().set_index(["arm", "seed", "step"])
    table.loc[("mxfp8_standard", 0, 78), "loss"] = math.nan
    table = table.drop([("bf16_standard", 1, 75)]).drop([("bf16_standard", 2, step) for step in range(41, 81)])
    (verdict,) = compare_convergence(table.reset_index(), reference="bf16_standard")
    assert verdict.seeds == (3,)
    assert verdict.excluded == (
        "bf16_standard, seed 1 (20261101-bf16_standard-1): 1 of 8 final steps are not in the log",
        "bf16_standard, seed 2 (20261101-bf16_standard-2): ended at step 40 of 80",
        "mxfp8_standard, seed 0 (20261101-mxfp8_standard-0): loss is not finite at step 78",
    )


def test_the_newest_finished_run_of_a_seed_counts():
    newer = run_rows("mxfp8_standard", 0, 9.9, run="20261102-a")
    unfinished = run_rows("mxfp8_standard", 0, 1.1, steps=20, run="20261103-b")
    final = final_losses(pd.concat([study(), newer, unfinished]))
    assert final.of("mxfp8_standard")[0] == pytest.approx(9.9)
    assert len(final.excluded) == 2


def test_planned_steps_show_that_every_run_stopped_early():
    (verdict,) = compare_convergence(study(), reference="bf16_standard", steps=100)
    assert verdict.answer is Answer.INSUFFICIENT
    assert len(verdict.excluded) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "fp8_standard"}, "the arms are bf16_standard, mxfp8_standard"),
        ({"reference": "bf16_standard", "arms": ["fp8_deepep"]}, "fp8_deepep"),
        ({"reference": "bf16_standard", "final_fraction": 0.0}, "final_fraction"),
    ],
)
def test_bad_input_says_what_is_valid(options, message):
    with pytest.raises(BadInput, match=message):
        compare_convergence(study(), **options)


def test_a_table_without_losses_is_refused():
    with pytest.raises(BadInput, match="no loss"):
        final_losses(study().assign(loss=math.nan))


def test_analysis_loads_neither_plotly_nor_torch():
    code = "import sys, moelab.analysis; print([m for m in ('plotly', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
