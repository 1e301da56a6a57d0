"""Whole steps that the model is held against, each as the job that the model sees.

What others published and what was noted by hand is in ``steps.csv``; what programs of ``benchmarks/`` measured is read
from their own files. A column of ``steps.csv`` that is a field of an experiment is one: what stands there is all that a
projection is asked, and an empty cell is the field's default. The others:

===================  ==============================================================================================
kind                 ``seen`` while the form of the model was chosen, or ``blind``: measured or found afterwards. A
                     row that a constant was fitted on is named by the constant (``fitted_on`` in calibration.yaml)
stack                ``torchtitan`` (0.3.0 and this project's dispatchers), ``torchtitan, own dispatchers`` (before
                     0.3.0, where nothing around the exchange was compiled), or ``megatron``, with ``graphs`` (CUDA
                     graphs launch most kernels) and ``overlap`` (exchange beside compute); with both, the experts'
                     products are one launch, for a graph of a whole step cannot know how many rows each has
model                of an experiment, or a published one by the name that ``--from-hf`` takes
*_layers, experts    of a thinner model, or with multi-token prediction, which is a layer and a second head (``mtp``)
activation_checkp.   for Megatron also the modules that it recomputes: ``mla`` (up-projections), ``mlp``, ``norm+act``
over                 of a gain: the fields in which the slower arm differs
inferred             what the source does not say
===================  ==============================================================================================

``memory_gib`` is what PyTorch reserved on the fullest rank.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moelab.experiment import Experiment
from moelab.experiment_file import parse, parse_overrides
from moelab.hardware import cluster_of
from moelab.judge.throughput import CODE, checkpointing_words
from moelab.layout import check
from moelab.layout.sharding import StageModules
from moelab.model import SHAPES, ModelShape
from moelab.model.hugging_face import read_model
from moelab.planning.measured import FULL_NODE, TWO_BY_TWO, Measurement, load_measured
from moelab.planning.memory import estimate
from moelab.planning.tables import ValidationRow
from moelab.planning.time.job import STANDARD, Job, Permutation, Stack, job_of, titan

from .full_node import node_job
from .node import hardware_of, node_results
from .published import DENSE
from .shapes import ALL_SHAPES, arm_of, as_in_november, thin_job
from .sources import H100_LATER, NOW
from .two_by_two import arm_results

HERE = Path(__file__).parent
ROW_CELLS = ("source", "name", "date", "kind", "unit", "inferred", "reference")
IN_MEGATRON = ("mla", "mla+mlp", "norm+act")
"""Checkpointing that an experiment has no word for."""
FUSED = Permutation((1.0, 1.0, 1.0, 1.0), 12)
"""TransformerEngine's: one copy each."""
MEGATRON = Stack(
    name="Megatron-LM",
    fused_attention=0.55,  # FlashAttention-3 forward and backward on H100, causal (arXiv 2407.08608)
    expert_gemm="streams",
    permutation=FUSED,
    loss_chunks=1,
    launch_s=52.6e-6,
    distributed_optimizer=True,
)
"""With TransformerEngine, fused permutation and fused cross-entropy; full sequences, no document mask."""
LAUNCHES_FITTED_ON = "Qwen3-30B, 8 × B200, EP8, MBS 1"
"""A micro-batch so small that the GPU waits for the host: Megatron's time of a launch is what it needs."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step, and how the model sees it.

    Attributes:
        row: what was measured, not predicted yet; its unit is tokens/s/GPU, ms, % gain, or GiB where only the memory
            is known.
        job: the step as the model sees it.
        over: of a gain, the slower arm.
        memory_gib: reserved on the fullest rank; None where it is not known.
        memory_predicted_gib: by :mod:`moelab.planning.memory`; None of other stacks than TorchTitan.
    """

    row: ValidationRow
    job: Job
    over: Job | None = None
    memory_gib: float | None = None
    memory_predicted_gib: float | None = None


def own_step(source: str, name: str, measured: float, date: str, job: Job, reference: str) -> Step:
    """A step that this project measured."""
    row = ValidationRow(
        of="step", source=source, name=name, date=date, kind="seen", unit="tokens/s/GPU", measured=measured,
        reference=reference,
    )  # fmt: skip
    return Step(row=row, job=job)


def all_steps() -> Iterator[Step]:
    """Of others, then of this project."""
    yield from noted_steps(HERE / "steps.csv")
    yield from later_steps()
    yield from node_steps()


def noted_steps(file: Path) -> Iterator[Step]:
    """Rows of a CSV file."""
    with file.open(newline="") as opened:
        for row in csv.DictReader(opened):
            cells = {name: value for name, value in row.items() if value}
            job, predicted_gib = job_and_memory(cells)
            over = dict(pair.split("=") for pair in cells.get("over", "").split())
            facts: dict[str, Any] = {name: cells[name] for name in ROW_CELLS if name in cells}
            yield Step(
                row=ValidationRow(of="step", measured=float(cells["measured"]), **facts),
                job=job,
                over=job_and_memory({**cells, **over})[0] if over else None,
                memory_gib=float(cells["memory_gib"]) if "memory_gib" in cells else None,
                memory_predicted_gib=predicted_gib,
            )


def experiment_of(cells: Mapping[str, str]) -> Experiment:
    """The experiment of a row."""
    fields: dict[str, Any] = {name: cells[name] for name in Experiment.model_fields if name in cells}
    fields["name"] = "validation"
    if fields["model"] not in SHAPES:
        fields |= parse_overrides(read_model(fields["model"]).overrides)
    thinner = {"num_experts": int(cells["experts"])} if "experts" in cells else {}
    if "moe_layers" in cells:
        dense = int(cells.get("dense_layers", 0))
        thinner |= {"n_layers": dense + int(cells["moe_layers"]), "n_dense_layers": dense}
    if thinner:
        fields["shape"] = {**fields.get("shape", {}), **thinner}
    if fields["activation_checkpoint"] in IN_MEGATRON:  # the job gets the word itself, see job_and_memory
        fields["activation_checkpoint"] = "none"
    return parse(Experiment, fields)


