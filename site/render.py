"""Executed copies of the notebooks for readers without Jupyter: ``python site/render.py``.

A copy is read on GitHub, in VS Code and as nbconvert's HTML, so it holds what all three show: text, and each figure as
a PNG with its title. The figure's JSON is always left out: GitHub and nbconvert cannot draw it, and with it a copy is
several times as large. Widgets need a kernel; the picture that an explorer carries stays.

A stamp says what was run where, and with the code of which commit. A copy does not know of later changes of that code,
so all are made again before a release.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat

from moelab.errors import BadInput, MoelabError
from moelab.machine import environment, git_commit, gpus
from moelab.notebooks.batch import NotebookFailed, execute, read_parameters
from moelab.privacy import without_places
from moelab.viz.theme import READERS_THEME, in_words

FOLDER = "rendered"
LARGEST_BYTES = 500_000
COLORS = 128
CELL_TIMEOUT_S = 3600
PROFILES = {"07_compare_throughput": "b200_x256"}
"""Notebooks whose copy shows another profile than ``cpu``: nothing is trained, and the study is ready to be sent."""
KEEPS_RUNS = ("06_compare_convergence",)
"""Notebooks that train for minutes (7 on two idle cores): their runs stay in the clone's ``runs``, where ``make demo``
has its own of the same study, and the next copy is made of what is finished there."""
PICTURES = {
    "where_the_step_goes": ("08_project_to_cluster", 1),
    "measured_arms": ("04_dispatch_with_deepep", 1),
    "break_even": ("02_find_grouped_gemm_break_even", 2),
    "forced_balance": ("03_route_tokens", 3),
    "loss_difference": ("06_compare_convergence", 4),
}
"""README's pictures, in ``rendered/pictures``: the notebook, and which of its figures, from 1."""
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


def parameters_file(notebook: Path) -> Path:
    """The profile that a notebook's copy shows."""
    profile = PROFILES.get(notebook.stem, "cpu")
    return notebook.parents[1] / "papermill_params" / notebook.stem / f"{profile}.yaml"


def source_hash(notebook: Path) -> str:
    """What a copy was made from: the notebook and its parameters, as 16 hexadecimal digits of SHA-256."""
    digest = hashlib.sha256(notebook.read_bytes())
    digest.update(b"\0" + parameters_file(notebook).read_bytes())  # so that no byte moves from one to the other unseen
    return digest.hexdigest()[:16]


def render(notebook: Path, copy: Path, commit: str | None) -> None:
    """Run ``notebooks/NAME.ipynb`` of a clone in an empty folder and write its copy; the commit is the code's.

    Raises:
        NotebookFailed: if the notebook failed, or its copy would be too large.
        BadInput: if figures have no PNG here.
    """
    copy = copy.absolute()
    with executed(notebook.absolute(), commit) as content:
        for cell in content.cells:
            clean(cell, _as_picture)
    content.cells.insert(0, nbformat.v4.new_markdown_cell(stamp_text(content.metadata["moelab"]), id="stamp"))
    text = nbformat.writes(content) + "\n"
    if len(text.encode()) > LARGEST_BYTES:
        raise NotebookFailed(f"{notebook.name}: its copy would have {len(text.encode())} bytes of {LARGEST_BYTES}")
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)


@contextlib.contextmanager
def executed(notebook: Path, commit: str | None) -> Iterator[Any]:
    """A notebook, by its absolute path, as it ran with its profile in an empty folder, and stamped.

    Inside, that is the working folder.
    """
    parameters = read_parameters(parameters_file(notebook))
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        if notebook.stem in KEEPS_RUNS:
            kept = notebook.parents[1] / "runs"
            kept.mkdir(exist_ok=True)
            Path("runs").symlink_to(kept)
        execute(notebook, Path("executed.ipynb"), parameters, cell_timeout_s=CELL_TIMEOUT_S)
        content = nbformat.read("executed.ipynb", as_version=4)
        content.metadata = {name: content.metadata[name] for name in ("kernelspec", "language_info")}
        content.metadata["moelab"] = stamp(notebook, parameters, commit)
        yield content


