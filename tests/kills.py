"""Kill a launcher, torchrun or a rank at some moment of a training, start again, and see what is left of the first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from training_support import SHARED, ranks_of, wait_for, write_study

from moelab.experiment_file import read_study
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State
from moelab.runs.table import merge_segments

CHECKPOINT_INTERVAL = 3
LEFT_S = 20.0
"""So long after the next start begins, nothing of the killed one may live."""
STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What is killed by SIGKILL, and when.

    Attributes:
        of_job: of a job's start, which goes on from its checkpoints, instead of a ``moelab run``.
        target: launcher, torchrun, launcher and torchrun, or rank.
        moment: start-up, training, checkpoint (a job's alone) or end.
        step: that has been logged, where the moment is training.
        delay_s: after the moment has come.
    """

    of_job: bool
    target: str
    moment: str
    step: int
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it.

    Attributes:
        kill: what was done.
        killed: the processes that were.
        step: last step of the killed launch.
        status: of the killed run, when the next start had ended, with its reason.
        left_s: seconds from the next start's beginning until nothing of the killed one lived; 0: nothing did before.
        problems: what should not be.
    """

    kill: Kill
    killed: int = 0
    step: int = 0
    status: str = ""
    left_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Launch:
    """One start of the study's only run, by ``moelab run`` or as the one node of a job without Slurm."""

    def __init__(self, file: Path, runs: Path, job: RunDir | None, number: int) -> None:
        self._runs, self._job, self._before = runs, job, {run.path for run in find(runs)}
        self.node = f"{job_number(runs)}-{number}-0" if job else ""
        self.begun = time.monotonic()
        self._checkpoints = self.checkpoints()
        if job is None:
            command = ["run", str(file), "--runs", str(runs)]
            with (runs.parent / "launcher.log").open("ab") as log:
                self.popen = subprocess.Popen([sys.executable, "-m", "moelab", *command], stdout=log, stderr=log)
            return
        options = ["--ports=20000-28999", "--requeues=99", f"--checkpoint-interval={CHECKPOINT_INTERVAL}"]
        command = ["-m", "moelab.launch.in_job", str(job.path), "localhost", *options, "--checkpoints-kept=2"]
        place = {"JOB_ID": job_number(runs), "NODEID": "0", "STEP_NUM_NODES": "1", "RESTART_COUNT": str(number)}
        variables = {**os.environ, **{f"SLURM_{name}": value for name, value in place.items()}}
        with job.log.open("ab") as log:  # as srun appends
            self.popen = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=variables)

    @property
    def run(self) -> RunDir | None:
        """Its run directory, once it has one."""
        return self._job or next((run for run in find(self._runs) if run.path not in self._before), None)

    def checkpoints(self) -> set[Path]:
        """Folders of the job's checkpoints, whole or not."""
        return set(self._job.path.glob("checkpoint/step-*")) if self._job else set()

    @property
    def is_saving(self) -> bool:
        """Whether it has begun to save, or has just done so."""
        return bool(self.checkpoints() - self._checkpoints)

    def processes(self) -> dict[int, str]:
        """Command lines of torchrun, its ranks and what they started."""
        if not (run := self.run):
            return {}
        mine = f"MOELAB_EXPERIMENT={run.path}/experiment.yaml"
        return {
            process: line
            for process, line, variables in _processes()
            if mine in variables and (not self.node or f"MOELAB_NODE={self.node}" in variables)
        }

    def targets(self, target: str, which: int) -> list[int]:
        """Processes to be killed; fewer than asked for where one has not begun or has ended."""
        found: list[int] = []
        if "launcher" in target and self.popen.poll() is None:
            found.append(self.popen.pid)
        if "torchrun" in target:
            found += [one for one, line in self.processes().items() if "torch.distributed.run" in line][:1]
        if target == "rank" and self.run:
            ranks = sorted(set(ranks_of(self.run.path).values()) & self.processes().keys())
            found += ranks[which % len(ranks) :][:1] if ranks else []
        return found


def job_number(runs: Path) -> str:
    """A number that other campaigns on this machine do not have: ranks meet at a port that it gives."""
    return str(10_000 + sum(str(runs).encode()) * 7 % 80_000)


