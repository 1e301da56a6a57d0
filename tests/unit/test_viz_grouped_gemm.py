"""Figures of the break-even: what is drawn is what the model and the tables say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
from figure_support import title

from moelab.mxfp8.grouped_gemm_cases import Case
from moelab.mxfp8.grouped_gemm_results import stored
from moelab.projection.gemm import break_even_m, gain, grouped_time_s
from moelab.projection.gemm_fit import expert_work, fit_b200, leave_one_out, published_work
from moelab.viz.grouped_gemm import ExpertExplorer, gain_map, measured_speedups, predicted_speedups, step_parts

RATES = fit_b200().rates()
LARGE, SMALL = published_work()


@pytest.fixture(scope="module")
def drawn() -> go.Figure:
    mine = expert_work("mine", "16B", 8192, ep=8)
    return gain_map(fit_b200(), (LARGE, SMALL, *[mine] * 3), aspect=8)  # more than there are symbols


def traces(figure: go.Figure) -> dict[str, go.Scatter]:
    return {trace.name: trace for trace in figure.data if trace.type == "scatter"}


def test_the_map_is_the_models_gain(drawn: go.Figure) -> None:
    (contours,) = (trace for trace in drawn.data if trace.type == "contour")
    for row, column in ((0, 0), (20, 40), (45, 63)):
        m, weight = contours.x[column], contours.y[row]
        n, k = round(np.sqrt(weight / 8)), round(np.sqrt(weight * 8))
        assert contours.z[row][column] == pytest.approx(gain(m, n, k, 8, RATES), abs=0.002)


def test_the_line_is_where_both_take_as_long_and_lies_in_its_interval(drawn: go.Figure) -> None:
    lines = traces(drawn)
    for m, weight in zip(lines["gain 1"].x, lines["gain 1"].y, strict=True):
        if m is not None:
            n, k = round(np.sqrt(weight / 8)), round(np.sqrt(weight * 8))
            assert gain(m, n, k, 8, RATES) == pytest.approx(1, abs=1e-4)
    ends = zip(lines["low"].x, lines["gain 1"].x, lines["high"].x, strict=True)
    assert all(low <= m for low, m, _ in ends if None not in (low, m))
    assert sum(m is not None for m in lines["gain 1"].x) > 20
    assert all(2**10 <= m <= 2**20.5 for line in ("low", "gain 1", "high") for m in lines[line].x if m is not None)


def test_layouts_stand_at_their_rows_with_their_own_gain(drawn: go.Figure) -> None:
    marks = traces(drawn)
    assert sum(trace.type == "scatter" and trace.mode == "markers+text" for trace in drawn.data) == 5
    for work in (LARGE, SMALL):
        (mark,) = (trace for name, trace in marks.items() if name.startswith(work.name))
        case = work.case
        assert (mark.x[0], mark.y[0]) == (case.m, case.n * case.k)
        assert f"{gain(*case.mnkg, RATES):.2f}" in mark.text[0]
        assert ("groups" in mark.text[0]) is (case.groups != 8)
        # of another number of groups the map says nothing: the mark has the colour of its own gain
        assert mark.marker.color == (gain(*case.mnkg, RATES),)
    assert "predicted, not measured" in drawn.layout.title.text


def test_the_bars_of_a_step_add_up_to_its_time() -> None:
    figure = step_parts(LARGE.case, RATES)
    case = LARGE.case
    for i, precision in enumerate(("bf16", "mxfp8", "mxfp8_wgrad_bf16")):
        total_s = grouped_time_s(*case.mnkg, precision, RATES)  # type: ignore[arg-type]
        assert sum(bar.x[i] for bar in figure.data) == pytest.approx(1e3 * total_s, rel=1e-3)
    assert "saves time" in figure.layout.title.text
    assert "loses time" in step_parts(Case(m=512, n=1408, k=2048, groups=8), RATES).layout.title.text


@pytest.mark.parametrize("replayed", [True, False])
def test_a_replay_says_so(replayed: bool) -> None:
    figure = measured_speedups(stored(), "fp8", replayed=replayed)
    assert ("replayed: measured on NVIDIA H100" in title(figure)) is replayed
    shown = {(x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True)}
    table = stored().speedups("fp8")
    assert shown == {(row.m, round(row.speedup, 4)) for row in table.itertuples()}  # type: ignore[call-overload]
    assert f"in {(table['speedup'] > 1).sum()} of {len(table)} cases" in title(figure)


def test_more_shapes_than_looks_are_all_drawn() -> None:
    rows = stored().rows
    many = replace(stored(), rows=rows.assign(n=1 + rows.groupby(["m", "n", "k", "groups", "sizes"]).ngroup()))
    drawn = measured_speedups(many, "fp8", replayed=True).data
    assert sum(len(trace.x) for trace in drawn) == len(many.speedups("fp8"))


def test_the_goal_is_shown_as_missed_where_it_is() -> None:
    table = leave_one_out()
    assert ("missed" in title(predicted_speedups(table))) is not table["left_out_within"].all()
    assert "reached" in title(predicted_speedups(table.assign(left_out_within=True)))


def test_the_explorer_says_why_with_the_rows_that_it_has_and_needs() -> None:
    explorer = ExpertExplorer("16B", 8192, ep=8)
    words, rows = explorer.words.value, break_even_m(1408, 2048, 8, RATES)
    assert "MXFP8 loses" in words
    assert f"your M is 49,152 rows on 8 experts, break-even {rows:,.0f} rows" in words
    explorer.controls["model"].value = "Qwen3-235B-A22B"
    assert "16 experts of N 1,536, K 4,096" in title(explorer.figures["parts"])
    explorer.controls["gpu"].value = "H100, row-wise FP8"
    assert "Row-wise FP8" in explorer.words.value
    assert explorer.figures["parts"].data[0].y == ("BF16", "Row-wise FP8")
    explorer.controls["gpu"].value, explorer.controls["model"].value = "B200, MXFP8", "671B"
    explorer.controls["tokens"].value = 2**17
    assert "MXFP8 saves" in explorer.words.value
    explorer.controls["model"].value = "GLM-4.5"
    explorer.controls["ep"].value = 64
    assert "ep a divisor of 160" in explorer.reasons["ep"].value
