"""A traced step: the right one, without places, bounded, whole or absent, and out of the throughput."""

from __future__ import annotations

import errno
import gzip
import json
import pickle
import re
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from run_support import collect_and_save, make_run
from torch.autograd.profiler import record_function

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.experiment_file import parse
from moelab.files import write_json
from moelab.layout import check
from moelab.runs.collect import collect_run
from moelab.runs.directory import RECORDED_FOLDER
from moelab.titan import trace
from moelab.titan.trace import StepTracer, without_places_of

ROWS = 48


def train(tracer: StepTracer, first: int, last: int) -> None:
    """Steps that differ in the rows of a product."""
    for step in range(first, last + 1):
        with tracer.around(step), record_function("/scratch/ada/kernels/scale.py"):
            torch.ones(ROWS + step, 8) @ torch.ones(8, 4)


def events_of(run: Path) -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress((run / "traces" / "rank0.json.gz").read_bytes()))["traceEvents"])


@pytest.mark.parametrize(("first", "step"), [(1, 4), (1, 3), (1, 2), (4, 4)])  # and right after a restart
def test_the_step_alone_is_traced_with_the_sizes_of_its_products(tmp_path: Path, first: int, step: int) -> None:
    train(StepTracer(step, 0, tmp_path, memory_snapshot=False), first, step + 2)
    events = events_of(tmp_path)
    assert [one["name"] for one in events if one["name"].startswith("ProfilerStep")] == [f"ProfilerStep#{step}"]
    products = [one["args"]["Input Dims"][0] for one in events if one["name"] == "aten::mm"]
    assert products == [[ROWS + step, 8]]
    record = json.loads((tmp_path / RECORDED_FOLDER / "rank0.json").read_text())
    (file,) = record["files"]
    assert file["bytes"] == (tmp_path / file["file"]).stat().st_size
    assert (record["step"], file["reason"]) == (step, None)
    assert record["step_s"] > 0
    assert (record["usual_step_s"] is None) == (step - first < 3)  # the first compiles, the one before warms up


def test_a_trace_has_no_folder_and_no_host_and_a_later_launch_leaves_none(tmp_path: Path) -> None:
    train(StepTracer(2, 0, tmp_path, memory_snapshot=False), 1, 2)
    text = gzip.decompress((tmp_path / "traces" / "rank0.json.gz").read_bytes()).decode()
    assert json.loads(text)["traceName"] == ""
    assert "scale.py" in text
    assert [place for place in ("ada", str(tmp_path), f'"{socket.gethostname()}') if place in text] == []
    train(StepTracer(4, 0, tmp_path / "later", memory_snapshot=False), 5, 7)
    assert not (tmp_path / "later").exists()


def test_lines_of_a_trace() -> None:
    same = ['"name": "void at::native::f<int>(int)", "ts": 1', '"name": "torch/nn/modules: Linear", "dims": "[[2, 4]]"']
    cleaned = {
        '"host_name": "gpu-17.cluster",': '"host_name": "",',
        '"a \\"b\\"": "/home/ada/.triton/k.py", "ts": 2': '"a \\"b\\"": "…/k.py", "ts": 2',
        **{line: line for line in same},
    }
    assert {line: without_places_of(line) for line in cleaned} == cleaned


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MAX_BYTES", 100, "not kept: larger than"),
        ("write_whole", Mock(side_effect=OSError(errno.ENOSPC, "No space left")), "not kept: No space left"),
    ],
)
def test_training_goes_on_where_a_trace_cannot_be_kept_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str
) -> None:
    monkeypatch.setattr(trace, name, value)
    train(StepTracer(2, 3, tmp_path, memory_snapshot=False), 1, 3)
    (file,) = json.loads((tmp_path / RECORDED_FOLDER / "rank3.json").read_text())["files"]
    assert (file["file"], file["bytes"]) == ("traces/rank3.json.gz", 0)
    assert file["reason"].startswith(reason)
    assert not (tmp_path / "traces").exists()


