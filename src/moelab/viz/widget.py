"""What the explorers and the live view share: a panel that keeps its keys; and what is common to all explorers.

JupyterLab (4.6) takes the arrow keys, Enter and single letters from whatever has the focus inside a notebook in command
mode: an arrow leaves a slider where it is and selects the next cell, a ``d`` typed twice on a menu deletes the cell.
Lumino, which finds its shortcuts, passes over an element with ``data-lm-suppress-shortcuts``, so the panel sets it on
the element that a key is for; keys with Ctrl, Alt or Cmd stay JupyterLab's. ipywidgets (8.1) leaves a slider without a
name for screen readers; the panel gives it its label. ipywidgets takes a while to load, so it is imported when a panel
is made.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from moelab.errors import BadInput, Refused
from moelab.viz.theme import WARNING

if TYPE_CHECKING:
    import ipywidgets

MARKED = f"border-left:4px solid {WARNING};padding-left:10px"
"""Style of words that warn: their colour is the page's, which may be dark."""


def make_panel(
    children: Sequence[ipywidgets.Widget], *, on_shown: Callable[[object], object] | None = None
) -> ipywidgets.VBox:
    """Widgets below each other, with keys of their own.

    Args:
        children: from top to bottom.
        on_shown: called with a message from each browser that shows the panel.
    """
    import ipywidgets as widgets
    from anywidget import AnyWidget

    keys = AnyWidget(_esm=javascript("panel.js"))
    if on_shown:
        keys.on_msg(lambda _widget, message, _buffers: on_shown(message))
    panel = widgets.VBox([*children, keys])
    panel.add_class("moelab-panel")  # by which panel.js knows it
    return panel


def javascript(name: str) -> str:
    """A script of the package, for anywidget."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def in_rows(controls: Iterable[ipywidgets.Widget]) -> ipywidgets.Box:
    """Controls side by side, in as many rows as they need."""
    import ipywidgets as widgets

    return widgets.Box(list(controls), layout=widgets.Layout(display="flex", flex_flow="row wrap", grid_gap="2px 8px"))


def labelled_control(kind: str, label: str, *, label_px: int, width_px: int, **options: Any) -> Any:
    """A control with its label at its left.

    Args:
        kind: its class in ipywidgets.
        label: its name on the page.
        label_px: room of the label.
        width_px: of label and control.
        options: of the class.
    """
    import ipywidgets as widgets

    look = {"style": {"description_width": f"{label_px}px"}, "layout": {"width": f"{width_px}px"}}
    return getattr(widgets, kind)(description=label, **look, **options)


def menu(label: str, values: Iterable[Any], start: Any, *, label_px: int, width_px: int) -> Any:
    """A menu of values; one to start with that is not among them is added, and numbers are sorted."""
    options = list(dict.fromkeys([*values, start]))
    options = options if isinstance(start, str) else sorted(options)
    return labelled_control("Dropdown", label, label_px=label_px, width_px=width_px, options=options, value=start)


class Explorer:
    """Controls, and below them words and figures that follow every change; show ``panel``.

    An explorer shows nothing of its own: a subclass asks the library in :meth:`look`. What cannot be is said in words.

    Args:
        controls: menus and sliders by name, so that the keyboard reaches all of them.
        figures: names of the figures, in the order in which they are shown.

    Attributes:
        controls: by name.
        words: the numbers, or why a choice cannot be, as HTML.
        figures: outputs by name; empty where there is nothing to draw.
        panel: everything, to be displayed.
    """

    def __init__(self, controls: Mapping[str, ipywidgets.Widget], figures: Sequence[str]) -> None:
        import ipywidgets as widgets

        self.controls = dict(controls)
        self.words = widgets.HTML()
        self.figures = {name: widgets.Output() for name in figures}
        self.panel = make_panel([in_rows(self.controls.values()), self.words, *self.figures.values()])
        self._listen()
        self.refresh()

    @property
    def chosen(self) -> dict[str, Any]:
        """Values of all controls."""
        return {name: control.value for name, control in self.controls.items()}

    def look(self) -> tuple[str, Mapping[str, go.Figure]]:
        """Words and figures of what is chosen; a figure that cannot be drawn is left out.

        Raises:
            BadInput, Refused: if the choice cannot be.
        """
        raise NotImplementedError

    def refresh(self, _change: object = None) -> None:
        """Show what is chosen."""
        try:
            words, figures = self.look()
        except (BadInput, Refused) as error:
            words, figures = refusal("Cannot be", str(error).splitlines()), {}
        self.words.value = words
        for name, output in self.figures.items():
            output.outputs = (as_output(figures[name]),) if name in figures else ()

    def _listen(self) -> None:
        for control in self.controls.values():
            control.observe(self.refresh, names="value")


def as_output(figure: go.Figure) -> dict[str, Any]:
    """A figure as an Output widget holds it."""
    data = {
        "application/vnd.plotly.v1+json": json.loads(figure.to_json()),
        "text/plain": str(figure.layout.title.text),
    }
    return {"output_type": "display_data", "data": data, "metadata": {}}


def refusal(title: str, reasons: Sequence[str]) -> str:
    """Why a choice cannot be, as HTML that screen readers are told of and that is legible on a dark page too."""
    listed = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    return f"<div role='status' style='{MARKED}'><b>{title}</b><ul>{listed}</ul></div>"
