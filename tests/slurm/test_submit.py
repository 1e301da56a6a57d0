"""Submitting to a real Slurm: once and not twice, whatever happened in between; with its words when it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import program
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_jobs import TESTS, profile, speak_to, study_of, written

from moelab.cli import main
from moelab.errors import Refused
from moelab.launch.status import refresh
from moelab.launch.submit import submit
from moelab.runs.directory import find
from moelab.runs.status import State

pytestmark = pytest.mark.slurm

KILLED_CLIENT = """
import os, signal, sys
from pathlib import Path
from moelab.experiment_file import read_study
from moelab.launch import submit as module
from moelab.launch.cluster import read_cluster
from moelab.launch import slurm

sbatch = slurm.sbatch
def killed(script, *, timeout_s):
    if sys.argv[4] == "after":
        sbatch(script, timeout_s=timeout_s)
    os.kill(os.getpid(), signal.SIGKILL)

slurm.sbatch = killed
module.submit(read_study(Path(sys.argv[1])), Path(sys.argv[2]), read_cluster(sys.argv[3]))
"""


def jobs_of(cluster: SlurmCluster) -> list[str]:
    """Every job that was ever submitted to it and is remembered."""
    return cluster.run("squeue", "-h", "-r", "-t", "all", "-o", "%i").splitlines()


def killed_client(tmp_path: Path, files: tuple[Path, Path], when: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    arguments = [sys.executable, "-c", KILLED_CLIENT, str(files[0]), str(tmp_path / "runs"), str(files[1]), when]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_what_failed_is_submitted_anew_and_the_rest_is_left_alone(
    asked: SlurmCluster, tmp_path: Path, gate: Path
) -> None:
    study, cluster, runs = study_of({"precision": "bf16"}, seeds=(0, 1)), profile(asked, gate), tmp_path / "runs"
    (gate / "fail").touch()
    failed = submit(study, runs, cluster).submitted
    asked.wait_for(lambda: not asked.active())
    states = refresh(failed)
    assert [status.state for status in states] == [State.FAILED] * 2
    assert "exit code 3" in str(states[0].reason)
    (gate / "fail").unlink()
    again = submit(study, runs, cluster)
    assert not set(again.submitted) & set(failed)
    asked.wait_for(lambda: not asked.active())
    assert [status.state for status in refresh(again.submitted)] == [State.COMPLETED] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_client_killed_around_sbatch(asked: SlurmCluster, tmp_path: Path, gate: Path, when: str) -> None:
    (gate / "hold").touch()
    study, cluster, runs = study_of(), profile(asked, gate), tmp_path / "runs"
    known = jobs_of(asked)
    killed_client(tmp_path, written(tmp_path, study, cluster), when)
    (left,) = find(runs)
    done = submit(study, runs, cluster)
    assert (done.submitted, done.adopted) == (((left,), ()) if when == "before" else ((), (left,)))
    (job,) = set(jobs_of(asked)) - set(known)
    assert left.status.job_id == job
    (gate / "hold").unlink()
    asked.wait_for(lambda: not asked.active())
    assert refresh([left])[0].state is State.COMPLETED


def test_a_job_is_adopted_although_it_ended_before_anyone_looked(
    asked: SlurmCluster, tmp_path: Path, gate: Path
) -> None:
    study, cluster = study_of(), profile(asked, gate)
    killed_client(tmp_path, written(tmp_path, study, cluster), "after")
    asked.wait_for(lambda: not asked.active())
    (left,) = find(tmp_path / "runs")
    assert left.status.state is State.COMPLETED
    assert submit(study, tmp_path / "runs", cluster).completed == (left,)


def test_an_answer_of_sbatch_that_is_lost(
    asked: SlurmCluster, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "sbatch", '/usr/bin/sbatch "$@" >&2\nexec sleep 60')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    known = jobs_of(asked)
    done = submit(study_of(), tmp_path / "runs", profile(asked, gate), timeout_s=2)
    (job,) = set(jobs_of(asked)) - set(known)
    assert [run.status.job_id for run in done.submitted] == [job]


def test_slurm_s_own_words_when_it_refuses(asked: SlurmCluster, tmp_path: Path, gate: Path) -> None:
    study, runs = study_of(), tmp_path / "runs"
    with pytest.raises(Refused, match="invalid partition specified: nowhere"):
        submit(study, runs, profile(asked, gate, partition="nowhere"))
    (left,) = find(runs)
    assert left.status.state is State.PREPARED
    assert "invalid partition specified: nowhere" in str(left.status.reason)
    assert submit(study, runs, profile(asked, gate)).submitted == (left,)


def test_a_queue_that_is_full(tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gate / "hold").touch()
    study, runs = study_of(seeds=(0, 1, 2, 3)), tmp_path / "runs"
    with slurm_cluster(nodes=1, cpus=4, settings={"MaxJobCount": "5", "MinJobAge": "2"}) as full:
        speak_to(full, monkeypatch)
        cluster = profile(full, gate)
        others = submit(study_of({"precision": "mxfp8"}, seeds=(0, 1)), tmp_path / "others", cluster)
        with pytest.raises(Refused, match="unable to accept job"):
            submit(study, runs, cluster, timeout_s=3)
        assert [run.status.state for run in find(runs)] == [State.PREPARED] * 4
        ours = [
            one for one in full.active() if one.split("_")[0] != str(others.submitted[0].status.job_id).split("_")[0]
        ]
        assert ours == []
        full.cancel_all()
        full.wait_for(lambda: not jobs_of(full), what="room in the queue")
        (gate / "hold").unlink()
        done = submit(study, runs, cluster)
        assert len(done.submitted) == len(list(find(runs))) == 4


def test_a_job_waits_for_another_and_is_cancelled_with_it(asked: SlurmCluster, tmp_path: Path, gate: Path) -> None:
    (gate / "hold").touch()
    cluster, runs = profile(asked, gate), tmp_path / "runs"
    with pytest.raises(Refused, match="--after 777: Slurm knows no such job"):
        submit(study_of(), runs, cluster, after="777")
    assert list(find(runs)) == []
    (first,) = submit(study_of(), runs, cluster).submitted
    second = study_of({"precision": "bf16", "routing": "round_robin"})
    (waiting,) = submit(second, runs, cluster, after=first.status.job_id).submitted
    asked.wait_for(lambda: first.status.state is State.RUNNING)
    # Slurm says why a job waits a little after it has accepted it.
    asked.wait_for(lambda: refresh([waiting])[0].reason == "Slurm: PENDING (Dependency)")
    (gate / "fail").touch()
    (gate / "hold").unlink()
    asked.wait_for(lambda: not asked.active())
    states = refresh([first, waiting])
    assert [status.state for status in states] == [State.FAILED, State.CANCELLED]


def test_the_command_line(asked: SlurmCluster, tmp_path: Path, gate: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (gate / "hold").touch()
    study, cluster = written(tmp_path, study_of(seeds=(0, 1)), profile(asked, gate))
    runs = tmp_path / "runs"
    common = [str(study), "--cluster", str(cluster), "--runs", str(runs)]

    assert main(["submit", *common, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=s\n")
    assert not runs.exists()
    assert asked.active() == []

    assert main(["submit", *common, "--cluster-set", "time_limit_minutes=7", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["did"] for row in printed["runs"]] == ["submitted"] * 2
    assert "#SBATCH --time=7\n" in printed["scripts"][0]

    before = jobs_of(asked)
    asked.wait_for(lambda: refresh(find(runs)[:1])[0].state is State.RUNNING)
    assert main(["submit", *common]) == 3
    told = capsys.readouterr().err
    assert "moelab cancel" in told
    for row in printed["runs"]:
        assert re.search(rf"{row['run']} is (running|submitted) as job {row['job_id']}$", told, re.M)
    assert jobs_of(asked) == before
    asked.wait_for(lambda: all(run.status.state is State.RUNNING for run in find(runs)))

    assert main(["status", str(runs), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [(row["status"], row["job_id"]) for row in rows] == [("running", run["job_id"]) for run in printed["runs"]]
    first = Path(printed["runs"][0]["path"])
    assert main(["requeue", str(first)]) == 0
    assert "submitted: requeued by `moelab requeue`" in capsys.readouterr().out
    assert main(["cancel", str(runs)]) == 0
    assert capsys.readouterr().out.count("cancelled: by `moelab cancel`") == 2
    asked.wait_for(lambda: not asked.active())
    assert main(["status", str(runs)]) == 0
    assert capsys.readouterr().out.count(": cancelled: ") == 2
