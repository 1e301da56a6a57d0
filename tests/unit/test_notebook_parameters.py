"""What a person may give a notebook, and every notebook and parameter file of this repository."""

from __future__ import annotations

import math
import symtable
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from notebook_support import NOTEBOOKS, ROOT, default_values, parameters_cell, parameters_of, sources
from run_support import make_run

from moelab import read_study
from moelab.errors import BadInput
from moelab.notebooks import parameter_names, read_parameters
from moelab.notebooks.parameters import NotebookParameters
from moelab.planning.project import cluster_like, on
from moelab.planning.project import project as project_one
from moelab.runs.directory import TRACES_FOLDER
from moelab.runs.status import State

PROFILES = sorted((ROOT / "papermill_params").glob("*/*"))


class Small(NotebookParameters):
    submit: bool
    nodes: int
    lr: float
    steps: int


DEFAULTS: dict[str, Any] = {"submit": False, "nodes": 1, "lr": 1.0e-3, "steps": 10}


def check(**given: Any) -> Small:
    return Small.of({**DEFAULTS, **given})


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        # A text that says false never submits.
        (
            "submit",
            {"false": False, "False": False, "no": False, "off": False, "0": False, "true": True},
            ("maybe", "", None, 2, math.nan),
        ),
        ("lr", {"1e-4": 0.0001}, ("1,000", "ten")),
        ("steps", {"5": 5}, ("1,000", math.nan, math.inf, "", "ten", 2.5, None, True, False, [1])),
    ],
)
def test_values_that_papermill_gives_as_text(name: str, valid: dict[str, Any], invalid: tuple[Any, ...]) -> None:
    assert {text: getattr(check(**{name: text}), name) for text in valid} == valid
    for value in invalid:
        with pytest.raises(BadInput, match=rf"^{name}: got .*; valid: [^\n]*$"):
            check(**{name: value})


def test_of_all_that_a_kernel_holds_only_the_parameters_are_read_and_one_that_is_missing_is_named() -> None:
    around = {"__name__": "__main__", "In": [], "sys": sys, "nodse": 4}
    assert Small.of({**DEFAULTS, **around}) == Small(**DEFAULTS)
    with pytest.raises(BadInput, match=r"^lr: missing"):
        Small.of({name: value for name, value in DEFAULTS.items() if name != "lr"})


# 06_compare_convergence


