"""DeepEP drawn: the stages of its hierarchical mode, its published bandwidths, and what memory the gather costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moelab.projection import ExpertPlacement, RoutingModel
from moelab.projection.exchange import QuotedBandwidth
from moelab.projection.traffic import Pass
from moelab.viz.theme import INK, WARNING, new_figure
from moelab.viz.token_map import Hop, draw_wire_legend, hops, one_token, place_panel

NIC_GB_S = 50.0
"""One 400 Gb/s network card for each GPU, as all quoted systems have (NVIDIA ConnectX-7 datasheet)."""
_PASS_COLORS = {"copy out": "#0072B2", "gather": "#56B4E9", "pad": "#D55E00", "quantise": "#E69F00"}


def forwarding(
    routing: RoutingModel, placement: ExpertPlacement, *, sender: int = 0, token: int = 0, seed: int = 0
) -> go.Figure:
    """The hierarchical mode step by step: to each node once, on inside the node, and the way back.

    Args:
        routing: how tokens choose experts.
        placement: where the experts are.
        sender: rank that has the token.
        token: which of that rank's tokens.
        seed: of the draw.

    Raises:
        BadInput: if there is no such rank, or the routing does not fit.
    """
    experts, held, touched = one_token(routing, placement, sender=sender, token=token, seed=seed)
    L = placement.local_ranks
    sent = hops(experts, placement, "deepep_hybrid", sender=sender)
    far = tuple(hop for hop in sent if hop.sender // L != hop.receiver // L)
    near = tuple(hop for hop in sent if hop not in far)
    steps: tuple[tuple[str, Sequence[Hop], bool], ...] = (
        (f"<b>1 dispatch</b><br>{len(far)} × network, to its own place", far, False),
        (f"<b>2 forward</b><br>{len(near)} × NVLink, to the experts", near, False),
        (f"<b>3 combine</b><br>sums: {len(near)} × NVLink, {len(far)} × network", sent, True),
    )
    figure = new_figure(
        _forwarding_finding(len(experts), len(far)),
        subtitle=f"Token {token} of rank {sender}. On the way back each node adds up its experts' outputs, so that one "
        "row crosses the network; gradients take the same ways in the other order.",
        note="one simulated token",
        height=150 + 56 * max(2, len(touched.nodes)),
    )
    figure.update_layout(margin_t=figure.layout.margin.t + 40, height=figure.layout.height + 40)
    for index, (title, drawn, back) in enumerate(steps):
        axes = place_panel(figure, index, len(steps), title, L, touched.height)
        touched.draw(figure, held, drawn, sender=sender, axes=axes, back=back)
    draw_wire_legend(figure)
    return figure.update_layout(hovermode="closest", margin={"l": 10, "r": 10, "b": 40}, legend={"y": -0.02})


def _forwarding_finding(experts: int, far: int) -> str:
    if far == 0:
        return f"{experts} experts, all reached inside the node"
    copies = "copy" if far == 1 else "copies"
    return f"{experts} experts, {far} {copies} over the network: nodes forward among themselves"


def quoted_bandwidths(rows: Sequence[QuotedBandwidth]) -> go.Figure:
    """Published network bandwidths, as they are counted and as the network card sees them.

    Args:
        rows: those whose bottleneck is the network are drawn.
    """
    drawn = [row for row in rows if row.wire == "network"]
    seen = [row.on_wire_gb_s(row.dispatch_gb_s) for row in drawn]
    figure = new_figure(
        f"A quoted figure above {NIC_GB_S:.0f} GB/s is {min(seen):.0f} to {max(seen):.0f} GB/s on the wire",
        subtitle="Dispatch bandwidth. Light: as DeepEP counts it, a token once for each node, its own node included. "
        "Full: the share 1 − 1/N that leaves the node (derived). SMs: streaming multiprocessors used.",
        note="quoted from DeepEP's README and docs/legacy.md",
        height=430,
    )
    labels = [
        f"{row.version}, {row.gpu}<br>EP 8×{row.nodes}<br>{f'{row.sms} SMs' if row.sms else '–'}" for row in drawn
    ]
    looks = (
        ("logical, quoted", [row.dispatch_gb_s for row in drawn], "#a9cfe8"),
        ("on the network, derived", seen, "#0072B2"),
    )
    for name, values, color in looks:
        light = color != "#0072B2"
        texts = [f"{value:.0f}" for value in values]
        bar = go.Bar(x=labels, y=values, name=name, marker_color=color, text=texts, textposition="inside")
        bar.update(insidetextanchor="start", textangle=0, textfont={"size": 13, "color": INK if light else "white"})
        figure.add_trace(bar.update(hovertemplate="%{y:.1f} GB/s"))
    figure.add_hline(y=NIC_GB_S, line={"color": WARNING, "width": 1.5, "dash": "dash"})
    figure.add_annotation(
        text="400 Gb/s<br>card",
        x=1,
        xref="x domain",
        xanchor="left",
        xshift=6,
        y=NIC_GB_S,
        align="left",
        showarrow=False,
        font={"size": 13, "color": WARNING},
    )
    figure.update_layout(margin_r=80)
    figure.update_yaxes(title_text="GB/s per GPU", range=[0, 1.05 * max(row.dispatch_gb_s for row in drawn)])
    figure.update_xaxes(showgrid=False, ticks="", tickangle=0, tickfont_size=12)
    return figure.update_layout(barmode="group", bargap=0.3)


def gather_bars(paths: Mapping[str, Sequence[Pass]], *, hbm_tb_s: float, words: str) -> go.Figure:
    """Bytes that each path passes over memory before the grouped GEMM, pass by pass.

    Args:
        paths: of :func:`moelab.projection.traffic.gather_passes`.
        hbm_tb_s: bandwidth of the GPU's memory, for the time beside each bar.
        words: what the sizes are, for the subtitle.
    """
    totals = {name: sum(one.moved_bytes for one in passes) for name, passes in paths.items()}
    names = list(paths)[::-1]
    most, least = max(totals.values()), min(totals.values())
    figure = new_figure(
        f"From the wire to the experts: {most / 1e9:.2f} GB over memory pass by pass, {least / 1e9:.2f} GB in one",
        subtitle=f"Read and written in one layer's forward dispatch: {words}. At the end: time at {hbm_tb_s:g} TB/s.",
        note="derived, not measured",
        height=380,
    )
    for step, color in _PASS_COLORS.items():
        amounts = [sum(one.moved_bytes for one in paths[name] if one.name == step) / 1e9 for name in names]
        bar = go.Bar(x=amounts, y=names, name=step, orientation="h", marker_color=color)
        figure.add_trace(bar.update(hovertemplate=f"{step}: %{{x:.2f}} GB<extra></extra>"))
    for name in names:
        figure.add_annotation(
            text=f"<b>{totals[name] / 1e9:.2f} GB</b>, {totals[name] / hbm_tb_s / 1e9:.2f} ms",
            x=totals[name] / 1e9,
            y=name,
            xanchor="left",
            xshift=6,
            showarrow=False,
            font={"size": 13, "color": INK},
        )
    figure.update_xaxes(title_text="GB read and written", range=[0, 1.35 * most / 1e9])
    figure.update_yaxes(
        showgrid=False,
        ticks="",
        ticklabelstandoff=6,
        tickvals=names,
        ticktext=[name.replace(": ", ":<br>") for name in names],
    )
    return figure.update_layout(barmode="stack", bargap=0.35, hovermode="closest", legend_traceorder="normal")
