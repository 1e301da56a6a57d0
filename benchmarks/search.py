"""Measure what a `moelab plan --search` costs: processor time of one core, the median of a few searches.

    python benchmarks/search.py
    python benchmarks/search.py --repeats 3 --output /tmp/search.json

Where nothing fits every legal layout is asked for its memory, and larger clusters are tried.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from moelab.experiment import Experiment
from moelab.machine import cores, processor_name
from moelab.planning.advice import recommend

ON_256 = {"nodes": 32, "gpus_per_node": 8, "seq_len": 8192, "activation_checkpoint": "full", "hardware": "b200_x256"}
SEARCHES = {
    "671B on 256 GPUs": Experiment(model="671B", local_batch=64, compile="model+loss", **ON_256),
    "671B on 256 GPUs, every schedule": Experiment(model="671B", local_batch=64, dataset="c4", **ON_256),
    "671B on 32 GPUs, none fits": Experiment(model="671B", local_batch=64, **{**ON_256, "nodes": 4}),
    "671B on 1024 GPUs": Experiment(model="671B", local_batch=16, **{**ON_256, "nodes": 128}),
    "16B on 256 GPUs": Experiment(model="16B", local_batch=16, **ON_256),
}


def measure(experiment: Experiment, *, repeats: int) -> dict[str, float | int]:
    """Search the whole space and price the techniques, several times."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        found = recommend(experiment).result
        seconds.append(time.process_time() - start)
    return {
        "layouts": found.examined,
        "legal": found.legal,
        "projected": found.projected,
        "cpu_seconds": round(statistics.median(seconds), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "search.json")
    options = parser.parse_args()
    report = {
        "label": "measured",
        "what": "moelab.planning.advice.recommend over the whole space of a cluster, one core, processor time, median",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "cpu": processor_name(),
        "cpu_cores": cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "repeats": options.repeats,
        "results": {name: measure(experiment, repeats=options.repeats) for name, experiment in SEARCHES.items()},
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
