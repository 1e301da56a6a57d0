"""The figures of a live view: where the runs are, their loss, throughput and memory, and the step times of all ranks.

Each is drawn from what a :class:`~moelab.runs.follow.StudyFollower` has read, and the same functions serve the widget
and a static notebook. A line has at most :data:`MOST_POINTS` points, so that a run of a hundred thousand steps is as
quick to draw as one of a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.analysis.arms import arm_label
from moelab.analysis.published import SOURCE, THROUGHPUT, THROUGHPUT_SETUP
from moelab.runs.follow import RankTable, RunNow, StudyFollower, format_seconds
from moelab.runs.status import State
from moelab.runs.stragglers import slow_steps
from moelab.viz.theme import INK, WARNING, arm_styles, new_figure, plot_text

MOST_POINTS: Final = 500
EVEN_GIB: Final = 0.05
_STATE_COLORS: Mapping[State, str] = {
    State.PREPARED: "#BBBBBB",
    State.SUBMITTED: "#F0E442",
    State.RUNNING: "#56B4E9",
    State.COMPLETED: "#009E73",
    State.FAILED: "#D55E00",
    State.CANCELLED: "#CC79A7",
    State.UNKNOWN: "#BBBBBB",
}
_SECONDS: Final = [[0.0, "#f7fbff"], [0.5, "#56B4E9"], [1.0, "#08306b"]]
_UNKNOWN_CELL: Final = "#eeeeee"


def dashboard(follower: StudyFollower, *, shown: int = -1) -> dict[str, go.Figure]:
    """All figures of what was read so far, by name: ``states, loss, tps, memory, step_times, rank_memory``.

    Args:
        follower: polled before; without runs its figures say so.
        shown: index of the run whose ranks are drawn.
    """
    rows = follower.rows
    one = follower.runs[shown] if follower.runs else None
    ranks, name = (one.rank_table, label(one.now)) if one else (RankTable.empty(), "no run yet")
    model = {run.model for run in follower.runs}
    return {
        "states": run_states([run.now for run in follower.runs]),
        "loss": loss_now(rows),
        "tps": tps_now(rows, model=model.pop() if len(model) == 1 else ""),
        "memory": memory_now(rows),
        "step_times": rank_step_times(ranks, name=name),
        "rank_memory": rank_memory(ranks, name=name),
    }


def run_states(runs: Sequence[RunNow]) -> go.Figure:
    """A bar a run: the part of its steps that is trained, in the colour of its state, which is also written.

    Args:
        runs: in the order in which they are listed.
    """
    counts = {state: sum(run.status.state is state for run in runs) for state in State}
    finding = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "No run yet"
    figure = new_figure(finding, subtitle="Trained part of the planned steps.", height=150 + 44 * max(1, len(runs)))
    for run in runs:
        part = run.step / run.steps if run.steps else 0.0
        name, color = plot_text(label(run)), _STATE_COLORS[run.status.state]
        bar = go.Bar(x=[part], y=[name], orientation="h", marker_color=color, name=name)
        figure.add_trace(bar.update(hovertemplate=f"{plot_text(run.name)}<extra></extra>"))
        text = f"<b>{run.status.state}</b> · {plot_text(' · '.join(_details(run)))}"
        figure.add_annotation(text=text, x=0.01, y=name, showarrow=False, xanchor="left", font_size=13)
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_layout(showlegend=False, barmode="overlay", hovermode="closest", uirevision="live")


def loss_now(rows: pd.DataFrame) -> go.Figure:
    """Loss over steps, a line a run, as it was logged.

    Args:
        rows: metrics table of all runs, a step of each once.
    """
    figure = _lines(rows, "loss", "loss (nats per token)", "{:.3f} nats per token")
    return figure.update_yaxes(tickformat=".4~g")


def tps_now(rows: pd.DataFrame, *, model: str) -> go.Figure:
    """Tokens per second per rank, which is a GPU or a process; beside runs of the 671B the published levels, as quoted.

    Args:
        rows: metrics table of all runs.
        model: that all runs train; empty if they train several.
    """
    is_published = model == THROUGHPUT_SETUP.model
    quoted = f" Horizontal lines: quoted ({SOURCE})." if is_published else ""
    figure = _lines(rows, "tps", "tokens/s per rank", "{:,.0f} tokens/s per rank", more=quoted)
    if is_published:
        styles = arm_styles([row.arm for row in THROUGHPUT])
        for row in THROUGHPUT:
            _draw_level(figure, row.tps, f"quoted {row.tps:,.0f}: {styles[row.arm].label}", styles[row.arm].color)
    return figure.update_yaxes(tickformat=",", rangemode="tozero")


def memory_now(rows: pd.DataFrame) -> go.Figure:
    """Reserved memory of the fullest rank over steps, and the memory that a GPU has.

    Args:
        rows: metrics table of all runs.
    """
    figure = _lines(rows, "memory_gib", "GiB on the fullest rank", "{:.1f} GiB")
    known = rows[rows["memory_pct"] > 0]
    if len(known):  # of the fullest row, where two printed decimals tell most
        fullest = known.sort_values("memory_pct").iloc[-1]
        capacity = float(fullest["memory_gib"] / fullest["memory_pct"] * 100)
        _draw_level(figure, capacity, f"{capacity:.0f} GiB: all of it (derived from the percentage)", WARNING)
    return figure.update_yaxes(rangemode="tozero")


def rank_step_times(table: RankTable, *, name: str) -> go.Figure:
    """Step time of every rank at its newest steps, as a map of ranks by steps.

    Args:
        table: of one run.
        name: of the run, in words.
    """
    seconds = table.step_time_s
    known, heard = seconds[np.isfinite(seconds)], np.isfinite(seconds).any(axis=0).sum()
    most = min(float(known.max()), 2 * float(np.median(known))) if len(known) else math.nan
    clipped = f"; darkest from {most:.3g} s" if len(known) and known.max() > most else ""
    subtitle = (
        f"Measured, {name}: seconds a step between a rank's own step lines{clipped}; {heard} of {seconds.shape[1]} "
        "ranks print. A step ends for all ranks together: one slow rank darkens the whole column."
    )
    figure = new_figure(_step_time_finding(table), subtitle=subtitle, height=460)
    scale = {"title": {"text": "s a step", "side": "right"}, "thickness": 14}
    cells = {"z": seconds.T, "x": [f"{step}" for step in table.steps], "y": np.arange(seconds.shape[1])}
    hover = "step %{x}, rank %{y}: %{z:.4g} s<extra></extra>"
    colors: dict[str, Any] = {"colorscale": _SECONDS, "colorbar": scale}
    colors |= {"zmin": float(known.min()), "zmax": most} if len(known) else {}
    figure.add_trace(go.Heatmap(**cells, **colors, hovertemplate=hover, hoverongaps=False))
    figure.update_xaxes(title_text="step", type="category", showgrid=False, nticks=12)
    tick = max(1, seconds.shape[1] // 8)
    figure.update_yaxes(title_text="global rank", showgrid=False, autorange="reversed", dtick=tick, tick0=0)
    return figure.update_layout(hovermode="closest", plot_bgcolor=_UNKNOWN_CELL, uirevision="live")


def rank_memory(table: RankTable, *, name: str) -> go.Figure:
    """Reserved memory of every rank at its newest step.

    Args:
        table: of one run.
        name: of the run, in words.
    """
    known = np.flatnonzero(np.isfinite(table.memory_gib))
    gib = table.memory_gib[known]
    subtitle = f"Measured, {name}: reserved at the newest step; {len(known)} of {len(table.memory_gib)} ranks print."
    figure = new_figure(_memory_finding(known, gib), subtitle=subtitle, height=360)
    line = {"color": "#0072B2", "width": 1.5, "shape": "hvh"}
    hover = "rank %{x}: %{y:.2f} GiB<extra></extra>"
    figure.add_trace(go.Scatter(x=known, y=gib, mode="lines+markers", line=line, marker_size=4, hovertemplate=hover))
    figure.update_xaxes(title_text="global rank", dtick=max(1, len(table.memory_gib) // 8))
    figure.update_yaxes(title_text="GiB", rangemode="tozero")
    return figure.update_layout(showlegend=False, hovermode="closest", uirevision="live")


def _lines(rows: pd.DataFrame, column: str, title: str, value: str, *, more: str = "") -> go.Figure:
    """A line a run; seeds of an arm share colour and dash and are told apart by their marker's fill and the legend."""
    known = rows[rows[column].notna()]
    count = known["run"].nunique()
    newest = "; the title tells the newest" if count > 1 else ""
    subtitle = f"Measured, as logged, unsmoothed; n = {count} run{'s' * (count != 1)}{newest}.{more}"
    figure = new_figure(_line_finding(known, column, value), subtitle=subtitle)
    styles = arm_styles(known["arm"].unique())
    for _, rows_of_run in known.groupby("run", sort=True):
        run, style = thinned(rows_of_run), styles[str(rows_of_run["arm"].iloc[0])]
        name = f"{style.label}, seed {run['seed'].iloc[0]}"
        figure.add_scatter(
            x=run["step"].to_numpy(dtype=float),
            y=run[column].to_numpy(dtype=float),
            mode="lines+markers",
            name=name,
            line={"color": style.color, "dash": style.dash, "width": 2},
            marker={"symbol": style.symbol, "size": 7 if len(run) <= 30 else 1, "color": style.color},
            hovertemplate=f"{name}<br>step %{{x}}: %{{y:.6~g}}<extra></extra>",
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=title)
    return figure.update_layout(uirevision="live", hovermode="closest")


