"""What carries the bytes: RDMA devices and their access to GPU memory, NVLink between all pairs, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from moelab.deepep.build import Build
from moelab.deepep.probe import Expected
from moelab.finding import Finding
from moelab.machine import INFINIBAND, Machine

IBGDA = {"EnableStreamMemOPs": r"^1$", "RegistryDwords": r"PeerMappingOverride=1"}
"""Driver parameters for IBGDA: ``docs/nvshmem.md`` of DeepEP 2.1.0."""
MEMLOCK_NEEDED_BYTES = 64 << 30
NVSHMEM_GUIDE = "docs/nvshmem.md of DeepEP"


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an RDMA device; ``rate_gb_s`` each way."""

    device: str
    active: bool
    rate_gb_s: float
    link_layer: str


def ports(machine: Machine) -> list[Port]:
    """Ports of the RDMA devices, as ``/sys/class/infiniband`` lists them."""
    found = []
    for device in machine.names(INFINIBAND):
        for number in machine.names(f"{INFINIBAND}/{device}/ports"):
            folder = f"{INFINIBAND}/{device}/ports/{number}"
            rate = re.match(r"[\d.]+", machine.text(f"{folder}/rate") or "")
            found.append(
                Port(
                    device=device,
                    active="ACTIVE" in (machine.text(f"{folder}/state") or ""),
                    rate_gb_s=float(rate[0]) / 8 if rate else 0.0,
                    link_layer=machine.text(f"{folder}/link_layer") or "unknown link layer",
                )
            )
    return found


def check_rdma(machine: Machine, build: Build, expected: Expected) -> Iterator[Finding]:
    """RDMA devices, their ports, and whether the network card may reach GPU memory."""
    found = ports(machine)
    if not machine.names(INFINIBAND):
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
    active = [port for port in found if port.active]
    kinds = sorted({port.link_layer for port in active})
    text = f"{len(active)} of {len(found)} ports active" + (f" ({', '.join(kinds)})" if kinds else "")
    if len(active) < len(found):
        down = ", ".join(port.device for port in found if not port.active)
        yield Finding(
            name="RDMA devices",
            severity="warning" if active else "error",
            found=f"{text}; down: {down}",
            cause="a cable, a switch port or the subnet manager is missing, or the card is for storage",
            consequence="NCCL leaves these cards out, and their GPUs share others; with none left there is no RDMA",
            remedy="ibstat says more; name the cards that should be used in NCCL_IB_HCA",
        )
    else:
        yield Finding(name="RDMA devices", severity="ok", found=text)
    yield from _slower_than_expected(active, expected)
    yield from _ibstat(machine, build)
    yield _gpudirect(machine)


def _slower_than_expected(active: list[Port], expected: Expected) -> Iterator[Finding]:
    slow = [port for port in active if expected.nic_gb_s and port.rate_gb_s < 0.99 * expected.nic_gb_s]
    if slow:
        yield Finding(
            name="RDMA rate",
            severity="warning",
            found=", ".join(f"{port.device} {port.rate_gb_s:g} GB/s" for port in slow),
            cause=f"the profile says {expected.nic_gb_s:g} GB/s for a card; a slower card, or a link that trained down",
            consequence="the projection is too fast for these cards",
            remedy="look at the link with ibstat or mlxlink, or correct the profile",
        )


def _ibstat(machine: Machine, build: Build) -> Iterator[Finding]:
    """V2 reads the card's bandwidth from ``ibstat`` and chooses its SM count by it."""
    card = machine.env.get("EP_NIC_NAME", "mlx5_0")
    if build.kind != "V2" or f"CA '{card}'" in (machine.run(["ibstat"]) or ""):
        return
    yield Finding(
        name="RDMA bandwidth for DeepEP",
        severity="warning",
        found=f"ibstat does not name {card}",
        cause="DeepEP V2 reads the bandwidth of EP_NIC_NAME (mlx5_0 by default) from ibstat",
        consequence="it takes 0 GB/s, and over several nodes its estimate of SMs divides by that",
        remedy="install infiniband-diags, and set EP_NIC_NAME to a card of "
        + (", ".join(machine.names(INFINIBAND)) or "this node"),
    )


def _gpudirect(machine: Machine) -> Finding:
    peermem = "nvidia_peermem" in (machine.text("/proc/modules") or "")
    open_driver = "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or "")
    if peermem or open_driver:
        found = "nvidia_peermem is loaded" if peermem else "open kernel modules, which export GPU memory (dma-buf)"
        return Finding(name="GPUDirect RDMA", severity="ok", found=found)
    return Finding(
        name="GPUDirect RDMA",
        severity="warning",
        found="neither nvidia_peermem nor the open kernel modules",
        cause="the network card reaches GPU memory through one of the two",
        consequence="NCCL copies through the host, and GPU-initiated networking is not available",
        remedy="modprobe nvidia_peermem, or install the driver's open kernel modules",
    )


