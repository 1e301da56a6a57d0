"""All groups, and the file: replaced after each, so that a run that is cut off keeps what it measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moelab.deepep.all_to_all.clock import measure_copies
from moelab.deepep.all_to_all.plan import Group
from moelab.deepep.all_to_all.timing import time_group
from moelab.deepep.all_to_all.world import Buffers, Libraries, World
from moelab.machine import environment
from moelab.runs.files import write_json

FORMAT = 2
"""A file of another format is written anew."""


def run(
    groups: Sequence[Group],
    world: World,
    libraries: Libraries,
    output: Path,
    *,
    repeats: int,
    budget_s: float,
    began: float | None = None,
) -> None:
    """Time every group that the file does not have yet, and write it after each.

    Args:
        groups: in order.
        world: the ranks.
        libraries: what can move tokens.
        output: the JSON file, read and written by the first rank.
        repeats: turns of each arm.
        budget_s: no arm is prepared after so many seconds since ``began``.
        began: ``time.monotonic()`` of the start; now by default.
    """
    began = time.monotonic() if began is None else began
    report: dict[str, Any] = world.everywhere(_content(world, libraries, output))[0]
    report["copies"] = report["copies"] or measure_copies(
        world.device, world.group, nbytes=(512 << 20) if world.device.type == "cuda" else (8 << 20)
    )
    world.say(f"copies: {report['copies']}")
    buffers = Buffers(world, libraries)
    for group in groups:
        if group.name in report["complete"]:
            world.say(f"{group.name}: already measured")
            continue
        if any(world.everywhere(time.monotonic() - began > budget_s)):
            world.say(f"{group.name}: left for another call, the time is over")
            continue
        world.say(f"{group.name} ({time.monotonic() - began:.0f} s)")
        rows = time_group(group, world, buffers, report["copies"], repeats=repeats, until=began + budget_s)
        kept = [row for row in report["rows"] if row["group"] != group.name]
        report["rows"] = kept + [{key: row[key] for key in row if key != "_sent"} for row in rows]
        if not any(row["error"] for row in rows):
            report["complete"].append(group.name)
        report["turns"][group.name] = [arm.name for arm in group.arms]
        report["seconds"] = round(time.monotonic() - began, 1)
        if world.rank == 0:
            write_json(output, report)
    buffers.close()


def _content(world: World, libraries: Libraries, output: Path) -> dict[str, Any]:
    """The file's frame, or the file itself where it is of the same machine and libraries."""
    here = environment()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None
    frame: dict[str, Any] = {
        "format": FORMAT,
        "label": "measured",
        "what": "dispatch and combine, forward and backward, of each way to move tokens between expert-parallel ranks",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "GPUs over NCCL" if nccl else "CPU processes over gloo: the method's test, no measure of a GPU",
        "environment": {name: here[name] for name in ("moelab", "python", "packages", "processor", "cores", "gpus")},
        "libraries": {"nccl_loaded": nccl, **libraries.found},
        "ranks": world.ranks,
        "units": "us: microseconds of the slowest rank; gb_s: 1e9 bytes a second; bytes: payload of one rank",
        "copies": None,
        "complete": [],
        "turns": {},
        "rows": [],
    }
    if world.rank == 0 and output.exists():
        old: dict[str, Any] = json.loads(output.read_text())
        same = ("format", "environment", "libraries", "ranks", "device")
        if all(old.get(key) == frame[key] for key in same):
            return old
    return frame
