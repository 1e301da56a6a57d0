"""Studies trained once for all tests here."""

from __future__ import annotations

import signal

import pytest
from training_support import (
    Interrupted,
    Trained,
    ended,
    launch,
    moelab_run,
    ranks_of,
    steps_logged,
    wait_for,
    write_study,
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """BF16, two MXFP8 arms and one of NVFP4, with FSDP2 and expert parallelism 2 on two gloo processes."""
    folder = tmp_path_factory.mktemp("trained")
    arms = [
        {"precision": "bf16"},
        {"precision": "mxfp8"},
        {"precision": "mxfp8", "quantize": "experts+linears", "wgrad": "bf16", "trace_step": 4},
        {"precision": "nvfp4"},
    ]
    return moelab_run(write_study(folder, arms, [0]), folder / "runs")


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """A BF16 arm without expert parallelism, stopped by Ctrl-C after six of its twenty steps, and then run again."""
    folder = tmp_path_factory.mktemp("interrupted")
    file, runs = write_study(folder, [{"precision": "bf16", "ep": 1}], [0], steps=20), folder / "runs"
    process = launch(file, runs)
    wait_for(lambda: steps_logged(runs) >= 6)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    return Interrupted(exit_code=code, progress=errors, left=ranks_of(runs), again=moelab_run(file, runs))


@pytest.fixture(scope="session")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A BF16 arm with seed 1 whose loss is soon not finite."""
    folder = tmp_path_factory.mktemp("diverged")
    file = write_study(folder, [{"precision": "bf16"}], [1], lr=1.0e30, warmup_steps=0, steps=8)
    return moelab_run(file, folder / "runs")
