"""Slurm's compressed lists of nodes, such as ``gpu[001-003,007]``.

``scontrol show hostnames`` is asked where it is; elsewhere, as on a laptop with a run's files, the rules are here. They
come first, because scontrol exits with 0 whatever it is given: ``(null)`` is a name to it, and ``gpu[001`` is ``gpu]``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from moelab.errors import BadInput
from moelab.launch.slurm.client import SlurmError, SlurmMissing, call

MAX_NODES_OF_RANGE = 65_536  # as Slurm
_ENTRY = re.compile(r"(?:[^\s,\[\]()]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def node_names(node_list: str) -> tuple[str, ...]:
    """The nodes of a list, in its order; none for what squeue writes where a job has no nodes.

    Raises:
        BadInput: if it is not a list of nodes.

    Example:
        >>> node_names("gpu[001-002],login1")
        ('gpu001', 'gpu002', 'login1')
    """
    expected = expand(node_list)
    if not expected:
        return ()
    try:
        return tuple(call("scontrol", "show", "hostnames", node_list.strip()).split())
    except (SlurmMissing, SlurmError):
        return expected


def expand(node_list: str) -> tuple[str, ...]:
    """As :func:`node_names`, without Slurm."""
    text = node_list.strip()
    if not text or re.fullmatch(r"\([^()]*\)", text):  # (null), (Priority), (Resources)
        return ()
    names: list[str] = []
    position = 0
    while entry := _ENTRY.match(text, position):
        names += _names(entry.group(), node_list)
        position = entry.end()
        if position == len(text):
            return tuple(names)
        if text[position] != ",":
            break
        position += 1
    raise _invalid(node_list)


def _names(entry: str, node_list: str) -> Iterator[str]:
    """``rack[0-1]n[08-10]``: every number of one bracket with every number of the next."""
    parts = re.split(r"\[([^\[\]]*)\]", entry)
    choices = [[part] if index % 2 == 0 else list(_numbers(part, node_list)) for index, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str, node_list: str) -> Iterator[str]:
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if not found:
            raise _invalid(node_list)
        first, last = found.group(1), found.group(2) or found.group(1)
        if not 0 <= int(last) - int(first) < MAX_NODES_OF_RANGE:
            raise _invalid(node_list)
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _invalid(node_list: str) -> BadInput:
    return BadInput(f"node list: got {node_list[:80]!r}; valid: names and ranges such as gpu[001-003,007],login1")
