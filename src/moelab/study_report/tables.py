"""The figures and tables of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moelab.analysis import arm_label
from moelab.runs.collect import WARMUP_STEPS
from moelab.study_report.judgement import StudyJudgement


def study_figures(judged: StudyJudgement) -> Sequence[Any]:
    """The figures of a study with their captions."""
    from moelab.viz import Figure, loss_curves, loss_difference, loss_tail, throughput_bars

    note, marks = judged.loss_note, judged.grad_norm_marks
    figures = [
        Figure(
            caption="Training loss of every seed (thin) and the mean over seeds (bold); the inset enlarges the end.",
            figure=loss_curves(judged.table, final_fraction=judged.final_fraction, note=note, marks=marks),
        ),
        Figure(
            caption="The last 30 % of the steps: mean over seeds and one standard deviation.",
            figure=loss_tail(judged.table, note=note, marks=marks),
        ),
    ]
    for verdict in judged.verdicts:
        figures.append(
            Figure(
                caption=f"Difference of {arm_label(verdict.arm)} from {arm_label(verdict.reference)}, paired by seed.",
                figure=loss_difference(judged.table, verdict, note=note),
            )
        )
    if not judged.throughput:
        return figures
    bars = throughput_bars(
        judged.table,
        baseline=judged.reference,
        warmup_steps=WARMUP_STEPS,
        note=judged.speed_note,
        rank_words=judged.rank_words,
    )
    figures.append(Figure(caption="Throughput: geometric mean of the seeds' medians after warm-up.", figure=bars))
    return figures


def runs_table(judged: StudyJudgement) -> Any:
    """One row for each arm and seed."""
    from moelab.viz import Table

    medians = {(arm.arm, seed): tps for arm in judged.throughput for seed, tps in arm.tps_by_seed.items()}
    rows = []
    for run in judged.runs:
        key = (run.arm, run.seed if run.seed is not None else -1)
        memory = float(run.rows["memory_gib"].max()) if len(run.rows) else math.nan
        reason = f": {run.status.reason}" if run.status.reason else ""
        rows.append(
            [
                arm_label(run.arm),
                run.seed,
                f"{run.status.state}{reason}",
                run.last_step,
                judged.final_loss(run),
                run.validation_loss,
                medians.get(key, math.nan),
                memory,
            ]
        )
    tps = f"tokens/s {judged.rank_words}"
    memory_words = "memory per process, GiB" if judged.on_cpu else "memory per GPU, GiB"
    return Table(
        title="Runs",
        columns=["arm", "seed", "status", "steps", "final loss, nats", "held-out loss, nats", tps, memory_words],
        rows=rows,
        decimals={tps: 0, memory_words: 2},
    )


def conversion_table(judged: StudyJudgement) -> Any:
    """What multiplies in MXFP8 in each arm."""
    from moelab.viz import Table

    rows = []
    for arm in judged.arms:
        converted = next((run.converted for run in judged.finished if run.arm == arm and run.converted), None)
        names = ", ".join(converted["modules"]) if converted else "–"
        rows.append([arm_label(arm), converted["kernels"] if converted else "–", names])
    return Table(title="Modules that multiply in MXFP8", columns=["arm", "kernels", "modules"], rows=rows)
