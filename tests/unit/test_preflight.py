"""Preflight on made-up clusters: reports of nodes, studies that do not fit, and data that is not there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from nvidia_smi_support import with_files
from processes import program
from run_support import make_run

from moelab.cli import main
from moelab.experiment import Experiment
from moelab.experiment_file import Study, read_study
from moelab.finding import Finding
from moelab.hardware import gpu_of
from moelab.health.node import main as node_report
from moelab.health.preflight import Preflight, compare, node_script, preflight
from moelab.launch.cluster import ClusterProfile, read_cluster
from moelab.launch.requirements import (
    STREAMING_NODES,
    check_data,
    check_plans,
    check_room,
    checkpoint_bytes,
    checkpoints_at_most,
)
from moelab.launch.script import JobSpec, render
from moelab.model import count_parameters, shape_of
from moelab.planning.memory import estimate
from moelab.planning.plan import plan
from moelab.planning.project import foresee

STUDIES = Path(__file__).parents[2] / "studies"
B200 = read_cluster("nebius_soperator_b200")
VERSIONS = {"python": "3.12.3", "torch": "2.14.1", "torchao": "0.18.0", "deep-ep": None, "driver": "580.95.05"}
NODES = ("n0", "n1", "n2", "n3")
BUILD = Finding(name="DeepEP", severity="ok", found="V2 2.1.0").to_json()


def reports(**changes: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Four equal nodes with changes to some; None where a node does not answer."""
    limits = {"memlock_bytes": None, "open_files": None, "shared_memory_bytes": 64 << 30}
    seen = {"versions": VERSIONS, "gpus": ["NVIDIA B200"] * 8, "deepep": [BUILD], "clock_offset_s": -0.01}
    alike = {**limits, **seen, "write_problem": None, "unseen": []}
    answers = {node: changes.get(node, {}) for node in NODES}
    return [{"node": node, **alike, **answer} for node, answer in answers.items() if answer is not None]


def faults(findings: Any) -> dict[str, str]:
    return {one.name: one.found for one in findings if not one.ok}


def study(**fields: Any) -> Study:
    size = {"model": "16B", "nodes": 4, "gpus_per_node": 8, "ep": 32, "hardware": "b200_x256", "seq_len": 4096}
    experiment = Experiment(**{**size, "activation_checkpoint": "full", **fields})
    return Study(name=experiment.name, experiments=(experiment,))


FABRIC = "fabric: 1 of 8 GPUs: In Progress, N/A"
MISMATCH = "nvidia-smi fails (exit code 18): Failed to initialize NVML: Driver/library version mismatch"
TORCHAO, DEEP_EP = {"versions": {**VERSIONS, "torchao": "0.17.0"}}, {"versions": {**VERSIONS, "deep-ep": "2.1.0"}}
GB200 = {"gpus": ["NVIDIA GB200"] * 8}
OTHERS = "3 others: 8 × NVIDIA B200; the profile says 8 × b200"
GONE = {"deepep": [{"name": "DeepEP", "severity": "note", "found": "not installed; arms with deepep need it"}]}
NO_GIN = Finding(name="GIN", severity="error", found="not available", cause="a", consequence="b", remedy="c").to_json()


