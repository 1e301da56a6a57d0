"""Preflight and health on a real Slurm of three nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from slurm_jobs import TESTS, Site, speak_to, study_of, written

from moelab.cli import main
from moelab.health.measure import first_node
from moelab.health.preflight import check_nodes, preflight
from moelab.health.slow import judge
from moelab.launch.slurm import call
from moelab.machine import version


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


def cluster_of(slurm: SlurmCluster, folder: Path, **fields: Any) -> Any:
    return Site(slurm, folder).profile(variables={"OMP_NUM_THREADS": "1"}, **fields)


def set_up(folder: Path, node: str) -> Path:
    """A shell file for the profile's ``source``: on one node another torchao is found first."""
    metadata = folder / "other" / "torchao-0.17.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.17.0\n")
    file = folder / "set_up.sh"
    other = f'if [ "$SLURMD_NODENAME" = {node} ]; then export PYTHONPATH={folder}/other:$PYTHONPATH; fi\n'
    file.write_text(f"echo 'loading modules, as some do'\n{other}")
    return file


def test_a_node_with_another_version_and_a_set_up_that_fails_are_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    def checked(*source: str) -> tuple[dict[str, str], dict[str, str]]:
        checks = check_nodes(cluster_of(slurm, tmp_path, source=source), None, tmp_path / "runs")
        assert list((tmp_path / "runs").iterdir()) == []
        faults = {one.name: one.found for one in checks if not one.ok and one.name != "open files"}
        return {one.name: one.found for one in checks}, faults

    alike, faults = checked()
    assert faults == {}
    assert alike["versions"].startswith("the same on 3 nodes")
    assert "open files" in alike or alike["each node"].startswith("3 nodes see and write the shared files, agree on")
    _, faults = checked(str(set_up(tmp_path, "n1")))
    assert faults == {"torchao on all nodes": f"n1: 0.17.0; 2 others: {version('torchao')}"}
    _, faults = checked("/nowhere/modules.sh")
    assert faults["nodes"] == "0 of 3 answered"
    assert "/nowhere/modules.sh" in faults["srun"]


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


def test_the_line_that_drains_a_slow_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    measured = {"backend": "nccl", "device": "NVIDIA B200", "ranks": 24, "nodes": ["n0", "n1", "n2"]}
    measured |= {"stage": "finished", "pairs_gb_s": [("n0", "n1", 40.0), ("n0", "n2", 12.0), ("n1", "n2", 11.0)]}
    (line,) = [one.found for one in judge(measured) if one.name == "for an operator"]
    try:
        slurm.run("bash", "-c", line)
        slurm.wait_for(lambda: slurm.states()["n2"].startswith("drain"))
        assert {node for node, state in slurm.states().items() if state != "idle"} == {"n2"}
    finally:
        slurm.resume_node("n2")


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
