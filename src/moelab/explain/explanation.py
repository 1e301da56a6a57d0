"""Where the time of a traced step went, by unions of intervals.

*Span* is from the first to the last event on the GPU, *busy* is when any runs, *compute* when one runs that does not
communicate. An instant belongs to one part: to the first of the compute categories that runs, else to communication,
which nothing hides then, else it is idle. So parts add up to the span.

The GPU is idle while the host has not launched the next kernel, or between kernels that wait for each other. If the
host waited for the GPU before that launch, the wait is named: after it the host starts without a lead, and what it
falls behind is the wait's until kernels queue again. Otherwise the host is too slow.

A collective that takes longer than others of its kind and size has waited for a rank that came later. With traces of
several ranks, the rank that waits least came last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moelab.errors import BadInput
from moelab.explain.categories import (
    COMMUNICATION,
    COMPUTE,
    FEW_ELEMENTS,
    PHASES,
    UNCLASSIFIED,
    Context,
    category,
    communication,
)
from moelab.explain.host import COMPILED_BACKWARD, COMPILED_FORWARD, Host
from moelab.explain.trace import Collective, Rows, Trace, read_trace, trace_files
from moelab.hardware import Gpu, known_gpu
from moelab.projection.project import aligned

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
QUEUED_US = 50.0
"""A kernel that waits this long after its launch shows that the host is ahead of the GPU."""
RESTART_US = 1000.0
"""What a host needs at most to launch again after it waited; beyond that it did something else."""
PARTS = {part: place for place, part in enumerate((*COMPUTE, *COMMUNICATION))}
"""In the order in which an instant belongs to them."""
_NONE = np.zeros(0, np.intp)
_MUCH = Collective("", FEW_ELEMENTS + 1, "", "", 0, -1)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """One group's time, ms: all of it, what no compute hides, and what it waited for other ranks.

    ``waiting_ms`` is None where nothing tells; ``from_ranks`` says whether it was seen on several ranks, or estimated
    from the fastest of the same kind.
    """

    group: str
    ms: float
    exposed_ms: float
    waiting_ms: float | None
    from_ranks: bool = False

    @property
    def how_waiting(self) -> str:
        """How the waiting is known."""
        known = "seen on all ranks" if self.from_ranks else "by the fastest of each kind"
        return "" if self.waiting_ms is None else known


@dataclass(frozen=True, kw_only=True)
class Product:
    """Products of one operator and shape: how many, ms, and TFLOP/s; None where shapes were not recorded."""

    op: str
    shape: str | None
    count: int
    ms: float
    tflops: float | None
    share_of_peak: float | None


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies of one kind: how many, ms, and GB/s; ``share_of_peak`` of memory's, of which a copy takes two bytes."""

    kind: str
    count: int
    ms: float
    gb_s: float | None
    share_of_peak: float | None


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Gaps with one cause: how many, ms idle, and what the host did; of a synchronisation, the call and its caller."""

    cause: str
    where: str
    count: int
    idle_ms: float


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """One rank of several, ms; ``waiting_ms`` is what its collectives took longer than on the rank that came last."""

    rank: int
    span_ms: float
    compute_ms: float
    idle_ms: float
    waiting_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A traced step of one rank, explained; see the module for the words.

    Attributes:
        files: whose traces these are, by name.
        rank: that is shown.
        gpu: by the name in the trace; None for a CPU.
        span_ms: first to last event.
        busy_ms: any event runs.
        compute_ms: an event runs that is no communication.
        communication_ms: communication runs.
        parts_ms: by category; with exposed communication and idle time by cause they add up to the span.
        classified: share of kernel time in a category that is not *unknown* or *other*.
        kernels_ms: sums of durations by category and pass, not of unions.
        layers_ms: the same by layer and pass; empty where layers are not told.
        communication: by group.
        products: matrix products.
        copies: of memory.
        gaps: idle time by cause and by what the host did, the longest first.
        steps: the profiler's, with the span of each, ms.
        ranks: if there are several.
        unknown: kernels without a category, with ms, the longest first.
        edge_ms: barriers at the beginning and the end of the trace, which ranks meet at because they are traced.
        idle_in_layers_ms: idle time that ends with a kernel of a layer.
        gather_gb_s: what gathers and scatters of FSDP moved over each rank's link in the time they took, GB/s; None
            where their sizes were not recorded.
        notes: what a reader has to know.
        timeline: events by start, for figures: ``start, end`` (ms after the first), ``part, phase, name`` (indices
            into ``labels``), ``layer`` and ``stream``.
        host_timeline: calls that launch or wait: ``start, end`` as there, ``name``, and ``waits`` (0 or 1).
        labels: names of parts, passes and kernels.
    """

    files: tuple[str, ...]
    rank: int | None
    gpu: str | None
    span_ms: float
    busy_ms: float
    compute_ms: float
    communication_ms: float
    parts_ms: dict[str, float]
    classified: float
    kernels_ms: dict[str, dict[str, float]]
    layers_ms: dict[int, dict[str, float]]
    communication: tuple[Communication, ...]
    products: tuple[Product, ...]
    copies: tuple[Copies, ...]
    gaps: tuple[Gaps, ...]
    steps: tuple[tuple[str, float], ...]
    ranks: tuple[RankTime, ...]
    unknown: tuple[tuple[str, float], ...]
    edge_ms: float
    idle_in_layers_ms: float
    gather_gb_s: float | None
    notes: tuple[str, ...]
    timeline: Rows = field(repr=False)
    host_timeline: Rows = field(repr=False)
    labels: dict[str, Sequence[str]] = field(repr=False)

    @property
    def idle_ms(self) -> float:
        """Nothing runs."""
        return self.span_ms - self.busy_ms

    @property
    def exposed_communication_ms(self) -> float:
        """Communication that no compute hides."""
        return self.busy_ms - self.compute_ms

    @property
    def idle_by_cause_ms(self) -> dict[str, float]:
        """The idle parts."""
        return {name.removeprefix("idle: "): ms for name, ms in self.parts_ms.items() if name.startswith("idle: ")}

    @property
    def late_rank(self) -> str:
        """Which rank the others wait for, in a sentence; empty where that is not seen."""
        waited = {one.rank: one.waiting_ms for one in self.ranks if one.waiting_ms is not None}
        if len(waited) < 2:
            return ""
        late, early = min(waited, key=lambda rank: waited[rank]), max(waited, key=lambda rank: waited[rank])
        return (
            f"rank {late} comes last most often: it waits {waited[late]:.1f} ms for the others in their collectives, "
            f"rank {early} waits {waited[early]:.1f} ms"
        )

    def to_json(self) -> dict[str, Any]:
        """The explanation as one JSON object, without the timeline."""
        return {
            "files": list(self.files),
            "rank": self.rank,
            "gpu": self.gpu,
            "span_ms": self.span_ms,
            "busy_ms": self.busy_ms,
            "idle_ms": self.idle_ms,
            "compute_ms": self.compute_ms,
            "communication_ms": self.communication_ms,
            "exposed_communication_ms": self.exposed_communication_ms,
            "hidden_communication_ms": self.communication_ms - self.exposed_communication_ms,
            "parts_ms": self.parts_ms,
            "idle_by_cause_ms": self.idle_by_cause_ms,
            "classified": self.classified,
            "kernels_ms": self.kernels_ms,
            "layers_ms": {str(layer): passes for layer, passes in self.layers_ms.items()},
            **{name: [vars(one) for one in getattr(self, name)] for name in ("communication", "products", "copies")},
            **{name: [vars(one) for one in getattr(self, name)] for name in ("gaps", "ranks")},
            "steps": [{"step": step, "span_ms": ms} for step, ms in self.steps],
            "unknown_kernels": [{"kernel": kernel, "ms": ms} for kernel, ms in self.unknown],
            "late_rank": self.late_rank,
            "traced_edges_ms": self.edge_ms,
            "notes": list(self.notes),
        }


