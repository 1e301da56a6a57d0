"""A study trained once for all tests here."""

from __future__ import annotations

import pytest
from training_support import Trained, moelab_run, write_study


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
