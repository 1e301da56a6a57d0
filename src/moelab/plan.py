"""An experiment before it runs: is it legal, what does each GPU hold, what will TorchTitan be told.

A plan is made without torch, in well under a second. It holds no prediction of speed. As text for a terminal it is
short and aligned, the factor at fault first.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.errors import Refused
from moelab.experiment import EPBackend, Experiment
from moelab.hardware import gpu_of
from moelab.layout import SCHEDULES, Layout, LayoutCheck, bubble_fraction, check
from moelab.memory import DispatchBuffer, MemoryConstants, MemoryEstimate, StageMemory, estimate, memory_constants
from moelab.model import ParameterCounts, count_parameters, shape_for
from moelab.model.hugging_face import HuggingFaceModel
from moelab.published_differences import Difference, differences
from moelab.titan.arms import config_name, named_arms

DEFAULT_FILE = "experiment.yaml"
WIDTH = 118
LABEL = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known of an experiment before it runs.

    Attributes:
        experiment: what a person asked for.
        verdict: legality of the layout.
        memory: what each pipeline rank holds; None of an illegal layout.
        fits: whether the fullest GPU has room; None where that is not known.
        command: what one node executes; empty for a model that cannot be trained.
        differences: from the published scripts, for an experiment of their size.
    """

    experiment: Experiment
    verdict: LayoutCheck
    memory: MemoryEstimate | None
    fits: bool | None
    command: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def parameters(self) -> ParameterCounts:
        """Of the whole model."""
        return count_parameters(shape_for(self.experiment))

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
        """The plan as one JSON object; ``memory_gib`` is what TorchTitan prints, ``total_gib`` what must fit."""
        worst = self.memory and self.memory.worst
        return {
            "legal": self.verdict.legal,
            "fits": self.fits,
            "reasons": list(self.verdict.reasons),
            "notes": list(self.notes),
            "layout": layout_json(self.experiment, self.verdict.layout),
            "parameters": {"total": self.parameters.total, "active": self.parameters.active},
            "memory_gib": worst and round(worst.reserved_gib, 2),
            "outside_gib": worst and round(worst.outside_gib, 2),
            "total_gib": worst and round(worst.total_gib, 2),
            "capacity_gib": None if self.memory is None or self.fits is None else round(self.memory.capacity_gib, 2),
            "memory_by_rank": [] if self.memory is None else [rank_json(stage) for stage in self.memory.by_stage],
            "dispatch_buffer": buffer_json(self.memory.buffer) if self.memory and self.memory.buffer else None,
            "command": list(self.command),
            "differences": [asdict(row) for row in self.differences],
        }


