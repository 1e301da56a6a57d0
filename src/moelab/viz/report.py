"""The report of a study: one HTML file that opens offline and holds everything that is needed to judge the study.

A content security policy forbids every network request, so what a reader sees does not depend on a server. plotly.js
comes with the plotly package, 4.9 MB of it; the file holds it and the figures' data compressed, under 2 MB for a usual
study, and the page unpacks them (``DecompressionStream``: browsers of 2023 and later). All text goes through Jinja2's
autoescape: a run may be named anything. Before that it goes through :func:`moelab.privacy.shareable`, wherever it came
from, unless folders and names are asked for.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import moelab
from moelab.errors import BadInput
from moelab.files import write_whole
from moelab.judge.arms import arm_label, contrast
from moelab.judge.comparison import Comparison
from moelab.judge.published import Label
from moelab.judge.report import StudyReport
from moelab.judge.side import differing_values, median, quartiles, shared_values
from moelab.judge.summary import Report, span_of
from moelab.judge.verdict import Verdict
from moelab.privacy import each_text, shareable, without_secrets
from moelab.runs.collect import WARMUP_STEPS
from moelab.runs.settings import spread
from moelab.runs.side_files import Environment as RunEnvironment
from moelab.viz import compare
from moelab.viz.explain import step_bars
from moelab.viz.study import expert_load_figure, loss_curves, loss_difference, throughput_bars, verdict_intervals
from moelab.viz.table import MOST_ROWS, SORT, TableView, as_table, cell_text

Cell = str | float | int | None

SIGNIFICANT_DIGITS = 5
"""Of a number that is drawn: far more than a pixel, and a third of the bytes that all of a float would take."""
PLOT_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its caption; ``label`` says how its numbers are known."""

    caption: str
    figure: go.Figure
    label: Label = "measured"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; cells are text or numbers, and None or NaN is shown as a dash; ``label`` is None for settings.

    ``decimals`` gives digits after the point by column; 4, as a loss is written, where it is silent.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    label: Label | None = "measured"
    decimals: Mapping[str, int] = field(default_factory=dict)

    def in_notebook(self) -> TableView:
        """The table as a notebook shows it."""
        decimals = dict.fromkeys(self.columns, 4) | dict(self.decimals)
        # As objects: beside a missing value pandas would make floats of whole numbers.
        frame = pd.DataFrame(self.rows, columns=list(self.columns), dtype=object)
        return as_table(frame, self.title, decimals=decimals)