def stamp(notebook: Path, parameters: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """Metadata of a copy: what was run, where and when."""
    here = environment()
    return {
        "notebook": f"{notebook.parent.name}/{notebook.name}",
        "parameters_file": parameters_file(notebook).relative_to(notebook.parents[1]).as_posix(),
        "parameters": dict(parameters),
        "source_hash": source_hash(notebook),
        "commit": commit,
        "hardware": {"processor": here["processor"], "cores": here["cores"], "gpus": [gpu.name for gpu in gpus()]},
        "versions": {"moelab": here["moelab"], "python": here["python"]}
        | {name: version for name, version in here["packages"].items() if version},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def stamp_text(stamp: Mapping[str, Any]) -> str:
    """The stamp as the first cell of a copy."""
    hardware, gpus = stamp["hardware"], ", ".join(stamp["hardware"]["gpus"])
    nothing = (
        "" if gpus else "Nothing was measured on a GPU; figures of GPUs show stored or published numbers and say so."
    )
    changes = ", ".join(f"{name} = {value!r}" for name, value in sorted(stamp["parameters"].items()))
    return (
        f"> **Executed copy** of `{stamp['notebook']}` with `{stamp['parameters_file']}` "
        f"({changes or 'all defaults'}), {stamp['date']}, on {hardware['processor']}, {hardware['cores']} cores, "
        f"{gpus or 'no GPU'}. {nothing} Controls need Jupyter and are not shown.\n>\n"
        f"> {', '.join(f'{name} {version}' for name, version in sorted(stamp['versions'].items()))}; "
        f"source hash {stamp['source_hash']}; code of commit {stamp['commit'] or 'unknown'}. "
        "`make rendered` makes all copies again."
    )


def clean(cell: Any, show_figure: Callable[[Any], dict[str, str]]) -> None:
    """Keep of an executed cell what every reader can show, and nothing about this machine.

    Args:
        cell: of an executed notebook; changed in place.
        show_figure: what is kept of a figure's output, by MIME type.
    """
    cell.metadata = {"tags": cell.metadata.tags} if cell.metadata.get("tags") else {}
    if cell.cell_type != "code":
        return
    whole: list[Any] = []  # what was printed in one go as one output: how a kernel cuts it differs from run to run
    for output in cell.outputs:
        if output.get("data", {}).get("text/html") == READERS_THEME:  # of live figures; a copy has pictures
            continue
        if output.get("data", {}).pop(WIDGET, None) and "image/png" not in output.data:
            continue
        if whole and "text" in output and output.get("name") == whole[-1].get("name"):
            whole[-1].text += output.text
        else:
            whole.append(output)
    cell.outputs = whole
    for output in cell.outputs:
        if "text" in output:
            output.text = without_places(output.text)
        if PLOTLY in output.get("data", {}):
            output.data = show_figure(output.data)
        if "text/html" in output.get("data", {}):
            output.data.pop("text/plain", None)  # the same table once more
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _with_fewer_colors(output.data["image/png"])
        for kind, text in output.get("data", {}).items():
            if kind.startswith("text/"):
                output.data[kind] = without_places(text)


def _as_picture(data: Any) -> dict[str, str]:
    """A figure's PNG and its title in words."""
    if "image/png" not in data:
        raise BadInput("figures have no PNG here; it takes kaleido (`make lab` brings it) and a Chromium")
    return {"image/png": data["image/png"], "text/plain": in_words(data[PLOTLY]["layout"]["title"]["text"])}


def _with_fewer_colors(png_base64: str) -> str:
    from PIL import Image

    smaller = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png_base64))).convert("RGB")
    # The default takes colours by how many pixels have them, and small marks turn grey.
    picture.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE).save(smaller, "PNG", optimize=True)
    return base64.b64encode(smaller.getvalue()).decode()


def write_pictures(folder: Path) -> None:
    """Write README's pictures from the copies in a folder, in ``folder/pictures``."""
    (folder / "pictures").mkdir(exist_ok=True)
    for name, (notebook, number) in PICTURES.items():
        figures = pictures_of(folder / f"{notebook}.ipynb")
        (folder / "pictures" / f"{name}.png").write_bytes(figures[number - 1])


def pictures_of(copy: Path) -> list[bytes]:
    """The PNG files of a copy's figures, in order."""
    outputs = [output for cell in nbformat.read(copy, as_version=4).cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in pictures]


def main() -> int:
    """Make all copies again, or those that are named; returns the exit code."""
    parser = argparse.ArgumentParser(prog="site/render.py", description=__doc__)
    parser.add_argument("names", nargs="*", help="names of notebooks, without .ipynb; all if there are none")
    options = parser.parse_args()
    exit_code, commit = 0, git_commit()  # asked before the first copy makes the tree dirty
    known = {path.stem: path for path in sorted(Path("notebooks").glob("*.ipynb"))}
    try:
        if not known:
            raise BadInput("there are no notebooks here: they are in a clone of moelab, not in what pip installs")
        if unknown := [name for name in options.names if name not in known]:
            raise BadInput(f"no notebook {', '.join(unknown)}; valid: {', '.join(known)}")
    except BadInput as error:
        print(f"moelab: {error}", file=sys.stderr)
        return error.exit_code
    for notebook in [known[name] for name in options.names or known]:
        copy, start = Path(FOLDER) / notebook.name, time.monotonic()
        try:
            render(notebook, copy, commit)
        except MoelabError as error:  # the others may do
            print(f"moelab: {error}", file=sys.stderr)
            exit_code = 1
            continue
        seconds, size_kb = time.monotonic() - start, copy.stat().st_size / 1000
        print(f"{copy}: {size_kb:.0f} kB in {seconds:.0f} s", flush=True)
    if all((Path(FOLDER) / f"{name}.ipynb").exists() for name, _ in PICTURES.values()):
        write_pictures(Path(FOLDER))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
