"""The launcher, with a stand-in for torchrun: every end has the right status, and nothing lives on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import stand_in
import yaml
from filelock import FileLock
from processes import processes
from training_support import wait_for

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.experiment_file import Study, make_study
from moelab.launch import local, torchrun
from moelab.launch.local import Progress, StudyRun, run_study
from moelab.launch.status import refresh
from moelab.runs import directory
from moelab.runs.collect import collect
from moelab.runs.directory import RunDir, find
from moelab.runs.status import RESERVE, State, Status

STEPS = 4
BF16, MXFP8 = {"precision": "bf16"}, {"precision": "mxfp8"}


@pytest.fixture(autouse=True)
def _no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("command", "stage_data", "POLL_S"):
        monkeypatch.setattr(local, name, getattr(local, name))  # put back afterwards
    monkeypatch.setattr(local, "environment", lambda nodes: {"hosts": nodes})
    yield
    wait_for(lambda: not stand_in.processes_of(tmp_path), 10)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def study_of(*arms: dict[str, Any], seeds: tuple[int, ...] = (0,), **shared: Any) -> Study:
    return make_study("s", {"steps": STEPS, "warmup_steps": 0, "hardware": "cpu", **shared}, arms or [BF16], seeds)


def launch(
    runs: Path, plan: Study, behaviours: dict[str, str] | None = None, **options: Any
) -> tuple[StudyRun, list[str]]:
    said: list[str] = []
    stand_in.install(behaviours)
    return run_study(plan, runs, say=said.append, **options), said


def launch_one(runs: Path, behaviour: str, *, precision: str = "bf16") -> RunDir:
    done, _ = launch(runs, study_of({"precision": precision}), {f"{precision}_standard/seed0": behaviour})
    assert done.trained == 1
    return done.runs[0]


def launch_until_loss(runs: Path, behaviour: str, error: BaseException) -> None:
    """Raise an error in the launcher at the first loss that it shows."""

    def say(line: str) -> None:
        if "loss" in line:
            raise error

    stand_in.install({"bf16_standard/seed0": behaviour})
    run_study(study_of(), runs, say=say)


def states(done: StudyRun) -> list[str]:
    return [run.status.state.value for run in done.runs]


def logged_steps(run: RunDir) -> list[int]:
    return pd.read_parquet(run.path / "metrics.parquet")["step"].tolist()


# Ends


def test_a_run_that_completes(runs: Path) -> None:
    done, said = launch(runs, study_of(BF16, MXFP8))
    assert states(done) == ["completed", "completed"]
    assert (done.trained, done.failed) == (2, ())
    run = done.runs[1]
    assert (run.status.exit_code, run.status.reason, run.status.attempts) == (0, None, 1)
    assert logged_steps(run) == [1, 2, 3, 4]
    results = json.loads((run.path / "results.json").read_text())
    assert (results["status"], results["steps"], results["validation_loss_nats"]) == ("completed", 4, 7.0)
    assert results["last_loss_nats"] == pytest.approx(7.6)
    assert results["mxfp8"] == {"kernels": "emulated", "modules": ["layers.1.moe.experts"]}
    assert "stand_in.py train" in (run.path / "launch" / "command.sh").read_text()
    assert not (run.path / RESERVE).exists()
    assert said[0] == "s | bf16_standard | seed 0 | step 0/4 | starting"
    assert said[-1] == "s | mxfp8_standard | seed 0 | step 4/4 | completed"


FAILURES = {
    "die": ("rank 1: ValueError: the vocabulary is too small", 2),
    "rank_killed": ("rank 1: killed by SIGKILL (often the system running out of memory)", 2),
    "nan": ("rank 0: RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3.", 2),
    "nan_unseen": ("loss is nan at step 4 (segment 0)", 4),
    "short": ("training ended at step 2 of 4", 2),
    "wordless": ("torchrun ended with exit code 7; see train.log", 0),
    "torn": ("torchrun ended with exit code 1; see train.log", 1),
    "torchrun_killed": ("torchrun ended with exit code -9; see train.log", 2),
    "unconverted": ("precision is mxfp8, but no module was converted", 4),
}


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_run_that_fails_says_why_and_keeps_its_steps(runs: Path, behaviour: str) -> None:
    reason, last_step = FAILURES[behaviour]
    run = launch_one(runs, behaviour, precision="mxfp8" if behaviour == "unconverted" else "bf16")
    assert (run.status.state, run.status.reason) == (State.FAILED, reason)
    assert logged_steps(run) == list(range(1, last_step + 1))
    results = json.loads((run.path / "results.json").read_text())
    assert (results["status"], results["reason"], results["steps"]) == ("failed", reason, last_step)


def test_errors_of_the_launcher_itself_leave_nothing_running(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        launch_until_loss(runs, "hang", ZeroDivisionError("in the display"))
    (run,) = find(runs)
    assert run.status.state is State.FAILED
    assert run.status.reason == "the launcher failed: ZeroDivisionError('in the display')"
    assert logged_steps(run) == [1, 2]
    missing = local.Command(arguments=["/no/such"], variables={"MOELAB_EXPERIMENT": str(runs)})
    monkeypatch.setattr(local, "command", lambda *_: missing)
    done = run_study(study_of(MXFP8), runs, say=lambda line: None)
    assert states(done) == ["failed"]
    assert "No such file or directory: '/no/such'" in (done.runs[0].status.reason or "")


# A study


def test_only_what_is_missing_is_trained(runs: Path) -> None:
    plan, dies = study_of(BF16, MXFP8, seeds=(0, 1)), {"mxfp8_standard/seed0": "die"}
    stopped, said = launch(runs, plan, dies, on_failure="stop")
    assert states(stopped) == ["completed", "failed"]
    assert said[-1].endswith("| failed: rank 1: ValueError: the vocabulary is too small")
    assert states(launch(runs, plan, dies)[0]) == ["completed", "failed", "completed", "completed"]
    done, said = launch(runs, plan)
    assert (done.trained, states(done)) == (1, ["completed"] * 4)
    assert [line for line in said if line.endswith("starting")] == ["s | mxfp8_standard | seed 0 | step 0/4 | starting"]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    idle, said = launch(runs, plan, dict.fromkeys(("bf16_standard/seed0", "mxfp8_standard/seed0"), "die"))
    assert (idle.trained, said, idle.runs) == (0, [], done.runs)
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    assert {path.name for path in after if after[path] != before[path]} <= {".launcher.lock"}


def test_what_the_machine_cannot_run_is_refused_before_anything_starts(runs: Path) -> None:
    stand_in.install()
    with pytest.raises(Refused, match="fp8_standard: precision is fp8: FP8 grouped GEMMs need") as refused:
        run_study(study_of(BF16, {"precision": "fp8"}), runs)
    assert refused.value.exit_code == 3
    assert not runs.exists()


def test_a_second_launcher_is_refused(runs: Path) -> None:
    stand_in.install()
    (runs / "s").mkdir(parents=True)
    with (
        FileLock(runs / "s" / ".launcher.lock"),
        pytest.raises(Refused, match="another process is launching study 's'"),
    ):
        run_study(study_of(), runs)
    assert list(find(runs)) == []
    assert states(run_study(study_of(), runs, say=lambda line: None)) == ["completed"]


def test_runs_that_nobody_ended_are_closed(runs: Path) -> None:
    plan = study_of(seeds=(0, 1))
    running = directory.create(runs, plan.experiments[0])
    running.log.write_text(stand_in.step_line(1, 8.0))
    running.set_status(Status(state=State.RUNNING, attempts=1))
    of_another_field = directory.create(runs, plan.experiments[0].model_copy(update={"steps": 9}))
    unreadable = directory.create(runs, plan.experiments[1])
    (unreadable.path / "experiment.yaml").write_text("a_field_of_the_future: 1\n")
    job = directory.create(runs, plan.experiments[1])
    job.set_status(Status(state=State.SUBMITTED, job_id="17"))
    done, lines = launch(runs, plan)
    assert (done.trained, states(done)) == (2, ["completed", "completed"])
    for run in (running, of_another_field, unreadable):
        assert (run.status.state, run.status.reason) == (State.FAILED, "the launcher was killed")
    assert logged_steps(running) == [1]
    assert job.status.state is State.SUBMITTED
    assert [one.run for one in done.discovered.left_out] == [unreadable]
    assert lines[0] == f"{unreadable.name}: left out: {done.discovered.left_out[0].reason}"


def test_a_run_of_which_nobody_knows_the_end_is_not_trained_beside(runs: Path) -> None:
    plan = study_of(BF16, MXFP8)
    done, _ = launch(runs, plan)
    whole = done.runs[0].path / "status.json"
    for content, told in ((b'{"state": "comp', "is damaged: Invalid JSON"), (None, "cannot be read: No such file")):
        whole.unlink() if content is None else whole.write_bytes(content)
        with pytest.raises(Refused) as refused:
            run_study(plan, runs)
        assert f"{done.runs[0].name}: it is unknown how it ended (status.json {told}" in str(refused.value)
        assert f"it has {STEPS} of {STEPS} steps" in str(refused.value)
        assert len(find(runs)) == 2
        assert content is None or whole.read_bytes() == content
    whole.write_text('{"state": "completed"}')  # as the refusal says
    assert launch(runs, plan)[0].trained == 0
    whole.write_text("{")
    done.runs[0].path.rename(runs / "put aside")
    assert launch(runs, plan)[0].trained == 1
    whole = directory.create(runs, plan.experiments[0]).path / "status.json"
    whole.write_text("{")  # beside a completed one it is nobody's loss
    assert launch(runs, plan)[0].trained == 0
    assert whole.read_text() == "{"


# Interruptions


def test_ranks_that_do_not_end_when_asked_to_are_killed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "STOP_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        launch_until_loss(runs, "stubborn", KeyboardInterrupt())
    wait_for(lambda: not stand_in.processes_of(runs), 2)
    assert [run.status.state for run in find(runs)] == [State.CANCELLED]


def start_moelab(tmp_path: Path, behaviours: dict[str, str], *options: str) -> subprocess.Popen[str]:
    file = tmp_path / "study.yaml"
    shared = {"steps": STEPS, "warmup_steps": 0, "hardware": "cpu"}
    file.write_text(yaml.safe_dump({"study": "s", "experiment": shared, "arms": [BF16], "seeds": [0]}))
    command = [sys.executable, stand_in.__file__, "moelab", json.dumps(behaviours), "run", str(file), *options]
    command += ["--runs", str(tmp_path / "runs"), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_moelab_run(tmp_path: Path, runs: Path, number: signal.Signals) -> None:
    process = start_moelab(tmp_path, {"bf16_standard/seed0": "hang"})
    wait_for(lambda: any("step:  2" in run.log.read_text() for run in find(runs) if run.log.exists()))
    assert len(stand_in.processes_of(runs)) == 3
    assert [status.state for status in refresh(find(runs))] == [State.RUNNING]
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    wait_for(lambda: not stand_in.processes_of(runs), 10)
    (run,) = find(runs)
    assert out == ""
    if number is signal.SIGKILL:
        status = run.status
        run.set_status(replace(status, boot_id="of another machine"))
        assert refresh([run])[0].state is State.RUNNING  # where its launcher may live
        run.set_status(status)
        assert refresh([run])[0].reason == "the launcher was killed"
        done, _ = launch(runs, study_of())
        assert (done.trained, states(done)) == (1, ["completed"])
        assert (run.status.state, run.status.reason) == (State.FAILED, "the launcher was killed")
    else:
        assert process.returncode == 1
        assert err.splitlines()[-1] == "moelab: interrupted; what was finished is kept"
        assert (run.status.state, run.status.reason) == (State.CANCELLED, "interrupted by the user")
    assert logged_steps(run) == [1, 2]


def test_what_a_killed_launcher_and_torchrun_left_is_ended_before_the_next_run_trains(
    tmp_path: Path, runs: Path
) -> None:
    process = start_moelab(tmp_path, {"bf16_standard/seed0": "stubborn"})
    wait_for(lambda: any("step:  2" in run.log.read_text() for run in find(runs) if run.log.exists()))
    mine = stand_in.processes_of(runs)
    (torchrun,) = (one for one, line, _ in processes() if one in mine and "stubborn" in line)
    process.kill()
    os.kill(torchrun, signal.SIGKILL)
    process.communicate()
    left = set(stand_in.processes_of(runs)) - {torchrun}
    assert len(left) == 2
    with subprocess.Popen(["sleep", "60"], start_new_session=True, env={"MOELAB_EXPERIMENT": str(runs)}) as another:
        at_start: list[set[int]] = []

        def say(line: str) -> None:
            lines.append(line)
            at_start.extend([left & set(stand_in.processes_of(runs))] * line.endswith("starting"))

        lines: list[str] = []
        stand_in.install()
        run_study(study_of(), runs, say=say)
        assert another.poll() is None  # not a process of an orphaned run
        another.kill()
    assert (lines[0], at_start) == ("ended 2 processes that a killed launcher left behind", [set()])


RANKS = """
import os, signal, sys, time
from moelab.machine import end_with_torchrun

