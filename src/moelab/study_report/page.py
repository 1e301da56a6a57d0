"""What a report shows: its figures and tables, where its numbers come from, and the page that holds them.

A study and runs side by side have figures and tables of their own: arms are means over seeds, and runs from elsewhere
are single curves. Nothing is computed here.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import moelab
from moelab.analysis.arms import arm_label
from moelab.analysis.compare_runs import differing_values, shared_values
from moelab.analysis.side import Side, median
from moelab.runs.collect import WARMUP_STEPS
from moelab.runs.settings import spread
from moelab.runs.side_files import Environment
from moelab.study_report.report import Report, quartiles, state_of

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
VERSIONS_SHOWN = ("torch", "torchtitan", "torchao", "triton", "deep_ep", "nvidia-nccl-cu13", "driver")


def report_figures(judged: Report) -> Sequence[Any]:
    """The figures of a report with their captions."""
    figures = _side_figures(judged) if judged.study is None else _study_figures(judged)
    return [*figures, *_traced_figures(judged)]


def report_tables(judged: Report) -> Sequence[Any]:
    """The tables of a report."""
    if judged.study is None:
        return _side_tables(judged)
    return [_runs_table(judged), _not_judged_table(judged), _conversion_table(judged)]


def provenance(judged: Report, *, with_paths: bool = False) -> dict[str, str]:
    """What was run, where and with what; each line of several runs says how many have which where they are not alike.

    Args:
        judged: the report.
        with_paths: name the folders of the machine that ran it too.
    """
    shown = str if with_paths else portable
    paths = [str(path) if with_paths else path.absolute().name for path in judged.paths]
    same = ", ".join(f"{name} {value}" for name, value in shared_values(judged.sides).items())
    side_by_side = judged.study is None
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by moelab {moelab.__version__}",
        "Command": shlex.join(["moelab", "report", *paths]),
        **_machines(judged),
        **({f"Configuration, {side.label}": side.settings.source for side in judged.sides} if side_by_side else {}),
        **{f"Model, {side.label}": side.experiment.model_label for side in judged.sides if side.experiment},
        **({"The same in all": same or "nothing that is known"} if side_by_side else {}),
        **{
            f"Command, {side.label}, seed {run.seed}": shown(run.command)
            for side in judged.sides
            for run in (side.runs if side_by_side else side.finished)
            if run.command
        },
    }


def portable(command: str) -> str:
    """A launch command without the folders of the machine that ran it."""
    return " ".join(_without_folder(word) for word in shlex.split(command))


def write_study_report(judged: Report, path: Path, *, with_paths: bool = False) -> Path:
    """Write a report as one self-contained HTML file.

    Args:
        judged: of :func:`~moelab.study_report.judge_paths` or :func:`~moelab.study_report.judge_study`.
        path: file to write.
        with_paths: leave folders, host and user names in it.
    """
    from moelab.viz import write_report

    return write_report(
        path,
        title=judged.title,
        verdicts=judged.verdicts if judged.study is None else [*judged.verdicts, *judged.held_out],
        figures=report_figures(judged),
        tables=report_tables(judged),
        provenance=provenance(judged, with_paths=with_paths),
        notes=judged.notes,
        with_paths=with_paths,
    )


def _study_figures(judged: Report) -> Sequence[Any]:
    from moelab.viz import Figure, loss_curves, loss_difference, loss_tail, throughput_bars

    note, marks = judged.loss_note, judged.grad_norm_marks
    figures = [
        Figure(
            caption="Training loss of every seed (thin) and the mean over seeds (bold); the inset enlarges the end.",
            figure=loss_curves(
                judged.table, final_fraction=judged.final_fraction, final=judged.final, note=note, marks=marks
            ),
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
    figures += _load_figures(judged)
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


def _load_figures(judged: Report) -> list[Any]:
    """Of each arm, the load of the experts of its first finished run that recorded it."""
    from moelab.viz import Figure
    from moelab.viz.study import expert_load_figure

    figures = []
    for side in judged.sides:
        run = next((run for run in side.finished if run.load is not None), None)
        if run is not None and run.load is not None and run.experiment is not None:
            name = f"{side.label}, seed {run.seed}"
            figure = expert_load_figure(run.load, ep=run.experiment.ep, name=name)
            figures.append(Figure(caption=f"Load of the experts, {side.label}.", figure=figure))
    return figures


def _side_figures(judged: Report) -> Sequence[Any]:
    from moelab.viz import Figure, compare

    styles = compare.side_styles(judged.sides)
    note, speed, sides = judged.loss_note, judged.speed_note, judged.sides
    with_loss = [side for side in sides if side.table["loss"].notna().any()]
    known = [one for one in judged.differences if one.steps]
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
    figures = [Figure(caption=caption, figure=figure) for caption, figure in drawn.items() if figure is not None]
    return [*figures, *_load_figures(judged)]


def _traced_figures(judged: Report) -> Sequence[Any]:
    from moelab.viz import Figure
    from moelab.viz.explain import communication_bars, idle_bars, step_bars

    explained, _ = judged.traced
    drawn = {
        "What a traced step is made of.": step_bars,
        "Communication of the traced step: what compute hides of it.": communication_bars,
        "Why nothing runs in the traced step.": idle_bars,
    }
    return [Figure(caption=caption, figure=draw(explained)) for caption, draw in drawn.items()] if explained else []


def _runs_table(judged: Report) -> Any:
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


def _not_judged_table(judged: Report) -> Any:
    from moelab.viz import Table

    rows = []
    for one in judged.not_judged:
        state = str(one.collected.status.state) if one.collected else "unknown"
        rows.append([arm_label(one.arm) if one.arm else None, one.seed, one.run.rsplit("/", 1)[-1], state, one.reason])
    return Table(
        title="Runs that are not judged",
        columns=["arm", "seed", "run", "status", "reason"],
        rows=rows or [["none", None, None, None, None]],
    )


def _conversion_table(judged: Report) -> Any:
    from moelab.viz import Table

    rows = []
    for side in judged.sides:
        told = Counter(
            (run.converted["kernels"], ", ".join(run.converted["modules"])) if run.converted else (None, None)
            for run in side.finished
        )
        rows += [[side.label, count, *words] for words, count in told.items()]
    return Table(title="Modules that multiply in 8 bits", columns=["arm", "runs", "kernels", "modules"], rows=rows)


def _side_tables(judged: Report) -> Sequence[Any]:
    from moelab.viz import Table

    sides = judged.sides
    settings = [[name, *(value or "–" for value in values)] for name, values in differing_values(sides).items()]
    first = median(sides[0].tps)
    runs = [
        _run_row(side, first if side.label not in judged.no_gain else math.nan, judged.final_fraction) for side in sides
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


def _machines(judged: Report) -> dict[str, str]:
    """Software and hardware of our runs; nothing where none is ours."""
    runs = judged.finished

    def told(value: Callable[[Environment], str]) -> str:
        return spread((value(run.environment) or "none") if run.environment else "unknown" for run in runs)

    def version(name: str) -> str:
        return told(lambda found: found.versions.get(name, ""))

    if not runs:
        return {}
    versions = {name: version(name) for name in VERSIONS_SHOWN}
    installed = [f"{name} {version}" for name, version in versions.items() if version != "none"]
    return {
        "moelab": told(lambda found: found.moelab + (f", commit {found.git_commit}" if found.git_commit else "")),
        "Software": "; ".join([f"Python {told(lambda found: found.python)}", *installed]),
        "Hardware": told(lambda found: found.machine),
        "Memory": told(lambda found: f"{found.memory_gib} GiB"),
        "System": told(lambda found: found.platform),
    }


def _without_folder(word: str) -> str:
    before, slash, rest = word.partition("/")
    if not slash:
        return word
    parts = rest.split("/")
    if parts[-1].startswith("python"):
        return f"{before}{parts[-1]}"
    if "runs" not in parts:
        return f"{before}…/{parts[-1]}"
    last = len(parts) - 1 - parts[::-1].index("runs")
    return f"{before}{'/'.join(parts[last:])}"
