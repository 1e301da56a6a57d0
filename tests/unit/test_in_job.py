"""What the first node of a job writes down and tells the script, for every way in which its ranks can end."""

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
from stand_in import step_line

from moelab.experiment import Experiment
from moelab.launch import in_job, node
from moelab.launch.cluster import read_cluster
from moelab.launch.in_job import REQUEUE_CODE, TERMINATED, NodeOfJob, Signals
from moelab.launch.node import Start
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.status import BY_CANCEL, State, Status

STEPS = 4
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
    settings = ["--ports=10000-19999", "--requeues=3", "--checkpoint-interval=0", "--checkpoints-kept=2", *more]
    options = in_job.parse_options([str(run.path), "localhost", *settings])
    place = NodeOfJob(job_id=8, label="7_1", node=0, nodes=2, restarts=restarts)
    return Start(run=run, place=place, options=options, signals=signals)


Account = Callable[..., tuple[int, Status]]


@pytest.fixture
def account(run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Accounts for a start of the run whose ranks do something; the exit code and the status."""
    monkeypatch.setattr(node, "LOG_QUIET_S", 0.01)

    def account(ranks: Ranks, *, restarts: int = 0) -> tuple[int, Status]:
        monkeypatch.setattr(node, "train", ranks)
        return node.account_for(start_of(run, signals, restarts=restarts)), run.status

    return account


def trains(last: int, code: int = 0) -> Ranks:
    def ranks(start: Start, _is_over: Callable[[], object]) -> int:
        start.run.log.write_text("".join(step_line(step, 8.0) for step in range(1, last + 1)))
        return code

    return ranks


def stops(step: int) -> Ranks:
    def ranks(start: Start, is_over: Callable[[], object]) -> int:
        (start.run.path / directory.STOPPED_FILE).write_text(json.dumps({"step": step}))
        return trains(step)(start, is_over)

    return ranks


def is_ended(*, error: str = "", late: bool = False, cancelled: bool = False) -> Ranks:
    """SIGTERM comes while the ranks run: one on the second node failed, time is up, or `moelab cancel` asked."""

    def ranks(start: Start, is_over: Callable[[], object]) -> int:
        if error:
            place = start.logs / "node1" / "7_1-0_abc" / "attempt_0" / "0"
            place.mkdir(parents=True)
            (place / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": {}}}))
        if cancelled:
            start.run.set_status(replace(start.run.status, reason=BY_CANCEL))  # which it writes before it asks Slurm
        if late:
            signal.raise_signal(signal.SIGUSR1)
            assert start.signals.save
        signal.raise_signal(signal.SIGTERM)
        assert is_over()
        assert start.run.status.state is not State.RUNNING  # written before the ranks are waited for
        return TERMINATED

    return ranks


def test_a_stopped_run_is_requeued_and_its_next_start_completes_it(run: RunDir, account: Account) -> None:
    code, status = account(stops(2))
    assert (code, status.state, status.job_id, status.attempts) == (REQUEUE_CODE, State.SUBMITTED, "7_1", 1)
    assert status.reason == f"saved step 2 of {STEPS} before the time limit; requeued"
    first = (run.path / "launch" / "command.sh").read_text()
    code, status = account(trains(STEPS), restarts=1)
    assert (code, status.state, status.attempts) == (0, State.COMPLETED, 2)
    assert (run.path / "launch" / "command.sh").read_text() == first
    assert "--rdzv-id=7_1-1" in (run.path / "launch" / "command-2.sh").read_text()
    for name in ("environment.json", "environment-2.json"):
        assert json.loads((run.path / name).read_text())["hosts"] == 2
    assert (run.path / "results.json").exists()


def test_a_run_is_not_requeued_for_ever(run: RunDir, account: Account) -> None:
    code, status = account(stops(2), restarts=3)
    assert (code, status.state) == (1, State.FAILED)
    assert "requeued 3 times, the limit" in str(status.reason)
    assert f"sbatch --array=1 {run.path}/launch/job.sbatch" in str(status.reason)


CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:23"
ONLY_SLURM_KNOWS = "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"
LATE = "time ran out before a checkpoint was saved: raise signal_s in the cluster profile"


@pytest.mark.parametrize(
    ("ranks", "code", "state", "reason"),
    [
        (trains(2), 1, State.FAILED, f"training ended at step 2 of {STEPS}"),
        (trains(2, code=1), 1, State.FAILED, "torchrun ended with exit code 1; see train.log"),
        (is_ended(error="ValueError: bad"), TERMINATED, State.FAILED, "rank 1: ValueError: bad"),
        (is_ended(), TERMINATED, State.UNKNOWN, ONLY_SLURM_KNOWS),  # never completed
        (is_ended(error=CLOSED), TERMINATED, State.UNKNOWN, ONLY_SLURM_KNOWS),
        (is_ended(late=True), TERMINATED, State.FAILED, LATE),
        (is_ended(cancelled=True), TERMINATED, State.CANCELLED, BY_CANCEL),
    ],
)
def test_a_run_that_did_not_complete_has_its_reason(
    account: Account, ranks: Ranks, code: int, state: State, reason: str
) -> None:
    ended, status = account(ranks)
    assert (ended, status.state, status.reason) == (code, state, reason)


def test_a_port_in_use_moves_the_job_to_another(run: RunDir, signals: Signals, account: Account) -> None:
    port = start_of(run, signals).port
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        code, status = account(trains(STEPS))
    assert (code, status.state) == (REQUEUE_CODE, State.SUBMITTED)
    assert status.reason == f"port {port} of localhost is in use by another program; requeued"
    assert start_of(run, signals, restarts=1).port != port


def test_a_full_disk_ends_the_run(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "no_space", lambda _: "no disk space: 0.0 MiB are free")
    code, status = account(lambda _, is_over: TERMINATED if is_over() else 0)
    assert (code, status.state, status.reason) == (1, State.FAILED, "no disk space: 0.0 MiB are free")


def test_a_launcher_that_breaks_says_so(run: RunDir, account: Account) -> None:
    with pytest.raises(OSError, match="no such program"):
        account(Mock(side_effect=OSError("no such program")))
    assert (run.status.state, run.status.reason) == (State.FAILED, "the launcher failed: no such program")


def test_a_completed_run_is_not_trained_again(run: RunDir, signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    run.set_status(Status(state=State.COMPLETED, attempts=1))
    for name, value in {"SLURM_JOB_ID": "8", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    arguments = [str(run.path), "n0", "--ports=1-2", "--requeues=0", "--checkpoint-interval=0", "--checkpoints-kept=2"]
    assert in_job.main(arguments) == 0
    assert run.status.attempts == 1


def test_what_torchtitan_is_told_beyond_the_experiment(tmp_path: Path, signals: Signals) -> None:
    experiment = Experiment(name="tests", model="16B", nodes=2, gpus_per_node=8, dataset="c4", steps=20)
    run = directory.create(tmp_path, experiment)
    plain = start_of(run, signals).command(experiment).arguments
    assert "--checkpoint.interval=21" in plain  # never, in 20 steps
    assert f"--checkpoint.folder={run.path}/checkpoint" in plain
    more = ["--scratch=/scratch", "--checkpoint-interval=5", "--dataset=c4=/data/c4", "--tokenizer=16B=/data/tokenizer"]
    arguments = start_of(run, signals, *more).command(experiment).arguments
    assert f"--checkpoint.folder=/scratch/{run.name}/checkpoint" in arguments
    assert {"--checkpoint.interval=5", "--dataloader.dataset_path=/data/c4"} <= set(arguments)
    assert "--hf_assets_path=/data/tokenizer" in arguments


# Where the ranks of a job meet


def place(job_id: int = 1, restarts: int = 0, node: int = 0) -> NodeOfJob:
    return NodeOfJob(job_id=job_id, label=str(job_id), node=node, nodes=2, restarts=restarts)


@given(st.integers(1, 67_043_328), st.integers(1, 1_000), st.integers(0, 100), st.integers(0, 100))
def test_two_jobs_never_meet_at_one_port(job: int, apart: int, restarts: int, others: int) -> None:
    cluster = read_cluster("slurm_generic")
    first, last = cluster.first_port, cluster.last_port
    one, other = place(job, restarts).port(first, last), place(job + apart, others).port(first, last)
    assert one != other
    assert all(first <= port <= last for port in (one, other))
    assert place(job, restarts + 1).port(first, last) != one


def test_a_tasks_place_is_read_from_what_srun_sets() -> None:
    srun = {"SLURM_JOB_ID": "8", "SLURM_NODEID": "3", "SLURM_STEP_NUM_NODES": "32"}
    assert NodeOfJob.of(srun) == NodeOfJob(job_id=8, label="8", node=3, nodes=32, restarts=0)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "2"}
    node = NodeOfJob.of({**srun, **array})
    assert (node.label, node.restarts, node.start) == ("7_1", 2, "7_1-2")
    assert {"--node-rank=3", "--rdzv-endpoint=n0:20100"} <= {*node.rendezvous("n0", 20100)}
