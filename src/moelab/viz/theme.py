"""The one look of every figure: fonts, grid, and a colour, dash and marker that belong to an arm wherever it appears.

Colours are Okabe and Ito's, which stay apart under the common forms of colour blindness; dash and marker carry the same
information for grey-scale print and for curves that lie on top of each other, which equivalent arms do. The template is
attached to each figure and never set as plotly's default, so importing this module changes nobody else's figures.

References:
    Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

import functools
import html
import importlib.util
import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
import plotly.io as pio
from plotly.io.base_renderers import MimetypeRenderer

from moelab.judge.arms import arm_label, base_arm
from moelab.privacy import shown

FONT = "Inter, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, MUTED, GRID, WARNING = "#1f2933", "#5f6b7a", "#e6e9ee", "#b3450a"
VEIL, ON_LIGHT = "rgba(255,255,255,0.75)", "#10161d"
"""Behind a text that lies on curves, and ink on what stays light in the dark theme, such as the middle of a scale."""
NEAR, FAR, OTHER = "#56B4E9", "#D55E00", "#dfe3e8"
"""What is reached over NVLink, what over the network, and what is neither."""
DARK = {
    INK: "#e3e8ee",
    MUTED: "#a9b4c2",
    GRID: "#343b44",
    WARNING: "#ff9d5c",
    OTHER: "#4b545f",
    VEIL: "rgba(17,17,17,0.75)",
    "#f4f5f7": "#2a3038",  # between the hatches of what waits
    "#d3e6f3": "#1d3f57",  # boxes of the path through a layer: BF16,
    "#f6c9ad": "#6b3417",  # MXFP8,
    "#fbeee6": "#3a2419",  # and either
    "white": "#111111",
    "black": "#e3e8ee",
    "#000000": "#e3e8ee",
}
"""What a live figure has in JupyterLab's dark theme in place of the theme's own colours; pictures stay light."""
NARROW, NORMAL, WIDE = 540, 700, 1000
"""Widths, px, of figures beside an explorer's controls, in a notebook, and of a notebook's main finding; a live figure
takes the room that it has."""
MOST_TITLE_PX = 850
"""Of an output in JupyterLab on a screen of 1280 px: a wide figure's title must not be wider."""
TITLE_PX, SUBTITLE_PX, LINE_PX = 10.6, 7.6, 22
"""Width of a letter of either, and height of a line of both, px."""


@dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How one arm is drawn; ``label`` is escaped for plotly's pseudo-HTML."""

    label: str
    color: str
    dash: str
    symbol: str

    def fill(self, opacity: float) -> str:
        """The arm's colour as ``rgba(…)`` with the given opacity."""
        # plotly takes no opacity in a hex colour.
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity})"

    def line(self, width: float = 2.5) -> dict[str, object]:
        """The arm's line for plotly."""
        return {"color": self.color, "width": width, "dash": self.dash}

    def marker(self, size: float) -> dict[str, object]:
        """The arm's marker for plotly."""
        return {"symbol": self.symbol, "size": size, "color": self.color}


_LOOKS = {
    "bf16_standard": ("#0072B2", "solid", "circle"),
    "mxfp8_standard": ("#D55E00", "dash", "square"),
    "bf16_deepep": ("#56B4E9", "dot", "diamond"),
    "mxfp8_deepep": ("#E69F00", "dashdot", "triangle-up"),
    "fp8_standard": ("#009E73", "longdash", "cross"),
    "fp8_deepep": ("#CC79A7", "longdashdot", "x"),
}
STUDY_ARMS = tuple(_LOOKS)
"""Arms of the default study, in the order of figures."""
_FALLBACK = (
    ("#000000", "solid", "star"),
    ("#CC79A7", "dash", "hexagon"),
    ("#009E73", "dot", "pentagon"),
    ("#56B4E9", "dashdot", "triangle-down"),
    ("#E69F00", "longdash", "bowtie"),
)


