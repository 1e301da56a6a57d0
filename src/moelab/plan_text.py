"""Plans and searches as text for a terminal: short, aligned, the factor at fault first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moelab.experiment import EPBackend, Experiment
from moelab.layout import Layout
from moelab.plan import Plan, as_shell, bubble_of
from moelab.search import ORDER, Candidate, Found

WIDTH = 118
LABEL = 10


def study_text(plans: Sequence[Plan]) -> str:
    """The plans of a study's arms; what all of them share stands once, at the end."""
    *before, last = plans
    shared = all(one.differences == last.differences for one in before)
    return "\n\n".join([*(plan_text(one, with_differences=not shared) for one in before), plan_text(last)])


def plan_text(plan: Plan, *, with_differences: bool = True) -> str:
    """A plan for a person."""
    lines = [headline(plan)]
    lines += rows("", plan.verdict.reasons, bullet="- ")
    if plan.verdict.layout is not None:
        lines += layout_lines(plan.experiment, plan.verdict.layout)
    lines += memory_lines(plan)
    lines += rows("notes", plan.notes, bullet="- ")
    if plan.verdict.legal:
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
    return rows("memory", [against, plan.memory.dominant]) + buffer_lines(plan)


def buffer_lines(plan: Plan) -> list[str]:
    """What the dispatcher allocates for its communication."""
    buffer = plan.memory.buffer if plan.memory else None
    if buffer is None:
        return []
    batch = "a micro-batch" if plan.experiment.pp > 1 else "the local batch"
    domains = buffer.ranks // buffer.nvlink_ranks
    where = f"{buffer.ranks} ranks" + (f" on {domains} nodes" if domains > 1 else "")
    size = f"{buffer.backend.value} {buffer.size_bytes / 2**30:.2f} GiB a GPU, outside of PyTorch's allocator"
    estimate = "" if buffer.exact else " (a stand-in until it has been measured)"
    return rows("buffer", [f"{size}: {buffer.tokens:,} tokens of {batch} between {where}{estimate}"])


def difference_lines(plan: Plan) -> list[str]:
    """The table of differences, one block a row."""
    lines: list[str] = []
    for row in plan.differences:
        lines += rows(f"  {row.topic}", [f"published: {row.published}", f"here: {row.here}"], label=34)
    return lines


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


def search_text(found: Found) -> str:
    """The layouts of a search as a table, with the order that it is in."""
    shown = found.candidates or found.nearest
    counts = f"{found.examined:,} layouts judged, {found.legal:,} legal"
    if not shown:
        return f"{counts}"
    lines = aligned([CANDIDATE_HEADER, *(candidate_row(candidate) for candidate in shown)])
    if found.candidates:
        order = f"Order: {', '.join(ORDER)}. No speed is predicted."
        return "\n".join([*lines, "", f"{counts}, {found.too_large:,} better ones do not fit.", *rows("", [order])])
    return "\n".join([f"{counts}, and none fits. The nearest to fitting:", *lines])


CANDIDATE_HEADER = (
    "pp",
    "schedule",
    "micro",
    "dp_rep",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "local",
    "global",
    "bubble",
    "free GiB",
)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, columns flush right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def candidate_row(candidate: Candidate) -> tuple[str, ...]:
    """One layout of a search, as cells."""
    x = candidate.experiment
    pipeline = (x.pp_schedule, str(x.microbatch)) if x.pp > 1 else ("-", "-")
    degrees = (x.dp_replicate, x.dp_shard, x.cp, x.tp, x.ep, x.local_batch)
    free = "?" if candidate.headroom_gib is None else f"{candidate.headroom_gib:.1f}"
    total = x.local_batch * x.dp_replicate * x.dp_shard
    return (str(x.pp), *pipeline, *map(str, degrees), str(total), f"{candidate.bubble_fraction:.1%}", free)


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
