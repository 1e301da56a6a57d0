"""Throughput of an arm, gains and how they compose, against scipy; and how arms are named."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moelab.errors import BadInput
from moelab.judge.arms import arm_label, contrast
from moelab.judge.throughput import GAINS, THROUGHPUT, arm_throughput, gain, interaction


def throughput_table(tps_by_arm: dict[str, dict[int, float]], steps: int = 20) -> pd.DataFrame:
    """One run an arm and seed: constant throughput, except three slow first steps."""
    rows = [
        {"run": f"{arm}-{seed}-{tps}", "arm": arm, "seed": seed, "segment": 0, "step": step, "loss": 5.0}
        | {"tps": tps * (0.1 if step <= 3 else 1.0)}
        for arm, seeds in tps_by_arm.items()
        for seed, tps in seeds.items()
        for step in range(1, steps + 1)
    ]
    return pd.DataFrame(rows)


def t_interval_of_logs(values) -> tuple[float, float]:
    logs = np.log(values)
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=logs.mean(), scale=stats.sem(logs))
    return pytest.approx((math.exp(low), math.exp(high)))


def test_arm_throughput_is_the_geometric_mean_of_medians_with_a_t_interval_in_logs():
    values = {0: 900.0, 1: 1000.0, 2: 1150.0}
    table = throughput_table({"bf16_standard": values}, steps=5)  # of which the first three are slow
    table.loc[table["step"] == 4, "tps"] *= 1.21
    values = {seed: 1.105 * tps for seed, tps in values.items()}
    (result,) = arm_throughput(table)
    assert (result.arm, result.tps_by_seed) == ("bf16_standard", pytest.approx(values))
    assert result.tps == pytest.approx(stats.gmean(list(values.values())))
    assert (result.interval.low, result.interval.high) == t_interval_of_logs(list(values.values()))
    assert "n = 3 seeds" in result.sentence()


def test_runs_of_one_seed_are_one_value_their_geometric_mean_and_a_slow_step_does_not_move_their_median():
    table = pd.concat([throughput_table({"bf16_standard": {0: tps}}) for tps in (512.0, 1000.0, 1728.0)])
    table.loc[table["step"] == 10, "tps"] = 1.0
    (result,) = arm_throughput(table)
    assert (result.n_seeds, result.tps) == (1, pytest.approx(960.0))
    assert "no interval, n = 1 seed" in result.sentence()


def test_a_gain_is_the_ratio_within_a_seed():
    """The seeds differ by a factor of two, which only pairing sees; nothing is a multiple of a rate rounded to 0."""
    baseline, arm = {0: 500.0, 1: 1000.0, 2: 490.0, 3: 505.0}, {0: 560.0, 1: 1142.0, 2: 566.0, 3: 548.0}
    table = throughput_table({"b": baseline | {4: 700.0, 6: 0.0}, "a": arm | {5: 9.0, 6: 8.0}})
    result = gain(table, baseline="b", arm="a")
    ratios = [arm[seed] / baseline[seed] for seed in baseline]
    assert (result.n_seeds, result.percent) == (4, pytest.approx(100 * (stats.gmean(ratios) - 1)))
    assert (result.interval.low, result.interval.high) == t_interval_of_logs(ratios)


@pytest.mark.parametrize(
    ("both", "resolved", "words"),
    [
        ((1.43, 1.45, 1.42), False, "no interaction is shown"),
        ((1.422, 1.423, 1.424), True, "the gains weaken each other"),  # by 0.5 %
        ((1.436, 1.437, 1.438), True, "the gains strengthen each other"),
        ((1.33,), False, "no interval, n = 1 passes: no test"),
    ],
)
def test_an_interaction_is_the_product_of_the_gains_in_logs(both, resolved, words):
    base = {7: 500.0, 2: 1000.0, 3: 700.0}
    first, second = ({i: by * x for i, x in base.items()} for by in (1.3, 1.1))
    tps = {"b": base, "p": first | {9: 1.0}, "q": second}
    tps["both"] = {i: by * base[i] for i, by in zip(base, both, strict=False)}
    arms = {"baseline": "b", "first": "p", "second": "q", "both": "both"}
    result = interaction(tps, **arms, unit="passes")
    assert (result.ratio, result.units) == (pytest.approx(stats.gmean(both) / 1.43), len(both))
    assert (result.resolved, words in result.sentence()) == (resolved, True)
    assert f"{result.percent:+.1f} %" in result.sentence()
    if len(both) > 1:
        assert (result.interval.low, result.interval.high) == t_interval_of_logs(np.array(both) / 1.43)
        assert f"{result.interval.percent.words('+.1f', ' %')}, n = 3 passes" in result.sentence()
    for arm in tps:
        with pytest.raises(BadInput, match=f"arm '{arm}' has no throughput"):
            interaction({k: v for k, v in tps.items() if k != arm}, **arms)
        with pytest.raises(BadInput, match="none of the seeds has all of"):
            interaction(tps | {arm: {8: 1.0}}, **arms)


def test_gain_of_one_seed_or_of_none_is_not_resolved():
    result = gain(throughput_table({"b": {0: 1.0}, "a": {0: 4.0}}), baseline="b", arm="a")
    assert result.sentence() == "a over b: +300.0 % tokens/s (no interval, n = 1 seed)"
    assert not result.resolved
    like = {0: 500.0, 1: 520.0}
    same = gain(throughput_table({"b": like, "a": like}), baseline="b", arm="a")
    assert (same.ratio, same.interval.low, same.interval.high, same.resolved) == (1.0, 1.0, 1.0, False)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"warmup_steps": 20}, "lower warmup_steps"),
        ({}, {"arm": "none"}, "the arms are"),
        ({}, {}, "no seed in common"),
    ],
)
def test_bad_input_says_what_to_do(columns, options, message):
    table = throughput_table({"bf16_standard": {0: 1000.0}, "other": {7: 1000.0}}).assign(**columns)
    with pytest.raises(BadInput, match=message):
        gain(table, **{"baseline": "bf16_standard", "arm": "other"} | options)


def test_published_gains_follow_from_the_published_throughputs():
    tps = {row.arm: row.tps for row in THROUGHPUT}
    for row in GAINS:
        assert 100 * (tps[row.arm] / tps[row.baseline] - 1) == pytest.approx(row.percent, abs=0.06)
    assert "mxfp8_standard" not in tps


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        ("fp8_minimal_async_ep", "FP8 + minimal async EP"),
        ("mxfp8_standard_linears_wgrad-bf16", "MXFP8 + standard all-to-all (linears, wgrad BF16)"),
        (
            "bf16_standard_lr-1e-05_ep-kernels-emulated_dp-shard--1",
            "BF16 + standard all-to-all (lr 1e-05, ep kernels emulated, dp shard -1)",
        ),
        ("something else", "something else"),
    ],
)
def test_arm_labels(arm, label):
    assert arm_label(arm) == label


def test_arms_are_contrasted_by_the_field_that_sets_them_apart():
    for arm, other, words in (
        ("bf16_standard_compile-loss", "bf16_standard", ("BF16 (compile loss)", "BF16", "standard all-to-all")),
        ("mxfp8_standard_wgrad-bf16", "bf16_standard", ("MXFP8 (wgrad BF16)", "BF16", "standard all-to-all")),
        ("bf16_deepep_lr-0.1", "bf16_standard_lr-0.1", ("DeepEP (lr 0.1)", "standard all-to-all (lr 0.1)", "BF16")),
        ("mxfp8_deepep", "bf16_standard", ("MXFP8 + DeepEP", "BF16 + standard all-to-all", "")),
        ("t: BF16 + DeepEP", "s: BF16 + DeepEP", ("t: BF16", "s: BF16", "DeepEP")),
        ("one", "other", ("one", "other", "")),
    ):
        assert contrast(arm, other) == words
