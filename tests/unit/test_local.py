"""The launcher, with a stand-in for torchrun: every end has the right status, and nothing lives on."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
from moelab.launch.local import StudyRun, run_study
from moelab.launch.progress import Bars, Progress, progress_of
from moelab.launch.status import refresh
from moelab.machine import boot_id
from moelab.runs import directory
from moelab.runs.collect import collect, collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import RESERVE, State, Status

STEPS = 4
SHARED = {"steps": STEPS, "warmup_steps": 0, "hardware": "cpu"}
BF16, MXFP8 = {"precision": "bf16"}, {"precision": "mxfp8"}
FULL_DISK = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


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


def study_of(*arms: dict[str, Any], seeds: tuple[int, ...] = (0,)) -> Study:
    return make_study("s", SHARED, arms or [BF16], seeds)


def launch(
    runs: Path, study: Study, behaviours: dict[str, str] | None = None, **options: Any
) -> tuple[StudyRun, list[str]]:
    """What became of a study whose runs behave so, and the lines of progress."""
    lines: list[str] = []
    stand_in.install(behaviours)
    return run_study(study, runs, say=lines.append, **options), lines


def launch_until_loss(runs: Path, behaviour: str, error: BaseException) -> None:
    """Raise an error in the launcher at the first loss that it shows."""

    def say(line: str) -> None:
        if "loss" in line:
            raise error

    stand_in.install({"bf16_standard/seed0": behaviour})
    run_study(study_of(), runs, say=say)


def states(done: StudyRun) -> list[str]:
    return [run.status.state.value for run in done.runs]


def end_of(run: RunDir) -> tuple[State, str | None]:
    return run.status.state, run.status.reason


def logged_steps(run: RunDir) -> list[int]:
    return collect_run(run).rows["step"].tolist()


def test_a_run_that_completes(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mkdir()
    monkeypatch.chdir(runs)  # the folder of runs may be given relative to where one is
    done, lines = launch(Path(), study_of(BF16, MXFP8))
    assert states(done) == ["completed", "completed"]
    assert (done.trained, done.failed) == (2, ())
    run = done.runs[1]
    assert run.path.is_relative_to(runs / "s")
    assert (run.status.exit_code, run.status.reason, run.status.attempts) == (0, None, 1)
    assert logged_steps(run) == [1, 2, 3, 4]
    results = json.loads((run.path / "results.json").read_text())
    assert (results["status"], results["steps"], results["validation_loss_nats"]) == ("completed", 4, 7.0)
    assert results["last_loss_nats"] == pytest.approx(7.6)
    assert results["mxfp8"] == {"kernels": "emulated", "modules": ["layers.1.moe.experts"]}
    assert "stand_in.py train" in (run.path / "launch" / "command.sh").read_text()
    assert not (run.path / RESERVE).exists()
    assert lines[0] == "s | bf16_standard | seed 0 | step 0/4 | starting"
    assert lines[-1] == "s | mxfp8_standard | seed 0 | step 4/4 | completed"


@pytest.mark.parametrize(
    ("behaviour", "reason", "last_step"),
    [
        ("die", "rank 1: ValueError: the vocabulary is too small", 2),
        ("rank_killed", "rank 1: killed by SIGKILL (often the system running out of memory)", 2),
        ("nan", "rank 0: RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3.", 3),
        ("nan_unseen", "loss is nan at step 4 (segment 0)", 4),
        ("short", "training ended at step 2 of 4", 2),
        ("wordless", "torchrun ended with exit code 7; see train.log", 0),
        ("torn", "torchrun ended with exit code 1; see train.log", 1),
        ("torchrun_killed", "torchrun ended with exit code -9; see train.log", 2),
        ("unconverted", "precision is mxfp8, but no module was converted", 4),
    ],
)
def test_a_run_that_fails_says_why_and_keeps_its_steps(runs: Path, behaviour: str, reason: str, last_step: int) -> None:
    done, _ = launch(runs, study_of(MXFP8), {"mxfp8_standard/seed0": behaviour})
    (run,) = done.runs
    assert end_of(run) == (State.FAILED, reason)
    assert logged_steps(run) == list(range(1, last_step + 1))
    results = json.loads((run.path / "results.json").read_text())
    assert (results["status"], results["reason"], results["steps"]) == ("failed", reason, last_step)


def test_errors_of_the_launcher_itself_leave_nothing_running(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        launch_until_loss(runs, "hang", ZeroDivisionError("in the display"))
    (run,) = find(runs)
    assert end_of(run) == (State.FAILED, "the launcher failed: ZeroDivisionError('in the display')")
    assert logged_steps(run) == [1, 2]
    missing = local.Command(arguments=["/no/such"], variables={"MOELAB_EXPERIMENT": str(runs)})
    monkeypatch.setattr(local, "command", lambda *_: missing)
    done = run_study(study_of(MXFP8), runs, say=lambda line: None)
    assert states(done) == ["failed"]
    assert "No such file or directory: '/no/such'" in (done.runs[0].status.reason or "")


def test_only_what_is_missing_is_trained(runs: Path) -> None:
    study, dies = study_of(BF16, MXFP8, seeds=(0, 1)), {"mxfp8_standard/seed0": "die"}
    stopped, lines = launch(runs, study, dies, on_failure="stop")
    assert states(stopped) == ["completed", "failed"]
    assert lines[-1].endswith("| failed: rank 1: ValueError: the vocabulary is too small")
    assert states(launch(runs, study, dies)[0]) == ["completed", "failed", "completed", "completed"]
    done, lines = launch(runs, study)
    assert (done.trained, states(done)) == (1, ["completed"] * 4)
    assert [line for line in lines if line.endswith("starting")] == [
        "s | mxfp8_standard | seed 0 | step 0/4 | starting"
    ]
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    idle, lines = launch(runs, study, dict.fromkeys(("bf16_standard/seed0", "mxfp8_standard/seed0"), "die"))
    assert (idle.trained, lines, idle.runs) == (0, [], done.runs)
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    assert {path.name for path, _ in after.items() ^ before.items()} <= {".launcher.lock"}


def test_a_second_launcher_is_refused(runs: Path) -> None:
    (runs / "s").mkdir(parents=True)
    another = pytest.raises(Refused, match="another process is launching study 's'")
    with FileLock(runs / "s" / ".launcher.lock"), another:
        launch(runs, study_of())
    assert list(find(runs)) == []
    assert states(launch(runs, study_of())[0]) == ["completed"]


def test_runs_that_nobody_ended_are_closed(runs: Path) -> None:
    study = study_of(seeds=(0, 1))
    running = directory.create(runs, study.experiments[0])
    stand_in.log_step(running.path, 1, 8.0)
    running.set_status(Status(state=State.RUNNING, attempts=1))
    of_another_field = directory.create(runs, study.experiments[0].model_copy(update={"steps": 9}))
    unreadable, job = (directory.create(runs, study.experiments[1]) for _ in range(2))
    (unreadable.path / "experiment.yaml").write_text("a_field_of_the_future: 1\n")
    job.set_status(Status(state=State.SUBMITTED, job_id="17"))
    # What a killed torchrun left of the first run.
    launched = running.path / "launch" / "started" / "here-1"
    launched.parent.mkdir()
    launched.touch()
    variables = {"MOELAB_EXPERIMENT": str(running.path / "experiment.yaml"), "MOELAB_LAUNCH": str(launched)}
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True, env=variables)
    done, lines = launch(runs, study)
    assert orphan.wait(1) == -signal.SIGKILL
    assert (done.trained, states(done)) == (2, ["completed", "completed"])
    for run in (running, of_another_field, unreadable):
        assert end_of(run) == (State.FAILED, "the launcher was killed")
    assert logged_steps(running) == [1]
    assert job.status.state is State.SUBMITTED
    assert [one.run for one in done.discovered.left_out] == [unreadable]
    assert lines[0] == f"{unreadable.name}: left out: {done.discovered.left_out[0].reason}"
    assert lines[1:3] == [
        "ended 1 processes that a killed launcher left behind",
        "s | bf16_standard | seed 0 | step 0/4 | starting",
    ]


def test_what_no_launch_started_is_not_ended_and_keeps_no_run_open(runs: Path, tmp_path: Path) -> None:
    """A shell in which somebody exported the run's variables, and the run's command in another terminal."""
    study, here = study_of(), boot_id()
    killed = directory.create(runs, study.experiments[0])
    killed.set_status(Status(state=State.RUNNING, attempts=1, boot_id=here))
    launched = killed.path / "launch" / "started" / "here-1"
    launched.parent.mkdir()
    launched.touch()
    copied = tmp_path / "copied"
    shutil.copytree(killed.path, copied)
    exported = {"MOELAB_EXPERIMENT": str(killed.path / "experiment.yaml")}
    pasted = torchrun.command(study.experiments[0], killed.path).variables
    of_a_copy = {**exported, "MOELAB_LAUNCH": str(copied / "launch" / "started" / "here-1")}
    of_no_launch = {**exported, "MOELAB_LAUNCH": str(launched.with_name("here-2"))}
    bystanders = [
        subprocess.Popen(["sleep", "60"], start_new_session=apart, env=variables)
        for variables in (exported, pasted, of_a_copy, of_no_launch)
        for apart in (True, False)
    ]
    try:
        assert refresh([killed])[0].reason == "the launcher was killed"
        killed.set_status(Status(state=State.RUNNING, attempts=1, boot_id=here))
        done, lines = launch(runs, study)
        assert (states(done), [line for line in lines if line.startswith("ended")]) == (["completed"], [])
        for behaviour in ("die", "torchrun_killed"):  # what ends by itself ends nothing else either
            launch(runs, study_of(MXFP8), {"mxfp8_standard/seed0": behaviour})
        assert [process.poll() for process in bystanders] == [None] * len(bystanders)
    finally:
        for process in bystanders:
            process.kill()
            process.wait()


def test_a_launch_that_has_ended_leaves_no_record(runs: Path) -> None:
    done, _ = launch(runs, study_of(BF16, MXFP8), {"mxfp8_standard/seed0": "torchrun_killed"})
    assert states(done) == ["completed", "failed"]
    assert [torchrun.launches_of(run) for run in done.runs] == [[], []]


def test_a_run_of_which_nobody_knows_the_end_is_not_trained_beside(runs: Path) -> None:
    study = study_of(BF16, MXFP8)
    done, _ = launch(runs, study)
    status = done.runs[0].path / "status.json"
    for content, fault in (("{", "is damaged: Invalid JSON"), (None, "cannot be read: No such file")):
        status.unlink() if content is None else status.write_text(content)
        with pytest.raises(Refused) as refused:
            run_study(study, runs)
        assert f"{done.runs[0].name}: it is unknown how it ended (status.json {fault}" in str(refused.value)
        assert f"it has {STEPS} of {STEPS} steps" in str(refused.value)
        assert len(find(runs)) == 2
    status.write_text('{"state": "completed"}')  # as the refusal says
    assert launch(runs, study)[0].trained == 0
    beside = directory.create(runs, study.experiments[0]).path / "status.json"
    beside.write_text("{")  # beside a completed one it is nobody's loss
    assert launch(runs, study)[0].trained == 0
    assert beside.read_text() == "{"
    done.runs[0].path.rename(runs / "put aside")
    beside.parent.rename(runs / "put aside, too")
    assert launch(runs, study)[0].trained == 1


# Interruptions


def test_ranks_that_do_not_end_when_asked_to_are_killed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "STOP_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        launch_until_loss(runs, "stubborn", KeyboardInterrupt())
    wait_for(lambda: not stand_in.processes_of(runs), 2)
    assert [run.status.state for run in find(runs)] == [State.CANCELLED]


def start_moelab(runs: Path) -> subprocess.Popen[str]:
    """``moelab run`` of one run, once that has logged two steps and has torchrun and two ranks."""
    file = runs.parent / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "experiment": SHARED, "arms": [BF16], "seeds": [0]}))
    behaviours = json.dumps({"bf16_standard/seed0": "hang"})
    command = [sys.executable, stand_in.__file__, "moelab", behaviours, "run", str(file), f"--runs={runs}", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any("step:  2" in run.log.read_text() for run in find(runs) if run.log.exists()))
    assert len(stand_in.processes_of(runs)) == 3
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_moelab_run_is_interrupted(runs: Path, number: signal.Signals) -> None:
    process = start_moelab(runs)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1] == "moelab: interrupted; what was finished is kept"
    (run,) = find(runs)
    assert end_of(run) == (State.CANCELLED, "interrupted by the user")
    assert logged_steps(run) == [1, 2]
    assert stand_in.processes_of(runs) == []


def test_moelab_run_is_killed(runs: Path) -> None:
    process = start_moelab(runs)
    (run,) = find(runs)
    assert refresh([run])[0].state is State.RUNNING
    (record,) = torchrun.launches_of(run)
    assert torchrun.living([record]) == {record}
    process.kill()
    process.communicate()
    wait_for(lambda: not stand_in.processes_of(runs), 10)
    run.set_status(replace(status := run.status, boot_id="of another machine"))
    assert refresh([run])[0].state is State.RUNNING  # where its launcher may live
    run.set_status(status)
    assert refresh([run])[0].reason == "the launcher was killed"
    assert logged_steps(run) == [1, 2]


RANK = """
import os, sys, time
from moelab.machine import end_with_torchrun

