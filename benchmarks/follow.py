"""Measure what watching costs: CPU seconds of the follower, of the terminal view and of the widget per second.

A process of its own writes the metrics of a run and the log of its 256 ranks, a step a second, behind a part that is
there from the start:

    python benchmarks/follow.py
    python benchmarks/follow.py --seconds 10 --output /tmp/follow.json

The widget runs in a Jupyter kernel with its default interval, so that making and sending its messages is counted; the
browser's part, another machine's as a rule, is not. The writer's part is not counted either.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from read_log import STEP, cpu_name

from moelab.experiment import Experiment
from moelab.launch.status import follow
from moelab.runs import directory
from moelab.runs.follow import StudyFollower
from moelab.runs.metrics import FILE, MetricsWriter
from moelab.runs.status import State, Status

RANKS = 256
EARLIER_STEPS = 1000
LINE = "[rank{rank}]:[titan] {stamp} - root - INFO - "
OTHER = "[GC] Performing periodic GC collection took 0.02 seconds\n"
IN_KERNEL = """
import time
from pathlib import Path
from moelab.viz.live import LiveView
view = LiveView(Path({folder!r}))
view.show_figures()
time.sleep(2)
wall, cpu = time.perf_counter(), time.process_time()
time.sleep({seconds})
print(time.process_time() - cpu, time.perf_counter() - wall, view.follower.runs[0].now.step)
view.stop()
"""


def step_lines(step: int, now: datetime) -> str:
    """What all ranks print at a step, and one line beside them."""
    lines = []
    for rank in range(RANKS):
        stamp = now + timedelta(milliseconds=rank % 7)
        head = LINE.format(rank=rank, stamp=f"{stamp:%Y-%m-%d %H:%M:%S},{stamp.microsecond // 1000:03}")
        lines.append(head + STEP.format(step=step, loss=loss_of(step) if rank >= RANKS - 32 else -32.0))
    return "".join([*lines, head + OTHER])


def loss_of(step: int) -> float:
    """The loss at a step."""
    return 12 - step * 1e-3


def add_step(metrics: MetricsWriter, step: int, now: datetime) -> None:
    """What the rank that has the loss keeps of a step."""
    metrics.add_step(step, loss=loss_of(step), grad_norm=0.2, tps=900.0, memory_gib=150.0, time=now.timestamp())


def write(run: directory.RunDir, first: int, seconds: float) -> None:
    """Append a step a second."""
    metrics = MetricsWriter(run.path)
    with run.log.open("a", encoding="utf-8") as file:
        for step in range(first, first + int(seconds)):
            now = datetime.now()
            file.write(step_lines(step, now))
            file.flush()
            add_step(metrics, step, now)
            time.sleep(1)


def make_run(runs: Path) -> directory.RunDir:
    """A run that trains, with its earlier steps."""
    shape = {"model": "671B", "nodes": 32, "gpus_per_node": 8, "ep": 32, "steps": 100_000, "dataset": "c4"}
    run = directory.create(runs, Experiment(name="watched", precision="mxfp8", ep_backend="deepep", **shape))
    run.set_status(Status(state=State.RUNNING, attempts=1))
    start = datetime.now() - timedelta(seconds=EARLIER_STEPS)
    times = {step: start + timedelta(seconds=step) for step in range(1, EARLIER_STEPS + 1)}
    run.log.write_text("".join(step_lines(step, now) for step, now in times.items()), encoding="utf-8")
    metrics = MetricsWriter(run.path)
    for step, now in times.items():
        add_step(metrics, step, now)
    return run


def shares(cpu_s: float, wall_s: float, **more: Any) -> dict[str, Any]:
    """One measurement."""
    return {"cpu_s": round(cpu_s, 3), "wall_s": round(wall_s, 1), "share_of_a_core": round(cpu_s / wall_s, 4), **more}


def poll(folder: Path, seconds: float) -> dict[str, Any]:
    """The follower alone, once a second; first it reads what is there."""
    start, cpu = time.perf_counter(), time.process_time()
    follower = StudyFollower(folder)
    follower.poll()
    rebuilt = shares(time.process_time() - cpu, time.perf_counter() - start)
    size = (follower.runs[0].run.path / FILE).stat().st_size
    start, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        follower.poll()
        time.sleep(1)
    spent = shares(time.process_time() - cpu, time.perf_counter() - start, last_step=follower.runs[0].now.step)
    return {"first_read": {**rebuilt, "bytes": size}, "following": spent}


class Screen(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        """It is one."""
        return True


class Stopwatch:
    """Sleeps for the view that it measures, from its first look on, and interrupts it when the time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start, self.cpu = seconds, 0.0, 0.0

    def __call__(self, interval_s: float) -> None:
        """Sleep."""
        if not self.start:
            self.start, self.cpu = time.perf_counter(), time.process_time()
        time.sleep(interval_s)
        if time.perf_counter() - self.start > self.seconds:
            raise KeyboardInterrupt


def terminal(folder: Path, seconds: float) -> dict[str, Any]:
    """The terminal view, with its own interval."""
    watch = Stopwatch(seconds)
    with suppress(KeyboardInterrupt):
        follow(folder, Screen(), sleep=watch)
    return shares(time.process_time() - watch.cpu, time.perf_counter() - watch.start)


def widget(folder: Path, seconds: float) -> dict[str, Any]:
    """The widget in a kernel."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    printed: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] in ("stream", "error"):
            printed.append(str(message["content"].get("text", message["content"].get("evalue"))))

    try:
        client.execute_interactive(IN_KERNEL.format(folder=str(folder), seconds=seconds), output_hook=keep)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    cpu, wall, step = "".join(printed).split()[-3:]
    return shares(float(cpu), float(wall), last_step=int(step))


def main() -> None:
    """Run the measurements, one after the other, each beside its own writer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "follow.json")
    parser.add_argument("--write", nargs=2, metavar=("RUN", "STEP"), help="be the writer")
    arguments = parser.parse_args()
    if arguments.write:
        write(directory.RunDir(Path(arguments.write[0])), int(arguments.write[1]), 3 * arguments.seconds)
        return
    load, results = os.getloadavg()[0], {}
    for name, measure in {"follower": poll, "terminal": terminal, "widget": widget}.items():
        with tempfile.TemporaryDirectory() as folder:
            run = make_run(Path(folder))
            command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--write", str(run.path)]
            writer = subprocess.Popen([*command, str(EARLIER_STEPS + 1)])
            try:
                results[name] = measure(Path(folder), arguments.seconds)
            finally:
                writer.kill()
                writer.wait()
        print(name, results[name], file=sys.stderr)
    report = {
        "label": "measured",
        "what": f"watching one run of {RANKS} ranks that each print a step line a second into one log, beside the "
        "run's metrics, on a CPU; "
        "a share is CPU seconds of the watching process by wall seconds; the browser is not counted",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("pandas", "plotly", "ipywidgets", "ipykernel")},
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "ranks": RANKS,
        "earlier_steps": EARLIER_STEPS,
        "results": results,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
