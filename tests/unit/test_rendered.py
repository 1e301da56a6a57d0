"""The executed copies in ``rendered/``: whole, small, of the notebooks as they are, and silent about machines."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nbformat
import pytest
import render
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_support import NOTEBOOKS, PLOTLY, ROOT, WIDGET
from PIL import Image

from moelab.errors import BadInput
from moelab.notebooks import NotebookFailed
from moelab.privacy import without_secrets
from moelab.viz.theme import READERS_THEME

REMAKE = "run `make rendered`"
PLACES = re.compile(r"/(?:home|Users|root|tmp|var|work|mnt|scratch)/\w|site-packages|\.venv/")
SHOWN = {"image/png", "text/plain", "text/html", "text/markdown"}


def is_of(copy: Any, notebook: Path) -> bool:
    """Whether a copy was made from the notebook and its parameters as they are now, whatever the code under them."""
    return bool(copy.metadata["moelab"]["source_hash"] == render.source_hash(notebook))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_copy_is_of_its_notebook_whole_small_and_silent_about_the_machine(notebook: Path) -> None:
    copy = ROOT / "rendered" / notebook.name
    assert copy.exists(), REMAKE
    assert copy.stat().st_size <= 500_000
    content = nbformat.read(copy, as_version=4)
    assert is_of(content, notebook), f"{copy.name} is of an earlier notebook: {REMAKE}"
    nbformat.validate(content)
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert all(cell.execution_count for cell in content.cells if cell.cell_type == "code" and cell.source)
    assert {kind for output in outputs for kind in output.get("data", {})} <= SHOWN
    assert content.cells[0].source == render.stamp_text(content.metadata["moelab"])
    # What they printed, and no sources: a notebook may show what it hides.
    text = re.sub(r'"image/png": "[^"]*"', "", json.dumps([content.cells[0], outputs]))
    assert PLACES.findall(text) == []
    assert without_secrets(text) == text


def test_there_is_nothing_else_and_the_pictures_of_the_readme_are_those_of_the_copies() -> None:
    assert {path.name for path in (ROOT / "rendered").glob("*.ipynb")} == {path.name for path in NOTEBOOKS}
    shown = re.findall(r"rendered/pictures/(\w+)\.png", (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(render.PICTURES)
    for name, (notebook, number) in render.PICTURES.items():
        picture = (ROOT / "rendered" / "pictures" / f"{name}.png").read_bytes()
        assert picture == render.pictures_of(ROOT / "rendered" / f"{notebook}.ipynb")[number - 1], REMAKE
        assert OF_PICTURES[name] in titles_of(ROOT / "rendered" / f"{notebook}.ipynb")[number - 1]


OF_PICTURES = {
    "where_the_step_goes": "A step's seconds by arm",
    "measured_arms": "over stock TorchTitan's",
    "break_even": "saves time only above the bold line",
    "forced_balance": "Bytes of an MoE layer by the degree",
    "loss_difference": "nats from BF16",
}
"""What README says beside each picture, in the words of the figure: a copy may get or lose a figure before it."""


def titles_of(copy: Path) -> list[str]:
    """Titles of a copy's figures, in the order of its pictures."""
    outputs = [output for cell in nbformat.read(copy, as_version=4).cells for output in cell.get("outputs", [])]
    return [output.data["text/plain"] for output in outputs if "image/png" in output.get("data", {})]


def clone(folder: Path, *cells: Any) -> Path:
    """A folder with one notebook and its profile."""
    path, profile = folder / "notebooks" / "01_small.ipynb", folder / "papermill_params" / "01_small" / "cpu.yaml"
    for made in (path, profile):
        made.parent.mkdir(parents=True)
    profile.write_text("steps: 2\n")
    parameters = new_code_cell("steps = 1  # steps", metadata={"tags": ["parameters"]})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(new_notebook(cells=[parameters, *cells], metadata=metadata), path)
    return path


