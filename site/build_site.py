"""Build the site, a folder that is read without a server: ``make site``, then open ``build/site/html/index.html``.

Notebooks are executed here with the parameters of their copies in ``rendered/``, but their figures stay plotly's: they
are drawn in the reader's browser by one local ``plotly.min.js``. README, guides and notebooks keep their places, so
links between them hold. The build fails on a warning of Sphinx and on a link or picture that leads nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import render
from explorers import GRIDS, as_page_figure, figure_place, page, script
from plotly.offline import get_plotlyjs
from render import PLOTLY, WIDGET, clean

from moelab.errors import MoelabError
from moelab.machine import git_commit
from moelab.viz.theme import DARK
from moelab.viz.widget import javascript

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
PAGES = ("TOUR.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the root beside README, which is the first page; one that is not there is left out."""
CONTENTS = """

```{toctree}
:hidden:
:caption: Without a kernel

explore
```

```{toctree}
:hidden:
:caption: Notebooks
:glob:

notebooks/*
```

```{toctree}
:hidden:
:caption: Guides
:glob:

docs/*
```
"""
EXPLORE = """# Explore

Move a control. No kernel runs: the functions that the notebooks call drew all these figures when the site was built.
"""
WELCOME = (
    "[Move a slider here](explore.md), without installing anything, "
    "or [read the notebooks](notebooks/00_start_here.ipynb).\n"
)


def executed(notebook: Path, output: Path) -> float:
    """Run a notebook as its copy in ``rendered/`` is run, its figures left to plotly; returns the seconds it took."""
    start = time.monotonic()
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # no picture, which a browser would have to draw first
    part = output.with_suffix(".part")
    with render.executed(notebook, git_commit()) as content:
        nbformat.write(content, part)
    part.replace(output)  # ``--reuse`` takes what is there for whole
    return time.monotonic() - start


def drawn(notebook: Path, output: Path) -> float:
    """Draw the grid of a notebook's explorer: the script that a page loads, and beside it its place as HTML."""
    start = time.monotonic()
    grid = GRIDS[notebook.stem](notebook)
    output.with_suffix(".html").write_text(page(notebook.stem, grid))
    output.with_suffix(".part").write_text(script(notebook.stem, grid))
    output.with_suffix(".part").replace(output)
    return time.monotonic() - start


def notebook_page(notebook: Path, copy: Path, explorer: str) -> nbformat.NotebookNode:
    """An executed notebook as a page of the site.

    Args:
        notebook: its source.
        copy: the executed copy.
        explorer: its place as HTML; empty if none was drawn.
    """
    content = nbformat.read(copy, as_version=4)
    name = f"{notebook.parent.name}/{notebook.name}"
    for cell in content.cells:
        has_widget = any(WIDGET in output.get("data", {}) for output in cell.get("outputs", []))
        is_folded = cell.metadata.get("jupyter", {}).get("source_hidden")
        clean(cell, lambda data: {PLOTLY: data[PLOTLY]})
        if is_folded:  # as JupyterLab shows it: a bar that a click opens
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "hide-input"]
        for output in cell.get("outputs", []):
            for kind in {"text/html", "text/markdown"} & set(output.get("data", {})):
                # Links among notebooks, which Sphinx does not follow in outputs.
                output.data[kind] = re.sub(
                    r"""(href=['"]|\]\()(\w+)\.ipynb(?=['")])""", r"\1\2.html", output.data[kind]
                )
            if figure := output.get("data", {}).get(PLOTLY):
                output.data = {"text/html": figure_html(figure)}
        if has_widget:
            place = explorer or f"<p>Controls need a kernel: <code>make lab</code>, <code>{name}</code>.</p>"
            cell.outputs.append(nbformat.v4.new_output("display_data", {"text/html": place}))
    done = content.metadata["moelab"]
    content.metadata = {name: content.metadata[name] for name in ("kernelspec", "language_info")}
    content.cells.pop()  # says that the notebook reached its end
    hardware, commit = done["hardware"], done["commit"] or "unknown"  # 40 digits, and perhaps "-dirty"
    content.cells.insert(
        1,
        nbformat.v4.new_markdown_cell(
            f"> Executed for this site on {done['date']} with `{done['parameters_file']}`: {hardware['processor']}, "
            f"{hardware['cores']} cores, {', '.join(hardware['gpus']) or 'no GPU'}; "
            f"moelab {done['versions']['moelab']}, "
            f"code of commit {commit[:12]}{commit[40:]}. Figures are interactive. To run it yourself: `make lab`, "
            f"then `{name}`."
        ),
    )
    return content


