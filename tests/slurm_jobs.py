"""Studies on the Slurm of the tests, and what stands in for the trainer in its jobs.

``recorder`` replaces the program that a job starts on each node: it writes down what it was given, and a finished log.
``slurm/trainer`` replaces ``torch.distributed.run`` alone, by PYTHONPATH: the job's own program runs as it is.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import program
from slurm_cluster import SlurmCluster

from moelab.experiment_file import Study, make_study
from moelab.launch.cluster import ClusterProfile, read_cluster
from moelab.launch.submit import submit
from moelab.runs.directory import RunDir

TESTS = Path(__file__).parent
RECORDER = """\
# As `python -m moelab.launch.in_job RUN HOST` on one node.
run=$3
mkdir -p "$run/nodes" "$run/launch/converted"
env -0 >"$run/nodes/$SLURM_NODEID.env"
printf '%s\\0' "$@" >"$run/nodes/$SLURM_NODEID.arguments"
if [ "$SLURM_NODEID" = 0 ]; then
  echo '{"kernels": "native", "modules": ["layers.3.moe.experts"]}' >"$run/launch/converted/rank0.json"
  cp METRICS "$run/metrics.jsonl"
fi
"""


def speak_to(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> None:
    """Let moelab in this process speak to a cluster."""
    for name in ("SLURM_CONF", "PATH"):
        patch.setenv(name, cluster.env[name])


def recorder(folder: Path, steps: int) -> Path:
    """Write the recorder, for runs of so many steps; returns its path."""
    metrics = folder / "finished.jsonl"
    records = [{"step": step, "loss": 12.0 - step / 10} for step in range(1, steps + 1)]
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return program(folder, "python", RECORDER.replace("METRICS", str(metrics)))


@dataclass(frozen=True)
class Site:
    """A Slurm, and a folder with the runs that are submitted to it."""

    slurm: SlurmCluster
    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def gate(self) -> Path:
        """A folder: a file ``hold`` in it lets training wait after its second step, ``fail`` lets it fail."""
        folder = self.folder / "gate"
        folder.mkdir(exist_ok=True)
        return folder

    def profile(self, **fields: Any) -> ClusterProfile:
        """Of the Slurm, with ``slurm/trainer`` in place of torchrun."""
        paths = (TESTS / "slurm" / "trainer", TESTS, TESTS.parent / "src")
        mine = {
            "name": "test",
            "description": "Slurm on this machine",
            "partition": "main",
            "nodes": len(self.slurm.nodes),
            "gpus_per_node": 0,
            "exclusive": False,
            "time_limit_minutes": 10,
            "first_port": 10_000,  # the daemons of a cluster have theirs above
            "last_port": 14_999,
            "python": sys.executable,
            "variables": {"PYTHONPATH": ":".join(map(str, paths)), "TRAINER": str(self.gate)},
        }
        return ClusterProfile(**{**mine, **fields})

    def submit(self, study: Study, **options: Any) -> tuple[RunDir, ...]:
        return submit(study, self.runs, self.profile(), **options).submitted

    def jobs(self) -> set[str]:
        """Every job that was ever submitted and is remembered."""
        return set(self.slurm.run("squeue", "-h", "-r", "-t", "all", "-o", "%i").splitlines())


def study_of(*arms: dict[str, Any], seeds: tuple[int, ...] = (0,), **shared: Any) -> Study:
    """A small study of two ranks on one node, unless said otherwise."""
    fields = {"hardware": "cpu", "nodes": 1, "gpus_per_node": 2, "steps": 4, "warmup_steps": 1, **shared}
    return make_study("s", fields, list(arms) or [{"precision": "bf16"}], seeds)


def written(folder: Path, study: Study, cluster: ClusterProfile) -> tuple[Path, Path]:
    """Both as the files that a person has."""
    files = folder / "study.yaml", folder / "cluster.yaml"
    files[0].write_text(yaml.safe_dump([one.model_dump(mode="json") for one in study.experiments]))
    files[1].write_text(yaml.safe_dump(cluster.model_dump(mode="json")))
    return files


def published(cluster: SlurmCluster, python: Path) -> ClusterProfile:
    """The published cluster's profile, with the recorder as its Python, and with the data that it asks for."""
    assert len(cluster.nodes) == 32
    data = python.parent / "data"
    data.mkdir()
    (data / "tokenizer.json").touch()
    local = [f"datasets.c4={data}", f"tokenizers.671B={data}"]
    return read_cluster("nebius_soperator_b200", [f"python={python}", "memlock=any", *local])