SHOWS = f"""from IPython.display import display
import pathlib, sys
picture = {{"image/png": pathlib.Path(PNG).read_text()}}
display({{"{PLOTLY}": {{"layout": {{"title": {{"text": "<b>Losses<br>fall</b>"}}}}}}}} | picture, raw=True)
display({{"{WIDGET}": {{"model_id": "x"}}, "text/plain": "VBox()"}}, raw=True)
display({{"{WIDGET}": {{"model_id": "y"}}, "text/plain": "One step"}} | picture, raw=True)
print(pathlib.Path("runs").absolute(), sys.executable, flush=True)
print("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", steps)
pathlib.Path("runs", "study").mkdir()"""


def test_a_copy_keeps_what_every_reader_can_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png = io.BytesIO()
    Image.radial_gradient("L").resize((400, 400)).convert("RGB").save(png, "PNG", compress_level=0)
    (tmp_path / "png").write_bytes(base64.b64encode(png.getvalue()))
    monkeypatch.setattr(render, "KEEPS_RUNS", ("01_small",))
    notebook = clone(tmp_path, new_code_cell(SHOWS.replace("PNG", repr(str(tmp_path / "png")))))
    copy = tmp_path / "rendered" / notebook.name
    render.render(notebook, copy, "4d86c9c")
    content = nbformat.read(copy, as_version=4)
    assert is_of(content, notebook)
    stamp, _, injected, cell = content.cells
    assert "steps = 2" in injected.source
    assert "(steps = 2)" in stamp.source
    assert "code of commit 4d86c9c" in stamp.source
    figure, explorer, printed = cell.outputs
    assert explorer.data == {"image/png": figure.data["image/png"], "text/plain": "One step"}
    assert figure.data["text/plain"] == "Losses fall"
    assert Image.open(io.BytesIO(base64.b64decode(figure.data["image/png"]))).size == (400, 400)
    assert len(figure.data["image/png"]) < len(png.getvalue()) / 4
    assert printed.text == "./runs $VENV/bin/python\nHF_TOKEN=*** 2\n"
    assert (tmp_path / "runs" / "study").is_dir()
    assert set(content.metadata) == {"kernelspec", "language_info", "moelab"}
    (tmp_path / "papermill_params" / "01_small" / "cpu.yaml").write_text("steps: 3\n")
    assert not is_of(content, notebook)


@pytest.mark.parametrize(
    ("data", "words"),
    [({"text/plain": "x" * 500_000}, "would have 50"), ({PLOTLY: {}}, "figures have no PNG here")],
)
def test_what_cannot_be_a_copy_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], words: str
) -> None:
    notebook = clone(tmp_path, new_code_cell(outputs=[new_output("display_data", data=data)]))
    monkeypatch.setattr(render, "execute", lambda made, output, *_, **__: output.write_bytes(made.read_bytes()))
    with pytest.raises((NotebookFailed, BadInput), match=words):
        render.render(notebook, tmp_path / "rendered" / notebook.name, None)
    assert not (tmp_path / "rendered").exists()


def test_the_command_makes_all_copies_of_one_commit_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = clone(tmp_path)
    copy = tmp_path / "rendered" / notebook.name
    copy.parent.mkdir()
    for other in (copy, notebook.with_name("00_bad.ipynb")):  # the copy is there, but code may have changed since
        other.write_bytes(notebook.read_bytes())
    stand_in = Mock(side_effect=[NotebookFailed("00_bad: it failed"), None])
    monkeypatch.setattr(render, "render", stand_in)
    monkeypatch.setattr(render, "git_commit", Mock(side_effect=["4d86c9c", None, None]))  # a copy makes the tree dirty

    def call(folder: Path, *names: str) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["render", *names])
        return render.main(), capsys.readouterr().err

    code, printed = call(tmp_path)
    assert (code, "moelab: 00_bad: it failed" in printed) == (1, True)
    assert stand_in.call_args.args == (Path("notebooks", notebook.name), Path("rendered", notebook.name), "4d86c9c")
    assert call(tmp_path, "02_none")[0] == 2
    code, printed = call(Path("/"))
    assert (code, "there are no notebooks here" in printed) == (2, True)


def test_a_copy_has_no_style_for_figures_that_it_does_not_have() -> None:
    style = new_output("display_data", {"text/html": READERS_THEME})
    table = new_output("display_data", {"text/html": "<table></table>"})
    cell = new_code_cell("", outputs=[style, table])
    render.clean(cell, lambda data: data)
    assert [output.data for output in cell.outputs] == [{"text/html": "<table></table>"}]
