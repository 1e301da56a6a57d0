"""What the first node of a job writes down and tells the script, for ends that no Slurm brings about at will."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_support import add_launch

from moelab.experiment import Experiment
from moelab.launch import in_job, node
from moelab.launch.cluster import keep_cluster, read_cluster
from moelab.launch.in_job import REQUEUE_CODE, TERMINATED, NodeOfJob, Signals
from moelab.launch.node import Start
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.status import State, Status

STEPS = 4
SETTINGS = ("first_port=10000", "last_port=19999", "requeues=3")
SRUN = {"SLURM_JOB_ID": "8", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}
Ranks = Callable[[Start, Callable[[], object]], int]


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = directory.create(tmp_path, Experiment(name="tests", nodes=2, gpus_per_node=1, steps=STEPS, hardware="cpu"))
    made.log.write_text("")
    return made


def start_of(run: RunDir, signals: Signals, *more: str, restarts: int = 0) -> Start:
    cluster = read_cluster("slurm_generic", ["checkpoint_interval_steps=0", *SETTINGS, *more])
    place = NodeOfJob(job_id=8, label="7_1", node=0, nodes=2, restarts=restarts)
    return Start(run=run, place=place, cluster=cluster, host="localhost", signals=signals, folder=run.path.parent)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "LOG_QUIET_S", 0.01)


def account(start: Start, ranks: Ranks) -> tuple[int, State, str | None]:
    """Account for a start whose ranks do something; the exit code, the state and its reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "train", ranks)
        code = node.account_for(start)
    return code, start.run.status.state, start.run.status.reason


def trains(last: int, *, stopped: bool = False) -> Ranks:
    """Ranks that log so many steps; stopped, they have saved the last."""

    def ranks(start: Start, _is_over: Callable[[], object]) -> int:
        add_launch(start.run, dict.fromkeys(range(1, last + 1), 8.0))
        if stopped:
            (start.run.path / directory.STOPPED_FILE).write_text(json.dumps({"step": last}))
        return 0

    return ranks