def ranks(torchrun_lives):
    reads, writes = os.pipe()
    if not (torchrun := os.fork()):
        parent = os.getpid()
        if os.fork():
            time.sleep(60 * torchrun_lives)
            os._exit(0)
        while not torchrun_lives and os.getppid() == parent:
            time.sleep(0.01)
        try:
            end_with_torchrun()
            os.write(writes, b"trains")
            time.sleep(20)
        except SystemExit as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.close(writes)
    return torchrun, reads

torchrun, reads = ranks(torchrun_lives=True)
print(os.read(reads, 99).decode())
killed = time.monotonic()
os.kill(torchrun, signal.SIGKILL)
print(os.read(reads, 99).decode(), time.monotonic() - killed < 10)
print(os.read(ranks(torchrun_lives=False)[1], 99).decode())
"""


def test_a_rank_dies_with_torchrun_and_does_not_train_where_that_died_before(tmp_path: Path) -> None:
    """Whoever is then its parent does not carry the run's variables."""
    variables = {**os.environ, "MOELAB_EXPERIMENT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout.splitlines() == ["trains", " True", "moelab: torchrun has died; a rank does not train on alone"]


def test_what_torchrun_did_not_copy_any_more_is_in_the_metrics(runs: Path) -> None:
    """A line that it was writing is there once and whole; one that a rank was writing is not."""
    (experiment,) = study_of().experiments
    run = directory.create(runs, experiment)
    step = [stand_in.step_line(number, 8.0 - number).removeprefix("[rank0]:") for number in range(1, 5)]
    files = {0: ["hello\n", *step[:3], "hello\n", step[3][:70]], 1: ["hello\n", "\n", "world\n"]}
    for rank, lines in files.items():
        folder = run.log.parent / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("".join(lines))
        (folder / "stdout.log").write_text("")
    run.log.write_text(f"[rank1]:hello\n[rank0]:hello\n[rank0]:{step[0]}[rank1]:\n[rank0]:{step[1][:-25]}")
    run.set_status(Status(state=State.RUNNING, attempts=1))
    launch(runs, study_of())
    assert (logged_steps(run), collect(run.path)[0].segments) == ([1, 2, 3], 1)
    assert run.log.read_text().count("[rank0]:hello\n") == 2
    assert run.log.read_text().endswith("[rank1]:world\n")
    local._complete_log(run)
    assert collect(run.path)[0].rows["step"].tolist() == [1, 2, 3]


# A full disk


def full_disk(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["environment.json", "command.sh"])
def test_a_disk_that_is_full_before_the_ranks_start(runs: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for function in ("write_json", "write_whole"):
        write = getattr(local, function)
        monkeypatch.setattr(local, function, lambda p, c, w=write: full_disk() if p.name == name else w(p, c))
    done, _ = launch(runs, study_of(BF16, MXFP8))
    assert states(done) == ["failed", "failed"]
    assert done.runs[0].status.reason == "the launcher failed: [Errno 28] No space left on device"
    assert not (done.runs[0].path / RESERVE).exists()


def test_a_disk_that_fills_while_ranks_train(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([2**40] * 12)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free, 0)))
    run = launch_one(runs, "hang")
    assert run.status.state is State.FAILED
    assert (run.status.reason or "").startswith("no disk space: the file system of the runs has 0.0 MiB free")
    assert stand_in.processes_of(runs) == []


