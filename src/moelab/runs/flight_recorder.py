"""Which rank did not enter which collective, by PyTorch's flight recorder.

Each rank writes the last collectives that it entered, as a pickle or JSON, to ``<TORCH_FR_DUMP_TEMP_FILE><rank>``
(TorchTitan: ``comm_traces/rank_<rank>``). torch's own analyser (``torch.distributed.flight_recorder``) unpickles
whatever it is given and needs the dump of every rank; here one question is asked of those that are there. A pickle of
ten bytes can ask for gigabytes, so this file, run as a program of its own with little memory, reads the dumps: numbers,
texts and containers only.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_DUMP = re.compile(r"^(?:nccl_trace|comm_lib_trace|[\w-]*trace)?_?rank_(?:.*_)?(\d+)(?:\.(?:json|pkl|pickle))?$")
_LARGEST_BYTES, _MOST_MEMORY, _MOST_SECONDS = 64 << 20, 2 << 30, 300


class _Entry(NamedTuple):
    """A collective that a rank entered."""

    rank: int
    group: tuple[str, str, tuple[int, ...]]  # name, description and ranks: names repeat among groups of other ranks
    number: int  # in its group, the same on all ranks; 0 says that the rank belongs to the group
    operation: str
    created_ns: int
    waits: bool


def not_entered(folder: Path) -> Iterator[tuple[int | None, str]]:
    """The first collective that some ranks of its group waited in, and what the others did.

    Yields:
        At most one rank that was missing (None if it is not one alone) and the words.
    """
    entered = _entries(folder)
    dumped = {entry.rank for entry in entered}
    reached: dict[Any, dict[int, int]] = defaultdict(dict)
    waiting: dict[Any, list[_Entry]] = defaultdict(list)
    for entry in entered:
        reached[entry.group][entry.rank] = max(entry.number, reached[entry.group].get(entry.rank, 0))
        if entry.waits:
            waiting[entry.group, entry.number].append(entry)
    # The first that began to wait: later ones wait for the rank that waits there.
    for (group, number), entries in sorted(waiting.items(), key=lambda one: min(e.created_ns for e in one[1])):
        name, description, ranks = group
        where = f"number {number} of group {description or name}"
        operations: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            operations[entry.operation].append(entry.rank)
        if len(operations) > 1:
            listed = "; ".join(f"{operation}: {_ranks_in_words(by)}" for operation, by in operations.items())
            yield None, f"ranks disagree on collective {where}: {listed}"
            return
        late = {rank for rank, last in reached[group].items() if last < number}
        if missing := late or set(ranks) - dumped:
            did = "did not enter" if late else "left no flight-recorder dump, and may not have entered"
            waited = _ranks_in_words(entry.rank for entry in entries)
            words = f"{did} {entries[0].operation}, {where}, in which {waited} waited"
            yield (min(missing), words) if len(missing) == 1 else (None, f"{_ranks_in_words(missing)} {words}")
            return


def _entries(folder: Path) -> list[_Entry]:
    """What all dumps below a folder say; nothing of one that a rank died in, or that something else wrote."""
    files = [file for file in sorted(folder.rglob("*")) if _DUMP.match(file.name) and file.is_file()]
    if not (small := [file for file in files if file.stat().st_size <= _LARGEST_BYTES]):
        return []
    try:
        command = [sys.executable, "-I", __file__, *map(str, small)]
        read = subprocess.run(command, capture_output=True, timeout=_MOST_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired as error:
        read = error.stdout or b""
    found = []
    for line in read.splitlines():
        try:
            rank, (name, description, ranks), *others = json.loads(line)
            found.append(_Entry(rank, (name, description, tuple(ranks)), *others))
        except (ValueError, TypeError):  # a line that was cut off
            break
    return found


def _ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> _ranks_in_words([2]), _ranks_in_words([0, 1, 2, 3, 6, 8, 9])
    ('rank 2', 'ranks 0-3, 6, 8-9')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {words}" if words.isdecimal() else f"ranks {words}"


# --- the program ---


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and containers, which a dump consists of: other pickles may call anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a dump")


def _in_dump(file: Path) -> Iterator[list[Any]]:
    with file.open("rb") as stream:
        dump = json.load(stream) if stream.peek(1)[:1] == b"{" else _PlainUnpickler(stream).load()
    (rank,) = map(int, _DUMP.findall(file.name))
    groups: dict[str, tuple[str, str, list[int]]] = {}
    for name, group in (dump.get("pg_config") or {}).items():
        ranks, described = group["ranks"], str(group["desc"])[:200]
        listed = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks  # torch 2.14 writes a list as text
        groups[str(name)[:200]] = (str(name)[:200], described.removeprefix("undefined"), [int(one) for one in listed])
    yield from ([rank, group, 0, "", 0, False] for group in groups.values())
    for entry in dump["entries"]:
        if not entry.get("is_p2p"):
            name, described = (str(part)[:200] for part in entry["process_group"])
            group = groups.get(name, (name, described.removeprefix("undefined"), []))
            profiled = str(entry["profiling_name"])[:200]  # such as nccl:all_to_all
            operation = profiled.partition(":")[2] or profiled
            # gloo does not say when one completes.
            waits = entry["state"] != "completed" and not entry.get("retired")
            yield [rank, group, int(entry["collective_seq_id"]), operation, int(entry["time_created_ns"]), waits]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    for path in sys.argv[1:]:
        try:
            lines = [json.dumps(one) for one in _in_dump(Path(path))]
        except Exception:  # noqa: S112 - whatever it is: the other ranks' are read
            continue
        print("\n".join(lines))  # noqa: T201