def _processes() -> Iterator[tuple[int, str, list[str]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            yield int(folder.name), line, (folder / "environ").read_bytes().decode(errors="replace").split("\0")


def study_file(folder: Path, steps: int) -> Path:
    """The study of all kills: one run of two ranks."""
    return write_study(folder, [{"precision": "bf16"}], [0], **{**SHARED, "steps": steps})


def losses_of(run: RunDir) -> dict[int, float]:
    """Loss by step, with the digits that a log has."""
    rows = merge_segments(collect_run(run).rows)
    return {int(step): round(float(loss), 4) for step, loss in zip(rows["step"], rows["loss"], strict=True)}


def logged_by_ranks(run: RunDir) -> set[int]:
    """Steps in the first rank's own files, whatever torchrun copied of them."""
    files = run.log.parent.glob("**/attempt_*/0/std*.log")
    return {int(step) for file in files for step in STEP.findall(file.read_text(errors="replace"))}


def chain(kills: Sequence[Kill], folder: Path, reference: Mapping[int, float]) -> list[Outcome]:
    """Kill one start after the other of a study, and let the last one train to its end.

    Args:
        kills: all of a job, or none.
        folder: a new one.
        reference: losses by step of a run that nobody killed.
    """
    folder.mkdir(parents=True)
    steps = max(reference)
    file, runs = study_file(folder, steps), folder / "runs"
    job = directory.create(runs, read_study(file).experiments[0]) if kills[0].of_job else None
    launch, outcomes = Launch(file, runs, job, 0), []
    for number, kill in enumerate(kills, start=1):
        outcome = _kill(launch, kill, steps)
        if "launcher" not in kill.target:
            try:
                launch.popen.wait(90)
            except subprocess.TimeoutExpired:
                outcome.problems.append("the launcher did not end")
        launch.popen.poll()
        before, launch = launch, Launch(file, runs, job, number)
        outcomes.append(_watch(before, launch, outcome, steps))
    if launch.popen.wait(300) != 0:
        outcomes[-1].problems.append(f"the last start ended with {launch.popen.returncode}")
    last = launch.run or next(run for run in find(runs) if run.status.state is State.COMPLETED)
    if last.status.state is not State.COMPLETED:
        outcomes[-1].problems.append(f"the last start is {last.status.state}: {last.status.reason}")
    if losses_of(last) != reference:
        outcomes[-1].problems.append(f"losses are {losses_of(last)}, of the run that was not killed {dict(reference)}")
    return outcomes


def _kill(launch: Launch, kill: Kill, steps: int) -> Outcome:
    def logged() -> int:
        log = launch.run and launch.run.log
        return max(map(int, STEP.findall(log.read_text(errors="replace"))), default=0) if log and log.exists() else 0

    starts = {"torchrun": "torchrun", "launcher and torchrun": "rank", "rank": "rank"}
    came: dict[str, Callable[[], object]] = {
        "start-up": lambda: kill.target == "launcher" or launch.targets(starts[kill.target], kill.step),
        "training": lambda: logged() >= kill.step,
        "checkpoint": lambda: launch.is_saving,
        "end": lambda: logged() >= steps,
    }
    wait_for(lambda: came[kill.moment]() or launch.popen.poll() is not None)
    time.sleep(kill.delay_s)
    targets = launch.targets(kill.target, kill.step)
    for process in targets:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    if launch.popen.pid in targets:
        launch.popen.wait()
    return Outcome(kill=kill, killed=len(targets))


def _watch(killed: Launch, launch: Launch, outcome: Outcome, steps: int) -> Outcome:
    """Look at both until the next start trains, or has ended."""
    left_s = 0.0
    while True:
        old, new = killed.processes(), launch.processes()
        seconds = time.monotonic() - launch.begun
        if old:
            left_s = seconds
            if new:
                outcome.problems.append(f"{sorted(old)} of the killed start live beside {sorted(new)}")
            if seconds > LEFT_S:
                outcome.problems.append(f"{sorted(old)} live {seconds:.0f} s after the next start")
        if len(new) > 2 or launch.popen.poll() is not None or len(outcome.problems) > 3:
            break
        time.sleep(0.05)
    run = killed.run
    if run is None:
        return replace(outcome, left_s=left_s, status="no run yet")
    metrics = losses_of(run)
    if lost := logged_by_ranks(run) - metrics.keys():
        outcome.problems.append(f"steps {sorted(lost)} were logged and are not in the metrics")
    status = run.status
    if launch.run != run:
        ended = status.state is State.FAILED and bool(status.reason)
        if not ended and not (status.state is State.COMPLETED and len(metrics) == steps):
            outcome.problems.append(f"the killed run is {status.state}: {status.reason}")
        if not (run.path / "metrics.parquet").exists():
            outcome.problems.append("no metrics of the killed run were saved")
    elif status.state not in (State.RUNNING, State.COMPLETED):
        outcome.problems.append(f"the run that goes on is {status.state}: {status.reason}")
    words = f"{status.state}: {status.reason}" if status.reason else str(status.state)
    return replace(outcome, left_s=left_s, step=max(metrics, default=0), status=words)