@pytest.mark.parametrize(
    ("nodes", "change", "profile", "expected"),
    [
        ("n3", None, {}, "nodes: 3 of 4 answered"),
        ("n0 n1 n2 n3", None, {}, "nodes: 0 of 4 answered"),
        # the odd one out is named
        ("n2", TORCHAO, {}, "torchao on all nodes: n2: 0.17.0; 3 others: 0.18.0"),
        ("n0 n1", TORCHAO, {}, "torchao on all nodes: n0, n1: 0.17.0; 2 others: 0.18.0"),
        ("n2", DEEP_EP, {}, "deep-ep on all nodes: n2: 2.1.0; 3 others: not installed"),
        ("n1", {"gpus": ["NVIDIA B200"] * 7}, {}, f"GPUs: n1: 7 × NVIDIA B200; {OTHERS}"),
        ("n3", {"gpus": ["NVIDIA H100"] * 8}, {}, f"GPUs: n3: 8 × NVIDIA H100; {OTHERS}"),
        ("n1", {"gpus": [], "gpu_problem": MISMATCH}, {}, f"GPUs: n1: {MISMATCH}; {OTHERS}"),
        ("n1", {"gpu_problem": FABRIC}, {}, f"GPUs: n1: {FABRIC}; {OTHERS}"),
        ("n0 n1 n2 n3", {"gpu_problem": FABRIC}, {}, f"GPUs: 4 others: {FABRIC}; the profile says 8 × b200"),
        ("", {}, {"gpu_type": "h200"}, "GPUs: 4 others: 8 × NVIDIA B200; the profile says 8 × h200"),
        ("n0 n1 n2 n3", GB200, {}, "GPUs: 4 others: 8 × NVIDIA GB200; the profile says 8 × b200"),
        ("", {}, {"gpu_type": "nvidia_b200"}, ""),
        ("n1", {"gpus": []}, {"gpus_per_node": 0}, ""),
        # clocks by the moment in which reports came; a login node whose own clock is wrong is nobody's fault
        ("n3", {"clock_offset_s": -7.2}, {}, "clocks: n3: 7 s behind"),
        ("n3", {"clock_offset_s": 7.2}, {}, "clocks: n3: 7 s ahead"),
        ("n3", {"clock_offset_s": 2.9}, {}, ""),
        ("n0 n1 n2 n3", {"clock_offset_s": 60.0}, {}, ""),
        # limits and folders
        ("n0", {"shared_memory_bytes": 64 << 20}, {}, "shared memory: n0: 64 MiB of /dev/shm"),
        ("n0 n1", {"memlock_bytes": 8 << 20}, {}, "locked memory: n0, n1: 8 MiB"),
        ("n0", {"memlock_bytes": 8 << 20}, {"memlock": "any"}, ""),
        ("n0", {"open_files": 1024}, {}, "open files: n0: 1024"),
        ("n1", {"write_problem": "OSError: Disk quota"}, {}, "runs and checkpoints: n1: OSError: Disk quota"),
        ("n2", {"unseen": ["/data/c4"]}, {}, "shared files: n2: does not see /data/c4"),
    ],
)
def test_what_nodes_report_is_held_against_each_other(
    nodes: str, change: dict[str, Any] | None, profile: dict[str, Any], expected: str
) -> None:
    cluster = B200.model_copy(update={"gpu_type": "b200", **profile})
    found = compare(reports(**dict.fromkeys(nodes.split(), change)), cluster, nodes=4, deepep=False)
    assert "; ".join(f"{name}: {words}" for name, words in faults(found).items()) == expected


def test_deepep_counts_where_an_arm_needs_it_and_many_nodes_are_counted() -> None:
    two = reports(n1={"deepep": [BUILD, NO_GIN]}, n3=GONE)
    assert faults(compare(two, B200, nodes=4, deepep=False)) == {}
    expected = {"DeepEP on n1: GIN": "not available", "DeepEP on n3: DeepEP": "not installed"}
    assert faults(compare(two, B200, nodes=4, deepep=True)) == expected
    twelve = [{**one, "node": f"n{place}", "open_files": 1024} for place, one in enumerate(3 * reports())]
    many = {"open files": "n0, n1, n2, n3, n4, n5, n6, n7 and 4 more: 1024"}
    assert faults(compare(twelve, B200, nodes=12, deepep=False)) == many
    nowhere = compare(reports(**dict.fromkeys(NODES, GONE)), B200, nodes=4, deepep=True)
    assert faults(nowhere) == {"DeepEP on all nodes: DeepEP": "not installed"}
    assert {one.name: one.found for one in compare(reports(), B200, nodes=4, deepep=True)} == {
        "versions": "the same on 4 nodes: python 3.12.3, torch 2.14.1, torchao 0.18.0, driver 580.95.05",
        "GPUs": "8 × NVIDIA B200 on each of 4 nodes",
        "each node": "4 nodes see and write the shared files, agree on the time and have high enough limits",
        "DeepEP on all nodes": "V2 2.1.0",
    }


# --- what a study needs of a cluster


def test_plans_that_are_illegal_too_large_or_do_not_fit() -> None:
    assert faults(check_plans(study(), B200, foresee)) == {}
    (illegal,) = check_plans(study(ep=3), B200, foresee)
    assert illegal.found == "; ".join(plan(study(ep=3).experiments[0]).verdict.reasons)
    (large,) = check_plans(study(), read_cluster("slurm_generic", ["nodes=2", "gpus_per_node=4"]), foresee)
    assert "nodes is 4: a job on slurm_generic may have at most 2; set `nodes` in a copy of the profile" in large.found
    assert "gpus_per_node is 8: a node of slurm_generic has 4" in large.found
    heavy = study(model="671B", nodes=8, ep=64)
    (full,) = check_plans(heavy, B200, foresee)
    memory = plan(heavy.experiments[0]).memory
    assert memory is not None
    assert full.found.startswith(f"{memory.worst_gib:.1f} of {memory.capacity_gib:.1f} GiB")
    assert (full.severity, full.cause) == ("error", memory.dominant)


