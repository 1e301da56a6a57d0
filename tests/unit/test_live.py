"""The live view: its figures against the table, and the widget's logic without a browser."""

from __future__ import annotations

import errno
import gc
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from figure_support import assert_says, notes, title
from run_support import make_run

from moelab.experiment import Experiment
from moelab.launch.slurm import SlurmError
from moelab.planning.plan import plan
from moelab.runs.directory import RunDir
from moelab.runs.follow import RankTable, StudyFollower
from moelab.runs.status import State, Status
from moelab.runs.stragglers import slow_steps
from moelab.runs.table import metrics_table
from moelab.viz import live
from moelab.viz.live import LiveView, dashboard


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"name": "study", "gpus_per_node": 2, "ep": 2, "steps": 20, **changes})


def running(runs: Path, losses: tuple[float, ...] = (8.0, 7.9), **changes: Any) -> RunDir:
    return make_run(runs, experiment(**changes), losses, state=State.RUNNING)


def followed(path: Path) -> StudyFollower:
    follower = StudyFollower(path)
    follower.poll()
    return follower


def table(arms: tuple[str, ...] = ("bf16_deepep",), steps: int = 4) -> pd.DataFrame:
    step, constant = np.arange(1, steps + 1), {"seed": [0] * steps, "segment": [0] * steps}
    columns = {**constant, "step": step, "loss": 8 - 0.1 * step, "tps": 800.0 + step, "time": step.astype(float)}
    of_arms = [metrics_table({**columns, "arm": [arm] * steps}, run=f"study/{arm}/seed0/x") for arm in arms]
    return pd.concat(of_arms, ignore_index=True)


def ranks(step_time_s: np.ndarray) -> RankTable:
    """Steps from the second on, by ranks."""
    steps, ranks = step_time_s.shape
    return RankTable(steps=np.arange(2, steps + 2), step_time_s=step_time_s, memory_gib=10.0 + np.arange(ranks))


# Figures


def test_lines_are_the_tables_and_a_long_run_is_thinned_up_to_its_last_step() -> None:
    rows = table(("bf16_deepep", "mxfp8_deepep"))
    for column in ("loss", "tps"):
        drawn = {one.name: (list(one.x), list(one.y)) for one in live.run_curves(rows, column).data}
        runs = [(run["step"].tolist(), run[column].tolist()) for _, run in rows.groupby("run")]
        assert drawn == dict(zip(("BF16 + DeepEP, seed 0", "MXFP8 + DeepEP, seed 0"), runs, strict=True))
    (line,) = live.run_curves(table(steps=100_000), "loss").data
    assert (len(line.x), line.x[-1], set(np.diff(line.x[:-1]))) == (live.MOST_POINTS + 1, 100_000, {200.0})


def test_ranks_are_drawn_with_their_step_times_and_memory() -> None:
    seconds = np.full((10, 8), 2.0) + np.linspace(0, 0.01, 8)
    seconds[6] *= 3
    figure = live.rank_step_times(ranks(seconds), name="BF16 + DeepEP, seed 0")
    (cells,) = figure.data
    assert np.allclose(np.array(cells.z, dtype=float), seconds.T)
    assert list(cells.x) == [str(step) for step in range(2, 12)]
    assert_says(figure, f"A step takes {np.median(seconds):.3g} s; step 8 took 200 % longer")
    assert cells.zmax == pytest.approx(2 * np.median(seconds))  # else one slow step would whiten all others
    figure = live.rank_memory(ranks(np.ones((2, 5))), name="x")
    assert list(figure.data[0].y) == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert_says(figure, "10.0 to 14.0 GiB a rank")


def test_states_are_written_and_their_reasons_escaped(tmp_path: Path) -> None:
    running(tmp_path, (8.0,) * 5)
    make_run(tmp_path, experiment(precision="fp8"), [8.0], state=State.FAILED, reason="rank 1: <class 'x'> & more")
    figure = dashboard(followed(tmp_path))["states"]
    assert_says(figure, "1 running, 1 failed")
    assert [bar.x[0] for bar in figure.data] == [0.25, 0.05]
    first, second = notes(figure)
    assert first.startswith("<b>running</b> · step 5 of 20 · about ")
    assert second == "<b>failed</b> · step 1 of 20 · rank 1: &lt;class 'x'&gt; &amp; more"


