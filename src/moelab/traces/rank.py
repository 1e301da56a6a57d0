"""One rank's step: the trees of its operators, what each kernel is, and what the host waited for.

A call lies within the operators of its thread that began before it and end after it. Their names say whether it is
forward, backward or the optimizer; annotations of FSDP and of PyTorch say which layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.traces.categories import COMMUNICATION, COMPUTE, PARTS, PHASES, Context, category, communication, is_small
from moelab.traces.trace import OP, RECORD, Rows, Trace

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
_LAYER = re.compile(r"(?:layers?|blocks?|\bh)[._](\d{1,6})")
_LAYER_BEGINS = re.compile(r"^FSDP::pre_(?:forward|backward)\b")
_LAYER_ENDS = re.compile(r"^FSDP::(?:post_forward|post_backward_reduce)\b")
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)|clip_grad|(?:optimizer|optim)[-_. ]step", re.I)
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|Backward\d*$|^_?backward$")
_BLOCKS = re.compile(r"synchronize|cudaMemcpy(?:2D|3D|Peer)?$", re.I)
_GRAPH_LAUNCH = re.compile("GraphLaunch")
_EXCHANGE_OF_CPU = re.compile("^(?:gloo|mpi|ucc):")
_HELPER = re.compile("prepare|split_?k(?!ernel)|reduce", re.I)
_COMPILED = re.compile("^CompiledFunction(?:Backward)?$")


class Cut(NamedTuple):
    """A stretch of time, cut where anything begins or ends."""

    times: Floats
    runs: Flags  # (parts, times - 1): whether each part of a step runs from one time to the next

    @classmethod
    def of(cls, start: Floats, end: Floats, part: Rows) -> Cut:
        """Events as they overlap; ``part`` are indices of :data:`PARTS`."""
        times = np.unique(np.concatenate([start, end]))
        runs = np.zeros((len(PARTS), max(0, len(times) - 1)), bool)
        begins, ends = np.searchsorted(times, start), np.searchsorted(times, end)
        for one in np.unique(part).tolist():
            change = np.bincount(begins[part == one], minlength=len(times))
            change -= np.bincount(ends[part == one], minlength=len(times))
            runs[one] = np.cumsum(change)[:-1] > 0
        return cls(times, runs)

    def length(self, chosen: Flags) -> float:
        """Time between the cuts that are chosen."""
        return float(np.diff(self.times)[chosen].sum())

    @property
    def busy(self) -> Flags:
        """Anything runs."""
        return np.asarray(self.runs.any(axis=0))

    @property
    def computes(self) -> Flags:
        """What does not communicate runs."""
        return np.asarray(self.runs[: len(COMPUTE)].any(axis=0))

    @property
    def communicates(self) -> Flags:
        """What does not compute runs."""
        return np.asarray(self.runs[len(COMPUTE) :].any(axis=0))


def latest(threads: Rows, times: Floats, of_threads: Rows, until: Floats) -> Places:
    """For each thread and time asked for, the row of that thread that is the last until then; -1 if there is none.

    Rows are sorted by thread, then by time.
    """
    rows = np.full(len(until), -1)
    for thread in np.unique(of_threads):
        first, last = np.searchsorted(threads, [thread, thread + 1])
        asked = of_threads == thread
        found = first + np.searchsorted(times[first:last], until[asked], side="right") - 1
        rows[asked] = np.where(found >= first, found, -1)
    return rows


def _rows_with(keys: Rows, wanted: Rows) -> Places:
    """Row of the first key that equals each of those wanted; -1 where there is none."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    # beyond the last key searchsorted returns the length; the comparison below turns that into -1
    rows = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where((keys[rows] == wanted) & (wanted >= 0), rows, -1)


