"""The live view: its figures against the table, and the widget's logic without a browser."""

from __future__ import annotations

import errno
import gc
import json
import math
import tempfile
import threading
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from figure_support import title
from run_support import make_run

from moelab.analysis.published import THROUGHPUT
from moelab.experiment import Experiment
from moelab.launch.slurm import SlurmError
from moelab.plan import plan
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.follow import RankSteps, RankTable, StudyFollower
from moelab.runs.log import FIELDS
from moelab.runs.status import State, Status
from moelab.runs.stragglers import slow_steps
from moelab.runs.table import metrics_table
from moelab.viz.live import (
    MOST_POINTS,
    SIMULATED_NOTE,
    LiveView,
    dashboard,
    rank_memory,
    rank_step_times,
    run_curves,
    run_states,
    simulated_run,
)

STUDY: dict[str, Any] = {"name": "study", "gpus_per_node": 2, "ep": 2, "steps": 20}


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{**STUDY, **changes})


def words(figure: Any) -> list[str]:
    return [str(annotation.text) for annotation in figure.layout.annotations]


def table(arms: tuple[str, ...] = ("bf16_deepep",), steps: int = 4) -> Any:
    step, constant = np.arange(1, steps + 1), {"seed": [0] * steps, "segment": [0] * steps}
    columns = {**constant, "step": step, "loss": 8 - 0.1 * step, "tps": 800.0 + step, "time": step.astype(float)}
    return pd.concat(
        [metrics_table({**columns, "arm": [arm] * steps}, run=f"study/{arm}/seed0/x") for arm in arms],
        ignore_index=True,
    )


def ranks(step_time_s: np.ndarray) -> RankTable:
    """What ranks print that need these times: steps by ranks."""
    steps = RankSteps()
    ends = np.vstack([np.zeros(step_time_s.shape[1]), step_time_s.cumsum(axis=0)])
    for (step, rank), end in np.ndenumerate(ends):
        values = dict.fromkeys(FIELDS, 1.0) | {"time": 100 + end, "memory_gib": 10.0 + rank}
        steps.add(("step", step + 1, tuple(values[name] for name in FIELDS), rank))
    return steps.table(step_time_s.shape[1])


# Figures


def test_lines_are_the_tables() -> None:
    rows = table(("bf16_deepep", "mxfp8_deepep"))
    for figure, column in ((run_curves(rows, "loss"), "loss"), (run_curves(rows, "tps", model="nano"), "tps")):
        assert [trace.name for trace in figure.data] == ["BF16 + DeepEP, seed 0", "MXFP8 + DeepEP, seed 0"]
        for trace, (_, run) in zip(figure.data, rows.groupby("run"), strict=True):
            assert (list(trace.x), list(trace.y)) == (run["step"].tolist(), run[column].tolist())
    assert "7.600 nats per token, step 4" in title(run_curves(rows, "loss"))


def test_published_levels_stand_beside_the_671b_alone_and_say_that_they_are_quoted(tmp_path: Path) -> None:
    figure = run_curves(table(), "tps", model="671B")
    assert [shape.y0 for shape in figure.layout.shapes] == [row.tps for row in THROUGHPUT]
    assert words(figure)[1] == "quoted 859: BF16 + DeepEP"
    assert "Nebius ml-cookbook" in title(figure)
    models: list[tuple[dict[str, Any], int]] = [({"model": "16B"}, 0), ({"model": "671B"}, 3)]
    models.append(({"model": "671B", "shape": {"n_layers": 40}}, 0))  # an own shape is another model
    for number, (model, count) in enumerate(models):
        runs = tmp_path / str(number)
        directory.create(runs, experiment(**model))
        follower = StudyFollower(runs)
        follower.poll()
        assert len(dashboard(follower)["tps"].layout.shapes) == count


def test_a_long_run_is_thinned_and_keeps_its_last_step() -> None:
    (line,) = run_curves(table(steps=100_000), "loss").data
    assert MOST_POINTS / 2 < len(line.x) <= MOST_POINTS + 1
    assert line.x[-1] == 100_000
    assert set(np.diff(line.x[:-1])) == {200.0}


