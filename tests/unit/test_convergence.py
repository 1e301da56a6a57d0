import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from moelab.analysis import verdict as verdicts
from moelab.analysis.convergence import compare_convergence, final_losses
from moelab.analysis.equivalence import (
    Margin,
    equivalence_power,
    lower_sd_limit,
    outlying_seeds,
    paired_tests,
    seeds_needed,
    trimmed_sd,
)
from moelab.analysis.verdict import Answer, ArmSeeds, Doubtful, Verdict, correct_for_arms
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
    return paired_tests(differences_NM, margin_M, tost_alpha=ALPHA / 2)


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


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("n", SEEDS)
def test_given_margin_reaches_its_level(n, ratio):
    differences, _ = simulate(n, ratio, FACTOR)
    tests = paired_tests(differences, FACTOR, tost_alpha=ALPHA)
    assert max(tests.equivalent.mean(), tests.different.mean()) <= ALPHA + ALLOWANCE
    if ratio < 1.0:  # with wide differences and few seeds the two one-sided tests are rarely both passed
        assert min(tests.equivalent.mean(), tests.different.mean()) >= ALPHA - ALLOWANCE


@pytest.mark.parametrize(("n", "ratio"), [(4, 0.05), (5, 0.05), (8, 0.05), (8, 0.3)])  # 3 seeds: 0.7
def test_tight_differences_are_found_equivalent(n, ratio):
    tests = derived_margin(*simulate(n, ratio, 0.0))
    assert tests.equivalent.mean() >= 0.8
    assert tests.different.mean() == 0.0


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_a_difference_of_twice_the_margin_is_found(ratio):
    tests = derived_margin(*simulate(8, ratio, 2 * FACTOR))
    assert tests.different.mean() >= 0.95
    assert tests.equivalent.mean() == 0.0


def test_a_small_shift_is_never_different_however_many_seeds():
    # A quarter of the margin: with more seeds the answer turns from open to equivalent, and is nothing else.
    for n in (4, 8, 16, 64):
        differences, _ = simulate(n, 0.3, FACTOR / 4)
        tests = paired_tests(differences, FACTOR, tost_alpha=ALPHA)
        assert tests.different.mean() == 0.0
    assert tests.equivalent.mean() == 1.0


# --- one outlying seed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5])  # one step of the test, and two
def test_normal_seeds_are_rarely_said_to_be_outlying(n):
    rng = np.random.default_rng(n)
    alarms = [bool(outlying_seeds(dict(enumerate(rng.normal(3.6, 0.02, size=n))))) for _ in range(DRAWS)]
    assert np.mean(alarms) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / DRAWS)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("far", [-4.0, 0.3, 4.4])
def test_one_seed_cannot_set_the_spread(n, far):
    losses = 3.6 + 0.02 * np.random.default_rng(n).normal(size=n)
    with_outlier = np.append(losses, losses.mean() + far)
    assert trimmed_sd(with_outlier)[0] == pytest.approx(losses.std(ddof=1))


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("n", [4, 5, 12])
def test_a_seed_is_outlying_from_grubbs_critical_value_on(n, side):
    # G = |x - mean| / s of all values, at 0.5 % for each of two steps; one that lies farther hides no other (Rosner).
    t = stats.t.ppf(1 - 0.005 / (2 * n), n - 2)
    critical = (n - 1) / math.sqrt(n) * math.sqrt(t**2 / (n - 2 + t**2))
    others = np.random.default_rng(n).normal(3.6, size=n - 1)
    for far in np.geomspace(1, 2000, 150):
        losses = [*others, 3.6 + side * far]
        named = side * stats.zscore(losses, ddof=1)[-1] > critical
        assert outlying_seeds(dict(enumerate(losses))) == ((n - 1,) if named else ())
        assert (outlying_seeds(dict(enumerate([*losses, 3.6 + 1.2 * side * far]))) == (n, n - 1)) == named