def write_report(
    path: Path | str,
    *,
    title: str,
    summary: Mapping[str, str] | None = None,
    settings: Table | None = None,
    same_settings: str = "",
    verdicts: Sequence[Verdict] = (),
    figures: Sequence[Figure] = (),
    tables: Sequence[Table] = (),
    provenance: Mapping[str, str],
    notes: Sequence[str] = (),
    with_paths: bool = False,
) -> Path:
    """Write a study's report as one self-contained HTML file.

    Args:
        path: It is replaced at once or not at all.
        title: Title of the report.
        summary: The questions that a reader has first, each with its answer in a sentence.
        settings: What differs between the configurations, shown before the figures.
        same_settings: What does not, on a line.
        verdicts: Each is shown as a card with the numbers behind it.
        figures: Figures with captions.
        tables: Tables, such as one row a run.
        provenance: What was run, on what and with which versions, in the order to show.
        notes: Remarks a reader must see before the numbers, such as "MXFP8 kernels are emulated".
        with_paths: Leave folders, host and user names in the texts.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_report(folder / "report.html", title="A study", provenance={"moelab": "0.1.0"}).name
        'report.html'
    """
    # What every text goes through, once however often a page of thousands of runs repeats it.
    clean = functools.lru_cache(maxsize=10_000)(without_secrets if with_paths else shareable)
    environment = Environment(
        loader=PackageLoader("moelab.viz"),
        autoescape=True,
        finalize=functools.partial(each_text, clean),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": cell_text, "signed": _signed, "p_value": _p_value}
    environment.globals["contrast"] = contrast
    # None counts: a missing number is aligned as the numbers around it.
    environment.tests["numeric_cell"] = lambda value: value is None or isinstance(value, int | float)
    drawings = [_drawing(figure.figure, clean) for figure in figures]
    page = environment.get_template("report.html.j2").render(
        title=title,
        summary=summary,
        verdicts=verdicts,
        figures=figures,
        tables=tables,
        settings=settings,
        same_settings=same_settings,
        provenance=provenance,
        notes=notes,
        rows_shown=MOST_ROWS,
        sort=SORT,
        alphabet=json.dumps(ALPHABET),
        plotlyjs=_packed_plotlyjs() if figures else "",
        drawings=packed(json.dumps({"config": PLOT_CONFIG, "figures": drawings}, ensure_ascii=False)),
    )
    write_whole(Path(path), page)
    return Path(path)


_BASE85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_INERT = str.maketrans({"<": ".", "&": ","})
ALPHABET = _BASE85.translate(_INERT)
"""Digits of base 85 as Python's, but for ``<`` and ``&``: no packed text can end its element or be an entity."""


def packed(text: str) -> Markup:
    """A text, compressed by zlib and written in base 85 with :data:`ALPHABET`."""
    digits = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return Markup(digits.translate(_INERT))  # noqa: S704 - digits alone


@functools.cache
def _packed_plotlyjs() -> Markup:
    return packed(get_plotlyjs())


def _drawing(figure: go.Figure, clean: Callable[[str], str]) -> dict[str, Any]:
    """What ``Plotly.newPlot`` takes: data and layout, their numbers short and every text through ``clean``."""
    content = figure.to_plotly_json()
    return {name: _short(each_text(clean, content[name])) for name in ("data", "layout")}


def _short(value: Any) -> Any:
    """A value for JSON: arrays as lists, numbers in :data:`SIGNIFICANT_DIGITS`, and null for what is not finite."""
    if isinstance(value, Mapping):
        if "bdata" in value:  # plotly's packed array: base 64 of numbers hardly compresses
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
            return _short(array.reshape([int(n) for n in str(value.get("shape", array.size)).split(",")]).tolist())
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | np.ndarray):  # plotly packs no empty array
        return [_short(each) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        # `1.0` and `1` are the same to plotly.js, and whole arrays of steps are such.
        return int(value) if value.is_integer() else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return value


def _signed(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:+.4f}"


def _p_value(value: float) -> str:
    return "–" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


SETTINGS_SHOWN = {
    "model": "model",
    "parameters": "parameters",
    "gpu": "GPU",
    "gpus": "GPUs per node",
    "processor": "processor",
    "nodes": "nodes",
    "gpus_per_node": "ranks per node",
    "dp_replicate": "DP replicas",
    "dp_shard": "DP shards",
    "tp": "TP",
    "pp": "PP",
    "cp": "CP",
    "ep": "EP",
    "ep_backend": "all-to-all",
    "seq_len": "sequence length, tokens",
    "local_batch": "local batch, sequences",
    "global_batch": "global batch, sequences",
    "steps": "steps",
    "lr": "learning rate",
    "warmup_steps": "warm-up, steps",
    "precision": "precision",
    "routing": "routing",
    "activation_checkpoint": "activation checkpointing",
    "compile": "compile",
    "dataset": "data set",
    "torch": "PyTorch",
    "torchtitan": "TorchTitan",
    "torchao": "torchao",
}
"""Settings in words; the page shows these also where they are the same, and all that differ."""
VERSIONS_SHOWN = ("torch", "torchtitan", "torchao", "triton", "deep_ep", "nvidia-nccl-cu13", "driver")


def report_figures(judged: Report) -> list[Figure]:
    """The figures of a report with their captions."""
    drawn = [*_loss_figures(judged), *_speed_figures(judged), *_training_figures(judged), *_traced_figures(judged)]
    return [Figure(caption=caption, figure=figure) for caption, figure in drawn]


def report_tables(judged: Report) -> list[Table]:
    """The tables of a report."""
    return list(_study_tables(judged) if isinstance(judged, StudyReport) else _side_tables(judged))


def settings_table(judged: Report) -> Table | None:
    """What differs between the configurations, a column for each side; None of one side alone."""
    if not judged.others:
        return None
    labels = [side.label for side in judged.sides]
    differing = differing_values(judged.sides).items()
    rows = [[SETTINGS_SHOWN.get(name, name), *(value or "–" for value in values)] for name, values in differing]
    return Table(
        title="What differs between the configurations, as far as they are known",
        label=None,
        columns=["setting", *labels],
        rows=rows or [["nothing known", *("–" for _ in labels)]],
    )


def same_settings(judged: Report) -> str:
    """The settings that a reader looks for and that all sides share, on one line."""
    same = shared_values(judged.sides)
    return " · ".join(f"{words} {same[name]}" for name, words in SETTINGS_SHOWN.items() if name in same)


def provenance(judged: Report, *, with_paths: bool = False) -> dict[str, str]:
    """What was run, where and with what; each line of several runs says how many have which where they are not alike.

    Args:
        judged: the report.
        with_paths: name the folders of the machine that ran it too.
    """
    shown = str if with_paths else _portable  # a page goes to other people
    # Of `.` too, which has no name of its own; a link keeps the name that was typed.
    paths = [str(path) if with_paths else path.absolute().name for path in judged.paths]
    same = ", ".join(f"{name} {value}" for name, value in shared_values(judged.sides).items())
    side_by_side = isinstance(judged, Comparison)
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by moelab {moelab.__version__}",
        "Command": shlex.join(["moelab", "report", *paths]),
        **_machines(judged),
        **({f"Configuration, {side.label}": side.settings.source for side in judged.sides} if side_by_side else {}),
        **{f"Model, {side.label}": side.experiment.model_label for side in judged.sides if side.experiment},
        **({"The same in all": same or "nothing known"} if side_by_side else {}),
        **{
            f"Command, {side.label}, seed {run.seed}": shown(run.command)
            for side in judged.sides
            for run in (side.runs if side_by_side else side.finished)  # side by side also of one that failed alone
            if run.command
        },
    }


