"""An experiment before it runs: is it legal, what does each GPU hold, what will TorchTitan be told.

A plan is made without torch, in well under a second. It holds no prediction of speed. As text for a terminal it is
short and aligned, the factor at fault first.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from moelab.data import read_yaml
from moelab.errors import Refused
from moelab.experiment import EPBackend, Experiment
from moelab.hardware import gpu_of
from moelab.layout import SCHEDULES, Layout, LayoutCheck, bubble_fraction, check
from moelab.model import count_parameters, shape_for
from moelab.model.hugging_face import HuggingFaceModel
from moelab.planning.memory import MemoryConstants, MemoryEstimate, estimate, memory_constants
from moelab.titan.arms import PUBLISHED, SHARED, config_name, named_arms

DEFAULT_FILE = "experiment.yaml"
WIDTH = 118
LABEL = 10


@dataclass(frozen=True, kw_only=True)
class PublishedDifference:
    """What differs from the published scripts of the 256-GPU study, and why.

    The scripts are those of the Nebius ml-cookbook, ``pytorch-dsv3-mxfp8``, published with the article of March 2026.
    """

    topic: str
    published: str  # what the published scripts do, and what comes of it
    here: str  # what moelab does instead
    kind: Literal["fault", "stack"] = "fault"  # ``fault`` of a script, or a difference of the ``stack`` since then
    models: tuple[str, ...] = ("16B", "671B")  # models whose script it concerns

    __pydantic_config__ = ConfigDict(extra="forbid")


PUBLISHED_DIFFERENCES = TypeAdapter(tuple[PublishedDifference, ...]).validate_python(
    read_yaml("published.yaml")["differences"]
)
PUBLISHED_LAYOUT = ("nodes", "gpus_per_node", "pp", "tp", "ep", "seq_len", "local_batch")
"""Fields that make an experiment one of the published size and layout."""


def differences(experiment: Experiment) -> tuple[PublishedDifference, ...]:
    """Differences that concern an experiment; none unless it is one of the published size and layout.

    >>> len(differences(Experiment(model="nano")))
    0
    """
    published = {**SHARED, **PUBLISHED.get(experiment.model, {})}
    if experiment.shape or any(getattr(experiment, field) != published.get(field, 1) for field in PUBLISHED_LAYOUT):
        return ()
    return tuple(row for row in PUBLISHED_DIFFERENCES if experiment.model in row.models)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is known of an experiment before it runs."""

    experiment: Experiment
    verdict: LayoutCheck
    memory: MemoryEstimate | None  # what each pipeline rank holds; None of an illegal layout
    fits: bool | None  # whether the fullest GPU has room; None where that is not known
    command: tuple[str, ...]  # what one node executes; empty for a model that cannot be trained
    differences: tuple[PublishedDifference, ...]  # from the published scripts, for an experiment of their size

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the layout, and on what is not known of its memory."""
        if self.memory is not None and self.experiment.ep_backend in (EPBackend.HYBRIDEP, EPBackend.MINIMAL_ASYNC_EP):
            backend = self.experiment.ep_backend.value
            return (*self.verdict.notes, f"memory: the buffers of {backend} are not modelled, and come on top")
        if self.memory is None or self.fits is not None:
            return self.verdict.notes
        gpu = gpu_of(self.experiment.hardware)
        why = "this machine has no GPU" if gpu.capability == 0 else f"the memory of {gpu.name} is not known"
        unknown = (
            f"memory: hardware is local and {why}; name a profile, such as hardware=b200_x256, to see whether it fits"
        )
        return (*self.verdict.notes, unknown)

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON object; ``memory_gib`` is what TorchTitan prints, ``total_gib`` what must fit."""
        memory, layout, x = self.memory, self.verdict.layout, self.experiment
        worst, buffer = (memory.worst, memory.buffer) if memory else (None, None)
        counts = count_parameters(shape_for(x))
        layout_json: dict[str, Any] = {}
        if layout is not None:
            layout_json = asdict(layout) | {
                "global_batch": x.global_batch,
                "tokens_per_step": x.global_batch * x.seq_len,
                "bubble_fraction": round(bubble_of(x, layout), 6),
            }
        by_rank = [
            {"pp_rank": stage.rank, "memory_gib": round(stage.reserved_gib, 2), "total_gib": round(stage.total_gib, 2)}
            | {"moment": stage.moment, "parts_gib": {name: round(gib, 3) for name, gib in stage.parts.items()}}
            for stage in (memory.by_stage if memory else ())
        ]
        return {
            "legal": self.verdict.legal,
            "fits": self.fits,
            "reasons": list(self.verdict.reasons),
            "notes": list(self.notes),
            "layout": layout_json,
            "parameters": {"total": counts.total, "active": counts.active},
            "memory_gib": worst and round(worst.reserved_gib, 2),
            "outside_gib": worst and round(worst.outside_gib, 2),
            "total_gib": worst and round(worst.total_gib, 2),
            # NaN, where the GPU is not known, is no JSON.
            "capacity_gib": None if memory is None or self.fits is None else round(memory.capacity_gib, 2),
            "memory_by_rank": by_rank,
            "dispatch_buffer": buffer and buffer.to_json(),
            "command": list(self.command),
            "differences": [asdict(row) for row in self.differences],
        }


