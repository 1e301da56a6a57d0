"""What the explorers and the live view share: a panel that keeps its keys; and what is common to all explorers.

JupyterLab (4.6) takes the arrow keys, Enter and single letters from whatever has the focus inside a notebook in command
mode: an arrow leaves a slider where it is and selects the next cell, a ``d`` typed twice on a menu deletes the cell.
Lumino, which finds its shortcuts, passes over an element with ``data-lm-suppress-shortcuts``, so the panel sets it on
the element that a key is for; keys with Ctrl, Alt or Cmd stay JupyterLab's. ipywidgets (8.1) leaves a slider without a
name for screen readers; the panel gives it its label. ipywidgets takes a while to load, so it is imported when a panel
is made.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from moelab.errors import BadInput, Refused
from moelab.viz.theme import DARK, NARROW, WARNING, in_words, keeps_pictures

if TYPE_CHECKING:
    import ipywidgets

MARKED = f"border-left:4px solid {WARNING};padding-left:10px;line-height:1.4"
"""Style of words that warn: their colour is the page's, which may be dark."""


def make_panel(
    children: Sequence[ipywidgets.Widget], *, on_shown: Callable[[object], object] | None = None
) -> ipywidgets.VBox:
    """Widgets below each other, with keys of their own."""
    import ipywidgets as widgets
    from anywidget import AnyWidget

    # A widget without a view of its own: its script watches the panel that it lies in.
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


def labelled_control(kind: str, label: str, **options: Any) -> Any:
    """A control of a class of ipywidgets with its label at its left; ``options`` go to the class."""
    import ipywidgets as widgets

    return getattr(widgets, kind)(description=label, **options)


def size_control(control: ipywidgets.Widget, label_px: int, width_px: int) -> None:
    """Make a control so wide, and its label so wide of that."""
    control.style.description_width, control.layout.width = f"{label_px}px", f"{width_px}px"


def menu(label: str, values: Iterable[Any], start: Any, *, words: Callable[[Any], str] = str) -> Any:
    """A menu of values; one to start with that is not among them is added, and numbers are sorted."""
    # A start that the menu lacks, such as an own model's, must not raise.
    options = list(dict.fromkeys([*values, start]))
    named = [(words(value), value) for value in (options if isinstance(start, str) else sorted(options))]
    return labelled_control("Dropdown", label, options=named, value=start)


def menus(table: Mapping[str, tuple[str, Mapping[Any, str]]], starts: Mapping[str, Any]) -> dict[str, Any]:
    """A menu for each row of a table of labels and of the values' words; a start without words is its own."""
    controls = {}
    for name, (label, words) in table.items():
        options = {**words, starts[name]: words.get(starts[name], str(starts[name]))}
        controls[name] = menu(label, options, starts[name], words=options.__getitem__)
    return controls


def live_figures(figures: Mapping[str, go.Figure | None]) -> Any:
    """A widget of figures by name that follows the page's theme; ``show(figures)`` draws others in their place.

    Only what differs from what it shows travels to the browser, and plotly.js draws it into the figures that are there:
    a figure made anew costs it several times as much. A name that is left out has its figure hidden.
    """
    import traitlets
    from anywidget import AnyWidget

    # Within the function, as importing anywidget takes a while and most users of this module draw statically.
    class LiveFigures(AnyWidget):
        _esm = javascript("painted.js") + javascript("live.js")
        plotly = traitlets.Unicode().tag(sync=True)
        dark = traitlets.Dict().tag(sync=True)
        figures = traitlets.Dict().tag(sync=True)
        drawn = traitlets.Int().tag(sync=True)  # counted by the browser alone
        number = 0

        def show(self, figures: Mapping[str, go.Figure]) -> None:
            wanted = dict.fromkeys(self.figures) | _as_json(figures)
            changed = list(changes(self.figures, wanted))
            self.figures.update(wanted)  # in place, which traitlets does not see: it would send everything
            if changed:
                self.put(changed)

        def put(self, changed: list[Any]) -> None:
            self.number += 1
            self.send({"changes": changed, "number": self.number})

    shown = LiveFigures(plotly=get_plotlyjs(), dark=DARK, figures=_as_json(figures))

    def catch_up(_widget: object, message: Mapping[str, int], _buffers: object) -> None:
        if message["drawn"] != shown.number:
            shown.put([((name,), figure) for name, figure in shown.figures.items()])

    shown.on_msg(catch_up)  # a browser hears of changes only once it has loaded the script, and says so then
    return shown


def _as_json(figures: Mapping[str, go.Figure | None]) -> dict[str, Any]:
    return {name: json.loads(figure.to_json()) if figure else None for name, figure in figures.items()}


