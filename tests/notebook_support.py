"""Notebooks as authored, run once for all tests of a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from processes import program

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def notebook_trains(notebook: Path) -> bool:
    """Whether a notebook trains here: then it has a parameter for the number of steps."""
    return re.search(r'"steps = \d', notebook.read_text()) is not None


def sources(name: str) -> list[str]:
    """Of a notebook's code cells."""
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def parameters_cell(name: str) -> str:
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    (source,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    return str(source)


def default_values(name: str) -> dict[str, Any]:
    """What a notebook's parameters cell assigns."""
    values: dict[str, Any] = {}
    exec(parameters_cell(name), {}, values)
    return values


def parameters_of(name: str, **changes: object) -> Any:
    """A notebook's parameters as authored, but for the changes, in the schema that it checks them against itself."""
    from moelab import notebooks  # conftest imports this module for every test

    (schema,) = re.findall(r"= (\w+)\.of\(globals\(\)\)", "".join(sources(name)))
    return getattr(notebooks, schema).of(default_values(name) | changes)


@dataclass(frozen=True)
class Ran:
    """A notebook that ran: the folder that it ran in, and what its code cells showed."""

    folder: Path
    outputs: list[Any]

    @property
    def printed(self) -> str:
        return "".join(output.get("text", "") for output in self.outputs)

    def shown(self, kind: str) -> list[Any]:
        return [output.data[kind] for output in self.outputs if kind in output.get("data", {})]

    def titles(self) -> list[str]:
        return [" ".join(one["layout"]["title"]["text"].replace("<br>", " ").split()) for one in self.shown(PLOTLY)]


def ran(copy: Path) -> Ran:
    cells = nbformat.read(copy, as_version=4).cells
    return Ran(copy.parent, [output for cell in cells if cell.cell_type == "code" for output in cell.outputs])


NO_PICTURES = {"BROWSER_PATH": "/no/browser"}
"""Variables under which figures are shown without a picture each: a Chromium for every notebook takes 5 s of a core."""


def run_by_nbmake(notebook: Path, folder: Path) -> tuple[Ran, str]:
    """The run, without pictures, and what nbmake said if it failed."""
    shutil.copy(notebook, folder)
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite", "--nbmake-timeout=900"]
    command += ["-p", "no:cacheprovider", "."]
    variables = {**os.environ, **NO_PICTURES}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return ran(folder / notebook.name), "" if done.returncode == 0 and "1 passed" in done.stdout else done.stdout


def sbatch_that_tells(folder: Path, called: Path) -> Path:
    """A folder for PATH whose sbatch makes a file when it is asked to submit."""
    programs = folder / "programs"
    programs.mkdir()
    program(programs, "sbatch", f'case "$*" in *--test-only*|*--version*) exit 0;; esac\ntouch "{called}"')
    return programs
