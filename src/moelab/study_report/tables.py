"""The figures and tables of a study."""

from __future__ import annotations

import math
from collections import Counter
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
        gains=judged.gains,
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
                run.environment.machine if run.environment else "unknown",
            ]
        )
    tps = f"tokens/s {judged.rank_words}"
    memory_words = "memory per process, GiB" if judged.on_cpu else "memory per GPU, GiB"
    return Table(
        title="Runs",
        columns=[
            "arm",
            "seed",
            "status",
            "steps",
            "final loss, nats",
            "held-out loss, nats",
            tps,
            memory_words,
            "machine",
        ],
        rows=rows,
        decimals={tps: 0, memory_words: 2},
    )


def left_out_table(judged: StudyJudgement) -> Any:
    """Every run that was found and is not judged, with the reason."""
    from moelab.viz import Table

    rows = []
    for one in judged.left_out:
        state = str(one.collected.status.state) if one.collected else "unknown"
        rows.append([arm_label(one.arm) if one.arm else None, one.seed, one.run.rsplit("/", 1)[-1], state, one.reason])
    return Table(
        title="Runs that are not judged",
        columns=["arm", "seed", "run", "status", "reason"],
        rows=rows or [["none", None, None, None, None]],
    )


def conversion_table(judged: StudyJudgement) -> Any:
    """What multiplies in MXFP8 in each arm; a row for each thing that its runs say."""
    from moelab.viz import Table

    rows = []
    for arm in judged.arms:
        runs = [run for run in judged.finished if run.arm == arm]
        told = Counter(
            (run.converted["kernels"], ", ".join(run.converted["modules"])) if run.converted else (None, None)
            for run in runs
        )
        rows += [[arm_label(arm), count, *words] for words, count in told.items()]
    return Table(title="Modules that multiply in MXFP8", columns=["arm", "runs", "kernels", "modules"], rows=rows)