def plan(experiment: Experiment, *, path: Path | None = None, constants: MemoryConstants = memory_constants) -> Plan:
    """Plan an experiment.

    Args:
        experiment: what a person wants to run.
        path: file that holds it as it is here, for the command; None if no file does.
        constants: of the memory model, such as a measured load of the experts.

    Raises:
        BadInput: if its hardware profile does not exist.
        GpusUnknown: if it is ``local`` and nvidia-smi fails.

    Example:
        >>> plan(Experiment()).verdict.legal
        True
    """
    verdict = check(experiment)
    legal = verdict.layout if verdict.legal else None
    memory = None if legal is None else estimate(experiment, legal, gpu_of(experiment.hardware), constants=constants)
    return Plan(
        experiment=experiment,
        verdict=verdict,
        memory=memory,
        fits=memory.fits if memory is not None and _gpu_is_known(experiment) else None,
        command=() if shape_for(experiment).plan_only else command(experiment, path),
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
    totals = {"memory_gib": round(stage.reserved_gib, 2), "total_gib": round(stage.total_gib, 2)}
    return {"pp_rank": stage.rank, **totals, "moment": stage.moment, "parts_gib": parts}


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
    schedule, turns = SCHEDULES[experiment.pp_schedule], layout.stages_per_rank
    return bubble_fraction(schedule, pp=layout.pp, microbatches=layout.microbatches, turns=turns)


def titan_config(experiment: Experiment) -> dict[str, Any]:
    """The configuration that TorchTitan would resolve, as on the GPU that the experiment is for. Loads torch.

    Raises:
        Refused: if this machine lacks the kernels that it asks for by name, or TorchTitan cannot be imported.
    """
    try:
        from moelab.titan.config_registry import assume_gpu, trainer_config
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


def study_text(plans: Sequence[Plan]) -> str:
    """The plans of a study's arms; what all of them share stands once, at the end."""
    *before, last = plans
    shared = all(one.differences == last.differences for one in before)
    return "\n\n".join([*(plan_text(one, with_differences=not shared) for one in before), plan_text(last)])


def plan_text(plan: Plan, *, with_differences: bool = True) -> str:
    """A plan for a person."""
    lines = [headline(plan)]
    lines += rows("", plan.verdict.reasons, bullet="- ")
    counts = plan.parameters
    lines += rows("model", [f"{amount(counts.total)} parameters, {amount(counts.active)} active in a token"])
    if plan.verdict.layout is not None:
        lines += layout_lines(plan.experiment, plan.verdict.layout)
    lines += memory_lines(plan)
    lines += rows("notes", plan.notes, bullet="- ")
    if plan.verdict.legal and plan.command:
        lines += ["command", "  " + as_shell(plan.command)]
    if plan.differences and with_differences:
        lines += ["", "differs from the published scripts:"]
        lines += difference_lines(plan)
    return "\n".join(lines)


def headline(plan: Plan) -> str:
    """Verdict and experiment on one line."""
    experiment = plan.experiment
    count = len(plan.verdict.reasons)
    if count:
        verdict = f"illegal, {count} reason{'s' if count > 1 else ''}"
    elif plan.fits is False:
        verdict = "legal, but does not fit"
    else:
        verdict = "legal" if plan.fits is None else "legal, and fits"
    emulated = experiment.ep_backend is EPBackend.DEEPEP and experiment.ep_kernels == "emulated"
    arm = f"{experiment.arm} (DeepEP emulated)" if emulated else experiment.arm
    return (
        f"{verdict}: {experiment.model_label}, arm {arm}, {experiment.world_size} ranks = {experiment.nodes} x "
        f"{experiment.gpus_per_node}, hardware {experiment.hardware}"
    )


def layout_lines(experiment: Experiment, layout: Layout) -> list[str]:
    """Degrees, batch and pipeline."""
    degrees = " · ".join(f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    sequences = experiment.local_batch * layout.data_parallel
    lines = rows("layout", [f"{degrees} · ep {layout.ep}, experts sharded by {layout.efsdp}"])
    lines += rows(
        "batch",
        [
            f"{layout.microbatches} x {layout.microbatch_size} sequences on {layout.data_parallel} data-parallel "
            f"ranks: {sequences:,} sequences, "
            f"{tokens_text(sequences * experiment.seq_len)} a step"
        ],
    )
    if layout.pp > 1:
        bubble = (
            f"{experiment.pp_schedule}, {len(layout.stages)} stages; a rank waits {bubble_of(experiment, layout):.1%}"
        )
        lines += rows("pipeline", [f"{bubble} of a step by the schedule alone", *stage_lines(layout)])
    return lines


def tokens_text(tokens: int) -> str:
    """A number of tokens, in millions from one million on.

    >>> tokens_text(33_554_432), tokens_text(4096)
    ('33.6 M tokens', '4,096 tokens')
    """
    return f"{tokens / 1e6:.3g} M tokens" if tokens >= 1e6 else f"{tokens:,} tokens"


def amount(parameters: int) -> str:
    """A number of parameters in four digits.

    >>> amount(671_026_404_352), amount(2_184_000)
    ('671 G', '2.184 M')
    """
    return f"{parameters / 1e9:.4g} G" if parameters >= 1e9 else f"{parameters / 1e6:.4g} M"


def stage_lines(layout: Layout) -> list[str]:
    """What each of the first and last pipeline ranks holds."""
    shown = range(layout.pp) if layout.pp <= 4 else (0, 1, layout.pp - 1)
    return [
        f"rank {rank}: "
        + "; ".join(f"stage {stage} {spans(layout.stages[stage])}" for stage in layout.stages_of_rank[rank])
        for rank in shown
    ]


def spans(modules: tuple[str, ...]) -> str:
    """Names of a stage's modules, consecutive layers as a range.

    >>> spans(("tok_embeddings", "layers.0", "layers.1", "layers.2"))
    'tok_embeddings, layers 0-2'
    """
    numbers = [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]
    layers = [f"layers {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}"] if numbers else []
    before = [name for name in modules if name == "tok_embeddings"]
    after = [name for name in modules if name in ("norm", "lm_head")]
    return ", ".join([*before, *layers, *after])


def memory_lines(plan: Plan) -> list[str]:
    """GiB of the fullest GPU beside what it has."""
    if plan.memory is None:
        return []
    needed = f"{plan.memory.worst_gib:.1f} GiB on the fullest GPU"
    against = needed if plan.fits is None else f"{needed} of {plan.memory.capacity_gib:.1f}"
    worst = plan.memory.worst
    apart = (
        f"{worst.reserved_gib:.1f} GiB reserved by PyTorch, which TorchTitan prints as memory, and "
        f"{worst.outside_gib:.1f} GiB of CUDA, NCCL and the dispatcher"
    )
    return rows("memory", [against, apart, plan.memory.dominant]) + buffer_lines(plan)


def buffer_lines(plan: Plan) -> list[str]:
    """What the dispatcher allocates for its communication."""
    buffer = plan.memory.buffer if plan.memory else None
    if buffer is None:
        return []
    batch = "a micro-batch" if plan.experiment.pp > 1 else "the local batch"
    domains = buffer.ranks // buffer.nvlink_ranks
    kind = "nodes" if buffer.nvlink_ranks <= plan.experiment.gpus_per_node else "NVLink domains"
    where = f"{buffer.ranks} ranks" + (f" on {domains} {kind}" if domains > 1 else "")
    size = f"{buffer.backend.value} {buffer.size_bytes / 2**30:.2f} GiB a GPU, outside of PyTorch's allocator"
    estimate = "" if buffer.exact else " (a stand-in until it has been measured)"
    return rows("buffer", [f"{size}: {buffer.tokens:,} tokens of {batch} between {where}{estimate}"])


def difference_lines(plan: Plan) -> list[str]:
    """The table of differences, one block a row."""
    lines: list[str] = []
    for row in plan.differences:
        lines += rows(f"  {row.topic}", [f"published: {row.published}", f"here: {row.here}"], label=34)
    return lines


def model_text(model: HuggingFaceModel) -> str:
    """What a plan took from another system's configuration, and what it left."""
    base = f"everything else as in model={model.model}" if model.shape else f"it is model={model.model}"
    lines = [f"model taken from {model.source}; {base}"]
    lines += rows("taken", [", ".join(model.taken)])
    return "\n".join(lines + rows("left", model.left, bullet="- "))


def titan_text(config: Mapping[str, Any]) -> str:
    """TorchTitan's configuration, one field a line; of the model its name only, which has a line for every tensor."""
    lines = ["TorchTitan's configuration (the model's own is in --json):"]
    for section, values in config.items():
        if section == "model_spec":
            lines.append(f"  model_spec = {values['name']} {values['flavor']}")
        elif isinstance(values, Mapping):
            lines += [f"  {section}.{name} = {value}" for name, value in values.items()]
        else:
            lines.append(f"  {section} = {values}")
    return "\n".join(lines)


def verified_text(answer: Mapping[str, Any]) -> str:
    """What TorchTitan built on each rank beside what was predicted."""
    lines = [
        f"TorchTitan builds it as on an {answer['gpu']} GPU: {answer['total_parameters']:,} parameters, "
        f"{answer['dispatcher']}, {answer['seconds']} s",
        f"{'rank':>6}  {'parameters':>16}  {'predicted':>16}  {'of experts':>16}  {'GiB predicted':>13}",
    ]
    for row in answer["ranks"]:
        counts = (row["parameters"], row["predicted_parameters"], row["expert_parameters"])
        lines.append(
            f"{row['rank']:>6}  " + "  ".join(f"{count:>16,}" for count in counts) + f"  {row['predicted_gib']:>13}"
        )
    return "\n".join([*lines, *rows("not built", answer["not_built"], bullet="- ")])


def rows(name: str, texts: Iterable[str], *, bullet: str = "", label: int = LABEL) -> list[str]:
    """Wrapped lines behind a label of fixed width."""
    lines: list[str] = []
    for text in texts:
        start = name.ljust(label) + bullet if name else bullet
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
        )
        name = " " * label if name else ""
    return lines
