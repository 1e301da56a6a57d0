"""The live view: the figures of :mod:`moelab.viz.dashboard` in a widget that follows the run directories.

A thread of the kernel reads and draws; it ends with the kernel, and when the view is no longer held by a variable. All
that is shown comes from the run directories, so after a restart of the kernel the same cell brings it back. Figures are
made when a browser says that it shows the panel: a notebook that runs in batch has none, and would only grow by them.
ipywidgets and anywidget take a while to load, so they are imported when a view is made.

One widget holds all figures and redraws them in place, which keeps zoom and hidden lines. plotly's own ``FigureWidget``
(6.9) brings 5 MB of JavaScript with every figure, and anywidget (0.11) gives a widget 2 s to start: six of them at once
stay blank on a slow machine. Here plotly comes once, and is loaded after the start.
"""

from __future__ import annotations

import html
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from moelab.errors import MoelabError
from moelab.launch.status import refresh
from moelab.runs.directory import RunDir
from moelab.runs.follow import RunFollower, StudyFollower
from moelab.runs.status import Status
from moelab.viz.dashboard import dashboard
from moelab.viz.widget import MARKED, in_rows, make_panel

ASK_INTERVAL_S: Final = 15.0
MOST_OF_A_CORE: Final = 0.03
"""Share of a core that the view may take: it looks less often where drawing takes long."""
FIGURE_WIDTH: Final = 700


