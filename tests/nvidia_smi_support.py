"""Made-up machines: files in a folder, and an nvidia-smi, first on PATH, that answers as real ones were seen to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import program

from moelab.hardware import cluster_of
from moelab.machine import Machine, gpu_listing

B200 = "NVIDIA B200, 10.0, 580.95.05, 183359"
H100 = "NVIDIA H100 80GB HBM3, 9.0, 570.1, 81559"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"


def with_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write files by their path below a folder."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def made_machine(
    root: Path,
    files: Mapping[str, str] | None = None,
    answers: Mapping[str, str | None] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    memlock_bytes: int | None = None,
) -> Machine:
    """A machine with these files, and these answers to the first two words of a command; packages are in ``site``."""
    return Machine(
        root=with_files(root, files or {}),
        env=dict(env or {}),
        run=lambda command: (answers or {}).get(" ".join(command[:2])),
        search=(root / "site",),
        memlock_bytes=memlock_bytes,
    )


def forget() -> None:
    """Ask again: what was found is kept for as long as a process lives."""
    gpu_listing.cache_clear()
    cluster_of.cache_clear()


def nvidia_smi(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *rows: str,
    code: int = 0,
    listed: str = "",
    body: str = "",
    visible: str | None = None,
) -> Path:
    """Put a stand-in on PATH.

    Args:
        monkeypatch: sets PATH.
        folder: gets a folder ``bin`` with the program.
        rows: what it prints for a query.
        code: with which a query ends.
        listed: what it prints for ``-L``.
        body: a script instead.
        visible: ``CUDA_VISIBLE_DEVICES``.
    """
    (folder / "bin").mkdir(exist_ok=True)
    answers = [f"if [ \"$1\" = -L ]; then cat <<'P'\n{listed}\nP\nexit 0; fi", "cat <<'P'", *rows, "P", f"exit {code}"]
    made = program(folder / "bin", "nvidia-smi", body or "\n".join(answers), shell="/bin/bash")
    monkeypatch.setenv("PATH", f"{made.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    forget()
    return made
