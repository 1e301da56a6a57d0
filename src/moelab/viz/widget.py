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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from moelab.errors import BadInput, Refused
from moelab.viz.theme import DARK, NARROW, WARNING, in_words, keeps_pictures

if TYPE_CHECKING:
    import ipywidgets

MARKED = f"border-left:4px solid {WARNING};padding-left:10px;line-height:1.4"
"""Style of words that warn: their colour is the page's, which may be dark."""
CONTROL_PX: Final = 288
"""Width of an explorer's control with its label: beside a ``NARROW`` figure it stands in a window of 1280 px."""


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


@dataclass(frozen=True)
class Menu:
    """A control that offers values by their words; numbers are sorted."""

    label: str
    values: Mapping[Any, str]

    @classmethod
    def of(cls, label: str, values: Iterable[Any], words: Callable[[Any], str] = str) -> Menu:
        """A menu of values that are written by a function."""
        return cls(label, {value: words(value) for value in values})

    def widget(self, start: Any) -> Any:
        """The control; a start that it does not offer, such as an own model, is added."""
        values = self.values if start in self.values else {**self.values, start: str(start)}
        return labelled_control("Dropdown", self.label, options=self.options(values), value=start)

    @staticmethod
    def options(values: Mapping[Any, str]) -> list[tuple[str, Any]]:
        """What ipywidgets takes."""
        named = [(words, value) for value, words in values.items()]
        return named if any(isinstance(value, str) for value in values) else sorted(named, key=lambda one: one[1])


@dataclass(frozen=True)
class Slider:
    """A control of numbers; of whole ones where ``step`` is whole."""

    label: str
    least: float
    most: float
    step: float = 1

    def widget(self, start: Any) -> Any:
        """The control; a number is taken when the hand lets go."""
        kind = "IntSlider" if isinstance(self.step, int) else "FloatSlider"
        ends = {"min": self.least, "max": self.most, "step": self.step, "continuous_update": False}
        written = {} if isinstance(self.step, int) else {"readout_format": ".4g"}
        return labelled_control(kind, self.label, value=start, **ends, **written)


@dataclass(frozen=True)
class Number:
    """A field for a whole number."""

    label: str

    def widget(self, start: Any) -> Any:
        """The control."""
        return labelled_control("IntText", self.label, value=start)


class Explorer:
    """Controls with a figure beside them, and above both one line that says what follows from the choice.

    A subclass answers in :meth:`draw`, and shows nothing itself. What cannot be is said under the control that was
    changed last. A notebook ends a cell with the explorer, which readers without a kernel see as its figure.

    Args:
        controls: what the reader moves, by name; the keyboard reaches all of it.
        starts: where each control begins.
    """

    def __init__(self, controls: Mapping[str, Menu | Slider | Number], starts: Mapping[str, Any]) -> None:
        import ipywidgets as widgets

        self.controls = {name: control.widget(starts[name]) for name, control in controls.items()}
        self.figure: go.Figure | None = None  # none of a choice that cannot be
        # The control that caused a refusal, if one did, and the refusal: only below that control it has its reason.
        self.refused: tuple[str | None, str] = (None, "")
        self.words, self.reasons = widgets.HTML(), {name: widgets.HTML() for name in controls}
        self.plots = live_figures({"figure": None})
        label_px = round(7.3 * max(len(control.label) for control in controls.values()))
        rows = []
        for name, control in self.controls.items():
            size_control(control, label_px, CONTROL_PX)
            self.reasons[name].layout.width = control.layout.width
            rows.append(widgets.VBox([control, self.reasons[name]], layout={"flex": "0 0 auto"}))
            control.observe(self._moved, names="value")
        left = in_rows(rows)
        # The figure takes all room that the controls leave.
        left.layout.flex, left.layout.align_content = f"1 0 {CONTROL_PX + 4}px", "flex-start"
        self.plots.layout = {"flex": f"100 1 {NARROW}px", "min_width": "0"}
        self.panel = make_panel([self.words, in_rows([left, self.plots])])
        self._syncing = False
        self.refresh()

    def draw(self, chosen: Mapping[str, Any]) -> tuple[str, go.Figure]:
        """Words and the figure of a choice, by the controls' names.

        Raises:
            BadInput, Refused: if the choice cannot be.
        """
        raise NotImplementedError

    def offered(self) -> Mapping[str, Mapping[Any, str]]:
        """Values of menus, with words, that depend on the choice: by name; asked once the choice is drawn."""
        return {}

    @property
    def chosen(self) -> dict[str, Any]:
        """Values of all controls."""
        return {name: control.value for name, control in self.controls.items()}

    def refresh(self, moved: str | None = None) -> None:
        """Show what is chosen; ``moved`` is the control that changed it."""
        try:
            answer, self.figure = self.draw(self.chosen)
            words = f"<div role='status' style='line-height:1.35'>{answer}</div>" if answer else ""
            self.refused = (None, "")
        except (BadInput, Refused) as error:
            if str(error) != self.refused[1]:  # else the control that was moved has nothing to do with it
                self.refused = (moved, str(error))
            words, self.figure = refusal(self.refused[1], self.controls.get(self.refused[0] or "")), None
        self.words.value = words
        for name, place in self.reasons.items():
            place.value = refusal(self.refused[1]) if name == self.refused[0] else ""
            place.layout.display = None if place.value else "none"
        self.plots.show({"figure": self.figure} if self.figure else {})
        self._syncing = True  # new options reset a menu's value, which is no choice of the reader's
        for name, values in self.offered().items():
            control, options = self.controls[name], tuple(Menu.options(values))
            # Setting equal options too would close the menu that the reader has open.
            if control.options != options:
                kept = control.value
                control.options = options
                control.value = kept
        self._syncing = False

    def _moved(self, change: Any) -> None:
        if not self._syncing:
            self.refresh(next(name for name, control in self.controls.items() if control is change["owner"]))

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The panel, and for readers without a kernel a picture."""
        bundle: dict[str, Any] = self.panel._repr_mimebundle_(**options)
        return bundle | (as_picture(self.figure) if self.figure else {})


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
