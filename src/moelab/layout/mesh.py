"""An experiment on its ranks: facts that the rules look at, the layout that TorchTitan makes, and who talks to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from moelab.experiment import Experiment, Precision
from moelab.hardware import Gpu, Node, architecture, cluster_of, gpu_of
from moelab.layout.schedule import SCHEDULES, Schedule, split_layers, stages_of_rank
from moelab.model import ModelShape, shape_for

UNKNOWN_SM = -1.0
"""No kernel is known to run on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A candidate and what the rules look at beside its fields; cheap to make: a search makes one for each layout."""

    experiment: Experiment
    shape: ModelShape
    capability: float | None
    """CUDA capability of the GPU (10.0 for SM100), 0 without one, ``UNKNOWN_SM`` of a GPU that does not say; None
    where it is not known which GPU it will be."""
    gpu_in_words: str  # which GPU that is, or that there is none

    @property
    def outer(self) -> int:
        """Ranks of all dense axes but ``dp_shard``."""
        return self.experiment.dp_replicate * self.experiment.cp * self.experiment.tp * self.experiment.pp

    @property
    def dp_shard(self) -> int:
        """Degree of ``dp_shard``; 0 if it is left to be found and the other axes do not divide the ranks."""
        if self.experiment.dp_shard != -1:
            return self.experiment.dp_shard
        left, over = divmod(self.experiment.world_size, self.outer)
        return 0 if over else left

    @property
    def region(self) -> int:
        """Ranks that expert parallelism can use: ``dp_shard * cp * tp``."""
        return self.dp_shard * self.experiment.cp * self.experiment.tp

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule; None if there is none of that name, as TorchTitan spells it."""
        return SCHEDULES.get(self.experiment.pp_schedule)

    @property
    def stages_per_rank(self) -> int:
        """Stages of each pipeline rank: those that the experiment asks for, or the schedule's own."""
        return self.experiment.pp_stages_per_rank or (self.schedule.stages_per_rank if self.schedule else 1)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step on each rank; 1 where all of them go forward at once."""
        return self.experiment.local_batch // self.experiment.sequences_at_once

    @property
    def quantised(self) -> bool:
        """Whether the experts multiply in less than BF16."""
        return self.experiment.precision is not Precision.BF16

    def vary(self, **changes: Any) -> Facts:
        """The same with fields of the experiment changed; ``dp_shard`` follows a change of another axis."""
        # Else a given dp_shard would make every other degree illegal.
        if "dp_shard" not in changes and changes.keys() & set(DENSE):
            changes["dp_shard"] = -1
        varied = self.experiment.model_copy(update=changes)
        return Facts(experiment=varied, shape=self.shape, capability=self.capability, gpu_in_words=self.gpu_in_words)


def nvlink_ranks(experiment: Experiment, ep: int | None = None, *, node: Node | None = None) -> int:
    """Consecutive ranks of an experiment that NVLink joins.

    ``ep`` is another expert-parallel degree than the experiment's, ``node`` one of another cluster than its hardware.
    """
    node = node or cluster_of(experiment.hardware).node
    return node.nvlink_ranks(nodes=experiment.nodes, gpus_per_node=experiment.gpus_per_node, ep=ep or experiment.ep)


def facts_of(experiment: Experiment, gpu: Gpu | None = None) -> Facts:
    """Facts of an experiment.

    ``gpu`` is this machine's, of capability 0 where it has none; None means that of the experiment's hardware.

    Raises:
        BadInput: if its hardware profile does not exist.
    """
    capability = (gpu or gpu_of(experiment.hardware)).capability
    name = gpu.name if gpu else experiment.hardware
    in_words = f"{name} is {architecture(capability)}"
    if capability is None:
        # A GPU of this machine that does not say what it is runs no kernel that asks; a profile may be any.
        capability = UNKNOWN_SM if gpu else None
    elif capability == 0:
        in_words = "this machine has no GPU to use" if gpu else f"{name} has no GPU"
        # `local` on a machine without a GPU says nothing about where the run will be.
        capability = None if experiment.hardware == "local" and gpu is None else 0
    return Facts(experiment=experiment, shape=shape_for(experiment), capability=capability, gpu_in_words=in_words)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism with nothing left to resolve, and the pipeline's stages."""

    world_size: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    efsdp: int  # ranks that shard the experts of one expert-parallel rank, ``dp_shard * cp * tp / ep``
    stages: tuple[tuple[str, ...], ...]  # names of the modules of each (virtual) stage, in stage order
    stages_of_rank: tuple[tuple[int, ...], ...]  # numbers of the stages that each pipeline rank holds
    microbatches: int  # micro-batches of a step on each rank; 1 without a pipeline, unless gradients are accumulated
    microbatch_size: int  # sequences of one micro-batch

    @property
    def stages_per_rank(self) -> int:
        """Stages of each pipeline rank."""
        return len(self.stages) // self.pp

    @property
    def data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def resolve(facts: Facts) -> Layout:
    """The layout of facts that break no rule which shapes it."""
    x = facts.experiment
    # Without a pipeline the schedule means nothing, and its name may be anything.
    schedule, turns = (SCHEDULES[x.pp_schedule], facts.stages_per_rank) if x.pp > 1 else (SCHEDULES["1F1B"], 1)
    return Layout(
        world_size=x.world_size,
        pp=x.pp,
        dp_replicate=x.dp_replicate,
        dp_shard=facts.dp_shard,
        cp=x.cp,
        tp=x.tp,
        ep=x.ep,
        efsdp=facts.region // x.ep,
        stages=split_layers(facts.shape.n_layers, x.pp * turns),
        stages_of_rank=stages_of_rank(schedule, x.pp, turns),
        microbatches=facts.microbatches,
        microbatch_size=x.sequences_at_once,
    )


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors in rising order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE = ("pp", "dp_replicate", "efsdp", "ep")
"""TorchTitan 0.3.0 lays the same ranks out twice (``torchtitan/distributed/parallel_dims.py``, ``build_mesh``): for the
dense weights and for experts. The last axis is the innermost: its ranks are neighbours."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that one rank talks to for one purpose, itself included."""

    name: str  # as people say it, such as ``EP``
    axes: tuple[str, ...]  # of the mesh, folded into one
    carries: str  # what travels, and when
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]  # that these ranks are on, in order

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


_PURPOSES = (
    ("TP", ("tp",), "activations, every layer"),
    ("CP", ("cp",), "keys and values, every layer"),
    ("EP", ("ep",), "tokens, every MoE layer"),
    ("expert FSDP", ("efsdp",), "expert weights and gradients"),
    ("FSDP", ("dp_shard", "cp"), "other weights and gradients"),
    ("DDP", ("dp_replicate",), "gradients, once a step"),
    ("PP", ("pp",), "activations between stages"),
)


def groups_of(layout: Layout, rank: int, *, gpus_per_node: int) -> tuple[Group, ...]:
    """Groups of more than one rank that a rank belongs to, the most talkative first."""
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
