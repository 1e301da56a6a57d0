"""What one node says of itself, as one line of JSON: ``srun … python -m moelab.launch.node_report``.

:mod:`moelab.launch.preflight` starts it on every node and holds the reports against each other. Loads no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moelab
from moelab.health.deepep import examine_environment
from moelab.health.links import Expected
from moelab.machine import gpus, this_machine, version

VERSIONS = ("torch", "torchtitan", "torchao", "triton", "nvidia-nccl-cu13", "deep-ep")
"""Packages that have to be the same everywhere; None where one is not installed."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to


def report(*, writes: Path | None = None, sees: Sequence[Path] = (), nodes: int = 1) -> dict[str, Any]:
    """Look at this node.

    Args:
        writes: folder that runs or checkpoints go to.
        sees: files and folders that every node has to see.
        nodes: of the job, for what DeepEP needs between them.

    Returns:
        What :func:`moelab.launch.node_checks.compare` reads. ``time`` is taken last.
    """
    machine, found = this_machine(), gpus()
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in VERSIONS},
            "moelab": f"{moelab.__version__}, source {_source()}",
            "driver": found[0].driver if found else None,
        },
        "gpus": [gpu.name for gpu in found],
        "memlock_bytes": machine.memlock_bytes,
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "write_problem": _write_problem(writes) if writes else None,
        "unseen": [str(path) for path in sees if not path.exists()],
        "deepep": [one.to_json() for one in examine_environment(machine, Expected(nodes=nodes))],
        "time": time.time(),
    }


def _source() -> str:
    """Digest of moelab's source, so that two copies of the same version are told apart."""
    folder = Path(moelab.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def _write_problem(folder: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moelab-node-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="moelab.launch.node_report", description="Say what this node has.")
    parser.add_argument("--writes", type=Path, help="folder of runs or checkpoints")
    parser.add_argument("--sees", type=Path, action="append", default=[], help="what every node has to see")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    options = parser.parse_args(arguments)
    print(json.dumps(report(writes=options.writes, sees=options.sees, nodes=options.nodes)), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
