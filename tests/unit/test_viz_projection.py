"""The figures of notebooks 07 and 08 against the numbers that they draw, and the small analyses behind them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from figure_support import notes, title
from hypothesis import given
from hypothesis import strategies as st

from moelab.analysis.published import GAINS, THROUGHPUT
from moelab.analysis.throughput import interaction
from moelab.errors import BadInput
from moelab.experiment import Experiment, Precision
from moelab.projection.calibration import CALIBRATION
from moelab.projection.measured import ALL_TO_ALL, GROUPED_GEMM, Measurement, constants_of_node, load_measured
from moelab.projection.project import Cost, project
from moelab.projection.published import projected_two_by_two
from moelab.projection.uncertainty import Estimate
from moelab.projection.validation import Change, row_table, validation_table
from moelab.sweep import by_gpus, by_network, cluster_like, gains_by_network, on
from moelab.titan.arms import named_arms
from moelab.viz.projection import (
    GROUPS,
    ProjectionExplorer,
    arm_breakdowns,
    arm_table,
    arms_beside_projection,
    deepep_gain_by_routing,
    gains_and_interaction,
    network_gains,
    size_curves,
    step_breakdown,
    waterfall_bars,
)
from moelab.viz.study import published_bars
from moelab.viz.validation import part_strips, step_strips

PUBLISHED = named_arms()["dsv3_671b_mxfp8_deepep"]
STAGES = {part: float(seconds) for seconds, part in enumerate((p for parts in GROUPS.values() for p in parts), start=1)}


# Whether gains compose


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(*[st.floats(1.0, 1e6)] * 3), min_size=1, max_size=6),
    st.floats(0.5, 2.0),
)
def test_gains_that_multiply_by_a_factor_interact_by_that_factor(
    units: dict[int, tuple[float, float, float]], factor: float
) -> None:
    tps: dict[str, dict[int, float]] = {name: {} for name in "abcd"}
    for unit, (base, first, second) in units.items():
        for name, value in zip("abcd", (base, first, second, factor * first * second / base), strict=True):
            tps[name][unit] = value
    found = interaction(tps, baseline="a", first="b", second="c", both="d")
    assert math.isclose(found.ratio, factor, rel_tol=1e-9)
    assert found.units == len(units)
    assert found.interval.exists is (len(units) > 1)


# Constants of a node


def test_the_packaged_files_ask_for_the_models_own_constants() -> None:
    found = constants_of_node(load_measured(GROUPED_GEMM), load_measured(ALL_TO_ALL))
    assert set(found) == {"hopper_grouped", "nccl_nvlink", "deepep_nvlink"}
    for name, value in found.items():
        assert value == pytest.approx(float(getattr(CALIBRATION, name)), rel=0.08), name


def test_a_node_that_takes_twice_as_long_has_about_half_the_rates() -> None:
    def slower(measured: Measurement) -> Measurement:
        rows = [
            {**row, "median_us": 2 * row.get("median_us", 0), "parts_us": {"wire": 2 * row["parts_us"]["wire"]}}
            if "parts_us" in row
            else {**row, "median_us": 2 * row["median_us"]}
            for row in measured.rows
        ]
        return replace(measured, content={**(measured.content or {}), "rows": rows})

    files = [load_measured(GROUPED_GEMM), load_measured(ALL_TO_ALL)]
    usual, slow = constants_of_node(*files), constants_of_node(*map(slower, files))
    for name in usual:
        assert 0.3 < slow[name] / usual[name] <= 0.501, name


@pytest.mark.parametrize("name", ["Abacus 9", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100-40C"])
def test_a_file_of_an_unknown_gpu_is_refused(name: str) -> None:
    unknown = Measurement(name=GROUPED_GEMM, content={"rows": [], "hardware": {"gpu": name}})
    with pytest.raises(BadInput, match=f"was measured on {name}"):
        constants_of_node(unknown, load_measured(ALL_TO_ALL))


def test_a_node_of_cards_is_held_against_its_own_figures() -> None:
    def of_cards(measured: Measurement) -> Measurement:
        content = {**(measured.content or {}), "hardware": {"gpu": "NVIDIA H100 PCIe"}, "environment": {}}
        return replace(measured, content=content)

    sxm = constants_of_node(load_measured(GROUPED_GEMM), load_measured(ALL_TO_ALL))
    pcie = constants_of_node(of_cards(load_measured(GROUPED_GEMM)), of_cards(load_measured(ALL_TO_ALL)))
    assert set(pcie) == {"hopper_grouped"}  # no NVLink, no share of it
    assert pcie["hopper_grouped"] == pytest.approx(989 / 756 * sxm["hopper_grouped"], rel=0.01)  # of a smaller peak


# What if


def test_a_faster_network_never_slows_an_arm_and_leaves_deepep_less_to_save() -> None:
    points = by_network(PUBLISHED, "B200", (50.0, 100.0, 400.0))
    tps = {(point.series, point.x): point.projection.tps for point in points}
    for arm in ("bf16_standard", "bf16_deepep", "mxfp8_standard", "mxfp8_deepep"):
        assert tps[arm, 50.0] <= tps[arm, 100.0] <= tps[arm, 400.0]
    gains = [tps["bf16_deepep", x] / tps["bf16_standard", x] for x in (50.0, 100.0, 400.0)]
    assert gains == sorted(gains, reverse=True)
    own = project(on("B200", PUBLISHED, precision="mxfp8", ep_backend="deepep"))
    assert tps["mxfp8_deepep", 50.0] == pytest.approx(own.tps)
    found = gains_by_network(points)
    figure = network_gains(points, found, words="Words.")
    assert "derived" in title(figure)
    (drawn,) = (one for one in figure.data if one.name == "BF16 + DeepEP")
    assert [1 + value / 100 for value in drawn.y] == pytest.approx(gains)
    bars, ends = drawn.error_y, [found["bf16_deepep"][x] for x in (50.0, 100.0, 400.0)]
    assert np.subtract(drawn.y, bars.arrayminus) == pytest.approx([one.low for one in ends])
    assert np.add(drawn.y, bars.array) == pytest.approx([one.high for one in ends])
    filled = [color != "white" for color in drawn.marker.color]
    assert filled == [True, False, False]  # only the network that was seen is not extrapolated


def test_sizes_take_a_layout_that_fits_or_none() -> None:
    points = by_gpus(PUBLISHED, (8, 128, 256))
    at = {(point.series, point.x): point.projection for point in points}
    assert ("B200", 8) not in at  # 671 G parameters do not fit on eight GPUs
    assert at["B200", 256].tps >= project(PUBLISHED).tps
    for (kind, count), found in at.items():
        assert found.job.gpus == count
        assert found.experiment.precision is (Precision.FP8 if kind in ("H100", "H200") else Precision.MXFP8)
        assert found.job.tokens_per_gpu * count == pytest.approx(4096 * 8192)
    figure = size_curves(points, words="Words.")
    best = max(points, key=lambda point: point.projection.tps)
    assert f"{best.projection.tps:,.0f} tokens/s" in title(figure)
    assert "derived" in title(figure)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(BadInput, match="gpu is 'Z9'"):
        cluster_like("Z9", nodes=2)


# Figures of one study


def test_the_published_figure_has_the_printed_numbers_and_a_gap() -> None:
    figure = published_bars()
    drawn = [(trace.x[0], trace.y[0]) for trace in figure.data]
    assert drawn == list(zip((0, 1, 3), (row.tps for row in THROUGHPUT), strict=True))
    assert "quoted" in title(figure)
    assert all(said in notes(figure) for said in (*(f"{gain.percent:+.1f} %" for gain in GAINS[:2]), "not published"))


def test_every_bar_of_a_breakdown_begins_where_the_last_one_ends_and_they_add_up() -> None:
    figure = step_breakdown(STAGES, measured_s=50.0, words="Words.")
    bars, labels = figure.data
    assert labels.text[-1] == f" {sum(STAGES.values()):,.0f} s "
    ends = np.add(bars.base, bars.x).tolist()
    assert list(bars.base) == [0, *ends[:-2], 0]
    assert ends[-2] == ends[-1] == sum(STAGES.values())
    assert list(bars.x[:-1]) == sorted(STAGES.values(), reverse=True)
    assert "derived" in title(figure)


def test_the_parts_of_the_projection_are_those_that_the_arms_figure_adds_up() -> None:
    parts = project(PUBLISHED).breakdown_s
    assert set(parts) == set(STAGES)
    figure = arm_breakdowns({"bf16_standard": STAGES, "mxfp8_deepep": parts}, published_s={"bf16_standard": 80.0})
    stacks = [trace for trace in figure.data if trace.type == "bar"]
    for place, total in enumerate((sum(STAGES.values()), sum(parts.values()))):
        assert sum(trace.x[place] for trace in stacks) == pytest.approx(total)
    (diamond,) = (trace for trace in figure.data if trace.type == "scatter")
    assert list(diamond.x) == [80.0]


def test_the_waterfall_ends_at_both_given_numbers() -> None:
    changes = [Change(name="first", tps=100.0), Change(name="worse", tps=80.0), Change(name="better", tps=300.0)]
    figure = waterfall_bars(changes, quoted_first=90.0, quoted_last=310.0)
    bars, diamonds = figure.data
    assert list(bars.x) == [100.0, -20.0, 220.0, 300.0]
    assert list(bars.base) == [0.0, 100.0, 80.0, 0.0]
    assert list(diamonds.x) == [90.0, 310.0]
    assert "better (+220)" in title(figure)


def test_a_figure_has_every_row_once_with_its_kind_and_names_the_worst() -> None:
    rows = validation_table()
    for figure, drawn in (
        (step_strips(rows), [row for row in rows if row.of == "step"]),
        (part_strips(rows), [row for row in rows if row.of != "step"]),
    ):
        assert sum(len(trace.x) for trace in figure.data) == len(drawn)
        strips: dict[tuple[str, bool], list[float]] = {}
        for row in drawn:
            strips.setdefault((row.source, row.of == "memory"), []).append(row.error)
        named = [note.text.partition(": ")[0] for note in figure.layout.annotations]
        assert named == [f"{max(errors, key=abs):+.1f}" for errors in strips.values()]
    outside = [row for row in rows if row.of == "step" and row.interval and not row.inside]
    crosses = [len(trace.x) for trace in step_strips(rows).data if trace.name.startswith("measured outside")]
    assert sum(crosses) == len(outside)


def test_tables_show_gains_in_points_and_what_was_inferred() -> None:
    gain = replace(validation_table()[0], unit="% gain", measured=32.0, predicted=39.5, interval=None, inferred="batch")
    (shown,) = row_table([gain]).to_dict("records")
    assert (shown["error"], shown["in its interval"], shown["inferred"]) == ("+7.5 points", "", "batch")


def test_arms_beside_their_projection() -> None:
    tps = {"bf16_standard": 100.0, "bf16_deepep": 150.0, "mxfp8_standard": 110.0}
    projected = {arm: Estimate(value=one, low=0.9 * one, high=1.2 * one) for arm, one in tps.items()}
    known = {"bf16_standard": 100.0, "bf16_deepep": 120.0}
    figure = arms_beside_projection(known, projected, known_words="quoted", words="Words.")
    assert "+25.0% off at worst (BF16 + DeepEP)" in title(figure)
    met = arms_beside_projection(known, projected, known_words="quoted", words="Words.", fitted=True)
    assert "off at worst" not in title(met)
    assert "found on them; MXFP8 + standard all-to-all is not identified" in title(met)
    assert "MXFP8 + standard all-to-all is not identified: 110 (99 to 132)" in title(figure)
    circles, squares = figure.data
    assert (list(circles.y), list(squares.y)) == ([100.0, 120.0], [100.0, 150.0, 110.0])
    assert list(squares.error_y.array) == pytest.approx([20.0, 30.0, 22.0])
    alone = arms_beside_projection({}, projected, known_words="measured", words="Words.")
    assert "BF16 + DeepEP is projected to make most: 150" in title(alone)


def test_gains_and_what_is_left_of_their_product() -> None:
    found = projected_two_by_two(draws=10)
    figure = gains_and_interaction(found)
    gains, left = figure.data
    arms = ("mxfp8_standard", "bf16_deepep", "mxfp8_deepep")
    assert list(gains.x) == pytest.approx([100 * (found.gains[arm].value - 1) for arm in arms])
    assert left.x[0] == pytest.approx(100 * found.interaction.value)
    none = found.interaction.low <= 0 <= found.interaction.high
    assert ("no interaction is shown" in title(figure)) is none
    assert "those steps identify neither" in title(figure)
    figure = deepep_gain_by_routing(found, found, Estimate(value=26.0, low=-4.0, high=67.0))
    low, value, _ = (100 * (end - 1) for end in (found.gains["bf16_deepep"].low, found.gains["bf16_deepep"].value, 0))
    assert list(figure.data[0].x) == pytest.approx([value, value, 26.0])
    assert figure.data[0].error_x.arrayminus == pytest.approx((value - low, value - low, 30.0))
    assert "gains anything from -4 to +67 %: even the sign is open" in title(figure)


def test_the_arms_table_has_speed_gain_and_cost() -> None:
    found, spent = project(PUBLISHED), Cost(gpu_hours=6e6, days=900.0, price=18e6, energy_mwh=9000.0)
    arms, gains = ("bf16_standard", "mxfp8_deepep"), {"mxfp8_deepep": Estimate(value=5, low=-1, high=9)}
    first, second = arm_table(dict.fromkeys(arms, found), gains, dict.fromkeys(arms, spent), "Words.").frame.values
    low, high = found.interval
    assert list(first[:4]) == ["BF16 + standard all-to-all", round(found.tps), f"{low:,.0f} to {high:,.0f}", "–"]
    assert (second[3], *second[-4:]) == ("+5 % (-1 to +9)", 6.0, 18.0, 9.0, found.label)


# The explorer


def test_the_explorer_says_what_the_projection_says() -> None:
    shown = ProjectionExplorer(PUBLISHED)
    expected = project(Experiment.model_validate({**PUBLISHED.model_dump(), "mxfp8_kernels": "auto"}))
    assert f"{expected.tps:,.0f} tokens/s per GPU" in shown.words.value
    shown.controls["network_gb_s"].value = 400.0
    assert "extrapolated" in shown.words.value


def test_the_explorer_says_why_something_cannot_be() -> None:
    shown = ProjectionExplorer(PUBLISHED)
    shown.controls["gpus"].value = 8
    assert "Illegal" in shown.words.value
    assert "ep is 32" in shown.reasons["gpus"].value
    shown.controls["gpus"].value = 256
    shown.controls["activation_checkpoint"].value = "none"
    assert "Legal, but does not fit" in shown.words.value
    assert "GiB of 179.1 GiB" in shown.reasons["activation_checkpoint"].value
    shown.controls["model"].value = "Qwen3-30B-A3B"
    assert "Legal · fits" in shown.words.value
    assert "Qwen3-30B-A3B" in title(shown.figures["step"])
