"""From what a run left to rows, whatever state it was left in."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from run_support import add_launch, collect_and_save, make_run
from stand_in import step_line
from torch.utils.tensorboard import SummaryWriter

from moelab.errors import BadInput
from moelab.experiment import Experiment
from moelab.runs.collect import collect, collect_run, newest
from moelab.runs.directory import RunDir
from moelab.runs.side_files import converted_modules
from moelab.runs.status import State
from moelab.runs.table import COLUMNS, joined_rows

EXPERIMENT = Experiment(name="s", steps=5, precision="mxfp8", seed=2)
LOSSES = [8.0, 7.5, 7.0, 6.5, 6.25]
LOSS_NAME = "loss_metrics/global_avg_loss"


def results_of(run: RunDir) -> dict[str, Any]:
    return dict(json.loads((run.path / "results.json").read_text()))


def test_a_run_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES, held_out=6.5)
    one = collect_and_save(run)
    assert (one.run, one.arm, one.seed, one.segments, one.last_step) == (run.name, "mxfp8_standard", 2, 1, 5)
    assert (one.finished, one.status.state, one.validation_loss) == (True, State.COMPLETED, 6.5)
    assert one.converted == {"kernels": "emulated", "modules": ["layers.1.moe.experts"]}
    table = one.rows
    assert tuple(table.columns) == COLUMNS
    assert table[["run", "arm", "seed"]].drop_duplicates().values.tolist() == [[run.name, "mxfp8_standard", 2]]
    assert table["loss"].tolist() == LOSSES
    results = results_of(run)
    assert (results["last_loss_nats"], results["tps_median"], results["memory_gib_peak"]) == (6.25, 1000.0, 1.5)


def test_steps_that_a_trace_slowed_have_no_speed(tmp_path: Path) -> None:
    """The traced step, the one before, which warms the profiler up, and the one after, when the trace is written."""
    for traced, without in ((5, [4, 5, 6]), (0, [])):
        run = make_run(tmp_path / str(traced), Experiment(steps=8, trace_step=traced), [8.0] * 8)
        rows = collect_run(run).rows
        assert rows.loc[rows["tps"].isna(), "step"].tolist() == without
        assert rows["loss"].notna().all()


def test_a_launch_that_goes_on_is_a_segment_and_what_a_kill_tore_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES[:4], state=State.RUNNING)
    with (run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"segment": 0, "step": 5, "lo')
    for steps in ({5: 6.25}, {4: 6.5, 5: 6.25}):  # from a checkpoint of the last step, then of the one before
        add_launch(run, steps)
    one = collect_run(run)
    places = one.rows[["segment", "step"]].values.tolist()
    assert places == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 5], [2, 4], [2, 5]]
    assert (one.segments, one.notes) == (3, ("metrics.jsonl: 1 line is torn, and not read",))


def test_a_file_that_says_no_segment_has_a_launch_where_its_steps_go_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, [])
    lines = [f'{{"step": {step}, "loss": 7.0, "tps": null}}' for step in (1, 2, 2, 3)]
    (run.path / "metrics.jsonl").write_text("\n".join([*lines[:2], '{"step": 2, "validation_loss": 6}', *lines[2:]]))
    one = collect_run(run)
    assert one.rows[["segment", "step"]].values.tolist() == [[0, 1], [0, 2], [1, 2], [1, 3]]
    assert (one.validation_loss, one.notes, one.rows["tps"].isna().all()) == (6.0, (), True)


@pytest.mark.parametrize(
    "record",
    ["[1]", "7", '{"loss": 7.0}', '{"step": "1"}', '{"step": 1e3}', '{"step": -1}', '{"step": 1, "tps": "x"}',
     '{"step": 9999999999999999}', "[" * 100_000, "\0\0\0", '{"step": true}'],
)  # fmt: skip
def test_a_line_that_is_no_record_hides_no_other(tmp_path: Path, record: str) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    file = run.path / "metrics.jsonl"
    file.write_text(f"{record}\n{file.read_text()}")
    one = collect_run(run)
    assert (one.rows["loss"].tolist(), one.notes[0][:22]) == (LOSSES, "metrics.jsonl: 1 line ")


def test_a_run_of_an_earlier_version_is_read_from_its_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    (run.path / "metrics.jsonl").unlink()
    run.log.write_text("".join(step_line(step, loss) for step, loss in enumerate(LOSSES, 1)))
    one = collect_run(run)
    assert (one.finished, one.rows["loss"].tolist()) == (True, LOSSES)
    assert one.notes == ("metrics.jsonl is missing: read from logs/train.log, which rounds",)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_failure_whatever_the_status_says(tmp_path: Path, loss: float) -> None:
    run = make_run(tmp_path, EXPERIMENT, [*LOSSES[:4], loss])
    one = collect_and_save(run)
    assert (one.status.state, one.status.reason) == (State.FAILED, f"loss is {loss} at step 5 (segment 0)")
    assert not one.finished
    results = results_of(run)
    assert (results["status"], results["last_loss_nats"], results["steps"]) == ("failed", None, 5)
    assert json.loads(json.dumps(one.to_json(), allow_nan=False))["rows"][4]["loss"] is None


@pytest.mark.parametrize("end", [2, 5])
def test_a_loss_that_was_finite_again_is_no_failure_though_the_last_events_that_were_flushed_are_not(
    tmp_path: Path, end: int
) -> None:
    losses = [8.0, math.nan, 7.0, 6.5, 6.25]
    run = make_run(tmp_path, EXPERIMENT, losses[:end])
    with SummaryWriter(str(run.tensorboard / "20260914-0310")) as writer:
        for step, loss in enumerate(losses[:2], start=1):
            writer.add_scalar(LOSS_NAME, loss, step)
    for one in (collect_and_save(run), collect_run(run)):
        assert (one.finished, one.diverged is None, one.status.state is State.COMPLETED) == (end == 5,) * 3
        words = "the loss was nan at step 2 (segment 0) and finite afterwards"
        assert one.notes == ((words,) if end == 5 else ())


def test_the_launchers_own_reason_is_kept_and_only_a_whole_run_is_finished(tmp_path: Path) -> None:
    reason = "rank 3: RuntimeError: Loss is not finite"
    run = make_run(tmp_path, EXPERIMENT, [8.0, math.nan], state=State.FAILED, reason=reason)
    assert collect_run(run).status.reason == reason
    assert not collect_run(make_run(tmp_path, EXPERIMENT, LOSSES[:4])).finished
    assert not collect_run(make_run(tmp_path, EXPERIMENT, LOSSES, state=State.CANCELLED)).finished


def test_a_run_that_has_just_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, [], state=State.RUNNING)
    run.log.unlink()
    one = collect_and_save(run)
    assert (one.last_step, one.segments, len(one.rows), one.status.state) == (0, 0, 0, State.RUNNING)
    assert (math.isnan(one.validation_loss), one.damaged) == (True, ())
    results = results_of(run)
    assert (results["steps"], results["last_loss_nats"], results["tps_median"]) == (0, None, None)
    assert tuple(one.rows.columns) == COLUMNS
    ended = make_run(tmp_path, EXPERIMENT, [], state=State.FAILED)
    assert not any("metrics" in words for words in collect_run(ended).damaged)  # it failed before its first step
    ended.log.unlink()
    assert "metrics.jsonl is missing, and logs/train.log is missing" in collect_run(ended).damaged
    (ended.path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl cannot be read (Is a directory)" in collect_run(ended).damaged


def test_what_multiplies_in_mxfp8_over_pipeline_stages(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    folder = run.path / "launch" / "converted"
    (folder / "rank4.json").write_text('{"kernels": "emulated", "modules": ["layers.9"]}')
    (folder / "rank8.json").write_text('{"kernels": "emulated", "mod')  # killed while it wrote
    assert converted_modules(run) == {"kernels": "emulated", "modules": ["layers.1.moe.experts", "layers.9"]}
    (folder / "rank0.json").write_text('{"kernels": "emulated", "modules": []}')
    (folder / "rank4.json").unlink()
    assert converted_modules(run) is None
    assert converted_modules(make_run(tmp_path, Experiment(name="s", steps=5), LOSSES)) is None


def test_everything_below_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies = [EXPERIMENT.model_copy(update={"seed": seed, "name": name}) for name in ("a", "b") for seed in (0, 1)]
    runs = [make_run(tmp_path, one, LOSSES) for one in studies]
    names = [run.name for run in runs]
    monkeypatch.chdir(runs[0].path)
    for path, below in ((tmp_path, names), (tmp_path / "b", names[2:]), (runs[0].path, names[:1]), (Path(), names[:1])):
        assert [one.run for one in collect(path)] == below
    assert len(joined_rows(collect(tmp_path))) == 20
    assert joined_rows([]).empty
    (runs[0].path / "experiment.yaml").write_text("")  # and hides none of the others
    assert [one.run for one in collect(tmp_path)] == names[1:]
    with pytest.raises(BadInput, match=r"experiment\.yaml"):
        collect(runs[0].path)


def test_of_several_attempts_the_finished_one_counts_else_the_latest(tmp_path: Path) -> None:
    def attempt(day: int, losses: list[float], state: State) -> Path:
        run = make_run(tmp_path, EXPERIMENT, losses, state=state)
        return run.path.rename(run.path.with_name(f"2026010{day}T000000Z-aaaaaa"))

    def judged() -> tuple[str, State]:
        (one,) = newest(collect(tmp_path))
        return one.run.rsplit("/", 1)[-1], one.status.state

    first = attempt(1, LOSSES, State.COMPLETED)
    attempt(2, LOSSES[:2], State.FAILED)
    assert judged() == (first.name, State.COMPLETED)
    last = attempt(3, LOSSES, State.COMPLETED)
    assert judged() == (last.name, State.COMPLETED)
    for finished in (first, last):
        shutil.rmtree(finished)
    cancelled = attempt(4, [], State.CANCELLED)
    assert judged() == (cancelled.name, State.CANCELLED)
    diverged = attempt(1, [*LOSSES[:2], math.nan], State.FAILED)
    assert judged() == (diverged.name, State.FAILED)  # what was cancelled later does not undo it


@pytest.mark.parametrize(
    ("reason", "stopped_for_its_loss"),
    [
        ("Loss is not finite (global_avg_loss=nan) at step 21.", True),
        ("RuntimeError: loss is NaN", True),
        ("loss became NaN at step 21", True),
        ("ValueError: loss=-inf", True),
        ("NaN loss at step 21", True),
        ("FloatingPointError: non-finite training loss", True),
        ("stopped: the loss was not finite", True),
        ("training has diverged", True),
        ("node gpu-12 failed", False),
        ("loss of the InfiniBand link of rank 3", False),
        ("Loss or gradient norm is not finite on at least one rank at step 4", True),
        ("the loss parallel group is not initialised", False),
        ("no space left on device", False),
    ],
)
def test_a_run_that_was_stopped_for_its_loss_diverged(tmp_path: Path, reason: str, stopped_for_its_loss: bool) -> None:
    for state in (State.FAILED, State.CANCELLED):
        run = make_run(tmp_path, EXPERIMENT, LOSSES[:2], state=state, reason=reason)
        assert (collect_run(run).diverged is not None) is stopped_for_its_loss


# From elsewhere


def test_a_tensorboard_folder_or_one_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar(LOSS_NAME, 7.0, 1)
    for path in (folder, *folder.iterdir()):
        assert [one.rows["loss"].tolist() for one in collect(path)] == [[7.0]]
    assert collect(folder)[0].run == "events"


def test_a_folder_with_a_log_whose_lines_someone_wrapped(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    lines = [step_line(step, loss) for step, loss in enumerate(LOSSES[:4], 1)]
    log.write_text("\n".join(part for line in lines for part in textwrap.wrap(line, 60)))
    (tmp_path / "dmesg.log").write_text("[ 12.5] nothing to see\n")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.log")
    for elsewhere in (".cache", "checkpoint", "tb", "a/b/c/d"):  # logs of something else, or too far down
        (tmp_path / elsewhere).mkdir(parents=True)
        (tmp_path / elsewhere / "other.log").write_text(step_line(1, 5.0))
    assert collect(tmp_path)[0].rows["loss"].tolist() == collect(log)[0].rows["loss"].tolist() == LOSSES[:4]


def test_the_runs_of_a_wandb_chart_keep_their_own_results(tmp_path: Path) -> None:
    columns = {
        "Step": [89, 90],
        f"one - {LOSS_NAME}": ["8.0", "7.5"],
        "one - validation_metrics/loss": ["", "3.0"],
        f"two - {LOSS_NAME}": ["8.0", "NaN"],
        "two - validation_metrics/loss": ["9.0", ""],
    }
    pd.DataFrame(columns).to_csv(tmp_path / "chart.csv.gz", index=False)
    (tmp_path / "wandb-summary.json").write_text(f'{{"_step": 90, "{LOSS_NAME}": 3.0}}')
    nan = "loss is nan at step 90 (segment 0)"
    of_file, of_folder = collect(tmp_path / "chart.csv.gz"), collect(tmp_path)
    for runs in (of_file, of_folder):
        assert [(one.run, one.validation_loss, one.status.state, one.diverged) for one in runs] == [
            ("one", 3.0, State.UNKNOWN, None),
            ("two", 9.0, State.FAILED, nan),
        ]
