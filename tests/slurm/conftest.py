"""Real Slurm clusters for the tests here; without Slurm they are skipped, which CI does not accept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing, slurm_cluster
from slurm_jobs import speak_to


@pytest.fixture(scope="session", autouse=True)
def _slurm_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def big_cluster() -> Iterator[SlurmCluster]:
    """The published size: 32 nodes of 8 GPUs each."""
    with slurm_cluster(nodes=32, gpus=8, cpus=128) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Two nodes without GPUs, whose controller forgets a job soon after its end."""
    settings = {"MinJobAge": "5", "SlurmdTimeout": "6", "MessageTimeout": "3"}
    with slurm_cluster(nodes=2, cpus=4, settings=settings) as started:
        yield started


@pytest.fixture
def asked(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The same, as the Slurm that moelab asks in this process; no job is left after the test."""
    speak_to(cluster, monkeypatch)
    monkeypatch.setattr("moelab.cli.signal.signal", lambda *_: None)
    yield cluster
    cluster.cancel_all()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The folder by which the trainer of a test is held."""
    folder = tmp_path / "gate"
    folder.mkdir()
    return folder
