"""TorchTitan itself trains DeepSeek-V3 on two CPU processes: what it leaves is read right, however a run ends."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_support import SHARED, Trained, launch, moelab_run, ranks_of, steps_logged, wait_for, write_study

from moelab.judge.report import judge_study
from moelab.runs.collect import collect_run
from moelab.runs.directory import find
from moelab.runs.expert_load import FILE, expert_load
from moelab.runs.log import read_log
from moelab.runs.status import State
from moelab.runs.table import COLUMNS
from moelab.runs.tensorboard import read_tensorboard

pytestmark = pytest.mark.training
BF16, MXFP8, LINEARS = "bf16_standard", "mxfp8_standard", "mxfp8_standard_linears_wgrad-bf16"
NVFP4 = "nvfp4_standard"
EXPERTS = [f"layers.{layer}.moe.routed_experts.inner_experts" for layer in (1, 2, 3)]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and progress of a command that is about to end."""
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@dataclass(frozen=True)
class Interrupted:
    """A study that was stopped, what was left of it, and its second run."""

    exit_code: int
    progress: str
    left: dict[int, int]
    again: Trained


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """A BF16 arm without expert parallelism, stopped by Ctrl-C after six of its twenty steps, and then run again."""
    folder = tmp_path_factory.mktemp("interrupted")
    file, runs = write_study(folder, [{"precision": "bf16", "ep": 1}], [0], steps=20), folder / "runs"
    process = launch(file, runs)
    wait_for(lambda: steps_logged(runs) >= 6)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    return Interrupted(exit_code=code, progress=errors, left=ranks_of(runs), again=moelab_run(file, runs))


def test_every_arm_completes_with_a_complete_run_directory(trained: Trained) -> None:
    assert trained.exit_code == 0, trained.progress
    assert [run["status"] for run in trained.printed["runs"]] == ["completed"] * 4
    assert trained.printed["trained"] == 4
    assert f"tests | {MXFP8} | seed 0 | step 6/6 | completed" in trained.progress
    assert "tokens/s per rank" in trained.progress
    for run in trained.runs():
        for name in ("experiment.yaml", "metrics.jsonl", "results.json"):
            assert (run.path / name).stat().st_size > 0, name
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["packages"]["torchtitan"] == "0.3.0"


def test_torchtitan_trained_with_fsdp2_and_expert_parallelism_2(trained: Trained) -> None:
    run = trained.run(BF16)
    config = json.loads((run.path / "launch" / "titan_config.json").read_text())
    assert config["parallelism"]["expert_parallel_degree"] == 2
    assert config["model_spec"]["name"] == "deepseek_v3"
    log = run.log.read_text()
    lines = ("torchtitan version: 0.3.0", "Applied FSDP to the model", "dp_shard=2", "ep=2")
    assert [words for words in lines if words not in log] == []
    command = (run.path / "launch" / "command.sh").read_text()
    assert "-m moelab.launch.rank --module moelab.titan --config experiment" in command


def test_metrics_table_is_what_torchtitan_wrote(trained: Trained) -> None:
    run = trained.run(BF16)
    table = collect_run(run).rows
    assert tuple(table.columns) == COLUMNS
    assert table["step"].tolist() == list(range(1, SHARED["steps"] + 1))
    log, (events,) = read_log(run.log), read_tensorboard(run.tensorboard)
    # The log has five decimals, and the events float32; of the memory the log has that of the fullest rank.
    np.testing.assert_allclose(table["loss"], log.rows["loss"], atol=6e-6)
    np.testing.assert_allclose(table["memory_gib"], log.rows["memory_gib"], atol=0.006)
    for name in ("loss", "grad_norm", "tps", "lr"):
        np.testing.assert_array_equal(table[name].astype("float32"), events.rows[name], err_msg=name)
    np.testing.assert_allclose(table["time"], events.rows["time"], atol=1)
    assert collect_run(run).validation["loss"].astype("float32").tolist() == events.validation["loss"].tolist()
    assert table["lr"].iloc[1] == pytest.approx(3.0e-3)  # the peak, right after two warm-up steps
    assert table["mfu"].isna().all()  # a CPU has no peak to be a fraction of
    assert (table["memory_gib"] > 0.1).all()
    assert (table["tps"] > 0).all()
    assert table["arm"].eq(BF16).all()


def test_loss_starts_at_the_size_of_the_vocabulary_and_falls(trained: Trained) -> None:
    for arm in (BF16, MXFP8, LINEARS):
        collected = trained.collected(arm)
        loss = collected.rows["loss"]
        # ln 2048 = 7.62; TorchTitan's initialisation of the head adds the variance of the logits, about 0.5.
        assert math.log(2048) < loss.iloc[0] < math.log(2048) + 0.8
        assert loss.iloc[-1] < loss.iloc[0] - 0.2
        assert abs(collected.validation_loss - loss.iloc[-1]) < 1.0


def test_mxfp8_modules_are_recorded(trained: Trained) -> None:
    assert trained.collected(BF16).converted is None
    for arm in (MXFP8, NVFP4):
        assert trained.collected(arm).converted == {"kernels": "emulated", "modules": EXPERTS}
    linears = trained.collected(LINEARS).converted
    assert linears is not None
    assert len(linears["modules"]) == 35
    assert set(EXPERTS) < set(linears["modules"])


