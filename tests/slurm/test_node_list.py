"""Our reading of node lists is that of scontrol."""

from __future__ import annotations

import pytest
from slurm_cluster import SlurmCluster

from moelab.launch.slurm.node_list import expand, node_names

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(
    "text",
    [
        "gpu[001-003,007]",
        "gpu[001-002],login1",
        "rack[0-1]n[08-10]",
        "b200-a[098-101]",
        "a[1-010]",
        "a[08-100]",
        "a[1,03]",
        "a[1-2][3-4]",
        "n[0-31]",
        "x",
    ],
)
def test_scontrol_reads_it_alike(asked: SlurmCluster, text: str) -> None:
    assert tuple(asked.run("scontrol", "show", "hostnames", text).split()) == expand(text) == node_names(text)