def plan(experiment: Experiment, *, path: Path | None = None, constants: MemoryConstants = memory_constants) -> Plan:
    """Plan an experiment.

    ``path`` is the file that holds it as it is here, for the command; None if no file does.

    Raises:
        BadInput: if its hardware profile does not exist.
        GpusUnknown: if it is ``local`` and nvidia-smi fails.
    """
    verdict = check(experiment)
    legal = verdict.layout if verdict.legal else None
    memory = None if legal is None else estimate(experiment, legal, gpu_of(experiment.hardware), constants=constants)
    return Plan(
        experiment=experiment,
        verdict=verdict,
        memory=memory,
        # Where no GPU is known there is nothing that it could fit into.
        fits=memory.fits if memory is not None and _gpu_is_known(experiment) else None,
        command=() if shape_for(experiment).plan_only else command(experiment, path),
        differences=differences(experiment),
    )


def _gpu_is_known(experiment: Experiment) -> bool:
    """Not where ``local`` is a machine without a GPU: the run will be elsewhere, or on this processor."""
    gpu = gpu_of(experiment.hardware)
    return gpu.memory_gib is not None and (experiment.hardware != "local" or gpu.capability != 0)


def command(experiment: Experiment, path: Path | None = None) -> tuple[str, ...]:
    """The command that one node executes.

    A published arm has a configuration of its own name; any other experiment is read from its file, which an
    environment variable names. ``HOST:PORT`` stands for the first node of the job and a free port on it, ``NODE`` for
    the number of the node.

    >>> " ".join(command(Experiment(gpus_per_node=2), Path("a.yaml"))[:5])
    'env MOELAB_EXPERIMENT=a.yaml python -m moelab.launch.loopback'
    """
    name = config_name(experiment)
    # A name does not have every field: only equality shows that this is the published arm.
    published = named_arms().get(name) == experiment
    variable = () if published else ("env", f"MOELAB_EXPERIMENT={path or DEFAULT_FILE}")
    ranks = f"--nproc-per-node={experiment.gpus_per_node}"
    torchrun: tuple[str, ...] = ("python", "-m", "moelab.launch.loopback", ranks)
    if experiment.nodes > 1:  # `static`, because `c10d` runs what a stranger writes into its store
        where = ("--rdzv-backend=static", "--rdzv-endpoint=HOST:PORT")
        torchrun = ("torchrun", f"--nnodes={experiment.nodes}", "--node-rank=NODE", ranks, *where)
    config = name if published else "experiment"
    return (*variable, *torchrun, "-m", "torchtitan.train", "--module", "moelab.titan", "--config", config)


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

    capability = gpu_of(experiment.hardware).capability
    # Rounded, because 10.3 has no exact binary form.
    assumed = assume_gpu(divmod(round(10 * capability), 10)) if capability else nullcontext()
    with assumed:
        resolved: dict[str, Any] = json.loads(json.dumps(trainer_config(experiment).to_dict(), default=str))
    return resolved


