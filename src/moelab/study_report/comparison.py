"""Runs side by side: which they are, and what they say in sentences and for a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moelab.analysis.compare_runs import Difference, difference, differing_settings
from moelab.analysis.side import Side, machine_differences, median
from moelab.analysis.throughput import why_no_gain
from moelab.analysis.verdict import Verdict, correct_for_arms
from moelab.errors import BadInput
from moelab.runs.files import finite_or_none
from moelab.runs.status import State
from moelab.study_report.judgement import LeftOut, first_of, left_out_json, left_out_words, run_json


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sides and what they say, the first being what the others are held against.

    Attributes:
        sides: at least one.
        paths: that they were read from.
        left_out: every run of ours at the paths that is in no side.
        final_fraction: part of the steps that a final loss or difference is a mean of.
        margin_nats: equivalence margin that was given, or None.
        margin_cap_nats: what a margin may be at most, or None for the usual cap.
        dropped_seeds: seeds that are left out of every side, as was asked for.
    """

    sides: tuple[Side, ...]
    paths: tuple[Path, ...]
    left_out: tuple[LeftOut, ...] = ()
    final_fraction: float = 0.1
    margin_nats: float | None = None
    margin_cap_nats: float | None = None
    dropped_seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        seeds = set().union(*(side.seeds for side in self.sides))
        if unknown := [seed for seed in self.dropped_seeds if seed not in seeds]:
            known = ", ".join(str(seed) for seed in sorted(seeds)) or "not known"
            raise BadInput(f"seed {unknown[0]} cannot be dropped: the seeds of these runs are {known}")
        labels = [side.label for side in self.sides]
        assert len(set(labels)) == len(labels), f"two sides have one label: {labels}"

    @property
    def title(self) -> str:
        """What the report is about."""
        return f"Run {self.sides[0].label}" if len(self.sides) == 1 else f"{len(self.sides)} runs side by side"

    @cached_property
    def differences(self) -> list[Difference]:
        """Loss of every other side against the first, with verdicts corrected for their number."""
        first, *others = self.sides
        found = [
            difference(
                first,
                side,
                final_fraction=self.final_fraction,
                margin_nats=self.margin_nats,
                margin_cap_nats=self.margin_cap_nats,
                dropped_seeds=self.dropped_seeds,
            )
            for side in others
        ]
        corrected = iter(correct_for_arms([one.verdict for one in found if one.verdict is not None]))
        return [one if one.verdict is None else replace(one, verdict=next(corrected)) for one in found]

    @property
    def verdicts(self) -> list[Verdict]:
        """The judgements over common seeds."""
        return [one.verdict for one in self.differences if one.verdict is not None and one.verdict.seeds]

    @property
    def emulation_note(self) -> str:
        """Which sides are emulated, for a figure's title."""
        emulated = [side for side in self.sides if side.emulated]
        return f"emulated kernels in {_names(emulated)}" if emulated else ""

    @property
    def speed_note(self) -> str:
        """What must be said where speed is shown; empty for real kernels on GPUs."""
        on_cpu = [side for side in self.sides if side.on_cpu]
        found = [f"a rank is a CPU process in {_names(on_cpu)}"] if on_cpu else []
        found += [f"{self.emulation_note}: no statement about speed"] if self.emulation_note else []
        found += [why_no_gain(label, self.sides[0].label, words) for label, words in self.no_ratio.items()]
        return "; ".join(found)

    @cached_property
    def no_ratio(self) -> dict[str, str]:
        """Why no ratio of speeds to the first is claimed, by label."""
        first, *others = self.sides
        found = {side.label: machine_differences(side, first) for side in others}
        return {label: "; ".join(words) for label, words in found.items() if words}

    @property
    def grad_norm_notes(self) -> list[str]:
        """Runs that reported a gradient norm of NaN or Inf, and in which steps."""
        return [note for side in self.sides for note in side.grad_norm_notes]

    @property
    def loss_note(self) -> str:
        """What must be said in the title of a figure of the loss."""
        return "; ".join([*([self.emulation_note] if self.emulation_note else []), *first_of(self.grad_norm_notes)])

    @property
    def notes(self) -> list[str]:
        """What a reader must know before the numbers."""
        unknown = [side for side in self.sides if not side.settings.values]
        uncounted = [side for side in self.sides if not side.on_cpu and math.isnan(side.mfu_percent(causal=True))]
        told = {
            "no configuration can be read": unknown,
            "MFU by the two counts needs the model's shape, the sequence length and the GPU's peak": uncounted,
        }
        found = [f"{_names(sides)}: {what}" for what, sides in told.items() if sides]
        studies = dict.fromkeys(one.run.split("/")[0] for one in self.left_out)
        left_out = [
            f"left out: {study}: {words}"
            for study in studies
            for words in left_out_words([one for one in self.left_out if one.run.split("/")[0] == study])
        ]
        damaged = [
            f"{side.label}{'' if run.seed is None else f', seed {run.seed}'}: {words}"
            for side in self.sides
            for run in side.runs
            for words in run.damaged
        ]
        dropped = ", ".join(str(seed) for seed in self.dropped_seeds)
        asked = [f"dropped in every side, as asked for: seed {dropped}"] if dropped else []
        unfinished = [f"{side.unfinished}: its loss is not judged" for side in self.sides if side.unfinished]
        speed = [self.speed_note] if self.speed_note else []
        return [*unfinished, *self.grad_norm_notes, *speed, *found, *left_out, *asked, *damaged]

    def as_text(self) -> str:
        """The findings as sentences."""
        lines = [f"{side.label}: {_in_words(side)}" for side in self.sides]
        lines += [one.sentence() for one in self.differences]
        for name, values in differing_settings(self.sides).items():
            lines.append(f"{name} differs: {', '.join(value or '–' for value in values)}")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The numbers for a program; what is missing is null."""
        return {
            "runs": [
                *(run_json(run) | {"side": side.label} for side in self.sides for run in side.runs),
                *(left_out_json(one) for one in self.left_out),
            ],
            "sides": [self._side_json(side) for side in self.sides],
            "differences": [_difference_json(one) for one in self.differences],
            "differing_settings": differing_settings(self.sides),
            "note": "; ".join(self.notes),
        }

    def _side_json(self, side: Side) -> dict[str, Any]:
        low, high = quartiles(side.tps)
        return {
            "label": side.label,
            "arm": side.arm,
            "seeds": [run.seed for run in side.runs],
            "status": state_of(side),
            "last_step": side.last_step,
            "final_loss_nats": finite_or_none(side.final_nats(self.final_fraction)),
            "held_out_loss_nats": finite_or_none(side.held_out_nats),
            "tps": {
                "median": finite_or_none(median(side.tps)),
                "quartiles": [finite_or_none(low), finite_or_none(high)],
                "n": len(side.tps),
            },
            "step_time_s": {"median": finite_or_none(median(side.step_time_s)), "n": len(side.step_time_s)},
            "memory_gib": finite_or_none(side.memory_gib),
            "mfu_percent": {
                "logged": finite_or_none(side.mfu_logged_percent),
                "torchtitan": finite_or_none(side.mfu_percent(causal=False)),
                "causal": finite_or_none(side.mfu_percent(causal=True)),
            },
            "settings": side.settings.values,
        }


def quartiles(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """First and third quartile, NaN of nothing."""
    if not len(values):
        return math.nan, math.nan
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def state_of(side: Side) -> str:
    """How its runs ended; logs from elsewhere do not say."""
    states = sorted({run.status.state for run in side.runs})
    reasons = sorted({run.status.reason for run in side.runs if run.status.reason})
    words = ", ".join("not recorded" if state is State.UNKNOWN else str(state) for state in states)
    return f"{words}: {'; '.join(reasons)}" if reasons else words


def _in_words(side: Side) -> str:
    low, high = quartiles(side.tps)
    speed = (
        f"{median(side.tps):,.0f} tokens/s (middle half {low:,.0f} to {high:,.0f})" if len(side.tps) else "no tokens/s"
    )
    memory = f"{side.memory_gib:.2f} GiB" if math.isfinite(side.memory_gib) else "no memory"
    seeds = f"{len(side.runs)} seeds, " if len(side.runs) > 1 else ""
    return f"{seeds}{side.last_step} steps, {speed}, {memory}"


def _difference_json(one: Difference) -> dict[str, Any]:
    judged = one.verdict if one.verdict is not None and one.verdict.seeds else None
    return {
        "label": one.label,
        "reference": one.reference,
        "common_steps": len(one.steps),
        "difference_nats": finite_or_none(one.nats),
        "step_spread_nats": finite_or_none(one.spread_nats),
        "seeds": list(judged.seeds) if judged else [],
        "interval_nats": [finite_or_none(judged.interval.low), finite_or_none(judged.interval.high)]
        if judged
        else [None, None],
        "answer": judged.answer.value if judged else None,
        "sentence": one.sentence(),
    }


def _names(sides: Sequence[Side]) -> str:
    names = [side.label for side in sides]
    return ", ".join(names) if len(names) < 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