def test_the_map_of_step_times_is_ranks_by_steps_and_names_the_slow_step() -> None:
    seconds = np.full((10, 8), 2.0) + np.linspace(0, 0.01, 8)
    seconds[6] *= 3
    figure = rank_step_times(ranks(seconds), name="BF16 + DeepEP, seed 0")
    (cells,) = figure.data
    assert np.allclose(np.array(cells.z, dtype=float), seconds.T)
    assert list(cells.x) == [str(step) for step in range(2, 12)]
    assert "step 8 took 200 % longer" in title(figure)
    assert cells.zmax == pytest.approx(2 * np.median(seconds))  # else one slow step would whiten all others


def test_memory_by_rank() -> None:
    figure = rank_memory(ranks(np.ones((2, 5))), name="x")
    assert list(figure.data[0].y) == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert "Fullest is rank 4 with 14.0 GiB, emptiest rank 0 with 10.0 GiB" in title(figure)


def test_states_are_written_and_their_reasons_escaped(tmp_path: Path) -> None:
    make_run(tmp_path, experiment(), [8.0] * 5, state=State.RUNNING)
    make_run(tmp_path, experiment(precision="fp8"), [8.0], state=State.FAILED, reason="rank 1: <class 'x'> & more")
    follower = StudyFollower(tmp_path)
    follower.poll()
    figure = run_states([one.now for one in follower.runs])
    assert "1 running, 1 failed" in title(figure)
    assert [bar.x[0] for bar in figure.data] == [0.25, 0.05]
    assert words(figure)[0].startswith("<b>running</b> · step 5 of 20")
    assert "rank 1: &lt;class 'x'&gt; &amp; more" in words(figure)[1]


def test_the_simulated_run_has_256_ranks_two_stages_slow_steps_and_a_restart() -> None:
    """Its memory by stage is the memory model's: the log is of an earlier one where they differ by more than 2 %."""
    follower = StudyFollower(simulated_run(seconds=0).path)
    follower.poll()
    (run,) = follower.runs
    assert (run.now.step, run.now.steps, run.now.segments, run.now.status.state) == (40, 40, 2, State.COMPLETED)
    table = run.rank_table
    assert np.isfinite(table.step_time_s).all(axis=1).sum() >= 37
    assert {11, 21, 24, 25, 26, 27} <= set(slow_steps(table.steps, table.step_time_s))
    memory = plan(run.run.experiment).memory
    assert memory is not None
    own = [sum(gib for part, gib in one.parts.items() if part != "CUDA and NCCL") for one in memory.by_stage]
    assert [table.memory_gib[0], table.memory_gib[128]] == pytest.approx(own, rel=0.02)
    figures = dashboard(follower, note=SIMULATED_NOTE)
    assert all("simulated, not measured" in title(figure) for figure in figures.values())


def test_nothing_yet_is_said_by_every_figure(tmp_path: Path) -> None:
    follower = StudyFollower(tmp_path)
    follower.poll()
    findings = [title(figure) for figure in dashboard(follower).values()]
    assert all("No" in finding for finding in findings)


# The widget


def shown_in_a_browser(view: LiveView) -> None:
    """The message that the panel's last widget sends from the browser."""
    view.panel.children[-1]._handle_custom_msg({}, [])


