"""Seconds a step of nano takes on this CPU, in BF16 and with emulated MXFP8 experts, in A B A B order.

    python benchmarks/nano_step.py [--output benchmarks/results/nano_step.json]

Two ranks of 1,024 tokens each (4 sequences of 256). The ratio is what to compare between machines; the seconds belong
to the processor that is named beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moelab.experiment_file import make_study
from moelab.launch.study import run_study
from moelab.machine import environment
from moelab.runs.collect import WARMUP_STEPS, collect_run
from moelab.runs.table import throughput_rows

SHARED = {"model": "nano", "steps": 25, "seq_len": 256, "local_batch": 4, "hardware": "cpu"}
TOKENS_PER_RANK = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/nano_step.json"))
    output = parser.parse_args().output
    study = make_study("nano_step", SHARED, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0, 1])
    with tempfile.TemporaryDirectory() as folder:
        collected = [collect_run(run) for run in run_study(study, Path(folder)).runs]
    rows: list[dict[str, Any]] = []
    for one in collected:
        seconds = TOKENS_PER_RANK / throughput_rows(one.rows, warmup_steps=WARMUP_STEPS)["tps"]
        quartiles = statistics.quantiles(seconds, n=4)
        rows.append({"arm": one.arm, "step_s_median": quartiles[1], "step_s_iqr": quartiles[2] - quartiles[0]})
    medians = {arm: [row["step_s_median"] for row in rows if row["arm"] == arm] for arm in study.arms}
    ratios = [m / b for b, m in zip(medians["bf16_standard"], medians["mxfp8_standard"], strict=True)]
    result = {
        "label": "measured",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "order": [one.arm for one in collected],
        "rows": rows,
        "mxfp8_over_bf16": ratios,
        "environment": environment(),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"rows": rows, "mxfp8_over_bf16": ratios}, indent=1))


if __name__ == "__main__":
    main()
