"""Whether DeepEP can work on this machine, found out without running it: for ``moelab doctor``.

``build.py`` (which DeepEP, which NCCL), ``fabric.py`` (RDMA, GIN, IBGDA, locked memory, NVLink) and ``variables.py``
yield findings with cause, consequence and remedy. ``smoke.py`` runs two ranks and sees what these only conclude.
"""

from __future__ import annotations

from moelab.deepep.build import check_build, check_nccl, find_build
from moelab.deepep.fabric import check_gin, check_ibgda, check_memlock, check_nvlink, check_rdma
from moelab.deepep.probe import Expected
from moelab.deepep.variables import check_variables
from moelab.finding import Finding
from moelab.hardware.spec import Cluster
from moelab.machine import Machine, this_machine


def examine_environment(machine: Machine | None = None, expected: Expected | None = None) -> tuple[Finding, ...]:
    """Look at everything that DeepEP depends on.

    Args:
        machine: the one to look at; this one by default.
        expected: what the cluster's profile says of it; one node by default.

    Returns:
        Findings in reading order. Neither torch nor DeepEP is loaded.
    """
    machine, expected = machine or this_machine(), expected or Expected()
    build = find_build(machine)
    return (
        *check_build(machine, build),
        *check_nccl(machine, build),
        *check_nvlink(machine, build),
        *check_rdma(machine, build, expected),
        *check_gin(machine, build, expected),
        *check_ibgda(machine, build, expected),
        *check_memlock(machine),
        *check_variables(machine, build, expected),
    )


def expected_of(cluster: Cluster, variables: dict[str, str] | None = None) -> Expected:
    """What a hardware profile says of a node.

    Args:
        cluster: such as ``cluster_of("b200_x256")``.
        variables: settings of its jobs, which the profile does not hold.
    """
    nic = cluster.node.nic_gb_s
    return Expected(
        nodes=cluster.nodes, nic_gb_s=float(nic) if nic is not None else None, variables=dict(variables or {})
    )