def job_and_memory(cells: Mapping[str, str]) -> tuple[Job, float | None]:
    """The step of a row, and the GiB that the fullest rank reserves by the memory model, which knows TorchTitan."""
    experiment = experiment_of(cells)
    layout, node = check(experiment).layout, cluster_of(experiment.hardware).node
    assert layout is not None, f"{cells['source']}, {cells['name']}: {check(experiment).reasons}"
    job = job_of(experiment, layout, node, stack=_stack(cells["stack"], experiment))
    if not cells["stack"].startswith("megatron"):
        return job, max(stage.reserved_gib for stage in estimate(experiment, layout, node.gpu).by_stage)
    return replace(
        job,
        stages=megatron_stages(job.shape, len(job.stages), mtp="mtp" in cells),
        checkpointing=cells["activation_checkpoint"],
        # without a pipeline, TorchTitan takes the whole local batch at once and Megatron-LM accumulates gradients
        work=replace(job.work, tokens=experiment.microbatch * experiment.seq_len // experiment.cp),
        microbatches=experiment.local_batch // experiment.microbatch,
    ), None


def _stack(name: str, experiment: Experiment) -> Stack:
    base, *extras = name.split(" + ")
    if base == "megatron":
        return replace(
            MEGATRON,
            low_linears=True,
            launch_s=0.0 if "graphs" in extras else MEGATRON.launch_s,
            exchange_overlapped="overlap" in extras,
            expert_gemm="library" if {"graphs", "overlap"} <= set(extras) else MEGATRON.expert_gemm,
        )
    if base == "torchtitan":
        return titan(experiment)
    return replace(titan(experiment), name=base, permutation=STANDARD if experiment.ep_backend == "standard" else DENSE)


def megatron_stages(shape: ModelShape, number: int, *, mtp: bool = False) -> tuple[StageModules, ...]:
    """Layers of Megatron's pipeline stages.

    The stages between hold equally many, the first and the last share the rest; multi-token prediction is the last
    layer, and its second head makes the last stage a layer shorter.

    Example:
        >>> dsv3 = SHAPES["671B"].thin(dense_layers=3, moe_layers=59)
        >>> stages = megatron_stages(dsv3, 16, mtp=True)
        >>> [stage.dense_layers + stage.moe_layers for stage in stages][:2], stages[-1].moe_layers
        ([4, 4], 2)
    """
    heads = 1 + mtp
    if number == 1:
        return (StageModules(1, shape.n_dense_layers, shape.n_moe_layers, heads),)
    each = -(-shape.n_layers // number)
    if shape.n_layers == each * number:  # nothing is left out at either end
        counts = [each] * number
    else:
        ends = shape.n_layers - each * (number - 2)
        last = ends // 2 - (mtp and ends > 2)
        counts = [ends - last, *[each] * (number - 2), last]
    stages, done = [], 0
    for place, count in enumerate(counts):
        dense = max(0, min(shape.n_dense_layers - done, count))
        stages.append(StageModules(int(place == 0), dense, count - dense, heads * (place == number - 1)))
        done += count
    return tuple(stages)


# --- of this project -------------------------------------------------------------------------------------------------


def later_steps() -> Iterator[Step]:
    """The H100 and H200 arms of the later campaigns."""
    standard = json.loads((HERE.parent / "results" / "h100_standard_step.json").read_text())
    for row in standard["rows"]:
        yield own_step(
            H100_LATER,
            f"{row['shape']} bf16_standard, {row['routing']}",
            row["tps_median"],
            standard["date"][:10],
            thin_job(ALL_SHAPES[row["shape"]], {"routing": row["routing"]}),
            "benchmarks/results/h100_standard_step.json, 2 × H100, November 2026",
        )
    measured = load_measured(TWO_BY_TWO)
    assert measured.content is not None
    for result in arm_results(measured.rows):
        if result.retries or result.code not in (None, CODE) or "no-host-sync" in result.arm:  # see not_predicted.csv
            continue
        shape = ALL_SHAPES[result.shape]
        arm = {**arm_of(result.arm), "routing": result.routing, "activation_checkpoint": result.activation_checkpoint}
        job = thin_job(shape, arm, hardware=hardware_of(measured))
        name = f"two by two: {result.shape} {result.arm}, {result.routing}"
        if result.activation_checkpoint not in (shape.activation_checkpoint, "full+dispatch"):
            name += f", {checkpointing_words(result.activation_checkpoint)}"
        if result.code:
            name += f", {result.code}"
        job = job if result.code else as_in_november(job)
        yield own_step(H100_LATER, name, result.tps, measured.content["date"][:10], job, measured.stamp)


def node_steps() -> Iterator[Step]:
    """Four H200s of one node, as the model says now; what was predicted before they ran is in the table too."""
    measured = load_measured(FULL_NODE)
    assert measured.content is not None
    hardware = hardware_of(measured)
    for place, result in node_results(measured, Measurement(name=TWO_BY_TWO, content=None)).items():
        job = node_job(ALL_SHAPES[place.shape], place.arm, place.routing, ep=place.ep, hardware=hardware)
        name = f"{place.shape} {place.arm}, {place.routing}, EP {place.ep}"
        yield own_step(NOW, name, result.tps, measured.content["date"][:10], as_in_november(job), measured.stamp)
