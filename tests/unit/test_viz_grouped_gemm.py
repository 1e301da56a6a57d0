"""Figures of the break-even: what is drawn is what the model and the tables say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure_support import assert_says, title, traces

from moelab.micro.grouped_gemm import GroupedPrecision, stored
from moelab.planning.gemm_fit import expert_work, fit_b200, published_work
from moelab.planning.time.gemm import gain, grouped_time_s
from moelab.viz.grouped_gemm import gain_map, measured_speedups, step_parts

RATES = fit_b200().rates()
LARGE, SMALL = published_work()


def test_the_map_is_the_models_gain_with_layouts_at_their_own() -> None:
    mine = expert_work("mine", "16B", 8192, ep=8)
    figure = gain_map(fit_b200(), (LARGE, SMALL, *[mine] * 3), aspect=8)  # more than there are symbols
    assert_says(figure, "predicted, not measured")

    def gain_at(m: float, weight: float) -> float:
        return gain(m, round(np.sqrt(weight / 8)), round(np.sqrt(weight * 8)), 8, RATES)

    (contours,) = traces(figure, type="contour")
    for row, column in ((0, 0), (20, 40), (45, 63)):
        own = gain_at(contours.x[column], contours.y[row])
        assert contours.z[row][column] == pytest.approx(own, abs=0.002)
    low, even, high = (traces(figure, name=name)[0] for name in ("low", "gain 1", "high"))
    drawn = [(m, weight) for m, weight in zip(even.x, even.y, strict=True) if m is not None]
    assert len(drawn) > 20
    assert [gain_at(m, weight) for m, weight in drawn] == pytest.approx([1] * len(drawn), abs=1e-4)
    assert all(least <= m for least, m in zip(low.x, even.x, strict=True) if None not in (least, m))
    assert all(2**10 <= m <= 2**20.5 for line in (low, even, high) for m in line.x if m is not None)
    marks = traces(figure, mode="markers+text")
    assert len(marks) == 4, "the published 16B has two experts on a GPU, of which this map says nothing"
    for work, mark in zip((LARGE, mine), marks, strict=False):
        case, own = work.case, gain(*work.case.mnkg, RATES)
        assert (mark.x[0], mark.y[0], mark.marker.color) == (case.m, case.n * case.k, (own,))
        assert f"{own:.2f}" in mark.text[0]
    assert_says(figure, "8 experts on a GPU")
    assert_says(gain_map(fit_b200(), (LARGE, SMALL)), "2 experts on a GPU")


def test_the_bars_of_a_step_add_up_to_its_time() -> None:
    figure = step_parts(LARGE.case, RATES)
    precisions: tuple[GroupedPrecision, ...] = ("bf16", "mxfp8", "mxfp8_wgrad_bf16")
    totals_ms = [1e3 * grouped_time_s(*LARGE.case.mnkg, precision, RATES) for precision in precisions]
    assert [sum(bar.x[place] for bar in figure.data) for place in range(3)] == pytest.approx(totals_ms, rel=1e-3)
    assert "scales into blocks" in {bar.name for bar in figure.data}
    assert_says(figure, "predicted by the model, not measured")


@pytest.mark.parametrize("replayed", [True, False])
def test_every_measured_speed_up_is_drawn_and_a_replay_says_so(replayed: bool) -> None:
    table = stored().speedups("fp8")
    figure = measured_speedups(stored(), "fp8", replayed=replayed)
    drawn = [(x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True)]
    assert sorted(drawn) == sorted(zip(table["m"], table["speedup"].round(4), strict=True))
    odd = table[(table["groups"] != 8) | (table["sizes"] != "even")]
    assert sum(len(trace.x) for trace in figure.data if trace.name.count(",") > 1) == len(odd) > 0
    assert ("replayed: measured on NVIDIA H100" in title(figure)) is replayed
    rows = stored().rows  # more shapes than there are looks
    many = replace(stored(), rows=rows.assign(n=1 + rows.groupby(["m", "n", "k", "groups", "sizes"]).ngroup()))
    assert sum(len(trace.x) for trace in measured_speedups(many, "fp8", replayed=True).data) == len(table)
