"""One rank's step: the trees of its operators, what each kernel is, and what the host waited for.

A call lies within the operators of its thread that began before it and end after it. Their names say whether it is
forward, backward or the optimizer; annotations of FSDP and of PyTorch say which layer.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.traces.categories import COMMUNICATION, FEW_ELEMENTS, Context, category, communication
from moelab.traces.trace import RECORD, Rows, Trace

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
QUEUED_US = 50.0
"""A kernel that waits this long after its launch shows that the host is ahead of the GPU."""
_LAYER = re.compile(r"(?:layers?|blocks?|\bh)[._](\d+)")
_LAYER_BEGINS = re.compile(r"FSDP::pre_(?:forward|backward)\b")
_LAYER_ENDS = re.compile(r"FSDP::(?:post_forward|post_backward_reduce)\b")
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)|clip_grad|(?:optimizer|optim)[-_. ]step", re.I)
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|Backward\d*$|^_?backward$")
_BLOCKS = re.compile(r"synchronize|cudaMemcpy(?:2D|3D|Peer)?$", re.I)
_FORWARD, _BACKWARD_OF_IT = "CompiledFunction", "CompiledFunctionBackward"


def union_us(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Merged intervals, by start."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])  # a short one may lie inside a long one
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], ends[last]


def length_us(starts: Floats, ends: Floats) -> float:
    """Length of the union of intervals."""
    merged = union_us(starts, ends)
    return float((merged[1] - merged[0]).sum())


class Host:
    """The operators of one trace as trees, one a thread."""

    def __init__(self, trace: Trace) -> None:
        self.names, self.ops, self.calls = trace.names, trace.ops, trace.calls
        threads, first = np.unique(trace.ops["thread"], return_index=True)
        last = [*first[1:].tolist(), len(trace.ops)][: len(first)]
        self._of_thread = {int(one): slice(int(a), b) for one, a, b in zip(threads, first, last, strict=True)}
        self._start, self._end = (np.ascontiguousarray(trace.ops[name]) for name in ("start", "end"))
        self.parent, self.own_segments = _tree(trace.ops)
        self._alike: dict[Context, Context] = {}  # a long trace has few that differ
        self._layers = {thread: self._layer_changes(there) for thread, there in self._of_thread.items()}

    def ops_of(self, events: Rows, calls: Places) -> Places:
        """Row of the innermost operator that each event was launched from; -1 where none is known."""
        rows = _rows_with(self.ops["external"], events["external"])
        for place in np.flatnonzero(calls >= 0).tolist():
            row = self.at(int(self.calls["thread"][calls[place]]), float(self.calls["start"][calls[place]]))
            rows[place] = row if row >= 0 else rows[place]
        return rows

    def at(self, thread: int, time_us: float) -> int:
        """Row of the innermost operator of a thread at a time, or -1."""
        there = self._of_thread.get(thread, slice(0, 0))
        row: int = there.start + int(np.searchsorted(self._start[there], time_us, side="right")) - 1
        if row < there.start:
            return -1
        while row >= 0 and self._end[row] < time_us:  # the last that began may have ended: look around it
            row = int(self.parent[row])
        return row

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
        names = tuple(self.name(one) for one in rows)
        phase = "forward"
        # From the outermost, which the inner ones refine.
        for one, name in zip(reversed(rows), reversed(names), strict=True):
            # an operator of the backward pass that itself records a gradient computes the forward pass again
            forward_op = self.ops["sequence"][one] >= 0 and self.ops["forward_thread"][one] == 0
            if _OPTIMIZER.search(name):
                phase = "optimizer"
            elif _BACKWARD.search(name):
                phase = "backward"
            elif phase == "backward" and forward_op:
                phase = "recompute"
        layer = next((int(match[1]) for name in names if (match := _LAYER.search(name))), None)
        if layer is None:
            times, layers = self._layers[int(self.ops["thread"][row])]
            place = int(np.searchsorted(times, self.ops["start"][row], side="right")) - 1
            layer = layers[place] if place >= 0 else -1
        op = next((name for one, name in zip(rows, names, strict=True) if not self.ops["annotation"][one]), "")
        context = Context(op=op, around=names, phase=phase, layer=layer)
        return self._alike.setdefault(context, context)

    def _layer_changes(self, there: slice) -> tuple[Floats, list[int]]:
        """Times at which a thread goes on to a layer, or leaves it (-1), by what FSDP announces."""
        says = [place for place, name in enumerate(self.names) if _LAYER_BEGINS.match(name) or _LAYER_ENDS.match(name)]
        changes = []
        for row in (np.flatnonzero(np.isin(self.ops["name"][there], says)) + there.start).tolist():
            begins, layer = _LAYER_BEGINS.match(self.name(row)), _LAYER.search(self.name(row))
            time_us = float(self.ops["start" if begins else "end"][row])
            changes.append((time_us, int(layer[1]) if layer and begins else -1))
        changes.sort()
        return np.asarray([time_us for time_us, _ in changes]), [layer for _, layer in changes]

    def caller(self, row: int) -> str:
        """The operator that a person knows: the outermost of PyTorch's own around it, never compiled code's digest."""
        names = [name for name in map(self.name, self.around(row)) if not name.startswith("## Call")]
        best = names[0] if names else "Python"
        for name in names[1:]:
            if not (best.startswith("aten::") and name.startswith("aten::")):
                break
            best = name
        return best


def _rows_with(keys: Rows, wanted: Rows) -> Places:
    """Row of the first key that equals each of those wanted; -1 where there is none."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    # beyond the last key searchsorted returns the length; the comparison below turns that into -1
    rows = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where((keys[rows] == wanted) & (wanted >= 0), rows, -1)


