"""What the measurements of :mod:`moelab.launch.health` say: which node, GPU, pair or switch is slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moelab.finding import Finding
from moelab.launch.node_state import UNREAD
from moelab.launch.pairs import Blame, Pair, blame, threshold_gb_s
from moelab.launch.stragglers import outliers

SLOW_NODE = "every collective of a job that has it goes at its pace"
ASK = "measure again without other jobs on it; if it stays slow, drain it"


def judge(measured: Mapping[str, Any], floor_gb_s: float | None = None) -> tuple[Finding, ...]:
    """Findings from the file that a health check writes.

    Args:
        measured: its content; what was not reached is not judged, and said.
        floor_gb_s: bus bandwidth of the cluster's profile. Figures of gloo are not held against it.
    """
    nccl = measured["backend"] == "nccl"
    floor = floor_gb_s if nccl else None
    return (
        _scope(measured, floor_gb_s),
        *_of_nodes(measured.get("node_findings", {})),
        *_gemms(measured.get("gemm_ms", {})),
        *_inside(measured.get("inside_gb_s", {}), floor),
        *_pairs(measured.get("pairs_gb_s", []), floor),
        *_all(measured.get("all_gb_s"), measured["ranks"], floor),
    )


def _scope(measured: Mapping[str, Any], floor_gb_s: float | None) -> Finding:
    found = f"{measured['ranks']} ranks on {len(measured['nodes'])} nodes, {measured['device']}, {measured['backend']}"
    if measured["stage"] != "finished":
        return Finding(
            name="health check",
            severity="error",
            found=f"{found}; it ended while {measured['stage']}",
            cause="a rank failed or did not answer: its own output says more",
            consequence="what came later is not measured",
            remedy="run it on fewer nodes to find the one at fault",
        )
    if measured["backend"] != "nccl":
        held = "is not held against them" if floor_gb_s is None else f"is not held against {floor_gb_s:g} GB/s"
        found += f": processes on CPUs, whose bandwidth says nothing about GPUs and {held}"
    elif floor_gb_s is None:
        found += "; the profile has no all_reduce_floor_gb_s, so nodes are compared with each other alone"
    return Finding(name="health check", severity="note", found=found)


def _of_nodes(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[Finding]:
    """What a node says of itself, with its name; all that is well in one line."""
    well = [node for node, entries in found.items() if all(Finding(**entry).ok for entry in entries)]
    if well:
        yield Finding(name="nodes by themselves", severity="ok", found=f"{len(well)} of {len(found)} without a fault")
    for node, entries in found.items():
        for entry in entries:
            if not Finding(**entry).ok:
                yield Finding(**{**entry, "name": f"{node}: {entry['name']}"})
    texts = {entry["found"] for entries in found.values() for entry in entries if entry["name"] == UNREAD}
    for text in sorted(texts):
        yield Finding(name=UNREAD, severity="note", found=text)


def _gemms(times_ms: Mapping[str, float]) -> Iterator[Finding]:
    """The same GEMMs on every rank: what is slow here is slow by itself."""
    if not times_ms:
        return
    if slow := outliers(times_ms):
        yield Finding(
            name="GEMM time",
            severity="error",
            found=", ".join(f"{name} {100 * share:.0f} % above the median" for name, share in slow.items()),
            cause="a GPU that is throttled or shared, or a CPU that is",
            consequence="all other ranks wait for it in every layer",
            remedy="see its clocks and what else runs there; drain the node if it stays so",
        )
    else:
        spread = max(times_ms.values()) / min(times_ms.values()) - 1
        yield Finding(name="GEMM time", severity="ok", found=f"{len(times_ms)} ranks within {100 * spread:.0f} %")


def _inside(gb_s: Mapping[str, float], floor: float | None) -> Iterator[Finding]:
    if not gb_s:
        return
    times = outliers({node: 1 / value for node, value in gb_s.items()})
    below = [node for node, value in gb_s.items() if floor is not None and value < floor]
    slow = sorted({*times, *below})
    if not slow:
        yield Finding(name="all-reduce in a node", severity="ok", found=_range(gb_s.values()))
        return
    yield Finding(
        name="all-reduce in a node",
        severity="error",
        found=", ".join(f"{node} {gb_s[node]:.3g} GB/s" for node in slow) + _against(floor),
        cause="NVLink or its switch is degraded, or another job uses the node",
        consequence=SLOW_NODE,
        remedy=ASK,
    )


def _pairs(rows: list[tuple[str, str, float]], floor: float | None) -> Iterator[Finding]:
    if not rows:
        return
    gb_s: dict[Pair, float] = {(first, second): value for first, second, value in rows}
    found, limit = blame(gb_s, floor), threshold_gb_s(gb_s, floor)
    if found == Blame():
        yield Finding(name="all-reduce of pairs", severity="ok", found=_range(gb_s.values()))
        return
    text, cause = _blamed(found)
    yield Finding(
        name="all-reduce of pairs",
        severity="error",
        found=f"{text}: below {limit:.3g} GB/s; all pairs: {_range(gb_s.values())}",
        cause=cause,
        consequence=SLOW_NODE if found.nodes else "a collective over these nodes goes at the pace of its slowest link",
        remedy=ASK
        if found.nodes
        else "have the switch and cables between them looked at, or place the job on one side",
    )


def _blamed(found: Blame) -> tuple[str, str]:
    if found.all_slow:
        return "every pair", "the network, or a setting of all nodes, such as NCCL_IB_DISABLE or NCCL_IB_HCA"
    parts = [f"{', '.join(found.nodes)} with all others"] if found.nodes else []
    parts += [" | ".join(", ".join(group) for group in found.groups) + " with each other"] if found.groups else []
    parts += [", ".join("-".join(pair) for pair in found.pairs)] if found.pairs else []
    causes = ["a network card, its cable or the node's switch; several nodes may share one"] if found.nodes else []
    causes += ["the switches or links between these groups"] if found.groups else []
    causes += ["single links, or other traffic at that moment"] if found.pairs else []
    return "; ".join(parts), "; ".join(causes)


def _all(gb_s: float | None, ranks: int, floor: float | None) -> Iterator[Finding]:
    if gb_s is None:
        return
    if floor is None or gb_s >= floor:
        yield Finding(name="all-reduce of all ranks", severity="ok", found=f"{gb_s:.3g} GB/s with {ranks} ranks")
        return
    yield Finding(
        name="all-reduce of all ranks",
        severity="error",
        found=f"{gb_s:.3g} GB/s with {ranks} ranks{_against(floor)}",
        cause="a slow node or link, which the pairs show, or a network that is shared with other jobs",
        consequence="every all-reduce, and FSDP's gathers with it, goes at this pace",
        remedy="if no node and no pair is at fault, look at the switches above them and at NCCL's settings",
    )


def _range(values: Any) -> str:
    return f"{min(values):.3g} to {max(values):.3g} GB/s"


def _against(floor: float | None) -> str:
    return "" if floor is None else f"; the profile's floor is {floor:g} GB/s"
