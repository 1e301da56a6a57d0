"""Train studies in tests by the command that a person types."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moelab.runs.collect import Collected, collect_run
from moelab.runs.directory import RunDir, find

SHARED = {"model": "nano", "steps": 6, "seq_len": 64, "local_batch": 2, "warmup_steps": 2, "hardware": "cpu"}


@dataclass(frozen=True)
class Trained:
    """What ``moelab run`` printed and left."""

    folder: Path
    file: Path
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
    return Trained(runs, file, done.returncode, printed, done.stderr)


def write_study(folder: Path, arms: list[dict[str, Any]], seeds: list[int], **shared: Any) -> Path:
    file = folder / "study.yaml"
    content = {"study": "tests", "experiment": {**SHARED, **shared}, "arms": arms, "seeds": seeds}
    file.write_text(yaml.safe_dump(content))
    return file
