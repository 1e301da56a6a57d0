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
    limit = threshold_gb_s(gb_s, floor_gb_s)
    slow = {frozenset(pair) for pair, value in gb_s.items() if value < limit}
    if len(slow) == len(gb_s):
        return Blame(all_slow=True)
    parts = _joined([set(pair) for pair in gb_s if frozenset(pair) not in slow], {one for pair in gb_s for one in pair})
    groups = [part for part in parts if len(part) > 1]
    guilty = {node for part in parts if len(part) == 1 for node in part}
    for group in groups:
        left = list(group)  # the worst is removed before the next is judged, because it makes its partners look bad
        while len(left) > 2:  # of two nodes, nothing tells which one makes their pair slow
            slow_pairs = {node: sum({node, other} in slow for other in left) for node in left}
            worst = max(left, key=lambda node: slow_pairs[node])
            if slow_pairs[worst] < MOSTLY * (len(left) - 1):
                break
            guilty.add(worst)
            left.remove(worst)
    within = [pair for group in groups for pair in combinations(group, 2)]
    return Blame(
        nodes=tuple(sorted(guilty)),
        groups=tuple(tuple(group) for group in groups) if len(groups) > 1 else (),
        pairs=tuple(pair for pair in within if frozenset(pair) in slow and not guilty & {*pair}),
    )


def _joined(links: Iterable[set[str]], nodes: Iterable[str]) -> list[list[str]]:
    """Nodes in groups that links connect, each sorted."""
    groups = [{node} for node in nodes]
    for link in links:
        met = [group for group in groups if group & link]
        groups = [*(group for group in groups if group not in met), set[str]().union(*met)]
    return sorted(map(sorted, groups))


def judge(measured: Mapping[str, Any], floor_gb_s: float | None = None) -> tuple[Finding, ...]:
    """Findings from what :mod:`moelab.health.measure` writes; of stages that were not reached a finding says so.

    ``floor_gb_s`` is the bus bandwidth in the cluster profile; figures of gloo are not compared with it. The last
    finding is for an operator: the line that drains the nodes at fault.
    """
    floor = floor_gb_s if measured["backend"] == "nccl" else None
    against = "" if floor is None else f"; the profile's floor is {floor:g} GB/s"
    findings, at_fault = [_scope(measured, floor_gb_s)], set[str]()

    def add(name: str, slow: Sequence[str], well: str, against: str = "") -> None:
        words = ", ".join(slow) + against
        findings.append(fault(name, words) if slow else Finding(name=name, severity="ok", found=well))

    for node, finding in _of_nodes(measured.get("node_findings", {})):
        findings.append(finding)
        at_fault |= {node} if finding.severity == "error" else set()
    if times_ms := measured.get("gemm_ms"):  # without communication: a rank that is slow here is slow by itself
        spread = max(times_ms.values()) / min(times_ms.values()) - 1
        slow = [f"{name} {100 * share:.0f} % above the median" for name, share in outliers(times_ms).items()]
        add("GEMM time", slow, f"{len(times_ms)} ranks within {100 * spread:.0f} %")
    if inside := measured.get("inside_gb_s"):
        below = {node for node, value in inside.items() if floor is not None and value < floor}
        below |= {*outliers({node: 1 / value for node, value in inside.items()})}  # `outliers` looks for longer times
        add("all-reduce in a node", [f"{one} {inside[one]:.3g} GB/s" for one in sorted(below)], _range(inside), against)
    if pairs := {(first, second): value for first, second, value in measured.get("pairs_gb_s", [])}:
        blamed = blame(pairs, floor)
        findings.append(_of_pairs(pairs, blamed, threshold_gb_s(pairs, floor)))
        at_fault |= {*blamed.nodes}
    if (gb_s := measured.get("all_gb_s")) is not None:
        found = f"{gb_s:.3g} GB/s with {measured['ranks']} ranks"
        add("all-reduce of all ranks", [found] if floor is not None and gb_s < floor else [], found, against)
    if at_fault:
        nodes = f"nodename={','.join(sorted(at_fault))}"
        line = shlex.join(["scontrol", "update", nodes, "state=drain", "reason=moelab.health.measure"])
        findings.append(Finding(name="for an operator", severity="note", found=line))
    return tuple(findings)


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


def _of_nodes(findings_of: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Finding]]:
    """Each node's faults with its name, and one line for all nodes without faults."""
    entries = [(node, Finding(**entry)) for node, listed in findings_of.items() for entry in listed]
    faults = [(node, finding) for node, finding in entries if not finding.ok]
    if well := findings_of.keys() - {node for node, _ in faults}:
        found = f"{len(well)} of {len(findings_of)} without a fault"
        yield "", Finding(name="single nodes", severity="ok", found=found)
    yield from ((node, replace(finding, name=f"{node}: {finding.name}")) for node, finding in faults)
    for unread in sorted({finding.found for _, finding in entries if finding.name == UNREAD}):
        yield "", Finding(name=UNREAD, severity="note", found=unread)


def _of_pairs(gb_s: Mapping[Pair, float], slow: Blame, limit_gb_s: float) -> Finding:
    name = "all-reduce of pairs"
    if slow == Blame():
        return Finding(name=name, severity="ok", found=_range(gb_s))
    of_nodes = "a network card, its cable or the node's switch; several nodes may share one"
    explained = [
        (slow.all_slow, "every pair", "the network, or a setting of all nodes, such as NCCL_IB_DISABLE or NCCL_IB_HCA"),
        (slow.nodes, f"{', '.join(slow.nodes)} with all others", of_nodes),
        (
            slow.groups,
            f"{' | '.join(map(', '.join, slow.groups))} with each other",
            "the switches or links between these groups",
        ),
        (slow.pairs, ", ".join(map("-".join, slow.pairs)), "single links, or other traffic at that moment"),
    ]
    named, causes = zip(*((what, why) for holds, what, why in explained if holds), strict=True)
    found = f"{'; '.join(named)}: below {limit_gb_s:.3g} GB/s; all pairs: {_range(gb_s)}"
    key = "all-reduce of pairs with slow nodes" if slow.nodes else name
    return fault(key, found, causes="; ".join(causes))


def _range(gb_s: Mapping[Any, float]) -> str:
    return f"{min(gb_s.values()):.3g} to {max(gb_s.values()):.3g} GB/s"