def explain(paths: Sequence[Path], *, rank: int | None = None, step: int | None = None) -> Explanation:
    """Explain the traces of one step.

    Args:
        paths: traces, or folders that have some below them, such as a run; each file is one rank's.
        rank: that is shown; the lowest if it is not given.
        step: number of the profiler's step, if the trace has several; all of them if it is not given.

    Raises:
        BadInput: if a file is no trace, or there is no such rank or step.
    """
    notes: list[str] = []
    analysed: dict[int, _Rank] = {}
    files = trace_files(paths)
    for place, path in enumerate(files):
        try:
            trace = read_trace(path)
        except BadInput as error:
            if len(files) == 1:
                raise
            notes.append(str(error))
            continue
        number = trace.rank if trace.rank is not None else place
        if number in analysed:
            places = [f"{one.parent.name}/{one.name}" for one in (path, analysed[number].trace.path)]
            notes.append(f"{places[0]} is of rank {number}, as is {places[1]}: the later is shown")
        analysed[number] = _Rank(trace, step)
        if (rank is not None and number != rank) or (rank is None and number != min(analysed)):
            analysed[number].forget()
    if not analysed:
        raise BadInput("; ".join(notes))
    shown = min(analysed) if rank is None else rank
    if shown not in analysed:
        raise BadInput(f"rank is {rank}; the traces are of ranks {', '.join(map(str, sorted(analysed)))}")
    return _explanation(analysed, shown, notes)