def test_a_disk_without_space_is_refused(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(Refused, match="no disk space"):
        launch(runs, study_of())
    assert list(find(runs)) == []


def test_results_that_cannot_be_written_do_not_undo_the_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.runs.collect.write_whole", full_disk)
    done, _ = launch(runs, study_of())
    assert states(done) == ["completed"]
    assert not (done.runs[0].path / "metrics.parquet").exists()
    (collected,) = collect(done.runs[0].path)
    assert collected.finished
    assert collected.rows["step"].tolist() == [1, 2, 3, 4]


def test_the_study_is_looked_at_from_any_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mkdir()
    monkeypatch.chdir(runs)
    done, _ = launch(Path(), study_of())
    assert done.runs[0].path.is_relative_to(runs)
    assert [path.name for path in runs.iterdir()] == ["s"]


# Data


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_hub_that_cannot_be_reached_is_a_refusal(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(Refused, match=r"^dataset c4 cannot be reached from here \(ConnectError\).*use dataset=python"):
        local.stage_data(Experiment(dataset="c4"))


# The line about a study that trains, on a clock that the test turns


def test_a_line_says_where_a_study_is_and_what_is_left_at_a_steady_pace() -> None:
    study = make_study("s", {"steps": 10}, [BF16, MXFP8], [0, 1])
    now, said = [0.0], list[str]()
    progress = Progress(study, [3], said.append, interval_s=0.0, clock=lambda: now[0])

    def train(index: int, *, start_s: float, step_s: float, steps: int = 10) -> None:
        progress.start(index)
        now[0] += start_s
        for step in range(1, steps + 1):
            now[0] += step_s
            progress.row({"step": step, "loss": 8.0 - step / 10, "tps": 1234.5})

    train(0, start_s=10, step_s=2, steps=3)
    assert said[0] == "s | bf16_standard | seed 0 | step 0/10 | starting"
    assert said[1] == "s | bf16_standard | seed 0 | step 1/10 | loss 7.900 | 1,234 tokens/s per rank"
    # 7 steps of 2 s are left here, and two runs of 12 s start-up and 10 steps of 2 s: 14 + 2 × 32.
    assert said[-1].endswith("| about 1 min 18 s left")
    progress.end("failed: x")
    assert said[-1] == "s | bf16_standard | seed 0 | step 3/10 | failed: x"
    train(1, start_s=10, step_s=3)
    progress.end("completed")
    train(2, start_s=10, step_s=1, steps=2)
    assert said[-1].endswith("| about 8 s left")  # 8 steps of 1 s: the fourth run was finished before


def test_lines_keep_their_distance() -> None:
    now, said = [0.0], list[str]()
    progress = Progress(make_study("s", {"steps": 10}, [BF16], [0]), (), said.append, clock=lambda: now[0])
    progress.start(0)
    for step in range(1, 11):
        now[0] += 1.0
        progress.row({"step": step, "loss": 8.0, "tps": 1234.5})
    assert [line.split(" | ")[3] for line in said] == ["step 0/10", "step 1/10", "step 6/10"]
