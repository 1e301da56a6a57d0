"""Which GPU, node, pair of nodes or switch is slow, judged from what :mod:`moelab.health.measure` wrote.

One slow pair does not tell which of its nodes is at fault. All pairs do: a node whose pairs are nearly all slow is slow
itself; nodes that are fast among themselves and slow with others are behind a slow switch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components

from moelab.finding import Finding, fault
from moelab.health.node import UNREAD
from moelab.runs.stragglers import outliers

SLOW_SHARE_OF_BEST = 0.75
"""Without a floor, a pair is slow below this share of the best pair. A choice: repeats differ by a few per cent."""
MOSTLY = 0.75
"""If at least this share of a node's pairs is slow, the node is at fault and not its partners."""
Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What explains the slow pairs."""

    nodes: tuple[str, ...] = ()  # slow with nearly all others
    # nodes that are fast among themselves and slow with other groups; empty if there is only one group
    groups: tuple[tuple[str, ...], ...] = ()
    pairs: tuple[Pair, ...] = ()  # slow pairs that neither explains
    all_slow: bool = False  # no pair is fast, so nothing can be said about single nodes


def threshold_gb_s(gb_s: Mapping[Pair, float], floor_gb_s: float | None) -> float:
    """Bandwidth below which a pair is slow: the floor, or a share of the best pair."""
    return SLOW_SHARE_OF_BEST * max(gb_s.values()) if floor_gb_s is None else floor_gb_s


def blame(gb_s: Mapping[Pair, float], floor_gb_s: float | None = None) -> Blame:
    """Explain the slow pairs, as :func:`threshold_gb_s` tells them, by the bandwidth of every pair of nodes, each once.

    >>> blame({("a", "b"): 40.0, ("a", "c"): 12.0, ("b", "c"): 11.0}).nodes
    ('c',)
    """
    if not gb_s:
        return Blame()
    names = sorted({name for pair in gb_s for name in pair})
    bandwidth_NN = np.full((len(names), len(names)), np.nan)  # NaN, of a node with itself, is neither fast nor slow
    for (first, second), value in gb_s.items():
        i, j = names.index(first), names.index(second)
        bandwidth_NN[i, j] = bandwidth_NN[j, i] = value
    limit = threshold_gb_s(gb_s, floor_gb_s)
    fast_NN, slow_NN = bandwidth_NN >= limit, bandwidth_NN < limit
    if not fast_NN.any():
        return Blame(all_slow=True)
    count, part_of_N = connected_components(fast_NN, directed=False)
    parts = [np.flatnonzero(part_of_N == part).tolist() for part in range(count)]
    # A node without any fast pair is a part of its own.
    guilty = {part[0] for part in parts if len(part) == 1}
    groups = [part for part in parts if len(part) > 1]
    for group in groups:
        left = list(group)  # the worst is removed before the next is judged, because it makes its partners look bad
        # Of two nodes, nothing tells which one makes their pair slow.
        while len(left) > 2:
            slow_pairs = slow_NN[np.ix_(left, left)].sum(axis=1)
            worst = int(slow_pairs.argmax())
            if slow_pairs[worst] < MOSTLY * (len(left) - 1):
                break
            guilty.add(left.pop(worst))
    within = [pair for group in groups for pair in combinations(group, 2)]
    return Blame(
        nodes=tuple(names[node] for node in sorted(guilty)),
        groups=tuple(tuple(names[node] for node in group) for group in groups) if len(groups) > 1 else (),
        pairs=tuple((names[i], names[j]) for i, j in within if slow_NN[i, j] and not guilty & {i, j}),
    )


def judge(measured: Mapping[str, Any], floor_gb_s: float | None = None) -> tuple[Finding, ...]:
    """Findings from what :mod:`moelab.health.measure` writes; of stages that were not reached a finding says so.

    ``floor_gb_s`` is the bus bandwidth in the cluster profile; figures of gloo are not compared with it.
    """
    floor = floor_gb_s if measured["backend"] == "nccl" else None
    findings = [_scope(measured, floor_gb_s), *_of_nodes(measured.get("node_findings", {}))]
    if times_ms := measured.get("gemm_ms"):  # without communication: a rank that is slow here is slow by itself
        spread = max(times_ms.values()) / min(times_ms.values()) - 1
        slow = [f"{name} {100 * share:.0f} % above the median" for name, share in outliers(times_ms).items()]
        findings.append(_judged("GEMM time", slow, f"{len(times_ms)} ranks within {100 * spread:.0f} %"))
    against = "" if floor is None else f"; the profile's floor is {floor:g} GB/s"
    if inside := measured.get("inside_gb_s"):
        times = {node: 1 / value for node, value in inside.items()}  # `outliers` looks for what takes longer
        below = {node for node, value in inside.items() if floor is not None and value < floor}
        slow = [f"{node} {inside[node]:.3g} GB/s" for node in sorted({*below, *outliers(times)})]
        findings.append(_judged("all-reduce in a node", slow, _range(inside.values()), against))
    at_fault = {node for node, listed in measured.get("node_findings", {}).items() if _has_error(listed)}
    if pairs := {(first, second): value for first, second, value in measured.get("pairs_gb_s", [])}:
        findings.append(_pairs(pairs, floor))
        at_fault |= {*blame(pairs, floor).nodes}
    if (gb_s := measured.get("all_gb_s")) is not None:
        found = f"{gb_s:.3g} GB/s with {measured['ranks']} ranks"
        slow = [found] if floor is not None and gb_s < floor else []
        findings.append(_judged("all-reduce of all ranks", slow, found, against))
    if at_fault:
        findings.append(Finding(name="for an operator", severity="note", found=drain_line(sorted(at_fault))))
    return tuple(findings)


def drain_line(nodes: Sequence[str]) -> str:
    """The shell line by which an operator lets nodes finish what they run and take no more."""
    reason = "reason=moelab.health.measure"
    return shlex.join(["scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", reason])


def _has_error(findings: Iterable[Mapping[str, Any]]) -> bool:
    return any(one["severity"] == "error" for one in findings)


def _judged(name: str, slow: Sequence[str], well: str, against: str = "") -> Finding:
    return fault(name, ", ".join(slow) + against) if slow else Finding(name=name, severity="ok", found=well)


def _scope(measured: Mapping[str, Any], floor_gb_s: float | None) -> Finding:
    found = f"{measured['ranks']} ranks on {len(measured['nodes'])} nodes, {measured['device']}, {measured['backend']}"
    if measured["stage"] != "finished":
        return fault("health check", f"{found}; it ended while {measured['stage']}")
    if measured["backend"] != "nccl":
        floor = "" if floor_gb_s is None else f" and is not compared with the profile's {floor_gb_s:g} GB/s"
        found += f": processes on CPUs, whose bandwidth says nothing about GPUs{floor}"
    elif floor_gb_s is None:
        found += "; the profile has no all_reduce_floor_gb_s, so nodes are only compared with each other"
    return Finding(name="health check", severity="note", found=found)


def _of_nodes(findings_of: Mapping[str, list[dict[str, Any]]]) -> Iterator[Finding]:
    """Each node's faults with its name, and one line for all nodes without faults."""
    entries = [(node, Finding(**entry)) for node, listed in findings_of.items() for entry in listed]
    faults = [(node, finding) for node, finding in entries if not finding.ok]
    if well := findings_of.keys() - {node for node, _ in faults}:
        found = f"{len(well)} of {len(findings_of)} without a fault"
        yield Finding(name="single nodes", severity="ok", found=found)
    for node, finding in faults:
        yield replace(finding, name=f"{node}: {finding.name}")
    for unread in sorted({finding.found for _, finding in entries if finding.name == UNREAD}):
        yield Finding(name=UNREAD, severity="note", found=unread)


