"""Which nodes to measure with which, and what the measured pairs say about nodes, switches and cables.

All nodes are busy in every round: the circle method of round-robin tournaments meets every pair of n nodes once in
n - 1 rounds (n rounds if n is odd, with one node idle in each).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

SLOW_SHARE_OF_BEST = 0.75
"""Without a floor, a pair is slow below this share of the best pair. A choice: repeats differ by a few per cent."""
MOSTLY = 0.75
"""Share of a node's pairs that are slow, from which on the node is at fault and not its partners."""
Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What explains the slow pairs.

    Attributes:
        nodes: slow with nearly all others.
        groups: nodes that are fast among themselves and slow with the other groups; empty if there is one group.
        pairs: slow pairs that neither explains.
        all_slow: whether no pair is fast; then nothing can be said about single nodes.
    """

    nodes: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    pairs: tuple[Pair, ...] = ()
    all_slow: bool = False


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of the numbers below ``count``, by round; nobody is in two pairs of a round, and all pairs come once.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    ring = [*range(count), *([-1] if count % 2 else [])]
    made = []
    for _ in range(len(ring) - 1):
        met = [sorted((ring[index], ring[-1 - index])) for index in range(len(ring) // 2)]
        made.append(sorted((first, second) for first, second in met if first >= 0))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return made


def threshold_gb_s(gb_s: Mapping[Pair, float], floor_gb_s: float | None) -> float:
    """Bandwidth below which a pair is slow: the floor, or a share of the best pair."""
    return SLOW_SHARE_OF_BEST * max(gb_s.values()) if floor_gb_s is None else floor_gb_s


def blame(gb_s: Mapping[Pair, float], floor_gb_s: float | None = None) -> Blame:
    """Explain the slow pairs.

    Args:
        gb_s: bandwidth of every pair of nodes, each pair once.
        floor_gb_s: below which a pair is slow; by default a share of the best one.

    Example:
        >>> blame({("a", "b"): 40.0, ("a", "c"): 12.0, ("b", "c"): 11.0}).nodes
        ('c',)
    """
    if not gb_s:
        return Blame()
    limit = threshold_gb_s(gb_s, floor_gb_s)
    slow = {frozenset(pair) for pair, value in gb_s.items() if value < limit}
    if len(slow) == len(gb_s):
        return Blame(all_slow=True)
    names = sorted({name for pair in gb_s for name in pair})
    parts = _connected(names, [pair for pair in gb_s if frozenset(pair) not in slow])
    alone = [name for part in parts if len(part) == 1 for name in part]
    groups = [part for part in parts if len(part) > 1]
    within = [_mostly_slow(group, slow) for group in groups]
    guilty = {name for found in within for name in found}
    rest = [pair for group in groups for pair in combinations(group, 2) if frozenset(pair) in slow]
    return Blame(
        nodes=tuple(sorted({*alone, *guilty})),
        groups=tuple(map(tuple, groups)) if len(groups) > 1 else (),
        pairs=tuple(pair for pair in rest if not guilty & set(pair)),
    )


def _connected(names: Iterable[str], fast: Iterable[Pair]) -> list[list[str]]:
    """Nodes that reach each other over fast pairs."""
    part_of = {name: {name} for name in names}
    for first, second in fast:
        if part_of[first] is not part_of[second]:
            part_of[first] |= part_of[second]
            for name in part_of[second]:
                part_of[name] = part_of[first]
    parts = {id(part): part for part in part_of.values()}
    return sorted(sorted(part) for part in parts.values())


def _mostly_slow(group: list[str], slow: set[frozenset[str]]) -> set[str]:
    """Nodes that are slow with most of the others, the worst taken out first."""
    left, found = list(group), set[str]()
    while len(left) > 2:
        count = {name: sum(frozenset((name, other)) in slow for other in left) for name in left}
        worst = max(left, key=lambda name: count[name])
        if count[worst] < MOSTLY * (len(left) - 1):
            break
        left.remove(worst)
        found.add(worst)
    return found