def test_an_outlying_seed_is_found_where_the_others_agree_exactly():
    assert outlying_seeds({0: 3.6, 1: 3.62, 2: 8.0, 3: 8.1}) == ()  # two of four: which are apart is not known
    assert outlying_seeds({0: 3.6, 1: 3.6, 2: 3.6, 7: 3.7}) == (7,)
    assert outlying_seeds({0: 3.6, 1: 3.601, 7: 8.0}) == (7,)
    assert outlying_seeds({0: 3.6, 1: 3.6, 2: 3.6}) == ()
    assert outlying_seeds({0: 3.6, 1: 8.0}) == ()


# --- references ------------------------------------------------------------------------------------------------------


def test_tests_agree_with_statsmodels_and_scipy():
    rng = np.random.default_rng(0)
    reference = rng.normal(3.6, 0.03, size=5)
    arm = reference + rng.normal(0.004, 0.006, size=5)
    tests = paired_tests(arm - reference, 0.02, tost_alpha=0.05)
    t = stats.ttest_rel(arm, reference)
    interval = t.confidence_interval(0.90)
    assert tests.tost_p[0] == pytest.approx(ttost_paired(arm, reference, -0.02, 0.02)[0])
    assert tests.t_p[0] == pytest.approx(t.pvalue)
    assert (tests.low[0], tests.high[0]) == pytest.approx((interval.low, interval.high))
    above = stats.ttest_1samp(arm - reference, 0.001, alternative="greater").pvalue
    for differences in (arm - reference, reference - arm):
        assert paired_tests(differences, 0.001, tost_alpha=0.05).beyond_p[0] == pytest.approx(above)
        assert paired_tests(differences, 0.02, tost_alpha=0.05).tost_p[0] == pytest.approx(tests.tost_p[0])


def test_columns_are_independent_studies():
    differences, reference = simulate(4, 0.3, 0.5)
    together = derived_margin(differences[:, :20], reference[:, :20])
    for column in range(20):
        alone = derived_margin(differences[:, column], reference[:, column])
        assert alone.tost_p[0] == pytest.approx(together.tost_p[column])


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_lower_limit_covers(n):
    above = lower_sd_limit(np.random.default_rng(1).normal(size=(n, 20_000)), alpha=0.025) > 1.0
    assert above.mean() == pytest.approx(0.025, abs=0.005)


def margin_of_normals(**given) -> Margin:
    known = {"nats": FACTOR, "cap_nats": 1e9, "widest_nats": 1e9, "reference_sd": 1.0, "given": False}
    return Margin(**{"source": "", **known, **given})


@pytest.mark.parametrize(("n", "ratio"), [(3, 0.3), (5, 1.0), (8, 1.0)])
def test_power_agrees_with_simulation(n, ratio):
    differences, reference = simulate(n, ratio, 0.0)
    for cap in (1e9, 2.2 * ratio):
        margin_M = np.minimum(FACTOR * lower_sd_limit(reference, alpha=ALPHA / 2), cap)
        (derived,) = equivalence_power(
            n, sd_difference=ratio, reference_sd=1.0, margin=margin_of_normals(cap_nats=cap, nats=math.nan)
        )
        simulated = paired_tests(differences, margin_M, tost_alpha=ALPHA / 2).equivalent.mean()
        assert derived == pytest.approx(simulated, abs=0.03)
    (given,) = equivalence_power(n, sd_difference=ratio, reference_sd=0.0, margin=margin_of_normals(given=True))
    simulated = paired_tests(differences, FACTOR, tost_alpha=ALPHA).equivalent.mean()
    assert given == pytest.approx(simulated, abs=0.03)


