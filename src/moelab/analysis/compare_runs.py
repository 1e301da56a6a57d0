"""Runs side by side: what each did, and how far its loss is from that of the first.

A *side* of a comparison is one run, or the runs of one arm that differ in nothing but the seed. Sides may come from
anywhere: our studies, or logs of someone else's training. So every number may be missing, which is NaN here and a dash
for the reader, and what a difference is worth depends on what is known:

* Where both sides have seeds in common, the difference is paired by seed and judged as in a study, if on the steps that
  both logged.
* Otherwise there is one curve against another. Its spread over the last steps says how noisy the difference is from
  step to step; it is no interval, since another seed might have given another difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moelab.analysis.convergence import compare_convergence
from moelab.analysis.verdict import Verdict
from moelab.model import count_parameters, flops_per_token, shape_of
from moelab.model.shape import SHAPES, ModelShape
from moelab.runs.collect import WARMUP_STEPS, Collected, joined_rows
from moelab.runs.settings import Settings
from moelab.runs.table import merge_segments, throughput_rows

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison.

    Attributes:
        label: what it is called, unlike any other side.
        arm: name of its arm, empty for a run from elsewhere.
        runs: one for each seed; one alone from elsewhere.
        settings: its configuration, as far as is known.
        left_out: runs of the arm that ended early, each with its reason, where others finished.
        command: that launched a run of it; empty from elsewhere.
    """

    label: str
    arm: str = ""
    runs: tuple[Collected, ...]
    settings: Settings
    left_out: tuple[str, ...] = ()
    command: str = ""

    @cached_property
    def table(self) -> pd.DataFrame:
        """Metrics of all its runs, with ``label`` as the arm; runs of an unknown seed are numbered."""
        seeds = {run.run: number if run.seed is None else run.seed for number, run in enumerate(self.runs)}
        rows = joined_rows(self.runs)
        return rows.assign(
            run=self.label + ": " + rows["run"],  # another side may hold the same run
            arm=pd.array([self.label] * len(rows), dtype="string"),
            seed=rows["run"].map(seeds).astype("Int64"),
        )

    @property
    def seeds_known(self) -> bool:
        """Whether its runs say which seed each had."""
        return all(run.seed is not None for run in self.runs)

    @property
    def emulated(self) -> bool:
        """Whether MXFP8 kernels or DeepEP were emulated in it."""
        ours = any(
            "emulated" in ((run.converted or {}).get("kernels"), (run.dispatcher or {}).get("kernels"))
            for run in self.runs
        )
        return ours or self.settings.values.get("mxfp8_kernels") == "emulated"

    @property
    def on_cpu(self) -> bool:
        """Whether it is known that its ranks were processes on a CPU."""
        return "processor" in self.settings.values

    @property
    def warmup_steps(self) -> int:
        """Steps that do not count for speed; where not every step was logged, all before the second that was."""
        steps = np.unique(self.table["step"].to_numpy())
        interval = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
        return max(WARMUP_STEPS, interval if interval > 1 else 0)

    @cached_property
    def tps(self) -> Array:
        """Tokens per second per GPU of each step that counts, ``(steps,)``."""
        return throughput_rows(self.table, warmup_steps=self.warmup_steps)["tps"].to_numpy(dtype=float)

    @cached_property
    def step_time_s(self) -> Array:
        """Seconds from one logged step to the next, divided by the steps between them, ``(steps,)``."""
        rows = merge_segments(self.table)
        between = rows.groupby(["run", "segment"])[["step", "time"]].diff()
        seconds = (between["time"] / between["step"])[rows["step"] > self.warmup_steps].dropna()
        return seconds[seconds > 0].to_numpy(dtype=float)

    @property
    def last_step(self) -> int:
        """Last step that any of its runs logged."""
        return max(run.last_step for run in self.runs)

    @property
    def memory_gib(self) -> float:
        """Largest memory that a rank reserved."""
        return _largest(self.table["memory_gib"])

    @property
    def memory_percent(self) -> float:
        """The same, of what the GPU has."""
        return _largest(self.table["memory_pct"])

    def final_nats(self, final_fraction: float) -> float:
        """Mean loss over the last part of its own steps; infinite if one of them was."""
        rows = merge_segments(self.table).dropna(subset=["loss"])
        last = self.last_step - max(1, round(final_fraction * self.last_step))
        return float(rows.loc[rows["step"] > last, "loss"].mean())

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

        Derived: ``tps · FLOPs per token / peak FLOP/s``, of the peak that the log names, which is that of BF16. NaN
        without a GPU, a peak, a sequence length, or a model whose shape is known here.
        """
        known, shape = self.settings.values, self._shape
        try:
            peak_flops, seq_len = float(known["peak_flops"]), int(known["seq_len"])
        except (KeyError, ValueError):
            return math.nan
        if shape is None or "gpu" not in known:
            return math.nan
        return 100.0 * median(self.tps) * flops_per_token(shape, seq_len, causal=causal) / peak_flops

    @property
    def _shape(self) -> ModelShape | None:
        """The model by its name in an experiment, or by the number of its parameters, which no two shapes share."""
        known = self.settings.values
        if known.get("model") in SHAPES:
            return shape_of(known["model"])
        counted = {str(count_parameters(shape).total): shape for shape in SHAPES.values()}
        return counted.get(known.get("parameters", ""))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Loss of a side against that of the first, in nats per token.

    Attributes:
        reference: label of the first side.
        label: of this side.
        steps: that both logged.
        first_step: of the last part, which the difference is a mean over; up to the last of ``steps``.
        nats: mean difference over that part, this side − first.
        spread_nats: standard deviation of the difference from step to step in that part.
        verdict: with seeds in common, the judgement over them; None without.
    """

    reference: str
    label: str
    steps: tuple[int, ...]
    first_step: int
    nats: float
    spread_nats: float
    verdict: Verdict | None

    @property
    def paired(self) -> bool:
        """Whether there are seeds enough for an interval over them."""
        return self.verdict is not None and self.verdict.n_seeds > 1

    def sentence(self) -> str:
        """State the difference and what it is worth."""
        if self.verdict is not None and self.verdict.seeds:
            return self.verdict.sentence()
        if not self.steps:
            return f"{self.label} and {self.reference} have no step with a loss in common: no difference."
        last = self.steps[-1]
        many = math.isfinite(self.spread_nats)
        where = f"over steps {self.first_step} to {last}" if many else f"at step {last}"
        spread = f" ({self.spread_nats:.4f} from step to step)" if many else ""
        return (
            f"{self.label} differs from {self.reference} by {self.nats:+.4f} nats {where}{spread}. "
            "One run against another: whether a change of seed does as much is not known."
        )


