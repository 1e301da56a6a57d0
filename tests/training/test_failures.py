"""A run that goes wrong ends in the right status with its own cause, and loses no step that was finished."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_support import moelab_run, write_study

from moelab.runs import read_log
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State

pytestmark = pytest.mark.training
BF16 = [{"precision": "bf16"}]


def launch(file: Path, runs: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moelab", "run", str(file), "--runs", str(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and progress of a command that is about to end."""
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def wait_for(what: Callable[[], object], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


def steps_logged(runs: Path) -> int:
    return max((len(read_log(run.log, allow_empty=True).rows) for run in find(runs) if run.log.exists()), default=0)


def ranks_of(runs: Path) -> dict[int, int]:
    """Process ids of the trainers of these runs by rank, from /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
        except (OSError, UnicodeDecodeError):
            continue
        if variables.get("MOELAB_EXPERIMENT", "").startswith(str(runs)) and "RANK" in variables:
            found[int(variables["RANK"])] = int(folder.name)
    return found


def only_run(runs: Path) -> RunDir:
    (run,) = find(runs)
    return run


def test_a_rank_that_is_killed_is_named_and_its_steps_are_kept(tmp_path: Path) -> None:
    process = launch(write_study(tmp_path, BF16, [0], steps=400), tmp_path / "runs")
    wait_for(lambda: steps_logged(tmp_path / "runs") >= 2)
    os.kill(ranks_of(tmp_path / "runs")[1], signal.SIGKILL)
    assert ended(process)[0] == 1
    run = only_run(tmp_path / "runs")
    assert run.status.state is State.FAILED
    assert run.status.reason is not None
    assert run.status.reason.startswith("rank 1: killed by SIGKILL")
    assert len(collect_run(run).rows) >= 2
    assert (run.path / "metrics.parquet").exists()
    wait_for(lambda: not ranks_of(tmp_path / "runs"))


def test_a_loss_that_is_not_finite_is_the_cause_and_the_study_goes_on(tmp_path: Path) -> None:
    arms = [{"precision": "bf16", "lr": 1.0e30, "warmup_steps": 0}, {"precision": "mxfp8", "steps": 2}]
    done = moelab_run(write_study(tmp_path, arms, [0], steps=8), tmp_path / "runs")
    assert done.exit_code == 1
    failed, completed = done.run("bf16_standard").status, done.run("mxfp8_standard").status
    assert failed.state is State.FAILED
    assert failed.reason is not None
    assert "Loss is not finite" in failed.reason
    assert "\n" not in failed.reason
    assert completed.state is State.COMPLETED
    assert len(collect_run(done.run("bf16_standard")).rows) >= 1


def test_ctrl_c_stops_every_rank_and_a_second_run_trains_what_is_missing(tmp_path: Path) -> None:
    file = write_study(tmp_path, BF16, [0], steps=12)
    process = launch(file, tmp_path / "runs")
    wait_for(lambda: steps_logged(tmp_path / "runs") >= 2)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert code == 1
    assert "interrupted" in errors
    run = only_run(tmp_path / "runs")
    assert run.status.state is State.CANCELLED
    assert not ranks_of(tmp_path / "runs")
    assert len(collect_run(run).rows) >= 2
    again = moelab_run(file, tmp_path / "runs")
    assert again.exit_code == 0
    assert again.printed["trained"] == 1
    assert [run.status.state for run in find(tmp_path / "runs")] == [State.CANCELLED, State.COMPLETED]


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
    process = launch(write_study(tmp_path, BF16, [0], steps=400), small_disk / "runs")
    wait_for(lambda: steps_logged(small_disk / "runs") >= 2)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 20)))
    assert ended(process)[0] == 1
    run = only_run(small_disk / "runs")
    assert run.status.state is State.FAILED
    assert run.status.reason is not None
    assert run.status.reason.startswith("no disk space")
    assert not ranks_of(small_disk / "runs")
    assert len(collect_run(run).rows) >= 2

    refused = moelab_run(write_study(tmp_path, BF16, [1]), small_disk / "runs")
    assert refused.exit_code == 3
    assert "no disk space" in refused.progress
    assert len(list(find(small_disk / "runs"))) == 1


def test_a_parameter_that_torchtitan_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    done = moelab_run(write_study(tmp_path, BF16, [0], seq_len=100_000), tmp_path / "runs")
    assert done.exit_code == 1
    reason = only_run(tmp_path / "runs").status.reason
    assert reason is not None
    assert "sequence length 100000 exceeds" in reason
