"""A page of the site from a folder, offline: a figure, and an explorer moved by keyboard, light and dark, narrow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from build_site import figure_html, write_scripts
from explorers import Grid, page, script
from lab_page import complaints_and_requests
from playwright.sync_api import Browser

from moelab.viz.theme import DARK, INK, new_figure
from moelab.viz.traffic import TrafficExplorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a figure and an explorer of two by two choices."""
    root = tmp_path_factory.mktemp("site")
    grid = Grid(explorers={"": TrafficExplorer()}, choices={"routing": ("uniform", "random_balanced"), "ep": (16, 32)})
    write_scripts(root / "static")
    (root / "static" / "grids" / "03.js").write_text(script("03", grid))
    figure = new_figure("A finding " * 12, subtitle="").add_bar(y=[1, 2])
    (root / "index.html").write_text(
        '<!doctype html><html data-theme="light"><meta name="viewport" content="width=device-width">'
        '<link rel="stylesheet" href="static/site.css"><script defer src="static/painted.js"></script>'
        '<script defer src="static/figures.js"></script><body>'
        f"{figure_html(json.loads(figure.to_json()))}{page('03', grid)}"
    )
    return root


def test_an_explorer_moves_by_keyboard_and_figures_follow_the_theme(browser: Browser, folder: Path) -> None:
    opened = browser.new_page(viewport={"width": 390, "height": 844})
    complaints, requests = complaints_and_requests(opened)
    opened.goto((folder / "index.html").as_uri())
    opened.locator(".js-plotly-plot").nth(1).locator(".main-svg").first.wait_for(state="attached")
    explorer = opened.locator(".moelab-explorer")
    finding = explorer.locator("figcaption").first
    before = finding.inner_text(), explorer.locator(".words").inner_text()
    slider = explorer.get_by_role("slider", name="ep")
    slider.focus()
    opened.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "16"
    opened.wait_for_function("(text) => document.querySelector('.words').innerText !== text", arg=before[1])
    opened.wait_for_function("(text) => document.querySelectorAll('figcaption')[1].innerText !== text", arg=before[0])
    assert "of 2 nodes" in explorer.locator("figcaption").last.inner_text()
    fill = "getComputedStyle(document.querySelector('.xtick text')).fill"
    light, dark = (f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})" for color in (INK, DARK[INK]))
    assert opened.evaluate(fill) == light
    opened.evaluate("document.documentElement.dataset.theme = 'dark'")
    opened.wait_for_function(f"(color) => {fill} === color", arg=dark)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390  # wide figures scroll in their own boxes
    assert complaints == []
    assert {url.partition(":")[0] for url in requests} == {"file"}
    opened.close()
