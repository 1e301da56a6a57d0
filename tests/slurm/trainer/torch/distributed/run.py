"""A stand-in for torchrun inside a job: it logs as rank 0 does, goes on where it was, waits, fails.

``TRAINER`` is a folder: while it holds a file ``hold``, training waits after step 2; with ``fail`` it fails.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import yaml
from stand_in import step_line

run = Path(os.environ["MOELAB_EXPERIMENT"]).parent
gate = Path(os.environ["TRAINER"])
steps = yaml.safe_load((run / "experiment.yaml").read_text())["steps"]
is_first = "--node-rank=0" in sys.argv
saved = run / "saved_step"
for step in range(int(saved.read_text()) + 1 if saved.exists() else 1, steps + 1):
    while step > 2 and (gate / "hold").exists():
        time.sleep(0.05)
    if (gate / "fail").exists():
        raise SystemExit(3)
    if is_first:
        sys.stdout.write(step_line(step, 8.0 - step / 10, seconds=time.monotonic()))
        sys.stdout.flush()
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(f'{{"step": {step}, "loss": {8.0 - step / 10}, "time": {time.time()}}}\n')
        saved.write_text(str(step))