def test_the_range_of_seeds_is_that_of_the_spreads_that_could_be_true():
    # With one spread known, the ends are what the 10 % and 90 % quantiles of the other ask for.
    def needed(margin, sd_difference, reference_sd=0.0):
        powers = (
            (n, equivalence_power(n, sd_difference=sd_difference, reference_sd=reference_sd, margin=margin)[0])
            for n in range(3, 101)
        )
        return next((n for n, power in powers if power >= 0.8), 101)

    n, given, derived = 9, margin_of_normals(given=True), margin_of_normals(reference_sd=0.7)
    trimmed = trimmed_sd(np.random.default_rng(7).normal(size=(n, 20_000)))
    of_pairs = seeds_needed(n_seeds=3, sd_difference=1.4, n_reference=n, margin=given)
    of_reference = seeds_needed(n_seeds=10**6, sd_difference=1.0, n_reference=n, margin=derived)
    for end, quantile in enumerate((0.1, 0.9)):
        near = (quantile - 0.06, quantile + 0.06)  # of 200 draws
        low, high = (needed(given, 1.4 * math.sqrt(2 / stats.chi2.ppf(1 - q, 2))) for q in near)
        assert low <= of_pairs[end] <= high
        low, high = (needed(derived, 1.0, 0.7 / np.quantile(trimmed, q)) for q in near)
        assert low <= of_reference[end] <= high
    assert seeds_needed(n_seeds=n, sd_difference=100.0, n_reference=n, margin=given) == (None, None)


# --- the verdict -----------------------------------------------------------------------------------------------------

REFERENCE = {0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61}


def judge(losses, others, *, arm_diverged=None, arm_lost=None, reference_lost=None, **options: Any) -> Verdict:
    ours = ArmSeeds.of(losses, arm_diverged or {}, arm_lost or {})
    theirs = ArmSeeds.of(others, {}, reference_lost or {})
    return verdicts.judge(ours, theirs, **{"arm": "mxfp8_standard", "reference": "bf16_standard"} | options)


def shifted(*shifts: float) -> dict[int, float]:
    return {seed: REFERENCE[seed] + shift for seed, shift in enumerate(shifts)}


def test_equivalent_is_stated_with_its_numbers():
    verdict = judge(shifted(0.003, 0.005, -0.001, 0.004), REFERENCE)
    assert verdict.answer is Answer.EQUIVALENT
    assert verdict.mean_difference_nats == pytest.approx(0.00275)
    assert -verdict.margin_nats < verdict.interval.low < verdict.interval.high < verdict.margin_nats
    assert verdict.margin_nats == pytest.approx(FACTOR * lower_sd_limit(list(REFERENCE.values()), alpha=ALPHA / 2)[0])
    assert verdict.interval.level == pytest.approx(1 - ALPHA)
    assert "lower 97.5 % confidence limit" in verdict.margin_source
    words = r"MXFP8 .* BF16 \(both standard .*\) by \+0\.0028 nats.*95 % .*\(cap 0\.0360\), n = 4 seeds: equivalent\."
    assert re.search(words, verdict.sentence())


def test_unpaired_reference_seeds_count_for_the_spread_only():
    verdict = judge(shifted(0.003, 0.005, 0.001), REFERENCE)
    assert verdict.seeds == (0, 1, 2)
    assert verdict.reference_sd == pytest.approx(trimmed_sd(list(REFERENCE.values()))[0])


def test_seeds_that_scatter_widely_do_not_hide_a_worse_arm():
    reference = dict(enumerate(3.6 + 0.16 * np.random.default_rng(0).normal(size=8)))
    verdict = judge({seed: loss + 0.1 for seed, loss in reference.items()}, reference)
    assert verdict.answer is Answer.DIFFERENT
    assert verdict.margin_nats == pytest.approx(0.01 * np.mean(list(reference.values())))
    assert "its cap" in verdict.margin_source
    wider = judge({seed: loss + 0.1 for seed, loss in reference.items()}, reference, margin_cap_nats=0.5)
    assert 0.1 < wider.margin_nats < 0.5
    assert wider.answer is Answer.EQUIVALENT


