"""The report of a study: one HTML file that opens offline and holds everything that is needed to judge the study.

plotly.js is written into the file once, and a content security policy forbids every network request, so what a reader
sees does not depend on a server. All text goes through Jinja2's autoescape: a run may be named anything. Before that it
goes through :func:`moelab.privacy.shareable`, wherever it came from, unless folders and names are asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from moelab.analysis.arms import contrast
from moelab.analysis.published import Label
from moelab.analysis.verdict import Verdict
from moelab.privacy import each_text, shareable, without_secrets
from moelab.runs.files import write_whole

Cell = str | float | int | None

PLOT_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "resetScale2d"]]}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its caption; ``label`` says how its numbers are known."""

    caption: str
    figure: go.Figure
    label: Label = "measured"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; cells are text or numbers, and None or NaN is shown as a dash.

    ``decimals`` gives digits after the point by column; 4, as a loss is written, where it is silent.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    label: Label = "measured"
    decimals: Mapping[str, int] = field(default_factory=dict)


def write_report(
    path: Path | str,
    *,
    title: str,
    verdicts: Sequence[Verdict] = (),
    figures: Sequence[Figure] = (),
    tables: Sequence[Table] = (),
    provenance: Mapping[str, str],
    notes: Sequence[str] = (),
    with_paths: bool = False,
) -> Path:
    """Write a study's report as one self-contained HTML file.

    Args:
        path: File to write. It is replaced at once or not at all.
        title: Title of the report.
        verdicts: Verdicts, each shown as a card with the numbers behind it.
        figures: Figures with captions.
        tables: Tables, such as one row a run.
        provenance: What was run, on what and with which versions, in the order to show.
        notes: Remarks a reader must see before the numbers, such as "MXFP8 kernels are emulated".
        with_paths: Leave folders, host and user names in the texts.

    Returns:
        The path.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_report(folder / "report.html", title="A study", provenance={"moelab": "0.1.0"}).name
        'report.html'
    """
    page = (
        _environment(with_paths=with_paths)
        .get_template("report.html.j2")
        .render(
            title=title,
            verdicts=verdicts,
            figures=[
                (figure, _figure_html(figure.figure, index, with_paths=with_paths))
                for index, figure in enumerate(figures, start=1)
            ],
            tables=tables,
            provenance=provenance,
            notes=notes,
            plotlyjs=Markup(get_plotlyjs()) if figures else "",  # noqa: S704 - plotly's own source, not input
        )
    )
    write_whole(Path(path), page)
    return Path(path)


def _environment(*, with_paths: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("moelab.viz"),
        autoescape=True,
        finalize=functools.partial(each_text, _clean(with_paths=with_paths)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": _cell, "signed": _signed, "p_value": _p_value}
    environment.globals["contrast"] = contrast
    environment.tests["numeric_cell"] = lambda value: value is None or isinstance(value, int | float)
    return environment


def _clean(*, with_paths: bool) -> Callable[[str], str]:
    """What every text goes through, once however often a page of thousands of runs repeats it."""
    return functools.lru_cache(maxsize=10_000)(without_secrets if with_paths else shareable)


def _figure_html(figure: go.Figure, index: int, *, with_paths: bool) -> Markup:
    """The figure's element and script; plotly escapes ``<``, ``>`` and ``/`` in the data that it writes."""
    content = figure.to_plotly_json()
    clean = _clean(with_paths=with_paths)
    text = go.Figure(each_text(clean, {"data": content["data"], "layout": content["layout"]})).to_html(
        full_html=False, include_plotlyjs=False, include_mathjax=False, config=PLOT_CONFIG, div_id=f"figure-{index}"
    )
    return Markup(text)  # noqa: S704


def _cell(value: Cell, decimals: int = 4) -> str:
    """Write a table cell; a dash stands for a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:,.{decimals}f}" if isinstance(value, float) else str(value)


def _signed(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:+.4f}"


def _p_value(value: float) -> str:
    return "–" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"
