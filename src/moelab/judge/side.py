"""A side of a comparison: one run, or the runs of one arm, and what they did. What is not known of it is NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moelab.experiment import Experiment
from moelab.files import finite_or_none
from moelab.hardware import known_gpu
from moelab.judge.convergence import first_final_step
from moelab.model import count_parameters, flops_per_token, shape_for
from moelab.model.shape import SHAPES, ModelShape
from moelab.runs.collect import WARMUP_STEPS, Collected
from moelab.runs.settings import Settings
from moelab.runs.status import State
from moelab.runs.table import joined_rows, merge_segments, throughput_rows

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison."""

    label: str  # unlike any other side's
    arm: str = ""  # empty for a run from elsewhere
    attempted: tuple[Collected, ...]  # one run for each seed, however it ended; one alone from elsewhere
    settings: Settings = field(default_factory=Settings)
    experiment: Experiment | None = None  # of one of its runs; None from elsewhere
    diverged_seeds: Mapping[int, str] = field(default_factory=dict)  # with the reason
    lost_seeds: Mapping[int, str] = field(default_factory=dict)  # that it should have and has no loss of otherwise
    replaced: tuple[Collected, ...] = ()  # attempts at its seeds that are not judged, as others are

    @property
    def finished(self) -> list[Collected]:
        """Those that trained every step; a log from elsewhere does not say that it did."""
        return [run for run in self.attempted if run.finished]

    @property
    def runs(self) -> tuple[Collected, ...]:
        """Those that are shown: the finished ones, or all where none is."""
        return tuple(self.finished) or self.attempted  # so that a side without a finished run is drawn too

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of the runs that are shown, with ``label`` as the arm; runs of an unknown seed are numbered."""
        # Unknown seeds are numbered: the table needs one, and no verdict is made of them.
        seeds = {run.run: number if run.seed is None else run.seed for number, run in enumerate(self.runs)}
        rows = joined_rows(self.runs)
        return rows.assign(
            arm=pd.array([self.label] * len(rows), dtype="string"),
            seed=rows["run"].map(seeds).astype("Int64"),
        )

    @property
    def seeds_known(self) -> bool:
        """Whether its runs say which seed each had."""
        return all(run.seed is not None for run in self.runs)

    @property
    def seeds(self) -> set[int]:
        """Seeds that it has or should have."""
        return {*(run.seed for run in self.runs if run.seed is not None), *self.diverged_seeds, *self.lost_seeds}

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

    def in_words(self) -> str:
        """Its steps, speed and memory on one line."""
        low, high = quartiles(self.tps)
        speed = "no tokens/s"
        if len(self.tps):
            each = "rank" if self.on_cpu else "GPU"
            speed = f"{median(self.tps):,.0f} tokens/s per {each} (middle half {low:,.0f} to {high:,.0f})"
        memory = f"{self.memory_gib:.2f} GiB" if math.isfinite(self.memory_gib) else "no memory"
        seeds = f"{len(self.runs)} seeds, " if len(self.runs) > 1 else ""
        return f"{seeds}{self.last_step:,} step{'s' * (self.last_step != 1)}, {speed}, {memory}"

    def to_json(self, *, final_fraction: float) -> dict[str, Any]:
        """Its numbers for a program; what is missing is null."""
        return {
            "label": self.label,
            "arm": self.arm,
            "seeds": [run.seed for run in self.runs],
            "status": self.state,
            "last_step": self.last_step,
            "final_loss_nats": finite_or_none(self.final_nats(final_fraction)),
            "held_out_loss_nats": finite_or_none(self.held_out_nats),
            "tps": {
                "median": finite_or_none(median(self.tps)),
                "quartiles": [finite_or_none(end) for end in quartiles(self.tps)],
                "n": len(self.tps),
            },
            "step_time_s": {"median": finite_or_none(median(self.step_time_s)), "n": len(self.step_time_s)},
            "memory_gib": finite_or_none(self.memory_gib),
            "mfu_percent": {
                "logged": finite_or_none(self.mfu_logged_percent),
                "torchtitan": finite_or_none(self.mfu_percent(causal=False)),
                "causal": finite_or_none(self.mfu_percent(causal=True)),
            },
            "settings": self.settings.values,
        }

    @property
    def warmup_steps(self) -> int:
        """Steps that do not count for speed; where not every step was logged, all before the second that was."""
        # The first logged step is then a mean over many, the compilation among them.
        return max(WARMUP_STEPS, self._interval_steps if self._interval_steps > 1 else 0)

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
    def tps_percentiles(self) -> tuple[float, ...]:
        """The 5th, 25th, 50th, 75th and 95th percentile of :attr:`tps`."""
        return tuple(np.percentile(self.tps, [5, 25, 50, 75, 95]).tolist())

    @property
    def step_time_tail(self) -> float:
        """Time that one step in twenty takes or more, over the median."""
        return float(np.percentile(self.step_time_s, 95)) / median(self.step_time_s)

    @property
    def step_time_shares(self) -> tuple[Array, Array]:
        """Percent of the steps, from 0 to 100, and seconds that as many took at most."""
        shares = np.linspace(0.0, 1.0, 101)
        # Of the definitions the one that gives times which steps took, not values between two of them.
        return 100 * shares, np.quantile(self.step_time_s, shares, method="inverted_cdf")

    @cached_property
    def training_means(self) -> pd.DataFrame:
        """``grad_norm`` and ``lr`` over steps, means over the runs; a norm that is not finite does not count."""
        rows = merge_segments(self.table).replace([math.inf, -math.inf], math.nan)
        return rows.groupby("step")[["grad_norm", "lr"]].mean()

    @property
    def final_grad_norm(self) -> float:
        """Median over the last tenth of the steps that logged one; NaN of none."""
        norms = self.training_means["grad_norm"].dropna().to_numpy(dtype=float)
        return median(norms[-max(1, len(norms) // 10) :])

    @property
    def grad_norm_peak(self) -> float:
        """The largest gradient norm over the median; NaN where there is none, or the median is 0."""
        norms = self.training_means["grad_norm"].dropna().to_numpy(dtype=float)
        middle = median(norms)
        return float(norms.max()) / middle if middle > 0 else math.nan

    @property
    def last_step(self) -> int:
        """Last step that any of its runs logged."""
        return max(run.last_step for run in self.runs)

    @property
    def diverged(self) -> bool:
        """Whether the loss of one of its runs is not finite."""
        return any(run.diverged for run in self.runs)

    @property
    def unfinished(self) -> str:
        """Why its loss is not judged: it diverged, or ended before its planned steps. Empty where neither did."""
        ends = Counter(words for run in self.runs if (words := self._end_of(run)))
        many = len(self.runs) > 1
        reasons = [f"{words}, {count} of {len(self.runs)} seeds" if many else words for words, count in ends.items()]
        return f"{self.label} {'; '.join(reasons)}" if reasons else ""

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
    def memory_gib(self) -> float:
        """Largest memory that a rank reserved."""
        return float(self.table["memory_gib"].max())

    @property
    def memory_percent(self) -> float:
        """The same, of what the GPU has."""
        return float(self.table["memory_pct"].max())

    def final_nats(self, final_fraction: float) -> float:
        """Mean loss over the last part of its own steps; NaN if a run diverged."""
        if self.diverged:
            return math.nan
        rows = merge_segments(self.table).dropna(subset=["loss"])
        final = rows["step"] >= first_final_step(self.last_step, final_fraction)
        return float(rows.loc[final, "loss"].mean())

    @property
    def held_out_nats(self) -> float:
        """Mean over runs of the held-out loss at the last validated step."""
        known = [run.validation_loss for run in self.runs if math.isfinite(run.validation_loss)]
        return float(np.mean(known)) if known else math.nan

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
        known, shape = self.settings.values, self._shape
        gpu = known_gpu(known.get("gpu", ""))
        seq_len = known.get("seq_len", "")
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

    @cached_property
    def _interval_steps(self) -> int:
        """Steps from one that was logged to the next."""
        steps = np.unique(self.table["step"].to_numpy())
        # The median: TorchTitan logs step 1 too, whatever the interval.
        return int(np.median(np.diff(steps))) if len(steps) > 1 else 1

    def _end_of(self, run: Collected) -> str:
        if run.diverged:
            return f"diverged: {run.diverged}"
        from_elsewhere, steps = run.steps_planned is None, self.settings.values.get("steps", "")
        planned = run.steps_planned or (int(steps) if steps.isdecimal() else 0)
        # A log of every tenth step ends up to nine steps before the last.
        if run.finished or (from_elsewhere and run.last_step + self._interval_steps > planned):
            return ""
        verb = "is at" if run.status.state is State.RUNNING else "ended at"
        state = "" if from_elsewhere else f" ({run.status.reason or run.status.state})"
        return f"{verb} step {run.last_step} of {planned}{state}"


def speed_ratio(side: Side, reference: Side) -> float:
    """Median tokens per second over the other's; NaN where one logged none."""
    return median(side.tps) / median(reference.tps)


def median(values: Array) -> float:
    """Median, or NaN of nothing."""
    return float(np.median(values)) if len(values) else math.nan


def quartiles(values: Array) -> tuple[float, float]:
    """First and third quartile, NaN of nothing."""
    low, high = np.percentile(values, [25, 75]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)
