"""Measure what a projection costs, find the fitted constants again, and print the validation table.

    python benchmarks/projection.py
    python benchmarks/projection.py --fit      # the fitted constants, as the rows that they were fitted on give them
    python benchmarks/projection.py --table    # every row: measured, predicted, error, use
    python benchmarks/projection.py --write    # the table that the package carries, predicted anew

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

from validation.table import table_file, table_rows

from moelab.machine import cores, git_commit, processor_name
from moelab.projection.calibration import fitted
from moelab.projection.project import project
from moelab.projection.validation import NOT_PREDICTED, goals, refit
from moelab.runs.files import write_json
from moelab.titan.arms import named_arms

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src" / "moelab" / "data" / "validation.json"
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
    """Measure, or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fitted constants, found again")
    parser.add_argument("--table", action="store_true", help="print the validation table")
    parser.add_argument(
        "--write", action="store_true", help=f"predict every case of benchmarks/validation, into {TABLE}"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "projection.json")
    options = parser.parse_args()
    if options.write:
        write_json(TABLE, table_file(date=now(), git_commit=git_commit()))
    if options.fit:
        print(json.dumps({name: constant.value for name, constant in fitted(refit()).items()}, indent=1))
    if options.table:
        rows = table_rows()
        for row in rows:
            print(
                f"{row.measured:12.1f} {row.predicted:12.1f} {row.error:+8.3f}  {row.use:22} {row.source}: {row.name}"
            )
        for source, what, why in NOT_PREDICTED:
            print(f"not predicted: {source}: {what}: {why}")
        for goal in goals(rows):
            worst = f"worst {goal.worst:+.3f} of {goal.predicted} (seen, not judged: {goal.seen}) at {goal.at}"
            print(f"{'met' if goal.met else 'missed':7} {goal.name}: {worst}")
    if options.fit or options.table or options.write:
        return
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
