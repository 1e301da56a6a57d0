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

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moelab.errors import BadInput
from moelab.hardware import Gpu, known_gpu
from moelab.planning.project import aligned
from moelab.traces.categories import COMMUNICATION, COMPUTE, FEW_ELEMENTS, PHASES, STRAGGLERS, UNCLASSIFIED
from moelab.traces.rank import Places, Rank, length_us
from moelab.traces.trace import Rows, read_trace, trace_files

RESTART_US = 1000.0
"""What a host needs at most to launch again after it waited; beyond that it did something else."""
PARTS = {part: place for place, part in enumerate((*COMPUTE, *COMMUNICATION))}
"""In the order in which an instant belongs to them."""
SHOWN = 8
"""Rows of a table for a person."""
_NONE = np.zeros(0, np.intp)


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
    rows, labels = explained.timeline, explained.labels
    first, last = 0.0, explained.span_ms
    if layer is not None:
        chosen = rows["layer"] == layer
        if phase is not None:
            chosen &= rows["phase"] == labels["phase"].index(phase)
        # Its products alone: FSDP's collectives and casts run ahead, in the time of other layers.
        products = [labels["part"].index(part) for part in ("other GEMMs", "attention", "expert GEMMs")]
        chosen &= np.isin(rows["part"], products)
        if not chosen.any():
            there = ", ".join(map(str, explained.layers_ms)) or "none, as no annotation of FSDP names them"
            raise BadInput(f"layer {layer}{f', {phase},' if phase else ''} is not in this trace; layers: {there}")
        first, last = float(rows["start"][chosen].min()), float(rows["end"][chosen].max())
    events, host = (
        of[(of["end"] >= first) & (of["start"] <= last)] for of in (explained.timeline, explained.host_timeline)
    )
    begins, ends = np.maximum(events["start"], first), np.minimum(events["end"], last)
    is_compute = np.isin(events["part"], [n for n, part in enumerate(labels["part"]) if part not in COMMUNICATION])
    compute_ms, busy_ms = length_us(begins[is_compute], ends[is_compute]), length_us(begins, ends)  # of ms, so ms
    return Stretch(first, last, compute_ms, busy_ms, events, host)


class _Met(NamedTuple):
    """What is kept of each rank."""

    path: Path
    time: RankTime
    collectives_us: Mapping[Hashable, float]  # how long each took
    notes: Sequence[str]


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
            trace = read_trace(path)
            one = Rank(trace, step)
        except BadInput as error:  # one bad file of many becomes a note
            if len(files) == 1:
                raise
            notes.append(str(error))
            continue
        number = trace.rank if trace.rank is not None else place  # files of unknown ranks are told apart by their order
        if number in met:
            places = [f"{one.parent.name}/{one.name}" for one in (path, met[number].path)]
            notes.append(f"{places[0]} and {places[1]} are both of rank {number}: the first of them is shown")
        span_us = one.last_us - one.first_us
        time = RankTime(number, span_us / 1e3, one.compute_us / 1e3, (span_us - one.busy_us) / 1e3, None)
        met[number] = _Met(path, time, one.met, one.notes)
        if number == (min(met) if rank is None else rank):  # of all others the events are let go
            shown = number, one
    if not met:
        raise BadInput("; ".join(notes))
    if shown is None:
        there = f"rank is {rank}; the traces are of ranks {', '.join(map(str, sorted(met)))}"
        raise BadInput("; ".join([there, *notes]))  # its own file may be one that could not be read
    return _explanation(*shown, met, notes)


def _skew(met: Mapping[int, _Met]) -> tuple[tuple[RankTime, ...], dict[int, dict[Hashable, float]]]:
    """Ranks beside each other, and what each waited in each collective, µs."""
    if len(met) < 2:
        return (), {}
    shared = set.intersection(*(set(one.collectives_us) for one in met.values()))
    # the rank that came last found all others there, so its collective took no more than the exchange itself
    least = {key: min(one.collectives_us[key] for one in met.values()) for key in shared}
    waited = {rank: {key: one.collectives_us[key] - least[key] for key in shared} for rank, one in met.items()}
    return tuple(
        replace(one.time, waiting_ms=sum(waited[rank].values()) / 1e3 if shared else None)
        for rank, one in sorted(met.items())
    ), waited if shared else {}


