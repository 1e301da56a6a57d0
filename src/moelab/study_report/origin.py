"""What was run, where and with what, told without the folders of the machine that ran it.

Each line is of all judged runs: where they are not alike, it says how many have which.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime

from moelab.analysis import arm_label
from moelab.runs.settings import spread
from moelab.runs.side_files import Environment
from moelab.study_report.judgement import StudyJudgement

VERSIONS_SHOWN = ("torch", "torchtitan", "torchao", "triton", "deep_ep", "nvidia-nccl-cu13", "driver")


def provenance(judged: StudyJudgement, *, with_paths: bool = False) -> dict[str, str]:
    """What was run, where and with what.

    Args:
        judged: the study.
        with_paths: leave the folders of the machine that ran it in its commands.
    """
    shown = str if with_paths else portable
    runs = judged.finished

    def told(value: Callable[[Environment], str]) -> str:
        """A value of all runs, or how many have which."""
        return spread((value(run.environment) or "none") if run.environment else "unknown" for run in runs)

    def version(name: str) -> str:
        return told(lambda found: found.versions.get(name, ""))

    versions = {name: version(name) for name in VERSIONS_SHOWN}
    installed = [f"{name} {version}" for name, version in versions.items() if version != "none"]
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "moelab": told(lambda found: found.moelab + (f", commit {found.git_commit}" if found.git_commit else "")),
        "Software": "; ".join([f"Python {told(lambda found: found.python)}", *installed]),
        "Hardware": told(lambda found: found.machine),
        "Memory": told(lambda found: f"{found.memory_gib} GiB"),
        "System": told(lambda found: found.platform),
        **{f"Model, {arm_label(arm)}": one.model_label for arm, one in judged.settings.items()},
        **{f"Command, {arm_label(run.arm)}, seed {run.seed}": shown(run.command) for run in runs if run.command},
    }


def portable(command: str) -> str:
    """A launch command without the folders of the machine that ran it."""
    return " ".join(_without_folder(word) for word in shlex.split(command))


def _without_folder(word: str) -> str:
    before, slash, rest = word.partition("/")
    if not slash:
        return word
    parts = rest.split("/")
    if parts[-1].startswith("python"):
        return f"{before}{parts[-1]}"
    if "runs" not in parts:
        return f"{before}…/{parts[-1]}"
    last = len(parts) - 1 - parts[::-1].index("runs")
    return f"{before}{'/'.join(parts[last:])}"
