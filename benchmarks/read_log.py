"""Measure how fast a TorchTitan log is read, and that memory does not grow with it.

Writes a synthetic log of 256 ranks into a temporary folder, reads it, prints the figures and stores them:

    python benchmarks/read_log.py --gb 1
    python benchmarks/read_log.py --gb 0.1 --output /tmp/read_log.json

Three logs are read: one of step lines alone and one without any, which show the two costs, and the mixed one of the
given size: each step line among ``--other-lines`` lines of garbage collection and checkpointing, in colour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from moelab.runs.log import read_log

RANKS = 256
STAMP = "[rank{local}]:[titan] {stamp} - root - INFO - "
STEP = (
    "\x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
    "\x1b[38;2;54;234;195mmemory: 151.07GiB(84.71%)  \x1b[34mtps: 12,846  \x1b[36mtflops: 1,034.57  "
    "\x1b[35mmfu: N/A\x1b[39m\n"
)
OTHER = "[GC] Performing periodic GC collection took 0.02 seconds; the checkpointer waits for its staging thread\n"


def write_log(path: Path, size: int, *, step_lines: int, other_lines: int) -> int:
    """Write about ``size`` bytes and return the number of step lines; only the last 32 ranks print the loss."""
    now, step, written = datetime(2026, 9, 14, 3), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            step += 10
            now += timedelta(seconds=40)
            lines = []
            for rank in range(RANKS):
                stamp = now + timedelta(milliseconds=rank % 7)
                head = STAMP.format(local=rank % 8, stamp=f"{stamp:%Y-%m-%d %H:%M:%S},{stamp.microsecond // 1000:03}")
                loss = 12 - step * 1e-5 if rank >= RANKS - 32 else -32.0
                lines += [head + STEP.format(step=step, loss=loss)] * step_lines + [head + OTHER] * other_lines
            written += file.write("".join(lines))
    return step // 10 * RANKS * step_lines


def measure(path: Path, step_lines: int) -> dict[str, float]:
    """Read the log once; RSS growth is that of the process's peak, in MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu_start = time.perf_counter(), time.process_time()
    read = read_log(path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = path.stat().st_size
    return {
        "bytes": size,
        "step_lines": step_lines,
        "rows": len(read.rows),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "mb_per_s": round(size / seconds / 1e6, 1),
        "step_lines_per_s": round(step_lines / seconds),
        "peak_rss_growth_mib": round(growth, 1),
    }


def cpu_name() -> str:
    """Return the CPU's model name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    """Run the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the mixed log in GB (10^9 bytes)")
    parser.add_argument("--other-lines", type=int, default=4, help="other lines for each step line in the mixed log")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "read_log.json")
    arguments = parser.parse_args()
    size = int(arguments.gb * 1e9)
    kinds = {
        "mixed": (size, 1, arguments.other_lines),
        "step_lines": (size // 10, 1, 0),
        "other_lines": (size // 4, 0, 1),
    }
    load = os.getloadavg()[0]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        for kind, (kind_size, step_lines, other_lines) in kinds.items():
            results[kind] = measure(path, write_log(path, kind_size, step_lines=step_lines, other_lines=other_lines))
            print(kind, results[kind], file=sys.stderr)
    report = {
        "label": "measured",
        "what": f"moelab.runs.read_log on synthetic logs of {RANKS} ranks, one process, file in the page cache",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