def _explanation(number: int, one: Rank, met: Mapping[int, _Met], notes: list[str]) -> Explanation:
    start, end, trace = one.events["start"], one.events["end"], one.trace
    ranks, waited = _skew(met)
    gpu = known_gpu(trace.gpu) if trace.gpu else None
    if trace.gpu and gpu is None:
        notes.append(f"the peaks of {trace.gpu} are not known, so no share of peak is shown")
    notes += [note for other in met.values() for note in other.notes]
    parts = np.asarray([PARTS[part] for part in one.category], np.int8)
    by_category = {part: np.flatnonzero(parts == PARTS[part]) for part in dict.fromkeys(one.category)}
    parts_ms, taken_us = {}, 0.0
    together = np.zeros(len(parts), bool)
    for part in PARTS:  # what a part adds to the union of those before it is the time in which none of them ran
        if part in by_category:
            together[by_category[part]] = True
            now_us = length_us(start[together], end[together])
            parts_ms[part], taken_us = (now_us - taken_us) / 1e3, now_us
    gaps, idle_in_layers_us = _gaps(one)
    for gap in gaps:
        parts_ms[f"idle: {gap.cause}"] = parts_ms.get(f"idle: {gap.cause}", 0.0) + gap.idle_ms
    unknown: defaultdict[str, float] = defaultdict(float)
    kernels_ms: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    layers_ms: defaultdict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for place, (part, context, ms) in enumerate(
        zip(one.category, one.contexts, ((end - start) / 1e3).tolist(), strict=True)
    ):
        kernels_ms[part][context.phase] += ms
        if context.layer >= 0:
            layers_ms[context.layer][context.phase] += ms
        if part in UNCLASSIFIED:
            unknown[one.name(place)] += ms
    kernel_us = float((end - start).sum())
    return Explanation(
        files=tuple(met[rank].path.name for rank in sorted(met)),
        rank=trace.rank if len(met) == 1 else number,
        gpu=trace.gpu,
        span_ms=(one.last_us - one.first_us) / 1e3,
        busy_ms=one.busy_us / 1e3,
        compute_ms=one.compute_us / 1e3,
        communication_ms=one.communication_us / 1e3,
        parts_ms=parts_ms,
        classified=max(0.0, 1 - sum(unknown.values()) * 1e3 / kernel_us) if kernel_us else 0.0,
        kernels_ms=dict(sorted(kernels_ms.items(), key=lambda item: -sum(item[1].values()))),
        layers_ms=dict(sorted(layers_ms.items())),
        communication=tuple(
            _communication(one, group, by_category[group], waited.get(number))
            for group in COMMUNICATION
            if group in by_category
        ),
        products=tuple(_products(one, by_category, gpu)),
        gaps=gaps,
        steps=one.steps,
        step_count=one.step_count,
        ranks=ranks,
        unknown=tuple(sorted(unknown.items(), key=lambda item: -item[1])),
        edge_ms=_edges_us(one) / 1e3,
        idle_in_layers_ms=idle_in_layers_us / 1e3,
        notes=tuple(dict.fromkeys(notes)),
        timeline=_timeline(one, parts),
        host_timeline=_host_timeline(one),
        labels={"part": tuple(PARTS), "phase": PHASES, "name": trace.names},
    )


def _timeline(one: Rank, parts: Rows) -> Rows:
    columns = {"start": "f8", "end": "f8", "part": "i4", "phase": "i4", "name": "i4", "layer": "i4", "stream": "i4"}
    rows = np.empty(len(one.events), list(columns.items()))
    rows["start"], rows["end"] = ((one.events[name] - one.first_us) / 1e3 for name in ("start", "end"))
    rows["part"], rows["name"], rows["stream"] = parts, one.events["name"], one.events["stream"]
    rows["phase"] = [PHASES.index(context.phase) for context in one.contexts]
    rows["layer"] = [context.layer for context in one.contexts]
    return rows


def _host_timeline(one: Rank) -> Rows:
    calls = one.trace.calls
    rows = np.empty(len(calls), [("start", "f8"), ("end", "f8"), ("name", "i4"), ("waits", "i4")])
    rows["start"], rows["end"] = ((calls[name] - one.first_us) / 1e3 for name in ("start", "end"))
    rows["name"], rows["waits"] = calls["name"], np.isin(np.arange(len(calls)), one.waits)
    return rows[np.argsort(rows["start"], kind="stable")]


