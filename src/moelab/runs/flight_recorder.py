"""Which rank did not enter which collective: PyTorch's flight recorder, dumped when a collective timed out.

Each rank writes the last collectives that it entered, as a pickle or JSON, to ``<TORCH_FR_DUMP_TEMP_FILE><rank>``
(TorchTitan: ``comm_traces/rank_<rank>``). torch has an analyser of whole dumps (``torch.distributed.flight_recorder``);
it unpickles whatever it is given and needs the dump of every rank. Here one question is asked of those that are there.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_DUMP = re.compile(r"^(?:nccl_trace|comm_lib_trace|[\w-]*trace)?_?rank_(?:.*_)?(\d+)(?:\.(?:json|pkl|pickle))?$")
_LARGEST_BYTES = 256 << 20
_Group = tuple[str, str, frozenset[int]]  # name, description and ranks: names repeat among groups of other ranks


def not_entered(folder: Path) -> Iterator[tuple[int | None, str]]:
    """The first collective that some ranks of its group waited in, and what the others did.

    Args:
        folder: where dumps are looked for, at any depth.

    Yields:
        At most one rank that was missing (None if it is not one alone) and the words.
    """
    dumps = dict(_dumps(folder))
    waiting: dict[tuple[_Group, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    last: dict[_Group, dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        members = dict(_members(dump))
        for called, ranks in members.items():
            last[*called, ranks].setdefault(rank, 0)
        for entry in dump["entries"]:
            if not entry.get("is_p2p"):
                called = _group_of(entry)
                group_key, number = (*called, members.get(called, frozenset())), int(entry["collective_seq_id"])
                last[group_key][rank] = max(number, last[group_key].get(rank, 0))
                if entry["state"] != "completed" and not entry.get("retired"):  # gloo does not say when one completes
                    waiting[group_key, number][rank] = entry
    # The first that began to wait: later ones wait for the rank that waits there.
    for key in sorted(waiting, key=lambda one: min(int(entry["time_created_ns"]) for entry in waiting[one].values())):
        (name, description, ranks), number = key
        entries = waiting[key]
        late = {rank for rank, entered in last[key[0]].items() if entered < number}
        silent = ranks - set(dumps)
        operations: dict[str, list[int]] = defaultdict(list)
        for rank, entry in entries.items():
            operations[_operation(entry)].append(rank)
        where = f"number {number} of group {description or name}"
        if len(operations) > 1:
            listed = "; ".join(f"{operation}: {_listed(by)}" for operation, by in operations.items())
            yield None, f"ranks disagree on collective {where}: {listed}"
        elif late or silent:
            missing = late or silent
            did = "did not enter" if late else "left no flight-recorder dump, and may not have entered"
            words = f"{did} {next(iter(operations))}, {where}, in which {_listed(entries)} waited"
            alone = len(missing) == 1
            yield (min(missing), words) if alone else (None, f"{_listed(missing)} {words}")
        else:
            continue
        return


def _dumps(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for file in sorted(folder.rglob("*")):
        match = _DUMP.match(file.name)
        if match and file.is_file() and file.stat().st_size <= _LARGEST_BYTES:
            try:
                dump = _read(file.read_bytes())
                for entry in dump["entries"]:
                    _group_of(entry), _operation(entry), entry["state"]  # all that is needed of it
                    int(entry["collective_seq_id"]), int(entry["time_created_ns"])
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                IndexError,
                AttributeError,
                EOFError,
                pickle.UnpicklingError,
            ):
                continue  # a rank that died while it wrote; the others' are read
            yield int(match[1]), dump


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and containers, which a dump consists of: other pickles may call anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a dump")


def _read(data: bytes) -> dict[str, Any]:
    content = json.loads(data) if data[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(content, dict):
        raise ValueError("no dump")
    return content


def _members(dump: dict[str, Any]) -> Iterator[tuple[tuple[str, str], frozenset[int]]]:
    config = dump.get("pg_config") or {}
    for name, group in config.items() if isinstance(config, dict) else ():
        try:
            ranks = group["ranks"]
            listed = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks  # torch 2.14 writes a list as text
            yield (str(name), _described(group["desc"])), frozenset(int(rank) for rank in listed)
        except (KeyError, TypeError, ValueError, SyntaxError):
            continue


def _group_of(entry: dict[str, Any]) -> tuple[str, str]:
    name, description = entry["process_group"]
    return str(name), _described(description)


def _described(description: Any) -> str:
    return "" if description == "undefined" else str(description)


def _operation(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])


def _listed(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> _listed([2]), _listed([0, 1, 2, 3, 6, 8, 9])
    ('rank 2', 'ranks 0-3, 6, 8-9')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"ranks {words}" if len(runs) > 1 or len(runs[0]) > 1 else f"rank {words}"