class LiveView:
    """Jobs, states and figures that follow the runs at a path; show ``panel`` and keep the view in a variable.

    Args:
        path: a run, a study, or the folder of all studies; it may appear later.
        cancel: ends one run; without it there is no button.
        ask: brings the ``status.json`` of runs up to date from their scheduler, every 15 s; what it could not find out
            is shown.
        interval_s: seconds between two looks at least; a field of the panel changes it.

    Attributes:
        follower: what was read.
        figures: by name, as :func:`~moelab.viz.dashboard.dashboard` draws them; empty before a browser shows the panel.
        panel: everything, to be displayed.
    """

    def __init__(
        self,
        path: Path,
        *,
        cancel: Callable[[RunDir], object] | None = None,
        ask: Callable[[Sequence[RunDir]], Sequence[Status]] = refresh,
        interval_s: float = 5.0,
    ) -> None:
        self.follower, self._cancel, self._ask = StudyFollower(path), cancel, ask
        self._asked_at = -math.inf
        self._to_cancel: RunFollower | None = None
        self._lock, self._ended, self._other = threading.Lock(), threading.Event(), threading.Event()
        weakref.finalize(self, self._ended.set)
        self.figures: dict[str, go.Figure] = {}
        self._make_controls(interval_s)
        self._make_panel()
        self.update()
        self._thread = threading.Thread(target=_keep_updating, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the panel stays as it is."""
        self._ended.set()
        self._thread.join()

    @property
    def is_following(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return float(self.interval.value)

    def update(self) -> None:
        """Look once, and draw what has changed."""
        with self._lock:
            changed = self.follower.poll()
            if self._ask_scheduler():
                changed = [*changed, *self.follower.poll()]
            self._renew_menu()
            if changed:
                self._renew_figures()
        self._draw_other()

    def show_figures(self) -> None:
        """Make the figures; called when a browser shows the panel."""
        with self._lock:
            if not self.figures:
                self.figures = self._draw()
                self.place.children = (_figures_in_place(self.figures),)

    def _make_controls(self, interval_s: float) -> None:
        import ipywidgets as widgets

        self.interval = widgets.BoundedFloatText(
            value=interval_s, min=0.5, max=600, step=0.5, description="look every … s", style=_STYLE, layout=_NARROW
        )
        self.shown = widgets.Dropdown(description="run", style=_STYLE, layout=_WIDE)
        self.cancel = widgets.Button(description="Cancel this run …", disabled=True)
        self.confirm = widgets.Button(description="Yes, cancel it", button_style="danger")
        self.keep = widgets.Button(description="No, keep it")
        self.question, self.message, self.tail = widgets.HTML(), widgets.HTML(), widgets.HTML()
        me = weakref.ref(self)
        self.cancel.on_click(_weakly(me, LiveView._ask_to_cancel))
        self.confirm.on_click(_weakly(me, LiveView._do_cancel))
        self.keep.on_click(_weakly(me, LiveView._forget_cancel))
        self.shown.observe(_weakly(me, LiveView._show_other), names="value")

    def _make_panel(self) -> None:
        import ipywidgets as widgets

        self.asking = widgets.HBox([self.question, self.confirm, self.keep])
        self.asking.layout.display = "none"
        controls = in_rows([self.shown, self.interval, *([self.cancel] if self._cancel else [])])
        self.place = widgets.VBox()
        shown = _weakly(weakref.ref(self), lambda view, _message: view.show_figures())
        self.panel = make_panel([controls, self.asking, self.message, self.place, self.tail], on_shown=shown)

    def _draw(self) -> dict[str, go.Figure]:
        figures = dashboard(self.follower, shown=self._shown_index())
        return {name: figure.update_layout(width=FIGURE_WIDTH) for name, figure in figures.items()}

    def _renew_figures(self) -> None:
        self._other.clear()
        if self.figures:
            self.figures = self._draw()
            self.place.children[0].figures = _as_json(self.figures)
        one = self._chosen()
        lines = "\n".join(one.tail) if one else ""
        self.tail.value = (
            f"<div role='log' aria-label='last log lines'>Last log lines beside the step lines"
            f"<pre style='white-space:pre-wrap;font-size:12px'>{html.escape(lines)}</pre></div>"
        )

    def _renew_menu(self) -> None:
        names = tuple(one.now.name for one in self.follower.runs)
        if names != tuple(self.shown.options):
            kept = self.shown.value
            self.shown.options = names
            self.shown.value = kept if kept in names else names[-1] if names else None
        one = self._chosen()
        self.cancel.disabled = one is None or one.now.status.state.is_final

    def _chosen(self) -> RunFollower | None:
        return next((one for one in self.follower.runs if one.now.name == self.shown.value), None)

    def _shown_index(self) -> int:
        one = self._chosen()
        return self.follower.runs.index(one) if one else -1

    def _show_other(self, _change: object) -> None:
        self._other.set()
        self._draw_other()

    def _draw_other(self) -> None:
        """Draw the run that was chosen; where a look holds the lock, that look does it at its end."""
        while self._other.is_set() and self._lock.acquire(blocking=False):
            try:
                self._renew_menu()
                self._renew_figures()
            finally:
                self._lock.release()

    def _ask_to_cancel(self, _button: object) -> None:
        self._to_cancel = self._chosen()
        if self._to_cancel:
            name = html.escape(self._to_cancel.now.name)
            self.question.value = f"<div role='alert'>Cancel <b>{name}</b>? What it logged stays.</div>"
            self.asking.layout.display = "flex"

    def _forget_cancel(self, _button: object) -> None:
        self._to_cancel = None
        self.asking.layout.display = "none"

    def _do_cancel(self, button: object) -> None:
        chosen, cancel = self._to_cancel, self._cancel
        self._forget_cancel(button)
        if chosen and cancel:
            try:
                cancel(chosen.run)
            except (MoelabError, OSError) as error:
                self.update()
                self._say(f"not cancelled: {error}")
            else:
                self.update()

    def _ask_scheduler(self) -> bool:
        """Ask if it is time to; tell whether it was."""
        if time.monotonic() - self._asked_at < ASK_INTERVAL_S:
            return False
        self._asked_at = time.monotonic()
        self._say(self.follower.ask(self._ask))
        return True

    def _say(self, text: str) -> None:
        self.message.value = f"<div role='status' style='{MARKED}'>{html.escape(text)}</div>" if text else ""


_STYLE = {"description_width": "110px"}
_WIDE, _NARROW = {"width": "800px"}, {"width": "200px"}


def _keep_updating(view: weakref.ref[LiveView], ended: threading.Event) -> None:
    wait_s = 0.0
    while not ended.wait(wait_s):
        held = view()
        if held is None:
            return
        started_s = time.thread_time()
        try:
            held.update()
        except (MoelabError, OSError) as error:  # the next look may succeed
            held._say(f"not up to date: {error}")
        wait_s = max(held.interval_s, (time.thread_time() - started_s) / MOST_OF_A_CORE)
        del held  # while it waits, only the reader's variable holds the view


def _weakly(view: weakref.ref[LiveView], method: Callable[[LiveView, Any], None]) -> Callable[[Any], None]:
    """A callback that does not keep its view alive: ipywidgets keeps every callback."""

    def call(argument: Any) -> None:
        if held := view():
            method(held, argument)

    return call


_JS = """
export default {
  render({ model, el }) {
    Object.assign(el.style, { display: "flex", flexFlow: "row wrap", gap: "2px 8px" });
    const places = {};
    let plotly;
    const draw = async () => {
      if (!plotly) {
        const loaded = { exports: {} };
        new Function("module", model.get("plotly"))(loaded);
        plotly = loaded.exports;
      }
      for (const [name, { data, layout }] of Object.entries(model.get("figures"))) {
        places[name] ??= el.appendChild(document.createElement("div"));
        await plotly.react(places[name], data, layout, { displaylogo: false });
      }
    };
    let drawn = draw();
    const again = () => { drawn = drawn.catch(console.error).then(draw); };
    model.on("change:figures", again);
    return () => {
      model.off("change:figures", again);
      Object.values(places).forEach((place) => plotly?.purge(place));
    };
  }
};
"""


def _figures_in_place(figures: Mapping[str, go.Figure]) -> Any:
    """A widget of figures by name, each with a ``width``; what is put into its ``figures`` is drawn over them."""
    import traitlets
    from anywidget import AnyWidget

    class LiveFigures(AnyWidget):
        _esm = _JS
        plotly = traitlets.Unicode().tag(sync=True)
        figures = traitlets.Dict().tag(sync=True)

    return LiveFigures(plotly=get_plotlyjs(), figures=_as_json(figures))


def _as_json(figures: Mapping[str, go.Figure]) -> dict[str, Any]:
    return {name: json.loads(figure.to_json()) for name, figure in figures.items()}
