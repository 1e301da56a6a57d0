"""A run that goes wrong ends in the right status with its own cause, and loses no step that was finished."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_support import Interrupted, Trained, ended, launch, ranks_of, steps_logged, wait_for, write_study

from moelab.runs.collect import collect_run
from moelab.runs.directory import find
from moelab.runs.status import State

pytestmark = pytest.mark.training


def test_a_loss_that_is_not_finite_is_the_cause(diverged: Trained) -> None:
    assert diverged.exit_code == 1
    failed = diverged.run("bf16_standard").status
    assert failed.state is State.FAILED
    assert failed.reason is not None
    assert "Loss is not finite" in failed.reason
    assert "\n" not in failed.reason
    assert len(collect_run(diverged.run("bf16_standard")).rows) >= 1


def test_ctrl_c_stops_every_rank_and_a_second_run_trains_what_is_missing(interrupted: Interrupted) -> None:
    assert interrupted.exit_code == 1
    assert "interrupted" in interrupted.progress
    assert not interrupted.left
    cancelled, completed = interrupted.again.runs()
    assert len(collect_run(cancelled).rows) >= 2
    assert interrupted.again.exit_code == 0
    assert interrupted.again.printed["trained"] == 1
    assert [cancelled.status.state, completed.status.state] == [State.CANCELLED, State.COMPLETED]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "moelab-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_that_cause(tmp_path: Path, small_disk: Path) -> None:
    process = launch(write_study(tmp_path, [{"precision": "bf16"}], [0], steps=400), small_disk / "runs")
    wait_for(lambda: steps_logged(small_disk / "runs") >= 2)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 20)))
    assert ended(process)[0] == 1
    (run,) = find(small_disk / "runs")
    assert run.status.state is State.FAILED
    assert run.status.reason is not None
    assert run.status.reason.startswith("no disk space")
    assert not ranks_of(small_disk / "runs")
    assert len(collect_run(run).rows) >= 2
