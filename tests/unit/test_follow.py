"""Following runs that train: the same as one read whatever the moments of looking, and nothing is read twice."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_support import add_launch, make_run
from stand_in import START, step_text, titan_line

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.launch.status import ASK_INTERVAL_S, follow
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.follow import (
    KEPT_LINES,
    KEPT_STEPS,
    LONGEST_LINE_CHARACTERS,
    LogTail,
    RankTable,
    RunNow,
    StudyFollower,
)
from moelab.runs.status import State, Status
from moelab.runs.table import merge_segments

RANKS = 4


def line(rank: int, seconds: float, text: str) -> str:
    return titan_line(seconds, text, f"[rank{rank}]:")


def step_line(rank: int, seconds: float, step: int, loss: float = 7.0) -> str:
    return line(rank, seconds, step_text(step, loss, tps=4000, memory_gib=10))


def launch(start_s: float, steps: Sequence[int], *, stages: int = 1) -> str:
    """What all ranks print in one launch; rank r needs r ms more than rank 0 for each step, the last ones have it."""
    text = "".join(line(rank, start_s, f"Training starts at step {steps[0]}") for rank in range(RANKS))
    for number, step in enumerate(steps, start=1):
        for rank in range(RANKS):
            has_loss = rank >= RANKS - RANKS // stages
            text += step_line(rank, start_s + number * (2 + rank / 1000), step, 8 - step / 100 if has_loss else -4.0)
    return text


REQUEUED = launch(0, range(1, 9)) + "slurmstepd: error: *** JOB 7 CANCELLED ***\n" + launch(100, range(6, 15))


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"name": "study", "gpus_per_node": RANKS, "ep": 2, "steps": 20, **changes})


def new_run(runs: Path, text: str = "", **changes: Any) -> RunDir:
    run = directory.create(runs, experiment(**changes))
    run.log.write_text(text)
    run.set_status(Status(state=State.RUNNING, attempts=1))
    return run


def append(run: RunDir, text: str, name: str = "logs/train.log") -> None:
    with (run.path / name).open("a") as log:
        log.write(text)


def train(run: RunDir, start_s: float, steps: Sequence[int]) -> None:
    """One launch of two seconds a step, as ranks keep it."""
    losses = {step: 8 - step / 100 for step in steps}
    times = {step: START.timestamp() + start_s + 2 * number for number, step in enumerate(steps, start=1)}
    add_launch(run, losses, tps=4000.0, memory_gib=10.0, time=times)


def polled(runs: Path) -> StudyFollower:
    follower = StudyFollower(runs)
    follower.poll()
    return follower


# Ranks

OF_ALL = 2 + np.arange(RANKS) / 1000
TWO_STEPS = step_line(0, 0, 1) + step_line(0, 2, 2)


def of_rank(rank: int, seconds: float, ranks: int = RANKS) -> Any:
    return [seconds if one == rank else math.nan for one in range(ranks)]


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [
        (launch(0, range(1, 6)), range(2, 6), OF_ALL),  # the first line of a launch has none
        (step_line(0, 0, 10) + step_line(0, 30, 20), [20], of_rank(0, 3.0)),  # of one step where each tenth is logged
        (REQUEUED, [*range(2, 6), *range(7, 15)], OF_ALL),  # a requeue is in none; its steps replace those before
        (launch(0, range(1, 9)) + launch(100, range(9, 15)), [*range(2, 9), *range(10, 15)], OF_ALL),
        # The rank is that of the nearest prefix; a line without one makes no rank.
        *[
            (TWO_STEPS.replace("[rank0]:", prefix), [2], of_rank(7, 2.0, 8))
            for prefix in ("[rank7]:", "gpu-03: [rank7]:", "[default7]:", "[rank3]:half a li[rank7]:", "3: [rank7]:")
        ],
        (TWO_STEPS.replace("[rank0]:", ""), [], of_rank(9, 0)),
    ],
)
def test_step_times_are_between_a_ranks_own_lines(tmp_path: Path, text: str, steps: Any, seconds: Any) -> None:
    new_run(tmp_path, text, gpus_per_node=len(seconds))
    one = polled(tmp_path).runs[0]
    np.testing.assert_array_equal(one.rank_table.steps, steps)
    np.testing.assert_allclose(one.rank_table.step_time_s, np.tile(seconds, (len(steps), 1)), atol=1e-6)
    np.testing.assert_array_equal(one.rank_table.memory_gib, np.where(np.isnan(seconds), np.nan, 10.0))


def test_256_ranks_over_many_steps_in_bounded_memory(tmp_path: Path) -> None:
    run = new_run(tmp_path, nodes=32, gpus_per_node=8, ep=32)
    follower = StudyFollower(tmp_path)
    for first in range(1, 2 * KEPT_STEPS, 8):
        append(run, "".join(step_line(r, 2 * s + r / 1000, s) for s in range(first, first + 8) for r in range(256)))
        follower.poll()
    table = follower.runs[0].rank_table
    assert table.step_time_s.shape == (KEPT_STEPS, 256)
    assert np.isfinite(table.step_time_s).all()
    assert table.steps.tolist() == list(range(KEPT_STEPS + 1, 2 * KEPT_STEPS + 1))


# Incremental reading


def lists(table: RankTable) -> list[Any]:
    return [table.steps.tolist(), table.step_time_s.round(6).tolist(), table.memory_gib.tolist()]


def restarted(run: RunDir) -> str:
    """Its metrics after a requeue at step 8, from step 6."""
    train(run, 0, range(1, 9))
    train(run, 100, range(6, 15))
    return (run.path / "metrics.jsonl").read_text()


@settings(max_examples=15)
@given(st.booleans(), st.lists(st.floats(0, 1), max_size=12))
def test_looking_at_any_moments_gives_what_one_look_gives(
    tmp_path_factory: pytest.TempPathFactory, of_metrics: bool, moments: list[float]
) -> None:
    runs = tmp_path_factory.mktemp("runs")
    run = new_run(runs)
    text, follower, at = restarted(run) if of_metrics else REQUEUED, StudyFollower(runs), 0
    file = run.path / "metrics.jsonl" if of_metrics else run.log
    file.write_text("")
    for cut in [*sorted(int(moment * len(text)) for moment in moments), len(text)]:
        with file.open("r+") as being_written:
            being_written.write(" " * at + text[at:cut])  # no byte is read twice: what was is gone
        follower.poll()
        lines = follower.runs[0].tail
        at = cut
    file.write_text(text)
    one, whole = follower.runs[0], polled(runs).runs[0]
    assert str((lists(one.rank_table), lines, one.now)) == str((lists(whole.rank_table), whole.tail, whole.now))
    assert len(one.rows) == 14 * of_metrics
    if of_metrics:
        pd.testing.assert_frame_equal(one.rows, merge_segments(collect_run(run).rows))


def test_a_log_that_was_truncated_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    tail = LogTail(log)
    for text, steps in ((launch(0, range(1, 9)), range(2, 9)), (launch(100, [8, 9, 10]), [*range(2, 8), 9, 10])):
        log.write_text(text)
        tail.poll()
        assert tail.table(RANKS).steps.tolist() == [*steps]


def test_the_last_lines_are_those_beside_the_steps_without_colours(tmp_path: Path) -> None:
    printed = [f"[rank1]:\x1b[31mline {number}\x1b[0m" for number in range(30)] + ["x" * 5000, "10%\r90%\r"]
    new_run(tmp_path, "\n".join(printed) + "\n" + step_line(0, 0, 1) + step_line(1, 0, 1))
    lines = [f"[rank1]:line {number}" for number in range(30)] + ["x" * LONGEST_LINE_CHARACTERS, "90%"]
    assert polled(tmp_path).runs[0].tail == lines[-KEPT_LINES:]


# Runs


def test_where_a_run_is(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    train(run, 0, range(1, 6))
    follower = polled(tmp_path)
    now = RunNow(
        name=run.name, arm="bf16_standard", seed=0, status=run.status, step=5, steps=20, loss=7.95, tps=4000.0,
        memory_gib=10.0, step_time_s=2.0, segments=1,
    )  # fmt: skip
    assert (follower.runs[0].now, now.left_s) == (now, 15 * 2.0)
    assert (now.done, replace(now, steps=0).done) == (0.25, 0.0)
    append(run, '{"segment": 0, "step": 6, "loss": NaN}\n', "metrics.jsonl")
    assert [one.now.status.reason for one in follower.poll()] == ["loss is nan at step 6 (segment 0)"]
    run.set_status(Status(state=State.FAILED))
    assert math.isnan(polled(tmp_path).runs[0].now.left_s)


def test_runs_that_appear_later_are_found_and_nothing_new_is_no_news(tmp_path: Path) -> None:
    now = 0.0
    follower = StudyFollower(tmp_path / "runs", clock=lambda: now)
    assert (follower.poll(), follower.all_final) == ([], False)
    run = new_run(tmp_path / "runs")
    train(run, 0, [1, 2])
    assert follower.poll() == []
    now = 10.0
    assert [(one.run, one.now.step) for one in follower.poll()] == [(run, 2)]
    assert (follower.poll(), follower.rows["loss"].tolist()) == ([], [7.99, 7.98])
    run.set_status(Status(state=State.COMPLETED))
    assert (follower.poll(), follower.all_final) == (follower.runs, True)


def test_the_newest_attempt_of_each_arm_and_seed_is_followed(tmp_path: Path) -> None:
    made = [make_run(tmp_path, experiment(seed=seed), [8.0]) for seed in (0, 0, 1)]
    made[2].set_status(Status(state=State.UNKNOWN))  # it may still be training
    newest = max(made[:2], key=lambda run: run.name)
    (newest.path / "experiment.yaml").write_text("name: study\nfield_of_tomorrow: 1\n")
    follower = polled(tmp_path)
    assert not follower.all_final
    nows = {one.run: one.now for one in follower.runs}
    known = [(run, now.arm, now.seed, now.steps, now.step) for run, now in nows.items()]
    assert known == [(newest, "bf16_standard", None, 0, 1), (made[2], "bf16_standard", 1, 20, 1)]


def test_a_finished_run_of_an_earlier_version_is_shown_with_what_its_log_has(tmp_path: Path) -> None:
    run = new_run(tmp_path, launch(0, range(1, 6)))
    assert polled(tmp_path).runs[0].now.step == 0
    run.set_status(Status(state=State.COMPLETED))
    one = polled(tmp_path).runs[0]
    assert (one.now.step, one.now.loss, one.rows["loss"].tolist()) == (5, 7.95, [7.99, 7.98, 7.97, 7.96, 7.95])


# The terminal


def record(step: int, loss: float, seconds: float) -> str:
    values = {"loss": loss, "tps": 4000.0, "memory_gib": 10.0, "time": START.timestamp() + seconds}
    return json.dumps({"segment": 0, "step": step, **values}) + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(path: Path, out: io.StringIO, *events: Callable[[], Any], **options: Any) -> tuple[str, float]:
    """What is shown until the runs have ended or all events, one a sleep, are over; and how many seconds that took."""
    now, left = 0.0, list(events)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    with suppress(KeyboardInterrupt):
        follow(path, out, sleep=sleep, clock=lambda: now, interval_s=1, **options)
    return out.getvalue(), now


def test_in_a_pipe_each_change_is_one_line_until_all_have_ended_and_none_begins(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    train(run, 0, [1, 2])
    begun: list[RunDir] = []
    events = [
        lambda: None,
        lambda: append(run, record(3, 7.0, 6), "metrics.jsonl"),
        lambda: run.set_status(Status(state=State.FAILED, reason="rank 1: ValueError: x")),
        lambda: begun.append(make_run(tmp_path, experiment(seed=1), [8.0, 7.0])),
        *[lambda: None] * 100,
    ]
    shown, seconds = watched(tmp_path, io.StringIO(), *events, quiet_s=30)
    numbers = "4,000 tokens/s per rank | 10.0 GiB"
    assert shown.splitlines() == [
        f"{run.name}: running | step 2/20 | loss 7.980 | {numbers} | about 36 s left",
        f"{run.name}: running | step 3/20 | loss 7.000 | {numbers} | about 34 s left",
        f"{run.name}: failed: rank 1: ValueError: x | step 3/20 | loss 7.000 | {numbers}",
        f"{begun[0].name}: completed | step 2/20 | loss 7.000 | 1,000 tokens/s per rank | 1.5 GiB",
    ]
    assert seconds == 10 + 30  # new runs are looked for every ten seconds
    again, seconds = watched(tmp_path, io.StringIO())
    assert (len(again.splitlines()), seconds) == (2, 0.0)  # what had ended before is shown once


def test_on_a_terminal_it_is_redrawn_with_last_lines_and_what_the_scheduler_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run, waits = new_run(tmp_path, REQUEUED), directory.create(tmp_path, experiment(seed=1))
    waits.set_status(Status(state=State.SUBMITTED, reason="Priority", updated=0.0))
    restarted(run)
    run.set_status(run.status)
    asked: list[int] = []

    def ask(runs: Sequence[RunDir]) -> list[Status]:
        asked.append(len(runs))
        return [Status(state=State.RUNNING, reason="as last seen; squeue: timed out") for _ in runs]

    events = [lambda: append(run, "[rank1]:saving\n"), *[lambda: None] * (2 * int(ASK_INTERVAL_S) - 2)]
    shown, _ = watched(tmp_path, Terminal(), *events, ask=ask)
    screens = [screen.splitlines()[1:] for screen in shown.split("\x1b[H\x1b[J")[1:]]
    starts = [line(rank, 100, "Training starts at step 6").rstrip() for rank in range(RANKS)]
    assert (asked, len(screens), screens[1][-1]) == ([2, 2], 2 * ASK_INTERVAL_S, "[rank1]:saving")
    assert screens[0] == [
        "",
        "as last seen; squeue: timed out",
        f"{run.name}: running",
        "  step 14/20 | loss 7.860 | 4,000 tokens/s per rank | 10.0 GiB | 2 launches | about 12 s left",
        f"{waits.name}: submitted: Priority",
        "  step 0/20",
        "",
        run.name,
        "2 s a step over the newest 12",
        line(RANKS - 1, 0, "Training starts at step 1").rstrip(),
        "slurmstepd: error: *** JOB 7 CANCELLED ***",
        *starts,
    ]


def test_ctrl_c_leaves_the_runs_alone_and_a_view_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path)
    train(run, 0, [1, 2])
    command = [sys.executable, "-m", "moelab", "status", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "step 2/20" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate()
    assert (watching.returncode, errors) == (0, "moelab: no longer watching; the runs go on\n")
    assert run.status.state is State.RUNNING
    assert main(["status", str(tmp_path), "--follow", "--json"]) == 2
    assert "--follow prints text" in capsys.readouterr().err
