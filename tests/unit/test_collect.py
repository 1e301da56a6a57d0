"""From what a run left to rows, whatever state it was left in."""

from __future__ import annotations

import json
import math
import os
import shutil
import textwrap
from pathlib import Path

import pandas as pd
import pytest
from run_support import collect_and_save, make_run
from stand_in import step_line
from torch.utils.tensorboard import SummaryWriter

from moelab.experiment import Experiment
from moelab.runs.collect import collect, collect_run, newest
from moelab.runs.directory import RunDir
from moelab.runs.side_files import converted_modules
from moelab.runs.status import State
from moelab.runs.table import COLUMNS, joined_rows

EXPERIMENT = Experiment(name="s", steps=5, precision="mxfp8", seed=2)
LOSSES = [8.0, 7.5, 7.0, 6.5, 6.25]


def saved(run: RunDir) -> dict[str, object]:
    collect_and_save(run)
    return dict(json.loads((run.path / "results.json").read_text()))


def test_a_run_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES, held_out=6.5)
    one = collect_and_save(run)
    assert (one.run, one.arm, one.seed, one.segments, one.last_step) == (run.name, "mxfp8_standard", 2, 1, 5)
    assert (one.finished, one.status.state, one.validation_loss) == (True, State.COMPLETED, 6.5)
    assert one.converted == {"kernels": "emulated", "modules": ["layers.1.moe.experts"]}
    table = pd.read_parquet(run.path / "metrics.parquet")
    assert tuple(table.columns) == COLUMNS
    assert table[["run", "arm", "seed"]].drop_duplicates().values.tolist() == [[run.name, "mxfp8_standard", 2]]
    assert table["loss"].tolist() == LOSSES
    results = json.loads((run.path / "results.json").read_text())
    assert (results["last_loss_nats"], results["tps_median"], results["memory_gib_peak"]) == (6.25, 1000.0, 1.5)


def test_the_log_and_the_events_are_united(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    times = collect_run(run).rows["time"].tolist()
    writer = SummaryWriter(str(run.tensorboard / "20260914-0310"))
    for step, loss in enumerate(LOSSES[:3], start=1):
        values = {"loss_metrics/global_avg_loss": loss + 1e-6, "lr/AdamW": 0.001 * step, "throughput(tps)": 1000.25}
        for tag, value in values.items():
            writer.add_scalar(tag, value, step, walltime=times[step - 1])
    writer.close()
    rows = collect_run(run).rows
    assert rows["step"].tolist() == [1, 2, 3, 4, 5]
    assert rows["loss"].tolist() == pytest.approx([8.000001, 7.500001, 7.000001, 6.5, 6.25], abs=2e-7)
    assert rows["tps"].tolist() == [1000.25, 1000.25, 1000.25, 1000.0, 1000.0]
    assert rows["lr"].tolist()[:3] == pytest.approx([0.001, 0.002, 0.003])
    assert rows["lr"].isna().tolist() == [False] * 3 + [True] * 2


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_a_failure_whatever_the_status_says(
    tmp_path: Path, loss: float, word: str
) -> None:
    run = make_run(tmp_path, EXPERIMENT, [*LOSSES[:4], loss])
    one = collect_run(run)
    assert (one.status.state, one.status.reason) == (State.FAILED, f"loss is {word} at step 5 (segment 0)")
    assert not one.finished
    results = saved(run)
    assert (results["status"], results["last_loss_nats"], results["steps"]) == ("failed", None, 5)
    assert json.loads(json.dumps(one.to_json(), allow_nan=False))["rows"][4]["loss"] is None


def test_the_launchers_own_reason_is_kept_and_only_a_whole_run_is_finished(tmp_path: Path) -> None:
    reason = "rank 3: RuntimeError: Loss is not finite"
    run = make_run(tmp_path, EXPERIMENT, [8.0, math.nan], state=State.FAILED, reason=reason)
    assert collect_run(run).status.reason == reason
    assert not collect_run(make_run(tmp_path, EXPERIMENT, LOSSES[:4])).finished
    assert not collect_run(make_run(tmp_path, EXPERIMENT, LOSSES, state=State.CANCELLED)).finished


def test_a_run_that_has_just_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, [], state=State.RUNNING)
    run.log.unlink()
    one = collect_run(run)
    assert (one.last_step, one.segments, len(one.rows), one.status.state) == (0, 0, 0, State.RUNNING)
    assert math.isnan(one.validation_loss)
    results = saved(run)
    assert (results["steps"], results["last_loss_nats"], results["tps_median"]) == (0, None, None)
    assert list(pd.read_parquet(run.path / "metrics.parquet").columns) == list(COLUMNS)


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
    runs = [
        make_run(tmp_path, EXPERIMENT.model_copy(update={"seed": seed, "name": name}), LOSSES)
        for name in ("a", "b")
        for seed in (0, 1)
    ]
    names = [run.name for run in runs]
    assert [one.run for one in collect(tmp_path)] == names
    assert [one.run for one in collect(tmp_path / "b")] == names[2:]
    assert [one.run for one in collect(runs[0].path)] == names[:1]
    monkeypatch.chdir(runs[0].path)
    assert [one.run for one in collect(Path())] == names[:1]
    assert len(joined_rows(collect(tmp_path))) == 20
    assert joined_rows([]).empty


