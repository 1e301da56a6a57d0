"""TorchTitan's metrics, which a run also keeps in its ``metrics.jsonl``.

TorchTitan 0.3.0 hands the numbers of a step to its loggers on every rank. Ranks without the last pipeline stage have a
negative number for the loss, and each has its own memory: one all-reduce of three numbers gives the loss and the
fullest rank's memory to the rank that writes. The file is thus exact, while the log rounds.
"""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, _get_metrics_rank
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from moelab.runs.metrics import MetricsWriter

_NOT_FINITE = re.compile(r"Loss is not finite \(global_avg_loss=(-?\w+)\)")


class KeptMetrics(MetricsProcessor):
    """TorchTitan's processor, with one logger more."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """No settings of its own."""

    def _build_metric_logger(
        self, *, parallel_dims: ParallelDims, dump_folder: str, pp_schedule: str, **options: Any
    ) -> BaseLogger:
        titan = super()._build_metric_logger(
            parallel_dims=parallel_dims, dump_folder=dump_folder, pp_schedule=pp_schedule, **options
        )
        has_loss = dist.get_rank() == _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self.store = _Store(Path(dump_folder) if has_loss else None)
        both = LoggerContainer()
        both.add_logger(titan)
        both.add_logger(self.store)
        return both

    def keep_failure(self, step: int, error: RuntimeError) -> None:
        """Keep a loss that is not finite, for which TorchTitan raises before it logs the step."""
        if found := _NOT_FINITE.search(str(error)):
            self.store.add_step(step, loss=float(found[1]))


class _Store(BaseLogger):
    """The logger of every rank; the one with a folder writes."""

    def __init__(self, run: Path | None) -> None:
        self._writer = None
        if run is not None:
            run.mkdir(parents=True, exist_ok=True)
            self._writer = MetricsWriter(run)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Take what TorchTitan logs of a training step or of a validation."""
        if (held_out := metrics.get("validation_metrics/loss")) is not None:
            if self._writer and held_out >= 0:
                self._try(self._writer.add_validation, step, held_out, time.time())
            return
        names = ("loss_metrics/global_avg_loss", "memory/max_reserved(GiB)", "memory/max_reserved(%)")
        largest = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=utils.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if self._writer:
            loss, memory_gib, memory_pct = largest.tolist()
            self.add_step(
                step,
                loss=loss if loss >= 0 else None,
                grad_norm=metrics["grad_norm"],
                tps=metrics["throughput(tps)"],
                tflops=metrics["tflops"],
                mfu=metrics.get("mfu(%)"),
                memory_gib=memory_gib,
                memory_pct=memory_pct,
                lr=max((value for name, value in metrics.items() if name.startswith("lr")), default=None),
            )

    def add_step(self, step: int, **values: float | None) -> None:
        """Append a step, where this rank writes."""
        if self._writer:
            self._try(self._writer.add_step, step, **values, time=time.time())

    def _try(self, append: Any, *values: Any, **named: Any) -> None:
        try:
            append(*values, **named)
        except OSError as error:  # a full disk must not end the training
            logger.warning(f"moelab: the step's metrics cannot be written: {error.strerror or error}")
