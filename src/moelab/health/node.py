"""What a node can report without a measurement. Imports little, so that a node with a broken package still reports.

``srun … python -m moelab.health.node`` prints the report as one line of JSON; :mod:`moelab.health.preflight` starts it
on every node and compares the reports.

Sources: ``nvidia-smi --help-query-gpu`` for the fields of a GPU, ``nvml.h`` (NvmlClocksEventReasons) for the bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moelab
from moelab.finding import Finding, fault
from moelab.health.deepep import check_rdma, examine_environment
from moelab.machine import APPLICATION_XIDS, Machine, gpu_problem, gpus, leading_number, this_machine, version

UNREAD = "kernel log"
_FABRIC = re.compile(r"^\s+Fabric\s*\n\s+State\s*:\s*(.*)\n\s+Status\s*:\s*(.*)$", re.M)
XID = re.compile(r"NVRM: (Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d+).*)")
VERSIONS = ("torch", "torchtitan", "torchao", "triton", "nvidia-nccl-cu13", "deep-ep")
"""Packages that must be the same on all nodes."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only measured

CLOCK_TOLERANCE = 0.05
"""How far below the node's median clock, under the same load, a GPU counts as slow. A choice."""
FIELDS = (
    "index",
    "pci.bus_id",
    "clocks.sm",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
)
FORMAT = "--format=csv,noheader"
REMAP_FIELDS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")


def check_node(machine: Machine) -> Iterator[Finding]:
    """A node's GPUs, its kernel log and its network cards."""
    yield from check_gpus(read_gpus(machine))
    yield from check_fabric(machine)
    yield from check_kernel_log(machine)
    yield from check_rdma(machine)


def check_fabric(machine: Machine) -> Iterator[Finding]:
    """Whether each GPU has joined the NVLink fabric of its NVSwitches; nothing is said of GPUs that have none."""
    sections = _FABRIC.findall(machine.run(["nvidia-smi", "-q"]) or "")
    states = [(state.strip(), status.strip()) for state, status in sections]
    if not states:
        answer = machine.run(["nvidia-smi", "--query-gpu=index,fabric.state,fabric.status", FORMAT]) or ""
        states = [(state, status) for _, state, status in _rows(answer, 3)]
    joined = [one for one in states if one[0] in ("Not Started", "In Progress", "Completed")]
    if bad := [one for one in joined if one != ("Completed", "Success")]:
        counts = Counter(f"{state}, {status}" for state, status in bad)
        yield fault("fabric", "; ".join(f"{count} of {len(states)} GPUs: {words}" for words, count in counts.items()))
    elif joined:
        yield Finding(name="fabric", severity="ok", found=f"{len(joined)} GPUs have joined it")


def check_kernel_log(machine: Machine) -> Iterator[Finding]:
    """Xid messages of the NVIDIA driver since the node booted."""
    log = machine.run(["dmesg"])
    if log is None:
        # Where dmesg is restricted, those who may read the journal still see the kernel's messages.
        log = machine.run(["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet"])
    if not log:
        restricted = machine.text("/proc/sys/kernel/dmesg_restrict") == "1"
        why = "permission denied (kernel.dmesg_restrict is 1)" if restricted else "dmesg and journalctl do not answer"
        yield Finding(name=UNREAD, severity="note", found=f"cannot be read: {why}; Xid errors would go unseen")
        return
    by_number: dict[int, list[tuple[str, str]]] = {}
    for line, device, number in XID.findall(log):
        by_number.setdefault(int(number), []).append((device, line))
    for number, entries in sorted(by_number.items()):
        devices = ", ".join(sorted({device for device, _ in entries}))
        found = f"{len(entries)} since the node booted, on {devices}; last: {entries[-1][1][:160]}"
        yield fault("Xid of a program" if number in APPLICATION_XIDS else "Xid", found, number=number)
    if not by_number:
        yield Finding(name="Xid errors", severity="ok", found="none in the kernel log")


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU at one moment; None where it does not say."""

    index: int  # nvidia-smi's
    reasons: int | None  # bits that say why its clocks are not at their highest
    clock_mhz: float | None  # of its multiprocessors
    temperature_c: float | None
    uncorrected_errors: int | None  # ECC errors since the driver was loaded
    remap_pending: bool | None  # whether a memory row will be replaced at the next reset
    remap_failed: bool | None  # whether replacing a memory row failed

    @property
    def idle(self) -> bool:
        """Whether nothing runs on it, so that its clock says nothing."""
        return bool((self.reasons or 0) & 0x1)


REASONS = {
    0x02: "applications clocks",
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""The relevant bits of nvml.h's clock event reasons. The power cap is no fault: a busy GPU runs at it."""


