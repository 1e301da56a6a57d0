"""Notebook 02 as authored, what it refuses, and what it tells its reader to see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from notebook_support import WIDGET, Ran

from moelab.hardware import B200
from moelab.micro.grouped_gemm import stored
from moelab.notebooks import NotebookFailed, execute
from moelab.planning.gemm_fit import GOAL, expert_work, fit_b200, fit_h100, leave_one_out, published_work
from moelab.planning.time.calibration import with_values
from moelab.planning.time.gemm import break_even_m, gain, grouped_time_s, rates_of

ROOT = Path(__file__).parents[2]
NAME = "02_find_grouped_gemm_break_even"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
RATES = fit_b200().rates()
LARGE, SMALL = (work.case for work in published_work())


def test_its_defaults_replay_stored_times(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NAME)
    assert len(ran.titles()) == 2
    assert len(ran.shown(WIDGET)) == 1
    titles = " ".join(ran.titles())
    assert "replayed: measured on NVIDIA H100" in titles
    assert "predicted" in titles
    assert "replays stored times" in ran.printed


def test_a_run_without_a_gpu_stops_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookFailed, match=r"NoKernels: .*no CUDA device.*Replay"):
        execute(NOTEBOOK, tmp_path / "executed.ipynb", {"experiment": "run"})


# What the notebook says that its reader should see


def test_fp8_on_an_h100_loses_and_least_with_many_rows_of_671b_experts() -> None:
    table = stored().speedups("fp8")
    large = table[(table["k"] == 7168) & (table["groups"] == 8) & (table["sizes"] == "even")]
    assert (table["speedup"] < 1).all()
    most = large[(large["m"] == 131072) & (large["n"] == 2048)]["speedup"].item()
    assert 0.9 < most < 1
    assert (table[table["n"] == 1408]["speedup"] < most).all()


def test_the_model_fits_kernels_and_most_rows_that_are_left_out() -> None:
    residuals = fit_b200().residuals.query("kind != 'step'")
    assert set(residuals[residuals["error"].abs() > GOAL]["name"]) == {
        "forward: scales into blocks",
        "dgrad: scales into blocks",
    }
    table = leave_one_out()
    missed = table[~table["left_out_within"]]
    assert missed["case"].str.endswith("1 group").all()
    assert sorted(missed["left_out_error"].abs().mul(100).round()) == [10, 11]


def test_break_evens_and_gains_are_those_that_are_named() -> None:
    assert break_even_m(LARGE.n, LARGE.k, 8, RATES) == pytest.approx(17_000, rel=0.05)
    assert break_even_m(SMALL.n, SMALL.k, 8, RATES) == pytest.approx(170_000, rel=0.05)
    assert break_even_m(LARGE.n, LARGE.k, 32, RATES) == pytest.approx(31_000, rel=0.02)
    in_step = fit_b200().rates(in_step=True)
    for case in (LARGE, SMALL):
        assert break_even_m(case.n, case.k, 8, in_step) < break_even_m(case.n, case.k, 8, RATES)  # type: ignore[operator]
    mine = expert_work("mine", "16B", 8192, ep=8).case
    assert gain(*mine.mnkg, RATES) == pytest.approx(0.77, abs=0.03)
    saved = [1 - 1 / gain(*case.mnkg, RATES) for case in (LARGE, mine)]
    assert saved == [pytest.approx(0.16, abs=5e-3), pytest.approx(-0.29, abs=5e-3)]
    assert fit_h100().rates().cast < 2e12


def test_what_is_said_of_two_experts_on_a_rank() -> None:
    assert (SMALL.groups, round(SMALL.m / SMALL.groups, -3)) == (2, 393_000)
    low_s, bf16_wgrad_s = (grouped_time_s(*SMALL.mnkg, name, RATES) for name in ("mxfp8", "mxfp8_wgrad_bf16"))  # type: ignore[arg-type]
    assert grouped_time_s(*SMALL.mnkg, "bf16", RATES) / bf16_wgrad_s == pytest.approx(1.25, abs=0.05)
    assert RATES.scales_row_s * SMALL.m / 2 / low_s == pytest.approx(1 / 3, abs=0.03)
    assert break_even_m(SMALL.n, SMALL.k, 2, RATES) is None


def test_what_is_said_about_wgrad() -> None:
    def time_s(precision: str, direction: str | None = None) -> float:
        return grouped_time_s(*LARGE.mnkg, precision, RATES, direction=direction)  # type: ignore[arg-type]

    assert time_s("mxfp8_wgrad_bf16") < time_s("mxfp8") < time_s("bf16")
    gains = {name: time_s("bf16", name) / time_s("mxfp8", name) for name in ("forward", "dgrad", "wgrad")}
    assert min(gains, key=gains.__getitem__) == "wgrad"


def test_casts_at_any_bandwidth_do_not_make_16b_gain_on_a_node() -> None:
    quick = rates_of(B200, with_values(fit_b200().calibration, blackwell_cast=1000.0 / 8), alone=True)
    assert gain(*expert_work("mine", "16B", 8192, ep=8).case.mnkg, quick) == pytest.approx(0.99, abs=5e-3)