def union_us(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Merged intervals, by start."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], ends[last]


def length_us(starts: Floats, ends: Floats) -> float:
    """Length of the union of intervals."""
    merged = union_us(starts, ends)
    return float((merged[1] - merged[0]).sum())


class _Rank:
    """One rank's events with what they are."""

    def __init__(self, trace: Trace, step: int | None) -> None:
        self.trace, self.host = trace, Host(trace)
        self.notes = list(trace.notes)
        self.on_cpu = not len(trace.events)
        self.events = self._cpu_events() if self.on_cpu else trace.events
        self.call = np.full(len(self.events), -1) if self.on_cpu else self.host.calls_of(self.events)
        self._choose_step(step)
        self._classify()
        self.measure()

    def _cpu_events(self) -> Rows:
        """Stretches of time of which each belongs to an operator alone, as if each ran on a device of its thread."""
        starts, ends, rows = (np.asarray(column) for column in self.host.own_segments)
        rows = rows.astype(int)
        ops = self.trace.ops
        gloo = {index for index, name in enumerate(self.trace.names) if name.startswith(("gloo:", "mpi:", "ucc:"))}
        kept = (ops["annotation"][rows] == 0) | np.isin(ops["name"][rows], list(gloo))
        events = np.zeros(int(kept.sum()), self.trace.events.dtype)
        events["start"], events["end"], events["external"] = starts[kept], ends[kept], rows[kept]
        events["name"], events["stream"] = ops["name"][rows[kept]], ops["thread"][rows[kept]]
        events["correlation"], events["collective"] = -1, -1
        return events[np.argsort(events["start"], kind="stable")]

    def _choose_step(self, wanted: int | None) -> None:
        steps = self.trace.steps
        launched = self.trace.calls["start"][self.call] if len(self.trace.calls) else 0.0
        began = np.where(self.call >= 0, launched, self.events["start"])
        inside = [(began >= start) & (began < end) for _, start, end in steps]
        spans = [(name, self._span_ms(chosen)) for (name, *_), chosen in zip(steps, inside, strict=True)]
        self.steps = tuple((name, ms) for name, ms in spans if ms > 0)
        numbers = {int(found[0]): place for place, (name, *_) in enumerate(steps) if (found := re.search(r"\d+", name))}
        if wanted is not None:
            if wanted not in numbers:
                there = ", ".join(map(str, numbers)) or "not marked in this trace"
                raise BadInput(f"step is {wanted}; the profiler's steps are {there}")
            chosen = inside[numbers[wanted]]
            if not chosen.any():
                raise BadInput(f"step {wanted} of {self.trace.path.name} has no events")
            self.events, self.call = self.events[chosen], self.call[chosen]
        elif len(self.steps) > 1:
            self.notes.append(
                f"{self.trace.path.name} has {len(self.steps)} steps ({self.steps[0][0]} to {self.steps[-1][0]}): "
                f"figures are of all together; choose one with --step {next(iter(numbers))}"
            )

    def _span_ms(self, chosen: npt.NDArray[np.bool_]) -> float:
        events = self.events[chosen]
        return float(events["end"].max() - events["start"].min()) / 1e3 if len(events) else 0.0

    def _classify(self) -> None:
        trace, host, names = self.trace, self.host, self.trace.names
        kernels = [names[name] for name in self.events["name"]]
        if self.on_cpu:
            self.op = self.events["external"].astype(int)
        else:
            rows = [host.op_of(event, int(call)) for event, call in zip(self.events, self.call, strict=True)]
            self.op = np.asarray(rows, dtype=int)
        graphs = {index for index, name in enumerate(names) if "GraphLaunch" in name}
        calls = self.trace.calls["name"][self.call] if len(self.trace.calls) else np.zeros(len(self.events), int)
        self.graph = (self.events["graph"] > 0) | ((self.call >= 0) & np.isin(calls, list(graphs)))
        ops, places = np.unique(self.op, return_inverse=True)
        of_ops = [host.context(int(row)) for row in ops]
        self.contexts: list[Context] = [  # a graph is launched as a whole, from where its kernels were not recorded
            Context() if graph else of_ops[place] for place, graph in zip(places, self.graph, strict=True)
        ]
        self.collective = [trace.collectives[one] if one >= 0 else None for one in self.events["collective"]]
        self.category = [
            category(kernel, context, collective)
            for kernel, context, collective in zip(kernels, self.contexts, self.collective, strict=True)
        ]
        for place, part in enumerate(self.category):
            if part == "optimizer" and self.contexts[place].phase == "forward":  # clipping, before its step
                self.contexts[place] = self.contexts[place]._replace(phase="optimizer")
        self.moves_data = np.asarray([one in COMMUNICATION for one in self.category], dtype=bool)
        if not self.on_cpu and not (self.call >= 0).any():
            self.notes.append(
                f"{trace.path.name} has no correlation between kernels and calls: why the GPU was idle, and which pass "
                "a kernel belongs to, is not known"
            )
        if any(communication(kernel) and not context.op and not collective for kernel, context, collective in
               zip(kernels, self.contexts, self.collective, strict=True)):  # fmt: skip
            self.notes.append("collectives without operator or process group are classified by their kernels' names")
        self._mark_recomputation()

    def _mark_recomputation(self) -> None:
        """Tell recomputation from the backward pass inside compiled layers, where operators do not.

        Compiled code computes again first. For each product of the forward pass, backward has two, and one for each
        exchange of tokens; what there is beyond that is computed again, so the backward pass begins after as many.
        """
        regions: defaultdict[int, list[int]] = defaultdict(list)
        forward: dict[int, int] = {}
        ops, host = self.trace.ops, self.host
        ours = [place for place, name in enumerate(host.names) if name in (COMPILED_FORWARD, COMPILED_BACKWARD)]
        compiled = set(np.flatnonzero(np.isin(ops["name"], ours)).tolist())
        if not compiled:
            return
        for place, row in enumerate(self.op):
            region = next((one for one in host.around(int(row)) if one in compiled), None)
            if region is not None:
                regions[region].append(place)
                if host.name(region) == COMPILED_FORWARD:
                    forward[int(ops["sequence"][region])] = region
        for region, places in regions.items():
            before = regions.get(forward.get(int(ops["sequence"][region]), -1), [])
            if host.name(region) != COMPILED_BACKWARD or not before:
                continue
            places.sort(key=lambda place: self.call[place])
            experts = any(self.category[place] == "expert GEMMs" for place in before)
            last = -1
            for part, needed in (("expert GEMMs" if experts else "other GEMMs", 2), ("all-to-all", 1)):
                there = [place for place in places if self.category[place] == part and self._counts(place)]
                forth = [place for place in before if self.category[place] == part and self._counts(place)]
                if part == "all-to-all":  # counts of tokens go forth only
                    forth = [place for place in forth if (self.collective[place] or _MUCH).elements > FEW_ELEMENTS]
                if (more := len(there) - needed * len(forth)) > 0:
                    last = max(last, places.index(there[min(more, len(there)) - 1]))
            for place in places[: last + 1]:
                self.contexts[place] = self.contexts[place]._replace(phase="recompute")

    def _counts(self, place: int) -> bool:
        """Whether a kernel is a product or an exchange itself, not a helper of one."""
        return not re.search("prepare|split_?k|reduce", self.trace.names[self.events["name"][place]], re.IGNORECASE)

    def measure(self) -> None:
        """Span, busy and compute time."""
        start, end, compute = self.events["start"], self.events["end"], ~self.moves_data
        self.first_us, self.last_us = float(start.min()), float(end.max())
        self.busy = union_us(start, end)
        self.busy_us = float((self.busy[1] - self.busy[0]).sum())
        self.compute_us = length_us(start[compute], end[compute])
        self.communication_us = length_us(start[~compute], end[~compute])
        calls, names = self.trace.calls, self.trace.names
        blocks = {
            index
            for index, name in enumerate(names)
            if re.search(
                "synchroni[sz]e|(?:cuda|hip)Memcpy(?:WithStream|2D|3D|Peer)?$|urQueueFinish|EventWait$", name, re.I
            )
        }
        blocking = np.flatnonzero(np.isin(calls["name"], list(blocks)))
        threads = calls["thread"][blocking]
        self.blocking = {int(thread): blocking[threads == thread] for thread in np.unique(threads)}
        self._returned = {thread: calls["end"][rows] for thread, rows in self.blocking.items()}
        lead = start[self.call >= 0] - calls["end"][self.call[self.call >= 0]]
        self._ahead = np.sort(calls["start"][self.call[self.call >= 0]][lead > QUEUED_US])
        self.key_of: dict[int, tuple[Any, ...]] = {}  # by which ranks recognise the collective of an event
        orders: defaultdict[str, int] = defaultdict(int)
        for place in np.flatnonzero(self.moves_data).tolist():
            collective, name = self.collective[place], self.trace.names[self.events["name"][place]]
            orders[name] += 1
            key = (collective.group, collective.order) if collective and collective.order >= 0 else (name, orders[name])
            self.key_of[place] = key
        self.met = {key: float(end[place] - start[place]) for place, key in self.key_of.items()}

    def last_synchronisation(self, thread: int, until: float) -> int:
        """Row of a thread's last call that waited for the GPU and returned by a time; -1 if there is none."""
        if thread not in self.blocking:
            return -1
        place = int(np.searchsorted(self._returned[thread], until, side="right")) - 1
        return int(self.blocking[thread][place]) if place >= 0 else -1

    def was_ahead(self, since: float, until: float) -> bool:
        """Whether a kernel launched between two times had to queue."""
        place = int(np.searchsorted(self._ahead, until)) - 1
        return place >= 0 and bool(self._ahead[place] >= since)

    def forget(self) -> None:
        """Keep what is compared between ranks and let go of the events."""
        summary = (self.first_us, self.last_us, self.busy_us, self.compute_us, self.met, self.notes, self.trace)
        self.__dict__.clear()
        self.first_us, self.last_us, self.busy_us, self.compute_us, self.met, self.notes, trace = summary
        self.trace = replace(trace, events=trace.events[:0], calls=trace.calls[:0], ops=trace.ops[:0], names=())


def _explanation(analysed: dict[int, _Rank], number: int, notes: list[str]) -> Explanation:
    one = analysed[number]
    start, end, trace = one.events["start"], one.events["end"], one.trace
    parts = np.asarray([PARTS[part] for part in one.category], np.int8)
    by_category = {part: np.flatnonzero(parts == PARTS[part]) for part in dict.fromkeys(one.category)}
    parts_ms, taken_us = {}, 0.0
    together = np.zeros(len(parts), bool)
    for part in PARTS:
        if part in by_category:
            together[by_category[part]] = True
            now_us = length_us(start[together], end[together])
            parts_ms[part], taken_us = (now_us - taken_us) / 1e3, now_us
    gaps, idle_in_layers_us = _gaps(one)
    for gap in gaps:
        parts_ms[f"idle: {gap.cause}"] = parts_ms.get(f"idle: {gap.cause}", 0.0) + gap.idle_ms
    kernel_us = float((end - start).sum())
    unknown: defaultdict[str, float] = defaultdict(float)
    for place in np.flatnonzero(np.isin(parts, [PARTS[part] for part in UNCLASSIFIED])).tolist():
        unknown[trace.names[one.events["name"][place]]] += float(end[place] - start[place]) / 1e3
    ranks, waiting = _skew(analysed)
    gpu = known_gpu(trace.gpu) if trace.gpu else None
    if trace.gpu and gpu is None:
        notes.append(f"the peaks of {trace.gpu} are not known, so nothing is held against them")
    kernels_ms: dict[str, dict[str, float]] = {}
    layers_ms: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for place, (part, context) in enumerate(zip(one.category, one.contexts, strict=True)):
        ms = float(end[place] - start[place]) / 1e3
        row = kernels_ms.setdefault(part, dict.fromkeys(PHASES, 0.0))
        row[context.phase] += ms
        if context.layer >= 0:
            layers_ms[context.layer][context.phase] += ms
    for other in analysed.values():
        notes += [note for note in other.notes if note not in notes]
    return Explanation(
        files=tuple(analysed[rank].trace.path.name for rank in sorted(analysed)),
        rank=trace.rank if len(analysed) == 1 else number,
        gpu=trace.gpu,
        span_ms=(one.last_us - one.first_us) / 1e3,
        busy_ms=one.busy_us / 1e3,
        compute_ms=one.compute_us / 1e3,
        communication_ms=one.communication_us / 1e3,
        parts_ms=parts_ms,
        classified=1 - sum(unknown.values()) * 1e3 / kernel_us if kernel_us else 0.0,
        kernels_ms=dict(sorted(kernels_ms.items(), key=lambda item: -sum(item[1].values()))),
        layers_ms=dict(sorted(layers_ms.items())),
        communication=tuple(_communication(one, by_category, waiting.get(number))),
        products=tuple(_products(one, by_category, gpu)),
        copies=tuple(_copies(one, gpu)),
        gaps=gaps,
        steps=one.steps,
        ranks=ranks,
        unknown=tuple(sorted(unknown.items(), key=lambda item: -item[1])),
        edge_ms=_edges_us(one) / 1e3,
        idle_in_layers_ms=idle_in_layers_us / 1e3,
        gather_gb_s=_gather_gb_s(one, by_category.get("FSDP collectives", _NONE)),
        notes=tuple(notes),
        timeline=_timeline(one),
        host_timeline=_host_timeline(one),
        labels={"part": tuple(PARTS), "phase": PHASES, "name": trace.names},
    )


def _timeline(one: _Rank) -> Rows:
    columns = [(name, "f8") for name in ("start", "end")] + [
        (name, "i4") for name in ("part", "phase", "name", "layer", "stream")
    ]
    rows = np.empty(len(one.events), columns)
    rows["start"], rows["end"] = ((one.events[name] - one.first_us) / 1e3 for name in ("start", "end"))
    rows["part"] = [PARTS[part] for part in one.category]
    rows["phase"] = [PHASES.index(context.phase) for context in one.contexts]
    rows["name"], rows["stream"] = one.events["name"], one.events["stream"]
    rows["layer"] = [context.layer for context in one.contexts]
    return rows


def _host_timeline(one: _Rank) -> Rows:
    calls = one.trace.calls
    rows = np.empty(len(calls), [("start", "f8"), ("end", "f8"), ("name", "i4"), ("waits", "i4")])
    rows["start"], rows["end"] = ((calls[name] - one.first_us) / 1e3 for name in ("start", "end"))
    waits = [row for blocking in one.blocking.values() for row in blocking]
    rows["name"], rows["waits"] = calls["name"], np.isin(np.arange(len(calls)), waits)
    return rows[np.argsort(rows["start"], kind="stable")]


def _gaps(one: _Rank) -> tuple[tuple[Gaps, ...], float]:
    """Idle time by cause and by what the host did, and how much of it, µs, ends with a kernel of a layer."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    begins, untils = one.busy[1][:-1], one.busy[0][1:]
    ended_by = np.searchsorted(np.ascontiguousarray(one.events["start"]), untils).tolist()
    in_layers = [one.contexts[place].layer >= 0 for place in ended_by]
    for begin, until, place in zip(begins.tolist(), untils.tolist(), ended_by, strict=True):
        for cause, where, us in _causes(one, begin, until, place):
            if us > 0:
                found[cause, where].append(us)
    gaps = [
        Gaps(cause=cause, where=where, count=len(us), idle_ms=sum(us) / 1e3) for (cause, where), us in found.items()
    ]
    return tuple(sorted(gaps, key=lambda one: -one.idle_ms)), float(
        (untils - begins)[np.asarray(in_layers, bool)].sum()
    )


def _causes(one: _Rank, begin: float, until: float, place: int) -> Iterable[tuple[str, str, float]]:
    """What a gap is made of: cause, what the host did, µs."""
    calls, host, call = one.trace.calls, one.host, int(one.call[place])
    if one.on_cpu:
        yield "host behind", "Python, between operators", until - begin
        return
    if call < 0:
        yield "unknown", "no launch is recorded", until - begin
        return
    # a launch that takes long, such as the first of a kernel, which loads it, is the host's time too
    launched, thread = min(max(float(calls["end"][call]), begin), until), int(calls["thread"][call])
    cause = "gaps of a graph" if one.graph[place] else "between kernels"
    yield cause, "launched, and waiting for kernels or memory", until - launched
    sync, since = one.last_synchronisation(thread, launched), begin
    if sync >= 0 and launched > begin:
        ended = float(calls["end"][sync])
        if ended >= begin or not one.was_ahead(ended, launched):
            since = min(launched, max(begin, ended) + RESTART_US)
            caller = host.caller(host.at(thread, float(calls["start"][sync])))
            yield "waiting for a synchronisation", f"{one.trace.names[calls['name'][sync]]} in {caller}", since - begin
    outermost = host.around(host.at(thread, (since + launched) / 2))
    yield "host behind", host.name(outermost[-1]) if outermost else "Python", launched - since


def _communication(
    one: _Rank, by_category: dict[str, Places], seen: dict[tuple[Any, ...], float] | None
) -> Iterable[Communication]:
    start, end = one.events["start"], one.events["end"]
    compute = np.flatnonzero(~one.moves_data)
    for group in COMMUNICATION:
        places = by_category.get(group, _NONE)
        if not len(places):
            continue
        with_compute = np.concatenate([compute, places])
        waiting_us = _waiting_us(one, places)
        if seen:
            waiting_us = sum(seen.get(one.key_of[place], 0.0) for place in places.tolist())
        us = length_us(start[places], end[places])
        yield Communication(
            group=group,
            ms=us / 1e3,
            exposed_ms=(length_us(start[with_compute], end[with_compute]) - one.compute_us) / 1e3,
            waiting_ms=None if waiting_us is None else min(waiting_us, us) / 1e3,  # waits may overlap
            from_ranks=bool(seen),
        )


def _waiting_us(one: _Rank, places: Places) -> float | None:
    """What collectives took beyond the fastest of their kind; all of it where next to nothing is moved."""
    kinds: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for place in places:
        collective = one.collective[place]
        moved = (collective.name, collective.elements, collective.group) if collective else ()
        kinds[(int(one.events["name"][place]), *moved)].append(
            float(one.events["end"][place] - one.events["start"][place])
        )
    few = {key for key in kinds if len(key) > 1 and key[2] <= FEW_ELEMENTS}
    if not any(key in few or len(times) > 1 for key, times in kinds.items()):
        return None
    return sum(sum(times) - (0.0 if key in few else len(times) * min(times)) for key, times in kinds.items())


def _skew(analysed: dict[int, _Rank]) -> tuple[tuple[RankTime, ...], dict[int, dict[tuple[Any, ...], float]]]:
    """Ranks beside each other, and what each waited in each collective, µs."""
    if len(analysed) < 2:
        return (), {}
    shared = set.intersection(*(set(one.met) for one in analysed.values()))
    least = {key: min(one.met[key] for one in analysed.values()) for key in shared}
    waited = {rank: {key: one.met[key] - least[key] for key in shared} for rank, one in analysed.items()}
    rows = [
        RankTime(
            rank=rank,
            span_ms=(one.last_us - one.first_us) / 1e3,
            compute_ms=one.compute_us / 1e3,
            idle_ms=(one.last_us - one.first_us - one.busy_us) / 1e3,
            waiting_ms=sum(waited[rank].values()) / 1e3 if shared else None,
        )
        for rank, one in sorted(analysed.items())
    ]
    return tuple(rows), waited if shared else {}


def _edges_us(one: _Rank) -> float:
    """Barriers before anything else is exchanged, and after everything."""
    meets = np.flatnonzero(one.moves_data).tolist()
    edges: list[int] = []
    for order in (meets, meets[::-1]):
        for place in order:
            collective = one.collective[place]
            if not collective or "barrier" not in collective.name or place in edges:
                break
            edges.append(int(place))
    return length_us(one.events["start"][edges], one.events["end"][edges]) if edges else 0.0


_BYTES = {"byte": 1, "char": 1, "float8": 1, "bfloat16": 2, "half": 2, "float16": 2, "float": 4, "double": 8, "long": 8}
LARGE_ELEMENTS = 1 << 22


def _gather_gb_s(one: _Rank, places: Places) -> float | None:
    """Bytes of large gathers and scatters, of which each rank's link carries all but its own part, over their time."""
    moved = us = 0.0
    for place in places:
        collective = one.collective[place]
        if collective and collective.elements >= LARGE_ELEMENTS and collective.ranks > 1:
            size = _BYTES.get(collective.dtype.lower().partition("_")[0], 0)
            moved += size * collective.elements * (1 - 1 / collective.ranks)
            us += float(one.events["end"][place] - one.events["start"][place]) if size else 0.0
    return moved / us / 1e3 if us else None


def _products(one: _Rank, by_category: dict[str, Places], gpu: Gpu | None) -> Iterable[Product]:
    ops = one.trace.ops
    grouped: defaultdict[tuple[str, str | None], list[float]] = defaultdict(list)
    called: defaultdict[tuple[str, str | None], set[int]] = defaultdict(set)
    flops_of: dict[tuple[str, str | None], float | None] = {}
    for place in (*by_category.get("expert GEMMs", _NONE), *by_category.get("other GEMMs", _NONE)):
        row = int(one.op[place])
        name = one.contexts[place].op or one.trace.names[one.events["name"][place]]
        shape = ops["shape"][row] if row >= 0 else -1
        dims = one.trace.shapes[shape] if shape >= 0 else None
        key = (name, " × ".join(str(dim) for dim in dims[:3] if dim) if dims else None)
        grouped[key].append(float(one.events["end"][place] - one.events["start"][place]))
        called[key].add(row if row >= 0 else -2 - place)
        flops_of[key] = _flops(name, dims) if dims else None
    for key, times in sorted(grouped.items(), key=lambda item: -sum(item[1])):
        flops = flops_of[key]
        tflops = flops * len(called[key]) / sum(times) / 1e6 if flops and sum(times) else None
        low = "scaled" in key[0]
        peak = (gpu.fp8_tflops if low else gpu.bf16_tflops) if gpu else None
        share = tflops / float(peak) if tflops and peak else None
        product = Product(
            op=key[0], shape=key[1], count=len(called[key]), ms=sum(times) / 1e3, tflops=tflops, share_of_peak=share
        )
        yield product


def _flops(op: str, dims: Sequence[Any]) -> float | None:
    """Operations of a product by the dimensions of its operands; of a grouped one, of all its rows."""
    matrices = [dim for dim in dims if isinstance(dim, list) and len(dim) >= 2][-2 if "add" in op else 0 :][:2]
    if len(matrices) < 2:
        return None
    left, right = matrices
    if len(left) == 2 and len(right) == 3:  # rows of all groups by a weight each
        return 2.0 * float(left[0] * left[1] * right[2])
    return 2.0 * float(np.prod(left)) * float(right[-1])


def _copies(one: _Rank, gpu: Gpu | None) -> Iterable[Copies]:
    names = one.events["name"]
    for name in dict.fromkeys(names.tolist()):
        kind = one.trace.names[name]
        if not re.match("Memcpy|hipMemcpy|Copy", kind):
            continue
        places = np.flatnonzero(names == name)
        us = float((one.events["end"][places] - one.events["start"][places]).sum())
        moved = float(one.events["bytes"][places].sum())
        gb_s = moved / us / 1e3 if moved and us else None
        on_device = "DtoD" in kind or "Device -> Device" in kind
        peak = 1e3 * float(gpu.hbm_tb_s) if gpu and gpu.hbm_tb_s and on_device else None
        share = 2 * gb_s / peak if gb_s and peak else None
        yield Copies(kind=kind, count=len(places), ms=us / 1e3, gb_s=gb_s, share_of_peak=share)


SHOWN = 8
"""Rows of a table for a person."""


def explanation_text(found: Explanation) -> str:
    """An explanation for a terminal."""
    where = f"rank {found.rank}" if found.rank is not None else "this rank"
    compute, exposed, idle = (
        one / found.span_ms for one in (found.compute_ms, found.exposed_communication_ms, found.idle_ms)
    )
    phases = [name for name in PHASES if any(row[name] for row in found.kernels_ms.values())]
    of_layers = [name for name in phases if any(row[name] for row in found.layers_ms.values())]
    parts = sorted(found.parts_ms.items(), key=lambda item: -item[1])
    tables: list[tuple[tuple[str, ...], Iterable[tuple[str, ...]]]] = [
        (("part", "", "of the span"), ((part, _ms(ms), f"{ms / found.span_ms:.1%}") for part, ms in parts)),
        (
            ("communication", "runs", "not hidden", "of it all waiting for ranks", ""),
            (
                (one.group, _ms(one.ms), _ms(one.exposed_ms), _ms(one.waiting_ms), one.how_waiting)
                for one in found.communication
            ),
        ),
        (
            ("idle because of", "what the host did", "times", "idle"),
            ((gap.cause, gap.where[:72], str(gap.count), _ms(gap.idle_ms)) for gap in found.gaps[:SHOWN]),
        ),
        (
            ("kernels, sum of durations", *phases),
            ((part, *(_ms(row[name]) for name in phases)) for part, row in found.kernels_ms.items()),
        ),
        (
            ("layer", *of_layers),
            ((str(layer), *(_ms(row[name]) for name in of_layers)) for layer, row in found.layers_ms.items()),
        ),
        (
            ("products", "operands", "times", "", "", "of the peak"),
            (
                (
                    *(one.op[:48], one.shape or "shapes not recorded", str(one.count), _ms(one.ms)),
                    *_rate(one.tflops, one.share_of_peak, "TFLOP/s"),
                )
                for one in found.products[:SHOWN]
            ),
        ),
        (
            ("copies", "times", "", "", "of the peak"),
            (
                (one.kind, str(one.count), _ms(one.ms), *_rate(one.gb_s, one.share_of_peak, "GB/s"))
                for one in found.copies
            ),
        ),
        (
            ("rank", "span", "compute", "idle", "waiting for others"),
            (
                (str(one.rank), _ms(one.span_ms), _ms(one.compute_ms), _ms(one.idle_ms), _ms(one.waiting_ms))
                for one in found.ranks
            ),
        ),
        (("not classified", ""), ((name[:96], _ms(ms, digits=2)) for name, ms in found.unknown[:SHOWN])),
    ]
    lines = [
        f"{found.span_ms:.1f} ms from the first to the last event of {where} ({found.gpu or 'CPU'}): {compute:.1%} "
        f"compute, {exposed:.1%} communication that nothing hides, {idle:.1%} idle; {found.classified:.1%} of kernel "
        "time is classified",
        *(f"note: {note}" for note in found.notes),
    ]
    for heading, rows in tables:
        if there := list(rows):
            lines += ["", *(line.rstrip() for line in aligned([heading, *there]))]
    return "\n".join([*lines, *([f"\n{found.late_rank}"] if found.late_rank else [])])


def _ms(value: float | None, *, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}f} ms"


def _rate(value: float | None, share: float | None, unit: str) -> tuple[str, str]:
    return ("" if value is None else f"{value:,.4g} {unit}", "" if share is None else f"{share:.0%}")