convergence = partial(parameters_of, "06_compare_convergence")


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
    assert [one.wgrad for one in plan.experiments] == ["mxfp8", "bf16"] * 2  # BF16's own is its default
    assert convergence(arms="mxfp8,bf16").reference == "mxfp8_standard"
    assert convergence(arms="bf16,nvfp4").to_study().arms == ("bf16_standard", "nvfp4_standard")
    own = convergence(runs_dir="out", study="s")
    assert (own.runs_dir, own.to_study().name) == ("out", "s")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("study", "../up", "name: got '../up'"),
        ("arms", "bf16,,mxfp8", "precision: got ''"),
        ("arms", "bf16;mxfp8", "precision: got 'bf16;mxfp8'"),
        ("arms", "bf16,bf16", "same arm and seed twice"),
    ],
)
def test_parameters_that_name_no_study(name: str, value: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        convergence(**{name: value}).to_study()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("notebook", "wrong"),
    [
        ("02_find_grouped_gemm_break_even", {"aspect": [0, math.inf]}),
        ("03_route_tokens", {"tokens": [0, 1_000_001], "token": [-1], "skew": [-0.1], "routing": ["learned"]}),
        ("05_plan_layout", {"rank": [-1], "search_limit": [0, 51]}),
        # The first three are fields of an experiment, and have its bounds.
        (
            "06_compare_convergence",
            {"lr": [math.nan], "dataset": ["c5"], "ep": [-1], "seeds": [0, 101], "ranks": [True]},
        ),
        ("06_compare_convergence", {"final_fraction": [0, 1.5], "margin_nats": [-0.1], "on_failure": ["ignore"]}),
        ("07_compare_throughput", {"submit": ["maybe"], "steps": [4], "precision": ["bf16"], "ep": [1]}),
        ("08_project_to_cluster", {"gpu": ["B100"], "network_gb_s": [0], "price_per_gpu_hour": ["nan"]}),
        ("11_explain_step", {"trace_step": [1], "layer": [-2], "phase": ["optimizer"]}),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(notebook: str, wrong: dict[str, list[Any]]) -> None:
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(BadInput, match=rf"^{name}: got "):
            make_all(parameters_of(notebook, **{name: value}))


def make_all(parameters: Any) -> None:
    """What is made from parameters, a study or a layout, with the rules of each."""
    for name in dir(parameters):
        if name.startswith("to_"):
            getattr(parameters, name)()


def test_a_precision_without_a_speed_is_sent_to_the_notebook_of_its_numbers() -> None:
    with pytest.raises(BadInput, match="notebook 06 trains it"):
        parameters_of("07_compare_throughput", precision="nvfp4")


@pytest.mark.parametrize(
    ("states", "submit", "will"),
    [
        ([], True, True),
        ([], False, False),
        ([State.COMPLETED, State.FAILED], True, True),
        ([State.COMPLETED, State.COMPLETED], True, False),
        ([State.RUNNING, State.FAILED], True, False),
    ],
)
def test_a_study_is_submitted_while_it_lacks_a_run_and_none_is_under_way(
    tmp_path: Path, states: list[State], submit: bool, will: bool
) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("name: mine\ndescription: Ours.\nscheduler: slurm\ngpus_per_node: 8\n")
    given = {"cluster": str(profile), "runs_dir": str(tmp_path / "runs"), "seeds": 1}
    parameters = convergence(**given, submit=submit)
    for experiment, state in zip(parameters.to_study().experiments, states, strict=False):
        make_run(tmp_path / "runs", experiment, [8.0], state=state)
    assert parameters.will_submit is will


def test_a_study_that_trains_here_is_not_submitted() -> None:
    with pytest.raises(BadInput, match="cluster: got 'local'; valid: a profile with Slurm, because submit is True"):
        convergence(submit="true")


def test_a_study_s_file_stands_for_all_that_makes_one() -> None:
    parameters = convergence(study_file="convergence_gpu", seeds=1, runs_dir="out")
    assert parameters.to_study() == read_study("convergence_gpu")
    assert (parameters.runs_dir, parameters.to_study().name) == ("out", "convergence_gpu")


def test_the_arms_of_a_cluster_have_its_network() -> None:
    parameters = parameters_of("08_project_to_cluster", network_gb_s=25)
    like = cluster_like("B200", nodes=32, network_gb_s=25)
    for experiment in parameters.to_study().experiments:
        fields = {"precision": experiment.precision, "ep_backend": experiment.ep_backend}
        same = project_one(on("B200", parameters.to_experiment(), **fields), like)
        assert project_one(experiment).tps == same.tps
        assert project_one(experiment).interval == same.interval


def test_one_run_is_made_to_be_watched_and_one_to_be_traced(tmp_path: Path) -> None:
    (watched,) = parameters_of("09_launch_and_watch_run").to_study().experiments
    mine = parameters_of("11_explain_step", record=True, profiler_step=2, study="s", runs_dir=str(tmp_path))
    (traced,) = mine.to_study().experiments
    assert (watched.seed, traced.seed, mine.to_choice()) == (0, 0, {"rank": None, "step": 2})
    # Of one second, in which their order is that of random names.
    runs = sorted((make_run(tmp_path, traced, [8.0]) for _ in range(3)), key=lambda run: run.path)
    for run in runs[:2]:
        (run.path / TRACES_FOLDER).mkdir(parents=True)
    assert mine.to_paths() == [runs[1].path]
    assert parameters_of("11_explain_step", trace="a.json", record=True).to_paths() == [Path("a.json")]


# Every notebook and parameter file here


def parameters_check_and_others(notebook: Path) -> tuple[str, str, list[str]]:
    """Sources of the parameters cell, of the code cell behind it, and of all others: a picture may come first."""
    code = sources(notebook.stem)
    place = code.index(parameters_cell(notebook.stem))
    return code[place], code[place + 1], code[:place] + code[place + 2 :]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stripped_and_short_and_its_schema_takes_its_commented_parameters(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    own, check, others = parameters_check_and_others(notebook)
    assert ".of(globals())" in check
    lines = [len([line for line in source.splitlines() if line.strip()]) for source in (own, check, *others)]
    assert len(content.cells) <= 40
    assert sum(lines) <= 150
    assert max(lines[1:]) <= 20  # the first is the parameters, one a line
    assert not any(line.lstrip().startswith(("%", "!")) for cell in code for line in cell.source.splitlines())
    values, parameters = default_values(notebook.stem), parameters_of(notebook.stem)
    assert all(" = " in line and "  # " in line for line in own.splitlines())
    assert all(isinstance(value, str | int | float | bool) for value in values.values())
    assert set(parameters.model_dump()) == set(parameter_names(notebook))
    assert parameters.model_dump() == values


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_again_in_its_kernel(notebook: Path) -> None:
    """With every name bound that any of its cells binds, wherever they are, as after a whole run."""
    _, check, others = parameters_check_and_others(notebook)
    values = default_values(notebook.stem)
    bound = {name: object() for cell in (check, *others) for name in names_bound_at_its_top(cell)}
    assert len(bound) > 2
    assert not bound.keys() & values.keys(), "the cell that checks, run alone, would take them for parameters"


def names_bound_at_its_top(cell: str) -> set[str]:
    """Every global that a cell assigns, imports, defines or loops over."""
    symbols = symtable.symtable(cell, "cell", "exec").get_symbols()
    return {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()} - {"parameters"}


def test_every_notebook_has_the_profile_of_a_cpu() -> None:
    assert NOTEBOOKS
    assert {ROOT / "papermill_params" / notebook.stem / "cpu.yaml" for notebook in NOTEBOOKS} <= set(PROFILES)


@pytest.mark.parametrize("file", PROFILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_parameter_file_fits_its_notebook(file: Path) -> None:
    notebook = ROOT / "notebooks" / f"{file.parent.name}.ipynb"
    assert file.suffix == ".yaml"
    assert notebook.exists()
    accepted = parameters_of(notebook.stem, **read_parameters(file))
    make_all(accepted)
    # Types as they are written, without help: `lr: 1e-4` would be text.
    for name, value in yaml.safe_load(file.read_text()).items():
        assert not (isinstance(value, str) and type(accepted).model_fields[name].annotation in (int, float, bool)), name
