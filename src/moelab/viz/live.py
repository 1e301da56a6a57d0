"""The live view: where the runs are, their loss, throughput and memory, and the step times of all ranks.

The figures are drawn from what a :class:`~moelab.runs.follow.StudyFollower` has read; a static notebook shows the same.
A ``note`` states in every title a condition, such as that the runs are simulated.

In the widget a thread of the kernel reads and draws; it ends with the kernel, and when the view is no longer held by a
variable. All that is shown comes from the run directories, so after a restart of the kernel the same cell brings it
back. Figures are made when a browser says that it shows the panel: a notebook that runs in batch has none, and would
only grow by them. One widget holds all figures and redraws them in place, which keeps zoom and hidden lines: plotly's
own ``FigureWidget`` (6.9) brings 5 MB of JavaScript with every figure.
"""

from __future__ import annotations

import atexit
import gzip
import html
import itertools
import math
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.data.example_logs import SIMULATED, SIMULATED_LOG
from moelab.errors import MoelabError
from moelab.experiment import Experiment
from moelab.judge.arms import arm_label
from moelab.launch.status import refresh
from moelab.privacy import without_secrets
from moelab.runs import directory
from moelab.runs.directory import RunDir
from moelab.runs.follow import RankTable, RunFollower, RunNow, StudyFollower, format_seconds
from moelab.runs.log import read_log
from moelab.runs.metrics import FILE as METRICS_FILE
from moelab.runs.status import State, Status
from moelab.runs.stragglers import slow_steps
from moelab.runs.table import VALUE_COLUMNS
from moelab.viz.draw import legend_below, list_rows, thinned, write_beside
from moelab.viz.theme import GRID, WIDE, arm_styles, counted, new_figure, plot_text
from moelab.viz.widget import MARKED, as_picture, in_rows, labelled_control, live_figures, make_panel, size_control

MOST_POINTS: Final = 500
"""Of a line: a run of a hundred thousand steps is as quick to draw as one of a hundred."""
HALF: Final = 415
"""Width, px, of a figure that has another at its side in the output of a notebook, on a screen of 1280 px."""
_STATE_COLORS: Mapping[State, str] = {
    State.PREPARED: "#BBBBBB",
    State.SUBMITTED: "#F0E442",
    State.RUNNING: "#56B4E9",
    State.COMPLETED: "#009E73",
    State.FAILED: "#D55E00",
    State.CANCELLED: "#CC79A7",
    State.UNKNOWN: "#BBBBBB",
}
_CURVES: Final[Mapping[str, tuple[str, str, dict[str, str]]]] = {
    "loss": ("Loss", "nats per token", {"tickformat": ".4~g"}),
    "tps": ("Tokens/s per rank", "tokens/s per rank", {"tickformat": ",", "rangemode": "tozero"}),
}
"""Title and axis of a quantity, and options of the axis."""
_SECONDS: Final = [[0.0, "#f7fbff"], [0.5, "#56B4E9"], [1.0, "#08306b"]]


def dashboard(follower: StudyFollower, *, shown: int = -1, note: str = "") -> dict[str, go.Figure]:
    """All figures of what was read so far, by name: ``states, step_times, loss, tps, rank_memory``.

    ``shown`` is the index of the run whose ranks are drawn.
    """
    one = follower.runs[shown] if follower.runs else None
    ranks, name = (one.rank_table, label(one.now)) if one else (RankTable.empty(), "no run yet")
    figures = {
        "states": run_states([run.now for run in follower.runs], note=note),
        "step_times": rank_step_times(ranks, name=name, note=note),
        "loss": run_curves(follower.rows, "loss", note=note),
        "tps": run_curves(follower.rows, "tps", note=note),
        "rank_memory": rank_memory(ranks, name=name, note=note),
    }
    for figure in figures.values():
        figure.update_layout(uirevision="live")  # what a reader zoomed or hid stays so
    return figures


