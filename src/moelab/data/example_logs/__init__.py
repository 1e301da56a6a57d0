"""Two logs as a colleague might send them, for ``notebooks/10_report_study.ipynb``.

TorchTitan's own output of two trainings of 40 steps, measured on 2 × H100 on 2026-11-28 with torch 2.14.1, torchtitan
0.3.0 and torchao 0.18.0: the debug model in BF16, and with emulated MXFP8 experts from the same seed. A time limit
ended the second one's launcher after its training was complete. ``benchmarks/results/h100_moelab_run.json``
has what was read off them.

``simulated_671b.log.gz`` is none of a colleague's: ``benchmarks/simulate_log.py`` wrote it, for
``notebooks/09_launch_and_watch_run.ipynb``, to show what a run of 256 ranks looks like while it trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXAMPLE_LOGS = tuple(Path(__file__).with_name(f"{name}.log.gz") for name in ("bf16_on_h100", "mxfp8_emulated_on_h100"))
SIMULATED_LOG = Path(__file__).with_name("simulated_671b.log.gz")
SIMULATED: dict[str, Any] = {
    "name": "simulated",
    **{"model": "671B", "precision": "mxfp8", "ep_backend": "deepep", "nodes": 32, "gpus_per_node": 8},
    **{"tp": 2, "pp": 2, "ep": 32, "steps": 40, "warmup_steps": 2000, "lr": 1.0e-4, "seq_len": 8192, "local_batch": 64},
    **{"activation_checkpoint": "full", "compile": "model+loss", "routing": "round_robin", "dataset": "c4"},
    "hardware": "b200_x256",
}
"""The experiment of the simulated log: the published layout."""
