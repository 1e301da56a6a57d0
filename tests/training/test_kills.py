"""SIGKILL for a launcher, and for torchrun with it, at three moments: nothing is left of them and no step is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import processes
from training_support import SHARED, Trained, ranks_of, wait_for, write_study

from moelab.experiment_file import read_study
from moelab.launch.cluster import keep_cluster, read_cluster
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State
from moelab.runs.table import merge_segments

pytestmark = pytest.mark.training
STEPS = SHARED["steps"]
STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
PROFILE = ("requeues=99", "checkpoint_interval_steps=3")
LEFT_S = 20.0
"""So long after the next start begins, nothing of the killed one may live."""


class Launch:
    """One start of the study's only run, by ``moelab run`` or as the one node of a job without Slurm."""

    def __init__(self, file: Path, runs: Path, job: RunDir | None, number: int) -> None:
        self._runs, self._job, self._before = runs, job, {run.path for run in find(runs)}
        self._checkpoints = set(job.path.glob("checkpoint/step-*")) if job else set()
        # A number that other campaigns on this machine do not have: ranks meet at a port that it gives.
        job_id = str(10_000 + sum(str(runs).encode()) * 7 % 80_000)
        self._node, self.begun, place = "", time.monotonic(), dict[str, str]()
        command, log = ["-m", "moelab", "run", str(file), "--runs", str(runs)], runs.parent / "launcher.log"
        if job:
            command, log = ["-m", "moelab.launch.in_job", str(job.path), "localhost"], job.log  # as srun appends
            self._node = f"{job_id}-{number}-0"
            place = {"JOB_ID": job_id, "NODEID": "0", "STEP_NUM_NODES": "1", "RESTART_COUNT": str(number)}
        variables = {**os.environ, **{f"SLURM_{name}": value for name, value in place.items()}}
        with log.open("ab") as output:
            self.popen = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output, env=variables)

    @property
    def run(self) -> RunDir | None:
        """Its run directory, once it has one."""
        return self._job or next((run for run in find(self._runs) if run.path not in self._before), None)

    def processes(self) -> dict[int, str]:
        """Command lines of torchrun, its ranks and what they started."""
        if not self.run:
            return {}
        mine = {"MOELAB_EXPERIMENT": f"{self.run.path}/experiment.yaml"}
        mine |= {"MOELAB_NODE": self._node} if self._node else {}
        return {process: line for process, line, variables in processes() if mine.items() <= variables.items()}

    def has_ranks(self) -> bool:
        return bool(self.run and ranks_of(self.run.path))

    def is_saving(self) -> bool:
        """Whether it has begun to save, or has just done so."""
        return bool(set(self._job.path.glob("checkpoint/step-*")) - self._checkpoints)

    def has_logged_all(self) -> bool:
        return str(STEPS) in STEP.findall(self.run.log.read_text(errors="replace"))

    def kill(self, moment: Callable[[Launch], bool], delay_s: float, *, torchrun: bool) -> None:
        """Wait for the moment, and kill the launcher, with its torchrun or alone."""
        wait_for(lambda: moment(self) or self.popen.poll() is not None)
        time.sleep(delay_s)
        assert self.popen.poll() is None, "it ended before it could be killed"
        below = [
            one
            for one, line in self.processes().items()
            if re.search(r"-m (torch.distributed.run|moelab.launch.loopback) ", line)
        ][:torchrun]
        assert len(below) == torchrun
        for process in (self.popen.pid, *below):
            os.kill(process, signal.SIGKILL)
        self.popen.wait()

    def is_followed_by(self, launch: Launch) -> None:
        """Look at both until the next start trains or has ended: nothing of this one may train beside it."""
        while True:
            old, new = self.processes(), launch.processes()
            assert not (old and new), f"{sorted(old)} of the killed start live beside {sorted(new)}"
            assert not old or time.monotonic() - launch.begun < LEFT_S, f"{sorted(old)} live on"
            if len(new) > 2 or launch.popen.poll() is not None:
                break
            time.sleep(0.05)
        files = self.run.log.parent.glob("**/attempt_*/0/std*.log")  # the first rank's own, whatever torchrun copied
        logged = {int(step) for file in files for step in STEP.findall(file.read_text(errors="replace"))}
        assert logged <= losses_of(self.run).keys()


def losses_of(run: RunDir) -> dict[int, float]:
    """Loss by step, with the digits that a log has."""
    rows = merge_segments(collect_run(run).rows)
    return {int(step): round(float(loss), 4) for step, loss in zip(rows["step"], rows["loss"], strict=True)}


def test_a_run_that_is_killed_leaves_nothing_behind_and_is_trained_anew(trained: Trained, tmp_path: Path) -> None:
    file, runs = write_study(tmp_path, [{"precision": "bf16"}], [0]), tmp_path / "runs"
    first = Launch(file, runs, None, 0)
    first.kill(Launch.has_ranks, 2.0, torchrun=True)
    second = Launch(file, runs, None, 1)
    first.is_followed_by(second)
    assert (first.run.status.state, first.run.status.reason) == (State.FAILED, "the launcher was killed")
    assert (first.run.path / "results.json").exists()
    assert second.popen.wait(300) == 0
    assert second.run.status.state is State.COMPLETED
    assert losses_of(second.run) == losses_of(trained.run("bf16_standard"))


def test_a_job_that_is_killed_goes_on_from_its_checkpoint(trained: Trained, tmp_path: Path) -> None:
    file, runs = write_study(tmp_path, [{"precision": "bf16"}], [0]), tmp_path / "runs"
    job = directory.create(runs, read_study(file).experiments[0])
    keep_cluster(read_cluster("slurm_generic", PROFILE), job.path)
    launch = Launch(file, runs, job, 0)
    for number, (moment, torchrun) in enumerate(((Launch.is_saving, True), (Launch.has_logged_all, False)), start=1):
        launch.kill(moment, 0.0, torchrun=torchrun)
        before, launch = launch, Launch(file, runs, job, number)
        before.is_followed_by(launch)
        assert job.status.state in (State.RUNNING, State.COMPLETED), job.status
    assert launch.popen.wait(300) == 0
    assert job.status.state is State.COMPLETED
    assert losses_of(job) == losses_of(trained.run("bf16_standard"))
