"""Train studies in tests by the command that a person types."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from processes import processes

from moelab.runs.collect import Collected, collect_run
from moelab.runs.directory import RunDir, find

SHARED = {"model": "nano", "steps": 6, "seq_len": 64, "local_batch": 2, "warmup_steps": 2, "hardware": "cpu"}


@dataclass(frozen=True)
class Trained:
    """What ``moelab run`` printed and left."""

    folder: Path
    exit_code: int
    printed: dict[str, Any]
    progress: str

    def runs(self) -> list[RunDir]:
        return list(find(self.folder))

    def run(self, arm: str) -> RunDir:
        return next(run for run in self.runs() if run.experiment.arm == arm)

    def collected(self, arm: str) -> Collected:
        return collect_run(self.run(arm))


def moelab_run(file: Path, runs: Path, *options: str) -> Trained:
    command = [sys.executable, "-m", "moelab", "run", str(file), "--runs", str(runs), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    printed = json.loads(done.stdout) if done.stdout else {}
    return Trained(runs, done.returncode, printed, done.stderr)


def write_study(folder: Path, arms: list[dict[str, Any]], seeds: list[int], **shared: Any) -> Path:
    file = folder / "study.yaml"
    content = {"study": "tests", "experiment": {**SHARED, **shared}, "arms": arms, "seeds": seeds}
    file.write_text(yaml.safe_dump(content))
    return file


def launch(file: Path, runs: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moelab", "run", str(file), "--runs", str(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], object], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def steps_logged(runs: Path) -> int:
    """Steps in the fullest log of these runs, counted in its text: to read it properly takes longer than a step."""
    logs = [run.log.read_text() for run in find(runs) if run.log.exists()]
    return max((len(re.findall(r"^\[rank0\].* INFO - step: ", log, re.M)) for log in logs), default=0)


def ranks_of(runs: Path) -> dict[int, int]:
    """Process ids of the trainers of these runs by rank."""
    return {
        int(variables["RANK"]): process
        for process, _, variables in processes()
        if variables.get("MOELAB_EXPERIMENT", "").startswith(str(runs)) and "RANK" in variables
    }