def run_states(runs: Sequence[RunNow], *, note: str = "") -> go.Figure:
    """A bar a run: the part of its steps that is trained, in the colour of its state, which is also written."""
    counts = {state: sum(run.status.state is state for run in runs) for state in State}
    title = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "No run yet"
    height = 110 + 40 * max(1, len(runs))
    figure = new_figure(title, subtitle="Trained part of the planned steps.", note=note, height=height)
    for run in runs:
        name, reason = plot_text(label(run)), run.status.reason or ""
        details = [
            f"step {run.step:,} of {run.steps:,}" if run.steps else f"step {run.step:,}",
            f"{run.segments} launches" if run.segments > 1 else "",
            f"about {format_seconds(run.left_s)} left" if math.isfinite(run.left_s) else "",
            reason if len(reason) <= 60 else f"{reason[:59]}…",
        ]
        color, hover = _STATE_COLORS[run.status.state], f"{plot_text(run.name)}<extra></extra>"
        figure.add_bar(x=[run.done], y=[name], orientation="h", marker_color=color, name=name, hovertemplate=hover)
        text = f"<b>{run.status.state}</b> · {plot_text(' · '.join(filter(None, details)))}"
        write_beside(figure, 0.01, name, text)
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    return list_rows(figure, showlegend=False, barmode="overlay")


def run_curves(rows: pd.DataFrame, column: str, *, note: str = "") -> go.Figure:
    """``loss`` or ``tps`` over steps as it was logged, a line a run; seeds of an arm share colour and dash."""
    title, axis, options = _CURVES[column]
    known = rows[rows[column].notna()]
    count = known["run"].nunique()
    figure = new_figure(
        f"{title}, as logged" if count else f"{title}: nothing logged yet",
        subtitle=f"n = {counted(count, 'run')}.",
        note=note,
        height=300,
        width=HALF,
    )
    styles = arm_styles(known["arm"].unique())
    for _, rows_of_run in known.groupby("run", sort=True):
        run, style = thinned(rows_of_run, MOST_POINTS), styles[str(rows_of_run["arm"].iloc[0])]
        name = f"{style.label}, seed {run['seed'].iloc[0]}"
        figure.add_scatter(
            x=run["step"].to_numpy(dtype=float),
            y=run[column].to_numpy(dtype=float),
            mode="lines+markers",
            name=name,
            line=style.line(2),
            marker=style.marker(7 if len(run) <= 30 else 1),
            hovertemplate=f"{name}<br>step %{{x}}: %{{y:.6~g}}<extra></extra>",
        )
    figure.update_xaxes(title_text="step").update_yaxes(title_text=axis, **options)
    return legend_below(figure.update_layout(showlegend=True))


