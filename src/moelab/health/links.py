"""What carries the bytes: RDMA ports and their access to GPU memory, NVLink between all pairs, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from moelab.finding import Finding
from moelab.machine import INFINIBAND, Machine

if TYPE_CHECKING:
    from moelab.hardware import Cluster

MEMLOCK_NEEDED_BYTES = 64 << 30


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the hardware profile says of a job, as far as it is known.

    Attributes:
        nodes: hosts that take part.
        nic_gb_s: network bandwidth of one GPU each way, GB/s.
    """

    nodes: int = 1
    nic_gb_s: float | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Expected:
        """Of a hardware profile such as ``cluster_of("b200_x256")``."""
        nic = cluster.node.nic_gb_s
        return cls(nodes=cluster.nodes, nic_gb_s=None if nic is None else float(nic))


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an RDMA device.

    Attributes:
        device: such as ``mlx5_0``.
        state: logical and physical, such as ``4: ACTIVE, 5: LinkUp``.
        rate_gb_s: each way.
        link_layer: ``InfiniBand`` or ``Ethernet``.
    """

    device: str
    state: str
    rate_gb_s: float
    link_layer: str

    @property
    def active(self) -> bool:
        """Whether it can send."""
        return "ACTIVE" in self.state


def ports(machine: Machine) -> list[Port]:
    """Ports of the RDMA devices, as ``/sys/class/infiniband`` lists them."""
    listed = []
    for device in machine.names(INFINIBAND):
        for number in machine.names(f"{INFINIBAND}/{device}/ports"):
            folder = f"{INFINIBAND}/{device}/ports/{number}"
            states = [machine.text(f"{folder}/{name}") for name in ("state", "phys_state")]
            rate = re.match(r"[\d.]+", machine.text(f"{folder}/rate") or "")  # 400 Gb/sec (4X NDR)
            listed.append(
                Port(
                    device=device,
                    state=", ".join(state for state in states if state),
                    rate_gb_s=float(rate[0]) / 8 if rate else 0.0,
                    link_layer=machine.text(f"{folder}/link_layer") or "unknown link layer",
                )
            )
    return listed


def check_rdma(machine: Machine, expected: Expected) -> Iterator[Finding]:
    """Ports of the RDMA cards: up, and as fast as the profile says, or without one as the fastest."""
    all_ports = ports(machine)
    if not all_ports:
        if expected.nodes > 1:
            yield Finding(
                name="RDMA devices",
                severity="error",
                found="none",
                cause=f"{INFINIBAND} is empty: no card, no driver, or the container does not see them",
                consequence=f"DeepEP cannot send between {expected.nodes} nodes, and NCCL falls back to TCP",
                remedy="install the card's driver, and give the container /dev/infiniband (--device or a plugin)",
            )
        else:
            yield Finding(name="RDMA devices", severity="note", found="none: DeepEP works inside this node only")
        return
    active, down = [port for port in all_ports if port.active], [port for port in all_ports if not port.active]
    kinds = sorted({port.link_layer for port in active})
    counted = f"{len(active)} of {len(all_ports)} ports active" + (f" ({', '.join(kinds)})" if kinds else "")
    if down:
        linked = all("LinkUp" in port.state for port in down)
        yield Finding(
            name="RDMA devices",
            severity="warning" if active else "error",
            found=f"{counted}; down: {', '.join(f'{port.device} ({port.state})' for port in down)}",
            cause="the link is there, but the subnet manager has not set the port up"
            if linked
            else "a cable, a transceiver or a switch port failed, or the card is for storage or not in use",
            consequence="NCCL leaves these cards out, and their GPUs share others; with none left there is no RDMA",
            remedy="ibstat says more; name the cards that should be used in NCCL_IB_HCA",
        )
    else:
        yield Finding(name="RDMA devices", severity="ok", found=counted)
    wanted = expected.nic_gb_s or max((port.rate_gb_s for port in active), default=0.0)
    if slow := [port for port in active if port.rate_gb_s < 0.99 * wanted]:
        yield Finding(
            name="RDMA rate",
            severity="warning",
            found=", ".join(f"{port.device} {port.rate_gb_s:g} GB/s" for port in slow),
            cause=f"the profile says {wanted:g} GB/s for a card; a slower card, or a link that trained down"
            if expected.nic_gb_s
            else f"the others have {wanted:g} GB/s: a link that trained down, or a card of another kind",
            consequence="a collective over all cards goes at the pace of the slowest, and the projection is too fast",
            remedy="look at the link with ibstat or mlxlink; leave a card of another kind out of NCCL_IB_HCA",
        )


def check_gpudirect(machine: Machine) -> Iterator[Finding]:
    """Whether the network cards may reach GPU memory."""
    if not machine.names(INFINIBAND):
        return
    if "nvidia_peermem" in (machine.text("/proc/modules") or ""):
        yield Finding(name="GPUDirect RDMA", severity="ok", found="nvidia_peermem is loaded")
    elif "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or ""):
        found = "open kernel modules, which export GPU memory (dma-buf)"
        yield Finding(name="GPUDirect RDMA", severity="ok", found=found)
    else:
        yield Finding(
            name="GPUDirect RDMA",
            severity="warning",
            found="neither nvidia_peermem nor the open kernel modules",
            cause="the network card reaches GPU memory through one of the two",
            consequence="NCCL copies through the host, and GPU-initiated networking is not available",
            remedy="modprobe nvidia_peermem, or install the driver's open kernel modules",
        )


def check_memlock(machine: Machine) -> Iterator[Finding]:
    """Memory that a process may lock: what RDMA registers is locked."""
    limit = machine.memlock_bytes
    if limit is None:
        yield Finding(name="locked memory", severity="ok", found="unlimited")
        return
    found = f"{limit / 2**30:.3g} GiB" if limit >= 2**30 else f"{limit / 2**20:.3g} MiB"
    if limit >= MEMLOCK_NEEDED_BYTES or not machine.names(INFINIBAND):
        yield Finding(name="locked memory", severity="note", found=f"{found}; RDMA would want it unlimited")
        return
    yield Finding(
        name="locked memory",
        severity="warning",
        found=found,
        cause="the limit (ulimit -l) is that of the shell, the service or the container",
        consequence="registering buffers fails with `Cannot allocate memory` from the verbs library",
        remedy="ulimit -l unlimited; --ulimit memlock=-1 for a container; for Slurm PropagateResourceLimitsExcept",
    )


def check_nvlink(machine: Machine, *, needed: bool) -> Iterator[Finding]:
    """NVLink between every pair of GPUs, as ``nvidia-smi topo -m`` shows it.

    Args:
        machine: this node.
        needed: whether DeepEP is installed, so that a pair without NVLink is an error.
    """
    topology = machine.run(["nvidia-smi", "topo", "-m"])
    links = nvlink_matrix(topology or "")
    visible = machine.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d,]*", visible):  # nvidia-smi lists all GPUs; UUIDs are not followed
        chosen = [int(one) for one in visible.split(",") if one and int(one) < len(links)]
        links = [[links[a][b] for b in chosen] for a in chosen]
    if len(links) < 2:
        unseen = "is missing or fails" if topology is None else "shows no GPUs"
        found = "one GPU, no pairs" if links else f"not seen: `nvidia-smi topo -m` {unseen}"
        yield Finding(name="NVLink", severity="note", found=found)
        return
    pairs = list(combinations(range(len(links)), 2))
    without = [(a, b, links[a][b]) for a, b in pairs if not links[a][b].startswith("NV")]
    if not without:
        kinds = ", ".join(sorted({links[a][b] for a, b in pairs}))
        yield Finding(name="NVLink", severity="ok", found=f"all {len(pairs)} pairs of {len(links)} GPUs ({kinds})")
        return
    named = ", ".join(f"{a}-{b} ({kind})" for a, b, kind in without[:4]) + (", …" if len(without) > 4 else "")
    yield Finding(
        name="NVLink",
        severity="error" if needed else "note",
        found=f"{len(without)} of {len(pairs)} pairs have none: {named}",
        cause="PCIe cards, cards bridged in pairs, a virtual machine with a part of the GPUs, or a fabric that is down",
        consequence="DeepEP moves tokens inside a node over NVLink alone and refuses or hangs on such pairs",
        remedy="choose linked GPUs (CUDA_VISIBLE_DEVICES), start nvidia-fabricmanager, or use ep_backend=standard",
    )


def nvlink_matrix(topology: str) -> list[list[str]]:
    """Connections between GPUs, such as ``NV18`` or ``SYS``, from the matrix that ``nvidia-smi topo -m`` prints."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", topology)  # headings are underlined
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # not the heading, which also starts with GPU0
    return [row[1 : len(rows) + 1] for row in rows]