def arm_styles(arms: Iterable[str]) -> dict[str, ArmStyle]:
    """Give every arm of a figure its look.

    An arm of the default study keeps its look in every figure; a variant of it (``mxfp8_standard_wgrad-bf16``) takes
    that look where it is free; any other arm takes the next of a cycle. Styles are in the order of :func:`in_order`.

    Example:
        >>> arm_styles(["bf16_standard"])["bf16_standard"].color
        '#0072B2'
    """
    names = in_order(arms)
    looks = {name: _LOOKS[name] for name in names if name in _LOOKS}
    for name in names:
        base = base_arm(name)[0]
        if name not in looks and base in _LOOKS and _LOOKS[base] not in looks.values():
            looks[name] = _LOOKS[base]
    others = [name for name in names if name not in looks]
    looks |= {name: _FALLBACK[i % len(_FALLBACK)] for i, name in enumerate(others)}
    return {
        name: ArmStyle(label=plot_text(arm_label(name)), color=color, dash=dash, symbol=symbol)
        for name, (color, dash, symbol) in ((name, looks[name]) for name in names)
    }


def in_order(arms: Iterable[str]) -> list[str]:
    """Arms as figures list them: those of the default study as it lists them, then the others by name."""
    order = {arm: place for place, arm in enumerate(STUDY_ARMS)}
    return sorted(set(arms), key=lambda arm: (order.get(arm, len(order)), arm))


def plot_text(text: str) -> str:
    """A text as it may be shown, for plotly, which reads a small part of HTML in titles, legends and annotations."""
    return html.escape(shown(text), quote=False)


def wrap(text: str, characters: int) -> str:
    """Break a text into lines of like length for plotly and escape each; words such as "all-to-all" stay whole."""

    def lines(most: int) -> list[str]:
        return textwrap.wrap(text, most, break_on_hyphens=False)

    longest = max(map(len, text.split()), default=1)
    # The narrowest that needs no more lines: else the last line may be a lone word.
    while characters > longest and len(lines(characters - 1)) == len(lines(characters)):
        characters -= 1
    return "<br>".join(map(plot_text, lines(characters)))


def counted(number: int, what: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def span(values: Iterable[float], written: str = "") -> str:
    """The smallest and the largest of values in a format, or the only one: ``"3"``, ``"3 to 5"``."""
    known = list(values)
    return " to ".join(dict.fromkeys(format(end, written) for end in (min(known), max(known))))


def new_figure(title: str, *, subtitle: str, note: str = "", height: int = 460, width: int = NORMAL) -> go.Figure:
    """Start a figure with the theme and its title; the top margin grows with the title.

    Args:
        title: What is drawn, or the finding where that is the figure's point.
        subtitle: How to read it: n, interval, smoothing.
        note: Condition that must not be missed, such as "emulated kernels"; it stands in the title.
        height: Height in pixels of a figure with a one-line title.
        width: ``NARROW``, ``NORMAL`` or ``WIDE``: of the picture, and for how many pixels the title is broken.
    """
    title_px = min(width, MOST_TITLE_PX) - 12  # it begins 10 px from the left
    letters = int(title_px / TITLE_PX)
    text = f"<b>{wrap(title, letters)}</b>"
    if note:
        text += f"<br><span style='color:{WARNING}'>{wrap(note, letters)}</span>"
    text += f"<br><span style='font-size:13px;color:{MUTED}'>{wrap(subtitle, int(title_px / SUBTITLE_PX))}</span>"
    # All lines are as high as the title's font makes them; 70 px is the margin that the caller's height counts with.
    # plotly reserves no room for a title: one of three lines would lie on the plot.
    top = 33 + LINE_PX * (1 + text.count("<br>"))
    return go.Figure(
        layout={"template": template(width), "height": height - 70 + top, "margin_t": top, "title_text": text}
    )


def in_words(title: str) -> str:
    """A figure's title without its tags, on one line."""
    return " ".join(re.sub(r"<[^>]*>", " ", title).split())


@functools.cache
def template(width: int = NORMAL) -> go.layout.Template:
    """The theme as a plotly template: white, a light grid, legend under the axes, legible at 700 px.

    The width is the picture's: plotly.js in a page heeds a figure's own width and not its template's.
    """
    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "ticks": "outside",
        "tickcolor": MUTED,
        "ticklen": 4,
        "zeroline": False,
        "automargin": True,
        "title_standoff": 10,
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 14, "color": INK},
            "title": {
                "x": 0,
                "xref": "container",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 24, "l": 10},
            },
            "title_font_size": 17,
            "width": width,
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font_size": 13},
            "margin": {"l": 70, "r": 24, "b": 60},
            "hoverlabel": {"font_family": FONT, "font_size": 13},
            "hovermode": "closest",
            "modebar": {"remove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]},  # else over titles
        }
    )


