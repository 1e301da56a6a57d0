"""TorchTitan's metric names, as TensorBoard and W&B store them, and the columns that they fill.

Source: torchtitan 0.3.0, ``MetricsProcessor.log`` and ``log_validation`` in ``components/metrics.py`` and
``LRSchedulersContainer.get_metrics`` in ``components/optimizer/lr_scheduler.py``. Memory is what was reserved, as in
the log line.
"""

from __future__ import annotations

import math
from typing import Final

REPORTED_NAN: Final = -math.inf
"""A gradient norm that was reported as NaN, until the metrics table is made, in which NaN is what is missing."""
STEP_METRICS: Final = {
    "loss_metrics/global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "throughput(tps)": "tps",
    "tflops": "tflops",
    "mfu(%)": "mfu",
    "memory/max_reserved(GiB)": "memory_gib",
    "memory/max_reserved(%)": "memory_pct",
}
VALIDATION_METRICS: Final = {
    "validation_metrics/loss": "loss",
    "validation_metrics/throughput(tps)": "tps",
    "validation_metrics/memory/max_reserved(GiB)": "memory_gib",
}


def step_column(name: str) -> str | None:
    """Return the table column that a metric of a training step fills, or None.

    Learning rates are called ``lr/<optimizer>``, or ``lr/<optimizer>/<i>`` with several parameter groups. Several such
    metrics share the column ``lr``; readers keep the largest.

    >>> step_column("lr/AdamW/0"), step_column("memory/num_ooms")
    ('lr', None)
    """
    return "lr" if name.startswith("lr/") else STEP_METRICS.get(name)
