"""The figures of notebooks 07 and 08 against the numbers that they draw, and the small analyses behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from figure_support import assert_says, notes, traces
from hypothesis import given
from hypothesis import strategies as st

from moelab.judge.throughput import GAINS, THROUGHPUT, interaction
from moelab.planning.project import GROUPS, Cost, project
from moelab.planning.tables import row_table, validation_table
from moelab.planning.trust import Estimate
from moelab.titan.arms import named_arms
from moelab.viz import projection as viz
from moelab.viz.study import published_bars

PUBLISHED = named_arms()["dsv3_671b_mxfp8_deepep"]
STAGES = {part: float(seconds) for seconds, part in enumerate((p for parts in GROUPS.values() for p in parts), start=1)}
SPEED = st.floats(1.0, 1e6)


@given(st.dictionaries(st.integers(0, 9), st.tuples(SPEED, SPEED, SPEED), min_size=1, max_size=6), st.floats(0.5, 2.0))
def test_gains_that_multiply_by_a_factor_interact_by_that_factor(
    units: dict[int, tuple[float, float, float]], factor: float
) -> None:
    base, first, second = ({unit: tps[place] for unit, tps in units.items()} for place in range(3))
    both = {unit: factor * first[unit] * second[unit] / base[unit] for unit in units}
    answer = interaction({"a": base, "b": first, "c": second, "d": both}, baseline="a", first="b", second="c", both="d")
    assert answer.ratio == pytest.approx(factor, rel=1e-9)
    assert (answer.units, answer.interval.exists) == (len(units), len(units) > 1)


# Figures of one study


def test_the_published_figure_has_the_printed_numbers_and_a_gap() -> None:
    figure = published_bars()
    (bars,) = figure.data
    published = [row.tps for row in THROUGHPUT]
    assert list(bars.x) == [*published[:2], 0.0, published[2]]
    assert_says(figure, "quoted")
    ends = [f"<b>{tps:,.0f}</b> " for tps in published]
    gains = [f"({gain.percent:+.1f} %)" for gain in GAINS[:2]]
    assert notes(figure) == [ends[0] + "(baseline)", ends[1] + gains[0], "not published", ends[2] + gains[1]]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    total_s = sum(STAGES.values())
    figure = viz.step_breakdown(STAGES, measured_s=50.0, words="Words.")
    (bars,) = figure.data
    assert list(bars.x) == [*sorted(STAGES.values(), reverse=True), total_s]
    assert (bars.y[-1], notes(figure)[-1]) == ("whole step", f"{total_s:,.0f} s")
    parts = project(PUBLISHED).breakdown_s
    assert set(parts) == set(STAGES)
    figure = viz.arm_breakdowns({"bf16_standard": STAGES, "mxfp8_deepep": parts}, published_s={"bf16_standard": 80.0})
    stacks = [sum(trace.x[place] for trace in traces(figure, type="bar")) for place in range(2)]
    assert stacks == pytest.approx([total_s, sum(parts.values())])
    (diamond,) = traces(figure, type="scatter")
    assert list(diamond.x) == [80.0, None]
    assert_says(figure, "derived: the step-time model", "Diamonds: published (quoted)")
    assert_says(viz.step_breakdown(STAGES, measured_s=50.0), "derived", "Dashed: the published step, 50 s (quoted)")


def test_arms_beside_their_projection() -> None:
    tps = {"bf16_standard": 100.0, "bf16_deepep": 150.0, "mxfp8_standard": 110.0}
    projected = {arm: Estimate(value=one, low=0.9 * one, high=1.2 * one) for arm, one in tps.items()}
    known = {"bf16_standard": 100.0, "bf16_deepep": 120.0}
    figure = viz.arms_beside_projection(known, projected, known_words="quoted", words="Words.")
    assert_says(figure, "quoted against derived")
    bars, diamonds = figure.data
    assert (list(diamonds.x), list(bars.x)) == ([100.0, 120.0, None], [100.0, 150.0, 110.0])
    assert notes(figure) == ["<b>100</b> (90 to 120)", "<b>150</b> (135 to 180)", "<b>110</b> (99 to 132)"]
    met = viz.arms_beside_projection(known, projected, known_words="quoted", words="Words.", fitted=True)
    assert_says(met, "found on the arms that are quoted, which is no test")
    assert_says(viz.arms_beside_projection({}, projected, known_words="measured", words="Words."), "derived")


def test_tables_have_gains_in_points_and_speed_gain_and_cost() -> None:
    row = replace(validation_table()[0], unit="% gain", measured=32.0, predicted=39.5, interval=None, inferred="batch")
    (shown,) = row_table([row]).to_dict("records")
    assert (shown["error"], shown["in its interval"], shown["inferred"]) == ("+7.5 points", "", "batch")
    one, spent = project(PUBLISHED), Cost(gpu_hours=6e6, days=900.0, price=18e6, energy_mwh=9000.0)
    arms, gains = ("bf16_standard", "mxfp8_deepep"), {"mxfp8_deepep": Estimate(value=5, low=-1, high=9)}
    table = viz.arm_table(dict.fromkeys(arms, one), gains, dict.fromkeys(arms, spent), "Words.")
    first, second = table.frame.values
    low, high = one.interval
    assert list(first[:4]) == ["BF16 + standard all-to-all", round(one.tps), f"{low:,.0f} to {high:,.0f}", "–"]
    assert (second[3], *second[-4:]) == ("+5 % (-1 to +9)", 6.0, 18.0, 9.0, one.label)