def test_an_outlying_reference_seed_is_named_and_decides_nothing_until_it_is_dropped():
    reference = {0: 3.60, 1: 3.62, 2: 3.64, 3: 3.65, 4: 8.0}
    arm = {seed: loss + 1.0 for seed, loss in reference.items()}
    verdict = judge(arm, reference)
    assert verdict.answer is Answer.INSUFFICIENT
    assert verdict.outlying_seeds == (4,)
    assert verdict.margin_nats < verdict.margin_cap_nats == pytest.approx(0.01 * 3.6275)
    assert verdict.sentence().startswith("Insufficient data: seed 4 of the reference BF16 lies apart")
    assert "--drop-seed 4" in verdict.sentence()
    dropped = judge(arm, reference, dropped_seeds=[4, 9])  # 9 may be a seed of another arm
    assert (dropped.answer, dropped.seeds) == (Answer.DIFFERENT, (0, 1, 2, 3))
    assert "Dropped from all arms as requested: seed 4." in dropped.sentence()


EIGHT = dict(enumerate(3.6 + 0.02 * np.random.default_rng(3).normal(size=8)))


def nearly(losses, *, nan=()):
    return {seed: math.nan if seed in nan else loss + 0.001 for seed, loss in losses.items()}


@pytest.mark.parametrize("failed", [(4,), (0, 2, 3, 5, 7), tuple(range(8))])
def test_a_seed_that_diverged_in_the_arm_alone_makes_it_different(failed):
    verdict = judge(nearly(EIGHT, nan=failed), EIGHT)
    assert verdict.answer is Answer.DIFFERENT
    assert verdict.arm_diverged == failed
    assert verdict.sentence().startswith(f"Different: {len(failed)} of 8 seeds diverged in MXFP8 and not in BF16 (seed")
    stopped = dict.fromkeys(failed, "stopped: loss is nan at step 41")
    finished = {seed: loss for seed, loss in nearly(EIGHT).items() if seed not in failed}
    assert judge(finished, EIGHT, arm_diverged=stopped).answer is Answer.DIFFERENT


