"""Where the time of a traced step went, by unions of intervals.

*Span* is from the first to the last event on the GPU, *busy* is when any runs, *compute* when one runs that does not
communicate. An instant belongs to one part: to the first of the compute categories that runs, else to communication,
which is *exposed* then, else it is idle. So the parts add up to the span.

The GPU is idle while the host has not launched the next kernel, or between kernels that wait for each other. If the
host waited for the GPU before that launch, the wait is named: after it the host starts without a lead, and what it
falls behind is the wait's until kernels queue again. Otherwise the host is too slow.

A collective that takes longer than others of its kind and size has waited for a rank that came later. With traces of
several ranks, the rank that waits least came last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moelab.errors import BadInput
from moelab.hardware import Gpu, known_gpu
from moelab.planning.project import aligned
from moelab.traces.categories import COMMUNICATION, PARTS, PHASES, STRAGGLERS, UNCLASSIFIED, is_small
from moelab.traces.rank import Cut, Floats, Places, Rank, latest
from moelab.traces.trace import Rows, read_trace, trace_files

QUEUED_US = 50.0
"""A kernel that waits this long after its launch shows that the host is ahead of the GPU."""
RESTART_US = 1000.0
"""What a host needs at most to launch again after it waited; beyond that it did something else."""
SHOWN = 8
"""Rows of a table for a person."""


@dataclass(frozen=True)
class Communication:
    """One group's time."""

    group: str
    ms: float
    exposed_ms: float  # what no compute hides
    waiting_ms: float | None  # for other ranks; None where nothing tells
    from_ranks: bool  # whether that was seen on several ranks, or estimated from the fastest of the same kind

    def less(self, ms: float) -> Communication:
        """The group without ``ms`` of exposed waiting."""
        waiting_ms = None if self.waiting_ms is None else max(0.0, self.waiting_ms - ms)
        return replace(self, ms=self.ms - ms, exposed_ms=self.exposed_ms - ms, waiting_ms=waiting_ms)


@dataclass(frozen=True)
class Product:
    """Products of one operator and shape: how many, ms, and TFLOP/s; None where shapes were not recorded."""

    op: str
    shape: str | None
    count: int
    ms: float
    tflops: float | None
    share_of_peak: float | None


@dataclass(frozen=True)
class Gaps:
    """Gaps with one cause: how many, ms idle, and what the host did; of a synchronisation, the call and its caller."""

    cause: str
    where: str
    count: int
    idle_ms: float


