"""A measured step beside the predicted one, and a calibration that is read off it.

The parts are the projection's own. What the projection calls *host and waiting* is the GPU's idle time; barriers that
ranks meet at only because they are traced are left out. A constant is fitted where the model's part has to meet the
measured one; a part without a constant stays as it is predicted, and so does what the ranks' imbalance costs, which one
step does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from moelab.data import read_yaml
from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment, Precision
from moelab.experiment_file import parse
from moelab.explain.explanation import Explanation, explain
from moelab.hardware import cluster_of, known_gpu
from moelab.model import gemms, shape_for
from moelab.projection.calibration import CALIBRATION, Calibration, with_values
from moelab.projection.gemm import is_blackwell
from moelab.projection.job import CATEGORIES, INDEX, PASS_INDEX, Job
from moelab.projection.project import Projection, aligned, project
from moelab.projection.step import module_times, stage_times, step_time

MEANINGS = {
    "expert GEMMs": (
        "the experts' rows are uneven, padded, or too few for a tile",
        "compare tokens per expert with an even share, and the TFLOP/s of the grouped products with notebook 02",
        "experts got fewer rows than assumed, or multiply in a lower precision",
    ),
    "other GEMMs": (
        "products are small, or the GPU runs below its usual clock",
        "look at the clock under load (moelab doctor), and at the local batch",
        "linears multiply in a lower precision than the experiment says",
    ),
    "attention": (
        "documents are longer than assumed, so fewer blocks of the mask are empty, or another kernel runs",
        "check the dataset's document lengths and which attention kernel the trace names",
        "documents are shorter than assumed, or a faster attention kernel runs",
    ),
    "quantisation": (
        "casts are not fused, or the model is not compiled",
        "compile the model; see the casts' GB/s in notebook 01",
        "casts are fused into other kernels, which then count as memory-bound",
    ),
    "permutation and padding": (
        "tokens are sorted and padded in several passes, not fused",
        "compile the model, or let DeepEP write rows in order",
        "rows are brought into order by the exchange's own kernels",
    ),
    "all-to-all": (
        "a link is slower than its kind, or ranks arrive late: an all-to-all waits for the last one",
        "compare the waiting of the ranks (give the traces of all), and run moelab doctor for the links",
        "part of the exchange runs beside compute",
    ),
    "memory-bound": (
        "elementwise kernels are not fused, or copies of FSDP are larger than assumed",
        "compile the model; look for copies among the longest kernels",
        "more is fused than assumed",
    ),
    "FSDP collectives": (
        "gathers and scatters come too late to hide, or share a link with the exchange",
        "look at the timeline for gathers that compute waits for; prefetch, or reshard less",
        "compute hides more of them than assumed",
    ),
    "optimizer": (
        "the optimizer is not fused, or clips gradients tensor by tensor",
        "use the fused optimizer",
        "fewer parameters are updated than assumed, or its kernels count as memory-bound",
    ),
    "host and waiting": (
        "the GPU runs dry: the host launches too slowly, or waits for the GPU and then starts without a lead",
        "look at the causes of idle time; compile the model, avoid .item() and pageable copies, or load data ahead",
        "the host keeps ahead of the GPU better than assumed",
    ),
    "imbalance and stragglers": (
        "a rank is late, and the others wait for it at a barrier or a small all-reduce",
        "give the traces of all ranks: the one that waits least is late; a profiler that starts late looks the same",
        "ranks are closer together than assumed",
    ),
}
"""By part: what more time than predicted usually means and what to do, and what less means."""


@dataclass(frozen=True, kw_only=True)
class Row:
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
        beyond, do, below = MEANINGS.get(
            worst.part, ("the projection has no such part", "see notes", "not in this step")
        )
        more = worst.difference_ms > 0
        words = f"usually {beyond}; {do}" if more else f"usually {below}"
        if more and worst.part == "host and waiting":
            words += f"; longest here: {self.longest_gap}"
        return (
            f"measured {measured:.1f} ms, predicted {predicted:.1f} ms ({self.error:+.1%}); most in "
            f"{worst.part}: {worst.measured_ms:.1f} ms, {abs(worst.difference_ms):.1f} ms "
            f"{'more' if more else 'less'} than predicted: {words}"
        )

    def to_json(self) -> dict[str, Any]:
        """Predicted parts and the comparison."""
        return {
            "predicted_ms": {part: 1e3 * seconds for part, seconds in self.projection.breakdown_s.items()},
            "predicted_step_ms": 1e3 * self.projection.step_time_s,
            "comparison": [{**vars(row), "difference_ms": row.difference_ms} for row in self.rows],
            "left_out_ms": self.left_out_ms,
            "sentence": self.sentence,
        }


def comparison_text(found: Comparison) -> str:
    """A comparison for a terminal."""
    rows = [("part", "measured", "predicted", "difference")]
    rows += [
        (row.part, f"{row.measured_ms:.1f} ms", f"{row.predicted_ms:.1f} ms", f"{row.difference_ms:+.1f} ms")
        for row in found.rows
    ]
    left_out = (
        f"; {found.left_out_ms:.1f} ms of barriers around the traced step are left out" if found.left_out_ms else ""
    )
    return "\n".join([*aligned(rows), "", found.sentence + left_out])


def measured_parts_ms(explanation: Explanation) -> dict[str, float]:
    """One step's parts by the projection's names; idle time is *host and waiting*, barriers of tracing are left out."""
    steps = max(1, len(explanation.steps))
    parts = {name: ms / steps for name, ms in explanation.parts_ms.items() if not name.startswith("idle: ")}
    parts["host and waiting"] = explanation.idle_ms / steps
    if "imbalance and stragglers" in parts:
        parts["imbalance and stragglers"] = max(0.0, parts["imbalance and stragglers"] - explanation.edge_ms / steps)
    return parts


def compare(explanation: Explanation, experiment: Experiment, calibration: Calibration = CALIBRATION) -> Comparison:
    """Hold a measured step against the projection of the experiment that it is of.

    Args:
        explanation: of a trace on GPUs.
        experiment: what ran; its hardware has to be that of the trace.
        calibration: constants of the model.

    Raises:
        BadInput: if the trace is of a CPU, or of another GPU than the experiment's.
        Refused: if the experiment cannot be projected.
    """
    gpu, traced = cluster_of(experiment.hardware).node.gpu.name, known_gpu(explanation.gpu or "")
    if explanation.gpu is None:
        raise BadInput("a trace without GPU kernels is not held against a projection, which is of GPUs")
    if gpu != (traced.name if traced else explanation.gpu):
        raise BadInput(
            f"the trace is of {explanation.gpu}, the experiment's hardware ({experiment.hardware}) has {gpu}; "
            "set hardware to the node that was traced"
        )
    projection = project(experiment, calibration=calibration)
    measured = measured_parts_ms(explanation)
    names = dict.fromkeys((*CATEGORIES, *measured))
    rows = [
        Row(part=name, measured_ms=measured.get(name, 0.0), predicted_ms=1e3 * projection.breakdown_s.get(name, 0.0))
        for name in names
    ]
    rows = [row for row in rows if row.measured_ms or row.predicted_ms]
    rows.sort(key=lambda row: -abs(row.difference_ms))
    gap = explanation.gaps[0] if explanation.gaps else None
    return Comparison(
        projection=projection,
        rows=tuple(rows),
        left_out_ms=explanation.edge_ms,
        longest_gap=f"{gap.cause}, {gap.where}, {gap.idle_ms:.1f} ms" if gap else "none",
    )


@dataclass(frozen=True, kw_only=True)
class GemmRate:
    """What products of one part reach in one pass of a step."""

    part: str
    phase: str
    ms: float
    tflops: float


def gemm_rates(explanation: Explanation, experiment: Experiment) -> list[GemmRate]:
    """FLOP/s of a traced step's products by part and pass: the model's work, with balanced routing, over their time.

    The operands' shapes need not be recorded. Recomputation, of which checkpointing decides what it repeats, is left
    out; of a pipeline, whose ranks have different work, nothing is known.

    Args:
        explanation: of a trace on GPUs.
        experiment: what ran.
    """
    if experiment.pp > 1:
        return []
    tokens = experiment.local_batch * experiment.seq_len // experiment.cp * max(1, len(explanation.steps))
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
            if ms:
                rates.append(GemmRate(part=part, phase=phase, ms=ms, tflops=flops / ms / 1e9))
    return rates


def packaged_steps() -> dict[str, tuple[Explanation, Experiment]]:
    """The traced steps that come with the package, explained, and what ran; by the name that a figure shows."""
    shared = {"model": "671B", "compile": "model+loss", "routing": "random_balanced", "hardware": "h200_node"}
    sizes = {"seq_len": 4096, "local_batch": 2, "microbatch": 2}
    shape = {"n_layers": 5, "n_dense_layers": 0, "expert_groups": 1, "limited_groups": 1}
    folder = Path(str(resources.files("moelab") / "data" / "measured"))
    return {
        row["step"]: (
            explain([folder / row["trace"]]),
            parse(Experiment, {**shared, **sizes, "shape": {**shape, **row["shape"]}, **row["experiment"]}),
        )
        for row in read_yaml("traced_steps.yaml")
    }


def fit(explanation: Explanation, experiment: Experiment) -> dict[str, float]:
    """Constants with which the model meets a traced step, part by part.

    Args:
        explanation: of one step on GPUs.
        experiment: what ran.

    Returns:
        Values for :func:`moelab.projection.calibration.with_values`; none for a part that no value meets.

    Raises:
        BadInput: as :func:`compare`.
        Refused: if the experiment cannot be projected.
    """
    job = compare(explanation, experiment).projection.job  # refuses what cannot be held against it
    found: dict[str, float] = {}
    for name, seconds, predict in _targets(explanation, experiment, job):
        value = _meeting(name, seconds, predict, found)
        if value is not None:
            found[name] = value
    return found


Predict = Callable[[Calibration], float]


def _targets(explanation: Explanation, experiment: Experiment, job: Job) -> list[tuple[str, float, Predict]]:
    """Constants in the order in which they are fitted, with the seconds to meet and how they are predicted."""
    measured = {name: ms / 1e3 for name, ms in measured_parts_ms(explanation).items()}
    blackwell, low = is_blackwell(job.node.gpu), experiment.precision is not Precision.BF16 and not job.emulated
    kind = "blackwell" if blackwell else "hopper"
    attention = explanation.kernels_ms.get("attention", {})
    exchange = "nccl_nvlink" if job.work.backend is EPBackend.STANDARD else "deepep_s"
    one_pass = experiment.precision is Precision.FP8 and job.work.one_pass_experts
    cast = "emulated_cast" if job.emulated else "one_pass_cast" if one_pass else f"{kind}_cast"

    def part(name: str) -> Predict:
        return lambda calibration: step_time(job, calibration).parts_s[name]

    def passes(*names: str) -> Predict:
        rows = [PASS_INDEX[name] for name in names]  # type: ignore[index]
        return lambda calibration: job.microbatches * float(
            sum(one[rows, INDEX["attention"]].sum() for one in stage_times(job, module_times(job, calibration)))
        )

    def of_layers(calibration: Calibration) -> float:
        return job.microbatches * float(
            sum(one[:, INDEX["host and waiting"]].sum() for one in stage_times(job, module_times(job, calibration)))
        )

    return [
        (f"{kind}_gemm", measured.get("other GEMMs", 0.0), part("other GEMMs")),
        (f"{kind}_low" if low else f"{kind}_grouped", measured.get("expert GEMMs", 0.0), part("expert GEMMs")),
        ("flex_forward", (attention.get("forward", 0.0) + attention.get("recompute", 0.0)) / 1e3,
         passes("forward", "recompute")),
        ("flex_backward", attention.get("backward", 0.0) / 1e3, passes("dgrad", "wgrad")),
        (cast, measured.get("quantisation", 0.0), part("quantisation")),
        (exchange, measured.get("all-to-all", 0.0), part("all-to-all")),
        ("nccl_ring", measured.get("FSDP collectives", 0.0), part("FSDP collectives")),
        ("optimizer_bytes", measured.get("optimizer", 0.0), part("optimizer")),
        ("fsdp_copy_bytes", measured.get("memory-bound", 0.0), part("memory-bound")),
        ("sync_s", explanation.idle_in_layers_ms / 1e3, of_layers),
        ("step_s", measured["host and waiting"], part("host and waiting")),
    ]  # fmt: skip


def _meeting(name: str, seconds: float, predict: Predict, found: Mapping[str, float]) -> float | None:
    """The value of a constant with which a prediction meets a time, from a twentieth to 20 times its own; else None."""
    usual = float(getattr(CALIBRATION, name))
    low, high = (usual / 20, usual * 20) if usual else (1e-9, 1.0)

    def late(value: float) -> float:
        return predict(with_values(**{**found, name: value})) - seconds

    if seconds <= 0 or late(low) * late(high) > 0:
        return None
    return float(brentq(late, low, high, xtol=1e-9 * high))
