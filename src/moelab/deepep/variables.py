"""Environment variables that steer the communication: against the cluster's profile, and against the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moelab.deepep.build import Build
from moelab.deepep.probe import Expected
from moelab.finding import Finding, Severity
from moelab.machine import INFINIBAND, Machine

PREFIXES = ("NCCL_", "NVSHMEM_", "UCX_", "EP_")


@dataclass(frozen=True, kw_only=True)
class Harmful:
    """A value that keeps DeepEP from working or slows it down, whatever the cluster."""

    name: str
    values: tuple[str, ...]
    severity: Severity
    consequence: str


HARMFUL = (
    Harmful(
        name="NCCL_P2P_DISABLE",
        values=("1",),
        severity="error",
        consequence="GPUs of a node do not reach each other's memory: no NVLink for DeepEP, nor for the rest",
    ),
    Harmful(
        name="NCCL_P2P_LEVEL",
        values=("LOC", "0"),
        severity="error",
        consequence="GPUs of a node do not reach each other's memory",
    ),
    Harmful(
        name="NCCL_CUMEM_ENABLE",
        values=("0",),
        severity="error",
        consequence="NCCL cannot register the symmetric window that DeepEP V2's buffer lies in",
    ),
    Harmful(
        name="NCCL_WIN_ENABLE",
        values=("0",),
        severity="error",
        consequence="NCCL cannot register the symmetric window that DeepEP V2's buffer lies in",
    ),
    Harmful(
        name="NCCL_IB_DISABLE",
        values=("1",),
        severity="warning",
        consequence="NCCL sends between nodes over TCP, and DeepEP V2 has no GIN",
    ),
    Harmful(
        name="EP_SUPPRESS_NCCL_CHECK",
        values=("1",),
        severity="warning",
        consequence="two different NCCL libraries go unnoticed until one crashes",
    ),
    Harmful(
        name="NCCL_DEBUG",
        values=("TRACE",),
        severity="warning",
        consequence="every collective writes to the log and becomes slower",
    ),
    Harmful(
        name="CUDA_LAUNCH_BLOCKING",
        values=("1",),
        severity="warning",
        consequence="communication and computation do not overlap",
    ),
)


def check_variables(machine: Machine, build: Build, expected: Expected) -> Iterator[Finding]:
    """What is set, what differs from the profile, what harms, and what names something that is not there."""
    held = {name: value for name, value in sorted(machine.env.items()) if name.startswith(PREFIXES)}
    listed = ", ".join(f"{name}={value}" for name, value in held.items())
    yield Finding(name="communication variables", severity="note", found=listed or "none set")
    for name, wanted in sorted(expected.variables.items()):
        if machine.env.get(name) != wanted:
            given = f"{name}={machine.env[name]}" if name in machine.env else f"{name} is not set"
            yield Finding(
                name=name,
                severity="warning",
                found=given,
                cause=f"the cluster's profile says {name}={wanted}",
                consequence="ranks may talk over other cards or in another way than the profile was measured with",
                remedy=f"export {name}={wanted} in the job's script, or correct the profile",
            )
    for harmful in HARMFUL:
        value = machine.env.get(harmful.name)
        if value in harmful.values and expected.variables.get(harmful.name) != value:
            yield Finding(
                name=harmful.name,
                severity=harmful.severity,
                found=f"{harmful.name}={value}",
                cause="it is set in this shell, its profile or the container's image",
                consequence=harmful.consequence,
                remedy=f"unset {harmful.name}",
            )
    yield from _missing_devices(machine)


def _missing_devices(machine: Machine) -> Iterator[Finding]:
    """Variables that name cards or interfaces of another machine: the usual fault of a script that was copied."""
    cards, interfaces = machine.names(INFINIBAND), machine.names("/sys/class/net")
    for name, held in (
        ("NCCL_IB_HCA", cards),
        ("NVSHMEM_HCA_LIST", cards),
        ("UCX_NET_DEVICES", [*cards, *interfaces]),
        ("EP_NIC_NAME", cards),
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interfaces),
    ):
        value = machine.env.get(name, "")
        missing = [one for one in _named(value) if not _present(one, held, exact=_exact(name, value))]
        if missing:
            yield Finding(
                name=name,
                severity="error",
                found=f"{name}={value}; here is no {', '.join(missing)}",
                cause=f"this machine has {', '.join(held) or 'none'}; the value is another machine's",
                consequence="the library finds no device and fails, or takes a slower one",
                remedy=f"set {name} to what is here, or unset it and let the library choose",
            )


def _named(value: str) -> list[str]:
    """Device names of a list such as ``=mlx5_0:1,mlx5_1:1``; a leading ``^`` excludes, which names nothing."""
    if value.startswith("^") or value in ("", "all"):
        return []
    return [re.split(r":", one)[0] for one in value.removeprefix("=").split(",") if one]


def _exact(name: str, value: str) -> bool:
    """NCCL's lists are prefixes unless they start with ``=``; the others are whole names."""
    return value.startswith("=") or not name.startswith("NCCL_")


def _present(wanted: str, held: list[str], *, exact: bool) -> bool:
    return any(one == wanted if exact else one.startswith(wanted) for one in held)
