"""SIGKILL for a launcher, and for torchrun with it, at three moments: nothing is left of them and no step is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import processes
from training_support import SHARED, Trained, ranks_of, wait_for, write_study

from moelab.experiment_file import read_study
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State
from moelab.runs.table import merge_segments

pytestmark = pytest.mark.training
CHECKPOINT_INTERVAL = 3
LEFT_S = 20.0
"""So long after the next start begins, nothing of the killed one may live."""
STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What is killed, and when."""

    torchrun: bool  # with the launcher
    moment: str  # start-up, checkpoint (a job's alone) or end
    delay_s: float = 0.0  # after the moment has come


class Launch:
    """One start of the study's only run, by ``moelab run`` or as the one node of a job without Slurm."""

    def __init__(self, file: Path, runs: Path, job: RunDir | None, number: int) -> None:
        self._runs, self._job, self._before = runs, job, {run.path for run in find(runs)}
        # A number that other campaigns on this machine do not have: ranks meet at a port that it gives.
        job_number = str(10_000 + sum(str(runs).encode()) * 7 % 80_000)
        self.node = f"{job_number}-{number}-0" if job else ""
        self.begun = time.monotonic()
        self._checkpoints = self._saved()
        if job is None:
            command = ["run", str(file), "--runs", str(runs)]
            with (runs.parent / "launcher.log").open("ab") as log:
                self.popen = subprocess.Popen([sys.executable, "-m", "moelab", *command], stdout=log, stderr=log)
            return
        options = ["--ports=20000-28999", "--requeues=99", f"--checkpoint-interval={CHECKPOINT_INTERVAL}"]
        command = ["-m", "moelab.launch.in_job", str(job.path), "localhost", *options, "--checkpoints-kept=2"]
        place = {"JOB_ID": job_number, "NODEID": "0", "STEP_NUM_NODES": "1", "RESTART_COUNT": str(number)}
        variables = {**os.environ, **{f"SLURM_{name}": value for name, value in place.items()}}
        with job.log.open("ab") as log:  # as srun appends
            self.popen = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=variables)

    @property
    def run(self) -> RunDir | None:
        """Its run directory, once it has one."""
        return self._job or next((run for run in find(self._runs) if run.path not in self._before), None)

    def _saved(self) -> set[Path]:
        """Folders of the job's checkpoints, whole or not."""
        return set(self._job.path.glob("checkpoint/step-*")) if self._job else set()

    @property
    def is_saving(self) -> bool:
        """Whether it has begun to save, or has just done so."""
        return bool(self._saved() - self._checkpoints)

    def processes(self) -> dict[int, str]:
        """Command lines of torchrun, its ranks and what they started."""
        if not (run := self.run):
            return {}
        mine = f"{run.path}/experiment.yaml"
        return {
            process: line
            for process, line, variables in processes()
            if variables.get("MOELAB_EXPERIMENT") == mine and self.node in ("", variables.get("MOELAB_NODE"))
        }

    def kill(self, kill: Kill, steps: int) -> None:
        """Wait for the moment, and kill."""

        def logged() -> int:
            log = self.run and self.run.log
            return (
                max(map(int, STEP.findall(log.read_text(errors="replace"))), default=0) if log and log.exists() else 0
            )

        came: dict[str, Callable[[], object]] = {
            "start-up": lambda: self.run and ranks_of(self.run.path),
            "checkpoint": lambda: self.is_saving,
            "end": lambda: logged() >= steps,
        }
        wait_for(lambda: came[kill.moment]() or self.popen.poll() is not None)
        time.sleep(kill.delay_s)
        assert self.popen.poll() is None, "it ended before it could be killed"
        torchrun = [one for one, line in self.processes().items() if "torch.distributed.run" in line][: kill.torchrun]
        assert len(torchrun) == kill.torchrun
        for process in (self.popen.pid, *torchrun):
            os.kill(process, signal.SIGKILL)
        self.popen.wait()


def losses_of(run: RunDir) -> dict[int, float]:
    """Loss by step, with the digits that a log has."""
    rows = merge_segments(collect_run(run).rows)
    return {int(step): round(float(loss), 4) for step, loss in zip(rows["step"], rows["loss"], strict=True)}


def chain(folder: Path, trained: Trained, *kills: Kill, of_job: bool) -> list[RunDir]:
    """Kill one start after the other of a study, let the last one train to its end, and return the killed runs.

    Starts of a job go on from its checkpoints; those of ``moelab run`` begin anew. ``trained`` has the same run, which
    nobody killed.
    """
    folder.mkdir(parents=True)
    reference = losses_of(trained.run("bf16_standard"))
    steps = max(reference)
    file, runs = write_study(folder, [{"precision": "bf16"}], [0], **{**SHARED, "steps": steps}), folder / "runs"
    job = directory.create(runs, read_study(file).experiments[0]) if of_job else None
    launch, killed_runs = Launch(file, runs, job, 0), []
    for number, kill in enumerate(kills, start=1):
        launch.kill(kill, steps)
        before, launch = launch, Launch(file, runs, job, number)
        killed_runs.append(_watch(before, launch, steps))
    assert launch.popen.wait(300) == 0
    last = launch.run or next(run for run in find(runs) if run.status.state is State.COMPLETED)
    assert last.status.state is State.COMPLETED, last.status
    assert losses_of(last) == reference
    return killed_runs


def _watch(killed: Launch, launch: Launch, steps: int) -> RunDir:
    """Look at both until the next start trains, or has ended."""
    while True:
        old, new = killed.processes(), launch.processes()
        assert not (old and new), f"{sorted(old)} of the killed start live beside {sorted(new)}"
        assert not old or time.monotonic() - launch.begun < LEFT_S, f"{sorted(old)} live on"
        if len(new) > 2 or launch.popen.poll() is not None:
            break
        time.sleep(0.05)
    run = killed.run
    assert run is not None
    metrics = losses_of(run)
    files = run.log.parent.glob("**/attempt_*/0/std*.log")  # the first rank's own, whatever torchrun copied of them
    assert {int(step) for file in files for step in STEP.findall(file.read_text(errors="replace"))} <= metrics.keys()
    status = run.status
    if launch.run == run:
        assert status.state in (State.RUNNING, State.COMPLETED), status
    else:
        whole = status.state is State.COMPLETED and len(metrics) == steps
        assert whole or (status.state is State.FAILED and status.reason), status
        assert (run.path / "metrics.parquet").exists()
    return run


def test_a_run_that_is_killed_leaves_nothing_behind_and_is_trained_anew(trained: Trained, tmp_path: Path) -> None:
    (killed,) = chain(tmp_path / "study", trained, Kill(torchrun=True, moment="start-up", delay_s=2.0), of_job=False)
    assert (killed.status.state, killed.status.reason) == (State.FAILED, "the launcher was killed")


def test_a_job_that_is_killed_goes_on_from_its_checkpoint(trained: Trained, tmp_path: Path) -> None:
    saving, ended = Kill(torchrun=True, moment="checkpoint"), Kill(torchrun=False, moment="end")
    assert len(set(chain(tmp_path / "study", trained, saving, ended, of_job=True))) == 1
