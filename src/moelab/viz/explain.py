"""Traced steps: what they are made of, what is hidden and idle, rates, measured beside predicted, kernels over time.

Steps are given by the name that stands beside their bars; ``replayed`` says that their traces came with the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from moelab.traces.against import Comparison
from moelab.traces.categories import COMMUNICATION, STRAGGLERS
from moelab.traces.explanation import Explanation, stretch_of
from moelab.viz.draw import Look, bar_rows, legend_below
from moelab.viz.theme import OTHER, WIDE, new_figure, plot_text, wrap

TRACING = "barriers of tracing"
_LOOKS: Mapping[str, Look] = {
    "expert GEMMs": ("#0072B2", ""),
    "other GEMMs": ("#56B4E9", ""),
    "attention": ("#009E73", ""),
    "quantisation": ("#F0E442", ""),
    "permutation and padding": ("#CC79A7", ""),
    "memory-bound": ("#b9c2cc", ""),
    "optimizer": ("#8a96a3", ""),
    "all-to-all": ("#D55E00", "/"),
    "FSDP collectives": ("#E69F00", "/"),
    STRAGGLERS: ("#7a4b00", "x"),
    "idle": ("white", "."),
    TRACING: ("#d0d0d0", "x"),
}
_OTHER: Look = ("#000000", "x")
_LANES = {"all-to-all": "exchange", "FSDP collectives": "FSDP"}
MOST_BARS = 800
"""Of one part of a timeline; the longest are drawn."""


def step_bars(explained: Mapping[str, Explanation], *, replayed: bool = False) -> go.Figure:
    """What each step is made of."""
    shown = []
    for one in explained.values():
        parts_ms = {part: ms for part, ms in one.parts_ms.items() if not part.startswith("idle: ")}
        if one.tracing_ms:
            parts_ms |= {STRAGGLERS: parts_ms[STRAGGLERS] - one.tracing_ms, TRACING: one.tracing_ms}
        shown.append({**parts_ms, "idle": one.idle_ms})
    # Parts stand in one order in every figure, so that steps can be compared by colour and place.
    order = dict.fromkeys([*_LOOKS, *(part for one in shown for part in one)])
    return bar_rows(
        "What a traced step is made of",
        _labels(explained),
        {
            part: ([one.get(part, 0.0) for one in shown], _LOOKS.get(part, _OTHER))
            for part in order
            if any(part in one for one in shown)
        },
        "ms",
        unit=":.1f ms",
        subtitle=f"One traced step each, {_ranks(explained)}, from the first to the last event. An instant belongs "
        f"to the first part that runs in it: compute, else communication, else idle time.",
        note=_known(replayed),
        row_px=50,
        width=WIDE,
    )


def answer_table(explained: Mapping[str, Explanation]) -> pd.DataFrame:
    """Each step's time in milliseconds, its shares in percent, and what to look at first; no barriers of tracing."""
    rows = []
    for name, one in explained.items():
        first, lost_ms = one.longest_loss
        look = f"{first}: {lost_ms:.1f} ms" if lost_ms else "nothing is lost"
        rows.append((name, one.step_ms, *(100 * share for share in one.step_shares), look))
    headings = ["step", "time (ms)", "compute (%)", "exposed communication (%)", "idle (%)", "look first at"]
    return pd.DataFrame(rows, columns=headings).round(1)


def beside_predicted(compared: Comparison, *, replayed: bool = False) -> go.Figure:
    """Each part of a step, measured and predicted, the largest disagreement first."""
    measured, predicted = compared.sums_ms
    return bar_rows(
        f"A step by part: {measured:.0f} ms measured, {predicted:.0f} predicted",
        [row.part for row in compared.rows],
        {
            "measured": ([row.measured_ms for row in compared.rows], ("#0072B2", "")),
            "predicted": ([row.predicted_ms for row in compared.rows], (OTHER, "/")),
        },
        "ms",
        unit=":.1f ms",
        grouped=True,
        subtitle="One traced step, the largest disagreement first. Idle time of the GPU is host and waiting; barriers "
        "that ranks meet at because they are traced are left out.",
        note=f"{_known(replayed)}, and derived by the projection",
    )