def _pairs(gb_s: Mapping[Pair, float], floor: float | None) -> Finding:
    name, slow = "all-reduce of pairs", blame(gb_s, floor)
    if slow == Blame():
        return Finding(name=name, severity="ok", found=_range(gb_s.values()))
    everywhere = "the network, or a setting of all nodes, such as NCCL_IB_DISABLE or NCCL_IB_HCA"
    of_nodes = "a network card, its cable or the node's switch; several nodes may share one"
    explained = [
        ("every pair" if slow.all_slow else "", everywhere),
        (f"{', '.join(slow.nodes)} with all others" if slow.nodes else "", of_nodes),
        (
            " | ".join(", ".join(group) for group in slow.groups) + " with each other" if slow.groups else "",
            "the switches or links between these groups",
        ),
        (", ".join("-".join(pair) for pair in slow.pairs), "single links, or other traffic at that moment"),
    ]
    named, causes = zip(*((what, why) for what, why in explained if what), strict=True)
    limit = threshold_gb_s(gb_s, floor)
    found = f"{'; '.join(named)}: below {limit:.3g} GB/s; all pairs: {_range(gb_s.values())}"
    key = "all-reduce of pairs with slow nodes" if slow.nodes else name
    return fault(key, found, causes="; ".join(causes))


def _range(values: Iterable[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} GB/s"