def rank_step_times(table: RankTable, *, name: str, note: str = "") -> go.Figure:
    """Step time of every rank at its newest steps, as a map of ranks by steps."""
    seconds = table.step_time_s
    known, heard = seconds[np.isfinite(seconds)], np.isfinite(seconds).any(axis=0).sum()
    title, scale = "No rank has printed two steps yet", {}
    if len(known):
        slow, median = slow_steps(table.steps, seconds), table.median_step_s
        worst = max(slow, key=lambda step: slow[step], default=0)
        longer = f"; step {worst:,} took {100 * slow[worst]:.0f} % longer" if slow else ""
        title = f"A step takes {median:.3g} s{longer}"
        # One step with a checkpoint would whiten all others.
        scale = {"zmin": float(known.min()), "zmax": min(float(known.max()), 2 * median)}
    figure = new_figure(
        title,
        subtitle=f"{name}: seconds per step, between a rank's step lines; {heard} of {seconds.shape[1]} ranks print. "
        "A step ends for all ranks together: one slow rank darkens the whole column.",
        note=note,
        height=380,
        width=WIDE,
    )
    figure.add_heatmap(
        z=seconds.T,
        x=[f"{step}" for step in table.steps],  # a number axis would leave gaps where a launch repeated steps
        y=np.arange(seconds.shape[1]),
        colorscale=_SECONDS,
        colorbar={"title": {"text": "s per step", "side": "right"}, "thickness": 14},
        hovertemplate="step %{x}, rank %{y}: %{z:.4g} s<extra></extra>",
        hoverongaps=False,
        **scale,
    )
    figure.update_xaxes(title_text="step", type="category", showgrid=False, nticks=12)
    tick = max(1, seconds.shape[1] // 8)
    figure.update_yaxes(title_text="global rank", showgrid=False, autorange="reversed", dtick=tick, tick0=0)
    return figure.update_layout(plot_bgcolor=GRID)


def rank_memory(table: RankTable, *, name: str, note: str = "") -> go.Figure:
    """Reserved memory of every rank at its newest step."""
    # Ranks whose output is not in the log have no line and no place on the axis.
    known = np.flatnonzero(np.isfinite(table.memory_gib))
    gib = table.memory_gib[known]
    figure = new_figure(
        f"Memory: {gib.min():.1f} to {gib.max():.1f} GiB a rank" if len(gib) else "No rank has printed a step yet",
        subtitle=f"{name}: reserved at the newest step; {len(known)} of {len(table.memory_gib)} ranks print.",
        note=note,
        height=300,
        width=HALF,
    )
    line = {"color": "#0072B2", "width": 1.5, "shape": "hvh"}
    hover = "rank %{x}: %{y:.2f} GiB<extra></extra>"
    figure.add_scatter(x=known, y=gib, mode="lines+markers", line=line, marker_size=4, hovertemplate=hover)
    figure.update_xaxes(title_text="global rank", dtick=max(1, len(table.memory_gib) // 8))
    return figure.update_yaxes(title_text="GiB", rangemode="tozero").update_layout(showlegend=False)


def label(run: RunNow) -> str:
    """Arm and seed of a run in words."""
    return arm_label(run.arm) if run.seed is None else f"{arm_label(run.arm)}, seed {run.seed}"


# The widget

ASK_INTERVAL_S: Final = 15.0
MOST_OF_A_CORE: Final = 0.03
"""Share of a core that the view may take: it looks less often where drawing takes long."""


class LiveView:
    """Jobs, states and figures that follow the runs at a path; show ``panel`` and keep the view in a variable.

    Args:
        path: a run, a study, or the folder of all studies; it may appear later.
        cancel: ends one run; without it there is no button.
        ask: brings the ``status.json`` of runs up to date from their scheduler, every 15 s; what it could not find out
            is shown.
        interval_s: seconds between two looks at least; a field of the panel changes it.
        note: for the titles of all figures.
        picture: name of the figure that readers without a kernel see where a cell ends with the view.
    """

    def __init__(
        self,
        path: Path,
        *,
        cancel: Callable[[RunDir], object] | None = None,
        ask: Callable[[Sequence[RunDir]], Sequence[Status]] = refresh,
        interval_s: float = 5.0,
        note: str = "",
        picture: str = "loss",
    ) -> None:
        self._note, self._picture = note, picture
        self.follower, self._cancel, self._ask = StudyFollower(path), cancel, ask
        self._asked_at = -math.inf
        self._to_cancel: RunFollower | None = None
        self._lock, self._ended, self._other = threading.Lock(), threading.Event(), threading.Event()
        weakref.finalize(self, self._ended.set)  # the thread waits on it, and holds no view meanwhile
        self.figures: dict[str, go.Figure] = {}  # of `dashboard`; none before a browser shows the panel
        self._make_panel(interval_s)
        self.update()
        self._thread = threading.Thread(target=_keep_updating, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the panel stays as it is."""
        self._ended.set()
        self._thread.join()

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
        """Make the figures: a browser shows the panel."""
        with self._lock:
            if not self.figures:
                self.figures = self._draw()
                self.place.children = (live_figures(self.figures),)

    def _make_panel(self, interval_s: float) -> None:
        import ipywidgets as widgets

        seconds = {"value": interval_s, "min": 0.5, "max": 600, "step": 0.5}
        self.interval = labelled_control("BoundedFloatText", "look every … s", **seconds)
        self.shown = labelled_control("Dropdown", "run")
        size_control(self.interval, 110, 200)
        size_control(self.shown, 110, 800)
        self.cancel = widgets.Button(description="Cancel this run …", disabled=True)
        self.confirm = widgets.Button(description="Yes, cancel it", button_style="danger")
        self.keep = widgets.Button(description="No, keep it")
        self.question, self.message, self.tail = widgets.HTML(), widgets.HTML(), widgets.HTML()
        me = weakref.ref(self)
        self.cancel.on_click(_weakly(me, LiveView._ask_to_cancel))
        self.confirm.on_click(_weakly(me, LiveView._do_cancel))
        self.keep.on_click(_weakly(me, LiveView._forget_cancel))
        self.shown.observe(_weakly(me, LiveView._show_other), names="value")
        self.asking = widgets.HBox([self.question, self.confirm, self.keep])
        self.asking.layout.display = "none"
        controls = in_rows([self.shown, self.interval, *([self.cancel] if self._cancel else [])])
        self.place = widgets.VBox()
        shown = _weakly(me, lambda view, _message: view.show_figures())
        self.panel = make_panel([controls, self.asking, self.message, self.place, self.tail], on_shown=shown)

    def _draw(self) -> dict[str, go.Figure]:
        one = self._chosen()
        shown = self.follower.runs.index(one) if one else -1
        figures = dashboard(self.follower, shown=shown, note=self._note)
        for name in ("loss", "tps", "rank_memory"):  # the others take all the room that the page has
            figures[name].update_layout(width=HALF)
        return figures

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        """The panel, and for readers without a kernel a picture of one figure."""
        bundle: dict[str, Any] = self.panel._repr_mimebundle_(**options)
        return bundle | as_picture(self._draw()[self._picture])

    def _renew_figures(self) -> None:
        self._other.clear()
        if self.figures:
            self.figures = self._draw()
            self.place.children[0].show(self.figures)
        one = self._chosen()
        lines = html.escape("\n".join(one.tail)) if one else ""
        self.tail.value = (
            f"<div role='log' aria-label='last log lines'>Last log lines beside the step lines"
            f"<pre style='white-space:pre-wrap;font-size:12px'>{lines}</pre></div>"
        )

    def _renew_menu(self) -> None:
        # A new list only where runs came: setting options closes an open menu.
        names = tuple(one.now.name for one in self.follower.runs)
        if names != tuple(self.shown.options):
            kept = self.shown.value
            self.shown.options = names
            self.shown.value = kept if kept in names else names[-1] if names else None
        one = self._chosen()
        self.cancel.disabled = one is None or one.now.status.state.is_final

    def _chosen(self) -> RunFollower | None:
        return next((one for one in self.follower.runs if one.now.name == self.shown.value), None)

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
        # Schedulers of shared clusters answer slowly and dislike being asked often.
        if time.monotonic() - self._asked_at < ASK_INTERVAL_S:
            return False
        self._asked_at = time.monotonic()
        self._say(self.follower.ask(self._ask))
        return True

    def _say(self, text: str) -> None:
        self.message.value = (
            f"<div role='status' style='{MARKED}'>{html.escape(without_secrets(text))}</div>" if text else ""
        )


SIMULATED_NOTE: Final = "simulated, not measured"


def simulated_run(seconds: float = 20.0) -> RunDir:
    """A run of 256 ranks that never was, replayed from the packaged log into a run directory that goes with Python.

    Three quarters of the steps are there at once; a thread writes the rest in so many seconds, or before this returns
    where they are none.
    """
    folder = tempfile.mkdtemp(prefix="moelab-simulated-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = directory.create(Path(folder), Experiment(**SIMULATED))
    log = gzip.decompress(SIMULATED_LOG.read_bytes())
    rows = read_log([log]).rows[["segment", "step", *VALUE_COLUMNS]]
    records = rows.to_json(orient="records", lines=True, double_precision=15).splitlines(keepends=True)
    places = [0]  # in the log of the first line of each row's step
    for step in rows["step"]:
        places.append(log.index(f"step: {step:2}  loss:".encode(), places[-1]))
    texts = [log[start:end] for start, end in itertools.pairwise([0, *places[2:], len(log)])]

    def write(first: int, end: int) -> None:
        with run.log.open("ab") as file, (run.path / METRICS_FILE).open("a") as metrics:
            file.writelines(texts[first:end])
            metrics.writelines(records[first:end])

    begun = len(records) * 3 // 4
    write(0, begun)
    run.set_status(Status(state=State.RUNNING, attempts=1))

    def replay() -> None:
        for place in range(begun, len(records)):
            time.sleep(seconds / (len(records) - begun))
            write(place, place + 1)
        run.set_status(Status(state=State.COMPLETED, exit_code=0, attempts=2))

    thread = threading.Thread(target=replay, daemon=True)
    thread.start()
    if not seconds:
        thread.join()
    return run


def simulated_view() -> LiveView:
    """A live view of :func:`simulated_run`, whose titles say what it is; no scheduler knows that run."""
    path = simulated_run().path
    return LiveView(
        path,
        ask=lambda runs: [run.status for run in runs],
        interval_s=1.0,
        note=SIMULATED_NOTE,
        picture="step_times",
    )


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
        wait_s = max(held.interval.value, (time.thread_time() - started_s) / MOST_OF_A_CORE)
        del held  # while it waits, only the reader's variable holds the view


def _weakly(view: weakref.ref[LiveView], method: Callable[[LiveView, Any], None]) -> Callable[[Any], None]:
    """A callback that does not keep its view alive: ipywidgets keeps every callback."""

    def call(argument: Any) -> None:
        if held := view():
            method(held, argument)

    return call