def write_study_report(judged: Report, path: Path, *, with_paths: bool = False) -> Path:
    """Write a report as one self-contained HTML file.

    Args:
        judged: of :func:`~moelab.judge.report.judge_paths` or :func:`~moelab.judge.report.judge_study`.
        path: file to write.
        with_paths: leave folders, host and user names in it.
    """
    return write_report(
        path,
        title=judged.title,
        summary=judged.summary,
        settings=settings_table(judged),
        same_settings=same_settings(judged),
        verdicts=[*judged.verdicts, *judged.held_out],
        figures=report_figures(judged),
        tables=report_tables(judged),
        provenance=provenance(judged, with_paths=with_paths),
        notes=judged.notes,
        with_paths=with_paths,
    )


def verdicts_figure(judged: Report) -> go.Figure:
    """The verdict on every arm, on its final training loss: an interval and a margin a row.

    Raises:
        BadInput: there is no verdict.
    """
    if not judged.verdicts:
        raise BadInput("there is no verdict: it takes a finished run of the reference and of another arm")
    rows = {arm_label(verdict.arm): verdict for verdict in judged.verdicts}
    counts = Counter(str(verdict.answer) for verdict in judged.verdicts).most_common()
    finding = f"Final loss: {', '.join(f'{count} of {len(rows)} arms {answer}' for answer, count in counts)}"
    # An arm that diverged with every seed has no common one, and "n = 0 seeds" would read as no run.
    seeds = span_of(max(1, verdict.n_seeds) for verdict in judged.verdicts)
    reference = arm_label(judged.verdicts[0].reference)
    words = f"Final training loss against {reference}; n = {seeds} seed{'s' * (seeds != '1')}."
    return verdict_intervals(rows, finding, note=judged.loss_note, words=words)


def loss_figure(judged: Report) -> go.Figure:
    """Training loss of every arm of a study, or of runs side by side.

    Raises:
        BadInput: no run logged a loss.
    """
    shown: dict[str, Any] = {"final_fraction": judged.final_fraction, "note": judged.loss_note}
    shown["marks"] = [mark for side in judged.sides for run in side.runs for mark in run.grad_norm_marks]
    if isinstance(judged, StudyReport):
        # With every seed dropped the curves of all are better than an empty figure.
        table = judged.kept if len(judged.kept) else judged.table
        styles = compare.side_styles([side for side in judged.sides if side.finished]) if judged.study is None else None
        return loss_curves(table, styles=styles, **shown)
    sides = [side for side in judged.sides if side.table["loss"].notna().any()]
    if not sides:
        raise BadInput("none of these runs logged a loss")
    styles = compare.side_styles(judged.sides)  # of all, so that a run looks alike in every figure
    table = pd.concat([side.table for side in sides])
    own = {side.name: styles[side.name] for side in sides}
    return loss_curves(table, styles=own, **shown)


def throughput_figure(judged: Report) -> go.Figure:
    """Tokens per second: of a study its seeds with the gains that are claimed, of other runs the spread over steps.

    Raises:
        BadInput: no run has a speed after its warm-up.
    """
    if isinstance(judged, StudyReport):
        # Bars are drawn for emulated arms too, but no gain of theirs.
        gains = [one for one in judged.gains if one.arm in {side.name for side in judged.measured_speeds}]
        return throughput_bars(judged.kept, gains=gains, warmup_steps=WARMUP_STEPS, note=judged.speed_note)
    sides = [side for side in judged.sides if len(side.tps)]
    if not sides:
        raise BadInput("none of these runs logged a speed after its warm-up")
    return compare.compared_throughput(sides, compare.side_styles(judged.sides), note=judged.speed_note)


