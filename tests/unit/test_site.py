"""The site's parts: links that lead somewhere, figures and explorers as pages have them, a notebook as a page."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import build_site
import explorers
import ipywidgets
import nbformat
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from moelab.errors import BadInput
from moelab.notebooks.render import PLOTLY, WIDGET, stamp
from moelab.viz.theme import new_figure
from moelab.viz.widget import Explorer

ROOT = Path(__file__).parents[2]


class Bars(Explorer):
    """A bar of a height; 3 cannot be, and the colour makes no difference to the figure."""

    def __init__(self) -> None:
        controls = {
            "height": ipywidgets.Dropdown(options=[1, 2, 3], value=2, description="the height"),
            "color": ipywidgets.Dropdown(options=["red", "<blue>"], value="red", description="a <color>"),
            "other": ipywidgets.IntText(0, description="other"),
        }
        super().__init__(controls, ["bars"])

    def look(self) -> tuple[str, dict[str, go.Figure]]:
        if self.chosen["height"] == 3:
            raise BadInput("height is 3; valid: 1 and 2")
        figure = new_figure(f"{self.chosen['height']} is the height", subtitle="A bar.", note="made up")
        figure.add_bar(y=[self.chosen["height"]])
        return f"<b>{self.chosen['color'].strip('<>')}</b>", {"bars": figure}


GRID_CHOICES: dict[str, tuple[Any, ...]] = {"height": (1, 2, 3), "color": ("red", "<blue>")}


@pytest.fixture
def grid() -> explorers.Grid:
    return explorers.Grid(explorers={"": Bars()}, choices=GRID_CHOICES)


def test_a_grid_has_every_choice_as_the_explorer_shows_it_and_each_figure_once(grid: explorers.Grid) -> None:
    script = explorers.script("05_x", grid)
    content = json.loads(script.removeprefix('moelabGrids["05_x"] = ').removesuffix(";\n"))
    states = content["states"]
    assert list(states) == ["0,0", "0,1", "1,0", "1,1", "2,0", "2,1"]
    assert ["red" in states["0,0"]["words"], "blue" in states["0,1"]["words"]] == [True, True]
    assert states["2,0"]["figures"] == {}
    assert "height is 3; valid: 1 and 2" in states["2,0"]["words"]
    figures = [json.loads(gzip.decompress(base64.b64decode(packed))) for packed in content["figures"]]
    assert len(figures) == 2
    for place in ("0", "1"):
        number = states[f"{place},0"]["figures"]["bars"]
        assert number == states[f"{place},1"]["figures"]["bars"]
        assert f"{int(place) + 1} is the height" in figures[number]["caption"]


def test_several_explorers_have_a_menu_of_their_own() -> None:
    grid = explorers.Grid(explorers={"small": Bars(), "large": Bars()}, choices={"height": (1, 2)})
    assert grid.controls == {"model and GPUs": ["small", "large"], "the height": ["1", "2"]}
    assert grid.start == [0, 1]
    assert '"1,0":' in explorers.script("05_x", grid)


def test_the_place_of_an_explorer_begins_where_it_does_and_escapes_names(grid: explorers.Grid) -> None:
    place = explorers.page("05_x", grid)
    assert 'name="the height" min="0" max="2" value="1" data-labels="1|2|3"><output>2</output>' in place
    assert '<option value="1">&lt;blue&gt;</option>' in place
    assert "a &lt;color&gt;" in place
    assert "all 3" in place  # controls of the live one
    assert place.count("<figure") == 1


def test_a_title_becomes_a_caption_and_takes_its_height_along() -> None:
    figure = new_figure("A finding " * 20, subtitle="How to read " * 20, note="a < b")
    whole = json.loads(figure.to_json())
    page = explorers.as_page_figure(whole)
    lines = 1 + figure.layout.title.text.count("<br>")
    assert (page["caption"].count("<div>"), page["caption"].count("<br>")) == (3, 0)
    assert "a &lt; b" in page["caption"]
    assert "title" not in page["layout"]
    for layout, title_px in ((whole["layout"], 22 * lines), (page["layout"], 0)):
        assert (layout["margin"]["t"], layout["height"]) == (33 + title_px, 460 - 70 + 33 + title_px)


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "picture one.png").write_bytes(b"")
    good = ["a/b.html", "a/b.html#here", "#top", "picture%20one.png", "a/../index.html"]
    abroad = ["https://pytorch.org", "mailto:a@b.c"]
    bad = ["a/c.html", "a/b.html#there", "#nowhere", "/a/b.html", "a", "a/b.ipynb", "../outside.html"]
    anchors = "".join(f'<a href="{link}">x</a>' for link in good + abroad + bad)
    (tmp_path / "index.html").write_text(
        f'<p id="top">{anchors}<img src="gone.png"><script src="https://cdn.x/y.js"></script>'
    )
    (tmp_path / "a" / "b.html").write_text('<p id="here"><a href="../index.html#top">x</a>')
    broken, outside = build_site.links(tmp_path)
    found = {line.removeprefix("index.html: ").partition(" (")[0] for line in broken}
    assert found == {*bad, "gone.png", "https://cdn.x/y.js"}
    assert outside == ["https://cdn.x/y.js", *abroad]


def test_a_link_to_what_is_no_page_leads_to_the_repository() -> None:
    text = "[a](../README.md#measured) [b](../src/moelab/cli.py) [c](../studies) [d](https://x.y/z.py) "
    text += "[e](verdict.md) [f](no.py)"
    home = build_site.REPOSITORY
    assert build_site.with_site_links(text, Path("docs")) == (
        f"[a](../index.md#measured) [b]({home}/blob/main/src/moelab/cli.py) [c]({home}/tree/main/studies) "
        "[d](https://x.y/z.py) [e](verdict.md) [f](no.py)"
    )


def test_a_page_has_figures_links_and_explorers_for_a_browser(tmp_path: Path) -> None:
    figure = json.loads(new_figure("Less </script> loss", subtitle="").to_json())
    outputs = [
        new_output("display_data", {PLOTLY: figure, "text/plain": "Figure()"}),
        new_output("display_data", {"text/html": "<a href='02_x.ipynb'>next</a>", "text/markdown": "[n](02_x.ipynb)"}),
        new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "VBox()"}),
    ]
    cells = [new_markdown_cell("# 01 · Small"), new_code_cell("show()", outputs=outputs), new_code_cell("complete()")]
    cells[1].metadata = {"tags": ["parameters"], "jupyter": {"source_hidden": True}}
    language = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    source = tmp_path / "notebooks" / "01_small.ipynb"
    for path, text in ((source, "{}"), (tmp_path / "papermill_params" / "01_small" / "cpu.yaml", "{}\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    language["moelab"] = stamp(source, {}, 40 * "a" + "-dirty")
    nbformat.write(new_notebook(cells=cells, metadata=language | {"widgets": {}}), tmp_path / "copy.ipynb")
    page = build_site.notebook_page(source, tmp_path / "copy.ipynb", "<p>the explorer</p>")
    title, words, code = page.cells
    assert title.source == "# 01 · Small"
    assert "papermill_params/01_small/cpu.yaml" in words.source
    assert f"commit {12 * 'a'}-dirty." in words.source
    drawn, linked, explorer = (output.data for output in code.outputs)
    assert list(drawn) == ["text/html"]
    assert drawn["text/html"].count("</script>") == 1
    content = json.loads(drawn["text/html"].partition('json">')[2].partition("</script>")[0])
    assert content["caption"].startswith("<div><b>")
    assert linked == {"text/html": "<a href='02_x.html'>next</a>", "text/markdown": "[n](02_x.html)"}
    assert explorer == {"text/html": "<p>the explorer</p>"}
    assert "widgets" not in page.metadata
    assert code.metadata == {"tags": ["parameters", "hide-input"]}


@pytest.mark.parametrize("name", explorers.GRIDS)
def test_a_grid_offers_what_the_explorer_of_its_notebook_has(name: str) -> None:
    assert "Explorer(" in (ROOT / "notebooks" / f"{name}.ipynb").read_text()
    grid = explorers.GRIDS[name](ROOT / "notebooks" / f"{name}.ipynb")
    assert grid.start  # each begins at one of its choices, or this raises
    for control, values in grid.choices.items():
        live = next(iter(grid.explorers.values())).controls[control]
        options = getattr(live, "options", values)
        assert set(values) <= {one[1] if isinstance(one, tuple) else one for one in options}
