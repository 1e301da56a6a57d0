"""Following runs that train: the same as one read whatever the moments of looking, and nothing is read twice."""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_support import make_run
from stand_in import step_text, titan_line

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.launch.status import ASK_INTERVAL_S, follow, run_line
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.follow import KEPT_LINES, KEPT_STEPS, LONGEST_LINE_CHARACTERS, StudyFollower
from moelab.runs.log import read_log
from moelab.runs.status import State, Status
from moelab.runs.table import merge_segments

RANKS = 4


def line(rank: int, seconds: float, text: str) -> str:
    return titan_line(seconds, text, f"[rank{rank}]:")


def step_line(rank: int, seconds: float, step: int, loss: float = 7.0) -> str:
    return line(rank, seconds, step_text(step, loss, tps=4000, memory_gib=10))


def launch(start_s: float, steps: Sequence[int]) -> str:
    """What all ranks print in one launch; rank r needs r ms more than rank 0 for each step."""
    text = "".join(line(rank, start_s, f"Training starts at step {steps[0]}") for rank in range(RANKS))
    for number, step in enumerate(steps, start=1):
        ends = (start_s + number * (2 + rank / 1000) for rank in range(RANKS))
        text += "".join(step_line(rank, end, step, loss=8 - step / 100) for rank, end in enumerate(ends))
    return text


REQUEUED = launch(0, range(1, 9)) + "slurmstepd: error: *** JOB 7 CANCELLED ***\n" + launch(100, range(6, 15))


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"name": "study", "gpus_per_node": RANKS, "ep": 2, "steps": 20, **changes})


def new_run(runs: Path, text: str = "", **changes: Any) -> RunDir:
    run = directory.create(runs, experiment(**changes))
    run.log.write_text(text)
    run.set_status(Status(state=State.RUNNING, attempts=1))
    return run


def polled(runs: Path) -> StudyFollower:
    follower = StudyFollower(runs)
    follower.poll()
    return follower


# Ranks


def test_step_times_are_between_a_ranks_own_lines(tmp_path: Path) -> None:
    new_run(tmp_path, launch(0, range(1, 6)))
    table = polled(tmp_path).runs[0].rank_table
    assert table.steps.tolist() == [2, 3, 4, 5]  # the first line of a launch has none
    expected = np.tile(2 + np.arange(RANKS) / 1000, (4, 1))
    assert np.allclose(table.step_time_s, expected, atol=1e-6)
    assert table.memory_gib.tolist() == [10.0] * RANKS


def test_a_step_time_is_of_one_step_where_every_tenth_is_logged(tmp_path: Path) -> None:
    new_run(tmp_path, step_line(0, 0, 10) + step_line(0, 30, 20))
    table = polled(tmp_path).runs[0].rank_table
    assert (table.steps.tolist(), table.step_time_s[:, 0].tolist()) == ([20], [3.0])
    assert np.isnan(table.step_time_s[:, 1:]).all()


def test_a_requeue_is_in_no_step_time_and_its_steps_replace_those_before(tmp_path: Path) -> None:
    new_run(tmp_path, REQUEUED)
    one = polled(tmp_path).runs[0]
    assert one.rank_table.steps.tolist() == [2, 3, 4, 5, *range(7, 15)]  # 6 is the first line of its launch
    assert one.rank_table.step_time_s.max() < 2.1
    assert (one.now.segments, one.now.step) == (2, 14)
    assert one.rows["step"].tolist() == list(range(1, 15))
    assert one.rows.set_index("step")["segment"][6] == 1


def test_a_requeue_that_repeats_no_step_is_in_no_step_time_either(tmp_path: Path) -> None:
    new_run(tmp_path, launch(0, range(1, 9)) + launch(100, range(9, 15)))
    table = polled(tmp_path).runs[0].rank_table
    assert table.steps.tolist() == [*range(2, 9), *range(10, 15)]
    assert table.step_time_s.max() < 2.1


def test_256_ranks_over_many_steps_in_bounded_memory(tmp_path: Path) -> None:
    run = new_run(tmp_path, nodes=32, gpus_per_node=8, ep=32)
    follower = StudyFollower(tmp_path)
    for first in range(1, 2 * KEPT_STEPS, 8):
        with run.log.open("a") as log:
            log.write("".join(step_line(r, 2 * s + r / 1000, s) for s in range(first, first + 8) for r in range(256)))
        follower.poll()
    table = follower.runs[0].rank_table
    assert table.step_time_s.shape == (KEPT_STEPS, 256)
    assert np.isfinite(table.step_time_s).all()
    assert table.steps.tolist() == list(range(KEPT_STEPS + 1, 2 * KEPT_STEPS + 1))