def check_gin(machine: Machine, build: Build, expected: Expected) -> Iterator[Finding]:
    """GPU-initiated networking (GIN), which V2 asks NCCL for unless it is told not to."""
    if build.kind != "V2":
        return
    off = machine.env.get("EP_DISABLE_GIN", "0") not in ("", "0")
    possible = any(port.active for port in ports(machine)) and machine.env.get("NCCL_GIN_ENABLE") != "0"
    if off and expected.nodes > 1:
        yield Finding(
            name="GIN",
            severity="error",
            found=f"EP_DISABLE_GIN=1 for {expected.nodes} nodes",
            cause="the variable is meant for ranks that share one node",
            consequence="DeepEP has no way to the other nodes",
            remedy="unset EP_DISABLE_GIN",
        )
    elif off:
        yield Finding(name="GIN", severity="ok", found="off (EP_DISABLE_GIN): NVLink alone")
    elif possible:
        asked = machine.env.get("NCCL_GIN_TYPE")
        kind = {"2": "proxy", "3": "GDAKI"}.get(asked or "", "chosen by NCCL: GDAKI where the card can, else proxy")
        yield Finding(name="GIN", severity="ok", found=f"possible; type {kind} (`moelab doctor --smoke` sees it)")
    elif expected.nodes > 1:
        yield Finding(
            name="GIN",
            severity="error",
            found="not available",
            cause="no active RDMA port, or NCCL_GIN_ENABLE=0",
            consequence="creating the buffer fails: NCCL GIN is unavailable",
            remedy="bring an RDMA port up and unset NCCL_GIN_ENABLE",
        )
    else:
        yield Finding(
            name="GIN",
            severity="warning",
            found="not available, and EP_DISABLE_GIN is not set",
            cause="DeepEP 2.1.0 asks for GIN even inside one node, and without an RDMA port there is none",
            consequence="outside of moelab, which sets it, creating the buffer fails: NCCL GIN is unavailable",
            remedy="export EP_DISABLE_GIN=1",
        )


def check_ibgda(machine: Machine, build: Build, expected: Expected) -> Iterator[Finding]:
    """IBGDA or GDRCopy, which V1's kernels between nodes need; V2 needs neither."""
    if build.kind != "V1":
        return
    listed = machine.text("/proc/driver/nvidia/params") or ""
    values = dict(re.findall(r"^(\w+): \"?(.*?)\"?$", listed, re.M))
    missing = [name for name, wanted in IBGDA.items() if not re.search(wanted, values.get(name, ""))]
    gdrcopy = bool((machine.root / "dev" / "gdrdrv").exists())
    if not missing or gdrcopy:
        how = "the driver's parameters are set" if not missing else "GDRCopy is loaded (slower than the parameters)"
        yield Finding(name="IBGDA", severity="ok", found=how)
        return
    yield Finding(
        name="IBGDA",
        severity="error" if expected.nodes > 1 else "warning",
        found=f"the driver lacks {' and '.join(missing)}, and GDRCopy is not loaded",
        cause="V1 sends between nodes through NVSHMEM's IBGDA, which needs one of the two",
        consequence="V1's kernels between nodes fail when NVSHMEM starts",
        remedy='options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;" in '
        f"/etc/modprobe.d and a reboot, or install GDRCopy ({NVSHMEM_GUIDE})",
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


def check_nvlink(machine: Machine, build: Build) -> Iterator[Finding]:
    """NVLink between every pair of GPUs, as ``nvidia-smi topo -m`` shows it."""
    links = nvlink_matrix(machine.run(["nvidia-smi", "topo", "-m"]) or "")
    visible = machine.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and re.fullmatch(r"[\d,]*", visible):
        chosen = [int(one) for one in visible.split(",") if one and int(one) < len(links)]
        links = [[links[a][b] for b in chosen] for a in chosen]
    if len(links) < 2:
        found = "one GPU, no pairs" if links else "no GPUs"
        yield Finding(name="NVLink", severity="note", found=found)
        return
    pairs = list(combinations(range(len(links)), 2))
    without = [(a, b, links[a][b]) for a, b in pairs if not links[a][b].startswith("NV")]
    if not without:
        kinds = sorted({links[a][b] for a, b in pairs})
        yield Finding(
            name="NVLink", severity="ok", found=f"all {len(pairs)} pairs of {len(links)} GPUs ({', '.join(kinds)})"
        )
        return
    named = ", ".join(f"{a}-{b} ({kind})" for a, b, kind in without[:4]) + (", …" if len(without) > 4 else "")
    yield Finding(
        name="NVLink",
        severity="note" if build.kind == "none" else "error",
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