def figure_html(figure: Mapping[str, Any]) -> str:
    """A figure as HTML that ``figures.js`` draws; ``figure`` is plotly's JSON."""
    text = json.dumps(as_page_figure(figure), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return figure_place(content=f'<script type="application/json">{text}</script>')


def write_source(source: Path, copies: Path, notebooks: Iterable[Path]) -> None:
    """Write what Sphinx reads: pages at the places they have in the repository, and the scripts of figures."""
    shutil.rmtree(source, ignore_errors=True)
    write_scripts(source / "static")
    shutil.copyfile(HERE / "conf.py", source / "conf.py")
    shutil.copytree(ROOT / "rendered" / "pictures", source / "rendered" / "pictures")
    present = [
        path for path in (*(ROOT / name for name in PAGES), *sorted((ROOT / "docs").glob("*.md"))) if path.exists()
    ]
    for path in present:
        _write_page(source, path.relative_to(ROOT), path.read_text())
    title, rest = (ROOT / "README.md").read_text().split("\n", 1)
    others = "".join(path.stem + "\n" for path in present if path.parent == ROOT)
    project = f"\n```{{toctree}}\n:hidden:\n:caption: Project\n\n{others}```\n"
    _write_page(source, Path("index.md"), f"{title}\n\n{WELCOME}{rest}{CONTENTS}{project}")
    explore = EXPLORE
    for notebook in notebooks:
        explorer = ""
        if notebook.stem in GRIDS:
            shutil.copy(copies / f"{notebook.stem}.js", source / "static" / "grids")
            explorer = (copies / f"{notebook.stem}.html").read_text()
        content = notebook_page(notebook, copies / notebook.name, explorer)
        target = source / "notebooks" / notebook.name
        target.parent.mkdir(exist_ok=True)
        nbformat.write(content, target)
        if explorer:
            title = content.cells[0].source.partition("\n")[0].lstrip("# ")
            explore += f"\n## {title}\n\n[The notebook](notebooks/{notebook.name}) explains it.\n\n{explorer}\n"
    (source / "explore.md").write_text(explore)


def write_scripts(static: Path) -> None:
    """Write what pages load beside Sphinx's own: style, scripts, plotly.js, and a folder for the grids."""
    shutil.copytree(HERE / "static", static)
    (static / "grids").mkdir()
    (static / "plotly.min.js").write_text(get_plotlyjs())
    colors = f"const moelabDark = {json.dumps(DARK)};\n"
    (static / "painted.js").write_text(colors + javascript("painted.js"))


def _write_page(source: Path, name: Path, text: str) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(with_site_links(text, name.parent))


def with_site_links(text: str, folder: Path) -> str:
    """Markdown with links for the site: the first page has another name, and files that are no pages are elsewhere.

    Args:
        text: Markdown.
        folder: of the page, relative to the repository.
    """

    def rewritten(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link[1]))
        is_page = path.suffix in (".md", ".ipynb", ".png") and path.parts[0] in (
            path.name,
            "docs",
            "notebooks",
            "rendered",
        )
        if is_page or not (ROOT / path).exists():  # a link that leads nowhere is for `links` to find
            return link[0].replace("README.md", "index.md")
        return f"]({REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path.as_posix()}{link[2] or ''})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)]*)?\)", rewritten, text)


class _Page(HTMLParser):
    """What a page refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        links = {given[name] for name in ("href", "src") if given.get(name)}
        self.refers |= links
        self.loads |= links if tag != "a" else set()


def links(folder: Path) -> tuple[list[str], list[str]]:
    """What the pages of a folder refer to.

    Returns:
        Broken links, each with its page; and addresses outside of the folder, which are not asked.
    """
    pages = {path: _Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    broken, outside = [], set()
    for path, content in pages.items():
        for link in sorted(content.refers):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside.add(link)
                if link in content.loads and parts.scheme != "data":
                    broken.append(f"{path.relative_to(folder)}: {link} (the page itself asks the network for it)")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            known = (
                pages.get(folder / target.relative_to(folder.resolve()))
                if target.is_relative_to(folder.resolve())
                else None
            )
            if parts.path.startswith("/") or not target.is_file():
                broken.append(f"{path.relative_to(folder)}: {link}")
            elif known and parts.fragment and unquote(parts.fragment) not in known.ids:
                broken.append(f"{path.relative_to(folder)}: {link} (no such place in that page)")
    return broken, sorted(outside)


def main() -> int:
    """Build the site; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--workers", type=int, default=2, help="notebooks that run at the same time")
    parser.add_argument("--reuse", action="store_true", help="make only what is not there yet")
    options = parser.parse_args()
    output, notebooks = options.output.absolute(), sorted((ROOT / "notebooks").glob("*.ipynb"))
    copies, source, html = (output / name for name in ("executed", "source", "html"))
    copies.mkdir(parents=True, exist_ok=True)
    steps = [(executed, one, copies / one.name) for one in notebooks]
    steps += [(drawn, one, copies / f"{one.stem}.js") for one in notebooks if one.stem in GRIDS]
    with ProcessPoolExecutor(options.workers) as pool:
        left = [step for step in steps if not (options.reuse and step[2].exists())]
        running = {to.name: pool.submit(make, notebook, to) for make, notebook, to in left}
        try:
            for name, done in running.items():
                print(f"{name}: {done.result():.0f} s", flush=True)
        except MoelabError as error:
            pool.shutdown(cancel_futures=True)
            print(f"moelab: {error}", file=sys.stderr)
            return 1
    write_source(source, copies, notebooks)
    shutil.rmtree(html, ignore_errors=True)
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", output / "doctrees", source, html],
        check=False,
    )
    for leftover in (html / "_static").glob("*.html"):  # of the theme: templates, no pages
        leftover.unlink()
    broken, outside = links(html)
    (output / "external_links.txt").write_text("".join(f"{link}\n" for link in outside))
    size_mb = sum(path.stat().st_size for path in html.rglob("*") if path.is_file()) / 1e6
    print(
        f"{html / 'index.html'}: {size_mb:.1f} MB; {len(outside)} external links, not asked, are in "
        f"{output / 'external_links.txt'}"
    )
    for link in broken:
        print(f"broken link: {link}", file=sys.stderr)
    return 1 if broken or built.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