def thinned(run: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`MOST_POINTS` rows at even distances, the last always among them."""
    stride = math.ceil(len(run) / MOST_POINTS)
    return run.iloc[(len(run) - 1) % stride :: stride] if stride > 1 else run


def _draw_level(figure: go.Figure, level: float, text: str, color: str) -> None:
    """A horizontal line with its words above it; as a trace, so that the axis reaches it."""
    across = {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": level, "y1": level}
    figure.add_shape(line={"color": color, "width": 1.5, "dash": "dot"}, **across)
    words = {"text": text, "font": {"size": 12, "color": INK}, "showarrow": False, "bgcolor": "rgba(255,255,255,0.75)"}
    figure.add_annotation(x=0, xref="x domain", xanchor="left", y=level, yanchor="bottom", **words)
    reach = {"x": [None], "y": [level], "mode": "markers", "showlegend": False, "hoverinfo": "skip"}
    figure.add_trace(go.Scatter(**reach))


def _line_finding(known: pd.DataFrame, column: str, value: str) -> str:
    if known.empty:
        return "Nothing logged yet"
    last = known.groupby("run", sort=True).tail(1)
    newest = last.sort_values("time", na_position="first").iloc[-1]
    return f"{arm_label(str(newest['arm']))} is at {value.format(newest[column])}, step {newest['step']:,}"


def _step_time_finding(table: RankTable) -> str:
    seconds = table.step_time_s
    known = seconds[np.isfinite(seconds)]
    if not len(known):
        return "No rank has printed two steps yet"
    slow = slow_steps(table.steps, seconds)
    typical = f"A step takes {np.median(known):.3g} s"
    if not slow:
        return f"{typical}; none of the newest {len(table.steps)} stands out"
    worst = max(slow, key=lambda step: slow[step])
    return f"{typical}; step {worst:,} took {100 * slow[worst]:.0f} % longer"


def _memory_finding(ranks: np.ndarray[Any, Any], gib: np.ndarray[Any, Any]) -> str:
    if not len(gib):
        return "No rank has printed a step yet"
    if gib.max() - gib.min() < EVEN_GIB:
        return f"Every rank that prints holds {gib.max():.1f} GiB"
    low, high = (f"rank {ranks[index]} with {gib[index]:.1f} GiB" for index in (gib.argmin(), gib.argmax()))
    return f"Fullest is {high}, emptiest {low}"


def label(run: RunNow) -> str:
    """Arm and seed of a run in words."""
    return arm_label(run.arm) if run.seed is None else f"{arm_label(run.arm)}, seed {run.seed}"


def _details(run: RunNow) -> Iterator[str]:
    yield f"step {run.step:,} of {run.steps:,}" if run.steps else f"step {run.step:,}"
    if run.segments > 1:
        yield f"{run.segments} launches"
    if math.isfinite(run.left_s):
        yield f"about {format_seconds(run.left_s)} left"
    if run.status.reason:
        yield run.status.reason if len(run.status.reason) <= 60 else f"{run.status.reason[:59]}…"