@dataclass(frozen=True)
class RankTime:
    """One rank of several, ms; ``waiting_ms`` is what its collectives took longer than on the rank that came last."""

    rank: int
    span_ms: float
    compute_ms: float
    idle_ms: float
    waiting_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A traced step of one rank, explained; see the module for the words."""

    files: tuple[str, ...]
    rank: int | None
    gpu: str | None  # by the name in the trace; None for a CPU
    span_ms: float
    busy_ms: float
    compute_ms: float
    communication_ms: float
    parts_ms: dict[str, float]  # with exposed communication and idle time by cause they add up to the span
    classified: float  # share of kernel time in a category that is not *unknown* or *other*
    kernels_ms: dict[str, dict[str, float]]  # by category and pass: sums of durations, not of unions
    layers_ms: dict[int, dict[str, float]]  # the same by layer and pass; empty where layers are not told
    communication: tuple[Communication, ...]
    products: tuple[Product, ...]
    gaps: tuple[Gaps, ...]  # the longest first
    steps: tuple[tuple[str, float], ...]  # the profiler's, with the span of each, ms
    step_count: int  # that the figures are of together
    ranks: tuple[RankTime, ...]  # if there are several
    unknown: tuple[tuple[str, float], ...]  # kernels without a category, with ms, the longest first
    edge_ms: float  # barriers at both ends of the trace, which ranks meet at because they are traced
    idle_in_layers_ms: float  # that ends with a kernel of a layer
    notes: tuple[str, ...]
    # Events by start: start and end (ms after the first), part, phase and name (indices into labels), layer, stream.
    timeline: Rows = field(repr=False)
    # Calls that launch or wait: start and end as there, name, and waits (0 or 1).
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
    def tracing_ms(self) -> float:
        """What the barriers of tracing add to the span."""
        return min(self.edge_ms, self.parts_ms.get(STRAGGLERS, 0.0))

    @property
    def step_ms(self) -> float:
        """The span without the barriers of tracing."""
        return self.span_ms - self.tracing_ms

    @property
    def step_shares(self) -> tuple[float, float, float]:
        """Compute, exposed communication and idle time, as parts of that step."""
        parts = (self.compute_ms, self.exposed_communication_ms - self.tracing_ms, self.idle_ms)
        return tuple(ms / (self.step_ms or self.span_ms) for ms in parts)  # type: ignore[return-value]

    @property
    def step_communication(self) -> tuple[Communication, ...]:
        """:attr:`communication` without the barriers of tracing."""
        return tuple(one.less(self.tracing_ms) if one.group == STRAGGLERS else one for one in self.communication)

    @property
    def longest_loss(self) -> tuple[str, float]:
        """What costs most beside compute, with ms; barriers of tracing are left out. Empty where nothing is lost."""
        lost = {f"exposed {one.group}": one.exposed_ms for one in self.step_communication}
        lost |= {f"idle, {cause}": ms for cause, ms in self.idle_by_cause_ms.items()}
        return max(lost.items(), key=lambda one: one[1], default=("", 0.0))

    @property
    def late_rank(self) -> str:
        """Which rank the others wait for, in a sentence; empty where that is not seen."""
        waited = {one.rank: one.waiting_ms for one in self.ranks if one.waiting_ms is not None}
        if len(waited) < 2:
            return ""
        late, early = min(waited, key=lambda rank: waited[rank]), max(waited, key=lambda rank: waited[rank])
        return (
            f"rank {late} arrives last most often: it waits {waited[late]:.1f} ms for the others in collectives, "
            f"rank {early} waits {waited[early]:.1f} ms"
        )

    def to_json(self) -> dict[str, Any]:
        """The explanation as one JSON object, without the timeline."""
        times = "span_ms busy_ms idle_ms compute_ms communication_ms exposed_communication_ms"
        parts = "parts_ms idle_by_cause_ms classified kernels_ms late_rank"
        records = ("communication", "products", "gaps", "ranks")
        return {
            "files": list(self.files),
            **{name: getattr(self, name) for name in f"rank gpu {times} {parts}".split()},
            "hidden_communication_ms": self.communication_ms - self.exposed_communication_ms,
            "layers_ms": {str(layer): passes for layer, passes in self.layers_ms.items()},
            **{name: [vars(one) for one in getattr(self, name)] for name in records},
            "steps": [{"step": step, "span_ms": ms} for step, ms in self.steps],
            "unknown_kernels": [{"kernel": kernel, "ms": ms} for kernel, ms in self.unknown],
            "traced_edges_ms": self.edge_ms,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Stretch:
    """A part of the timeline, ms after the first event: what runs in it, and what its time is made of."""

    first_ms: float
    last_ms: float
    compute_ms: float
    busy_ms: float
    events: Rows  # those that reach into it, as in the timeline
    host: Rows

    @property
    def exposed_ms(self) -> float:
        """Communication that no compute hides."""
        return self.busy_ms - self.compute_ms

    @property
    def idle_ms(self) -> float:
        """Nothing runs."""
        return self.last_ms - self.first_ms - self.busy_ms


def stretch_of(explained: Explanation, *, layer: int | None = None, phase: str | None = None) -> Stretch:
    """The time of a layer, or of one pass of it, with all that runs in it; the whole step without a layer.

    Raises:
        BadInput: if the trace does not tell layers, or has no such layer or pass.
    """
    rows, first, last = explained.timeline, 0.0, explained.span_ms
    if layer is not None:
        # Its products alone: FSDP's collectives and casts run ahead, in the time of other layers.
        chosen = rows["layer"] == layer
        chosen &= np.isin(rows["part"], [PARTS.index(part) for part in ("other GEMMs", "attention", "expert GEMMs")])
        if phase is not None:
            chosen &= rows["phase"] == PHASES.index(phase)
        if not chosen.any():
            there = ", ".join(map(str, explained.layers_ms)) or "none, as no annotation of FSDP names them"
            raise BadInput(f"layer {layer}{f', {phase},' if phase else ''} is not in this trace; layers: {there}")
        first, last = float(rows["start"][chosen].min()), float(rows["end"][chosen].max())
    events, host = (of[(of["end"] >= first) & (of["start"] <= last)] for of in (rows, explained.host_timeline))
    cut = Cut.of(np.maximum(events["start"], first), np.minimum(events["end"], last), events["part"])
    return Stretch(first, last, cut.length(cut.computes), cut.length(cut.busy), events, host)


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
    met: dict[int, _Met] = {}
    shown: tuple[int, Rank] | None = None
    files = list(trace_files(paths))
    for place, path in enumerate(files):
        try:
            one = Rank(read_trace(path), step)
        except BadInput as error:  # one bad file of many becomes a note
            if len(files) == 1:
                raise
            notes.append(str(error))
            continue
        # Files of unknown ranks are told apart by their order.
        number = place if one.trace.rank is None else one.trace.rank
        if number in met:
            places = [f"{one.parent.name}/{one.name}" for one in (path, met[number].path)]
            notes.append(f"{places[0]} and {places[1]} are both of rank {number}: the first of them is shown")
        cut = one.cut
        span_us, compute_us, idle_us = cut.times[-1] - cut.times[0], cut.length(cut.computes), cut.length(~cut.busy)
        collectives_us = {key: float(one.us[event]) for event, key in one.collectives().items()}
        time = RankTime(number, float(span_us) / 1e3, compute_us / 1e3, idle_us / 1e3, None)
        met[number] = _Met(path, time, collectives_us)
        notes += one.notes
        if number == (min(met) if rank is None else rank):  # of all others the events are let go
            shown = number, one
    if not met:
        raise BadInput("; ".join(notes))
    if shown is None:
        there = f"rank is {rank}; the traces are of ranks {', '.join(map(str, sorted(met)))}"
        raise BadInput("; ".join([there, *notes]))  # its own file may be one that could not be read
    return _explanation(*shown, met, notes)


class _Met(NamedTuple):
    """What is kept of each rank."""

    path: Path
    time: RankTime
    collectives_us: Mapping[Hashable, float]


def _waited_us(met: Mapping[int, _Met]) -> dict[int, dict[Hashable, float]]:
    """What each of several ranks waited in each collective; empty if they have none in common."""
    shared = set.intersection(*(set(one.collectives_us) for one in met.values())) if len(met) > 1 else set()
    # The rank that came last found all others there, so its collective took no more than the exchange itself.
    least = {key: min(one.collectives_us[key] for one in met.values()) for key in shared}
    return {rank: {key: one.collectives_us[key] - least[key] for key in shared} for rank, one in met.items() if shared}


def _explanation(number: int, one: Rank, met: Mapping[int, _Met], notes: list[str]) -> Explanation:
    cut, gpu, waited = one.cut, known_gpu(one.trace.gpu or ""), _waited_us(met)
    if one.trace.gpu and gpu is None:
        notes.append(f"the peaks of {one.trace.gpu} are not known, so no share of peak is shown")
    owner = np.where(cut.busy, cut.runs.argmax(axis=0), -1)  # the first part that runs
    parts_ms = {PARTS[part]: cut.length(owner == part) / 1e3 for part in np.unique(one.part).tolist()}
    gaps, idle_in_layers_us = _gaps(one)
    for gap in gaps:
        parts_ms[f"idle: {gap.cause}"] = parts_ms.get(f"idle: {gap.cause}", 0.0) + gap.idle_ms
    unknown: Counter[str] = Counter()
    for part in UNCLASSIFIED:
        for place in one.places_of(part):
            unknown[one.name(place)] += one.us[place] / 1e3
    kernels_ms = {PARTS[part]: passes for part, passes in _passes_ms(one, one.part).items()}
    return Explanation(
        files=tuple(met[rank].path.name for rank in sorted(met)),
        rank=one.trace.rank if len(met) == 1 else number,
        gpu=one.trace.gpu,
        span_ms=met[number].time.span_ms,
        busy_ms=cut.length(cut.busy) / 1e3,
        compute_ms=met[number].time.compute_ms,
        communication_ms=cut.length(cut.communicates) / 1e3,
        parts_ms=parts_ms,
        classified=max(0.0, 1 - 1e3 * sum(unknown.values()) / float(one.us.sum())),
        kernels_ms=dict(sorted(kernels_ms.items(), key=lambda item: -sum(item[1].values()))),
        layers_ms={layer: passes for layer, passes in _passes_ms(one, one.layer).items() if layer >= 0},
        communication=tuple(_communication(one, waited.get(number))),
        products=tuple(_products(one, gpu)),
        gaps=gaps,
        steps=one.steps,
        step_count=one.step_count,
        ranks=tuple(
            replace(met[rank].time, waiting_ms=sum(waited[rank].values()) / 1e3 if waited else None)
            for rank in (sorted(met) if len(met) > 1 else ())
        ),
        unknown=tuple(unknown.most_common()),
        edge_ms=_edges_us(one) / 1e3,
        idle_in_layers_ms=idle_in_layers_us / 1e3,
        notes=tuple(dict.fromkeys(notes)),
        timeline=_timeline(
            one, one.events, part=one.part, phase=one.phase, layer=one.layer, stream=one.events["stream"]
        ),
        host_timeline=_timeline(one, one.trace.calls, waits=one.blocks),
        labels={"part": PARTS, "phase": PHASES, "name": one.trace.names},
    )


def _passes_ms(one: Rank, of: Rows) -> dict[int, dict[str, float]]:
    """Durations of events by what they are of, and by pass."""
    return {
        key: {
            phase: float(one.us[(of == key) & (one.phase == place)].sum()) / 1e3 for place, phase in enumerate(PHASES)
        }
        for key in np.unique(of).tolist()
    }


def _timeline(one: Rank, events: Rows, **columns: Rows) -> Rows:
    """Times in ms after the first event, and whole numbers, by start."""
    rows = np.empty(len(events), [("start", "f8"), ("end", "f8"), *((name, "i4") for name in ("name", *columns))])
    for side in ("start", "end"):
        rows[side] = (events[side] - one.cut.times[0]) / 1e3
    for name, column in (("name", events["name"]), *columns.items()):
        rows[name] = column
    return rows[np.argsort(rows["start"], kind="stable")]


def _gaps(one: Rank) -> tuple[tuple[Gaps, ...], float]:
    """Idle time by cause and by what the host did, and how much of it, µs, ends with a kernel of a layer."""
    begin, until = (times[~one.cut.busy] for times in (one.cut.times[:-1], one.cut.times[1:]))
    ended_by = np.searchsorted(np.ascontiguousarray(one.start), until)
    gaps_us: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for cause, where, us in _causes(one, begin, until, ended_by):
        if us > 0:
            gaps_us[cause, where].append(us)
    gaps = [Gaps(*key, len(us), sum(us) / 1e3) for key, us in gaps_us.items()]
    in_layers_us = float((until - begin)[one.layer[ended_by] >= 0].sum())
    return tuple(sorted(gaps, key=lambda gap: -gap.idle_ms)), in_layers_us


def _causes(one: Rank, begin: Floats, until: Floats, ended_by: Places) -> Iterator[tuple[str, str, float]]:
    """What gaps are made of, each of the event that ends it: cause, what the host did, µs."""
    calls, host, call = one.trace.calls, one.host, one.call[ended_by]
    cause, where = ("host behind", "Python, between operators") if one.on_cpu else ("unknown", "no launch is recorded")
    for us in (until - begin)[call < 0].tolist():
        yield cause, where, us
    begin, until, ended_by, call = begin[call >= 0], until[call >= 0], ended_by[call >= 0], call[call >= 0]
    # A launch that takes long, such as the first of a kernel, which loads it, is the host's time too.
    launched, thread = np.clip(calls["end"][call], begin, until), calls["thread"][call]
    waits = calls[one.blocks]
    wait = latest(waits["thread"], waits["end"], thread, launched)
    wait_began, wait_ended = (np.append(waits[side], -np.inf)[wait] for side in ("start", "end"))
    # A wait from before the gap still explains it if no kernel had to queue since: the host never got ahead again.
    known = one.call[one.call >= 0]
    queued = one.start[one.call >= 0] - calls["end"][known] > QUEUED_US
    queued_at = np.sort(np.append(calls["start"][known][queued], -np.inf))
    was_ahead = queued_at[np.maximum(np.searchsorted(queued_at, launched) - 1, 0)] >= wait_ended
    waited = (wait >= 0) & (launched > begin) & ((wait_ended >= begin) | ~was_ahead)
    since = np.where(waited, np.minimum(launched, np.maximum(begin, wait_ended) + RESTART_US), begin)
    around_wait, around_launch = host.innermost(thread, wait_began), host.innermost(thread, (since + launched) / 2)
    for place, event in enumerate(ended_by.tolist()):
        kernels = "gaps of a graph" if one.graph[event] else "between kernels"
        yield kernels, "launched, and waiting for kernels or memory", float(until[place] - launched[place])
        if waited[place]:
            name, caller = one.trace.names[waits["name"][wait[place]]], host.caller(int(around_wait[place]))
            yield "waiting for a synchronisation", f"{name} in {caller}", float(since[place] - begin[place])
        around = host.around(int(around_launch[place]))
        yield "host behind", host.name(around[-1]) if around else "Python", float(launched[place] - since[place])


def _communication(one: Rank, waited_us: Mapping[Hashable, float] | None) -> Iterator[Communication]:
    """Time by group; ``waited_us`` is what this rank waited in each collective, if several ranks were traced."""
    keys, cut = one.collectives(), one.cut
    for group in COMMUNICATION:
        if places := one.places_of(group):
            runs = cut.runs[PARTS.index(group)]
            us, exposed_us = cut.length(runs), cut.length(runs & ~cut.computes)
            if waited_us:
                waiting_us: float | None = sum(waited_us.get(keys[place], 0.0) for place in places)
            else:
                waiting_us = _waiting_us(one, places)
            waiting_ms = None if waiting_us is None else min(waiting_us, us) / 1e3  # waits may overlap
            yield Communication(group, us / 1e3, exposed_us / 1e3, waiting_ms, bool(waited_us))


def _waiting_us(one: Rank, places: Sequence[int]) -> float | None:
    """What collectives took beyond the fastest of their kind; all of it where next to nothing is moved.

    None where every kind ran once only: then nothing tells waiting from moving.
    """
    kinds: defaultdict[tuple[str, Any, bool], list[float]] = defaultdict(list)
    for place in places:
        collective = one.collective[place]
        kinds[one.name(place), collective and collective[:3], is_small(collective)].append(float(one.us[place]))
    if not any(small or len(times) > 1 for (*_, small), times in kinds.items()):
        return None
    return sum(sum(times) - (0.0 if small else len(times) * min(times)) for (*_, small), times in kinds.items())


def _edges_us(one: Rank) -> float:
    """Barriers before anything else is exchanged, and after everything."""
    meets = sorted(one.places_of(*COMMUNICATION))
    edges: set[int] = set()
    for order in (meets, meets[::-1]):  # from either end, up to the first collective that training needs
        edges.update(takewhile(lambda place: "barrier" in (one.collective[place] or ("",))[0], order))
    places = sorted(edges)
    cut = Cut.of(one.start[places], one.end[places], one.part[places])
    return cut.length(cut.busy)


def _products(one: Rank, gpu: Gpu | None) -> Iterator[Product]:
    grouped: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    shapes = np.append(one.trace.ops["shape"], -1)[one.op]
    for place in one.places_of("expert GEMMs", "other GEMMs"):
        grouped[one.launcher[place] or one.name(place), int(shapes[place])].append(place)
    for (op, shape), places in sorted(grouped.items(), key=lambda item: -one.us[item[1]].sum()):
        us, dims = float(one.us[places].sum()), one.trace.shapes[shape] if shape >= 0 else None
        # An operator that launches several kernels multiplies once; a kernel without operator counts for itself.
        count = len({row if row >= 0 else -2 - place for place, row in zip(places, one.op[places], strict=True)})
        flops = _flops(op, dims) if dims else None
        tflops = flops * count / us / 1e6 if flops and us else None  # operations a µs are 1e-6 TFLOP/s
        peak = (gpu.fp8_tflops if "scaled" in op else gpu.bf16_tflops) if gpu else None
        operands = " × ".join(str(dim) for dim in dims[:3] if dim) if dims else None
        yield Product(op, operands, count, us / 1e3, tflops, tflops / float(peak) if tflops and peak else None)


def _flops(op: str, dims: Sequence[Any]) -> float | None:
    """Operations of a product by the dimensions of its operands; of a grouped one, of all its rows."""
    # addmm and baddbmm have the sum's other operand first
    matrices = [dim for dim in dims if isinstance(dim, list) and len(dim) >= 2][-2 if "add" in op else 0 :][:2]
    if len(matrices) < 2:
        return None
    left, right = matrices
    if len(left) == 2 and len(right) == 3:  # rows of all groups by a weight each
        return 2.0 * float(left[0] * left[1] * right[2])
    return 2.0 * float(np.prod(left)) * float(right[-1])


def explanation_text(explained: Explanation) -> str:
    """An explanation for a terminal."""
    where = f"rank {explained.rank}" if explained.rank is not None else "this rank"
    compute, exposed, idle = (
        one / explained.span_ms for one in (explained.compute_ms, explained.exposed_communication_ms, explained.idle_ms)
    )
    lines = [
        f"{explained.span_ms:.1f} ms from the first to the last event of {where} ({explained.gpu or 'CPU'}): "
        f"{compute:.1%} compute, {exposed:.1%} exposed communication, {idle:.1%} idle; "
        f"{explained.classified:.1%} of kernel time is classified"
    ]
    if explained.tracing_ms >= 1:
        lines.append(
            f"{explained.tracing_ms:.1f} ms of that are barriers that ranks meet at only because they are traced; "
            f"without them the step takes {explained.step_ms:.1f} ms"
        )
    loss, loss_ms = explained.longest_loss
    lines += [f"look first at {loss}: {loss_ms:.1f} ms"] if loss_ms else []
    lines += [f"note: {note}" for note in explained.notes]
    for heading, rows in _tables(explained):
        cells = [
            ["unknown" if one is None else one if isinstance(one, str) else f"{one:.1f} ms" for one in row]
            for row in rows
        ]
        lines += ["", *(line.rstrip() for line in aligned([heading, *cells]))] if cells else []
    return "\n".join([*lines, *([f"\n{explained.late_rank}"] if explained.late_rank else [])])


def _tables(explained: Explanation) -> Iterator[tuple[tuple[str, ...], list[tuple[str | float | None, ...]]]]:
    """Headings, and rows of words and of ms."""
    parts = sorted(explained.parts_ms.items(), key=lambda item: -item[1])
    yield ("part", "", "of the span"), [(part, ms, f"{ms / explained.span_ms:.1%}") for part, ms in parts]
    how = {False: "estimated from the fastest of its kind", True: "measured on all ranks"}
    yield (
        ("communication", "total", "exposed", "waiting for other ranks", ""),
        [
            (one.group, one.ms, one.exposed_ms, one.waiting_ms, "" if one.waiting_ms is None else how[one.from_ranks])
            for one in explained.communication
        ],
    )
    yield (
        ("cause of idle time", "what the host did", "gaps", "idle"),
        [(gap.cause, gap.where[:72], str(gap.count), gap.idle_ms) for gap in explained.gaps[:SHOWN]],
    )
    for heading, table in (
        ("kernels, durations added up", explained.kernels_ms),
        ("layer", explained.layers_ms),
    ):
        phases = [phase for phase in PHASES if any(row[phase] for row in table.values())]
        yield (heading, *phases), [(str(key), *(row[phase] for phase in phases)) for key, row in table.items()]
    yield (
        ("products", "operands", "calls", "", "", "of peak"),
        [
            (
                *(one.op[:48], one.shape or "shapes not recorded", str(one.count), one.ms),
                "" if one.tflops is None else f"{one.tflops:,.4g} TFLOP/s",
                "" if one.share_of_peak is None else f"{one.share_of_peak:.0%}",
            )
            for one in explained.products[:SHOWN]
        ],
    )
    yield (
        ("rank", "span", "compute", "idle", "waiting for others"),
        [(str(rank), *times) for rank, *times in map(astuple, explained.ranks)],
    )
    yield ("unclassified kernels", ""), [(name[:96], f"{ms:.2f} ms") for name, ms in explained.unknown[:SHOWN]]