@pytest.fixture
def view(tmp_path: Path) -> Any:
    made: list[LiveView] = []

    def make(**options: Any) -> LiveView:
        made.append(LiveView(tmp_path, interval_s=600, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
    made.clear()


def running(runs: Path, losses: tuple[float, ...] = (8.0, 7.9), **changes: Any) -> RunDir:
    return make_run(runs, experiment(**changes), losses, state=State.RUNNING)


def log_another_step(run: RunDir) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        run.log.write_text(running(Path(elsewhere), (8.0, 7.9, 7.5)).log.read_text())


def test_the_view_is_there_at_once_and_follows_in_place(tmp_path: Path, view: Any) -> None:
    run = running(tmp_path / "runs")
    shown = view()
    shown_in_a_browser(shown)
    (place,) = shown.place.children
    assert list(shown.figures["loss"].data[0].y) == [8.0, 7.9]
    log_another_step(run)
    running(tmp_path / "runs", precision="fp8")
    shown.follower._found_at = -np.inf
    shown.update()
    assert shown.place.children == (place,)
    assert [list(trace.y) for trace in shown.figures["loss"].data] == [[8.0, 7.9, 7.5], [8.0, 7.9]]
    assert place.figures["loss"] == json.loads(shown.figures["loss"].to_json())
    assert len(shown.figures["states"].layout.annotations) == len(shown.shown.options) == 2


def test_without_a_browser_there_are_words_and_no_figures(tmp_path: Path) -> None:
    run = running(tmp_path)
    run.log.write_text(run.log.read_text() + "[rank1]:a last line <script>\n")
    shown = LiveView(tmp_path, interval_s=600)
    shown.stop()
    assert (shown.figures, shown.place.children) == ({}, ())
    assert "a last line &lt;script&gt;" in shown.tail.value
    assert shown.cancel not in shown.panel.children[0].children  # no way to cancel was given
    shown_in_a_browser(shown)
    shown_in_a_browser(shown)  # a second browser, or a second look of the first
    (place,) = shown.place.children
    assert list(place.figures) == ["states", "step_times", "loss", "tps", "rank_memory"]


def test_a_run_chosen_during_a_look_is_drawn_when_the_look_ends(tmp_path: Path, view: Any) -> None:
    one, other = running(tmp_path), running(tmp_path, precision="fp8")
    asked, chosen = threading.Event(), threading.Event()

    def ask(_runs: object) -> list[Status]:
        asked.set()
        assert chosen.wait(60)
        return [Status(state=State.RUNNING)] * 2

    shown = view(ask=lambda runs: [run.status for run in runs])
    shown_in_a_browser(shown)
    shown.shown.value = one.name
    assert "FP8" not in title(shown.figures["rank_memory"])
    shown._ask, shown._asked_at = ask, -math.inf
    look = threading.Thread(target=shown.update)
    look.start()
    assert asked.wait(60)
    shown.shown.value = other.name
    chosen.set()
    look.join(60)
    assert "FP8" in title(shown.figures["rank_memory"])


def test_cancel_asks_first_and_then_cancels_that_run(tmp_path: Path, view: Any) -> None:
    running(tmp_path)
    other = running(tmp_path, precision="fp8")
    cancelled: list[RunDir] = []

    def cancel(run: RunDir) -> None:
        cancelled.append(run)
        run.set_status(Status(state=State.CANCELLED))

    shown = view(cancel=cancel)
    shown.shown.value = other.name
    shown.confirm.click()
    assert cancelled == []  # nothing was asked
    shown.cancel.click()
    assert (cancelled, shown.asking.layout.display) == ([], "flex")
    assert other.name in shown.question.value
    shown.keep.click()
    shown.confirm.click()
    assert (cancelled, shown.asking.layout.display) == ([], "none")
    shown.cancel.click()
    shown.shown.value = shown.shown.options[0]  # the question was about the other
    shown.confirm.click()
    assert cancelled == [other]
    shown.shown.value = other.name
    assert shown.cancel.disabled


def test_a_cancel_that_fails_is_said(tmp_path: Path, view: Any) -> None:
    running(tmp_path)
    shown = view(cancel=Mock(side_effect=SlurmError("scancel: <timed out>")))
    shown.cancel.click()
    shown.confirm.click()
    assert "not cancelled: scancel: &lt;timed out&gt;" in shown.message.value


def test_a_scheduler_that_does_not_answer_is_said(tmp_path: Path, view: Any) -> None:
    running(tmp_path)
    shown = view(ask=lambda runs: [Status(state=State.RUNNING, reason="as last seen; timed out") for _ in runs])
    assert "as last seen; timed out" in shown.message.value


def test_the_thread_outlives_a_look_that_fails(tmp_path: Path) -> None:
    running(tmp_path)
    answer = [Status(state=State.RUNNING)]
    ask = Mock(side_effect=chain([answer, OSError(errno.ESTALE, "Stale file handle")], repeat(answer)))
    shown = LiveView(tmp_path, interval_s=0.1, ask=ask)
    deadline = time.monotonic() + 60
    while ask.call_count < 3 and time.monotonic() < deadline:
        shown._asked_at = -math.inf
        time.sleep(0.05)
    assert ask.call_count >= 3
    assert shown._thread.is_alive()
    shown.stop()


def test_the_thread_ends_with_the_variable_that_held_the_view(tmp_path: Path) -> None:
    running(tmp_path)
    shown = LiveView(tmp_path, interval_s=0.5)
    thread = shown._thread
    shown.cancel.click()
    del shown
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