def _tree(ops: Rows) -> tuple[npt.NDArray[np.int32], tuple[array[float], array[float], array[int]]]:
    """Each operator's parent, and the stretches of time that are an operator's own: start, end, row."""
    parent = np.full(len(ops), -1, np.int32)
    stack: list[int] = []
    starts, ends, rows, since = array("d"), array("d"), array("l"), 0.0
    # Plain numbers: a loop over millions of elements takes several times as long on numpy's.
    start, end, thread = (
        array(code, ops[name].tobytes()) for code, name in (("d", "start"), ("d", "end"), ("i", "thread"))
    )

    def owns(row: int, until: float) -> None:
        nonlocal since
        if until > since:
            starts.append(since)
            ends.append(until)
            rows.append(row)
            since = until

    def leave(until: float) -> None:
        while stack and end[stack[-1]] <= until:
            top = stack.pop()
            owns(top, end[top])

    for row in range(len(ops)):
        if stack and thread[row] != thread[stack[-1]]:  # rows are by thread: the one before has ended
            leave(float("inf"))
        leave(start[row])
        if stack:
            parent[row] = stack[-1]
            owns(stack[-1], start[row])
        stack.append(row)
        since = start[row]
    leave(float("inf"))
    return parent, (starts, ends, rows)


class Rank:
    """One rank's events of the chosen step; ``contexts``, ``category`` and ``moves_data`` have an element for each."""

    def __init__(self, trace: Trace, step: int | None) -> None:
        self.trace, self.host = trace, Host(trace)
        self.notes = list(trace.notes)
        self.on_cpu = not len(trace.events)
        self.events = self._cpu_events() if self.on_cpu else trace.events
        # The row of the call that launched each event; -1 where none is recorded, as on a CPU.
        self.call = _rows_with(trace.calls["correlation"], self.events["correlation"])
        self._choose_step(step)
        # Annotations alone are nobody's time, and shares of a span of 0 are no numbers.
        if not (self.events["end"] > self.events["start"].min(initial=np.inf)).any():
            raise BadInput(f"{trace.path.name} has no kernel or operator that takes time; {RECORD}")
        self._classify()
        self._mark_recomputation()
        start, end, compute = self.events["start"], self.events["end"], ~self.moves_data
        self.first_us, self.last_us = float(start.min()), float(end.max())
        self.busy = union_us(start, end)
        self.busy_us = float((self.busy[1] - self.busy[0]).sum())
        self.compute_us = length_us(start[compute], end[compute])
        self.communication_us = length_us(start[~compute], end[~compute])
        self._find_waits()
        self.key_of: dict[int, Hashable] = {}
        orders: defaultdict[str, int] = defaultdict(int)
        for place in np.flatnonzero(self.moves_data).tolist():
            collective, name = self.collective[place], self.name(place)
            orders[name] += 1
            # NCCL numbers collectives of a group alike on all ranks; other kernels are counted by name
            numbered = collective is not None and collective.order >= 0
            self.key_of[place] = (collective.group, collective.order) if numbered else (name, orders[name])  # type: ignore[union-attr]
        # The time of each, µs, by what ranks recognise it by.
        self.met = {key: self.us(place) for place, key in self.key_of.items()}

    def name(self, place: int) -> str:
        """Name of an event."""
        return str(self.trace.names[self.events["name"][place]])

    def us(self, places: int | Sequence[int] | Places) -> float:
        """Duration of events, µs, those at the same time counted each."""
        return float((self.events["end"][places] - self.events["start"][places]).sum())

    def _cpu_events(self) -> Rows:
        """Stretches of time of which each belongs to an operator alone, as if each ran on a device of its thread."""
        starts, ends, rows = (np.asarray(column) for column in self.host.own_segments)
        rows = rows.astype(int)
        ops = self.trace.ops
        gloo = [index for index, name in enumerate(self.trace.names) if name.startswith(("gloo:", "mpi:", "ucc:"))]
        kept = (ops["annotation"][rows] == 0) | np.isin(ops["name"][rows], gloo)  # gloo's exchanges are annotations
        events = np.zeros(int(kept.sum()), self.trace.events.dtype)
        events["start"], events["end"], events["external"] = starts[kept], ends[kept], rows[kept]
        events["name"], events["stream"] = ops["name"][rows[kept]], ops["thread"][rows[kept]]
        events["correlation"], events["collective"] = -1, -1
        return events[np.argsort(events["start"], kind="stable")]

    def _choose_step(self, wanted: int | None) -> None:
        steps, file = self.trace.steps, self.trace.path.name
        launched = self.trace.calls["start"][self.call] if len(self.trace.calls) else 0.0
        began = np.where(self.call >= 0, launched, self.events["start"])  # kernels run after the host has gone on
        inside = {name: (began >= start) & (began < end) for name, start, end in steps}
        spans = {
            name: float(self.events["end"][chosen].max() - self.events["start"][chosen].min()) / 1e3
            for name, chosen in inside.items()
            if chosen.any()
        }
        self.steps = tuple((name, ms) for name, ms in spans.items() if ms > 0)
        # Steps in which nothing was launched do not count.
        self.step_count = 1 if wanted is not None else max(1, len(self.steps))
        numbers = {int(match[0]): name for name in inside if (match := re.search(r"\d+", name))}
        if wanted is not None:
            if wanted not in numbers:
                there = ", ".join(map(str, numbers)) or "not marked"
                raise BadInput(f"step is {wanted}; the profiler's steps in {file} are {there}")
            chosen = inside[numbers[wanted]]
            if not chosen.any():
                raise BadInput(f"step {wanted} of {file} has no events")
            self.events, self.call = self.events[chosen], self.call[chosen]
        elif len(self.steps) > 1:
            self.notes.append(
                f"{file} has {len(self.steps)} steps ({self.steps[0][0]} to {self.steps[-1][0]}): "
                f"the figures cover all of them; choose one with --step {next(iter(numbers))}"
            )

    def _classify(self) -> None:
        trace, events = self.trace, self.events
        # The row of the operator that each was launched from, or -1.
        self.op = events["external"].astype(int) if self.on_cpu else self.host.ops_of(events, self.call)
        launches = [index for index, name in enumerate(trace.names) if "GraphLaunch" in name]
        calls = trace.calls["name"][self.call] if len(trace.calls) else np.zeros(len(events), int)
        self.graph = (events["graph"] > 0) | ((self.call >= 0) & np.isin(calls, launches))
        ops, places = np.unique(self.op, return_inverse=True)
        of_ops = [self.host.context(int(row)) for row in ops]
        self.contexts: list[Context] = [  # a graph is launched as a whole, from where its kernels were not recorded
            Context() if graph else of_ops[place] for place, graph in zip(places, self.graph, strict=True)
        ]
        self.collective = [trace.collectives[one] if one >= 0 else None for one in events["collective"]]
        kernels = [trace.names[name] for name in events["name"]]
        self.category = list(map(category, kernels, self.contexts, self.collective))
        for place, part in enumerate(self.category):
            if part == "optimizer" and self.contexts[place].phase == "forward":  # clipping, before its step
                self.contexts[place] = self.contexts[place]._replace(phase="optimizer")
        self.moves_data = np.asarray([one in COMMUNICATION for one in self.category], dtype=bool)
        if not self.on_cpu and not (self.call >= 0).any():
            self.notes.append(
                f"{trace.path.name} has no correlation between kernels and calls, so the causes of idle time and the "
                "passes of kernels are not known"
            )
        by_name = (kernel for kernel, context, one in zip(kernels, self.contexts, self.collective, strict=True)
                   if not context.op and not one)  # fmt: skip
        if any(map(communication, by_name)):
            self.notes.append(
                "collectives that name neither operator nor process group are classified by their kernels' names"
            )

    def _mark_recomputation(self) -> None:
        """Tell recomputation from the backward pass inside compiled layers, where operators do not.

        Compiled code computes again first. For each product of the forward pass, backward has two, and one for each
        exchange of tokens; what there is beyond that is computed again, so the backward pass begins after as many.
        """
        ops, host = self.trace.ops, self.host
        ours = [place for place, name in enumerate(host.names) if name in (_FORWARD, _BACKWARD_OF_IT)]
        compiled = set(np.flatnonzero(np.isin(ops["name"], ours)).tolist())
        regions: defaultdict[int, list[int]] = defaultdict(list)
        for place, row in enumerate(self.op if compiled else ()):
            if (region := next((one for one in host.around(int(row)) if one in compiled), None)) is not None:
                regions[region].append(place)
        forward = {int(ops["sequence"][region]): region for region in regions if host.name(region) == _FORWARD}
        for region, places in regions.items():
            before = regions.get(forward.get(int(ops["sequence"][region]), -1), [])
            if host.name(region) != _BACKWARD_OF_IT or not before:
                continue
            places.sort(key=lambda place: self.call[place])  # in the order of launches, whatever the stream
            experts = any(self.category[place] == "expert GEMMs" for place in before)
            last = -1
            for part, needed in (("expert GEMMs" if experts else "other GEMMs", 2), ("all-to-all", 1)):
                there, forth = (self._those_of(part, of_region) for of_region in (places, before))
                if part == "all-to-all":  # counts of tokens go forth only
                    moved = [(place, self.collective[place]) for place in forth]
                    forth = [place for place, one in moved if one is None or one.elements > FEW_ELEMENTS]
                if (more := len(there) - needed * len(forth)) > 0:
                    last = max(last, places.index(there[min(more, len(there)) - 1]))
            for place in places[: last + 1]:
                self.contexts[place] = self.contexts[place]._replace(phase="recompute")

    def _those_of(self, part: str, places: list[int]) -> list[int]:
        """Products or exchanges themselves, without their helpers."""
        helper = re.compile("prepare|split_?k(?!ernel)|reduce", re.IGNORECASE)
        return [place for place in places if self.category[place] == part and not helper.search(self.name(place))]

    def _find_waits(self) -> None:
        calls, names = self.trace.calls, self.trace.names
        blocking = np.isin(calls["name"], [index for index, name in enumerate(names) if _BLOCKS.search(name)])
        self.waits = np.flatnonzero(blocking)
        threads = calls["thread"][self.waits]
        self._of_thread = {int(thread): self.waits[threads == thread] for thread in np.unique(threads)}
        launched = self.call[self.call >= 0]
        lead = self.events["start"][self.call >= 0] - calls["end"][launched]  # time that a kernel waited in the queue
        self._ahead = np.sort(calls["start"][launched][lead > QUEUED_US])

    def last_wait(self, thread: int, until: float) -> int:
        """Row of a thread's last call that waited for the GPU and returned by a time; -1 if there is none."""
        rows = self._of_thread.get(thread, self.waits[:0])
        place = int(np.searchsorted(self.trace.calls["end"][rows], until, side="right")) - 1
        return int(rows[place]) if place >= 0 else -1

    def was_ahead(self, since: float, until: float) -> bool:
        """Whether a kernel launched between two times had to queue."""
        place = int(np.searchsorted(self._ahead, until)) - 1
        return place >= 0 and bool(self._ahead[place] >= since)
