"""Which notebook answers which question, how long it takes and what it needs: one list for notebook 00 and the README.

``python -m moelab.notebooks.map`` prints the README's table.
"""

from __future__ import annotations

import json
import re

from moelab.data import shipped

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
