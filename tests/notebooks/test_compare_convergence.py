"""Notebook 06 as people and machines run it: with its defaults, and the whole demo through papermill."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from notebook_support import NO_PICTURES, Ran, sbatch_that_tells

from moelab.notebooks import execute, read_parameters
from moelab.runs import directory
from moelab.runs.collect import collect, joined_rows, newest

pytestmark = pytest.mark.training
ROOT = Path(__file__).parents[2]
NAME = "06_compare_convergence"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
ANSWERS = {"equivalent", "different", "insufficient data", "not trained enough"}


def test_its_defaults_train_two_seeds_of_two_arms(by_nbmake: Callable[[str], Ran]) -> None:
    assert len(newest(collect(by_nbmake(NAME).folder / "runs"))) == 4


def test_the_published_size_shows_its_script_and_submits_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "sbatch was called"
    monkeypatch.setenv("PATH", f"{sbatch_that_tells(tmp_path, called)}:/usr/bin:/bin")
    profile = read_parameters(ROOT / "papermill_params" / NAME / "b200_x256.yaml")
    assert "submit" not in profile
    printed = "".join(_printed(execute(NOTEBOOK, Path("executed.ipynb"), profile)))
    for said in ("legal", "#SBATCH --nodes=32\n", "#SBATCH --array=0-5\n", "nothing submitted: submit is False"):
        assert said in printed
    assert not called.exists()
    assert not list(directory.find(tmp_path / "runs"))


def test_papermill_runs_the_demo(by_nbmake: Callable[[str], Ran], tmp_path: Path) -> None:
    """As short as the notebook's defaults, whose two seeds are there already; a verdict takes three."""
    output, runs, study = tmp_path / "executed.ipynb", tmp_path / "runs", f"{NAME}_smoke"
    shutil.copytree(by_nbmake(NAME).folder / "runs", runs)
    before = {run.name for run in directory.find(runs)}
    parameters = ROOT / "papermill_params" / NAME / "cpu.yaml"
    command = [sys.executable, "-m", "moelab.notebooks", str(NOTEBOOK), str(output), "-f", str(parameters)]
    given = {"runs_dir": runs, "study": study, "seeds": 3, "steps": 20, "warmup_steps": 4}
    command += [word for name, value in given.items() for word in ("-p", name, str(value))]
    variables = {name: value for name, value in os.environ.items() if name not in NO_PICTURES}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"report: {runs / study / 'report.html'}" in done.stdout
    assert "left" in done.stdout  # progress with the time left, while it works
    check_report((runs / study / "report.html").read_text())

    trained = newest(collect(runs))
    assert before < {run.run for run in trained}
    assert sorted((run.arm, run.seed) for run in trained) == [
        (arm, seed) for arm in ("bf16_standard", "mxfp8_standard") for seed in range(3)
    ]
    assert all(run.finished for run in trained)
    for arm in ("bf16_standard", "mxfp8_standard"):
        curve = joined_rows(run for run in trained if run.arm == arm).groupby("step")["loss"].mean()
        assert curve.iloc[0] - curve.iloc[-4:].mean() >= 1.4, f"{arm}: {curve.iloc[0]} to {curve.iloc[-4:].mean()}"

    judged = subprocess.run(
        [sys.executable, "-m", "moelab", "report", str(runs / study), "--json", "--final-fraction", "0.2"],
        capture_output=True,
        text=True,
        check=True,
    )
    verdicts = json.loads(judged.stdout)["verdicts"]
    assert {verdict["answer"] for verdict in verdicts} <= ANSWERS
    assert all(len(verdict["seeds"]) == 3 for verdict in verdicts)
    assert verdicts[0]["sentence"] in "".join(_printed(output))


def check_report(html: str) -> None:
    page = re.sub(r"<script.*?</script>", "", html, flags=re.S)  # without plotly
    assert len(page) < 200_000
    for word in ("MXFP8", "held-out loss", "emulated"):
        assert word in page
    assert any(answer in page for answer in ANSWERS)
    assert re.findall(r"(?:src|href)=.?http", page) == []


def _printed(notebook: Path) -> list[str]:
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
