"""Hold the projection against everything that was measured.

python -m benchmarks.validation              # every step with its error, then errors by kind, and the goals
python -m benchmarks.validation --parts      # parts of steps and memory too
python -m benchmarks.validation --write      # the tables that the package carries, and docs/measurements.md's
python -m benchmarks.validation --fit        # the fitted constants, as the rows that they were fitted on give them
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from moelab.files import write_whole
from moelab.machine import git_commit
from moelab.planning.measured import TWO_BY_TWO, load_measured
from moelab.planning.time.calibration import fitted

from .gemm_fit import fit_file
from .table import errors_by_kind, goals, not_predicted, refit, table_file, table_rows, with_errors
from .two_by_two import finished

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "src" / "moelab" / "data", ROOT / "docs" / "measurements.md"
TABLE, GEMM_FIT, TWO_BY_TWO_FILE = DATA / "validation.json", DATA / "gemm_fit.json", DATA / "two_by_two.json"


def one_row_a_line(content: Any) -> str:
    """JSON in which a difference is as short as what differs: mappings over lines, rows of a list on one each."""
    if isinstance(content, dict):
        lines = [f"{json.dumps(key)}: {one_row_a_line(value)}" for key, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    if isinstance(content, list) and content and isinstance(content[0], dict | list):
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in content) + "\n]"
    return json.dumps(content, ensure_ascii=False)


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", action="store_true", help="print parts of steps and memory too")
    parser.add_argument(
        "--write", action="store_true", help=f"predict every row anew, into {TABLE.name} and {PAGE.name}"
    )
    parser.add_argument("--fit", action="store_true", help="print the fitted constants, found again")
    options = parser.parse_args()
    if options.fit:
        found = refit()
        for name in fitted():
            print(f"{name}: {getattr(found, name):.7g}")
        return
    if options.write:
        content = table_file(date=datetime.now(UTC).isoformat(timespec="seconds"), git_commit=git_commit())
        write_whole(TABLE, one_row_a_line(content) + "\n")
        write_whole(GEMM_FIT, one_row_a_line(fit_file()) + "\n")
        write_whole(TWO_BY_TWO_FILE, one_row_a_line(finished(load_measured(TWO_BY_TWO).rows)) + "\n")
        write_whole(PAGE, with_errors(PAGE.read_text(), table_rows()))
        return
    rows = table_rows()
    for row in rows:
        if row.of == "step" or options.parts:
            inside = "" if row.interval is None else "in " if row.inside else "OUT"
            figures = f"{row.measured:10.1f} {row.predicted:10.1f} {row.error:+7.1f} {inside:3}"
            print(f"{figures} {row.kind:6} {row.source}: {row.name}")
    for one in not_predicted():
        print(f"not predicted: {one['source']}: {one['what']}: {one['why']}")
    print(errors_by_kind(rows).to_string())
    print(pd.DataFrame(goals(rows)).set_index("goal").to_string())


if __name__ == "__main__":
    main()
