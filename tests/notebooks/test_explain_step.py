"""Notebook 11: three traced steps replayed, a trace of one's own, and what its reader is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from notebook_support import ROOT, Ran, parameters_of, ran

from moelab import data
from moelab.experiment_file import write_experiment
from moelab.notebooks import execute, read_parameters
from moelab.planning.time.calibration import with_values
from moelab.traces.against import compare, fit, packaged_steps

NAME = "11_explain_step"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
TRACE = Path(data.__path__[0]) / "measured" / "trace_two_h200_full_fp8_deepep.json.gz"


def test_its_defaults_replay_and_say_so(by_nbmake: Callable[[str], Ran]) -> None:
    run = by_nbmake(NAME)
    assert len(run.titles()) == 3
    assert all("replayed" in title for title in run.titles())
    assert any("no trace of your own" in text for text in run.shown("text/plain"))


def test_a_trace_of_one_s_own_stands_beside_its_prediction(tmp_path: Path) -> None:
    _, (_, experiment), _ = packaged_steps().values()
    (tmp_path / "mine.yaml").write_text(write_experiment(experiment))
    parameters = {"trace": str(TRACE), "against": str(tmp_path / "mine.yaml")}
    copy = ran(execute(NOTEBOOK, tmp_path / "executed.ipynb", parameters))
    assert ["replayed" in title for title in copy.titles()] == [True, *[False] * 3, *[True] * 2]
    shown = "".join(copy.shown("text/plain"))
    assert "565.9 ms from the first to the last event of rank 0 (NVIDIA H200)" in shown


def test_what_is_traced_here_is_the_last_step(tmp_path: Path) -> None:
    profile = read_parameters(ROOT / "papermill_params" / NAME / "cpu.yaml")
    parameters = parameters_of(NAME, **profile, runs_dir=str(tmp_path))
    (one,) = parameters.to_study().experiments
    assert (one.trace_step, one.steps, one.ep, one.hardware) == (6, 6, 2, "cpu")
    assert parameters.to_paths() == []
    assert parameters_of(NAME, trace="a.json").to_paths() == [Path("a.json")]
    assert parameters_of(NAME, rank=3).to_choice() == {"rank": 3, "step": None}


def test_it_says_what_the_steps_show() -> None:
    """Figures of its text."""
    steps = packaged_steps()
    shares = {}
    for found, _ in steps.values():
        groups = {one.group: one for one in found.communication}
        shares[len(shares)] = found.parts_ms["all-to-all"] / found.step_ms
        hidden = 1 - groups["FSDP collectives"].exposed_ms / groups["FSDP collectives"].ms
        assert hidden == pytest.approx([0.55, 0.52, 0.36][len(shares) - 1], abs=0.01)
        assert 0.4 < found.gaps[0].idle_ms / found.idle_ms < 0.5
        assert "DataLoader" in found.gaps[0].where
        assert 3 < found.idle_in_layers_ms < 7.5
    assert shares[0] == pytest.approx(0.069, abs=0.001)
    assert shares[1] == pytest.approx(0.026, abs=0.001)
    assert [round(100 * found.step_shares[0]) for found, _ in steps.values()] == [83, 87, 79]
    compared = [compare(*one) for one in steps.values()]
    assert all(abs(one.error) < 0.05 for one in compared)
    hosts = [next(row for row in one.rows if row.part == "host and waiting") for one in compared]
    assert [round(row.predicted_ms) for row in hosts] == [30, 30, 27]
    assert [round(row.measured_ms) for row in hosts] == [35, 29, 25]
    for name, one in steps.items():
        calibration = with_values(**fit(*one))
        assert all(abs(compare(*other, calibration).error) < 0.03 for key, other in steps.items() if key != name)
