"""A side of a report: the runs of one arm, or one run from elsewhere. And in what two sides differ.

A verdict and a gain are of two arms alone only where all else is the same, so what differs is always said. What is not
known of a run, such as the machine of one whose ``environment.json`` is damaged, is NaN or missing here, and no
difference; it is named where the run is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moelab.experiment import Experiment
from moelab.hardware import known_gpu
from moelab.judge.convergence import first_final_step
from moelab.model import count_parameters, flops_per_token, shape_for
from moelab.model.shape import SHAPES, ModelShape
from moelab.runs.collect import WARMUP_STEPS, Collected
from moelab.runs.settings import Settings, spread
from moelab.runs.side_files import Environment
from moelab.runs.status import State
from moelab.runs.table import joined_rows, merge_segments, throughput_rows

Array = NDArray[np.float64]

ARM_FIELDS = frozenset(
    ("precision", "mxfp8_kernels", "quantize", "wgrad", "ep_backend", "ep_kernels", "dispatch_precision", "routing")
)
"""What sets two arms apart, beside the seed; every other field should be the same in both."""
OF_A_TOKEN = frozenset(("model", "flavor", "parameters", "seq_len"))
"""Settings that say how much is computed for a token: with another, tokens/s are of other work."""
OF_THE_LOSS = OF_A_TOKEN | {"tokenizer", "tokenizer_path", "dataset", "global_batch", "optimizer", "lr"}
OF_THE_LOSS |= {"warmup_steps", "steps"}
"""Settings beside the arms' own that a loss at a step depends on; in a configuration of W&B the last part of a name."""
NOT_FOR_SPEED = frozenset({"lr", "warmup_steps", "steps", "dataset"})
"""Settings that a step's time does not depend on."""
SPEED_PACKAGES = ("torch", "nvidia-nccl-cu13", "torchtitan", "torchao", "triton", "deep_ep")
LOSS_PACKAGES = ("torch", "torchtitan", "torchao", "triton")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a report, with what its runs did."""

    name: str  # unlike any other side's: the arm's, or of runs from elsewhere the label
    label: str  # the same in words
    attempted: tuple[Collected, ...]  # one run for each seed, however it ended; one alone from elsewhere
    settings: Settings = field(default_factory=Settings)
    experiment: Experiment | None = None  # of one of its runs; None from elsewhere
    diverged_seeds: Mapping[int, str] = field(default_factory=dict)  # with the reason
    lost_seeds: Mapping[int, str] = field(default_factory=dict)  # that it should have and has no loss of otherwise
    replaced: tuple[Collected, ...] = ()  # attempts at its seeds that are not judged, as others are

    @cached_property
    def finished(self) -> list[Collected]:
        """Those that trained every step; a log from elsewhere does not say that it did."""
        return [run for run in self.attempted if run.finished]

    @property
    def runs(self) -> tuple[Collected, ...]:
        """Those that are shown: the finished ones, or all where none is."""
        return tuple(self.finished) or self.attempted

    @property
    def has_result(self) -> bool:
        """Whether a seed of it can be judged, a divergence being a result."""
        return bool(self.finished or self.diverged_seeds)

    @property
    def seeds(self) -> set[int]:
        """Seeds that it has or should have."""
        return {*(run.seed for run in self.runs if run.seed is not None), *self.diverged_seeds, *self.lost_seeds}

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the runs that are shown, with ``name`` as the arm; a run of an unknown seed counts as seed 0."""
        rows = joined_rows(self.runs)
        arm = pd.array([self.name] * len(rows), dtype="string")
        return rows.assign(arm=arm, seed=rows["seed"].fillna(0))

    @property
    def emulated(self) -> bool:
        """Whether MXFP8 kernels or DeepEP were emulated in it."""
        if self.experiment is None:
            return self.settings.values.get("mxfp8_kernels") == "emulated"
        return any(run.emulates_products or run.emulates_deepep for run in self.attempted)

    @property
    def on_cpu(self) -> bool:
        """Whether it is known that ranks of it were processes on a CPU."""
        known = [run.environment for run in self.runs if run.environment is not None]
        # Only a log of ranks on a CPU names a processor.
        return any(one.on_cpu for one in known) or "processor" in self.settings.values

    @property
    def last_step(self) -> int:
        """Last step that any of its runs logged."""
        return max(run.last_step for run in self.runs)

    def name_of(self, run: Collected) -> str:
        """What one of its runs is called."""
        return self.label if run.seed is None else f"{self.label}, seed {run.seed}"

    @property
    def state(self) -> str:
        """How its runs ended; logs from elsewhere do not say."""
        # Sets: eight seeds that failed alike fail once.
        states = sorted({run.status.state for run in self.runs})
        reasons = sorted({run.status.reason for run in self.runs if run.status.reason})
        words = ", ".join("not recorded" if state is State.UNKNOWN else str(state) for state in states)
        return f"{words}: {'; '.join(reasons)}" if reasons else words

    @property
    def diverged(self) -> bool:
        """Whether the loss of one of the shown runs is not finite."""
        return any(run.diverged for run in self.runs)

    @property
    def unfinished(self) -> str:
        """In which way its last loss is none: it diverged, or ended before its planned steps; empty if neither."""
        ends = Counter(words for run in self.runs if (words := self._end_of(run)))
        many = len(self.runs) > 1
        reasons = [f"{words}, {count} of {len(self.runs)} seeds" if many else words for words, count in ends.items()]
        return f"{self.label} {'; '.join(reasons)}" if reasons else ""

    def _end_of(self, run: Collected) -> str:
        if run.diverged:
            return f"diverged: {run.diverged}"
        from_elsewhere, steps = run.steps_planned is None, self.settings.values.get("steps", "")
        planned = run.steps_planned or (int(steps) if steps.isdecimal() else 0)
        # A log of every tenth step ends up to nine steps before the last.
        if run.finished or (from_elsewhere and run.last_step + self.interval_steps > planned):
            return ""
        verb = "is at" if run.status.state is State.RUNNING else "ended at"
        state = "" if from_elsewhere else f" ({run.status.reason or run.status.state})"
        return f"{verb} step {run.last_step} of {planned}{state}"

    # Loss

    def final_nats(self, final_fraction: float) -> float:
        """Mean loss over the last part of its own steps; NaN if a run diverged."""
        if self.diverged:
            return math.nan
        rows = merge_segments(self.table).dropna(subset=["loss"])
        return float(rows.loc[rows["step"] >= first_final_step(self.last_step, final_fraction), "loss"].mean())

    @property
    def held_out_nats(self) -> float:
        """Mean over runs of the held-out loss at the last validated step."""
        known = [run.validation_loss for run in self.runs if math.isfinite(run.validation_loss)]
        return float(np.mean(known)) if known else math.nan

    @cached_property
    def training_means(self) -> pd.DataFrame:
        """``grad_norm`` and ``lr`` over steps, means over the runs; a norm that is not finite does not count."""
        rows = merge_segments(self.table).replace([math.inf, -math.inf], math.nan)
        return rows.groupby("step")[["grad_norm", "lr"]].mean()

    # Speed and memory

    @cached_property
    def steps_logged(self) -> int:
        """How many different steps its runs logged."""
        return int(self.table["step"].nunique())

    @cached_property
    def interval_steps(self) -> int:
        """Steps from one that was logged to the next."""
        steps = np.unique(self.table["step"].to_numpy())
        # The median: TorchTitan logs step 1 too, whatever the interval.
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 1

    @property
    def warmup_steps(self) -> int:
        """Steps that do not count for speed; where not every step was logged, all before the second that was."""
        # The first logged step is then a mean over many, the compilation among them.
        return max(WARMUP_STEPS, self.interval_steps if self.interval_steps > 1 else 0)

    @cached_property
    def tps(self) -> Array:
        """Tokens per second per GPU of each step that counts, ``(steps,)``."""
        return throughput_rows(self.table, warmup_steps=self.warmup_steps)["tps"].to_numpy(dtype=float)

    @cached_property
    def step_time_s(self) -> Array:
        """Seconds from one logged step to the next, divided by the steps between them, ``(steps,)``."""
        rows = merge_segments(self.table)
        between = rows.groupby(["run", "segment"])[["step", "time"]].diff()
        traced = [(run.run, step) for run in self.runs for step in run.slowed_steps]
        is_slowed = pd.MultiIndex.from_frame(rows[["run", "step"]]).isin(traced) if traced else False
        seconds = (between["time"] / between["step"])[(rows["step"] > self.warmup_steps) & ~is_slowed].dropna()
        # A clock of whole seconds says nothing of shorter steps: most would take none, and the others too long.
        if (seconds == 0).mean() > 0.01:
            return np.array([])
        return seconds[seconds > 0].to_numpy(dtype=float)  # a clock that was set back

    @property
    def memory_gib(self) -> float:
        """Largest memory that a rank reserved."""
        return float(self.table["memory_gib"].max())

    @property
    def memory_percent(self) -> float:
        """The same, of what the GPU has."""
        return float(self.table["memory_pct"].max())

    @property
    def mfu_logged_percent(self) -> float:
        """Median of the MFU that the run itself logged; TorchTitan logs none for quantised products."""
        return median(throughput_rows(self.table, warmup_steps=self.warmup_steps)["mfu"].dropna().to_numpy(dtype=float))

    def mfu_percent(self, *, causal: bool) -> float:
        """MFU at the median throughput, by TorchTitan's count of attention or the causal one.

        Derived: ``tps · FLOPs per token / peak FLOP/s``, of the datasheet's dense BF16 peak of the GPU's exact model.
        The peak that a log names is not taken: TorchTitan 0.3.0 goes by parts of names, and by an A100's 312 TFLOP/s
        where it knows none. NaN without a GPU whose peak is known, a sequence length, or a model whose shape is known.
        """
        gpu, shape = known_gpu(self.settings.values.get("gpu", "")), self._shape
        seq_len = self.settings.values.get("seq_len", "")
        if shape is None or gpu is None or gpu.bf16_tflops is None or not seq_len.isdecimal():
            return math.nan
        peak_flops = 1e12 * gpu.bf16_tflops.value  # also for MXFP8 and FP8, so that arms can be compared
        return 100.0 * median(self.tps) * flops_per_token(shape, int(seq_len), causal=causal) / peak_flops

    @property
    def _shape(self) -> ModelShape | None:
        """The experiment's model; from elsewhere, the one with as many parameters and no other name."""
        if self.experiment is not None:
            return shape_for(self.experiment)
        known = self.settings.values
        named = [shape for shape in SHAPES.values() if known.get("model", shape.name) == shape.name]
        # A log that gives its model another name makes a match by parameters a guess.
        return next((shape for shape in named if str(count_parameters(shape).total) == known.get("parameters")), None)


