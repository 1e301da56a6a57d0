"""Notebook 07: a two-by-two trained here, and the 671B study on a cluster that nobody submits to."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_support import ROOT, Ran, parameters_of, ran, sbatch_that_tells

from moelab import run as run_study
from moelab.errors import BadInput
from moelab.experiment import EPBackend, Precision
from moelab.judge.throughput import THROUGHPUT, measured_arms
from moelab.launch.cluster import read_cluster
from moelab.layout import check
from moelab.notebooks import execute, read_parameters
from moelab.planning.plan import plan
from moelab.planning.tables import projected_two_by_two
from moelab.runs import directory
from moelab.runs.collect import collect, newest
from moelab.runs.status import State

pytestmark = pytest.mark.training
NAME = "07_compare_throughput"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
PROFILES = ROOT / "papermill_params" / NAME


def profile(name: str, **changes: object) -> Any:
    return parameters_of(NAME, **read_parameters(PROFILES / f"{name}.yaml"), **changes)


def test_its_defaults_train_the_two_by_two_and_say_that_it_is_no_speed(by_nbmake: Callable[[str], Ran]) -> None:
    run = by_nbmake(NAME)
    printed, titles = run.printed, run.titles()
    trained = newest(collect(run.folder / "runs"))
    assert {one.arm for one in trained} == {
        f"{precision}_{backend}" for precision in ("bf16", "mxfp8") for backend in ("standard", "deepep")
    }
    assert all(one.finished for one in trained)
    assert len(titles) == 2  # none of a CPU's tokens per second
    assert "quoted" in titles[0]
    assert "derived" in titles[1]
    assert any("a CPU process stands in for a GPU" in text for text in run.shown("text/plain"))
    assert "no interaction: a CPU's tokens per second" in printed
    assert "agrees: Both together are +3.1 % from the product" in printed
    (script,) = [text for text in run.shown("text/plain") if "#!/bin/bash" in text]
    assert "#SBATCH --nodes=32" in script  # of the published study, shown where nothing can be sent
    assert "cannot be projected" in printed  # a CPU has no datasheet


def test_a_profile_of_a_cluster_renders_and_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "sbatch was called"
    monkeypatch.setenv("PATH", f"{sbatch_that_tells(tmp_path, called)}:/usr/bin:/bin")
    parameters = {**read_parameters(PROFILES / "b200_x256.yaml"), "submit": "false"}
    copy = ran(execute(NOTEBOOK, tmp_path / "executed.ipynb", parameters))
    shown = copy.printed + "".join(copy.shown("text/plain"))
    for said in ("no runs at ", "#SBATCH --nodes=32", "#SBATCH --array=0-11", "nothing to judge: no run has completed"):
        assert said in shown
    assert any("nothing submitted: dry_run is True" in text for text in copy.shown("text/html"))
    assert not called.exists()
    assert not list(directory.find(tmp_path / "runs"))
    assert "Projected throughput by arm" in copy.titles()[-1]


def test_a_study_that_is_trained_is_left_as_it_is(tmp_path: Path) -> None:
    study = profile("smoke").to_study()
    for experiment in study.experiments:
        run = directory.create(tmp_path, experiment)
        run.set_status(type(run.status)(state=State.COMPLETED))
    before = sorted(run.path for run in directory.find(tmp_path))
    assert run_study(study, runs=tmp_path).exit_code == 0
    assert sorted(run.path for run in directory.find(tmp_path)) == before
    with pytest.raises(BadInput, match="cluster: got 'local'; valid: a profile with Slurm, because submit is True"):
        profile("smoke", submit=True)


# What the profiles and the notebook say


def test_deepep_gains_on_one_node_what_the_reader_is_told() -> None:
    results = measured_arms()
    gains = [one.ratio for one in results if one.arm == "bf16_deepep"]
    assert gains
    assert all(ratio is not None and 1.02 < ratio < 1.17 for ratio in gains)


def test_the_hopper_profile_is_legal_on_two_of_them() -> None:
    study = profile("hopper").to_study()
    for experiment in study.experiments:
        found = check(experiment.model_copy(update={"hardware": "h100_node"}))
        assert found.legal, found.reasons
    assert {one.precision for one in study.experiments} == {Precision.BF16, Precision.FP8}
    assert {one.ep_backend for one in study.experiments} == {EPBackend.STANDARD, EPBackend.DEEPEP}


def test_the_profile_that_the_reader_is_shown_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", "".join(cell.source for cell in nbformat.read(NOTEBOOK, 4).cells), re.S)
    (tmp_path / "my_cluster.yaml").write_text(text)
    cluster = read_cluster(str(tmp_path / "my_cluster.yaml"))
    assert (cluster.nodes, cluster.tokenizers["671B"]) == (32, "/shared/models/DeepSeek-V3.1-Base")


def test_the_published_profile_is_legal_and_fits() -> None:
    for experiment in profile("b200_x256").to_study().experiments[:4]:
        planned = plan(experiment)
        assert planned.verdict.legal, planned.verdict.reasons
        assert planned.fits


def test_the_missing_arm_lies_where_the_reader_is_told() -> None:
    tps = projected_two_by_two().tps
    published = {row.arm: row.tps for row in THROUGHPUT}
    assert published["bf16_standard"] < tps["mxfp8_standard"].value < 1.07 * published["bf16_standard"]
    assert tps["mxfp8_standard"].value < 651 * 918 / 859  # what composition would say
    for arm, rate in published.items():
        assert abs(tps[arm].value / rate - 1) < 0.02
