"""The figures of notebooks 07 and 08 against the numbers that they draw, and the small analyses behind them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_support import assert_says, notes, traces
from hypothesis import given
from hypothesis import strategies as st

from moelab.judge.published import GAINS, THROUGHPUT
from moelab.judge.throughput import interaction
from moelab.planning.project import GROUPS, Cost, project
from moelab.planning.tables import GAIN, Change, projected_two_by_two, row_table, validation_table
from moelab.planning.trust import Estimate
from moelab.titan.arms import named_arms
from moelab.viz import projection as viz
from moelab.viz.study import published_bars
from moelab.viz.validation import error_strips

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
    bars, labels = viz.step_breakdown(STAGES, measured_s=50.0, words="Words.").data
    ends = np.add(bars.base, bars.x).tolist()
    assert list(bars.base) == [0, *ends[:-2], 0]  # each begins where the last one ends
    assert (ends[-2:], labels.text[-1].strip()) == ([total_s] * 2, f"{total_s:,.0f} s")
    assert list(bars.x[:-1]) == sorted(STAGES.values(), reverse=True)
    parts = project(PUBLISHED).breakdown_s
    assert set(parts) == set(STAGES)
    figure = viz.arm_breakdowns({"bf16_standard": STAGES, "mxfp8_deepep": parts}, published_s={"bf16_standard": 80.0})
    stacks = [sum(trace.x[place] for trace in traces(figure, type="bar")) for place in range(2)]
    assert stacks == pytest.approx([total_s, sum(parts.values())])
    (diamond,) = traces(figure, type="scatter")
    assert list(diamond.x) == [80.0, None]
    assert_says(figure, "derived: the step-time model", "Diamonds: published (quoted)")
    assert_says(viz.step_breakdown(STAGES, measured_s=50.0), "derived", "Dashed: the published step, 50 s (quoted)")


def test_the_waterfall_ends_at_both_given_numbers() -> None:
    changes = [Change(name="first", tps=100.0), Change(name="worse", tps=80.0), Change(name="better", tps=300.0)]
    figure = viz.waterfall_bars(changes, quoted_first=90.0, quoted_last=310.0)
    bars, labels, diamonds = figure.data
    assert (list(bars.x), list(bars.base)) == ([100.0, -20.0, 220.0, 300.0], [0.0, 100.0, 80.0, 0.0])
    assert list(diamonds.x) == [90.0, 310.0]
    assert_says(figure, "derived between two quoted ends")
    assert [text.replace("&nbsp;", "").strip() for text in labels.text] == [
        "100 (quoted 90)",
        "-20",
        "+220",
        "300 (quoted 310)",
    ]


@pytest.mark.parametrize("steps", [True, False])
def test_a_strip_has_every_row_once_with_its_kind_and_names_the_worst(steps: bool) -> None:
    rows = [row for row in validation_table() if (row.of == "step") is steps]
    figure = error_strips(rows, "rows")
    strips: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        strips.setdefault((row.source, row.of == "memory"), []).append(row.error)
    assert [note.partition(": ")[0] for note in notes(figure)] == [
        f"{max(errors, key=abs):+.1f}" for errors in strips.values()
    ]
    assert ("points" in figure.layout.xaxis.title.text) is any(row.unit == GAIN for row in rows)
    outside = [row for row in rows if row.interval and not row.inside]
    crosses = [len(trace.x) for trace in figure.data if trace.name.startswith("measured outside")]
    assert (sum(len(trace.x) for trace in figure.data), sum(crosses)) == (len(rows), len(outside))


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


def test_gains_and_what_is_left_of_their_product() -> None:
    two = projected_two_by_two()
    (marks,) = (figure := viz.gains_and_interaction(two)).data
    percents = {arm: [100 * (end - 1) for end in (one.low, one.value, one.high)] for arm, one in two.gains.items()}
    arms = ("mxfp8_standard", "bf16_deepep", "mxfp8_deepep")
    assert list(marks.x) == pytest.approx([*(percents[arm][1] for arm in arms), 100 * two.interaction.value])
    assert marks.x[-1] - marks.error_x.arrayminus[-1] == pytest.approx(100 * two.interaction.low)
    assert_says(figure, "these steps identify neither", "derived")
    figure = viz.deepep_gain_by_routing(two, two, Estimate(value=26.0, low=-4.0, high=67.0))
    low, value, _ = percents["bf16_deepep"]
    assert list(figure.data[0].x) == pytest.approx([value, value, 26.0])
    assert figure.data[0].error_x.arrayminus == pytest.approx((value - low, value - low, 30.0))
    assert_says(figure, "gains anything from -4 to +67 %", "derived")


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
