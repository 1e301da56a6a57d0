"""Which ranks talk to which: the groups of one rank along every axis of TorchTitan's mesh, and the nodes they reach.

TorchTitan 0.3.0 lays the same ranks out twice (``torchtitan/distributed/parallel_dims.py``, ``build_mesh``): dense
weights on pp * dp_replicate * dp_shard * cp * tp, experts on pp * dp_replicate * efsdp * ep. The last axis is the
innermost: its ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from moelab.layout import Layout

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE = ("pp", "dp_replicate", "efsdp", "ep")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that one rank talks to for one purpose, itself included.

    Attributes:
        name: as people say it, such as ``EP``.
        axes: of the mesh, folded into one.
        carries: what travels, and when.
        ranks: global ranks, in order.
        nodes: that these ranks are on, in order.
    """

    name: str
    axes: tuple[str, ...]
    carries: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


_PURPOSES = (
    ("TP", ("tp",), "activations, every layer"),
    ("CP", ("cp",), "keys and values, every layer"),
    ("EP", ("ep",), "tokens, every MoE layer"),
    ("expert FSDP", ("efsdp",), "expert weights and gradients"),
    ("FSDP", ("dp_shard", "cp"), "the other weights and gradients"),
    ("DDP", ("dp_replicate",), "gradients, once a step"),
    ("PP", ("pp",), "activations between stages"),
)


def groups_of(layout: Layout, rank: int, *, gpus_per_node: int) -> tuple[Group, ...]:
    """Groups of more than one rank that a rank belongs to, the most talkative first.

    Args:
        layout: resolved degrees.
        rank: global rank, below ``layout.world_size``.
        gpus_per_node: consecutive ranks that share a node.
    """
    groups = []
    for name, axes, carries in _PURPOSES:
        # Without expert parallelism there is no expert mesh: FSDP shards experts with everything else.
        if axes == ("efsdp",) and layout.ep == 1:
            continue
        ranks = _along(layout, rank, axes)
        if len(ranks) > 1:
            nodes = tuple(sorted({member // gpus_per_node for member in ranks}))
            groups.append(Group(name=name, axes=axes, carries=carries, ranks=ranks, nodes=nodes))
    return tuple(groups)


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's place along every axis of both meshes; ``efsdp`` and ``ep`` only with expert parallelism.

    Example:
        >>> from moelab.experiment import Experiment
        >>> from moelab.layout import check
        >>> layout = check(Experiment(gpus_per_node=8, tp=2, ep=4)).layout
        >>> coordinates(layout, 5)
        {'pp': 0, 'dp_replicate': 0, 'dp_shard': 2, 'cp': 0, 'tp': 1, 'efsdp': 1, 'ep': 1}
    """
    return _digits(layout, rank, DENSE) | (_digits(layout, rank, SPARSE) if layout.ep > 1 else {})


def _digits(layout: Layout, rank: int, axes: Sequence[str]) -> dict[str, int]:
    """A rank in the mixed radix of the axes' degrees, the last axis running fastest."""
    degrees = [int(getattr(layout, axis)) for axis in axes]
    return {axis: rank // prod(degrees[place + 1 :]) % degrees[place] for place, axis in enumerate(axes)}


def _along(layout: Layout, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Ranks that differ from a rank along these axes only."""
    mesh = DENSE if set(axes) <= set(DENSE) else SPARSE
    fixed = [axis for axis in mesh if axis not in axes]
    mine = _digits(layout, rank, mesh)
    everyone = range(layout.world_size)
    return tuple(other for other in everyone if all(_digits(layout, other, mesh)[axis] == mine[axis] for axis in fixed))
