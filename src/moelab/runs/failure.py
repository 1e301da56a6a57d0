"""Why a run failed, on one line, from everything that its job left.

A dying job says a great deal: every rank raises something, torchrun reports all of them, Slurm adds its own view, and
most of it is about somebody else's death. So each text is searched for *statements*, and a statement has a *kind*. The
kinds (:class:`Kind`) are in the order in which one explains the next: a node that failed explains an exception, an
exception explains a time-out elsewhere, a time-out explains a lost connection, and that explains the signal by which
torchrun ended the others. The cause is the first statement of the first kind that anybody made. Among equals come the
rank that torchrun saw fail first (its *root cause*), then the earlier one.

Texts are each rank's ``error.json``, ``stderr.log`` and ``stdout.log`` of the last attempt (kernels print to standard
output), the combined log with torchrun's and Slurm's words, ``dmesg``, and PyTorch's flight recorder. What a job got
over is no cause: statements that three further steps follow, or the end of training, do not count.

PyTorch's flight recorder tells which rank did not enter which collective. Each rank writes the last ones that it
entered, as a pickle or JSON, to ``<TORCH_FR_DUMP_TEMP_FILE><rank>`` (TorchTitan: ``comm_traces/rank_<rank>``). torch's
own analyser (``torch.distributed.flight_recorder``) unpickles whatever it is given and needs the dump of every rank.
Here one question is asked of those that are there.

Formats: of torch 2.14 and DeepEP by their source, of torchrun as it writes them; of NCCL, NVSHMEM, Slurm, the kernel
and older releases as public reports show them.
"""

from __future__ import annotations

import ast
import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from moelab.runs.log_text import tail
from moelab.runs.statements import TRACEBACK, Kind, Scan, Statement, kind_of

