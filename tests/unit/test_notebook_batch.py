"""Running notebooks in batch: believed only where the last cell says that it was reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moelab.errors import BadInput
from moelab.notebooks import NotebookFailed, execute, parameter_names, read_parameters
from moelab.notebooks.batch import END_MARKER

PARAMETERS = "steps = 3  # steps\nlr = 1.0e-3  # learning rate"
CHECK = """from moelab.notebooks.parameters import NotebookParameters
class Small(NotebookParameters):
    steps: int
    lr: float
parameters = Small.of(globals())
print("steps", repr(parameters.steps), "lr", repr(parameters.lr))"""


def notebook(folder: Path, *sources: str, tags: tuple[str, ...] = ("parameters", "")) -> Path:
    cells = [new_code_cell(source) for source in sources]
    for cell, tag in zip(cells, tags, strict=False):
        cell.metadata["tags"] = [tag] if tag else []
    content = new_notebook(cells=[new_markdown_cell("# A notebook"), *cells])
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path = folder / "a.ipynb"
    nbformat.write(content, path)
    return path


def test_success_prints_while_it_runs_and_keeps_the_executed_copy(tmp_path: Path) -> None:
    source = notebook(tmp_path, PARAMETERS, CHECK)
    (tmp_path / "cpu.yaml").write_text("steps: 5\nlr: 1.0e-2\n")
    command = [sys.executable, "-m", "moelab.notebooks", str(source)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 60, "cwd": tmp_path}
    done = subprocess.run([*command, "made/out.ipynb", "-f", "cpu.yaml", "-p", "lr", "1e-4"], **options)
    assert (done.returncode, done.stdout) == (0, f"steps 5 lr 0.0001\n{END_MARKER}\n")
    executed = nbformat.read(tmp_path / "made" / "out.ipynb", as_version=4)
    assert [cell.metadata.get("tags") for cell in executed.cells[1:3]] == [["parameters"], ["injected-parameters"]]
    assert all(cell.outputs == [] for cell in nbformat.read(source, as_version=4).cells if cell.cell_type == "code")
    bad = subprocess.run([*command, "out.ipynb", "-p", "stepz", "4"], **options)
    refusal = "moelab: a.ipynb has no parameter 'stepz'; did you mean 'steps'?\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", refusal)


@pytest.mark.parametrize(
    ("cell", "kernel", "said"),
    [
        ("raise ValueError('two\\nlines')", "python3", "ValueError: two lines; executed copy: .*/out.ipynb$"),
        ("raise AssertionError", "python3", "AssertionError; executed copy: "),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "python3", ".*(died|reach its end)"),
        ("import time\ntime.sleep(3600)", "python3", "a cell took longer than 4 s: import time; executed copy: "),
        ("x = 1", "no-such-kernel", ".*no-such-kernel"),
    ],
)
def test_a_notebook_that_does_not_come_to_its_end_is_a_failure(
    tmp_path: Path, cell: str, kernel: str, said: str
) -> None:
    source, output = notebook(tmp_path, PARAMETERS, cell), tmp_path / "out.ipynb"
    content = nbformat.read(source, as_version=4)
    content.metadata["kernelspec"]["name"] = kernel
    nbformat.write(content, source)
    with pytest.raises(NotebookFailed, match=rf"^a\.ipynb: {said}") as failed:
        execute(source, output, {}, cell_timeout_s=4)
    assert (failed.value.exit_code, output.exists()) == (1, True)


def test_a_notebook_whose_end_was_not_reached_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a killed kernel leaves it: without an error, but the last cell has said nothing."""
    source = notebook(tmp_path, PARAMETERS, CHECK)
    monkeypatch.setattr(papermill, "execute_notebook", lambda content, *_, **__: content)
    with pytest.raises(NotebookFailed, match="did not reach its end"):
        execute(source, tmp_path / "out.ipynb", {})


@pytest.mark.parametrize(
    ("cell", "tags", "name", "said"),
    [
        *(
            (PARAMETERS, tags, name, f"has {count} cells tagged 'parameters' instead of one: it would run its defaults")
            for tags, count in (((), 0), (("Parameters",), 0), (("parameters", "parameters"), 2))
            for name in ("steps", None)
        ),
        (PARAMETERS, ("parameters",), "stepz", "has no parameter 'stepz'; did you mean 'steps'?"),
        (PARAMETERS, ("parameters",), "precision", "has no parameter 'precision'; it has: steps, lr"),
        *(
            (cell, ("parameters",), None, "the parameters cell is not Python")
            for cell in ("steps =", "%time steps = 3", "# Parameters\n**bold**")
        ),
    ],
)
def test_parameters_that_would_not_reach_the_notebook_are_refused_before_anything_runs(
    tmp_path: Path, cell: str, tags: tuple[str, ...], name: str | None, said: str
) -> None:
    source = notebook(tmp_path, cell, CHECK, tags=tags)
    with pytest.raises(BadInput) as error:
        execute(source, tmp_path / "out.ipynb", {name: 4} if name else {})
    assert said in str(error.value)
    assert (error.value.exit_code, list(tmp_path.iterdir())) == (2, [source])


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}', None])
def test_what_is_no_notebook(tmp_path: Path, text: str | None) -> None:
    source = tmp_path / "a.ipynb"
    if text is not None:
        source.write_text(text)
    with pytest.raises(BadInput, match="cannot be read: No such file" if text is None else "is not a notebook"):
        execute(source, tmp_path / "out.ipynb", {})


def test_annotated_parameters_count(tmp_path: Path) -> None:
    assert parameter_names(notebook(tmp_path, "steps: int = 3\na = b = 2\nc.d = 1")) == ["steps", "a", "b"]


@pytest.mark.parametrize("text", ["", "- steps", "steps: [1, 2]", "steps: {a: 1}", "steps: 1\nsteps: 2", "a: ["])
def test_a_parameter_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=r"cpu\.yaml"):
        read_parameters(file)