def test_many_nodes_do_not_stream_c4(tmp_path: Path) -> None:
    with_files(tmp_path, {"ours/tokenizer.json": "", "c4/c4-train.00000-of-01024.json.gz": ""})
    there, empty = str(tmp_path / "c4"), tmp_path / "empty"
    empty.mkdir()
    gone = f"datasets.c4 is {empty}, which does not exist here or is empty"
    for nodes, c4, tokenizer, expected in (
        (STREAMING_NODES, {}, "ours", {}),
        (STREAMING_NODES + 1, {}, "ours", {"data": f"C4 would be streamed by {STREAMING_NODES + 1} nodes"}),
        (STREAMING_NODES + 1, {"c4": there}, "ours", {}),
        (1, {"c4": str(empty)}, "ours", {"data": gone}),
        (1, {"c4": there}, "theirs", {"data": f"no tokenizer.json in {tmp_path}/theirs, for model 16B"}),
    ):
        cluster = B200.model_copy(update={"datasets": c4, "tokenizers": {"16B": str(tmp_path / tokenizer)}})
        assert faults(check_data(study(dataset="c4", nodes=nodes), cluster)) == expected
    assert faults(check_data(study(nodes=32), B200)) == {}  # Python's own text
    assert faults(check_data(study(dataset=there), B200)) == {}
    assert faults(check_data(study(dataset="no/text"), B200)) == {
        "data": "dataset is no/text, which does not exist here"
    }


def test_bytes_of_a_checkpoint_are_those_that_memory_knows() -> None:
    one = Experiment(model="16B", gpus_per_node=1, ep=1, steps=1000)
    layout = plan(one).verdict.layout
    assert layout is not None
    parts = estimate(one, layout, gpu_of("b200_node")).parts
    whole = (parts["parameters"] + parts["optimizer states"]) * 2**30
    kept = read_cluster("slurm_generic", ["checkpoints_kept=3"])
    assert checkpoint_bytes(Study(name="s", experiments=(one, one)), kept, foresee) == pytest.approx(
        2 * 4 * whole, rel=1e-6
    )


def test_checkpoints_of_a_run_at_once() -> None:
    expected = {  # by steps, interval and how many are kept
        (20, 0, 2): 0,  # only when it is stopped, and how long its steps take is not known
        (100, 100, 2): 0,  # none after the last step
        (101, 100, 2): 1,
        (250, 100, 2): 2,
        (1500, 100, 2): 3,  # the third is written before the first goes
        (1500, 100, 5): 6,
    }
    at_most, without_slurm = {}, set()
    for steps, interval, kept in expected:
        cluster = read_cluster("slurm_generic", [f"checkpoint_interval_steps={interval}", f"checkpoints_kept={kept}"])
        one = Experiment(model="nano", hardware="cpu", steps=steps)
        at_most[steps, interval, kept] = checkpoints_at_most(one, cluster, foresee)
        without_slurm.add(checkpoints_at_most(one, cluster.model_copy(update={"scheduler": "none"}), foresee))
    assert (at_most, without_slurm) == (expected, {0})


def test_the_time_limit_of_a_job_makes_a_long_run_save(tmp_path: Path) -> None:
    twenty_steps, published_16b = (read_study(STUDIES / f"{name}_b200_x256.yaml") for name in ("671B", "16B"))
    assert checkpoint_bytes(twenty_steps, B200, foresee) == 0
    (room,) = check_room(twenty_steps, B200, tmp_path, foresee)
    checkpoint = 12 * count_parameters(shape_of("671B")).total / 1e9
    due = f"no checkpoint is due; a run that is stopped early would save one of {checkpoint:,.1f} GB"
    assert f"1 GB needed ({due})" in room.found
    for changes, counts in (
        ({"time_limit_minutes": 30}, {3}),
        ({"time_limit_minutes": 180}, {1, 2, 3}),
        ({"time_limit_minutes": 14_400}, {0}),
        ({"time_limit_minutes": 30, "requeues": 0}, {1}),
    ):
        cluster = B200.model_copy(update=changes)
        assert {checkpoints_at_most(one, cluster, foresee) for one in published_16b.experiments} <= counts
    often = B200.model_copy(update={"checkpoint_interval_steps": 100})
    assert checkpoint_bytes(published_16b, often, foresee) == 12 * 3 * 12 * count_parameters(shape_of("16B")).total


