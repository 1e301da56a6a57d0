"""Measure how many layouts a second `moelab plan --search` judges on one core.

    python benchmarks/search.py
    python benchmarks/search.py --repeats 3 --output /tmp/search.json

Searches of the 671B and 16B models are timed, rules alone and with memory. A search estimates memory down its order
until it has ten layouts that fit; where none fits it estimates every legal one, which is the slowest case. Time is this
process's processor time, the median of the repeats, so that a busy machine does not show.
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
from moelab.planning.plan import headroom_gib
from moelab.planning.search import search

ON_256 = {"nodes": 32, "gpus_per_node": 8, "seq_len": 8192, "activation_checkpoint": "full", "hardware": "b200_x256"}
SEARCHES = {
    "671B on 256 GPUs": Experiment(model="671B", local_batch=64, compile="model+loss", **ON_256),
    "671B on 256 GPUs, every schedule": Experiment(model="671B", local_batch=64, **ON_256),
    "671B on 32 GPUs, none fits": Experiment(model="671B", local_batch=64, **{**ON_256, "nodes": 4}),
    "671B on 1024 GPUs": Experiment(model="671B", local_batch=16, **{**ON_256, "nodes": 128}),
    "16B on 256 GPUs": Experiment(model="16B", local_batch=16, **ON_256),
}


def measure(experiment: Experiment, *, memory: bool, repeats: int) -> dict[str, float | int]:
    """Search the whole space, several times."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        found = search(experiment, headroom_gib=headroom_gib(experiment) if memory else None)
        seconds.append(time.process_time() - start)
    cpu_s = statistics.median(seconds)
    return {
        "layouts": found.examined,
        "legal": found.legal,
        "memory_estimates_that_do_not_fit": found.too_large,
        "cpu_seconds": round(cpu_s, 3),
        "layouts_per_s": round(found.examined / cpu_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "search.json")
    options = parser.parse_args()
    results = {
        name: {
            "rules": measure(experiment, memory=False, repeats=options.repeats),
            "rules_and_memory": measure(experiment, memory=True, repeats=options.repeats),
        }
        for name, experiment in SEARCHES.items()
    }
    report = {
        "label": "measured",
        "what": "moelab.planning.search.search over the whole space of a cluster, one core, processor time, median",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "cpu": processor_name(),
        "cpu_cores": cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "repeats": options.repeats,
        "slowest_layouts_per_s": min(row["layouts_per_s"] for rows in results.values() for row in rows.values()),
        "results": results,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
