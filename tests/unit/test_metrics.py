"""The store of a run's numbers as a trainer writes it: what TorchTitan hands to its loggers, exact and never torn."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moelab.runs.metrics import FILE, MetricsWriter, read_metrics

titan = pytest.importorskip("moelab.titan.metrics")
RANKS = [(-1.0, 70.0, 50.0), (7.25, 60.0, 75.0)]
"""Loss, memory in GiB and in percent of two pipeline ranks; the emptier one has the loss, and a smaller GPU."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process in the place of the rank that has the loss, among :data:`RANKS`."""
    monkeypatch.setattr(titan.utils, "device_type", "cpu")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    largest = torch.tensor(RANKS, dtype=torch.float64).max(dim=0).values
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, _operation: tensor.copy_(largest))
    return


def store(folder: Path) -> Any:
    """What TorchTitan logs to on the rank that has the loss: its own loggers, none here, and the store."""
    dims = SimpleNamespace(pp_enabled=True, world_size=2, pp=2)
    config = titan.KeptMetrics.Config(enable_tensorboard=False)
    processor = object.__new__(titan.KeptMetrics)
    logger = processor._build_metric_logger(
        config=config, parallel_dims=dims, dump_folder=str(folder), pp_schedule="1F1B"
    )
    return processor, logger


def metrics(**more: Any) -> dict[str, Any]:
    """Of one rank, under TorchTitan 0.3.0's names (``MetricsProcessor.log``)."""
    names = ("loss_metrics/global_avg_loss", "memory/max_reserved(GiB)", "memory/max_reserved(%)")
    others = {"grad_norm": 0.5, "throughput(tps)": 4000.0, "tflops": 90.0, "lr/AdamW/0": 1e-4, "lr/AdamW/1": 3e-4}
    return dict(zip(names, RANKS[1], strict=True)) | others | more


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_step_has_the_loss_and_the_fullest_ranks_memory_and_null_where_nothing_is_known(
    tmp_path: Path, alone: None
) -> None:
    _, logger = store(tmp_path / "not yet there")
    logger.log(metrics(), 1)
    logger.log(metrics(**{"mfu(%)": 41.5, "grad_norm": math.nan}), 2)
    logger.log({"validation_metrics/loss": 7.5, "validation_metrics/throughput(tps)": 9000.0}, 2)
    first, second, held_out = lines(tmp_path / "not yet there")
    time = first.pop("time")
    values = {"loss": 7.25, "grad_norm": 0.5, "tps": 4000.0, "tflops": 90.0, "mfu": None, "lr": 3e-4}
    assert first == {"segment": 0, "step": 1, **values, "memory_gib": 70.0, "memory_pct": 75.0}
    assert (second["mfu"], math.isnan(second["grad_norm"])) == (41.5, True)
    assert held_out.pop("time") >= time > 1.7e9
    assert held_out == {"segment": 0, "step": 2, "validation_loss": 7.5}


def test_a_loss_that_is_not_finite_is_kept_before_torchtitan_ends_the_run(tmp_path: Path, alone: None) -> None:
    processor, logger = store(tmp_path)
    logger.log(metrics(), 1)
    processor.keep_failure(2, RuntimeError("CUDA error: an illegal memory access was encountered"))
    processor.keep_failure(2, RuntimeError("Loss is not finite (global_avg_loss=nan) at step 2. Stopping training."))
    read = read_metrics(tmp_path / FILE)
    assert (read.reason, read.rows["step"].tolist()) == ("loss is nan at step 2 (segment 0)", [1, 2])


def test_a_full_disk_ends_no_training_and_what_follows_is_whole(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, logger = store(tmp_path)
    logger.log(metrics(), 1)
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, line: bytes) -> None:
            self.file.write(line[:20])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, *mode: Full(opened(path, *mode)))
        with caplog.at_level(logging.WARNING):
            logger.log(metrics(), 2)
    logger.log(metrics(), 3)
    read = read_metrics(tmp_path / FILE)
    assert "the step's metrics cannot be written: No space left on device" in caplog.text
    assert (read.rows["step"].tolist(), read.notes) == ([1, 3], (f"{FILE}: 1 line is torn, and not read",))


def test_each_launch_is_a_segment_also_after_a_line_that_a_kill_tore(tmp_path: Path) -> None:
    for step in (1, 2):
        MetricsWriter(tmp_path).add_step(step, loss=8.0)
        with (tmp_path / FILE).open("a") as file:
            file.write('{"segment": 7, "st')
    rows = read_metrics(tmp_path / FILE).rows
    assert rows[["segment", "step"]].values.tolist() == [[0, 1], [1, 2]]


def test_only_the_rank_with_the_loss_writes(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    _, logger = store(tmp_path)
    logger.log(metrics(), 1)  # it takes part in the all-reduce all the same
    assert not (tmp_path / FILE).exists()