@pytest.mark.parametrize(
    "prefix", ["[rank7]:", "gpu-03: [rank7]:", "[default7]:", "[rank3]:half a li[rank7]:", "3: [rank7]:"]
)
def test_the_rank_is_that_of_the_nearest_prefix(prefix: str, tmp_path: Path) -> None:
    text = step_line(0, 0, 1) + step_line(0, 2, 2)
    new_run(tmp_path, text.replace("[rank0]:", prefix), gpus_per_node=8)
    assert np.flatnonzero(np.isfinite(polled(tmp_path).runs[0].rank_table.memory_gib)).tolist() == [7]


def test_lines_without_a_rank_make_rows_but_no_rank(tmp_path: Path) -> None:
    new_run(tmp_path, (step_line(0, 0, 1) + step_line(0, 2, 2)).replace("[rank0]:", ""))
    one = polled(tmp_path).runs[0]
    assert one.now.step == 2
    assert np.isnan(one.rank_table.memory_gib).all()


# Incremental reading


def seen(follower: StudyFollower) -> str:
    """All that a follower knows."""
    one, table = follower.runs[0], follower.runs[0].rank_table
    arrays = (table.steps, table.step_time_s.round(6), table.memory_gib)
    return str((one.rows.to_json(), [array.tolist() for array in arrays], one.tail, one.now.step, one.now.segments))


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, len(REQUEUED)), max_size=12))
def test_looking_at_any_moments_gives_what_one_look_gives(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = tmp_path_factory.mktemp("runs")
    run = new_run(runs)
    follower = StudyFollower(runs)
    read = 0
    for cut in [*sorted(cuts), len(REQUEUED)]:
        with run.log.open("r+") as log:
            log.write(" " * read + REQUEUED[read:cut])  # no byte is read twice: what was is gone
        follower.poll()
        read = cut
    run.log.write_text(REQUEUED)
    whole = polled(runs)
    assert seen(follower) == seen(whole)
    names = ["segment", "step", "loss", "tps", "memory_gib", "time"]
    pd.testing.assert_frame_equal(follower.runs[0].rows[names], merge_segments(read_log(run.log).rows)[names])


def test_nothing_new_is_no_news(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, [1]))
    follower = polled(tmp_path)
    assert follower.poll() == []
    run.set_status(Status(state=State.COMPLETED))
    assert follower.poll() == follower.runs
    assert follower.all_final


# Last lines


def test_the_last_lines_are_those_beside_the_steps_without_colours(tmp_path: Path) -> None:
    said = [f"[rank1]:\x1b[31mline {number}\x1b[0m\x07" for number in range(30)] + ["x" * 5000, "10%\r90%\r"]
    new_run(tmp_path, "\n".join(said) + "\n" + step_line(0, 0, 1) + step_line(1, 0, 1))
    tail = polled(tmp_path).runs[0].tail
    assert len(tail) == KEPT_LINES
    assert tail[:2] == ["[rank1]:line 20", "[rank1]:line 21"]
    assert tail[-2:] == ["x" * LONGEST_LINE_CHARACTERS, "90%"]


# Runs


def test_a_loss_that_is_nan_is_said_while_the_run_goes_on(tmp_path: Path) -> None:
    new_run(tmp_path, step_line(0, 0, 1) + step_line(0, 2, 2, loss=math.nan))
    now = polled(tmp_path).runs[0].now
    assert (now.status.state, now.status.reason) == (State.RUNNING, "loss is nan at step 2 (segment 0)")


def test_the_newest_attempt_of_each_arm_and_seed_is_followed(tmp_path: Path) -> None:
    made = [make_run(tmp_path, experiment(seed=seed), [8.0]) for seed in (0, 0, 1)]
    by_name = sorted(made[:2], key=lambda run: run.name)
    assert [one.run for one in polled(tmp_path).runs] == [by_name[-1], made[2]]


def test_runs_that_appear_later_are_found(tmp_path: Path) -> None:
    now = 0.0
    follower = StudyFollower(tmp_path / "runs", clock=lambda: now)
    assert follower.poll() == []
    assert not follower.all_final
    make_run(tmp_path / "runs", experiment(), [8.0, 7.5])
    assert follower.poll() == []
    now = 10.0
    assert [one.now.step for one in follower.poll()] == [2]
    assert follower.rows["loss"].tolist() == [8.0, 7.5]


def test_an_experiment_of_another_version_is_shown_by_its_folders(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, [1, 2]))
    (run.path / "experiment.yaml").write_text("name: study\nfield_of_tomorrow: 1\n")
    now = polled(tmp_path).runs[0].now
    assert (now.arm, now.seed, now.steps, now.step) == ("bf16_standard", None, 0, 2)


