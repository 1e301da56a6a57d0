"""What carries the bytes: RDMA ports and their access to GPU memory, NVLink between all pairs, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from moelab.finding import Finding, fault
from moelab.machine import COLOUR, INFINIBAND, Machine

MEMLOCK_NEEDED_BYTES = 64 << 30  # a choice


class Port(NamedTuple):
    """One port of an RDMA device, such as ``mlx5_0``, in a state such as ``4: ACTIVE, 5: LinkUp``."""

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
            names = ("state", "phys_state", "rate", "link_layer")
            state, link, rate, layer = (machine.text(f"{INFINIBAND}/{device}/ports/{number}/{one}") for one in names)
            gb_s = re.match(r"[\d.]+", rate or "")  # 400 Gb/sec (4X NDR)
            states = ", ".join(one for one in (state, link) if one)
            listed.append(Port(device, states, float(gb_s[0]) / 8 if gb_s else 0.0, layer or "unknown link layer"))
    return listed


def check_rdma(machine: Machine, *, nodes: int = 1, nic_gb_s: float | None = None) -> Iterator[Finding]:
    """Whether the ports of the RDMA cards are up, and as fast as the profile says, or else as the fastest one."""
    name, all_ports = "RDMA devices", ports(machine)
    if not all_ports:
        alone = Finding(name=name, severity="note", found="none: DeepEP works within this node only")
        yield fault(name, nodes=nodes) if nodes > 1 else alone
        return
    active, down = [port for port in all_ports if port.active], [port for port in all_ports if not port.active]
    kinds = sorted({port.link_layer for port in active})
    counted = f"{len(active)} of {len(all_ports)} ports active" + (f" ({', '.join(kinds)})" if kinds else "")
    if down:
        kind = "RDMA ports unmanaged" if all("LinkUp" in port.state for port in down) else "RDMA ports down"
        listed = ", ".join(f"{port.device} ({port.state})" for port in down)
        yield fault(kind, f"{counted}; down: {listed}", severity="warning" if active else "error")
    else:
        yield Finding(name=name, severity="ok", found=counted)
    # Cards of another link layer are not of the fabric, such as the one for Ethernet beside eight for InfiniBand.
    fastest = max(active, key=lambda port: port.rate_gb_s, default=all_ports[0])
    fabric = [port for port in active if port.link_layer == fastest.link_layer]
    wanted = nic_gb_s or fastest.rate_gb_s
    if slow := [port for port in fabric if port.rate_gb_s < 0.99 * wanted]:  # 1 % for rounding
        kind = "RDMA rate of the profile" if nic_gb_s else "RDMA rate"
        yield fault(kind, ", ".join(f"{port.device} {port.rate_gb_s:g} GB/s" for port in slow), wanted=wanted)


def check_gpudirect(machine: Machine) -> Iterator[Finding]:
    """Whether the network cards can reach GPU memory."""
    name = "GPUDirect RDMA"
    if not machine.names(INFINIBAND):
        return
    if "nvidia_peermem" in (machine.text("/proc/modules") or ""):
        yield Finding(name=name, severity="ok", found="nvidia_peermem is loaded")
    elif "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or ""):
        yield Finding(name=name, severity="ok", found="open kernel modules, which export GPU memory (dma-buf)")
    else:
        yield fault(name)


def check_memlock(machine: Machine) -> Finding:
    """Memory that a process may lock; RDMA locks every buffer that it registers."""
    limit = machine.memlock_bytes
    if limit is None:
        return Finding(name="locked memory", severity="ok", found="unlimited")
    found = f"{limit / 2**30:.3g} GiB" if limit >= 2**30 else f"{limit / 2**20:.3g} MiB"
    if limit >= MEMLOCK_NEEDED_BYTES or not machine.names(INFINIBAND):
        return Finding(name="locked memory", severity="note", found=f"{found}; with RDMA it should be unlimited")
    return fault("locked memory", found)


def check_nvlink(machine: Machine, *, needed: bool) -> Finding:
    """NVLink between every pair of GPUs, as ``nvidia-smi topo -m`` shows it.

    ``needed``: DeepEP is installed, so a pair without NVLink is an error.
    """
    topology = machine.run(["nvidia-smi", "topo", "-m"])
    links = nvlink_matrix(topology or "")
    visible = machine.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d,]*", visible):  # nvidia-smi lists all GPUs; UUIDs are not followed
        chosen = [int(one) for one in visible.split(",") if one and int(one) < len(links)]
        links = [[links[a][b] for b in chosen] for a in chosen]
    if len(links) < 2:
        unseen = "is missing or fails" if topology is None else "shows no GPUs"
        found = "one GPU, no pairs" if links else f"unknown: `nvidia-smi topo -m` {unseen}"
        return Finding(name="NVLink", severity="note", found=found)
    pairs = list(combinations(range(len(links)), 2))
    without = [f"{a}-{b} ({links[a][b]})" for a, b in pairs if not links[a][b].startswith("NV")]
    if not without:
        kinds = ", ".join(sorted({links[a][b] for a, b in pairs}))
        return Finding(name="NVLink", severity="ok", found=f"all {len(pairs)} pairs of {len(links)} GPUs ({kinds})")
    named = ", ".join(without[:4]) + (", …" if len(without) > 4 else "")
    found = f"missing between {len(without)} of {len(pairs)} pairs: {named}"
    return fault("NVLink", found, severity="error" if needed else "note")


def nvlink_matrix(topology: str) -> list[list[str]]:
    """Connections between GPUs, such as ``NV18`` or ``SYS``, from the output of ``nvidia-smi topo -m``."""
    # Headings are underlined.
    rows = [line.split() for line in COLOUR.sub("", topology).splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]  # unlike the heading, which also begins with GPU0
    return [row[1 : len(rows) + 1] for row in rows]
