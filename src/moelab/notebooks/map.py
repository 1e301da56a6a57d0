"""Which notebook answers which question, how long it takes and what it needs: one list for notebook 00 and the README.

``python -m moelab.notebooks.map`` prints the README's table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One notebook; ``minutes`` are those of its defaults on two CPU cores."""

    notebook: str
    question: str
    minutes: str
    hardware: str


ENTRIES = (
    Entry(
        notebook="00_start_here",
        question="What can this machine do, and where do I go from here?",
        minutes="1",
        hardware="a CPU, or GPUs",
    ),
    Entry(
        notebook="01_quantise_to_mxfp8",
        question="What does MXFP8 do to the numbers of an expert layer?",
        minutes="1",
        hardware="a CPU",
    ),
    Entry(
        notebook="02_find_grouped_gemm_break_even",
        question="From which size on does MXFP8 save time?",
        minutes="1",
        hardware="a CPU replays an H100; a GPU measures itself",
    ),
    Entry(
        notebook="03_route_tokens",
        question="How far does a token travel, and over which wire?",
        minutes="1",
        hardware="a CPU",
    ),
    Entry(
        notebook="04_dispatch_with_deepep",
        question="What does DeepEP do about the traffic of expert parallelism, and what does it gain?",
        minutes="1",
        hardware="a CPU replays; two GPUs measure",
    ),
    Entry(
        notebook="05_plan_layout",
        question="Is my layout legal, does it fit, and what does each GPU do?",
        minutes="1",
        hardware="a CPU",
    ),
    Entry(
        notebook="06_compare_convergence",
        question="Does training with MXFP8 experts reach the same loss as BF16?",
        minutes="2",
        hardware="a CPU (MXFP8 emulated), or GPUs",
    ),
    Entry(
        notebook="07_compare_throughput",
        question="How much faster do DeepEP and MXFP8 train, alone and together, and would it hold here?",
        minutes="2",
        hardware="a CPU shows how to judge; two GPUs or Slurm measure",
    ),
    Entry(
        notebook="08_project_to_cluster",
        question="Where do 201 seconds go, how far is the model of them to be trusted, and what would your cluster do?",
        minutes="1",
        hardware="a CPU",
    ),
    Entry(
        notebook="09_launch_and_watch_run",
        question="How does a run get onto a cluster, through its faults, and back with a result?",
        minutes="1",
        hardware="a CPU, or a Slurm login node",
    ),
    Entry(
        notebook="10_report_study",
        question="What do these runs say, and how do I hand that to someone else?",
        minutes="1",
        hardware="a CPU",
    ),
)


def markdown_table(folder: str = "") -> str:
    """The list as a Markdown table, with a link for each notebook.

    Args:
        folder: where the notebooks are, seen from the text that shows the table, such as ``notebooks/``.

    Example:
        >>> markdown_table("notebooks/").splitlines()[3].split(" | ")[1]
        '[01_quantise_to_mxfp8](notebooks/01_quantise_to_mxfp8.ipynb)'
    """
    lines = ["| question | notebook | minutes | hardware |", "|---|---|---|---|"]
    for one in ENTRIES:
        link = f"[{one.notebook}]({folder}{one.notebook}.ipynb)"
        lines.append(f"| {one.question} | {link} | {one.minutes} | {one.hardware} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table("notebooks/"))  # noqa: T201 - what the program is for
