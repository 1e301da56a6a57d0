"""The experiment's JSON file: written whole after every case, so that a case that fails costs nothing but itself."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moelab.machine import environment
from moelab.mxfp8.grouped_gemm import describe, require_kernels, time_case, time_components, why_not
from moelab.mxfp8.grouped_gemm_cases import PRECISIONS, Case, Precision, require_divisible
from moelab.mxfp8.timing import measure_peaks

SCHEMA = 1
WHAT = "grouped GEMM of routed experts, forward and backward"
PEAK_OF = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "mxfp8_wgrad_bf16": "mxfp8"}
"""Which measured peak a precision's rate is held against."""


class Report:
    """The content of one file and where it lies."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "label": "measured" if device.type == "cuda" else "dry run",
            "what": WHAT,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "hardware": hardware(device),
            "versions": environment()["packages"],
            "refused": {},
            "peaks": {},
            "rows": [],
            "components": [],
            "errors": [],
        }

    def save(self) -> None:
        """Replace the file."""
        # moelab.runs.files would do, but its package loads pandas, which a bare GPU machine need not have.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.content, indent=1, allow_nan=False) + "\n")
        unfinished.replace(self.path)

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows with their fraction of the measured peak."""
        found = [{**row, "fraction_of_peak": self._fraction(row)} for row in rows]
        self.content["rows"] += found
        return found

    def _fraction(self, row: dict[str, Any]) -> float | None:
        peak = self.content["peaks"].get(f"{PEAK_OF[row['precision']]}_tflops")
        return round(row["tflops"] / peak, 4) if peak else None

    def fail(self, case: Case, what: str, error: Exception) -> None:
        """Note that something of a case could not be measured."""
        first = (str(error).strip().splitlines() or [""])[0]
        self.content["errors"].append({**describe(case), "what": what, "error": f"{type(error).__name__}: {first}"})
        say(f"  {what} failed: {type(error).__name__}: {first}")


def hardware(device: torch.device) -> dict[str, Any]:
    """The device: name, SM count, memory and driver."""
    if device.type != "cuda":
        return {"gpu": None, "processor": environment()["processor"]}
    properties = torch.cuda.get_device_properties(device)
    drivers = [gpu["driver"] for gpu in environment()["gpus"]]
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "driver": drivers[0] if drivers else None,
    }


def run(
    cases: Sequence[Case],
    path: Path,
    *,
    precisions: Sequence[Precision] | None = None,
    budget_s: float = 220,
    compiled: bool = True,
    with_components: bool = True,
) -> dict[str, Any]:
    """Measure all cases on this GPU.

    Args:
        cases: in the order of importance.
        path: of the JSON file.
        precisions: by default BF16 and all that this GPU has kernels for; one that is asked for must be possible.
        budget_s: no case is begun after it.
        compiled: through ``torch.compile``.
        with_components: time the kernels alone, too.

    Raises:
        NotDivisible: for dimensions that the kernels cannot take.
        NoKernels: where a precision that was asked for, or BF16, cannot be timed.

    Returns:
        What the file has.
    """
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refused = {name: problem for name in PRECISIONS if (problem := why_not(name))}
    possible: list[Precision] = [name for name in PRECISIONS if name not in refused] or ["bf16"]
    chosen = list(precisions or possible)
    for case, precision in itertools.product(cases, chosen):
        require_divisible(case, precision)
    for precision in chosen:
        require_kernels(precision)
    report = Report(path, device)
    report.content["refused"] = refused
    report.content["peaks"] = measure_peaks(device)
    report.save()
    say(f"{report.content['hardware']['gpu']}: {report.content['peaks']}")
    for case in cases:
        if time.monotonic() - began > budget_s:
            report.fail(case, "all", TimeoutError(f"not begun: {budget_s:.0f} s were over"))
            continue
        _measure(report, case, chosen, compiled=compiled, with_components=with_components)
        report.save()
        say(f"  {time.monotonic() - began:.0f} s")
    report.content["peaks_after"] = measure_peaks(device)
    report.content["wall_s"] = round(time.monotonic() - began, 1)
    report.save()
    return report.content


def _measure(
    report: Report, case: Case, precisions: Sequence[Precision], *, compiled: bool, with_components: bool
) -> None:
    say(case.name)
    rows = time_case(
        case,
        precisions,
        report.device,
        compiled=compiled,
        failed=lambda precision, error: report.fail(case, precision, error),
    )
    for row in report.add_rows(rows):
        say(f"  {row['precision']:>16} {row['pass']:<17} {row['median_us']:>10.1f} µs {row['tflops']:>7.1f} TFLOP/s")
    report.save()
    for precision in precisions if with_components else ():
        try:
            for row in time_components(case, precision, report.device):
                report.content["components"].append(row)
        except Exception as error:  # as above
            report.fail(case, f"components of {precision}", error)
    if report.device.type == "cuda":
        torch.cuda.empty_cache()


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
