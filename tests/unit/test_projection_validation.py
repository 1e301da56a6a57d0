"""The validation table: complete, its errors right, goals that are met stay met and missed ones have a reason."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from scipy.optimize import brentq
from validation.cases import H200_EXCHANGES
from validation.table import leave_out, table_file

from moelab.analysis.published import GAINS, THROUGHPUT
from moelab.analysis.two_by_two import CODE, arm_results
from moelab.experiment import Routing
from moelab.hardware import quoted
from moelab.projection.calibration import CALIBRATION, fitted, with_values
from moelab.projection.job import MODEL_OF_ROUTING
from moelab.projection.measured import ALL_TO_ALL, GROUPED_GEMM, TWO_BY_TWO, load_measured
from moelab.projection.megatron import waterfall
from moelab.projection.published import (
    ARMS,
    equal_seconds_tps,
    identification_lines,
    meeting_all_published,
    projected_two_by_two,
    published_job,
)
from moelab.projection.step import tps_of
from moelab.projection.uncertainty import PART_SPREAD
from moelab.projection.validation import (
    GOALS,
    H100_LATER,
    PUBLISHED,
    SIMUMAX,
    ValidationRow,
    goals,
    left_out_table,
    refit,
    validation_table,
)

ROOT = Path(__file__).parents[2]
RESULTS, MEASURED = ROOT / "benchmarks" / "results", ROOT / "src" / "moelab" / "data" / "measured"
MET = {"H100 and H200 arms within 6 %", "SimuMax's six rows within 5 %", "Megatron-Bridge on 256 × B200 within 15 %"}


@pytest.fixture(scope="module")
def rows() -> tuple[ValidationRow, ...]:
    return validation_table()


def test_the_packaged_table_is_what_the_model_says_now() -> None:
    """Otherwise: ``python benchmarks/projection.py --write``."""
    now = table_file(date="today", git_commit=None)
    for name, packaged in (("rows", validation_table()), ("left_out", left_out_table())):
        assert len(now[name]) == len(packaged)
        for row, old in zip(now[name], packaged, strict=True):
            assert {**row, "predicted": 0, "interval": 0} == {**asdict(old), "predicted": 0, "interval": 0}
            assert [row["predicted"], *(row["interval"] or ())] == pytest.approx(
                [old.predicted, *(old.interval or ())], rel=1e-9
            )


def test_every_published_figure_is_in_the_table_once(rows: tuple[ValidationRow, ...]) -> None:
    assert len({(row.source, row.name) for row in rows}) == len(rows)
    quoted_gains = [gain.percent for gain in GAINS if gain.label == "quoted"]
    published = [row.measured for row in rows if row.source == PUBLISHED]
    assert sorted(published) == sorted([*(row.tps for row in THROUGHPUT), *quoted_gains])


def test_every_own_measurement_is_in_the_table(rows: tuple[ValidationRow, ...]) -> None:
    kernels = Counter(row.measured for row in rows if row.source == "H100 micro-experiments")
    products = [row["median_us"] for row in load_measured(GROUPED_GEMM).rows if row["pass"] == "forward+backward"]
    wires = [row["parts_us"]["wire"] for row in load_measured(ALL_TO_ALL).rows]
    assert products
    assert wires
    assert Counter([*products, *wires]) <= kernels
    later = sorted(row.measured for row in rows if row.source == H100_LATER)
    standard = json.loads((RESULTS / "h100_standard_step.json").read_text())["rows"]
    arms = arm_results(load_measured(TWO_BY_TWO).rows)
    shown = [arm for arm in arms if not arm.retries and (arm.code == CODE or not (arm.code or "fp8" in arm.arm[:3]))]
    assert later == sorted([*(row["tps_median"] for row in standard), *(arm.tps for arm in shown)])


def test_errors_are_what_they_are_called(rows: tuple[ValidationRow, ...]) -> None:
    for row in rows:
        expected = row.predicted - row.measured if row.unit == "% gain" else row.predicted / row.measured - 1
        assert row.error == pytest.approx(expected)
        assert row.predicted > 0
        assert row.reference
        assert row.to_json()["error"] == row.error


def test_at_most_five_numbers_are_fitted_and_on_the_rows_they_name(rows: tuple[ValidationRow, ...]) -> None:
    found = fitted()
    assert 1 <= len(found) <= 5
    constants = {field.name: getattr(CALIBRATION, field.name) for field in fields(CALIBRATION)}
    assert found == {name: one for name, one in constants.items() if one.fitted_on}
    named = [name for constant in found.values() for name in constant.fitted_on]
    assert sorted(named) == sorted(row.name for row in rows if row.use == "fitted")
    assert all(abs(row.error) < 2e-3 for row in rows if row.use == "fitted")
    assert not any(row.use == "fitted" for row in rows if row.unit == "% gain")
    again = fitted(refit(with_values(**{name: constant.value * 1.2 for name, constant in found.items()})))
    for name, constant in found.items():
        assert constant.value == pytest.approx(again[name].value, rel=1e-3)


def test_measured_constants_are_read_off_the_measurements() -> None:
    content = json.loads((MEASURED / "grouped_gemm_h100.json").read_text())
    assert float(CALIBRATION.hopper_gemm) == pytest.approx(content["peaks"]["bf16_tflops"] / 989, rel=2e-3)
    assert float(CALIBRATION.copy) == pytest.approx(content["peaks"]["copy_tb_s"] / 3.35, rel=5e-3)
    wires = [row for row in load_measured(ALL_TO_ALL).rows if row["arm"] == "standard bf16"]
    rates = [row["physical_bytes"] / row["parts_us"]["wire"] / 1e3 for row in wires]
    assert float(CALIBRATION.nccl_nvlink) == pytest.approx(statistics.mean(rates) / 450, rel=0.02)
    counts = next(row["parts_us"]["counts"] for row in wires if row["operation"] == "dispatch")
    assert float(CALIBRATION.counts_s) == pytest.approx(counts / 1e6, rel=1e-2)
    dense = [row for row in load_measured(ALL_TO_ALL).rows if row["arm"] == "deepep bf16 dense"]
    wire_us = [row["parts_us"]["wire"] - row["physical_bytes"] / (297 * 1e3) for row in dense]
    assert float(CALIBRATION.deepep_s) == pytest.approx(statistics.mean(wire_us) / 1e6, rel=0.02)


def test_met_goals_stay_met_and_missed_ones_have_a_reason(rows: tuple[ValidationRow, ...]) -> None:
    found = {goal.name: goal for goal in goals(rows)}
    assert {name for name, goal in found.items() if goal.met} >= MET
    for goal in found.values():
        assert (goal.worst, "predicted") in [(row.error, row.use) for row in rows if row.name == goal.at]
        assert goal.met or goal.reason


def test_mxfp8_and_deepep_together_stay_within_5_percent(rows: tuple[ValidationRow, ...]) -> None:
    published = {row.name: row.error for row in rows if row.source == PUBLISHED}
    assert abs(published["671B mxfp8_deepep"]) < 0.05


def reason_if_missed(beginning: str, rows: tuple[ValidationRow, ...]) -> str:
    (goal,) = (goal for goal in goals(rows) if goal.name.startswith(beginning))
    return "" if goal.met else goal.reason


def test_reasons_say_of_the_model_what_it_says(rows: tuple[ValidationRow, ...]) -> None:
    jobs = {arm: published_job(arm) for arm in ARMS}
    slow = quoted(21.5 / float(CALIBRATION.network), "DeepEP V1 on 16 ranks: 43 GB/s logical, half of them on the wire")
    job = jobs["bf16_deepep"]
    slowed = tps_of(replace(job, node=replace(job.node, nic_gb_s=slow)), CALIBRATION)
    (standard,) = (row.tps for row in THROUGHPUT if row.arm == "bf16_standard")
    if reason := reason_if_missed("published 671B throughput", rows):
        assert f"the model says {slowed:.0f} tokens/s instead of {tps_of(job, CALIBRATION):.0f}" in reason
    random = {arm: replace(jobs[arm], routing=MODEL_OF_ROUTING[Routing.RANDOM_BALANCED]) for arm in ARMS[:2]}
    randomly = tps_of(replace(random["bf16_deepep"], node=replace(job.node, nic_gb_s=slow)), CALIBRATION)
    gain_percent = 100 * (randomly / tps_of(random["bf16_standard"], CALIBRATION) - 1)
    kept = {arm: replace(one, checkpointing="full+dispatch") for arm, one in jobs.items()}

    def late(host_s: float) -> float:
        return tps_of(kept["bf16_standard"], with_values(host_nodes_s=host_s)) - standard

    again = with_values(host_nodes_s=brentq(late, 1e-4, 0.3))
    gain = tps_of(kept["bf16_deepep"], again) / tps_of(kept["bf16_standard"], again)
    if reason := reason_if_missed("published gains", rows):
        assert f"at 21.5 GB/s DeepEP gains {100 * (slowed / standard - 1):.0f} %" in reason
        assert f"and then {gain_percent:.0f} % under random routing" in reason
        assert f"it makes the gain {100 * (gain - 1):.0f} %" in reason


def test_the_two_h100_campaigns_differ_as_the_reason_says(rows: tuple[ValidationRow, ...]) -> None:
    us = {"ms": 1e3, "µs": 1.0}
    first = {row.name.removeprefix("first campaign: "): row for row in rows if row.name.startswith("first campaign: ")}
    later = {row.name: row for row in rows if row.name in first}
    ratios = [first[name].measured * us["ms"] / row.measured for name, row in later.items()]
    reason = next(reason for name, *_, reason in GOALS if name.startswith("H100 arms of the first campaign"))
    assert f"up to {100 * (max(ratios) - 1):.0f} % longer" in reason
    baseline = {row.name: row.measured for row in rows}
    ratio = baseline["671B bf16_standard, round_robin"] / baseline["671B bf16_standard, compiled"]
    assert f"baseline {100 * (ratio - 1):.0f} % longer" in reason


def test_nine_in_ten_predictions_of_a_known_kind_lie_in_their_intervals(rows: tuple[ValidationRow, ...]) -> None:
    """Those of other GPUs and larger clusters, whose intervals are guesses, are left out."""
    unknown = ("GB", "H800", "1024")
    intervals = [
        (row.interval, row.measured)
        for row in rows
        if row.interval and row.use == "predicted" and not any(name in row.name for name in unknown)
    ]
    inside = sum(low <= measured <= high for (low, high), measured in intervals)
    assert len(intervals) > 40
    assert inside / len(intervals) >= 0.85


def test_the_spread_of_an_all_to_all_is_no_smaller_than_its_blind_rows_show(rows: tuple[ValidationRow, ...]) -> None:
    errors = [row.error for row in rows if row.source == H200_EXCHANGES]
    assert PART_SPREAD["all-to-all"] >= math.sqrt(statistics.fmean(error**2 for error in errors))


def test_rows_that_a_zero_was_read_off_are_seen_and_not_judged(rows: tuple[ValidationRow, ...]) -> None:
    assert float(CALIBRATION.host_compiled_s) == 0
    later = [row for row in rows if row.source == H100_LATER]
    small = [row for row in later if row.name.startswith("two by two: 16B ") or row.name.endswith(CODE)]
    assert {row.use for row in small} == {"constant read off it"}
    goal = next(goal for goal in goals(rows) if goal.name.startswith("H100 and H200"))
    assert (goal.predicted, goal.seen) == (len(later) - len(small) - 2, len(small) + 2)


def test_leaving_a_source_out_forgets_what_was_fitted_on_it() -> None:
    without = leave_out(SIMUMAX)
    assert float(without.blackwell_gemm) == float(CALIBRATION.hopper_gemm)
    assert float(without.host_nodes_s) == float(CALIBRATION.host_nodes_s)
    assert float(leave_out(PUBLISHED).host_nodes_s) == float(CALIBRATION.host_layer_s)
    left_out = left_out_table()
    assert not any(row.error == 0 for row in left_out)


def test_the_missing_arm_and_the_interaction() -> None:
    forced = projected_two_by_two(Routing.ROUND_ROBIN, draws=30)
    assert set(forced.tps) == set(ARMS)
    assert forced.tps["bf16_standard"].value == pytest.approx(651, rel=1e-3)
    gains = {arm: one.value for arm, one in forced.gains.items()}
    product = gains["bf16_deepep"] * gains["mxfp8_standard"]
    assert forced.interaction.value == pytest.approx(gains["mxfp8_deepep"] / product - 1)
    assert forced.interaction.low <= forced.interaction.value <= forced.interaction.high
    for arm in ARMS[1:]:
        assert forced.gains[arm].low < forced.gains[arm].value < forced.gains[arm].high
    random = projected_two_by_two(Routing.RANDOM_BALANCED, draws=30)
    assert random.gains["bf16_deepep"].value < forced.gains["bf16_deepep"].value


def test_the_published_rows_do_not_identify_the_missing_arm_nor_what_random_routing_does() -> None:
    """Other constants meet all three rows; what they say of the rest lies outside of the drawn intervals."""
    other = meeting_all_published()
    for row in THROUGHPUT:
        assert other.tps[row.arm] == pytest.approx(row.tps, rel=1e-5)
    forced, random = (projected_two_by_two(one, draws=30) for one in (Routing.ROUND_ROBIN, Routing.RANDOM_BALANCED))
    missing = forced.tps["mxfp8_standard"]
    assert other.tps["mxfp8_standard"] > missing.high
    assert equal_seconds_tps() > missing.high
    assert other.deepep_gain_random < random.gains["bf16_deepep"].low
    lines = identification_lines(forced, random)
    assert f"other constants: {other.tps['mxfp8_standard']:.0f} tokens/s" in lines[2]
    assert lines[3].endswith(f"other constants: {other.deepep_gain_random - 1:+.0%}")


def test_equal_seconds_saved_are_those_of_the_published_steps() -> None:
    tokens = published_job("bf16_standard").tokens_per_gpu
    saved_s = tokens / 859 - tokens / 918
    assert equal_seconds_tps() == pytest.approx(tokens / (tokens / 651 - saved_s))


def test_the_waterfall_ends_where_the_table_does(rows: tuple[ValidationRow, ...]) -> None:
    found = waterfall()
    predicted = {row.name: row.predicted for row in rows}
    assert found[0].tps == pytest.approx(predicted["671B mxfp8_deepep"])
    assert found[-1].tps == pytest.approx(predicted["256 × B200, PP8 VP2 EP32, DeepEP"])
    assert len(found) >= 6