MESSAGE_LENGTH: Final = 280
"""Characters of a message; with its rank in front it has less than 300."""
RANK_TAIL_BYTES: Final = 1_000_000
_PLACE = re.compile(r"(?:node(\d+)/)?(?:[^/]+/)?attempt_(\d+)/(\d+)$")
_DUMP = re.compile(r"^(?:nccl_trace|comm_lib_trace|[\w-]*trace)?_?rank_(?:.*_)?(\d+)(?:\.(?:json|pkl|pickle))?$")
_LARGEST_BYTES = 256 << 20
_STAMP = re.compile(r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_Group = tuple[str, str, frozenset[int]]  # name, description and ranks: names repeat among groups of other ranks


class _Entry(NamedTuple):
    """A collective that a rank entered, from its flight recorder."""

    group: tuple[str, str]  # name and description
    number: int  # in its group, the same on all ranks
    operation: str
    created_ns: int
    waits: bool


def cause(logs: Path | None, *texts: str, ranks_per_node: int = 0, traces: Path | None = None) -> Statement | None:
    """The cause of a failed run, such as ``rank 1: RuntimeError: Loss is not finite (…)``.

    Args:
        logs: the folder given to torchrun as ``--log-dir``; of several nodes, the one that holds ``node0`` and so on.
        texts: the end of each log that more than one rank, or none, wrote: torchrun's, Slurm's, the kernel's.
        ranks_per_node: of a run on several nodes; 0: as torchrun's summary shows it.
        traces: folder of flight-recorder dumps; ``logs`` by default.

    Returns:
        None if nothing shows that the run failed.
    """
    scans = [Scan(text) for text in texts]
    places = [place for scan in scans for place in scan.places]
    of_texts = [list(scan.statements()) for scan in scans]
    done = [text for text, scan, made in zip(texts, scans, of_texts, strict=True) if scan.is_completed and not made]
    if done:  # what another text tells of came before, or was of others, unless it is of a later launch
        ends = max(_STAMP.findall(text)[-1:] for text in done)
        begins = [[match[1]] if (match := _STAMP.search(text)) else [] for text in texts]
        of_texts = [made for begin, made in zip(begins, of_texts, strict=True) if ends and begin > ends]
        if not any(of_texts):
            return None
    statements = [statement for made in of_texts for statement in made]
    if logs is not None:
        statements += _of_ranks(logs, ranks_per_node, places)
    if not any(statement.is_end for statement in statements):
        return None
    if any(statement.kind in (Kind.TIMED_OUT, Kind.ABORTED, Kind.LOST_PEER) for statement in statements):
        dumps = traces or logs
        missing = not_entered(dumps) if dumps else ()
        statements += [Statement(kind=Kind.WAITED, rank=rank, message=words) for rank, words in missing]
    roots = {root for scan in scans for root in scan.roots}
    # `sorted` is stable: what is equal so far stays in the order in which it was written.
    ranked = sorted(statements, key=lambda one: (one.kind, not one.has_words, one.rank not in roots, one.time))
    first = ranked[0]
    if first.message.startswith("killed by SIG"):  # the kernel or the rank may have said why
        about = (one for one in ranked if one.kind is first.kind and one.rank in (None, first.rank) and one != first)
        words = next((one.message for one in about if not one.message.startswith("killed by SIG")), "")
        if words:
            first = replace(first, message=f"{first.message.partition(' (')[0]}: {words}")
    line = " ".join(first.message.split())
    return replace(first, message=line if len(line) <= MESSAGE_LENGTH else f"{line[: MESSAGE_LENGTH - 1].rstrip()}…")


def rank_folders(logs: Path) -> list[Path]:
    """Torchrun's folders of single ranks at or below a path, of the last attempt of each launch."""
    rank_folders = [folder for folder in logs.glob("**/attempt_*/[0-9]*") if _PLACE.search(folder.as_posix())]
    last: dict[Path, int] = {}
    for folder in rank_folders:
        number = int(folder.parent.name.removeprefix("attempt_"))
        last[folder.parents[1]] = max(number, last.get(folder.parents[1], 0))
    current = [folder for folder in rank_folders if folder.parent.name == f"attempt_{last[folder.parents[1]]}"]
    return sorted(current, key=lambda folder: (folder.parent, int(folder.name)))


def _of_ranks(logs: Path, ranks_per_node: int, places: Sequence[tuple[int, int]]) -> Iterator[Statement]:
    """What each rank left, by the global and local ranks in ``places``, as torchrun reported them."""
    folders = rank_folders(logs)
    offsets = {rank - local for rank, local in places}
    # Global and local ranks differ by whole nodes.
    per_node = ranks_per_node or math.gcd(*offsets) or max((int(folder.name) + 1 for folder in folders), default=0)
    for folder in folders:
        match = _PLACE.search(folder.as_posix())
        node = int(match[1]) if match and match[1] else None
        first = node * per_node if node is not None else min(offsets) if len(offsets) == 1 else 0
        rank = first + int(folder.name)
        # Exceptions first: among equals, what was read first is the cause.
        files = [file for name in ("stderr.log", "stdout.log") if (file := folder / name).is_file()]
        scans = [(file, Scan(tail(file, RANK_TAIL_BYTES), rank=rank)) for file in files]
        own = {number for _, scan in scans for number in scan.own_ranks}
        rank = own.pop() if len(own) == 1 else rank  # by PyTorch, which knows best where folders do not tell
        yield from _recorded(folder / "error.json", rank)
        for file, scan in scans:
            written = float(int(file.stat().st_mtime))  # in whole seconds, as those in error.json
            for one in scan.statements():
                yield replace(one, time=written, rank=None if one.rank is None else rank)


def _recorded(file: Path, rank: int) -> Iterator[Statement]:
    """What ``torch.distributed.elastic``'s ``@record`` wrote; nothing where that is missing or torn."""
    try:
        content = json.loads(file.read_text())["message"]
        if isinstance(content, str):
            content = {"message": content}
        extra = content.get("extraInfo", {})
        time, called = float(extra.get("timestamp", math.inf)), str(extra.get("py_callstack", ""))
        message = str(content["message"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    # A traceback names the exception in full and has its frame; older versions of torch wrote the message alone.
    kind, _, words = message.partition("\n")[0].partition(": ")
    text = called if called.startswith(TRACEBACK) and (words or kind) in called else f"{TRACEBACK}:\n{message}"
    statements = list(Scan(text, is_exception=True).statements()) or [Statement(kind=kind_of(message), message=message)]
    yield from (replace(one, time=time, rank=rank if one.rank is None else one.rank) for one in statements)


def not_entered(folder: Path) -> Iterator[tuple[int | None, str]]:
    """The first collective that some ranks of its group waited in, and what the others did.

    Yields:
        At most one rank that was missing (None if it is not one alone) and the words.
    """
    dumps = {rank: (members, entries) for rank, members, entries in _dumps(folder)}
    waiting: dict[tuple[_Group, int], dict[int, _Entry]] = defaultdict(dict)
    last: dict[_Group, dict[int, int]] = defaultdict(dict)
    for rank, (members, entered) in dumps.items():
        for called, ranks in members.items():
            last[*called, ranks].setdefault(rank, 0)
        for entry in entered:
            group = (*entry.group, members.get(entry.group, frozenset()))
            last[group][rank] = max(entry.number, last[group].get(rank, 0))
            if entry.waits:
                waiting[group, entry.number][rank] = entry
    # The first that began to wait: later ones wait for the rank that waits there.
    by_time = sorted(waiting.items(), key=lambda item: min(entry.created_ns for entry in item[1].values()))
    for (group, number), entries in by_time:
        name, description, ranks = group
        late = {rank for rank, reached in last[group].items() if reached < number}
        silent = ranks - set(dumps)
        operations: dict[str, list[int]] = defaultdict(list)
        for rank, entry in entries.items():
            operations[entry.operation].append(rank)
        where = f"number {number} of group {description or name}"
        if len(operations) > 1:
            listed = "; ".join(f"{operation}: {_ranks_in_words(by)}" for operation, by in operations.items())
            yield None, f"ranks disagree on collective {where}: {listed}"
        elif late or silent:
            missing = late or silent
            did = "did not enter" if late else "left no flight-recorder dump, and may not have entered"
            words = f"{did} {next(iter(operations))}, {where}, in which {_ranks_in_words(entries)} waited"
            alone = len(missing) == 1
            yield (min(missing), words) if alone else (None, f"{_ranks_in_words(missing)} {words}")
        else:
            continue
        return


def _dumps(folder: Path) -> Iterator[tuple[int, dict[tuple[str, str], frozenset[int]], list[_Entry]]]:
    """Each rank that left a dump, the ranks of each group that it lists, and the collectives that it entered."""
    for file in sorted(folder.rglob("*")):
        match = _DUMP.match(file.name)
        if match and file.is_file() and file.stat().st_size <= _LARGEST_BYTES:
            try:
                data = file.read_bytes()
                dump = json.loads(data) if data[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
                entries = [_entry(entry) for entry in dump["entries"] if not entry.get("is_p2p")]
            except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
                continue  # a rank that died while it wrote; the others' are read
            yield int(match[1]), dict(_members(dump.get("pg_config"))), entries


def _entry(entry: Mapping[str, Any]) -> _Entry:
    name, description = entry["process_group"]
    profiled = str(entry["profiling_name"])  # such as nccl:all_to_all
    return _Entry(
        group=(str(name), _described(description)),
        number=int(entry["collective_seq_id"]),
        operation=profiled.partition(":")[2] or profiled,
        created_ns=int(entry["time_created_ns"]),
        waits=entry["state"] != "completed" and not entry.get("retired"),  # gloo does not say when one completes
    )


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings and containers, which a dump consists of: other pickles may call anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a dump")


def _members(config: Any) -> Iterator[tuple[tuple[str, str], frozenset[int]]]:
    for name, group in config.items() if isinstance(config, dict) else ():
        try:
            ranks = group["ranks"]
            listed = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks  # torch 2.14 writes a list as text
            yield (str(name), _described(group["desc"])), frozenset(int(rank) for rank in listed)
        except (KeyError, TypeError, ValueError, SyntaxError):
            continue


def _described(description: Any) -> str:
    return "" if description == "undefined" else str(description)


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
    return f"ranks {words}" if len(runs) > 1 or len(runs[0]) > 1 else f"rank {words}"
