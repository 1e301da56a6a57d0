"""The published study on 32 nodes of 8 GPUs: what each node of each arm is given, with a stand-in for the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_jobs import published, recorder, speak_to

from moelab.experiment_file import Study, read_study
from moelab.launch.in_job import NodeOfJob, Signals, parse_options
from moelab.launch.node import Start
from moelab.launch.slurm import SCRIPT_FILE
from moelab.launch.status import refresh
from moelab.launch.submit import Submission, submit
from moelab.notebooks.study import bring_forward
from moelab.runs.directory import RunDir, find
from moelab.runs.status import State, Status

pytestmark = pytest.mark.slurm

STUDY = Path(__file__).parents[2] / "studies" / "671B_b200_x256.yaml"
ARMS = (
    "bf16_standard_round-robin",
    "mxfp8_standard_round-robin",
    "bf16_deepep_round-robin",
    "mxfp8_deepep_round-robin",
)


@dataclass(frozen=True)
class Node:
    """What the job's program was given on one node."""

    environment: dict[str, str]
    arguments: list[str]

    @property
    def place(self) -> NodeOfJob:
        return NodeOfJob.of(self.environment)


@dataclass(frozen=True)
class Submitted:
    """The study after its jobs have ended."""

    study: Study
    folder: Path
    first: Submission
    statuses: list[Status]
    again: Submission
    said_meanwhile: list[str]
    said_afterwards: list[str]

    def run(self, arm: str) -> RunDir:
        return next(run for run in self.first.submitted if run.experiment.arm == arm)

    def nodes(self, arm: str) -> list[Node]:
        def texts(number: int, suffix: str) -> list[str]:
            return (self.run(arm).path / "nodes" / f"{number}.{suffix}").read_text().rstrip("\0").split("\0")

        variables = [dict(one.split("=", 1) for one in texts(number, "env") if "=" in one) for number in range(32)]
        return [Node(environment, texts(number, "arguments")) for number, environment in enumerate(variables)]


@pytest.fixture(scope="module")
def submitted(big_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        speak_to(big_cluster, patch)
        patch.setenv("SBATCH_PARTITION", "nowhere")  # a person's own defaults do not overrule the script
        patch.setenv("SLURM_RESTART_COUNT", "7")  # as inside of a job
        study = read_study(STUDY)
        cluster = published(big_cluster, recorder(folder, study.experiments[0].steps))
        first = submit(study, folder / "runs", cluster)
        meanwhile: list[str] = []
        bring_forward(study, folder / "runs", cluster, submit=True, say=meanwhile.append)
        big_cluster.wait_for(lambda: not big_cluster.active(), seconds=180, what="the study to end")
        statuses = refresh(first.submitted)
        again = submit(study, folder / "runs", cluster)
        afterwards: list[str] = []
        bring_forward(study, folder / "runs", cluster, submit=True, say=afterwards.append)
        yield Submitted(study, folder / "runs", first, statuses, again, meanwhile, afterwards)


def test_it_is_one_array_whose_script_is_in_every_run_directory(submitted: Submitted) -> None:
    runs = submitted.first.submitted
    assert len(submitted.first.scripts) == 1
    assert {(run.path / SCRIPT_FILE).read_text() for run in runs} == set(submitted.first.scripts)
    assert [run.status.job_id for run in runs] == [f"1_{task}" for task in range(4)]
    assert tuple(run.experiment for run in runs) == submitted.study.experiments
    assert [status.state for status in submitted.statuses] == [State.COMPLETED] * 4
    assert all((run.path / "metrics.parquet").exists() for run in runs)


def test_a_second_submit_finds_nothing_to_do_nor_does_notebook_07_that_is_run_again(submitted: Submitted) -> None:
    assert submitted.again.completed == submitted.first.submitted
    assert (submitted.again.submitted, submitted.again.scripts) == ((), ())
    assert len(list(find(submitted.folder))) == 4
    assert submitted.said_meanwhile[-1].startswith("Slurm has runs of this study: run the notebook again")
    assert submitted.said_afterwards[-1].endswith("0 of 4 runs submitted now")


@pytest.mark.parametrize("arm", ARMS)
def test_each_node_has_its_place_its_gpus_and_the_profile_s_variables(submitted: Submitted, arm: str) -> None:
    nodes = submitted.nodes(arm)
    assert [node.place.node for node in nodes] == list(range(32))
    assert {node.environment["SLURMD_NODENAME"] for node in nodes} == {f"n{number}" for number in range(32)}
    assert {node.place.label for node in nodes} == {submitted.run(arm).status.job_id}
    assert {(node.place.nodes, node.place.restarts) for node in nodes} == {(32, 0)}
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "SLURM_CPUS_PER_TASK": "96",
        "NCCL_IB_HCA": "mlx5",
        "UCX_NET_DEVICES": "ens7",
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
    }.items():
        assert {node.environment.get(name) for node in nodes} == {value}, name


def test_torchrun_makes_256_global_ranks_that_meet_at_one_place_of_each_arm(submitted: Submitted) -> None:
    ports = set()
    for arm in ARMS:
        run, ranks, meetings = submitted.run(arm), [], set()
        for node in submitted.nodes(arm):
            assert node.arguments[:3] == ["-m", "moelab.launch.in_job", str(run.path)]
            start = Start(run=run, place=node.place, options=parse_options(node.arguments[2:]), signals=quiet())
            command = start.command(run.experiment)
            given = dict(one.split("=", 1) for one in command.arguments if one.startswith("--") and "=" in one)
            first = int(given["--node-rank"]) * int(given["--nproc-per-node"])
            ranks += range(first, first + int(given["--nproc-per-node"]))
            meetings.add((given["--rdzv-endpoint"], given["--nnodes"]))
            assert command.variables["MOELAB_EXPERIMENT"] == str(run.path / "experiment.yaml")
        assert ranks == list(range(256))
        ((endpoint, nodes),) = meetings
        host, port = endpoint.split(":")
        assert (host, nodes) == (submitted.nodes(arm)[0].environment["SLURMD_NODENAME"], "32")
        assert 20000 <= int(port) <= 28999
        ports.add(port)
    assert len(ports) == len(ARMS)


def quiet() -> Signals:
    """As a job has them, without taking over this process's signals."""
    signals = Signals.__new__(Signals)
    signals.save = signals.end = False
    return signals
