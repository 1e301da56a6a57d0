"""What becomes of runs when jobs are cancelled, nodes are lost or drained, and Slurm forgets or does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_jobs import profile, study_of

from moelab.errors import Refused
from moelab.launch.status import cancel, refresh, requeue
from moelab.launch.submit import submit
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.status import State, Status

pytestmark = pytest.mark.slurm


@pytest.fixture
def held(asked: SlurmCluster, tmp_path: Path, gate: Path, request: pytest.FixtureRequest) -> RunDir:
    """A run that has logged two steps and waits for its gate; on one node, unless the test says two."""
    (gate / "hold").touch()
    nodes = getattr(request, "param", 1)
    (run,) = submit(study_of(nodes=nodes), tmp_path / "runs", profile(asked, gate)).submitted
    asked.wait_for(lambda: logged(run) == [1, 2], what="two steps")
    assert refresh([run])[0].state is State.RUNNING
    return run


def logged(run: RunDir) -> list[int]:
    """Every step that was logged, as often as it was."""
    return [int(step) for step in collect_run(run).rows["step"]]


def states(*runs: RunDir) -> list[State]:
    return [status.state for status in refresh(runs)]


def ends(cluster: SlurmCluster, run: RunDir) -> Status:
    cluster.wait_for(lambda: not cluster.active(), what="the job to end")
    return refresh([run])[0]


def forget(cluster: SlurmCluster, run: RunDir) -> None:
    """Wait until the controller has forgotten a job."""
    job_id = str(run.status.job_id)
    cluster.wait_for(lambda: not cluster.run("scontrol", "show", "job", job_id, check=False), what="it to be forgotten")


def test_a_running_job_cancelled_outside(asked: SlurmCluster, held: RunDir) -> None:
    asked.run("scancel", str(held.status.job_id))
    status = ends(asked, held)
    assert (status.state, status.reason) == (State.CANCELLED, "Slurm: CANCELLED")
    assert logged(held) == [1, 2]
    assert (held.path / "metrics.parquet").exists()


@pytest.mark.parametrize("held", [2], indirect=True)
def test_a_waiting_job_cancelled_outside(asked: SlurmCluster, held: RunDir, tmp_path: Path, gate: Path) -> None:
    (waiting,) = submit(study_of(nodes=2), tmp_path / "other", profile(asked, gate)).submitted
    asked.wait_for(lambda: str(refresh([waiting])[0].reason).startswith("Slurm: PENDING ("))
    asked.run("scancel", str(waiting.status.job_id))
    assert states(held, waiting) == [State.RUNNING, State.CANCELLED]


@pytest.mark.parametrize("held", [2], indirect=True)
def test_nodes_that_are_lost_in_mid_run(asked: SlurmCluster, held: RunDir, gate: Path) -> None:
    """The first node loses its power, with the job's script; of the second only slurmd dies, and its ranks run on."""
    asked.kill_node("n0")
    asked.kill_slurmd("n1")
    try:
        asked.wait_for(lambda: refresh([held])[0].state is State.SUBMITTED, what="the job to be requeued")
        assert "down*" in asked.states().values()
    finally:
        asked.return_nodes("n0", "n1")
    (gate / "hold").unlink()
    status = ends(asked, held)
    assert (status.state, status.attempts) == (State.COMPLETED, 2)
    assert logged(held) == [1, 2, 3, 4]
    assert asked.job(str(status.job_id))["NodeList"] == "n[0-1]"


@pytest.mark.parametrize("held", [2], indirect=True)
def test_a_drained_node_takes_no_job_and_loses_none(
    asked: SlurmCluster, held: RunDir, tmp_path: Path, gate: Path
) -> None:
    asked.drain_node("n1", reason="straggler")
    try:
        (waiting,) = submit(study_of(nodes=2), tmp_path / "other", profile(asked, gate)).submitted
        (gate / "hold").unlink()
        asked.wait_for(lambda: states(held) == [State.COMPLETED])
        assert logged(held) == [1, 2, 3, 4]
        asked.wait_for(lambda: asked.states()["n1"] == "drain")
        asked.wait_for(lambda: "DRAINED" in str(refresh([waiting])[0].reason), what="Slurm to say why it waits")
        assert states(waiting) == [State.SUBMITTED]
    finally:
        asked.resume_node("n1")
    assert ends(asked, waiting).state is State.COMPLETED


def test_a_controller_that_does_not_answer(asked: SlurmCluster, held: RunDir, gate: Path) -> None:
    before = held.status
    asked.stop_controller()
    try:
        (seen,) = refresh([held])
    finally:
        asked.start_controller()
    assert (seen.state, seen.job_id) == (State.RUNNING, before.job_id)
    assert str(seen.reason).startswith("as last seen; squeue: ")
    assert held.status == before
    (gate / "hold").unlink()
    assert ends(asked, held).state is State.COMPLETED


def test_without_accounting_what_nobody_saw_is_unknown(asked: SlurmCluster, tmp_path: Path, gate: Path) -> None:
    """Of two runs cancelled outside and forgotten, the completion log has the one whose own number was ever seen."""
    assert "disabled" in asked.run("sh", "-c", "sacct 2>&1", check=False)
    (gate / "hold").touch()
    study, cluster, runs = study_of(seeds=(0, 1)), profile(asked, gate), tmp_path / "runs"
    seen, unseen = submit(study, runs, cluster).submitted
    asked.wait_for(lambda: logged(seen) == logged(unseen) == [1, 2], what="two steps of both")
    assert states(seen) == [State.RUNNING]
    asked.run("scancel", str(seen.status.job_id), str(unseen.status.job_id))
    forget(asked, seen)
    forget(asked, unseen)
    first, second = refresh([seen, unseen])
    assert (first.state, first.reason) == (State.CANCELLED, "Slurm: CANCELLED")
    assert second.state is State.UNKNOWN
    assert second.reason == "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"
    with pytest.raises(Refused, match="Slurm no longer knows the job of"):
        requeue([seen, unseen])
    (gate / "hold").unlink()
    again = submit(study, runs, cluster).submitted
    assert not set(again) & {seen, unseen}


def test_a_cancelled_job_is_requeued_and_goes_on_where_it_was(asked: SlurmCluster, held: RunDir, gate: Path) -> None:
    (status,) = cancel([held])
    assert status.state is State.CANCELLED
    asked.wait_for(lambda: not asked.active())
    (gate / "hold").unlink()
    (status,) = requeue([held])
    assert status.state is State.SUBMITTED
    status = ends(asked, held)
    assert (status.state, status.attempts) == (State.COMPLETED, 2)
    assert logged(held) == [1, 2, 3, 4]