def test_a_memory_snapshot_names_files_without_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA's allocator, which has the layout of ``torch.cuda.memory._snapshot``."""
    frame = {"filename": "/home/ada/titan/moe.py", "line": 7, "name": "forward"}
    block = {"size": 512, "state": "active_allocated", "frames": [frame]}
    snapshot = {
        "segments": [{"blocks": [block], "frames": []}],
        "device_traces": [[{"action": "alloc", "frames": [frame]}]],
    }
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    train(StepTracer(2, 0, tmp_path, memory_snapshot=True), 1, 4)
    assert [call.get("enabled", "all") for call in calls] == ["all", None]  # nothing slows the steps after
    kept = pickle.loads(gzip.decompress((tmp_path / "traces" / "memory_rank0.pickle.gz").read_bytes()))
    bare = {**frame, "filename": "…/moe.py"}
    assert kept["device_traces"] == [[{"action": "alloc", "frames": [bare]}]]
    assert kept["segments"][0]["blocks"] == [{**block, "frames": [bare]}]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"trace_step": 7}, r"trace_step: got 7; .*2 to 6"),
        ({"trace_step": 1}, "2 to 6"),
        ({"trace_step": 1, "steps": 1}, "trace_step: got 1"),
        ({"trace_ranks": [0, 2]}, r"trace_ranks: got \[0, 2\]; .*0 to 1"),
        ({"trace_ranks": []}, r"trace_ranks: got \[\]"),
    ],
)
def test_steps_and_ranks_that_are_none_of_the_run_are_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        parse(Experiment, {"steps": 6, **fields})


def test_a_memory_snapshot_is_refused_by_name_where_it_cannot_be() -> None:
    (no_gpu,) = check(Experiment(memory_snapshot=True, trace_step=4, hardware="cpu")).reasons
    (no_step,) = check(Experiment(memory_snapshot=True, hardware="h100_node")).reasons
    assert re.match("memory_snapshot is True: .*cpu has no GPU", no_gpu)
    assert re.match("memory_snapshot is True: .*trace_step is 0", no_step)


def test_traced_steps_are_out_of_the_throughput(tmp_path: Path) -> None:
    losses = [8.0 - 0.1 * step for step in range(12)]
    run = make_run(tmp_path, Experiment(steps=12, trace_step=8, trace_ranks=(0, 1)), losses)
    (missing,) = collect_run(run).notes
    assert missing.startswith("step 8 was not traced on rank 0, 1: a launch began after it")
    record = {"step": 8, "step_s": 2.5, "usual_step_s": 1.0, "write_s": 3.0}
    big = {"file": "traces/rank0.json.gz", "bytes": 0, "reason": "not kept: larger than 64 MiB"}
    for rank, file in enumerate((big, {"file": "traces/rank1.json.gz", "bytes": 9, "reason": None})):
        write_json(
            run.path / RECORDED_FOLDER / f"rank{rank}.json", {**record, "write_s": 0.5 + 2.5 * rank, "files": [file]}
        )
    one = collect_run(run)
    assert one.notes[0].startswith("step 8 was traced: it took 2.500 s instead of 1.000 s, plus 3.0 s to write")
    assert one.notes[1:] == ("traces/rank0.json.gz: not kept: larger than 64 MiB",)
    assert one.rows["step"][one.rows["tps"].isna()].tolist() == [7, 8, 9]
    assert one.rows["loss"].notna().all()
    assert [(trace["rank"], trace["step"]) for trace in one.to_json()["traces"]] == [(0, 8), (1, 8)]
    assert collect_and_save(run).rows.equals(collect_run(run).rows)
    (run.path / RECORDED_FOLDER / "rank1.json").write_text("{")
    assert collect_run(run).damaged == ("launch/recorded/rank1.json is damaged: the cost of its trace is unknown",)