def verified(planned: Plan, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Build a legal plan with TorchTitan, without a GPU, and put the predicted memory beside each rank.

    ``ranks`` are global ones; by default the first of every pipeline rank.

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


def study_text(plans: Sequence[Plan]) -> str:
    """The plans of a study's arms; what all of them share stands once, at the end."""
    *before, last = plans
    shared = all(one.differences == last.differences for one in before)
    return "\n\n".join([*(plan_text(one, with_differences=not shared) for one in before), plan_text(last)])


def plan_text(plan: Plan, *, with_differences: bool = True) -> str:
    """A plan for a person."""
    x, count, layout = plan.experiment, len(plan.verdict.reasons), plan.verdict.layout
    if count:
        verdict = f"illegal, {count} reason{'s' if count > 1 else ''}"
    else:
        verdict = {None: "legal", True: "legal, and fits", False: "legal, but does not fit"}[plan.fits]
    emulated = " (DeepEP emulated)" if x.ep_backend is EPBackend.DEEPEP and x.ep_kernels == "emulated" else ""
    lines = [
        f"{verdict}: {x.model_label}, arm {x.arm}{emulated}, {x.world_size} ranks = {x.nodes} x {x.gpus_per_node}, "
        f"hardware {x.hardware}"
    ]
    lines += rows("", plan.verdict.reasons, bullet="- ")
    lines += rows("model", [parameters_text(x)])
    if layout is not None:
        lines += layout_lines(x, layout)
    lines += memory_lines(plan)
    lines += rows("notes", plan.notes, bullet="- ")
    if plan.verdict.legal and plan.command:
        lines += ["command", "  " + shlex.join(plan.command)]
    if plan.differences and with_differences:
        lines += ["", "differs from the published scripts:"]
        for row in plan.differences:
            lines += rows(f"  {row.topic}", [f"published: {row.published}", f"here: {row.here}"], label=34)
    return "\n".join(lines)


def layout_lines(experiment: Experiment, layout: Layout) -> list[str]:
    """Degrees, batch and pipeline, and what each of the first and last pipeline ranks holds."""
    degrees = " · ".join(f"{axis} {getattr(layout, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    lines = rows("layout", [f"{degrees} · ep {layout.ep}, experts sharded by {layout.efsdp}"])
    lines += rows(
        "batch",
        [
            f"{layout.microbatches} x {layout.microbatch_size} sequences on {layout.data_parallel} data-parallel "
            f"ranks: {experiment.global_batch:,} sequences, "
            f"{tokens_text(experiment.global_batch * experiment.seq_len)} a step"
        ],
    )
    if layout.pp > 1:
        bubble = (
            f"{experiment.pp_schedule}, {len(layout.stages)} stages; a rank waits {bubble_of(experiment, layout):.1%}"
        )
        shown = range(layout.pp) if layout.pp <= 4 else (0, 1, layout.pp - 1)
        held = [
            f"rank {rank}: " + "; ".join(f"stage {n} {spans(layout.stages[n])}" for n in layout.stages_of_rank[rank])
            for rank in shown
        ]
        lines += rows("pipeline", [f"{bubble} of a step by the schedule alone", *held])
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


def parameters_text(experiment: Experiment) -> str:
    """Parameters of an experiment's model, and how many of them a token meets."""
    counts = count_parameters(shape_for(experiment))
    return f"{amount(counts.total)} parameters, {amount(counts.active)} active per token"


def layout_words(experiment: Experiment) -> str:
    """A layout in one line; degrees of one are left out, as is what follows from the others.

    >>> layout_words(Experiment(gpus_per_node=8, ep=8, dp_shard=8, local_batch=2))
    'FSDP 8, EP 8, 2 sequences at a time, checkpointing none'
    """
    x = experiment
    shard = x.dp_shard if x.dp_shard > 0 else x.world_size // (x.pp * x.tp * x.cp * x.dp_replicate)
    pipeline = [f"PP {x.pp} ({x.pp_schedule})"] if x.pp > 1 else []
    names = {"replicas": x.dp_replicate, "FSDP": shard, "CP": x.cp, "TP": x.tp, "EP": x.ep}
    degrees = [f"{name} {degree}" for name, degree in names.items() if degree > 1 or name == "EP"]
    size = x.sequences_at_once
    at_once = f"{size} sequence{'s' if size > 1 else ''} at a time"
    at_once += f", {x.local_batch // size} times" if size < x.local_batch else ""
    return f"{', '.join([*pipeline, *degrees])}, {at_once}, checkpointing {x.activation_checkpoint}"


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
    """GiB of the fullest GPU beside what it has, and what the dispatcher allocates for its communication."""
    if plan.memory is None:
        return []
    needed = f"{plan.memory.worst_gib:.1f} GiB on the fullest GPU"
    against = needed if plan.fits is None else f"{needed} of {plan.memory.capacity_gib:.1f}"
    worst, buffer = plan.memory.worst, plan.memory.buffer
    apart = (
        f"{worst.reserved_gib:.1f} GiB reserved by PyTorch, which TorchTitan prints as memory, and "
        f"{worst.outside_gib:.1f} GiB for CUDA, NCCL and the dispatcher"
    )
    lines = rows("memory", [against, apart, plan.memory.dominant])
    if buffer is None:
        return lines
    batch = "a micro-batch" if plan.experiment.pp > 1 else "the local batch"
    domains = buffer.ranks // buffer.nvlink_ranks
    kind = "nodes" if buffer.nvlink_ranks <= plan.experiment.gpus_per_node else "NVLink domains"
    where = f"{buffer.ranks} ranks" + (f" on {domains} {kind}" if domains > 1 else "")
    size = f"DeepEP {buffer.size_bytes / 2**30:.2f} GiB per GPU, outside of PyTorch's allocator"
    return lines + rows("buffer", [f"{size}: {buffer.tokens:,} tokens of {batch} between {where}"])


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
