"""What the checks ask of a machine, in one place, so that tests can make machines up.

Nothing here loads torch: modules are looked for on disk and never imported, libraries are read and never opened.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_TIMEOUT_S = 20
Runner = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to examine.

    Attributes:
        root: of its file system; ``/sys`` and ``/proc`` are looked for under it.
        env: its environment variables.
        run: gives a command's standard output, or None where it is missing or fails.
        search: folders that Python imports from.
        memlock_bytes: soft limit of locked memory; None for unlimited.
    """

    root: Path
    env: Mapping[str, str]
    run: Runner
    search: tuple[Path, ...]
    memlock_bytes: int | None

    def text(self, path: str) -> str | None:
        """Content of a file under the root, or None."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder under the root; none where it does not exist."""
        try:
            return sorted(entry.name for entry in (self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """An installed distribution by its name."""
        found = importlib.metadata.distributions(name=name, path=[str(path) for path in self.search])
        return next(iter(found), None)

    def module_folder(self, name: str) -> Path | None:
        """Folder of a package that Python would import."""
        return next((path / name for path in self.search if (path / name / "__init__.py").is_file()), None)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the cluster's profile says of a node, as far as it is known.

    Attributes:
        nodes: hosts that take part.
        nic_gb_s: network bandwidth of one GPU each way, GB/s.
        variables: environment variables and the values that they should have.
    """

    nodes: int = 1
    nic_gb_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        root=Path("/"),
        env=dict(os.environ),
        run=run_command,
        search=tuple(Path(entry or ".") for entry in sys.path),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def run_command(command: Sequence[str]) -> str | None:
    """Standard output of a command, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def search_file(path: Path, pattern: bytes) -> str | None:
    """First group of the first match of a pattern in a file of any size, or None.

    Args:
        path: of the file.
        pattern: a regular expression with one group.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(pattern, content)
            return None if found is None else found[1].decode(errors="replace")
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """Numbers of a version, such as ``(2, 30, 7)`` of ``2.30.7+cuda13.3``.

    Example:
        >>> version_tuple("2.30.7+cuda13.3") >= (2, 30, 4)
        True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))
