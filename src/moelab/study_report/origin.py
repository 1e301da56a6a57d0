"""What was run, where and with what, told without the folders of the machine that ran it."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

from moelab.analysis import arm_label
from moelab.study_report.judgement import StudyJudgement

VERSIONS_SHOWN = ("torch", "torchtitan", "torchao", "nvidia-nccl-cu13")


def provenance(judged: StudyJudgement, *, with_paths: bool = False) -> dict[str, str]:
    """What was run, where and with what.

    Args:
        judged: the study.
        with_paths: leave the folders of the machine that ran it in its commands.
    """
    found, shown = judged.environment, str if with_paths else portable
    packages = [f"{name} {found['packages'][name]}" for name in VERSIONS_SHOWN if found["packages"].get(name)]
    gpus = [gpu["name"] for gpu in found["gpus"]]
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "moelab": found["moelab"] + (f", commit {found['git_commit']}" if found["git_commit"] else ""),
        "Software": f"Python {found['python']}, {', '.join(packages)}",
        "Hardware": f"{len(gpus)} × {gpus[0]}" if gpus else f"{found['processor']}, {found['cores']} cores, no GPU",
        "Memory": f"{found['memory_gib']} GiB",
        "System": found["platform"],
        **{f"Model, {arm_label(arm)}": one.model_label for arm, one in judged.settings.items()},
        **{f"Command, {arm_label(arm)}": shown(command) for arm, command in judged.commands.items()},
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
