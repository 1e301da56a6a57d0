"""Preflight, health and drain on a real Slurm of three nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_jobs import TESTS, profile, speak_to, study_of, written

from moelab.cli import main
from moelab.health.measure import first_node
from moelab.health.preflight import check_nodes, preflight
from moelab.launch.slurm import call
from moelab.launch.status import drain, requeue_without
from moelab.machine import version

pytestmark = pytest.mark.slurm

SLEEPER = "#!/bin/sh\n#SBATCH --requeue\n#SBATCH --output=/dev/null\nsleep 600\n"


@pytest.fixture(scope="module")
def three() -> Iterator[SlurmCluster]:
    """Three nodes without GPUs, which settle soon after a requeue."""
    with slurm_cluster(nodes=3, cpus=4) as started:
        yield started


@pytest.fixture
def slurm(three: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The same, as the Slurm that moelab asks in this process, whose variables srun hands on."""
    speak_to(three, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)
    yield three
    three.cancel_all()


def odd_node(folder: Path, node: str) -> Path:
    """A shell file for the profile's ``source``: on one node another torchao is found first."""
    metadata = folder / "other" / "torchao-0.17.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.17.0\n")
    file = folder / "set_up.sh"
    file.write_text(
        "echo 'loading modules, as some do'\n"
        f'if [ "$SLURMD_NODENAME" = {node} ]; then export PYTHONPATH={folder}/other:$PYTHONPATH; fi\n'
    )
    return file


def cluster_of(slurm: SlurmCluster, folder: Path, **fields: Any) -> Any:
    return profile(slurm, folder, **{"variables": {"OMP_NUM_THREADS": "1"}, **fields})


def faults(found: Any) -> dict[str, str]:
    return {one.name: one.found for one in found if not one.ok}


def test_a_node_with_another_version_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    alike = check_nodes(cluster_of(slurm, tmp_path), None, tmp_path / "runs")
    assert {name for name in faults(alike) if name != "open files"} == set()
    named = {one.name: one.found for one in alike}
    assert named["versions"].startswith("the same on 3 nodes")
    assert named["clocks"].startswith("within ")
    assert named["shared files"] == "3 nodes see and write them"
    other = cluster_of(slurm, tmp_path, source=(str(odd_node(tmp_path, "n1")),))
    assert faults(check_nodes(other, None, tmp_path / "runs"))["torchao on all nodes"] == (
        f"n1: 0.17.0; 2 others: {version('torchao')}"
    )
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_set_up_that_fails_on_every_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    broken = cluster_of(slurm, tmp_path, source=("/nowhere/modules.sh",))
    found = faults(check_nodes(broken, None, tmp_path / "runs"))
    assert found["nodes"] == "0 of 3 answered"
    assert "/nowhere/modules.sh" in found["srun"]


def test_inside_a_job_its_own_nodes_report(slurm: SlurmCluster, tmp_path: Path) -> None:
    study, cluster = written(tmp_path, study_of(nodes=2, ep=4), cluster_of(slurm, tmp_path))
    doctor = f"{sys.executable} -m moelab doctor --cluster {cluster} --file {study} --runs {tmp_path}/runs"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --output={tmp_path}/said\n"
        f"{doctor} --nodes --json >{tmp_path}/out\necho $? >{tmp_path}/code\n"
    )
    job = slurm.run("sbatch", "--parsable", script)
    slurm.wait_for_state(job, "COMPLETED", "FAILED")
    found = json.loads((tmp_path / "out").read_text())
    assert (tmp_path / "code").read_text().strip() == "0", (tmp_path / "said").read_text()
    assert any(one["found"].startswith("the same on 2 nodes") for one in found["nodes"])


def test_slurm_is_asked_whether_it_would_take_the_script(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(nodes=2, ep=4)
    taken = preflight(cluster_of(slurm, tmp_path), study, tmp_path / "runs", ask_nodes=False)
    assert taken.exit_code == 0
    assert taken.here[-1].found == "Slurm would accept 1 script(s)"
    files = written(tmp_path, study, cluster_of(slurm, tmp_path, partition="nowhere"))
    arguments = ["doctor", f"--file={files[0]}", f"--cluster={files[1]}", f"--runs={tmp_path}/runs", "--json"]
    assert main(arguments) == 1
    here = {one["name"]: one for one in json.loads(capsys.readouterr().out)["here"]}
    assert here["sbatch --test-only"]["severity"] == "error"
    assert "invalid partition specified: nowhere" in here["sbatch --test-only"]["found"]
    assert not (tmp_path / "runs").exists()
    assert slurm.active() == []


def node_of(slurm: SlurmCluster, job: str) -> str:
    return slurm.wait_for_state(job, "RUNNING")["NodeList"]


def sleeper(slurm: SlurmCluster, folder: Path) -> str:
    script = folder / "sleep.sh"
    script.write_text(SLEEPER)
    return slurm.run("sbatch", "--parsable", script)


def test_a_drained_node_gets_no_job_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = sleeper(slurm, tmp_path)
    bad = node_of(slurm, job)
    drain([bad], "Xid 79 on GPU 3; see $(ticket)")
    assert "Reason=Xid 79 on GPU 3; see $(ticket)" in slurm.run("scontrol", "show", "node", bad)
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "RUNNING")
    assert node_of(slurm, job) != bad
    assert slurm.states()[bad].startswith("drain")
    slurm.resume_node(bad)


def test_without_an_operators_rights_the_job_is_kept_away(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = sleeper(slurm, tmp_path)
    bad = node_of(slurm, job)
    requeue_without(job, [bad])
    slurm.wait_for(lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "RUNNING")
    assert node_of(slurm, job) != bad
    assert slurm.job(job)["ExcNodeList"] == bad
    assert slurm.states()[bad] == "idle"


@pytest.mark.parametrize("text", ["gpu[001-003,007]", "gpu[7,009],login1", "rack[0-1]n[08-10]", "a[1-2][3-4]", "x"])
def test_the_first_node_is_the_one_that_scontrol_names_first(slurm: SlurmCluster, text: str) -> None:
    assert slurm.run("scontrol", "show", "hostnames", text).split()[0] == first_node(text)


def test_health_of_two_nodes_by_srun(slurm: SlurmCluster, tmp_path: Path) -> None:
    output = tmp_path / "health.json"
    program = [sys.executable, "-m", "moelab.health.measure", f"--output={output}"]
    said = call("srun", "--nodes=2", "--ntasks-per-node=1", *program)
    assert "processes on CPUs" in said
    found = json.loads(output.read_text())
    assert found["stage"] == "finished"
    assert len(found["nodes"]) == 2
    assert len(found["pairs_gb_s"]) == 1
