"""How evenly a router loads its experts over training: the busiest expert, the busiest rank, experts without tokens."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from moelab.runs.expert_load import ExpertLoad
from moelab.viz.draw import panels
from moelab.viz.theme import INK, MUTED, WARNING


def expert_load_figure(load: ExpertLoad, *, ep: int, name: str) -> go.Figure:
    """Load of a run's experts over its steps, in three panels.

    Args:
        load: of the run.
        ep: ranks that share the experts out.
        name: of the run, in words.

    Raises:
        BadInput: if ``ep`` does not divide the experts.
    """
    busiest_SL, ranks_SL = load.busiest_expert_SL, load.busiest_rank_SL(ep)
    told, steps = load.to_json(), load.steps
    count = load.late_LE.size
    dead = f"{load.dead_experts} of {count} experts are dead" if load.dead_experts else "no expert is dead"
    figure = panels(
        f"The busiest expert gets {told['busiest_expert_over_mean']:.1f} × its layer's mean at the end; {dead}",
        ["busiest expert, × its layer's mean", f"busiest of {ep} ranks, × their mean", "experts without a token"],
        subtitle=f"{name}; {len(steps)} recorded steps, tokens of all ranks. The title is of the last fifth of them: "
        "dead experts got no token in it.",
        height=340,
        spacing=0.14,
    )
    cells = go.Heatmap(
        x=steps,
        y=[str(layer) for layer in load.layers],
        z=np.round(busiest_SL.T, 3),
        colorscale="Blues",
        zmin=1,
        colorbar={"thickness": 8, "x": 0.245, "xpad": 2},
        hovertemplate="step %{x}, layer %{y}: %{z:.2f} × the mean<extra></extra>",
    )
    figure.add_trace(cells, row=1, col=1)
    curves = {
        "worst layer": (ranks_SL.max(axis=1), {"color": WARNING, "dash": "solid"}),
        "median layer": (np.median(ranks_SL, axis=1), {"color": INK, "dash": "dash"}),
    }
    for label, (values, line) in curves.items():
        hover = f"{label}: %{{y:.2f}} × the mean of the ranks<extra></extra>"
        trace = go.Scatter(x=steps, y=values, name=label, mode="lines", line=line, hovertemplate=hover)
        figure.add_trace(trace, row=1, col=2)
    idle = 100 * (load.tokens_SLE == 0).mean(axis=(1, 2))
    hover = "step %{x}: %{y:.1f} %<extra></extra>"
    line = {"color": MUTED, "dash": "dot"}
    trace = go.Scatter(x=steps, y=idle, mode="lines", line=line, showlegend=False, hovertemplate=hover)
    figure.add_trace(trace, row=1, col=3)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="layer", type="category", autorange="reversed", showgrid=False, col=1)
    figure.update_yaxes(title_text="× mean", rangemode="tozero", col=2)
    figure.update_yaxes(title_text="% of all experts", range=[0, max(5.0, 1.1 * float(idle.max()))], col=3)
    return figure.update_layout(hovermode="closest")
