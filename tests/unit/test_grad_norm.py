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
from run_support import add_launch, collect_and_save, train
from stand_in import step_line
from torch.utils.tensorboard import SummaryWriter

from moelab.cli import main
from moelab.judge.report import judge_paths
from moelab.runs.collect import collect, collect_run
from moelab.runs.directory import RunDir
from moelab.runs.follow import StudyFollower
from moelab.runs.status import State
from moelab.viz.report import report_figures

NAN, INF = math.nan, math.inf
LATER_S = 1000.0
"""Seconds after the first launch at which another one logs."""
Norms = dict[int, float | None]
"""Gradient norm by step; None where the source does not have it."""
NORMAL: Norms = dict.fromkeys(range(1, 5), 2.4)
SICK: Norms = {**NORMAL, 3: NAN, 4: NAN}


def loss_of(step: int) -> float:
    return 8.0 - 0.1 * step


def log(path: Path, *launches: Norms) -> Path:
    lines = []
    for number, norms in enumerate(launches):
        for step, norm in norms.items():
            reported = "" if norm is None else f"grad_norm: {norm:7.4f}"
            line = step_line(step, loss_of(step), seconds=number * LATER_S + step)
            lines.append(line.replace("grad_norm:  0.2210", reported))
    path.write_text("".join(lines))
    return path


def tensorboard(path: Path, *launches: Norms, start_s: float = 0.0) -> Path:
    for number, norms in enumerate(launches):
        folder = path / f"2026091{number}-0310"
        with SummaryWriter(str(folder)) as writer:
            for step, norm in norms.items():
                values = {"loss_metrics/global_avg_loss": loss_of(step), "grad_norm": norm}
                for name, value in values.items():
                    if value is not None:
                        writer.add_scalar(name, value, step, walltime=start_s + number * LATER_S + step)
        (file,) = folder.iterdir()
        file.rename(file.with_name(f"events.out.tfevents.{100 + number}.host"))
    return path


def wandb(path: Path, *launches: Norms) -> Path:
    rows = [
        f"{step},{loss_of(step)},{'' if norm is None else norm}" for norms in launches for step, norm in norms.items()
    ]
    path.with_suffix(".csv").write_text("\n".join(["_step,loss_metrics/global_avg_loss,grad_norm", *rows]))
    return path.with_suffix(".csv")


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
    tmp_path: Path, source: Callable[..., Path], launches: list[Norms], steps: list[int], finding: str | None
) -> None:
    (one,) = collect(source(tmp_path / "run", *launches))
    assert (list(one.grad_norm_not_finite), one.grad_norm_finding) == (steps, finding)
    last = {step: norm for norms in launches for step, norm in norms.items()}
    merged = one.rows.drop_duplicates("step", keep="last").set_index("step")["grad_norm"]
    expected = [NAN if last[step] is None else last[step] for step in merged.index]
    np.testing.assert_array_equal(merged, np.array(expected, dtype="float32" if source is tensorboard else "float64"))
    as_json = json.loads(json.dumps(one.to_json(), allow_nan=False))
    numbers = (as_json["grad_norm_not_finite_from"], as_json["grad_norm_not_finite_steps"])
    assert numbers == (min(steps, default=None), len(steps))
    assert (one.status.state, one.diverged) == (State.UNKNOWN, None)
    assert one.summary.count("gradient norm") == len(steps[:1])
    assert (finding or "") in one.summary


def run_with(study: Path, *launches: Norms, precision: str = "mxfp8", seed: int = 1, **losses: float) -> RunDir:
    run = train(study, precision, seed, [], steps=4)
    for norms in launches:
        add_launch(run, {step: losses.get(f"step_{step}", loss_of(step)) for step in norms}, grad_norm=norms)
    return run


@pytest.mark.parametrize(
    ("launches", "steps"),
    [((SICK,), [3, 4]), ((SICK, {3: 2.4, 4: 2.4}), []), ((NORMAL, {3: NAN, 4: NAN}), [3, 4]), ((NORMAL,), [])],
)
def test_a_run_directory_tells_it(tmp_path: Path, launches: tuple[Norms, ...], steps: list[int]) -> None:
    run = run_with(tmp_path / "s", *launches)
    one = collect_and_save(run)
    assert (list(one.grad_norm_not_finite), one.finished) == (steps, True)
    results = json.loads((run.path / "results.json").read_text())
    assert results["grad_norm_not_finite_from"] == (3 if steps else None)


def test_a_run_that_is_watched_says_so(tmp_path: Path) -> None:
    run_with(tmp_path / "s", SICK)
    follower = StudyFollower(tmp_path)
    follower.poll()
    assert follower.runs[0].now.status.reason == "gradient norm is NaN from step 3 on"


def test_a_report_names_the_run_and_marks_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a study, of runs side by side, and of one alone."""
    for seed in range(3):
        for precision in ("bf16", "mxfp8"):
            norms = SICK if (precision, seed) == ("mxfp8", 1) else NORMAL
            run_with(tmp_path / "s", norms, precision=precision, seed=seed)
    sick, normal = log(tmp_path / "sick.log", SICK), log(tmp_path / "normal.log", NORMAL)
    words = "gradient norm is NaN from step 3 on"
    of_study = f"MXFP8 + standard all-to-all, seed 1: {words}"
    for paths, note in (([tmp_path / "s"], of_study), ([sick], f"sick: {words}"), ([normal, sick], f"sick: {words}")):
        report = judge_paths(paths)
        assert note in report.notes
        loss, *others = report_figures(report).values()
        assert note in title(loss)
        (marks,) = (trace for trace in loss.data if trace.name == "gradient norm not finite")
        assert list(zip(marks.x, marks.y, strict=True)) == [(step, pytest.approx(loss_of(step))) for step in (3, 4)]
        assert not any(trace.name == "gradient norm not finite" for one in others for trace in one.data)
    figure = report_figures(judge_paths([tmp_path / "s"]))["Gradient norm of every arm."]
    healthy, sickly = (dict(zip(line.x, line.y, strict=True)) for line in figure.data)
    assert healthy[1] == sickly[1] == pytest.approx(NORMAL[1])
    assert math.isfinite(sickly[3]), "the mean of the two seeds whose norm is finite there"
    assert not any("gradient" in note for note in judge_paths([normal]).notes)
    assert main(["report", str(tmp_path / "s"), "--json", "--output", str(tmp_path / "r.html")]) == 0
    assert of_study in json.loads(capsys.readouterr().out)["note"]
    assert of_study in html.unescape(shown_page((tmp_path / "r.html").read_text()))


def test_marks_are_of_finite_losses(tmp_path: Path) -> None:
    one = collect_run(run_with(tmp_path / "s", SICK, step_4=NAN))
    assert [step for step, _ in one.grad_norm_marks] == [3]
    assert one.diverged == "loss is nan at step 4 (segment 0)"
