"""The verdict on a loss: its error rates by simulation, its statistics against references, its answers case by case."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from run_support import verdict_of
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from moelab.errors import BadInput
from moelab.judge import verdict as verdicts
from moelab.judge.equivalence import (
    COPIES_SPREAD,
    MARGIN_FLOOR,
    Margin,
    equivalence_margin,
    equivalence_power,
    lower_sd_limit,
    outlying_seeds,
    paired_tests,
    prediction_interval,
    seeds_needed,
    trimmed_sd,
)
from moelab.judge.verdict import (
    Answer,
    ArmSeeds,
    Verdict,
    correct_for_arms,
    final_losses,
)

ALPHA = 0.05
FACTOR = 2.0
DRAWS = 4000
ALLOWANCE = 3 * math.sqrt(ALPHA * (1 - ALPHA) / DRAWS)


def simulate(n: int, ratio: float, true_difference: float):
    """Differences and reference losses of ``DRAWS`` studies with a seed-to-seed standard deviation of 1.

    ``ratio`` is the standard deviation of the differences over that of the reference.
    """
    rng = np.random.default_rng([n, int(100 * ratio), int(10 * true_difference)])
    reference_NM = rng.normal(size=(n, DRAWS))
    return true_difference + ratio * rng.normal(size=(n, DRAWS)), reference_NM


def by_derived_margin(differences_NM, reference_NM):
    margin_M = FACTOR * lower_sd_limit(reference_NM, alpha=ALPHA / 2)
    return paired_tests(differences_NM, margin_M, tost_alpha=ALPHA / 2)


def by_given_margin(differences_NM, _reference_NM):
    return paired_tests(differences_NM, FACTOR, tost_alpha=ALPHA)


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_rates_at_a_true_difference_of_the_margin(n, ratio):
    differences, reference = simulate(n, ratio, FACTOR)
    # The bound holds for any dependence: with 0.5 an arm regresses to the mean, so d falls as the reference rises.
    for follows in (0.0, 0.5):
        derived = by_derived_margin(differences - follows * reference, reference)
        assert derived.equivalent.mean() <= ALPHA + ALLOWANCE
    given = by_given_margin(differences, reference)
    assert max(given.equivalent.mean(), given.different.mean()) <= ALPHA + ALLOWANCE
    if ratio < 1.0:  # with wide differences and few seeds the two one-sided tests are rarely both passed
        assert min(given.equivalent.mean(), given.different.mean()) >= ALPHA - ALLOWANCE


@pytest.mark.parametrize(
    ("tests", "n", "ratio", "true_difference", "equivalent", "different"),  # the rates: at least and at most
    [
        (by_derived_margin, 4, 0.05, 0.0, (0.8, 1.0), (0.0, 0.0)),  # 3 seeds: 0.7
        (by_derived_margin, 5, 0.05, 0.0, (0.8, 1.0), (0.0, 0.0)),
        (by_derived_margin, 8, 0.05, 0.0, (0.8, 1.0), (0.0, 0.0)),
        (by_derived_margin, 8, 0.30, 0.0, (0.8, 1.0), (0.0, 0.0)),
        (by_derived_margin, 8, 0.05, 2 * FACTOR, (0.0, 0.0), (0.95, 1.0)),
        (by_derived_margin, 8, 0.30, 2 * FACTOR, (0.0, 0.0), (0.95, 1.0)),
        # With more seeds a small shift turns from open to equivalent, and is nothing else.
        (by_given_margin, 4, 0.3, FACTOR / 4, (0.0, 1.0), (0.0, 0.0)),
        (by_given_margin, 8, 0.3, FACTOR / 4, (0.0, 1.0), (0.0, 0.0)),
        (by_given_margin, 16, 0.3, FACTOR / 4, (0.0, 1.0), (0.0, 0.0)),
        (by_given_margin, 64, 0.3, FACTOR / 4, (1.0, 1.0), (0.0, 0.0)),
    ],
)
def test_rates_away_from_the_margin(tests, n, ratio, true_difference, equivalent, different):
    outcome = tests(*simulate(n, ratio, true_difference))
    for rate, (least, most) in ((outcome.equivalent.mean(), equivalent), (outcome.different.mean(), different)):
        assert least <= rate <= most


ROOT = Path(__file__).parents[2]
SHAPES = {  # of losses with a mean of 0 and a standard deviation of 1
    "normal": lambda rng, size: rng.normal(size=size),
    "Student": lambda rng, size: rng.standard_t(3, size=size) / math.sqrt(3),
    "lognormal": lambda rng, size: (rng.lognormal(size=size) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e),
}
TIGHT, WIDE_PAIRS = 0.02, 1.0
ROUNDING_ALONE = ("standard", "nudged", "deepep", "deepep_ordered")
CELLS = [  # rows of the guide's table: shape, scatter of the pairs, true difference, what is counted
    ("normal", TIGHT, 2.0, "equivalent"),
    ("normal", WIDE_PAIRS, 0.0, "different"),
    ("Student", WIDE_PAIRS, 0.0, "different"),
    ("lognormal", WIDE_PAIRS, 0.0, "different"),
    ("normal", TIGHT, 1.0, "different"),
    ("normal", TIGHT, 0.5, "different"),
    ("normal", 0.0, 0.0, "outlying"),
    ("Student", 0.0, 0.0, "outlying"),
    ("lognormal", 0.0, 0.0, "outlying"),
]


@pytest.mark.parametrize("row", range(len(CELLS)))
def test_the_error_rates_in_the_guide_are_those_of_the_code(row):
    shape, ratio, difference, counted = CELLS[row]
    lines = [line for line in (ROOT / "docs" / "verdict.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(CELLS)
    assert f"*{counted}*" in lines[row] or "the same" in lines[row] or counted == "outlying"
    for n, percent in zip((3, 4, 5, 8), lines[row].split("|")[2:-1], strict=True):
        rng, draws = np.random.default_rng([row, n]), 1500 if counted == "outlying" else 20_000
        losses_NM = SHAPES[shape](rng, (n, draws))
        if counted == "outlying":
            rate = np.mean([bool(outlying_seeds(dict(enumerate(losses)))) for losses in losses_NM.T])
        else:
            rate = getattr(
                by_derived_margin(difference + ratio * SHAPES[shape](rng, (n, draws)), losses_NM), counted
            ).mean()
        said = float(percent) / 100
        deviation = math.sqrt(max(said, 0.001) * (1 - said) * (1 / draws + 1 / 20_000))
        assert rate == pytest.approx(said, abs=4 * deviation + 0.0005)


def test_the_floors_are_below_what_rounding_does():
    """Pairs of trainings on H200s that differ in nothing but rounding."""
    ends, by_step_16 = [], []
    for file in sorted((ROOT / "benchmarks" / "results").glob("dispatcher_losses*.json")):
        for result in json.loads(file.read_text())["results"]:
            standard, *others = (np.array(run["losses"]) for run in result["runs"] if run["arm"] in ROUNDING_ALONE)
            for losses in others:
                if (losses != standard).any():  # a repetition of the standard run is equal to the bit
                    ends.append(abs(losses[-10:].mean() / standard[-10:].mean() - 1))
                    by_step_16.append(np.abs(losses / standard - 1)[:16].max())
    different = {round(end, 12) for end in ends}  # one of them stands in two files
    assert len(different) == 12
    assert (min(different), max(different)) == pytest.approx((0.0013, 0.025), abs=0.0005)
    assert min(different) > MARGIN_FLOOR
    assert min(by_step_16) > COPIES_SPREAD


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
        margin = margin_of_normals(cap_nats=cap, nats=math.nan)
        (derived,) = equivalence_power(n, sd_difference=ratio, reference_sd=1.0, margin=margin)
        simulated = paired_tests(differences, margin_M, tost_alpha=ALPHA / 2).equivalent.mean()
        assert derived == pytest.approx(simulated, abs=0.03)
    (given,) = equivalence_power(n, sd_difference=ratio, reference_sd=0.0, margin=margin_of_normals(given=True))
    assert given == pytest.approx(by_given_margin(differences, reference).equivalent.mean(), abs=0.03)


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


def test_a_prediction_interval_holds_one_more_value():
    rng = np.random.default_rng(0)
    held = []
    for *values, further in rng.normal(3.0, 2.0, size=(DRAWS, 5)):
        interval = prediction_interval(values)
        held.append(interval.low <= further <= interval.high)
    assert np.mean(held) == pytest.approx(0.95, abs=ALLOWANCE)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("far", [-4.0, 0.3, 4.4])
def test_one_seed_cannot_set_the_spread(n, far):
    losses = 3.6 + 0.02 * np.random.default_rng(n).normal(size=n)
    assert trimmed_sd(np.append(losses, losses.mean() + far))[0] == pytest.approx(losses.std(ddof=1))


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


@pytest.mark.parametrize(
    ("losses", "outlying"),
    [
        ([3.6, 3.62, 8.0, 8.1], ()),  # two of four: which are apart is not known
        ([3.6, 3.6, 3.6, 3.7], (3,)),
        ([3.6, 3.601, 8.0], (2,)),
        ([3.6, 3.6, 3.6], ()),
        ([3.6, 8.0], ()),
    ],
)
def test_an_outlying_seed_is_found_where_the_others_agree_exactly(losses, outlying):
    assert outlying_seeds(dict(enumerate(losses))) == outlying


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


REFERENCE = {0: 3.60, 1: 3.64, 2: 3.57, 3: 3.61}


def judge(losses, others, *, arm_diverged=None, arm_lost=None, reference_lost=None, **options: Any) -> Verdict:
    ours = ArmSeeds(losses, arm_diverged or {}, arm_lost or {})
    theirs = ArmSeeds(others, {}, reference_lost or {})
    return verdicts.judge(ours, theirs, **{"arm": "mxfp8_standard", "reference": "bf16_standard"} | options)


def shifted(*shifts: float) -> dict[int, float]:
    return {seed: REFERENCE[seed] + shift for seed, shift in enumerate(shifts)}


def nearly(losses, *, nan=()):
    return {seed: math.nan if seed in nan else loss + 0.001 for seed, loss in losses.items()}


def test_the_numbers_behind_an_answer():
    verdict = judge(shifted(*NEAR), REFERENCE)
    assert verdict.mean_difference_nats == pytest.approx(0.00275)
    assert -verdict.margin_nats < verdict.interval.low < verdict.interval.high < verdict.margin_nats
    assert verdict.margin_nats == pytest.approx(FACTOR * lower_sd_limit(list(REFERENCE.values()), alpha=ALPHA / 2)[0])
    assert verdict.interval.level == pytest.approx(1 - ALPHA)
    assert "lower 97.5 % confidence limit" in verdict.margin_source
    unpaired = judge(shifted(0.003, 0.005, 0.001), REFERENCE)  # seed 3 counts for the spread only
    assert unpaired.seeds == (0, 1, 2)
    assert unpaired.reference_sd == pytest.approx(trimmed_sd(list(REFERENCE.values()))[0])
    assert judge(SAME, SAME, margin_nats=0.01).margin_source == "given"


YES, NO, OPEN, NOT_YET = Answer.EQUIVALENT, Answer.DIFFERENT, Answer.INSUFFICIENT, Answer.NOT_TRAINED
NEAR, ACROSS = (0.003, 0.005, -0.001, 0.004), (0.08, -0.07, 0.05, -0.04)
WIDE, BY_53 = (2.0, -2.0, 1.0, -1.0), (0.053, 0.054, 0.052, 0.053)
SAME = dict.fromkeys(range(4), 3.7)  # whose standard deviation is 5e-16 by rounding
NEARLY_SAME = {0: 3.7, 1: 3.7003, 2: 3.6994, 3: 3.7001}
COPIES = {0: 3.7, 1: 3.7001, 2: 3.6998, 3: 3.6999}
EIGHT = dict(enumerate(3.6 + 0.02 * np.random.default_rng(3).normal(size=8)))
OTHERS = {seed: loss for seed, loss in EIGHT.items() if seed != 4}
LIKE_EIGHT, LIKE_OTHERS = nearly(EIGHT), nearly(OTHERS)
NAN_4, NAN_4_5 = nearly(EIGHT, nan=[4]), nearly(EIGHT, nan=[4, 5])
SCATTER = dict(enumerate(3.6 + 0.16 * np.random.default_rng(0).normal(size=8)))
WORSE = {seed: loss + 0.1 for seed, loss in SCATTER.items()}
ASTRAY = {0: 3.60, 1: 3.62, 2: 3.64, 3: 3.65, 4: 8.0}
UP_ASTRAY = {seed: loss + 1.0 for seed, loss in ASTRAY.items()}
LN = math.log(2048)  # 7.62, what a model that knows nothing has
LATE, GONE, WHY_4 = (1351, 1500), {4: "cancelled"}, {4: "x"}
UNTAUGHT = {seed: loss + 6.85 - 3.6 for seed, loss in EIGHT.items()}  # lower than ln 2048 by a tenth of it, 0.76
DULL = {seed: 6.866 + 0.02 * (seed % 3 - 1) for seed in range(6)}
SCATTERED = {seed: 6.7 + 50 * (loss - 3.6) for seed, loss in EIGHT.items()}
LIKE_WIDE = nearly(SCATTERED)


def case(arm, reference, answer, words, **options):
    return arm, reference, answer, words, options


ANSWERS = {
    "inside of the margin": case(
        shifted(*NEAR), REFERENCE, YES, r"\+0\.0028 nats.*95 % .*\(cap 0\.0360\), n = 4 seeds: equivalent\."
    ),
    "outside of the margin": case(shifted(0.30, 0.31, 0.29, 0.30), REFERENCE, NO, r": different\.$"),
    "three seeds": case(shifted(0.001, 0.002, 0.003), REFERENCE, YES, "n = 3", margin_nats=0.05),
    "small shift": case(shifted(0.0040, 0.0041, 0.0039, 0.0040), REFERENCE, YES, r"equ.* a shift of \+0.0040 nats\."),
    "to the last digit": case(REFERENCE, REFERENCE, YES, "both arms to the last digit: they may be one run"),
    "one run twice": case(
        shifted(*NEAR),
        REFERENCE | {1: 3.6},
        YES,
        "seeds 0, 1 of BF16 to the last d",
        margin_nats=0.1,
    ),
    "across the margin": case(shifted(*ACROSS), REFERENCE, OPEN, r"zero is not excl.* \d+ to (more than )?\d+ common"),
    "beside zero": case(
        shifted(0.05, 0.01, 0.06, 0.03), REFERENCE, OPEN, "The interval excludes zero", margin_nats=0.05
    ),
    "far too few seeds": case(
        shifted(*WIDE), REFERENCE, OPEN, "more than 100 common seeds.* 80 % power", margin_nats=0.01
    ),
    "past a narrow margin": case(
        shifted(*BY_53), REFERENCE, NO, r": 4 seeds .* one of up to ±0\.2153", margin_cap_nats=0.3
    ),
    "no seed": case(shifted(), REFERENCE, OPEN, "At least 3 common seeds are needed", margin_nats=1.0),
    "two seeds": case(shifted(0.001, 0.002), REFERENCE, OPEN, "n = 2 .*At least 3 common seeds", margin_nats=1.0),
    "no spread": case(SAME, SAME, OPEN, "no margin.*--margin"),
    "hardly any spread": case(
        {seed: loss + 0.001 * (seed % 2 + 1) for seed, loss in NEARLY_SAME.items()},
        NEARLY_SAME,
        YES,
        r"margin ±0\.0037 \(cap 0\.0370\).*shift.*closer together .* \(0\.0037 nats\).* of BF16 within 0\.00090 nats",
    ),
    "as good as no spread": case(
        nearly(COPIES), COPIES, OPEN, "no margin.*of BF16 within 0.00030 nats: they may be one run.*--margin"
    ),
    "no spread, but past the cap": case(dict.fromkeys(SAME, 4.6), SAME, NO, "no margin"),
    "no spread, and a given margin": case(SAME, SAME, YES, "90 % interval", margin_nats=0.01),
    "past a given margin": case(dict.fromkeys(SAME, 4.6), SAME, NO, "above the usual cap 0.0370", margin_nats=0.1),
    "past the cap of a wide scatter": case(WORSE, SCATTER, NO, r"margin ±(0\.\d+) \(cap \1\)"),
    "within a wider cap": case(WORSE, SCATTER, YES, r"margin ±0\.[1-4]\d+ \(cap 0.5000\)", margin_cap_nats=0.5),
    "a seed astray": case(UP_ASTRAY, ASTRAY, OPEN, r"^Insuff.*: seed 4 of .* BF16 lies.*--drop-seed 4.*cap 0\.0363"),
    "which is dropped": case(UP_ASTRAY, ASTRAY, NO, r"n = 4 .*: different.*Dropped .* seed 4\.", dropped_seeds=[4, 9]),
    "diverged": case(NAN_4, EIGHT, NO, r"^Different: 1 of 8 seeds diverged in MXFP8 and not in BF16 \(seed 4: loss"),
    "all diverged": case(
        {}, EIGHT, NO, r"^Different: 8 of 8 .*\(seeds 0, 1, .*: x\)", arm_diverged=dict.fromkeys(EIGHT, "x")
    ),
    "the reference diverged": case(
        LIKE_EIGHT, EIGHT | {4: math.nan}, OPEN, r"1 of 8 .* reference BF16.*\(seed 4: loss"
    ),
    "diverged in both": case(NAN_4, EIGHT | {4: math.inf}, YES, "n = 7 .*diverged in both: seed 4: loss"),
    "lost to a machine": case(LIKE_OTHERS, EIGHT, YES, "Left out, as .*: MXFP8, seed 4: x", arm_lost=WHY_4),
    "diverged unlike nothing": case(NAN_4, OTHERS, OPEN, "which has no result for them", reference_lost=GONE),
    "and is far off": case(nearly(UNTAUGHT, nan=[4]), OTHERS, NO, "which has no result", reference_lost=GONE),
    "another attempt ended": case(LIKE_EIGHT, EIGHT, YES, "^(?!.*Left).*n = 8", arm_diverged=WHY_4, arm_lost={5: "x"}),
    "diverged, and another attempt was lost": case(NAN_4, EIGHT, NO, "^((?!x).)*$", arm_lost=WHY_4),
    "a divergence cannot be dropped": case(NAN_4, EIGHT, NO, "^Different: 1 of 8", dropped_seeds=[4]),
    "learnt a tenth": case(nearly(UNTAUGHT), UNTAUGHT, YES, "equivalent", untrained_nats=LN),
    "learnt less": case(
        nearly(DULL), DULL, NOT_YET, "^Not trained.* MXFP8 .* BF16 .* has 7.62 nats", untrained_nats=LN
    ),
    "learnt less than BF16": case(
        DULL, EIGHT, NOT_YET, r"^Not trained.* MXFP8 has not learnt \([^)]*\): an", untrained_nats=LN
    ),
    "within a wide margin": case(
        LIKE_WIDE, SCATTERED, NOT_YET, "must end at least 1", untrained_nats=LN, margin_cap_nats=5.0
    ),
    "within a given margin": case(LIKE_WIDE, SCATTERED, YES, "equivalent", untrained_nats=LN, margin_nats=5.0),
    "in its warm-up": case(
        LIKE_EIGHT, EIGHT, YES, r"warm-up \(step 1,500 of 1,500\)", steps=LATE, lr_warmup_steps=1500
    ),
    "after its warm-up": case(LIKE_EIGHT, EIGHT, YES, "^(?!.*warm-up)", steps=LATE, lr_warmup_steps=1499),
}


def test_a_margin_says_which_of_its_bounds_it_is() -> None:
    words = (
        "its floor, 0.0037 (0.1 % of the mean loss, less than rounding alone moves it by); the seeds alone would give 0"
    )
    assert equivalence_margin(NEARLY_SAME, reference="bf16_standard").source.startswith(words)
    assert equivalence_margin(NEARLY_SAME, reference="bf16_standard", margin_cap_nats=0.001).nats == 0.001
    for cap, words in (
        (0.03, "cap, 0.0300 (given); the seeds alone would give 0.1"),
        (0.5, "; below its cap, 0.5000 (given)"),
    ):
        assert words in equivalence_margin(SCATTER, reference="bf16_standard", margin_cap_nats=cap).source


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    arm, reference, answer, words, options = ANSWERS[name]
    verdict = judge(arm, reference, **options)
    assert verdict.answer is answer
    assert re.search(words, verdict.sentence())
    assert bool(verdict.settled_by) == (answer is OPEN and not verdict.decided_by)


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


def study() -> pd.DataFrame:
    """Four seeds of two arms over 80 steps, whose losses of the last eight are known."""
    step, runs = np.arange(1, 81), []
    for arm, ends in (("bf16_standard", REFERENCE), ("mxfp8_standard", shifted(0.003, 0.005, 0.001, 0.004))):
        for seed, end in ends.items():
            loss = np.where(step > 72, end, 7.6 - step / 80)
            row = {"run": f"{arm}-{seed}", "arm": arm, "seed": seed, "segment": 0, "step": step, "loss": loss}
            runs.append(pd.DataFrame(row))
    return pd.concat(runs)


def test_a_final_loss_is_the_mean_of_the_last_tenth_and_runs_without_one_are_named():
    table = study().set_index(["arm", "seed", "step"])
    table = table.drop([("bf16_standard", 1, 75)]).drop([("bf16_standard", 2, step) for step in range(41, 81)])
    table.loc[("mxfp8_standard", 0, [78, 80]), "loss"] = math.nan
    final = final_losses(table.reset_index())
    assert (final.first_step, final.last_step) == (73, 80)
    reference, arm = final.seeds["bf16_standard"], final.seeds["mxfp8_standard"]
    assert reference.losses == pytest.approx({seed: REFERENCE[seed] for seed in (0, 3)})
    assert reference.lost == {1: "1 of 8 final steps are not in the log", 2: "ended at step 40 of 80"}
    assert (arm.losses.keys(), arm.diverged) == ({1, 2, 3}, {0: "loss is not finite at step 78"})
    verdict = verdict_of(final)
    assert (verdict.answer, verdict.seeds) == (Answer.DIFFERENT, (3,))
    left_out = "; ".join(f"seed {seed}: {why}" for seed, why in reference.lost.items())
    assert f"speaks against it: BF16, {left_out}." in verdict.sentence()
    assert "in the mean loss of steps 73 to 80" in verdict.sentence()


def test_a_change_is_that_of_the_least_squares_line_over_the_steps_that_count():
    table = study()
    noise = np.random.default_rng(0).normal(0, 0.01, size=len(table))
    table = table.assign(loss=table["loss"] + noise)
    table = table[(table["arm"] != "mxfp8_standard") | (table["step"] % 2 == 0)]  # which leaves 74, 76, 78 and 80
    final = final_losses(table)
    assert (final.first_step, final.last_step) == (74, 80)
    for arm, seeds in final.seeds.items():
        for seed, change in seeds.changes.items():
            own = table[(table["arm"] == arm) & (table["seed"] == seed) & table["step"].isin([74, 76, 78, 80])]
            line = stats.linregress(own["step"], own["loss"])
            assert change == pytest.approx(6 * line.slope)
            assert seeds.losses[seed] == pytest.approx(own["loss"].mean())


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"margin_nats": 0.0}, "margin_nats"),
        ({}, {"margin_nats": math.nan}, "margin_nats"),
        ({}, {"margin_cap_nats": 0.0}, "margin_cap_nats"),
        ({}, {"margin_nats": 0.5, "margin_cap_nats": 0.02}, "leave one of them out"),
        ({"loss": math.nan}, {}, "no loss"),
    ],
)
def test_what_cannot_be_judged_is_named(columns, options, message):
    with pytest.raises(BadInput, match=message):
        verdict_of(final_losses(study().assign(**columns)), **options)