def test_of_several_attempts_the_finished_one_counts_else_the_latest(tmp_path: Path) -> None:
    def attempt(stamp: str, losses: list[float], state: State) -> str:
        run = make_run(tmp_path, EXPERIMENT, losses, state=state)
        run.path.rename(run.path.with_name(stamp))
        return stamp

    first = attempt("20260101T000000Z-aaaaaa", LOSSES, State.COMPLETED)
    attempt("20260102T000000Z-aaaaaa", LOSSES[:2], State.FAILED)
    (one,) = newest(collect(tmp_path))
    assert one.run.endswith(first)
    last = attempt("20260103T000000Z-aaaaaa", LOSSES, State.COMPLETED)
    assert newest(collect(tmp_path))[0].run.endswith(last)
    for stamp in (first, last):
        shutil.rmtree(tmp_path / "s" / "mxfp8_standard" / "seed2" / stamp)
    attempt("20260104T000000Z-aaaaaa", [], State.CANCELLED)
    (one,) = newest(collect(tmp_path))
    assert one.status.state is State.CANCELLED
    diverged = attempt("20260101T000000Z-aaaaaa", [*LOSSES[:2], math.nan], State.FAILED)
    (one,) = newest(collect(tmp_path))
    assert one.run.endswith(diverged)  # what was cancelled later does not undo it


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
        writer.add_scalar("loss_metrics/global_avg_loss", 7.0, 1)
    for path in (folder, *folder.iterdir()):
        assert [one.rows["loss"].tolist() for one in collect(path)] == [[7.0]]
    assert collect(folder)[0].run == "events"


def test_a_folder_with_a_log_whose_lines_someone_wrapped(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    lines = "".join(step_line(step, loss) for step, loss in enumerate(LOSSES[:4], 1)).splitlines()
    log.write_text("\n".join(part for line in lines for part in textwrap.wrap(line, 60)))
    (tmp_path / "dmesg.log").write_text("[ 12.5] nothing to see\n")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.log")
    assert collect(tmp_path)[0].rows["loss"].tolist() == collect(log)[0].rows["loss"].tolist() == LOSSES[:4]


def test_the_runs_of_a_wandb_chart_keep_their_own_results(tmp_path: Path) -> None:
    columns = {
        "Step": [89, 90],
        "one - loss_metrics/global_avg_loss": ["8.0", "7.5"],
        "one - validation_metrics/loss": ["", "3.0"],
        "two - loss_metrics/global_avg_loss": ["8.0", "NaN"],
        "two - validation_metrics/loss": ["9.0", ""],
    }
    pd.DataFrame(columns).to_csv(tmp_path / "chart.csv.gz", index=False)
    one, two = collect(tmp_path / "chart.csv.gz")
    (tmp_path / "people.csv").write_text("name,phone\nx,1\n")
    (tmp_path / "wandb-summary.json").write_text('{"_step": 90, "loss_metrics/global_avg_loss": 3.0}')
    of_folder = collect(tmp_path)
    assert [run.run for run in of_folder] == ["one", "two"]
    assert all("people.csv" in run.notes[-1] for run in of_folder)
    assert (one.run, one.validation_loss, one.status.state, one.diverged) == ("one", 3.0, State.UNKNOWN, None)
    assert (two.run, two.validation_loss, two.status.state) == ("two", 9.0, State.FAILED)
    assert two.diverged == "loss is nan at step 90 (segment 0)"


def test_what_a_run_saved_is_read_for_as_long_as_its_log_and_events_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, EXPERIMENT, [*LOSSES[:4], math.nan], held_out=6.5)
    with run.log.open("a") as log:
        log.write(step_line(6, 6.0).replace("grad_norm:  0.2210", "grad_norm:     nan"))
    writer = SummaryWriter(str(run.tensorboard / "20260914-0310"))
    writer.add_scalar("loss_metrics/global_avg_loss", 8.0, 1)
    writer.close()
    fresh = collect_and_save(run)
    monkeypatch.setattr("moelab.runs.collect._read_log_and_events", unread)
    saved = collect_run(run)
    for table in ("rows", "validation"):
        pd.testing.assert_frame_equal(getattr(saved, table), getattr(fresh, table))
    assert saved.to_json() == fresh.to_json()
    assert saved.diverged == fresh.diverged == "loss is nan at step 5 (segment 0)"
    assert str(saved.grad_norm_not_finite) == str(fresh.grad_norm_not_finite) == "{6: nan}"


def unread(*_: object) -> None:
    raise AssertionError("the log was read")


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


EVENTS = "tb/a/events.out.tfevents.2.b"


@pytest.mark.parametrize("file", ["logs/train.log", "metrics.parquet", "results.json", EVENTS, ""])
def test_saved_results_are_not_used_once_a_file_or_the_reader_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    (run.tensorboard / "a").mkdir()
    (run.tensorboard / "a" / "events.out.tfevents.1.a").touch()
    collect_and_save(run)
    if not file:
        monkeypatch.setattr("moelab.runs.collect.READER_VERSION", -1)
    elif file == EVENTS:
        (run.path / file).touch()
    else:
        change(run.path / file)
    monkeypatch.setattr("moelab.runs.collect._read_log_and_events", unread)
    with pytest.raises(AssertionError, match="the log was read"):
        collect_run(run)


def test_a_damaged_log_is_told_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, EXPERIMENT, LOSSES)
    run.log.unlink()
    damaged = collect_and_save(run).damaged
    assert "logs/train.log is missing" in damaged
    assert collect_run(run).damaged == damaged
