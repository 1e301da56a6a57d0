"""What a node says of itself without a measurement: its GPUs, its kernel log and its network cards. Loads no torch.

Source of the numbers: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moelab.deepep.fabric import Port, ports
from moelab.finding import Finding
from moelab.launch.gpu_state import check_gpus, read_gpus
from moelab.machine import INFINIBAND, Machine

UNREAD = "kernel log"
APPLICATION_XIDS = {13: "graphics engine exception", 31: "page fault", 43: "stopped processing", 45: "cleanup"}
"""Xids that a faulty program makes on a sound GPU; any other says something about the GPU or its driver."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, *)?(.*)")


def check_node(machine: Machine) -> Iterator[Finding]:
    """Everything here."""
    yield from check_gpus(read_gpus(machine))
    yield from check_kernel_log(machine)
    yield from check_links(machine)


def check_kernel_log(machine: Machine) -> Iterator[Finding]:
    """Xid messages of the NVIDIA driver since the node was started."""
    log = machine.run(["dmesg"])
    if log is None:
        log = machine.run(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"])
    if not log:
        restricted = machine.text("/proc/sys/kernel/dmesg_restrict") == "1"
        why = "permission denied (kernel.dmesg_restrict is 1)" if restricted else "dmesg and journalctl do not answer"
        yield Finding(name=UNREAD, severity="note", found=f"cannot be read: {why}; Xid errors are not known")
        return
    found = [(match[1], int(match[2]), match[0][6:]) for match in XID.finditer(log)]
    for number in sorted({number for _, number, _ in found}):
        yield _xid(number, [entry for entry in found if entry[1] == number])
    if not found:
        yield Finding(name="Xid errors", severity="ok", found="none in the kernel log")


def check_links(machine: Machine) -> Iterator[Finding]:
    """Ports of the RDMA cards: up, and as fast as the others."""
    found = ports(machine)
    if not found:
        yield Finding(name="network links", severity="note", found="no RDMA card")
        return
    up, down = [port for port in found if port.active], [port for port in found if not port.active]
    if down:
        yield _links_down(machine, down, up)
    fastest = max((port.rate_gb_s for port in up), default=0.0)
    if slow := [port for port in up if port.rate_gb_s < fastest]:
        listed = ", ".join(f"{port.device} {port.rate_gb_s:g} GB/s" for port in slow)
        yield Finding(
            name="network rate",
            severity="warning",
            found=f"{listed}; the others {fastest:g} GB/s",
            cause="a link that trained down, or a card of another kind",
            consequence="an all-reduce over all cards goes at the pace of the slowest",
            remedy="reseat or replace the cable; leave a card of another kind out of NCCL_IB_HCA",
        )
    if up and not slow:
        yield Finding(name="network links", severity="ok", found=f"{len(up)} ports up, {fastest:g} GB/s each")


def _links_down(machine: Machine, down: Sequence[Port], up: Sequence[Port]) -> Finding:
    listed = [f"{port.device} ({_link_state(machine, port.device)})" for port in down]
    linked = all("LinkUp" in one for one in listed)
    return Finding(
        name="network links",
        severity="warning" if up else "error",
        found=f"{len(down)} of {len(down) + len(up)} ports are down: {', '.join(listed)}",
        cause="the link is there, but the subnet manager has not set the port up"
        if linked
        else "a cable, a transceiver or a switch port failed, or the card is not in use",
        consequence="NCCL leaves the card out, and its GPU shares another's",
        remedy="ibstat says more; a card that is not meant for training is left out of NCCL_IB_HCA",
    )


def _xid(number: int, entries: Sequence[tuple[str, int, str]]) -> Finding:
    devices = ", ".join(sorted({device for device, _, _ in entries}))
    program = number in APPLICATION_XIDS
    return Finding(
        name=f"Xid {number}",
        severity="warning" if program else "error",
        found=f"{len(entries)} since the node was started, on {devices}; last: {entries[-1][2][:160]}",
        cause="most often a program that failed" if program else "the GPU, its link or its driver failed",
        consequence="a run that was on it has ended" if program else "the next run on it is likely to end the same way",
        remedy="look for the program that ran then"
        if program
        else f"look {number} up in docs.nvidia.com/deploy/xid-errors, and drain the node",
    )


def _link_state(machine: Machine, device: str) -> str:
    """State and physical state of a card's ports, such as ``1: DOWN, 3: Disabled``."""
    folder = f"{INFINIBAND}/{device}/ports"
    files = [f"{folder}/{number}/{name}" for number in machine.names(folder) for name in ("state", "phys_state")]
    return ", ".join(text for text in map(machine.text, files) if text)