def _loss_figures(judged: Report) -> Iterator[tuple[str, go.Figure]]:
    """Captions and figures of the loss: curves, and differences paired by seed or of one run against another."""
    styles = compare.side_styles(judged.sides)
    if len(judged.verdicts) > 1:
        yield "Final loss of every arm, paired by seed.", verdicts_figure(judged)
    if any(side.table["loss"].notna().any() for side in judged.sides):
        yield "Training loss.", loss_figure(judged)
    for verdict in judged.verdicts:
        caption = f"Difference of {arm_label(verdict.arm)} from {arm_label(verdict.reference)}, paired by seed."
        yield caption, loss_difference(judged.table, verdict, style=styles[verdict.arm], note=judged.loss_note)
    if known := [one for one in judged.differences if one.steps]:  # without a common step there is nothing to draw
        caption = "Loss difference from the first, at the steps that both logged."
        yield caption, compare.compared_difference(judged.sides, known, styles, note=judged.loss_note)


def _speed_figures(judged: Report) -> Iterator[tuple[str, go.Figure]]:
    """Captions and figures of throughput and, of runs side by side, of step times."""
    if isinstance(judged, StudyReport):
        if judged.throughput and not judged.on_cpu:  # a CPU's tokens/s would be read as a GPU's
            yield "Throughput: geometric mean of the seeds' medians after warm-up.", throughput_figure(judged)
        return
    if any(len(side.tps) for side in judged.sides):
        yield "Throughput: its spread over steps.", throughput_figure(judged)
    if timed := [side for side in judged.sides if len(side.step_time_s)]:
        caption = "Step times: the share of steps that finish within a given time."
        styles = compare.side_styles(judged.sides)
        yield caption, compare.compared_step_time(timed, styles, note=judged.speed_note)


def _training_figures(judged: Report) -> Iterator[tuple[str, go.Figure]]:
    """Gradient norms with learning rates, and of each side the expert load of its first run that recorded it."""
    # A norm of NaN at every step leaves nothing to draw; the notes and the loss figure's title name the run.
    if with_norm := [side for side in judged.sides if np.isfinite(side.table["grad_norm"]).any()]:
        styles = compare.side_styles(judged.sides)
        yield "Gradient norm and learning rate.", compare.gradient_norms(with_norm, styles)
    for side in judged.sides:
        # One seed of each: maps of experts cannot be averaged, as popular experts have other numbers in each.
        run = next((run for run in side.finished if run.load is not None), None)
        if run is not None and run.load is not None and run.experiment is not None:
            figure = expert_load_figure(run.load, ep=run.experiment.ep, name=f"{side.label}, seed {run.seed}")
            yield f"Load of the experts, {side.label}.", figure


def _traced_figures(judged: Report) -> Iterator[tuple[str, go.Figure]]:
    explained, _ = judged.traced
    if explained:
        yield "What a traced step is made of.", step_bars(explained)


def _study_tables(judged: StudyReport) -> Iterator[Table]:
    """The runs that are judged, those that are not, and what of the judged ones multiplies in 8 bits."""
    medians = {(arm.arm, seed): tps for arm in judged.throughput for seed, tps in arm.tps_by_seed.items()}
    tps = f"tokens/s {judged.rank_words}"
    memory = "memory per process, GiB" if judged.on_cpu else "memory per GPU, GiB"
    rows: list[list[Any]] = [
        [
            side.label,
            _seed_name(run.seed),
            run.status.in_words(),
            run.last_step,
            judged.final.seeds[side.name].losses.get(seed, math.nan) if run.finished else math.nan,
            run.validation_loss,
            medians.get((side.name, seed), math.nan),
            float(run.rows["memory_gib"].max()),
            run.environment.machine if run.environment else "unknown",
        ]
        for side in judged.sides
        for run in side.attempted
        for seed in [-1 if run.seed is None else run.seed]  # no seed is -1
    ]
    names = ["arm", "seed", "status", "steps", "final loss, nats", "held-out loss, nats", tps, memory, "machine"]
    yield Table(title="Runs", columns=names, rows=rows, decimals={tps: 0, memory: 2})
    rows = []
    for one in judged.not_judged:
        state = str(one.collected.status.state) if one.collected else "unknown"
        arm, run_name = arm_label(one.arm) if one.arm else None, one.run.rsplit("/", 1)[-1]
        rows.append([arm, _seed_name(one.seed), run_name, state, one.reason])
    names = ["arm", "seed", "run", "status", "reason"]
    # "none" in an empty table says that nothing was left out.
    yield Table(title="Runs that are not judged", columns=names, rows=rows or [["none", None, None, None, None]])
    rows = []
    for side in judged.sides:
        # A row for each distinct record: runs of one arm that converted other modules are seen at once.
        counts = Counter(
            (run.converted["kernels"], ", ".join(run.converted["modules"])) if run.converted else (None, None)
            for run in side.finished
        )
        rows += [[side.label, count, *words] for words, count in counts.items()]
    yield Table(title="Modules that multiply in 8 bits", columns=["arm", "runs", "kernels", "modules"], rows=rows)