def timeline(
    explained: Explanation, *, layer: int | None = None, phase: str | None = None, replayed: bool = False
) -> go.Figure:
    """Kernels over time in lanes: compute, exchange, FSDP, other communication, and the host; zoom with the mouse.

    Args:
        explained: whose events are drawn; of each part the longest :data:`MOST_BARS`.
        layer: whose time is shown, with all that runs in it; the whole step if it is not given.
        phase: ``forward``, ``recompute`` or ``backward`` of it; all of them if it is not given.
        replayed: as above.

    Raises:
        BadInput: if the trace does not tell layers, or has no such layer or pass.
    """
    stretch, labels = stretch_of(explained, layer=layer, phase=phase), explained.labels
    events, host = stretch.events, stretch.host
    drawn = {
        part: (
            _LANES.get(part, "other communication" if part in COMMUNICATION else "compute"),
            _LOOKS.get(part, _OTHER)[0],
            events[events["part"] == place],
        )
        for place, part in enumerate(labels["part"])
    }
    # Hosts launch long before the GPU runs: both lanes share the clock of the trace.
    drawn["host launches"] = ("host", "#b9c2cc", host[host["waits"] == 0])
    drawn["host waits"] = ("host", "#4a5663", host[host["waits"] == 1])
    what = f"Layer {layer}{f', {phase}' if phase else ''}" if layer is not None else "The step"
    left_out = sum(max(0, len(of_part) - MOST_BARS) for _, _, of_part in drawn.values())
    figure = new_figure(
        f"{what}: {stretch.last_ms - stretch.first_ms:.1f} ms, {stretch.compute_ms:.1f} of compute, "
        f"{stretch.exposed_ms:.1f} of exposed communication, {stretch.idle_ms:.1f} idle",
        subtitle="One traced step, ms after its first event. Each bar is a kernel, or a call of the host that launches "
        "(light) or waits (dark); drag to zoom, double-click to go back."
        + (f" The {left_out:,} shortest are not drawn." if left_out else ""),
        note=_known(replayed),
        height=360,
        width=WIDE,
    )
    for name, (lane, color, of_part) in drawn.items():
        if not len(of_part):
            continue
        took = of_part["end"] - of_part["start"]
        # In the order of the events again, so that plotly draws later bars over earlier ones.
        longest = np.sort(np.argsort(-took, kind="stable")[:MOST_BARS])
        figure.add_bar(
            base=of_part["start"][longest].round(4),
            x=took[longest].round(4),
            y=[lane] * len(longest),
            # Names of templates have hundreds of characters, and each event carries its own.
            text=[plot_text(labels["name"][row][:60]) for row in of_part["name"][longest]],
            textposition="none",
            orientation="h",
            marker={"color": color, "line": {"width": 0}},
            name=name,
            hovertemplate="%{text}: %{x:.3f} ms<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="ms after the first event", range=[stretch.first_ms, stretch.last_ms])
    lanes = ["host", "other communication", "FSDP", "exchange", "compute"]
    figure.update_yaxes(categoryorder="array", categoryarray=lanes, ticks="", showgrid=False, fixedrange=True)
    return legend_below(figure.update_layout(barmode="overlay", bargap=0.25, dragmode="zoom"))


def _known(replayed: bool) -> str:
    return "replayed: measured on H200s" if replayed else "measured"


def _ranks(explained: Mapping[str, Explanation]) -> str:
    ranks = sorted({one.rank for one in explained.values() if one.rank is not None})
    return f"rank {', '.join(map(str, ranks))}" if ranks else "of one rank"


def _labels(names: Iterable[str]) -> list[str]:
    return [wrap(name, 26) for name in names]
