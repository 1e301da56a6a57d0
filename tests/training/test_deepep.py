"""moelab's DeepEP dispatcher trains on two CPU processes, on DeepEP's stand-in, with the standard dispatcher's losses.

Two arms share what else there is to show: BF16 is compiled and checkpointed selectively, and MXFP8 with quantised
dispatch recomputes everything but the dispatch. Most of their time is the compiler's, of layers with and without
gradients.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from training_support import Trained, moelab_run, write_study

pytestmark = pytest.mark.training
DEEPEP = {"ep_backend": "deepep", "ep_kernels": "emulated"}
ARMS: dict[str, dict[str, Any]] = {
    "bf16_deepep": {"precision": "bf16", "activation_checkpoint": "selective", "compile": "model+loss"},
    "mxfp8_deepep_wgrad-bf16_dispatch-mxfp8": {
        "precision": "mxfp8",
        "wgrad": "bf16",
        "dispatch_precision": "mxfp8",
        "activation_checkpoint": "full+dispatch",
    },
}


@pytest.fixture(scope="module")
def deepep(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("deepep")
    arms = [{**DEEPEP, **fields} for fields in ARMS.values()]
    return moelab_run(write_study(folder, arms, [0]), folder / "runs")


def test_every_arm_completes_with_the_stand_in_and_the_report_says_so(deepep: Trained) -> None:
    from moelab.study_report import judge_study

    assert deepep.exit_code == 0, deepep.progress
    for arm in ARMS:
        dispatcher = json.loads((deepep.run(arm).path / "results.json").read_text())["dispatcher"]
        assert (dispatcher["dispatcher"], dispatcher["kernels"]) == ("PaddedDispatcher", "emulated")
    assert deepep.collected("bf16_deepep").dispatcher["alignment"] == 8
    judged = judge_study(deepep.folder / "tests", reference="bf16_deepep")
    assert judged.emulation_note == "emulated MXFP8 kernels, DeepEP emulated on plain collectives"
    assert "no measure of speed" in judged.as_text()


def test_losses_are_the_standard_dispatchers(trained: Trained, deepep: Trained) -> None:
    ours, theirs = deepep.collected("bf16_deepep").rows, trained.collected("bf16_standard").rows
    # The scores are applied before the last product, which rounds once more: a few units of the fourth decimal.
    assert (ours["loss"] - theirs["loss"]).abs().max() < 5e-3
    assert (ours["grad_norm"] - theirs["grad_norm"]).abs().max() < 5e-2
    quantised = deepep.collected("mxfp8_deepep_wgrad-bf16_dispatch-mxfp8").rows
    assert (quantised["loss"] - trained.collected("mxfp8_standard").rows["loss"]).abs().max() < 1e-2
    assert (quantised["loss"] - theirs["loss"]).abs().max() > 0