def _gaps(one: Rank) -> tuple[tuple[Gaps, ...], float]:
    """Idle time by cause and by what the host did, and how much of it, µs, ends with a kernel of a layer."""
    gaps_us: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    begins, untils = one.busy[1][:-1], one.busy[0][1:]  # a gap lies between one busy stretch and the next
    ended_by = np.searchsorted(np.ascontiguousarray(one.events["start"]), untils).tolist()
    in_layers_us = 0.0
    for begin, until, place in zip(begins.tolist(), untils.tolist(), ended_by, strict=True):
        in_layers_us += (until - begin) * (one.contexts[place].layer >= 0)
        for cause, where, us in _causes(one, begin, until, place):
            if us > 0:
                gaps_us[cause, where].append(us)
    gaps = [Gaps(*key, len(us), sum(us) / 1e3) for key, us in gaps_us.items()]
    return tuple(sorted(gaps, key=lambda gap: -gap.idle_ms)), in_layers_us


def _causes(one: Rank, begin: float, until: float, place: int) -> Iterable[tuple[str, str, float]]:
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
    wait, since = one.last_wait(thread, launched), begin
    if wait >= 0 and launched > begin:
        ended = float(calls["end"][wait])
        # a wait from before the gap still explains it if no kernel had to queue since: the host never got ahead again
        if ended >= begin or not one.was_ahead(ended, launched):
            since = min(launched, max(begin, ended) + RESTART_US)
            caller = host.caller(host.at(thread, float(calls["start"][wait])))
            yield "waiting for a synchronisation", f"{one.trace.names[calls['name'][wait]]} in {caller}", since - begin
    outermost = host.around(host.at(thread, (since + launched) / 2))
    yield "host behind", host.name(outermost[-1]) if outermost else "Python", launched - since


def _communication(one: Rank, group: str, places: Places, waited: Mapping[Hashable, float] | None) -> Communication:
    start, end = one.events["start"], one.events["end"]
    with_compute = np.concatenate([np.flatnonzero(~one.moves_data), places])
    exposed_us = length_us(start[with_compute], end[with_compute]) - one.compute_us
    us = length_us(start[places], end[places])
    waiting_us = sum(waited.get(one.key_of[place], 0.0) for place in places) if waited else _waiting_us(one, places)
    waiting_ms = None if waiting_us is None else min(waiting_us, us) / 1e3  # waits may overlap
    return Communication(group, us / 1e3, exposed_us / 1e3, waiting_ms, bool(waited))


def _waiting_us(one: Rank, places: Places) -> float | None:
    """What collectives took beyond the fastest of their kind; all of it where next to nothing is moved.

    None where every kind ran once only: then nothing tells waiting from moving.
    """
    kinds: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for place in places:
        collective = one.collective[place]
        moved = (collective.name, collective.elements, collective.group) if collective else ()
        kinds[(int(one.events["name"][place]), *moved)].append(one.us(place))
    # a barrier or an all-reduce of a few numbers moves nothing to speak of: all of its time is waiting
    few = {key for key in kinds if len(key) > 1 and key[2] <= FEW_ELEMENTS}
    if not any(key in few or len(times) > 1 for key, times in kinds.items()):
        return None
    return sum(sum(times) - (0.0 if key in few else len(times) * min(times)) for key, times in kinds.items())


def _edges_us(one: Rank) -> float:
    """Barriers before anything else is exchanged, and after everything."""
    meets = np.flatnonzero(one.moves_data).tolist()
    edges: set[int] = set()
    for order in (meets, meets[::-1]):  # from either end, up to the first collective that training needs
        for place in order:
            collective = one.collective[place]
            if not collective or "barrier" not in collective.name:
                break
            edges.add(place)
    places = sorted(edges)
    return length_us(one.events["start"][places], one.events["end"][places])


