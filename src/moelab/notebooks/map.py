"""Which notebook answers which question, how long it takes and what it needs: one list for notebook 00 and the README.

``python -m moelab.notebooks.map`` prints the README's table.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One notebook; ``minutes`` are those of its defaults on two CPU cores."""

    notebook: str
    question: str
    minutes: str
    hardware: str


ENTRIES = (
    Entry("00_start_here", "What can this machine do, and where do I go from here?", "1", "a CPU, or GPUs"),
    Entry("01_quantise_to_mxfp8", "What do MXFP8 and NVFP4 do to the numbers of an expert layer?", "1", "a CPU"),
    Entry(
        "02_find_grouped_gemm_break_even",
        "From what size does MXFP8 save time?",
        "1",
        "a CPU replays an H100; a GPU measures itself",
    ),
    Entry("03_route_tokens", "How far does a token travel, and over which wire?", "1", "a CPU"),
    Entry(
        "04_dispatch_with_deepep",
        "What does DeepEP do about the traffic of expert parallelism, and what does it gain?",
        "1",
        "a CPU replays; two GPUs measure",
    ),
    Entry(
        "05_plan_layout",
        "My model, my GPUs: which layout, does it fit, how fast, and are MXFP8 and DeepEP worth it?",
        "1",
        "a CPU",
    ),
    Entry(
        "06_compare_convergence",
        "Does training with MXFP8 experts reach the same loss as BF16?",
        "2",
        "a CPU (MXFP8 emulated), or GPUs",
    ),
    Entry(
        "07_compare_throughput",
        "How much faster do DeepEP and MXFP8 train, alone and together, and would it hold on your machines?",
        "2",
        "a CPU shows how to judge; two GPUs or Slurm measure",
    ),
    Entry(
        "08_project_to_cluster",
        "Where do 201 seconds go, how far can a model of them be trusted, and what would your cluster do?",
        "1",
        "a CPU",
    ),
    Entry(
        "09_launch_and_watch_run",
        "How does a run get onto a cluster, through its faults, and back with a result?",
        "1",
        "a CPU, or a Slurm login node",
    ),
    Entry("10_report_study", "What do these runs say, and how do I hand that to someone else?", "1", "a CPU"),
    Entry(
        "11_explain_step",
        "Where did my step's time go, and why is it not what was predicted?",
        "1",
        "a CPU replays H200s; a trace of your own from anywhere",
    ),
)


def markdown_table(folder: str = "") -> str:
    """The list as a Markdown table, with a link for each notebook, which lie in ``folder`` seen from that text.

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