def test_time_left_is_at_the_pace_of_the_last_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, range(1, 6)))
    now = polled(tmp_path).runs[0].now
    assert now.left_s == pytest.approx(15 * 2.0)
    run.set_status(Status(state=State.FAILED))
    assert math.isnan(polled(tmp_path).runs[0].now.left_s)


# The terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes while somebody sleeps, and what happens meanwhile."""

    def __init__(self, *events: Any) -> None:
        self.now, self._events = 0.0, list(events)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._events:
            self._events.pop(0)()


def interrupt() -> None:
    raise KeyboardInterrupt


def watched(path: Path, out: io.StringIO, *events: Any, **options: Any) -> str:
    """What is shown until the last of the events, an interruption."""
    clock = Clock(*events)
    with pytest.raises(KeyboardInterrupt):
        follow(path, out, sleep=clock.sleep, clock=clock, **options)
    return out.getvalue()


def append(run: RunDir, text: str) -> Any:
    def act() -> None:
        with run.log.open("a") as log:
            log.write(text)

    return act


def test_in_a_pipe_each_change_is_one_line(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, [1, 2]))
    shown = watched(tmp_path, io.StringIO(), lambda: None, append(run, step_line(0, 6, 3)), lambda: None, interrupt)
    first, second = shown.splitlines()
    assert first.startswith(f"{run.name}: running | step 2/20 | loss 7.980 | 4,000 tokens/s per rank | 10.0 GiB")
    assert "step 3/20 | loss 7.000" in second
    assert "\x1b" not in shown


def test_on_a_terminal_it_is_redrawn_with_step_time_and_last_lines(tmp_path: Path) -> None:
    run = new_run(tmp_path, REQUEUED)
    shown = watched(tmp_path, Terminal(), append(run, "[rank1]:saving a checkpoint\n"), interrupt)
    screens = shown.split("\x1b[H\x1b[J")[1:]
    assert len(screens) == 2
    assert "2 launches" in screens[0]
    assert "2 s a step over the newest 12" in screens[0]
    assert "  step 14/20 | loss 7.860 | 4,000 tokens/s per rank | 10.0 GiB" in screens[0]
    assert screens[1].splitlines()[-1] == "[rank1]:saving a checkpoint"


def test_it_ends_when_all_have_ended_and_none_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path, experiment(), [8.0], state=State.RUNNING)

    def fail() -> None:
        run.set_status(Status(state=State.FAILED, reason="rank 1: ValueError: x"))

    def begin() -> None:
        make_run(tmp_path, experiment(seed=1), [8.0, 7.0])

    clock, out = Clock(fail, begin), io.StringIO()
    follower = follow(tmp_path, out, quiet_s=30, sleep=clock.sleep, clock=clock)
    assert [one.now.status.state for one in follower.runs] == [State.FAILED, State.COMPLETED]
    assert "failed: rank 1: ValueError: x" in out.getvalue()
    assert clock.now >= 30


def test_what_had_ended_before_is_shown_once(tmp_path: Path) -> None:
    make_run(tmp_path, experiment(), [8.0])
    clock, out = Clock(), io.StringIO()
    follow(tmp_path, out, sleep=clock.sleep, clock=clock)
    assert (len(out.getvalue().splitlines()), clock.now) == (1, 0.0)


def test_ctrl_c_leaves_the_runs_alone(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, [1, 2]))
    command = [sys.executable, "-m", "moelab", "status", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "step 2/20" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate()
    assert (watching.returncode, said) == (0, "moelab: no longer watching; the runs go on\n")
    assert run.status.state is State.RUNNING


def test_a_view_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path), "--follow", "--json"]) == 2
    assert "--follow prints text" in capsys.readouterr().err


def test_the_scheduler_is_asked_now_and_then_and_its_silence_is_said(tmp_path: Path) -> None:
    new_run(tmp_path, launch(0, [1]))
    asked: list[int] = []

    def ask(runs: Sequence[RunDir]) -> list[Status]:
        asked.append(len(runs))
        return [Status(state=State.RUNNING, reason="as last seen; squeue: timed out") for _ in runs]

    sleeps = [lambda: None] * (2 * int(ASK_INTERVAL_S) - 1)
    shown = watched(tmp_path, Terminal(), *sleeps, interrupt, ask=ask, interval_s=1)
    assert asked == [1, 1]
    assert "as last seen; squeue: timed out" in shown


def test_a_run_that_waits_has_no_numbers(tmp_path: Path) -> None:
    run = directory.create(tmp_path, experiment())
    run.set_status(Status(state=State.SUBMITTED, job_id="7_0", reason="Priority"))
    assert run_line(polled(tmp_path).runs[0].now) == f"{run.name}: submitted: Priority | step 0/20"
