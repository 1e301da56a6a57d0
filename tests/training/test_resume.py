"""Training that is asked to stop saves its step, and goes on from there as if it had never stopped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from training_support import SHARED, Trained, steps_logged, wait_for

from moelab.experiment import Experiment
from moelab.launch.torchrun import command
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import STOP_VARIABLE, RunDir
from moelab.runs.expert_load import expert_load
from moelab.runs.table import merge_segments

pytestmark = pytest.mark.training
CHECKPOINTS = ("--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.keep_latest_k=2")


def start(run: RunDir, stop: Path, titan: Sequence[str] = CHECKPOINTS) -> subprocess.Popen[bytes]:
    launched = command(run.experiment, run.path, titan=titan)
    with run.log.open("ab") as log:
        variables = {**os.environ, **launched.variables, STOP_VARIABLE: str(stop)}
        return subprocess.Popen(launched.arguments, env=variables, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Stopped after a step or a little later; then a later checkpoint is half written, and training goes on."""
    folder = tmp_path_factory.mktemp("stopped")
    run, stop = directory.create(folder, Experiment(name="tests", precision="bf16", **SHARED)), folder / "stop"
    first = start(run, stop)
    wait_for(lambda: steps_logged(folder) >= 1 or first.poll() is not None)
    stop.touch()
    assert first.wait(120) == 0, run.log.read_text()[-3000:]
    stop.unlink()
    half_written = run.path / "checkpoint" / "step-900"
    half_written.mkdir()
    (half_written / "__0_0.distcp").write_bytes(b"half")
    assert start(run, stop).wait(120) == 0, run.log.read_text()[-3000:]
    return run


def test_no_step_is_lost_and_none_is_counted_twice(stopped: RunDir) -> None:
    rows = collect_run(stopped).rows
    assert rows["step"].tolist() == list(range(1, SHARED["steps"] + 1))
    assert set(rows["segment"]) == {0, 1}
    last = int(rows[rows["segment"] == 0]["step"].max())
    assert (stopped.path / "launch" / "stopped.json").read_text().split() == ["{", '"step":', str(last), "}"]


def test_the_load_of_the_experts_goes_on_too(stopped: RunDir, trained: Trained) -> None:
    load, alone = expert_load(stopped), expert_load(trained.run("bf16_standard"))
    assert load is not None
    assert alone is not None
    np.testing.assert_array_equal(load.tokens_SLE, alone.tokens_SLE)


def test_losses_are_those_of_the_run_that_never_stopped(stopped: RunDir, trained: Trained) -> None:
    """The same text in the same order, the same weights, optimizer and schedule: the same numbers to the last bit."""
    alone = trained.collected("bf16_standard")
    ours, theirs = merge_segments(collect_run(stopped).rows), merge_segments(alone.rows)
    for column in ("loss", "grad_norm", "lr"):
        np.testing.assert_array_equal(ours[column], theirs[column])
    assert collect_run(stopped).validation_loss == alone.validation_loss


def test_a_half_written_checkpoint_is_not_resumed_and_old_ones_are_pruned(stopped: RunDir) -> None:
    last = int(collect_run(stopped).rows.query("segment == 0")["step"].max())
    assert f"Loading the checkpoint from {stopped.path}/checkpoint/step-{last}." in stopped.log.read_text()
    complete = {file.parent.name for file in stopped.path.glob("checkpoint/*/.metadata")}
    assert complete == {"step-5"}  # of the step where it stopped, and of the interval, the two newest folders are kept
    assert (stopped.path / "checkpoint" / "step-900").exists()


def test_ranks_greet_each_other_before_anything_else(stopped: RunDir) -> None:
    log = stopped.log.read_text()
    assert log.count("moelab: first all-reduce, of 2 ranks") == 2 * 2
    assert "[rank1]:" in log
