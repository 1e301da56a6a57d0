"""What DeepEP's checks expect of a node, and two readers of what lies on disk: libraries are read, never opened."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