class Host:
    """The operators of one trace as trees, one a thread."""

    def __init__(self, trace: Trace) -> None:
        self.names, self.ops = trace.names, trace.ops
        self.start, self.end, self.thread = (np.ascontiguousarray(trace.ops[one]) for one in ("start", "end", "thread"))
        self.parent = np.full(len(self.ops), -1)
        around: list[int] = []
        ends, threads = self.end.data, self.thread.data  # whose elements are Python's own numbers: much faster here
        for row, start in enumerate(self.start.data):
            while around and (ends[around[-1]] <= start or threads[around[-1]] != threads[row]):
                around.pop()
            self.parent[row] = around[-1] if around else -1
            around.append(row)
        self._announced = self._announced_layers(trace)

    def _announced_layers(self, trace: Trace) -> Places:
        """The layer that FSDP had announced on the thread of each operator when that began; -1 for none."""
        begins, ends = (trace.named(self.ops, says) for says in (_LAYER_BEGINS, _LAYER_ENDS))
        rows = np.flatnonzero(begins | ends)
        layers = np.asarray([_layer(self.name(row)) if begins[row] else -1 for row in rows.tolist()], int)
        times = np.where(begins, self.start, self.end)[rows]
        order = np.lexsort((layers, times, self.thread[rows]))
        last = latest(self.thread[rows][order], times[order], self.thread, self.start)
        return np.append(layers[order], -1)[last]  # of a thread that announced nothing yet the last is -1

    def innermost(self, threads: Rows, times: Floats) -> Places:
        """Row of the innermost operator of each thread at a time; -1 for none."""
        rows = latest(self.thread, self.start, threads, times)
        # the last that began may have ended: look around it
        while len(self.ops) and (ended := (rows >= 0) & (self.end[rows] < times)).any():
            rows[ended] = self.parent[rows[ended]]
        return rows

    def around(self, row: int) -> list[int]:
        """An operator and all around it, innermost first."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = int(self.parent[row])
        return rows

    def name(self, row: int) -> str:
        """Name of an operator."""
        return str(self.names[self.ops["name"][row]])

    def context(self, row: int) -> Context:
        """The context of what an operator launches."""
        if row < 0:
            return Context()
        rows = self.around(row)
        names = tuple(map(self.name, rows))
        phase = "forward"
        # From the outermost, which the inner ones refine.
        for one, name in zip(reversed(rows), reversed(names), strict=True):
            if _OPTIMIZER.search(name):
                phase = "optimizer"
            elif _BACKWARD.search(name):
                phase = "backward"
            # an operator of the backward pass that itself records a gradient computes the forward pass again
            elif phase == "backward" and self.ops["sequence"][one] >= 0 and self.ops["forward_thread"][one] == 0:
                phase = "recompute"
        layer = next((layer for layer in map(_layer, names) if layer >= 0), int(self._announced[row]))
        op = next((self.name(one) for one in rows if self.ops["kind"][one] == OP), "")
        return Context(op=op, around=names, phase=phase, layer=layer)

    def caller(self, row: int) -> str:
        """The operator that a person knows: the outermost of PyTorch's own around it, never compiled code's digest."""
        names = [name for name in map(self.name, self.around(row)) if not name.startswith("## Call")]
        of_torch = next((n for n, name in enumerate(names) if not name.startswith("aten::")), len(names))
        return names[max(0, of_torch - 1)] if names else "Python"


def _layer(name: str) -> int:
    return int(found[1]) if (found := _LAYER.search(name)) else -1


class Rank:
    """One rank's events of the chosen step.

    Each has an element of ``start``, ``end`` and ``us``, of ``part`` and ``phase``, which are indices of PARTS and
    PHASES, of ``layer`` (-1 where none is told), ``launcher`` (an operator's name, or nothing) and ``collective``.
    """

    def __init__(self, trace: Trace, step: int | None) -> None:
        self.trace, self.host = trace, Host(trace)
        self.notes = list(trace.notes)
        self.on_cpu = not len(trace.events)
        # The rows of the operator and of the call that launched each event; -1 where none is known.
        if self.on_cpu:
            self.events, self.op = self._own_time()
            self.call = np.full(len(self.op), -1)
        else:
            self.events, self.op = trace.events, _rows_with(trace.ops["external"], trace.events["external"])
            self.call = _rows_with(trace.calls["correlation"], trace.events["correlation"])
            calls = trace.calls[self.call[self.call >= 0]]
            by_time = self.host.innermost(calls["thread"], calls["start"])
            self.op[self.call >= 0] = np.where(by_time >= 0, by_time, self.op[self.call >= 0])
        self._choose_step(step)
        self.start, self.end = self.events["start"], self.events["end"]
        # Annotations alone are nobody's time, and shares of a span of 0 are no numbers.
        if not (self.end > self.start.min(initial=np.inf)).any():
            raise BadInput(f"{trace.path.name} has no kernel or operator that takes time; {RECORD}")
        self.us = self.end - self.start
        self._classify()
        self._mark_recomputation()
        self.cut = Cut.of(self.start, self.end, self.part)
        self.blocks = trace.named(trace.calls, _BLOCKS)  # which calls wait for the GPU

    def name(self, place: int) -> str:
        """Name of an event."""
        return str(self.trace.names[self.events["name"][place]])

    def places_of(self, *parts: str) -> list[int]:
        """Events of some parts."""
        return [place for part in parts for place in np.flatnonzero(self.part == PARTS.index(part)).tolist()]

    def collectives(self) -> dict[int, Hashable]:
        """Of what communicates, by its place, what other ranks recognise it by."""
        keys: dict[int, Hashable] = {}
        orders: Counter[str] = Counter()
        for place in sorted(self.places_of(*COMMUNICATION)):
            collective, name = self.collective[place], self.name(place)
            orders[name] += 1
            # NCCL numbers collectives of a group alike on all ranks; other kernels are counted by name
            numbered = collective if collective and collective.order >= 0 else None
            keys[place] = (numbered.group, numbered.order) if numbered else (name, orders[name])
        return keys

    def _own_time(self) -> tuple[Rows, Places]:
        """Stretches of time that an operator has for itself, as if a device of its thread ran it, and its row."""
        host, ops = self.host, self.trace.ops
        begins, ends, threads = [], [], []
        for thread in np.unique(host.thread):
            times = np.unique([column[host.thread == thread] for column in (host.start, host.end)])
            begins.append(times[:-1])
            ends.append(times[1:])
            threads.append(np.full(len(times) - 1, thread))
        start, end = np.concatenate(begins), np.concatenate(ends)
        rows = host.innermost(np.concatenate(threads), (start + end) / 2)
        events = ops[rows].copy()
        events["start"], events["end"], events["stream"] = start, end, events["thread"]
        computes = (events["kind"] == OP) | self.trace.named(events, _EXCHANGE_OF_CPU)  # which are annotations
        kept = np.flatnonzero((rows >= 0) & computes)
        kept = kept[np.argsort(start[kept], kind="stable")]
        return events[kept], rows[kept]

    def _choose_step(self, wanted: int | None) -> None:
        file, starts, ends = self.trace.path.name, self.events["start"], self.events["end"]
        launched = np.append(self.trace.calls["start"], 0.0)[self.call]
        began = np.where(self.call >= 0, launched, starts)  # kernels run after the host has gone on
        inside = {name: (began >= start) & (began < end) for name, start, end in self.trace.steps}
        spans_us = {name: float(ends[of].max() - starts[of].min()) for name, of in inside.items() if of.any()}
        self.steps = tuple((name, us / 1e3) for name, us in spans_us.items() if us > 0)  # that launched something
        self.step_count = 1 if wanted is not None else max(1, len(self.steps))
        numbers = {int(found[0]): name for name in inside if (found := re.search(r"\d+", name))}
        if wanted is not None:
            if wanted not in numbers:
                there = ", ".join(map(str, numbers)) or "not marked"
                raise BadInput(f"step is {wanted}; the profiler's steps in {file} are {there}")
            chosen = inside[numbers[wanted]]
            if not chosen.any():
                raise BadInput(f"step {wanted} of {file} has no events")
            self.events, self.op, self.call = self.events[chosen], self.op[chosen], self.call[chosen]
        elif len(self.steps) > 1:
            self.notes.append(
                f"{file} has {len(self.steps)} steps ({self.steps[0][0]} to {self.steps[-1][0]}): "
                f"the figures cover all of them; choose one with --step {next(iter(numbers))}"
            )

    def _classify(self) -> None:
        trace, launched = self.trace, self.call >= 0
        self.graph = self.events["graph"] > 0
        self.graph[launched] |= trace.named(trace.calls, _GRAPH_LAUNCH)[self.call[launched]]
        # A graph is launched as a whole, from where its kernels were not recorded.
        rows, places = np.unique(np.where(self.graph, -1, self.op), return_inverse=True)
        of_rows = list(map(self.host.context, rows.tolist()))
        contexts = [of_rows[place] for place in places]
        self.launcher = [one.op for one in contexts]
        self.layer = np.asarray([one.layer for one in of_rows], int)[places]
        self.phase = np.asarray([PHASES.index(one.phase) for one in of_rows], int)[places]
        self.collective = [trace.collectives[one] if one >= 0 else None for one in self.events["collective"]]
        kernels = [trace.names[name] for name in self.events["name"]]
        parts = map(category, kernels, contexts, self.collective)
        self.part = np.asarray(list(map(PARTS.index, parts)), int)
        clips = (self.part == PARTS.index("optimizer")) & (self.phase == PHASES.index("forward"))  # before its step
        self.phase[clips] = PHASES.index("optimizer")
        if not self.on_cpu and not launched.any():
            self.notes.append(
                f"{trace.path.name} has no correlation between kernels and calls, so the causes of idle time and the "
                "passes of kernels are not known"
            )
        told = zip(kernels, self.launcher, self.collective, strict=True)
        if any(communication(kernel) for kernel, launcher, one in told if not launcher and not one):
            self.notes.append(
                "collectives that name neither operator nor process group are classified by their kernels' names"
            )

    def _mark_recomputation(self) -> None:
        """Tell recomputation from the backward pass inside compiled layers, where operators do not.

        Compiled code computes again first. For each product of the forward pass, backward has two, and one for each
        exchange of tokens; what there is beyond that is computed again, so the backward pass begins after as many.
        """
        host, ops = self.host, self.trace.ops
        compiled, region = self.trace.named(ops, _COMPILED), self.op.copy()
        if not compiled.any():
            return
        while (outside := (region >= 0) & ~compiled[region]).any():
            region[outside] = host.parent[region[outside]]
        regions = {row: np.flatnonzero(region == row).tolist() for row in np.unique(region[region >= 0]).tolist()}
        is_backward = {row: host.name(row).endswith("Backward") for row in regions}
        forward_of = {int(ops["sequence"][row]): places for row, places in regions.items() if not is_backward[row]}
        for row, places in regions.items():
            before = forward_of.get(int(ops["sequence"][row]))
            if is_backward[row] and before:
                places.sort(key=lambda place: self.call[place])  # in the order of launches, whatever the stream
                self.phase[places[: self._recomputed(before, places)]] = PHASES.index("recompute")

    def _recomputed(self, before: list[int], places: list[int]) -> int:
        """How many of a compiled backward's events are the forward pass again; ``before`` are those of that pass."""

        def those_of(part: str, among: list[int]) -> list[int]:  # products or exchanges, without their helpers
            found = [place for place in among if PARTS[self.part[place]] == part]
            return [place for place in found if not _HELPER.search(self.name(place))]

        again = 0
        products = "expert GEMMs" if those_of("expert GEMMs", before) else "other GEMMs"
        for part, needed in ((products, 2), ("all-to-all", 1)):
            there, forth = those_of(part, places), those_of(part, before)
            if part == "all-to-all":  # counts of tokens go forth only
                forth = [one for one in forth if not is_small(self.collective[one])]
            more = min(len(there) - needed * len(forth), len(there))
            if more > 0:
                again = max(again, places.index(there[more - 1]) + 1)
        return again
