"""Clocks, throttling and memory errors of a node's GPUs, as nvidia-smi tells them.

Sources: ``nvidia-smi --help-query-gpu`` for the fields, ``nvml.h`` (NvmlClocksEventReasons) for the reasons' bits.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moelab.finding import Finding, Severity
from moelab.machine import Machine, gpu_problem

CLOCK_TOLERANCE = 0.05
"""Share below the node's median clock, under the same load, from which on a GPU is named. A choice."""
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


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU at one moment; None where it does not say.

    Attributes:
        index: as nvidia-smi counts.
        bus_id: PCI address.
        reasons: bits of why its clocks are not at their highest.
        clock_mhz: of its multiprocessors.
        temperature_c: of the GPU.
        uncorrected_errors: ECC errors since the driver was loaded.
        remap_pending: whether a memory row is replaced at the next reset.
        remap_failed: whether replacing a memory row failed.
    """

    index: int
    bus_id: str
    reasons: int | None
    clock_mhz: float | None
    temperature_c: float | None
    uncorrected_errors: int | None
    remap_pending: bool | None
    remap_failed: bool | None

    @property
    def idle(self) -> bool:
        """Whether nothing runs on it, so that its clock says nothing."""
        return bool((self.reasons or 0) & 0x1)


class Reason(NamedTuple):
    """One bit of nvml.h's clock event reasons."""

    bit: int
    name: str
    severity: Severity
    cause: str = ""
    remedy: str = ""


LOOK = "drain the node and have its {} looked at"
REASONS = (
    Reason(
        0x2, "applications clocks", "warning", "somebody set lower clocks", "nvidia-smi --reset-applications-clocks"
    ),
    Reason(0x4, "software power cap", "note"),
    Reason(
        0x8,
        "hardware slowdown",
        "error",
        "it is too hot, its power supply asserted the brake, or it draws too much",
        LOOK.format("cooling and power"),
    ),
    Reason(
        0x20,
        "software thermal slowdown",
        "warning",
        "the GPU or its memory is above its highest operating temperature",
        "have the node's cooling looked at",
    ),
    Reason(0x40, "hardware thermal slowdown", "error", "it is too hot", LOOK.format("cooling")),
    Reason(
        0x80,
        "hardware power brake",
        "error",
        "the power supply asked for less, such as after one of several failed",
        LOOK.format("power supplies"),
    ),
)


def read_gpus(machine: Machine) -> list[GpuState]:
    """What nvidia-smi says; empty where there is none."""
    remapped = machine.run(["nvidia-smi", f"--query-remapped-rows={','.join(REMAP_FIELDS)}", FORMAT]) or ""
    return list(parse_gpus(machine.run(["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", FORMAT]) or "", remapped))


def parse_gpus(csv: str, remapped: str = "") -> Iterator[GpuState]:
    """States from nvidia-smi's answers.

    Args:
        csv: columns :data:`FIELDS`.
        remapped: columns :data:`REMAP_FIELDS`; GPUs without row remapping are not in it.
    """
    rows_of = {cells[0]: cells[1:] for cells in _rows(remapped, len(REMAP_FIELDS))}
    for index, bus_id, clock, temperature, errors, reasons in _rows(csv, len(FIELDS)):
        pending, failed = rows_of.get(bus_id, ("", ""))
        yield GpuState(
            index=int(index),
            bus_id=bus_id,
            clock_mhz=_number(clock),
            temperature_c=_number(temperature),
            uncorrected_errors=None if _number(errors) is None else int(errors),
            remap_pending=_yes(pending),
            remap_failed=_yes(failed),
            reasons=int(reasons, 16) if re.fullmatch(r"0x[0-9A-Fa-f]+", reasons) else None,
        )


def _rows(csv: str, columns: int) -> Iterator[list[str]]:
    for line in csv.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == columns:  # not so: an error message
            yield cells