torchrun, lives_s = os.getpid(), float(sys.argv[1])
if os.fork():
    time.sleep(lives_s)
    os._exit(0)
while not lives_s and os.getppid() == torchrun:
    time.sleep(0.01)
end_with_torchrun()
print("trains", flush=True)
time.sleep(20)
"""


def test_a_rank_dies_with_torchrun_and_does_not_train_where_that_died_before(tmp_path: Path) -> None:
    """Whoever is then its parent does not carry the run's variables."""

    def torchrun(lives_s: str) -> subprocess.Popen[str]:
        command, variables = [sys.executable, "-c", RANK, lives_s], {**os.environ, "MOELAB_EXPERIMENT": str(tmp_path)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)

    with torchrun("60") as living:
        assert living.stdout is not None
        assert living.stdout.readline() == "trains\n"
        killed = time.monotonic()
        living.kill()
        assert living.stdout.read() == ""  # which ends with the last process that could write
        assert time.monotonic() - killed < 10
    assert torchrun("0").communicate()[0] == "moelab: torchrun has died; a rank does not train on alone\n"


LAUNCHER = """
import sys
from pathlib import Path
from moelab.experiment import Experiment
from moelab.launch.torchrun import Process, command

run = Path(sys.argv[1])
with Process(command(Experiment(gpus_per_node=2, hardware="cpu"), run), None) as torchrun:
    torchrun.wait()
"""


