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

import pytest
from notebook_support import NO_PICTURES, ROOT, Ran, ran, sbatch_that_tells

from moelab.notebooks import execute, read_parameters
from moelab.runs import directory
from moelab.runs.collect import collect, newest
from moelab.runs.table import joined_rows

pytestmark = pytest.mark.training
NAME = "06_compare_convergence"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
ANSWERS = {"equivalent", "different", "insufficient data", "not trained enough"}


def test_the_published_size_shows_its_script_and_submits_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "sbatch was called"
    monkeypatch.setenv("PATH", f"{sbatch_that_tells(tmp_path, called)}:/usr/bin:/bin")
    profile = read_parameters(ROOT / "papermill_params" / NAME / "b200_x256.yaml")
    assert "submit" not in profile
    copy = ran(execute(NOTEBOOK, Path("executed.ipynb"), profile))
    shown = copy.printed + "".join(copy.shown("text/plain"))
    for said in ("legal", "#SBATCH --nodes=32\n", "#SBATCH --array=0-5\n", "no verdict: no run has completed yet"):
        assert said in shown
    assert not called.exists()
    assert not list(directory.find(tmp_path / "runs"))


def test_papermill_runs_the_demo(by_nbmake: Callable[[str], Ran], tmp_path: Path) -> None:
    """As short as the notebook's defaults, whose two seeds are there already; a verdict takes three."""
    output, runs, study = tmp_path / "executed.ipynb", tmp_path / "runs", f"{NAME}_smoke"
    shutil.copytree(by_nbmake(NAME).folder / "runs", runs)
    before = {run.name for run in directory.find(runs)}
    assert len(before) == 4
    parameters = ROOT / "papermill_params" / NAME / "cpu.yaml"
    command = [sys.executable, "-m", "moelab.notebooks", str(NOTEBOOK), str(output), "-f", str(parameters)]
    given = {"runs_dir": runs, "study": study, "seeds": 3, "steps": 20, "warmup_steps": 4}
    command += [word for name, value in given.items() for word in ("-p", name, str(value))]
    variables = {name: value for name, value in os.environ.items() if name not in NO_PICTURES}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"report: {runs / study / 'report.html'}" in done.stdout
    assert "left" in done.stdout  # progress with the time left, while it works
    page = re.sub(r"<script.*?</script>", "", (runs / study / "report.html").read_text(), flags=re.S)
    assert all(word in page for word in ("MXFP8", "held-out loss", "emulated"))
    assert any(answer in page for answer in ANSWERS)

    trained = newest(collect(runs))
    assert before < {run.run for run in trained}
    assert sorted((run.arm, run.seed) for run in trained) == [
        (arm, seed) for arm in ("bf16_standard", "mxfp8_standard") for seed in range(3)
    ]
    assert all(run.finished for run in trained)
    for arm in ("bf16_standard", "mxfp8_standard"):
        curve = joined_rows(run for run in trained if run.arm == arm).groupby("step")["loss"].mean()
        assert curve.iloc[0] - curve.iloc[-4:].mean() >= 1.4, f"{arm}: {curve.iloc[0]} to {curve.iloc[-4:].mean()}"

    command = [sys.executable, "-m", "moelab", "report", str(runs / study), "--json", "--final-fraction", "0.2"]
    judged = subprocess.run(command, capture_output=True, text=True, check=True)
    verdicts = json.loads(judged.stdout)["verdicts"]
    assert {verdict["answer"] for verdict in verdicts} <= ANSWERS
    assert all(len(verdict["seeds"]) == 3 for verdict in verdicts)
    assert verdicts[0]["sentence"] in "".join([ran(output).printed, *ran(output).shown("text/plain")])