SAME = dict.fromkeys(range(4), 3.6)
WITHOUT_4 = {seed: loss for seed, loss in EIGHT.items() if seed != 4}
LATE = {"steps": (1351, 1500), "untrained_nats": 11.5}
YES, NO, OPEN = Answer.EQUIVALENT, Answer.DIFFERENT, Answer.INSUFFICIENT
UNTAUGHT = {seed: loss + 6.85 - 3.6 for seed, loss in EIGHT.items()}  # ln 2048 is 7.62
SCATTERED = {seed: 6.7 + 50 * (loss - 3.6) for seed, loss in EIGHT.items()}
ANSWERS: dict[str, tuple[dict[int, float], dict[int, float], dict[str, Any], Answer, str]] = {
    "outside of the margin": (shifted(0.30, 0.31, 0.29, 0.30), REFERENCE, {}, NO, r": different\.$"),
    "better by more than the margin": (shifted(-0.30, -0.31, -0.29, -0.30), REFERENCE, {}, NO, r": different\.$"),
    "three seeds": (shifted(0.001, 0.002, 0.003), REFERENCE, {"margin_nats": 0.05}, YES, "n = 3"),
    "a small shift that is not zero": (
        *(shifted(0.0040, 0.0041, 0.0039, 0.0040), REFERENCE, {}, YES),
        r"equivalent, with a shift of \+0.0040 nats\.",
    ),
    "the same to the last digit": (REFERENCE, REFERENCE, {}, YES, "same to the last digit: both may have run the same"),
    "one run twice": (
        *(shifted(0.003, 0.005, 0.001, 0.004), REFERENCE | {1: 3.6}, {"margin_nats": 0.1}, YES),
        r"Seeds 0, 1 of BF16 end at the same loss to the last digit: they may be one run that counts twice",
    ),
    "across the margin": (
        *(shifted(0.08, -0.07, 0.05, -0.04), REFERENCE, {}, OPEN),
        r"zero is not excluded.* If the true difference is 0, \d+ to (more than )?\d+ common seeds",
    ),
    "beside zero": (shifted(0.05, 0.01, 0.06, 0.03), REFERENCE, {"margin_nats": 0.05}, OPEN, "zero is excluded"),
    "far too few seeds": (
        *(shifted(2.0, -2.0, 1.0, -1.0), REFERENCE, {"margin_nats": 0.01}, OPEN),
        "is 0, more than 100 common seeds would show it with 80 % power",
    ),
    "past a narrow margin of few seeds": (
        *(shifted(0.053, 0.054, 0.052, 0.053), REFERENCE, {"margin_cap_nats": 0.3}, NO),
        r"different\. .*The margin is narrow .*: 4 seeds of the reference leave room for one of up to ±0\.2153, which",
    ),
    "no seed": (shifted(), REFERENCE, {"margin_nats": 1.0}, OPEN, "At least 3 common seeds are needed"),
    "two seeds": (shifted(0.001, 0.002), REFERENCE, {"margin_nats": 1.0}, OPEN, "n = 2 .*At least 3 common seeds"),
    "two seeds that are far off": (shifted(1.0, 1.001), REFERENCE, {"margin_nats": 0.1}, OPEN, "At least 3 common"),
    "no spread": (SAME, SAME, {}, OPEN, "no margin.*--margin"),
    "no spread, but past the cap": (dict.fromkeys(SAME, 4.6), SAME, {}, NO, "no margin"),
    "no spread, and a given margin": (SAME, SAME, {"margin_nats": 0.01}, YES, "90 % interval"),
    "a constant shift past a given margin": (
        *(dict.fromkeys(range(3), 1.5), dict.fromkeys(range(3), 1.0), {"margin_nats": 0.1}, NO),
        "as given, wider than the usual cap 0.0100",
    ),
    "diverged in the reference alone": (
        *(nearly(EIGHT), EIGHT | {4: math.nan}, {}, OPEN),
        r"1 of 8 seeds diverged in the reference BF16 and not in MXFP8 \(seed 4: loss is nan\)",
    ),
    "diverged in both": (nearly(EIGHT, nan=[4]), EIGHT | {4: math.inf}, {}, YES, "n = 7 .*diverged in both: seed 4"),
    "lost to a machine": (
        *(nearly(WITHOUT_4), EIGHT, {"arm_lost": {4: "node gpu-12 failed"}}, YES),
        "Left out: MXFP8, seed 4: node gpu-12 failed; assumed to be unrelated",
    ),
    "may have diverged": (
        *(nearly(WITHOUT_4), EIGHT, {"arm_lost": {4: Doubtful("its record is damaged; loss is nan at step 3")}}, OPEN),
        r"^Insufficient data: 1 of 8 seeds of MXFP8 may have diverged \(seed 4: its record",
    ),
    "diverged where the reference has no result": (
        *(nearly(EIGHT, nan=[4]), WITHOUT_4, {"reference_lost": {4: "cancelled"}}, OPEN),
        "which has no result for them",
    ),
    "diverged where the reference has no result, and is far off": (
        *(nearly(UNTAUGHT, nan=[4]), WITHOUT_4, {"reference_lost": {4: "cancelled"}}, NO),
        "which has no result for them",
    ),
    "diverged where the reference has one result": (
        *(nearly(EIGHT, nan=[4, 5]), WITHOUT_4, {"reference_lost": {4: "cancelled"}}, NO),
        r"^Different: 2 of 8 seeds diverged in MXFP8 and not in BF16 \(",
    ),
    "the reference may have diverged": (
        *(nearly(EIGHT), WITHOUT_4, {"reference_lost": {4: Doubtful("damaged")}}, OPEN),
        "1 of 8 seeds of BF16 may have diverged",
    ),
    "another attempt finished": (
        *(nearly(EIGHT), EIGHT, {"arm_diverged": {4: "x"}, "arm_lost": {5: "x"}}, YES),
        "^(?!.*Left out).*n = 8",
    ),
    "diverged, and another attempt was lost": (
        nearly(EIGHT, nan=[4]),
        EIGHT,
        {"arm_lost": {4: "x"}},
        NO,
        "^((?!x).)*$",
    ),
    "learnt a tenth": (nearly(UNTAUGHT), UNTAUGHT, {"untrained_nats": math.log(2048)}, YES, r"equivalent"),
    "learnt less than a wide margin": (
        *(nearly(SCATTERED), SCATTERED, {"untrained_nats": 7.62, "margin_cap_nats": 5.0}, Answer.NOT_TRAINED),
        "must end at least 1",
    ),
    "learnt less than a wide margin that was given": (
        *(nearly(SCATTERED), SCATTERED, {"untrained_nats": 7.62, "margin_nats": 5.0}, YES),
        "equivalent",
    ),
    "a divergence cannot be dropped": (nearly(EIGHT, nan=[4]), EIGHT, {"dropped_seeds": [4]}, NO, "^Different: 1 of 8"),
    "ended inside its warm-up": (
        *(nearly(EIGHT), EIGHT, {**LATE, "lr_warmup_steps": 1500}, YES),
        r"ended inside its warm-up \(step 1,500 of 1,500\): the learning rate was still rising\.",
    ),
    "after its warm-up": (nearly(EIGHT), EIGHT, {**LATE, "lr_warmup_steps": 1499}, YES, "^(?!.*warm-up)"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers(case):
    arm, reference, options, answer, words = ANSWERS[case]
    verdict = judge(arm, reference, **options)
    assert verdict.answer is answer
    assert re.search(words, verdict.sentence())
    assert bool(verdict.settled_by) == (answer is OPEN and not verdict.decided_by)


def test_differences_of_zero_are_no_evidence_of_one():
    assert judge(shifted(0.0040, 0.0041, 0.0039, 0.0040), REFERENCE).t_p < 0.001
    given = judge(SAME, SAME, margin_nats=0.01)
    assert (given.tost_p, given.t_p, given.margin_source) == (0.0, 1.0, "given")


@pytest.mark.parametrize("end", [7.6, 6.85])  # 6.85 to 6.89: a tenth of ln 2048 is 0.76
def test_arms_that_have_not_learnt_are_not_judged(end):
    reference = {seed: end + 0.02 * (seed % 3) for seed in range(5)}
    arm = {seed: loss + 0.001 for seed, loss in reference.items()}
    assert judge(arm, reference).answer is Answer.EQUIVALENT
    verdict = judge(arm, reference, untrained_nats=math.log(2048))
    assert verdict.answer is Answer.NOT_TRAINED
    assert "an untrained model has 7.62" in verdict.sentence()
    failed = judge(arm, reference, untrained_nats=7.62, arm_diverged={9: "loss is nan at step 3"})
    assert failed.decided_by.startswith("1 of 6 seeds diverged in MXFP8")
    assert failed.findings[0].startswith("MXFP8 has not learnt")
    learnt = judge(arm, {seed: loss - 4.0 for seed, loss in reference.items()}, untrained_nats=7.62)
    assert learnt.answer is Answer.NOT_TRAINED
    assert "MXFP8 has not learnt" in learnt.sentence()
    assert "BF16 has not learnt" not in learnt.sentence()


@pytest.mark.parametrize(
    ("p_values", "stand"),  # at 5 %, in steps of a third, a half and all of it
    [((0.0168, 0.03, 0.04), 0), ((0.016, 0.024, 0.04), 3), ((0.016, 0.026, 0.04), 1), ((0.03, 0.04), 0)],
)
def test_the_correction_is_holms(p_values, stand):
    one = judge(shifted(0.2, 0.21, 0.2, 0.21), REFERENCE, arm="arm", margin_nats=0.05)
    diverged = replace(one, arm="diverged", beyond_p=math.nan, arm_diverged=(3,))  # no p value stands behind it
    for sided, level in ((1, 0.90), (2, 0.95)):  # of a margin that is given, and of a derived one: half of it
        interval = replace(one.interval, level=level)
        arms = [replace(one, arm=f"arm{p}", beyond_p=p / sided, interval=interval) for p in p_values]
        *corrected, kept = [verdict.answer for verdict in correct_for_arms([*arms, diverged])]
        assert corrected == [Answer.DIFFERENT] * stand + [Answer.INSUFFICIENT] * (len(p_values) - stand)
        assert kept is Answer.DIFFERENT


# --- from the table --------------------------------------------------------------------------------------------------


def run_rows(arm: str, seed: int, final: float) -> pd.DataFrame:
    step = np.arange(1, 81)
    loss = np.where(step > 72, final, 7.6 - step / 80)
    row = {"run": f"20261101-{arm}-{seed}", "arm": arm, "seed": seed, "segment": 0, "step": step, "loss": loss}
    return pd.DataFrame(row)


def study() -> pd.DataFrame:
    arm = shifted(0.003, 0.005, 0.001, 0.004)
    rows = [run_rows("bf16_standard", seed, loss) for seed, loss in REFERENCE.items()]
    return pd.concat(rows + [run_rows("mxfp8_standard", seed, loss) for seed, loss in arm.items()])


def test_final_loss_is_the_mean_of_the_last_tenth():
    final = final_losses(study())
    assert (final.first_step, final.last_step) == (73, 80)
    assert final.seeds["bf16_standard"].losses == pytest.approx(REFERENCE)


def test_runs_without_a_final_loss_are_left_out_and_named():
    table = study().set_index(["arm", "seed", "step"])
    table = table.drop([("bf16_standard", 1, 75)]).drop([("bf16_standard", 2, step) for step in range(41, 81)])
    (verdict,) = compare_convergence(final_losses(table.reset_index()), reference="bf16_standard")
    assert verdict.seeds == (0, 3)
    assert verdict.excluded == (
        "bf16_standard, seed 1: 1 of 8 final steps are not in the log",
        "bf16_standard, seed 2: ended at step 40 of 80",
    )
    assert "in the mean loss of steps 73 to 80" in verdict.sentence()
    assert "Left out: BF16, seed 1: 1 of 8 final steps" in verdict.sentence()


def test_a_final_loss_that_is_not_finite_is_a_divergence():
    table = study().set_index(["arm", "seed", "step"])
    table.loc[("mxfp8_standard", 0, 78), "loss"] = math.nan
    (verdict,) = compare_convergence(final_losses(table.reset_index()), reference="bf16_standard")
    assert verdict.answer is Answer.DIFFERENT
    assert "seed 0: loss is not finite at step 78" in verdict.sentence()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: judge(REFERENCE, REFERENCE, margin_nats=0.0), "margin_nats"),
        (lambda: judge(REFERENCE, REFERENCE, margin_nats=math.nan), "margin_nats"),
        (lambda: judge(REFERENCE, REFERENCE, margin_cap_nats=0.0), "margin_cap_nats"),
        (lambda: judge(REFERENCE, REFERENCE, margin_nats=0.5, margin_cap_nats=0.02), "leave one of them out"),
        (lambda: compare_convergence(final_losses(study()), reference="fp8"), "are bf16_standard, mxfp8_standard"),
        (lambda: final_losses(study().assign(loss=math.nan)), "no loss"),
        (lambda: final_losses(study().assign(seed=0)), "two runs of bf16_standard, seed 0"),
    ],
)
def test_bad_input_says_what_is_valid(call, message):
    with pytest.raises(BadInput, match=message):
        call()
