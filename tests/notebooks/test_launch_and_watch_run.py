"""Notebook 09: it trains and watches here, shows a cluster's script, and submits nothing unasked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notebook_support import PLOTLY, ROOT, WIDGET, Ran, ran
from run_support import make_run

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study
from moelab.launch.ends import only_launcher
from moelab.launch.local import start_in_background
from moelab.notebooks import NotebookFailed, execute, read_parameters
from moelab.runs import directory
from moelab.runs.status import State

pytestmark = pytest.mark.training
NAME = "09_launch_and_watch_run"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
NANO: dict[str, Any] = {"name": "nano", "gpus_per_node": 2, "ep": 2, "seq_len": 128, "steps": 500}


def profile(name: str) -> dict[str, Any]:
    return read_parameters(ROOT / "papermill_params" / NAME / f"{name}.yaml")


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Ran]:
    """Run it in an empty folder."""
    monkeypatch.chdir(tmp_path)

    return lambda parameters: ran(execute(NOTEBOOK, tmp_path / "executed.ipynb", parameters))


def test_its_defaults_train_here_and_show_it(by_nbmake: Callable[[str], Ran]) -> None:
    whole = by_nbmake(NAME)
    assert any(text.endswith("1 of 1 complete, 1 trained now") for text in whole.shown("text/plain"))
    assert "simulated, not measured" in whole.shown("text/plain")[0]
    assert whole.shown(PLOTLY) == []
    assert len(whole.shown(WIDGET)) == 2
    (run,) = directory.find(whole.folder / "runs")
    assert run.status.state is State.COMPLETED


def test_a_cluster_s_run_is_shown_and_nothing_is_touched(executed: Any, tmp_path: Path) -> None:
    shape = {"model": "671B", "nodes": 32, "gpus_per_node": 8, "ep": 32, "steps": 20, "dataset": "c4"}
    arm = Experiment(name="elsewhere", precision="mxfp8", ep_backend="deepep", **shape)
    make_run(tmp_path / "elsewhere", arm, [12.0, 11.5, 11.0, 10.8, 10.7], tps=910.0, state=State.RUNNING)
    copy = executed({**profile("b200_x256"), "runs": str(tmp_path / "elsewhere")})
    assert any("#SBATCH --nodes=32" in text for text in copy.shown("text/plain"))
    (collected,) = [text for text in copy.shown("text/html") if "launches" in text]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", collected)
    assert cells[1:] == ["running", "5", "1", "10.7000", "910"]
    assert not list(directory.find(Path("runs")))


def test_what_the_preflight_refuses_is_not_submitted(executed: Any) -> None:
    with pytest.raises(NotebookFailed, match=r"Refused: The study on this cluster .* C4 would be streamed by 32 nodes"):
        executed({**profile("b200_x256"), "submit": True})  # C4 is on no shared folder of the profile as it comes
    assert not list(directory.find(Path("runs")))


# Training in the background


def study(**changes: Any) -> Study:
    return Study(name="nano", experiments=(Experiment(**{**NANO, **changes}),))


def test_the_launcher_that_is_terminated_cancels_its_run(tmp_path: Path) -> None:
    launcher = start_in_background(study(), tmp_path)
    assert launcher is not None
    (run,) = directory.find(tmp_path)
    launcher.terminate()
    launcher.wait()
    assert run.status.state is State.CANCELLED


def test_a_study_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    with only_launcher(tmp_path / study().name):
        assert start_in_background(study(), tmp_path) is None
    assert not list(directory.find(tmp_path))


def test_what_cannot_be_trained_is_said(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no run was started: moelab: .*deepep"):
        start_in_background(study(ep_backend="deepep"), tmp_path)
