"""TorchTitan trains over two nodes of a real Slurm, and goes on through a time limit as if there had been none.

One job array has three runs: one is left alone, one is told that its time is up, and of one a rank is killed. In the
folder of the second a later checkpoint is half written, as a node that is lost leaves it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from training_support import SHARED, ranks_of, steps_logged, wait_for

from moelab.experiment import Experiment
from moelab.launch.cluster import keep_cluster, read_cluster
from moelab.launch.script import JobSpec, render
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.expert_load import FILE, expert_load
from moelab.runs.status import State, Status
from moelab.runs.table import merge_segments

pytestmark = pytest.mark.training
STEPS = 8
PROFILE = ["nodes=2", "gpus_per_node=0", "exclusive=false", "cpus_per_task=1", "memory_gib=1", "signal_s=60"]
PROFILE += ["checkpoint_interval_steps=5"]
PORTS = ["first_port=15000", "last_port=19999"]  # the cluster's own are above


@dataclass(frozen=True)
class Trained:
    """Three runs of one job array, and what the second's status was between its two starts."""

    whole: RunDir
    stopped: RunDir
    killed: RunDir
    between: Status
    array: str
    cluster: SlurmCluster


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("slurm")
    sizes = {**SHARED, "nodes": 2, "gpus_per_node": 1, "ep": 2}
    experiments = [Experiment(name="tests", **{**sizes, "steps": steps}) for steps in (STEPS, STEPS, 1000)]
    runs = tuple(directory.create(folder, experiment) for experiment in experiments)
    profile = read_cluster("slurm_generic", [*PROFILE, *PORTS])
    for run in runs:
        keep_cluster(profile, run.path)
    job = JobSpec(
        cluster=profile,
        runs=tuple(run.path for run in runs),
        name="tests",
        comment="tests",
        nodes=2,
        gpus_per_node=1,
    )
    half_written = runs[1].path / "checkpoint" / "step-900"
    half_written.mkdir(parents=True)
    (half_written / "__0_0.distcp").write_bytes(b"half")
    script = folder / "job.sbatch"
    script.write_text(render(job))
    whole, stopped, killed = runs
    with slurm_cluster(nodes=2, cpus=4) as cluster:
        array = cluster.run("sbatch", "--parsable", script)
        wait_for(lambda: steps_logged(stopped.path) >= 1)
        for _ in range(2):  # a second warning must not end the wait for the step
            cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_1")
        wait_for(lambda: steps_logged(killed.path) >= 1)
        os.kill(ranks_of(killed.path)[1], signal.SIGKILL)
        wait_for(lambda: stopped.status.state is not State.RUNNING)
        between = stopped.status
        for run in runs:
            wait_for(lambda run=run: run.status.state.is_final)
        yield Trained(whole, stopped, killed, between, array, cluster)


def test_two_nodes_train_with_expert_parallelism_across_them_to_a_collected_result(trained: Trained) -> None:
    run, status = trained.whole, trained.whole.status
    assert (status.state, status.exit_code, status.job_id) == (State.COMPLETED, 0, f"{trained.array}_0")
    log = run.log.read_text()
    assert "dp_shard=2, cp=1, tp=1, ep=2" in log
    assert set(re.findall(r"^\[rank(\d)\]:\[titan\]", log, re.M)) == {"0", "1"}  # global ranks: one on each node
    assert log.count("moelab: first all-reduce, of 2 ranks") == 2
    for node in (0, 1):
        assert list((run.path / "logs").glob(f"{trained.array}_0-0/node{node}/*/attempt_0/0/stdout.log"))
    assert (run.path / "results.json").exists()
    assert collect_run(run).last_step == STEPS


def test_a_time_limit_loses_no_step_and_counts_none_twice(trained: Trained) -> None:
    run, whole = trained.stopped, trained.whole
    assert trained.between.state is State.SUBMITTED
    assert re.fullmatch(rf"saved step \d of {STEPS} before the time limit; requeued", str(trained.between.reason))
    assert (run.status.state, run.status.attempts, run.status.job_id) == (State.COMPLETED, 2, f"{trained.array}_1")
    assert trained.cluster.job(f"{trained.array}_1")["Restarts"] == "1"
    for number, start in (("", 0), ("-2", 1)):  # each start leaves files of its own
        command = (run.path / "launch" / f"command{number}.sh").read_text()
        assert f"--rdzv-id={trained.array}_1-{start} " in command
        assert json.loads((run.path / f"environment{number}.json").read_text())["hosts"] == 2
    ours, theirs = collect_run(run), collect_run(whole)
    assert ours.rows["step"].tolist() == list(range(1, STEPS + 1))
    assert set(ours.rows["segment"]) == {0, 1}
    for column in ("loss", "grad_norm", "lr"):
        np.testing.assert_array_equal(merge_segments(ours.rows)[column], theirs.rows[column])
    assert ours.validation_loss == theirs.validation_loss
    load, alone = expert_load(run.path / FILE), expert_load(whole.path / FILE)
    assert load is not None
    assert alone is not None
    np.testing.assert_array_equal(load.tokens_SLE, alone.tokens_SLE)


def test_a_half_written_checkpoint_is_not_resumed_and_old_ones_are_pruned(trained: Trained) -> None:
    run = trained.stopped
    last = int(collect_run(run).rows.query("segment == 0")["step"].max())
    assert f"Loading the checkpoint from {run.path}/checkpoint/step-{last}." in run.log.read_text()
    complete = {file.parent.name for file in run.path.glob("checkpoint/*/.metadata")}
    assert complete == {f"step-{max(last, 5)}"}  # of the step where it stopped, and of the interval, the later
    assert (run.path / "checkpoint" / "step-900").exists()


def test_a_rank_killed_on_the_second_node_is_named_and_the_job_is_over(trained: Trained) -> None:
    run = trained.killed
    assert run.status.state is State.FAILED
    assert str(run.status.reason).startswith("rank 1: killed by SIGKILL")
    assert len(collect_run(run).rows) >= 1
    trained.cluster.wait_for_state(f"{trained.array}_2", "FAILED")
    assert not ranks_of(run.path)