def test_mxfp8_changes_loss_and_gradients_a_little(trained: Trained) -> None:
    reference = trained.collected(BF16).rows
    for arm, most in ((MXFP8, 0.05), (LINEARS, 0.2), (NVFP4, 0.2)):
        rows = trained.collected(arm).rows
        for column in ("loss", "grad_norm"):
            difference = (rows[column] - reference[column]).abs()
            assert (difference[:2] > 0).all(), f"{arm}: {column} is BF16's to the last digit"
            # Later steps multiply what earlier ones round: only the first half says how much MXFP8 changes.
            early = difference[: len(difference) // 2]
            assert early.max() < most, f"{arm}: {column} differs by {early.max()}"


def test_one_step_is_traced_on_a_processor_too(trained: Trained) -> None:
    run = trained.run(LINEARS)
    assert [file.name for file in (run.path / "traces").iterdir()] == ["rank0.json.gz"]
    text = gzip.decompress((run.path / "traces" / "rank0.json.gz").read_bytes()).decode()
    events = json.loads(text)["traceEvents"]
    assert [one["name"] for one in events if one["name"].startswith("ProfilerStep")] == ["ProfilerStep#4"]
    names = {one["name"] for one in events}
    assert any("FSDP::all_gather" in name for name in names)
    assert any("all_to_all" in name for name in names)
    assert any(one["name"] == "aten::mm" and one["args"]["Input Dims"] for one in events)
    places = (str(run.path), str(trained.folder), "site-packages", f'"{socket.gethostname()}"')
    assert [place for place in places if place in text] == []
    one = trained.collected(LINEARS)
    assert [(trace["rank"], trace["step"]) for trace in one.traces] == [(0, 4)]
    assert one.rows["step"][one.rows["tps"].isna()].tolist() == [3, 4, 5]
    assert "moelab: step 4 of rank 0 was traced" in run.log.read_text()


def test_the_load_of_every_expert_is_recorded(trained: Trained) -> None:
    for arm in (BF16, MXFP8):
        load = expert_load(trained.run(arm).path / FILE)
        assert load is not None
        assert load.steps.tolist() == list(range(1, SHARED["steps"] + 1))
        assert (load.layers.tolist(), load.tokens_SLE.shape[2]) == ([1, 2, 3], 8)
        tokens = 2 * SHARED["local_batch"] * SHARED["seq_len"]  # of two ranks, each to two experts
        assert (load.tokens_SLE.sum(axis=2) == 2 * tokens).all()
        assert (load.busiest_expert_SL > 1).all()


def test_ctrl_c_stops_every_rank_and_a_second_run_trains_what_is_missing(interrupted: Interrupted) -> None:
    assert (interrupted.exit_code, interrupted.left) == (1, {})
    assert "interrupted" in interrupted.progress
    assert (interrupted.again.exit_code, interrupted.again.printed["trained"]) == (0, 1)
    assert [run.status.state for run in interrupted.again.runs()] == [State.CANCELLED, State.COMPLETED]


def test_the_same_seed_has_the_same_losses_and_expert_parallelism_changes_none(
    trained: Trained, interrupted: Interrupted
) -> None:
    """A run that was stopped and the one that took its place, as far as the first came."""
    stopped, again = (collect_run(run).rows for run in interrupted.again.runs())
    assert len(stopped) >= SHARED["steps"]
    np.testing.assert_array_equal(stopped["loss"], again["loss"][: len(stopped)])
    # Of the first steps: later ones have the learning rate of a run of twenty.
    rows = trained.collected(BF16).rows
    for column, tolerance in (("loss", 5e-3), ("grad_norm", 5e-2)):
        np.testing.assert_allclose(again[column][:3], rows[column][:3], atol=tolerance)


def test_a_loss_that_is_not_finite_is_the_cause_and_another_seed_begins_with_another_loss(
    trained: Trained, tmp_path: Path
) -> None:
    file = write_study(tmp_path, [{"precision": "bf16"}], [1], lr=1.0e30, warmup_steps=0, steps=8)
    diverged = moelab_run(file, tmp_path / "runs")
    assert diverged.exit_code == 1
    status = diverged.run(BF16).status
    assert status.state is State.FAILED
    assert re.fullmatch(r"rank \d: .*Loss is not finite.*", str(status.reason)), status.reason
    losses = diverged.collected(BF16).rows["loss"]
    assert losses.iloc[0] != trained.collected(BF16).rows["loss"].iloc[0]  # before anything was learned


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "moelab-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_that_cause(tmp_path: Path, small_disk: Path) -> None:
    runs = small_disk / "runs"
    process = launch(write_study(tmp_path, [{"precision": "bf16"}], [0], steps=400), runs)
    wait_for(lambda: steps_logged(runs) >= 2)
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 20)))
    assert ended(process)[0] == 1
    (run,) = find(runs)
    assert run.status.state is State.FAILED
    assert str(run.status.reason).startswith("no disk space")
    assert ranks_of(runs) == {}
    assert len(collect_run(run).rows) >= 2


# moelab's DeepEP dispatcher on DeepEP's stand-in. Two arms share what else there is to show: BF16 is compiled and
# checkpointed selectively, MXFP8 with quantised dispatch recomputes everything but the dispatch. Most of their time is
# the compiler's, of layers with and without gradients.
DEEPEP = {"ep_backend": "deepep", "ep_kernels": "emulated"}
OF_DEEPEP: dict[str, dict[str, Any]] = {
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
    arms = [{**DEEPEP, **fields} for fields in OF_DEEPEP.values()]
    return moelab_run(write_study(folder, arms, [0]), folder / "runs")


def test_every_arm_completes_with_the_stand_in_and_the_report_says_so(deepep: Trained) -> None:
    assert deepep.exit_code == 0, deepep.progress
    for arm in OF_DEEPEP:
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