def check_gpus(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    """Clocks and why they are low, memory errors."""
    if not gpus:
        if problem := gpu_problem():
            yield Finding(
                name="GPU clocks",
                severity="error",
                found=problem,
                cause="the driver was upgraded without a reboot, is not loaded, or a GPU is lost",
                consequence="what the GPUs of this node do is not known, and CUDA fails there too",
                remedy="drain the node and reboot it",
            )
        else:
            yield Finding(name="GPU clocks", severity="note", found="no GPU, or nvidia-smi does not tell clocks")
        return
    yield _overview(gpus)
    for reason in REASONS:
        slowed = [gpu for gpu in gpus if (gpu.reasons or 0) & reason.bit]
        if not slowed:
            continue
        limit = ": at the power limit" if reason.severity == "note" else ""
        slower = {
            "error": "the GPU runs at half its clock or less, and every other rank waits for it",
            "warning": "the GPU is slower than the others",
        }
        yield Finding(
            name=reason.name,
            severity=reason.severity,
            found=f"{_named(slowed)}{limit}",
            cause=reason.cause,
            consequence=slower.get(reason.severity, ""),
            remedy=reason.remedy,
        )
    yield from _slow_clocks(gpus)
    yield from _memory_errors(gpus)


def _overview(gpus: Sequence[GpuState]) -> Finding:
    clocks = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz is not None]
    hottest = max((gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None), default=None)
    load = "idle" if all(gpu.idle for gpu in gpus) else "under load"
    found = f"{len(gpus)} GPUs {load}"
    found += f", {min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else ""
    found += f", up to {hottest:.0f} °C" if hottest is not None else ""
    return Finding(name="GPU clocks", severity="ok", found=found)


def _slow_clocks(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    busy = [(gpu, gpu.clock_mhz) for gpu in gpus if gpu.clock_mhz is not None and not gpu.idle]
    if len(busy) < 3:
        return
    middle = statistics.median(clock for _, clock in busy)
    slow = [(gpu, clock) for gpu, clock in busy if clock < (1 - CLOCK_TOLERANCE) * middle]
    if slow:
        yield Finding(
            name="GPU clock",
            severity="warning",
            found=", ".join(f"GPU {gpu.index} {clock:.0f} MHz" for gpu, clock in slow) + f"; median {middle:.0f} MHz",
            cause="it is hotter, draws more power than the others, or its clocks are locked",
            consequence="every other rank waits for it",
            remedy="nvidia-smi -q -d PERFORMANCE,CLOCK shows why",
        )


def _memory_errors(gpus: Sequence[GpuState]) -> Iterator[Finding]:
    if bad := [gpu for gpu in gpus if gpu.uncorrected_errors]:
        yield Finding(
            name="ECC errors",
            severity="error",
            found=", ".join(f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected" for gpu in bad),
            cause="memory cells failed since the driver was loaded",
            consequence="the process that reads them is ended, and the job with it",
            remedy="drain the node, reset the GPU and run NVIDIA's field diagnostic",
        )
    if failed := [gpu for gpu in gpus if gpu.remap_failed]:
        yield Finding(
            name="row remapping",
            severity="error",
            found=f"{_named(failed)}: failed",
            cause="there are no spare rows of memory left",
            consequence="memory errors will come again",
            remedy="drain the node and have the GPU replaced",
        )
    if pending := [gpu for gpu in gpus if gpu.remap_pending]:
        yield Finding(
            name="row remapping",
            severity="warning",
            found=f"{_named(pending)}: pending",
            cause="a row of memory failed and is replaced at the next reset",
            consequence="until then the bad row may be used again",
            remedy="drain the node and reset the GPU",
        )


def _named(gpus: Sequence[GpuState]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)}"


def _number(cell: str) -> float | None:
    """The number of a cell such as ``1980 MHz``; None for ``[N/A]``."""
    found = re.match(r"-?\d+(\.\d+)?", cell)
    return float(found[0]) if found else None


def _yes(cell: str) -> bool | None:
    return {"yes": True, "1": True, "no": False, "0": False}.get(cell.lower())
