"""Jobs of a real Slurm: submitted once and not twice, and followed through cancelling, lost nodes and silence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import program
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_jobs import TESTS, Site, speak_to, study_of, written

from moelab.cli import main
from moelab.errors import Refused
from moelab.launch.local import run_study
from moelab.launch.slurm import SCRIPT_FILE, ticket_of
from moelab.launch.status import cancel, refresh, requeue
from moelab.launch.submit import submit
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State, Status

ENDED_BY_SIGTERM = "ended by SIGTERM: cancelled, preempted, out of time, or a node was lost"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Two nodes without GPUs, whose controller forgets a job soon after its end."""
    settings = {"MinJobAge": "5", "SlurmdTimeout": "6", "MessageTimeout": "3"}
    with slurm_cluster(nodes=2, cpus=4, settings=settings) as started:
        yield started


@pytest.fixture
def site(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The Slurm that moelab asks in this process; no job is left after the test."""
    speak_to(cluster, monkeypatch)
    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)
    yield Site(cluster, tmp_path)
    cluster.cancel_all()


@pytest.fixture
def held(site: Site, request: pytest.FixtureRequest) -> RunDir:
    """A run that has logged two steps and waits for its gate; on one node, unless the test says two."""
    (site.gate / "hold").touch()
    (run,) = site.submit(study_of(nodes=getattr(request, "param", 1)))
    site.slurm.wait_for(lambda: logged(run) == [1, 2], what="two steps")
    assert states(run) == [State.RUNNING]
    return run


on_two_nodes = pytest.mark.parametrize("held", [2], indirect=True)


def logged(run: RunDir) -> list[int]:
    """Every step that was logged, as often as it was."""
    return [int(step) for step in collect_run(run).rows["step"]]


def states(*runs: RunDir) -> list[State]:
    return [status.state for status in refresh(runs)]


def released(site: Site, run: RunDir) -> Status:
    """Open the gate and wait until the queue is empty; the run's status then."""
    (site.gate / "hold").unlink(missing_ok=True)
    site.slurm.wait_for(lambda: not site.slurm.active(), what="the jobs to end")
    return refresh([run])[0]


# Submitting


def test_what_failed_is_submitted_anew_and_the_rest_is_left_alone(site: Site) -> None:
    study = study_of(seeds=(0, 1))
    (site.gate / "fail").touch()
    failed = site.submit(study)
    status = released(site, failed[0])
    assert states(*failed) == [State.FAILED] * 2
    assert "exit code 3" in str(status.reason)
    (site.gate / "fail").unlink()
    again = site.submit(study)
    assert not set(again) & set(failed)
    released(site, again[0])
    assert states(*again) == [State.COMPLETED] * 2


def test_what_waits_or_trains_is_not_trained_beside(site: Site, held: RunDir) -> None:
    with pytest.raises(Refused, match=f"^{held.name} is running as job {held.status.job_id}\n"):
        run_study(study_of(), site.runs)
    assert find(site.runs) == [held]
    assert released(site, held).state is State.COMPLETED
    assert run_study(study_of(), site.runs).trained == 0


KILLED_CLIENT = """
import os, signal, sys
from pathlib import Path
from moelab.experiment_file import read_study
from moelab.launch import slurm, submit
from moelab.launch.cluster import read_cluster

sbatch, (study, cluster, runs, when) = slurm.sbatch, sys.argv[1:]
def killed(script, *, timeout_s):
    if when != "before":
        sbatch(script, timeout_s=timeout_s)
    os.kill(os.getpid(), signal.SIGKILL)

slurm.sbatch = killed
submit.submit(read_study(Path(study)), Path(runs), read_cluster(cluster))
"""


@pytest.mark.parametrize("when", ["before", "after", "its job has ended"])
def test_a_client_killed_around_sbatch(site: Site, when: str) -> None:
    if when != "its job has ended":
        (site.gate / "hold").touch()
    study, known = study_of(), site.jobs()
    command = [sys.executable, "-c", KILLED_CLIENT, *written(site.folder, study, site.profile()), site.runs, when]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = find(site.runs)
    if when == "its job has ended":
        site.slurm.wait_for(lambda: left.status.state is State.COMPLETED)
    again = submit(study, site.runs, site.profile())
    assert {"before": again.submitted, "after": again.found}.get(when, again.completed) == (left,)
    assert {left.status.job_id} == site.jobs() - known
    assert released(site, left).state is State.COMPLETED


def test_an_answer_of_sbatch_that_is_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    program(site.folder, "sbatch", '/usr/bin/sbatch "$@" >&2\nexec sleep 60')
    monkeypatch.setenv("PATH", f"{site.folder}:{os.environ['PATH']}")
    known = site.jobs()
    done = submit(study_of(), site.runs, site.profile(), timeout_s=2)
    assert {run.status.job_id for run in done.submitted} == site.jobs() - known


def test_what_slurm_refuses_stays_prepared_with_its_words_script_and_ticket(site: Site) -> None:
    study = study_of(seeds=(0, 1))
    with pytest.raises(Refused, match=r"^sbatch: .*invalid partition specified: nowhere.*\n.* runs stay prepared$"):
        submit(study, site.runs, site.profile(partition="nowhere"))
    left = tuple(find(site.runs))
    assert [ticket_of(run).task for run in left] == [0, 1]
    for status in refresh(left):
        assert status.state is State.PREPARED
        assert str(status.reason).startswith("not submitted: sbatch: ")
        assert "invalid partition specified: nowhere" in str(status.reason)
    done = submit(study, site.runs, site.profile())
    assert done.submitted == left
    assert {(run.path / SCRIPT_FILE).read_text() for run in left} == set(done.scripts)


def test_a_queue_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(seeds=(0, 1, 2, 3))
    with slurm_cluster(nodes=1, cpus=4, settings={"MaxJobCount": "5", "MinJobAge": "2"}) as full:
        speak_to(full, monkeypatch)
        site = Site(full, tmp_path)
        (site.gate / "hold").touch()
        submit(study_of({"precision": "mxfp8"}, seeds=(0, 1)), tmp_path / "others", site.profile())
        others = site.jobs()
        with pytest.raises(Refused, match="unable to accept job"):
            submit(study, site.runs, site.profile(), timeout_s=3)
        assert [run.status.state for run in find(site.runs)] == [State.PREPARED] * 4
        assert site.jobs() == others
        full.cancel_all()
        full.wait_for(lambda: not site.jobs(), what="room in the queue")
        (site.gate / "hold").unlink()
        assert len(site.submit(study)) == len(find(site.runs)) == 4


def test_a_job_waits_for_another_and_is_cancelled_with_it(site: Site) -> None:
    (site.gate / "hold").touch()
    with pytest.raises(Refused, match="--after 777: Slurm knows no such job"):
        site.submit(study_of(), after="777")
    assert list(find(site.runs)) == []
    (first,) = site.submit(study_of())
    (waiting,) = site.submit(study_of({"routing": "round_robin"}), after=first.status.job_id)
    site.slurm.wait_for(lambda: first.status.state is State.RUNNING)
    # Slurm says why a job waits a little after it has accepted it.
    site.slurm.wait_for(lambda: refresh([waiting])[0].reason == "Slurm: PENDING (Dependency)")
    (site.gate / "fail").touch()
    released(site, first)
    assert states(first, waiting) == [State.FAILED, State.CANCELLED]


def test_the_command_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.gate / "hold").touch()
    study, cluster = written(site.folder, study_of(seeds=(0, 1)), site.profile())
    common = ["submit", str(study), "--cluster", str(cluster), "--runs", str(site.runs)]

    assert main([*common, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=s\n")
    assert not site.runs.exists()
    assert site.slurm.active() == []

    assert main([*common, "--cluster-set", "time_limit_minutes=7", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["did"] for row in printed["runs"]] == ["submitted"] * 2
    assert "#SBATCH --time=7\n" in printed["scripts"][0]

    before = site.jobs()
    assert main(common) == 3
    refused = capsys.readouterr().err
    assert "moelab cancel" in refused
    for row in printed["runs"]:
        assert re.search(rf"{row['run']} is (running|submitted) as job {row['job_id']}$", refused, re.M)
    assert site.jobs() == before
    site.slurm.wait_for(lambda: all(run.status.state is State.RUNNING for run in find(site.runs)))

    assert main(["status", str(site.runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["status"], row["job_id"]) for row in rows] == [("running", run["job_id"]) for run in printed["runs"]]
    assert main(["requeue", printed["runs"][0]["path"]]) == 0
    assert "submitted: requeued by `moelab requeue`" in capsys.readouterr().out
    assert main(["cancel", str(site.runs)]) == 0
    assert capsys.readouterr().out.count("cancelled: by `moelab cancel`") == 2
    site.slurm.wait_for(lambda: not site.slurm.active())
    assert main(["status", str(site.runs)]) == 0
    assert capsys.readouterr().out.count(": cancelled: ") == 2


# Faults


@on_two_nodes
def test_jobs_that_are_cancelled_outside(site: Site, held: RunDir) -> None:
    (waiting,) = submit(study_of(nodes=2), site.folder / "other", site.profile()).submitted
    site.slurm.wait_for(lambda: str(refresh([waiting])[0].reason).startswith("Slurm: PENDING ("))
    site.slurm.run("scancel", str(waiting.status.job_id))
    assert states(held, waiting) == [State.RUNNING, State.CANCELLED]
    site.slurm.run("scancel", str(held.status.job_id))
    site.slurm.wait_for(lambda: not site.slurm.active(), what="the jobs to end")  # held: a rank that lives would train
    status = refresh([held])[0]
    assert (status.state, status.reason) == (State.CANCELLED, "Slurm: CANCELLED")
    assert logged(held) == [1, 2]
    assert (held.path / "results.json").exists()


@on_two_nodes
def test_nodes_that_are_lost_in_mid_run(site: Site, held: RunDir) -> None:
    """The first node loses its power, with the job's script; of the second only slurmd dies, and its ranks run on."""
    site.slurm.kill_node("n0")
    site.slurm.kill_slurmd("n1")
    try:
        site.slurm.wait_for(lambda: states(held) == [State.SUBMITTED], what="the job to be requeued")
        assert "down*" in site.slurm.states().values()
    finally:
        site.slurm.return_nodes("n0", "n1")
    status = released(site, held)
    assert (status.state, status.attempts) == (State.COMPLETED, 2)
    assert logged(held) == [1, 2, 3, 4]
    assert site.slurm.job(str(status.job_id))["NodeList"] == "n[0-1]"


@on_two_nodes
def test_a_drained_node_takes_no_job_and_loses_none(site: Site, held: RunDir) -> None:
    site.slurm.drain_node("n1", reason="straggler")
    try:
        (waiting,) = submit(study_of(nodes=2), site.folder / "other", site.profile()).submitted
        (site.gate / "hold").unlink()
        site.slurm.wait_for(lambda: states(held) == [State.COMPLETED])
        assert logged(held) == [1, 2, 3, 4]
        site.slurm.wait_for(lambda: site.slurm.states()["n1"] == "drain")
        site.slurm.wait_for(lambda: "DRAINED" in str(refresh([waiting])[0].reason), what="Slurm to say why it waits")
        assert states(waiting) == [State.SUBMITTED]
    finally:
        site.slurm.resume_node("n1")
    assert released(site, waiting).state is State.COMPLETED


def test_a_controller_that_does_not_answer(site: Site, held: RunDir) -> None:
    before = held.status
    site.slurm.stop_controller()
    try:
        (seen,) = refresh([held])
    finally:
        site.slurm.start_controller()
    assert (seen.state, seen.job_id) == (State.RUNNING, before.job_id)
    assert str(seen.reason).startswith("as last seen; squeue: ")
    assert held.status == before
    assert released(site, held).state is State.COMPLETED


def test_without_accounting_an_end_that_slurm_has_forgotten_is_unknown(site: Site, held: RunDir) -> None:
    assert "disabled" in site.slurm.run("sh", "-c", "sacct 2>&1", check=False)
    number = str(held.status.job_id)
    site.slurm.run("scancel", number)
    site.slurm.wait_for(lambda: number not in site.jobs(), what="the job to be forgotten")
    assert [(status.state, status.reason) for status in refresh([held])] == [(State.UNKNOWN, ENDED_BY_SIGTERM)]
    with pytest.raises(Refused, match="Slurm no longer knows the job of"):
        requeue([held])
    (site.gate / "hold").unlink()
    assert held not in site.submit(study_of())


def test_a_cancelled_job_is_requeued_and_goes_on_where_it_was(site: Site, held: RunDir) -> None:
    assert [status.state for status in cancel([held])] == [State.CANCELLED]
    site.slurm.wait_for(lambda: not site.slurm.active())
    assert [status.state for status in requeue([held])] == [State.SUBMITTED]
    status = released(site, held)
    assert (status.state, status.attempts) == (State.COMPLETED, 2)
    assert logged(held) == [1, 2, 3, 4]
