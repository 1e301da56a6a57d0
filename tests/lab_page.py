"""JupyterLab as a person meets it, for tests: a server of its own, *Run All* by keyboard, themes, what is cut off.

    with lab_server(tmp_path) as lab:
        LabPage(browser, lab, "01_quantise_to_mxfp8.ipynb").run_all()

Settings, workspaces and history are the folder's, so that no one's JupyterLab is touched or seen. Everything that the
server starts carries the folder's name in its environment: by that the last ones are found, whatever a test did.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, Locator, Page
from processes import processes

from moelab.machine import end_with_parent

LONGEST_START_S, LONGEST_RUN_MS, LONGEST_ACTION_MS = 120, 600_000, 120_000
SIZES = ((1280, 800), (1920, 1080))
MARK = "MOELAB_TEST_LAB"
KERNEL = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "language": "python"}
# Asking whether to fetch news is JupyterLab's first act for a new user; the answer is no.
NOTIFICATION, NO_NEWS = "@jupyterlab/apputils-extension", {"fetchNews": "false", "checkForUpdates": False}
# Not of this project: JupyterLab's plugins wait for each other where the machine is busy; plotly's renderer of its
# outputs resizes the figures of cells too that JupyterLab has taken out of a long page because they are not in sight;
# anywidget gives a model two seconds, whatever else the machine does (one that never comes has no figure that follows).
NOISE = re.compile(
    r"Plugin \S+ .*(is taking too long|took [\d.]+ms) to activate|Resize must be passed a displayed plot div element"
    r"|\[anywidget\] Failed to initialize model"
)

CUT_OFF = """() => {
  const found = [], seen = ".jp-OutputArea, .jp-OutputArea-child, .jp-OutputArea-output, .jp-OutputArea-output *";
  for (const part of document.querySelectorAll(seen)) {
    const scrolls = getComputedStyle(part).overflowX !== "visible" || part.matches("label, button");
    if (scrolls && part.clientWidth && part.scrollWidth > part.clientWidth + 1)
      found.push(`${part.tagName}.${part.className}: ${part.scrollWidth} px in ${part.clientWidth}: ${part.innerText}`);
  }
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const svg = plot.querySelector(".main-svg").getBoundingClientRect();
    const cell = plot.closest(".jp-Cell-outputArea").getBoundingClientRect();
    if (svg.right > cell.right + 1) found.push(`a figure is ${svg.right - cell.right} px wider than its cell`);
    for (const text of plot.querySelectorAll(".main-svg text")) {
      const box = text.getBoundingClientRect(), air = 3;  // of the line above and below the letters
      const out = [svg.left - box.left, box.right - svg.right, svg.top - box.top, box.bottom - svg.bottom];
      if (box.width && Math.max(...out) > air) found.push(`outside of its figure: ${text.textContent}: ${out}`);
    }
  }
  return found;
}"""

# Contrast by WCAG 2.1 of every text in an output against the nearest background that is opaque.
ILLEGIBLE = """() => {
  const numbers = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const opaque = (color) => color !== "transparent" && (numbers(color)[3] ?? 1) === 1;
  const light = (color) => numbers(color).slice(0, 3).map((value) => value / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const found = new Set();
  const texts = ".jp-OutputArea-output *:not(svg *, option), .gtitle tspan, .xtick text, .ytick text, .xtitle, .ytitle";
  for (const text of document.querySelectorAll(texts)) {
    if (![...text.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(text), color = text.closest("svg") ? style.fill : style.color;
    let behind = text.closest(".js-plotly-plot")?.querySelector(".main-svg") ?? text;
    while (behind && !opaque(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    const pair = [light(color), behind ? light(getComputedStyle(behind).backgroundColor) : 1].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) found.add(`${contrast.toFixed(1)}: ${text.textContent.slice(0, 80)}`);
  }
  return [...found];
}"""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A running server."""

    url: str  # with a slash at its end
    token: str
    root: Path  # of the notebooks
    folder: Path  # of all that the server writes

    def url_of(self, notebook: str) -> str:
        """Where a browser finds a notebook of ``root``, in a workspace of its own."""
        return f"{self.url}lab/workspaces/{Path(notebook).stem}/tree/{quote(notebook)}?token={self.token}"

    def processes(self) -> list[int]:
        """Ids of the server and of all that it started, kernels and trainings too."""
        return [process for process, _, variables in processes() if variables.get(MARK) == str(self.folder)]


@contextmanager
def lab_server(folder: Path) -> Iterator[Lab]:
    """Start a server on the empty folder ``notebooks`` in a folder, and end it with all that it started."""
    root = folder / "notebooks"
    root.mkdir()
    settings = folder / "settings" / NOTIFICATION / "notification.jupyterlab-settings"
    kernel = folder / "jupyter" / "kernels" / "python3" / "kernel.json"
    for file, content in ((kernel, {**KERNEL, "display_name": "Python 3"}), (settings, NO_NEWS)):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))
    environment = {**os.environ, MARK: str(folder), "JUPYTER_PATH": str(folder / "jupyter")}
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environment[name] = str(folder / name.lower())
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += [f"--ServerApp.root_dir={root}", f"--LabApp.user_settings_dir={folder / 'settings'}"]
    command += [f"--LabApp.workspaces_dir={folder / 'workspaces'}", *(["--allow-root"] if os.getuid() == 0 else [])]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=root, env=environment, stdout=log, preexec_fn=end_with_parent, **options)
    lab: Lab | None = None
    try:
        lab = _started(server, folder, root)
        yield lab
    finally:
        server.terminate()  # it asks its kernels to end
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        for process in lab.processes() if lab else [server.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        server.wait()


def _started(server: subprocess.Popen[bytes], folder: Path, root: Path) -> Lab:
    deadline = time.monotonic() + LONGEST_START_S
    while time.monotonic() < deadline and server.poll() is None:
        for file in (folder / "jupyter_runtime_dir").glob("jpserver-*.json"):
            with suppress(json.JSONDecodeError):
                known = json.loads(file.read_text())
                return Lab(url=known["url"], token=known["token"], root=root, folder=folder)
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(folder / 'server.log').read_text()[-3000:]}")


def complaints_and_requests(page: Page) -> tuple[list[str], list[str]]:
    """Lists that fill up with what a page says as error, warning or dialog, and with the addresses that it asks for."""
    complaints: list[str] = []
    requests: list[str] = []

    def hear(kind: str, text: str) -> None:
        if kind in ("error", "warning") and not NOISE.search(text):
            complaints.append(text)

    page.on("console", lambda message: hear(message.type, message.text))
    page.on("pageerror", lambda error: hear("error", str(error)))
    page.on("dialog", lambda dialog: (hear("error", dialog.message), dialog.dismiss()))
    page.on("request", lambda request: requests.append(request.url))
    return complaints, requests


class LabPage:
    """A notebook in a browser.

    ``complaints`` are without :data:`NOISE`; none of ``requests``, addresses beyond the server, is answered;
    ``updates`` are sizes in bytes of what kernels sent to change figures that are there.
    """

    def __init__(self, browser: Browser, lab: Lab, notebook: str) -> None:
        width, height = SIZES[0]
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.complaints, _ = complaints_and_requests(self.page)
        self.requests: list[str] = []
        self.updates: list[int] = []
        self.page.set_default_timeout(LONGEST_ACTION_MS)
        self.page.on("websocket", lambda socket: socket.on("framereceived", self._weigh))
        self.page.route(lambda url: not url.startswith((lab.url, "data:", "blob:")), self._refuse)
        self.page.goto(lab.url_of(notebook))
        self.page.locator(".jp-Notebook .jp-Cell.jp-mod-active").wait_for()
        self.page.get_by_text(re.compile(r"Python 3 .* Idle")).wait_for()

    def run_all(self) -> None:
        """*Run All Cells* by keyboard, wait until the last cell has run or one fails, and show every figure.

        Figures are pictures until the mouse is over one (plotly's renderer), those too that appear meanwhile.
        """
        self.page.keyboard.press("Control+Shift+KeyC")
        self.page.locator(".lm-CommandPalette-input:focus").wait_for()
        self.page.keyboard.type("Run All Cells")
        chosen = self.page.locator(".lm-CommandPalette-item.lm-mod-active")
        chosen.filter(has_text=re.compile("^Run All Cells")).wait_for()
        self.page.keyboard.press("Enter")
        last = self.page.locator(".jp-CodeCell .jp-InputPrompt").last.filter(has_text=re.compile(r"\[\d+\]"))
        failed = self.page.locator("[data-mime-type='application/vnd.jupyter.error']")
        last.or_(failed).first.wait_for(state="attached", timeout=LONGEST_RUN_MS)
        assert failed.all_inner_texts() == []
        self.page.wait_for_function(
            """() => {
              document.querySelectorAll("img.plot-img").forEach((one) => one.dispatchEvent(new Event("mouseenter")));
              const figures = [...document.querySelectorAll(".jp-RenderedPlotly")];
              return figures.every((one) => one.querySelector(".main-svg"));
            }""",
            polling=1000,
        )

    def resize(self, width: int, height: int) -> None:
        """Another size of the window; every figure follows."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.wait_for_function(
            """[...document.querySelectorAll('.jp-RenderedPlotly.js-plotly-plot')].every((one) =>
                 Math.abs(one.querySelector('.main-svg').clientWidth - one.clientWidth) <= 1)"""
        )

    def use_theme(self, name: str) -> None:
        """``Light`` or ``Dark``, by the menu."""
        self.page.locator(".lm-MenuBar-item", has_text="Settings").click()
        self.page.locator(".lm-Menu-item[data-type='submenu']", has_text=re.compile("^Theme")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^JupyterLab {name}$")).click()
        self.page.locator(f"body[data-jp-theme-name='JupyterLab {name}']").wait_for(state="attached")

    def tab_to(self, control: Locator) -> None:
        """Shift+Tab from the last cell, which *Run All* leaves with the focus, to a control above it."""
        for _ in range(300):
            if control.evaluate("(element) => element === document.activeElement"):
                return
            self.page.keyboard.press("Shift+Tab")
        raise AssertionError("the keyboard does not reach the control")

    @property
    def panel(self) -> Locator:
        """Of the page's widgets the last, which is about the reader's own."""
        return self.page.locator(".moelab-panel").last

    def figures(self) -> list[str]:
        """What the figures of the panel show, each as one text."""
        plots = self.panel.locator(".js-plotly-plot")
        shown: list[str] = plots.evaluate_all("(all) => all.map((one) => JSON.stringify([one.data, one.layout]))")
        return shown

    def drawings(self, *, marked: bool = True) -> Locator:
        """Drawings of the panel's figures; those that were made anew lost a mark that a test gave them."""
        not_marked = "" if marked else ":not([data-mark])"
        return self.panel.locator(f".js-plotly-plot .main-svg:first-child{not_marked}")

    def wait_for(self, happened: Callable[[], object]) -> None:
        """Until something is so that no selector of the page says."""
        deadline_s = time.monotonic() + LONGEST_RUN_MS / 1000
        while not happened():
            assert time.monotonic() < deadline_s, "nothing happened"
            self.page.wait_for_timeout(100)

    def wait_for_other_figures(self, than: list[str]) -> None:
        """Until the panel has figures, and they show something else."""
        self.wait_for(lambda: self.figures() not in ([], than))

    def _weigh(self, frame: str | bytes) -> None:
        content = frame.encode() if isinstance(frame, str) else frame
        if b'"changes"' in content:
            self.updates.append(len(content))

    def _refuse(self, route: Any) -> None:
        self.requests.append(route.request.url)
        route.abort()
