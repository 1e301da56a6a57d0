"""Two logs as a colleague might send them, for ``notebooks/10_report_study.ipynb``.

TorchTitan's own output of two trainings of 40 steps, measured on 2 × H100 on 2026-11-28 with torch 2.14.1, torchtitan
0.3.0 and torchao 0.18.0: the debug model in BF16, and with emulated MXFP8 experts from the same seed. A time limit
ended the second one's launcher after its training was complete. ``benchmarks/results/h100_moelab_run.json``
has what was read off them.
"""

from __future__ import annotations

from pathlib import Path

EXAMPLE_LOGS = tuple(Path(__file__).with_name(f"{name}.log.gz") for name in ("bf16_on_h100", "mxfp8_emulated_on_h100"))