def _seed_name(seed: int | None) -> str | None:
    """A seed is a name: 2026, and not the quantity 2,026."""
    return None if seed is None else str(seed)


def _side_tables(judged: Report) -> Iterator[Table]:
    """The runs, their step times and their MFU."""
    sides = judged.sides
    columns = {  # and the digits after the point
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
    rows: list[list[Any]] = []
    for side in sides:
        low, high = quartiles(side.tps)
        rows.append(
            [
                side.label,
                len(side.runs) if side.experiment else None,
                side.state,
                side.last_step,
                side.final_nats(judged.final_fraction),
                side.held_out_nats,
                median(side.tps),
                f"{low:,.0f} to {high:,.0f}" if math.isfinite(low) else None,
                math.nan if side.label in judged.no_gain else median(side.tps) / median(judged.reference.tps),
                side.memory_gib,
                side.memory_percent,
            ]
        )
    yield Table(title="Runs", columns=list(columns), rows=rows, decimals=columns)
    names: tuple[str, ...] = ("run", "n", "median", "95 %", "99 %", "longest")
    rows = []
    for side in sides:
        # Upper percentiles and the longest: one slow step in a hundred is what a median hides.
        times = np.percentile(side.step_time_s, [50, 95, 99, 100]).tolist() if len(side.step_time_s) else [None] * 4
        rows.append([side.label, len(side.step_time_s) or None, *times])
    yield Table(title="Seconds a step", columns=names, rows=rows, decimals=dict.fromkeys(names, 3))
    names = ("run", "as the log says", "TorchTitan's count", "causal count")
    yield Table(
        title="MFU, % of the GPU's BF16 peak; the counts differ in attention alone",
        label="derived",
        columns=names,
        rows=[
            [side.label, side.mfu_logged_percent, side.mfu_percent(causal=False), side.mfu_percent(causal=True)]
            for side in sides
        ],
        decimals=dict.fromkeys(names, 2),
    )


def _machines(judged: Report) -> dict[str, str]:
    """Software and hardware of our runs; nothing where none is ours."""
    runs = [run for side in judged.sides for run in side.finished]

    def of_runs(value: Callable[[RunEnvironment], str]) -> str:
        return spread((value(run.environment) or "none") if run.environment else "unknown" for run in runs)

    if not runs:
        return {}
    versions = {name: of_runs(lambda one: one.versions.get(name, "")) for name in VERSIONS_SHOWN}  # noqa: B023 - asked now
    installed = [f"{name} {version}" for name, version in versions.items() if version != "none"]
    return {
        "moelab": of_runs(lambda one: one.moelab + (f", commit {one.git_commit}" if one.git_commit else "")),
        "Software": "; ".join([f"Python {of_runs(lambda one: one.python)}", *installed]),
        "Hardware": of_runs(lambda one: one.machine),
        "Memory": of_runs(lambda one: f"{one.memory_gib} GiB"),
        "System": of_runs(lambda one: one.platform),
    }


def _portable(command: str) -> str:
    """A launch command without the folders of the machine that ran it."""
    # Words, not a pattern over the text: a folder's name may hold spaces, which the command quotes.
    return " ".join(_without_folder(word) for word in shlex.split(command))


def _without_folder(word: str) -> str:
    before, slash, rest = word.partition("/")
    if not slash:
        return word
    parts = rest.split("/")
    if parts[-1].startswith("python"):  # the interpreter of a virtual environment, whatever its folder
        return f"{before}{parts[-1]}"
    if "runs" not in parts:
        return f"{before}…/{parts[-1]}"
    last = len(parts) - 1 - parts[::-1].index("runs")  # the innermost: people keep runs in folders of that name
    return f"{before}{'/'.join(parts[last:])}"
