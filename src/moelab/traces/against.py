"""A measured step beside the predicted one, and a calibration that is read off it.

The parts are the projection's own. What the projection calls *host and waiting* is the GPU's idle time; barriers that
ranks meet at only because they are traced are left out. A constant is fitted where the model's part has to meet the
measured one; a part without a constant stays as it is predicted, and so does what the ranks' imbalance costs, which one
step does not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from moelab.data import read_yaml
from moelab.errors import BadInput, Refused
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import parse
from moelab.hardware import cluster_of, known_gpu
from moelab.layout import check
from moelab.model import gemms, shape_for
from moelab.planning.project import Projection, aligned, project
from moelab.planning.time.calibration import CALIBRATION, Calibration, value_that_meets
from moelab.planning.time.gemm import is_blackwell
from moelab.planning.time.job import CATEGORIES, INDEX, PASS_INDEX, Job
from moelab.planning.time.step import module_times, stage_times, step_parts_s
from moelab.traces.categories import STRAGGLERS
from moelab.traces.explanation import Explanation, explain
from moelab.traces.trace import UNNAMED_GPU

MEANINGS: Mapping[str, Mapping[str, str]] = read_yaml("differences.yaml")
"""By part: what ``more`` time than predicted usually means, what to ``do``, and what ``less`` means."""
UNPREDICTED = {
    "more": "the projection has no such part",
    "do": "look at the kernels of that part in moelab explain TRACE",
    "less": "the traced step has no such part",
}


class Row(NamedTuple):
    """One part of a step, ms."""

    part: str
    measured_ms: float
    predicted_ms: float

    @property
    def difference_ms(self) -> float:
        """Measured beyond predicted."""
        return self.measured_ms - self.predicted_ms


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured step beside the predicted one; ``rows`` are its parts, the largest disagreement first."""

    projection: Projection
    rows: tuple[Row, ...]
    left_out_ms: float
    longest_gap: str

    @property
    def sums_ms(self) -> tuple[float, float]:
        """Of the measured parts, and of the predicted ones."""
        return sum(row.measured_ms for row in self.rows), sum(row.predicted_ms for row in self.rows)

    @property
    def error(self) -> float:
        """Of the predicted step, as a part of the measured one."""
        measured, predicted = self.sums_ms
        return predicted / measured - 1

    @property
    def sentence(self) -> str:
        """The largest disagreement, what it usually means and what to do."""
        measured, predicted = self.sums_ms
        worst = self.rows[0]
        meaning, more = MEANINGS.get(worst.part, UNPREDICTED), worst.difference_ms > 0
        words = f"usual cause: {meaning['more'] if more else meaning['less']}"
        if more:
            words += f"; what to do: {meaning['do']}"
        if more and worst.part == "host and waiting":
            words += f"; the longest gap here: {self.longest_gap}"
        return (
            f"measured {measured:.1f} ms, predicted {predicted:.1f} ms ({self.error:+.1%}); the largest difference is "
            f"in {worst.part}: {worst.measured_ms:.1f} ms, {abs(worst.difference_ms):.1f} ms "
            f"{'more' if more else 'less'} than predicted; {words}"
        )

    def to_json(self) -> dict[str, Any]:
        """Predicted parts and the comparison."""
        return {
            "predicted_ms": {part: 1e3 * seconds for part, seconds in self.projection.breakdown_s.items()},
            "predicted_step_ms": 1e3 * self.projection.step_time_s,
            "comparison": [{**row._asdict(), "difference_ms": row.difference_ms} for row in self.rows],
            "left_out_ms": self.left_out_ms,
            "sentence": self.sentence,
        }


def comparison_text(compared: Comparison) -> str:
    """A comparison for a terminal."""
    rows = [("part", "measured", "predicted", "difference")]
    rows += [
        (row.part, f"{row.measured_ms:.1f} ms", f"{row.predicted_ms:.1f} ms", f"{row.difference_ms:+.1f} ms")
        for row in compared.rows
    ]
    barriers = f"\nleft out: {compared.left_out_ms:.1f} ms of barriers at which ranks meet only because they are traced"
    return "\n".join([*aligned(rows), "", compared.sentence + (barriers if compared.left_out_ms else "")])


def measured_parts_ms(explanation: Explanation) -> dict[str, float]:
    """One step's parts by the projection's names; idle time is *host and waiting*, barriers of tracing are left out."""
    steps = explanation.step_count
    parts = {name: ms / steps for name, ms in explanation.parts_ms.items() if not name.startswith("idle: ")}
    parts["host and waiting"] = explanation.idle_ms / steps  # whatever its cause: the projection has one part for it
    if STRAGGLERS in parts:
        parts[STRAGGLERS] -= explanation.tracing_ms / steps
    return parts


