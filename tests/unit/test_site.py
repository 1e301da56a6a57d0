"""The site's parts: links that lead somewhere, figures and explorers as pages have them, a notebook as a page."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import build_site
import explorers
import nbformat
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from render import PLOTLY, WIDGET, stamp

from moelab.errors import BadInput
from moelab.viz.theme import new_figure
from moelab.viz.widget import Explorer, Menu, Number

ROOT = Path(__file__).parents[2]


class Bars(Explorer):
    """A bar of a height; 3 cannot be, and the colour makes no difference to the figure."""

    def __init__(self) -> None:
        height, color = Menu.of("the height", (1, 2, 3)), Menu.of("a <color>", ("red", "<blue>"))
        controls = {"height": height, "color": color, "other": Number("other")}
        super().__init__(controls, {"height": 2, "color": "red", "other": 0})

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        if chosen["height"] == 3:
            raise BadInput("height is 3; valid: 1 and 2")
        figure = new_figure(f"{chosen['height']} is the height", subtitle="A bar.", note="made up")
        figure.add_bar(y=[chosen["height"]])
        return f"<b>{chosen['color'].strip('<>')}</b>", figure


def test_a_grid_has_every_choice_as_the_explorer_shows_it_and_each_figure_once() -> None:
    grid = explorers.Grid(explorers={"": Bars()}, choices={"height": (1, 2, 3), "color": ("red", "<blue>")})
    page, script = explorers.page("05_x", grid), explorers.script("05_x", grid)
    content = json.loads(script.removeprefix('moelabGrids["05_x"] = ').removesuffix(";\n"))
    figures = [json.loads(gzip.decompress(base64.b64decode(packed))) for packed in content["figures"]]
    words = {"0": "1 is the height", "1": "2 is the height", "2": "height is 3; valid: 1 and 2"}
    assert list(content["states"]) == ["0,0", "0,1", "1,0", "1,1", "2,0", "2,1"]
    for place, state in content["states"].items():
        height, color = place.split(",")
        shown = figures[state["figure"]]["caption"] if "figure" in state else state["words"]
        assert words[height] in shown
        assert height == "2" or ("red", "blue")[int(color)] in state["words"]
    assert len(figures) == 2
    assert 'name="the height" min="0" max="2" value="1" data-labels="1|2|3"><output>2</output>' in page
    assert '<option value="1">&lt;blue&gt;</option>' in page
    assert "a &lt;color&gt;" in page
    assert "all 3" in page  # controls of the live one
    assert page.count("<figure") == 1
    several = explorers.Grid(explorers={"small": Bars(), "large": Bars()}, choices={"height": (1, 2)})
    assert several.controls == {"model and GPUs": ["small", "large"], "the height": ["1", "2"]}
    assert (several.start, '"1,0":' in explorers.script("05_x", several)) == ([0, 1], True)


@pytest.mark.parametrize("name", explorers.GRIDS)
def test_a_grid_offers_what_the_explorer_of_its_notebook_has(name: str) -> None:
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    assert "Explorer(" in notebook.read_text()
    grid = explorers.GRIDS[name](notebook)
    assert grid.start  # each begins at one of its choices, or this raises
    for control, values in grid.choices.items():
        live = next(iter(grid.explorers.values())).controls[control]
        options = getattr(live, "options", values)
        assert set(values) <= {one[1] if isinstance(one, tuple) else one for one in options}


def test_a_title_becomes_a_caption_and_takes_its_height_along() -> None:
    figure = new_figure("A finding " * 20, subtitle="How to read " * 20, note="a < b")
    whole = json.loads(figure.to_json())
    page = explorers.as_page_figure(whole)
    assert (page["caption"].count("<div>"), page["caption"].count("<br>"), "title" in page["layout"]) == (3, 0, False)
    assert "a &lt; b" in page["caption"]
    lines = 1 + figure.layout.title.text.count("<br>")
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
    named = {line.removeprefix("index.html: ").partition(" (")[0] for line in broken}
    assert named == {*bad, "gone.png", "https://cdn.x/y.js"}
    assert outside == ["https://cdn.x/y.js", *abroad]


def test_a_link_to_what_is_no_page_leads_to_the_repository() -> None:
    home = build_site.REPOSITORY
    for link, leads_to in {
        "../README.md#measured": "../index.md#measured",
        "../src/moelab/cli.py": f"{home}/blob/main/src/moelab/cli.py",
        "../studies": f"{home}/tree/main/studies",
        **{same: same for same in ("https://x.y/z.py", "verdict.md", "no.py")},
    }.items():
        assert build_site.with_site_links(f"[a]({link})", Path("docs")) == f"[a]({leads_to})"


def test_a_page_has_figures_links_and_explorers_for_a_browser(tmp_path: Path) -> None:
    figure = json.loads(new_figure("Less </script> loss", subtitle="").to_json())
    outputs = [
        new_output("display_data", {PLOTLY: figure, "text/plain": "Figure()"}),
        new_output("display_data", {"text/html": "<a href='02_x.ipynb'>next</a>", "text/markdown": "[n](02_x.ipynb)"}),
        new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "VBox()"}),
    ]
    shown = new_code_cell(
        "show()", outputs=outputs, metadata={"tags": ["parameters"], "jupyter": {"source_hidden": True}}
    )
    source = tmp_path / "notebooks" / "01_small.ipynb"
    for path, text in ((source, "{}"), (tmp_path / "papermill_params" / "01_small" / "cpu.yaml", "{}\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"},
        "moelab": stamp(source, {}, 40 * "a" + "-dirty"), "widgets": {},
    }  # fmt: skip
    cells = [new_markdown_cell("# 01 · Small"), shown, new_code_cell("complete()")]
    nbformat.write(new_notebook(cells=cells, metadata=metadata), tmp_path / "copy.ipynb")
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
