"""The benchmark of a full node from end to end, dry, on two gloo ranks: health check, exchange alone, a training."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from moelab.micro.exchange import OPERATIONS
from moelab.planning.measured import DRY_RUN

pytestmark = pytest.mark.training
ROOT = Path(__file__).parents[2]
ARM = "bf16_deepep"
ROUTINGS = ("round_robin", "random_balanced")


def test_a_dry_run_does_all_steps_and_says_what_it_is(tmp_path: Path) -> None:
    output = tmp_path / "dry.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "h100_full_node.py"), "--dry", "--output", str(output)]
    command += ["--gpus", "2", "--arms", ARM, "--passes", "1", "--steps", "1", "--budget-s", "900"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith(f"{DRY_RUN}: nothing here is a measurement")
    assert done.stdout.endswith("nothing is left\n")
    content = json.loads(output.read_text())
    assert content["label"] == content["all_to_all"]["2"]["label"] == DRY_RUN
    assert content["refused"] == []
    rows = [(row["ep"], row["shape"], row["arm"], row["routing"]) for row in content["rows"]]
    assert rows == [(2, DRY_RUN, ARM, "round_robin"), (2, DRY_RUN, ARM, "random_balanced")]
    exchange = content["all_to_all"]["2"]
    assert {(row["routing"], row["operation"]) for row in exchange["rows"]} == set(product(ROUTINGS, OPERATIONS))
    assert exchange["libraries"]["deepep"] == "needs GPUs"
    assert exchange["copies"]["between_ranks_gb_s"] > 0
    assert (content["health"]["stage"], content["health"]["ranks"]) == ("finished", 2)
    assert any("not compared with the profile's 320 GB/s" in line for line in content["health"]["findings"])
    logs = gzip.decompress(output.with_suffix(".log.gz").read_bytes()).decode()
    assert all(f"# {part}" in logs for part in ("health_ep2.out", "all_to_all_ep2.out", "train_ep2.log"))
    assert not [place for place in (str(ROOT), str(tmp_path)) if place in logs + output.read_text()]
