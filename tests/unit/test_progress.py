"""The line about a study that trains, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from moelab.experiment_file import Study, make_study
from moelab.launch.local import Progress, format_seconds

STEPS = 10


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def study() -> Study:
    return make_study("s", {"steps": STEPS}, [{"precision": "bf16"}, {"precision": "mxfp8"}], [0, 1])


def follow(study: Study, done: Iterable[int] = (), interval_s: float = 0.0) -> tuple[Progress, Clock, list[str]]:
    said: list[str] = []
    clock = Clock()
    return Progress(study, done, said.append, interval_s=interval_s, clock=clock), clock, said


def row(step: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": 8.0 - step / 10, "tps": 1234.5}]


def train(progress: Progress, clock: Clock, index: int, *, start_s: float, step_s: float) -> None:
    progress.start(index)
    clock.now += start_s
    for step in range(1, STEPS + 1):
        clock.now += step_s
        progress.rows(row(step))
    progress.end("completed")


def test_a_line_says_study_arm_seed_step_loss_speed_and_time_left(study: Study) -> None:
    progress, clock, said = follow(study)
    progress.start(0)
    clock.now = 12.0
    progress.rows(row(1))
    clock.now = 16.0
    progress.rows(row(3))
    assert said[0] == "s | bf16_standard | seed 0 | step 0/10 | starting"
    assert said[1] == "s | bf16_standard | seed 0 | step 1/10 | loss 7.900 | 1,234 tokens/s per rank"
    # 7 steps of 2 s are left here, and three runs of 12 s start-up and 10 steps of 2 s: 14 + 3 × 32.
    assert said[2].endswith("| about 1 min 50 s left")


def test_the_time_left_is_exact_at_a_steady_pace(study: Study) -> None:
    progress, clock, said = follow(study)
    train(progress, clock, 0, start_s=10, step_s=1)
    train(progress, clock, 1, start_s=10, step_s=3)
    progress.start(2)
    clock.now += 10
    for step in (1, 2):
        clock.now += 1
        progress.rows(row(step))
    # 8 steps of 1 s, then the slow arm: 10 s and 10 steps of 3 s.
    assert said[-1].endswith("| about 48 s left")


def test_finished_experiments_are_not_counted(study: Study) -> None:
    progress, clock, said = follow(study, done=iter([0, 1, 3]))
    train(progress, clock, 2, start_s=5, step_s=1)
    assert said[-2].endswith("| about 0 s left")
    assert said[-1] == "s | bf16_standard | seed 1 | step 10/10 | completed"


def test_a_finished_study_says_nothing(study: Study) -> None:
    _, _, said = follow(study, done=range(4))
    assert said == []


def test_lines_keep_their_distance(study: Study) -> None:
    progress, clock, said = follow(study, interval_s=5.0)
    progress.start(0)
    for step in range(1, 11):
        clock.now += 1.0
        progress.rows(row(step))
    assert [line.split(" | ")[3] for line in said] == ["step 0/10", "step 1/10", "step 6/10"]


def test_a_run_that_fails_before_its_first_step(study: Study) -> None:
    progress, clock, said = follow(study)
    progress.start(0)
    clock.now = 3.0
    progress.end("failed: rank 0: ValueError: x")
    progress.start(1)
    assert said[1:] == [
        "s | bf16_standard | seed 0 | step 0/10 | failed: rank 0: ValueError: x",
        "s | mxfp8_standard | seed 0 | step 0/10 | starting",
    ]


def test_missing_numbers_do_not_stop_it(study: Study) -> None:
    progress, _, said = follow(study)
    progress.start(0)
    progress.rows([{"step": 1, "loss": float("nan"), "tps": float("nan")}])
    assert "loss nan | nan tokens/s" in said[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (36_000 + 61, "10 h 1 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