def _products(one: Rank, by_category: Mapping[str, Places], gpu: Gpu | None) -> Iterable[Product]:
    grouped: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for place in (*by_category.get("expert GEMMs", _NONE), *by_category.get("other GEMMs", _NONE)):
        shape = int(one.trace.ops["shape"][one.op[place]]) if one.op[place] >= 0 else -1
        grouped[one.contexts[place].op or one.name(place), shape].append(place)
    for (op, shape), places in sorted(grouped.items(), key=lambda item: -one.us(item[1])):
        us, dims = one.us(places), one.trace.shapes[shape] if shape >= 0 else None
        # an operator that launches several kernels multiplies once; a kernel without operator counts for itself
        called = len({row if row >= 0 else -2 - place for place, row in zip(places, one.op[places], strict=True)})
        flops = _flops(op, dims) if dims else None
        tflops = flops * called / us / 1e6 if flops and us else None  # operations a µs are 1e-6 TFLOP/s
        peak = (gpu.fp8_tflops if "scaled" in op else gpu.bf16_tflops) if gpu else None
        operands = " × ".join(str(dim) for dim in dims[:3] if dim) if dims else None
        yield Product(op, operands, called, us / 1e3, tflops, tflops / float(peak) if tflops and peak else None)


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
    loss, loss_ms = explained.longest_loss
    traced = (
        f"{_ms(explained.tracing_ms)} of that are barriers that ranks meet at only because they are traced; without "
        f"them the step takes {_ms(explained.step_ms)}"
    )
    lines = [
        f"{explained.span_ms:.1f} ms from the first to the last event of {where} ({explained.gpu or 'CPU'}): "
        f"{compute:.1%} compute, {exposed:.1%} exposed communication, {idle:.1%} idle; "
        f"{explained.classified:.1%} of kernel time is classified",
        *([traced] if explained.tracing_ms >= 1 else []),
        *([f"look first at {loss}: {_ms(loss_ms)}"] if loss_ms else []),
        *(f"note: {note}" for note in explained.notes),
    ]
    for heading, rows in _tables(explained).items():
        if rows:
            lines += ["", *(line.rstrip() for line in aligned([heading, *rows]))]
    return "\n".join([*lines, *([f"\n{explained.late_rank}"] if explained.late_rank else [])])


def _tables(explained: Explanation) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Rows by heading."""
    phases, of_layers = (
        [phase for phase in PHASES if any(row[phase] for row in rows)]
        for rows in (explained.kernels_ms.values(), explained.layers_ms.values())
    )
    parts = sorted(explained.parts_ms.items(), key=lambda item: -item[1])
    known = {None: "", False: "estimated from the fastest of its kind", True: "measured on all ranks"}
    return {
        ("part", "", "of the span"): [(part, _ms(ms), f"{ms / explained.span_ms:.1%}") for part, ms in parts],
        ("communication", "total", "exposed", "waiting for other ranks", ""): [
            (
                one.group,
                _ms(one.ms),
                _ms(one.exposed_ms),
                _ms(one.waiting_ms),
                known[None if one.waiting_ms is None else one.from_ranks],
            )
            for one in explained.communication
        ],
        ("cause of idle time", "what the host did", "gaps", "idle"): [
            (gap.cause, gap.where[:72], str(gap.count), _ms(gap.idle_ms)) for gap in explained.gaps[:SHOWN]
        ],
        ("kernels, durations added up", *phases): [
            (part, *(_ms(row[phase]) for phase in phases)) for part, row in explained.kernels_ms.items()
        ],
        ("layer", *of_layers): [
            (str(layer), *(_ms(row[phase]) for phase in of_layers)) for layer, row in explained.layers_ms.items()
        ],
        ("products", "operands", "calls", "", "", "of peak"): [
            (
                *(one.op[:48], one.shape or "shapes not recorded", str(one.count), _ms(one.ms)),
                *_rate(one.tflops, one.share_of_peak, "TFLOP/s"),
            )
            for one in explained.products[:SHOWN]
        ],
        ("rank", "span", "compute", "idle", "waiting for others"): [
            (str(rank), *map(_ms, times)) for rank, *times in map(astuple, explained.ranks)
        ],
        ("unclassified kernels", ""): [(name[:96], _ms(ms, digits=2)) for name, ms in explained.unknown[:SHOWN]],
    }


def _ms(value: float | None, *, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}f} ms"


def _rate(value: float | None, share: float | None, unit: str) -> tuple[str, str]:
    return ("" if value is None else f"{value:,.4g} {unit}", "" if share is None else f"{share:.0%}")
