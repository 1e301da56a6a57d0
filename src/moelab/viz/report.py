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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from moelab.analysis.arms import contrast
from moelab.analysis.published import Label
from moelab.analysis.verdict import Verdict
from moelab.files import write_whole
from moelab.privacy import each_text, shareable, without_secrets
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
