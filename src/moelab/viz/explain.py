"""A traced step: what it is made of, measured beside predicted, and its kernels over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from moelab.errors import BadInput
from moelab.explain.against import Comparison
from moelab.explain.categories import COMMUNICATION
from moelab.explain.explanation import Explanation
from moelab.explain.trace import Rows
from moelab.viz.theme import INK, MUTED, new_figure, plot_text, wrap

_LOOKS = {
    "expert GEMMs": ("#0072B2", ""),
    "other GEMMs": ("#56B4E9", ""),
    "attention": ("#009E73", ""),
    "quantisation": ("#F0E442", ""),
    "permutation and padding": ("#CC79A7", ""),
    "memory-bound": ("#b9c2cc", ""),
    "optimizer": ("#8a96a3", ""),
    "all-to-all": ("#D55E00", "/"),
    "FSDP collectives": ("#E69F00", "/"),
    "imbalance and stragglers": ("#7a4b00", "x"),
    "idle": ("#ffffff", "."),
}
_OTHER = ("#000000", "x")
_LANES = {"all-to-all": "exchange", "FSDP collectives": "FSDP"}


def _look(part: str) -> tuple[str, str]:
    return _LOOKS.get(part, _OTHER)


def step_bars(explained: Mapping[str, Explanation]) -> go.Figure:
    """What each step is made of.

    Args:
        explained: by the name that stands beside the bar.
    """
    shares = {name: one.exposed_communication_ms / one.span_ms for name, one in explained.items()}
    most = max(shares, key=lambda name: shares[name])
    figure = new_figure(
        f"Communication that nothing hides takes up to {shares[most]:.0%} of a step ({most})",
        subtitle="One traced step each, rank 0, ms from the first to the last event on the GPU. An instant "
        "belongs to the first part that runs in it: compute, else communication, else idle time.",
        note="measured",
        height=270 + 56 * len(explained),
    )
    shown = [
        {**{part: ms for part, ms in one.parts_ms.items() if not part.startswith("idle: ")}, "idle": one.idle_ms}
        for one in explained.values()
    ]
    parts = dict.fromkeys(part for one in shown for part in one)
    order = [*(name for name in _LOOKS if name in parts), *(name for name in parts if name not in _LOOKS)]
    labels = ["<br>".join(wrap(name, 26)) for name in explained]
    for part in order:
        color, shape = _look(part)
        figure.add_trace(
            go.Bar(
                y=labels,
                x=[one.get(part, 0.0) for one in shown],
                name=part,
                orientation="h",
                marker={"color": color, "line": {"color": MUTED, "width": 1}, "pattern": {"shape": shape, "size": 5}},
                hovertemplate=f"{part}: %{{x:.1f}} ms<extra></extra>",
            )
        )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(title_text="ms")
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="closest", legend_traceorder="normal")
    return figure.update_layout(legend_y=-0.45, margin_b=150)


def beside_predicted(compared: Comparison) -> go.Figure:
    """Each part of a step, measured and predicted, the largest disagreement first.

    Args:
        compared: of :func:`moelab.explain.against.compare`.
    """
    measured, predicted = (sum(getattr(row, name) for row in compared.rows) for name in ("measured_ms", "predicted_ms"))
    worst = compared.rows[0]
    figure = new_figure(
        f"{worst.part} differs most: {worst.difference_ms:+.1f} ms; {measured:.0f} measured, {predicted:.0f} predicted",
        subtitle="One traced step, rank 0, by part. Idle time of the GPU is host and waiting; barriers that ranks "
        "meet at because they are traced are left out.",
        note="measured, and derived by the projection",
        height=140 + 44 * len(compared.rows),
    )
    looks = {"measured": ("#0072B2", ""), "predicted": ("#dfe3e8", "/")}
    for name, (color, shape) in looks.items():
        figure.add_trace(
            go.Bar(
                y=[row.part for row in compared.rows],
                x=[getattr(row, f"{name}_ms") for row in compared.rows],
                name=name,
                orientation="h",
                marker={"color": color, "line": {"color": MUTED, "width": 1}, "pattern": {"shape": shape, "size": 5}},
                hovertemplate=f"%{{y}}, {name}: %{{x:.1f}} ms<extra></extra>",
            )
        )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(title_text="ms")
    return figure.update_layout(barmode="group", bargap=0.3, hovermode="closest")


def timeline(explained: Explanation, *, layer: int | None = None, phase: str | None = None) -> go.Figure:
    """Kernels over time in lanes: compute, exchange, FSDP, other communication, and the host; zoom with the mouse.

    Args:
        explained: whose events are drawn.
        layer: whose time is shown, with all that runs in it; the whole step if it is not given.
        phase: ``forward``, ``recompute`` or ``backward`` of it; all of them if it is not given.

    Raises:
        BadInput: if the trace does not tell layers, or has no such layer or pass.
    """
    rows, labels = explained.timeline, explained.labels
    first, last = 0.0, explained.span_ms
    if layer is not None:
        chosen = rows["layer"] == layer
        if phase is not None:
            chosen &= rows["phase"] == labels["phase"].index(phase)
        chosen &= np.isin(
            rows["part"], [labels["part"].index(part) for part in ("other GEMMs", "attention", "expert GEMMs")]
        )
        if not chosen.any():
            there = ", ".join(map(str, explained.layers_ms)) or "none, as no annotation of FSDP names them"
            raise BadInput(f"layer {layer}{f', {phase},' if phase else ''} is not in this trace; layers: {there}")
        first, last = float(rows["start"][chosen].min()), float(rows["end"][chosen].max())
    shown = rows[(rows["end"] >= first) & (rows["start"] <= last)]
    what = f"Layer {layer}{f', {phase}' if phase else ''}" if layer is not None else "The step"
    busy = float((shown["end"] - shown["start"]).sum())
    figure = new_figure(
        f"{what}: {last - first:.1f} ms, in which kernels of {busy:.1f} ms run",
        subtitle="One traced step, ms after its first event. Each line is a kernel; drag to zoom, double-click to go "
        "back. host: calls that wait for the GPU (dark) and calls that launch (light).",
        note="measured",
        height=430,
    )
    for part in dict.fromkeys(labels["part"]):
        of_part = shown[shown["part"] == labels["part"].index(part)]
        lane = _LANES.get(part, "other communication" if part in COMMUNICATION else "compute")
        _draw(figure, of_part, lane, part, _look(part)[0] if part != "memory-bound" else "#8a96a3", labels["name"])
    host = explained.host_timeline
    host = host[(host["end"] >= first) & (host["start"] <= last)]
    _draw(figure, host[host["waits"] == 1], "host", "host waits", INK, labels["name"])
    _draw(figure, host[host["waits"] == 0], "host", "host launches", "#b9c2cc", labels["name"])
    figure.update_xaxes(title_text="ms after the first event", range=[first, last])
    figure.update_yaxes(
        categoryorder="array", categoryarray=["host", "other communication", "FSDP", "exchange", "compute"]
    )
    figure.update_yaxes(ticks="", showgrid=False, fixedrange=True)
    return figure.update_layout(hovermode="closest", dragmode="zoom")


def _draw(figure: go.Figure, rows: Rows, lane: str, name: str, color: str, names: Sequence[str]) -> None:
    """Intervals as thick lines of one trace."""
    if not len(rows):
        return
    gap = np.full(len(rows), np.nan)
    x = np.stack([rows["start"], rows["end"], gap], axis=1).ravel()
    texts = [plot_text(f"{names[row['name']][:80]}: {row['end'] - row['start']:.3f} ms") for row in rows]
    figure.add_trace(
        go.Scatter(
            x=x,
            y=[lane] * len(x),
            text=np.repeat(texts, 3),
            mode="lines",
            line={"color": color, "width": 22},
            name=name,
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    )