def median(values: Array) -> float:
    """Median, or NaN of nothing."""
    return float(np.median(values)) if len(values) else math.nan


def quartiles(values: Array) -> tuple[float, float]:
    """First and third quartile, NaN of nothing."""
    low, high = np.percentile(values, [25, 75]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)


# Settings


def differing_values(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all sides: name to one value a side, None where it is not known.

    What only some sides say counts where others could have said it, their settings being read from the same place: one
    log may speak of MXFP8 modules and another not. What a source cannot say is not a difference.
    """
    differing: dict[str, list[str | None]] = {}
    for name in dict.fromkeys(name for side in sides for name in side.settings.values):
        values = [side.settings.values.get(name) for side in sides]
        pairs = {(side.settings.source, value) for side, value in zip(sides, values, strict=True)}
        # Of one source, what one side says the other could have said.
        silent = any((source, None) in pairs for source, value in pairs if value is not None)
        if silent or len(set(values) - {None}) > 1:
            differing[name] = values
    return differing


def differing_of(sides: Sequence[Side], names: Collection[str]) -> dict[str, list[str]]:
    """Those of these settings that are known of all sides and not the same."""
    return {
        name: [value for value in values if value is not None]
        for name, values in differing_values(sides).items()
        # What is held out changes neither the training loss nor its speed.
        if name.rsplit(".", 1)[-1] in names and None not in values and not name.startswith(("validat", "eval"))
    }


def shared_values(sides: Sequence[Side]) -> dict[str, str]:
    """Settings that are known of every side and the same in all."""
    first = sides[0].settings.values.items()
    return {name: value for name, value in first if all(one.settings.values.get(name) == value for one in sides)}


def differing_fields(one: Experiment, other: Experiment) -> dict[str, str]:
    """Fields in which two experiments differ, beside the study's name and the seed: name to words.

    >>> differing_fields(Experiment(lr=2.0e-3), Experiment(lr=3.0e-3, seed=1))
    {'lr': 'lr 0.002 instead of 0.003'}
    """

    def value_of(experiment: Experiment, name: str) -> str:
        if not name.startswith("shape."):
            return str(getattr(experiment, name))
        value = getattr(experiment.shape, name.removeprefix("shape."), None)  # `shape` is None without changes
        return "the model's own" if value is None else str(value)

    return {name: f"{name} {value_of(one, name)} instead of {value_of(other, name)}" for name in one.differences(other)}


def differing_settings(arm: Experiment, reference: Experiment) -> dict[str, str]:
    """Fields in which two arms differ that make neither of them an arm: name to words."""
    own = ARM_FIELDS | {*arm.arm_fields, *reference.arm_fields}  # a study may vary any other field too
    return {name: words for name, words in differing_fields(arm, reference).items() if name not in own}


# Machines and software


def speed_facts(run: Collected) -> dict[str, str]:
    """What a run's speed depends on beside its settings; nothing for a machine that is not known."""
    known = run.environment
    if known is None:
        return {}
    driver = {"driver": known.versions["driver"]} if "driver" in known.versions else {}
    machine = {"machine": known.machine, "processor": known.processor}
    return {**machine, **driver, **_packages(known, SPEED_PACKAGES), "moelab": known.moelab}


def loss_facts(run: Collected) -> dict[str, str]:
    """What rounds a run's loss beside its settings; nothing for a machine that is not known."""
    known = run.environment
    if known is None:
        return {}
    commit = {"commit": known.git_commit} if known.git_commit else {}
    return {"hardware": known.chip, **_packages(known, LOSS_PACKAGES), "moelab": known.moelab, **commit}


def kernel_facts(run: Collected) -> dict[str, str]:
    """Which kernels of a run were emulated."""
    words = {True: "emulated", False: "native"}
    return {"MXFP8 or NVFP4 kernels": words[run.emulates_products], "DeepEP kernels": words[run.emulates_deepep]}


Facts = Callable[[Collected], Mapping[str, str]]


def differing_facts(runs: Sequence[Collected], reference: Sequence[Collected], facts: Facts) -> list[str]:
    """What is known of both groups of runs and is not one value in all of them, in words."""
    own, others = _by_fact(runs, facts), _by_fact(reference, facts)
    return [
        f"{name} {spread(values)} against {spread(others[name])}"
        for name, values in own.items()
        if name in others and len({*values, *others[name]}) > 1
    ]


def mixed_facts(runs: Sequence[Collected], facts: Facts) -> list[str]:
    """What is not one value in all runs of an arm, in words."""
    return [f"{name} {spread(own)} within one arm" for name, own in _by_fact(runs, facts).items() if len(set(own)) > 1]


def machine_differences(side: Side, reference: Side) -> list[str]:
    """In what two sides' machines and software differ that their speed depends on, in words, as far as is known."""
    if side.experiment is not None and reference.experiment is not None:
        return differing_facts(side.runs, reference.runs, speed_facts)
    values, others = ({**of.settings.values} for of in (side, reference))
    for known in (values, others):
        known["hardware"] = known.get("gpu") or known.get("processor") or ""
    differences = [
        f"{name} {values[name]} against {others[name]}"
        for name in ("hardware", "driver", *SPEED_PACKAGES)
        if values.get(name) and others.get(name) and values[name] != others[name]
    ]
    # Runs of ours beside one from elsewhere: they may be of two machines themselves.
    mixed = [side.label for side in (side, reference) if mixed_facts(side.runs, speed_facts)]
    return [*differences, *(f"the runs of {label} are not on like machines" for label in mixed)]


def caveats(side: Side, reference: Side) -> tuple[str, ...]:
    """In what a side's runs differ from the first's beside what makes them arms, as sentences."""
    settings: dict[str, str] = {}
    if side.experiment is not None and reference.experiment is not None:
        settings = differing_settings(side.experiment, reference.experiment)
    facts = differing_facts(side.attempted, reference.attempted, loss_facts)
    sentences = [f"The arms also differ in their settings: {', '.join(settings.values())}."] if settings else []
    return (*sentences, *([f"The runs also differ in what computes the loss: {'; '.join(facts)}."] if facts else []))


def _by_fact(runs: Iterable[Collected], facts: Facts) -> dict[str, list[str]]:
    """The value of each run that has one, by name."""
    values: dict[str, list[str]] = {}
    for run in runs:
        for name, value in facts(run).items():
            values.setdefault(name, []).append(value)
    return values


def _packages(environment: Environment, names: Iterable[str]) -> dict[str, str]:
    """Versions that are on record: an older record may not speak of a package at all."""
    packages = environment.packages
    return {name: packages[name] or "not installed" for name in names if name in packages}