def test_room_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, of_671b = read_cluster("slurm_generic"), study(model="671B", steps=1000)
    later = tmp_path / "not" / "yet"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=23_000 * 10**9))
    for small in (study(model="nano", nodes=1, ep=8), study(model="671B", steps=20)):
        assert faults(check_room(small, cluster, later, foresee)) == {}
    found = faults(check_room(of_671b, cluster, later, foresee))[f"disk space in {later}"]
    wanted = 3 * 12 * count_parameters(shape_of("671B")).total + 2**30  # two kept, one being written, and logs
    assert found.startswith(f"23,000 GB free, {wanted / 1e9:,.0f} GB needed (derived: up to 3 checkpoints")
    roomy = cluster.model_copy(update={"scratch": str(tmp_path)})
    assert faults(check_room(of_671b, roomy, later, foresee)).keys() == {f"disk space in {tmp_path}"}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (broken,) = check_room(None, cluster, tmp_path / "file", foresee)
    assert broken.severity == "error"
    assert "cannot be written: Not a directory" in broken.found


# --- what a node runs, and the command


def test_a_node_reports_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu017")
    seen, unseen = tmp_path / "seen", tmp_path / "unseen"
    seen.touch()
    assert node_report([f"--writes={tmp_path}", f"--sees={seen}", f"--sees={unseen}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["node"] == "gpu017"
    assert told["unseen"] == [str(unseen)]
    assert told["write_problem"] is None
    assert node_report([f"--writes={unseen}"]) == 0
    assert "No such file" in json.loads(capsys.readouterr().out)["write_problem"]
    profile = read_cluster("local")
    found = faults(compare([{**told, "unseen": [], "clock_offset_s": 0.0}], profile, nodes=1, deepep=False))
    assert found.keys() <= {"open files", "shared memory"}  # this machine's own


def hostile() -> st.SearchStrategy[str]:
    text = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1)
    return text.map(lambda value: f"/{value} '$(touch HIT)' `id`; #")


@settings(max_examples=20)
@given(hostile(), hostile())
def test_what_a_node_runs_is_set_up_as_a_job_is_and_quotes_all(file: str, value: str) -> None:
    set_up = {"source": (file,), "modules": ("cuda/13", value), "venv": value, "variables": {"NCCL_IB_HCA": value}}
    cluster = ClusterProfile(name="c", description="d", nodes=2, memlock="unlimited", **set_up)
    lines = node_script(cluster, 2, writes=Path(value), sees=[value]).splitlines()
    job = JobSpec(cluster=cluster, runs=(Path("/runs/r"),), name="n", comment="c", nodes=2, gpus_per_node=8)
    ours, of_the_job = (
        [shlex.split(line) for line in script if line.startswith(("source", "module", "conda", "export"))]
        for script in (lines, render(job).splitlines())
    )
    assert ours == of_the_job
    assert len(ours) == 5
    assert lines[0] == "set -eo pipefail"
    assert lines[-2] == "ulimit -l unlimited || true"
    assert shlex.split(lines[-1])[-1] == f"--sees={value}"


def test_a_fault_of_the_nodes_alone_is_1() -> None:
    nodes = compare(reports(n0={"write_problem": "OSError: Disk quota"}), B200, nodes=4, deepep=False)
    assert Preflight(study=(), here=(), nodes=nodes).exit_code == 1


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    runs = f"--runs={tmp_path}"
    assert main(["doctor", "--cluster=local", runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["doctor", "--cluster=slurm_generic", runs, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["here"]
    assert "sbatch is not on PATH" in next(one for one in found if one["name"] == "Slurm")["found"]
    assert main(["doctor", "--cluster=slurm_generic", runs, "--nodes"]) == 1
    here, nodes = capsys.readouterr().out.split("\n\n")
    assert (here.splitlines()[0], nodes.splitlines()[0]) == ("This machine and Slurm", "The nodes")
    assert "srun is not on PATH" in nodes
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"gpus_per_node": 8, "ep": 3}))
    assert main(["doctor", "--cluster=slurm_generic", f"--file={file}", runs]) == 3
    assert "ep is 3" in capsys.readouterr().out
    assert main(["doctor", "--cluster=nowhere"]) == 2
    assert main(["doctor", "--cluster=slurm_generic", f"--file={tmp_path}/none.yaml"]) == 2


def test_a_run_whose_status_is_damaged_costs_no_other_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "sbatch", "echo slurm 25.05.3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    one = study(model="nano", hardware="cpu", nodes=1, gpus_per_node=2, ep=2, steps=2)
    lost = make_run(tmp_path / "runs", one.experiments[0], [8.0])
    (lost.path / "status.json").write_text("{")
    found = preflight(read_cluster("slurm_generic"), one, tmp_path / "runs", ask_nodes=False)
    here = faults(found.here)
    assert here.keys() == {"submission"}
    assert here["submission"].startswith(f"{lost.name}: it is unknown how it ended")
    assert len(found.study) == len(found.here) - 1 == 2  # plan and data; room, Slurm, submission
    assert found.exit_code == 1
