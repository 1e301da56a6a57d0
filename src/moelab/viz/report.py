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
from collections.abc import Callable, Iterator, Mapping
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
from moelab.judge.report import Report, span_of
from moelab.judge.sides import SPEED_PACKAGES, differing_values
from moelab.privacy import each_text, shareable, without_secrets
from moelab.runs.settings import spread
from moelab.viz.study import (
    expert_load_figure,
    gradient_norms,
    loss_curves,
    loss_difference,
    run_differences,
    throughput_bars,
    verdict_intervals,
)
from moelab.viz.table import MOST_ROWS, SORT, TableView, as_table, cell_text
from moelab.viz.theme import ArmStyle, arm_styles

SIGNIFICANT_DIGITS = 5
"""Of a number that is drawn: far more than a pixel, and a third of the bytes that all of a float would take."""
PLOT_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


def write_study_report(judged: Report, path: Path, *, with_paths: bool = False) -> Path:
    """Write a report as one self-contained HTML file, which is replaced at once or not at all.

    Args:
        judged: of :func:`~moelab.judge.report.judge_paths` or :func:`~moelab.judge.report.judge_study`.
        path: file to write.
        with_paths: leave folders, host and user names in it.
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
    environment.filters |= {"cell": cell_text, "signed": _signed}
    figures = report_figures(judged)
    first = judged.reference.values
    same = {name for name in first if all(side.values.get(name) == first[name] for side in judged.sides)}
    drawings = [_drawing(figure, clean) for figure in figures.values()]
    page = environment.get_template("report.html.j2").render(
        judged=judged,
        contrast=contrast,
        settings=settings_table(judged) if judged.others else None,
        same_settings=" · ".join(f"{name} {value}" for name, value in first.items() if name in same),
        figures=figures,
        runs=runs_table(judged),
        provenance=provenance(judged, with_paths=with_paths),
        rows_shown=MOST_ROWS,
        sort=SORT,
        alphabet=json.dumps(ALPHABET),
        plotlyjs=_packed_plotlyjs() if figures else "",
        drawings=packed(json.dumps({"config": PLOT_CONFIG, "figures": drawings}, ensure_ascii=False)),
    )
    write_whole(path, page)
    return path


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


# A report's figures and tables


def settings_table(judged: Report) -> TableView:
    """What differs between the configurations, a column for each side."""
    differing = [[name, *values] for name, values in differing_values(judged.sides).items()]
    columns = ["setting", *(side.label for side in judged.sides)]
    frame = pd.DataFrame(differing or [["nothing known", *(None for _ in judged.sides)]], columns=columns, dtype=object)
    return as_table(frame, "What differs between the configurations, as far as they are known")


def report_figures(judged: Report) -> dict[str, go.Figure]:
    """The figures of a report by their captions."""
    return dict(_figures(judged))


def _figures(judged: Report) -> Iterator[tuple[str, go.Figure]]:
    styles = _styles(judged)
    if len(judged.verdicts) > 1:
        yield "Final loss of every arm, paired by seed.", verdicts_figure(judged)
    if judged.table["loss"].notna().any():
        yield "Training loss.", loss_figure(judged)
    for verdict in [one for one in judged.verdicts if one.seeds]:
        caption = f"Difference of {arm_label(verdict.arm)} from {arm_label(verdict.reference)}, paired by seed."
        yield caption, loss_difference(judged.table, verdict, style=styles[verdict.arm], note=judged.loss_note)
    if known := [one for one in judged.differences if one.steps]:  # without a common step there is nothing to draw
        by_label = {side.label: styles[side.name] for side in judged.sides}
        caption = "Loss difference from the first, at the steps that both logged."
        yield caption, run_differences(known, by_label, note=judged.loss_note)
    # A CPU's tokens/s would be read as a GPU's.
    if judged.throughput and not judged.on_cpu:
        yield "Throughput after the warm-up.", throughput_figure(judged)
    if judged.verdicts and np.isfinite(judged.table["grad_norm"]).any():
        yield "Gradient norm of every arm.", gradient_norms(judged.table, styles=styles)
    for side in judged.sides:
        # One seed of each: maps of experts cannot be averaged, as popular experts have other numbers in each.
        run = next((run for run in side.finished if run.load is not None), None)
        if run is not None and run.load is not None and run.experiment is not None:
            figure = expert_load_figure(run.load, ep=run.experiment.ep, name=f"{side.label}, seed {run.seed}")
            yield f"Load of the experts, {side.label}.", figure


def _styles(judged: Report) -> dict[str, ArmStyle]:
    """A look for each side, alike in all figures and in the order of the sides."""
    looks = arm_styles(side.name for side in judged.sides)
    return {side.name: looks[side.name] for side in judged.sides}


def verdicts_figure(judged: Report) -> go.Figure:
    """The verdict on every arm, on its final training loss: an interval and a margin a row.

    Raises:
        BadInput: there is no verdict.
    """
    if not judged.verdicts:
        raise BadInput("there is no verdict: it takes a finished run of the reference and of another arm")
    rows = {arm_label(verdict.arm): verdict for verdict in judged.verdicts}
    seeds = span_of(verdict.n_seeds for verdict in judged.verdicts)
    title = f"Final training loss against {arm_label(judged.verdicts[0].reference)}; common seeds: {seeds}"
    return verdict_intervals(rows, title, note=judged.loss_note)


def loss_figure(judged: Report) -> go.Figure:
    """Training loss of every arm of a study, or of runs side by side.

    Raises:
        BadInput: no run logged a loss.
    """
    table = judged.table[judged.table["loss"].notna()]
    if table.empty:
        raise BadInput("none of these runs logged a loss")
    marks = [mark for side in judged.sides for run in side.runs for mark in run.grad_norm_marks]
    last = judged.final_fraction
    return loss_curves(table, final_fraction=last, styles=_styles(judged), note=judged.loss_note, marks=marks)


def throughput_figure(judged: Report) -> go.Figure:
    """Tokens per second with the gains that are claimed.

    Raises:
        BadInput: no run has a speed after its warm-up.
    """
    if not judged.throughput:
        raise BadInput("none of these runs logged a speed after its warm-up")
    note = "; ".join(judged.speed_notes)
    return throughput_bars(judged.throughput, gains=judged.gains, styles=_styles(judged), note=note)


def runs_table(judged: Report) -> TableView:
    """Every run with its numbers, and the reason of each that is not judged."""
    names = {
        "side": "arm",
        "seed": "seed",
        "status": "status",
        "steps": "steps",
        "final_loss_nats": "final loss, nats",
        "held_out_loss_nats": "held-out loss, nats",
        "tps": f"tokens/s {judged.rank_words}",
        "memory_gib": "memory per process, GiB" if judged.on_cpu else "memory per GPU, GiB",
        "machine": "machine",
        "reason": "reason",
    }
    decimals = dict(zip(names.values(), (0, 0, 0, 0, 4, 4, 0, 2, 0, 0), strict=True))
    # As objects: beside a missing value pandas would make floats of whole numbers. A seed is a name: 2026, not 2,026.
    rows = [row | {"seed": row["seed"] if row["seed"] is None else str(row["seed"])} for row in judged.rows]
    frame = pd.DataFrame(rows, columns=[*names], dtype=object).rename(columns=names)
    return as_table(frame, "Runs (measured)", decimals=decimals)


def provenance(judged: Report, *, with_paths: bool = False) -> dict[str, str]:
    """What was run, where and with what; each line says how many runs have which where they are not alike."""
    shown = str if with_paths else _without_spaced_folders
    # Of `.` too, which has no name of its own; a link keeps the name that was typed.
    command = shlex.join(["moelab", "report", *(path.absolute().name for path in judged.paths)])
    facts = {}
    for name in ("machine", "moelab", "git_commit", "python", *SPEED_PACKAGES, "driver"):
        known = [value for side in judged.sides for value in side.facts.get(name, [])]
        runs = sum(len(side.runs) for side in judged.sides)
        facts[name] = spread([*known, *["unknown"] * (runs - len(known))]) if known else ""
    return {
        "Written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, by moelab {moelab.__version__}",
        "Command": command,
        **{name: words for name, words in facts.items() if words not in ("", "not installed")},
        **{
            f"Command, {one.name_of(run)}": shown(run.command)
            for one in judged.sides
            for run in one.runs
            if run.command
        },
    }


def _without_spaced_folders(command: str) -> str:
    """A command without its quoted folders, in whose names only a shell sees where a path ends."""
    words = shlex.split(command)
    return " ".join(f"{word.partition('/')[0]}…" if " " in word and "/" in word else word for word in words)
