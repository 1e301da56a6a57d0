"""Five kills at which processes, steps or a run's status were or could be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kills import Kill, chain, losses_of
from training_support import Trained

pytestmark = pytest.mark.training


def kill(target: str, moment: str, *, of_job: bool = False, step: int = 3, delay_s: float = 0.0) -> Kill:
    return Kill(of_job=of_job, target=target, moment=moment, step=step, delay_s=delay_s)


def statuses(trained: Trained, folder: Path, *kills: Kill) -> list[Any]:
    """Of the killed runs; nothing else is wrong with them."""
    outcomes = chain(kills, folder / "study", losses_of(trained.run("bf16_standard")))
    assert [outcome.problems for outcome in outcomes] == [[]] * len(kills)
    assert all(outcome.killed for outcome in outcomes)
    return [outcome.status for outcome in outcomes]


def test_runs_that_are_killed_leave_nothing_behind_and_lose_no_step(trained: Trained, tmp_path: Path) -> None:
    rank, both, torchrun = statuses(
        trained,
        tmp_path,
        kill("rank", "training"),
        kill("launcher and torchrun", "start-up", delay_s=2.0),
        kill("torchrun", "training"),
    )
    assert rank == "failed: rank 1: killed by SIGKILL (often the system running out of memory)"
    assert both == "failed: the launcher was killed"
    assert torchrun == "failed: torchrun ended with exit code -9; see train.log"


def test_a_job_that_is_killed_goes_on_from_its_checkpoint(trained: Trained, tmp_path: Path) -> None:
    saving = kill("launcher and torchrun", "checkpoint", of_job=True)
    assert len(statuses(trained, tmp_path, saving, kill("launcher", "end", of_job=True))) == 2