READERS_THEME: Final = (
    "<style>:is(body[data-jp-theme-light=false] .jp-RenderedPlotly, .vscode-dark) :is(.main-svg, img.plot-img) "
    "{filter: invert(.93) hue-rotate(180deg)}</style>"
)
"""Makes figures dark where the page is, pictures of them too; hues stay, and so do contrasts."""


class NotebookRenderer(MimetypeRenderer):  # type: ignore[misc] # plotly has no types
    """A live figure, and a picture of it beside it, so that a saved notebook shows it anywhere.

    The picture needs kaleido and a Chromium; without them plotly's own ``png`` would fail, so then it is left out.
    """

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, Any]:
        """What Jupyter stores, by MIME type; a style stands before it, as JupyterLab shows one type of an output."""
        from IPython.display import display

        display({"text/html": READERS_THEME}, raw=True)
        kinds = ["plotly_mimetype", *(["png"] if can_draw_png() else [])]
        return {mime: data for kind in kinds for mime, data in pio.renderers[kind].to_mimebundle(fig_dict).items()}


def use_in_notebooks() -> None:
    """Make :class:`NotebookRenderer` plotly's default in a notebook's kernel, unless ``PLOTLY_RENDERER`` names one."""
    ipython = sys.modules.get("IPython")
    in_kernel = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    if in_kernel and not os.environ.get("PLOTLY_RENDERER"):
        pio.renderers["moelab"] = NotebookRenderer()
        pio.renderers.default = "moelab"


def keeps_pictures() -> bool:
    """Whether plotly's renderer keeps a picture beside each figure: the package's own does where one can be drawn."""
    return "png" in str(pio.renderers.default) or (pio.renderers.default == "moelab" and can_draw_png())


FIRST_PICTURE_S = 60.0


@functools.cache
def can_draw_png() -> bool:
    """Whether kaleido and a Chromium are here, and the Chromium draws; it goes on running until Python ends.

    plotly asks kaleido 1.5, which starts a Chromium for every figure (1 to 7 s on two busy cores) unless its server
    runs; with it a figure takes 0.3 s. The server does not survive a Chromium that fails to start and would then wait
    for ever, so a first picture is drawn before the server is believed.
    """
    if importlib.util.find_spec("kaleido") is None:
        return False
    from choreographer.browsers.chromium import Chromium  # how kaleido itself looks for the browser

    # choreographer 1.4.0 wakes its reader with "{bye}" as it closes the browser, and under load logs a traceback, as
    # this is no JSON; the picture is complete by then. To go once it knows its own farewell.
    logging.getLogger("choreographer.channels.pipe").setLevel(logging.CRITICAL)
    browser = Chromium.find_browser(skip_local=False)
    if browser is None or not Path(browser).exists():  # it hands on BROWSER_PATH unseen
        return False
    import kaleido

    # plotly 6.9 hands its headers over with every figure; a server takes them at its start only, and kaleido warns each
    # time. They are for what a figure downloads; ours download nothing.
    pio.defaults.headers = None
    kaleido.start_sync_server(n=1, mathjax=False, silence_warnings=True)  # no figure has formulas: no network either
    first = threading.Thread(target=kaleido.calc_fig_sync, args=({"data": [], "layout": {}},), daemon=True)
    first.start()
    first.join(FIRST_PICTURE_S)
    if first.is_alive():
        kaleido._global_server._initialized = False  # kaleido 1.5.0 has no word for a server whose browser is dead
        logging.getLogger(__name__).warning("Chromium does not draw: figures have no PNG here")
        return False
    return True
