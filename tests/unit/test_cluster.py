"""Cluster profiles: what is read, and what is wrong with one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moelab.errors import BadInput
from moelab.experiment_file import parse
from moelab.hardware import cluster_of
from moelab.health.deepep import PREFIXES
from moelab.launch.cluster import ClusterProfile, read_cluster


def test_the_published_cluster_has_the_published_settings_each_with_its_source() -> None:
    cluster = read_cluster("nebius_soperator_b200")
    hardware = cluster_of("b200_x256")
    assert (cluster.nodes, cluster.gpus_per_node) == (hardware.nodes, hardware.node.gpus)
    assert set(cluster.variables) <= set(cluster.sources)
    assert all(name.startswith(PREFIXES) for name in cluster.variables)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: a\ndescription: b\nvariables: {TIMEOUT: 22, X: 012}\ncontainer: {image: a.sqsh}\n")
    cards = "mlx5_1:1,mlx5_2:1"
    overrides = ["container.mounts=[/data:/data]", f"variables.NCCL_IB_HCA={cards}", "account=24061", "qos=2024_01"]
    assert read_cluster(str(file), overrides).model_dump(exclude_defaults=True) == {
        "name": "a",
        "description": "b",
        "account": "24061",
        "qos": "2024_01",
        "variables": {"TIMEOUT": "22", "X": "012", "NCCL_IB_HCA": cards},
        "container": {"image": "a.sqsh", "mounts": ("/data:/data",)},
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"partitoin": "main"}, "unknown field 'partitoin'; did you mean 'partition'?"),
        ({"partition": "a b"}, "partition: got 'a b'; valid: one word"),
        ({"runs": "runs"}, "runs: got 'runs'; valid: an absolute path"),
        ({"modules": ["--force"]}, "modules.0: got '--force'; valid: a name or path"),
        ({"variables": {"A B": "x"}}, "variables.A B"),
        ({"variables": {"A": True}}, "variables.A: got True"),
        ({"variables": {"SLURM_JOB_ID": "1"}}, "SLURM_JOB_ID: Slurm, moelab and bash set them"),
        ({"variables": {"SLURMD_NODENAME": "n7"}}, "SLURMD_NODENAME: Slurm, moelab and bash set them"),
        ({"variables": {"UID": "3"}}, "UID: Slurm, moelab and bash set them"),
        ({"variables": {"WANDB_API_KEY": "abc"}}, "must not hold WANDB_API_KEY"),
        ({"variables": {"https_proxy": "http://ada:hunter2@proxy:3128"}}, "variables must not hold a key, token or"),
        ({"description": "login with " + "0a1b2c3d" * 5}, "description must not hold a key, token or password"),
        ({"container": {"image": "docker://ada:hunter2@nvcr.io#x"}}, "container must not hold a key"),
        ({"container": {"image": "x", "mounts": ["/a"]}}, "/path/outside:/path/inside"),
        ({"first_port": 29000, "last_port": 30000}, "without torchrun's own 29500"),
        ({"first_port": 20000, "last_port": 20010}, "at least 100 ports"),
        ({"time_limit_minutes": 5, "signal_s": 300}, "signal_s must be less than the time limit"),
        ({"venv": "/a", "conda_env": "b"}, "exclude each other"),
        ({"sources": {"NCCL_IB_HCA": "x"}}, "NCCL_IB_HCA, which are neither fields nor variables"),
        ({"checkpoints_kept": 1}, "checkpoints_kept: got 1"),
        ({"gpus_per_node": True}, "gpus_per_node: got True"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        parse(ClusterProfile, {"name": "test", "description": "a test", **fields})


@pytest.mark.parametrize(
    ("name", "override", "told"),
    [
        ("nebius", "qos=x", "the profiles are local, nebius_soperator_b200, slurm_generic"),
        ("/no/such.yaml", "qos=x", "cannot be read"),
        ("slurm_generic", "partition.x=1", "cluster profile slurm_generic: partition: got"),
        ("slurm_generic", "name.x=1", "--set name.x: name has no entries"),
        ("slurm_generic", "time_limit_minutes=4:00:00", "time_limit_minutes: got '4:00:00'"),
        ("slurm_generic", "partition", "expected key=value"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(name: str, override: str, told: str) -> None:
    with pytest.raises(BadInput, match=re.escape(told)):
        read_cluster(name, [override])
