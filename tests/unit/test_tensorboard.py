"""TensorBoard folders as TorchTitan writes them, written here with the writer that TorchTitan uses."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from moelab.errors import BadInput
from moelab.runs.collect import collect
from moelab.runs.table import COLUMNS
from moelab.runs.tensorboard import NotATensorBoardFolder, read_tensorboard


def write(folder: Path, created: int, steps: dict[int, dict[str, float]], *, time: float = 0.0) -> Path:
    """Write one event file, named as if created at ``created``; a step's wall time is ``time`` plus the step."""
    before = set(folder.glob("*"))
    with SummaryWriter(str(folder), max_queue=1000) as writer:
        for step, metrics in steps.items():
            for tag, value in metrics.items():
                writer.add_scalar(tag, value, step, walltime=time + step)
    (file,) = set(folder.glob("*")) - before
    return file.rename(folder / re.sub(r"tfevents\.\d+", f"tfevents.{created}", file.name))


def metrics(loss: float, *, memory: float = 10.0, **more: float) -> dict[str, float]:
    return {
        "loss_metrics/global_avg_loss": loss, "loss_metrics/global_max_loss": loss + 1, "grad_norm": 0.5,
        "throughput(tps)": 4000.25, "tflops": 900.5, "mfu(%)": 40.0, "memory/max_active(GiB)": 1.0,
        "memory/max_reserved(GiB)": memory, "memory/max_reserved(%)": memory / 2, "n_tokens_seen": 1e6, **more,
    }  # fmt: skip


def test_one_launch(tmp_path: Path) -> None:
    lr = {"lr/AdamW/0": 1e-4, "lr/AdamW/1": 3e-4}
    check = {"validation_metrics/loss": 7.5, "validation_metrics/throughput(tps)": 9000.0}
    check["validation_metrics/memory/max_reserved(GiB)"] = 20.0
    steps = {1: metrics(8.123456, **lr), 10: metrics(7.0, **lr) | check, 20: metrics(math.nan, **lr)}
    write(tmp_path / "20260914-0310", 100, steps, time=1000.0)
    (read,) = read_tensorboard(tmp_path)
    assert tuple(read.rows.columns) == COLUMNS
    assert read.rows.drop(columns=["run", "arm", "seed"]).values.tolist() == [
        [0, step, pytest.approx(loss, nan_ok=True), 0.5, 4000.25, 900.5, 40.0, 10.0, 5.0, np.float32(3e-4), 1000 + step]
        for step, loss in ((1, 8.123456), (10, 7.0), (20, math.nan))
    ]
    assert read.validation.values.tolist() == [[0, 10, 7.5, 9000.0, 20.0, 1010.0]]
    assert (read.segments, read.reason) == (1, "loss is nan at step 20 (segment 0)")


def test_launches_are_segments_in_time_order_even_within_one_minute(tmp_path: Path) -> None:
    write(tmp_path / "20260914-0500", 300, {20: metrics(7.1), 30: metrics(6.0)})
    write(tmp_path / "20260914-0310", 200, {})  # killed before its first flush
    write(tmp_path / "20260914-0310", 205, {10: metrics(8.0), 20: metrics(7.0)})
    (read,) = read_tensorboard(tmp_path)
    assert read.rows[["segment", "step", "loss"]].values.tolist() == [
        [0, 10, 8.0], [0, 20, 7.0], [1, 20, pytest.approx(7.1)], [1, 30, 6.0]
    ]  # fmt: skip
    assert read.segments == 2


def test_ranks_of_one_launch_are_one_segment(tmp_path: Path) -> None:
    for rank, (loss, memory) in enumerate([(-8.0, 12.0), (7.5, 11.0)]):
        write(tmp_path / "20260914-0310" / f"rank_{rank}", 100 + rank, {10: metrics(loss, memory=memory)})
    write(tmp_path / "20260914-0500" / "rank_0", 900, {10: metrics(-8.0)})
    (read,) = read_tensorboard(tmp_path)
    rows = read.rows[["segment", "loss", "memory_gib"]].values.tolist()
    assert rows == [[0, 7.5, 12.0], [1, pytest.approx(math.nan, nan_ok=True), 10.0]]
    assert (read.segments, read.reason) == (2, None)


def test_folders_of_several_runs(tmp_path: Path) -> None:
    for name, created, loss in (("bf16", 200, 8.0), ("mxfp8/seed1", 100, 8.1)):
        for rank in (0, 1):
            folder = tmp_path / "study" / name / "tb" / "20260914-0310" / f"rank_{rank}"
            write(folder, created, {1: {"loss_metrics/global_avg_loss": loss, "wps": 5.0}})
    runs = [(one.run, one.segments, one.rows["tps"].tolist()) for one in collect(tmp_path / "study")]
    assert runs == [("bf16", 1, [5.0]), ("mxfp8/seed1", 1, [5.0])]
    for created, date, loss in ((100, "20260914-0310", 8.0), (200, "20260914-0500", 8.1)):
        write(tmp_path / "two" / date, created, {1: metrics(loss), 2: metrics(loss - 1)})
    with pytest.raises(BadInput, match="two: it holds two runs"):
        collect(tmp_path / "two")


def test_folder_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(NotATensorBoardFolder, match="enable_tensorboard"):
        read_tensorboard(tmp_path)
    write(tmp_path, 100, {})
    (read,) = read_tensorboard(tmp_path)
    assert (len(read.rows), read.segments, tuple(read.rows.columns)) == (0, 0, COLUMNS)
    with pytest.raises(BadInput, match="no step in it"):
        collect(tmp_path)


def test_a_kill_hides_no_record_before_it(tmp_path: Path) -> None:
    file = write(tmp_path, 100, {step: {"loss_metrics/global_avg_loss": 8.0 - step} for step in range(1, 8)})
    content = file.read_bytes()
    file.write_bytes(content[: content.index(struct.pack("<f", 4.0))])
    (read,) = read_tensorboard(tmp_path)
    assert read.rows[["step", "loss"]].values.tolist() == [[1, 7.0], [2, 6.0], [3, 5.0]]
