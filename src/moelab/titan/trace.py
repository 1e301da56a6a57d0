"""One traced step: what a rank's processor and GPU did in it, as a Kineto trace in the run directory.

``trace_step`` names the step, ``trace_ranks`` the ranks. TorchTitan 0.3.0 has a profiler, but it traces all ranks,
again and again, and its steps end after the checkpoint and the validation. Here only the training step is recorded,
once; the step before it warms up the profiler. The log and ``launch/recorded/`` say what tracing cost, and
:mod:`moelab.runs.collect` leaves these steps out of the throughput.

A trace is ``traces/rank<k>.json.gz``, a memory snapshot ``traces/memory_rank<k>.pickle.gz`` (uncompress it for
pytorch.org/memory_viz). Both are written whole, contain neither folders nor the host's name, and have at most
``MAX_BYTES``: a larger one is not kept, and the record says so.
"""

from __future__ import annotations

import functools
import gzip
import io
import pickle
import re
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torchtitan.tools.logging import logger

from moelab.files import write_json, write_whole
from moelab.privacy import shareable
from moelab.runs.directory import RECORDED_FOLDER, TRACES_FOLDER

MAX_BYTES = 64 << 20
MAX_ALLOCATIONS = 100_000
"""A memory snapshot keeps this many allocations and frees of the step, the latest ones."""
_HOST = socket.gethostname()  # looked up once: a trace has millions of lines
_OF_THIS_MACHINE = re.compile(r'"(traceName|host_?name)": *"(?:[^"\\]|\\.)*"', re.I)
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')


class StepTracer:
    """Traces one step, from 2 on, of one rank.

    With ``memory_snapshot`` it also records what CUDA's allocator holds and does during the step.
    """

    def __init__(self, step: int, rank: int, run: Path, *, memory_snapshot: bool) -> None:
        self._step, self._rank, self._run, self._snapshots = step, rank, run, memory_snapshot
        self._trace: profile | None = None
        self._step_times_s: deque[float] = deque(maxlen=20)
        self._is_first = True  # the first step compiles and allocates, so it is not a usual one

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Context of each training step."""
        if step in (self._step - 1, self._step) and self._trace is None:  # the latter after a restart just before it
            cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            # Warms up until the step, records it, and does nothing after it.
            only = schedule(wait=0, warmup=self._step, active=1, repeat=1)
            trace = profile(activities=[ProfilerActivity.CPU, *cuda], schedule=only, record_shapes=True)
            trace.step_num = self._step - 1  # so that the annotation is ProfilerStep#<step>
            trace.start()
            self._trace = trace
        if step == self._step and self._trace is not None:
            self._trace.step()
            if self._snapshots:
                # Python frames only: those of C++ take minutes to look up.
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ALLOCATIONS)
        start = time.perf_counter()
        yield
        if step != self._step:
            if self._trace is None and not self._is_first:
                self._step_times_s.append(time.perf_counter() - start)
            self._is_first = False
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the step's kernels belong into its trace
        self._keep(time.perf_counter() - start)
        self._trace = None

    def _keep(self, step_s: float) -> None:
        """Write what was recorded; training continues even if that fails."""
        trace, start = self._trace, time.perf_counter()
        assert trace is not None
        trace.step()
        trace.stop()
        files = [self._written(f"rank{self._rank}.json.gz", _lines_of(trace))]
        if self._snapshots:
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            files.append(self._written(f"memory_rank{self._rank}.pickle.gz", _pickled(snapshot)))
        usual_s = round(statistics.median(self._step_times_s), 4) if self._step_times_s else None
        record = {
            "step": self._step,
            "step_s": round(step_s, 6),
            "usual_step_s": usual_s,
            "write_s": round(time.perf_counter() - start, 4),
            "files": files,
        }
        usual = f" (the median of those before is {usual_s:.3f} s)" if usual_s else ""
        written = ", ".join(
            f"{one['file']}: {one['reason'] or format(one['bytes'] / 1e6, '.1f') + ' MB'}" for one in files
        )
        logger.info(
            f"moelab: step {self._step} of rank {self._rank} was traced: it took {step_s:.3f} s{usual}, and writing "
            f"took {record['write_s']:.1f} s; {written}"
        )
        try:
            write_json(self._run / RECORDED_FOLDER / f"rank{self._rank}.json", record)
        except OSError as error:
            logger.warning(f"moelab: {RECORDED_FOLDER} cannot be written: {error.strerror}")

    def _written(self, name: str, content: Iterable[bytes]) -> dict[str, Any]:
        """Compress and write one file; returns its size, or why there is none."""
        entry: dict[str, Any] = {"file": f"{TRACES_FOLDER}/{name}", "bytes": 0, "reason": None}
        packed = io.BytesIO()
        try:
            # In memory, so that a trace that is too large never reaches the disk.
            with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=5, mtime=0) as file:
                for part in content:
                    file.write(part)
                    if packed.tell() > MAX_BYTES:
                        break
            if packed.tell() > MAX_BYTES:
                return {**entry, "reason": f"not kept: larger than {MAX_BYTES >> 20} MiB"}
            write_whole(self._run / TRACES_FOLDER / name, packed.getvalue())
        except OSError as error:
            return {**entry, "reason": f"not kept: {error.strerror or type(error).__name__}"}
        return {**entry, "bytes": packed.tell()}


def _lines_of(trace: profile) -> Iterator[bytes]:
    """Lines of a trace in Chrome's format, without folders and names."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(raw))
        with raw.open(encoding="utf-8", errors="replace") as lines:
            yield from (without_places_of(line).encode() for line in lines)


def without_places_of(line: str) -> str:
    """A line of a trace without folders and the host's name; everything but its strings stays.

    Example:
        >>> without_places_of('"kernel_file": "/scratch/ada/cache/c3.py", "traceName": "/home/ada/t.json", "ts": 4')
        '"kernel_file": "…/c3.py", "traceName": "", "ts": 4'
    """
    if '"traceName"' in line or '"host' in line:
        line = _OF_THIS_MACHINE.sub(r'"\1": ""', line)
    if "/" not in line and _HOST not in line:
        return line
    return _TEXT.sub(lambda text: _shared(text[0]) if "/" in text[0] or _HOST in text[0] else text[0], line)


_shared = functools.lru_cache(maxsize=10_000)(shareable)  # cached, because millions of lines name the same few files


def _pickled(snapshot: dict[str, Any]) -> Iterator[bytes]:
    """A memory snapshot whose frames name files without their folders."""
    entries = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    entries += [entry for device in snapshot["device_traces"] for entry in device]
    for entry in [*entries, *snapshot["segments"]]:
        for frame in entry.get("frames", ()):
            frame["filename"] = _shared(frame["filename"])
    yield pickle.dumps(snapshot, protocol=4)  # memory_viz reads no later one
