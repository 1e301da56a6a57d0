"""``metrics.jsonl``: the one store of a run's numbers, a JSON object a line, written while it trains.

A training step has ``segment, step`` and the value columns of the metrics table: null where a value is not known, NaN
where it was reported. A held-out loss has ``segment, step, validation_loss, time``. A segment is a launch: a requeued
job goes on in the same file with the next number. A record is appended in one piece, so a kill leaves at most one torn
line, which readers pass over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from moelab.files import open_regular
from moelab.runs.table import VALUE_COLUMNS, MetricsRead, columns_of, metrics_read

FILE: Final = "metrics.jsonl"
Record = Mapping[str, Any]


class MetricsWriter:
    """Appends the records of one launch to a run's file."""

    def __init__(self, run: Path) -> None:
        self._path = run / FILE
        tail = MetricsTail(self._path)
        self._segment = max((record["segment"] for record in tail.poll()), default=-1) + 1
        self._is_torn = bool(tail.rest)  # a kill in the middle of a line: what follows begins a new one

    def add_step(self, step: int, **values: float | None) -> None:
        """Append a trained step with what is known of :data:`~moelab.runs.table.VALUE_COLUMNS`."""
        self._append({"segment": self._segment, "step": step} | {name: values.get(name) for name in VALUE_COLUMNS})

    def add_validation(self, step: int, loss: float, time: float) -> None:
        """Append a held-out loss."""
        self._append({"segment": self._segment, "step": step, "validation_loss": loss, "time": time})

    def _append(self, record: Record) -> None:
        line = f"{json.dumps(record)}\n".encode()
        # Opened for each record: what is closed can be seen from the other nodes of a cluster's file system.
        with self._path.open("ab") as file:
            line, self._is_torn = b"\n" * self._is_torn + line, True  # a full disk may take a part
            file.write(line)
        self._is_torn = False


class MetricsTail:
    """Reads a file that is still being written, each line once; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""  # of a line that has no end yet
        self.torn = 0  # lines that are no record
        self._offset, self._segment, self._step = 0, 0, -1

    def poll(self) -> list[dict[str, Any]]:
        """Return the records that were appended since the last call, each with its ``segment``.

        Raises:
            OSError: if there is something else by that name.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return []
        with file:
            file.seek(self._offset)
            *lines, self.rest = (self.rest + file.read()).split(b"\n")
            self._offset = file.tell()
        return self._records([line for line in lines if line.strip()])

    def end(self) -> list[dict[str, Any]]:
        """Return the record that stands at the end without a line end, as an editor leaves it."""
        return self._records([self.rest] if self.rest.strip() else [])

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:  # at once, which takes a third of the time
            parsed = json.loads(b"[%s]" % b",".join(lines))
        except (ValueError, RecursionError):
            parsed = [_parsed(line) for line in lines]
        records = [record for record in parsed if _is_record(record)]
        self.torn += len(parsed) - len(records)
        for record in records:
            segment, step = record.get("segment"), record["step"]
            if type(segment) is not int:  # a file of another trainer: a launch begins where the steps go back
                segment = self._segment + (step <= self._step and "validation_loss" not in record)
            record["segment"] = self._segment = segment
            self._step = step
        return records


_NUMBERS: Final = {int, float, type(None)}


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_record(record: Any) -> bool:
    if type(record) is not dict or type(step := record.get("step")) is not int or not 0 <= step < 10**15:
        return False
    known = ("validation_loss", *VALUE_COLUMNS)
    return _NUMBERS.issuperset(map(type, record.values())) or _NUMBERS.issuperset(type(record.get(n)) for n in known)


def read_metrics(path: Path) -> MetricsRead:
    """Read a run's numbers; an ``OSError`` if there is no such file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> MetricsWriter(folder).add_step(1, loss=8.25, tps=1000.0)
    >>> read_metrics(folder / FILE).rows[["segment", "step", "loss", "tps"]].values.tolist()
    [[0.0, 1.0, 8.25, 1000.0]]
    """
    path.stat()
    tail = MetricsTail(path)
    records = [*tail.poll(), *tail.end()]
    lines = "line is" if tail.torn == 1 else "lines are"
    return read_of(records, notes=(f"{FILE}: {tail.torn} {lines} torn, and not read",) if tail.torn else ())


def read_of(records: Iterable[Record], notes: tuple[str, ...] = ()) -> MetricsRead:
    """Records as a reader of any other source returns them."""
    steps, held_out = list[Record](), list[Record]()
    for record in records:
        if "validation_loss" in record:
            held_out.append({**record, "loss": record["validation_loss"]})
        else:
            steps.append(record)
    return metrics_read(columns_of(steps), columns_of(held_out), notes=notes)