def is_ended(*, error: str = "", late: bool = False) -> Ranks:
    """SIGTERM comes while the ranks run: one on the second node failed, or time is up."""

    def ranks(start: Start, is_over: Callable[[], object]) -> int:
        if error:
            place = start.logs / "node1" / "7_1-0_abc" / "attempt_0" / "0"
            place.mkdir(parents=True)
            (place / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": {}}}))
        if late:
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert is_over()
        assert start.run.status.state is not State.RUNNING  # written before the ranks are waited for
        return TERMINATED

    return ranks


CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:23"
GAVE_UP = "DistBackendError: NET/IB : Got completion from peer 10.0.0.7<41> with status=12 opcode=0 len=0"
ONLY_SLURM_KNOWS = "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"
LATE = "time ran out before a checkpoint was saved: raise signal_s in the cluster profile"
TOO_OFTEN = (
    f"saved step 2 of {STEPS} before the time limit; requeued 3 times, the limit in the cluster profile; "
    "`sbatch --array=1 RUN/launch/job.sbatch` continues from there"
)


@pytest.mark.parametrize(
    ("ranks", "restarts", "code", "state", "reason"),
    [
        (trains(2, stopped=True), 3, 1, State.FAILED, TOO_OFTEN),
        (trains(2), 0, 1, State.FAILED, f"training ended at step 2 of {STEPS}"),
        (is_ended(error="ValueError: bad"), 0, TERMINATED, State.FAILED, "rank 1: ValueError: bad"),
        (is_ended(error=CLOSED), 0, TERMINATED, State.UNKNOWN, ONLY_SLURM_KNOWS),  # never completed
        (is_ended(error=GAVE_UP), 0, TERMINATED, State.UNKNOWN, ONLY_SLURM_KNOWS),
        (is_ended(late=True), 0, TERMINATED, State.FAILED, LATE),
    ],
)
def test_a_run_that_did_not_complete_has_its_reason(
    run: RunDir, signals: Signals, ranks: Ranks, restarts: int, code: int, state: State, reason: str
) -> None:
    ended = account(start_of(run, signals, restarts=restarts), ranks)
    assert ended == (code, state, reason.replace("RUN", str(run.path)))


def test_a_port_in_use_moves_the_job_to_another(run: RunDir, signals: Signals) -> None:
    start = start_of(run, signals)
    with socket.socket() as other:
        other.bind(("", start.port))
        other.listen()
        in_use = f"port {start.port} of localhost is in use by another program; requeued"
        assert account(start, trains(STEPS)) == (REQUEUE_CODE, State.SUBMITTED, in_use)
    assert not (run.path / "results.json").exists(), "it goes on"


def test_no_other_user_can_ask_a_job_to_stop(run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Start] = []

    def train(start: Start, _is_over: Callable[[], object]) -> int:
        start.stop_file.touch()
        assert start.stop_file.parent.stat().st_mode & 0o777 == 0o700
        return 1 if starts.append(start) else 0

    monkeypatch.setattr(node, "train", train)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    keep_cluster(read_cluster("slurm_generic", SETTINGS), run.path)
    for _ in range(2):
        in_job.main([str(run.path), "localhost"])
    assert len({start.stop_file for start in starts}) == 2  # nobody can foresee the next one
    assert not any(start.stop_file.parent.exists() for start in starts)


def test_a_full_disk_ends_the_run(run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "no disk space: 0.0 MiB are free"
    monkeypatch.setattr(node, "no_space", lambda _: full)
    ended = account(start_of(run, signals), lambda _, is_over: TERMINATED if is_over() else 0)
    assert ended == (1, State.FAILED, full)


def test_a_launcher_that_breaks_says_so(run: RunDir, signals: Signals) -> None:
    with pytest.raises(OSError, match="no such program"):
        account(start_of(run, signals), Mock(side_effect=OSError("no such program")))
    assert (run.status.state, run.status.reason) == (State.FAILED, "the launcher failed: no such program")


def test_a_completed_run_is_not_trained_again(run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    run.set_status(Status(state=State.COMPLETED, attempts=1))
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert in_job.main([str(run.path), "n0"]) == 0
    assert run.status.attempts == 1


def test_what_torchtitan_is_told_beyond_the_experiment(tmp_path: Path, signals: Signals) -> None:
    experiment = Experiment(name="tests", model="16B", nodes=2, gpus_per_node=8, dataset="c4", steps=20)
    run = directory.create(tmp_path, experiment)
    more = ["scratch=/scratch", "checkpoint_interval_steps=5", "datasets.c4=/data/c4", "tokenizers.16B=/data/tokenizer"]
    command = start_of(run, signals).command(experiment)
    assert "HF_HUB_OFFLINE" not in command.variables  # C4 is streamed
    plain, arguments = command.arguments, start_of(run, signals, *more).command(experiment).arguments
    # An interval of 21 is never, in 20 steps.
    assert {"--checkpoint.interval=21", f"--checkpoint.folder={run.path}/checkpoint"} <= set(plain)
    assert {
        f"--checkpoint.folder=/scratch/{run.name}/checkpoint",
        "--checkpoint.interval=5",
        "--dataloader.dataset_path=/data/c4",
        "--hf_assets_path=/data/tokenizer",
    } <= set(arguments)
    held_out = "--validator.dataloader.dataset_path=/data/c4"
    assert held_out not in arguments
    validated = directory.create(tmp_path, experiment.model_copy(update={"validate_every": 10}))
    assert held_out in start_of(validated, signals, *more).command(validated.experiment).arguments
    # A folder of text has its own tokenizer, and is where the experiment says.
    own = directory.create(tmp_path, experiment.model_copy(update={"dataset": "my/text"}))
    command = start_of(own, signals, *more).command(own.experiment)
    assert not [one for one in command.arguments if "dataset_path" in one or "hf_assets_path" in one]
    assert command.variables["HF_HUB_OFFLINE"] == "1"


@given(st.integers(1, 67_043_328), st.integers(1, 1_000), st.integers(0, 100), st.integers(0, 100))
def test_two_jobs_never_meet_at_one_port_nor_two_starts_of_one(
    job: int, apart: int, restarts: int, others: int
) -> None:
    cluster = read_cluster("slurm_generic")
    ports = cluster.first_port, cluster.last_port
    first = NodeOfJob(job_id=job, label="", node=0, nodes=2, restarts=restarts)
    other, later = replace(first, job_id=job + apart, restarts=others), replace(first, restarts=restarts + 1)
    assert first.port(*ports) not in (other.port(*ports), later.port(*ports))
    assert ports[0] <= first.port(*ports) <= ports[1]