def compare(explanation: Explanation, experiment: Experiment, calibration: Calibration = CALIBRATION) -> Comparison:
    """Hold a measured step against the projection of the experiment that it is of.

    Args:
        explanation: of a trace on GPUs.
        experiment: what ran; its hardware has to be that of the trace.
        calibration: constants of the model.

    Raises:
        BadInput: if the trace is of a CPU, of another GPU than the experiment's, or of another model.
        Refused: if the experiment cannot be projected.
    """
    _require_same_step(explanation, experiment)
    projection = project(experiment, calibration=calibration)
    measured = measured_parts_ms(explanation)
    names = dict.fromkeys((*CATEGORIES, *measured))  # the projection's parts, then those that only the trace has
    rows = [Row(name, measured.get(name, 0.0), 1e3 * projection.breakdown_s.get(name, 0.0)) for name in names]
    rows = [row for row in rows if row.measured_ms or row.predicted_ms]
    rows.sort(key=lambda row: -abs(row.difference_ms))
    gap = explanation.gaps[0] if explanation.gaps else None
    return Comparison(
        projection=projection,
        rows=tuple(rows),
        left_out_ms=explanation.tracing_ms,
        longest_gap=f"{gap.cause}, {gap.where}, {gap.idle_ms:.1f} ms" if gap else "none",
    )


def _require_same_step(explanation: Explanation, experiment: Experiment) -> None:
    """Check what tells that a trace is of another step, which would blame some part for the difference."""
    # By the catalogue's names: a driver's has the memory's size and the form factor in it.
    gpu, traced = cluster_of(experiment.hardware).node.gpu.name, known_gpu(explanation.gpu or "")
    if explanation.gpu is None:
        raise Refused("a projection is of GPUs, and the trace has no GPU kernels: there is nothing to compare")
    if explanation.gpu != UNNAMED_GPU and gpu != (traced.name if traced else explanation.gpu):
        raise BadInput(
            f"the trace is of {explanation.gpu}, the experiment's hardware ({experiment.hardware}) has {gpu}; "
            "set hardware to the node that was traced"
        )
    shape, layout, layers = shape_for(experiment), check(experiment).layout, len(explanation.layers_ms)
    if layers and layout:  # without FSDP no layer is named; an illegal layout is refused by the projection
        of_stage = [sum(name.startswith("layers.") for name in names) for names in layout.stages]
        counts = sorted({sum(of_stage[stage] for stage in stages) for stages in layout.stages_of_rank})
        if layers not in counts:
            owner = "the experiment's model has" if layout.pp == 1 else "ranks of the experiment's pipeline have"
            raise BadInput(
                f"the trace has {layers} layers, {owner} {' or '.join(map(str, counts))}: the two steps are not of the "
                "same model; give the file of the run that was traced, or set shape.n_layers"
            )
    shapes = [(one.op, one.shape or "") for one in explanation.products]
    # Whatever the batch and the parallelism, products of every layer have the model's width as one of their sides.
    sides = {int(side) for _, operands in shapes for side in re.findall(r"\d+", operands)}
    if sides and shape.dim not in sides:
        raise BadInput(
            f"the trace is of another model than the experiment, whose width is {shape.dim}: none of its products has "
            f"a side of {shape.dim}; give the file of the run that was traced"
        )
    local = shape.num_experts // experiment.ep
    # A grouped product's weights are (experts, K, N).
    weights = [
        found for op, operands in shapes if "grouped" in op for found in re.findall(r"\[(\d+), \d+, \d+\]", operands)
    ]
    experts = set(map(int, weights))
    if experts - {local}:
        raise BadInput(
            f"the trace multiplies by {max(experts)} experts on this rank, the experiment has {local} "
            f"({shape.num_experts} over ep {experiment.ep}); set shape.num_experts or ep to what was traced"
        )


class GemmRate(NamedTuple):
    """What products of one part reach in one pass of a step."""

    part: str
    phase: str
    ms: float
    tflops: float


def gemm_rates(explanation: Explanation, experiment: Experiment) -> list[GemmRate]:
    """FLOP/s of a traced step's products by part and pass: the model's work, with balanced routing, over their time.

    The operands' shapes need not be recorded. Recomputation, of which checkpointing decides what it repeats, is left
    out; of a pipeline, whose ranks have different work, nothing is known.
    """
    if experiment.pp > 1:
        return []
    tokens = experiment.local_batch * experiment.seq_len // experiment.cp * explanation.step_count
    work = gemms(shape_for(experiment), tokens, tp=experiment.tp, ep=experiment.ep)
    rates = []
    for part in ("expert GEMMs", "other GEMMs"):
        for phase in ("forward", "backward"):
            ms = explanation.kernels_ms.get(part, {}).get(phase, 0.0)
            flops = sum(
                one.flops
                for one in work
                if (one.part == "routed experts") == (part == "expert GEMMs")
                and (one.direction == "forward") == (phase == "forward")
            )
            if ms:  # a part without kernels, as under another name, has no rate
                rates.append(GemmRate(part, phase, ms, flops / ms / 1e9))  # operations a ms are 1e-9 TFLOP/s
    return rates


