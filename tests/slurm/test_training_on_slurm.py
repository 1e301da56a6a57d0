"""TorchTitan trains over two nodes of a real Slurm, and goes on through a time limit as if there had been none.

One job array has three runs: one is left alone, one is told that its time is up, and of one a rank is killed. In the
folder of the second a later checkpoint is half written, as a node that is lost leaves it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from training_support import SHARED, ranks_of, wait_for

from moelab.experiment import Experiment
from moelab.launch.cluster import read_cluster
from moelab.launch.script import JobSpec, render
from moelab.runs import directory
from moelab.runs.collect import collect_run
from moelab.runs.directory import RunDir
from moelab.runs.expert_load import FILE, expert_load
from moelab.runs.status import State, Status
from moelab.runs.stragglers import read_own_times
from moelab.runs.table import merge_segments

pytestmark = pytest.mark.training  # and of Slurm: two marks, of which tests/conftest.py reads the first
STEPS = 8
PROFILE = ["nodes=2", "gpus_per_node=0", "exclusive=false", "cpus_per_task=1", "memory_gib=1", "signal_s=60"]
PROFILE += ["time_ranks=true", "checkpoint_interval_steps=5"]  # each rank's own times too
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


def steps_of(run: RunDir) -> int:
    text = run.log.read_text() if run.log.exists() else ""
    return len(re.findall(r"^\[rank0\].* INFO - step: ", text, re.M))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("slurm")
    sizes = {**SHARED, "nodes": 2, "gpus_per_node": 1, "ep": 2}
    experiments = [Experiment(name="tests", **{**sizes, "steps": steps}) for steps in (STEPS, STEPS, 1000)]
    runs = tuple(directory.create(folder, experiment) for experiment in experiments)
    job = JobSpec(
        cluster=read_cluster("slurm_generic", [*PROFILE, *PORTS]),
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
    with slurm_cluster(nodes=2, cpus=4) as cluster:
        array = cluster.run("sbatch", "--parsable", script)
        whole, stopped, killed = runs
        wait_for(lambda: steps_of(stopped) >= 1)
        cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_1")
        wait_for(lambda: steps_of(killed) >= 1)
        os.kill(ranks_of(killed.path)[1], signal.SIGKILL)
        wait_for(lambda: stopped.status.state is not State.RUNNING)
        between = stopped.status
        for run in runs:
            wait_for(lambda run=run: run.status.state.is_final)
        yield Trained(whole, stopped, killed, between, array, cluster)


@pytest.mark.slurm
def test_two_nodes_train_with_expert_parallelism_across_them_to_a_collected_result(trained: Trained) -> None:
    run = trained.whole
    status = run.status
    assert (status.state, status.exit_code, status.job_id) == (State.COMPLETED, 0, f"{trained.array}_0")
    log = run.log.read_text()
    assert "dp_shard=2, cp=1, tp=1, ep=2" in log
    assert set(re.findall(r"^\[rank(\d)\]:\[titan\]", log, re.M)) == {"0", "1"}  # global ranks: one on each node
    assert log.count("moelab: first all-reduce, of 2 ranks") == 2
    for node in (0, 1):
        assert list((run.path / "logs").glob(f"{trained.array}_0-0/node{node}/*/attempt_0/0/stdout.log"))
    assert (run.path / "metrics.parquet").exists()
    own = read_own_times(run.path / "structured_logs")
    assert (own["step"].nunique(), own["rank"].nunique()) == (STEPS, 2)
    assert collect_run(run).last_step == STEPS


@pytest.mark.slurm
def test_a_time_limit_loses_no_step_and_counts_none_twice(trained: Trained) -> None:
    between, status = trained.between, trained.stopped.status
    assert between.state is State.SUBMITTED
    assert between.reason is not None
    assert re.fullmatch(rf"saved step \d of {STEPS} before the time limit; requeued", between.reason)
    assert (status.state, status.attempts, status.job_id) == (State.COMPLETED, 2, f"{trained.array}_1")
    rows = collect_run(trained.stopped).rows
    assert rows["step"].tolist() == list(range(1, STEPS + 1))
    assert set(rows["segment"]) == {0, 1}
    assert trained.cluster.job(f"{trained.array}_1")["Restarts"] == "1"


@pytest.mark.slurm
def test_the_resumed_run_has_the_losses_of_the_one_left_alone(trained: Trained) -> None:
    ours, theirs = (merge_segments(collect_run(run).rows) for run in (trained.stopped, trained.whole))
    for column in ("loss", "grad_norm", "lr"):
        np.testing.assert_array_equal(ours[column], theirs[column])
    assert collect_run(trained.stopped).validation_loss == collect_run(trained.whole).validation_loss
    load, alone = (expert_load(run.path / FILE) for run in (trained.stopped, trained.whole))
    assert load is not None
    assert alone is not None
    np.testing.assert_array_equal(load.tokens_SLE, alone.tokens_SLE)


@pytest.mark.slurm
def test_a_half_written_checkpoint_is_not_resumed_and_old_ones_are_pruned(trained: Trained) -> None:
    run = trained.stopped
    last = int(collect_run(run).rows.query("segment == 0")["step"].max())
    assert f"Loading the checkpoint from {run.path}/checkpoint/step-{last}." in run.log.read_text()
    complete = {file.parent.name for file in run.path.glob("checkpoint/*/.metadata")}
    assert complete == {f"step-{max(last, 5)}"}  # of the step where it stopped, and of the interval, the later
    assert (run.path / "checkpoint" / "step-900").exists()


@pytest.mark.slurm
def test_a_rank_killed_on_the_second_node_is_named_and_the_job_is_over(trained: Trained) -> None:
    status = trained.killed.status
    assert status.state is State.FAILED
    assert status.reason is not None
    assert status.reason.startswith("rank 1: killed by SIGKILL")
    assert len(collect_run(trained.killed).rows) >= 1
    trained.cluster.wait_for_state(f"{trained.array}_2", "FAILED")
    assert not ranks_of(trained.killed.path)
