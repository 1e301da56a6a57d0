"""An experiment judged: legal or not, every reason, every note, and the layout that TorchTitan will build."""

from __future__ import annotations

from dataclasses import dataclass

from moelab.experiment import Experiment
from moelab.layout.facts import Facts, facts_of
from moelab.layout.notes import notes
from moelab.layout.rules import RULES
from moelab.layout.schedule import SCHEDULES, split_layers, stages_of_rank


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
    def data_parallel(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class LayoutCheck:
    """The verdict on an experiment.

    Attributes:
        reasons: why it is not legal, every one; empty if it is. Each begins with the field at fault and what was given.
        notes: what a person should know of a legal one too, such as padding that is raised.
        layout: None if it cannot be resolved.
    """

    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    layout: Layout | None

    @property
    def legal(self) -> bool:
        """Whether TorchTitan can train it, memory aside."""
        return not self.reasons


def check(experiment: Experiment) -> LayoutCheck:
    """Judge an experiment.

    Args:
        experiment: what a person wants to run, on any number of nodes.

    Returns:
        The verdict. It says nothing about memory.

    Raises:
        BadInput: if its hardware profile does not exist.

    Example:
        >>> from moelab.experiment import Experiment
        >>> print(check(Experiment(gpus_per_node=4, ep=3)).reasons[0])
        ep is 3: it must divide the ranks it shares out, dp_shard 4 * cp 1 * tp 1 = 4. Legal ep: 1, 2, 4
    """
    facts = facts_of(experiment)
    broken = [rule for rule in RULES if not rule.holds(facts)]
    return LayoutCheck(
        reasons=tuple(rule.explain(facts) for rule in broken),
        notes=notes(facts),
        layout=resolve(facts) if not any(rule.shapes_layout for rule in broken) else None,
    )


def resolve(facts: Facts) -> Layout:
    """The layout of facts that break no rule which shapes it."""
    schedule = SCHEDULES[facts.pp_schedule] if facts.pp > 1 else SCHEDULES["1F1B"]
    return Layout(
        world_size=facts.world_size,
        pp=facts.pp,
        dp_replicate=facts.dp_replicate,
        dp_shard=facts.dp_shard,
        cp=facts.cp,
        tp=facts.tp,
        ep=facts.ep,
        efsdp=facts.efsdp,
        stages=split_layers(facts.shape.n_layers, facts.pp * schedule.stages_per_rank),
        stages_of_rank=stages_of_rank(schedule, facts.pp),
        microbatches=facts.microbatches,
        microbatch_size=facts.microbatch if facts.pp > 1 else facts.local_batch,
    )
