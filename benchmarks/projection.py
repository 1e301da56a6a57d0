"""Measure what a projection costs.

Two costs are measured: of an experiment like one that was projected before, as when a slider moves, and of one whose
sizes are new each time. Time is this process's processor time. Other processes on the machine still slow it, through
caches and shared cores, so the lower quartile stands beside the median, and the load at that time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from moelab.machine import cores, processor_name
from moelab.planning.project import project
from moelab.titan.arms import named_arms

PUBLISHED = named_arms()["dsv3_671b_mxfp8_deepep"]


def cost_us(call: Callable[[int], object], repeats: int) -> dict[str, float]:
    """Median and lower quartile of a call's processor time, µs."""
    call(0)
    times = []
    for number in range(1, repeats + 1):
        start = time.process_time_ns()
        call(number)
        times.append((time.process_time_ns() - start) / 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return {"median": round(quartiles[1], 1), "lower_quartile": round(quartiles[0], 1)}


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def known(number: int) -> object:
    """The published layout, with a different batch each time."""
    return project(PUBLISHED.model_copy(update={"local_batch": 32 + 2 * (number % 16)}))


def new(number: int) -> object:
    """Another length of sequences each time."""
    return project(PUBLISHED.model_copy(update={"seq_len": 8192 - 16 * number}))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "projection.json")
    options = parser.parse_args()
    for number in range(16):
        known(number)
    content = {
        "label": "measured",
        "date": now(),
        "machine": f"{processor_name()}, {cores()} cores, Python {platform.python_version()}",
        "load_average": round(os.getloadavg()[0], 2),
        "known_sizes_us": cost_us(known, 200),
        "new_sizes_us": cost_us(new, 200),
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
