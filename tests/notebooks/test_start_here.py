"""Notebook 00 with its defaults, its exercise, and the map of all notebooks."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import nbformat
import pytest
from notebook_support import ROOT, Ran

from moelab.health.doctor import examine, trains
from moelab.notebooks.shipped import MINUTES_AND_HARDWARE, markdown_table
from moelab.runs.collect import collect
from moelab.runs.table import joined_rows

pytestmark = pytest.mark.training
FOLDER = ROOT / "notebooks"
NOTEBOOK = FOLDER / "00_start_here.ipynb"


def test_it_trains_both_arms_here(by_nbmake: Callable[[str], Ran]) -> None:
    ran = by_nbmake(NOTEBOOK.stem)
    arms, _ = (text for text in ran.shown("text/html") if "<table" in text)
    (notebooks,) = ran.shown("text/markdown")
    for _, what, words in trains(examine().arms):
        assert html.escape(what) in arms
        assert html.escape(words) in arms
    assert notebooks == markdown_table()
    published, losses = ran.titles()
    assert "quoted" in published
    assert "emulated MXFP8 kernels" in losses
    runs = collect(ran.folder / "runs")
    assert sorted((run.arm, run.finished) for run in runs) == [("bf16_standard", True), ("mxfp8_standard", True)]
    losses_at = joined_rows(runs).pivot_table(index="step", columns="arm", values="loss")
    assert losses_at.iloc[0].between(8.0, 8.2).all()  # what the notebook says that its reader should see
    assert losses_at.iloc[-1].between(6.3, 6.9).all()
    assert losses_at.diff(axis=1).abs().max(axis=None) < 0.3


def test_the_readme_has_the_same_map() -> None:
    assert markdown_table("notebooks/") in (FOLDER.parent / "README.md").read_text()


def test_the_map_has_every_notebook_with_its_own_minutes() -> None:
    assert list(MINUTES_AND_HARDWARE) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name, (minutes, _) in MINUTES_AND_HARDWARE.items():
        title = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells[0].source
        (said,) = [line for line in title.splitlines() if "minute" in line]
        assert minutes in said or "under a minute" in said, name


def test_links_between_notebooks_lead_somewhere() -> None:
    for path in FOLDER.glob("*.ipynb"):
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        for target in re.findall(r"\]\(([^)]+\.ipynb)\)", text):
            assert (FOLDER / target).exists(), f"{path.name}: {target}"
