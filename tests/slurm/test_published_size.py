"""The published study on 32 nodes of 8 GPUs: what each node of each arm is given, with a stand-in for the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from slurm_cluster import slurm_cluster
from slurm_jobs import published, recorder, speak_to

from moelab.errors import Refused
from moelab.experiment_file import Study, read_study
from moelab.launch.cluster import kept_cluster
from moelab.launch.in_job import NodeOfJob
from moelab.launch.node import Start
from moelab.launch.slurm import SCRIPT_FILE
from moelab.launch.status import refresh
from moelab.launch.submit import Submission, submit
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State, Status

STUDY = Path(__file__).parents[2] / "studies" / "671B_b200_x256.yaml"
NODES = 32
ON_EVERY_NODE = {
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "SLURM_CPUS_PER_TASK": "96",
    "NCCL_IB_HCA": "mlx5",
    "UCX_NET_DEVICES": "ens7",
    "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
}


@dataclass(frozen=True)
class Submitted:
    """The study after its jobs have ended, and what was said of another submission before that."""

    study: Study
    folder: Path
    first: Submission
    statuses: list[Status]
    again: Submission
    meanwhile: str


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(nodes=NODES, gpus=8, cpus=128) as big:
        speak_to(big, patch)
        patch.setenv("SBATCH_PARTITION", "nowhere")  # a person's own defaults do not overrule the script
        patch.setenv("SLURM_RESTART_COUNT", "7")  # as inside of a job
        study, runs = read_study(STUDY), folder / "runs"
        cluster = published(big, recorder(folder, study.experiments[0].steps))
        first = submit(study, runs, cluster)
        with pytest.raises(Refused) as meanwhile:
            submit(study, runs, cluster)
        big.wait_for(lambda: not big.active(), seconds=180, what="the study to end")
        statuses, again = refresh(first.submitted), submit(study, runs, cluster)
        yield Submitted(study, runs, first, statuses, again, str(meanwhile.value))


def test_it_is_one_array_whose_script_is_in_every_run_directory(submitted: Submitted) -> None:
    runs = submitted.first.submitted
    assert len(submitted.first.scripts) == 1
    assert {(run.path / SCRIPT_FILE).read_text() for run in runs} == set(submitted.first.scripts)
    assert tuple(run.experiment for run in runs) == submitted.study.experiments
    assert [(status.state, status.job_id) for status in submitted.statuses] == [
        (State.COMPLETED, f"1_{task}") for task in range(4)
    ]
    assert all((run.path / "results.json").exists() for run in runs)


def test_a_second_submit_waits_for_the_first_and_then_finds_nothing_to_do(submitted: Submitted) -> None:
    assert submitted.again.completed == submitted.first.submitted
    assert (submitted.again.submitted, submitted.again.scripts) == ((), ())
    assert len(find(submitted.folder)) == 4
    assert "wait for them" in submitted.meanwhile


def nodes_of(run: RunDir) -> list[tuple[dict[str, str], list[str]]]:
    """Variables and arguments that the job's program was given on each node."""

    def texts(node: int, suffix: str) -> list[str]:
        return (run.path / "nodes" / f"{node}.{suffix}").read_text().rstrip("\0").split("\0")

    variables = [dict(one.split("=", 1) for one in texts(node, "env") if "=" in one) for node in range(NODES)]
    return [(of_node, texts(node, "arguments")) for node, of_node in enumerate(variables)]


def test_each_arm_has_256_ranks_with_their_place_their_gpus_and_variables_that_meet_at_one_place(
    submitted: Submitted,
) -> None:
    endpoints = []
    for run in submitted.first.submitted:
        nodes = nodes_of(run)
        assert {variables["SLURMD_NODENAME"] for variables, _ in nodes} == {f"n{node}" for node in range(NODES)}
        job_id = int(nodes[0][0]["SLURM_JOB_ID"])
        for node, (variables, arguments) in enumerate(nodes):
            assert ON_EVERY_NODE.items() <= variables.items()
            place = NodeOfJob.of(variables)
            assert place == NodeOfJob(job_id=job_id, label=run.status.job_id, node=node, nodes=NODES, restarts=0)
            assert arguments[:3] == ["-m", "moelab.launch.in_job", str(run.path)]
            kept = {"cluster": kept_cluster(run.path), "host": arguments[3]}
            start = Start(run=run, place=place, signals=Mock(), folder=run.path, **kept)
            command = start.command(run.experiment)
            assert {f"--nnodes={NODES}", f"--node-rank={node}", "--nproc-per-node=8"} <= set(command.arguments)
            assert command.variables["MOELAB_EXPERIMENT"] == str(run.path / "experiment.yaml")
            endpoints += [one for one in command.arguments if one.startswith("--rdzv-endpoint=")]
        host, port = endpoints[-1].removeprefix("--rdzv-endpoint=").split(":")
        assert host == nodes[0][0]["SLURMD_NODENAME"]
        assert 20000 <= int(port) <= 28999
    # All nodes of an arm meet at one place, and no two arms do.
    assert [endpoints.count(endpoint) for endpoint in endpoints] == [NODES] * 4 * NODES
