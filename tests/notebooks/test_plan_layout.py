"""Notebook 05 on one node, and what it tells its reader to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from moelab.experiment import Experiment
from moelab.layout import SCHEDULES, bubble_fraction, check
from moelab.notebooks import execute, read_parameters
from moelab.notebooks.batch import END_MARKER, NotebookFailed
from moelab.plan import headroom_gib, plan
from moelab.search import search

ROOT = Path(__file__).parents[2]
NAME = "05_plan_layout"
NOTEBOOK = ROOT / "notebooks" / f"{NAME}.ipynb"
SMALL: dict[str, Any] = {
    "model": "671B",
    "hardware": "b200_x256",
    "nodes": 8,
    "gpus_per_node": 8,
    "seq_len": 8192,
    "local_batch": 64,
    "activation_checkpoint": "full",
    "compile": "model+loss",
    "dataset": "c4",
}
"""The exercises' experiment."""


def test_papermill_runs_it_on_one_node_and_a_person_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run All twice in one kernel, parameters edited by hand in between, and once more with a name that is mistyped."""
    monkeypatch.chdir(tmp_path)
    parameters = read_parameters(ROOT / "papermill_params" / NAME / "smoke.yaml")
    content = nbformat.read(NOTEBOOK, as_version=4)
    own, *others = [cell.source for cell in content.cells if cell.cell_type == "code"]
    edited = "\n".join([own, *(f"{name} = {value!r}" for name, value in {**parameters, "search_limit": 3}.items())])
    content.cells += [new_code_cell(source) for source in (edited, *others, f"{edited}\nnodse = 2", others[0])]
    twice, output = tmp_path / "twice.ipynb", tmp_path / "executed.ipynb"
    nbformat.write(content, twice)
    with pytest.raises(NotebookFailed, match="BadInput: unknown field 'nodse'; did you mean 'nodes'"):
        execute(twice, output, parameters)
    cells = nbformat.read(output, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data for output in outputs if "data" in output]
    assert sum("application/vnd.plotly.v1+json" in data for data in shown) == 2 * 4
    assert sum("application/vnd.jupyter.widget-view+json" in data for data in shown) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.count(END_MARKER) == 2
    assert "layouts judged" in printed
    assert "ep is 32: it must divide the ranks it shares out" in printed  # the unsolved first exercise


def test_an_illegal_layout_stops_with_its_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookFailed, match=r"Refused: .*ep is 32.*Legal ep: 1, 2, 4, 8, 16"):
        execute(NOTEBOOK, tmp_path / "executed.ipynb", {"pp": 16})


# What the notebook says that its reader should see


def test_the_published_layout_is_as_described() -> None:
    planned = plan(Experiment(**{**SMALL, "nodes": 32, "pp": 2, "tp": 2, "ep": 32}))
    assert planned.verdict.layout is not None
    assert (planned.verdict.layout.dp_shard, planned.verdict.layout.efsdp) == (64, 4)
    assert planned.fits
    assert planned.memory is not None
    assert planned.memory.dominant.startswith("gathered gradients")
    assert 0.15 < 1 - planned.memory.worst_gib / planned.memory.capacity_gib < 0.25
    parts = planned.memory.parts
    assert parts["activations"] < 0.05 * planned.memory.worst_gib


def test_the_search_is_led_by_the_layout_that_is_named() -> None:
    published = Experiment(**{**SMALL, "nodes": 32, "pp": 2, "tp": 2, "ep": 32})
    found = search(published, limit=8, headroom_gib=headroom_gib(published), global_batch=4096).candidates
    best = found[0]
    assert {candidate.experiment.tp for candidate in found} == {1}
    assert best.experiment.pp == 8
    assert best.bubble_fraction > bubble_fraction(SCHEDULES["1F1B"], pp=2, microbatches=64)


@pytest.mark.parametrize("answer", [{"pp": 8, "tp": 2, "ep": 8}, {"pp": 2, "tp": 2, "ep": 32}])
def test_answers_of_the_first_exercise(answer: dict[str, int]) -> None:
    assert not check(Experiment(**{**SMALL, "pp": 8, "tp": 2, "ep": 32})).legal
    assert check(Experiment(**{**SMALL, **answer})).legal


@pytest.mark.parametrize(("changes", "fits"), [({}, False), ({"nodes": 16}, True), ({"local_batch": 4}, True)])
def test_answer_of_the_second_exercise(changes: dict[str, int], fits: bool) -> None:
    other = Experiment(**{**SMALL, **changes})
    found = search(other, limit=1, headroom_gib=headroom_gib(other)).candidates
    assert bool(found) is fits
    if "local_batch" in changes:
        assert found[0].experiment.pp == 1


def test_answer_of_the_third_exercise() -> None:
    short = {name for name, schedule in SCHEDULES.items() if bubble_fraction(schedule, pp=8, microbatches=16) < 0.1}
    assert short == {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
    for schedule in short:
        deep = {**SMALL, "pp": 8, "ep": 8, "local_batch": 16, "pp_schedule": schedule}
        assert "torch 2.14" in " ".join(check(Experiment(**deep)).reasons)
        assert check(Experiment(**{**deep, "compile": "loss"})).legal