def packaged_steps() -> dict[str, tuple[Explanation, Experiment]]:
    """The traced steps that come with the package, explained, and what ran; by the name that a figure shows."""
    folder, packaged = Path(str(resources.files("moelab") / "data" / "measured")), read_yaml("traced_steps.yaml")
    shared, shape = packaged["experiment"], packaged["shape"]
    return {
        step: (
            explain([folder / row["trace"]]),
            parse(Experiment, {**shared, **row["experiment"], "shape": {**shape, **row["shape"]}}),
        )
        for step, row in packaged["steps"].items()
    }


def fit(explanation: Explanation, experiment: Experiment) -> dict[str, float]:
    """Constants with which the model meets a traced step, part by part.

    Args:
        explanation: of a step on GPUs, or of several, whose mean is met.
        experiment: what ran.

    Returns:
        Values for :func:`moelab.planning.time.calibration.with_values`; none for a part that no value meets.

    Raises:
        BadInput: as :func:`compare`.
        Refused: if the experiment cannot be projected.
    """
    job = compare(explanation, experiment).projection.job  # refuses what cannot be held against it
    solved: dict[str, float] = {}  # each is found with those before it in place, which its part may depend on
    for name, seconds, predict in _targets(explanation, experiment, job):
        value = value_that_meets(name, seconds, predict, solved)
        if value is not None:
            solved[name] = value
    return solved


Predict = Callable[[Calibration], float]


def _targets(explanation: Explanation, experiment: Experiment, job: Job) -> list[tuple[str, float, Predict]]:
    """Constants in the order in which they are fitted, with a step's seconds to meet and how they are predicted."""
    per_step = 1e-3 / explanation.step_count
    measured = {name: ms / 1e3 for name, ms in measured_parts_ms(explanation).items()}
    blackwell, low = is_blackwell(job.node.gpu), experiment.precision is not Precision.BF16 and not job.emulated
    kind = "blackwell" if blackwell else "hopper"  # each has fits of its own
    attention = explanation.kernels_ms.get("attention", {})
    standard = job.work.backend is EPBackend.STANDARD
    own_casts = job.emulated or job.work.one_pass_experts  # as fast as a copy, which no constant of their own says

    def target(constant: str, *names: str) -> tuple[str, float, Predict]:
        """A constant that is to meet some parts together."""
        return (
            constant,
            sum(measured.get(name, 0.0) for name in names),
            lambda calibration: sum(step_parts_s(job, calibration)[name] for name in names),
        )

    # Of the stages alone: no bubble, and nothing that comes once a step.
    def in_stages(part: str, *passes: str) -> Predict:
        rows = [PASS_INDEX[name] for name in passes or PASS_INDEX]  # type: ignore[index]
        return lambda calibration: job.microbatches * float(
            sum(one[rows, INDEX[part]].sum() for one in stage_times(job, module_times(job, calibration)))
        )

    products = (  # BF16 has one constant on Hopper, whatever is multiplied
        [target("hopper_gemm", "other GEMMs", "expert GEMMs")]
        if not low and not blackwell
        else [
            target(f"{kind}_gemm", "other GEMMs"),
            target(f"{kind}_low" if low else "blackwell_grouped", "expert GEMMs"),
        ]
    )
    wires = (
        [target("nvlink", "FSDP collectives", "all-to-all")]
        if standard
        else [target("nvlink", "FSDP collectives"), target("deepep_s", "all-to-all")]
    )
    return [
        # DeepEP brings rows into order itself, so there is hardly a copy of which the rate could be read off
        *([target("row_copy", "permutation and padding")] if standard else ()),
        *products,
        ("flex_forward", (attention.get("forward", 0.0) + attention.get("recompute", 0.0)) * per_step,
         in_stages("attention", "forward", "recompute")),
        ("flex_backward", attention.get("backward", 0.0) * per_step, in_stages("attention", "dgrad", "wgrad")),
        *(() if own_casts else [target(f"{kind}_cast", "quantisation")]),
        *wires,
        target("optimizer_bytes", "optimizer"),
        target("fsdp_copy_bytes", "memory-bound"),
        ("sync_s", explanation.idle_in_layers_ms * per_step, in_stages("host and waiting")),
        # last, because it takes what sync_s leaves of the same part
        target("step_s", "host and waiting"),
    ]  # fmt: skip