def test_ranks_that_still_import_end_with_a_killed_launcher_and_torchrun(tmp_path: Path) -> None:
    """With a TorchTitan whose imports take a minute, as they do from a cold file system."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    slow = "import os, time\nopen(f'{os.environ[\"MOELAB_EXPERIMENT\"]}.{os.getpid()}', 'w')\ntime.sleep(60)\n"
    (tmp_path / "torchtitan" / "train.py").write_text(slow)
    run = tmp_path / "run"
    run.mkdir()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, run], env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_for(lambda: len(list(run.glob("experiment.yaml.*"))) == 2, 120)
        (record,) = (run / directory.LAUNCHES_FOLDER).glob("*")
        torchrun_id = next(one for one, line, _ in processes() if "moelab.launch.loopback" in line and str(run) in line)
        for process in (launcher.pid, torchrun_id):
            os.kill(process, signal.SIGKILL)
        wait_for(lambda: not torchrun.living([record]), 10)
    finally:
        launcher.kill()
        launcher.wait()
        for record in (run / directory.LAUNCHES_FOLDER).glob("*"):
            torchrun.end_processes([record])


@pytest.mark.parametrize("writes", ["write_json", "write_whole"])
def test_a_disk_that_is_full_before_the_ranks_start(runs: Path, monkeypatch: pytest.MonkeyPatch, writes: str) -> None:
    monkeypatch.setattr(local, writes, FULL_DISK)
    done, _ = launch(runs, study_of(BF16, MXFP8))
    assert [end_of(run) for run in done.runs] == [
        (State.FAILED, "the launcher failed: [Errno 28] No space left on device")
    ] * 2
    assert not (done.runs[0].path / RESERVE).exists()


def test_a_disk_without_space_is_refused_and_one_that_fills_ends_the_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, free = "no disk space: the file system of the runs has 0.0 MiB free", iter([0] + [2**40] * 12)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free, 0)))
    with pytest.raises(Refused, match=reason):
        launch(runs, study_of())
    assert list(find(runs)) == []
    done, _ = launch(runs, study_of(), {"bf16_standard/seed0": "hang"})
    assert states(done) == ["failed"]
    assert (done.runs[0].status.reason or "").startswith(reason)
    assert stand_in.processes_of(runs) == []


def test_results_that_cannot_be_written_do_not_undo_the_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moelab.runs.collect.write_json", FULL_DISK)
    done, _ = launch(runs, study_of())
    assert states(done) == ["completed"]
    assert not (done.runs[0].path / "results.json").exists()
    (collected,) = collect(done.runs[0].path)
    assert collected.finished
    assert collected.rows["step"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_hub_that_cannot_be_reached_is_a_refusal(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(Refused, match=r"^dataset c4 cannot be reached from here \(ConnectError\).*use dataset=python"):
        local.stage_data(Experiment(dataset="c4"))


def test_a_line_says_where_a_study_is_and_what_is_left_at_a_steady_pace() -> None:
    """On a clock that the test turns."""
    now, lines = [0.0], list[str]()
    study = make_study("s", {"steps": 10}, [BF16, MXFP8], [0, 1])
    progress = Progress(study, [3], lines.append, clock=lambda: now[0])

    def train(index: int, *, start_s: float, step_s: float, steps: int = 10) -> None:
        progress.start(index)
        now[0] += start_s
        for step in range(1, steps + 1):
            now[0] += step_s
            progress.row({"step": step, "loss": 8.0 - step / 10, "tps": 1234.5})

    train(0, start_s=10.25, step_s=2.5, steps=5)
    assert lines == [
        "s | bf16_standard | seed 0 | step 0/10 | starting",
        "s | bf16_standard | seed 0 | step 1/10 | loss 7.900 | 1,234 tokens/s per rank",
        # Lines are five seconds apart. 7 steps of 2.5 s are left, and two runs of 12.75 s start-up and 10 such steps.
        "s | bf16_standard | seed 0 | step 3/10 | loss 7.700 | 1,234 tokens/s per rank | about 1 min 33 s left",
        "s | bf16_standard | seed 0 | step 5/10 | loss 7.500 | 1,234 tokens/s per rank | about 1 min 28 s left",
    ]
    progress.end("failed: x")
    assert lines[-1] == "s | bf16_standard | seed 0 | step 5/10 | failed: x"
    train(1, start_s=10, step_s=3)
    progress.end("completed")
    train(2, start_s=10, step_s=5, steps=2)
    assert lines[-1].endswith("| about 40 s left")  # 8 steps of 5 s: the fourth run was finished before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_for_the_study_and_one_for_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the test turns: 10 s until the first row, then 2 s a step."""
    terminal, now = Terminal(), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "140")
    study = make_study("s", {"steps": 4}, [BF16, MXFP8], [0])
    bars = Bars(study, [], clock=lambda: now[0])
    for index in (0, 1):
        bars.start(index)
        now[0] += 10
        for step in range(1, 5):
            bars.row({"step": step, "loss": 8.0 - step, "tps": 1234.5})
            now[0] += 2
        bars.end(("completed", "failed: out of memory")[index])
    bars.close()
    shown = terminal.getvalue()
    assert re.search(r"bf16_standard, seed 0  \|[█#]+ +\| step 2 of 4, loss 6\.000, 1,234 tokens/s per rank", shown)
    # Two steps of 2 s of this run; of the next, 10 s until its first row, and 4 steps.
    assert "0 of 2 trainings, about 22 s left" in shown
    assert "s | mxfp8_standard | seed 0 | step 4/4 | failed: out of memory" in shown
    assert shown.rstrip().endswith("2 of 2 trainings, 1 failed")


def test_a_file_has_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of(make_study("s", {"steps": 4}, [BF16], [0]), [], None) as progress:
        progress.start(0)
        progress.end("completed")
    assert capsys.readouterr().err == (
        "s | bf16_standard | seed 0 | step 0/4 | starting\ns | bf16_standard | seed 0 | step 0/4 | completed\n"
    )
