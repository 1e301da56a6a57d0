"""The figures, the tables and the provenance of a comparison."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

import moelab
from moelab.analysis.compare_runs import differing_settings, shared_settings
from moelab.analysis.side import Side, median
from moelab.study_report.comparison import Comparison, quartiles, state_of
from moelab.study_report.origin import portable

RUN_COLUMNS = {
    "run": 0,
    "seeds": 0,
    "how it ended": 0,
    "steps": 0,
    "final loss, nats": 4,
    "held-out loss, nats": 4,
    "tokens/s per GPU": 0,
    "its quartiles": 0,
    "× the first": 3,
    "memory per GPU, GiB": 2,
    "of the GPU, %": 1,
}
"""Columns of the table of runs, and their digits after the point."""
TIME_COLUMNS = ("run", "n", "median", "95 %", "99 %", "longest")
MFU_COLUMNS = ("run", "as the log says", "TorchTitan's count", "causal count")


def comparison_figures(compared: Comparison) -> Sequence[Any]:
    """The figures with their captions; what no side has is left out."""
    from moelab.viz import Figure, compare

    styles = compare.side_styles(compared.sides)
    note, speed, sides = compared.loss_note, compared.speed_note, compared.sides
    with_loss = [side for side in sides if side.table["loss"].notna().any()]
    known = [one for one in compared.differences if one.steps]
    fast = [side for side in sides if len(side.tps)]
    timed = [side for side in sides if len(side.step_time_s)]
    drawn = {
        "Training loss.": compare.compared_loss(with_loss, known, styles, note=note) if with_loss else None,
        "Difference of the loss from the first, at the steps that both logged.": (
            compare.compared_difference(sides, known, styles, note=note) if known else None
        ),
        "Throughput: how its steps spread.": compare.compared_throughput(fast, styles, note=speed) if fast else None,
        "Step times: the share of steps done within a time.": (
            compare.compared_step_time(timed, styles, note=speed) if timed else None
        ),
    }
    return [Figure(caption=caption, figure=figure) for caption, figure in drawn.items() if figure is not None]


def comparison_tables(compared: Comparison) -> Sequence[Any]:
    """The runs, their step times, their MFU by both counts, and what differs between their configurations."""
    from moelab.viz import Table

    sides = compared.sides
    settings = [[name, *(value or "–" for value in values)] for name, values in differing_settings(sides).items()]
    first = median(sides[0].tps)
    runs = [
        _run_row(side, first if side.label not in compared.no_ratio else math.nan, compared.final_fraction)
        for side in sides
    ]
    return [
        Table(title="Runs", columns=list(RUN_COLUMNS), rows=runs, decimals=RUN_COLUMNS),
        Table(
            title="Seconds a step",
            columns=TIME_COLUMNS,
            rows=[_time_row(side) for side in sides],
            decimals=dict.fromkeys(TIME_COLUMNS, 3),
        ),
        Table(
            title="MFU, % of the GPU's BF16 peak; the counts differ in attention alone",
            label="derived",
            columns=MFU_COLUMNS,
            rows=[_mfu_row(side) for side in sides],
            decimals=dict.fromkeys(MFU_COLUMNS, 2),
        ),
        Table(
            title="What differs between the configurations, as far as they are known",
            columns=["setting", *(side.label for side in sides)],
            rows=settings or [["nothing that is known", *("–" for _ in sides)]],
        ),
    ]


def comparison_provenance(compared: Comparison, *, with_paths: bool = False) -> dict[str, str]:
    """How the comparison was made, where each configuration was read, what is the same in all, and our commands.

    Args:
        compared: the sides.
        with_paths: name the folders too.
    """
    paths = [str(path) if with_paths else path.absolute().name for path in compared.paths]
    shown = str if with_paths else portable
    same = ", ".join(f"{name} {value}" for name, value in shared_settings(compared.sides).items())
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by moelab {moelab.__version__}",
        "Command": shlex.join(["moelab", "report", *paths]),
        **{f"Configuration, {side.label}": side.settings.source for side in compared.sides},
        **{f"Model, {side.label}": side.experiment.model_label for side in compared.sides if side.experiment},
        "The same in all": same or "nothing that is known",
        **{
            f"Command, {side.label}, seed {run.seed}": shown(run.command)
            for side in compared.sides
            for run in side.runs
            if run.command
        },
    }


def _run_row(side: Side, first_tps: float, final_fraction: float) -> list[Any]:
    low, high = quartiles(side.tps)
    return [
        side.label,
        len(side.runs) if side.arm else None,
        state_of(side),
        side.last_step,
        side.final_nats(final_fraction),
        side.held_out_nats,
        median(side.tps),
        f"{low:,.0f} to {high:,.0f}" if math.isfinite(low) else None,
        median(side.tps) / first_tps if first_tps else math.nan,
        side.memory_gib,
        side.memory_percent,
    ]


def _time_row(side: Side) -> list[Any]:
    if not len(side.step_time_s):
        return [side.label, None, None, None, None, None]
    times = np.percentile(side.step_time_s, [50, 95, 99, 100])
    return [side.label, len(side.step_time_s), *(float(time) for time in times)]


def _mfu_row(side: Side) -> list[Any]:
    return [side.label, side.mfu_logged_percent, side.mfu_percent(causal=False), side.mfu_percent(causal=True)]