def test_the_simulated_run_has_256_ranks_two_stages_slow_steps_and_a_restart() -> None:
    """Its memory by stage is the memory model's: the log is of an earlier one where they differ by more than 2 %."""
    follower = followed(live.simulated_run(seconds=0).path)
    (run,) = follower.runs
    assert (run.now.step, run.now.steps, run.now.segments, run.now.status.state) == (40, 40, 2, State.COMPLETED)
    of_ranks = run.rank_table
    assert np.isfinite(of_ranks.step_time_s).all(axis=1).sum() >= 37
    assert {11, 21, 24, 25, 26, 27} <= set(slow_steps(of_ranks.steps, of_ranks.step_time_s))
    memory = plan(run.run.experiment).memory
    assert memory is not None
    own = [sum(gib for part, gib in one.parts.items() if part != "CUDA and NCCL") for one in memory.by_stage]
    assert [of_ranks.memory_gib[0], of_ranks.memory_gib[128]] == pytest.approx(own, rel=0.02)
    for figure in dashboard(follower, note=live.SIMULATED_NOTE).values():
        assert_says(figure, "simulated, not measured")


def test_nothing_yet_is_said_by_every_figure(tmp_path: Path) -> None:
    for figure in dashboard(followed(tmp_path)).values():
        assert re.search("(?i)no", title(figure))


# The widget


def shown_in_a_browser(view: LiveView) -> None:
    """The message that the panel's last widget sends from the browser."""
    view.panel.children[-1]._handle_custom_msg({}, [])


@pytest.fixture
def view(tmp_path: Path) -> Iterator[Callable[..., LiveView]]:
    with ExitStack() as stack:

        def make(**options: Any) -> LiveView:
            made = LiveView(tmp_path, **{"interval_s": 600, **options})
            stack.callback(made.stop)
            return made

        yield make


def test_the_view_is_there_at_once_and_follows_in_place(tmp_path: Path, view: Any) -> None:
    run = running(tmp_path / "runs")
    shown = view()
    shown_in_a_browser(shown)
    (place,) = shown.place.children
    assert list(shown.figures["loss"].data[0].y) == [8.0, 7.9]
    other = running(tmp_path / "other", (8.0, 7.9, 7.5), precision="fp8")
    (run.path / "metrics.jsonl").write_text((other.path / "metrics.jsonl").read_text())
    shown.follower._found_at = -np.inf
    shown.update()
    assert shown.place.children == (place,)
    assert [list(trace.y) for trace in shown.figures["loss"].data] == [[8.0, 7.9, 7.5]] * 2
    assert place.figures["loss"] == json.loads(shown.figures["loss"].to_json())
    assert len(shown.figures["states"].layout.annotations) == len(shown.shown.options) == 2


def test_without_a_browser_there_are_words_and_no_figures(tmp_path: Path, view: Any) -> None:
    run = running(tmp_path)
    run.log.write_text(run.log.read_text() + "[rank1]:a last line <script>\n")
    shown = view(ask=lambda runs: [Status(state=State.RUNNING, reason="as last seen; timed out") for _ in runs])
    assert (shown.figures, shown.place.children) == ({}, ())
    assert "a last line &lt;script&gt;" in shown.tail.value
    assert "as last seen; timed out" in shown.message.value  # a scheduler that does not answer
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
    assert_says(shown.figures["rank_memory"], "FP8")


def test_cancel_asks_first_and_then_cancels_that_run(tmp_path: Path, view: Any) -> None:
    running(tmp_path)
    other = running(tmp_path, precision="fp8")
    cancel = Mock(side_effect=lambda run: run.set_status(Status(state=State.CANCELLED)))
    shown = view(cancel=cancel)
    shown.shown.value = other.name
    shown.confirm.click()  # nothing was asked
    shown.cancel.click()
    assert shown.asking.layout.display == "flex"
    assert other.name in shown.question.value
    shown.keep.click()
    shown.confirm.click()
    assert (cancel.mock_calls, shown.asking.layout.display) == ([], "none")
    shown.cancel.click()
    shown.shown.value = shown.shown.options[0]  # the question was about the other
    shown.confirm.click()
    assert [call.args for call in cancel.mock_calls] == [(other,)]
    shown.shown.value = other.name
    assert shown.cancel.disabled
    cancel.side_effect = SlurmError("scancel: <timed out>")
    shown.shown.value = shown.shown.options[0]
    shown.cancel.click()
    shown.confirm.click()
    assert "not cancelled: scancel: &lt;timed out&gt;" in shown.message.value


def test_the_thread_outlives_a_look_that_fails(tmp_path: Path, view: Any) -> None:
    running(tmp_path)
    answer = [Status(state=State.RUNNING)]
    ask = Mock(side_effect=chain([answer, OSError(errno.ESTALE, "Stale file handle")], repeat(answer)))
    shown = view(ask=ask, interval_s=0.1)
    deadline = time.monotonic() + 60
    while ask.call_count < 3 and time.monotonic() < deadline:
        shown._asked_at = -math.inf
        time.sleep(0.05)
    assert ask.call_count >= 3
    assert shown._thread.is_alive()


def test_the_thread_ends_with_the_variable_that_held_the_view(tmp_path: Path) -> None:
    running(tmp_path)
    shown = LiveView(tmp_path, interval_s=0.5)
    thread = shown._thread
    shown.cancel.click()
    del shown
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
