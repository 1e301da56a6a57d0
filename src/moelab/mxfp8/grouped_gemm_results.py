"""Stored results of the grouped-GEMM experiment, for machines that cannot run it: read and labelled, never mixed.

The package carries one measurement on an H100; a file of any other machine, written by ``benchmarks/grouped_gemm.py``,
is read the same way. What is shown from a file is a replay and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from moelab.errors import BadInput
from moelab.mxfp8.grouped_gemm_cases import CASES, Case, GroupedPrecision, parse_case

STORED = "grouped_gemm_h100.json"
SCHEMA = 1
SHAPE = ["m", "n", "k", "groups", "sizes"]


@dataclass(frozen=True, kw_only=True)
class GroupedGemmResult:
    """One file."""

    stamp: str  # where the figures come from, for a figure's title: ``measured on …, date, versions``
    rows: pd.DataFrame  # for each case, precision and pass; times in µs
    components: pd.DataFrame  # a row for each kernel of a case; may be empty

    def speedups(self, precision: str) -> pd.DataFrame:
        """Times of forward and backward in a precision beside those of BF16.

        A row for each case that has both: its shape, ``bf16_us``, ``low_us``, their rates, and ``speedup``.
        """
        chosen = self.rows[self.rows["pass"].eq("forward+backward")]
        columns = [*SHAPE, "median_us", "iqr_us", "tflops", "fraction_of_peak"]
        bf16, low = (chosen[chosen["precision"] == name][columns] for name in ("bf16", precision))
        both = bf16.merge(low, on=SHAPE, suffixes=("_bf16", "_low"))
        both = both.rename(columns={"median_us_bf16": "bf16_us", "median_us_low": "low_us"})
        return both.assign(speedup=both["bf16_us"] / both["low_us"])


def case_of(row: Mapping[Any, Any]) -> Case:
    """The case of a row of a table here."""
    return Case(**{name: row[name] for name in SHAPE})


def obtain(
    how: Literal["run", "replay"], *, path: str = "", precision: GroupedPrecision = "fp8", shapes: str = ""
) -> GroupedGemmResult:
    """Run the experiment on this machine's GPU, or read what a run left.

    Args:
        how: ``run`` or ``replay``; a machine without a GPU can only replay.
        path: file that a run writes and a replay reads; empty is ``outputs/grouped_gemm.json`` for a run and the stored
            measurement for a replay.
        precision: that a run holds against BF16.
        shapes: that a run measures, ``M,N,K,G`` separated by semicolons; empty for the experiment's own.

    Raises:
        BadInput: for a shape or a file that is none.
        NoKernels: for a run on a machine that cannot time the precision.
    """
    if how == "replay":
        return read_result(path) if path else stored()
    from moelab.mxfp8.grouped_gemm import run  # loads torch, which a replay does not need

    cases = [parse_case(text.strip()) for text in shapes.split(";")] if shapes else CASES
    file = Path(path or "outputs/grouped_gemm.json")
    run(cases, file, precisions=("bf16", precision))
    return read_result(file)


def stored() -> GroupedGemmResult:
    """The measurement that comes with the package."""
    return read_result(str(resources.files("moelab.data.measured") / STORED))


def read_result(path: Path | str) -> GroupedGemmResult:
    """Read a file that ``benchmarks/grouped_gemm.py`` wrote; :class:`BadInput` if it is none."""
    try:
        content = json.loads(Path(path).read_text())
        if content["schema"] != SCHEMA:
            raise BadInput(f"{path} has schema {content['schema']}; this version reads schema {SCHEMA}")
        rows, components = pd.DataFrame(content["rows"] or {}), pd.DataFrame(content["components"])
        if rows.empty:
            raise BadInput(f"{path} has no rows: the run ended before its first shape")
        rows = rows.astype(dict.fromkeys(("median_us", "iqr_us", "tflops", "fraction_of_peak"), float))
        packages = content["versions"]
        versions = [f"{name} {packages[name]}" for name in ("torch", "torchao") if packages.get(name)]
        stamp = f"{content['label']} on {content['hardware']['gpu']}, {', '.join([content['date'], *versions])}"
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}. Give a file of benchmarks/grouped_gemm.py") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # something else is in the place of a table
        raise BadInput(f"{path} is not a result of benchmarks/grouped_gemm.py: {error!r}") from error
    return GroupedGemmResult(stamp=stamp, rows=rows, components=components)
