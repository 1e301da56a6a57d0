"""An experiment before it runs: is it legal, what does each GPU hold, what will TorchTitan be told.

A plan is made without torch, in well under a second. It holds no prediction of speed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.errors import Refused
from moelab.experiment import Experiment
from moelab.hardware import gpu_of
from moelab.layout import SCHEDULES, Layout, LayoutCheck, bubble_fraction, check
from moelab.memory import DispatchBuffer, MemoryEstimate, StageMemory, estimate
from moelab.published_differences import Difference, differences
from moelab.titan.arms import config_name, named_arms

DEFAULT_FILE = "experiment.yaml"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known of an experiment before it runs.

    Attributes:
        experiment: what a person asked for.
        verdict: legality of the layout.
        memory: what each pipeline rank holds; None of an illegal layout.
        fits: whether the fullest GPU has room; None where that is not known.
        command: what one node executes.
        differences: from the published scripts, for an experiment of their size.
    """

    experiment: Experiment
    verdict: LayoutCheck
    memory: MemoryEstimate | None
    fits: bool | None
    command: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the layout, and on memory where nothing can be said of it."""
        if self.memory is None or self.fits is not None:
            return self.verdict.notes
        unknown = (
            f"memory: hardware is local and {self._why_unknown}; name a profile, such as hardware=b200_x256, to see "
            "whether it fits"
        )
        return (*self.verdict.notes, unknown)

    @property
    def _why_unknown(self) -> str:
        gpu = gpu_of(self.experiment.hardware)
        return "this machine has no GPU" if gpu.capability == 0 else f"the memory of {gpu.name} is not known"

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        return {
            "legal": self.verdict.legal,
            "fits": self.fits,
            "reasons": list(self.verdict.reasons),
            "notes": list(self.notes),
            "layout": layout_json(self.experiment, self.verdict.layout),
            "memory_gib": None if self.memory is None else round(self.memory.worst_gib, 2),
            "capacity_gib": None if self.memory is None or self.fits is None else round(self.memory.capacity_gib, 2),
            "memory_by_rank": [] if self.memory is None else [rank_json(stage) for stage in self.memory.by_stage],
            "dispatch_buffer": buffer_json(self.memory.buffer) if self.memory and self.memory.buffer else None,
            "command": list(self.command),
            "differences": [asdict(row) for row in self.differences],
        }


def plan(experiment: Experiment, *, path: Path | None = None) -> Plan:
    """Plan an experiment.

    Args:
        experiment: what a person wants to run.
        path: file that holds it as it is here, for the command; None if no file does.

    Raises:
        BadInput: if its hardware profile does not exist.
        GpusUnknown: if it is ``local`` and nvidia-smi fails.

    Example:
        >>> plan(Experiment()).verdict.legal
        True
    """
    verdict = check(experiment)
    legal = verdict.layout if verdict.legal else None
    memory = None if legal is None else estimate(experiment, legal, gpu_of(experiment.hardware))
    return Plan(
        experiment=experiment,
        verdict=verdict,
        memory=memory,
        fits=memory.fits if memory is not None and _gpu_is_known(experiment) else None,
        command=command(experiment, path),
        differences=differences(experiment),
    )


def headroom_gib(experiment: Experiment) -> Callable[[Experiment, Layout], float] | None:
    """What a search needs to know of memory; None where the GPU is not known.

    Args:
        experiment: names the hardware; the candidates of its search are given to the function that is returned.
    """
    if not _gpu_is_known(experiment):
        return None
    gpu = gpu_of(experiment.hardware)

    def left(candidate: Experiment, layout: Layout) -> float:
        predicted = estimate(candidate, layout, gpu)
        return predicted.capacity_gib - predicted.worst_gib

    return left


def _gpu_is_known(experiment: Experiment) -> bool:
    """Not where ``local`` is a machine without a GPU: the run will be elsewhere, or on this processor."""
    gpu = gpu_of(experiment.hardware)
    return gpu.memory_gib is not None and (experiment.hardware != "local" or gpu.capability != 0)


def command(experiment: Experiment, path: Path | None = None) -> tuple[str, ...]:
    """The command that one node executes.

    A published arm has a configuration of its own name; any other experiment is read from its file, which an
    environment variable names. ``HOST:PORT`` stands for a node of the job and a free port on it.

    >>> " ".join(command(Experiment(gpus_per_node=2), Path("a.yaml"))[:4])
    'env MOELAB_EXPERIMENT=a.yaml torchrun --nnodes=1'
    """
    name = config_name(experiment)
    published = named_arms().get(name) == experiment
    variable = () if published else ("env", f"MOELAB_EXPERIMENT={path or DEFAULT_FILE}")
    endpoint = "localhost:0" if experiment.nodes == 1 else "HOST:PORT"
    torchrun = (
        "torchrun",
        f"--nnodes={experiment.nodes}",
        f"--nproc-per-node={experiment.gpus_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
    )
    config = name if published else "experiment"
    return (*variable, *torchrun, "-m", "torchtitan.train", "--module", "moelab.titan", "--config", config)


def as_shell(arguments: tuple[str, ...]) -> str:
    """The command as a line to paste into a shell."""
    return shlex.join(arguments)


def layout_json(experiment: Experiment, layout: Layout | None) -> dict[str, Any]:
    """Degrees, stages and batch of a layout; empty if it cannot be resolved."""
    if layout is None:
        return {}
    sequences = experiment.local_batch * layout.data_parallel
    return {
        **asdict(layout),
        "global_batch": sequences,
        "tokens_per_step": sequences * experiment.seq_len,
        "bubble_fraction": round(bubble_of(experiment, layout), 6),
    }


def rank_json(stage: StageMemory) -> dict[str, Any]:
    """Memory of one pipeline rank, by part."""
    parts = {name: round(gib, 3) for name, gib in stage.parts.items()}
    return {"pp_rank": stage.rank, "total_gib": round(stage.total_gib, 2), "moment": stage.moment, "parts_gib": parts}


def buffer_json(buffer: DispatchBuffer) -> dict[str, Any]:
    """What the dispatcher allocates for its communication on each rank."""
    return {
        "dispatcher": buffer.backend.value,
        "bytes": buffer.size_bytes,
        "tokens": buffer.tokens,
        "ranks": buffer.ranks,
        "nvlink_ranks": buffer.nvlink_ranks,
        "exact": buffer.exact,
    }


def bubble_of(experiment: Experiment, layout: Layout) -> float:
    """Share of a step in which a pipeline rank waits, from the schedule alone."""
    if layout.pp == 1:
        return 0.0
    return bubble_fraction(SCHEDULES[experiment.pp_schedule], pp=layout.pp, microbatches=layout.microbatches)


def titan_config(experiment: Experiment) -> dict[str, Any]:
    """The configuration that TorchTitan would resolve, as on the GPU that the experiment is for. Loads torch.

    Raises:
        Refused: if no machine can run this arm, or this one lacks the kernels that it asks for by name, or TorchTitan
            cannot be imported.
    """
    try:
        from moelab.titan.assumed_gpu import assume_gpu
        from moelab.titan.config_registry import trainer_config
    except ModuleNotFoundError as error:
        raise Refused(f"TorchTitan cannot be imported here: {error}") from error

    assumed = _capability(experiment)
    with assume_gpu(assumed) if assumed else nullcontext():
        resolved: dict[str, Any] = json.loads(json.dumps(trainer_config(experiment).to_dict(), default=str))
    return resolved


def verified(planned: Plan, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Build a legal plan with TorchTitan, without a GPU, and put the predicted memory beside each rank.

    Args:
        planned: a legal plan.
        ranks: global ranks to build; by default the first of every pipeline rank.

    Raises:
        BadInput: for a rank outside of the world.
        Refused: with TorchTitan's own words, if it does not build.
    """
    from moelab.titan.verify import verify

    assert planned.memory is not None, "only a legal plan is verified"
    answer = verify(planned.experiment, ranks)
    for row in answer["ranks"]:
        row["predicted_gib"] = round(planned.memory.by_stage[row["pp_rank"]].total_gib, 2)
    return answer


def _capability(experiment: Experiment) -> tuple[int, int] | None:
    """Major and minor capability of the experiment's GPU, None without one."""
    capability = gpu_of(experiment.hardware).capability
    return (int(capability), round(capability * 10) % 10) if capability else None
