"""What the rules look at: an experiment's degrees beside its model and its GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moelab.experiment import EPBackend, Experiment, Precision
from moelab.hardware import gpu_of
from moelab.layout.schedule import SCHEDULES, Schedule, schedule_in_any_case
from moelab.model import ModelShape, shape_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One candidate, cheap to make: a search makes one for each layout.

    The degrees are copied out of the experiment because a search varies them; everything that it does not vary is read
    from the experiment itself.

    Attributes:
        experiment: what the other fields were taken from.
        shape: dimensions of the model.
        capability: CUDA capability of the GPU (10.0 for SM100), 0 without one, None where it is not known.
        dp_shard_given: -1 for the ranks that the other axes leave.
    """

    experiment: Experiment
    shape: ModelShape
    capability: float | None
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
    def microbatches(self) -> int:
        """Micro-batches of a step on each rank; 1 without pipeline parallelism."""
        return self.local_batch // self.microbatch if self.pp > 1 else 1

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


def facts_of(experiment: Experiment) -> Facts:
    """Facts of an experiment.

    Raises:
        BadInput: if its hardware profile does not exist.
    """
    return Facts(
        experiment=experiment,
        shape=shape_for(experiment),
        capability=_capability(experiment.hardware),
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
        activation_checkpoint=experiment.activation_checkpoint,
        compile=experiment.compile,
    )


def _capability(hardware: str) -> float | None:
    """Capability of a profile's GPU; ``local`` on a machine without one says nothing about where the run will be."""
    capability = gpu_of(hardware).capability
    return None if hardware == "local" and not capability else capability
