"""Tables and long texts as notebooks show them: numbers aligned, sorted by a click on a heading, folded when long.

The click is an attribute of the table, not a script: JupyterLab keeps it in outputs that it trusts and drops it from
all others, and GitHub drops it too, where the table is then simply a table.
"""

from __future__ import annotations

import html
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from moelab.privacy import shown

MOST_ROWS: Final = 12
"""A longer table is folded."""
# Sorts the body by the column of the heading that was clicked, the other way round at the next click. A cell counts by
# the number that it begins with, else by its text; a dash is no value and comes last either way.
SORT: Final = """const h=event.target.closest('thead th');if(h){
const b=this.tBodies[0],i=h.cellIndex,up=h.dataset.up!=='1',
v=r=>r.cells[i].textContent.replace(/[,+]/g,'').replace('−','-');
[...b.rows].sort((p,q)=>{const x=v(p),y=v(q),m=parseFloat(x),n=parseFloat(y);
return x==='–'||y==='–'?(x==='–')-(y==='–'):(up?1:-1)*(isNaN(m)||isNaN(n)?x.localeCompare(y):m-n)})
.forEach(r=>b.append(r));h.dataset.up=up?'1':'0'}"""


@dataclass(frozen=True, kw_only=True)
class TableView:
    """What :func:`as_table` returns; a notebook shows it as HTML, a terminal as text, a report in its page."""

    frame: pd.DataFrame
    summary: str
    decimals: Mapping[str, int]

    def __repr__(self) -> str:
        """The table as text."""
        text: str = pd.DataFrame(dict(zip(self.columns, self._cells, strict=True))).to_string(index=False)
        return f"{shown(self.summary)}\n{text}" if self.summary else text

    @property
    def columns(self) -> list[str]:
        """The headings."""
        return [shown(str(name)) for name in self.frame.columns]

    @property
    def _cells(self) -> list[list[str]]:
        return [_words(column, self.decimals.get(str(name))) for name, column in self.frame.items()]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells in words, row by row."""
        return [*zip(*self._cells, strict=True)]

    @property
    def is_number(self) -> list[bool]:
        """Whether each column is one of numbers, a missing one among them."""
        columns = (column for _, column in self.frame.items())
        kinds = [{isinstance(value, numbers.Real) for value in column if value is not None} for column in columns]
        return [kind == {True} for kind in kinds]

    def _repr_html_(self) -> str:
        aligned = [f"text-align:{'right' if one else 'left'}" for one in self.is_number]
        head = "".join(
            f"<th style='{style};cursor:pointer' title='sort'>{html.escape(name)}</th>"
            for name, style in zip(self.columns, aligned, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td style='{style}'>{html.escape(cell)}</td>" for cell, style in zip(row, aligned, strict=True))
            + "</tr>"
            for row in self.rows
        )
        table = f"<table class='dataframe' onclick='{html.escape(SORT)}'><thead><tr>{head}</tr></thead>"
        table += f"<tbody>{body}</tbody></table>"
        summary = html.escape(shown(self.summary))
        if len(self.frame) <= MOST_ROWS:
            return (f"<div><b>{summary}</b></div>" if summary else "") + table
        folded = f"{summary} " if summary else ""
        return f"<details><summary><b>{folded}</b>({len(self.frame)} rows)</summary>{table}</details>"


def as_table(
    frame: pd.DataFrame, summary: str = "", *, decimals: Mapping[str, int] = MappingProxyType({})
) -> TableView:
    """A table that a notebook shows with ``display``, or as the last value of a cell.

    Args:
        frame: its columns' names are the headings; the index is not shown.
        summary: what the table is, above it; of a long table it stays when the table is folded.
        decimals: digits after the point by column; as many as four significant ones need where it is silent.

    Example:
        >>> as_table(pd.DataFrame({"rows": [1024], "gain (×)": [0.98]}), "measured")
        measured
         rows gain (×)
        1,024     0.98
    """
    return TableView(frame=frame, summary=summary, decimals=decimals)


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A long text that a notebook folds, such as a script; a terminal shows all of it."""

    text: str
    summary: str

    def __repr__(self) -> str:
        """All of the text."""
        return f"{self.summary}\n{shown(self.text)}"

    def _repr_html_(self) -> str:
        summary = f"<summary><b>{html.escape(self.summary)}</b> ({self.text.count(chr(10)) + 1} lines)</summary>"
        return f"<details>{summary}<pre>{html.escape(shown(self.text))}</pre></details>"


def _words(values: pd.Series[Any], decimals: int | None = None) -> list[str]:
    """Cells of a column; floats of one column have as many decimals as their most precise four digits need."""
    if decimals is None:
        written = [f"{value:.4g}" for value in values if isinstance(value, float) and math.isfinite(value)]
        decimals = max((len(one.partition(".")[2]) for one in written if "e" not in one), default=0)
    return [shown(text) if isinstance(text, str) else cell_text(text, decimals) for text in values]


def cell_text(value: object, decimals: int = 4) -> str:
    """One cell in words: a float with so many decimals (4, as a loss is written), a dash for a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:,.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
