"""What a person may give a notebook, and every notebook and parameter file of this repository."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from moelab import notebooks
from moelab.errors import BadInput
from moelab.notebooks import ConvergenceParameters, parameter_names, parameters, read_parameters, validated

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted((ROOT / "papermill_params").glob("*/*"))


def schema_of(notebook: Path) -> type[BaseModel]:
    """What the notebook itself checks its parameters against."""
    source = "".join(cell.source for cell in nbformat.read(notebook, as_version=4).cells)
    (name,) = re.findall(r"= validated\((\w+), globals\(\)\)", source)
    schema = getattr(notebooks, name)
    assert issubclass(schema, parameters.NotebookParameters)
    return schema


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    submit: bool
    nodes: int
    lr: float
    steps: int


DEFAULTS: dict[str, Any] = {"submit": False, "nodes": 1, "lr": 1.0e-3, "steps": 10}


def check(**given: Any) -> Small:
    return validated(Small, {**DEFAULTS, **given})


# The cases of "Notebook parameters"


@pytest.mark.parametrize("text", ["false", "False", "no", "off", "0"])
def test_a_text_that_says_false_never_submits(text: str) -> None:
    assert check(submit=text).submit is False


def test_a_text_that_says_true_does() -> None:
    assert check(submit="true").submit is True


@pytest.mark.parametrize("value", ["maybe", "", None, 2, math.nan])
def test_a_submit_that_is_neither_is_refused(value: object) -> None:
    with pytest.raises(BadInput, match=r"^submit: got .*; valid: "):
        check(submit=value)


def test_a_learning_rate_as_text() -> None:
    assert check(lr="1e-4").lr == 0.0001


@pytest.mark.parametrize("value", ["1,000", math.nan, math.inf, "", "ten", 2.5, None, True, False, [1]])
def test_steps_that_are_no_whole_number_are_refused(value: object) -> None:
    with pytest.raises(BadInput, match=r"^steps: got .*; valid: ") as refused:
        check(steps=value)
    assert len(str(refused.value).splitlines()) == 1


def test_an_unknown_parameter_gets_the_nearest_name() -> None:
    with pytest.raises(BadInput, match=r"^unknown field 'nodse'; did you mean 'nodes'\?$"):
        check(nodse=4)


def test_a_parameter_that_is_missing_is_named() -> None:
    with pytest.raises(BadInput, match=r"^lr: missing"):
        validated(Small, {name: value for name, value in DEFAULTS.items() if name != "lr"})


def test_what_jupyter_and_imports_put_into_globals_is_no_parameter() -> None:
    def function() -> None: ...

    around = {"__name__": "__main__", "_i1": "x", "In": [], "Out": {}, "sys": sys, "Small": Small, "f": function}
    assert validated(Small, {**DEFAULTS, **around}) == Small(**DEFAULTS)


# 06_compare_convergence


def convergence(**given: Any) -> ConvergenceParameters:
    notebook = ROOT / "notebooks" / "06_compare_convergence.ipynb"
    return validated(ConvergenceParameters, {**default_values(notebook), **given})


def test_the_study_of_the_parameters() -> None:
    given = {"seeds": "2", "steps": 5, "lr": "1e-2", "wgrad": "bf16", "ep": 2, "ranks": 4, "arms": "bf16, mxfp8"}
    plan = convergence(**given).to_study()
    assert [(one.arm, one.seed) for one in plan.experiments] == [
        ("bf16_standard", 0),
        ("mxfp8_standard_wgrad-bf16", 0),
        ("bf16_standard", 1),
        ("mxfp8_standard_wgrad-bf16", 1),
    ]
    assert {(one.steps, one.lr, one.ep, one.gpus_per_node) for one in plan.experiments} == {(5, 0.01, 2, 4)}
    assert convergence(arms="mxfp8,bf16").reference == "mxfp8_standard"
    assert convergence(runs_dir="out", study="s").study_folder == Path("out/s")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"study": "../up"}, "name: got '../up'"),
        ({"arms": "bf16,,mxfp8"}, "precision: got ''"),
        ({"arms": "bf16;mxfp8"}, "precision: got 'bf16;mxfp8'"),
        ({"arms": "bf16,bf16"}, "same arm and seed twice"),
    ],
)
def test_parameters_that_name_no_study(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        convergence(**given).to_study()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"seeds": 0},
        {"seeds": 101},
        {"lr": 0},
        {"lr": math.nan},
        {"final_fraction": 0},
        {"final_fraction": 1.5},
        {"margin_nats": -0.1},
        {"on_failure": "ignore"},
        {"ranks": True},
        {"dataset": "c5"},
    ],
)
def test_parameters_out_of_range(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(BadInput, match=rf"^{name}: got "):
        convergence(**given)


# Every notebook and parameter file here


def default_values(notebook: Path) -> dict[str, Any]:
    cells = nbformat.read(notebook, as_version=4).cells
    (source,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    values: dict[str, Any] = {}
    exec(source, {}, values)
    return values


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_short_and_tagged(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in content.cells) == 1
    assert "parameters" in code[0].metadata.get("tags", [])
    lines = [len([line for line in cell.source.splitlines() if line.strip()]) for cell in code]
    assert len(content.cells) <= 40
    assert sum(lines) <= 150
    assert max(lines[1:]) <= 20  # the first is the parameters, one a line
    assert code[-1].source.rstrip().endswith("complete()")
    assert "validated(" in code[1].source
    assert not any(line.lstrip().startswith(("%", "!")) for cell in code for line in cell.source.splitlines())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_parameters_cell_is_scalars_with_comments_that_its_schema_takes(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    (source,) = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert all(" = " in line and "  # " in line for line in source.splitlines())
    values = default_values(notebook)
    assert all(isinstance(value, str | int | float | bool) for value in values.values())
    schema = schema_of(notebook)
    assert list(schema.model_fields) == parameter_names(notebook)
    assert validated(schema, values).model_dump() == values


@pytest.mark.parametrize("file", PROFILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_parameter_file_fits_its_notebook(file: Path) -> None:
    notebook = ROOT / "notebooks" / f"{file.parent.name}.ipynb"
    assert file.suffix == ".yaml"
    assert notebook.exists()
    given, schema = read_parameters(file), schema_of(notebook)
    accepted = validated(schema, {**default_values(notebook), **given})
    for name in dir(schema):
        if name.startswith("to_"):  # the rules of what is made from them: a study, a layout
            getattr(accepted, name)()
    # Types as they are written, without help: `lr: 1e-4` would be text.
    for name, value in yaml.safe_load(file.read_text()).items():
        assert not (isinstance(value, str) and schema.model_fields[name].annotation in (int, float, bool)), name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_the_profile_of_a_cpu(notebook: Path) -> None:
    assert ROOT / "papermill_params" / notebook.stem / "cpu.yaml" in PROFILES
