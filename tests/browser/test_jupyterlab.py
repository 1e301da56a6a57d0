"""Notebooks as a person meets them: JupyterLab in a real browser, *Run All*, widgets by keyboard, sizes and themes.

Screenshots are left in the folder that ``MOELAB_SCREENSHOTS`` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill.iorw
import pytest
import torch
from lab_page import CUT_OFF, ILLEGIBLE, SIZES, Lab, LabPage, lab_server
from papermill.parameterize import parameterize_notebook
from playwright.sync_api import Browser, Locator
from run_support import make_run

from moelab.experiment import Experiment
from moelab.micro.numerics import synthetic
from moelab.mxfp8 import capture
from moelab.notebooks import read_parameters
from moelab.runs.status import State

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("01_quantise_to_mxfp8", "05_plan_layout", "08_project_to_cluster", "09_launch_and_watch_run")


WATCHED = "runs/watched"
OTHERS_RUNS = {"01_quantise_to_mxfp8": {"capture_run": "runs/captured"}, "09_launch_and_watch_run": {"runs": WATCHED}}
"""Instead of a training: that these notebooks train is seen without a browser."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server with the notebooks under the parameters of their ``smoke`` profile; it leaves no process behind."""
    with lab_server(tmp_path_factory.mktemp("lab")) as running:
        for name in NOTEBOOKS:
            notebook = papermill.iorw.load_notebook_node(str(ROOT / "notebooks" / f"{name}.ipynb"))
            smoke = read_parameters(ROOT / "papermill_params" / name / "smoke.yaml")
            parameters = {**smoke, **OTHERS_RUNS.get(name, {})}
            nbformat.write(parameterize_notebook(notebook, parameters), running.root / f"{name}.ipynb")
        make_run(running.root / WATCHED, watched(precision="bf16"), [8.0, 7.8, 7.4])
        shapes = {"x": (256, 256), "w1": (4, 256, 256), "w2": (4, 256, 256), "w3": (4, 256, 256), "grad": (256, 256)}
        tensors = {name: synthetic("student_t", shape, seed=len(name)).bfloat16() for name, shape in shapes.items()}
        ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32)
        about: dict[str, Any] = {"layer": "layers.1", "step": 4, "arm": "bf16_standard", "tokens_of_experts": (64,) * 4}
        captured = capture.Capture(**about, **tensors, offsets=ends)
        folder = running.root / "runs" / "captured" / capture.FOLDER
        folder.mkdir(parents=True)
        torch.save(vars(captured), folder / "layers.1.pt")
        yield running
    assert running.processes() == []


def watched(**changes: Any) -> Experiment:
    return Experiment(name="watched", gpus_per_node=2, ep=2, steps=20, **changes)


@pytest.fixture(scope="module", params=NOTEBOOKS)
def opened(request: pytest.FixtureRequest, browser: Browser, lab: Lab) -> Iterator[tuple[str, LabPage]]:
    """A notebook that was opened and run by keyboard alone."""
    notebook = LabPage(browser, lab, f"{request.param}.ipynb")
    notebook.run_all()
    yield request.param, notebook
    notebook.page.close()


@pytest.fixture
def keep(opened: tuple[str, LabPage], tmp_path: Path) -> Callable[[str], None]:
    """Keeps a screenshot of the window, scrolled to the panel, under the notebook's name and these words."""
    name, notebook = opened
    folder = Path(os.environ.get("MOELAB_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def take(words: str) -> None:
        notebook.panel.scroll_into_view_if_needed()
        notebook.page.screenshot(path=folder / f"{name}_{words}.png")

    return take


def move(name: str, lab: Lab, page: LabPage) -> tuple[Locator, str]:
    """The control of a notebook's widget that is moved, and the key that moves it."""
    panel = page.panel
    if name == "01_quantise_to_mxfp8":
        return panel.get_by_role("slider"), "ArrowLeft"
    if name == "09_launch_and_watch_run":  # the view follows a run that another process starts
        before = page.figures()
        make_run(lab.root / WATCHED, watched(precision="fp8"), [8.0, 7.9, 7.5], state=State.RUNNING)
        page.wait_for_other_figures(before)
        # The view of a simulated run, above it, sends updates for 20 s too; they are no answer to the key.
        simulated = page.page.locator(".moelab-panel").first
        simulated.locator(".gtitle", has_text="1 completed").wait_for(state="attached")
    return panel.get_by_role("combobox").first, "ArrowDown"


def test_a_control_is_reached_and_moved_by_keyboard_and_the_figure_follows_in_place(
    opened: tuple[str, LabPage], lab: Lab, keep: Callable[[str], None]
) -> None:
    """How long it takes is not judged: machines of all kinds run this. What makes it quick is."""
    name, notebook = opened
    control, key = move(name, lab, notebook)
    before, whole = notebook.figures(), len(json.dumps(notebook.figures()))
    notebook.tab_to(control)
    notebook.drawings().evaluate_all("(all) => all.forEach((one) => { one.dataset.mark = ''; })")
    notebook.updates.clear()
    notebook.page.keyboard.press(key)
    notebook.wait_for(lambda: notebook.updates)  # figures may have changed before the key: late ones, and their sizes
    notebook.wait_for_other_figures(before)
    assert max(notebook.updates) < whole, "only what changed travels"
    assert notebook.drawings(marked=False).count() == 0, "a figure was made anew"
    keep("moved")


def test_every_control_has_a_name_and_nothing_is_cut_off_or_illegible(
    opened: tuple[str, LabPage], keep: Callable[[str], None]
) -> None:
    notebook = opened[1]
    for role in ("combobox", "slider", "spinbutton"):
        for control in notebook.page.locator(".moelab-panel").get_by_role(role).all():
            control.focus()
            assert control.evaluate("(one) => one.ariaLabel || one.labels?.[0]?.innerText"), control
            control.blur()
    for width, height in SIZES:
        notebook.resize(width, height)
        assert notebook.page.evaluate(CUT_OFF) == []
        keep(f"{width}x{height}")
    for theme in ("Dark", "Light"):
        notebook.use_theme(theme)
        assert notebook.page.evaluate(ILLEGIBLE) == []
        keep(theme.lower())
    assert (notebook.complaints, notebook.requests) == ([], [])