def difference(
    reference: Side, side: Side, *, final_fraction: float = 0.1, margin_nats: float | None = None
) -> Difference:
    """Hold a side's loss against that of the first, on the steps that both logged.

    Args:
        reference: the first side.
        side: another.
        final_fraction: part of the common steps that the final difference is a mean over.
        margin_nats: equivalence margin, or None to take it from the reference's seeds.
    """
    first, other = (_mean_loss(one) for one in (reference, side))
    both = (other - first).dropna()
    steps = tuple(int(step) for step in both.index)
    if not steps:
        return Difference(
            reference=reference.label,
            label=side.label,
            steps=(),
            first_step=0,
            nats=math.nan,
            spread_nats=math.nan,
            verdict=None,
        )
    first_step = steps[-1] - max(1, round(final_fraction * steps[-1])) + 1
    final = both.loc[first_step:]
    verdict = None
    if reference.seeds_known and side.seeds_known:
        table = pd.concat([reference.table, side.table], ignore_index=True)
        (verdict,) = compare_convergence(
            table[table["step"].isin(steps)],
            reference=reference.label,
            final_fraction=final_fraction,
            margin_nats=margin_nats,
        )
    nats = verdict.mean_difference_nats if verdict is not None and verdict.seeds else float(final.mean())
    spread = float(final.std(ddof=1)) if len(final) > 1 else math.nan
    return Difference(
        reference=reference.label,
        label=side.label,
        steps=steps,
        first_step=first_step,
        nats=nats,
        spread_nats=spread,
        verdict=verdict,
    )


def differing_settings(sides: Sequence[Side]) -> dict[str, list[str | None]]:
    """Settings that are not the same in all sides: name to one value a side, None where it is not known.

    What only some sides say counts where others could have said it, their settings being read from the same place: one
    log may speak of MXFP8 modules and another not. What a source cannot say is not a difference.
    """
    names = dict.fromkeys(name for side in sides for name in side.settings.values)
    rows = {name: [side.settings.values.get(name) for side in sides] for name in names}
    return {name: values for name, values in rows.items() if _differ(sides, values)}


def shared_settings(sides: Sequence[Side]) -> dict[str, str]:
    """Settings that are known of every side and the same in all."""
    first = sides[0].settings.values.items()
    return {name: value for name, value in first if all(one.settings.values.get(name) == value for one in sides)}


def median(values: Array) -> float:
    """Median, or NaN of nothing."""
    return float(np.median(values)) if len(values) else math.nan


def _differ(sides: Sequence[Side], values: Sequence[str | None]) -> bool:
    if len(set(values) - {None}) > 1:
        return True
    sources = [(side.settings.source, value) for side, value in zip(sides, values, strict=True)]
    return any((source, None) in sources for source, value in sources if value is not None)


def _mean_loss(side: Side) -> pd.Series[float]:
    """Mean loss over the side's runs at each step that all of them logged with a finite loss."""
    wide = merge_segments(side.table).pivot(index="step", columns="run", values="loss")
    return wide.where(np.isfinite(wide)).dropna().mean(axis=1)


def _largest(values: pd.Series[float]) -> float:
    return float(values.max()) if values.notna().any() else math.nan
