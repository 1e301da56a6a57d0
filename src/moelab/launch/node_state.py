"""What a node says of itself without a measurement: its GPUs, its kernel log and its network cards. Loads no torch.

Source of the numbers: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from moelab.finding import Finding
from moelab.health.gpu import check_gpus, read_gpus
from moelab.health.links import check_ports
from moelab.machine import Machine

UNREAD = "kernel log"
APPLICATION_XIDS = {13: "graphics engine exception", 31: "page fault", 43: "stopped processing", 45: "cleanup"}
"""Xids that a faulty program makes on a sound GPU; any other says something about the GPU or its driver."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+)(?:, *)?(.*)")


def check_node(machine: Machine) -> Iterator[Finding]:
    """Everything here."""
    yield from check_gpus(read_gpus(machine))
    yield from check_kernel_log(machine)
    yield from check_ports(machine)


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
