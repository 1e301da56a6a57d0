"""Notebook 02 as authored, what it refuses, and what it tells its reader to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from notebook_support import WIDGET, Ran

from moelab.mxfp8.break_even import break_even_m, gain, gemm_time_s
from moelab.mxfp8.break_even_fit import expert_work, fit_b200, fit_measured, leave_one_out, published_work
from moelab.mxfp8.grouped_gemm_results import stored
from moelab.notebooks import NotebookFailed, execute

ROOT = Path(__file__).parents[2]
NAME = "02_find_grouped_gemm_break_even"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
CONSTANTS = fit_b200().constants
LARGE, SMALL = (work.case for work in published_work())


def test_its_defaults_replay_stored_times(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NAME)
    assert len(ran.titles()) == 4
    assert len(ran.shown(WIDGET)) == 1
    titles = " ".join(ran.titles())
    assert "replayed: measured on NVIDIA H100" in titles
    assert titles.count("predicted") >= 3
    assert "replays stored times" in ran.printed
    assert ran.printed.count("not yet") == 3  # the unsolved exercises


def test_a_run_without_a_gpu_stops_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookFailed, match=r"NoKernels: .*no CUDA device.*replayed"):
        execute(NOTEBOOK, tmp_path / "executed.ipynb", {"experiment": "run"})


# What the notebook says that its reader should see


def test_fp8_on_an_h100_loses_and_least_with_many_rows_of_671b_experts() -> None:
    table = stored().speedups("fp8")
    large = table[(table["k"] == 7168) & (table["groups"] == 8) & (table["sizes"] == "even")]
    assert (table["speedup"] < 1).all()
    most = large[(large["m"] == 131072) & (large["n"] == 2048)]["speedup"].item()
    assert 0.9 < most < 1
    assert (table[table["n"] == 1408]["speedup"] < most).all()
    assert (
        stored()
        .rows.query("precision == 'bf16' and `pass` == 'forward+backward'")["fraction_of_peak"]
        .between(0.75, 1)
        .all()
    )


def test_the_model_fits_kernels_and_671b_rows_that_are_left_out() -> None:
    kernels = fit_b200().residuals().head(14)
    assert kernels["error"].abs().max() < 0.10
    assert leave_one_out()["left_out_error"].head(4).abs().max() < 0.09


def test_break_evens_and_gains_are_those_that_are_named() -> None:
    large, small = (break_even_m(case.n, case.k, case.groups, CONSTANTS) for case in (LARGE, SMALL))
    assert large == pytest.approx(17_000, rel=0.05)
    assert small == pytest.approx(160_000, rel=0.05)
    both = [break_even_m(case.n, case.k, case.groups, CONSTANTS, in_step=True) for case in (LARGE, SMALL)]
    assert all(in_step < alone for in_step, alone in zip(both, (large, small), strict=True))  # type: ignore[operator]
    mine = expert_work("mine", "16B", 8192, ep=8).case
    assert gain(mine.m, mine.n, mine.k, mine.groups, CONSTANTS) == pytest.approx(0.77, abs=0.03)
    assert fit_measured(stored()).constants.row_cast_tb_s < 2


def test_what_is_said_about_wgrad() -> None:
    def time_s(precision: str) -> float:
        return gemm_time_s(LARGE.m, LARGE.n, LARGE.k, LARGE.groups, precision, CONSTANTS)  # type: ignore[arg-type]

    assert time_s("mxfp8_wgrad_bf16") < time_s("mxfp8") < time_s("bf16")
    directions = ("forward", "dgrad", "wgrad")
    gains = {
        name: gemm_time_s(LARGE.m, LARGE.n, LARGE.k, LARGE.groups, "bf16", CONSTANTS, direction=name)  # type: ignore[arg-type]
        / gemm_time_s(LARGE.m, LARGE.n, LARGE.k, LARGE.groups, "mxfp8", CONSTANTS, direction=name)  # type: ignore[arg-type]
        for name in directions
    }
    assert min(gains, key=gains.__getitem__) == "wgrad"


def test_answer_of_the_first_exercise() -> None:
    def reached(tokens: int) -> bool:
        case = expert_work("exercise", "671B", tokens, ep=8).case
        return gain(case.m, case.n, case.k, case.groups, CONSTANTS) > 1

    assert [reached(tokens) for tokens in (1024, 2048, 4096)] == [False, False, True]
    assert break_even_m(2048, 7168, 32, CONSTANTS) == pytest.approx(32_000, rel=0.02)


@pytest.mark.parametrize(("tb_s", "overhead_us", "solved"), [(1000.0, 284.0, False), (5.5, 50.0, True)])
def test_answer_of_the_second_exercise(tb_s: float, overhead_us: float, solved: bool) -> None:
    casts = dict.fromkeys(("row_cast_tb_s", "column_cast_tb_s", "weight_cast_tb_s"), tb_s)
    quick = replace(CONSTANTS, **casts, overhead_us=overhead_us)  # type: ignore[arg-type]
    case = expert_work("exercise", "16B", 8192, ep=8).case
    assert (gain(case.m, case.n, case.k, case.groups, quick) > 1) is solved


def test_answer_of_the_third_exercise() -> None:
    def ratio(rows: float) -> float:
        low = gemm_time_s(rows, 2048, 7168, 8, "mxfp8", CONSTANTS)
        return gemm_time_s(rows, 2048, 7168, 8, "mxfp8_wgrad_bf16", CONSTANTS) / low

    assert ratio(0.9 * 65_000) < 1 < ratio(1.1 * 65_000)