def read_gpus(machine: Machine) -> list[GpuState]:
    """What nvidia-smi reports; empty without it."""
    remapped = machine.run(["nvidia-smi", f"--query-remapped-rows={','.join(REMAP_FIELDS)}", FORMAT]) or ""
    return list(parse_gpus(machine.run(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", FORMAT]) or "", remapped))


def parse_gpus(csv: str, remapped: str = "") -> Iterator[GpuState]:
    """States from nvidia-smi's answers: :data:`FIELDS`, and :data:`REMAP_FIELDS` of the GPUs that remap rows."""
    rows_of = {cells[0]: cells[1:] for cells in _rows(remapped, len(REMAP_FIELDS))}
    for index, bus_id, clock, temperature, errors, reasons in _rows(csv, len(FIELDS)):
        pending, failed = rows_of.get(bus_id, ("", ""))  # GPUs before Ampere have no row remapping
        yield GpuState(
            index=int(index),
            clock_mhz=leading_number(clock),
            temperature_c=leading_number(temperature),
            uncorrected_errors=None if leading_number(errors) is None else int(errors),
            remap_pending=_yes(pending),
            remap_failed=_yes(failed),
            reasons=int(reasons, 16) if re.fullmatch(r"0x[0-9A-Fa-f]+", reasons) else None,
        )


def _rows(csv: str, columns: int) -> Iterator[list[str]]:
    for line in csv.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == columns:  # any other line is an error message
            yield cells


def check_gpus(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Clocks and why they are low, memory errors."""
    name = "GPU clocks"
    if not gpus:
        problem, unseen = gpu_problem(), "no GPU, or nvidia-smi does not report clocks"
        yield fault(name, problem) if problem else Finding(name=name, severity="note", found=unseen)
        return
    clocks = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz is not None]
    # Clocks say little by themselves; the reasons below say whether they are low for a fault.
    hottest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    found = f"{len(gpus)} GPUs {'idle' if all(gpu.idle for gpu in gpus) else 'under load'}"
    found += f", {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
    found += f", up to {hottest:.0f} °C" if hottest is not None else ""
    yield Finding(name=name, severity="ok", found=found)
    for bit, reason in REASONS.items():
        if slowed := [gpu for gpu in gpus if (gpu.reasons or 0) & bit]:
            yield fault(reason, _named(slowed) + ": at the power limit" * (reason == "software power cap"))
    busy = [(gpu, gpu.clock_mhz) for gpu in gpus if gpu.clock_mhz is not None and not gpu.idle]
    middle = statistics.median(clock for _, clock in busy) if len(busy) > 2 else 0  # two GPUs do not tell which is slow
    if slow := [(gpu, clock) for gpu, clock in busy if clock < (1 - CLOCK_TOLERANCE) * middle]:
        listed = ", ".join(f"GPU {gpu.index} {clock:.0f} MHz" for gpu, clock in slow)
        yield fault("GPU clock", f"{listed}; median {middle:.0f} MHz")
    if bad := [f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected" for gpu in gpus if gpu.uncorrected_errors]:
        yield fault("ECC errors", ", ".join(bad))
    if failed := [gpu for gpu in gpus if gpu.remap_failed]:
        yield fault("row remapping failed", f"{_named(failed)}: failed")
    if pending := [gpu for gpu in gpus if gpu.remap_pending]:
        yield fault("row remapping", f"{_named(pending)}: pending")


def _named(gpus: Sequence[GpuState]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)}"


def _yes(cell: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(cell.lower())  # drivers differ: Yes or 1


def report(*, writes: Path | None = None, sees: Sequence[Path] = (), nodes: int = 1) -> dict[str, Any]:
    """What :func:`moelab.health.preflight.compare` reads about this node, one of so many.

    Runs or checkpoints are written to the folder ``writes``; every node must see the files and folders of ``sees``.
    """
    machine, problem = this_machine(), gpu_problem()
    devices = () if problem else gpus()
    open_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fabric = [f"fabric: {one.found}" for one in check_fabric(machine) if not one.ok]
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in VERSIONS},
            "moelab": f"{moelab.__version__}, source {_source()}",
            "driver": devices[0].driver if devices else None,
        },
        "gpus": [gpu.name for gpu in devices],
        "gpu_problem": problem or next(iter(fabric), None),
        "memlock_bytes": machine.memlock_bytes,
        "open_files": None if open_files == resource.RLIM_INFINITY else open_files,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "write_problem": _write_problem(writes) if writes else None,
        "unseen": [str(path) for path in sees if not path.exists()],
        "deepep": [one.to_json() for one in examine_environment(machine, nodes=nodes)],
        "time": time.time(),  # last, because the checks above take seconds
    }


def _source() -> str:
    """Digest of moelab's source, which tells apart two copies of the same version."""
    folder = Path(moelab.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())  # \0 ends the name
    return digest.hexdigest()[:8]


def _write_problem(folder: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moelab-node-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())  # a network file system enforces a quota only here
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="moelab.health.node", description="Report on this node, as JSON.")
    parser.add_argument("--writes", type=Path, help="folder of runs or checkpoints, to try to write to")
    parser.add_argument("--sees", type=Path, action="append", default=[], help="file or folder that must be there")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    options = parser.parse_args(arguments)
    print(json.dumps(report(writes=options.writes, sees=options.sees, nodes=options.nodes)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
