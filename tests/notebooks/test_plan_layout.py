"""Notebook 05 on one node, and what it tells its reader to see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell
from notebook_support import PLOTLY, ROOT, WIDGET, parameters_of, ran, sources

from moelab.errors import BadInput
from moelab.experiment import EPBackend, Experiment
from moelab.model import count_parameters, shape_for
from moelab.model.hugging_face import published_models
from moelab.notebooks import execute, read_parameters
from moelab.notebooks.batch import NotebookFailed
from moelab.planning.advice import recommend
from moelab.planning.plan import plan
from moelab.planning.project import project

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
    """Run All twice in one kernel, parameters edited by hand in between, and once more with a value that is wrong."""
    monkeypatch.chdir(tmp_path)
    parameters = read_parameters(ROOT / "papermill_params" / NAME / "smoke.yaml")
    content = nbformat.read(NOTEBOOK, as_version=4)
    own, *others = sources(NAME)
    edited = "\n".join([own, *(f"{name} = {value!r}" for name, value in {**parameters, "search_limit": 3}.items())])
    content.cells += [new_code_cell(source) for source in (edited, *others, f"{edited}\nnodes = 0", others[0])]
    twice, output = tmp_path / "twice.ipynb", tmp_path / "executed.ipynb"
    nbformat.write(content, twice)
    with pytest.raises(NotebookFailed, match="BadInput: nodes: got 0"):
        execute(twice, output, parameters)
    copy = ran(output)
    assert (len(copy.shown(PLOTLY)), len(copy.shown(WIDGET))) == (2 * 4, 2)
    best = [text for text in copy.shown("text/html") if "legal · fits (" in text and "tokens/s" in text]
    assert sum("Best layouts" in text for text in best) == 2
    assert "ep is 32: it must divide the ranks it shares out" in copy.printed  # the unsolved first exercise


def test_an_illegal_layout_stops_with_its_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    smoke = read_parameters(ROOT / "papermill_params" / NAME / "smoke.yaml")
    with pytest.raises(NotebookFailed, match=r"Refused: .*ep is 8.*Legal ep: 1, 2, 4"):
        execute(NOTEBOOK, tmp_path / "executed.ipynb", smoke | {"pp": 2})


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


def test_the_best_layouts_avoid_the_network_and_deepep_gains_less_there_than_at_the_published_one() -> None:
    published = Experiment(**{**SMALL, "nodes": 32, "pp": 2, "tp": 2, "ep": 32})
    found = recommend(published, fixed=("cp", "dp_replicate", "tp", "pp_schedule"), limit=5)
    assert all(one.experiment.ep <= 8 for one in found.ranked)
    (deepep,) = [gain for gain in found.gains if gain.name == "DeepEP"]
    there = project(published.model_copy(update={"ep_backend": EPBackend.DEEPEP})).tps / project(published).tps
    assert 1.25 < there < 1.45
    assert deepep.interval.value < 20


def test_a_model_is_a_name_a_configuration_or_dimensions(tmp_path: Path) -> None:
    smoke = read_parameters(ROOT / "papermill_params" / NAME / "smoke.yaml")

    def experiment(model: str, **changes: Any) -> Experiment:
        made: Experiment = parameters_of(NAME, **smoke | {"model": model, **changes}).to_experiment()
        return made

    preset = experiment("Qwen3-235B-A22B")
    assert count_parameters(shape_for(preset)).total == pytest.approx(235.1e9, rel=1e-3)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published_models()["Qwen3-235B-A22B"]["config"]))
    assert experiment(str(config)) == preset
    smaller = shape_for(experiment("Qwen3-235B-A22B", shape="n_layers: 10, num_experts: 64"))
    assert (smaller.n_layers, smaller.num_experts, smaller.dim) == (10, 64, 4096)
    with pytest.raises(BadInput, match="nor one of the models DeepSeek-V3"):
        experiment("Qwen9")