def changes(old: Any, new: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What to put where so that one JSON value becomes another; None stands for what is gone, as plotly reads it.

    A list of numbers or texts is replaced as a whole, and so is a list that has another length.

    Example:
        >>> list(changes({"y": [1, 2], "name": "a"}, {"y": [1, 3], "name": "a"}))
        [(('y',), [1, 3])]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        pairs: Iterable[tuple[Any, Any, Any]] = ((key, old.get(key), new.get(key)) for key in {**old, **new})
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and new and isinstance(new[0], dict):
        pairs = zip(range(len(new)), old, new, strict=True)
    else:
        if old != new:
            yield path, new
        return
    for key, before, after in pairs:
        yield from changes(before, after, (*path, key))


class Explorer:
    """Controls with the figures beside them, and above both one line that says what follows from the choice.

    An explorer shows nothing of its own: a subclass asks the library in :meth:`look`. Where the page has room, all of
    it fits into a window of 1280 × 800. What cannot be is said under the control that was changed last. A notebook ends
    a cell with the explorer itself, which readers without a kernel see as its first figure.

    Args:
        controls: menus and sliders of :func:`labelled_control` by name, so that the keyboard reaches all of them.
        figures: names of the figures, in the order in which they are shown.
    """

    label_px: ClassVar = 138
    control_px: ClassVar = 290
    """Width of each control with its label; with ``NARROW`` figures it stands beside them on a screen of 1280 px."""

    def __init__(self, controls: Mapping[str, ipywidgets.Widget], figures: Sequence[str]) -> None:
        import ipywidgets as widgets

        self.controls = dict(controls)
        self.figures: Mapping[str, go.Figure] = {}  # that are shown: none that cannot be drawn
        # The control that caused a refusal, if one did, and the refusal: only below that control it has its reason.
        self.refused: tuple[str | None, str] = (None, "")
        self.words, self.reasons = widgets.HTML(), {name: widgets.HTML() for name in controls}
        self.plots = live_figures(dict.fromkeys(figures))
        rows = []
        for name, control in self.controls.items():
            size_control(control, self.label_px, self.control_px)
            self.reasons[name].layout.width = control.layout.width
            rows.append(widgets.VBox([control, self.reasons[name]], layout={"flex": "0 0 auto"}))
        left = in_rows(rows)
        # The figures take all room that the controls leave.
        left.layout.flex, left.layout.align_content = f"1 0 {self.control_px + 4}px", "flex-start"
        self.plots.layout = {"flex": f"100 1 {NARROW}px", "min_width": "0"}
        self.panel = make_panel([self.words, in_rows([left, self.plots])])
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

    def picture(self) -> go.Figure:
        """What readers without a kernel see of the choice: the first figure."""
        return next(iter(self.figures.values()))

    def refresh(self, change: Any = None) -> None:
        """Show what is chosen; ``change`` is what the control that was moved says of it."""
        moved = next((name for name, one in self.controls.items() if change and one is change["owner"]), None)
        try:
            answer, self.figures = self.look()
            words = f"<div role='status' style='line-height:1.35'>{answer}</div>" if answer else ""
            self.refused = (None, "")
        except (BadInput, Refused) as error:
            if str(error) != self.refused[1]:  # else the control that was moved has nothing to do with it
                self.refused = (moved, str(error))
            words, self.figures = refusal(self.refused[1], self.controls.get(self.refused[0] or "")), {}
        self.words.value = words
        for name, place in self.reasons.items():
            place.value = refusal(self.refused[1]) if name == self.refused[0] else ""
            place.layout.display = None if place.value else "none"
        self.plots.show(self.figures)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The panel, and for readers without a kernel a picture."""
        bundle: dict[str, Any] = self.panel._repr_mimebundle_(**options)
        return bundle | (as_picture(self.picture()) if self.figures else {})

    def _listen(self) -> None:
        for control in self.controls.values():
            control.observe(self.refresh, names="value")


def as_picture(figure: go.Figure) -> dict[str, str]:
    """What a widget's output holds beside it, by MIME type: a figure's title, and its PNG where that can be drawn."""
    bundle = {"text/plain": in_words(figure.layout.title.text)}
    if keeps_pictures():
        bundle["image/png"] = base64.b64encode(figure.to_image("png")).decode()
    return bundle


def refusal(error: str, cause: ipywidgets.Widget | None = None) -> str:
    """Why a choice cannot be, as HTML that screen readers are told of and that is legible on a dark page too.

    With ``cause``, the control under which the reasons stand, it says no more than where they are.
    """
    reasons = [line.removeprefix("- ") for line in error.splitlines()]
    title = "Legal, but does not fit" if reasons[0].startswith("does not fit") else "Cannot be"
    if reasons[0] == "illegal layout:":
        title, reasons = "Illegal", reasons[1:]
    if cause:
        return f"<div role='status'><b>{title}</b>: see <i>{cause.description}</i></div>"
    listed = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    listed = f"<ul style='margin:2px 0;padding-left:16px'>{listed}</ul>"
    return f"<div role='status' style='{MARKED}'><b>{title}</b>{listed}</div>"
