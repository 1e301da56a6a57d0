"""A gradient norm that was reported as NaN or Inf: a finding of the run, and in every source unlike a missing one."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from figure_support import shown_page, title
from run_support import collect_and_save, make_run
from stand_in import step_line
from torch.utils.tensorboard import SummaryWriter

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.runs.collect import Collected, collect, collect_run
from moelab.runs.directory import RunDir
from moelab.runs.follow import StudyFollower
from moelab.runs.log import read_log
from moelab.runs.status import State
from moelab.study_report import judge_paths, report_figures

NAN, INF = math.nan, math.inf
LATER_S = 1000.0
"""Seconds after the first launch at which another one logs."""
Norms = dict[int, float | None]
"""Gradient norm by step; None where the source does not have it."""


def log(path: Path, *launches: Norms) -> Path:
    lines = []
    for number, norms in enumerate(launches):
        for step, norm in norms.items():
            line = step_line(step, 8.0 - 0.1 * step, seconds=number * LATER_S + step)
            reported = "" if norm is None else f"grad_norm: {norm:7.4f}"
            lines.append(line.replace("grad_norm:  0.2210", reported))
    path.write_text("".join(lines))
    return path


def tensorboard(path: Path, *launches: Norms, start_s: float = 0.0) -> Path:
    for number, norms in enumerate(launches):
        writer = SummaryWriter(str(path / f"2026091{number}-0310"), filename_suffix=str(number))
        for step, norm in norms.items():
            time = start_s + number * LATER_S + step
            writer.add_scalar("loss_metrics/global_avg_loss", 8.0 - 0.1 * step, step, walltime=time)
            if norm is not None:
                writer.add_scalar("grad_norm", norm, step, walltime=time)
        writer.close()
        (file,) = (path / f"2026091{number}-0310").iterdir()
        file.rename(file.with_name(f"events.out.tfevents.{100 + number}.host"))
    return path


def wandb(path: Path, *launches: Norms) -> Path:
    file, words = path.with_suffix(".jsonl"), {"nan": "NaN", "inf": "Infinity"}
    rows = [
        {"_step": step, "loss_metrics/global_avg_loss": 8.0 - 0.1 * step, "grad_norm": words.get(str(norm), norm)}
        for norms in launches
        for step, norm in norms.items()
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


Source = Callable[..., Path]


@pytest.mark.parametrize("source", [log, tensorboard, wandb])
@pytest.mark.parametrize(
    ("launches", "steps", "finding"),
    [
        ([{1: 2.4, 2: NAN, 3: NAN}], [2, 3], "gradient norm is NaN from step 2 on"),
        ([{1: 2.4, 2: INF, 3: NAN}], [2, 3], "gradient norm is NaN or Inf from step 2 on"),
        ([{1: INF, 2: 2.4, 3: 2.4}], [1], "gradient norm is Inf at 1 of 3 logged steps, first at step 1"),
        ([{1: NAN, 2: 2.4, 3: NAN}], [1, 3], "gradient norm is NaN at 2 of 3 logged steps, first at step 1"),
        ([{1: 2.4, 2: None, 3: 2.4}], [], None),
        ([{1: None, 2: None}], [], None),
        ([{1: 2.4, 2: NAN, 3: NAN}, {2: 2.5, 3: 2.5}], [], None),  # a restart got over it
        ([{1: 2.4, 2: 2.4, 3: 2.4}, {2: NAN, 3: NAN, 4: NAN}], [2, 3, 4], "gradient norm is NaN from step 2 on"),
    ],
)
def test_every_source_tells_what_was_reported(
    tmp_path: Path, source: Source, launches: list[Norms], steps: list[int], finding: str | None
) -> None:
    (one,) = collect(source(tmp_path / "run", *launches))
    assert (list(one.grad_norm_not_finite), one.grad_norm_finding) == (steps, finding)
    last = {step: norm for norms in launches for step, norm in norms.items()}
    merged = one.rows.drop_duplicates("step", keep="last").set_index("step")["grad_norm"]
    expected = [NAN if last[step] is None else last[step] for step in merged.index]
    np.testing.assert_array_equal(merged, np.array(expected, dtype="float32" if source is tensorboard else "float64"))
    told = json.loads(json.dumps(one.to_json(), allow_nan=False))
    assert told["grad_norm_not_finite_from"] == (steps[0] if steps else None)
    assert told["grad_norm_not_finite_steps"] == len(steps)
    assert (one.status.state, one.diverged) == (State.UNKNOWN, None)
    assert (finding or "gradient") in one.summary or finding is None
    assert ("gradient norm" in one.summary) == (finding is not None)


EXPERIMENT = Experiment(name="s", steps=4, precision="mxfp8", seed=1)


def run_with(
    runs: Path, *launches: Norms, experiment: Experiment = EXPERIMENT, events: tuple[Norms, ...] = ()
) -> RunDir:
    run = make_run(runs, experiment, [])
    log(run.log, *launches)
    if events:
        first = read_log(run.log).rows["time"].iloc[0] - 1
        tensorboard(run.tensorboard, *events, start_s=first)
    return run


HEALTHY: Norms = dict.fromkeys(range(1, 5), 2.4)
SICK: Norms = {**HEALTHY, 3: NAN, 4: NAN}


@pytest.mark.parametrize(
    ("launches", "events", "steps"),
    [
        ((SICK,), (), [3, 4]),
        ((SICK,), (SICK,), [3, 4]),
        ((SICK,), ({1: 2.4, 2: 2.4, 3: NAN},), [3, 4]),  # the events lack what was not flushed
        (({1: None, 2: None, 3: None, 4: None},), (SICK,), [3, 4]),
        ((SICK, {3: 2.4, 4: 2.4}), (SICK,), []),  # nor the launch that got over it
        ((HEALTHY, {3: NAN, 4: NAN}), (HEALTHY,), [3, 4]),
        ((HEALTHY,), (HEALTHY,), []),
    ],
)
def test_log_and_events_of_a_run_directory(
    tmp_path: Path, launches: tuple[Norms, ...], events: tuple[Norms, ...], steps: list[int]
) -> None:
    run = run_with(tmp_path, *launches, events=events)
    one = collect_and_save(run)
    assert list(one.grad_norm_not_finite) == steps
    assert one.finished
    results = json.loads((run.path / "results.json").read_text())
    assert results["grad_norm_not_finite_from"] == (3 if steps else None)
    assert list(collect_run(run).grad_norm_not_finite) == steps


def test_a_run_that_is_watched_says_so(tmp_path: Path) -> None:
    run_with(tmp_path, SICK)
    follower = StudyFollower(tmp_path)
    follower.poll()
    assert follower.runs[0].now.status.reason == "gradient norm is NaN from step 3 on"


def test_a_study_names_the_run_in_its_notes_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        for precision in ("bf16", "mxfp8"):
            norms = SICK if (precision, seed) == ("mxfp8", 1) else HEALTHY
            run_with(tmp_path, norms, experiment=Experiment(name="s", steps=4, precision=precision, seed=seed))
    note = "MXFP8 + standard all-to-all, seed 1: gradient norm is NaN from step 3 on"
    judged = judge_paths([tmp_path / "s"])
    assert judged.notes[0] == note
    curves, *others = report_figures(judged)
    assert note in title(curves.figure)
    (marks,) = (trace for trace in curves.figure.data if trace.name == "gradient norm not finite")
    assert list(zip(marks.x, marks.y, strict=True)) == [(step, pytest.approx(8.0 - 0.1 * step)) for step in (3, 4)]
    assert not any(trace.name == "gradient norm not finite" for one in others for trace in one.figure.data)
    assert main(["report", str(tmp_path / "s"), "--json", "--output", str(tmp_path / "r.html")]) == 0
    assert note in json.loads(capsys.readouterr().out)["note"]
    assert note in html.unescape(shown_page((tmp_path / "r.html").read_text()))


def test_a_comparison_names_the_run_in_its_notes_and_figure(tmp_path: Path) -> None:
    path, healthy = log(tmp_path / "sick.log", SICK), log(tmp_path / "healthy.log", HEALTHY)
    note = "sick: gradient norm is NaN from step 3 on"
    for paths in ([path], [healthy, path]):
        compared = judge_paths(paths)
        assert f"Note: {note}" in compared.as_text()
        loss = report_figures(compared)[0].figure
        assert note in loss.layout.title.text
        assert [trace.x for trace in loss.data if trace.name == "gradient norm not finite"] == [(3, 4)]
    assert not any("gradient" in note for note in judge_paths([healthy]).notes)


def test_marks_are_of_finite_losses(tmp_path: Path) -> None:
    run = run_with(tmp_path, SICK)
    run.log.write_text(run.log.read_text().replace("loss:  7.60000", "loss:      nan"))
    one: Collected = collect_run(run)
    assert [step for step, _ in one.grad_norm_marks] == [3]
    assert one.diverged == "loss is nan at step 4 (segment 0)"
