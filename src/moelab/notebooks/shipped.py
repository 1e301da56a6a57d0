"""The notebooks that come with moelab: which answers what, and ``moelab notebooks DIR``, which writes them out.

A file that is there already is never written over, whoever wrote it. ``python -m moelab.notebooks.shipped`` prints the
README's table.
"""

from __future__ import annotations

import filecmp
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.data import shipped
from moelab.errors import BadInput
from moelab.files import write_whole

FOLDERS = {"notebooks": "*.ipynb", "papermill_params": "*/*.yaml", "studies": "*.yaml"}
START = "notebooks/00_start_here.ipynb"


@dataclass(frozen=True, kw_only=True)
class WrittenOut:
    """What one call did with each file; names are relative to the folder."""

    folder: str
    written: tuple[str, ...]  # were not there
    kept: tuple[str, ...]  # are not as this version has them: changed by a person, or of another version
    same: tuple[str, ...]  # were there already, as they are here

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return asdict(self)

    def as_text(self) -> str:
        """One line for each file that was kept, the counts, and where to begin."""
        lines = [f"kept {name}: it is not as this version has it" for name in self.kept]
        if self.kept:
            lines.append("to get one of these as moelab has it, move yours away and call this again")
        files = {"written": self.written, "kept": self.kept, "there already": self.same}
        counts = ", ".join(f"{len(names)} {what}" for what, names in files.items() if names)
        begin = [f"begin with: jupyter lab {Path(self.folder, START)}"] if self.written else []
        return "\n".join([*lines, f"{self.folder}: {counts}", *begin])


def write_out(folder: Path) -> WrittenOut:
    """Write the notebooks, profiles and studies that come with this version to a folder.

    Raises:
        BadInput: if the folder is a file.
        OSError: if a file cannot be written; those before it are whole, and a second call goes on.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give the folder that notebooks are written to")
    written, kept, same = [], [], []
    for group, pattern in FOLDERS.items():
        source = shipped(group)
        for file in sorted(source.glob(pattern)):
            name = f"{group}/{file.relative_to(source).as_posix()}"
            target = folder / name
            if target.is_file() and filecmp.cmp(file, target, shallow=False):
                same.append(name)
            elif target.exists() or target.is_symlink():
                kept.append(name)
            else:
                write_whole(target, file.read_bytes())
                written.append(name)
    return WrittenOut(folder=str(folder), written=tuple(written), kept=tuple(kept), same=tuple(same))


MINUTES_AND_HARDWARE = {
    "00_start_here": ("1", "a CPU, or GPUs"),
    "01_quantise_to_mxfp8": ("1", "a CPU"),
    "02_find_grouped_gemm_break_even": ("1", "a CPU replays an H100; a GPU measures itself"),
    "03_route_tokens": ("1", "a CPU"),
    "04_dispatch_with_deepep": ("1", "a CPU replays; two GPUs measure"),
    "05_plan_layout": ("1", "a CPU"),
    "06_compare_convergence": ("2", "a CPU (MXFP8 emulated), or GPUs"),
    "07_compare_throughput": ("2", "a CPU shows how to judge; two GPUs or Slurm measure"),
    "08_project_to_cluster": ("1", "a CPU"),
    "09_launch_and_watch_run": ("1", "a CPU, or a Slurm login node"),
    "10_report_study": ("1", "a CPU"),
    "11_explain_step": ("1", "a CPU replays H200s; a trace of your own from anywhere"),
}
"""By notebook; minutes are those of its defaults on two CPU cores."""


def markdown_table(folder: str = "") -> str:
    """The list as a Markdown table, with a link for each notebook, which lie in ``folder`` seen from that text.

    Example:
        >>> markdown_table("notebooks/").splitlines()[3].split(" | ")[1]
        '[01_quantise_to_mxfp8](notebooks/01_quantise_to_mxfp8.ipynb)'
    """
    lines = ["| question | notebook | minutes | hardware |", "|---|---|---|---|"]
    for name, (minutes, hardware) in MINUTES_AND_HARDWARE.items():
        link = f"[{name}]({folder}{name}.ipynb)"
        lines.append(f"| {_question(name)} | {link} | {minutes} | {hardware} |")
    return "\n".join(lines)


def _question(name: str) -> str:
    """A notebook begins with its title and, in bold, its question."""
    cells = json.loads((shipped("notebooks") / f"{name}.ipynb").read_text())["cells"]
    # The first bold words: a notebook's title cell holds its question and nothing else in bold before it.
    questions: list[str] = re.findall(r"\*\*(.+?)\*\*", "".join(cells[0]["source"]))
    return questions[0]


if __name__ == "__main__":
    print(markdown_table("notebooks/"))  # noqa: T201 - what the program is for
