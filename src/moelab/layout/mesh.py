"""An experiment on its ranks: facts that the rules look at, the layout that TorchTitan makes, and who talks to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import Gpu, architecture, cluster_of, gpu_of
from moelab.layout.schedule import SCHEDULES, Schedule, schedule_in_any_case, split_layers, stages_of_rank
from moelab.model import ModelShape, shape_for

UNKNOWN_SM = -1.0
"""No kernel is known to run on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One candidate, cheap to make: a search makes one for each layout.

    The degrees are copied out of the experiment because a search varies them; everything that it does not vary is read
    from the experiment itself.

    Attributes:
        experiment: what the other fields were taken from.
        shape: dimensions of the model.
        capability: CUDA capability of the GPU (10.0 for SM100), 0 without one, ``UNKNOWN_SM`` of a GPU that does not
            say; None where it is not known which GPU it will be.
        gpu_in_words: which GPU that is, or that there is none.
        dp_shard_given: -1 for the ranks that the other axes leave.
    """

    experiment: Experiment
    shape: ModelShape
    capability: float | None
    gpu_in_words: str
    world_size: int
    pp: int
    dp_replicate: int
    dp_shard_given: int
    cp: int
    tp: int
    ep: int
    pp_schedule: str
    local_batch: int
    microbatch: int
    seq_len: int
    precision: Precision
    ep_backend: EPBackend
    ep_kernels: str
    dispatch_precision: str
    quantize: str
    wgrad: str
    attention_backend: str
    activation_checkpoint: str
    compile: str

    @property
    def outer(self) -> int:
        """Ranks of all dense axes but ``dp_shard``."""
        return self.dp_replicate * self.cp * self.tp * self.pp

    @property
    def dp_shard(self) -> int:
        """Degree of ``dp_shard``; 0 if it is left to be found and the other axes do not divide the ranks."""
        if self.dp_shard_given != -1:
            return self.dp_shard_given
        left, over = divmod(self.world_size, self.outer)
        return 0 if over else left

    @property
    def region(self) -> int:
        """Ranks that expert parallelism can use: ``dp_shard * cp * tp``."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that shard the experts of one expert-parallel rank."""
        return self.region // self.ep

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule, or None if there is none of that name in any case of letters."""
        return SCHEDULES.get(self.pp_schedule) or schedule_in_any_case(self.pp_schedule)

    @property
    def stages_per_rank(self) -> int:
        """Stages of each pipeline rank: those that the experiment asks for, or the schedule's own."""
        return self.experiment.pp_stages_per_rank or (self.schedule.stages_per_rank if self.schedule else 1)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step on each rank; 1 without pipeline parallelism."""
        return self.local_batch // self.microbatch if self.pp > 1 else 1

    @property
    def nvlink_ranks(self) -> int:
        """Consecutive ranks that NVLink joins: a node's or, in racks such as NVL72, those of several nodes."""
        return nvlink_ranks(self.experiment, self.ep)

    @property
    def quantised(self) -> bool:
        """Whether the experts multiply in less than BF16."""
        return self.precision is not Precision.BF16

    def vary(self, field: str, value: Any) -> Facts:
        """The same with one field of the experiment changed; ``dp_shard`` follows a change of another axis."""
        if field == "dp_shard":
            return replace(self, dp_shard_given=value)
        if field in ("pp", "dp_replicate", "cp", "tp"):
            return replace(self, dp_shard_given=-1, **{field: value})
        return replace(self, **{field: value})


def nvlink_ranks(experiment: Experiment, ep: int | None = None) -> int:
    """Consecutive ranks of an experiment that NVLink joins, by its hardware.

    Args:
        experiment: gives nodes, GPUs of each, and the hardware.
        ep: another expert-parallel degree than the experiment's.
    """
    return cluster_of(experiment.hardware).node.nvlink_ranks(
        nodes=experiment.nodes, gpus_per_node=experiment.gpus_per_node, ep=ep or experiment.ep
    )


def facts_of(experiment: Experiment, gpu: Gpu | None = None) -> Facts:
    """Facts of an experiment.

    Args:
        experiment: what a person wants to run.
        gpu: of this machine, of capability 0 where it has none; None for that of the experiment's hardware.

    Raises:
        BadInput: if its hardware profile does not exist.
    """
    capability = (gpu or gpu_of(experiment.hardware)).capability
    name = gpu.name if gpu else experiment.hardware
    in_words = f"{name} is {architecture(capability)}"
    if capability is None:
        capability = UNKNOWN_SM if gpu else None
    elif capability == 0:
        in_words = "this machine has no GPU to use" if gpu else f"{name} has no GPU"
        # `local` on a machine without a GPU says nothing about where the run will be.
        capability = None if experiment.hardware == "local" and gpu is None else 0
    return Facts(
        experiment=experiment,
        shape=shape_for(experiment),
        capability=capability,
        gpu_in_words=in_words,
        world_size=experiment.world_size,
        pp=experiment.pp,
        dp_replicate=experiment.dp_replicate,
        dp_shard_given=experiment.dp_shard,
        cp=experiment.cp,
        tp=experiment.tp,
        ep=experiment.ep,
        pp_schedule=experiment.pp_schedule,
        local_batch=experiment.local_batch,
        microbatch=experiment.microbatch,
        seq_len=experiment.seq_len,
        precision=experiment.precision,
        ep_backend=experiment.ep_backend,
        ep_kernels=experiment.ep_kernels,
        dispatch_precision=experiment.dispatch_precision,
        quantize=experiment.quantize,
        wgrad=experiment.wgrad,
        attention_backend=experiment.attention_backend,
        activation_checkpoint=experiment.activation_checkpoint,
        compile=experiment.compile,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism with nothing left to resolve, and the pipeline's stages.

    Attributes:
        world_size: ranks.
        pp: pipeline-parallel degree.
        dp_replicate: data-parallel degree over which parameters are replicated.
        dp_shard: data-parallel degree over which parameters are sharded.
        cp: context-parallel degree.
        tp: tensor-parallel degree.
        ep: expert-parallel degree.
        efsdp: ranks that shard the experts of one expert-parallel rank, ``dp_shard * cp * tp / ep``.
        stages: names of the modules of each (virtual) stage, in stage order.
        stages_of_rank: numbers of the stages that each pipeline rank holds.
        microbatches: micro-batches of a step on each rank; 1 without pipeline parallelism.
        microbatch_size: sequences of one micro-batch.
    """

    world_size: int
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    efsdp: int
    stages: tuple[tuple[str, ...], ...]
    stages_of_rank: tuple[tuple[int, ...], ...]
    microbatches: int
    microbatch_size: int

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
    schedule, turns = (SCHEDULES[facts.pp_schedule], facts.stages_per_rank) if facts.pp > 1 else (SCHEDULES["1F1B"], 1)
    return Layout(
        world_size=facts.world_size,
        pp=facts.pp,
        dp_replicate=facts.dp_replicate,
        dp_shard=facts.dp_shard,
        cp=facts.cp,
        tp=facts.tp,
        ep=facts.ep,
        efsdp=facts.efsdp,
        stages=split_layers(facts.shape.n_layers, facts.pp * turns),
        stages_of_rank=stages_of_rank(schedule, facts.pp, turns),
        microbatches=facts.microbatches,
        microbatch_size=facts.microbatch if facts.pp > 1 else facts.local_batch,
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
